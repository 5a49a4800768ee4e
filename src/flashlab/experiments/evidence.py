"""Evidence for each claim from a GPU's records: our numbers, their intervals and sources.

ledger.toml says for each claim which stage, library or machine code is the comparable one, which quantity of it, and
in what words. A quantity is a function here that takes the rows it needs from the records and makes numbers of them. It
does not know what is claimed: that, and the rules that hold one against the other, is ledger.py.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import field_validator, model_validator

from flashlab.build import compiler, sass
from flashlab.core.arithmetic import calculated
from flashlab.core.errors import CompileError, UnknownStageError
from flashlab.core.facts import Facts
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA, KERNELS, table
from flashlab.core.problem import FIRST_SHAPE, MASKS, DType, Problem
from flashlab.experiments import ablation
from flashlab.kernels import peers, registry
from flashlab.measure import ceilings
from flashlab.query import roofline, select
from flashlab.query.statistics import Estimate, Statistic, median, over_starts, ratio_of_medians
from flashlab.record import store
from flashlab.record.schema import Call, Ceiling, Measurement, Timed
from flashlab.show import tables

FIRST = Problem.parse(FIRST_SHAPE)
FASTEST = "fastest"
"""In place of a name: the fastest stage of the ladder, of those that meet the condition after a colon."""

Count = Literal["registers", "smem_kb", "smem_limit_kb", "spilled_bytes", "smem_instructions", "branches"]


class PendingError(Exception):
    """What would tell is not on record; the message is the command that makes it. What looks for records raises it."""


# --- What speaks to a claim -------------------------------------------------------------------------------------------


class Entry(Facts):
    """What speaks to one claim, or is worth saying beside it; ledger.toml explains the fields."""

    quantity: str
    of: tuple[tuple[str, ...], ...] = ()
    """Names, grouped by run."""
    shape: str = FIRST_SHAPE
    dtype: DType = "float16"
    axis: str = ""
    per: float = 1
    arch: str = "sm_90a"
    counts: tuple[Count, ...] = ()
    given: Mapping[str, float] = {}
    formulas: tuple[str, ...] = ()
    unit: str = ""
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
        return {**fields, "beside": [{**inherited, **other} for other in fields.get("beside", ())]}

    @field_validator("of", mode="before")
    @classmethod
    def _grouped(cls, value: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
        return (tuple(value),) if value and isinstance(value[0], str) else tuple(map(tuple, value))

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
        """Every name in `of`, in order."""
        return tuple(name for group in self.of for name in group)


def split(operand: str) -> tuple[str, dict[str, int]]:
    """`ID[NAME=VALUE,…]` as the id and the values, which are empty without brackets."""
    return operand.partition("[")[0], registry.variant_in(operand)


def is_stage(name: str) -> bool:
    """Whether it is the id of a stage or a dead end."""
    return name in registry.STAGES or name in registry.DEAD_ENDS


@cache
def facts() -> Mapping[str, Any]:
    """Contents of ledger.toml."""
    return table(__file__, "ledger")


@cache
def entries() -> Mapping[str, Entry]:
    """The evidence entries by claim id."""
    return {name: Entry.model_validate(fields) for name, fields in facts()["claims"].items()}


# --- What is on record ------------------------------------------------------------------------------------------------


Row = Any
"""A record."""

Starts = Sequence[Sequence[Row]]
"""Of each start of a machine, that of the newest run last, the rows in the order in which they were asked for."""


def times_us(row: Row) -> Sequence[float]:
    """A row's samples, microseconds per call; hot bursts if there are several kinds. May be empty."""
    if isinstance(row, Call):
        return row.time_us
    samples = row.samples_of() if isinstance(row, Timed) else row.samples
    return samples.time_us if samples else ()


def name_of(row: Row) -> str:
    """A record's stage, library or ceiling."""
    return str(row.stage if hasattr(row, "stage") else row.name)


def median_us(row: Row) -> float:
    """Median burst time of a checked and timed record, microseconds; else NaN."""
    return (select.median_us(row) if isinstance(row, Timed) else None) or math.nan


