"""Compare candidates on one problem: verify each against float64, then time the right ones in interleaved rounds.

While something is timed, only one worker works. Every round times every candidate once, in a fresh random order, so
that a clock or a temperature that drifts meets all of them alike; ratios are taken round by round. Wrong candidates are
not timed. Rows that pose one problem, one after the other, share the float64 truth, the inputs and the verification.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..problem import Problem
from .candidates import Candidate
from .pool import Failure

if TYPE_CHECKING:
    from .accuracy import Errors
    from .pool import Pool

VERIFIED = "verified"
UNVERIFIED = "not verified"
WRONG = "wrong"
REFUSED = "refused"
_TRUTH = "float64"  # the worker that computes it
_FEWEST_ROUNDS = 3
_COMPILING = 4  # times the time limit: for the first call of what is compiled then
TIMES = ("forward", "backward", "step")  # what can be timed; a step is both in one call

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. `time_limit` bounds one command to a worker, in seconds."""

    rounds: int = 7
    round_seconds: float = 0.1
    time_limit: float = 30.0
    seed: int = 0
    patience: float = 10.0  # seconds of measured time after which a slow candidate gets no more than a few rounds
    overhead: bool = False
    together: bool = False  # candidates are verified side by side; they are timed one at a time all the same


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a suite: a problem, who answers it, what of the answer is timed, and how.

    `method` "" is the device's default; `times` () is the forward, and the backward where gradients are wanted. Rows of
    another `kind` than "" are scored apart from the rest of their suite.
    """

    name: str
    problem: Problem
    candidates: tuple[str, ...]
    device: str = "cpu"
    method: str = ""
    flush: bool = False
    times: tuple[str, ...] = ()
    tensors: str = ""  # a file to take q, k and v from
    kind: str = ""

    @property
    def timing(self) -> str:
        return self.method or ("events" if self.device.startswith("cuda") else "wall")

    @property
    def timed(self) -> tuple[str, ...]:
        return self.times or (("forward", "backward") if self.problem.needs_grad else ("forward",))

    @property
    def flops(self) -> int:
        """Of all that is timed."""
        there, back = self.problem.flops(), self.problem.flops(backward=True)
        work = {"forward": there, "backward": back, "step": there + back}
        return sum(work[what] for what in self.timed)


@dataclass(slots=True)
class Outcome:
    """What became of one candidate. The fields named in TIMES hold a list of samples a round, in seconds per call."""

    candidate: str
    verdict: str = UNVERIFIED
    because: list[str] = field(default_factory=list)
    errors: Errors = field(default_factory=dict)
    memory: int | None = None
    overhead: list[float] = field(default_factory=list)
    forward: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)
    step: list[list[float]] = field(default_factory=list)
    stderr: str = ""

    @property
    def failed(self) -> bool:
        """Died, hung, raised or gave wrong numbers. Refusing is not failing."""
        return self.verdict not in (VERIFIED, UNVERIFIED, REFUSED)

    @property
    def is_peer(self) -> bool:
        return Candidate(self.candidate).is_peer

    @property
    def costs(self) -> list[float]:
        """Seconds per round of what a user pays: the sum of all that is timed."""
        timed = [getattr(self, what) for what in TIMES if getattr(self, what)]
        return [sum(map(median, parts)) for parts in zip(*timed, strict=False)]

    @property
    def samples(self) -> list[Any]:
        """Every sample where one thing is timed, else the costs of the rounds: what medians and spreads are of."""
        timed = [getattr(self, what) for what in TIMES if getattr(self, what)]
        return timed[0] if len(timed) == 1 else self.costs

    def error(self, *names: str) -> float | None:
        """The largest relative error, norm-wise, of these tensors; None where none was compared."""
        return max((self.errors[name]["norm"] for name in names if name in self.errors), default=None)

    def fail(self, failure: Failure) -> None:
        self.verdict, self.stderr = REFUSED if failure.refused else failure.text, failure.stderr
        self.because = [failure.hint] if failure.hint else []

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        """As a record holds it, those of earlier releases included."""
        outcome = cls(**{name: values[name] for name in cls.__slots__ if name in values})
        outcome.errors = {
            name: {kind: float(value) for kind, value in by_kind.items()} for name, by_kind in outcome.errors.items()
        }
        return outcome

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for what in (*TIMES, "overhead"):
            values[f"{what}_seconds"] = summary(getattr(self, what))
        return values


@dataclass(slots=True)
class Comparison:
    """A row and what became of every candidate, in the row's order."""

    row: Row
    outcomes: list[Outcome]
    compared: str = ""
    budgets: Errors = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    complete: bool = True  # False: interrupted
    clocks: dict[str, dict[str, float]] | None = None  # of the GPU, while the row was measured
    seconds: float = 0.0  # that the row took

    def __getitem__(self, candidate: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.candidate == candidate)

    def best_peer(self) -> Outcome | None:
        """The fastest of PyTorch's own paths among those that are right."""
        peers = [outcome for outcome in self.outcomes if outcome.is_peer and outcome.costs and not outcome.failed]
        return min(peers, key=lambda outcome: median(outcome.costs), default=None)

    def best_rival(self) -> Outcome | None:
        """The fastest of all candidates that are right and not ours: PyTorch's paths, and other libraries' too."""
        others = [o for o in self.outcomes if not Candidate(o.candidate).is_ours and o.costs and not o.failed]
        return min(others, key=lambda outcome: median(outcome.costs), default=None)

    def speed(self, outcome: Outcome) -> float | None:
        """How many times faster than the best peer; None without a peer or without a time."""
        peer = self.best_peer()
        return ratio(outcome.costs, peer.costs) if peer else None

    def to_dict(self) -> dict[str, Any]:
        row = self.row
        peer, rival = self.best_peer(), self.best_rival()
        return {
            "row": row.name,
            "kind": row.kind,
            "problem": row.problem.to_dict(),
            "device": row.device,
            "timing": row.timing,
            "times": list(row.timed),
            "flush": row.flush,
            "flops": {"forward": row.problem.flops(), "backward": row.problem.flops(backward=True), "timed": row.flops},
            "clocks": self.clocks,
            "seconds": self.seconds,
            "complete": self.complete,
            "compared": self.compared,
            "budgets": self.budgets,
            "best_peer": peer.candidate if peer else None,
            "best_rival": rival.candidate if rival else None,
            "orders": self.orders,
            "candidates": [outcome.to_dict() | {"ratio": self.speed(outcome)} for outcome in self.outcomes],
        }


