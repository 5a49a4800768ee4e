"""The public call: `attention(q, k, v)` on the caller's arrays and stream, by the stage that suits the problem.

Validation (`plan`) is a pure function of array descriptions, so that every refusal is tested without a GPU; `prepare`
compiles and loads what a plan needs and gives a callable that only enqueues, which is what gets timed. Arrays in host
memory run on the CPU: `emulate`, which also says what the kernel did wrong.

All that does not depend on addresses (the checks, the choice, the machine code, the grid, the strides) is done once for
a layout and kept as a `_Recipe`; a call with the same layout fills in addresses, tensor maps and counters. Nothing that
a kernel is told is shared between calls, so that threads and streams need no lock.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import numbers
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashlab.build import compiler, triton_code
from flashlab.build.sources import Stamps, included, read, stamps
from flashlab.core.errors import (
    DeviceError,
    DTypeError,
    EmulationError,
    InputError,
    LayoutError,
    ParameterError,
    ShapeError,
    TooLargeError,
    UnsupportedError,
)
from flashlab.core.problem import BYTES_PER_ELEMENT, DTYPES, DType, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.record.checks import Fallbacks as Fallbacks
from flashlab.run import choice, emulator, gpu
from flashlab.run.gpu import DeviceArray
from flashlab.run.tensor_map import DATA_TYPES, MAP_BYTES, MAX_STRIDE_BYTES, SWIZZLE_128B, TensorMap

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin, LaunchShape

ROW_ALIGNMENT_BYTES = 16
"""What ALIGNED=1 promises a kernel of every row's address: its widest access, and what tensor maps want."""
PANEL = 64
"""Elements of a row in one panel of a tile: 128 bytes, the widest swizzle."""
WARP_ROWS = 16
"""Rows of a copy of O: a warp's, as kernels/common/hopper.cuh has it."""
CPU_RESIDENT_BLOCKS = 3
"""The grid of a persistent kernel on a CPU: few, so that each takes several tiles."""
_MAX_GRID_YZ = 65535
_MAX_LENGTH = 2**31 - 1
HOST = -1
"""`DeviceArray.device` of an array in host memory."""
DEVICES = ("cpu", "gpu", "cuda")
_SMALL_FLOPS = 1e9
"""Up to here a CPU is not asked how long it will take."""
_ASSUMED_FLOPS_PER_S = 2e8
"""What a core is taken to do where not even a block's time can be taken first."""
_HOOKS_COST = 10.0
"""How many times longer a kernel is taken to run with hooks."""
_CLEARLY = 20.0
"""How many times over its limit a problem must be for the assumption to be enough."""
_MAX_RECIPES = 1024
_MAX_MAPS = 256
"""Addresses of one array whose tensor maps a recipe keeps: an allocator hands out the same ones again and again."""
_TRIAL_S = 5.0
"""How long running a few blocks, to say how long all would take, may itself take."""


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
        ("batch", ctypes.c_int),
        ("work", ctypes.c_void_p),
        ("fallbacks", ctypes.c_void_p),
    )


