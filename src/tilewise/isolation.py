"""What a mask hides stays hidden, even where it is nan or infinite: as 0 * nan it would come back in a product.

Two ways to that. Packed documents are taken apart into `pieces`, none of which holds anything of another: that is how
kernels which know no better than to multiply by 0 are made to keep documents apart. Code of ours that multiplies under
any mask uses `isolated`, where `all_finite` cannot rule out that there is something to isolate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from .masks import Documents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .problem import Problem

Tensor = torch.Tensor
_MAX_BATCH = 65535  # the largest y and z of a CUDA grid, which kernels spend on batches


class Piece(NamedTuple):
    """Neighbouring documents of equal lengths, as one problem with a document for each batch."""

    problem: Problem
    rows: slice
    keys: slice
    documents: int

    def of_rows(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor (batch, heads, seq_q, ...): (batch * documents, heads, rows of a document, ...)."""
        return self._apart(tensor[:, :, self.rows], self.problem.seq_q)

    def of_keys(self, tensor: Tensor) -> Tensor:
        return self._apart(tensor[:, :, self.keys], self.problem.seq_kv)

    def _apart(self, tensor: Tensor, length: int) -> Tensor:
        if self.documents == 1:
            return tensor
        apart: Tensor = tensor.unflatten(2, (self.documents, length))
        return apart.movedim(2, 1).flatten(0, 1)

    def together(self, tensor: Tensor) -> Tensor:
        """The inverse of `of_rows` and `of_keys`: (batch, heads, rows or keys of all documents, ...)."""
        if self.documents == 1:
            return tensor
        apart: Tensor = tensor.unflatten(0, (-1, self.documents))
        return apart.movedim(1, 2).flatten(2, 3)


@lru_cache(maxsize=32)
def pieces(problem: Problem) -> tuple[Piece, ...]:
    """A problem under a Documents mask, taken apart. Their rows and keys follow one another without a gap."""
    mask = problem.mask
    assert isinstance(mask, Documents)
    spans = zip(pairwise(mask.cu_seqlens_q), pairwise(mask.cu_seqlens_kv), strict=True)
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in spans]
    found, row, key = [], 0, 0
    for (rows, keys), run in groupby(lengths):
        left = len(list(run))
        while left:
            # Without rows or keys there is nothing to divide among documents.
            count = min(left, max(1, _MAX_BATCH // max(1, problem.batch))) if rows and keys else 1
            apart = problem.with_(batch=problem.batch * count, seq_q=rows, seq_kv=keys, mask=mask.inner)
            row_end, key_end = row + count * rows, key + count * keys
            found.append(Piece(apart, slice(row, row_end), slice(key, key_end), count))
            row, key, left = row_end, key_end, left - count
    return tuple(found)


def distinct_problems(problem: Problem) -> list[Problem]:
    """Those of the pieces that have something to compute, each once."""
    return list(dict.fromkeys(piece.problem for piece in pieces(problem) if not piece.problem.empty))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """What pieces gave, in a row again."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing in them is nan or infinite. False as well where nobody can look: under vmap, in a CUDA graph."""
    if torch._C._are_functorch_transforms_active():
        return False
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta for tensor in tensors):
        return False
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    with torch.no_grad():  # a sum that overflows only costs the time to isolate nothing
        wide = (torch.float64 if tensor.dtype == torch.float64 else torch.float32 for tensor in tensors)
        sums = [tensor.sum(dtype=dtype) for tensor, dtype in zip(tensors, wide, strict=True)]
        return bool(torch.stack([total.to(sums[0].dtype) for total in sums]).isfinite().all())


def isolated(
    multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, seen: Tensor, *, signed: bool = False
) -> Tensor:
    """multiply(left, right), where `left` is 0 for whatever `seen`, a boolean mask of it, hides.

    Non-finite values of `right` are left out of the product and given back only to those that see them: with their
    sign if `left` has none, as nan if it is `signed`.
    """
    finite = torch.isfinite(right)
    product = multiply(left, torch.where(finite, right, 0.0))
    seen = seen.to(left.dtype).expand(left.shape)
    kinds = [(torch.nan, ~finite)] if signed else [
        (torch.nan, right.isnan()), (torch.inf, right == torch.inf), (-torch.inf, right == -torch.inf)
    ]  # fmt: skip
    for value, bad in kinds:
        reached = multiply(seen, bad.to(left.dtype)) > 0
        product = product + torch.zeros_like(product).masked_fill(reached, value)
    return product
