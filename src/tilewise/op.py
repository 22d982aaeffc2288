"""The torch seam: tilewise::attention and tilewise::attention_backward, with fake kernels and autograd.

`prepare` turns tensors and arguments into a Call (problem, backend, config), once per distinct signature. Plain eager
tensors run the Call directly; everything that needs PyTorch's dispatcher to see the operation (torch.compile, export,
fake tensors, dispatch modes, tensor subclasses) goes through the registered ops, whose kernels run the same Call.

Autograd is a `torch.autograd.Function` for either: `_Planned` runs a Call, `_Attention` dispatches ops, its backward
too, so that a compiled backward sees it. Asked to be differentiable themselves (create_graph=True) both recompute
through the reference, which is made of torch operations. Forward-mode AD would lose its tangents here without a word,
so the ops refuse it; the api routes such calls elsewhere.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import library as torch_library

from . import masks
from .backends import Wants, empty_lse, empty_out, lse_dtype, reference
from .engine import run as engine
from .errors import CompileError, UnsupportedProblem
from .jit import build_all, is_loaded, tuned
from .memo import Memo
from .plan import AUTO, BACKENDS, check_backend, leave_out, plan
from .problem import check_constant, check_shapes, check_tensors, describe
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from .backends import Backend, Grads
    from .engine.program import Program
    from .masks import Mask
    from .plan import Plan
    from .problem import Layout, Precision, Problem

Tensor = torch.Tensor

_log = logging.getLogger("tilewise")


class Options(NamedTuple):
    """The non-tensor arguments, in the order of the operators' schemas. Masks travel as their text form."""

    mask: str = "full"  # "" = the bias tensor is the mask
    scale: float | None = None
    softcap: float = 0.0
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
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    gradient: Callable[..., Grads] | None  # of (dout, dlse, q, k, v, out, lse, wants), where the backend binds one
    lacks_memory: bool = False  # q, k or v is empty, or one for `with_memory`

    @property
    def backend_name(self) -> str:
        return next(name for name, backend in BACKENDS.items() if backend is self.backend)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Any, ...], bias: Tensor | None, wants: Wants
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.gradient is not None:
            return self.gradient(dout, dlse, *saved, wants)
        q, k, v, out, lse = saved
        with _deterministic_as(self.problem, self.backend):
            return self.backend.backward(dout, dlse, q, k, v, out, lse, self.problem, self.config, bias, wants)


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
_calls: Memo[Call] = Memo()


def prepare(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options, needs_grad: bool) -> Call:
    """The Call for these tensors in bhsd order, validated and planned on first sight and remembered by signature."""
    misaligned, lacks_memory = _addresses(q, k, v)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), misaligned, lacks_memory,
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, needs_grad,
        torch._C._get_deterministic_algorithms(), None if bias is None else (bias.shape, bias.dtype, bias.device),
    )  # fmt: skip
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed is of a wrong type, which this says
        _described(q, k, v, bias, options)
        raise
    if call is None:
        generation = _calls.generation
        call = _planned(q, k, v, bias, options, needs_grad)._replace(lacks_memory=lacks_memory)
        _calls.put(key, call, generation, _size(call))
    return call


def _size(call: Call) -> int:
    """Bytes of what has no fixed size: the mask, as its text in the key and the options, and in the problem."""
    return 2 * len(call.options.mask) + masks.size_in_bytes(call.problem.mask)


