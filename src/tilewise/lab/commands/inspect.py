"""`tilewise inspect`: its options, and which of the two ways to look they ask for."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated, Any

import typer

from ...errors import InvalidInput
from ...plan import AUTO
from .. import report
from ..candidates import flags
from ..candidates.names import OURS, TORCH_DEFAULT
from ..measure import environment
from ..measure.compare import REFUSED
from ..model import static
from ..render import inspect_report
from ..studies import bench as benches
from ..studies import elsewhere, kept
from ..studies import inspect as inspection
from .command import DEVICE, grouped, refuse_ignored, taking
from .options import OF_TENSORS, ProblemOptions, RunOptions, leave, make_candidates, make_target
from .output import OutputOptions, check_file

ARTICLE = "flags"
_OF_RUNS = (
    "device", "timing", "flush", "candidate", "only", "experiment", "trace", "counters", "sass", "repeat", "time_limit",
    "save", "results",
)  # fmt: skip


@grouped
def inspect(
    problem: Annotated[ProblemOptions, taking(*OF_TENSORS)],
    run: Annotated[
        RunOptions,
        taking("device", "timing", "flush", "candidate", "only", "target", "repeat", "time_limit", "seed"),
    ],
    output: Annotated[OutputOptions, taking("save", "results", "record", "verbose", "quiet", "json", "page")],
    experiment: Annotated[str, typer.Option(help=f"{ARTICLE}: PyTorch's kernel switches, one setting per row.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Write tilewise's Chrome/Perfetto trace to this file.")] = None,
    counters: Annotated[bool, typer.Option("--ncu", help="Counters of every kernel by Nsight Compute.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The instruction mix of our kernels.")] = False,
    without_gpu: Annotated[
        bool, typer.Option("--static", help="Run nothing: compile for --target and tell what follows.")
    ] = False,
    backend: Annotated[str, typer.Option(help="With --static: only this backend, or auto.")] = AUTO,
) -> None:
    """Run every candidate that can compute a problem, each in its own process: verified, timed and profiled."""
    if output.record is not None:
        refuse_ignored("with --record", *OF_TENSORS, *_OF_RUNS, "target", "without_gpu", "backend", "seed")
        with kept.shown(output.record):
            _show(_read(output.record), output)
        return
    asked = problem.make()
    provenance = {"provenance": environment.provenance(run.seed, environment.command_line())}
    if without_gpu:
        refuse_ignored("with --static, which runs nothing", *_OF_RUNS, "page")
        known = static.inspect(asked, make_target(run.target, None), backend)
        output.deliver(known.to_dict() | provenance, lambda: static.show(known))
        raise typer.Exit(DEVICE if known.failed else 0)
    refuse_ignored("without --static: what runs is what is measured, on --device", "target", "backend")
    if experiment not in ("", ARTICLE):
        raise InvalidInput("--experiment", repr(experiment), ARTICLE, "leave it out, or name that")
    if experiment:
        refuse_ignored(f"with --experiment {experiment}, which has candidates of its own", "only")
    where, method = run.where(), run.method()
    if run.flush and (method or "events") != "events":
        raise InvalidInput("--flush", f"--timing {run.timing}", "--timing events", "leave one of them out")
    check_file("--trace", trace)
    on_gpu = where.startswith("cuda")
    if not on_gpu:
        refuse_ignored("on a CPU", "flush", "counters", "sass")
    found = inspection.inspect(
        asked,
        where,
        run.settings(7, 47, round_seconds=0.05, together=on_gpu),
        extra=run.extra(),
        only=(OURS, TORCH_DEFAULT, *flags.SWITCHES) if experiment else make_candidates(run.only),
        method=method,
        flush=run.flush,
        tensors=problem.path,
        trace=str(trace) if trace else "",
        sass=sass,
    )
    if counters and found.comparison.complete:
        inspection.count(found, run.seed, problem.path, 10 * run.time_limit)
    told = found.to_dict() | provenance
    if found.target.is_cpu:
        told["elsewhere"] = elsewhere.elsewhere(asked, benches.RESULTS)
    told["suite"] = inspection.record_name(asked, experiment)
    _show(told, output)
    if not any(o.verdict != REFUSED for o in found.comparison.outcomes):
        raise typer.Exit(DEVICE)
    leave([found.comparison])


def _show(told: dict[str, Any], output: OutputOptions) -> None:
    output.deliver(told, lambda: report.show(inspect_report.report_of(told), **output.looks))


def _read(path: Path) -> dict[str, Any]:
    told = kept.expanded(kept.read(path))
    if told["kind"] != inspection.KIND:
        raise InvalidInput("--record", f"{path} of kind {told['kind']!r}", inspection.KIND, "name such a record")
    return told
