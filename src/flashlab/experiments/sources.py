"""The contents of the documents, with our counterpart or the reason for its absence: data/sources.csv."""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping, Sequence

from flashlab.core.paths import DATA
from flashlab.experiments.evidence import facts
from flashlab.query.rows import grouped
from flashlab.show.tables import Column, folded, table

SOURCES = DATA / "sources.csv"
COLUMNS = (
    Column("lines", lambda row: ", ".join(row["lines"].split()).replace("-", "–"), left=True),
    Column("contents", "what", html.escape, left=True),
    Column(
        "ours", lambda row: f"{html.escape(row['ours'])} ([page]({row['link']}))" if row["ours"] else None, left=True
    ),
    Column("claims", lambda row: ", ".join(row["claims"].split()) or None, left=True),
    Column("missing, and why", lambda row: html.escape(row["why_not"]) or None, left=True),
)


def documents() -> Mapping[str, str]:
    """Descriptions of the documents by title."""
    return {document["title"]: document["what"] for document in facts()["documents"]}


def read() -> list[dict[str, str]]:
    """The rows of the file, in its order: stages, cycles, phases, figures and dead ends of documents, by column.

    `document` is a title, `lines` has the first and last line of each passage (`12 14-16`), `what` is in our words.
    `ours` is our stage, record or computation, `link` the page under site/ that shows it, and `why_not` says why there
    is nothing, or not all of it; each is empty where there is none. `claims` are ids in data/claims.csv.
    """
    with SOURCES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tables_of(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows as Markdown: one collapsed table per document, below its description."""
    of_documents = grouped(rows, lambda row: row["document"])
    return "\n".join(
        f"**{title}.** {what}\n\n"
        f"{folded(f'{html.escape(title)}: {len(of_documents[title])} rows', table(COLUMNS, of_documents[title]))}\n"
        for title, what in documents().items()
    )
