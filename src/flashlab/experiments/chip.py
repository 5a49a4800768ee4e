"""Per-SM throughput and latencies of a Hopper GPU: micro-benchmarks that read the SM's own clock, and their records.

A case (chip.toml) is one kernel of kernels/chip with its macros. It runs in one block on one SM, several times, then in
one block on every SM at once; each warp reports the clock before and after and how often it went round its loop, so
that neither launches nor the clock's frequency take part. A reading is the median of the launches.

    data/<gpu>/chip/<run>.jsonl     one line a case; never rewritten

What is read is only worth something if the kernel holds the instructions that it is named after: every case says which
and how many, and they are counted in the machine code before it runs.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from flashlab.build import sass
from flashlab.build.compiler import Cubin, compile_file
from flashlab.build.parallel import on_all_cores
from flashlab.core.arithmetic import calculated
from flashlab.core.errors import CompileError, ParameterError, UnsupportedError
from flashlab.core.paths import DATA, KERNELS, table
from flashlab.measure import bench
from flashlab.measure.harness import Book, greeting
from flashlab.measure.options import OPTIONS, Options
from flashlab.measure.timer import MicroParams
from flashlab.record import store
from flashlab.record.schema import ChipReading
from flashlab.run import gpu

CHIP = KERNELS / "chip"
ARCH = "sm_90a"
"""These kernels are made of wgmma and bulk copies."""
LAUNCHES = 5
"""On one SM, and as many on all."""

_WORDS = 3
"""Words that every warp reports before its stamps: clock before, clock after, times round the loop."""
_INPUT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its macros, and what to make of the clocks it reports."""

    name: str
    group: str
    """As `ChipReading` has it, and the unit."""
    kernel: str
    """File of kernels/chip, without its suffix."""
    threads: int
    unit: str
    how: str
    """What it does, for people."""
    per_pass: float = 1.0
    """Operations, FLOPs or scores of one warp each time it goes round its loop; steps of a latency."""
    repeats: int
    opcodes: Mapping[str, int] = field(default_factory=dict)
    """Machine instructions that the kernel must hold, by the beginning of the opcode: exactly so many where
    positive, at least as many where negative, any number where 0."""
    defines: Mapping[str, int] = field(default_factory=dict)
    smem_bytes: int = 0
    """So much where it is asked for that a second block does not fit beside it."""
    count: int = 0
    """`MicroParams.count`, whose meaning is the kernel's."""
    first_warps: int | None = None
    """How many of the block's warps the reading is about; the others are `beside`. None for all."""
    beside_per_pass: float = 0.0
    """As `per_pass`, of the other warps."""
    stamps: int = 0

    @property
    def source(self) -> Path:
        """Its CUDA C++ file."""
        return CHIP / f"{self.kernel}.cu"

    @property
    def entry(self) -> str:
        """The kernel's name in the machine code."""
        return f"chip_{self.kernel}"

    @property
    def macros(self) -> dict[str, int]:
        """All of its macros."""
        macros = {"THREADS": self.threads, **self.defines}
        if self.smem_bytes:
            macros["SMEM_BYTES"] = self.smem_bytes
        if self.stamps:
            macros["STAMPS"] = self.stamps
        return macros


# --- The cases --------------------------------------------------------------------------------------------------------


def _cases(family: dict[str, Any], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Case]:
    """The cases of a family of chip.toml."""
    axes, skip, numbers = family.pop("axes"), family.pop("skip", 0), family.pop("numbers", {})
    each = [
        [row if isinstance(row, Mapping) else {name: row} for row in (rows[axis] if isinstance(axis, str) else axis)]
        for name, axis in axes.items()
    ]
    for combination in product(*each):
        values = {name: value for row in combination for name, value in row.items()} | numbers
        values["by"] = f"{values.get('groups')} warpgroup{'s' * (values.get('groups') != 1)}"

        def text(template: str, values: Mapping[str, Any] = values) -> str:
            return template.format_map(values).format_map(values)  # a row's text may be a template

        def number(formula: str | int, values: Mapping[str, Any] = values) -> Any:
            return calculated(str(formula).format_map(values), values)

        if number(skip):
            continue
        fields: dict[str, Any] = {
            name: text(value) if name in _TEXTS else number(value)
            for name, value in family.items()
            if not isinstance(value, dict)
        }
        fields |= {name: {text(key): number(of) for key, of in family[name].items()} for name in ("defines", "opcodes")}
        fields["opcodes"].pop("", None)
        fields["first_warps"] = fields.get("first_warps") or None
        yield Case(**{**fields, "name": fields["name"].lower()})


