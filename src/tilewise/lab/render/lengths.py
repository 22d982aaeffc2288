"""Series of rows that differ in nothing but their length, and how time and memory grow with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ...masks import Full
from ..measure.compare import summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..measure.compare import Comparison, Outcome


class Point(NamedTuple):
    """One measurement of a candidate in a series of lengths."""

    length: int
    tflops: float
    seconds: float  # of one sequence
    mebibytes: float  # for one sequence; nan where unknown


Series = dict[str, list[Point]]  # candidate -> points, by length


def panels(comparisons: Iterable[Comparison]) -> dict[str, Series]:
    """Series of rows that differ in nothing but length, at a constant number of queries, with three lengths or more."""
    found: dict[tuple[Any, ...], Series] = {}
    titles: dict[tuple[Any, ...], str] = {}
    for comparison in comparisons:
        row = comparison.row
        alike = row.problem.with_(batch=1, seq_q=1, seq_kv=1, mask=Full())
        key = (alike, str(row.problem.mask), row.problem.batch * row.problem.seq_q, row.timed, row.timing)
        titles[key] = _title(comparison)
        for outcome in comparison.outcomes:
            point = _point(comparison, outcome)
            if point is not None:
                found.setdefault(key, {}).setdefault(outcome.candidate, []).append(point)
    kept = {}
    for key, series in found.items():
        long = {name: sorted(points) for name, points in series.items() if len(points) >= 3}
        if long:
            kept[titles[key]] = long
    return kept


def _title(comparison: Comparison) -> str:
    problem, what = comparison.row.problem, " + ".join(comparison.row.timed)
    title = f"head_dim {problem.head_dim}, {problem.mask}"
    title += "" if what == "forward" else f", {what}"
    title += ", graph" if comparison.row.timing == "graph" else ""
    return title + (f", batch {problem.batch}" if problem.seq_q == 1 else "")


def _point(comparison: Comparison, outcome: Outcome) -> Point | None:
    timed = summary(outcome.samples)
    if timed is None or outcome.failed:
        return None
    problem, seconds = comparison.row.problem, timed["median"]
    memory = math.nan if outcome.memory is None else outcome.memory / 2**20 / max(1, problem.batch)
    length = max(problem.seq_q, problem.seq_kv)
    return Point(length, comparison.row.flops / seconds / 1e12, seconds / max(1, problem.batch), memory)


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms: how a quantity grows with length."""
    pairs = [(math.log(x), math.log(y)) for x, y in zip(lengths, values, strict=True) if x > 0 and y > 0]
    if len({x for x, _ in pairs}) < 2:
        return math.nan
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return float(rise / sum((x - mean_x) ** 2 for x, _ in pairs))
