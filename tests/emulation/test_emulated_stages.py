"""Every stage on the CPU: head dims × masks × hostile lengths, types and schedules alternating, judged as on a GPU."""

from __future__ import annotations

import pytest

from flashlab.core.errors import MissingPackageError
from flashlab.kernels.registry import CUDA_STAGES, DEAD_ENDS, get
from flashlab.run import emulator
from flashlab.verify import cases, on_cpu

STAGES = (*CUDA_STAGES, *(stage_id for stage_id, stage in DEAD_ENDS.items() if not stage.defect and not stage.kernel))
"""Every kernel that ought to be right, on the ladder or off it."""
SCHEDULES = ("ascending", "descending", "seeded:7")
"""Each takes a third of the lengths, from the shortest to the longest, and of those each element type its share."""
LENGTHS = sorted(cases.HOSTILE, key=lambda pair: pair[0] * pair[1])

try:
    emulator.cxx()
except MissingPackageError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_right_over_everything_that_breaks_kernels(stage: str) -> None:
    taken = get(stage)
    rows = 0
    for i, schedule in enumerate(SCHEDULES):
        for j, dtype in enumerate(taken.dtypes):
            checked = on_cpu.check_on_cpu(
                [stage],
                layouts=("contiguous",),
                lengths=LENGTHS[i :: len(SCHEDULES)][j :: len(taken.dtypes)],
                dtypes=(dtype,),
                schedules=(schedule,),
                timeout_s=600,  # on a loaded machine one that is slow by nature takes a minute
            )
            assert [f"{row.problem.label}, {row.schedule}: {row.reason}" for row in checked.failures] == []
            rows += len(checked.rows)
    assert rows == len(taken.head_dims) * 2 * len(LENGTHS)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_any_layout(stage: str) -> None:
    # Where rows begin does not depend on the type; contiguous ones are above.
    checked = on_cpu.check_on_cpu(
        [stage],
        layouts=[layout for layout in cases.LAYOUTS if layout != "contiguous"],
        masks=("causal",),
        dtypes=get(stage).dtypes[:1],
        lengths=[(65, 66), (113, 203)],
    )
    assert [f"{row.problem.label}, {row.layout}: {row.status}: {row.reason}" for row in checked.failures] == []


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (stage, dtype)
        for stage in STAGES
        for dtype in get(stage).dtypes
        if stage not in CUDA_STAGES or dtype != "float16"  # 01_correctness.ipynb, which test_notebooks.py runs
    ],
)
def test_a_stage_has_no_races(stage: str, dtype: str) -> None:
    first, *others = get(stage).head_dims
    found = on_cpu.check_on_cpu(
        [stage],
        layouts=("contiguous",),
        lengths=[(65, 130)],
        head_dims=[first, *(dim for dim in others if dim in (96, 256))],
        dtypes=[dtype],
        masks=("causal",),
        races=True,
        timeout_s=600,
    )
    assert [row.reason for row in found.failures] == []
