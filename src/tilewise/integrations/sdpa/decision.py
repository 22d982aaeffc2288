"""How a call under a rule of `tilewise.sdpa` is handled: decided once per key, and remembered.

A rule keeps, by the key of a request (call/memory.py) and PyTorch's switches, whether such calls are taken, left to
PyTorch or a fallback. A call that is taken is the request that `tilewise.attention` would make of it, with the same
Call. Invariant: both "left" and "taken" compute the right values for *any* call; what is remembered of an earlier one
is only which of the two is wanted.
"""

from __future__ import annotations

import warnings
import weakref
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ...call import memory, native
from ...call.execute import attend, execute
from ...call.resolve import reduced, resolve
from ...errors import InvalidInput, UnsupportedProblem
from ...hook import dispatcher
from ...masks import Mask
from ...memo import Memo, on_invalidate
from ...operands import address
from ...plan import AUTO, plan
from ...target import Target
from ...torch_function import left_to_torch, only_torch_defines, sdpa_request, torch_mask, without_repeats
from ...torch_kernels import gates
from ...torch_seam.switches import has_tangent
from .report import record

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from ...call.build import Call
    from ...call.request import Request
    from ...hook import Arguments
    from ...native.library import Library
    from ...problem import Problem
    from .report import Outcome, Record

Tensor = torch.Tensor
OnFallback = Literal["silent", "warn", "error"]
_MEMO_KEPT = 4096
_RECENT_KEPT = 2  # self- and cross-attention in turn


class FallbackWarning(UserWarning):
    """A call went to PyTorch because tilewise could not plan it."""


# A recent call: a guard of its tensors; PyTorch's switches; whether gradients were enabled (None = no matter);
# dropout_p, is_causal, scale and enable_gqa as they were. Then how such calls are handled: the line that counts them,
# and whether they are taken. A bare tuple, because that unpacks fastest.
_Seen = tuple["Callable[..., bool]", "_Switches", "bool | None", float, bool, "float | None", bool, "Record", bool]


class Decision(NamedTuple):
    """How calls with one key are handled."""

    record: Record
    problem: Problem | None = None
    memoise: bool = True

    @property
    def taken(self) -> bool:
        return self.record.outcome == "taken"

    def quiet(self, rule: Decider) -> bool:
        """PyTorch's kernel is called, and nothing is reported."""
        return not self.taken and (self.record.outcome == "left" or rule.on_fallback == "silent")


class Decider:
    """What a rule wants, and what it remembers of the calls it has decided on."""

    def __init__(self, when: Callable[[Problem], object] | None, on_fallback: OnFallback, backend: str) -> None:
        self.when, self.on_fallback, self.backend = when, on_fallback, backend
        # By key; the flag is the decision's `quiet`.
        self.memo: Memo[tuple[Decision, bool, _Seen | None]] = Memo(_MEMO_KEPT)
        self.recent: tuple[_Seen, ...] = ()  # the latest of these without a mask, and with one
        self.recent_masked: tuple[_Seen, ...] = ()
        _deciders.add(self)

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        /,
    ) -> Tensor | None:
        """The result of a call that is taken, or None for PyTorch's kernel."""
        if attn_mask is None:
            tensors: tuple[Tensor, ...] = (query, key, value)
            recent = self.recent
        else:
            tensors = (query, key, value, attn_mask)
            recent = self.recent_masked
        switches = _switches() if recent else None
        for same, then, grad, dropout, causal, factor, gqa, counted, taken in recent:
            if (
                switches == then
                and (grad is None or torch.is_grad_enabled() is grad)
                and is_causal is causal
                and scale == factor
                and dropout_p == dropout
                and enable_gqa is gqa
                and same(*tensors)
                and (not taken or not _transform_declines(query, key, value))
            ):
                counted.calls += 1
                break
        else:
            counted, taken = _decide_and_record(
                self, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            )
        return _take(self, (query, key, value, attn_mask, dropout_p, is_causal, scale), counted) if taken else None


