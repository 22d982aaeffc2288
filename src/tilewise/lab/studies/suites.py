"""The suites of `tilewise bench`, as data: which problems, which candidates, what is timed, and how.

The first candidate of a row is the one that the score is about. Rows of one table keep the work constant: 16384 tokens
of a model 2048 wide, cut into ever longer sequences. Rows that pose one problem stand next to each other: they are
verified together. The suite `drawn` depends on a seed: see `lab.drawn`.

Other libraries join the rows of a suite where they can be imported (`PEERS`), also where they refuse a row: the record
then holds why.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

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
    FLEX,
    OURS,
    PACKED,
    PLAIN,
    TORCH_DEFAULT,
    VARLEN,
    Candidate,
    builds_mask,
    installed,
)
from ..measure.compare import Goal, Plain, Row
from . import drawn, variants


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
    return _row(
        problem, label, candidates=candidates, device=device, method=method, flush=flush, times=times, kind=kind
    )


def _row(problem: Problem, label: str, **options: Any) -> Row:
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
_CUDA: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "torch-cudnn", "torch-flash")}
# PyTorch's own choice is left out where it can only be one of these two.
_FEW: dict[str, Any] = {"device": "cuda", "candidates": (OURS, "torch-cudnn", "torch-flash")}
_EVERY: dict[str, Any] = {"device": "cuda", "candidates": (*_CUDA["candidates"], "torch-efficient", FLEX)}
_STEP: dict[str, Any] = {
    "device": "cuda",
    "candidates": (OURS, DETERMINISTIC, "torch-cudnn", "torch-flash"),
    "needs_grad": True,
    "times": ("step",),
}
_FLOAT32: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "torch-efficient")}
_SM80: dict[str, Any] = {"device": "cuda", "candidates": ("sm80", "torch-flash")}
_BACKWARD: dict[str, Any] = {"needs_grad": True, "times": ("backward",), "label": "backward"}
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
_TOKENS, _HIDDEN = 16384, 2048
_FULL_AND_CAUSAL = ("full", "causal")
_LONG = (512, 1024, 2048, 4096, 8192, 16384)


def _table(
    lengths: tuple[int, ...],
    dims: tuple[int, ...] = (64, 128, 256),
    kinds: tuple[str, ...] = _FULL_AND_CAUSAL,
    **options: Any,
) -> tuple[Row, ...]:
    """Rows of constant work, by head_dim, mask and length."""
    return tuple(
        row((_TOKENS // seq, _HIDDEN // dim, seq, dim), _BF16, mask, **options)
        for dim in dims
        for mask in kinds
        for seq in lengths
    )


def _both_ways(shape: tuple[int, int, int, int], mask: str, **fields: Any) -> tuple[Row, ...]:
    """A layer's forward and its backward, by every library."""
    return tuple(row(shape, _BF16, mask, **fields, **_EVERY, **way) for way in ({}, _BACKWARD))


def _in_turn(*tables: tuple[Row, ...]) -> tuple[Row, ...]:
    """Tables of the same problems, row by row, so that what poses one problem stands together."""
    return tuple(one for rows in zip(*tables, strict=True) for one in rows)


class Model(NamedTuple):
    """One layer's attention of a model: (batch, query heads, tokens, head_dim) over `heads_kv` heads of keys. Without a
    name: no model that is known has it."""

    name: str
    shape: tuple[int, int, int, int]
    heads_kv: int
    mask: str = "causal"
    dtype: torch.dtype = _BF16
    keys: int = 0  # other than the queries
    dim_v: int = 0  # other than that of queries and keys

    def row(self, what: str, **options: Any) -> Row:
        """As it is timed by `options`, with what is timed in its name."""
        fields = {"seq_kv": self.keys, "head_dim_v": self.dim_v}
        given: dict[str, Any] = {name: value for name, value in fields.items() if value}
        label = f"{self.name} {what}".lstrip()
        return row(self.shape, self.dtype, self.mask, heads_kv=self.heads_kv, label=label, **given, **options)


