"""The registered operators: tilewise::attention and tilewise::attention_backward, with fakes, autograd and flops.

Everything that needs PyTorch's dispatcher to see attention (torch.compile, export, fake tensors, dispatch modes, tensor
subclasses) goes through these operators, whose kernels run the same Calls. Masks and terms travel as text, and operands
as a list in the order of `Problem.operands`. Forward-mode AD would lose its tangents here without a word, so the
operators refuse it; call/execute.py routes such calls elsewhere.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import library as torch_library

from .. import masks
from ..backend import empty_lse, empty_out, lse_dtype
from ..call.request import Lowered
from ..errors import InvalidInput, UnsupportedProblem
from ..hook import left_uncompiled
from ..operands import INPUTS, NO_OPERANDS, chosen
from ..plan import AUTO, check_backend
from ..problem import check_shapes, check_tensors
from ..scores import parse_all
from ..sequences import check_values
from .autograd import (
    backward_op,
    changed,
    check_results,
    described,
    differentiable_grads,
    prepare,
    wants_composite,
    with_lse,
)
from .switches import has_tangent, without_autocast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..call.build import Call
    from ..operands import Operands

Tensor = torch.Tensor


def dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    options: Lowered,
    outputs: list[str],
    results: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Through the registered operators; `results` takes what terms report, under the names of their outputs."""
    if results is None:
        return torch.ops.tilewise.attention(q, k, v, tensors, *options)  # type: ignore[no-any-return]
    out, lse, reported = torch.ops.tilewise.attention_with_results(q, k, v, tensors, [], *options)
    for name, tensor in zip(outputs, reported, strict=True):
        results[name] = tensor
    return out, lse


def reporting(call: Call, results: dict[str, Tensor]) -> Call:
    """The Call that puts what terms report of its one forward into these results."""
    forward: Any = call.forward
    return call._replace(forward=lambda q, k, v, operands: forward(q, k, v, operands, results))


_OF_OPERANDS = tuple(f"{kind.kind}:" for kind in (masks.Packed, masks.Cached))


def named_operands(options: Lowered, tensors: Sequence[Tensor] | None) -> Operands:
    """The operators' list of operands by name: that of the mask, if it is a tensor, then those of the terms.

    AOTInductor hands over None for an empty list.
    """
    tensors = tensors or ()
    names = [operand.name for term in parse_all(options.scores) for operand in term.tensors]
    if options.mask == "" and tensors:
        names.insert(0, "keep" if tensors[0].dtype == torch.bool else "bias")
    elif options.mask.startswith(_OF_OPERANDS):
        names = [*(operand.name for operand in masks.parse(options.mask).operands), *names]
    if len(names) != len(tensors):
        raise InvalidInput(
            "operands", f"{len(tensors)} tensors", ", ".join(names) or "none", "pass those that mask and scores name"
        )
    return dict(zip(names, tensors, strict=True)) if names else NO_OPERANDS


