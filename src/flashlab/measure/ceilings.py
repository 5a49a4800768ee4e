"""The roofline: what this GPU gives at most, measured; what its maker says; and where a stage stands.

A ceiling is the median of burst samples of a micro-benchmark (kernels/micro) or of one large cuBLAS product. A stage's
place is its counted floating-point operations over its counted bytes; what it could attain there is the lower of the
compute ceiling and bandwidth times that ratio.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from flashlab.core.errors import ParameterError
from flashlab.core.problem import BYTES_PER_ELEMENT, DType, Problem
from flashlab.measure import timer as timing
from flashlab.measure.timer import Buffer, MicroParams, Run, Series, Timer
from flashlab.run import gpu

Unit = Literal["TB/s", "TFLOP/s", "Tex2/s", "us"]

_CHAINS, _UNROLL = 8, 16
_BLOCKS_PER_SM = 2
_TENSOR_TILE = 16
_MATMUL = 8192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A micro-benchmark ready to run."""

    run: Run
    amount: float
    """Bytes, operations or results a call; 1 where the time itself is the reading."""
    unit: Unit
    how: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured ceiling."""

    name: str
    unit: Unit
    value: float
    how: str
    series: Series


def value_of(amount: float, unit: Unit, time_us: float) -> float:
    """A rate in `unit` from the amount done in one call of `time_us`; for `us` the time itself."""
    return time_us if unit == "us" else amount / time_us / 1e6


def _run(
    name: str,
    device: int,
    stream: int,
    *,
    blocks: int,
    threads: int,
    buffers: tuple[Buffer, Buffer],
    count: int = 0,
    repeats: int = 1,
    defines: Mapping[str, int | str] | None = None,
) -> Run:
    """A micro-benchmark's launch; the buffers (out, in) live as long as it does."""
    function = timing.micro(name, device, tuple(sorted((defines or {}).items())))
    launch = gpu.Launch(
        function,
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        params=[MicroParams(buffers[0].pointer, buffers[1].pointer, count, repeats)],
        stream=stream,
    )
    return _holding(launch, *buffers)


def _holding(run: Run, *buffers: Buffer) -> Run:
    """`run`, which knows addresses alone, with the buffers that they belong to."""

    def held(_: tuple[Buffer, ...] = buffers) -> object:
        return run()

    return held


def _small() -> tuple[Buffer, Buffer]:
    # 32 KiB is the most that a micro-benchmark reads as input.
    return Buffer.new(1 << 20), Buffer.new(1 << 20)


def _empty(device: int, stream: int) -> Workload:
    run = _run("empty", device, stream, blocks=1, threads=1, buffers=_small())
    return Workload(run=run, amount=1, unit="us", how="an empty kernel between the two events, a hundred in a row")


