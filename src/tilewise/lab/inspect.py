"""inspect: one problem, every way to compute it here, side by side: who may, who ran, which kernels, how fast, how near
to what the hardware allows, and what PyTorch's default choice costs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..plan import BACKENDS, plan
from ..target import Target
from . import environment, flags, kernels, report, roofline
from .candidates import OURS, SDPA, TORCH_DEFAULT
from .compare import REFUSED, Comparison, Outcome, Row, compare, median, steps, summary
from .pool import Failure, Pool
from .rivals import FLEX, RIVALS

if TYPE_CHECKING:
    from ..plan import Plan
    from ..problem import Problem
    from .compare import Settings, Tick

_HOST_SECONDS = 0.05


@dataclass(slots=True)
class Inspection:
    """The plan for a problem, and what came of running every candidate for it."""

    plan: Plan
    comparison: Comparison
    profiles: dict[str, Any] = field(default_factory=dict)  # candidate -> what it launched, or {"error": why not}
    host: dict[str, list[float]] = field(default_factory=dict)  # candidate -> seconds that a forward takes the host
    torch_says: dict[str, list[str]] = field(default_factory=dict)  # kernel -> its refusal in PyTorch's words
    priority: list[str] = field(default_factory=list)  # PyTorch's order
    counters: dict[str, Any] = field(default_factory=dict)  # candidate -> what Nsight Compute counted
    left_out: dict[str, list[str]] = field(default_factory=dict)  # candidates that were not even started, and why
    rates: roofline.Rates | None = None  # what the device can do at most

    @property
    def target(self) -> Target:
        return self.plan.target

    @property
    def failed(self) -> bool:
        return any(outcome.failed for outcome in self.comparison.outcomes)

    def refusals(self) -> dict[str, list[str]]:
        """Every candidate that did not run because it does not take the problem, with all its reasons."""
        ran = {outcome.candidate: outcome.because for outcome in self.comparison.outcomes if outcome.verdict == REFUSED}
        return self.left_out | ran

    def disagreements(self) -> dict[str, tuple[list[str], list[str]]]:
        """Where the model of PyTorch's rules and PyTorch itself differ, both in their words: one of them has a bug."""
        modelled = {v.backend: [str(reason) for reason in v.reasons] for v in self.plan.verdicts}
        pairs = {name: (modelled[name], said) for name, said in self.torch_says.items()}
        return {name: pair for name, pair in pairs.items() if bool(pair[0]) != bool(pair[1])}

    def torch_choice(self) -> str:
        """The one of PyTorch's kernels that its default choice ran; empty where that was not seen."""
        return flags.ran_backend(self.profiles.get(TORCH_DEFAULT))

    def best(self) -> Outcome | None:
        """The fastest right candidate."""
        timed = [outcome for outcome in self.comparison.outcomes if outcome.costs and not outcome.failed]
        return min(timed, key=lambda outcome: median(outcome.samples), default=None)

    def shares(self, outcome: Outcome, what: str) -> dict[str, float] | None:
        """How near a candidate's forward or backward comes to each ceiling of the GPU."""
        timed = summary(getattr(outcome, what))
        return roofline.shares(self.plan.problem, self.rates, what, timed["median"]) if timed else None

    def bounds(self, what: str) -> roofline.Bounds | None:
        return roofline.bounds(self.plan.problem, self.rates, what)

    def sentence(self) -> str:
        """The choice, and what PyTorch's own costs, in the figures of the table."""
        comparison, best = self.comparison, self.best()
        text = f"tilewise runs {self.plan.backend}: {self.plan.because}."
        default = next((o for o in comparison.outcomes if o.candidate == TORCH_DEFAULT), None)
        if default is None or not default.costs or best is None:
            return text
        chosen = self.torch_choice()
        name = f"PyTorch's default choice ({chosen})" if chosen else "PyTorch's default choice"
        theirs, fastest = median(default.samples), median(best.samples)
        ours = next((o for o in comparison.outcomes if o.candidate == OURS and o.costs), None)
        if ours is not None:
            text += f" It takes {median(ours.samples) * 1e3:.3g} ms, {name} {theirs * 1e3:.3g} ms"
        if best is default or theirs <= 1.02 * fastest:
            return f"{text}; no candidate here is more than 2% faster than that default."
        lost = (theirs - fastest) * 1e3
        return f"{text}; the default loses {lost:.3g} ms a call against the fastest here, {best.candidate}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "tilewise inspect",
            "sentence": self.sentence(),
            "plan": self.plan.to_dict(),
            "torch": {"priority": self.priority, "choice": self.torch_choice(), "says": self.torch_says},
            "comparison": self.comparison.to_dict(),
            "profiles": self.profiles,
            "host_seconds": {name: summary(samples) for name, samples in self.host.items()},
            "rates": None if self.rates is None else self.rates._asdict(),
            "roofline": {what: _ceilings(self, what) for what in self.directions},
            "shares": {
                outcome.candidate: {what: self.shares(outcome, what) for what in self.directions}
                for outcome in self.comparison.outcomes
            },
            "counters": self.counters,
            "refused": self.refusals(),
        }

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.plan.problem.needs_grad else ("forward",)


