"""A griffe extension for our docstrings, in which a paragraph of lines `name  meaning` describes arguments: such a
paragraph becomes a list of definitions."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = re.compile(r"\w+(?:, \w+)*(?= )")


class Arguments(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(defined, obj.docstring.value.split("\n\n")))


def defined(paragraph: str) -> str:
    """In Markdown. Two spaces behind the first names tell the paragraph from prose; lines that are indented go on."""
    names = NAMES.match(paragraph)
    if names is None or not paragraph[names.end() :].startswith("  "):
        return paragraph
    lines = []
    for line in paragraph.splitlines():
        names = NAMES.match(line)
        if names is None:
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", f"`{names[0].replace(', ', '`, `')}`", f":   {line[names.end() :].strip()}"]
    return "\n".join(lines[1:])
