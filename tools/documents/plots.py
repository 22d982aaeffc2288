"""Pictures of a bench record: TFLOP/s against length, ratios against the best peer, scaling of time and memory.

Each is an SVG that names the record it was drawn from and the way of drawing, so that a stale picture can be told
without drawing it again. It has a ground of its own, light or dark as the reader's screen is.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import InvalidInput
from tilewise.lab.candidates.names import OURS
from tilewise.lab.measure.compare import geomean
from tilewise.lab.render.lengths import exponent, panels
from tilewise.lab.render.style import DARK, LIGHT
from tilewise.lab.studies import bench

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tilewise.lab.measure.compare import Comparison
    from tilewise.lab.render.lengths import Series
    from tilewise.lab.studies.records import Record

FOLDER = Path("docs/plots")
TITLES = {
    "speed": "TFLOP/s against sequence length",
    "ratio": "Speed against PyTorch's best path",
    "sorted": "Speed against PyTorch's best path, from the slowest problem to the fastest",
    "scaling": "Time and memory against sequence length",
}
_ACROSS = 3  # panels of speeds: as wide as a page, so that all of them are seen at once
_DRAWING = 3  # changes with the way of drawing: pictures of another are drawn again
# Ours as on the pages; then, after Okabe and Ito, what all kinds of colour vision tell apart, and grey by its marker.
_COLOURS = (LIGHT["ours"], LIGHT["torch"], "#00805d", "#b0578a", "#9a7400", "#2f8fbf", "#555e69")
_DARK_COLOURS = (DARK["ours"], DARK["torch"], "#3cc79c", "#e39ac3", "#dcb84a", "#7cc8ef", "#a9b2bd")
_GROUNDS = {  # as matplotlib writes them, and in the dark: ground, ink, grid, frame
    "#ffffff": DARK["paper"],
    "#000000": DARK["ink"],
    "#b0b0b0": "#7d8894",
    "#cccccc": DARK["line"],
}
_TICKS = (0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10, 20)
_MAX_BARS = 80  # rows that have a bar each; more become curves
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def by_kind(folder: Path, record: Record) -> dict[str, Path]:
    """The files of a record's pictures. Lengths need a table of them: without one there are only the ratios."""
    comparisons = record.comparisons
    ratios = "ratio" if len(comparisons) <= _MAX_BARS else "sorted"
    kinds = ("speed", ratios, "scaling") if panels(comparisons) else (ratios,)
    return {kind: folder / f"{record.suite}-{kind}.svg" for kind in kinds}


def paths(folder: Path, record: Record) -> list[Path]:
    return list(by_kind(folder, record).values())


def is_of(path: Path, record: Record) -> bool:
    """The picture exists and was drawn from this record."""
    return path.is_file() and _mark(record) in path.read_text(encoding="utf-8")


def _mark(record: Record) -> str:
    return f"{record.name} sha256:{record.digest} drawing {_DRAWING}"


def draw(record: Record, folder: Path) -> list[Path]:
    """Write the pictures of a record. InvalidInput, which says what to install, without matplotlib."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    makers = {"speed": _speed, "ratio": _ratios, "sorted": _sorted, "scaling": _scaling}
    files = by_kind(folder, record)
    for kind, path in files.items():
        figure = makers[kind](pyplot, record.comparisons)
        figure.suptitle(f"{TITLES[kind]}: {record.suite}, {record.device}", fontsize=11)
        save(figure, path, _mark(record))
        pyplot.close(figure)
    return list(files.values())


def save(figure: Any, path: Path, description: str = "") -> None:
    """Write a figure as an SVG that follows the reader's light or dark scheme. Colours other than ours stay."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": description or None})
    path.write_text(themed(drawn.getvalue()), encoding="utf-8")


