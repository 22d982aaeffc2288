"""F.scaled_dot_product_attention through the planner: `with tilewise.sdpa(): ...`, or `tilewise.sdpa.enable()`.

Each call has one of three outcomes:

    taken      the planner chose something else than PyTorch would, and that ran
    left       PyTorch's own choice is the plan, or the caller's wish (`when`, sdpa_kernel): it ran untouched
    fallback   it could not be planned; PyTorch ran it, and `on_fallback` decides how that is reported

PyTorch's own kernel is called for whatever is not taken, so nothing that worked before stops working. How calls come
here, and which rule governs which thread: tilewise/hook. How a call is decided: decision.py; of one with jagged nested
tensors: jagged.py.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from ... import hook
from ...errors import InvalidInput
from ...native import library
from ...plan import AUTO, BACKENDS
from . import jagged
from .decision import Decider, FallbackWarning
from .report import Entry, lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor

    from ...problem import Problem
    from .decision import OnFallback

_Function = TypeVar("_Function", bound="Callable[..., Any]")

__all__ = ["Entry", "FallbackWarning", "Override", "Rule", "sdpa"]


class Rule(Decider):
    """One setting of the override, and the context manager that puts it in force. May be entered again and again, and
    may decorate a function. A copy, pickled or not, has the setting and none of what was decided under it."""

    def __init__(self, when: Callable[[Problem], object] | None, on_fallback: OnFallback, backend: str) -> None:
        if when is not None and not callable(when):
            raise InvalidInput("when", repr(when), "a function of a Problem, or None", "pass lambda problem: ...")
        if on_fallback not in ("silent", "warn", "error"):
            raise InvalidInput("on_fallback", repr(on_fallback), "'silent', 'warn' or 'error'", "choose one of these")
        if backend != AUTO and backend not in BACKENDS:
            raise InvalidInput("backend", repr(backend), f"'auto' or one of {', '.join(BACKENDS)}", "choose one")
        super().__init__(when, on_fallback, backend)
        # Compiled graphs hold what was decided when they were traced, so PyTorch's disk caches must tell rules apart;
        # nothing about a function names it in another process, so a rule that has one shares nothing.
        self.tag = f"tilewise-sdpa:{backend}" + (f":{os.urandom(8).hex()}" if when else "")
        self.admitted = False  # by the compiled detour

    def call_nested(self, *arguments: Any) -> Tensor | None:
        """The result of a call with jagged nested tensors that is taken, or None for PyTorch's function."""
        return jagged.take(self, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.when, self.on_fallback, self.backend)

    def __call__(self, function: _Function) -> _Function:
        """The function with a block around each of its calls."""
        for kind, is_kind in _SUSPENDED.items():
            if is_kind(function):
                raise InvalidInput(
                    "tilewise.sdpa",
                    f"the {kind} {getattr(function, '__name__', function)}",
                    "a function whose body runs within its call",
                    "write the block `with tilewise.sdpa(...):` inside it",
                )
        if not callable(function):
            raise InvalidInput("tilewise.sdpa", repr(function), "a function to decorate", "write @tilewise.sdpa(...)")

        @functools.wraps(function)
        def ruled(*given: Any, **named: Any) -> Any:
            with self:
                return function(*given, **named)

        return ruled  # type: ignore[return-value]

    def __enter__(self) -> Rule:
        hook.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not hook.leave(self):
            raise InvalidInput(
                "tilewise.sdpa",
                "a block that ends where it did not begin",
                "the innermost block of this thread or task",
                "leave blocks in reverse order, in the thread or task that entered them",
            )


_SUSPENDED = {  # functions whose call only prepares what runs later, outside of the block
    "coroutine function": inspect.iscoroutinefunction,
    "generator": inspect.isgeneratorfunction,
    "asynchronous generator": inspect.isasyncgenfunction,
}
_OPTIONS = ("when", "on_fallback", "backend")


def _check_options(function: str, positional: tuple[object, ...], unknown: dict[str, object]) -> None:
    """Raise InvalidInput with the names for an option that is misspelt or has none."""
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

    def __reduce__(self) -> str:
        return "sdpa"  # there is one in a process

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
            hook.dispatcher.acquire(rule)
            self._rule = rule
            hook.dispatcher.govern_outside(rule)

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
            hook.dispatcher.govern_outside(None)
            hook.dispatcher.release(rule)

    @property
    def enabled(self) -> Rule | None:
        """The rule of `enable`, while it is in force."""
        return self._rule

    def compile(self) -> None:
        """Build the native extension now, if it is not there, rather than in the background (native/library.py).

        Rules that come into force from then on use it; in a process that has used the override before and has several
        threads, only those of the next process. Raises CompileError where this machine cannot build it.
        """
        library.build()

    @property
    def rule(self) -> Rule | None:
        """The rule that a call made here and now would meet; None = PyTorch's own behaviour."""
        return hook.current_rule()  # type: ignore[return-value]

    def report(self) -> list[Entry]:
        """How calls were handled since the process began or `clear`: at most 256 cases, the oldest first."""
        return [entry for entry in (line.entry() for line in lines()) if entry.calls]

    def clear(self) -> None:
        """Start the report anew."""
        for line in lines():
            line.clear()


sdpa = Override()
