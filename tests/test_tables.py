"""Tables: how numbers read, that Markdown survives its cells, and that CSV lines say what the records say."""

from __future__ import annotations

import pytest
from synthetic import measurement

from flashlab import stages, tables
from flashlab.problem import FIRST_SHAPE, Problem

FIRST = Problem.parse(FIRST_SHAPE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (6.2164, "6.22"), (39.24, "39.2"), (133.97, "134"), (99.97, "100"), (44220.0, "44,220")],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    assert tables.number(value) == text


def test_a_table_has_a_cell_for_every_column() -> None:
    table = tables.markdown(("name", "a | b"), [("x|y", 1.5), ("z", None)])
    lines = table.strip().splitlines()
    assert len(lines) == 4
    assert all(line.replace(r"\|", "").count("|") == 3 for line in lines)
    assert lines[-1].endswith("| – |")


def test_rows_without_a_time_say_why() -> None:
    wrong_type = measurement("00_naive", Problem.parse(FIRST_SHAPE, dtype="bfloat16"))
    told = tables.untimed([wrong_type, measurement("00_naive", FIRST)])
    assert wrong_type.reason in told
    assert tables.untimed([measurement("00_naive", FIRST)]) == ""


def test_rates_give_each_stage_its_gain_over_its_parent() -> None:
    rows = [measurement(stage_id, FIRST) for stage_id in stages.STAGES]
    table = tables.rates(rows)
    assert all(stage_id in table for stage_id in stages.STAGES)


def test_csv_lines_hold_every_sample_and_state() -> None:
    row = measurement("00_naive", FIRST)
    lines = tables.measurement_lines([row])
    assert [(line["regime"], line["cache"]) for line in lines] == [(s.regime, s.cache) for s in row.samples]
    assert {line["commit"] for line in lines} == {row.source.commit}
    samples = tables.sample_lines([row])
    assert [line["time_us"] for line in samples] == [t for s in row.samples for t in s.time_us]
