"""The oracle: attention in float64, and the same computation done plainly at the precision of its inputs.

Both walk the problem in tiles of query rows, so memory stays bounded whatever the lengths, and both run on NumPy or,
handed `xp=cupy`, on a GPU. Layouts are those of `problem.Problem`: Q and O (batch, q_heads, q_len, head_dim), K and
V (batch, kv_heads, kv_len, head_dim), log-sum-exp (batch, q_heads, q_len), natural logarithm.

float16 arrives as float16. NumPy and CuPy have no bfloat16 of their own, so it comes as `ml_dtypes.bfloat16`, where the
array library takes it (NumPy does), or as uint16, its raw bits (`torch_tensor.view(torch.uint16)` crosses to CuPy
without a copy).
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
"""Largest relative error of rounding a number to the nearest of that type."""

_E4M3_MAX = 448.0
_E4M3_DIGITS = 4
"""Significant bits, the hidden one included."""
_E4M3_MIN_EXPONENT = -6
"""Below 2^-6 the distance between neighbours stays the same."""
_E4M3_SCALE = 256.0
"""Probabilities up to 1 are stored up to this, far from where e4m3 loses digits: they cover its range from the top."""

_SCORES_PER_TILE = 1 << 22
"""Scores held at once: 32 MiB in float64 for each of the few temporaries."""


def problem_of(q: Array, k: Array, v: Array, *, causal: bool, dtype: DType = "float16", **features: Any) -> Problem:
    """The attention problem that Q, K and V are; `features` are its window and soft cap.

    Raises:
        ShapeError: they are none.
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
    """Every (batch, query head)."""
    return tuple((b, h) for b in range(problem.batch) for h in range(problem.q_heads))


def visible_keys(problem: Problem, rows: Array) -> Array:
    """One past the last key that each query row sees; 0 where it sees none. `rows` int64, on the host."""
    return np.clip(rows + 1 + problem.kv_len - problem.q_len + problem.reach[1], 0, problem.kv_len)


