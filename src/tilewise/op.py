"""The torch seam: tilewise::attention and tilewise::attention_backward, with fake kernels and autograd.

`prepare` turns tensors and arguments into a Call (problem, backend, config), once per distinct signature. Plain eager
tensors run the Call directly; everything that needs PyTorch's dispatcher to see the operation (torch.compile, export,
fake tensors, dispatch modes, tensor subclasses) goes through the registered ops, whose kernels run the same Call.

Autograd is a `torch.autograd.Function` for either: `_Planned` runs a Call, `_Attention` dispatches ops, its backward
too, so that a compiled backward sees it. Asked to be differentiable themselves (create_graph=True) both recompute
through the reference, which is made of torch operations. Forward-mode AD would lose its tangents here without a word,
so the ops refuse it; the api routes such calls elsewhere.

What a call reads beside q, k and v are its operands: a mapping by name in here, and for the ops and for autograd the
list of these tensors in the order that the mask and the score terms define (`Problem.operands`).
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import library as torch_library

from . import masks
from .backend import empty_lse, empty_out, lse_dtype
from .engine import run as engine
from .engine.backend import Fused
from .errors import CompileError, InvalidInput, UnsupportedProblem
from .hook import left_uncompiled
from .isolation import check_where_asked
from .jit import build_all, is_loaded, tuned
from .jit.compile import notice
from .masks import Packed
from .memo import Memo, on_invalidate
from .operands import INPUTS, NO_OPERANDS, address, chosen
from .plain import reference
from .plan import AUTO, BACKENDS, check_backend, leave_out, plan
from .problem import check_shapes, check_tensors, describe, operands_with_grad
from .scores import parse_all
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from .backend import Backend
    from .engine.program import Program
    from .masks import Mask
    from .operands import Grads, Operands, Wants
    from .plan import Plan
    from .problem import Layout, Precision, Problem

Tensor = torch.Tensor

_log = logging.getLogger("tilewise")


class Options(NamedTuple):
    """The non-tensor arguments, in the order of the operators' schemas. Masks and terms travel as their text forms."""

    mask: str = "full"  # "" = the first operand is the mask
    scale: float | None = None
    scores: str = ""
    layout: Layout = "bhsd"
    backend: str = AUTO
    needs_lse: bool = False
    precision: Precision = "exact"


class Call(NamedTuple):
    """A planned call: everything but the tensors. `forward` gives out, and lse where it is needed and there is one."""

    problem: Problem
    backend: Backend
    config: Any
    options: Options
    names: tuple[str, ...]  # of its operands
    forward: Callable[[Tensor, Tensor, Tensor, Operands], tuple[Tensor, Tensor | None]]
    gradient: Callable[..., Grads] | None  # of (dout, dlse, q, k, v, out, lse, operands, wants), where it is bound
    layouts: tuple[Any, ...]  # of q, k and v, that it is for: `_layouts`
    lacks_memory: bool = False  # q, k or v is empty, or one for `with_memory`
    plan: Plan | None = None  # of our own kernels
    native: dict[Any, Any] | None = None  # what native code knows of it (repeated.py)

    @property
    def backend_name(self) -> str:
        return next(name for name, backend in BACKENDS.items() if backend is self.backend)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Any, ...], operands: Operands, wants: Wants
    ) -> Grads:
        if self.gradient is not None:
            return self.gradient(dout, dlse, *saved, operands, wants)
        q, k, v, out, lse = saved
        with _deterministic_as(self.problem, self.backend):
            return self.backend.backward(dout, dlse, q, k, v, out, lse, self.problem, self.config, operands, wants)


class _Switch:
    """PyTorch's switch for deterministic algorithms, on while somebody holds it. There is one for all threads.

    Invariant: the first holder notes where it stood and the last one puts it back there, in whatever order they leave.
    Autograd's threads, one for every GPU, hold it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[bool] = []  # for each of them, whether it needs the switch to be strict
        self._before = False, False  # enabled, warn_only

    @contextmanager
    def held(self, *, strict: bool) -> Iterator[None]:
        with self._lock:
            if not self._holders:
                self._before = torch._C._get_deterministic_algorithms(), _warns_only()
            self._holders.append(strict)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._holders.remove(strict)
                self._set()

    def _set(self) -> None:
        enabled, warn_only = self._before
        if self._holders:
            enabled, warn_only = True, not any(self._holders) and (warn_only or not enabled)
        # Below torch.use_deterministic_algorithms, which would turn the compiler's settings as well.
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


_switch = _Switch()
_warns_only: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only


def deterministic_algorithms() -> AbstractContextManager[None]:
    """PyTorch's switch on for a while, which calls are then planned by. Other threads may see a warning, no error."""
    return _switch.held(strict=False)


