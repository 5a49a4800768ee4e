"""What Q, K and V hold: named kinds of inputs, all made from the same standard normal numbers.

Times and errors depend on the data. A kernel that tracks the row maximum lazily is fast where scores are small and may
fall off a cliff where they grow from tile to tile; a kind is one way in which scores can lie. Scores are stated in
nats, scale · q · k with scale 1 / sqrt(head_dim): a score that is one nat higher has e times the weight.

An implementation sees Q, K and V alone, in their own element type. A bias is therefore some of the
columns (`bias_columns`): Q holds sqrt(head_dim) there, so that K holds nats, shared out among them: rounded to bfloat16
in one half of them, and what that leaves in the other. Every other column keeps its normal numbers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashlab.core.errors import ParameterError

Array = Any
"""A NumPy or CuPy array."""
Change = Callable[[Array, Array, bool, Any], None]
"""(q, k, causal, xp): makes a kind of normal Q (batch, q_heads, q_len, head_dim) and K, float32, in place."""

NORMAL, TRAINED, ALL = "normal", "trained", "all"
SINK_NATS = 15.0
SLOPE_NATS = 60.0
STEP_NATS, STEP_KEYS = 12.0, 128
ONE_HOT_NATS = 30.0
ROW_FACTORS = (0.25, 1.0, 4.0, 16.0)
HOSTILE_FACTOR, HOSTILE_SINK_NATS = 8.0, 40.0
HOSTILE_TILE_NATS = 11.0
"""About as far above an old maximum as float16 holds an exponential."""
WAVE_NATS, WAVE_KEYS = 150.0, 200
LOW_NATS = -120.0
END_KEYS = 8


@dataclass(frozen=True)
class Kind:
    """One kind of inputs."""

    name: str
    title: str
    """What the scores are, in nats; one line."""
    change: Change | None = None
    """None where nothing is changed: `normal`, and `trained`, which is not drawn but read from a model."""


def _bias(nats: Callable[[Array], Array]) -> Change:
    """Adds to every query's score of key j what `nats` (of all j and the number of keys) says."""

    def change(q: Array, k: Array, causal: bool, xp: Any) -> None:
        # The command line starts without them.
        import ml_dtypes
        import numpy as np

        # On the host, so that every machine has the same bits.
        head_dim = q.shape[3]
        held = float(ml_dtypes.bfloat16(math.sqrt(head_dim)))
        coarse_columns, fine_columns = bias_columns(head_dim)
        bias = nats(np.arange(k.shape[2], dtype=np.float64)) * math.sqrt(head_dim) / (held * len(coarse_columns))
        coarse = bias.astype(ml_dtypes.bfloat16).astype(np.float64)
        for columns, values in ((coarse_columns, coarse), (fine_columns, bias - coarse)):
            for column in columns:
                q[..., column] = held
                k[..., column] = xp.asarray(values.astype(np.float32))

    return change


def bias_columns(head_dim: int) -> tuple[list[int], list[int]]:
    """The columns that hold a bias: rounded, and what that leaves.

    The last four of every sixteen. In a few columns alone, or before others, a bias would swamp the short sums of a
    kernel that multiplies in packed FP16 (`02_half2`), and the check would be of nothing but that.
    """
    place = {column: (head_dim - 1 - column) % 16 for column in range(head_dim)}
    return [c for c, at in place.items() if at < 2], [c for c, at in place.items() if 2 <= at < 4]


def _scaled(factor: float) -> Change:
    def change(q: Array, k: Array, causal: bool, xp: Any) -> None:
        q *= xp.float32(factor)

    return change


def _row_scales(q: Array, k: Array, causal: bool, xp: Any) -> None:
    for row, factor in enumerate(ROW_FACTORS):
        q[:, :, row :: len(ROW_FACTORS)] *= xp.float32(factor)


def _zeros(q: Array, k: Array, causal: bool, xp: Any) -> None:
    q[...] = 0
    k[...] = 0


