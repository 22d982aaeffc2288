"""Blocks from records of suites: `bench [SUITE] VIEW [gpu=NAME]`.

Views: `table` (every row of a suite), `problems` (a line per problem with a column for each thing that is timed),
`goals` (what is asked of every row of a suite that has goals, and what it reaches), `plot` (its pictures, in
docs/plots/), `speeds` (that of rates, or nothing), and, with no suite named, `summary` (a line per suite and thing that
is timed) and `headline` (the lines of README.md). A suite without a record that may be cited says that it is not
measured.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from tilewise.errors import InvalidInput
from tilewise.lab import report
from tilewise.lab.candidates.names import FLEX, Candidate
from tilewise.lab.measure import statistics, words
from tilewise.lab.measure.compare import REFUSED, geomean, summary
from tilewise.lab.studies import bench, suites

from . import plots
from .records import relative, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tilewise.lab.measure.compare import Comparison, Outcome
    from tilewise.lab.studies.records import Record

    from .records import Checkout

_SUMMARY = [
    "suite", "what is timed", ">geomean", ">worst", f">under {bench.BEHIND}", "worst row", ">geomean, PyTorch alone",
    "record",
]  # fmt: skip


_LEGEND = f"Speed with its 99% interval; {words.LEGEND}. Errors are norm-wise, `ok` within the budget of float64."


HEADLINE = (
    ("Forward", "forward", "forward"),
    ("Backward", "backward", "backward"),
    ("Backward of shapes that no tile divides", "odd", "backward"),
    ("Training step, grouped heads", "grouped", "step"),
    ("Training step, packed sequences", "packed", "step"),
    ("Training step under masks, biases, sinks, dropout", "variants", "step"),
    ("Decoding", "decode", "forward"),
    ("Chunked prefill on a cache", "chunked", "forward"),
)
"""What README.md shows: a title, the suite, and what of it is timed."""
_CLOSEST = 3
_NAMES = bench.RIVALS | {
    FLEX: "FlexAttention",
    "torch-cudnn": "cuDNN",
    "torch-flash": "PyTorch's flash",
    "torch-efficient": "PyTorch's efficient",
}


class Asked(NamedTuple):
    """What a marker asks for."""

    suite: str
    view: str
    gpu: str


def parse_marker(text: str, path: Path) -> Asked:
    words = text.split()
    gpu = next((word.removeprefix("gpu=") for word in words if word.startswith("gpu=")), "")
    plain = [word for word in words if not word.startswith("gpu=")]
    view = plain.pop() if plain and plain[-1] in (*_VIEWS, *_OF_SEVERAL) else ""
    suite = plain.pop() if plain else ""
    if not view or plain or (suite not in suites.names() and not (view in _OF_SEVERAL and not suite)):
        expected = f"[SUITE] {'|'.join((*_VIEWS, *_OF_SEVERAL))} [gpu=NAME]"
        raise InvalidInput(f"marker in {path.name}", repr(text), expected, "correct the marker")
    return Asked(suite, view, gpu)


def block(text: str, checkout: Checkout, path: Path) -> list[str]:
    asked = parse_marker(text, path)
    if asked.view in _OF_SEVERAL:
        return _OF_SEVERAL[asked.view](checkout, asked.gpu, path)
    record = checkout.suite(asked.suite, asked.gpu)
    if record is None:
        if asked.view == "speeds":
            return []
        where = f" on {asked.gpu}" if asked.gpu else ""
        return [
            f"*Not measured{where} with today's kernels and the strongest of others: `make evidence` fills this in.*"
        ]
    return _VIEWS[asked.view](record, checkout.root, path)


def _table(record: Record, root: Path, path: Path) -> list[str]:
    comparisons = record.comparisons
    ours = comparisons[0].outcomes[0].candidate
    rivals = [name for name in bench.RIVALS if any(_rival(comparison, name) for comparison in comparisons)]
    head = ["problem", f">{ours}", ">spread", "best of PyTorch", ">spread", ">speed"]
    head += [f">against {bench.RIVALS[name]}" for name in rivals]
    head += [f">error, {ours}", ">error, PyTorch"]
    lines = table(head, [_line(comparison, rivals) for comparison in comparisons])
    return [*lines, "", _LEGEND, "", *_sums(comparisons), "", _source(record, root, path)]


def _rival(comparison: Comparison, name: str) -> Outcome | None:
    return next((outcome for outcome in comparison.timed() if outcome.candidate == name), None)


def _line(comparison: Comparison, rivals: list[str]) -> list[str]:
    ours, peer = comparison.outcomes[0], comparison.best_peer()
    others = [peer, *(_rival(comparison, name) for name in rivals)]
    cells = [comparison.row.name, _time(ours, comparison), report.spread(summary(ours.samples))]
    cells += [f"{peer.candidate} {_time(peer, comparison)}" if peer else "no right answer", _spread(peer)]
    cells += ["-" if ours.failed else words.cell(comparison.versus(ours, other)) for other in others]
    return [*cells, _error(ours), _error(peer)]


def _problems(record: Record, root: Path, path: Path) -> list[str]:
    """Rows of one problem side by side, in the order of their first."""
    comparisons = record.comparisons
    kinds = list(dict.fromkeys(bench.timed(comparison, comparisons) for comparison in comparisons))
    rows = []
    for alike in _by_problem(comparisons):
        cells = {bench.timed(comparison, comparisons): _cell(comparison) for comparison in alike}
        rows.append([_shared_name(alike), *(cells.get(kind, "") for kind in kinds)])
    lines = table(["problem", *(f">{kind}" for kind in kinds)], rows)
    return [*lines, "", f"{words.LEGEND}.", "", *_sums(comparisons), "", _source(record, root, path)]


def _goals(record: Record, root: Path, path: Path) -> list[str]:
    """Our time, the fastest of others, both ratios with what is asked of them, and what was reached."""
    comparisons = record.comparisons
    lines = table(list(bench.GOAL_COLUMNS), [bench.goal_cells(comparison) for comparison in comparisons])
    return [*lines, "", f"{bench.GOAL_LEGEND}.", "", *_sums(comparisons), "", _source(record, root, path)]


def _by_problem(comparisons: list[Comparison]) -> list[list[Comparison]]:
    found: dict[object, list[Comparison]] = {}
    for comparison in comparisons:
        found.setdefault((comparison.row.problem.with_(needs_grad=False), comparison.row.device), []).append(comparison)
    return list(found.values())


def _shared_name(comparisons: list[Comparison]) -> str:
    """What the names of the rows have in common, in whole words."""
    columns = zip(*(comparison.row.name.split() for comparison in comparisons), strict=False)
    return " ".join(words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, columns))


def _cell(comparison: Comparison) -> str:
    """The ratio to the fastest that is not ours, that to PyTorch's best where it is another, and the rate."""
    ours, timed = comparison.outcomes[0], summary(comparison.outcomes[0].samples)
    if ours.failed or timed is None:
        return ours.verdict if ours.verdict == REFUSED else f"**{ours.verdict}**"
    peer, rival = comparison.best_peer(), comparison.best_rival()
    speed = _speed(comparison, ours, rival)
    if rival is not None and rival is not peer:
        speed += f" {rival.candidate} (PyTorch: {_speed(comparison, ours, peer)})"
    return f"{speed}, {report.rate(comparison.row.flops, timed)} TFLOP/s"


