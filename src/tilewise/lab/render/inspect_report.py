"""The report of `tilewise inspect`, from its record: the answer, every candidate, the kernels that ran, the choices.

The first table fits 80 columns. Everything that spoils a measurement stands before it: candidates that are wrong or
died, a loaded machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...problem import Problem
from .. import report, units
from ..candidates import flags
from ..candidates.names import PYTHON, TORCH_DEFAULT
from ..measure import words
from ..measure.compare import UNVERIFIED, VERIFIED, Comparison, read_comparison
from ..measure.statistics import FASTER, INDISTINGUISHABLE, TOO_FEW, Speed
from ..report import (
    Bad,
    Bars,
    Candidate,
    Code,
    Dot,
    Facts,
    Fold,
    Good,
    Heading,
    Kernel,
    Lane,
    Lanes,
    Line,
    Lines,
    Ours,
    Phrase,
    Report,
    Roofline,
    Section,
    Span,
    Table,
    Words,
)
from ..studies import switches
from ..studies.inspect import sentence
from . import views
from .roles import short_name
from .views import DEFAULT, FORMULA, OURS, Entry, View, view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..report import Block, Inline

_SHORT = {"exponentials": "exp"}
_ABOUT_GPU = (
    "The profiler watches one call on an idle device, so a gap is mostly the host's time between two launches, and a "
    "lane is longer than the call that was timed."
)
_MIN_GAP = 0.1  # microseconds: less is the clock's resolution
_MAX_SPANS = 200  # drawn in one lane
_MAX_NAME = 20  # of a user's function in the first table

Told = dict[str, Any]


def report_of(told: Told) -> Report:
    """Of what `Inspection.to_dict` returned, with its provenance."""
    comparison, seen = read_comparison(told["comparison"]), view(told["comparison"])
    ours, default, choice = seen[OURS], seen[DEFAULT], views.kernel_name(told["torch"].get("choice") or "")
    unjudged = [entry for entry in seen.entries if entry.verdict == UNVERIFIED and entry.because]
    facts = [
        _against(ours, default), *report.machine_of(told.get("provenance") or {}, told["comparison"]["device"]),
        _verified(seen),
    ]  # fmt: skip
    return Report(
        "inspect",
        Code(Problem.from_dict(told["plan"]["problem"])),
        claim(ours, default),
        sentence(comparison, told["plan"]["backend"], choice),
        [fact for fact in facts if fact],
        f"tilewise runs {told['plan']['backend']}: {told['plan']['because']}."
        + (f" PyTorch's default ran {choice}." if choice else ""),
        [*views.cautions(seen), *map(_trouble, unjudged)],
        list(map(_trouble, seen.failures)),
        [
            _candidates(told, seen, choice),
            *_ceilings(told, seen),
            *_kernels(told, seen),
            *_counters(told),
            *report.refusals(told["refused"], gpu_only=told.get("gpu_only", ())),
            *_disagreements(told),
            *_switches(told, comparison),
            _choices(told, seen, choice),
            *_elsewhere(told.get("elsewhere")),
        ],
    )


def _trouble(entry: Entry) -> str:
    return f"{entry.name}: {'; '.join([entry.verdict, *entry.because])}"


def claim(ours: Entry | None, default: Entry | None) -> Inline:
    """What may be said of ours against PyTorch's default."""
    if ours is None or not ours.seconds:
        return "tilewise has no time here"
    if default is None or not default.seconds or ours.speed_default is None:
        return Phrase((Ours(units.duration(ours.median)), " per call"))
    speed = ours.speed_default
    if speed.differs:
        said = words.claim(speed).removesuffix(" than")
        return Phrase((Ours(said) if speed.verdict == FASTER else Bad(said), " than PyTorch's default"))
    if speed.same:
        return "The same kernels as PyTorch's default"
    if speed.verdict == TOO_FEW:
        return "Too few rounds to tell it from PyTorch's default"
    return "Indistinguishable from PyTorch's default"


def _against(ours: Entry | None, default: Entry | None) -> str:
    if ours is None or default is None or not ours.seconds or not default.seconds:
        return ""
    speed = ours.speed_default
    between = f", a ratio of {words.bounds(speed)}" if speed and speed.verdict == INDISTINGUISHABLE else ""
    return f"{units.duration(ours.median)} against {units.duration(default.median)}{between}"


def _verified(seen: View) -> str:
    asked = [entry for entry in seen.entries if entry.name in (OURS, DEFAULT)]
    return Good("verified") if asked and all(entry.verdict == VERIFIED for entry in asked) else Bad("not verified")


