"""The cycle model of one tile: how long an SM takes over it, by its units' rates and the order of a kernel's steps.

Everything is in cycles per score of one SM, so that the clock's frequency does not matter. There are two answers:

- a floor, `floor`: the cycles that each unit needs for its share of a score, as if the order of things did not matter.
  GEMMs and the FP32 pipe share what an SM can do; exponentials and the ALU pipe are slower while GEMMs run.
- a loop, `loop_of`: groups of four warps on one SM go through their steps, tile after tile. GEMMs queue for the
  tensor cores. Softmaxes share the other units: how fast they are together, by how many there are and whether GEMMs
  run beside them, is measured. What one group cannot fill the others do, as far as there are others.

A call adds what its blocks' beginnings, the last wave and scores that a mask throws away cost. Rates come from readings
(chip.py) and ceilings (roofline.py); what is written down here are facts of the architecture and of the kernels'
structure. Nothing is fitted to a kernel's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from flashlab.core.errors import NoDataError
from flashlab.core.paths import DATA
from flashlab.core.problem import MASKS, Problem
from flashlab.experiments import chip
from flashlab.kernels import registry
from flashlab.query import select
from flashlab.record import schema, store
from flashlab.record.schema import ChipReading, Samples
from flashlab.run import choice

Order = Literal["free-running", "ping-pong"]
"""Whether barriers order the GEMMs of the groups of warps, or nothing does."""

LANES = 128
"""Instructions times threads that an SM issues per cycle: four schedulers, a warp of 32 each."""
SMEM_BYTES = 128
"""Bytes per cycle of shared memory."""
GROUP_ROWS = 64
"""Query rows of a warpgroup's wgmma."""
GROUP_THREADS = 128
_LDMATRIX_BYTES = 512
"""Of an ldmatrix.x4 of a warp."""
_MMA_SYNC_FLOP = 4096
"""Of an mma.m16n8k16 of a warp."""
_WGMMA_K = 16
_DESCRIBED: Mapping[str, Mapping[str, bool]] = {
    "07_mma_registers": {"uses_wgmma": False, "waits": False},
    "08_swizzle": {"overlaps": True},
    "09_wgmma": {"uses_wgmma": True, "waits": True, "overlaps": False},
    "12_persistent": {"persistent": True, "overlaps": True},
    "13_overlap": {"rescales": False, "maxima": False},
    "14_stale_max": {"rescales": False, "maxima": False},
    "16_ones_column": {"sums_by_gemm": True},
}
"""What the model must know of a stage beside its tunables, where that differs from its parent: fields of `Kernel`. A
stage that has no entry is as its parent, and those before the first are not described."""


class Speeds(NamedTuple):
    """Scores per cycle of all softmaxes on an SM, by the number of groups of four warps in it."""

    alone: Mapping[int, float]
    beside: Mapping[int, float]
    """The same while GEMMs run."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of an SM of one GPU; instructions are counted per thread."""

    sm_count: int
    clock_mhz: float
    wgmma: float
    """FLOP per cycle."""
    mma_sync: float | None
    """FLOP per cycle of mma.sync; None if the ceiling was not measured."""
    fma: float
    """FFMA per cycle."""
    alu: float
    """FMNMX per cycle."""
    exp2: float
    shared: float
    """Sum of the shares of their rates that GEMMs and FFMA reach concurrently; 1 if they exclude each other."""
    alu_beside: float
    """FMNMX per cycle while GEMMs run."""
    exp2_beside: float
    softmax: Speeds
    softmax_without_max: Speeds
    gemm_latency: float
    """Cycles from issuing the first of some wgmmas to the end of the last, beyond their own cycles."""
    wait: float
    """Cycles of testing an mbarrier whose phase is complete."""
    copy: float
    """Cycles of a copy of 16 KiB from L2, issue to arrival."""


