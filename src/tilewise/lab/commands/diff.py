"""`tilewise diff a.json b.json`: its options."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...errors import InvalidInput
from ..studies import diff as differences
from ..studies import kept
from .command import grouped, taking
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def diff(
    before: Annotated[Path, typer.Argument(help="A record of bench, inspect or ladder.")],
    after: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    output: Annotated[OutputOptions, taking("verbose", "quiet", "json")],
) -> None:
    """Two records side by side: which ratios have changed, beyond their intervals."""
    first, second = kept.read(before), kept.read(after)
    if first["kind"] != second["kind"]:
        got = f"{first['kind']!r} and {second['kind']!r}"
        raise InvalidInput("records", got, "two of the same kind", "name two of the same kind")
    with kept.shown(before, after):
        old, new = differences.comparisons(first, before), differences.comparisons(second, after)
        found = differences.changes(old, new)
        told = {
            "kind": differences.KIND,
            "sentence": differences.sentence(found, len(old.keys() - new.keys()), len(new.keys() - old.keys())),
            "records": [str(before), str(after)],
            "changes": [change.to_dict() for change in found],
        }

        def show() -> None:
            for name, record in ((before, first), (after, second)):
                print(f"{name.name}: {differences.about(record)}")
            differences.show(told, found, **output.looks)

        output.deliver(told, show)
