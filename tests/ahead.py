"""Work that a module's tests wait for, begun before the first of them: a compiler or notebook takes one core alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from flashlab.run import emulator

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def chosen(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """The parameters that a test of this module will run with, in turn; those that -k leaves out are not among them."""
    return [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and (item.path, item.originalname) == (request.path, test)
    ]


@contextmanager
def ahead(work: Mapping[Key, Callable[[], Result]]) -> Iterator[Mapping[Key, Future[Result]]]:
    """What comes of each, as many at a time as there are cores; what has not begun by the end is left."""
    pool = ThreadPoolExecutor(emulator.cores())
    try:
        yield {key: pool.submit(one) for key, one in work.items()}
    finally:
        pool.shutdown(cancel_futures=True)
