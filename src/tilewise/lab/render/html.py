"""The report: one self-contained HTML file. No script, no network; readable on a phone, in print, in the dark.

    document(Head(...), sections, record) -> str                a whole page
    section(title, *parts) -> Section                           a part of it with a heading, listed in the navigation
    table, definitions, fold, paragraph, note, listing, banner  what a section is made of
    write(path, text)

Whatever text comes in is escaped here; parts that are markup already are `Markup`. What can be unfolded is a native
<details>, so that everything works with the keyboard alone. Charts are in `charts`, the style in `style`, the commands'
pages in `pages`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from ..report import Bad, Candidate, Code, Good, Kernel, Lines, More, Ours, Phrase
from .roles import role_of, short_name
from .style import STYLE
from .views import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


_MARKS: dict[type, str] = {Bad: "bad", Good: "ok", More: "more", Ours: "ours"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


class Section(Markup):
    """A part of the page with a heading of its own."""

    anchor: str
    heading: str


@dataclass(frozen=True, slots=True)
class Head:
    """What stands first: which report it is, the answer, and the facts that qualify it."""

    about: object  # the command and its subject
    claim: object  # the answer, in one line
    facts: Sequence[object] = ()
    lead: object = ""  # a sentence or two of explanation
    warnings: Sequence[str] = ()
    failures: Sequence[str] = ()
    title: str = field(default="")  # of the window; about and claim if empty


def text(value: object) -> Markup:
    """Escaped, unless it is markup; what a report calls a piece decides how it looks."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Phrase):
        return Markup("".join(map(text, value)))
    if isinstance(value, Lines):
        return listing(value, "plain")
    if isinstance(value, Candidate):
        return tagged(kind_of(value), str(value))
    if isinstance(value, Kernel):
        return tagged(role_of(value), str(short_name(value)))
    if isinstance(value, Code):
        return code(str(value))
    words = escape(str(value))
    mark = _MARKS.get(type(value))
    return Markup(f'<span class="{mark}">{words}</span>' if mark else words)


def plain(value: object) -> str:
    """Without markup."""
    return re.sub(r"<[^>]*>", "", text(value))


def document(head: Head, sections: Sequence[Section], record: dict[str, Any]) -> str:
    """The answer, navigation, the sections, and the environment of the record that all this was made from."""
    provenance = record.get("provenance") or {}
    parts = [*sections, *([environment(provenance)] if provenance else [])]
    links = "".join(f'<li><a href="#{part.anchor}">{escape(part.heading)}</a></li>' for part in parts)
    facts = "".join(f"<span>{fact}</span>" for fact in map(text, head.facts))
    lead = f'<p class="lead">{text(head.lead)}</p>\n' if head.lead else ""
    title = escape(head.title) or f"{plain(head.claim)} · {plain(head.about)}"
    made = f'\n<meta name="tilewise-record" content="{escape(identity(record))}">'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{made}
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the findings</a>
<header>
<p class="eyebrow">{text(head.about)}</p>
<h1>{text(head.claim)}</h1>
<p class="hero">{facts}</p>
{lead}{banner(head.failures, bad=True)}{banner(head.warnings)}<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{"".join(parts)}
</main>
<footer>Written by tilewise. This file is complete: it loads nothing.</footer>
</body>
</html>
"""


def identity(record: dict[str, Any]) -> str:
    """What tells a record from all others: its kind and when it was made."""
    return f"{record.get('kind', '')} {(record.get('provenance') or {}).get('date', '')}"


def write(path: Path, page: str) -> None:
    path.write_text(page, encoding="utf-8")


def banner(lines: Sequence[str], *, bad: bool = False) -> Markup:
    """What a reader must know before believing the figures; nothing where there is nothing to say."""
    if not lines:
        return Markup("")
    inner = "".join(f"<p>{text(line)}</p>" for line in lines)
    return Markup(f'<div class="banner{" bad" if bad else ""}" role="note">{inner}</div>\n')


def section(title: str, *parts: object) -> Section:
    anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    body = "".join(text(part) for part in parts)
    heading = f'<h2 id="{anchor}-title">{escape(title)}</h2>'
    made = Section(f'<section id="{anchor}" aria-labelledby="{anchor}-title">{heading}{body}</section>\n')
    made.anchor, made.heading = anchor, title
    return made


def paragraph(content: object) -> Markup:
    return Markup(f"<p>{text(content)}</p>")


def note(content: object) -> Markup:
    """Small print."""
    return Markup(f'<p class="note">{text(content)}</p>')


def subheading(content: object) -> Markup:
    return Markup(f"<h3>{text(content)}</h3>")


def code(content: object) -> Markup:
    return Markup(f"<code>{text(content)}</code>")


def tagged(kind: str, name: object) -> Markup:
    """A name with a square in the colour of a kind of candidate, or of a kernel's role."""
    return Markup(f'<span class="tag"><i class="key {kind}" aria-hidden="true"></i>{code(name)}</span>')


