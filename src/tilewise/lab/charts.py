"""Charts as inline SVG: bars, a roofline, a timeline. Colours are the page's, so they follow light, dark and print.

Every chart is a figure with a caption, and says in words what it shows: nothing is told by colour alone.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .html import Markup
from .report import significant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WIDTH = 720
_COLOURS = 5


class Bar(NamedTuple):
    """A name, a value, the text beside it, and which of two kinds it is of."""

    name: str
    value: float
    text: str
    kind: int = 0


class Dot(NamedTuple):
    """A measured point of a roofline: operations a byte, and operations a second."""

    name: str
    intensity: float
    rate: float
    kind: int = 0


class Span(NamedTuple):
    """A stretch of a lane, in microseconds."""

    lane: str
    name: str
    start: float
    length: float


def bars(items: Sequence[Bar], caption: str, unit: str = "") -> Markup:
    """Horizontal bars from 0, longest value as wide as the figure."""
    most = max((item.value for item in items if math.isfinite(item.value)), default=0.0) or 1.0
    label = min(260, 8 + 7 * max((len(item.name) for item in items), default=0))
    room = _WIDTH - label - 130
    parts = []
    for index, item in enumerate(items):
        y = 26 * index + 4
        wide = max(1.0, room * item.value / most) if math.isfinite(item.value) else 0.0
        parts.append(
            f'<g class="k{item.kind % _COLOURS}"><text x="{label - 8}" y="{y + 14}" text-anchor="end">'
            f"{escape(_short(item.name, 34))}<title>{escape(item.name)}</title></text>"
            f'<rect class="fill" x="{label}" y="{y}" width="{wide:.1f}" height="18" rx="2"/>'
            f'<text x="{label + wide + 6:.1f}" y="{y + 14}">{escape(item.text)}</text></g>'
        )
    told = "; ".join(f"{item.name}: {item.text}" for item in items)
    return _figure("".join(parts), 26 * len(items) + 8, caption + (f" ({unit})" if unit else ""), told)


def roofline(
    dots: Sequence[Dot], flops: float, bytes_: float, caption: str, others: Sequence[tuple[str, float]] = ()
) -> Markup:
    """Log-log: the slope of memory, the flat of arithmetic, further flats in `others`, and the dots below them."""
    ridge = flops / bytes_
    xs = [dot.intensity for dot in dots] + [ridge]
    ys = [dot.rate for dot in dots if dot.rate > 0] + [flops] + [rate for _, rate in others]
    x0, x1 = _decades(min(xs) / 4, max(xs) * 4)
    y0, y1 = _decades(min(ys) / 2, max(ys) * 2)
    left, top, wide, high = 100, 14, _WIDTH - 120, 280

    def x(value: float) -> float:
        return left + wide * (math.log10(value) - x0) / (x1 - x0)

    def y(value: float) -> float:
        return top + high * (y1 - math.log10(value)) / (y1 - y0)

    parts = _grid(x, y, (x0, x1), (y0, y1), left, top, wide, high)
    start = max(10**x0, 10**y0 / bytes_)
    roof = [(start, start * bytes_), (ridge, flops), (10**x1, flops)]
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    parts.append(f'<g class="k0"><polyline class="stroke" points="{points}"/></g>')
    parts.append(f'<text x="{left + wide}" y="{y(flops) + 15:.1f}" text-anchor="end">{_rate(flops)} peak</text>')
    for name, rate in others:
        path = f"M{left} {y(rate):.1f}H{left + wide}"
        parts.append(f'<g class="k4"><path class="stroke" stroke-dasharray="6 4" d="{path}"/></g>')
        parts.append(f'<text x="{left + 6}" y="{y(rate) - 5:.1f}">{escape(name)}: {_rate(rate)}</text>')
    parts += _dots(dots, x, y, left + 0.6 * wide)
    told = "; ".join(f"{dot.name}: {_rate(dot.rate)} at {dot.intensity:.0f} FLOP a byte" for dot in dots)
    return _figure("".join(parts), top + high + 44, caption, told)


def timeline(spans: Sequence[Span], caption: str) -> Markup:
    """Lanes, one below the other, with what ran in each from its first microsecond on."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max((span.start + span.length for span in spans), default=0.0) or 1.0
    label = min(240, 8 + 7 * max((len(lane) for lane in lanes), default=0))
    room = _WIDTH - label - 16
    names = list(dict.fromkeys(span.name for span in spans))
    parts = []
    for index, lane in enumerate(lanes):
        parts.append(f'<text x="{label - 8}" y="{30 * index + 20}" text-anchor="end">{escape(_short(lane, 32))}</text>')
    for span in spans:
        at, wide = label + room * span.start / end, max(1.0, room * span.length / end)
        y = 30 * lanes.index(span.lane) + 6
        words = f"{span.name}: {significant(span.length)} us"
        inner = f'<text x="{at + 4:.1f}" y="{y + 14}">{escape(_short(span.name, int(wide / 7.5)))}</text>'
        box = f'x="{at:.1f}" y="{y}" width="{wide:.1f}" height="20"'
        parts.append(
            f'<g class="k{names.index(span.name) % _COLOURS}"><rect class="fill" fill-opacity="0.35" {box}>'
            f"<title>{escape(words)}</title></rect>{inner if wide > 60 else ''}</g>"
        )
    bottom = 30 * len(lanes) + 4
    parts.append(f'<line class="axis" x1="{label}" x2="{label + room}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="quiet" x="{label}" y="{bottom + 16}">0</text>')
    parts.append(
        f'<text class="quiet" x="{label + room}" y="{bottom + 16}" text-anchor="end">{significant(end)} us</text>'
    )
    told = "; ".join(f"{span.lane}: {span.name} {significant(span.length)} us" for span in spans[:20])
    return _figure("".join(parts), bottom + 22, caption, told)


