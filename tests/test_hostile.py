"""Records are untrusted: whatever their strings say, nothing of it runs on a page, is linked or breaks a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
from shared import live_things, without_variants
from synthetic import COMMIT, HOSTILE, RUN, measurement, profile, write_synthetic

from flashlab.core.problem import FIRST_SHAPE, Problem, suite
from flashlab.kernels.registry import STAGES
from flashlab.record import checks, schema, store
from flashlab.show import site, tables

SLUG = "nvidia-h200"
FIRST = Problem.parse(FIRST_SHAPE)
FAILED = schema.Verdict(passed=False, reason=HOSTILE)
FAILURE = {"status": "wrong", "reason": HOSTILE, "samples": (), "verdict": FAILED}


def _failed(name: str, problem: Problem = FIRST) -> dict[str, Any]:
    return measurement(name, problem).model_copy(update=FAILURE).model_dump(mode="json")


def _base() -> dict[str, Any]:
    row = measurement("00_naive", FIRST).model_dump(mode="json")
    return {name: row[name] for name in schema.Base.model_fields}


def _lines() -> dict[str, list[dict[str, Any]]]:
    """A line or more of every kind of record, with hostile words wherever the schema takes prose."""
    row, failed, base = measurement("00_naive", FIRST).model_dump(mode="json"), _failed("00_naive"), _base()
    timed = {name: failed[name] for name in schema.Timed.model_fields}
    stage = {"stage": "06_cp_async", "parameters": STAGES["06_cp_async"].parameters(64)}
    chip = {"name": "exp2", "group": "unit", "unit": "clk", "value": 1.0, "one_sm": [1.0], "all_sms": [1.0]}
    built = {"how": "made up", "kernel": "unit", "defines": {}, "repeats": 1, "sha256": "0" * 64, "registers": 8}
    tool = {"tool": "memcheck", "version": "1", "stage": "00_naive", "launches": 1, "errors": 1, "elsewhere": 0}
    taken, reading = row["samples"][0], {"name": "00_naive", "timer": "events", "inputs": "normal"}
    profiled = profile("06_cp_async", FIRST).model_dump(mode="json")
    profiled["lines"][0]["text"] = HOSTILE
    counted = {"gpu": "NVIDIA H200", "commit": COMMIT, "dirty": False, "metrics": {"x.sum": 1.0}}
    header = {name: base[name] for name in ("run", "time", "gpu", "source", "software")}
    case = {"shape": "1x1x8x64", "dtype": "float16", "mask": "full", "layout": "contiguous", "ok": {}}
    other = [{"stage": "00_naive", "status": "wrong", "reason": HOSTILE}]
    compared = [checks.Header(**header).line(), {**case, "other": other}]
    return {
        "tuning": [{**timed, "kind": "tuning", **stage}],
        "ablations": [{**timed, "kind": "ablation", "axis": "levers", "level": "as it is", **stage}],
        "parts": [{**base, "kind": "part", "left_out": "qk", **stage, **{n: row[n] for n in ("problem", "cubin")}}
                  | {"samples": taken}],
        "readings": [{**base, "kind": "reading", **reading, "problem": row["problem"], "samples": taken}],
        "chip": [{**base, "kind": "chip", **chip, **built, "opcodes": {}}],
        "calls": [{**base, "kind": "call", "name": "sdpa", "problem": row["problem"], "time_us": [1.0]}],
        "sanitizer": [{**base, **tool, "finished": True, "findings": [HOSTILE]}],
        "profiles": [profiled],
        "counters": [{**counted, "stage": "00_naive", "shape": "1x2x128x64"}],
        "checks": compared,
        "random": compared,
        "flash-attention": compared,
    }  # fmt: skip


def _spoiled(line: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The line once for each string in it, keys included, with hostile words in its place."""
    if isinstance(line, str):
        yield HOSTILE
    for key, value in line.items() if isinstance(line, dict) else enumerate(line) if isinstance(line, list) else ():
        for other in _spoiled(value, (*path, key)):
            yield {**line, key: other} if isinstance(line, dict) else [*line[:key], other, *line[key + 1 :]]
        if isinstance(line, dict):
            yield {**{k: v for k, v in line.items() if k != key}, HOSTILE: value}


