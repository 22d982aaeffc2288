"""What `tilewise inspect` prints, from the record that its JSON holds: the outcome and the table, and with -v the rest.

The sentence and the table come first and fit 80 columns. Everything that spoils a measurement is told without being
asked for: wrong and dying candidates, disagreements with PyTorch, a loaded machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...problem import Problem
from .. import report, units
from ..candidates import flags
from ..candidates.names import OURS, PYTHON, TORCH_DEFAULT
from ..measure import words
from ..measure.compare import REFUSED, UNVERIFIED, Comparison, Outcome, read_comparison, summary
from ..model import roofline
from ..studies import switches
from ..studies.inspect import sentence
from .html import device_of
from .views import FORMULA, in_steps, kernel_name

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_NAME = 110
_LONGEST_CANDIDATE = 20

Told = dict[str, Any]


def show(told: Told, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print what `Inspection.to_dict` returned, with its provenance."""
    comparison = read_comparison(told["comparison"])
    print(_sentence(told, comparison))
    for text in comparison.noise:
        print(f"noisy: {text}")
    if not comparison.complete:
        print("interrupted: only what was measured is here")
    if quiet:
        return
    print("\n".join(head(told, comparison)))
    report.print_table(*brief_table(told, comparison))
    parts: list[Callable[[Told, Comparison], list[str]]] = [legend, same_kernels, troubles, disagreements, experiment]
    parts += [kernel_lines, counter_lines, refusal_lines, ceilings, choices] if verbose else [refused_names]
    for line in (line for part in parts for line in part(told, comparison)):
        print(line)
    if verbose:
        print(FORMULA)
        report.print_table(*table(told, comparison))
    for line in ending(told, comparison):
        print(line)


def _sentence(told: Told, comparison: Comparison) -> str:
    return sentence(comparison, told["plan"]["backend"], torch_choice(told))


def torch_choice(told: Told) -> str:
    return kernel_name(told["torch"]["choice"])


def head(told: Told, comparison: Comparison) -> list[str]:
    problem = Problem.from_dict(told["plan"]["problem"])
    provenance = told.get("provenance") or {}
    versions = provenance.get("versions", {})
    device = device_of(provenance, comparison.row.device) + (f", torch {versions['torch']}" if versions else "")
    compared = f"verified against float64 ({comparison.compared})" if comparison.compared else "not verified"
    return [f"{problem} on {device}", f"{compared}; times by {comparison.row.timing}"]


def baseline(comparison: Comparison) -> Outcome | None:
    """What the table holds everybody against: PyTorch's default, or the best of its kernels where that did not run."""
    return comparison.default() or comparison.best_peer()


