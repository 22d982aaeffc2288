"""Errors against float64 as the inputs grow or shrink, for us and for PyTorch.

    python tools/magnitudes.py                                  # float32: ours and PyTorch's, out and gradients
    python tools/magnitudes.py --dtype bf16 --candidate triton --plot errors.svg

Four ways to scale inputs that are standard normal at 1, each by powers of ten:

    values     v times m
    balance    q times m, k divided by m: the scores stay as they are
    scores     q and k times the root of m
    gradients  dout times m

A point is the norm-wise error of out, and the largest of those of dq, dk and dv, each with the share of its budget that
it takes up: the budget of `accuracy`, derived from a plain computation on the same inputs. A point without a number is
one where the truth itself does not fit the dtype, or the candidate gave no finite answer, or none at all. A dq or dk
that is all rounding does not count: where every row has one weight near 1, the terms of its scores' gradients cancel.
All run in this process, one after the other.
"""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from documents import plots

from tilewise.errors import TilewiseError
from tilewise.lab import report, units
from tilewise.lab.candidates.names import OURS, Candidate, Inputs, make_inputs
from tilewise.lab.commands.command import FAILED, INTERRUPTED, grouped, program, taking
from tilewise.lab.commands.options import ProblemOptions, RunOptions  # noqa: TC001  (typer reads the annotations)
from tilewise.lab.commands.output import OutputOptions, check_file, check_folder
from tilewise.lab.measure import accuracy, environment
from tilewise.lab.measure.words import listed
from tilewise.lab.render import pages
from tilewise.lab.report import Bad, Bars, Code, Fold, Heading, Line, Report, Section, Table, Words
from tilewise.problem import Problem
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tilewise.lab.measure.accuracy import Tensors
    from tilewise.lab.report import Block, Inline

KIND = "tilewise magnitudes"
PEER = {"cuda": "torch-efficient", "cpu": "torch-math"}
WHAT = {"out": ("out",), "gradients": ("dq", "dk", "dv")}


def _scaled(inputs: Inputs, **factors: float) -> Inputs:
    changed = {name: getattr(inputs, name).detach() * factor for name, factor in factors.items()}
    for name in ("q", "k", "v"):
        changed[name] = changed.get(name, getattr(inputs, name).detach()).requires_grad_()
    return inputs._replace(**changed)


SCALINGS: dict[str, tuple[range, Callable[[Inputs, float], Inputs]]] = {
    "values": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, v=m)),
    "balance": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, q=m, k=1 / m)),
    "scores": (range(-2, 4), lambda inputs, m: _scaled(inputs, q=math.sqrt(m), k=math.sqrt(m))),
    "gradients": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, dout=m)),
}


class Point(NamedTuple):
    """Errors of one candidate at one magnitude; nan where there is none to tell."""

    magnitude: float
    out: float
    gradients: float
    because: str = ""  # why there is none
    out_share: float = math.nan  # of its budget: over 1 is wrong; nan where there is no budget, or no error
    gradients_share: float = math.nan


Series = dict[str, list[Point]]  # by candidate


def measure(
    problem: Problem,
    device: str,
    seed: int,
    candidates: Iterable[str] = (),
    tick: Callable[[str], None] = lambda text: None,
) -> dict[str, Series]:
    """By scaling; ours first, then PyTorch's kernel, then others. An interrupt ends it early: see `complete`."""
    problem = problem.with_(needs_grad=True)
    names = tuple(dict.fromkeys((OURS, PEER["cuda" if device.startswith("cuda") else "cpu"], *candidates)))
    sample = accuracy.choose(problem, seed, device)
    plain = make_inputs(problem, seed, device)
    found: dict[str, Series] = {}
    with contextlib.suppress(KeyboardInterrupt):
        for scaling, (exponents, scale) in SCALINGS.items():
            for exponent in exponents:
                magnitude = 10.0**exponent
                inputs = scale(plain, magnitude)
                truth = accuracy.truth(inputs, problem, sample)
                simple = accuracy.errors(accuracy.plain(inputs, problem, sample), truth)
                allowed = accuracy.budgets(simple, problem)
                points = {name: _point(name, problem, inputs, sample, truth, allowed, magnitude) for name in names}
                for name, point in points.items():
                    found.setdefault(scaling, {}).setdefault(name, []).append(point)
                tick(f"{scaling} 1e{exponent}")
    return found


def complete(found: dict[str, Series]) -> bool:
    """No interrupt has ended it early."""
    return sum(len(next(iter(series.values()))) for series in found.values()) == steps()


def steps() -> int:
    return sum(len(exponents) for exponents, _ in SCALINGS.values())


