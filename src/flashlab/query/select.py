"""What is shown of a GPU's data: for every problem, the newest session that tells most of the ladder.

A session is the runs of one commit on one GPU, each begun within six hours of the one before: a measurement that takes
longer than one command allows is split by head dim, element type or stages, and belongs together all the same.

What is shown of a problem is one session. Among the sessions that measured a problem the one that tried most stages
wins, then the newest: a later run of a single stage does not hide the ladder. A stage that does not take the problem
was not tried. Within a session a problem's rows come from the run that tried most stages there, then from the one that
took samples in most states, then from the newest; what that run did not try is filled in from the session's other runs,
rows of other implementations and samples of the same machine code in other states, and `Results.beside` from other
element types. Libraries that the session did not time, or not in a state, stand beside it from the newest later session
that did (`elsewhere`): a percentage of the fastest library would leave out what was measured since.

A ratio means most between rows that were measured in turn: `against_peers` takes both of its rows from one run.

A run that measured a dead end tells of dead ends alone (`dead_ends`); the rungs in it are there to be compared with.
A retired rung is a dead end that runs of the ladder measured: its rows stand beside the ladder's, and are never "best".

Rows of other inputs than normal are shown where they are asked for, and never stand in for normal ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

from flashlab.core.errors import NoDataError
from flashlab.core.inputs import KINDS, NORMAL, TRAINED
from flashlab.core.paths import DATA, slug
from flashlab.core.problem import FIRST_SHAPE, STANDARD_SHAPES, Problem, suite
from flashlab.kernels import registry
from flashlab.query import roofline
from flashlab.record import store
from flashlab.record.checks import read_lines as check_lines
from flashlab.record.store import Cache, Ceiling, Damage, Machine, Measurement, Regime, Run, StageProfile

SESSION_GAP = timedelta(hours=6)
"""Between the starts of two runs of one session, at most."""
NAMED_PEERS = ("fa3", "sdpa_cudnn")
"""The libraries that the ladder's claim is about; `against_peers` holds the stages against every library too."""
REFERENCES = ("fa3", "fa4")
"""The libraries that errors are held against: the second where the wheel of the first lacks the element type."""
MAIN = suite("peers")
"""The problems that kinds of inputs are compared at, and their errors."""
_NEAR = 1.05
"""Two GPUs of one product differ by less, in the same library's time."""
STATES: tuple[tuple[Regime, Cache], ...] = (("burst", "hot"), ("burst", "cold"), ("sustained", "hot"))
"""The ways a time is taken, as the report shows them: the headline first."""


class Filled(Measurement):
    """A row with samples of more runs than its own, each of another state."""

    origins: Mapping[str, tuple[str, str]]
    """By `regime cache`, the run of what is not of the row's own, and its GPU's fingerprint.

    Of the same session, or of a later one where the row is a library's.
    """


