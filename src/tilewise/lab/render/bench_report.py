"""The report of `tilewise bench`, from a record: every row's ratio about 1, by what is timed, head dimension and mask.

Ratios are those to the fastest right candidate that is not ours; where other libraries were timed, those to PyTorch's
own paths stand beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...problem import Problem
from .. import report, units
from ..candidates.names import OURS
from ..measure import statistics, words
from ..measure.compare import REFUSED, VERIFIED, Comparison, geomean, read_comparison
from ..report import (
    Bad,
    Candidate,
    Code,
    Fold,
    Good,
    Line,
    Ours,
    Phrase,
    RatioGroup,
    Ratios,
    Report,
    Section,
    Table,
    Words,
)
from ..studies import bench
from . import lengths
from .views import Entry, View, error_cells, spread, view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure.compare import Outcome
    from ..measure.statistics import Speed
    from ..report import Block, Inline

_MAX_OPEN = 80  # rows: with more, groups are folded
_MIN_ROUNDS = 5
_AHEAD = {  # the colour of the candidate that is ahead
    statistics.FASTER: ("ours", "ours is faster"),
    statistics.SLOWER: ("torch", "another is faster"),
    statistics.INDISTINGUISHABLE: ("other", "no difference beyond the noise"),
}
_COLUMNS = (
    "candidate", "verdict", ">time", ">p20 to p80", ">against PyTorch", ">TFLOP/s", ">host",
    ">extra memory", ">error", ">of budget", ">grad error", ">of budget",
)  # fmt: skip
_LEGEND = Words(f"against PyTorch: against its best path, with the 99% interval; {words.LEGEND}", is_note=True)


class Row(NamedTuple):
    """A row of the suite and how its subject did."""

    name: str
    group: str
    comparison: Comparison
    seen: View
    ours: Entry
    speed: Speed | None  # against the fastest that is not ours; None where one of them has no right answer
    torch: Speed | None  # against PyTorch's best path

    @property
    def ratio(self) -> float | None:
        return None if self.speed is None else self.speed.ratio

    @property
    def entries(self) -> list[Entry]:
        """The fastest first, with those that ran the same kernels; then those without a time."""
        ranked = self.seen.ranked()
        rest = [entry for entry in self.seen.entries if entry not in ranked]
        return [one for entry in (*ranked, *rest) for one in (entry, *entry.also)]

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.comparison.outcomes if outcome.verdict == REFUSED]


def report_of(told: dict[str, Any], marks: Sequence[str] = ()) -> Report:
    """`marks`: what else a reader must know before believing the figures."""
    rows = _rows(told)
    comparisons = [row.comparison for row in rows]
    rated = [row for row in rows if row.ratio is not None]
    wrong = [row for row in rows if row.ours.failed]
    provenance, device = told.get("provenance") or {}, told["rows"][0]["device"] if told["rows"] else ""
    machine = report.machine_of(provenance, device)
    verified = all(row.ours.verdict == VERIFIED for row in rows if row.ours.verdict != REFUSED)
    right = Good("verified") if verified else Bad("not all verified")
    return Report(
        "bench",
        Phrase(("suite ", Code(told["suite"]), " · ", Code(rows[0].ours.name if rows else OURS))),
        _claim(rated, comparisons),
        "",
        [*_facts(rows, rated, comparisons), *machine, Bad(f"{len(wrong)} not right") if wrong else right],
        warnings=[*marks, *_warnings(told, rows)],
        failures=[f"{row.name}: {row.ours.name} {'; '.join([row.ours.verdict, *row.ours.because])}" for row in wrong],
        sections=[
            _ratios(rows, rated),
            *_without(rows),
            *_tables(comparisons, machine[0]),
            *_scores(comparisons),
            *_scaling(comparisons),
            _measurements(rows),
        ],
        last=str(bench.score(comparisons)),
    )


def _rows(told: dict[str, Any]) -> list[Row]:
    several = len({(tuple(row.get("times", ())), row["timing"], row.get("kind", "")) for row in told["rows"]}) > 1
    found = []
    for row in told["rows"]:
        seen, first = view(row), row["candidates"][0]
        ours = seen[first["candidate"]] or Entry(first["candidate"], REFUSED, list(first["because"]), None, {})
        rival = None if ours.failed else statistics.Speed.of(first["speed_rival"])
        torch = None if ours.failed else ours.speed
        found.append(Row(row["row"], _group(row, several), read_comparison(row), seen, ours, rival, torch))
    return found


def _group(row: dict[str, Any], several: bool) -> str:
    problem = Problem.from_dict(row["problem"])
    dims = "/".join(map(str, dict.fromkeys((problem.head_dim, problem.head_dim_v))))
    mask = str(problem.mask).partition(":")[0]
    words = [f"head_dim {dims}", mask]
    if several:
        kind = [row["kind"]] if row.get("kind") else []
        words = [" + ".join(row.get("times", ())), row["timing"], *kind, *words]
    return " · ".join(words)


def _claim(rated: Sequence[Row], comparisons: Sequence[Comparison]) -> Inline:
    if not rated:
        return "No row has a ratio"
    mean = geomean([row.ratio for row in rated if row.ratio is not None])
    other = "the fastest other attention" if bench.has_rival(comparisons) else "PyTorch's best path"
    return Phrase((Ours(f"{mean:.2f}x faster") if mean >= 1 else Bad(f"{1 / mean:.2f}x slower"), f" than {other}"))


def _facts(rows: Sequence[Row], rated: Sequence[Row], comparisons: Sequence[Comparison]) -> list[str]:
    if not rated:
        return []
    worst = min(row.ratio for row in rated if row.ratio is not None)
    facts = [f"geometric mean of {units.counted(len(rated), 'row')}", _tally(rated), f"worst {worst:.2f}x"]
    if bench.has_rival(comparisons) and (against := [row.torch.ratio for row in rows if row.torch]):
        facts.append(f"against PyTorch's own paths {geomean(against):.2f}x")
    return [fact for fact in facts if fact]


def _tally(rated: Sequence[Row]) -> str:
    """How many rows are faster and slower, beyond the noise."""
    counts = Counter(row.speed.verdict for row in rated if row.speed)
    tally = [f"{name} on {counts[name]}" for name in (statistics.FASTER, statistics.SLOWER) if counts[name]]
    return ", ".join(tally) or f"no difference seen on {counts[statistics.INDISTINGUISHABLE]}" if len(counts) else ""


def _warnings(told: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    found = []
    if not told.get("complete", True):
        found.append("Interrupted: only what was measured is here.")
    elif told.get("whole") is False:
        found.append("A selection of the suite's rows: its mean is not the suite's.")
    few = [row.speed.rounds for row in rows if row.speed and row.speed.rounds < _MIN_ROUNDS]
    if few:
        found.append(f"{len(few)} of {len(rows)} rows have fewer than {_MIN_ROUNDS} rounds, too few for an interval.")
    noisy = Counter(words for row in rows for words in row.seen.noise)
    found += [f"Noisy in {count} of {len(rows)} rows: {words}" for words, count in noisy.items()]
    undecided = sum(row.seen.undecided for row in rows)
    if undecided:
        found.append(f"{undecided} of {len(rows)} rows ended before their intervals were narrow.")
    return found


def _ratios(rows: Sequence[Row], rated: Sequence[Row]) -> Section:
    """As text a table of every measurement, which the page has row by row."""
    names = dict.fromkeys(row.group for row in rated)
    groups = [_group_of(name, [row for row in rated if row.group == name]) for name in names]
    basis = next((words.basis(row.speed) for row in rated if row.speed and row.speed.low is not None), "")
    about = (
        "The best time of all that is not ours over ours, on a logarithmic scale: right of 1 is faster, left of it "
        f"slower.{f' Whiskers and brackets: {basis}.' if basis else ''}"
    )
    drawn = Ratios(groups, list(_AHEAD.values()), is_folded=len(rated) > _MAX_OPEN)
    blocks: list[Block] = [Words(about, is_note=True), drawn]
    if not rated:
        blocks = [Words("No row has a right answer of ours and of another.")]
    every: list[list[Inline]] = [[row.name, entry.name, entry.verdict, *_cells(entry, row)[2:]]
                                 for row in rows for entry in row.entries]  # fmt: skip
    every += [[row.name, one.candidate, REFUSED, *["-"] * (len(_COLUMNS) - 2)] for row in rows for one in row.refused]
    failed = [Words(f"{row.name}: {entry.name}: {'; '.join([entry.verdict, *entry.because])}")
              for row in rows for entry in row.seen.failures if entry is not row.ours]  # fmt: skip
    return Section("Ratios", blocks, brief=[_LEGEND], text=[Table(("row", *_COLUMNS), every), *failed])


def _group_of(name: str, rows: Sequence[Row]) -> RatioGroup:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    summed = f"{units.counted(len(rows), 'row')}, geomean {geomean(ratios):.2f}x, worst {min(ratios):.2f}x"
    return RatioGroup(name, summed, [_bar(row.name, row.speed) for row in rows if row.speed])


def _bar(name: str, speed: Speed) -> Line:
    between = f"({speed.low:.2f} to {speed.high:.2f})" if speed.low is not None else ""
    kind = _AHEAD.get(speed.verdict, _AHEAD[statistics.INDISTINGUISHABLE])[0]
    return Line(name, speed.ratio, f"{speed.ratio:.2f}x", kind, speed.low, speed.high, between)


def _measurements(rows: Sequence[Row]) -> Section:
    folds = []
    for row in rows:
        marks = [entry.name == row.ours.name for entry in row.entries]
        table = Table(_COLUMNS, [_cells(entry, row) for entry in row.entries], row.name, marks)
        folds.append(Fold(f"{row.name}: {units.times(row.ratio)}", [table], is_boxed=True, in_text=False))
    refused = [[row.name, Code(one.candidate), "; ".join(one.because)] for row in rows for one in row.refused]
    reasons = Table(("row", "candidate", "why it was refused"), refused, "Refused")
    folds += [Fold(units.counted(len(refused), "refusal"), [reasons])] if refused else []
    return Section("Every measurement", [*folds, _LEGEND], brief=())


def _cells(entry: Entry, row: Row) -> list[Inline]:
    verdict = "; ".join([entry.verdict, *entry.because])
    flops = bench.flops_of(row.comparison.row, entry.name)
    return [
        Candidate(entry.name), Bad(verdict) if entry.failed else verdict,
        *([units.duration(entry.median), spread(entry.seconds)] if entry.seconds else ["-", "-"]),
        "1x" if entry.name == row.seen.best_peer else words.cell(entry.speed),
        units.significant(flops / entry.median / 1e12) if entry.seconds else "-",
        units.duration(entry.overhead["median"]) if entry.overhead else "-",
        units.size(entry.memory), *error_cells(entry, row.seen, "out"),
        *error_cells(entry, row.seen, "dq", "dk", "dv"),
    ]  # fmt: skip


def _without(rows: Sequence[Row]) -> list[Section]:
    without = [row for row in rows if row.ratio is None]
    if not without:
        return []
    cells = [[row.name, "; ".join([row.ours.verdict, *row.ours.because])] for row in without]
    count = Words(f"rows without a ratio, for want of a right answer of ours or of another's: {len(without)}")
    table = Table(("row", "what became of ours"), cells, "Rows without a ratio")
    return [Section("Rows without a ratio", [table], brief=[count])]


def _tables(comparisons: list[Comparison], device: str) -> list[Section]:
    """What rows are to reach, and what memory allows, where that is known."""
    found = []
    if any(comparison.row.goal for comparison in comparisons):
        goals = Table(bench.GOAL_COLUMNS, [bench.goal_cells(comparison) for comparison in comparisons], "Goals")
        found.append(Section("Goals", [goals, Words(bench.GOAL_LEGEND, is_note=True)]))
    if memory := bench.memory_lines(comparisons, device):
        bounds = Table(bench.MEMORY_COLUMNS, memory, "Against memory")
        found.append(Section("Against memory", [bounds, Words(bench.MEMORY_LEGEND, is_note=True)]))
    return found


def _scores(comparisons: list[Comparison]) -> list[Section]:
    scores = bench.scores(comparisons)
    told = [Words(f"{standing} {name}") for rival, name in bench.RIVALS.items()
            if (standing := bench.standings(rival, comparisons))]  # fmt: skip
    text = [Words(f"{kind}: {found}, {found.shares}") for kind, found in scores.items()]
    rows = [[kind, str(found.rows), f"{found.geomean:.2f}x", f"{found.worst:.2f}x", found.row,
             *(f"{share * found.rows:.0f} ({share:.1%})" for share in (found.behind, found.far_behind))]
            for kind, found in scores.items()]  # fmt: skip
    limits = [f">under {limit}" for limit in (bench.BEHIND, bench.FAR_BEHIND)]
    columns = ("rows of", ">rows", ">geomean", ">worst", "worst row", *limits)
    table = [Table(columns, rows, "Scores")] if rows else []
    return [Section("By kind", [*table, *told], brief=(), text=[*told, *text])] if rows or told else []


def _scaling(comparisons: list[Comparison]) -> list[Section]:
    rows = [
        [title, Candidate(name), f"{units.significant(points[-1].tflops)} at {points[-1].length}",
         _exponent(points, "seconds"), _exponent(points, "mebibytes")]
        for title, series in lengths.panels(comparisons).items()
        for name, points in series.items()
    ]  # fmt: skip
    columns = ("series", "candidate", ">TFLOP/s, longest", ">time grows as length^", ">memory grows as length^")
    return [Section("Scaling with length", [Table(columns, rows, "Fitted exponents")], brief=())] if rows else []


def _exponent(points: Sequence[lengths.Point], field: str) -> str:
    value = lengths.exponent([point.length for point in points], [getattr(point, field) for point in points])
    return "-" if value != value else f"{value:.2f}"
