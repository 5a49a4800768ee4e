from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from flashlab.cli.output import answer, following, with_json


class Inner(BaseModel):
    value: float
    path: Path


@dataclass(frozen=True)
class Row:
    name: str
    inner: Inner | None


ROWS = [Row("[a]", Inner(value=12345.678, path=Path("x"))), Row("b", None)]


def test_a_table_takes_fields_paths_and_functions(capsys: pytest.CaptureFixture[str]) -> None:
    answer(ROWS, {"name": "name", "value": "inner.value", "long": lambda row: len(row.name) > 1}, title="Rows")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["Rows"],
        ["name", "value", "long"],
        ["[a]", "12346", "yes"],
        ["b", "–", "no"],
    ]


def test_json_holds_all_fields_of_any_row(capsys: pytest.CaptureFixture[str]) -> None:
    with_json(answer)(ROWS, ("name",), as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"name": "[a]", "inner": {"value": 12345.678, "path": "x"}},
        {"name": "b", "inner": None},
    ]
    with_json(answer)(ROWS, ("name",), as_json=True, document={"rows": 2})
    assert json.loads(capsys.readouterr().out) == {"rows": 2}


def test_cells_join_lists_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    answer([{"list": [1, 0.25], "parameters": {"WARPS": 4, "PADDING": 8}}], ("list", "parameters", "absent"))
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "0.25", "WARPS=4", "PADDING=8", "–"]


@pytest.mark.parametrize("columns", [36, 80])
def test_a_terminal_too_narrow_for_the_table_has_a_paragraph_for_each_row(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    rows = [
        {"name": "05_wmma", "size": "16x16x2048x64", "rate": 113.1, "reason": None},
        {"name": "fp8", "size": "16x16x2048x64", "rate": None, "reason": "wanted float16, got bfloat16"},
    ]
    answer(rows, ("name", "size", "rate", "reason"), title="Rows")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    if columns == 80:
        assert lines[1:3] == ["name     size            rate  reason", "05_wmma  16x16x2048x64  113.1  –"]
        return
    assert lines == [
        *("Rows", "05_wmma", "  size 16x16x2048x64; rate 113.1"),
        *("fp8", "  size 16x16x2048x64; reason wanted", "  float16, got bfloat16"),
    ]


def test_a_terminal_of_no_width_ends_no_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    answer(ROWS, ("name", "inner"))
    assert "[a]" in capsys.readouterr().out


@pytest.mark.parametrize(("closed", "encoding"), [(">&-", "utf-8"), ("2>&-", "utf-8"), ("", "ascii")])
def test_streams_that_are_closed_or_lack_letters_end_no_command(closed: str, encoding: str) -> None:
    command = f"exec {sys.executable} -m flashlab explain 1x1x1x64 --arch sm_80 --gpu none {closed}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_steps_are_lines_on_stderr_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with following("measuring") as step:
        step(1, 2, "first")
    with following("compiling", lines=False) as step:
        step(1, 2, "quiet")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "[1/2] first\n")