def rates_of(readings: Mapping[str, ChipReading], ceilings: Mapping[str, schema.Ceiling] | None = None) -> Rates:
    """The model's rates from micro-benchmark readings, and from ceilings if given.

    Raises:
        NoDataError: a reading is missing.
    """

    def read(name: str) -> ChipReading:
        if name not in readings:
            raise NoDataError(f"wanted a reading of {name} for the cycle model, found none. `flashlab chip` makes it")
        return readings[name]

    gpu = read("ffma_16_warps").gpu
    clock_mhz = gpu.max_sm_clock_mhz
    if clock_mhz is None:
        raise NoDataError(f"wanted the highest SM clock of {gpu.name}, which its records lack")
    mma = (ceilings or {}).get("mma_sync_float16")
    mma_sync = None
    if mma is not None:
        # Records of version 1 have the clock after the calls alone, which is higher than the one in them.
        clocks = mma.samples.call_clock_mhz or mma.samples.sm_clock_mhz
        if clocks:
            mma_sync = mma.value * 1e6 / (gpu.sm_count * median(clocks))
    wgmma = read("wgmma_n128_2wg_rs").value
    fma = read("ffma_16_warps").value
    both = read("wgmma_n128_2wg_rs_beside_ffma_2wg")
    issued = len(read("issue_n64_1wg_ss").stamps) - 1
    issued_cycles = issued * (2.0 * GROUP_ROWS * 64 * _WGMMA_K / wgmma)  # m64n64k16

    def speeds(mix: str) -> Speeds:
        alone = {groups: 1 / read(f"{mix}_{groups}_warps").value for groups in (1, 2, 3, 4)}
        slow = {groups: median(read(f"wgmma_n128_2wg_rs_beside_{mix}_{groups}wg").beside) for groups in (1, 2)}
        # More warpgroups than these do not fit beside two that multiply; they lose the same share.
        return Speeds(alone, slow | {groups: alone[groups] * slow[2] / alone[2] for groups in (3, 4)})

    return Rates(
        sm_count=gpu.sm_count,
        clock_mhz=clock_mhz,
        wgmma=wgmma,
        mma_sync=mma_sync,
        fma=fma,
        alu=read("fmnmx_16_warps").value,
        exp2=read("ex2_16_warps").value,
        shared=both.value / wgmma + median(both.beside) / fma,
        alu_beside=median(read("wgmma_n128_2wg_rs_beside_fmnmx_2wg").beside),
        exp2_beside=median(read("wgmma_n128_2wg_rs_beside_ex2_2wg").beside),
        softmax=speeds("softmax"),
        softmax_without_max=speeds("softmax_without_max"),
        gemm_latency=read("issue_n64_1wg_ss").value - issued_cycles,
        wait=read("mbarrier_try_wait").value,
        copy=read("bulk_copy_16_kib").value,
    )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The model's parameters of a kernel."""

    stage: str
    order: Order
    head_dim: int
    keys: int
    """Keys per tile."""
    group_rows: int
    """Query rows of a group of four warps."""
    groups: int
    """Groups per block."""
    blocks: int
    """Resident blocks per SM."""
    uses_wgmma: bool
    """Whether it uses wgmma; else mma.sync."""
    rescales: bool = True
    """Whether the output is rescaled at every tile."""
    sums_by_gemm: bool = False
    """Whether the row sums are a column of the PV GEMM."""
    adds: bool = True
    """Whether the FP32 pipe computes the row sums."""
    maxima: bool = True
    """Whether every score is compared with its row's maximum."""
    persistent: bool = False
    overlaps: bool = False
    """Whether the PV GEMM of a tile runs during a softmax of the same group."""
    interleaved: int = 1
    """Steps of a tile, each with its part of both GEMMs beside the exponentials of the next; 1: the tile is whole."""
    waits: bool = True
    """Whether a group tests an mbarrier for each tile of K and V."""

    @property
    def tile_rows(self) -> int:
        """Query rows per block."""
        return self.group_rows * self.groups

    @property
    def flops(self) -> float:
        """FLOP of both GEMMs per score."""
        return 4.0 * self.head_dim + (2.0 * 8 if self.sums_by_gemm else 0.0)

    @property
    def fma(self) -> float:
        """Instructions of the FP32 pipe per score: scale and subtract, sum, and the output's share of a rescale."""
        return 1.0 + self.adds + (self.head_dim / self.keys if self.rescales else 0.0)

    @property
    def alu(self) -> float:
        """Instructions of the ALU pipe per score: maximum, half a pack."""
        return 0.5 + self.maxima

    @property
    def smem_bytes(self) -> float:
        """Bytes per score that warps load as fragments of K and V; wgmma reads its operands within its own cycles."""
        return 0.0 if self.uses_wgmma else 2.0 * 2 * self.head_dim / (self.group_rows / 4)

    @property
    def issued(self) -> float:
        """All instructions per score and thread."""
        own = self.fma + self.alu + 1.0
        if self.uses_wgmma:
            return own
        return own + 32 * (4.0 * self.head_dim / _MMA_SYNC_FLOP + self.smem_bytes / _LDMATRIX_BYTES)


