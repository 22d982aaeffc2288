"""scaled_dot_product_attention of jagged nested tensors, which never comes to the operator.

Their `__torch_function__` calls a function of torch.nested instead, in Python. Ours stands in its place for good, as
our kernel does in the dispatcher (dispatch.py), and asks the rule of the thread; whatever is not taken, and all that
torch.compile traces, goes to PyTorch's.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "jagged_scaled_dot_product_attention"


def install(current_rule: Callable[[], Any]) -> None:
    """Once per process; a release of PyTorch that does it in another way is left alone."""
    ops: Any = import_module("torch.nested._internal.ops")
    original = getattr(ops, _NAME, None)
    if original is not None and not getattr(original, "asks_tilewise", False):
        setattr(ops, _NAME, _in_front_of(original, current_rule))


def _in_front_of(original: Callable[..., Any], current_rule: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        rule = None if torch.compiler.is_compiling() else current_rule()
        taken = None if rule is None else rule.call_nested(*arguments)
        return original(*arguments) if taken is None else taken

    attend.asks_tilewise = True  # type: ignore[attr-defined]
    return attend
