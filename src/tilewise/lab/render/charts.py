"""Charts as HTML and inline SVG: bars, ratios about 1, shares of a ceiling, a roofline, lanes of a timeline.

Bars are lists of real text beside a drawn track, so that a figure has the page's size of type at every width, can be
copied, and is read aloud; positions are shares of the track. Colours are the page's, and nothing is told by colour
alone.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ..report import Dot, Line, Span
from ..units import count, duration, percent, rate
from . import roles
from .html import Markup, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Bar = Line
SPREAD = ("spread", "20th to 80th percentile")
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_PLOT_HEIGHT = 336  # CSS pixels, as `.plot` has it: labels are kept apart in them
_LABEL_HEIGHT = 15
_LEADER = 3.0  # of the width, from a dot to its name
_STRIP = 1000  # units across a lane


class Lane(NamedTuple):
    """What one candidate launched in one direction. `summed`: by kernel, with no place in time."""

    name: str
    kind: str
    spans: Sequence[Span]
    body: Markup
    small: str = ""
    summed: bool = False
    is_open: bool = False


def bars(
    items: Sequence[Bar],
    caption: str,
    *,
    reference: tuple[str, float] | None = None,
    keys: Sequence[tuple[str, str]] = (),
) -> Markup:
    """Horizontal bars from 0, whiskers for the spread, a dashed line at the reference."""
    values = [value for item in items for value in (item.value, item.high) if value is not None and is_number(value)]
    scale_end = max([*values, *([reference[1]] if reference else [])], default=0.0) or 1.0
    lines = []
    for item in items:
        drawn = []
        if is_number(item.value):
            drawn.append(_box("bar", 0.0, item.value / scale_end))
        if item.lost and is_number(item.lost):
            drawn.append(_box("bar lost", (item.value - item.lost) / scale_end, item.value / scale_end))
        if item.low is not None and item.high is not None:
            drawn.append(_box("spread", item.low / scale_end, item.high / scale_end))
        if reference:
            drawn.append(_mark("at", reference[1] / scale_end))
        lines.append(_line(item, drawn))
    shown = [*keys, *([("line", reference[0])] if reference else [])]
    return _figure(f'<ul class="bars">{"".join(lines)}</ul>', caption, shown)


def shares(items: Sequence[Bar], caption: str, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """How much of a whole each has: the whole is the same width for all. More than the whole is drawn as the whole."""
    lines = [
        _line(item, ['<i class="room"></i>', _box("bar", 0.0, min(1.0, max(0.0, item.value)))])
        for item in items
        if is_number(item.value)
    ]
    return _figure(f'<ul class="bars">{"".join(lines)}</ul>', caption, keys)


def scale_of(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis about 1 that holds the values, at ticks."""
    known = [value for value in values if is_number(value) and value > 0]
    low = max((tick for tick in TICKS if tick <= 0.98 * min([1.0, *known])), default=TICKS[0])
    high = min((tick for tick in TICKS if tick >= 1.02 * max([1.0, *known])), default=TICKS[-1])
    return low, high


def ratios(items: Sequence[Bar], ends: tuple[float, float], label: str = "") -> Markup:
    """Bars that start at 1: to the right what is faster, to the left what is slower, as far for 2 as for 1/2."""
    low, high = ends

    def at(value: float) -> float:
        inside = min(high, max(low, value))
        return math.log(inside / low) / math.log(high / low)

    ticks = _ticks(low, high, at)
    grid = "".join(_mark("one" if tick == 1 else "grid", at(tick)) for tick in ticks)
    axis = "".join(_tick(tick, at(tick)) for tick in ticks)
    lines = [
        f'<li class="ticks" aria-hidden="true"><span class="name"></span><span class="track">{axis}</span>'
        '<span class="value"></span></li>'
    ]
    for item in items:
        drawn = [grid]
        if is_number(item.value) and item.value > 0:
            first, last = sorted((at(1.0), at(item.value)))
            drawn.append(_box("bar" if item.value >= 1 else "bar left", first, last))
        if item.low is not None and item.high is not None:
            drawn.append(_box("spread", at(item.low), at(item.high)))
        lines.append(_line(item, drawn, narrow=True))
    named = f' aria-label="{escape(label)}"' if label else ""
    return Markup(f'<ul class="bars narrow"{named}>{"".join(lines)}</ul>')


def _tick(value: float, at: float) -> str:
    """A number of the axis under its line; at the ends beside it, so that it does not leave the page."""
    side = " first" if at < 0.04 else " last" if at > 0.96 else ""
    return f'<span class="tick{side}" style="left:{at:.2%}">{value:g}</span>'


