"""What README.md and docs/ cite, measured where it is missing or older than the kernels; and the check of it.

    make evidence PYTHON=python3            # on a machine with a GPU: what is lacking, the most cited first
    make evidence-check                     # anywhere: fails where a figure is not backed by a record
    python tools/evidence.py --compile      # fills the caches of kernels, beside other work, for --compiled
    python tools/evidence.py --list         # what would be measured, and about how long that takes
    python tools/evidence.py --only odd,ladder    # these alone, suites and then programs, in the order given

A run ends after `--minutes`, saves every few rows, and the next one goes on where it ended, on that day or another. The
records of a GPU have fixed names, such as `h200-forward.json`; a row that was measured again takes the place of the
earlier one, and git keeps that. Without a GPU the suite of the CPU is measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import documents
import torch
from documents import ladder as ladder_page
from documents import programs, reports
from documents.programs import host, tile_map
from documents.records import Checkout

from tilewise.errors import InvalidInput
from tilewise.lab.measure import environment
from tilewise.lab.measure.compare import Settings
from tilewise.lab.measure.pool import Pool
from tilewise.lab.studies import bench, kept, ladder, records, suites, tune
from tilewise.lab.studies import inspect as inspection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tilewise.lab.measure.compare import Row

ROOT = Path(__file__).resolve().parent.parent
SUITES = (
    "backward", "forward", "odd", "chunked", "decode", "packed", "grouped", "variants", "training", "drawn", "float32",
    "sm80", "models", "small",
)  # fmt: skip
"""The suites of a GPU, those that a reader meets first ahead of the others."""
SEEDS = {"drawn": 20261119}
ROUNDS = 7
MAX_BYTES = 8 * 2**20  # of the results folder
_MARKS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    **dict.fromkeys((programs.KIND, tile_map.KIND, inspection.KIND), records.marks_of),
    host.KIND: host.marks,
    ladder.KIND: ladder.marks,
    tune.KIND: tune.marks,
}
"""Why a record of a kind other than the suites' may not be cited."""
_NO_KERNELS = ("tilewise instrument",)  # it compares one function with itself: no kernel of ours is measured
_BUNCH = 12  # rows between two savings
_GUESS = 2.5  # seconds of a row, where no row of its suite was ever measured


class Program(NamedTuple):
    """A record that is not of a suite: how it is made, and whether it is to be made."""

    name: str  # of the file
    command: tuple[str, ...]
    lacks: Callable[[Checkout], bool]  # a record that may be cited
    seconds: float = 60.0


def _program(suite: str, kind: str, command: str, seconds: float) -> Program:
    def lacks(checkout: Checkout) -> bool:
        return next(programs.records_of(checkout, suite, kind), None) is None

    return Program(suite, (command, "--save"), lacks, seconds)


def _report(report: reports.Report) -> Program:
    return Program(report.name, _module(report.command), lambda checkout: reports.find(report, checkout) is None, 40.0)


def _sweep(report: reports.SweepReport, seconds: float) -> Program:
    command = _module(report.command)
    return Program(report.name, command, lambda checkout: reports.find_sweep(report.backend, checkout) is None, seconds)


def _module(command: str) -> tuple[str, ...]:
    """`tilewise ...` as a module of this interpreter."""
    return ("-m", *command.split())


PROGRAMS = (
    _program("transformers", programs.KIND, "benchmarks/models.py", 150.0),
    _program(f"{host.SUITE}-cuda", host.KIND, "benchmarks/host.py", 30.0),
    _program("eager", programs.KIND, "benchmarks/eager.py", 100.0),
    _program(tile_map.SUITE, tile_map.KIND, "benchmarks/tile_map.py", 30.0),
    Program("ladder", _module(ladder_page.COMMAND), lambda checkout: ladder_page.newest(checkout) is None, 60.0),
    *(_sweep(report, 45.0) for report in reports.SWEPT),
    *(_report(report) for report in reports.REPORTS if "--tensors" not in report.command),
)


