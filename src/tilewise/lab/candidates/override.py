"""What PyTorch does by itself with a call of F.scaled_dot_product_attention."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ...torch_kernels.gates import CUDNN, EFFICIENT, FLASH, MATH

if TYPE_CHECKING:
    from ...hook import Arguments

Tensor = torch.Tensor
_CHOICES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN, 4: "overrideable"}


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