@dataclass(frozen=True, kw_only=True)
class Results:
    """What is shown of one GPU."""

    gpu: str
    """Folder name under data/."""
    machine: Machine | None
    """None where machine.json is missing or damaged."""
    problems: Mapping[Problem, tuple[Measurement, ...]]
    """Rows of each problem in `ordered` order, all of one session but for what `elsewhere` finds in them."""
    ceilings: Mapping[str, Ceiling]
    sessions: Mapping[str, str] = field(default_factory=dict)
    """The session of each run: the id of its first run."""
    by_session: Mapping[Problem, Mapping[str, tuple[Measurement, ...]]] = field(default_factory=dict)
    """Rows of each problem in every session that measured it, the one in `problems` too."""
    damage: tuple[Damage, ...]
    """Files that differ from CHECKSUMS and lines that could not be read; what could is unharmed."""

    @property
    def name(self) -> str:
        """Product name of the GPU."""
        if self.machine:
            return self.machine.gpu.name
        return next((row.gpu.name for rows in self.problems.values() for row in rows), self.gpu)

    @property
    def newest(self) -> str:
        """Id of the newest run that is shown; ids sort by time."""
        runs = [row.run for rows in self.problems.values() for row in rows] + [c.run for c in self.ceilings.values()]
        return max(runs, default="")

    @property
    def first(self) -> Problem | None:
        """The problem the ladder is told at: the sources' shape where it was measured, else the first there is."""
        return next(iter(self.problems), None)

    def rows(
        self, problem: Problem | None = None, *, stage_ids: Sequence[str] | None = None
    ) -> tuple[Measurement, ...]:
        """Rows of `problem` (of `first`, where None), without the stages that `stage_ids` leaves out.

        Raises:
            NoDataError: the problem was not measured on this GPU.
        """
        wanted = problem or self.first
        if wanted is None or wanted not in self.problems:
            known = "; ".join(p.label for p in self.problems) or "none yet"
            raise NoDataError(
                f"wanted measurements of {wanted.label if wanted else 'any problem'} on {self.gpu}, found none. "
                f"Measured: {known}."
            )
        rows = self.problems[wanted]
        return rows if stage_ids is None else tuple(r for r in rows if r.kind == "peer" or r.name in stage_ids)

    def session(self, row: Measurement) -> str:
        """The session that a row was measured in."""
        return self.sessions.get(row.run, row.run)

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries that do not take the element type of `problem` (of `first`, where None), timed in another.

        At the same shape and mask and in the same session, so that the rates may stand side by side, whether or not it
        is that session which is shown for their type. They are never the fastest library that percentages refer to: a
        percentage keeps to one element type.
        """
        wanted = problem or self.first
        rows = self.problems.get(wanted, ()) if wanted else ()
        lacking = {(self.session(row), row.name) for row in rows if row.kind == "peer" and row.status == "unsupported"}
        found: dict[str, Measurement] = {}
        for other, sessions in self.by_session.items():
            if wanted is None or other == wanted or replace(other, dtype=wanted.dtype) != wanted:
                continue
            for session, theirs in sessions.items():
                for row in theirs:
                    if (session, row.name) in lacking and rate(row) is not None:
                        found.setdefault(row.name, row)
        return ordered(found.values())


def on_inputs(problems: Iterable[Problem]) -> str:
    """For people: `on normally distributed inputs of unit scale`, or the kinds of inputs by name."""
    kinds = dict.fromkeys(problem.inputs for problem in problems)
    return f"on {' and '.join(_INPUTS.get(kind, f'inputs of the kind {kind}') for kind in kinds)}"


_INPUTS: Mapping[str, str] = {
    NORMAL: "normally distributed inputs of unit scale",
    TRAINED: "Q, K and V of a trained model",
}


def of_lengths(
    shown: Results, *, head_dim: int, mask: str, dtype: str, regime: Regime = "burst"
) -> tuple[Problem, ...]:
    """The problems of the suite `lengths` of that kind that have a time in that regime, the shortest first.

    Raises:
        NoDataError: fewer than two.
    """
    found = tuple(
        problem
        for problem in suite("lengths")
        if (problem.head_dim, problem.mask, problem.dtype) == (head_dim, mask, dtype)
        and any(row.samples_of(regime) for row in shown.problems.get(problem, ()))
    )
    if len(found) < 2:
        raise NoDataError(
            f"wanted {regime} times at several sequence lengths, D{head_dim} {mask} {dtype}, on {shown.gpu}, found "
            f"{len(found)}. `flashlab bench --suite lengths{' --sustained 5' if regime == 'sustained' else ''}` "
            "on such a GPU makes some"
        )
    return found


def profiles(gpu: str, data: Path = DATA) -> tuple[StageProfile, ...]:
    """The newest profile of each stage at each problem, the first problem first, in the ladder's order; may be none."""
    found = (one for one in store.profiles(gpu, data) if one.problem.inputs == NORMAL)
    newest = {(one.stage, one.problem.problem()): one for one in found}
    ladder = {stage_id: position for position, stage_id in enumerate(registry.RUNGS)}
    order = sorted(newest, key=lambda key: (_problem_order(key[1]), ladder.get(key[0], len(ladder))))
    return tuple(newest[key] for key in order)


def profile_provenance(found: Sequence[StageProfile]) -> str:
    """Where profiles come from, for a caption: GPU, problem, tool, date, commit."""
    if not found:
        return ""
    labels = {one.problem.problem().label for one in found}
    runs = sorted({one.run for one in found})
    parts = [
        found[0].gpu,
        labels.pop() if len(labels) == 1 else f"{len(labels)} problems",
        f"Nsight Compute {', '.join(sorted({one.ncu for one in found}))}, one launch each from cold caches",
        ", ".join(sorted({date(run) for run in runs})),
        f"commit {', '.join(sorted({commit_label(one.run, one.dirty) for one in found}))}",
    ]
    return " · ".join(parts)


def profile_files(found: Iterable[StageProfile]) -> tuple[str, ...]:
    """The raw-data files of profiles, relative to data/: `nvidia-h200/profiles/….jsonl`."""
    return tuple(sorted({f"{slug(one.gpu)}/profiles/{one.run}.jsonl" for one in found}))


def rate(row: Measurement, regime: Regime = "burst", cache: Cache = "hot") -> float | None:
    """TFLOP/s at the median time; None where the row has no such time."""
    samples = row.samples_of(regime, cache)
    return row.problem.problem().tflops(samples.median_us) if samples else None


