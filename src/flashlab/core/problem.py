"""What is computed: one attention problem, its cost, and the suites of problems that are measured.

Attention over `batch` sequences and `q_heads` heads, softmax(scale · Q Kᵀ) V with
Q (batch, q_heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim), O like Q.
A causal mask is aligned bottom right: query `i` sees key `j` when j - i ≤ kv_len - q_len.
A query that sees no key has output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from flashlab.core.errors import DTypeError, ParameterError, ShapeError
from flashlab.core.inputs import NORMAL, require

DType = Literal["float16", "bfloat16"]
Mask = Literal["full", "causal"]
Precision = Literal["input", "e4m3_inputs", "e4m3", "e4m3_scaled"]
"""What a computation's numbers are rounded to: its inputs' own type; Q, K and V to FP8 (e4m3); those and the
probabilities; the same with a scale for each head, which brings its largest number to e4m3's largest. Sums are FP32,
and the output is of the inputs' type, always."""
Regime = Literal["burst", "sustained"]
"""burst: short samples with idle gaps, the SM clock between them at its maximum. sustained: continuous work,
power-limited."""
Cache = Literal["hot", "cold"]
"""hot: calls back to back. cold: L2 overwritten before every call."""
DTYPES: tuple[DType, ...] = get_args(DType)
MASKS: tuple[Mask, ...] = get_args(Mask)
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

    def __post_init__(self) -> None:
        for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShapeError(f"{name}: wanted a positive integer, got {value!r}")
        if self.q_heads % self.kv_heads:
            raise ShapeError(
                f"q_heads: wanted a multiple of kv_heads, got {self.q_heads} query heads for {self.kv_heads} key heads"
            )
        if self.dtype not in DTYPES:
            raise DTypeError(f"dtype: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.mask not in MASKS:
            raise ParameterError(f"mask: wanted one of {', '.join(MASKS)}, got {self.mask!r}")
        require(self.inputs)

    @classmethod
    def parse(cls, shape: str, *, dtype: str = "float16", mask: str = "full", inputs: str = NORMAL) -> Problem:
        """A problem from `BxHxSxD` or `BxHxHkvxSqxSkxD`, for example `16x16x2048x64`.

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
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        return cls(**dict(zip(names, numbers, strict=True)), dtype=dtype, mask=mask, inputs=inputs)  # type: ignore[arg-type]

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
        """For people: `B16 H16 S2048 D64 causal float16`, and the inputs where they are not normal."""
        return f"{self.sizes} {self.mask} {self.dtype}" + ("" if self.inputs == NORMAL else f" {self.inputs}")

    def flat(self) -> dict[str, object]:
        """As JSON has it: for people, and as the options of a command take it."""
        fields = ("shape", "mask", "dtype", "inputs")
        return {"problem": self.label} | {name: getattr(self, name) for name in fields}

    @property
    def visible_scores(self) -> float:
        """Scores a head needs: q_len · kv_len, under a causal mask the area below the diagonal.

        The area, not the count of cells, so that a square causal problem is exactly half of the full one: the
        convention of every published benchmark.
        """
        if not self.causal:
            return float(self.q_len * self.kv_len)
        if self.q_len <= self.kv_len:
            return self.q_len * self.kv_len - self.q_len**2 / 2
        return self.kv_len**2 / 2

    @property
    def flops(self) -> float:
        """Floating-point operations: two products of 2 · head_dim operations a score. The softmax is not counted."""
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


FIRST_SHAPE = "16x16x2048x64"
"""The shape that the sources state where they state one: the ladder is shown at it."""

STANDARD_SHAPES = (
    FIRST_SHAPE,
    "16x16x2048x128",
    "4x16x8192x64",
    "4x16x8192x128",
    "1x8x512x64",
    "2x8x512x64",
    "32x8x128x64",
    "4x16x2039x64",
)

CLAIMS_SHAPES = ("1x32x2048x128", "1x8x512x64", "2x8x512x64", "32x8x128x64", "1x8x128x64")
"""Where claims are judged beside the first shape: a layer of LLaMA-7B, and short sequences, which are ours."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Sequence lengths of the suite `lengths`, at a constant number of tokens."""
TOKENS = 32768

_SUITE_CELLS: dict[str, tuple[tuple[str, tuple[DType, ...]], ...]] = {
    "smoke": (("1x2x130x64", ("float16",)),),
    "first": ((FIRST_SHAPE, ("float16",)),),
    "quick": ((FIRST_SHAPE, DTYPES),),
    "standard": tuple((shape, DTYPES if "x2048x" in shape else ("float16",)) for shape in STANDARD_SHAPES),
    "peers": tuple((f"16x16x2048x{head_dim}", DTYPES) for head_dim in (64, 128)),
    "head_dims": tuple(
        (f"{shape}x{head_dim}", DTYPES) for shape in ("16x16x2048", "4x16x8192") for head_dim in (96, 256)
    ),
    "lengths": tuple(
        (f"{TOKENS // length}x16x{length}x{head_dim}", DTYPES) for head_dim in (64, 128) for length in LENGTHS
    ),
    "claims": tuple((shape, ("float16",)) for shape in CLAIMS_SHAPES),
    "inputs": tuple((f"{shape}x{head_dim}", DTYPES) for shape in ("16x16x2048", "4x16x8192") for head_dim in (64, 128)),
    "offsets": tuple(
        (f"16x16x16x{lengths}x{head_dim}", DTYPES)
        for lengths in ("2048x2049", "512x4609", "2048x6144", "100x1000")
        for head_dim in (64, 128)
    ),
    "decode": (
        *((f"{batch}x32x8x1x8192x128", DTYPES) for batch in (1, 4, 16, 64)),
        *((f"{batch}x32x8x1x8192x64", ("float16",)) for batch in (1, 64)),
    ),
    "fp8": tuple((f"{TOKENS // length}x16x{length}x128", DTYPES) for length in (2048, 8192, 16384)),
    "gqa": tuple((f"4x32x{kv_heads}x4096x4096x{head_dim}", DTYPES) for kv_heads in (8, 1) for head_dim in (64, 128)),
}
_MASKS_OF: dict[str, tuple[Mask, ...]] = {"offsets": ("causal",), "decode": ("full",)}
"""Of suites to which the other mask says nothing new: one query row sees all keys under either."""

SUITES = tuple(_SUITE_CELLS)


def matching(problems: Iterable[Problem], **wanted: object) -> list[Problem]:
    """The problems whose fields are as wanted: of one value, or of any of a list; None and an empty list want nothing.

    For example `matching(suite("standard"), dtype="float16", head_dim=[64, 128])`.
    """
    values = {name: value if isinstance(value, list) else [value] for name, value in wanted.items() if value}
    return [one for one in problems if all(getattr(one, name) in among for name, among in values.items())]


def suite(name: str) -> tuple[Problem, ...]:
    """The problems of a suite, each full and causal where both say something, on normal inputs.

    `smoke` proves the way through, `first` is the sources' shape and `quick` the same in every element type, `standard`
    is what the ladder is shown on, `peers` is what is held against the libraries, in bursts and sustained, `head_dims`
    has the head dims that few stages take, `lengths` is one number of tokens in sequences of many lengths, `claims` is
    where the sources' claims lie beside their first shape. `inputs` is where kinds of inputs are compared, `offsets` is
    causal with more keys than queries, at any offset, `decode` is one query row a sequence against a long cache, `fp8`
    is where inputs stored in FP8 are held against 16 bits, and `gqa` has shared key heads.

    Raises:
        ParameterError: no suite of that name.
    """
    if name not in _SUITE_CELLS:
        raise ParameterError(f"suite: wanted one of {', '.join(_SUITE_CELLS)}, got {name!r}")
    return tuple(
        Problem.parse(shape, dtype=dtype, mask=mask)
        for shape, dtypes in _SUITE_CELLS[name]
        for dtype in dtypes
        for mask in _MASKS_OF.get(name, MASKS)
    )
