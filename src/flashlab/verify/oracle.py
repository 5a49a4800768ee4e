"""Reference implementations: attention in float64, and the same computation done plainly at the input precision.

Both process the problem in tiles of query rows, so that memory is bounded for all lengths, and run on NumPy or, with
`xp=cupy`, on a GPU. Layouts are those of `problem.Problem`: Q and O (batch, q_heads, q_len, head_dim), K and V (batch,
kv_heads, kv_len, head_dim), log-sum-exp (batch, q_heads, q_len), natural logarithm.

float16 is passed as float16. NumPy and CuPy lack bfloat16, which is passed as `ml_dtypes.bfloat16`, if the library
supports it (NumPy does), or as its bits in uint16 (`torch_tensor.view(torch.uint16)` converts to CuPy without a copy).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashlab.core import inputs
from flashlab.core.errors import DTypeError, ShapeError
from flashlab.core.problem import DTYPES, NO_WINDOW, DType, Precision, Problem, Window

Array = Any
"""A NumPy or CuPy array."""

UNIT_ROUNDOFF: dict[DType, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Maximum relative rounding error of a data type."""

_E4M3_MAX = 448.0
_E4M3_DIGITS = 4
"""Significand bits, including the implicit one."""
_E4M3_MIN_EXPONENT = -6
"""Exponent of the smallest normal number; below it, the spacing is constant."""
_E4M3_SCALE = 256.0
"""Factor on probabilities before rounding to e4m3, which keeps them away from the subnormal numbers."""

_SCORES_PER_TILE = 1 << 22
"""Scores per tile: 32 MiB in float64 for each of a few temporaries."""


