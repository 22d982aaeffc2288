"""Backends: each computes attention in its own way behind the same functions, and none imports another.

    why_not(problem, target) -> list[Reason]      every reason to refuse; empty = willing
    notices(problem, target) -> list[str]         what the caller should know if it runs
    configs(problem, target) -> list[Config]      legal compile-time choices, best first; empty = nothing to choose
    forward(q, k, v, problem, config=None, operands={}) -> (out, lse)
    backward(dout, dlse, q, k, v, out, lse, problem, config=None, operands={}, wants=ALL) -> {name: gradient}

A backend may also have `bind(q, k, v, problem, config, operands)`, which returns forward as a function of
(q, k, v, operands) for tensors of exactly these shapes and strides: what a call need not decide again is decided there.
So may its backward: `bind_backward(problem)` returns a function of (dout, dlse, q, k, v, out, lse, operands, wants).

Tensors arrive as (batch, heads, seq, head_dim) views whatever the caller's layout; `out` is allocated in the memory
order of `problem.layout` (see `empty_out`). `operands` are the tensors that `problem.operands` names. `lse` is
(batch, heads_q, seq_q), natural log, float32 (float64 for float64 inputs), -inf for a row that sees no key. `wants`
names the inputs and operands whose gradients are returned, and no others are; of the operands, only those that
`problem.operand_grads` names, which a backend that cannot make them refuses. Backends that take terms with `outputs`
have one more argument of forward, `results`: a dictionary that these are put into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import fresh
from .errors import Reason
from .operands import ALL, NO_OPERANDS, Grads, Operands, Wants

if TYPE_CHECKING:
    from .problem import Problem
    from .target import Target

__all__ = [
    "ALL",
    "NO_OPERANDS",
    "Backend",
    "Grads",
    "Operands",
    "Wants",
    "composite_notices",
    "empty_lse",
    "empty_out",
    "lse_dtype",
    "no_operand_gradients",
]


class Backend(Protocol):
    """The functions above: a module, or an object where one module serves several backends."""

    def why_not(self, problem: Problem, target: Target, /) -> list[Reason]: ...

    def notices(self, problem: Problem, target: Target, /) -> list[str]: ...

    def configs(self, problem: Problem, target: Target, /) -> list[Any]: ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def backward(
        self,
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
    ) -> Grads: ...


def composite_notices(problem: Problem, target: Target) -> list[str]:
    """The notices that all backends made of torch operations share."""
    if problem.dtype is torch.float64 and not target.is_cpu:
        return ["float64 runs in plain operations: for a fused kernel cast q, k and v to float32"]
    return []


def no_operand_gradients(problem: Problem) -> list[Reason]:
    """Why a backend whose gradients are those of q, k and v alone refuses."""
    names = ", ".join(problem.operand_grads)
    remedy = f"detach it, or use backend='tiled' or 'reference', which make the gradient of {names}"
    return [Reason(f"{names} requires grad, and this backend makes the gradients of q, k and v alone", remedy)] * bool(
        names
    )


def empty_out(q: torch.Tensor, head_dim_v: int, layout: str) -> torch.Tensor:
    """An uninitialised (batch, heads_q, seq_q, head_dim_v) whose memory order is that of the caller's layout."""
    batch, heads, seq, _ = q.shape
    if layout == "bshd":  # by its strides, and no view: autograd has rules of its own for those
        strides = (seq * heads * head_dim_v, head_dim_v, heads * head_dim_v, 1)
        return fresh.new_empty_strided(q, (batch, heads, seq, head_dim_v), strides)
    return fresh.new_empty(q, (batch, heads, seq, head_dim_v))


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised (batch, heads_q, seq_q) for the log-sum-exp."""
    return fresh.new_empty(q, q.shape[:3], dtype=lse_dtype(q.dtype))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp and of all sums, for inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
