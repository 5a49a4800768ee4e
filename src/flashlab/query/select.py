"""Selection of records: the single rule that decides what charts, tables, claims and commands show.

**The rule.** Rows that were measured together stay together. For every problem, the candidates are the sessions with
rows of it (the runs of one commit on one GPU, each begun within six hours of the one before), or its single runs if
rows are compared with each other: ratios are most meaningful between interleaved rows.

What most readers compare is the last kernel with the libraries, so of sessions the one wins that this ratio is of:

* Those take part that timed the last rung which the GPU has measured, or its parent: the last rung need not be timed
  anew at every problem. Runs of stages off the ladder take no part.
* Of those whose fastest library is at most 5 % slower than the fastest on record (one that left the fastest library
  out does not count), the one whose last rung stands highest; of several, the one that timed most of the libraries
  that are the fastest in one of them; of several, the newest.
* Of its runs, the one that timed that library, or one within a percent of it; of several, the one that timed most, then
  the newest (`held_against`).

Where no run has a ratio, or no ladder is chosen, the session wins whose last rung stands highest; those in which that
kernel had other machine code than in the newest are out. Of those that are left, one that timed a library there comes
first, then the one that tried most of what the policy covers; of several, the newest. So a later run of one stage hides
neither the ladder nor the libraries that it is held against.

In a session a problem's rows come from the run that the ratio is of, else from the one that tried most of the ladder
there, then of what the policy covers, then took samples in most states, then from the newest; what that run did not try
is filled in from the session's other runs: rows of other implementations, and samples of the same machine code in other
states. Rungs and libraries that the session did not time come from the newest other session that did, and libraries'
samples in states that it lacks likewise (`elsewhere` finds them); a rate over a parent's is given only where both are
of one session (`parent_of`).

A run that measured a stage off the ladder takes part only where the policy says so: the rungs in it are there to be
compared with.
Rows on other inputs than normal are chosen where a policy names them, and never stand in for normal ones. A stage's
second row, with the log-sum-exp on, is never chosen, nor one of an edited copy.

`SHOWN` is what pages, charts, tables and `flashlab results` show; `LADDER` is the stages of one run, problems with a
window or a soft cap too; `OFF_LADDER` is stages off the ladder beside what was interleaved with them, `DECODING` those
for decoding beside what a session measured with them, `of_stage(...)` one of them and its variants likewise, with the
tunables that their names have today where some session ran those.
`by_start` is for intervals: it finds what other starts of a machine measured with the code of the newest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from flashlab.core.errors import NoDataError
from flashlab.core.inputs import KINDS, NORMAL, TRAINED
from flashlab.core.paths import DATA, slug
from flashlab.core.problem import FIRST_SHAPE, STANDARD_SHAPES, Cache, Problem, Regime, suite
from flashlab.kernels import peers, registry
from flashlab.query.rows import grouped, sessions
from flashlab.record import store
from flashlab.record.checks import Compared, read_lines
from flashlab.record.provenance import UNUSED
from flashlab.record.schema import RUN, Base, Ceiling, Gpu, Machine, Measurement, StageProfile, Timed

T = TypeVar("T", bound=Base)
STATES: Mapping[tuple[Regime, Cache], str] = {
    ("burst", "hot"): "burst, hot L2",
    ("burst", "cold"): "burst, cold L2",
    ("burst", "rotating"): "burst, rotating K and V",
    ("burst", "step"): "burst, in a step",
    ("sustained", "hot"): "sustained",
}
"""Timing states and their display names, the headline first."""
_LADDER: Mapping[str, int] = {stage_id: position for position, stage_id in enumerate(registry.RUNGS)}
_OFF_LADDER = tuple(name for stage in registry.OFF_LADDER.values() for name in (stage.id, *stage.variant_names))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Parameters of the rule: see the module."""

    within: Literal["session", "run"] = "session"
    """Unit that counts as measured together."""
    covers: tuple[str, ...] = tuple(registry.STAGES)
    """Stages to cover; the candidate that tried most of them wins."""
    as_named: bool = False
    """Whether the candidate wins that tried most of them with the tunables that their names have today, for defaults
    change; else, of sessions, those alone are candidates that timed the last of them that any session timed."""
    inputs: tuple[str, ...] = (NORMAL,)
    features: bool = False
    """Whether to include problems with a window or soft cap, which most pages do not show."""
    off_ladder: Literal["without", "with", "only"] = "without"
    """Whether to use runs that measured stages off the ladder: never, also, or exclusively."""


SHOWN = Policy()
LADDER = Policy(within="run", off_ladder="with", features=True)
OFF_LADDER = Policy(within="run", covers=_OFF_LADDER, off_ladder="only")
_CHOSEN_LAST = sorted(registry.DECODE, key=lambda name: not registry.DECODE[name].by_name_only)
"""Decoding stages; a session need not have timed a stage that runs only where it is named."""
DECODING = Policy(covers=tuple(_CHOSEN_LAST), off_ladder="only")


