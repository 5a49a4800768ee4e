"""Ceilings: a rate from what was done in a time, and that the ones which figures draw are measured."""

from __future__ import annotations

import pytest

from flashlab.core import errors
from flashlab.measure import bench
from flashlab.measure.ceilings import CEILINGS, value_of


def test_rates_from_amounts_and_times() -> None:
    assert value_of(2e12, "TB/s", 1e6) == pytest.approx(2.0)
    assert value_of(4e9, "TFLOP/s", 1000.0) == pytest.approx(4.0)
    assert value_of(1, "us", 2.5) == 2.5


def test_the_ceilings_that_figures_draw_are_there() -> None:
    drawn = {"copy", "l2_read", "smem_read", "fp32_fma", "half2_fma", "exp2", "tensor_float16", "mma_sync_float16"}
    assert drawn <= set(CEILINGS)
    with pytest.raises(errors.ParameterError, match="smem_read"):
        bench.run([], ceilings=["speed"])