def bad(content: object) -> Markup:
    return Markup(f'<span class="bad">{text(content)}</span>')


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], label: str = "Table", mark: Sequence[bool] = ()
) -> Markup:
    """Columns whose name starts with ">" hold numbers. Rows whose `mark` is true stand out. The first column stays in
    view when the rest is scrolled."""
    right = [column.startswith(">") for column in columns]
    head = "".join(
        f'<th scope="col"{_number(is_right)}>{escape(column.lstrip(">"))}</th>'
        for column, is_right in zip(columns, right, strict=True)
    )
    body = []
    for index, row in enumerate(rows):
        first, *rest = (text(cell) for cell in row)
        cells = f'<th scope="row">{first}</th>'
        cells += "".join(f"<td{_number(is_right)}>{cell}</td>" for cell, is_right in zip(rest, right[1:], strict=True))
        marked = ' class="marked"' if index < len(mark) and mark[index] else ""
        body.append(f"<tr{marked}>{cells}</tr>")
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return Markup(f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>')


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def definitions(pairs: Iterable[tuple[str, object]], longest: int = 48) -> Markup:
    """Names and values in a grid; a value that is long has a line of its own."""
    cells = []
    for name, value in pairs:
        wide = ' class="wide"' if len(plain(value)) > longest else ""
        cells.append(f"<div{wide}><dt>{escape(name)}</dt><dd>{text(value)}</dd></div>")
    return Markup(f"<dl>{''.join(cells)}</dl>")


def fold(summary: object, *body: object, is_open: bool = False, kind: str = "fold") -> Markup:
    """Something to unfold, by mouse or keyboard. Print shows what is open."""
    inner = "".join(text(part) for part in body)
    opened = " open" if is_open else ""
    return Markup(f'<details class="{kind}"{opened}><summary>{text(summary)}</summary>{inner}</details>')


def listing(items: Iterable[object], kind: str = "") -> Markup:
    named = f' class="{kind}"' if kind else ""
    return Markup(f"<ul{named}>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>")


def environment(provenance: dict[str, Any]) -> Section:
    """Where the figures come from."""
    source, machine = provenance.get("source", {}), provenance.get("machine", {})
    commit = f"{(source.get('commit') or 'an installed package')[:12]}{' with changes' if source.get('dirty') else ''}"
    run = [
        ("command", code(" ".join(provenance.get("command", [])))),
        ("date", str(provenance.get("date", "")).replace("T", " ").replace("+00:00", " UTC")),
        ("commit", commit),
        ("seed", provenance.get("seed", "")),
    ]
    gpus = [(f"GPU {index}: {name}", value) for index, gpu in enumerate(provenance.get("gpus", []))
            for name, value in gpu.items()]  # fmt: skip
    groups = (
        ("Run", run),
        ("GPU", gpus),
        ("Machine", list(machine.items())),
        ("Versions", list(provenance.get("versions", {}).items())),
        ("Variables", list(provenance.get("variables", {}).items())),
    )
    parts: list[object] = []
    for name, pairs in groups:
        known = [(what, value) for what, value in pairs if value is not None and value != ""]
        if known:
            parts += [subheading(name), definitions(known)]
    return section("Environment", *parts)
