"""cycles: GPU cycles of each candidate's forward by Nsight Compute, where wall time would measure the power limit.

A loaded GPU lowers its clock, so times of the same kernel wander by several percent; its cycles hardly do. One process
under `ncu` runs every row and candidate once after a warm-up, with a spin kernel as a milestone between them; what ncu
reports between two milestones belongs to one candidate. The candidates are those of the bench suites, verified there.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import DeviceError
from ..problem import Problem
from . import environment, report
from .candidates import Candidate, make_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .compare import Row

_CYCLES = "sm__cycles_elapsed.max"
_TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
_INSTRUCTIONS = "smsp__inst_executed.sum"
_METRICS = (_CYCLES, _TENSOR, _INSTRUCTIONS)
_MILESTONE = "spin_kernel"
_COLUMNS = ("row", "candidate", ">cycles", ">tensor pipe", ">M instructions", "kernels")


class Cycles(NamedTuple):
    """One candidate's forward on one row: sums over its kernels; the pipe's share is that of the longest."""

    row: str
    candidate: str
    cycles: float
    tensor_percent: float
    instructions: float
    kernels: list[str]


def measure(rows: list[Row], seed: int, time_limit: float) -> list[Cycles]:
    """Run all candidates of all rows under ncu. DeviceError where ncu is absent or may not read the counters."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError(
            "Nsight Compute (ncu) is not on the PATH.\n  What to do: install it with the CUDA toolkit, or use "
            "`tilewise bench`, which needs no counters."
        )
    jobs = [(row, name) for row in rows for name in row.candidates if not Candidate(name).why_not(row.problem)]
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        path = Path(folder) / "jobs.json"
        told = [{"candidate": name, "problem": row.problem.to_dict(), "seed": seed} for row, name in jobs]
        path.write_text(json.dumps(told))
        command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(_METRICS), sys.executable, "-m", __name__, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, check=False)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"ncu gave no answer in {time_limit:g} s.\n  What to do: choose fewer rows with --only."
            ) from None
    legs = list(split_at_milestones(read_csv(done.stdout)))
    if done.returncode or len(legs) != len(jobs):
        said = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
        raise DeviceError(
            f"ncu measured {len(legs)} of {len(jobs)} candidates (exit {done.returncode}). It said:\n    {said}\n"
            "  What to do: ERR_NVGPUCTRPERM means that reading counters needs root or a driver setting on this machine."
        )
    return [_sum(row.name, name, leg) for (row, name), leg in zip(jobs, legs, strict=True)]


def read_csv(text: str) -> list[dict[str, str]]:
    """The rows of ncu's raw page, one a kernel; what ncu and the program print around the table is left out."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    return [row for row in rows if row.get("ID")]  # the second line of the table holds units and no ID


def split_at_milestones(kernels: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """The kernels that follow each milestone."""
    leg: list[dict[str, str]] | None = None
    for kernel in kernels:
        if _MILESTONE in kernel["Kernel Name"]:
            if leg is not None:
                yield leg
            leg = []
        elif leg is not None:
            leg.append(kernel)
    if leg is not None:
        yield leg


def _sum(row: str, candidate: str, leg: list[dict[str, str]]) -> Cycles:
    longest = max(leg, key=lambda kernel: _number(kernel, _CYCLES), default={})
    return Cycles(
        row,
        candidate,
        sum(_number(kernel, _CYCLES) for kernel in leg),
        _number(longest, _TENSOR),
        sum(_number(kernel, _INSTRUCTIONS) for kernel in leg),
        [kernel["Kernel Name"].partition("(")[0] for kernel in leg],
    )


def _number(kernel: dict[str, str], metric: str) -> float:
    try:
        return float(kernel[metric].replace(",", ""))
    except (KeyError, ValueError):
        return math.nan


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


def main(path: str) -> None:
    """Under ncu: each job once, warmed up outside the profiler."""
    for job in json.loads(Path(path).read_text()):
        problem, candidate = Problem.from_dict(job["problem"]), Candidate(job["candidate"])
        with torch.no_grad(), candidate.context():
            forward = candidate.forward(problem, make_inputs(problem, job["seed"], "cuda"))
            for _ in range(2):
                forward()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1)
            forward()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1])