# Models whose query heads share heads of keys. TP-n: what one of n GPUs holds under tensor parallelism.
_GROUPED_MODELS = (
    Model("Llama-3-8B", (1, 32, 4096, 128), 8),
    Model("Llama-3-8B", (1, 32, 8192, 128), 8),
    Model("Llama-3-8B", (4, 32, 2048, 128), 8),
    Model("Llama-3-8B", (8, 32, 2048, 128), 8),
    Model("Llama-3-8B", (1, 32, 4096, 128), 8, "full"),
    Model("Llama-3-70B", (1, 64, 4096, 128), 8),
    Model("Llama-3-70B", (1, 64, 8192, 128), 8),
    Model("Llama-3-70B TP-4", (1, 16, 8192, 128), 2),
    Model("Llama-3-70B TP-4", (1, 16, 32768, 128), 2),
    Model("Llama-3-70B TP-8", (1, 8, 8192, 128), 1),
    Model("Llama-3-70B TP-8", (4, 8, 2048, 128), 1),
    Model("Llama-3-70B TP-8", (2, 8, 4096, 128), 1, "full"),
    Model("Llama-3.2-1B", (2, 32, 4096, 64), 8),
    Model("Qwen2.5-7B", (1, 28, 4096, 128), 4),
    Model("Qwen2.5-7B", (4, 28, 2048, 128), 4),
    Model("Qwen2.5-0.5B", (4, 14, 4096, 64), 2),
    Model("Qwen3-30B", (1, 32, 8192, 128), 4),
    Model("Qwen3-30B", (1, 32, 16384, 128), 4),
    Model("GPT-OSS-120B", (1, 64, 4096, 64), 8),
    Model("GPT-OSS-120B", (2, 64, 4096, 64), 8, "full"),
    Model("Gemma-2-2B", (1, 8, 8192, 256), 4),
    Model("StarCoder", (1, 48, 8192, 128), 1),
    Model("Falcon-7B", (2, 71, 2048, 64), 1),
)
# What no tile divides: tokens of pictures, speech and video, other head dims, and few heads of keys.
_ODD_MODELS = (
    Model("DeepSeek-V3", (2, 128, 3072, 192), 128, dim_v=128),
    Model("ViT-B/16", (64, 12, 197, 64), 12, "full"),
    Model("ViT-g/14", (48, 16, 257, 88), 16, "full"),
    Model("CLIP-L/14", (16, 16, 577, 64), 16, "full"),
    Model("ViT-B/8", (24, 12, 785, 64), 12, "full"),
    Model("Whisper-large", (8, 20, 1500, 64), 20, "full", _F16),
    Model("Qwen2.5-VL", (6, 16, 1500, 80), 16, "full", _F16),
    Model("SDXL cross-attention", (2, 10, 4224, 64), 10, "full", _F16, keys=77),
    Model("CogVideoX-5B TP-2", (1, 24, 17776, 64), 24, "full"),
    Model("Wan2.1-14B", (1, 40, 20280, 128), 40, "full"),
    Model("Wan2.1-1.3B", (1, 12, 32760, 128), 12, "full"),
    Model("Qwen3-14B", (2, 40, 5120, 128), 8),
    Model("Mistral-Large", (1, 96, 6000, 128), 8),
    Model("Qwen2.5-0.5B", (4, 14, 3584, 64), 2),
    Model("Qwen2.5-7B", (1, 28, 10000, 128), 4),
    Model("Gemma-2B", (1, 8, 12000, 256), 1),
    Model("LLaMA-65B", (3, 64, 2048, 128), 64, dtype=_F16),
    Model("Phi-3-mini", (2, 32, 2500, 96), 32),
    Model("MiniLM-L6", (256, 12, 128, 32), 12, "full"),
    Model("", (1, 32, 1000, 128), 8, "full", keys=24000),
    Model("", (8, 12, 1025, 72), 12, "full"),
    Model("", (1, 16, 9000, 112), 4),
    Model("", (2, 12, 8192, 160), 12),
    Model("", (1, 16, 4096, 224), 16),
)
_DIRECTIONS: dict[str, dict[str, Any]] = {
    "forward": {"times": ("forward",)},
    "backward": {"times": ("backward",), "needs_grad": True},
    "step": {"times": ("step",), "needs_grad": True},
}


def _grouped(models: tuple[Model, ...], **options: Any) -> tuple[Row, ...]:
    """A row for each model's layer, as it is timed by `options`."""
    return tuple(row(m.shape, m.dtype, m.mask, heads_kv=m.heads_kv, **options) for m in models)


