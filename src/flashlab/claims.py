"""The ledger: what the source documents claim, by which rule each claim is judged, and what the records say.

    data/claims.csv               the claims, each with its rule; written before what judges them was measured
    data/<gpu>/verdicts.json      the verdicts, `flashlab claims --write`

A claim names a number, or several joined by a slash, or none where it only says that one thing beats another. An
evaluator finds our numbers for it, with the interval in which they lie; a rule, which knows neither the claim nor
whom it flatters, compares the two. Of several numbers the least favourable verdict counts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashlab.errors import ParameterError
from flashlab.paths import DATA

CLAIMS = DATA / "claims.csv"

Kind = Literal["confirmed", "off", "refuted", "not_comparable", "needs_hardware", "pending"]
KINDS: Mapping[Kind, str] = {
    "confirmed": "our number agrees, by the claim's rule",
    "off": "the claim points the right way, its size is wrong: by how much is said",
    "refuted": "the opposite was measured, or the arithmetic is wrong",
    "not_comparable": "the claim compares what cannot be compared",
    "needs_hardware": "only a GPU that has no records here can tell",
    "pending": "what would tell is not on record yet; the command that makes it is named",
}
"""Verdicts, and what each means; the least favourable to a claim of several numbers comes last."""


# --- What is claimed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Range:
    """A claimed number; `low` and `high` are the same unless the claim gives a range."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of data/claims.csv."""

    id: str
    """A letter for the document and a number."""
    source: str
    """Title of the document, and the section that makes the claim."""
    claim: str
    value: str
    """As the document has it; empty where it gives no number."""
    unit: str
    """Of each number, joined by a slash where they differ."""
    gpu: str
    """The model that the document measured on."""
    shape: str
    how_to_test: str
    rule: str
    """Name of one of `RULES`."""

    @property
    def document(self) -> str:
        """Title of the document."""
        return self.source.partition(" § ")[0]

    @property
    def numbers(self) -> tuple[Range | None, ...]:
        """The claimed numbers; a single None where there is none."""
        return tuple(_range(part) for part in self.value.split("/")) if self.value else (None,)

    @property
    def units(self) -> tuple[str, ...]:
        """The unit of each of `numbers`."""
        count, units = len(self.numbers), self.unit.split("/")
        return tuple(units) if len(units) == count > 1 else (self.unit,) * count

    @property
    def claimed(self) -> str:
        """The numbers and their unit, for people; empty where there is none."""
        return f"{self.value} {self.unit}".replace("-", "–").replace("e–", "e-") if self.value else ""


_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


def _range(text: str) -> Range:
    match = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", text)
    if match is None:
        raise ParameterError(f"value of a claim: wanted a number, or two joined by a hyphen, got {text!r}")
    low = float(match[1])
    return Range(low=low, high=float(match[2] or low))


