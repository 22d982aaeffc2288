"""What `tilewise inspect` prints: the table, the kernels, the choices and every reason."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..plan import RULES
from . import environment, flags, report, roofline
from .candidates import OURS, TORCH_DEFAULT
from .compare import REFUSED, Comparison, Outcome, summary

if TYPE_CHECKING:
    from .inspect import Inspection

FORMULA = "TFLOP/s counts visible (query, key) pairs only: 2 * pairs * (head_dim + head_dim_v), backward 2.5 times that"
_LONGEST_NAME = 110


def show(found: Inspection) -> None:
    """The details first, the table and the sentence last: that is what stays on the screen."""
    comparison = found.comparison
    print(f"attention: {found.plan.problem}")
    print(f"device:    {environment.device_line(comparison.row.device)}, torch {environment.versions()['torch']}")
    compared = f"against float64, {comparison.compared}" if comparison.compared else "nothing"
    print(f"verified:  {compared}; times by {comparison.row.timing}, in ms; p20..p80 in brackets")
    parts = (kernel_lines, counter_lines, refusal_lines, disagreements, troubles, ceilings, choices, experiment)
    for line in (line for part in parts for line in part(found)):
        print(line)
    print(FORMULA)
    columns, rows = table(found)
    report.print_table(columns, rows)
    if not comparison.complete:
        print("interrupted: only what was measured is here")
    print(found.sentence())


def table(found: Inspection) -> tuple[list[str], list[list[str]]]:
    """Header and cells. Refused candidates have no line here: their reasons follow the table."""
    comparison = found.comparison
    with_backward, on_gpu = comparison.row.problem.needs_grad, comparison.row.device.startswith("cuda")
    with_shares = found.rates is not None
    columns = ["candidate", "verdict", ">forward", ">backward" if with_backward else "", ">host us" if on_gpu else ""]
    columns += [">speed", ">TFLOP/s", *((">of compute", ">of memory", ">of exp") if with_shares else ())]
    columns += [">extra MiB", ">error", ">grad error" if with_backward else ""]
    shown = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    lines = [_cells(outcome, found, with_shares) for outcome in shown]
    kept = [index for index, column in enumerate(columns) if column]
    return [columns[index] for index in kept], [[line[index] for index in kept] for line in lines]


def _cells(outcome: Outcome, found: Inspection, with_shares: bool) -> list[str]:
    comparison = found.comparison
    forward = summary(outcome.forward)
    cells = [outcome.candidate + _mark(outcome, found), outcome.verdict, _with_spread(outcome.forward)]
    cells += [_with_spread(outcome.backward), report.microseconds(summary(found.host.get(outcome.candidate, [])))]
    cells += [report.times(comparison.speed(outcome)), report.rate(comparison.row.problem.flops(), forward)]
    if with_shares:
        shares = found.shares(outcome, "forward")
        cells += [f"{shares[name]:.0%}" if shares else "-" for name in roofline.Bounds._fields]
    return [
        *cells,
        report.mebibytes(outcome.memory),
        report.error(outcome.error("out")),
        report.error(outcome.error("dq", "dk", "dv")),
    ]


def _mark(outcome: Outcome, found: Inspection) -> str:
    """What the planner and PyTorch's dispatcher chose, beside the names."""
    if outcome.candidate == OURS:
        return f" = {found.plan.backend}"
    chosen = found.torch_choice()
    return f" = {chosen}" if outcome.candidate == TORCH_DEFAULT and chosen else ""


def _with_spread(samples: list[list[float]]) -> str:
    timed = summary(samples)
    return "-" if timed is None else f"{report.milliseconds(timed)} [{report.spread(timed)}]"


def choices(found: Inspection) -> list[str]:
    """Both orders of preference."""
    ours = dict.fromkeys(rule.prefer for rule in RULES if rule.when(found.plan.problem, found.target))
    lines = [f"speed: against the fastest of PyTorch's paths, {_best_peer(found.comparison)}"]
    if found.priority:
        lines.append(f"PyTorch's order: {' > '.join(found.priority)}; it ran {found.torch_choice() or 'unseen'}")
    return [*lines, f"our order for this problem: {' > '.join(ours)}; it runs {found.plan.backend}"]


def _best_peer(comparison: Comparison) -> str:
    peer = comparison.best_peer()
    return peer.candidate if peer else "of which none ran here"