_TEXTS = ("name", "group", "kernel", "unit", "how")
_FAMILIES = table(__file__)
CASES: Mapping[str, Case] = {
    case.name: case for family in _FAMILIES["family"] for case in _cases(family, _FAMILIES["rows"])
}
"""Every case, by name, in the order in which they run."""


def choose(names: Sequence[str] | None) -> tuple[Case, ...]:
    """The cases of those names or groups; all where None.

    Raises:
        ParameterError: no case or group of that name.
    """
    if names is None:
        return tuple(CASES.values())
    groups = {case.group for case in CASES.values()}
    for name in names:
        if name not in CASES and name not in groups:
            raise ParameterError(
                f"case: wanted one of the groups {', '.join(sorted(groups))}, or a case's name, got {name!r}"
            )
    return tuple(case for case in CASES.values() if case.name in names or case.group in names)


# --- Machine code -----------------------------------------------------------------------------------------------------


def compile_case(case: Case) -> Cubin:
    """Its machine code.

    Raises:
        As `compiler.compile_file`: CompileError where it does not fit into the registers.
    """
    return compile_file(case.source, entry=case.entry, arch=ARCH, defines=case.macros)


def count_opcodes(case: Case, cubin: Cubin) -> dict[str, int]:
    """How many instructions begin with each of the case's opcodes.

    Raises:
        CompileError: others than the case must have: the compiler left out, or doubled, what was to be measured.
    """
    counted = Counter(
        prefix
        for instruction in sass.disassemble(cubin.code, case.entry)
        for prefix in case.opcodes
        if instruction.opcode.startswith(prefix)
    )
    for prefix, wanted in case.opcodes.items():
        got = counted[prefix]
        if got < -wanted or (wanted > 0 and got != wanted):
            raise CompileError(
                f"{case.name}: wanted {'at least ' if wanted < 0 else ''}{abs(wanted)} instructions {prefix}, got "
                f"{got}: what was to be measured is not what was compiled",
                command="",
                log=cubin.log,
                source_line=None,
            )
    return {prefix: counted[prefix] for prefix in case.opcodes}


# --- From clocks to readings ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block's warps reported."""

    value: float
    beside: float | None
    stamps: tuple[float, ...]


def block_of(case: Case, words: Sequence[int]) -> Block:
    """Make a block's words into values: WORDS integers a warp, as kernels/chip/chip.cuh lays them.

    Raises:
        ParameterError: a warp that went nowhere, or in no time: the words are not a run's.
    """
    width = _WORDS + case.stamps
    warps = [tuple(words[at : at + width]) for at in range(0, len(words), width)]
    if len(warps) != case.threads // 32 or any(w[1] <= w[0] or w[2] <= 0 for w in warps):
        raise ParameterError(f"{case.name}: wanted clocks of {case.threads // 32} warps, got {warps[:4]} …")
    first = warps if case.first_warps is None else warps[: case.first_warps]
    others = [] if case.first_warps is None else warps[case.first_warps :]
    stamps = tuple(float(median(w[_WORDS + i] for w in first)) for i in range(case.stamps))
    clocks = max(w[1] for w in first) - min(w[0] for w in first)
    amount = sum(w[2] for w in first) * case.per_pass
    if case.group == "issue":
        value = stamps[-1]
    elif case.unit == "clk":
        value = clocks / (first[0][2] * case.per_pass)
    elif case.unit == "clk/score":
        value = clocks / amount
    else:
        value = amount / clocks
    # The other warps go on for a moment after the first have ended, so that each has clocks of its own.
    beside = sum(w[2] * case.beside_per_pass / (w[1] - w[0]) for w in others) if case.beside_per_pass else None
    return Block(value=value, beside=beside, stamps=stamps)


