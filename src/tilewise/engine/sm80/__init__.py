"""Every NVIDIA GPU from sm_80 on: our own kernels of kernels/sm80, compiled for the very GPU they run on."""

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

MIN_CAPABILITY = (8, 0)
MIN_TILE, MAX_TILES = 32, (1 << 31) - 1  # rows of any kernel's tile; CTAs of a grid


def _refuse(problem: Problem, target: Target) -> list[Reason]:
    q_tiles = problem.heads_q * -(-problem.seq_q // MIN_TILE)
    tiles = problem.batch * max(q_tiles, problem.heads_kv * -(-problem.seq_kv // MIN_TILE))
    return rules.reasons(
        rules.no_jit(target),
        (
            target.capability < MIN_CAPABILITY,
            f"{target.name} is {target.arch}: cp.async and bfloat16 products begin with sm_80",
            "use backend='auto'",
        ),
        rules.other_dtype(problem),
        rules.broken_chunks(problem, 4 if rules.is_float32(problem) else 8),
        rules.wide_heads(problem),
        *rules.other_scores(problem),
        (
            problem.strides is not Strides.ALIGNED,
            f"strides are {problem.strides.value}: copies of 16 bytes need a contiguous last dimension, 16-byte bases "
            "and strides",
            "call .contiguous() on the input that is not",
        ),
        rules.long_sequence(problem),
        (
            tiles > MAX_TILES,
            f"{tiles} tiles of {MIN_TILE} rows are over {MAX_TILES}, the limit of a grid",
            "split the batch",
        ),
        rules.transformed(problem),
    )


SM80 = Fused("sm80", _refuse, (decode, float32_forward, forward), (float32_backward, backward))