def read_comparison(values: dict[str, Any]) -> Comparison:
    """What `Comparison.to_dict` wrote, read back from a record."""
    row = Row(
        values["row"],
        Problem.from_dict(values["problem"]),
        tuple(candidate["candidate"] for candidate in values["candidates"]),
        values["device"],
        values["timing"],
        values["flush"],
        tuple(values.get("times", ())),
        kind=values.get("kind", ""),
    )
    return Comparison(
        row,
        [Outcome.from_dict(candidate) for candidate in values["candidates"]],
        compared=values["compared"],
        orders=values["orders"],
        complete=values["complete"],
        clocks=values.get("clocks"),
        seconds=values.get("seconds", 0.0),
    )


def compare(row: Row, pool: Pool, settings: Settings, tick: Tick = lambda text: None) -> Comparison:
    """Never raises for what a candidate does. An interrupt ends it early, with what was measured left in place."""
    (comparison,) = compare_all([row], pool, settings, tick)
    return comparison


def compare_all(
    rows: Sequence[Row], pool: Pool, settings: Settings, tick: Tick = lambda text: None
) -> Iterator[Comparison]:
    """Row by row, in their order. The first comparison that is not complete, for an interrupt, is the last."""
    for _, bunch in groupby(rows, key=_asked):
        with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
            verifier = _Verifier(list(bunch), pool, settings, Path(folder) / "truth.pt", tick)
            for row in verifier.rows:
                comparison = _compare(row, verifier, pool, settings, tick)
                yield comparison
                if not comparison.complete:
                    return


def _asked(row: Row) -> tuple[Any, ...]:
    """What rows must have in common to be verified against one truth: that of gradients holds the forward's too."""
    return row.problem.with_(needs_grad=False), row.device, row.tensors


