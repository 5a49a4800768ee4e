"""Comparisons within a run: the best stage with the best library at every problem, and errors with a reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.paths import DATA
from flashlab.core.problem import WITHOUT_FEATURES, Problem, Regime, suite
from flashlab.kernels import peers, registry
from flashlab.kernels.peers import BESIDE
from flashlab.query.rows import grouped, sessions
from flashlab.query.select import (
    LADDER,
    Results,
    best_peers,
    call_clock,
    contested,
    fastest_peer,
    fastest_stage,
    held_against,
    highest_rung,
    is_library,
    median_us,
    ordered,
    problem_order,
    rate,
    select,
    speedup,
)
from flashlab.record import store
from flashlab.record.schema import Measurement

NAMED_PEERS = ("fa3", "sdpa_cudnn")
"""The libraries of the ladder's headline claim; `against_peers` also compares with every library."""
FASTEST = ("fa3", "fa4", "sdpa_cudnn")
"""The libraries one of which is the fastest wherever there is much to do: a ratio to the fastest wants all of them."""
REFERENCES = ("fa3", "fa4")
"""The libraries that errors are held against: the second where the wheel of the first lacks the element type."""
RMS_AIM, LARGEST_AIM = 1.1, 1.25
"""Target ratios of a rung's RMS and maximum error to the reference's, on each kind of inputs."""
MAIN = suite("peers")
"""The problems that kinds of inputs are compared at, and their errors."""
LONGER = tuple(problem for problem in suite("inputs") if problem not in MAIN)
"""Longer sequences, at which kinds of inputs are compared too."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A stage and a library of the same run, on one problem in one regime."""

    regime: Regime
    stage: Measurement
    peer: Measurement
    with_lse: Measurement | None = None
    """The stage with the log-sum-exp in the same run; None if not measured."""
    worst_ratio: float | None = None
    """Of `trained` inputs, the least ratio of any layer, there to the library that is the fastest on it; else None."""
    worst_layer: int | None = None
    """Layer of `worst_ratio`."""
    left_out: tuple[str, ...] = ()
    """Those of `FASTEST` that its run has no such time of, though they take the problem and have one elsewhere on
    record at that head dim and element type: with one of them the ratio might be less."""

    @property
    def lowest(self) -> float:
        """The ratio, or that of the worst layer."""
        return min(self.ratio, self.worst_ratio or self.ratio)

    @property
    def run(self) -> str:
        """Run of both rows."""
        return self.stage.run

    @property
    def ratio(self) -> float:
        """Speed-up of the stage over the library, the ratio of medians."""
        return speedup(self.stage, self.peer, self.regime) or math.nan

    @property
    def adjusted_ratio(self) -> float | None:
        """The ratio with the log-sum-exp computed by both or by neither; None if not on record."""
        ours = self.with_lse if self.peer.lse else self.stage
        return None if self.peer.lse is None else speedup(ours, self.peer, self.regime)

    def flat(self) -> dict[str, object]:
        """Both sides and their ratios by name, as `flashlab results --against-peers --json` prints them."""
        sides: dict[str, object] = {
            name: value
            for side, row in (("stage", self.stage), ("peer", self.peer))
            for name, value in (
                (f"best_{side}", row.name),
                (f"{side}_median_us", median_us(row, self.regime)),
                (f"{side}_tflops", rate(row, self.regime)),
                (f"{side}_call_clock_mhz", call_clock(row, self.regime)),
                (f"{side}_percent_of_peak", percent_of_peak(row, self.regime)),
            )
        }
        ratios = {"ratio": self.ratio, "adjusted_ratio": self.adjusted_ratio, "peer_writes_lse": self.peer.lse}
        return sides | ratios | {"worst_ratio": self.worst_ratio, "worst_layer": self.worst_layer}


