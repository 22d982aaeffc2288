"""`tilewise cycles`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import report
from ..measure import environment
from ..studies import cycles as cyclecount
from ..studies import suites
from .command import grouped, taking
from .options import Only, RunOptions, need_device
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def cycles(
    run: Annotated[RunOptions, taking("candidate", "seed", time_limit=300.0)],
    output: Annotated[OutputOptions, taking("save", "results", "json", "page")],
    suite: Annotated[str, typer.Option(help="A suite of bench whose rows run on a GPU.")] = "forward",
    only: Only = None,
) -> None:
    """GPU cycles of a suite's candidates by Nsight Compute: a clock that moves with power does not move these."""
    need_device("cuda", "run on a machine with an NVIDIA GPU and PyTorch's build for CUDA")
    rows = suites.suite(suite, tuple(only or ()), run.extra(), run.seed)
    found = cyclecount.measure(rows, run.seed, run.time_limit)
    result = cyclecount.record(suite, found, run.seed, environment.command_line())
    output.deliver(result, lambda: report.show(cyclecount.report_of(result)))
