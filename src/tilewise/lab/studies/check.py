"""check: every backend that takes a problem, against float64 and against each other, each in a process of its own.

For use when a kernel is suspected. A candidate is right when its errors keep the budget of `accuracy`. The largest
error is reported with its place and its values, since a wrong tile, a wrong last row and a wrong head look alike in a
norm. Every candidate runs twice: different bits the second time mean that it adds in no fixed order, or races.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...plan import BACKENDS, plan
from ...target import Target
from .. import report
from ..candidates.names import OURS, SDPA
from ..measure import accuracy, environment
from ..measure.compare import REFUSED, VERIFIED, WRONG, Outcome, first_limit
from ..measure.pool import Failure, Pool

if TYPE_CHECKING:
    from ...problem import Problem
    from ..measure.accuracy import Errors, Sample, Tensors
    from ..measure.compare import Settings, Tick

KIND = "tilewise check"
FLOAT64 = "float64"  # the worker that computes the truth, and its name in what is printed
TENSORS = ("out", "lse", "dq", "dk", "dv")
_TRUTH_TIMES = 10  # times the time limit


class Place(NamedTuple):
    """Where two results differ most, what each has there, and by how much that is more than a usual element."""

    tensor: str
    at: tuple[int, ...]  # batch, head, row (key in dk and dv), column (none in lse)
    values: tuple[float, float]
    difference: float  # as a share of the root mean square

    def to_dict(self) -> dict[str, Any]:
        names = ("batch", "head", "key" if self.tensor in ("dk", "dv") else "row", "column")
        return dict(zip(names, self.at, strict=False)) | {"values": self.values, "difference": self.difference}

    def text(self, left: str, right: str) -> str:
        at = ", ".join(map(str, self.at))
        return f"{self.tensor}[{at}]: {left} {self.values[0]:.9g}, {right} {self.values[1]:.9g}"


Places = dict[str, Place]  # by tensor


@dataclass(slots=True)
class Pair:
    """How far two candidates are apart: norm-wise and by row, as errors are, and where most."""

    left: str
    right: str
    differences: Errors
    places: Places


@dataclass(slots=True)
class Check:
    """What came of it. `places` and `changed` are by candidate: its largest errors, and what had other bits again."""

    problem: Problem
    device: str
    outcomes: list[Outcome]
    left_out: dict[str, list[str]]
    compared: str = ""
    untold: str = ""  # why there is no truth
    budgets: Errors = field(default_factory=dict)
    places: dict[str, Places] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    complete: bool = True

    @property
    def failed(self) -> bool:
        """A candidate is wrong, died or hung, or none could be judged."""
        return any(outcome.failed for outcome in self.outcomes) or bool(self.untold)

    def sentence(self) -> str:
        bad = [f"{outcome.candidate} ({outcome.verdict})" for outcome in self.outcomes if outcome.failed]
        right = [outcome.candidate for outcome in self.outcomes if outcome.verdict == VERIFIED]
        if bad:
            return f"NOT RIGHT: {', '.join(bad)}. Within their budgets: {', '.join(right) or 'none'}."
        if self.untold:
            return f"Not judged, only compared with each other: float64 has no answer, {self.untold}."
        return f"Within their budgets: {', '.join(right) or 'none'}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "sentence": self.sentence(),
            "complete": self.complete,
            "problem": self.problem.to_dict(),
            "device": self.device,
            "compared": self.compared,
            "untold": self.untold,
            "budgets": self.budgets,
            "candidates": [
                {
                    "candidate": outcome.candidate,
                    "verdict": outcome.verdict,
                    "because": outcome.because,
                    "errors": outcome.errors,
                    "largest_errors": _as_dict(self.places.get(outcome.candidate, {})),
                    "changed": self.changed.get(outcome.candidate),
                    "stderr": outcome.stderr,
                }
                for outcome in self.outcomes
            ],
            "pairs": [
                {
                    "candidates": [pair.left, pair.right],
                    "differences": pair.differences,
                    "largest_differences": _as_dict(pair.places),
                }
                for pair in self.pairs
            ],
            "refused": self.left_out,
        }


def _as_dict(places: Places) -> dict[str, Any]:
    return {name: place.to_dict() for name, place in places.items()}


def run(
    problem: Problem,
    device: str,
    settings: Settings,
    *,
    extra: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    tensors: str = "",
) -> Check:
    """Check every willing backend, or `only` these, and `extra` candidates. An interrupt leaves what was found."""
    verdicts = {verdict.backend: verdict for verdict in plan(problem, Target.of(device)).verdicts}
    left_out = {name: [str(reason) for reason in v.reasons] for name, v in verdicts.items() if not v.willing}
    names = only or tuple(_route(name) for name in BACKENDS if name not in left_out)
    outcomes = [Outcome(name) for name in dict.fromkeys((*names, *extra))]
    found = Check(problem, device, outcomes, {} if only else left_out)
    what = {"problem": problem.to_dict(), "seed": settings.seed, "device": device, "tensors": tensors}
    with (
        report.Bar(1 + len(outcomes)) as bar,
        Pool() as pool,
        tempfile.TemporaryDirectory(prefix="tilewise-") as folder,
    ):
        try:
            _fill(found, pool, settings, what, Path(folder), bar.tick)
        except KeyboardInterrupt:
            found.complete = False
    return found


def _route(backend: str) -> str:
    """The candidate that runs a backend of the planner: its own route to PyTorch's kernels, which gives an lse too."""
    return f"{OURS}:{backend}" if backend in SDPA else backend


