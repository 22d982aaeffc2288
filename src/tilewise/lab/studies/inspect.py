"""inspect: one problem, every way to compute it here, side by side: what may run, what ran, which kernels, how fast,
how near to what the hardware allows, and what PyTorch's default choice costs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...masks import Full
from ...plan import BACKENDS, RULES, plan
from ...target import Target
from .. import report, units
from ..candidates import flags
from ..candidates.names import OURS, SDPA, TORCH_DEFAULT
from ..candidates.rivals import COMPILE, RIVALS
from ..measure import environment, ncu, words
from ..measure.compare import REFUSED, TIMES, Comparison, Outcome, Row, compare, fastest, median, steps, summary
from ..measure.pool import Failure, Pool
from ..measure.statistics import FASTER, TOO_FEW
from ..model import kernels, roofline

if TYPE_CHECKING:
    from ...plan import Plan
    from ...problem import Problem
    from ..measure.compare import Settings, Tick

KIND = "tilewise inspect"
_HOST_SECONDS = 0.05
_MAX_COUNTED = 20  # launches of a call
_LIBRARIES = tuple(name for name in RIVALS if name not in COMPILE)
_GPU_ONLY = ("sm90", "sm80", "triton", "torch-efficient", "torch-cudnn", *_LIBRARIES)


@dataclass(slots=True)
class Inspection:
    """The plan for a problem, and what came of running every candidate for it."""

    plan: Plan
    comparison: Comparison
    profiles: dict[str, Any] = field(default_factory=dict)  # candidate -> what it launched, or {"error": why not}
    host: dict[str, list[float]] = field(default_factory=dict)  # candidate -> seconds that a forward takes the host
    torch_says: dict[str, list[str]] = field(default_factory=dict)  # kernel -> its refusal in PyTorch's words
    priority: list[str] = field(default_factory=list)  # PyTorch's kernels that take it, in the order it prefers them
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

    def gpu_only(self) -> list[str]:
        """Of those that do not take the problem, the ones that no problem on this device could change."""
        if not self.target.is_cpu:
            return []
        return [name for name in self.refusals() if name in _GPU_ONLY]

    def disagreements(self) -> dict[str, tuple[list[str], list[str]]]:
        """Where the model of PyTorch's rules and PyTorch itself differ, both in their words: one of them has a bug."""
        modelled = {v.backend: [str(reason) for reason in v.reasons] for v in self.plan.verdicts}
        pairs = {name: (modelled[name], said) for name, said in self.torch_says.items()}
        return {name: pair for name, pair in pairs.items() if bool(pair[0]) != bool(pair[1])}

    def torch_choice(self) -> str:
        """The one of PyTorch's kernels that its default choice ran, `torch-flash`; empty where that was not seen."""
        seen = flags.ran_backend(self.profiles.get(TORCH_DEFAULT))
        if seen:
            return f"torch-{seen}"
        default = self.comparison.default()
        return default.runs if default is not None else ""

    def shares(self, outcome: Outcome, what: str) -> dict[str, float] | None:
        """How near a candidate's forward or backward comes to each ceiling of the device.

        None where a ceiling is passed: that is no share but a peak that is not one, measured while the machine had
        other work.
        """
        timed = summary(getattr(outcome, what))
        found = roofline.shares(self.plan.problem, self.rates, what, timed["median"]) if timed else None
        return found if found is None or max(found.values()) <= 1.0 else None

    def passes_a_ceiling(self) -> bool:
        return self.rates is not None and any(
            getattr(outcome, what) and self.shares(outcome, what) is None
            for outcome in self.comparison.timed()
            for what in self.directions
        )

    def bounds(self, what: str) -> roofline.Bounds | None:
        return roofline.bounds(self.plan.problem, self.rates, what)

    def sentence(self) -> str:
        """What runs, and how it stands beside PyTorch's own choice and the fastest: nothing that noise could say."""
        return sentence(self.comparison, self.plan.backend, self.torch_choice())

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "sentence": self.sentence(),
            "plan": self.plan.to_dict(),
            "torch": {
                "priority": self.priority,
                "settings": environment.sdpa_state()["priority"],
                "choice": self.torch_choice().removeprefix("torch-"),
                "says": self.torch_says,
            },
            "our_order": list(dict.fromkeys(r.prefer for r in RULES if r.when(self.plan.problem, self.target))),
            "disagreements": {name: list(pair) for name, pair in self.disagreements().items()},
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
            "gpu_only": self.gpu_only(),
        }

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.plan.problem.needs_grad else ("forward",)


def record_name(problem: Problem, experiment: str = "") -> str:
    """What a kept record is called, beside its date: `inspect-1x32x8192x128-kv8-causal`."""
    parts = ["inspect", f"{problem.batch}x{problem.heads_q}x{problem.seq_q}x{problem.head_dim}"]
    parts += [f"kv{problem.heads_kv}"] if problem.heads_kv != problem.heads_q else []
    parts += [f"sk{problem.seq_kv}"] if problem.seq_kv != problem.seq_q else []
    parts += [problem.mask.kind] if problem.mask.kind != Full.kind else []
    return "-".join([*parts, experiment] if experiment else parts)


