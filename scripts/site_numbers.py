"""Every number that a built report shows, and what changed between two of them.

    site_numbers.py dump build/site numbers.json      # every table cell, sentence and figure label that holds a number
    site_numbers.py compare before.json after.json    # exits 1 where a number changed or went

A number is known by where it stands: page, heading, and row and column of a table, or its sentence without the numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from bs4 import BeautifulSoup, Tag

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
USAGE = "wanted `site_numbers.py dump SITE FILE` or `site_numbers.py compare BEFORE AFTER`"


def words(text: str) -> str:
    """The text with every number as #, spaces as one: what the numbers are about."""
    return " ".join(NUMBER.sub("#", text).split())


def shown(page: Path, name: str) -> dict[str, list[str]]:
    """The numbers of an HTML page or SVG figure, by where they stand."""
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    places: dict[str, list[str]] = {}

    def put(place: str, text: str) -> None:
        if NUMBER.search(text):
            places.setdefault(f"{name} | {place}", []).extend(NUMBER.findall(text))

    body = soup.find("article") or soup
    assert isinstance(body, Tag)
    heading = ""
    columns: list[str] = []
    for tag in body.find_all(["h1", "h2", "h3", "h4", "tr", "p", "li", "figcaption", "text", "summary"]):
        text = tag.get_text(" ", strip=True).replace("¶", "")
        if tag.name in ("h1", "h2", "h3", "h4"):
            heading = words(text)
        elif tag.name == "tr":
            cells = [cell.get_text(" ", strip=True) for cell in tag.find_all(["th", "td"])]
            if tag.find("td") is None:
                columns = cells
            else:
                for column, cell in zip(columns + [""] * len(cells), cells, strict=False):
                    put(f"{heading} | {cells[0]} | {column}", cell)
        elif tag.name == "text" or tag.find_parent("table") is None:
            put(f"{heading} | {words(text)}", text)
    return places


def dump(site: Path) -> dict[str, list[str]]:
    """The numbers of every page and of every figure of the wide light layout, by where they stand."""
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    figures = sorted(site.rglob("*.wide.light.svg"))
    if not pages:
        raise SystemExit(f"wanted a built site, found no page in {site}; `make report` builds one into build/site")
    return {
        place: numbers
        for path in (*pages, *figures)
        for place, numbers in shown(path, unquote(str(path.relative_to(site)))).items()
    }


def read(path: Path) -> dict[str, list[str]]:
    """What `dump` wrote."""
    try:
        places: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"wanted numbers that `dump` wrote, got {path}: {error}") from error
    return places


def compare(before: dict[str, list[str]], after: dict[str, list[str]]) -> int:
    """Print what changed, went and came, and how many; the number of changed and gone."""
    changed = {place for place in before.keys() & after.keys() if Counter(before[place]) != Counter(after[place])}
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    for title, places in (("changed", changed), ("gone", gone), ("new", new)):
        for place in sorted(places):
            print(f"{title}: {place}: {', '.join(before.get(place, []))} -> {', '.join(after.get(place, []))}")
    same = len(before.keys() & after.keys()) - len(changed)
    print(f"{same} places with the same numbers, {len(changed)} changed, {len(gone)} gone, {len(new)} new")
    return len(changed) + len(gone)


def main(arguments: list[str]) -> int:
    """Dump or compare."""
    if len(arguments) != 3 or arguments[0] not in ("dump", "compare"):
        raise SystemExit(USAGE)
    first, second = map(Path, arguments[1:])
    if arguments[0] == "dump":
        second.write_text(json.dumps(dump(first), indent=0, ensure_ascii=False, sort_keys=True), encoding="utf-8")
        return 0
    return int(bool(compare(read(first), read(second))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
