"""`tilewise bench`: its options, and what it shows and writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InvalidInput
from .. import report
from ..measure import environment
from ..measure.compare import Settings
from ..measure.pool import Pool
from ..render import bench_report
from ..studies import bench as benches
from ..studies import kept, records, suites
from .command import grouped, refuse_ignored, taking
from .options import Only, RunOptions, leave, need_device
from .output import OutputOptions  # noqa: TC001  (typer reads the annotations)

if TYPE_CHECKING:
    from ..measure.compare import Comparison, Row

_OF_RUNS = ("only", "seconds", "candidate", "compile_first", "time_limit", "seed")


@grouped
def bench(
    run: Annotated[RunOptions, taking("repeat", "candidate", time_limit=60.0)],
    output: Annotated[OutputOptions, taking("save", "results", "record", "verbose", "quiet", "json", "page")],
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(suites.names())}; may be repeated. cpu by default."),
    ] = None,
    only: Only = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Measured seconds per candidate and round; 0.1 on a CPU, 0.03 on a GPU, 0.01 in drawn by default.",
            min=1e-3,
        ),
    ] = None,
    compile_first: Annotated[
        bool, typer.Option("--ahead", help="Compile what the rows need first, side by side: for empty caches.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of inputs, sampling and order, and of the problems of the suite drawn.")
    ] = 0,
) -> None:
    """Verify, then time a suite of problems against all that is not ours. Last line: geomean G, worst W (row)."""
    if output.record is not None:
        refuse_ignored("with --record", *_OF_RUNS, "suite", "repeat", "save", "results")
        earlier = records.read(output.record)
        with kept.shown(output.record):
            _show_bench(earlier, output)
        return
    run = replace(run, seed=seed)
    chosen, more = tuple(only or ()), run.extra()
    asked = {name: suites.suite(name, chosen, more, seed) for name in suite or ["cpu"]}
    if len(asked) > 1 and (output.json or output.page):
        raise InvalidInput("--suite", ", ".join(asked), "one suite with --json or --html", "ask for one, or use --save")
    every = [row for rows in asked.values() for row in rows]
    for device in {row.device for row in every}:
        need_device(device, "run on a machine with an NVIDIA GPU and PyTorch's build for CUDA, or give --suite cpu")
    if not any(row.device.startswith("cuda") for row in every):
        refuse_ignored("for rows that run on the CPU, where nothing is compiled", "compile_first")
    done: list[Comparison] = []
    if compile_first:
        benches.compile_ahead(every, Settings(time_limit=run.time_limit, seed=seed))
    with Pool() as pool:
        for name, rows in asked.items():
            settings = _settings(name, rows, run, seconds)
            done = benches.run(rows, settings, pool)
            result = benches.record(name, done, settings, environment.command_line())
            _show_bench(records.Record("this run", "", result), output)
            if not all(comparison.complete for comparison in done):
                break
    leave(done)


def _settings(name: str, rows: list[Row], run: RunOptions, seconds: float | None) -> Settings:
    """How a suite is measured: by what its rows run on, and by what it asks for itself."""
    on_gpu = any(row.device.startswith("cuda") for row in rows)
    rounds = 7 if on_gpu else 11
    usual = run.settings(
        rounds,
        3 * rounds,
        more_seconds=2.0 if on_gpu else 10.0,
        round_seconds=0.03 if on_gpu else 0.1,
        overhead=True,
        together=on_gpu,
    )
    settings = replace(usual, **suites.settings_of(name))
    return replace(settings, round_seconds=seconds or settings.round_seconds)


def _show_bench(record: records.Record, output: OutputOptions) -> None:
    notes = [f"note: {mark}" for mark in record.marks()]
    shown = bench_report.report_of(kept.expanded(record.values), notes)
    output.deliver(record.values, lambda: report.show(shown, **output.looks))
