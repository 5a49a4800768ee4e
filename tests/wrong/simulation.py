"""An attention kernel in NumPy: tiles of queries, a loop over tiles of keys, online softmax, float32 sums.

`run` with no fault is what an honest kernel computes and must pass; each fault is a mistake that kernels make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from flashlab.core.problem import DType
from flashlab.verify.oracle import default_scale, pack, round_to, to_float

Fault = Literal[
    "zeros",
    "tile_of_nan",
    "one_infinity",
    "nothing_written",
    "last_row_unwritten",
    "last_tile_skipped",
    "tile_counted_twice",
    "tail_unmasked",
    "key_read_past_the_end",
    "causal_one_key_too_many",
    "causal_one_key_too_few",
    "causal_aligned_top_left",
    "scale_one_percent_off",
    "scale_without_root",
    "accumulator_not_rescaled",
    "sum_not_rescaled",
    "maximum_not_subtracted",
    "sum_in_float16",
    "not_normalised",
    "heads_interleaved",
    "first_head_everywhere",
    "first_batch_everywhere",
    "v_rows_swapped",
    "v_transposed",
    "blind_rows_averaged",
    "lse_in_log2",
    "lse_without_maximum",
    "lse_unwritten",
    "blind_rows_lse_zero",
    "row_past_the_end",
    "row_padding_overwritten",
    "queries_scaled_in_place",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How an honest kernel may compute; none of it is a fault."""

    tile_q: int = 64
    tile_kv: int = 64
    half_terms: int = 0
    """Terms summed in packed fp16 before they are added to a float32 sum; 0: float32 throughout."""
    sum_rounded: bool = False
    """The row sum adds the probabilities as rounded for the second product."""


@np.errstate(over="ignore", invalid="ignore")  # Some faults overflow; that is their point.
def run(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool,
    dtype: DType,
    scale: float | None = None,
    fault: Fault | None = None,
    style: Style | None = None,
) -> None:
    """Write attention of q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D) to `out` (B, Hq, Sq, D) and `lse` (B, Hq, Sq)."""
    style = style or Style()
    batches, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    scale = default_scale(head_dim) if scale is None else scale
    if fault == "scale_one_percent_off":
        scale *= 1.01
    elif fault == "scale_without_root":
        scale = 1.0 / head_dim
    elif fault == "queries_scaled_in_place":
        q *= np.float16(scale)
        scale = 1.0
    elif fault == "key_read_past_the_end":
        k, v, kv_len = _one_row_more(k), _one_row_more(v), kv_len + 1
    if fault == "nothing_written":
        return
    for batch in range(batches):
        for head in range(q_heads):
            from_batch, from_head = batch, head
            if fault == "first_batch_everywhere":
                from_batch = 0
            elif fault == "first_head_everywhere":
                from_head = 0
            kv_head = from_head // (q_heads // kv_heads)
            if fault == "heads_interleaved":
                kv_head = head % kv_heads
            for first_row in range(0, q_len, style.tile_q):
                rows = np.arange(first_row, min(first_row + style.tile_q, q_len))
                tile, tile_lse = _tile(
                    to_float(q[from_batch, from_head, rows]),
                    to_float(k[from_batch, kv_head]),
                    to_float(v[from_batch, kv_head]),
                    _visible(rows, q_len, kv_len, causal, fault),
                    scale=np.float32(scale),
                    dtype=dtype,
                    fault=fault,
                    style=style,
                )
                if fault == "last_row_unwritten" and rows[-1] == q_len - 1:
                    rows, tile, tile_lse = rows[:-1], tile[:-1], tile_lse[:-1]
                elif fault == "tile_of_nan" and first_row == style.tile_q and head == q_heads - 1:
                    tile[:] = np.nan
                elif fault == "one_infinity" and first_row == 0 and head == 0:
                    tile[3, 5] = np.inf
                elif fault == "zeros":
                    tile[:] = 0
                out[batch, head, rows] = pack(tile, dtype)
                if fault != "lse_unwritten":
                    lse[batch, head, rows] = tile_lse
    if fault == "row_past_the_end":
        _one_row_more(out)[-1, -1, -1] = out[-1, -1, -1]
    elif fault == "row_padding_overwritten":
        _one_element_more(out[0, 0, 0])[-1] = 0


