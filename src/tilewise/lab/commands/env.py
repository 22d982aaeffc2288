"""`tilewise env`: its options, and its text."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from .. import report
from ..measure import environment
from .options import (
    Json,
    exit_codes,
)
from .output import Outputs


def env(
    imports: Annotated[bool, typer.Option("--imports", help="Measure how long importing takes, too.")] = False,
    json: Json = None,
) -> None:
    """Versions, devices, caches, variables and PyTorch's attention settings: what a bug report needs."""
    with exit_codes():
        outputs = Outputs(json)
        found = environment.facts()
        if imports:
            with report.Bar(1) as bar:
                bar.tick("importing torch and tilewise in fresh processes")
                found["import seconds"] = environment.import_seconds()
        outputs.write(found)
        if not outputs.text:
            return
        for topic, values in found.items():
            print(f"{topic}:")
            for line in _indented(values):
                print(f"  {line}")


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
