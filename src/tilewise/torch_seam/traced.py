"""Calls inside torch.compile: a graph gets one operator, and planning happens when it runs, so lengths may change."""

from __future__ import annotations

import torch

from .. import masks
from ..call.request import IS_TENSOR, Lowered
from ..call.resolve import Resolved, drawn_seed
from ..errors import UnsupportedProblem
from ..masks import Mask, Packed
from ..plan import AUTO
from ..torch_kernels import candidates
from .ops import dispatched
from .switches import autocast_dtype

Tensor = torch.Tensor
TORCH_KERNELS = frozenset(candidate.name for candidate in candidates.CANDIDATES)


def attend(resolved: Resolved, results: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """Out and lse of a call in a trace, as views."""
    options = resolved.lowered()
    if resolved.options.dropout:
        if not _drops_in_terms(resolved.q, resolved.v, options):
            return _dropped_by_torch(resolved, options), None
        resolved = resolved.with_dropout_term(drawn_seed(resolved.q.device))
        options = resolved.lowered()
    q, k, v = resolved.q, resolved.k, resolved.v
    tensors = _listed(resolved)
    outputs = [operand.name for term in resolved.scores for operand in term.outputs]
    if resolved.differentiable:
        return dispatched(q, k, v, tensors, options, outputs, results)
    with torch.no_grad():
        return dispatched(q, k, v, tensors, options, outputs, results)


def _listed(resolved: Resolved) -> list[Tensor]:
    """The operands in the order of `Problem.operands`; a missing one raises here."""
    mask, operands = resolved.mask, resolved.operands
    names = [operand.name for term in resolved.scores for operand in term.tensors]
    if mask is IS_TENSOR:
        names = [next(iter(operands)), *names]
    elif isinstance(mask, Mask):
        names = [*[operand.name for operand in mask.operands], *names]
    return [operands[name] for name in names]


def _drops_in_terms(q: Tensor, v: Tensor, options: Lowered) -> bool:
    """Whether a traced call with dropout is one operator, which plans when it runs: where our kernels take it as far as
    a trace can tell, and whatever PyTorch does not compute."""
    if options.backend != AUTO:
        return options.backend not in TORCH_KERNELS
    if options.mask.startswith(Packed.kind):
        return True
    if options.scores or options.needs_lse:
        return True
    if not q.is_cuda or q.dtype == torch.float64:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and v.shape[-1] % 8 == 0 and v.shape[-1] <= 256


def _dropped_by_torch(resolved: Resolved, options: Lowered) -> Tensor:
    """By PyTorch's function: a compiled graph freezes PyTorch's own choice of kernel."""
    if options.backend != AUTO:
        raise UnsupportedProblem(
            "inside torch.compile, dropout by PyTorch's kernels goes to F.scaled_dot_product_attention, which has no "
            "choice among them.",
            remedy="leave the choice to auto, or call outside torch.compile",
        )
    q, k, v, mask = resolved.q, resolved.k, resolved.v, resolved.mask
    bias, unseen = resolved.tensor_mask, None
    if options.mask not in ("", "full", "causal"):
        rule = masks.parse(mask) if isinstance(mask, str) else mask
        assert isinstance(rule, Mask)
        bias, unseen = _visible(rule, q.shape[2], k.shape[2], q.device)
    dropout = resolved.options.dropout
    if autocast_dtype(q.device) is None:
        out = _torch_dropout(q, k, v, bias, options, dropout)
    else:
        dtype = q.dtype
        if not q.is_cuda:  # dropout is made of single operations, whose derivatives autocast casts, save float64's
            q, k, v = q.double(), k.double(), v.double()
            bias = bias.double() if bias is not None and bias.dtype != torch.bool else bias
        with torch.autocast(q.device.type, enabled=False):
            out = _torch_dropout(q, k, v, bias, options, dropout).to(dtype)
    return out if unseen is None else out.masked_fill(unseen, 0.0)


def _visible(mask: Mask, seq_q: int, seq_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A structural mask as a tensor (seq_q, seq_kv), True = visible, and the rows that see nothing, (seq_q, 1).

    As `Mask.to_bool`, for lengths that may be symbols of a trace.
    """
    mask.check(seq_q, seq_kv)
    begin, end = mask.spans(torch.arange(seq_q, device=device), seq_q, seq_kv)
    keys = torch.arange(seq_kv, device=device)
    return (keys >= begin[:, None]) & (keys < end[:, None]), (begin >= end)[:, None]


def _torch_dropout(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Lowered, dropout: float) -> Tensor:
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  (a bool, where the sizes are symbols)
    return candidates.TORCH_FUNCTION(
        q, k, v, bias, dropout, options.mask == "causal", scale=options.scale, enable_gqa=grouped
    )