def brief_table(told: Told, comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """One line per entry, in 80 columns. Candidates that ran the same kernels are named below; settings of PyTorch's
    switches keep their lines, since which of them come to the same is the question."""
    base = baseline(comparison)
    directions = comparison.row.timed
    columns = ["candidate", *(f">{what}" for what in directions), ">speed", ">peak", ">error"]
    shown = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    entries = [outcome for outcome in shown if not comparison.same_as(outcome) or outcome.candidate in flags.SWITCHES]
    rows = []
    for outcome in entries:
        times = [_median(getattr(outcome, what)) for what in directions]
        speed = "1" if outcome is base else words.cell(comparison.versus(outcome, base))
        error = words.error_cell(outcome) if outcome.errors else "failed" if outcome.failed else "-"
        rows.append([_name(outcome, told), *times, speed, _of_peak(told, outcome), error])
    return columns, rows


def _median(samples: list[list[float]]) -> str:
    timed = summary(samples)
    return "-" if timed is None else units.duration(timed["median"])


def _of_peak(told: Told, outcome: Outcome) -> str:
    """The share of the ceiling that binds, of the forward: no kernel can pass 100% of it."""
    shares = (told.get("shares", {}).get(outcome.candidate) or {}).get("forward")
    if not shares or max(shares.values()) > 1.0:
        return "-"
    return f"{max(shares.values()):.0%}"


def _name(outcome: Outcome, told: Told) -> str:
    """With what the planner and PyTorch's dispatcher chose."""
    name = outcome.candidate
    if name.startswith(PYTHON):
        return name.removeprefix(PYTHON).rpartition("/")[2][-_LONGEST_CANDIDATE:]
    if name == OURS:
        return f"{name}={told['plan']['backend']}"
    chosen = torch_choice(told)
    return f"{name}={chosen.removeprefix('torch-')}" if name == TORCH_DEFAULT and chosen else name


def legend(told: Told, comparison: Comparison) -> list[str]:
    cells = [row[-3] for row in brief_table(told, comparison)[1]]
    marked = any(mark in cell for cell in cells for mark in "~=?")
    base = baseline(comparison)
    found = (
        [f"speed: against {base.candidate}, with its 99% interval; peak: share of what the device can do"]
        if base
        else []
    )
    found += [words.LEGEND] if marked else []
    if comparison.unsettled() and comparison.complete:
        found.append("rounds ended before every interval was narrow; a quieter machine or --repeat 50 tells more")
    return found


def same_kernels(told: Told, comparison: Comparison) -> list[str]:
    merged_into: dict[str, list[str]] = {}
    for outcome in comparison.outcomes:
        if (leader := comparison.same_as(outcome)) and outcome.candidate not in flags.SWITCHES:
            merged_into.setdefault(leader, []).append(outcome.candidate)
    return [f"not listed, for they run what {leader} runs: {', '.join(names)}" for leader, names in merged_into.items()]


def table(told: Told, comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Everything in figures. Refused candidates have no line here: their reasons are listed apart."""
    with_backward, on_gpu = comparison.row.problem.needs_grad, comparison.row.device.startswith("cuda")
    with_shares = told["rates"] is not None
    columns = ["candidate", "verdict", ">forward ms", ">backward ms" if with_backward else ""]
    columns += [">host us" if on_gpu else "", ">speed", ">TFLOP/s"]
    columns += [">of compute", ">of memory", ">of exp"] if with_shares else []
    columns += [">extra MiB", ">error", ">grad error" if with_backward else "", ">in budget"]
    shown = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    rows = [_cells(outcome, told, comparison, with_shares) for outcome in shown]
    kept = [index for index, column in enumerate(columns) if column]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _cells(outcome: Outcome, told: Told, comparison: Comparison, with_shares: bool) -> list[str]:
    forward = summary(outcome.forward)
    host = told["host_seconds"].get(outcome.candidate)
    cells = [outcome.candidate, outcome.verdict, _with_spread(outcome.forward), _with_spread(outcome.backward)]
    cells += [report.microseconds(host), words.cell(comparison.versus(outcome, comparison.best_peer()))]
    cells.append(report.rate(comparison.row.problem.flops(), forward))
    if with_shares:
        shares = (told["shares"].get(outcome.candidate) or {}).get("forward")
        cells += [f"{shares[name]:.0%}" if shares else "-" for name in roofline.Bounds._fields]
    budgets = "-" if not outcome.errors else "no" if outcome.failed else "yes"
    errors = (report.error(outcome.error("out")), report.error(outcome.error("dq", "dk", "dv")))
    return [*cells, report.mebibytes(outcome.memory), *errors, budgets]


def _with_spread(samples: list[list[float]]) -> str:
    timed = summary(samples)
    return "-" if timed is None else f"{report.milliseconds(timed)} [{report.spread(timed)}]"


def choices(told: Told, comparison: Comparison) -> list[str]:
    """Both orders of preference."""
    peer = comparison.best_peer()
    found = [f"speed: against the fastest of PyTorch's paths, {peer.candidate if peer else 'of which none ran here'}"]
    order, choice = told["torch"]["priority"], torch_choice(told)
    if order and choice in ("", order[0]):
        found.append(f"PyTorch's order for this problem: {' > '.join(order)}")
    elif choice:  # a record of an earlier release has the order of PyTorch's settings, which is another on some GPUs
        found.append(f"PyTorch ran {choice}")
    ours = told.get("our_order", [])
    return [*found, *([f"our order for this problem: {' > '.join(ours)}"] if ours else [])]


def ceilings(told: Told, comparison: Comparison) -> list[str]:
    """The three rooflines of each direction."""
    found = []
    for what, part in told["roofline"].items():
        seconds, work = part["seconds"], part["work"]
        if seconds is not None and told["rates"] is not None:
            each = ", ".join(f"{name} {units.duration(seconds[name])}" for name in roofline.Bounds._fields)
            by = roofline.Bounds(*(seconds[name] for name in roofline.Bounds._fields)).by
            known = f"{work['flops'] / max(1, work['bytes']):.0f} FLOP per byte, bound by {by}"
            found.append(f"{what} takes at least: {each}; {known}; peaks: {told['rates']['source']}")
    return found


def kernel_lines(told: Told, comparison: Comparison) -> list[str]:
    """What each candidate launched, in order."""
    found = ["kernels that ran, in order:"] if told["profiles"] else []
    for name, profiled in told["profiles"].items():
        if "error" in profiled:
            found.append(f"  {name}: not seen: {profiled['error']}")
            continue
        for what, part in profiled.items():
            found.append(f"  {name}, {what}{_gaps(part)}:")
            launches = in_steps(part["launches"])
            found += [f"    {_launch_text(launch)}" for launch in launches]
            if not launches:
                found.append("    none seen by the profiler")
    return found


def _gaps(part: dict[str, Any]) -> str:
    """How long the device was busy, and idle between the kernels, where there are several."""
    gaps = part.get("gaps")
    if not gaps or gaps["launches"] < 2:
        return ""
    busy, idle = units.duration(gaps["busy_us"] * 1e-6), units.duration(gaps["idle_us"] * 1e-6)
    launching = f"; the host launched them in {units.duration(gaps['host_us'] * 1e-6)}" if gaps.get("host_us") else ""
    return f" ({gaps['launches']} launches: busy {busy}, idle between them {idle}{launching})"


def _launch_text(launch: dict[str, Any]) -> str:
    name = launch["name"]
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    text = f"{launch['count']} x {name}: {report.significant(launch['us'])} us"
    text += f" ({launch['step']})" if launch.get("step") else ""
    if not launch["grid"]:
        return text
    sizes = f"grid {'x'.join(map(str, launch['grid']))}, block {'x'.join(map(str, launch['block']))}"
    text += f", {sizes}, {(launch['smem_bytes'] or 0) / 1024:.1f} KiB shared, {launch['registers']} registers"
    build = launch.get("build", {})
    text += f", {build['spill_bytes']} bytes spilled" if "spill_bytes" in build else ""
    fits = launch.get("occupancy")
    text += f"; {fits['text']}" if fits else ""
    # 0 is what the profiler says of kernels whose occupancy it cannot tell, and of grids that leave most of a GPU idle.
    estimate = launch.get("estimated_occupancy")
    text += f", the profiler's estimate {estimate}%" if estimate else ""
    if "instructions" in build:
        total = sum(build["instructions"].values())
        mix = ", ".join(f"{kind} {count / total:.0%}" for kind, count in list(build["instructions"].items())[:6])
        text += f"; {total} instructions: {mix}"
    return text


def counter_lines(told: Told, comparison: Comparison) -> list[str]:
    """What Nsight Compute counted."""
    found = ["by Nsight Compute:"] if told["counters"] else []
    for name, counted in told["counters"].items():
        if isinstance(counted, str):
            found.append(f"  {name}: {counted}")
            continue
        for kernel in counted:
            each = ", ".join(f"{what} {value:.1f}{unit}" for what, (value, unit) in kernel["counters"].items())
            found.append(f"  {name}, {kernel['kernel'][:60]}: {each}")
    return found


def troubles(told: Told, comparison: Comparison) -> list[str]:
    return [
        f"{outcome.candidate} {outcome.verdict}: {line}"
        for outcome in comparison.outcomes
        if outcome.failed or outcome.verdict == UNVERIFIED
        for line in outcome.because
    ]


def experiment(told: Told, comparison: Comparison) -> list[str]:
    """The article's settings, where they were asked for."""
    found = switches.findings(comparison, told["profiles"])
    return ["PyTorch's switches:", *(f"  {line}" for line in found)] if found else []


def refused_names(told: Told, comparison: Comparison) -> list[str]:
    """Who did not take the problem, without the reasons."""
    rest = ", ".join(_refused(told))
    return [*_need_a_gpu(told), *([f"did not take it, for reasons that -v tells: {rest}"] if rest else [])]


def refusal_lines(told: Told, comparison: Comparison) -> list[str]:
    """Every reason of everybody; those that need a GPU in a line, where there is none."""
    refused = _refused(told)
    width = max(map(len, refused), default=0)
    found = [*_need_a_gpu(told), *(["refused:"] if refused else [])]
    for name, (first, *rest) in refused.items():
        found.append(f"  {name.ljust(width)}  {first}")
        found += [f"  {' ' * width}  {reason}" for reason in rest]
    return found


def _refused(told: Told) -> dict[str, list[str]]:
    return {name: reasons for name, reasons in told["refused"].items() if name not in told.get("gpu_only", ())}


def _need_a_gpu(told: Told) -> list[str]:
    return [f"need a GPU: {', '.join(told['gpu_only'])}"] if told.get("gpu_only") else []


def ending(told: Told, comparison: Comparison) -> list[str]:
    """Without a GPU: why this runs here, what an H200 would run, and the nearest figures recorded on one."""
    there = told.get("elsewhere")
    if not there:
        return []
    ours = next((outcome for outcome in comparison.timed() if outcome.candidate == OURS), None)
    speed = comparison.versus(ours, comparison.default()) if ours else None
    config = f" with {there['config']}" if there["config"] else ""
    verdict = f", {words.claim(speed)} PyTorch's default{words.interval(speed)}" if speed else ""
    labelled = [
        ("here", f"{told['plan']['backend']}{verdict}"),
        ("because", told["plan"]["because"]),
        (there["gpu"], f"{there['backend']}{config}"),
        ("because", there["because"]),
    ]
    figures: list[str] = []
    if recorded := there.get("recorded"):
        which = "" if recorded["same"] else ", the nearest problem on record"
        labelled += [("recorded", f"{recorded['problem']}{which}"), ("in", recorded["record"])]
        speeds = recorded["speeds"]
        rows = [[f"  {name}", units.duration(one), speeds.get(name, "")] for name, one in recorded["seconds"].items()]
        figures = report.plain_table(["  candidate", f">{recorded['what']}", ">tilewise against it"], rows)
    width = len(there["gpu"]) + 2
    return ["", *(f"{f'{label}:':{width}}{text}" for label, text in labelled), *figures]


def disagreements(told: Told, comparison: Comparison) -> list[str]:
    return [
        f"disagreement about {name}: our model of its rules says {'; '.join(modelled) or 'yes'}; "
        f"PyTorch says {'; '.join(said) or 'yes'}"
        for name, (modelled, said) in told.get("disagreements", {}).items()
    ]
