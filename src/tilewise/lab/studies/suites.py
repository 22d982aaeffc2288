"""The suites of `tilewise bench`, as data: which problems, which candidates, what is timed, and how.

The first candidate of a row is the one that the score is about. Rows of one table keep the work constant: 16384 tokens
of a model 2048 wide, cut into ever longer sequences. Rows that pose one problem stand next to each other: they are
verified together.

A checkout has more suites than the package: every file of benchmarks/suites defines a `SUITE` and is named after it.

Other libraries join the rows of a suite where they can be imported (`Suite.peers`), also where they refuse a row: the
record then holds why.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import masks
from ...errors import InvalidInput
from ...problem import Problem, dtype_name
from ...terms import KeyLengths
from ..candidates.cached import CACHED, INVARIANT, PAGES_16, PAGES_64
from ..candidates.names import (
    DETERMINISTIC,
    FA3,
    FA4,
    FLASHINFER,
    OURS,
    PACKED,
    PLAIN,
    TORCH_DEFAULT,
    VARLEN,
    Candidate,
    installed,
)
from ..measure.compare import Goal, Plain, Row

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parents[4] / "benchmarks" / "suites"


class Suite(NamedTuple):
    """Rows, how they are measured where that is not how all are, and other libraries beside their candidates.

    What the command line asks for comes before `settings`. A suite that depends on a seed is `drawn` from it; its
    `rows` are those of seed 0.
    """

    rows: tuple[Row, ...]
    settings: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    peers: tuple[str, ...] = ()
    drawn: Callable[[int], tuple[Row, ...]] | None = None


def row(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    mask: str = "full",
    *,
    candidates: tuple[str, ...],
    device: str,
    method: str = "",
    flush: bool = False,
    times: tuple[str, ...] = (),
    label: str = "",
    kind: str = "",
    **fields: Any,
) -> Row:
    """A row for q of `shape` (batch, heads, seq, head_dim); `fields` are those of Problem that differ from it."""
    batch, heads, seq, dim = shape
    values: dict[str, Any] = {"heads_kv": heads, "seq_kv": seq, "head_dim_v": dim, "mask": masks.parse(mask)} | fields
    cap = values.pop("softcap", 0.0)
    problem = Problem(batch=batch, heads_q=heads, seq_q=seq, head_dim=dim, dtype=dtype, **values).with_(softcap=cap)
    return posed(
        problem, label, candidates=candidates, device=device, method=method, flush=flush, times=times, kind=kind
    )


def posed(problem: Problem, label: str, **options: Any) -> Row:
    """A row that is named after its problem."""
    return Row(f"{_problem_name(problem)} {label}".rstrip(), problem, **options)


def _problem_name(problem: Problem) -> str:
    name = f"{dtype_name(problem.dtype)} {problem.batch}x{problem.heads_q}x{problem.seq_q}x{problem.head_dim}"
    if problem.heads_kv != problem.heads_q:
        name += f" kv{problem.heads_kv}"
    if problem.seq_kv != problem.seq_q:
        name += f" sk{problem.seq_kv}"
    if problem.head_dim_v != problem.head_dim:
        name += f" dv{problem.head_dim_v}"
    name += f" {problem.mask}"
    return name + (f" softcap {problem.softcap:g}" if problem.softcap else "")


_CPU: dict[str, Any] = {"device": "cpu", "candidates": (OURS, TORCH_DEFAULT, "torch-math")}
# PyTorch's own choice is left out where it can only be one of these two.
_FEW: dict[str, Any] = {"device": "cuda", "candidates": (OURS, "torch-cudnn", "torch-flash")}
_STEP: dict[str, Any] = {
    "device": "cuda",
    "candidates": (OURS, DETERMINISTIC, "torch-cudnn", "torch-flash"),
    "needs_grad": True,
    "times": ("step",),
}
BACKWARD: dict[str, Any] = {"needs_grad": True, "times": ("backward",), "label": "backward"}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
_TOKENS, _HIDDEN = 16384, 2048
FULL_AND_CAUSAL = ("full", "causal")
LONG = (512, 1024, 2048, 4096, 8192, 16384)


def table(
    lengths: tuple[int, ...],
    dims: tuple[int, ...] = (64, 128, 256),
    kinds: tuple[str, ...] = FULL_AND_CAUSAL,
    **options: Any,
) -> tuple[Row, ...]:
    """Rows of constant work, by head_dim, mask and length."""
    return tuple(
        row((_TOKENS // seq, _HIDDEN // dim, seq, dim), BF16, mask, **options)
        for dim in dims
        for mask in kinds
        for seq in lengths
    )


def in_turn(*tables: tuple[Row, ...]) -> tuple[Row, ...]:
    """Tables of the same problems, row by row, so that what poses one problem stands together."""
    return tuple(one for rows in zip(*tables, strict=True) for one in rows)


class Model(NamedTuple):
    """One layer's attention of a model: (batch, query heads, tokens, head_dim) over `heads_kv` heads of keys. Without a
    name: no model that is known has it."""

    name: str
    shape: tuple[int, int, int, int]
    heads_kv: int
    mask: str = "causal"
    dtype: torch.dtype = BF16
    keys: int = 0  # other than the queries
    dim_v: int = 0  # other than that of queries and keys

    def row(self, what: str, **options: Any) -> Row:
        """As it is timed by `options`, with what is timed in its name."""
        fields = {"seq_kv": self.keys, "head_dim_v": self.dim_v}
        given: dict[str, Any] = {name: value for name, value in fields.items() if value}
        label = f"{self.name} {what}".lstrip()
        return row(self.shape, self.dtype, self.mask, heads_kv=self.heads_kv, label=label, **given, **options)


DIRECTIONS: dict[str, dict[str, Any]] = {
    "forward": {"times": ("forward",)},
    "backward": {"times": ("backward",), "needs_grad": True},
    "step": {"times": ("step",), "needs_grad": True},
}


# Models whose query heads share heads of keys.
LLAMA_8B = Model("Llama-3-8B", (1, 32, 4096, 128), 8)
QWEN_7B = Model("Qwen2.5-7B", (1, 28, 4096, 128), 4)
GPT_OSS = Model("GPT-OSS-120B", (1, 64, 4096, 64), 8)
_SOME_GROUPED = (
    LLAMA_8B,
    Model("Llama-3-70B", (1, 64, 4096, 128), 8),
    Model("Llama-3.2-1B", (2, 32, 4096, 64), 8),
    QWEN_7B,
    GPT_OSS,
    Model("Gemma-2-2B", (1, 8, 8192, 256), 4),
)


def _grouped(models: tuple[Model, ...], **options: Any) -> tuple[Row, ...]:
    """A row for each model's layer, as it is timed by `options`."""
    return tuple(row(m.shape, m.dtype, m.mask, heads_kv=m.heads_kv, **options) for m in models)


