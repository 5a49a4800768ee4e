"""What one SM of a Hopper GPU does in a clock: micro-benchmarks that read the SM's own clock, and their records.

A case is one kernel of kernels/chip with its macros. It runs in one block on one SM, several times, then in one block
on every SM at once; each warp reports the clock before and after and how often it went round its loop, so that neither
launches nor the clock's frequency take part. A reading is the median of the launches.

    data/<gpu>/chip/<run>.jsonl     one line a case; never rewritten

What is read is only worth something if the kernel holds the instructions that it is named after: every case says which
and how many, and they are counted in the machine code before it runs.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from flashlab.build import sass
from flashlab.build.parallel import on_all_cores
from flashlab.core.errors import CompileError, NoDataError, ParameterError, UnsupportedError
from flashlab.core.paths import DATA, KERNELS
from flashlab.measure import bench
from flashlab.measure.harness import Book, Progress, greeting
from flashlab.measure.options import Options
from flashlab.measure.timer import CudaBackend, MicroParams
from flashlab.record import store
from flashlab.record.schema import ChipReading
from flashlab.run import gpu

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin

CHIP = KERNELS / "chip"
ARCH = "sm_90a"
"""These kernels are made of wgmma and bulk copies."""
LAUNCHES = 5
"""On one SM, and as many on all."""

Group = Literal["unit", "latency", "wgmma", "issue", "softmax", "overlap", "loop"]
Unit = Literal["ops/clk/SM", "FLOP/clk/SM", "clk", "clk/score"]

_WORDS = 3
"""Words that every warp reports before its stamps: clock before, clock after, times round the loop."""
_ROWS = 64
_STEPS = 8
_SMEM_BYTES = 200 * 1024
"""So much that a second block does not fit beside it."""
_INPUT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its macros, and what to make of the clocks it reports."""

    name: str
    group: Group
    kernel: str
    """File of kernels/chip, without its suffix."""
    threads: int
    unit: Unit
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

_CHAINS, _UNROLL = 8, 16
_UNITS: Mapping[str, tuple[int, str]] = {
    # macro OP, beginning of the opcode
    "ex2": (0, "MUFU.EX2"),
    "ffma": (1, "FFMA"),
    "fadd": (2, "FADD"),
    "fmul": (3, "FMUL"),
    "fmnmx": (4, "FMNMX"),
    "pack": (5, "F2FP.F16"),
    "hfma2": (6, "HFMA2"),
    "shuffle": (7, "SHFL"),
    "hmnmx2": (9, "HMNMX2"),
    "imad": (10, "IMAD"),
    "shf": (11, "SHF"),
}


def _units() -> Iterator[Case]:
    chains = Case(name="", group="unit", kernel="unit", threads=0, unit="ops/clk/SM", how="", repeats=40)
    per_pass = _CHAINS * _UNROLL
    for name, (op, opcode) in _UNITS.items():
        for warps in (4, 8, 16):
            yield replace(
                chains,
                name=f"{name}_{warps}_warps",
                threads=32 * warps,
                how=f"independent chains of one instruction, {warps} warps",
                per_pass=32.0 * per_pass,
                defines={"OP": op, "CHAINS": _CHAINS, "UNROLL": _UNROLL},
                # Starting the chains takes some FADD and HFMA2 (which moves constants).
                opcodes={opcode: -per_pass},
            )
        yield replace(
            chains,
            name=f"{name}_latency",
            group="latency",
            threads=32,
            unit="clk",
            how="one warp, one chain: from an instruction to the next that needs its result",
            per_pass=4.0 * _UNROLL,
            defines={"OP": op, "CHAINS": 1, "UNROLL": 4 * _UNROLL},
            opcodes={opcode: -4 * _UNROLL},
        )
    for warps in (4, 8, 16):
        yield replace(
            chains,
            name=f"ex2_polynomial_{warps}_warps",
            threads=32 * warps,
            how=f"2^x by a polynomial of degree 3, independent chains, {warps} warps",
            per_pass=32.0 * per_pass,
            repeats=10,
            defines={"OP": 8, "CHAINS": _CHAINS, "UNROLL": _UNROLL},
            opcodes={"FFMA": 3 * per_pass, "LEA": -per_pass},
        )