def _fill(found: Check, pool: Pool, settings: Settings, what: dict[str, Any], folder: Path, tick: Tick) -> None:
    sample = accuracy.choose(found.problem, settings.seed, found.device)
    found.compared = sample.text
    pool.start(FLOAT64, *(outcome.candidate for outcome in found.outcomes))
    tick("float64 truth")
    truth = _truth(found, pool, settings, what, folder / "truth.pt")
    results: dict[str, Tensors] = {}
    for number, outcome in enumerate(found.outcomes):
        name, path = outcome.candidate, folder / f"{number}.pt"
        tick(name)
        try:
            pool.ask(name, "prepare", first_limit(name, settings), candidate=name, **what)
            told = pool.ask(name, "results", settings.time_limit, path=str(path))
        except Failure as failure:
            outcome.fail(failure)
            continue
        results[name] = torch.load(path)
        found.changed[name] = told["changed"]
        found.places[name] = places(results[name], truth, found.problem, sample)
        _judge(outcome, results[name], truth, found.budgets, told["strange"])
    for left, right in combinations(results, 2):
        found.pairs.append(_pair(left, right, results, found.problem, sample))


def _truth(found: Check, pool: Pool, settings: Settings, what: dict[str, Any], path: Path) -> Tensors:
    """Float64 results at the sample; none, with the reason, where they cannot be had."""
    try:
        told = pool.ask(FLOAT64, "truth", _TRUTH_TIMES * settings.time_limit, path=str(path), **what)
    except Failure as failure:
        found.untold = f"{failure.text}: {failure.hint}".rstrip(": ")
        return {}
    found.budgets = told["budgets"]
    truth: Tensors = torch.load(path)["truth"]
    return truth


def _judge(outcome: Outcome, got: Tensors, truth: Tensors, budgets: Errors, strange: dict[str, list[int]]) -> None:
    """By the sample that is compared, and by every element being a number."""
    outcome.errors = accuracy.errors({name: t for name, t in got.items() if name in truth}, truth)
    outcome.because = [f"{name} has nan or inf, first at {tuple(at)}" for name, at in strange.items()]
    outcome.because = outcome.because or accuracy.excess(outcome.errors, budgets)
    if outcome.because:
        outcome.verdict = WRONG
    elif truth:
        outcome.verdict = VERIFIED


def _pair(left: str, right: str, results: dict[str, Tensors], problem: Problem, sample: Sample) -> Pair:
    one, other = results[left], results[right]
    shared = {name: one[name] for name in TENSORS if name in one and name in other}
    return Pair(left, right, accuracy.errors(shared, other), places(shared, other, problem, sample))


