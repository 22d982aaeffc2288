"""`tilewise env`: its options, and its text."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from .. import report
from ..measure import environment
from .command import grouped, taking
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)


@grouped
def env(
    output: Annotated[OutputOptions, taking("json")],
    imports: Annotated[bool, typer.Option("--imports", help="Measure how long importing takes, too.")] = False,
) -> None:
    """Versions, devices, caches, variables and PyTorch's attention settings: what a bug report needs."""
    found = environment.facts()
    if imports:
        with report.Bar(1) as bar:
            bar.tick("importing torch and tilewise in fresh processes")
            found["import seconds"] = environment.import_seconds()
    output.deliver(found, lambda: print("\n".join(_topics(found))))


def _topics(found: dict[str, Any]) -> list[str]:
    return [line for topic, values in found.items() for line in (f"{topic}:", *(f"  {x}" for x in _indented(values)))]


def _indented(values: Any) -> list[str]:
    """Aligned `name  value` lines; lists of dictionaries become numbered blocks."""
    if isinstance(values, list):
        blocks = [[f"{number}:", *(f"  {line}" for line in _indented(v))] for number, v in enumerate(values)]
        return [line for block in blocks for line in block] or ["none"]
    if not values:
        return ["none"]
    width = max(map(len, values))
    return [f"{name.ljust(width)}  {_text(value)}" for name, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