def _point(
    name: str,
    problem: Problem,
    inputs: Inputs,
    sample: accuracy.Sample,
    truth: Tensors,
    allowed: accuracy.Errors,
    magnitude: float,
) -> Point:
    try:
        results = _results(Candidate(name), problem, inputs)
    except (RuntimeError, TilewiseError) as error:  # a kernel that refuses or fails is a point without a number
        return Point(magnitude, math.nan, math.nan, str(error).partition("\n")[0])
    largest = torch.finfo(problem.dtype).max
    picked = accuracy.select(results, problem, sample)
    errors = accuracy.errors(picked, {tensor: truth[tensor] for tensor in picked})
    judged = {
        what: [tensor for tensor in tensors if not _is_rounding(tensor, truth, problem, inputs)]
        for what, tensors in WHAT.items()
    }
    told = {
        what: max(
            errors[tensor]["norm"] if truth[tensor].abs().max().item() < largest else math.nan for tensor in tensors
        )
        for what, tensors in judged.items()
    }
    shares = {
        what: max((errors[tensor]["norm"] / allowed[tensor]["norm"] for tensor in tensors), default=math.nan)
        if math.isfinite(told[what])
        else math.nan
        for what, tensors in judged.items()
    }
    return Point(magnitude, told["out"], told["gradients"], "", shares["out"], shares["gradients"])


def _is_rounding(tensor: str, truth: Tensors, problem: Problem, inputs: Inputs) -> bool:
    """Whether a dq or dk is about as small as the rounding of dout v^T times the scale, and the keys or queries."""
    if tensor not in ("dq", "dk"):
        return False
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    factors = (inputs.dout, inputs.v, inputs.k if tensor == "dq" else inputs.q)
    terms = math.prod(_row_size(factor) for factor in factors) * abs(problem.scale)
    return _row_size(truth[tensor]) < _ROUNDINGS * eps * terms


_ROUNDINGS = 64  # of dot products over a head and sums over keys, which add up at random


def _row_size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm(dim=-1).square().mean().sqrt())