def places(got: Tensors, want: Tensors, problem: Problem, sample: Sample) -> Places:
    """Of every tensor that both have, the element that differs most; a nan differs more than any number."""
    found = {}
    for name in (name for name in TENSORS if name in got and name in want and want[name].numel()):
        one, other = got[name].double(), want[name].double()
        if one.shape == other.shape:
            away = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(torch.inf, torch.inf)
            index = int(away.argmax())
            usual = other[other.isfinite()].square().mean().sqrt().item() or 1.0
            values = one.flatten()[index].item(), other.flatten()[index].item()
            at = _position(name, index, tuple(one.shape), problem, sample)
            found[name] = Place(name, at, values, away.flatten()[index].item() / usual)
    return found


def _position(name: str, index: int, shape: tuple[int, ...], problem: Problem, sample: Sample) -> tuple[int, ...]:
    """In the whole tensor, from the index into the flattened sample (groups, heads of a group, rows, columns)."""
    index, column = divmod(index, shape[3])
    index, row = divmod(index, shape[2])
    group, member = divmod(index, shape[1])
    batch, head_kv = sample.groups[group]
    if name in ("dk", "dv"):
        return batch, head_kv, row, column
    where = batch, head_kv * problem.group + member, sample.rows[row]
    return where if name == "lse" else (*where, column)


def show(found: Check, *, verbose: bool = False, quiet: bool = False) -> None:
    """The verdict, the tables, and with -v why the others did not take the problem."""
    print(found.sentence())
    if not found.complete:
        print("interrupted: only what was found until then is here")
    if quiet:
        return
    print(f"attention: {found.problem}")
    print(f"device:    {environment.device_line(found.device)}, torch {environment.versions()['torch']}")
    print(f"compared:  {found.compared}; errors as shares, norm-wise")
    for outcome in found.outcomes:
        for line in outcome.because:
            print(f"{outcome.candidate} {outcome.verdict}: {line}")
    report.print_table(*table(found))
    if found.pairs:
        print("against each other:")
        report.print_table(*pair_table(found))
    if found.left_out and not verbose:
        print(f"did not take it, for reasons that -v tells: {', '.join(found.left_out)}")
    for name, reasons in found.left_out.items() if verbose else ():
        print(f"{name} refuses: {'; '.join(reasons)}")


def table(found: Check) -> tuple[list[str], list[list[str]]]:
    """A line a candidate, and one for the budgets."""
    names = [name for name in TENSORS if any(name in outcome.errors for outcome in found.outcomes)]
    columns = ["candidate", "verdict", *(f">{name}" for name in names), "twice", "largest error"]
    rows = [
        [
            outcome.candidate,
            outcome.verdict,
            *(report.error(outcome.error(name)) for name in names),
            _twice(found.changed.get(outcome.candidate)),
            _largest(found.places.get(outcome.candidate, {}), outcome.candidate, FLOAT64),
        ]
        for outcome in found.outcomes
        if outcome.verdict != REFUSED
    ]
    allowed = [report.error(found.budgets[name]["norm"]) if name in found.budgets else "-" for name in names]
    return columns, [*rows, ["budget", "", *allowed, "", ""]]


def pair_table(found: Check) -> tuple[list[str], list[list[str]]]:
    names = [name for name in TENSORS if any(name in pair.differences for pair in found.pairs)]
    columns = ["pair", *(f">{name}" for name in names), "largest difference"]
    return columns, [
        [
            f"{pair.left} - {pair.right}",
            *(report.error(pair.differences[name]["norm"]) if name in pair.differences else "-" for name in names),
            _largest(pair.places, pair.left, pair.right),
        ]
        for pair in found.pairs
    ]


def _twice(changed: list[str] | None) -> str:
    if changed is None:
        return "-"
    return f"other bits: {', '.join(changed)}" if changed else "same bits"


def _largest(found: Places, left: str, right: str) -> str:
    worst = max(found.values(), key=lambda place: place.difference, default=None)
    return "-" if worst is None else worst.text(left, right)
