"""The page of `tilewise magnitudes`, from its record: errors as shares of their budgets, by scaling."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...problem import Problem
from .. import units
from ..candidates.names import OURS
from ..measure.words import listed
from ..studies.magnitudes import WHAT, is_number
from . import charts
from .html import Head, Markup, Section, bad, code, compact_table, document, fold, note, section, subheading, torch_of
from .views import kind_of

_TITLES = {
    "values": "v times a power of ten",
    "balance": "q times, k divided by a power of ten",
    "scores": "q and k times the root of a power of ten",
    "gradients": "dout times a power of ten",
}


def magnitudes_page(told: dict[str, Any]) -> str:
    return document(_head(told), [_scaling(name, series) for name, series in told["series"].items()], told)


class _Error(NamedTuple):
    """The error of one thing at one magnitude, and its share of the budget; None where it is not judged."""

    magnitude: float
    error: float
    share: float | None

    @property
    def over(self) -> bool:
        return self.share is not None and self.share > 1.0

    @property
    def at(self) -> str:
        return f"1e{round(math.log10(self.magnitude))}"


def _errors(points: list[dict[str, Any]], what: str) -> list[_Error]:
    """The errors of the points that have one."""
    return [
        _Error(point["magnitude"], point[what], share if is_number(share := point.get(f"{what}_share")) else None)
        for point in points
        if is_number(point[what])
    ]


def _worst(errors: list[_Error]) -> _Error:
    return max(errors, key=lambda one: (one.share or 0.0, one.error))


def _head(told: dict[str, Any]) -> Head:
    found = [
        (name, scaling, what, errors)
        for scaling, by_name in told["series"].items()
        for name, points in by_name.items()
        for what in WHAT
        if (errors := _errors(points, what))
    ]
    over = [
        (name, f"{name}: {what} of {scaling} {worst.at}: error {units.error(worst.error)}, {worst.share:.1f} times its")
        for name, scaling, what, errors in found
        if (worst := _worst(errors)).over
    ]
    ours, others = ([f"{line} budget" for name, line in over if (name == OURS) is mine] for mine in (True, False))
    judged = any(one.share is not None for *_, errors in found for one in errors)
    claim: object = "Every error is within its budget"
    if not judged:
        claim = "Errors without a budget to judge them by"
    elif ours:
        claim = Markup(f'<span class="bad">tilewise is over {units.counted(len(ours), "budget")}</span>')
    elif others:
        claim = f"tilewise is within its budgets, {listed(dict.fromkeys(name for name, _ in over))} not"
    facts = [told["device"], torch_of(told.get("provenance") or {}), f"{sum(len(one[3]) for one in found)} errors"]
    return Head(
        about=Markup(f"tilewise magnitudes · {code(Problem.from_dict(told['problem']))}"),
        claim=claim,
        facts=[fact for fact in facts if fact],
        lead="Errors against float64 as the inputs grow or shrink, each held to a budget from a plain computation.",
        warnings=[*others, *([] if told.get("complete", True) else ["Interrupted: only what was measured is here."])],
        failures=ours,
    )


def _scaling(name: str, series: dict[str, list[dict[str, Any]]]) -> Section:
    parts: list[object] = [note(f"Inputs that are standard normal at 1, with {_TITLES.get(name, name)}.")]
    for what in WHAT:
        known = {who: errors for who, points in series.items() if (errors := _errors(points, what))}
        parts.append(subheading(what))
        if not known:
            parts.append(note("No point has an error to tell."))
            continue
        items = [_bar(who, errors, len(series[who])) for who, errors in known.items()]
        if any(_worst(errors).share is not None for errors in known.values()):
            parts.append(charts.shares(items, f"{what}: the largest error as a share of its budget"))
        parts.append(fold(f"Every {what} error of {name}", _table(what, series, f"{what} of {name}")))
    return section(name, *parts)


def _bar(who: str, errors: list[_Error], points: int) -> charts.Bar:
    worst = _worst(errors)
    words: object = f"{units.error(worst.error)} at {worst.at}"
    small = "" if len(errors) == points else f"{len(errors)} of {points} points"
    if worst.share is None:
        return charts.Bar(who, math.nan, "-", kind_of(who), aside=words, small=small)
    kind = "lost" if worst.over else kind_of(who)
    aside = bad(f"{words}, over budget") if worst.over else words
    return charts.Bar(who, worst.share, units.percent(worst.share), kind, aside=aside, small=small)


def _table(what: str, series: dict[str, list[dict[str, Any]]], label: str) -> Markup:
    """A line per magnitude, with the error of each candidate and its share of the budget."""
    columns = ["magnitude", *(column for who in series for column in (f">{who}", ">of budget"))]
    found = {who: {one.magnitude: one for one in _errors(points, what)} for who, points in series.items()}
    rows: list[list[object]] = []
    for magnitude in dict.fromkeys(point["magnitude"] for points in series.values() for point in points):
        row: list[object] = [f"1e{round(math.log10(magnitude))}"]
        for errors in found.values():
            one = errors.get(magnitude)
            row.append(units.error(one.error) if one else "-")
            share = "-" if one is None or one.share is None else units.percent(one.share)
            row.append(bad(share) if one and one.over else share)
        rows.append(row)
    return compact_table(columns, rows, label)
