"""The table of docs/kernels/terms.md that says what tile maps cost, from the newest record of benchmarks/tile_map.py:

<!-- tile map -->    what follows, up to the end marker, is replaced
<!-- /tile map -->
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..measure.compare import median
from . import models_docs

PAGE = Path("docs/kernels/terms.md")
KIND, SUITE = "tilewise tile map", "tile-map"
SEQ = 4096  # rows and keys of the suite `variants`
SHARE = 0.05  # of the forward that it serves: what a map may take,
BANDWIDTH, MORE_SECONDS = 0.75, 4e-6  # or a read of the tensor at this share of the memory's rate, and a little more
COLUMNS = ("mask", ">MiB", ">map, us", ">of the forward", ">allowed, us", ">step's map, us", ">of the step", "reached")
_BLOCK = re.compile(r"(?P<begin><!-- tile map -->\n)(?P<body>.*?)(?P<end><!-- /tile map -->)", re.DOTALL)


def wanted(root: Path) -> dict[Path, str]:
    """What the page should hold; none where there is no such page, or no such table in it."""
    return models_docs.with_tables(root, PAGE, _BLOCK, lambda block: _table(root))


def allowed(size: int, bytes_per_second: float, forward: float) -> float:
    """Seconds that the map of so many bytes may take beside a forward."""
    return max(SHARE * forward, size / (BANDWIDTH * bytes_per_second) + MORE_SECONDS)


def cells(record: dict[str, Any]) -> list[list[str]]:
    """A line of the table per row of a record."""
    return [_cells(row, record["settings"]["bytes_per_second"]) for row in record["rows"]]


def _cells(row: dict[str, Any], bytes_per_second: float) -> list[str]:
    size = f"{row['bytes'] / 2**20:.3g}"
    if row["wrong"]:
        return [row["row"], size, *["-"] * 5, f"wrong: {'; '.join(row['wrong'])}"]
    times = {name: median(found) for name, found in row["seconds"].items()}
    made, for_step = times["forward's map"], times["step's map"]
    limit = allowed(row["bytes"], bytes_per_second, times["forward"])
    shares = made / times["forward"], for_step / times["step"]
    figures = f"{1e6 * made:.1f}", f"{shares[0]:.1%}", f"{1e6 * limit:.1f}", f"{1e6 * for_step:.1f}", f"{shares[1]:.1%}"
    return [row["row"], size, *figures, "yes" if made <= limit else "MISSED"]


def _is_whole(settings: dict[str, Any]) -> bool:
    return not settings["only"] and settings["seq"] == SEQ


def _table(root: Path) -> list[str]:
    whole = (found for found in models_docs.all_of(root, SUITE, KIND) if _is_whole(found[1]["settings"]))
    found = next(whole, None)
    if found is None:
        return ["*Not measured yet: `python benchmarks/tile_map.py --save` on a GPU fills this in.*"]
    path, record = found
    head = [name.removeprefix(">") for name in COLUMNS]
    rules = ["---:" if name.startswith(">") else "---" for name in COLUMNS]
    lines = [f"| {' | '.join(line)} |" for line in (head, *cells(record))]
    lines.insert(1, f"|{'|'.join(rules)}|")
    legend = (
        f"Allowed: {SHARE:.0%} of the forward, or one read of the tensor at {BANDWIDTH:.0%} of the memory's bandwidth "
        f"and {1e6 * MORE_SECONDS:.0f} us. A step's map includes the forward's."
    )
    told = models_docs.source(path, record, record["settings"]["rounds"])
    up = os.path.relpath(root, (root / PAGE).parent)
    return [*lines, "", legend, "", told.replace("](../", f"]({Path(up).as_posix()}/")]
