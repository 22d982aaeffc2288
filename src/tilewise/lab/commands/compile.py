"""`tilewise compile`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ..studies import builds
from .command import DEVICE, grouped, taking
from .options import make_arch
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def compile_kernels(
    output: Annotated[OutputOptions, taking("json")],
    arch: Annotated[
        str, typer.Option("--target", help="sm_90, a GPU by name, cuda:0, or auto: this machine's.")
    ] = "auto",
) -> None:
    """Build every CUDA kernel for an architecture ahead of its first use. Needs no GPU."""
    built = builds.build_kernels(make_arch(arch))
    output.deliver([result.to_dict() for result in built], lambda: builds.show(built))
    if any(result.error for result in built):
        raise typer.Exit(DEVICE)
