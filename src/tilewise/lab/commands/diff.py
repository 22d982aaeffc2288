"""`tilewise diff a.json b.json`: its options."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import Annotated

import typer

from ...errors import InvalidInput
from ..studies import diff as differences
from ..studies import kept
from .options import Json, Quiet, Verbose, exit_codes
from .output import Outputs


def diff(
    before: Annotated[Path, typer.Argument(help="A record of bench, inspect or ladder.")],
    after: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Two records side by side: which ratios have changed, beyond their intervals."""
    with exit_codes():
        outputs = Outputs(json)
        first, second = kept.read(before), kept.read(after)
        if first["kind"] != second["kind"]:
            got = f"{first['kind']!r} and {second['kind']!r}"
            raise InvalidInput("records", got, "two of the same kind", "name two of the same kind")
        old, new = differences.comparisons(first, before), differences.comparisons(second, after)
        found = differences.changes(old, new)
        told = {
            "kind": differences.KIND,
            "sentence": differences.sentence(found, len(old.keys() - new.keys()), len(new.keys() - old.keys())),
            "records": [str(before), str(after)],
            "changes": [change.to_dict() for change in found],
        }
        outputs.write(told)
        if outputs.text:
            for name, record in ((before, first), (after, second)):
                print(f"{name.name}: {differences.about(record)}")
            differences.show(told, found, verbose=verbose, quiet=quiet)
