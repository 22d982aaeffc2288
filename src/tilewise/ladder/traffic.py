"""What each rung moves, from formulas alone: bytes to and from DRAM, and bytes in and out of the multiprocessors.

Two numbers, because fusion and tiling are two lessons. DRAM counts every kernel's inputs read once and its outputs
written once: what is left when the caches are as kind as they can be. The multiprocessors' number counts what the tiles
really ask for: K and V once for every tile of rows, so small tiles cost dearly although nothing of it reaches DRAM.

    unfused    scores S and weights P are written and read: `passes` times `itemsize` for every (query, key) pair
    fused      Q read and out written once; (K + V) read for every tile of `block_q` rows that sees them

Measured counterparts come from Nsight Compute: `tilewise ladder --bytes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..engine import SM90
from ..plain import tiled
from ..triton import backend as triton
from . import RUNGS, lecture, numba, three_kernel
from .bands import HALVES

if TYPE_CHECKING:
    from ..problem import Problem
    from ..target import Target

_FUSED_ROWS = 128  # of a tile, where there is no config to ask
_TILED_PASSES = 10  # product, scale in place (2), maximum, subtract (2), exponentiate (2), sum, product


class Traffic(NamedTuple):
    """Bytes of one forward. `formula` says them in words."""

    dram: int
    sm: int
    formula: str


def traffic(name: str, problem: Problem, target: Target) -> Traffic:
    """What the rung `name` moves for a problem."""
    return _RUNGS[name](problem, target)


def every(problem: Problem, target: Target) -> dict[str, Traffic]:
    return {rung.name: traffic(rung.name, problem, target) for rung in RUNGS}


def _scores(problem: Problem) -> int:
    """All pairs: what has no tiles skips nothing."""
    return problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv


def _elements(problem: Problem) -> tuple[int, int]:
    """(q, k and v), (out) in elements."""
    q = problem.batch * problem.heads_q * problem.seq_q * problem.head_dim
    kv = problem.batch * problem.heads_kv * problem.seq_kv * (problem.head_dim + problem.head_dim_v)
    return q + kv, problem.batch * problem.heads_q * problem.seq_q * problem.head_dim_v


def _keys_read(problem: Problem, block_q: int) -> int:
    """Keys that tiles of `block_q` rows touch, over all tiles and heads."""
    tiles = (range(row, min(row + block_q, problem.seq_q)) for row in range(0, problem.seq_q, block_q))
    each = sum(len(problem.mask.keys(rows, problem.seq_q, problem.seq_kv)) for rows in tiles)
    return problem.batch * problem.heads_q * each


def _fused(problem: Problem, block_q: int, itemsize: int = 0, before: int = 0) -> Traffic:
    """One kernel. `before` are bytes that are moved to prepare its inputs."""
    size = itemsize or problem.dtype.itemsize
    out = _elements(problem)[1] * size
    q = problem.batch * problem.heads_q * problem.seq_q * problem.head_dim * size
    again = _keys_read(problem, block_q) * (problem.head_dim + problem.head_dim_v) * size
    words = f"Q + out + (K + V) for every {block_q} rows"
    return Traffic(problem.min_bytes() + before, q + out + again + before, words)


def _math(problem: Problem, target: Target) -> Traffic:
    """PyTorch widens 16-bit inputs to float32, and rounds only the result."""
    wide = max(4, problem.dtype.itemsize)
    inputs, out = _elements(problem)
    passes = 4 + (2 if str(problem.mask) != "full" else 0)
    copies = inputs * (problem.dtype.itemsize + 2 * wide) if problem.dtype in HALVES else inputs * wide
    moved = copies + out * wide + passes * wide * _scores(problem)
    return Traffic(moved, moved, f"Q, K, V, out in float32 + {passes} x {wide} bytes a score")


def _tiled(problem: Problem, target: Target) -> Traffic:
    config = tiled.shipped(problem, target)[0]
    fused = _fused(problem, config.block_q)
    scores = _TILED_PASSES * 4 * problem.pairs()
    words = f"{fused.formula} + {_TILED_PASSES} x 4 bytes a visible score"
    return Traffic(fused.dram + scores, fused.sm + scores, words)


def _numba(problem: Problem, target: Target) -> Traffic:
    inputs, out = _elements(problem)
    narrow = problem.dtype != torch.float32
    before = (problem.dtype.itemsize + 4) * (inputs + out) if narrow else 0
    fitting = numba.configs(problem, target)
    rows = fitting[0].block_q if fitting else 4
    return _fused(problem, rows, 4, before)


def _lecture(problem: Problem, target: Target) -> Traffic:
    return _fused(problem, lecture.BLOCK)


def _matmul(problem: Problem, target: Target) -> Traffic:
    inputs, out = _elements(problem)
    size = problem.dtype.itemsize
    passes = 4 + (2 if str(problem.mask) != "full" else 0)
    moved = (inputs + out + passes * _scores(problem)) * size
    return Traffic(moved, moved, f"Q, K, V, out + {passes} x {size} bytes a score; more in cuBLAS's tiles")


def _three_kernel(problem: Problem, target: Target) -> Traffic:
    config = (three_kernel.configs(problem, target) or [three_kernel.Config()])[0]
    size = problem.dtype.itemsize
    scores = 4 * size * problem.pairs()
    keys = _keys_read(problem, config.scores_rows) * problem.head_dim * size
    values = _keys_read(problem, config.values_rows) * problem.head_dim_v * size
    q, out = (problem.batch * problem.heads_q * problem.seq_q * dim for dim in (problem.head_dim, problem.head_dim_v))
    words = f"Q, K, V, out + 4 x {size} bytes a visible score"
    return Traffic(problem.min_bytes() + scores, (q + out) * size + keys + values + scores, words)


def _triton(problem: Problem, target: Target) -> Traffic:
    fits = max(problem.head_dim, problem.head_dim_v) <= triton.HEAD_DIM_LIMIT
    return _fused(problem, triton.configs(problem, target)[0].block_q if fits else _FUSED_ROWS)


def _sm90(problem: Problem, target: Target) -> Traffic:
    found = SM90.shipped(problem, target) if problem.dtype in HALVES else []
    return _fused(problem, found[0].block_q if found else _FUSED_ROWS)


_RUNGS = {
    "math": _math,
    "tiled": _tiled,
    "numba": _numba,
    "lecture": _lecture,
    "matmul": _matmul,
    "three-kernel": _three_kernel,
    "triton": _triton,
    "sm80": lambda problem, target: _fused(problem, _FUSED_ROWS),
    "sm90": _sm90,
}