def _dots(dots: Sequence[Dot], x: Callable[[float], float], y: Callable[[float], float], turn: float) -> list[str]:
    """Named beside, on the left from `turn` on, and pushed apart where names would lie on each other."""
    parts, taken = [], []  # type: ignore[var-annotated]
    for dot in sorted((dot for dot in dots if dot.rate > 0), key=lambda dot: -dot.rate):
        cx, cy = x(dot.intensity), y(dot.rate)
        line = cy + 4
        while any(abs(line - other) < 13 for other in taken):
            line += 1
        taken.append(line)
        beside = f'x="{cx - 10:.1f}" text-anchor="end"' if cx > turn else f'x="{cx + 10:.1f}"'
        parts.append(
            f'<g class="k{dot.kind % _COLOURS}"><circle class="fill" cx="{cx:.1f}" cy="{cy:.1f}" r="5"/>'
            f'<text {beside} y="{line:.1f}">{escape(dot.name)} {_rate(dot.rate)}</text></g>'
        )
    return parts


def _grid(
    x: Callable[[float], float], y: Callable[[float], float], xs: tuple[int, int], ys: tuple[int, int],
    left: int, top: int, wide: int, high: int,
) -> list[str]:  # fmt: skip
    parts = []
    for power in range(xs[0], xs[1] + 1):
        at = x(10.0**power)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + high}"/>')
        parts.append(
            f'<text class="quiet" x="{at:.1f}" y="{top + high + 16}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for power in range(ys[0], ys[1] + 1):
        at = y(10.0**power)
        parts.append(f'<line class="axis" x1="{left}" x2="{left + wide}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="quiet" x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{_rate(10.0**power)}</text>'
        )
    middle = left + wide / 2
    parts.append(f'<text class="quiet" x="{middle}" y="{top + high + 36}" text-anchor="middle">FLOP a byte</text>')
    return parts


def _figure(body: str, height: float, caption: str, told: str) -> Markup:
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}"'
    return Markup(
        f'<figure><div class="pan" tabindex="0" role="group" aria-label="Chart"><svg {size} role="img" '
        f'aria-label="{escape(f"{caption}. {told}", quote=True)}">{body}</svg></div>'
        f'<figcaption class="note">{escape(caption)}</figcaption></figure>'
    )


def _decades(low: float, high: float) -> tuple[int, int]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)


def _rate(flops: float) -> str:
    for size, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if flops >= size:
            return f"{significant(flops / size)} {unit}"
    return f"{flops:.3g} FLOP/s"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: max(0, length - 1)]}…"
