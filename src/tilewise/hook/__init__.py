"""What stands in PyTorch's dispatcher before scaled_dot_product_attention; below all its users (dispatch.py)."""

from .dispatch import (
    Arguments,
    Observer,
    Rule,
    current_rule,
    dispatcher,
    enter,
    leave,
    left_uncompiled,
    observed,
    was_taken,
)

__all__ = [
    "Arguments",
    "Observer",
    "Rule",
    "current_rule",
    "dispatcher",
    "enter",
    "leave",
    "left_uncompiled",
    "observed",
    "was_taken",
]
