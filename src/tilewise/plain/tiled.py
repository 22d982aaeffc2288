"""The FlashAttention-2 loop in torch operations: the algorithm of our kernels, readable, in O(N) memory, on any device.

Forward, for each block of block_q rows, over the blocks of block_kv keys that the mask does not leave empty:

    1. S = scale * Q_i K_j^T            (softcap and bias as in the reference; -inf where a partial tile hides)
    2. m' = max(m, rowmax S)
    3. P = exp(S - m')
    4. alpha = exp(m - m')              what the old sums are worth under the new maximum
    5. l = alpha * l + rowsum P
    6. O = alpha * O + P V_j
    7. m = m'
  then
    8. O = O / l,  lse = m + log l

Backward, over the same tiles, with D = rowsum(dout * out) - dlse:

    9. P = exp(S - lse);  dV_j += P^T dO_i
   10. dS = P * (dO_i V_j^T - D_i)      (times 1 - tanh^2 under a softcap)
   11. dQ_i += scale * dS K_j;  dK_j += scale * dS^T Q_i
       dbias_ij += dS, before the slope; of other operands, what their terms make of dS

A widely read lecture listing of this loop (GPU MODE, lecture 12) goes wrong at three of these steps: it assigns
`last_m_i = m_i` after the loop over key blocks instead of inside it (step 7), so alpha is exp(-inf - m) = 0 and every
block but the last is forgotten; it stores the denominator of step 5 in `P_ij` before step 6 uses P, so V is weighted by
the running sum; and it never divides by the denominator (step 8). tests/test_backends.py runs the listing's updates
beside ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..backend import ALL, NO_OPERANDS, Grads, Operands, Wants, composite_notices, empty_lse, empty_out
from ..errors import Reason
from ..isolation import all_finite, backward_by_sequence, forward_by_sequence, isolated
from ..jit import tuned
from ..masks import Cached, Dense, Full, Packed, Tile
from ..operands import zero_grads
from ..problem import dtype_name
from ..scores import Where, bend_all, join_all, keep_all, observe_all, unbend_all, unjoin_all, visible_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..problem import Problem
    from ..target import Target


@dataclass(frozen=True, slots=True)
class Config:
    block_q: int = 128
    block_kv: int = 512

    @property
    def label(self) -> str:
        return f"{self.block_q} x {self.block_kv}"


_CPU_BLOCKS = ((128, 512), (256, 512), (512, 512), (256, 256), (128, 128), (64, 64))  # tiles that fit a core's cache
_GPU_BLOCKS = ((1024, 2048), (2048, 2048), (512, 1024))  # tiles that are worth their launches
_SIDES = tuple(2**power for power in range(5, 12))  # of the blocks that `search_space` tries


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = []
    if problem.transformed:
        reasons.append(
            Reason(
                "a functorch transform is active (vmap, jvp), and the tiled loop updates its sums in place",
                "use backend='reference' or 'torch-math' under transforms",
            )
        )
    if isinstance(problem.mask, Cached):
        reasons.append(
            Reason(f"mask {problem.mask}: keys in a cache, of which the tiled loop knows nothing", "use backend='auto'")
        )
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    entry = _tuned(problem, target)
    said = [] if entry is None else [tuned.cite(entry)]
    return [*said, *composite_notices(problem, target)]


def configs(problem: Problem, target: Target) -> list[Config]:
    """What `tilewise tune` found on this device, then what ships."""
    return tuned.first(_tuned(problem, target), Config, shipped(problem, target))


def shipped(problem: Problem, target: Target) -> list[Config]:
    blocks = _CPU_BLOCKS if target.is_cpu else _GPU_BLOCKS
    return [Config(block_q, block_kv) for block_q, block_kv in blocks]


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Blocks by powers of two, none larger than it takes to cover the problem in one."""
    tall, wide = (2 ** max(5, (seq - 1).bit_length()) for seq in (problem.seq_q, problem.seq_kv))
    return [Config(q, kv) for q in _SIDES if q <= tall for kv in _SIDES if kv <= wide]


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    """What the best blocks depend on: the kind of problem, and its sizes."""
    kind = {"dtype": dtype_name(problem.dtype), "mask": str(problem.mask).partition(":")[0], "grad": problem.needs_grad}
    pairs = problem.batch * problem.heads_q
    dims = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    return kind, {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv, "batch x heads": pairs} | dims


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    def is_legal(config: Config) -> bool:
        """Of other lengths within reach, too: blocks larger than the problem are cut to it."""
        return (config.block_q in _SIDES and config.block_kv in _SIDES) or config in shipped(problem, target)

    return tuned.find("tiled", target.name, *tuning_key(problem), Config, is_legal)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
    results: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads_q, seq_q, head_dim_v) in q's dtype, lse (batch, heads_q, seq_q).

    What terms report goes into `results`.
    """
    config, problem = config or Config(), problem.dropout_in_terms()
    if isinstance(problem.mask, Packed):
        return forward_by_sequence(forward, q, k, v, problem, config, operands, results)
    out, lse = empty_out(q, problem.head_dim_v, problem.layout), empty_lse(q)
    observe_all(lse.new_empty(0), Where(problem, range(0), range(0)), results)
    if problem.empty and not (out.numel() and any(term.joins_rows for term in problem.scores)):
        return out.zero_(), lse.fill_(-torch.inf)
    work = lse.dtype
    spoiled = _may_be_spoiled(problem, q, k, v)
    for rows in _blocks(range(problem.seq_q), config.block_q):
        q_tile = _group(q[:, :, rows.start : rows.stop].to(work), problem)
        state = q_tile.shape[:-1]
        top = q_tile.new_full((*state, 1), -torch.inf)
        total = q_tile.new_zeros((*state, 1))
        acc = q_tile.new_zeros((*state, problem.head_dim_v))
        for keys in _blocks(_key_range(problem, rows), config.block_kv):
            k_tile, v_tile = (t[:, :, keys.start : keys.stop].to(work) for t in (k, v))
            kind = problem.mask.tile(rows, keys, problem.seq_q, problem.seq_kv)
            if kind is Tile.EMPTY:
                continue
            where = Where(problem, rows, keys, stacked=True, operands=operands)
            scores, _, hidden = _tile_scores(_products(q_tile, k_tile, problem), where, kind, problem)
            observe_all(scores, where, results)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            finite_top = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights = scores.sub_(finite_top).exp_()
            alpha = torch.exp(top - finite_top)
            total = alpha * total + weights.sum(-1, keepdim=True)
            kept = keep_all(where, work)
            weights = weights if kept is None else weights * kept
            acc = alpha * acc + _product(weights, v_tile, hidden if spoiled else None)
            top = new_top
        for logit in join_all(Where(problem, rows, range(0), stacked=True, operands=operands), work):
            new_top = torch.maximum(top, logit)
            finite_top = new_top.masked_fill(new_top == -torch.inf, 0.0)
            alpha = torch.exp(top - finite_top)
            total, acc, top = alpha * total + torch.exp(logit - finite_top), alpha * acc, new_top
        sees_none = total == 0.0
        safe_total = total.masked_fill(sees_none, 1.0)
        out[:, :, rows.start : rows.stop] = _ungroup(acc / safe_total, problem).to(out.dtype)
        row_lse = (top + safe_total.log()).masked_fill(sees_none, -torch.inf)
        lse[:, :, rows.start : rows.stop] = _ungroup(row_lse, problem).squeeze(-1)
    return out, lse


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
    wants: Wants = ALL,
) -> Grads:
    """Gradients in each input's dtype; sums are kept in float32 (float64 for float64)."""
    config, problem = config or Config(), problem.dropout_in_terms()
    if isinstance(problem.mask, Packed):
        return backward_by_sequence(backward, dout, dlse, q, k, v, out, lse, problem, config, operands, wants)
    if problem.empty and not any(term.joins_rows for term in problem.scores):
        return zero_grads(wants, q, k, v, operands)
    work = lse.dtype
    spoiled = _may_be_spoiled(problem, q, k, v, dout)
    if work is not q.dtype and any(term.magnifies_delta & wants for term in problem.scores):
        out, _ = forward(q.to(work), k.to(work), v.to(work), problem, config, operands)  # whose delta is not rounded
    delta = (dout.to(work) * out.to(work)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(work).unsqueeze(-1)
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    given = {"q": q, "k": k, "v": v, **operands}
    sums = {name: torch.zeros_like(tensor, dtype=work) for name, tensor in given.items() if name in wants}
    dq, dk, dv = (sums.get(name) for name in ("q", "k", "v"))
    of_operands = wants - ALL
    for rows in _blocks(range(problem.seq_q), config.block_q):
        pick = slice(rows.start, rows.stop)
        q_tile, dout_tile, delta_tile, lse_tile = (
            _group(t[:, :, pick].to(work), problem) for t in (q, dout, delta, finite_lse)
        )
        if of_operands:
            of_rows = Where(problem, rows, range(0), stacked=True, operands=operands)
            for name, grad in unjoin_all(lse_tile, delta_tile, of_rows, of_operands).items():
                sums[name] += grad
        for keys in _blocks(_key_range(problem, rows), config.block_kv):
            span = slice(keys.start, keys.stop)
            k_tile, v_tile = k[:, :, span].to(work), v[:, :, span].to(work)
            kind = problem.mask.tile(rows, keys, problem.seq_q, problem.seq_kv)
            if kind is Tile.EMPTY:
                continue
            where = Where(problem, rows, keys, stacked=True, operands=operands)
            products = _products(q_tile, k_tile, problem)
            before = products.clone() if of_operands else products  # terms may work in place
            scores, slope, cut = _tile_scores(products, where, kind, problem)
            hidden = cut if spoiled else None
            weights = scores.sub_(lse_tile).exp_()
            if hidden is not None:  # the lse of a row may be nan
                weights = weights.masked_fill(hidden, 0.0)
            kept = keep_all(where, work)
            if dv is not None:
                dropped = weights if kept is None else weights * kept
                dv[:, :, span] += _product(dropped.transpose(-1, -2), dout_tile, _transposed(hidden))
            if dq is None and dk is None and not of_operands:
                continue
            dweights = dout_tile @ v_tile.transpose(-1, -2)
            dscores = weights * ((dweights if kept is None else dweights * kept) - delta_tile)
            if of_operands:
                visible = dscores if cut is None else dscores.masked_fill(cut, 0.0)
                if "bias" in of_operands and isinstance(problem.mask, Dense) and problem.mask.additive:
                    _add_to(sums["bias"], _ungroup(visible, problem), where)
                for name, grad in unbend_all(visible, before, where, of_operands).items():
                    sums[name] += grad
            dscores = dscores * problem.scale
            if slope is not None:
                dscores = dscores * slope
            if hidden is not None:
                dscores = dscores.masked_fill(hidden, 0.0)
            if dq is not None:
                dq[:, :, pick] += _ungroup(_product(dscores, k_tile, hidden, signed=True), problem)
            if dk is not None:
                dk[:, :, span] += _product(dscores.transpose(-1, -2), q_tile, _transposed(hidden), signed=True)
    return {name: total.to(given[name].dtype) for name, total in sums.items()}


def _add_to(total: torch.Tensor, part: torch.Tensor, where: Where) -> None:
    """Add the gradient of a tile's scores (batch, heads, rows, keys) to that of a tensor that was broadcast to them."""
    total = total[(None,) * (4 - total.ndim)]
    if total.shape[2] > 1:
        total = total[:, :, where.rows.start : where.rows.stop]
    if total.shape[3] > 1:
        total = total[..., where.keys.start : where.keys.stop]
    total += part.sum_to_size(total.shape)


def _blocks(whole: range, size: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))


