"""Builds the table of choices, data/<gpu>/tuned.json, from the records, and compares its choices with a library.

The table has, for every stage and problem, the fastest variant of the newest tuning round, and the time in the newest
run of `flashlab bench` that timed several stages. run/choice.py reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flashlab.core.errors import NoDataError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.peers import BESIDE
from flashlab.kernels.registry import arch_for
from flashlab.measure.tune import Items, Key, cache_of, counted, items
from flashlab.query.rows import grouped
from flashlab.record import schema, store
from flashlab.record.schema import ChoiceRow, Measurement, Tuning
from flashlab.run import choice
from flashlab.run.choice import Choice


def rows(gpu_slug: str, data: Path = DATA) -> list[ChoiceRow]:
    """Build the rows of a GPU's table from its records, sorted by stage, then problem.

    For each stage and problem: the fastest variant of the newest tuning round, and the newest measurement in a run that
    also timed another stage there, else the newest of all, because two machines of one product differ by more than some
    stages do; for decoding stages, that of each set of tunables. Records on inputs other than normal, and those with
    tunables that the stage no longer has, are ignored. For few query rows, times in a step, or else on rotating K and V
    (`AS_IN_A_MODEL`), are used, and records without them ignored.

    Raises:
        NoDataError: no tuning on that GPU is on record.
    """
    tunings = store.records(gpu_slug, schema.Tuning, data)
    if not tunings:
        raise NoDataError(
            f"wanted tuning records of GPU {gpu_slug!r} under {data / gpu_slug / 'tuning'}, found none. "
            "`flashlab tune` on such a GPU makes some."
        )
    measured = store.measurements(gpu_slug, data)
    nearest: dict[Problem, int] = {}
    for each in (*tunings, *measured):
        place = choice.from_a_model(cache_of(each))
        nearest[each.problem] = min(nearest.get(each.problem, place), place)

    def counts(record: Tuning | Measurement) -> bool:
        return choice.from_a_model(cache_of(record)) == nearest[record.problem] and _plain(record.problem)

    rounds: dict[Key, dict[str, list[Tuning]]] = {}
    for record in tunings:
        timed = record.status == "ok" and record.cubin is not None
        if timed and counts(record) and choice.fits(record.stage, record.parameters):
            rounds.setdefault(Key(record.stage, record.problem), {}).setdefault(record.run, []).append(record)
    made = []
    for key, by_run in rounds.items():
        of_round = by_run[max(by_run)]
        best = min(of_round, key=lambda tuning: counted(tuning).median_us)
        made.append(_row(key, best.parameters, best, variants=len(of_round)))
    able = [
        measurement
        for measurement in measured
        if measurement.status == "ok" and measurement.cubin is not None and counts(measurement)
    ]
    beside = grouped(able, lambda measurement: (measurement.run, measurement.problem))
    taken: dict[tuple[Key, Items], tuple[bool, str, ChoiceRow]] = {}
    for measurement in able:
        assert measurement.cubin is not None
        if choice.fits(measurement.name, measurement.cubin.parameters):
            key = Key(measurement.name, measurement.problem)
            alone = len({other.name for other in beside[measurement.run, measurement.problem]}) == 1
            made_of = (not alone, measurement.run, _row(key, measurement.cubin.parameters, measurement, variants=0))
            # Decoding stages take the fastest tunables on record at a problem, so rows of others stay.
            own: Items = items(measurement.cubin.parameters) if key.stage in registry.DECODE else ()
            taken[key, own] = max(taken.get((key, own), made_of), made_of, key=lambda of: of[:2])
    made += [row for *_, row in taken.values()]
    return sorted(made, key=lambda row: (row.stage, row.problem, row.variants))


def _plain(problem: Problem) -> bool:
    """Whether shape, mask and dtype describe a problem completely, as a row of the table requires."""
    return problem == Problem.parse(problem.shape, dtype=problem.dtype, mask=problem.mask)


def _row(key: Key, parameters: Mapping[str, int], record: Tuning | Measurement, *, variants: int) -> ChoiceRow:
    assert record.cubin is not None
    return ChoiceRow(
        stage=key.stage,
        **{name: getattr(key.problem, name) for name in ("shape", "mask", "dtype")},
        parameters=dict(parameters),
        time_us=round(counted(record).median_us, 3),
        timed=cache_of(record),
        tile_q=record.cubin.tile_q,
        variants=variants,
        run=record.run,
    )


def table_text(arch: str, sm_count: int, made: Iterable[ChoiceRow]) -> str:
    """Format tuned.json with one line per row, so that diffs are readable."""
    joined = ",\n  ".join(json.dumps(row.model_dump()) for row in made)
    return f'{{\n"arch": "{arch}",\n"sm_count": {sm_count},\n"rows": [\n  {joined}\n]\n}}\n'


def table_of(gpu_slug: str, data: Path = DATA) -> str:
    """Build the text of a GPU's tuned.json from its records.

    Raises:
        NoDataError: there are no tuning records.
    """
    made = rows(gpu_slug, data)
    seen = store.records(gpu_slug, schema.Tuning, data)[-1].gpu
    return table_text(arch_for(seen.compute_capability), seen.sm_count, made)


def write_table(gpu_slug: str, data: Path = DATA) -> Path:
    """Write data/<gpu>/tuned.json from the records.

    Raises:
        NoDataError: there are no tuning records.
        DamagedRecordError: the existing file does not match CHECKSUMS.
        OutputError: the file is not writable.
    """
    return store.rewrite(gpu_slug, choice.path_of(gpu_slug, data).name, table_of(gpu_slug, data), data)


@dataclass(frozen=True, kw_only=True)
class Held:
    """The choice for a recorded problem, compared with the library in the same process."""

    problem: Problem
    choice: Choice
    run: str
    """The newest run that timed both; empty if there is none."""
    small_grids: bool
    """Whether that was a tuning on the problem, not a run of `flashlab bench`."""
    time_us: float | None
    peer_us: float | None
    lender: str = ""
    """The GPU whose records were used, if another one: folder name under data/."""

    @property
    def ratio(self) -> float | None:
        """Speed-up over the library."""
        return self.peer_us / self.time_us if self.peer_us and self.time_us else None


def tally(held: Iterable[Held]) -> str:
    """Describe in how many problems the library is faster, and how many have no comparison."""
    ratios = [choice_held.ratio for choice_held in held]
    timed = [ratio for ratio in ratios if ratio is not None]
    slower, lacking = sum(ratio < 1 for ratio in timed), len(ratios) - len(timed)
    return (
        f"SDPA is faster at {slower} of the {len(timed)} problems where one run timed both. At {lacking} none did, so "
        "that no record says which is faster."
    )


def held_against(gpu_slug: str, data: Path = DATA) -> list[Held]:
    """Compare the choices on a GPU with `BESIDE` on every problem on which it was timed, the worst ratio first.

    Raises:
        DamagedRecordError: the table cannot be read.
    """
    table = choice.table(gpu_slug, data)
    if table is None:
        return []
    times: dict[Problem, dict[str, dict[tuple[str, Items], float]]] = {}
    tuning_runs = set()
    for record in store.records(gpu_slug, schema.Tuning, data):
        if record.status == "ok":
            tuning_runs.add(record.run)
            of_run = times.setdefault(record.problem, {}).setdefault(record.run, {})
            of_run[record.stage, items(record.parameters)] = counted(record).median_us
    for row in store.measurements(gpu_slug, data):
        if row.status == "ok" and row.samples_of() is not None:
            of_run = times.setdefault(row.problem, {}).setdefault(row.run, {})
            name = row.name.partition("[")[0]  # of a named variant: its tunables are the kernel's
            of_run[name, items(row.cubin.parameters if row.cubin else {})] = counted(row).median_us
    compared = []
    for problem, by_run in times.items():
        library = (BESIDE, items({}))
        decides, choices = choice.rank(problem, gpu_slug, table.arch, data=data)
        if not (_plain(problem) and choices and any(library in of_run for of_run in by_run.values())):
            continue
        mine = (choices[0].stage.id, items(choices[0].parameters))
        both = [run for run, of_run in by_run.items() if mine in of_run and library in of_run]
        run = max(both, default="")
        compared.append(
            Held(
                problem=problem,
                choice=choices[0],
                run=run,
                small_grids=run in tuning_runs,
                time_us=by_run[run][mine] if run else None,
                peer_us=by_run[run][library] if run else None,
                lender=decides.gpu if decides and decides is not table else "",
            )
        )
    return sorted(compared, key=lambda held: (held.ratio is None, held.ratio or 0.0, held.problem))


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The choice for a problem of a table by all its other problems, and the recorded times."""

    problem: Problem
    choice: Choice
    """The highest-ranked choice with a recorded time at the problem."""
    time_us: float
    """Recorded time of the choice at the problem."""
    least_us: float
    """Least recorded time of any stage at the problem."""


