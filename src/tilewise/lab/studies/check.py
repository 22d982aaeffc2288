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
from ...problem import Problem
from ...target import Target
from .. import report, units
from ..candidates.names import OURS, SDPA
from ..measure import accuracy
from ..measure.compare import REFUSED, VERIFIED, WRONG, Outcome, first_limit
from ..measure.pool import Failure, Pool
from ..report import Bad, Candidate, Code, Fold, Phrase, Report, Section, Share, Shares, Table, Words

if TYPE_CHECKING:
    from ..measure.accuracy import Errors, Sample, Tensors
    from ..measure.compare import Settings, Tick
    from ..report import Inline

KIND = "tilewise check"
FLOAT64 = "float64"  # the worker that computes the truth
TENSORS = ("out", "lse", "dq", "dk", "dv")
_PLACE = ("tensor", ">batch", ">head", ">row", ">column")
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

    @classmethod
    def from_dict(cls, tensor: str, values: dict[str, Any]) -> Place:
        at = tuple(values[name] for name in ("batch", "head", "row", "key", "column") if name in values)
        first, second = map(float, values["values"])  # JSON has no inf and nan: they are kept as text
        return cls(tensor, at, (first, second), float(values["difference"]))


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Check:
        """What `to_dict` made."""
        rows = {one["candidate"]: one for one in values["candidates"]}
        return cls(
            Problem.from_dict(values["problem"]),
            values["device"],
            [Outcome(name, one["verdict"], one["because"], _floats(one["errors"])) for name, one in rows.items()],
            values["refused"],
            values["compared"],
            values["untold"],
            _floats(values["budgets"]),
            {name: _places_of(one["largest_errors"]) for name, one in rows.items()},
            {name: one["changed"] for name, one in rows.items() if one["changed"] is not None},
            [
                Pair(
                    one["candidates"][0],
                    one["candidates"][1],
                    _floats(one["differences"]),
                    _places_of(one["largest_differences"]),
                )
                for one in values["pairs"]
            ],
            values["complete"],
        )


def _as_dict(places: Places) -> dict[str, Any]:
    return {name: place.to_dict() for name, place in places.items()}


def _places_of(values: dict[str, Any]) -> Places:
    return {tensor: Place.from_dict(tensor, place) for tensor, place in values.items()}


def _floats(errors: dict[str, dict[str, Any]]) -> Errors:
    """JSON has no inf and nan: they are kept as text."""
    return {tensor: {kind: float(value) for kind, value in kinds.items()} for tensor, kinds in errors.items()}


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


def report_of(found: Check, provenance: dict[str, Any]) -> Report:
    """Errors against their budgets, where the largest are, and how far the candidates are from each other."""
    asked = [outcome for outcome in found.outcomes if outcome.verdict != REFUSED]
    wrong = [outcome for outcome in asked if outcome.failed]
    changed = [outcome.candidate for outcome in asked if found.changed.get(outcome.candidate)]
    facts = [
        f"compared with float64: {found.compared}" if found.compared else "",
        f"other bits the second time: {', '.join(changed)}" if changed else "",
        *report.machine_of(provenance, found.device),
    ]
    refused = {outcome.candidate: outcome.because for outcome in found.outcomes if outcome.verdict == REFUSED}
    return Report(
        "check",
        Code(found.problem),
        _claim(found, asked, wrong),
        found.sentence(),
        [fact for fact in facts if fact],
        lead=found.untold,
        warnings=[] if found.complete else ["Interrupted: only what was found until then is here."],
        failures=[f"{one.candidate}: {'; '.join([one.verdict, *one.because])}" for one in wrong],
        sections=[*_errors(found, asked), *_pairs(found), *report.refusals(found.left_out, refused)],
    )


def _claim(found: Check, asked: list[Outcome], wrong: list[Outcome]) -> str:
    right = sum(outcome.verdict == VERIFIED for outcome in asked)
    if wrong:
        return Bad(f"{len(wrong)} of {len(asked)} not right")
    if found.untold:
        return "Not judged: float64 has no answer"
    return f"{'All ' if right > 1 else ''}{right} within budget" if right else "Nothing was checked"


def _errors(found: Check, asked: list[Outcome]) -> list[Section]:
    if not asked:
        return []
    groups = []
    for tensor in (tensor for tensor in TENSORS if found.budgets.get(tensor, {}).get("norm")):
        budget = found.budgets[tensor]["norm"]
        known = [(one.candidate, error) for one in asked if (error := one.error(tensor)) is not None]
        shares = [Share(name, error / budget, units.error(error)) for name, error in known]
        groups += [(tensor, units.error(budget), shares)] if shares else []
    columns = ["candidate", "verdict", "second run", *_PLACE, ">has", ">float64"]
    rows = [
        [
            Candidate(one.candidate),
            Bad(one.verdict) if one.failed else one.verdict,
            _twice(found.changed.get(one.candidate)),
            *_worst(found.places.get(one.candidate, {})),
        ]
        for one in asked
    ]
    caption = "Relative error, norm-wise, as a share of the budget"
    about = "Where each is furthest from float64: a wrong tile, a wrong last row and a wrong head look alike in a norm."
    return [
        Section("Errors against their budgets", [Shares(groups, caption, "budget")] if groups else []),
        Section("Largest errors", [Table(columns, rows, "Largest errors"), Words(about, is_note=True)]),
    ]


def _pairs(found: Check) -> list[Section]:
    if not found.pairs:
        return []
    names = [name for name in TENSORS if any(name in pair.differences for pair in found.pairs)]
    rows: list[list[Inline]] = []
    for pair in found.pairs:
        each = [pair.differences.get(name) for name in names]
        who = Phrase((Code(pair.left), " and ", Code(pair.right)))
        rows.append([who, *(units.error(one["norm"]) if one else "-" for one in each), *_worst(pair.places)])
    table = Table(["pair", *(f">{name}" for name in names), *_PLACE, ">first", ">second"], rows, "Pairs")
    return [Section("Against each other", [Fold(units.counted(len(rows), "pair"), [table], is_open=len(rows) < 12)])]


def _twice(changed: list[str] | None) -> str:
    if changed is None:
        return "-"
    return Bad(f"other bits: {', '.join(changed)}") if changed else "same bits"


def _worst(places: Places) -> list[str]:
    """The tensor and place of the largest difference, and both values."""
    worst = max(places.values(), key=lambda place: place.difference, default=None)
    if worst is None:
        return ["-"] * (len(_PLACE) + 2)
    at = [*map(str, worst.at), "-"][: len(_PLACE) - 1]
    return [worst.tensor, *at, *(f"{value:.9g}" for value in worst.values)]
