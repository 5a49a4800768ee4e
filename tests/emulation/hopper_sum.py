"""A stage that sums: kernels/hopper_sum.cu, launched as a Hopper stage is, by tensor maps and with counters."""

from __future__ import annotations

from pathlib import Path

from flashlab.core.problem import DTYPES
from flashlab.kernels.registry import Stage

SOURCE = Path(__file__).parent / "kernels" / "hopper_sum.cu"
"""O = Q + K + V, where Q and K are as long as each other."""
STAGE = Stage(
    id="99_sum",
    title="A sum",
    question="What is Q + K + V?",
    change="No attention.",
    prediction="The sum.",
    min_arch="sm_90a",
    max_arch="sm_90a",
    dtypes=DTYPES,
    tensor_maps=True,
)
