"""What the records of a GPU say about each claim: our numbers, their intervals, and where they come from.

ledger.toml says for each claim which stage, library or machine code is the comparable one, which quantity of it, and
in what words. A quantity is a function here that takes the rows it needs from the records and makes numbers of them. It
does not know what is claimed: that, and the rules that hold one against the other, is ledger.py.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from flashlab.build import compiler, sass
from flashlab.core.errors import CompileError, NoDataError, UnknownStageError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA, KERNELS
from flashlab.core.problem import FIRST_SHAPE, MASKS, DType, Problem
from flashlab.experiments import ablation
from flashlab.kernels import peers, registry
from flashlab.measure import ceilings
from flashlab.query import roofline, select
from flashlab.query.kinship import MODELS, kinship
from flashlab.query.statistics import Estimate, interval, median, ratio_of_medians
from flashlab.record import store
from flashlab.record.store import Ablation, Call, Ceiling, Measurement, Part, Samples, StageProfile
from flashlab.show import tables

FIRST = Problem.parse(FIRST_SHAPE)
FASTEST = "fastest"
"""In place of a name: the fastest stage of the ladder, of those that the condition after a colon holds for."""

About = Literal["time", "ratio", "code", "arithmetic", "numbers"]
"""What a claim is about. time: a time, or a rate. ratio: of two times, or of two limits. code: the machine code, or
what it takes of an SM. arithmetic: what follows from the document's own numbers. numbers: what a kernel computes."""


class PendingError(Exception):
    """What would tell is not on record; the message is the command that makes it."""


# --- What speaks to a claim -------------------------------------------------------------------------------------------


class Entry(BaseModel):
    """What speaks to one claim, or is worth saying beside it; ledger.toml explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quantity: str
    of: tuple[tuple[str, ...], ...] = ()
    """Names, those of one run together."""
    shape: str = FIRST_SHAPE
    dtype: DType = "float16"
    axis: str = ""
    per: float = 1
    counts: tuple[str, ...] = ()
    given: Mapping[str, float] = {}
    fused: bool = True
    text: str = ""
    note: str = ""
    stages: tuple[str, ...] = ()
    cited: bool = True
    beside: tuple[Entry, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """What stands beside is of the same problem and ablation unless it says otherwise."""
        inherited = {name: fields[name] for name in ("shape", "dtype", "axis", "per") if name in fields}
        return {**fields, "beside": [{**inherited, **one} for one in fields.get("beside", ())]}

    @field_validator("of", mode="before")
    @classmethod
    def _grouped(cls, value: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
        return (tuple(value),) if value and isinstance(value[0], str) else tuple(map(tuple, value))

    @model_validator(mode="after")
    def _known(self) -> Entry:
        for place, given, known in (
            ("quantity", [self.quantity], [*QUANTITIES]),
            ("of", self.names, [*registry.STAGES, *registry.DEAD_ENDS, *peers.PEERS, *ceilings.CEILINGS, FASTEST]),
            ("axis", [self.axis], ["", *ablation.AXES]),
            ("counts", self.counts, [*COUNTS]),
        ):
            if unknown := set(given) - set(known):
                raise ValueError(f"{place}: wanted {', '.join(filter(None, known))}, got {', '.join(sorted(unknown))}")
        return self

    @property
    def problem(self) -> Problem:
        """The problem that it is of; ablations are of the first shape whatever it is."""
        return Problem.parse(self.shape, dtype=self.dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `operands`, without tunables and conditions."""
        return tuple(split(operand)[0].partition(":")[0] for operand in self.operands)

    @property
    def operands(self) -> tuple[str, ...]:
        """Every name in `of`, in its order."""
        return tuple(name for group in self.of for name in group)


def split(operand: str) -> tuple[str, dict[str, int]]:
    """`ID[NAME=VALUE,…]` as the id and the values; none where there are no brackets."""
    name, _, values = operand.rstrip("]").partition("[")
    return name, {key: int(value) for key, _, value in (one.partition("=") for one in values.split(",") if one)}


def is_stage(name: str) -> bool:
    """Whether it is the id of a stage or a dead end."""
    return name in registry.STAGES or name in registry.DEAD_ENDS


@cache
def facts() -> Mapping[str, Any]:
    """What ledger.toml holds."""
    return tomllib.loads(Path(__file__).with_name("ledger.toml").read_text(encoding="utf-8"))


@cache
def entries() -> Mapping[str, Entry]:
    """What speaks to each claim, by the claim's id."""
    return {name: Entry.model_validate(fields) for name, fields in facts()["claims"].items()}


# --- Two GPUs ---------------------------------------------------------------------------------------------------------

_BANDWIDTH_SHARE = 0.5
"""Of another GPU's device memory: a kernel that needs less of it is not held up by it."""


