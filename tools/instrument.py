"""instrument: does the instrument tell the truth here? Two identical candidates, many times, on a busy machine.

    python tools/instrument.py [--runs 200] [--save]        `make instrument-check`

Every run is a comparison as `inspect` makes it, of one function under two names, each in a process of its own; the
processes are replaced now and then, since where their memory lies is a difference too. Meanwhile processes that compute
in bursts keep the machine busy. A verdict of `faster` or `slower` is a false claim: at most one run in fifty may make
one.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewise.lab import units
from tilewise.lab.commands.command import FAILED, INTERRUPTED
from tilewise.lab.commands.options import make_device
from tilewise.lab.measure import environment, noise
from tilewise.lab.measure.compare import Row, Settings, compare
from tilewise.lab.measure.pool import Pool
from tilewise.lab.processes import code_command
from tilewise.lab.studies import bench, kept
from tilewise.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.lab.measure.compare import Comparison

KIND = "tilewise instrument"
_ALLOWED = 0.02  # of the runs
_PER_PAIR = 20  # runs that a pair of processes serves
_TWINS = """
import torch
def one(q, k, v, problem, bias):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
def two(q, k, v, problem, bias):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
_BURSTS = """
import random, sys, time
chance = random.Random(int(sys.argv[1]))
while True:
    stop = time.perf_counter() + chance.expovariate(10.0)
    while time.perf_counter() < stop:
        sum(range(1000))
    time.sleep(chance.expovariate(10.0))
"""


@contextlib.contextmanager
def loaded(processes: int) -> Iterator[None]:
    """So many processes that compute for about a tenth of a second, then sleep for as long, in random turns."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(processes):
            started.append(subprocess.Popen([*code_command(_BURSTS), str(number)]))  # noqa: PERF401  (ended below)
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def run(runs: int, device: str, settings: Settings, problem: Problem) -> Iterator[Comparison]:
    """Comparison after comparison; the first that an interrupt cuts short is the last."""
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        twins = Path(folder) / "twins.py"
        twins.write_text(_TWINS, encoding="utf-8")
        names = tuple(f"python:{twins}:{name}" for name in ("one", "two"))
        for first in range(0, runs, _PER_PAIR):
            with Pool() as pool:
                for number in range(first, min(runs, first + _PER_PAIR)):
                    row = Row(f"run {number}", problem, names, device)
                    found = compare(row, pool, settings)
                    yield found
                    if not found.complete:
                        return


def record(found: list[Comparison], settings: Settings, problem: Problem, told: dict[str, Any]) -> dict[str, Any]:
    """Every run with its interval, and how many of them claim a difference."""
    speeds = [comparison.versus(comparison.outcomes[0], comparison.outcomes[1]) for comparison in found]
    claims = sum(speed is not None and speed.differs for speed in speeds)
    allowed = int(_ALLOWED * len(found))
    return {
        "kind": KIND,
        "suite": "instrument",
        "sentence": f"{claims} false claims in {len(found)} runs of two identical candidates; {allowed} are allowed",
        "complete": all(comparison.complete for comparison in found),
        "claims": claims,
        "allowed": allowed,
        "problem": problem.to_dict(),
        "settings": asdict(settings),
        "runs": [
            (speed.to_dict() | {"against": "two"} if speed else {})
            | {"looks": comparison.looks, "load": comparison.load, "noise": comparison.noise}
            for speed, comparison in zip(speeds, found, strict=True)
        ],
    } | told


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load", type=int, default=noise.cores(), help="processes that compute meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="add the record to the results folder")
    parser.add_argument("--results", type=Path, default=bench.RESULTS)
    asked = parser.parse_args(arguments)
    device = make_device(asked.device)
    on_gpu = device.startswith("cuda")
    shape, dtype = ((4, 16, 1024, 64), torch.bfloat16) if on_gpu else ((1, 4, 128, 64), torch.float32)
    batch, heads, seq, dim = shape
    problem = Problem(batch, heads, heads, seq, seq, dim, dim, dtype)
    settings = Settings(rounds=7, max_rounds=31, more_seconds=2.0, round_seconds=0.005, seed=asked.seed)
    found: list[Comparison] = []
    start, before, loads = time.monotonic(), noise.load(), [0.0]
    with loaded(asked.load):
        for comparison in run(asked.runs, device, settings, problem):
            found.append(comparison)
            loads.append(noise.load())
    seconds, during = time.monotonic() - start, (min(loads[1:], default=0.0), max(loads))
    told: dict[str, Any] = {
        "provenance": environment.provenance(asked.seed, ["python", "tools/instrument.py", *arguments]),
        "load": {"before": before, "during": during, "processes": asked.load, "cores": noise.cores()},
        "seconds": seconds,
    }
    result = record(found, settings, problem, told)
    print(f"{result['sentence']}; {units.duration(seconds)}, load {during[0]:.1f} to {during[1]:.1f}")
    if asked.save and result["complete"]:
        print(f"saved {kept.save(result, asked.results)}", file=sys.stderr)
    if not result["complete"]:
        return INTERRUPTED
    return FAILED if result["claims"] > result["allowed"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