def of_stage(stage: registry.Stage) -> Policy:
    """Policy for a decoding or FP8 stage, on any inputs: the newest session that tried most of it and its variants."""
    return replace(DECODING, covers=(stage.id, *stage.variant_names), as_named=True, inputs=tuple(KINDS))


def by_start(records: Iterable[T], key: Callable[[T], Any], wanted: Sequence[Any]) -> list[list[T]]:
    """For each start of a machine, the records with the wanted keys, of its newest run that has them all.

    Only starts with the machine code, or library versions, of the newest of these runs, so that they differ in the
    machine but not in the code.

    Args:
        records: records with a run and a GPU.
        key: identifies a record within its run; the last duplicate counts.
        wanted: keys, in the order of the result.

    Returns:
        One list per start, that of the newest run last; empty if no run has all keys.
    """
    runs: dict[str, dict[Any, T]] = {}
    for record in records:
        runs.setdefault(record.run, {})[key(record)] = record
    whole = {run: [by_key[of_row] for of_row in wanted] for run, by_key in runs.items() if by_key.keys() >= set(wanted)}
    if not whole:
        return []
    newest = whole[max(whole)]
    starts: list[list[T]] = []
    for run in sorted(whole, reverse=True):
        if all(map(same_code, whole[run], newest)) and not any(_one_start(whole[run][0], known[0]) for known in starts):
            starts.append(whole[run])
    return starts[::-1]


def same_starts(first: Sequence[Sequence[T]], second: Sequence[Sequence[T]]) -> list[list[T]]:
    """Join two results of `by_start` on the starts that both have."""
    return [[*ours, *theirs] for ours in first for theirs in second if _one_start(ours[0], theirs[0])]


_STAGES_ALONE = {"flashlab", "cuda-core", UNUSED}
"""Software that libraries and ceilings do not use: it loads stages and reads their machine code."""


def same_code(ours: Any, theirs: Any) -> bool:
    """Whether two records have the same machine code, or the same library with the same versions of common software."""
    if (cubin := getattr(ours, "cubin", None)) is not None:
        return bool(cubin == theirs.cubin)
    versions = ((name, theirs.software.get(name, version), version) for name, version in ours.software.items())
    return all(name in _STAGES_ALONE or known == version for name, known, version in versions)


def _one_start(record: Base, other: Base) -> bool:
    """Whether two records are from the same machine start, or for older records from the same GPU."""
    ours, theirs = record.start, other.start
    return ours.same_as(theirs) if ours and theirs else record.gpu.fingerprint == other.gpu.fingerprint


class Filled(Measurement):
    """A row with samples of other runs for states that its own run lacks."""

    origins: Mapping[str, tuple[str, str]]
    """Run and GPU fingerprint of samples from other runs, by `regime cache`.

    From the same session, or for a library possibly from a later one.
    """


def select(rows: Iterable[Measurement], sessions: Mapping[str, str], policy: Policy = SHOWN) -> tuple[Measurement, ...]:
    """Select the rows to show for each problem: see the module for the rule.

    Problems are in display order, and the rows of a problem as in `ordered`. To select for one problem, or among some
    runs, filter the rows first.

    Args:
        sessions: session of each run, from `rows.sessions`.

    Returns:
        The rows; those with samples of other runs are `Filled`.
    """
    able = [row for row in rows if not row.with_lse and not _is_edited_copy(row)]
    if policy.off_ladder != "with":
        runs = {row.run for row in able if is_off_ladder(row)}
        able = [row for row in able if (row.run in runs) == (policy.off_ladder == "only")]
    candidates: dict[Problem, dict[str, dict[str, dict[str, Measurement]]]] = {}
    for row in able:
        if row.problem.inputs in policy.inputs and (policy.features or not row.problem.features):
            key = row.run if policy.within == "run" else sessions[row.run]
            groups = candidates.setdefault(row.problem, {})
            groups.setdefault(key, {}).setdefault(row.run, {})[row.name] = row
    of_ratios = policy.within == "session" and policy.off_ladder == "without"
    ratios = contested(able, sessions) if of_ratios else {}
    chosen: list[Measurement] = []
    for problem in sorted(candidates, key=problem_order):
        held = held_against(ratios.get(problem, ()), sessions)
        first = held[0].run if held else ""
        merged = {key: _merged(runs, policy.covers, first) for key, runs in candidates[problem].items()}
        tried = {key: _tried(by_name, policy.covers) for key, by_name in merged.items()}
        eligible = [sessions[first]] if first else list(merged)
        if not first and policy.within == "session" and not policy.as_named:
            eligible = _of_the_last(merged, policy.covers)
        best = max(
            eligible,
            key=lambda key: (
                policy.as_named and sum(map(_is_as_named, tried[key])),
                any(row.samples for row in merged[key].values() if row.kind == "peer"),
                len(tried[key]),
                key,
            ),
        )
        by_name = merged[best]
        if of_ratios:
            _fill(by_name, [merged[key] for key in sorted(merged, reverse=True) if key != best], policy.covers)
        chosen += ordered(by_name.values())
    return tuple(chosen)


def _tried(by_name: Mapping[str, Measurement], names: Collection[str]) -> list[Measurement]:
    return [row for name, row in by_name.items() if name in names and row.status != "unsupported"]


