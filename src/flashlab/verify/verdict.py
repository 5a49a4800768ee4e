"""Verdicts on kernel outputs, and guarded buffers that detect stray accesses.

The rule. Errors are against the float64 oracle; `plain` is the same computation done plainly at the same precision,
which for every rung of the ladder is that of its inputs (`oracle.plain`). An output passes if in every band of 64 query
rows of every head

    max |error|  <=  2 · max |error of plain|  +  3 · slack · max |O|
    rms  error   <=  2 · rms  error of plain   +      slack · rms  O

    slack = c · u · (1 + σ) · (1 + 1 / rows in the band)

with u the unit roundoff of the data type, σ = scale · max |q| · max |k| / sqrt(head_dim) the magnitude of the scores
(about 1 for normal inputs) and c = 1 for float16, 1/2 for bfloat16.

- The factor 2 on plain's error is the usual allowance for another order of the same roundings (flash-attention's
  tests).
- The slack covers roundings that plain does not have. A kernel that multiplies in packed fp16 rounds at every step of
  its short fp16 sums, 8 or 16 terms: the scores by about σ u, the output by about u of its size. No kernel sums in
  bfloat16, hence c.
- 1 / rows: a single row has few independent errors, and plain can be exact by luck.
- The slack is relative to the output in the band. The usual absolute slack is hundreds of times the rounding error at
  long lengths, where outputs are small.
- Bands, because the size of outputs falls with the number of keys: the first causal rows are as large as V, and their
  errors would hide anything in the late rows. 64 rows are a tile of most kernels, so a wrong tile, head or last row
  fills its band, and they hold enough elements to make plain's error a statistic.
- The maximum catches a single wrong element, the RMS a small error everywhere (a scale 1 % off).

The log-sum-exp passes if in every band

    |error|  <=  2 · max |error of plain|  +  6 · c · u · σ · |p|  +  8 · s · (1 + |lse| + σ · sqrt(head_dim))

with |p| the 2-norm of the probabilities. Independent errors of scores affect the log-sum-exp only if few keys carry
the weight, so the limit tightens with length and detects a few extra keys among thousands. The last term covers
accumulation: s is 2^-24 for float32, and 2^-13 for e4m3 on tensor cores, which keep no more bits and truncate the rest,
so that all scores of a row are slightly too small.

Every comparison is `not (error <= limit)`, so that NaN fails. Shape and dtype are checked first. Elements that still
hold their poison are reported as unwritten, not wrong. A row that sees no key must be exactly 0 and its log-sum-exp
exactly -inf, and -inf must not appear elsewhere.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from flashlab.core.errors import InputError
from flashlab.core.problem import NO_WINDOW, DType, Precision, Problem, Window
from flashlab.record.schema import Verdict
from flashlab.verify import oracle as reference
from flashlab.verify.oracle import UNIT_ROUNDOFF, Array

T = TypeVar("T")

BAND_ROWS = 64
"""Query rows per band."""

POISON_WORD = 0x7FED
GUARD_WORD = 0x7FE5
"""16-bit words that fill the elements of an output before the call, and the guards of a buffer. Both are quiet NaNs as
float16, as bfloat16 and, in pairs, as float32, and differ from the NaN that hardware produces, so that using, keeping
and overwriting them are all detected."""

_GUARD_WORDS = 4096
"""16-bit guard words before and after an array; a multiple of 128 preserves 256-byte alignment."""
_PLAIN_FACTOR = 2.0
_SUMMED_IN: dict[DType, float] = {"float16": 1.0, "bfloat16": 0.5}
_RMS_SLACK = 1.0
_MAX_SLACK = 3.0
_LSE_SLACK = 6.0
_LSE_SUM_SLACK = 8.0
_SUM_UNIT: dict[Precision, float] = {"e4m3": 2.0**-13, "e4m3_scaled": 2.0**-13}
"""Precision of e4m3 accumulation on tensor cores (site/fp8/f0_e4m3.md); all other sums have that of float32, 2^-24."""


@dataclass(frozen=True)
class Sample:
    """A subset of a problem's heads and rows, for problems that take minutes to check completely."""

    pairs: tuple[tuple[int, int], ...]
    """(batch, query head), each compared over the same rows."""
    rows: tuple[int, ...]
    """Query rows, ascending."""

    @classmethod
    def of(cls, problem: Problem, *, max_scores: int = 1 << 26, seed: int = 0) -> Sample | None:
        """Choose whole bands of some heads, at most `max_scores` scores or one band; None if the problem is smaller.

        The last and first band and head are included if the budget allows; the others are drawn with `seed`.
        """
        heads = reference.heads(problem)
        bands = -(-problem.q_len // BAND_ROWS)
        band_scores = BAND_ROWS * problem.kv_len
        if len(heads) * bands * band_scores <= max_scores:
            return None
        affordable = max(1, max_scores // band_scores)
        num_pairs = min(len(heads), max(1, math.isqrt(affordable)))
        num_bands = min(bands, max(1, affordable // num_pairs))
        rng = np.random.default_rng(seed)
        pairs = tuple(heads[i] for i in _draw(len(heads), num_pairs, rng))
        rows = tuple(
            row
            for band in _draw(bands, num_bands, rng)
            for row in range(band * BAND_ROWS, min((band + 1) * BAND_ROWS, problem.q_len))
        )
        return cls(pairs, rows)


def _draw(total: int, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` numbers below `total`, ascending: the last, the first, then random ones."""
    ends = [total - 1, 0][: min(count, total)] if total > 1 else [0]
    rest = rng.permutation(np.arange(1, max(1, total - 1)))[: count - len(ends)]
    return sorted({*ends, *(int(i) for i in rest)})


class Oracle:
    """Cache of the reference values of one problem, shared by the checks of several outputs.

    Use one instance for all checks with the same q, k, v, mask, dtype, scale and sample, and for no others. The
    precision may differ.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the cached value of `key`, computing it on the first call."""
        if key not in self._known:
            self._known[key] = compute()
        known: T = self._known[key]
        return known


def check(
    out: Array,
    lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    dtype: DType,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    precision: Precision = "input",
    scale: float | None = None,
    sample: Sample | None = None,
    against: tuple[Array, Array | None] | None = None,
    oracle: Oracle | None = None,
    xp: Any = np,
) -> Verdict:
    """Judge an attention output against the oracle.

    Args:
        out: (batch, q_heads, q_len, head_dim) of `dtype`; for representations of bfloat16 see oracle.py.
        lse: log-sum-exp (batch, q_heads, q_len) float32, natural logarithm; None if the implementation has none.
        q, k, v: the inputs, finite; see `oracle.attention`.
        causal, window, softcap, scale: options of the call; scale None is 1 / sqrt(head_dim).
        precision: precision of the implementation; see `oracle.plain_tile`.
        sample: compare only this part with the oracle. Shape, dtype, poison and finiteness are checked completely.
        against: another output and log-sum-exp of the same problem, with which to compare instead of the oracle, within
            the same limits, e.g. that of the same kernel on another machine.
        oracle: cache shared with other checks of the same problem.
        xp: numpy, or cupy for CuPy arrays.

    Raises:
        InputError: q, k, v are not a valid problem, not finite, or so large that plain overflows.
    """
    problem = reference.problem_of(q, k, v, causal=causal, dtype=dtype, window=window, softcap=softcap)
    scale = reference.default_scale(problem.head_dim) if scale is None else scale
    oracle = Oracle() if oracle is None else oracle
    oracle.once("finite", partial(_require_finite, q, k, v, xp))
    # Copy to a contiguous array, so that CuPy needs no kernel per layout below.
    out = xp.ascontiguousarray(out)
    wrong = (
        _wrong_form(out, lse, problem)
        or _wrong_contents(out, "output", problem, xp)
        or (lse is not None and _wrong_contents(lse, "LSE", problem, xp))
    )
    if wrong:
        return _verdict(wrong)
    pairs, rows = (sample.pairs, sample.rows) if sample else (reference.heads(problem), tuple(range(problem.q_len)))
    statistics: dict[str, Any] = defaultdict(lambda: np.zeros((len(pairs), len(rows))))
    for tile in reference.tiles(problem, pairs=pairs, rows=rows):
        compute = partial(_of_oracle, q, k, v, tile, problem=problem, precision=precision, scale=scale, xp=xp)
        exact, known = oracle.once((tile.pairs.start, tile.span.start, precision), compute)
        for name, values in {**known, **_errors((out, lse), tile, exact, against or (None, None), xp)}.items():
            statistics[name][tile.pairs, tile.span] = values
    if not np.isfinite(statistics["plain_max"]).all():
        raise InputError(f"wanted q and k whose scores fit {dtype}, got scores that overflow")
    return _judge(dict(statistics), problem, pairs, np.asarray(rows), precision)


def check_as_flash_attention(
    out: Array,
    lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    dtype: DType,
    precision: Precision = "input",
    oracle: Oracle | None = None,
    xp: Any = np,
) -> Verdict:
    """Judge an output by the rule of flash-attention's own forward tests.

    The maximum error may be at most twice that of the same computation done plainly in `dtype`, plus twice the error
    that adding and subtracting 0.3 makes in the exact output. The plain computation rounds K times scale, scores,
    probabilities and output to `dtype`, like PyTorch's operations. Arguments are those of `check`; `precision` is
    ignored.
    """
    problem = reference.problem_of(q, k, v, causal=causal, dtype=dtype)
    wrong = _wrong_form(out, lse, problem) or _wrong_contents(out, "output", problem, xp)
    if wrong:
        return _verdict(wrong)
    oracle = Oracle() if oracle is None else oracle
    compute = partial(flash_attention_limit, q, k, v, causal=causal, dtype=dtype, xp=xp)
    exact, limit = oracle.once("flash-attention", compute)
    error = float(xp.abs(reference.to_float(out, xp) - exact).max())
    reason = "" if error <= limit else f"max abs error {error:.3g} over flash-attention's limit {limit:.3g}"
    return _verdict(reason, max_abs_error=error, max_abs_limit=limit)


def flash_attention_limit(
    q: Array, k: Array, v: Array, *, causal: bool, dtype: DType, xp: Any = np
) -> tuple[Array, float]:
    """Return the exact output, rounded to `dtype`, in float32, and the error limit of flash-attention's tests."""
    exact, _ = reference.attention(q, k, v, causal=causal, xp=xp)
    exact = reference.round_to(exact.astype(xp.float32), dtype, xp)
    scaled = reference.to_float(k, xp) * xp.float32(reference.default_scale(q.shape[3]))
    plain = reference.plain(q, reference.pack(scaled, dtype, xp), v, causal=causal, dtype=dtype, scale=1.0, xp=xp)
    shifted = reference.round_to(exact + xp.float32(0.3), dtype, xp)
    shifted = reference.round_to(shifted - xp.float32(0.3), dtype, xp)
    slack = xp.abs(reference.round_to(shifted - exact, dtype, xp)).max()
    plain_error = xp.abs(reference.to_float(plain, xp) - exact).max()
    return exact, float(_PLAIN_FACTOR * (plain_error + slack))


def _require_finite(q: Array, k: Array, v: Array, xp: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _any(~xp.isfinite(reference.to_float(x, xp)), xp):
            raise InputError(f"{name}: wanted finite values, got NaN or infinity")


def _verdict(reason: str = "", **numbers: float) -> Verdict:
    """Build a verdict, passed if `reason` is empty. Numbers that are not finite become None, for JSON."""
    return Verdict(
        passed=not reason, reason=reason, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}
    )


# --- Form and contents: what can be said without the oracle -----------------------------------------------------------


def _wrong_form(out: Array, lse: Array | None, problem: Problem) -> str:
    shape, dtype = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim), problem.dtype
    if tuple(out.shape) != shape:
        return f"output shape: wanted {shape}, got {tuple(out.shape)}"
    if reference.dtype_of(out) != dtype:
        return f"output dtype: wanted {dtype}, got {out.dtype}"
    if lse is None:
        return ""
    if tuple(lse.shape) != shape[:3]:
        return f"LSE shape: wanted {shape[:3]}, got {tuple(lse.shape)}"
    if str(lse.dtype) != "float32":
        return f"LSE dtype: wanted float32, got {lse.dtype}"
    return ""


def _bits(x: Array, xp: Any) -> Array:
    """View an array as unsigned integers."""
    return x.view({2: xp.uint16, 4: xp.uint32}[x.dtype.itemsize])


def _poison(itemsize: int) -> int:
    return POISON_WORD if itemsize == 2 else POISON_WORD << 16 | POISON_WORD


def _any(flags: Array, xp: Any) -> bool:
    """Whether a flag is set, as a maximum: for `any`, CuPy compiles a kernel per class of sizes."""
    return bool(xp.ascontiguousarray(flags).view(xp.uint8).max())


def _wrong_contents(x: Array, name: str, problem: Problem, xp: Any) -> str:
    """Describe elements that are unwritten, NaN, infinite, or wrong in rows that see no key; empty if none are."""
    values = reference.to_float(x, xp)
    blind = reference.visible_keys(problem, np.arange(problem.q_len)) == 0
    if not blind.any() and not _any(~xp.isfinite(values), xp):
        return ""  # poison is a NaN
    bits = _bits(x, xp)
    unwritten = bits == _poison(x.dtype.itemsize)
    if _any(unwritten, xp):
        return f"{name} unwritten: {_where(unwritten)}"
    nan = xp.isnan(values)
    if _any(nan, xp):
        return f"NaN in {name}: {_where(nan)}"
    infinite = xp.isinf(values)
    at_rest = 0.0
    if name == "LSE":
        at_rest = -math.inf
        infinite &= ~((values == at_rest) & xp.asarray(blind))
    if _any(infinite, xp):
        return f"infinity in {name}: {_where(infinite)}"
    if blind.any():
        blind_rows = int(blind.sum())  # They come first: the diagonal ends at the last query and the last key.
        restless = xp.zeros(values.shape, dtype=bool)
        restless[:, :, :blind_rows] = values[:, :, :blind_rows] != at_rest
        if _any(restless, xp):
            return f"{name} of rows that see no key not {at_rest:g}: {_where(restless)}"
    return ""


def _where(flags: Array) -> str:
    """Describe the elements set in `flags` (batch, head, row[, d]): their number, query rows, and the first."""
    first = tuple(int(i) for i in np.unravel_index(int(flags.ravel().argmax()), flags.shape))
    place = ", ".join(f"{axis} {i}" for axis, i in zip(("batch", "head", "row", "d"), first, strict=False))
    in_row = flags.any(axis=3) if flags.ndim == 4 else flags
    rows = np.flatnonzero(_to_host(in_row.any(axis=(0, 1))))
    lines = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]}..{rows[-1]}"
    if len(rows) != rows[-1] - rows[0] + 1:
        lines = f"{len(rows)} rows from {rows[0]} to {rows[-1]}"
    return f"{int(flags.sum())} of {flags.size} elements, {lines}, first at {place}"


def _to_host(x: Array) -> Any:
    """Convert a NumPy or CuPy array to NumPy."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


# --- Comparison with the oracle ---------------------------------------------------------------------------------------


def _of_oracle(
    q: Array,
    k: Array,
    v: Array,
    tile: reference.Tile,
    *,
    problem: Problem,
    precision: Precision,
    scale: float,
    xp: Any,
) -> tuple[tuple[Array, Array], dict[str, Any]]:
    """Compute what is independent of any output of a tile.

    Returns:
        Exact output (heads, rows, head_dim) and log-sum-exp (heads, rows), 0 for rows that see no key, float64 on the
        device of the inputs; and statistics by name, (heads, rows) float64 on the host, of which `score_size` is
        scale · |q| · max |k| / sqrt(head_dim).
    """
    how: dict[str, Any] = {"scale": scale, "softcap": problem.softcap, "xp": xp}
    exact, exact_lse, weight_norm = reference.exact_tile(q, k, v, tile, **how)
    plain, plain_lse = reference.plain_tile(q, k, v, tile, **how, dtype=problem.dtype, precision=precision)
    q_rows = reference.to_float(reference.heads_of(q, tile.q_heads, xp, tile.rows), xp, xp.float64)
    keys = reference.to_float(reference.heads_of(k, tile.kv_heads, xp), xp, xp.float64)
    norms = xp.sqrt((q_rows * q_rows).sum(axis=2) * (keys * keys).sum(axis=2).max(axis=1)[:, None])
    seen = xp.asarray(tile.visible > 0)
    # Rows that see no key were checked exactly before.
    lse = xp.where(seen, exact_lse, 0)
    plain_error = plain - exact
    statistics = {
        "plain_max": xp.abs(plain_error).max(axis=2),
        "plain_squares": (plain_error * plain_error).sum(axis=2),
        "out_max": xp.abs(exact).max(axis=2),
        "out_squares": (exact * exact).sum(axis=2),
        "score_size": abs(scale) / math.sqrt(problem.head_dim) * norms,
        "lse": xp.abs(lse),
        "plain_lse_error": xp.abs(xp.where(seen, plain_lse, 0) - lse),
        "weight_norm": weight_norm,
    }
    return (exact, lse), {name: _to_host(values) for name, values in statistics.items()}


def _errors(
    output: tuple[Array, Array | None],
    tile: reference.Tile,
    exact: tuple[Array, Array],
    against: tuple[Array | None, Array | None],
    xp: Any,
) -> dict[str, Any]:
    """Error statistics of an output and its log-sum-exp against the oracle, or against another output."""
    seen = xp.asarray(tile.visible > 0)

    def of_tile(x: Array) -> Array:
        values = reference.to_float(reference.heads_of(x, tile.q_heads, xp, tile.rows), xp, xp.float64)
        return values if values.ndim == 3 else xp.where(seen, values, 0)

    error: Any
    error, lse_error = (
        None if x is None else of_tile(x) - (oracles if other is None else of_tile(other))
        for x, oracles, other in zip(output, exact, against, strict=True)
    )
    errors = {"error_max": xp.abs(error).max(axis=2), "error_squares": (error * error).sum(axis=2)}
    if lse_error is not None:
        errors["lse_error"] = xp.abs(lse_error)
    return {name: _to_host(values) for name, values in errors.items()}


def _judge(
    statistics: Mapping[str, Any],
    problem: Problem,
    pairs: Sequence[tuple[int, int]],
    rows: Any,
    precision: Precision,
) -> Verdict:
    """Judge the statistics, (pairs, rows) each, of the compared `rows` of the (batch, head) `pairs`."""
    unit = _SUMMED_IN[problem.dtype] * UNIT_ROUNDOFF[problem.dtype]
    starts = np.flatnonzero(np.diff(rows // BAND_ROWS, prepend=-1))
    rows_in_band = np.diff(starts, append=len(rows))

    def most(name: str) -> Any:
        return np.maximum.reduceat(statistics[name], starts, axis=1)

    def rms(name: str) -> Any:
        return np.sqrt(np.add.reduceat(statistics[name], starts, axis=1) / (rows_in_band * problem.head_dim))

    score_size = most("score_size")
    slack = unit * (1 + score_size) * (1 + 1 / rows_in_band)
    sum_unit = _SUM_UNIT.get(precision, 2.0**-24)
    lse_limit = (
        _PLAIN_FACTOR * most("plain_lse_error")
        + _LSE_SLACK * unit * score_size * most("weight_norm")
        + _LSE_SUM_SLACK * sum_unit * (1 + most("lse") + score_size * math.sqrt(problem.head_dim))
    )
    comparisons = [
        ("max_abs", "max abs error", most("error_max"),
         _PLAIN_FACTOR * most("plain_max") + _MAX_SLACK * slack * most("out_max")),
        ("rms", "rms error", rms("error_squares"),
         _PLAIN_FACTOR * rms("plain_squares") + _RMS_SLACK * slack * rms("out_squares")),
    ]  # fmt: skip
    if "lse_error" in statistics:
        comparisons.append(("lse", "LSE error", most("lse_error"), lse_limit))

    numbers = {
        "overall_max_error": float(statistics["error_max"].max()),
        "overall_rms_error": math.sqrt(float(statistics["error_squares"].mean()) / problem.head_dim),
    }
    reason = ""
    for name, title, error, limit in comparisons:
        # An error of 0 passes a limit of 0: a band of rows that see no key.
        excess = np.where(error > 0, error / np.maximum(limit, np.finfo(np.float64).tiny), 0)
        pair, band = (int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))
        numbers[f"{name}_error"], numbers[f"{name}_limit"] = float(error[pair, band]), float(limit[pair, band])
        failed = ~(error <= limit)
        if failed.any() and not reason:
            first = rows[starts[band]]
            last = rows[np.append(starts, len(rows))[band + 1] - 1]
            batch, head = pairs[pair]
            reason = (
                f"{title} {error[pair, band]:.3g} over its limit {limit[pair, band]:.3g} in {int(failed.sum())} of "
                f"{failed.size} bands of rows, worst at batch {batch}, head {head}, rows {first}..{last}"
            )
    return _verdict(reason, **numbers)


# --- Buffers that show what was touched -------------------------------------------------------------------------------


def strides_of(shape: Sequence[int], *, row_padding: int = 0, order: str = "bhsd") -> tuple[int, ...]:
    """Strides, in elements, of (batch, head, row, d) stored in `order`, with `row_padding` elements after each row.

    `order` ends in d. `bshd` is the layout of a projection's output, in which the heads of a token are adjacent.
    """
    sizes = dict(zip("bhsd", shape, strict=True))
    strides = {"d": 1}
    step = sizes["d"] + row_padding
    for axis in reversed(order[:-1]):
        strides[axis] = step
        step *= sizes[axis]
    return tuple(strides[axis] for axis in "bhsd")


class Guarded:
    """An array inside a larger buffer that is filled with NaN before it, after it and between its rows.

    An output starts filled with poison, another NaN, which tells unwritten elements from wrong ones; writes outside are
    detected. An input (`Guarded.holding`) holds given values: a read outside that matters makes the output NaN, and
    writes are detected.

    >>> out = Guarded((1, 2, 65, 64), "float16", strides=strides_of((1, 2, 65, 64), row_padding=8))
    >>> q = Guarded.holding(q_values)
    >>> kernel(q.array, ..., out.array)
    >>> out.why_damaged() or q.why_damaged() or check(out.array, ...).reason

    Attributes:
        array: the array to pass to a kernel. bfloat16 is ml_dtypes.bfloat16 in NumPy, uint16 bits elsewhere.
        buffer: the whole buffer including guards, as contiguous 16-bit words.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        *,
        strides: Sequence[int] | None = None,
        offset_words: int = 0,
        sparse: bool = False,
        xp: Any = np,
    ) -> None:
        """Create a poisoned output; `holding` creates an input.

        Args:
            dtype: float16, bfloat16 or float32.
            strides: in elements, not overlapping; default: contiguous.
            offset_words: offset of the array in 16-bit words, to misalign it; even for float32.
            sparse: do not fill the guards, so that untouched pages take no memory, for rows far apart. Writes between
                rows are then not detected.
        """
        if strides is None:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._xp = xp
        self._words = 2 if dtype == "float32" else 1
        self._shape, self._strides = tuple(shape), tuple(strides)
        self._span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._before = _GUARD_WORDS + offset_words
        self.sparse = sparse
        size = self._before + self._span * self._words + _GUARD_WORDS
        if not sparse:
            self.buffer = xp.full(size, GUARD_WORD, dtype=xp.uint16)
        elif xp is np:
            # Small pages: NumPy would request huge ones.
            self.buffer = np.frombuffer(mmap.mmap(-1, 2 * size), dtype=np.uint16)
        else:
            self.buffer = xp.zeros(size, dtype=xp.uint16)
        self._inside(self.buffer)[...] = _poison(2 * self._words)
        self._outside: Array | None = None if sparse else self.buffer == GUARD_WORD
        self._given: Array | None = None
        bits = self._inside(self.buffer)
        if dtype == "bfloat16":
            self.array: Array = bits.view(ml_dtypes.bfloat16) if xp is np else bits
        else:
            self.array = bits.view(dtype)

    @classmethod
    def holding(cls, values: Array, **layout: Any) -> Guarded:
        """Create an input with a copy of `values` (float16, float32, or bfloat16 or its uint16 bits)."""
        xp = layout.get("xp", np)
        dtype = reference.dtype_of(values) or str(values.dtype)
        guarded = cls(values.shape, dtype, **layout)
        guarded._inside(guarded.buffer)[...] = _bits(xp.ascontiguousarray(values), xp)
        guarded._given = (guarded._inside(guarded.buffer) if guarded.sparse else guarded.buffer).copy()
        return guarded

    def _inside(self, buffer: Array) -> Array:
        """View the elements in `buffer` as unsigned integers."""
        xp = self._xp
        words = buffer[self._before : self._before + self._span * self._words]
        elements = words.view(xp.uint32) if self._words == 2 else words
        byte_strides = tuple(stride * elements.itemsize for stride in self._strides)
        return xp.lib.stride_tricks.as_strided(elements, self._shape, byte_strides)

    def why_damaged(self) -> str | None:
        """Describe forbidden writes, outside an output or anywhere in an input; None if there are none."""
        xp = self._xp
        if self._given is not None:
            if not self.sparse and not _any(self.buffer != self._given, xp):
                return None
            changed = self._inside(self.buffer) != (self._given if self.sparse else self._inside(self._given))
            if _any(changed, xp):
                return f"input modified: {int(changed.sum())} of {changed.size} elements"
        if self._outside is None:
            return None
        strange = self._outside & (self.buffer != GUARD_WORD)
        if not _any(strange, xp):
            return None
        written = xp.flatnonzero(strange)
        first, last = int(written[0]), int(written[-1])
        end = self._before + self._span * self._words
        places = [
            f"{2 * (self._before - first)} bytes before the start" if first < self._before else "",
            "in the padding between rows" if bool(((written >= self._before) & (written < end)).any()) else "",
            f"up to {2 * (last + 1 - end)} bytes after the end" if last >= end else "",
        ]
        return f"write outside the array: {2 * len(written)} bytes, {', '.join(p for p in places if p)}"


def damage(out: Guarded, lse: Guarded, inputs: Sequence[Guarded]) -> Verdict | None:
    """Build the verdict on a call with forbidden writes; None if there are none."""
    for name, buffer in (("out", out), ("lse", lse), *zip("qkv", inputs, strict=True)):
        why = buffer.why_damaged()
        if why:
            return _verdict(f"{name}: {why}")
    return None