def _decide_and_record(rule: Decider, arguments: Arguments) -> tuple[Record, bool]:
    """The decision for a call, counted, announced where asked for, and remembered where it may be.

    Returns the line that counts it, and whether it is taken.
    """
    switches = _switches()
    signature = _signature(rule, arguments, switches)
    generation = rule.memo.generation
    known: tuple[Decision | None, bool, _Seen | None] = rule.memo.get(signature) or (None, False, None)
    decision, quiet, seen = known
    blocked = None if quiet else _transform_declines(*arguments[:3]) or _switches_decline(switches)
    if blocked:
        decision = Decision(record(_describe_shapes(arguments), *blocked), memoise=False)
    elif decision is None:
        decision = _decide(rule, arguments)
        quiet = decision.quiet(rule)
        if decision.memoise and signature is not None:
            rule.memo.put(signature, (decision, quiet, None), generation)
    compiled = dispatcher.compiled
    if decision.memoise and signature is not None and (decision.taken or (quiet and compiled is None)):
        latest = _promote_recent(rule, decision, seen, arguments, switches)
        if latest is not seen:
            rule.memo.put(signature, (decision, quiet, latest), generation)
    decision.record.calls += 1
    if decision.record.outcome == "fallback":
        announce(rule, decision)
    # What the switches decide is not worth a place in the memo, but the compiled kernel, which sees them, may keep it.
    lasting = decision.memoise or decision.record.outcome == "left"
    if compiled is not None and signature is not None and lasting and decision.quiet(rule):
        compiled.remember(_counter(compiled, decision.record))
    return decision.record, decision.taken


def _counter(compiled: Library, counted: Record) -> ctypes.c_int64:
    """Of calls that look like one that is remembered, and need not come here again."""
    if counted.compiled is None:
        counted.compiled = compiled.counter()
    return counted.compiled


_deciders: weakref.WeakSet[Decider] = weakref.WeakSet()


@on_invalidate
def _forget_recent() -> None:
    for rule in list(_deciders):
        rule.recent = rule.recent_masked = ()


def _request(rule: Decider, arguments: tuple[Any, ...]) -> Request:
    """What a call asks if it is taken."""
    query, key, value, attn_mask, dropout_p, is_causal, scale = arguments[:7]
    mask = torch_mask(without_repeats(attn_mask), is_causal)
    return sdpa_request(query, key, value, mask, dropout_p, scale, rule.backend)


def _signature(rule: Decider, arguments: Arguments, switches: _Switches) -> Any:
    """What a decision is remembered by; None for subclasses, of which there is more to know, and without strides."""
    query, key, value, attn_mask, _, is_causal, _, enable_gqa = arguments
    if not _are_plain(query, key, value) or _not_strided(query, key, value, attn_mask):
        return None
    if attn_mask is not None and not (_are_plain(attn_mask) or isinstance(torch_mask(attn_mask, False), Mask)):
        return None
    request = _request(rule, arguments)
    given = () if attn_mask is None else (is_causal, _is_lazy(attn_mask))
    needs_grad = tuple(tensor.requires_grad for tensor in (query, key, value)) if torch.is_grad_enabled() else None
    return memory.key_of(request, memory.needed_grads(request)), needs_grad, switches, enable_gqa, given


