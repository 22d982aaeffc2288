"""What a trace says, as text; and the time that its sites lose against the best candidate."""

from __future__ import annotations

from typing import Any

from ...plan import BACKENDS, plan
from ...problem import Problem
from ...target import Target
from .. import report
from ..candidates.names import OURS, TORCH_DEFAULT
from ..candidates.rivals import RIVALS
from ..measure.compare import Comparison, Outcome, Row, Settings, compare, median, steps
from ..measure.pool import Pool
from ..measure.statistics import SLOWER
from ..studies.inspect import candidates

COLUMNS = ("site", "problem", "ran", ">calls", ">forward ms", ">backward ms", ">share", ">lost ms", "best")
_MAX_COMPARED = 8


def lose(told: dict[str, Any], settings: Settings, max_sites: int = _MAX_COMPARED) -> None:
    """Fill in, for the sites that take most time, the fastest right candidate and what is lost by not using it.

    Each problem is measured once, apart from the program. An interrupt leaves the rest unfilled.
    """
    sites = [site for site in told["sites"] if site["problem"] and site["calls"]][:max_sites]
    problems = {report.to_json(site["problem"]): site for site in sites}
    rows = [_row(site) for site in problems.values()]
    told["noise"] = []
    with report.Bar(sum(steps(row, settings) for row in rows)) as bar, Pool() as pool:
        for text, row in zip(problems, rows, strict=True):
            comparison = compare(row, pool, settings, bar.tick)
            told["noise"] = list(dict.fromkeys([*told["noise"], *comparison.noise]))
            for site in sites:
                if report.to_json(site["problem"]) == text:
                    _fill(site, comparison)
            if not comparison.complete:
                break


def _row(site: dict[str, Any]) -> Row:
    problem, device = Problem.from_dict(site["problem"]), site["device"]
    names, _ = candidates(plan(problem, Target.of(device)), device)
    slow = {name for name in BACKENDS if name in ("tiled", "reference")} | set(RIVALS)
    return Row(site["text"], problem, tuple(name for name in names if name not in slow), device)


def _fill(site: dict[str, Any], comparison: Comparison) -> None:
    """What the site would save with the fastest candidate: nothing, unless that is another kernel, and faster beyond
    the noise.

    Charged is what a warm call of the kernel that ran takes longer, by the comparison, for each of the site's calls;
    never more than that share of the time that was seen, since the first call of a program takes longer than the rest.
    """
    used, best = _used(site, comparison), comparison.best()
    if used is None or best is None:
        return
    speed = comparison.versus(used, best, among=len(comparison.entries()))
    site["best"], site["lost"] = used.candidate, 0.0
    if speed is None or speed.verdict != SLOWER:
        return
    share = 1.0 - speed.ratio
    seen = site["forward"] + site["backward"]
    site["best"], site["speed"] = best.candidate, speed.to_dict()
    site["lost"] = share * min(seen, site["calls"] * median(used.costs))


def _used(site: dict[str, Any], comparison: Comparison) -> Outcome | None:
    """The candidate that stands for what ran at the site: the kernel itself where it was timed, else the way to it."""
    name = site["backend"]
    timed = comparison.timed()
    way = OURS if name == OURS else TORCH_DEFAULT
    ranked = [outcome for outcome in timed if outcome.candidate == name]
    ranked += [outcome for outcome in timed if outcome.runs == name]
    return next(iter(ranked), None) or next((outcome for outcome in timed if outcome.candidate == way), None)


def lines(told: dict[str, Any], *, quiet: bool = False) -> list[str]:
    """The sum, the table, then every math fallback with its reasons."""
    sites = told["sites"]
    if not sites:
        return ["no call of scaled_dot_product_attention was seen"]
    found = [sentence(told), *(f"noisy: {text}" for text in told.get("noise", ()))]
    if quiet:
        return found
    found += report.plain_table(COLUMNS, [cells(site, told["seconds"]) for site in sites])
    found += [f"lengths at {_place(site)}: {site['lengths']}" for site in sites if site.get("lengths")]
    for site in sites:
        if site["math_fallback"]:
            found.append(
                f"MATH FALLBACK at {site['stack'][0] if site['stack'] else 'an unknown place'}: {site['text']}"
            )
            found += [f"  {reason}" for reason in site["reasons"]] or [
                "  no fused kernel took it, and no rule says why"
            ]
    return found


def sentence(told: dict[str, Any]) -> str:
    """The trace in one sentence."""
    sites, total = told["sites"], told["seconds"] or 1.0
    calls, spent = sum(s["calls"] for s in sites), sum(s["forward"] + s["backward"] for s in sites)
    math = sum(site["math_fallback"] for site in sites)
    text = f"{calls} calls at {len(sites)} sites, {report.significant(spent * 1e3)} ms, {spent / total:.0%} of the time"
    text += f" of {told['ranks']} ranks" if told.get("ranks") else ""
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
