"""bench: run a suite, sum it up as ratios against the fastest that is not ours, and make a record that can be kept.

The last line of the output sums a suite up for the first candidate of its rows, which is `tilewise` unless the suite is
about one backend: the geometric mean of its ratios and the worst of them. A ratio is the time of the fastest right
candidate that is not ours over ours, for what the row times (forward, backward, or a whole step): above 1 is faster.
Rows in which no other candidate has a right answer have no ratio. A suite that times several things, or in several
ways, has a line for each, with the share of its rows that are behind. Where another library was timed too, each has a
second line, against PyTorch's own paths. A record is written once, under a new name; nothing is ever
overwritten.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...target import TARGETS
from .. import report
from ..candidates.cached import CACHED, INVARIANT, PAGES_16, PAGES_64
from ..candidates.names import DETERMINISTIC, FA3, FA4, FLASHINFER, OURS, PLAIN, VARLEN, Candidate
from ..measure import ahead, environment, noise
from ..measure.clocks import Watch
from ..measure.compare import UNVERIFIED, Comparison, Goal, Row, compare_all, geomean, steps, summary
from ..measure.statistics import FASTER, SLOWER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..measure.compare import Settings
    from ..measure.pool import Pool
    from ..measure.statistics import Speed

RESULTS = Path("benchmarks/results")
BEHIND, FAR_BEHIND = 0.97, 0.85  # ratios: what noise may do, and what it may not
_METHOD_WORDS = {"wall": "eager"}
RIVALS = {
    FA3: "FlashAttention-3",
    FA4: "FlashAttention-4",
    FLASHINFER: "FlashInfer",
    VARLEN: "PyTorch's varlen_attn",
}
TORCH = "against PyTorch's own paths"
_OF_CACHES = {
    PAGES_16: "pages of 16 against one piece",
    PAGES_64: "pages of 64 against one piece",
    INVARIANT: "batch invariant against default",
}


class Score(NamedTuple):
    """What rows come to for the candidate they are about. nan and "none" where no row has a ratio."""

    geomean: float
    worst: float
    row: str
    rows: int = 0  # that have a ratio
    behind: float = 0.0  # share of them under BEHIND
    far_behind: float = 0.0  # share of them under FAR_BEHIND

    def __str__(self) -> str:
        return f"geomean {self.geomean:.3f}, worst {self.worst:.3f} ({self.row})"

    @property
    def shares(self) -> str:
        """How many rows are behind, in words."""
        limits = ((BEHIND, self.behind), (FAR_BEHIND, self.far_behind))
        return ", ".join(
            f"{share * self.rows:.0f} of {self.rows} under {limit} ({share:.1%})" for limit, share in limits
        )


def run(rows: list[Row], settings: Settings, pool: Pool) -> list[Comparison]:
    """Compare row by row. An interrupt ends the run early: the last comparison is then not complete."""
    done: list[Comparison] = []
    on_gpu = any(row.device.startswith("cuda") for row in rows)
    with report.Bar(sum(steps(row, settings) for row in rows)) as bar, Watch(on_gpu) as watch:
        start = time.monotonic()
        for comparison in compare_all(rows, pool, settings, bar.tick):
            comparison.clocks, comparison.seconds = watch.since(start), time.monotonic() - start
            done.append(comparison)
            start = time.monotonic()
    return done


def compile_ahead(rows: list[Row], settings: Settings) -> None:
    """Fill the caches on disk with what the rows need."""
    noise.Machine(rows[0].device if rows else "cpu")  # whether others use the GPU is asked before we do
    with report.Bar(sum(map(len, ahead.jobs(rows)))) as bar:
        ahead.compile_all(rows, settings, bar.tick)


def score(comparisons: Iterable[Comparison]) -> Score:
    """Against the fastest right candidate that is not ours, row by row."""
    return _score({c.row.name: found.ratio for c in comparisons if (found := against_fastest(c)) is not None})


def score_of_torch(comparisons: Iterable[Comparison]) -> Score:
    """Against PyTorch's best path, row by row."""
    return _score({c.row.name: found.ratio for c in comparisons if (found := against_torch(c)) is not None})


def _score(ratios: dict[str, float]) -> Score:
    if not ratios:
        return Score(float("nan"), float("nan"), "none")
    worst = min(ratios, key=ratios.__getitem__)
    values = list(ratios.values())
    behind, far_behind = (sum(value < limit for value in values) / len(values) for limit in (BEHIND, FAR_BEHIND))
    return Score(geomean(values), ratios[worst], worst, len(values), behind, far_behind)