class Records:
    """All records of one GPU on normal inputs."""

    def __init__(self, gpu: str, data: Path = DATA) -> None:
        self.gpu = gpu
        self.data = data
        self._others: dict[str, Records] = {}

    def of_gpu(self, gpu: str) -> Records:
        """The records of a GPU, this one or another, in the same folder."""
        return self if gpu == self.gpu else self._others.setdefault(gpu, Records(gpu, self.data))

    def rows(self, folder: str) -> list[Row]:
        """A folder's records, oldest first; a damaged line is left out, and `flashlab results --verify` names it."""
        records = (line.record for line in store.lines(self.gpu, folder, self.data))
        of = ((record, getattr(record, "problem", FIRST)) for record in records)  # a ceiling is of no problem
        return [record for record, problem in of if problem.inputs == NORMAL and not problem.features]

    def place(self, record: Row) -> str:
        """A record's file and line: `nvidia-h200/runs/….jsonl:12`."""
        lines = store.lines(self.gpu, store.FOLDERS[type(record)], self.data)
        line = next(line for line in lines if line.path.stem == record.run and line.record == record)
        return f"{line.path.relative_to(self.data).as_posix()}:{line.number}"

    @cached_property
    def measurements(self) -> list[Row]:
        """Stages, dead ends and libraries, oldest first, without rows of stages that write the log-sum-exp."""
        return [row for row in self.rows("runs") if isinstance(row, Measurement) and not row.with_lse]

    @cached_property
    def timed(self) -> list[Row]:
        """`measurements` with a passed verdict and a time."""
        return [row for row in self.measurements if row.status == "ok" and times_us(row)]

    def fastest(self, problem: Problem, condition: str = "") -> Row:
        """The fastest stage of the ladder that meets a condition."""
        rows = select.select([row for row in self.measurements if row.problem == problem], {}, select.LADDER)
        timed = (row for row in rows if row.status == "ok" and times_us(row))
        able = [row for row in timed if row.name in registry.RUNGS and CONDITIONS[condition](row)]
        if not able:
            raise PendingError(f"flashlab bench --shape {problem.shape}")
        return min(able, key=median_us)

    def named(self, entry: Entry, group: Sequence[str]) -> Starts:
        """What a group of an entry's names stands for, each start's of one run."""
        if any("[" in name for name in group):  # levels of an ablation, all else the stage's defaults
            levels = [
                _level(name, {**registry.get(name).parameters(FIRST.head_dim), **values})
                for name, values in map(split, group)
            ]
            at_first = (row for row in self.rows("ablations") if row.axis == entry.axis and row.problem == FIRST)
            rows = [row for row in at_first if row.status == "ok"]
            command = f"flashlab ablate {entry.axis}"
            return by_start(rows, lambda row: _level(row.stage, row.parameters), levels, command)
        if entry.quantity == "time_shares":  # a stage without each part of its work, the whole stage first
            (name,) = group
            rows = [row for row in self.rows("parts") if (row.stage, row.problem) == (name, entry.problem)]
            return by_start(rows, lambda row: row.left_out, tuple(ablation.PARTS), f"flashlab split {name}")
        if ceilings.CEILINGS.keys() >= set(group):
            limits = (row for row in self.rows("runs") if isinstance(row, Ceiling))
            return by_start(limits, lambda row: row.name, group, "flashlab bench --suite smoke")
        if entry.quantity == "call_time":
            calls = (row for row in self.rows("calls") if row.problem == entry.problem and row.waits)
            return by_start(calls, lambda row: row.name, group, "flashlab claims --measure")
        names = [
            self.fastest(entry.problem, name.partition(":")[2]).name if name.startswith(FASTEST) else name
            for name in group
        ]
        rows = [row for row in self.timed if row.problem == entry.problem]
        return by_start(rows, lambda row: row.name, names, _bench(entry.problem, names))


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


def by_start(rows: Iterable[Row], key: Callable[[Row], Any], wanted: Sequence[Any], command: str) -> Starts:
    """As `select.by_start`; a PendingError that names the command where no run has them all."""
    starts = select.by_start(rows, key, wanted)
    if not starts:
        raise PendingError(command)
    return starts


def newest(rows: Iterable[Row], names: Sequence[str], command: str) -> Sequence[Row]:
    """The last row of each name, of whatever run."""
    by_name = {name_of(row): row for row in rows}
    if not by_name.keys() >= set(names):
        raise PendingError(command)
    return [by_name[name] for name in names]


def _bench(problem: Problem, names: Sequence[str]) -> str:
    """The command that times the stages and libraries at a problem."""
    libraries = [name for name in names if name in peers.PEERS]
    stages = [name for name in names if name not in libraries]
    dtype = "" if problem.dtype == "float16" else f" --dtype {problem.dtype}"
    chosen = f"--stages {','.join(stages) or 'none'} --peers {','.join(libraries) or 'none'}"
    return f"flashlab bench --shape {problem.shape}{dtype} {chosen}"


