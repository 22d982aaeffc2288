"""The public names of the package, and what is registered with PyTorch when they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _flash
from .api import (
    attention,
    attention_cached,
    attention_packed,
    explain,
    explain_cached,
    scaled_dot_product_attention,
    warm_up,
)
from .errors import (
    CompileError,
    DeviceError,
    InvalidInput,
    Reason,
    TilewiseError,
    UnknownArgument,
    UnsupportedProblem,
)
from .masks import Causal, Dense, Documents, Full, KeyLengths, Mask, PrefixLM, Window
from .plan import Plan, Verdict
from .problem import Problem
from .target import Target

if TYPE_CHECKING:
    from .integrations.sdpa import FallbackWarning, sdpa
    from .lab.watch.trace import no_math_fallback, trace

_flash.register()

__all__ = [
    "Causal",
    "CompileError",
    "Dense",
    "DeviceError",
    "Documents",
    "FallbackWarning",
    "Full",
    "InvalidInput",
    "KeyLengths",
    "Mask",
    "Plan",
    "PrefixLM",
    "Problem",
    "Reason",
    "Target",
    "TilewiseError",
    "UnknownArgument",
    "UnsupportedProblem",
    "Verdict",
    "Window",
    "attention",
    "attention_cached",
    "attention_packed",
    "explain",
    "explain_cached",
    "no_math_fallback",
    "scaled_dot_product_attention",
    "sdpa",
    "trace",
    "warm_up",
]


def __getattr__(name: str) -> object:
    """`tilewise.sdpa` and what watches a program are loaded when they are first asked for."""
    if name in ("sdpa", "FallbackWarning"):
        from .integrations import sdpa as override  # noqa: PLC0415

        return getattr(override, name)
    if name in ("trace", "no_math_fallback"):
        from .lab.watch import trace as watching  # noqa: PLC0415

        return getattr(watching, name)
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
