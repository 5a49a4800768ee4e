"""The command line: tables and JSON to stdout, messages and progress to stderr, a non-zero exit on failure.

Each group of commands is a module with `COMMANDS`: functions by the command's name, which all get `--json`. An
experiment's are in a module of `flashlab.experiments.commands`, and found there: adding one touches nothing here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from io import StringIO, TextIOWrapper
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated

import typer

from flashlab import __version__
from flashlab.cli import doctor, kernels, measure, records, report
from flashlab.cli.output import complain, say, with_json
from flashlab.core.errors import FlashlabError

EXPERIMENTS = "flashlab.experiments.commands"


def _groups() -> Iterator[ModuleType]:
    yield from (doctor, kernels, measure, records, report)
    for module in iter_modules(import_module(EXPERIMENTS).__path__):
        yield import_module(f"{EXPERIMENTS}.{module.name}")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashlab {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
app = typer.Typer(
    name="flashlab",
    help="How an attention kernel gets fast on a GPU, and what each step really buys.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(version: Version = False) -> None:
    pass


for _group in _groups():
    for _name, _command in _group.COMMANDS.items():
        # A paragraph a line: typer would keep the line breaks of the source.
        _paragraphs = [" ".join(text.split()) for text in (_command.__doc__ or "").split("\n\n")]
        app.command(_name, help="\n\n".join(_paragraphs))(with_json(_command))


def main() -> None:
    """Entry point of the `flashlab` program."""
    # As Ctrl-C does: what was begun is ended, and records that are there are sealed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.stdout, sys.stderr = sys.stdout or StringIO(), sys.stderr or StringIO()  # None: closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a µ that it cannot write is no reason to end
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="flashlab")
    except FlashlabError as error:
        complain(error)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (`head`, a pager) left early; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError as error:
        say(f"flashlab: wanted more memory than this machine has: {error}. A smaller problem works.")
        sys.exit(1)
    except OSError as error:
        say(f"flashlab: {error}")
        sys.exit(1)
