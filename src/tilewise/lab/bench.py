"""bench: suites of problems as data, ratios against PyTorch's best path, and a record that can be kept.

A suite is a list of rows: a problem, its candidates, and how it is timed. The last line of the output sums it up for
the candidate `tilewise`: the geometric mean of its ratios and the worst of them. A ratio is the time of PyTorch's
best path over ours (forward, and backward where the row has one): above 1 is faster. Rows in which PyTorch has no right
answer to compare with have no ratio. A record is written once, under a new name; nothing is ever overwritten.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import masks
from ..errors import InvalidInput
from ..problem import Problem, dtype_name
from . import environment, report
from .candidates import FA3, OURS, TORCH_DEFAULT, has_fa3
from .compare import REFUSED, Comparison, Row, compare, geomean, ratio, steps, summary
from .pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .compare import Settings

RESULTS = Path("benchmarks/results")
_COLUMNS = (
    "row",
    "candidate",
    "verdict",
    ">ms",
    ">p20..p80",
    ">bwd ms",
    ">speed",
    ">TFLOP/s",
    ">host us",
    ">MiB",
    ">error",
)


def row(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    mask: str = "full",
    *,
    candidates: tuple[str, ...],
    device: str,
    method: str = "",
    flush: bool = False,
    **fields: Any,
) -> Row:
    """A row for q of `shape` (batch, heads, seq, head_dim); `fields` are those of Problem that differ from it."""
    batch, heads, seq, dim = shape
    values: dict[str, Any] = {"heads_kv": heads, "seq_kv": seq, "head_dim_v": dim, "mask": masks.parse(mask)} | fields
    problem = Problem(batch=batch, heads_q=heads, seq_q=seq, head_dim=dim, dtype=dtype, **values)
    return Row(_row_name(problem), problem, candidates, device, method, flush)


def _row_name(problem: Problem) -> str:
    name = f"{dtype_name(problem.dtype)} {problem.batch}x{problem.heads_q}x{problem.seq_q}x{problem.head_dim}"
    if problem.heads_kv != problem.heads_q:
        name += f" kv{problem.heads_kv}"
    if problem.seq_kv != problem.seq_q:
        name += f" sk{problem.seq_kv}"
    if problem.head_dim_v != problem.head_dim:
        name += f" dv{problem.head_dim_v}"
    name += f" {problem.mask}"
    return name + (f" softcap {problem.softcap:g}" if problem.softcap else "") + (" grad" if problem.needs_grad else "")


_CPU: dict[str, Any] = {"device": "cpu", "candidates": (OURS, TORCH_DEFAULT, "sdpa:math")}
_CUDA: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "sdpa:cudnn", "sdpa:flash")}
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
_TOKENS, _HIDDEN = 16384, 2048

SUITES: dict[str, tuple[Row, ...]] = {
    "cpu": (
        row((2, 8, 512, 64), _F32, **_CPU),
        row((1, 8, 2048, 64), _F32, **_CPU),
        row((1, 8, 2048, 64), _F32, "causal", **_CPU),
        row((1, 8, 2048, 64), _F32, "window:256,0", **_CPU),
        row((1, 8, 1024, 64), _F32, "causal", heads_kv=2, **_CPU),
        row((1, 8, 1024, 64), _F32, softcap=30.0, **_CPU),
        row((1, 8, 1024, 64), _F32, "causal", needs_grad=True, **_CPU),
        row((2, 8, 512, 64), _BF16, **_CPU),
    ),
    "forward": tuple(
        row((_TOKENS // seq, _HIDDEN // dim, seq, dim), _BF16, mask, **_CUDA)
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
        for seq in (512, 1024, 2048, 4096, 8192, 16384)
    ),
    "small": tuple(
        row(shape, _F16, mask, method="graph", **_CUDA)
        for shape in ((2, 8, 512, 64), (1, 16, 1024, 64), (1, 32, 512, 128), (1, 8, 256, 64))
        for mask in ("full", "causal")
    ),
    "models": (
        row((1, 32, 8192, 128), _BF16, "causal", heads_kv=8, **_CUDA),
        row((1, 24, 4608, 128), _BF16, **_CUDA),
        row((64, 12, 197, 64), _BF16, **_CUDA),
        row((1, 16, 8192, 256), _BF16, "window:1024,0", heads_kv=8, softcap=50.0, **_CUDA),
        row((1, 128, 4096, 192), _BF16, "causal", head_dim_v=128, **_CUDA),
        row((1, 32, 16, 128), _BF16, heads_kv=8, seq_kv=8192, **_CUDA),
    ),
    "host": tuple(
        row((1, 8, 128, 64), _BF16, method="host", needs_grad=needs_grad, **_CUDA) for needs_grad in (False, True)
    ),
}


class Score(NamedTuple):
    """What a suite comes to for `tilewise`. nan and "none" where no row has a ratio."""

    geomean: float
    worst: float
    row: str

    def __str__(self) -> str:
        return f"geomean {self.geomean:.3f}, worst {self.worst:.3f} ({self.row})"


def suite(name: str, only: str = "", extra: tuple[str, ...] = ()) -> list[Row]:
    """The rows of a suite whose name contains `only`, with the extra candidates, and FlashAttention-3 where it is."""
    if name not in SUITES:
        raise InvalidInput("--suite", repr(name), f"one of {', '.join(SUITES)}", "choose one of these")
    if has_fa3() and any(row.device == "cuda" for row in SUITES[name]):
        extra = (FA3, *extra)
    rows = [replace(row, candidates=(*row.candidates, *extra)) for row in SUITES[name] if only in row.name]
    if not rows:
        names = ", ".join(row.name for row in SUITES[name])
        raise InvalidInput(
            "--only", repr(only), f"a part of the name of a row: {names}", "choose a part of one of these"
        )
    return rows


def run(rows: list[Row], settings: Settings) -> list[Comparison]:
    """Compare row by row. An interrupt ends the run early: the last comparison is then not complete."""
    done: list[Comparison] = []
    with report.Bar(sum(steps(row, settings) for row in rows)) as bar, Pool() as pool:
        for row in rows:
            done.append(compare(row, pool, settings, bar.tick))
            if not done[-1].complete:
                break
    return done


def score(comparisons: Iterable[Comparison]) -> Score:
    ratios = {c.row.name: value for c in comparisons if (value := _ratio(c)) is not None}
    if not ratios:
        return Score(float("nan"), float("nan"), "none")
    worst = min(ratios, key=ratios.__getitem__)
    return Score(geomean(list(ratios.values())), ratios[worst], worst)


def _ratio(comparison: Comparison) -> float | None:
    ours = comparison[OURS]
    return None if ours.failed else comparison.speed(ours)


def record(name: str, comparisons: list[Comparison], settings: Settings, command: list[str]) -> dict[str, Any]:
    """The raw measurements with where they come from."""
    return {
        "kind": "tilewise bench",
        "suite": name,
        "complete": all(comparison.complete for comparison in comparisons),
        "provenance": environment.provenance(settings.seed, command),
        "settings": {field: getattr(settings, field) for field in settings.__slots__},
        "score": score(comparisons)._asdict(),
        "rows": [comparison.to_dict() for comparison in comparisons],
    }


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write the record under a name that no file has yet."""
    folder.mkdir(parents=True, exist_ok=True)
    provenance = result["provenance"]
    stamp = provenance["date"].replace(":", "").replace("+0000", "Z")
    stem = f"{stamp}-{result['suite']}"
    for number in range(1000):
        path = folder / (f"{stem}.json" if number == 0 else f"{stem}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(report.to_json(result) + "\n")
        except FileExistsError:
            continue
        return path
    raise AssertionError("a thousand results in one second")


def show(comparisons: list[Comparison]) -> None:
    """One line per row and candidate; what went wrong; last the score."""
    print(f"device: {', '.join(sorted({environment.device_line(c.row.device) for c in comparisons}))}")
    report.print_table(_COLUMNS, [cells for comparison in comparisons for cells in _lines(comparison)])
    for comparison in comparisons:
        for outcome in comparison.outcomes:
            if outcome.failed or outcome.verdict == REFUSED:
                print(f"{comparison.row.name}: {outcome.candidate}: {'; '.join([outcome.verdict, *outcome.because])}")
    if not all(comparison.complete for comparison in comparisons):
        print("interrupted: only what was measured is here")
    if ahead := _ahead_of(FA3, comparisons):
        print(f"ahead of FlashAttention-3 on {sum(ahead)} of {len(ahead)} rows")
    print(score(comparisons))


def _ahead_of(rival: str, comparisons: list[Comparison]) -> list[bool]:
    """Row by row, where both have a time: is `tilewise` faster than a rival that is not PyTorch's?"""
    ahead = []
    for comparison in comparisons:
        outcomes = {outcome.candidate: outcome for outcome in comparison.outcomes}
        if rival in outcomes and OURS in outcomes:
            speed = ratio(outcomes[OURS].costs, outcomes[rival].costs)
            ahead += [] if speed is None else [speed > 1.0]
    return ahead


def _lines(comparison: Comparison) -> list[list[str]]:
    lines = []
    for outcome in comparison.outcomes:
        forward = summary(outcome.forward)
        norm = outcome.errors["out"]["norm"] if "out" in outcome.errors else None
        cells = [comparison.row.name, outcome.candidate, outcome.verdict]
        cells += [report.milliseconds(forward), report.spread(forward), report.milliseconds(summary(outcome.backward))]
        cells += [report.times(comparison.speed(outcome)), report.rate(comparison.row.problem.flops(), forward)]
        cells += [report.microseconds(summary(outcome.overhead)), report.mebibytes(outcome.memory)]
        lines.append([*cells, report.error(norm)])
    return lines
