"""`python -m tilewise`: the command line."""

from __future__ import annotations


def main() -> None:
    from . import _interrupt  # noqa: PLC0415  (this module is imported for its `main` alone)
    from .lab.commands.app import main as command  # noqa: PLC0415  (says what to install when the lab extra is missing)

    _interrupt.take()
    command()


if __name__ == "__main__":
    main()
