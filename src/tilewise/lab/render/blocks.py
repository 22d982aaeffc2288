"""The page of a report: its blocks as HTML, each drawn by `html` and `charts`."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

from .. import units
from ..report import Bars, Facts, Fold, Heading, Lanes, Line, Lines, Ratios, Roofline, Shares, Table, Words
from . import charts, html
from .html import Markup
from .views import KINDS, OTHER_KIND, kind_of

if TYPE_CHECKING:
    from ..report import Block, Report


def page(shown: Report, record: dict[str, Any]) -> str:
    """The whole page, with the environment of the record that the report was made from."""
    head = html.Head(
        about=Markup(f"tilewise {shown.command} · {html.text(shown.subject)}"),
        claim=shown.claim,
        facts=shown.facts,
        lead=shown.lead,
        warnings=shown.warnings,
        failures=shown.failures,
    )
    sections = [html.section(one.title, *map(draw, one.blocks)) for one in shown.sections]
    return html.document(head, sections, record)


@singledispatch
def draw(block: Block) -> Markup:
    raise TypeError(type(block))


@draw.register
def _(block: Words) -> Markup:
    if isinstance(block.content, Lines):
        return html.text(block.content)
    return (html.note if block.is_note else html.paragraph)(block.content)


@draw.register
def _(block: Heading) -> Markup:
    return html.subheading(block.title)


@draw.register
def _(block: Facts) -> Markup:
    return html.definitions(block.pairs)


@draw.register
def _(block: Table) -> Markup:
    shown = block.shown()
    return html.table(shown.columns, shown.rows, shown.label, shown.marked)


@draw.register
def _(block: Bars) -> Markup:
    bars = [one._replace(kind=one.kind or kind_of(one.whose or one.name)) for one in block.bars]
    titles = KINDS | {OTHER_KIND: block.other}
    keys = [(kind, titles[kind]) for kind in titles if any(one.kind == kind for one in bars)]
    if block.whole:
        return charts.shares(bars, block.caption, keys)
    keys += [charts.SPREAD] if any(one.low is not None for one in bars) else []
    keys += [("lost", block.lost)] if any(one.lost for one in bars) else []
    return charts.bars(bars, block.caption, reference=block.reference, keys=keys)


@draw.register
def _(block: Shares) -> Markup:
    """What is over its limit is in the colour of a loss."""
    parts: list[Markup] = []
    for title, limit, shares in block.groups:
        bars = [
            Line(
                one.name, one.share, units.percent(one.share), "lost" if one.over else kind_of(one.name),
                aside=html.bad(f"{one.value}, over {block.limit}") if one.over else one.value,
            )
            for one in shares
        ]  # fmt: skip
        parts += [html.subheading(title), charts.shares(bars, f"{block.caption} of {limit}")]
    return Markup("".join(parts))


@draw.register
def _(block: Ratios) -> Markup:
    """The bars have whiskers, and the interval beside the value."""
    ends = charts.scale_of(one.value for group in block.groups for one in group.bars)
    parts = [charts.legend(block.keys)]
    for name, summed, bars in block.groups:
        shown = [
            one._replace(text=Markup(f'{one.text} <span class="aside">{html.text(one.aside)}</span>')) for one in bars
        ]
        chart = charts.ratios(shown, ends, name)
        if block.is_folded:
            parts.append(html.fold(Markup(f"<strong>{html.text(name)}</strong> · {summed}"), chart, kind="fold box"))
        else:
            parts += [html.subheading(Markup(f'{html.text(name)} <small class="note">{summed}</small>')), chart]
    return Markup("".join(parts))


@draw.register
def _(block: Roofline) -> Markup:
    dots = [dot._replace(kind=dot.kind or kind_of(dot.name)) for dot in block.dots]
    return charts.roofline(dots, block.flops, block.bytes, block.caption, block.others)


@draw.register
def _(block: Lanes) -> Markup:
    lanes = [
        charts.Lane(
            one.name, kind_of(one.name), one.spans, Markup("".join(map(draw, one.blocks))), one.small, one.summed,
            one.is_open,
        )
        for one in block.lanes
    ]  # fmt: skip
    return charts.lanes(lanes, block.caption)


@draw.register
def _(block: Fold) -> Markup:
    kind = "fold box" if block.is_boxed else "fold"
    return html.fold(block.summary, *map(draw, block.blocks), is_open=block.is_open, kind=kind)
