"""The micro-benchmarks of one SM on a GPU: values that any Hopper gives, whatever its clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.experiments import chip
from flashlab.measure.options import Options
from flashlab.record import schema, store
from flashlab.record.schema import ChipReading
from flashlab.run import gpu


@pytest.fixture(scope="module")
def readings(quiet: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChipReading]:
    if gpu.info().arch != chip.ARCH:
        pytest.skip(f"made of {chip.ARCH} instructions, this GPU is {gpu.info().arch}")
    data: Path = tmp_path_factory.mktemp("data")
    names = ["ex2_16_warps", "fmnmx_16_warps", "wgmma_n128_2wg_ss", "issue_n64_1wg_rs", "softmax_4_warps"]
    names += ["wgmma_n128_2wg_rs_beside_ffma_2wg", "loop_serial_d64_1wg_n128"]
    found, damage = store.read(chip.measure(names, launches=3, options=Options(data=data)), schema.ChipReading)
    assert not damage
    return {reading.name: reading for reading in found}


def test_units_work_at_their_rates(readings: dict[str, ChipReading]) -> None:
    assert readings["ex2_16_warps"].value == pytest.approx(16, rel=0.02)
    assert readings["fmnmx_16_warps"].value == pytest.approx(64, rel=0.05)
    assert readings["wgmma_n128_2wg_ss"].value == pytest.approx(4096, rel=0.03)


def test_a_score_costs_at_least_its_exponential_and_its_products(readings: dict[str, ChipReading]) -> None:
    assert readings["softmax_4_warps"].value >= 1 / 16
    assert readings["loop_serial_d64_1wg_n128"].value >= 4 * 64 / 4096 + 1 / 16


def test_stamps_rise_and_warps_beside_are_told_apart(readings: dict[str, ChipReading]) -> None:
    assert readings["issue_n64_1wg_rs"].stamps[-1] > readings["issue_n64_1wg_rs"].stamps[-2] > 0
    assert all(rate > 0 for rate in readings["wgmma_n128_2wg_rs_beside_ffma_2wg"].beside)


def test_all_sms_do_as_one_does(readings: dict[str, ChipReading]) -> None:
    for name in ("ex2_16_warps", "wgmma_n128_2wg_ss"):
        assert readings[name].all_sms[0] == pytest.approx(readings[name].value, rel=0.03)
