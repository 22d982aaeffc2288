"""What the tile map of a boolean tensor costs, beside the forward and the step that it serves.

    python benchmarks/tile_map.py --save                     # on a GPU that has tile maps, in about a minute
    python benchmarks/tile_map.py --only "random mask" --seq 4100     # rows at any place in memory

The problems are those of the suite `variants` whose mask is a boolean tensor. A map is made once per state of its
tensor, so the suite does not see it. Here every call finds its tensor changed, and launches what a forward prepares of
it, or a forward and its backward, without the attention kernels. Before anything is timed, a forward whose map was just
made is held against float64. Maps, forward and step are timed back to back on the GPU, in interleaved rounds.

A map may take 5% of the forward that it serves, or as long as one read of the tensor at three quarters of the memory's
bandwidth and 4 us.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from suites import variants

from tilewise import Target
from tilewise.engine import run
from tilewise.engine.program import Program
from tilewise.engine.rules import in_terms
from tilewise.lab import report
from tilewise.lab.candidates.inputs import make_inputs
from tilewise.lab.candidates.names import OURS, Candidate
from tilewise.lab.measure import accuracy, environment, timing
from tilewise.lab.measure.compare import median
from tilewise.lab.model import launched
from tilewise.lab.studies import kept
from tilewise.plan import plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tilewise.lab.candidates.inputs import Inputs
    from tilewise.lab.measure.compare import Row
    from tilewise.plan import Plan
    from tilewise.problem import Problem

    Call = Callable[[], object]

ROOT = Path(__file__).resolve().parent.parent
KIND, SUITE, SEQ = "tilewise tile map", "tile-map", variants.SEQ
SHARE = 0.05  # of the forward that it serves: what a map may take,
BANDWIDTH, MORE_SECONDS = 0.75, 4e-6  # or a read of the tensor at this share of the memory's rate, and a little more
COLUMNS = ("mask", ">MiB", ">map, us", ">of the forward", ">allowed, us", ">step's map, us", ">of the step", "reached")
LEGEND = (
    f"Allowed: {SHARE:.0%} of the forward, or one read of the tensor at {BANDWIDTH:.0%} of the memory's bandwidth "
    f"and {1e6 * MORE_SECONDS:.0f} us. A step's map includes the forward's."
)
MASK = "keep"  # the operand that a boolean mask is to our programs


def asked(target: Target, only: tuple[str, ...] = (), seq: int = SEQ) -> list[tuple[Row, Plan]]:
    """The forwards of the suite whose kernels go by a tile map, and their plans; `only` those whose names hold one of
    these texts."""
    rows = [row for row in variants.rows(seq) if row.timed == ("forward",)]
    named = [row for row in rows if not only or any(text in row.name for text in only)]
    planned = [(row, plan(row.problem, target)) for row in named]
    return [(row, chosen) for row, chosen in planned if any(one.operand == MASK for one in map_of(chosen).prepared)]


def map_of(chosen: Plan, *, step: bool = False) -> Program:
    """What a plan's forward, or a `step` of both, prepares before its own launches, and these left out."""
    programs = (chosen.forward, chosen.backward) if step else (chosen.forward,)
    there = [program for program in programs if program is not None]
    return Program((), prepared=tuple(one for program in there for one in program.prepared))


def mask_of(inputs: Inputs) -> torch.Tensor:
    mask = inputs.operands[MASK]
    assert mask.dtype == torch.bool
    return mask


def map_maker(program: Program, problem: Problem, mask: torch.Tensor) -> Call:
    """A call that makes the map of a mask that has changed since the last one."""
    operand = next(one for one in in_terms(problem).operands if one.name == MASK)
    expanded = operand.expanded(mask, problem)
    prepare = run.load(program, {MASK: expanded}, mask.device.index or 0)
    nothing = mask[:0]

    def make() -> None:
        nothing.zero_()  # counts as a change of the mask, and launches nothing
        prepare(expanded)

    return make


def calls_of(row: Row, chosen: Plan, inputs: Inputs) -> dict[str, Call]:
    """What is timed, by its name in the record."""
    problem, mask = row.problem, mask_of(inputs)
    forward = Candidate(OURS).forward(problem, inputs)
    wanted = [inputs.q, inputs.k, inputs.v]
    return {
        "forward": forward,
        "forward's map": map_maker(map_of(chosen), problem, mask),
        "step": lambda: torch.autograd.grad(forward(), wanted, inputs.dout),
        "step's map": map_maker(map_of(chosen, step=True), problem, mask),
    }


