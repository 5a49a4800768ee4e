"""What is measured of each implementation, and how a measurement runs: the options that every command shares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashlab.build.parallel import Follow, ignore
from flashlab.core.errors import ParameterError
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels.peers import FEW_ROWS

_CHECKED_SCORES = 1 << 27
"""Scores that a check of a measurement compares with the oracle where there are many measurements."""
_LAYER_SAMPLES = 5
_LAYER_SUSTAINED_S = 0.2
"""Of each layer of `trained` inputs, where a plan has so many."""


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ParameterError(f"{name}: wanted a positive number, got {value!r}")


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ParameterError(f"{name}: wanted 0 or more, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a measurement runs: where its records go, on which GPU, how long it may take, and what it reports to."""

    data: Path = DATA
    """The folder that holds data/<gpu>."""
    device: int = 0
    """CUDA device index."""
    seed: int = 0
    """Of the inputs and of the order of samples."""
    timeout_s: float = 180.0
    """For one step: a compilation and check, a sample."""
    startup_s: float = 300.0
    """For a worker to start."""
    progress: Follow = ignore
    """Called at every step."""
    note: Callable[[str], None] = ignore
    """Called with what is worth a line in a log, such as a ceiling that could not be measured."""
    worker: Sequence[str] = (sys.executable, "-m", "flashlab.measure.worker")
    """The command that starts a worker."""
    resume: bool = False
    """Leave out what is on record of the same code, for whatever can tell: `bench.not_recorded`."""

    def __post_init__(self) -> None:
        _positive(timeout_s=self.timeout_s, startup_s=self.startup_s)
        _not_negative(device=self.device)


OPTIONS = Options()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured of each problem.

    Raises:
        ParameterError: a number that makes no sense.
    """

    samples: int = 40
    """Hot burst samples of each implementation to aim for."""
    min_samples: int = 7
    """What a slow one takes at least."""
    cold_samples: int = 15
    """Cold ones; none where 0."""
    step_samples: int = 0
    """Of a CUDA graph of calls, each behind another kernel; none where 0."""
    cap_s: float = 3.0
    """Host time, in seconds, after which an implementation takes no more than the least number of samples."""
    sustained_seconds: float = 5.0
    """Of continuous calls for each implementation; none where 0."""
    sustained_shapes: tuple[str, ...] | None = (FIRST_SHAPE,)
    """Where they are taken; None: at every problem."""
    sustained_names: tuple[str, ...] | None = None
    """Of which implementations; None: of all."""
    checked_scores: int = 1 << 30
    """Scores of a problem that are compared with the oracle; of a larger one, whole bands of rows (`check.Sample`).

    No more than `_CHECKED_SCORES` on other inputs than normal: a row of many kinds would be mostly oracle.
    """
    lse: bool = False
    """Stages are timed a second time with the log-sum-exp on, interleaved with the rest: some libraries always write
    one. Hot bursts, and the fastest of them sustained."""

    def __post_init__(self) -> None:
        _positive(samples=self.samples, min_samples=self.min_samples, checked_scores=self.checked_scores)
        _not_negative(cold_samples=self.cold_samples, step_samples=self.step_samples)
        _not_negative(cap_s=self.cap_s, sustained_seconds=self.sustained_seconds)

    def checks(self, problem: Problem) -> int:
        """Scores of that problem to compare with the oracle."""
        return self.checked_scores if problem.inputs == NORMAL else min(self.checked_scores, _CHECKED_SCORES)

    def shared(self, layers: int) -> Plan:
        """For each of so many layers, which together cost about what one kind of inputs costs."""
        return replace(
            self,
            samples=min(self.samples, max(_LAYER_SAMPLES, self.samples // layers)),
            min_samples=min(self.min_samples, _LAYER_SAMPLES),
            cold_samples=min(self.cold_samples, max(_LAYER_SAMPLES, self.cold_samples // layers)),
            step_samples=min(self.step_samples, max(_LAYER_SAMPLES, self.step_samples // layers)),
            cap_s=self.cap_s / layers,
            sustained_seconds=min(self.sustained_seconds, max(_LAYER_SUSTAINED_S, self.sustained_seconds / layers)),
            checked_scores=max(1, min(self.checked_scores, _CHECKED_SCORES) // layers),
        )

    def rotates(self, problem: Problem) -> bool:
        """Whether bursts are taken on rotating K and V too: of a few query rows, which read a cache and little else."""
        return problem.q_len < FEW_ROWS and problem.inputs != TRAINED

    def sustains(self, problem: Problem, name: str) -> bool:
        """Whether that implementation is called for seconds at that problem."""
        return (
            self.sustained_seconds > 0
            and (self.sustained_shapes is None or problem.shape in self.sustained_shapes)
            and (self.sustained_names is None or name in self.sustained_names)
        )


PLAN = Plan()
STEP_CALLS = 8
"""In a CUDA graph, at least."""
_BRIEF = Plan(
    samples=15,
    min_samples=5,
    cold_samples=0,
    cap_s=0.5,
    sustained_seconds=1.0,
    sustained_shapes=None,
    checked_scores=_CHECKED_SCORES,
)
BURSTS = Plan(
    samples=15, min_samples=3, cold_samples=0, cap_s=1.0, sustained_seconds=0.0, checked_scores=_CHECKED_SCORES
)
"""Short hot bursts alone."""
PLANS: Mapping[str, Plan] = {
    "quick": replace(_BRIEF, sustained_seconds=0.5),
    "peers": Plan(sustained_shapes=None, checked_scores=1 << 28, lse=True),
    "head_dims": _BRIEF,
    "lengths": BURSTS,
    "claims": Plan(samples=30, cold_samples=0, cap_s=0.4, sustained_seconds=0.0, checked_scores=_CHECKED_SCORES),
    "inputs": replace(_BRIEF, lse=True),
    "offsets": _BRIEF,
    "gqa": _BRIEF,
    "decode": replace(BURSTS, samples=30, cold_samples=10, step_samples=30),
    "fp8": BURSTS,
}
"""Of the suites that want their own; `PLAN` of the others."""


def plan_of(suite: str) -> Plan:
    """How a suite is measured."""
    return PLANS.get(suite, PLAN)
