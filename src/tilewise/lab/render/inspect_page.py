"""The page of `tilewise inspect`, from what `--json` prints and a record holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...problem import Problem
from .. import units
from ..measure import words
from ..measure.compare import read_comparison
from ..measure.statistics import FASTER, INDISTINGUISHABLE, SAME, TOO_FEW, Speed
from ..studies import switches
from . import charts, views
from .html import (
    Head,
    Markup,
    Section,
    bad,
    code,
    compact_table,
    definitions,
    device_of,
    document,
    fold,
    listing,
    note,
    paragraph,
    refusals,
    section,
    subheading,
    table,
    tagged,
    torch_of,
)
from .roles import role_of, short_name
from .views import DEFAULT, FORMULA, OURS, Entry, View, view

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORT = {"exponentials": "exp"}
_ABOUT_GPU = (
    "The profiler watches one call on an idle device, so a gap is mostly the host's time between two launches, and a "
    "lane is longer than the call that was timed."
)
_MIN_GAP = 0.1  # microseconds: less is the clock's resolution
_MAX_SPANS = 200  # drawn in one lane


def inspect_page(told: dict[str, Any]) -> str:
    problem = Problem.from_dict(told["plan"]["problem"])
    seen = view(told["comparison"])
    sections = [
        *_candidates(told, seen),
        *_elsewhere(told.get("elsewhere")),
        *_ceilings(told, seen, problem),
        *_kernels(told, seen),
        *_counters(told),
        *refusals(told["refused"], told.get("gpu_only", ())),
        *_choices(told, seen),
    ]
    return document(_head(told, seen, problem), sections, told)


def _head(told: dict[str, Any], seen: View, problem: Problem) -> Head:
    provenance = told.get("provenance") or {}
    ours, default = seen[OURS], seen[DEFAULT]
    facts = [fact for fact in (_against(ours, default), device_of(provenance, told["comparison"]["device"]),
                               torch_of(provenance), _verified(seen)) if fact]  # fmt: skip
    choice = views.kernel_name(told["torch"].get("choice") or "")
    ran = f" PyTorch's default ran {choice}." if choice else ""
    return Head(
        about=Markup(f"tilewise inspect · {code(problem)}"),
        claim=claim(ours, default),
        facts=facts,
        lead=f"tilewise runs {told['plan']['backend']}: {told['plan']['because']}.{ran}",
        warnings=cautions(seen),
        failures=[f"{entry.name}: {'; '.join([entry.verdict, *entry.because])}" for entry in seen.failures],
    )


def claim(ours: Entry | None, default: Entry | None) -> object:
    """What may be said of ours against PyTorch's default."""
    if ours is None or not ours.seconds:
        return "tilewise has no time here"
    if default is None or not default.seconds or ours.speed_default is None:
        return Markup(f'<span class="ours">{units.duration(ours.median)}</span> per call')
    speed = ours.speed_default
    if speed.differs:
        kind = "ours" if speed.verdict == FASTER else "bad"
        return Markup(f'<span class="{kind}">{_claim(speed)}</span> than PyTorch\'s default')
    if speed.same:
        return "The same kernels as PyTorch's default"
    if speed.verdict == TOO_FEW:
        return "Too few rounds to tell it from PyTorch's default"
    return "Indistinguishable from PyTorch's default"


def _against(ours: Entry | None, default: Entry | None) -> str:
    if ours is None or not ours.seconds:
        return ""
    if default is None or not default.seconds:
        return ""
    speed = ours.speed_default
    between = f", a ratio of {words.bounds(speed)}" if speed and speed.verdict == INDISTINGUISHABLE else ""
    return f"{units.duration(ours.median)} against {units.duration(default.median)}{between}"


def _verified(seen: View) -> object:
    asked = [entry for entry in seen.entries if entry.name in (OURS, DEFAULT)]
    if asked and all(entry.verdict == "verified" for entry in asked):
        return Markup('<span class="ok">verified</span>')
    return bad("not verified")


