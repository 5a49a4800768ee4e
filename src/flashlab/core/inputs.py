"""Kinds of inputs: named distributions of Q, K and V, all derived from the same standard normal numbers.

Times and errors depend on the data. A kernel that updates the row maximum lazily is fast if scores are small and may
slow down sharply if they grow from tile to tile; each kind is one distribution of scores. Scores are in nats,
scale · q · k with scale 1 / sqrt(head_dim): a score one nat higher has e times the weight.

Implementations receive only Q, K and V, in their own data type. A bias on the scores is therefore encoded in some
columns (`bias_columns`): Q is sqrt(head_dim) there, and K holds the bias in nats, divided among them: its bfloat16
value in one half and the rounding remainder in the other. All other columns keep their normal numbers.
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
"""(q, k, causal, xp): modify standard normal Q (batch, q_heads, q_len, head_dim) and K, float32, in place."""

NORMAL, TRAINED, ALL = "normal", "trained", "all"
SINK_NATS = 15.0
SLOPE_NATS = 60.0
STEP_NATS, STEP_KEYS = 12.0, 128
ONE_HOT_NATS = 30.0
ROW_FACTORS = (0.25, 1.0, 4.0, 16.0)
HOSTILE_FACTOR, HOSTILE_SINK_NATS = 8.0, 40.0
HOSTILE_TILE_NATS = 11.0
"""Largest increase above a stale maximum, in nats, whose exponential float16 can hold, approximately."""
WAVE_NATS, WAVE_KEYS = 150.0, 200
LOW_NATS = -120.0
END_KEYS = 8


@dataclass(frozen=True)
class Kind:
    """One kind of inputs."""

    name: str
    title: str
    """One-line description of the scores, in nats."""
    change: Change | None = None
    """None for `normal`, and for `trained`, which is read from a model instead of drawn."""


def _bias(nats: Callable[[Array], Array]) -> Change:
    """Add `nats(j)`, given the indices of all keys, to every query's score of key j."""

    def change(q: Array, k: Array, causal: bool, xp: Any) -> None:
        # Imported here to keep the command line fast to start.
        import ml_dtypes
        import numpy as np

        # Computed on the host, so that every machine has the same bits.
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
    """The columns that encode a bias: those of its rounded value, and those of the remainder.

    They are the last four of every sixteen. Concentrated in a few columns, or placed first, a bias would swamp the
    short sums of a kernel that multiplies in packed FP16 (`02_half2`), and the check would test nothing else.
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
    """The visible key on which each row of `one_hot` puts its weight, int64 (batch, q_heads, q_len).

    Pseudo-random by hashing the row index, so that NumPy and CuPy agree; 0 for a row that sees no key.
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
"""By name, in display order."""
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
"""Kinds used only by checks: they exercise the rarely taken paths of a kernel."""
SCALE8 = Kind("scale8", "Q times 8: scores have a standard deviation of 8 nats", _scaled(HOSTILE_FACTOR))
"""Used by the cases of flash-attention's own tests."""
END = Kind(
    "hostile_end",
    f"the last {END_KEYS} keys' scores as normal, the others {WAVE_NATS:g} nats lower, beyond FP32 exponentials",
    _bias(lambda j: -WAVE_NATS * (j <= j[-1] - END_KEYS)),
)
"""A last tile with few keys, whose scores are far from those of all other keys."""
_KNOWN = KINDS | HOSTILE | {kind.name: kind for kind in (SCALE8, END)}


def require(name: str) -> Kind:
    """Look up a kind by name.

    Raises:
        ParameterError: no such kind; the message lists them and names the nearest.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    near = difflib.get_close_matches(str(name), _KNOWN, n=1, cutoff=0.0)
    raise ParameterError(
        f"inputs: wanted one of {', '.join(KINDS)}, got {name!r}; the nearest is {near[0]}. "
        f"Checks also have {', '.join(name for name in _KNOWN if name not in KINDS)}"
    )


def parse(text: str) -> tuple[str, ...]:
    """Parse comma-separated kinds, without duplicates, or `all`.

    Raises:
        ParameterError: a kind does not exist, or the list is empty.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == (ALL,):
        return tuple(KINDS)
    if not names:
        raise ParameterError(f"inputs: wanted some of {', '.join(KINDS)}, comma-separated, or {ALL}, got {text!r}")
    return tuple(require(name).name for name in names)


def drawn(name: str) -> str:
    """Check that a kind is drawn from random numbers, and return its name.

    Raises:
        ParameterError: no such kind, or `trained`, which is not drawn.
    """
    if require(name).name == TRAINED:
        others = ", ".join(kind for kind in KINDS if kind != TRAINED)
        raise ParameterError(
            f"inputs: wanted a kind that is drawn from a seed ({others}), got {TRAINED}, from a model on a GPU: "
            "`flashlab bench` measures it"
        )
    return name


def change(name: str, q: Array, k: Array, *, causal: bool, xp: Any) -> None:
    """Turn standard normal Q and K into those of a kind, in place.

    Args:
        q, k: (batch, heads, length, head_dim) float32; writable.
        xp: numpy, or cupy for CuPy arrays.

    Raises:
        ParameterError: as `drawn`.
    """
    kind = _KNOWN[drawn(name)]
    if kind.change:
        kind.change(q, k, causal, xp)
