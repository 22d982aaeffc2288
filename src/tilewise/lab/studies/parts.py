"""Records of parts of a suite, measured by several commands, as one record.

The parts must be of the same sources, settings, versions and kind of device. A row that was interrupted in one part may
be whole in another; a row that is whole in two is refused, since nothing says which of them counts.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput
from . import bench
from .records import Record
from .suites import rows_of


def join(records: list[Record]) -> Record:
    """One record of the complete rows of all, in the order of the suite, with the provenance of the newest part."""
    first, *others = records = sorted(records, key=lambda record: record.date)
    for other in others:
        if differing := [name for name, value in _common(first).items() if value != _common(other)[name]]:
            raise InvalidInput(
                "--join", f"{first.name} and {other.name}", f"records with the same {', '.join(differing)}",
                "measure the parts on one machine with the same sources and options",
            )  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        for row in record.values["rows"]:
            if row["complete"] and row["row"] in rows:
                raise InvalidInput("--join", row["row"], "rows that one part alone has measured", "leave one part out")
            if row["complete"]:
                rows[row["row"]] = row
    names = [row.name for row in rows_of(first.suite, first.values["settings"]["seed"])]
    kept = [rows[name] for name in names if name in rows]
    values = records[-1].values | {"complete": True, "whole": len(kept) == len(names), "rows": kept}
    values["provenance"] = values["provenance"] | {
        "parts": [
            {"record": one.name, "date": one.date, "command": one.values["provenance"]["command"]} for one in records
        ]
    }
    comparisons = Record("", "", values).comparisons()
    values["score"] = bench.score(comparisons)._asdict()
    values["score_torch"] = bench.score_of_torch(comparisons)._asdict()
    values["scores"] = {kind: found._asdict() for kind, found in bench.scores(comparisons).items()}
    return Record("the parts together", "", values)


def _common(record: Record) -> dict[str, Any]:
    """What must be the same of all parts."""
    provenance = record.values["provenance"]
    return {
        "suite": record.suite,
        "settings": record.values["settings"],
        "engine": provenance["source"].get("engine"),
        "versions": provenance["versions"],
        "device": record.device,
    }
