"""What a call of `attention` would run: its arguments checked, its stage chosen. Needs no GPU and no array library."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from flashlab.core.errors import DeviceError, DTypeError, LayoutError, ParameterError, ShapeError
from flashlab.core.problem import BYTES_PER_ELEMENT, DTYPES, NO_WINDOW, UNLIMITED, DType, Problem, Window
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.run import choice
from flashlab.run.arrays import DeviceArray, contiguous_strides
from flashlab.run.tensor_map import MAX_STRIDE_BYTES

ROW_ALIGNMENT_BYTES = 16
"""What ALIGNED=1 promises a kernel of every row's address: its widest access, and what tensor maps want."""
_MAX_GRID_YZ = 65535
_MAX_LENGTH = 2**29
"""Kernels count rows and keys in 32 bits, and add those of queries and keys and of a tile past the end."""
_MAX_TILES, _LEAST_TILE = 2**31 - 1, 16
"""Kernels count work tiles in 32 bits; a tile's rows at least."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sound call: what to compile and what the kernel needs."""

    problem: Problem
    stage: Stage
    scale: float
    why_slow: str
    """Why rows go element by element, which is slower: the first array that the fast path cannot take. Empty where it
    takes all: every row of Q, K, V and O starts on a 16-byte boundary, and where the stage takes tensor maps, they can
    describe all four. An expanded K or V, of stride 0, is one that they cannot."""
    device: int
    """CUDA device index, or `arrays.HOST`."""

    @property
    def aligned(self) -> bool:
        """Whether the kernel is the one for aligned rows, which is fast."""
        return not self.why_slow


def plan(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    *,
    arch: str | None,
    out: DeviceArray | None = None,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    slug: str | None = None,
    sm_count: int | None = None,
) -> Plan:
    """What a call would run, once its arguments are sound. `out` None means an aligned new tensor.

    `arch` None is a CPU, which runs every stage. Where no stage is named, `slug`, a GPU's folder under data/, and its
    `sm_count` let the records choose (choice.py); the last rung that runs the problem without them.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ParameterError, UnknownStageError: unsound arguments.
        UnsupportedError: no stage, or not the named one, runs this problem on `arch`.
    """
    if not isinstance(causal, bool):
        raise ParameterError(f"causal: wanted True or False, got {causal!r}")
    chosen = None if stage is None else registry.get(stage)
    inputs = {"q": q, "k": k, "v": v}
    problem = with_features(problem_of(inputs, causal), window, softcap)
    arrays = inputs if out is None else {**inputs, "out": out}
    for name, array in arrays.items():
        check_layout(name, array, q)
    if out is not None:
        check_out(out, inputs)
    scale = scale_of(scale, problem.head_dim)
    if chosen is None:
        if arch is None or slug is None:
            chosen = registry.best(problem, arch)
        else:
            chosen = choice.stage_for(problem, slug, arch, sm_count)
    chosen.require(problem, arch)
    reasons = (why_slow(name, array, tensor_maps=chosen.tensor_maps) for name, array in arrays.items())
    return Plan(
        problem=problem,
        stage=chosen,
        scale=scale,
        why_slow=next(filter(None, reasons), ""),
        device=q.device,
    )


def window_of(window: Any) -> Window:
    """Both sides of a window as `attention` takes it.

    Raises:
        ParameterError: it is none.
    """
    sides = [window, window] if isinstance(window, numbers.Integral) else NO_WINDOW if window is None else window
    try:
        left, right = (UNLIMITED if side is None else operator.index(side) for side in sides)
    except (TypeError, ValueError):
        left = right = UNLIMITED - 1
    if min(left, right) < UNLIMITED or any(isinstance(side, bool) for side in sides):
        raise ParameterError(
            "window: wanted None, the number of keys to either side of a query's own, or (left, right) with None or "
            f"{UNLIMITED} for no limit, got {window!r}"
        )
    return left, right


def with_features(problem: Problem, window: Any, softcap: Any) -> Problem:
    """The problem in a window and with a soft cap; a side of the window that hides no key is left out.

    Raises:
        ParameterError: they are none.
    """
    left, right = window_of(window)
    if right == 0 and not problem.causal:
        problem = replace(problem, mask="causal")
    if left >= problem.kv_len - 1:
        left = UNLIMITED
    if problem.causal or right >= problem.q_len - 1:
        right = UNLIMITED
    return replace(problem, window=(left, right), softcap=softcap)


def scale_of(scale: Any, head_dim: int) -> float:
    """What scores are multiplied by.

    Raises:
        ParameterError: no finite number.
    """
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ParameterError(f"scale: wanted a finite number, or None for 1/sqrt(head_dim), got {scale!r}")
    return float(scale)