def wrong(problem: Problem, inputs: Inputs, forward: Call, device: str) -> list[str]:
    """What breaks the budget of a forward whose map was just made, in words."""
    problem = problem.with_(needs_grad=False)
    mask_of(inputs)[:0].zero_()
    with torch.no_grad():
        sample = accuracy.choose(problem, 0, device)
        true = accuracy.truth(inputs, problem, sample)
        allowed = accuracy.budgets(accuracy.errors(accuracy.plain(inputs, problem, sample), true), problem)
        out = forward()
        assert isinstance(out, torch.Tensor)
        found = accuracy.errors(accuracy.select({"out": out}, problem, sample), true)
    return accuracy.excess(found, allowed)


def measured(calls: Mapping[str, Call], rounds: int, seconds: float, method: str) -> dict[str, list[float]]:
    """Seconds per call, round by round, in a random order."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    known: dict[str, timing.Kept] = {name: {} for name in calls}
    order = random.Random(4)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            found[name].append(median(timing.measure(calls[name], method, seconds, kept=known[name])))
    return found


def row_of(row: Row, chosen: Plan, device: str, rounds: int, seconds: float) -> dict[str, Any]:
    """A row of the record."""
    inputs = make_inputs(row.problem, 0, device, contents=row.contents)
    mask, calls = mask_of(inputs), calls_of(row, chosen, inputs)
    told = {"row": row.name.removesuffix(" forward"), "mask": list(mask.shape), "bytes": mask.numel()}
    errors = wrong(row.problem, inputs, calls["forward"], device)
    times = {} if errors else measured(calls, rounds, seconds, "events" if device == "cuda" else "wall")
    return {**told, "backend": chosen.backend, "wrong": errors, "seconds": times}


def allowed(size: int, bytes_per_second: float, forward: float) -> float:
    """Seconds that the map of so many bytes may take beside a forward."""
    return max(SHARE * forward, size / (BANDWIDTH * bytes_per_second) + MORE_SECONDS)


def cells(record: dict[str, Any]) -> list[list[str]]:
    """A line of the table per row of a record."""
    return [_cells(row, record["settings"]["bytes_per_second"]) for row in record["rows"]]


def _cells(row: dict[str, Any], bytes_per_second: float) -> list[str]:
    size = f"{row['bytes'] / 2**20:.3g}"
    if row["wrong"]:
        return [row["row"], size, *["-"] * 5, f"wrong: {'; '.join(row['wrong'])}"]
    times = {name: median(found) for name, found in row["seconds"].items()}
    made, for_step = times["forward's map"], times["step's map"]
    limit = allowed(row["bytes"], bytes_per_second, times["forward"])
    shares = made / times["forward"], for_step / times["step"]
    figures = f"{1e6 * made:.1f}", f"{shares[0]:.1%}", f"{1e6 * limit:.1f}", f"{1e6 * for_step:.1f}", f"{shares[1]:.1%}"
    return [row["row"], size, *figures, "yes" if made <= limit else "MISSED"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="rows whose names hold this text; all by default")
    parser.add_argument("--seq", type=int, default=SEQ, help="rows and keys; lengths in proportion")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each call in a round")
    parser.add_argument("--save", action="store_true", help="keep the record in benchmarks/results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU, and PyTorch sees none: run it on a machine that has one")
    device = "cuda"
    target = Target.of(torch.device(device))
    provenance = environment.provenance(0, environment.command_line())
    rows = [
        row_of(row, chosen, device, options.rounds, options.seconds)
        for row, chosen in asked(target, tuple(options.only), options.seq)
    ]
    settings = {"rounds": options.rounds, "round_seconds": options.seconds, "only": options.only, "seq": options.seq}
    settings["bytes_per_second"] = target.dram_bytes_per_s
    record = {
        "kind": KIND,
        "suite": SUITE,
        "provenance": provenance,
        "settings": settings,
        "kernels": launched.by_this_process(),
        "rows": rows,
    }
    report.print_table(COLUMNS, cells(record))
    if options.save:
        print(f"saved {kept.save(record, ROOT / 'benchmarks' / 'results')}", file=sys.stderr)


if __name__ == "__main__":
    main()