# --- Findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The evidence for one claim; a quantity sets the first three fields, and `find` the others."""

    numbers: tuple[Estimate, ...]
    """One number per claimed number."""
    rows: Sequence[Row] = ()
    """Their records; none if they were computed or compiled."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Further values that an entry's text and note insert by name."""
    _: KW_ONLY
    text: str = ""
    """Description of what was measured or computed."""
    beside: str = ""
    """A note; may be empty."""
    stages: tuple[str, ...] = ()
    """Stages and dead ends that it is about."""


Evaluator = Callable[[Records, Entry], Finding]
QUANTITIES: dict[str, tuple[bool, str, Evaluator]] = {}
"""By name: whether it is a time, a rate or a ratio, which says something of its own GPU alone; what it is called where
an entry has no text; and its function."""


def _quantity(text: str = "", *, of_its_gpu: bool = True) -> Callable[[Evaluator], Evaluator]:
    """Register a function as the quantity of its name."""

    def register(evaluate: Evaluator) -> Evaluator:
        QUANTITIES[evaluate.__name__] = (of_its_gpu, text, evaluate)
        return evaluate

    return register


class _Text(string.Formatter):
    """Numbers with three significant digits, unless the text specifies a format."""

    def format_field(self, value: Any, format_spec: str) -> str:
        as_number = isinstance(value, float) and not format_spec
        return tables.number(value) if as_number else str(super().format_field(value, format_spec))


def find(records: Records, entry: Entry) -> Finding:
    """What the records say: an entry's numbers, and whatever stands beside it that is on record."""
    _, text, evaluate = QUANTITIES[entry.quantity]
    finding = evaluate(records, entry)
    stages = [
        name_of(finding.rows[index]) if operand.startswith(FASTEST) else split(operand)[0]
        for index, operand in enumerate(entry.operands)
    ]
    choices = [
        _choice(operand) if any("[" in member for member in group) else "" for group in entry.of for operand in group
    ]
    names = [f"`{name}`{f' with {choice}' if choice else ''}" for name, choice in zip(stages, choices, strict=True)]
    values = {
        "problem": entry.problem.label,
        "gpu": records.gpu,
        "slower": next(filter(None, (*choices, *names)), ""),
        "value": finding.numbers[0].value if finding.numbers else math.nan,
        "values": [number.value for number in finding.numbers],
        "times": [median_us(row) / entry.per for row in finding.rows],
        **entry.given,
        **finding.values,
    }
    beside = []
    for other in entry.beside:
        with suppress(PendingError):
            beside.append((other, find(records, other)))
    cited = {id(row): row for other, other_finding in beside if other.cited for row in other_finding.rows}
    theirs = [
        *(name for _, other_finding in beside for name in other_finding.stages),
        *(n for neighbour in entry.beside for n in neighbour.names),
    ]
    own = set(map(id, finding.rows))
    sentences = (
        _Text().format(entry.note, *names, **values),
        ", ".join(other_finding.text for _, other_finding in beside),
    )
    return replace(
        finding,
        rows=[*finding.rows, *(row for place, row in cited.items() if place not in own)],
        text=_Text().format(entry.text or text, *names, **values),
        beside="; ".join(filter(None, sentences)),
        stages=tuple(filter(is_stage, dict.fromkeys(entry.stages or stages or theirs))),
    )


def _choice(operand: str) -> str:
    return " ".join(f"{name}={value}" for name, value in split(operand)[1].items()) or "its defaults"


def _exact(*values: float) -> tuple[Estimate, ...]:
    return tuple(map(Estimate.exactly, values))


def _over(statistic: Statistic, starts: Starts) -> Estimate:
    return over_starts(statistic, [[times_us(row) for row in rows] for rows in starts])


def _rows(groups: Iterable[Starts]) -> list[Row]:
    """Those of the newest start of each group first."""
    return [row for starts in groups for rows in reversed(starts) for row in rows]


# --- Quantities -------------------------------------------------------------------------------------------------------


@_quantity(of_its_gpu=False)
def nothing(_: Records, __: Entry) -> Finding:
    """No number of ours: what is claimed is of no quantity that is measured here."""
    return Finding(())


