"""A Request as a Problem and its operands: the one place where the forms of a call, its masks and its named terms
become what backends know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import masks
from ..errors import InvalidInput, UnsupportedProblem
from ..masks import Cached, Causal, Documents, Full, Mask, Packed, Window
from ..plan import check_backend
from ..problem import (
    as_number,
    check_mask_type,
    check_places,
    check_tensors,
    check_terms,
    describe,
    in_front_of_outputs,
    shown,
    with_mask_terms,
    with_max_logit,
    with_named_terms,
    with_packed_documents,
)
from ..scores import softcapped, text_of
from ..sequences import MIN_ROWS_OF_DOCUMENTS, documents_are_sequences
from ..terms import Alibi, Dropout, RelativeBias
from .request import IS_TENSOR, MASK, PACKED, Lowered, Options, operands_of

if TYPE_CHECKING:
    from ..operands import Operands
    from ..problem import Layout, Problem
    from ..scores import Term
    from .request import MaskLike, Request

Tensor = torch.Tensor
PAGE_SIZES = range(1, (1 << 16) + 1)


class Resolved(NamedTuple):
    """A call as backends see it: (batch, heads, rows, dim) views, a mask that is a value or IS_TENSOR, all terms but
    the softcap, and the operands in the order that the mask and the terms give them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | str | None
    scores: tuple[Term, ...]
    operands: Operands
    options: Options
    layout: Layout
    differentiable: bool = True

    @property
    def tensor_mask(self) -> Tensor | None:
        return next(iter(self.operands.values())) if self.mask is IS_TENSOR else None

    def problem(self) -> Problem:
        """The Problem that these tensors pose. Raises InvalidInput for tensors that pose none."""
        options, operands = self.options, dict(self.operands)
        mask: MaskLike = self.mask
        if mask is IS_TENSOR:
            mask = operands.pop(next(iter(operands)))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.differentiable):
            return describe(
                self.q,
                self.k,
                self.v,
                mask=mask,
                scale=options.scale,
                softcap=options.softcap,
                scores=self.scores,
                operands=operands,
                dropout=options.dropout,
                needs_lse=options.return_lse,
                precision=options.precision,
            ).with_(layout=self.layout)

    def lowered(self) -> Lowered:
        """The options of the registered operators, which a trace holds: no size is asked for here."""
        options, mask = self.options, self.mask
        text = "full" if mask is None else "" if mask is IS_TENSOR else str(mask)
        terms = (*softcapped(as_number("softcap", options.softcap)), *self.scores)
        return Lowered(
            text, options.scale, text_of(terms) if terms else "", self.layout, options.backend, options.return_lse,
            options.precision,
        )  # fmt: skip

    def with_dropout_term(self, seed: Tensor) -> Resolved:
        """The same call with its dropout as a term, which reads a seed."""
        options = self.options
        scores = in_front_of_outputs(self.scores, Dropout(as_number("dropout", options.dropout)))
        operands = _in_order(self.mask, scores, {**self.operands, "seed": seed})
        return self._replace(scores=scores, operands=operands, options=options._replace(dropout=0.0))


def drawn_seed(device: torch.device) -> Tensor:
    """The operand of a Dropout term, from PyTorch's generator of the device.

    An operation of PyTorch's like any other: it obeys torch.manual_seed, a checkpoint draws it again, and a CUDA graph
    draws a new one each time it runs.
    """
    return torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Masks that hold tensors


def reduced(request: Request) -> Request:
    """The request whose mask holds no tensors: split into a band, a term and operands, or merged with `keep`."""
    if request.form.is_inner:  # of which `resolve` refuses these masks
        return request
    if MASK in request.extras and "keep" in request.extras:
        return _merge_keep(request)
    mask: Any = request.options.mask
    if isinstance(mask, Mask) and mask.holds_tensors:
        return _split_tensor_mask(request, mask)
    return request


