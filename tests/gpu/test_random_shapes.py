"""Stages over 2,000 random problems in random places on a GPU, with windows, soft caps and decoding among them.

Between guards, into poison, held to the oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from flashlab.kernels import registry
from flashlab.measure.check import check_stages
from flashlab.run import gpu
from flashlab.verify.on_cpu import CheckRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
COUNT = 2000
STAGES = [*registry.STAGES, *registry.DECODE]


ASIDE = {"at_random": lambda _: check_stages(STAGES, random=COUNT, record=False)}


@pytest.fixture
def at_random(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("at_random")


def test_random_shapes_and_strides(at_random: CheckRun) -> None:
    found = at_random
    wrong = [f"{row.stage} {row.problem.label} {row.layout}: {row.status}: {row.reason}" for row in found.failures]
    assert not wrong, f"{len(wrong)} of {len(found.rows)}:\n" + "\n".join(wrong[:20])
    assert len({(row.problem, row.layout) for row in found.rows}) == COUNT
    passed = Counter(row.stage for row in found.rows if row.status == "ok")
    for stage in map(registry.get, STAGES):
        if gpu.info().arch in stage.archs:
            assert passed[stage.id] >= COUNT * len(stage.dtypes) // 10, stage.id
