"""The blocks `ladder VIEW` and the pictures of docs/ladder.md: theory from formulas, figures from the newest records.

Views: `rungs` (what each is and teaches), `bytes` and `picture` (what each moves, in theory), `speeds`, `figures`,
`parts`, `row-threads` and `counted` (the newest record of `tilewise ladder` on a GPU that has what the view shows),
`sweep` (the newest record of `tilewise tune` for the three-kernel rung). A record counts while its kernels are those of
today. A view without one says that it is not measured yet.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.lab import report
from tilewise.lab.candidates.variants import THREE_KERNEL
from tilewise.lab.measure import stages, words
from tilewise.lab.measure.compare import VERIFIED, median
from tilewise.lab.studies import kept, ladder_report
from tilewise.lab.studies import ladder as command
from tilewise.ladder import RUNGS, traffic
from tilewise.problem import Problem, parse_dtype
from tilewise.target import Target

from . import reports
from .records import Checkout, Kept, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PAGE = Path("docs/ladder.md")
PICTURE = Path("docs/plots/ladder-bytes.svg")
SPEEDS = Path("docs/plots/ladder-speeds.svg")
TARGET = "h200"
COMMAND = "tilewise ladder --bytes --repeat 7 --save"
_NOT_YET = "*Not measured yet: `{}` on a GPU fills this in.*"
_SWEEP_LINES = 12


def block(view: str, checkout: Checkout, page: Path) -> list[str]:
    return _VIEWS[view](checkout)


def pictures(checkout: Checkout) -> dict[Path, str]:
    """The picture of the formulas, and that of the newest record."""
    found, root = _climbs(checkout), checkout.root
    return {root / PICTURE: picture()} | ({} if found is None else {root / SPEEDS: speeds(found)})


def problems() -> list[Problem]:
    """Those that `tilewise ladder` climbs by default on a GPU."""
    found = []
    for shape in command.GPU_SHAPES:
        batch, heads, seq, dim = map(int, shape.split(","))
        found.append(Problem(batch, heads, heads, seq, seq, dim, dim, parse_dtype("bf16")))
    return found


def newest(checkout: Checkout, fits: Callable[[dict[str, Any]], object] = lambda record: True) -> Kept | None:
    """The record of the ladder that is cited."""
    return next(checkout.of_kind(command.KIND, lambda one: one.get("complete") and fits(one), command.marks), None)


def _climbs(checkout: Checkout, shows: Callable[[dict[str, Any]], object] = lambda climb: True) -> Kept | None:
    """The newest record of the ladder on a GPU with a climb that has what is to be shown, and these climbs alone."""

    def fits(record: dict[str, Any]) -> bool:
        return any(climb["device"].startswith("cuda") and shows(climb) for climb in record["climbs"])

    found = newest(checkout, fits)
    if found is None:
        return None
    record = kept.expanded(found.values)
    return Kept(found.path, record | {"climbs": [climb for climb in record["climbs"] if shows(climb)]})


def _source(record: Kept, checkout: Checkout) -> list[str]:
    told = record.values["provenance"]
    commit = f", commit {told['source']['commit'][:7]}" if told["source"]["commit"] else ""
    device = record.gpu or told["machine"]["cpu"]
    link = record.link(checkout.root / PAGE)
    return ["", f"From {link}: {device}, torch {told['versions']['torch']}, {record.date[:10]}{commit}."]


def _rungs(checkout: Checkout) -> list[str]:
    rows = [[f"`{rung.name}`", rung.title, rung.lesson] for rung in RUNGS]
    return table(["rung", "what it is", "what it teaches"], rows)


def _bytes(checkout: Checkout) -> list[str]:
    columns = [traffic.every(problem, Target.named(TARGET)) for problem in problems()]
    head = [cell for problem in problems() for cell in (f">{_shape(problem)}: DRAM MB", ">SM MB")]
    rows = [
        [f"`{rung.name}`", *(f"{value / 1e6:,.0f}" for column in columns for value in column[rung.name][:2]),
         columns[-1][rung.name].formula]
        for rung in RUNGS
    ]  # fmt: skip
    return table(["rung", *head, "formula"], rows)


def _picture(checkout: Checkout) -> list[str]:
    return [f"![Bytes that each rung moves, by formula](plots/{PICTURE.name})"]


def _speeds(checkout: Checkout) -> list[str]:
    if _climbs(checkout) is None:
        return [_NOT_YET.format(COMMAND)]
    return [f"![Speed of each rung, measured](plots/{SPEEDS.name})"]


def _figures(checkout: Checkout) -> list[str]:
    found = _climbs(checkout)
    if found is None:
        return [_NOT_YET.format(COMMAND)]
    lines = []
    for climb in found.values["climbs"]:
        problem = Problem.from_dict(climb["problem"])
        outcomes = {one["candidate"]: one for one in climb["comparison"]["candidates"]}
        refused = climb["refused"]
        rows = [_figure(rung.name, problem, outcomes.get(rung.candidate), refused.get(rung.name)) for rung in RUNGS]
        head = ["rung", ">ms", ">p20..p80", ">TFLOP/s", ">extra MiB", ">error, in budget"]
        lines += [f"**{problem}**", "", *table(head, rows), ""]
    return lines[:-1] + _source(found, checkout)


def _figure(name: str, problem: Problem, outcome: dict[str, Any] | None, refused: list[str] | None) -> list[str]:
    if outcome is None:
        return [f"`{name}`", escape((refused or ["not run"])[0]), "", "", "", ""]
    timed = outcome["forward_seconds"]
    if timed is None:
        return [f"`{name}`", f"**{escape(outcome['verdict'])}**", "", "", "", ""]
    error = outcome["errors"]["out"]["norm"] if "out" in outcome["errors"] else None
    cells = [report.milliseconds(timed), report.spread(timed), report.rate(problem.flops(), timed)]
    judged = f"{report.error(error)} {'ok' if outcome['verdict'] == VERIFIED else 'over'}" if error is not None else "-"
    return [f"`{name}`", *cells, report.mebibytes(outcome["memory"]), judged]


def _parts(checkout: Checkout) -> list[str]:
    """Launches one by one stand beside the graph where the record has them."""
    found = _climbs(checkout, lambda climb: climb["parts"].get("seconds"))
    if found is None:
        return [_NOT_YET.format(COMMAND)]
    every = (*stages.NAMES, stages.WHOLE, stages.EAGER, stages.NOTHING, stages.HOST)
    names = [name for name in every if all(name in climb["parts"]["seconds"] for climb in found.values["climbs"])]
    rows = []
    for climb in found.values["climbs"]:
        times = [f"{median(climb['parts']['seconds'][name]) * 1e6:.1f}" for name in names]
        rows.append([str(Problem.from_dict(climb["problem"])), *times, _against_cublas(climb)])
    head = ["problem", *(f">{name}, us" for name in names), ">cuBLAS / three-kernel"]
    return table(head, rows) + _source(found, checkout)


def _row_threads(checkout: Checkout) -> list[str]:
    """The softmax with each number of threads per row, in microseconds per head beside those of the study."""
    found = _climbs(checkout, lambda climb: set(stages.PARTS) <= set(climb["parts"].get("seconds") or {}))
    if found is None:
        return [_NOT_YET.format(COMMAND)]
    head = [
        "problem", ">threads per row", ">softmax alone, us", ">all three, us per head", ">speed",
        ">the study, us per head",
    ]  # fmt: skip
    rows = []
    told = []
    for climb in found.values["climbs"]:
        problem, seconds = Problem.from_dict(climb["problem"]), climb["parts"]["seconds"]
        for one in ladder_report.by_row_threads(problem, seconds):
            speed = words.cell(one.speed) if one.speed else "1"
            study = f"{one.study_us:.2f}" if one.study_us else "-"
            times = [report.significant(one.softmax_us), report.significant(one.head_us)]
            rows.append([_shape(problem), str(one.threads), *times, speed, study])
        if (line := ladder_report.headline(problem, seconds, Target.named(TARGET))) is not None:
            told += ["", f"{_shape(problem)}, {line}."]
    return [*table(head, rows), *told, *_source(found, checkout)]


def _against_cublas(climb: dict[str, Any]) -> str:
    timed = {one["candidate"]: one["forward_seconds"] for one in climb["comparison"]["candidates"]}
    ours, theirs = timed.get(THREE_KERNEL), timed.get("ladder:matmul")
    return f"{theirs['median'] / ours['median']:.2f}x" if ours and theirs else "-"


def _counted(checkout: Checkout) -> list[str]:
    found = _climbs(checkout, lambda climb: any("dram" in one for one in climb["counted"].values()))
    if found is None:
        return [_NOT_YET.format(COMMAND)]
    rows = []
    for climb in found.values["climbs"]:
        for name, counted in climb["counted"].items():
            moved = climb["traffic"][name]
            values = [counted.get("dram"), moved["dram"], counted.get("l2"), moved["sm"]]
            cells = ["-" if value is None else f"{value / 1e6:,.0f}" for value in values]
            rows.append([_shape(Problem.from_dict(climb["problem"])), f"`{name}`", *cells])
    head = ["problem", "rung", ">DRAM MB counted", ">by formula", ">L2 MB counted", ">SM MB by formula"]
    return table(head, rows) + _source(found, checkout)


def _sweep(checkout: Checkout) -> list[str]:
    found = reports.find_sweep(THREE_KERNEL, checkout)
    if found is None:
        return [_NOT_YET.format(reports.command_for(THREE_KERNEL))]
    lines = []
    for sweep in found.values["sweeps"]:
        measured = sorted((t for t in sweep["trials"] if t["seconds"]), key=lambda trial: trial["seconds"]["median"])
        failed = len(sweep["trials"]) - len(measured)
        best = measured[0]["seconds"]["median"]
        lines += [f"**{Problem.from_dict(sweep['problem'])}**: {len(measured)} tiles measured, {failed} not.", ""]
        rows = []
        shown = measured if len(measured) <= 2 * _SWEEP_LINES else [*measured[:_SWEEP_LINES], *measured[-4:]]
        for trial in shown:
            seconds = trial["seconds"]["median"]
            registers = "/".join(str(kernel["registers"]) for kernel in trial["resources"])
            rows.append([trial["label"], f"{seconds * 1e6:.1f}", f"{seconds / best:.2f}", registers])
        lines += [*table(["configuration", ">us", ">ratio", ">registers"], rows), ""]
    return lines[:-1] + _source(found, checkout)


def _shape(problem: Problem) -> str:
    return f"{problem.batch} x {problem.heads_q} x {problem.seq_q} x {problem.head_dim}"


_VIEWS: dict[str, Callable[[Checkout], list[str]]] = {
    "rungs": _rungs,
    "bytes": _bytes,
    "picture": _picture,
    "speeds": _speeds,
    "figures": _figures,
    "parts": _parts,
    "row-threads": _row_threads,
    "counted": _counted,
    "sweep": _sweep,
}

_WIDTH, _LEFT, _LINE, _TOP = 760, 110, 36, 74
_KINDS = ("dram", "sm")  # the two colours
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .quiet { fill: #59636e } .grid { stroke: #d1d9e0 } .dram { fill: #0969da } .sm { fill: #bf8700 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
    .dram { fill: #4493f8 } .sm { fill: #d29922 }
  }"""