def cautions(seen: View) -> list[str]:
    found = [] if seen.complete else ["Interrupted: only what was measured is here."]
    found += [f"Noisy: {line}" for line in seen.noise]
    if seen.undecided:
        found.append("Time was up before the intervals were narrow: small differences are not decided.")
    return found


def _candidates(told: dict[str, Any], seen: View) -> list[Section]:
    shown, folded = seen.unfolded()
    parts: list[object] = []
    what = " and ".join(seen.timed)
    default = seen[DEFAULT]
    reference = ("PyTorch's default", default.median) if default and default.seconds else None
    if shown:
        clock = units.Clock.of(entry.median for entry in shown)
        items = [_bar(entry, clock) for entry in shown]
        legend = [*kinds(shown), charts.SPREAD]
        parts.append(
            charts.bars(items, f"Time of one call, {what}: shorter is better", reference=reference, keys=legend)
        )
    if folded:
        clock = units.Clock.of(entry.median for entry in folded)
        names = ", ".join(f"{entry.name} {clock.text(entry.median)}" for entry in folded)
        slow = charts.bars([_bar(entry, clock) for entry in folded], f"{what}, on a scale of their own")
        parts.append(fold(f"{len(folded)} more, over {views.FOLD_OVER:g}x slower than the fastest: {names}", slow))
    parts.append(_speeds_note(seen, default))
    parts.append(_table(told, seen, [*shown, *folded, *seen.failures]))
    compared = f"Verified against float64: {seen.compared}." if seen.compared else "Not verified."
    return [section("Candidates", *parts, note(f"{compared} Times by {seen.timing}. {FORMULA}."))]


def _elsewhere(there: dict[str, Any] | None) -> list[Section]:
    """What an H200 would run, and the nearest figures recorded on one."""
    if not there:
        return []
    runs = [
        ("it would run", there["backend"]),
        ("configuration", there["config"] or "-"),
        ("because", there["because"]),
    ]
    parts = [definitions(runs)]
    if recorded := there.get("recorded"):
        seconds, speeds = recorded["seconds"], recorded["speeds"]
        clock = units.Clock.of(seconds.values())
        items = [
            charts.Bar(name, one, clock.text(one), views.kind_of(name), chosen=name == OURS,
                       aside=f"tilewise {speeds[name]}" if name in speeds else "")
            for name, one in seconds.items()
        ]  # fmt: skip
        which = "this problem" if recorded["same"] else "the nearest problem on record"
        parts.append(charts.bars(items, f"Recorded there, {recorded['what']} of {which}: shorter is better"))
        parts.append(note(Markup(f"{code(recorded['problem'])}, from {code(recorded['record'])}.")))
    return [section(f"On an {there['gpu']}", *parts)]


