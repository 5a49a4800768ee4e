"""What the documents have and what became of it: data/sources.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flashlab.core.errors import ParameterError
from flashlab.experiments import ledger, sources

IDS = [claim.id for claim in ledger.read()]


def test_every_row_has_a_place_and_every_claim_a_row() -> None:
    rows = sources.read(IDS)
    titles = {claim.source.partition(" § ")[0] for claim in ledger.read()}
    assert {row.document for row in rows} == titles == sources.documents().keys()
    assert all(row.ours or row.why_not for row in rows)


@pytest.mark.parametrize(
    "what",
    [
        *("LLaMA-7B at B=1", "Tokens a second", "KV cache", "GQA and MQA", "Paged attention", "18,000 measurements"),
        *("across two GPUs", "Cost", "13.1 times", "0.000488", "row coverage and warp broadcast", "+20 to 30 %"),
    ],
)
def test_what_an_audit_missed_has_a_row(what: str) -> None:
    assert any(what in row.what for row in sources.read(IDS))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"document": "Another"}, "wanted one of Phase 1"),
        ({"lines": "14-12"}, "wanted lines of the document"),
        ({"lines": "twelve"}, "lines"),
        ({"ours": "", "link": "", "why_not": ""}, "wanted what is ours, or why there is nothing"),
        ({"link": ""}, "wanted a page where there is something of ours"),
        ({"link": "stages/99_none.md"}, "wanted a page under site/"),
        ({"claims": "A01 Z9"}, "got it wrong for .*Z9"),
        ({"claims": ""}, "got it wrong for A01"),
    ],
)
def test_a_row_without_a_place_is_refused(change: dict[str, str], fault: str, tmp_path: Path) -> None:
    with sources.SOURCES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0] |= change
    for row in rows[1:]:
        row["claims"] = " ".join(name for name in row["claims"].split() if name != "A01")
    path = tmp_path / "sources.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ParameterError, match=fault):
        sources.read(IDS, path)


def test_the_page_folds_a_table_a_document() -> None:
    text = sources.tables_of(sources.read(IDS))
    assert text.count("<details markdown>") == len(sources.documents())
    assert all(f"**{title}.**" in text for title in sources.documents())
    assert "([page](stages/00_naive.md))" in text
