"""What a call of `attention` would run: its arguments checked, its stage chosen. Needs no GPU and no array library."""

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
"""What scores are multiplied by at most: kernels hold it times log2 e, in float32."""
ROW_ALIGNMENT_BYTES = 16
"""What ALIGNED=1 promises a kernel of every row's address: its widest access, and what tensor maps want."""
_MAX_GRID_YZ = 65535
_MAX_LENGTH = 2**29
"""Kernels count rows and keys in 32 bits, and add those of queries and keys and of a tile past the end."""
_MAX_TILES, _LEAST_TILE = 2**31 - 1, 16
"""Kernels count work tiles in 32 bits; a tile's rows at least."""


class Sequences(NamedTuple):
    """Which rows of packed arrays are whose: what `prepare` and `emulate` take beside q, k and v."""

    cu_seqlens_q: Any
    """int32 (batch + 1,), on the device of q: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q."""
    cu_seqlens_k: Any
    """Likewise of k and v."""
    max_seqlen_q: int
    """No sequence has more query rows."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sound call: what to compile and what the kernel needs."""

    problem: Problem
    stage: Stage
    scale: float
    why_slow: str
    """Why rows go element by element, which is slower: the first array that the fast path cannot take. Empty where it
    takes all: every row of Q, K, V and O starts on a 16-byte boundary, and where the stage takes tensor maps, or loads
    rows by WMMA, these can describe all four. An expanded K or V, of stride 0, is one that tensor maps cannot."""
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
    """What a call would run, once its arguments are sound. `out` None means an aligned new tensor.

    With `cu_seqlens_q` and `cu_seqlens_k`, the arrays are packed: (total, heads, head_dim).

    `arch` None is a CPU, which runs every stage. Where no stage is named, `slug`, a GPU's folder under data/, and its
    `sm_count` let the records choose (choice.py); the last rung that runs the problem without them.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ParameterError, UnknownStageError: unsound arguments.
        UnsupportedError: no stage, or not the named one, runs this problem on `arch`.
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
    """The plan of a problem on a stage; `rows` are the arrays that may make it a slow one: see `why_slow`.

    Raises:
        ParameterError: the scale is no finite number, or not over the soft cap.
    """
    scale = scale_of(scale, problem.head_dim)
    if problem.softcap and abs(scale / problem.softcap) > _MAX_FACTOR:
        raise ParameterError(
            f"softcap: wanted one by which the scale, {scale:g}, can be divided in float32, got {problem.softcap!r}"
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
    """(total, heads, head_dim) as (1, heads, total, head_dim).

    Raises:
        ShapeError: it has other dimensions.
    """
    if len(packed.shape) != 3:
        raise ShapeError(f"{name}: wanted 3 dimensions (total, heads, head_dim), got shape {packed.shape}")
    (total, heads, head_dim), (row, head, column) = packed.shape, packed.strides
    return replace(packed, shape=(1, heads, total, head_dim), strides=(0, head, row, column))


def _varlen(problem: Problem, cu_seqlens_q: DeviceArray, cu_seqlens_k: DeviceArray, max_seqlen_q: Any) -> Problem:
    """The problem of one sequence as that of those that it is packed of.

    Raises:
        ShapeError, DTypeError, LayoutError, ParameterError: there are none such.
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
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, numbers.Integral) or max_seqlen_q < 1:
        raise ParameterError(f"max_seqlen_q: wanted a positive integer, got {max_seqlen_q!r}")
    return replace(problem, batch=batch, q_len=min(int(max_seqlen_q), problem.q_len), varlen=True)


def check_cu_seqlens(array: DeviceArray, name: str) -> None:
    """Raise what is wrong with one, but for its numbers: DTypeError, ShapeError, LayoutError."""
    check_dtype(name, array, "int32")
    if len(array.shape) != 1 or array.shape[0] < 2:
        raise ShapeError(f"{name}: wanted (batch + 1,), of at least one sequence, got shape {array.shape}")
    check_contiguous(name, array)


