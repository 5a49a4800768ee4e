"""Output of all commands: rows as a table or JSON on stdout, messages and progress on stderr."""

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

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PIPED_WIDTH = 200
"""Width, in characters, of a table written to a file or pipe."""
LAST_WIDTH = 30
"""Minimum width, in characters, to which the last column may be folded; other columns are not folded."""

Columns = Sequence[str] | Mapping[str, str | Callable[[Any], object]]
"""Field names, which serve as headings, or a mapping from heading to a field (`a.b` for a nested one) or to a function
of the row."""


_as_json = ContextVar("as_json", default=False)


def as_json() -> bool:
    """Whether the command was given --json."""
    return _as_json.get()


def with_json(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option `--json` to a command, which makes `answer` print JSON."""

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
    """Print rows to stdout: all fields as JSON with --json, else selected columns as a table.

    Args:
        rows: mappings, dataclasses or pydantic models.
        columns: columns of the table, as `Columns`.
        title: title of the table.
        document: JSON document to print in place of the rows.
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
    """Print an empty JSON list with --json and nothing otherwise, for a command that had nothing to do."""
    if as_json():
        answer(())


def _blocks(console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]], title: str | None) -> None:
    """Print each row as a paragraph, for a terminal too narrow for the table."""
    how: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    width = max(1, console.width - 2)
    if title:
        console.print(title, style="italic", **how)
    for name, *row in cells:
        # A no-break space keeps a heading and the first word of its value on one line.
        pairs = [f"{key}\N{NO-BREAK SPACE}{text}" for key, text in zip(headings[1:], row, strict=True) if text != "–"]
        lines = textwrap.wrap("; ".join(pairs), width, break_long_words=False, break_on_hyphens=False)
        console.print(name, style="bold", **how)
        console.print(textwrap.indent("\n".join(lines), "  ").replace("\N{NO-BREAK SPACE}", " "), **how)


def _plain(value: Any) -> object:
    """Convert a row to JSON types; other values become text."""
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
    """Format a cell: mappings as NAME=VALUE, sequences joined by spaces."""
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
    """Print a message to stderr, styled if it is a terminal."""
    Console(stderr=True).print(
        line, markup=False, highlight=False, soft_wrap=True, style=style if sys.stderr.isatty() else ""
    )


def complain(error: FlashlabError) -> None:
    """Print an error to stderr."""
    say(f"flashlab: {error}", style="red")


@contextmanager
def following(what: str, *, lines: bool = True) -> Iterator[Follow]:
    """Show progress: a bar on a terminal, else one line per step if `lines`.

    `what` is the description before the first step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)

        def step(done: int, of: int, text: str) -> None:
            progress.update(task, completed=done, total=of or None, description=text)
            if lines and progress.disable:
                say(f"[{done}/{of or '?'}] {text}")

        yield step


@contextmanager
def live(every_s: float = 30.0) -> Iterator[Callable[[str], None]]:
    """Show progress in one line: overwritten on a terminal, else printed at most every `every_s` seconds."""
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
