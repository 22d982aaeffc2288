"""What users call: attention, scaled_dot_product_attention, explain.

Everything here checks and routes; nothing computes. The tensor work is in the backends, the choice in the planner, and
the seam to autograd and torch.compile in op.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import masks, native, op, repeated
from .errors import InvalidInput, UnknownArgument, UnsupportedProblem
from .isolation import MIN_ROWS_OF_DOCUMENTS, check_where_asked, documents_are_sequences
from .masks import Causal, Documents, Full, KeyLengths, Mask, Packed, PrefixLM, Window
from .op import Options
from .operands import CHECK, NO_OPERANDS, Operands, address
from .plan import AUTO, BACKENDS, Plan, check_backend, plan
from .problem import (
    Layout,
    Precision,
    Problem,
    as_laid_out,
    as_number,
    check_layout,
    check_mask_type,
    check_tensors,
    check_terms,
    describe,
    heads_first,
    in_front_of_outputs,
    mask_operands,
    memory_order,
    shown,
    with_mask_terms,
    with_max_logit,
    with_named_terms,
    with_packed_documents,
)
from .scores import Term, softcapped, text_of
from .target import Target
from .terms import Alibi, Dropout, RelativeBias
from .torch_kernels import candidates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Tensor = torch.Tensor
MaskLike = Mask | str | Tensor | None

_log = logging.getLogger("tilewise")


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike = None, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None, keep: Tensor | None = None, sink: Tensor | None = None,
    scores: tuple[Term, ...] = (), operands: Mapping[str, Tensor] | None = None, dropout: float = 0.0,
    layout: Layout = "bhsd", return_lse: Literal[False] = False, return_max_logit: Literal[False] = False,
    backend: str = AUTO, precision: Precision = "exact",
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike = None, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None, keep: Tensor | None = None, sink: Tensor | None = None,
    scores: tuple[Term, ...] = (), operands: Mapping[str, Tensor] | None = None, dropout: float = 0.0,
    layout: Layout = "bhsd", return_lse: Literal[True], return_max_logit: Literal[False] = False, backend: str = AUTO,
    precision: Precision = "exact",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike = None, scale: float | None = None, softcap: float = 0.0,
    alibi: Tensor | None = None, keep: Tensor | None = None, sink: Tensor | None = None,
    scores: tuple[Term, ...] = (), operands: Mapping[str, Tensor] | None = None, dropout: float = 0.0,
    layout: Layout = "bhsd", return_lse: bool = False, return_max_logit: Literal[True], backend: str = AUTO,
    precision: Precision = "exact",
) -> tuple[Tensor, ...]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
    scores: tuple[Term, ...] = (),
    operands: Mapping[str, Tensor] | None = None,
    dropout: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    return_max_logit: bool = False,
    backend: str = AUTO,
    precision: Precision = "exact",
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention: softmax(mask(scores(softcap(scale * q k^T)))) v.

    q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (batch, heads_kv, seq_kv, head_dim_v);
    with layout="bshd" the heads and seq dimensions are exchanged. heads_kv may divide heads_q (grouped queries).

    mask     None, "causal", a tilewise mask (Causal, Window, Documents, PrefixLM, KeyLengths) or its text form, or a
             tensor that broadcasts to (batch, heads_q, seq_q, seq_kv): boolean (True = visible) or additive in q's
             dtype. An additive one that requires grad is differentiated.
    scale    1 / sqrt(head_dim) if None.
    softcap  scores become softcap * tanh(score / softcap) before the mask; 0 = off.
    alibi    slopes (heads_q) or (batch, heads_q): slope * |row + seq_kv - seq_q - key| is taken from every score.
    keep     a boolean tensor that broadcasts to (batch, heads_q, seq_q, seq_kv), as padding does from (batch, 1, 1,
             seq_kv): False hides, beside what the mask hides. Beside a mask that is a boolean tensor, every call makes
             one tensor of the two.
    sink     logits (heads_q) that join the sum of every row of their head, as one more key without a value.
             Slopes and sinks that require grad are differentiated.
    scores   what else is done to scores before the mask: terms of tilewise.scores and tilewise.terms, in this order,
             after the softcap and before those above.
    operands the tensors that these terms read, by the names they give them; differentiated where a term allows it.
    dropout  probability, applied whenever it is not 0, like F.scaled_dot_product_attention. PyTorch's backends draw it
             their way; all of ours drop the same weights for the same seed, which PyTorch's generator gives.
    backend  "auto", or a name from `tilewise.explain`; a named backend runs or raises, it never falls back.
    precision  for float32: "exact", the error of float32 arithmetic; or "tf32", which lets a kernel round the operands
             of its products to 11 bits (relative error about 4e-4) where that is faster.

    Returns out shaped like q with head_dim_v, in q's dtype and memory order; with return_lse=True also the natural-log
    sum of exp of each row's scores, (batch, heads_q, seq_q) in float32 (in float64 for float64), differentiable. A row
    that sees no key gives out = 0 and lse = -inf, and its gradients are 0. With return_max_logit=True the last result
    is the largest score of each head, (heads_q) like lse, of all terms and of visible pairs; it has no gradient.
    """
    if unknown:
        raise _unknown("attention", next(iter(unknown)))
    arguments = (
        mask, scale, softcap, alibi, keep, sink, scores, operands, dropout, layout, return_lse, return_max_logit,
        backend, precision,
    )  # fmt: skip
    if not torch.compiler.is_compiling() and (attend := native.attend) is not None:
        known: Tensor | tuple[Tensor, ...] | None = attend(q, k, v, *arguments)
        if known is not None:
            return known
    if layout == "bshd":  # all that follows sees (batch, heads, seq, head_dim) views
        q, k, v = heads_first(q, k, v, layout)
    out, lse, results = _of_views(q, k, v, *arguments)
    if layout == "bshd":
        out = as_laid_out(out, layout)
    if not return_lse and results is None:
        return out
    found = () if results is None else (results["max_logit"],)
    if not return_lse:
        return out, *found
    assert lse is not None, "a backend without lse took a problem that needs one"
    return out, lse, *found