def _speed(comparison: Comparison, ours: Outcome, other: Outcome | None) -> str:
    """The ratio, marked as in the tables; the interval is left to them."""
    found = comparison.versus(ours, other)
    if found is None:
        return "-"
    mark = "~" if found.verdict == statistics.INDISTINGUISHABLE else ""
    return f"{mark}{found.ratio:.2f}x{' ?' if found.verdict == statistics.TOO_FEW else ''}"


def _time(outcome: Outcome, comparison: Comparison) -> str:
    timed = summary(outcome.samples)
    if timed is None:
        return outcome.verdict if outcome.verdict == REFUSED else f"**{outcome.verdict}**"
    rate = report.rate(comparison.row.flops, timed)
    return f"{report.milliseconds(timed)} ms, {rate} TFLOP/s"


def _spread(outcome: Outcome | None) -> str:
    return report.spread(summary(outcome.samples)) if outcome else "-"


def _error(outcome: Outcome | None) -> str:
    return words.error_cell(outcome, "out", "dq", "dk", "dv") if outcome else "-"


def _sums(comparisons: list[Comparison]) -> list[str]:
    lines = [f"- {kind}: {found}, {found.shares}" for kind, found in bench.scores(comparisons).items()]
    every = bench.score(comparisons)
    lines.append(f"- all rows, against the fastest that is not ours: {every}, {every.shares}")
    return lines + _failures(comparisons)


def _failures(comparisons: list[Comparison]) -> list[str]:
    """Which candidates have no right answer in which rows, although they take them. They are in no ratio there."""
    found: dict[str, list[str]] = {}
    for comparison in comparisons:
        for outcome in comparison.outcomes:
            if outcome.failed:
                found.setdefault(f"{outcome.candidate}, {outcome.verdict}", []).append(comparison.row.name)
    return [f"- no right answer of {what}: {', '.join(rows)}" for what, rows in found.items()]


