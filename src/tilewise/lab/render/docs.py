"""docs: the tables and plots of README.md and docs/, written between markers from the records of `tilewise bench`.

    <!-- bench forward table gpu=H200 -->   what follows, up to the end marker, is replaced
    <!-- /bench -->

Views: `table` (every row of a suite), `problems` (a line per problem with a column for each thing that is timed),
`goals` (what is asked of every row of a suite that has goals, and what it reaches), `plot` (its pictures, in
docs/plots/), `speeds` (that of rates, or nothing), and, with no suite named, `summary` (a line per suite and thing that
is timed) and `headline` (the lines of README.md). A suite without a record that may be cited says that it is not
measured. Nothing else in the file is touched, and a run that changes nothing leaves the file as it is.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InvalidInput
from .. import report
from ..candidates.names import FLEX, Candidate
from ..measure import statistics, words
from ..measure.compare import REFUSED, geomean, summary
from ..studies import bench, records, suites
from . import host_docs, ladder_docs, map_docs, models_docs, plots, report_docs, tune_docs
from .pages import rebuilt, record_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..measure.compare import Comparison, Outcome
    from ..studies.records import Record

_BLOCK = re.compile(r"(?P<begin><!-- bench (?P<asked>[^>]*?) -->\n)(?P<body>.*?)(?P<end><!-- /bench -->)", re.DOTALL)
_GENERATED = re.compile(r"<!-- [a-z][^>]*? -->\n(?P<body>.*?)<!-- /", re.DOTALL)
LINK = re.compile(rf"\]\([./]*{bench.RESULTS.as_posix()}/([^)]+\.json)\)")
_SUMMARY = (
    f"| suite | what is timed | geomean | worst | under {bench.BEHIND} | worst row | geomean, PyTorch alone | record |",
    "|---|---|---:|---:|---:|---|---:|---|",
)


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


class Page(NamedTuple):
    """A file and what it should hold."""

    path: Path
    before: str
    after: str

    @property
    def stale(self) -> bool:
        return self.before != self.after


def pages(root: Path) -> list[Page]:
    """README.md and every Markdown file of docs/ that has markers, with their contents as they should be."""
    kept = records.read_all(root / bench.RESULTS)
    found = []
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if _BLOCK.search(text):
            found.append(Page(path, text, rewrite(text, kept, root, path)))
    return [*found, *reports(root)]


def reports(root: Path) -> list[Page]:
    """The tables of whole models, of host time, of tile maps and of sweeps; the reports that documents cite, from the
    newest records; and every other HTML page of docs/ that names the record it was made from, as that looks now."""
    tables = (models_docs, host_docs, map_docs, report_docs, tune_docs)
    wanted = {path: text for one in tables for path, text in one.wanted(root).items()}
    found = [Page(path, path.read_text("utf-8") if path.is_file() else "", text) for path, text in wanted.items()]
    for path in sorted((root / "docs").rglob("*.html")):
        if path in wanted:
            continue
        text = path.read_text(encoding="utf-8")
        made = rebuilt(text, root / bench.RESULTS)
        if made is not None:
            found.append(Page(path, text, made))
    return found


def check_root(root: Path) -> None:
    """InvalidInput for a folder that has nothing to keep up to date: nothing in it is not the same as all is well."""
    if pages(root) or (root / "docs" / "ladder.md").is_file():
        return
    raise InvalidInput(
        "--root", str(root), "a checkout: README.md or docs/*.md with markers", "name the folder of the checkout"
    )


def rewrite(text: str, kept: list[Record], root: Path, path: Path) -> str:
    """The text with every block between markers rewritten."""

    def block(match: re.Match[str]) -> str:
        body = "\n".join(_body(parse_marker(match["asked"], path), kept, root, path))
        return f"{match['begin']}{body}\n{match['end']}"

    return _BLOCK.sub(block, text)


def parse_marker(text: str, path: Path) -> Asked:
    words = text.split()
    gpu = next((word.removeprefix("gpu=") for word in words if word.startswith("gpu=")), "")
    plain = [word for word in words if not word.startswith("gpu=")]
    view = plain.pop() if plain and plain[-1] in _VIEWS else ""
    suite = plain.pop() if plain else ""
    if not view or plain or (suite not in suites.names() and not (view in _OF_SEVERAL and not suite)):
        raise InvalidInput(
            f"marker in {path.name}", repr(text), f"[SUITE] {'|'.join(_VIEWS)} [gpu=NAME]", "correct the marker"
        )
    return Asked(suite, view, gpu)


def cited(root: Path) -> dict[str, None]:
    """The records that generated parts of pages, and HTML pages, take their figures from, by name."""
    paths = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    bodies = [match["body"] for text in texts for match in _GENERATED.finditer(text)]
    html = (path.read_text(encoding="utf-8") for path in sorted((root / "docs").rglob("*.html")))
    made_from = (record_of(text, root / bench.RESULTS) for text in html)
    named = [name for body in bodies for name in LINK.findall(body)]
    return dict.fromkeys([*named, *(path.name for path in made_from if path is not None)])


def draw_all(root: Path) -> list[Path]:
    """The plots that pages ask for and that are not there as they should be; returns what was written."""
    kept = records.read_all(root / bench.RESULTS)
    written = []
    for record in _plotted(root, kept):
        for path in plots.paths(root / plots.FOLDER, record):
            if not plots.is_of(path, record):
                plots.draw(record, root / plots.FOLDER)
                written += plots.paths(root / plots.FOLDER, record)
                break
    return written


def stale_plots(root: Path) -> list[Path]:
    """Plots that are missing or were drawn from another record."""
    kept = records.read_all(root / bench.RESULTS)
    wanted = [(path, r) for r in _plotted(root, kept) for path in plots.paths(root / plots.FOLDER, r)]
    return [path for path, record in wanted if not plots.is_of(path, record)]


def stale(root: Path) -> list[Path]:
    """All pages and plots that differ from what the records make of them."""
    differing = [page.path for page in pages(root) if page.stale]
    return [*differing, *stale_plots(root), *ladder_docs.stale(root)]


def _plotted(root: Path, kept: list[Record]) -> list[Record]:
    asked = [parse_marker(match["asked"], page.path) for page in pages(root) for match in _BLOCK.finditer(page.before)]
    found = [records.newest(kept, one.suite, one.gpu) for one in asked if one.view in ("plot", "speeds")]
    return list({record.name: record for record in found if record is not None}.values())


def _body(asked: Asked, kept: list[Record], root: Path, path: Path) -> list[str]:
    if asked.view in _OF_SEVERAL:
        return _OF_SEVERAL[asked.view](kept, asked.gpu, root, path)
    record = records.newest(kept, asked.suite, asked.gpu)
    if record is None:
        if asked.view == "speeds":
            return []
        where = f" on {asked.gpu}" if asked.gpu else ""
        return [
            f"*Not measured{where} with today's kernels and the strongest of others: `make evidence` fills this in.*"
        ]
    return _VIEWS[asked.view](record, root, path)


def _table(record: Record, root: Path, path: Path) -> list[str]:
    comparisons = record.comparisons
    ours = comparisons[0].outcomes[0].candidate
    rivals = [name for name in bench.RIVALS if any(_rival(comparison, name) for comparison in comparisons)]
    head = ["problem", ours, "spread", "best of PyTorch", "spread", "speed"]
    head += [f"against {bench.RIVALS[name]}" for name in rivals]
    head += [f"error, {ours}", "error, PyTorch"]
    lines = [f"| {' | '.join(head)} |", f"|---|---:|---:|---|---:|---:|{'---:|' * len(rivals)}---:|---:|"]
    lines += [_line(comparison, rivals) for comparison in comparisons]
    return [*lines, "", _LEGEND, "", *_sums(comparisons), "", _source(record, root, path)]


def _rival(comparison: Comparison, name: str) -> Outcome | None:
    return next((outcome for outcome in comparison.timed() if outcome.candidate == name), None)


def _line(comparison: Comparison, rivals: list[str]) -> str:
    ours, peer = comparison.outcomes[0], comparison.best_peer()
    others = [peer, *(_rival(comparison, name) for name in rivals)]
    cells = [comparison.row.name, _time(ours, comparison), report.spread(summary(ours.samples))]
    cells += [f"{peer.candidate} {_time(peer, comparison)}" if peer else "no right answer", _spread(peer)]
    cells += ["-" if ours.failed else words.cell(comparison.versus(ours, other)) for other in others]
    return f"| {' | '.join([*cells, _error(ours), _error(peer)])} |"


def _problems(record: Record, root: Path, path: Path) -> list[str]:
    """Rows of one problem side by side, in the order of their first."""
    comparisons = record.comparisons
    kinds = list(dict.fromkeys(bench.timed(comparison, comparisons) for comparison in comparisons))
    lines = [f"| problem | {' | '.join(kinds)} |", f"|---|{'---:|' * len(kinds)}"]
    for alike in _by_problem(comparisons):
        cells = {bench.timed(comparison, comparisons): _cell(comparison) for comparison in alike}
        lines.append(f"| {_shared_name(alike)} | {' | '.join(cells.get(kind, '') for kind in kinds)} |")
    return [*lines, "", f"{words.LEGEND}.", "", *_sums(comparisons), "", _source(record, root, path)]


def _goals(record: Record, root: Path, path: Path) -> list[str]:
    """Our time, the fastest of others, both ratios with what is asked of them, and what was reached."""
    comparisons = record.comparisons
    head = [name.removeprefix(">") for name in bench.GOAL_COLUMNS]
    rules = ["---:" if name.startswith(">") else "---" for name in bench.GOAL_COLUMNS]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *map(bench.goal_cells, comparisons))]
    lines.insert(1, f"|{'|'.join(rules)}|")
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
    return [*lines, f"- all rows, against the fastest that is not ours: {every}, {every.shares}"]


def _summary(kept: list[Record], gpu: str, root: Path, path: Path) -> list[str]:
    lines = list(_SUMMARY)
    for name in suites.names():
        rows = suites.rows_of(name)
        on_gpu = rows[0].device.startswith("cuda")
        record = records.newest(kept, name, gpu if on_gpu else "")
        timed = " + ".join(dict.fromkeys(what for row in rows for what in row.timed))
        if record is None:
            lines.append(f"| {name} | {timed} | | | | not measured | | |")
            continue
        about = f"[{record.device}, {record.date[:10]}]({_relative(root / bench.RESULTS / record.name, path)})"
        for kind, comparisons in bench.by_kind(record.comparisons).items():
            found = bench.score(comparisons)
            figures = f"{found.geomean:.2f} | {found.worst:.2f} | {found.behind:.0%} | {found.row}"
            of_torch = bench.score_of_torch(comparisons)
            figures += f" | {of_torch.geomean:.2f}" if of_torch.rows else " | -"
            lines.append(f"| {name} | {kind} | {figures} | {about} |")
    return lines


def _headline(kept: list[Record], gpu: str, root: Path, path: Path) -> list[str]:
    """A line for each thing that users choose by: how we stand to each of the others, and the worst row."""
    lines, dates, lacking = [], [], []
    for title, suite, what in HEADLINE:
        record = records.newest(kept, suite, gpu)
        rows = [] if record is None else [c for c in record.comparisons if what in c.row.timed]
        worst = min(rows, key=_ratio, default=None)
        rival = worst.best_rival() if worst is not None else None
        if record is None or worst is None or rival is None:
            lacking.append(title.lower())
            continue
        least = f"{_ratio(worst):.2f}, {_peer_name(rival.candidate)}: {worst.row.name}"
        link = f"[{len(rows)}]({_relative(root / bench.RESULTS / record.name, path)})"
        lines.append(f"| {title} | {link} | {_against_each(rows)} | {least} |")
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
    head = ["| what is timed | rows | speed against | worst row |", "|---|---:|---|---|"]
    return [*head, *lines, "", about, *(["", missing] if lacking else [])]


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
    images = [f"![{plots.TITLES[kind]}, suite {record.suite}]({_relative(file, path)})"
              for kind, file in plots.by_kind(root / plots.FOLDER, record).items()]  # fmt: skip
    return [*images, "", _source(record, root, path)]


def _speeds(record: Record, root: Path, path: Path) -> list[str]:
    """The picture of rates alone."""
    return [line for line in _plot(record, root, path) if not line.startswith("![") or plots.TITLES["speed"] in line]


def _source(record: Record, root: Path, path: Path) -> str:
    return f"From [{record.name}]({_relative(root / bench.RESULTS / record.name, path)}): {record.about()}."


def _relative(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file, page.parent)).as_posix()


_VIEWS: dict[str, Callable[[Record, Path, Path], list[str]]] = {
    "table": _table,
    "problems": _problems,
    "goals": _goals,
    "plot": _plot,
    "speeds": _speeds,
    "summary": lambda record, root, path: [],
    "headline": lambda record, root, path: [],
}
_OF_SEVERAL: dict[str, Callable[[list[Record], str, Path, Path], list[str]]] = {
    "summary": _summary,
    "headline": _headline,
}
