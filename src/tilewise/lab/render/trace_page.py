"""The page of `tilewise trace`, from its record: where a program calls attention, what ran, what that lost."""

from __future__ import annotations

from typing import Any

from .. import units
from . import charts
from .html import (
    Head,
    Markup,
    Section,
    bad,
    code,
    compact_table,
    device_of,
    document,
    fold,
    listing,
    note,
    section,
    torch_of,
)
from .views import kind_of


def trace_page(told: dict[str, Any]) -> str:
    sites = sorted(told["sites"], key=lambda site: -_spent(site))
    sections = [*_call_sites(told, sites), *_fallbacks(sites), *_stacks(sites)]
    return document(_head(told, sites), sections, told)


def _spent(site: dict[str, Any]) -> float:
    return float(site["forward"] + site["backward"])


def _place(site: dict[str, Any]) -> str:
    return site["stack"][0] if site["stack"] else "an unknown place"


def _head(told: dict[str, Any], sites: list[dict[str, Any]]) -> Head:
    provenance = told.get("provenance") or {}
    total, spent = told["seconds"] or 0.0, sum(map(_spent, sites))
    lost = sum(site["lost"] for site in sites)
    fallen = [site for site in sites if site["math_fallback"]]
    claim: object = "No call of scaled_dot_product_attention was seen"
    if lost:
        claim = Markup(f'<span class="bad">{units.duration(lost)} lost</span> against the best candidates')
    elif sites:
        share = f"{units.percent(spent / total)} of the time" if total else units.duration(spent)
        claim = Markup(f'Attention takes <span class="ours">{share}</span>')
    device = sites[0]["device"] if sites else "cpu"
    facts = [
        f"{units.duration(spent)} of {units.duration(total)}, {units.percent(spent / total)}" if total else "",
        f"{told['ranks']} ranks" if told.get("ranks") else "",
        f"{units.counted(sum(site['calls'] for site in sites), 'call')} at {units.counted(len(sites), 'site')}",
        device_of(provenance, device),
        torch_of(provenance),
        bad(units.counted(len(fallen), "silent math fallback")) if fallen else "no silent math fallback",
    ]
    complete = told.get("complete", True)
    warnings = [] if complete else ["Interrupted: only what was seen is here."]
    warnings += [f"Noisy: {line}" for line in told.get("noise", ())]
    return Head(
        about=Markup(f"tilewise trace · {code(told.get('program', 'a program'))}"),
        claim=claim,
        facts=[fact for fact in facts if fact],
        warnings=warnings,
    )


def _call_sites(told: dict[str, Any], sites: list[dict[str, Any]]) -> list[Section]:
    if not sites:
        return []
    clock = units.Clock.of(_spent(site) for site in sites)
    items = [_bar(site, clock, told["seconds"]) for site in sites]
    kinds = dict.fromkeys(item.kind for item in items)
    legend = [("ours", "tilewise"), ("torch", "PyTorch"), ("other", "not known")]
    keys = [(kind, words) for kind, words in legend if kind in kinds]
    keys += [("lost", "lost against the best candidate")] if any(item.lost for item in items) else []
    columns = ["site", "problem", "ran", ">calls", ">forward", ">backward", ">share", ">lost", "best"]
    rows = [_cells(site, told["seconds"]) for site in sites]
    marks = [site["math_fallback"] for site in sites]
    chart = charts.bars(items, "Time at each site, all calls together", keys=keys)
    return [section("Call sites", chart, compact_table(columns, rows, "Call sites", marks))]


def _bar(site: dict[str, Any], clock: units.Clock, total: float) -> charts.Bar:
    kind = kind_of(site["backend"] or "?")
    ran = f"{site['backend'] or 'nothing'}{', a silent fallback' if site['math_fallback'] else ''}"
    share = f"{units.percent(_spent(site) / total)} · " if total else ""
    return charts.Bar(
        _place(site), _spent(site), clock.text(_spent(site)), kind, aside=f"{share}{ran}", small=site["text"],
        lost=site["lost"],
    )  # fmt: skip


def _cells(site: dict[str, Any], total: float) -> list[object]:
    measured = site["note"] == ""
    ran = site["backend"] or "nothing"
    return [
        code(_place(site)), code(site["text"]), bad(f"{ran}, silently") if site["math_fallback"] else ran,
        site["calls"],
        units.duration(site["forward"]) if measured else "-",
        units.duration(site["backward"]) if site["backward"] else "-",
        units.percent(_spent(site) / total) if measured and total else "-",
        units.duration(site["lost"]) if site["best"] else "-", site["best"] or site["note"] or "-",
    ]  # fmt: skip


def _fallbacks(sites: list[dict[str, Any]]) -> list[Section]:
    fallen = [site for site in sites if site["math_fallback"]]
    if not fallen:
        return []
    rows = []
    for site in fallen:
        pairs = [reason.partition(" -> ")[::2] for reason in site["reasons"]]
        pairs = pairs or [("no fused kernel took it, and no rule says why", "")]
        whys, remedies = zip(*pairs, strict=True)
        rows.append([code(_place(site)), code(site["text"]), listing(whys, "plain"), listing(remedies, "plain")])
    about = note("PyTorch ran its unfused math at these sites, and said nothing.")
    columns = ("site", "problem", "why no fused kernel took it", "what would change that")
    return [section("Silent math fallbacks", about, compact_table(columns, rows, "Silent math fallbacks"))]


def _stacks(sites: list[dict[str, Any]]) -> list[Section]:
    deep = [site for site in sites if len(site["stack"]) > 1]
    if not deep:
        return []
    made = (fold(f"{_place(site)}: {site['text']}", listing(map(code, site["stack"]), "plain"), kind="fold box")
            for site in deep)  # fmt: skip
    return [section("Where they are called from", *made)]
