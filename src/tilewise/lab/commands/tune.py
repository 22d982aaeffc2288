"""`tilewise tune`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ...plan import AUTO
from ...target import Target
from .. import report
from ..measure import environment
from ..studies import tune as tuning
from ..studies import tune_report
from .command import FAILED, INTERRUPTED, REQUIRED, grouped, taking
from .options import ProblemOptions, RunOptions  # noqa: TC001  (typer reads the annotations)
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def tune(
    problem: Annotated[
        ProblemOptions,
        taking(
            "masks",
            "kv_heads",
            "seq_kv",
            "head_dim_v",
            "dtype",
            "softcap",
            "layout",
            "lse",
            "deterministic",
            "precision",
            shapes=REQUIRED,
        ),
    ],
    run: Annotated[RunOptions, taking("device", "timing", "time_limit", "seed")],
    output: Annotated[OutputOptions, taking("save", "results", "quiet", "json", "page")],
    grad: Annotated[bool, typer.Option("--grad", help="Tune the backward, instead of the forward.")] = False,
    backend: Annotated[str, typer.Option(help="The backend to tune; auto: the one the planner chooses.")] = AUTO,
    max_configs: Annotated[
        int,
        typer.Option(help="Measure at most so many configs, chosen at random; 0: all.", min=0),
    ] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted sweep measured.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, but write no table.")] = False,
    lines: Annotated[int, typer.Option(help="Lines of each table on the screen; 0: all.", min=0)] = 40,
) -> None:
    """Measure every legal config of a kernel and keep the fastest in your own table, which the planner then uses.

    A forward by default, with --grad a backward; in 16 bits or in float32."""
    where, method = run.where(), run.method()
    problems = [one.with_(needs_grad=grad) for one in problem.each()]
    settings = tuning.Settings(time_limit=run.time_limit, max_configs=max_configs, seed=run.seed)
    sweeps = tuning.run(problems, backend, where, settings, method, fresh, write=not dry_run)

    record = tuning.record(sweeps, settings, environment.command_line())
    shown = tune_report.report_of(record, lines, Target.of(where))
    output.deliver(record, lambda: report.show(shown, **output.looks))
    if not all(found.complete for found in sweeps):
        raise typer.Exit(INTERRUPTED)
    if not all(found.ranked() for found in sweeps):
        raise typer.Exit(FAILED)
