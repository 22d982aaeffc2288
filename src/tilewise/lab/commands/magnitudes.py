"""`tilewise magnitudes`: its options."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...target import Target
from .. import report
from ..candidates.names import OURS
from ..measure import environment
from ..render import magnitudes_plot
from ..studies import magnitudes as measuring
from ..studies import magnitudes_report
from .command import FAILED, INTERRUPTED, grouped, taking
from .options import ProblemOptions, RunOptions  # noqa: TC001  (typer reads the annotations)
from .output import OutputOptions, check_file, check_folder


@grouped
def magnitudes(
    problem: Annotated[ProblemOptions, taking("mask", shape="1,4,1024,64", dtype="float32")],
    run: Annotated[RunOptions, taking("device", "candidate", "seed")],
    output: Annotated[OutputOptions, taking("save", "results", "quiet", "json", "page")],
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this SVG file.")] = None,
) -> None:
    """Errors against float64 as values, scores and gradients grow or shrink: ours and PyTorch's. Leaves with 1 if ours
    are over their budget."""
    if plot is not None:
        check_folder("--plot", plot.parent)
        check_file("--plot", plot)
    asked = problem.make().with_(needs_grad=True)
    where = run.where()
    with report.Bar(measuring.steps()) as bar:
        found = measuring.measure(asked, where, run.seed, run.extra(), bar.tick)
    provenance = environment.provenance(run.seed, environment.command_line())
    record = measuring.to_dict(asked, Target.of(where).name, found, provenance)
    output.deliver(record, lambda: report.show(magnitudes_report.report_of(record), **output.looks))
    if plot is not None and found:
        magnitudes_plot.draw(record, plot)
        typer.echo(f"drew {plot}", err=True)
    if not record["complete"]:
        raise typer.Exit(INTERRUPTED)
    if any(name == OURS for name, _ in magnitudes_report.over_budget(record)):
        raise typer.Exit(FAILED)
