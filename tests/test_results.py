"""Which rows the report shows, in which order, and which library is the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import measurement, write_synthetic

from flashlab import records, results, stages
from flashlab.errors import NoDataError
from flashlab.problem import FIRST_SHAPE, Problem

FIRST = Problem.parse(FIRST_SHAPE)
GPU = "nvidia-h200"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_synthetic(tmp_path, GPU)
    return tmp_path


def test_a_later_run_of_one_stage_does_not_hide_the_ladder(data: Path) -> None:
    before = results.load(GPU, data).rows(FIRST)
    later = "20990101T000000Z-0123abc"
    records.append(data / GPU / "runs" / f"{later}.jsonl", measurement("00_naive", FIRST, run=later))
    assert results.load(GPU, data).rows(FIRST) == before


def test_a_later_whole_run_replaces_the_earlier(data: Path) -> None:
    later = "20990101T000000Z-0123abc"
    for stage_id in stages.STAGES:
        records.append(data / GPU / "runs" / f"{later}.jsonl", measurement(stage_id, FIRST, run=later, seed=5))
    shown = results.load(GPU, data)
    assert {row.run for row in shown.rows(FIRST)} == {later}
    assert shown.newest == later


def test_stages_stand_in_the_ladders_order_and_libraries_by_speed(data: Path) -> None:
    rows = results.load(GPU, data).rows(FIRST)
    ladder = [row.name for row in rows if row.kind == "stage"]
    assert ladder == list(stages.STAGES)
    assert [row.kind for row in rows] == sorted((row.kind for row in rows), reverse=True)
    rates = [results.rate(row) or 0.0 for row in rows if row.kind == "peer"]
    assert rates == sorted(rates, reverse=True)
    fastest = results.fastest_peer(rows)
    assert fastest is not None
    assert results.rate(fastest) == rates[0]


def test_the_parent_is_the_registrys(data: Path) -> None:
    rows = results.load(GPU, data).rows(FIRST)
    for row in rows:
        parent = results.parent_of(row, rows)
        wanted = stages.STAGES[row.name].parent if row.kind == "stage" else None
        assert (parent.name if parent else None) == wanted


def test_rates_follow_from_the_median() -> None:
    row = measurement("00_naive", FIRST)
    samples = row.samples_of()
    assert samples is not None
    assert results.rate(row) == pytest.approx(FIRST.flops / samples.median_us / 1e6)
    assert results.rate(measurement("00_naive", Problem.parse(FIRST_SHAPE, dtype="bfloat16"))) is None


def test_what_was_not_measured_is_named_with_what_was(data: Path) -> None:
    with pytest.raises(NoDataError, match=r"B3 H1 S7 D64 .*found none\. Measured: B16 H16 S2048 D64"):
        results.load(GPU, data).rows(Problem.parse("3x1x7x64"))
    with pytest.raises(NoDataError, match="nvidia-unheard-of"):
        results.load("nvidia-unheard-of", data)
    assert [shown.gpu for shown in results.load_all(data)] == [GPU]
