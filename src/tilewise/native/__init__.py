"""Repeated calls in native code, where a compiler is there: one extension, of calls.cpp and detour.cpp.

The path in Python (call/, engine/run.py) is the definition, and it is always there. What it has done once, the
extension does again by itself where no mode of PyTorch's watches: it recognises a call, allocates, fills in arguments
and launches. So nothing depends on it but host time. `TILEWISE_NATIVE=off` does without it; with `detour` the extension
passes on what `tilewise.sdpa` leaves to PyTorch, and nothing else.

    library.py   built once per machine and release of PyTorch, in the background; trusted only as the cache vouches for
    calls.cpp    calls of `tilewise.attention` and their backwards
    detour.cpp   the kernel of `tilewise.sdpa` in PyTorch's dispatcher
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from ..memo import on_invalidate
from . import library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

attend: Callable[..., Any] | None = None
"""The results of a known call, of its form, q, k and v, its extra tensors by slot and its options; None where it is not
known. Itself None until the extension is loaded and there is a driver."""
calls: Any = None
"""The functions of calls.cpp, from then on."""

_LOOK_AGAIN_SECONDS = 1.0
_next_look = 0.0
_callbacks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
_streams_agree: dict[int, bool] = {}


def answer_with(make_backward: Callable[..., Any], say_failed: Callable[..., Any]) -> None:
    """Who makes a backward that the extension does not know, and who raises for a launch that the driver refused."""
    global _callbacks
    _callbacks = make_backward, say_failed


def ready() -> Any:
    """The functions of calls.cpp if they are asked for and can be used; else None, and if they are asked for, they are
    being built for those who ask later."""
    global _next_look
    if calls is None and not _held and time.monotonic() >= _next_look:
        _next_look = time.monotonic() + _LOOK_AGAIN_SECONDS
        found = library.loaded() if library.answers_calls() else None
        if found is not None and found.calls.open_driver() is None:
            use(found.calls)
    return calls


def use(functions: Any) -> None:
    """Calls are answered by these functions from now on; None = by Python alone."""
    global attend, calls
    if functions is None:
        attend = calls = None
        return
    assert _callbacks is not None
    functions.begin(*_callbacks)
    calls, attend = functions, functions.attend


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """All calls of this process take the path in Python inside: to measure it, or to compare with it."""
    global _held
    functions = calls
    use(None)
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        if functions is not None:
            use(functions)


_held = 0


def knows_streams_of(device: torch.device) -> bool:
    """Whether the extension and PyTorch mean the same stream: it reads it in a way of its own."""
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _streams_agree:
        aside = torch.cuda.Stream(index)
        with torch.cuda.device(index):
            here = _stream(index) == torch._C._cuda_getCurrentRawStream(index)
            with torch.cuda.stream(aside):
                there = _stream(index) == torch._C._cuda_getCurrentRawStream(index)
        _streams_agree[index] = here and there
    return _streams_agree[index]


def _stream(index: int) -> int:
    try:
        return int(calls.stream(index))
    except RuntimeError:
        return -1


@on_invalidate
def _forget() -> None:
    if calls is not None:
        calls.forget()


def _in_forked_child() -> None:
    if calls is not None:
        calls.disable_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
