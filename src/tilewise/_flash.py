"""tilewise among PyTorch's FlashAttention implementations: `activate_flash_attention_impl("tilewise")`.

What that puts in force is the override (`tilewise.sdpa.enable()`), with its rules: calls that the planner gives to
PyTorch, or cannot plan, run PyTorch's own kernel. `restore_flash_attention_impl()` takes it back.
"""

from __future__ import annotations

from torch.nn import attention

NAME = "tilewise"


class _Active:
    """What PyTorch keeps while the implementation is active."""

    def __init__(self) -> None:
        from .integrations.sdpa import sdpa  # noqa: PLC0415  (loaded on first use)

        sdpa.enable()
        self._rule = sdpa.enabled

    def remove(self) -> None:
        from .integrations.sdpa import sdpa  # noqa: PLC0415

        if self._rule is not None and sdpa.enabled is self._rule:  # else the user has taken it back
            sdpa.disable()
        self._rule = None


def register() -> None:
    """Make the name known to PyTorch, if this release has such names. Nothing is active by that."""
    if hasattr(attention, "register_flash_attention_impl"):
        attention.register_flash_attention_impl(NAME, register_fn=_Active)
