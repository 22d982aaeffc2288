"""`tilewise bench`: its options, and what it shows and writes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import typer

from ...errors import InvalidInput
from ...native import library
from ..measure import environment
from ..measure.compare import Settings
from ..measure.pool import Pool
from ..render import pages, plots
from ..studies import bench as benches
from ..studies import host, kept, records, suites
from .options import (
    ExtraCandidates,
    Html,
    Json,
    Only,
    Quiet,
    Record,
    Repeat,
    TimeLimit,
    Verbose,
    exit_codes,
    leave,
    make_candidates,
    measuring,
    need_device,
    refuse_ignored,
)
from .output import Outputs, check_folder, open_outputs

if TYPE_CHECKING:
    from ..measure.compare import Comparison


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(suites.SUITES)}; may be repeated; or {host.SUITE}. cpu by default."),
    ] = None,
    only: Only = None,
    repeat: Repeat = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Measured seconds per candidate and round; 0.1 on a CPU, 0.03 on a GPU, 0.01 in drawn by default.",
            min=1e-3,
        ),
    ] = None,
    candidate: ExtraCandidates = None,
    compile_first: Annotated[
        bool, typer.Option("--ahead", help="Compile what the rows need first, side by side: for empty caches.")
    ] = False,
    time_limit: TimeLimit = 60.0,
    seed: Annotated[
        int, typer.Option(help="Seed of inputs, sampling and order, and of the problems of the suite drawn.")
    ] = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    plot: Annotated[Path | None, typer.Option(help="Draw the record into this folder, as SVG.")] = None,
    record: Record = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = None,
    page: Html = None,
) -> None:
    """Verify, then time a suite of problems against all that is not ours. Last line: geomean G, worst W (row)."""
    with exit_codes():
        check_folder("--plot", plot)
        if record is not None:
            outputs = Outputs(json, page)
            refuse_ignored(
                "with --record", "suite", "only", "repeat", "seconds", "candidate", "compile_first",
                "time_limit", "seed", "save", "results",
            )  # fmt: skip
            earlier = records.read(record)
            _show_bench(earlier, earlier.comparisons, plot, outputs, Looks(verbose, quiet))
            return
        outputs = open_outputs(json, page, save, results)
        if host.SUITE in (suite or ()) and suite != [host.SUITE]:
            raise InvalidInput(
                "--suite", ", ".join(suite or ()), f"{host.SUITE} alone", "measure it in a run of its own"
            )
        if suite == [host.SUITE]:
            _measure_host(outputs, repeat, save, results)
            return
        chosen, more = tuple(only or ()), make_candidates(candidate)
        asked = {name: suites.suite(name, chosen, more, seed) for name in suite or ["cpu"]}
        if len(asked) > 1 and (json or page or plot):
            raise InvalidInput(
                "--suite", ", ".join(asked), "one suite with --json, --html or --plot", "ask for one, or use --save"
            )
        for device in {row.device for rows in asked.values() for row in rows}:
            need_device(device, "run on a machine with an NVIDIA GPU and PyTorch's build for CUDA, or give --suite cpu")
        if not any(row.device.startswith("cuda") for rows in asked.values() for row in rows):
            refuse_ignored("for rows that run on the CPU, where nothing is compiled", "compile_first")
        done: list[Comparison] = []
        if compile_first:
            every = [row for rows in asked.values() for row in rows]
            benches.compile_ahead(every, Settings(time_limit=time_limit, seed=seed))
        with Pool() as pool:
            for name, rows in asked.items():
                on_gpu = any(row.device.startswith("cuda") for row in rows)
                first = 7 if on_gpu else 11
                usual = measuring(
                    repeat,
                    first,
                    3 * first,
                    more_seconds=2.0 if on_gpu else 10.0,
                    round_seconds=0.03 if on_gpu else 0.1,
                    time_limit=time_limit,
                    seed=seed,
                    overhead=True,
                    together=on_gpu,
                )
                settings = replace(usual, **suites.SETTINGS.get(name, {}))
                settings = replace(settings, round_seconds=seconds or settings.round_seconds)
                done = benches.run(rows, settings, pool)
                result = benches.record(name, done, settings, environment.command_line())
                if save:
                    kept_at = kept.save(result, results)
                    print(f"saved {kept_at}", file=sys.stderr)
                _show_bench(records.Record("this run", "", result), done, plot, outputs, Looks(verbose, quiet))
                if not all(comparison.complete for comparison in done):
                    break
        leave(done)


def _measure_host(outputs: Outputs, rounds: int | None, save: bool, results: Path) -> None:
    """The suite that times no kernel, but the way to it."""
    refuse_ignored(
        "with --suite host",
        "only",
        "seconds",
        "candidate",
        "compile_first",
        "time_limit",
        "seed",
        "plot",
        "page",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = host.usual(device)
    os.environ.setdefault(library.SETTING, "on")
    if device == "cuda" and library.status()[0] is False and library.is_wanted():
        library.build()  # rather than in the background, while we measure
    costs = host.measure(device, shape, dtype, rounds or host.ROUNDS)
    result = host.record(costs, device, shape, environment.command_line())
    if save:
        print(f"saved {kept.save(result, results)}", file=sys.stderr)
    if outputs.text:
        print(*host.lines(costs), sep="\n")
    outputs.write(result)


class Looks(NamedTuple):
    """How much is printed."""

    verbose: bool = False
    quiet: bool = False


def _show_bench(
    record: records.Record, comparisons: list[Comparison], plot: Path | None, outputs: Outputs, looks: Looks
) -> None:
    if outputs.text:
        benches.show(comparisons, record, **looks._asdict())
    outputs.write(record.values, lambda: pages.bench_page(record))
    for path in plots.draw(record, plot) if plot else ():
        print(f"drew {path}", file=sys.stderr)
