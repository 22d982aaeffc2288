"""`tilewise check`: its options."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ..candidates import inputs
from ..measure import environment
from ..measure.compare import Settings
from ..render import pages
from ..studies import check as checking
from .options import (
    FAILED,
    INTERRUPTED,
    Deterministic,
    Device,
    Dtype,
    ExtraCandidates,
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
    Scale,
    Seed,
    SeqKv,
    Softcap,
    TimeLimit,
    Verbose,
    exit_codes,
    make_candidates,
    make_device,
    make_problem,
    refuse_ignored,
)
from .output import Outputs

_OF_SHAPES = (
    "shape", "kv_heads", "seq_kv", "head_dim_v", "dtype", "mask", "scale", "softcap", "layout", "lse", "deterministic",
)  # fmt: skip


def check(
    shape: Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q, e.g. 1,32,4096,128.")] = "",
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    mask: MaskText = "full",
    scale: Scale = None,
    softcap: Softcap = 0.0,
    layout: LayoutText = "bhsd",
    lse: Lse = False,
    deterministic: Deterministic = False,
    tensors: Annotated[
        Path | None, typer.Option(help="Instead of --shape: a file of torch.save((q, k, v)), as a model had them.")
    ] = None,
    grad: Grad = False,
    former_grad: FormerGrad = False,
    device: Device = "auto",
    candidate: ExtraCandidates = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this candidate (may be repeated).")] = None,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Is a kernel right here? Every backend that takes the problem against float64 and against the others, with the
    place of the largest error. Leaves with 1 if one is outside its budget."""
    with exit_codes():
        outputs = Outputs(json, page)
        if tensors is not None:
            refuse_ignored("with --tensors, which say it themselves", *_OF_SHAPES)
            problem = inputs.problem_of(str(tensors), needs_grad=grad or former_grad)
        else:
            problem = make_problem(
                shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, 0.0, layout,
                grad or former_grad, lse, deterministic,
            )  # fmt: skip
        found = checking.run(
            problem,
            make_device(device),
            Settings(time_limit=time_limit, seed=seed),
            extra=make_candidates(candidate),
            only=make_candidates(only),
            tensors=str(tensors) if tensors else "",
        )
        told = found.to_dict() | {"provenance": environment.provenance(seed, environment.command_line())}
        if outputs.text:
            checking.show(found, verbose=verbose, quiet=quiet)
        outputs.write(told, lambda: pages.page(told))
        if not found.complete:
            raise typer.Exit(INTERRUPTED)
        if found.failed:
            raise typer.Exit(FAILED)
