"""ladder: every rung on one problem, side by side: verified, timed, with what it moves and what it teaches.

A rung that refuses, crashes, hangs or gives wrong numbers is a row. Without a GPU the rungs that have a simulator run
in it, on a problem small enough for it, and the others say why they do not: their times say nothing then, their numbers
do. With `--bytes` Nsight Compute counts what really went through DRAM and L2.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import DeviceError
from ...ladder import RUNGS, numba, three_kernel, traffic
from ...plan import BACKENDS
from ...problem import Problem
from ...target import Target
from ...triton import backend as triton
from .. import report, units
from ..candidates.names import Candidate
from ..candidates.variants import RUNG, backend_of
from ..measure import environment, ncu, stages, statistics, words
from ..measure.compare import (
    REFUSED,
    UNVERIFIED,
    VERIFIED,
    Comparison,
    Outcome,
    Row,
    compare,
    median,
    steps,
    summary,
)
from ..measure.pool import Pool
from . import records

if TYPE_CHECKING:
    from ...ladder import Rung
    from ..measure.compare import Settings
    from ..measure.statistics import Speed

KIND = "tilewise ladder"
GPU_SHAPES = ("1,16,1024,64", "1,16,8192,128")
CPU_SHAPES = ("1,2,48,16",)
_DRAM, _L2 = "dram__bytes.sum", "lts__t_bytes.sum"
# A study of three-kernel attention on an H100: microseconds per head by threads per row of its softmax.
STUDY = {16: 1.84, 32: 1.65, 256: 1.71}
_STUDIED = Problem(1, 16, 16, 1024, 1024, 64, 64, torch.float16)
_USUAL_THREADS = three_kernel.Config().row_threads
_COLUMNS = (
    "rung", "verdict", ">ms", ">p20..p80", ">TFLOP/s", ">speed", ">DRAM MB", ">SM MB", ">extra MiB", ">error", "lesson"
)  # fmt: skip


@dataclass(slots=True)
class Climb:
    """One problem on every rung."""

    problem: Problem
    device: str
    comparison: Comparison
    moved: dict[str, traffic.Traffic]
    refused: dict[str, list[str]]
    parts: dict[str, Any] = field(default_factory=dict)  # of the three-kernel rung; empty: not taken apart
    counted: dict[str, Any] = field(default_factory=dict)  # rung -> {"dram", "l2"} bytes, or {"error"}

    def outcome(self, rung: Rung) -> Outcome:
        if rung.name in self.refused:
            return Outcome(rung.candidate, REFUSED, self.refused[rung.name])
        return self.comparison[rung.candidate]

    def speed(self, rung: Rung) -> Speed | None:
        """How many times faster than the first rung that has a time."""
        timed = [one for one in RUNGS if self.outcome(one).costs]
        return self.comparison.versus(self.outcome(rung), self.outcome(timed[0])) if timed else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem.to_dict(),
            "device": self.device,
            "comparison": self.comparison.to_dict(),
            "traffic": {name: moved._asdict() for name, moved in self.moved.items()},
            "refused": self.refused,
            "parts": {name: value for name, value in self.parts.items() if name != "kernels"},
            "counted": self.counted,
        }


def simulate() -> None:
    """Let Numba and Triton run without a GPU, here and in the workers. Must come before either is imported."""
    os.environ.setdefault(numba.SIMULATOR, "1")
    os.environ.setdefault(triton.INTERPRETER, "1")


def run(
    problems: list[Problem], device: str, settings: Settings, method: str = "", *, count_bytes: bool = False
) -> list[Climb]:
    """Climb problem by problem. An interrupt ends it early: the last comparison is then not complete."""
    if not device.startswith("cuda"):
        simulate()
    target = Target.of(device)
    done: list[Climb] = []
    rows = [_row(problem, target, device, method) for problem in problems]
    with report.Bar(sum(steps(row, settings) for row, _ in rows)) as bar, Pool() as pool:
        for row, refused in rows:
            comparison = compare(row, pool, settings, bar.tick)
            done.append(Climb(row.problem, device, comparison, traffic.every(row.problem, target), refused))
            if not comparison.complete:
                break
    if device.startswith("cuda") and all(climb.comparison.complete for climb in done):
        try:
            _take_apart(done, settings)
            if count_bytes:
                _count(done, settings)
        except KeyboardInterrupt:
            done[-1].comparison.complete = False
    return done


def _row(problem: Problem, target: Target, device: str, method: str) -> tuple[Row, dict[str, list[str]]]:
    """The rungs that will run, and why the others will not."""
    refused = {rung.name: told for rung in RUNGS if (told := why_not(rung, problem, target))}
    willing = tuple(rung.candidate for rung in RUNGS if rung.name not in refused)
    return Row(f"ladder: {problem}", problem, willing, device, method), refused


def why_not(rung: Rung, problem: Problem, target: Target) -> list[str]:
    """All reasons for which a rung does not take a problem here; empty = it will be tried."""
    name = rung.candidate
    if name.startswith(RUNG):
        return [str(reason) for reason in backend_of(name).why_not(problem, target)]
    if name in BACKENDS and not Candidate(name).is_peer:
        return [str(reason) for reason in BACKENDS[name].why_not(problem, target)]
    return [str(reason) for reason in Candidate(name).why_not(problem)]


def _take_apart(climbs: list[Climb], settings: Settings) -> None:
    for climb in climbs:
        if "three-kernel" not in climb.refused:
            climb.parts = stages.measure(climb.problem, settings.seed, settings.round_seconds, 4 * settings.time_limit)


def _count(climbs: list[Climb], settings: Settings) -> None:
    """Bytes through DRAM and L2 of every rung that ran, by Nsight Compute."""
    ran = [(climb, rung) for climb in climbs for rung in RUNGS if climb.outcome(rung).costs]
    jobs = [ncu.job(rung.candidate, climb.problem, settings.seed, "forward") for climb, rung in ran]
    for (climb, rung), counted in zip(ran, count(jobs, 4 * settings.time_limit), strict=True):
        climb.counted[rung.name] = counted


def count(jobs: list[dict[str, Any]], time_limit: float) -> list[dict[str, Any]]:
    """What each job moved, all of them in one process under Nsight Compute. If that fails, each in one of its own, so
    that one job's failure stays its own; where the first fails again, it is not the job that fails."""
    options = ["--metrics", f"{_DRAM},{_L2}", "--print-units", "base"]
    try:
        return [_moved(leg) for leg in ncu.run(jobs, options, time_limit)]
    except DeviceError as error:
        failure = {"error": str(error).splitlines()[0]}
    if len(jobs) <= 1:
        return [failure] * len(jobs)
    first = count(jobs[:1], time_limit)
    return first * len(jobs) if "error" in first[0] else [*first, *(count([job], time_limit)[0] for job in jobs[1:])]