@dataclass(frozen=True, kw_only=True)
class AgainstPeers:
    """The best stage and the best library on one problem."""

    problem: Problem
    run: str
    """The run that `burst` is of, or the newest where there is none."""
    dirty: bool
    burst: Contest | None
    """The fastest stage against the fastest library of the same element type; None where either has no time."""
    sustained: Contest | None = None
    """Under continuous work, in the newest run that kept the best library busy; None where none did."""
    named: Contest | None = None
    """As `burst`, over the faster of `NAMED_PEERS` alone."""
    named_sustained: Contest | None = None
    """As `sustained`, over the faster of `NAMED_PEERS` alone."""
    reason: str = ""
    """Why there is no ratio; empty if there is one."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that the best of both are of: in bursts and, where there is one, under continuous work."""
        return (self.run, self.sustained.run) if self.sustained else (self.run,)

    def flat(self) -> dict[str, object]:
        """As `flashlab results --against-peers --json` prints it: None where there is nothing to say."""
        problem = self.problem
        burst, sustained, named, named_sustained = (
            contest and contest.flat() for contest in (self.burst, self.sustained, self.named, self.named_sustained)
        )
        return {
            "shape": problem.shape,
            "dtype": problem.dtype,
            "mask": problem.mask,
            "inputs": problem.inputs,
            "run": self.run,
            "sustained_run": self.sustained.run if self.sustained else None,
            "dirty": self.dirty,
            "reason": self.reason,
            "not_timed": list(self.burst.left_out if self.burst else ()),
            "sustained_not_timed": list(self.sustained.left_out if self.sustained else ()),
            **(burst or dict.fromkeys(("best_stage", "best_peer", "ratio", "adjusted_ratio"))),
            "sustained": sustained,
            "against_named": {
                "peers": list(NAMED_PEERS),
                "burst": named,
                "run": self.named.run if self.named else None,
                "sustained": named_sustained,
                "sustained_run": self.named_sustained.run if self.named_sustained else None,
            },
        }


_Second = Mapping[tuple[str, Problem, str], Measurement]
"""Rows with the log-sum-exp on, by run, problem and stage."""
_Able = Mapping[tuple[int, str], set[str]]
"""By head dim and element type, those of `FASTEST` that have a time on record at some problem."""


def percent_of_peak(row: Measurement, regime: Regime = "burst") -> float | None:
    """A row's rate, percent of what the tensor cores do at the clock inside its calls; None where that is not known."""
    tflops = rate(row, regime)
    return row.gpu.tensor_percent(tflops, call_clock(row, regime)) if tflops else None


def _contest(
    rows: Sequence[Measurement], regime: Regime, second: _Second | None = None, able: _Able | None = None
) -> Contest | None:
    stage, peer = fastest_stage(rows, regime), fastest_peer(rows, regime)
    ours = stage.samples_of(regime) if stage else None
    if stage is None or peer is None or ours is None:
        return None
    worst_ratio, worst_layer = None, None
    if stage.problem.inputs == TRAINED:
        libraries = [samples.time_us for row in rows if is_library(row) and (samples := row.samples_of(regime))]
        fastest_us = [min(of_layer) for of_layer in zip(*libraries, strict=True)]
        worst_ratio, worst_layer = min(
            (peer_us / our_us, layer)
            for layer, (peer_us, our_us) in enumerate(zip(fastest_us, ours.time_us, strict=True))
        )
    return Contest(
        regime=regime,
        stage=stage,
        peer=peer,
        with_lse=(second or {}).get((stage.run, stage.problem, stage.name)),
        worst_ratio=worst_ratio,
        worst_layer=worst_layer,
        left_out=_left_out(stage.problem, able or {}, rows, regime),
    )


