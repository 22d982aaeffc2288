"""What a page shows of a comparison: one entry per candidate, sorted, each with its speed.

Every candidate has a statistic, `speed` and `speed_default`, each a ratio with its confidence interval and a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...plan import BACKENDS
from .. import units
from ..measure import words
from ..measure.compare import REFUSED, TIMES, UNVERIFIED, VERIFIED, median, summary
from ..measure.statistics import Speed
from ..report import Bad
from ..studies.inspect import parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMULA = "TFLOP/s counts visible (query, key) pairs only: 2 * pairs * (head_dim + head_dim_v), backward 2.5 times that"
OURS, DEFAULT = "tilewise", "torch-default"
OUR_KIND, TORCH_KIND, OTHER_KIND = "ours", "torch", "other"
KINDS = {OUR_KIND: "tilewise", TORCH_KIND: "PyTorch", OTHER_KIND: "others"}
FOLD_OVER = 5.0  # times the fastest: what is slower is folded away
_OUR_BACKENDS = ("sm80", "sm90", "triton", "tiled", "reference")


def kind_of(name: str) -> str:
    """Whose a candidate is, which decides its colour. By name alone: records outlive what they name."""
    if name == OURS or name.startswith(("tilewise:", "ladder:")) or "@" in name:
        return OUR_KIND
    if name.startswith(("torch-", "flags:")):
        return TORCH_KIND
    return OUR_KIND if name in (*BACKENDS, *_OUR_BACKENDS) else OTHER_KIND


def kernel_name(choice: str) -> str:
    """One of PyTorch's kernels by the name of its candidate: `torch-flash` for flash, and for flash_attention."""
    bare = choice.removeprefix("torch-").removesuffix("_attention")
    return f"torch-{bare}" if bare else ""


@dataclass(slots=True)
class Entry:
    """A candidate of a comparison: its outcome, and what it costs."""

    name: str
    verdict: str
    because: list[str]
    seconds: dict[str, float] | None  # median, p20 and p80 of all that is timed
    parts: dict[str, dict[str, float]]  # by direction
    speed: Speed | None = None  # against PyTorch's best path
    speed_default: Speed | None = None  # against PyTorch's default choice
    errors: dict[str, float] = field(default_factory=dict)  # norm-wise, by tensor
    memory: int | None = None
    overhead: dict[str, float] | None = None  # seconds that a call takes the host
    also: list[Entry] = field(default_factory=list)  # candidates that ran the same kernels

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def failed(self) -> bool:
        return self.verdict not in (VERIFIED, UNVERIFIED, REFUSED)

    @property
    def median(self) -> float:
        return self.seconds["median"] if self.seconds else math.inf

    def error(self, *names: str) -> tuple[str, float] | None:
        """The tensor with the largest error, and the error."""
        known = {name: self.errors[name] for name in names if name in self.errors}
        worst = max(known, key=known.__getitem__, default=None)
        return None if worst is None else (worst, known[worst])