def picture() -> str:
    """What each rung moves for the longer of the two problems: a bar to DRAM, a bar through the SMs."""
    problem = problems()[-1]
    moved = traffic.every(problem, Target.named(TARGET))
    title = f"Bytes of one forward, by formula: bf16, {_shape(problem)}"
    legend = ("to and from DRAM, at least", "in and out of the SMs")
    return _bars(title, legend, {name: one[:2] for name, one in moved.items()}, _size)


def speeds(record: Kept) -> str:
    """How fast each rung was, a bar for each of the first two problems of a record; none where a rung has no time."""
    climbs = record.values["climbs"][:2]
    asked = [Problem.from_dict(climb["problem"]) for climb in climbs]
    rates: dict[str, list[float]] = {rung.name: [] for rung in RUNGS}
    for problem, climb in zip(asked, climbs, strict=True):
        timed = {one["candidate"]: one["forward_seconds"] for one in climb["comparison"]["candidates"]}
        for rung in RUNGS:
            seconds = timed.get(rung.candidate)
            rates[rung.name].append(problem.flops() / seconds["median"] / 1e12 if seconds else 0.0)
    title = f"Speed of one forward, measured, TFLOP/s: {record.gpu or 'no GPU'}"
    return _bars(title, [f"{problem}" for problem in asked], rates, _rate)


