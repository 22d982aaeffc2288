"""The sweeps of docs/tune.md, each with its page from the newest record whose kernels are those of today:

<!-- tune -->    what follows, up to the end marker, is replaced
<!-- /tune -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..candidates.variants import THREE_KERNEL
from ..studies import bench, kept, tune
from . import models_docs
from .pages import page
from .tune_page import Sweep

PAGE = Path("docs/tune.md")
_BLOCK = re.compile(r"(?P<begin><!-- tune -->\n)(?P<body>.*?)(?P<end><!-- /tune -->)", re.DOTALL)


class Report(NamedTuple):
    """A sweep worth a page: what the page is called, what it shows, and how its record is made."""

    name: str
    about: str
    backend: str
    command: str


REPORTS = (
    Report(
        "tune-d128",
        "`sm90`, heads of 128, causal",
        "sm90",
        "tilewise tune --shape 1,16,8192,128 --mask causal --max-configs 40 --dry-run --save",
    ),
    Report(
        "tune-three-kernel",
        "the three-kernel pipeline ([story](ladder.md))",
        THREE_KERNEL,
        f"tilewise tune --backend {THREE_KERNEL} --shape 1,16,1024,64 --max-configs 40 --dry-run --save",
    ),
)


def find(backend: str, root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest record of sweeps of a backend that may be cited: complete, with the kernels and configs of today."""
    found = [
        (str(record["provenance"]["date"]), path.name, record)
        for path, record in kept.of_kind(root / bench.RESULTS, tune.KIND)
        if record["complete"] and all(one["backend"] == backend for one in record["sweeps"]) and not tune.marks(record)
    ]
    if not found:
        return None
    _, name, record = max(found, key=lambda one: one[:2])
    return root / bench.RESULTS / name, record


def command_for(backend: str) -> str:
    """How the record of a backend's sweep is made."""
    return next(report.command for report in REPORTS if report.backend == backend)


def wanted(root: Path) -> dict[Path, str]:
    """What the list and the pages of all sweeps that have a record should hold; none where there is no such list."""
    files = models_docs.with_tables(root, PAGE, _BLOCK, lambda block: _table(root))
    if not files:
        return {}
    kept_sweeps = {report.name: find(report.backend, root) for report in REPORTS}
    made = {name: page(found[1]) for name, found in kept_sweeps.items() if found is not None}
    return files | {root / "docs" / f"{name}.html": text for name, text in made.items()}


def _table(root: Path) -> list[str]:
    return ["| sweep | what it found | record |", "|---|---|---|", *(_line(report, root) for report in REPORTS)]


def _line(report: Report, root: Path) -> str:
    found = find(report.backend, root)
    if found is None:
        return f"| {report.about} | *not measured yet: `{report.command}`* | |"
    path, record = found
    said = "; ".join(Sweep(one, record["settings"]).conclusion for one in record["sweeps"])
    device = f"{record['provenance']['gpus'][0]['name']}, {record['provenance']['date'][:10]}"
    link = f"[{device}](../{bench.RESULTS.as_posix()}/{path.name})"
    return f"| [{report.about.partition(' (')[0]}]({report.name}.html) | {said} | {link} |"
