"""The environment that programs are started with."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """A copy of the process's environment, while other threads set and unset variables.

    `os.environ.copy()` and `{**os.environ}` read the names first, and raise KeyError where one is unset before its
    value is read.
    """
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
