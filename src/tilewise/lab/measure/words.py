"""Comparisons in words: what may be said of a measured ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report import More, Phrase, error
from . import statistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..report import Inline
    from .compare import Outcome
    from .statistics import Speed

_TOO_WIDE = 10.0  # from one end of an interval to the other: its ends say no more than that


def cell(speed: Speed | None) -> str:
    """For a column: the ratio with its interval; `~` where the interval holds 1; `=` for the same kernels."""
    if speed is None:
        return "-"
    if speed.same:
        return "="
    if speed.low is None or speed.high is None:
        return f"{speed.ratio:.2f}x ?"
    mark = "" if speed.differs else "~"
    if not speed.differs and speed.high > _TOO_WIDE * speed.low:
        return f"{mark}{speed.ratio:.2f}x [all noise]"
    return f"{mark}{speed.ratio:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"


UNDECIDED = "Time was up before the intervals were narrow: small differences are not decided."
LEGEND = "~: no difference beyond the noise; =: the same kernels; ?: too few rounds to tell"


def claim(speed: Speed) -> str:
    """`1.34x faster than` and its like, to be followed by the other's name."""
    if speed.verdict == statistics.FASTER:
        return f"{speed.ratio:.2f}x faster than"
    if speed.verdict == statistics.SLOWER:
        return f"{1 / speed.ratio:.2f}x slower than"
    if speed.verdict == statistics.SAME:
        return "the same kernels as"
    if speed.verdict == statistics.TOO_FEW:
        return f"{speed.ratio:.2f}x, in too few rounds to tell, as fast as"
    return "indistinguishable from"


def interval(speed: Speed) -> str:
    """` (1.29x to 1.40x)`, in the direction of the claim; empty where there is none."""
    found = bounds(speed)
    return f" ({found.replace(' to ', 'x to ')}x)" if found else ""


def bounds(speed: Speed) -> str:
    """The same as `1.29 to 1.40`."""
    if speed.low is None or speed.high is None or speed.same:
        return ""
    low, high = (speed.low, speed.high) if speed.verdict != statistics.SLOWER else (1 / speed.high, 1 / speed.low)
    return f"{low:.2f} to {high:.2f}"


def phrase(speed: Speed | None) -> Inline:
    """`1.34x faster (1.29 to 1.40)`"""
    if speed is None:
        return ""
    others = {
        statistics.INDISTINGUISHABLE: "no difference seen",
        statistics.TOO_FEW: f"{speed.ratio:.2f}x, too few rounds",
        statistics.SAME: statistics.SAME,
    }
    claimed, found = others.get(speed.verdict) or claim(speed).removesuffix(" than"), bounds(speed)
    return Phrase((claimed, *([" ", More(f"({found})")] if found else [])))


def basis(speed: Speed) -> str:
    """What the interval is."""
    rounds = f"{speed.rounds} rounds"
    return rounds if speed.low is None else f"{statistics.CONFIDENCE:.0%} interval of {speed.rounds} paired rounds"


def error_cell(outcome: Outcome, *names: str) -> str:
    """The largest error of these tensors and whether the candidate is within its budgets; its failure without one."""
    worst = outcome.error(*(names or outcome.errors))
    if worst is None:
        return "-"
    return f"{error(worst)} {'over' if outcome.failed else 'ok'}"


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