def _bars(title: str, legend: Sequence[str], rows: Mapping[str, Sequence[float]], words: Callable[[float], str]) -> str:
    """A line a rung, with a bar for each of its values, on a log scale; a value of 0 has no bar."""
    values = [value for row in rows.values() for value in row if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - 80)

    height = _TOP + _LINE * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f'<text x="0" y="18" font-weight="600">{title}</text>',
    ]
    apart = 240 if max(map(len, legend)) < 30 else 390
    for number, (kind, text) in enumerate(zip(_KINDS, legend, strict=False)):
        left = number * apart
        parts.append(
            f'<rect class="{kind}" x="{left}" y="32" width="12" height="12"/><text x="{left + 18}" y="43">{text}</text>'
        )
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.0f}" y1="{_TOP - 12}" x2="{at:.0f}" y2="{height - 20}"/>')
        place = f'x="{at:.0f}" y="{height - 4}" text-anchor="middle"'
        parts.append(f'<text class="quiet" {place}>{words(10.0**power)}</text>')
    for number, (name, row) in enumerate(rows.items()):
        y = _TOP + _LINE * number
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
        for kind, value, top in zip(_KINDS, row, (y, y + 12), strict=False):
            if value > 0:
                width = x(value) - _LEFT
                parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{width:.0f}" height="10"/>')
                parts.append(f'<text class="quiet" x="{_LEFT + width + 6:.0f}" y="{top + 10}">{words(value)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _rate(value: float) -> str:
    return report.significant(value) if value < 100 else f"{value:.0f}"


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{report.significant(value / size)} {unit}" if value / size < 100 else f"{value / size:.0f} {unit}"
    return f"{value / 1e3:.0f} kB"
