"""The `tilewise` command. Every subcommand prints plain text into a pipe, tables on a terminal, or JSON when asked.

A subcommand is loaded when it runs: PyTorch takes longer to import than a list of commands may take.
"""

from __future__ import annotations

import ast
import signal
import sys
from importlib import import_module
from importlib.resources import files
from typing import Annotated, Any

try:
    import rich  # noqa: F401  (a command without it would fail half way)
    import typer
    from typer.core import TyperCommand, TyperGroup

    from .command import EXIT_CODES, PLAIN, USAGE, is_unwritten, program
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    print(
        f"tilewise: the command line needs {missing.name}, which is not installed.\n"
        "  What to do: pip install 'tilewise[lab]'.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

_MODULES = (
    "inspect", "check", "trace", "tune", "ladder", "diff", "explain", "bench", "cycles",
    "compile", "env", "native",
)  # fmt: skip


class Later(TyperCommand):
    """A subcommand whose module, of the same name, is imported when the command is used.

    The module holds a function, or a group of commands, of its name. Its summary in the list of commands is what its
    first documented definition says, or else the module itself; it is read without running the module.
    """

    def __init__(self, name: str) -> None:
        tree = ast.parse(files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _attribute(name)]
        super().__init__(name, help=ast.get_docstring(functions[0] if functions else tree))

    def load(self) -> Any:
        found = getattr(import_module(f".{self.name}", __package__), _attribute(str(self.name)))
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        return typer.main.get_command(program(found))

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self.load().make_context(*arguments, **more)


def _attribute(name: str) -> str:
    """`compile` is a function of Python's."""
    return "compile_kernels" if name == "compile" else name


class Commands(TyperGroup):
    """All subcommands, none of which is loaded."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in _MODULES:
            self.add_command(Later(name))


app = typer.Typer(
    name="tilewise", cls=Commands, help=f"Which attention kernel runs, why, and how fast.\n\n{EXIT_CODES}", **PLAIN
)


@app.callback(invoke_without_command=True)
def tilewise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of tilewise and PyTorch.")] = False,
) -> None:
    if version:
        from ..measure import environment  # noqa: PLC0415  (imports PyTorch)

        found = environment.versions()
        print(f"tilewise {found['tilewise']}, torch {found['torch']}, Python {found['python']}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main() -> None:
    # A request to end counts as an interrupt: what was measured until then is shown and saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except OSError as error:  # of --help and --version, which no command prints
        if not is_unwritten(error):
            raise
        raise SystemExit(USAGE) from None