def problem_of(q: Array, k: Array, v: Array, *, causal: bool, dtype: DType = "float16", **features: Any) -> Problem:
    """Return the problem of Q, K and V; `features` are its window and soft cap.

    Raises:
        ShapeError: the shapes are not those of a problem.
    """
    q_shape, k_shape, v_shape = shapes = [tuple(int(n) for n in x.shape) for x in (q, k, v)]
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v_shape or q_shape[::3] != k_shape[::3]:
        got = ", ".join(f"{name} {shape}" for name, shape in zip("qkv", shapes, strict=True))
        raise ShapeError(
            "wanted q (batch, q_heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, head_dim), for example "
            f"(2, 8, 128, 64) and (2, 4, 256, 64), got {got}"
        )
    (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q_shape, k_shape
    mask = "causal" if causal else "full"
    return Problem.of(batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype=dtype, mask=mask, **features)


def heads(problem: Problem) -> tuple[tuple[int, int], ...]:
    """All (batch, query head) pairs."""
    return tuple((b, h) for b in range(problem.batch) for h in range(problem.q_heads))


def visible_keys(problem: Problem, rows: Array) -> Array:
    """Index one past the last visible key of each query row, 0 if none. `rows` is int64, on the host."""
    return np.clip(rows + 1 + problem.kv_len - problem.q_len + problem.reach[1], 0, problem.kv_len)


def first_keys(problem: Problem, rows: Array) -> Array:
    """Index of the first visible key of each query row."""
    return np.clip(rows + problem.kv_len - problem.q_len - problem.reach[0], 0, None)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Query rows of some heads. All arrays are on the host."""

    pairs: slice
    """Positions of its (batch, query head) pairs in those requested."""
    q_heads: Array
    """Indices of its heads among the batch · q_heads heads of Q, int64."""
    kv_heads: Array
    """Likewise among the batch · kv_heads heads of K and V."""
    span: slice
    """Positions of its rows in those requested."""
    rows: Array
    """Query rows, int64."""
    first: Array
    """First visible key of each row, int64."""
    visible: Array
    """One past the last visible key of each row; 0 if it sees none."""


def tiles(
    problem: Problem, *, pairs: Sequence[tuple[int, int]] | None = None, rows: Sequence[int] | None = None
) -> Iterator[Tile]:
    """Split a problem, or the given (batch, query head) `pairs` and query `rows`, into tiles that fit in memory."""
    all_rows = np.asarray(range(problem.q_len) if rows is None else rows, dtype=np.int64)
    first_key, visible = first_keys(problem, all_rows), visible_keys(problem, all_rows)
    batches, q_heads = np.asarray(heads(problem) if pairs is None else pairs, dtype=np.int64).T
    kv_heads = q_heads // (problem.q_heads // problem.kv_heads)
    rows_per_tile = max(1, _SCORES_PER_TILE // problem.kv_len)
    heads_per_tile = max(1, _SCORES_PER_TILE // (problem.kv_len * min(rows_per_tile, len(all_rows))))
    for first in range(0, len(q_heads), heads_per_tile):
        of_tile = slice(first, min(first + heads_per_tile, len(q_heads)))
        for start in range(0, len(all_rows), rows_per_tile):
            span = slice(start, min(start + rows_per_tile, len(all_rows)))
            yield Tile(
                pairs=of_tile,
                q_heads=batches[of_tile] * problem.q_heads + q_heads[of_tile],
                kv_heads=batches[of_tile] * problem.kv_heads + kv_heads[of_tile],
                span=span,
                rows=all_rows[span],
                first=first_key[span],
                visible=visible[span],
            )


def heads_of(x: Array, heads: Array, xp: Any = np, rows: Array | None = None) -> Array:
    """Copy some heads of an array (batch, heads, length, ...), optionally only `rows`, to (heads, length, ...)."""
    chosen = x.reshape(-1, *x.shape[2:])[xp.asarray(heads)]
    if rows is None or len(rows) == chosen.shape[1]:
        return chosen
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return chosen[:, int(rows[0]) : int(rows[-1]) + 1]
    return chosen[:, xp.asarray(rows)]


def dtype_of(x: Array) -> DType | None:
    """Return the data type of an array; None if no stage supports it, as for float32."""
    name = str(x.dtype)
    return "bfloat16" if name == "uint16" else next((d for d in DTYPES if d == name), None)


def to_float(x: Array, xp: Any = np, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """Convert float16, bfloat16 (in any representation) or float32 exactly to float32 or float64.

    Raises:
        DTypeError: another data type.
    """
    name = str(x.dtype)
    if name == "uint16":
        return (x.astype(xp.uint32) << 16).view(xp.float32).astype(dtype)
    if name not in ("float16", "bfloat16", "float32"):
        raise DTypeError(f"wanted float16, or bfloat16 as itself, as uint16 bits or as float32, got {name}")
    return x.astype(dtype)


def round_to(x: Array, dtype: DType, xp: Any = np) -> Array:
    """Round float32 values to `dtype`, ties to even; returns float32."""
    if dtype == "float16":
        return x.astype(xp.float16).astype(xp.float32)
    # bfloat16 is the upper half of float32; done on the bits so that no array library needs to know the type.
    bits = xp.ascontiguousarray(x).view(xp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return xp.where(xp.isnan(x), x, rounded.astype(xp.uint32).view(xp.float32))


def round_to_e4m3(x: Array, xp: Any = np) -> Array:
    """Round float32 values to FP8 e4m3, ties to even, saturating at 448; returns float32."""
    _, exponent = xp.frexp(x)
    exponent = xp.maximum(exponent - 1, _E4M3_MIN_EXPONENT) - (_E4M3_DIGITS - 1)
    rounded = xp.ldexp(xp.rint(xp.ldexp(x, -exponent)), exponent)
    return xp.clip(rounded, -_E4M3_MAX, _E4M3_MAX).astype(xp.float32)


def e4m3_scale(x: Array, xp: Any = np) -> Array:
    """Divisor that maps the largest magnitude of each head to the e4m3 maximum; 1 for a head of zeros.

    Args:
        x: float32 (..., length, head_dim).

    Returns:
        float32 (..., 1, 1).
    """
    largest = xp.abs(x).max(axis=(-2, -1), keepdims=True) / xp.float32(_E4M3_MAX)
    return xp.where(largest == 0, xp.float32(1), largest)


def pack(x: Array, dtype: DType, xp: Any = np) -> Array:
    """Convert float32 values to float16, or bfloat16 (uint16 bits unless `xp` is numpy)."""
    if dtype == "float16":
        return x.astype(xp.float16)
    bits = (round_to(x, dtype, xp).view(xp.uint32) >> 16).astype(xp.uint16)
    return bits.view(ml_dtypes.bfloat16) if xp is np else bits


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(head_dim)


def _tile_operands(q: Array, k: Array, v: Array, tile: Tile, xp: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """Q rows (heads, rows, head_dim), K and V (heads, keys, head_dim) of a tile, without keys that no row sees."""
    keys = slice(int(tile.first.min()), int(tile.visible.max()))
    return (
        to_float(heads_of(q, tile.q_heads, xp, tile.rows), xp, dtype),
        to_float(heads_of(k, tile.kv_heads, xp)[:, keys], xp, dtype),
        to_float(heads_of(v, tile.kv_heads, xp)[:, keys], xp, dtype),
    )


def _hide(scores: Array, tile: Tile, xp: Any) -> Array:
    """Mask scores (heads, rows, keys) with -inf."""
    low, high = int(tile.first.min()), int(tile.visible.max())
    if int(tile.first.max()) == low and int(tile.visible.min()) == high:
        return scores
    keys = xp.arange(low, high)[None, :]
    seen = (keys >= xp.asarray(tile.first)[:, None]) & (keys < xp.asarray(tile.visible)[:, None])
    return xp.where(seen, scores, -xp.inf)


def _cap(scores: Array, softcap: float, xp: Any) -> Array:
    """Apply a soft cap to scores, unless it is 0."""
    if not softcap:
        return scores
    cap = scores.dtype.type(softcap)
    return cap * xp.tanh(scores / cap)


def _softmax_parts(scores: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Return exp(score - max), computed in place, its sum (1 if no key is visible) and the LSE, (heads, rows, 1)."""
    largest = scores.max(axis=2, keepdims=True)
    seen = largest > -xp.inf
    scores -= xp.where(seen, largest, 0)
    xp.exp(scores, out=scores)
    total = xp.where(seen, scores.sum(axis=2, keepdims=True), 1)
    return scores, total, xp.where(seen, largest + xp.log(total), -xp.inf)


def exact_tile(
    q: Array, k: Array, v: Array, tile: Tile, *, scale: float, softcap: float = 0.0, xp: Any = np
) -> tuple[Array, Array, Array]:
    """Compute a tile in float64.

    Returns:
        Output (heads, rows, head_dim), log-sum-exp (heads, rows) and the 2-norm of the probabilities (heads, rows), the
        factor by which independent relative errors of the probabilities enter their sum.
    """
    q_rows, keys, values = _tile_operands(q, k, v, tile, xp, xp.float64)
    if keys.shape[1] == 0:
        none = xp.zeros(q_rows.shape[:2])
        return xp.zeros_like(q_rows), none - xp.inf, none
    q_rows *= scale
    scores = _cap(q_rows @ keys.transpose(0, 2, 1), softcap, xp)
    weights, total, lse = _softmax_parts(_hide(scores, tile, xp), xp)
    out = weights @ values / total
    weights *= weights
    return out, lse[:, :, 0], xp.sqrt(weights.sum(axis=2)) / total[:, :, 0]


def plain_tile(
    q: Array,
    k: Array,
    v: Array,
    tile: Tile,
    *,
    scale: float,
    dtype: DType,
    precision: Precision = "input",
    softcap: float = 0.0,
    xp: Any = np,
) -> tuple[Array, Array]:
    """Compute a tile at a precision, in float32: output (heads, rows, head_dim), log-sum-exp (heads, rows).

    `input`: scores, before and after a soft cap, and probabilities are rounded to `dtype`. `e4m3_inputs`: likewise,
    after rounding Q, K and V to e4m3. `e4m3`: scores stay FP32, as between the QK and PV GEMMs in FP8, and
    exp(score - max), before division by the sum, is rounded to e4m3. `e4m3_scaled`: likewise, after scaling each head
    to the range of e4m3.
    """
    q_rows, keys, values = _tile_operands(q, k, v, tile, xp, xp.float32)
    if keys.shape[1] == 0:
        return xp.zeros_like(q_rows), xp.zeros(q_rows.shape[:2], dtype=xp.float32) - xp.float32(xp.inf)
    if precision == "e4m3_scaled":
        wholes = ((q, tile.q_heads), (k, tile.kv_heads), (v, tile.kv_heads))
        scales = [e4m3_scale(to_float(heads_of(x, heads, xp), xp), xp) for x, heads in wholes]
        rounded = zip((q_rows, keys, values), scales, strict=True)
        q_rows, keys, values = (round_to_e4m3(x / factor, xp) * factor for x, factor in rounded)
    elif precision != "input":
        q_rows, keys, values = (round_to_e4m3(x, xp) for x in (q_rows, keys, values))
    scores = (q_rows @ keys.transpose(0, 2, 1)) * xp.float32(scale)
    by_fp8 = precision in ("e4m3", "e4m3_scaled")
    if not by_fp8:
        scores = round_to(scores, dtype, xp)
    if softcap:
        scores = round_to(_cap(scores, softcap, xp), dtype, xp)
    weights, total, lse = _softmax_parts(_hide(scores, tile, xp), xp)
    if by_fp8:
        weights *= xp.float32(_E4M3_SCALE)
        out = (round_to_e4m3(weights, xp) @ values) / (total * xp.float32(_E4M3_SCALE))
    else:
        weights /= total
        out = round_to(weights, dtype, xp) @ values
    return round_to(out, dtype, xp), lse[:, :, 0]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    xp: Any = np,
) -> tuple[Array, Array]:
    """Compute softmax(scale · Q Kᵀ) V in float64.

    Args:
        q: (batch, q_heads, q_len, head_dim), float16, bfloat16 (see the module) or float32, any strides.
        causal: whether query i sees only keys j with j - i <= kv_len - q_len (aligned bottom right).
        window: see `Problem.window`.
        softcap: see `Problem.softcap`.
        xp: numpy, or cupy for CuPy arrays.

    Returns:
        The output, of the shape of q, and the log-sum-exp (batch, q_heads, q_len), natural logarithm, both float64. A
        row that sees no key has output 0 and log-sum-exp -inf.

    Raises:
        ShapeError, DTypeError: q, k, v are not a valid problem.
    """
    problem = problem_of(q, k, v, causal=causal, window=window, softcap=softcap)
    scale = default_scale(problem.head_dim) if scale is None else scale
    out = xp.empty(q.shape, dtype=xp.float64)
    lse = xp.empty(q.shape[:3], dtype=xp.float64)
    flat_out, flat_lse = out.reshape(-1, *out.shape[2:]), lse.reshape(-1, problem.q_len)
    for tile in tiles(problem):
        at = (tile.pairs, tile.span)
        flat_out[at], flat_lse[at], _ = exact_tile(q, k, v, tile, scale=scale, softcap=softcap, xp=xp)
    return out, lse


