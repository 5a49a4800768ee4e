"""Options of measurements, shared by all commands: how they run, and what is measured of each implementation."""

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
from flashlab.record.schema import STEADY_S

_CHECKED_SCORES = 1 << 27
"""Scores per check that are compared with the oracle if there are many measurements."""
_LAYER_SAMPLES = 5
_LAYER_SUSTAINED_S = 0.2
"""Minimum number of samples, and of seconds of sustained load, per layer of `trained` inputs."""


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
    """How a measurement runs: destination of records, GPU, time limits and progress reports."""

    data: Path = DATA
    """Folder that contains data/<gpu>."""
    device: int = 0
    """CUDA device index."""
    seed: int = 0
    """Seed of the inputs and of the order of samples."""
    timeout_s: float = 180.0
    """Time limit of one step: a compilation and check, or a sample."""
    startup_s: float = 300.0
    """Time limit for a worker to start."""
    progress: Follow = ignore
    """Called after every step."""
    note: Callable[[str], None] = ignore
    """Called with log messages, e.g. about a ceiling that could not be measured."""
    worker: Sequence[str] = (sys.executable, "-m", "flashlab.measure.worker")
    """Command that starts a worker."""
    resume: bool = False
    """Whether to skip measurements on record for the same code, if supported."""

    def __post_init__(self) -> None:
        _positive(timeout_s=self.timeout_s, startup_s=self.startup_s)
        _not_negative(device=self.device)


OPTIONS = Options()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured of each problem.

    Raises:
        ParameterError: a number is out of range.
    """

    samples: int = 40
    """Target number of hot burst samples per implementation."""
    min_samples: int = 7
    """Minimum number of samples of a slow implementation."""
    cold_samples: int = 15
    """Cold samples; 0 for none."""
    step_samples: int = 0
    """Samples of a CUDA graph of calls, each behind another kernel; 0 for none."""
    cap_s: float = 3.0
    """Host time, in seconds, after which an implementation gets only the minimum number of samples."""
    sustained_seconds: float = 5.0
    """Seconds of continuous calls per implementation, of which less than `STEADY_S` are not shown; 0 for none."""
    sustained_shapes: tuple[str, ...] | None = (FIRST_SHAPE,)
    """Shapes timed under sustained load; None: all."""
    sustained_names: tuple[str, ...] | None = None
    """Implementations timed under sustained load; None: all."""
    checked_scores: int = 1 << 30
    """Scores of a problem that are compared with the oracle; of a larger one, whole bands of rows (`verdict.Sample`).

    At most `_CHECKED_SCORES` on inputs other than normal, because the oracle would dominate the time.
    """
    lse: bool = False
    """Whether stages are also timed with the log-sum-exp, which some libraries always write, interleaved with the rest:
    hot bursts, and the fastest under sustained load."""

    def __post_init__(self) -> None:
        _positive(samples=self.samples, min_samples=self.min_samples, checked_scores=self.checked_scores)
        _not_negative(cold_samples=self.cold_samples, step_samples=self.step_samples)
        _not_negative(cap_s=self.cap_s, sustained_seconds=self.sustained_seconds)

    def checks(self, problem: Problem) -> int:
        """Number of scores of a problem to compare with the oracle."""
        return self.checked_scores if problem.inputs == NORMAL else min(self.checked_scores, _CHECKED_SCORES)

    def shared(self, layers: int) -> Plan:
        """The plan for each of several layers, which together cost about as much as one kind of inputs."""
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
        """Whether bursts also use rotating K and V: for few query rows, which are bound by reading the cache."""
        return problem.q_len < FEW_ROWS and problem.inputs != TRAINED

    def sustains(self, problem: Problem, name: str) -> bool:
        """Whether an implementation is timed under sustained load at a problem."""
        return (
            self.sustained_seconds > 0
            and (self.sustained_shapes is None or problem.shape in self.sustained_shapes)
            and (self.sustained_names is None or name in self.sustained_names)
        )


PLAN = Plan()
STEP_CALLS = 8
"""Minimum number of calls in a CUDA graph."""
_BRIEF = Plan(
    samples=15,
    min_samples=5,
    cold_samples=0,
    cap_s=0.5,
    sustained_seconds=2.0,
    sustained_shapes=None,
    checked_scores=_CHECKED_SCORES,
)
BURSTS = Plan(
    samples=15, min_samples=3, cold_samples=0, cap_s=1.0, sustained_seconds=0.0, checked_scores=_CHECKED_SCORES
)
"""Only short hot bursts."""
PLANS: Mapping[str, Plan] = {
    "quick": replace(_BRIEF, sustained_seconds=STEADY_S),
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
"""Plans of suites that differ from `PLAN`."""


def plan_of(suite: str) -> Plan:
    """Return the plan of a suite."""
    return PLANS.get(suite, PLAN)
