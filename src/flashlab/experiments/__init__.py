"""What one page or one experiment needs. Nothing in the core imports it: each module registers itself.

A module of this package may define

    PAGES      a mapping from the name of a page of the site to a function `(out, results, data) -> None` that writes
               what the page includes: `out.snippet(name, markdown)`, `out.text(path, text)`; `results` is what
               is on record of the GPU that is shown, false where nothing is; `data` the folder of records
    RECORDS    the pydantic models of its files under data/, for the data dictionary

The core finds them by name, without an import that a module would depend on:
`importlib.import_module("flashlab.experiments").registered("PAGES")`. Commands are modules of their own, in
`experiments/commands/`: the command line starts without importing an experiment.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Literal


def registered(name: Literal["PAGES", "RECORDS"]) -> Iterator[Any]:
    """What the modules of this package define under a name, in the order of the modules' names."""
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, name):
            yield getattr(module, name)