def _gemm_rate(kernel: Kernel, rates: Rates) -> float:
    rate = rates.wgmma if kernel.uses_wgmma else rates.mma_sync
    if rate is None:
        raise NoDataError("wanted the ceiling mma_sync_float16 on record, found none. `flashlab bench` measures it")
    return rate


def floor(kernel: Kernel, rates: Rates) -> dict[str, float]:
    """Cycles per score that each unit of an SM needs, by display name; the largest bounds every schedule.

    Raises:
        NoDataError: it uses mma.sync, of whose rate there is no ceiling on record.
    """
    gemms = kernel.flops / _gemm_rate(kernel, rates)
    return {
        "GEMMs and FP32 pipe": max(gemms, (gemms + kernel.fma / rates.fma) / rates.shared),
        "exponentials": _beside(1.0, rates.exp2, rates.exp2_beside, gemms),
        "ALU pipe": _beside(kernel.alu, rates.alu, rates.alu_beside, gemms),
        "issue slots": kernel.issued / LANES,
        "shared memory": kernel.smem_bytes / SMEM_BYTES,
    }


def _beside(amount: float, rate: float, rate_beside: float, gemms: float) -> float:
    """Cycles of `amount` at `rate`, or at `rate_beside` while GEMMs run, for `gemms` cycles."""
    if amount <= rate_beside * gemms:
        return amount / rate_beside
    return gemms + (amount - rate_beside * gemms) / rate


class Step(NamedTuple):
    """A step of a group of four warps."""

    kind: Literal["issue", "wait", "softmax", "pause", "take turn", "pass turn"]
    amount: float = 0.0
    """Cycles of the tensor cores, scores of a softmax, or cycles of a pause."""
    name: str = ""
    """Name of the GEMM issued or waited for."""


def steps_of(kernel: Kernel, rates: Rates) -> tuple[Step, ...]:
    """The steps of a group of four warps over one tile of keys.

    Raises:
        NoDataError: as `floor`.
    """
    scores = kernel.group_rows * kernel.keys
    clocks = scores * max(kernel.flops / _gemm_rate(kernel, rates), kernel.smem_bytes / SMEM_BYTES) / 2
    latency = Step("pause", rates.gemm_latency if kernel.uses_wgmma else 0.0)
    # The output's rescale is work of the FP32 pipe, counted as so many scores more.
    beyond = max(0.0, kernel.fma - 2.0) / rates.fma * max(rates.softmax.alone.values())
    softmax = Step("softmax", scores * (1 + beyond))
    tile = Step("pause", rates.wait if kernel.waits else 0.0)
    qk, pv = Step("issue", clocks, "QK"), Step("issue", clocks, "PV")
    done_qk, done_pv = Step("wait", name="QK"), Step("wait", name="PV")
    turn = (Step("take turn"),) if kernel.order == "ping-pong" else ()
    passed = (Step("pass turn"),) if kernel.order == "ping-pong" else ()
    if kernel.interleaved > 1:
        # Q·K is of the tile after.
        qk, pv, softmax = (step._replace(amount=step.amount / kernel.interleaved) for step in (qk, pv, softmax))
        beside = (qk, pv, softmax, done_qk, done_pv) * (kernel.interleaved - 1)
        return (tile, softmax, *beside, qk, pv, done_qk, done_pv)
    if kernel.overlaps:
        # P·V is of the tile before.
        return (tile, *turn, qk, tile, pv, *passed, done_qk, latency, softmax, done_pv)
    if turn:
        # P·V of this tile and Q·K of the next, in one turn.
        return (tile, *turn, pv, tile, qk, done_pv, done_qk, *passed, latency, softmax)
    return (tile, qk, done_qk, latency, softmax, tile, pv, done_pv, latency)


