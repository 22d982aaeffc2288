"""Jagged nested tensors under a rule of `tilewise.sdpa`: they are packed sequences, whose offsets PyTorch has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...api import attention_packed
from ...errors import InvalidInput, TilewiseError, UnsupportedProblem
from ...masks import Causal, Full, Packed
from ...plan import AUTO, plan
from ...problem import describe
from ...target import Target
from ...torch_seam.switches import autocast_inputs
from .decision import Decision, announce, caller_declines
from .report import record

if TYPE_CHECKING:
    from ...hook import Arguments
    from .decision import Decider

Tensor = torch.Tensor


class _Parts(NamedTuple):
    """The tensors (total, heads, head_dim) of a call, and the offsets of their sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int


def take(rule: Decider, arguments: Arguments) -> Tensor | None:
    """The result of a call that is taken, or None for PyTorch's function."""
    query, key, value, _, dropout_p, is_causal, scale, _ = arguments
    blocked = caller_declines(query, key, value)
    if blocked:
        record(_described(query, key), *blocked).calls += 1
        return None
    why = _not_packed(arguments)
    parts = None if why else _parts(query, key, value)
    decision = _refused(arguments, why) if parts is None else _decide(rule, parts, dropout_p, is_causal, scale)
    decision.record.calls += 1
    if decision.record.outcome == "fallback":
        try:
            announce(rule, decision)
        except UnsupportedProblem as refusal:  # PyTorch would take a NotImplementedError for its own, and go on
            raise TilewiseError(str(refusal)) from refusal
    if parts is None or decision.record.outcome != "taken":
        return None
    out = attention_packed(
        *parts, mask=_mask(is_causal), scale=scale, dropout=dropout_p, backend=rule.backend
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return _nested(out, query)


def _mask(is_causal: bool) -> Full | Causal:
    return Causal() if is_causal else Full()


def _described(query: Any, key: Any) -> str:
    return f"{str(query.dtype).removeprefix('torch.')} jagged q{tuple(query.shape)} k{tuple(key.shape)}"


def _refused(arguments: Arguments, why: str) -> Decision:
    return Decision(record(_described(arguments[0], arguments[1]), "fallback", why))


def _not_packed(arguments: Arguments) -> str:
    """Why these are no packed sequences as `attention_packed` takes them; empty if they are."""
    given: tuple[Any, ...] = arguments[:3]
    query, key, value = given
    attn_mask, is_causal, scale, enable_gqa = arguments[3], *arguments[5:]
    if any(not tensor.is_nested or tensor.layout is not torch.jagged for tensor in given):
        return "nested and other tensors together"
    if attn_mask is not None:
        return "a mask of nested tensors"
    if any(tensor.dim() != 4 or tensor._ragged_idx != 2 for tensor in given):
        return "nested tensors whose sequences are not the third of four dimensions"
    if any(tensor.lengths() is not None for tensor in given):
        return "nested tensors with holes between their sequences"
    if key.offsets() is not value.offsets() and not _alike(key, value):
        return "keys and values of different lengths"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return "different numbers of heads"
    if is_causal and query.offsets() is not key.offsets():
        return "a causal mask where queries and keys have offsets of their own"
    if scale is not None and scale == 0.0:
        return "scale 0"
    return ""


def _alike(key: Any, value: Any) -> bool:
    """PyTorch gives the same symbol to lengths that it knows to be the same."""
    return bool(key.shape[2] == value.shape[2])


def _parts(query: Any, key: Any, value: Any) -> _Parts:
    q, k, v = autocast_inputs(*(tensor.transpose(1, 2).values() for tensor in (query, key, value)))
    offsets = query.offsets().int()
    of_keys = offsets if key.offsets() is query.offsets() else key.offsets().int()
    longest = (tensor._maybe_max_seqlen or 0 for tensor in (query, key))
    return _Parts(q, k, v, offsets, of_keys, *longest)


def _decide(rule: Decider, parts: _Parts, dropout: float, is_causal: bool, scale: float | None) -> Decision:
    """Ask the rule's condition, then the planner: what no kernel of ours takes is PyTorch's, unless a backend is
    named."""
    views = (tensor.transpose(0, 1)[None] for tensor in parts[:3])
    same = parts.cu_seqlens_q is parts.cu_seqlens_k
    mask = Packed(parts.cu_seqlens_q.shape[0] - 1, parts.longest_q, parts.longest_k, _mask(is_causal), same)
    offsets = {"cu_seqlens_q": parts.cu_seqlens_q, "cu_seqlens_kv": parts.cu_seqlens_k}
    try:
        problem = describe(*views, mask=mask, scale=scale, operands=offsets, dropout=dropout).with_(layout="bshd")
    except InvalidInput as error:
        described = f"jagged q{tuple(parts.q.shape)} k{tuple(parts.k.shape)}"
        return Decision(record(described, "fallback", f"{error.argument}: {error.got}, expected {error.expected}"))
    if rule.when is not None and not rule.when(problem):
        return Decision(record(str(problem), "left", "the rule's `when` is false for it"), problem=problem)
    try:
        chosen = plan(problem, Target.of(parts.q.device), rule.backend)
    except UnsupportedProblem as refusal:
        reasons = "; ".join(f"{v.backend}: {reason}" for v in refusal.verdicts for reason in v.reasons)
        return Decision(record(str(problem), "fallback", reasons or refusal.summary), problem=problem)
    if rule.backend == AUTO and not chosen.is_ours:
        because = "no kernel of ours takes it here; PyTorch has its own for nested tensors"
        return Decision(record(str(problem), "left", because), problem=problem)
    return Decision(record(str(problem), "taken", f"{chosen.backend}: {chosen.because}"), problem=problem)


def _nested(out: Tensor, query: Any) -> Tensor:
    """(batch, heads, lengths, head_dim_v) with the lengths of the queries."""
    from torch.nested._internal.nested_tensor import (  # noqa: PLC0415  (loaded already wherever such a tensor exists)
        nested_view_from_values_offsets_lengths,
    )

    made: Any = nested_view_from_values_offsets_lengths
    longest, shortest = query._maybe_max_seqlen, query._maybe_min_seqlen
    nested: Tensor = made(out, query.offsets(), None, min_seqlen=shortest, max_seqlen=longest).transpose(1, 2)
    return nested
