"""`tilewise inspect`: its options, and which of the two ways to look they ask for."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ..errors import InvalidInput
from ..plan import AUTO
from . import environment, flags, html, inputs, inspect_text, ncu, pages, report, static
from . import inspect as inspection
from .candidates import OURS, TORCH_DEFAULT
from .compare import REFUSED, Settings
from .options import (
    DEVICE,
    Deterministic,
    Device,
    Dropout,
    Dtype,
    ExtraCandidates,
    Flush,
    HeadDimV,
    Html,
    Json,
    KvHeads,
    LayoutText,
    Lse,
    MaskText,
    Repeat,
    Scale,
    Seed,
    SeqKv,
    Softcap,
    TargetName,
    TimeLimit,
    Timing,
    exit_codes,
    leave,
    make_candidates,
    make_device,
    make_method,
    make_problem,
    make_target,
)

ARTICLE = "flags"


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
    backward: Annotated[bool, typer.Option("--backward", help="Time and verify the backward too.")] = False,
    device: Device = "auto",
    timing: Timing = "auto",
    flush: Flush = False,
    candidate: ExtraCandidates = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this candidate (may be repeated).")] = None,
    experiment: Annotated[str, typer.Option(help=f"{ARTICLE}: PyTorch's kernel switches, one setting a row.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Write tilewise's Chrome/Perfetto trace to this file.")] = None,
    counters: Annotated[bool, typer.Option("--ncu", help="Counters of every kernel by Nsight Compute.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The instruction mix of our kernels.")] = False,
    without_gpu: Annotated[
        bool, typer.Option("--static", help="Run nothing: compile for --target and tell what follows.")
    ] = False,
    target: TargetName = "auto",
    backend: Annotated[str, typer.Option(help="With --static: only this backend, or auto.")] = AUTO,
    repeat: Repeat = 7,
    time_limit: TimeLimit = 30.0,
    seed: Seed = 0,
    json: Json = False,
    page: Html = None,
) -> None:
    """Run everyone who can compute a problem, each in a process of its own: verified, timed, and seen from within."""
    with exit_codes():
        if tensors is not None:
            problem = inputs.problem_of(str(tensors), needs_grad=backward)
        else:
            problem = make_problem(
                shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, dropout, layout,
                backward, lse, deterministic,
            )  # fmt: skip
        if without_gpu:
            known = static.inspect(problem, make_target(target, None), backend)
            _print(known.to_dict(), seed) if json else static.show(known)
            raise typer.Exit(DEVICE if known.failed else 0)
        if experiment not in ("", ARTICLE):
            raise InvalidInput("--experiment", repr(experiment), ARTICLE, "leave it out, or name that")
        where = make_device(device)
        found = inspection.inspect(
            problem,
            where,
            Settings(rounds=repeat, round_seconds=0.05, time_limit=time_limit, seed=seed),
            extra=make_candidates(candidate),
            only=_who(experiment, only),
            method=make_method(timing, where),
            flush=flush,
            tensors=str(tensors) if tensors else "",
            trace=str(trace) if trace else "",
            sass=sass,
        )
        if counters:
            running = [o.candidate for o in found.comparison.outcomes if o.costs and not o.failed]
            found.counters = ncu.inspect(running, problem, seed, str(tensors) if tensors else "", 10 * time_limit)
        told = found.to_dict() | {"provenance": environment.provenance(seed, environment.command_line())}
        if json:
            report.print_json(told)
        else:
            inspect_text.show(found)
        if page is not None:
            html.write(page, pages.inspect_page(told))
            print(f"wrote {page}", file=sys.stderr)
        if not any(o.verdict != REFUSED for o in found.comparison.outcomes):
            raise typer.Exit(DEVICE)
        leave([found.comparison])


def _who(experiment: str, only: list[str] | None) -> tuple[str, ...]:
    if experiment == ARTICLE:
        return (OURS, TORCH_DEFAULT, *flags.SWITCHES)
    return make_candidates(only)


def _print(told: dict[str, object], seed: int) -> None:
    report.print_json(told | {"provenance": environment.provenance(seed, environment.command_line())})