def _latencies() -> Iterator[Case]:
    steps = (
        # name, macro WHAT, threads, steps a pass, bytes, opcode, how
        ("mbarrier_arrive_wait", 0, 32, 1, 0, "SYNCS", "a thread arrives at an mbarrier of one and waits for it"),
        ("mbarrier_try_wait", 1, 32, 1, 0, "SYNCS", "a thread asks for a phase that is long complete"),
        ("mbarrier_handover", 2, 64, 2, 0, "SYNCS", "two warps take turns by two mbarriers: from one to the other"),
        ("bar_sync_1_warpgroup", 3, 128, 1, 0, "BAR", "a warpgroup at a named barrier, again and again"),
        ("bar_sync_2_warpgroups", 3, 256, 1, 0, "BAR", "two warpgroups at a named barrier, again and again"),
        ("bar_sync_3_warpgroups", 3, 384, 1, 0, "BAR", "three warpgroups at a named barrier, again and again"),
        ("named_barrier_handover", 4, 256, 2, 0, "BAR", "two warpgroups take turns by bar.sync and bar.arrive"),
        ("bulk_copy_1_kib", 5, 32, 1, 1 << 10, "UBLKCP", "1 KiB from L2 by the copy engine, issue to arrival"),
        ("bulk_copy_8_kib", 5, 32, 1, 1 << 13, "UBLKCP", "8 KiB from L2 by the copy engine, issue to arrival"),
        ("bulk_copy_16_kib", 5, 32, 1, 1 << 14, "UBLKCP", "16 KiB from L2 by the copy engine, issue to arrival"),
        ("bulk_copy_32_kib", 5, 32, 1, 1 << 15, "UBLKCP", "32 KiB from L2 by the copy engine, issue to arrival"),
        ("shared_load_latency", 6, 32, 1, 0, "LDS", "a load from shared memory whose address the one before it loaded"),
    )
    for name, what, threads, per_pass, size, opcode, how in steps:
        yield Case(
            name=name,
            group="latency",
            kernel="latency",
            threads=threads,
            unit="clk",
            how=how,
            per_pass=float(per_pass),
            repeats=200,
            defines={"WHAT": what},
            smem_bytes=_SMEM_BYTES if size else 0,
            count=size,
            opcodes={opcode: -1},
        )


def _warpgroups(number: int) -> str:
    return f"{number} warpgroup{'s' if number > 1 else ''}"


def _flops(width: int, steps: int) -> float:
    """Of one warp: a quarter of what its warpgroup does."""
    return 2.0 * _ROWS * width * 16 * steps / 4


def _where(registers: int) -> str:
    return "registers" if registers else "shared memory"


def _products() -> Iterator[Case]:
    for groups, width, registers, in_flight, transposed in product(
        (1, 2, 3), (64, 128, 192, 256), (0, 1), (0, 1), (0, 1)
    ):
        if groups == 3 and width == 256 and registers:
            continue  # does not fit into 168 registers a thread
        if transposed and (width > 128 or in_flight == 0):
            continue
        order = "B as V lies (MN-major)" if transposed else "B as K lies (K-major)"
        yield Case(
            name=f"wgmma_n{width}_{groups}wg_{'rs' if registers else 'ss'}"
            f"{'_v' if transposed else ''}{'' if in_flight else '_drained'}",
            group="wgmma",
            kernel="wgmma_rate",
            threads=128 * groups,
            unit="FLOP/clk/SM",
            how=f"m64n{width}k16, {_warpgroups(groups)}, A in {_where(registers)}, {order}, "
            + ("a group of 8 under way while the next is issued" if in_flight else "waited for by 8"),
            per_pass=_flops(width, _STEPS),
            repeats=30,
            defines={
                "WIDTH": width,
                "A_IN_REGISTERS": registers,
                "B_TRANSPOSED": transposed,
                "IN_FLIGHT": in_flight,
                "STEPS": _STEPS,
            },
            smem_bytes=_SMEM_BYTES,
            opcodes={"HGMMA": _STEPS},
        )


