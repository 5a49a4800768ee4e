"""The public call: `attention(q, k, v)` on the caller's arrays and stream, by the best stage the GPU runs.

Validation (`plan`) is a pure function of array descriptions, so that every refusal is tested without a GPU; `prepare`
compiles and loads what a plan needs and gives a callable that only enqueues, which is what gets timed.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashlab import gpu, stages
from flashlab.errors import DeviceError, DTypeError, InputError, LayoutError, ParameterError, ShapeError
from flashlab.gpu import DeviceArray
from flashlab.problem import BYTES_PER_ELEMENT, DTYPES, DType, Problem
from flashlab.stages import Stage

if TYPE_CHECKING:
    from flashlab.compiler import Cubin, LaunchShape

ROW_ALIGNMENT_BYTES = 16
"""What ALIGNED=1 promises a kernel of every row's address: the width of its widest access."""
_MAX_GRID_YZ = 65535
_MAX_LENGTH = 2**31 - 1


class TensorView(ctypes.Structure):
    """kernels/common/attention.cuh, `TensorView`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("row_stride", ctypes.c_longlong),
    )


class AttentionParams(ctypes.Structure):
    """kernels/common/attention.cuh, `AttentionParams`, field by field."""

    _fields_ = (
        ("Q", TensorView),
        ("K", TensorView),
        ("V", TensorView),
        ("O", TensorView),
        ("LSE", ctypes.c_void_p),
        ("q_heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("q_len", ctypes.c_int),
        ("kv_len", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A call found sound: what to compile and what to tell the kernel."""

    problem: Problem
    stage: Stage
    scale: float
    aligned: bool
    """Every row of Q, K, V and O starts on a 16-byte boundary."""
    device: int


def _extent(array: DeviceArray) -> tuple[int, int]:
    """First and one past the last byte that an array touches."""
    steps = [stride * (length - 1) for length, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0) + 1
    return array.pointer + low * BYTES_PER_ELEMENT, array.pointer + high * BYTES_PER_ELEMENT


def _aligned(array: DeviceArray) -> bool:
    strides = [stride for length, stride in zip(array.shape[:3], array.strides[:3], strict=True) if length > 1]
    return array.pointer % ROW_ALIGNMENT_BYTES == 0 and all(
        stride * BYTES_PER_ELEMENT % ROW_ALIGNMENT_BYTES == 0 for stride in strides
    )


