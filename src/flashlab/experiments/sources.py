"""Everything that the documents have, beside what there is of it here or why there is nothing: data/sources.csv."""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from flashlab.core.errors import ParameterError
from flashlab.core.paths import DATA, SITE
from flashlab.experiments.evidence import facts
from flashlab.show import tables

SOURCES = DATA / "sources.csv"


class Source(BaseModel):
    """A stage, cycle, phase, figure or dead end of a document."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    document: str
    """Its title."""
    lines: tuple[tuple[int, int], ...]
    """First and last line of each passage."""
    what: str
    """In our words."""
    ours: str
    """Our stage, record or computation; empty where there is none."""
    claims: tuple[str, ...]
    """Ids in data/claims.csv that are about it."""
    link: str
    """Page under site/ that shows ours; empty where there is none."""
    why_not: str
    """Why there is nothing, or not all of it; empty where nothing is missing."""

    @field_validator("document")
    @classmethod
    def _known(cls, title: str) -> str:
        if title not in documents():
            raise ValueError(f"wanted one of {'; '.join(documents())}, got {title!r}")
        return title

    @field_validator("lines", mode="before")
    @classmethod
    def _passages(cls, text: str) -> list[tuple[int, int]]:
        ends = [passage.partition("-") for passage in text.split()]
        lines = [(int(first), int(last or first)) for first, _, last in ends]
        if not lines or any(not 0 < first <= last for first, last in lines):
            raise ValueError(f"wanted lines of the document, `12` or `12-14`, got {lines}")
        return lines

    @field_validator("claims", mode="before")
    @classmethod
    def _ids(cls, text: str) -> list[str]:
        return text.split()

    @model_validator(mode="after")
    def _placed(self) -> Source:
        if not (self.ours or self.why_not):
            raise ValueError(f"{self.what}: wanted what is ours, or why there is nothing, got neither")
        if bool(self.ours) != bool(self.link):
            raise ValueError(f"{self.what}: wanted a page where there is something of ours, and none else")
        if self.link and SITE.is_dir() and not (SITE / self.link).is_file():
            raise ValueError(f"{self.what}: link: wanted a page under site/, got {self.link!r}")
        return self


def documents() -> Mapping[str, str]:
    """The documents by title, and what each is."""
    return {one["title"]: one["what"] for one in facts()["documents"]}


def read(claims: Sequence[str], path: Path = SOURCES) -> tuple[Source, ...]:
    """The rows of the file, in its order.

    Raises:
        ParameterError: a row without a place, a page or a claim that does not exist, or a claim in no row.
    """
    with path.open(encoding="utf-8", newline="") as file:
        try:
            rows = tuple(map(Source.model_validate, csv.DictReader(file)))
        except ValueError as error:
            raise ParameterError(f"{path}: {error}") from error
    named = {name for row in rows for name in row.claims}
    if named != set(claims):
        wrong = ", ".join(sorted(named ^ set(claims)))
        raise ParameterError(f"{path}: claims: wanted every claim in some row and no others, got it wrong for {wrong}")
    return rows


def tables_of(rows: Sequence[Source]) -> str:
    """The rows as Markdown, a folded table a document, each under what the document is."""
    parts = []
    for title, what in documents().items():
        of_document = [row for row in rows if row.document == title]
        columns = (
            tables.Column(
                "lines", lambda row: ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in row.lines), left=True
            ),
            tables.Column("what it has", lambda row: html.escape(row.what), left=True),
            tables.Column("ours", _ours, left=True),
            tables.Column("claims", lambda row: ", ".join(row.claims) or None, left=True),
            tables.Column("what is missing, and why", lambda row: html.escape(row.why_not) or None, left=True),
        )
        table = tables.table(columns, of_document)
        summary = f"{html.escape(title)}: {len(of_document)} rows"
        parts.append(f"**{title}.** {what}\n\n{tables.folded(summary, table)}\n")
    return "\n".join(parts)


def _ours(row: Source) -> str | None:
    return f"{html.escape(row.ours)} ([page]({row.link}))" if row.ours else None
