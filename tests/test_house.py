"""The house keeps its size: docs/design.md says what every folder may cost, in lines, and why it earns that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tilewise"
NATIVE = (".cuh", ".cpp", ".h")
_ROW = re.compile(r"^\| `([^`]+)` \|(?: ([\d,]+))? \|(?: ([\d,]+))? \| (.+) \|$", re.MULTILINE)


def table() -> dict[str, tuple[int, int]]:
    """What the page allows: folder -> lines of Python, and of CUDA and C++."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("\n## Size\n")[2].partition("\n## ")[0]
    found = _ROW.findall(text)
    assert all(len(why) > 20 for *_, why in found), "every folder has a reason"
    return {name: (_number(python), _number(native)) for name, python, native, _ in found}


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)


def cost(name: str) -> tuple[int, int]:
    """Of a folder with all that is in it, or of the files that a pattern names."""
    place = ROOT / name
    files = list(place.parent.glob(place.name) if place.suffix else place.rglob("*"))
    return _lines(files, (".py",)), _lines(files, NATIVE)


def _lines(files: list[Path], suffixes: tuple[str, ...]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in files if path.suffix in suffixes)


@pytest.mark.parametrize("name", table())
def test_a_folder_costs_no_more_than_the_page_says(name: str) -> None:
    allowed, found = table()[name], cost(name)
    for what, lines, limit in zip(("Python", "CUDA and C++"), found, allowed, strict=True):
        assert lines <= limit, (
            f"{name} has {lines} lines of {what}, more than {limit}: make room, or raise the limit in docs/design.md "
            "together with the reason"
        )


def test_every_folder_has_a_row() -> None:
    others = {"src/tilewise", "src/tilewise/*.py", "tools", "benchmarks/*.py", "benchmarks/suites", "tests"}
    packages = {path for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    kernels = {path for path in (PACKAGE / "kernels").iterdir() if path.is_dir()}
    assert {path.relative_to(ROOT).as_posix() for path in packages | kernels} | others == set(table())
