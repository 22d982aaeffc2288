"""What a trace says, and the time that its sites lose against the best candidate."""

from __future__ import annotations

from typing import Any

from ...plan import BACKENDS, plan
from ...problem import Problem
from ...target import Target
from .. import report, units
from ..candidates.names import OURS, TORCH_DEFAULT
from ..candidates.rivals import RIVALS
from ..measure.compare import Comparison, Outcome, Row, Settings, compare, median, steps
from ..measure.pool import Pool
from ..measure.statistics import SLOWER
from ..report import Bad, Bars, Code, Fold, Inline, Line, Lines, Ours, Phrase, Report, Section, Table, Words
from ..studies.inspect import candidates
from .trace import Site

COLUMNS = ("site", "problem", "ran", ">calls", ">forward", ">backward", ">share", ">lost", "best")
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


def report_of(told: dict[str, Any]) -> Report:
    """Of a record: where a program calls attention, what ran there, and what that lost."""
    sites = sorted(map(Site.from_dict, told["sites"]), key=lambda site: -site.seconds)
    total, spent = told["seconds"] or 0.0, sum(site.seconds for site in sites)
    fallen = [site for site in sites if site.is_math_fallback]
    facts = [
        f"{units.duration(spent)} of {units.duration(total)}, {units.percent(spent / total)}" if total else "",
        f"{told['ranks']} ranks" if told.get("ranks") else "",
        f"{units.counted(sum(site.calls for site in sites), 'call')} at {units.counted(len(sites), 'site')}",
        *report.machine_of(told.get("provenance") or {}, sites[0].device if sites else "cpu"),
        Bad(units.counted(len(fallen), "silent math fallback")) if fallen else "no silent math fallback",
    ]
    warnings = [] if told.get("complete", True) else ["Interrupted: only what was seen is here."]
    return Report(
        "trace",
        Code(told.get("program", "a program")),
        _claim(sites, total),
        _sentence(sites, total, told.get("ranks", 0)),
        [fact for fact in facts if fact],
        warnings=[*warnings, *(f"Noisy: {line}" for line in told.get("noise", ()))],
        sections=[*_call_sites(sites, total), *_fallbacks(fallen), *_stacks(sites)],
    )


def _claim(sites: list[Site], total: float) -> Inline:
    lost, spent = sum(site.lost for site in sites), sum(site.seconds for site in sites)
    if lost:
        return Phrase((Bad(f"{units.duration(lost)} lost"), " against the best candidates"))
    if not sites:
        return "No call of scaled_dot_product_attention was seen"
    share = f"{units.percent(spent / total)} of the time" if total else units.duration(spent)
    return Phrase(("Attention takes ", Ours(share)))


def _sentence(sites: list[Site], total: float, ranks: int) -> str:
    """The trace in one sentence."""
    if not sites:
        return "no call of scaled_dot_product_attention was seen"
    calls, spent = sum(site.calls for site in sites), sum(site.seconds for site in sites)
    text = f"{calls} calls at {len(sites)} sites, {units.duration(spent)}, {spent / (total or 1.0):.0%} of the time"
    text += f" of {ranks} ranks" if ranks else ""
    math = sum(site.is_math_fallback for site in sites)
    text += f"; silent fallbacks to math: {math} of the sites" if math else "; none falls back to math"
    lost = sum(site.lost for site in sites)
    return text + (f"; {units.duration(lost)} lost against the best candidates." if lost else ".")


def _call_sites(sites: list[Site], total: float) -> list[Section]:
    if not sites:
        return []
    clock = units.Clock.of(site.seconds for site in sites)
    bars = Bars([_bar(site, clock, total) for site in sites], "Time at each site, all calls together",
                lost="lost against the best candidate", other="not known", in_text=False)  # fmt: skip
    rows = [_cells(site, total) for site in sites]
    table = Table(COLUMNS, rows, "Call sites", [site.is_math_fallback for site in sites])
    lengths = [Words(f"lengths at {site.place}: {site.lengths}", is_note=True) for site in sites if site.lengths]
    return [Section("Call sites", [bars, table, *lengths])]


def _bar(site: Site, clock: units.Clock, total: float) -> Line:
    ran = f"{site.backend or 'nothing'}{', a silent fallback' if site.is_math_fallback else ''}"
    share = f"{units.percent(site.seconds / total)} · " if total else ""
    return Line(
        site.place, site.seconds, clock.text(site.seconds), aside=f"{share}{ran}", small=site.text, lost=site.lost,
        whose=site.backend or "?",
    )  # fmt: skip


def _cells(site: Site, total: float) -> list[Inline]:
    measured, ran = site.note == "", site.backend or "nothing"
    return [
        Code(site.place), Code(site.text), Bad(f"{ran}, silently") if site.is_math_fallback else ran, str(site.calls),
        units.duration(site.forward) if measured else "-",
        units.duration(site.backward) if site.backward else "-",
        units.percent(site.seconds / total) if measured and total else "-",
        units.duration(site.lost) if site.best else "-", site.best or site.note or "-",
    ]  # fmt: skip


def _fallbacks(fallen: list[Site]) -> list[Section]:
    if not fallen:
        return []
    rows: list[list[Inline]] = []
    for site in fallen:
        reasons = site.reasons or ("no fused kernel took it, and no rule says why",)
        rows.append([Code(site.place), Code(site.text), *report.whys_and_remedies(reasons)])
    columns = ("site", "problem", "why no fused kernel took it", "what would change that")
    about = Words("PyTorch ran its unfused math at these sites, and said nothing.", is_note=True)
    return [Section("Silent math fallbacks", [about, Table(columns, rows, "Silent math fallbacks")])]


def _stacks(sites: list[Site]) -> list[Section]:
    deep = [site for site in sites if len(site.stack) > 1]
    folds = [Fold(f"{site.place}: {site.text}", [Words(Lines(map(Code, site.stack)))], is_boxed=True) for site in deep]
    brief = [Words("the lines that call them are in the record, and on its page")]
    return [Section("Where they are called from", folds, brief)] if folds else []
