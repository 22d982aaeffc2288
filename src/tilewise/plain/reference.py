"""The specification: attention written out, in float32 (float64 for float64 inputs). It defines what is right.

    1. S = scale * Q K^T                      scores, one per (query, key)
    2. S = T_n(...T_1(S))                     the terms of problem.scores, as a softcap
    3. S = S + bias, S = -inf where hidden    the mask, and the terms that hide
    4. lse = log sum exp S                    -inf for a row that sees no key; what joins a row is in its sum
    5. P = exp(S - lse)                       0 for hidden keys and for rows that see none, and where a term drops it
    6. out = P V

and backwards, with D = rowsum(dout * out) - dlse:

    7. dV = P^T dout
    8. dS = P * (dout V^T - D)
    9. dS = dS * dT/dS                        the product of their slopes
   10. dQ = scale * dS K,  dK = scale * dS^T Q

The gradient of an operand (a bias) is what autograd makes of the forward.

Query heads that share a key/value head are stacked into one tall matrix, so K and V are never repeated. `forward` is
made of differentiable torch operations only: vmap, jvp and double backward all work through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..backend import ALL, NO_OPERANDS, Grads, Operands, Wants, composite_notices
from ..isolation import (
    all_finite,
    backward_by_sequence,
    forward_by_sequence,
    forward_of_cache,
    isolated,
    joined,
    pieces,
)
from ..masks import Cached, Dense, Documents, Full, Packed
from ..operands import recording
from ..problem import in_memory_order
from ..scores import Where, bend_all, join_all, keep_all, observe_all, visible_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import Reason
    from ..problem import Problem
    from ..target import Target


def why_not(problem: Problem, target: Target) -> list[Reason]:
    return []


def notices(problem: Problem, target: Target) -> list[str]:
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv * _work_dtype(problem.dtype).itemsize
    return [f"holds every score at once: {scores / 2**20:.1f} MiB", *composite_notices(problem, target)]


def configs(problem: Problem, target: Target) -> list[Any]:
    return []


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Any = None,
    operands: Operands = NO_OPERANDS,
    results: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads_q, seq_q, head_dim_v) in q's dtype, lse (batch, heads_q, seq_q).

    What terms report goes into `results`.
    """
    problem = problem.dropout_in_terms()
    if isinstance(problem.mask, Cached):
        return forward_of_cache(forward, q, k, v, problem, operands)
    if isinstance(problem.mask, Packed):
        return forward_by_sequence(forward, q, k, v, problem, config, operands, results)
    apart = isinstance(problem.mask, Documents) and all(term.elementwise for term in problem.scores)
    if apart and _is_recorded(q, k, v):
        # What is derived from these operations keeps documents apart only if they are.
        parts = [
            (piece, *forward(piece.of_rows(q), piece.of_keys(k), piece.of_keys(v), piece.problem))
            for piece in pieces(problem)
        ]
        out = joined([piece.together(out) for piece, out, _ in parts])
        return in_memory_order(out, problem.layout), joined([piece.together(lse) for piece, _, lse in parts])
    work = _work_dtype(q.dtype)
    where = Where(problem, range(problem.seq_q), range(problem.seq_kv), operands=operands)
    scores, hidden, _ = _scores(q.to(work), k.to(work), problem, where)
    observe_all(scores, where, results)
    top = scores.amax(-1, keepdim=True).detach() if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    logits = join_all(where, work)
    for logit in logits:
        top = torch.maximum(top, logit.detach())
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    for logit in logits:
        total = total + torch.exp(logit - top)
    kept = keep_all(where, work)
    if kept is not None:
        weights = weights * kept
    sees_none = total == 0.0
    safe_total = total.masked_fill(sees_none, 1.0)
    lse = (safe_total.log() + top).masked_fill(sees_none, -torch.inf).squeeze(-1)
    shares, v = weights / safe_total, v.to(work)
    clean = hidden is None or all_finite(v)
    out = _stack(shares, v) if clean else isolated(_stack, shares, v, hidden.logical_not())  # type: ignore[union-attr]
    return in_memory_order(out.to(q.dtype), problem.layout), lse


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
    """Gradients by the formulas above, each in its input's dtype."""
    problem = problem.dropout_in_terms()
    if isinstance(problem.mask, Packed):
        return backward_by_sequence(backward, dout, dlse, q, k, v, out, lse, problem, config, operands, wants)
    grads = _operand_gradients(dout, dlse, q, k, v, problem, operands, wants - ALL) if wants - ALL else {}
    work = _work_dtype(q.dtype)
    q_work, k_work, v_work, dout_work = (t.to(work) for t in (q, k, v, dout))
    where = Where(problem, range(problem.seq_q), range(problem.seq_kv), operands=operands)
    scores, hidden, slope = _scores(q_work, k_work, problem, where)
    weights = torch.exp(scores - lse.unsqueeze(-1).masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0))
    spoiled = hidden is not None and not all_finite(q, k, v, dout)
    if spoiled:  # the lse of a row may be nan
        weights = weights.masked_fill(hidden, 0.0)  # type: ignore[arg-type]

    def product(
        multiply: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor, signed: bool = True
    ) -> torch.Tensor:
        if not spoiled:
            return multiply(left, right)
        return isolated(multiply, left, right, hidden.logical_not(), signed=signed)  # type: ignore[union-attr]

    def transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return _stack_transposed(left, right, problem)

    kept = keep_all(where, work)
    if "v" in wants:
        dropped = weights if kept is None else weights * kept
        grads["v"] = product(transposed, dropped, dout_work, signed=False).to(v.dtype)
    if not wants & {"q", "k"}:
        return grads
    delta = (dout_work * out.to(work)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(work).unsqueeze(-1)
    dweights = _stack(dout_work, v_work.transpose(-1, -2))
    dscores = weights * ((dweights if kept is None else dweights * kept) - delta)
    if slope is not None:
        dscores = dscores * slope
    if hidden is not None:
        dscores = dscores.masked_fill(hidden, 0.0)
    dscores = dscores * problem.scale
    if "q" in wants:
        grads["q"] = product(_stack, dscores, k_work).to(q.dtype)
    if "k" in wants:
        grads["k"] = product(transposed, dscores, q_work).to(k.dtype)
    return {name: grads[name] for name in ("q", "k", "v", *operands) if name in wants}


def signed_weights(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, problem: Problem, operands: Operands = NO_OPERANDS
) -> torch.Tensor:
    """The weights P (batch, heads_q, seq_q, seq_kv) in q's dtype, negated where a term drops them; not scaled up."""
    problem, work = problem.dropout_in_terms(), _work_dtype(q.dtype)
    where = Where(problem, range(problem.seq_q), range(problem.seq_kv), operands=operands)
    scores, _, _ = _scores(q.to(work), k.to(work), problem, where)
    rows = lse.to(work).unsqueeze(-1)
    weights = torch.exp(scores - rows.masked_fill(rows == -torch.inf, 0.0))
    kept = keep_all(where, work)
    return (weights if kept is None else torch.where(kept > 0, weights, -weights)).to(q.dtype)


def _operand_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    operands: Operands,
    wants: Wants,
) -> Grads:
    """Whatever an operand does to the result, autograd derives it from the operations of the forward."""
    leaves = {name: operands[name].detach().requires_grad_() for name in wants}
    with recording():
        out, lse = forward(q.detach(), k.detach(), v.detach(), problem, None, {**operands, **leaves})
        pairs = [(made, grad) for made, grad in ((out, dout), (lse, dlse)) if grad is not None]
        made, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(made, list(leaves.values()), given, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(
    q: torch.Tensor, k: torch.Tensor, problem: Problem, where: Where
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Masked scores (steps 1 to 3), what is hidden (None = nothing by structure), and the slope of their terms."""
    operands = where.operands
    scores, slope = bend_all(_stack(q, k.transpose(-1, -2)) * problem.scale, where)
    hidden = _hidden(problem, operands, q.device)
    if (seen := visible_all(where)) is not None:
        hidden = seen.logical_not() if hidden is None else hidden | seen.logical_not()
    if isinstance(problem.mask, Dense) and problem.mask.additive:
        scores = scores + operands["bias"].to(scores.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, hidden, slope


def _hidden(problem: Problem, operands: Operands, device: torch.device) -> torch.Tensor | None:
    if isinstance(problem.mask, Full):
        return None
    if isinstance(problem.mask, Dense):
        return operands["bias"].detach() == -torch.inf if problem.mask.additive else operands["keep"].logical_not()
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    return problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, device).logical_not()


def _stack(tall: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """tall (batch, heads_q, m, n) @ right (batch, heads_kv, n, p), the heads of a group stacked along m."""
    batch, heads_q, m, n = tall.shape
    heads_kv = right.shape[1]
    if heads_q == heads_kv:
        return tall @ right
    stacked = tall.reshape(batch, heads_kv, heads_q // heads_kv * m, n)
    return (stacked @ right).reshape(batch, heads_q, m, right.shape[-1])


def _stack_transposed(tall: torch.Tensor, right: torch.Tensor, problem: Problem) -> torch.Tensor:
    """tall^T @ right summed over each group: (b, heads_q, m, n), (b, heads_q, m, p) -> (b, heads_kv, n, p)."""
    batch, _, m, n = tall.shape
    rows = problem.group * m
    stacked = tall.reshape(batch, problem.heads_kv, rows, n)
    return stacked.transpose(-1, -2) @ right.reshape(batch, problem.heads_kv, rows, right.shape[-1])


def _is_recorded(*tensors: torch.Tensor) -> bool:
    """Autograd or a functorch transform records the operations, to derive them itself."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
