"""What pages, notebooks and the README say is said in the field's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prose import markdown_of, quoted_texts, typed_numbers, written_pages

from flashlab.core.paths import ROOT, SITE
from flashlab.core.problem import SUITES
from flashlab.experiments import levers
from flashlab.kernels import registry

INSTEAD = {
    r"\b(?:a|next|each|another|every) work\b(?! tile)|\b(?:equal|longest) works|\bworks (?:is|are) taken": "work tile",
    r"Q·K and P·V products|\b(?:Q·K|P·V) products?\b": "QK GEMM, PV GEMM",
    r"\bclocks (?:a|per) (?:score|call)|\bin a clock\b": "cycles per score; per-SM throughput, operations per cycle",
    r"\b(?:FLOP|operations|exponentials|instructions) a clock\b": "operations per cycle",
    r"\bfixed wait\b|\bshared-memory queue\b": "Nsight Compute's names: Stall Wait, MIO Throttle, Long Scoreboard",
    r"\bwaits? of fixed length\b": "Stall Wait",
    r"\bwhere its warps were\b": "warp-stall sampling",
    r"\bwhat it takes of an SM\b": "resource usage and occupancy",
    r"\bwhat it is made of\b": "instruction mix (SASS)",
    r"\bkeeps? to one element type\b": "compare only runs of the same dtype",
    r"\bstands? in the table alone\b": "appears only in the table",
    r"\btells? most of the ladder\b": "covers the most stages",
    r"\bask(?:s|ed|ing)? late\b|\basked for (?:before|after) the wait\b": "issued before or after the wait",
    r"\b[Ww]hat is left of \S+ claims\b": "how many of the claims hold up",
    r"\bblocks? (?:that|which) stays?\b": "persistent CTAs",
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
    for path in written_pages():
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
    for path in written_pages():
        found = re.search(r"^title: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.suffix == ".md" and found:
            assert found[1] not in titles, f"{path} and {titles[found[1]]}"
            titles[found[1]] = path


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_no_measured_number_is_written_by_hand() -> None:
    found = "\n".join(map(str, typed_numbers((*written_pages(), *quoted_texts()))))
    assert not found, (
        f"measured numbers that were typed:\n{found}\nA snippet draws them from data/; a constant, arithmetic, a "
        "quotation or a prediction says so: <!-- fixed: why -->, in TOML # fixed: why"
    )


@pytest.mark.parametrize(
    "words",
    [
        "at 514 TFLOP/s", "12.5 µs", "3–5 ms", "1 to 2 %", "4.8 TB/s", "2 GB/s", "1,400 cycles", "700 W", "1.2 us",
        "it is ×1.3 of", "gains 1.3× there", "10 times", "ten times as long", "twice the rate", "Twice as long",
        "a tenth slower", "half as often", "two thirds of", "costs a quarter, which", "it halves the traffic",
        "it doubled", "more than half of the time", "95 percent", "several times slower", "by a third.",
        "less than half a", "within a few percent", "an order of magnitude", "cost a fiftieth of",
    ],
)  # fmt: skip
def test_a_typed_number_is_found(words: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"A line.\n\nThe kernel is {words} or so.\n", encoding="utf-8")
    (found,) = typed_numbers([page])
    assert str(found).startswith(f"{page}:3: ")


@pytest.mark.parametrize(
    "text",
    [
        "Tiles of 64 × 64, 4 × 2 warps, 128 keys.", "A third buffer, double buffering, the second time.",
        "`514 TFLOP/s` and\n\n```\n12 µs\n```\n", "[here](x.md#a-50-%)", "in two halves",
        "Peak is 989 TFLOP/s. <!-- fixed: data sheet -->",
        "<!-- fixed: predicted before measuring -->\nIt takes 5 µs.\nOr 6 µs.",
        "<!-- fixed: the source's words -->\n\n| a | b |\n|---|---|\n| 5 µs | 6 µs |",
    ],
)  # fmt: skip
def test_what_is_no_measurement_may_be_typed(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert not list(typed_numbers([page]))
    page.write_text(f"{text}\n\nIt takes 5 µs. <!-- fixed: -->\n", encoding="utf-8")
    assert [one.words for one in typed_numbers([page])] == ["5 µs"]


@pytest.mark.parametrize("name", ["rung.toml", "experiment.patch"])
def test_a_typed_number_is_found_in_a_text_that_pages_quote(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(
        'prediction = """\n5 \\\nµs."""\n\nwhy = """\nOf no \\\nuse: 6 \\\nµs."""\n\n'
        '# fixed: a data sheet\nsame = "7 W"\n\none = "8 W" # fixed: too\nother = "9 W"\n\n--- a/x\n+10 W\n',
        encoding="utf-8",
    )
    assert [(one.line, one.words) for one in typed_numbers([path])] == [(6, "6 µs"), (14, "9 W")]


def test_how_to_reproduce_lists_every_suite_and_how_a_stage_is_added() -> None:
    page = (SITE / "reproduce.md").read_text(encoding="utf-8")
    assert f"| `suite` | {', '.join(f'`{name}`' for name in SUITES)} |" in page
    assert "kernels/NN_name.toml" in page


def test_how_to_reproduce_everything_measures_every_suite() -> None:
    """What `make report FULL=1` leaves out has a command of its own."""
    page = (SITE / "reproduce.md").read_text(encoding="utf-8")
    everything = page.partition("## Everything, for one GPU")[2].partition("## ")[0]
    commands = re.search(r"```sh\n(.*?)```", everything, re.S)
    assert commands
    cells = (ROOT / "notebooks" / "cells.toml").read_text(encoding="utf-8")
    first_looks = {"smoke", "first", "quick"}
    assert not [suite for suite in SUITES if suite not in first_looks and suite not in cells + commands[1]]


def test_a_number_of_another_gpu_than_a_page_shows_names_it_in_its_words() -> None:
    """Pages say at their top which GPU they show; what a comment alone says, no reader sees."""
    silent = []
    for path in written_pages():
        said = ""
        for number, line in enumerate(markdown_of(path).splitlines(), start=1):
            # What stands above it counts up to the heading, or the words in bold that are one.
            said = re.sub(r"<!--.*?-->", "", line if line.startswith(("#", "**")) else said + line)
            if re.search(r"<!-- fixed:[^>]*\bH100", line) and "H100" not in said:
                silent.append(f"{path.relative_to(ROOT)}:{number}")
    assert not silent


def test_what_a_library_wins_names_the_gpu() -> None:
    """The list above them is of the GPU that the page shows, which need not be that of the words."""
    page = (SITE / "lost_shapes.md").read_text(encoding="utf-8")
    told = [part.partition("\n\n")[0] for part in page.split("**What happened.**")[1:]]
    assert told
    assert not [words for words in told if not re.search(r"\bH[12]00\b", words)]
