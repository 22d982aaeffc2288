"""F.scaled_dot_product_attention through the planner: `with tilewise.sdpa(): ...`, or `tilewise.sdpa.enable()`.

The override sits in PyTorch's dispatcher, below every name by which the operator can be reached: functions imported
early, nn.MultiheadAttention, torch.ops.aten, graphs that torch.compile traces. PyTorch's own kernel is kept and called
for whatever is not taken, so nothing that worked before stops working. Each call has one of three outcomes:

    taken      the planner chose something else than PyTorch would, and that ran
    left       PyTorch's own choice is the plan, or the caller's wish (`when`, sdpa_kernel): it ran untouched
    fallback   we would have liked to plan it and could not; PyTorch ran it, and `on_fallback` says who hears of it

Who sees a rule: a `with` block governs its own thread (or asyncio task) and the backward passes started there; the
innermost block wins. `enable()` governs every thread that is in no block.

The dispatcher is process-wide, and threads read it without a lock. So the first rule puts our kernel there and nothing
ever takes it out: a kernel that is removed may be one that runs. What comes and goes is whether anybody is governed;
while nobody is, and in threads that are not, the kernel passes every call on to PyTorch's. A dispatch key of our own,
included per thread, would spare them even that; but PyTorch's higher-order operators (flex_attention, cond) refuse to
run under a key that they do not know.

The kernel is there twice. In Python, below, it decides and knows everything. Compiled (detour.py) it stands before that
one and recognises calls that were left to PyTorch before, which then never see Python.

Invariant: both "left" and "taken" compute the right values for *any* call. What a call remembers of an earlier one is
only which of the two is wanted. Its key holds all of PyTorch's switches, for they are the caller's wishes, and may
leave out of the tensors what a repeated decision would look at again anyway.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import library as torch_library

from .. import op
from ..api import attention, only_torch_defines, torch_mask
from ..backends import torch_rules
from ..errors import InvalidInput, UnsupportedProblem
from ..op import Options
from ..plan import AUTO, BACKENDS, plan
from ..problem import describe
from ..target import Target
from . import detour

if TYPE_CHECKING:
    from types import TracebackType

    from ..problem import Problem

Tensor = torch.Tensor
Outcome = Literal["taken", "left", "fallback"]
OnFallback = Literal["silent", "warn", "error"]

_OPERATOR = "aten::scaled_dot_product_attention"
# Autograd's key of a device before the device's own: once a device has a kernel, the dispatcher decomposes no more for
# its autograd key, and a call that needs gradients, made by another thread in between, would lose them.
_KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")
_MEMO_KEPT = 4096
_RECENT_KEPT = 2  # self- and cross-attention in turn
_RECORDS_KEPT = 256

_compiler: Any = import_module("torch.compiler.config")
_log = logging.getLogger("tilewise")


class FallbackWarning(UserWarning):
    """A call went to PyTorch because tilewise could not plan it."""


class Entry(NamedTuple):
    """A line of the report: what was asked, what became of it, why, and how many calls it stands for."""

    problem: str
    outcome: Outcome
    because: str
    calls: int

    def __str__(self) -> str:
        return f"{self.calls:6d}x {self.outcome:8s} {self.problem}: {self.because}"


class _Record:
    """A line of the report while it is being counted. Threads that share one may lose a count, never a line."""

    __slots__ = ("because", "calls", "compiled", "outcome", "problem")

    def __init__(self, problem: str, outcome: Outcome, because: str) -> None:
        self.problem, self.outcome, self.because, self.calls = problem, outcome, because, 0
        self.compiled: ctypes.c_int64 | None = None  # calls that never came to Python

    def entry(self) -> Entry:
        compiled = 0 if self.compiled is None else self.compiled.value
        return Entry(self.problem, self.outcome, self.because, self.calls + compiled)

    def clear(self) -> None:
        self.calls = 0
        if self.compiled is not None:
            self.compiled.value = 0


_records: dict[tuple[str, Outcome, str], _Record] = {}
_records_lock = threading.RLock()  # reentrant, because a finalizer may call the operator in the middle of anything


def _record(problem: str, outcome: Outcome, because: str) -> _Record:
    """The line for this case; the oldest line makes room when there are too many."""
    key = (problem, outcome, because)
    with _records_lock:
        found = _records.get(key)
        if found is None:
            found = _records[key] = _Record(*key)
            while len(_records) > _RECORDS_KEPT:
                _records.pop(next(iter(_records)), None)
    return found


# query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
_Arguments = tuple[Tensor, Tensor, Tensor, "Tensor | None", float, bool, "float | None", bool]
# observer(arguments, run): run() calls what would have run without it
Observer = Callable[[_Arguments, Callable[[], Tensor]], Tensor]


# How a call is recognised: a test of its tensors; PyTorch's switches; whether gradients were enabled (None = no
# matter); dropout_p, is_causal, scale and enable_gqa as they were. Then what becomes of it: the line that counts it,
# and the options it is taken with. A bare tuple, because that unpacks fastest.
_Seen = tuple[
    "Callable[..., bool]", "_Switches", "bool | None", float, bool, "float | None", bool, _Record, "Options | None"
]


class _Decision(NamedTuple):
    """What becomes of calls of one signature. `options` are set for those that are taken."""

    record: _Record
    options: Options | None = None
    problem: Problem | None = None
    memoise: bool = True

    def quiet(self, rule: Rule) -> bool:
        """PyTorch's kernel is called and nobody needs to hear of it."""
        return self.options is None and (self.record.outcome == "left" or rule.on_fallback == "silent")