def first_keys(problem: Problem, rows: Array) -> Array:
    """The first key that each query row sees."""
    return np.clip(rows + problem.kv_len - problem.q_len - problem.reach[0], 0, None)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The same query rows of some heads. Every array is on the host."""

    pairs: slice
    """Positions of these (batch, query head) in the pairs asked for."""
    q_heads: Array
    """Where each of them lies among all batch · q_heads heads of Q, int64."""
    kv_heads: Array
    """And among all batch · kv_heads heads of K and V, int64."""
    span: slice
    """Positions of these rows in the rows asked for."""
    rows: Array
    """Query rows, int64."""
    first: Array
    """The first key that each of them sees, int64."""
    visible: Array
    """And one past the last; 0 where it sees none."""


def tiles(
    problem: Problem, *, pairs: Sequence[tuple[int, int]] | None = None, rows: Sequence[int] | None = None
) -> Iterator[Tile]:
    """The problem, or those (batch, query head) `pairs` and query `rows` of it, in tiles whose scores fit in memory."""
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
    """Some heads, (heads, length, ...), of an array (batch, heads, length, ...), or those `rows` of them; a copy."""
    chosen = x.reshape(-1, *x.shape[2:])[xp.asarray(heads)]
    if rows is None or len(rows) == chosen.shape[1]:
        return chosen
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return chosen[:, int(rows[0]) : int(rows[-1]) + 1]
    return chosen[:, xp.asarray(rows)]


def dtype_of(x: Array) -> DType | None:
    """The element type an array holds, None for one that no stage takes. float32 counts as neither."""
    name = str(x.dtype)
    return "bfloat16" if name == "uint16" else next((d for d in DTYPES if d == name), None)


def to_float(x: Array, xp: Any = np, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """The values of float16, bfloat16 (in any of its guises) or float32 as float32 or float64, exactly.

    Raises:
        DTypeError: another element type.
    """
    name = str(x.dtype)
    if name == "uint16":
        return (x.astype(xp.uint32) << 16).view(xp.float32).astype(dtype)
    if name not in ("float16", "bfloat16", "float32"):
        raise DTypeError(f"wanted float16, or bfloat16 as itself, as uint16 bits or as float32, got {name}")
    return x.astype(dtype)


def round_to(x: Array, dtype: DType, xp: Any = np) -> Array:
    """float32 values rounded to the nearest of `dtype`, ties to even, still as float32."""
    if dtype == "float16":
        return x.astype(xp.float16).astype(xp.float32)
    # bfloat16 is the upper half of float32; done on the bits so that no array library needs to know the type.
    bits = xp.ascontiguousarray(x).view(xp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return xp.where(xp.isnan(x), x, rounded.astype(xp.uint32).view(xp.float32))


def round_to_e4m3(x: Array, xp: Any = np) -> Array:
    """float32 values rounded to the nearest of FP8 e4m3, ties to even, beyond 448 to 448; still as float32."""
    _, exponent = xp.frexp(x)
    exponent = xp.maximum(exponent - 1, _E4M3_MIN_EXPONENT) - (_E4M3_DIGITS - 1)
    rounded = xp.ldexp(xp.rint(xp.ldexp(x, -exponent)), exponent)
    return xp.clip(rounded, -_E4M3_MAX, _E4M3_MAX).astype(xp.float32)


def e4m3_scale(x: Array, xp: Any = np) -> Array:
    """What brings the largest number of each head to e4m3's largest, by division; 1 for a head of zeros.

    Args:
        x: float32 (..., length, head_dim).

    Returns:
        float32 (..., 1, 1).
    """
    largest = xp.abs(x).max(axis=(-2, -1), keepdims=True) / xp.float32(_E4M3_MAX)
    return xp.where(largest == 0, xp.float32(1), largest)


def pack(x: Array, dtype: DType, xp: Any = np) -> Array:
    """float32 values rounded to `dtype` and stored as float16, or bfloat16 (uint16 bits where `xp` is not numpy)."""
    if dtype == "float16":
        return x.astype(xp.float16)
    bits = (round_to(x, dtype, xp).view(xp.uint32) >> 16).astype(xp.uint16)
    return bits.view(ml_dtypes.bfloat16) if xp is np else bits


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(head_dim)


def _tile_operands(q: Array, k: Array, v: Array, tile: Tile, xp: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """Q rows (heads, rows, head_dim), K and V (heads, keys, head_dim) of a tile; keys that no row sees are left out."""
    keys = slice(int(tile.first.min()), int(tile.visible.max()))
    return (
        to_float(heads_of(q, tile.q_heads, xp, tile.rows), xp, dtype),
        to_float(heads_of(k, tile.kv_heads, xp)[:, keys], xp, dtype),
        to_float(heads_of(v, tile.kv_heads, xp)[:, keys], xp, dtype),
    )


def _hide(scores: Array, tile: Tile, xp: Any) -> Array:
    """Scores (heads, rows, keys) with -inf where the row does not see the key."""
    low, high = int(tile.first.min()), int(tile.visible.max())
    if int(tile.first.max()) == low and int(tile.visible.min()) == high:
        return scores
    keys = xp.arange(low, high)[None, :]
    seen = (keys >= xp.asarray(tile.first)[:, None]) & (keys < xp.asarray(tile.visible)[:, None])
    return xp.where(seen, scores, -xp.inf)


def _cap(scores: Array, softcap: float, xp: Any) -> Array:
    """Scores bounded by a soft cap, where there is one."""
    if not softcap:
        return scores
    cap = scores.dtype.type(softcap)
    return cap * xp.tanh(scores / cap)


def _softmax_parts(scores: Array, xp: Any) -> tuple[Array, Array, Array]:
    """exp(score - max) in place of the scores, its sum (1 where no key is seen), the log-sum-exp, (heads, rows, 1)."""
    largest = scores.max(axis=2, keepdims=True)
    seen = largest > -xp.inf
    scores -= xp.where(seen, largest, 0)
    xp.exp(scores, out=scores)
    total = xp.where(seen, scores.sum(axis=2, keepdims=True), 1)
    return scores, total, xp.where(seen, largest + xp.log(total), -xp.inf)


def exact_tile(
    q: Array, k: Array, v: Array, tile: Tile, *, scale: float, softcap: float = 0.0, xp: Any = np
) -> tuple[Array, Array, Array]:
    """One tile in float64.

    Returns:
        Output (heads, rows, head_dim), log-sum-exp (heads, rows) and the norm of the probabilities sqrt(sum p²) (heads,
        rows): what independent relative errors of the probabilities are multiplied by in a sum over them.
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
    """One tile at a precision, float32 holding its values: output (heads, rows, head_dim), log-sum-exp (heads, rows).

    `input`: scores, before and after a soft cap, and probabilities are rounded to `dtype`. `e4m3_inputs`: so are they,
    after Q, K and V were rounded to e4m3. `e4m3`: scores stay FP32, as they do between the QK and PV GEMMs of FP8, and
    exp(score - max), not yet divided by its sum, is rounded to e4m3. `e4m3_scaled`: so it is, after each head was
    scaled to e4m3's range.
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
    """softmax(scale · Q Kᵀ) V in float64.

    Args:
        q: (batch, q_heads, q_len, head_dim), float16, bfloat16 (see the module) or float32, any strides.
        causal: bottom-right aligned: query i sees key j when j - i <= kv_len - q_len.
        window: as `Problem.window`.
        softcap: as `Problem.softcap`.
        xp: numpy, or cupy where q, k and v are CuPy arrays.

    Returns:
        The output, like q, and the log-sum-exp (batch, q_heads, q_len), natural logarithm, both float64. A row that
        sees no key has output 0 and log-sum-exp -inf.

    Raises:
        ShapeError, DTypeError: q, k, v are no attention problem.
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
    """Attention as one would write it at a precision (`plain_tile`); its error is the yardstick for a kernel's.

    Sums are float32, and the output is rounded to `dtype`.

    Returns:
        The output (batch, q_heads, q_len, head_dim), stored as `pack` does.
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
    """Q, K, V of a problem, of the kind `problem.inputs`, stored as `pack` does. The same for the same seed and `xp`.

    Raises:
        ParameterError: `trained` inputs, which are not drawn.
    """
    rng = xp.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape, dtype=xp.float32) for shape in _shapes(problem))
    inputs.change(problem.inputs, q, k, causal=problem.causal, xp=xp)
    return pack(q, problem.dtype, xp), pack(k, problem.dtype, xp), pack(v, problem.dtype, xp)


def make_torch_inputs(problem: Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    """As `make_inputs`, made on the current CUDA device by torch's generator: torch tensors of the problem's type."""
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
    """Of Q, K and V."""
    kv_shape = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    return (problem.batch, problem.q_heads, problem.q_len, problem.head_dim), kv_shape, kv_shape