def concludes(claimed: str, measured: str, about: About, demand_tb_s: float | None = None) -> tuple[bool, str]:
    """Whether a finding on one GPU can judge a claim about another, and what may be concluded, in a sentence.

    Args:
        claimed: the model that the claim is about.
        measured: folder under data/ of the GPU that was measured.
        about: what the claim is about.
        demand_tb_s: bytes that must cross device memory over the time it took, TB/s, where known.
    """
    model = MODELS.get(claimed)
    if about in ("arithmetic", "code", "numbers") or (model and model.folder == measured):
        return True, ""
    kin = kinship(claimed, measured)
    carries = kin is not None and kin.time
    if about == "ratio":
        return True, "" if carries else f"The ratio is that of {measured}; an {claimed} has other limits."
    if not carries:
        return False, f"What {measured} reaches does not carry over to an {claimed}."
    sheet = roofline.DATASHEETS.get(model.folder) if model else None
    same = f"An {claimed} is the same chip but for its memory"
    if demand_tb_s is None or sheet is None:
        return True, f"{same}."
    share = demand_tb_s / sheet.memory_tb_s
    so = "so the time carries over" if share < _BANDWIDTH_SHARE else "so it may be slower there"
    return True, f"{same}, of whose bandwidth this needs {tables.number(100 * share, 2)} %, {so}."


def shown_without(claimed: str, stage_ids: Sequence[str], gpu: str, data: Path = DATA) -> str:
    """What can be said of stages without the GPU that a claim is about: their machine code for it, and runs on a CPU.

    One sentence, about the last of them that is CUDA C++; empty where there is none.
    """
    arch = MODELS[claimed].arch if claimed in MODELS else ""
    stages = [registry.get(name) for name in stage_ids if is_stage(name)]
    able = [stage for stage in stages if stage.language == "cuda" and arch in stage.archs]
    if not able:
        return ""
    stage = able[-1]
    try:
        cubin = _built(stage.id, arch=arch)
    except PendingError:
        return ""
    spill = cubin.resources.spill_store_bytes
    sentence = (
        f"Without an {claimed}: `{stage.id}` compiles for {arch} with {cubin.resources.registers} registers, "
        f"{tables.number(_smem_kb(cubin))} KB of shared memory and {f'{spill} bytes spilled' if spill else 'no spill'}"
    )
    try:
        checks = [row for row in select.emulated_checks(gpu, data) if row["stage"] == stage.id and row["emulator"]]
    except NoDataError:
        checks = []
    statuses = [row["emulator"]["status"] for row in checks if row["emulator"]["status"] != "unsupported"]
    if statuses:
        sentence += f"; run on a CPU, it was right at {statuses.count('ok')} of {len(statuses)} problems"
    return f"{sentence}."


# --- What is on record ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A record, and where it lies."""

    record: Any = field(compare=False)
    place: str
    """`nvidia-h200/runs/….jsonl:12`."""

    @property
    def name(self) -> str:
        """Of the stage, library or ceiling."""
        return str(getattr(self.record, "name", None) or self.record.stage)

    @property
    def problem(self) -> Problem:
        """What was measured."""
        problem: Problem = self.record.problem.problem()
        return problem

    @property
    def times_us(self) -> Sequence[float]:
        """Its samples, microseconds a call; hot bursts where there are several kinds. Empty where there are none."""
        if isinstance(self.record, Call):
            return self.record.time_us
        of_state = getattr(self.record, "samples_of", None)
        samples = of_state() if of_state else getattr(self.record, "samples", None)
        return samples.time_us if isinstance(samples, Samples) else ()

    @property
    def median_us(self) -> float:
        """Of `times_us`."""
        return float(np.median(self.times_us))

    @property
    def demand_tb_s(self) -> float:
        """Bytes that must cross device memory over the time of a call, TB/s."""
        return self.problem.compulsory_bytes / self.median_us / 1e6


