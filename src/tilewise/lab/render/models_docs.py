"""The table of whole models in docs/integrations.md, each from the newest record of benchmarks/models.py that has it:

<!-- models -->    what follows, up to the end marker, is replaced
<!-- /models -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.compare import median
from ..studies import bench, kept, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path("docs/integrations.md")
KIND = "tilewise models"
_BLOCK = re.compile(r"(?P<begin><!-- models -->\n)(?P<body>.*?)(?P<end><!-- /models -->)", re.DOTALL)
_OURS = "tilewise"
_LEGEND = "Speed: against the fastest of Transformers' own that computes the same function, with its 99% interval."


def wanted(root: Path) -> dict[Path, str]:
    """What the page should hold; none where there is no such page, or no such table in it."""
    return with_tables(root, PAGE, _BLOCK, lambda block: _table(root))


def with_tables(
    root: Path, place: Path, blocks: re.Pattern[str], table: Callable[[re.Match[str]], list[str]]
) -> dict[Path, str]:
    """A page with what `table` makes of each of its blocks; none where there is no such page, or no block in it."""
    page = root / place
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if not blocks.search(text):
        return {}
    return {page: blocks.sub(lambda block: block["begin"] + "\n".join([*table(block), block["end"]]), text)}


def _table(root: Path) -> list[str]:
    found = list(all_of(root, "transformers", KIND))
    if not found:
        return ["*Not measured yet: `python benchmarks/models.py --save` on a GPU fills this in.*"]
    taken: dict[str, list[dict[str, Any]]] = {}  # rows by model
    sources: list[tuple[Path, dict[str, Any], list[str]]] = []
    for path, record in found:
        new = [model for model in _models(record) if model not in taken]
        taken |= {model: [row for row in record["rows"] if row["model"] == model] for model in new}
        if new:
            sources.append((path, record, new))
    order = max((_models(record) for _, record in found), key=len)
    rows = [row for model in sorted(taken, key=[*order, *taken].index) for row in taken[model]]
    peers = [name for name in dict.fromkeys(name for row in rows for name in row["seconds"]) if name != _OURS]
    head = ["model", "batch x tokens", "what", "speed", _OURS, *peers]
    lines = [f"| {' | '.join(head)} |", f"|---|---:|---|---:|{'---:|' * (len(peers) + 1)}"]
    lines += [f"| {' | '.join(_cells(row, peers))} |" for row in rows]
    lines += ["", _LEGEND]
    for path, record, models in sources:
        times = [found for model in models for row in taken[model] for found in row["seconds"].values() if found]
        told = source(path, record, min(map(len, times), default=0))
        lines += ["", told if len(sources) == 1 else f"{', '.join(models)}: {told[0].lower()}{told[1:]}"]
    return lines


def _models(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in record["rows"]))


def _cells(row: dict[str, Any], peers: list[str]) -> list[str]:
    speed = row.get("speed")
    told = "-"
    if speed is not None:
        interval = "" if speed["low"] is None else f" [{speed['low']:.2f}, {speed['high']:.2f}]"
        told = f"{speed['ratio']:.2f}x{interval}"
    times = [row["seconds"].get(name) for name in (_OURS, *peers)]
    cells = [f"{1e3 * median(found):.2f} ms" if found else "-" for found in times]
    return [row["model"], f"{row['batch']} x {row['tokens']}", row["what"], told, *cells]


def newest(root: Path, suite: str, kind: str) -> tuple[Path, dict[str, Any]] | None:
    """The newest record of a kind from a GPU; not one of tiny models."""
    return next(all_of(root, suite, kind), None)


def all_of(root: Path, suite: str, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All such records, the newest first."""
    for path, record in sorted(kept.of_kind(root / bench.RESULTS, kind), key=_date, reverse=True):
        fits = record["suite"] == suite and _gpu(record) and not record["settings"].get("tiny")
        if fits and not records.marks_of(record):
            yield path, record


def _date(found: tuple[Path, dict[str, Any]]) -> tuple[str, str]:
    return str(found[1]["provenance"]["date"]), found[0].name


def source(path: Path, record: dict[str, Any], rounds: int) -> str:
    """Where figures come from, and what a reader must know of them."""
    provenance = record["provenance"]
    known = provenance["versions"]
    versions = [f"{name} {known[name]}" for name in ("torch", "transformers") if name in known]
    about = ", ".join([_gpu(record), *versions, provenance["date"][:10]])
    return f"From [{path.name}](../{bench.RESULTS}/{path.name}): {about}, {rounds} rounds."


def _gpu(record: dict[str, Any]) -> str:
    return next((str(gpu["name"]) for gpu in record["provenance"]["gpus"]), "")