def _issues() -> Iterator[Case]:
    many = [(16, *macros) for macros in product((64, 128, 192), (0, 1), (0, 1))]
    for groups, (issues, width, registers, each) in product((1, 2), [*many, *((few, 64, 1, 0) for few in (1, 4, 8))]):
        operand = "rs" if registers else "ss"
        if issues == 16:
            name = f"issue_n{width}_{groups}wg_{operand}{'_each' if each else ''}"
            how = f"issued in a row by {_warpgroups(groups)}, A in {_where(registers)}"
        else:
            name = f"issue_{issues}_n{width}_{groups}wg_{operand}"
            how = f"issued in a row, A in {_where(registers)}"
        yield Case(
            name=name,
            group="issue",
            kernel="wgmma_issue",
            threads=128 * groups,
            unit="clk",
            how=f"{issues} products m64n{width}k16 {how}: the clock {'after each' if each else 'after the last'}, "
            "and after the wait",
            repeats=4,
            defines={"WIDTH": width, "A_IN_REGISTERS": registers, "EACH": each},
            smem_bytes=_SMEM_BYTES,
            opcodes={"HGMMA": issues},
            stamps=issues + 1,
        )


_MIXES: Mapping[str, tuple[int, int, int]] = {
    # maxima, sums, every how manieth exponential is a polynomial
    "softmax": (1, 1, 0),
    "softmax_without_max": (0, 1, 0),
    "softmax_without_sum": (1, 0, 0),
    "softmax_without_max_and_sum": (0, 0, 0),
    "softmax_polynomial_4": (1, 1, 4),
    "softmax_polynomial_8": (1, 1, 8),
    "softmax_without_sum_polynomial_4": (1, 0, 4),
    "softmax_without_max_and_sum_polynomial_4": (0, 0, 4),
}
_HELD = 32