class Records:
    """All that is on record of one GPU, on normal inputs, with the line that each record is in."""

    def __init__(self, gpu: str, data: Path = DATA) -> None:
        self.gpu = gpu
        self.data = data

    def _read(self, folder: str, parse: Callable[[str], Any]) -> tuple[Row, ...]:
        """Oldest first; a damaged line is left out, and `flashlab results --verify` names it."""
        rows = []
        for path in sorted((self.data / self.gpu / folder).glob("*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                try:
                    record = parse(line.decode("utf-8"))
                except (ValidationError, UnicodeDecodeError):
                    continue
                problem = getattr(record, "problem", None)
                if problem is None or problem.inputs == NORMAL:
                    rows.append(Row(record, f"{path.relative_to(self.data).as_posix()}:{number}"))
        return tuple(rows)

    @cached_property
    def _runs(self) -> tuple[Row, ...]:
        return self._read("runs", store.parse_line)

    @cached_property
    def measurements(self) -> tuple[Row, ...]:
        """Stages, dead ends and libraries, oldest first; no row `with_lse`."""
        return tuple(row for row in self._runs if isinstance(row.record, Measurement) and not row.record.with_lse)

    @cached_property
    def ceilings(self) -> tuple[Row, ...]:
        """Readings of the GPU's limits, oldest first."""
        return tuple(row for row in self._runs if isinstance(row.record, Ceiling))

    @cached_property
    def ablations(self) -> tuple[Row, ...]:
        """Levels of ablations, oldest first."""
        return self._read("ablations", Ablation.model_validate_json)

    @cached_property
    def parts(self) -> tuple[Row, ...]:
        """Stages with a part of their work left out, oldest first."""
        return self._read("parts", Part.model_validate_json)

    @cached_property
    def calls(self) -> tuple[Row, ...]:
        """Wall times of single calls, oldest first."""
        return self._read("calls", Call.model_validate_json)

    @cached_property
    def profiles(self) -> tuple[Row, ...]:
        """What Nsight Compute saw, oldest first."""
        return self._read("profiles", StageProfile.model_validate_json)

    def timed(self, *problems: Problem) -> Iterator[Row]:
        """Those of `measurements` at some problems that are right and have a time."""
        for row in self.measurements:
            if row.record.status == "ok" and row.times_us and row.problem in problems:
                yield row

    def of(self, problem: Problem, names: Sequence[str]) -> tuple[Row, ...]:
        """Rows of stages or libraries at a problem, of the newest run that timed them all.

        Raises:
            PendingError: no run did.
        """
        rows = (row for row in self.timed(problem) if row.name in names)
        return of_one_run(rows, lambda row: row.name, names, _bench(problem, names))

    def levels(self, axis: str, operands: Sequence[str]) -> tuple[Row, ...]:
        """Levels of an ablation at the first shape, all else the stage's defaults, of the newest run with them all.

        Raises:
            PendingError: no run has.
        """

        def choice(name: str, parameters: Mapping[str, int]) -> tuple[str, frozenset[tuple[str, int]]]:
            # What only ablations set is 0 where nobody names it.
            return name, frozenset((key, value) for key, value in parameters.items() if value)

        wanted = [
            choice(name, {**registry.get(name).parameters(FIRST.head_dim), **values})
            for name, values in map(split, operands)
        ]
        rows = (
            row
            for row in self.ablations
            if row.record.axis == axis and row.record.status == "ok" and row.problem == FIRST
        )
        key = lambda row: choice(row.record.stage, row.record.parameters)  # noqa: E731
        return of_one_run(rows, key, wanted, f"flashlab ablate {axis}")

    def fastest(self, problem: Problem, condition: str = "") -> Row:
        """The fastest stage that a condition holds for, of the run that timed most stages at a problem; of the newest.

        Raises:
            PendingError: no run timed any.
        """
        by_run: dict[str, dict[str, Row]] = {}
        for row in self.timed(problem):
            if row.name in registry.RUNGS:
                by_run.setdefault(row.record.run, {})[row.name] = row
        ladder = by_run[max(by_run, key=lambda run: (len(by_run[run]), run))] if by_run else {}
        able = [row for row in ladder.values() if CONDITIONS[condition](row.record)]
        if not able:
            raise PendingError(f"flashlab bench --shape {problem.shape}")
        return min(able, key=lambda row: row.median_us)

    def named(self, entry: Entry, group: Sequence[str]) -> tuple[Row, ...]:
        """The timed rows that a group of an entry's names stands for.

        Raises:
            PendingError: they are not on record.
        """
        if any("[" in name for name in group):
            return self.levels(entry.axis, group)
        if any(name.startswith(FASTEST) for name in group):
            return tuple(self.fastest(entry.problem, name.partition(":")[2]) for name in group)
        return self.of(entry.problem, group)


CONDITIONS: Mapping[str, Callable[[Measurement], bool]] = {
    "": lambda _: True,
    "scalar": lambda row: row.cubin is not None and row.cubin.sass["tensor"] == 0,
    "tensor": lambda row: row.cubin is not None and row.cubin.sass["tensor"] > 0,
    "before_hopper": lambda row: (stage := registry.RUNGS[row.name]).language == "cuda" and stage.max_arch is None,
}
"""Which stages `fastest:CONDITION` is the fastest of."""


def of_one_run(rows: Iterable[Row], key: Callable[[Row], Any], wanted: Sequence[Any], command: str) -> tuple[Row, ...]:
    """The rows with the wanted keys, of the newest run that has them all: their ratio has a meaning.

    Raises:
        PendingError: no run has; `command` makes one.
    """
    by_run: dict[str, dict[Any, Row]] = {}
    for row in rows:
        by_run.setdefault(row.record.run, {})[key(row)] = row
    whole = [run for run, found in by_run.items() if found.keys() >= set(wanted)]
    if not whole:
        raise PendingError(command)
    return tuple(by_run[max(whole)][one] for one in wanted)


def newest(rows: Iterable[Row], names: Sequence[str], command: str) -> tuple[Row, ...]:
    """The last row of each name, of whatever run.

    Raises:
        PendingError: a name has none; `command` makes one.
    """
    by_name = {row.name: row for row in rows}
    if not by_name.keys() >= set(names):
        raise PendingError(command)
    return tuple(by_name[name] for name in names)


def _bench(problem: Problem, names: Sequence[str]) -> str:
    """The command that times those stages and libraries at a problem."""
    libraries = [name for name in names if name in peers.PEERS]
    stages = [name for name in names if name not in libraries]
    dtype = "" if problem.dtype == "float16" else f" --dtype {problem.dtype}"
    chosen = f"--stages {','.join(stages) or 'none'} --peers {','.join(libraries) or 'none'}"
    return f"flashlab bench --shape {problem.shape}{dtype} {chosen}"


# --- Findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the records say about one claim."""

    numbers: tuple[Estimate, ...]
    """One for each claimed number."""
    rows: tuple[Row, ...] = ()
    """The records that they come from; none where they were computed or compiled."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What else stands in braces in an entry's text and note."""
    about: About = "arithmetic"
    text: str = ""
    """What was measured or computed, for people."""
    beside: str = ""
    """What else is worth saying; empty for nothing."""
    stages: tuple[str, ...] = ()
    """Stages and dead ends that it is about."""
    demand_tb_s: float | None = None
    """Bytes that must cross device memory over the time it took, TB/s, of a time."""
    problems: tuple[str, ...] = ()
    """The two problems that the claim compares, where they differ."""


Evaluator = Callable[[Records, Entry], Finding]
QUANTITIES: dict[str, tuple[About, str, Evaluator]] = {}
"""By name: what it is about, what it is called where an entry has no text, and its function."""


def _quantity(about: About, text: str = "") -> Callable[[Evaluator], Evaluator]:
    """Registers a function under its name. It fills numbers, rows, values and problems; `find` the rest."""

    def register(evaluate: Evaluator) -> Evaluator:
        QUANTITIES[evaluate.__name__] = (about, text, evaluate)
        return evaluate

    return register


class _Shown(float):
    """A number that text shows with three significant digits unless it asks for a format."""

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else tables.number(self)


def _shown(value: object) -> object:
    if isinstance(value, float):
        return _Shown(value)
    return [_Shown(one) for one in value] if isinstance(value, list) else value


def find(records: Records, entry: Entry) -> Finding:
    """What the records say: an entry's numbers, and whatever stands beside it that is on record.

    Raises:
        PendingError: the numbers themselves are not on record.
    """
    about, text, evaluate = QUANTITIES[entry.quantity]
    finding = evaluate(records, entry)
    stages = [
        finding.rows[index].name if operand.startswith(FASTEST) else split(operand)[0]
        for index, operand in enumerate(entry.operands)
    ]
    choices = [
        " ".join(f"{name}={value}" for name, value in split(operand)[1].items()) or "its defaults"
        if any("[" in one for one in group)
        else ""
        for group in entry.of
        for operand in group
    ]
    names = [f"`{name}`{f' with {choice}' if choice else ''}" for name, choice in zip(stages, choices, strict=True)]
    values = {
        "problem": entry.problem.label,
        "gpu": records.gpu,
        "slower": next(filter(None, (*choices, *names)), ""),
        "value": finding.numbers[0].value,
        "values": [number.value for number in finding.numbers],
        "times": [row.median_us / entry.per for row in finding.rows if row.times_us],
        **entry.given,
        **finding.values,
    }
    shown = {name: _shown(value) for name, value in values.items()}
    others = []
    for other in entry.beside:
        try:
            others.append((other, find(records, other)))
        except PendingError:
            continue
    cited = dict.fromkeys(row for other, found in others if other.cited for row in found.rows)
    named = [
        *(name for _, found in others for name in found.stages),
        *(n for other in entry.beside for n in other.names),
    ]
    subject = entry.stages or stages or named
    timed = (
        about == "time" and entry.fused and finding.rows and isinstance(finding.rows[0].record, Measurement | Ablation)
    )
    return replace(
        finding,
        rows=(*finding.rows, *(row for row in cited if row not in finding.rows)),
        about=about,
        text=(entry.text or text).format(*names, **shown),
        beside="; ".join(
            filter(None, (entry.note.format(*names, **shown), ", ".join(found.text for _, found in others)))
        ),
        stages=tuple(filter(is_stage, dict.fromkeys(subject))),
        demand_tb_s=finding.rows[0].demand_tb_s if timed else None,
    )


def _exact(*values: float) -> tuple[Estimate, ...]:
    return tuple(map(Estimate.exactly, values))


def _rate(row: Row) -> Estimate:
    """TFLOP/s."""
    time, tflops = interval(median, row.times_us), row.problem.tflops
    return Estimate(value=tflops(time.value), low=tflops(time.high), high=tflops(time.low))


def _speedup(slow: Row, fast: Row) -> Estimate:
    return interval(ratio_of_medians, slow.times_us, fast.times_us)


# --- Quantities of timed rows -----------------------------------------------------------------------------------------


@_quantity("time", "{0} at {problem}")
def rate(records: Records, entry: Entry) -> Finding:
    """TFLOP/s of each."""
    rows = [row for group in entry.of for row in records.named(entry, group)]
    return Finding(numbers=tuple(map(_rate, rows)), rows=tuple(rows))


@_quantity("time", "{0} at {problem}")
def time(records: Records, entry: Entry) -> Finding:
    """Microseconds of a call of each, over `per`."""
    rows = [row for group in entry.of for row in records.named(entry, group)]
    return Finding(
        numbers=tuple(interval(median, row.times_us).scaled(1 / entry.per) for row in rows), rows=tuple(rows)
    )


@_quantity("ratio", "{1} over {slower} at {problem}")
def speedup(records: Records, entry: Entry) -> Finding:
    """Of each pair, how many times faster the second is."""
    pairs = [records.named(entry, group) for group in entry.of]
    return Finding(numbers=tuple(_speedup(*pair) for pair in pairs), rows=tuple(row for pair in pairs for row in pair))


@_quantity("ratio")
def causal_speedup(records: Records, entry: Entry) -> Finding:
    """A stage without a mask over the same under a causal one, in one run; and the range over that run's stages."""
    masks: dict[str, Problem] = {one: Problem.parse(entry.shape, mask=one) for one in MASKS}
    rows = [row for row in records.timed(*masks.values()) if row.name in registry.RUNGS]
    ours = (row for row in rows if row.name in entry.operands)
    pair = of_one_run(ours, lambda row: row.problem.mask, [*masks], _bench(entry.problem, entry.operands))
    by_stage: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.record.run == pair[0].record.run:
            by_stage.setdefault(row.name, {})[row.problem.mask] = row
    gains = [_speedup(*(of[mask] for mask in masks)).value for of in by_stage.values() if len(of) == len(masks)]
    return Finding(
        numbers=(_speedup(*pair),), rows=pair, values={"stages": len(gains), "least": min(gains), "most": max(gains)}
    )


@_quantity("ratio")
def share_against_call(records: Records, entry: Entry) -> Finding:
    """`target_us` over a stage's share of a batch, and a library's time over the stage's, both at the batch.

    The claim sets the share of a batch against a whole call of another problem.
    """
    batch = entry.problem
    ours, library = records.of(batch, entry.operands)
    alone, _ = records.of(replace(batch, batch=1), entry.operands)
    share = interval(median, ours.times_us).scaled(1 / batch.batch)
    return Finding(
        numbers=(share.inverse_of(entry.given["target_us"]), _speedup(library, ours)),
        rows=(ours, library, alone),
        values={"share": share.value, "alone": alone.median_us, "times_longer": alone.median_us / share.value},
        problems=(f"{batch.sizes}, a sequence", Problem.parse("1x8x512x64").sizes),
    )


PARTS = tuple(part for part in ablation.PARTS if part != "nothing")


@_quantity("ratio")
def time_shares(records: Records, entry: Entry) -> Finding:
    """Percent of a stage's time that goes when a part of its work is left out, for each part."""
    parts = (row for row in records.parts if row.name in entry.operands and row.problem == entry.problem)
    command = f"flashlab split {entry.operands[0]}"
    rows = of_one_run(parts, lambda row: row.record.left_out, ("nothing", *PARTS), command)

    def share(whole_us: Any, without_us: Any, axis: int) -> Any:
        return 1 - median(without_us, axis) / median(whole_us, axis)

    shares = tuple(interval(share, rows[0].times_us, part.times_us).scaled(100) for part in rows[1:])
    rest = 100 - sum(number.value for number in shares)
    unexplained = "{} % is in no part alone" if rest > 0 else "the parts overlap by {} %"
    return Finding(
        numbers=shares,
        rows=rows,
        values={"parts": ", ".join(PARTS), "unexplained": unexplained.format(tables.number(abs(rest)))},
    )


@_quantity("ratio")
def cycles_hidden(records: Records, entry: Entry) -> Finding:
    """The time that a second buffer saves, in cycles a tile of keys."""
    one, two = records.levels(entry.axis, entry.operands)
    samples, cubin = two.record.samples_of(), two.record.cubin
    clocks_mhz = samples.call_clock_mhz or samples.sm_clock_mhz
    if not clocks_mhz or cubin is None or not cubin.blocks_per_sm:
        raise PendingError(f"flashlab ablate {entry.axis}")
    blocks = FIRST.batch * FIRST.q_heads * math.ceil(FIRST.q_len / cubin.tile_q)
    resident = cubin.blocks_per_sm * two.record.gpu.sm_count
    tiles = blocks / resident * math.ceil(FIRST.kv_len / cubin.parameters["TILE_KV"])
    saved_us = interval(lambda more, less, axis: median(more, axis) - median(less, axis), one.times_us, two.times_us)
    return Finding(
        numbers=(saved_us.scaled(float(np.median(clocks_mhz)) / tiles),),
        rows=(one, two),
        values={"tiles": tiles, "blocks": cubin.blocks_per_sm},
    )


@_quantity("ratio")
def spread(records: Records, _: Entry) -> Finding:
    """What 19 of 20 rows stay below: the largest of all grows with their number, and a rerun has fewer."""
    spreads = [
        (samples.cv_percent, row)
        for row in records.measurements
        if row.name in registry.RUNGS and (samples := row.record.samples_of()) and len(samples.time_us) > 1
    ]
    if not spreads:
        raise PendingError("flashlab bench --suite standard")
    percents = [percent for percent, _ in spreads]
    worst, row = max(spreads, key=lambda one: one[0])
    middle, most = np.percentile(percents, (50, 95))
    return Finding(
        numbers=_exact(float(most)),
        rows=(row,),
        values={
            "rows": len(spreads),
            "middle": float(middle),
            "worst": worst,
            "at": f"`{row.name}` at {row.problem.label}",
        },
    )


@_quantity("time")
def call_time(records: Records, entry: Entry) -> Finding:
    """Microseconds of a single call by the host's clock, launch and wait included."""
    calls = (row for row in records.calls if row.problem == entry.problem)
    (row,) = newest(calls, entry.operands, "flashlab claims --measure")
    return Finding(numbers=(interval(median, row.times_us),), rows=(row,))


# --- Quantities of limits and counters --------------------------------------------------------------------------------


@_quantity("time")
def ceiling_time(records: Records, entry: Entry) -> Finding:
    """Microseconds of what a ceiling runs."""
    (row,) = newest(records.ceilings, entry.operands, "flashlab bench --suite smoke")
    return Finding(numbers=(interval(median, row.times_us),), rows=(row,))


@_quantity("ratio")
def memory_over_compute(records: Records, entry: Entry) -> Finding:
    """The time that device memory needs for a problem over the time that the tensor cores need."""
    problem = entry.problem
    rows = newest(records.ceilings, entry.operands, "flashlab bench --suite smoke")
    memory_us, tensor_us = (
        amount / row.record.value / 1e6
        for amount, row in zip((problem.compulsory_bytes, problem.flops), rows, strict=True)
    )
    h100_tb_s = roofline.DATASHEETS[MODELS["H100"].folder].memory_tb_s
    return Finding(
        numbers=_exact(memory_us / tensor_us),
        rows=rows,
        values={
            "memory_us": memory_us,
            "tensor_us": tensor_us,
            "megabytes": problem.compulsory_bytes / 1e6,
            "h100_tb_s": f"{h100_tb_s}",
            "on_h100": problem.compulsory_bytes / (h100_tb_s * 1e6) / tensor_us,
        },
    )


@_quantity("time")
def percent_of_peak(records: Records, entry: Entry) -> Finding:
    """A ceiling's rate, percent of the data sheet's; and what its products are made of on sm_89."""
    (row,) = newest(records.ceilings, entry.operands, "flashlab bench --suite smoke")
    share = roofline.percent_of_peak(records.gpu, row.name, row.record.value)
    if share is None:
        raise PendingError(f"a data sheet of {records.gpu} in query/datasheets.toml")
    defines: dict[str, int | str] = {"CHAINS": 1, "UNROLL": 1, "ELEMENT": "__half"}
    cubin = compiler.compile_file(KERNELS / "micro" / "tensor.cu", entry="micro_tensor", arch="sm_89", defines=defines)
    opcodes = {one.opcode for one in _instructions(cubin) if sass.classify(one) == "tensor"}
    return Finding(
        numbers=_exact(share), rows=(row,), values={"tflops": row.record.value, "opcodes": ", ".join(sorted(opcodes))}
    )


@_quantity("arithmetic")
def roof_shares(_: Records, entry: Entry) -> Finding:
    """Percent of an L4's bandwidth and of its compute that a call of `time_us` reaches."""
    sheet, problem, time_us = roofline.DATASHEETS[MODELS["L4"].folder], entry.problem, entry.given["time_us"]
    memory = 100 * problem.compulsory_bytes / time_us / 1e6 / sheet.memory_tb_s
    compute = 100 * problem.tflops(time_us) / sheet.tensor_tflops
    amounts = {"megabytes": problem.compulsory_bytes / 1e6, "gflop": problem.flops / 1e9}
    return Finding(numbers=_exact(memory, compute), values=amounts)


@_quantity("ratio")
def roof_shares_here(records: Records, entry: Entry) -> Finding:
    """The same of a stage's call on this GPU."""
    (row,) = records.of(entry.problem, entry.operands)
    sheet = roofline.DATASHEETS.get(records.gpu)
    if sheet is None:
        raise PendingError(f"a data sheet of {records.gpu} in query/datasheets.toml")
    shares = (100 * row.demand_tb_s / sheet.memory_tb_s, 100 * _rate(row).value / sheet.tensor_tflops)
    return Finding(numbers=_exact(*shares), rows=(row,))


def _profile(records: Records, problem: Problem, names: Sequence[str], metrics: Sequence[str]) -> tuple[Row, ...]:
    """The newest profile of each stage that has those metrics."""
    rows = (
        row
        for row in records.profiles
        if row.problem == problem and all(row.record.metrics.get(metric) for metric in metrics)
    )
    return newest(rows, names, f"flashlab profile {names[0]}")


_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
_DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_DURATION_NS = "gpu__time_duration.sum"


@_quantity("ratio")
def sectors_per_request(records: Records, entry: Entry) -> Finding:
    """Sectors that a request to load from global memory takes, of each stage."""
    rows = _profile(records, entry.problem, entry.operands, (_SECTORS, _REQUESTS))
    return Finding(
        numbers=_exact(*(row.record.metrics[_SECTORS] / row.record.metrics[_REQUESTS] for row in rows)), rows=rows
    )


@_quantity("ratio")
def utilization(records: Records, entry: Entry) -> Finding:
    """Percent of the tensor cores' and of device memory's peak, as Nsight Compute saw the fastest stage."""
    name = records.fastest(entry.problem).name
    sheet = roofline.DATASHEETS.get(records.gpu)
    if sheet is None:
        raise PendingError(f"a data sheet of {records.gpu} in query/datasheets.toml")
    (row,) = _profile(records, entry.problem, (name,), (_TENSOR, *_DRAM, _DURATION_NS))
    metrics = row.record.metrics
    tb_s = sum(metrics[metric] for metric in _DRAM) / metrics[_DURATION_NS] / 1e3
    return Finding(
        numbers=_exact(row.record.tensor_percent, 100 * tb_s / sheet.memory_tb_s), rows=(row,), values={"tb_s": tb_s}
    )


# --- Errors -----------------------------------------------------------------------------------------------------------


@_quantity("numbers")
def absolute_error(records: Records, entry: Entry) -> Finding:
    """The largest error of the newest result that was compared, right or wrong."""
    judged = (row for row in records.measurements if row.problem == entry.problem and row.record.verdict)
    rows = (row for row in judged if row.record.verdict.max_abs_error is not None)
    (row,) = newest(rows, entry.operands, _bench(entry.problem, entry.operands))
    return Finding(numbers=_exact(row.record.verdict.max_abs_error), rows=(row,))


@_quantity("numbers")
def error_over_limit(records: Records, entry: Entry) -> Finding:
    """A wrong result's largest error over what the checker allows; where it is no number, how many elements are none.

    What a kernel with a data race computes differs from run to run.
    """
    for row in reversed(records.measurements):
        verdict = row.record.verdict
        if row.name not in entry.operands or verdict is None:
            continue
        nan = re.match(r"NaN in output: (\d+) of (\d+) elements", verdict.reason)
        if verdict.max_abs_error is not None and verdict.max_abs_limit:
            value = verdict.max_abs_error / verdict.max_abs_limit
            outcome = f"largest error {verdict.max_abs_error:.3g} where the checker allows {verdict.max_abs_limit:.2g}"
        elif nan:
            value = float(nan[1])
            outcome = f"{nan[1]} of {nan[2]} elements are NaN, so that there is no largest error"
        else:
            continue
        return Finding(numbers=_exact(value), rows=(row,), values={"at": row.problem.label, "outcome": outcome})
    raise PendingError(_bench(entry.problem, entry.operands))


@_quantity("numbers")
def largest_error(records: Records, _: Entry) -> Finding:
    """Of every float16 result on record: what was timed, and the newest comparison over hostile lengths."""
    errors = [
        (row.record.verdict.max_abs_error, row.place, f"`{row.name}` at {row.problem.label}")
        for row in records.measurements
        if row.name in registry.RUNGS
        and row.record.status == "ok"
        and row.problem.dtype == "float16"
        and row.record.verdict is not None
        and row.record.verdict.max_abs_error is not None
    ]
    try:
        path = select.checks_file(records.gpu, records.data).relative_to(records.data).as_posix()
        for line in select.checks(records.gpu, records.data):
            problem = store.ProblemFields.model_validate(line["problem"]).problem()
            if line["status"] == "ok" and problem.dtype == "float16" and line["verdict"]:
                error = line["verdict"]["max_abs_error"] or 0.0
                errors.append((error, f"{path}:{line['line']}", f"`{line['stage']}` at {problem.label}"))
    except NoDataError:
        pass
    if not errors:
        raise PendingError("flashlab bench --suite standard")
    worst, place, at = max(errors)
    within = sum(error <= 2e-3 for error, _, _ in errors)
    return Finding(
        numbers=_exact(worst), rows=(Row(None, place),), values={"results": len(errors), "within": within, "at": at}
    )


# --- Machine code -----------------------------------------------------------------------------------------------------


def _built(operand: str, *, arch: str = "sm_90a") -> compiler.Cubin:
    """Machine code at head dim 64, without a mask, in float16.

    Raises:
        PendingError: no such stage in this checkout, or its code cannot be made here.
    """
    name, overrides = split(operand)
    try:
        return compiler.compile_stage(
            registry.get(name), head_dim=64, dtype="float16", causal=False, arch=arch, overrides=overrides or None
        )
    except (UnknownStageError, CompileError) as error:
        raise PendingError(f"flashlab compile {name} --arch {arch}") from error


def _smem_kb(cubin: compiler.Cubin) -> float:
    """Shared memory of a block."""
    assert cubin.launch_shape is not None
    return (cubin.launch_shape.smem_bytes + cubin.resources.static_smem_bytes) / 1024


def _source(cubin: compiler.Cubin, operand: str) -> str:
    return f"`{registry.get(split(operand)[0]).source.name}` for {cubin.arch}"


def _instructions(cubin: compiler.Cubin) -> Sequence[sass.Instruction]:
    return sass.disassemble(cubin.code, cubin.entry)


COUNTS: Mapping[str, Callable[[compiler.Cubin], float]] = {
    "registers": lambda cubin: cubin.resources.registers,
    "smem_kb": _smem_kb,
    "spilled_bytes": lambda cubin: cubin.resources.spill_store_bytes,
    "branches": lambda cubin: sass.branches(_instructions(cubin)).predicated,
    "smem_instructions": lambda cubin: sass.shared_memory(_instructions(cubin)),
}
"""What is counted of machine code; branches are jumps under a condition in the kernel's own code."""


@_quantity("code")
def machine_code(_: Records, entry: Entry) -> Finding:
    """Some of `COUNTS` of a stage for sm_90a."""
    (operand,) = entry.operands
    cubin = _built(operand)
    jumps = sass.branches(_instructions(cubin))
    every = jumps.predicated + jumps.predicated_exits + jumps.in_subroutines
    return Finding(
        numbers=_exact(*(COUNTS[name](cubin) for name in entry.counts)),
        values={"source": _source(cubin, operand), "every": every},
    )


SMEM_LIMIT_KB: Mapping[str, int] = {"sm_89": 99}
"""Shared memory that a block may have once it asks for it: CUDA C++ Programming Guide, technical specifications per
compute capability."""


@_quantity("code")
def smem_limit(_: Records, entry: Entry) -> Finding:
    """The shared memory that a block may have on sm_89, KB, beside what a stage takes."""
    (operand,), arch = entry.operands, "sm_89"
    cubin = _built(operand, arch=arch)
    assert cubin.launch_shape is not None
    values = {"source": _source(cubin, operand), "rows": cubin.launch_shape.tile_q, "used_kb": _smem_kb(cubin)}
    return Finding(numbers=_exact(SMEM_LIMIT_KB[arch]), values=values)


# --- Arithmetic -------------------------------------------------------------------------------------------------------


@_quantity("arithmetic")
def quotient(_: Records, entry: Entry) -> Finding:
    """`above` over `below`, two numbers of the document."""
    return Finding(numbers=_exact(entry.given["above"] / entry.given["below"]))


@_quantity("arithmetic")
def amdahl(_: Records, entry: Entry) -> Finding:
    """What Amdahl's law allows where a `share` of the time gets `factor` times faster; what share `gain` takes."""
    share, factor, gain = (entry.given[name] for name in ("share", "factor", "gain"))
    needed = 100 * (1 - 1 / gain) / (1 - 1 / factor)
    return Finding(numbers=_exact(1 / (1 - share + share / factor)), values={"needed": needed})


@_quantity("arithmetic")
def resident_blocks(_: Records, entry: Entry) -> Finding:
    """Blocks of `smem_kb` that fit into an SM's `sm_smem_kb`, where the system takes `reserved_kb` of each."""
    given = entry.given
    blocks = given["sm_smem_kb"] // (given["smem_kb"] + given["reserved_kb"])
    by_registers = given["sm_registers"] // (math.ceil(given["registers"] / 8) * 8 * given["threads"])
    return Finding(numbers=_exact(blocks), values={"by_registers": by_registers})


@_quantity("arithmetic")
def model_latency(_: Records, entry: Entry) -> Finding:
    """The time of attention in a model's `layers` at a rate of `tflops`, ms."""
    layer_ms = entry.problem.flops / (entry.given["tflops"] * 1e12) * 1e3
    values = {"gflop": entry.problem.flops / 1e9, "layer_ms": layer_ms}
    return Finding(numbers=_exact(entry.given["layers"] * layer_ms), values=values)
