"""What is on record: read once while the files stay as they are, and chosen from by policies."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import measurement, write_synthetic

from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.query import select
from flashlab.query.rows import headline, sessions
from flashlab.record import schema, store
from flashlab.show import explorer

FIRST = Problem.parse(FIRST_SHAPE)
GPU = "nvidia-h200"
OLD, NEW = "20260101T030000Z-4567def", "20260102T030000Z-0123abc-4f2a91"


def write(data: Path, run: str, *records: schema.Measurement) -> Path:
    path = data / GPU / "runs" / f"{run}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for record in records:
        store.append(path, record)
    return path


def measured(data: Path) -> tuple[schema.Measurement, ...]:
    return store.records(GPU, schema.Measurement, data)


def test_a_row_says_what_its_record_says() -> None:
    one = measurement("00_naive", FIRST, run=NEW)
    row = headline(one)
    assert (row["name"], row["kind"], row["shape"], row["mask"], row["status"], row["run"]) == (
        "00_naive", "stage", FIRST_SHAPE, "full", "ok", NEW,
    )  # fmt: skip
    taken = one.samples_of()
    assert taken is not None
    assert row["median_us"] == taken.median_us


def test_records_are_read_again_only_where_a_file_changed(tmp_path: Path) -> None:
    path = write(tmp_path, NEW, measurement("00_naive", FIRST, run=NEW))
    (first,) = measured(tmp_path)
    assert measured(tmp_path)[0] is first
    store.append(path, measurement("01_coalesced", FIRST, run=NEW))
    assert [row.name for row in measured(tmp_path)] == ["00_naive", "01_coalesced"]
    path.write_bytes(path.read_bytes().replace(b"01_coalesced", b"02_half2__xx"))
    assert [row.name for row in measured(tmp_path)] == ["00_naive", "02_half2__xx"]


def test_nothing_is_chosen_of_nothing(tmp_path: Path) -> None:
    assert not select.select(measured(tmp_path), sessions(GPU, tmp_path))


def test_the_ladder_is_of_the_run_that_tried_most_of_it(tmp_path: Path) -> None:
    write(tmp_path, OLD, *(measurement(name, FIRST, run=OLD) for name in ("00_naive", "01_coalesced", "sdpa")))
    write(tmp_path, NEW, *(measurement(name, FIRST, run=NEW) for name in ("00_naive", "sdpa")))
    assert {row.run for row in select.select(measured(tmp_path), {}, select.LADDER)} == {OLD}


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_what_is_selected_is_what_is_loaded(tmp_path: Path, mask: str) -> None:
    write_synthetic(tmp_path, GPU, problems=[Problem.parse(FIRST_SHAPE, mask=mask)])
    rows = select.select(measured(tmp_path), sessions(GPU, tmp_path))
    (loaded,) = select.load(GPU, tmp_path).problems.values()
    assert rows == loaded


def test_the_explorer_has_every_time_and_says_which_the_pages_show(tmp_path: Path) -> None:
    write(tmp_path, OLD, *(measurement(name, FIRST, run=OLD) for name in ("00_naive", "01_coalesced", "fa3")))
    write(tmp_path, NEW, measurement("00_naive", FIRST, run=NEW))
    lines = explorer.lines(GPU, tmp_path)
    assert {(line["run"], line["name"]) for line in lines} >= {
        (OLD, "00_naive"),
        (OLD, "01_coalesced"),
        (NEW, "00_naive"),
    }
    shown = {(line["run"], line["name"], line["state"]): line["tflops"] for line in lines if line["shown"]}
    for row in select.load(GPU, tmp_path).rows(FIRST):
        rate = select.rate(row)
        if rate is not None:
            assert shown[row.run, row.name, "burst, hot L2"] == pytest.approx(rate)
    assert (NEW, "00_naive", "burst, hot L2") not in shown


def test_the_explorer_relates_fp8_to_the_peak_of_fp8(tmp_path: Path) -> None:
    write(tmp_path, OLD, *(measurement(name, FIRST, run=OLD) for name in ("00_naive", "f0_e4m3", "fa3_fp8")))
    for line in explorer.lines(GPU, tmp_path):
        peak = measurement("00_naive", FIRST).gpu.tensor_percent(line["tflops"], line["clock"])
        assert line["peak"] == (peak if line["name"] == "00_naive" or peak is None else pytest.approx(peak / 2))
