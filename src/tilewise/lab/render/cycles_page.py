"""The page of `tilewise cycles`, from its record: the cycles of every candidate, row by row."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from .. import units
from . import charts
from .html import Head, Section, compact_table, device_of, document, note, section, tagged, torch_of
from .roles import short_name
from .views import kind_of

_LEAD = (
    "Cycles of one call by Nsight Compute, summed over its kernels. A clock that moves with power does not move them, "
    "and one call has no interval: a difference of a few percent is no claim."
)


def cycles_page(told: dict[str, Any]) -> str:
    by_row = {name: list(entries) for name, entries in groupby(told["rows"], lambda entry: entry["row"])}
    return document(_head(told, len(by_row)), [_row(name, entries) for name, entries in by_row.items()], told)


def _head(told: dict[str, Any], rows: int) -> Head:
    provenance = told.get("provenance") or {}
    suite = str(told["suite"]).removesuffix("-cycles")
    calls = units.counted(len(told["rows"]), "call")
    facts = [units.counted(rows, "row"), device_of(provenance, "cuda"), torch_of(provenance)]
    missing = [f"{one['row']}, {one['candidate']}: no kernel was seen" for one in told["rows"] if not one["kernels"]]
    return Head(
        about=f"tilewise cycles · {suite}",
        claim=f"Cycles of {calls}",
        facts=[fact for fact in facts if fact],
        lead=_LEAD,
        warnings=missing,
    )


def _row(name: str, entries: list[dict[str, Any]]) -> Section:
    known = sorted((one for one in entries if charts.is_number(one["cycles"])), key=lambda one: float(one["cycles"]))
    items = [_bar(one) for one in known]
    rows = [
        [
            tagged(kind_of(one["candidate"]), one["candidate"]),
            f"{one['cycles']:,.0f}" if charts.is_number(one["cycles"]) else "-",
            _pipe(one) or "-",
            f"{one['instructions'] / 1e6:.1f}" if charts.is_number(one["instructions"]) else "-",
            ", ".join(map(short_name, one["kernels"])) or "-",
        ]
        for one in [*known, *(one for one in entries if not charts.is_number(one["cycles"]))]
    ]
    columns = ["candidate", ">cycles", ">tensor pipe", ">M instructions", "kernels"]
    return section(
        name,
        charts.bars(items, "Cycles of one call; beside them, how busy the tensor pipe is in the longest kernel"),
        compact_table(columns, rows, f"Cycles of {name}"),
        *([] if known else [note("Nothing was counted.")]),
    )


def _bar(one: dict[str, Any]) -> charts.Bar:
    name, cycles = one["candidate"], one["cycles"]
    return charts.Bar(name, cycles, f"{cycles:,.0f}", kind_of(name), aside=_pipe(one))


def _pipe(one: dict[str, Any]) -> str:
    share = one["tensor_percent"]
    return f"{share:.1f}%" if charts.is_number(share) else ""