def _is_as_named(row: Measurement) -> bool:
    """Whether a stage ran with the tunables that its name implies today."""
    stage, given = registry.parse(row.name)
    return row.cubin is not None and row.cubin.parameters == stage.parameters(row.problem.head_dim, given)


def _merged(
    runs: Mapping[str, Mapping[str, Measurement]], covers: Collection[str], first: str
) -> dict[str, Measurement]:
    """Rows of one problem from the runs of a session, by name.

    Duplicates are from the run `first`, else from the run that tried most of the ladder, then of `covers`.
    """

    def rank(run: str) -> tuple[bool, int, int, int, str]:
        of_run = runs[run]
        states = {(samples.regime, samples.cache) for row in of_run.values() for samples in row.settled}
        return run == first, len(_tried(of_run, registry.STAGES)), len(_tried(of_run, covers)), len(states), run

    by_name: dict[str, Measurement] = {}
    for run in sorted(runs, key=rank):
        for name, row in runs[run].items():
            known = by_name.get(name)
            if known is None:
                by_name[name] = row
            elif row.samples or row.kind == "stage" or not known.samples:
                # Else the run lacked a library that another had.
                by_name[name] = _filled(row, known)
    return by_name


def _of_the_last(sessions: Mapping[str, Mapping[str, Measurement]], names: Sequence[str]) -> list[str]:
    """The sessions that timed the last stage timed in any of them, with the machine code of the newest of them.

    All sessions if none timed one of the stages `names`.
    """

    def code(key: str) -> object:
        cubin = sessions[key][last].cubin
        return cubin and cubin.sha256

    timed = {name for by_name in sessions.values() for name, row in by_name.items() if name in names and row.samples}
    if not timed:
        return list(sessions)
    last = max(timed, key=names.index)
    able = [key for key, by_name in sessions.items() if last in by_name and by_name[last].samples]
    newest = code(max(able))
    return [key for key in able if code(key) == newest]


def _fill(by_name: dict[str, Measurement], others: Iterable[Mapping[str, Measurement]], names: Collection[str]) -> None:
    """The stages `names` and the libraries, or states of libraries, that a session lacks, from others in that order.

    Of libraries those too that do not take the problem: they were tried.
    """
    for session in others:
        for name, row in session.items():
            known = by_name.get(name)
            cannot = row.kind == "peer" and row.status == "unsupported" and known is None
            if not (cannot or (row.samples and (row.kind == "peer" or name in names))):
                continue
            if known is None or not known.samples:
                by_name[name] = row
            elif row.kind == "peer":
                by_name[name] = _filled(known, row)


def _filled(ours: Measurement, theirs: Measurement) -> Measurement:
    """`ours` with the samples of `theirs` in states that it has none of, where both are of the same code."""
    states = {(samples.regime, samples.cache) for samples in ours.settled}
    more = tuple(samples for samples in theirs.settled if (samples.regime, samples.cache) not in states)
    if not ours.samples or not more or not same_code(ours, theirs):
        return ours
    added = {f"{extra.regime} {extra.cache}": origin(theirs, extra.regime, extra.cache) for extra in more}
    fields = {name: getattr(ours, name) for name in Measurement.model_fields} | {"samples": (*ours.settled, *more)}
    return Filled(**fields, origins={**(ours.origins if isinstance(ours, Filled) else {}), **added})


def contested(rows: Iterable[Measurement], sessions: Mapping[str, str]) -> dict[Problem, list[list[Measurement]]]:
    """By problem without a window and a soft cap, the runs' rows that a ratio to the libraries may be of."""
    rows = list(rows)
    off_ladder = {row.run for row in rows if is_off_ladder(row)}
    able = [row for row in rows if row.run not in off_ladder and not row.with_lse]
    rungs = grouped((row for row in able if row.name in registry.STAGES and row.samples), lambda row: row.name)
    last = next((stage for stage in reversed([*registry.STAGES.values()]) if stage.id in rungs), None)
    among = [row for name in (last.id, last.parent or "") for row in rungs.get(name, ())] if last else able
    newer = {sessions[row.run] for row in among}
    by_run: dict[Problem, dict[str, dict[str, Measurement]]] = {}
    for row in able:
        plain = not row.problem.features and (row.kind == "peer" or row.name in registry.STAGES)
        if plain and sessions[row.run] in newer:
            by_run.setdefault(row.problem, {}).setdefault(row.run, {})[row.name] = row
    return {problem: [list(by_name.values()) for by_name in runs.values()] for problem, runs in by_run.items()}