def _overlaps_itself(array: DeviceArray) -> bool:
    """Whether two elements may share an address: strides, smallest first, must each step over all that lies below."""
    reach = 0
    for stride, length in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def _problem(q: DeviceArray, k: DeviceArray, v: DeviceArray, causal: bool) -> Problem:
    want = "wanted 4 dimensions (batch, heads, length, head_dim)"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            raise ShapeError(f"{name}: {want}, got shape {array.shape}")
        if 0 in array.shape:
            raise ShapeError(
                f"{name}: wanted at least one element in every dimension, got shape {array.shape}; "
                "attention over no keys or no queries has no value"
            )
        if max(array.shape) > _MAX_LENGTH:
            raise ShapeError(f"{name}: wanted dimensions below 2^31, got shape {array.shape}")
    batch, q_heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    if k.shape != v.shape:
        raise ShapeError(f"v: wanted the shape of k, {k.shape}, got {v.shape}")
    if k.shape[0] != batch:
        raise ShapeError(f"k: wanted the batch of q, {batch}, got {k.shape[0]}")
    if k.shape[3] != head_dim:
        raise ShapeError(f"k: wanted the head dim of q, {head_dim}, got {k.shape[3]}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype not in DTYPES:
            raise DTypeError(
                f"{name}: wanted {' or '.join(DTYPES)}, got {array.dtype}. "
                f"Converting it, for example `{name}.half()`, works."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"wanted q, k and v of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, heads in (("batch", batch), ("heads", q_heads)):
        if heads > _MAX_GRID_YZ:
            raise ShapeError(
                f"q: wanted at most {_MAX_GRID_YZ} as {name} (a CUDA grid's limit), got {heads}; split the call"
            )
    return Problem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        dtype=cast(DType, q.dtype),
        mask="causal" if causal else "full",
    )


def _check_out(out: DeviceArray, q: DeviceArray, inputs: tuple[tuple[str, DeviceArray], ...]) -> None:
    if out.shape != q.shape:
        raise ShapeError(f"out: wanted the shape of q, {q.shape}, got {out.shape}")
    if out.dtype != q.dtype:
        raise DTypeError(f"out: wanted the type of q, {q.dtype}, got {out.dtype}")
    if out.readonly:
        raise LayoutError("out: wanted memory that may be written, got a read-only array")
    if _overlaps_itself(out):
        raise LayoutError(
            f"out: wanted an address of its own for every element, got strides {out.strides} over shape {out.shape}; "
            "an expanded or overlapping view cannot be written"
        )
    low, high = _extent(out)
    for name, array in inputs:
        other_low, other_high = _extent(array)
        if low < other_high and other_low < high:
            raise LayoutError(
                f"out: wanted memory apart from {name}, got memory that overlaps it; a separate tensor works"
            )


def _check_lse(lse: DeviceArray, q: DeviceArray) -> None:
    if lse.shape != q.shape[:3]:
        raise ShapeError(f"lse: wanted (batch, q_heads, q_len), {q.shape[:3]}, got {lse.shape}")
    if lse.dtype != "float32":
        raise DTypeError(f"lse: wanted float32, got {lse.dtype}")
    if lse.device != q.device:
        raise DeviceError(f"lse: wanted the device of q, GPU {q.device}, got GPU {lse.device}")
    expected = gpu.contiguous_strides(lse.shape)
    if any(n > 1 and a != b for n, a, b in zip(lse.shape, lse.strides, expected, strict=True)):
        raise LayoutError(f"lse: wanted a contiguous array, got strides {lse.strides} over shape {lse.shape}")


def plan(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    *,
    arch: str,
    out: DeviceArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
) -> Plan:
    """What a call would run, once its arguments are found sound. Needs no GPU. `out` None means an aligned new tensor.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ParameterError, UnknownStageError: the arguments are off.
        UnsupportedError: no stage, or not the named one, runs this problem on `arch`.
    """
    if not isinstance(causal, bool):
        raise ParameterError(f"causal: wanted True or False, got {causal!r}")
    chosen = None if stage is None else stages.get(stage)
    inputs = (("q", q), ("k", k), ("v", v))
    problem = _problem(q, k, v, causal)
    for name, array in (*inputs, *([("out", out)] if out is not None else [])):
        if array.device != q.device:
            raise DeviceError(
                f"{name}: wanted the device of q, GPU {q.device}, got GPU {array.device}. Moving one of them works."
            )
        if len(array.shape) == 4 and array.strides[3] != 1 and array.shape[3] > 1:
            raise LayoutError(
                f"{name}: wanted a contiguous last dimension, got strides {array.strides} (elements); the others "
                f"may be anything. `{name}.contiguous()` (torch) or `cupy.ascontiguousarray({name})` makes one."
            )
        if array.pointer % BYTES_PER_ELEMENT:
            raise LayoutError(
                f"{name}: wanted an address that is a multiple of {BYTES_PER_ELEMENT}, got {array.pointer:#x}"
            )
    if out is not None:
        _check_out(out, q, inputs)
    if scale is None:
        scale = problem.head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ParameterError(f"scale: wanted a finite number, or None for 1/sqrt(head_dim), got {scale!r}")
    if chosen is None:
        chosen = stages.best(problem, arch)
    chosen.require(problem, arch)
    return Plan(
        problem=problem,
        stage=chosen,
        scale=float(scale),
        aligned=all(_aligned(array) for array in (q, k, v, *([out] if out is not None else []))),
        device=q.device,
    )


def params_for(
    found: Plan, q: DeviceArray, k: DeviceArray, v: DeviceArray, out: DeviceArray, lse_pointer: int | None
) -> AttentionParams:
    """The kernel's argument."""
    views = [TensorView(a.pointer, *a.strides[:3]) for a in (q, k, v, out)]
    problem = found.problem
    return AttentionParams(
        *views,
        lse_pointer,
        problem.q_heads,
        problem.kv_heads,
        problem.q_len,
        problem.kv_len,
        found.scale * math.log2(math.e),
    )


def grid_for(problem: Problem, shape: LaunchShape) -> tuple[int, int, int]:
    """Blocks: query tiles, query heads, batch."""
    return (-(-problem.q_len // shape.tile_q), problem.q_heads, problem.batch)


@lru_cache(maxsize=512)
def _compiled(
    stage_id: str,
    head_dim: int,
    dtype: DType,
    causal: bool,
    arch: str,
    aligned: bool,
    overrides: tuple[tuple[str, int], ...],
    source: Path | None,
    modified_ns: int,
) -> Cubin:
    from flashlab.compiler import compile_stage

    return compile_stage(
        stages.get(stage_id),
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        arch=arch,
        aligned=aligned,
        overrides=dict(overrides),
        source=source,
    )


def cubin_for(
    found: Plan, arch: str, *, overrides: Mapping[str, int] | None = None, source: Path | None = None
) -> Cubin:
    """The machine code of a plan, compiled once a process for each file as it stands."""
    problem = found.problem
    return _compiled(
        found.stage.id,
        problem.head_dim,
        problem.dtype,
        problem.causal,
        arch,
        found.aligned,
        tuple(sorted((overrides or {}).items())),
        source,
        (source or found.stage.source).stat().st_mtime_ns,
    )


class Prepared:
    """A validated, compiled, loaded call: calling it enqueues the kernel and returns at once.

    Holds its arrays; `out` and `lse` are the caller's library's.
    """

    __slots__ = ("_keep", "_launch", "cubin", "function", "launch_shape", "lse", "out", "plan")

    def __init__(
        self,
        *,
        plan: Plan,
        cubin: Cubin,
        function: gpu.Function,
        launch: gpu.Launch,
        out: Any,
        lse: Any,
        keep: tuple[Any, ...],
    ) -> None:
        assert cubin.launch_shape is not None
        self.plan = plan
        self.cubin = cubin
        self.function = function
        self.launch_shape = cubin.launch_shape
        self.out = out
        self.lse = lse
        self._launch = launch
        self._keep = keep

    def __call__(self) -> None:
        """Enqueue once. The device's context must be current (torch and CuPy see to it on their current device)."""
        self._launch()

    def blocks_per_sm(self) -> int:
        """Blocks resident on an SM."""
        return gpu.blocks_per_sm(self.function, self.launch_shape.threads, self.launch_shape.smem_bytes)


def _refuse_gradients(*arrays: tuple[str, Any]) -> None:
    for name, array in arrays:
        wanted = gpu.library_of(array) == "torch" and getattr(array, "requires_grad", False)
        if wanted and importlib.import_module("torch").is_grad_enabled():
            raise InputError(
                f"{name}: wanted a tensor that needs no gradient, got requires_grad=True: there is no backward pass, "
                "and the gradient would silently be lost. Under `torch.no_grad()`, or with "
                f"`{name}.detach()`, it works."
            )


def _new(like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
    """A new array of the caller's library beside `like`; `dtype` None means that of `like`."""
    library = gpu.library_of(like)
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        # CuPy's pool hands memory back to the stream that allocated it, so allocate on the one that will write it.
        # ExternalStream is deprecated for Stream.from_external, but what that returns destroys the stream when it is
        # collected, and this one is the caller's.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            callers = cupy.cuda.ExternalStream(stream)
        with like.device, callers:
            return cupy.empty(shape, dtype=like.dtype if dtype is None else dtype)
    raise ParameterError(
        "out and return_lse: wanted torch or CuPy arrays, whose library can make a new one, got "
        f"{type(like).__name__}. Pass `out=`, and leave return_lse False."
    )


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    lse: Any | None = None,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
    source: Path | None = None,
) -> Prepared:
    """`attention`, validated, compiled and loaded, but not launched: for repeated calls and for timing.

    `lse` is where to write the log-sum-exp, contiguous float32 (batch, q_heads, q_len); a new array where None and
    `return_lse`. `source` compiles an edited copy of the stage's file instead. The stream is fixed here.

    Raises:
        What `attention` raises.
    """
    gpu.require()
    library = gpu.library_of(q)
    _refuse_gradients(("q", q), ("k", k), ("v", v), ("out", out))
    explicit = None if stream is None else gpu.stream_handle(stream)
    # Only torch and CuPy have a current stream, which depends on the device; any other library's arrays are ordered
    # before the default stream.
    first = gpu.as_device_array(q, "q", 0 if explicit is None and library == "other" else explicit)
    handle = gpu.current_stream(library, first.device) if explicit is None else explicit
    second, third = gpu.as_device_array(k, "k", handle), gpu.as_device_array(v, "v", handle)
    target = None if out is None else gpu.as_device_array(out, "out", handle)
    arch = gpu.info(first.device).arch
    found = plan(first, second, third, arch=arch, out=target, causal=causal, scale=scale, stage=stage)
    if target is None:
        out = _new(q, first.shape, None, handle)
        target = gpu.as_device_array(out, "out", handle)
    if lse is None and return_lse:
        lse = _new(q, first.shape[:3], "float32", handle)
    lse_view = None if lse is None else gpu.as_device_array(lse, "lse", handle)
    if lse_view is not None:
        _check_lse(lse_view, first)
    cubin = cubin_for(found, arch, overrides=params, source=source)
    assert cubin.launch_shape is not None
    function = gpu.load(cubin, found.device)
    arguments = params_for(found, first, second, third, target, None if lse_view is None else lse_view.pointer)
    launch = gpu.Launch(
        function,
        grid=grid_for(found.problem, cubin.launch_shape),
        block=(cubin.launch_shape.threads, 1, 1),
        smem_bytes=cubin.launch_shape.smem_bytes,
        params=arguments,
        stream=handle,
    )
    return Prepared(
        plan=found,
        cubin=cubin,
        function=function,
        launch=launch,
        out=out,
        lse=lse,
        keep=(first, second, third, target, lse_view, stream),
    )


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
) -> Any:
    """softmax(scale · Q Kᵀ) V on the GPU, enqueued on the caller's stream; no copies, no synchronisation.

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16, on a CUDA GPU: a torch tensor, a CuPy array, or
            anything with DLPack or `__cuda_array_interface__`. Any strides, the last dimension contiguous.
        k: (batch, kv_heads, kv_len, head_dim); kv_heads divides q_heads (grouped-query attention).
        v: as `k`.
        causal: query i sees key j when j - i ≤ kv_len - q_len (aligned bottom right). A query that sees none gets 0.
        scale: finite; 1/sqrt(head_dim) where None.
        stage: a stage's id; the last rung of the ladder that runs this on this GPU where None.
        out: where to write, like `q`; a new contiguous array of the caller's library where None.
        return_lse: also return the log-sum-exp of the scores (natural log, float32, -inf where a query sees no key).
        stream: an integer or a stream object; the library's current stream on that device where None. With another
            stream than the current one, keeping the arrays alive until it is done is the caller's part.
        params: the stage's tunables, by name, where not the defaults.

    Returns:
        The output, or (output, lse).

    Raises:
        InputError: arguments are off (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, runs this here.
        NoGpuError, MissingPackageError, CompileError, LaunchError: as they say.
    """
    prepared = prepare(
        q, k, v, causal=causal, scale=scale, stage=stage, out=out, return_lse=return_lse, stream=stream, params=params
    )
    with gpu.context(prepared.plan.device):
        prepared()
    return (prepared.out, prepared.lse) if return_lse else prepared.out
