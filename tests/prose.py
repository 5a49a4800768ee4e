"""What people wrote, and the measured numbers that somebody typed there: `make test` lets none pass.

A number that was measured comes from a record, through a snippet. What may stand there as it is, a constant of the
hardware, arithmetic, a source's words or a prediction, says so with its reason in a comment: `<!-- fixed: why -->` at
the end of its line, or on a line of its own before a paragraph or table. In TOML, which pages quote too, the comment is
`# fixed: why`, and what was predicted needs none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import flashlab
from flashlab.core.paths import KERNELS, NOTEBOOKS, ROOT, SITE

_UNIT = r"(?:[TG]?FLOP/s|[TG]B/s|µs|us|ms|ns|[MG]Hz|m?J|W|%|percent|per\ cent|cycles?|clocks?|times|fold)(?!\w)"
_COUNT = (
    r"two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|a\ dozen|twenty|thirty|fifty|a\ hundred|several|a\ few"
)
_PART = "half|third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|sixteenth|twentieth|fiftieth|hundredth"
_MORE = "of|as|again|less|more|fewer|slower|faster|longer|shorter|higher|lower|above|below|away"
_TYPED = re.compile(
    rf"""
    (?<![\w.])\d[\d.,]*(?:\s*(?:to|or|and|–|-)\s*\d[\d.,]*)?[\s\u00a0-]*{_UNIT}
    | (?<![\d\s])×\s?\d | (?<!\d)\ ×\d | \b\d[\d.,]*\ ?×(?!\s*\d)
    | (?<![\w-])(?:{_COUNT})[ -](?:times|fold|percent|cycles|clocks|microseconds|milliseconds|watts)\b
    | \b(?:about|nearly|almost|more\ than|less\ than)\ half\b | \borders?\ of\ magnitude\b
    | \b(?:[Tt]wice|[Tt]hrice|doubl(?:es|ed|ing)(?!\ buffer)|tripl(?:es|ed|ing)|(?<!two\ )halv(?:es|ed|ing))\b
    | \b(?:[Hh]alf|by\ half)\ (?:as|again|the\ (?:time|rate|speed)|of\ the\ (?:time|rate)|its\ (?:time|rate))\b
    | \b(?:[Aa]n?|one|two|three|four|five|seven|nine)[ -](?:{_PART})s?(?:\ (?:{_MORE})\b|[,.;:)])
    """,
    re.VERBOSE,
)
_FIXED = re.compile(r"<!-- fixed: \w.+? -->")
_PREDICTED = re.compile(r'^(?:prediction|words) = (?:"""(?s:.*?)"""|".*")$', re.MULTILINE)
_WRAPPED = re.compile(r"(?:.*\\\n)+.*")
_NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")


class Typed(NamedTuple):
    """A number that was typed."""

    path: Path
    line: int
    """From 1; of a notebook, of its Markdown cells with an empty line between any two."""
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words}"


def written_pages() -> tuple[Path, ...]:
    """The pages under site/, the notebooks and the README."""
    pages = (path for path in SITE.rglob("*.md") if "generated" not in path.relative_to(SITE).parts)
    return (*sorted(pages), *sorted(NOTEBOOKS.glob("*.ipynb")), ROOT / "README.md")


def quoted_texts() -> tuple[Path, ...]:
    """What pages quote: every TOML file, the headers of experiments, and templates."""
    folders, kinds = (KERNELS, NOTEBOOKS, Path(flashlab.__file__).parent), ("toml", "patch", "md")
    return tuple(sorted(path for folder in folders for kind in kinds for path in folder.rglob(f"*.{kind}")))


def typed_numbers(paths: Iterable[Path]) -> Iterator[Typed]:
    """The measured numbers in the prose of pages, notebooks and TOML that no comment excepts."""
    for path in paths:
        text = markdown_of(path) if path.suffix in (".md", ".ipynb") else _prose_of_toml(path)
        yield from (Typed(path, line, words) for line, words in _in_text(text))


def _prose_of_toml(path: Path) -> str:
    """The text of a TOML file, or of such a header above a diff, without predictions; a wrapped line is its first."""
    header = path.read_text(encoding="utf-8").partition("\n--- a/")[0]
    text = _PREDICTED.sub(lambda match: "\n" * match[0].count("\n"), header)
    text = _WRAPPED.sub(lambda match: match[0].replace("\\\n", "") + "\n" * match[0].count("\n"), text)
    return re.sub(r"# (fixed: .+)$", r"<!-- \1 -->", text, flags=re.MULTILINE)


def markdown_of(path: Path) -> str:
    """The Markdown of a page, or of a notebook's cells with an empty line between any two."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def _in_text(text: str) -> Iterator[tuple[int, str]]:
    fence, excepted = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if opened := re.match(r"```+|~~~+", bare):
            fence = "" if fence and bare.startswith(fence) else fence or opened[0]
        elif fence:
            continue
        elif _FIXED.fullmatch(bare):
            excepted = "next"
        elif not bare:
            excepted = "next" if excepted == "next" else ""
        elif excepted:
            excepted = "this"
        elif not _FIXED.search(line):
            yield from ((number, found[0].strip()) for found in _TYPED.finditer(_NOT_PROSE.sub("", line)))