def ordered(rows: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Stages in the ladder's order, then peers, the fastest first and those without a time last."""
    ladder = {stage_id: position for position, stage_id in enumerate(registry.RUNGS)}

    def key(row: Measurement) -> tuple[int, float, str]:
        if row.kind == "stage":
            return (0, ladder.get(row.name, len(ladder)), row.name)
        return (1, -(rate(row) or 0.0), row.name)

    return tuple(sorted(rows, key=key))


def with_beside(rows: Iterable[Measurement], beside: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """`rows` in `ordered` order, with those of `Results.beside` in place of the same libraries' rows without a time."""
    others = {row.name: row for row in beside}
    return ordered(others.get(row.name, row) if row.kind == "peer" else row for row in rows)


def fastest_peer(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> Measurement | None:
    """The peer with the highest rate; None where no peer has a time."""
    timed = [row for row in rows if row.kind == "peer" and rate(row, regime, cache)]
    return max(timed, key=lambda row: rate(row, regime, cache) or 0.0, default=None)


def fastest_stage(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> Measurement | None:
    """The stage with the highest rate, of those on the ladder that may be chosen; None where none has a time."""
    able = {stage.id for stage in registry.STAGES.values() if not stage.by_name_only}
    timed = [row for row in rows if row.kind == "stage" and row.name in able and rate(row, regime, cache)]
    return max(timed, key=lambda row: rate(row, regime, cache) or 0.0, default=None)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A stage and a library on one problem in one regime, rows of one run."""

    regime: Regime
    stage: str
    stage_us: float
    """Median time of one call."""
    stage_clock_mhz: float | None
    """Median SM clock over the calls; None where it was not measured."""
    peer: str
    peer_us: float
    peer_clock_mhz: float | None
    stage_percent_of_peak: float | None = None
    """Its rate, percent of what the tensor cores do at that clock; None where clock or GPU are not known."""
    peer_percent_of_peak: float | None = None
    peer_lse: bool | None = None
    """Whether the library writes a log-sum-exp, as its row says; None where that does not."""
    stage_lse_us: float | None = None
    """Median time of the stage with the log-sum-exp on, in the same run; None where it was not taken."""
    worst_ratio: float | None = None
    """Of `trained` inputs, the least ratio of any layer, there to the library that is the fastest on it; else None."""
    worst_layer: int | None = None
    """The layer of the model that it is of."""

    @property
    def ratio(self) -> float:
        """How many times faster the stage is: the ratio of the medians."""
        return self.peer_us / self.stage_us

    @property
    def adjusted_ratio(self) -> float | None:
        """The same with the log-sum-exp on for both, or off for both; None where that is not on record."""
        ours = self.stage_lse_us if self.peer_lse else self.stage_us
        return None if self.peer_lse is None or ours is None else self.peer_us / ours


@dataclass(frozen=True, kw_only=True)
class AgainstPeers:
    """Our best stage and the best library on one problem."""

    problem: Problem
    run: str
    """The run that both were measured in."""
    sustained_run: str | None
    """The run that both were kept busy in; None where none was."""
    dirty: bool
    burst: Contest | None
    """The fastest stage against the fastest library of the same element type; None where either has no time."""
    sustained: Contest | None
    """The fastest stage of `sustained_run` under continuous work, against the library that is the fastest there."""
    named: Contest | None
    """The fastest stage of `named_run` against the faster of `NAMED_PEERS`, burst."""
    named_run: str | None
    """As `run`, where those are the only libraries; None where neither was timed."""
    named_sustained: Contest | None
    """The fastest stage of `named_sustained_run` against the faster of `NAMED_PEERS`, under continuous work."""
    named_sustained_run: str | None
    """The newest run that kept the faster of `NAMED_PEERS` busy; None where none did."""
    reason: str
    """Why there is no ratio; empty where there is one."""

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """For tables: in bursts, the same with the log-sum-exp alike, over the named libraries; so under load."""
        pairs = ((self.burst, self.named), (self.sustained, self.named_sustained))
        return tuple(
            ratio
            for best, named in pairs
            for ratio in (
                best.ratio if best else None,
                best.adjusted_ratio if best else None,
                named.ratio if named else None,
            )
        )

    def flat(self) -> dict[str, object]:
        """As `flashlab results --against-peers --json` prints it: None where there is nothing to say."""
        problem = self.problem

        def told(contest: Contest | None) -> dict[str, object] | None:
            if contest is None:
                return None
            return {
                "best_stage": contest.stage,
                "stage_median_us": contest.stage_us,
                "stage_tflops": problem.tflops(contest.stage_us),
                "stage_call_clock_mhz": contest.stage_clock_mhz,
                "stage_percent_of_peak": contest.stage_percent_of_peak,
                "best_peer": contest.peer,
                "peer_median_us": contest.peer_us,
                "peer_tflops": problem.tflops(contest.peer_us),
                "peer_call_clock_mhz": contest.peer_clock_mhz,
                "peer_percent_of_peak": contest.peer_percent_of_peak,
                "ratio": contest.ratio,
                "adjusted_ratio": contest.adjusted_ratio,
                "peer_writes_lse": contest.peer_lse,
                "worst_ratio": contest.worst_ratio,
                "worst_layer": contest.worst_layer,
            }

        return {
            "shape": problem.shape,
            "dtype": problem.dtype,
            "mask": problem.mask,
            "inputs": problem.inputs,
            "run": self.run,
            "sustained_run": self.sustained_run,
            "dirty": self.dirty,
            "reason": self.reason,
            **(told(self.burst) or {"best_stage": None, "best_peer": None, "ratio": None, "adjusted_ratio": None}),
            "sustained": told(self.sustained),
            "against_named": {
                "peers": list(NAMED_PEERS),
                "burst": told(self.named),
                "run": self.named_run,
                "sustained": told(self.named_sustained),
                "sustained_run": self.named_sustained_run,
            },
        }


_Second = Mapping[tuple[str, Problem, str], Measurement]
"""Rows with the log-sum-exp on, by run, problem and stage."""


def _contest(rows: Sequence[Measurement], regime: Regime, second: _Second | None = None) -> Contest | None:
    stage, peer = fastest_stage(rows, regime), fastest_peer(rows, regime)
    ours, theirs = (row.samples_of(regime) if row else None for row in (stage, peer))
    if stage is None or peer is None or ours is None or theirs is None:
        return None
    worst_ratio, worst_layer = None, None
    if stage.problem.inputs == TRAINED:
        libraries = [taken.time_us for row in rows if row.kind == "peer" and (taken := row.samples_of(regime))]
        fastest_us = [min(of_layer) for of_layer in zip(*libraries, strict=True)]
        worst_ratio, worst_layer = min(
            (peer_us / our_us, layer)
            for layer, (peer_us, our_us) in enumerate(zip(fastest_us, ours.time_us, strict=True))
        )
    twin = (second or {}).get((stage.run, stage.problem.problem(), stage.name))
    with_lse = twin.samples_of(regime) if twin else None
    clocks = [median(samples.call_clock_mhz) if samples.call_clock_mhz else None for samples in (ours, theirs)]
    shares = [
        roofline.percent_of_tensor_peak(
            row.problem.problem().tflops(samples.median_us),
            compute_capability=row.gpu.compute_capability,
            sm_count=row.gpu.sm_count,
            clock_mhz=clock,
        )
        for row, samples, clock in zip((stage, peer), (ours, theirs), clocks, strict=True)
    ]
    return Contest(
        regime=regime,
        stage=stage.name,
        stage_us=ours.median_us,
        stage_clock_mhz=clocks[0],
        stage_percent_of_peak=shares[0],
        stage_lse_us=with_lse.median_us if with_lse else None,
        peer=peer.name,
        peer_us=theirs.median_us,
        peer_clock_mhz=clocks[1],
        peer_percent_of_peak=shares[1],
        peer_lse=peer.lse,
        worst_ratio=worst_ratio,
        worst_layer=worst_layer,
    )


def against_peers(gpu: str, data: Path = DATA, inputs: Collection[str] = (NORMAL,)) -> tuple[AgainstPeers, ...]:
    """For each problem on these kinds of inputs: our best stage against the best library of the same element type.

    Both rows come from one run, in which they were measured in turn: of the newest session whose fastest library is at
    most 5 % slower than the fastest on record, the run that timed that library, or one within a percent of it; of
    several, the one that timed most, then the newest. A session that left the fastest library out thus does not count.
    "Best" is of what that run timed. Under continuous work, likewise, of the newest run that kept a library busy that
    is the best in bursts, or within a percent of it: without one, a ratio would say too much. (torch's own choice is
    often cuDNN, and ahead of it or behind by nothing but chance.)
    Sessions from before the last rung that this GPU has measured take no part, nor do edited copies of a stage.

    Raises:
        NoDataError: the GPU has no measurement.
    """
    store.newest_run(gpu, data)
    runs = [run for run in _of_the_ladder(store.runs(gpu, data)) if run.measurements]
    sessions = sessions_of(runs)
    by_session: dict[str, set[str]] = {}
    for run in runs:
        by_session.setdefault(sessions[run.id], set()).update(row.name for row in run.measurements if row.samples)
    second = {
        (run.id, row.problem.problem(), row.name): row for run in runs for row in run.with_lse if row.status == "ok"
    }
    timed = set().union(*by_session.values())
    last_rung = next((stage for stage in reversed(list(registry.STAGES)) if stage in timed), None)
    parts: dict[Problem, list[list[Measurement]]] = {}
    for run in runs:
        if last_rung and last_rung not in by_session[sessions[run.id]]:
            continue
        by_problem: dict[Problem, dict[str, Measurement]] = {}
        for row in _on(run.measurements, inputs):
            if row.kind == "peer" or row.name in registry.STAGES:
                by_problem.setdefault(row.problem.problem(), {})[row.name] = row
        for problem, rows in by_problem.items():
            parts.setdefault(problem, []).append(list(rows.values()))
    found = []
    for problem in sorted(parts, key=_problem_order):
        chosen = _against_the_fastest(parts[problem], sessions)
        named = _against_the_fastest([_named(rows) for rows in parts[problem]], sessions)
        busy = _kept_busy(parts[problem], _best_peers(chosen))
        named_busy = _named(_kept_busy(parts[problem], _best_peers(named)))
        burst, against_named = _contest(chosen, "burst", second), _contest(named, "burst", second)
        lacking = "library" if fastest_stage(chosen) else "stage"
        found.append(
            AgainstPeers(
                problem=problem,
                run=chosen[0].run,
                sustained_run=busy[0].run if busy else None,
                dirty=any(rows[0].source.dirty for rows in (chosen, busy, named, named_busy) if rows),
                burst=burst,
                sustained=_contest(busy, "sustained", second),
                named=against_named,
                named_run=named[0].run if against_named else None,
                named_sustained=_contest(named_busy, "sustained", second),
                named_sustained_run=named_busy[0].run if named_busy else None,
                reason="" if burst else f"no {lacking} has a time in that run",
            )
        )
    return tuple(found)


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

    Raises:
        NoDataError: the GPU has no run.
    """
    shapes = {problem.shape for problem in MAIN}
    found: dict[Problem, Accuracy] = {}
    for run in store.runs(gpu, data):
        by_problem: dict[Problem, list[Measurement]] = {}
        for row in run.measurements:
            if row.problem.problem().shape in shapes and (row.kind == "peer" or row.name in registry.STAGES):
                by_problem.setdefault(row.problem.problem(), []).append(row)
        for problem, rows in by_problem.items():
            errors = {
                row.name: (row.verdict.overall_rms_error, row.verdict.overall_max_error)
                for row in ordered(rows)
                if row.verdict
                and row.verdict.overall_rms_error is not None
                and row.verdict.overall_max_error is not None
            }
            reference = next((name for name in REFERENCES if name in errors), None)
            if reference and not errors.keys().isdisjoint(registry.STAGES):
                found[problem] = Accuracy(problem=problem, run=run.id, reference=reference, errors=errors)
    return tuple(found[problem] for problem in sorted(found, key=_problem_order))


def _best_peers(rows: Iterable[Measurement]) -> set[str]:
    """Libraries within a percent of the fastest in bursts."""
    times: dict[str, float] = {}
    for row in rows:
        if row.kind == "peer" and (taken := row.samples_of()):
            times[row.name] = min(taken.median_us, times.get(row.name, taken.median_us))
    best = min(times.values(), default=0.0)
    return {name for name, time_us in times.items() if time_us <= 1.01 * best}


def _kept_busy(runs: Iterable[list[Measurement]], libraries: set[str]) -> list[Measurement]:
    """The newest run's rows that kept one of these libraries and a stage busy; empty where none did."""
    able = [
        rows
        for rows in runs
        if any("sustained" in _regimes(rows, name) for name in libraries) and _contest(rows, "sustained")
    ]
    return max(able, key=lambda rows: rows[0].run, default=[])


def _regimes(rows: Iterable[Measurement], name: str) -> set[Regime]:
    return {samples.regime for row in rows if row.name == name for samples in row.samples}


def _named(rows: Iterable[Measurement]) -> list[Measurement]:
    return [row for row in rows if row.kind == "stage" or row.name in NAMED_PEERS]


def _against_the_fastest(runs: Iterable[list[Measurement]], sessions: Mapping[str, str]) -> list[Measurement]:
    """Of several runs' rows of one problem, those that a ratio is of: see `against_peers`."""
    every = [rows for rows in runs if rows]
    able = [rows for rows in every if _contest(rows, "burst")]
    if not able:
        return max(every, key=lambda rows: rows[0].run, default=[])
    best_us: dict[str, float] = {}
    for rows in able:
        session = sessions[rows[0].run]
        times_us = (taken.median_us for row in rows if row.kind == "peer" and (taken := row.samples_of()))
        best_us[session] = min(*times_us, best_us.get(session, math.inf))
    newest = max(one for one, time_us in best_us.items() if time_us <= _NEAR * min(best_us.values()))
    able = [rows for rows in able if sessions[rows[0].run] == newest]
    best = _best_peers(row for rows in able for row in rows)

    def rank(rows: list[Measurement]) -> tuple[bool, int, str]:
        timed = {row.name for row in rows if row.samples_of()}
        return (not best.isdisjoint(timed), len(timed), rows[0].run)

    return max(able, key=rank)


def parent_of(row: Measurement, rows: Iterable[Measurement]) -> Measurement | None:
    """The row of the stage that `row`'s stage was made from; None at the ladder's foot or where it was not measured."""
    stage = registry.RUNGS.get(row.name)
    return next((r for r in rows if stage and r.kind == "stage" and r.name == stage.parent), None)


def _problem_order(problem: Problem) -> tuple[int, int, int, bool, bool, Problem, int]:
    shapes = (FIRST_SHAPE, *STANDARD_SHAPES)
    position = shapes.index(problem.shape) if problem.shape in shapes else len(shapes)
    plain, kind = replace(problem, inputs=NORMAL), list(KINDS).index(problem.inputs)
    return (position, problem.head_dim, problem.q_len, problem.dtype != "float16", problem.causal, plain, kind)


def sessions_of(runs: Iterable[Run]) -> dict[str, str]:
    """The session of each run, by ids: see the module. A session has the id of its first run."""
    last: dict[str, tuple[str, datetime]] = {}
    found: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: run.id):
        began, _, commit = run.id.partition("-")
        fingerprint = next((record.gpu.fingerprint for record in run.records), "")
        try:
            start = datetime.strptime(began, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:  # a file that somebody named
            found[run.id] = run.id
            continue
        key = f"{commit} {fingerprint}"
        first, before = last.get(key, (run.id, start))
        session = first if start - before <= SESSION_GAP else run.id
        last[key] = (session, start)
        found[run.id] = session
    return found


def is_dead_end(row: Measurement) -> bool:
    """Whether a row is a dead end's, with its own tunables or others; not of one that once stood on the ladder."""
    stage = registry.DEAD_ENDS.get(row.name.partition("[")[0]) if row.kind == "stage" else None
    return stage is not None and not stage.retired


def _on(rows: Iterable[Measurement], inputs: Collection[str]) -> Iterable[Measurement]:
    """Rows on these kinds of inputs."""
    return (row for row in rows if row.problem.inputs in inputs)


def _of_the_ladder(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if not any(is_dead_end(row) for row in run.measurements)]


def dead_ends(gpu: str, data: Path = DATA) -> dict[Problem, tuple[Measurement, ...]]:
    """Dead ends and what was measured in turn with them, by problem; empty where none was measured.

    A problem's rows are of one run: the one that tried most dead ends there, then the newest. Rungs of the ladder come
    first, then dead ends, each before its variants, then libraries, the fastest first.

    Raises:
        NoDataError: the GPU has no run.
    """
    found: dict[Problem, list[list[Measurement]]] = {}
    for run in store.runs(gpu, data):
        by_problem: dict[Problem, dict[str, Measurement]] = {}
        for row in _on(run.measurements, (NORMAL,)):
            by_problem.setdefault(row.problem.problem(), {})[row.name] = row
        for problem, rows in by_problem.items():
            if any(is_dead_end(row) for row in rows.values()):
                found.setdefault(problem, []).append(list(rows.values()))
    dead = [name for stage in registry.DEAD_ENDS.values() for name in (stage.id, *stage.variant_names)]
    place = {name: position for position, name in enumerate((*registry.STAGES, *dead))}

    def position(row: Measurement) -> tuple[int, str]:
        return place.get(row.name, len(place)), row.name

    shown = {}
    for problem in sorted(found, key=_problem_order):
        best = max(found[problem], key=lambda rows: (sum(map(is_dead_end, rows)), rows[0].run))
        ours = sorted((row for row in best if row.kind == "stage"), key=position)
        shown[problem] = (*ours, *ordered(row for row in best if row.kind == "peer"))
    return shown


def _tried(rows: Mapping[str, Measurement]) -> int:
    return sum(name in registry.STAGES and row.status != "unsupported" for name, row in rows.items())


def _merged(parts: Sequence[Mapping[str, Measurement]]) -> dict[str, Measurement]:
    """Rows of one problem from the runs of a session, by name; `parts` oldest first."""

    def told(index: int) -> tuple[int, int, int]:
        states = {(samples.regime, samples.cache) for row in parts[index].values() for samples in row.samples}
        return _tried(parts[index]), len(states), index

    rows: dict[str, Measurement] = {}
    for index in sorted(range(len(parts)), key=told):
        for name, row in parts[index].items():
            if name not in rows:
                rows[name] = row
            elif row.samples or row.kind == "stage" or not rows[name].samples:
                # Else the run lacked a library that another had.
                rows[name] = _filled(row, rows[name])
    return rows


def _with_later(by_session: Mapping[str, Mapping[str, Measurement]]) -> dict[str, Measurement]:
    """Rows of the session that tried most stages, and libraries or states of them that it lacks from later ones."""
    base = max(by_session, key=lambda session: (_tried(by_session[session]), session))
    rows = dict(by_session[base])
    for session in sorted((one for one in by_session if one > base), reverse=True):
        for name, row in by_session[session].items():
            if row.kind == "peer" and row.samples:
                ours = rows.get(name)
                rows[name] = _filled(ours, row) if ours and ours.samples else row
    return rows


def _filled(row: Measurement, other: Measurement) -> Measurement:
    """`row` with the samples of `other` in states that it has none of, where both are of the same code."""
    states = {(samples.regime, samples.cache) for samples in row.samples}
    more = tuple(samples for samples in other.samples if (samples.regime, samples.cache) not in states)
    changed = any(other.software.get(name, version) != version for name, version in row.software.items())
    if not row.samples or not more or changed or row.cubin != other.cubin:
        return row
    added = {f"{samples.regime} {samples.cache}": _origin(other, samples.regime, samples.cache) for samples in more}
    fields = {name: getattr(row, name) for name in Measurement.model_fields} | {"samples": (*row.samples, *more)}
    return Filled(**fields, origins={**(row.origins if isinstance(row, Filled) else {}), **added})


def _origin(row: Measurement, regime: Regime, cache: Cache) -> tuple[str, str]:
    """The run of a row's samples in one state, and its GPU's fingerprint."""
    own = (row.run, row.gpu.fingerprint)
    return row.origins.get(f"{regime} {cache}", own) if isinstance(row, Filled) else own


def _runs_of(row: Measurement | Ceiling) -> tuple[str, ...]:
    return (row.run, *(run for run, _ in row.origins.values())) if isinstance(row, Filled) else (row.run,)


def _places(rows: Iterable[Measurement], regime: Regime, cache: Cache) -> set[tuple[str, str]]:
    """The commits and GPUs of rows with samples in that state."""
    found = (_origin(row, regime, cache) for row in rows if row.samples_of(regime, cache))
    return {(commit_label(run), chip) for run, chip in found}


def elsewhere(rows: Sequence[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> tuple[Measurement, ...]:
    """Of the rows of one problem, libraries whose samples are of another commit or GPU than every stage's there.

    They are of a later session: the one shown left them out, or that state of them.
    """
    main = _places((row for row in rows if row.kind == "stage"), regime, cache)
    return tuple(
        row
        for row in rows
        if main and row.kind == "peer" and row.samples_of(regime, cache) and not _places([row], regime, cache) <= main
    )


def places(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> tuple[int, int]:
    """How many commits on how many GPUs rows of one chart are of, and how many GPUs: `(sessions, chips)`."""
    found = _places(rows, regime, cache)
    return len(found), len({chip for _, chip in found})


def load(gpu: str, data: Path = DATA, inputs: Collection[str] = (NORMAL,)) -> Results:
    """What is shown of `gpu`, on these kinds of inputs.

    Raises:
        NoDataError: it has no run.
    """
    runs = _of_the_ladder(store.runs(gpu, data))
    sessions = sessions_of(runs)
    found: dict[Problem, dict[str, list[dict[str, Measurement]]]] = {}
    for run in runs:
        by_problem: dict[Problem, dict[str, Measurement]] = {}
        for row in _on(run.measurements, inputs):
            by_problem.setdefault(row.problem.problem(), {})[row.name] = row
        for problem, rows in by_problem.items():
            found.setdefault(problem, {}).setdefault(sessions[run.id], []).append(rows)
    merged = {
        problem: {session: _merged(parts) for session, parts in by_session.items()}
        for problem, by_session in found.items()
    }
    every = {
        problem: {session: ordered(rows.values()) for session, rows in by_session.items()}
        for problem, by_session in merged.items()
    }
    shown = {problem: ordered(_with_later(by_session).values()) for problem, by_session in merged.items()}
    machine_file = data / gpu / "machine.json"
    try:
        machine = Machine.model_validate_json(machine_file.read_bytes())
    except (OSError, ValueError):
        machine = None
    return Results(
        gpu=gpu,
        machine=machine,
        problems={problem: shown[problem] for problem in sorted(shown, key=_problem_order)},
        ceilings=store.newest_ceilings(gpu, data),
        sessions=sessions,
        by_session=every,
        damage=store.verify(gpu, data),
    )


def _check_lines(path: Path, inputs: Collection[str]) -> tuple[dict[str, Any], ...]:
    """A file's comparisons on these kinds of inputs."""
    return tuple(line for line in check_lines(path) if line["problem"]["inputs"] in inputs)


CheckFolder = Literal["checks", "random", "flash-attention"]


def checks_file(
    gpu: str,
    data: Path = DATA,
    folder: CheckFolder = "checks",
    inputs: Collection[str] = (NORMAL,),
) -> Path:
    """The file of the newest comparison of stages over hostile lengths and layouts, or over random ones.

    One of dead ends alone does not count, nor does one of a few stages where another one has more, nor one without
    these kinds of inputs.

    Raises:
        NoDataError: there is none.
    """
    told = {
        path: {line["stage"].partition("[")[0] for line in _check_lines(path, inputs)} - registry.DEAD_ENDS.keys()
        for path in sorted((data / gpu / folder).glob("*.jsonl"))
    }
    most = max(map(len, told.values()), default=0)
    files = [path for path, ids in told.items() if ids and len(ids) == most]
    if not files:
        raise NoDataError(
            f"wanted checks of {gpu}, found none in data/{gpu}/{folder}. `flashlab check` on such a GPU makes some"
        )
    return files[-1]


def checks(
    gpu: str,
    data: Path = DATA,
    folder: CheckFolder = "checks",
    inputs: Collection[str] = (NORMAL,),
) -> tuple[dict[str, Any], ...]:
    """Lines of the newest comparison of stages over hostile lengths and layouts, or random ones (`bench.check_stages`).

    On these kinds of inputs.

    Raises:
        NoDataError: there is none.
    """
    return _check_lines(checks_file(gpu, data, folder, inputs), inputs)


def newest_checks(
    gpu: str, data: Path = DATA, folder: CheckFolder = "checks", inputs: Collection[str] = (NORMAL,)
) -> dict[str, tuple[dict[str, Any], ...]]:
    """By stage, the lines of the newest run that compared it with the oracle on these kinds of inputs.

    Raises:
        NoDataError: there is none of any stage.
    """
    newest: dict[str, tuple[dict[str, Any], ...]] = {}
    for path in sorted((data / gpu / folder).glob("*.jsonl")):
        by_stage: dict[str, list[dict[str, Any]]] = {}
        for line in _check_lines(path, inputs):
            by_stage.setdefault(line["stage"], []).append(line)
        newest |= {stage: tuple(lines) for stage, lines in by_stage.items()}
    if not newest:
        raise NoDataError(
            f"wanted checks of {gpu}, found none in data/{gpu}/{folder}. `flashlab check` on such a GPU makes some"
        )
    return newest


def emulated_checks(gpu: str, data: Path = DATA) -> tuple[dict[str, Any], ...]:
    """Lines of the newest comparison whose inputs the emulator was given too (`flashlab check --on both --record`).

    On normal inputs.

    Raises:
        NoDataError: there is none.
    """
    for path in sorted((data / gpu / "checks").glob("*.jsonl"), reverse=True):
        lines = tuple(line for line in _check_lines(path, (NORMAL,)) if line.get("emulator"))
        if lines:
            return lines
    raise NoDataError(
        f"wanted checks of {gpu} beside the emulator, found none in data/{gpu}/checks. "
        "`flashlab check --on both --record` on such a GPU makes some"
    )


def counters(gpu: str, data: Path = DATA) -> store.Counters:
    """The newest file of what Nsight Compute counted on that GPU; its lines that could not be read are in `damage`.

    Raises:
        NoDataError: there is none.
    """
    files = sorted((data / gpu / "counters").glob("*.jsonl"))
    if not files:
        raise NoDataError(
            f"wanted Nsight Compute's counters of {gpu}, found none in data/{gpu}/counters. "
            "`scripts/counters_ncu.py` on such a GPU makes some"
        )
    return store.read_counters(files[-1])


def load_all(data: Path = DATA) -> tuple[Results, ...]:
    """Every GPU with data, the one with the most runs first: what a page shows where no GPU is named."""
    return tuple(load(gpu, data) for gpu in store.gpus(data))


def clocks(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """The SM clock of the samples, for people: `1980 MHz`, `1485–1740 MHz`, `clock not recorded`.

    Over the calls where that was read, else right after them.
    """
    taken = [samples for row in rows if (samples := row.samples_of(regime, cache))]
    found = [samples.call_clock_mhz or samples.sm_clock_mhz for samples in taken]
    medians = [round(median(values)) for values in found if values]
    if not medians:
        return "clock not recorded"
    return f"{medians[0]} MHz" if len(set(medians)) == 1 else f"{min(medians)}–{max(medians)} MHz"


def commit_label(run: str, dirty: bool = False) -> str:
    """The commit that a run id names, for people: `0123abc`, with a star where the tree differed from it."""
    match = re.search(r"-([0-9a-f]{7,})(-dirty)?$", run)
    return f"{match[1][:7]}{' + changes' if match[2] or dirty else ''}" if match else run


def date(run: str) -> str:
    """The date in a run id, ISO 8601."""
    return f"{run[:4]}-{run[4:6]}-{run[6:8]}"


def provenance(rows: Sequence[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """Where rows come from, for a caption: GPU, clocks, problem, regime, date, commit."""
    if not rows:
        return ""
    labels = {row.problem.problem().label for row in rows}
    runs = {_origin(row, regime, cache)[0]: row for row in rows}
    commits = sorted({commit_label(run, run == row.run and row.source.dirty) for run, row in runs.items()})
    dates = sorted({date(run) for run in runs})
    parts = [
        rows[0].gpu.name,
        f"SM {clocks(rows, regime, cache)}",
        labels.pop() if len(labels) == 1 else f"{len(labels)} problems",
        on_inputs(row.problem.problem() for row in rows),
        f"{regime}, {cache} L2" if regime == "burst" else regime,
        dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        f"commit {', '.join(commits)}",
    ]
    return " · ".join(parts)


def run_files(rows: Iterable[Measurement | Ceiling]) -> tuple[str, ...]:
    """The raw-data files of rows, relative to data/: `nvidia-h200/runs/….jsonl`."""
    return tuple(sorted({f"{row.gpu.slug}/runs/{run}.jsonl" for row in rows for run in _runs_of(row)}))
