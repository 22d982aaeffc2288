"""An observer in front of F.scaled_dot_product_attention, in PyTorch's dispatcher, where every path to it comes by.

Names imported early, nn.MultiheadAttention and torch.ops.aten are all seen. What would have run without it, PyTorch's
own kernel or `tilewise.sdpa`'s choice, is called unchanged. The kernel that lets observers see a call is that of
`tilewise.sdpa`, in force or not: there is one in the dispatcher, and it stays there.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..backends.torch_rules import CUDNN, EFFICIENT, FLASH, MATH

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
# query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
Arguments = tuple[Tensor, Tensor, Tensor, "Tensor | None", float, bool, "float | None", bool]
Observer = Callable[[Arguments, Callable[[], Tensor]], Tensor]

_CHOICES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN, 4: "overrideable"}


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """`observer(arguments, run)` stands in front of the operator; `run()` calls what would have run without it."""
    dispatcher = _sdpa()._dispatcher
    dispatcher.observe(observer)
    try:
        yield
    finally:
        dispatcher.leave_unobserved(observer)


def _sdpa() -> Any:
    """The module of `tilewise.sdpa`, which stands beside us, not below: it is asked for by name when it is needed."""
    return importlib.import_module("tilewise.integrations.sdpa")


def was_taken() -> bool:
    """Whether `tilewise.sdpa` took the call that this thread's observer has just run."""
    return bool(_sdpa()._observing.taken)


def is_plain(*tensors: Tensor | None) -> bool:
    """Ordinary tensors: neither fake ones, which a compiler traces with, nor another subclass."""
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


_filtering = threading.Lock()  # the filters of warnings are the process's: two that put them back must not overlap


def torch_choice(arguments: Arguments) -> str:
    """Which of its kernels PyTorch takes for this call, by its own dispatcher: `torch-flash`, ... Runs none of them."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    with _filtering, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen = torch._fused_sdp_choice(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except RuntimeError:  # no kernel at all: the call itself will say so
            return ""
    return _CHOICES.get(chosen, "")


def effective_order(arguments: Arguments) -> list[str]:
    """The kernels that take this call, in the order in which PyTorch prefers them here.

    By its own dispatcher: what it chooses is switched off, until it chooses nothing. The order that PyTorch's settings
    name is another on some GPUs, where the dispatcher puts cuDNN in front of it.
    """
    switchboard = torch.backends.cuda
    switches: dict[str, tuple[Any, Any]] = {
        FLASH: (switchboard.flash_sdp_enabled, switchboard.enable_flash_sdp),
        EFFICIENT: (switchboard.mem_efficient_sdp_enabled, switchboard.enable_mem_efficient_sdp),
        CUDNN: (switchboard.cudnn_sdp_enabled, switchboard.enable_cudnn_sdp),
        MATH: (switchboard.math_sdp_enabled, switchboard.enable_math_sdp),
    }
    before = {name: is_on() for name, (is_on, _) in switches.items()}
    found: list[str] = []
    try:
        while (chosen := torch_choice(arguments)) in switches and chosen not in found:
            found.append(chosen)
            switches[chosen][1](False)
    finally:
        for name, (_, turn) in switches.items():
            turn(before[name])
    return found


def only_math_is_allowed() -> bool:
    """The caller asked for math: what follows is a choice, not a fallback."""
    switchboard = torch.backends.cuda
    fused = (switchboard.flash_sdp_enabled(), switchboard.mem_efficient_sdp_enabled(), switchboard.cudnn_sdp_enabled())
    return not any(fused)
