"""Parallel maps over threads, for compilers and kernels, which run outside Python's lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Follow = Callable[[int, int, str], None]
"""Progress callback: number of steps done, total number, and description."""


def ignore(*_: object) -> None:
    """A callback that does nothing, e.g. as `Follow`."""


def cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0))


def on_all_cores(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    what: Callable[[Item, Result], str] = lambda *_: "",
    follow: Follow = ignore,
    cancel: threading.Event | None = None,
) -> list[Result]:
    """Apply a function to all items in parallel; returns the results in order.

    Args:
        what: describes an item and its result for `follow`, which is called in the caller's thread after each item.
        cancel: set when anything is raised, including an interrupt, so that running calls can stop.

    Raises:
        Exception: the first exception of a call; calls not yet started are dropped.
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