def _ceilings(found: Inspection, what: str) -> dict[str, Any]:
    bounds, least = found.bounds(what), roofline.work(found.plan.problem, what)
    return {"work": least._asdict(), "seconds": None if bounds is None else bounds._asdict()}


def inspect(
    problem: Problem,
    device: str,
    settings: Settings,
    *,
    extra: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    method: str = "",
    flush: bool = False,
    tensors: str = "",
    trace: str = "",
    sass: bool = False,
) -> Inspection:
    """Run everybody, or `only` these, and `extra` candidates. Raises what planning raises.

    An interrupt ends it early, with what was measured left in place.
    """
    chosen = plan(problem, Target.of(device))
    names, left_out = (only, {}) if only else candidates(chosen, device)
    row = Row("inspect", problem, tuple(dict.fromkeys((*names, *extra))), device, method, flush, (), tensors)
    with report.Bar(steps(row, settings) + len(row.candidates)) as bar, Pool() as pool:
        found = Inspection(chosen, compare(row, pool, settings, bar.tick), left_out=left_out)
        found.priority = environment.sdpa_state()["priority"]
        found.rates = roofline.rates_of(chosen.target, problem.dtype)
        if found.comparison.complete:
            try:
                _look_closer(found, pool, settings, trace, sass, bar.tick)
            except KeyboardInterrupt:
                found.comparison.complete = False
    return found


def candidates(chosen: Plan, device: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Who is run: ours by choice and by name, PyTorch's, the libraries that are there; and who is not, with reasons.

    PyTorch's kernels are asked for through PyTorch's own function; what keeps them from a problem, all of it, is told
    by the model of their rules.
    """
    verdicts = {verdict.backend: verdict for verdict in chosen.verdicts}
    asked = [name for name in BACKENDS if not name.startswith("torch-") and name != chosen.backend]
    left_out = {name: [str(r) for r in verdicts[name].reasons] for name in asked if not verdicts[name].willing}
    run = [OURS, *(name for name in asked if verdicts[name].willing), TORCH_DEFAULT]
    for name in SDPA:
        verdict = verdicts[name]
        if verdict.willing:
            run.append(name)
        else:
            left_out[name] = [str(reason) for reason in verdict.reasons]
    for name, rival in RIVALS.items():
        reasons = [str(reason) for reason in rival.why_not(chosen.problem, device)]
        if name == FLEX and not device.startswith("cuda"):
            reasons.append(f"it compiles for a minute on a CPU -> ask for it: --candidate {FLEX}")
        if reasons:
            left_out[name] = reasons
        else:
            run.append(name)
    return tuple(run), left_out


def _look_closer(found: Inspection, pool: Pool, settings: Settings, trace: str, sass: bool, tick: Tick) -> None:
    """Kernels, host time and PyTorch's own words, from the processes that still hold the problem."""
    if found.target.is_cpu:
        found.rates = _measured_rates(pool, settings)
    units = kernels.our_units(arch=found.target.arch)
    on_gpu = found.comparison.row.device.startswith("cuda")
    for outcome in found.comparison.outcomes:
        name = outcome.candidate
        if outcome.failed or not outcome.costs:
            continue
        tick(f"{name}: which kernels run")
        kept = trace if name == OURS else ""
        try:
            profiled = pool.ask(name, "profile", settings.time_limit, trace=kept)
            found.profiles[name] = {what: _enrich(part, found, units, sass) for what, part in profiled.items()}
            if on_gpu:
                asked = {"what": "forward", "method": "host", "seconds": _HOST_SECONDS}
                found.host[name] = pool.ask(name, "time", settings.time_limit, **asked)
            if name == TORCH_DEFAULT:
                found.torch_says = pool.ask(name, "refusals", settings.time_limit)
        except Failure as failure:
            found.profiles[name] = {"error": f"{failure.text}: {failure.hint}".rstrip(": ")}


def _measured_rates(pool: Pool, settings: Settings) -> roofline.Rates | None:
    with contextlib.suppress(Failure):
        return roofline.Rates(**pool.ask("rates", "rates", settings.time_limit))
    return None


def _enrich(part: dict[str, Any], found: Inspection, units: dict[str, Any], sass: bool) -> dict[str, Any]:
    """Occupancy for every kernel, and the build log's figures for those of ours."""
    for launch in part["launches"]:
        unit = kernels.find_unit(launch["name"], units)
        if unit is not None:
            launch["build"] = kernels.build_facts(unit, sass=sass)
        if launch["grid"] and launch["block"]:
            sizes = (launch["registers"] or 0, launch["smem_bytes"] or 0)
            fits = kernels.occupancy(launch["grid"], launch["block"], *sizes, found.target)
            launch["occupancy"] = kernels.as_dict(fits)
    return part