def read(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """The claims of a file, in its order.

    Raises:
        ParameterError: a value that is no number, a rule that does not exist, an id that occurs twice.
    """
    with path.open(encoding="utf-8", newline="") as file:
        found = tuple(Claim(**row) for row in csv.DictReader(file))
    for claim in found:
        _ = claim.numbers
        if claim.rule not in RULES:
            raise ParameterError(f"rule of claim {claim.id}: wanted one of {', '.join(RULES)}, got {claim.rule!r}")
    ids = [claim.id for claim in found]
    if len(set(ids)) < len(ids):
        raise ParameterError(f"claims: wanted every id once, got {', '.join(i for i in ids if ids.count(i) > 1)} again")
    return found


# --- The rules --------------------------------------------------------------------------------------------------------

TOLERANCE = 0.2
"""Of a number, a gain or a limit: two GPUs of one model, or two drivers, hardly differ by more."""
SMALLEST_TOLERANCE = 0.02
"""Of a gain: that is how far two measurements of the same thing may lie apart."""
ARITHMETIC = 0.01
"""What rounding explains where a number follows from others."""
SHARE_POINTS = 5.0
"""Percentage points: the shares that the documents give are multiples of ten."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Our number for one claimed number."""

    value: float
    low: float
    """Lower end of its 95 % interval; the value itself where it is exact."""
    high: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a claimed number and ours are compared."""

    name: str
    meaning: str
    judge: Callable[[Estimate, Range], Kind]
    """Takes our number and the claimed one; for a rule without claimed numbers that is NaN."""


def _overlaps(ours: Estimate, low: float, high: float) -> bool:
    return ours.low <= high and ours.high >= low


def _near(ours: Estimate, claimed: Range) -> Kind:
    within = _overlaps(ours, (1 - TOLERANCE) * claimed.low, (1 + TOLERANCE) * claimed.high)
    return "confirmed" if within else "off"


def gain_band(claimed: Range) -> tuple[float, float]:
    """The factors that confirm a claimed gain: its excess over one, give or take the tolerance."""
    below, above = (max(TOLERANCE * (factor - 1), SMALLEST_TOLERANCE) for factor in (claimed.low, claimed.high))
    return claimed.low - below, claimed.high + above


def _gain(ours: Estimate, claimed: Range) -> Kind:
    if _overlaps(ours, *gain_band(claimed)):
        return "confirmed"
    return "refuted" if ours.high <= 1 else "off"


def _beats(ours: Estimate, _: Range) -> Kind:
    return "confirmed" if ours.low > 1 else "refuted"


def _at_least(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if ours.high >= claimed.low else "refuted"


def _at_most(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if ours.low <= claimed.high else "refuted"


def _recomputes(ours: Estimate, claimed: Range) -> Kind:
    within = _overlaps(ours, (1 - ARITHMETIC) * claimed.low, (1 + ARITHMETIC) * claimed.high)
    return "confirmed" if within else "refuted"


def _share(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if _overlaps(ours, claimed.low - SHARE_POINTS, claimed.high + SHARE_POINTS) else "off"


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="near",
            meaning=(
                f"A rate, time or count: confirmed where our 95 % interval meets the claimed number, or range, widened "
                f"by {100 * TOLERANCE:.0f} %; else off, by the factor that is said."
            ),
            judge=_near,
        ),
        Rule(
            name="gain",
            meaning=(
                f"A speed-up: confirmed where our interval meets the claimed factor, its excess over one widened by "
                f"{100 * TOLERANCE:.0f} %, at least by {SMALLEST_TOLERANCE:g}; refuted where our whole interval says "
                "that there is no gain; else off."
            ),
            judge=_gain,
        ),
        Rule(
            name="beats",
            meaning="A comparison without a number: confirmed where our whole interval lies above one, else refuted.",
            judge=_beats,
        ),
        Rule(
            name="at_least",
            meaning="A target: confirmed where our interval reaches the low end of the claim, else refuted.",
            judge=_at_least,
        ),
        Rule(
            name="at_most",
            meaning="A limit: refuted where our whole interval lies above the claim's high end, else confirmed.",
            judge=_at_most,
        ),
        Rule(
            name="recomputes",
            meaning=(
                f"Arithmetic on numbers that the document gives itself: confirmed where it comes out within "
                f"{100 * ARITHMETIC:.0f} %, which rounding explains, else refuted."
            ),
            judge=_recomputes,
        ),
        Rule(
            name="share",
            meaning=(
                f"Shares of a whole: confirmed where every one lies within {SHARE_POINTS:.0f} percentage points, "
                "else off."
            ),
            judge=_share,
        ),
        Rule(
            name="same_problem",
            meaning=(
                "A ratio of two times: not comparable where they are of two problems, and then the ratio for one and "
                "the same problem is said; else as a gain."
            ),
            judge=_gain,
        ),
    )
}
"""The rules that data/claims.csv names. They know numbers alone, not what a claim is about."""


def judge(rule: str, ours: Estimate, claimed: Range | None) -> Kind:
    """The verdict on one claimed number.

    Raises:
        ParameterError: no such rule, or a rule that needs a claimed number gets none.
    """
    if rule not in RULES:
        raise ParameterError(f"rule: wanted one of {', '.join(RULES)}, got {rule!r}")
    if claimed is None and rule != "beats":
        raise ParameterError(f"rule {rule}: wanted a claimed number, got none; `beats` needs none")
    return RULES[rule].judge(ours, claimed or Range(low=math.nan, high=math.nan))


def least_favourable(kinds: list[Kind]) -> Kind:
    """Of the verdicts on a claim's numbers, the one that counts."""
    return max(kinds, key=list(KINDS).index)
