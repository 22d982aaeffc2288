"""Where a command's results go: text, `--json PATH`, `--html PATH`; `-` stands for standard output, for one of them.

Paths are checked before anything is measured. One that cannot be written in the end all the same (a disk that is full)
costs nothing that was measured: the record then goes to a fresh file, and its name is told.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from .. import report
from .options import refuse_ignored

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
class Outputs:
    """What was asked for; made, and thereby checked, before the measurements."""

    json: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        check_file("--json", self.json)
        check_file("--html", self.html)
        if self.json == self.html == STDOUT:
            raise InvalidInput("--html", "- beside --json -", "standard output for one of them", "name a file")

    @property
    def text(self) -> bool:
        """Standard output is not taken by one of the formats."""
        return STDOUT not in (self.json, self.html)

    def write(self, record: Any, page: Callable[[], str] = lambda: "") -> None:
        """The record as JSON, and its page, where they were asked for."""
        if self.json is not None:
            _write("--json", self.json, report.to_json(record) + "\n", record)
        if self.html is not None:
            _write("--html", self.html, page(), record)


def write_file(option: str, path: Path, write: Callable[[], object], record: Any) -> None:
    """Let `write` make a file; if it cannot, the record is kept in another."""
    try:
        write()
    except OSError as error:
        _rescue(option, path, error, record)


def _write(option: str, path: Path, text: str, record: Any) -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_file(option, path, lambda: _replace(path, text), record)
    print(f"wrote {path}", file=sys.stderr)


def _replace(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _rescue(option: str, path: Path, error: OSError, record: Any) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="tilewise-", suffix=".json", delete=False, encoding="utf-8") as file:
        file.write(report.to_json(record) + "\n")
    raise InvalidInput(
        option, f"{path} ({error.strerror})", "a file that can be written", f"what was measured is in {file.name}"
    ) from error


def open_outputs(json: Path | None, page: Path | None, save: bool, results: Path) -> Outputs:
    """The outputs of a command that can also add its record to a results folder."""
    if save:
        check_folder("--results", results)
    else:
        refuse_ignored("without --save", "results")
    return Outputs(json, page)
