"""`tilewise magnitudes`: its options."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...target import Target
from .. import report
from ..candidates.names import OURS
from ..measure import environment
from ..render import magnitudes_plot, pages
from ..studies import bench, kept
from ..studies import magnitudes as measuring
from .options import (
    FAILED,
    INTERRUPTED,
    Device,
    Dtype,
    ExtraCandidates,
    Html,
    Json,
    MaskText,
    Quiet,
    Seed,
    exit_codes,
    make_candidates,
    make_device,
)
from .options import make_problem as parse_problem
from .output import check_file, check_folder, open_outputs


def magnitudes(
    shape: Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q.")] = "1,4,1024,64",
    dtype: Dtype = "float32",
    mask: MaskText = "full",
    device: Device = "auto",
    candidate: ExtraCandidates = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this SVG file.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = bench.RESULTS,
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Errors against float64 as values, scores and gradients grow or shrink: ours and PyTorch's. Leaves with 1 if ours
    are over their budget."""
    with exit_codes():
        outputs = open_outputs(json, page, save, results)
        if plot is not None:
            check_folder("--plot", plot.parent)
            check_file("--plot", plot)
        problem = parse_problem(
            shape, None, None, None, dtype, mask, None, 0.0, 0.0, "bhsd", True, False, False
        )  # fmt: skip
        where = make_device(device)
        with report.Bar(measuring.steps()) as bar:
            found = measuring.measure(problem, where, seed, make_candidates(candidate), bar.tick)
        provenance = environment.provenance(seed, environment.command_line())
        record = measuring.to_dict(problem, Target.of(where).name, found, provenance)
        over = measuring.over_budget(found)
        complete = measuring.complete(found)
        outputs.write(record, lambda: pages.page(record))
        if outputs.text and not quiet:
            print(f"{problem} on {Target.of(where).name}")
            report.print_table(measuring.COLUMNS, measuring.lines(found))
        if outputs.text:
            print("\n".join(f"OVER BUDGET: {text}" for text in over) or "every error is within its budget")
        if outputs.text and not complete:
            print("interrupted: only what was measured is here")
        if save:
            typer.echo(f"saved {kept.save(record, results)}", err=True)
        if plot is not None and found:
            magnitudes_plot.draw(record, plot)
            typer.echo(f"drew {plot}", err=True)
        if not complete:
            raise typer.Exit(INTERRUPTED)
        if any(text.startswith(f"{OURS}:") for text in over):
            raise typer.Exit(FAILED)
