"""cycles: GPU cycles of what a suite times, by Nsight Compute, where wall time would measure the power limit.

A loaded GPU lowers its clock, so times of the same kernel wander by several percent; its cycles hardly do. The
candidates are those of the bench suites, verified there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import report
from ..candidates.names import Candidate
from ..measure import environment, ncu

if TYPE_CHECKING:
    from ..measure.compare import Row

_CYCLES = "sm__cycles_elapsed.max"
_TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
_INSTRUCTIONS = "smsp__inst_executed.sum"
_METRICS = (_CYCLES, _TENSOR, _INSTRUCTIONS)
_COLUMNS = ("row", "candidate", ">cycles", ">tensor pipe", ">M instructions", "kernels")


class Cycles(NamedTuple):
    """One candidate on one row: sums over its kernels; the pipe's share is that of the longest."""

    row: str
    candidate: str
    cycles: float
    tensor_percent: float
    instructions: float
    kernels: list[str]


def measure(rows: list[Row], seed: int, time_limit: float) -> list[Cycles]:
    """Run all candidates of all rows under ncu. DeviceError where ncu is absent or may not read the counters."""
    asked = [(row, name) for row in rows for name in row.candidates if not Candidate(name).why_not(row.problem)]
    jobs = [ncu.job(name, row.problem, seed, _what(row)) for row, name in asked]
    legs = ncu.run(jobs, ["--metrics", ",".join(_METRICS)], time_limit)
    return [_sum(row.name, name, leg) for (row, name), leg in zip(asked, legs, strict=True)]


def _what(row: Row) -> str:
    return row.timed[0] if len(row.timed) == 1 else "step"


def _sum(row: str, candidate: str, leg: list[dict[str, str]]) -> Cycles:
    longest = max(leg, key=lambda kernel: ncu.number(kernel, _CYCLES), default={})
    return Cycles(
        row,
        candidate,
        sum(ncu.number(kernel, _CYCLES) for kernel in leg),
        ncu.number(longest, _TENSOR),
        sum(ncu.number(kernel, _INSTRUCTIONS) for kernel in leg),
        [kernel["Kernel Name"].partition("(")[0] for kernel in leg],
    )


def record(name: str, found: list[Cycles], seed: int, command: list[str]) -> dict[str, Any]:
    """The measurements with where they come from."""
    return {
        "kind": "tilewise cycles",
        "suite": f"{name}-cycles",
        "metrics": list(_METRICS),
        "provenance": environment.provenance(seed, command),
        "rows": [entry._asdict() for entry in found],
    }


def show(found: list[Cycles]) -> None:
    cells = [
        [
            entry.row,
            entry.candidate,
            f"{entry.cycles:,.0f}",
            f"{entry.tensor_percent:.1f}%",
            f"{entry.instructions / 1e6:.1f}",
            ", ".join(kernel[:48] for kernel in entry.kernels),
        ]
        for entry in found
    ]
    report.print_table(_COLUMNS, cells)