LEAST_STAGES = 3
"""Minimum number of stages for a problem to be left out; with fewer, nearly any choice is the best."""


def left_out(gpu_slug: str, stages: Iterable[str], data: Path = DATA) -> list[LeftOut]:
    """Leave-one-out validation of the choices: each problem of a GPU's table is chosen by all others.

    Args:
        stages: ids; rows of other stages are ignored.

    Raises:
        DamagedRecordError: the table cannot be read.
    """
    table = choice.table(gpu_slug, data)
    if table is None:
        return []
    able, by_problem = {*stages}, grouped(table.rows, lambda row: row.problem)
    made = []
    for problem in sorted(by_problem):
        times: dict[str, float] = {}
        for row in by_problem[problem]:
            if row.stage in able and not registry.get(row.stage).by_name_only:
                times[row.stage] = min(row.time_us, times.get(row.stage, math.inf))
        if len(times) < LEAST_STAGES:
            continue
        others = replace(table, rows=tuple(row for row in table.rows if row.problem != problem))
        ranked = choice.choices(problem, others, table.arch, table.sm_count, (others,))
        taken = next((candidate for candidate in ranked if candidate.stage.id in times), None)
        if taken is not None:
            its_us = times[taken.stage.id]
            made.append(LeftOut(problem=problem, choice=taken, time_us=its_us, least_us=min(times.values())))
    return made