def kinds(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """The legend of whose the candidates are."""
    present = {entry.kind for entry in entries}
    return [(kind, title) for kind, title in views.KINDS.items() if kind in present]


def _bar(entry: Entry, clock: units.Clock) -> charts.Bar:
    assert entry.seconds is not None
    also = f"also {', '.join(other.name for other in entry.also)}" if entry.also else ""
    if entry.name == DEFAULT:
        aside: object = "the default"
    else:
        aside = speed_text(entry.speed_default or entry.speed)
    low, high = entry.seconds.get("p20"), entry.seconds.get("p80")
    return charts.Bar(
        entry.name, entry.median, clock.text(entry.median), entry.kind, low, high, aside, entry.name == OURS, also
    )


def speed_text(speed: Speed | None) -> object:
    if speed is None:
        return ""
    told = words.bounds(speed)
    between = f' <span class="more">({told})</span>' if told else ""
    others = {INDISTINGUISHABLE: "no difference seen", TOO_FEW: f"{speed.ratio:.2f}x, too few rounds", SAME: SAME}
    return Markup(f"{others.get(speed.verdict) or _claim(speed)}{between}")


def _claim(speed: Speed) -> str:
    """`1.34x faster`"""
    return words.claim(speed).removesuffix(" than")


def _speeds_note(seen: View, default: Entry | None) -> Markup:
    speeds = [entry.speed_default or entry.speed for entry in seen.ranked()]
    basis = next((words.basis(speed) for speed in speeds if speed), "")
    against = "PyTorch's default" if default else seen.best_peer or "PyTorch"
    return note(f"Speeds are against {against}; in brackets the {basis}.") if basis else Markup("")


def _spread(part: dict[str, float]) -> str:
    clock = units.Clock.of([part["median"]])
    return f"{clock.spread(part)} {clock.unit}"


def _table(told: dict[str, Any], seen: View, entries: Sequence[Entry]) -> Markup:
    columns = ["candidate", "verdict"]
    for what in seen.timed:
        columns += [f">{what}", ">p20 to p80"]
    columns += [">host", ">TFLOP/s", ">extra memory", ">error", ">of budget", ">grad error", ">of budget"]
    flops = told["comparison"]["flops"]
    timed = flops.get("timed") or sum(flops[what] for what in seen.timed if what in flops)
    rows: list[list[object]] = []
    marks = []
    for entry in entries:
        for one in (entry, *entry.also):
            rows.append(_cells(one, seen, told["host_seconds"].get(one.name), timed))
            marks.append(one.name == OURS)
    return compact_table(columns, rows, "Candidates", marks)


def _cells(entry: Entry, seen: View, host: dict[str, float] | None, flops: float) -> list[object]:
    cells: list[object] = [tagged(entry.kind, entry.name)]
    cells.append(bad(entry.verdict) if entry.failed else entry.verdict)
    for what in seen.timed:
        part = entry.parts.get(what)
        cells += [units.duration(part["median"]), _spread(part)] if part else ["-", "-"]
    cells.append(units.duration(host["median"]) if host else "-")
    cells.append(units.significant(flops / entry.median / 1e12) if entry.seconds else "-")
    cells.append(units.size(entry.memory))
    return [*cells, *error_cells(entry, seen, "out"), *error_cells(entry, seen, "dq", "dk", "dv")]


def error_cells(entry: Entry, seen: View, *tensors: str) -> list[object]:
    """An error, and how much of its budget it takes."""
    found = entry.error(*tensors)
    if found is None:
        return ["-", "-"]
    tensor, value = found
    budget = seen.budgets.get(tensor)
    share: object = "-" if not budget else units.percent(value / budget)
    return [units.error(value), bad(share) if budget and not value <= budget else share]


def _ceilings(told: dict[str, Any], seen: View, problem: Problem) -> list[Section]:
    rates = told["rates"]
    title = "Share of the ceiling"
    if rates is None:
        return [
            section(title, paragraph("The peaks of this device are not known, so there is no ceiling to compare with."))
        ]
    parts: list[object] = []
    shown, folded = seen.unfolded()
    several, over = len(told["roofline"]) > 1, False
    for what, part in told["roofline"].items():
        bounds = part["seconds"]
        timed = [entry for entry in shown if what in entry.parts]
        if bounds is None or not timed:
            continue
        binding = max(bounds, key=bounds.__getitem__)
        items = [_share_bar(entry, bounds, what, binding) for entry in timed]
        over = over or any(item.value > 1 for item in items)
        lines = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in bounds.items())
        caption = f"{what}: at least {units.duration(bounds[binding])}, by {binding} ({lines})"
        parts += [subheading(what)] if several else []
        parts.append(charts.shares(items, caption, kinds(timed)))
        parts.append(fold("Roofline", _roofline(part, [*timed, *(e for e in folded if what in e.parts)], rates, what)))
    if not parts:
        return []
    why = f"The least work of the problem over the device's peaks ({rates['source']}), as a share of the measured time."
    if over:
        why += " More than 100% says that a peak is known too low, not that a kernel passed it."
    return [section(title, *parts, note(why))]


def _share_bar(entry: Entry, bounds: dict[str, float], what: str, binding: str) -> charts.Bar:
    seconds = entry.parts[what]["median"]
    share = bounds[binding] / seconds
    rest = " · ".join(f"{_SHORT.get(name, name)} {units.percent(bound / seconds)}" for name, bound in bounds.items()
                      if name != binding)  # fmt: skip
    return charts.Bar(
        entry.name, share, units.percent(share), entry.kind, aside=Markup(f'<span class="more">{rest}</span>'),
        chosen=entry.name == OURS,
    )  # fmt: skip


