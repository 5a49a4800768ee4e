"""Every stage on the CPU: head dims × masks × hostile lengths, types and schedules alternating, judged as on a GPU.

A part of it is of each rung, and goes through every length, by turns at the smallest
head dim and the largest, which differ in type and mask too, and in schedule. In `make test-all`
01_correctness.ipynb has all rungs in float16 under every schedule, with the detector of races.
"""

from __future__ import annotations

import pytest
from shared import in_turn, needs_compiler, parts_of

from flashlab.kernels.registry import CUDA_STAGES, DEAD_ENDS, get
from flashlab.verify import cases, on_cpu

STAGES = (*CUDA_STAGES, *(stage_id for stage_id, stage in DEAD_ENDS.items() if not stage.defect and not stage.kernel))
"""Every kernel that ought to be right, on the ladder or off it."""
SCHEDULES = ("ascending", "descending", "seeded:7")
"""Each takes a third of the lengths, from the shortest to the longest, and of those each element type its share."""
LENGTHS = sorted(cases.HOSTILE, key=lambda pair: pair[0] * pair[1])

pytestmark = needs_compiler


@parts_of(CUDA_STAGES, STAGES)
def test_a_stage_is_right_over_everything_that_breaks_kernels(stage: str, whole: bool) -> None:
    taken, parts = get(stage), []
    if whole:
        for i, schedule in enumerate(SCHEDULES):
            for j, dtype in enumerate(taken.dtypes):
                lengths = LENGTHS[i :: len(SCHEDULES)][j :: len(taken.dtypes)]
                parts.append((lengths, taken.head_dims, dtype, ("full", "causal"), schedule))
    else:
        first, *_, last = in_turn(taken)
        variants = (first, last)
        for i, (head_dim, dtype, causal) in enumerate(variants):
            schedule = SCHEDULES[i % len(SCHEDULES)]
            parts.append((LENGTHS[i :: len(variants)], (head_dim,), dtype, ("causal" if causal else "full",), schedule))
    for lengths, head_dims, dtype, masks, schedule in parts:
        checked = on_cpu.check_on_cpu(
            [stage],
            layouts=("contiguous",),
            lengths=lengths,
            head_dims=head_dims,
            dtypes=(dtype,),
            masks=masks,
            schedules=(schedule,),
            timeout_s=600,  # on a loaded machine one that is slow by nature takes a minute
        )
        assert [f"{row.problem.label}, {row.schedule}: {row.reason}" for row in checked.failures] == []
        assert len(checked.rows) == len(lengths) * len(head_dims) * len(masks)
    assert sum(len(lengths) for lengths, *_ in parts) == len(LENGTHS)


@parts_of(list(CUDA_STAGES)[::-2], STAGES)
def test_a_stage_takes_any_layout(stage: str, whole: bool) -> None:
    # Where rows begin does not depend on the type; contiguous ones are above. In part, every second rung.
    checked = on_cpu.check_on_cpu(
        [stage],
        layouts=[layout for layout in cases.LAYOUTS if layout != "contiguous"],
        masks=("causal",),
        dtypes=get(stage).dtypes[:1],
        head_dims=get(stage).head_dims[: None if whole else 1],
        lengths=[(65, 66), (113, 203)],
    )
    assert [f"{row.problem.label}, {row.layout}: {row.status}: {row.reason}" for row in checked.failures] == []


@pytest.mark.parametrize(
    ("stage", "dtype", "whole"),
    [
        pytest.param(stage, dtype, whole, id=f"{stage}-{dtype}-{name}", marks=marks)
        for stage in STAGES
        for dtype in get(stage).dtypes
        for name, whole, marks in (("part", False, ()), ("whole", True, pytest.mark.exhaustive))
        # Of a rung in part one type; the whole of float16 is in 01_correctness.ipynb, which test_notebooks.py runs.
        if (
            stage not in CUDA_STAGES or dtype != "float16"
            if whole
            else stage in CUDA_STAGES and dtype == get(stage).dtypes[-1]
        )
    ],
)
def test_a_stage_has_no_races(stage: str, dtype: str, whole: bool) -> None:
    first, *others = get(stage).head_dims
    found = on_cpu.check_on_cpu(
        [stage],
        layouts=("contiguous",),
        lengths=[(65, 130)],
        head_dims=[first, *(dim for dim in others if dim in (96, 256))] if whole else [first],
        dtypes=[dtype],
        masks=("causal",),
        races=True,
        timeout_s=600,
    )
    assert [row.reason for row in found.failures] == []
