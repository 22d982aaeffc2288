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
from .hook import left_uncompiled
from .jit.launch import refused
from .operands import INPUTS, NO_OPERANDS, chosen
from .terms import Keep

if TYPE_CHECKING:
    from .op import Call
    from .operands import Operands
    from .problem import Problem

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")
# Three more than layouts: (batch, seq, dim), the batch in the place of the heads; packed, (seq, heads, dim); turned,
# where inputs are (batch, heads, seq, dim) and out is (batch, seq, heads, dim), contiguous.
Form = Literal["bhsd", "bshd", "bsd", "packed", "turned"]
PACKED: Literal["packed"] = "packed"
TURNED: Literal["turned"] = "turned"
TURNED_LAYOUT = (TURNED,)
"""Among the options of `attend`, in the place of a layout; none that `attention` could be given."""


class Repeated(NamedTuple):
    """What Python needs to make a backward of a call that the extension answered."""

    call: Call
    form: Form
    constants: Operands  # what a recipe has the addresses of


def learn(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: tuple[Any, ...],
    *,
    turned: bool = False,
    keep: Tensor | None = None,
) -> None:
    """Let the extension answer calls of `attention` with such bhsd views and these arguments, if it can; `turned`:
    those of `attention_turned` instead; `keep`: with such a tensor, which `recall_kept` has found the call by."""
    form: Form = TURNED if turned else arguments[5]
    if call.native is None or call.native.get(form, call) is None or (calls := native.ready()) is None:
        return
    generation = calls.generation()
    again = op.recall(q, k, v, NO_OPERANDS, arguments) if keep is None else recall_kept(q, k, v, keep, arguments)
    if again is not call:  # it counts no more since it was found
        return
    found = handle(call, form, q, k, v, () if keep is None else (keep,))
    if found is not None:
        options = (*arguments[:5], TURNED_LAYOUT, *arguments[6:]) if turned else arguments
        calls.learn(generation, *(_raw(tensor, form) for tensor in (q, k, v)), keep, None, options, found)


def recall_kept(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, arguments: tuple[Any, ...]) -> Call | None:
    """The Call that was remembered for such tensors, by what a caller of `attention` gave beside them."""
    return op.recall(q, k, v, {recipes.KEEP: keep}, (_KEPT, arguments))


def remember_kept(call: Call, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, arguments: tuple[Any, ...]) -> None:
    """Let `recall_kept` find this Call, whose one operand is `keep`."""
    op.remember(call, q, k, v, {recipes.KEEP: keep}, (_KEPT, arguments))


_KEPT = object()  # in keys: what follows was given beside `keep`, whose term is yet to be made


def learn_packed(
    call: Call, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], arguments: tuple[Any, ...]
) -> None:
    """Let the extension answer calls of `attention_packed` with such tensors and arguments, if it can."""
    if call.native is None or call.native.get(PACKED, call) is None or (calls := native.ready()) is None:
        return
    generation = calls.generation()
    if op.recall_packed(q, k, v, *offsets, arguments) is not call:
        return
    views = _viewed(q, PACKED), _viewed(k, PACKED), _viewed(v, PACKED)
    found = handle(call, PACKED, *views, offsets)
    if found is not None:
        calls.learn(generation, q, k, v, *offsets, packed_options(*arguments), found)


def packed_options(
    max_q: int,
    max_k: int,
    mask: Any,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    backend: str,
    precision: str,
) -> tuple[Any, ...]:
    """What `op.recall_packed` remembers a call by, as `attention_packed` hands it to the extension: in the places of
    the options of `attention`."""
    return mask, scale, softcap, max_q, max_k, PACKED, return_lse, backend, precision


def handle(call: Call, form: Form, q: Tensor, k: Tensor, v: Tensor, beside: tuple[Tensor, ...] = ()) -> Any:
    """What the extension knows such a call of bhsd views by; None where it cannot make it. `beside`: the offsets of
    packed sequences, or `keep`."""
    if call.plan is None or call.native is None or native.ready() is None:
        return None
    if form not in call.native:
        if _is_captured(q):
            return None
        call.native[form] = None
        try:
            call.native[form] = _described(call, form, q, k, v, beside)
        except Exception as error:  # the way in Python has just made this call, and makes the next
            _log.warning("tilewise: a call of %s is left to Python: %s: %s", call.problem, type(error).__name__, error)
    return call.native[form]


def _prepares(recipe: recipes.Recipe) -> bool:
    """Whether a call has to bring what something is made of before, or its mask to hold it."""
    return recipe[2] is not None