def _visible(rows: Any, q_len: int, kv_len: int, causal: bool, fault: Fault | None) -> Any:
    """How many keys each row sees."""
    if not causal:
        return np.full(len(rows), kv_len)
    diagonal = rows + 1 + (0 if fault == "causal_aligned_top_left" else kv_len - q_len)
    if fault == "causal_one_key_too_many":
        diagonal = diagonal + 1
    elif fault == "causal_one_key_too_few":
        diagonal = diagonal - 1
    return np.clip(diagonal, 0, kv_len)


def _tile(
    q: Any, k: Any, v: Any, visible: Any, *, scale: Any, dtype: DType, fault: Fault | None, style: Style
) -> tuple[Any, Any]:
    """One tile of queries in float32: output (rows, D) not yet rounded, log-sum-exp (rows,)."""
    rows, head_dim = q.shape
    kv_len = len(k)
    out = np.zeros((rows, head_dim), np.float32)
    row_max = np.full((rows, 1), -np.inf, np.float32)
    row_sum = np.zeros((rows, 1), np.float32)
    starts = list(range(0, int(visible.max(initial=0)), style.tile_kv))
    if fault == "last_tile_skipped":
        starts = starts[:-1]
    elif fault == "tile_counted_twice":
        starts = starts[:1] + starts
    for start in starts:
        # A tile past the last key is filled with zeros, as a kernel's shared memory would be.
        keys, values = (np.zeros((style.tile_kv, head_dim), np.float32) for _ in range(2))
        present = min(style.tile_kv, kv_len - start)
        keys[:present], values[:present] = k[start : start + present], v[start : start + present]
        if fault == "v_rows_swapped":
            values[[0, 1]] = values[[1, 0]]
        elif fault == "v_transposed":
            values = np.ascontiguousarray(values.T)
        columns = start + np.arange(style.tile_kv)
        limit = visible[:, None]
        if fault == "tail_unmasked":
            limit = np.where(limit == kv_len, kv_len + style.tile_kv, limit)

        scores = np.where(columns < limit, _product(q, keys.T, style) * scale, np.float32(-np.inf))
        new_max = np.maximum(row_max, scores.max(axis=1, keepdims=True))
        if fault == "maximum_not_subtracted":
            new_max = np.zeros_like(new_max)
        anchor = np.where(new_max > -np.inf, new_max, np.float32(0))  # A row that has seen no key yet has no maximum.
        weights = np.exp(scores - anchor)
        rescale = np.exp(row_max - anchor)
        if fault == "maximum_not_subtracted":
            rescale = np.ones_like(rescale)
        rounded = round_to(weights, dtype)
        tile_sum = (rounded if style.sum_rounded else weights).sum(axis=1, keepdims=True)
        row_max = new_max
        row_sum = tile_sum + (row_sum if fault == "sum_not_rescaled" else row_sum * rescale)
        if fault == "sum_in_float16":
            row_sum = round_to(row_sum, "float16")
        out = _product(rounded, values, style) + (out if fault == "accumulator_not_rescaled" else out * rescale)

    seen = row_sum > 0
    if fault != "not_normalised":
        out /= np.where(seen, row_sum, 1)
    if fault == "blind_rows_averaged":
        out[~seen[:, 0]] = v.mean(axis=0)
    anchor = np.where(seen, row_max, 0)
    log_sum = np.log(np.where(seen, row_sum, 1))
    lse = np.where(seen, anchor + log_sum, -np.inf)
    if fault == "lse_in_log2":
        lse = np.where(seen, (anchor + log_sum) * np.log2(np.e), -np.inf)
    elif fault == "lse_without_maximum":
        lse = np.where(seen, log_sum, -np.inf)
    elif fault == "blind_rows_lse_zero":
        lse = np.where(seen, lse, 0)
    return out, lse[:, 0].astype(np.float32)


def _product(a: Any, b: Any, style: Style) -> Any:
    """A matrix product summed in float32, or in packed fp16 for `half_terms` terms at a time as HFMA2 does."""
    if not style.half_terms:
        return a @ b
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, a.shape[1], style.half_terms):
        part = np.zeros_like(total)
        for term in range(start, min(start + style.half_terms, a.shape[1])):
            part = round_to(part + a[:, term, None] * b[None, term], "float16")  # A fused multiply-add rounds once.
        total += part
    return total


def _one_row_more(x: Any) -> Any:
    """The tensor with the row that lies in memory after each head's last."""
    shape = (*x.shape[:2], x.shape[2] + 1, x.shape[3])
    return np.lib.stride_tricks.as_strided(x, shape, x.strides)


def _one_element_more(row: Any) -> Any:
    """A row with the element that lies in memory after it."""
    return np.lib.stride_tricks.as_strided(row, (len(row) + 1,), row.strides)
