"""Two library products around a softmax: what attention was before it was fused, at its best in PyTorch.

The products run in the inputs' own precision on tensor cores (cuBLAS on a GPU), the scale rides along in the first one,
and scores and weights are rounded to the inputs' type on their way through memory: the same bytes that the three-kernel
rung moves, and what it is measured against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..backend import ALL, NO_OPERANDS, empty_lse, empty_out
from ..errors import UnsupportedProblem
from ..masks import Full
from .bands import FLOATS, refusals

if TYPE_CHECKING:
    from ..backend import Grads, Operands, Wants
    from ..errors import Reason
    from ..problem import Problem
    from ..target import Target


def why_not(problem: Problem, target: Target) -> list[Reason]:
    return refusals(problem, dtypes=(*FLOATS, torch.float64), head_dim=1 << 16)


def notices(problem: Problem, target: Target) -> list[str]:
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv * problem.dtype.itemsize
    return [f"holds every score and every weight at once: {2 * scores / 2**20:.0f} MiB"]


def configs(problem: Problem, target: Target) -> list[Any]:
    return []


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Any = None,
    operands: Operands = NO_OPERANDS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Heads that share keys are stacked into one tall product, so that K and V are never repeated."""
    if problem.empty:
        return empty_out(q, problem.head_dim_v, problem.layout).zero_(), empty_lse(q).fill_(-torch.inf)
    pairs, tall = problem.batch * problem.heads_kv, problem.group * problem.seq_q
    queries = q.reshape(pairs, tall, problem.head_dim)
    keys, values = (tensor.reshape(pairs, problem.seq_kv, tensor.shape[3]) for tensor in (k, v))
    nothing = q.new_empty(1, 1, 1)
    scores = torch.baddbmm(nothing, queries, keys.transpose(1, 2), beta=0, alpha=problem.scale)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if not isinstance(problem.mask, Full):
        rows, columns = range(problem.seq_q), range(problem.seq_kv)
        seen = problem.mask.to_bool(rows, columns, problem.seq_q, problem.seq_kv, q.device)
        scores.view(pairs, problem.group, problem.seq_q, problem.seq_kv).masked_fill_(~seen, -torch.inf)
    weights = torch.softmax(scores, -1)
    if _some_row_is_blind(problem):
        weights = weights.masked_fill_(weights.isnan() & (scores == -torch.inf), 0.0)
    out = (weights @ values).view(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    if problem.layout == "bshd":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if not problem.needs_lse:
        return out, None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, torch.logsumexp(scores.to(wide), -1).view(problem.batch, problem.heads_q, problem.seq_q)


def _some_row_is_blind(problem: Problem) -> bool:
    """Under a band, rows that see no key are at the ends."""
    spans = (problem.mask.span(row, problem.seq_q, problem.seq_kv) for row in (0, problem.seq_q - 1))
    return any(begin >= end for begin, end in spans)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Any = None,
    operands: Operands = NO_OPERANDS,
    wants: Wants = ALL,
) -> Grads:
    raise UnsupportedProblem("the matmul rung is forward only", problem, remedy="use backend='auto'")
