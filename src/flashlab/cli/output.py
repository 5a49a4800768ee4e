"""How every command answers: rows as a table or as JSON on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flashlab.core.errors import FlashlabError

if TYPE_CHECKING:
    from flashlab.build.parallel import Follow

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nothing says how wide it may be."""
LAST_WIDTH = 30
"""The last column of a table, which may be a sentence, is folded down to this; the others are not."""

Columns = Sequence[str] | Mapping[str, str | Callable[[Any], object]]
"""Names of fields, which are the headings too; or by heading a field, `a.b` for one inside another, or what makes the
cell from the row."""


_as_json = ContextVar("as_json", default=False)


def as_json() -> bool:
    """Whether the command was asked for JSON."""
    return _as_json.get()


def with_json(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the option `--json`: what it answers is then JSON."""

    @wraps(command)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        token = _as_json.set(as_json)
        try:
            command(*arguments, **options)
        finally:
            _as_json.reset(token)

    own = signature(command, eval_str=True)
    option = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), option])
    return run


def answer(rows: Sequence[Any], columns: Any = (), *, title: str | None = None, document: Any = None) -> None:
    """Write rows to stdout: all their fields as JSON where that is asked for, or some of them as a table.

    Args:
        rows: mappings, dataclasses or pydantic models.
        columns: of the table, `Columns`.
        title: above the table.
        document: what JSON holds in place of the rows, where they are only a part of it.
    """
    if as_json():
        document = rows if document is None else document
        sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")
        return
    from rich.table import Table

    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    cells = [[_text(_value(row, column)) for column in columns.values()] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    *widths, last = (max(map(len, column)) + 2 for column in zip(columns, *cells, strict=True))
    if sys.stdout.isatty() and sum(widths) + min(last, LAST_WIDTH) > console.width:
        _blocks(console, [*columns], cells, title)
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(escape, line))
    console.print(table)


def answer_nothing() -> None:
    """Where there was nothing to do, which a message says: JSON without rows, and no table."""
    if as_json():
        answer(())


def _blocks(console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]], title: str | None) -> None:
    """Each row in lines of its own, for a terminal where a table's columns would cut words into pieces."""
    how: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    width = max(1, console.width - 2)
    if title:
        console.print(title, style="italic", **how)
    for name, *row in cells:
        # A space that does not break holds a heading and the first word behind it together.
        pairs = [f"{key}\N{NO-BREAK SPACE}{text}" for key, text in zip(headings[1:], row, strict=True) if text != "–"]
        lines = textwrap.wrap("; ".join(pairs), width, break_long_words=False, break_on_hyphens=False)
        console.print(name, style="bold", **how)
        console.print(textwrap.indent("\n".join(lines), "  ").replace("\N{NO-BREAK SPACE}", " "), **how)


def _plain(value: Any) -> object:
    """What JSON can hold of a row; anything else as text."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def _value(row: Any, column: str | Callable[[Any], object]) -> object:
    if callable(column):
        return column(row)
    for name in column.split("."):
        row = row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
    return row


def _text(value: object) -> str:
    """A cell; mappings as NAME=VALUE, sequences joined by spaces."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={entry}" for name, entry in value.items())
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
    """What went wrong, in one message on stderr."""
    say(f"flashlab: {error}", style="red")


@contextmanager
def following(what: str, *, lines: bool = True) -> Iterator[Follow]:
    """Shows how far something is: a bar at a terminal, else a line a step, or none without `lines`.

    `what` stands there before the first step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)

        def step(done: int, of: int, text: str) -> None:
            progress.update(task, completed=done, total=of, description=text)
            if lines and progress.disable:
                say(f"[{done}/{of}] {text}")

        yield step


@contextmanager
def live(every_s: float = 30.0) -> Iterator[Callable[[str], None]]:
    """Shows how far something is in one line, written over at a terminal; elsewhere a line now and then."""
    if sys.stderr.isatty():
        with Console(stderr=True).status("") as status:
            yield lambda text: status.update(escape(text))
        return
    last = time.monotonic()

    def now_and_then(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            say(text)

    yield now_and_then
