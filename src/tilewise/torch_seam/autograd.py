"""Autograd: the backward of a Call, and gradients that are differentiated in turn.

`Planned` runs a Call. `Dispatched` (ops.py) calls the registered operators, its backward too, so that a compiled
backward sees it. Asked to be differentiable themselves (create_graph=True), both recompute through the reference, which
is made of torch operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import masks
from ..backend import empty_lse, lse_dtype
from ..call import memory
from ..call.build import STRIDES, layouts_of
from ..call.request import OPERATOR, Lowered, Request
from ..errors import InvalidInput
from ..hook import left_uncompiled
from ..operands import INPUTS, NO_OPERANDS, chosen
from ..plain import reference
from ..problem import describe
from ..scores import parse_all
from .switches import autocast_is_on, is_plain, recorded, with_memory, without_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..call.build import Call
    from ..operands import Grads, Operands, Wants
    from ..problem import Problem

Tensor = torch.Tensor


def prepare(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Lowered, grads: tuple[str, ...] | None
) -> Call:
    """The Call for these views with the options of an operator, remembered as `memory.prepared` says."""
    request = Request(OPERATOR, q, k, v, NO_OPERANDS, operands, options)  # type: ignore[arg-type]
    return memory.prepared(request, grads, lambda: described(q, k, v, operands, options))


def described(q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Lowered) -> Problem:
    """The Problem of an operator's arguments."""
    others = dict(operands)
    is_tensor = options.mask == "" and bool(others)
    mask: Any = others.pop(next(iter(others))) if is_tensor else masks.parse(options.mask)
    return describe(
        q,
        k,
        v,
        mask=mask,
        scale=options.scale,
        scores=parse_all(options.scores),
        operands=others,
        needs_lse=options.needs_lse,
        precision=options.precision,
    ).with_(layout=options.layout)


class Planned(torch.autograd.Function):
    """A Call and its backward, of q, k, v, the call and its operands. What is not returned (lse, mostly) is saved."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        operands = dict(zip(call.names, tensors, strict=True)) if tensors else NO_OPERANDS
        out, lse = call.forward(q, k, v, operands)
        if call.plan is None and out._is_view():  # autograd would not allow in-place changes of it or its views
            out = out.new_empty(0).set_(out)  # type: ignore[call-overload]
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        if not call.problem.needs_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @left_uncompiled
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        flags = ctx.needs_input_grad
        wanted = (*flags[:3], *flags[4:])
        return gradients(ctx.call, saved[:5], saved[5:], wanted, dout, dlse)


# Function.apply looks for functorch's transforms and their wrappers first. Plain calls have neither.
apply_planned: Callable[..., Any] = super(torch.autograd.Function, Planned).apply


def gradients(
    call: Call,
    saved: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    flags: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """A Call's backward: gradients in the places of the inputs of `Planned`.

    `saved`: q, k, v, out and lse as they came back; `tensors`: the operands; `flags`: what is wanted, of q, k, v and
    the operands.
    """
    q, k, v, out, lse = saved
    if dout is None and dlse is None:
        return (None,) * (len(flags) + 1)
    operands: Operands = dict(zip(call.names, tensors, strict=True)) if tensors else NO_OPERANDS
    wants = chosen((*INPUTS, *call.names), flags) if tensors else chosen(INPUTS, flags[:3])
    layouts = layouts_of(q, k, v)
    if call.layouts[:STRIDES] != layouts[:STRIDES]:
        raise changed("q, k and v", layouts[:STRIDES], call.layouts[:STRIDES])
    check_results(q, v, out, lse)
    if wants_composite():
        return _in_slots(differentiable_grads(dout, dlse, q, k, v, operands, call.problem, wants), call.names)
    dout = torch.zeros_like(out) if dout is None else with_memory(dout)
    dlse = None if dlse is None else with_memory(dlse)
    if call.gradient is not None and call.layouts != layouts:
        # Hooks on saved tensors, as of save_on_cpu, may lay them out anew; a bound gradient is for one layout.
        options = call.lowered._replace(backend=call.backend_name)
        call = prepare(q, k, v, operands, options, call.problem.operand_grads)
    if is_plain(dout, q, k):
        if not autocast_is_on():
            return _in_slots(call.backward(dout, dlse, (q, k, v, out, lse), operands, wants), call.names)
        with without_autocast():
            return _in_slots(call.backward(dout, dlse, (q, k, v, out, lse), operands, wants), call.names)
    options = call.lowered if lse is not None else call.lowered._replace(backend=call.backend_name)
    out, lse = with_lse(q, out, lse)
    dq, dk, dv, *others = backward_op(dout, dlse, out, lse, q, k, v, tensors, options, flags)
    return dq, dk, dv, None, *others


def with_lse(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """A backend whose backward needs no lse may have none; the operators return one all the same."""
    return out, empty_lse(q) if lse is None else lse


def check_results(q: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Raise InvalidInput for results that are not those of a forward of q and v. Kernels trust their sizes."""
    got = out.shape, out.dtype, out.device
    expected = (*q.shape[:3], v.shape[3]), q.dtype, q.device
    if got != expected:
        raise changed("out", got, expected)
    if lse is not None:
        got, expected = (lse.shape, lse.dtype, lse.device), (q.shape[:3], lse_dtype(q.dtype), q.device)
        if got != expected:
            raise changed("lse", got, expected)


