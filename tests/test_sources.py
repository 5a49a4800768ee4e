"""What the documents have and what became of it: data/sources.csv."""

from __future__ import annotations

import pytest

from flashlab.core.paths import SITE
from flashlab.experiments import ledger, sources


def test_every_row_has_a_place_and_every_claim_a_row() -> None:
    rows = sources.read()
    titles = {claim.source.partition(" § ")[0] for claim in ledger.read()}
    assert {row["document"] for row in rows} == titles == sources.documents().keys()
    assert {name for row in rows for name in row["claims"].split()} == {claim.id for claim in ledger.read()}
    for row in rows:
        passages = [tuple(map(int, passage.split("-"))) for passage in row["lines"].split()]
        assert passages, row["what"]
        assert all(0 < one[0] < one[-1] or len(one) == 1 for one in passages), row["what"]
        assert row["ours"] or row["why_not"], row["what"]
        assert bool(row["ours"]) == bool(row["link"]), row["what"]
        assert not row["link"] or (SITE / row["link"]).is_file(), row["what"]


@pytest.mark.parametrize(
    "what",
    [
        *("LLaMA-7B at B=1", "Tokens a second", "KV cache", "GQA and MQA", "Paged attention", "18,000 measurements"),
        *("across two GPUs", "Cost", "13.1 times", "0.000488", "row coverage and warp broadcast", "+20 to 30 %"),
    ],
)
def test_what_an_audit_missed_has_a_row(what: str) -> None:
    assert any(what in row["what"] for row in sources.read())


def test_the_page_folds_a_table_a_document() -> None:
    text = sources.tables_of(sources.read())
    assert text.count("<details markdown>") == len(sources.documents())
    assert all(f"**{title}.**" in text for title in sources.documents())
    assert "([page](stages/00_naive.md))" in text