def themed(svg: str) -> str:
    """An SVG of matplotlib's with its colours in the dark beside those in the light."""
    pairs = _GROUNDS | dict(zip(_COLOURS, _DARK_COLOURS, strict=True))
    rules = [
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in pairs.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    rules.append(f"text{{fill:{DARK['ink']}}}")
    sheet = f'<style type="text/css">@media (prefers-color-scheme:dark){{{"".join(rules)}}}</style>'
    return svg.replace("<defs>", f"<defs>\n  {sheet}", 1)


def _speed(pyplot: Any, comparisons: list[Comparison]) -> Any:
    found = panels(comparisons)
    rows = math.ceil(len(found) / _ACROSS)
    figure, axes = _grid(pyplot, len(found), _ACROSS, (12.0, 2.8 * rows))
    for axis, (title, series) in zip(axes, found.items(), strict=False):
        looks = style_of(series)
        for name, points in series.items():
            axis.plot([p.length for p in points], [p.tflops for p in points], label=name, **looks[name])
        _length_axis(axis, title, series)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("TFLOP/s")
    axes[0].legend(fontsize=8)
    return figure


def _scaling(pyplot: Any, comparisons: list[Comparison]) -> Any:
    """Of the longest series: seconds and MiB of one sequence, log-log, with the fitted exponents in the legend."""
    found = panels(comparisons)
    title, series = max(found.items(), key=lambda item: max(map(len, item[1].values())))
    figure, axes = _grid(pyplot, 2, columns=2)
    for axis, field, unit in ((axes[0], "seconds", "seconds per sequence"), (axes[1], "mebibytes", "MiB per sequence")):
        looks = style_of(series)
        for name, points in series.items():
            drawn = [(p.length, getattr(p, field)) for p in points if getattr(p, field) > 0]
            if drawn:
                lengths, values = zip(*drawn, strict=True)
                grows = exponent(lengths, values)
                axis.plot(lengths, values, label=f"{name}: length^{grows:.2f}", **looks[name])
        _length_axis(axis, title, series)
        axis.set_yscale("log")
        axis.set_ylabel(unit)
        axis.legend(fontsize=8)
    return figure


def _ratios(pyplot: Any, comparisons: list[Comparison]) -> Any:
    """A bar per row that starts at 1: to the right what is faster than PyTorch's best, to the left what is slower."""
    bars = [(c.row.name, speed) for c in comparisons if not c.outcomes[0].failed
            and (speed := c.speed(c.outcomes[0])) is not None]  # fmt: skip
    figure, axes = _grid(pyplot, 1, columns=1, size=(9.0, 1.2 + 0.19 * max(1, len(bars))))
    axis, places, speeds = axes[0], range(len(bars)), [speed for _, speed in bars]
    colours = [_COLOURS[0] if speed >= 1 else _COLOURS[1] for speed in speeds]
    axis.set_xscale("log")
    axis.barh(places, [speed - 1.0 for speed in speeds], left=1.0, color=colours, height=0.75)
    axis.axvline(1.0, color="black", linewidth=0.8)
    for place, speed in zip(places, speeds, strict=True):
        side = {"ha": "left"} if speed >= 1 else {"ha": "right"}
        axis.text(speed, place, f" {speed:.2f} ", va="center", fontsize=7, **side)
    axis.set_yticks(places, [name for name, _ in bars], fontsize=7)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    low, high = min([1.0, *speeds]) / 1.12, max([1.0, *speeds]) * 1.12
    axis.set_xlim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    mean = geomean(speeds)
    axis.set_xlabel(f"times as fast as the best of PyTorch's paths (geomean {mean:.2f})")
    return figure


def _sorted(pyplot: Any, comparisons: list[Comparison]) -> Any:
    """A curve for each thing that is timed: its ratios in ascending order, over the share of rows below.

    Kinds of problems that are scored apart have no curves: they are few.
    """
    figure, axes = _grid(pyplot, 1, columns=1, size=(9.0, 5.0))
    axis, kinds = axes[0], bench.by_kind([c for c in comparisons if not c.row.kind])
    for (kind, alike), style in zip(kinds.items(), itertools.cycle(styles()), strict=False):
        values = [speed for c in alike if not c.outcomes[0].failed and (speed := c.speed(c.outcomes[0])) is not None]
        if values:
            shares = [(place + 0.5) / len(values) for place in range(len(values))]
            axis.plot(shares, sorted(values), label=f"{kind}: geomean {geomean(values):.2f}", **style)
    for limit in (1.0, bench.BEHIND, bench.FAR_BEHIND):
        axis.axhline(limit, color="black", linewidth=0.8 if limit == 1.0 else 0.4, linestyle="-" if limit == 1 else ":")
    axis.set_yscale("log")
    axis.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
    axis.set_yticks([], minor=True)
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the problems")
    axis.set_ylabel("times as fast as the best of PyTorch's paths")
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.legend(fontsize=8)
    return figure


def _grid(pyplot: Any, count: int, columns: int = 2, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    rows = max(1, math.ceil(count / columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size or (9.0, 3.2 * rows), squeeze=False, layout="constrained"
    )
    flat = [axis for line in axes for axis in line]
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat


def _length_axis(axis: Any, title: str, series: Series) -> None:
    lengths = sorted({point.length for points in series.values() for point in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [_short(length) for length in lengths])
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.3, linewidth=0.5)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def style_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each candidate: ours is always the first, whatever the order."""
    first, *rest = styles()
    others = itertools.cycle(rest)
    return {name: first if name == OURS else next(others) for name in names}


def styles() -> list[dict[str, Any]]:
    return [
        {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        for colour, marker in zip(_COLOURS, _MARKERS, strict=True)
    ]


def load_pyplot() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise InvalidInput("plots", "no matplotlib", "the package that draws them", "pip install matplotlib") from None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "tilewise", "svg.fonttype": "none", "font.size": 9}
    return importlib.import_module("matplotlib.pyplot")