def _deterministic_as(problem: Problem, backend: Backend) -> AbstractContextManager[None]:
    """What was planned to be deterministic stays so, wherever the switch stands when the backward runs.

    PyTorch's fused kernels ask the switch, and with warn_only they warn and add in any order all the same: it has to be
    strict. So another thread that runs an operation without a deterministic algorithm, just while such a backward is
    launched, meets PyTorch's error. All other backends go by the Problem or have one order only, and need no switch.
    """
    if problem.deterministic and backend in _OBEY_THE_SWITCH:
        return _switch.held(strict=True)
    return _AS_IT_IS


_OBEY_THE_SWITCH = BACKENDS["torch-flash"], BACKENDS["torch-efficient"]
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


# Calls by everything that decides one (`_signature`): the tensors as bhsd views, and the arguments, either as a caller
# of `attention` gave them or as Options.
_calls: Memo[Call] = Memo()


def recall(q: Tensor, k: Tensor, v: Tensor, operands: Operands, arguments: Any) -> Call | None:
    """The Call that was remembered for tensors and arguments like these; None = take the long way.

    A repeated call costs one look-up here, and its checks and plan are those of the first.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or _is_watched():
        return None
    grads: tuple[str, ...] | None
    try:
        if not operands:  # the common case, without another call
            grads = () if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) else None
        elif _are_ordinary(operands):
            grads = needed_grads(q, k, v, operands)
        else:
            return None
        return _calls.get(_signature(q, k, v, operands, arguments, grads))
    except (RuntimeError, TypeError):  # a wrong type among the arguments: the long way says it
        return None


def remember(call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands, arguments: Any) -> None:
    """Let `recall` find this Call, which was prepared from the same tensors."""
    if type(q) is type(k) is type(v) is Tensor and not _is_watched() and _are_ordinary(operands):
        key = _signature(q, k, v, operands, arguments, needed_grads(q, k, v, operands))
        _calls.put(key, call, _calls.generation, _size(call))


def recall_alike(q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> Call | None:
    """`recall` of a call without operands by PyTorch's guards, a third of its time; None = ask `recall`.

    A guard compares all that a signature has of three tensors, and the keys that PyTorch dispatches them by. These
    change under autocast, dispatch modes, transforms and traces: what is found here meets none of them.
    """
    try:
        alike = _alike.get((torch.is_grad_enabled(), _is_deterministic(), k.numel(), arguments))
    except (AttributeError, TypeError):
        return None
    if alike is None or _forward_ad._current_level >= 0:
        return None
    for fits, misaligned, call in alike:
        if fits(q, k, v):
            at_q, at_k, at_v = address(q), address(k), address(v)
            if at_q and at_k and at_v and (at_q | at_k | at_v) & 15 == misaligned:
                return call
    return None


def remember_alike(call: Call, q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> None:
    """Let `recall_alike` find this Call, which `recall` has found for the same tensors."""
    if not _GUARDS_HOLD or call.lacks_memory or autocast_is_on() or q is k or k is v or v is q:
        return  # no guard fits a tensor that is given twice
    key = torch.is_grad_enabled(), _is_deterministic(), k.numel(), arguments
    generation = _alike.generation
    known = _alike.get(key) or ()
    if len(known) < _MAX_ALIKE and _calls.get(_signature(q, k, v, NO_OPERANDS, arguments, _grads(q, k, v))) is call:
        misaligned = (address(q) | address(k) | address(v)) & 15
        _alike.put(key, (*known, (_guard(q, k, v), misaligned, call)), generation, _size(call))


_MAX_ALIKE = 4  # kinds of tensors for the same arguments and number of keys: each costs those behind it a comparison
_alike: Memo[tuple[tuple[Callable[..., bool], int, Call], ...]] = Memo()
on_invalidate(_alike.clear)  # once more behind all Memos: what was found in `_calls` until then may have been put in
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def _guard(*tensors: Tensor) -> Callable[..., bool]:
    """Whether other tensors are like these: in type, dtype, device, sizes, strides, requires_grad and dispatch keys."""
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(  # type: ignore[no-any-return]
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check


def _guards_hold() -> bool:
    """Whether guards compare what is written above. They are torch.compile's, and no interface: so they are asked."""
    try:
        one, two, three, four = (torch.empty((2, 4, 6, 8), device="cpu") for _ in range(4))
        others = (
            one.half(), one[:1], one[None], one.transpose(0, 1).contiguous().transpose(0, 1), one.to("meta"),
            one.detach().requires_grad_(), torch._neg_view(one), torch.nn.Parameter(one.detach(), requires_grad=False),
        )  # fmt: skip
        fits = _guard(one, two, three)
        with torch._C._AutoDispatchBelowAutograd():
            below = fits(one, two, three)
        apart = not any(fits(other, two, three) or fits(two, three, other) for other in others)
        return fits(four, one, two) is True and apart and not below
    except Exception:  # whatever a later release does
        return False