def _compare(row: Row, verifier: _Verifier, pool: Pool, settings: Settings, tick: Tick) -> Comparison:
    comparison = Comparison(row, [Outcome(name) for name in row.candidates])
    rng = random.Random(f"{settings.seed} {row.name}")
    running = [outcome for outcome in comparison.outcomes if not _refuses(outcome, row)]
    try:
        pool.start(_TRUTH, *(outcome.candidate for outcome in running))
        verifier.verify(comparison, running)
        _time_all(comparison, running, pool, settings, rng, tick)
    except KeyboardInterrupt:
        comparison.complete = False
    verifier.drop_failed(running)
    return comparison


def steps(row: Row, settings: Settings) -> int:
    """How often `compare` calls tick for a row, at most."""
    return 1 + len(row.candidates) * (1 + settings.rounds)


def _refuses(outcome: Outcome, row: Row) -> bool:
    reasons = Candidate(outcome.candidate).why_not(row.problem, row.device)
    if reasons:
        outcome.verdict, outcome.because = REFUSED, [str(reason) for reason in reasons]
    return bool(reasons)


class _Verifier:
    """What rows of one problem share: its float64 truth, and the candidates that hold its inputs and were verified."""

    def __init__(self, rows: list[Row], pool: Pool, settings: Settings, path: Path, tick: Tick) -> None:
        self.rows = rows
        self._pool, self._settings, self._path, self._tick = pool, settings, path, tick
        self._told: _Truth | None = None
        self._telling = Lock()
        self._problem: Problem | None = None  # that the candidates hold
        self._ready: dict[str, Outcome] = {}

    def verify(self, comparison: Comparison, running: list[Outcome]) -> None:
        """Every outcome gets its verdict; candidates that were verified for an earlier row keep theirs."""
        row = comparison.row
        if row.problem != self._problem:
            self._problem = row.problem
            self._ready.clear()
        fresh = []
        for outcome in running:
            known = self._ready.get(outcome.candidate)
            if known is None:
                fresh.append(outcome)
            else:
                outcome.verdict, outcome.because, outcome.stderr = known.verdict, list(known.because), known.stderr
                outcome.errors, outcome.memory = known.errors, known.memory
        self._check_all(fresh, row)
        truth = self._truth(row)
        comparison.compared, comparison.budgets = truth.compared, truth.budgets
        self._ready |= {outcome.candidate: replace(outcome, because=list(outcome.because)) for outcome in fresh}

    def drop_failed(self, outcomes: list[Outcome]) -> None:
        """A candidate that failed while it was timed starts afresh for the next row."""
        for outcome in outcomes:
            known = self._ready.get(outcome.candidate)
            if known is not None and known.verdict != outcome.verdict:
                del self._ready[outcome.candidate]

    def _truth(self, row: Row) -> _Truth:
        """Asked for once; who comes while it is being computed waits."""
        with self._telling:
            if self._told is None:
                self._told = self._ask_truth(row)
            return self._told

    def _ask_truth(self, row: Row) -> _Truth:
        wanted = row.problem.with_(needs_grad=any(row.problem.needs_grad for row in self.rows))
        if wanted.dropout:
            return _Truth(untold="dropout is random: there is no one right answer to compare with")
        self._tick(f"{row.name}: float64 truth")
        limit = 10 * self._settings.time_limit
        try:
            told = self._pool.ask(_TRUTH, "truth", limit, path=str(self._path), **self._arguments(wanted, row))
        except Failure as failure:
            return _Truth(untold=f"the float64 truth has no answer: {failure.text}")
        return _Truth(told["compared"], told["budgets"])

    def _check_all(self, outcomes: list[Outcome], row: Row) -> None:
        """Side by side, nothing being timed, where that is allowed; who then fails is asked again, alone."""
        if self._settings.together and len(outcomes) > 1:
            self._check_together(outcomes, row)
            untold = bool(self._truth(row).untold) and not row.problem.dropout
            self._told = None if untold else self._told
            outcomes = [outcome for outcome in outcomes if untold or (outcome.failed and outcome.verdict != WRONG)]
            for outcome in outcomes:
                outcome.verdict, outcome.because, outcome.stderr = UNVERIFIED, [], ""
        for outcome in outcomes:
            self._check(outcome, row)

    def _check_together(self, outcomes: list[Outcome], row: Row) -> None:
        threads = ThreadPoolExecutor(len(outcomes) + 1)
        try:
            threads.submit(self._truth, row)
            list(threads.map(lambda outcome: self._check(outcome, row), outcomes))
        finally:  # after an interrupt the pool ends what the threads wait for
            threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, outcome: Outcome, row: Row) -> None:
        self._tick(f"{row.name}: verify {outcome.candidate}")
        candidate, limit = outcome.candidate, self._settings.time_limit
        first = first_limit(candidate, self._settings)
        try:
            self._pool.ask(candidate, "prepare", first, candidate=candidate, **self._arguments(row.problem, row))
            if untold := self._truth(row).untold:
                outcome.because = [untold]
            else:  # the first backward, which may be compiled too
                told = self._pool.ask(candidate, "verify", first, path=str(self._path))
                outcome.errors, outcome.because = told["errors"], told["wrong"]
                outcome.verdict = WRONG if told["wrong"] else VERIFIED
            outcome.memory = self._pool.ask(candidate, "memory", limit)
        except Failure as failure:
            outcome.fail(failure)

    def _arguments(self, problem: Problem, row: Row) -> dict[str, Any]:
        return {
            "problem": problem.to_dict(),
            "seed": self._settings.seed,
            "device": row.device,
            "tensors": row.tensors,
        }