def _merge_keep(request: Request) -> Request:
    """The mask and `keep`, where both are boolean tensors, as `keep` alone."""
    extras, options = dict(request.extras), request.options
    mask, keep = extras[MASK], extras["keep"]
    if mask.dtype != torch.bool or getattr(keep, "dtype", None) != torch.bool:
        return request
    try:
        extras["keep"] = mask & keep
    except (RuntimeError, TypeError):  # of another device, or of shapes that do not fit one another
        got = f"{tuple(getattr(keep, 'shape', ()))} on {getattr(keep, 'device', 'no device')}"
        expected = f"a boolean tensor that fits the mask's {tuple(mask.shape)} on {mask.device}"
        raise InvalidInput("keep", got, expected, "pass one of the two, or both in shapes that broadcast") from None
    del extras[MASK]
    return request._replace(extras=extras, options=options._replace(mask=None))


def _split_tensor_mask(request: Request, mask: Mask) -> Request:
    """A band in the place of the mask, with a term and its operands.

    Documents become packed sequences where our kernels take them as such, else the spans of keys that their rows see.
    """
    options = request.options
    q, k, _ = request.form.views(request.q, request.k, request.v)
    check_tensors(q, k, k)
    if isinstance(mask, Documents) and q.is_cuda and not options.dropout:
        terms, operands = _named_terms(request, q, k)
        learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands.values())
        same = mask.cu_seqlens_q is mask.cu_seqlens_kv
        # A trace must not ask how many there are: that would bind it to their number.
        few = torch.compiler.is_compiling() or q.shape[2] >= MIN_ROWS_OF_DOCUMENTS * (len(mask.cu_seqlens_q) - 1)
        if few and not learned and documents_are_sequences(terms, q.dtype, same):
            packed, given = with_packed_documents(q, mask, request.operands)
            return request._replace(operands=given, options=options._replace(mask=packed))
    band, scores, given = with_mask_terms(q, k, mask, options.scores, request.operands)
    return request._replace(operands=given, options=options._replace(mask=band, scores=scores))


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def resolve(request: Request) -> Resolved:
    """The call as backends see it, checked as far as it can be without a Problem; the request is `reduced`."""
    options = request.options
    check_backend(options.backend)
    if request.form is PACKED:
        return _resolve_packed(request, options)
    if not request.form.differentiable:
        return _resolve_cached(request, options)
    check_mask_type(None if options.mask is IS_TENSOR else options.mask)
    q, k, v = request.form.views(request.q, request.k, request.v)
    return _resolved(request, options, (q, k, v), options.mask, _named_terms(request, q, k))


def _named_terms(
    request: Request, q: Tensor, k: Tensor, seq_kv: int | None = None
) -> tuple[tuple[Term, ...], Operands]:
    """The terms of a call, those that have arguments of their own behind the caller's, and what all of these read."""
    options, extras = request.options, request.extras
    _check_operands_type(request.operands)
    named = {name: extras[name] for name in ("alibi", "keep", "sink") if name in extras}
    if not named:
        return check_terms(options.scores), request.operands
    return with_named_terms(q, k, options.scores, request.operands, **named, seq_kv=seq_kv)


def _resolved(
    request: Request,
    options: Options,
    views: tuple[Tensor, Tensor, Tensor],
    mask: Mask | str | None,
    terms: tuple[tuple[Term, ...], Operands],
) -> Resolved:
    scores, operands = terms
    scores = with_max_logit(scores, options.return_max_logit)
    extras = {name: tensor for name, tensor in request.extras.items() if name not in ("alibi", "keep", "sink")}
    for name, tensor in extras.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, shown(tensor), "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor.is_nested:
            raise InvalidInput(name, "a nested tensor", "a strided tensor", "pad it")
    if extras:
        own = operands_of(request._replace(extras=extras, operands={}))
        operands = {**own, **operands}
    form = request.form
    ordered = _in_order(mask, scores, operands)
    return Resolved(*views, mask, scores, ordered, options, form.layout(views[0]), form.differentiable)


