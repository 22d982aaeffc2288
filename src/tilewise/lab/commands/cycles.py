"""`tilewise cycles`: its options."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ..measure import environment
from ..render import pages
from ..studies import bench as benches
from ..studies import cycles as cyclecount
from ..studies import kept, suites
from .options import (
    ExtraCandidates,
    Html,
    Json,
    Only,
    Seed,
    TimeLimit,
    exit_codes,
    make_candidates,
    need_device,
)
from .output import open_outputs


def cycles(
    suite: Annotated[str, typer.Option(help="A suite of bench whose rows run on a GPU.")] = "forward",
    only: Only = None,
    candidate: ExtraCandidates = None,
    time_limit: TimeLimit = 300.0,
    seed: Seed = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    json: Json = None,
    page: Html = None,
) -> None:
    """GPU cycles of a suite's candidates by Nsight Compute: a clock that moves with power does not move these."""
    with exit_codes():
        outputs = open_outputs(json, page, save, results)
        need_device("cuda", "run on a machine with an NVIDIA GPU and PyTorch's build for CUDA")
        rows = suites.suite(suite, tuple(only or ()), make_candidates(candidate), seed)
        found = cyclecount.measure(rows, seed, time_limit)
        result = cyclecount.record(suite, found, seed, environment.command_line())
        if save:
            print(f"saved {kept.save(result, results)}", file=sys.stderr)
        outputs.write(result, lambda: pages.page(result))
        if outputs.text:
            cyclecount.show(found)
