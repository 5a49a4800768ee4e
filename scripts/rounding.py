"""Errors of attention in which nothing but the weights, as the PV GEMM takes them, and the output is rounded.

    PYTHONPATH=src python3 scripts/rounding.py --kind rising --dtype bfloat16 --head-dim 64 --draw 1

prints the root-mean-square and the largest error against float64, over 256 heads of S2048, non-causal, of three ways:

    running    against the maximum of the tiles so far, divided by the sum of the weights as they were: FlashAttention
    settled    against the reference of 17_around_the_loop, divided by the sum of the rounded weights; 16_ones_column
               reads the tiles from the last to the first
    top exact  as settled, with each row's largest weight left as it was

each also over that of the first. No kernel takes part: so much of what the last rungs have beyond FlashAttention
(site/correctness.md) is the price of their reference. A draw takes a few minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from flashlab.core.errors import FlashlabError  # noqa: E402
from flashlab.core.problem import DTYPES, DType, Problem  # noqa: E402
from flashlab.verify import oracle  # noqa: E402

Array = Any
HEADROOM: dict[DType, int] = {"float16": 2, "bfloat16": 48}
SUM_LIMIT: dict[DType, float] = {"float16": 65504.0, "bfloat16": 1.0}
SETTLED: dict[DType, int] = {"float16": 0, "bfloat16": -48}
OVERFLOWN = 2.0**126
COARSE_STRIDE = 5
"""These five are of kernels/17_around_the_loop.cu."""


def order(tiles: int) -> list[int]:
    """The order in which a block reads its K/V tiles without a mask (`TileOrder` in kernels/common/late_fetch.cuh)."""
    coarse = range(0, tiles - 1, COARSE_STRIDE)
    return [tiles - 1, *reversed(coarse), *(tile for tile in range(tiles - 1) if tile not in coarse)]


def running(scores: Array, v: Array, dtype: DType, keys: int = 128) -> Array:
    """Scores (rows, keys) in units of log2, tiles from the last to the first; the output before it is rounded."""
    reference = np.full((len(scores), 1), -np.inf, np.float32)
    total = out = np.float32(0)
    for tile in reversed(range(0, scores.shape[1], keys)):
        new = np.maximum(reference, scores[:, tile : tile + keys].max(axis=1, keepdims=True))
        weights = np.exp2(scores[:, tile : tile + keys] - new)
        factor = np.exp2(reference - new)
        total = total * factor + weights.sum(axis=1, keepdims=True)
        out = out * factor + oracle.round_to(weights, dtype) @ v[tile : tile + keys]
        reference = new
    return out / total


def settled(scores: Array, v: Array, dtype: DType, keys: int, *, top_exact: bool = False) -> Array:
    """As `running`, in `order`; a row's first eight scores settle the reference, which moves by powers of two."""
    largest = scores.max(axis=1, keepdims=True)
    first = scores.shape[1] - keys
    reference = scores[:, first : first + 8].max(axis=1, keepdims=True) + np.float32(HEADROOM[dtype])
    total = out = np.float32(0)
    for tile in (keys * number for number in order(scores.shape[1] // keys)):
        of_tile = scores[:, tile : tile + keys]
        with np.errstate(over="ignore"):
            weights = np.exp2(of_tile - reference)
            # The four lanes of a row have two of every eight columns each; the largest of their sums counts.
            sums = weights.reshape(len(scores), -1, 4, 2).sum(axis=(1, 3)).max(axis=1, keepdims=True)
        powers = np.where(sums < SUM_LIMIT[dtype], 0, np.frexp(np.minimum(sums, OVERFLOWN))[1] - 1 - SETTLED[dtype])
        moved = reference + np.minimum(powers, 126).astype(np.float32)
        lost = sums >= OVERFLOWN
        moved = np.where(lost, of_tile.max(axis=1, keepdims=True) + np.float32(HEADROOM[dtype]), moved)
        factor = np.exp2(reference - moved)
        weights = np.exp2(of_tile - moved) if lost.any() else weights * factor
        rounded = oracle.round_to(weights, dtype)
        if top_exact:
            rounded = np.where(of_tile == largest, weights, rounded)
        total = total * factor + rounded.sum(axis=1, keepdims=True)
        out = out * factor + rounded @ v[tile : tile + keys]
        reference = moved
    return out / total


def errors(problem: Problem, draw: int = 0) -> dict[str, tuple[float, float]]:
    """Of each way, the root-mean-square and the largest error over all heads."""
    q, k, v = (oracle.to_float(x).reshape(-1, *x.shape[2:]) for x in oracle.make_inputs(problem, draw))
    keys = 128 if problem.head_dim == 64 else 64  # a tile of the last rungs
    scale = np.float32(oracle.default_scale(problem.head_dim) * np.log2(np.e))
    squares: dict[str, float] = {}
    largest: dict[str, float] = {}
    for q_head, k_head, v_head in zip(q, k, v, strict=True):
        weights = q_head.astype(np.float64) @ k_head.T.astype(np.float64) * float(scale)
        weights = np.exp2(weights - weights.max(axis=1, keepdims=True))
        exact = weights @ v_head.astype(np.float64) / weights.sum(axis=1, keepdims=True)
        scores = q_head @ k_head.T * scale
        outputs = {
            "running": running(scores, v_head, problem.dtype),
            "settled": settled(scores, v_head, problem.dtype, keys),
            "top exact": settled(scores, v_head, problem.dtype, keys, top_exact=True),
        }
        for way, out in outputs.items():
            error = np.abs(oracle.round_to(out, problem.dtype) - exact)
            squares[way] = squares.get(way, 0.0) + float((error**2).mean())
            largest[way] = max(largest.get(way, 0.0), float(error.max()))
    return {way: (float(np.sqrt(total / len(q))), largest[way]) for way, total in squares.items()}


def main() -> None:
    """Print the errors of each way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", default="normal", help="of inputs, such as rising (site/method.md)")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=64)
    parser.add_argument("--draw", type=int, default=0, help="the seed of the inputs")
    parser.add_argument("--heads", type=int, default=256)
    given = parser.parse_args()
    heads, width = given.heads, given.head_dim
    try:
        problem = Problem.of(1, heads, heads, 2048, 2048, width, dtype=given.dtype, mask="full", inputs=given.kind)
        of_each = errors(problem, given.draw)
    except FlashlabError as error:
        sys.exit(f"rounding: {error}")
    rms, largest = of_each["running"]
    for way, (way_rms, way_largest) in of_each.items():
        ratios = f"{way_rms / rms:.3f} {way_largest / largest:.3f}"
        print(f"{way:9}  RMS {way_rms:.3e}  largest {way_largest:.3e}  over running {ratios}")


if __name__ == "__main__":
    main()
