"""`tilewise compile`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ..studies import builds
from .options import (
    DEVICE,
    Json,
    exit_codes,
    make_arch,
)
from .output import Outputs


def compile_kernels(
    arch: Annotated[
        str, typer.Option("--target", help="sm_90, a GPU by name, cuda:0, or auto: this machine's.")
    ] = "auto",
    json: Json = None,
) -> None:
    """Build every CUDA kernel for an architecture ahead of its first use. Needs no GPU."""
    with exit_codes():
        outputs = Outputs(json)
        built = builds.build_kernels(make_arch(arch))
        outputs.write([result.to_dict() for result in built])
        if outputs.text:
            builds.show(built)
        if any(result.error for result in built):
            raise typer.Exit(DEVICE)