class Dispatched(torch.autograd.Function):
    """tilewise::attention_with_lse and tilewise::attention_backward, for code that observes the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Lowered, wants: list[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        reported: list[Tensor] = []
        with torch._C._AutoDispatchBelowAutograd():
            if options.outputs:
                made = torch.ops.tilewise.attention_with_results(q, k, v, list(tensors), wants, *options)
                out, lse, reported = made
            else:
                out, lse = torch.ops.tilewise.attention_with_lse(q, k, v, list(tensors), wants, *options)
            if type(out) is Tensor and out._is_view() and not torch.compiler.is_compiling():
                out = out.new_empty(0).set_(out)  # type: ignore[call-overload]  # as in Planned
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, *tensors)  # as Planned: a checkpoint may recompute one by the other
        if not options.needs_lse:
            ctx.mark_non_differentiable(lse, *reported)
        elif reported:
            ctx.mark_non_differentiable(*reported)
        ctx.set_materialize_grads(False)
        return out, lse, *reported

    @staticmethod
    @left_uncompiled
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        flags = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(flags)
        flags = (*flags[:3], *flags[5:])
        if wants_composite():
            check_results(q, v, out, lse)
            operands = named_operands(ctx.options, tensors)
            wants = chosen((*INPUTS, *operands), flags)
            grads = tuple(name for name in operands if name in wants)
            problem = prepare(q, k, v, operands, ctx.options._replace(backend="reference"), grads).problem
            found = differentiable_grads(dout, dlse, q, k, v, operands, problem, wants)
            return *(found.get(name) for name in INPUTS), None, None, *(found.get(name) for name in operands)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, *others = backward_op(dout, dlse, out, lse, q, k, v, tensors, ctx.options, flags)
        return dq, dk, dv, None, None, *others


_OPTIONS = "str mask, float? scale, str scores, str layout, str backend, bool needs_lse, str precision='exact'"
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor[] operands"
# `wants`: which gradients will be, or are, asked for: of q, k and v, then of the operands.
_SCHEMAS = {
    "attention": f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    "attention_with_lse": f"({_TENSORS}, bool[] wants, {_OPTIONS}) -> (Tensor, Tensor)",
    # With what terms report behind lse. `wants` is empty where autograd has not asked yet.
    "attention_with_results": f"({_TENSORS}, bool[] wants, {_OPTIONS}) -> (Tensor, Tensor, Tensor[])",
    "attention_backward": (
        f"(Tensor dout, Tensor? dlse, {_TENSORS}, Tensor out, Tensor lse, bool[] wants, {_OPTIONS}) -> Tensor[]"
    ),
}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    wants: list[bool] | None,
    options: Lowered,
    results: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A forward that will be differentiated where there are `wants`.

    Its backward plans anew, from what autograd or the compiler hands back: with other strides "auto" may mean another
    backend. An out and an lse are all that any of them needs, so "auto" always makes both.
    """
    if wants and options.backend == AUTO:
        options = options._replace(needs_lse=True)
    operands = named_operands(options, tensors)
    grads = tuple(name for name, want in zip(operands, wants[3:], strict=True) if want) if wants else None
    call = prepare(q, k, v, operands, options, grads)
    if call.reads_places:
        check_values(call.problem, operands)
    with without_autocast():
        out, lse = (call if results is None else reporting(call, results)).forward(q, k, v, operands)
    return with_lse(q, out, lse) if options.needs_lse or wants else (out, _no_lse(q))


def _attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, tensors, None, Lowered(*options))


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, tensors, wants, Lowered(*options))


def _attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Either of the two above, with what terms report."""
    named, results = Lowered(*options), dict[str, Tensor]()
    out, lse = _forward(q, k, v, tensors, wants, named, results)
    return out, lse, [results[name] for name in named.outputs]


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], out: Tensor, lse: Tensor,
    wants: list[bool], *options: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients with the strides of empty_like(input), as the fake kernel promises; empty where not wanted."""
    named = Lowered(*options)
    operands = named_operands(named, tensors)
    wanted = chosen((*INPUTS, *operands), tuple(wants))
    check_results(q, v, out, lse)
    if (dout.shape, dout.dtype) != (out.shape, out.dtype):
        raise changed("dout", (dout.shape, dout.dtype), (out.shape, out.dtype))
    if dlse is not None and dlse.shape != lse.shape:
        raise changed("dlse", (dlse.shape,), (lse.shape,))
    call = prepare(q, k, v, operands, named, tuple(name for name in operands if name in wanted))
    with without_autocast():
        grads = call.backward(dout, dlse, (q, k, v, out, lse), operands, wanted)
    given = {"q": q, "k": k, "v": v, **operands}
    return [_like(grads.get(name), tensor) for name, tensor in given.items()]


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor:
    if grad is None:
        return tensor.new_empty(0)
    wanted = torch.empty_like(tensor)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


def _check_fake(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], options: Lowered) -> None:
    """Raise for whatever could not be planned, as far as a trace knows the sizes; the rest is checked when it runs."""
    check_backend(options.backend)
    operands = named_operands(options, tensors)
    if all(type(size) is int for tensor in (q, k, v, *tensors) for size in tensor.shape):
        described(q, k, v, operands, options)
    else:
        check_tensors(q, k, v)
        if not options.mask.startswith(masks.Cached.kind):
            check_shapes(q, k, v, options.layout)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool] | None, options: Lowered
) -> tuple[Tensor, Tensor]:
    _check_fake(q, k, v, tensors, options)
    lse = empty_lse(q) if options.needs_lse or wants else _no_lse(q)
    return empty_out(q, v.shape[-1], options.layout), lse


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(q, k, v, tensors, None, Lowered(*options))


def _fake_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    return _fake_forward(q, k, v, tensors, wants, Lowered(*options))


