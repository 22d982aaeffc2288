"""The report of `tilewise ladder`, from its record: every rung's time, what it moves, and three kernels taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...ladder import RUNGS, three_kernel, traffic
from ...problem import Problem
from ...target import Target
from .. import report, units
from ..measure import stages, statistics, words
from ..measure.compare import REFUSED, UNVERIFIED, VERIFIED, median, summary
from ..report import Bad, Bars, Code, Heading, Line, Ours, Phrase, Report, Section, Table, Words
from . import records
from .ladder import Climb

if TYPE_CHECKING:
    from ...ladder import Rung
    from ..measure.compare import Outcome
    from ..measure.statistics import Speed
    from ..report import Block, Inline

# A study of three-kernel attention on an H100: microseconds per head by threads per row of its softmax.
STUDY = {16: 1.84, 32: 1.65, 256: 1.71}
_STUDIED = Problem(1, 16, 16, 1024, 1024, 64, 64, torch.float16)
_USUAL_THREADS = three_kernel.Config().row_threads
_SIMULATED = "Without a GPU numba and triton run in their simulators: their times say nothing, their results do."
_COLUMNS = (
    "rung", "verdict", ">ms", ">p20..p80", ">TFLOP/s", ">speed", ">DRAM MB", ">SM MB", ">counted DRAM MB", ">extra MiB",
    ">error", ">of budget", "lesson",
)  # fmt: skip


def report_of(told: dict[str, Any]) -> Report:
    """How far the ladder reaches on a GPU. On a CPU rungs run in simulators, whose times say nothing; results do."""
    climbs = [Climb.from_dict(values) for values in told["climbs"]]
    device = climbs[0].comparison.row.device if climbs else "cpu"
    provenance = told.get("provenance") or {}
    warnings = [] if device.startswith("cuda") else [_SIMULATED]
    warnings += dict.fromkeys(line for climb in climbs for line in _cautions(climb))
    failures = [
        f"{rung.name}: {'; '.join([outcome.verdict, *outcome.because])}"
        for climb in climbs
        for rung in RUNGS
        if (outcome := climb.outcome(rung)).failed
    ]
    return Report(
        "ladder",
        str(climbs[0].problem) if len(climbs) == 1 else units.counted(len(climbs), "problem"),
        _claim(climbs, device),
        "\n".join(map(sentence, climbs)),
        report.machine_of(provenance, device),
        warnings=warnings,
        failures=failures,
        sections=[_section(climb, _target(provenance, device)) for climb in climbs],
    )


def _target(provenance: dict[str, Any], device: str) -> Target:
    """The machine of a record; one without figures where no table knows it."""
    found = records.target_of(provenance, on_gpu=device.startswith("cuda")) if provenance else None
    return found or Target.named("cpu")


def _cautions(climb: Climb) -> list[str]:
    found = [] if climb.comparison.complete else ["Interrupted: only what was measured is here."]
    found += [f"Noisy: {line}" for line in climb.comparison.noise]
    return [*found, *([words.UNDECIDED] if climb.comparison.unsettled() else [])]


def _claim(climbs: list[Climb], device: str) -> Inline:
    """From the slowest rung of a problem to its fastest, where that is farthest."""
    asked = [one for climb in climbs for one in climb.comparison.outcomes if one.verdict != REFUSED]
    right = sum(outcome.verdict == VERIFIED for outcome in asked)
    ranked = [sorted((median(one.samples), one.candidate) for one in _timed(climb)) for climb in climbs]
    ranked = [times for times in ranked if len(times) > 1]
    if not device.startswith("cuda") or not ranked:
        return f"{right} of {units.counted(len(asked), 'rung')} verified"
    (fast, best), *_, (slow, worst) = max(ranked, key=lambda one: one[-1][0] / one[0][0])
    return Phrase((Ours(f"{slow / fast:.0f}x"), f" from {_name(worst)} to {_name(best)}"))


def _timed(climb: Climb) -> list[Outcome]:
    return [one for rung in RUNGS if (one := climb.outcome(rung)).costs and not one.failed]


def _name(candidate: str) -> str:
    return candidate.removeprefix("ladder:")


def sentence(climb: Climb) -> str:
    """The fastest rung beside the first; on a CPU, where some run in simulators, how many are right."""
    asked = [rung for rung in RUNGS if rung.name not in climb.refused]
    right = [rung for rung in asked if climb.outcome(rung).verdict == VERIFIED]
    told = f"{climb.problem}: {len(right)} of {len(asked)} rungs verified"
    timed = [rung for rung in right if climb.outcome(rung).costs]
    if not climb.device.startswith("cuda") or len(timed) < 2:
        return f"{told}."
    best = min(timed, key=lambda rung: median(climb.outcome(rung).samples))
    first, fastest = climb.outcome(timed[0]), climb.outcome(best)
    speed = climb.comparison.versus(fastest, first, among=len(timed))
    assert speed is not None
    times = f"{units.duration(median(fastest.samples))} against {units.duration(median(first.samples))}"
    return f"{told}; {best.name} is {words.claim(speed)} {timed[0].name}: {times}{words.interval(speed)}."


def _section(climb: Climb, target: Target) -> Section:
    timed = _timed(climb)
    clock = units.Clock.of(median(outcome.samples) for outcome in timed)
    bars = [_bar(climb, rung, clock) for rung in RUNGS if climb.outcome(rung) in timed]
    rungs: list[Block] = [
        Table(_COLUMNS, [_cells(climb, rung) for rung in RUNGS], "Rungs"),
        Words(f"speed: against the first rung that ran; {words.LEGEND}", is_note=True),
        *(Words(line) for line in [*_without_times(climb), *part_lines(climb, target), *byte_lines(climb)]),
    ]
    blocks = [*([Bars(bars, "Time of one call, rung by rung")] if bars else []), *rungs, *_parts(climb)]
    brief = [Words(f"{climb.problem}:"), *rungs]
    for refused in report.refusals({}, climb.refused):
        blocks += [Heading("Refused"), *refused.blocks]
        brief += refused.brief or ()
    return Section(str(climb.problem), blocks, brief)


def _without_times(climb: Climb) -> list[str]:
    """Rungs that turned the problem down when they ran, or whose results nothing could be held against."""
    outcomes = {rung.name: climb.outcome(rung) for rung in RUNGS if rung.name not in climb.refused}
    return [
        f"{name}: {'; '.join([outcome.verdict, *outcome.because])}"
        for name, outcome in outcomes.items()
        if outcome.verdict in (REFUSED, UNVERIFIED)
    ]


def _bar(climb: Climb, rung: Rung, clock: units.Clock) -> Line:
    outcome, timed = climb.outcome(rung), summary(climb.outcome(rung).samples)
    assert timed is not None
    aside = words.phrase(climb.speed(rung))
    return Line(
        rung.name, timed["median"], clock.text(timed["median"]), "", timed["p20"], timed["p80"], aside,
        whose=outcome.candidate,
    )  # fmt: skip


def _cells(climb: Climb, rung: Rung) -> list[Inline]:
    outcome, moved = climb.outcome(rung), climb.moved[rung.name]
    timed, counted = summary(outcome.samples), climb.counted.get(rung.name) or {}
    error, budget = outcome.error("out"), climb.comparison.budgets.get("out", {}).get("norm")
    share = units.percent(error / budget) if error is not None and budget else "-"
    return [
        Code(rung.name), outcome.verdict,
        report.milliseconds(timed), report.spread(timed),
        report.rate(climb.problem.flops(), timed), words.cell(climb.speed(rung)),
        report.significant(moved.dram / 1e6), report.significant(moved.sm / 1e6),
        report.significant(counted["dram"] / 1e6) if "dram" in counted else "-", report.mebibytes(outcome.memory),
        words.error_cell(outcome, "out"), Bad(share) if outcome.failed else share, rung.lesson,
    ]  # fmt: skip


def _parts(climb: Climb) -> list[Block]:
    """The rung of three kernels taken apart; its text is in sentences."""
    seconds = climb.parts.get("seconds")
    if not seconds:
        return []
    heads = climb.problem.batch * climb.problem.heads_q
    times = ((name, median(samples)) for name, samples in seconds.items())
    rows = [[name, units.duration(one), units.duration(one / heads)] for name, one in times]
    note = Words(f"Kernels by graph replay, in the configuration {climb.parts['config']}.", is_note=True)
    table = Table(("part", ">time", ">per head"), rows, "Three-kernel rung")
    return [Heading("The three-kernel rung in its parts"), table, note]


def part_lines(climb: Climb, target: Target) -> list[str]:
    """The three kernels apart, what launching costs, and how they stand against cuBLAS and against the study."""
    if not climb.parts:
        return []
    if "error" in climb.parts:
        return [f"three-kernel, in parts: {climb.parts['error']}"]
    times = {name: median(samples) * 1e6 for name, samples in climb.parts["seconds"].items()}
    each = ", ".join(f"{name} {report.significant(times[name])}" for name in stages.NAMES)
    gap = times[stages.WHOLE] - sum(times[name] for name in stages.NAMES)
    lines = [
        f"three-kernel ({climb.parts['config']}), us: {each}; together {report.significant(times[stages.WHOLE])}, "
        f"{gap:+.1f} against their sum",
        f"launching, us: three kernels that do nothing take {report.significant(times[stages.NOTHING])} on the device "
        f"with the same grids; the host needs {report.significant(times[stages.HOST])}",
    ]
    if stages.EAGER in times:
        lines.append(
            f"in an eager stream a call takes {report.significant(times[stages.EAGER])} us, as a CUDA graph "
            f"{report.significant(times[stages.WHOLE])}"
        )
    lines += [
        f"softmax with {one.threads} threads per row: {report.significant(one.softmax_us)} us alone; all three "
        f"{report.significant(one.head_us)} us per head{_beside(one)}"
        for one in by_row_threads(climb.problem, climb.parts["seconds"])
    ]
    if (told := headline(climb.problem, climb.parts["seconds"], target)) is not None:
        lines.append(told)
    rungs = {rung.name: rung for rung in RUNGS}
    ours, theirs = (climb.outcome(rungs[name]) for name in ("three-kernel", "matmul"))
    if (against := climb.comparison.versus(ours, theirs)) is not None:
        lines.append(f"three-kernel against cuBLAS (matmul, softmax, matmul): {words.cell(against)}")
    return lines


class ByRowThreads(NamedTuple):
    """The softmax with some number of threads per row, and what that makes of all three kernels."""

    threads: int
    softmax_us: float
    head_us: float  # of all three, per head
    speed: Speed | None  # against the usual number; None for that one
    study_us: float | None  # what the study has, per head, on the problem that it measures


def by_row_threads(problem: Problem, seconds: dict[str, list[float]]) -> list[ByRowThreads]:
    """A line for each number of threads per row; none from a record that has no such parts."""
    if any(name not in seconds for name in stages.PARTS):
        return []
    heads = problem.batch * problem.heads_q
    usual = seconds[stages.whole_name(_USUAL_THREADS)]
    found = []
    for threads in stages.ROW_THREADS:
        whole = seconds[stages.whole_name(threads)]
        against = f"{_USUAL_THREADS} threads"
        speed = statistics.speed(whole, usual, among=len(stages.ROW_THREADS) - 1, against=against)
        found.append(
            ByRowThreads(
                threads,
                median(seconds[stages.softmax_name(threads)]) * 1e6,
                median(whole) * 1e6 / heads,
                speed if threads != _USUAL_THREADS else None,
                STUDY.get(threads) if is_the_studys(problem) else None,
            )
        )
    return found


def _beside(one: ByRowThreads) -> str:
    told = f", {words.cell(one.speed)} against {one.speed.against}" if one.speed else ""
    return f"{told}; the study has {one.study_us:.2f}" if one.study_us else told


def is_the_studys(problem: Problem) -> bool:
    return problem.with_(dtype=_STUDIED.dtype, needs_lse=False) == _STUDIED


def headline(problem: Problem, seconds: dict[str, list[float]], target: Target) -> str | None:
    """The rung beside the study's figure for the same problem, with what bounds it from below; None for another."""
    if not is_the_studys(problem) or stages.EAGER not in seconds:
        return None
    heads = problem.batch * problem.heads_q
    each = {name: report.significant(median(times) * 1e6 / heads) for name, times in seconds.items()}
    told = (
        f"us per head: {each[stages.WHOLE]} as a CUDA graph, {each[stages.EAGER]} launched one by one, where the study "
        f"has {STUDY[_USUAL_THREADS]:.2f} on an H100; launching alone is {each[stages.NOTHING]} of it"
    )
    if not target.dram_bytes_per_s:
        return told
    moved = traffic.every(problem, target)["three-kernel"].dram / target.dram_bytes_per_s * 1e6 / heads
    return f"{told}, and its bytes take {report.significant(moved)} at the DRAM's peak, less where the L2 holds them"


def byte_lines(climb: Climb) -> list[str]:
    lines = []
    for name, counted in climb.counted.items():
        if "error" in counted:
            lines.append(f"{name}: bytes not counted: {counted['error']}")
        else:
            moved = climb.moved[name]
            lines.append(
                f"{name}: DRAM {counted['dram'] / 1e6:.0f} MB counted, {moved.dram / 1e6:.0f} by formula; "
                f"L2 {counted['l2'] / 1e6:.0f} MB counted, {moved.sm / 1e6:.0f} by formula"
            )
    return lines
