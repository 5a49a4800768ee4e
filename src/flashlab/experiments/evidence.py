"""What the records of a GPU say about each claim: our numbers, their intervals, and where they come from.

ledger.toml says for each claim which stage, library or machine code is the comparable one, which quantity of it, and
in what words. A quantity is a function here that takes the rows it needs from the records and makes numbers of them. It
does not know what is claimed: that, and the rules that hold one against the other, is ledger.py.
"""

from __future__ import annotations

import math
import re
import string
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from flashlab.build import compiler, sass
from flashlab.core.errors import CompileError, NoDataError, UnknownStageError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA, KERNELS
from flashlab.core.problem import FIRST_SHAPE, MASKS, DType, Problem
from flashlab.experiments import ablation
from flashlab.kernels import peers, registry
from flashlab.measure import ceilings
from flashlab.query import roofline, select
from flashlab.query.frame import frame, of_problem
from flashlab.query.kinship import MODELS, kinship
from flashlab.query.select import Policy
from flashlab.query.statistics import Estimate, interval, median, ratio_of_medians
from flashlab.record.schema import Ablation, Call, Measurement
from flashlab.show import tables

FIRST = Problem.parse(FIRST_SHAPE)
FASTEST = "fastest"
"""In place of a name: the fastest stage of the ladder, of those that the condition after a colon holds for."""

About = Literal["time", "ratio", "code", "arithmetic", "numbers"]
"""What a claim is about. time: a time, or a rate. ratio: of two times, or of two limits. code: the machine code, or
what it takes of an SM. arithmetic: what follows from the document's own numbers. numbers: what a kernel computes."""
Count = Literal["registers", "smem_kb", "smem_limit_kb", "spilled_bytes", "smem_instructions", "branches"]


class PendingError(Exception):
    """What would tell is not on record; the message is the command that makes it. What looks for records raises it."""


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
    arch: str = "sm_90a"
    counts: tuple[Count, ...] = ()
    given: Mapping[str, float] = {}
    problems: tuple[str, ...] = ()
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
    return operand.partition("[")[0], registry.variant_in(operand)


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
    able = [stage.id for stage in stages if stage.language == "cuda" and arch in stage.archs]
    try:
        counts = _counts(_built(able[-1], arch=arch)) if able else {}
    except PendingError:
        counts = {}
    if not counts:
        return ""
    spill = f"{counts['spilled_bytes']} bytes spilled" if counts["spilled_bytes"] else "no spill"
    sentence = (
        f"Without an {claimed}: `{able[-1]}` compiles for {arch} with {counts['registers']} registers, "
        f"{tables.number(counts['smem_kb'])} KB of shared memory and {spill}"
    )
    statuses = []
    with suppress(NoDataError):
        checks = (row["emulator"] for row in select.emulated_checks(gpu, data) if row["stage"] == able[-1])
        statuses = [one["status"] for one in checks if one and one["status"] != "unsupported"]
    if statuses:
        sentence += f"; run on a CPU, it was right at {statuses.count('ok')} of {len(statuses)} problems"
    return f"{sentence}."


# --- What is on record ------------------------------------------------------------------------------------------------


Row = Any
"""A record as `DataFrame.itertuples` gives it: the columns that `query.frame.frame` names."""


def times_us(row: Row) -> Sequence[float]:
    """A row's samples, microseconds a call; hot bursts where there are several kinds. Empty where there are none."""
    if isinstance(row.record, Call):
        return row.record.time_us
    samples = row.record.samples_of() if hasattr(row.record, "samples_of") else row.record.samples
    return samples.time_us if samples else ()


