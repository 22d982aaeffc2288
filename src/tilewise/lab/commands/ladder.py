"""`tilewise ladder`: its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ...plan import AUTO
from .. import report
from ..measure import environment
from ..studies import ladder as rungs
from ..studies import ladder_report
from .command import grouped, refuse_ignored, taking
from .options import ProblemOptions, RunOptions, leave
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def ladder(
    problem: Annotated[ProblemOptions, taking("shapes", "masks", "kv_heads", "seq_kv", "softcap", "layout")],
    run: Annotated[RunOptions, taking("device", "timing", "repeat", "seed", time_limit=60.0)],
    output: Annotated[OutputOptions, taking("save", "results", "quiet", "json", "page")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16, float32; auto: bf16 on a GPU, float32 on a CPU.")] = AUTO,
    seconds: Annotated[float, typer.Option(help="Measured seconds per rung and round.", min=1e-3)] = 0.05,
    count: Annotated[bool, typer.Option("--bytes", help="Count bytes with Nsight Compute, too (minutes).")] = False,
) -> None:
    """Attention nine ways, from PyTorch's math to our fused kernels: verified, timed, each with its lesson."""
    where = run.where()
    on_gpu = where.startswith("cuda")
    if not on_gpu:
        refuse_ignored("on a CPU", "count")
    asked = replace(problem, dtype=dtype if dtype != AUTO else "bf16" if on_gpu else "float32")
    problems = asked.each(rungs.GPU_SHAPES if on_gpu else rungs.CPU_SHAPES)
    settings = run.settings(7, 21, round_seconds=seconds, together=on_gpu)
    climbs = rungs.run(problems, where, settings, run.method(), count_bytes=count)

    record = rungs.record(climbs, settings, environment.command_line())
    output.deliver(record, lambda: report.show(ladder_report.report_of(record), **output.looks))
    leave([climb.comparison for climb in climbs])
