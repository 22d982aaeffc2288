"""Maps and sets that threads share: looked up without a lock, written under one, never above their bound."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# Reentrant: what a full map lets go may have a finaliser, and that may come here again.
_writing: Any = threading.RLock()


def keep(known: dict[_Key, _Value], key: _Key, made: _Value, limit: int) -> _Value:
    """What the map has for `key` from now on: `made`, or what another thread put there first.

    Now and then everything is forgotten, so that the map never holds over `limit` values. Readers take no lock: they
    find a value or none.
    """
    with _writing:
        if len(known) >= limit and key not in known:
            known.clear()
        return known.setdefault(key, made)


def is_new(seen: set[_Key], what: _Key) -> bool:
    """Whether `what` was not among them; it is now. Of threads that ask at the same time, one is told so."""
    with _writing:
        before = len(seen)
        seen.add(what)
        return len(seen) > before


def _in_forked_child() -> None:
    """The thread that held the lock does not exist here."""
    global _writing
    _writing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