def against_fastest(comparison: Comparison) -> Speed | None:
    """How the candidate that a row is about stands against the fastest right one that is not ours."""
    ours = comparison.outcomes[0]
    return None if ours.failed else comparison.versus(ours, comparison.best_rival())


def against_torch(comparison: Comparison) -> Speed | None:
    """The same against PyTorch's best path."""
    ours = comparison.outcomes[0]
    return None if ours.failed else comparison.versus(ours, comparison.best_peer())


def by_kind(comparisons: list[Comparison]) -> dict[str, list[Comparison]]:
    """Rows that may be summed up together: one thing is timed, in one way, of one kind of problem."""
    found: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        kind = f", {comparison.row.kind}" if comparison.row.kind else ""
        found.setdefault(timed(comparison, comparisons) + kind, []).append(comparison)
    return found


def timed(comparison: Comparison, among: list[Comparison]) -> str:
    """What is timed, in words; and how, where that is not the same for all."""
    row = comparison.row
    several_ways = len({other.row.timing for other in among}) > 1
    how = f" {_METHOD_WORDS.get(row.timing, row.timing)}" if several_ways else ""
    return " + ".join(row.timed) + how


def scores(comparisons: list[Comparison]) -> dict[str, Score]:
    """By kind where a suite has several; a candidate against another of ours; ours against each other library; and,
    where one of these was timed, against PyTorch's own paths alone."""
    kinds = by_kind(comparisons)
    found = {kind: score(rows) for kind, rows in kinds.items()} if len(kinds) > 1 else {}
    if deterministic := against(DETERMINISTIC, OURS, comparisons):
        found["deterministic against default"] = _score(deterministic)
    for way, name in _OF_CACHES.items():
        if ratios := against(way, CACHED, comparisons):
            found[name] = _score(ratios)
    for rival, name in RIVALS.items():
        if speeds := against_rival(rival, comparisons):
            found[f"against {name}"] = _score({row: speed.ratio for row, speed in speeds.items()})
    of_torch = {kind: score_of_torch(rows) for kind, rows in kinds.items() if has_rival(rows)}
    of_torch = {kind: one for kind, one in of_torch.items() if one.rows}  # PyTorch may have no path for a suite
    if len(kinds) > 1:
        found |= {f"{kind}, {TORCH}": one for kind, one in of_torch.items()}
    if of_torch:
        found[TORCH] = score_of_torch(comparisons)
    return found


def has_rival(comparisons: Iterable[Comparison]) -> bool:
    """Another library's attention was timed: the fastest may be none of PyTorch's paths."""
    timed = [outcome for comparison in comparisons for outcome in comparison.timed()]
    return any(not outcome.is_peer and not Candidate(outcome.candidate).is_ours for outcome in timed)


def standings(rival: str, comparisons: list[Comparison]) -> str:
    """On how many rows we are ahead of, behind, or not told apart from a library, to be followed by its name."""
    found = against_rival(rival, comparisons).values()
    if not found:
        return ""
    ahead, behind = (sum(speed.verdict == verdict for speed in found) for verdict in (FASTER, SLOWER))
    return f"{ahead} of {len(found)} rows ahead of, {behind} behind, {len(found) - ahead - behind} not told apart from"


def against_rival(rival: str, comparisons: list[Comparison]) -> dict[str, Speed]:
    """How the candidate that a row is about stands against another library, row by row, where both have a time."""
    found = {c.row.name: _versus(c.outcomes[0].candidate, rival, c) for c in comparisons}
    return {row: speed for row, speed in found.items() if speed is not None}


def _versus(name: str, other: str, comparison: Comparison) -> Speed | None:
    outcomes = {outcome.candidate: outcome for outcome in comparison.timed()}
    return comparison.versus(outcomes[name], outcomes[other]) if name in outcomes and other in outcomes else None


def against(name: str, other: str, comparisons: list[Comparison]) -> dict[str, float]:
    """How many times as fast `name` is as `other`, row by row, where both have a time."""
    found: dict[str, float] = {}
    for comparison in comparisons:
        speed = _versus(name, other, comparison)
        found |= {} if speed is None else {comparison.row.name: speed.ratio}
    return found


