"""What the commands share: their options, the objects made from them, and the exit codes."""

from __future__ import annotations

import contextlib
import sys
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from ... import masks
from ...errors import DeviceError, InvalidInput, TilewiseError, UnsupportedProblem
from ...problem import Problem, parse_dtype
from ...scores import softcapped
from ...target import Target
from ..candidates.names import KNOWN, OURS, PYTHON, Candidate, check_python
from ..measure.compare import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..measure.compare import Comparison

FAILED, USAGE, UNSUPPORTED, DEVICE, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = """Exit codes: 0 all is well; 1 a candidate died, hung, raised or gave wrong numbers; 2 bad usage or input;
3 no backend takes the problem; 4 the device, the driver or a compiler refused; 130 interrupted."""

Shape = Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q, e.g. 1,32,4096,128.")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads, if fewer than q's.")]
SeqKv = Annotated[int | None, typer.Option(help="Length of k and v, if not q's.")]
HeadDimV = Annotated[int | None, typer.Option(help="head_dim of v, if not q's.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16, float32 or float64.")]
Masks = Annotated[
    list[str] | None,
    typer.Option("--mask", help="A mask as in explain, full by default; may be repeated: every shape with every mask."),
]
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
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON to this file; - or nothing: to standard output, instead of text."),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a report to this file, one page that loads nothing; -: to standard output."),
]
Record = Annotated[Path | None, typer.Option("--record", help="Show this record again instead of measuring.")]
Grad = Annotated[bool, typer.Option("--grad", help="Gradients are wanted: the backward is looked at too.")]
FormerGrad = Annotated[bool, typer.Option("--backward", hidden=True)]  # what --grad was called
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="All there is to tell, not only the outcome.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the sentence that sums it up.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0, or auto: a GPU if there is one.")]
Seed = Annotated[int, typer.Option(help="Seed of inputs, sampling and order.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds a candidate may take for one step.", min=0.1)]
Repeat = Annotated[
    int | None,
    typer.Option(
        "--repeat",
        "--rounds",
        help="Exactly so many rounds, each of which times every candidate once. Without it a few, and more until the "
        "differences are clear or the time is up.",
        min=1,
    ),
]
Timing = Annotated[str, typer.Option(help="wall, events, graph or host; auto: wall on a CPU, events on a GPU.")]
Flush = Annotated[bool, typer.Option("--flush", help="Overwrite the GPU's L2 cache before each call (events only).")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only rows with this in their name; may be repeated; A+B: with both A and B in it."),
]
TargetName = Annotated[
    str,
    typer.Option(help="A GPU by name (h200, a100, ...) or architecture (sm_90), cpu, cuda:0, or auto: this machine."),
]
TorchVersion = Annotated[str | None, typer.Option("--torch", help="Plan for this PyTorch release, e.g. 2.12.")]
ExtraCandidates = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        help="Another candidate (may be repeated): a name such as torch-math, or your function as mypkg.mod:fn or "
        "file.py:fn, called as fn(q, k, v, problem, bias).",
    ),
]


class Command(TyperCommand):
    """A command that knows which options it was given, and takes `--json` without a value for standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_json_values(args))

    def invoke(self, ctx: Any) -> Any:
        _given.clear()
        for param in self.params:
            source = ctx.get_parameter_source(param.name)
            if source is not None and source.name == "COMMANDLINE":
                _given[str(param.name)] = max(param.opts, key=len)
        with exit_codes():
            if "quiet" in _given:
                refuse_ignored("with --quiet", "verbose")
            return super().invoke(ctx)


_given: dict[str, str] = {}  # parameter -> option, of the command that runs


def _with_json_values(args: list[str]) -> list[str]:
    """Bare `--json` becomes `--json -`. What follows `--` is another program's."""
    found: list[str] = []
    for place, word in enumerate(args):
        if word == "--":
            return found + args[place:]
        found.append(word)
        following = args[place + 1] if place + 1 < len(args) else "--"
        if word == "--json" and following.startswith("-") and following != "-":
            found.append("-")
    return found


def refuse_ignored(why: str, *names: str) -> None:
    """InvalidInput if one of these parameters was given, since it would have no effect, for the reason `why`."""
    for name in names:
        if name in _given:
            raise InvalidInput(_given[name], "the option", f"none: it has no effect {why}", "leave it out")


def measuring(repeat: int | None, rounds: int, max_rounds: int, **settings: Any) -> Settings:
    """As many rounds as were asked for; else `rounds`, and up to `max_rounds` while the differences are not clear."""
    if repeat is not None:
        return Settings(rounds=repeat, **settings)
    return Settings(rounds=rounds, max_rounds=max_rounds, **settings)


def packed_mask(inner: str, lengths: str | None) -> str:
    """The text of a mask for sequences of these lengths, under an inner mask each: numbers, or a file of them."""
    if lengths is None:
        return inner
    text = lengths
    if not lengths.replace(",", "").isdecimal():
        try:
            text = Path(lengths).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise InvalidInput(
                "--lengths", repr(lengths), f"lengths, or a file that can be read ({reason})", "write 64,128,2600"
            ) from None
    try:
        found = [int(word) for word in text.replace(",", " ").split()]
        return str(masks.Documents(tuple(accumulate(found, initial=0)), (), masks.parse(inner)))  # type: ignore[arg-type]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("--lengths", repr(lengths), "whole numbers", "write them as in 64,128,2600") from None


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
        scores=softcapped(softcap),
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
    _check_device("--target", name)
    return Target.of(name)


def make_arch(name: str) -> str:
    """An architecture as the compiler spells it (sm_90a), from that, from a GPU's name, or from this machine's GPU."""
    if name.startswith("sm_"):
        return "sm_90a" if name == "sm_90" else name
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
    _check_device("--device", name)
    need_device(name, "run on a machine with an NVIDIA GPU and PyTorch's build for CUDA, or give --device cpu")
    return name


def _check_device(option: str, name: str) -> None:
    """InvalidInput for what is no name of a device."""
    with contextlib.suppress(RuntimeError):
        if torch.device(name).type in ("cpu", "cuda"):
            return
    raise InvalidInput(option, repr(name), "cpu, cuda, cuda:N or auto", "choose one of these")


def need_device(device: str, remedy: str) -> None:
    """DeviceError where the device is not there, with what helps for the command at hand."""
    try:
        Target.of(device)
    except DeviceError as error:
        raise DeviceError(f"{str(error).partition(chr(10))[0]}\n  What to do: {remedy}.") from None


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
        ours = text.startswith((PYTHON, f"{OURS}:", "flags:", "ladder:")) or text in KNOWN
        is_function = ":" in text and not ours
        name = Candidate(PYTHON + text if is_function else text).name
        if name.startswith(PYTHON):
            check_python(name)
        names.append(name)
    return tuple(names)


def leave(comparisons: list[Comparison]) -> None:
    """Leave with the code that tells how the measurements ended, after they were shown."""
    if not all(comparison.complete for comparison in comparisons):
        raise typer.Exit(INTERRUPTED)
    if any(outcome.failed for comparison in comparisons for outcome in comparison.outcomes):
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
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
