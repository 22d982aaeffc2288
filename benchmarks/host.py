"""Host time of one eager call, on tensors so small that nothing but the way to the kernel is measured.

    python benchmarks/host.py [--device cuda] [--save]

Every way of calling is measured in every round, batch by batch in turn, so that what else the machine does meets all
alike. A sample is the median over a round's batches of the mean of a batch; the waits for the device between batches
are outside the clock. What a way takes more than PyTorch's default may be a fraction of what the host's time varies by
within a round, so it is the median over a round's batches of the difference to the default's batch of the same turn.
Calls that are passed on, of which that difference is all there is to say, come right behind the default.

A node of autograd's that computes nothing stands beside them: it is what PyTorch itself takes for the step of an
operator with three inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import statistics
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import CompileError, attention, attention_packed, native
from tilewise.jit.trust import digest
from tilewise.lab.measure import environment
from tilewise.lab.model import launched
from tilewise.lab.studies import kept, records
from tilewise.native import library

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SUITE = "host"
KIND = "tilewise host"
ROUNDS = 9
RESULTS = Path(__file__).resolve().parent / "results"
BATCH = 32  # calls between two waits: a GPU's queue never fills
BATCHES = 9  # of a sample: one that the machine interrupts does not count
_UNTIL_SETTLED = 8  # calls of a kind after which all is planned, built and known
KINDS = ("no grad", "grad", "step")
DEFAULT = "F.scaled_dot_product_attention"
PASSED_ON = "override, passed on"
EMPTY_NODE = "an empty node of three inputs"
_WAY = (
    "api.py",
    "memo.py",
    "torch_function.py",
    "call",
    "torch_seam",
    "native",
    "hook",
    "integrations/sdpa",
    "engine/recipe.py",
    "engine/run.py",
)
_LIBRARIES = {
    "flash-attn": ("flash_attn", KINDS),
    "FlashAttention-3": ("flash_attn_interface", KINDS),
    "FlashAttention-3, forward only": ("fa3_fwd_interface", KINDS[:1]),
}
"""Of flash_attn_func, which takes (batch, seq, heads, dim): where it is, and what it can be measured for."""


class Way(NamedTuple):
    """How attention is called, and what is in force meanwhile."""

    name: str
    call: Callable[..., torch.Tensor]
    inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    packed: bool = False  # takes (batch * seq, heads, dim), and how many sequences of which length these are
    layout: Literal["bhsd", "bshd"] = "bhsd"  # of the tensors that it takes else
    kinds: tuple[str, ...] = KINDS


class Cost(NamedTuple):
    """Seconds per call of one way, by round."""

    kind: str
    way: str
    seconds: tuple[float, ...]
    more: tuple[float, ...] = ()  # than the default's, batch by batch; older records have none

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def beside(self, default: Cost) -> Beside:
        pairs = list(zip(self.seconds, default.seconds, strict=True))
        more = self.more or [a - b for a, b in pairs]
        return Beside(statistics.median(a / b for a, b in pairs), statistics.median(more))


class Beside(NamedTuple):
    """A way beside the default, round by round, since a host's speed may change between rounds; medians over rounds."""

    share: float  # of the other's time
    more: float  # seconds


