"""Stages for decoding on a GPU: right at any split of the keys, in clusters of every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashlab.kernels.registry import DECODE
from flashlab.measure.check import check_stages
from flashlab.run import gpu
from flashlab.verify.on_cpu import CheckRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LENGTHS = ((1, 1), (1, 8192), (5, 4097), (16, 300), (7, 3))
NAMES = [name for stage in DECODE.values() for name in (stage.id, *stage.variant_names)]
ASIDE = {"decode": lambda _: check_stages(NAMES, lengths=LENGTHS, record=False)}


@pytest.fixture(scope="module")
def decode(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("decode")


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_for_decoding_is_right(name: str, decode: CheckRun) -> None:
    stage = DECODE[name.partition("[")[0]]
    if gpu.info().arch not in stage.archs:
        pytest.skip(f"needs {stage.needs}")
    mine = [row for row in decode.rows if row.stage == name]
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in mine if row.status != "ok"] == []
    assert mine