class Moment(NamedTuple):
    """The activity of an SM between two events."""

    start: float
    stop: float
    """Both ends in cycles."""
    gemms: tuple[tuple[int, str], ...]
    """Groups that share the tensor cores equally, each with its GEMM's name."""
    softmaxes: tuple[int, ...]
    """Groups in a softmax."""
    rate: float
    """Scores per cycle of all these softmaxes."""


WARM_TILES, TILES = 16, 64


@dataclass
class _Group:
    """The state of a group of four warps."""

    left: float
    """Amount left of the current step."""
    at: int = 0
    tiles: int = 0
    gemms: list[tuple[str, float]] = field(default_factory=list)
    """GEMMs in flight: name and cycles left."""


def _loop(kernel: Kernel, rates: Rates, apart: float = 1.0) -> Iterator[tuple[Moment, Sequence[int]]]:
    """What goes on on an SM whose groups of four warps go through their steps again and again, each on its own.

    Moment after moment, without an end, each with the tiles that every group has done by then. `apart` is how many
    cycles later than the one before each group begins.
    """
    steps, queue = steps_of(kernel, rates), list[int]()  # who waits for the turn as they came; the first has it
    speeds = rates.softmax if kernel.maxima else rates.softmax_without_max

    def takes(step: Step) -> float:
        return step.amount if step.kind in ("softmax", "pause") else 0.0

    # Not all at once: blocks that start together drift apart. The first step of every kernel takes time.
    groups = [_Group(left=takes(steps[0]) + apart * index) for index in range(kernel.groups * kernel.blocks)]

    def passes(index: int) -> bool:
        """Execute steps that take no time; return whether there were any."""
        group, step = groups[index], steps[groups[index].at]
        if step.kind == "issue":
            group.gemms.append((step.name, step.amount))
        elif step.kind == "wait":
            if any(name == step.name for name, _ in group.gemms):
                return False
        elif step.kind == "take turn":
            if index not in queue:
                queue.append(index)
            if queue[0] != index:
                return False
        elif step.kind == "pass turn":
            queue.pop(0)
        elif group.left > 0:
            return False
        group.at = (group.at + 1) % len(steps)
        group.tiles += group.at == 0
        group.left = takes(steps[group.at])
        return True

    def settle() -> None:
        while any(passes(index) for index in range(len(groups))):
            pass

    clock = 0.0
    settle()
    while True:
        gemms = tuple((index, group.gemms[0][0]) for index, group in enumerate(groups) if group.gemms)
        softmaxes = tuple(index for index, group in enumerate(groups) if steps[group.at].kind == "softmax")
        by_groups = speeds.beside if gemms else speeds.alone
        each = by_groups[min(len(softmaxes), max(by_groups))] / len(softmaxes) if softmaxes else 0.0
        going = dict.fromkeys(softmaxes, each)
        going |= {index: 1.0 for index, group in enumerate(groups) if steps[group.at].kind == "pause"}
        ends = [groups[index].left / speed for index, speed in going.items()]
        ends += [groups[index].gemms[0][1] * len(gemms) for index, _ in gemms]
        passed = min(ends)  # until the first of what is under way ends
        moment = Moment(clock, clock + passed, gemms, softmaxes, each * len(softmaxes))
        clock = moment.stop
        for index, speed in going.items():
            groups[index].left = _rest(groups[index].left, passed * speed)
        for index, _ in gemms:
            name, left = groups[index].gemms.pop(0)
            if left := _rest(left, passed / len(gemms)):
                groups[index].gemms.insert(0, (name, left))
        settle()
        yield moment, [group.tiles for group in groups]


def _rest(left: float, done: float) -> float:
    """The amount left, with rounding errors set to 0."""
    return left - done if left - done > 1e-6 else 0.0


def loop_of(kernel: Kernel, rates: Rates) -> float:
    """Cycles per score of a kernel's inner loop, between the tiles `WARM_TILES` and `TILES` of every group.

    Raises:
        NoDataError: as `floor`.
    """
    began, warm = 0.0, 0
    for moment, tiles in _loop(kernel, rates):
        if min(tiles) >= TILES:
            return (moment.stop - began) / ((sum(tiles) - warm) * kernel.group_rows * kernel.keys)
        if not began and min(tiles) >= WARM_TILES:
            began, warm = moment.stop, sum(tiles)
    raise AssertionError("a loop has no end")


