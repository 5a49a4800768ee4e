"""Validation of the arguments of `attention`, and selection of its stage. Needs no GPU and no array library."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flashlab.core.errors import DeviceError, DTypeError, InputError, LayoutError, ParameterError, ShapeError
from flashlab.core.problem import DTYPES, NO_WINDOW, SIZES, UNLIMITED, Problem, Window
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.run import choice
from flashlab.run.arrays import DeviceArray, Place, contiguous_strides, mark_written
from flashlab.run.tensor_map import MAX_STRIDE_BYTES

_MAX_FACTOR = (2 - 2**-23) * 2.0**127 / math.log2(math.e)
"""Maximum factor on scores: kernels hold factor · log2(e) in float32."""
ROW_ALIGNMENT_BYTES = 16
"""Alignment of every row if ALIGNED=1: the widest access of a kernel, and a requirement of tensor maps."""
_MAX_GRID_YZ = 65535
_MAX_LENGTH = 2**29
"""Kernels add query and key indices, including a tile past the end, in 32 bits."""
_MAX_TILES, _LEAST_TILE = 2**31 - 1, 16
"""Maximum number of work tiles, counted in 32 bits, and minimum number of rows per tile."""


class Sequences(NamedTuple):
    """Boundaries of packed sequences, for `prepare` and `emulate`."""

    cu_seqlens_q: Any
    """int32 (batch + 1,), on the device of q: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q."""
    cu_seqlens_k: Any
    """int32 (batch + 1,), likewise for k and v."""
    max_seqlen_q: int
    """Upper bound on the query length of every sequence."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A validated call: what to compile and launch."""

    problem: Problem
    stage: Stage
    scale: float
    why_slow: str
    """Why the slow path, which loads rows element by element, is taken: the first array that the fast path does not
    support. Empty if every row of Q, K, V and O starts on a 16-byte boundary and, for a stage with tensor maps or WMMA
    loads, these can describe all four arrays. Tensor maps cannot describe an expanded K or V (stride 0)."""
    device: int
    """CUDA device index, or `arrays.HOST`."""

    @property
    def aligned(self) -> bool:
        """Whether the fast kernel, for aligned rows, is used."""
        return not self.why_slow


