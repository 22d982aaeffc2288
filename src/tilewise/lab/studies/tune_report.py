"""The report of `tilewise tune`, from its record: each sweep's winner, finalists as bars, every config in a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...errors import TilewiseError
from ...problem import Problem
from .. import report, units
from ..candidates.variants import resolve
from ..measure import words
from ..measure.statistics import Speed
from ..report import Bars, Code, Fold, Line, Lines, Ours, Phrase, Report, Section, Table, Words
from . import records, tune

if TYPE_CHECKING:
    from ...target import Target
    from ..report import Block, Inline

_BARS = 16
_RULE = "Configs are halved round by round: the fastest third of each is measured three times as long."
_LEGEND = f"speed: against the shipped choice, of the finalists; {words.LEGEND}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One config, as a record has it."""

    label: str
    config: dict[str, int]
    verdict: str
    because: str
    seconds: dict[str, float] | None  # median, p20 and p80 of the last round
    last_round: int
    resources: list[dict[str, Any]]  # what the compiler said of each kernel
    launches: list[dict[str, Any]]  # how each kernel fills a multiprocessor
    speed: Speed | None

    @staticmethod
    def of(values: dict[str, Any]) -> Trial:
        return Trial(
            values["label"],
            values["config"],
            values["verdict"],
            values["because"],
            values["seconds"] if values["verdict"] == tune.MEASURED else None,
            max(map(int, values["rounds"]), default=-1),
            values.get("resources") or [],
            values.get("launches") or [],
            Speed.of(values.get("speed")),
        )

    @property
    def median(self) -> float:
        assert self.seconds is not None
        return self.seconds["median"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep, as a record has it."""

    backend: str
    device: str
    problem: Problem
    complete: bool
    written: str | None
    noise: list[str]
    conclusion: str
    trials: list[Trial]
    shipped: Trial
    winner: Trial | None

    @staticmethod
    def of(values: dict[str, Any]) -> Sweep:
        trials = [Trial.of(one) for one in values["trials"]]
        by_label = {trial.label: trial for trial in trials}
        return Sweep(
            values["backend"],
            values["device"],
            Problem.from_dict(values["problem"]),
            values["complete"],
            values.get("written"),
            values.get("noise", []),
            values["conclusion"],
            trials,
            by_label[values["shipped"]],
            by_label.get(values["winner"]),
        )

    @property
    def ranked(self) -> list[Trial]:
        """Those that were measured, the furthest and fastest first."""
        return sorted((t for t in self.trials if t.seconds), key=lambda t: (-t.last_round, t.median))

    @property
    def rest(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.seconds]

    @property
    def advantage(self) -> float | None:
        """How many times as fast the winner is as the shipped choice; None where that stays or has no time."""
        if self.winner is None or self.winner is self.shipped or not self.shipped.seconds:
            return None
        return self.winner.speed.ratio if self.winner.speed else self.shipped.median / self.winner.median


def report_of(told: dict[str, Any], max_lines: int = 0, target: Target | None = None) -> Report:
    """`max_lines`: of each table of a text; 0: all. `target`: what was tuned for, where it is at hand."""
    provenance = told.get("provenance") or {}
    if target is None and provenance:
        target = records.target_of(provenance, on_gpu=any(one["device"] != "cpu" for one in told["sweeps"]))
    sweeps = [Sweep.of(values) for values in told["sweeps"]]
    alone = sweeps[0] if len(sweeps) == 1 else None
    problems = Code(alone.problem) if alone else f"{len(sweeps)} problems"
    backends = ", ".join(dict.fromkeys(found.backend for found in sweeps))
    interrupted = [] if told["complete"] else ["Interrupted: run the same command again to go on from here."]
    noise = dict.fromkeys(f"Noisy: {line}" for found in sweeps for line in found.noise)
    versions = report.machine_of(provenance, "cuda")[1:]
    return Report(
        "tune",
        Phrase((Code(backends), " · ", problems)),
        _claim(sweeps),
        "\n".join(found.conclusion if alone else f"{found.problem}: {found.conclusion}" for found in sweeps),
        [*(_times(alone) if alone else []), *dict.fromkeys(found.device for found in sweeps), *versions],
        warnings=[*interrupted, *noise],
        sections=[_section(found, max_lines, target) for found in sweeps],
    )


def _claim(sweeps: list[Sweep]) -> Inline:
    won = [found for found in sweeps if found.advantage]
    if len(sweeps) == 1 and won:
        return Phrase((Ours(f"{won[0].advantage:.2f}x faster"), " than the shipped choice"))
    if len(sweeps) == 1 and sweeps[0].winner is not None:
        stays = sweeps[0].winner is sweeps[0].shipped
        return "The shipped choice stays" if stays else "The shipped choice could not be measured"
    if any(found.ranked for found in sweeps):
        return Phrase((Ours(f"{len(won)} of {len(sweeps)}"), " problems have a faster config"))
    return "Nothing could be measured"


def _times(found: Sweep) -> list[str]:
    if found.winner is None:
        return []
    time = units.duration(found.winner.median)
    return [f"{time} against {units.duration(found.shipped.median)}" if found.advantage else time]


def _section(found: Sweep, max_lines: int, target: Target | None) -> Section:
    """The text has the table of all configs, and each reason for which some have no time once."""
    blocks: list[Block] = [Words(f"{found.conclusion}.")]
    texts: list[Block] = [
        Words(f"attention: {found.problem}"),
        Words(f"device:    {found.device}, backend {found.backend}"),
    ]
    if found.ranked:
        clock = units.Clock.of(trial.median for trial in found.ranked)
        table = _table(found, clock, target)
        blocks += [_bars(found, clock), Fold(f"All {len(table.rows)} that were measured", [table])]
        cut = max_lines if max_lines and len(table.rows) > max_lines else len(table.rows)
        more = len(table.rows) - cut
        texts += [Table(table.columns, table.rows[:cut])]
        texts += [Words(f"... and {more} more, in the JSON")] if more else []
    if found.rest:
        failures = [Table(("configuration", "verdict", "why"), _failures(found, every=True), "Configs without a time")]
        blocks.append(Fold(f"{len(found.rest)} that were not", failures))
        texts += [Words(": ".join(map(report.text_of, filter(None, row)))) for row in _failures(found, every=False)]
    kept = "Written to the table: the planner uses it from now on." if found.written else "No table was written."
    blocks += [Words(_LEGEND, is_note=True), Words(f"{_RULE} {kept}", is_note=True)]
    return Section(str(found.problem), blocks, brief=[*texts, Words(_LEGEND)])


def _bars(found: Sweep, clock: units.Clock) -> Bars:
    shown = [trial for trial in found.ranked if trial.last_round == found.ranked[0].last_round][:_BARS]
    reference = ("the shipped choice", found.shipped.median) if found.shipped in shown else None
    caption = f"Time of one call, the {len(shown)} that came to the last round: shorter is better"
    return Bars([_bar(trial, found, clock) for trial in shown], caption, other="other configs", reference=reference)


def _bar(trial: Trial, found: Sweep, clock: units.Clock) -> Line:
    assert trial.seconds is not None
    wins, is_shipped = trial is found.winner, trial is found.shipped
    aside = "" if is_shipped or trial.speed is None else words.cell(trial.speed)
    if not aside and found.shipped.seconds and not is_shipped:
        aside = f"{found.shipped.median / trial.median:.3f}x the shipped"
    return Line(
        trial.label, trial.median, clock.text(trial.median), "ours" if wins else "other",
        trial.seconds["p20"], trial.seconds["p80"], aside, chosen=wins,
        small=", ".join([*(["winner"] if wins else []), *(["shipped"] if is_shipped else [])]),
    )  # fmt: skip


def _table(found: Sweep, clock: units.Clock, target: Target | None) -> Table:
    columns = ["configuration", f">time, {clock.unit}", ">p20 to p80", ">speed", ">to the choice", ">registers",
               ">spilled, bytes", ">shared, KiB", ">CTAs per SM", "why"]  # fmt: skip
    rows = [_cells(trial, found, clock, target) for trial in found.ranked]
    return Table(columns, rows, "Configs", [trial is found.winner for trial in found.ranked])


def _cells(trial: Trial, found: Sweep, clock: units.Clock, target: Target | None) -> list[Inline]:
    assert trial.seconds is not None
    built, facts = trial.resources, trial.launches
    ratio = f"{trial.median / found.winner.median:.3f}" if found.winner else "-"
    return [
        Code(trial.label), clock.number(trial.median), clock.spread(trial.seconds),
        "shipped" if trial is found.shipped else words.cell(trial.speed), ratio,
        "/".join(str(kernel["registers"]) for kernel in built) or "-",
        "/".join(str(kernel["spill_store_bytes"] + kernel["spill_load_bytes"]) for kernel in built) or "-",
        "/".join(str(fact["smem_kib"]) for fact in facts) or "-",
        "/".join(str(fact["ctas_per_sm"]) for fact in facts) or "-",
        "; ".join(_why(trial, found, target)),
    ]  # fmt: skip


def _why(trial: Trial, found: Sweep, target: Target | None) -> list[str]:
    marks = [] if trial is not found.winner else ["winner" if found.complete else "ahead so far"]
    marks += ["shipped"] if trial is found.shipped else []
    limiters = dict.fromkeys(fact["limiter"] for fact in trial.launches if fact["limiter"])
    marks += [f"CTAs held by {', '.join(limiters)}"] if limiters else []
    marks += _details(trial, found, target) if target is not None else []
    if trial.last_round < found.ranked[0].last_round:
        reached = f"round {trial.last_round + 1}"
        marks.append(f"out after {reached}" if found.complete else f"as far as {reached}")
    return marks


def _details(trial: Trial, found: Sweep, target: Target) -> list[str]:
    """How the launch fills the GPU; nothing where today's backend has no such config."""
    fields = ",".join(f"{name}={int(value)}" for name, value in trial.config.items())
    try:
        module, config = resolve(f"{found.backend}@{fields}")
    except (TilewiseError, TypeError, ValueError):
        return []
    return list(module.details(found.problem, target, config)) if hasattr(module, "details") else []


def _failures(found: Sweep, *, every: bool) -> list[list[Inline]]:
    """What has no time, and why: each reason once, with every config that has it or how many there are."""
    rows: list[list[Inline]] = []
    ordered = sorted(found.rest, key=lambda trial: (trial.verdict, trial.because, trial.label))
    for (verdict, because), alike in groupby(ordered, key=lambda trial: (trial.verdict, trial.because)):
        if verdict == tune.BUILT and not found.complete:
            continue  # an interrupt came first: the conclusion says how many
        labels = [trial.label for trial in alike]
        names: Inline = (
            Lines(map(Code, labels)) if every else labels[0] if len(labels) == 1 else f"{len(labels)} configs"
        )
        shipped = "the shipped one; " if found.shipped.label in labels else ""
        rows.append([names, shipped + ("not measured" if verdict == tune.BUILT else verdict), because])
    return rows
