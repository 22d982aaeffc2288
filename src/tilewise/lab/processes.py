"""Python processes of our own, and how they are started: none imports anything from the current directory.

`python -m` and `python -c` put that directory in front of the standard library, where a file `queue.py` stands in for
the module of that name. `-P` and PYTHONSAFEPATH begin with Python 3.11; a program that takes the directory off the path
before it imports anything does the same in every release.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parents[2])
"""The folder that this package is imported from."""

# Invariant: `sys` is built in. Whatever else is imported comes after the line that mends the path.
_PATH_FIRST = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n"
_RUN_MODULE = f"{_PATH_FIRST}import runpy\nrunpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"


# Until the module itself takes charge of interrupts: one that comes while it imports ends it without a traceback.
_QUIET = """import signal, os
if signal.getsignal(signal.SIGINT) is signal.default_int_handler: signal.signal(signal.SIGINT, lambda *_: os._exit(130))
"""


def module_command(
    module: str, *arguments: str, python: tuple[str, ...] = (sys.executable,), quiet_interrupt: bool = False
) -> list[str]:
    """`python -m module arguments`, for an interpreter with its options, without the current directory on its path."""
    start = _RUN_MODULE.replace(_PATH_FIRST, _PATH_FIRST + _QUIET) if quiet_interrupt else _RUN_MODULE
    return [*python, "-c", start, module, *arguments]


def code_command(code: str) -> list[str]:
    """The command line of `python -c code`."""
    return [sys.executable, "-c", _PATH_FIRST + code]


def variables() -> dict[str, str]:
    """The environment of a process of our own: it finds this package, and what it starts in turn has a safe path too.

    Empty elements of PYTHONPATH stand for the current directory.
    """
    places = [SOURCE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONSAFEPATH": "1"}