@_quantity(of_its_gpu=False)
def arithmetic(_: Records, entry: Entry) -> Finding:
    """What `formulas` make of `given`, numbers of the document and constants; later ones may use `f0` and so on."""
    values = dict(entry.given)
    for index, formula in enumerate(entry.formulas):
        values[f"f{index}"] = calculated(formula, values)
    return Finding(_exact(*(values[f"f{index}"] for index in range(len(entry.formulas)))), (), values)


@_quantity("{0} at {problem}")
def rate(records: Records, entry: Entry) -> Finding:
    """TFLOP/s of each name."""
    finding, work = time(records, entry), entry.problem.flops / 1e6
    return replace(finding, numbers=tuple(number.inverse_of(work) for number in finding.numbers))


@_quantity("{0} at {problem}")
def time(records: Records, entry: Entry) -> Finding:
    """Microseconds per call of each name, divided by `per`."""
    groups = [records.named(entry, group) for group in entry.of]
    each = [[(row,) for row in of_name] for starts in groups for of_name in zip(*starts, strict=True)]
    return Finding(tuple(_over(median, starts).scaled(1 / entry.per) for starts in each), _rows(groups))


QUANTITIES["call_time"] = (True, "", time)
"""Microseconds of a single call by the host's clock, launch and wait included: `Records.named` takes other records."""


@_quantity("{1} over {slower} at {problem}")
def speedup(records: Records, entry: Entry) -> Finding:
    """Speed-up of the second of each pair over the first."""
    pairs = [records.named(entry, group) for group in entry.of]
    return Finding(tuple(_over(ratio_of_medians, starts) for starts in pairs), _rows(pairs))


@_quantity("{1} over {0}, of separate runs on the same start, at {problem}")
def speedup_across(records: Records, entry: Entry) -> Finding:
    """Speed-up of the second name over the first, not interleaved in one run but timed on the same starts."""
    stage, other = entry.operands
    command = f"flashlab ablate {entry.axis} && {_bench(entry.problem, (stage,))}"
    try:
        fast = records.named(entry, (other,))
    except PendingError as error:
        raise PendingError(command) from error
    slow = [[row] for row in records.timed if (row.name, row.problem) == (stage, entry.problem)]
    pairs = list({id(rows[1]): rows for rows in select.same_starts(slow, fast)}.values())
    if not pairs:
        raise PendingError(command)
    return Finding((_over(ratio_of_medians, pairs),), _rows([pairs]))


@_quantity()
def causal_speedup(records: Records, entry: Entry) -> Finding:
    """Ratio of a stage's non-causal time to its causal time."""
    problems = [Problem.parse(entry.shape, mask=mask) for mask in MASKS]
    ours = [row for row in records.timed if row.name in entry.operands and row.problem in problems]
    starts = by_start(ours, lambda row: row.problem, problems, _bench(entry.problem, entry.operands))
    return Finding((_over(ratio_of_medians, starts),), _rows([starts]))


@_quantity()
def time_shares(records: Records, entry: Entry) -> Finding:
    """Percent of a stage's time saved by leaving out each part of its work."""
    starts = records.named(entry, entry.operands)

    def share(whole_us: Any, without_us: Any, axis: int) -> Any:
        return 1 - ratio_of_medians(without_us, whole_us, axis=axis)

    whole, *parts = zip(*starts, strict=True)
    shares = [_over(share, list(zip(whole, part, strict=True))).scaled(100) for part in parts]
    return Finding(tuple(shares), _rows([starts]), {"parts": ", ".join([*ablation.PARTS][1:])})


@_quantity()
def spread(records: Records, entry: Entry) -> Finding:
    """The largest standard deviation of a row of the ladder over its mean, percent; the named stages must be in it."""
    rows = [row for row in records.measurements if row.name in registry.RUNGS and len(times_us(row)) > 1]
    if not {row.name for row in rows} >= set(entry.names):
        raise PendingError("flashlab bench --suite standard")
    percent, worst = max(((row.samples_of().cv_percent, row) for row in rows), key=lambda pair: float(pair[0]))
    values = {"rows": len(rows), "at": f"`{worst.name}` at {worst.problem.label}"}
    values |= {"middle": float(np.median([row.samples_of().cv_percent for row in rows]))}
    return Finding(_exact(percent), (worst,), values)


