"""What a page shows of a comparison, read from its record: one entry per candidate, sorted, each with its speed.

A record of today has a statistic for every candidate: `speed` and `speed_default`, each a ratio with its confidence
interval and a verdict. An older one has the rounds alone, from which the statistic is taken when it is read; where that
gives none, ratios are paired round by round, the interval is their range, and nothing is called faster whose range
holds 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...plan import BACKENDS
from ..measure.compare import REFUSED, TIMES, UNVERIFIED, VERIFIED, median, read_comparison, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMULA = "TFLOP/s counts visible (query, key) pairs only: 2 * pairs * (head_dim + head_dim_v), backward 2.5 times that"
OURS, DEFAULT = "tilewise", "torch-default"
OUR_KIND, TORCH_KIND, OTHER_KIND = "ours", "torch", "other"
KINDS = {OUR_KIND: "tilewise", TORCH_KIND: "PyTorch", OTHER_KIND: "others"}
FASTER, SLOWER, SAME_SPEED, TOO_FEW, SAME_KERNELS = (
    "faster", "slower", "indistinguishable", "too few rounds", "same kernels",
)  # fmt: skip
FOLD_OVER = 5.0  # times the fastest: what is slower is folded away
_MIN_ROUNDS = 5
_OUR_BACKENDS = ("sm80", "sm90", "triton", "tiled", "reference")


def kind_of(name: str) -> str:
    """Whose a candidate is, which decides its colour. By name alone: records outlive what they name."""
    if name == OURS or name.startswith(("tilewise:", "ladder:")) or "@" in name:
        return OUR_KIND
    if name.startswith(("torch-", "sdpa:", "flags:")):
        return TORCH_KIND
    return OUR_KIND if name in (*BACKENDS, *_OUR_BACKENDS) else OTHER_KIND


def kernel_name(choice: str) -> str:
    """One of PyTorch's kernels by the name of its candidate: `torch-flash` for flash, and for flash_attention."""
    bare = choice.removeprefix("torch-").removesuffix("_attention")
    return f"torch-{bare}" if bare else ""


@dataclass(frozen=True, slots=True)
class Speed:
    """How a candidate compares with another: `ratio` above 1 is faster. `low` and `high` are its interval."""

    ratio: float
    low: float | None = None
    high: float | None = None
    verdict: str = TOO_FEW
    rounds: int = 0
    confidence: float | None = None  # None: the interval is the range of the rounds

    @property
    def claim(self) -> str:
        """`1.34x faster`, `1.20x slower`, or what may be said instead."""
        if self.verdict == FASTER:
            return f"{self.ratio:.2f}x faster"
        if self.verdict == SLOWER:
            return f"{1 / self.ratio:.2f}x slower" if self.ratio > 0 else SLOWER
        return self.verdict

    @property
    def interval(self) -> str:
        """In the direction of the claim."""
        if self.low is None or self.high is None:
            return ""
        low, high = self.low, self.high
        if self.verdict == SLOWER and low > 0:
            low, high = 1 / high, 1 / low
        return f"{low:.2f} to {high:.2f}"

    @property
    def basis(self) -> str:
        """What the interval is, in words."""
        if self.low is None:
            return f"{self.rounds} rounds"
        of = f"{self.confidence:.0%} interval" if self.confidence else "range"
        return f"{of} of {self.rounds} paired rounds"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Speed:
        known = {name: values[name] for name in cls.__slots__ if name in values}
        for name in ("ratio", "low", "high"):  # JSON has no inf and nan: they are kept as text
            if known.get(name) is not None:
                known[name] = float(known[name])
        return cls(**known)

    @classmethod
    def of_rounds(cls, ours: Sequence[float], other: Sequence[float]) -> Speed | None:
        ratios = [theirs / mine for mine, theirs in zip(ours, other, strict=False) if mine > 0]
        if not ratios:
            return None
        low, high = min(ratios), max(ratios)
        if len(ratios) < _MIN_ROUNDS:
            return cls(median(ratios), rounds=len(ratios))
        verdict = FASTER if low > 1 else SLOWER if high < 1 else SAME_SPEED
        return cls(median(ratios), low, high, verdict, len(ratios))


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


def view(comparison: dict[str, Any], choice: str = "") -> View:
    """Of what `Comparison.to_dict` wrote. `choice` is the kernel that PyTorch's default ran, where that is known."""
    if not any("speed" in values for values in comparison["candidates"]):
        comparison = comparison | {"candidates": read_comparison(comparison).to_dict()["candidates"]}
    told = {values["candidate"]: values for values in comparison["candidates"]}
    rounds = {name: _costs(values) for name, values in told.items()}
    best = comparison.get("best_peer") or ""
    entries = {}
    for name, values in told.items():
        if values["verdict"] == REFUSED:
            continue
        entry = Entry(name, values["verdict"], list(values["because"]), _seconds(values, rounds[name]), _parts(values))
        entry.speed = _speed(values, "speed", rounds[name], rounds.get(best, []), name == best)
        entry.speed_default = _speed(values, "speed_default", rounds[name], rounds.get(DEFAULT, []), name == DEFAULT)
        entry.errors = {tensor: float(kinds["norm"]) for tensor, kinds in values["errors"].items()}
        entry.memory = values["memory"]
        entries[name] = entry
    _merge(entries, {name: _same_as(name, values, choice) for name, values in told.items()})
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


def _costs(values: dict[str, Any]) -> list[float]:
    """Seconds per round of all that is timed."""
    timed = [values[what] for what in TIMES if values.get(what)]
    return [sum(map(median, parts)) for parts in zip(*timed, strict=False)]


def _parts(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    found = {what: values.get(f"{what}_seconds") or summary(values.get(what) or []) for what in TIMES}
    return {what: seconds for what, seconds in found.items() if seconds}


def _seconds(values: dict[str, Any], costs: list[float]) -> dict[str, float] | None:
    if values.get("cost_seconds"):
        return dict(values["cost_seconds"])
    timed = [values[what] for what in TIMES if values.get(what)]
    return summary(timed[0] if len(timed) == 1 else costs)


def _speed(values: dict[str, Any], name: str, mine: list[float], theirs: list[float], is_itself: bool) -> Speed | None:
    if is_itself:
        return None
    if name in values:
        return Speed.from_dict(values[name]) if values[name] else None
    return Speed.of_rounds(mine, theirs)


def _same_as(name: str, values: dict[str, Any], choice: str) -> str:
    if values.get("same_as"):
        return str(values["same_as"])
    return DEFAULT if choice and name == kernel_name(choice) else ""


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
