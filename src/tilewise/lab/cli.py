"""The `tilewise` command. Every subcommand prints plain text into a pipe, tables on a terminal, or JSON when asked."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import torch

from .. import masks
from ..errors import InvalidInput, TilewiseError, UnsupportedProblem
from ..plan import AUTO, plan
from ..problem import Problem, parse_dtype
from ..target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .compare import Comparison

try:
    import typer

    from . import bench as benches
    from . import builds, environment, report
    from . import cycles as cyclecount
    from . import inspect as inspection
    from .candidates import PYTHON, Candidate
    from .compare import Settings
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    print(
        f"tilewise: the command line needs {missing.name}, which is not installed.\n"
        "  What to do: pip install 'tilewise[lab]'.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

FAILED, USAGE, UNSUPPORTED, DEVICE, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = """Exit codes: 0 all is well; 1 a candidate died, hung, raised or gave wrong numbers; 2 bad usage or input;
3 no backend takes the problem; 4 the device, the driver or a compiler refused; 130 interrupted."""

app = typer.Typer(
    name="tilewise",
    help=f"Which attention kernel runs, why, and how fast.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Shape = Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q, e.g. 1,32,4096,128.")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads, if fewer than q's.")]
SeqKv = Annotated[int | None, typer.Option(help="Length of k and v, if not q's.")]
HeadDimV = Annotated[int | None, typer.Option(help="head_dim of v, if not q's.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16, float32 or float64.")]
MaskText = Annotated[
    str,
    typer.Option(
        help="full, causal[:bottom-right], window:LEFT,RIGHT[:bottom-right], documents:0,a,b[:INNER] or "
        "dense:bool|additive:SHAPE such as dense:bool:1x1x512x512."
    ),
]
Scale = Annotated[float | None, typer.Option(help="Scale of the scores; 1/sqrt(head_dim) by default.")]
Softcap = Annotated[float, typer.Option(help="softcap * tanh(score / softcap); 0 = off.")]
Dropout = Annotated[float, typer.Option(help="Dropout probability.")]
LayoutText = Annotated[str, typer.Option(help="Memory order of the tensors: bhsd or bshd.")]
Lse = Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted too.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Deterministic algorithms are asked for.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0, or auto: a GPU if there is one.")]
Seed = Annotated[int, typer.Option(help="Seed of inputs, sampling and order.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds a candidate may take for one step.", min=0.1)]
Repeat = Annotated[int, typer.Option(help="Rounds in which every candidate is timed once.", min=1)]
Timing = Annotated[str, typer.Option(help="wall, events, graph or host; auto: wall on a CPU, events on a GPU.")]
Flush = Annotated[bool, typer.Option("--flush", help="Overwrite the GPU's L2 cache before each call (events only).")]
TargetName = Annotated[str, typer.Option(help="A GPU by name (h200, a100, ...), cpu, cuda:0, or auto: this machine.")]
TorchVersion = Annotated[str | None, typer.Option("--torch", help="Plan for this PyTorch release, e.g. 2.12.")]
ExtraCandidates = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        help="Another candidate (may be repeated): a name such as sdpa:math, or your function as mypkg.mod:fn or "
        "file.py:fn, called as fn(q, k, v, problem, bias).",
    ),
]


@app.command()
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
    target: TargetName = "auto",
    torch_version: TorchVersion = None,
    backend: Annotated[str, typer.Option(help="Only this backend, or auto.")] = AUTO,
    json: Json = False,
) -> None:
    """Which backend would run, why, and why not the others. Runs nothing and needs no GPU."""
    with _exit_codes():
        problem = make_problem(
            shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, dropout, layout, grad, lse, deterministic
        )
        chosen = plan(problem, make_target(target, torch_version), backend)
        if json:
            report.print_json(chosen.to_dict())
        else:
            print(chosen)


@app.command()
def inspect(
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
    lse: Lse = False,
    deterministic: Deterministic = False,
    backward: Annotated[bool, typer.Option(help="Time and verify the backward too.")] = False,
    device: Device = "auto",
    timing: Timing = "auto",
    flush: Flush = False,
    candidate: ExtraCandidates = None,
    repeat: Repeat = 7,
    time_limit: TimeLimit = 30.0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Run every willing backend here, each in a process of its own: verified against float64, timed, in one table."""
    with _exit_codes():
        problem = make_problem(
            shape, kv_heads, seq_kv, head_dim_v, dtype, mask, scale, softcap, dropout, layout,
            backward, lse, deterministic,
        )  # fmt: skip
        settings = Settings(rounds=repeat, time_limit=time_limit, seed=seed)
        where = make_device(device)
        found = inspection.inspect(
            problem, where, settings, extra=make_candidates(candidate), method=make_method(timing, where), flush=flush
        )
        if json:
            report.print_json(
                found.to_dict() | {"provenance": environment.provenance(seed, environment.command_line())}
            )
        else:
            inspection.show(found)
        _exit([found.comparison])


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(benches.SUITES)}.")] = "cpu",
    only: Annotated[str, typer.Option(help="Only rows whose name contains this.")] = "",
    repeat: Repeat = 11,
    candidate: ExtraCandidates = None,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write the record to this file; - for standard output.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
) -> None:
    """Verify, then time a suite of problems against PyTorch's best path. Last line: geomean G, worst W (row)."""
    with _exit_codes():
        rows = benches.suite(suite, only, make_candidates(candidate))
        for device in {row.device for row in rows}:
            Target.of(device)
        settings = Settings(rounds=repeat, time_limit=time_limit, seed=seed, overhead=True)
        done = benches.run(rows, settings)
        result = benches.record(suite, done, settings, environment.command_line())
        if json is not None and str(json) != "-":
            json.write_text(report.to_json(result) + "\n", encoding="utf-8")
        if save:
            print(f"saved {benches.save(result, results)}", file=sys.stderr)
        if str(json) == "-":
            report.print_json(result)
        else:
            benches.show(done)
        _exit(done)


