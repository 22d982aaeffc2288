"""A Request answered: by a Call that is known, or that is made for it, in whichever way PyTorch's state asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import native as extension
from ..errors import UnsupportedProblem
from ..operands import NO_OPERANDS, Operands
from ..plan import BACKENDS, plan
from ..problem import check_tensors
from ..sequences import check_values
from ..target import Target
from ..torch_kernels import candidates
from ..torch_seam import traced
from ..torch_seam.autograd import apply_planned
from ..torch_seam.ops import dispatched, register_flops, reporting
from ..torch_seam.switches import (
    are_ordinary,
    autocast_is_on,
    is_jit_traced,
    is_plain,
    is_transformed,
    recorded,
    refuse_jit_trace,
    with_memory,
    without_autocast,
)
from . import native
from .memory import find, made
from .request import BHSD, IS_TENSOR, Request, Results, new_results, operands_of
from .resolve import Resolved, drawn_seed, reduced, resolve

if TYPE_CHECKING:
    from ..plan import Plan
    from ..problem import Problem
    from .build import Call

Tensor = torch.Tensor
Reported = dict[str, Tensor] | None
"""What terms report, by name; None where none does."""


def attend(request: Request) -> Results:
    """The results of a request, in its form."""
    options: Any = request.options
    mask = options.mask
    if mask is IS_TENSOR or (mask is not None and type(mask) is not str and getattr(mask, "holds_tensors", False)):
        request = reduced(request)
        options = request.options
    if torch.compiler.is_compiling():
        return _traced(request)
    call = find(request)
    if call is None:
        return _first(request)
    if call.plan is not None and extension.ready() is not None:
        native.learn(call, request)
    return execute(call, request)


def call_of(request: Request) -> Call | None:
    """The Call of a request, checked and built, and not run; None where PyTorch's state asks for another way."""
    call = find(request)
    if call is not None:
        return call
    refuse_jit_trace("attention_cached")
    resolved = resolve(request)
    views = resolved.q, resolved.k, resolved.v
    if is_transformed(*views) or not is_plain(*views) or not are_ordinary(resolved.operands.values()):
        return None
    return made(request, resolved.problem(), *views, resolved.operands)


def execute(call: Call, request: Request) -> Results:
    """Run a Call on the tensors of a request that it was found by."""
    form, q, k, v, extras, operands, options = request
    if call.is_plain and form is BHSD and not autocast_is_on():
        return new_results((*call.forward(q, k, v, NO_OPERANDS), None))
    given: Operands = NO_OPERANDS
    if extras or operands:
        given = operands_of(request)
        if call.reads_places:
            check_values(call.problem, given)
    results: Reported = None
    if options.dropout:
        given = {**given, "seed": drawn_seed(q.device)}
    if options.return_max_logit:
        results = {}
    if form is not BHSD and (call.problem.needs_grad or not call.is_ours or call.lacks_memory):
        q, k, v = form.views(q, k, v)
    if form.differentiable or call.is_ours:
        out, lse = run(call, q, k, v, given, results)
    else:
        with torch.no_grad():
            out, lse = run(call, q, k, v, given, results)
    if form is BHSD and results is None:
        return new_results((out, lse, None))
    return _in_form(request, out, lse, results)


def run(
    call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands, results: Reported = None
) -> tuple[Tensor, Tensor | None]:
    """Run a Call on plain views of its layouts; `results` takes what terms report."""
    if results is not None:
        return run(reporting(call, results), q, k, v, operands)
    if autocast_is_on():
        with without_autocast():
            return run(call, q, k, v, operands)
    if call.lacks_memory:
        q, k, v = with_memory(q), with_memory(k), with_memory(v)
    if not call.problem.needs_grad:
        if operands:
            operands = {name: with_memory(tensor) for name, tensor in operands.items()}
        return call.forward(q, k, v, operands)
    tensors = [with_memory(operands[name]) for name in call.names] if operands else ()
    result = apply_planned(q, k, v, call, *tensors)
    return result if call.problem.needs_lse else (result, None)


