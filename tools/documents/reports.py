"""The reports and sweeps that documents cite, each a page made from the newest record of its name, and lists of them.

`tilewise inspect --save` adds a record named after its problem to the results folder; `make docs` then makes the page
of every report in REPORTS anew, and the list of them. One whose record was interrupted, has few rounds or is of other
kernels than those of today is not listed. Sweeps of `tilewise tune` are treated alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.lab.candidates.variants import THREE_KERNEL
from tilewise.lab.render.pages import page
from tilewise.lab.studies import inspect as inspection
from tilewise.lab.studies import tune

from .records import table

if TYPE_CHECKING:
    from .records import Checkout, Kept

PAGE, SWEEPS = Path("docs/microscope.md"), Path("docs/tune.md")


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


class SweepReport(NamedTuple):
    """A sweep worth a page: what the page is called, what it shows, and how its record is made."""

    name: str
    about: str
    backend: str
    command: str


SWEPT = (
    SweepReport(
        "tune-d128",
        "`sm90`, heads of 128, causal",
        "sm90",
        "tilewise tune --shape 1,16,8192,128 --mask causal --max-configs 40 --dry-run --save",
    ),
    SweepReport(
        "tune-three-kernel",
        "the three-kernel pipeline ([story](ladder.md))",
        THREE_KERNEL,
        f"tilewise tune --backend {THREE_KERNEL} --shape 1,16,1024,64 --max-configs 40 --dry-run --save",
    ),
)


def find(report: Report, checkout: Checkout) -> Kept | None:
    """The record of a report that is cited."""

    def fits(record: dict[str, Any]) -> bool:
        compared = record["comparison"]
        has_gradients = bool(compared["problem"]["needs_grad"])
        return (
            record.get("suite") == report.name
            and has_gradients == report.with_gradients
            and bool(compared.get("complete", True))
        )

    return next(checkout.of_kind(inspection.KIND, fits), None)


def find_sweep(backend: str, checkout: Checkout) -> Kept | None:
    """The record of a backend's sweeps that is cited: with the kernels and configs of today."""

    def fits(record: dict[str, Any]) -> bool:
        return all(one["backend"] == backend for one in record["sweeps"])

    return next(checkout.of_kind(tune.KIND, fits, tune.marks), None)


def command_for(backend: str) -> str:
    """How the record of a backend's sweep is made."""
    return next(report.command for report in SWEPT if report.backend == backend)


def pages(checkout: Checkout) -> dict[Path, str]:
    """The pages of all reports that have a record."""
    found = {report.name: find(report, checkout) for report in REPORTS}
    return {checkout.root / "docs" / f"{name}.html": page(one.values) for name, one in found.items() if one}


def sweeps(checkout: Checkout) -> dict[Path, str]:
    """The pages of all sweeps that have a record."""
    found = {report.name: find_sweep(report.backend, checkout) for report in SWEPT}
    return {checkout.root / "docs" / f"{name}.html": page(one.values) for name, one in found.items() if one}


def listed(asked: str, checkout: Checkout, path: Path) -> list[str]:
    """The list of reports."""
    found = {report: find(report, checkout) for report in REPORTS}
    rows = [[_link(report, one), _about(report, one, path)] for report, one in found.items()]
    return table(["report", "record"], rows)


def _link(report: Report, found: Kept | None) -> str:
    if found is None:
        return report.about
    text, _, more = report.about.partition(" ([more]")
    return f"[{text}]({report.name}.html)" + (f" ([more]{more}" if more else "")


def _about(report: Report, found: Kept | None, path: Path) -> str:
    """The record, and how it was measured where that is not by CUDA events alone."""
    if found is None:
        return f"*not measured yet: `{report.command}`*"
    by_graph = found.values["comparison"]["timing"] == "graph"
    counted = any(isinstance(kernels, list) for kernels in found.values["counters"].values())
    method = [*(["by graph replay"] if by_graph else []), *(["with Nsight Compute's counters"] if counted else [])]
    return "; ".join([found.dated(path), *method])


def swept(asked: str, checkout: Checkout, path: Path) -> list[str]:
    """The list of sweeps."""
    return table(["sweep", "what it found", "record"], [_sweep(report, checkout, path) for report in SWEPT])


def _sweep(report: SweepReport, checkout: Checkout, path: Path) -> list[str]:
    found = find_sweep(report.backend, checkout)
    if found is None:
        return [report.about, f"*not measured yet: `{report.command}`*", ""]
    said = "; ".join(one["conclusion"] for one in found.values["sweeps"])
    return [f"[{report.about.partition(' (')[0]}]({report.name}.html)", said, found.dated(path)]