def against_peers(gpu: str, data: Path = DATA, inputs: Collection[str] = (NORMAL,)) -> tuple[AgainstPeers, ...]:
    """For each problem on these kinds of inputs: our best stage against the best library of the same element type.

    Both rows come from one run, in which they were interleaved, by the rule of `select`. "Best" is of what that run
    timed; where no run has a ratio, the newest is named. Under continuous work, likewise, of runs that kept a library
    busy that is the best in bursts, or within a percent of it, the newest with the highest rung: without such a
    library, a ratio would say too much. (torch's own choice is often cuDNN, and ahead of it or behind by nothing but
    chance.)
    """
    session_of, rows = sessions(gpu, data), store.records(gpu, Measurement, data)
    second = {(row.run, row.problem, row.name): row for row in rows if row.with_lse and row.status == "ok"}
    by_problem = contested(rows, session_of)
    able = _able(row for row in rows if not row.with_lse)
    contests = []
    for problem in sorted((problem for problem in by_problem if problem.inputs in inputs), key=problem_order):
        runs = by_problem[problem]
        chosen = held_against(runs, session_of) or max(runs, key=lambda rows: rows[0].run)
        named = held_against(map(_named, runs), session_of)
        busy = _kept_busy(runs, best_peers(chosen))
        named_busy = _named(_kept_busy(runs, best_peers(named)))
        burst = _contest(chosen, "burst", second, able)
        lacking = "library" if fastest_stage(chosen) else "stage"
        contests.append(
            AgainstPeers(
                problem=problem,
                run=chosen[0].run,
                dirty=any(rows[0].source.dirty for rows in (chosen, busy, named, named_busy) if rows),
                burst=burst,
                sustained=_contest(busy, "sustained", second, able),
                named=_contest(named, "burst", second),
                named_sustained=_contest(named_busy, "sustained", second),
                reason="" if burst else f"no {lacking} has a time in that run",
            )
        )
    return tuple(contests)


def _left_out(problem: Problem, able: _Able, rows: Iterable[Measurement], regime: Regime) -> tuple[str, ...]:
    """Of libraries that take a problem, those without a time among rows; torch's own choice may be cuDNN."""
    timed = {row.name for row in rows if is_library(row) and rate(row, regime)}
    timed |= {"sdpa_cudnn"} if BESIDE in timed else set()
    left_out = able.get((problem.head_dim, problem.dtype), set()) - timed
    return tuple(name for name in FASTEST if name in left_out and not peers.get(name).limits(problem))


def _able(rows: Iterable[Measurement]) -> _Able:
    timed: dict[tuple[int, str], set[str]] = defaultdict(set)
    for row in rows:
        if row.name in FASTEST and rate(row):
            timed[row.problem.head_dim, row.problem.dtype].add(row.name)
    return timed


@dataclass(frozen=True, kw_only=True)
class Featured:
    """A stage on a problem with a window or a soft cap, and what the same run has to compare with."""

    stage: Measurement
    without: Measurement | None
    """The stage without them."""
    peer: Measurement | None
    """The fastest library on the problem; None where none of those that ran takes it."""


def featured(shown: Results) -> tuple[Featured, ...]:
    """Problems with a window or a soft cap, of the run that tried most stages at each; of several, the newest."""
    comparisons = []
    rows = (row for row in select(shown.records, shown.sessions, LADDER) if row.problem.features)
    for problem, of_problem in grouped(rows, lambda row: row.problem).items():
        stage, plain = fastest_stage(of_problem), replace(problem, **WITHOUT_FEATURES)
        if stage is None:
            continue
        same = (row for row in shown.records if (row.run, row.name, row.problem) == (stage.run, stage.name, plain))
        twins = [row for row in same if not row.with_lse]
        comparisons.append(Featured(stage=stage, without=next(iter(twins), None), peer=fastest_peer(of_problem)))
    return tuple(comparisons)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors against float64 of one problem's stages and libraries, all of one run and over the same rows of output."""

    problem: Problem
    run: str
    reference: str
    """The library that the others are held against."""
    errors: Mapping[str, tuple[float, float]]
    """Root-mean-square and largest error, by name, in `ordered` order."""

    def over_reference(self, name: str) -> tuple[float, float]:
        """Both errors of `name` over the reference's; infinite where that has none, 1 where neither has."""
        pairs = zip(self.errors[name], self.errors[self.reference], strict=True)
        rms, largest = (1.0 if a == b else a / b if b else math.inf for a, b in pairs)
        return rms, largest


