"""`tilewise tune`: its options."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...plan import AUTO
from ..measure import environment
from ..render import pages
from ..studies import bench as benches
from ..studies import kept
from ..studies import tune as tuning
from .options import (
    FAILED,
    INTERRUPTED,
    Deterministic,
    Device,
    Dtype,
    HeadDimV,
    Html,
    Json,
    KvHeads,
    LayoutText,
    Lse,
    Masks,
    Quiet,
    Seed,
    SeqKv,
    Softcap,
    TimeLimit,
    Timing,
    exit_codes,
    make_device,
    make_method,
    make_problem,
)
from .output import open_outputs

Shapes = Annotated[list[str], typer.Option("--shape", help="batch,heads,seq,head_dim of q; may be repeated.")]


def tune(
    shapes: Shapes,
    masks: Masks = None,
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    softcap: Softcap = 0.0,
    layout: LayoutText = "bhsd",
    grad: Annotated[bool, typer.Option("--grad", help="Tune the backward, instead of the forward.")] = False,
    lse: Lse = False,
    deterministic: Deterministic = False,
    precision: Annotated[str, typer.Option(help="exact, or for float32 also tf32.")] = "exact",
    backend: Annotated[str, typer.Option(help="The backend to tune; auto: the one the planner chooses.")] = AUTO,
    device: Device = "auto",
    timing: Timing = "auto",
    max_configs: Annotated[
        int,
        typer.Option(
            "--max-configs", "--most", help="Measure at most so many configs, chosen at random; 0: all.", min=0
        ),
    ] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted sweep measured.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, but write no table.")] = False,
    lines: Annotated[int, typer.Option(help="Lines of each table on the screen; 0: all.", min=0)] = 40,
    time_limit: TimeLimit = 30.0,
    seed: Seed = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Measure every legal config of a kernel and keep the fastest in your own table, which the planner then uses.

    A forward by default, with --grad a backward; in 16 bits or in float32."""
    with exit_codes():
        outputs = open_outputs(json, page, save, results)
        where = make_device(device)
        problems = [
            make_problem(
                shape, kv_heads, seq_kv, head_dim_v, dtype, mask, None, softcap, 0.0, layout, grad, lse, deterministic
            ).with_(precision=precision)
            for shape in shapes
            for mask in masks or ["full"]
        ]
        settings = tuning.Settings(time_limit=time_limit, max_configs=max_configs, seed=seed)
        sweeps = tuning.run(problems, backend, where, settings, make_method(timing, where), fresh, write=not dry_run)
        for found in sweeps if outputs.text else ():
            tuning.show(found, settings, lines, quiet=quiet)
        done = tuning.record(sweeps, settings, environment.command_line())
        outputs.write(done, lambda: pages.page(done))
        if save:
            print(f"saved {kept.save(done, results)}", file=sys.stderr)
        if not all(found.complete for found in sweeps):
            raise typer.Exit(INTERRUPTED)
        if not all(found.ranked() for found in sweeps):
            raise typer.Exit(FAILED)