class Records:
    """All that is on record of one GPU, on normal inputs."""

    def __init__(self, gpu: str, data: Path = DATA) -> None:
        self.gpu = gpu
        self.data = data

    def rows(self, folder: str) -> list[Row]:
        """A folder's records, oldest first; a damaged line is left out, and `flashlab results --verify` names it."""
        table = frame(self.gpu, self.data, folder)
        if "inputs" in table:
            table = table[table["inputs"].isna() | (table["inputs"] == NORMAL)]
        return list(table.itertuples(index=False))

    @cached_property
    def ceilings(self) -> list[Row]:
        """Readings of the GPU's limits, oldest first."""
        return [row for row in self.rows("runs") if row.kind == "ceiling"]

    @cached_property
    def measurements(self) -> list[Row]:
        """Stages, dead ends and libraries, oldest first; not a stage's second row, with the log-sum-exp on."""
        return [row for row in self.rows("runs") if row.kind != "ceiling" and row.second is not True]

    def chosen(self, problem: Problem, policy: Policy) -> dict[str, Row]:
        """The timed rows that a policy chooses at a problem, by name."""
        table = select.select(of_problem(frame(self.gpu, self.data), problem), policy)
        rows: Iterable[Row] = table.itertuples(index=False)
        return {row.name: row for row in rows if row.status == "ok" and times_us(row)}

    def of(self, problem: Problem, names: Sequence[str]) -> Sequence[Row]:
        """Rows of stages or libraries at a problem, of the newest run that timed them all."""
        rows = self.chosen(problem, select.together(*names))
        if not rows.keys() >= set(names):
            raise PendingError(_bench(problem, names))
        return [rows[name] for name in names]

    def levels(self, axis: str, operands: Sequence[str]) -> Sequence[Row]:
        """Levels of an ablation at the first shape, all else the stage's defaults, of the newest run with them all."""
        wanted = [
            _level(name, {**registry.get(name).parameters(FIRST.head_dim), **values})
            for name, values in map(split, operands)
        ]
        on_axis = (row for row in self.rows("ablations") if row.record.axis == axis and row.status == "ok")
        rows = [row for row in on_axis if row.problem == FIRST]
        key = lambda row: _level(row.name, row.record.parameters)  # noqa: E731
        return of_one_run(rows, key, wanted, f"flashlab ablate {axis}")

    def fastest(self, problem: Problem, condition: str = "") -> Row:
        """The fastest stage of the ladder that a condition holds for."""
        ladder = self.chosen(problem, select.LADDER).values()
        able = [row for row in ladder if row.name in registry.RUNGS and CONDITIONS[condition](row.record)]
        if not able:
            raise PendingError(f"flashlab bench --shape {problem.shape}")
        return min(able, key=lambda row: row.median_us)

    def named(self, entry: Entry, group: Sequence[str]) -> Sequence[Row]:
        """The rows that a group of an entry's names stands for."""
        if any("[" in name for name in group):
            return self.levels(entry.axis, group)
        if any(name.startswith(FASTEST) for name in group):
            return [self.fastest(entry.problem, name.partition(":")[2]) for name in group]
        if ceilings.CEILINGS.keys() >= set(group):
            return newest(self.ceilings, group, "flashlab bench --suite smoke")
        return self.of(entry.problem, group)


CONDITIONS: Mapping[str, Callable[[Measurement], bool]] = {
    "": lambda _: True,
    "scalar": lambda row: row.cubin is not None and row.cubin.sass["tensor"] == 0,
    "tensor": lambda row: row.cubin is not None and row.cubin.sass["tensor"] > 0,
    "before_hopper": lambda row: (stage := registry.RUNGS[row.name]).language == "cuda" and stage.max_arch is None,
}
"""Which stages `fastest:CONDITION` is the fastest of."""


def _level(name: str, parameters: Mapping[str, int]) -> tuple[str, frozenset[tuple[str, int]]]:
    """What makes two levels the same; what only ablations set is 0 where nobody names it."""
    return name, frozenset((key, value) for key, value in parameters.items() if value)