def moments_of(kernel: Kernel, rates: Rates) -> list[Moment]:
    """What goes on in the inner loop, tile after tile, if groups begin evenly spread over the time of a tile.

    Raises:
        NoDataError: as `floor`.
    """
    moments = []
    for moment, tiles in _loop(kernel, rates, apart=loop_of(kernel, rates) * kernel.group_rows * kernel.keys):
        moments.append(moment)
        if min(tiles) >= TILES:
            break
    return moments


# --- A whole call -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The model's prediction for a kernel on a problem."""

    kernel: Kernel
    problem: Problem
    floor: Mapping[str, float]
    cycles_per_score: float
    """Cycles per score of the whole call, defined as `schema.cycles_per_score`."""
    clock_mhz: float
    """Clock of the rate."""
    tflops: float
    clock_measured: bool
    """Whether `clock_mhz` is the clock of the measurement."""
    measured_cycles: float | None
    """Measured cycles per score; None if not measured."""
    measured_tflops: float | None


def predict(kernel: Kernel, problem: Problem, rates: Rates, measured: Samples | None = None) -> Prediction:
    """Predict a kernel on a problem.

    Args:
        measured: what it is compared with. The rate is given at the SM clock in these calls, else at the GPU's highest;
            no other number depends on it.

    Raises:
        NoDataError: as `floor`.
    """
    limits = floor(kernel, rates)
    loop = max(*limits.values(), loop_of(kernel, rates))
    rows = GROUP_ROWS if kernel.persistent else kernel.tile_rows  # that stop at the mask together
    blocks = problem.batch * problem.q_heads * math.ceil(problem.q_len / kernel.tile_rows)
    room = rates.sm_count * kernel.blocks
    # Blocks under a causal mask differ in length, and short ones fill the last wave: it is as if they were small.
    waves = 1.0 if problem.causal else math.ceil(blocks / room) * room / blocks
    scores = kernel.tile_rows * problem.kv_len * (0.5 if problem.causal else 1.0)
    fill = rates.copy + 2 * rates.wait + rates.gemm_latency
    hidden = kernel.persistent or kernel.blocks > 1
    begin = 1.0 if hidden else 1.0 + fill / (loop * scores)
    cycles = loop * _computed(problem, rows, kernel.keys) * waves * begin
    clocks = measured.call_clock_mhz if measured else ()
    clock_mhz = median(clocks) if clocks else rates.clock_mhz
    seconds = cycles * problem.batch * problem.q_heads * problem.visible_scores / (rates.sm_count * clock_mhz * 1e6)
    return Prediction(
        kernel=kernel,
        problem=problem,
        floor=limits,
        cycles_per_score=cycles,
        clock_mhz=clock_mhz,
        tflops=problem.flops / seconds / 1e12,
        clock_measured=bool(clocks),
        measured_cycles=schema.cycles_per_score(measured, problem, rates.sm_count) if measured else None,
        measured_tflops=problem.tflops(measured.median_us) if measured else None,
    )


def _computed(problem: Problem, rows: int, keys: int) -> float:
    """Scores in whole tiles of rows × keys that a mask leaves something of, over the scores wanted."""
    total = 0
    for first in range(0, problem.q_len, rows):
        last = min(first + rows, problem.q_len) - 1
        seen = problem.kv_len
        if problem.causal:
            seen = min(problem.kv_len, max(0, last + 1 + problem.kv_len - problem.q_len))
        total += min(rows, problem.q_len - first) * math.ceil(seen / keys) * keys
    return total / problem.visible_scores


