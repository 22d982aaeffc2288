"""A command that is interrupted while it still imports ends with 130, as a command does, and without a traceback.

Python's own handler raises wherever the import of PyTorch happens to be. Programs of others that import tilewise keep
theirs, and an interrupt that the parent has told us to ignore stays ignored.
"""

import os
import signal
import sys

from ._path import STARTS_US

CODE = 130
IS_COMMAND = STARTS_US or os.path.basename(sys.argv[0] if sys.argv else "") in ("tilewise", "tilewise.exe")


def _end(*_: object) -> None:
    os._exit(CODE)


def take() -> None:
    """From here on an interrupt is an exception again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
