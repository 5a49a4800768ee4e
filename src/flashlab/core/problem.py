"""Attention problems: shape, options and cost, and the suites of problems that are measured.

A problem is softmax(scale · Q Kᵀ) V over `batch` sequences and `q_heads` heads, with
Q (batch, q_heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim), and O shaped like Q.
The causal mask is aligned bottom right: query `i` sees key `j` if j - i ≤ kv_len - q_len.
A window (left, right) keeps the keys with -left ≤ j - i - (kv_len - q_len) ≤ right, and a soft cap c replaces a score
by c · tanh(score / c). A query that sees no key has output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

from flashlab.core.errors import DTypeError, ParameterError, ShapeError, refuse_unknown
from flashlab.core.inputs import NORMAL, require
from flashlab.core.paths import table

DType = Literal["float16", "bfloat16"]
Mask = Literal["full", "causal"]
Feature = Literal["window", "softcap", "varlen"]
"""Optional features, which only some stages support."""
UNLIMITED = -1
"""A side of a window without limit."""
Window = tuple[int, int]
NO_WINDOW: Window = (UNLIMITED, UNLIMITED)
Precision = Literal["input", "e4m3_inputs", "e4m3", "e4m3_scaled"]
"""Precision of the GEMM operands. input: the input dtype. e4m3_inputs: Q, K and V in FP8 (e4m3). e4m3: the
probabilities too. e4m3_scaled: the same with one scale per head that maps its largest magnitude to the e4m3 maximum.
Accumulation is FP32 and the output has the input dtype in all cases."""
Regime = Literal["burst", "sustained"]
"""burst: short samples with idle gaps, during which the SM clock returns to its maximum. sustained: continuous load,
power-limited."""
Cache = Literal["hot", "cold", "rotating", "step"]
"""hot: calls back to back. cold: L2 overwritten before every call. rotating: back to back, each call on other K and V.
step: as in a decoding step of a model: in a CUDA graph, each call after a kernel that writes q, whose time is
subtracted; with few query rows, each call also has other K and V."""
AS_IN_A_MODEL: tuple[Cache, ...] = ("step", "rotating")
"""The states most like a model for calls with few query rows, the closest first."""
DTYPES: tuple[DType, ...] = get_args(DType)
MASKS: tuple[Mask, ...] = get_args(Mask)
FEATURES: tuple[Feature, ...] = get_args(Feature)
WITHOUT_FEATURES: Mapping[str, Any] = {"window": NO_WINDOW, "softcap": 0.0, "varlen": False}
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
"""Fields of a shape, in the order `BxHxHkvxSqxSkxD`."""
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One attention problem. All sizes are positive integers."""

    batch: int
    q_heads: int
    kv_heads: int
    """Divides `q_heads`; consecutive query heads share a K/V head (grouped-query attention)."""
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType = "float16"
    mask: Mask = "full"
    inputs: str = NORMAL
    """Distribution of Q, K and V, one of `inputs.KINDS`."""
    window: Window = NO_WINDOW
    """Sliding window (left, right): visible keys before and after the diagonal, itself not counted; `UNLIMITED` for no
    limit. Under a causal mask, `right` has no effect."""
    softcap: float = 0.0
    """Soft cap on scores, applied before the mask: softcap · tanh(score / softcap); 0 disables it."""
    varlen: bool = False
    """Whether sequences of different lengths are packed in one tensor (`flashlab.varlen_attention`); `q_len` is then
    the maximum query length, `kv_len` the total number of keys, and `flops` and `compulsory_bytes` do not apply."""

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShapeError(f"{name}: wanted a positive integer, got {value!r}")
        if self.q_heads % self.kv_heads:
            raise ShapeError(
                f"q_heads: wanted a multiple of kv_heads, got {self.q_heads} query heads for {self.kv_heads} key heads"
            )
        if self.dtype not in DTYPES:
            raise DTypeError(f"dtype: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        refuse_unknown("mask", MASKS, self.mask)
        require(self.inputs)
        object.__setattr__(self, "window", tuple(self.window))  # JSON has lists
        if len(self.window) != 2 or any(type(side) is not int or side < UNLIMITED for side in self.window):
            raise ParameterError(
                f"window: wanted (left, right), integers ≥ 0, or {UNLIMITED} for no limit, got {self.window!r}"
            )
        if isinstance(self.softcap, bool) or not isinstance(self.softcap, (int, float)) or not 0 <= self.softcap < inf:
            raise ParameterError(f"softcap: wanted a positive finite number, or 0 for none, got {self.softcap!r}")

    @classmethod
    def of(cls, *sizes: int, **others: Any) -> Problem:
        """Build a problem from its `SIZES` in order; `others` are the remaining fields."""
        fields: dict[str, Any] = {**dict(zip(SIZES, sizes, strict=True)), **others}
        return cls(**fields)

    @classmethod
    def parse(cls, shape: str, *, dtype: str = "float16", mask: str = "full", **others: Any) -> Problem:
        """Parse `BxHxSxD` or `BxHxHkvxSqxSkxD`, e.g. `16x16x2048x64`; `others` are the remaining fields.

        Raises:
            ShapeError: the text is not four or six positive integers joined by `x`.
        """
        try:
            numbers = [int(part) for part in shape.lower().split("x")]
        except ValueError:
            numbers = []
        if len(numbers) == 4:
            batch, heads, length, head_dim = numbers
            numbers = [batch, heads, heads, length, length, head_dim]
        if len(numbers) != 6:
            raise ShapeError(
                "shape: wanted BxHxSxD or BxHxHkvxSqxSkxD, for example 16x16x2048x64 or 2x32x8x1024x8192x128, "
                f"got {shape!r}"
            )
        return cls.of(*numbers, dtype=dtype, mask=mask, **others)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The optional features in use."""
        return tuple(name for name in FEATURES if getattr(self, name) != WITHOUT_FEATURES[name])

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments with which `flashlab.attention` computes the problem."""
        return {"causal": self.causal, **{name: getattr(self, name) for name in self.features}}

    @property
    def reach(self) -> Window:
        """Maximum number of visible keys before and after the diagonal, under mask and window."""
        longest = max(self.q_len, self.kv_len)
        left, right = (longest if side == UNLIMITED else min(side, longest) for side in self.window)
        return left, 0 if self.causal else right

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def shape(self) -> str:
        """The shape in the format of `parse`: four numbers if Q, K and V have the same heads and length, else six."""
        if self.q_heads == self.kv_heads and self.q_len == self.kv_len:
            return f"{self.batch}x{self.q_heads}x{self.q_len}x{self.head_dim}"
        return f"{self.batch}x{self.q_heads}x{self.kv_heads}x{self.q_len}x{self.kv_len}x{self.head_dim}"

    @property
    def sizes(self) -> str:
        """The shape for display: `B16 H16 S2048 D64`."""
        heads = f"H{self.q_heads}" if self.q_heads == self.kv_heads else f"H{self.q_heads}/{self.kv_heads}"
        length = f"S{self.q_len}" if self.q_len == self.kv_len else f"Sq{self.q_len} Sk{self.kv_len}"
        return f"B{self.batch} {heads} {length} D{self.head_dim}"

    @property
    def label(self) -> str:
        """Display name: `B16 H16 S2048 D64 causal float16`, then features, and inputs unless normal."""
        inputs = "" if self.inputs == NORMAL else self.inputs
        return " ".join(filter(None, (self.sizes, self.mask, self.dtype, self.features_label, inputs)))

    @property
    def features_label(self) -> str:
        """The features for display: `window 511:-1 softcap 50`; empty if there are none."""
        texts = {"window": "window {}:{}".format(*self.window), "softcap": f"softcap {self.softcap:g}"}
        texts["varlen"] = "varlen"
        return " ".join(texts[name] for name in self.features)

    def flat(self) -> dict[str, object]:
        """The JSON form: display name, and the fields as command options."""
        fields = ("shape", "mask", "dtype", "inputs", *self.features)
        return {"problem": self.label} | {name: getattr(self, name) for name in fields}

    @property
    def visible_scores(self) -> float:
        """Scores per head: q_len · kv_len, or the area below the diagonal under a causal mask.

        The area, not the number of cells, so that a square causal problem costs exactly half of the non-causal one, the
        convention of published benchmarks. With a window, the number of cells, as in FlashAttention's benchmark.
        """
        if "window" in self.features:
            left, right = self.reach
            return float(self._keys_up_to(right) - self._keys_up_to(-left - 1))
        if not self.causal:
            return float(self.q_len * self.kv_len)
        if self.q_len <= self.kv_len:
            return self.q_len * self.kv_len - self.q_len**2 / 2
        return self.kv_len**2 / 2

    def _keys_up_to(self, beyond: int) -> int:
        """Sum over the queries of the number of keys up to `beyond` keys past the diagonal."""

        def rising(first: int) -> int:  # Σ max(0, first + i) over the queries i
            low, high = max(first, 0), first + self.q_len - 1
            return (low + high) * (high - low + 1) // 2 if high > 0 else 0

        first = 1 + self.kv_len - self.q_len + beyond
        return rising(first) - rising(first - self.kv_len)

    @property
    def flops(self) -> float:
        """Floating-point operations: two GEMMs of 2 · head_dim per score. The softmax is not counted."""
        return 4.0 * self.batch * self.q_heads * self.head_dim * self.visible_scores

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must cross device memory: Q, K and V read once, O written once."""
        q = self.batch * self.q_heads * self.q_len * self.head_dim
        kv = self.batch * self.kv_heads * self.kv_len * self.head_dim
        return BYTES_PER_ELEMENT * (2 * q + 2 * kv)

    def tflops(self, time_us: float) -> float:
        """Throughput, in TFLOP/s, of a call that takes `time_us` microseconds."""
        return self.flops / time_us / 1e6


_SUITES = table(__file__, "suites")
SUITES = tuple(_SUITES)
FIRST_SHAPE: str = _SUITES["first"]["shapes"][0]
"""The shape that the published sources state; the ladder is shown at it."""
STANDARD_SHAPES: tuple[str, ...] = tuple(_SUITES["standard"]["shapes"])


def matching(problems: Iterable[Problem], **wanted: object) -> list[Problem]:
    """Filter problems by fields: a value, or a list of allowed values; None and empty lists match everything.

    For example `matching(suite("standard"), dtype="float16", head_dim=[64, 128])`.
    """
    values = {name: value if isinstance(value, list) else [value] for name, value in wanted.items() if value}
    return [problem for problem in problems if all(getattr(problem, name) in among for name, among in values.items())]


def suite(name: str) -> tuple[Problem, ...]:
    """Return the problems of a suite (suites.toml): its shapes in all their dtypes, masks and features, normal inputs.

    Raises:
        ParameterError: no such suite.
    """
    refuse_unknown("suite", _SUITES, name)
    of = _SUITES[name]
    return tuple(
        Problem.parse(shape, dtype=dtype, mask=mask, **features)
        for shape in of["shapes"]
        for dtype in (("float16",) if shape in of.get("float16", ()) else of.get("dtypes", DTYPES))
        for mask in of.get("masks", MASKS)
        for features in of.get("features", ({},))
    )
