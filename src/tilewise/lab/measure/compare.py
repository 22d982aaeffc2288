"""Compare candidates on one problem: verify each against float64, then time the right ones in interleaved rounds.

While something is timed, only one worker works. Every round times every candidate once, in a fresh random order, so
that a clock or a temperature that drifts meets all of them alike; ratios are taken round by round, with an interval
(see `statistics`). Where more rounds than a few are allowed, they are added until the intervals are narrow or the time
is up, for the candidates that are not told apart yet. Candidates that come to the same kernels are one entry: the
difference of their times is noise, and nothing is said of it. Wrong candidates are not timed. Rows that pose one
problem, one after the other, share the float64 truth, the inputs and the verification.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ...problem import Problem
from ..candidates.names import PLAIN, TORCH_DEFAULT, Candidate
from . import noise, statistics
from .pool import Failure

if TYPE_CHECKING:
    from ..model.launched import Launched
    from .accuracy import Errors
    from .pool import Pool
    from .statistics import Speed

VERIFIED = "verified"
UNVERIFIED = "not verified"
WRONG = "wrong"
REFUSED = "refused"
_TRUTH = "float64"  # the worker that computes it
_FEWEST_ROUNDS = statistics.MIN_ROUNDS
_COMPILING = 4  # times the time limit: for the first call of what is compiled then
_BY_THE_HOST = ("wall", "host")  # timing methods whose times are those of threads that share cores with others
_KEPT = (0.2, 0.5, 0.8)  # quantiles of a round's samples: what is kept of many
TIMES = ("forward", "backward", "step")  # what can be timed; a step is both in one call

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. `time_limit` bounds one command to a worker, in seconds.

    After `rounds` come more, up to `max_rounds`, while something is not told apart and `more_seconds` are not over.
    """

    rounds: int = 7
    max_rounds: int = 0  # no more than `rounds`, if that is more
    more_seconds: float = 20.0
    round_seconds: float = 0.1
    time_limit: float = 30.0
    seed: int = 0
    patience: float = 10.0  # seconds of measured time after which a slow candidate gets no more than a few rounds
    overhead: bool = False
    together: bool = False  # candidates are verified side by side; they are timed one at a time all the same


class Goal(NamedTuple):
    """What a row is to reach: at least a ratio against the fastest that is not ours, and at most so many times the time
    of the plain problem per visible pair. 0 where nothing is asked."""

    floor: float = 0.0
    aim: float = 0.0
    plain_limit: float = 0.0
    plain_aim: float = 0.0
    tflops: float = 0.0  # of the forward, per second
    tflops_aim: float = 0.0


class Plain(NamedTuple):
    """A problem of ours without terms, and how many of its visible pairs a row's problem has: its time for as many
    pairs is `share` of its time."""

    problem: Problem
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a suite: a problem, its candidates, what of them is timed, and how.

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
    contents: str = ""  # what mask tensors show: see `candidates.patterns`
    plain: Plain | None = None  # what the candidate PLAIN is asked for
    goal: Goal | None = None

    def asked(self, candidate: str) -> Problem:
        """The problem that a candidate answers."""
        return self.plain.problem if candidate == PLAIN and self.plain is not None else self.problem

    @property
    def timing(self) -> str:
        return self.method or ("events" if self.device.startswith("cuda") else "wall")

    @property
    def timed(self) -> tuple[str, ...]:
        return self.times or (("forward", "backward") if self.problem.needs_grad else ("forward",))

    @property
    def flops(self) -> int:
        """Of all that is timed; what a mask tensor hides is known where there is a plain problem to count by."""
        if self.plain is not None:
            return int(self.plain.share * self.flops_of(self.plain.problem))
        return self.flops_of(self.problem)

    def flops_of(self, problem: Problem) -> int:
        """Of all that is timed, for a problem whose mask says what is visible."""
        there, back = problem.flops(), problem.flops(backward=True)
        work = {"forward": there, "backward": back, "step": there + back}
        return sum(work[what] for what in self.timed)


