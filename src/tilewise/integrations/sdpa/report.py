"""How calls were handled under `tilewise.sdpa`: counted by case, and shown by `tilewise.sdpa.report()`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import ctypes

Outcome = Literal["taken", "left", "fallback"]
_RECORDS_KEPT = 256


class Entry(NamedTuple):
    """A line of the report: what was asked, how it was handled, why, and for how many calls."""

    problem: str
    outcome: Outcome
    because: str
    calls: int

    def __str__(self) -> str:
        return f"{self.calls:6d}x {self.outcome:8s} {self.problem}: {self.because}"


class Record:
    """A line of the report while it is being counted. Threads that share one may lose a count, never a line."""

    __slots__ = ("because", "calls", "compiled", "outcome", "problem")

    def __init__(self, problem: str, outcome: Outcome, because: str) -> None:
        self.problem, self.outcome, self.because, self.calls = problem, outcome, because, 0
        self.compiled: ctypes.c_int64 | None = None  # calls that never came to Python

    def entry(self) -> Entry:
        compiled = 0 if self.compiled is None else self.compiled.value
        return Entry(self.problem, self.outcome, self.because, self.calls + compiled)

    def clear(self) -> None:
        self.calls = 0
        if self.compiled is not None:
            self.compiled.value = 0


_records: dict[tuple[str, Outcome, str], Record] = {}
_records_lock = threading.RLock()  # reentrant, because a finalizer may call the operator in the middle of anything


def record(problem: str, outcome: Outcome, because: str) -> Record:
    """The line for this case; the oldest line makes room when there are too many."""
    key = (problem, outcome, because)
    with _records_lock:
        found = _records.get(key)
        if found is None:
            found = _records[key] = Record(*key)
            while len(_records) > _RECORDS_KEPT:
                _records.pop(next(iter(_records)), None)
    return found


def lines() -> list[Record]:
    with _records_lock:
        return list(_records.values())
