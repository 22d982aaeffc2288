"""The report: one self-contained HTML file. No script, no network; readable on a phone, in print, in the dark.

    page(title, sentence, sections, provenance) -> str    a whole document
    section(title, *parts) -> str                         a part of it with a heading, listed in the navigation
    table(columns, rows), definitions(pairs), card(title, pairs, note), fold(summary, body), paragraph(text), note(text)
    write(path, text)

Whatever text comes in is escaped here; parts that are markup already are `Markup`. What can be unfolded is a native
<details>, so that everything works with the keyboard alone. Charts are in `charts`, the commands' pages in `pages`.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


class Section(Markup):
    """A part of the page with a heading of its own."""

    anchor: str
    heading: str


def text(value: object) -> str:
    """Escaped, unless it is markup."""
    return value if isinstance(value, Markup) else escape(str(value))


def page(title: str, sentence: str, sections: Sequence[Section], provenance: dict[str, Any] | None = None) -> str:
    """A document: what it is about, the answer in one sentence, navigation, the sections, the environment."""
    parts = [*sections, *([environment(provenance)] if provenance else [])]
    links = "".join(f'<li><a href="#{part.anchor}">{escape(part.heading)}</a></li>' for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the findings</a>
<header>
<h1>{escape(title)}</h1>
<p class="sentence">{text(sentence)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{"".join(parts)}
</main>
<footer><p>Written by tilewise. This file is complete: it loads nothing.</p></footer>
</body>
</html>
"""


def write(path: Path, document: str) -> None:
    path.write_text(document, encoding="utf-8")


def section(title: str, *parts: object) -> Section:
    anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    body = "".join(text(part) for part in parts)
    head = f'<h2 id="{anchor}-title">{escape(title)}</h2>'
    made = Section(f'<section id="{anchor}" aria-labelledby="{anchor}-title">{head}{body}</section>')
    made.anchor, made.heading = anchor, title
    return made


def paragraph(content: object) -> Markup:
    return Markup(f"<p>{text(content)}</p>")


def note(content: object) -> Markup:
    """Small print."""
    return Markup(f'<p class="note">{text(content)}</p>')


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], label: str = "Table", mark: Sequence[bool] = ()
) -> Markup:
    """Columns whose name starts with ">" hold numbers. Rows whose `mark` is true stand out."""
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


def definitions(pairs: Iterable[tuple[str, object]]) -> Markup:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return Markup(f"<dl>{rows}</dl>")


def card(title: object, pairs: Iterable[tuple[str, object]], remark: str = "") -> Markup:
    """A kernel, a site, a candidate: a name and what is known of it."""
    tail = note(remark) if remark else ""
    return Markup(f'<article class="card"><h3>{text(title)}</h3>{definitions(pairs)}{tail}</article>')


def cards(made: Iterable[Markup]) -> Markup:
    return Markup(f'<div class="cards">{"".join(made)}</div>')


def fold(summary: str, *body: object, is_open: bool = False) -> Markup:
    """Something to unfold, by mouse or keyboard. Print shows what is open."""
    inner = "".join(text(part) for part in body)
    return Markup(f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{inner}</details>")


def listing(items: Iterable[object]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>")


def environment(provenance: dict[str, Any]) -> Section:
    """Where the figures come from."""
    source, machine = provenance.get("source", {}), provenance.get("machine", {})
    commit = f"{source.get('commit') or 'an installed package'}{' with changes' if source.get('dirty') else ''}"
    gpus = [", ".join(f"{name} {value}" for name, value in gpu.items()) for gpu in provenance.get("gpus", [])]
    known = [
        ("date", provenance.get("date", "")),
        ("command", " ".join(provenance.get("command", []))),
        ("commit", commit),
        ("seed", provenance.get("seed", "")),
        *((name, value) for name, value in machine.items() if value is not None),
        *((f"GPU {index}", gpu) for index, gpu in enumerate(gpus)),
        *((f"version of {name}", value) for name, value in provenance.get("versions", {}).items() if value is not None),
        *provenance.get("variables", {}).items(),
    ]
    return section("Environment", definitions(known))


STYLE = """
:root{--ink:#16191d;--paper:#fff;--soft:#f3f5f7;--line:#c9d0d8;--quiet:#4d5763;--mark:#e3effc;--link:#0b5cad;
--a:#0b62b5;--b:#b8450b;--c:#0b7a55;--d:#8e3a80;--e:#7a5b00;--bad:#a8201a}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebee;--paper:#14171a;--soft:#1d2125;--line:#3b434c;--quiet:#a9b3bd;
--mark:#1c3048;--link:#86bdf7;--a:#5aa9f5;--b:#f19a66;--c:#54c9a0;--d:#dd93d0;--e:#dcb847;--bad:#ff8f88}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1rem clamp(.75rem,3vw,2rem) 3rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}
h2{font-size:1.2rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--line);padding-bottom:.25rem}
h3{font-size:.95rem;margin:0 0 .4rem;overflow-wrap:anywhere}
.sentence{font-size:1.1rem;margin:.4rem 0 1rem;max-width:60rem}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.5rem}
a{color:var(--link)}nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.4rem 1.1rem;padding:0;margin:0}
:focus-visible{outline:3px solid var(--a);outline-offset:2px}
.note{color:var(--quiet);font-size:.875rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.4rem;margin:.5rem 0}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}thead th{background:var(--soft);white-space:nowrap}tbody th{font-weight:600}
.number{text-align:right;white-space:nowrap}.marked>*{background:var(--mark)}.bad{color:var(--bad);font-weight:600}
.cards{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr))}
.card{border:1px solid var(--line);border-radius:.4rem;padding:.7rem .8rem;background:var(--soft);break-inside:avoid}
dl{margin:0;font-size:.875rem}
dl>div{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.1rem .8rem;padding:.1rem 0}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere}
details{border:1px solid var(--line);border-radius:.4rem;padding:.4rem .8rem;margin:.5rem 0}
summary{cursor:pointer;font-weight:600}td ul,dd ul{margin:0;padding-left:1.1rem}
figure{margin:.5rem 0}.pan{overflow-x:auto}svg{max-width:100%;height:auto;display:block}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .quiet{fill:var(--quiet)}svg .axis{stroke:var(--line);stroke-width:1}
.k0{--k:var(--a)}.k1{--k:var(--b)}.k2{--k:var(--c)}.k3{--k:var(--d)}.k4{--k:var(--e)}
svg .fill{fill:var(--k)}svg .stroke{stroke:var(--k);fill:none;stroke-width:2}
footer{margin-top:3rem;color:var(--quiet);font-size:.875rem}
@media (max-width:44rem){svg{max-width:none}}
@media (max-width:30rem){dl>div{grid-template-columns:1fr}dt{font-size:.8rem}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#fff;--line:#999;--quiet:#333;--mark:#eee;--link:#000}
body{max-width:none;padding:0;font-size:10pt}nav,.skip{display:none}.scroll{overflow:visible;border:0}
section{break-inside:auto}h2{break-after:avoid}tr,.card,figure{break-inside:avoid}}
"""
