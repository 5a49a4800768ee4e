"""What this GPU gives at most, measured; query/roofline.py says what a data sheet promises and where a stage stands.

A ceiling is the median of burst samples of a micro-benchmark (kernels/micro) or of one large cuBLAS GEMM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flashlab.core.errors import ParameterError
from flashlab.core.problem import DType
from flashlab.measure import timer as timing
from flashlab.measure.timer import Buffer, MicroParams, Run, Series, Timer
from flashlab.query.roofline import Unit
from flashlab.run import gpu

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
