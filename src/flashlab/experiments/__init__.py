"""What one page or one experiment needs. Nothing in the core imports it: each module registers itself.

A module of this package may define

    PAGES      a mapping from the name of a page of the site to a function `(out, results, data) -> None` that writes
               what the page includes: `out.snippet(name, markdown)`, `out.text(path, text)`; `results` is what
               is on record of the GPU that is shown, false where nothing is; `data` the folder of records

The core finds them without an import that a module would depend on:
`importlib.import_module("flashlab.experiments").pages()`. Commands are modules of their own, in
`experiments/commands/`: the command line starts without importing an experiment.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator


def pages() -> Iterator[Callable[..., None]]:
    """What writes the pages that this package's modules define, in the order of the modules' names."""
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        yield from getattr(module, "PAGES", {}).values()