def held_against(runs: Iterable[Sequence[Measurement]], sessions: Mapping[str, str]) -> list[Measurement]:
    """Select the run whose rows give the burst ratio to the fastest library at a problem; may be empty.

    Args:
        runs: rows of each run, from `contested`, possibly filtered.
    """
    able = [list(rows) for rows in runs if fastest_stage(rows) and fastest_peer(rows)]
    if not able:
        return []
    times_us: dict[str, dict[str, float]] = {}
    rung: dict[str, int] = {}
    for rows in able:
        session = sessions[rows[0].run]
        known = times_us.setdefault(session, {})
        for row in rows:
            if is_library(row) and (time_us := median_us(row)):
                name = "sdpa_cudnn" if row.name == peers.BESIDE else row.name  # what torch chooses is often that
                known[name] = min(time_us, known.get(name, math.inf))
        rung[session] = max(highest_rung(rows), rung.get(session, -1))
    best_us = min(min(of.values()) for of in times_us.values())
    near = {session: of for session, of in times_us.items() if min(of.values()) <= NEAR * best_us}
    fastest = {min(of, key=lambda name: of[name]) for of in near.values()}
    chosen = max(near, key=lambda session: (rung[session], len(fastest & near[session].keys()), session))
    able = [rows for rows in able if sessions[rows[0].run] == chosen]
    best = best_peers(row for rows in able for row in rows)

    def rank(rows: list[Measurement]) -> tuple[bool, int, int, str]:
        timed = {row.name for row in rows if row.samples_of()}
        return (not best.isdisjoint(timed), highest_rung(rows), len(timed), rows[0].run)

    return max(able, key=rank)


def highest_rung(rows: Iterable[Measurement], regime: Regime = "burst") -> int:
    """Index of the last rung that was timed; -1 if none was."""
    return max((_LADDER.get(row.name, -1) for row in rows if row.samples_of(regime)), default=-1)


def best_peers(rows: Iterable[Measurement]) -> set[str]:
    """Libraries within a percent of the fastest in bursts."""
    times = [(time_us, row.name) for row in rows if is_library(row) and (time_us := median_us(row))]
    best_us, _ = min(times, default=(0.0, ""))
    return {name for time_us, name in times if time_us <= 1.01 * best_us}