def _named(beside: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The tensors beside q, k and v as operands."""
    return dict(zip(recipes.OFFSETS if len(beside) > 1 else (recipes.KEEP,), beside, strict=True)) if beside else {}


def _hides_keys_alone(problem: Problem) -> bool:
    """Whether `keep`, if the problem has one, hides the same keys from all rows.

    Only such a one is left to the extension: forward and backward each read it then, where those in Python share what
    one read of it gives. Of a flag per key that is nothing.
    """
    return problem.seq_q == 1 or all(term.rows_alike for term in problem.scores if isinstance(term, Keep))


def _held_offsets(constants: Operands) -> tuple[Tensor, ...] | None:
    """Those of documents that run as packed sequences: a constant of all calls with their mask."""
    names = recipes.OFFSETS
    return tuple(constants[name] for name in names) if all(name in constants for name in names) else None


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _described(call: Call, form: Form, q: Tensor, k: Tensor, v: Tensor, beside: tuple[Tensor, ...]) -> Any:
    assert call.plan is not None
    problem = in_terms(call.problem)
    constants = mask_operands(call.problem, q.device)
    reports = any(term.outputs for term in problem.scores)
    named = _named(beside)
    unknown = {operand.name for operand in problem.operands} ^ {*constants, *named}
    if call.lacks_memory or problem.empty or reports or unknown or run.goes_by_spans(call.problem):
        return None
    if not _hides_keys_alone(problem):
        return None
    if call.plan.forward is None or not native.knows_streams_of(q.device):
        return None
    out = empty_out(q, problem.head_dim_v, problem.layout)
    if form == TURNED and not _raw(out, _form_of_out(form)).is_contiguous():
        return None
    operands = run.forward_operands(problem, q, k, v, out, {**constants, **named})
    recipe = recipes.recipe_of(call.plan.forward, operands, run.device_index(q.device))
    held = _held_offsets(constants)
    if recipe is None or (_prepares(recipe) and not (beside or held)):
        return None
    _give_counters(recipe, q.device)
    owner = Repeated(call._replace(native=None), form, constants)
    raw = [_raw(tensor, form) for tensor in (q, k, v)]
    lse = tuple(out.shape[form == PACKED : 3]) if run.makes_lse(problem) else None
    returns_lse = call.options.needs_lse
    made = _shape(_raw(out, _form_of_out(form))), lse, returns_lse, problem.needs_grad
    return native.calls.new_call(*raw, named.get(recipes.KEEP), held, recipe, *made, owner)


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
    first: Tensor | None,
    second: Tensor | None,
    wanted: int,
    learn: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v of which `wanted` has the bits; with `learn`, such a backward is known afterwards.

    `first`, `second`: what the call read beside q, k and v.
    """
    call, form, _ = repeated
    flags = tuple(bool(wanted >> place & 1) for place in range(len(INPUTS)))
    if form == PACKED:
        lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
    saved = _viewed(q, form), _viewed(k, form), _viewed(v, form), _viewed(out, _form_of_out(form)), lse
    seen = None if dout is None else _viewed(dout, _form_of_out(form))
    beside = tuple(tensor for tensor in (first, second) if tensor is not None)
    grads = op.gradients(call, saved, beside, (*flags, *(False for _ in beside)), seen, dlse)[: len(INPUTS)]
    if learn and dout is not None and not _is_captured(q):
        _learn_backward(known, repeated, dout, saved, beside, wanted, flags)
    return tuple(None if grad is None else _raw(grad, form) for grad in grads)


def _learn_backward(
    known: Any,
    repeated: Repeated,
    dout: Tensor,
    saved: tuple[Tensor, ...],
    beside: tuple[Tensor, ...],
    wanted: int,
    flags: tuple[bool, ...],
) -> None:
    call, form, constants = repeated
    q, k, v, out, _ = saved
    problem, wants = in_terms(call.problem), chosen(INPUTS, flags)
    tensors = {"dout": _viewed(dout, _form_of_out(form)), "q": q, "k": k, "v": v, "out": out, **constants}
    tensors |= _named(beside)
    recipe, zeroed = None, 0
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    try:
        program = op.backward_program(call, wants)
        operands = run.backward_operands(problem, wants, tensors)
        recipe = recipes.recipe_of(program, operands, run.device_index(q.device))
        if recipe is not None and _prepares(recipe) and not (beside or _held_offsets(constants)):
            recipe = None
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


def _form_of_out(form: Form) -> Form:
    return "bshd" if form == TURNED else form


def _viewed(tensor: Tensor, form: Form) -> Tensor:
    """(batch, heads, seq, head_dim), of a tensor as the caller has it."""
    if form in ("bhsd", TURNED):
        return tensor
    if form == PACKED:
        return tensor.transpose(0, 1).unsqueeze(0)
    return tensor.transpose(1, 2) if form == "bshd" else tensor.unsqueeze(0)


def _raw(tensor: Tensor, form: Form) -> Tensor:
    """The other way."""
    if form in ("bhsd", TURNED):
        return tensor
    if form == PACKED:
        return tensor.squeeze(0).transpose(0, 1)
    return tensor.transpose(1, 2) if form == "bshd" else tensor.squeeze(0)


def _shape(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()
