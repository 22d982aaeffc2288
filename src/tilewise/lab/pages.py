"""The pages of the commands, from the same values that their JSON holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..problem import Problem
from . import charts, plots, report
from .compare import REFUSED, Comparison, Outcome, read_comparison, summary
from .html import Markup, Section, card, cards, fold, listing, note, paragraph, section, table, text
from .html import page as document
from .inspect_text import FORMULA, merged

if TYPE_CHECKING:
    from .records import Record

_CANDIDATE_COLUMNS = (
    "candidate", "verdict", ">forward ms", ">p20..p80", ">backward ms", ">host us", ">speed", ">TFLOP/s", ">extra MiB",
    ">error", ">grad error",
)  # fmt: skip
_LONGEST_LANE = 40  # launches drawn in one lane of a timeline


def page_of(told: dict[str, Any]) -> str:
    """A record that has no page of its own: its sentences, and everything it holds."""
    concluded = [str(part["conclusion"]) for part in told.get("sweeps", []) if "conclusion" in part]
    sentence = str(told.get("sentence", " ".join(concluded)))
    everything = fold("Everything", Markup(f"<pre>{text(report.to_json(told))}</pre>"))
    return document(str(told["kind"]), sentence, [section("Record", everything)], told.get("provenance"))


def page(told: dict[str, Any]) -> str:
    """The HTML page of a record, by its kind."""
    if told["kind"] == "tilewise inspect":
        return inspect_page(told)
    return page_of(told)


def inspect_page(told: dict[str, Any]) -> str:
    """The report of `tilewise inspect`, from what `--json` prints."""
    problem = Problem.from_dict(told["plan"]["problem"])
    comparison = read_comparison(told["comparison"])
    parts = [_candidates(told, comparison), *_roofline(told, comparison, problem), _reasons(told, comparison)]
    parts += [*_kernels(told), *_timeline(told), *_counters(told)]
    return document(f"Attention: {problem}", told["sentence"], parts, told.get("provenance"))


def _candidates(told: dict[str, Any], comparison: Comparison) -> Section:
    shown = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    timed = [outcome for outcome in shown if outcome.costs]
    items = [
        charts.Bar(outcome.candidate, seconds["median"] * 1e3, f"{report.milliseconds(seconds)} ms", _kind(outcome))
        for outcome in timed
        if (seconds := summary(outcome.samples))
    ]
    what = "forward and backward" if comparison.row.problem.needs_grad else "forward"
    rows: list[list[object]] = [_candidate_cells(outcome, comparison, told) for outcome in shown]
    columns, rows = _without_empty(_CANDIDATE_COLUMNS, rows)
    drawn = [charts.bars(items, f"Milliseconds of a call, {what}: shorter is better")] if items else []
    order = f"PyTorch's order: {' > '.join(told['torch']['priority'])}. " if told["torch"]["priority"] else ""
    chosen = f"It ran {told['torch']['choice']}. " if told["torch"]["choice"] else ""
    compared = f"Verified against float64: {comparison.compared}. " if comparison.compared else "Not verified. "
    return section(
        "Candidates",
        *drawn,
        table(columns, rows, "Candidates", [outcome.candidate == "tilewise" for outcome in shown]),
        *_interruption(comparison.complete),
        note(f"{compared}Times by {comparison.row.timing}. {FORMULA}."),
        note(f"{order}{chosen}tilewise runs {told['plan']['backend']}: {told['plan']['because']}."),
    )


def _interruption(complete: bool) -> list[Markup]:
    return [] if complete else [note("Interrupted: only what was measured is here.")]


def _without_empty(columns: tuple[str, ...], rows: list[list[object]]) -> tuple[tuple[str, ...], list[list[object]]]:
    """Less the columns in which nobody has anything."""
    kept = [index for index in range(len(columns)) if any(row[index] != "-" for row in rows)]
    return tuple(columns[index] for index in kept), [[row[index] for index in kept] for row in rows]


def _kind(outcome: Outcome) -> int:
    return 0 if outcome.candidate.startswith("tilewise") else 1 if outcome.is_peer else 2


def _candidate_cells(outcome: Outcome, comparison: Comparison, told: dict[str, Any]) -> list[object]:
    forward = summary(outcome.forward)
    host = told["host_seconds"].get(outcome.candidate)
    bad = Markup(f'<span class="bad">{text(outcome.verdict)}</span>') if outcome.failed else outcome.verdict
    return [
        outcome.candidate, bad, report.milliseconds(forward), report.spread(forward),
        report.milliseconds(summary(outcome.backward)), report.microseconds(host),
        report.times(comparison.speed(outcome)), report.rate(comparison.row.problem.flops(), forward),
        report.mebibytes(outcome.memory), report.error(outcome.error("out")),
        report.error(outcome.error("dq", "dk", "dv")),
    ]  # fmt: skip


def _roofline(told: dict[str, Any], comparison: Comparison, problem: Problem) -> list[Section]:
    rates = told["rates"]
    if rates is None:
        return [section("Roofline", paragraph("The peaks of this device are not known, so there is no roof to draw."))]
    figures: list[object] = []
    for what, part in told["roofline"].items():
        work = part["work"]
        dots = [
            charts.Dot(o.candidate, work["flops"] / max(1, work["bytes"]), work["flops"] / timed["median"], _kind(o))
            for o in comparison.outcomes
            if (timed := summary(getattr(o, what)))
        ]
        exponentials = ("exponentials allow", work["flops"] / part["seconds"]["exponentials"])
        if dots and work["flops"]:
            caption = f"Roofline of the {what}, peaks: {rates['source']}"
            figures.append(charts.roofline(dots, rates["flops"], rates["bytes"], caption, [exponentials]))
    rows = [
        [name, what, *(f"{share:.0%}" for share in shares.values())]
        for name, by_direction in told["shares"].items()
        for what, shares in by_direction.items()
        if shares
    ]
    columns = ("candidate", "direction", ">of compute", ">of memory", ">of exponentials")
    why = "How near each candidate comes to what the device allows, counting only work that has to be done."
    return [section("Roofline", *figures, table(columns, rows, "Shares of the ceilings"), note(why))]


def _reasons(told: dict[str, Any], comparison: Comparison) -> Section:
    """Who takes the problem, who does not, and all the reasons."""
    asked = [outcome for outcome in comparison.outcomes if outcome.verdict != REFUSED]
    rows: list[list[object]] = [[o.candidate, o.verdict if o.failed else "ran", "; ".join(o.because)] for o in asked]
    rows += [[name, "refused", listing(reasons)] for name, reasons in told["refused"].items()]
    return section("Who takes it, and who does not", table(("candidate", "answer", "why"), rows, "Reasons"))


def _kernels(told: dict[str, Any]) -> list[Section]:
    folded = []
    for name, profiled in told["profiles"].items():
        if "error" in profiled:
            folded.append(fold(f"{name}: not seen", paragraph(profiled["error"])))
            continue
        for what, part in profiled.items():
            launches = merged(part["launches"])
            count = sum(launch["count"] for launch in launches)
            made = cards(_kernel_card(launch) for launch in launches)
            folded.append(fold(f"{name}, {what}: {count} launched", made, is_open=name == "tilewise"))
    return [section("Kernels that ran", *folded)] if folded else []


def _kernel_card(launch: dict[str, Any]) -> Markup:
    pairs: list[tuple[str, object]] = [
        ("launched", launch["count"]),
        ("time", f"{report.significant(launch['us'])} us"),
    ]
    if launch["grid"]:
        pairs += [("grid", " x ".join(map(str, launch["grid"]))), ("block", " x ".join(map(str, launch["block"])))]
        pairs += [
            ("shared memory", f"{(launch['smem_bytes'] or 0) / 1024:.1f} KiB"),
            ("registers", launch["registers"]),
        ]
        fits = launch.get("occupancy")
        if fits:
            pairs += [("theoretical occupancy", f"{fits['share']:.0%}, limited by {fits['limiter']}")]
            pairs += [("waves", f"{fits['waves']:.2f}, {fits['tail']:.0%} of the last empty")]
        if launch.get("estimated_occupancy") is not None:
            pairs += [("estimated occupancy", f"{launch['estimated_occupancy']}%, by the profiler from the grid")]
        build = launch.get("build", {})
        pairs.append(
            ("spills", f"{build['spill_bytes']} bytes" if "spill_bytes" in build else "not known of this kernel")
        )
        total = sum(build.get("instructions", {}).values())
        pairs += [(kind, f"{n} instructions, {n / total:.0%}") for kind, n in build.get("instructions", {}).items()]
    return card(launch["name"], pairs)


def _timeline(told: dict[str, Any]) -> list[Section]:
    spans = []
    for name, profiled in told["profiles"].items():
        for what, part in profiled.items():
            if what == "error" or not part["launches"]:
                continue
            lane = name if what == "forward" else f"{name} {what}"
            spans += [
                charts.Span(lane, one["name"], one["start_us"], one["us"]) for one in part["launches"][:_LONGEST_LANE]
            ]
    if not spans:
        return []
    short = note(f"Each lane starts with its first launch; at most {_LONGEST_LANE} launches a lane are drawn.")
    return [section("Timeline", charts.timeline(spans, "What ran when, in one call of each candidate"), short)]


def _counters(told: dict[str, Any]) -> list[Section]:
    made = []
    for name, counted in told["counters"].items():
        if isinstance(counted, str):
            made.append(card(name, [("Nsight Compute", counted)]))
            continue
        for kernel in counted:
            pairs = [(what, f"{value:.1f}{unit}") for what, (value, unit) in kernel["counters"].items()]
            made.append(card(f"{name}: {kernel['kernel']}", pairs))
    return [section("Counters by Nsight Compute", cards(made))] if made else []


def bench_page(record: Record) -> str:
    """The report of `tilewise bench`, from a record."""
    comparisons, score = record.comparisons(), record.values["score"]
    subject = comparisons[0].outcomes[0].candidate
    ratios = [(c.row.name, speed) for c in comparisons if (speed := c.speed(c.outcomes[0])) is not None]
    items = [charts.Bar(name, speed, f"{speed:.2f}", 0 if speed >= 1 else 1) for name, speed in ratios]
    sentence = f"No row of the suite {record.suite} has a ratio."
    if ratios:
        mean = f"{float(score['geomean']):.2f} times as fast as PyTorch's best path"
        where = f"the geometric mean of {len(ratios)} rows of the suite {record.suite}"
        worst = f"its worst row is {float(score['worst']):.2f} ({score['row']})"
        sentence = f"On {record.device}, {subject} is {mean} in {where}; {worst}."
    extra = [f"{kind}: geomean {float(s['geomean']):.3f}, worst {float(s['worst']):.3f} ({s['row']})"
             for kind, s in record.values.get("scores", {}).items()]  # fmt: skip
    parts = [
        section(
            "Ratios",
            charts.bars(items, "PyTorch's best time over ours: above 1 is faster"),
            listing(extra),
            *_interruption(record.values.get("complete", True)),
        ),
        *_scaling(comparisons),
        section("Every measurement", *(_bench_row(comparison) for comparison in comparisons)),
    ]
    return document(f"Bench: {record.suite}", sentence, parts, record.values["provenance"])


def _scaling(comparisons: list[Comparison]) -> list[Section]:
    rows = [
        [title, name, _at_longest(points), _exponent(points, "seconds"), _exponent(points, "mebibytes")]
        for title, series in plots.panels(comparisons).items()
        for name, points in series.items()
    ]
    columns = ("series", "candidate", ">TFLOP/s, longest", ">time grows as length^", ">memory grows as length^")
    return [section("Scaling with length", table(columns, rows, "Fitted exponents"))] if rows else []


def _at_longest(points: list[plots.Point]) -> str:
    return f"{report.significant(points[-1].tflops)} at {points[-1].length}"


def _exponent(points: list[plots.Point], field: str) -> str:
    value = plots.exponent([point.length for point in points], [getattr(point, field) for point in points])
    return "-" if value != value else f"{value:.2f}"


def _bench_row(comparison: Comparison) -> Markup:
    columns = ("candidate", "verdict", ">ms", ">p20..p80", ">speed", ">TFLOP/s", ">extra MiB", ">error", ">grad error")
    rows = []
    for outcome in comparison.outcomes:
        timed = summary(outcome.samples)
        rows.append([
            outcome.candidate, "; ".join([outcome.verdict, *outcome.because]), report.milliseconds(timed),
            report.spread(timed), report.times(comparison.speed(outcome)), report.rate(comparison.row.flops, timed),
            report.mebibytes(outcome.memory), report.error(outcome.error("out")),
            report.error(outcome.error("dq", "dk", "dv")),
        ])  # fmt: skip
    speed = comparison.speed(comparison.outcomes[0])
    return fold(f"{comparison.row.name}: {report.times(speed)}", table(columns, rows, comparison.row.name))