def record(name: str, comparisons: list[Comparison], settings: Settings, command: list[str]) -> dict[str, Any]:
    """The measurements with where they come from, and what they come to."""
    provenance = environment.provenance(settings.seed, command)
    for comparison in comparisons:
        comparison.measured = provenance["date"]
    return {
        "kind": "tilewise bench",
        "suite": name,
        "complete": all(comparison.complete for comparison in comparisons),
        "provenance": provenance,
        "settings": {field: getattr(settings, field) for field in settings.__slots__},
        **sums(comparisons),
        "rows": [comparison.to_dict() | {"reached": reached(comparison)} for comparison in comparisons],
    }


def sums(comparisons: list[Comparison]) -> dict[str, Any]:
    """What the rows of a record come to."""
    kinds = {kind: found._asdict() for kind, found in scores(comparisons).items()}
    return {"score": score(comparisons)._asdict(), "scores": kinds}


MEMORY_COLUMNS = ("row", ">us", ">memory's bound, us", ">of its rate")
MEMORY_LEGEND = "memory's bound: what a forward must read and write at least, at the rate of the data sheet"


def memory_lines(comparisons: list[Comparison], device: str) -> list[list[str]]:
    """Rows whose tensors come from memory, beside what memory allows; none where the rate of the device is unknown."""
    rates = [one.dram_bytes_per_s for name, one in TARGETS.items() if name.replace("-", " ") in device.lower()]
    found = []
    for comparison in comparisons if rates and rates[0] else ():
        ours, row = comparison.outcomes[0], comparison.row
        timed = summary(ours.samples)
        if row.flush and row.timed == ("forward",) and timed is not None:
            read = row.problem.min_bytes() if row.plain is None else row.plain.share * row.plain.problem.min_bytes()
            bound = read / rates[0]
            share = f"{bound / timed['median']:.0%}"
            found.append([row.name, report.microseconds(timed), f"{bound * 1e6:.1f}", share])
    return found


GOAL_COLUMNS = ("row", ">us", "fastest other", ">us", ">ratio", ">floor, aim", ">of plain", ">limit, aim", "reached")
GOAL_LEGEND = (
    "ratio: how many times as fast as the fastest right candidate that is not ours; of plain: time by that of our "
    f"plain problem ({PLAIN}) for as many visible pairs"
)


def reached(comparison: Comparison) -> str:
    """How a row stands to its goal: what it misses first; "floor" or "aim" where it misses nothing else. An answer that
    nothing could be held against reaches neither."""
    ours, goal = comparison.outcomes[0], comparison.row.goal
    if goal is None:
        return ""
    if ours not in comparison.timed() or ours.verdict == UNVERIFIED:
        return "; ".join([ours.verdict, *ours.because])
    found = against_fastest(comparison)
    rate = comparison.row.flops / (summary(ours.samples) or {"median": float("inf")})["median"] / 1e12
    values = (  # (what is reached at least, floor, aim); times count the other way round
        (found.ratio if found else None, goal.floor, goal.aim),
        (_inverse(comparison.against_plain()), _inverse(goal.plain_limit), _inverse(goal.plain_aim)),
        (rate, goal.tflops, goal.tflops_aim),
    )
    asked = [(value, floor, aim) for value, floor, aim in values if floor]
    if not asked:
        return ""
    if any(value is None for value, _, _ in asked):
        return "not compared"
    if any(value < floor for value, floor, _ in asked):  # type: ignore[operator]
        return "MISSED"
    return "aim" if all(value >= (aim or 0.0) for value, _, aim in asked) else "floor"  # type: ignore[operator]


def _inverse(value: float | None) -> float | None:
    return 1.0 / value if value else None


def goal_cells(comparison: Comparison) -> list[str]:
    row, ours, rival = comparison.row, comparison.outcomes[0], comparison.best_rival()
    goal, speed, plain = row.goal or Goal(), against_fastest(comparison), comparison.against_plain()
    limits = [f"{floor:.2f}, {aim:.2f}" if floor else "-" for floor, aim in (goal[:2], goal[2:4])]
    if goal.tflops:
        limits[0] = f"{goal.tflops:.0f}, {goal.tflops_aim:.0f} TFLOP/s"
    return [
        row.name,
        report.microseconds(summary(ours.samples)) if ours in comparison.timed() else "-",
        rival.candidate if rival else "-",
        report.microseconds(summary(rival.samples)) if rival else "-",
        f"{speed.ratio:.2f}x" if speed else "-",
        limits[0],
        f"{plain:.2f}x" if plain else "-",
        limits[1],
        reached(comparison),
    ]


def flops_of(row: Row, candidate: str) -> int:
    """Of all that is timed: the plain problem's, where that is what the candidate answers."""
    return row.flops_of(row.plain.problem) if candidate == PLAIN and row.plain else row.flops
