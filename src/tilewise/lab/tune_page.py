"""The report of `tilewise tune`: who won each sweep, the finalists as bars, every config in a table, what failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import charts, tune
from .compare import summary
from .html import Section, fold, note, page, paragraph, section, table

if TYPE_CHECKING:
    from collections.abc import Sequence

_BARS = 16


def page_of(sweeps: Sequence[tune.Sweep], settings: tune.Settings, provenance: dict[str, Any]) -> str:
    sentence = " ".join(f"{found.problem}: {tune.conclusion(found, settings)}." for found in sweeps)
    title = f"Tuning {', '.join(dict.fromkeys(found.backend for found in sweeps))}"
    return page(title, sentence, [_sweep(found, settings) for found in sweeps], provenance)


def _sweep(found: tune.Sweep, settings: tune.Settings) -> Section:
    ranked, winner = found.ranked(), found.winner(settings.gain)
    rows = tune.rows(found, settings)
    measured, failed = rows[: len(ranked)], rows[len(ranked) :]
    parts: list[object] = [paragraph(f"On {found.target.name}, backend {found.backend}.")]
    if ranked:
        parts.append(charts.bars([_bar(trial, found, winner) for trial in ranked[:_BARS]], "Microseconds of a call"))
        marks = [trial is winner for trial in ranked]
        parts.append(fold("Every config that was measured", table(tune.COLUMNS, measured, "Configs", marks)))
    if failed:
        parts.append(fold(f"{len(failed)} that were not", table(tune.COLUMNS, failed, "Configs without a time")))
    kept = f"Written to {found.written}: the planner uses it from now on." if found.written else "No table was written."
    rule = "Configs are halved round by round: the fastest third of each is measured three times as long."
    return section(str(found.problem), *parts, note(f"{rule} {kept}"))


def _bar(trial: tune.Trial, found: tune.Sweep, winner: tune.Trial | None) -> charts.Bar:
    timed = summary(trial.samples)
    assert timed is not None
    mark = ", shipped" if trial.label == found.shipped else ""
    micros = timed["median"] * 1e6
    return charts.Bar(f"{trial.label}{mark}", micros, f"{micros:.1f} us", 0 if trial is winner else 1)
