"""Request: what a caller asked, as every way in writes it down.

A Request has a form (how its tensors lie), q, k and v as the caller has them, further tensors by slot, the tensors that
its own score terms read, and one frozen record of all that is no tensor. Nothing is checked here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import masks
from ..masks import Mask
from ..plan import AUTO
from ..problem import Layout, Precision, check_tensors, mask_operands, memory_order
from ..scores import parse_all, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..operands import Operands
    from ..problem import Problem
    from ..scores import Term

Tensor = torch.Tensor
MaskLike = Mask | str | Tensor | None


# ---------------------------------------------------------------------------------------------------------------------
# Forms


class Order(NamedTuple):
    """An order of dimensions: as a (batch, heads, rows, dim) view, and back."""

    view: Callable[[Tensor], Tensor]
    raw: Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _packed_view(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _packed_raw(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def _batched(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _unbatched(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


HEADS_ROWS = Order(_same, _same)  # (batch, heads, rows, dim)
ROWS_HEADS = Order(_swapped, _swapped)  # (batch, rows, heads, dim)
TOTAL_HEADS = Order(_packed_view, _packed_raw)  # (rows, heads, dim)
ONE_BATCH = Order(_batched, _unbatched)  # without the batch, which lse lacks in packed forms


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """How the tensors of a call lie. Two forms are the same object or they differ: a key holds the form itself."""

    name: str
    q: Order
    kv: Order
    out: Order
    lse: Order = HEADS_ROWS
    memory: Layout | None = None  # the memory order of out; None: that of q
    differentiable: bool = True
    is_inner: bool = False  # the mask holds in each sequence by itself

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, rows, dim) of tensors as the caller has them."""
        if self.q is HEADS_ROWS:
            return q, k, v
        try:
            return self.q.view(q), self.kv.view(k), self.kv.view(v)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # no tensors, or too few dimensions
            check_tensors(q, k, v)
            raise

    def layout(self, q: Tensor) -> Layout:
        """The memory order of out, given the view of q."""
        return self.memory or memory_order(q, "bhsd")

    def __repr__(self) -> str:
        return self.name


BHSD = Form("bhsd", HEADS_ROWS, HEADS_ROWS, HEADS_ROWS)
BSHD = Form("bshd", ROWS_HEADS, ROWS_HEADS, ROWS_HEADS, memory="bshd")
BSD = Form("bsd", ONE_BATCH, ONE_BATCH, ONE_BATCH, lse=ONE_BATCH)
"""(batch, rows, dim): the batch takes the place of the heads."""
OUT_BSHD = Form("out_bshd", HEADS_ROWS, HEADS_ROWS, ROWS_HEADS, memory="bshd")
"""Inputs (batch, heads, rows, dim), and out (batch, rows, heads, dim), contiguous."""
PACKED = Form("packed", TOTAL_HEADS, TOTAL_HEADS, TOTAL_HEADS, lse=ONE_BATCH, memory="bshd", is_inner=True)
CACHED = Form("cached", ROWS_HEADS, ROWS_HEADS, ROWS_HEADS, memory="bshd", differentiable=False, is_inner=True)
CACHED_PACKED = Form(
    "cached_packed", TOTAL_HEADS, ROWS_HEADS, TOTAL_HEADS, ONE_BATCH, memory="bshd", differentiable=False, is_inner=True
)
"""A cache with the queries of all sequences in one tensor."""
OPERATOR = Form("operator", HEADS_ROWS, HEADS_ROWS, HEADS_ROWS)
"""Of the registered operators, whose options are `Lowered`."""

# The tensors of a call by the names that its arguments have, and the operands that they become.
SLOTS = {
    "alibi": "slopes",
    "keep": "keep",
    "sink": "sink",
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_kv",
    "seqused_k": "seqused_k",
    "leftpad_k": "leftpad_k",
    "lengths": "cache_lengths",
    "starts": "cache_starts",
    "rows": "cache_rows",
    "page_table": "page_table",
}
MASK = "mask"  # the slot of a mask that is a tensor
IN_FLOAT32 = frozenset(("alibi", "sink"))  # slots whose operands are float32, whatever the caller gave


# ---------------------------------------------------------------------------------------------------------------------
# Options


class _IsTensor:
    """In the place of a mask that is a tensor, which has the slot MASK."""

    def __repr__(self) -> str:
        return "a tensor"


IS_TENSOR: Any = _IsTensor()


