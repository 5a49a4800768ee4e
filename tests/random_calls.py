"""Random calls over packed sequences and over caches in pages: drawn alike for a GPU and for the CPU emulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashlab.core.problem import DTYPES


class Packed(NamedTuple):
    """Sequences one behind the other."""

    lengths: list[tuple[int, int]]
    """Queries and keys of each, none among them."""
    sizes: dict[str, Any]
    """`heads`, `head_dim`, `dtype`."""
    how: dict[str, Any]
    """`causal`, and a window and a soft cap of some."""


class Paged(NamedTuple):
    """Sequences in pages."""

    lengths: list[int]
    """The first has no keys."""
    sizes: dict[str, Any]
    """`page_size`, `kv_heads`, `head_dim`, `dtype`."""
    queries: tuple[int, int]
    """Heads and rows of Q."""
    how: dict[str, Any]


def packed(seed: int, head_dims: Sequence[int], most: int = 2500) -> Packed:
    """Sequences of at most so many rows."""
    rng = random.Random(seed)
    longest = rng.choice([n for n in (3, 70, 300, 2500) if n <= most])
    some = [
        rng.choice([0, 1, tile, rng.randint(0, longest)])
        for _ in range(rng.choice([1, 2, 7, 40]))
        for tile in (64, 128)
    ]
    lengths = [(1, 1), *zip(some[::2], some[1::2], strict=True)]
    heads = (4, rng.choice([1, 2, 4]))
    return Packed(lengths, {"heads": heads, **_code(rng, head_dims)}, _features(rng, longest))


def paged(seed: int, head_dims: Sequence[int], most: int = 3000) -> Paged:
    """Sequences of at most so many keys."""
    rng = random.Random(seed)
    lengths = [0, *(rng.randint(1, most) for _ in range(rng.randint(1, 8)))]
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 8])
    sizes = {"page_size": rng.choice([1, 16, 64, 128]), "kv_heads": kv_heads, **_code(rng, head_dims)}
    return Paged(lengths, sizes, (kv_heads * group, rng.randint(1, 5)), _features(rng, most))


def _code(rng: random.Random, head_dims: Sequence[int]) -> dict[str, Any]:
    return {"head_dim": rng.choice(head_dims), "dtype": rng.choice(DTYPES)}


def _features(rng: random.Random, longest: int) -> dict[str, Any]:
    how: dict[str, Any] = {"causal": rng.random() < 0.5}
    if rng.random() < 0.4:
        how["window"] = (rng.choice([0, 5, 40, 500, longest + 1]), rng.choice([-1, 0, 5, 200]))
    if rng.random() < 0.4:
        how["softcap"] = rng.choice([1.0, 30.0])
    return how