def _one_hot(q: Array, k: Array, causal: bool, xp: Any) -> None:
    batch, q_heads, _, head_dim = q.shape
    b = xp.arange(batch)[:, None, None]
    kv_head = (xp.arange(q_heads) // (q_heads // k.shape[1]))[None, :, None]
    q[...] = k[b, kv_head, chosen_keys(q.shape, k.shape[2], causal=causal, xp=xp)]
    q *= xp.float32(ONE_HOT_NATS * math.sqrt(head_dim)) / (q * q).sum(axis=3, keepdims=True)


def chosen_keys(q_shape: tuple[int, ...], kv_len: int, *, causal: bool, xp: Any) -> Array:
    """The key on which each row of `one_hot` puts its weight, one that it sees, int64 (batch, q_heads, q_len).

    Pseudo-random by hashing the row's place, so that NumPy and CuPy agree; 0 for a row that sees none.
    """
    batch, q_heads, q_len, _ = q_shape
    x = xp.arange(batch * q_heads * q_len, dtype=xp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32, a hash of Chris Wellons
        x = (x ^ (x >> xp.uint32(shift))) * xp.uint32(factor)
    x = (x ^ (x >> xp.uint32(16))).astype(xp.int64).reshape(batch, q_heads, q_len)
    visible = xp.clip(xp.arange(q_len) + 1 + kv_len - q_len, 1, kv_len) if causal else kv_len
    return x % visible


def _hostile_sink(q: Array, k: Array, causal: bool, xp: Any) -> None:
    q *= xp.float32(HOSTILE_FACTOR)
    _bias(lambda j: HOSTILE_SINK_NATS * (j == 0))(q, k, causal, xp)


def _by_name(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


KINDS = _by_name(
    Kind(NORMAL, "Q, K and V are standard normal: scores have a standard deviation of 1 nat"),
    Kind("scale2", "Q times 2: scores have a standard deviation of 2 nats", _scaled(2)),
    Kind("scale4", "Q times 4: scores have a standard deviation of 4 nats", _scaled(4)),
    Kind("scale10", "Q times 10: scores have a standard deviation of 10 nats", _scaled(10)),
    Kind(
        "sink_first",
        f"an attention sink: every query's score of the first key is {SINK_NATS:g} nats higher",
        _bias(lambda j: SINK_NATS * (j == 0)),
    ),
    Kind(
        "sink_last",
        f"every score of the last key is {SINK_NATS:g} nats higher; under a causal mask the last query alone sees it",
        _bias(lambda j: SINK_NATS * (j == j[-1])),
    ),
    Kind(
        "rising",
        f"scores rise by {SLOPE_NATS:g} nats from the first key, where they are as normal, to the last",
        _bias(lambda j: SLOPE_NATS * j / max(1, len(j) - 1)),
    ),
    Kind(
        "falling",
        f"scores fall by {SLOPE_NATS:g} nats from the first key to the last, where they are as normal",
        _bias(lambda j: SLOPE_NATS - SLOPE_NATS * j / max(1, len(j) - 1)),
    ),
    Kind(
        "steps",
        f"{STEP_KEYS} keys have scores {STEP_NATS:g} nats higher than the next {STEP_KEYS}, the first as normal: they "
        "grow tile by tile for kernels that walk from the last tile of keys to the first, as FlashAttention does",
        _bias(lambda j: -STEP_NATS * (j // STEP_KEYS)),
    ),
    Kind("zeros", "Q and K are 0: every score is 0 nats; V is normal", _zeros),
    Kind(
        "one_hot",
        f"each query scores one key of its own, anywhere that it may see, at {ONE_HOT_NATS:g} nats, and the others "
        f"around 0, with a standard deviation of {ONE_HOT_NATS:g} / sqrt(head_dim)",
        _one_hot,
    ),
    Kind(
        "row_scales",
        "neighbouring queries times 0.25, 1, 4 and 16: standard deviations of so many nats side by side",
        _row_scales,
    ),
    Kind(TRAINED, "Q, K and V of each layer of a small language model with RoPE that flashlab trains"),
)
"""By name, in the order in which they are shown."""
HOSTILE = _by_name(
    Kind("hostile_sink", f"Q times 8, and the first key's score {HOSTILE_SINK_NATS:g} nats higher", _hostile_sink),
    Kind(
        "hostile_rising",
        f"scores rise by {HOSTILE_TILE_NATS:g} nats every {STEP_KEYS} keys to the last, where they are as normal",
        _bias(lambda j: HOSTILE_TILE_NATS / STEP_KEYS * (j - j[-1])),
    ),
    Kind(
        "hostile_falling",
        f"scores fall by {HOSTILE_TILE_NATS:g} nats every {STEP_KEYS} keys from the first, where they are as normal",
        _bias(lambda j: -HOSTILE_TILE_NATS / STEP_KEYS * j),
    ),
    Kind(
        "hostile_waves",
        f"scores rise by {WAVE_NATS:g} nats and fall again every {WAVE_KEYS} keys, within a tile by more than an FP32 "
        "exponential holds; they are as normal at the top",
        _bias(lambda j: -WAVE_NATS * abs((2 * j / WAVE_KEYS) % 2 - 1)),
    ),
    Kind(
        "hostile_low",
        f"all scores {-LOW_NATS:g} nats lower: 0 as FP32 exponentials, where nothing is subtracted",
        _bias(lambda j: 0 * j + LOW_NATS),
    ),
)
"""Kinds that only checks use: they reach the paths that a kernel takes seldom."""
SCALE8 = Kind("scale8", "Q times 8: scores have a standard deviation of 8 nats", _scaled(HOSTILE_FACTOR))
"""For flash-attention's own cases."""
END = Kind(
    "hostile_end",
    f"the last {END_KEYS} keys' scores as normal, the others {WAVE_NATS:g} nats lower, beyond FP32 exponentials",
    _bias(lambda j: -WAVE_NATS * (j <= j[-1] - END_KEYS)),
)
"""For rows far apart: a last tile of few keys, whose first scores say nothing of the rest."""
_KNOWN = KINDS | HOSTILE | {kind.name: kind for kind in (SCALE8, END)}


def require(name: str) -> Kind:
    """The kind of that name.

    Raises:
        ParameterError: there is none; the message lists them and names the nearest.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    near = difflib.get_close_matches(str(name), _KNOWN, n=1, cutoff=0.0)
    raise ParameterError(
        f"inputs: wanted one of {', '.join(KINDS)}, got {name!r}; the nearest is {near[0]}. "
        f"Checks also have {', '.join(name for name in _KNOWN if name not in KINDS)}"
    )


def parse(text: str) -> tuple[str, ...]:
    """Kinds joined by commas, each once, or `all`.

    Raises:
        ParameterError: one that does not exist, or none at all.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == (ALL,):
        return tuple(KINDS)
    if not names:
        raise ParameterError(f"inputs: wanted some of {', '.join(KINDS)} joined by commas, or {ALL}, got {text!r}")
    return tuple(require(name).name for name in names)


def drawn(name: str) -> str:
    """The name of a kind that is made from random numbers.

    Raises:
        ParameterError: no kind of that name, or `trained`, which is not drawn.
    """
    if require(name).name == TRAINED:
        others = ", ".join(kind for kind in KINDS if kind != TRAINED)
        raise ParameterError(
            f"inputs: wanted a kind that is drawn from a seed ({others}), got {TRAINED}, which a model on a GPU makes: "
            "`flashlab bench` measures it"
        )
    return name


def change(name: str, q: Array, k: Array, *, causal: bool, xp: Any) -> None:
    """Make standard normal Q and K those of a kind, in place.

    Args:
        q, k: (batch, heads, length, head_dim) float32; writable.
        xp: numpy, or cupy where they are CuPy arrays.

    Raises:
        ParameterError: as `drawn`.
    """
    kind = _KNOWN[drawn(name)]
    if kind.change:
        kind.change(q, k, causal, xp)
