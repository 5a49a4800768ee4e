"""Selection of stage and tunables for a problem, from data/<gpu>/tuned.json, which `flashlab tuned` writes.

A row of the table is one set of tunables of a stage on one problem, and its time (tune.py selects the records).
The selection for a problem p takes three steps, whether p is on record or not:

1. **Tunables of each stage**: the fastest on the nearest problem on which the stage was tuned, on this GPU or another
   of the same architecture, with the same features (window, soft cap), because these are compiled into the kernel.
   Decoding stages differ in two ways. Their tunables set the number of CTAs over which the keys of a work tile are
   split, so only problems with between half and twice as many work tiles count. And they are memory-bound, and GPUs of
   an architecture differ in memory: the fastest tunables timed on p itself come first, tuned there or not, then the
   GPU's own.
2. **Its time**: that of the stage's nearest row r, scaled by the work of the busiest SM,

       time(p) = fixed + (time(r) - fixed) · waves(p) · keys(p) / (waves(r) · keys(r))
       waves   = ⌈batch · q_heads · ⌈q_len / tile⌉ / SMs⌉          tile: query rows per block, of that row's code
       keys    = FLOPs / (4 · batch · q_heads · q_len · head_dim)  visible per query on average
       fixed   = `FIXED_SHARE` of the least time in the table      cost of a call independent of its size

   A decoding stage packs the query heads of a K/V head into one tile, and distributes the keys of all tiles, those of
   each over at most r's SPLITS CTAs:

       tiles   = batch · kv_heads · ⌈q_heads / kv_heads · q_len / tile⌉
       waves   = max(tiles / SMs, 1 / SPLITS)
       fixed   = `DECODE_FIXED_SHARE` of the least time
3. **The stage**: the one with the least time, of the CUDA C++ stages of the ladder and for decoding that support p. A
   time from another problem is multiplied by `FARTHER` per unit of distance, and at least once, so that a stage
   measured at p is preferred to a prediction unless that is much faster.

The distance of two problems is in factors of two: of work tiles per SM, kv_len, q_len and, weighted 0.25, query heads
per K/V head; another mask counts 3, another data type 0.5 and other tunables 0.25, so that a time from p itself comes
first. Head dims must agree, because they are different kernels.

A GPU without a table uses that of its nearest kin: the same architecture, then the nearest compute capability, then the
nearest number of SMs. Tunables carry over only within an architecture; on another one a stage has its defaults.

A table may lack a stage, which then cannot be selected, or a stage's time at p. If the nearest kin of the same
architecture selects such a stage, and in the second case has that time, its selection counts, unless it lacks the stage
that the GPU's own table selects, or its times are less like calls in a model (`AS_IN_A_MODEL`) than the GPU's own.
Decoding is memory-bound, and kin differ in memory: for its stages, a time at p does not carry over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from flashlab.core.errors import DamagedRecordError
from flashlab.core.paths import DATA
from flashlab.core.problem import AS_IN_A_MODEL, Cache, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.record.schema import ChoiceRow as Row
from flashlab.record.schema import Choices

FILE = "tuned.json"
FARTHER = 1.1
"""Penalty factor on a time per unit of distance of its problem."""
FIXED_SHARE, DECODE_FIXED_SHARE = 0.9, 1.35
"""Fixed cost of a call, as a share of the least time in the table; the second for decoding stages. The three constants
were chosen so that problems left out of the table get nearly their fastest stage (tests/test_choice.py)."""
IDLE = 4.0
"""A stage's least time counts as its launch overhead if it is at most this many times the least in the table."""
_GROUP_WEIGHT = 0.25
_OTHER_MASK, _OTHER_DTYPE, _OTHER_TUNABLES = 3.0, 0.5, 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The table of a GPU."""

    gpu: str
    """Folder name under data/."""
    arch: str
    sm_count: int
    rows: tuple[Row, ...]

    @cached_property
    def least_us(self) -> float:
        """The least time of all rows."""
        return min(row.time_us for row in self.rows)

    def floor_us(self, stage: str) -> float:
        """Minimum time of a launch of a stage, in µs: its least time, or that of all stages if it was only measured on
        large problems."""
        own_us = min((row.time_us for row in self.rows if row.stage == stage), default=math.inf)
        return own_us if own_us <= IDLE * self.least_us else self.least_us

    @lru_cache(maxsize=64)  # noqa: B019 - tables live as long as the process
    def distances(self, problem: Problem, sms: float) -> Sequence[float]:
        """Distances of a problem from the places of its head dim, by place number: see the module.

        `sms`: the table's number of SMs divided by that of the problem's GPU.
        """
        log2 = math.log2
        distances = []
        for tile, others, mask, dtype in self._of_head_dim(problem.head_dim)[0]:
            ratios = [mine / other for mine, other in zip(_sizes(problem, tile), others, strict=True)]
            sizes = abs(log2(ratios[0] * sms)) + abs(log2(ratios[1])) + abs(log2(ratios[2]))
            kinds = _OTHER_MASK * (mask != problem.mask) + _OTHER_DTYPE * (dtype != problem.dtype)
            distances.append(sizes + _GROUP_WEIGHT * abs(log2(ratios[3])) + kinds)
        return distances

    @lru_cache(maxsize=8)  # noqa: B019
    def _of_head_dim(
        self, head_dim: int
    ) -> tuple[Mapping[tuple[Any, ...], int], Mapping[str, Sequence[tuple[int, int, Row]]]]:
        """The distinct `_place`s of a head dim's rows, numbered, and `rows_of` its stages.

        Of one head dim, because the first call of a process waits for it.
        """
        rows = [(position, row) for position, row in enumerate(self.rows) if row.problem.head_dim == head_dim]
        places: dict[tuple[Any, ...], int] = {}
        place_of = [places.setdefault(_place(row), len(places)) for _, row in rows]
        beside: dict[tuple[str, Problem], set[str]] = {}
        for _, row in rows:
            beside.setdefault((row.run, row.problem), set()).add(row.stage)

        def order(placed: tuple[int, tuple[int, Row]]) -> tuple[bool, str]:
            _, (_, row) = placed
            return len(beside[row.run, row.problem]) > 1, row.run

        by_stage: dict[str, list[tuple[int, int, Row]]] = {}
        for place, (position, row) in sorted(zip(place_of, rows, strict=True), key=order, reverse=True):
            if fits(row.stage, row.parameters):
                by_stage.setdefault(row.stage, []).append((place, position, row))
        return places, by_stage

    def rows_of(self, stage: Stage, head_dim: int) -> Sequence[tuple[int, int, Row]]:
        """Rows of a stage and head dim that still `fits`, as (place number, position in the table, row).

        Rows of runs that timed another stage on the same problem come first, then the newest, because two machines of
        one product differ by more than some stages do.
        """
        return self._of_head_dim(head_dim)[1].get(stage.id, ())


def fits(name: str, parameters: Mapping[str, int]) -> bool:
    """Whether tunables match those of the current stage, which may have changed since they were recorded."""
    stage = registry.STAGES.get(name) or registry.OFF_LADDER.get(name)
    return stage is not None and parameters.keys() == stage.params.keys()


def _place(row: Row) -> tuple[Any, ...]:
    """What a distance depends on: tile, `_sizes`, mask and dtype."""
    tile = tile_of(row)
    return tile, _sizes(row.problem, tile), row.mask, row.dtype


class Choice(NamedTuple):
    """A stage that supports a problem, with its tunables and predicted time."""

    stage: Stage
    parameters: Mapping[str, int]
    """Every tunable of the stage and its value."""
    time_us: float
    """Predicted, or measured if the problem is on record with these tunables."""
    row: Row
    """The source of the time."""
    tuned_on: Row | None
    """The source of the tunables; None for the stage's defaults."""
    distance: float
    """Distance of the problem from that of `row`."""