def _of_models(models: tuple[Model, ...], *directions: str) -> tuple[Row, ...]:
    """A row for each direction of each model's layer."""
    return tuple(
        model.row(what, device="cuda", candidates=_torch_paths(model), **_DIRECTIONS[what])
        for model in models
        for what in directions
    )


def _torch_paths(model: Model) -> tuple[str, ...]:
    """FlashAttention-2 does not take two head dims; the efficient kernel does."""
    return (OURS, "torch-cudnn", "torch-efficient" if model.dim_v else "torch-flash")


def _few_grouped(*names: str) -> tuple[Model, ...]:
    """The first causal layer of each of these models."""
    return tuple(next(m for m in _GROUPED_MODELS if m.name == name and m.mask == "causal") for name in names)


_SOME_GROUPED = _few_grouped("Llama-3-8B", "Llama-3-70B", "Llama-3.2-1B", "Qwen2.5-7B", "GPT-OSS-120B", "Gemma-2-2B")


def _drawn(seed: int) -> tuple[Row, ...]:
    """Forward and backward of every problem, each by graph replay and eagerly."""
    return tuple(
        _drawn_row(one, seed, what, method, word)
        for one in drawn.problems(seed)
        for what in ("forward", "backward")
        for method, word in (("graph", "graph"), ("wall", "eager"))
    )


def _drawn_row(one: drawn.Drawn, seed: int, what: str, method: str, word: str) -> Row:
    """A mask that PyTorch knows as a tensor alone is scored apart: the ratio is that of the mask, not of a kernel."""
    problem = one.problem.with_(needs_grad=what == "backward")
    built = builds_mask(problem)
    # FlashAttention-2 takes neither a mask tensor nor two head dims; the efficient kernel takes both.
    other = "torch-efficient" if built or problem.head_dim != problem.head_dim_v else "torch-flash"
    candidates, kind = (OURS, "torch-cudnn", other), str(problem.mask).partition(":")[0] if built else ""
    label = f"{one.size} seed{seed}#{one.number:02} {what} {word}"
    return _row(
        problem, label, candidates=candidates, device="cuda", method=method, flush=False, times=(what,), kind=kind
    )


class Lengths(NamedTuple):
    """Packed sequences of one layer: their lengths, and its heads."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of queries and of keys
    dim: int
    mask: str = "causal"


def _spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """So many lengths between the two, in no order: multiples of the golden ratio, which lie evenly."""
    return tuple(shortest + (40503 * n) % 65536 * (longest - shortest + 1) // 65536 for n in range(1, count + 1))


_PACKED_ROWS = (
    Lengths("24 of 64..2600", _spread(24, 64, 2600), (16, 16), 128),
    Lengths("24 of 64..2600", _spread(24, 64, 2600), (16, 16), 128, "full"),
    Lengths("64 of 16..830", _spread(64, 16, 830), (32, 8), 128),
    Lengths("64 of 512", (512,) * 64, (16, 16), 64),
    Lengths("64 of 512", (512,) * 64, (16, 16), 128),
    Lengths("16 of 2048", (2048,) * 16, (16, 16), 64),
    Lengths("8 of 4096", (4096,) * 8, (16, 16), 128),
    Lengths("16384 and 100 of 100", (16384, *(100,) * 100), (16, 16), 128),
    Lengths("4 of 1000..12000", _spread(4, 1000, 12000), (32, 8), 128),
    Lengths("300 of 1..200", _spread(300, 1, 200), (16, 4), 64),
    Lengths("32 of 200..1800", _spread(32, 200, 1800), (16, 16), 64),
    Lengths("16 of 300..3000", _spread(16, 300, 3000), (8, 4), 256),
    Lengths("24 of 64..2600", _spread(24, 64, 2600), (16, 16), 128, "window:512,0"),
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
        dtype=_BF16,
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


class Chunk(NamedTuple):
    """A chunk of each prompt of a batch, 32 query heads over 8 of keys: prompts, new tokens and keys of each."""

    batch: int
    tokens: int
    keys: int


_CHUNKS = (
    Chunk(16, 16, 4096),
    Chunk(16, 32, 4096),
    Chunk(16, 64, 4096),
    Chunk(16, 128, 4096),
    Chunk(4, 512, 8192),
    Chunk(1, 2048, 16384),
    Chunk(1, 8192, 32768),
)
_DECODES_BESIDE, _CHUNK_BESIDE = _spread(64, 256, 6144), (2048, 8192)  # keys; tokens and keys


def _chunked() -> tuple[Row, ...]:
    """Keys of a cache in one piece per sequence and in pages, and the same data as tensors of their own. A boolean mask
    is all that PyTorch's function knows of a causal rule at the last key."""
    last = "causal:bottom-right"
    ways = (CACHED, PAGES_64, OURS, "torch-cudnn")
    rows = tuple(
        row((batch, 32, tokens, 128), _BF16, last, heads_kv=8, seq_kv=keys, candidates=ways, device="cuda")
        for batch, tokens, keys in _CHUNKS
    )
    tokens, keys = _CHUNK_BESIDE
    starts_q = (*range(len(_DECODES_BESIDE) + 1), len(_DECODES_BESIDE) + tokens)
    starts_kv = (0, *accumulate((*_DECODES_BESIDE, keys)))
    mixed = Problem(
        batch=1,
        heads_q=32,
        heads_kv=8,
        seq_q=starts_q[-1],
        seq_kv=starts_kv[-1],
        head_dim=128,
        head_dim_v=128,
        dtype=_BF16,
        mask=masks.Documents(starts_q, starts_kv, masks.parse(last)),  # type: ignore[arg-type]
    )
    name = f"{len(_DECODES_BESIDE)} decodes and a chunk of {tokens} of {keys} heads 32x8 d128"
    return (*rows, Row(name, mixed, (CACHED, PAGES_64, PACKED, VARLEN), "cuda"))


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
    Decoding(32, (32, 8), 1, 16384, 128, _PAGED_WAYS, _spread(32, 512, 16384)),
    Decoding(8, (32, 8), 1, 32768, 128, (CACHED, INVARIANT), (32768, *_spread(7, 64, 1024))),
)