@dataclass(frozen=True, slots=True)
class _Truth:
    """What a reader wants to know of the float64 results in the file, or why there are none."""

    compared: str = ""
    budgets: Errors = field(default_factory=dict)
    untold: str = ""


def first_limit(candidate: str, settings: Settings) -> float:
    """Seconds that a candidate may take to get ready, its first call included."""
    return settings.time_limit * (_COMPILING if Candidate(candidate).compiles else 1)


def _time_all(
    comparison: Comparison, running: list[Outcome], pool: Pool, settings: Settings, rng: random.Random, tick: Tick
) -> None:
    row = comparison.row
    running = [outcome for outcome in running if outcome.verdict in (VERIFIED, UNVERIFIED)]
    for number in range(settings.rounds):
        order = rng.sample(running, len(running))
        order = [outcome for outcome in order if not outcome.failed and not _tired(outcome, number, settings)]
        comparison.orders.append([outcome.candidate for outcome in order])
        for outcome in order:
            tick(f"{row.name}: round {number + 1} of {settings.rounds}, {outcome.candidate}")
            try:
                _time_round(outcome, row, pool, settings, first=number == 0)
            except Failure as failure:
                outcome.fail(failure)


def _time_round(outcome: Outcome, row: Row, pool: Pool, settings: Settings, first: bool) -> None:
    limit, seconds = settings.time_limit, settings.round_seconds
    if first and settings.overhead:
        outcome.overhead = pool.ask(outcome.candidate, "overhead", limit, seconds=seconds / 2)
    for what in row.timed:
        samples = pool.ask(
            outcome.candidate, "time", limit, what=what, method=row.timing, seconds=seconds, flush=row.flush
        )
        getattr(outcome, what).append(samples)


def _tired(outcome: Outcome, number: int, settings: Settings) -> bool:
    spent = sum(flat([getattr(outcome, what) for what in TIMES]))
    return number >= _FEWEST_ROUNDS and spent > settings.patience


def flat(samples: Sequence[Any]) -> list[float]:
    """All samples of all rounds."""
    return [value for part in samples for value in (flat(part) if isinstance(part, list) else [part])]


def quantile(samples: Sequence[Any], share: float) -> float:
    """By linear interpolation between order statistics; nan of nothing."""
    values = sorted(flat(samples))
    if not values:
        return math.nan
    position = share * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def median(samples: Sequence[Any]) -> float:
    return quantile(samples, 0.5)


def summary(samples: Sequence[Any]) -> dict[str, float] | None:
    """Median and the 20th and 80th percentile, or None where nothing was measured."""
    if not flat(samples):
        return None
    return {"median": median(samples), "p20": quantile(samples, 0.2), "p80": quantile(samples, 0.8)}


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float | None:
    """How many times faster than the peer: the median of the ratios of the rounds that both have."""
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=False)]
    return median(ratios) if ratios else None


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
