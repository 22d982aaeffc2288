"""`tilewise tune` and `tilewise ladder`."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ..plan import AUTO
from . import bench as benches
from . import environment, pages
from . import ladder as rungs
from . import tune as tuning
from .options import (
    FAILED,
    INTERRUPTED,
    Device,
    Dtype,
    HeadDimV,
    Html,
    Json,
    KvHeads,
    LayoutText,
    Lse,
    Quiet,
    Repeat,
    Seed,
    SeqKv,
    Softcap,
    TimeLimit,
    Timing,
    exit_codes,
    leave,
    make_device,
    make_method,
    make_problem,
    measuring,
)
from .output import Outputs, check_folder

Shapes = Annotated[list[str], typer.Option("--shape", help="batch,heads,seq,head_dim of q; may be repeated.")]
Masks = Annotated[
    list[str] | None,
    typer.Option("--mask", help="A mask as in explain, full by default; may be repeated: every shape with every mask."),
]


def tune(
    shapes: Shapes,
    masks: Masks = None,
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    softcap: Softcap = 0.0,
    layout: LayoutText = "bhsd",
    lse: Lse = False,
    backend: Annotated[str, typer.Option(help="The backend to tune; auto: the one the planner chooses.")] = AUTO,
    device: Device = "auto",
    timing: Timing = "auto",
    most: Annotated[int, typer.Option(help="Measure at most so many configs, chosen at random; 0: all.", min=0)] = 0,
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
    """Measure every legal config of a kernel and keep the fastest in your own table, which the planner then uses."""
    with exit_codes():
        outputs = _outputs(json, page, save, results)
        where = make_device(device)
        problems = [
            make_problem(
                shape, kv_heads, seq_kv, head_dim_v, dtype, mask, None, softcap, 0.0, layout, False, lse, False
            )
            for shape in shapes
            for mask in masks or ["full"]
        ]
        settings = tuning.Settings(time_limit=time_limit, most=most, seed=seed)
        sweeps = tuning.run(problems, backend, where, settings, make_method(timing, where), fresh, write=not dry_run)
        for found in sweeps if outputs.text else ():
            tuning.show(found, settings, lines, quiet=quiet)
        done = tuning.record(sweeps, settings, environment.command_line())
        outputs.write(done, lambda: pages.page(done))
        if save:
            print(f"saved {benches.save(done, results)}", file=sys.stderr)
        if not all(found.complete for found in sweeps):
            raise typer.Exit(INTERRUPTED)
        if not all(found.ranked() for found in sweeps):
            raise typer.Exit(FAILED)


def _outputs(json: Path | None, page: Path | None, save: bool, results: Path) -> Outputs:
    if save:
        check_folder("--results", results)
    return Outputs(json, page)


def ladder(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="As in explain; may be repeated.")] = None,
    masks: Masks = None,
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, float32; auto: bf16 on a GPU, float32 on a CPU.")] = AUTO,
    softcap: Softcap = 0.0,
    layout: LayoutText = "bhsd",
    device: Device = "auto",
    timing: Timing = "auto",
    repeat: Repeat = None,
    seconds: Annotated[float, typer.Option(help="Measured seconds per rung and round.", min=1e-3)] = 0.05,
    count: Annotated[bool, typer.Option("--bytes", help="Count bytes with Nsight Compute, too (minutes).")] = False,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    json: Json = None,
    page: Html = None,
) -> None:
    """Attention nine ways, from PyTorch's math to our fused kernels: verified, timed, each with its lesson."""
    with exit_codes():
        outputs = _outputs(json, page, save, results)
        where = make_device(device)
        on_gpu = where.startswith("cuda")
        dtype = dtype if dtype != AUTO else "bf16" if on_gpu else "float32"
        problems = [
            make_problem(shape, kv_heads, seq_kv, None, dtype, mask, None, softcap, 0.0, layout, False, False, False)
            for shape in shapes or (rungs.GPU_SHAPES if on_gpu else rungs.CPU_SHAPES)
            for mask in masks or ["full"]
        ]
        settings = measuring(repeat, 7, 21, round_seconds=seconds, time_limit=time_limit, seed=seed)
        climbs = rungs.run(problems, where, settings, make_method(timing, where), count_bytes=count)
        for climb in climbs if outputs.text else ():
            rungs.show(climb)
        done = rungs.record(climbs, settings, environment.command_line())
        outputs.write(done, lambda: pages.page(done))
        if save:
            print(f"saved {benches.save(done, results)}", file=sys.stderr)
        leave([climb.comparison for climb in climbs])