def _addresses(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, bool]:
    """Bits by which one of them misses a multiple of 16 bytes, and whether one has no memory that holds its values.

    The offsets stand for the bits where addresses are out of reach.
    """
    try:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:
        return hash((q.storage_offset(), k.storage_offset(), v.storage_offset())), False
    lacks_memory = not (at_q and at_k and at_v) or q.is_neg() or k.is_neg() or v.is_neg()
    return (at_q | at_k | at_v) & 15, lacks_memory


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory that holds its values: a kernel reads memory and nothing else.

    PyTorch's zero tensors have none, and lazily negated ones (`x.conj().imag`) have the opposite there.
    """
    return tensor.clone() if tensor._is_zerotensor() or tensor.is_neg() else tensor


def _described(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options) -> Problem:
    mask: Mask | Tensor = masks.parse(options.mask) if bias is None else bias
    return describe(
        q,
        k,
        v,
        mask=mask,
        scale=options.scale,
        softcap=options.softcap,
        needs_lse=options.needs_lse,
        precision=options.precision,
    ).with_(layout=options.layout)


def _planned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options, needs_grad: bool) -> Call:
    """Plan, and build what was planned; what does not build is left out, and planned anew without it."""
    problem = _described(q, k, v, bias, options).with_(needs_grad=needs_grad)
    chosen = plan(problem, Target.of(q.device), options.backend)
    failed: CompileError | None = None
    while True:
        try:
            _build(chosen)
            return _call(chosen, q, k, v, options)
        except CompileError as error:
            failed = error
            _leave_out(chosen, error, options)
        try:
            chosen = plan(problem, chosen.target, options.backend)
        except UnsupportedProblem:
            raise failed from None  # a backend that was asked for by name, and has nothing left


def _call(chosen: Plan, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Call:
    problem, backend, config = chosen.problem, BACKENDS[chosen.backend], chosen.config
    forward, gradient = chosen.forward, chosen.backward
    if forward is None:
        bound = _bound(backend, q, k, v, problem, config)
        return Call(problem, backend, config, options, bound, _bound_gradient(backend, problem))
    bound = engine.bind_forward(lambda: forward, problem, q, k, v)
    if gradient is None:
        return Call(problem, backend, config, options, bound, None)

    def program(device: torch.device, wants: Wants) -> Program:
        return gradient if all(wants) else chosen.backward_for(wants)

    return Call(problem, backend, config, options, bound, engine.bind_backward(program, problem))


def _build(chosen: Plan) -> None:
    """Every kernel of a plan, both directions side by side, before the first of them is needed."""
    for unit, built in build_all(unit for unit in chosen.units if not is_loaded(unit)):
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
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Any
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """The backend's forward for tensors of one signature. Those with a `bind` settle there what no call need repeat."""
    bind = getattr(backend, "bind", None)
    if bind is not None:
        return bind(q, k, v, problem, config)  # type: ignore[no-any-return]
    forward = backend.forward
    return lambda q, k, v, bias: forward(q, k, v, problem, config, bias)


def _bound_gradient(backend: Backend, problem: Problem) -> Callable[..., Grads] | None:
    bind = getattr(backend, "bind_backward", None)
    return bind(problem) if bind is not None and problem.needs_grad else None


def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options) -> tuple[Tensor, Tensor | None]:
    """Attention of bhsd views through the shortest path that PyTorch's state allows."""
    if not is_plain(q, k, v):
        check_tensors(q, k, v)
        _tell_flop_counters()
        return torch.ops.tilewise.attention(q, k, v, bias, *options)  # type: ignore[no-any-return]
    return execute(prepare(q, k, v, bias, options, needs_grad(q, k, v)), q, k, v, bias)