def _copy(device: int, stream: int) -> Workload:
    info = gpu.info(device)
    # Far beyond L2, well within memory.
    size = min(max(1 << 30, 8 * info.l2_bytes), info.memory_bytes // 8)
    source, target = Buffer.new(size), Buffer.new(size)
    run = partial(gpu.call, "cuMemcpyDtoDAsync", target.pointer, source.pointer, size, stream)
    how = f"the driver's copy of {size} bytes of device memory; bytes read plus bytes written"
    return Workload(run=_holding(run, source, target), amount=2.0 * size, unit="TB/s", how=how)


def _l2_read(device: int, stream: int) -> Workload:
    info = gpu.info(device)
    threads, blocks, in_flight, repeats = 512, 4 * info.sm_count, 4, 20
    step_bytes = 16 * threads * blocks * in_flight
    size = max(1, info.l2_bytes // 4 // step_bytes) * step_bytes
    run = _run(
        "l2_read",
        device,
        stream,
        blocks=blocks,
        threads=threads,
        buffers=(Buffer.new(1 << 20), Buffer.new(size)),
        count=size // 16,
        repeats=repeats,
    )
    how = f"reads {size} bytes past L1, {repeats} times over, 16 bytes an access"
    return Workload(run=run, amount=float(size) * repeats, unit="TB/s", how=how)


def _smem_read(device: int, stream: int) -> Workload:
    threads, repeats, step = 512, 2000, 512
    blocks = _BLOCKS_PER_SM * 2 * gpu.info(device).sm_count
    run = _run(
        "smem_read",
        device,
        stream,
        blocks=blocks,
        threads=threads,
        buffers=_small(),
        count=step,
        repeats=repeats,
        defines={"UNROLL": _UNROLL},
    )
    amount = 16.0 * threads * blocks * _UNROLL * repeats
    return Workload(run=run, amount=amount, unit="TB/s", how="conflict-free 16-byte reads of shared memory on every SM")


def _scalar(name: str, per_result: float, unit: Unit, repeats: int, how: str, device: int, stream: int) -> Workload:
    threads, blocks = 512, 2 * _BLOCKS_PER_SM * gpu.info(device).sm_count
    run = _run(
        name,
        device,
        stream,
        blocks=blocks,
        threads=threads,
        buffers=_small(),
        repeats=repeats,
        defines={"CHAINS": _CHAINS, "UNROLL": _UNROLL},
    )
    amount = per_result * threads * blocks * _CHAINS * _UNROLL * repeats
    return Workload(run=run, amount=amount, unit=unit, how=how)


def _mma_sync(dtype: DType, device: int, stream: int) -> Workload:
    threads, blocks, repeats = 256, 2 * _BLOCKS_PER_SM * gpu.info(device).sm_count, 500
    element = {"float16": "__half", "bfloat16": "__nv_bfloat16"}[dtype]
    run = _run(
        "tensor",
        device,
        stream,
        blocks=blocks,
        threads=threads,
        buffers=_small(),
        repeats=repeats,
        defines={"CHAINS": _CHAINS, "UNROLL": _UNROLL, "ELEMENT": element},
    )
    amount = 2.0 * _TENSOR_TILE**3 * (threads // 32) * blocks * _CHAINS * _UNROLL * repeats
    how = f"16x16x16 warp-level products of zeros (wmma, that is mma.sync), {dtype} in, float32 out, from registers"
    return Workload(run=run, amount=amount, unit="TFLOP/s", how=how)


def _matmul(dtype: DType, device: int, stream: int) -> Workload:
    torch = importlib.import_module("torch")
    edge = _MATMUL
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(0)
    a, b = (
        torch.randn(edge, edge, generator=generator, device=f"cuda:{device}").to(getattr(torch, dtype))
        for _ in range(2)
    )
    out = torch.empty_like(a)

    def run() -> None:
        torch.matmul(a, b, out=out)

    how = f"cuBLAS through torch.matmul, {edge} cubed, {dtype}, random normal"
    return Workload(run=run, amount=2.0 * edge**3, unit="TFLOP/s", how=how)


CEILINGS: Mapping[str, Callable[[int, int], Workload]] = {
    "launch": _empty,
    "copy": _copy,
    "l2_read": _l2_read,
    "smem_read": _smem_read,
    "fp32_fma": partial(_scalar, "fp32_fma", 2.0, "TFLOP/s", 400, "independent FFMA chains on every SM"),
    "half2_fma": partial(_scalar, "half2_fma", 4.0, "TFLOP/s", 400, "independent HFMA2 chains on every SM"),
    "exp2": partial(_scalar, "exp2", 1.0, "Tex2/s", 60, "independent ex2.approx.ftz.f32 chains on every SM"),
    "mma_sync_float16": partial(_mma_sync, "float16"),
    "mma_sync_bfloat16": partial(_mma_sync, "bfloat16"),
    "tensor_float16": partial(_matmul, "float16"),
    "tensor_bfloat16": partial(_matmul, "bfloat16"),
}
"""Every ceiling: (device, stream) -> workload. `tensor_*` is the compute roof of the newest tensor-core instructions
(cuBLAS uses them); `mma_sync_*` that of the warp-level ones, which is all that the stages before wgmma can reach."""


def measure(
    timer: Timer,
    device: int,
    stream: int,
    names: Sequence[str] | None = None,
    *,
    samples: int = 20,
    announce: Callable[[str], None] = lambda name: None,
) -> Iterator[Reading]:
    """Measure ceilings one after another, each as burst samples; all where `names` is None.

    Raises:
        ParameterError: a name that is no ceiling.
        MissingPackageError, LaunchError, CompileError, ImportError: as the workload's building or running raises.
    """
    for name in CEILINGS if names is None else names:
        if name not in CEILINGS:
            raise ParameterError(f"ceiling: wanted one of {', '.join(CEILINGS)}, got {name!r}")
        announce(name)
        workload = CEILINGS[name](device, stream)
        series = timer.burst({name: workload.run}, samples=samples, min_samples=min(7, samples))[name]
        yield Reading(
            name=name,
            unit=workload.unit,
            value=value_of(workload.amount, workload.unit, series.median_us),
            how=workload.how,
            series=series,
        )


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A number from the maker's data sheet."""

    value: float
    unit: Unit
    clock_mhz: float | None
    """The SM clock it assumes; None where the source does not say."""
    sparsity: bool
    """True where it counts the zeros of 2:4 sparsity as work. All here are dense."""
    source: str
    """Document, and its address."""


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """A GPU's data sheet: dense peaks."""

    title: str
    tensor_tflops: float
    """float16 or bfloat16 in, float32 accumulation."""
    fp32_tflops: float
    memory_tb_s: float
    tensor_mhz: float | None
    """SM clock that `tensor_tflops` assumes; a sheet may take another for each rate."""
    fp32_mhz: float | None
    """SM clock that `fp32_tflops` assumes."""
    source: str

    def peak(self, ceiling: str) -> Peak | None:
        """The peak that stands beside a measured ceiling, None where the sheet has none."""
        value: float
        unit: Unit
        clock_mhz: float | None
        if ceiling.startswith(("tensor_", "mma_sync_")):
            value, unit, clock_mhz = self.tensor_tflops, "TFLOP/s", self.tensor_mhz
        elif ceiling == "fp32_fma":
            value, unit, clock_mhz = self.fp32_tflops, "TFLOP/s", self.fp32_mhz
        elif ceiling == "copy":
            value, unit, clock_mhz = self.memory_tb_s, "TB/s", None
        else:
            return None
        return Peak(value=value, unit=unit, clock_mhz=clock_mhz, sparsity=False, source=self.source)


_HOPPER = "https://resources.nvidia.com/en-us-tensor-core"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_AMPERE_CONSUMER = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_BLACKWELL_CONSUMER = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)

DATASHEETS: Mapping[str, Datasheet] = {
    "nvidia-h200": Datasheet(
        title="H200 SXM",
        tensor_tflops=989.4,
        fp32_tflops=66.9,
        memory_tb_s=4.8,
        tensor_mhz=1830,
        fp32_mhz=1980,
        source="NVIDIA H200 data sheet, dense = half of the sparse 1979 TFLOPS; clocks as in the H100 white paper, "
        f"{_HOPPER}",
    ),
    "nvidia-h100-80gb-hbm3": Datasheet(
        title="H100 SXM5",
        tensor_tflops=989.4,
        fp32_tflops=66.9,
        memory_tb_s=3.35,
        tensor_mhz=1830,
        fp32_mhz=1980,
        source=f"NVIDIA H100 Tensor Core GPU Architecture white paper, table 'H100 SXM5', {_HOPPER}",
    ),
    "nvidia-h100-pcie": Datasheet(
        title="H100 PCIe",
        tensor_tflops=756.0,
        fp32_tflops=51.2,
        memory_tb_s=2.0,
        tensor_mhz=1620,
        fp32_mhz=1755,
        source=f"NVIDIA H100 Tensor Core GPU Architecture white paper, table 'H100 PCIe', {_HOPPER}",
    ),
    "nvidia-a100-sxm4-40gb": Datasheet(
        title="A100 SXM4 40 GB",
        tensor_tflops=312.0,
        fp32_tflops=19.5,
        memory_tb_s=1.555,
        tensor_mhz=1410,
        fp32_mhz=1410,
        source="NVIDIA A100 Tensor Core GPU Architecture white paper, https://images.nvidia.com/aem-dam/en-zz/Solutions/"
        "data-center/nvidia-ampere-architecture-whitepaper.pdf",
    ),
    "nvidia-a100-sxm4-80gb": Datasheet(
        title="A100 SXM4 80 GB",
        tensor_tflops=312.0,
        fp32_tflops=19.5,
        memory_tb_s=2.039,
        tensor_mhz=1410,
        fp32_mhz=1410,
        source="NVIDIA A100 80GB data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    "nvidia-a100-80gb-pcie": Datasheet(
        title="A100 PCIe 80 GB",
        tensor_tflops=312.0,
        fp32_tflops=19.5,
        memory_tb_s=1.935,
        tensor_mhz=1410,
        fp32_mhz=1410,
        source="NVIDIA A100 80GB data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    "nvidia-l4": Datasheet(
        title="L4",
        tensor_tflops=121.0,
        fp32_tflops=30.3,
        memory_tb_s=0.3,
        tensor_mhz=2040,
        fp32_mhz=2040,
        source="NVIDIA L4 data sheet, dense = half of the sparse 242 TFLOPS, https://www.nvidia.com/en-us/data-center/l4/",
    ),
    "nvidia-l40s": Datasheet(
        title="L40S",
        tensor_tflops=362.05,
        fp32_tflops=91.6,
        memory_tb_s=0.864,
        tensor_mhz=2490,
        fp32_mhz=2520,
        source="NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    "tesla-t4": Datasheet(
        title="T4",
        tensor_tflops=65.0,
        fp32_tflops=8.1,
        memory_tb_s=0.32,
        tensor_mhz=1590,
        fp32_mhz=1590,
        source="NVIDIA T4 data sheet and Turing architecture white paper, https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    "nvidia-geforce-rtx-3090": Datasheet(
        title="GeForce RTX 3090",
        tensor_tflops=71.2,
        fp32_tflops=35.6,
        memory_tb_s=0.936,
        tensor_mhz=1695,
        fp32_mhz=1695,
        source=f"NVIDIA Ampere GA102 GPU Architecture white paper, float32 accumulation, {_AMPERE_CONSUMER}",
    ),
    "nvidia-geforce-rtx-4090": Datasheet(
        title="GeForce RTX 4090",
        tensor_tflops=165.2,
        fp32_tflops=82.6,
        memory_tb_s=1.008,
        tensor_mhz=2520,
        fp32_mhz=2520,
        source=f"NVIDIA Ada GPU Architecture white paper, float32 accumulation, {_ADA}",
    ),
    "nvidia-geforce-rtx-5090": Datasheet(
        title="GeForce RTX 5090",
        tensor_tflops=209.5,
        fp32_tflops=104.8,
        memory_tb_s=1.792,
        tensor_mhz=2407,
        fp32_mhz=2407,
        source=f"NVIDIA RTX Blackwell GPU Architecture white paper, float32 accumulation, {_BLACKWELL_CONSUMER}",
    ),
    "nvidia-b200": Datasheet(
        title="B200 (HGX, a GPU)",
        tensor_tflops=2250.0,
        fp32_tflops=75.0,
        memory_tb_s=7.7,
        tensor_mhz=None,
        fp32_mhz=None,
        source="NVIDIA HGX platform page, an eighth of HGX B200's 36 PFLOPS sparse, halved, "
        "https://www.nvidia.com/en-us/data-center/hgx/",
    ),
}
"""By folder name under data/. A GPU that is not here has no data-sheet peak, and no percentage of one."""


def datasheet(gpu_slug: str) -> Datasheet | None:
    """The data sheet of a GPU, None where it is unknown here."""
    return DATASHEETS.get(gpu_slug)


def percent_of_peak(gpu_slug: str, ceiling: str, value: float) -> float | None:
    """A rate as a percentage of the data sheet's; None, never 0, where the GPU or the peak is unknown."""
    sheet = datasheet(gpu_slug)
    peak = sheet.peak(ceiling) if sheet else None
    return None if peak is None else 100 * value / peak.value


_TENSOR_FLOP_PER_CLOCK: Mapping[tuple[int, int], int] = {(9, 0): 4096}
"""What the tensor cores of one SM do in a clock, 16-bit in and float32 sums, dense, by compute capability.

Hopper's follows from the data sheet: 989.4 TFLOP/s on 132 SMs at 1830 MHz."""


def percent_of_tensor_peak(
    tflops: float, *, compute_capability: tuple[int, int], sm_count: int, clock_mhz: float | None
) -> float | None:
    """A rate as a percentage of what the tensor cores can do at that SM clock; None where either is not known."""
    per_clock = _TENSOR_FLOP_PER_CLOCK.get(compute_capability)
    return 1e8 * tflops / (per_clock * sm_count * clock_mhz) if per_clock and clock_mhz else None


def l2_bytes(problem: Problem, tile_q: int) -> float:
    """Bytes that cross from L2 to the SMs, counted: Q and O once, K and V once for every tile of `tile_q` query rows.

    Under a causal mask a tile reads the keys up to its last row's diagonal.
    """
    if tile_q < 1:
        raise ParameterError(f"tile_q: wanted a positive number of query rows, got {tile_q}")
    rows = 0
    for tile in range(math.ceil(problem.q_len / tile_q)):
        last = min((tile + 1) * tile_q, problem.q_len)
        keys = last + problem.kv_len - problem.q_len if problem.causal else problem.kv_len
        rows += max(0, min(keys, problem.kv_len))
    heads = problem.batch * problem.q_heads
    elements = heads * problem.head_dim * (2 * problem.q_len + 2 * rows)
    return float(BYTES_PER_ELEMENT * elements)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a kernel stands under one roof."""

    level: Literal["dram", "l2"]
    bytes: float
    intensity: float
    """Operations a byte."""
    attainable_tflops: float
    bound: Literal["compute", "bandwidth"]


def place(
    problem: Problem,
    *,
    compute_tflops: float,
    bandwidth_tb_s: float,
    level: Literal["dram", "l2"] = "dram",
    tile_q: int | None = None,
) -> Place:
    """Place a problem (at level `dram`) or a stage on it (at `l2`, with its `tile_q`) under a compute roof and a slope.

    Raises:
        ParameterError: a roof that is no positive number, or `l2` without `tile_q`.
    """
    if not (compute_tflops > 0 and bandwidth_tb_s > 0):
        raise ParameterError(f"wanted positive ceilings, got {compute_tflops} TFLOP/s and {bandwidth_tb_s} TB/s")
    if level == "dram":
        size = float(problem.compulsory_bytes)
    elif tile_q is None:
        raise ParameterError("tile_q: wanted the stage's query rows a block, to count what it reads from L2; got None")
    else:
        size = l2_bytes(problem, tile_q)
    intensity = problem.flops / size
    slope = intensity * bandwidth_tb_s
    return Place(
        level=level,
        bytes=size,
        intensity=intensity,
        attainable_tflops=min(compute_tflops, slope),
        bound="compute" if compute_tflops <= slope else "bandwidth",
    )