def _write(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every string of every kind of record, in turn, and every name of a file or folder, means harm."""
    data = tmp_path_factory.mktemp("hostile") / "data"
    runs = write_synthetic(data, problems=suite("first"))
    folder, later = data / SLUG, "20260103T030405Z-0123abc"
    good = {kind: json.loads(runs.read_text(encoding="utf-8").splitlines()[0]) for kind in ("runs",)}
    with runs.open("a", encoding="utf-8") as file:
        for problem in suite("first"):
            file.write(json.dumps(_failed("12_persistent", problem)) + "\n")
    of_kinds = _lines()
    for kind, lines in of_kinds.items():
        _write(folder / kind / f"{RUN}.jsonl", lines)
        if kind not in ("checks", "random", "flash-attention"):
            _write(
                folder / kind / f"{later}.jsonl", [one for line in lines for one in _spoiled({**line, "run": later})]
            )
    _write(folder / "runs" / f"{later}.jsonl", list(_spoiled({**good["runs"], "run": later})))
    for name in ("tuned.json", "verdicts.json", "machine.json"):
        (folder / name).write_text(json.dumps({HOSTILE: HOSTILE}), encoding="utf-8")
    (folder / "runs" / "[x](javascript:window.hacked=1).jsonl").write_text("", encoding="utf-8")
    (folder / "page.html").write_text(HOSTILE, encoding="utf-8")
    (folder / "figures").mkdir()
    (folder / "figures" / "ladder.svg").write_text("<svg><script>window.hacked=1</script></svg>", encoding="utf-8")
    (folder / "runs" / "20260104T030405Z-0123abc.jsonl").symlink_to("/etc/hostname")
    (data / '"><img src=x onerror=window.hacked=1>' / "runs").mkdir(parents=True)
    (folder / "CHECKSUMS").unlink()
    store.write_checksums(SLUG, data)
    return data


def test_what_is_hostile_is_refused_or_prose(data: Path) -> None:
    """By the schema: a hostile word stays in fields of prose alone."""
    for kind in store.FOLDERS:
        for record in store.records(SLUG, kind, data):
            for field, value in record.model_dump(mode="json").items():
                if field not in ("reason", "verdict", "findings", "lines", "trained"):
                    assert "hacked" not in json.dumps(value), f"{kind.__name__}.{field}"
    assert len(store.verify(SLUG, data)) > 100


@pytest.fixture(scope="module")
def built(data: Path) -> Path:
    """A site of hostile records alone; test_pages.py looks at one with a few among others."""
    out = data.parent
    with pytest.MonkeyPatch.context() as patched:
        without_variants(patched)
        site.write_pages(out, data=data)
    site.build_site(out)
    return out / "site"


@pytest.mark.exhaustive
def test_no_page_holds_anything_alive(built: Path) -> None:
    said = 0
    for path in sorted(built.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        assert not live_things(text), path
        said += "hacked" in text
    assert said >= 3, "the words themselves are shown"
    assert not list(built.rglob("page.html"))
    assert not list(built.rglob("20260104*"))


@pytest.mark.exhaustive
def test_hostile_words_break_no_table(built: Path) -> None:
    text = (built / "generated" / "results" / SLUG / "index.html").read_text(encoding="utf-8")
    for row in text.split("<tr>")[1:]:
        if "hacked" in row:
            assert "{{ x }}" in row.replace("&#123;", "{").replace("&#125;", "}")
            assert "| table |" in row.replace("&#124;", "|")


@pytest.mark.exhaustive
def test_nothing_of_it_runs(built: Path, browser: Any) -> None:
    page = browser.new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for path in sorted(built.rglob("*.html")):
        if "hacked" in path.read_text(encoding="utf-8"):
            page.goto(path.as_uri(), wait_until="load")
            assert page.evaluate("typeof window.hacked") == "undefined", path
    assert not dialogs
    page.close()


@pytest.mark.parametrize("text", [HOSTILE, "a `code <b>` b", "one ` tick", "*a* _b_ [c](d) <e>", "![x](y)"])
def test_prose_is_inert_and_says_the_same(text: str) -> None:
    from html import unescape
    from html.parser import HTMLParser

    from markdown import markdown

    found: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag in ("p", "code"), tag

        def handle_data(self, data: str) -> None:
            found.append(data)

    Parser().feed(markdown(tables.prose(text), extensions=["attr_list", "md_in_html", "tables"]))
    assert "".join(found) == " ".join(unescape(text).split()).replace("`", "`" if text.count("`") % 2 else "")
    assert synthetic.HOSTILE == HOSTILE
