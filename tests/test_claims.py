"""The ledger: its claims, its rules, and that the committed verdicts follow from the committed records."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab import claims
from flashlab.claims import Estimate, Kind, Range, judge
from flashlab.errors import ParameterError


def exact(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def claimed(low: float, high: float | None = None) -> Range:
    return Range(low=low, high=low if high is None else high)


def test_every_claim_is_read_once_with_its_rule_and_numbers() -> None:
    found = {claim.id: claim for claim in claims.read()}
    assert len(found) == 65
    assert {claim.rule for claim in found.values()} == set(claims.RULES)
    assert found["A16"].numbers == (claimed(2e-3),)
    assert found["B07"].numbers == (claimed(15, 25),)
    assert [str(number) for number in found["E06"].numbers] == ["20", "10–15", "10", "5"]
    assert found["E06"].units == ("%",) * 4
    assert found["B11"].units == ("registers", "KB", "bytes spilled")
    assert found["B10"].numbers == (None,)
    assert found["A01"].document == "Phase 1 CUDA Baseline: Status Report"
    assert len({claim.document for claim in found.values()}) == 5


@pytest.mark.parametrize(
    ("rule", "ours", "theirs", "kind"),
    [
        ("near", exact(12), claimed(10), "confirmed"),
        ("near", exact(12.1), claimed(10), "off"),
        ("near", exact(7.9), claimed(10), "off"),
        ("near", Estimate(value=12.5, low=11.9, high=13), claimed(10), "confirmed"),
        ("near", exact(0), claimed(0), "confirmed"),
        ("near", exact(1), claimed(0), "off"),
        ("gain", exact(1.6), claimed(1.5), "confirmed"),
        ("gain", exact(1.61), claimed(1.5), "off"),
        ("gain", exact(1.02), claimed(1.5), "off"),
        ("gain", exact(0.97), claimed(1.5), "refuted"),
        ("gain", Estimate(value=0.99, low=0.97, high=1.01), claimed(1.5), "off"),
        ("gain", exact(1.03), claimed(1.05), "confirmed"),
        ("beats", Estimate(value=1.1, low=1.01, high=1.2), None, "confirmed"),
        ("beats", Estimate(value=1.1, low=1.0, high=1.2), None, "refuted"),
        ("at_least", exact(150), claimed(150, 200), "confirmed"),
        ("at_least", exact(149), claimed(150, 200), "refuted"),
        ("at_most", exact(20), claimed(15, 20), "confirmed"),
        ("at_most", exact(20.1), claimed(15, 20), "refuted"),
        ("recomputes", exact(1633), claimed(1723), "refuted"),
        ("recomputes", exact(1720), claimed(1723), "confirmed"),
        ("share", exact(24), claimed(20), "confirmed"),
        ("share", exact(26), claimed(20), "off"),
    ],
)
def test_rules(rule: str, ours: Estimate, theirs: Range | None, kind: Kind) -> None:
    assert judge(rule, ours, theirs) == kind


@pytest.mark.parametrize("rule", [name for name in claims.RULES if name != "beats"])
def test_a_rule_that_needs_a_number_says_so(rule: str) -> None:
    with pytest.raises(ParameterError, match="wanted a claimed number"):
        judge(rule, exact(1), None)


def test_the_least_favourable_number_counts() -> None:
    assert claims.least_favourable(["confirmed", "off", "confirmed"]) == "off"
    assert claims.least_favourable(["off", "refuted"]) == "refuted"
    assert claims.least_favourable(["refuted", "pending"]) == "pending"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("X1,S,c,about 5,x,H100,,how,near", "wanted a number"),
        ("X1,S,c,5,x,H100,,how,nearly", "wanted one of near"),
        ("X1,S,c,5,x,H100,,how,near\nX1,S,c,5,x,H100,,how,near", "wanted every id once"),
    ],
)
def test_what_is_no_claim_is_refused(line: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    path.write_text(f"id,source,claim,value,unit,gpu,shape,how_to_test,rule\n{line}\n", encoding="utf-8")
    with pytest.raises(ParameterError, match=fault):
        claims.read(path)
