"""Calls that come again, handed over to native code: what a Call is to the extension, and what it asks of Python.

A Call that `op.recall` has found once will be found again. `learn` describes it to the extension (engine/recipe.py),
which from then on answers such calls of `tilewise.attention` itself; `handle` does the same for the override. What the
extension cannot make of a backward (one that is differentiated in turn, that hooks have changed, or that comes in a
layout it has not met) comes back here, to `_make_backward`, and is made by the way in Python; the next of that layout
is known.

The extension is given tensors as a caller has them, and kernels see (batch, heads, seq, head_dim) views: a Form says
how one becomes the other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from . import native, op
from .backend import empty_out
from .engine import recipe as recipes
from .engine import run
from .engine.mask_spans import mask_operands
from .engine.rules import in_terms
from .errors import CompileError
from .jit.launch import refused
from .operands import INPUTS, NO_OPERANDS, chosen

if TYPE_CHECKING:
    from .op import Call
    from .operands import Operands

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")
Form = Literal["bhsd", "bshd", "bsd"]  # the last one: (batch, seq, dim), the batch in the place of the heads


class Repeated(NamedTuple):
    """What Python needs to make a backward of a call that the extension answered."""

    call: Call
    form: Form
    constants: Operands  # what a recipe has the addresses of


def learn(call: Call, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> None:
    """Let the extension answer calls of `attention` with such bhsd views and these arguments, if it can."""
    form: Form = arguments[5]
    if call.native is None or call.native.get(form, call) is None or (calls := native.ready()) is None:
        return
    generation = calls.generation()
    if op.recall(q, k, v, NO_OPERANDS, arguments) is not call:  # it counts no more since it was found
        return
    found = handle(call, form, q, k, v)
    if found is not None:
        calls.learn(generation, *(_raw(tensor, form) for tensor in (q, k, v)), arguments, found)


def handle(call: Call, form: Form, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What the extension knows such a call by; None where it cannot make it."""
    if call.plan is None or call.native is None or native.ready() is None:
        return None
    if form not in call.native:
        if _is_captured(q):
            return None
        call.native[form] = None
        try:
            call.native[form] = _described(call, form, q, k, v)
        except Exception as error:  # the way in Python has just made this call, and makes the next
            _log.warning("tilewise: a call of %s is left to Python: %s: %s", call.problem, type(error).__name__, error)
    return call.native[form]


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _described(call: Call, form: Form, q: Tensor, k: Tensor, v: Tensor) -> Any:
    assert call.plan is not None
    problem = in_terms(call.problem)
    constants = mask_operands(call.problem, q.device)
    reports = any(term.outputs for term in problem.scores)
    given = {operand.name for operand in problem.operands} - set(constants)
    if call.lacks_memory or problem.empty or reports or given or run.goes_by_spans(call.problem):
        return None
    if call.plan.forward is None or not native.knows_streams_of(q.device):
        return None
    out = empty_out(q, problem.head_dim_v, problem.layout)
    operands = run.forward_operands(problem, q, k, v, out, constants)
    recipe = recipes.recipe_of(call.plan.forward, operands, run.device_index(q.device))
    if recipe is None:
        return None
    _give_counters(recipe, q.device)
    owner = Repeated(call._replace(native=None), form, constants)
    raw = [_raw(tensor, form) for tensor in (q, k, v)]
    lse = tuple(out.shape[:3]) if run.makes_lse(problem) else None
    returns_lse = call.options.needs_lse
    return native.calls.new_call(*raw, recipe, _shape(_raw(out, form)), lse, returns_lse, problem.needs_grad, owner)


def _give_counters(recipe: recipes.Recipe, device: torch.device) -> None:
    index = run.device_index(device)
    if recipes.counts(recipe) and index not in _counting:
        native.calls.use_counters(index, *run.counter_room(index))
        _counting.add(index)


_counting: set[int] = set()


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
    wanted: int,
    learn: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v of which `wanted` has the bits; with `learn`, such a backward is known afterwards."""
    call, form, _ = repeated
    flags = tuple(bool(wanted >> place & 1) for place in range(len(INPUTS)))
    saved = _viewed(q, form), _viewed(k, form), _viewed(v, form), _viewed(out, form), lse
    seen = None if dout is None else _viewed(dout, form)
    grads = op.gradients(call, saved, (), flags, seen, dlse)[: len(INPUTS)]
    if learn and dout is not None and not _is_captured(q):
        _learn_backward(known, repeated, dout, saved, wanted, flags)
    return tuple(None if grad is None else _raw(grad, form) for grad in grads)


def _learn_backward(
    known: Any, repeated: Repeated, dout: Tensor, saved: tuple[Tensor, ...], wanted: int, flags: tuple[bool, ...]
) -> None:
    call, form, constants = repeated
    q, k, v, out, _ = saved
    problem, wants = in_terms(call.problem), chosen(INPUTS, flags)
    tensors = {"dout": _viewed(dout, form), "q": q, "k": k, "v": v, "out": out, **constants}
    recipe, zeroed = None, 0
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    try:
        program = op.backward_program(call, wants)
        operands = run.backward_operands(problem, wants, tensors)
        recipe = recipes.recipe_of(program, operands, run.device_index(q.device))
    except CompileError:  # the way in Python makes all gradients then, and gives these
        pass
    if recipe is not None:
        _give_counters(recipe, q.device)
        shapes = tuple(_shape(_raw(torch.empty_like(x, device="meta"), form)) for x in (q, k, v))
        zeroed = sum(1 << place for place, name in enumerate(INPUTS) if f"d{name}" in program.zeroed)
    native.calls.learn_backward(known, dout, wanted, recipe, shapes, zeroed)


def _say_failed(what: str, status: int, name: str, grid: int, threads: int, smem: int) -> None:
    raise refused(what, status, name, grid, threads, smem)


native.answer_with(_make_backward, _say_failed)


def _viewed(tensor: Tensor, form: Form) -> Tensor:
    """(batch, heads, seq, head_dim), of a tensor as the caller has it."""
    if form == "bhsd":
        return tensor
    return tensor.transpose(1, 2) if form == "bshd" else tensor.unsqueeze(0)


def _raw(tensor: Tensor, form: Form) -> Tensor:
    """The other way."""
    if form == "bhsd":
        return tensor
    return tensor.transpose(1, 2) if form == "bshd" else tensor.squeeze(0)


def _shape(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()
