"""Dead ends on a GPU: right where they ought to be, refused by the checker where they are kept for being wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shared import read_run

from flashlab.core.problem import Problem
from flashlab.kernels.registry import DEAD_ENDS
from flashlab.measure import bench
from flashlab.measure.check import check_stages
from flashlab.measure.options import Options, Plan
from flashlab.run import gpu
from flashlab.verify.on_cpu import CheckRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LENGTHS = ((1, 17), (65, 65), (113, 203))
RIGHT = [stage_id for stage_id, stage in DEAD_ENDS.items() if not stage.defect]
SPLITS = ("tile48", "tile48[SPLIT_FROM_TILE=1]", "tile48[TILE_Q=32]")


def _timed(folder: Path) -> Path:
    return bench.run(
        [Problem.parse("1x8x512x64")],
        stages=SPLITS[:2],
        peers=[],
        plan=Plan(samples=7, cold_samples=0, sustained_seconds=0.0),
        ceilings=False,
        options=Options(data=folder),
    )


ASIDE = {
    "dead_ends": lambda _: check_stages(RIGHT, lengths=LENGTHS, record=False),
    "split": lambda _: check_stages(SPLITS, lengths=[(96, 96)], layouts=("contiguous",), record=False),
    "timed": _timed,
}


@pytest.fixture(scope="module")
def dead_ends(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("dead_ends")


@pytest.fixture
def split(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("split")


@pytest.fixture
def timed(aside: Callable[[str], Path]) -> Path:
    return aside("timed")


@pytest.mark.parametrize("stage", RIGHT)
def test_a_dead_end_is_right(stage: str, dead_ends: CheckRun) -> None:
    if gpu.info().arch not in DEAD_ENDS[stage].archs:
        pytest.skip(f"needs {DEAD_ENDS[stage].needs}")
    mine = [row for row in dead_ends.rows if row.stage == stage]
    failures = [row for row in dead_ends.failures if row.stage == stage]
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in failures] == []
    assert {row.status for row in mine if row.layout == "contiguous"} == {"ok"}


def test_48_rows_are_wrong_by_the_split_alone(split: CheckRun) -> None:
    assert {(row.stage, row.status) for row in split.rows} == {
        (SPLITS[0], "wrong"), (SPLITS[1], "ok"), (SPLITS[2], "ok")
    }  # fmt: skip


def test_what_is_wrong_is_recorded_without_a_time(timed: Path) -> None:
    wrong, right = (
        {row.name: row for row in read_run(timed).measurements}[n] for n in ("tile48", "tile48[SPLIT_FROM_TILE=1]")
    )
    assert (wrong.status, wrong.samples) == ("wrong", ())
    assert right.status == "ok"
    assert right.cubin is not None
    assert right.cubin.parameters["SPLIT_FROM_TILE"] == 1
