"""The page of `tilewise tune`, from its record: each sweep's winner, the finalists as bars, every config in a table."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from .. import units
from ..measure.compare import quantile
from ..measure.statistics import Speed
from ..studies import tune
from . import charts
from .html import Head, Markup, Section, code, compact_table, document, fold, note, paragraph, section, torch_of
from .views import speed_text

_BARS = 16


def tune_page(told: dict[str, Any]) -> str:
    sweeps = [Sweep(values, told.get("settings", {})) for values in told["sweeps"]]
    return document(_head(told, sweeps), [_section(found) for found in sweeps], told)


class Sweep:
    """A sweep as its record has it."""

    def __init__(self, values: dict[str, Any], settings: dict[str, Any]) -> None:
        self.values = values
        self.trials: list[dict[str, Any]] = values["trials"]
        self.gain = float(settings.get("gain", 1.01))
        self.problem = Problem.from_dict(values["problem"])
        self.ranked = sorted(filter(_measured, self.trials), key=lambda t: (-_last_round(t), t["seconds"]["median"]))
        self.rest = [trial for trial in self.trials if not _measured(trial)]
        self.shipped = self._find(values["shipped"])

    def _find(self, label: str) -> dict[str, Any] | None:
        return next((trial for trial in self.trials if trial["label"] == label), None)

    @property
    def winner(self) -> dict[str, Any] | None:
        """As the record names it. In a record that does not: the shipped choice, unless the fastest beats it by `gain`
        and beyond its own spread."""
        named = self.values.get("winner")
        if named:
            return self._find(named)
        if not self.ranked:
            return None
        best: dict[str, Any] = self.ranked[0]
        shipped = self.shipped
        if shipped is None or not _measured(shipped):
            return best
        ahead = shipped["seconds"]["median"] >= self.gain * best["seconds"]["median"]
        beyond = quantile(_samples(best), 0.8) < shipped["seconds"]["median"]
        return best if ahead and beyond else shipped

    @property
    def counts(self) -> str:
        total = len(self.trials)
        return f"{total} configs: {len(self.ranked)} measured, {total - len(self.ranked)} not"

    @property
    def advantage(self) -> float | None:
        """How many times as fast the winner is as the shipped choice; None where that stays or has no time."""
        winner = self.winner
        if winner is None or self.shipped is None or winner is self.shipped or not self.shipped["seconds"]:
            return None
        if winner.get("speed"):
            return Speed.from_dict(winner["speed"]).ratio
        return float(self.shipped["seconds"]["median"] / winner["seconds"]["median"])

    @property
    def conclusion(self) -> str:
        if self.values.get("conclusion"):
            return str(self.values["conclusion"])
        winner = self.winner
        if not self.values["complete"]:
            return f"{self.counts}; interrupted: run the same command again to go on from here"
        if winner is None:
            return f"{self.counts}; none could be measured"
        if winner is self.shipped:
            margin = f"over {100 * (self.gain - 1):.0f}% faster, and beyond the spread"
            return f"{self.counts}; the shipped choice stays: none is {margin}"
        if self.advantage is None:
            return f"{self.counts}; {winner['label']} wins; the shipped choice has no time"
        return (
            f"{self.counts}; {winner['label']} wins, {self.advantage:.3f}x the shipped choice {self.values['shipped']}"
        )


def _measured(trial: dict[str, Any]) -> bool:
    return trial["verdict"] == tune.MEASURED and bool(trial["seconds"])


def _last_round(trial: dict[str, Any]) -> int:
    return max(map(int, trial["rounds"]), default=-1)


def _samples(trial: dict[str, Any]) -> list[float]:
    return list(trial["rounds"].get(str(_last_round(trial)), []))


def _head(told: dict[str, Any], sweeps: list[Sweep]) -> Head:
    backends = ", ".join(dict.fromkeys(found.values["backend"] for found in sweeps))
    won = [found for found in sweeps if found.advantage]
    claim: object = "Nothing could be measured"
    if len(sweeps) == 1 and won:
        claim = Markup(f'<span class="ours">{won[0].advantage:.2f}x faster</span> than the shipped choice')
    elif len(sweeps) == 1 and sweeps[0].winner is not None:
        stays = sweeps[0].winner is sweeps[0].shipped
        claim = "The shipped choice stays" if stays else "The shipped choice could not be measured"
    elif sweeps and any(found.ranked for found in sweeps):
        claim = Markup(f'<span class="ours">{len(won)} of {len(sweeps)}</span> problems have a faster config')
    times = []
    if len(sweeps) == 1 and (winner := sweeps[0].winner):
        times.append(units.duration(winner["seconds"]["median"]))
        if won and sweeps[0].shipped:
            times[0] += f" against {units.duration(sweeps[0].shipped['seconds']['median'])}"
    incomplete = [] if told["complete"] else ["Interrupted: run the same command again to go on from here."]
    noise = [f"Noisy: {line}" for found in sweeps for line in found.values.get("noise", ())]
    devices = dict.fromkeys(found.values["device"] for found in sweeps)
    counts = [found.counts for found in sweeps] if len(sweeps) == 1 else []
    facts = [*times, *counts, *devices, torch_of(told.get("provenance") or {})]
    problems = code(sweeps[0].problem) if len(sweeps) == 1 else f"{len(sweeps)} problems"
    return Head(
        about=Markup(f"tilewise tune · {code(backends)} · {problems}"),
        claim=claim,
        facts=[fact for fact in facts if fact],
        warnings=[*incomplete, *dict.fromkeys(noise)],
    )


def _section(found: Sweep) -> Section:
    winner = found.winner
    parts: list[object] = [paragraph(f"{found.conclusion}.")]
    last = _last_round(found.ranked[0]) if found.ranked else -1
    shown = [trial for trial in found.ranked if _last_round(trial) == last][:_BARS]
    if shown:
        clock = units.Clock.of(trial["seconds"]["median"] for trial in found.ranked)
        has_shipped = found.shipped is not None and found.shipped in shown
        reference = (
            ("the shipped choice", found.shipped["seconds"]["median"]) if has_shipped and found.shipped else None
        )
        items = [_bar(trial, found, winner, clock) for trial in shown]
        legend = [("ours", "the choice"), ("other", "other configs"), charts.SPREAD]
        caption = f"Time of one call, the {len(shown)} that came to the last round: shorter is better"
        parts.append(charts.bars(items, caption, reference=reference, keys=legend))
        rows = [_cells(trial, found, winner, clock) for trial in found.ranked]
        marks = [trial is winner for trial in found.ranked]
        columns = _columns(clock)
        parts.append(fold(f"All {len(rows)} that were measured", compact_table(columns, rows, "Configs", marks)))
    if found.rest:
        failed = [[code(trial["label"]), trial["verdict"], trial["because"]] for trial in found.rest]
        columns = ["configuration", "verdict", "why"]
        parts.append(fold(f"{len(failed)} that were not", compact_table(columns, failed, "Configs without a time")))
    written = found.values.get("written")
    kept = "Written to the table: the planner uses it from now on." if written else "No table was written."
    rule = "Configs are halved round by round: the fastest third of each is measured three times as long."
    return section(str(found.problem), *parts, note(f"{rule} {kept}"))


def _bar(trial: dict[str, Any], found: Sweep, winner: dict[str, Any] | None, clock: units.Clock) -> charts.Bar:
    seconds = trial["seconds"]
    marks = [*(["winner"] if trial is winner else []), *(["shipped"] if trial is found.shipped else [])]
    speed = Speed.from_dict(trial["speed"]) if trial.get("speed") else None
    aside = speed_text(speed) if trial is not found.shipped else ""
    if not aside and found.shipped and found.shipped["seconds"] and trial is not found.shipped:
        aside = f"{found.shipped['seconds']['median'] / seconds['median']:.3f}x the shipped"
    return charts.Bar(
        trial["label"], seconds["median"], clock.text(seconds["median"]), "ours" if trial is winner else "other",
        seconds["p20"], seconds["p80"], aside, chosen=trial is winner, small=", ".join(marks),
    )  # fmt: skip


def _columns(clock: units.Clock) -> list[str]:
    return ["configuration", f">time, {clock.unit}", ">p20 to p80", ">to the choice", ">registers", ">spilled, bytes",
            ">shared, KiB", ">CTAs per SM", "limited by", "went out after"]  # fmt: skip


def _cells(trial: dict[str, Any], found: Sweep, winner: dict[str, Any] | None, clock: units.Clock) -> list[object]:
    seconds, built = trial["seconds"], trial.get("resources") or []
    facts = trial.get("launches") or []
    ratio = f"{seconds['median'] / winner['seconds']['median']:.3f}" if winner else "-"
    last = _last_round(found.ranked[0])
    out = "-" if _last_round(trial) == last else f"round {_last_round(trial) + 1}"
    limiters = dict.fromkeys(fact["limiter"] for fact in facts if fact["limiter"])
    return [
        code(trial["label"]), clock.number(seconds["median"]), clock.spread(seconds), ratio,
        "/".join(str(kernel["registers"]) for kernel in built) or "-",
        "/".join(str(kernel["spill_store_bytes"] + kernel["spill_load_bytes"]) for kernel in built) or "-",
        "/".join(str(fact["smem_kib"]) for fact in facts) or "-",
        "/".join(str(fact["ctas_per_sm"]) for fact in facts) or "-",
        ", ".join(limiters) or "-", out,
    ]  # fmt: skip