class Options(NamedTuple):
    """All arguments that are no tensors. Lengths are rounded (`rounded_length`) before they come here."""

    mask: Mask | str | None = None
    scale: float | None = None
    softcap: float = 0.0
    scores: tuple[Term, ...] = ()
    dropout: float = 0.0
    return_lse: bool = False
    return_max_logit: bool = False
    backend: str = AUTO
    precision: Precision = "exact"
    max_q: int = 0
    max_k: int = 0
    batch_invariant: bool = False


class Lowered(NamedTuple):
    """The options of the registered operators, in the order of their schemas: masks and terms as text."""

    mask: str = "full"  # "" = the first operand is the mask
    scale: float | None = None
    scores: str = ""
    layout: Layout = "bhsd"
    backend: str = AUTO
    needs_lse: bool = False
    precision: Precision = "exact"

    @classmethod
    def of(cls, problem: Problem, backend: str) -> Lowered:
        """Those of a problem, to be run by a backend of this name."""
        mask = "" if isinstance(problem.mask, masks.Dense) else str(problem.mask)
        return cls(
            mask, problem.scale, text_of(problem.scores), problem.layout, backend, problem.needs_lse, problem.precision
        )

    @property
    def outputs(self) -> list[str]:
        """The names of what terms report."""
        return [operand.name for term in parse_all(self.scores) for operand in term.outputs]


# ---------------------------------------------------------------------------------------------------------------------
# Requests


class Request(NamedTuple):
    """A call before anything is decided. `extras`: by slot; `operands`: those that the terms of its options read; both
    are dictionaries, which traces need.

    Of the form OPERATOR the options are `Lowered`.
    """

    form: Form
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Operands
    operands: Operands
    options: Options


class Results(NamedTuple):
    """Of a call, in its form: lse and the largest logits where they were asked for."""

    out: Tensor
    lse: Tensor | None = None
    max_logit: Tensor | None = None

    def asked(self, options: Options) -> Tensor | tuple[Tensor, ...]:
        """As a caller gets them: out alone, or a tuple."""
        if not (options.return_lse or options.return_max_logit):
            return self.out
        assert self.lse is not None or not options.return_lse, "a backend without lse took a problem that needs one"
        others = (self.lse if options.return_lse else None, self.max_logit if options.return_max_logit else None)
        return self.out, *(one for one in others if one is not None)


# As the classes make them, in a third of the time: of all fields in their order, as one tuple.
new_options: Callable[[tuple[Any, ...]], Options] = functools.partial(tuple.__new__, Options)
new_request: Callable[[tuple[Any, ...]], Request] = functools.partial(tuple.__new__, Request)
new_results: Callable[[tuple[Any, ...]], Results] = functools.partial(tuple.__new__, Results)


def tensors_of(**given: Tensor | None) -> Operands:
    """Those of the slots that a call has."""
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def with_tensors(mask: MaskLike, **given: Tensor | None) -> tuple[Mask | str | None, Operands]:
    """The mask as Options hold it, and the slots that a call has, that of a mask among them."""
    if isinstance(mask, Tensor):
        return IS_TENSOR, {MASK: mask, **tensors_of(**given)}
    return mask, tensors_of(**given)


def request_by(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: tuple[Tensor | None, ...],
    operands: Operands | None,
    options: tuple[Any, ...],
) -> Request:
    """The request with tensors in the order of SLOTS and options in that of `Options`."""
    extras = {slot: tensor for slot, tensor in zip(SLOTS, slots, strict=True) if tensor is not None}
    if isinstance(options[0], Tensor):
        extras[MASK] = options[0]
        options = (IS_TENSOR, *options[1:])
    return new_request((form, q, k, v, extras, {} if operands is None else operands, new_options(options)))


def request_of(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike = None,
    *,
    operands: Operands | None = None,
    **given: Any,
) -> Request:
    """The request with these slots and options, by their names."""
    slots = {name: given.pop(name) for name in SLOTS if name in given}
    rule, extras = with_tensors(mask, **slots)
    return Request(form, q, k, v, extras, {} if operands is None else operands, Options(rule, **given))


def operands_of(request: Request) -> dict[str, Tensor]:
    """The operands of a request under the names that a Problem has for them; a seed of dropout is not among them."""
    found = dict(request.operands)
    for slot, tensor in request.extras.items():
        if slot == MASK:
            found |= mask_operands(tensor)
        else:
            found[SLOTS[slot]] = tensor.float() if slot in IN_FLOAT32 else tensor
    return found


def rounded_length(length: int) -> int:
    """One of a few classes, so that a plan or a compiled graph serves all lengths of a class; 0 = unknown.

    By comparisons, which a trace may answer for a whole class.
    """
    if length <= 0:
        return 0
    for bound in _LONGEST:
        if length <= bound:
            return bound
    return 0


_LONGEST = tuple(1 << power for power in range(6, 21))