def slug(device: str) -> str:
    """NVIDIA H200 -> h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


class Lacking(NamedTuple):
    """The rows of a suite that are no evidence on a device, and the record that holds the others."""

    suite: str
    rows: list[Row]
    path: Path
    before: records.Record | None
    seconds: float  # that measuring them will take, judged by earlier records of the suite


def lacking(suite: str, device: str, folder: Path) -> Lacking:
    path = folder / f"{slug(device)}-{suite}.json"
    before = records.read(path) if path.is_file() else None
    seed = SEEDS.get(suite, 0)
    if before is not None and before.seed != seed:
        before = None
    rows = suites.suite(suite, seed=seed)
    if before is not None:
        wanting = before.shortcomings()
        rows = [row for row in rows if row.name in wanting]
    return Lacking(suite, rows, path, before, expected(rows, suite, device, folder))


def expected(rows: list[Row], suite: str, device: str, folder: Path) -> float:
    """Seconds that rows will take: what each took the last time, or what rows of its suite took on the average."""
    earlier = [one for one in records.read_all(folder) if one.suite == suite and one.device == device]
    known = {c.row.name: c.seconds for record in earlier for c in record.comparisons if c.seconds}
    usual = sum(known.values()) / len(known) if known else _GUESS
    return sum(known.get(row.name, usual) for row in rows)


def measure(found: Lacking, pool: Pool, stop: float, *, compiled: bool) -> bool:
    """Measure what is lacking, bunch by bunch, until the time is up; whether all of it was."""
    on_gpu = found.rows[0].device.startswith("cuda")
    usual = Settings(rounds=ROUNDS, time_limit=60.0, seed=SEEDS.get(found.suite, 0), together=on_gpu, overhead=True)
    settings = replace(usual, **suites.settings_of(found.suite) or {"round_seconds": 0.03 if on_gpu else 0.1})
    if on_gpu and not compiled:
        bench.compile_ahead(found.rows, settings)
    before = found.before
    for rows in bunches(found.rows):
        if time.monotonic() > stop:
            return False
        done = bench.run(rows, settings, pool)
        values = bench.record(found.suite, done, settings, environment.command_line())
        kept.write(values if before is None else records.merged(before, values), found.path)
        before = records.read(found.path)
        print(f"{found.suite}: {len(before.comparisons)} rows, {bench.score(done)}", flush=True)
        if not all(comparison.complete for comparison in done):
            return False
    return True


def bunches(rows: list[Row]) -> Iterator[list[Row]]:
    """Some rows at a time; those of one problem, which are verified together, are not parted."""
    bunch: list[Row] = []
    for _, alike in groupby(rows, key=lambda row: row.problem.with_(needs_grad=False)):
        bunch += alike
        if len(bunch) >= _BUNCH:
            yield bunch
            bunch = []
    if bunch:
        yield bunch


def run_program(program: Program, device: str) -> bool:
    """Run it, and give its record the fixed name; whether it succeeded. The other programs run all the same."""
    folder = ROOT / bench.RESULTS
    before = set(folder.glob("*.json"))
    status = subprocess.run([sys.executable, *program.command], cwd=ROOT, check=False).returncode
    for path in set(folder.glob("*.json")) - before:
        path.replace(folder / f"{slug(device)}-{program.name}.json")
    if status:
        print(f"{program.name}: ended with status {status}", flush=True)
    return status == 0


def complaints(root: Path) -> list[str]:
    """What generated parts of README.md and docs/ take from records that may not be cited."""
    found = []
    for name in documents.cited(root):
        try:
            record = kept.read(root / bench.RESULTS / name)
        except InvalidInput as error:
            found.append(f"{name}: pages take figures from this record, which cannot be read: {error}")
            continue
        if record["kind"] == records.KIND:
            why = records.read(root / bench.RESULTS / name).shortcomings()
            found += [f"{name}: {row}: {text}" for row, text in why.items()]
        elif record["kind"] in _MARKS:
            found += [f"{name}: {mark}" for mark in _MARKS[record["kind"]](record)]
        elif record["kind"] not in _NO_KERNELS:
            found.append(f"{name}: a {record['kind']} record does not name its kernels: no generated part may cite it")
    return found


def not_cited(root: Path) -> list[str]:
    """Records that no page and no generated table names."""
    text = _text(root)
    dates = {path.name: str(kept.date(path)) for path in (root / bench.RESULTS).glob("*.json")}
    return sorted(name for name, date in dates.items() if name not in text and not (date and date in text))


def not_there(root: Path) -> list[str]:
    """Records that pages link to and that the folder does not hold."""
    linked = set(documents.LINK.findall(_text(root)))
    return sorted(name for name in linked if not (root / bench.RESULTS / name).is_file())


def _text(root: Path) -> str:
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.html")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def check(root: Path) -> list[str]:
    """Everything that is wrong with the evidence of a checkout, in lines for a person."""
    size = sum(path.stat().st_size for path in (root / bench.RESULTS).iterdir())
    found = complaints(root)
    if not found:  # else pages differ for that reason
        stale = documents.stale(root)
        found += [f"{path.relative_to(root)}: differs from its records: run `make docs`" for path in stale]
    if size > MAX_BYTES:
        found.append(f"{bench.RESULTS} holds {size / 2**20:.1f} MB, more than {MAX_BYTES / 2**20:.0f}: delete records")
    found += [f"{name}: pages link to this record, which is not there" for name in not_there(root)]
    return found + [f"{name}: nothing cites this record: delete it, or say what it shows" for name in not_cited(root)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure nothing; fail if a figure is not backed")
    parser.add_argument("--list", action="store_true", help="what is lacking on this machine, and how long it takes")
    parser.add_argument("--minutes", type=float, default=8.5, help="end after so long; 8.5 by default")
    parser.add_argument("--only", action="append", default=[], help="suites or programs, by commas; may be repeated")
    parser.add_argument("--compile", action="store_true", help="fill the caches with what rows need")
    parser.add_argument("--compiled", action="store_true", help="the caches hold what rows need")
    asked = parser.parse_args()
    if asked.check:
        found = check(ROOT)
        print(
            "\n".join(found) or "every figure of README.md and docs/ is backed by a record of the kernels as they are"
        )
        return 1 if found else 0
    on_gpu = torch.cuda.is_available()
    stop = time.monotonic() + 60.0 * asked.minutes
    device = environment.device_line("cuda" if on_gpu else "cpu").partition(",")[0]
    names, programs = chosen([name for text in asked.only for name in text.split(",")], on_gpu=on_gpu)
    checkout = Checkout(ROOT)
    waiting = [found for name in names if (found := lacking(name, device, ROOT / bench.RESULTS)).rows]
    programs = [program for program in programs if program.lacks(checkout)]
    for found in waiting:
        print(f"{found.suite}: {len(found.rows)} rows, about {found.seconds:.0f} s", flush=True)
    for program in programs:
        print(f"{program.name}: about {program.seconds:.0f} s", flush=True)
    if asked.list:
        return 0
    if asked.compile:
        bench.compile_ahead([row for found in waiting for row in found.rows], Settings(time_limit=60.0))
        return 0
    with Pool() as pool:
        for found in waiting:
            if time.monotonic() > stop or not measure(found, pool, stop, compiled=asked.compiled):
                return ended()
    succeeded = True
    for program in programs:
        if time.monotonic() + program.seconds > stop:
            return ended()
        succeeded &= run_program(program, device)
    return int(not succeeded)


def chosen(only: list[str], *, on_gpu: bool) -> tuple[list[str], list[Program]]:
    """The suites and the programs of this machine: those asked for, in that order, or all."""
    names = list(SUITES if on_gpu else ("cpu",))
    programs = {program.name: program for program in PROGRAMS if on_gpu}
    if unknown := [name for name in only if name not in (*names, *programs)]:
        raise SystemExit(f"evidence: no {', '.join(unknown)} on this machine: choose {', '.join((*names, *programs))}")
    if not only:
        return names, list(programs.values())
    return [name for name in only if name in names], [programs[name] for name in only if name in programs]


def ended() -> int:
    print("the time is up: what is lacking is measured by the next run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