def changed(name: str, got: tuple[Any, ...], expected: tuple[Any, ...]) -> InvalidInput:
    def listed(facts: tuple[Any, ...]) -> str:
        return ", ".join(str(tuple(fact) if isinstance(fact, tuple) else fact) for fact in facts)

    return InvalidInput(
        "backward",
        f"{name} of {listed(got)}",
        f"{listed(expected)}, as in the forward",
        "leave .data of what attention was given alone until its backward has run, and let hooks on saved tensors give "
        "back what they were given",
    )


def _in_slots(grads: Grads, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """Gradients in the places of the inputs of `Planned`."""
    if not names:
        return grads.get("q"), grads.get("k"), grads.get("v"), None
    return grads.get("q"), grads.get("k"), grads.get("v"), None, *(grads.get(name) for name in names)


# In force while autograd batches gradients (is_grads_batched=True): its tensors look plain, and have no memory.
_BATCHING: Any = torch._C._parse_dispatch_key("VmapMode")


def wants_composite() -> bool:
    """A gradient that is itself differentiated (create_graph=True), taken inside a functorch transform, or batched.

    PyTorch batches no operator that takes a list of tensors.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING)


def backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    options: Lowered,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the operands, in this order; None where not wanted."""
    grads = torch.ops.tilewise.attention_backward(dout, dlse, q, k, v, list(tensors), out, lse, list(wants), *options)
    return tuple(grad if want else None for grad, want in zip(grads, wants, strict=True))


def differentiable_grads(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands,
    problem: Problem,
    wants: Wants,
) -> Grads:
    """Gradients made of torch operations, through the reference: they can be differentiated again, and batched.

    Each input is a view of its own: q, k and v may be one tensor, or made of one another, and a gradient with respect
    to the tensors themselves would then collect what reaches one of them through the others. The gradients of these
    gradients still flow through the views to where the inputs came from. Operands that have no gradient are constants.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        views = {"q": q.view_as(q), "k": k.view_as(k), "v": v.view_as(v)}
        views |= {name: x.view_as(x) if name in wants else x.detach() for name, x in operands.items()}
        others = {name: views[name] for name in operands}
        out, lse = recorded(
            lambda q, k, v, operands: reference.forward(q, k, v, problem, None, operands),
            views["q"], views["k"], views["v"], others,
        )  # fmt: skip
        pairs = [
            (output, grad)
            for output, grad in ((out, dout), (lse, dlse))
            if grad is not None and output is not None and output.requires_grad  # lse is made without v
        ]
        if not pairs:
            return {}
        inputs = {name: view for name, view in views.items() if name in wants}
        outputs, grads_in = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(inputs.values()), grads_in, create_graph=again, allow_unused=True)
    return {name: grad for name, grad in zip(inputs, found, strict=True) if grad is not None}