def execute(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run a Call on plain tensors of its signature."""
    if autocast_is_on():
        with without_autocast():
            return execute(call, q, k, v, bias)
    if call.lacks_memory:
        q, k, v = with_memory(q), with_memory(k), with_memory(v)
    if bias is not None:
        bias = with_memory(bias)
    if not call.problem.needs_grad:
        return call.forward(q, k, v, bias)
    if call.options.needs_lse:
        return _apply_planned(q, k, v, bias, call)  # type: ignore[no-any-return]
    return _apply_planned(q, k, v, bias, call), None


# Attention casts nothing, whichever backend computes it, even one made of operations that autocast casts.
# Invariant: whatever runs a backend, forward or backward, does it inside `without_autocast`.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


# By everything that decides a call: what `recall` looks up, and nothing else does. Only plain calls are in it.
_recalled: Memo[Call] = Memo()


def recall(q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> Call | None:
    """The Call that was remembered for tensors and arguments like these; None = take the long way.

    A repeated call costs one look-up here, and its checks and plan are those of the first.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or _is_watched():
        return None
    try:
        return _recalled.get(_signature(q, k, v, arguments))
    except (RuntimeError, TypeError):  # no memory of their own, or arguments of a wrong type: the long way says it
        return None


def remember(call: Call, q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> None:
    """Let `recall` find this Call. Both see the caller's own tensors, before any transpose."""
    if type(q) is type(k) is type(v) is Tensor and not _is_watched():
        with suppress(RuntimeError, TypeError):  # as in `recall`
            _recalled.put(_signature(q, k, v, arguments), call, _recalled.generation, 2 * _size(call))


def forget() -> None:
    """Plan every call anew."""
    _calls.clear()
    _recalled.clear()


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


_forward_ad = torch.autograd.forward_ad


def _signature(q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> tuple[Any, ...]:
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not (at_q and at_k and at_v) or q.is_neg() or k.is_neg() or v.is_neg():
        raise RuntimeError("a tensor without memory that holds its values")
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (at_q | at_k | at_v) & 15,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch._C._get_deterministic_algorithms(), arguments,
    )  # fmt: skip


_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Ordinary tensors with nobody watching: no subclass, fake tensors included, no dispatch mode, no trace."""
    return (
        type(q) in _ORDINARY
        and type(k) in _ORDINARY
        and type(v) in _ORDINARY
        and torch._C._len_torch_dispatch_stack() == 0
        and is_jit_traced() is None
    )


class _Planned(torch.autograd.Function):
    """A Call and its backward. What is not returned (lse, mostly) is only saved."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Call
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        out, lse = call.forward(q, k, v, bias)
        if out._is_view():  # autograd would let nobody change it in place, nor a view of it
            out = out.new_empty(0).set_(out)  # type: ignore[call-overload]
        ctx.call = call
        ctx.strides = None if call.gradient is None else (q.stride(), k.stride(), v.stride())
        if bias is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, bias)
        if not call.options.needs_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        bias: Tensor | None = rest[0] if rest else None
        call: Call = ctx.call
        wants: Wants = ctx.needs_input_grad[:3]
        if dout is None and dlse is None:
            return None, None, None, None, None
        if _wants_composite():
            return (*_differentiable_grads(dout, dlse, q, k, v, bias, call.problem, wants), None, None)
        dout = torch.zeros_like(out) if dout is None else with_memory(dout)
        if ctx.strides is not None and ctx.strides != (q.stride(), k.stride(), v.stride()):
            # Hooks on saved tensors, as of save_on_cpu, may lay them out anew; a bound gradient is for one layout.
            call = prepare(q, k, v, bias, call.options._replace(backend=call.backend_name), True)
        if is_plain(dout, q, k) and not torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING):
            if not autocast_is_on():
                return (*call.backward(dout, dlse, (q, k, v, out, lse), bias, wants), None, None)
            with without_autocast():
                return (*call.backward(dout, dlse, (q, k, v, out, lse), bias, wants), None, None)
        options = call.options if lse is not None else call.options._replace(backend=call.backend_name)
        return (*_backward_op(dout, dlse, *_with_lse(q, out, lse), q, k, v, bias, options, wants), None, None)


# In force while autograd batches gradients (is_grads_batched=True): its tensors look plain, and have no memory.
_BATCHING: Any = torch._C._parse_dispatch_key("VmapMode")

# Function.apply looks for functorch's transforms and their wrappers first. Plain calls are those that have neither.
_apply_planned: Callable[..., Any] = super(torch.autograd.Function, _Planned).apply