def _fake_attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All that terms report is a number per head."""
    named = Lowered(*options)
    reported = [q.new_empty(q.shape[1], dtype=lse_dtype(q.dtype)) for _ in named.outputs]
    return (*_fake_forward(q, k, v, tensors, wants, named), reported)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], out: Tensor, lse: Tensor,
    wants: list[bool], *options: Any,
) -> list[Tensor]:  # fmt: skip
    given = zip((q, k, v, *tensors), wants, strict=True)
    return [torch.empty_like(tensor) if want else tensor.new_empty(0) for tensor, want in given]


def _refuse_tangents(*tensors: Tensor) -> None:
    if has_tangent(*tensors):
        raise UnsupportedProblem(
            "tilewise::attention has no forward-mode derivative, and would drop the tangents of its inputs.",
            remedy="call tilewise.attention, which routes forward-mode AD to a composite backend",
        )


def _autograd_attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    tensors = tensors or []  # see named_operands
    _refuse_tangents(q, k, v, *tensors)
    register_flops()
    given = (q, k, v, *tensors)
    wants = [tensor.requires_grad for tensor in given]
    if torch.is_grad_enabled() and True in wants:
        named = Lowered(*options)
        out, lse = Dispatched.apply(q, k, v, named, wants, *tensors)  # type: ignore[no-untyped-call]
        return out, lse if named.needs_lse else _no_lse(q)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.attention(q, k, v, tensors, *options)  # type: ignore[no-any-return]


def _autograd_attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tensors = tensors or []
    _refuse_tangents(q, k, v, *tensors)
    register_flops()
    asked = [tensor.requires_grad for tensor in (q, k, v, *tensors)]
    if torch.is_grad_enabled() and True in asked:
        named = Lowered(*options)
        out, lse, *reported = Dispatched.apply(q, k, v, named, asked, *tensors)  # type: ignore[no-untyped-call]
        return out, lse if named.needs_lse else _no_lse(q), reported
    with torch._C._AutoDispatchBelowAutograd():  # a graph that autograd was traced into has its `wants`
        return torch.ops.tilewise.attention_with_results(q, k, v, tensors, wants, *options)  # type: ignore[no-any-return]


for _name, _kernel, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_with_results", _attention_with_results, _fake_attention_with_results),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
    ("attention_backward", _attention_backward, _fake_backward),
):
    torch_library.define(f"tilewise::{_name}", _SCHEMAS[_name])
    torch_library.impl(f"tilewise::{_name}", "CompositeExplicitAutograd", left_uncompiled(_kernel))
    torch_library.register_fake(f"tilewise::{_name}", _fake)
torch_library.impl("tilewise::attention", "Autograd", left_uncompiled(_autograd_attention))
torch_library.impl("tilewise::attention_with_results", "Autograd", left_uncompiled(_autograd_attention_with_results))


# ---------------------------------------------------------------------------------------------------------------------
# FlopCounterMode


def register_flops() -> None:
    """Give PyTorch's FlopCounterMode our formulas, once one counts: its module is too slow to import for all.

    It copies the table of formulas when it is made, so one that counts already gets them as well.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: PLC0415

    ours = {
        torch.ops.tilewise.attention: _forward_flops,
        torch.ops.tilewise.attention_with_lse: _training_flops,
        torch.ops.tilewise.attention_with_results: _training_flops,
        torch.ops.tilewise.attention_backward: _backward_flops,
    }
    module.flop_registry |= ours
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry |= ours


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], *options: Any, out_val: Any = None) -> int:
    """Of the pairs that the mask shows; all of them where it is a tensor, whose content is not read."""
    return 2 * _visible_pairs(q, k, operands, Lowered(*options)) * (q.shape[-1] + v.shape[-1])


def _training_flops(
    q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], wants: list[bool], *options: Any, out_val: Any = None
) -> int:
    return _forward_flops(q, k, v, operands, *options)


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], out: Tensor,
    lse: Tensor, wants: list[bool], *options: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """S, dQ and dK over head_dim, dP and dV over head_dim_v."""
    return 2 * _visible_pairs(q, k, operands, Lowered(*options)) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _visible_pairs(q: Tensor, k: Tensor, tensors: list[Tensor], options: Lowered) -> int:
    batch, heads, seq_q, _ = q.shape
    if options.mask == "":
        return batch * heads * seq_q * k.shape[2]
    mask, operands = masks.parse(options.mask), named_operands(options, tensors)
    return batch * heads * mask.of(q, k, operands).pairs(seq_q, mask.places(k, operands))
