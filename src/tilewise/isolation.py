"""What a mask hides stays hidden where it is nan or infinite: as 0 * nan it would come back in a product.

Documents are computed as `pieces`, none of which holds anything of another, packed sequences and sequences in a cache
one after another (`forward_by_sequence`, `forward_of_cache`). Code of ours that multiplies under any mask uses
`isolated`, where `all_finite` cannot rule out that there is something to isolate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from .masks import Cached, Documents
from .problem import in_memory_order
from .sequences import members, operands_as_spans, spans_say_all, with_spans, without_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .operands import Grads, Operands, Wants
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
    """The results of the pieces, put together again."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def all_finite(*tensors: Tensor) -> bool:
    """Whether no element is nan or infinite. False as well where values cannot be read: under vmap, in a CUDA graph."""
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


def forward_by_sequence(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    config: object,
    operands: Operands,
    results: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """A packed problem by a forward that takes its members; where the offsets are on a device, by their spans."""
    if _goes_by_spans(problem, operands):
        return forward(q, k, v, *_spanned(problem, config, operands), results)
    outs, lses = [], []
    for one in members(problem, operands):
        of_keys = (tensor[:, :, one.keys] for tensor in (k, v))
        own = one.operands(operands, problem)
        out, lse = forward(q[:, :, one.rows], *of_keys, one.problem, config, own, results)
        outs.append(out)
        lses.append(lse)
    return in_memory_order(joined(outs), problem.layout), joined(lses)


def backward_by_sequence(
    backward: Callable[..., Grads],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    config: object,
    operands: Operands,
    wants: Wants,
) -> Grads:
    """`forward_by_sequence` for a backward."""
    if _goes_by_spans(problem, operands):
        return backward(dout, dlse, q, k, v, out, lse, *_spanned(problem, config, operands), wants)
    given = {"q": q, "k": k, "v": v, **without_offsets(operands)}
    grads = {name: torch.zeros_like(tensor) for name, tensor in given.items() if name in wants}
    for one in members(problem, operands):
        of_rows = [tensor[:, :, one.rows] for tensor in (q, out, lse, dout)]
        others = one.operands(operands, problem)
        own = backward(
            of_rows[3],
            None if dlse is None else dlse[:, :, one.rows],
            of_rows[0],
            k[:, :, one.keys],
            v[:, :, one.keys],
            of_rows[1],
            of_rows[2],
            one.problem,
            config,
            others,
            wants,
        )
        for name, grad in own.items():
            place = {"q": one.rows, "k": one.keys, "v": one.keys}.get(name)
            if place is None:
                whole = others[name].shape == grads[name].shape
                (grads[name] if whole else grads[name][one.number : one.number + 1]).add_(grad)
            else:
                grads[name][:, :, place] = grad
    return grads


def _goes_by_spans(problem: Problem, operands: Operands) -> bool:
    """Whether the offsets stay where they are. Where spans do not say it all, the host waits for them."""
    offsets = operands["cu_seqlens_q"]
    return offsets.is_meta or (offsets.device.type != "cpu" and spans_say_all(problem))


def _spanned(problem: Problem, config: object, operands: Operands) -> tuple[Problem, object, Operands]:
    return with_spans(problem), config, operands_as_spans(problem, operands)


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def cached_places(k: Tensor, operands: Operands, mask: Cached, number: int, places: range) -> Tensor:
    """Some places of a sequence's keys, or values, in a cache: (1, heads, places, dim)."""
    if not mask.page_size:
        row = int(operands["cache_rows"][number]) if mask.rows else number
        row = min(max(row, 0), k.shape[0] - 1)
        return k[row : row + 1, :, places.start : places.stop]
    here = torch.arange(places.start, places.stop, device=k.device)
    pages = operands["page_table"][number].long()[here // mask.page_size].clamp(0, k.shape[0] - 1)
    return k[pages, :, here % mask.page_size].transpose(0, 1).unsqueeze(0)


def forward_of_cache(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Tensor, Tensor]:
    """A problem with keys in a cache by a forward of tensors, one sequence after another; it reads their lengths.

    Numbers that are out of range count as the nearest that are not, as in the kernels.
    """
    mask = problem.mask
    assert isinstance(mask, Cached)
    capacity = problem.seq_kv
    count = mask.sequences if mask.packed else problem.batch

    def of_host(name: str, given: bool, default: int) -> list[int]:
        return operands[name].tolist() if given else [default] * count

    lengths = [min(max(n, 0), capacity) for n in of_host("cache_lengths", mask.lengths, capacity)]
    starts = [min(max(n, 0), end) for n, end in zip(of_host("cache_starts", mask.starts, 0), lengths, strict=True)]
    rows = [slice(0, problem.seq_q)] * count
    if mask.packed:
        offsets = [min(max(n, 0), problem.seq_q) for n in operands["cu_seqlens_q"].tolist()]
        rows = [slice(begin, max(begin, end)) for begin, end in pairwise(offsets)]
        rows, lengths, starts = [*rows, slice(offsets[-1], problem.seq_q)], [*lengths, 0], [*starts, 0]
    batched = {one.name: one for term in problem.scores for one in term.tensors}
    out = q.new_zeros(*q.shape[:3], problem.head_dim_v)
    if problem.layout == "bshd":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for number, (own, start, end) in enumerate(zip(rows, starts, lengths, strict=True)):
        if own.start == own.stop:
            continue
        places, last = range(start, end), min(number, count - 1)
        one = problem.with_(
            batch=1, seq_q=own.stop - own.start, seq_kv=len(places), mask=mask.inner, scores=(), layout="bhsd"
        )
        one = one.with_(scores=problem.scores)
        others = {}
        for name, operand in batched.items():
            full = operand.expanded(operands[name], problem)
            if "batch" in operand.dims:
                full = full.narrow(operand.dims.index("batch"), last, 1)
            others[name] = full.narrow(operand.dims.index("key"), 0, len(places)) if "key" in operand.dims else full
        batch = slice(0, 1) if mask.packed else slice(number, number + 1)
        keys, values = (cached_places(tensor, operands, mask, last, places) for tensor in (k, v))
        out[batch, :, own], lse[batch, :, own] = forward(q[batch, :, own], keys, values, one, None, others)
    return out, lse
