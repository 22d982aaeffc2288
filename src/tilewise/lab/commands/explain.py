"""`tilewise explain`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ...plan import AUTO, plan
from .command import REQUIRED, grouped, taking
from .options import OF_SHAPES, ProblemOptions, RunOptions, make_target
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def explain(
    problem: Annotated[ProblemOptions, taking(*OF_SHAPES, "lengths", "precision", shape=REQUIRED)],
    run: Annotated[RunOptions, taking("target")],
    output: Annotated[OutputOptions, taking("json")],
    grad: Annotated[bool, typer.Option("--grad", help="Gradients will be wanted.")] = False,
    torch_version: Annotated[
        str | None, typer.Option("--torch", help="Plan for this PyTorch release, e.g. 2.12.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Only this backend, or auto.")] = AUTO,
) -> None:
    """Which backend would run, why, and why not the others. Runs nothing and needs no GPU."""
    chosen = plan(problem.make().with_(needs_grad=grad), make_target(run.target, torch_version), backend)
    output.deliver(chosen.to_dict(), lambda: print(chosen))