def _decoding(rows: tuple[Decoding, ...]) -> tuple[Row, ...]:
    """Forwards by graph replay. Keys come from memory, as between the layers of a model: replays go through caches of
    256 MiB or more in total."""
    found = []
    for one in rows:
        made = row(
            (one.batch, one.heads[0], one.tokens, one.dim),
            _BF16,
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


SUITES: dict[str, tuple[Row, ...]] = {
    "cpu": (
        row((2, 8, 512, 64), _F32, **_CPU),
        row((1, 8, 2048, 64), _F32, **_CPU),
        row((1, 8, 2048, 64), _F32, "causal", **_CPU),
        row((1, 8, 2048, 64), _F32, "window:256,0", **_CPU),
        row((1, 8, 1024, 64), _F32, "causal", heads_kv=2, **_CPU),
        row((1, 8, 1024, 64), _F32, softcap=30.0, **_CPU),
        row((1, 8, 1024, 64), _F32, "causal", needs_grad=True, label="grad", **_CPU),
        row((2, 8, 512, 64), _BF16, **_CPU),
    ),
    "forward": _table(_LONG, **_FEW) + _grouped(_SOME_GROUPED, **_FEW),
    "backward": _table((128, 256, *_LONG), **_FEW, **_BACKWARD) + _grouped(_SOME_GROUPED, **_FEW, **_BACKWARD),
    "training": _in_turn(
        *(
            _table((512, 2048, 8192), (64, 128, 256), ("causal",), **way)
            + _table((512, 2048, 8192), (128,), ("full",), **way)
            + _grouped(_few_grouped("Llama-3-8B", "Qwen2.5-7B", "GPT-OSS-120B"), **way)
            for way in (
                {"method": "wall", "label": "step eager", **_STEP},
                {"method": "graph", "label": "step graph", **_STEP},
            )
        )
    ),
    # Grouped queries, which every current model has: few heads of keys, so few independent pieces for the backward.
    "grouped": _of_models(_GROUPED_MODELS, "forward", "backward", "step"),
    "odd": _of_models(_ODD_MODELS, "forward", "backward"),
    "drawn": _drawn(0),
    # Masks, biases, sinks and dropout: what programs ask of scores.
    "variants": variants.rows(),
    # Sequences of different lengths behind one another: packed training, and ragged batches.
    "packed": _packed(_PACKED_ROWS),
    "small": tuple(
        row(shape, _F16, mask, method="graph", **_CUDA)
        for shape in ((2, 8, 512, 64), (1, 16, 1024, 64), (1, 32, 512, 128), (1, 8, 256, 64))
        for mask in _FULL_AND_CAUSAL
    ),
    "float32": tuple(
        row(shape, _F32, mask, **_FLOAT32, **direction)
        for shape in ((2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 16384, 128), (8, 16, 1024, 64))
        for mask in _FULL_AND_CAUSAL
        for direction in ({"label": "forward"}, _BACKWARD)
    ),
    "sm80": _in_turn(_table(_LONG, **_SM80, label="forward"), _table(_LONG, **_SM80, **_BACKWARD)),
    # Every library that there is on one row of each kind, so that those that other suites leave out are seen once.
    "models": (
        *_both_ways((1, 32, 8192, 128), "causal", heads_kv=8),
        *_both_ways((1, 24, 4608, 128), "full"),
        *_both_ways((64, 12, 197, 64), "full"),
        *_both_ways((1, 16, 8192, 256), "window:1024,0", heads_kv=8, softcap=50.0),
        *_both_ways((1, 128, 4096, 192), "causal", head_dim_v=128),
        row((1, 32, 16, 128), _BF16, heads_kv=8, seq_kv=8192, **_EVERY),
    ),
    # A few new tokens per sequence against what was said before, and many.
    "decode": _decoding(_DECODE_ROWS),
    "chunked": _chunked(),
}


# How a suite is measured where that is not how all are; what the command line asks for comes first. The host's cost of
# each kind of problem is left to the suite `host`: it would compile other kernels than those that are timed. Four rows
# for each of many problems get shorter rounds.
_FOR_KERNELS: dict[str, Any] = {"round_seconds": 0.015, "overhead": False, "more_seconds": 1.0}
_WITH_FLASH = ("forward", "backward", "training", "grouped", "odd", "packed")
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*_WITH_FLASH, "decode", "chunked"), _FOR_KERNELS),
    "small": {"round_seconds": 0.02, "overhead": False, "more_seconds": 2.0},
    "models": {"round_seconds": 0.02, "overhead": False, "more_seconds": 2.0},
    "drawn": {"round_seconds": 0.01, "overhead": False, "more_seconds": 0.5},
    "variants": {"round_seconds": 0.012, "overhead": False, "more_seconds": 0.5},
}
# Other libraries beside the candidates of a suite. A row that only our own candidates answer stays as it is.
PEERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_WITH_FLASH, "drawn", "small"), (FA3, FA4)),
    "models": (FA3, FA4, FLASHINFER),
    "variants": (FA4,),
    "decode": (FA3, FLASHINFER),
    "chunked": (FA3, FA4, FLASHINFER),
}


