"""The kernel that stands in PyTorch's dispatcher before scaled_dot_product_attention: rules and observers.

It sits below every name by which the operator can be reached: functions imported early, nn.MultiheadAttention,
torch.ops.aten, graphs that torch.compile traces. PyTorch's own kernel is kept and called for whatever is not taken.

A rule (`tilewise.sdpa`) decides on the calls that it governs: `rule.call(...)` gives the result, or None for PyTorch's.
A `with` block governs its own thread (or asyncio task) and the backward passes started there; the
innermost block wins; one rule at a time may govern every thread that is in no block. Observers (`tilewise.trace`) are
put in front of every call, of all threads, governed or not.

The dispatcher is process-wide, and threads read it without a lock. So the first rule or observer puts our kernel
there and it is never removed, since another thread may be running it. In threads that no rule governs the kernel passes
every call on to PyTorch's. A dispatch key of our own, included per thread, would avoid even that, but PyTorch's
higher-order operators (flex_attention, cond) refuse to run under a key that they do not know.

The kernel is there twice. In Python, below, it knows everything. Compiled (native/detour.cpp) it stands before that one
and recognises calls that were left to PyTorch before, or taken by kernels of ours: these never see Python again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import library as torch_library

from ..memo import on_invalidate
from ..native import library
from . import jagged

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
# query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
Arguments = tuple[Tensor, Tensor, Tensor, "Tensor | None", float, bool, "float | None", bool]
# observer(arguments, run): run() calls what would have run without it
Observer = Callable[[Arguments, Callable[[], Tensor]], Tensor]

_OPERATOR = "aten::scaled_dot_product_attention"
# Autograd's key of a device before the device's own: once a device has a kernel, the dispatcher decomposes no more for
# its autograd key, and a call that needs gradients, made by another thread in between, would lose them.
_KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")

_compiler: Any = import_module("torch.compiler.config")
_log = logging.getLogger("tilewise")


class Rule(Protocol):
    """Decides on the calls of a block."""

    tag: str  # marks what torch.compile caches while the rule is in force
    admitted: bool  # by the compiled detour

    def call(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, enable_gqa: bool, /,
    ) -> Tensor | None: ...  # fmt: skip

    def call_nested(self, *arguments: Any) -> Tensor | None:
        """The same for jagged nested tensors, which PyTorch hands to a function of its own (jagged.py)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A block in force, and the one around it."""

    rule: Rule
    outer: Frame | None


_top: ContextVar[Frame | None] = ContextVar("tilewise.sdpa", default=None)


def enter(rule: Rule) -> None:
    """A block of this thread or task begins."""
    dispatcher.acquire(rule)
    frame = Frame(rule, _top.get())
    dispatcher.move(frame)
    _hand_to_device_threads(frame)


def leave(rule: Rule) -> bool:
    """The innermost block of this thread or task ends; False, and nothing is done, if it is not this rule's."""
    frame = _top.get()
    if frame is None or frame.rule is not rule:
        return False
    dispatcher.move(frame.outer)
    _hand_to_device_threads(frame.outer)
    dispatcher.release(rule)
    return True


def current_rule() -> Rule | None:
    """The rule that a call made here and now would meet; None = PyTorch's own behaviour."""
    frame = _top.get()
    return _outside_blocks() if frame is None else frame.rule


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """`observer(arguments, run)` stands in front of the operator; `run()` calls what would have run without it."""
    dispatcher.observe(observer)
    try:
        yield
    finally:
        dispatcher.leave_unobserved(observer)


def was_taken() -> bool:
    """Whether a rule took the call that this thread's observer has just run."""
    return _observing.taken


