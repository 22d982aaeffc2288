"""PyTorch's own test files, run as they are and against this package: what passes by itself has to pass in every way.

    python tests/torch_own.py pytorch/test/test_transformers.py [-k sdpa] [--ways override tiled direct]

The files are PyTorch's, of the release that is installed; they need expecttest, and some need more. Each way runs in a
process of its own: `plain` is PyTorch by itself, `override` and `tiled` are under `tilewise.sdpa.enable`, and `direct`
has `tilewise.scaled_dot_product_attention` in the place of PyTorch's function. Prints the counts of each way and the
tests that pass by themselves alone, and exits with 1 where there are some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PLAIN = "plain"
WAYS = ("override", "tiled", "direct")
_WAY, _OUTCOMES = "TILEWISE_TORCH_OWN_WAY", "TILEWISE_TORCH_OWN_OUTCOMES"


class Outcomes:
    """A plugin of pytest: notes what became of every test."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found[report.nodeid] = "failed"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            known = self.found.get(report.nodeid)
            self.found[report.nodeid] = "failed" if known == "failed" else report.outcome


def enter(way: str) -> None:
    """Begin a way, for the rest of this process."""
    if way == PLAIN:
        return
    import torch.nn.functional as F

    import tilewise

    if way == "direct":
        F.scaled_dot_product_attention = tilewise.scaled_dot_product_attention
    else:
        tilewise.sdpa.enable(backend="tiled" if way == "tiled" else "auto")


def run_here(arguments: list[str]) -> None:
    """The process of a way."""
    enter(os.environ[_WAY])
    outcomes = Outcomes()
    pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-c", os.devnull], plugins=[outcomes])
    Path(os.environ[_OUTCOMES]).write_text(json.dumps(outcomes.found))


def run(way: str, file: Path, select: str) -> dict[str, str]:
    """What became of the file's tests in a way: passed, failed or skipped."""
    arguments = [str(file.resolve()), *(["-k", select] if select else [])]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        path = os.pathsep.join(part for part in (str(_SOURCES), os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, _WAY: way, _OUTCOMES: str(outcomes), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env=environment, cwd=file.resolve().parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not outcomes.exists():
            said = (done.stdout + done.stderr)[-4000:]
            raise SystemExit(f"{file} {way}: ended with status {done.returncode}\n{said}")
        found: dict[str, str] = json.loads(outcomes.read_text())
        return found


_SOURCES = Path(__file__).resolve().parents[1] / "src"


def lost(plain: dict[str, str], there: dict[str, str]) -> list[str]:
    """The tests that pass by themselves, and not in a way."""
    return [name for name, outcome in plain.items() if outcome == "passed" and there.get(name) != "passed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="files of PyTorch's folder test")
    parser.add_argument("-k", dest="select", default="", help="only these tests, as pytest selects them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    failed = False
    for file in options.files:
        plain = run(PLAIN, file, options.select)
        print(f"{file.name} {PLAIN}: {counts(plain)}", flush=True)
        for way in options.ways:
            there = run(way, file, options.select)
            names = lost(plain, there)
            print(f"{file.name} {way}: {counts(there)}; {len(names)} pass only by themselves", flush=True)
            print("".join(f"    {name}: {there.get(name, 'not run')}\n" for name in names), end="")
            failed = failed or bool(names)
    return int(failed)


def counts(found: dict[str, str]) -> str:
    number = Counter(found.values())
    return ", ".join(f"{number[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    if _WAY in os.environ:
        run_here(sys.argv[1:])
    else:
        sys.exit(main())