def _roofline(part: dict[str, Any], entries: Sequence[Entry], rates: dict[str, Any], what: str) -> Markup:
    work = part["work"]
    intensity = work["flops"] / max(1, work["bytes"])
    dots = [charts.Dot(e.name, intensity, work["flops"] / e.parts[what]["median"], e.kind) for e in entries]
    min_seconds = part["seconds"].get("exponentials")
    flats = [("that the exponentials allow", work["flops"] / min_seconds)] if min_seconds and work["flops"] else []
    return charts.roofline(dots, rates["flops"], rates["bytes"], f"Roofline of the {what}", flats)


def _kernels(told: dict[str, Any], seen: View) -> list[Section]:
    """Per candidate and direction a lane, which unfolds into its kernels."""
    order = [one.name for entry in seen.ranked() for one in (entry, *entry.also)]
    profiles = sorted(
        told["profiles"].items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)
    )
    lanes, unseen, full = [], [], dict[str, None]()
    on_gpu = told["comparison"]["device"].startswith("cuda")
    for name, profiled in profiles:
        if "error" in profiled:
            unseen.append(f"{name} was not seen: {profiled['error']}")
            continue
        for what, part in profiled.items():
            lanes.append(_lane(name, what, part, several=len(profiled) > 1, on_gpu=on_gpu))
            full |= {
                launch["name"]: None for launch in part["launches"] if short_name(launch["name"]) != launch["name"]
            }
    if not lanes and not unseen:
        return []
    caption = (
        "One call of each, as the profiler saw it, every lane as wide as its own time. A lane unfolds into its steps"
    )
    about = _ABOUT_GPU if on_gpu else "Operators by their own time, without that of what they call."
    names = [fold(f"Full names of {len(full)} kernels", listing(map(code, full), "plain"))] if full else []
    drawn = [charts.lanes(lanes, caption)] if lanes else []
    return [section("Kernels", *drawn, *map(paragraph, unseen), note(about), *names)]


def _lane(name: str, what: str, part: dict[str, Any], *, several: bool, on_gpu: bool) -> charts.Lane:
    launches = part["launches"]
    summed = any(launch["count"] > 1 for launch in launches) or len(launches) > _MAX_SPANS
    spans = [charts.Span(launch["name"], launch["start_us"], launch["us"]) for launch in launches]
    count = sum(launch["count"] for launch in launches)
    small = f"{what}, " if several else ""
    small += (units.counted(count, "launch", "launches") if on_gpu else units.counted(count, "operator call")) + (
        ", summed by kernel" if summed else ""
    )
    return charts.Lane(
        name,
        views.kind_of(name),
        spans,
        Markup(_gap_note(part) + _kernel_table(launches, summed)),
        small,
        summed,
        is_open=name == OURS,
    )


def _gap_note(part: dict[str, Any]) -> Markup:
    """What the profiler saw of the whole call, where the record says it."""
    gaps = part.get("gaps")
    if not gaps or not gaps["launches"]:
        return Markup("")
    busy, idle, host = (units.duration(gaps[name] * 1e-6) for name in ("busy_us", "idle_us", "host_us"))
    return note(f"The device was busy for {busy} and idle for {idle} in between; the host launched for {host}.")


def _kernel_table(launches: Sequence[dict[str, Any]], summed: bool) -> Markup:
    if not launches:
        return paragraph("The profiler saw no kernel.")
    lines = views.in_steps(launches)
    total = sum(line["us"] for line in lines) or 1.0
    columns = [
        "kernel", "operator", ">launches", ">gap before", ">time", ">share", ">grid", ">block", ">registers",
        ">shared memory", ">spilled", ">occupancy", "limited by", ">waves", "instructions",
    ]  # fmt: skip
    rows = [_kernel_cells(line, total, summed) for line in lines]
    return compact_table(columns, rows, "Kernels")