@dataclass(slots=True)
class Outcome:
    """The outcome of one candidate. The fields named in TIMES hold the samples of every round, in seconds per call: no
    more than three, which then are its 20th percentile, its median and its 80th percentile."""

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
    runs: str = ""  # the kernels it comes to, by a name that all candidates with these kernels have; "": not known
    kernels: Launched | None = None  # of ours: what a call launches, see `model.launched`

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
    def from_dict(cls, values: dict[str, Any], asked: dict[str, Any]) -> Outcome:
        """As a record holds it. `asked`: the problem of the row."""
        outcome = cls(**{name: values[name] for name in cls.__slots__ if name in values})
        outcome.errors = {
            name: {kind: float(value) for kind, value in by_kind.items()} for name, by_kind in outcome.errors.items()
        }
        if outcome.kernels is not None and "differs" in outcome.kernels:
            kernels = dict(outcome.kernels)
            planned = asked | kernels.pop("differs")
            outcome.kernels = {"problem": {name: one for name, one in planned.items() if one is not None}, **kernels}
        return outcome

    def to_record(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What was found out, without what is empty; of the problem that was planned, what `differs` from `asked`."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name)}
        if self.kernels is not None:
            kernels = dict(self.kernels)
            planned = dict.fromkeys(asked) | kernels.pop("problem")  # None: not there
            differing = {name: value for name, value in planned.items() if asked.get(name) != value}
            values["kernels"] = {"differs": differing, **kernels}
        return values

    def to_dict(self) -> dict[str, Any]:
        """Every field, and what follows from the times."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for what in (*TIMES, "overhead"):
            values[f"{what}_seconds"] = summary(getattr(self, what))
        return values


@dataclass(slots=True)
class Comparison:
    """A row and the outcome of every candidate, in the row's order."""

    row: Row
    outcomes: list[Outcome]
    compared: str = ""
    budgets: Errors = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    complete: bool = True  # False: interrupted
    looks: int = 1  # how often the times were looked at before the rounds ended
    noise: list[str] = field(default_factory=list)  # what the machine did meanwhile that spoils times
    load: float = 1.0  # threads per core that wanted to run while the row was measured; 1: no more than there are cores
    clocks: dict[str, dict[str, float]] | None = None  # of the GPU, while the row was measured
    seconds: float = 0.0  # that the row took
    measured: str = ""  # the date of the run, of which a record of several says more

    def __getitem__(self, candidate: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.candidate == candidate)

    def timed(self) -> list[Outcome]:
        """Those that are right, as far as is known, and have a time."""
        return [outcome for outcome in self.outcomes if outcome.costs and not outcome.failed]

    def same_as(self, outcome: Outcome) -> str:
        """The first candidate that came to the same kernels; empty if that is this one, or none is known to."""
        first = next((one for one in self.timed() if one.runs and one.runs == outcome.runs), outcome)
        return "" if first is outcome or outcome not in self.timed() else first.candidate

    def entries(self) -> list[Outcome]:
        """The first of each group of candidates that came to the same kernels, in the row's order."""
        return [outcome for outcome in self.timed() if not self.same_as(outcome)]

    def best_peer(self) -> Outcome | None:
        """The fastest of PyTorch's own paths among those that are right."""
        return fastest([outcome for outcome in self.timed() if outcome.is_peer])

    def best_rival(self) -> Outcome | None:
        """The fastest of all candidates that are right and not ours: PyTorch's paths, and other libraries' too."""
        return fastest([outcome for outcome in self.timed() if not Candidate(outcome.candidate).is_ours])

    def best(self) -> Outcome | None:
        """The fastest of all entries."""
        return fastest(self.entries())

    def default(self) -> Outcome | None:
        """PyTorch's default choice, where it has a time."""
        return next((outcome for outcome in self.timed() if outcome.candidate == TORCH_DEFAULT), None)

    def versus(self, outcome: Outcome, other: Outcome | None, among: int = 1) -> Speed | None:
        """How many times as fast as the other, with its interval; None where no round has both.

        `among`: how many there were to choose from, where the times chose one of the two.
        """
        if other is None:
            return None
        if outcome is other or (outcome.runs and outcome.runs == other.runs):
            return statistics.same(outcome.costs, other.costs, other.candidate)
        return statistics.speed(
            outcome.costs,
            other.costs,
            looks=self.looks,
            among=among,
            against=other.candidate,
            resolution=statistics.resolution_at(self.load if self.row.timing in _BY_THE_HOST else 1.0),
        )

    def speed(self, outcome: Outcome) -> float | None:
        """How many times faster than the best peer; None without a peer or without a time."""
        found = self.versus(outcome, self.best_peer())
        return found.ratio if found else None

    def against_plain(self) -> float | None:
        """The time of the candidate that the row is about, by that of the plain problem for as many visible pairs."""
        subject, plain = self.outcomes[0], self.row.plain
        other = next((one for one in self.timed() if one.candidate == PLAIN), None)
        if plain is None or other is None or subject not in self.timed():
            return None
        found = self.versus(subject, other)
        return 1.0 / (found.ratio * plain.share) if found else None

    def unsettled(self) -> list[Outcome]:
        """Candidates that more rounds would tell apart: from PyTorch's best path, the default from the fastest, and the
        one that the row is about from the fastest that is not ours."""
        best, default = self.best(), self.default()
        base = self.best_peer() or best
        pairs = [(outcome, base) for outcome in self.entries()]
        pairs += [(default, best)] if default is not None else []
        subject, rival = self.outcomes[0], self.best_rival()
        pairs += [(subject, rival)] if rival is not None and subject in self.entries() else []
        found = [pair for pair in pairs if not (speed := self.versus(*pair)) or not (speed.same or speed.settled)]
        return [outcome for outcome in self.outcomes if any(outcome is one for pair in found for one in pair)]

    def to_record(self) -> dict[str, Any]:
        """What was measured, and nothing that follows from it: what a record keeps, without what is usual."""
        row, asked = self.row, self.row.problem.to_dict()
        values = {
            "row": row.name,
            "kind": row.kind,
            "contents": row.contents,
            "goal": row.goal._asdict() if row.goal else None,
            "plain": {"problem": row.plain.problem.to_dict(), "share": row.plain.share} if row.plain else None,
            "problem": asked,
            "device": row.device,
            "timing": row.timing,
            "times": list(row.timed),
            "flush": row.flush,
            "measured": self.measured,
            "clocks": self.clocks,
            "seconds": self.seconds,
            "complete": self.complete,
            "compared": self.compared,
            "budgets": self.budgets,
            "looks": self.looks,
            "noise": self.noise,
            "load": self.load,
            "candidates": [outcome.to_record(asked) for outcome in self.outcomes],
        }
        return {name: value for name, value in values.items() if value != _USUAL.get(name)}

    def to_dict(self) -> dict[str, Any]:
        """What a record keeps, and what follows from it: what `--json` and pages show."""
        row = self.row
        peer, rival = self.best_peer(), self.best_rival()
        return {
            **_USUAL,
            **self.to_record(),
            "against_plain": self.against_plain(),
            "flops": {"forward": row.problem.flops(), "backward": row.problem.flops(backward=True), "timed": row.flops},
            "best_peer": peer.candidate if peer else None,
            "best_rival": rival.candidate if rival else None,
            "undecided": bool(self.unsettled()),
            "candidates": [outcome.to_dict() | self._standing(outcome) for outcome in self.outcomes],
        }

    def _standing(self, outcome: Outcome) -> dict[str, Any]:
        """Where a candidate stands among the others, as `statistics` says."""
        others = (self.best_peer(), self.default(), self.best_rival())
        speed, against_default, against_rival = (self.versus(outcome, other) for other in others)
        return {
            "ratio": speed.ratio if speed else None,
            "speed": speed.to_dict() if speed else None,
            "speed_default": against_default.to_dict() if against_default else None,
            "speed_rival": against_rival.to_dict() if against_rival else None,
            "same_as": self.same_as(outcome),
            "cost_seconds": summary(outcome.samples),
        }


_USUAL: dict[str, Any] = {
    "kind": "", "contents": "", "goal": None, "plain": None, "flush": False, "measured": "", "clocks": None,
    "complete": True, "compared": "", "budgets": {}, "looks": 1, "noise": [], "load": 1.0,
}  # fmt: skip
"""What a record leaves out of a comparison where it is so."""


def read_comparison(stored: dict[str, Any]) -> Comparison:
    """What `to_record` or `to_dict` of a Comparison wrote."""
    values = _USUAL | stored
    plain = values["plain"]
    row = Row(
        values["row"],
        Problem.from_dict(values["problem"]),
        tuple(candidate["candidate"] for candidate in values["candidates"]),
        values["device"],
        values["timing"],
        values["flush"],
        tuple(values["times"]),
        kind=values["kind"],
        contents=values["contents"],
        plain=Plain(Problem.from_dict(plain["problem"]), plain["share"]) if plain else None,
        goal=Goal(**values["goal"]) if values["goal"] else None,
    )
    return Comparison(
        row,
        [Outcome.from_dict(candidate, values["problem"]) for candidate in values["candidates"]],
        compared=values["compared"],
        budgets={name: {kind: float(one) for kind, one in found.items()} for name, found in values["budgets"].items()},
        complete=values["complete"],
        looks=values["looks"],
        noise=values["noise"],
        load=values["load"],
        clocks=values["clocks"],
        seconds=values["seconds"],
        measured=values["measured"],
    )


def compare(row: Row, pool: Pool, settings: Settings, tick: Tick = lambda text: None) -> Comparison:
    """Never raises for what a candidate does. An interrupt ends it early, with what was measured left in place."""
    (comparison,) = compare_all([row], pool, settings, tick)
    return comparison


def compare_all(
    rows: Sequence[Row], pool: Pool, settings: Settings, tick: Tick = lambda text: None
) -> Iterator[Comparison]:
    """Row by row, in their order. The first comparison that is not complete, for an interrupt, is the last."""
    machine = noise.Machine(rows[0].device if rows else "cpu")
    for _, bunch in groupby(rows, key=_asked):
        with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
            verifier = _Verifier(list(bunch), pool, settings, Path(folder) / "truth.pt", tick)
            for row in verifier.rows:
                comparison = _compare(row, verifier, pool, settings, tick)
                comparison.noise = machine.told()
                yield comparison
                if not comparison.complete:
                    return


def _asked(row: Row) -> tuple[Any, ...]:
    """What rows must have in common to be verified against one truth: that of gradients holds the forward's too."""
    return row.problem.with_(needs_grad=False), row.device, row.tensors, row.contents, row.plain


def _compare(row: Row, verifier: _Verifier, pool: Pool, settings: Settings, tick: Tick) -> Comparison:
    comparison = Comparison(row, [Outcome(name) for name in row.candidates])
    rng = random.Random(f"{settings.seed} {row.name}")
    running = [outcome for outcome in comparison.outcomes if not _refuses(outcome, row)]
    try:
        pool.start(_TRUTH, *(outcome.candidate for outcome in running))
        verifier.verify(comparison, running)
        comparison.load = noise.overload()
        _time_all(comparison, running, pool, settings, rng, tick)
    except KeyboardInterrupt:
        comparison.complete = False
    comparison.load = max(comparison.load, noise.overload())
    verifier.drop_failed(running)
    return comparison


def steps(row: Row, settings: Settings) -> int:
    """How often `compare` calls tick for a row, at most."""
    return 1 + len(row.candidates) * (1 + max(settings.rounds, settings.max_rounds))


def _refuses(outcome: Outcome, row: Row) -> bool:
    reasons = Candidate(outcome.candidate).why_not(row.asked(outcome.candidate), row.device)
    if reasons:
        outcome.verdict, outcome.because = REFUSED, [str(reason) for reason in reasons]
    return bool(reasons)


class _Verifier:
    """What rows of one problem share: its float64 truth, and that of the plain problem that they are held against; and
    the candidates that hold its inputs and were verified."""

    def __init__(self, rows: list[Row], pool: Pool, settings: Settings, path: Path, tick: Tick) -> None:
        self.rows = rows
        self._pool, self._settings, self._path, self._tick = pool, settings, path, tick
        self._told: dict[str, _Truth] = {}  # by whether the candidate is PLAIN
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
                outcome.errors, outcome.memory, outcome.runs = known.errors, known.memory, known.runs
        self._check_all(fresh, row)
        for outcome in running:
            self._name_kernels(outcome, row)
        truth = self._truth(row)
        comparison.compared, comparison.budgets = truth.compared, truth.budgets
        self._ready |= {outcome.candidate: replace(outcome, because=list(outcome.because)) for outcome in fresh}

    def _name_kernels(self, outcome: Outcome, row: Row) -> None:
        if outcome.verdict in (VERIFIED, UNVERIFIED) and Candidate(outcome.candidate).is_ours:
            try:
                limit = self._settings.time_limit
                outcome.kernels = self._pool.ask(outcome.candidate, "launched", limit, timed=list(row.timed))
            except Failure as failure:
                outcome.fail(failure)

    def drop_failed(self, outcomes: list[Outcome]) -> None:
        """A candidate that failed while it was timed starts afresh for the next row."""
        for outcome in outcomes:
            known = self._ready.get(outcome.candidate)
            if known is not None and known.verdict != outcome.verdict:
                del self._ready[outcome.candidate]

    def _truth(self, row: Row, candidate: str = "") -> _Truth:
        """Of the problem that a candidate answers. Computed once; a second caller waits for it."""
        which = PLAIN if candidate == PLAIN else ""
        with self._telling:
            if which not in self._told:
                self._told[which] = self._ask_truth(row, which)
            return self._told[which]

    def _path_of(self, candidate: str) -> str:
        return str(self._path.with_name("plain.pt") if candidate == PLAIN else self._path)

    def _ask_truth(self, row: Row, candidate: str) -> _Truth:
        richest = next((one for one in self.rows if one.problem.needs_grad), row)
        wanted = richest.asked(candidate).with_(dropout=0.0)
        self._tick(f"{row.name}: float64 truth")
        limit = 10 * self._settings.time_limit
        try:
            path = self._path_of(candidate)
            told = self._pool.ask(_TRUTH, "truth", limit, path=path, **self._arguments(wanted, row))
        except Failure as failure:
            return _Truth(untold=f"the float64 truth has no answer: {failure.text}")
        return _Truth(told["compared"], told["budgets"])

    def _check_all(self, outcomes: list[Outcome], row: Row) -> None:
        """Side by side, nothing being timed, where that is allowed; a candidate that fails is asked again, alone."""
        if self._settings.together and len(outcomes) > 1:
            self._check_together(outcomes, row)
            untold = bool(self._truth(row).untold)
            if untold:
                self._told.clear()
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
            arguments = self._arguments(row.asked(candidate), row)
            self._pool.ask(candidate, "prepare", first, candidate=candidate, **arguments)
            if untold := self._truth(row, candidate).untold:
                outcome.because = [untold]
            else:  # the first backward, which may be compiled too
                told = self._pool.ask(candidate, "verify", first, path=self._path_of(candidate))
                outcome.errors, outcome.because = told["errors"], told["wrong"]
                outcome.verdict = WRONG if told["wrong"] else VERIFIED
            outcome.memory = self._pool.ask(candidate, "memory", limit)
            outcome.runs = self._pool.ask(candidate, "runs", limit)
        except Failure as failure:
            outcome.fail(failure)

    def _arguments(self, problem: Problem, row: Row) -> dict[str, Any]:
        return {
            "problem": problem.to_dict(),
            "seed": self._settings.seed,
            "device": row.device,
            "tensors": row.tensors,
            "contents": row.contents,
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
    running = [outcome for outcome in running if outcome.verdict in (VERIFIED, UNVERIFIED)]
    max_rounds = max(settings.rounds, settings.max_rounds)
    stop = math.inf
    for look, until in enumerate(statistics.looks(settings.rounds, max_rounds), start=1):
        comparison.looks = look
        for number in range(len(comparison.orders), until):
            if time.monotonic() > stop:
                return
            _time_once(comparison, running, number, pool, settings, rng, tick)
        stop = min(stop, time.monotonic() + settings.more_seconds)
        # Invariant: the rounds of a candidate are the first of all rounds: one that is left out does not come back.
        unsettled = [outcome for outcome in comparison.unsettled() if len(outcome.costs) == until]
        running = [outcome for outcome in running if any(outcome is one for one in unsettled)]
        if len(running) < 2:
            return


def _time_once(
    comparison: Comparison,
    running: list[Outcome],
    number: int,
    pool: Pool,
    settings: Settings,
    rng: random.Random,
    tick: Tick,
) -> None:
    """One round."""
    row = comparison.row
    order = rng.sample(running, len(running))
    order = [outcome for outcome in order if not outcome.failed and not _tired(outcome, number, settings)]
    comparison.orders.append([outcome.candidate for outcome in order])
    for outcome in order:
        tick(f"{row.name}: round {number + 1}, {outcome.candidate}")
        try:
            _time_round(outcome, row, pool, settings, first=number == 0)
        except Failure as failure:
            outcome.fail(failure)


def _time_round(outcome: Outcome, row: Row, pool: Pool, settings: Settings, first: bool) -> None:
    limit, seconds = settings.time_limit, settings.round_seconds
    if first and settings.overhead:
        samples = pool.ask(outcome.candidate, "overhead", limit, seconds=seconds / 2)
        outcome.overhead = _spread(samples)
    for what in row.timed:
        samples = pool.ask(
            outcome.candidate, "time", limit, what=what, method=row.timing, seconds=seconds, flush=row.flush
        )
        getattr(outcome, what).append(
            samples if len(samples) <= len(_KEPT) else [quantile(samples, at) for at in _KEPT]
        )


def _spread(samples: list[float]) -> list[float]:
    """What is kept of the samples of a round."""
    return samples if len(samples) <= len(_KEPT) else [quantile(samples, share) for share in _KEPT]


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
    """How many times faster than the peer, from the rounds that both have."""
    found = statistics.speed(ours, peer)
    return found.ratio if found else None


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """By rounds that all of them share, as far as they go: a time of one minute is not held against another's.

    Of candidates that came to the same kernels the first: noise does not choose among them.
    """
    first = {outcome.runs or outcome.candidate: outcome for outcome in reversed(outcomes)}
    distinct = [outcome for outcome in outcomes if first[outcome.runs or outcome.candidate] is outcome]
    reference = max(distinct, key=lambda outcome: len(outcome.costs), default=None)
    if reference is None:
        return None
    return max(distinct, key=lambda outcome: ratio(outcome.costs, reference.costs) or 0.0)


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
