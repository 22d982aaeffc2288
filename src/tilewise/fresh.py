"""Fresh memory: how results, gradients and scratch are allocated.

What a kernel leaves unwritten keeps what the memory held before, which is often a zero or the result of an earlier
call, and then looks right. With TILEWISE_POISON=1 all fresh memory starts as nan, and as the largest number of an
integer type, here and in the native extension, so that a check finds what was left. The variable is read once.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

POISONED = os.environ.get("TILEWISE_POISON", "0") not in ("", "0")


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def filled(*given: Any, **named: Any) -> torch.Tensor:
        made = allocate(*given, **named)
        if made.is_meta:
            return made
        number = made.dtype.is_floating_point
        return made.fill_(torch.nan if number else torch.iinfo(made.dtype).max)

    return filled


def _chosen(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return poisoned(allocate) if POISONED else allocate


new_empty = _chosen(torch.Tensor.new_empty)
new_empty_strided = _chosen(torch.Tensor.new_empty_strided)
empty_like = _chosen(torch.empty_like)
