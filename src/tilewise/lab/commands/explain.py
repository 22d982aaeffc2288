"""`tilewise explain`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ...plan import AUTO, plan
from .options import (
    Deterministic,
    Dropout,
    Dtype,
    HeadDimV,
    Json,
    KvHeads,
    LayoutText,
    Lse,
    MaskText,
    Scale,
    SeqKv,
    Shape,
    Softcap,
    TargetName,
    TorchVersion,
    exit_codes,
    make_problem,
    make_target,
    packed_mask,
)
from .output import Outputs


def explain(
    shape: Shape,
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    mask: MaskText = "full",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Packed sequences of these lengths, which add up to seq, e.g. 64,128,2600, or a file of them; "
            "--mask holds in each."
        ),
    ] = None,
    scale: Scale = None,
    softcap: Softcap = 0.0,
    dropout: Dropout = 0.0,
    layout: LayoutText = "bhsd",
    grad: Annotated[bool, typer.Option("--grad", help="Gradients will be wanted.")] = False,
    lse: Lse = False,
    deterministic: Deterministic = False,
    precision: Annotated[str, typer.Option(help="exact, or for float32 also tf32.")] = "exact",
    target: TargetName = "auto",
    torch_version: TorchVersion = None,
    backend: Annotated[str, typer.Option(help="Only this backend, or auto.")] = AUTO,
    json: Json = None,
) -> None:
    """Which backend would run, why, and why not the others. Runs nothing and needs no GPU."""
    with exit_codes():
        outputs = Outputs(json)
        problem = make_problem(
            shape, kv_heads, seq_kv, head_dim_v, dtype, packed_mask(mask, lengths), scale, softcap, dropout, layout,
            grad, lse, deterministic,
        ).with_(precision=precision)  # fmt: skip
        chosen = plan(problem, make_target(target, torch_version), backend)
        outputs.write(chosen.to_dict())
        if outputs.text:
            print(chosen)
