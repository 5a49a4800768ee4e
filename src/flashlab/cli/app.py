"""The command line: tables and JSON on stdout, messages and progress on stderr, non-zero exit status on failure.

Each group of commands is a module whose `COMMANDS` maps names to functions; every command also gets `--json`. The
modules of `flashlab.experiments.commands` are discovered, so that a new experiment needs no change here.
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


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"flashlab {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
app = typer.Typer(
    name="flashlab",
    help="Compile, check, time and profile CUDA attention kernels, stage by stage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(version: Version = False) -> None:
    pass


for _group in _groups():
    for _name, _command in _group.COMMANDS.items():
        # One line per paragraph: typer would keep the line breaks of the source.
        _paragraphs = [" ".join(text.split()) for text in (_command.__doc__ or "").split("\n\n")]
        app.command(_name, help="\n\n".join(_paragraphs))(with_json(_command))


def main() -> None:
    """Entry point of the `flashlab` program."""
    # Treat SIGTERM like Ctrl-C: child processes are stopped and existing records sealed.
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
        # The reader (`head`, a pager) closed the pipe; keep the interpreter from reporting it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError as error:
        say(f"flashlab: out of host memory: {error}. A smaller problem works.")
        sys.exit(1)
    except OSError as error:
        say(f"flashlab: {error}")
        sys.exit(1)
