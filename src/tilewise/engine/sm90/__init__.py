"""Hopper (sm_90a): our own kernels of kernels/sm90, compiled on first use. Masks that are a diagonal band."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...problem import Strides
from .. import decode, rules
from ..backend import Fused
from . import backward, float32_backward, float32_forward, forward

if TYPE_CHECKING:
    from ...errors import Reason
    from ...problem import Problem
    from ...target import Target


def _refuse(problem: Problem, target: Target) -> list[Reason]:
    # The float32 kernels copy their operands into parts of their own: their strides need no alignment.
    readable = (Strides.ALIGNED, Strides.UNALIGNED) if rules.is_float32(problem) else (Strides.ALIGNED,)
    return rules.reasons(
        rules.no_jit(target),
        (
            target.capability != (9, 0),
            f"{target.name} is {target.arch}, not sm_90: wgmma and TMA in this form exist on Hopper only",
            "use backend='auto'",
        ),
        rules.other_dtype(problem),
        rules.broken_chunks(problem, 8),
        rules.wide_heads(problem),
        *rules.other_scores(problem),
        (
            problem.strides not in readable,
            f"strides are {problem.strides.value}: TMA needs a contiguous last dimension, 16-byte bases and strides",
            "call .contiguous() on the input that is not",
        ),
        rules.long_sequence(problem),
        rules.transformed(problem),
    )


SM90 = Fused("sm90", _refuse, (decode, float32_forward, forward), (float32_backward, backward))
