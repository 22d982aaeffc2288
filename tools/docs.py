"""Writes the tables, plots and pages of README.md and docs/ from the newest records: `make docs` (see `documents`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import documents
import typer
from documents import plots

from tilewise.lab.commands.command import FAILED, program
from tilewise.lab.studies import records


def docs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if something is stale.")] = False,
    root: Annotated[Path, typer.Option(help="The folder of the checkout.")] = Path(),
    draw: Annotated[Path | None, typer.Option(help="Instead: draw this record of bench as SVG.")] = None,
    into: Annotated[Path, typer.Option(help="The folder for --draw.")] = Path(),
) -> None:
    """Write the tables and plots of README.md and docs/ from the newest records, between their markers."""
    if draw is not None:
        for path in plots.draw(records.read(draw), into):
            print(f"drew {path}")
        return
    documents.check_root(root)
    if not check:
        for path in documents.write(root):
            print(f"wrote {path}")
        return
    stale = documents.stale(root)
    print("\n".join(f"stale: {path}" for path in stale) or "all tables and plots are those of the records")
    raise typer.Exit(FAILED if stale else 0)


if __name__ == "__main__":
    sys.exit(program(docs)())