class Ranking(NamedTuple):
    """The stages that support a problem, the selected one first."""

    table: Table | None
    """The table used: the GPU's own, or that of its nearest kin; None if no GPU has one."""
    choices: tuple[Choice, ...]
    """Empty if the head dim is not on record."""


def path_of(gpu: str, data: Path = DATA) -> Path:
    """Path of the table of a GPU."""
    return data / gpu / FILE


def stamp(gpu: str, data: Path = DATA) -> int:
    """Modification time of the table of a GPU, in ns; 0 if it has none."""
    try:
        return (data / gpu / FILE).stat().st_mtime_ns
    except OSError:
        return 0


def stamps(data: Path = DATA) -> tuple[int, ...]:
    """`stamp` of every GPU with a table: a choice depends on the tables of its kin too."""
    return tuple(stamp(path.parent.name, data) for path in sorted(data.glob(f"*/{FILE}")))


def table(gpu: str, data: Path = DATA) -> Table | None:
    """Read the table of a GPU; None if it has none.

    Raises:
        DamagedRecordError: the file is not a valid table.
    """
    written = stamp(gpu, data)
    return _read(gpu, data, written) if written else None


@lru_cache(maxsize=8)
def _read(gpu: str, data: Path, _: int) -> Table:
    path = path_of(gpu, data)
    try:
        read = Choices.model_validate_json(path.read_bytes())
        return Table(gpu=gpu, arch=read.arch, sm_count=read.sm_count, rows=read.rows)
    except (OSError, ValueError) as error:
        fault = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DamagedRecordError(
            f"wanted a table of stages and tunables in {path}, got {fault}. Restore it with git, or delete it: "
            "`flashlab tuned` makes one from the records."
        ) from error


