"""What a trace says, as text; and the time that its sites lose against the best candidate."""

from __future__ import annotations

from typing import Any

from ..plan import BACKENDS, plan
from ..problem import Problem
from ..target import Target
from . import report
from .candidates import OURS, TORCH_DEFAULT
from .compare import Row, Settings, compare, median, steps
from .inspect import candidates
from .pool import Pool
from .rivals import RIVALS

COLUMNS = ("site", "problem", "ran", ">calls", ">forward ms", ">backward ms", ">share", ">lost ms", "best")
_MOST_COMPARED = 8


def lose(told: dict[str, Any], settings: Settings, most: int = _MOST_COMPARED) -> None:
    """Fill in, for the sites that take most time, the fastest right candidate and what is lost by not using it.

    Each problem is measured once, apart from the program. An interrupt leaves the rest unfilled.
    """
    sites = [site for site in told["sites"] if site["problem"] and site["calls"]][:most]
    problems = {report.to_json(site["problem"]): site for site in sites}
    rows = [_row(site) for site in problems.values()]
    with report.Bar(sum(steps(row, settings) for row in rows)) as bar, Pool() as pool:
        for text, row in zip(problems, rows, strict=True):
            comparison = compare(row, pool, settings, bar.tick)
            costs = {o.candidate: median(o.costs) for o in comparison.outcomes if o.costs and not o.failed}
            for site in sites:
                if costs and report.to_json(site["problem"]) == text:
                    _fill(site, costs)
            if not comparison.complete:
                break


def _row(site: dict[str, Any]) -> Row:
    problem, device = Problem.from_dict(site["problem"]), site["device"]
    names, _ = candidates(plan(problem, Target.of(device)), device)
    slow = {name for name in BACKENDS if name in ("tiled", "reference")} | set(RIVALS)
    return Row(site["text"], problem, tuple(name for name in names if name not in slow), device)


def _fill(site: dict[str, Any], costs: dict[str, float]) -> None:
    """The share of its time that the site would save. Differences below 2% are noise, not a loss."""
    best, name = min(costs, key=costs.__getitem__), OURS if site["backend"] == OURS else TORCH_DEFAULT
    used = costs.get(name, costs[best])
    worth_it = used > 1.02 * costs[best]
    site["best"] = best if worth_it else name
    spent = site["forward"] + site["backward"]
    site["lost"] = spent * (1.0 - costs[best] / used) if worth_it else 0.0


def lines(told: dict[str, Any]) -> list[str]:
    """The table, then every math fallback with its reasons, then the sum."""
    sites = told["sites"]
    if not sites:
        return ["no call of scaled_dot_product_attention was seen"]
    found = report.plain_table(COLUMNS, [cells(site, told["seconds"]) for site in sites])
    for site in sites:
        if site["math_fallback"]:
            found.append(
                f"MATH FALLBACK at {site['stack'][0] if site['stack'] else 'an unknown place'}: {site['text']}"
            )
            found += [f"  {reason}" for reason in site["reasons"]] or [
                "  no fused kernel took it, and no rule says why"
            ]
    return [*found, sentence(told)]


def sentence(told: dict[str, Any]) -> str:
    """The trace in one sentence."""
    sites, total = told["sites"], told["seconds"] or 1.0
    calls, spent = sum(s["calls"] for s in sites), sum(s["forward"] + s["backward"] for s in sites)
    math = sum(site["math_fallback"] for site in sites)
    text = f"{calls} calls at {len(sites)} sites, {report.significant(spent * 1e3)} ms, {spent / total:.0%} of the time"
    text += f"; silent fallbacks to math: {math} of the sites" if math else "; none falls back to math"
    lost = sum(site["lost"] for site in sites)
    return text + (f"; {report.significant(lost * 1e3)} ms lost against the best candidates." if lost else ".")


def cells(site: dict[str, Any], total: float) -> list[str]:
    spent = site["forward"] + site["backward"]
    measured = site["note"] == ""
    return [
        _place(site),
        site["text"],
        f"{site['backend'] or 'nothing'}{' (!)' if site['math_fallback'] else ''}",
        str(site["calls"]),
        report.significant(site["forward"] * 1e3) if measured else "-",
        report.significant(site["backward"] * 1e3) if site["backward"] else "-",
        f"{spent / (total or 1.0):.0%}" if measured else "-",
        report.significant(site["lost"] * 1e3) if site["best"] else "-",
        site["best"] or site["note"] or "-",
    ]


def _place(site: dict[str, Any]) -> str:
    return site["stack"][0] if site["stack"] else "an unknown place"