class _Attention(torch.autograd.Function):
    """tilewise::attention_with_lse and tilewise::attention_backward, for whoever watches the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.tilewise.attention_with_lse(q, k, v, bias, *options)
            if type(out) is Tensor and out._is_view() and not torch.compiler.is_compiling():
                out = out.new_empty(0).set_(out)  # type: ignore[call-overload]  # as in _Planned
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, bias)  # as _Planned: a checkpoint may recompute one by the other
        if not options.needs_lse:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias = ctx.saved_tensors
        wants: Wants = tuple(ctx.needs_input_grad[:3])
        if dout is None and dlse is None:
            return None, None, None, None, None
        if _wants_composite():
            problem = prepare(q, k, v, bias, ctx.options._replace(backend="reference"), True).problem
            return (*_differentiable_grads(dout, dlse, q, k, v, bias, problem, wants), None, None)
        dout = torch.zeros_like(out) if dout is None else dout
        return (*_backward_op(dout, dlse, out, lse, q, k, v, bias, ctx.options, wants), None, None)


def _wants_composite() -> bool:
    """A gradient that is itself differentiated (create_graph=True), or taken inside a functorch transform."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    options: Options,
    wants: Wants,
) -> tuple[Tensor | None, ...]:
    *others, precision = options
    grads = torch.ops.tilewise.attention_backward(dout, dlse, q, k, v, bias, out, lse, *others, list(wants), precision)
    return tuple(grad if want else None for grad, want in zip(grads, wants, strict=True))


def _differentiable_grads(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    problem: Problem,
    wants: Wants,
) -> tuple[Tensor | None, ...]:
    """Gradients made of torch operations, through the reference: they can be differentiated again, and batched.

    Each input is a view of its own: q, k and v may be one tensor, or made of one another, and a gradient with respect
    to the tensors themselves would then collect what reaches one of them through the others. The gradients of these
    gradients still flow through the views to where the inputs came from. The bias is a constant (`check_constant`).
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        views = q.view_as(q), k.view_as(k), v.view_as(v)
        bias = bias if bias is None else bias.detach()
        out, lse = recorded(lambda q, k, v, bias: reference.forward(q, k, v, problem, None, bias), *views, bias)
        pairs = [(output, grad) for output, grad in ((out, dout), (lse, dlse)) if grad is not None]
        inputs = [tensor for tensor, want in zip(views, wants, strict=True) if want]
        outputs, grads_in = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(outputs, inputs, grads_in, create_graph=again, allow_unused=True))
    return tuple(next(grads) if want else None for want in wants)


def recorded(
    forward: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`forward` of (q, k, v, bias), whose single operations autograd or a transform records and derives itself.

    Their derivatives run where we cannot turn autocast off. It leaves float64 alone, so under autocast all is float64.
    """
    if not autocast_is_on():
        return forward(q, k, v, bias)
    with without_autocast():
        wide = bias if bias is None or bias.dtype == torch.bool else bias.double()
        out, lse = forward(q.double(), k.double(), v.double(), wide)
        return out.to(q.dtype), lse if lse is None else lse.to(lse_dtype(q.dtype))


# Invariant: `precision` stands last, after `wants` too, with a default: graphs that were saved without it still load.
_OPTIONS = "str mask, float? scale, float softcap, str layout, str backend, bool needs_lse"
_PRECISION = "str precision='exact'"
_FORWARD_SCHEMA = f"(Tensor q, Tensor k, Tensor v, Tensor? bias, {_OPTIONS}, {_PRECISION}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool[] wants, {_PRECISION}) -> (Tensor, Tensor, Tensor)"
)


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    with without_autocast():
        out, lse = prepare(q, k, v, bias, named, False).forward(q, k, v, bias)
    return _with_lse(q, out, lse) if named.needs_lse else (out, _no_lse(q))


