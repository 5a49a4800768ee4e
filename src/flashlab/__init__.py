"""flashlab: a reproducible lab for one question, how an attention kernel gets fast and what each step buys."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlab._version import __version__ as __version__

if TYPE_CHECKING:
    from flashlab.run.attention import attention as attention
    from flashlab.run.attention import emulate as emulate
    from flashlab.run.attention import prepare as prepare

__all__ = ["__version__", "attention", "emulate", "prepare"]


def __getattr__(name: str) -> Any:
    """The public functions, imported when asked for: whoever reads records imports no compiler."""
    if name in ("attention", "emulate", "prepare"):
        return getattr(import_module("flashlab.run.attention"), name)
    raise AttributeError(f"module 'flashlab' has no attribute {name!r}")
