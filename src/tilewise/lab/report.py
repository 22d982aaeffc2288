"""A report as blocks, which say what is shown and not how; their text; progress on standard error.

    Report(command, subject, claim, sentence, sections=[Section(title, [block, ...])])
    show(report)                          on standard output; the page of the same blocks is `render.blocks.page`

What goes into a pipe is stable: no escape codes, no boxes, no wrapping, columns two spaces apart. On a terminal tables
have lines and colour.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from . import units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import rich.table

significant = units.significant
_LONGEST_KERNEL = 110  # letters of a name in a text
_BAD = ("wrong", "died", "no answer", "raised")


class Code(str):
    """A problem, a place in a program, a command."""

    __slots__ = ()


class Candidate(Code):
    """The name of a candidate, which has the colour of whose it is."""

    __slots__ = ()


class Bad(str):
    """What is wrong, or over a limit."""

    __slots__ = ()


class Ours(str):
    """What a reader came for, in our colour."""

    __slots__ = ()


class Good(str):
    """What is right."""

    __slots__ = ()


class More(str):
    """A detail that a narrow page leaves out."""

    __slots__ = ()


class Kernel(str):
    """The name of a kernel, which has the colour of what it does. A page shows its short name."""

    __slots__ = ()


class Phrase(tuple[str, ...]):
    """Pieces of one line."""

    __slots__ = ()


class Lines(tuple[str, ...]):
    """Lines of one cell."""

    __slots__ = ()


Inline = str | Phrase | Lines


@dataclass(frozen=True, slots=True)
class Words:
    """A sentence; as small print, a note."""

    content: Inline
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns whose name starts with ">" hold numbers. A column in which no row has anything is not shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    label: str = "Table"
    marked: Sequence[bool] = ()  # the rows that stand out

    def shown(self) -> Table:
        kept = [i for i in range(len(self.columns)) if i == 0 or any(row[i] not in ("-", "") for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table([self.columns[i] for i in kept], rows, self.label, self.marked)


class Line(NamedTuple):
    """A line of a chart of bars."""

    name: str
    value: float
    text: str  # the value, as it is shown
    kind: str = ""  # the colour; empty: that of the name
    low: float | None = None  # of the whisker
    high: float | None = None
    aside: object = ""  # a piece of a report, or of a page
    chosen: bool = False  # what the page is about
    small: str = ""  # beside the name
    lost: float = 0.0  # a part of the value
    whose: str = ""  # the candidate whose colour it has; empty: the one that it is named for


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from 0, or shares of a `whole`. Not `in_text` are those whose figures a table of the same section has."""

    bars: Sequence[Line]
    caption: str
    lost: str = ""  # what the lost part of a bar is
    other: str = "others"  # who is neither ours nor PyTorch
    reference: tuple[str, float] | None = None  # a line across the bars, and what it stands for
    whole: bool = False
    in_text: bool = True
    columns: tuple[str, str] = ("time", "speed")  # what a text calls the values, and what stands beside them

    def table(self) -> Table:
        names = [f"{one.name}, {one.small}" if one.small else one.name for one in self.bars]
        rows = [[name, one.text, text_of(one.aside)] for name, one in zip(names, self.bars, strict=True)]
        return Table(["candidate", f">{self.columns[0]}", self.columns[1]], rows).shown()


class RatioGroup(NamedTuple):
    """Bars about 1 under a name, and what they come to."""

    name: str
    summed: str
    bars: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Groups of bars on one logarithmic axis about 1. As text what each group comes to: a table has the ratios."""

    groups: Sequence[RatioGroup]
    keys: Sequence[tuple[str, str]]  # colours and what they mean
    is_folded: bool = False


class Dot(NamedTuple):
    """A measured point of a roofline: operations per byte, and operations per second."""

    name: str
    intensity: float
    rate: float
    kind: str = ""  # the colour; empty: that of the name


@dataclass(frozen=True, slots=True)
class Roofline:
    """Dots under the slope of memory, the flat of arithmetic and `others`. Its figures stand beside it as text."""

    dots: Sequence[Dot]
    flops: float
    bytes: float
    caption: str
    others: Sequence[tuple[str, float]] = ()


class Span(NamedTuple):
    """A stretch of a lane, in microseconds from the lane's start."""

    name: str
    start: float
    length: float