def of_models(models: tuple[Model, ...], *directions: str) -> tuple[Row, ...]:
    """A row for each direction of each model's layer."""
    return tuple(
        model.row(what, device="cuda", candidates=_torch_paths(model), **DIRECTIONS[what])
        for model in models
        for what in directions
    )


def _torch_paths(model: Model) -> tuple[str, ...]:
    """FlashAttention-2 does not take two head dims; the efficient kernel does."""
    return (OURS, "torch-cudnn", "torch-efficient" if model.dim_v else "torch-flash")


class Lengths(NamedTuple):
    """Packed sequences of one layer: their lengths, and its heads."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of queries and of keys
    dim: int
    mask: str = "causal"


def spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """So many lengths between the two, in no order: multiples of the golden ratio, which lie evenly."""
    return tuple(shortest + (40503 * n) % 65536 * (longest - shortest + 1) // 65536 for n in range(1, count + 1))


_PACKED_ROWS = (
    Lengths("24 of 64..2600", spread(24, 64, 2600), (16, 16), 128),
    Lengths("24 of 64..2600", spread(24, 64, 2600), (16, 16), 128, "full"),
    Lengths("64 of 16..830", spread(64, 16, 830), (32, 8), 128),
    Lengths("64 of 512", (512,) * 64, (16, 16), 64),
    Lengths("64 of 512", (512,) * 64, (16, 16), 128),
    Lengths("16 of 2048", (2048,) * 16, (16, 16), 64),
    Lengths("8 of 4096", (4096,) * 8, (16, 16), 128),
    Lengths("16384 and 100 of 100", (16384, *(100,) * 100), (16, 16), 128),
    Lengths("4 of 1000..12000", spread(4, 1000, 12000), (32, 8), 128),
    Lengths("300 of 1..200", spread(300, 1, 200), (16, 4), 64),
    Lengths("32 of 200..1800", spread(32, 200, 1800), (16, 16), 64),
    Lengths("16 of 300..3000", spread(16, 300, 3000), (8, 4), 256),
    Lengths("24 of 64..2600", spread(24, 64, 2600), (16, 16), 128, "window:512,0"),
)


# Against the fastest of others: what every row is to reach, and what is aimed at.
_PACKED_GOALS = {"forward": (1.00, 1.10), "step": (0.92, 1.00)}
_PACKED_BY_BATCH = (1.04, 1.00)  # the same of the time that a batch of equal lengths takes


def _packed(rows: tuple[Lengths, ...]) -> tuple[Row, ...]:
    """Forward, and forward with backward. Documents of a batch of one: what every rival takes as sequences. Where all
    lengths are equal, our kernel for a batch of them runs in the same rounds."""
    return tuple(_packed_row(one, timed) for one in rows for timed in ("forward", "step"))


def _packed_row(one: Lengths, timed: str) -> Row:
    starts, inner = (0, *accumulate(one.lengths)), masks.parse(one.mask)
    problem = Problem(
        batch=1,
        heads_q=one.heads[0],
        heads_kv=one.heads[1],
        seq_q=starts[-1],
        seq_kv=starts[-1],
        head_dim=one.dim,
        head_dim_v=one.dim,
        dtype=BF16,
        mask=masks.Documents(starts, inner=inner),  # type: ignore[arg-type]
        needs_grad=timed == "step",
    )
    heads = "x".join(map(str, dict.fromkeys(one.heads)))
    plain = None
    if len(set(one.lengths)) == 1:
        shape = {"batch": len(one.lengths), "seq_q": one.lengths[0], "seq_kv": one.lengths[0]}
        plain = Plain(problem.with_(**shape, mask=inner, layout="bshd"), 1.0)
    return Row(
        f"{one.name} heads {heads} d{one.dim} {one.mask} {timed}",
        problem,
        candidates=(PACKED, *((PLAIN,) if plain else ()), VARLEN),
        device="cuda",
        times=(timed,),
        plain=plain,
        goal=Goal(*_PACKED_GOALS[timed], *(_PACKED_BY_BATCH if plain else ())),
    )


class Decoding(NamedTuple):
    """New tokens of one layer against what was said before; `lengths`: of each sequence, where they differ."""

    batch: int
    heads: tuple[int, int]  # of queries and of keys
    tokens: int
    keys: int
    dim: int
    ways: tuple[str, ...] = ()  # of ours to read a cache, beside `tilewise.attention`
    lengths: tuple[int, ...] = ()


_PAGED_WAYS = (CACHED, PAGES_16, PAGES_64, INVARIANT)
_DECODE_ROWS = (
    Decoding(1, (32, 8), 1, 1024, 128),
    Decoding(1, (32, 8), 1, 4096, 128, (CACHED, INVARIANT)),
    Decoding(1, (32, 8), 1, 131072, 128),
    Decoding(8, (32, 8), 1, 8192, 128, _PAGED_WAYS),
    Decoding(64, (32, 8), 1, 4096, 128, _PAGED_WAYS),
    Decoding(256, (64, 8), 1, 2048, 128),
    Decoding(16, (64, 8), 1, 16384, 128),
    Decoding(8, (32, 32), 1, 8192, 64),
    Decoding(4, (32, 8), 4, 8192, 128),
    Decoding(1, (16, 1), 1, 65536, 256),
    Decoding(32, (8, 1), 1, 8192, 128),
    Decoding(32, (32, 8), 1, 16384, 128, _PAGED_WAYS, spread(32, 512, 16384)),
    Decoding(8, (32, 8), 1, 32768, 128, (CACHED, INVARIANT), (32768, *spread(7, 64, 1024))),
)


def _decoding(rows: tuple[Decoding, ...]) -> tuple[Row, ...]:
    """Forwards by graph replay. Keys come from memory, as between the layers of a model: replays go through caches of
    256 MiB or more in total."""
    found = []
    for one in rows:
        made = row(
            (one.batch, one.heads[0], one.tokens, one.dim),
            BF16,
            "causal:bottom-right" if one.tokens > 1 else "full",
            heads_kv=one.heads[1],
            seq_kv=one.keys,
            scores=(KeyLengths(),) if one.lengths else (),
            device="cuda",
            # A boolean mask is all that PyTorch's kernels know of lengths, and FlashAttention-2 does not take one.
            candidates=(OURS, *one.ways, "torch-cudnn", "torch-efficient" if one.lengths else "torch-flash"),
            method="graph",
            flush=True,
            label=f"lengths {min(one.lengths)}..{max(one.lengths)}" if one.lengths else "",
        )
        if one.lengths:
            share = sum(one.lengths) / (one.batch * one.keys)
            plain = Plain(made.problem.with_(scores=()), share)
            made = replace(made, contents=f"padding:{','.join(map(str, one.lengths))}", plain=plain)
        found.append(made)
    return tuple(found)


# The host's cost of each kind of problem is left to benchmarks/host.py: it would compile other kernels than those that
# are timed.
FOR_KERNELS: dict[str, Any] = {"round_seconds": 0.015, "overhead": False, "more_seconds": 1.0}
SUITES: dict[str, Suite] = {
    "cpu": Suite(
        (
            row((2, 8, 512, 64), F32, **_CPU),
            row((1, 8, 2048, 64), F32, **_CPU),
            row((1, 8, 2048, 64), F32, "causal", **_CPU),
            row((1, 8, 2048, 64), F32, "window:256,0", **_CPU),
            row((1, 8, 1024, 64), F32, "causal", heads_kv=2, **_CPU),
            row((1, 8, 1024, 64), F32, softcap=30.0, **_CPU),
            row((1, 8, 1024, 64), F32, "causal", needs_grad=True, label="grad", **_CPU),
            row((2, 8, 512, 64), BF16, **_CPU),
        )
    ),
    "forward": Suite(table(LONG, **_FEW) + _grouped(_SOME_GROUPED, **_FEW), FOR_KERNELS, (FA3, FA4)),
    "backward": Suite(
        table((128, 256, *LONG), **_FEW, **BACKWARD) + _grouped(_SOME_GROUPED, **_FEW, **BACKWARD),
        FOR_KERNELS,
        (FA3, FA4),
    ),
    "training": Suite(
        in_turn(
            *(
                table((512, 2048, 8192), (64, 128, 256), ("causal",), **way)
                + table((512, 2048, 8192), (128,), ("full",), **way)
                + _grouped((LLAMA_8B, QWEN_7B, GPT_OSS), **way)
                for way in (
                    {"method": "wall", "label": "step eager", **_STEP},
                    {"method": "graph", "label": "step graph", **_STEP},
                )
            )
        ),
        FOR_KERNELS,
        (FA3, FA4),
    ),
    # Sequences of different lengths behind one another: packed training, and ragged batches.
    "packed": Suite(_packed(_PACKED_ROWS), FOR_KERNELS, (FA3, FA4)),
    # A few new tokens per sequence against what was said before.
    "decode": Suite(_decoding(_DECODE_ROWS), FOR_KERNELS, (FA3, FLASHINFER)),
}
"""Those of the package."""


def names() -> tuple[str, ...]:
    """Every suite that is here, those of the package first."""
    return (*SUITES, *sorted(path.stem for path in FOLDER.glob("*.py")))


@functools.cache
def find(name: str) -> Suite:
    """A suite by name. InvalidInput for one that is not here."""
    if name in SUITES:
        return SUITES[name]
    if name not in names():
        more = "" if FOLDER.is_dir() else "; more are in a checkout, in benchmarks/suites"
        raise InvalidInput("--suite", repr(name), f"one of {', '.join(names())}", f"choose one of these{more}")
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.SUITE
    assert isinstance(found, Suite)
    return found


def rows_of(name: str, seed: int = 0) -> tuple[Row, ...]:
    """All rows of a suite. Most do not depend on the seed; a suite that is not here has no rows."""
    if name not in names():
        return ()
    found = find(name)
    return found.drawn(seed) if found.drawn and seed else found.rows


def settings_of(name: str) -> dict[str, Any]:
    """How a suite is measured where that is not how all are."""
    return find(name).settings if name in names() else {}


def suite(name: str, only: tuple[str, ...] = (), extra: tuple[str, ...] = (), seed: int = 0) -> list[Row]:
    """The rows of a suite that `only` selects, with the extra candidates, and other libraries' that can be imported.

    A row is selected if its name contains one of `only`; joined by a plus, `16384x128+causal`, all parts must be there.
    """
    find(name)
    every = rows_of(name, seed)
    rows = [_with_candidates(row, _peers(name, row) + extra) for row in every if _selected(row.name, only)]
    if not rows:
        known = ", ".join(row.name for row in every)
        wanted = ", ".join(map(repr, only))
        raise InvalidInput("--only", wanted, f"parts of the name of a row: {known}", "choose a part of one of these")
    return rows


def peers_of(name: str, row: Row) -> tuple[str, ...]:
    """Who a row of a suite is held against: the strongest of others that there are, whatever is installed here."""
    own = [candidate for candidate in row.candidates if not Candidate(candidate).is_ours]
    return (*own, *(find(name).peers if own and name in names() else ()))


def _with_candidates(row: Row, more: tuple[str, ...]) -> Row:
    return replace(row, candidates=tuple(dict.fromkeys((*row.candidates, *more))))


def _peers(name: str, row: Row) -> tuple[str, ...]:
    """The other libraries of a suite that can be imported here."""
    return tuple(peer for peer in peers_of(name, row) if peer in row.candidates or installed(peer))


def _selected(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(all(part in name for part in wanted.split("+")) for wanted in only)
