"""Calls that come again, handed over to the native extension: what a Call is to it, and what it asks of Python.

`learn` describes a Call that was found in the memory to the extension (engine/recipe.py), which from then on answers
such calls itself; `handle` does the same for the override. The extension leaves some backwards to Python: one that is
differentiated in turn, that hooks have changed, or that comes in a layout it has not met. `_make_backward` makes those,
and teaches the extension the layout.

The extension gets tensors as a caller has them, and kernels see (batch, heads, seq, head_dim) views: the form of the
request converts between the two.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import native
from ..backend import empty_out
from ..engine import recipe as recipes
from ..engine import run
from ..engine.mask_spans import mask_operands
from ..engine.rules import in_terms
from ..errors import CompileError
from ..hook import left_uncompiled
from ..jit.launch import refused
from ..operands import INPUTS, chosen
from ..terms import Keep
from ..torch_seam.autograd import gradients
from .build import backward_program
from .memory import find
from .request import IN_FLOAT32, MASK, OUT_BSHD, SLOTS, Request

if TYPE_CHECKING:
    from ..operands import Operands
    from ..problem import Problem
    from .build import Call
    from .request import Form

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")


class Repeated(NamedTuple):
    """What Python needs to make a backward of a call that the extension answered."""

    call: Call
    form: Form
    names: tuple[str, ...]  # of the operands that the extension saves, in the order of their slots
    constants: Operands  # what a recipe has the addresses of


def learn(call: Call, request: Request) -> None:
    """Let the extension answer requests like this one, which `find` has found this Call by, if it can."""
    form, q, k, v, extras, operands, options = request
    if call.native is None or call.native.get(form, call) is None or (calls := native.ready()) is None:
        return
    if operands or options.dropout or options.return_max_logit or MASK in extras:
        return
    before = calls.generation()
    if find(request) is not call:  # it was forgotten since it was found
        return
    found = handle(call, request)
    if found is not None:
        calls.learn(before, form, q, k, v, _by_slot(extras), tuple(options), found)


def _by_slot(extras: Operands) -> tuple[Tensor | None, ...]:
    """As the extension takes them: a place for every slot."""
    return tuple(extras.get(slot) for slot in SLOTS)


def handle(call: Call, request: Request) -> Any:
    """What the extension knows such a call by; None where it cannot make it."""
    form = request.form
    if call.plan is None or call.native is None or native.ready() is None:
        return None
    if form not in call.native:
        if _is_captured(request.q):
            return None
        call.native[form] = None
        try:
            call.native[form] = _described(call, request)
        except Exception as error:  # Python has just made this call, and makes the next
            _log.warning("tilewise: a call of %s is left to Python: %s: %s", call.problem, type(error).__name__, error)
    return call.native[form]


def _hides_keys_alone(problem: Problem) -> bool:
    """Whether `keep`, if the problem has one, hides the same keys from all rows.

    Only such a tensor is left to the extension: forward and backward each read it there, while those in Python share
    what one read of it gives, which is nothing for one flag per key.
    """
    return problem.seq_q == 1 or all(term.rows_alike for term in problem.scores if isinstance(term, Keep))


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _described(call: Call, request: Request) -> Any:
    assert call.plan is not None
    form, extras = request.form, request.extras
    q, k, v = form.views(request.q, request.k, request.v)
    problem = in_terms(call.problem)
    constants = mask_operands(call.problem, q.device)
    reports = any(term.outputs for term in problem.scores)
    named = {SLOTS[slot]: tensor for slot, tensor in extras.items()}
    unknown = {operand.name for operand in problem.operands} ^ {*constants, *named}
    if call.lacks_memory or problem.empty or reports or unknown or run.goes_by_spans(call.problem):
        return None
    if problem.operand_grads or not _hides_keys_alone(problem):
        return None
    if any(slot in IN_FLOAT32 and tensor.dtype != torch.float32 for slot, tensor in extras.items()):
        return None  # every call makes a tensor in float32 of it
    if call.plan.forward is None or not native.knows_streams_of(q.device):
        return None
    out = empty_out(q, problem.head_dim_v, problem.layout)
    if form is OUT_BSHD and not form.out.raw(out).is_contiguous():
        return None
    operands = run.forward_operands(problem, q, k, v, out, {**constants, **named})
    recipe = recipes.recipe_of(call.plan.forward, operands, run.device_index(q.device))
    if recipe is None:
        return None
    _give_counters(recipe, q.device)
    owner = Repeated(
        call._replace(native=None), form, tuple(name for name in SLOTS.values() if name in named), constants
    )
    held = tuple(constants.get(name) for name in SLOTS.values())  # offsets of documents that are packed sequences
    lse = tuple(form.lse.raw(out[..., 0]).shape) if run.makes_lse(problem) else None
    made = _shape(form.out.raw(out)), lse, problem.needs_lse, problem.needs_grad
    raw = request.q, request.k, request.v
    return native.calls.new_call(*raw, _by_slot(extras), held, recipe, *made, owner)


def _give_counters(recipe: recipes.Recipe, device: torch.device) -> None:
    index = run.device_index(device)
    if recipes.counts(recipe) and index not in _counting:
        native.calls.use_counters(index, *run.counter_room(index))
        _counting.add(index)


_counting: set[int] = set()


@left_uncompiled
def _make_backward(
    known: Any,
    repeated: Repeated,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: tuple[Tensor, ...],
    wanted: int,
    learn: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v of which `wanted` has the bits; with `learn`, such a backward is known afterwards.

    `extras`: what the call read in addition.
    """
    call, form, names, _ = repeated
    flags = tuple(bool(wanted >> place & 1) for place in range(len(INPUTS)))
    saved = (*form.views(q, k, v), form.out.view(out), form.lse.view(lse))
    seen = None if dout is None else form.out.view(dout)
    dlse = None if dlse is None else form.lse.view(dlse)
    operands = dict(zip(names, extras, strict=True))
    tensors = tuple(operands[name] for name in call.names) if operands else ()
    grads = gradients(call, saved, tensors, (*flags, *(False for _ in tensors)), seen, dlse)[: len(INPUTS)]
    if learn and dout is not None and not _is_captured(q):
        _learn_backward(known, repeated, dout, saved, operands, wanted, flags)
    orders = form.q, form.kv, form.kv
    return tuple(None if grad is None else order.raw(grad) for order, grad in zip(orders, grads, strict=True))