def _by_run(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[str, dict[Any, Row]]:
    by_run: dict[str, dict[Any, Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, {})[key(row)] = row
    return by_run


def of_one_run(rows: Iterable[Row], key: Callable[[Row], Any], wanted: Sequence[Any], command: str) -> Sequence[Row]:
    """The rows with the wanted keys, of the newest run that has them all: their ratio has a meaning."""
    whole = {run: found for run, found in _by_run(rows, key).items() if found.keys() >= set(wanted)}
    if not whole:
        raise PendingError(command)
    return [whole[max(whole)][one] for one in wanted]


def newest(rows: Iterable[Row], names: Sequence[str], command: str) -> Sequence[Row]:
    """The last row of each name, of whatever run."""
    by_name = {row.name: row for row in rows}
    if not by_name.keys() >= set(names):
        raise PendingError(command)
    return [by_name[name] for name in names]


def _bench(problem: Problem, names: Sequence[str]) -> str:
    """The command that times those stages and libraries at a problem."""
    libraries = [name for name in names if name in peers.PEERS]
    stages = [name for name in names if name not in libraries]
    dtype = "" if problem.dtype == "float16" else f" --dtype {problem.dtype}"
    chosen = f"--stages {','.join(stages) or 'none'} --peers {','.join(libraries) or 'none'}"
    return f"flashlab bench --shape {problem.shape}{dtype} {chosen}"


# --- Findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What the records say about one claim; a quantity fills the first three fields, and `find` the others."""

    numbers: tuple[Estimate, ...]
    """One for each claimed number."""
    rows: Sequence[Row] = ()
    """The records that they come from; none where they were computed or compiled."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else stands in braces in an entry's text and note."""
    _: KW_ONLY
    about: About = "arithmetic"
    text: str = ""
    """What was measured or computed, for people."""
    beside: str = ""
    """What else is worth saying; empty for nothing."""
    stages: tuple[str, ...] = ()
    """Stages and dead ends that it is about."""
    demand_tb_s: float | None = None
    """Bytes that must cross device memory over the time it took, TB/s, of a time."""


Evaluator = Callable[[Records, Entry], Finding]
QUANTITIES: dict[str, tuple[About, str, Evaluator]] = {}
"""By name: what it is about, what it is called where an entry has no text, and its function."""


def _quantity(about: About, text: str = "") -> Callable[[Evaluator], Evaluator]:
    """Registers a function as a quantity of its name."""

    def register(evaluate: Evaluator) -> Evaluator:
        QUANTITIES[evaluate.__name__] = (about, text, evaluate)
        return evaluate

    return register


class _Text(string.Formatter):
    """Numbers with three significant digits, unless the text asks for a format."""

    def format_field(self, value: Any, format_spec: str) -> str:
        as_number = isinstance(value, float) and not format_spec
        return tables.number(value) if as_number else str(super().format_field(value, format_spec))


def find(records: Records, entry: Entry) -> Finding:
    """What the records say: an entry's numbers, and whatever stands beside it that is on record."""
    about, text, evaluate = QUANTITIES[entry.quantity]
    finding = evaluate(records, entry)
    stages = [
        finding.rows[index].name if operand.startswith(FASTEST) else split(operand)[0]
        for index, operand in enumerate(entry.operands)
    ]
    choices = [_choice(operand) if any("[" in one for one in group) else "" for group in entry.of for operand in group]
    names = [f"`{name}`{f' with {choice}' if choice else ''}" for name, choice in zip(stages, choices, strict=True)]
    values = {
        "problem": entry.problem.label,
        "gpu": records.gpu,
        "slower": next(filter(None, (*choices, *names)), ""),
        "value": finding.numbers[0].value,
        "values": [number.value for number in finding.numbers],
        "times": [(getattr(row, "median_us", None) or math.nan) / entry.per for row in finding.rows],
        **entry.given,
        **finding.values,
    }
    beside = []
    for other in entry.beside:
        with suppress(PendingError):
            beside.append((other, find(records, other)))
    cited = {row.place: row for other, found in beside if other.cited for row in found.rows}
    theirs = [*(name for _, found in beside for name in found.stages), *(n for one in entry.beside for n in one.names)]
    own, first = {row.place for row in finding.rows}, next(iter(finding.rows), None)
    timed = about == "time" and entry.fused and first and isinstance(first.record, Measurement | Ablation)
    sentences = (_Text().format(entry.note, *names, **values), ", ".join(found.text for _, found in beside))
    return replace(
        finding,
        rows=[*finding.rows, *(row for place, row in cited.items() if place not in own)],
        about=about,
        text=_Text().format(entry.text or text, *names, **values),
        beside="; ".join(filter(None, sentences)),
        stages=tuple(filter(is_stage, dict.fromkeys(entry.stages or stages or theirs))),
        demand_tb_s=first.problem.compulsory_bytes / first.median_us / 1e6 if timed and first else None,
    )


def _choice(operand: str) -> str:
    return " ".join(f"{name}={value}" for name, value in split(operand)[1].items()) or "its defaults"


def _exact(*values: float) -> tuple[Estimate, ...]:
    return tuple(map(Estimate.exactly, values))


def _rate(row: Row) -> Estimate:
    """TFLOP/s."""
    time, tflops = interval(median, times_us(row)), row.problem.tflops
    return Estimate(value=tflops(time.value), low=tflops(time.high), high=tflops(time.low))


def _speedup(slow: Row, fast: Row) -> Estimate:
    return interval(ratio_of_medians, times_us(slow), times_us(fast))


# --- Quantities -------------------------------------------------------------------------------------------------------


@_quantity("time", "{0} at {problem}")
def rate(records: Records, entry: Entry) -> Finding:
    """TFLOP/s of each."""
    rows = [row for group in entry.of for row in records.named(entry, group)]
    return Finding(tuple(map(_rate, rows)), rows)


@_quantity("time", "{0} at {problem}")
def time(records: Records, entry: Entry) -> Finding:
    """Microseconds of a call of each, over `per`."""
    rows = [row for group in entry.of for row in records.named(entry, group)]
    return Finding(tuple(interval(median, times_us(row)).scaled(1 / entry.per) for row in rows), rows)


@_quantity("time")
def call_time(records: Records, entry: Entry) -> Finding:
    """Microseconds of a single call by the host's clock, launch and wait included."""
    calls = [row for row in records.rows("calls") if row.problem == entry.problem]
    (row,) = newest(calls, entry.operands, "flashlab claims --measure")
    return Finding((interval(median, times_us(row)),), (row,))


@_quantity("ratio", "{1} over {slower} at {problem}")
def speedup(records: Records, entry: Entry) -> Finding:
    """Of each pair, how many times faster the second is."""
    pairs = [records.named(entry, group) for group in entry.of]
    return Finding(tuple(_speedup(*pair) for pair in pairs), [row for pair in pairs for row in pair])


@_quantity("ratio")
def causal_speedup(records: Records, entry: Entry) -> Finding:
    """A stage without a mask over the same under a causal one, in one run; and the range over that run's stages."""
    problems = [Problem.parse(entry.shape, mask=mask) for mask in MASKS]
    timed = (row for row in records.measurements if row.status == "ok" and times_us(row))
    rows = [row for row in timed if row.name in registry.RUNGS and row.problem in problems]
    ours = [row for row in rows if row.name in entry.operands]
    pair = of_one_run(ours, lambda row: row.problem, problems, _bench(entry.problem, entry.operands))
    whole = _by_run((row for row in rows if row.run == pair[0].run), lambda row: (row.name, row.problem))
    of_run = whole[pair[0].run]
    pairs = [[of_run.get((name, problem)) for problem in problems] for name in {name for name, _ in of_run}]
    gains = [_speedup(full, causal).value for full, causal in pairs if full and causal]
    return Finding((_speedup(*pair),), pair, {"stages": len(gains), "least": min(gains), "most": max(gains)})


@_quantity("ratio")
def share_against_call(records: Records, entry: Entry) -> Finding:
    """`target_us` over a stage's share of a batch, and a library's time over the stage's, both at the batch."""
    batch = entry.problem
    ours, library = records.of(batch, entry.operands)
    alone, _ = records.of(replace(batch, batch=1), entry.operands)
    share = interval(median, times_us(ours)).scaled(1 / batch.batch)
    values = {"share": share.value, "alone": alone.median_us, "times_longer": alone.median_us / share.value}
    numbers = (share.inverse_of(entry.given["target_us"]), _speedup(library, ours))
    return Finding(numbers, (ours, library, alone), values)


PARTS = tuple(part for part in ablation.PARTS if part != "nothing")


@_quantity("ratio")
def time_shares(records: Records, entry: Entry) -> Finding:
    """Percent of a stage's time that goes when a part of its work is left out, for each part."""
    (name,) = entry.operands
    parts = [row for row in records.rows("parts") if (row.name, row.problem) == (name, entry.problem)]
    rows = of_one_run(parts, lambda row: row.record.left_out, ("nothing", *PARTS), f"flashlab split {name}")

    def share(whole_us: Any, without_us: Any, axis: int) -> Any:
        return 1 - median(without_us, axis) / median(whole_us, axis)

    shares = tuple(interval(share, times_us(rows[0]), times_us(part)).scaled(100) for part in rows[1:])
    rest = 100 - sum(number.value for number in shares)
    unexplained = "{} % is in no part alone" if rest > 0 else "the parts overlap by {} %"
    values = {"parts": ", ".join(PARTS), "unexplained": unexplained.format(tables.number(abs(rest)))}
    return Finding(shares, rows, values)


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
    saved_us = interval(lambda more, less, axis: median(more, axis) - median(less, axis), times_us(one), times_us(two))
    cycles = saved_us.scaled(float(np.median(clocks_mhz)) / tiles)
    return Finding((cycles,), (one, two), {"tiles": tiles, "blocks": cubin.blocks_per_sm})


@_quantity("ratio")
def spread(records: Records, _: Entry) -> Finding:
    """What 19 of 20 rows stay below: the largest of all grows with their number, and a rerun has fewer."""
    rows = [row for row in records.measurements if row.name in registry.RUNGS and len(times_us(row)) > 1]
    if not rows:
        raise PendingError("flashlab bench --suite standard")
    percents = [row.cv_percent for row in rows]
    worst = rows[percents.index(max(percents))]
    middle, most = map(float, np.percentile(percents, (50, 95)))
    at = f"`{worst.name}` at {worst.problem.label}"
    return Finding(_exact(most), (worst,), {"rows": len(rows), "middle": middle, "worst": max(percents), "at": at})


@_quantity("ratio")
def memory_over_compute(records: Records, entry: Entry) -> Finding:
    """The time that device memory needs for a problem over the time that the tensor cores need."""
    copy, tensor = records.named(entry, entry.operands)
    bytes_, tensor_us = entry.problem.compulsory_bytes, entry.problem.flops / tensor.value / 1e6
    memory_us, h100_tb_s = bytes_ / copy.value / 1e6, roofline.DATASHEETS[MODELS["H100"].folder].memory_tb_s
    values = {"memory_us": memory_us, "tensor_us": tensor_us, "megabytes": bytes_ / 1e6, "h100_tb_s": h100_tb_s}
    on_h100 = bytes_ / (h100_tb_s * 1e6) / tensor_us
    return Finding(_exact(memory_us / tensor_us), (copy, tensor), {**values, "on_h100": on_h100})


@_quantity("time")
def percent_of_peak(records: Records, entry: Entry) -> Finding:
    """A ceiling's rate, percent of the data sheet's; and what its products are made of on sm_89."""
    (row,) = records.named(entry, entry.operands)
    share = 100 * row.value / (_sheet(records.gpu).peak(row.name) or math.nan)
    defines: dict[str, int | str] = {"CHAINS": 1, "UNROLL": 1, "ELEMENT": "__half"}
    cubin = compiler.compile_file(KERNELS / "micro" / "tensor.cu", entry="micro_tensor", arch="sm_89", defines=defines)
    opcodes = {one.opcode for one in sass.disassemble(cubin.code, cubin.entry) if sass.classify(one) == "tensor"}
    return Finding(_exact(share), (row,), {"tflops": row.value, "opcodes": ", ".join(sorted(opcodes))})


def _sheet(gpu: str) -> roofline.Datasheet:
    if gpu not in roofline.DATASHEETS:
        raise PendingError(f"a data sheet of {gpu} in query/datasheets.toml")
    return roofline.DATASHEETS[gpu]


@_quantity("arithmetic")
def roof_shares(records: Records, entry: Entry) -> Finding:
    """Percent of device memory's bandwidth and of the tensor cores' rate: of a stage here, or of `time_us` on an L4."""
    rows = records.of(entry.problem, entry.operands) if entry.operands else ()
    time_us = rows[0].median_us if rows else entry.given["time_us"]
    sheet, problem = _sheet(records.gpu if rows else MODELS["L4"].folder), entry.problem
    memory = 100 * problem.compulsory_bytes / time_us / 1e6 / sheet.memory_tb_s
    compute = 100 * problem.tflops(time_us) / sheet.tensor_tflops
    amounts = {"megabytes": problem.compulsory_bytes / 1e6, "gflop": problem.flops / 1e9}
    return Finding(_exact(memory, compute), rows, amounts)


def _profiles(records: Records, problem: Problem, names: Sequence[str], *metrics: str) -> Sequence[Row]:
    """The newest profile of each stage that has those metrics."""
    at_problem = (row for row in records.rows("profiles") if row.problem == problem)
    rows = [row for row in at_problem if all(row.record.metrics.get(metric) for metric in metrics)]
    return newest(rows, names, f"flashlab profile {names[0]}")


@_quantity("ratio")
def sectors_per_request(records: Records, entry: Entry) -> Finding:
    """Sectors that a request to load from global memory takes, of each stage."""
    sectors, requests = (f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("sectors", "requests"))
    rows = _profiles(records, entry.problem, entry.operands, sectors, requests)
    return Finding(_exact(*(row.record.metrics[sectors] / row.record.metrics[requests] for row in rows)), rows)


@_quantity("ratio")
def utilization(records: Records, entry: Entry) -> Finding:
    """Percent of the tensor cores' and of device memory's peak, as Nsight Compute saw the fastest stage."""
    tensor, time_ns = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "gpu__time_duration.sum"
    dram = ("dram__bytes_read.sum", "dram__bytes_write.sum")
    name = records.fastest(entry.problem).name
    (row,) = _profiles(records, entry.problem, (name,), tensor, *dram, time_ns)
    tb_s = sum(row.record.metrics[metric] for metric in dram) / row.record.metrics[time_ns] / 1e3
    shares = _exact(row.record.tensor_percent, 100 * tb_s / _sheet(records.gpu).memory_tb_s)
    return Finding(shares, (row,), {"tb_s": tb_s})


@_quantity("numbers")
def absolute_error(records: Records, entry: Entry) -> Finding:
    """The largest error of the newest result that was compared, right or wrong."""
    judged = (row for row in records.measurements if row.problem == entry.problem and row.record.verdict)
    rows = [row for row in judged if row.record.verdict.max_abs_error is not None]
    (row,) = newest(rows, entry.operands, _bench(entry.problem, entry.operands))
    return Finding(_exact(row.record.verdict.max_abs_error), (row,))


@_quantity("numbers")
def error_over_limit(records: Records, entry: Entry) -> Finding:
    """A wrong result's largest error over what the checker allows; where it is no number, how many elements are none.

    What a kernel with a data race computes differs from run to run.
    """
    for row in reversed([row for row in records.measurements if row.name in entry.operands and row.record.verdict]):
        verdict, at = row.record.verdict, row.problem.label
        nan = re.match(r"NaN in output: (\d+) of (\d+) elements", verdict.reason)
        if verdict.max_abs_error is not None and verdict.max_abs_limit:
            value = verdict.max_abs_error / verdict.max_abs_limit
            outcome = f"largest error {verdict.max_abs_error:.3g} where the checker allows {verdict.max_abs_limit:.2g}"
        elif nan:
            value = float(nan[1])
            outcome = f"{nan[1]} of {nan[2]} elements are NaN, so that there is no largest error"
        else:
            continue
        return Finding(_exact(value), (row,), {"at": at, "outcome": outcome})
    raise PendingError(_bench(entry.problem, entry.operands))


@_quantity("numbers")
def largest_error(records: Records, _: Entry) -> Finding:
    """Of every float16 result on record: what was timed, and the newest comparison over hostile lengths."""
    right = [row for row in records.measurements if row.status == "ok" and row.name in registry.RUNGS]
    errors = [
        (row.record.verdict.max_abs_error, row.place, f"`{row.name}` at {row.problem.label}")
        for row in right
        if row.dtype == "float16" and row.record.verdict and row.record.verdict.max_abs_error is not None
    ]
    with suppress(NoDataError):
        file, checks = select.checks(records.gpu, records.data)
        path = file.relative_to(records.data).as_posix()
        errors += [
            (check["verdict"]["max_abs_error"] or 0.0, f"{path}:{check['line']}", f"`{check['stage']}` at {label}")
            for check in checks
            if check["status"] == "ok" and check["problem"]["dtype"] == "float16" and check["verdict"]
            for label in [Problem(**check["problem"]).label]
        ]
    if not errors:
        raise PendingError("flashlab bench --suite standard")
    worst, place, at = max(errors)
    within = sum(error <= 2e-3 for error, _, _ in errors)
    return Finding(
        _exact(worst),
        (SimpleNamespace(place=place, record=None),),
        {"results": len(errors), "within": within, "at": at},
    )


def _built(operand: str, *, arch: str) -> compiler.Cubin:
    """Machine code at head dim 64, without a mask, in float16."""
    name, overrides = split(operand)
    try:
        stage = registry.get(name)
        return compiler.compile_stage(compiler.Job.of(stage, FIRST, arch=arch, overrides=overrides or None))
    except (UnknownStageError, CompileError) as error:
        raise PendingError(f"flashlab compile {name} --arch {arch}") from error


SMEM_LIMIT_KB: Mapping[str, int] = {"sm_89": 99}
"""Shared memory that a block may have once it asks for it: CUDA C++ Programming Guide, technical specifications per
compute capability."""


def _counts(cubin: compiler.Cubin) -> dict[str, float]:
    """What is counted of a stage's machine code; branches are jumps under a condition in the kernel's own code."""
    assert cubin.launch_shape is not None
    instructions = sass.disassemble(cubin.code, cubin.entry)
    jumps = sass.branches(instructions)
    return {
        "registers": cubin.resources.registers,
        "smem_kb": (cubin.launch_shape.smem_bytes + cubin.resources.static_smem_bytes) / 1024,
        "smem_limit_kb": SMEM_LIMIT_KB.get(cubin.arch, math.nan),
        "spilled_bytes": cubin.resources.spill_store_bytes,
        "smem_instructions": sass.shared_memory(instructions),
        "branches": jumps.predicated,
        "every_branch": jumps.predicated + jumps.predicated_exits + jumps.in_subroutines,
        "tile_q": cubin.launch_shape.tile_q,
    }


@_quantity("code")
def machine_code(_: Records, entry: Entry) -> Finding:
    """Some counts of a stage."""
    (operand,) = entry.operands
    counts = _counts(_built(operand, arch=entry.arch))
    source = f"`{registry.get(split(operand)[0]).source.name}` for {entry.arch}"
    return Finding(_exact(*(counts[name] for name in entry.counts)), (), {"source": source, **counts})


@_quantity("arithmetic")
def quotient(_: Records, entry: Entry) -> Finding:
    """`above` over `below`, two numbers of the document."""
    return Finding(_exact(entry.given["above"] / entry.given["below"]))


@_quantity("arithmetic")
def amdahl(_: Records, entry: Entry) -> Finding:
    """What Amdahl's law allows where a `share` of the time gets `factor` times faster; what share `gain` takes."""
    share, factor, gain = (entry.given[name] for name in ("share", "factor", "gain"))
    needed = 100 * (1 - 1 / gain) / (1 - 1 / factor)
    return Finding(_exact(1 / (1 - share + share / factor)), (), {"needed": needed})


@_quantity("arithmetic")
def resident_blocks(_: Records, entry: Entry) -> Finding:
    """Blocks of `smem_kb` that fit into an SM's `sm_smem_kb`, where the system takes `reserved_kb` of each."""
    given = entry.given
    blocks = given["sm_smem_kb"] // (given["smem_kb"] + given["reserved_kb"])
    by_registers = given["sm_registers"] // (math.ceil(given["registers"] / 8) * 8 * given["threads"])
    return Finding(_exact(blocks), (), {"by_registers": by_registers})


@_quantity("arithmetic")
def model_latency(_: Records, entry: Entry) -> Finding:
    """The time of attention in a model's `layers` at a rate of `tflops`, ms."""
    layer_ms = entry.problem.flops / (entry.given["tflops"] * 1e12) * 1e3
    values = {"gflop": entry.problem.flops / 1e9, "layer_ms": layer_ms}
    return Finding(_exact(entry.given["layers"] * layer_ms), (), values)
