"""`tilewise tune` and `tilewise ladder`."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ..plan import AUTO
from . import bench as benches
from . import environment, pages, report
from . import html as html_parts
from . import ladder as rungs
from . import tune as tuning
from .compare import Settings
from .options import (
    FAILED,
    INTERRUPTED,
    Device,
    Dtype,
    HeadDimV,
    KvHeads,
    LayoutText,
    Lse,
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
)

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
    json: Annotated[Path | None, typer.Option(help="Write all that was measured to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report, one self-contained page, to this file.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
) -> None:
    """Measure every legal config of a kernel and keep the fastest in your own table, which the planner then uses."""
    with exit_codes():
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
        for found in sweeps:
            tuning.show(found, settings, lines)
        done = tuning.record(sweeps, settings, environment.command_line())
        if json is not None:
            json.write_text(report.to_json(done) + "\n", encoding="utf-8")
        if html is not None:
            html_parts.write(html, pages.page(done))
        if save:
            print(f"saved {benches.save(done, results)}", file=sys.stderr)
        if not all(found.complete for found in sweeps):
            raise typer.Exit(INTERRUPTED)
        if not all(found.ranked() for found in sweeps):
            raise typer.Exit(FAILED)


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
    repeat: Repeat = 5,
    seconds: Annotated[float, typer.Option(help="Measured seconds a rung and round.", min=1e-3)] = 0.05,
    count: Annotated[bool, typer.Option("--bytes", help="Count bytes with Nsight Compute, too (minutes).")] = False,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write all that was measured to this file.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
) -> None:
    """Attention nine ways, from PyTorch's math to our fused kernels: verified, timed, each with its lesson."""
    with exit_codes():
        where = make_device(device)
        on_gpu = where.startswith("cuda")
        dtype = dtype if dtype != AUTO else "bf16" if on_gpu else "float32"
        problems = [
            make_problem(shape, kv_heads, seq_kv, None, dtype, mask, None, softcap, 0.0, layout, False, False, False)
            for shape in shapes or (rungs.GPU_SHAPES if on_gpu else rungs.CPU_SHAPES)
            for mask in masks or ["full"]
        ]
        settings = Settings(rounds=repeat, round_seconds=seconds, time_limit=time_limit, seed=seed)
        climbs = rungs.run(problems, where, settings, make_method(timing, where), count_bytes=count)
        for climb in climbs:
            rungs.show(climb)
        done = rungs.record(climbs, settings, environment.command_line())
        if json is not None:
            json.write_text(report.to_json(done) + "\n", encoding="utf-8")
        if save:
            print(f"saved {benches.save(done, results)}", file=sys.stderr)
        leave([climb.comparison for climb in climbs])