@dataclass(frozen=True, kw_only=True)
class Results:
    """Selected records of one GPU."""

    gpu: str
    """Folder name under data/."""
    machine: Machine | None
    """None if machine.json is missing or damaged."""
    problems: Mapping[Problem, tuple[Measurement, ...]]
    """Rows of each problem in `ordered` order, chosen by `SHOWN`."""
    ceilings: Mapping[str, Ceiling]
    records: Sequence[Measurement] = field(default=(), compare=False, repr=False)
    """All recorded rows of the GPU, from which `problems` were selected."""
    sessions: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Session of each run."""
    inputs: str = NORMAL
    """The first of the kinds of inputs that the problems were selected from."""

    def __bool__(self) -> bool:
        return bool(self.records or self.ceilings)

    @property
    def name(self) -> str:
        """Product name of the GPU."""
        return self.hardware.name if self.hardware else self.gpu

    @property
    def hardware(self) -> Gpu | None:
        """Properties of the GPU, from machine.json or else the first row."""
        if self.machine:
            return self.machine.gpu
        return next((row.gpu for rows in self.problems.values() for row in rows), None)

    @property
    def newest(self) -> str:
        """Id of the newest run shown; ids sort by time."""
        runs = [row.run for rows in self.problems.values() for row in rows] + [c.run for c in self.ceilings.values()]
        return max(runs, default="")

    @property
    def first(self) -> Problem | None:
        """The problem at which the ladder is shown: the sources' shape if measured, else the first."""
        return next(iter(self.problems), None)

    @property
    def lacking(self) -> str:
        """Describe what is missing from a complete set of records; empty if it is complete.

        A complete set has every stage of the ladder that the GPU supports at the problem `first`, and rows of every
        problem of the suite `standard`.
        """
        problem, standard = suite("first")[0], suite("standard")
        arch = registry.arch_for(self.hardware.compute_capability) if self.hardware else None
        runnable = {stage.id for stage in registry.STAGES.values() if not stage.why_not(problem, arch)}
        absent = runnable.difference(row.name for row in self.problems.get(problem, ()))
        missing = [required for required in standard if required not in self.problems]
        parts = [f"{len(absent)} of {len(runnable)} stages at {problem.label}"] if absent else []
        parts += [f"{len(missing)} of the {len(standard)} problems of the suite standard"] if missing else []
        return " and ".join(parts)

    def rows(
        self, problem: Problem | None = None, *, stage_ids: Sequence[str] | None = None
    ) -> tuple[Measurement, ...]:
        """Rows of `problem`, by default `first`; if given, only the stages in `stage_ids`, and all libraries."""
        chosen = problem or self.first
        rows = self.problems.get(chosen, ()) if chosen else ()
        return rows if stage_ids is None else tuple(r for r in rows if r.kind == "peer" or r.name in stage_ids)

    def with_last_rung(self) -> dict[Problem, tuple[Measurement, ...]]:
        """The problems at which the last stage of `first` was timed too: elsewhere the fastest is an older one."""
        last = [row.name for row in self.rows() if row.kind == "stage" and rate(row) is not None][-1:]
        return {
            problem: rows
            for problem, rows in self.problems.items()
            if any(row.name in last and rate(row) is not None for row in rows)
        }

    def libraries(self, dtype: str) -> frozenset[str]:
        """The libraries that have a burst time in an element type at any problem: the set that percentages are of."""
        rows = (row for problem, of in self.problems.items() if problem.dtype == dtype for row in of)
        return frozenset(row.name for row in rows if is_library(row) and rate(row) is not None)

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries without support for the element type of `problem` (default: `first`), timed in another type.

        At the same shape and mask and in the same session, so that the rates are comparable, even if another session is
        shown for their type. They are never the fastest library that percentages refer to: percentages compare rows of
        one element type.
        """
        of = problem or self.first
        lacking = {(row.run, row.name) for row in self.rows(of) if row.kind == "peer" and row.status == "unsupported"}
        if of is None or not lacking:
            return ()
        beside: dict[str, Measurement] = {}
        for run, name in lacking:
            for other in self.records:
                alike = replace(other.problem, dtype=of.dtype) == of and other.problem != of
                if alike and other.name == name and self.sessions[other.run] == self.sessions[run] and rate(other):
                    beside[name] = other
        return ordered(beside.values())


def fastest_of(
    libraries: Collection[str], rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot"
) -> Measurement | None:
    """The fastest library at one problem if each of `libraries` was tried there, else None.

    Percentages of it are thus relative to the fastest of the same set at every problem and in every state. A
    library that cannot do the problem was tried.
    """
    library_rows = [row for row in rows if is_library(row) and row.status != "missing"]
    tried = {row.name for row in library_rows if row.status != "ok" or rate(row, regime, cache) is not None}
    return fastest_peer(library_rows, regime, cache) if tried.issuperset(libraries) else None


def on_inputs(problems: Iterable[Problem]) -> str:
    """Describe the inputs: `on normally distributed inputs of unit scale`, or the kinds by name."""
    kinds = dict.fromkeys(problem.inputs for problem in problems)
    return f"on {' and '.join(_INPUTS.get(kind, f'inputs of the kind {kind}') for kind in kinds)}"


_INPUTS: Mapping[str, str] = {
    NORMAL: "normally distributed inputs of unit scale",
    TRAINED: "Q, K and V of a trained model",
}


def bench(suite: str, regime: Regime = "burst", inputs: str = NORMAL) -> str:
    """Return the command that measures a suite in a regime on a kind of inputs."""
    of_kind = "" if inputs == NORMAL else f" --inputs {inputs}"
    return f"flashlab bench --suite {suite}{of_kind}{' --sustained 5' if regime == 'sustained' else ''}"


def of_lengths(
    shown: Results, *, head_dim: int, mask: str, dtype: str, regime: Regime = "burst"
) -> tuple[Problem, ...]:
    """The problems of the suite `lengths` on `shown.inputs` with a time in the regime, the shortest first.

    Raises:
        NoDataError: fewer than two.
    """
    problems = tuple(
        problem
        for problem in (replace(problem, inputs=shown.inputs) for problem in suite("lengths"))
        if (problem.head_dim, problem.mask, problem.dtype) == (head_dim, mask, dtype)
        and any(row.samples_of(regime) for row in shown.problems.get(problem, ()))
    )
    if len(problems) < 2:
        wanted = f"{regime} times at several sequence lengths, D{head_dim} {mask} {dtype}, on {shown.gpu}"
        raise NoDataError.of(wanted, bench("lengths", regime, shown.inputs), len(problems))
    return problems


def profiles(gpu: str, data: Path = DATA) -> tuple[StageProfile, ...]:
    """The newest profile of each stage at each problem, the first problem first, in the ladder's order; may be none."""
    profiles = (profile for profile in store.records(gpu, StageProfile, data) if profile.problem.inputs == NORMAL)
    newest = {(profile.stage, profile.problem): profile for profile in profiles}
    order = sorted(newest, key=lambda key: (problem_order(key[1]), _LADDER.get(key[0], len(_LADDER))))
    return tuple(newest[key] for key in order)


def profile_provenance(launches: Sequence[StageProfile]) -> str:
    """Caption with the provenance of one or more profiles: GPU, problem, tool, date, commit."""
    versions = ", ".join(sorted({profile.ncu for profile in launches}))
    how = f"Nsight Compute {versions}, one launch each from cold caches"
    return sourced(launches[0].gpu, problems_of(launches), how, runs=(profile.run for profile in launches))


def median_us(row: Timed | None, regime: Regime = "burst", cache: Cache = "hot") -> float | None:
    """Median time per call in µs; None without a row or such samples."""
    samples = row.samples_of(regime, cache) if row else None
    return samples.median_us if samples else None


def rate(row: Measurement | None, regime: Regime = "burst", cache: Cache = "hot") -> float | None:
    """TFLOP/s at the median time; None without a row or such samples."""
    time_us = median_us(row, regime, cache)
    return row.problem.tflops(time_us) if row and time_us else None


def speedup(ours: Timed | None, other: Timed | None, regime: Regime = "burst", cache: Cache = "hot") -> float | None:
    """Speed-up of `ours` over `other`, the ratio of medians; None if either has no such samples."""
    our_us, other_us = (median_us(row, regime, cache) for row in (ours, other))
    return other_us / our_us if our_us and other_us else None


