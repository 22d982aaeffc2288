"""The suites of `tilewise bench`, as data: which problems, which candidates, what is timed, and how.

The first candidate of a row is the one that the score is about. Rows of one table keep the work constant: 16384 tokens
of a model 2048 wide, cut into ever longer sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import masks
from ..errors import InvalidInput
from ..problem import Problem, dtype_name
from .candidates import DETERMINISTIC, FA3, OURS, TORCH_DEFAULT, Candidate, has_fa3
from .compare import Row


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
    **fields: Any,
) -> Row:
    """A row for q of `shape` (batch, heads, seq, head_dim); `fields` are those of Problem that differ from it."""
    batch, heads, seq, dim = shape
    values: dict[str, Any] = {"heads_kv": heads, "seq_kv": seq, "head_dim_v": dim, "mask": masks.parse(mask)} | fields
    problem = Problem(batch=batch, heads_q=heads, seq_q=seq, head_dim=dim, dtype=dtype, **values)
    return Row(f"{_problem_name(problem)} {label}".rstrip(), problem, candidates, device, method, flush, times)


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


_CPU: dict[str, Any] = {"device": "cpu", "candidates": (OURS, TORCH_DEFAULT, "sdpa:math")}
_CUDA: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "sdpa:cudnn", "sdpa:flash")}
_STEP: dict[str, Any] = {
    "device": "cuda",
    "candidates": (OURS, DETERMINISTIC, TORCH_DEFAULT, "sdpa:cudnn", "sdpa:flash"),
    "needs_grad": True,
    "times": ("step",),
}
_FLOAT32: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "sdpa:efficient")}
_SM80: dict[str, Any] = {"device": "cuda", "candidates": ("sm80", "sdpa:flash")}
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
    "forward": _table(_LONG, **_CUDA),
    "backward": _table((128, 256, *_LONG), **_CUDA, **_BACKWARD),
    "training": tuple(
        one
        for method, label in (("wall", "step eager"), ("graph", "step graph"))
        for dims, kinds in (((64, 128, 256), ("causal",)), ((128,), ("full",)))
        for one in _table((512, 2048, 8192), dims, kinds, method=method, label=label, **_STEP)
    ),
    "small": tuple(
        row(shape, _F16, mask, method="graph", **_CUDA)
        for shape in ((2, 8, 512, 64), (1, 16, 1024, 64), (1, 32, 512, 128), (1, 8, 256, 64))
        for mask in _FULL_AND_CAUSAL
    ),
    "float32": tuple(
        row(shape, _F32, mask, **_FLOAT32, **direction)
        for direction in ({"label": "forward"}, _BACKWARD)
        for shape in ((2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 16384, 128), (8, 16, 1024, 64))
        for mask in _FULL_AND_CAUSAL
    ),
    "sm80": _table(_LONG, **_SM80, label="forward") + _table(_LONG, **_SM80, **_BACKWARD),
    "models": (
        row((1, 32, 8192, 128), _BF16, "causal", heads_kv=8, **_CUDA),
        row((1, 24, 4608, 128), _BF16, **_CUDA),
        row((64, 12, 197, 64), _BF16, **_CUDA),
        row((1, 16, 8192, 256), _BF16, "window:1024,0", heads_kv=8, softcap=50.0, **_CUDA),
        row((1, 128, 4096, 192), _BF16, "causal", head_dim_v=128, **_CUDA),
        row((1, 32, 16, 128), _BF16, heads_kv=8, seq_kv=8192, **_CUDA),
    ),
    # One new token a sequence against what was said before. The cache of keys comes from memory, as between layers.
    "decode": tuple(
        row((batch, 32, 1, 128), _BF16, heads_kv=8, seq_kv=seq_kv, flush=True, **_CUDA)
        for batch, seq_kv in (
            (1, 1024),
            (1, 8192),
            (1, 32768),
            (1, 131072),
            (8, 1024),
            (8, 8192),
            (8, 32768),
            (64, 4096),
        )
    ),
    # What the host needs to enqueue a call, a call that autograd records, and a call with its backward.
    "host": tuple(
        row((1, 8, 128, 64), _BF16, method="host", label=label, needs_grad=bool(label), times=(timed,), **_CUDA)
        for label, timed in (("", "forward"), ("grad", "forward"), ("grad step", "step"))
    ),
}


def suite(name: str, only: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> list[Row]:
    """The rows of a suite that `only` selects, with the extra candidates, and FlashAttention-3 where it is.

    A row is selected if its name contains one of `only`; joined by a plus, `16384x128+causal`, all parts must be there.
    """
    if name not in SUITES:
        raise InvalidInput("--suite", repr(name), f"one of {', '.join(SUITES)}", "choose one of these")
    rows = [
        replace(row, candidates=(*row.candidates, *_rivals(row), *extra))
        for row in SUITES[name]
        if _selected(row.name, only)
    ]
    if not rows:
        names = ", ".join(row.name for row in SUITES[name])
        wanted = ", ".join(map(repr, only))
        raise InvalidInput("--only", wanted, f"parts of the name of a row: {names}", "choose a part of one of these")
    return rows


def _rivals(row: Row) -> tuple[str, ...]:
    """FlashAttention-3 where it is installed and takes the row."""
    on_gpu = row.device.startswith("cuda")
    return (FA3,) if on_gpu and has_fa3() and not Candidate(FA3).why_not(row.problem) else ()


def _selected(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(all(part in name for part in wanted.split("+")) for wanted in only)