def check_lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, *, total_q: int, total_k: int, max_seqlen_q: int) -> None:
    """Raise what is wrong with the numbers in both, NumPy arrays; q has `total_q` rows and k `total_k`: InputError."""
    shown = 12
    for name, cu_seqlens, total in (("q", cu_seqlens_q, total_q), ("k", cu_seqlens_k, total_k)):
        lengths = cu_seqlens[1:].astype("int64") - cu_seqlens[:-1]
        if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > total:
            got = ", ".join(map(str, cu_seqlens[:shown].tolist())) + (", …" if len(cu_seqlens) > shown else "")
            raise InputError(
                f"cu_seqlens_{name}: wanted numbers from 0 to at most {total}, the rows of {name}, none below the one "
                f"before, got {got}"
            )
        if name == "q" and lengths.max() > max_seqlen_q:
            raise InputError(
                f"max_seqlen_q: wanted at least the longest sequence of cu_seqlens_q, {lengths.max()} rows, got "
                f"{max_seqlen_q}"
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
    factor = softcap_of(softcap)
    if right == 0 and not problem.causal:
        problem = replace(problem, mask="causal")
    if left >= problem.kv_len - 1:
        left = UNLIMITED
    if problem.causal or right >= problem.q_len - 1:
        right = UNLIMITED
    return replace(problem, window=(left, right), softcap=factor)


def scale_of(scale: Any, head_dim: int) -> float:
    """What scores are multiplied by.

    Raises:
        ParameterError: no finite number.
    """
    if scale is None:
        return float(head_dim**-0.5)
    factor = _factor(scale)
    if factor is None:
        raise ParameterError(
            f"scale: wanted a finite number of at most {_MAX_FACTOR:.3g} either way, or None for 1/sqrt(head_dim), got "
            f"{scale!r}"
        )
    return factor


def softcap_of(softcap: Any) -> float:
    """What scores are bounded by; 0: nothing.

    Raises:
        ParameterError: no such number.
    """
    factor = _factor(softcap)
    if factor is None or factor < 0:
        raise ParameterError(
            f"softcap: wanted a positive finite number of at most {_MAX_FACTOR:.3g}, or 0 for none, got {softcap!r}"
        )
    return factor


def _factor(value: Any) -> float | None:
    """A number that kernels multiply by in float32; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _MAX_FACTOR else None


def tunables(params: Any) -> dict[str, Any]:
    """Values of tunables by name, as a caller gave them; the stage looks at what they are.

    Raises:
        ParameterError: they have no names.
    """
    if not isinstance(params or {}, Mapping) or not all(isinstance(name, str) for name in params or {}):
        raise ParameterError(f"params: wanted values by the names of tunables, as {{'TILE_KV': 64}}, got {params!r}")
    return dict(params or {})


def check_flags(**flags: Any) -> None:
    """Raise that one is neither True nor False: ParameterError."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ParameterError(f"{name}: wanted True or False, got {flag!r}")


def problem_of(inputs: Mapping[str, DeviceArray], causal: Any, *, packed: bool = False) -> Problem:
    """The problem of q, k and v; `packed`: one sequence of them, (total, heads, head_dim).

    Raises:
        ShapeError, DTypeError, ParameterError: they make none.
    """
    check_flags(causal=causal)
    dims = ("total", "heads", "head_dim") if packed else ("batch", "heads", "length", "head_dim")
    for name, array in inputs.items():
        if len(array.shape) != len(dims):
            raise ShapeError(f"{name}: wanted {len(dims)} dimensions ({', '.join(dims)}), got shape {array.shape}")
        if 0 in array.shape:
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
    problem = Problem.of(batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype=q.dtype, mask=mask)
    check_size(problem)
    return problem


def check_size(problem: Problem) -> None:
    """Raise what a problem has more of than kernels count to: ShapeError."""
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
    """Raise what is wrong with an input's type, with what makes it the first that is wanted: DTypeError."""
    if array.dtype in wanted:
        return
    casts = {"float16": "half()", "float32": "float()", "int32": "int()"}
    cast_ = casts[wanted[0]] if array.library == "torch" else f'astype("{wanted[0]}")'
    works = f"`{name}.{cast_}` works."
    if array.dtype == "float8_e4m3fn" and name in ("q", "k", "v"):
        works = "`flashlab.fp8_attention` takes it, with its scale."
    raise DTypeError(f"{name}: wanted {' or '.join(wanted)}, got {array.dtype}. {works}")


def check_layout(name: str, array: DeviceArray, q: DeviceArray) -> None:
    """Raise what is wrong with where an array lies: DeviceError, LayoutError."""
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
    """Raise what is wrong with the caller's array for the output, of `dtype` or else the type of q: ShapeError,
    DTypeError, LayoutError."""
    q = inputs["q"]
    if out.shape != q.shape:
        raise ShapeError(f"out: wanted the shape of q, {q.shape}, got {out.shape}")
    if out.dtype != (dtype or q.dtype):
        raise DTypeError(f"out: wanted {dtype or f'the type of q, {q.dtype}'}, got {out.dtype}")
    check_writable("out", out)
    refuse_overlap("out", out, inputs)


def check_writable(name: str, array: DeviceArray) -> None:
    """Raise why an array cannot be written: LayoutError."""
    if array.readonly:
        raise LayoutError(f"{name}: wanted memory that may be written, got a read-only array")
    if array.overlaps_itself:
        raise LayoutError(
            f"{name}: wanted an address of its own for every element, got strides {array.strides} over shape "
            f"{array.shape}; an expanded or overlapping view cannot be written"
        )


def check_contiguous(name: str, array: DeviceArray) -> None:
    """Raise that an array has gaps, or another order: LayoutError."""
    contiguous = contiguous_strides(array.shape)
    if any(n > 1 and a != b for n, a, b in zip(array.shape, array.strides, contiguous, strict=True)):
        raise LayoutError(f"{name}: wanted a contiguous array, got strides {array.strides} over shape {array.shape}")


def refuse_overlap(name: str, array: DeviceArray, others: Mapping[str, DeviceArray]) -> None:
    """The one check of `plan` that two addresses decide together.

    Raises:
        LayoutError: an array that is written overlaps another.
    """
    low, high = array.extent
    for other, of in others.items():
        other_low, other_high = of.extent
        if low < other_high and other_low < high:
            raise LayoutError(
                f"{name}: wanted memory apart from {other}, got memory that overlaps it; a separate tensor works"
            )


def lse_shape(q: DeviceArray) -> tuple[int, ...]:
    """(batch, q_heads, q_len), or of packed sequences (q_heads, total_q)."""
    return q.shape[:3] if len(q.shape) == 4 else (q.shape[1], q.shape[0])


def check_lse(lse: DeviceArray, inputs: Mapping[str, DeviceArray], out: DeviceArray) -> None:
    """Raise what is wrong with the caller's array for the log-sum-exp of the rows of q."""
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
    """What a call writes: the arrays of the caller's library, and views of them; no log-sum-exp where none is asked."""

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
    """Both arrays, made where the caller gives none; `out`, once `check_out` took it, of `dtype` or the type of q.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: the caller's `lse` is none such.
        ParameterError: of a library that makes no arrays; `return_lse` is no truth value.
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
    """Why rows of an array cannot be read 16 bytes at a time, by tensor maps or by WMMA; empty where they can."""
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