def rows_of(name: str, seed: int = 0) -> tuple[Row, ...]:
    """All rows of a suite. The seed matters to `drawn` alone; an unknown suite has no rows."""
    return _drawn(seed) if name == "drawn" else SUITES.get(name, ())


def suite(name: str, only: tuple[str, ...] = (), extra: tuple[str, ...] = (), seed: int = 0) -> list[Row]:
    """The rows of a suite that `only` selects, with the extra candidates, and other libraries' that can be imported.

    A row is selected if its name contains one of `only`; joined by a plus, `16384x128+causal`, all parts must be there.
    """
    if name not in SUITES:
        raise InvalidInput("--suite", repr(name), f"one of {', '.join(SUITES)}", "choose one of these")
    every = rows_of(name, seed)
    rows = [_with_candidates(row, _peers(name, row) + extra) for row in every if _selected(row.name, only)]
    if not rows:
        names = ", ".join(row.name for row in every)
        wanted = ", ".join(map(repr, only))
        raise InvalidInput("--only", wanted, f"parts of the name of a row: {names}", "choose a part of one of these")
    return rows


def peers_of(name: str, row: Row) -> tuple[str, ...]:
    """Who a row of a suite is held against: the strongest of others that there are, whatever is installed here."""
    own = [candidate for candidate in row.candidates if not Candidate(candidate).is_ours]
    return (*own, *(PEERS.get(name, ()) if own else ()))


def _with_candidates(row: Row, more: tuple[str, ...]) -> Row:
    return replace(row, candidates=tuple(dict.fromkeys((*row.candidates, *more))))


def _peers(name: str, row: Row) -> tuple[str, ...]:
    """The other libraries of a suite that can be imported here."""
    return tuple(peer for peer in peers_of(name, row) if peer in row.candidates or installed(peer))


def _selected(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(all(part in name for part in wanted.split("+")) for wanted in only)
