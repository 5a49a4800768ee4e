"""Every stage on the CPU: head dims × masks × types × hostile lengths × schedules, judged as on a GPU."""

from __future__ import annotations

import pytest

from flashlab.core.errors import MissingPackageError
from flashlab.kernels.registry import CUDA_STAGES, DEAD_ENDS, get
from flashlab.run import emulator
from flashlab.verify import cases, on_cpu

STAGES = (*CUDA_STAGES, *(stage_id for stage_id, stage in DEAD_ENDS.items() if not stage.defect and not stage.kernel))
"""Every kernel that ought to be right, on the ladder or off it."""
SCHEDULES = ("ascending", "descending", "seeded:7")
LONG = [(q_len, kv_len) for q_len, kv_len in cases.HOSTILE if q_len * kv_len > cases.MANY_SCORES]
"""Under one schedule alone: what another finds needs many tiles of keys or of queries, which shorter ones have too."""

try:
    emulator.cxx()
except MissingPackageError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_right_over_everything_that_breaks_kernels(stage: str) -> None:
    taken = get(stage)
    for lengths, schedules in ((sorted({*cases.HOSTILE} - {*LONG}), SCHEDULES), (LONG, SCHEDULES[-1:])):
        found = on_cpu.check_on_cpu([stage], layouts=("contiguous",), lengths=lengths, schedules=schedules)
        assert [f"{row.problem.label}, {row.schedule}: {row.status}: {row.reason}" for row in found.failures] == []
        assert len(found.rows) == len(taken.head_dims) * len(taken.dtypes) * 2 * len(lengths) * len(schedules)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_any_layout(stage: str) -> None:
    found = on_cpu.check_on_cpu(
        [stage], layouts=tuple(cases.LAYOUTS), masks=("causal",), lengths=[(65, 66), (113, 203)]
    )
    assert [f"{row.problem.label}, {row.layout}: {row.status}: {row.reason}" for row in found.failures] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_no_races(stage: str) -> None:
    head_dim = get(stage).head_dims[0]
    found = on_cpu.check_on_cpu(
        [stage], layouts=("contiguous",), lengths=[(65, 130)], head_dims=[head_dim], masks=("causal",), races=True
    )
    assert [row.reason for row in found.failures] == []
