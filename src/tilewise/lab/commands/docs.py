"""`tilewise docs`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..render import docs as documents
from ..render import ladder_docs
from .command import FAILED


def docs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if something is stale.")] = False,
    root: Annotated[Path, typer.Option(help="The folder of the checkout.")] = Path(),
) -> None:
    """Write the tables and plots of README.md and docs/ from the newest records, between their markers."""
    documents.check_root(root)
    if check:
        stale = documents.stale(root)
        print("\n".join(f"stale: {path}" for path in stale) or "all tables and plots are those of the records")
        raise typer.Exit(FAILED if stale else 0)
    for page in documents.pages(root):
        if page.stale:
            page.path.write_text(page.after, encoding="utf-8")
            print(f"wrote {page.path}")
    for path in (*documents.draw_all(root), *ladder_docs.write(root)):
        print(f"drew {path}")
