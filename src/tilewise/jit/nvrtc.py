"""One run of NVRTC, in this process or in one of its own.

NVRTC compiles one program at a time per process, however many threads call it. So a compilation that comes while
another is under way gets a process of its own, which runs this file as a script. That is why it imports nothing of
tilewise: neither PyTorch nor CUDA's driver is loaded there, and the process starts in a fraction of a second.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple


class Program(NamedTuple):
    source: str
    path: str  # by which the compiler knows it
    options: list[str]
    product: str  # "CUBIN" or "PTX"


class Answer(NamedTuple):
    status: str  # empty: it compiled
    product: bytes
    log: bytes


def run(bindings: Any, program: Program) -> Answer:
    """Compile here, or in a process of its own while another thread compiles here. Releases the GIL.

    `bindings`: the module cuda.bindings.nvrtc. Raises RuntimeError where NVRTC itself fails. A process that does not
    answer is the last one that is tried: from then on compilations wait for one another.
    """
    global _tries_processes
    if not _compiling_here.acquire(blocking=False):
        answer = _run_apart(program, version(bindings)) if _tries_processes else None
        if answer is not None:
            return answer
        _tries_processes = False
        _compiling_here.acquire()
    try:
        return _run_here(bindings, program)
    finally:
        _compiling_here.release()


def version(bindings: Any) -> list[int]:
    status, major, minor = bindings.nvrtcVersion()
    _check(status, "nvrtcVersion")
    return [major, minor]


def interpreter() -> str | None:
    """This Python as a program; None where it is part of another one, which would be started instead."""
    name = sys.executable or ""
    is_python = Path(name).name.lower().startswith(("python", "pypy")) and not getattr(sys, "frozen", False)
    return name if is_python else None


_HERE = os.path.abspath(__file__)
_tries_processes = True
_compiling_here = threading.Lock()


def _run_here(bindings: Any, program: Program) -> Answer:
    status, handle = bindings.nvrtcCreateProgram(program.source.encode(), program.path.encode(), 0, None, None)
    _check(status, "nvrtcCreateProgram")
    try:
        options = [option.encode() for option in program.options]
        (status,) = bindings.nvrtcCompileProgram(handle, len(options), options)
        log = _fetch(bindings.nvrtcGetProgramLogSize, bindings.nvrtcGetProgramLog, handle)
        if status:
            return Answer(repr(status), b"", log)
        size, get = (getattr(bindings, f"nvrtcGet{program.product}{what}") for what in ("Size", ""))
        return Answer("", _fetch(size, get, handle), log)
    finally:
        bindings.nvrtcDestroyProgram(handle)


def _fetch(get_size: Any, get: Any, handle: Any) -> bytes:
    status, size = get_size(handle)
    _check(status, get_size.__name__)
    buffer = bytes(size)
    (status,) = get(handle, buffer)
    _check(status, get.__name__)
    return buffer


def _check(status: Any, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with {status!r}")


def _run_apart(program: Program, wanted: list[int]) -> Answer | None:
    """In a process of its own; None where there is none to be had, or its compiler is of another version."""
    python = interpreter()
    if python is None:
        return None
    paths = [path for path in sys.path if os.path.isabs(path)]
    code = f"import runpy, sys; sys.path[:] = {paths!r}; runpy.run_path({_HERE!r}, run_name='__main__')"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], input=json.dumps(program).encode(), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, check=False, cwd=os.sep,
        )  # fmt: skip
        head, _, body = done.stdout.partition(b"\n")
        told = json.loads(head)
        if done.returncode or told["version"] != wanted or len(body) != told["product"] + told["log"]:
            return None
        return Answer(told["status"], body[: told["product"]], body[told["product"] :])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no part of the answer
    program = Program(*json.loads(sys.stdin.buffer.read()))
    bindings = importlib.import_module("cuda.bindings.nvrtc")
    answer = _run_here(bindings, program)
    sizes = {"product": len(answer.product), "log": len(answer.log)}
    told = {"version": version(bindings), "status": answer.status, **sizes}
    with answers:
        answers.write(json.dumps(told).encode() + b"\n" + answer.product + answer.log)


def _in_forked_child() -> None:
    """The thread that held the lock does not exist here."""
    global _compiling_here
    _compiling_here = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)

if __name__ == "__main__":
    _main()