@dataclass(slots=True)
class View:
    """A comparison as a page shows it."""

    entries: list[Entry]  # that were asked, in the record's order
    budgets: dict[str, float]
    compared: str
    timing: str
    timed: tuple[str, ...]
    complete: bool
    noise: list[str]
    undecided: bool
    best_peer: str

    def __getitem__(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def ranked(self) -> list[Entry]:
        """Those with a time, the fastest first, candidates that ran the same kernels as one."""
        timed = [entry for entry in self.entries if entry.seconds and not entry.failed]
        return sorted(timed, key=lambda entry: entry.median)

    @property
    def failures(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.failed]

    def unfolded(self) -> tuple[list[Entry], list[Entry]]:
        """Those to show, and those that are over FOLD_OVER times slower than the fastest; ours and the default stay."""
        ranked = self.ranked()
        limit = FOLD_OVER * ranked[0].median if ranked else 0.0
        shown = [entry for entry in ranked if entry.median <= limit or entry.name in (OURS, DEFAULT)]
        return shown, [entry for entry in ranked if entry not in shown]


def view(comparison: dict[str, Any]) -> View:
    """Of what `Comparison.to_dict` wrote."""
    told = {values["candidate"]: values for values in comparison["candidates"]}
    best = comparison.get("best_peer") or ""
    entries = {}
    for name, values in told.items():
        if values["verdict"] == REFUSED:
            continue
        parts = parts_of({what: values.get(what) or [] for what in TIMES})
        entry = Entry(name, values["verdict"], list(values["because"]), _seconds(parts, values), parts)
        entry.speed = None if name == best else Speed.of(values["speed"])
        entry.speed_default = None if name == DEFAULT else Speed.of(values["speed_default"])
        entry.errors = {tensor: float(kinds["norm"]) for tensor, kinds in values["errors"].items()}
        entry.memory, entry.overhead = values["memory"], values.get("overhead_seconds")
        entries[name] = entry
    _merge(entries, {name: str(values["same_as"]) for name, values in told.items()})
    return View(
        list(entries.values()),
        {tensor: float(kinds["norm"]) for tensor, kinds in comparison.get("budgets", {}).items()},
        comparison["compared"],
        comparison["timing"],
        tuple(comparison.get("times", ("forward",))),
        bool(comparison["complete"]),
        list(comparison.get("noise", ())),
        bool(comparison.get("undecided", False)),
        best,
    )


def _seconds(parts: dict[str, dict[str, float]], values: dict[str, Any]) -> dict[str, float] | None:
    """Of all that is timed: the sum of the directions, and the spread of the rounds' sums."""
    if len(parts) < 2:
        return next(iter(parts.values()), None)
    spread = summary([sum(map(median, one)) for one in zip(*(values[what] for what in parts), strict=False)])
    return spread and spread | {"median": sum(part["median"] for part in parts.values())}


def in_steps(launches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launches of one kernel one after the other as one step, with their count, their time and the gaps before them."""
    found = []
    until = 0.0
    for _, alike in groupby(launches, key=lambda launch: (launch["name"], str(launch["grid"]), str(launch["block"]))):
        first, *rest = alike
        step = first | {"us": 0.0, "count": 0, "gap": 0.0}
        for launch in (first, *rest):
            step["us"] += launch["us"]
            step["count"] += launch["count"]
            step["gap"] += max(0.0, launch["start_us"] - until)
            until = max(until, launch["start_us"] + launch["us"])
        found.append(step)
    return found


def _merge(entries: dict[str, Entry], same: dict[str, str]) -> None:
    """Candidates that ran the same kernels become one entry, PyTorch's and ours apart; ours and the default stay."""
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(same.get(name) or name, []).append(name)
    for names in groups.values():
        for kind in KINDS:
            alike = [name for name in names if kind_of(name) == kind]
            kept = next((name for name in alike if name in (OURS, DEFAULT)), alike[0] if alike else "")
            for name in alike:
                if name not in (kept, OURS, DEFAULT):
                    entries[kept].also.append(entries.pop(name))


def cautions(seen: View) -> list[str]:
    """What a reader must know before believing the times."""
    found = [] if seen.complete else ["Interrupted: only what was measured is here."]
    found += [f"Noisy: {line}" for line in seen.noise]
    if seen.undecided:
        found.append(words.UNDECIDED)
    return found


def error_cells(entry: Entry, seen: View, *tensors: str) -> list[str]:
    """An error, and how much of its budget it takes."""
    found = entry.error(*tensors)
    if found is None:
        return ["-", "-"]
    tensor, value = found
    budget = seen.budgets.get(tensor)
    share = "-" if not budget else units.percent(value / budget)
    return [units.error(value), Bad(share) if budget and not value <= budget else share]


def spread(part: dict[str, float]) -> str:
    """From the 20th to the 80th percentile, in the unit of the median."""
    clock = units.Clock.of([part["median"]])
    return f"{clock.spread(part)} {clock.unit}"
