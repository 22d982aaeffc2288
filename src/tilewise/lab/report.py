"""Text for people: tables with lines and colour on a terminal, aligned columns in a pipe; progress on standard error.

What goes into a pipe is stable: no escape codes, no boxes, no wrapping, columns two spaces apart.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from . import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

significant = units.significant
_BAD = ("wrong", "died", "no answer", "raised")


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


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(header_style="bold", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    for row in rows:
        bad = any(cell.startswith(_BAD) for cell in row)
        table.add_row(*row, style="red" if bad else "")
    return table


def print_json(value: Any) -> None:
    print(to_json(value))


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
