"""Measured ceilings of a GPU: attainable throughput and bandwidth. For data-sheet peaks, see query/roofline.py.

A ceiling is the median of burst samples of a micro-benchmark (kernels/micro) or of a large cuBLAS GEMM.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashlab.core.paths import table
from flashlab.core.problem import DTYPES, DType
from flashlab.measure import timer as timing
from flashlab.measure.timer import MicroParams, Run, Timer
from flashlab.query.roofline import Unit
from flashlab.run import gpu

_BLOCKS_PER_SM = 4
_MATMUL = 8192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A micro-benchmark ready to run."""

    run: Run
    amount: float
    """Bytes, operations or results per call; 1 if the reading is the time itself."""
    unit: Unit
    how: str
    keep: tuple[object, ...] = ()
    """Buffers whose addresses `run` holds."""


def value_of(amount: float, unit: Unit, time_us: float) -> float:
    """Convert an amount per call of `time_us` to a rate in `unit`; for `us`, the time itself."""
    return time_us if unit == "us" else amount / time_us / 1e6


def _micro(
    device: int,
    stream: int,
    *,
    kernel: str,
    unit: Unit,
    how: str,
    each: float,
    repeats: int = 1,
    threads: int = 512,
    blocks: int | None = None,
    count: int = 0,
    input_bytes: int = 1 << 20,
    defines: Mapping[str, int | str] | None = None,
) -> Workload:
    """Build a micro-benchmark of kernels/micro, with the parameters of ceilings.toml."""
    blocks = blocks or _BLOCKS_PER_SM * gpu.info(device).sm_count
    out, values = gpu.Zeroed(device, 1 << 20, stream), gpu.Zeroed(device, input_bytes, stream)
    launch = gpu.Launch(
        timing.micro(kernel, device, tuple(sorted((defines or {}).items()))),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        params=[MicroParams(out.pointer, values.pointer, count, repeats)],
        stream=stream,
    )
    instructions = math.prod(value for value in (defines or {}).values() if isinstance(value, int))
    amount = float(each * instructions * threads * blocks * repeats)
    return Workload(run=launch, amount=amount, unit=unit, how=how, keep=(out, values))


def _copy(device: int, stream: int) -> Workload:
    info = gpu.info(device)
    # Far beyond L2, well within memory.
    size = min(max(1 << 30, 8 * info.l2_bytes), info.memory_bytes // 8)
    source, target = (gpu.Zeroed(device, size, stream) for _ in range(2))
    run = partial(gpu.call, "cuMemcpyDtoDAsync", target.pointer, source.pointer, size, stream)
    how = f"the driver's copy of {size} bytes of device memory; bytes read plus bytes written"
    return Workload(run=run, amount=2.0 * size, unit="TB/s", how=how, keep=(source, target))


def _l2_read(device: int, stream: int) -> Workload:
    info = gpu.info(device)
    threads, in_flight, repeats = 512, 4, 20
    step_bytes = 16 * threads * _BLOCKS_PER_SM * info.sm_count * in_flight
    steps = max(1, info.l2_bytes // 4 // step_bytes)
    size = steps * step_bytes
    return _micro(
        device,
        stream,
        kernel="l2_read",
        unit="TB/s",
        how=f"reads {size} bytes past L1, {repeats} times over, 16 bytes an access",
        each=16.0 * in_flight * steps,
        repeats=repeats,
        threads=threads,
        count=size // 16,
        input_bytes=size,
    )


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


_TABLES = table(__file__)
_MICRO = {name: partial(_micro, **entry) for name, entry in _TABLES.items()}
CEILINGS: Mapping[str, Callable[[int, int], Workload]] = {
    **{"launch": _MICRO.pop("launch"), "copy": _copy, "l2_read": _l2_read},
    **_MICRO,
    **{f"tensor_{dtype}": partial(_matmul, dtype) for dtype in DTYPES},
}
"""All ceilings: (device, stream) -> workload. `tensor_*` is the peak of the newest tensor-core instructions, as used by
cuBLAS; `mma_sync_*` that of the warp-level ones, the limit of stages without wgmma."""


def measure(name: str, timer: Timer, device: int, stream: int) -> dict[str, Any]:
    """Measure a ceiling in bursts; returns the fields of a `schema.Ceiling` without header and kind.

    Raises:
        MissingPackageError, LaunchError, CompileError, ImportError: the workload cannot be built or run.
    """
    workload = CEILINGS[name](device, stream)
    taken = timer.burst({name: workload.run}, samples=20)[name]
    value = value_of(workload.amount, workload.unit, taken.median_us)
    return {"name": name, "unit": workload.unit, "value": value, "how": workload.how, "samples": taken}