class Lane(NamedTuple):
    """What one candidate launched in one direction. `summed`: by kernel, with no place in time."""

    name: str
    small: str
    spans: Sequence[Span]
    blocks: Sequence[Block]
    summed: bool = False
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Lanes:
    """A lane per candidate, which unfolds into its blocks."""

    lanes: Sequence[Lane]
    caption: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Heading:
    """Over a part of a section. The text does without: what follows has a caption."""

    title: str


class Share(NamedTuple):
    """How much of a limit a value takes."""

    name: str
    share: float
    value: str  # as it is shown

    @property
    def over(self) -> bool:
        return not self.share <= 1.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Values of candidates against a limit, for each of several quantities: (title, limit, the candidates' shares).

    As text one table of them all, whose last line has the limits.
    """

    groups: Sequence[tuple[str, str, Sequence[Share]]]
    caption: str
    limit: str  # what the limit is called

    def table(self) -> Table:
        names = dict.fromkeys(one.name for _, _, shares in self.groups for one in shares)
        cells = [{one.name: f"{one.value}, {units.percent(one.share)}" for one in shares} for *_, shares in self.groups]
        rows = [[name, *(column.get(name, "-") for column in cells)] for name in names]
        limits = [self.limit, *(limit for _, limit, _ in self.groups)]
        return Table(["candidate", *(f">{title}" for title, *_ in self.groups)], [*rows, limits])


@dataclass(frozen=True, slots=True)
class Fold:
    """What a page unfolds; as text it stands there, unless the text has it elsewhere."""

    summary: Inline
    blocks: Sequence[Block]
    is_open: bool = False
    is_boxed: bool = False
    in_text: bool = True


Block = Words | Table | Bars | Shares | Ratios | Fold | Roofline | Lanes | Facts | Heading


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title. A text has `brief` ones instead unless all is asked for, where there are some, be it none;
    and it begins with those of `text`, which the page does without."""

    title: str
    blocks: Sequence[Block]
    brief: Sequence[Block] | None = None
    text: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The answer first, then the facts that qualify it, then the sections."""

    command: str  # whose report it is
    subject: Inline
    claim: Inline  # the answer, in few words
    sentence: str  # the answer, in a sentence
    facts: Sequence[str] = ()
    lead: str = ""  # a sentence or two of explanation
    warnings: Sequence[str] = ()  # what a reader must know before believing the figures
    failures: Sequence[str] = ()
    sections: Sequence[Section] = ()
    last: str = ""  # what a text ends with


def show(shown: Report, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print a report; on a terminal, tables with lines and colour."""
    for part in _parts(shown, verbose=verbose, quiet=quiet):
        if isinstance(part, Table):
            print_table(*_cells(part))
        else:
            print(part)


def lines(shown: Report, *, verbose: bool = False, quiet: bool = False) -> list[str]:
    """The text of a report."""
    parts = _parts(shown, verbose=verbose, quiet=quiet)
    return [line for part in parts for line in ([part] if isinstance(part, str) else plain_table(*_cells(part)))]


def _parts(shown: Report, *, verbose: bool, quiet: bool) -> Iterator[str | Table]:
    yield from filter(None, [shown.sentence, *shown.warnings])
    if not quiet:
        yield from _body(shown, verbose=verbose)
    yield from filter(None, [shown.last])


def _body(shown: Report, *, verbose: bool) -> Iterator[str | Table]:
    yield f"{shown.command}: {text_of(shown.subject)}"
    yield from ["; ".join(map(text_of, shown.facts))] if shown.facts else []
    yield from [shown.lead] if shown.lead and shown.lead not in shown.sentence else []
    yield from shown.failures
    for section in shown.sections:
        yield from _texts(section.text)
        if section.brief is not None and not verbose:
            yield from _texts(section.brief)
        else:
            yield f"{section.title}:"
            yield from _texts(section.blocks)


def _texts(blocks: Sequence[Block]) -> Iterator[str | Table]:
    for block in blocks:
        if isinstance(block, Words):
            yield from block.content if isinstance(block.content, Lines) else [text_of(block.content)]
        elif isinstance(block, Table):
            yield block.shown()
        elif isinstance(block, Facts):
            width = max(len(name) for name, _ in block.pairs) + 1
            yield from (f"{f'{name}:':{width}} {value}" for name, value in block.pairs)
        elif isinstance(block, Shares) or (isinstance(block, Bars) and block.in_text):
            yield f"{block.caption}:"
            yield block.table()
        elif isinstance(block, Lanes):
            for lane in block.lanes:
                yield f"{lane.name}, {lane.small}:"
                yield from _texts(lane.blocks)
        elif isinstance(block, Ratios):
            yield from (f"{group.name}: {group.summed}" for group in block.groups)
        elif isinstance(block, Fold) and block.in_text:
            inside = list(_texts(block.blocks))
            if any(isinstance(part, str) for part in inside):
                yield text_of(block.summary)
            yield from inside


def text_of(content: object) -> str:
    if isinstance(content, Phrase | Lines):
        return ("" if isinstance(content, Phrase) else "; ").join(map(text_of, content))
    text = str(content)
    return f"{text[:_LONGEST_KERNEL]}..." if isinstance(content, Kernel) and len(text) > _LONGEST_KERNEL else text


def _cells(table: Table) -> tuple[Sequence[str], list[list[str]]]:
    """Lines of one cell are lines of the table."""
    rows = []
    for row in table.rows:
        cells = [cell if isinstance(cell, Lines) else (text_of(cell),) for cell in row]
        rows += [list(line) for line in zip_longest(*cells, fillvalue="")]
    return table.columns, rows


def refusals(
    refused: dict[str, list[str]], asked: dict[str, list[str]] | None = None, gpu_only: Sequence[str] = ()
) -> list[Section]:
    """The candidates that refuse the problem, with every reason and its remedy; none if none does. Those of `gpu_only`
    have one reason. The text has the reasons of those that were `asked` for by name without being asked for them."""
    named = asked or {}
    rest = {name: reasons for name, reasons in refused.items() if name not in gpu_only}
    rows: list[list[Inline]] = [[Code(name), *whys_and_remedies(one)] for name, one in (rest | named).items()]
    only = [Words(f"made for GPUs: {', '.join(gpu_only)}")] if gpu_only else []
    brief = [Words(f"{name} refuses: {'; '.join(reasons)}") for name, reasons in named.items()]
    brief += [Words(f"did not take it, for reasons that -v tells: {', '.join(rest)}")] if rest else []
    tables = [Table(("candidate", "why", "what would change that"), rows, "Refused")] if rows else []
    return [Section("Refused", [*only, *tables], [*only, *brief])] if only or tables else []


def whys_and_remedies(reasons: Sequence[str]) -> tuple[Lines, Lines]:
    """Of reasons as `Reason` writes them."""
    whys, remedies = zip(*(reason.partition(" -> ")[::2] for reason in reasons or [""]), strict=True)
    return Lines(whys), Lines(remedies)


def machine_of(provenance: dict[str, Any], device: str) -> list[str]:
    """The GPU's name, or the processor's and its threads, and the release of PyTorch."""
    gpus, machine = provenance.get("gpus") or [], provenance.get("machine", {})
    if device.startswith("cuda") and gpus:
        name = str(gpus[0]["name"])
    else:
        name = str(machine.get("cpu") or device)
        name += f", {machine['threads']} threads" if "threads" in machine else ""
    version = provenance.get("versions", {}).get("torch")
    return [name, *([f"torch {version}"] if version else [])]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns whose header starts with ">" are aligned to the right. What a terminal is too narrow for is not cut."""
    from rich.console import Console  # noqa: PLC0415  (plain text, as a trace prints it, needs no rich)
    from rich.measure import Measurement  # noqa: PLC0415

    console = Console()
    table = _rich_table(columns, rows)
    unbounded = console.options.update(max_width=10_000)
    if console.is_terminal and Measurement.get(console, unbounded, table).maximum <= console.width:
        console.print(table)
    else:
        print("\n".join(plain_table(columns, rows)))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    right = [column.startswith(">") for column in columns]
    lines = [[column.lstrip(">") for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415

    table = RichTable(header_style="bold", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    for row in rows:
        bad = any(cell.startswith(_BAD) for cell in row)
        table.add_row(*row, style="red" if bad else "")
    return table


def to_json(value: Any) -> str:
    """Standard JSON: nan and the infinities, which it lacks, become text."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with nan and the infinities as text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Bar:
    """A progress bar on standard error, only where a person watches. `tick` moves it on and names what comes next."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("starting", total=total)
        self._ticks = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tick(self, text: str) -> None:
        self._progress.update(self._task, description=text, completed=self._ticks)
        self._ticks += 1


def milliseconds(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else significant(summary["median"] * 1e3)


def spread(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else f"{significant(summary['p20'] * 1e3)}..{significant(summary['p80'] * 1e3)}"


def microseconds(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else f"{summary['median'] * 1e6:.1f}"


def rate(flops: int, summary: dict[str, float] | None) -> str:
    """TFLOP/s of visible work."""
    return "-" if summary is None else significant(flops / summary["median"] / 1e12)


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