class AttentionMaps(ctypes.Structure):
    """kernels/common/hopper.cuh, `AttentionMaps`."""

    _fields_ = tuple((name, ctypes.c_ubyte * MAP_BYTES) for name in "QKVO")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A call found sound: what to compile and what to tell the kernel."""

    problem: Problem
    stage: Stage
    scale: float
    why_slow: str
    """Why rows go element by element, which is slower: the first array that the fast path cannot take. Empty where it
    takes all: every row of Q, K, V and O starts on a 16-byte boundary, and where the stage takes tensor maps, they can
    describe all four. An expanded K or V, of stride 0, is one that they cannot."""
    device: int
    """CUDA device index, or `HOST`."""

    @property
    def aligned(self) -> bool:
        """Whether the kernel is the one for aligned rows, which is fast."""
        return not self.why_slow


def _device_name(device: int) -> str:
    return "host memory" if device == HOST else f"GPU {device}"


def _extent(array: DeviceArray) -> tuple[int, int]:
    """First and one past the last byte that an array touches."""
    steps = [stride * (length - 1) for length, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0) + 1
    return array.pointer + low * BYTES_PER_ELEMENT, array.pointer + high * BYTES_PER_ELEMENT


def _why_slow(name: str, array: DeviceArray, *, tensor_maps: bool) -> str:
    """Why rows of an array cannot be read 16 bytes at a time, or by tensor maps; empty where they can."""
    if array.pointer % ROW_ALIGNMENT_BYTES:
        return f"{name} starts at {array.pointer:#x}, no multiple of {ROW_ALIGNMENT_BYTES} bytes"
    for of, length, stride in zip(("batch", "head", "row"), array.shape, array.strides, strict=False):
        stride_bytes = stride * BYTES_PER_ELEMENT
        if length == 1:
            continue
        if stride_bytes % ROW_ALIGNMENT_BYTES:
            return f"{name} has a {of} stride of {stride_bytes} bytes, no multiple of {ROW_ALIGNMENT_BYTES}"
        if tensor_maps and not 0 < stride_bytes < MAX_STRIDE_BYTES:
            instead = " Shared heads are fast as fewer kv_heads." if stride == 0 and of == "head" else ""
            return (
                f"{name} has a {of} stride of {stride_bytes} bytes, and tensor maps take 1 to {MAX_STRIDE_BYTES - 1}; "
                f"a contiguous copy works.{instead}"
            )
    return ""


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
    _refuse_overlap(out, inputs)


def _refuse_overlap(out: DeviceArray, inputs: tuple[tuple[str, DeviceArray], ...]) -> None:
    """The one check of `plan` that two addresses decide together."""
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
        raise DeviceError(f"lse: wanted the device of q, {_device_name(q.device)}, got {_device_name(lse.device)}")
    expected = gpu.contiguous_strides(lse.shape)
    if any(n > 1 and a != b for n, a, b in zip(lse.shape, lse.strides, expected, strict=True)):
        raise LayoutError(f"lse: wanted a contiguous array, got strides {lse.strides} over shape {lse.shape}")


def plan(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    *,
    arch: str | None,
    out: DeviceArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
    slug: str | None = None,
    sm_count: int | None = None,
) -> Plan:
    """What a call would run, once its arguments are found sound. Needs no GPU. `out` None means an aligned new tensor.

    `arch` None is a CPU, which runs every stage. Where no stage is named, `slug`, a GPU's folder under data/, and its
    `sm_count` let the records choose (tuned.py); the last rung that runs the problem without them.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ParameterError, UnknownStageError: the arguments are off.
        UnsupportedError: no stage, or not the named one, runs this problem on `arch`.
    """
    if not isinstance(causal, bool):
        raise ParameterError(f"causal: wanted True or False, got {causal!r}")
    chosen = None if stage is None else registry.get(stage)
    inputs = (("q", q), ("k", k), ("v", v))
    problem = _problem(q, k, v, causal)
    for name, array in (*inputs, *([("out", out)] if out is not None else [])):
        if array.device != q.device:
            raise DeviceError(
                f"{name}: wanted the device of q, {_device_name(q.device)}, got {_device_name(array.device)}. "
                "Moving one of them works."
            )
        if len(array.shape) == 4 and array.strides[3] != 1 and array.shape[3] > 1:
            raise LayoutError(
                f"{name}: wanted a contiguous last dimension, got strides {array.strides} (elements); the others may "
                f"be anything. `{name}.contiguous()` (torch) or `ascontiguousarray({name})` (NumPy, CuPy) makes one."
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
        if arch is None or slug is None:
            chosen = registry.best(problem, arch)
        else:
            chosen = choice.stage_for(problem, slug, arch, sm_count)
    chosen.require(problem, arch)
    arrays = (*inputs, *([("out", out)] if out is not None else []))
    reasons = (_why_slow(name, array, tensor_maps=chosen.tensor_maps) for name, array in arrays)
    return Plan(
        problem=problem,
        stage=chosen,
        scale=float(scale),
        why_slow=next(filter(None, reasons), ""),
        device=q.device,
    )


def params_for(
    found: Plan,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    out: DeviceArray,
    lse_pointer: int | None,
    work_pointer: int | None = None,
    fallbacks_pointer: int | None = None,
) -> AttentionParams:
    """The kernel's first argument."""
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
        problem.batch,
        work_pointer,
        fallbacks_pointer,
    )