def plan(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    cu_seqlens_q: DeviceArray | None = None,
    cu_seqlens_k: DeviceArray | None = None,
    *,
    arch: str | None,
    max_seqlen_q: Any = None,
    out: DeviceArray | None = None,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    slug: str | None = None,
    sm_count: int | None = None,
) -> Plan:
    """Validate the arguments of a call and select its stage. `out` None means a new, aligned array.

    With `cu_seqlens_q` and `cu_seqlens_k`, the arrays are packed: (total, heads, head_dim).

    `arch` None is a CPU, which runs every stage. An unnamed stage is selected from the records of `slug`, the folder
    of a GPU under data/ with `sm_count` SMs (choice.py), or without `slug` is the last rung that supports the problem.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ParameterError, UnknownStageError: invalid arguments.
        UnsupportedError: no stage, or not the named one, supports this problem on `arch`.
    """
    chosen = None if stage is None else registry.get(stage)
    inputs = {"q": q, "k": k, "v": v}
    arrays = inputs if out is None else {**inputs, "out": out}
    problem = with_features(problem_of(inputs, causal, packed=cu_seqlens_q is not None), window, softcap)
    if out is not None:
        check_out(out, inputs)
    ends: dict[str, DeviceArray] = {}
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        problem = _varlen(problem, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
        ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, array in {**arrays, **ends}.items():
        check_layout(name, array, q)
    if chosen is None:
        if arch is None or slug is None:
            chosen = registry.best(problem, arch)
        else:
            chosen = choice.stage_for(problem, slug, arch, sm_count)
    chosen.require(problem, arch)
    rows = {name: by_head(array, name) for name, array in arrays.items()} if ends else arrays
    return planned(problem, chosen, scale, rows, tensor_maps=chosen.tensor_maps)


def planned(problem: Problem, stage: Stage, scale: Any, rows: Mapping[str, DeviceArray], *, tensor_maps: bool) -> Plan:
    """Build the plan of a problem on a stage; `rows` are the arrays checked by `why_slow`.

    Raises:
        ParameterError: the scale, or the scale divided by the soft cap, is out of range.
    """
    scale = scale_of(scale, problem.head_dim)
    if problem.softcap and abs(scale / problem.softcap) > _MAX_FACTOR:
        raise ParameterError(
            f"softcap: wanted scale / softcap to fit float32 for scale {scale:g}, got {problem.softcap!r}"
        )
    by = {"tensor_maps": tensor_maps, "wmma": stage.wmma_strides}
    reasons = (why_slow(name, array, **by) for name, array in rows.items())
    return Plan(
        problem=problem,
        stage=stage,
        scale=scale,
        why_slow=next(filter(None, reasons), ""),
        device=next(iter(rows.values())).device,
    )


def by_head(packed: DeviceArray, name: str) -> DeviceArray:
    """View (total, heads, head_dim) as (1, heads, total, head_dim).

    Raises:
        ShapeError: the array does not have three dimensions.
    """
    if len(packed.shape) != 3:
        raise ShapeError(f"{name}: wanted 3 dimensions (total, heads, head_dim), got shape {packed.shape}")
    (total, heads, head_dim), (row, head, column) = packed.shape, packed.strides
    return replace(packed, shape=(1, heads, total, head_dim), strides=(0, head, row, column))


def _varlen(problem: Problem, cu_seqlens_q: DeviceArray, cu_seqlens_k: DeviceArray, max_seqlen_q: Any) -> Problem:
    """Convert the problem of packed arrays as one sequence to that of their sequences.

    Raises:
        ShapeError, DTypeError, LayoutError, ParameterError: invalid cumulative lengths or `max_seqlen_q`.
    """
    check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != batch + 1:
        raise ShapeError(
            f"cu_seqlens_k: wanted the {batch} sequences of cu_seqlens_q, ({batch + 1},), got {cu_seqlens_k.shape}"
        )
    if batch > _MAX_GRID_YZ or problem.q_heads * (-(-problem.q_len // _LEAST_TILE) + batch) > _MAX_TILES:
        raise ShapeError(
            f"cu_seqlens_q: wanted at most {_MAX_GRID_YZ} sequences, and fewer than 2^31 tiles of {_LEAST_TILE} rows "
            f"in all heads, got {batch} sequences; split the call"
        )
    _check_max_seqlen(max_seqlen_q)
    return replace(problem, batch=batch, q_len=min(int(max_seqlen_q), problem.q_len), varlen=True)


def _check_max_seqlen(max_seqlen_q: Any) -> None:
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, numbers.Integral) or max_seqlen_q < 1:
        raise ParameterError(f"max_seqlen_q: wanted a positive integer, got {max_seqlen_q!r}")


def check_cu_seqlens(array: DeviceArray, name: str) -> None:
    """Raise `DTypeError`, `ShapeError` or `LayoutError` if cumulative lengths are invalid, apart from their values."""
    check_dtype(name, array, "int32")
    if len(array.shape) != 1 or array.shape[0] < 2:
        raise ShapeError(f"{name}: wanted (batch + 1,), of at least one sequence, got shape {array.shape}")
    check_contiguous(name, array)


def check_lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, *, total_q: int, total_k: int, max_seqlen_q: Any) -> None:
    """Raise `InputError` if `max_seqlen_q`, or the values of cumulative lengths, NumPy arrays, are invalid."""
    _check_max_seqlen(max_seqlen_q)
    shown = 12
    for name, cu_seqlens, total in (("q", cu_seqlens_q, total_q), ("k", cu_seqlens_k, total_k)):
        lengths = cu_seqlens[1:].astype("int64") - cu_seqlens[:-1]
        if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > total:
            got = ", ".join(map(str, cu_seqlens[:shown].tolist())) + (", …" if len(cu_seqlens) > shown else "")
            raise InputError(
                f"cu_seqlens_{name}: wanted non-decreasing numbers from 0 to at most {total}, the rows of {name}, got "
                f"{got}"
            )
        if name == "q" and lengths.max() > max_seqlen_q:
            raise InputError(
                f"max_seqlen_q: wanted at least the longest sequence of cu_seqlens_q, {lengths.max()} rows, got "
                f"{max_seqlen_q}"
            )


def window_of(window: Any) -> Window:
    """Convert a window as given to `attention` to (left, right).

    Raises:
        ParameterError: the window is invalid.
    """
    sides = [window, window] if isinstance(window, numbers.Integral) else NO_WINDOW if window is None else window
    sides = sides if isinstance(sides, tuple | list) else ()  # a set has no order
    try:
        left, right = (UNLIMITED if side is None else operator.index(side) for side in sides)
    except (TypeError, ValueError):
        left = right = UNLIMITED - 1
    if min(left, right) < UNLIMITED or any(isinstance(side, bool) for side in sides):
        raise ParameterError(
            "window: wanted None, the number of keys on both sides of the diagonal, or (left, right) with None or "
            f"{UNLIMITED} for no limit, got {window!r}"
        )
    return left, right


def with_features(problem: Problem, window: Any, softcap: Any) -> Problem:
    """Add a window and soft cap to a problem; a side of the window that hides no key is dropped.

    Raises:
        ParameterError: the window or soft cap is invalid.
    """
    left, right = window_of(window)
    factor = softcap_of(softcap)
    if right == 0 and not problem.causal:
        problem = replace(problem, mask="causal")
    if left >= problem.kv_len - 1:
        left = UNLIMITED
    if problem.causal or right >= problem.q_len - 1:
        right = UNLIMITED
    return replace(problem, window=(left, right), softcap=factor)


def scale_of(scale: Any, head_dim: int) -> float:
    """Return the factor on scores, 1/sqrt(head_dim) for None.

    Raises:
        ParameterError: the scale is not a number, or out of range.
    """
    if scale is None:
        return float(head_dim**-0.5)
    factor = _factor(scale)
    if factor is None:
        raise ParameterError(
            f"scale: wanted a finite number of magnitude at most {_MAX_FACTOR:.3g}, or None for 1/sqrt(head_dim), got "
            f"{scale!r}"
        )
    return factor


def softcap_of(softcap: Any) -> float:
    """Return the soft cap on scores as a float; 0 disables it.

    Raises:
        ParameterError: the soft cap is not a number, negative or out of range.
    """
    factor = _factor(softcap)
    if factor is None or factor < 0:
        raise ParameterError(
            f"softcap: wanted a positive finite number of at most {_MAX_FACTOR:.3g}, or 0 for none, got {softcap!r}"
        )
    return factor


def _factor(value: Any) -> float | None:
    """Convert a factor to float; None if it is not a number or exceeds the range of the kernels."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _MAX_FACTOR else None


def tunables(params: Any) -> dict[str, Any]:
    """Return a caller's tunables as a dict; the stage validates names and values.

    Raises:
        ParameterError: `params` is not a mapping from names.
    """
    if not isinstance(params or {}, Mapping) or not all(isinstance(name, str) for name in params or {}):
        raise ParameterError(
            f"params: wanted a mapping from tunables to values, such as {{'TILE_KV': 64}}, got {params!r}"
        )
    return dict(params or {})


def check_flags(**flags: Any) -> None:
    """Raise `ParameterError` unless each flag is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ParameterError(f"{name}: wanted True or False, got {flag!r}")


def problem_of(inputs: Mapping[str, DeviceArray], causal: Any, *, packed: bool = False) -> Problem:
    """Return the problem of q, k and v; `packed`: of arrays (total, heads, head_dim), as one sequence.

    A total of 0 rows counts as 1.

    Raises:
        ShapeError, DTypeError, ParameterError: the arguments are invalid.
    """
    check_flags(causal=causal)
    dims = ("total", "heads", "head_dim") if packed else ("batch", "heads", "length", "head_dim")
    for name, array in inputs.items():
        if len(array.shape) != len(dims):
            raise ShapeError(f"{name}: wanted {len(dims)} dimensions ({', '.join(dims)}), got shape {array.shape}")
        if 0 in array.shape[packed:]:
            raise ShapeError(
                f"{name}: wanted at least one element in every dimension, got shape {array.shape}; "
                "attention over no keys or no queries has no value"
            )
    q, k, v = inputs.values()
    if k.shape != v.shape:
        raise ShapeError(f"v: wanted the shape of k, {k.shape}, got {v.shape}")
    if packed:
        q, k = by_head(q, "q"), by_head(k, "k")
    batch, q_heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    if k.shape[0] != batch:
        raise ShapeError(f"k: wanted the batch of q, {batch}, got {k.shape[0]}")
    if k.shape[3] != head_dim:
        raise ShapeError(f"k: wanted the head dim of q, {head_dim}, got {k.shape[3]}")
    for name, array in inputs.items():
        check_dtype(name, array, *DTYPES)
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"wanted q, k and v of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    mask = "causal" if causal else "full"
    problem = Problem.of(batch, q_heads, kv_heads, max(1, q_len), max(1, kv_len), head_dim, dtype=q.dtype, mask=mask)
    check_size(problem)
    return problem


def check_size(problem: Problem) -> None:
    """Raise `ShapeError` if a size exceeds the range of the kernels."""
    for name in SIZES:
        most, size = _MAX_GRID_YZ if name in ("batch", "q_heads") else _MAX_LENGTH, getattr(problem, name)
        if size > most:
            raise ShapeError(f"{name}: wanted at most {most}, got {size}; split the call")
    tiles = problem.batch * problem.q_heads * -(-problem.q_len // _LEAST_TILE)
    if tiles > _MAX_TILES:
        raise ShapeError(
            f"q: wanted fewer than 2^31 tiles of {_LEAST_TILE} rows in all heads, got {tiles}; split the call by batch"
        )


def check_dtype(name: str, array: DeviceArray, *wanted: str) -> None:
    """Raise `DTypeError`, suggesting a cast to the first dtype, unless an array has one of the `wanted` dtypes."""
    if array.dtype in wanted:
        return
    casts = {"float16": "half()", "float32": "float()", "int32": "int()"}
    cast_ = casts[wanted[0]] if array.library == "torch" else f'astype("{wanted[0]}")'
    works = f"`{name}.{cast_}` works."
    if array.dtype == "float8_e4m3fn" and name in ("q", "k", "v"):
        works = "`flashlab.fp8_attention` takes it, with its scale."
    raise DTypeError(f"{name}: wanted {' or '.join(wanted)}, got {array.dtype}. {works}")


def check_layout(name: str, array: DeviceArray, q: DeviceArray) -> None:
    """Raise `DeviceError` or `LayoutError` if an array is not on the device of q, or its layout is unsupported."""
    if array.device != q.device:
        raise DeviceError(f"{name}: wanted the device of q, {q.place}, got {array.place}. Moving one of them works.")
    if array.strides[-1] != 1 and array.shape[-1] > 1:
        raise LayoutError(
            f"{name}: wanted a contiguous last dimension, got strides {array.strides} (elements); the others may "
            f"be anything. `{name}.contiguous()` (torch) or `ascontiguousarray({name})` (NumPy, CuPy) makes one."
        )
    if array.pointer % array.itemsize:
        raise LayoutError(
            f"{name}: wanted an address that is a multiple of {array.itemsize}, got {array.pointer:#x}. A copy works."
        )


def check_out(out: DeviceArray, inputs: Mapping[str, DeviceArray], dtype: str | None = None) -> None:
    """Raise `ShapeError`, `DTypeError` or `LayoutError` if the output array is invalid; `dtype` is by default q's."""
    q = inputs["q"]
    if out.shape != q.shape:
        raise ShapeError(f"out: wanted the shape of q, {q.shape}, got {out.shape}")
    if out.dtype != (dtype or q.dtype):
        raise DTypeError(f"out: wanted {dtype or f'the type of q, {q.dtype}'}, got {out.dtype}")
    check_writable("out", out)
    refuse_overlap("out", out, inputs)


def check_writable(name: str, array: DeviceArray) -> None:
    """Raise `LayoutError` if an array is read-only or overlaps itself."""
    if array.readonly:
        raise LayoutError(f"{name}: wanted memory that may be written, got a read-only array")
    if array.overlaps_itself:
        raise LayoutError(
            f"{name}: wanted a distinct address for every element, got strides {array.strides} over shape "
            f"{array.shape}; an expanded or overlapping view cannot be written"
        )


def check_contiguous(name: str, array: DeviceArray) -> None:
    """Raise `LayoutError` unless an array is contiguous."""
    contiguous = contiguous_strides(array.shape)
    if any(n > 1 and a != b for n, a, b in zip(array.shape, array.strides, contiguous, strict=True)):
        raise LayoutError(f"{name}: wanted a contiguous array, got strides {array.strides} over shape {array.shape}")


def refuse_overlap(name: str, array: DeviceArray, others: Mapping[str, DeviceArray]) -> None:
    """Check that an output does not overlap other arrays, the only check of `plan` that compares addresses.

    Raises:
        LayoutError: the output overlaps another array.
    """
    low, high = array.extent
    for other, of in others.items():
        other_low, other_high = of.extent
        if low < other_high and other_low < high:
            raise LayoutError(
                f"{name}: wanted memory apart from {other}, got memory that overlaps it; a separate tensor works"
            )


def lse_shape(q: DeviceArray) -> tuple[int, ...]:
    """Shape of the log-sum-exp: (batch, q_heads, q_len), or (q_heads, total_q) for packed sequences."""
    return q.shape[:3] if len(q.shape) == 4 else (q.shape[1], q.shape[0])


def check_lse(lse: DeviceArray, inputs: Mapping[str, DeviceArray], out: DeviceArray) -> None:
    """Raise `InputError` if the array for the log-sum-exp is invalid."""
    q = inputs["q"]
    if lse.shape != lse_shape(q):
        names = "(batch, q_heads, q_len)" if len(q.shape) == 4 else "(q_heads, total_q)"
        raise ShapeError(f"lse: wanted {names}, {lse_shape(q)}, got {lse.shape}")
    check_dtype("lse", lse, "float32")
    check_layout("lse", lse, q)
    check_contiguous("lse", lse)
    check_writable("lse", lse)
    refuse_overlap("lse", lse, {**inputs, "out": out})


class Outputs(NamedTuple):
    """Output arrays of a call, of the caller's library, and views of them; None for a log-sum-exp not requested."""

    out: Any
    lse: Any
    out_view: DeviceArray
    lse_view: DeviceArray | None


def outputs_of(
    place: Place,
    inputs: Mapping[str, DeviceArray],
    out: Any | None,
    lse: Any | None = None,
    *,
    return_lse: bool,
    dtype: str | None = None,
) -> Outputs:
    """Allocate the outputs that the caller does not pass; `out` must have passed `check_out`. default `dtype`: q's.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: the caller's `lse` is invalid.
        ParameterError: the caller's library cannot allocate arrays here; `return_lse` is neither True nor False.
    """
    check_flags(return_lse=return_lse)
    q, given = inputs["q"], lse is not None
    out = place.empty(q.shape, dtype or q.dtype) if out is None else out
    lse = place.empty(lse_shape(q), "float32") if lse is None and return_lse else lse
    out_view, lse_view = place.view(out, "out"), None if lse is None else place.view(lse, "lse")
    if lse_view is not None and given:
        check_lse(lse_view, inputs, out_view)
    mark_written(out, lse)
    return Outputs(out, lse, out_view, lse_view)


def why_slow(name: str, array: DeviceArray, *, tensor_maps: bool, wmma: bool = False) -> str:
    """Why rows of an array cannot be read in 16-byte accesses, by tensor maps or by WMMA; empty if they can."""
    if array.pointer % ROW_ALIGNMENT_BYTES:
        return f"{name} starts at {array.pointer:#x}, no multiple of {ROW_ALIGNMENT_BYTES} bytes"
    for of, length, stride in zip(("batch", "head", "row"), array.shape, array.strides, strict=False):
        stride_bytes = stride * array.itemsize
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
        if wmma and of == "row" and not 0 <= stride < 1 << 32:
            return f"{name} has a row stride of {stride} elements, and WMMA loads take 0 to 2^32 - 1; a copy works."
    return ""