def _check_operands_type(operands: object) -> None:
    if isinstance(operands, dict) and all(isinstance(name, str) for name in operands):
        for name, tensor in operands.items():
            if not isinstance(tensor, Tensor):
                remedy = "convert it with torch.as_tensor"
                raise InvalidInput(f"operands[{name!r}]", shown(tensor), "a torch.Tensor", remedy)
        return
    raise InvalidInput(
        "operands", shown(operands), "a dictionary of tensors by name", "write operands={'name': tensor}"
    )


def _in_order(mask: Mask | str | None, scores: tuple[Term, ...], operands: Operands) -> Operands:
    """The operands in the order of `Problem.operands`; as they are where they are not those of the mask and terms."""
    names = [operand.name for term in scores for operand in term.tensors]
    if mask is IS_TENSOR:
        names = [*(name for name in ("keep", "bias") if name in operands and name not in names), *names]
    elif isinstance(mask, Mask):
        names = [*(operand.name for operand in mask.operands), *names]
    known = {name: operands[name] for name in names if name in operands}
    return known if len(known) == len(operands) else operands  # `describe` says what is wrong


def inner_rule(mask: MaskLike) -> Full | Causal | Window:
    """The mask of sequences that are packed or in a cache, which holds in each of them by itself."""
    rule = masks.parse(mask) if isinstance(mask, str) else Full() if mask is None else mask
    if isinstance(rule, Full | Causal | Window):
        return rule
    raise InvalidInput(
        "mask",
        shown(rule),
        "None, 'causal', Full, Causal or Window, which holds in each sequence by itself",
        "use tilewise.attention with a Documents mask for others",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences


def _resolve_packed(request: Request, options: Options) -> Resolved:
    extras = request.extras
    _check_packed(request)
    of_queries, of_keys = extras["cu_seqlens_q"], extras["cu_seqlens_k"]
    same, whole = of_queries is of_keys, "seqused_k" not in extras and "leftpad_k" not in extras
    flags = same, "seqused_k" in extras, "leftpad_k" in extras
    rule = inner_rule(extras.get(MASK, options.mask))
    # In a trace the number of sequences may be a symbol: the operator asks when it runs.
    sequences = 0 if torch.compiler.is_compiling() else of_queries.shape[0] - 1
    mask = Packed(sequences, options.max_q, options.max_k, rule, *flags)
    q, k, v = request.form.views(request.q, request.k, request.v)
    terms = _named_terms(request, q, k)
    if terms[0]:
        _check_packed_terms(q, *terms, same and whole)
    return _resolved(request, options, (q, k, v), mask, terms)


def _check_packed(request: Request) -> None:
    offsets = {name: request.extras[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    tensors = {"q": request.q, "k": request.k, "v": request.v, **offsets}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor.is_nested:
            raise InvalidInput(name, "a nested tensor", "a strided tensor", "pass its values and its offsets")
    for name in ("q", "k", "v"):
        if tensors[name].ndim != 3:
            shape = tuple(tensors[name].shape)
            raise InvalidInput(name, f"shape {shape}", "3 dimensions (total, heads, head_dim)", "reshape it")
    for name in offsets:
        if tensors[name].ndim != 1 or tensors[name].dtype != torch.int32:
            raise InvalidInput(
                name,
                f"a tensor of shape {tuple(tensors[name].shape)} in {tensors[name].dtype}",
                "int32 offsets (sequences + 1,)",
                "pass the cumulative lengths of the sequences, from 0 to the total",
            )


def _check_packed_terms(q: Tensor, scores: tuple[Term, ...], operands: Operands, same: bool) -> None:
    by_spans = q.is_cuda and (q.dtype.itemsize > 2 or any(tensor.requires_grad for tensor in operands.values()))
    for term in scores:
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


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def _resolve_cached(request: Request, options: Options) -> Resolved:
    extras = request.extras
    is_packed, is_paged = "cu_seqlens_q" in extras, "page_table" in extras
    _check_cache_shapes(request, is_packed, is_paged)
    rule = inner_rule(extras.get(MASK, options.mask))
    flags = is_packed, "lengths" in extras, "starts" in extras, "rows" in extras, bool(options.batch_invariant)
    # What else the mask says of the cache it reads off the tensors (`Mask.of`), in a trace when the call runs.
    mask: Any = Cached(0, int(is_paged), 0, options.max_q, rule, *flags)
    q, k, v = request.form.views(request.q, request.k, request.v)
    if not torch.compiler.is_compiling():
        check_tensors(q, k, v)
        places = operands_of(request._replace(extras=_places(extras), operands={}))
        mask = mask.of(q, k, places)
        check_places(mask, places, q.device)
        _check_cache(request, mask, k)
    capacity = k.shape[2] * (extras["page_table"].shape[1] if is_paged else 1)
    terms = _named_terms(request, q, k, capacity)
    _check_cache_terms(terms[0], options, is_packed, "starts" in extras)
    return _resolved(request, options, (q, k, v), mask, terms)


def _places(extras: Operands) -> Operands:
    """Of the tensors of a call those that say where keys are."""
    return {name: tensor for name, tensor in extras.items() if name in _PLACES}


_PLACES = frozenset(("cu_seqlens_q", "lengths", "starts", "rows", "page_table"))


def _check_cache_shapes(request: Request, is_packed: bool, is_paged: bool) -> None:
    q, k, v = request.q, request.k, request.v
    rows = "(total_q, heads, head_dim)" if is_packed else "(batch, seq_q, heads, head_dim)"
    cache = "(pages, page_size, heads, head_dim)" if is_paged else "(rows, places, heads, head_dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v), *_places(request.extras).items()):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
    for name, tensor, shape in (("q", q, rows), ("k", k, cache), ("v", v, cache)):
        if tensor.ndim != shape.count(",") + 1:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", shape, "reshape it")
    if torch.compiler.is_compiling():
        return
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[-1]:
        name, tensor = ("v", v) if k.shape[:3] != v.shape[:3] else ("k", k)
        raise InvalidInput(
            name,
            f"shape {tuple(tensor.shape)}",
            f"{tuple(k.shape[:3])} and a head_dim of its own, as k has; and k the head_dim of q, {q.shape[-1]}",
            "pass the two halves of one cache",
        )


def _check_cache(request: Request, mask: Cached, k: Tensor) -> None:
    """Raise InvalidInput for a cache whose rows or pages do not fit its sequences."""
    if mask.page_size or "page_table" in request.extras:
        if k.shape[2] not in PAGE_SIZES:
            raise InvalidInput("k", f"pages of {k.shape[2]} places", f"1 to {PAGE_SIZES.stop - 1}", "use smaller pages")
        if mask.rows:
            raise InvalidInput("rows", "beside a page_table", "one of the two", "reorder the rows of the page_table")
    elif not mask.rows and k.shape[0] != mask.sequences:
        raise InvalidInput(
            "k",
            f"a cache of {k.shape[0]} rows for {mask.sequences} sequences",
            "as many rows as sequences, or rows that names them",
            "pass rows, or a slice of the cache",
        )


def _check_cache_terms(scores: tuple[Term, ...], options: Options, is_packed: bool, has_starts: bool) -> None:
    if options.dropout:
        raise InvalidInput(
            "dropout", options.dropout, "0: attention_cached has no gradient", "train with tilewise.attention"
        )
    if options.return_max_logit:
        raise InvalidInput(
            "return_max_logit", "beside a cache", "False: no kernel of caches reports", "use tilewise.attention"
        )
    for term in scores:
        for operand in term.tensors:
            name = operand.name if operand.name == "keep" else "scores"
            if not operand.dims:
                what = f"{term}, which reads {operand.name}, for all sequences at once"
                raise InvalidInput(
                    name, what, "terms that read tensors of batches, heads, rows or keys", "leave it out"
                )
            if ("key" in operand.dims or "row" in operand.dims) and (is_packed or has_starts):
                beside = "packed queries" if is_packed else "starts"
                what = f"{term} beside {beside}" if name == "scores" else f"beside {beside}"
                raise InvalidInput(name, what, "a tensor (batch, heads, seq_q, places) alone", "use a mask")
