"""inspect: one problem, every backend that is willing on this machine, side by side with PyTorch's default choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan import plan
from ..target import Target
from . import environment, report
from .candidates import OURS, TORCH_DEFAULT
from .compare import REFUSED, Comparison, Outcome, Row, compare, steps, summary
from .pool import Pool

if TYPE_CHECKING:
    from ..plan import Plan
    from ..problem import Problem
    from .compare import Settings

FORMULA = "TFLOP/s counts visible (query, key) pairs only: 2 * pairs * (head_dim + head_dim_v)"


@dataclass(frozen=True, slots=True)
class Inspection:
    """The plan for a problem, and what came of running every candidate for it."""

    plan: Plan
    comparison: Comparison

    @property
    def failed(self) -> bool:
        return any(outcome.failed for outcome in self.comparison.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "comparison": self.comparison.to_dict()}


def inspect(
    problem: Problem,
    device: str,
    settings: Settings,
    *,
    extra: tuple[str, ...] = (),
    method: str = "",
    flush: bool = False,
) -> Inspection:
    """Run the planner's willing backends, PyTorch's default and `extra` candidates. Raises what planning raises."""
    chosen = plan(problem, Target.of(device))
    willing = [verdict.backend for verdict in chosen.verdicts if verdict.willing]
    row = Row("inspect", problem, (*willing, TORCH_DEFAULT, *extra), device, method, flush)
    with report.Bar(steps(row, settings)) as bar, Pool() as pool:
        return Inspection(chosen, compare(row, pool, settings, bar.tick))


def show(inspection: Inspection) -> None:
    """The table, what the marks mean, and all that was refused or went wrong."""
    comparison, chosen = inspection.comparison, inspection.plan
    print(f"attention: {chosen.problem}")
    print(f"device:    {environment.device_line(comparison.row.device)}, torch {environment.versions()['torch']}")
    compared = f"against float64, {comparison.compared}" if comparison.compared else "nothing"
    print(f"verified:  {compared}; times by {comparison.row.timing}, in ms")
    columns, rows = table(inspection)
    report.print_table(columns, rows)
    if not comparison.complete:
        print("interrupted: only what was measured is here")
    print(f"* {OURS} runs {chosen.backend}: {chosen.because}")
    print(f"speed: against the best of PyTorch's paths{', forward and backward' if chosen.problem.needs_grad else ''}")
    print(FORMULA)
    for line in (*_troubles(comparison), *_refusals(inspection)):
        print(line)


def table(inspection: Inspection) -> tuple[list[str], list[list[str]]]:
    """Header and cells. Refused candidates have no line here: their reasons follow the table."""
    comparison = inspection.comparison
    with_backward = comparison.row.problem.needs_grad
    columns = ["backend", "verdict", ">forward", ">p20..p80", ">speed", ">TFLOP/s"]
    columns += [">backward", ">p20..p80"] if with_backward else []
    columns += [">extra MiB", ">error"] + ([">grad error"] if with_backward else [])
    shown = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    return columns, [_cells(outcome, inspection, with_backward) for outcome in shown]


def _cells(outcome: Outcome, inspection: Inspection, with_backward: bool) -> list[str]:
    comparison = inspection.comparison
    forward, backward = summary(outcome.forward), summary(outcome.backward)
    mark = " *" if outcome.candidate == inspection.plan.backend else ""
    norms = {name: by_kind["norm"] for name, by_kind in outcome.errors.items()}
    gradients = [norms[name] for name in ("dq", "dk", "dv") if name in norms]
    cells = [outcome.candidate + mark, outcome.verdict, report.milliseconds(forward), report.spread(forward)]
    cells += [report.times(comparison.speed(outcome)), report.rate(comparison.row.problem.flops(), forward)]
    cells += [report.milliseconds(backward), report.spread(backward)] if with_backward else []
    cells += [report.mebibytes(outcome.memory), report.error(norms.get("out"))]
    return cells + ([report.error(max(gradients, default=None))] if with_backward else [])


def _troubles(comparison: Comparison) -> list[str]:
    return [
        f"{outcome.candidate} {outcome.verdict}: {line}"
        for outcome in comparison.outcomes
        if outcome.verdict != REFUSED
        for line in outcome.because
    ]


def _refusals(inspection: Inspection) -> list[str]:
    refused = {v.backend: [str(reason) for reason in v.reasons] for v in inspection.plan.verdicts if not v.willing}
    refused |= {o.candidate: o.because for o in inspection.comparison.outcomes if o.verdict == REFUSED}
    if not refused:
        return []
    width = max(map(len, refused))
    lines = ["refused:"]
    for name, (first, *rest) in refused.items():
        lines.append(f"  {name.ljust(width)}  {first}")
        lines += [f"  {' ' * width}  {reason}" for reason in rest]
    return lines