def ceilings(found: Inspection) -> list[str]:
    """The three rooflines of each direction."""
    lines = []
    for what in found.directions:
        bounds = found.bounds(what)
        if bounds is not None and found.rates is not None:
            each = ", ".join(f"{name} {report.significant(value * 1e6)} us" for name, value in bounds._asdict().items())
            least = roofline.work(found.plan.problem, what)
            known = f"{least.intensity:.0f} FLOP a byte, bound by {bounds.by}; peaks: {found.rates.source}"
            lines.append(f"{what} at least: {each}; {known}")
    return lines


def kernel_lines(found: Inspection) -> list[str]:
    """What each candidate launched, in order."""
    lines = ["kernels that ran, in order:"] if found.profiles else []
    for name, profiled in found.profiles.items():
        if "error" in profiled:
            lines.append(f"  {name}: not seen: {profiled['error']}")
            continue
        for what, part in profiled.items():
            lines.append(f"  {name}, {what}:")
            launches = merged(part["launches"])
            lines += [f"    {_launch_text(launch)}" for launch in launches]
            if not launches:
                lines.append("    none seen by the profiler")
    return lines


def merged(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launches of the same kernel one after the other become one entry with a count and their time together."""
    found = []
    for _, alike in groupby(launches, key=lambda launch: (launch["name"], launch["grid"], launch["block"])):
        first, *rest = alike
        together = [first, *rest]
        found.append(first | {key: sum(launch[key] for launch in together) for key in ("us", "count")})
    return found


def _launch_text(launch: dict[str, Any]) -> str:
    name = launch["name"]
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    text = f"{launch['count']} x {name}: {report.significant(launch['us'])} us"
    if not launch["grid"]:
        return text
    sizes = f"grid {'x'.join(map(str, launch['grid']))}, block {'x'.join(map(str, launch['block']))}"
    text += f", {sizes}, {(launch['smem_bytes'] or 0) / 1024:.1f} KiB shared, {launch['registers']} registers"
    build = launch.get("build", {})
    text += f", {build['spill_bytes']} bytes spilled" if "spill_bytes" in build else ""
    fits = launch.get("occupancy")
    text += f"; {fits['text']}" if fits else ""
    estimate = launch.get("estimated_occupancy")
    text += f", {estimate}% estimated by the profiler" if estimate is not None else ""
    if "instructions" in build:
        total = sum(build["instructions"].values())
        mix = ", ".join(f"{kind} {count / total:.0%}" for kind, count in list(build["instructions"].items())[:6])
        text += f"; {total} instructions: {mix}"
    return text


def counter_lines(found: Inspection) -> list[str]:
    """What Nsight Compute counted."""
    lines = ["by Nsight Compute:"] if found.counters else []
    for name, counted in found.counters.items():
        if isinstance(counted, str):
            lines.append(f"  {name}: {counted}")
            continue
        for kernel in counted:
            each = ", ".join(f"{what} {value:.1f}{unit}" for what, (value, unit) in kernel["counters"].items())
            lines.append(f"  {name}, {kernel['kernel'][:60]}: {each}")
    return lines


def troubles(found: Inspection) -> list[str]:
    return [
        f"{outcome.candidate} {outcome.verdict}: {line}"
        for outcome in found.comparison.outcomes
        if outcome.verdict != REFUSED
        for line in outcome.because
    ]


def experiment(found: Inspection) -> list[str]:
    """The article's settings, where they were asked for."""
    lines = flags.findings(found.comparison, found.profiles)
    return ["PyTorch's switches:", *(f"  {line}" for line in lines)] if lines else []


def refusal_lines(found: Inspection) -> list[str]:
    refused = found.refusals()
    if not refused:
        return []
    width = max(map(len, refused))
    lines = ["refused:"]
    for name, (first, *rest) in refused.items():
        lines.append(f"  {name.ljust(width)}  {first}")
        lines += [f"  {' ' * width}  {reason}" for reason in rest]
    return lines


def disagreements(found: Inspection) -> list[str]:
    return [
        f"disagreement about {name}: our model of its rules says {'; '.join(modelled) or 'yes'}; "
        f"PyTorch says {'; '.join(said) or 'yes'}"
        for name, (modelled, said) in found.disagreements().items()
    ]
