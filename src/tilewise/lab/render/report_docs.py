"""The reports under docs/ that documents cite, each a page made from the newest record of its name.

`tilewise inspect --save` adds a record named after its problem to the results folder; `tilewise docs` then makes the
page of every report in REPORTS anew, and the list of them between the markers of docs/microscope.md:

    <!-- reports -->    what follows, up to the end marker, is replaced
    <!-- /reports -->

A report whose record was interrupted, has few rounds or is of other kernels than those of today is not listed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..studies import bench, kept, records
from ..studies import inspect as inspection
from .pages import page

PAGE = Path("docs/microscope.md")
_BLOCK = re.compile(r"(?P<begin><!-- reports -->\n)(?P<body>.*?)(?P<end><!-- /reports -->)", re.DOTALL)


class Report(NamedTuple):
    """A problem worth a page: what the page is called, what it shows, and how its record is made."""

    name: str
    about: str
    command: str
    with_gradients: bool = False


REPORTS = (
    Report(
        "inspect-2x8x512x64",
        "fp16 (2, 8, 512, 64)",
        "tilewise inspect --shape 2,8,512,64 --dtype fp16 --timing graph --ncu -v --save",
    ),
    Report(
        "inspect-2x8x512x64-flags",
        "PyTorch's switches on that problem, one setting per row ([more](#all-flags-off))",
        "tilewise inspect --shape 2,8,512,64 --dtype fp16 --experiment flags --timing graph --save",
    ),
    Report(
        "inspect-1x32x8192x128-causal",
        "bf16 (1, 32, 8192, 128), causal, with gradients",
        "tilewise inspect --shape 1,32,8192,128 --mask causal --grad -v --save",
        with_gradients=True,
    ),
    Report(
        "inspect-4x16x2048x128-dense",
        "bf16 (4, 16, 2048, 128), a padded batch: saved tensors with a boolean mask",
        "tilewise inspect --tensors padded.pt --save",
    ),
    Report(
        "inspect-8x32x1x128-kv8-sk8192",
        "bf16 decode: one new token of 8 sequences, 32 heads over 8, 8192 keys",
        "tilewise inspect --shape 8,32,1,128 --kv-heads 8 --seq-kv 8192 --save",
    ),
    Report(
        "inspect-1x16x1024x64",
        "fp16 (1, 16, 1024, 64), three kernels beside fused ones ([more](ladder.md))",
        "tilewise inspect --shape 1,16,1024,64 --dtype fp16 --timing graph --candidate ladder:three-kernel --save",
    ),
)


class Kept(NamedTuple):
    """A record of the results folder."""

    path: Path
    values: dict[str, Any]

    @property
    def date(self) -> str:
        return str(self.values["provenance"]["date"])

    def method(self) -> list[str]:
        """How it was measured, where that is not by CUDA events alone."""
        counted = any(isinstance(kernels, list) for kernels in self.values["counters"].values())
        found = ["by graph replay"] if self.values["comparison"]["timing"] == "graph" else []
        return [*found, "with Nsight Compute's counters"] if counted else found


def find(report: Report, root: Path) -> Kept | None:
    """The newest record of the report's name that may be cited: it is complete, and its kernels are those of today."""
    found = []
    for path, values in kept.of_kind(root / bench.RESULTS, inspection.KIND):
        has_gradients = bool(values["comparison"]["problem"]["needs_grad"])
        asked = values.get("suite") == report.name and has_gradients == report.with_gradients
        if asked and values["comparison"].get("complete", True) and not records.marks_of(values):
            found.append(Kept(path, values))
    return max(found, key=lambda one: (one.date, one.path.name), default=None)


def wanted(root: Path) -> dict[Path, str]:
    """What the list and the pages of all reports that have a record should hold; none where there is no such list."""
    listed = root / PAGE
    text = listed.read_text(encoding="utf-8") if listed.is_file() else ""
    if not _BLOCK.search(text):
        return {}
    kept = {report: find(report, root) for report in REPORTS}
    lines = ["| report | record |", "|---|---|"]
    lines += [f"| {_link(report, found)} | {_about(report, found)} |" for report, found in kept.items()]
    body = "\n".join(lines) + "\n"
    files = {listed: _BLOCK.sub(lambda match: match["begin"] + body + match["end"], text)}
    pages = {report.name: page(found.values) for report, found in kept.items() if found is not None}
    return files | {root / "docs" / f"{name}.html": made for name, made in pages.items()}


def _link(report: Report, found: Kept | None) -> str:
    if found is None:
        return report.about
    text, _, more = report.about.partition(" ([more]")
    return f"[{text}]({report.name}.html)" + (f" ([more]{more}" if more else "")


def _about(report: Report, found: Kept | None) -> str:
    if found is None:
        return f"*not measured yet: `{report.command}`*"
    told = found.values["provenance"]
    device = told["gpus"][0]["name"] if told["gpus"] else told["machine"]["cpu"]
    link = f"[{device}, {found.date[:10]}](../{bench.RESULTS.as_posix()}/{found.path.name})"
    return "; ".join([link, *found.method()])
