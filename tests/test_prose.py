"""What pages, notebooks and the README say is said in the field's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashlab.core.paths import ROOT
from flashlab.experiments import levers
from flashlab.kernels import registry
from flashlab.show import site
from flashlab.show.typed import markdown_of

INSTEAD = {
    r"\b(?:a|next|each|another|every) work\b(?! tile)|\b(?:equal|longest) works|\bworks (?:is|are) taken": "work tile",
    r"Q·K and P·V products|\b(?:Q·K|P·V) products?\b": "QK GEMM, PV GEMM",
    r"\bclocks (?:a|per) score|\bin a clock\b": "cycles per score; per-SM throughput, operations per cycle",
    r"\bfixed wait\b|\bshared-memory queue\b": "Nsight Compute's names: Stall Wait, MIO Throttle, Long Scoreboard",
    r"\bwhere its warps were\b": "warp-stall sampling",
    r"\bwhat it takes of an SM\b": "resource usage and occupancy",
    r"\bwhat it is made of\b": "instruction mix (SASS)",
    r"\bkeeps? to one element type\b": "compare only runs of the same dtype",
    r"\bstands? in the table alone\b": "appears only in the table",
    r"\btells? most of the ladder\b": "covers the most stages",
    r"\bask(?:s|ed|ing)? late\b|\basked for (?:before|after) the wait\b": "issued before or after the wait",
    r"\b[Ww]hat is left of \S+ claims\b": "how many of the claims hold up",
    r"\bblocks that stay\b": "persistent CTAs",
    r"\bproducts while others exponentiate\b": "ping-pong",
    r"\b[Tt]ensor cop(?:y|ies)\b(?! engine)": "TMA load, TMA store",
    r"\bfull mask\b": "non-causal",
    r"\bmJ a call\b": "mJ/call",
    r"\btak(?:e|es|ing) turns\b": "interleaved (timing), ping-pong order (warpgroups)",
    r"\blevers?\b|\bLevers?\b": "microarchitectural experiments",
    r"\bwhat came of\b|\bWhat came of\b": "result",
    r"\bmedian time over the stage's\b": "speed-up over the library (ratio of medians)",
}
"""What is not written, and what is in its place."""


def prose(text: str) -> str:
    """Markdown without code, addresses, comments and what is taken in; lines stay where they are."""
    hidden = r"^---\n.*?^---\n|```.*?^\s*```|`[^`\n]*`|\]\([^)\n]*\)|<!--.*?-->|^--8<--.*?$|<[^>\n]*>"
    return re.sub(hidden, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def _texts() -> Iterator[tuple[str, str]]:
    for path in site.written_pages():
        yield path.relative_to(ROOT).as_posix(), markdown_of(path)
    for stage in (*registry.STAGES.values(), *registry.OFF_LADDER.values()):
        # A prediction stays as it was written.
        yield f"{stage.id}.toml", "\n".join((stage.title, stage.question, stage.change))
    for lever in levers.choose():
        yield f"{lever.name}.patch", f"{lever.question}\n{lever.why}"


def refused(text: str) -> list[str]:
    """The words of a text that are not used here, each with its line and what to write."""
    lines = prose(text).splitlines()
    return [
        f"line {number}: {match[0]!r}; write: {instead}"
        for number, line in enumerate(lines, start=1)
        for pattern, instead in INSTEAD.items()
        for match in re.finditer(pattern, line)
    ]


@pytest.mark.parametrize(("where", "text"), list(_texts()), ids=lambda value: value if len(value) < 60 else "")
def test_it_is_said_in_the_fields_words(where: str, text: str) -> None:
    assert not refused(text), where


def test_a_word_that_is_not_used_is_found_with_its_line_and_what_to_write() -> None:
    assert refused("Text.\n\nThe next work is late.\n") == ["line 3: 'next work'; write: work tile"]
    assert refused("It costs 3 mJ a call, as blocks that stay do.") == [
        "line 1: 'blocks that stay'; write: persistent CTAs",
        "line 1: 'mJ a call'; write: mJ/call",
    ]


@pytest.mark.parametrize("text", ["The next work tile.", "`full mask`", "```\nlevers\n```\n", "[it](levers.md)"])
def test_code_and_addresses_are_not_prose(text: str) -> None:
    assert not refused(text)


def test_every_page_has_a_title_of_its_own() -> None:
    titles: dict[str, Path] = {}
    for path in site.written_pages():
        found = re.search(r"^title: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.suffix == ".md" and found:
            assert found[1] not in titles, f"{path} and {titles[found[1]]}"
            titles[found[1]] = path
