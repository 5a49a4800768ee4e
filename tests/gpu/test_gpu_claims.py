"""Measuring for the claims, where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.core.problem import Problem
from flashlab.experiments import enqueue
from flashlab.experiments.evidence import Records
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.run import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_single_calls_take_longer_than_their_kernel(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x130x64")
    path, _ = enqueue.measure([problem], Options(data=tmp_path), library="sdpa")
    assert path.parent == tmp_path / gpu.info().slug / "calls"
    assert store.verify(gpu.info().slug, tmp_path) == ()
    (found,) = Records(gpu.info().slug, tmp_path).rows("calls")
    assert found.waits
    assert len(found.time_us) == enqueue.SINGLE_CALLS
    assert min(found.time_us) > 1.0
