"""What a command is made of: groups of options, which options were given, and the exit codes.

Commands share groups of options: dataclasses whose fields are options, with methods that make what the options say. A
command takes a group as a parameter, and names the options that it has of it, some with defaults of its own:

    def check(run: Annotated[RunOptions, taking("device", "seed", time_limit=60.0)]) -> None: ...

Nothing here imports PyTorch: `tilewise --help` needs none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.core import TyperCommand

from ...errors import InvalidInput, TilewiseError, UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAILED, USAGE, UNSUPPORTED, DEVICE, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = """Exit codes: 0 all is well; 1 a candidate died, hung, raised or gave wrong numbers; 2 bad usage or input;
3 no backend takes the problem; 4 the device, the driver or a compiler refused; 130 interrupted."""

# Help in plain text, and Python's own tracebacks.
PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
REQUIRED = Parameter.empty  # the default of an option that has none
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_given: dict[str, str] = {}  # parameter -> option, of the command that runs


class Command(TyperCommand):
    """A command that knows which options it was given, and takes `--json` without a value for standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_json_values(args))

    def invoke(self, ctx: Any) -> Any:
        _given.clear()
        for param in self.params:
            source = ctx.get_parameter_source(param.name)
            if source is not None and source.name == "COMMANDLINE":
                _given[str(param.name)] = max(param.opts, key=len)
        try:
            with exit_codes():
                if "quiet" in _given:
                    refuse_ignored("with --quiet", "verbose")
                return super().invoke(ctx)
        finally:
            _given.clear()


def _with_json_values(args: list[str]) -> list[str]:
    """Bare `--json` becomes `--json -`. What follows `--` is another program's."""
    found: list[str] = []
    for place, word in enumerate(args):
        if word == "--":
            return found + args[place:]
        found.append(word)
        following = args[place + 1] if place + 1 < len(args) else "--"
        if word == "--json" and following.startswith("-") and following != "-":
            found.append("-")
    return found


def refuse_ignored(why: str, *names: str) -> None:
    """InvalidInput if one of these parameters was given, since it would have no effect, for the reason `why`."""
    for name in names:
        if name in _given:
            raise InvalidInput(_given[name], "the option", f"none: it has no effect {why}", "leave it out")


def taking(*names: str, **defaults: Any) -> dict[str, dict[str, Any]]:
    """The options that a command takes of a group; `defaults` are those with a default of the command's own."""
    return {name: {} for name in names} | {name: {"default": value} for name, value in defaults.items()}


def program(function: Callable[..., None]) -> typer.Typer:
    """A command that is a program of its own."""
    alone = typer.Typer(**PLAIN)
    alone.command(function.__name__, cls=Command)(function)
    return alone


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for every option that it takes of its groups, as typer reads it.

    Fields that it does not take have the defaults of the group.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type, dict[str, Any]]] = {}
    for name, parameter in signature(function).parameters.items():
        taken = next((one for one in getattr(hints[name], "__metadata__", ()) if isinstance(one, dict)), None)
        if taken is None:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
        else:
            groups[name] = hints[name].__origin__, taken
            parameters += _options(*groups[name])

    def call(**values: Any) -> None:
        for name, (group, taken) in groups.items():
            values[name] = group(**{option: values.pop(option) for option in taken})
        function(**values)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options(group: type, taken: dict[str, Any]) -> Iterator[Parameter]:
    """In the order of the group."""
    hints = get_type_hints(group, include_extras=True)
    assert taken.keys() <= hints.keys(), taken.keys() - hints.keys()
    for field in fields(group):
        if field.name in taken:
            default = taken[field.name].get("default", field.default)
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """The package's exceptions as a message and an exit code, without a traceback."""
    try:
        yield
        print(end="", flush=True)
    except TilewiseError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        codes = {InvalidInput: USAGE, UnsupportedProblem: UNSUPPORTED}
        raise typer.Exit(codes.get(type(error), DEVICE)) from None
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if not is_unwritten(error):
            raise
        raise typer.Exit(USAGE) from None


def is_unwritten(error: OSError) -> bool:
    """Whether the output has nowhere to go; if so, say it on stderr, and write nothing more."""
    if error.errno not in _FULL:
        return False
    print(f"tilewise: the output cannot be written: {error.strerror}", file=sys.stderr)
    with contextlib.suppress(OSError):  # else Python writes what is left once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
