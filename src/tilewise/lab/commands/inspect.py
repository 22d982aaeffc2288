"""`tilewise inspect`: its options, and which of the two ways to look they ask for."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...errors import InvalidInput
from ...plan import AUTO
from ..candidates import flags, inputs
from ..candidates.names import OURS, TORCH_DEFAULT
from ..measure import environment
from ..measure.compare import REFUSED
from ..model import static
from ..render import inspect_text, pages
from ..studies import bench as benches
from ..studies import elsewhere, kept
from ..studies import inspect as inspection
from .options import (
    DEVICE,
    Deterministic,
    Device,
    Dropout,
    Dtype,
    ExtraCandidates,
    Flush,
    FormerGrad,
    Grad,
    HeadDimV,
    Html,
    Json,
    KvHeads,
    LayoutText,
    Lse,
    MaskText,
    Quiet,
    Record,
    Repeat,
    Scale,
    Seed,
    SeqKv,
    Softcap,
    TargetName,
    TimeLimit,
    Timing,
    Verbose,
    exit_codes,
    leave,
    make_candidates,
    make_device,
    make_method,
    make_problem,
    make_target,
    measuring,
    refuse_ignored,
)
from .output import Outputs, check_file, open_outputs

ARTICLE = "flags"
_OF_SHAPES = (
    "shape", "kv_heads", "seq_kv", "head_dim_v", "dtype", "mask", "scale", "softcap", "dropout", "layout", "lse",
    "deterministic",
)  # fmt: skip
_OF_RUNS = (
    "device", "timing", "flush", "candidate", "only", "experiment", "trace", "counters", "sass", "repeat", "time_limit",
    "save", "results", "page",
)  # fmt: skip


def inspect(
    shape: Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q, e.g. 1,32,4096,128.")] = "",
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    mask: MaskText = "full",
    scale: Scale = None,
    softcap: Softcap = 0.0,
    dropout: Dropout = 0.0,
    layout: LayoutText = "bhsd",
    lse: Lse = False,
    deterministic: Deterministic = False,
    tensors: Annotated[
        Path | None, typer.Option(help="Instead of --shape: a file of torch.save((q, k, v)), as a model had them.")
    ] = None,
    grad: Grad = False,
    former_grad: FormerGrad = False,
    device: Device = "auto",
    timing: Timing = "auto",
    flush: Flush = False,
    candidate: ExtraCandidates = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this candidate (may be repeated).")] = None,
    experiment: Annotated[str, typer.Option(help=f"{ARTICLE}: PyTorch's kernel switches, one setting per row.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Write tilewise's Chrome/Perfetto trace to this file.")] = None,
    counters: Annotated[bool, typer.Option("--ncu", help="Counters of every kernel by Nsight Compute.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The instruction mix of our kernels.")] = False,
    without_gpu: Annotated[
        bool, typer.Option("--static", help="Run nothing: compile for --target and tell what follows.")
    ] = False,
    target: TargetName = "auto",
    backend: Annotated[str, typer.Option(help="With --static: only this backend, or auto.")] = AUTO,
    repeat: Repeat = None,
    time_limit: TimeLimit = 30.0,
    seed: Seed = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    record: Record = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Run every candidate that can compute a problem, each in its own process: verified, timed and profiled."""
    with exit_codes():
        if record is not None:
            refuse_ignored("with --record", *_OF_SHAPES, *_OF_RUNS[:-1], "grad", "former_grad", "tensors", "target",
                           "without_gpu", "backend", "seed")  # fmt: skip
            _show_again(record, Outputs(json, page), verbose, quiet)
            return
        outputs = open_outputs(json, page, save, results)
        if tensors is not None:
            refuse_ignored("with --tensors, which say it themselves", *_OF_SHAPES)
            problem = inputs.problem_of(str(tensors), needs_grad=grad or former_grad)
        else:
            problem = make_problem(
                shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, dropout, layout,
                grad or former_grad, lse, deterministic,
            )  # fmt: skip
        if without_gpu:
            refuse_ignored("with --static, which runs nothing", *_OF_RUNS)
            known = static.inspect(problem, make_target(target, None), backend)
            told = known.to_dict() | {"provenance": environment.provenance(seed, environment.command_line())}
            outputs.write(told, lambda: "")
            if outputs.text:
                static.show(known)
            raise typer.Exit(DEVICE if known.failed else 0)
        refuse_ignored("without --static: what runs is what is measured, on --device", "target", "backend")
        if experiment not in ("", ARTICLE):
            raise InvalidInput("--experiment", repr(experiment), ARTICLE, "leave it out, or name that")
        if experiment:
            refuse_ignored(f"with --experiment {experiment}, which has candidates of its own", "only")
        where = make_device(device)
        method = make_method(timing, where)
        if flush and (method or "events") != "events":
            raise InvalidInput("--flush", f"--timing {timing}", "--timing events", "leave one of them out")
        check_file("--trace", trace)
        if not where.startswith("cuda"):
            refuse_ignored("on a CPU", "flush", "counters", "sass")
        found = inspection.inspect(
            problem,
            where,
            measuring(
                repeat,
                7,
                47,
                round_seconds=0.05,
                time_limit=time_limit,
                seed=seed,
                together=where.startswith("cuda"),
            ),
            extra=make_candidates(candidate),
            only=_who(experiment, only),
            method=method,
            flush=flush,
            tensors=str(tensors) if tensors else "",
            trace=str(trace) if trace else "",
            sass=sass,
        )
        if counters and found.comparison.complete:
            inspection.count(found, seed, str(tensors) if tensors else "", 10 * time_limit)
        told = found.to_dict() | {"provenance": environment.provenance(seed, environment.command_line())}
        if found.target.is_cpu:
            told["elsewhere"] = elsewhere.elsewhere(problem, benches.RESULTS)
        told["suite"] = inspection.record_name(problem, experiment)
        if save:
            print(f"saved {kept.save(told, results)}", file=sys.stderr)
        if outputs.text:
            inspect_text.show(told, verbose=verbose, quiet=quiet)
        outputs.write(told, lambda: pages.page(told))
        if not any(o.verdict != REFUSED for o in found.comparison.outcomes):
            raise typer.Exit(DEVICE)
        leave([found.comparison])


def _show_again(path: Path, outputs: Outputs, verbose: bool, quiet: bool) -> None:
    told = kept.expanded(kept.read(path))
    if told["kind"] != inspection.KIND:
        raise InvalidInput("--record", f"{path} of kind {told['kind']!r}", inspection.KIND, "name such a record")
    if outputs.text:
        inspect_text.show(told, verbose=verbose, quiet=quiet)
    outputs.write(told, lambda: pages.page(told))


def _who(experiment: str, only: list[str] | None) -> tuple[str, ...]:
    if experiment == ARTICLE:
        return (OURS, TORCH_DEFAULT, *flags.SWITCHES)
    return make_candidates(only)
