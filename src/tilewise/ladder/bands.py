"""What the rungs share: the masks they know, and the reasons by which they refuse the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import Reason
from ..masks import Causal, Full, Window
from ..problem import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..masks import Band
    from ..problem import Problem

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


def band_of(problem: Problem) -> Band:
    """The diagonal band that the problem's mask is."""
    assert isinstance(problem.mask, Full | Causal | Window)
    return problem.mask.band(problem.seq_q, problem.seq_kv)


def shifts_of(problem: Problem) -> tuple[int, int]:
    """(first, end): row r sees the keys from r + first to r + end - 1, as far as they exist."""
    left, right, offset = band_of(problem)
    return offset - left, offset + right + 1


def refusals(problem: Problem, *, dtypes: Sequence[torch.dtype], head_dim: int) -> list[Reason]:
    """What no rung takes, and what this one does not: every reason at once."""
    widest = max(problem.head_dim, problem.head_dim_v)
    rules = [
        (
            problem.dtype not in dtypes,
            f"dtype {dtype_name(problem.dtype)} is none of {', '.join(map(dtype_name, dtypes))}",
            "cast q, k and v",
        ),
        (widest > head_dim, f"head_dim {widest} is over {head_dim}", "climb to another rung"),
        (
            not isinstance(problem.mask, Full | Causal | Window),
            f"mask {problem.mask} is not a diagonal band",
            "use Full, Causal or Window",
        ),
        (problem.dropout > 0, f"dropout {problem.dropout:g} is not 0", "drop the dropout"),
        (problem.needs_grad, "a gradient is wanted, and the rungs are forward only", "use a backend"),
        (problem.transformed, "inside a functorch transform (vmap, jvp)", "use backend='reference' there"),
    ]
    return [Reason(what, remedy) for refused, what, remedy in rules if refused]
