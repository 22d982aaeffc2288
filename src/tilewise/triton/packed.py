"""The table of packed sequences for the kernels in Triton: made on the offsets' device, no call waits for it.

A program owns a tile of one sequence. Which one, its record says: where the rows and keys of the sequence begin and how
many there are, where in it the tile begins, and by how much the band of the inner mask is shifted there. Tiles are
numbered without a gap, sequence by sequence; behind the last of them records have no rows and no keys. Rows behind
the last offset are a sequence without keys, and keys behind it one without queries: so every row of every result is
written.

Whatever the offsets hold, records stay within the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..masks import Packed

if TYPE_CHECKING:
    from ..operands import Operands
    from ..problem import Problem

Tensor = torch.Tensor
RECORD = 6  # as in `kernels`


def mask_of(problem: Problem) -> Packed | None:
    return problem.mask if isinstance(problem.mask, Packed) else None


def band(mask: Packed) -> tuple[int, int]:
    """(first, end) of a sequence whose first query is aligned with its first key."""
    left, right, offset = mask.inner.band(1, 1)
    return offset - left, offset + right + 1


def room(problem: Problem, block: int, *, of_keys: bool) -> int:
    """Tiles of `block` rows, or keys, that any sequences of these totals come to at most."""
    mask = mask_of(problem)
    assert mask is not None
    return (problem.seq_kv if of_keys else problem.seq_q) // block + mask.sequences + 1


class _Lengths(NamedTuple):
    """Where each sequence begins, and how long it is."""

    start: Tensor
    length: Tensor

    def and_behind(self, total: int, end: Tensor, *, there: bool) -> _Lengths:
        """With one more sequence: what lies behind the last offset, or nothing of it."""
        more = (end, total - end) if there else (torch.zeros_like(end), torch.zeros_like(end))
        return _Lengths(*(torch.cat((own, one)) for own, one in zip(self, more, strict=True)))


def _lengths(offsets: Tensor, total: int) -> _Lengths:
    offsets = offsets.clamp(0, total)
    start = offsets[:-1]
    return _Lengths(start, torch.maximum(offsets[1:], start) - start)


def table(problem: Problem, operands: Operands, block: int, *, of_keys: bool) -> Tensor:
    """(tiles, RECORD) int32. Tiles of queries come last rows first: under a causal mask these see most keys."""
    mask = mask_of(problem)
    assert mask is not None
    cu_q, cu_k = operands["cu_seqlens_q"], operands["cu_seqlens_kv"]
    q, k = _lengths(cu_q, problem.seq_q), _lengths(cu_k, problem.seq_kv)
    if mask.used:
        k = k._replace(length=torch.minimum(k.length, operands["seqused_k"].clamp(min=0)))
    if mask.padded:
        left = torch.minimum(k.length, operands["leftpad_k"].clamp(min=0))
        k = _Lengths(k.start + left, k.length - left)
    q = q.and_behind(problem.seq_q, cu_q[-1:].clamp(0, problem.seq_q), there=not of_keys)
    k = k.and_behind(problem.seq_kv, cu_k[-1:].clamp(0, problem.seq_kv), there=of_keys)
    counts = ((k if of_keys else q).length + block - 1) // block
    ends = counts.cumsum(0, dtype=torch.int32)
    tiles = torch.arange(room(problem, block, of_keys=of_keys), dtype=torch.int32, device=cu_q.device)
    owner = torch.searchsorted(ends, tiles, right=True)
    exists = owner < len(ends)
    owner = owner.clamp(max=len(ends) - 1)
    number = tiles - (ends - counts)[owner]
    begin = (number if of_keys else counts[owner] - 1 - number) * block
    aligned = getattr(mask.inner, "align", "top-left") == "bottom-right"
    shift = k.length - q.length if aligned else torch.zeros_like(q.length)
    of_sequence = torch.stack((q.start, q.length, k.start, k.length), 1)[owner]
    records = torch.cat((of_sequence, begin[:, None], shift[owner][:, None]), 1)
    return torch.where(exists[:, None], records, 0).to(torch.int32)