def recall_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, arguments: Any) -> Call | None:
    """`recall` for packed tensors (total, heads, dim) and their offsets, without a view of any."""
    if not (type(q) is type(k) is type(v) is type(cu_q) is type(cu_k) is Tensor) or _is_watched():
        return None
    try:
        return _calls.get(_packed_signature(q, k, v, cu_q, cu_k, arguments))
    except (RuntimeError, TypeError):
        return None


def remember_packed(call: Call, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, arguments: Any) -> None:
    """Let `recall_packed` find this Call: one of our kernels, which read no shape but the one they are bound to."""
    if isinstance(call.backend, Fused) and not call.lacks_memory:
        _calls.put(_packed_signature(q, k, v, cu_q, cu_k, arguments), call, _calls.generation, _size(call))


def _packed_signature(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, arguments: Any) -> tuple[Any, ...]:
    at_q, at_k, at_v = address(q), address(k), address(v)
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        (at_q | at_k | at_v) & 15, not (at_q and at_k and at_v) or q.is_neg() or k.is_neg() or v.is_neg(), q.shape,
        k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        cu_q.shape, cu_k.shape, cu_q.stride(), cu_k.stride(), cu_q.dtype, cu_k.dtype, cu_q.device, cu_k.device,
        cu_q is cu_k, grads, torch._C._get_deterministic_algorithms(), arguments,
    )  # fmt: skip