def _of_views(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    scale: float | None,
    softcap: float,
    alibi: Tensor | None,
    keep: Tensor | None,
    sink: Tensor | None,
    scores: tuple[Term, ...],
    operands: Mapping[str, Tensor] | None,
    dropout: float,
    layout: Layout,
    return_lse: bool,
    return_max_logit: bool,
    backend: str,
    precision: Precision,
    *,
    turned: bool = False,
) -> tuple[Tensor, Tensor | None, Results]:
    """`attention` of (batch, heads, seq, head_dim) views: out as one in the memory order of the layout, lse, and what
    terms report. `turned`: for `attention_turned`."""
    if keep is not None:
        mask, keep = _in_one(mask, keep)
    given = mask, scale, softcap, scores, dropout, layout, return_lse, backend, precision
    padded = (
        not torch.compiler.is_compiling()  # first: a trace does not know what `not` a tuple is
        and keep is not None
        and alibi is None
        and sink is None
        and operands is None
        and not (scores or dropout or return_max_logit)
        and _is_value(mask)
    )
    if padded and (call := repeated.recall_kept(q, k, v, keep, given)) is not None:  # type: ignore[arg-type]
        if call.plan is not None:
            repeated.learn(call, q, k, v, given, turned=turned, keep=keep)
        return *op.execute(call, q, k, v, {"keep": keep}), None  # type: ignore[dict-item]
    if type(mask) in _MAY_HOLD_TENSORS and mask.holds_tensors:  # type: ignore[union-attr]
        named = {"alibi": alibi, "keep": keep, "sink": sink}
        mask, scores, operands = _without_tensors(q, k, mask, scores, operands, named, dropout)  # type: ignore[arg-type]
    elif alibi is not None or keep is not None or sink is not None:
        scores, operands = with_named_terms(q, k, scores, operands, alibi=alibi, keep=keep, sink=sink)
    results: Results = None
    if scores or return_max_logit:
        scores = with_max_logit(scores, return_max_logit)
        results = {} if return_max_logit else None
        if return_max_logit:
            op.refuse_jit_trace("attention: return_max_logit")
    arguments = mask, scale, softcap, scores, dropout, layout, return_lse, backend, precision
    attend = _traced if torch.compiler.is_compiling() else _attend
    out, lse = attend(q, k, v, operands, arguments, results)
    if padded and (call := op.recall(q, k, v, operands or NO_OPERANDS, arguments)) is not None:
        repeated.remember_kept(call, q, k, v, keep, given)  # type: ignore[arg-type]
    return out, lse, results