def _ticks(low: float, high: float, place: Callable[[float], float]) -> list[float]:
    """Those that stand far enough apart to be read on a phone; 1 and the ends before others."""
    inside = [tick for tick in TICKS if low <= tick <= high]
    kept: list[float] = []
    for tick in sorted(
        inside, key=lambda tick: (tick != 1, tick not in (low, high), tick not in (0.5, 2.0, 5.0, 10.0))
    ):
        if all(abs(place(tick) - place(other)) >= 0.09 for other in kept):
            kept.append(tick)
    return sorted(kept)


def roofline(
    dots: Sequence[Dot], flops: float, bytes_: float, caption: str, others: Sequence[tuple[str, float]] = ()
) -> Markup:
    """Log-log: the slope of memory, the flat of arithmetic, further flats in `others`, and the dots below them."""
    ridge = flops / bytes_
    known = [dot for dot in dots if dot.rate > 0 and dot.intensity > 0]
    xs = [dot.intensity for dot in known] + [ridge]
    ys = [dot.rate for dot in known] + [flops] + [ceiling for _, ceiling in others]
    x0, x1 = _decades(min(xs) / 4, max(xs) * 4)
    y0, y1 = _decades(min(ys) / 1.5, max(ys) * 1.5)

    def x(value: float) -> float:
        return 100 * (math.log10(value) - x0) / (x1 - x0)

    def y(value: float) -> float:
        return 100 * (y1 - math.log10(value)) / (y1 - y0)

    shapes, words = [], []
    for power in range(x0, x1 + 1):
        at = x(10.0**power)
        shapes.append(f'<line class="grid" x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="100"/>')
        side = " first" if power == x0 else " last" if power == x1 else ""
        words.append(f'<span class="x{side}" style="left:{at:.2f}%">{count(10.0**power)}</span>')
    for power in range(y0, y1 + 1):
        at = y(10.0**power)
        shapes.append(f'<line class="grid" x1="0" x2="100" y1="{at:.2f}" y2="{at:.2f}"/>')
        words.append(f'<span class="y" style="top:{at:.2f}%">{_round_rate(10.0**power)}</span>')
    start = max(10.0**x0, 10.0**y0 / bytes_)
    roof = [(start, start * bytes_), (ridge, flops), (10.0**x1, flops)]
    points = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in roof)
    shapes.append(f'<polyline class="roof" points="{points}"/>')
    shapes += [f'<line class="flat" x1="0" x2="100" y1="{y(c):.2f}" y2="{y(c):.2f}"/>' for _, c in others]
    words.append('<span class="axis">FLOP per byte</span>')
    leaders, labels = _labels(known, x, y)
    lines = "".join(shapes + leaders)
    drawn = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{lines}</svg>'
    drawn += "".join(words + labels)
    told = "; ".join(f"{dot.name}: {rate(dot.rate)} at {dot.intensity:.0f} FLOP per byte" for dot in known)
    keys = [f"Solid line: {rate(flops)} of arithmetic and {bytes_ / 1e12:.3g} TB/s of memory"]
    keys += [f"dashed line: {rate(ceiling)}, {name}" for name, ceiling in others]
    plot = f'<div class="plot" role="img" aria-label="{escape(f"{caption}. {told}")}">{drawn}</div>'
    return Markup(f"<figure><figcaption>{escape(caption)}. {escape('; '.join(keys))}.</figcaption>{plot}</figure>")


def _labels(
    dots: Sequence[Dot], x: Callable[[float], float], y: Callable[[float], float]
) -> tuple[list[str], list[str]]:
    """Lines from the dots to their names, and both. Names are kept apart from the top down, then pushed back up."""
    step = 100 * _LABEL_HEIGHT / _PLOT_HEIGHT
    leaders, labels = [], []
    for left in (False, True):
        side = sorted((dot for dot in dots if (x(dot.intensity) > 50) is left), key=lambda dot: -dot.rate)
        tops = [y(dot.rate) for dot in side]
        for index in range(1, len(tops)):
            tops[index] = max(tops[index], tops[index - 1] + step)
        for index in reversed(range(len(tops))):
            limit = 100 - step / 2 if index == len(tops) - 1 else tops[index + 1] - step
            tops[index] = min(tops[index], limit)
        for dot, top in zip(side, tops, strict=True):
            at, height = x(dot.intensity), y(dot.rate)
            beside = at - _LEADER if left else at + _LEADER
            leaders.append(f'<line class="leader" x1="{at:.2f}" y1="{height:.2f}" x2="{beside:.2f}" y2="{top:.2f}"/>')
            labels.append(
                f'<i class="dot {dot.kind}" style="left:{at:.2f}%;top:{height:.2f}%"></i>'
                f'<span class="label{" left" if left else ""}" style="left:{beside:.2f}%;top:{top:.2f}%">'
                f"{escape(dot.name)} {rate(dot.rate)}</span>"
            )
    return leaders, labels


