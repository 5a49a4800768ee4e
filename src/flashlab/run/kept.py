"""A bounded store of what is dear to make."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """At most so many values by their keys; when they are too many, those that nobody asked for lately go.

    Threads may share it. A value that was asked for lately is found without a lock.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._lately: dict[Hashable, Value] = {}
        self._before: dict[Hashable, Value] = {}
        self._lock = threading.RLock()  # a finaliser may come in between

    def __len__(self) -> int:
        return len(self._lately) + len(self._before)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None.

        Raises:
            TypeError: it is no key.
        """
        value = self._lately.get(key)
        if value is None:
            value = self._before.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value."""
        with self._lock:
            if key not in self._lately and len(self._lately) >= self._half:
                self._before, self._lately = self._lately, {}
            self._lately[key] = value
            self._before.pop(key, None)
