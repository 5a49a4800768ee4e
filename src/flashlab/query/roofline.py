"""Peaks of GPUs' data sheets (datasheets.toml), and the bytes that a stage loads from L2, counted.

Measured ceilings are in measure/ceilings.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from flashlab.core.facts import Facts
from flashlab.core.paths import table
from flashlab.core.problem import BYTES_PER_ELEMENT, Problem

Unit = Literal["TB/s", "TFLOP/s", "Tex2/s", "us"]


class Datasheet(Facts):
    """A GPU's data sheet: dense peaks."""

    title: str
    tensor_tflops: float
    """float16 or bfloat16 in, float32 accumulation."""
    fp32_tflops: float
    memory_tb_s: float
    tensor_mhz: float | None = None
    """SM clock that `tensor_tflops` assumes; a data sheet may assume another clock for each rate."""
    fp32_mhz: float | None = None
    """SM clock that `fp32_tflops` assumes."""
    source: str

    def peak(self, ceiling: str) -> float | None:
        """The peak for a measured ceiling, in the ceiling's unit; None if the data sheet has none."""
        if ceiling.startswith(("tensor_", "mma_sync_")):
            return self.tensor_tflops
        return {"fp32_fma": self.fp32_tflops, "copy": self.memory_tb_s}.get(ceiling)


DATASHEETS: Mapping[str, Datasheet] = {
    slug: Datasheet.model_validate(sheet) for slug, sheet in table(__file__, "datasheets").items()
}
"""By folder name under data/. Other GPUs have no data-sheet peak and no percentage of it."""


def l2_bytes(problem: Problem, tile_q: int) -> float:
    """Counted traffic between L2 and the SMs, bytes: Q and O once, K and V once per tile of `tile_q` query rows.

    Under a causal mask a tile reads the keys up to its last row's diagonal.
    """
    rows = 0
    for tile in range(math.ceil(problem.q_len / tile_q)):
        last = min((tile + 1) * tile_q, problem.q_len)
        keys = last + problem.kv_len - problem.q_len if problem.causal else problem.kv_len
        rows += max(0, min(keys, problem.kv_len))
    heads = problem.batch * problem.q_heads
    elements = heads * problem.head_dim * (2 * problem.q_len + 2 * rows)
    return float(BYTES_PER_ELEMENT * elements)
