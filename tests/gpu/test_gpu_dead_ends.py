"""Dead ends on a GPU: right where they ought to be, refused by the checker where they are kept for being wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab import bench, gpu, records
from flashlab.problem import Problem
from flashlab.stages import DEAD_ENDS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LENGTHS = ((1, 17), (65, 65), (113, 203))


@pytest.mark.parametrize("stage", [stage_id for stage_id, stage in DEAD_ENDS.items() if not stage.defect])
def test_a_dead_end_is_right(stage: str) -> None:
    if gpu.info().arch not in DEAD_ENDS[stage].archs:
        pytest.skip(f"needs {DEAD_ENDS[stage].needs}")
    found = bench.check_stages([stage], lengths=LENGTHS, data=None)
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in found.failures] == []
    contiguous = [row for row in found.rows if row.layout == "contiguous"]
    assert {row.status for row in contiguous} == {"ok"}


def test_48_rows_are_wrong_by_the_split_alone() -> None:
    names = ["tile48", "tile48[SPLIT_FROM_TILE=1]", "tile48[TILE_Q=32]"]
    found = bench.check_stages(names, lengths=[(96, 96)], layouts=("contiguous",), data=None)
    assert {(row.stage, row.status) for row in found.rows} == {
        (names[0], "wrong"), (names[1], "ok"), (names[2], "ok")
    }  # fmt: skip


def test_what_is_wrong_is_recorded_without_a_time(tmp_path: Path) -> None:
    problem = Problem.parse("1x8x512x64")
    path = bench.run(
        [problem],
        stages=["tile48", "tile48[SPLIT_FROM_TILE=1]"],
        peers=[],
        data=tmp_path,
        plan=bench.Plan(samples=7, cold_samples=0, sustained_seconds=0.0),
        ceilings=False,
    )
    wrong, right = (
        records.by_name(records.read_run(path).measurements)[n] for n in ("tile48", "tile48[SPLIT_FROM_TILE=1]")
    )
    assert (wrong.status, wrong.samples) == ("wrong", ())
    assert right.status == "ok"
    assert right.cubin is not None
    assert right.cubin.parameters["SPLIT_FROM_TILE"] == 1
