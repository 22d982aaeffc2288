"""Which Call a Request had before: the only code that knows when two calls are equal.

Three identities of a call remain, each a refinement of the one before it:

    key     everything that decides a call: form, options, the layouts, dtypes, devices and alignments of all tensors,
            what requires grad, and PyTorch's switch for determinism. One look-up per call (`find`).
    guard   torch.compile's test of q, k and v, for requests that have no other tensors: a third of the time of a key.
            It compares what a key holds of the three, and the keys that PyTorch dispatches them by. These change under
            autocast, modes, transforms and traces, so a call that passes a guard meets none of them.
    recipe  the words by which the native extension knows a call (native/calls.h), without Python. It is learnt from a
            call that was found here, and forgotten with it.

Whatever changes what a call would be (kernels that do not build, tuned tables, the environment) calls
`memo.invalidate`, which empties all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import masks
from ..memo import Memo, on_invalidate
from ..operands import Operands, address
from ..torch_seam.switches import are_ordinary, autocast_is_on, forward_ad, is_deterministic, is_watched
from .build import Call, build
from .request import PACKED, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..problem import Problem

Tensor = torch.Tensor
_calls: Memo[Call] = Memo()


def find(request: Request) -> Call | None:
    """The Call that was remembered for a request like this one; None = resolve and build it.

    A repeated call costs one look-up here, and its checks and plan are those of the first.
    """
    _, q, k, v, extras, operands, _ = request
    try:
        plain = not extras and not operands
        if plain and (guarded := _by_guard(request)) is not None:
            return guarded
        if not (type(q) is type(k) is type(v) is Tensor) or is_watched():
            return None
        if not plain and not (are_ordinary(extras.values()) and are_ordinary(operands.values())):
            return None
        known = _calls.get(key_of(request, needed_grads(request)))
    except (AttributeError, RuntimeError, TypeError):  # a wrong type among the arguments, which `resolve` names
        return None
    if known is not None and plain:
        _remember_guard(known, request)
    return known


def made(request: Request, problem: Problem, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> Call:
    """The Call of a request that `find` does not know, which knows it from now on: built for the views and operands
    that the request was resolved to."""
    call, before = build(problem, q, k, v, operands, request.options.backend, generation)
    reports = any(term.outputs for term in problem.scores)
    if not (operands or reports or problem.needs_grad or call.lacks_memory):
        call = call._replace(is_plain=True)
    others = (*request.extras.values(), *request.operands.values())
    if type(request.q) is type(request.k) is type(request.v) is Tensor and are_ordinary(others) and not is_watched():
        _put(key_of(request, needed_grads(request)), call, before)
    return call


def generation() -> int:
    """A number that changes when everything is forgotten."""
    return _calls.generation


def prepared(request: Request, grads: tuple[str, ...] | None, describe: Callable[[], Problem]) -> Call:
    """The Call of a registered operator, validated and planned on first sight.

    `grads`: the operands whose gradients are needed, beside those of q, k and v; None = there will be no backward.
    """
    key = key_of(request, grads)
    call = _calls.get(key)
    if call is None:
        problem = describe().with_(needs_grad=grads is not None, operand_grads=grads or ())
        _, q, k, v, _, operands, options = request
        call, before = build(problem, q, k, v, operands, options.backend, generation)
        _put(key, call, before)
    return call


def needed_grads(request: Request) -> tuple[str, ...] | None:
    """Which of the tensors beside q, k and v need gradients; None where there will be no backward."""
    form, q, k, v, extras, operands, _ = request
    if not torch.is_grad_enabled() or not form.differentiable:
        return None
    if extras or operands:
        names = [name for given in (extras, operands) for name, tensor in given.items() if tensor.requires_grad]
        if names:
            return tuple(names)
    return () if q.requires_grad or k.requires_grad or v.requires_grad else None


def _put(key: Any, call: Call, before: int) -> None:
    # What has no fixed size is the mask, in the options or as their text, and in the problem.
    _calls.put(key, call, before, 3 * masks.size_in_bytes(call.problem.mask))


def key_of(request: Request, grads: tuple[str, ...] | None) -> tuple[Any, ...]:
    """First: by which bits an address misses a multiple of 16 bytes, and whether one of q, k and v has no memory that
    holds its values. The offsets stand for the bits where addresses are out of reach."""
    form, q, k, v, extras, operands, options = request
    addresses: Any
    try:
        at_q, at_k, at_v = address(q), address(k), address(v)
        addresses = (at_q | at_k | at_v) & 15
        lacks_memory = not (at_q and at_k and at_v) or q.is_neg() or k.is_neg() or v.is_neg()
    except RuntimeError:
        addresses, lacks_memory = (q.storage_offset(), k.storage_offset(), v.storage_offset()), False
    return (
        addresses, lacks_memory, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
        v.dtype, q.device, k.device, v.device, form, grads, is_deterministic(), options,
        tuple([_facts(one) for one in extras.items()]) if extras else None,
        tuple([_facts(one) for one in operands.items()]) if operands else None,
        form is PACKED and extras["cu_seqlens_q"] is extras["cu_seqlens_k"],
    )  # fmt: skip


def _facts(operand: tuple[str, Tensor]) -> tuple[Any, ...]:
    name, tensor = operand
    try:
        misaligned = address(tensor) & 15
    except RuntimeError:
        misaligned = -1 - int(tensor.storage_offset())
    return name, misaligned, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


# ---------------------------------------------------------------------------------------------------------------------
# Guards

_MAX_ALIKE = 4  # kinds of tensors for the same options and number of keys: each costs those behind it a comparison
_guarded: Memo[tuple[tuple[Callable[..., bool], int, Call], ...]] = Memo()
on_invalidate(_guarded.clear)  # once more behind all Memos: what was found in `_calls` until then may have been put in


def _by_guard(request: Request) -> Call | None:
    form, q, k, v, _, _, options = request
    alike = _guarded.get((torch.is_grad_enabled(), is_deterministic(), k.numel(), form, options))
    if alike is None or forward_ad._current_level >= 0:
        return None
    for fits, misaligned, call in alike:
        if fits(q, k, v):
            at_q, at_k, at_v = address(q), address(k), address(v)
            if at_q and at_k and at_v and (at_q | at_k | at_v) & 15 == misaligned:
                return call
    return None


def _remember_guard(call: Call, request: Request) -> None:
    """Let the guard find this Call, which the key has found for the same tensors."""
    form, q, k, v, _, _, options = request
    if not GUARDS_HOLD or call.lacks_memory or autocast_is_on() or q is k or k is v or v is q:
        return  # no guard fits a tensor that is given twice
    key = torch.is_grad_enabled(), is_deterministic(), k.numel(), form, options
    before = _guarded.generation
    known = _guarded.get(key) or ()
    if len(known) < _MAX_ALIKE and _calls.get(key_of(request, needed_grads(request))) is call:
        misaligned = (address(q) | address(k) | address(v)) & 15
        one = guard_of(q, k, v), misaligned, call
        _guarded.put(key, (*known, one), before, masks.size_in_bytes(call.problem.mask))


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """Whether other tensors are like these: in type, dtype, device, sizes, strides, requires_grad and dispatch keys."""
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(  # type: ignore[no-any-return]
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check


def _guards_hold() -> bool:
    """Whether guards compare what is written above. They are torch.compile's, and no interface: so they are tried."""
    try:
        one, two, three, four = (torch.empty((2, 4, 6, 8), device="cpu") for _ in range(4))
        others = (
            one.half(), one[:1], one[None], one.transpose(0, 1).contiguous().transpose(0, 1), one.to("meta"),
            one.detach().requires_grad_(), torch._neg_view(one), torch.nn.Parameter(one.detach(), requires_grad=False),
        )  # fmt: skip
        fits = guard_of(one, two, three)
        with torch._C._AutoDispatchBelowAutograd():
            below = fits(one, two, three)
        apart = not any(fits(other, two, three) or fits(two, three, other) for other in others)
        return fits(four, one, two) is True and apart and not below
    except Exception:  # whatever a later release does
        return False


with torch.inference_mode(False):  # wherever this is imported
    GUARDS_HOLD = _guards_hold()
