"""The `tilewise` command. Every subcommand prints plain text into a pipe, tables on a terminal, or JSON when asked."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

try:
    import rich  # noqa: F401  (a command without it would fail half way)
    import typer

    from ..measure import environment
    from .bench import bench
    from .check import check
    from .compile import compile_kernels
    from .cycles import cycles
    from .diff import diff
    from .docs import docs
    from .env import env
    from .explain import explain
    from .inspect import inspect
    from .ladder import ladder
    from .magnitudes import magnitudes
    from .native import native
    from .options import EXIT_CODES, Command
    from .trace import trace
    from .tune import tune
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    print(
        f"tilewise: the command line needs {missing.name}, which is not installed.\n"
        "  What to do: pip install 'tilewise[lab]'.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

app = typer.Typer(
    name="tilewise",
    help=f"Which attention kernel runs, why, and how fast.\n\n{EXIT_CODES}",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for _command in (inspect, check, magnitudes, trace, tune, ladder, diff, explain, bench, docs, cycles):
    app.command(cls=Command)(_command)
app.command("compile", cls=Command)(compile_kernels)
app.command(cls=Command)(env)
app.add_typer(native)


@app.callback(invoke_without_command=True)
def tilewise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of tilewise and PyTorch.")] = False,
) -> None:
    if version:
        found = environment.versions()
        print(f"tilewise {found['tilewise']}, torch {found['torch']}, Python {found['python']}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main() -> None:
    # A request to end counts as an interrupt: what was measured until then is shown and saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
