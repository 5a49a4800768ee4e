"""What this GPU gives at most, measured; query/roofline.py says what a data sheet promises and where a stage stands.

A ceiling is the median of burst samples of a micro-benchmark (kernels/micro) or of one large cuBLAS GEMM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashlab.build.compiler import ELEMENTS
from flashlab.core.errors import ParameterError
from flashlab.core.problem import DTYPES, DType
from flashlab.measure import timer as timing
from flashlab.measure.timer import MicroParams, Run, Timer
from flashlab.query.roofline import Unit
from flashlab.run import gpu

_CHAINS, _UNROLL = 8, 16
_BLOCKS_PER_SM = 4
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
    keep: tuple[object, ...] = ()
    """The buffers of which `run` knows the addresses."""


def value_of(amount: float, unit: Unit, time_us: float) -> float:
    """A rate in `unit` from the amount done in one call of `time_us`; for `us` the time itself."""
    return time_us if unit == "us" else amount / time_us / 1e6


def _micro(
    name: str,
    device: int,
    stream: int,
    *,
    unit: Unit,
    how: str,
    per_thread: float,
    repeats: int = 1,
    threads: int = 512,
    blocks: int | None = None,
    count: int = 0,
    input_bytes: int = 1 << 20,
    defines: Mapping[str, int | str] | None = None,
) -> Workload:
    """A micro-benchmark of kernels/micro, each thread doing `per_thread` in every repeat; four blocks an SM where
    `blocks` is None."""
    blocks = blocks or _BLOCKS_PER_SM * gpu.info(device).sm_count
    out, values = gpu.Zeroed(device, 1 << 20, stream), gpu.Zeroed(device, input_bytes, stream)
    launch = gpu.Launch(
        timing.micro(name, device, tuple(sorted((defines or {}).items()))),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        params=[MicroParams(out.pointer, values.pointer, count, repeats)],
        stream=stream,
    )
    amount = per_thread * threads * blocks * repeats
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
        "l2_read",
        device,
        stream,
        unit="TB/s",
        how=f"reads {size} bytes past L1, {repeats} times over, 16 bytes an access",
        per_thread=16.0 * in_flight * steps,
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


_SCALARS: Sequence[tuple[str, float, Unit, int, str]] = (
    # kernel, operations per result, their unit, repeats, instruction
    ("fp32_fma", 2.0, "TFLOP/s", 400, "FFMA"),
    ("half2_fma", 4.0, "TFLOP/s", 400, "HFMA2"),
    ("exp2", 1.0, "Tex2/s", 60, "ex2.approx.ftz.f32"),
)
_SCALAR = partial(_micro, defines={"CHAINS": _CHAINS, "UNROLL": _UNROLL})
_MMA = partial(
    _micro,
    "tensor",
    unit="TFLOP/s",
    per_thread=2.0 * _TENSOR_TILE**3 / 32 * _CHAINS * _UNROLL,
    repeats=500,
    threads=256,
)
CEILINGS: Mapping[str, Callable[[int, int], Workload]] = {
    "launch": partial(
        _micro,
        "empty",
        unit="us",
        how="an empty kernel between the two events, a hundred in a row",
        per_thread=1.0,
        threads=1,
        blocks=1,
    ),
    "copy": _copy,
    "l2_read": _l2_read,
    "smem_read": partial(
        _micro,
        "smem_read",
        unit="TB/s",
        how="conflict-free 16-byte reads of shared memory on every SM",
        per_thread=16.0 * _UNROLL,
        repeats=2000,
        count=512,
        defines={"UNROLL": _UNROLL},
    ),
    **{
        name: partial(
            _SCALAR,
            name,
            unit=unit,
            how=f"independent {instruction} chains on every SM",
            per_thread=per_result * _CHAINS * _UNROLL,
            repeats=repeats,
        )
        for name, per_result, unit, repeats, instruction in _SCALARS
    },
    **{
        f"mma_sync_{dtype}": partial(
            _MMA,
            how=f"16x16x16 warp-level MMAs of zeros (wmma, that is mma.sync), {dtype} in, float32 out, from registers",
            defines={"CHAINS": _CHAINS, "UNROLL": _UNROLL, "ELEMENT": ELEMENTS[dtype]},
        )
        for dtype in DTYPES
    },
    **{f"tensor_{dtype}": partial(_matmul, dtype) for dtype in DTYPES},
}
"""Every ceiling: (device, stream) -> workload. `tensor_*` is the compute roof of the newest tensor-core instructions
(cuBLAS uses them); `mma_sync_*` that of the warp-level ones, which is all that the stages before wgmma can reach."""


def require(names: Iterable[str]) -> list[str]:
    """Those names.

    Raises:
        ParameterError: one is no ceiling.
    """
    for name in (named := list(names)):
        if name not in CEILINGS:
            raise ParameterError(f"ceiling: wanted one of {', '.join(CEILINGS)}, got {name!r}")
    return named


def measure(name: str, timer: Timer, device: int, stream: int) -> dict[str, Any]:
    """Measure a ceiling in bursts: the fields of a `schema.Ceiling` but its header and kind.

    Raises:
        MissingPackageError, LaunchError, CompileError, ImportError: as the workload's building or running raises.
    """
    workload = CEILINGS[name](device, stream)
    taken = timer.burst({name: workload.run}, samples=20)[name]
    value = value_of(workload.amount, workload.unit, taken.median_us)
    return {"name": name, "unit": workload.unit, "value": value, "how": workload.how, "samples": taken}
