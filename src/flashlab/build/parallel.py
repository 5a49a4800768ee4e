"""Work spread over the cores that this process may use, in threads: compilers and kernels run outside Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Follow = Callable[[int, int, str], None]
"""Called at every step of something long: how many are done, of how many, and what it is."""


def ignore(*_: object) -> None:
    """A `Follow` that does nothing, among others."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def on_all_cores(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    what: Callable[[Item, Result], str] = lambda *_: "",
    follow: Follow = ignore,
    cancel: threading.Event | None = None,
) -> list[Result]:
    """The function's result for each item, in their order.

    Args:
        what: of an item and its result, for people: what `follow` is called with, in the caller's thread, at its end.
        cancel: set where anything is raised, an interrupt included, so that running calls can stop.

    Raises:
        The first exception of a call; those that have not begun are dropped.
    """
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(cores()) as pool:
        try:
            futures = {pool.submit(function, item): index for index, item in enumerate(items)}
            for done, future in enumerate(as_completed(futures), 1):
                index = futures[future]
                results[index] = future.result()
                follow(done, len(items), what(items[index], results[index]))
        except BaseException:
            if cancel is not None:
                cancel.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [results[index] for index in range(len(items))]