def problem_of(inputs: Mapping[str, DeviceArray], causal: bool) -> Problem:
    """The problem of q, k and v.

    Raises:
        ShapeError, DTypeError: they make none.
    """
    for name, array in inputs.items():
        if len(array.shape) != 4:
            raise ShapeError(f"{name}: wanted 4 dimensions (batch, heads, length, head_dim), got shape {array.shape}")
        if 0 in array.shape:
            raise ShapeError(
                f"{name}: wanted at least one element in every dimension, got shape {array.shape}; "
                "attention over no keys or no queries has no value"
            )
        if max(array.shape) > _MAX_LENGTH:
            raise ShapeError(f"{name}: wanted dimensions of at most 2^29, got shape {array.shape}; split the call")
    q, k, v = inputs.values()
    batch, q_heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    if k.shape != v.shape:
        raise ShapeError(f"v: wanted the shape of k, {k.shape}, got {v.shape}")
    if k.shape[0] != batch:
        raise ShapeError(f"k: wanted the batch of q, {batch}, got {k.shape[0]}")
    if k.shape[3] != head_dim:
        raise ShapeError(f"k: wanted the head dim of q, {head_dim}, got {k.shape[3]}")
    for name, array in inputs.items():
        if array.dtype not in DTYPES:
            convert = f"{name}.half()" if array.library == "torch" else f'{name}.astype("float16")'
            raise DTypeError(f"{name}: wanted {' or '.join(DTYPES)}, got {array.dtype}. `{convert}` works.")
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"wanted q, k and v of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, count in (("batch", batch), ("heads", q_heads)):
        if count > _MAX_GRID_YZ:
            raise ShapeError(
                f"q: wanted at most {_MAX_GRID_YZ} as {name} (a CUDA grid's limit), got {count}; split the call"
            )
    tiles = batch * q_heads * -(-q_len // _LEAST_TILE)
    if tiles > _MAX_TILES:
        raise ShapeError(
            f"q: wanted fewer than 2^31 tiles of {_LEAST_TILE} rows in all heads, got {tiles}; split the call by batch"
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


def check_layout(name: str, array: DeviceArray, q: DeviceArray) -> None:
    """Raise what is wrong with where an array lies: DeviceError, LayoutError."""
    if array.device != q.device:
        raise DeviceError(f"{name}: wanted the device of q, {q.place}, got {array.place}. Moving one of them works.")
    if len(array.shape) == 4 and array.strides[3] != 1 and array.shape[3] > 1:
        raise LayoutError(
            f"{name}: wanted a contiguous last dimension, got strides {array.strides} (elements); the others may "
            f"be anything. `{name}.contiguous()` (torch) or `ascontiguousarray({name})` (NumPy, CuPy) makes one."
        )
    if array.pointer % BYTES_PER_ELEMENT:
        raise LayoutError(
            f"{name}: wanted an address that is a multiple of {BYTES_PER_ELEMENT}, got {array.pointer:#x}"
        )


def check_out(out: DeviceArray, inputs: Mapping[str, DeviceArray], dtype: str | None = None) -> None:
    """Raise what is wrong with the caller's array for the output, of `dtype` or else the type of q: ShapeError,
    DTypeError, LayoutError."""
    q = inputs["q"]
    if out.shape != q.shape:
        raise ShapeError(f"out: wanted the shape of q, {q.shape}, got {out.shape}")
    if out.dtype != (dtype or q.dtype):
        raise DTypeError(f"out: wanted {dtype or f'the type of q, {q.dtype}'}, got {out.dtype}")
    if out.readonly:
        raise LayoutError("out: wanted memory that may be written, got a read-only array")
    if out.overlaps_itself:
        raise LayoutError(
            f"out: wanted an address of its own for every element, got strides {out.strides} over shape {out.shape}; "
            "an expanded or overlapping view cannot be written"
        )
    refuse_overlap(out, inputs)


def refuse_overlap(out: DeviceArray, inputs: Mapping[str, DeviceArray]) -> None:
    """The one check of `plan` that two addresses decide together.

    Raises:
        LayoutError: `out` overlaps an input.
    """
    low, high = out.extent
    for name, array in inputs.items():
        other_low, other_high = array.extent
        if low < other_high and other_low < high:
            raise LayoutError(
                f"out: wanted memory apart from {name}, got memory that overlaps it; a separate tensor works"
            )


def check_lse(lse: DeviceArray, q: DeviceArray) -> None:
    """Raise what is wrong with the caller's array for the log-sum-exp of `q`'s rows."""
    if lse.shape != q.shape[:3]:
        raise ShapeError(f"lse: wanted (batch, q_heads, q_len), {q.shape[:3]}, got {lse.shape}")
    if lse.dtype != "float32":
        raise DTypeError(f"lse: wanted float32, got {lse.dtype}")
    if lse.device != q.device:
        raise DeviceError(f"lse: wanted the device of q, {q.place}, got {lse.place}")
    expected = contiguous_strides(lse.shape)
    if any(n > 1 and a != b for n, a, b in zip(lse.shape, lse.strides, expected, strict=True)):
        raise LayoutError(f"lse: wanted a contiguous array, got strides {lse.strides} over shape {lse.shape}")


def why_slow(name: str, array: DeviceArray, *, tensor_maps: bool) -> str:
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
