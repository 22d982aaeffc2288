"""The `tilewise` command. Every subcommand prints plain text into a pipe, tables on a terminal, or JSON when asked."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ..errors import InvalidInput
from ..plan import AUTO, plan
from ..target import Target

if TYPE_CHECKING:
    from .compare import Comparison

try:
    import rich  # noqa: F401  (a command without it would fail half way)
    import typer

    from . import bench as benches
    from . import builds, environment, ladder_docs, pages, plots, records, report, suites
    from . import cycles as cyclecount
    from . import docs as documents
    from .cli_check import check
    from .cli_diff import diff
    from .cli_inspect import inspect
    from .cli_magnitudes import magnitudes
    from .cli_trace import trace
    from .cli_tune import ladder, tune
    from .compare import Settings
    from .options import (
        DEVICE,
        EXIT_CODES,
        FAILED,
        Command,
        Deterministic,
        Dropout,
        Dtype,
        ExtraCandidates,
        HeadDimV,
        Html,
        Json,
        KvHeads,
        LayoutText,
        Lse,
        MaskText,
        Only,
        Quiet,
        Record,
        Repeat,
        Scale,
        Seed,
        SeqKv,
        Shape,
        Softcap,
        TargetName,
        TimeLimit,
        TorchVersion,
        Verbose,
        exit_codes,
        leave,
        make_arch,
        make_candidates,
        make_problem,
        make_target,
        measuring,
        refuse_ignored,
    )
    from .output import Outputs, check_folder
    from .pool import Pool
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    print(
        f"tilewise: the command line needs {missing.name}, which is not installed.\n"
        "  What to do: pip install 'tilewise[lab]'.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

app = typer.Typer(
    name="tilewise",
    help=f"Which attention kernel runs, why, and how fast.\n\n{EXIT_CODES}",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for _command in (inspect, check, magnitudes, trace, tune, ladder, diff):
    app.command(cls=Command)(_command)


@app.callback(invoke_without_command=True)
def tilewise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of tilewise and PyTorch.")] = False,
) -> None:
    if version:
        found = environment.versions()
        print(f"tilewise {found['tilewise']}, torch {found['torch']}, Python {found['python']}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command(cls=Command)
def explain(
    shape: Shape,
    kv_heads: KvHeads = None,
    seq_kv: SeqKv = None,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    mask: MaskText = "full",
    scale: Scale = None,
    softcap: Softcap = 0.0,
    dropout: Dropout = 0.0,
    layout: LayoutText = "bhsd",
    grad: Annotated[bool, typer.Option("--grad", help="Gradients will be wanted.")] = False,
    lse: Lse = False,
    deterministic: Deterministic = False,
    precision: Annotated[str, typer.Option(help="exact, or for float32 also tf32.")] = "exact",
    target: TargetName = "auto",
    torch_version: TorchVersion = None,
    backend: Annotated[str, typer.Option(help="Only this backend, or auto.")] = AUTO,
    json: Json = None,
) -> None:
    """Which backend would run, why, and why not the others. Runs nothing and needs no GPU."""
    with exit_codes():
        outputs = Outputs(json)
        problem = make_problem(
            shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, dropout, layout, grad, lse, deterministic
        ).with_(precision=precision)
        chosen = plan(problem, make_target(target, torch_version), backend)
        outputs.write(chosen.to_dict())
        if outputs.text:
            print(chosen)


@app.command(cls=Command)
def bench(
    suite: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(suites.SUITES)}; may be repeated. cpu by default.")
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
    """Verify, then time a suite of problems against PyTorch's best path. Last line: geomean G, worst W (row)."""
    with exit_codes():
        outputs = Outputs(json, page)
        check_folder("--plot", plot)
        if record is not None:
            refuse_ignored(
                "with --record", "suite", "only", "repeat", "seconds", "candidate", "compile_first", "time_limit",
                "seed", "save", "results",
            )  # fmt: skip
            kept = records.read(record)
            _show_bench(kept, kept.comparisons(), plot, outputs, Looks(verbose, quiet))
            return
        if save:
            check_folder("--results", results)
        chosen, more = tuple(only or ()), make_candidates(candidate)
        asked = {name: suites.suite(name, chosen, more, seed) for name in suite or ["cpu"]}
        if len(asked) > 1 and (json or page or plot):
            raise InvalidInput(
                "--suite", ", ".join(asked), "one suite with --json, --html or --plot", "ask for one, or use --save"
            )
        for device in {row.device for rows in asked.values() for row in rows}:
            Target.of(device)
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
                    kept_at = benches.save(result, results)
                    print(f"saved {kept_at}", file=sys.stderr)
                _show_bench(records.Record("this run", "", result), done, plot, outputs, Looks(verbose, quiet))
                if not all(comparison.complete for comparison in done):
                    break
        leave(done)


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


@app.command(cls=Command)
def docs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if something is stale.")] = False,
    root: Annotated[Path, typer.Option(help="The folder of the checkout.")] = Path(),
) -> None:
    """Write the tables and plots of README.md and docs/ from the newest records, between their markers."""
    with exit_codes():
        documents.check_root(root)
        if check:
            stale = [str(page.path) for page in documents.pages(root) if page.stale]
            stale += map(str, [*documents.stale_plots(root), *ladder_docs.stale(root)])
            print("\n".join(f"stale: {path}" for path in stale) or "all tables and plots are those of the records")
            raise typer.Exit(FAILED if stale else 0)
        for page in documents.pages(root):
            if page.stale:
                page.path.write_text(page.after, encoding="utf-8")
                print(f"wrote {page.path}")
        for path in (*documents.draw_all(root), *ladder_docs.write(root)):
            print(f"drew {path}")


@app.command(cls=Command)
def cycles(
    suite: Annotated[str, typer.Option(help="A suite of bench whose rows run on a GPU.")] = "forward",
    only: Only = None,
    candidate: ExtraCandidates = None,
    time_limit: TimeLimit = 300.0,
    seed: Seed = 0,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
    json: Json = None,
) -> None:
    """GPU cycles of a suite's candidates by Nsight Compute: a clock that moves with power does not move these."""
    with exit_codes():
        outputs = Outputs(json)
        if save:
            check_folder("--results", results)
        Target.of("cuda")
        rows = suites.suite(suite, tuple(only or ()), make_candidates(candidate), seed)
        found = cyclecount.measure(rows, seed, time_limit)
        result = cyclecount.record(suite, found, seed, environment.command_line())
        if save:
            print(f"saved {benches.save(result, results)}", file=sys.stderr)
        outputs.write(result)
        if outputs.text:
            cyclecount.show(found)


@app.command("compile", cls=Command)
def compile_kernels(
    arch: Annotated[
        str, typer.Option("--target", help="sm_90, a GPU by name, cuda:0, or auto: this machine's.")
    ] = "auto",
    json: Json = None,
) -> None:
    """Build every CUDA kernel for an architecture ahead of its first use. Needs no GPU."""
    with exit_codes():
        outputs = Outputs(json)
        built = builds.build_kernels(make_arch(arch))
        outputs.write([result.to_dict() for result in built])
        if outputs.text:
            builds.show(built)
        if any(result.error for result in built):
            raise typer.Exit(DEVICE)


@app.command(cls=Command)
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


def main() -> None:
    # A request to end counts as an interrupt: what was measured until then is shown and saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
