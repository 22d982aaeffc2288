"""Records of `tilewise bench`: which one stands for a suite and a GPU, whether it may still be cited, and how a newer
run of some of its rows enters it.

A row is evidence while three things hold: it has rounds enough, today's plan for its problem would launch the kernels
that were measured, and each of the suite's strongest peers either has a verified time or says why it has none.
Documents cite the newest record of which every row is evidence, and no other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput, TilewiseError
from ...target import TARGETS, Target
from ..candidates.names import Candidate
from ..measure.compare import REFUSED, VERIFIED, Comparison, read_comparison
from ..measure.statistics import MIN_ROUNDS
from ..model import launched
from ..units import counted
from . import bench, kept
from .suites import peers_of, rows_of

if TYPE_CHECKING:
    from pathlib import Path

KIND = "tilewise bench"


@dataclass(frozen=True)
class Record:
    """One or several runs of a suite, as they were kept."""

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
    def seed(self) -> int:
        return int(self.values["settings"]["seed"])

    @property
    def device(self) -> str:
        """The GPU's name, or the processor's for a suite of the CPU."""
        return device_of(self.values["provenance"], on_gpu=self.on_gpu)

    @property
    def whole(self) -> bool:
        """It holds every row of the suite, and none was interrupted."""
        names = {comparison.row.name for comparison in self.comparisons if comparison.complete}
        return not self.missing(names)

    def missing(self, names: set[str]) -> list[str]:
        """The suite's rows that are not among these."""
        return [row.name for row in rows_of(self.suite, self.seed) if row.name not in names]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        return [read_comparison(row) for row in self.values["rows"]]

    @property
    def rounds(self) -> int:
        """Of the candidate that each row is about, where it has the fewest."""
        return min((len(c.outcomes[0].costs) for c in self.comparisons if c.outcomes[0].costs), default=0)

    @property
    def on_gpu(self) -> bool:
        return any(row["device"].startswith("cuda") for row in self.values["rows"])

    @cached_property
    def older(self) -> dict[str, str]:
        """Rows whose kernels are no longer those that were measured, and why."""
        target = target_of(self.values["provenance"], on_gpu=self.on_gpu)
        return {c.row.name: why for c in self.comparisons if (why := older(c, target))}

    def marks(self) -> list[str]:
        """What a reader must know before believing the figures; empty for a record that stands as it is."""
        changed = f"the kernels of {len(self.older)} of {counted(len(self.comparisons), 'row')} have changed since"
        return [*_too_few(self.rounds), *([changed] if self.older else [])]

    def shortcomings(self) -> dict[str, str]:
        """Why rows of the suite are no evidence, by their names."""
        measured = {comparison.row.name: comparison for comparison in self.comparisons}
        found = {}
        for row in rows_of(self.suite, self.seed):
            comparison = measured.get(row.name)
            peers = peers_of(self.suite, row)
            if why := "not measured" if comparison is None else self._shortcoming(comparison, peers):
                found[row.name] = why
        return found

    def _shortcoming(self, comparison: Comparison, peers: tuple[str, ...]) -> str:
        ours = comparison.outcomes[0]
        if not comparison.complete:
            return "interrupted"
        if ours.verdict != VERIFIED:
            return f"{ours.candidate}: {ours.verdict}"
        if len(ours.costs) < MIN_ROUNDS:
            return f"{counted(len(ours.costs), 'round')} of {ours.candidate}, fewer than {MIN_ROUNDS}"
        if why := self.older.get(comparison.row.name):
            return why
        lacking = (self._lacks(peer, comparison) for peer in peers)
        return next((why for why in lacking if why), "")

    def _lacks(self, peer: str, comparison: Comparison) -> str:
        """What is missing of a peer: it has neither a verified time nor a reason for having none. That it failed is a
        reason where it works in other rows of the suite; where it works in none, it is not set up."""
        outcome = next((one for one in comparison.outcomes if one.candidate == peer), None)
        if outcome is None:
            return f"{peer} was not asked"
        if outcome.verdict == VERIFIED and outcome.costs:
            return ""
        if outcome.because if outcome.verdict == REFUSED else outcome.failed and peer in self._working:
            return ""
        return f"{peer}: {outcome.verdict}, without a time"

    @cached_property
    def _working(self) -> frozenset[str]:
        """Candidates that are right in some row."""
        every = (outcome for comparison in self.comparisons for outcome in comparison.outcomes)
        return frozenset(outcome.candidate for outcome in every if outcome.verdict == VERIFIED)

    def about(self) -> str:
        """Where the figures come from, in a line."""
        versions = self.values["provenance"]["versions"]
        cudnn = f", cuDNN {versions['cudnn']}" if versions.get("cudnn") else ""
        days = sorted({comparison.measured[:10] for comparison in self.comparisons if comparison.measured})
        measured = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else self.date[:10]
        known = f"{self.device}, torch {versions['torch']}{cudnn}, {measured}, {_sources(self.values['provenance'])}"
        return known + "".join(f" (**{mark}**)" for mark in self.marks())


