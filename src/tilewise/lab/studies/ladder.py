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
from typing import TYPE_CHECKING, Any

from ...errors import DeviceError
from ...ladder import RUNGS, numba, traffic
from ...plan import BACKENDS
from ...problem import Problem
from ...target import Target
from ...triton import backend as triton
from .. import report
from ..candidates.names import Candidate
from ..candidates.variants import RUNG, backend_of
from ..measure import environment, ncu, stages
from ..measure.compare import (
    REFUSED,
    Comparison,
    Outcome,
    Row,
    compare,
    read_comparison,
    steps,
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

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Climb:
        return Climb(
            Problem.from_dict(values["problem"]),
            values["device"],
            read_comparison(values["comparison"]),
            {name: traffic.Traffic(**moved) for name, moved in values["traffic"].items()},
            values["refused"],
            values["parts"],
            values["counted"],
        )


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
