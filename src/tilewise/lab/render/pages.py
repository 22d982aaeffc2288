"""The pages of the commands, each a pure function of the record that the command's JSON holds.

    page(record) -> str                     by the record's kind
    record_of(text, results) -> Path | None the record that a page was made from
    rebuilt(text, results) -> str | None    a page, rebuilt from its record

A page says in its head which record it was made from, by kind and date: that is how `make docs` finds the record
that a page under docs/ stands for, and whether the page is still what that record looks like.
"""

from __future__ import annotations

import contextlib
import re
from html import unescape
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from ..studies import check, cycles, kept, ladder_report, tune_report
from ..watch import trace_report
from . import bench_report, blocks, inspect_report
from .html import identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..report import Report


def _check(told: dict[str, Any]) -> Report:
    return check.report_of(check.Check.from_dict(told), told.get("provenance") or {})


REPORTS: dict[str, Callable[[dict[str, Any]], Report]] = {
    "tilewise inspect": inspect_report.report_of,
    "tilewise bench": bench_report.report_of,
    "tilewise trace": trace_report.report_of,
    "tilewise check": _check,
    "tilewise cycles": cycles.report_of,
    "tilewise tune": tune_report.report_of,
    "tilewise ladder": ladder_report.report_of,
}
"""By kind. A program of tools/ adds its own."""
_IDENTITY = re.compile(r'<meta name="tilewise-record" content="([^"]*)">')


def page(record: dict[str, Any]) -> str:
    """The HTML page of a record. InvalidInput for one of a kind that has no page."""
    kind = record.get("kind")
    if kind not in REPORTS:
        kinds = ", ".join(REPORTS)
        raise InvalidInput("record", f"of kind {kind!r}", f"one of {kinds}", "name a record of such a kind")
    told = kept.expanded(record)
    return blocks.page(REPORTS[kind](told), told)


def rebuilt(text: str, results: Path) -> str | None:
    """The page as its record looks now. None for what is no page, and where the folder `results` has no such record."""
    path = record_of(text, results)
    return None if path is None else page(kept.read(path))


def record_of(text: str, results: Path) -> Path | None:
    """The record in the folder `results` that a page was made from; None where there is none, or no page."""
    match = _IDENTITY.search(text)
    if match is None:
        return None
    wanted = unescape(match[1])
    date = wanted.rpartition(" ")[2]
    for path in sorted(results.glob("*.json")):
        if date not in path.read_text(encoding="utf-8"):
            continue
        with contextlib.suppress(InvalidInput):
            record = kept.read(path)
            if identity(record) == wanted:
                return path
    return None
