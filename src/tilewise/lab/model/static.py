"""inspect --static: what can be said of a problem on a GPU that is not here. Our kernels are compiled, nothing runs.

Registers, spills and shared memory come from the assembler's log, occupancy from them, the instruction mix from the
machine code, and the ceilings from the problem and the data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...plan import plan
from .. import report
from . import kernels, roofline

if TYPE_CHECKING:
    from ...engine.program import Launch
    from ...plan import Plan
    from ...problem import Problem
    from ...target import Target


@dataclass(frozen=True, slots=True)
class Static:
    """The plan for a target, and what is known of the kernels that would run without running them."""

    plan: Plan
    builds: list[dict[str, Any]]

    @property
    def failed(self) -> bool:
        return any("error" in built for built in self.builds)

    def to_dict(self) -> dict[str, Any]:
        problem, target = self.plan.problem, self.plan.target
        rates = roofline.rates_of(target, problem.dtype)
        bounds = {what: roofline.bounds(problem, rates, what) for what in _directions(problem)}
        return {
            "kind": "tilewise inspect --static",
            "plan": self.plan.to_dict(),
            "kernels": self.builds,
            "roofline": {what: bound._asdict() if bound else None for what, bound in bounds.items()},
        }


def inspect(problem: Problem, target: Target, backend: str) -> Static:
    """Plan for the target, and build what of ours would run there. Raises what planning raises."""
    chosen = plan(problem, target, backend)
    return Static(chosen, [_facts(launch, target) for launch in kernels_of(chosen)])


def kernels_of(chosen: Plan) -> list[Launch]:
    """The kernels of ours that a plan launches, each once: none for a backend that has none."""
    programs = [program for program in (chosen.forward, chosen.backward) if program is not None]
    return list({launch.unit: launch for program in programs for launch in program.launches}.values())


def _facts(launch: Launch, target: Target) -> dict[str, Any]:
    facts = kernels.build_facts(launch.unit, sass=True)
    if "error" in facts:
        return facts
    fits = kernels.occupancy((launch.grid,), (launch.threads,), facts["registers"], facts["smem_bytes"], target)
    return facts | {"threads": launch.threads, "occupancy": kernels.as_dict(fits)}


def _directions(problem: Problem) -> tuple[str, ...]:
    return ("forward", "backward") if problem.needs_grad else ("forward",)


def show(found: Static) -> None:
    """`explain`'s text, the ceilings, and the kernels."""
    print(found.plan)
    problem = found.plan.problem
    rates = roofline.rates_of(found.plan.target, problem.dtype)
    for what in _directions(problem):
        bounds = roofline.bounds(problem, rates, what)
        if bounds is not None:
            each = ", ".join(f"{name} {report.significant(value * 1e6)} us" for name, value in bounds._asdict().items())
            print(f"{what} at least: {each}; bound by {bounds.by}")
    if not found.builds:
        print(f"{found.plan.backend} has no kernel of ours: nothing to compile")
    for built in found.builds:
        print("\n".join(_lines(built)))


def _lines(built: dict[str, Any]) -> list[str]:
    if "error" in built:
        return [f"kernel {built['kernel']} ({built['arch']}) does not build: {built['error']}"]
    lines = [f"kernel {built['kernel']} ({built['arch']}):"]
    sizes = (
        f"{built['registers']} registers, {built['spill_bytes']} bytes spilled, {built['stack_bytes']} bytes of stack"
    )
    lines.append(f"  {sizes}, {built['smem_bytes'] / 1024:.1f} KiB shared, {built['barriers']} barriers")
    if built.get("occupancy"):
        fits = built["occupancy"]
        lines.append(f"  {built['threads']} threads per block; {fits['text']}")
    total = sum(built["instructions"].values())
    lines.append(f"  {total} instructions, by kind:")
    return lines + [f"    {count:6d}  {count / total:4.0%}  {kind}" for kind, count in built["instructions"].items()]
