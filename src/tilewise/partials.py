"""The algebra that attention over pieces rests on.

A *partial* is (out, lse): attention of some queries over some of their keys, with out (..., seq_q, head_dim_v) and
lse (..., seq_q) the natural-log sum of exp of the scores. Merging two partials over disjoint keys gives the partial
over their union:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Merging is associative and commutative; the identity is (0, -inf), which is also what a row that sees no key gives.
The tiled loop and the kernels that divide keys merge in their own loops; this states what they must come to, for tests
and for callers that hold partials of several devices.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class Partial(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


def identity(like: torch.Tensor, lse_dtype: torch.dtype = torch.float32) -> Partial:
    """The partial over no keys, for an output shaped like `like` (..., seq_q, head_dim_v)."""
    lse = torch.full(like.shape[:-1], -torch.inf, dtype=lse_dtype, device=like.device)
    return Partial(torch.zeros_like(like), lse)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the keys of both. Out keeps a's dtype; weights are formed in the dtype of lse."""
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a, weight_b = (_weight(part.lse, lse).unsqueeze(-1) for part in (a, b))
    out = a.out * weight_a + b.out * weight_b
    return Partial(out.to(a.out.dtype), lse)


def merge_all(parts: Iterable[Partial]) -> Partial:
    """Merge from left to right; at least one part."""
    return reduce(merge, parts)


def _weight(lse_part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(lse_part - lse), with 0 where the part saw nothing: -inf - -inf would be nan."""
    return torch.exp(lse_part - lse).masked_fill(lse_part == -torch.inf, 0.0)