def tile_map(array: DeviceArray, dtype: DType, rows: int, panels: int = 0) -> TensorMap:
    """A tensor map whose box is `rows` rows of one head, as kernels/common/hopper.cuh describes it; `panels` 0: all."""
    batch, heads, length, head_dim = array.shape
    panel_bytes = PANEL * BYTES_PER_ELEMENT
    # Nothing is ever `stride` away in a dimension of one, whose stride may be anything: the map wants a sound one.
    batch_stride, head_stride, row_stride = (
        stride * BYTES_PER_ELEMENT if n > 1 else panel_bytes
        for n, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )
    return TensorMap(
        data_type=DATA_TYPES[dtype],
        dims=(PANEL, length, head_dim // PANEL, heads, batch),
        strides=(row_stride, panel_bytes, head_stride, batch_stride),
        box=(PANEL, rows, panels or head_dim // PANEL, 1, 1),
        swizzle=SWIZZLE_128B,
        l2_promotion="L2_128B",
    )


def tile_maps(found: Plan, shape: LaunchShape, arrays: Mapping[str, DeviceArray]) -> dict[str, TensorMap]:
    """The tensor maps of Q, K, V and O; none where they cannot describe them, or the kernel takes none."""
    if not (found.aligned and found.stage.tensor_maps):
        return {}
    maps = {}
    for name, array in arrays.items():
        rows = {"Q": shape.box_q, "O": WARP_ROWS}.get(name, shape.box_kv)
        panels = shape.panels_kv if name in ("K", "V") else 0
        maps[name] = tile_map(array, found.problem.dtype, rows, panels)
    return maps


def maps_for(encoded: Mapping[str, bytes]) -> AttentionMaps:
    """The second argument of a kernel that takes tensor maps, of Q, K, V, O; zeros where there are none."""
    maps = AttentionMaps()
    for name, code in encoded.items():
        ctypes.memmove(ctypes.addressof(maps) + getattr(AttentionMaps, name).offset, code, MAP_BYTES)
    return maps


def triton_arguments(params: AttentionParams) -> dict[str, int | float]:
    """The arguments of a kernel in Triton, by the names of `triton_code.ARGUMENTS`; null pointers are 0."""
    views = {name: getattr(params, name) for name in "QKVO"}
    strides = {
        f"{name}_{step}": int(getattr(view, f"{step}_stride"))
        for name, view in views.items()
        for step in ("batch", "head", "row")
    }
    sizes = {name: int(getattr(params, name)) for name in ("q_heads", "kv_heads", "q_len", "kv_len")}
    pointers = {name: int(view.data or 0) for name, view in views.items()} | {"LSE": int(params.LSE or 0)}
    return {**pointers, **strides, **sizes, "wants_lse": int(bool(params.LSE)), "scale_log2": float(params.scale_log2)}


_TRITON_TYPES: Mapping[str, Any] = {"i64": ctypes.c_longlong, "i32": ctypes.c_int, "fp32": ctypes.c_float}


def _triton_parameters(params: AttentionParams) -> list[Any]:
    values = triton_arguments(params)
    of_type = {name: _TRITON_TYPES.get(kind, ctypes.c_void_p) for name, kind in triton_code.ARGUMENTS.items()}
    hidden = [ctypes.c_void_p() for _ in range(triton_code.HIDDEN_POINTERS)]
    return [*(kind(values[name]) for name, kind in of_type.items()), *hidden]


def _runner(stage: Stage) -> Any:
    """The module of `Stage.runner`; None where the core launches the stage by itself.

    It has one or more of these, whose docstrings say what they take: `Passes` enqueues the stage's kernel among others
    on a GPU, and `EmulatedPasses` does on a CPU; `interpreted` and `interpret` run the stage on a CPU where the
    emulator cannot.
    """
    return None if stage.runner is None else importlib.import_module(stage.runner)


def grid_for(problem: Problem, shape: LaunchShape, resident_blocks: int = CPU_RESIDENT_BLOCKS) -> tuple[int, int, int]:
    """Blocks: query tiles, query heads, batch; of a persistent kernel no more than are resident at once.

    Whole clusters, at least one.
    """
    cluster = max(1, shape.cluster)
    clusters = -(-problem.q_len // (shape.tile_q * cluster))  # a head
    if shape.persistent:
        resident = max(1, resident_blocks // cluster)
        return (min(clusters * problem.q_heads * problem.batch, resident) * cluster, 1, 1)
    return (clusters * cluster, problem.q_heads, problem.batch)


class Prepared:
    """A validated, compiled, loaded call: calling it enqueues the kernel and returns at once.

    Holds its arrays; `out` and `lse` are the caller's library's. Calls are ordered by the stream, and share the
    counters of a persistent kernel.
    """

    __slots__ = ("_fallbacks", "_keep", "_launch", "cubin", "function", "launch_shape", "lse", "out", "plan")

    def __init__(
        self,
        *,
        plan: Plan,
        cubin: Cubin,
        function: gpu.Function,
        launch: Callable[[], None],
        out: Any,
        lse: Any,
        keep: tuple[Any, ...],
        fallbacks: gpu.Zeroed | None = None,
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
        self._fallbacks = fallbacks

    def __call__(self) -> None:
        """Enqueue once. The device's context must be current (torch and CuPy see to it on their current device)."""
        self._launch()

    def fallbacks(self) -> Fallbacks | None:
        """What all calls so far counted, once they are done; None where `prepare` was not asked to count."""
        if self._fallbacks is None:
            return None
        return Fallbacks(*memoryview(self._fallbacks.read()).cast("I"))

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


def _cupy_stream(stream: int) -> Any:
    """The caller's stream for CuPy, whose pool hands memory back to the stream that allocated it."""
    # ExternalStream is deprecated for Stream.from_external, but what that returns destroys the stream when it is
    # collected, and this one is the caller's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("cupy").cuda.ExternalStream(stream)


def _torch_stream(stream: int, device: Any) -> Any:
    """A context in which the caller's stream is torch's current one on a device."""
    cuda = importlib.import_module("torch").cuda
    if cuda.current_stream(device).cuda_stream == stream:
        return nullcontext()
    # To ExternalStream, 0 is not the default stream but the wish for a new one.
    return cuda.stream(cuda.ExternalStream(stream, device) if stream else cuda.default_stream(device))


def _new(like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
    """A new array of the caller's library beside `like`; `dtype` None means that of `like`."""
    library = gpu.library_of(like)
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        with like.device, _cupy_stream(stream):
            return cupy.empty(shape, dtype=like.dtype if dtype is None else dtype)
    raise ParameterError(
        "out and return_lse: wanted torch or CuPy arrays, whose library can make a new one, got "
        f"{type(like).__name__}. Pass `out=`, and leave return_lse False."
    )


_FALLBACKS_BYTES = len(Fallbacks._fields) * ctypes.sizeof(ctypes.c_uint)
_COUNTERS = 2
"""Unsigned integers that a persistent kernel counts its work in."""


def _new_counters(like: Any, device: int, stream: int) -> tuple[Any, int]:
    """A persistent kernel's counters, zero to whatever runs on `stream` after this, and their address.

    The caller's library allocates them on that stream: it hands the memory on when the stream has done with it, so that
    giving them up waits for nothing.
    """
    library = gpu.library_of(like)
    if library == "torch":
        torch = importlib.import_module("torch")
        with _torch_stream(stream, like.device):
            counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=like.device)
        return counters, int(counters.data_ptr())
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        with like.device, _cupy_stream(stream):
            counters = cupy.zeros(_COUNTERS, dtype="uint32")
        return counters, int(counters.data.ptr)
    zeroed = gpu.Zeroed(device, _COUNTERS * ctypes.sizeof(ctypes.c_uint), stream)
    return zeroed, zeroed.pointer


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """All of a call that the addresses of its arrays do not decide."""

    plan: Plan
    cubin: Cubin
    shape: LaunchShape
    function: gpu.Function
    parameters: Mapping[str, int]
    grid: tuple[int, int, int]
    params: AttentionParams
    """The kernel's first argument, whose addresses count for nothing."""
    encoders: Mapping[str, Callable[[int], bytes]]
    """Of those of Q, K, V, O that have a tensor map: their address to the map."""
    sources: Stamps
    """Of the file that was compiled and the headers that it includes."""

    def stands(self) -> bool:
        """Whether the sources are what they were."""
        try:
            return stamps(path for path, *_ in self.sources) == self.sources
        except FileNotFoundError:
            return False


_recipes: dict[tuple[Any, ...], _Recipe] = {}


def _layout(array: DeviceArray | None) -> tuple[Any, ...] | None:
    """What `plan` and a recipe take from an array."""
    if array is None:
        return None
    at = array.pointer % ROW_ALIGNMENT_BYTES
    return (array.shape, array.strides, array.dtype, array.device, at, array.readonly)


def _encoder(tensor_map: TensorMap, device: int) -> Callable[[int], bytes]:
    @lru_cache(maxsize=_MAX_MAPS)
    def encode(address: int) -> bytes:
        with gpu.context(device):
            return tensor_map.encoded(address)

    return encode


def _recipe(
    first: DeviceArray,
    second: DeviceArray,
    third: DeviceArray,
    out: DeviceArray | None,
    *,
    causal: bool,
    scale: float | None,
    stage: str | None,
    params: Mapping[str, int] | None,
    source: Path | None,
    may_spill: bool,
) -> _Recipe:
    """What `prepare` needs for arrays of that layout, made at the first such call.

    Raises:
        What `plan` raises, and what compiling and loading do.
    """
    there = gpu.info(first.device)
    options = (causal, scale, stage, source, may_spill, tuple(sorted((params or {}).items())))
    # 1, 1.0 and True are one key, and one of them is no scale.
    kinds = (type(causal), type(scale))
    key = (*map(_layout, (first, second, third, out)), *options, *kinds, there.slug, choice.stamp(there.slug))
    try:
        kept = _recipes.get(key)
    except TypeError:  # an option that cannot be part of a key is one that `plan` refuses
        kept = None
    if kept is not None and kept.stands():
        if out is not None:
            _refuse_overlap(out, (("q", first), ("k", second), ("v", third)))
        return kept
    arch = there.arch
    found = plan(
        first,
        second,
        third,
        arch=arch,
        out=out,
        causal=causal,
        scale=scale,
        stage=stage,
        slug=there.slug,
        sm_count=there.sm_count,
    )
    problem = found.problem
    if stage is None:
        _tell_of_kin(there.slug, arch)
    chosen = choice.parameters(found.stage, there.slug, problem, arch=arch, overrides=params)
    file = source or found.stage.source
    headers = included(file, read(file, "CUDA C++"), [compiler.COMMON])
    sources = stamps([file, *headers])  # before they are read to be compiled
    cubin = compiler.compile_stage(
        found.stage,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        causal=problem.causal,
        arch=arch,
        aligned=found.aligned,
        overrides=chosen,
        source=source,
        may_spill=may_spill,
    )
    shape = cubin.launch_shape
    assert shape is not None
    function = gpu.load(cubin, found.device)
    resident = 1
    if shape.persistent:
        blocks = gpu.blocks_per_sm(function, shape.threads, shape.smem_bytes)
        resident = max(1, there.sm_count * blocks)
    # A new output is contiguous.
    target = out or replace(first, strides=gpu.contiguous_strides(first.shape))
    views = {"Q": first, "K": second, "V": third, "O": target}
    made = _Recipe(
        plan=found,
        cubin=cubin,
        shape=shape,
        function=function,
        parameters=chosen,
        grid=grid_for(problem, shape, resident),
        params=params_for(found, first, second, third, target, None),
        encoders={name: _encoder(one, found.device) for name, one in tile_maps(found, shape, views).items()},
        sources=sources,
    )
    if len(_recipes) >= _MAX_RECIPES:
        _recipes.clear()
    _recipes[key] = made
    return made


@lru_cache(maxsize=16)
def _tell_of_kin(slug: str, arch: str) -> None:
    """Log, once a process, that another GPU's records choose the stages here."""
    table = choice.table_for(slug, arch)
    if table is not None and table.gpu != slug:
        logging.getLogger(__name__).warning(
            "%s has no records of its own: stages are chosen by those of %s, its nearest kin. `flashlab tune` and "
            "`flashlab tuned` make some.",
            slug,
            table.gpu,
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
    may_spill: bool = False,
    count_fallbacks: bool = False,
) -> Prepared:
    """`attention` on a GPU, validated, compiled and loaded, but not launched: for repeated calls and for timing.

    Calling what this returns enqueues the kernel once and returns at once; it reads and writes the same memory at each
    call, on the stream that was fixed here. The device's context must be current, as torch and CuPy keep it for their
    current device. Two threads may call two of them at once, and one of them in turn.

    Args:
        q, k, v, causal, scale, stage, out, return_lse, stream, params: as `attention` takes them, on a GPU.
        lse: where to write the log-sum-exp, contiguous float32 (batch, q_heads, q_len); a new array where None and
            `return_lse`.
        source: an edited copy of the stage's file, compiled in place of it.
        may_spill: let registers spill where the stage forbids it.
        count_fallbacks: make the calls count how often the kernel fell back (`Prepared.fallbacks`).

    Returns:
        A callable that holds its arrays; `out` and `lse` are the output and, where asked for, the log-sum-exp, of the
        caller's library; `plan.stage` is the stage, `cubin.parameters` its tunables.

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
    recipe = _recipe(
        first,
        second,
        third,
        target,
        causal=causal,
        scale=scale,
        stage=stage,
        params=params,
        source=source,
        may_spill=may_spill,
    )
    found, shape, function = recipe.plan, recipe.shape, recipe.function
    if target is None:
        out = _new(q, first.shape, None, handle)
        target = gpu.as_device_array(out, "out", handle)
    if lse is None and return_lse:
        lse = _new(q, first.shape[:3], "float32", handle)
    lse_view = None if lse is None else gpu.as_device_array(lse, "lse", handle)
    if lse_view is not None:
        _check_lse(lse_view, first)
    views = {"Q": first, "K": second, "V": third, "O": target}
    lse_pointer = None if lse_view is None else lse_view.pointer
    counters, work_pointer = _new_counters(q, found.device, handle) if shape.persistent else (None, None)
    fallbacks = gpu.Zeroed(found.device, _FALLBACKS_BYTES, handle) if count_fallbacks else None
    launch: Callable[[], None]
    runner = _runner(found.stage)
    if hasattr(runner, "Passes"):
        launch = runner.Passes(
            found.problem,
            views,
            lse_pointer=lse_pointer,
            scale_log2=found.scale * math.log2(math.e),
            parameters=found.stage.parameters(found.problem.head_dim, recipe.parameters),
            function=function,
            shape=shape,
            device=found.device,
            stream=handle,
        )
    else:
        told = AttentionParams.from_buffer_copy(recipe.params)
        for name, view in views.items():
            getattr(told, name).data = view.pointer
        told.LSE, told.work = lse_pointer, work_pointer
        told.fallbacks = fallbacks.pointer if fallbacks else None
        arguments = _triton_parameters(told) if found.stage.language == "triton" else [told]
        if found.stage.tensor_maps:
            arguments.append(maps_for({name: encode(views[name].pointer) for name, encode in recipe.encoders.items()}))
        launch = gpu.Launch(
            function,
            grid=recipe.grid,
            block=(shape.threads, 1, 1),
            smem_bytes=shape.smem_bytes,
            params=arguments,
            stream=handle,
        )
    return Prepared(
        plan=found,
        cubin=recipe.cubin,
        function=function,
        launch=launch,
        out=out,
        lse=lse,
        keep=(first, second, third, target, lse_view, counters, stream),
        fallbacks=fallbacks,
    )


# --- on the CPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What a call on the CPU gave."""

    out: Any
    """Of the caller's library."""
    lse: Any
    """The log-sum-exp, float32 (batch, q_heads, q_len), of the caller's library; None where none was asked for."""
    report: emulator.Report
    """Findings and counters where `races` were looked for, and what the kernel printed."""
    kernel: emulator.Emulated
    plan: Plan
    fallbacks: Fallbacks | None = None
    """None where it was not asked to count."""


def _is_numpy(obj: Any) -> bool:
    """Whether it is a NumPy array, without importing NumPy."""
    return any(cls.__module__ == "numpy" and cls.__name__ == "ndarray" for cls in type(obj).__mro__)


def _memory_of(obj: Any) -> str | None:
    """`cpu` or `gpu`, where an array lies; None where that is not said."""
    if _is_numpy(obj):
        return "cpu"
    library = gpu.library_of(obj)
    if library == "torch" and hasattr(obj, "device"):
        return "cpu" if obj.device.type == "cpu" else "gpu"
    if library == "cupy" or hasattr(obj, "__cuda_array_interface__"):
        return "gpu"
    if hasattr(obj, "__dlpack_device__"):
        return "cpu" if int(obj.__dlpack_device__()[0]) == 1 else "gpu"  # kDLCPU
    return None


def _runs_on(q: Any, device: str | None) -> str:
    """`cpu` or `gpu`: as told, or where q is. Whether the arrays are there is for whoever reads them to say."""
    if device is not None and device not in DEVICES:
        raise ParameterError(f"device: wanted {', '.join(DEVICES)}, or None for where the arrays are, got {device!r}")
    if device is None:
        return _memory_of(q) or "gpu"
    return "cpu" if device == "cpu" else "gpu"


def _host_view(obj: Any, name: str) -> DeviceArray:
    """An array in host memory, copying nothing; `owner` is a NumPy view of it."""
    works = "NumPy arrays, torch CPU tensors or anything with DLPack in host memory"
    if _memory_of(obj) == "gpu":
        raise DeviceError(
            f"{name}: wanted {works} for a run on the CPU, got {type(obj).__name__} on a GPU. "
            f"`{name}.cpu()` (torch) or `cupy.asnumpy({name})` brings it here; without device='cpu', arrays on a GPU "
            "run there."
        )
    import numpy as np

    library = gpu.library_of(obj)
    if not (_is_numpy(obj) or hasattr(obj, "__dlpack__")):
        raise DeviceError(f"{name}: wanted {works}, got {type(obj).__name__}")
    dtype = None
    try:
        if _is_numpy(obj):
            array = obj
        elif library == "torch":
            torch = importlib.import_module("torch")
            dtype = str(obj.dtype).removeprefix("torch.")
            # NumPy has no bfloat16 of its own: the bits pass as integers.
            array = (obj.detach().view(torch.int16) if dtype == "bfloat16" else obj.detach()).numpy()
        else:
            array = np.from_dlpack(obj)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DTypeError(
            f"{name}: wanted {works}, of float16 or bfloat16, got {type(obj).__name__}, which NumPy cannot read: "
            f"{error}. `numpy.asarray` of it, with ml_dtypes.bfloat16 as the type where it is bfloat16, works."
        ) from error
    if array.dtype.byteorder not in "=|" and not array.dtype.isnative:
        raise DTypeError(f"{name}: wanted this machine's byte order, got {array.dtype}")
    if any(stride % array.itemsize for stride in array.strides):
        raise LayoutError(f"{name}: wanted strides of whole elements, got {array.strides} bytes")
    return DeviceArray(
        pointer=int(array.ctypes.data),
        shape=tuple(array.shape),
        strides=tuple(stride // array.itemsize for stride in array.strides),
        dtype=dtype or array.dtype.name,
        device=HOST,
        owner=array,
        library=library,
        readonly=not array.flags.writeable,
    )


def _new_on_host(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    if gpu.library_of(like) == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=getattr(torch, dtype))
    import numpy as np

    if dtype == "bfloat16":
        import ml_dtypes

        return np.empty(shape, dtype=ml_dtypes.bfloat16)
    return np.empty(shape, dtype=dtype)


def emulate(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    lse: Any | None = None,
    return_lse: bool = True,
    params: Mapping[str, int] | None = None,
    source: Path | None = None,
    schedule: str = "ascending",
    races: bool = False,
    timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
    threads: int | None = None,
    cancel: threading.Event | None = None,
    surroundings: Mapping[str, Any] | None = None,
    count_fallbacks: bool = False,
) -> Emulation:
    """`attention` on the CPU: the stage's own file, thread for thread, in a worker process.

    Args:
        q, k, v, causal, scale, stage, out, params: as `attention` takes them, in host memory.
        lse: where to write the log-sum-exp; a new array where None and `return_lse`.
        return_lse: False: the kernel is not asked for it, unless `lse` is given.
        source: compile an edited copy of the stage's file instead.
        schedule: `ascending`, `descending` or `seeded:N`: the order in which warps take their turns.
        races: look for races, uninitialised reads and accesses out of bounds, and count bank conflicts and sectors:
            the report's `findings` and `counters`. Many times slower.
        timeout_s: how long it may take: refused beforehand where it would clearly take longer, stopped when it does.
            None for as long as it takes.
        threads: operating-system threads; one for each core where None.
        cancel: set from another thread, it stops the run as Ctrl-C does.
        surroundings: for `q`, `k`, `v`, `out` or `lse`, the contiguous NumPy array that it is a view into, which the
            kernel then finds around it and may damage.
        count_fallbacks: the kernel counts how often it left its fast path.

    Raises:
        What `attention` raises of bad input; TooLargeError, EmulationError, CompileError, MissingPackageError.
    """
    emulator.schedule_item(schedule)
    _refuse_gradients(("q", q), ("k", k), ("v", v), ("out", out))
    first, second, third = _host_view(q, "q"), _host_view(k, "k"), _host_view(v, "v")
    target = None if out is None else _host_view(out, "out")
    found = plan(first, second, third, arch=None, out=target, causal=causal, scale=scale, stage=stage)
    if target is None:
        out = _new_on_host(q, first.shape, first.dtype)
        target = _host_view(out, "out")
    if lse is None and return_lse:
        lse = _new_on_host(q, first.shape[:3], "float32")
    lse_view = None if lse is None else _host_view(lse, "lse")
    if lse_view is not None:
        _check_lse(lse_view, first)
    problem = found.problem
    runner = _runner(found.stage)
    if hasattr(runner, "interpret"):
        if races or schedule != "ascending":
            raise UnsupportedError(
                f"Stage {found.stage.id} runs on a CPU by Triton's interpreter, one program after the other: there are "
                "no races to look for and no schedule but ascending."
            )
        kernel = runner.interpreted(
            found.stage, head_dim=problem.head_dim, dtype=problem.dtype, overrides=params, source=source
        )
    else:
        kernel = emulator.build_stage(
            found.stage,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            causal=problem.causal,
            aligned=found.aligned,
            overrides=params,
            source=source,
            hooks=races,
        )
    shape = kernel.launch_shape
    assert shape is not None
    import numpy as np

    around = surroundings or {}
    views = {"Q": first, "K": second, "V": third, "O": target}
    names = {"Q": "q", "K": "k", "V": "v", "O": "out"}
    places = {
        name: emulator.Pointer(
            array=view.owner, access="w" if name == "O" else "r", name=name, surroundings=around.get(names[name])
        )
        for name, view in views.items()
    }
    pointers = {getattr(AttentionParams, name).offset + TensorView.data.offset: place for name, place in places.items()}
    if lse_view is not None:
        places["LSE"] = pointers[AttentionParams.LSE.offset] = emulator.Pointer(
            array=lse_view.owner, access="w", name="LSE", surroundings=around.get("lse")
        )
    counters = np.zeros(_COUNTERS, np.uint32)
    if shape.persistent:
        pointers[AttentionParams.work.offset] = emulator.Pointer(array=counters, name="work")
    fallbacks = np.zeros(len(Fallbacks._fields), np.uint32)
    if count_fallbacks:
        pointers[AttentionParams.fallbacks.offset] = emulator.Pointer(array=fallbacks, name="fallbacks")
    told = params_for(found, first, second, third, target, None)
    arguments = [emulator.Structure(value=told, pointers=pointers)]
    if found.stage.tensor_maps:
        maps = maps_for({name: one.emulated() for name, one in tile_maps(found, shape, views).items()})
        addresses = {getattr(AttentionMaps, name).offset: places[name] for name in "QKVO"}
        arguments.append(emulator.Structure(value=maps, pointers=addresses if found.aligned else {}))
    grid = grid_for(problem, shape)
    passes = None
    if hasattr(runner, "EmulatedPasses"):
        passes = runner.EmulatedPasses(
            problem,
            {name: view.owner for name, view in views.items()},
            lse=places.get("LSE"),
            scale_log2=found.scale * math.log2(math.e),
            parameters=found.stage.parameters(problem.head_dim, params),
            shape=shape,
        )
        arguments, grid = list(passes.arguments), passes.grid

    def launch(limit_s: float | None, blocks: int | None = None) -> emulator.Report:
        if hasattr(runner, "interpret"):
            known = {"HEAD_DIM": problem.head_dim, "CAUSAL": int(problem.causal), **kernel.parameters}
            report: emulator.Report = runner.interpret(
                kernel,
                {**triton_arguments(told), "wants_lse": int("LSE" in places), **places},
                constants={name: known[name] for name in triton_code.CONSTANTS},
                dtype=problem.dtype,
                grid=grid,
                timeout_s=limit_s,
                cancel=cancel,
            )
            return report
        return emulator.launch(
            kernel,
            arguments,
            grid=grid,
            cluster=(max(1, shape.cluster), 1, 1),
            schedule=schedule,
            threads=threads,
            blocks=blocks,
            timeout_s=limit_s,
            cancel=cancel,
        )

    if timeout_s is not None and passes is None:
        _refuse_too_large(found, shape, launch, timeout_s=timeout_s, races=races, threads=threads)
    report = launch(timeout_s)
    if passes is not None:
        passes.finish()
    if counters.any():
        raise EmulationError(
            f"{found.stage.id} on the CPU: wanted the counters of its work back at 0 after the last block, for the "
            f"launch after this one, got {counters.tolist()}",
            report=report,
        )
    counted = Fallbacks(*fallbacks.tolist()) if count_fallbacks else None
    return Emulation(out=out, lse=lse, report=report, kernel=kernel, plan=found, fallbacks=counted)


def _refuse_too_large(
    found: Plan,
    shape: LaunchShape,
    launch: Callable[[float | None, int | None], emulator.Report],
    *,
    timeout_s: float,
    races: bool,
    threads: int | None,
) -> None:
    problem = found.problem
    cost = _HOOKS_COST if races else 1.0
    if problem.flops * cost <= _SMALL_FLOPS:
        return
    cores = threads or emulator.cores()
    # The first blocks are the first query rows of the first head: as many as run at once. (Of a persistent kernel the
    # first alone would do the work of all.)
    tiles = -(-problem.q_len // shape.tile_q)
    blocks = min(tiles, cores)
    rows = min(blocks * shape.tile_q, problem.q_len)
    keys = problem.kv_len
    if problem.causal:
        keys = max(0, min(problem.kv_len, rows + problem.kv_len - problem.q_len))
    trial_flops = (
        4.0 * problem.head_dim * rows * keys / (2 if problem.causal and problem.q_len >= problem.kv_len else 1)
    )
    seconds = problem.flops * cost / (_ASSUMED_FLOPS_PER_S * cores)
    # A trial is better than any assumption, where it is not itself too long, and the answer not clear anyway.
    trial_s = trial_flops * cost / (_ASSUMED_FLOPS_PER_S * blocks)
    in_parts = not shape.persistent and shape.cluster <= 1 and found.stage.language == "cuda"
    if in_parts and 0 < trial_s < _TRIAL_S and seconds < _CLEARLY * timeout_s:
        try:
            trial = launch(2 * _TRIAL_S, blocks)
        except EmulationError as error:
            if error.report is None or error.report.status != "timeout":
                raise
        else:
            seconds = trial.seconds * (problem.flops / trial_flops) * (blocks / cores)
    if seconds > timeout_s:
        raise TooLargeError(
            f"{problem.label} by stage {found.stage.id} would take about {_duration(seconds)} on {cores} "
            f"core{'s' if cores > 1 else ''}; wanted at most {_duration(timeout_s)}. A smaller problem works, and "
            "`flashlab.emulate(…, timeout_s=None)` runs it for as long as it takes.",
            seconds=seconds,
        )


def _duration(seconds: float) -> str:
    """For people: `14 minutes`."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


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
    device: str | None = None,
) -> Any:
    """softmax(scale · Q Kᵀ) V where the arrays are.

    On a GPU: enqueued on the caller's stream; no copies, no synchronisation. In host memory: the same kernel on the
    CPU, done when this returns (`emulate` has more to ask and to tell).

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16. On a CUDA GPU: a torch tensor, a CuPy array, or
            anything with DLPack or `__cuda_array_interface__`. In host memory: a NumPy array (ml_dtypes.bfloat16), a
            torch tensor, or anything with DLPack. Any strides, the last dimension contiguous; rows that are not on
            16-byte boundaries are slower, and so are strides of 0 or less where the stage takes tensor maps (those of
            an expanded K or V): `plan.why_slow` of a prepared call or an emulation says so.
        k: (batch, kv_heads, kv_len, head_dim); kv_heads divides q_heads (grouped-query attention).
        v: as `k`.
        causal: query i sees key j when j - i ≤ kv_len - q_len (aligned bottom right). A query that sees none gets 0.
        scale: finite; 1/sqrt(head_dim) where None.
        stage: a stage's id. None: on a GPU the one that was fastest on the nearest problem on record (tuned.py;
            `flashlab explain` says which and why), on a CPU the last rung of the ladder.
        out: where to write, like `q`; a new contiguous array of the caller's library where None.
        return_lse: also return the log-sum-exp of the scores (natural log, float32, -inf where a query sees no key, NaN
            where one of its scores is).
        stream: an integer or a stream object; the library's current stream on that device where None. With another
            stream than the current one, keeping the arrays alive until it is done is the caller's part.
        params: the stage's tunables, by name. On a GPU those that are not named are what won there on the nearest
            problem (data/<gpu>/tuned.json), where something did, and else the stage's defaults.
        device: `cpu` or `gpu`, to be sure of it; where the arrays are, where None. It moves nothing.

    Returns:
        The output, or (output, lse).

    Raises:
        InputError: arguments are off (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, runs this here; TooLargeError on a CPU that would take long.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: as they say.
    """
    if _runs_on(q, device) == "cpu":
        if stream is not None:
            raise ParameterError("stream: wanted None for a run on the CPU, which is done when the call returns")
        ran = emulate(q, k, v, causal=causal, scale=scale, stage=stage, out=out, params=params)
        return (ran.out, ran.lse) if return_lse else ran.out
    prepared = prepare(
        q, k, v, causal=causal, scale=scale, stage=stage, out=out, return_lse=return_lse, stream=stream, params=params
    )
    with gpu.context(prepared.plan.device):
        prepared()
    return (prepared.out, prepared.lse) if return_lse else prepared.out
