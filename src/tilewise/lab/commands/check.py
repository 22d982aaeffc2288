"""`tilewise check`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import report
from ..measure import environment
from ..measure.compare import Settings
from ..studies import check as checking
from .command import FAILED, INTERRUPTED, grouped, taking
from .options import WITHOUT_DROPOUT, ProblemOptions, RunOptions, make_candidates
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def check(
    problem: Annotated[ProblemOptions, taking(*WITHOUT_DROPOUT)],
    run: Annotated[RunOptions, taking("device", "candidate", "only", "seed", time_limit=60.0)],
    output: Annotated[OutputOptions, taking("verbose", "quiet", "json", "page")],
) -> None:
    """Is a kernel right here? Every backend that takes the problem against float64 and against the others, with the
    place of the largest error. Leaves with 1 if one is outside its budget."""
    found = checking.run(
        problem.make(),
        run.where(),
        Settings(time_limit=run.time_limit, seed=run.seed),
        extra=run.extra(),
        only=make_candidates(run.only),
        tensors=problem.path,
    )
    provenance = environment.provenance(run.seed, environment.command_line())
    shown = checking.report_of(found, provenance)
    output.deliver(found.to_dict() | {"provenance": provenance}, lambda: report.show(shown, **output.looks))
    if not found.complete:
        raise typer.Exit(INTERRUPTED)
    if found.failed:
        raise typer.Exit(FAILED)