def _kernel_cells(line: dict[str, Any], total: float, summed: bool) -> list[object]:
    build, fits = line.get("build") or {}, line.get("occupancy")
    name = tagged(role_of(line["name"]), short_name(line["name"]))
    gap = "-" if summed or line["gap"] < _MIN_GAP else units.duration(line["gap"] * 1e-6)
    step = str(line.get("step") or "").removeprefix("aten::") or "-"
    cells: list[object] = [
        name,
        step,
        line["count"],
        gap,
        units.duration(line["us"] * 1e-6),
        units.percent(line["us"] / total),
    ]
    if not line["grid"]:
        return [*cells, *["-"] * 9]
    cells += [" x ".join(map(str, line["grid"])), " x ".join(map(str, line["block"])), line["registers"]]
    cells += [units.size(line["smem_bytes"] or 0), f"{build['spill_bytes']} bytes" if "spill_bytes" in build else "-"]
    cells += (
        [units.percent(fits["share"]), fits["limiter"].partition(";")[0], f"{fits['waves']:.2f}"]
        if fits
        else ["-", "-", "-"]
    )
    mix = build.get("instructions") or {}
    sum_ = sum(mix.values()) or 1
    return [*cells, ", ".join(f"{kind} {units.percent(count / sum_)}" for kind, count in list(mix.items())[:6]) or "-"]


def _counters(told: dict[str, Any]) -> list[Section]:
    rows: list[list[object]] = []
    untold: list[str] = []
    names: dict[str, None] = {}
    for name, counted in told["counters"].items():
        if isinstance(counted, str):
            untold.append(f"{name}: {counted}")
            continue
        for kernel in counted:
            names |= dict.fromkeys(kernel["counters"])
    for name, counted in told["counters"].items():
        for kernel in () if isinstance(counted, str) else counted:
            values = [kernel["counters"].get(counter) for counter in names]
            cells = [f"{value[0]:.1f}{value[1]}" if value else "-" for value in values]
            rows.append([code(name), code(short_name(kernel["kernel"])), *cells])
    if not rows and not untold:
        return []
    columns = ("candidate", "kernel", *(f">{name}" for name in names))
    made = [table(columns, rows, "Counters")] if rows else []
    return [section("Counters by Nsight Compute", *made, *map(paragraph, untold))]


def _choices(told: dict[str, Any], seen: View) -> list[Section]:
    """How the planner and PyTorch chose, and where our model of PyTorch's rules is not what PyTorch does."""
    plan, torch = told["plan"], told["torch"]
    ran = views.kernel_name(torch.get("choice") or "")
    order = [views.kernel_name(str(name)) for name in torch.get("priority") or ()]
    # An order of PyTorch's settings, which older records hold, need not be the one that its dispatcher follows.
    theirs = " > ".join(order) if order and order[0] == ran else "-"
    pairs: list[tuple[str, object]] = [
        ("problem", code(Problem.from_dict(plan["problem"]))),
        ("backend", plan["backend"]),
        ("configuration", plan.get("config") or "-"),
        ("launch", "; ".join(plan.get("launch") or []) or "-"),
        ("our order", " > ".join(told.get("our_order") or ()) or "-"),
        ("PyTorch's default ran", ran or "not seen"),
        ("PyTorch's order", theirs),
        ("fastest of PyTorch's paths", seen.best_peer or "-"),
    ]
    parts: list[object] = [definitions([(name, value) for name, value in pairs if value != "-"])]
    disagreements = told.get("disagreements") or {}
    if disagreements:
        rows = [[code(name), *("; ".join(said) or "takes it" for said in pair)] for name, pair in disagreements.items()]
        columns = ("kernel", "our model of its rules", "PyTorch")
        parts += [subheading("Our model and PyTorch disagree"), table(columns, rows, "Disagreements")]
    findings = switches.findings(read_comparison(told["comparison"]), told["profiles"])
    if findings:
        parts += [subheading("PyTorch's switches"), listing(findings)]
    return [section("Choices", *parts)]