def _candidates(told: Told, seen: View, choice: str) -> Section:
    shown, folded = seen.unfolded()
    blocks: list[Block] = []
    what, default = " and ".join(seen.timed), seen[DEFAULT]
    if shown:
        reference = ("PyTorch's default", default.median) if default and default.seconds else None
        clock = units.Clock.of(entry.median for entry in shown)
        caption = f"Time of one call, {what}: shorter is better"
        blocks.append(Bars([_bar(entry, clock) for entry in shown], caption, reference=reference))
    if folded:
        clock = units.Clock.of(entry.median for entry in folded)
        names = ", ".join(f"{entry.name} {clock.text(entry.median)}" for entry in folded)
        slow = Bars([_bar(entry, clock) for entry in folded], f"{what}, on a scale of their own")
        blocks.append(Fold(f"{len(folded)} more, over {views.FOLD_OVER:g}x slower than the fastest: {names}", [slow]))
    against = "PyTorch's default" if default else seen.best_peer
    basis = next((words.basis(speed) for entry in seen.ranked() if (speed := _speed(entry))), "")
    blocks += [Words(f"Speeds are against {against}; in brackets the {basis}.", is_note=True)] if basis else []
    compared = f"Verified against float64: {seen.compared}." if seen.compared else "Not verified."
    compared += f" Times by {seen.timing}."
    blocks.append(_table(told, seen, [*shown, *folded, *seen.failures]))
    blocks.append(Words(f"{compared} {FORMULA}.", is_note=True))
    return Section("Candidates", blocks, brief=(), text=[_brief(told, seen, choice), *_legend(seen, against, compared)])


def _speed(entry: Entry) -> Speed | None:
    return entry.speed_default or entry.speed


def _brief(told: Told, seen: View, choice: str) -> Table:
    """A line per entry, in 80 columns. Candidates that ran the same kernels are named below; settings of PyTorch's
    switches keep their lines, since which of them come to the same is the question."""
    rows: list[list[Inline]] = []
    base = seen[DEFAULT] or (seen[seen.best_peer] if seen.best_peer else None)
    settings = [one for entry in seen.entries for one in entry.also if one.name in flags.SWITCHES]
    for entry in (*seen.entries, *settings):
        times = [units.duration(entry.parts[what]["median"]) if what in entry.parts else "-" for what in seen.timed]
        error = "failed" if entry.failed else "-"
        if worst := entry.error(*entry.errors):
            error = f"{units.error(worst[1])} {'over' if entry.failed else 'ok'}"
        shares = (told.get("shares", {}).get(entry.name) or {}).get("forward")
        peak = f"{max(shares.values()):.0%}" if shares and max(shares.values()) <= 1.0 else "-"
        speed = "1" if entry is base else words.cell(_speed(entry))
        rows.append(
            [_name(entry.name, told, choice), *times, speed, peak, "failed" if entry.failed and not worst else error]
        )
    return Table(["candidate", *(f">{what}" for what in seen.timed), ">speed", ">peak", ">error"], rows)


def _name(name: str, told: Told, choice: str) -> str:
    """With what the planner and PyTorch's dispatcher chose."""
    if name.startswith(PYTHON):
        return name.removeprefix(PYTHON).rpartition("/")[2][-_MAX_NAME:]
    if name == OURS:
        return f"{name}={told['plan']['backend']}"
    return f"{name}={choice.removeprefix('torch-')}" if name == TORCH_DEFAULT and choice else name


def _legend(seen: View, against: str, compared: str) -> list[Block]:
    found = [compared, "peak: share of what the device can do"]
    found[1:1] = [f"speed: against {against}, with its 99% interval"] if against else []
    found += [words.LEGEND] if any(mark in words.cell(_speed(one)) for one in seen.entries for mark in "~=?") else []
    for entry in seen.entries:
        names = [one.name for one in entry.also if one.name not in flags.SWITCHES]
        found += [f"not listed, for they run what {entry.name} runs: {', '.join(names)}"] if names else []
    return [Words(line) for line in found]


def _bar(entry: Entry, clock: units.Clock) -> Line:
    assert entry.seconds is not None
    also = f"also {', '.join(other.name for other in entry.also)}" if entry.also else ""
    aside = "the default" if entry.name == DEFAULT else words.phrase(_speed(entry))
    return Line(
        entry.name, entry.median, clock.text(entry.median), low=entry.seconds["p20"], high=entry.seconds["p80"],
        aside=aside, chosen=entry.name == OURS, small=also,
    )  # fmt: skip