@_quantity()
def percent_of_peak(records: Records, entry: Entry) -> Finding:
    """A ceiling's rate, percent of the data sheet's; and which MMAs it is made of on sm_89."""
    row = records.named(entry, entry.operands)[-1][0]
    share = 100 * row.value / (_sheet(records.gpu).peak(row.name) or math.nan)
    defines: dict[str, int | str] = {"CHAINS": 1, "UNROLL": 1, "ELEMENT": "__half"}
    cubin = compiler.compile_file(KERNELS / "micro" / "tensor.cu", entry="micro_tensor", arch="sm_89", defines=defines)
    opcodes = {
        instruction.opcode
        for instruction in sass.disassemble(cubin.code, cubin.entry)
        if sass.classify(instruction) == "tensor"
    }
    return Finding(_exact(share), (row,), {"tflops": row.value, "opcodes": ", ".join(sorted(opcodes))})


def _sheet(gpu: str) -> roofline.Datasheet:
    if gpu not in roofline.DATASHEETS:
        raise PendingError(f"a data sheet of {gpu} in query/datasheets.toml")
    return roofline.DATASHEETS[gpu]


def _profiles(records: Records, problem: Problem, names: Sequence[str], *fields: str) -> Sequence[Row]:
    """The newest profile of each stage with the given fields."""
    at_problem = (row for row in records.rows("profiles") if row.problem == problem)
    rows = [row for row in at_problem if all(getattr(row, field) for field in fields)]
    return newest(rows, names, f"flashlab profile {names[0]}")


@_quantity()
def sectors_per_request(records: Records, entry: Entry) -> Finding:
    """Sectors per global load request of each stage."""
    rows = _profiles(records, entry.problem, entry.operands, "load_sectors")
    return Finding(_exact(*(row.load_sectors for row in rows)), rows)


@_quantity()
def utilization(records: Records, entry: Entry) -> Finding:
    """Percent of the tensor cores' and of device memory's peak in the profile of the fastest stage."""
    name = records.fastest(entry.problem).name
    (row,) = _profiles(records, entry.problem, (name,), "tensor_percent", "dram_bytes", "time_us")
    tb_s = row.dram_bytes / row.metrics["gpu__time_duration.sum"] / 1e3
    shares = _exact(row.tensor_percent, 100 * tb_s / _sheet(records.gpu).memory_tb_s)
    return Finding(shares, (row,), {"tb_s": tb_s})


@_quantity(of_its_gpu=False)
def absolute_error(records: Records, entry: Entry) -> Finding:
    """The largest error of the newest checked result, passed or not."""
    rows = _judged(records, entry.problem)
    (row,) = newest(rows, entry.operands, _bench(entry.problem, entry.operands))
    return Finding(_exact(row.verdict.overall_max_error), (row,))


def _judged(records: Records, problem: Problem) -> list[Row]:
    """Results checked against the oracle at a problem, passed or not, with the largest error over all compared rows."""
    compared = (row for row in records.measurements if row.problem == problem and row.verdict)
    return [row for row in compared if row.verdict.overall_max_error is not None]


@_quantity(of_its_gpu=False)
def largest_error(records: Records, entry: Entry) -> Finding:
    """The largest error of any stage of the ladder at the problem, and the largest of the library in `of` added to it.

    Each is an error against float64, so that their sum bounds the difference between the two.
    """
    errors = [(row.verdict.overall_max_error, row) for row in _judged(records, entry.problem) if row.status == "ok"]
    ours = [pair for pair in errors if pair[1].name in registry.RUNGS]
    theirs = [pair for pair in errors if pair[1].name in entry.names]
    if not ours or not theirs:
        raise PendingError(_bench(entry.problem, (*registry.STAGES, *entry.names)))
    (error, worst), (of_library, library) = (max(pairs, key=lambda pair: float(pair[0])) for pairs in (ours, theirs))
    values = {"results": len(ours), "worst": f"`{worst.name}`", "error": error, "of_library": of_library}
    return Finding(_exact(error + of_library), (worst, library), values)


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
    """Counts of a stage's machine code; branches are conditional jumps in the kernel's own code."""
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


@_quantity(of_its_gpu=False)
def machine_code(_: Records, entry: Entry) -> Finding:
    """Some counts of a stage."""
    (operand,) = entry.operands
    counts = _counts(_built(operand, arch=entry.arch))
    source = f"`{registry.get(split(operand)[0]).source.name}` for {entry.arch}"
    return Finding(_exact(*(counts[name] for name in entry.counts)), (), {"source": source, **counts})
