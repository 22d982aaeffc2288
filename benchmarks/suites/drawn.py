"""Problems drawn at random from what models have, for a figure that no kernel was tuned on.

`problems(seed)` is a function of the seed alone. Each problem is drawn as follows, and drawn again if it is too large:

    dtype       bfloat16, 1 in 4 float16
    head_dim    64, 72, 80, 96, 112, 128, 160, 192 (v: 128) or 256, weighted by how common they are (`HEAD_DIMS`)
    heads       1 to 16 of keys and values, log-uniform; each with 1 to 8 query heads, 1 and 4 more often than the rest
    attention   3 in 4 self-attention: half causal, 7 in 20 full, 3 in 20 a causal window; 1 in 4 cross-attention, full
    tokens      200 to 8192, log-uniform; half of the lengths are multiples of 128. Keys of cross-attention: 64 to 8192
    window      64 to 2048 keys before the query's own, log-uniform, and at most half of the sequence
    batch       1 to 16, log-uniform

A problem's tensors and their gradients hold at most MAX_BYTES, and its forward takes at most MAX_FLOPS operations. Half
of the problems are *large*: the forward has LARGE_FLOPS or more, so that the GPU takes longer than the host needs for a
call. The other half are *small*. Both halves are filled in the order in which their problems are drawn.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.lab.candidates.names import FA3, FA4, OURS, builds_mask
from tilewise.lab.studies.suites import Suite, posed
from tilewise.masks import Causal, Full, Window
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.lab.measure.compare import Row

COUNT = 24  # 96 rows, which a GPU measures in a few minutes
MIN_TOKENS, MIN_KEYS, MAX_TOKENS = 200, 64, 8192
MAX_HEADS_KV, MAX_GROUP, MAX_BATCH = 16, 8, 16
MAX_BYTES = 2**29
LARGE_FLOPS, MAX_FLOPS = 4 * 10**10, 6 * 10**11
HEAD_DIMS = {  # (of q and k, of v): weight
    (64, 64): 24,
    (72, 72): 3,
    (80, 80): 6,
    (96, 96): 8,
    (112, 112): 3,
    (128, 128): 36,
    (160, 160): 3,
    (192, 128): 6,
    (256, 256): 11,
}
_GROUPS = {1: 6, 2: 3, 3: 1, 4: 6, 5: 1, 6: 1, 7: 2, 8: 4}


class Drawn(NamedTuple):
    """A problem, its number among those of the seed, and which half it belongs to."""

    number: int
    problem: Problem
    size: str  # "large" or "small"


def problems(seed: int, count: int = COUNT) -> list[Drawn]:
    """`count` problems without gradients, large and small ones in turn."""
    rng = random.Random(f"tilewise drawn {seed}")
    halves: dict[str, list[Problem]] = {"large": [], "small": []}
    wanted = {"large": count - count // 2, "small": count // 2}
    while any(len(halves[size]) < wanted[size] for size in halves):
        problem = _draw(rng)
        if tensor_bytes(problem) > MAX_BYTES or problem.flops() > MAX_FLOPS:
            continue
        size = "large" if problem.flops() >= LARGE_FLOPS else "small"
        if len(halves[size]) < wanted[size] and problem not in halves[size]:
            halves[size].append(problem)
    in_turn = [(size, halves[size][index]) for index in range(wanted["large"]) for size in halves
               if index < wanted[size]]  # fmt: skip
    return [Drawn(number, problem, size) for number, (size, problem) in enumerate(in_turn, 1)]


def tensor_bytes(problem: Problem) -> int:
    """q, k, v, out and their gradients."""
    queries = problem.heads_q * problem.seq_q
    keys = problem.heads_kv * problem.seq_kv
    return 2 * problem.batch * (queries + keys) * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def _draw(rng: random.Random) -> Problem:
    dtype = torch.float16 if rng.random() < 0.25 else torch.bfloat16
    head_dim, head_dim_v = rng.choices(list(HEAD_DIMS), list(HEAD_DIMS.values()))[0]
    heads_kv = _log_uniform(rng, 1, MAX_HEADS_KV)
    group = rng.choices(list(_GROUPS), list(_GROUPS.values()))[0]
    seq_q = seq_kv = _length(rng, MIN_TOKENS)
    mask: Full | Causal | Window = Full()
    if rng.random() < 0.25:
        while seq_kv == seq_q:
            seq_kv = _length(rng, MIN_KEYS)
    else:
        kind = rng.random()
        if kind < 0.5:
            mask = Causal()
        elif kind < 0.65:
            mask = Window(_log_uniform(rng, 64, min(2048, seq_q // 2)), 0)
    return Problem(
        batch=_log_uniform(rng, 1, MAX_BATCH),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        mask=mask,
    )


def _length(rng: random.Random, shortest: int) -> int:
    length = _log_uniform(rng, shortest, MAX_TOKENS)
    return min(MAX_TOKENS, -(-length // 128) * 128) if rng.random() < 0.5 else length


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Each factor of two is as likely as the next; both ends included."""
    return min(high, int(low * (float(high + 1) / low) ** rng.random()))


def rows(seed: int) -> tuple[Row, ...]:
    """Forward and backward of every problem, each by graph replay and eagerly."""
    return tuple(
        _drawn_row(one, seed, what, method, word)
        for one in problems(seed)
        for what in ("forward", "backward")
        for method, word in (("graph", "graph"), ("wall", "eager"))
    )


def _drawn_row(one: Drawn, seed: int, what: str, method: str, word: str) -> Row:
    """A mask that PyTorch knows as a tensor alone is scored apart: the ratio is that of the mask, not of a kernel."""
    problem = one.problem.with_(needs_grad=what == "backward")
    built = builds_mask(problem)
    # FlashAttention-2 takes neither a mask tensor nor two head dims; the efficient kernel takes both.
    other = "torch-efficient" if built or problem.head_dim != problem.head_dim_v else "torch-flash"
    candidates, kind = (OURS, "torch-cudnn", other), str(problem.mask).partition(":")[0] if built else ""
    label = f"{one.size} seed{seed}#{one.number:02} {what} {word}"
    return posed(
        problem, label, candidates=candidates, device="cuda", method=method, flush=False, times=(what,), kind=kind
    )


# Four rows for each of many problems, so rounds are short.
SUITE = Suite(rows(0), {"round_seconds": 0.01, "overhead": False, "more_seconds": 0.5}, (FA3, FA4), rows)
