"""A bounded, thread-safe LRU cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Cache of at most `max_size` values by key, which evicts values not used recently.

    Thread-safe: two generations, of which the older is dropped whole and the newer is read without a lock.
    """

    def __init__(self, max_size: int) -> None:
        self._half = max_size // 2
        self._newer: dict[Hashable, Value] = {}
        self._older: dict[Hashable, Value] = {}
        self._lock = threading.RLock()  # a finaliser may come in between

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None.

        Raises:
            TypeError: the key is not hashable.
        """
        value = self._newer.get(key)
        if value is None:
            value = self._older.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value."""
        with self._lock:
            if key not in self._newer and len(self._newer) >= self._half:
                self._older, self._newer = self._newer, {}
            self._newer[key] = value
            self._older.pop(key, None)
