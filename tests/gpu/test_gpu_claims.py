"""Measuring for the claims, where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.core.problem import Problem
from flashlab.experiments import ledger
from flashlab.experiments.evidence import Records
from flashlab.record import store
from flashlab.run import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_single_calls_take_longer_than_their_kernel(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x130x64")
    path = ledger.time_calls("sdpa", problem, data=tmp_path)
    assert path.parent == tmp_path / gpu.info().slug / "calls"
    assert store.verify(gpu.info().slug, tmp_path) == ()
    (found,) = Records(gpu.info().slug, tmp_path).rows("calls")
    assert len(found.record.time_us) == ledger.SINGLE_CALLS
    assert min(found.record.time_us) > 1.0
