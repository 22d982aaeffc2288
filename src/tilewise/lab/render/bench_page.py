"""The page of `tilewise bench`, from a record: every row's ratio about 1, by what is timed, head dimension and mask.

Ratios are those to the fastest right candidate that is not ours; where other libraries were timed, those to PyTorch's
own paths stand beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...problem import Problem
from .. import units
from ..measure import statistics
from ..measure.compare import REFUSED, geomean, read_comparison
from ..measure.statistics import Speed
from ..measure.words import basis as basis_of
from ..studies import bench
from . import charts, plots, views
from .html import (
    Head,
    Markup,
    Section,
    bad,
    code,
    compact_table,
    device_of,
    document,
    fold,
    note,
    paragraph,
    section,
    subheading,
    table,
    tagged,
    torch_of,
)
from .inspect_page import error_cells
from .views import Entry, View, view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure.compare import Comparison

_MAX_OPEN = 80  # rows: with more, groups are folded
_MIN_ROUNDS = 5
_AHEAD = {  # the colour of the candidate that is ahead
    statistics.FASTER: ("ours", "ours is faster"),
    statistics.SLOWER: ("torch", "another is faster"),
    statistics.INDISTINGUISHABLE: ("other", "no difference beyond the noise"),
}


class Line(NamedTuple):
    """A row of the suite and how its subject did."""

    name: str
    group: str
    seen: View
    ours: Entry
    flops: float
    speed: Speed | None  # against the fastest that is not ours; None where one of them has no right answer
    torch: Speed | None  # against PyTorch's best path

    @property
    def ratio(self) -> float | None:
        return None if self.speed is None else self.speed.ratio


def bench_page(told: dict[str, Any]) -> str:
    lines, comparisons = _lines(told), [read_comparison(row) for row in told["rows"]]
    rated = [line for line in lines if line.ratio is not None]
    sections = [
        *_ratios(rated),
        *_without(lines),
        *_scores(comparisons),
        *_scaling(comparisons),
        section("Every measurement", *(_row(line) for line in lines)),
    ]
    return document(_head(told, lines, rated), sections, told)


def _lines(told: dict[str, Any]) -> list[Line]:
    several = len({(tuple(row.get("times", ())), row["timing"], row.get("kind", "")) for row in told["rows"]}) > 1
    found = []
    for row in told["rows"]:
        seen = view(row)
        name = row["candidates"][0]["candidate"]
        ours = seen[name] or Entry(name, REFUSED, list(row["candidates"][0]["because"]), None, {})
        flops = float(row["flops"].get("timed", 0.0))
        torch = None if ours.failed else ours.speed
        found.append(Line(row["row"], _group(row, several), seen, ours, flops, _against_fastest(row, ours), torch))
    return found


def _against_fastest(row: dict[str, Any], ours: Entry) -> Speed | None:
    """As the record has it; a record that does not say is compared anew."""
    if ours.failed:
        return None
    return Speed.of(row["candidates"][0]["speed_rival"])


def _group(row: dict[str, Any], several: bool) -> str:
    problem = Problem.from_dict(row["problem"])
    dims = "/".join(map(str, dict.fromkeys((problem.head_dim, problem.head_dim_v))))
    mask = str(problem.mask).partition(":")[0]
    words = [f"head_dim {dims}", mask]
    if several:
        kind = [row["kind"]] if row.get("kind") else []
        words = [" + ".join(row.get("times", ())), row["timing"], *kind, *words]
    return " · ".join(words)


def _head(told: dict[str, Any], lines: Sequence[Line], rated: Sequence[Line]) -> Head:
    provenance = told.get("provenance") or {}
    subject = lines[0].ours.name if lines else "tilewise"
    claim: object = "No row has a ratio"
    facts: list[object] = []
    if rated:
        ratios = [line.ratio for line in rated if line.ratio is not None]
        mean = geomean(ratios)
        words = f"{mean:.2f}x faster" if mean >= 1 else f"{1 / mean:.2f}x slower"
        held = bench.has_rival(read_comparison(row) for row in told["rows"])
        other = "the fastest other attention" if held else "PyTorch's best path"
        claim = Markup(f'<span class="{"ours" if mean >= 1 else "bad"}">{words}</span> than {other}')
        worst = min(rated, key=lambda line: line.ratio or 0.0)
        facts = [f"geometric mean of {units.counted(len(rated), 'row')}", _tally(rated), f"worst {worst.ratio:.2f}x"]
        if held and (against := [line.torch.ratio for line in lines if line.torch]):
            facts.append(f"against PyTorch's own paths {geomean(against):.2f}x")
    device = device_of(provenance, told["rows"][0]["device"]) if told["rows"] else ""
    wrong = [line for line in lines if line.ours.failed]
    verdict = bad(f"{len(wrong)} not right") if wrong else Markup('<span class="ok">verified</span>')
    verified = all(line.ours.verdict == "verified" for line in lines if line.ours.verdict != REFUSED)
    facts += [device, torch_of(provenance), verdict if wrong or verified else bad("not all verified")]
    return Head(
        about=Markup(f"tilewise bench · suite {code(told['suite'])} · {code(subject)}"),
        claim=claim,
        facts=[fact for fact in facts if fact],
        warnings=_warnings(told, lines),
        failures=[
            f"{line.name}: {line.ours.name} {'; '.join([line.ours.verdict, *line.ours.because])}" for line in wrong
        ],
    )


def _tally(rated: Sequence[Line]) -> str:
    """How many rows are faster and slower, beyond the noise."""
    counts = Counter(line.speed.verdict for line in rated if line.speed)
    tally = [f"{name} on {counts[name]}" for name in (statistics.FASTER, statistics.SLOWER) if counts[name]]
    return ", ".join(tally) or f"no difference seen on {counts[statistics.INDISTINGUISHABLE]}" if len(counts) else ""


def _warnings(told: dict[str, Any], lines: Sequence[Line]) -> list[str]:
    found = []
    if not told.get("complete", True):
        found.append("Interrupted: only what was measured is here.")
    elif told.get("whole") is False:
        found.append("A selection of the suite's rows: its mean is not the suite's.")
    few = [line.speed.rounds for line in lines if line.speed and line.speed.rounds < _MIN_ROUNDS]
    if few:
        found.append(f"{len(few)} of {len(lines)} rows have fewer than {_MIN_ROUNDS} rounds, too few for an interval.")
    noisy = Counter(words for line in lines for words in line.seen.noise)
    found += [f"Noisy in {count} of {len(lines)} rows: {words}" for words, count in noisy.items()]
    undecided = sum(line.seen.undecided for line in lines)
    if undecided:
        found.append(f"{undecided} of {len(lines)} rows ended before their intervals were narrow.")
    return found


def _ratios(rated: Sequence[Line]) -> list[Section]:
    if not rated:
        return [section("Ratios", paragraph("No row has a right answer of ours and of another."))]
    groups: dict[str, list[Line]] = {}
    for line in rated:
        groups.setdefault(line.group, []).append(line)
    ends = charts.scale_of(line.ratio for line in rated if line.ratio is not None)
    parts: list[object] = []
    for name, lines in groups.items():
        ratios = [line.ratio for line in lines if line.ratio is not None]
        summed = f"{units.counted(len(lines), 'row')}, geomean {geomean(ratios):.2f}x, worst {min(ratios):.2f}x"
        chart = charts.ratios([_bar(line) for line in lines], ends, name)
        if len(rated) > _MAX_OPEN:
            parts.append(fold(Markup(f"<strong>{name}</strong> · {summed}"), chart, kind="fold box"))
        else:
            parts += [subheading(Markup(f'{name} <small class="note">{summed}</small>')), chart]
    speeds = [line.speed for line in rated if line.speed]
    basis = next((basis_of(speed) for speed in speeds if speed.low is not None), "")
    whisker = f" Whiskers and brackets: {basis}." if basis else ""
    about = (
        "The best time of all that is not ours over ours, on a logarithmic scale: right of 1 is faster, left of it "
        f"slower.{whisker}"
    )
    return [section("Ratios", note(about), charts.legend(_AHEAD.values()), *parts)]


def _bar(line: Line) -> charts.Bar:
    speed = line.speed
    assert speed is not None
    between = f' <span class="aside">({speed.low:.2f} to {speed.high:.2f})</span>' if speed.low is not None else ""
    shown = Markup(f"{speed.ratio:.2f}x{between}")
    kind = _AHEAD.get(speed.verdict, _AHEAD[statistics.INDISTINGUISHABLE])[0]
    return charts.Bar(line.name, speed.ratio, shown, kind, speed.low, speed.high)


def _without(lines: Sequence[Line]) -> list[Section]:
    without = [line for line in lines if line.ratio is None]
    if not without:
        return []
    rows = [[line.name, "; ".join([line.ours.verdict, *line.ours.because])] for line in without]
    return [section("Rows without a ratio", table(("row", "what became of ours"), rows, "Rows without a ratio"))]


def _scores(comparisons: list[Comparison]) -> list[Section]:
    scores = bench.scores(comparisons)
    if not scores:
        return []
    rows = [
        [kind, score.rows, f"{score.geomean:.2f}x", f"{score.worst:.2f}x", score.row] for kind, score in scores.items()
    ]
    return [section("By kind", table(("rows of", ">rows", ">geomean", ">worst", "worst row"), rows, "Scores"))]


def _scaling(comparisons: list[Comparison]) -> list[Section]:
    rows = [
        [title, tagged(views.kind_of(name), name), _at_longest(points), _exponent(points, "seconds"),
         _exponent(points, "mebibytes")]
        for title, series in plots.panels(comparisons).items()
        for name, points in series.items()
    ]  # fmt: skip
    columns = ("series", "candidate", ">TFLOP/s, longest", ">time grows as length^", ">memory grows as length^")
    return [section("Scaling with length", table(columns, rows, "Fitted exponents"))] if rows else []


def _at_longest(points: list[plots.Point]) -> str:
    return f"{units.significant(points[-1].tflops)} at {points[-1].length}"


def _exponent(points: list[plots.Point], field: str) -> str:
    value = plots.exponent([point.length for point in points], [getattr(point, field) for point in points])
    return "-" if value != value else f"{value:.2f}"


def _row(line: Line) -> Markup:
    ranked = line.seen.ranked()
    entries = [*ranked, *(entry for entry in line.seen.entries if entry not in ranked)]
    clock = units.Clock.of(entry.median for entry in entries)
    columns = (
        "candidate", "verdict", f">time, {clock.unit}", ">p20 to p80", ">against PyTorch", ">interval", ">TFLOP/s",
        ">extra memory", ">error", ">of budget", ">grad error", ">of budget",
    )  # fmt: skip
    rows = []
    for entry in entries:
        verdict = "; ".join([entry.verdict, *entry.because])
        speed = entry.speed
        rows.append([
            tagged(entry.kind, entry.name), bad(verdict) if entry.failed else verdict,
            clock.number(entry.seconds["median"]) if entry.seconds else "-", clock.spread(entry.seconds),
            units.times(speed.ratio) if speed else "1x" if entry.name == line.seen.best_peer else "-",
            f"{speed.low:.2f} to {speed.high:.2f}" if speed and speed.low is not None else "-",
            units.significant(line.flops / entry.median / 1e12) if entry.seconds else "-",
            units.size(entry.memory), *error_cells(entry, line.seen, "out"),
            *error_cells(entry, line.seen, "dq", "dk", "dv"),
        ])  # fmt: skip
    marks = [entry.name == line.ours.name for entry in entries]
    return fold(
        f"{line.name}: {units.times(line.ratio)}", compact_table(columns, rows, line.name, marks), kind="fold box"
    )