def _promote_recent(
    rule: Decider, decision: Decision, seen: _Seen | None, arguments: Arguments, switches: _Switches
) -> _Seen | None:
    """Let the next call be compared with this one first. Returns `seen`, or what is to be kept in its place."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    if query is key or key is value or value is query:  # which a guard takes for a change
        return seen
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    grad = torch.is_grad_enabled() if any(tensor.requires_grad for tensor in tensors) else None
    if seen is None or (seen[0] is not _never and not (seen[2] is grad and seen[0](*tensors))):
        same = _same_tensors(tensors)
        seen = (same, switches, grad, dropout_p, is_causal, scale, enable_gqa, decision.record, decision.taken)
    if seen[0] is not _never:
        latest = rule.recent if attn_mask is None else rule.recent_masked
        latest = (seen, *(other for other in latest if other is not seen))[:_RECENT_KEPT]
        if attn_mask is None:
            rule.recent = latest
        else:
            rule.recent_masked = latest
    return seen


def _same_tensors(tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """The memory's guard of these tensors, with the alignment that they nearly always have. Tensors that it does not
    let pass are looked up by their key."""
    if not memory.GUARDS_HOLD or not _are_plain(*tensors):
        return _never
    guard = memory.guard_of(*tensors)

    def same(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> bool:
        # The guard first: it knows tensors that have no address.
        return guard(query, key, value, *mask) and (address(query) | address(key) | address(value)) & 15 == 0

    return same if same(*tensors) else _never


def _never(*tensors: Tensor) -> bool:
    return False


def _transform_declines(query: Tensor, key: Tensor, value: Tensor) -> tuple[Outcome, str] | None:
    """What is at work on these tensors, none of which a memo key holds, that keeps us from taking any call."""
    if torch._C._are_functorch_transforms_active():
        return "fallback", "a functorch transform (vmap, grad, jvp) is at work, and PyTorch has rules for it"
    if has_tangent(query, key, value):
        return "fallback", "forward-mode AD is at work, and PyTorch has rules for it"
    return None


def _switches_decline(switches: _Switches) -> tuple[Outcome, str] | None:
    """A choice that the caller made among PyTorch's kernels."""
    allowed = _allowed_kernels(switches)
    if len(allowed) == 1:
        return "left", f"sdpa_kernel allows only {allowed[0]}, which is a choice"
    if switches[-1] not in _USUAL_ORDERS:
        return "left", "sdpa_kernel sets an order of PyTorch's kernels, which is a choice"
    return None


def caller_declines(query: Tensor, key: Tensor, value: Tensor) -> tuple[Outcome, str] | None:
    """Either of the two, as things stand."""
    return _transform_declines(query, key, value) or _switches_decline(_switches())


_Switches = tuple[Any, ...]


def _switch_reader() -> Callable[[], _Switches]:
    """A function that reads what decides between PyTorch's kernels, besides the tensors: the first four as in
    _TORCH_KERNELS, the last one their order. A release that lacks a switch has it in the position it always was."""

    def getter(name: str, otherwise: object) -> Callable[[], Any]:
        return getattr(torch._C, name, lambda: otherwise)

    flash = getter("_get_flash_sdp_enabled", True)
    efficient = getter("_get_mem_efficient_sdp_enabled", True)
    cudnn = getter("_get_cudnn_sdp_enabled", True)
    math = getter("_get_math_sdp_enabled", True)
    third_party = getter("_get_overrideable_sdp_enabled", True)
    flash_3 = getter("_get_fa3_sdp_enabled", False)
    reduced = getter("_get_math_sdp_allow_fp16_bf16_reduction", False)
    deterministic = getter("_get_deterministic_algorithms", False)
    order = getter("_get_sdp_priority_order", _USUAL_ORDERS[0])

    def switches() -> _Switches:
        return (
            flash(), efficient(), cudnn(), math(), third_party(), flash_3(), reduced(), deterministic(), tuple(order())
        )  # fmt: skip

    return switches


# PyTorch's numbers for math, flash, efficient, cuDNN and third-party kernels: the order as it is, and as PyTorch itself
# changes it on GPUs where it prefers cuDNN.
_USUAL_ORDERS = ((1, 2, 0, 3, 4), (3, 1, 2, 0, 4))
_switches = _switch_reader()


def _allowed_kernels(switches: _Switches) -> tuple[str, ...]:
    flags = switches[: len(_TORCH_KERNELS)]
    return _TORCH_KERNELS if all(flags) else tuple(compress(_TORCH_KERNELS, flags))


_TORCH_KERNELS = (gates.FLASH, gates.EFFICIENT, gates.CUDNN, gates.MATH)


