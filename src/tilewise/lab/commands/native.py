"""The native extension: repeated calls without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...native import library
from ...native.wheel import platform_wheel
from .command import DEVICE, PLAIN, Command

native = typer.Typer(name="native", help=__doc__, no_args_is_help=True, **PLAIN)


@native.command("build", cls=Command)
def build() -> None:
    """Build the extension now, if it is not there, with this machine's C++ compiler."""
    library.build()
    print(library.status()[1])


@native.command("wheel", cls=Command)
def wheel(
    pure: Annotated[Path, typer.Argument(help="The wheel of tilewise for any platform.")],
    folder: Annotated[Path, typer.Option(help="Where the new one goes.")] = Path("dist"),
) -> None:
    """Make a wheel for this platform, this Python and this PyTorch that holds the extension."""
    print(platform_wheel(pure, folder))


@native.command("status", cls=Command)
def status() -> None:
    """Whether calls are answered by the extension here, and what would make it so."""
    ready, words = library.status()
    print(words)
    if not ready:
        raise typer.Exit(DEVICE)
