"""The page of `tilewise ladder`, from its record: every rung's time, and what it moves through memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ladder import RUNGS
from ...problem import Problem
from .. import units
from ..measure.compare import VERIFIED, median
from . import charts, views
from .html import (
    Head,
    Markup,
    Section,
    compact_table,
    device_of,
    document,
    note,
    refusal_table,
    section,
    subheading,
    table,
    tagged,
    torch_of,
)
from .views import Entry, cautions, error_cells, kinds, speed_text, view

if TYPE_CHECKING:
    from collections.abc import Sequence


def ladder_page(told: dict[str, Any]) -> str:
    climbs = [(climb, view(climb["comparison"])) for climb in told["climbs"]]
    sections = [part for climb, seen in climbs for part in _climb(climb, seen)]
    return document(_head(told, [seen for _, seen in climbs]), sections, told)


def _head(told: dict[str, Any], climbs: Sequence[views.View]) -> Head:
    """How far the ladder reaches on a GPU. On a CPU rungs run in simulators, whose times say nothing; results do."""
    provenance = told.get("provenance") or {}
    device = told["climbs"][0]["comparison"]["device"] if told["climbs"] else "cpu"
    on_gpu = device.startswith("cuda")
    asked = [entry for seen in climbs for entry in seen.entries]
    right = [entry for entry in asked if entry.verdict == VERIFIED]
    ranked = [seen.ranked() for seen in climbs if len(seen.ranked()) > 1]
    claim: object = f"{len(right)} of {units.counted(len(asked), 'rung')} verified"
    if on_gpu and ranked:
        fast, *_, slow = max(ranked, key=lambda entries: entries[-1].median / entries[0].median)
        times = f"{slow.median / fast.median:.0f}x"
        claim = Markup(f'<span class="ours">{times}</span> from {_name(slow.name)} to {_name(fast.name)}')
    facts = [device_of(provenance, device), torch_of(provenance), units.counted(len(climbs), "problem")]
    warnings = [] if on_gpu else ["Without a GPU rungs run in simulators: their times say nothing, their results do."]
    warnings += dict.fromkeys(line for seen in climbs for line in cautions(seen))
    failures = [f"{_name(e.name)}: {'; '.join([e.verdict, *e.because])}" for e in asked if e.failed]
    return Head("tilewise ladder", claim, [fact for fact in facts if fact], warnings=warnings, failures=failures)


def _name(candidate: str) -> str:
    return candidate.removeprefix("ladder:")


def _climb(climb: dict[str, Any], seen: views.View) -> list[Section]:
    order = [rung.candidate for rung in RUNGS]
    entries = sorted(seen.entries, key=lambda entry: order.index(entry.name) if entry.name in order else len(order))
    timed = [entry for entry in entries if entry.seconds and not entry.failed]
    problem = Problem.from_dict(climb["problem"])
    parts: list[object] = []
    if timed:
        clock = units.Clock.of(entry.median for entry in timed)
        items = [_bar(entry, clock) for entry in timed]
        parts.append(charts.bars(items, "Time of one call, rung by rung", keys=[*kinds(timed), charts.SPREAD]))
    parts.append(_table(climb, seen, entries))
    parts += _three_kernel(climb, problem)
    refused = climb.get("refused") or {}
    parts += [subheading("Refused"), refusal_table(refused)] if refused else []
    return [section(str(problem), *parts)]


def _three_kernel(climb: dict[str, Any], problem: Problem) -> list[object]:
    """The rung of three kernels taken apart."""
    taken = climb.get("parts") or {}
    if not taken:
        return []
    if "error" in taken:
        return [note(f"The three-kernel rung was not taken apart: {taken['error']}")]
    heads = problem.batch * problem.heads_q
    rows = [
        [name, units.duration(seconds), units.duration(seconds / heads)]
        for name, seconds in ((name, median(samples)) for name, samples in taken["seconds"].items())
    ]
    about = f"Kernels by graph replay, in the configuration {taken['config']}."
    columns = ("part", ">time", ">per head")
    return [subheading("The three-kernel rung in its parts"), table(columns, rows, "Three-kernel rung"), note(about)]


def _moved(climb: dict[str, Any], name: str, place: str) -> str:
    """Bytes that a rung moves: counted, or else by its formula."""
    rung = "math" if name == "torch-math" else _name(name)
    counted = (climb.get("counted") or {}).get(rung) or {}
    formula = (climb.get("traffic") or {}).get(rung) or {}
    size = counted.get(place) if place in counted else formula.get(place)
    return units.size(size) if size is not None else "-"


def _bar(entry: Entry, clock: units.Clock) -> charts.Bar:
    assert entry.seconds is not None
    low, high, aside = entry.seconds["p20"], entry.seconds["p80"], speed_text(entry.speed)
    return charts.Bar(
        _name(entry.name), entry.median, clock.text(entry.median), entry.kind, low, high, aside,
        chosen=entry.name == views.OURS,
    )  # fmt: skip


def _table(climb: dict[str, Any], seen: views.View, entries: Sequence[Entry]) -> Markup:
    lessons = {rung.candidate: rung.lesson for rung in RUNGS}
    rows = [
        [tagged(entry.kind, _name(entry.name)), entry.verdict, units.duration(entry.median)
         if entry.seconds else "-", _moved(climb, entry.name, "dram"), units.size(entry.memory),
         *error_cells(entry, seen, "out"),
         lessons.get(entry.name, "-")]
        for entry in entries
    ]  # fmt: skip
    columns = ["rung", "verdict", ">time", ">through DRAM", ">extra memory", ">error", ">of budget", "lesson"]
    return compact_table(columns, rows, "Rungs")