def _decide(rule: Decider, arguments: Arguments) -> Decision:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    foreign = _foreign_type(query, key, value, attn_mask)
    if foreign:
        return _fallback(arguments, f"{foreign} defines for itself what attention means")
    try:
        why = _not_strided(query, key, value, attn_mask)
        why = why or only_torch_defines(query, key, value, attn_mask, scale, enable_gqa)
        if attn_mask is not None and is_causal:
            why = "a mask together with is_causal=True"
        if why:
            return _fallback(arguments, why)
        traced = not _are_plain(query)
        if traced and dropout_p:
            return _leave(arguments, "in a compiled graph dropout is PyTorch's alone")
        if traced and _is_symbolic(query, key, value) and rule.when is None and rule.backend == AUTO:
            return _planned_later(arguments)
        return _planned(rule, arguments, traced=traced)
    except InvalidInput as error:  # PyTorch words it in its own way, and a later call may differ where no key looks
        return _fallback(arguments, f"{error.argument}: {error.got}, expected {error.expected}", memoise=False)


def _planned_later(arguments: Arguments) -> Decision:
    because = "lengths are symbolic here, so the graph plans when it runs"
    return Decision(record(_describe_shapes(arguments), "taken", because))


def _planned(rule: Decider, arguments: Arguments, *, traced: bool) -> Decision:
    """Ask the rule's condition, then the planner, and compare with what PyTorch would do by itself."""
    try:
        query, *others = (_with_plain_sizes(one) if isinstance(one, Tensor) else one for one in arguments)
        assert isinstance(query, Tensor)
    except _UnknownSize:
        if rule.when is None:
            return _planned_later(arguments)
        return _fallback(arguments, "`when` asks for a length of which nothing is known before the graph runs")
    request = reduced(_request(rule, (query, *others)))
    resolved = resolve(request)
    problem = resolved.problem()
    target = Target.of(query.device)
    if rule.when is not None and not rule.when(problem):
        return Decision(record(str(problem), "left", "the rule's `when` is false for it"), problem=problem)
    try:
        chosen = plan(problem, target, rule.backend)
    except UnsupportedProblem as refusal:
        reasons = "; ".join(f"{v.backend}: {reason}" for v in refusal.verdicts for reason in v.reasons)
        return Decision(record(str(problem), "fallback", reasons or refusal.summary), problem=problem)
    if rule.backend == AUTO and (because := left_to_torch(chosen)):
        return Decision(record(str(problem), "fallback", because), problem=problem)
    if chosen.backend in _TORCH_KERNELS and chosen.backend not in _allowed_kernels(_switches()):
        because = f"the plan is {chosen.backend}, which is switched off"
        return Decision(record(str(problem), "left", because), memoise=False, problem=problem)
    if rule.backend == AUTO and chosen.backend == _torch_would_run(problem, target, arguments[0].ndim):
        because = f"the plan is {chosen.backend}, PyTorch's own choice"
        return Decision(record(str(problem), "left", because), problem=problem)
    if not traced and not problem.dropout:  # planned as it will run
        memory.made(request, problem, resolved.q, resolved.k, resolved.v, resolved.operands)
    return Decision(record(str(problem), "taken", f"{chosen.backend}: {chosen.because}"), problem=problem)


def _torch_would_run(problem: Problem, target: Target, ndim: int) -> str:
    """PyTorch's choice; before 2.14 its fused kernels took 4 dimensions only."""
    if ndim == 3 and target.torch < (2, 14):
        return gates.MATH
    return gates.default_choice(problem, target)


def _take(rule: Decider, arguments: tuple[Any, ...], counted: Record) -> Tensor:
    request = _request(rule, arguments)
    call = memory.find(request)
    if call is None:
        return attend(request).out
    if call.plan is not None and arguments[3] is None and (compiled := dispatcher.compiled) is not None:
        _cache_in_extension(compiled, call, request, counted)
    return execute(call, request).out


