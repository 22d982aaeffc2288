"""`tilewise ladder`: its options."""

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
from ..studies import ladder as rungs
from .options import (
    Device,
    Html,
    Json,
    KvHeads,
    LayoutText,
    Masks,
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
    refuse_ignored,
)
from .output import open_outputs


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
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Attention nine ways, from PyTorch's math to our fused kernels: verified, timed, each with its lesson."""
    with exit_codes():
        outputs = open_outputs(json, page, save, results)
        where = make_device(device)
        on_gpu = where.startswith("cuda")
        if not on_gpu:
            refuse_ignored("on a CPU", "count")
        dtype = dtype if dtype != AUTO else "bf16" if on_gpu else "float32"
        problems = [
            make_problem(shape, kv_heads, seq_kv, None, dtype, mask, None, softcap, 0.0, layout, False, False, False)
            for shape in shapes or (rungs.GPU_SHAPES if on_gpu else rungs.CPU_SHAPES)
            for mask in masks or ["full"]
        ]
        settings = measuring(
            repeat, 7, 21, round_seconds=seconds, time_limit=time_limit, seed=seed, together=on_gpu
        )  # fmt: skip
        climbs = rungs.run(problems, where, settings, make_method(timing, where), count_bytes=count)
        for climb in climbs if outputs.text else ():
            print(rungs.sentence(climb)) if quiet else rungs.show(climb)
        done = rungs.record(climbs, settings, environment.command_line())
        outputs.write(done, lambda: pages.page(done))
        if save:
            print(f"saved {kept.save(done, results)}", file=sys.stderr)
        leave([climb.comparison for climb in climbs])