def _moved(leg: list[ncu.Row]) -> dict[str, Any]:
    dram, l2 = (sum(ncu.number(kernel, metric) for kernel in leg) for metric in (_DRAM, _L2))
    if not leg or math.isnan(dram + l2):
        return {"error": f"ncu gave no {_DRAM} or {_L2} of its {len(leg)} kernels"}
    return {"dram": dram, "l2": l2, "kernels": len(leg)}


def marks(record: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the figures of a record; empty for one that stands as it is."""
    lacking: dict[str, None] = {}
    for climb in record["climbs"]:
        asked = {one["candidate"] for one in climb["comparison"]["candidates"]}
        lacking |= dict.fromkeys(r.name for r in RUNGS if r.candidate not in asked and r.name not in climb["refused"])
    return [*records.marks_of(record), *(f"{name} was not asked" for name in lacking)]


def record(climbs: list[Climb], settings: Settings, command: list[str]) -> dict[str, Any]:
    """All that was measured, with where it comes from."""
    return {
        "kind": KIND,
        "suite": "ladder",
        "complete": all(climb.comparison.complete for climb in climbs),
        "provenance": environment.provenance(settings.seed, command),
        "settings": dataclasses.asdict(settings),
        "kernels": [one for climb in climbs for one in climb.parts.get("kernels", ())],
        "climbs": [climb.to_dict() for climb in climbs],
    }


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


def show(climb: Climb) -> None:
    """One line per rung, why some did not run, and the three-kernel rung in its parts."""
    for text in climb.comparison.noise:
        print(f"noisy: {text}")
    print(f"attention: {climb.problem}")
    print(f"device:    {environment.device_line(climb.device)}")
    report.print_table(_COLUMNS, [cells(climb, rung) for rung in RUNGS])
    print(f"speed: against the first rung that ran; {words.LEGEND}")
    for rung in RUNGS:
        outcome = climb.outcome(rung)
        if outcome.failed or outcome.verdict in (REFUSED, UNVERIFIED):
            print(f"{rung.name}: {'; '.join([outcome.verdict, *outcome.because])}")
    for line in [*part_lines(climb, Target.of(climb.device)), *byte_lines(climb)]:
        print(line)
    if not climb.device.startswith("cuda"):
        print("numba and triton ran in their simulators: their times mean nothing, their numbers do")
    if not climb.comparison.complete:
        print("interrupted: only what was measured is here")


def cells(climb: Climb, rung: Rung) -> list[str]:
    outcome, moved = climb.outcome(rung), climb.moved[rung.name]
    timed = summary(outcome.samples)
    return [
        rung.name, outcome.verdict, report.milliseconds(timed), report.spread(timed),
        report.rate(climb.problem.flops(), timed), words.cell(climb.speed(rung)),
        report.significant(moved.dram / 1e6), report.significant(moved.sm / 1e6), report.mebibytes(outcome.memory),
        words.error_cell(outcome, "out"), rung.lesson,
    ]  # fmt: skip


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
