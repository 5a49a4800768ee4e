"""What is computed: one attention problem, its cost, and the suites of problems that are measured.

Attention over `batch` sequences and `q_heads` heads, softmax(scale · Q Kᵀ) V with
Q (batch, q_heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim), O like Q.
A causal mask is aligned bottom right: query `i` sees key `j` when j - i ≤ kv_len - q_len.
A window (left, right) leaves of these keys those with -left ≤ j - i - (kv_len - q_len) ≤ right, and a soft cap c makes
a score c · tanh(score / c). A query that sees no key has output 0 and log-sum-exp -inf.
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
"""What a call may ask for beside a mask, and not every stage computes."""
UNLIMITED = -1
"""Of a window's sides: one that hides no key."""
Window = tuple[int, int]
NO_WINDOW: Window = (UNLIMITED, UNLIMITED)
Precision = Literal["input", "e4m3_inputs", "e4m3", "e4m3_scaled"]
"""What a computation's numbers are rounded to: its inputs' own type; Q, K and V to FP8 (e4m3); those and the
probabilities; the same with a scale for each head, which brings its largest number to e4m3's largest. Sums are FP32,
and the output is of the inputs' type, always."""
Regime = Literal["burst", "sustained"]
"""burst: short samples with idle gaps, the SM clock between them at its maximum. sustained: continuous work,
power-limited."""
Cache = Literal["hot", "cold", "rotating", "step"]
"""hot: calls back to back. cold: L2 overwritten before every call. rotating: back to back, each on other keys and
values. step: as in a model's step, in a CUDA graph, each behind a kernel that writes q, whose own time is taken off; of
a few query rows on other keys and values too."""
AS_IN_A_MODEL: tuple[Cache, ...] = ("step", "rotating")
"""The states in which a call of few query rows comes nearest to one in a model, the nearest first."""
DTYPES: tuple[DType, ...] = get_args(DType)
MASKS: tuple[Mask, ...] = get_args(Mask)
FEATURES: tuple[Feature, ...] = get_args(Feature)
WITHOUT_FEATURES: Mapping[str, Any] = {"window": NO_WINDOW, "softcap": 0.0, "varlen": False}
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
"""What a shape has, in its order: `BxHxHkvxSqxSkxD`."""
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One attention problem. Lengths and counts are positive integers."""

    batch: int
    q_heads: int
    kv_heads: int
    """Divides `q_heads`; consecutive query heads share a key/value head (grouped-query attention)."""
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType = "float16"
    mask: Mask = "full"
    inputs: str = NORMAL
    """What Q, K and V hold, one of `inputs.KINDS`."""
    window: Window = NO_WINDOW
    """Keys before and after its diagonal that a query sees, that on it not counted; `UNLIMITED` to either side. Under a
    causal mask the second changes nothing."""
    softcap: float = 0.0
    """What scores are bounded by, before the mask; 0: nothing."""
    varlen: bool = False
    """Whether sequences have lengths of their own and lie packed in one tensor (`flashlab.varlen_attention`). Then
    `q_len` is the most rows that one may have, `kv_len` the keys of all, and operations and bytes are not known."""

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
                f"window: wanted (left, right), integers from 0 on, or {UNLIMITED} for no limit, got {self.window!r}"
            )
        if isinstance(self.softcap, bool) or not isinstance(self.softcap, (int, float)) or not 0 <= self.softcap < inf:
            raise ParameterError(f"softcap: wanted a positive finite number, or 0 for none, got {self.softcap!r}")

    @classmethod
    def of(cls, *sizes: int, **others: Any) -> Problem:
        """A problem of these `SIZES`; `others` are its other fields."""
        fields: dict[str, Any] = {**dict(zip(SIZES, sizes, strict=True)), **others}
        return cls(**fields)

    @classmethod
    def parse(cls, shape: str, *, dtype: str = "float16", mask: str = "full", **others: Any) -> Problem:
        """A problem from `BxHxSxD` or `BxHxHkvxSqxSkxD`, for example `16x16x2048x64`; `others` are its other fields.

        Raises:
            ShapeError: not four or six positive integers joined by `x`.
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
        """What it asks for that not every stage computes."""
        return tuple(name for name in FEATURES if getattr(self, name) != WITHOUT_FEATURES[name])

    @property
    def options(self) -> dict[str, Any]:
        """What `flashlab.attention` takes beside the arrays to compute it."""
        return {"causal": self.causal, **{name: getattr(self, name) for name in self.features}}

    @property
    def reach(self) -> Window:
        """Keys before and after its diagonal that a query sees at most, by mask and window together."""
        longest = max(self.q_len, self.kv_len)
        left, right = (longest if side == UNLIMITED else min(side, longest) for side in self.window)
        return left, 0 if self.causal else right

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def shape(self) -> str:
        """The shape as `parse` reads it: four numbers where Q, K and V agree, else six."""
        if self.q_heads == self.kv_heads and self.q_len == self.kv_len:
            return f"{self.batch}x{self.q_heads}x{self.q_len}x{self.head_dim}"
        return f"{self.batch}x{self.q_heads}x{self.kv_heads}x{self.q_len}x{self.kv_len}x{self.head_dim}"

    @property
    def sizes(self) -> str:
        """The shape for people: `B16 H16 S2048 D64`."""
        heads = f"H{self.q_heads}" if self.q_heads == self.kv_heads else f"H{self.q_heads}/{self.kv_heads}"
        length = f"S{self.q_len}" if self.q_len == self.kv_len else f"Sq{self.q_len} Sk{self.kv_len}"
        return f"B{self.batch} {heads} {length} D{self.head_dim}"

    @property
    def label(self) -> str:
        """For people: `B16 H16 S2048 D64 causal float16`, a window and a soft cap, and the inputs where not normal."""
        inputs = "" if self.inputs == NORMAL else self.inputs
        return " ".join(filter(None, (self.sizes, self.mask, self.dtype, self.features_label, inputs)))

    @property
    def features_label(self) -> str:
        """Its features for people: `window 511:-1 softcap 50`; empty where it has none."""
        texts = {"window": "window {}:{}".format(*self.window), "softcap": f"softcap {self.softcap:g}"}
        texts["varlen"] = "varlen"
        return " ".join(texts[name] for name in self.features)

    def flat(self) -> dict[str, object]:
        """As JSON has it: for people, and as the options of a command take it."""
        fields = ("shape", "mask", "dtype", "inputs", *self.features)
        return {"problem": self.label} | {name: getattr(self, name) for name in fields}

    @property
    def visible_scores(self) -> float:
        """Scores a head needs: q_len · kv_len, under a causal mask the area below the diagonal.

        The area, not the count of cells, so that a square causal problem is exactly half of the full one: the
        convention of every published benchmark. In a window the count of cells, as FlashAttention's benchmark has it.
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
        """Summed over the queries, the keys up to so many beyond the diagonal."""

        def rising(first: int) -> int:  # Σ max(0, first + i) over the queries i
            low, high = max(first, 0), first + self.q_len - 1
            return (low + high) * (high - low + 1) // 2 if high > 0 else 0

        first = 1 + self.kv_len - self.q_len + beyond
        return rising(first) - rising(first - self.kv_len)

    @property
    def flops(self) -> float:
        """Floating-point operations: two GEMMs of 2 · head_dim operations a score. The softmax is not counted."""
        return 4.0 * self.batch * self.q_heads * self.head_dim * self.visible_scores

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must cross device memory: Q, K and V read once, O written once."""
        q = self.batch * self.q_heads * self.q_len * self.head_dim
        kv = self.batch * self.kv_heads * self.kv_len * self.head_dim
        return BYTES_PER_ELEMENT * (2 * q + 2 * kv)

    def tflops(self, time_us: float) -> float:
        """Rate in TFLOP/s of one call that takes `time_us` microseconds."""
        return self.flops / time_us / 1e6


_SUITES = table(__file__, "suites")
SUITES = tuple(_SUITES)
FIRST_SHAPE: str = _SUITES["first"]["shapes"][0]
"""The shape that the sources state where they state one: the ladder is shown at it."""
STANDARD_SHAPES: tuple[str, ...] = tuple(_SUITES["standard"]["shapes"])


def matching(problems: Iterable[Problem], **wanted: object) -> list[Problem]:
    """The problems whose fields are as wanted: of one value, or of any of a list; None and an empty list want nothing.

    For example `matching(suite("standard"), dtype="float16", head_dim=[64, 128])`.
    """
    values = {name: value if isinstance(value, list) else [value] for name, value in wanted.items() if value}
    return [problem for problem in problems if all(getattr(problem, name) in among for name, among in values.items())]


def suite(name: str) -> tuple[Problem, ...]:
    """The problems of a suite, each full and causal where both say something, on normal inputs; see suites.toml.

    Raises:
        ParameterError: no suite of that name.
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
