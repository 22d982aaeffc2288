"""What users call: attention, attention_packed, attention_cached, explain, warm_up.

Each writes down a Request and unwraps its results. What is decided about a call, and what runs it, is in call/.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import native
from .call.execute import attend
from .call.request import (
    BHSD,
    BSHD,
    CACHED,
    CACHED_PACKED,
    OUT_BSHD,
    PACKED,
    MaskLike,
    Request,
    new_options,
    new_request,
    request_by,
    request_of,
    rounded_length,
    with_tensors,
)
from .call.resolve import reduced, resolve
from .errors import InvalidInput, UnknownArgument
from .operands import address
from .plan import AUTO, Plan, plan
from .problem import Layout, Precision, Problem, as_number, check_layout
from .target import Target
from .torch_function import scaled_dot_product_attention
from .torch_seam.switches import is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .call.request import Form
    from .operands import Operands
    from .scores import Term

__all__ = [
    "attention",
    "attention_cached",
    "attention_out_bshd",
    "attention_packed",
    "explain",
    "explain_cached",
    "scaled_dot_product_attention",
    "warm_up",
]

Tensor = torch.Tensor


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
    form = BHSD if layout == "bhsd" else _form(layout)
    if not torch.compiler.is_compiling() and (answer := native.attend) is not None and operands is None:
        known: Tensor | tuple[Tensor, ...] | None = answer(
            form, q, k, v, alibi, keep, sink, None, None, None, None, None, None, None, None, mask, scale, softcap,
            scores, dropout, return_lse, return_max_logit, backend, precision, 0, 0, False,
        )  # fmt: skip
        if known is not None:
            return known
    extras: Operands = {}
    if alibi is not None or keep is not None or sink is not None or isinstance(mask, Tensor):
        mask, extras = with_tensors(mask, alibi=alibi, keep=keep, sink=sink)
    options = new_options(
        (mask, scale, softcap, scores, dropout, return_lse, return_max_logit, backend, precision, 0, 0, False)
    )
    results = attend(new_request((form, q, k, v, extras, {} if operands is None else operands, options)))
    return results.asked(options) if return_lse or return_max_logit else results.out


def _form(layout: Layout) -> Form:
    check_layout(layout)
    return BSHD if layout == "bshd" else BHSD


def attention_out_bshd(
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
    if not torch.compiler.is_compiling() and (answer := native.attend) is not None and operands is None:
        known: Tensor | None = answer(
            OUT_BSHD, q, k, v, None, keep, sink, None, None, None, None, None, None, None, None, mask, scale, softcap,
            scores, dropout, False, False, AUTO, "exact", 0, 0, False,
        )  # fmt: skip
        if known is not None:
            return known
    request = request_of(
        OUT_BSHD, q, k, v, mask, scale=scale, softcap=softcap, keep=keep, sink=sink, scores=scores, operands=operands,
        dropout=dropout, backend=AUTO,
    )  # fmt: skip
    return attend(request).out


def warm_up(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
    """Do now what the first call of `attention` with such tensors and arguments does in addition to its work: plan,
    build the kernels of both directions side by side, load them, and let native code know the call. Returns the plan.

    Only the shapes, strides, dtype and device of the tensors count, and what requires grad: none is read or changed,
    and PyTorch's generators stay as they are. Call it before a CUDA graph is captured.
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
    keep: Tensor | None = None,
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
    """`attention` of sequences stored end to end; each attends only to itself.

    q (total_q, heads_q, head_dim), k (total_k, heads_kv, head_dim), v (total_k, heads_kv, head_dim_v). Sequence n has
    the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] of q and out, and likewise cu_seqlens_k of k and v: int32 offsets
    (sequences + 1,) on the device of q, from 0 and never falling. They stay there: no call waits for them, a captured
    CUDA graph runs with whatever they hold then, and one compiled graph serves all. Rows behind the last offset see no
    key, and keys behind it are seen by none: out is 0 there, and so are gradients.

    max_seqlen_q, max_seqlen_k   no sequence is longer: a hint by which tiles are chosen, 0 = unknown.
    mask     None, "causal", Causal or Window, aligned in each sequence by itself.
    alibi    slopes (heads_q) or (sequences, heads_q): as of `attention`, by the lengths of each sequence.
    seqused_k  int32 (sequences,) on the device: of the keys of each sequence only so many are there, and masks are
               aligned to these. The others are not read, and have no gradient.
    leftpad_k  int32 (sequences,) on the device: the first so many keys of each sequence are padding, and count among
               those that are used. They are not read either.

    Other arguments are those of `attention`; terms that read a tensor of rows or keys, as that of `keep` does, are
    refused. Returns out (total_q, heads_q, head_dim_v); with return_lse=True also lse (heads_q, total_q).

    Offsets on a CPU are checked in every call. On a GPU they are not read, unless TILEWISE_CHECK=1 is set in the
    environment: then a call waits for the device and raises for wrong offsets, inside a compiled graph too.
    Without it, wrong offsets give wrong results, but nothing outside the tensors is read or written.
    """
    if _packed_observers and not torch.compiler.is_compiling():
        for observer in _packed_observers:
            observer(q, k, v, cu_seqlens_q, cu_seqlens_k, mask)
    slots = (alibi, keep, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, None, None, None, None)
    options: Any = (mask, scale, softcap, scores, dropout, return_lse, return_max_logit, backend, precision)
    if not torch.compiler.is_compiling() and (answer := native.attend) is not None and operands is None:
        known: Tensor | tuple[Tensor, ...] | None = answer(
            PACKED, q, k, v, *slots, *options, max_seqlen_q, max_seqlen_k, False
        )
        if known is not None:
            return known
    longest = _rounded("max_seqlen_q", max_seqlen_q), _rounded("max_seqlen_k", max_seqlen_k)
    request = request_by(PACKED, q, k, v, slots, operands, (*options, *longest, False))
    return attend(request).asked(request.options)