def _results(candidate: Candidate, problem: Problem, inputs: Inputs) -> Tensors:
    with candidate.context(problem):
        out = candidate.forward(problem, inputs)()
        grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    return {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def to_dict(problem: Problem, device: str, found: dict[str, Series], provenance: dict[str, Any]) -> dict[str, Any]:
    series = {
        scaling: {name: [point._asdict() for point in points] for name, points in by_name.items()}
        for scaling, by_name in found.items()
    }
    about = {"kind": KIND, "suite": "magnitudes", "problem": problem.to_dict(), "device": device}
    return about | {"complete": complete(found), "provenance": provenance, "series": series}


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


_TITLES = {
    "values": "v times a power of ten",
    "balance": "q times, k divided by a power of ten",
    "scores": "q and k times the root of a power of ten",
    "gradients": "dout times a power of ten",
}
Points = list[dict[str, Any]]


class _Error(NamedTuple):
    """The error of one thing at one magnitude, and its share of the budget; None where it is not judged."""

    magnitude: float
    error: float
    share: float | None

    @property
    def over(self) -> bool:
        return self.share is not None and self.share > 1.0

    @property
    def at(self) -> str:
        return f"1e{round(math.log10(self.magnitude))}"


def report_of(told: dict[str, Any]) -> Report:
    """Whose errors are over their budget, and where that is worst."""
    found = [
        (name, f"{what} of {scaling}", errors)
        for scaling, by_name in told["series"].items()
        for name, points in by_name.items()
        for what in WHAT
        if (errors := _errors(points, what))
    ]
    over = over_budget(told)
    ours, others = ([line for name, line in over if (name == OURS) is mine] for mine in (True, False))
    claim: str = "Every error is within its budget"
    if not any(one.share is not None for *_, errors in found for one in errors):
        claim = "Errors without a budget to judge them by"
    elif ours:
        claim = Bad(f"tilewise is over {units.counted(len(ours), 'budget')}")
    elif others:
        claim = f"tilewise is within its budgets, {listed(dict.fromkeys(name for name, _ in over))} not"
    provenance = told.get("provenance") or {}
    facts = [told["device"], *report.machine_of(provenance, "")[1:], f"{sum(len(one[2]) for one in found)} errors"]
    interrupted = [] if told.get("complete", True) else ["Interrupted: only what was measured is here."]
    return Report(
        "magnitudes",
        Code(Problem.from_dict(told["problem"])),
        claim,
        f"{claim}: {'; '.join(ours)}" if ours else claim,
        facts,
        "Errors against float64 as the inputs grow or shrink, each held to a budget from a plain computation.",
        warnings=[*others, *interrupted],
        failures=ours,
        sections=[_scaling(name, series) for name, series in told["series"].items()],
    )


def over_budget(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Every candidate with a point over its budget, and where that is worst, in words."""
    found = []
    for scaling, by_name in told["series"].items():
        for name, points in by_name.items():
            for what in WHAT:
                errors = _errors(points, what)
                if errors and (worst := _worst_of(errors)).over:
                    size = f"error {units.error(worst.error)}, {worst.share:.1f} times its budget"
                    found.append((name, f"{name}: {what} of {scaling} {worst.at}: {size}"))
    return found


def _errors(points: Points, what: str) -> list[_Error]:
    """The errors of the points that have one."""
    return [
        _Error(point["magnitude"], point[what], share if is_number(share := point.get(f"{what}_share")) else None)
        for point in points
        if is_number(point[what])
    ]


def _worst_of(errors: list[_Error]) -> _Error:
    return max(errors, key=lambda one: (one.share or 0.0, one.error))


def _scaling(name: str, series: dict[str, Points]) -> Section:
    blocks: list[Block] = [Words(f"Inputs that are standard normal at 1, with {_TITLES.get(name, name)}.", True)]
    for what in WHAT:
        known = {who: errors for who, points in series.items() if (errors := _errors(points, what))}
        blocks.append(Heading(what))
        if not known:
            blocks.append(Words(f"{what}: no point has an error to tell.", is_note=True))
            continue
        bars = [_bar(who, errors, len(series[who])) for who, errors in known.items()]
        caption, columns = f"{what}: the largest error as a share of its budget", ("of its budget", "error")
        blocks.append(Bars(bars, caption, whole=True, columns=columns))
        table = _table(what, series, f"{what} of {name}")
        blocks.append(Fold(f"Every {what} error of {name}", [table], in_text=False))
    return Section(name, blocks)


def _bar(who: str, errors: list[_Error], points: int) -> Line:
    worst, judged = _worst_of(errors), [one.over for one in errors if one.share is not None]
    aside = f"{units.error(worst.error)} at {worst.at}"
    if worst.over:
        aside = Bad(f"{aside}, over budget; {sum(judged)} of {len(judged)} points are")
    share = math.nan if worst.share is None else worst.share
    small = f"{len(errors)} of {points} points"
    return Line(who, share, units.percent(worst.share), "lost" if worst.over else "", aside=aside, small=small)


def _table(what: str, series: dict[str, Points], label: str) -> Table:
    """A line per magnitude, with the error of each candidate and its share of the budget."""
    columns = ["magnitude", *(column for who in series for column in (f">{who}", ">of budget"))]
    found = {who: {one.magnitude: one for one in _errors(points, what)} for who, points in series.items()}
    rows: list[list[Inline]] = []
    for magnitude in dict.fromkeys(point["magnitude"] for points in series.values() for point in points):
        row: list[Inline] = [f"1e{round(math.log10(magnitude))}"]
        for errors in found.values():
            one = errors.get(magnitude)
            share = "-" if one is None or one.share is None else units.percent(one.share)
            row += [units.error(one.error) if one else "-", Bad(share) if one and one.over else share]
        rows.append(row)
    return Table(columns, rows, label)


def draw(record: dict[str, Any], path: Path) -> None:
    """A row of panels for out, one for gradients; from a record, so that a kept one can be drawn again."""
    pyplot = plots.load_pyplot()
    series = record["series"]
    figure, axes = pyplot.subplots(
        len(WHAT), len(series), figsize=(11.0, 5.2), squeeze=False, sharey=True, layout="constrained"
    )
    for line, what in zip(axes, WHAT, strict=True):
        for axis, (scaling, by_name) in zip(line, series.items(), strict=True):
            for (name, points), style in zip(by_name.items(), plots.styles(), strict=False):
                kept = [(point["magnitude"], point[what]) for point in points if is_number(point[what])]
                axis.plot([x for x, _ in kept], [y for _, y in kept], label=name, **style)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{what}: {scaling}", fontsize=9)
            axis.grid(alpha=0.3, linewidth=0.5)
        line[0].set_ylabel("relative error")
    for axis in axes[-1]:
        axis.set_xlabel("magnitude")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Error against float64 by the magnitude of the inputs", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.save(figure, path)
    pyplot.close(figure)


pages.REPORTS[KIND] = report_of


@grouped
def magnitudes(
    problem: Annotated[ProblemOptions, taking("mask", shape="1,4,1024,64", dtype="float32")],
    run: Annotated[RunOptions, taking("device", "candidate", "seed")],
    output: Annotated[OutputOptions, taking("save", "results", "quiet", "json", "page")],
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this SVG file.")] = None,
) -> None:
    """Errors against float64 as values, scores and gradients grow or shrink: ours and PyTorch's. Leaves with 1 if ours
    are over their budget."""
    if plot is not None:
        check_folder("--plot", plot.parent)
        check_file("--plot", plot)
    asked = problem.make().with_(needs_grad=True)
    where = run.where()
    with report.Bar(steps()) as bar:
        found = measure(asked, where, run.seed, run.extra(), bar.tick)
    provenance = environment.provenance(run.seed, environment.command_line())
    record = to_dict(asked, Target.of(where).name, found, provenance)
    output.deliver(record, lambda: report.show(report_of(record), **output.looks))
    if plot is not None and found:
        draw(record, plot)
        typer.echo(f"drew {plot}", err=True)
    if not record["complete"]:
        raise typer.Exit(INTERRUPTED)
    if any(name == OURS for name, _ in over_budget(record)):
        raise typer.Exit(FAILED)


if __name__ == "__main__":
    sys.exit(program(magnitudes)())