class Dispatcher:
    """Our kernel in PyTorch's dispatcher: put there by the first rule or observer, for good.

    Registering once is safe beside threads that dispatch: what it replaces is an unboxed kernel, whose function ignores
    its functor, so that a thread that reads the table meanwhile runs the old kernel or the new one. To replace our
    kernel in Python by the compiled one is not safe, so that is only done while there is no other thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.holders = 0  # blocks that are open, and `enable`
        self.outside: Rule | None = None  # governs every thread that is in no block
        self.observers: tuple[Observer, ...] = ()
        self.compiled: library.Library | None = None  # where it is in front of the kernel in Python, and decides
        self._standing: library.Library | None = None  # where it is in front at all
        self._originals: dict[str, Any] = {}
        self._all_composite = False
        self._admitted: weakref.WeakSet[Rule] = weakref.WeakSet()  # by the compiled detour
        on_invalidate(self.forget_decisions)

    def acquire(self, rule: Rule) -> None:
        """A rule comes into force, in some thread."""
        with self._lock:
            self._install()
            jagged.install(current_rule)
            self.holders += 1
            if self.compiled is not None and not rule.admitted:
                rule.admitted = True
                self.compiled.admit(id(rule))
                self._admitted.add(rule)
                weakref.finalize(rule, self.compiled.forget, id(rule))
            _add_cache_tag(rule.tag)
            self.tell()

    def forget_decisions(self) -> None:
        """Let every call be decided in Python again, once."""
        with self._lock:
            if self._standing is not None:
                for rule in self._admitted:
                    self._standing.forget(id(rule))
                    self._standing.admit(id(rule))

    def govern_outside(self, rule: Rule | None) -> None:
        """Set the rule of the threads that are in no block."""
        with self._lock:
            self.outside = rule
            self.tell()

    def release(self, rule: Rule) -> None:
        with self._lock:
            self.holders -= 1
            _drop_cache_tag(rule.tag)
            self.tell()

    def move(self, frame: Frame | None) -> None:
        """Set the innermost block of this thread or task: through the compiled detour, whose threads remember it."""
        if self._standing is None:
            _top.set(frame)
        else:
            self._standing.move(frame)

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
        """Tell the compiled detour which rules are in force."""
        with self._lock:
            if self._standing is not None:
                rule = self.outside
                all_to_python = bool(self.observers) or (self.compiled is None and self.holders > 0)
                self._standing.govern(rule, self.holders > (rule is not None), all_to_python)

    def _install(self) -> None:
        if self._standing is None and (not self._originals or self._may_replace()):
            self._put_in_front(library.loaded())
        self.compiled = self._standing if library.is_wanted() else None

    def _may_replace(self) -> bool:
        """Whether the compiled kernel may take the place of the one in Python: no other thread can be dispatching."""
        alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
        return alone and self._all_composite and library.is_wanted()

    def _put_in_front(self, compiled: library.Library | None) -> None:
        first = not self._originals
        if first:
            self._all_composite = not any(map(_has_kernel, _KEYS))
            # Read them all first: once a device has a kernel, the dispatcher answers differently for its autograd key.
            self._originals = {key: torch_library.get_kernel(_OPERATOR, key) for key in _KEYS}
        if compiled is not None and self._begin_compiled(compiled, first):
            self._standing = compiled
        elif first:
            self._register("IMPL", "aten")
        _forget_resolved_kernels()

    def _begin_compiled(self, compiled: library.Library, first: bool) -> bool:
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
            call_boxed = original.call_boxed if self._all_composite else _without_returning(original.call_boxed)
            library.impl(_OPERATOR.removeprefix("aten::"), key, _kernel(call_boxed))


def _has_kernel(key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key)


def _forget_resolved_kernels() -> None:
    """Under torch.compile an operator remembers in Python which kernel a key leads to, and a registration by name does
    not tell it: a graph traced before the override would decide for those traced after."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


dispatcher = Dispatcher()


class _Observing(threading.local):
    """Of this thread: whether it is in a call that is observed, and whether that call was taken."""

    call = False
    taken = False


_observing = _Observing()


def _observed(kernel: Callable[..., Tensor], arguments: Arguments) -> Tensor:
    """A call with all observers before it. What the operator calls by itself is part of the same call."""
    observers = dispatcher.observers

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


class _Passing(threading.local):
    """Of this thread: whether it is in a kernel that another library had registered before ours."""

    on = False


_passing = _Passing()


def _without_returning(call_boxed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Calls the kernel of another library that ours stands in front of, or PyTorch's if that kernel leads back here.

    Under a dispatch mode, such as that of the fake tensors torch.compile traces with, PyTorch runs the function in
    Python that was registered last for an operator and a key, whichever of them it was asked to call. A kernel in
    Python that ours replaced is then our own.
    """
    decompose = torch.ops.aten.scaled_dot_product_attention.default.decompose

    def call(keys: Any, *arguments: Any, **options: Any) -> Tensor:
        if _passing.on:
            return decompose(*arguments, **options)  # type: ignore[no-any-return]
        _passing.on = True
        try:
            return call_boxed(keys, *arguments, **options)
        finally:
            _passing.on = False

    return call


def left_uncompiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep torch.compile from a function that PyTorch's C++ calls, and from all that it calls.

    Where a frame cannot be compiled as a whole, Dynamo runs it and compiles every Python function that is called in
    there, kernels of operators among them. This costs a call nothing, and unlike `torch.compiler.disable` it loads no
    compiler.
    """
    frames: Any = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):  # of releases that have no such strategy: they compile more than needed
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


_Result = TypeVar("_Result")


def _kernel(call_boxed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel to register in front of an original. What a call passes that was left before is written for speed."""
    no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)  # the original decomposes and reads none
    get_top, asked = _top.get, dispatcher

    @left_uncompiled
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
        if asked.observers and not _observing.call:
            return _observed(
                scaled_dot_product_attention,
                (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            )
        frame = get_top()
        rule = _outside_blocks() if frame is None else frame.rule
        if rule is not None:
            taken = rule.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if taken is not None:
                if asked.observers:
                    _observing.taken = True
                return taken
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
    rule = dispatcher.outside
    if rule is not None and dispatcher.holders == 1:  # which is `enable`: no thread is in a block
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

    frame: Frame
    thread: int

    def seen_from_elsewhere(self) -> Frame | None:
        return None if self.thread == threading.get_ident() else self.frame


def _hand_to_device_threads(frame: Frame | None) -> None:
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
