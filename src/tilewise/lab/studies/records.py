"""Records of `tilewise bench`: reading them back, and choosing the one that stands for a suite and a GPU.

The newest record that is complete and holds the whole suite is the one that documents cite. Older ones stay: they are
how a figure came to be what it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from ..candidates.names import current_names
from ..measure.compare import Comparison, read_comparison
from ..measure.statistics import MIN_ROUNDS
from ..validation import source_hash
from .suites import SUITES

if TYPE_CHECKING:
    from pathlib import Path

KIND = "tilewise bench"


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a suite, as it was kept."""

    name: str  # of the file
    digest: str  # of its contents
    values: dict[str, Any]

    @property
    def suite(self) -> str:
        return str(self.values["suite"])

    @property
    def date(self) -> str:
        return str(self.values["provenance"]["date"])

    @property
    def device(self) -> str:
        """The GPU's name, or the processor's for a suite of the CPU."""
        provenance = self.values["provenance"]
        gpus = provenance["gpus"]
        return str(gpus[0]["name"] if self.on_gpu and gpus else provenance["machine"]["cpu"])

    @property
    def whole(self) -> bool:
        names = [row["row"] for row in self.values["rows"]]
        rows_of_suite = [row.name for row in SUITES.get(self.suite, ())]
        return bool(self.values.get("whole", names == rows_of_suite)) and bool(self.values["complete"])

    def comparisons(self) -> list[Comparison]:
        return [read_comparison(row) for row in self.values["rows"]]

    @property
    def rounds(self) -> int:
        """Of the candidate that each row is about, where it has the fewest."""
        return min((len(c.outcomes[0].costs) for c in self.comparisons() if c.outcomes[0].costs), default=0)

    def marks(self) -> list[str]:
        """What a reader must know before believing the figures; empty for a record that stands as it is."""
        return marks(self.rounds, self.values["provenance"], on_gpu=self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return any(row["device"].startswith("cuda") for row in self.values["rows"])

    def about(self) -> str:
        """Where the figures come from, in a line."""
        provenance = self.values["provenance"]
        versions, source = provenance["versions"], provenance["source"]
        commit = f"commit {source['commit'][:7]}" if source["commit"] else "an installed package"
        changed = " with changes" if source["dirty"] else ""
        cudnn = f", cuDNN {versions['cudnn']}" if versions.get("cudnn") else ""
        engine = f", engine {source['engine'][:7]}" if source.get("engine") else ""
        known = f"{self.device}, torch {versions['torch']}{cudnn}, {self.date[:10]}, {commit}{changed}{engine}"
        return known + "".join(f" (**{mark}**)" for mark in self.marks())


def marks(rounds: int, provenance: dict[str, Any], *, on_gpu: bool) -> list[str]:
    """Too few rounds, and kernels that are older than the sources; empty for figures that stand as they are."""
    found = []
    if 0 < rounds < MIN_ROUNDS:
        found.append(f"{rounds} {'round' if rounds == 1 else 'rounds'}, too few to judge a difference")
    engine = provenance["source"].get("engine")
    if on_gpu and engine != source_hash():
        found.append(f"of an older engine, {engine[:7] if engine else 'before they were numbered'}")
    return found


def read(path: Path) -> Record:
    """A record from its file. InvalidInput for a file that is none."""
    try:
        text = path.read_bytes()
        values = current_names(json.loads(text))
        kind = values.get("kind") if isinstance(values, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("record", str(path), f"a file that `tilewise bench` wrote ({error})", "check it") from None
    if kind != KIND:
        raise InvalidInput("record", f"{path} of kind {kind!r}", f"a file of kind {KIND!r}", "name a bench record")
    return Record(path.name, hashlib.sha256(text).hexdigest()[:16], values)


def read_all(folder: Path) -> list[Record]:
    """Every bench record of the folder, oldest first; files of other kinds are passed over."""
    found = [_read_or_none(path) for path in sorted(folder.glob("*.json"))]
    return sorted((record for record in found if record is not None), key=lambda record: (record.date, record.name))


def _read_or_none(path: Path) -> Record | None:
    try:
        return read(path)
    except InvalidInput:
        return None


def newest(records: list[Record], suite: str, device: str = "") -> Record | None:
    """The newest complete record of the whole suite on a device whose name contains `device`."""
    fitting = [r for r in records if r.suite == suite and r.whole and device.lower() in r.device.lower()]
    return fitting[-1] if fitting else None