def measure(
    names: Sequence[str] | None = None,
    *,
    launches: int = LAUNCHES,
    options: Options = OPTIONS,
) -> Path | None:
    """Run cases and append a record of each to a new file of data/<gpu>/chip.

    Args:
        names: cases or groups; all where None.
        launches: on one SM, and as many on all.

    Returns:
        The file; None where the options say `resume`, and all are on record with the same machine code.

    Raises:
        ParameterError: no such case.
        NoGpuError, UnsupportedError: no Hopper GPU.
        CompileError: a case's machine code is not what it must be.
        LaunchError, OutputError, MissingPackageError: as they say.
    """
    chosen = choose(names)
    info = gpu.info(options.device)
    if info.arch != ARCH:
        raise UnsupportedError(f"wanted a GPU that runs {ARCH}, which has wgmma, got {info.arch}")

    def build(case: Case) -> tuple[Case, Cubin, dict[str, int]]:
        cubin = compile_case(case)
        return case, cubin, count_opcodes(case, cubin)

    compiled = on_all_cores(build, chosen)
    if options.resume:
        done = {(reading.name, reading.sha256) for reading in bench.on_record(ChipReading, options)}
        compiled = [built for built in compiled if (built[0].name, built[1].sha256) not in done]
        if not compiled:
            return None
    widest = max(case.threads // 32 * (_WORDS + case.stamps) for case in chosen)
    out, numbers = (gpu.Zeroed(options.device, size) for size in (8 * widest * info.sm_count, _INPUT_BYTES))

    def launched(case: Case, function: gpu.Function, blocks: int) -> list[Block]:
        """What each block of one launch says."""
        size = case.threads // 32 * (_WORDS + case.stamps)
        gpu.call("cuMemsetD8", out.pointer, 0, out.size_bytes)
        gpu.Launch(
            function,
            grid=(blocks, 1, 1),
            block=(case.threads, 1, 1),
            smem_bytes=case.smem_bytes,
            params=(MicroParams(out.pointer, numbers.pointer, case.count, case.repeats),),
            stream=0,
        )()
        gpu.call("cuCtxSynchronize")
        host = (ctypes.c_longlong * (size * blocks))()
        gpu.call("cuMemcpyDtoH", ctypes.addressof(host), out.pointer, ctypes.sizeof(host))
        return [block_of(case, host[at : at + size]) for at in range(0, size * blocks, size)]

    with Book(options.data, "chip") as book, gpu.context(options.device):
        book.hello(greeting(info))
        for done_cases, (case, cubin, opcodes) in enumerate(compiled):
            options.progress(done_cases, len(compiled), case.name)
            function = gpu.load(cubin, options.device, smem_bytes=case.smem_bytes)
            launched(case, function, 1)  # the first launch loads it, and finds the instructions in no cache
            alone = [launched(case, function, 1)[0] for _ in range(launches)]
            together = [
                median(block.value for block in launched(case, function, info.sm_count)) for _ in range(launches)
            ]
            reading = ChipReading(
                **book.header(),
                **{name: getattr(case, name) for name in ("name", "group", "unit", "how", "kernel", "repeats")},
                defines=case.macros,
                sha256=cubin.sha256,
                registers=cubin.resources.registers,
                opcodes=opcodes,
                value=median(block.value for block in alone),
                one_sm=tuple(block.value for block in alone),
                all_sms=tuple(together),
                beside=tuple(block.beside for block in alone if block.beside is not None),
                stamps=alone[-1].stamps,
            )
            store.append(book.path, reading)
        return book.path


def newest(gpu_slug: str, data: Path = DATA) -> dict[str, ChipReading]:
    """The newest reading of each case on a GPU; may be empty."""
    return {reading.name: reading for reading in store.records(gpu_slug, ChipReading, data)}
