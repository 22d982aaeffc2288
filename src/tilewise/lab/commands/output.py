"""Where a command's results go: text, `--json PATH`, `--html PATH`; `-` stands for standard output, for one of them.

Paths are checked before anything is measured. One that cannot be written in the end all the same (a disk that is full)
costs nothing that was measured: the record then goes to a fresh file, and its name is told.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InvalidInput
from .. import report
from ..studies import kept
from ..studies.bench import RESULTS
from .command import refuse_ignored

if TYPE_CHECKING:
    from collections.abc import Callable

STDOUT = Path("-")


def check_file(option: str, path: Path | None) -> None:
    """InvalidInput unless the file can be written. An existing one stays as it is until there is something to write."""
    if path is None or path == STDOUT:
        return
    try:
        if path.exists():
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        why = f"{path} ({error.strerror})"
        raise InvalidInput(option, why, "a file that can be written, or -", "name one in a folder of yours") from None


def check_folder(option: str, path: Path | None) -> None:
    """InvalidInput unless files can be written into the folder. It is made where it is missing."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except OSError as error:
        why = f"{path} ({error.strerror})"
        raise InvalidInput(option, why, "a folder that can be written", "name a folder of yours") from None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results go, and how much is printed. Made, and thereby checked, before anything is measured."""

    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False
    results: Annotated[Path, typer.Option(help="The results folder.")] = RESULTS
    record: Annotated[Path | None, typer.Option(help="Show this record again instead of measuring.")] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All there is to tell, not only the outcome.")] = (
        False
    )
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the sentence that sums it up.")] = False
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file; - or nothing: to standard output, instead of text."),
    ] = None
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write a report to this file, one page that loads nothing; -: to standard output."),
    ] = None

    def __post_init__(self) -> None:
        check_file("--json", self.json)
        check_file("--html", self.page)
        if self.json == self.page == STDOUT:
            raise InvalidInput("--html", "- beside --json -", "standard output for one of them", "name a file")
        if self.save:
            check_folder("--results", self.results)
        else:
            refuse_ignored("without --save", "results")

    @property
    def text(self) -> bool:
        """Standard output is not taken by one of the formats."""
        return STDOUT not in (self.json, self.page)

    @property
    def looks(self) -> dict[str, bool]:
        """How much is printed."""
        return {"verbose": self.verbose, "quiet": self.quiet}

    def deliver(self, record: Any, show: Callable[[], object]) -> None:
        """Keep the record, print its text, and write it as JSON and as a page: what was asked for of these."""
        if self.save:
            print(f"saved {kept.save(record, self.results)}", file=sys.stderr)
        if self.text:
            show()
        if self.json is not None:
            _write("--json", self.json, report.to_json(record) + "\n", record)
        if self.page is not None:
            from ..render import pages  # noqa: PLC0415  (loaded where a page is written)

            _write("--html", self.page, pages.page(record), record)


def _write(option: str, path: Path, text: str, record: Any) -> None:
    """If the file cannot be written, the record is kept in another."""
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _replace(path, text)
    except OSError as error:
        _rescue(option, path, error, record)
    print(f"wrote {path}", file=sys.stderr)


def _replace(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _rescue(option: str, path: Path, error: OSError, record: Any) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="tilewise-", suffix=".json", delete=False, encoding="utf-8") as file:
        file.write(report.to_json(record) + "\n")
    raise InvalidInput(
        option, f"{path} ({error.strerror})", "a file that can be written", f"what was measured is in {file.name}"
    ) from error
