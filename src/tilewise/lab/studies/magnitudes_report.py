"""The report of `tilewise magnitudes`, from its record: errors as shares of their budgets, by scaling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ...problem import Problem
from .. import report, units
from ..candidates.names import OURS
from ..measure.words import listed
from ..report import Bad, Bars, Code, Fold, Heading, Line, Report, Section, Table, Words
from .magnitudes import WHAT, is_number

if TYPE_CHECKING:
    from ..report import Block, Inline

_TITLES = {
    "values": "v times a power of ten",
    "balance": "q times, k divided by a power of ten",
    "scores": "q and k times the root of a power of ten",
    "gradients": "dout times a power of ten",
}
Points = list[dict[str, Any]]


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


def report_of(told: dict[str, Any]) -> Report:
    """Whose errors are over their budget, and where that is worst."""
    found = [
        (name, f"{what} of {scaling}", errors)
        for scaling, by_name in told["series"].items()
        for name, points in by_name.items()
        for what in WHAT
        if (errors := _errors(points, what))
    ]
    over = over_budget(told)
    ours, others = ([line for name, line in over if (name == OURS) is mine] for mine in (True, False))
    claim: str = "Every error is within its budget"
    if not any(one.share is not None for *_, errors in found for one in errors):
        claim = "Errors without a budget to judge them by"
    elif ours:
        claim = Bad(f"tilewise is over {units.counted(len(ours), 'budget')}")
    elif others:
        claim = f"tilewise is within its budgets, {listed(dict.fromkeys(name for name, _ in over))} not"
    provenance = told.get("provenance") or {}
    facts = [told["device"], *report.machine_of(provenance, "")[1:], f"{sum(len(one[2]) for one in found)} errors"]
    interrupted = [] if told.get("complete", True) else ["Interrupted: only what was measured is here."]
    return Report(
        "magnitudes",
        Code(Problem.from_dict(told["problem"])),
        claim,
        f"{claim}: {'; '.join(ours)}" if ours else claim,
        facts,
        "Errors against float64 as the inputs grow or shrink, each held to a budget from a plain computation.",
        warnings=[*others, *interrupted],
        failures=ours,
        sections=[_scaling(name, series) for name, series in told["series"].items()],
    )


def over_budget(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Every candidate with a point over its budget, and where that is worst, in words."""
    found = []
    for scaling, by_name in told["series"].items():
        for name, points in by_name.items():
            for what in WHAT:
                errors = _errors(points, what)
                if errors and (worst := _worst(errors)).over:
                    size = f"error {units.error(worst.error)}, {worst.share:.1f} times its budget"
                    found.append((name, f"{name}: {what} of {scaling} {worst.at}: {size}"))
    return found


def _errors(points: Points, what: str) -> list[_Error]:
    """The errors of the points that have one."""
    return [
        _Error(point["magnitude"], point[what], share if is_number(share := point.get(f"{what}_share")) else None)
        for point in points
        if is_number(point[what])
    ]


def _worst(errors: list[_Error]) -> _Error:
    return max(errors, key=lambda one: (one.share or 0.0, one.error))


def _scaling(name: str, series: dict[str, Points]) -> Section:
    blocks: list[Block] = [Words(f"Inputs that are standard normal at 1, with {_TITLES.get(name, name)}.", True)]
    for what in WHAT:
        known = {who: errors for who, points in series.items() if (errors := _errors(points, what))}
        blocks.append(Heading(what))
        if not known:
            blocks.append(Words(f"{what}: no point has an error to tell.", is_note=True))
            continue
        bars = [_bar(who, errors, len(series[who])) for who, errors in known.items()]
        caption, columns = f"{what}: the largest error as a share of its budget", ("of its budget", "error")
        blocks.append(Bars(bars, caption, whole=True, columns=columns))
        table = _table(what, series, f"{what} of {name}")
        blocks.append(Fold(f"Every {what} error of {name}", [table], in_text=False))
    return Section(name, blocks)


def _bar(who: str, errors: list[_Error], points: int) -> Line:
    worst, judged = _worst(errors), [one.over for one in errors if one.share is not None]
    aside = f"{units.error(worst.error)} at {worst.at}"
    if worst.over:
        aside = Bad(f"{aside}, over budget; {sum(judged)} of {len(judged)} points are")
    share = math.nan if worst.share is None else worst.share
    small = f"{len(errors)} of {points} points"
    return Line(who, share, units.percent(worst.share), "lost" if worst.over else "", aside=aside, small=small)


def _table(what: str, series: dict[str, Points], label: str) -> Table:
    """A line per magnitude, with the error of each candidate and its share of the budget."""
    columns = ["magnitude", *(column for who in series for column in (f">{who}", ">of budget"))]
    found = {who: {one.magnitude: one for one in _errors(points, what)} for who, points in series.items()}
    rows: list[list[Inline]] = []
    for magnitude in dict.fromkeys(point["magnitude"] for points in series.values() for point in points):
        row: list[Inline] = [f"1e{round(math.log10(magnitude))}"]
        for errors in found.values():
            one = errors.get(magnitude)
            share = "-" if one is None or one.share is None else units.percent(one.share)
            row += [units.error(one.error) if one else "-", Bad(share) if one and one.over else share]
        rows.append(row)
    return Table(columns, rows, label)
