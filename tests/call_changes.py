"""What makes a call of attention another call: the one table for everything that remembers calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = tuple[torch.Tensor, ...]


def moved_by_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides, off a multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def seq_before_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def in_another_dtype(*tensors: torch.Tensor) -> Tensors:
    other = torch.float16 if tensors[0].dtype == torch.bfloat16 else torch.float64
    return tuple(tensor.to(other) for tensor in tensors)


PROBLEMS: dict[str, Callable[..., Tensors]] = {
    "query's shape": lambda q, k, v: (q[:, :, : q.shape[2] // 2], k, v),
    "key's length": lambda q, k, v: (q, k[:, :, :8], v[:, :, :8]),
    "longer keys": lambda q, k, v: (q, torch.cat([k, k], 2), torch.cat([v, v], 2)),
    "value's width": lambda q, k, v: (q, k, v[..., :4]),
    "dtype": in_another_dtype,
    "strides": lambda q, k, v: (q, scattered(k), v),
    "alignment": lambda q, k, v: (q, moved_by_one_element(k), v),
    "gradient": lambda q, k, v: (q, k, v.clone().requires_grad_()),
}
"""Inputs of another Problem."""
INPUTS = PROBLEMS | {
    "order of dimensions": lambda q, k, v: (seq_before_heads(q), k, v),
    "alignment of queries": lambda q, k, v: (moved_by_one_element(q), k, v),
    "gradient of queries": lambda q, k, v: (q.clone().requires_grad_(), k, v),
}
"""Inputs of another call."""
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": torch.ones(16, 16, dtype=torch.bool)},
    "another mask": {"attn_mask": torch.zeros(16, 16)},
    "a mask for all rows": {"attn_mask": torch.ones(1, 16, dtype=torch.bool)},
}
"""Of PyTorch's function, for 16 rows and 16 keys."""


def other_calls(*tensors: torch.Tensor) -> dict[str, tuple[Tensors, dict[str, Any]]]:
    """Arguments of PyTorch's function that differ from these tensors alone in one thing each."""
    return {name: (change(*tensors), {}) for name, change in INPUTS.items()} | {
        name: (tensors, options) for name, options in OPTIONS.items()
    }
