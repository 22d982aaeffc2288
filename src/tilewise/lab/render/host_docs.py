"""The tables of docs/native.md, from the newest records on a GPU:

<!-- host calls -->    host time per call, of `tilewise bench --suite host`
<!-- /host -->
<!-- host models -->   small models as a whole, of benchmarks/eager.py
<!-- /host -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.compare import median
from ..studies import host
from . import models_docs

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path("docs/native.md")
PEER = "sdpa"  # of benchmarks/eager.py
_BLOCK = re.compile(r"(?P<begin><!-- host (?P<view>\w+) -->\n)(?P<body>.*?)(?P<end><!-- /host -->)", re.DOTALL)
_WHATS = {
    "step": "training step",
    "generate": "`generate()`",
    "padded step": "training step, padded batch",
    "padded generate": "`generate()`, padded prompts",
    "graph": "decoding by a CUDA graph, static cache",
}


def wanted(root: Path) -> dict[Path, str]:
    """What the page should hold; none where there is no such page, or no such table in it."""
    return models_docs.with_tables(root, PAGE, _BLOCK, lambda block: _VIEWS[block["view"]](root))


def _calls(root: Path) -> list[str]:
    found = models_docs.newest(root, f"{host.SUITE}-cuda", host.KIND)
    if found is None:
        return ["*Not measured yet: `tilewise bench --suite host --save` on a GPU fills this in.*"]
    path, record = found
    costs = {(cost.kind, cost.way): cost for cost in host.costs_of(record)}
    beside = {key: cost.beside(costs[cost.kind, host.DEFAULT]) for key, cost in costs.items()}

    def cell(kind: str, call: str) -> str:
        if (kind, call) not in costs:
            return "-"
        return f"{1e6 * costs[kind, call].median:.1f} us, {beside[kind, call].share:.2f}"

    lines = ["| | no grad | grad, forward | forward and backward |", "|---|---:|---:|---:|"]
    calls = dict.fromkeys(call for _, call in costs)
    lines += [f"| {call} | {' | '.join(cell(kind, call) for kind in host.KINDS)} |" for call in calls]
    shape = ", ".join(map(str, record["settings"]["shape"]))
    rounds = record["settings"]["rounds"]
    legend = f"Medians over rounds: time per call of ({shape}), and its share of {host.DEFAULT}'s in the same round."
    more = [f"{1e6 * beside[key].more:+.1f} us" for kind in host.KINDS if (key := (kind, host.PASSED_ON)) in costs]
    passed_on = f"A call that the override passes on, beside {host.DEFAULT} in the same round: {', '.join(more)}."
    return [*lines, "", legend, *([passed_on] if more else []), "", models_docs.source(path, record, rounds)]


def _models(root: Path) -> list[str]:
    found = models_docs.newest(root, "eager", models_docs.KIND)
    if found is None:
        return ["*Not measured yet: `python benchmarks/eager.py --save` on a GPU fills this in.*"]
    path, record = found
    ways = list(dict.fromkeys(way for row in record["rows"] for way in row["speed"]))
    lines = [f"| model | what | {' | '.join(ways)} | {PEER} |", f"|---|---|{'---:|' * (len(ways) + 1)}"]
    for row in record["rows"]:
        cells = [_speed(row, way) for way in ways]
        times = f"{1e3 * median(row['seconds'][PEER]):.2f} ms"
        lines.append(f"| {row['model']} | {_WHATS[row['what']]} | {' | '.join(cells)} | {times} |")
    rounds = min(len(times) for row in record["rows"] for times in row["seconds"].values())
    legend = f"Time of {PEER} over that of each way, with its 99% interval."
    return [*lines, "", legend, "", models_docs.source(path, record, rounds)]


def _speed(row: dict[str, Any], way: str) -> str:
    speed = row["speed"].get(way)
    if speed is None:
        return str(row["wrong"].get(way, "-"))
    interval = "" if speed["low"] is None else f" [{speed['low']:.2f}, {speed['high']:.2f}]"
    return f"{speed['ratio']:.2f}x{interval}"


_VIEWS: dict[str, Callable[[Path], list[str]]] = {"calls": _calls, "models": _models}