def _rounded(name: str, length: int) -> int:
    try:
        return rounded_length(length)
    except TypeError:
        as_number(name, length)
        raise


PackedObserver = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, MaskLike], None]
"""Of the tensors of a packed call, its offsets and its mask."""
_packed_observers: tuple[PackedObserver, ...] = ()
_observing = threading.Lock()


@contextlib.contextmanager
def observed_packed(observer: PackedObserver) -> Iterator[None]:
    """Inside, `observer` is called before every call of `attention_packed`, of all threads, with its arguments."""
    global _packed_observers
    with _observing:
        _packed_observers = (*_packed_observers, observer)
    try:
        yield
    finally:
        with _observing:
            _packed_observers = tuple(one for one in _packed_observers if one != observer)


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    mask: MaskLike = "causal:bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
    scores: tuple[Term, ...] = (),
    operands: Mapping[str, Tensor] | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    backend: str = AUTO,
    precision: Precision = "exact",
) -> Tensor | tuple[Tensor, ...]:
    """Attention of new queries to the keys and values of a cache. Nothing here has a gradient.

    q          (batch, seq_q, heads_q, head_dim); or with `cu_seqlens_q` (total_q, heads_q, head_dim).
    k, v       a cache (cache_batch, places, heads_kv, dim), where sequence n is row `rows[n]`, or row n; or with a
               `page_table` pages (pages, page_size, heads_kv, dim). The strides of both are free, so that they may be
               parts of one tensor.
    lengths    int32 (batch,): sequence n has the places [0, lengths[n]) of its cache; without it, all.
    page_table int32 (batch, pages of a sequence): place p of sequence n is row p % page_size of page
               page_table[n, p // page_size]. Pages may be shared and in any order; entries behind the length are not
               read.
    starts     int32 (batch,): places before starts[n] are padding on the left, and no keys.
    rows       int32 (batch,): the row of the cache that is a sequence's.
    cu_seqlens_q  int32 (batch + 1,): queries of different numbers, behind one another, as in `attention_packed`; none
               has more than max_seqlen_q (0 = unknown), by which tiles are chosen.
    mask       None, "causal:bottom-right", or a Causal or Window, aligned in each sequence by itself: bottom-right puts
               the last query at the last key, which is what new tokens want that are in the cache already.
    alibi, keep, sink, softcap, scale   as of `attention`; keep broadcasts to (batch, heads_q, seq_q, places), and is
               not for packed queries nor beside starts.
    batch_invariant  the bits of a row depend on its own sequence alone, not on the batch it runs in, nor on how the GPU
               is filled: keys are divided by the sequence's own length, and parts are added up in a fixed order.

    Returns out shaped like q with v's head_dim; with return_lse=True also lse (batch, heads_q, seq_q), or
    (heads_q, total_q), in float32. A sequence of length 0 gives out = 0 and lse = -inf.

    Tensors on a CPU are checked in every call. On a GPU no call reads them, unless TILEWISE_CHECK is set in the
    environment: then a call waits for the device, and raises for a length beyond the cache, or a page that does not
    exist. Without it they count as the nearest that do, and nothing outside the tensors is read.
    """
    form = CACHED if cu_seqlens_q is None else CACHED_PACKED
    slots = (alibi, keep, sink, cu_seqlens_q, None, None, None, lengths, starts, rows, page_table)
    options: Any = (mask, scale, softcap, scores, dropout, return_lse, return_max_logit, backend, precision)
    if not torch.compiler.is_compiling() and (answer := native.attend) is not None and operands is None:
        known: Tensor | tuple[Tensor, ...] | None = answer(
            form, q, k, v, *slots, *options, max_seqlen_q, 0, batch_invariant
        )
        if known is not None:
            return known
    options += _rounded("max_seqlen_q", max_seqlen_q), 0, batch_invariant
    request = request_by(form, q, k, v, slots, operands, options)
    return attend(request).asked(request.options)


def cached_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    mask: MaskLike = "causal:bottom-right",
    max_seqlen_q: int = 0,
    **others: Any,
) -> Request:
    """What `attention_cached` asks with these arguments."""
    form = CACHED if cu_seqlens_q is None else CACHED_PACKED
    max_q = _rounded("max_seqlen_q", max_seqlen_q)
    return request_of(form, q, k, v, mask, cu_seqlens_q=cu_seqlens_q, lengths=lengths, max_q=max_q, **others)


def explain_cached(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, *, target: Target | None = None, **arguments: Any
) -> Plan:
    """The plan of `attention_cached` with these arguments: which kernel, how it divides the keys, and why."""
    request = cached_request(q, k, v, lengths, **arguments)
    return plan(resolve(request).problem(), target or Target.of(q.device), request.options.backend)


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
    for name in arguments:
        if name not in _ARGUMENTS and name not in _ASKED:
            raise _unknown("explain", name)
    form = _form(arguments.pop("layout", "bhsd"))
    resolved = resolve(reduced(request_of(form, problem, k, v, **arguments)))
    transformed = is_transformed(problem, k, v, *resolved.operands.values())
    return plan(resolved.problem().with_(transformed=transformed), resolve_target(target, problem.device), backend)


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

_ASKED = ("return_lse", "return_max_logit")  # of it

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
    known = ", ".join((*_ARGUMENTS, *_ASKED, "backend"))
    return UnknownArgument(name, "an unknown keyword", f"{function}'s: {known}", _INSTEAD.get(name, "leave it out"))