def ways(device: str) -> list[Way]:
    """PyTorch's default and its FlashAttention by name, ours natively, in Python and of packed sequences, the override,
    an empty node where native code is there, and other libraries that are installed."""
    sdpa = tilewise.sdpa
    torchs = F.scaled_dot_product_attention
    taking, passing = sdpa(), sdpa(when=lambda problem: False)
    found = [
        Way(DEFAULT, torchs),
        Way(PASSED_ON, torchs, lambda: passing),
        Way("PyTorch's flash, by name", torchs, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        Way("tilewise.attention", attention),
        Way("tilewise.attention, in Python", attention, native.in_python),
        Way("tilewise.attention_packed", _packed_call(), packed=True),
        Way("override, taken", torchs, lambda: taking),
    ]
    if (extension := library.loaded()) is not None:
        found.append(Way(EMPTY_NODE, extension.calls.empty_node, kinds=KINDS[1:]))
    if device.startswith("cuda"):
        return [*found, *_installed()]
    # On a CPU no call is taken, and packed sequences run one after another: that is no host time.
    return [way for way in found if way.name != "override, taken" and not way.packed]


def _installed() -> list[Way]:
    """Libraries that are there and load."""
    found = []
    for name, (module, kinds) in _LIBRARIES.items():
        with contextlib.suppress(ImportError, OSError, AttributeError, ValueError):
            if importlib.util.find_spec(module) is not None:
                call = importlib.import_module(module).flash_attn_func
                found.append(Way(name, _first_of(call), layout="bshd", kinds=kinds))
    return found


def _first_of(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Some return the lse behind out."""

    def out_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = call(q, k, v)
        return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

    return out_of


def _packed_call() -> Callable[..., Any]:
    """Sequences of one length; their offsets stay on the device, as those of a batch that is used again do."""
    known: dict[tuple[int, int], torch.Tensor] = {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, seq: int) -> Any:
        starts = known.get((batch, seq))
        if starts is None:
            starts = known[batch, seq] = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=q.device)
        return attention_packed(q, k, v, starts, starts, seq, seq)

    return call


def measure(device: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int = ROUNDS) -> list[Cost]:
    """The cost of every way of every kind of call."""
    batch, heads, seq, dim = shape
    shapes = {"bhsd": shape, "bshd": (batch, seq, heads, dim), "packed": (batch * seq, heads, dim)}
    made = {layout: _tensors(one, device, dtype) for layout, one in shapes.items()}

    def once(way: Way, kind: str) -> None:
        plain, leaves, dout = made["packed" if way.packed else way.layout]
        lengths = (batch, seq) if way.packed else ()
        if kind == "no grad":
            way.call(*plain, *lengths)
        elif kind == "grad":
            way.call(*leaves, *lengths)
        else:
            torch.autograd.grad(way.call(*leaves, *lengths), leaves, dout)

    found = ways(device)
    measured = [(kind, way) for kind in KINDS for way in found if kind in way.kinds]
    samples: dict[tuple[str, str], list[float]] = {(kind, way.name): [] for kind, way in measured}
    mores: dict[tuple[str, str], list[float]] = {place: [] for place in samples}
    for kind, way in measured:
        with way.inside():
            for _ in range(_UNTIL_SETTLED):
                once(way, kind)
    for _, kind in product(range(rounds), KINDS):
        batches: dict[str, list[float]] = {way.name: [] for of, way in measured if of == kind}
        for _, (of, way) in product(range(BATCHES), measured):
            if of == kind:
                with way.inside():
                    for _ in range(_UNTIL_SETTLED):  # what is in force has changed
                        once(way, kind)
                    batches[way.name].append(_seconds(partial(once, way, kind), device))
        for name, seconds in batches.items():
            samples[kind, name].append(statistics.median(seconds))
            if DEFAULT in batches:
                turns = zip(seconds, batches[DEFAULT], strict=True)
                mores[kind, name].append(statistics.median(a - b for a, b in turns))
    return [Cost(*place, tuple(seconds), tuple(mores[place])) for place, seconds in samples.items()]


def _seconds(call: Callable[[], None], device: str) -> float:
    """Per call, of a batch of them."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BATCH):
        call()
    return (time.perf_counter() - begin) / BATCH


def _tensors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Any, Any, torch.Tensor]:
    """q, k and v, the same as leaves that want a gradient, and the gradient of the result."""
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    return plain, [tensor.clone().requires_grad_() for tensor in plain], torch.randn(shape, device=device, dtype=dtype)


def lines(costs: list[Cost]) -> list[str]:
    """A table: microseconds, those more than PyTorch's default takes for the same, and the share of it."""
    default = {cost.kind: cost for cost in costs if cost.way == DEFAULT}
    width = max(len(cost.way) for cost in costs)

    def line(cost: Cost) -> str:
        share, more = cost.beside(default[cost.kind])
        return f"{cost.kind:8s} {cost.way:{width}s} {1e6 * cost.median:8.2f} us {1e6 * more:+9.2f} us  {share:5.2f}"

    return [line(cost) for cost in costs]


def costs_of(record: dict[str, Any]) -> list[Cost]:
    """Those that a record holds."""
    return [Cost(row["kind"], row["call"], tuple(row["seconds"]), tuple(row.get("more", ()))) for row in record["rows"]]


def record(costs: list[Cost], device: str, shape: tuple[int, ...], command: list[str]) -> dict[str, Any]:
    settings = {"rounds": len(costs[0].seconds), "batches": BATCHES, "calls": BATCH}
    return {
        "kind": KIND,
        "suite": f"{SUITE}-{device.partition(':')[0]}",
        "provenance": environment.provenance(0, command),
        "settings": {"device": device, "shape": list(shape), **settings},
        "repeated calls": environment.repeated_calls(),
        "kernels": launched.by_this_process(),
        "way": way(),
        "rows": [
            {
                "kind": cost.kind,
                "call": cost.way,
                "median": cost.median,
                "seconds": list(cost.seconds),
                "more": list(cost.more),
            }
            for cost in costs
        ],
    }


def way() -> str:
    """A digest of the sources that a call goes through on the host, which is what is measured here."""
    package = Path(tilewise.__file__).parent
    named = [package / name for name in _WAY]
    files = {path for place in named for path in (place, *place.rglob("*")) if path.suffix in (".py", ".cpp", ".h")}
    return digest(
        launched.python_code(path.read_text()).encode() if path.suffix == ".py" else path.read_bytes()
        for path in sorted(files)
    )


def marks(record: dict[str, Any]) -> list[str]:
    """Why a record may not be cited."""
    changed = record.get("way") != way()
    return [*records.marks_of(record), *(["the sources of a call's way have changed since"] if changed else [])]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="", help="batch,heads,seq,head_dim; small by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the record, in benchmarks/results")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    shape: tuple[int, ...] = (1, 8, 128, 64) if on_gpu else (1, 2, 8, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if options.shape:
        shape = tuple(int(size) for size in options.shape.split(","))
    os.environ.setdefault(library.SETTING, "on")
    if on_gpu and library.is_wanted():
        try:
            library.build()  # rather than in the background, while we measure
        except CompileError as error:
            print(f"without native code: {error}", file=sys.stderr)
    if not on_gpu:
        torch.set_num_threads(1)
    costs = measure(options.device, shape, dtype, options.rounds)
    print(*lines(costs), sep="\n")
    if options.save:
        result = record(costs, options.device, shape, environment.command_line())
        print(f"saved {kept.save(result, options.save)}", file=sys.stderr)


if __name__ == "__main__":
    main()
