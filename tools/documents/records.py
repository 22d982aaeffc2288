"""The records of a checkout: which of them may be cited, and how pages name them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.lab.studies import bench, kept, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Kept(NamedTuple):
    """A record of the results folder."""

    path: Path
    values: dict[str, Any]

    @property
    def date(self) -> str:
        return str(self.values["provenance"]["date"])

    @property
    def gpu(self) -> str:
        """Empty where it was measured on a CPU."""
        return next((str(gpu["name"]) for gpu in self.values["provenance"]["gpus"]), "")

    def link(self, page: Path, text: str = "") -> str:
        return f"[{text or self.path.name}]({relative(self.path, page)})"

    def dated(self, page: Path) -> str:
        """Its device and date, as a link to it."""
        device = self.gpu or self.values["provenance"]["machine"]["cpu"]
        return self.link(page, f"{device}, {self.date[:10]}")


@dataclass(frozen=True)
class Checkout:
    """A folder with pages and records, each of which is read once."""

    root: Path

    @cached_property
    def suites(self) -> list[records.Record]:
        return records.read_all(self.root / bench.RESULTS)

    def suite(self, name: str, gpu: str = "") -> records.Record | None:
        """The record of a suite that is cited."""
        return records.newest(self.suites, name, gpu)

    def of_kind(
        self,
        kind: str,
        fits: Callable[[dict[str, Any]], object],
        marks: Callable[[dict[str, Any]], list[str]] = records.marks_of,
    ) -> Iterator[Kept]:
        """The complete records of a kind that fit and may be cited, the newest first."""
        found = (Kept(path, values) for path, values in kept.of_kind(self.root / bench.RESULTS, kind))
        for one in sorted(found, key=lambda one: (one.date, one.path.name), reverse=True):
            if one.values.get("complete", True) and fits(one.values) and not marks(one.values):
                yield one


def relative(file: Path, page: Path) -> str:
    """A file as a page links to it."""
    return Path(os.path.relpath(file, page.parent)).as_posix()


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown. Columns whose header starts with ">" are aligned to the right."""
    rules = ["---:" if name.startswith(">") else "---" for name in head]
    names = [name.removeprefix(">") for name in head]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (names, *rows)]
    return [lines[0], f"|{'|'.join(rules)}|", *lines[1:]]
