"""Environment of child processes."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """Copy the environment of this process, safely while other threads set and unset variables.

    `os.environ.copy()` and `{**os.environ}` read the names first and raise KeyError if a variable is unset before its
    value is read.
    """
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