def kernel_of(
    stage_id: str, head_dim: int, parameters: Mapping[str, int], blocks_per_sm: int | None = None
) -> Kernel | None:
    """The model's parameters of a stage with these tunables; None for a stage that it does not describe.

    Args:
        blocks_per_sm: resident on an SM, as the driver counts them; where None as many as MIN_BLOCKS asks the compiler
            to leave room for, which may be fewer.
    """
    known = _described(stage_id)
    if known is None:
        return None
    if known["uses_wgmma"]:
        group_rows, groups = GROUP_ROWS, parameters.get("NUM_CONSUMERS") or parameters["NUM_WARPGROUPS"]
    else:
        group_rows, groups = 4 * parameters["TILE_Q"] // parameters["WARPS"], max(1, parameters["WARPS"] // 4)
    sums = bool(parameters.get("SUM_BY_MMA"))
    steps = 1 if known["uses_wgmma"] else parameters["TILE_KV"] // parameters.get("STEP_KEYS", parameters["TILE_KV"])
    fields: dict[str, Any] = {
        **known,
        "rescales": known.get("rescales", True) and not parameters.get("LAZY_RESCALE"),
        "sums_by_gemm": known.get("sums_by_gemm", False) or sums,
        "overlaps": bool(parameters.get("OVERLAP", known.get("overlaps", False))),
    }
    return Kernel(
        stage=stage_id,
        order="ping-pong" if parameters.get("PINGPONG") else "free-running",
        head_dim=head_dim,
        keys=parameters["TILE_KV"],
        group_rows=group_rows,
        groups=groups,
        blocks=parameters.get("MIN_BLOCKS", 1) if blocks_per_sm is None else blocks_per_sm,
        adds=not sums,
        interleaved=steps,
        **fields,
    )


def _described(stage_id: str | None) -> dict[str, bool] | None:
    """A stage's entries of `_DESCRIBED`, its own and its ancestors'; None if there are none."""
    if stage_id is None or (stage := registry.get(stage_id)).language != "cuda":
        return None
    inherited = _described(stage.parent)
    own = _DESCRIBED.get(stage_id)
    return None if inherited is None and own is None else {**(inherited or {}), **(own or {})}


def described() -> tuple[str, ...]:
    """The stages that the model describes, in the ladder's order, including retired ones."""
    return tuple(sorted((name for name in registry.RUNGS if _described(name)), key=lambda name: name[:2]))


PROBLEMS = tuple(Problem.parse(f"16x16x2048x{head_dim}", mask=mask) for head_dim in (64, 128) for mask in MASKS)
"""The problems that the pages predict: the first shape, float16, by head dim and mask."""


def predict_loop(reading: ChipReading, rates: Rates) -> float | None:
    """Predicted cycles per score of a measured loop (group `loop`); None if the model does not cover it."""
    case = reading.defines
    if (
        reading.group != "loop"
        or case["ORDER"] > 1
        or case.get("DETAILS")
        or case["POLYNOMIAL_EVERY"]
        or case["TAKE_SUM"] != 1
    ):
        return None
    kernel = Kernel(
        stage=reading.name,
        order="free-running",
        head_dim=case["HEAD_DIM"],
        keys=case["KEYS"],
        group_rows=GROUP_ROWS,
        groups=case["THREADS"] // GROUP_THREADS,
        blocks=1,
        uses_wgmma=True,
        rescales=bool(case.get("RESCALE")),
        maxima=bool(case["TAKE_MAX"]),
        overlaps=case["ORDER"] == 1,
        waits=False,
    )
    return loop_of(kernel, rates)


def compare(gpu: str, data: Path = DATA) -> list[Prediction]:
    """The prediction for every stage at the problems of the pages, with its measurement.

    The measurement is the one that the other pages show; of a stage that they do not show there, the newest one. It
    counts with the tunables and the resident blocks it was made with: those are what is predicted where
    there is one, and the rate is given at the clock that its calls had.

    Raises:
        NoDataError: readings or ceilings are missing.
    """
    readings = chip.newest(gpu, data)
    shown = select.load(gpu, data)
    rows = [*store.measurements(gpu, data), *(row for of_problem in shown.problems.values() for row in of_problem)]
    rates = rates_of(readings, shown.ceilings)
    compared: list[Prediction] = []
    for problem in PROBLEMS:
        measured = {row.name: row for row in rows if row.status == "ok" and row.problem == problem}
        for stage_id in described():
            row = measured.get(stage_id)
            if row is not None and row.cubin is not None:
                parameters, blocks_per_sm = row.cubin.parameters, row.cubin.blocks_per_sm
            else:
                stage = registry.get(stage_id)
                tuned = choice.parameters(stage, gpu, problem, data=data)
                parameters, blocks_per_sm = stage.parameters(problem.head_dim, tuned), None
            kernel = kernel_of(stage_id, problem.head_dim, parameters, blocks_per_sm)
            if kernel is None or (not kernel.uses_wgmma and rates.mma_sync is None):
                continue
            compared.append(predict(kernel, problem, rates, row.samples_of() if row else None))
    return compared