def _in_form(request: Request, out: Tensor, lse: Tensor | None, results: Reported) -> Results:
    form = request.form
    max_logit = None if results is None else results["max_logit"]
    return Results(form.out.raw(out), None if lse is None else form.lse.raw(lse), max_logit)


def _traced(request: Request) -> Results:
    results: Reported = {} if request.options.return_max_logit else None
    out, lse = traced.attend(resolve(request), results)
    return _in_form(request, out, lse, results)


def _first(request: Request) -> Results:
    """A request that no Call is known for."""
    options = request.options
    if request.form.is_inner:
        refuse_jit_trace("attention_" + request.form.name.partition("_")[0])
    elif options.return_max_logit:
        refuse_jit_trace("attention: return_max_logit")
    results: Reported = {} if options.return_max_logit else None
    with torch.set_grad_enabled(torch.is_grad_enabled() and request.form.differentiable):
        out, lse = _by_state(request, resolve(request), results)
    return _in_form(request, out, lse, results)


def _by_state(request: Request, resolved: Resolved, results: Reported) -> tuple[Tensor, Tensor | None]:
    if resolved.options.dropout:
        if is_jit_traced() is not None:
            return traced.attend(resolved, results)
        problem, chosen = _planned(resolved)
        if chosen.backend in traced.TORCH_KERNELS:
            return _outside(resolved, problem, chosen, results)
        resolved = resolved.with_dropout_term(drawn_seed(resolved.q.device))
    q, k, v, operands = resolved.q, resolved.k, resolved.v, resolved.operands
    if is_transformed(q, k, v, *operands.values()):
        if not resolved.differentiable:
            raise UnsupportedProblem(
                "attention_cached in a transform of torch.func or under forward-mode AD: it has no derivatives, and "
                "takes its batch as one.",
                remedy="call it outside of the transform, or tilewise.attention",
            )
        return _outside(resolved, *_planned(resolved), results)
    if not is_plain(q, k, v) or not are_ordinary(operands.values()):
        check_tensors(q, k, v)
        register_flops()
        options = resolved.lowered()
        return dispatched(q, k, v, list(operands.values()), options, options.outputs, results)
    call = made(request, resolved.problem(), q, k, v, operands)
    if call.reads_places:
        check_values(call.problem, operands)
    return run(call, q, k, v, operands, results)


def _planned(resolved: Resolved) -> tuple[Problem, Plan]:
    """The problem of a call, and the backend that computes it."""
    q, k, v = resolved.q, resolved.k, resolved.v
    problem = resolved.problem().with_(transformed=is_transformed(q, k, v, *resolved.operands.values()))
    return problem, plan(problem, Target.of(q.device), resolved.options.backend)


def _outside(resolved: Resolved, problem: Problem, chosen: Plan, results: Reported) -> tuple[Tensor, Tensor | None]:
    """Calls our op must not see: transforms and forward AD need composite code, PyTorch's dropout its own autograd."""
    q, k, v = with_memory(resolved.q), with_memory(resolved.k), with_memory(resolved.v)
    if not problem.dropout:

        def forward(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
            compute: Any = BACKENDS[chosen.backend].forward
            reported = () if results is None else (results,)
            return compute(q, k, v, problem, chosen.config, operands, *reported)  # type: ignore[no-any-return]

        return recorded(forward, q, k, v, resolved.operands)
    candidate = next(c for c in candidates.CANDIDATES if c.name == chosen.backend)

    def dropped(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
        return candidate.dropout_forward(q, k, v, problem, operands), None

    if candidate is candidates.MATH:
        return recorded(dropped, q, k, v, resolved.operands)
    with without_autocast():  # a kernel, with a derivative of its own
        return dropped(q, k, v, resolved.operands)