def lanes(items: Sequence[Lane], caption: str) -> Markup:
    """A lane per candidate, each as wide as its own time, coloured by what its kernels do; gaps are hatched."""
    used = dict.fromkeys(roles.role_of(span.name) for lane in items for span in lane.spans)
    keys = [(role, title) for role, title in roles.TITLES.items() if role in used]
    if any(_gaps(lane) > 0 for lane in items):
        keys.append(("gap", "nothing ran"))
    parts = []
    for lane in items:
        name = f'<span class="name">{escape(lane.name)} <small>{escape(lane.small)}</small></span>'
        strip = f'<span class="strip-cell">{_strip(lane)}</span>'
        aside = f'<span class="aside">{escape(_busy(lane))}</span>'
        opened = " open" if lane.is_open else ""
        parts.append(f'<details class="box"{opened}><summary>{name}{strip}{aside}</summary>{lane.body}</details>')
    return _figure(f'<div class="lanes">{"".join(parts)}</div>', caption, keys)


def _end(lane: Lane) -> float:
    if lane.summed:
        return sum(span.length for span in lane.spans)
    return max((span.start + span.length for span in lane.spans), default=0.0)


def _gaps(lane: Lane) -> float:
    """Microseconds in which nothing ran. Kernels may overlap."""
    if lane.summed:
        return 0.0
    until = gaps = 0.0
    for span in sorted(lane.spans, key=lambda span: span.start):
        gaps += max(0.0, span.start - until)
        until = max(until, span.start + span.length)
    return gaps


def _busy(lane: Lane) -> str:
    end, gaps = _end(lane) * 1e-6, _gaps(lane) * 1e-6
    if not end:
        return "no kernel seen"
    return duration(end) if gaps < 0.005 * end else f"{duration(end - gaps)} of {duration(end)}"


def _strip(lane: Lane) -> str:
    end = _end(lane) or 1.0
    shapes, at = [], 0.0
    for span in lane.spans:
        start = at if lane.summed else span.start
        at += span.length
        words = f"{roles.short_name(span.name)}: {duration(span.length * 1e-6)}"
        box = f'x="{_STRIP * start / end:.1f}" width="{max(1.0, _STRIP * span.length / end):.1f}"'
        shapes.append(
            f'<rect class="part {roles.role_of(span.name)}" {box} height="20"><title>{escape(words)}</title></rect>'
        )
    share = f"{percent(1 - _gaps(lane) / end)} busy" if lane.spans else "no kernel seen"
    label = escape(f"{lane.name} {lane.small}: {len(lane.spans)} stretches, {share}")
    return (
        f'<svg class="strip" viewBox="0 0 {_STRIP} 20" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(shapes)}</svg>"
    )


def _line(item: Bar, drawn: Sequence[str], *, narrow: bool = False) -> str:
    classes = " ".join([item.kind, *(["chosen"] if item.chosen else [])])
    small = f" <small>{escape(item.small)}</small>" if item.small else ""
    track = f'<span class="track" aria-hidden="true">{"".join(drawn)}</span>'
    value = f'<span class="value">{text(item.text)}</span>'
    aside = "" if narrow else f'<span class="aside">{text(item.aside)}</span>'
    return f'<li class="{classes}"><span class="name">{escape(item.name)}{small}</span>{track}{value}{aside}</li>'


def _box(kind: str, first: float, last: float) -> str:
    first, last = max(0.0, first), min(1.0, last)
    return f'<i class="{kind}" style="left:{first:.2%};width:{max(0.0, last - first):.2%}"></i>'


def _mark(kind: str, at: float) -> str:
    return f'<i class="{kind}" style="left:{at:.2%}"></i>'


def legend(keys: Iterable[tuple[str, str]]) -> Markup:
    """What colours and marks mean; nothing where there is nothing to explain."""
    items = "".join(f'<li><i class="key {kind}"></i>{escape(words)}</li>' for kind, words in keys)
    return Markup(f'<ul class="legend">{items}</ul>' if items else "")


def _figure(body: str, caption: str, keys: Iterable[tuple[str, str]]) -> Markup:
    return Markup(f"<figure><figcaption>{escape(caption)}</figcaption>{legend(keys)}{body}</figure>")


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _decades(low: float, high: float) -> tuple[int, int]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)


def _round_rate(flops: float) -> str:
    """A power of ten in short form: `100 TFLOP/s`."""
    for size, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if flops >= size:
            return f"{flops / size:g} {unit}"
    return f"{flops:g} FLOP/s"
