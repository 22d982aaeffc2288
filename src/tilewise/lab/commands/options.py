"""The options that commands share, in groups, and the objects that are made from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ... import masks
from ...errors import DeviceError, InvalidInput
from ...plan import AUTO
from ...problem import Problem, parse_dtype
from ...scores import softcapped
from ...target import Target
from ..candidates import inputs
from ..candidates.names import KNOWN, OURS, PYTHON, Candidate, check_python
from ..measure.compare import Settings
from .command import FAILED, INTERRUPTED, refuse_ignored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure.compare import Comparison

OF_SHAPES = (
    "shape", "kv_heads", "seq_kv", "head_dim_v", "dtype", "mask", "scale", "softcap", "dropout", "layout", "lse",
    "deterministic",
)  # fmt: skip
OF_TENSORS = (*OF_SHAPES, "tensors", "grad")
WITHOUT_DROPOUT = tuple(name for name in OF_TENSORS if name != "dropout")
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only rows with this in their name; may be repeated; A+B: with both A and B in it."),
]


@dataclass(frozen=True, slots=True)
class ProblemOptions:
    """What attention is asked for; several shapes and masks where a command takes them."""

    shape: Annotated[str, typer.Option(help="batch,heads,seq,head_dim of q, e.g. 1,32,4096,128.")] = ""
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="batch,heads,seq,head_dim of q; may be repeated.")
    ] = None
    masks: Annotated[
        list[str] | None,
        typer.Option(
            "--mask", help="A mask as in explain, full by default; may be repeated: every shape with every mask."
        ),
    ] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads, if fewer than q's.")] = None
    seq_kv: Annotated[int | None, typer.Option(help="Length of k and v, if not q's.")] = None
    head_dim_v: Annotated[int | None, typer.Option(help="head_dim of v, if not q's.")] = None
    dtype: Annotated[str, typer.Option(help="bf16, fp16, float32 or float64.")] = "bf16"
    mask: Annotated[
        str,
        typer.Option(
            help="full, causal[:bottom-right], window:LEFT,RIGHT[:bottom-right], documents:0,a,b[:INNER] or "
            "dense:bool|additive:SHAPE such as dense:bool:1x1x512x512."
        ),
    ] = "full"
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Packed sequences of these lengths, which add up to seq, e.g. 64,128,2600, or a file of them; "
            "--mask holds in each."
        ),
    ] = None
    scale: Annotated[float | None, typer.Option(help="Scale of the scores; 1/sqrt(head_dim) by default.")] = None
    softcap: Annotated[float, typer.Option(help="softcap * tanh(score / softcap); 0 = off.")] = 0.0
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0
    layout: Annotated[str, typer.Option(help="Memory order of the tensors: bhsd or bshd.")] = "bhsd"
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted too.")] = False
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Deterministic algorithms are asked for.")] = (
        False
    )
    tensors: Annotated[
        Path | None, typer.Option(help="Instead of --shape: a file of torch.save((q, k, v)), as a model had them.")
    ] = None
    grad: Annotated[bool, typer.Option("--grad", help="Gradients are wanted: the backward is looked at too.")] = False
    precision: Annotated[str, typer.Option(help="exact, or for float32 also tf32.")] = "exact"

    @property
    def path(self) -> str:
        """The file of tensors; empty without one."""
        return str(self.tensors) if self.tensors else ""

    def make(self, shape: str = "", mask: str = "") -> Problem:
        """The problem; of several, the one of this shape and mask."""
        if self.tensors is not None:
            refuse_ignored("with --tensors, which say it themselves", *OF_SHAPES)
            return inputs.problem_of(self.path, needs_grad=self.grad)
        shape = shape or self.shape
        try:
            batch, heads, seq, head_dim = (int(part) for part in shape.split(","))
        except ValueError:
            raise InvalidInput(
                "--shape", repr(shape), "four integers: batch,heads,seq,head_dim", "write e.g. --shape 1,32,4096,128"
            ) from None
        if self.scale == 0.0:
            raise InvalidInput(
                "--scale", self.scale, "a finite number other than 0", "leave --scale out for the default"
            )
        return Problem(
            batch=batch,
            heads_q=heads,
            heads_kv=heads if self.kv_heads is None else self.kv_heads,
            seq_q=seq,
            seq_kv=seq if self.seq_kv is None else self.seq_kv,
            head_dim=head_dim,
            head_dim_v=head_dim if self.head_dim_v is None else self.head_dim_v,
            dtype=parse_dtype(self.dtype),
            mask=masks.parse(packed_mask(mask or self.mask, self.lengths)),
            scale=0.0 if self.scale is None else self.scale,
            scores=softcapped(self.softcap),
            dropout=self.dropout,
            layout=self.layout,  # type: ignore[arg-type]  # Problem checks it
            needs_grad=self.grad,
            needs_lse=self.lse,
            deterministic=self.deterministic,
            precision=self.precision,  # type: ignore[arg-type]  # as layout
        )

    def each(self, shapes: Sequence[str] = ()) -> list[Problem]:
        """Every shape, of those given or else of `shapes`, with every mask."""
        return [self.make(shape, mask) for shape in self.shapes or shapes for mask in self.masks or ["full"]]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Who runs, where and for how long."""

    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, or auto: a GPU if there is one.")] = "auto"
    timing: Annotated[str, typer.Option(help="wall, events, graph or host; auto: wall on a CPU, events on a GPU.")] = (
        "auto"
    )
    flush: Annotated[
        bool, typer.Option("--flush", help="Overwrite the GPU's L2 cache before each call (events only).")
    ] = False
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="Another candidate (may be repeated): a name such as torch-math, or your function as mypkg.mod:fn or "
            "file.py:fn, called as fn(q, k, v, problem, bias)."
        ),
    ] = None
    only: Annotated[list[str] | None, typer.Option(help="Only this candidate (may be repeated).")] = None
    target: Annotated[
        str, typer.Option(help="A GPU by name (h200, a100, ...) or architecture (sm_90), cpu, cuda:0, or auto: this "
                          "machine.")
    ] = AUTO  # fmt: skip
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "--rounds",
            help="Exactly so many rounds, each of which times every candidate once. Without it a few, and more until "
            "the differences are clear or the time is up.",
            min=1,
        ),
    ] = None
    time_limit: Annotated[float, typer.Option(help="Seconds a candidate may take for one step.", min=0.1)] = 30.0
    seed: Annotated[int, typer.Option(help="Seed of inputs, sampling and order.")] = 0

    def where(self) -> str:
        return make_device(self.device)

    def method(self) -> str:
        return make_method(self.timing, self.where())

    def extra(self) -> tuple[str, ...]:
        return make_candidates(self.candidate)

    def settings(self, rounds: int, max_rounds: int, **settings: Any) -> Settings:
        """As many rounds as were asked for; else `rounds`, and up to `max_rounds` while differences are not clear."""
        settings |= {"time_limit": self.time_limit, "seed": self.seed}
        if self.repeat is not None:
            return Settings(rounds=self.repeat, **settings)
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