def table_for(gpu: str, arch: str, sm_count: int | None = None, data: Path = DATA) -> Table | None:
    """Read the table of a GPU, or of its nearest kin; None if there is no table at all.

    Raises:
        DamagedRecordError: a table cannot be read.
    """
    return next(iter(_tables(gpu, arch, sm_count, data)), None)


def _tables(gpu: str, arch: str, sm_count: int | None, data: Path) -> tuple[Table, ...]:
    """All tables, the nearest kin first; the GPU's own is the nearest."""

    def far(other: Table) -> tuple[bool, bool, int, int, int, str]:
        (major, minor), (other_major, other_minor) = registry.capability(arch), registry.capability(other.arch)
        sms = abs(other.sm_count - (sm_count or other.sm_count))
        return (
            other.gpu != gpu,
            other.arch != arch,
            abs(major - other_major),
            abs(minor - other_minor),
            sms,
            other.gpu,
        )

    names = {gpu, *(path.parent.name for path in data.glob(f"*/{FILE}"))}
    return tuple(sorted(filter(None, (table(name, data) for name in names)), key=far))


class Tile(NamedTuple):
    """A work tile of a stage."""

    rows: int
    decodes: bool
    """Whether it packs rows of all query heads that share a K/V head."""


def tile_of(row: Row) -> Tile:
    """The work tile of a row's stage."""
    return Tile(row.tile_q, row.stage in registry.DECODE)