def _key_range(problem: Problem, rows: range) -> range:
    return problem.mask.keys(rows, problem.seq_q, problem.seq_kv)


def _may_be_spoiled(problem: Problem, *tensors: torch.Tensor) -> bool:
    """Whether something that the mask hides may be nan or infinite."""
    hides = not isinstance(problem.mask, Full) or any(term.hides for term in problem.scores)
    return hides and not all_finite(*tensors)


def _product(
    left: torch.Tensor, right: torch.Tensor, hidden: torch.Tensor | None, *, signed: bool = False
) -> torch.Tensor:
    """left @ right, to which what `hidden` hides in `left` adds nothing, not even as 0 * nan."""
    if hidden is None:
        return left @ right
    return isolated(torch.matmul, left, right, hidden.logical_not(), signed=signed)


def _transposed(hidden: torch.Tensor | None) -> torch.Tensor | None:
    return None if hidden is None else hidden.transpose(-1, -2)


def _products(q_tile: torch.Tensor, k_tile: torch.Tensor, problem: Problem) -> torch.Tensor:
    return (q_tile @ k_tile.transpose(-1, -2)).mul_(problem.scale)


def _tile_scores(
    products: torch.Tensor, where: Where, kind: Tile, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Masked scores of one tile, the slope of their terms, and what is hidden, broadcastable to the scores.

    No slope where no term has one, nothing hidden in a full tile.
    """
    scores, slope = bend_all(products, where)
    hidden = None
    if isinstance(problem.mask, Dense):
        tile = where.part(where.operands["bias" if problem.mask.additive else "keep"])
        hidden = tile == -torch.inf if problem.mask.additive else ~tile
        scores = scores + tile if problem.mask.additive else scores
    elif kind is Tile.PARTIAL:
        visible = problem.mask.to_bool(where.rows, where.keys, problem.seq_q, problem.seq_kv, scores.device)
        hidden = (~visible).repeat(problem.group, 1)  # the heads of a group are stacked
    seen = visible_all(where)
    if seen is not None:
        hidden = ~seen if hidden is None else hidden | ~seen
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), slope, hidden


def _group(tile: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(batch, heads_q, m, n) -> (batch, heads_kv, group * m, n): heads that share keys become one tall tile."""
    if problem.group == 1:
        return tile
    batch, _, m, n = tile.shape
    return tile.reshape(batch, problem.heads_kv, problem.group * m, n)


def _ungroup(tile: torch.Tensor, problem: Problem) -> torch.Tensor:
    if problem.group == 1:
        return tile
    batch, _, m, n = tile.shape
    return tile.reshape(batch, problem.heads_q, m // problem.group, n)