def ordered(rows: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Sort rows: stages in ladder order, then libraries, fastest first, those without a time last."""

    def key(row: Measurement) -> tuple[int, float, str]:
        if row.kind == "stage":
            return (0, _LADDER.get(row.name, len(_LADDER)), row.name)
        return (1, -(rate(row) or 0.0), row.name)

    return tuple(sorted(rows, key=key))


def with_beside(rows: Iterable[Measurement], beside: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """`rows` in `ordered` order, with those of `Results.beside` in place of the same libraries' rows without a time."""
    others = {row.name: row for row in beside}
    return ordered(others.get(row.name, row) if row.kind == "peer" else row for row in rows)


def is_library(row: Measurement) -> bool:
    """Whether a row belongs to a library with which stages are compared."""
    return row.kind == "peer" and peers.is_rival(row.name)


def fastest_peer(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> Measurement | None:
    """The library with the highest rate, of those that compute in the input dtype; None if none has a time."""
    timed = [row for row in rows if is_library(row) and rate(row, regime, cache)]
    return max(timed, key=lambda row: rate(row, regime, cache) or 0.0, default=None)


NEAR = 1.05
"""Ratio within which two GPUs of one product agree, in the time of the same library."""


def fastest_stage(
    rows: Iterable[Measurement], regime: Regime = "burst", *, records: Iterable[Measurement] = ()
) -> Measurement | None:
    """The fastest stage of one problem, of those on the ladder that may be chosen; None where none has a time.

    Of the stages within `NEAR` of the highest rate, the one to which the fewest others are faster: two rows of one run
    are compared as they are, two of different runs in the newest run of `records` that timed both stages there. Where
    none did, as they are too.

    Args:
        records: all that are on record; not needed where `rows` are of one run.
    """
    able = {stage.id for stage in registry.STAGES.values() if not stage.by_name_only}
    rates = {row.name: (tflops, row) for row in rows if row.name in able and (tflops := rate(row, regime))}
    top = max((tflops for tflops, _ in rates.values()), default=0.0)
    near = {name: row for name, (tflops, row) in rates.items() if NEAR * tflops >= top}
    by_run: dict[str, dict[str, float]] = {}
    if len({origin(row, regime, "hot") for row in near.values()}) > 1:
        problem = next(iter(near.values())).problem
        for record in records:
            if record.name in near and record.problem == problem and not record.with_lse:
                by_run.setdefault(record.run, {})[record.name] = rate(record, regime) or 0.0

    def is_faster(name: str, other: str) -> bool:
        ours, theirs = near[name], near[other]
        together = [run for run, of in by_run.items() if of.get(name) and of.get(other)]
        if together and origin(ours, regime, "hot") != origin(theirs, regime, "hot"):
            return by_run[max(together)][name] > by_run[max(together)][other]
        return rates[name][0] > rates[other][0]

    def losses_then_rate(name: str) -> tuple[int, float]:
        return -sum(is_faster(other, name) for other in near), rates[name][0]

    return near[max(near, key=losses_then_rate)] if near else None


def parent_of(row: Measurement, rows: Iterable[Measurement]) -> Measurement | None:
    """The row of the parent of `row`'s stage.

    None for the first stage, and if the parent was not measured in the same session on the same GPU.
    """
    stage = registry.RUNGS.get(row.name)
    parent = next((r for r in rows if stage and r.kind == "stage" and r.name == stage.parent), None)
    return parent if parent and _place(parent) == _place(row) else None


def problem_order(problem: Problem) -> tuple[int, int, int, bool, bool, Problem, int]:
    """Sort key for the display order of problems, the sources' shape first."""
    shapes = (FIRST_SHAPE, *STANDARD_SHAPES)
    position = shapes.index(problem.shape) if problem.shape in shapes else len(shapes)
    plain, kind = replace(problem, inputs=NORMAL), list(KINDS).index(problem.inputs)
    return (position, problem.head_dim, problem.q_len, problem.dtype != "float16", problem.causal, plain, kind)


def is_off_ladder(row: Measurement) -> bool:
    """Whether a row is from a stage that was never on the ladder, with any tunables."""
    stage = registry.OFF_LADDER.get(row.name.partition("[")[0]) if row.kind == "stage" else None
    return stage is not None and not stage.retired


def _is_edited_copy(row: Measurement) -> bool:
    """Whether a row is of what `bench --source` was given (`registry.implementations`), which no page shows."""
    return row.kind == "stage" and "@" in row.name


def origin(row: Measurement, regime: Regime, cache: Cache) -> tuple[str, str]:
    """The run of a row's samples in one state, and its GPU's fingerprint."""
    own = (row.run, row.gpu.fingerprint)
    return row.origins.get(f"{regime} {cache}", own) if isinstance(row, Filled) else own


def _place(row: Measurement, regime: Regime = "burst") -> tuple[str, str]:
    """The commit and GPU of a row's samples with a hot cache."""
    run, chip = origin(row, regime, "hot")
    return commit_label(run), chip


def elsewhere(rows: Sequence[Measurement], regime: Regime = "burst") -> tuple[Measurement, ...]:
    """The rows of one problem whose samples are from another commit than the last rung's.

    They were filled in from another session, as were libraries' on a GPU without a timed stage.
    """
    timed = [row for row in rows if row.samples_of(regime)]
    rungs = [row for row in timed if row.kind == "stage" and row.name in _LADDER]
    if not rungs:
        return ()
    commit, _ = _place(max(rungs, key=lambda row: _LADDER[row.name]), regime)
    main = {place for row in rungs if (place := _place(row, regime))[0] == commit}
    return tuple(
        row
        for row in timed
        if (_place(row, regime) not in main if row.kind == "peer" else _place(row, regime)[0] != commit)
    )


def places(rows: Iterable[Measurement], regime: Regime = "burst") -> tuple[int, int]:
    """Numbers of (commit, GPU) pairs and of GPUs among the rows of a chart: `(sessions, chips)`."""
    distinct = {_place(row, regime) for row in rows if row.samples_of(regime)}
    return len(distinct), len({chip for _, chip in distinct})


def off_ladder(
    gpu: str,
    data: Path = DATA,
    stages: Mapping[str, registry.Stage] = registry.DEAD_ENDS,
    policy: Policy = OFF_LADDER,
) -> dict[Problem, tuple[Measurement, ...]]:
    """Dead ends, or other `stages`, and the rows measured with them, by problem; empty if none was timed.

    Rungs of the ladder come first, then those off it, each before its variants, then libraries, the fastest first.
    """
    place = {name: position for position, name in enumerate((*registry.STAGES, *_OFF_LADDER))}

    def position(row: Measurement) -> tuple[int, str]:
        # Libraries stay in the order of `ordered`, for sorting is stable.
        return (place.get(row.name, len(place)), row.name) if row.kind == "stage" else (len(place) + 1, "")

    return {
        problem: tuple(sorted(rows, key=position))
        for problem, rows in _selected(gpu, data, policy).items()
        if any(is_off_ladder(row) and row.name.partition("[")[0] in stages for row in rows)
    }


def beyond(gpu: str, data: Path = DATA, inputs: Collection[str] = (NORMAL,)) -> dict[Problem, tuple[Measurement, ...]]:
    """Rows that `load` leaves out, by problem: stages off the ladder, and problems with a window or a soft cap.

    Selected by `OFF_LADDER`, `DECODING` and `LADDER`, of which the last applies if several select a problem.
    """
    beside, decoding, ladder = (replace(policy, inputs=tuple(inputs)) for policy in (OFF_LADDER, DECODING, LADDER))
    return {
        **off_ladder(gpu, data, registry.OFF_LADDER, beside),
        **off_ladder(gpu, data, registry.DECODE, decoding),
        **{problem: rows for problem, rows in _selected(gpu, data, ladder).items() if problem.features},
    }


def _selected(gpu: str, data: Path, policy: Policy) -> dict[Problem, tuple[Measurement, ...]]:
    """Select a GPU's records by a policy, by problem."""
    rows = select(store.records(gpu, Measurement, data), sessions(gpu, data), policy)
    return {problem: tuple(of) for problem, of in grouped(rows, lambda row: row.problem).items()}


def load(gpu: str, data: Path = DATA, inputs: Collection[str] = (NORMAL,)) -> Results:
    """Load the selected records of `gpu` on the given kinds of inputs; falsy if there are none."""
    try:
        machine = Machine.model_validate_json((data / gpu / "machine.json").read_bytes())
    except (OSError, ValueError):
        machine = None
    return Results(
        gpu=gpu,
        machine=machine,
        problems=_selected(gpu, data, replace(SHOWN, inputs=tuple(inputs))),
        ceilings=store.newest_ceilings(gpu, data),
        records=store.records(gpu, Measurement, data),
        sessions=sessions(gpu, data),
        inputs=next(iter(inputs), NORMAL),
    )


CheckFolder = Literal["checks", "random", "flash-attention"]
Comparisons = tuple[Compared, ...]


def _check_files(gpu: str, data: Path, folder: CheckFolder, inputs: Collection[str]) -> dict[Path, Comparisons]:
    """The comparisons on these kinds of inputs, by file, the oldest first."""
    paths = store.files(data / gpu / folder)
    return {path: tuple(line for line in read_lines(path) if line.problem.inputs in inputs) for path in paths}


def checks(
    gpu: str, data: Path = DATA, folder: CheckFolder = "checks", inputs: Collection[str] = (NORMAL,)
) -> dict[Path, Comparisons]:
    """The newest comparison of most stages over hostile lengths and layouts, or random ones, and those after it.

    By file, on these kinds of inputs; may be empty. Stages off the ladder do not count.
    """
    files = {path: lines for path, lines in _check_files(gpu, data, folder, inputs).items() if lines}
    stages = {
        path: len({line.stage.partition("[")[0] for line in lines} - registry.OFF_LADDER.keys())
        for path, lines in files.items()
    }
    most = max(stages.values(), default=0)
    whole = [path for path, count in stages.items() if count and count == most]
    return {path: lines for path, lines in files.items() if whole and path >= whole[-1]}


def newest_checks(
    gpu: str, data: Path = DATA, folder: CheckFolder = "checks", inputs: Collection[str] = (NORMAL,)
) -> dict[str, Comparisons]:
    """By stage, the lines of the newest run that compared it with the oracle on these kinds of inputs; may be empty.

    A run with less than half the lines that another one has of the stage is a fragment, and does not count.
    """
    runs: dict[str, list[Comparisons]] = {}
    for lines in _check_files(gpu, data, folder, inputs).values():
        for stage, of_stage in grouped(lines, lambda line: line.stage).items():
            runs.setdefault(stage, []).append(tuple(of_stage))
    most = {stage: max(map(len, several)) for stage, several in runs.items()}
    return {
        stage: next(lines for lines in reversed(several) if 2 * len(lines) >= most[stage])
        for stage, several in runs.items()
    }


def emulated_checks(gpu: str, data: Path = DATA) -> Comparisons:
    """Lines of the newest comparison whose inputs the emulator was given too (`flashlab check --on both --record`).

    On normal inputs; empty where there is none.
    """
    for lines in reversed(_check_files(gpu, data, "checks", (NORMAL,)).values()):
        if emulated := tuple(line for line in lines if line.emulator):
            return emulated
    return ()


def load_all(data: Path = DATA) -> tuple[Results, ...]:
    """Load the results of all GPUs with data, the main one first."""
    return tuple(load(gpu, data) for gpu in store.gpus(data))


def with_stage(shown: Results, stage_id: str, data: Path = DATA) -> Results:
    """`shown` or, if it has no row of the stage, the results of the first GPU that timed the stage."""
    others = (load(gpu, data) for gpu in store.gpus(data) if gpu != shown.gpu)
    return next(
        (results for results in chain((shown,), others) if any(row.name == stage_id for row in results.rows())), shown
    )


def clocks(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """Describe the SM clock of samples: `1980 MHz`, `1485–1740 MHz`, `clock not recorded`.

    During the calls if known, else right after them.
    """
    timed = [samples for row in rows if (samples := row.samples_of(regime, cache))]
    readings_mhz = [samples.call_clock_mhz or samples.sm_clock_mhz for samples in timed]
    medians = [round(median(values)) for values in readings_mhz if values]
    if not medians:
        return "clock not recorded"
    return f"{medians[0]} MHz" if len(set(medians)) == 1 else f"{min(medians)}–{max(medians)} MHz"


def call_clock(row: Measurement, regime: Regime = "burst") -> float | None:
    """Median SM clock during a row's calls with a hot L2, in MHz; None if unknown."""
    samples = row.samples_of(regime)
    return median(samples.call_clock_mhz) if samples and samples.call_clock_mhz else None


def commit_label(run: str) -> str:
    """The commit of a run id: `0123abc`, and whether the tree was modified."""
    match = re.match(RUN, run)
    return f"{match['commit'][:7]}{' + changes' if match['dirty'] else ''}" if match else run


def date(run: str) -> str:
    """The date of a run id, in ISO 8601."""
    return f"{run[:4]}-{run[4:6]}-{run[6:8]}"


def days(runs: Iterable[str]) -> str:
    """The dates of runs: the first, or the first and the last."""
    dates = sorted(map(date, runs))
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def provenance(rows: Sequence[Measurement], regime: Regime = "burst", cache: Cache = "hot", *, state: str = "") -> str:
    """Caption with the provenance of one or more rows: GPU, clocks, problem, regime, date, commit.

    `state`: describes the timing state if the rows do not share one.
    """
    facts = (
        *(rows[0].gpu.name, f"SM {clocks(rows, regime, cache)}", problems_of(rows)),
        *(on_inputs(row.problem for row in rows), state or STATES[regime, cache]),
    )
    return sourced(*facts, runs=(origin(row, regime, cache)[0] for row in rows))


def problems_of(records: Iterable[Any]) -> str:
    """The problem that records are of, for a caption; of several, how many."""
    label, *others = dict.fromkeys(record.problem.label for record in records)
    return f"{1 + len(others)} problems" if others else str(label)


def sourced(*facts: str, runs: Iterable[str]) -> str:
    """A caption's last line: GPU and other facts, and the days and commits of the runs, one at least."""
    ids = set(runs)
    return " · ".join([*facts, days(ids), f"commit {', '.join(sorted(set(map(commit_label, ids))))}"])


def run_files(records: Iterable[Base | StageProfile]) -> tuple[str, ...]:
    """Files of records, relative to data/: `nvidia-h200/runs/….jsonl`."""

    def files(record: Base | StageProfile) -> Iterator[str]:
        gpu = slug(record.gpu) if isinstance(record, StageProfile) else record.gpu.slug
        kind = Measurement if isinstance(record, Filled) else type(record)
        others = [run for run, _ in record.origins.values()] if isinstance(record, Filled) else []
        yield from (f"{gpu}/{store.FOLDERS[kind]}/{run}.jsonl" for run in (record.run, *others))

    return tuple(sorted({file for record in records for file in files(record)}))