def sentence(comparison: Comparison, backend: str, torch_choice: str) -> str:
    """The outcome of a comparison: every claim in it is one of the statistic's."""
    ours = next((outcome for outcome in comparison.timed() if outcome.candidate == OURS), None)
    default, best = comparison.default(), comparison.best()
    name = f"PyTorch's default ({torch_choice})" if torch_choice else "PyTorch's default"
    if ours is None and default is None:
        return f"tilewise runs {backend}." if best is None else f"The fastest here is {best.candidate}."
    if ours is None or default is None:
        one, who = (ours, f"tilewise ({backend})") if ours is not None else (default, name)
        assert one is not None
        text = f"{who} takes {_time(one)}"
    else:
        text = _beside(comparison, ours, default, backend, name)
    named = [outcome for outcome in (ours, default) if outcome is not None]
    if best is None or any(best is one or (best.runs and best.runs == one.runs) for one in named):
        return f"{text}."
    speed = comparison.versus(best, fastest(named), among=len(comparison.entries()))
    if speed is None or speed.verdict != FASTER:
        return f"{text}."
    return f"{text}. The fastest is {best.candidate}, {_time(best)}: {words.claim(speed)} that{words.interval(speed)}."


def _beside(comparison: Comparison, ours: Outcome, default: Outcome, backend: str, name: str) -> str:
    speed = comparison.versus(ours, default)
    assert speed is not None
    if speed.same:
        return f"tilewise runs {backend}, as PyTorch's default does: {_time(ours)}"
    if speed.verdict == TOO_FEW:
        few = f"{speed.rounds} {'round is' if speed.rounds == 1 else 'rounds are'} too few to compare"
        return f"tilewise ({backend}) takes {_time(ours)}, {name} {_time(default)}; {few}"
    told = f"{words.claim(speed)} {name}: {_time(ours)} against {_time(default)}"
    return f"tilewise ({backend}) is {told}{words.interval(speed)}"


def _time(outcome: Outcome) -> str:
    parts = parts_of({what: getattr(outcome, what) for what in TIMES})
    return units.duration(sum(part["median"] for part in parts.values()))


def parts_of(rounds: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """The median and the spread of each direction that was timed: what every report shows, so that the directions of a
    candidate add up to what it takes. Of several, a round counts by its median, as in the statistic."""
    timed = {what: samples for what, samples in rounds.items() if samples}
    if len(timed) > 1:
        timed = {what: [[median(one)] for one in samples] for what, samples in timed.items()}
    return {what: found for what, samples in timed.items() if (found := summary(samples))}


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
        found.rates = roofline.rates_of(chosen.target, problem.dtype)
        if found.comparison.complete:
            try:
                _look_closer(found, pool, settings, trace, sass, bar.tick)
            except KeyboardInterrupt:
                found.comparison.complete = False
    return found


def count(found: Inspection, seed: int, tensors: str, time_limit: float) -> None:
    """Nsight Compute's counters of every candidate that has a time and few launches: each launch is run again and
    again. An interrupt ends it with the times in place."""
    launches = {outcome.candidate: _launches(found, outcome.candidate) for outcome in found.comparison.timed()}
    left_out = {
        name: f"not counted: {count} launches, more than {_MAX_COUNTED}"
        for name, count in launches.items()
        if count > _MAX_COUNTED
    }
    running = [name for name in launches if name not in left_out]
    try:
        found.counters = ncu.inspect(running, found.plan.problem, seed, tensors, time_limit) | left_out
    except KeyboardInterrupt:
        found.comparison.complete = False
        found.counters = {"ncu": "interrupted"}


def _launches(found: Inspection, name: str) -> int:
    """Of one call in every direction, as far as the profiler saw them."""
    parts = found.profiles.get(name, {})
    return sum(launch["count"] for what in found.directions for launch in parts.get(what, {}).get("launches", ()))


def candidates(chosen: Plan, device: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """The candidates that run: ours by choice and by name, PyTorch's, installed libraries; and those refused, why.

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
        if name in COMPILE and not device.startswith("cuda"):
            reasons.append(f"it compiles for a minute on a CPU -> ask for it: --candidate {name}")
        if reasons:
            left_out[name] = reasons
        else:
            run.append(name)
    return tuple(run), left_out


def _look_closer(found: Inspection, pool: Pool, settings: Settings, trace: str, sass: bool, tick: Tick) -> None:
    """Kernels, host time and PyTorch's own words, from the processes that still hold the problem."""
    if found.target.is_cpu:
        found.rates = _measured_rates(pool, settings)
        if found.passes_a_ceiling():
            found.comparison.noise.append(
                "a candidate was faster than the peaks measured here: something else ran meanwhile; measure again"
            )
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
                found.priority = pool.ask(name, "order", settings.time_limit)
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
