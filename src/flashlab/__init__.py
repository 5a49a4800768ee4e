"""flashlab: a reproducible lab for one question, how an attention kernel gets fast and what each step buys."""

from __future__ import annotations

__version__ = "0.1.0"
