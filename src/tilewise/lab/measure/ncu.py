"""Nsight Compute: run candidates under it and read its counters back.

One process under `ncu` runs every job once after a warm-up, with a spin kernel as a milestone between them: what ncu
reports between two milestones belongs to one job.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DeviceError
from ...problem import Problem
from ..candidates.names import Candidate, Forward, Inputs
from ..processes import module_command, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

_MILESTONE = "spin_kernel"
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "ComputeWorkloadAnalysis")
# What is read out of a raw page, whatever else it holds: words, pattern of the metric's name, unit.
_WANTED = (
    ("achieved occupancy", re.compile(r"^sm__warps_active\.avg\.pct_of_peak_sustained_active$"), "%"),
    ("memory throughput", re.compile(r"^gpu__compute_memory_throughput\.avg\.pct_of_peak_sustained_elapsed$"), "%"),
    ("DRAM throughput", re.compile(r"^(gpu__dram|dram)__?throughput\.avg\.pct_of_peak_sustained_elapsed$"), "%"),
    ("tensor pipe", re.compile(r"^sm__(inst_executed_)?pipe_tensor\w*\.\w+\.pct_of_peak_sustained_\w+$"), "%"),
    ("registers", re.compile(r"^launch__registers_per_thread$"), ""),
)  # fmt: skip
_STALL = re.compile(r"^smsp__average_warps?_issue_stalled_(\w+?)(_not_issued)?_per_issue_active\.ratio$")
_STALLS_NAMED = 3

Row = dict[str, str]


def job(candidate: str, problem: Problem, seed: int, what: str, tensors: str = "") -> dict[str, Any]:
    """One candidate's "forward", "backward" alone, or "step" of both."""
    return {"candidate": candidate, "problem": problem.to_dict(), "seed": seed, "what": what, "tensors": tensors}


def run(jobs: list[dict[str, Any]], options: list[str], time_limit: float) -> list[list[Row]]:
    """The raw page of every kernel, by job. DeviceError where ncu is absent or may not read the counters."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError(
            "Nsight Compute (ncu) is not on the PATH.\n  What to do: install it with the CUDA toolkit, or do without "
            "its counters: `tilewise bench` and `tilewise inspect` need none."
        )
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs))
        command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
        command += [*options, *module_command("tilewise.lab.measure.ncu", str(path))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=time_limit, check=False, env=variables()
            )
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"ncu gave no answer in {time_limit:g} s.\n  What to do: ask for fewer rows or candidates, or raise "
                "--time-limit."
            ) from None
    legs = list(split_at_milestones(read_csv(done.stdout)))
    if done.returncode or len(legs) != len(jobs):
        said = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
        raise DeviceError(
            f"ncu measured {len(legs)} of {len(jobs)} candidates (exit {done.returncode}). It said:\n    {said}\n"
            "  What to do: ERR_NVGPUCTRPERM means that reading counters needs root or a driver setting on this machine."
        )
    return legs


def read_csv(text: str) -> list[Row]:
    """The rows of ncu's raw page, one per kernel; what ncu and the program print around the table is left out."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    return [row for row in rows if row.get("ID")]  # the second line of the table holds units and no ID


def split_at_milestones(kernels: list[Row]) -> Iterator[list[Row]]:
    """The kernels that follow each milestone."""
    leg: list[Row] | None = None
    for kernel in kernels:
        if _MILESTONE in kernel["Kernel Name"]:
            if leg is not None:
                yield leg
            leg = []
        elif leg is not None:
            leg.append(kernel)
    if leg is not None:
        yield leg


def number(kernel: Row, metric: str) -> float:
    try:
        return float(kernel[metric].replace(",", ""))
    except (KeyError, ValueError, AttributeError):
        return math.nan


def counters(kernel: Row) -> dict[str, tuple[float, str]]:
    """Occupancy, throughput and pipe use of a kernel, and the reasons for which its warps waited most."""
    found: dict[str, tuple[float, str]] = {}
    for words, pattern, unit in _WANTED:
        metric = next((name for name in kernel if name and pattern.match(name)), None)
        if metric is not None and not math.isnan(number(kernel, metric)):
            found[words] = (number(kernel, metric), unit)
    stalls = {match[1]: number(kernel, name) for name in kernel if name and (match := _STALL.match(name))}
    known = sorted(((value, why) for why, value in stalls.items() if value > 0), reverse=True)
    for value, why in known[:_STALLS_NAMED]:
        found[f"stalled on {why.replace('_', ' ')}"] = (value, " cycles")
    return found


def inspect(names: list[str], problem: Problem, seed: int, tensors: str, time_limit: float) -> dict[str, Any]:
    """Counters of every candidate's kernels; a refusal of ncu's stands in their place."""
    options = [word for section in SECTIONS for word in ("--section", section)]
    what = "step" if problem.needs_grad else "forward"
    jobs = [job(name, problem, seed, what, tensors) for name in names]
    try:
        legs = run(jobs, options, time_limit)
    except DeviceError as error:
        return dict.fromkeys(["ncu"], str(error))
    return {
        name: [{"kernel": kernel["Kernel Name"].partition("(")[0], "counters": counters(kernel)} for kernel in leg]
        for name, leg in zip(names, legs, strict=True)
    }


def main(path: str) -> None:
    """Under ncu: each job once, warmed up outside the profiler. A stream of its own, as in a worker."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for asked in json.loads(Path(path).read_text()):
            problem, candidate = Problem.from_dict(asked["problem"]), Candidate(asked["candidate"])
            with torch.set_grad_enabled(problem.needs_grad), candidate.context(problem):
                inputs = candidate.inputs(problem, asked["seed"], "cuda", asked["tensors"])
                call = _call(asked["what"], candidate.forward(problem, inputs), inputs)
                for _ in range(2):
                    call()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                torch.cuda._sleep(1)
                call()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()


def _call(what: str, forward: Forward, inputs: Inputs) -> Forward:
    """What is measured, as a call without arguments."""

    def out() -> Any:
        result = forward()
        return result[0] if isinstance(result, tuple) else result

    if what == "forward":
        return forward
    if what == "step":
        return lambda: torch.autograd.grad(out(), inputs[:3], inputs.dout)
    recorded = out()
    return lambda: torch.autograd.grad(recorded, inputs[:3], inputs.dout, retain_graph=True)


if __name__ == "__main__":
    main(sys.argv[1])