def _sources(provenance: dict[str, Any]) -> str:
    source = provenance["source"]
    commit = f"commit {source['commit'][:7]}" if source["commit"] else "an installed package"
    return commit + (" with changes" if source["dirty"] else "")


def device_of(provenance: dict[str, Any], *, on_gpu: bool) -> str:
    gpus = provenance["gpus"]
    return str(gpus[0]["name"] if on_gpu and gpus else provenance["machine"]["cpu"])


def target_of(provenance: dict[str, Any], *, on_gpu: bool) -> Target | None:
    """The machine of a record as a target that can be planned for elsewhere; None for a GPU that no table knows."""
    name = device_of(provenance, on_gpu=on_gpu).lower() if on_gpu else "cpu"
    known = next((one for one in TARGETS if one.replace("rtx-", "").replace("-", " ") in name.split()), "")
    versions = provenance["versions"]
    cudnn = int(versions["cudnn"]) if versions.get("cudnn") else None
    return Target.named(known, torch_version=versions["torch"], cudnn=cudnn) if known else None


def older(comparison: Comparison, target: Target | None) -> str:
    """Why today's sources launch something else than what a row measured; empty where they do not."""
    for outcome in comparison.outcomes:
        if not outcome.costs or not Candidate(outcome.candidate).is_ours:
            continue
        if outcome.kernels is None or target is None:
            return f"{outcome.candidate}: the record does not name its kernels"
        try:
            now = launched.today(outcome.kernels, target, comparison.row.timed)
        except TilewiseError as error:
            return f"{outcome.candidate}: {str(error).splitlines()[0]}"
        if why := launched.difference(outcome.kernels, now):
            return f"{outcome.candidate}: {why}"
    return ""


def marks_of(record: dict[str, Any]) -> list[str]:
    """The same of a record of another kind. It names its kernels in its comparisons, one or several, or in `kernels`, a
    list of what its program launched, or in both."""
    found = [read_comparison(one["comparison"]) for one in record.get("climbs", [record]) if "comparison" in one]
    on_gpu = any(one.row.device.startswith("cuda") for one in found) if found else bool(record["provenance"]["gpus"])
    target = target_of(record["provenance"], on_gpu=on_gpu)
    if found:
        rounds = min((len(outcome.costs) for one in found for outcome in one.timed()[:1]), default=0)
    else:
        rounds = record.get("settings", {}).get("rounds", 0)
    changed = next((why for one in found if (why := older(one, target))), "")
    if not changed and (record.get("kernels") or not found):
        changed = _older_kernels(record, target)
    return [*_too_few(rounds), *([f"its kernels have changed since ({changed})"] if changed else [])]


def _older_kernels(record: dict[str, Any], target: Target | None) -> str:
    if not record.get("kernels") or target is None:
        return "the record does not name them"
    try:
        found = (launched.difference(one, launched.today(one, target, launched.STEP)) for one in record["kernels"])
        return next((why for why in found if why), "")
    except TilewiseError as error:
        return str(error).splitlines()[0]


def _too_few(rounds: int) -> list[str]:
    return [f"{counted(rounds, 'round')}, too few to judge a difference"] if 0 < rounds < MIN_ROUNDS else []


def read(path: Path) -> Record:
    """A record from its file. InvalidInput for a file that is none."""
    values = kept.read(path)
    if values["kind"] != KIND:
        kind = values["kind"]
        raise InvalidInput("record", f"{path} of kind {kind!r}", f"a file of kind {KIND!r}", "name a bench record")
    return _record(path, values)


def read_all(folder: Path) -> list[Record]:
    """Every bench record of the folder, oldest first; files of other kinds are passed over."""
    found = [_record(path, values) for path, values in kept.of_kind(folder, KIND)]
    return sorted(found, key=lambda record: (record.date, record.name))


def _record(path: Path, values: dict[str, Any]) -> Record:
    return Record(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:16], values)


def newest(records: list[Record], suite: str, device: str = "") -> Record | None:
    """The newest record on a device whose name contains `device` in which every row of the suite is evidence."""
    fitting = [r for r in records if r.suite == suite and device.lower() in r.device.lower()]
    return next((record for record in reversed(fitting) if record.whole and not record.shortcomings()), None)


def merged(before: Record, values: dict[str, Any]) -> dict[str, Any]:
    """A record with the rows of a newer run in the place of its own, in the order of the suite.

    `provenance` is that of the newer run; those of the runs that other rows are from are `earlier`.
    """
    rows = {c.row.name: c for c in [*before.comparisons, *map(read_comparison, values["rows"])] if c.complete}
    chosen = [rows[row.name] for row in rows_of(before.suite, before.seed) if row.name in rows]
    runs = [*before.values.get("earlier", ()), before.values["provenance"]]
    dates = {comparison.measured for comparison in chosen}
    return values | {
        "complete": True,
        "earlier": [run for run in runs if run["date"] in dates],
        **bench.sums(chosen),
        "rows": [comparison.to_dict() for comparison in chosen],
    }
