"""A bounded, thread-safe cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Cache of at most `most` values by key, which evicts values not used recently.

    Thread-safe; recently used values are read without a lock.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._lately: dict[Hashable, Value] = {}
        self._before: dict[Hashable, Value] = {}
        self._lock = threading.RLock()  # a finaliser may come in between

    def __len__(self) -> int:
        return len(self._lately) + len(self._before)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None.

        Raises:
            TypeError: the key is not hashable.
        """
        value = self._lately.get(key)
        if value is None:
            value = self._before.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value."""
        with self._lock:
            if key not in self._lately and len(self._lately) >= self._half:
                self._before, self._lately = self._lately, {}
            self._lately[key] = value
            self._before.pop(key, None)