def execute_packed(
    call: Call, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Run a Call that `recall_packed` found: out (1, heads, total, dim) and lse, as `execute` gives them."""
    if call.problem.needs_grad or autocast_is_on():
        views = q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        return execute(call, *views, {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k})
    return call.forward(q, k, v, {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k})


def _are_ordinary(operands: Operands) -> bool:
    return all(type(tensor) in _ORDINARY for tensor in operands.values())


def prepare(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options, grads: tuple[str, ...] | None
) -> Call:
    """The Call for these tensors in bhsd order, validated and planned on first sight and remembered by signature.

    `grads`: the operands whose gradients are needed beside those of q, k and v; None = there will be no backward.
    """
    key = _signature(q, k, v, operands, options, grads)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed is of a wrong type, which this says
        _described(q, k, v, operands, options)
        raise
    if call is None:
        call, generation = _planned(q, k, v, operands, options, grads)
        call = call._replace(lacks_memory=key[_LACKS_MEMORY])
        _calls.put(key, call, generation, _size(call))
    return call


def _size(call: Call) -> int:
    """Bytes of what has no fixed size: the mask, as its text in the key and the options, and in the problem."""
    return 2 * len(call.options.mask) + masks.size_in_bytes(call.problem.mask)


_LACKS_MEMORY = 1


def _signature(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, arguments: Any, grads: tuple[str, ...] | None
) -> tuple[Any, ...]:
    """The key of a call. First: by which bits an address misses a multiple of 16 bytes, and whether one of q, k and v
    has no memory that holds its values. The offsets stand for the bits where addresses are out of reach."""
    addresses: Any
    try:
        at_q, at_k, at_v = address(q), address(k), address(v)
        addresses = (at_q | at_k | at_v) & 15
        lacks_memory = not (at_q and at_k and at_v) or q.is_neg() or k.is_neg() or v.is_neg()
    except RuntimeError:
        addresses, lacks_memory = (q.storage_offset(), k.storage_offset(), v.storage_offset()), False
    return (
        addresses, lacks_memory, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
        v.dtype, q.device, k.device, v.device, grads, torch._C._get_deterministic_algorithms(), arguments,
        tuple(map(_facts, operands.items())) if operands else None,
    )  # fmt: skip


def _facts(operand: tuple[str, Tensor]) -> tuple[Any, ...]:
    name, tensor = operand
    try:
        misaligned = address(tensor) & 15
    except RuntimeError:
        misaligned = -1 - int(tensor.storage_offset())
    return name, misaligned, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory that holds its values: a kernel reads memory and nothing else.

    PyTorch's zero tensors have none, and lazily negated ones (`x.conj().imag`) have the opposite there.
    """
    return tensor.clone() if tensor._is_zerotensor() or tensor.is_neg() else tensor


def _described(q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options) -> Problem:
    others = dict(operands)
    is_tensor = options.mask == "" and bool(others)
    mask: Mask | Tensor = others.pop(next(iter(others))) if is_tensor else masks.parse(options.mask)
    if isinstance(mask, Packed) and "cu_seqlens_q" in others:
        mask = mask.of(others)
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


_PACKED = Packed.kind + ":"


def named_operands(options: Options, tensors: Sequence[Tensor] | None) -> Operands:
    """The operators' list of operands by name: that of the mask, if it is a tensor, then those of the terms.

    AOTInductor hands over None for an empty list.
    """
    tensors = tensors or ()
    names = [operand.name for term in parse_all(options.scores) for operand in term.tensors]
    if options.mask == "" and tensors:
        names.insert(0, "keep" if tensors[0].dtype == torch.bool else "bias")
    elif options.mask.startswith(_PACKED):
        names = [*(operand.name for operand in masks.parse(options.mask).operands), *names]
    if len(names) != len(tensors):
        raise InvalidInput(
            "operands", f"{len(tensors)} tensors", ", ".join(names) or "none", "pass those that mask and scores name"
        )
    return dict(zip(names, tensors, strict=True)) if names else NO_OPERANDS


def _planned(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options, grads: tuple[str, ...] | None
) -> tuple[Call, int]:
    """Plan, and build what was planned; what does not build is left out, and the plan is made again.

    With the generation of what is remembered as it was before the plan was made.
    """
    problem = _described(q, k, v, operands, options).with_(needs_grad=grads is not None, operand_grads=grads or ())
    return bound_call(problem, q, k, v, operands, options)


def bound_call(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options
) -> tuple[Call, int]:
    """`_planned` for tensors whose problem is known."""
    generation = _calls.generation
    planned = plan(problem, Target.of(q.device), options.backend)
    failed: CompileError | None = None
    while True:
        try:
            _build(planned)
            return _call(planned, q, k, v, operands, options), generation
        except CompileError as error:
            failed = error
            _leave_out(planned, error, options)
        generation = _calls.generation
        try:
            planned = plan(problem, planned.target, options.backend)
        except UnsupportedProblem:
            raise failed from None  # a backend that was asked for by name, and has nothing left


def _call(planned: Plan, q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options) -> Call:
    problem, backend, config = planned.problem, BACKENDS[planned.backend], planned.config
    names = tuple(operand.name for operand in problem.operands)
    forward, gradient = planned.forward, planned.backward
    layouts = _layouts(q, k, v)
    if forward is None:
        bound = _bound(backend, q, k, v, problem, config, operands)
        return Call(problem, backend, config, options, names, bound, _bound_gradient(backend, problem), layouts)
    bound = engine.bind_forward(lambda: forward, problem, q, k, v, operands)
    call = Call(problem, backend, config, options, names, bound, None, layouts, plan=planned, native={})
    if gradient is None:
        return call
    alone = isinstance(backend, Fused) and backend.makes_operands_alone(problem)
    programs = functools.partial(_backward_program, planned)
    return call._replace(gradient=engine.bind_backward(programs, problem, operands_alone=alone))


def backward_program(call: Call, wants: Wants) -> Program:
    """What makes these gradients of a call of our own kernels."""
    assert call.plan is not None
    return _backward_program(call.plan, None, wants)


def _backward_program(planned: Plan, device: torch.device | None, wants: Wants) -> Program:
    everything = frozenset((*INPUTS, *planned.problem.operand_grads))
    if planned.backward is not None and wants == everything:
        return planned.backward
    return planned.backward_for(wants)


def _build(chosen: Plan) -> None:
    """Every kernel of a plan, both directions side by side, before the first of them is needed."""
    missing = [unit for unit in chosen.units if not is_loaded(unit)]
    if not missing:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _log.warning("tilewise: kernels are built while a CUDA graph is captured; tilewise.warm_up before does without")
    with notice(f"{', '.join(unit.name for unit in missing)} for {missing[0].arch}"):
        for unit, built in build_all(missing):
            if isinstance(built, CompileError):
                built.unit = unit.label
                raise built


def _leave_out(chosen: Plan, error: CompileError, options: Options) -> None:
    """What failed counts no more: the tuned config it came from, or the kernel, or the backend if it names none."""
    first_line = str(error).splitlines()[0]
    in_backward = chosen.backward is not None and error.unit in {unit.label for unit in chosen.backward.units}
    if tuned.does_not_build(chosen.backward_config if in_backward else chosen.config, first_line):
        again = plan(chosen.problem, chosen.target, options.backend)
        if (again.config, again.backward_config) != (chosen.config, chosen.backward_config):
            return
    what = error.unit or chosen.backend
    if error.unit == "" and options.backend != AUTO:
        raise error
    _log.warning("%s is left out from now on, it does not build here: %s", what, error)
    leave_out(what, first_line)


def _bound(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Any, operands: Operands
) -> Callable[[Tensor, Tensor, Tensor, Operands], tuple[Tensor, Tensor | None]]:
    """The backend's forward for tensors of one signature. Those with a `bind` settle there what no call need repeat."""
    bind = getattr(backend, "bind", None)
    if bind is not None:
        return bind(q, k, v, problem, config, operands=operands)  # type: ignore[no-any-return]
    forward: Any = backend.forward
    if any(term.outputs for term in problem.scores):
        return lambda q, k, v, operands, *results: forward(q, k, v, problem, config, operands, *results)
    return lambda q, k, v, operands: forward(q, k, v, problem, config, operands)


def _bound_gradient(backend: Backend, problem: Problem) -> Callable[..., Grads] | None:
    bind = getattr(backend, "bind_backward", None)
    return bind(problem) if bind is not None and problem.needs_grad else None


def run(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, options: Options, results: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attention of bhsd views through the shortest path that PyTorch's state allows."""
    if not is_plain(q, k, v) or not _are_ordinary(operands):
        check_tensors(q, k, v)
        _tell_flop_counters()
        return dispatched(q, k, v, list(operands.values()), options, _outputs(options), results)
    call = prepare(q, k, v, operands, options, needed_grads(q, k, v, operands))
    return execute(call, q, k, v, operands, results)


def dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    options: Options,
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


def _outputs(options: Options) -> list[str]:
    """The names of what terms report."""
    return [operand.name for term in parse_all(options.scores) for operand in term.outputs]


def execute(
    call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands, results: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run a Call on plain tensors of its signature; `results` takes what terms report."""
    if results is not None:
        return execute(_reporting(call, results), q, k, v, operands)
    if autocast_is_on():
        with without_autocast():
            return execute(call, q, k, v, operands)
    if call.lacks_memory:
        q, k, v = with_memory(q), with_memory(k), with_memory(v)
    if not operands:
        if not call.problem.needs_grad:
            return call.forward(q, k, v, operands)
        result = _apply_planned(q, k, v, call)
    else:
        if not call.problem.needs_grad:
            return call.forward(q, k, v, {name: with_memory(tensor) for name, tensor in operands.items()})
        result = _apply_planned(q, k, v, call, *[with_memory(operands[name]) for name in call.names])
    return result if call.options.needs_lse else (result, None)


def execute_alike(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """`execute` of a Call that `recall_alike` found."""
    if not call.problem.needs_grad:
        return call.forward(q, k, v, NO_OPERANDS)
    result = (_apply_planned if call.plan is None else _apply_of_inputs)(q, k, v, call)
    return result if call.options.needs_lse else (result, None)


def _reporting(call: Call, results: dict[str, Tensor]) -> Call:
    """The Call that puts what terms report of its one forward into these results."""
    forward: Any = call.forward
    return call._replace(forward=lambda q, k, v, operands: forward(q, k, v, operands, results))


# Attention casts nothing, whichever backend computes it, even one made of operations that autocast casts.
# Invariant: whatever runs a backend, forward or backward, does it inside `without_autocast`.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast


def needed_grads(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[str, ...] | None:
    """As `prepare` takes it: what autograd will ask of a call with these tensors."""
    if operands and (names := operands_with_grad(operands)):
        return tuple(names)
    return _grads(q, k, v)


def _grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, ...] | None:
    return () if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) else None


def _is_watched() -> bool:
    """PyTorch's state asks for more than running a kernel: a dispatch mode, a transform, forward AD or a trace."""
    torch_c = torch._C
    return (
        torch_c._len_torch_dispatch_stack() > 0
        or torch_c._are_functorch_transforms_active()
        or _forward_ad._current_level >= 0
        or is_jit_traced() is not None
    )


# The state of torch.jit.trace, which records operators; None = it is not at work.
is_jit_traced: Callable[[], Any] = torch._C._get_tracing_state


def refuse_jit_trace(what: str) -> None:
    """Raise UnsupportedProblem while torch.jit.trace records, for calls that no graph of it can hold."""
    if is_jit_traced() is not None:
        raise UnsupportedProblem(f"{what} under torch.jit.trace.", remedy="use torch.compile or torch.export instead")


_forward_ad = torch.autograd.forward_ad

with torch.inference_mode(False):  # wherever this is imported
    _GUARDS_HOLD = _guards_hold()

_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Ordinary tensors that no mode observes: no subclass, fake tensors included, no dispatch mode, no trace."""
    return (
        type(q) in _ORDINARY
        and type(k) in _ORDINARY
        and type(v) in _ORDINARY
        and torch._C._len_torch_dispatch_stack() == 0
        and is_jit_traced() is None
    )


class _Planned(torch.autograd.Function):
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
        if not call.options.needs_lse:
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


class _OfInputs(torch.autograd.Function):
    """`_Planned` of a Call of our kernels without operands, which has less to look at."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | tuple[Tensor, Tensor | None]:
        out, lse = call.forward(q, k, v, NO_OPERANDS)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        if not call.options.needs_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    backward = _Planned.backward


def gradients(
    call: Call,
    saved: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    flags: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """A Call's backward: gradients in the places of `_Planned`'s inputs.

    `saved`: q, k, v, out and lse as they came back; `tensors`: the operands; `flags`: what is wanted, of q, k, v and
    the operands.
    """
    q, k, v, out, lse = saved
    if dout is None and dlse is None:
        return (None,) * (len(flags) + 1)
    operands: Operands = dict(zip(call.names, tensors, strict=True)) if tensors else NO_OPERANDS
    wants = chosen((*INPUTS, *call.names), flags) if tensors else chosen(INPUTS, flags[:3])
    layouts = _layouts(q, k, v)
    if call.layouts[:_STRIDES] != layouts[:_STRIDES]:
        raise _changed("q, k and v", layouts[:_STRIDES], call.layouts[:_STRIDES])
    _check_results(q, v, out, lse)
    if _wants_composite():
        return _in_slots(_differentiable_grads(dout, dlse, q, k, v, operands, call.problem, wants), call.names)
    dout = torch.zeros_like(out) if dout is None else with_memory(dout)
    dlse = None if dlse is None else with_memory(dlse)
    if call.gradient is not None and call.layouts != layouts:
        # Hooks on saved tensors, as of save_on_cpu, may lay them out anew; a bound gradient is for one layout.
        options = call.options._replace(backend=call.backend_name)
        call = prepare(q, k, v, operands, options, call.problem.operand_grads)
    if is_plain(dout, q, k):
        if not autocast_is_on():
            return _in_slots(call.backward(dout, dlse, (q, k, v, out, lse), operands, wants), call.names)
        with without_autocast():
            return _in_slots(call.backward(dout, dlse, (q, k, v, out, lse), operands, wants), call.names)
    options = call.options if lse is not None else call.options._replace(backend=call.backend_name)
    out, lse = _with_lse(q, out, lse)
    dq, dk, dv, *others = _backward_op(dout, dlse, out, lse, q, k, v, tensors, options, flags)
    return dq, dk, dv, None, *others


def _layouts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Shapes, dtypes and devices, then strides."""
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.stride(), k.stride(),
        v.stride(),
    )  # fmt: skip


_STRIDES = 9  # where they begin


def _check_results(q: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Raise InvalidInput for results that are not those of a forward of q and v. Kernels trust their sizes."""
    got = out.shape, out.dtype, out.device
    expected = (*q.shape[:3], v.shape[3]), q.dtype, q.device
    if got != expected:
        raise _changed("out", got, expected)
    if lse is not None:
        got, expected = (lse.shape, lse.dtype, lse.device), (q.shape[:3], lse_dtype(q.dtype), q.device)
        if got != expected:
            raise _changed("lse", got, expected)


def _changed(name: str, got: tuple[Any, ...], expected: tuple[Any, ...]) -> InvalidInput:
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
    """Gradients in the places of `_Planned`'s inputs."""
    if not names:
        return grads.get("q"), grads.get("k"), grads.get("v"), None
    return grads.get("q"), grads.get("k"), grads.get("v"), None, *(grads.get(name) for name in names)


# In force while autograd batches gradients (is_grads_batched=True): its tensors look plain, and have no memory.
_BATCHING: Any = torch._C._parse_dispatch_key("VmapMode")

# Function.apply looks for functorch's transforms and their wrappers first. Plain calls are those that have neither.
_apply_planned: Callable[..., Any] = super(torch.autograd.Function, _Planned).apply
_apply_of_inputs: Callable[..., Any] = super(torch.autograd.Function, _OfInputs).apply


class _Attention(torch.autograd.Function):
    """tilewise::attention_with_lse and tilewise::attention_backward, for code that observes the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, wants: list[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        reported: list[Tensor] = []
        with torch._C._AutoDispatchBelowAutograd():
            if _outputs(options):
                made = torch.ops.tilewise.attention_with_results(q, k, v, list(tensors), wants, *options)
                out, lse, reported = made
            else:
                out, lse = torch.ops.tilewise.attention_with_lse(q, k, v, list(tensors), wants, *options)
            if type(out) is Tensor and out._is_view() and not torch.compiler.is_compiling():
                out = out.new_empty(0).set_(out)  # type: ignore[call-overload]  # as in _Planned
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, *tensors)  # as _Planned: a checkpoint may recompute one by the other
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
        if _wants_composite():
            _check_results(q, v, out, lse)
            operands = named_operands(ctx.options, tensors)
            wants = chosen((*INPUTS, *operands), flags)
            grads = tuple(name for name in operands if name in wants)
            problem = prepare(q, k, v, operands, ctx.options._replace(backend="reference"), grads).problem
            found = _differentiable_grads(dout, dlse, q, k, v, operands, problem, wants)
            return *(found.get(name) for name in INPUTS), None, None, *(found.get(name) for name in operands)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, *others = _backward_op(dout, dlse, out, lse, q, k, v, tensors, ctx.options, flags)
        return dq, dk, dv, None, None, *others


def _wants_composite() -> bool:
    """A gradient that is itself differentiated (create_graph=True), taken inside a functorch transform, or batched.

    PyTorch batches no operator that takes a list of tensors.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING)


def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    options: Options,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the operands, in this order; None where not wanted."""
    grads = torch.ops.tilewise.attention_backward(dout, dlse, q, k, v, list(tensors), out, lse, list(wants), *options)
    return tuple(grad if want else None for grad, want in zip(grads, wants, strict=True))


def _differentiable_grads(
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


def recorded(
    forward: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor, operands: Operands
) -> tuple[Tensor, Tensor | None]:
    """`forward` of (q, k, v, operands), whose single operations autograd or a transform records and derives itself.

    Their derivatives run where we cannot turn autocast off. It leaves float64 alone, so under autocast all is float64.
    """
    if not autocast_is_on():
        return forward(q, k, v, operands)
    with without_autocast():
        wide = {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}
        out, lse = forward(q.double(), k.double(), v.double(), wide)
        return out.to(q.dtype), lse if lse is None else lse.to(lse_dtype(q.dtype))


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


def _attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    operands = named_operands(named, tensors)
    check_where_asked(q, k, operands)
    with without_autocast():
        out, lse = prepare(q, k, v, operands, named, None).forward(q, k, v, operands)
    return _with_lse(q, out, lse) if named.needs_lse else (out, _no_lse(q))


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    """The forward of a call that will be differentiated.

    Its backward plans anew, from what autograd or the compiler hands back: with other strides "auto" may mean another
    backend. An out and an lse are all that any of them needs, so "auto" always makes both.
    """
    named = Options(*options)
    if named.backend == AUTO:
        named = named._replace(needs_lse=True)
    operands = named_operands(named, tensors)
    check_where_asked(q, k, operands)
    grads = tuple(name for name, want in zip(operands, wants[3:], strict=True) if want)
    with without_autocast():
        return _with_lse(q, *prepare(q, k, v, operands, named, grads).forward(q, k, v, operands))


def _attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Either of the two above, with what terms report."""
    named = Options(*options)
    if wants and named.backend == AUTO:
        named = named._replace(needs_lse=True)
    operands = named_operands(named, tensors)
    check_where_asked(q, k, operands)
    grads = tuple(name for name, want in zip(operands, wants[3:], strict=True) if want) if wants else None
    results: dict[str, Tensor] = {}
    with without_autocast():
        out, lse = _reporting(prepare(q, k, v, operands, named, grads), results).forward(q, k, v, operands)
    reported = [results[name] for name in _outputs(named)]
    return (*(_with_lse(q, out, lse) if named.needs_lse or wants else (out, _no_lse(q))), reported)


def _with_lse(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """A backend whose backward needs no lse may have none; the operators return one all the same."""
    return out, empty_lse(q) if lse is None else lse


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], out: Tensor, lse: Tensor,
    wants: list[bool], *options: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients with the strides of empty_like(input), as the fake kernel promises; empty where not wanted."""
    named = Options(*options)
    operands = named_operands(named, tensors)
    wanted = chosen((*INPUTS, *operands), tuple(wants))
    _check_results(q, v, out, lse)
    if (dout.shape, dout.dtype) != (out.shape, out.dtype):
        raise _changed("dout", (dout.shape, dout.dtype), (out.shape, out.dtype))
    if dlse is not None and dlse.shape != lse.shape:
        raise _changed("dlse", (dlse.shape,), (lse.shape,))
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


def _check_fake(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], options: Options) -> None:
    """Raise for whatever could not be planned, as far as a trace knows the sizes; the rest is checked when it runs."""
    check_backend(options.backend)
    operands = named_operands(options, tensors)
    if all(type(size) is int for tensor in (q, k, v, *tensors) for size in tensor.shape):
        _described(q, k, v, operands, options)
    else:
        check_tensors(q, k, v)
        check_shapes(q, k, v, options.layout)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    _check_fake(q, k, v, tensors, named)
    out = empty_out(q, v.shape[-1], named.layout)
    return out, empty_lse(q) if named.needs_lse else _no_lse(q)


def _fake_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    _check_fake(q, k, v, tensors, named)
    return empty_out(q, v.shape[-1], named.layout), empty_lse(q)


def _fake_attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All that terms report is a number per head."""
    named = Options(*options)
    _check_fake(q, k, v, tensors, named)
    lse = empty_lse(q) if named.needs_lse or wants else _no_lse(q)
    reported = [q.new_empty(q.shape[1], dtype=lse_dtype(q.dtype)) for _ in _outputs(named)]
    return empty_out(q, v.shape[-1], named.layout), lse, reported


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], out: Tensor, lse: Tensor,
    wants: list[bool], *options: Any,
) -> list[Tensor]:  # fmt: skip
    given = zip((q, k, v, *tensors), wants, strict=True)
    return [torch.empty_like(tensor) if want else tensor.new_empty(0) for tensor, want in given]


def has_tangent(*tensors: Tensor) -> bool:
    """Forward-mode AD is at work on one of these tensors."""
    return _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _refuse_tangents(*tensors: Tensor) -> None:
    if has_tangent(*tensors):
        raise UnsupportedProblem(
            "tilewise::attention has no forward-mode derivative, and would drop the tangents of its inputs.",
            remedy="call tilewise.attention, which routes forward-mode AD to a composite backend",
        )


def _autograd_attention(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    tensors = tensors or []  # see named_operands
    _refuse_tangents(q, k, v, *tensors)
    _tell_flop_counters()
    given = (q, k, v, *tensors)
    wants = [tensor.requires_grad for tensor in given]
    if torch.is_grad_enabled() and True in wants:
        named = Options(*options)
        out, lse = _Attention.apply(q, k, v, named, wants, *tensors)  # type: ignore[no-untyped-call]
        return out, lse if named.needs_lse else _no_lse(q)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.attention(q, k, v, tensors, *options)  # type: ignore[no-any-return]


def _autograd_attention_with_results(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], wants: list[bool], *options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tensors = tensors or []
    _refuse_tangents(q, k, v, *tensors)
    _tell_flop_counters()
    asked = [tensor.requires_grad for tensor in (q, k, v, *tensors)]
    if torch.is_grad_enabled() and True in asked:
        named = Options(*options)
        out, lse, *reported = _Attention.apply(q, k, v, named, asked, *tensors)  # type: ignore[no-untyped-call]
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


def _tell_flop_counters() -> None:
    """Give PyTorch's FlopCounterMode our formulas, once somebody counts: its module is too slow to import for all.

    It copies the table of formulas when it is made, so one that counts already is told as well.
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


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], mask: str, *options: Any, out_val: Any = None
) -> int:
    """Of the pairs that the mask shows; all of them where it is a tensor, whose content is not read."""
    return 2 * _visible_pairs(q, k, mask) * (q.shape[-1] + v.shape[-1])


def _training_flops(
    q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], wants: list[bool], *options: Any, out_val: Any = None
) -> int:
    return _forward_flops(q, k, v, operands, *options)


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], out: Tensor,
    lse: Tensor, wants: list[bool], mask: str, *options: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """S, dQ and dK over head_dim, dP and dV over head_dim_v."""
    return 2 * _visible_pairs(q, k, mask) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _visible_pairs(q: Tensor, k: Tensor, mask: str) -> int:
    batch, heads, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    return batch * heads * (seq_q * seq_kv if mask == "" else masks.parse(mask).pairs(seq_q, seq_kv))