class Rule:
    """One setting of the override, and the context manager that puts it in force. May be entered again and again."""

    def __init__(self, when: Callable[[Problem], object] | None, on_fallback: OnFallback, backend: str) -> None:
        if when is not None and not callable(when):
            raise InvalidInput("when", repr(when), "a function of a Problem, or None", "pass lambda problem: ...")
        if on_fallback not in ("silent", "warn", "error"):
            raise InvalidInput("on_fallback", repr(on_fallback), "'silent', 'warn' or 'error'", "choose one of these")
        if backend != AUTO and backend not in BACKENDS:
            raise InvalidInput("backend", repr(backend), f"'auto' or one of {', '.join(BACKENDS)}", "choose one")
        self.when = when
        self.on_fallback = on_fallback
        self.backend = backend
        # Compiled graphs hold what was decided when they were traced, so PyTorch's disk caches must tell rules apart;
        # a function cannot be told apart from another one of tomorrow, so a rule that has one shares nothing.
        self.tag = f"tilewise-sdpa:{backend}" + (f":{os.urandom(8).hex()}" if when else "")
        # A condition, or a backend that may refuse, looks at the whole Problem: what is remembered must hold it all.
        self.exact = when is not None or backend != AUTO
        self.memo: dict[Any, tuple[_Decision, bool, _Seen | None]] = {}  # by signature; the flag is its `quiet`
        self.recent: tuple[_Seen, ...] = ()  # the latest of these without a mask, and with one
        self.recent_masked: tuple[_Seen, ...] = ()
        self.admitted = False  # by the compiled detour

    def __enter__(self) -> Rule:
        _dispatcher.acquire(self)
        frame = _Frame(self, _top.get())
        _top.set(frame)
        _hand_to_device_threads(frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = _top.get()
        if frame is None or frame.rule is not self:
            raise InvalidInput(
                "tilewise.sdpa",
                "a block that ends where it did not begin",
                "the innermost block of this thread or task",
                "leave blocks in reverse order, in the thread or task that entered them",
            )
        _top.set(frame.outer)
        _hand_to_device_threads(frame.outer)
        _dispatcher.release(self)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A block in force, and the one around it."""

    rule: Rule
    outer: _Frame | None


_top: ContextVar[_Frame | None] = ContextVar("tilewise.sdpa", default=None)


_OPTIONS = ("when", "on_fallback", "backend")


def _check_options(function: str, positional: tuple[object, ...], unknown: dict[str, object]) -> None:
    """Whoever misspells an option, or passes one without its name, gets the names."""
    if not (positional or unknown):
        return
    got = [f"{name}={value!r}" for name, value in unknown.items()] + [f"{value!r}, unnamed" for value in positional]
    near = [match for name in unknown for match in get_close_matches(name, _OPTIONS, 1)]
    raise InvalidInput(
        function,
        ", ".join(got),
        f"the options {', '.join(_OPTIONS)}, by name",
        f"write {near[0]}=..." if near else "drop it, or write one of these",
    )


class Override:
    """F.scaled_dot_product_attention through the planner, for a block (`with tilewise.sdpa():`) or for the process.

    when         a function of the Problem: calls for which it is false are left to PyTorch. Its answer is remembered
                 for equal Problems, so it should depend on nothing else.
    on_fallback  what happens when a call cannot be planned and goes to PyTorch: "silent" (it is only recorded),
                 "warn" (FallbackWarning) or "error" (UnsupportedProblem).
    backend      "auto", or the name of the one backend to use; what it refuses is a fallback.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rule: Rule | None = None

    def __call__(
        self,
        *positional: object,
        when: Callable[[Problem], object] | None = None,
        on_fallback: OnFallback = "silent",
        backend: str = AUTO,
        **unknown: object,
    ) -> Rule:
        _check_options("tilewise.sdpa", positional, unknown)
        return Rule(when, on_fallback, backend)

    def enable(
        self,
        *positional: object,
        when: Callable[[Problem], object] | None = None,
        on_fallback: OnFallback = "silent",
        backend: str = AUTO,
        **unknown: object,
    ) -> None:
        """Put a rule in force for every thread that is in no block, until `disable`."""
        _check_options("tilewise.sdpa.enable", positional, unknown)
        rule = Rule(when, on_fallback, backend)
        with self._lock:
            if self._rule is not None:
                raise InvalidInput(
                    "tilewise.sdpa.enable",
                    "a second call",
                    "one enable() per disable()",
                    "call tilewise.sdpa.disable() first, or use a `with tilewise.sdpa(...):` block inside",
                )
            _dispatcher.acquire(rule)
            self._rule = rule
            _dispatcher.tell()

    def disable(self) -> None:
        """Take back `enable`. Blocks that are open stay in force."""
        with self._lock:
            rule = self._rule
            if rule is None:
                raise InvalidInput(
                    "tilewise.sdpa.disable",
                    "a call without enable()",
                    "enable() before it",
                    "drop the call; a `with tilewise.sdpa():` block ends by itself",
                )
            self._rule = None
            _dispatcher.release(rule)

    def compile(self) -> None:
        """Build the compiled detour now, if it is not there, rather than in the background (detour.py).

        Rules that come into force from then on use it; in a process that has used the override before and has several
        threads, only those of the next process. Raises CompileError where this machine cannot build it.
        """
        detour.build()

    @property
    def rule(self) -> Rule | None:
        """The rule that a call made here and now would meet; None = PyTorch's own behaviour."""
        frame = _top.get()
        return _outside_blocks() if frame is None else frame.rule

    def report(self) -> list[Entry]:
        """What became of the calls since the process began or `clear`: at most 256 cases, the oldest first."""
        return [entry for entry in (line.entry() for line in _lines()) if entry.calls]

    def clear(self) -> None:
        """Start the report anew."""
        for line in _lines():
            line.clear()


def _lines() -> list[_Record]:
    with _records_lock:
        return list(_records.values())


sdpa = Override()


# ---------------------------------------------------------------------------------------------------------------------
# The dispatcher


class _Dispatcher:
    """Our kernel in PyTorch's dispatcher: put there by the first who wants it, for good.

    Registering once is safe beside threads that dispatch: what it replaces is an unboxed kernel, whose function ignores
    its functor, so that a thread that reads the table meanwhile runs the old kernel or the new one. To replace our
    kernel in Python by the compiled one is not safe, so that is only done while there is no other thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.holders = 0  # blocks that are open, and `enable`
        self.observers: tuple[Observer, ...] = ()
        self.compiled: detour.Detour | None = None  # where it is in front of the kernel in Python, and decides
        self._standing: detour.Detour | None = None  # where it is in front at all
        self._originals: dict[str, Any] = {}
        self._all_composite = False

    def acquire(self, rule: Rule) -> None:
        """A rule comes into force, for somebody."""
        with self._lock:
            self._install()
            self.holders += 1
            if self.compiled is not None and not rule.admitted:
                rule.admitted = True
                self.compiled.admit(id(rule))
                weakref.finalize(rule, self.compiled.forget, id(rule))
            _add_cache_tag(rule.tag)
            self.tell()

    def release(self, rule: Rule) -> None:
        with self._lock:
            self.holders -= 1
            _drop_cache_tag(rule.tag)
            self.tell()

    def observe(self, observer: Observer) -> None:
        """Put an observer in front of every call, of all threads; the newest is asked first."""
        with self._lock:
            self._install()
            self.observers = (*self.observers, observer)
            self.tell()

    def leave_unobserved(self, observer: Observer) -> None:
        """Take an observer back. Calls that it is in the middle of come to their end."""
        with self._lock:
            self.observers = tuple(one for one in self.observers if one != observer)
            self.tell()

    def tell(self) -> None:
        """Let the compiled detour know who is governed by what."""
        with self._lock:
            if self._standing is not None:
                rule = sdpa._rule
                all_to_python = bool(self.observers) or (self.compiled is None and self.holders > 0)
                self._standing.govern(rule, self.holders > (rule is not None), all_to_python)

    def _install(self) -> None:
        if self._standing is None and (not self._originals or self._may_replace()):
            self._put_in_front(detour.loaded())
        self.compiled = self._standing if detour.is_wanted() else None

    def _may_replace(self) -> bool:
        """Whether the compiled kernel may take the place of the one in Python: nobody else can be dispatching."""
        alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
        return alone and self._all_composite and detour.is_wanted()

    def _put_in_front(self, compiled: detour.Detour | None) -> None:
        first = not self._originals
        if first:
            self._all_composite = not any(map(_has_kernel, _KEYS))
            # All of them first: once a device has a kernel, the dispatcher answers differently for its autograd key.
            self._originals = {key: torch_library.get_kernel(_OPERATOR, key) for key in _KEYS}
        if compiled is not None and self._begin_compiled(compiled, first):
            self._standing = compiled
        elif first:
            self._register("IMPL", "aten")
        _forget_resolved_kernels()

    def _begin_compiled(self, compiled: detour.Detour, first: bool) -> bool:
        """The compiled kernel in front, and behind it, as an operator of its own, the one in Python."""
        try:
            self._register("FRAGMENT", "tilewise")
            compiled.begin(_top, _get_from_tls, _HANDED)
            compiled.install(_KEYS, composite=not first)
        except RuntimeError as error:
            _log.warning("tilewise: %s; the kernel in Python does its work", error)
            return False
        return True

    def _register(self, kind: str, namespace: str) -> None:
        """Register the kernel in Python. torch.library would take it out when the interpreter ends, under threads that
        still run, so this is one level below, and what keeps it there is never released."""
        library = torch._C._dispatch_library(kind, namespace, "")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))
        if kind == "FRAGMENT":
            schema = torch.ops.aten.scaled_dot_product_attention.default._schema
            library.define(str(schema).removeprefix("aten::"))
        for key, original in self._originals.items():
            library.impl(_OPERATOR.removeprefix("aten::"), key, _kernel(original.call_boxed))


def _has_kernel(key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key)


def _forget_resolved_kernels() -> None:
    """Under torch.compile an operator remembers in Python which kernel a key leads to, and a registration by name does
    not tell it: a graph traced before the override would decide for those traced after."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


_dispatcher = _Dispatcher()


class _Observing(threading.local):
    """Of this thread: whether it is in a call that is observed, and whether that call was taken."""

    call = False
    taken = False


_observing = _Observing()


def _observed(kernel: Callable[..., Tensor], arguments: _Arguments) -> Tensor:
    """A call with all observers before it. What the operator calls by itself is part of the same call."""
    observers = _dispatcher.observers

    def run(left: int) -> Tensor:
        if left == 0:
            _observing.taken = False
            return kernel(*arguments)
        return observers[left - 1](arguments, lambda: run(left - 1))

    _observing.call = True
    try:
        return run(len(observers))
    finally:
        _observing.call = False


def _kernel(call_boxed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel to register in front of an original. What a call passes that was left before is written for speed."""
    no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)  # the original decomposes and reads none
    get_top, grad_enabled, dispatcher, switches_now = _top.get, torch.is_grad_enabled, _dispatcher, _switches

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dispatcher.observers and not _observing.call:
            return _observed(
                scaled_dot_product_attention,
                (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            )
        frame = get_top()
        rule = _outside_blocks() if frame is None else frame.rule
        if rule is not None:
            if attn_mask is None:
                tensors: tuple[Tensor, ...] = (query, key, value)
                recent = rule.recent
            else:
                tensors = (query, key, value, attn_mask)
                recent = rule.recent_masked
            switches = switches_now() if recent else None
            for same, then, grad, dropout, causal, factor, gqa, record, options in recent:
                if (
                    switches == then
                    and (grad is None or grad_enabled() is grad)
                    and is_causal is causal
                    and scale == factor
                    and dropout_p == dropout
                    and enable_gqa is gqa
                    and same(*tensors)
                    and (options is None or not _transform_says_no(query, key, value))
                ):
                    record.calls += 1
                    break
            else:
                options = _settle(rule, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
            if options is not None:
                if dispatcher.observers:
                    _observing.taken = True
                return _take((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), options)
        # PyTorch's own kernel; arguments that have their default are cheaper left out.
        if scale is None and not enable_gqa:
            if is_causal or dropout_p:
                return call_boxed(no_keys, query, key, value, attn_mask, dropout_p, is_causal)
            if attn_mask is None:
                return call_boxed(no_keys, query, key, value)
            return call_boxed(no_keys, query, key, value, attn_mask)
        if scale is None:
            return call_boxed(no_keys, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        if not enable_gqa:
            return call_boxed(no_keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        return call_boxed(
            no_keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return scaled_dot_product_attention


def _outside_blocks() -> Rule | None:
    """The rule for a thread that is in no block of its own.

    Autograd's device threads are in the block from which the backward pass was started, because checkpoints recompute
    there: PyTorch hands them a copy of the starting thread's state. Since 2.12 its context is among it; before, we put
    the block there ourselves.
    """
    rule = sdpa._rule
    if rule is not None and _dispatcher.holders == 1:  # which is `enable`: nobody is in a block
        return rule
    if _is_in_tls(_HANDED):
        handed = _get_from_tls(_HANDED)
        if handed is not None:
            frame = handed.get(_top) if _TORCH_HANDS_THE_CONTEXT else handed.seen_from_elsewhere()
            if frame is not None:
                return frame.rule  # type: ignore[no-any-return]
    return rule


_is_in_tls, _get_from_tls = torch._C._is_key_in_tls, torch._C._get_obj_in_tls
_TORCH_HANDS_THE_CONTEXT = hasattr(torch.autograd.graph, "contextvars")
_HANDED = "context" if _TORCH_HANDS_THE_CONTEXT else "tilewise.sdpa"


class _Handed(NamedTuple):
    """A block as the thread that entered it hands it on. In that thread itself the context knows better."""

    frame: _Frame
    thread: int

    def seen_from_elsewhere(self) -> _Frame | None:
        return None if self.thread == threading.get_ident() else self.frame


def _hand_to_device_threads(frame: _Frame | None) -> None:
    if not _TORCH_HANDS_THE_CONTEXT:
        handed = None if frame is None else _Handed(frame, threading.get_ident())
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handed))  # the stash of these releases drops one that it never took
        torch._C._stash_obj_in_tls(_HANDED, handed)


def _add_cache_tag(tag: str) -> None:
    """Mark what torch.compile caches on disk from here on, for as long as the rule is in force somewhere.

    Those caches know a graph by its Python code, in which the override does not appear.
    """
    _compiler.cache_key_tag = f"{_compiler.cache_key_tag} {tag}".strip()


def _drop_cache_tag(tag: str) -> None:
    """Take one such mark back. Blocks of several threads end in any order, and the user's own tag stays."""
    words = _compiler.cache_key_tag.split(" ")
    if tag in words:
        del words[len(words) - 1 - words[::-1].index(tag)]
        _compiler.cache_key_tag = " ".join(words)


# ---------------------------------------------------------------------------------------------------------------------
# The decision


def _settle(rule: Rule, arguments: _Arguments) -> Options | None:
    """The decision for a call, counted, announced where asked for, and remembered where it may be.

    Returns what it is taken with, or None for PyTorch's kernel.
    """
    switches = _switches()
    signature = _signature(rule, arguments, switches)
    decision, quiet, seen = rule.memo.get(signature, (None, False, None))
    blocked = None if quiet else _transform_says_no(*arguments[:3]) or _switches_say_no(switches)
    if blocked:
        decision = _Decision(_record(_describe_shapes(arguments), *blocked), memoise=False)
    elif decision is None:
        decision = _decide(rule, arguments)
        quiet = decision.quiet(rule)
        if decision.memoise and signature is not None:
            _remember(rule, signature, decision, quiet, None)
    compiled = _dispatcher.compiled
    if decision.memoise and signature is not None and (decision.options is not None or (quiet and compiled is None)):
        latest = _bring_forward(rule, decision, seen, arguments, switches)
        if latest is not seen:
            _remember(rule, signature, decision, quiet, latest)
    decision.record.calls += 1
    if decision.record.outcome == "fallback":
        _announce(rule, decision)
    # What the switches decide is not worth a place in the memo, but the compiled kernel, which sees them, may keep it.
    lasting = decision.memoise or decision.record.outcome == "left"
    if compiled is not None and signature is not None and lasting and decision.quiet(rule):
        _let_it_pass(compiled, decision.record)
    return decision.options


def _let_it_pass(compiled: detour.Detour, record: _Record) -> None:
    """Calls that look like the present one need not come here again."""
    if record.compiled is None:
        record.compiled = compiled.counter()
    compiled.remember(record.compiled)


def _remember(rule: Rule, signature: Any, decision: _Decision, quiet: bool, seen: _Seen | None) -> None:
    if len(rule.memo) >= _MEMO_KEPT:
        rule.memo.clear()
    rule.memo[signature] = decision, quiet, seen


def _signature(rule: Rule, arguments: _Arguments, switches: _Switches) -> Any:
    """What a decision is remembered by; None for subclasses, of which there is more to know."""
    query, key, value, attn_mask, *others = arguments
    if not (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN):
        return None
    grad = torch.is_grad_enabled()
    lazy = _is_lazy(query) or _is_lazy(key) or _is_lazy(value)
    signature: tuple[Any, ...] = (
        query.shape, key.shape, value.shape, query.dtype, query.requires_grad and grad, lazy, switches, *others
    )  # fmt: skip
    if not rule.exact and attn_mask is None:
        return signature
    described = None
    if attn_mask is not None:
        described = (
            attn_mask.shape, attn_mask.dtype, attn_mask.requires_grad and grad, type(attn_mask), _is_lazy(attn_mask)
        )  # fmt: skip
    signature += (query.get_device(), described)
    if not rule.exact:
        return signature
    tensors = tuple((t.stride(), t.storage_offset(), t.dtype, t.requires_grad) for t in (query, key, value))
    return (*signature, grad, tensors)


def _bring_forward(
    rule: Rule, decision: _Decision, seen: _Seen | None, arguments: _Arguments, switches: _Switches
) -> _Seen | None:
    """Let the next call be compared with this one first. Returns `seen`, or what is to be kept in its place."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    if query is key or key is value:  # which a guard takes for a change
        return seen
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    grad = torch.is_grad_enabled() if any(tensor.requires_grad for tensor in tensors) else None
    if seen is None or (seen[0] is not _never and not (seen[2] is grad and seen[0](*tensors))):
        same = _same_tensors(rule, tensors)
        seen = (same, switches, grad, dropout_p, is_causal, scale, enable_gqa, decision.record, decision.options)
    if seen[0] is not _never:
        latest = rule.recent if attn_mask is None else rule.recent_masked
        latest = (seen, *(other for other in latest if other is not seen))[:_RECENT_KEPT]
        if attn_mask is None:
            rule.recent = latest
        else:
            rule.recent_masked = latest
    return seen


def _same_tensors(rule: Rule, tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """A test that calls pass whose tensors have this signature; others may fail it, and are then looked up by theirs.

    The guard of compiled graphs compares types, dtypes, devices, shapes, strides and requires_grad in one call into
    C++; reading these attributes here would take a dozen. What else a signature holds of the tensors has to be as it
    nearly always is: aligned memory.
    """
    exact = rule.exact
    if _TensorGuards is None or not _are_plain(*tensors):
        return _never
    strides = None if exact else [[None] * tensor.ndim for tensor in tensors]  # None = any
    guard: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=strides).check

    def guard_and_alignment(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> bool:
        try:
            aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 == 0
        except RuntimeError:  # there is no memory behind one of them
            return False
        return aligned and guard(query, key, value, *mask)

    same = guard_and_alignment if exact else guard
    return same if same(*tensors) else _never


def _tensor_guards() -> Any:
    """The guards' class, which is private to PyTorch; None where it is not, or is not as known here."""
    try:
        guards = import_module("torch._C._dynamo.guards").TensorGuards
        one, two = torch.empty(1), torch.empty(2)
        same = guards(one, dynamic_dims_sizes=None, dynamic_dims_strides=[[None]]).check
        return guards if same(one) and not same(two) else None
    except Exception:
        return None


_TensorGuards = _tensor_guards()


def _never(*tensors: Tensor) -> bool:
    return False


def _transform_says_no(query: Tensor, key: Tensor, value: Tensor) -> tuple[Outcome, str] | None:
    """What is at work on these tensors, none of which a memo key holds, that keeps us from taking any call."""
    if torch._C._are_functorch_transforms_active():
        return "fallback", "a functorch transform (vmap, grad, jvp) is at work, and PyTorch has rules for it"
    if op.has_tangent(query, key, value):
        return "fallback", "forward-mode AD is at work, and PyTorch has rules for it"
    return None


def _switches_say_no(switches: _Switches) -> tuple[Outcome, str] | None:
    """A choice that the caller made among PyTorch's kernels."""
    allowed = _allowed_kernels(switches)
    if len(allowed) == 1:
        return "left", f"sdpa_kernel allows only {allowed[0]}, which is a choice"
    if switches[-1] not in _USUAL_ORDERS:
        return "left", "sdpa_kernel sets an order of PyTorch's kernels, which is a choice"
    return None


_Switches = tuple[Any, ...]


def _switch_reader() -> Callable[[], _Switches]:
    """The function that reads all that decides between PyTorch's kernels beside the tensors: the first four as in
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


_TORCH_KERNELS = (torch_rules.FLASH, torch_rules.EFFICIENT, torch_rules.CUDNN, torch_rules.MATH)


def _decide(rule: Rule, arguments: _Arguments) -> _Decision:
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
        options = Options(_mask_text(attn_mask, is_causal), scale, backend=rule.backend)
        if traced and _is_symbolic(query, key, value) and not rule.exact:
            because = "lengths are symbolic here, so the graph plans when it runs"
            return _Decision(_record(_describe_shapes(arguments), "taken", because), options)
        return _planned(rule, arguments, options)
    except InvalidInput as error:  # PyTorch words it in its own way, and a later call may differ where no key looks
        return _fallback(arguments, f"{error.argument}: {error.got}, expected {error.expected}", memoise=False)


def _planned(rule: Rule, arguments: _Arguments, options: Options) -> _Decision:
    """Ask the rule's condition, then the planner, and compare with what PyTorch would do by itself."""
    query, key, value = _concrete(_four_dims(*arguments[:3]))
    _, _, _, attn_mask, dropout_p, is_causal, scale, _ = arguments
    problem = describe(query, key, value, mask=torch_mask(attn_mask, is_causal), scale=scale, dropout=dropout_p)
    target = Target.of(query.device)
    if rule.when is not None and not rule.when(problem):
        return _Decision(_record(str(problem), "left", "the rule's `when` is false for it"), problem=problem)
    try:
        chosen = plan(problem, target, rule.backend)
    except UnsupportedProblem as refusal:
        reasons = "; ".join(f"{v.backend}: {reason}" for v in refusal.verdicts for reason in v.reasons)
        return _Decision(_record(str(problem), "fallback", reasons or refusal.summary), problem=problem)
    if chosen.backend in _TORCH_KERNELS and chosen.backend not in _allowed_kernels(_switches()):
        because = f"the plan is {chosen.backend}, which is switched off"
        return _Decision(_record(str(problem), "left", because), memoise=False, problem=problem)
    if rule.backend == AUTO and chosen.backend == _torch_would_run(problem, target, arguments[0].ndim):
        because = f"the plan is {chosen.backend}, PyTorch's own choice"
        return _Decision(_record(str(problem), "left", because), problem=problem)
    return _Decision(_record(str(problem), "taken", f"{chosen.backend}: {chosen.because}"), options, problem=problem)


def _torch_would_run(problem: Problem, target: Target, ndim: int) -> str:
    """PyTorch's choice; before 2.14 its fused kernels took 4 dimensions only."""
    if ndim == 3 and target.torch < (2, 14):
        return torch_rules.MATH
    return torch_rules.default_choice(problem, target)


def _take(arguments: _Arguments, options: Options) -> Tensor:
    _, _, _, attn_mask, dropout_p, is_causal, scale, _ = arguments
    query, key, value = _four_dims(*arguments[:3])
    if dropout_p:
        mask = torch_mask(attn_mask, is_causal)
        out = attention(query, key, value, mask=mask, scale=scale, dropout=dropout_p, backend=options.backend)
    else:
        options = options._replace(layout=_layout(arguments[0]))
        out = _run(query, key, value, None if options.mask else attn_mask, options)
    return out[0] if arguments[0].ndim == 3 else out


def _run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    if bias is not None or not op.is_plain(query, key, value):
        return op.run(query, key, value, bias, options)[0]
    call = op.recall(query, key, value, options)
    if call is None:
        call = op.prepare(query, key, value, None, options, op.needs_grad(query, key, value))
        op.remember(call, query, key, value, options)
    return op.execute(call, query, key, value, None)[0]


def _fallback(arguments: _Arguments, because: str, *, memoise: bool = True) -> _Decision:
    return _Decision(_record(_describe_shapes(arguments), "fallback", because), memoise=memoise)


def _leave(arguments: _Arguments, because: str) -> _Decision:
    return _Decision(_record(_describe_shapes(arguments), "left", because))


def _announce(rule: Rule, decision: _Decision) -> None:
    if rule.on_fallback == "silent":
        return
    record = decision.record
    message = f"scaled_dot_product_attention of {record.problem} goes to PyTorch: {record.because}"
    if rule.on_fallback == "error":
        raise UnsupportedProblem(
            f"{message}.", decision.problem, remedy="mend what the reason names, or pass on_fallback='warn' or 'silent'"
        )
    warnings.warn(message, FallbackWarning, stacklevel=4)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


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


def _concrete(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensors with plain integers for sizes: a condition may look at them, so the graph is made for these."""
    if not _is_symbolic(*tensors):
        return tensors
    query, key, value = (tensor.reshape([int(size) for size in tensor.shape]) for tensor in tensors)
    return query, key, value


def _four_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seq, dim) becomes (1, batch, seq, dim): the batch takes the place of the heads, which masks fit."""
    if query.ndim == 3:
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    return query, key, value


def _layout(query: Tensor) -> Literal["bhsd", "bshd"]:
    """The memory order of out, which follows query's as it does in PyTorch's kernels."""
    return "bshd" if query.ndim == 4 and query.stride(1) < query.stride(2) else "bhsd"


def _mask_text(attn_mask: Tensor | None, is_causal: bool) -> str:
    mask = torch_mask(attn_mask, is_causal)
    return "" if isinstance(mask, Tensor) else str(mask)


def _describe_shapes(arguments: _Arguments) -> str:
    """A line for what may not be a Problem."""
    query, key, value, mask, dropout_p, is_causal, _, _ = arguments
    named = {"q": query, "k": key, "v": value} | ({} if mask is None else {"mask": mask})
    words = [str(query.dtype).removeprefix("torch.")]
    words += [f"{name}({','.join(map(str, tensor.shape))})" for name, tensor in named.items()]
    words += ["causal"] if is_causal else []
    words += [f"dropout={dropout_p:g}"] if dropout_p else []
    return " ".join(words)