def _summary(checkout: Checkout, gpu: str, path: Path) -> list[str]:
    rows = []
    for name in suites.names():
        posed = suites.rows_of(name)
        on_gpu = posed[0].device.startswith("cuda")
        record = checkout.suite(name, gpu if on_gpu else "")
        if record is None:
            timed = " + ".join(dict.fromkeys(what for row in posed for what in row.timed))
            rows.append([name, timed, "", "", "", "not measured", "", ""])
            continue
        about = f"[{record.device}, {record.date[:10]}]({_file(record, checkout.root, path)})"
        for kind, comparisons in bench.by_kind(record.comparisons).items():
            found, of_torch = bench.score(comparisons), bench.score_of_torch(comparisons)
            figures = [f"{found.geomean:.2f}", f"{found.worst:.2f}", f"{found.behind:.0%}", found.row]
            rows.append([name, kind, *figures, f"{of_torch.geomean:.2f}" if of_torch.rows else "-", about])
    return table(_SUMMARY, rows)


def _headline(checkout: Checkout, gpu: str, path: Path) -> list[str]:
    """A line for each thing that users choose by: how we stand to each of the others, and the worst row."""
    lines, dates, lacking = [], [], []
    for title, suite, what in HEADLINE:
        record = checkout.suite(suite, gpu)
        rows = [] if record is None else [c for c in record.comparisons if what in c.row.timed]
        worst = min(rows, key=_ratio, default=None)
        rival = worst.best_rival() if worst is not None else None
        if record is None or worst is None or rival is None:
            lacking.append(title.lower())
            continue
        least = f"{_ratio(worst):.2f}, {_peer_name(rival.candidate)}: {worst.row.name}"
        link = f"[{len(rows)}]({_file(record, checkout.root, path)})"
        lines.append([title, link, _against_each(rows), least])
        dates += [comparison.measured[:10] for comparison in rows]
    missing = (
        "*Not measured yet with today's kernels and the strongest of others beside them, so that no figure is shown: "
        f"{'; '.join(lacking)}. `make evidence` on a GPU measures what is lacking.*"
    )
    if not lines:
        return [missing]
    days = " to ".join(dict.fromkeys((min(dates), max(dates))))
    note = (
        "A speed is a library's time divided by ours, the geometric mean over the rows where its answer is right: above"
        " 1, tilewise is faster. `best`: the fastest of all, row by row."
    )
    about = f"{note} Measured on an NVIDIA {gpu}, {days}."
    head = ["what is timed", ">rows", "speed against", "worst row"]
    return [*table(head, lines), "", about, *(["", missing] if lacking else [])]


def _ratio(comparison: Comparison) -> float:
    speed = bench.against_fastest(comparison)
    return math.inf if speed is None else speed.ratio


def _against_each(rows: list[Comparison]) -> str:
    """The best of all, and the closest of the libraries that take a quarter of the rows, each with how many it takes
    where that is not all of them."""
    peers = dict.fromkeys(one.candidate for row in rows for one in row.timed() if not Candidate(one.candidate).is_ours)
    found: dict[str, list[float]] = {}
    for peer in peers:
        ratios = [speed.ratio for speed in bench.against_rival(peer, rows).values()]
        if 4 * len(ratios) >= len(rows):
            found[peer] = ratios
    close = sorted(found, key=lambda peer: geomean(found[peer]))[:_CLOSEST]
    shown = {"best": [speed.ratio for row in rows if (speed := bench.against_fastest(row)) is not None]}
    shown |= {_peer_name(peer): found[peer] for peer in close}
    return ", ".join(f"{name} {_mean(ratios, len(rows))}" for name, ratios in shown.items())


def _mean(ratios: list[float], rows: int) -> str:
    return f"{geomean(ratios):.2f}" + (f" ({len(ratios)} rows)" if len(ratios) < rows else "")


def _peer_name(candidate: str) -> str:
    return _NAMES.get(candidate, candidate)


def _plot(record: Record, root: Path, path: Path) -> list[str]:
    images = [f"![{plots.TITLES[kind]}, suite {record.suite}]({relative(file, path)})"
              for kind, file in plots.by_kind(root / plots.FOLDER, record).items()]  # fmt: skip
    return [*images, "", _source(record, root, path)]


def _speeds(record: Record, root: Path, path: Path) -> list[str]:
    """The picture of rates alone."""
    return [line for line in _plot(record, root, path) if not line.startswith("![") or plots.TITLES["speed"] in line]


def _source(record: Record, root: Path, path: Path) -> str:
    return f"From [{record.name}]({_file(record, root, path)}): {record.about()}."


def _file(record: Record, root: Path, path: Path) -> str:
    return relative(root / bench.RESULTS / record.name, path)


_VIEWS: dict[str, Callable[[Record, Path, Path], list[str]]] = {
    "table": _table,
    "problems": _problems,
    "goals": _goals,
    "plot": _plot,
    "speeds": _speeds,
}
_OF_SEVERAL: dict[str, Callable[[Checkout, str, Path], list[str]]] = {"summary": _summary, "headline": _headline}