def _table(told: Told, seen: View, entries: Sequence[Entry]) -> Table:
    columns = ["candidate", "verdict"]
    for what in seen.timed:
        columns += [f">{what}", ">p20 to p80"]
    peer = "" if seen.best_peer in (DEFAULT, *_with(seen[DEFAULT])) else seen.best_peer
    columns += [f">against {peer}"] if peer else []
    columns += [">host", ">TFLOP/s", ">extra memory", ">error", ">of budget", ">grad error", ">of budget"]
    flops = told["comparison"]["flops"]
    timed = flops.get("timed") or sum(flops[what] for what in seen.timed if what in flops)
    every = [one for entry in entries for one in (entry, *entry.also)]
    rows = [_cells(one, seen, told["host_seconds"].get(one.name), timed, peer) for one in every]
    return Table(columns, rows, "Candidates", [one.name == OURS for one in every])


def _cells(entry: Entry, seen: View, host: dict[str, float] | None, flops: float, peer: str) -> list[Inline]:
    cells: list[Inline] = [Candidate(entry.name), Bad(entry.verdict) if entry.failed else entry.verdict]
    for what in seen.timed:
        part = entry.parts.get(what)
        clock = units.Clock.of([part["median"]]) if part else None
        cells += (
            [units.duration(part["median"]), f"{clock.spread(part)} {clock.unit}"] if part and clock else ["-", "-"]
        )
    cells += [words.cell(entry.speed)] if peer else []
    cells.append(units.duration(host["median"]) if host else "-")
    cells.append(units.significant(flops / entry.median / 1e12) if entry.seconds else "-")
    cells.append(units.size(entry.memory))
    return [*cells, *views.error_cells(entry, seen, "out"), *views.error_cells(entry, seen, "dq", "dk", "dv")]


def _with(entry: Entry | None) -> list[str]:
    return [other.name for other in entry.also] if entry else []


def _ceilings(told: Told, seen: View) -> list[Section]:
    """How near each comes to the three rooflines of each direction."""
    rates, title = told["rates"], "Share of the ceiling"
    if rates is None:
        unknown = "The peaks of this device are not known, so there is no ceiling to compare with."
        return [Section(title, [Words(unknown)], brief=())]
    blocks: list[Block] = []
    shown, folded = seen.unfolded()
    over = False
    for what, part in told["roofline"].items():
        bounds, timed = part["seconds"], [entry for entry in shown if what in entry.parts]
        if bounds is None or not timed:
            continue
        binding = max(bounds, key=bounds.__getitem__)
        bars = [_share(entry, bounds, what, binding) for entry in timed]
        over = over or any(one.value > 1 for one in bars)
        lines = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in bounds.items())
        intensity = part["work"]["flops"] / max(1, part["work"]["bytes"])
        caption = f"{what}: at least {units.duration(bounds[binding])}, by {binding} ({lines})"
        blocks += [Heading(what)] if len(told["roofline"]) > 1 else []
        blocks.append(
            Bars(bars, f"{caption}; {intensity:.0f} FLOP per byte", whole=True, columns=("share", "of the others"))
        )
        all_timed = [*timed, *(entry for entry in folded if what in entry.parts)]
        blocks.append(Fold("Roofline", [_roofline(part, all_timed, rates, what)]))
    if not blocks:
        return []
    why = f"The least work of the problem over the device's peaks ({rates['source']}), as a share of the measured time."
    why += " More than 100% says that a peak is known too low, not that a kernel passed it." if over else ""
    return [Section(title, [*blocks, Words(why, is_note=True)], brief=())]


def _share(entry: Entry, bounds: dict[str, float], what: str, binding: str) -> Line:
    seconds = entry.parts[what]["median"]
    share = bounds[binding] / seconds
    rest = " · ".join(f"{_SHORT.get(name, name)} {units.percent(bound / seconds)}" for name, bound in bounds.items()
                      if name != binding)  # fmt: skip
    return Line(entry.name, share, units.percent(share), aside=report.More(rest), chosen=entry.name == OURS)


def _roofline(part: Told, entries: Sequence[Entry], rates: Told, what: str) -> Roofline:
    work = part["work"]
    intensity = work["flops"] / max(1, work["bytes"])
    dots = [Dot(entry.name, intensity, work["flops"] / entry.parts[what]["median"]) for entry in entries]
    min_seconds = part["seconds"].get("exponentials")
    flats = [("that the exponentials allow", work["flops"] / min_seconds)] if min_seconds and work["flops"] else []
    return Roofline(dots, rates["flops"], rates["bytes"], f"Roofline of the {what}", flats)