def tiles(problem: Problem, tile: Tile) -> int:
    """Number of work tiles of a problem."""
    heads, rows = problem.q_heads, problem.q_len
    if tile.decodes:
        heads, rows = problem.kv_heads, problem.q_heads // problem.kv_heads * problem.q_len
    return problem.batch * heads * -(-rows // tile.rows)


def _sizes(problem: Problem, tile: Tile) -> tuple[float, ...]:
    """Work tiles, kv_len, q_len and query heads per K/V head of a problem."""
    return tiles(problem, tile), problem.kv_len, problem.q_len, problem.q_heads / problem.kv_heads


def _busiest(problem: Problem, row: Row, sm_count: int) -> float:
    """Work of the busiest SM, by the code of a row: waves · keys."""
    tile = tile_of(row)
    waves: float = tiles(problem, tile) / sm_count
    if tile.decodes:
        waves = max(waves, 1 / (row.parameters["SPLITS"] or max(registry.get(row.stage).params["SPLITS"].choices)))
    else:
        waves = math.ceil(waves)
    return waves * problem.visible_scores / problem.q_len


def ratios(problem: Problem, row: Row) -> dict[str, float]:
    """Ratios of the sizes of a problem to those of a row, by name; `GQA ratio` is query heads per K/V head."""
    mine, others = (_sizes(of, tile_of(row)) for of in (problem, row.problem))
    names = ("work tiles", "kv_len", "q_len", "GQA ratio")
    return {name: one / other for name, one, other in zip(names, mine, others, strict=True)}


def _tuned_on(stage: Stage, problem: Problem, tables: Iterable[Table]) -> Row | None:
    """The row whose tunables a stage takes on a problem: see the module. Ties go to the first table and row.

    The number of SMs is ignored. None if no problem is near enough.
    """
    decodes = stage.id in registry.DECODE
    tried: list[tuple[Any, ...]] = []
    for number, of in enumerate(() if problem.features else tables):  # no row of a table has features
        distances = of.distances(problem, 1.0)
        for place, position, row in of.rows_of(stage, problem.head_dim):
            far = distances[place]
            here = decodes and number == 0 and far == 0
            if not (row.variants or here):
                continue
            if not decodes:
                tried.append((far, number, position, row))
            elif 0.5 < ratios(problem, row)["work tiles"] < 2:
                tried.append((number, far, row.time_us if here else 0.0, position, row))
    return min(tried, key=lambda of: of[:-1])[-1] if tried else None


def parameters(
    stage: Stage,
    gpu: str | None,
    problem: Problem,
    *,
    arch: str | None = None,
    overrides: Mapping[str, int] | None = None,
    data: Path = DATA,
) -> dict[str, int]:
    """Tunables of a stage for a problem: `overrides`, then those of the GPU's table; others keep their defaults.

    Args:
        gpu: folder name under data/; None for a CPU, which has no table.
        arch: architecture of the GPU, whose other tables are used too; None: only the GPU's own.

    Raises:
        DamagedRecordError: the table cannot be read.
    """
    tuned: Mapping[str, int] = {}
    if gpu is not None and stage.params:
        tables = filter(None, (table(gpu, data),)) if arch is None else _lenders(arch, _tables(gpu, arch, None, data))
        row = _tuned_on(stage, problem, tables)
        tuned = {} if row is None else row.parameters
    return {**tuned, **(overrides or {})}


def rank(problem: Problem, gpu: str, arch: str, sm_count: int | None = None, data: Path = DATA) -> Ranking:
    """Rank the stages that support a problem on a GPU, the selected one first: see the module.

    Args:
        gpu, arch, sm_count: folder name under data/, architecture and number of SMs of the GPU; `sm_count` defaults to
            that of the table.

    Raises:
        DamagedRecordError: a table cannot be read.
    """
    tables = _tables(gpu, arch, sm_count, data)
    if not tables:
        return Ranking(None, ())
    nearest, others = tables[0], tables[1:]
    lenders, sms = _lenders(arch, tables), sm_count or nearest.sm_count
    own = Ranking(nearest, choices(problem, nearest, arch, sms, lenders))
    if nearest.gpu != gpu or not others or others[0].arch != arch:
        return own
    theirs = Ranking(others[0], choices(problem, others[0], arch, sms, others[:1]))
    if not theirs.choices or not _lacks(own, theirs.choices[0], problem):
        return own
    if not own.choices:
        return theirs
    mine, taken = own.choices[0], theirs.choices[0]
    known = any(choice.stage is mine.stage for choice in theirs.choices)
    return theirs if known and from_a_model(mine.row.timed) >= from_a_model(taken.row.timed) else own


def _lacks(own: Ranking, taken: Choice, problem: Problem) -> bool:
    """Whether a table lacks the stage that its kin selects, or its time at the problem: see the module."""
    mine = next((choice for choice in own.choices if choice.stage is taken.stage), None)
    if mine is None or taken.stage.id in registry.DECODE:
        return mine is None
    return taken.row.problem == problem != mine.row.problem


def _lenders(arch: str, tables: Iterable[Table]) -> tuple[Table, ...]:
    """The tables whose tunables may be used, those of the same architecture."""
    return tuple(lender for lender in tables if lender.arch == arch)


def from_a_model(timed: Cache) -> int:
    """Rank a cache state by likeness to calls in a model: its index in `AS_IN_A_MODEL`, or the length of that."""
    return AS_IN_A_MODEL.index(timed) if timed in AS_IN_A_MODEL else len(AS_IN_A_MODEL)


def _able(problem: Problem, arch: str) -> Iterator[Stage]:
    """The candidate stages."""
    for stage in (*registry.CUDA_STAGES.values(), *registry.DECODE.values()):
        if not stage.by_name_only and stage.why_not(problem, arch) is None:
            yield stage


@lru_cache(maxsize=1024)
def choices(problem: Problem, table: Table, arch: str, sm_count: int, lenders: tuple[Table, ...]) -> tuple[Choice, ...]:
    """Rank the stages that support a problem by the rows of one table and the tunables of `lenders`: see the module."""
    distances = table.distances(problem, table.sm_count / sm_count)
    made = []
    for stage in _able(problem, arch):
        rows = table.rows_of(stage, problem.head_dim)
        if not rows:
            continue
        tuned_on = _tuned_on(stage, problem, lenders)
        taken = stage.parameters(problem.head_dim) if tuned_on is None else tuned_on.parameters
        far, row = math.inf, rows[0][2]
        for place, _, other in rows:  # ties go to the first row
            apart = distances[place]
            if apart < far:
                apart += _OTHER_TUNABLES * (other.parameters != taken)
                far, row = (apart, other) if apart < far else (far, row)
        tile = tile_of(row)
        more = _busiest(problem, row, sm_count) / _busiest(row.problem, row, table.sm_count)
        fixed_us = (DECODE_FIXED_SHARE if tile.decodes else FIXED_SHARE) * table.least_us
        fixed_us = min(fixed_us, row.time_us)
        time_us = row.time_us if more == 1 else fixed_us + (row.time_us - fixed_us) * more
        made.append(Choice(stage, taken, time_us, row, tuned_on, far))

    def weighted_us(choice: Choice) -> float:
        return choice.time_us * math.pow(FARTHER, max(choice.distance, choice.row.problem != problem))

    return tuple(sorted(made, key=weighted_us))


def stage_for(problem: Problem, gpu: str, arch: str, sm_count: int | None = None, data: Path = DATA) -> Stage:
    """Select the stage for a problem on a GPU, without records the last rung that supports it.

    Raises:
        UnsupportedError: no stage supports it.
        DamagedRecordError: a table cannot be read.
    """
    choices = rank(problem, gpu, arch, sm_count, data).choices
    return choices[0].stage if choices else registry.best(problem, arch)