def plain(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    dtype: DType,
    precision: Precision = "input",
    scale: float | None = None,
    xp: Any = np,
) -> Array:
    """Compute attention plainly at a precision (`plain_tile`), whose error is the standard for kernels.

    Sums are float32, and the output is rounded to `dtype`.

    Returns:
        The output (batch, q_heads, q_len, head_dim), in the format of `pack`.
    """
    problem = problem_of(q, k, v, causal=causal)
    scale = default_scale(problem.head_dim) if scale is None else scale
    how: dict[str, Any] = {"scale": scale, "dtype": dtype, "precision": precision, "xp": xp}
    out = xp.empty(q.shape, dtype=xp.float32)
    flat = out.reshape(-1, *out.shape[2:])
    for tile in tiles(problem):
        flat[tile.pairs, tile.span], _ = plain_tile(q, k, v, tile, **how)
    return pack(out, dtype, xp)


def make_inputs(problem: Problem, seed: int = 0, xp: Any = np) -> tuple[Array, Array, Array]:
    """Draw Q, K and V of a problem, of the kind `problem.inputs`, in the format of `pack`; determined by seed and `xp`.

    Raises:
        ParameterError: `trained` inputs, which are not drawn.
    """
    rng = xp.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape, dtype=xp.float32) for shape in _shapes(problem))
    inputs.change(problem.inputs, q, k, causal=problem.causal, xp=xp)
    return pack(q, problem.dtype, xp), pack(k, problem.dtype, xp), pack(v, problem.dtype, xp)


def make_torch_inputs(problem: Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    """Draw inputs like `make_inputs`, as torch tensors on the current CUDA device, with torch's generator."""
    torch = importlib.import_module("torch")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda") for shape in _shapes(problem))
    if problem.inputs != inputs.NORMAL:
        cupy = importlib.import_module("cupy")  # views of the same memory
        inputs.change(problem.inputs, cupy.from_dlpack(q), cupy.from_dlpack(k), causal=problem.causal, xp=cupy)
        cupy.cuda.get_current_stream().synchronize()  # torch's stream may be another, and would not wait for it
    dtype = getattr(torch, problem.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Shapes of Q, K and V."""
    kv_shape = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    return (problem.batch, problem.q_heads, problem.q_len, problem.head_dim), kv_shape, kv_shape
