"""Figures with their units, scaled so that three digits say it: 7.14 us, not 0.00714 ms.

duration(7.14e-6) -> "7.14 us"            by itself
Clock.of(values).text(7.14e-6)            in the unit that a column or a chart shares
rate(6.43e14) -> "643 TFLOP/s"            size(115712) -> "113 KiB"          percent(0.153) -> "15%"
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

NOTHING = "-"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_RATES = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1.0, "FLOP/s"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def significant(value: float) -> str:
    """Three significant digits without an exponent where that is readable."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    if digits <= 6:
        rounded = f"{value:.{digits}f}"
        fewer = max(0, 2 - math.floor(math.log10(abs(float(rounded))))) if float(rounded) else digits
        return f"{value:.{fewer}f}"  # 9.996 is 10.0, not 10.00
    return f"{value:.1e}"


class Clock(NamedTuple):
    """A unit of time that several figures share."""

    seconds: float
    unit: str

    @classmethod
    def of(cls, values: Iterable[float]) -> Clock:
        """The unit in which the smallest of the values is at least 1, so that none is cut to zeros."""
        smallest = min((value for value in values if value > 0 and math.isfinite(value)), default=1.0)
        # Why 0.9995: 999.7 us round to 1.00 ms in three digits.
        return next((cls(size, unit) for size, unit in _TIMES if smallest >= 0.9995 * size), cls(*_TIMES[-1]))

    def number(self, seconds: float | None) -> str:
        return NOTHING if seconds is None else significant(seconds / self.seconds)

    def text(self, seconds: float | None) -> str:
        """In this unit, or in its own where that would take more than four digits."""
        if seconds is None:
            return NOTHING
        return f"{self.number(seconds)} {self.unit}" if seconds < 9999.5 * self.seconds else duration(seconds)

    def spread(self, summary: dict[str, float] | None) -> str:
        """The 20th and 80th percentile."""
        return NOTHING if summary is None else f"{self.number(summary['p20'])} to {self.number(summary['p80'])}"


def duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else Clock.of([seconds]).text(seconds)


def rate(flops_per_second: float) -> str:
    return _scaled(flops_per_second, _RATES, "FLOP/s")


def size(count: float | None) -> str:
    return NOTHING if count is None else _scaled(count, _SIZES, "bytes")


def counted(number: int, what: str, plural: str = "") -> str:
    """`1 launch`, `2 launches`."""
    return f"{number} {what if number == 1 else plural or what + 's'}"


def count(value: float) -> str:
    """A power of ten in short form: 100, 1k, 10M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _scaled(value: float, scales: tuple[tuple[float, str], ...], base: str) -> str:
    for size, unit in scales:
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{value:.0f} {base}"


def percent(share: float | None) -> str:
    """Without digits after the point, but never 0% of what is something."""
    if share is None or not math.isfinite(share):
        return NOTHING
    return f"{share:.0%}" if share == 0 or abs(share) >= 0.0095 else f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def times(ratio: float | None) -> str:
    return NOTHING if ratio is None or not math.isfinite(ratio) else f"{significant(ratio)}x"


def error(value: float | None) -> str:
    """`2.9e-4`."""
    return NOTHING if value is None else re.sub(r"e([+-])0", r"e\1", f"{value:.1e}")