def _mixes() -> Iterator[Case]:
    for (name, (take_max, take_sum, every)), warps in product(_MIXES.items(), (4, 8, 12, 16)):
        yield Case(
            name=f"{name}_{warps // 4}_warps",
            group="softmax",
            kernel="mix",
            threads=32 * warps,
            unit="clk/score",
            how=f"softmax of scores in registers, {warps // 4} warps a scheduler: scale and subtract, exponential, "
            "half a pack"
            + (", maximum" if take_max else "")
            + (", sum" if take_sum else "")
            + (f"; every {every}th exponential a polynomial" if every else ""),
            per_pass=32.0 * _HELD,
            repeats=60,
            defines={
                "HELD": _HELD,
                "TAKE_MAX": take_max,
                "TAKE_SUM": take_sum,
                "POLYNOMIAL_EVERY": every,
                "SHUFFLES": 0,
            },
            opcodes={
                "MUFU.EX2": _HELD - (_HELD // every if every else 0),
                "F2FP.F16": _HELD // 2,
                "FMNMX": -_HELD * take_max,
                "FADD": -_HELD * take_sum,
            },
        )


_OPS: Mapping[str, tuple[int, str, float]] = {
    # macro OP, beginning of the opcode, operations of a thread a pass
    "nothing": (13, "HGMMA", 0.0),
    **{name: (op, opcode, _CHAINS * _UNROLL) for name, (op, opcode) in _UNITS.items() if name != "fmul"},
    "softmax": (12, "MUFU.EX2", _HELD),
    "softmax_without_max": (12, "MUFU.EX2", _HELD),
}


def _overlaps() -> Iterator[Case]:
    for (name, (op, opcode, amount)), tensor, scalar, width, registers in product(
        _OPS.items(), (0, 1, 2), (1, 2), (64, 128), (0, 1)
    ):
        if name == "nothing" and (tensor == 0 or scalar > 1):
            continue
        if tensor == 0 and (width, registers) != (64, 1):
            continue
        beside = name.replace("_", " ")
        alone = Case(
            name=f"{name}_{scalar}wg_alone",
            group="overlap",
            kernel="overlap",
            threads=128 * (tensor + scalar),
            unit="ops/clk/SM",
            how=f"{beside} by {_warpgroups(scalar)}, nothing beside it",
            per_pass=32.0 * amount,
            repeats=60,
            count=1 << 40,
            defines={
                "OP": op,
                "TENSOR_GROUPS": tensor,
                "WIDTH": width,
                "A_IN_REGISTERS": registers,
                "TAKE_MAX": int(name == "softmax"),
            },
            smem_bytes=_SMEM_BYTES,
            opcodes={opcode: -int(amount)},
        )
        if tensor == 0:
            yield alone
            continue
        wgmma = f"m64n{width}k16 by {_warpgroups(tensor)}, A in {_where(registers)}"
        yield replace(
            alone,
            name=f"wgmma_n{width}_{tensor}wg_{'rs' if registers else 'ss'}_beside_{name}_{scalar}wg",
            unit="FLOP/clk/SM",
            how=f"{wgmma}; beside it {beside} by {scalar}",
            per_pass=_flops(width, 8),
            first_warps=4 * tensor,
            beside_per_pass=32.0 * amount,
            opcodes={**alone.opcodes, "HGMMA": 8},
        )


_ORDERS: Mapping[str, int] = {"serial": 0, "across": 1, "subtiles": 2, "halves": 3}
_LOOPS: Sequence[tuple[str, int, int, int]] = (
    # order, warpgroups, keys per tile, head dim: as far as 65,536 registers go
    *(("serial", groups, keys, 64) for groups in (1, 2, 3) for keys in (64, 128, 192)),
    *(("across", groups, keys, 64) for groups in (1, 2, 3) for keys in (64, 128)),
    ("across", 2, 192, 64),
    *((order, groups, 64, 64) for order in ("subtiles", "halves") for groups in (1, 2)),
    ("subtiles", 2, 32, 64),
    ("halves", 2, 32, 64),
    ("halves", 3, 32, 64),
    *(("serial", groups, keys, 128) for groups in (1, 2) for keys in (64, 128)),
    *(("across", groups, keys, 128) for groups in (1, 2) for keys in (64, 128)),
    ("across", 3, 64, 128),
)
_LOOP_MIXES: Mapping[str, tuple[int, int, int, int]] = {
    # maxima, sums (2: by the tensor cores), every how manieth exponential is a polynomial, the output rescaled
    "softmax": (1, 1, 0, 0),
    "rescaled": (1, 1, 0, 1),
    "without_max": (0, 1, 0, 0),
    "without_sum": (1, 0, 0, 0),
    "sum_by_product": (1, 2, 0, 0),
    "without_max_sum_by_product": (0, 2, 0, 0),
    "polynomial_4": (1, 1, 4, 0),
}
_LOOPS_OF_ALL_MIXES = (
    ("serial", 3, 128, 64),
    ("across", 2, 128, 64),
    ("across", 3, 128, 64),
    ("subtiles", 2, 64, 64),
    ("halves", 2, 64, 64),
    ("across", 2, 128, 128),
)


_DETAILS: Mapping[str, int] = {"in_turns": 1, "asks": 2, "votes": 4, "in_turns_asks_votes": 7}
_LOOPS_OF_ALL_DETAILS = (("across", 3, 128, 64), ("across", 2, 128, 128))


def _loops() -> Iterator[Case]:
    for loop in _LOOPS:
        order, *_ = loop
        for anchored in (0, 1) if order != "serial" else (0,):
            for mix in _LOOP_MIXES if loop in _LOOPS_OF_ALL_MIXES else ("softmax",):
                if order == "halves" and anchored and _LOOP_MIXES[mix][1] == 2:
                    continue  # does not fit into the registers
                yield _loop(loop, anchored, mix)
    for loop in _LOOPS_OF_ALL_DETAILS:
        for detail in _DETAILS:
            yield _loop(loop, 1, "without_max", detail)


def _loop(loop: tuple[str, int, int, int], anchored: int, mix: str, detail: str = "") -> Case:
    order, groups, keys, head_dim = loop
    tiles = 2 if order in ("subtiles", "halves") else 1
    take_max, take_sum, every, rescale = _LOOP_MIXES[mix]
    extra = [part for part in ("" if mix == "softmax" else mix, detail) if part]
    return Case(
        name="_".join(
            ["loop", order, *(["anchored"] if anchored else []), f"d{head_dim}", f"{groups}wg", f"n{keys}", *extra]
        ),
        group="loop",
        kernel="attention_loop",
        threads=128 * groups,
        unit="clk/score",
        how=f"products and softmax alone, order {order.upper()}"
        + (" forced upon the compiler" if anchored else "")
        + f", {_warpgroups(groups)}, tiles of {keys} keys, D={head_dim}"
        + "".join(f", {part.replace('_', ' ')}" for part in extra),
        per_pass=float(_ROWS * keys * tiles) / 4,
        repeats=40,
        defines={
            "ORDER": _ORDERS[order],
            "KEYS": keys,
            "HEAD_DIM": head_dim,
            "TAKE_MAX": take_max,
            "TAKE_SUM": take_sum,
            "POLYNOMIAL_EVERY": every,
            "RESCALE": rescale,
            "ANCHORED": anchored,
            "DETAILS": _DETAILS[detail] if detail else 0,
        },
        smem_bytes=_SMEM_BYTES,
        opcodes={
            "HGMMA": tiles * (head_dim // 16 + keys // 16),
            "MUFU.EX2": tiles * (keys // 2 - (keys // 2 // every if every else 0)),
        },
    )


CASES: Mapping[str, Case] = {
    case.name: case for case in (*_units(), *_latencies(), *_products(), *_issues(), *_mixes(), *_overlaps(), *_loops())
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
    from flashlab.build.compiler import compile_file

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


class _Runner:
    """Launches cases on one GPU."""

    def __init__(self, device: int) -> None:
        self.info = gpu.info(device)
        if self.info.arch != ARCH:
            raise UnsupportedError(f"wanted a GPU that runs {ARCH}, which has wgmma, got {self.info.arch}")
        self.device = device
        self._backend = CudaBackend(device)  # makes the context current
        longest = max(case.threads // 32 * (_WORDS + case.stamps) for case in CASES.values())
        self._out = gpu.Zeroed(device, 8 * longest * self.info.sm_count)
        self._in = gpu.Zeroed(device, _INPUT_BYTES)

    def words(self, case: Case, function: gpu.Function, blocks: int) -> list[list[int]]:
        """One launch; the words of each block."""
        size = case.threads // 32 * (_WORDS + case.stamps)
        launch = gpu.Launch(
            function,
            grid=(blocks, 1, 1),
            block=(case.threads, 1, 1),
            smem_bytes=case.smem_bytes,
            params=(MicroParams(self._out.pointer, self._in.pointer, case.count, case.repeats),),
            stream=0,
        )
        gpu.call("cuMemsetD8", self._out.pointer, 0, self._out.size_bytes)
        launch()
        gpu.call("cuCtxSynchronize")
        host = (ctypes.c_longlong * (size * blocks))()
        gpu.call("cuMemcpyDtoH", ctypes.addressof(host), self._out.pointer, ctypes.sizeof(host))
        return [list(host[at : at + size]) for at in range(0, size * blocks, size)]


def measure(
    names: Sequence[str] | None = None,
    *,
    launches: int = LAUNCHES,
    options: Options | None = None,
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
    options, chosen = options or Options(), choose(names)
    runner = _Runner(options.device)
    info = runner.info

    def build(case: Case) -> tuple[Case, Cubin, dict[str, int]]:
        cubin = compile_case(case)
        return case, cubin, count_opcodes(case, cubin)

    compiled = on_all_cores(build, chosen)
    if options.resume:
        known = store.records(info.slug, ChipReading, options.data)
        done = {(one.name, one.sha256) for one in known if bench.stands_for(one, info)}
        compiled = [one for one in compiled if (one[0].name, one[1].sha256) not in done]
        if not compiled:
            return None
    with Book(options.data, "chip") as book:
        book.hello(greeting(info))
        for done_cases, (case, cubin, opcodes) in enumerate(compiled):
            options.progress(Progress(done_cases, len(compiled), case.name))
            function = gpu.load(cubin, options.device, smem_bytes=case.smem_bytes)
            runner.words(case, function, 1)  # the first launch loads it, and finds the instructions in no cache
            alone = [block_of(case, runner.words(case, function, 1)[0]) for _ in range(launches)]
            together = [
                median(block_of(case, words).value for words in runner.words(case, function, info.sm_count))
                for _ in range(launches)
            ]
            reading = ChipReading(
                **book.header(),
                name=case.name,
                group=case.group,
                unit=case.unit,
                value=median(block.value for block in alone),
                one_sm=tuple(block.value for block in alone),
                all_sms=tuple(together),
                beside=tuple(block.beside for block in alone if block.beside is not None),
                stamps=alone[-1].stamps,
                how=case.how,
                kernel=case.kernel,
                defines=case.macros,
                repeats=case.repeats,
                sha256=cubin.sha256,
                registers=cubin.resources.registers,
                opcodes=opcodes,
            )
            store.append(book.path, reading)
        return book.path


def newest(gpu_slug: str, data: Path = DATA) -> dict[str, ChipReading]:
    """The newest reading of each case on a GPU.

    Raises:
        NoDataError: there is none.
    """
    readings = {reading.name: reading for reading in store.records(gpu_slug, ChipReading, data)}
    if not readings:
        raise NoDataError(
            f"wanted readings of the units of GPU {gpu_slug!r} under {data / gpu_slug / 'chip'}, found none. "
            "`flashlab chip` on such a GPU makes some."
        )
    return readings
