"""How every command answers: rows as a table or as JSON on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from flashlab.core.errors import CompileError, FlashlabError

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nothing says how wide it may be."""

Row = Mapping[str, Any]
Columns = Mapping[str, Any]
"""By heading: a field or attribute of the row, `a.b` for one inside another, or a function from the row to the cell."""


def answer(
    rows: Sequence[Any],
    columns: Columns | Sequence[str],
    *,
    as_json: bool = False,
    title: str | None = None,
    document: object = None,
) -> None:
    """Write rows to stdout: all their fields as JSON, or some of them as a table.

    Args:
        rows: one mapping a row, or an object with attributes where `document` has what JSON is to hold. What JSON
            cannot hold is written as text.
        columns: of the table, by heading; names of fields stand for themselves.
        title: above the table.
        document: what JSON holds in place of the rows, where they are only a part of it.
    """
    if as_json:
        write_json(rows if document is None else document)
        return
    from rich.table import Table

    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[_text(_value(row, column)) for column in columns.values()] for row in rows]
    for index, heading in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(escape, line))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def write_json(value: object) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _value(row: Row, column: Any) -> object:
    if callable(column):
        return column(row)
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _text(value: object) -> str:
    """A cell; mappings as NAME=VALUE, sequences joined by spaces."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return str(value)


def _is_number(text: str) -> bool:
    return text == "–" or text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def say(line: str, *, style: str = "") -> None:
    """A message for people, on stderr; the style at a terminal alone."""
    Console(stderr=True).print(
        line, markup=False, highlight=False, soft_wrap=True, style=style if sys.stderr.isatty() else ""
    )


def complain(error: FlashlabError) -> None:
    """What went wrong, in one message on stderr; of the compiler, its source line, command and log too."""
    text = str(error)
    if isinstance(error, CompileError):
        text += f"\n{error.source_line or ''}\ncommand: {error.command}\n{error.log}".rstrip()
    say(f"flashlab: {text}", style="red")


@contextmanager
def following(what: str, *, lines: bool = True) -> Iterator[Callable[..., None]]:
    """Shows how far something is: a bar at a terminal, else a line a step, or nothing without `lines`.

    What it gives is called with `done, total, text`, or with one object that has these fields.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)

        def step(*now: Any) -> None:
            done, total, text = now if len(now) == 3 else (now[0].done, now[0].total, now[0].text)
            progress.update(task, completed=done, total=total, description=text)
            if progress.disable and lines:
                say(f"[{done}/{total}] {text}")

        yield step