def accuracy(gpu: str, data: Path = DATA) -> tuple[Accuracy, ...]:
    """The errors at every problem of the sizes of the suite `peers`, on whatever inputs.

    Each is of the newest run that checked a stage of the ladder and one of `REFERENCES` there, since a run compares the
    same rows of all; may be empty.
    """
    shapes = {problem.shape for problem in MAIN}
    every = store.measurements(gpu, data)
    rows = [row for row in every if row.kind == "peer" or row.name in registry.STAGES]
    by_problem: dict[Problem, Accuracy] = {}
    by_run = grouped((row for row in rows if row.problem.shape in shapes), lambda row: (row.run, row.problem))
    for (run, problem), of_run in by_run.items():
        errors = {
            row.name: (row.verdict.overall_rms_error, row.verdict.overall_max_error)
            for row in ordered(of_run)
            if row.verdict and row.verdict.overall_rms_error is not None and row.verdict.overall_max_error is not None
        }
        reference = next((name for name in REFERENCES if name in errors), None)
        if reference and not errors.keys().isdisjoint(registry.STAGES):
            by_problem[problem] = Accuracy(problem=problem, run=run, reference=reference, errors=errors)
    return tuple(by_problem[problem] for problem in sorted(by_problem, key=problem_order))


def _kept_busy(runs: Iterable[list[Measurement]], libraries: set[str]) -> list[Measurement]:
    """The rows of the newest run that kept one of these libraries and the highest rung busy; empty where none did."""
    able = [
        rows
        for rows in runs
        if any(row.name in libraries and row.samples_of("sustained") for row in rows) and _contest(rows, "sustained")
    ]
    return max(able, key=lambda rows: (highest_rung(rows, "sustained"), rows[0].run), default=[])


def _named(rows: Iterable[Measurement]) -> list[Measurement]:
    return [row for row in rows if row.kind == "stage" or row.name in NAMED_PEERS]


@dataclass(frozen=True, kw_only=True)
class Across:
    """One stage or library on one problem, as several GPUs' pages show it."""

    problem: Problem
    name: str
    rows: Mapping[str, Measurement]
    """By GPU, the folder name under data/; those with a burst time."""

    def ratio(self, gpu: str, base: str, regime: Regime = "burst") -> float | None:
        """How many times as fast it is on `gpu` as on `base`; None where one of the two has no such time."""
        return speedup(self.rows.get(gpu), self.rows.get(base), regime)


def across_gpus(everything: Sequence[Results]) -> tuple[Across, ...]:
    """Every stage and library that has a burst time at the same problem on two GPUs or more, in the order of pages."""
    by_problem: dict[Problem, dict[str, dict[str, Measurement]]] = {}
    for shown in everything:
        for problem, rows in shown.problems.items():
            for row in rows:
                if row.samples_of():
                    by_problem.setdefault(problem, {}).setdefault(row.name, {})[shown.gpu] = row
    return tuple(
        Across(problem=problem, name=name, rows=by_name[name])
        for problem, by_name in sorted(by_problem.items(), key=lambda item: problem_order(item[0]))
        for name in dict.fromkeys(
            row.name for row in ordered(row for rows in by_name.values() for row in rows.values())
        )
        if len(by_name[name]) > 1
    )


def order_across(compared: Iterable[Across], gpu: str, base: str) -> tuple[int, tuple[tuple[Across, Across], ...]]:
    """How many pairs of stages both GPUs timed at one problem, each with the same tunables, and those whose order on
    `gpu` is not that on `base`."""

    def same_code(across: Across) -> bool:
        ours, theirs = (across.rows[where].cubin for where in (gpu, base))
        return (ours and ours.parameters) == (theirs and theirs.parameters)

    both = [
        across
        for across in compared
        if across.name in registry.STAGES and across.ratio(gpu, base) and same_code(across)
    ]
    pairs = [(first, other) for first, other in combinations(both, 2) if first.problem == other.problem]

    def first_is_faster(pair: tuple[Across, Across], where: str) -> bool:
        first, other = (rate(of.rows[where]) or 0.0 for of in pair)
        return first > other

    return len(pairs), tuple(pair for pair in pairs if first_is_faster(pair, gpu) != first_is_faster(pair, base))


def fastest_across(compared: Iterable[Across], base: Results) -> tuple[Across, ...]:
    """Of each problem the stage and the library that are the fastest on a GPU, of those that run by default."""
    chosen = []
    for several in grouped(
        (across for across in compared if base.gpu in across.rows), lambda across: across.problem
    ).values():
        rows = [across.rows[base.gpu] for across in several]
        kept = {row.name for row in (fastest_stage(rows, records=base.records), fastest_peer(rows)) if row}
        chosen += [across for across in several if across.name in kept]
    return tuple(chosen)