def _attention_with_lse(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """The forward of a call that will be differentiated.

    Its backward plans anew, from what autograd or the compiler hands back: with other strides "auto" may mean another
    backend. An out and an lse are all that any of them needs, so "auto" always makes both.
    """
    named = Options(*options)
    if named.backend == AUTO:
        named = named._replace(needs_lse=True)
    with without_autocast():
        return _with_lse(q, *prepare(q, k, v, bias, named, True).forward(q, k, v, bias))


def _with_lse(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """A backend whose backward needs no lse may have none; the operators return one all the same."""
    return out, empty_lse(q) if lse is None else lse


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients with the strides of empty_like(input), as the fake kernel promises; empty where not wanted."""
    options, wants = _split_rest(rest)
    call = prepare(q, k, v, bias, options, True)
    with without_autocast():
        grads = call.backward(dout, dlse, (q, k, v, out, lse), bias, wants)
    return tuple(_like(grad, tensor) for grad, tensor in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]


def _split_rest(rest: tuple[Any, ...]) -> tuple[Options, Wants]:
    """The options and `wants` among a backward's last arguments. PyTorch leaves out a precision that is the default."""
    before = len(Options._fields) - 1
    return Options(*rest[:before], *rest[before + 1 :]), tuple(rest[before])


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor:
    if grad is None:
        return tensor.new_empty(0)
    wanted = torch.empty_like(tensor)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


def _check_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options) -> None:
    """Raise for whatever could not be planned, as far as a trace knows the sizes; the rest is checked when it runs."""
    check_backend(options.backend)
    if all(type(size) is int for tensor in (q, k, v, q if bias is None else bias) for size in tensor.shape):
        _described(q, k, v, bias, options)
    else:
        check_tensors(q, k, v)
        check_shapes(q, k, v)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    _check_fake(q, k, v, bias, named)
    out = empty_out(q, v.shape[-1], named.layout)
    return out, empty_lse(q) if named.needs_lse else _no_lse(q)


def _fake_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    named = Options(*options)
    _check_fake(q, k, v, bias, named)
    return empty_out(q, v.shape[-1], named.layout), empty_lse(q)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, wants = _split_rest(rest)
    return tuple(  # type: ignore[return-value]
        torch.empty_like(tensor) if want else tensor.new_empty(0) for tensor, want in zip((q, k, v), wants, strict=True)
    )


def has_tangent(*tensors: Tensor) -> bool:
    """Forward-mode AD is at work on one of these tensors."""
    return _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _autograd_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    if has_tangent(q, k, v):
        raise UnsupportedProblem(
            "tilewise::attention has no forward-mode derivative, and would drop the tangents of its inputs.",
            remedy="call tilewise.attention, which routes forward-mode AD to a composite backend",
        )
    if bias is not None:
        check_constant(bias)
    _tell_flop_counters()
    if needs_grad(q, k, v):
        out, lse = _Attention.apply(q, k, v, bias, Options(*options))  # type: ignore[no-untyped-call]
        return out, lse if Options(*options).needs_lse else _no_lse(q)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.attention(q, k, v, bias, *options)  # type: ignore[no-any-return]


for _name, _schema, _kernel, _fake in (
    ("attention", _FORWARD_SCHEMA, _attention, _fake_attention),
    ("attention_with_lse", _FORWARD_SCHEMA, _attention_with_lse, _fake_attention_with_lse),
    ("attention_backward", _BACKWARD_SCHEMA, _attention_backward, _fake_backward),
):
    torch_library.define(f"tilewise::{_name}", _schema)
    torch_library.impl(f"tilewise::{_name}", "CompositeExplicitAutograd", _kernel)
    torch_library.register_fake(f"tilewise::{_name}", _fake)
torch_library.impl("tilewise::attention", "Autograd", _autograd_attention)


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
        torch.ops.tilewise.attention_with_lse: _forward_flops,
        torch.ops.tilewise.attention_backward: _backward_flops,
    }
    module.flop_registry |= ours
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry |= ours


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: str, *options: Any, out_val: Any = None
) -> int:
    """Of the pairs that the mask shows; all of them where it is a tensor, whose content nobody reads for this."""
    return 2 * _visible_pairs(q, k, bias, mask) * (q.shape[-1] + v.shape[-1])


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    mask: str, *options: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """S, dQ and dK over head_dim, dP and dV over head_dim_v."""
    return 2 * _visible_pairs(q, k, bias, mask) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _visible_pairs(q: Tensor, k: Tensor, bias: Tensor | None, mask: str) -> int:
    batch, heads, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    return batch * heads * (seq_q * seq_kv if bias is not None else masks.parse(mask).pairs(seq_q, seq_kv))
