"""Every stage over 1,000 random problems in random places on a GPU: between guards, into poison, held to the oracle."""

from __future__ import annotations

from collections import Counter

import pytest

from flashlab import bench, gpu, stages

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
COUNT = 1000


def test_random_shapes_and_strides() -> None:
    for module in ("torch", "cupy"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'flashlab[gpu]'")
    found = bench.check_stages(random=COUNT, seed=0, data=None)
    wrong = [f"{row.stage} {row.problem.label} {row.layout}: {row.status}: {row.reason}" for row in found.failures]
    assert not wrong, f"{len(wrong)} of {len(found.rows)}:\n" + "\n".join(wrong[:20])
    assert len({(row.problem, row.layout) for row in found.rows}) == COUNT
    passed = Counter(row.stage for row in found.rows if row.status == "ok")
    for stage in stages.STAGES.values():
        if gpu.info().arch in stage.archs:
            assert passed[stage.id] >= COUNT * len(stage.dtypes) // 4, stage.id
