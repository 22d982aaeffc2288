"""The program under `tilewise trace`: tilewise.lab.watch.traced FOLDER [-m MODULE | -c CODE | FILE.py] ARGS...

It runs as if started by itself, and what was seen is written into the folder when it ends, however it ends: into a file
of its own for each rank, where torchrun starts several.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

from .trace import trace


def main(arguments: list[str]) -> None:
    folder, *program = arguments
    rank = int(os.environ.get("RANK", "0"))
    result = Path(folder) / f"trace-{rank:05}.json"
    with contextlib.ExitStack() as watching:
        seen = watching.enter_context(trace())
        try:
            _take_interrupts()
            run(program)
        finally:
            watching.close()  # only then the time of the whole is known
            result.write_text(json.dumps(seen.to_dict() | {"rank": rank}), encoding="utf-8")


def _take_interrupts() -> None:
    """From here on an interrupt is the program's. One that the parent ignores stays ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(program: list[str]) -> None:
    """What the interpreter does with the same words: the path begins with the program's place only from here on."""
    if program[0] == "-m":
        sys.argv = program[1:]
        _begin_path(str(Path.cwd()))
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        _begin_path("")
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        _begin_path(os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


def _begin_path(place: str) -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, place)


if __name__ == "__main__":
    main(sys.argv[1:])
