"""What is shown of a GPU's data: for every problem, the newest run that tells most of the ladder.

One chart is one run, because a ratio means something only between rows that were measured in turn. Among the runs of a
problem the one that tried most stages wins, then the newest: a later run of a single stage does not hide the ladder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flashlab import records, stages
from flashlab.errors import NoDataError
from flashlab.paths import DATA
from flashlab.problem import FIRST_SHAPE, STANDARD_SHAPES, Problem
from flashlab.records import Cache, Ceiling, Damage, Machine, Measurement, Regime

STATES: tuple[tuple[Regime, Cache], ...] = (("burst", "hot"), ("burst", "cold"), ("sustained", "hot"))
"""The ways a time is taken, as the report shows them: the headline first."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What is shown of one GPU."""

    gpu: str
    """Folder name under data/."""
    machine: Machine | None
    """None where machine.json is missing or damaged."""
    problems: Mapping[Problem, tuple[Measurement, ...]]
    """Rows of each problem, all of one run, in `ordered` order."""
    ceilings: Mapping[str, Ceiling]
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

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries that do not take the element type of `problem` (of `first`, where None), timed in another.

        At the same shape and mask and in the same run, so that the rates may stand side by side. They are never the
        fastest library that percentages refer to: a percentage keeps to one element type.
        """
        wanted = problem or self.first
        rows = self.problems.get(wanted, ()) if wanted else ()
        lacking = {(row.run, row.name) for row in rows if row.kind == "peer" and row.status == "unsupported"}
        found: dict[str, Measurement] = {}
        for other, theirs in self.problems.items():
            if wanted is None or other == wanted or replace(other, dtype=wanted.dtype) != wanted:
                continue
            for row in theirs:
                if (row.run, row.name) in lacking and rate(row) is not None:
                    found.setdefault(row.name, row)
        return ordered(found.values())


def rate(row: Measurement, regime: Regime = "burst", cache: Cache = "hot") -> float | None:
    """TFLOP/s at the median time; None where the row has no such time."""
    samples = row.samples_of(regime, cache)
    return row.problem.problem().tflops(samples.median_us) if samples else None


def ordered(rows: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Stages in the ladder's order, then peers, the fastest first and those without a time last."""
    ladder = {stage_id: position for position, stage_id in enumerate(stages.STAGES)}

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
    """The stage with the highest rate; None where no stage has a time."""
    timed = [row for row in rows if row.kind == "stage" and rate(row, regime, cache)]
    return max(timed, key=lambda row: rate(row, regime, cache) or 0.0, default=None)


def parent_of(row: Measurement, rows: Iterable[Measurement]) -> Measurement | None:
    """The row of the stage that `row`'s stage was made from; None at the ladder's foot or where it was not measured."""
    stage = stages.STAGES.get(row.name)
    return next((r for r in rows if stage and r.kind == "stage" and r.name == stage.parent), None)


def _problem_order(problem: Problem) -> tuple[int, bool, bool, Problem]:
    shapes = (FIRST_SHAPE, *STANDARD_SHAPES)
    position = shapes.index(problem.shape) if problem.shape in shapes else len(shapes)
    return (position, problem.dtype != "float16", problem.causal, problem)


def load(gpu: str, data: Path = DATA) -> Results:
    """What is shown of `gpu`.

    Raises:
        NoDataError: it has no run.
    """
    runs = records.runs(gpu, data)
    candidates: dict[Problem, list[tuple[int, str, tuple[Measurement, ...]]]] = {}
    for run in runs:
        by_problem: dict[Problem, dict[str, Measurement]] = {}
        for row in run.measurements:
            by_problem.setdefault(row.problem.problem(), {})[row.name] = row
        for problem, rows in by_problem.items():
            tried = sum(name in stages.STAGES for name in rows)
            candidates.setdefault(problem, []).append((tried, run.id, tuple(rows.values())))
    shown = {problem: ordered(max(found, key=lambda c: c[:2])[2]) for problem, found in candidates.items()}
    machine_file = data / gpu / "machine.json"
    try:
        machine = Machine.model_validate_json(machine_file.read_bytes())
    except (OSError, ValueError):
        machine = None
    return Results(
        gpu=gpu,
        machine=machine,
        problems={problem: shown[problem] for problem in sorted(shown, key=_problem_order)},
        ceilings=records.newest_ceilings(gpu, data),
        damage=records.verify(gpu, data),
    )


def checks_file(gpu: str, data: Path = DATA) -> Path:
    """The file of the newest comparison of stages over hostile lengths and layouts.

    Raises:
        NoDataError: there is none.
    """
    files = sorted((data / gpu / "checks").glob("*.jsonl"))
    if not files:
        raise NoDataError(
            f"wanted checks of {gpu}, found none in data/{gpu}/checks. `flashlab check` on such a GPU makes some"
        )
    return files[-1]


def checks(gpu: str, data: Path = DATA) -> tuple[dict[str, Any], ...]:
    """Lines of the newest comparison of stages over hostile lengths and layouts (`bench.check_stages`).

    Raises:
        NoDataError: there is none.
    """
    return _json_lines(checks_file(gpu, data))


def _json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def emulated_checks(gpu: str, data: Path = DATA) -> tuple[dict[str, Any], ...]:
    """Lines of the newest comparison whose inputs the emulator was given too (`flashlab check --on both --record`).

    Raises:
        NoDataError: there is none.
    """
    for path in sorted((data / gpu / "checks").glob("*.jsonl"), reverse=True):
        lines = tuple(line for line in _json_lines(path) if line.get("emulator"))
        if lines:
            return lines
    raise NoDataError(
        f"wanted checks of {gpu} beside the emulator, found none in data/{gpu}/checks. "
        "`flashlab check --on both --record` on such a GPU makes some"
    )


def counters(gpu: str, data: Path = DATA) -> records.Counters:
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
    return records.read_counters(files[-1])


def load_all(data: Path = DATA) -> tuple[Results, ...]:
    """Every GPU with data, the one measured last first."""
    return tuple(sorted((load(gpu, data) for gpu in records.gpus(data)), key=lambda r: r.newest, reverse=True))


def clocks(rows: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """The SM clock while the samples were taken, for people: `1980 MHz`, `1485–1740 MHz`, `clock not recorded`."""
    found = [
        samples.sm_clock_mhz for row in rows if (samples := row.samples_of(regime, cache)) and samples.sm_clock_mhz
    ]
    medians = [round(median(values)) for values in found]
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
    runs = sorted({row.run for row in rows})
    commits = sorted({commit_label(row.run, row.source.dirty) for row in rows})
    dates = sorted({date(run) for run in runs})
    parts = [
        rows[0].gpu.name,
        f"SM {clocks(rows, regime, cache)}",
        labels.pop() if len(labels) == 1 else f"{len(labels)} problems",
        f"{regime}, {cache} L2" if regime == "burst" else regime,
        dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        f"commit {', '.join(commits)}",
    ]
    return " · ".join(parts)


def run_files(rows: Iterable[Measurement | Ceiling]) -> tuple[str, ...]:
    """The raw-data files of rows, relative to data/: `nvidia-h200/runs/….jsonl`."""
    return tuple(sorted({f"{row.gpu.slug}/runs/{row.run}.jsonl" for row in rows}))