def attention_turned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
    scores: tuple[Term, ...] = (),
    operands: Mapping[str, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attention` of q, k and v (batch, heads, seq, head_dim) with out (batch, seq, heads, head_dim), contiguous,
    whatever the memory order of q: it is written so, and not copied."""
    terms = sink is not None or operands is not None or scores
    if not torch.compiler.is_compiling() and not (terms or dropout):  # in this order, as in `_of_views`
        known = _turned_before(q, k, v, mask, scale, softcap, keep)
        if known is not None:
            return known
    rest: Any = scores, operands, dropout, "bshd", False, False, AUTO, "exact"
    out, _, _ = _of_views(q, k, v, mask, scale, softcap, None, keep, sink, *rest, turned=True)
    return as_laid_out(out, "bshd")


def _turned_before(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, scale: float | None, softcap: float, keep: Tensor | None
) -> Tensor | None:
    """`attention_turned` of a call that native code knows, or without `keep` comes to know now.

    What is known has no view between the kernel and what comes next, forward or backward.
    """
    if (attend := native.attend) is None:
        return None
    known: Tensor | None = attend(
        q, k, v, mask, scale, softcap, None, keep, None, (), None, 0.0, repeated.TURNED_LAYOUT, False, False, AUTO,
        "exact",
    )  # fmt: skip
    if known is not None or keep is not None or type(mask) not in _HASHABLE_MASKS:
        return known
    arguments = mask, scale, softcap, (), 0.0, "bshd", False, AUTO, "exact"
    call = op.recall_alike(q, k, v, arguments)
    if call is None or call.plan is None:
        return None
    repeated.learn(call, q, k, v, arguments, turned=True)
    return op.execute_alike(call, q, k, v)[0].transpose(1, 2)


def warm_up(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
    """Do now what the first call of `attention` with such tensors and arguments does beside its work: plan, build the
    kernels of both directions side by side, load them, and let native code know the call. Returns the plan.

    The tensors are looked at for their shapes, strides, dtype, device and for what requires grad; none is read or
    changed, and PyTorch's generators stay as they are. Before a CUDA graph is captured, this is what it needs.
    """
    chosen = explain(q, k, v, **arguments)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidInput("warm_up", "a call under capture of a CUDA graph", "one before it", "call it earlier")
    devices = [q.device.index or 0] if q.is_cuda else []
    with torch.random.fork_rng(devices):
        for _ in range(_TIMES_UNTIL_KNOWN):
            like = [_zeros_like(tensor) for tensor in (q, k, v)]
            out = attention(*like, **arguments)
            first = out[0] if isinstance(out, tuple) else out
            if learning := [tensor for tensor in like if tensor.requires_grad]:
                torch.autograd.grad(first, learning, torch.zeros_like(first))
    return chosen


_TIMES_UNTIL_KNOWN = 4  # planned, described to native code, and answered by it; then its backward is known


def _zeros_like(tensor: Tensor) -> Tensor:
    """Zeros with the shape, the strides and the alignment of a tensor, in memory of their own."""
    begin = address(tensor) % 16 // tensor.element_size()
    last = (
        sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else -1
    )
    memory = torch.zeros(begin + last + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), begin).requires_grad_(tensor.requires_grad)


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    scores: tuple[Term, ...] = (),
    operands: Mapping[str, Tensor] | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    backend: str = AUTO,
    precision: Precision = "exact",
) -> Tensor | tuple[Tensor, ...]:
    """`attention` of sequences that stand behind one another, each among itself.

    q (total_q, heads_q, head_dim), k (total_k, heads_kv, head_dim), v (total_k, heads_kv, head_dim_v). Sequence n has
    the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] of q and out, and likewise cu_seqlens_k of k and v: int32 offsets
    (sequences + 1,) on the device of q, from 0 and never falling. They stay there: no call waits for them, a captured
    CUDA graph runs with whatever they hold then, and one compiled graph serves all. Rows behind the last offset see no
    key, and keys behind it are seen by none: out is 0 there, and so are gradients.

    max_seqlen_q, max_seqlen_k   no sequence is longer: a hint by which tiles are chosen, 0 = unknown.
    mask     None, "causal", Causal or Window, aligned in each sequence by itself.
    alibi    slopes (heads_q) or (sequences, heads_q): as of `attention`, by the lengths of each sequence.
    seqused_k  int32 (sequences,) on the device: of the keys of each sequence only so many are there, and masks are
               aligned to these. The others are not looked at, and have no gradient.
    leftpad_k  int32 (sequences,) on the device: the first so many keys of each sequence are padding, and count among
               those that are used. They are not looked at either.

    All else is as `attention` has it; terms that read a tensor of rows or keys are not for packed sequences. Returns
    out (total_q, heads_q, head_dim_v); with return_lse=True also lse (heads_q, total_q).

    Offsets on a CPU are checked in every call. On a GPU they are not read, unless TILEWISE_CHECK=1 is set in the
    environment: then a call waits for the device and raises for offsets that are none, inside a compiled graph too.
    Without it, wrong offsets give wrong results, but nothing outside the tensors is read or written.
    """
    if _packed_observers and not torch.compiler.is_compiling():
        for observer in _packed_observers:
            observer(q, k, v, cu_seqlens_q, cu_seqlens_k, mask)
    told: _Arguments | None = None  # by which a call like this one is remembered, where it has no terms
    whole = seqused_k is None and leftpad_k is None
    plain = alibi is None and sink is None and whole and operands is None and not return_max_logit
    if plain and not scores and not dropout and not torch.compiler.is_compiling():
        if (attend := native.attend_packed) is not None:  # which answers nothing while offsets are to be checked
            known: Tensor | tuple[Tensor, ...] | None = attend(
                q, k, v, cu_seqlens_q, cu_seqlens_k, mask, scale, softcap, max_seqlen_q, max_seqlen_k, repeated.PACKED,
                return_lse, backend, precision,
            )  # fmt: skip
            if known is not None:
                return known
        told = (max_seqlen_q, max_seqlen_k, mask, scale, softcap, return_lse, backend, precision)
    op.refuse_jit_trace("attention_packed")
    if told is not None and CHECK not in os.environ:
        call = op.recall_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, told)
        if call is not None:
            if call.plan is not None:
                repeated.learn_packed(call, q, k, v, (cu_seqlens_q, cu_seqlens_k), told)
            out, lse = op.execute_packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k)
            out = out.squeeze(0).transpose(0, 1)
            return (out, lse.squeeze(0)) if return_lse and lse is not None else out
    given_inputs = q, k, v
    _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    same = cu_seqlens_q is cu_seqlens_k
    fewer = seqused_k is not None, leftpad_k is not None
    packed = _packed_mask(cu_seqlens_q, max_seqlen_q, max_seqlen_k, mask, same, *fewer)
    given: Operands = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k}
    if seqused_k is not None:
        given = {**given, "seqused_k": seqused_k}
    if leftpad_k is not None:
        given = {**given, "leftpad_k": leftpad_k}
    q, k, v = q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    if not torch.compiler.is_compiling():  # the operator of a graph checks when it runs
        check_where_asked(q, k, given)
    if alibi is not None or sink is not None or operands is not None:
        scores, others = with_named_terms(q, k, scores, operands, alibi=alibi, sink=sink)
        given = {**given, **others}
    results: Results = None
    if scores or return_max_logit:
        _check_packed_terms(q, scores, given, same and whole)
        scores = with_max_logit(scores, return_max_logit)
        results = {} if return_max_logit else None
    arguments = (packed, scale, softcap, scores, dropout, "bshd", return_lse, backend, precision)
    attend_now = _traced if torch.compiler.is_compiling() else _attend
    out, lse = attend_now(q, k, v, given, arguments, results)
    if told is not None:
        found = op.recall(q, k, v, given, arguments)
        if found is not None:
            op.remember_packed(found, *given_inputs, cu_seqlens_q, cu_seqlens_k, told)
    out = out.squeeze(0).transpose(0, 1)
    if not return_lse and results is None:
        return out
    reported = () if results is None else (results["max_logit"],)
    if not return_lse:
        return out, *reported
    assert lse is not None, "a backend without lse took a problem that needs one"
    return out, lse.squeeze(0), *reported


PackedObserver = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, MaskLike], None]
"""Of the tensors of a packed call, its offsets and its mask."""
_packed_observers: tuple[PackedObserver, ...] = ()
_observing = threading.Lock()


@contextlib.contextmanager
def observed_packed(observer: PackedObserver) -> Iterator[None]:
    """Inside, `observer` is told of every call of `attention_packed`, of all threads, before it runs."""
    global _packed_observers
    with _observing:
        _packed_observers = (*_packed_observers, observer)
    try:
        yield
    finally:
        with _observing:
            _packed_observers = tuple(one for one in _packed_observers if one != observer)


# What the longest sequence is rounded up to: a plan, or a compiled graph, serves all of a class.
_LONGEST = tuple(1 << power for power in range(6, 21))


def _packed_mask(
    offsets: Tensor, max_q: int, max_kv: int, mask: MaskLike, same: bool, used: bool, padded: bool
) -> Packed:
    if torch.compiler.is_compiling():  # where the number of sequences may be a symbol: the operator asks when it runs
        return Packed(0, rounded_length(max_q), rounded_length(max_kv), inner_rule(mask), same, used, padded)
    try:
        return _made_mask(offsets.shape[0] - 1, rounded_length(max_q), rounded_length(max_kv), mask, same, used, padded)
    except TypeError:  # a mask that cannot be hashed, or a length that is no number
        for name, length in (("max_seqlen_q", max_q), ("max_seqlen_k", max_kv)):
            as_number(name, length)
        inner_rule(mask)
        raise


@functools.lru_cache(maxsize=1024)
def _made_mask(sequences: int, max_q: int, max_kv: int, mask: MaskLike, same: bool, used: bool, padded: bool) -> Packed:
    return Packed(sequences, max_q, max_kv, inner_rule(mask), same, used, padded)


def rounded_length(length: int) -> int:
    """A few classes of lengths; comparisons, which a trace may answer for a whole class; 0 = any."""
    if length <= 0:
        return 0
    for bound in _LONGEST:
        if length <= bound:
            return bound
    return 0


def inner_rule(mask: MaskLike) -> Full | Causal | Window:
    rule = masks.parse(mask) if isinstance(mask, str) else _FULL if mask is None else mask
    if isinstance(rule, Full | Causal | Window):
        return rule
    raise InvalidInput(
        "mask",
        shown(mask),
        "None, 'causal', Full, Causal or Window, which holds in each sequence by itself",
        "use tilewise.attention with a Documents mask for others",
    )


def _check_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor.is_nested:
            raise InvalidInput(name, "a nested tensor", "a strided tensor", "pass its values and its offsets")
    for name in ("q", "k", "v"):
        if tensors[name].ndim != 3:
            shape = tuple(tensors[name].shape)
            raise InvalidInput(name, f"shape {shape}", "3 dimensions (total, heads, head_dim)", "reshape it")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if tensors[name].ndim != 1 or tensors[name].dtype != torch.int32:
            raise InvalidInput(
                name,
                f"a tensor of shape {tuple(tensors[name].shape)} in {tensors[name].dtype}",
                "int32 offsets (sequences + 1,)",
                "pass the cumulative lengths of the sequences, from 0 to the total",
            )


def _check_packed_terms(q: Tensor, scores: tuple[Term, ...], operands: Operands, same: bool) -> None:
    by_spans = q.is_cuda and (q.dtype.itemsize > 2 or any(tensor.requires_grad for tensor in operands.values()))
    for term in check_terms(scores):
        for operand in term.tensors:
            if any(dim in ("row", "key") for dim in operand.dims):
                raise InvalidInput(
                    "scores",
                    f"{term}, which reads {operand.name}, a tensor of {', '.join(operand.dims)}",
                    "terms that read nothing per row or key",
                    "use tilewise.attention with a Documents mask, where rows and keys are those of the tensors",
                )
        apart = not same or (isinstance(term, Alibi) and term.batched)
        if by_spans and apart and isinstance(term, Alibi | RelativeBias):
            raise UnsupportedProblem(
                f"attention_packed: {term} counts distances in each sequence; float32 kernels, and those that learn "
                "operands, know them only where queries and keys have the same offsets, and one slope per head.",
                remedy="use 16 bits and detach the operands, or pass one tensor as cu_seqlens_q and cu_seqlens_k",
            )


def _without_tensors(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scores: tuple[Term, ...],
    operands: Mapping[str, Tensor] | None,
    named: dict[str, Any],
    dropout: float,
) -> tuple[Mask, tuple[Term, ...], Operands]:
    """A mask that holds tensors as one that does not, with the terms and operands of the call, the named ones too.

    Documents are packed sequences where our kernels take them as such, else the spans of keys that their rows see.
    """
    check_tensors(q, k, k)
    if isinstance(mask, Documents) and q.is_cuda and not dropout:
        all_terms, all_operands = with_named_terms(q, k, scores, operands, **named)
        learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in all_operands.values())
        same = mask.cu_seqlens_q is mask.cu_seqlens_kv
        # A trace must not ask how many there are: that would bind it to their number.
        few = torch.compiler.is_compiling() or q.shape[2] >= MIN_ROWS_OF_DOCUMENTS * (len(mask.cu_seqlens_q) - 1)
        if few and not learned and documents_are_sequences(all_terms, q.dtype, same):
            packed, all_operands = with_packed_documents(q, mask, all_operands)
            if not torch.compiler.is_compiling():
                check_where_asked(q, k, all_operands)
            return packed, all_terms, all_operands
    mask, scores, operands = with_mask_terms(q, k, mask, scores, operands)
    if any(tensor is not None for tensor in named.values()):
        scores, operands = with_named_terms(q, k, scores, operands, **named)
    return mask, scores, operands or NO_OPERANDS


# What `attention` was given beside tensors: mask, scale, softcap, scores, dropout, layout, return_lse, backend and
# precision. A bare tuple: it is part of the key of every call.
_Arguments = tuple[Any, ...]
Results = dict[str, Tensor] | None
"""What terms report, by name; None where none does."""


def _attend(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands | None, arguments: _Arguments, results: Results = None
) -> tuple[Tensor, Tensor | None]:
    """Attention of bhsd views outside torch.compile, by whichever way PyTorch's state asks for."""
    mask, dropout = arguments[0], arguments[4]
    plain = operands is None and results is None and not dropout and type(mask) in _HASHABLE_MASKS
    if plain and (call := op.recall_alike(q, k, v, arguments)) is not None:
        if call.plan is not None and native.ready() is not None:
            repeated.learn(call, q, k, v, arguments)
        return op.execute_alike(call, q, k, v)
    given: Operands = NO_OPERANDS
    key: _Arguments | None = arguments  # what a call like this one is remembered by; None = not at all
    if type(mask) not in _HASHABLE_MASKS:
        check_mask_type(mask)
        given = mask_operands(mask)
        key = (_TENSOR, *arguments[1:]) if given else None
    if operands is not None:
        given = {**given, **_in_order(operands, mask, arguments[3])}
    if key is not None:
        call = op.recall(q, k, v, given, key)
        if call is not None:
            if call.plan is not None and not given and not dropout and results is None:
                repeated.learn(call, q, k, v, arguments)
            if plain:
                op.remember_alike(call, q, k, v, arguments)
            given = {**given, "seed": drawn_seed(q.device)} if dropout else given
            return op.execute(call, q, k, v, given, results)
    known = given  # what a seed is drawn beside
    if dropout:
        if op.is_jit_traced() is not None:
            return _traced(q, k, v, operands, arguments, results)
        if _planned(q, k, v, given, arguments)[1].backend in _TORCH_KERNELS:
            return _outside_op(q, k, v, given, arguments, results)
        arguments, given = _with_dropout_term(arguments), {**given, "seed": drawn_seed(q.device)}
    if _is_transformed(q, k, v, *given.values()):
        return _outside_op(q, k, v, given, arguments, results)
    options = _options(q, arguments)
    if not op.is_plain(q, k, v):
        return op.run(q, k, v, given, options, results)
    call = op.prepare(q, k, v, given, options, op.needed_grads(q, k, v, given))
    if key is not None:
        op.remember(call, q, k, v, known, key)
    return op.execute(call, q, k, v, given, results)


_TORCH_KERNELS = frozenset(candidate.name for candidate in candidates.CANDIDATES)


def drawn_seed(device: torch.device) -> Tensor:
    """The operand of a Dropout term, from PyTorch's generator of the device.

    An operation of PyTorch's like any other: it obeys torch.manual_seed, a checkpoint draws it again, and a CUDA graph
    draws a new one each time it runs.
    """
    return torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)


def _with_dropout_term(arguments: _Arguments) -> _Arguments:
    """The same arguments with the dropout as a term of the scores."""
    scores, dropout = arguments[3:5]
    terms = in_front_of_outputs(check_terms(scores), Dropout(as_number("dropout", dropout)))
    return *arguments[:3], terms, 0.0, *arguments[5:]


# Masks that are values. In the place of a tensor, which is an operand, a key has _TENSOR.
_HASHABLE_MASKS = frozenset((type(None), str, Full, Causal, Window, Documents, PrefixLM, Packed))
_MAY_HOLD_TENSORS = frozenset((Documents, PrefixLM, KeyLengths))
_TENSOR = object()


def _in_one(mask: MaskLike, keep: Tensor) -> tuple[MaskLike, Tensor]:
    """The two as they are or, where both are boolean tensors, what they leave visible together as `keep` alone."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or getattr(keep, "dtype", None) != torch.bool:
        return mask, keep
    try:
        return None, mask & keep
    except (RuntimeError, TypeError):  # of another device, or of shapes that do not fit one another
        shown = f"{tuple(getattr(keep, 'shape', ()))} on {getattr(keep, 'device', 'no device')}"
        expected = f"a boolean tensor that fits the mask's {tuple(mask.shape)} on {mask.device}"
        raise InvalidInput("keep", shown, expected, "pass one of the two, or both in shapes that broadcast") from None


def _is_value(mask: MaskLike) -> bool:
    """Whether a key may hold the mask, and a call reads no tensor of it."""
    kind = type(mask)
    return kind in _HASHABLE_MASKS and not (kind in _MAY_HOLD_TENSORS and mask.holds_tensors)  # type: ignore[union-attr]


def _in_order(operands: object, mask: MaskLike, scores: tuple[Term, ...]) -> Operands:
    """The operands in the order of the mask and the terms that read them, which is that of `Problem.operands`."""
    if isinstance(operands, dict) and all(isinstance(name, str) for name in operands):
        for name, tensor in operands.items():
            if not isinstance(tensor, Tensor):
                remedy = "convert it with torch.as_tensor"
                raise InvalidInput(f"operands[{name!r}]", shown(tensor), "a torch.Tensor", remedy)
        names = [operand.name for term in check_terms(scores) for operand in term.tensors]
        if type(mask) is Packed:
            names = [*(operand.name for operand in mask.operands), *names]
        known = {name: operands[name] for name in names if name in operands}
        return known if len(known) == len(operands) else operands  # `describe` says what is wrong
    raise InvalidInput(
        "operands", shown(operands), "a dictionary of tensors by name", "write operands={'name': tensor}"
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: its signature and semantics, through the planner.

    What only PyTorch's own function defines (broadcast batches, more than 4 dimensions, nested tensors), and masks that
    require grad where no kernel of ours makes their gradient, are handed to it, and the logger "tilewise" says so
    outside of torch.compile. In these calls alone `torch.nn.attention.sdpa_kernel` chooses among PyTorch's kernels;
    `tilewise.sdpa` obeys it in every call.
    """
    _check_types(query, key, value, attn_mask, is_causal)
    scale, dropout_p = _number("scale", scale), _number("dropout_p", dropout_p) or 0.0
    query, key, value = autocast_inputs(query, key, value)
    if type(attn_mask) is Tensor:
        (attn_mask,) = autocast_inputs(attn_mask)
    why = only_torch_defines(query, key, value, attn_mask, scale, enable_gqa) or (
        "a dropout of 1" if dropout_p == 1.0 else ""
    )
    if not why and not is_causal and attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        why = _torch_differentiates(query, key, value, attn_mask, scale, dropout_p)
    if why:
        if not torch.compiler.is_compiling():  # a trace knows no loggers
            _log.info("scaled_dot_product_attention: %s; handed to PyTorch", why)
        return candidates.TORCH_FUNCTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and is_causal:
        raise InvalidInput(
            "attn_mask", "a mask together with is_causal=True", "one of the two", "fold the causal rule into the mask"
        )
    attn_mask = without_repeats(attn_mask)
    if query.ndim == 3:  # (batch, seq, dim): the batch takes the place of the heads, which a mask (batch, L, S) fits
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        return attention(query, key, value, mask=torch_mask(attn_mask, is_causal), scale=scale, dropout=dropout_p)[0]
    return attention(query, key, value, mask=torch_mask(attn_mask, is_causal), scale=scale, dropout=dropout_p)


def _torch_differentiates(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None, dropout: float
) -> str:
    """Why PyTorch is to make the gradient of a mask; empty where one of our kernels makes it."""
    if query.ndim == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    problem = describe(query, key, value, mask=torch_mask(attn_mask, False), scale=scale, dropout=dropout)
    return left_to_torch(plan(problem, Target.of(query.device)))


def left_to_torch(chosen: Plan) -> str:
    """Why a call that the planner gives to no kernel of ours is PyTorch's, whose function has fused kernels for it."""
    if not chosen.problem.operand_grads or chosen.is_ours:
        return ""
    return "a mask that requires grad, and no kernel of ours takes the problem"


def _check_types(query: object, key: object, value: object, attn_mask: object, is_causal: object) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise InvalidInput(
            "attn_mask",
            shown(attn_mask),
            "a torch.Tensor or None",
            "pass is_causal=True for a causal mask; tilewise.attention takes masks by name",
        )
    if not isinstance(is_causal, bool):
        raise InvalidInput("is_causal", repr(is_causal), "True or False", "pass a mask as attn_mask")


def _number(name: str, value: Any) -> float | None:
    """A number as F.scaled_dot_product_attention takes it: also a tensor with one element, a NumPy scalar or a bool."""
    if value is None or type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(name, shown(value), "a number", f"leave {name} out for the default") from None


def explain(
    problem: Problem | Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    target: Target | str | torch.device | None = None,
    backend: str = AUTO,
    **arguments: Any,
) -> Plan:
    """The plan for a Problem, or for tensors with the arguments `attention` takes: print it to see every verdict.

    `target` is a device, a Target, or a name such as "h200"; by default the tensors' own device (a CUDA device if there
    is one, for a Problem). Nothing runs, and no GPU is needed for a named target.
    """
    if isinstance(problem, Problem):
        if k is not None or v is not None or arguments:
            raise InvalidInput(
                "explain",
                "a Problem together with tensors or attention arguments",
                "either a Problem or q, k, v",
                "put the arguments into the Problem",
            )
        return plan(problem, resolve_target(target, "cuda" if torch.cuda.is_available() else "cpu"), backend)
    if k is None or v is None:
        raise InvalidInput("explain", "q alone", "a Problem, or q, k and v", "pass all three tensors")
    return_lse, return_max_logit = (arguments.pop(name, False) for name in ("return_lse", "return_max_logit"))
    for name in arguments:
        if name not in _ARGUMENTS:
            raise _unknown("explain", name)
    layout = arguments.get("layout", "bhsd")
    if arguments.get("keep") is not None:
        arguments["mask"], arguments["keep"] = _in_one(arguments.get("mask"), arguments["keep"])
    named = {name: tensor for name in ("alibi", "keep", "sink") if (tensor := arguments.pop(name, None)) is not None}
    mask = arguments.get("mask")
    if named or (isinstance(mask, Mask) and mask.holds_tensors):
        check_layout(layout)
        check_tensors(problem, k, v)
        seen_q, seen_k, _ = heads_first(problem, k, v, layout)
        terms, operands = arguments.get("scores", ()), arguments.get("operands")
        if isinstance(mask, Mask) and mask.holds_tensors:
            found = _without_tensors(seen_q, seen_k, mask, terms, operands, named, arguments.get("dropout", 0.0))
            arguments["mask"], arguments["scores"], arguments["operands"] = found
        else:
            arguments["scores"], arguments["operands"] = with_named_terms(seen_q, seen_k, terms, operands, **named)
    arguments["scores"] = with_max_logit(arguments.get("scores", ()), return_max_logit)
    described = describe(problem, k, v, needs_lse=return_lse, **arguments)
    tensors = {**mask_operands(arguments.get("mask")), **(arguments.get("operands") or {})}
    described = described.with_(transformed=_is_transformed(problem, k, v, *tensors.values()))
    return plan(described, resolve_target(target, problem.device), backend)


def resolve_target(target: Target | str | torch.device | None, default: torch.device | str = "cpu") -> Target:
    """A Target from whatever names one: itself, a device, a name of the table, or nothing."""
    if isinstance(target, Target):
        return target
    if target is None:
        return Target.of(default)
    if isinstance(target, torch.device) or target.split(":")[0] == "cuda":
        return Target.of(target)
    return Target.named(target)


_ARGUMENTS = (
    "mask",
    "scale",
    "softcap",
    "alibi",
    "keep",
    "sink",
    "scores",
    "operands",
    "dropout",
    "layout",
    "precision",
)  # of `attention` that make a Problem

_INSTEAD = {
    "is_causal": 'pass mask="causal"',
    "causal": 'pass mask="causal"',
    "attn_mask": "pass it as mask",
    "dropout_p": "pass it as dropout",
    "enable_gqa": "leave it out: key/value heads may always divide the query heads",
    "window_size": "pass mask=tilewise.Window(left, right)",
    "softmax_scale": "pass it as scale",
    "alibi_slopes": "pass it as alibi",
    "s_aux": "pass it as sink",
    "deterministic": "call torch.use_deterministic_algorithms(True)",
}


def _unknown(function: str, name: str) -> UnknownArgument:
    known = ", ".join((*_ARGUMENTS, "return_lse", "return_max_logit", "backend"))
    return UnknownArgument(name, "an unknown keyword", f"{function}'s: {known}", _INSTEAD.get(name, "leave it out"))


def _options(q: Tensor, arguments: _Arguments) -> Options:
    """The options of a call of bhsd views as the operators take them."""
    mask, scale, softcap, scores, _, layout, return_lse, backend, precision = arguments
    check_layout(layout)
    check_backend(backend)
    check_mask_type(mask)
    text = "full" if mask is None else "" if isinstance(mask, Tensor) else str(mask)
    terms = _scores_text(softcap, scores) if softcap != 0 or scores else ""
    return Options(text, scale, terms, memory_order(q, layout), backend, return_lse, precision)


def _scores_text(softcap: float, scores: tuple[Term, ...]) -> str:
    return text_of((*softcapped(as_number("softcap", softcap)), *check_terms(scores)))


def _traced(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands | None, arguments: _Arguments, results: Results
) -> tuple[Tensor, Tensor | None]:
    """Inside torch.compile: the graph gets one op, and planning happens when it runs, so lengths may change freely."""
    mask, dropout = arguments[0], arguments[4]
    options = _options(q, arguments)
    if dropout:
        if not _drops_in_terms(q, v, options):
            return _traced_dropout(q, k, v, mask, options, dropout), None
        arguments, operands = _with_dropout_term(arguments), {**(operands or {}), "seed": drawn_seed(q.device)}
        options = _options(q, arguments)
    tensors = [mask] if isinstance(mask, Tensor) else []
    if operands is not None:
        if type(mask) is Packed:
            tensors += [operands[operand.name] for operand in mask.operands]
        tensors += [operands[operand.name] for term in arguments[3] for operand in term.tensors]
    outputs = [operand.name for term in arguments[3] for operand in term.outputs]
    return op.dispatched(q, k, v, tensors, options, outputs, results)


def _drops_in_terms(q: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a traced call with dropout is one operator, which plans when it runs: where our kernels take it as far as
    a trace can tell, and whatever PyTorch does not compute."""
    if options.backend != AUTO:
        return options.backend not in _TORCH_KERNELS
    if options.mask.startswith(Packed.kind):
        return True
    if options.scores or options.needs_lse:
        return True
    if not q.is_cuda or q.dtype == torch.float64:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and v.shape[-1] % 8 == 0 and v.shape[-1] <= 256


def _traced_dropout(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, options: Options, dropout: float) -> Tensor:
    """By PyTorch's function: a compiled graph freezes PyTorch's own choice of kernel."""
    if options.backend != AUTO:
        raise UnsupportedProblem(
            "inside torch.compile, dropout by PyTorch's kernels goes to F.scaled_dot_product_attention, which has no "
            "choice among them.",
            remedy="leave the choice to auto, or call outside torch.compile",
        )
    bias, unseen = mask if isinstance(mask, Tensor) else None, None
    if options.mask not in ("", "full", "causal"):
        rule = masks.parse(mask) if isinstance(mask, str) else mask
        assert isinstance(rule, Mask)
        bias, unseen = _visible(rule, q.shape[2], k.shape[2], q.device)
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


def _torch_dropout(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options, dropout: float) -> Tensor:
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  (a bool, where the sizes are symbols)
    return candidates.TORCH_FUNCTION(
        q, k, v, bias, dropout, options.mask == "causal", scale=options.scale, enable_gqa=grouped
    )


def _outside_op(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, arguments: _Arguments, results: Results
) -> tuple[Tensor, Tensor | None]:
    """Calls our op must not see: transforms and forward AD need composite code, PyTorch's dropout its own autograd."""
    problem, chosen = _planned(q, k, v, operands, arguments)
    q, k, v = op.with_memory(q), op.with_memory(k), op.with_memory(v)
    if not problem.dropout:

        def forward(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
            run: Any = BACKENDS[chosen.backend].forward
            reported = () if results is None else (results,)
            return run(q, k, v, problem, chosen.config, operands, *reported)  # type: ignore[no-any-return]

        return op.recorded(forward, q, k, v, operands)
    candidate = next(c for c in candidates.CANDIDATES if c.name == chosen.backend)

    def dropped(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
        return candidate.dropout_forward(q, k, v, problem, operands), None

    if candidate is candidates.MATH:
        return op.recorded(dropped, q, k, v, operands)
    with op.without_autocast():  # a kernel, with a derivative of its own
        return dropped(q, k, v, operands)


def _planned(q: Tensor, k: Tensor, v: Tensor, operands: Operands, arguments: _Arguments) -> tuple[Problem, Plan]:
    """The problem of a call, and the backend that computes it."""
    mask, scale, softcap, scores, dropout, layout, return_lse, backend, precision = arguments
    check_layout(layout)
    others = {name: tensor for name, tensor in operands.items() if tensor is not mask}
    problem = describe(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        softcap=softcap,
        scores=scores,
        operands=others,
        dropout=dropout,
        needs_lse=return_lse,
        precision=precision,
    ).with_(layout=memory_order(q, layout), transformed=_is_transformed(q, k, v, *operands.values()))
    return problem, plan(problem, Target.of(q.device), backend)


def _is_transformed(*tensors: Tensor) -> bool:
    """A functorch transform or forward-mode AD is at work on these tensors."""
    return torch._C._are_functorch_transforms_active() or op.has_tangent(*tensors)


_CAUSAL, _FULL = Causal(), Full()


def torch_mask(attn_mask: Tensor | None, is_causal: bool) -> MaskLike:
    if attn_mask is None:
        return _CAUSAL if is_causal else _FULL
    lower_right = _causal_bias_variant(attn_mask)
    if lower_right is None:
        return attn_mask
    return Causal("bottom-right" if lower_right else "top-left")


def without_repeats(attn_mask: Tensor | None) -> Tensor | None:
    """A mask with a size of 1 along the dimensions in which it is expanded: kernels read what is there once.

    One that requires grad stays as it is: all of it has a gradient. So does a trace's, whose strides are guesses.
    """
    if attn_mask is None or type(attn_mask) is not Tensor or attn_mask.requires_grad or torch.compiler.is_compiling():
        return attn_mask
    if attn_mask.layout is torch.strided and 0 in attn_mask.stride():
        for dim, (size, step) in enumerate(zip(attn_mask.shape, attn_mask.stride(), strict=True)):
            if step == 0 and size > 1:
                attn_mask = attn_mask.narrow(dim, 0, 1)
    return attn_mask


def _causal_bias_variant(attn_mask: Tensor) -> bool | None:
    """PyTorch's CausalBias is a tensor in name only: True = lower right, False = upper left, None = another tensor."""
    if type(attn_mask) is Tensor:
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant  # noqa: PLC0415  (slow to import, rarely needed)

    return attn_mask.variant is CausalVariant.LOWER_RIGHT if isinstance(attn_mask, CausalBias) else None


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)


def only_torch_defines(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> str:
    """What of this call belongs to F.scaled_dot_product_attention alone; empty if nothing does."""
    if op.is_jit_traced() is not None:
        return "torch.jit.trace, which sees sizes as tensors"
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        return f"inputs of {query.ndim}, {key.ndim} and {value.ndim} dimensions"
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        return "a batch dimension that broadcasts"
    if query.ndim == 4:
        heads_q, heads_k, heads_v = query.shape[1], key.shape[1], value.shape[1]
        if not enable_gqa and not heads_q == heads_k == heads_v:
            most = max(heads_q, heads_k, heads_v)
            if heads_q in (1, most) and heads_k in (1, most) and heads_v in (1, most):
                return "a heads dimension that broadcasts"
        if enable_gqa and heads_k != heads_v:
            return "different numbers of key and value heads"
    if 0 in (query.shape[-1], value.shape[-1]):
        return "a head_dim of 0"
    if attn_mask is not None and _causal_bias_variant(attn_mask) is None:
        if _is_traced(attn_mask) and attn_mask.requires_grad and torch.is_grad_enabled():
            return "a mask that requires grad, in a trace"
        if attn_mask.dtype not in (torch.bool, query.dtype):
            return f"a {attn_mask.dtype} mask for {query.dtype} inputs"
        if attn_mask.ndim == 0 or attn_mask.ndim > query.ndim:
            return f"a mask of {attn_mask.ndim} dimensions"
    if scale is not None and (scale == 0.0 or not abs(scale) <= torch.finfo(torch.float32).max):
        return "scale 0" if scale == 0.0 else "a scale beyond float32"  # constants, as a trace needs them
    if not enable_gqa and query.ndim == 4 and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise InvalidInput(
            "enable_gqa",
            f"False, with {query.shape[1]} query heads over {key.shape[1]} key heads",
            "enable_gqa=True, or as many heads in all three",
            "pass enable_gqa=True to share key/value heads",
        )
    return ""


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast F.scaled_dot_product_attention casts its inputs, so its namesake does.

    Each by itself, as PyTorch does: floating tensors other than float64, where autocast is on for their device.
    """
    if not torch.compiler.is_compiling() and not op.autocast_is_on():
        return tensors
    return tuple(_autocast(tensor) for tensor in tensors)


def _autocast(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor.device)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on this device now; None where it is off, or does not exist."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