def _kernels(told: Told, seen: View) -> list[Section]:
    """Per candidate and direction a lane, which unfolds into its kernels."""
    order = [one.name for entry in seen.ranked() for one in (entry, *entry.also)]
    profiles = sorted(told["profiles"].items(), key=lambda one: order.index(one[0]) if one[0] in order else len(order))
    on_gpu = told["comparison"]["device"].startswith("cuda")
    lanes, unseen, full = [], [], dict[str, None]()
    for name, profiled in profiles:
        if "error" in profiled:
            unseen.append(Words(f"{name} was not seen: {profiled['error']}"))
            continue
        lanes += [_lane(name, what, part, len(profiled) > 1, on_gpu) for what, part in profiled.items()]
        every = [launch["name"] for part in profiled.values() for launch in part["launches"]]
        full |= dict.fromkeys(one for one in every if short_name(one) != one)
    if not lanes and not unseen:
        return []
    caption = (
        "One call of each, as the profiler saw it, every lane as wide as its own time. A lane unfolds into its steps"
    )
    about = _ABOUT_GPU if on_gpu else "Operators by their own time, without that of what they call."
    names = [Fold(f"Full names of {len(full)} kernels", [Words(Lines(map(Code, full)))])] if full else []
    drawn = [Lanes(lanes, caption)] if lanes else []
    return [Section("Kernels", [*drawn, *unseen, Words(about, is_note=True), *names], brief=())]


def _lane(name: str, what: str, part: Told, several: bool, on_gpu: bool) -> Lane:
    launches = part["launches"]
    summed = any(launch["count"] > 1 for launch in launches) or len(launches) > _MAX_SPANS
    spans = [Span(launch["name"], launch["start_us"], launch["us"]) for launch in launches]
    count = sum(launch["count"] for launch in launches)
    counted = units.counted(count, "launch", "launches") if on_gpu else units.counted(count, "operator call")
    small = f"{f'{what}, ' if several else ''}{counted}{', summed by kernel' if summed else ''}"
    return Lane(name, small, spans, [*_gap_note(part), _kernel_table(launches, summed)], summed, name == OURS)


def _gap_note(part: Told) -> list[Block]:
    """What the profiler saw of the whole call, where the record says it."""
    gaps = part.get("gaps")
    if not gaps or not gaps["launches"]:
        return []
    busy, idle, host = (units.duration(gaps[name] * 1e-6) for name in ("busy_us", "idle_us", "host_us"))
    text = f"The device was busy for {busy} and idle for {idle} in between; the host launched for {host}."
    return [Words(text, is_note=True)]


def _kernel_table(launches: Sequence[Told], summed: bool) -> Block:
    if not launches:
        return Words("The profiler saw no kernel.")
    steps = views.in_steps(launches)
    total = sum(step["us"] for step in steps) or 1.0
    columns = [
        "kernel", "operator", ">launches", ">gap before", ">time", ">share", ">grid", ">block", ">registers",
        ">shared memory", ">spilled", ">occupancy", ">blocks per SM", "limited by", ">waves", ">of the last empty",
        ">profiler's occupancy", "instructions",
    ]  # fmt: skip
    return Table(columns, [_kernel_cells(step, total, summed) for step in steps], "Kernels")


def _kernel_cells(step: Told, total: float, summed: bool) -> list[Inline]:
    build, fits = step.get("build") or {}, step.get("occupancy")
    cells: list[Inline] = [
        Kernel(step["name"]),
        str(step.get("step") or "").removeprefix("aten::") or "-",
        str(step["count"]),
        "-" if summed or step["gap"] < _MIN_GAP else units.duration(step["gap"] * 1e-6),
        units.duration(step["us"] * 1e-6),
        units.percent(step["us"] / total),
    ]
    if not step["grid"]:
        return [*cells, *["-"] * 12]
    cells += [" x ".join(map(str, step["grid"])), " x ".join(map(str, step["block"])), str(step["registers"])]
    cells += [units.size(step["smem_bytes"] or 0), f"{build['spill_bytes']} bytes" if "spill_bytes" in build else "-"]
    if fits:
        cells += [units.percent(fits["share"]), str(fits["blocks_per_sm"]), fits["limiter"].partition(";")[0]]
        cells += [f"{fits['waves']:.2f}", f"{fits['tail']:.0%}" if fits["tail"] >= 0.005 else "-"]
    else:
        cells += ["-"] * 5
    # 0 is what the profiler says of kernels whose occupancy it cannot tell, and of grids that leave most of a GPU idle.
    estimate = step.get("estimated_occupancy")
    mix = build.get("instructions") or {}
    total_mix = sum(mix.values()) or 1
    each = ", ".join(f"{kind} {units.percent(count / total_mix)}" for kind, count in list(mix.items())[:6])
    return [*cells, f"{estimate}%" if estimate else "-", f"{total_mix}: {each}" if each else "-"]


