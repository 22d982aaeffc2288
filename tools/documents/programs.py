"""Blocks from records of the programs of benchmarks/: whole models, host time per call, and tile maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import host
import tile_map

from tilewise.lab.measure.compare import median
from tilewise.lab.studies import records

from .records import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .records import Checkout, Kept

KIND = "tilewise models"
_OURS, _PEER = "tilewise", "sdpa"
_LEGEND = "Speed: against the fastest of Transformers' own that computes the same function, with its 99% interval."
_WHATS = {
    "step": "training step",
    "generate": "`generate()`",
    "padded step": "training step, padded batch",
    "padded generate": "`generate()`, padded prompts",
    "graph": "decoding by a CUDA graph, static cache",
}


def records_of(checkout: Checkout, suite: str, kind: str) -> Iterator[Kept]:
    """Those of a program from a GPU, the newest first; none of tiny models, and none of a part of the rows."""

    def fits(record: dict[str, Any]) -> bool:
        settings = record["settings"]
        part = settings.get("tiny") or settings.get("only") or settings.get("seq", tile_map.SEQ) != tile_map.SEQ
        return record["suite"] == suite and bool(record["provenance"]["gpus"]) and not part

    return checkout.of_kind(kind, fits, host.marks if kind == host.KIND else records.marks_of)


def models(asked: str, checkout: Checkout, page: Path) -> list[str]:
    """Every model from the newest record that has it."""
    taken: dict[str, list[dict[str, Any]]] = {}  # rows by model
    sources: list[tuple[Kept, list[str]]] = []
    found = list(records_of(checkout, "transformers", KIND))
    for record in found:
        new = [model for model in _models(record.values) if model not in taken]
        taken |= {model: [row for row in record.values["rows"] if row["model"] == model] for model in new}
        sources += [(record, new)] if new else []
    if not found:
        return ["*Not measured yet: `python benchmarks/models.py --save` on a GPU fills this in.*"]
    order = max((_models(record.values) for record in found), key=len)
    rows = [row for model in sorted(taken, key=[*order, *taken].index) for row in taken[model]]
    peers = [name for name in dict.fromkeys(name for row in rows for name in row["seconds"]) if name != _OURS]
    head = ["model", ">batch x tokens", "what", ">speed", f">{_OURS}", *(f">{peer}" for peer in peers)]
    lines = [*table(head, [_cells(row, peers) for row in rows]), "", _LEGEND]
    for record, new in sources:
        times = [found for model in new for row in taken[model] for found in row["seconds"].values() if found]
        told = source(record, page, min(map(len, times), default=0))
        lines += ["", told if len(sources) == 1 else f"{', '.join(new)}: {told[0].lower()}{told[1:]}"]
    return lines


def _models(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in record["rows"]))


def _cells(row: dict[str, Any], peers: list[str]) -> list[str]:
    times = [row["seconds"].get(name) for name in (_OURS, *peers)]
    cells = [f"{1e3 * median(found):.2f} ms" if found else "-" for found in times]
    return [row["model"], f"{row['batch']} x {row['tokens']}", row["what"], _speed(row.get("speed"), "-"), *cells]


def _speed(speed: dict[str, Any] | None, otherwise: object) -> str:
    if speed is None:
        return str(otherwise)
    interval = "" if speed["low"] is None else f" [{speed['low']:.2f}, {speed['high']:.2f}]"
    return f"{speed['ratio']:.2f}x{interval}"


def host_times(asked: str, checkout: Checkout, page: Path) -> list[str]:
    """`host calls`: time per call; `host models`: small models as a whole."""
    return {"calls": _calls, "models": _small_models}[asked](checkout, page)


def _calls(checkout: Checkout, page: Path) -> list[str]:
    record = next(records_of(checkout, f"{host.SUITE}-cuda", host.KIND), None)
    if record is None:
        return ["*Not measured yet: `python benchmarks/host.py --save` on a GPU fills this in.*"]
    costs = {(cost.kind, cost.way): cost for cost in host.costs_of(record.values)}
    beside = {key: cost.beside(costs[cost.kind, host.DEFAULT]) for key, cost in costs.items()}

    def cell(kind: str, call: str) -> str:
        if (kind, call) not in costs:
            return "-"
        return f"{1e6 * costs[kind, call].median:.1f} us, {beside[kind, call].share:.2f}"

    calls = dict.fromkeys(call for _, call in costs)
    rows = [[call, *(cell(kind, call) for kind in host.KINDS)] for call in calls]
    shape = ", ".join(map(str, record.values["settings"]["shape"]))
    legend = f"Medians over rounds: time per call of ({shape}), and its share of {host.DEFAULT}'s in the same round."
    more = [f"{1e6 * beside[key].more:+.1f} us" for kind in host.KINDS if (key := (kind, host.PASSED_ON)) in costs]
    passed_on = f"A call that the override passes on, beside {host.DEFAULT} in the same round: {', '.join(more)}."
    lines = table(["", ">no grad", ">grad, forward", ">forward and backward"], rows)
    told = source(record, page, record.values["settings"]["rounds"])
    return [*lines, "", legend, *([passed_on] if more else []), "", told]


def _small_models(checkout: Checkout, page: Path) -> list[str]:
    record = next(records_of(checkout, "eager", KIND), None)
    if record is None:
        return ["*Not measured yet: `python benchmarks/eager.py --save` on a GPU fills this in.*"]
    found = record.values["rows"]
    ways = list(dict.fromkeys(way for row in found for way in row["speed"]))
    rows = [
        [
            row["model"],
            _WHATS[row["what"]],
            *(_speed(row["speed"].get(way), row["wrong"].get(way, "-")) for way in ways),
            f"{1e3 * median(row['seconds'][_PEER]):.2f} ms",
        ]
        for row in found
    ]
    rounds = min(len(times) for row in found for times in row["seconds"].values())
    legend = f"Time of {_PEER} over that of each way, with its 99% interval."
    lines = table(["model", "what", *(f">{way}" for way in ways), f">{_PEER}"], rows)
    return [*lines, "", legend, "", source(record, page, rounds)]


def tile_maps(asked: str, checkout: Checkout, page: Path) -> list[str]:
    """What tile maps cost."""
    record = next(records_of(checkout, tile_map.SUITE, tile_map.KIND), None)
    if record is None:
        return ["*Not measured yet: `python benchmarks/tile_map.py --save` on a GPU fills this in.*"]
    lines = table(list(tile_map.COLUMNS), tile_map.cells(record.values))
    told = source(record, page, record.values["settings"]["rounds"])
    return [*lines, "", tile_map.LEGEND, "", told]


def source(record: Kept, page: Path, rounds: int) -> str:
    """Where figures come from, and what a reader must know of them."""
    known = record.values["provenance"]["versions"]
    versions = [f"{name} {known[name]}" for name in ("torch", "transformers") if name in known]
    return f"From {record.link(page)}: {', '.join([record.gpu, *versions, record.date[:10]])}, {rounds} rounds."
