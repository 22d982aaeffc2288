"""The page of a report: its blocks as HTML, each drawn by `html` and `charts`."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

from .. import units
from ..report import Bad, Bars, Candidate, Code, Fold, Line, Lines, Ours, Phrase, Shares, Table, Words
from . import charts, html
from .html import Markup
from .views import KINDS, OTHER_KIND, kind_of

if TYPE_CHECKING:
    from ..report import Block, Report


def page(shown: Report, record: dict[str, Any]) -> str:
    """The whole page, with the environment of the record that the report was made from."""
    head = html.Head(
        about=Markup(f"tilewise {shown.command} · {inline(Code(shown.subject))}"),
        claim=inline(shown.claim),
        facts=[inline(fact) for fact in shown.facts],
        lead=shown.lead,
        warnings=shown.warnings,
        failures=shown.failures,
    )
    sections = [html.section(one.title, *map(draw, one.blocks)) for one in shown.sections]
    return html.document(head, sections, record)


def inline(content: object) -> Markup:
    """Of a line or a cell."""
    if isinstance(content, Phrase):
        return Markup("".join(map(inline, content)))
    if isinstance(content, Lines):
        return html.listing(map(inline, content), "plain")
    if isinstance(content, Candidate):
        return html.tagged(kind_of(content), str(content))
    if isinstance(content, Code):
        return html.code(str(content))
    if isinstance(content, Bad):
        return html.bad(str(content))
    if isinstance(content, Ours):
        return Markup(f'<span class="ours">{html.text(str(content))}</span>')
    return Markup(html.text(content))


@singledispatch
def draw(block: Block) -> Markup:
    raise TypeError(type(block))


@draw.register
def _(block: Words) -> Markup:
    if isinstance(block.content, Lines):
        return inline(block.content)
    return (html.note if block.is_note else html.paragraph)(inline(block.content))


@draw.register
def _(block: Table) -> Markup:
    shown = block.shown()
    return html.table(shown.columns, [[inline(cell) for cell in row] for row in shown.rows], shown.label, shown.marked)


@draw.register
def _(block: Bars) -> Markup:
    bars = [one._replace(kind=_kind(one), aside=inline(one.aside)) for one in block.bars]
    titles = KINDS | {OTHER_KIND: block.other}
    keys = [(kind, titles[kind]) for kind in titles if any(one.kind == kind for one in bars)]
    keys += [("lost", block.lost)] if any(one.lost for one in bars) else []
    return charts.bars(bars, block.caption, keys=keys)


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
def _(block: Fold) -> Markup:
    kind = "fold box" if block.is_boxed else "fold"
    return html.fold(inline(block.summary), *map(draw, block.blocks), is_open=block.is_open, kind=kind)


def _kind(one: Line) -> str:
    return one.kind or kind_of(one.whose or one.name)