@app.command()
def cycles(
    suite: Annotated[str, typer.Option(help="A suite of bench whose rows run on a GPU.")] = "forward",
    only: Annotated[list[str] | None, typer.Option(help="Only rows with this in their name (may be repeated).")] = None,
    candidate: ExtraCandidates = None,
    time_limit: TimeLimit = 300.0,
    seed: Seed = 0,
    json: Json = False,
    save: Annotated[bool, typer.Option("--save", help="Add the record to the results folder, as a new file.")] = False,
    results: Annotated[Path, typer.Option(help="The results folder.")] = benches.RESULTS,
) -> None:
    """GPU cycles of a suite's candidates by Nsight Compute: a clock that moves with power does not move these."""
    with _exit_codes():
        Target.of("cuda")
        extra = make_candidates(candidate)
        rows = [row for text in only or [""] for row in benches.suite(suite, text, extra)]
        found = cyclecount.measure(rows, seed, time_limit)
        result = cyclecount.record(suite, found, seed, environment.command_line())
        if save:
            print(f"saved {benches.save(result, results)}", file=sys.stderr)
        if json:
            report.print_json(result)
        else:
            cyclecount.show(found)


@app.command("compile")
def compile_kernels(
    arch: Annotated[str, typer.Option("--target", help="sm_90a, a GPU by name, or auto: this machine's.")] = "auto",
    json: Json = False,
) -> None:
    """Build every CUDA kernel for an architecture ahead of its first use. Needs no GPU."""
    with _exit_codes():
        built = builds.build_kernels(make_arch(arch))
        if json:
            report.print_json([result.to_dict() for result in built])
        else:
            builds.show(built)
        if any(result.error for result in built):
            raise typer.Exit(DEVICE)


@app.command()
def env(
    imports: Annotated[bool, typer.Option("--imports", help="Measure how long importing takes, too.")] = False,
    json: Json = False,
) -> None:
    """Versions, devices, caches, variables and PyTorch's attention settings: what a bug report needs."""
    with _exit_codes():
        found = environment.facts()
        if imports:
            with report.Bar(1) as bar:
                bar.tick("importing torch and tilewise in fresh processes")
                found["import seconds"] = environment.import_seconds()
        if json:
            report.print_json(found)
            return
        for topic, values in found.items():
            print(f"{topic}:")
            for line in _indented(values):
                print(f"  {line}")


