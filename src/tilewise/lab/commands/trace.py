"""`tilewise trace -- python train.py`: the program runs in a process of its own, as it would without us."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import InvalidInput, TilewiseError
from .. import report
from ..measure import environment
from ..processes import SOURCE, module_command
from ..watch import torchrun, trace_report
from .command import FAILED, INTERRUPTED, grouped, refuse_ignored, taking
from .options import RunOptions  # noqa: TC001  (typer reads the annotations)
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)

_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@grouped
def trace(
    command: Annotated[list[str], typer.Argument(help="The program: python train.py ARGS, or python -m MODULE ARGS.")],
    options: Annotated[RunOptions, taking("time_limit", "seed")],
    output: Annotated[OutputOptions, taking("quiet", "json", "page")],
    compare: Annotated[
        bool, typer.Option(help="Measure what the slowest sites lose against the best candidate, afterwards.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a site silently falls back to math.")] = False,
) -> None:
    """Every call site of scaled_dot_product_attention in a Python program: shapes, backend, time, what is lost."""
    if not compare:
        refuse_ignored("with --no-compare", "time_limit", "seed")
    code, told = run(command)
    provenance = environment.provenance(options.seed, environment.command_line())
    told |= {"program": " ".join(command), "provenance": provenance}
    if compare and told["sites"]:
        try:
            trace_report.lose(told, options.settings(7, 21, more_seconds=5.0, round_seconds=0.02))
        except TilewiseError as error:
            if code == 0:  # else the program's own code counts
                raise
            print(f"tilewise: the sites were not compared: {error}", file=sys.stderr)
    output.deliver(told, lambda: report.show(trace_report.report_of(told), quiet=output.quiet))
    if code:
        print(f"tilewise: the program ended with exit code {code}", file=sys.stderr)
        raise typer.Exit(code)
    if strict and any(site["math_fallback"] for site in told["sites"]):
        raise typer.Exit(FAILED)


def run(command: list[str]) -> tuple[int, dict[str, Any]]:
    """The program's exit code, and what was seen of it; of all its ranks, where torchrun starts it."""
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        if launch := torchrun.read(command):
            words = torchrun.command(launch, folder)
        else:
            interpreter, flags, program = split(command)
            python = (interpreter, *flags)
            words = module_command("tilewise.lab.watch.traced", folder, *program, python=python, quiet_interrupt=True)
        paths = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
        code = _run(words, os.environ | {"PYTHONPATH": paths})
        told = [found for path in sorted(Path(folder).glob("*.json")) if (found := _read(path)) is not None]
    if not told:
        if code == INTERRUPTED:
            print("tilewise: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED)
        print(
            f"tilewise: the program ended with exit code {code} and left nothing to show: it did not start, or was "
            "ended by a signal or by os._exit; look at what it said above",
            file=sys.stderr,
        )
        raise typer.Exit(code or FAILED)
    return code, torchrun.merged(told) if launch else told[0]


def _read(path: Path) -> dict[str, Any] | None:
    """None for a file that was not written to its end."""
    try:
        found: dict[str, Any] = jsonlib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _run(words: list[str], env: dict[str, str]) -> int:
    """An interrupt while the program is being started counts as one of the program."""
    child = subprocess.Popen(words, env=env)
    return _wait(child)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Ctrl-C is the program's own business: it has got it too, and may end in its own time. A request to end is not,
    and is handed on to it as an interrupt. A program that a signal ended counts as the shell counts it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def split(command: list[str]) -> tuple[str, list[str], list[str]]:
    """`python -u train.py --lr 1` into the interpreter, its own options, and the program with its."""
    expected = "python [options] FILE.py ... or python [options] -m MODULE ..."
    interpreter, *rest = command
    if not Path(interpreter).name.lower().startswith(("python", "pypy")):
        raise InvalidInput("the program", repr(" ".join(command)), expected, "name the interpreter and the script")
    name = sys.executable if interpreter in ("python", "python3") else interpreter
    if shutil.which(name) is None:
        got = f"{name}, and there is no such program"
        raise InvalidInput("the program", got, "an interpreter that can be started", "name another")
    flags: list[str] = []
    while rest and rest[0].startswith("-") and not _is_program(rest[0]):
        word = rest.pop(0)
        flag, letter, attached = _cut(word)
        flags += [flag] if flag != "-" else []
        if letter in ("-m", "-c"):
            rest = [letter, *([attached] if attached else []), *rest]
        elif letter in _TAKE_A_VALUE:
            flags += [letter + attached] if attached else [letter, *rest[:1]]
            rest = rest if attached else rest[1:]
        elif word in _TAKE_A_VALUE:
            flags += rest[:1]
            rest = rest[1:]
    if not rest or rest[0] == "-" or (_is_program(rest[0]) and len(rest) < 2):
        raise InvalidInput("the program", repr(" ".join(command)), expected, "name the script")
    return name, flags, rest


def _is_program(word: str) -> bool:
    return word in ("-m", "-c", "-")


def _cut(word: str) -> tuple[str, str, str]:
    """`-umtrain` as the interpreter reads it: options that stand alone, `-u`; one that has a value, `-m`; and the value
    where it is attached, `train`. A word of two dashes is whole."""
    if not word.startswith("--"):
        for place, letter in enumerate(word[1:], start=1):
            if f"-{letter}" in ("-m", "-c", *_TAKE_A_VALUE):
                return word[:place], f"-{letter}", word[place + 1 :]
    return word, "", ""
