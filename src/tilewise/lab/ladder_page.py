"""The page of `tilewise ladder`, from its record: every rung's time, and what it moves through memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ladder import RUNGS
from ..problem import Problem
from . import charts, units, views
from .html import Head, Markup, Section, compact_table, device_of, document, refusals, section, tagged, torch_of
from .inspect_page import cautions, error_cells, kinds, speed_text
from .views import Entry, view

if TYPE_CHECKING:
    from collections.abc import Sequence


def ladder_page(told: dict[str, Any]) -> str:
    provenance = told.get("provenance") or {}
    sections: list[Section] = []
    warnings: list[str] = []
    spans = []
    for climb in told["climbs"]:
        seen = view(climb["comparison"])
        warnings += cautions(seen)
        ranked = seen.ranked()
        spans += [(ranked[-1], ranked[0])] if len(ranked) > 1 else []
        sections += _climb(climb, seen)
    claim: object = "No rung has a time"
    if spans:
        slow, fast = max(spans, key=lambda pair: pair[0].median / pair[1].median)
        times = f"{slow.median / fast.median:.0f}x"
        claim = Markup(f'<span class="ours">{times}</span> from {_name(slow.name)} to {_name(fast.name)}')
    device = told["climbs"][0]["comparison"]["device"] if told["climbs"] else "cpu"
    facts = [device_of(provenance, device), torch_of(provenance), units.counted(len(told["climbs"]), "problem")]
    head = Head("tilewise ladder", claim, [fact for fact in facts if fact], warnings=list(dict.fromkeys(warnings)))
    return document(head, sections, told)


def _name(candidate: str) -> str:
    return candidate.removeprefix("ladder:")


def _climb(climb: dict[str, Any], seen: views.View) -> list[Section]:
    order = [views.current(rung.candidate) for rung in RUNGS]
    entries = sorted(seen.entries, key=lambda entry: order.index(entry.name) if entry.name in order else len(order))
    timed = [entry for entry in entries if entry.seconds and not entry.failed]
    problem = Problem.from_dict(climb["problem"])
    parts: list[object] = []
    if timed:
        clock = units.Clock.of(entry.median for entry in timed)
        items = [_bar(entry, clock) for entry in timed]
        parts.append(charts.bars(items, "Time of one call, rung by rung", keys=[*kinds(timed), charts.SPREAD]))
    parts.append(_table(climb, seen, entries))
    refused = climb.get("refused") or {}
    parts += refusals(refused)
    return [section(str(problem), *parts)]


def _bar(entry: Entry, clock: units.Clock) -> charts.Bar:
    assert entry.seconds is not None
    low, high, aside = entry.seconds["p20"], entry.seconds["p80"], speed_text(entry.speed)
    return charts.Bar(
        _name(entry.name), entry.median, clock.text(entry.median), entry.kind, low, high, aside,
        chosen=entry.name == views.OURS,
    )  # fmt: skip


def _table(climb: dict[str, Any], seen: views.View, entries: Sequence[Entry]) -> Markup:
    lessons = {views.current(rung.candidate): rung.lesson for rung in RUNGS}
    rows = [
        [tagged(entry.kind, _name(entry.name)), entry.verdict, units.duration(entry.median)
         if entry.seconds else "-", units.size(entry.memory), *error_cells(entry, seen, "out"),
         lessons.get(entry.name, "-")]
        for entry in entries
    ]  # fmt: skip
    columns = ["rung", "verdict", ">time", ">extra memory", ">error", ">of budget", "lesson"]
    return compact_table(columns, rows, "Rungs")