def make_problem(
    shape: str, kv_heads: int | None, seq_kv: int | None, head_dim_v: int | None, dtype: str, mask: str,
    scale: float | None, softcap: float, dropout: float, layout: str, grad: bool, lse: bool, deterministic: bool,
) -> Problem:  # fmt: skip
    try:
        batch, heads, seq, head_dim = (int(part) for part in shape.split(","))
    except ValueError:
        raise InvalidInput(
            "--shape", repr(shape), "four integers: batch,heads,seq,head_dim", "write e.g. --shape 1,32,4096,128"
        ) from None
    if scale == 0.0:
        raise InvalidInput("--scale", scale, "a finite number other than 0", "leave --scale out for the default")
    return Problem(
        batch=batch,
        heads_q=heads,
        heads_kv=heads if kv_heads is None else kv_heads,
        seq_q=seq,
        seq_kv=seq if seq_kv is None else seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=parse_dtype(dtype),
        mask=masks.parse(mask),
        scale=0.0 if scale is None else scale,
        softcap=softcap,
        dropout=dropout,
        layout=layout,  # type: ignore[arg-type]  # Problem checks it
        needs_grad=grad,
        needs_lse=lse,
        deterministic=deterministic,
    )


def make_target(name: str, torch_version: str | None) -> Target:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] != "cuda":
        try:
            return Target.named(name, torch_version=torch_version)
        except (ValueError, IndexError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput("--torch", repr(torch_version), "a release such as 2.12", "give major.minor") from None
    if torch_version is not None:
        raise InvalidInput(
            "--torch", repr(torch_version), f"nothing for the real device {name}", "name a target such as --target h200"
        )
    return Target.of(make_device(name))


def make_arch(name: str) -> str:
    """An architecture as the compiler spells it (sm_90a), from that, from a GPU's name, or from this machine's GPU."""
    if name.startswith("sm_"):
        return name
    target = make_target(name, None)
    if target.is_cpu:
        raise InvalidInput(
            "--target", repr(name), "an architecture or a GPU; there is none here", "name one: --target sm_90a"
        )
    return f"{target.arch}a" if target.capability == (9, 0) else target.arch


def make_device(name: str) -> str:
    """The device to run on, as torch spells it; it must be there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput("--device", repr(name), "cpu, cuda, cuda:N or auto", "choose one of these") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput("--device", repr(name), "cpu, cuda, cuda:N or auto", "choose one of these")
    Target.of(device)
    return name


def make_method(name: str, device: str) -> str:
    """A timing method that the device has; empty for the device's default."""
    fitting = ("events", "graph", "host") if device.startswith("cuda") else ("wall", "host")
    if name != "auto" and name not in fitting:
        raise InvalidInput("--timing", repr(name), f"auto, {', '.join(fitting)} on {device}", "choose one of these")
    return "" if name == "auto" else name


def make_candidates(given: list[str] | None) -> tuple[str, ...]:
    """mypkg.mod:fn and file.py:fn are functions of the user's; everything else is a candidate's name."""
    names = []
    for text in given or ():
        is_function = ":" in text and not text.startswith((PYTHON, "sdpa:"))
        names.append(Candidate(PYTHON + text if is_function else text).name)
    return tuple(names)


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


def _exit(comparisons: list[Comparison]) -> None:
    """Leave with the code that tells how the measurements ended, after they were shown."""
    if not all(comparison.complete for comparison in comparisons):
        raise typer.Exit(INTERRUPTED)
    if any(outcome.failed for comparison in comparisons for outcome in comparison.outcomes):
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """The package's exceptions as a message and an exit code, without a traceback."""
    try:
        yield
    except TilewiseError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        codes = {InvalidInput: USAGE, UnsupportedProblem: UNSUPPORTED}
        raise typer.Exit(codes.get(type(error), DEVICE)) from None
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def main() -> None:
    # A request to end counts as an interrupt: what was measured until then is shown and saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