def _learn_backward(
    known: Any,
    repeated: Repeated,
    dout: Tensor,
    saved: tuple[Tensor, ...],
    operands: Operands,
    wanted: int,
    flags: tuple[bool, ...],
) -> None:
    call, form, _, constants = repeated
    q, k, v, out, _ = saved
    problem, wants = in_terms(call.problem), chosen(INPUTS, flags)
    tensors = {"dout": form.out.view(dout), "q": q, "k": k, "v": v, "out": out, **constants}
    tensors |= operands
    recipe, zeroed = None, 0
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    try:
        program = backward_program(call, wants)
        read = run.backward_operands(problem, wants, tensors)
        recipe = recipes.recipe_of(program, read, run.device_index(q.device))
    except CompileError:  # Python makes all gradients then, and gives these
        pass
    if recipe is not None:
        _give_counters(recipe, q.device)
        orders = form.q, form.kv, form.kv
        grads = [torch.empty_like(x, device="meta") for x in (q, k, v)]
        shapes = tuple(_shape(order.raw(grad)) for order, grad in zip(orders, grads, strict=True))
        zeroed = sum(1 << place for place, name in enumerate(INPUTS) if f"d{name}" in program.zeroed)
    native.calls.learn_backward(known, dout, wanted, recipe, shapes, zeroed)


def _raise_refused(what: str, status: int, name: str, grid: int, threads: int, smem: int) -> None:
    raise refused(what, status, name, grid, threads, smem)


native.answer_with(_make_backward, _raise_refused)


def _shape(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()
