"""The pages of the commands, each a pure function of the record that the command's JSON holds.

    page(record) -> str                     by the record's kind
    rebuilt(text, results) -> str | None    a page, rebuilt from its record

A page says in its head which record it was made from, by kind and date: that is how `tilewise docs` finds the record
that a page under docs/ stands for, and whether the page is still what that record looks like.
"""

from __future__ import annotations

import contextlib
import re
from html import unescape
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from ..studies import check, cycles, kept
from ..watch import trace_report
from . import bench_report, blocks, inspect_report
from . import ladder_page as _ladder
from . import magnitudes_page as _magnitudes
from . import tune_page as _tune
from .html import identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..studies.records import Record


def _check(told: dict[str, Any]) -> str:
    return blocks.page(check.report_of(check.Check.from_dict(told), told.get("provenance") or {}), told)


_PAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "tilewise inspect": lambda told: blocks.page(inspect_report.report_of(told), told),
    "tilewise bench": lambda told: blocks.page(bench_report.report_of(told), told),
    "tilewise tune": _tune.tune_page,
    "tilewise trace": lambda told: blocks.page(trace_report.report_of(told), told),
    "tilewise check": _check,
    "tilewise ladder": _ladder.ladder_page,
    "tilewise magnitudes": _magnitudes.magnitudes_page,
    "tilewise cycles": lambda told: blocks.page(cycles.report_of(told), told),
}
_IDENTITY = re.compile(r'<meta name="tilewise-record" content="([^"]*)">')


def page(record: dict[str, Any]) -> str:
    """The HTML page of a record. InvalidInput for one of a kind that has no page."""
    kind = record.get("kind")
    if kind not in _PAGES:
        raise InvalidInput("record", f"of kind {kind!r}", f"one of {', '.join(_PAGES)}", "name a record of such a kind")
    return _PAGES[kind](kept.expanded(record))


def inspect_page(told: dict[str, Any]) -> str:
    return page(told)


def bench_page(record: Record) -> str:
    return page(record.values)


def rebuilt(text: str, results: Path) -> str | None:
    """The page as its record looks now. None for what is no page, and where the folder `results` has no such record."""
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
                return page(record)
    return None
