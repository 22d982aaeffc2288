"""cycles: GPU cycles of what a suite times, by Nsight Compute, where wall time would measure the power limit.

A loaded GPU lowers its clock, so times of the same kernel wander by several percent; its cycles hardly do. The
candidates are those of the bench suites, verified there.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import report, units
from ..candidates import names
from ..measure import environment, ncu
from ..report import Bars, Candidate, Kernel, Line, Phrase, Report, Section, Table, Words

if TYPE_CHECKING:
    from ..measure.compare import Row
    from ..report import Inline

_CYCLES = "sm__cycles_elapsed.max"
_TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
_INSTRUCTIONS = "smsp__inst_executed.sum"
_METRICS = (_CYCLES, _TENSOR, _INSTRUCTIONS)
_NUMBERS = ("cycles", "tensor_percent", "instructions")
_LEAD = (
    "Cycles of one call by Nsight Compute, summed over its kernels. A clock that moves with power does not move them, "
    "and one call has no interval: a difference of a few percent is no claim."
)
_COLUMNS = ("candidate", ">cycles", ">tensor pipe", ">M instructions", "kernels")


class Cycles(NamedTuple):
    """One candidate on one row: sums over its kernels; the pipe's share is that of the longest."""

    row: str
    candidate: str
    cycles: float
    tensor_percent: float
    instructions: float
    kernels: list[str]

    @property
    def pipe(self) -> str:
        return f"{self.tensor_percent:.1f}%" if math.isfinite(self.tensor_percent) else ""


def measure(rows: list[Row], seed: int, time_limit: float) -> list[Cycles]:
    """Run all candidates of all rows under ncu. DeviceError where ncu is absent or may not read the counters."""
    asked = [(row, name) for row in rows for name in row.candidates if not names.Candidate(name).why_not(row.problem)]
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


def report_of(told: dict[str, Any]) -> Report:
    """Of a record: the candidates of every row, the fewest cycles first."""
    entries = [Cycles(**entry | {name: _number(entry[name]) for name in _NUMBERS}) for entry in told["rows"]]
    by_row = {name: list(group) for name, group in groupby(entries, lambda entry: entry.row)}
    calls = units.counted(len(entries), "call")
    machine = report.machine_of(told.get("provenance") or {}, "cuda")
    return Report(
        "cycles",
        str(told["suite"]).removesuffix("-cycles"),
        f"Cycles of {calls}",
        "",
        [units.counted(len(by_row), "row"), *machine],
        _LEAD,
        [f"{one.row}, {one.candidate}: no kernel was seen" for one in entries if not one.kernels],
        sections=[_section(name, row) for name, row in by_row.items()],
    )


def _number(value: float | str | None) -> float:
    """nan for what was not counted; JSON has it as text, and earlier records as null."""
    return math.nan if value is None else float(value)


def _listed(kernels: list[str]) -> Inline:
    pieces = [piece for kernel in kernels for piece in (", ", Kernel(kernel))]
    return Phrase(pieces[1:]) if pieces else "-"


def _section(name: str, entries: list[Cycles]) -> Section:
    known = sorted((one for one in entries if math.isfinite(one.cycles)), key=lambda one: one.cycles)
    bars = [Line(one.candidate, one.cycles, f"{one.cycles:,.0f}", aside=one.pipe) for one in known]
    rows: list[list[Inline]] = [
        [
            Candidate(one.candidate),
            f"{one.cycles:,.0f}" if one in known else "-",
            one.pipe or "-",
            f"{one.instructions / 1e6:.1f}" if math.isfinite(one.instructions) else "-",
            _listed(one.kernels),
        ]
        for one in [*known, *(one for one in entries if one not in known)]
    ]
    caption = "Cycles of one call; beside them, how busy the tensor pipe is in the longest kernel"
    nothing = [] if known else [Words("Nothing was counted.", is_note=True)]
    return Section(name, [Bars(bars, caption, in_text=False), Table(_COLUMNS, rows, f"Cycles of {name}"), *nothing])