def _cache_in_extension(compiled: Library, call: Call, request: Request, counted: Record) -> None:
    """Calls that look like the present one are made by the extension from now on, if it can make them."""
    if any(address(tensor) % 16 for tensor in (request.q, request.k, request.v)):
        return  # it knows these by whether they are aligned, not by how
    found = None if request.options.dropout else native.handle(call, request)
    if found is not None:
        compiled.take(found, _counter(compiled, counted))


def _fallback(arguments: Arguments, because: str, *, memoise: bool = True) -> Decision:
    return Decision(record(_describe_shapes(arguments), "fallback", because), memoise=memoise)


def _leave(arguments: Arguments, because: str) -> Decision:
    return Decision(record(_describe_shapes(arguments), "left", because))


def announce(rule: Decider, decision: Decision) -> None:
    if rule.on_fallback == "silent":
        return
    problem, because = decision.record.problem, decision.record.because
    message = f"scaled_dot_product_attention of {problem} goes to PyTorch: {because}"
    if rule.on_fallback == "error":
        raise UnsupportedProblem(
            f"{message}.",
            decision.problem,
            remedy="change what the reason names, or pass on_fallback='warn' or 'silent'",
        )
    warnings.warn(message, FallbackWarning, stacklevel=5)


def _are_plain(*tensors: Tensor) -> bool:
    return all(type(tensor) in _PLAIN for tensor in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def _foreign_type(*tensors: Tensor | None) -> str:
    """The name of a tensor subclass that is neither ordinary nor the compiler's; empty if there is none."""
    for tensor in tensors:
        if tensor is None or type(tensor) in _PLAIN:
            continue
        from torch._subclasses import FakeTensor  # noqa: PLC0415  (loaded already wherever such a tensor exists)
        from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

        if not isinstance(tensor, FakeTensor | FunctionalTensor):
            return f"a {type(tensor).__name__}"
    return ""


def _not_strided(*tensors: Tensor | None) -> str:
    """The layout of a tensor that has no strides; empty if all have."""
    for tensor in tensors:
        if tensor is not None and tensor.layout is not torch.strided:
            return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    return ""


def _is_lazy(tensor: Tensor) -> bool:
    """The operator gives such a tensor memory that holds its values."""
    return tensor.is_neg() or tensor._is_zerotensor()


def _is_symbolic(*tensors: Tensor) -> bool:
    return any(not isinstance(size, int) for tensor in tensors for size in tensor.shape)


class _UnknownSize(Exception):
    """A size of which a trace has no example."""


def _with_plain_sizes(tensor: Tensor) -> Tensor:
    """A tensor like this one of a trace with integers for sizes, because a condition may look at them.

    The graph is made for these sizes alone, except for those that its author has declared to vary (mark_dynamic,
    torch.export.Dim): what is decided for the example holds for them all.
    """
    if not _is_symbolic(tensor):
        return tensor
    return tensor.new_empty_strided(*([_settled(size) for size in sizes] for sizes in (tensor.shape, tensor.stride())))


def _settled(size: Any) -> int:
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise _UnknownSize
    if size.node.expr.free_symbols & _declared(size.node.shape_env):
        return int(size.node.hint)
    return int(size)


def _declared(shapes: Any) -> set[Any]:
    """The symbols of a trace that may not become constants."""
    found: set[Any] = set()
    for tracked in shapes.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if constraint is not None and not constraint.warn_only and not isinstance(size, int):
                found |= size.node.expr.free_symbols
    return found


def _describe_shapes(arguments: Arguments) -> str:
    """A line for what may not be a Problem."""
    query, key, value, mask, dropout_p, is_causal, _, _ = arguments
    named = {"q": query, "k": key, "v": value} | ({} if mask is None else {"mask": mask})
    words = [str(query.dtype).removeprefix("torch.")]
    words += [f"{name}({','.join(map(str, tensor.shape))})" for name, tensor in named.items()]
    words += ["causal"] if is_causal else []
    words += [f"dropout={dropout_p:g}"] if dropout_p else []
    return " ".join(words)
