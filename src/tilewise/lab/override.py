"""An observer in front of F.scaled_dot_product_attention, in PyTorch's dispatcher, where every path to it comes by.

Names imported early, nn.MultiheadAttention and torch.ops.aten are all seen. What would have run without it, PyTorch's
own kernel or `tilewise.sdpa`'s choice, is called unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import library as torch_library

from ..backends.torch_rules import CUDNN, EFFICIENT, FLASH, MATH

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
# query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
Arguments = tuple[Tensor, Tensor, Tensor, "Tensor | None", float, bool, "float | None", bool]
Observer = Callable[[Arguments, Callable[[], Tensor]], Tensor]

_OPERATOR = "scaled_dot_product_attention"
_KEYS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
_UNTOUCHED = "XLA"  # a key nobody overrides: what it leads to is the composite that PyTorch has for every device
_CHOICES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN, 4: "overrideable"}


class _Plate:
    """Our kernel in the dispatcher while there are observers, and nothing of it otherwise.

    Invariant: it lies on top of `tilewise.sdpa`'s, which is put there first, and calls the same function that lies
    below. Going down through the dispatcher instead would come back up to us under torch.compile, whose modes are asked
    about every kernel that is written in Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: list[Observer] = []
        self._laid = contextlib.ExitStack()
        self._inside = threading.local()

    def add(self, observer: Observer) -> None:
        with self._lock:
            if not self._observers:
                _sdpa()._dispatcher.acquire()
                self._lay()
            self._observers = [*self._observers, observer]

    def drop(self, observer: Observer) -> None:
        with self._lock:
            watched = bool(self._observers)
            self._observers = [one for one in self._observers if one != observer]
            if watched and not self._observers:
                self._laid.close()
                _forget_resolved_kernels()
                _sdpa()._dispatcher.release()

    def _lay(self) -> None:
        composite = torch_library.get_kernel(f"aten::{_OPERATOR}", _UNTOUCHED)
        kernel = self._kernel(_sdpa()._kernel(composite.call_boxed))
        overrides = self._laid.enter_context(torch_library._scoped_library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch remarks on an operator that is overridden twice
            for key in _KEYS:
                overrides.impl(_OPERATOR, kernel, key, allow_override=True)
        _forget_resolved_kernels()

    def _kernel(self, below: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scaled_dot_product_attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        ) -> Tensor:  # fmt: skip
            arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if getattr(self._inside, "call", False):  # the operator called itself below: that is still the same call
                return below(*arguments)
            self._inside.call = True
            try:
                return _through(self._observers, arguments, below)
            finally:
                self._inside.call = False

        return scaled_dot_product_attention


def _through(observers: list[Observer], arguments: Arguments, below: Callable[..., Tensor]) -> Tensor:
    """The newest observer first; what each of them runs is the next."""
    if not observers:
        return below(*arguments)
    *others, observer = observers
    return observer(arguments, lambda: _through(others, arguments, below))


_plate = _Plate()


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """`observer(arguments, run)` stands in front of the operator; `run()` calls what would have run without it."""
    _plate.add(observer)
    try:
        yield
    finally:
        _plate.drop(observer)


def _sdpa() -> Any:
    """The module of `tilewise.sdpa`, which stands beside us, not below: it is asked for by name when it is needed."""
    return importlib.import_module("tilewise.integrations.sdpa")


def taken_calls() -> int:
    """Calls that `tilewise.sdpa` has taken from PyTorch so far."""
    return sum(record.calls for record in list(_sdpa()._records.values()) if record.outcome == "taken")


def _forget_resolved_kernels() -> None:
    """Under torch.compile an operator remembers which kernel a key leads to, and a registration does not tell it."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def is_plain(*tensors: Tensor | None) -> bool:
    """Ordinary tensors: neither fake ones, which a compiler traces with, nor another subclass."""
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def torch_choice(arguments: Arguments) -> str:
    """Which of its kernels PyTorch takes for this call, by its own dispatcher: `torch-flash`, ... Runs none of them."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen = torch._fused_sdp_choice(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except RuntimeError:  # no kernel at all: the call itself will say so
            return ""
    return _CHOICES.get(chosen, "")


def only_math_is_allowed() -> bool:
    """The caller asked for math: what follows is a choice, not a fallback."""
    switchboard = torch.backends.cuda
    fused = (switchboard.flash_sdp_enabled(), switchboard.mem_efficient_sdp_enabled(), switchboard.cudnn_sdp_enabled())
    return not any(fused)
