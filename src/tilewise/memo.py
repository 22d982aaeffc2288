"""Memo: what was worked out before, kept within a number of entries and of bytes, and shared by all threads.

Everything of this process that depends on more than its key (which kernels build here, the user's tuned tables, the
environment) is kept in Memos, or has a function among `on_invalidate`. What changes one of these calls `invalidate`,
and then all of it is worked out anew.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_Made = TypeVar("_Made")
_registering = threading.RLock()  # reentrant: a Memo may be made, or collected, while another is registered
_memos: weakref.WeakSet[Memo[Any]] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []


class Memo(Generic[_Made]):
    """Values by key. When there are too many, or they hold too much, all are forgotten at once.

    Invariants: `get` is one look-up without a lock; a caller that computes a value reads `generation` first, so that
    nothing worked out from what has since been forgotten is put in afterwards.
    """

    def __init__(self, max_entries: int = 4096, max_bytes: int = 16 * 2**20) -> None:
        self.generation = 0

        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self.clear()
        with _registering:
            _memos.add(self)

    def put(self, key: Hashable, value: _Made, generation: int, size: int = 0) -> None:
        """Keep a value of about `size` bytes beyond what every entry has; nothing if it is out of date or too large."""
        size += _ENTRY_BYTES
        if size > self._max_bytes:
            return
        with self._lock:
            if generation != self.generation:
                return
            if len(self._known) >= self._max_entries or self._held + size > self._max_bytes:
                self._empty()
            self._known[key] = value
            self._held += size

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            self._empty()

    def __len__(self) -> int:
        return len(self._known)

    def values(self) -> list[_Made]:
        """What is kept, in the order in which it was put in."""
        with self._lock:
            return list(self._known.values())

    def _empty(self) -> None:
        # A new dictionary: a thread in the middle of a look-up keeps the old one.
        self._known: dict[Hashable, _Made] = {}
        self.get: Callable[[Hashable], _Made | None] = self._known.get
        self._held = 0


def invalidate() -> None:
    """Forget everything: calls, plans, decisions. What is being worked out from the old state is not kept either."""
    with _registering:
        memos, functions = list(_memos), list(_functions)
    for memo in memos:
        memo.clear()
    for forget in functions:
        forget()


def on_invalidate(forget: Callable[[], None]) -> Callable[[], None]:
    """Have a function called by `invalidate`, for what is kept elsewhere than in a Memo."""
    with _registering:
        _functions.append(forget)
    return forget


_ENTRY_BYTES = 2048  # of a key, a problem and a plan without a mask of any length