def _counters(told: Told) -> list[Section]:
    counted = {name: found for name, found in told["counters"].items() if not isinstance(found, str)}
    untold = [Words(f"{name}: {found}") for name, found in told["counters"].items() if isinstance(found, str)]
    names = dict.fromkeys(counter for kernels in counted.values() for one in kernels for counter in one["counters"])
    rows: list[list[Inline]] = []
    for name, kernels in counted.items():
        for kernel in kernels:
            values = [kernel["counters"].get(counter) for counter in names]
            cells = [f"{value[0]:.1f}{value[1]}" if value else "-" for value in values]
            rows.append([Code(name), Kernel(kernel["kernel"]), *cells])
    if not rows and not untold:
        return []
    tables = [Table(("candidate", "kernel", *(f">{name}" for name in names)), rows, "Counters")] if rows else []
    return [Section("Counters by Nsight Compute", [*tables, *untold], brief=())]


def _disagreements(told: Told) -> list[Section]:
    """Where our model of PyTorch's rules is not what PyTorch does."""
    found = told.get("disagreements") or {}
    rows = [[Code(name), *("; ".join(said) or "takes it" for said in pair)] for name, pair in found.items()]
    table = Table(("kernel", "our model of its rules", "PyTorch"), rows, "Disagreements")
    return [Section("Our model and PyTorch disagree", [table])] if rows else []


def _switches(told: Told, comparison: Comparison) -> list[Section]:
    """The article's settings, where they were asked for."""
    findings = switches.findings(comparison, told["profiles"])
    return [Section("PyTorch's switches", [Words(Lines(findings))])] if findings else []


def _choices(told: Told, seen: View, choice: str) -> Section:
    """How the planner and PyTorch chose."""
    plan = told["plan"]
    order = [views.kernel_name(str(name)) for name in told["torch"].get("priority") or ()]
    # An order of PyTorch's settings, which older records hold, need not be the one that its dispatcher follows.
    theirs = " > ".join(order) if order and choice in ("", order[0]) else ""
    pairs: list[tuple[str, str]] = [
        ("problem", Code(Problem.from_dict(plan["problem"]))),
        ("backend", plan["backend"]),
        ("because", plan["because"]),
        ("configuration", str(plan.get("config") or "")),
        ("launch", "; ".join(plan.get("launch") or [])),
        ("our order", " > ".join(told.get("our_order") or ())),
        ("PyTorch's default ran", choice or "not seen"),
        ("PyTorch's order", theirs),
        ("fastest of PyTorch's paths", seen.best_peer),
    ]
    return Section("Choices", [Facts([(name, value) for name, value in pairs if value])], brief=())


def _elsewhere(there: Told | None) -> list[Section]:
    """What an H200 would run, and the nearest figures recorded on one."""
    if not there:
        return []
    runs = [("it would run", there["backend"]), ("configuration", there["config"] or ""), ("because", there["because"])]
    blocks: list[Block] = [Facts([(name, value) for name, value in runs if value])]
    if recorded := there.get("recorded"):
        seconds, speeds = recorded["seconds"], recorded["speeds"]
        clock = units.Clock.of(seconds.values())
        bars = [
            Line(name, one, clock.text(one), chosen=name == OURS,
                 aside=f"tilewise {speeds[name]}" if name in speeds else "")
            for name, one in seconds.items()
        ]  # fmt: skip
        which = "this problem" if recorded["same"] else "the nearest problem on record"
        blocks.append(Bars(bars, f"Recorded there, {recorded['what']} of {which}: shorter is better",
                           columns=(recorded["what"], "against it")))  # fmt: skip
        source = Phrase((Code(recorded["problem"]), ", from ", Code(recorded["record"]), "."))
        blocks.append(Words(source, is_note=True))
    return [Section(f"On an {there['gpu']}", blocks)]
