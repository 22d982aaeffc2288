"""The pages of the commands, each a pure function of the record that the command's JSON holds.

    page(record, source="") -> str          by the record's kind; `source` names the record's file in the page
    rebuilt(text, results) -> str | None    a page that names its record, made anew from it

A page that was made from a record says so in its head, which is how `tilewise docs` finds the record that a page under
docs/ stands for, and whether the page is still what that record looks like.
"""

from __future__ import annotations

import json
import re
from html import unescape
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from . import bench_page as _bench
from . import check_page as _check
from . import inspect_page as _inspect
from . import ladder_page as _ladder
from . import trace_page as _trace
from . import tune_page as _tune
from . import views

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .records import Record

_PAGES: dict[str, Callable[[dict[str, Any], str], str]] = {
    "tilewise inspect": _inspect.inspect_page,
    "tilewise bench": _bench.bench_page,
    "tilewise tune": _tune.tune_page,
    "tilewise trace": _trace.trace_page,
    "tilewise check": _check.check_page,
    "tilewise ladder": _ladder.ladder_page,
}
_SOURCE = re.compile(r'<meta name="tilewise-record" content="([^"]*)">')


def page(record: dict[str, Any], source: str = "") -> str:
    """The HTML page of a record. InvalidInput for one of a kind that has no page."""
    kind = record.get("kind")
    if kind not in _PAGES:
        raise InvalidInput("record", f"of kind {kind!r}", f"one of {', '.join(_PAGES)}", "name a record of such a kind")
    return _PAGES[kind](views.current(record), source)


def inspect_page(told: dict[str, Any]) -> str:
    return page(told)


def bench_page(record: Record) -> str:
    """Of a record that was read from a file, or of this run, which has none yet and no digest."""
    return page(record.values, record.name if record.digest else "")


def rebuilt(text: str, results: Path) -> str | None:
    """The page as its record has it now. None if it names no record, or one that is not in the folder `results`."""
    match = _SOURCE.search(text)
    if match is None:
        return None
    path = results / unescape(match[1])
    if path.parent != results or not path.is_file():
        return None
    return page(json.loads(path.read_text(encoding="utf-8")), path.name)
