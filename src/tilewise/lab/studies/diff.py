"""diff: two records of one kind side by side, each figure with its interval, and which rows have changed.

The two were measured at different times, so that nothing pairs their rounds: a time of one says little about a time of
the other. What can be compared is how each candidate stood beside the same opponent *within* its record: those two
ratios, each with its interval. They differ where the intervals do not touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from .. import report, units
from ..measure import words
from ..measure.compare import Comparison, median, read_comparison

if TYPE_CHECKING:
    from pathlib import Path

    from ..measure.compare import Outcome
    from ..measure.statistics import Speed

KIND = "tilewise diff"
HIGHER, LOWER, UNCHANGED, UNTOLD = "higher", "lower", "no change", "too few rounds"
_BENCH, _INSPECT, _LADDER = "tilewise bench", "tilewise inspect", "tilewise ladder"
COLUMNS = ("row", "candidate", "against", ">before", ">after", "ratio", ">time before", ">after")


@dataclass(frozen=True, slots=True)
class Change:
    """One candidate of one row, before and after."""

    row: str
    candidate: str
    against: str
    before: Speed
    after: Speed
    seconds: tuple[float, float]

    @property
    def verdict(self) -> str:
        pair = (self.before.low, self.before.high, self.after.low, self.after.high)
        if any(value is None for value in pair):
            return UNTOLD
        low, high, new_low, new_high = pair
        assert low is not None
        assert high is not None
        assert new_low is not None
        assert new_high is not None
        return HIGHER if new_low > high else LOWER if new_high < low else UNCHANGED

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "candidate": self.candidate,
            "against": self.against,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "verdict": self.verdict,
            "seconds": list(self.seconds),
        }


def comparisons(record: dict[str, Any], path: Path) -> dict[str, Comparison]:
    """By the name of the row; an inspect has one, named by its problem."""
    kind, values = record["kind"], record
    if kind == _BENCH:
        found = [read_comparison(row) for row in values["rows"]]
        return {comparison.row.name: comparison for comparison in found}
    if kind == _INSPECT:
        comparison = read_comparison(values["comparison"])
        return {str(comparison.row.problem): comparison}
    if kind == _LADDER:
        found = [read_comparison(climb["comparison"]) for climb in values["climbs"]]
        return {str(comparison.row.problem): comparison for comparison in found}
    raise InvalidInput("record", f"{path} of kind {kind!r}", f"{_BENCH}, {_INSPECT} or {_LADDER}", "name such records")


def changes(before: dict[str, Comparison], after: dict[str, Comparison]) -> list[Change]:
    """Every candidate that both have in a row that both have, against an opponent that both have."""
    found = []
    for name in (name for name in before if name in after):
        old, new = before[name], after[name]
        for outcome in old.timed():
            other = _find(new, outcome.candidate)
            opponents = _opponents(old, new, outcome.candidate)
            if other is None or opponents is None:
                continue
            was, is_now = old.versus(outcome, opponents[0]), new.versus(other, opponents[1])
            if was is not None and is_now is not None and not (was.same and is_now.same):
                seconds = median(outcome.samples), median(other.samples)
                found.append(Change(name, outcome.candidate, opponents[0].candidate, was, is_now, seconds))
    return found


def _find(comparison: Comparison, name: str) -> Outcome | None:
    return next((outcome for outcome in comparison.timed() if outcome.candidate == name), None)


def _opponents(old: Comparison, new: Comparison, name: str) -> tuple[Outcome, Outcome] | None:
    """The best of PyTorch's paths in the first record, else its default, if the second has it too."""
    for outcome in (old.best_peer(), old.default(), *old.timed()):
        if outcome is None or outcome.candidate == name:
            continue
        other = _find(new, outcome.candidate)
        if other is not None:
            return outcome, other
    return None


def sentence(found: list[Change], only_before: int, only_after: int) -> str:
    counts = {verdict: sum(c.verdict == verdict for c in found) for verdict in (HIGHER, LOWER, UNCHANGED, UNTOLD)}
    text = f"{len(found)} ratios in both: {counts[HIGHER]} higher, {counts[LOWER]} lower, "
    text += f"{counts[UNCHANGED]} without a change beyond the noise"
    text += f", {counts[UNTOLD]} of too few rounds to tell" if counts[UNTOLD] else ""
    missing = ((only_before, "first"), (only_after, "second"))
    return "; ".join([text, *(f"{count} rows only in the {which}" for count, which in missing if count)]) + "."


def lines(found: list[Change], *, verbose: bool = False) -> list[list[str]]:
    """Cells of what changed; with `verbose` of everything."""
    return [
        [
            change.row,
            change.candidate,
            change.against,
            words.cell(change.before),
            words.cell(change.after),
            change.verdict,
            *(units.duration(seconds) for seconds in change.seconds),
        ]
        for change in found
        if verbose or change.verdict in (HIGHER, LOWER)
    ]


def show(told: dict[str, Any], found: list[Change], *, verbose: bool, quiet: bool) -> None:
    print(told["sentence"])
    if quiet:
        return
    cells = lines(found, verbose=verbose or len(found) <= 12)
    if cells:
        report.print_table(COLUMNS, cells)
    print("times were measured apart, and are not compared; ratios are, each taken within its own record")


def about(record: dict[str, Any]) -> str:
    """Where a record comes from, in a few words."""
    provenance = record.get("provenance")
    if not provenance:
        return "no provenance"
    device = provenance["gpus"][0]["name"] if provenance["gpus"] else provenance["machine"]["cpu"]
    commit = (provenance["source"].get("commit") or "")[:7]
    return (
        f"{device}, torch {provenance['versions']['torch']}, {provenance['date'][:16]}{f', {commit}' if commit else ''}"
    )
