"""Packed sequences: where they lie, what is checked of their offsets, and which kernels take them as they are.

Our kernels take documents as packed sequences (`packed_documents`). Packed sequences are `members` where the host has
their offsets; offsets on a device stay there and become the span of keys that each row sees (`with_spans`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from .errors import InvalidInput
from .masks import Cached, Documents, Full, Packed, first_aligned
from .operands import are_checked
from .terms import Dropout
from .terms.spans import Spans
from .terms.spans import operands_of as span_operands

if TYPE_CHECKING:
    from .operands import Operands
    from .problem import Problem
    from .scores import Term

Tensor = torch.Tensor


_OFFSETS = frozenset(("cu_seqlens_q", "cu_seqlens_kv", "seqused_k", "leftpad_k"))


class Member(NamedTuple):
    """One of the sequences of a packed problem, as a problem of its own."""

    problem: Problem
    number: int
    rows: slice
    keys: slice

    def operands(self, operands: Operands, of: Problem) -> Operands:
        """Its share of the operands of all sequences, without their offsets. A seed of dropout gets the number of its
        first head."""
        dims = {one.name: len(one.dims) for term in of.scores for one in term.tensors if "batch" in one.dims[:1]}
        own = {}
        for name, tensor in operands.items():
            if name not in _OFFSETS:
                split = tensor.ndim == dims.get(name) and tensor.shape[0] == of.sequences > 1
                own[name] = tensor[self.number : self.number + 1] if split else tensor
        if "seed" in own:
            own["seed"] = torch.cat((own["seed"], own["seed"].new_tensor([self.number * of.heads_q])))
        return own


def offsets_of(operands: Operands, total_q: int, total_kv: int) -> tuple[list[int], list[int]]:
    """The offsets as the host reads them. Raises InvalidInput for offsets that are none."""
    found = []
    for name, total in (("cu_seqlens_q", total_q), ("cu_seqlens_kv", total_kv)):
        offsets = operands[name].tolist()
        if offsets[0] != 0 or any(end < start for start, end in pairwise(offsets)) or offsets[-1] > total:
            shown = f"{offsets[:8]}{'...' if len(offsets) > 8 else ''}, of tensors with {total} rows"
            raise InvalidInput(
                name,
                shown,
                f"offsets that start at 0, never fall, and end at {total} at most",
                "pass the cumulative lengths of the sequences, as in (0, 5, 12) for 5 and 7",
            )
        found.append(offsets)
    return found[0], found[1]


def are_read(tensor: Tensor) -> bool:
    """Whether a call reads and checks the numbers that say where its keys are: on a CPU always, on a device where the
    environment asks for it and no graph is captured, when nothing can be read."""
    if tensor.device.type == "cpu":
        return True
    return are_checked() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_values(problem: Problem, operands: Operands) -> None:
    """Raise InvalidInput for offsets, lengths, rows or pages that name nothing, where they are read; the host waits.

    The backends on a CPU read offsets of packed sequences themselves.
    """
    mask = problem.mask
    if isinstance(mask, Packed):
        if operands["cu_seqlens_q"].is_cuda and are_read(operands["cu_seqlens_q"]):
            offsets_of(operands, problem.seq_q, problem.seq_kv)
    elif isinstance(mask, Cached) and mask.operands and are_read(operands[mask.operands[0].name]):
        _check_cache_values(mask, problem, operands)


def _check_cache_values(mask: Cached, problem: Problem, operands: Operands) -> None:
    capacity = problem.seq_kv
    if mask.lengths:
        _check_range("lengths", operands["cache_lengths"], 0, capacity, places_of_a_sequence(bool(mask.page_size)))
    if mask.starts:
        _check_range("starts", operands["cache_starts"], 0, capacity, "places of the cache")
    if mask.rows:
        _check_range("rows", operands["cache_rows"], 0, mask.batches - 1, "rows of the cache")
    if mask.packed:
        offsets = operands["cu_seqlens_q"]
        if offsets.numel() and (int(offsets[0]) != 0 or bool((offsets.diff() < 0).any())):
            remedy = "pass the cumulative numbers of queries"
            raise InvalidInput("cu_seqlens_q", offsets.tolist()[:8], "offsets from 0 that never fall", remedy)
        _check_range("cu_seqlens_q", offsets, 0, problem.seq_q, "rows of q")
    if mask.page_size:
        table = operands["page_table"]
        places = torch.arange(table.shape[1], device=table.device) * mask.page_size
        used = table
        if mask.lengths:
            used = table[places < operands["cache_lengths"].clamp(0, capacity)[:, None]]
        _check_range("page_table", used, 0, mask.batches - 1, "pages")


def places_of_a_sequence(paged: bool) -> str:
    return "places that page_table gives a sequence" if paged else "places of the cache"


def _check_range(name: str, numbers: Tensor, first: int, last: int, what: str) -> None:
    if numbers.numel() == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < first or high > last:
        got = f"{low if low < first else high} among its numbers"
        raise InvalidInput(name, got, f"{first} to {last}, the {what}", "correct the numbers in this tensor")


def members(problem: Problem, operands: Operands) -> list[Member]:
    """The sequences that have rows, in their order. Rows behind the last offset are one more, without keys; where no
    sequence has any, these none are a member, so that results still come from q, k and v."""
    mask = problem.mask
    assert isinstance(mask, Packed)
    starts_q, starts_kv = offsets_of(operands, problem.seq_q, problem.seq_kv)
    ends_kv = starts_kv[1:]
    if mask.used:
        used = operands["seqused_k"].tolist()
        ends_kv = [min(end, start + max(0, count)) for start, end, count in zip(starts_kv, ends_kv, used, strict=False)]
    begins_kv = starts_kv[:-1]
    if mask.padded:
        padding = operands["leftpad_k"].tolist()
        begins_kv = [
            min(end, start + max(0, count)) for start, end, count in zip(begins_kv, ends_kv, padding, strict=True)
        ]
    rows = [*pairwise(starts_q), (starts_q[-1], problem.seq_q)]
    keys = [*zip(begins_kv, ends_kv, strict=True), (0, 0)]
    last = len(starts_q) - 2
    found = [
        Member(
            problem.with_(seq_q=q1 - q0, seq_kv=k1 - k0, mask=mask.inner),
            min(number, last),
            slice(q0, q1),
            slice(k0, k1),
        )
        for number, ((q0, q1), (k0, k1)) in enumerate(zip(rows, keys, strict=True))
    ]
    return [one for one in found if one.problem.seq_q] or found[-1:]


def spans_say_all(problem: Problem) -> bool:
    """Whether the terms give packed rows and keys what they give those of a sequence."""
    mask = problem.mask
    assert isinstance(mask, Packed)
    return _places_agree(problem.scores, mask.same and not mask.used and not mask.padded)


def _places_agree(scores: tuple[Term, ...], same: bool) -> bool:
    """Whether the terms do not care if a score stands among all packed rows and keys or in its own sequence.

    Those that look at distances do not if queries and keys begin at the same places, and if the sequences share what
    the terms read. Dropout does: it draws by places.
    """
    return all(
        term.elementwise or not term.transforms or (same and not getattr(term, "batched", False)) for term in scores
    ) and not any(isinstance(term, Dropout) for term in scores)


def kernels_take_packed(scores: tuple[Term, ...], dtype: torch.dtype) -> bool:
    """Whether our kernels take packed sequences with these terms as they are, by a table of their tiles."""
    alone = all(term.takes_packed and not term.learned_tensors for term in scores)
    return alone and dtype.itemsize == 2


# Rows of a document, on average, from which tiles of its own beat those that it shares with its neighbours.
MIN_ROWS_OF_DOCUMENTS = 64


def documents_are_sequences(scores: tuple[Term, ...], dtype: torch.dtype, same: bool) -> bool:
    """Whether documents may run as packed sequences: all terms mean the same there."""
    return kernels_take_packed(scores, dtype) and _places_agree(scores, same)


@lru_cache(maxsize=32)
def packed_documents(mask: Documents) -> tuple[Packed, tuple[Tensor, Tensor]]:
    """Documents whose offsets the host has as packed sequences, and their offsets, on the host."""
    given = mask.cu_seqlens_q, mask.cu_seqlens_kv
    same = given[0] == given[1]
    of_queries, of_keys = (torch.tensor(starts, dtype=torch.int32, device="cpu") for starts in given)
    longest_q, longest_kv = int(of_queries.diff().max()), int(of_keys.diff().max())
    packed = Packed(len(given[0]) - 1, longest_q, longest_kv, mask.inner, same)
    return packed, (of_queries, of_queries if same else of_keys)


def as_sequences(problem: Problem) -> Problem | None:
    """A problem under Documents as one of packed sequences in each of its batches, where our kernels do best so."""
    mask = problem.mask
    if not isinstance(mask, Documents) or problem.empty or problem.operand_grads:
        return None
    many = problem.seq_q < MIN_ROWS_OF_DOCUMENTS * (len(mask.cu_seqlens_q) - 1)
    same = mask.cu_seqlens_q == mask.cu_seqlens_kv
    if many or not documents_are_sequences(problem.scores, problem.dtype, same):
        return None
    return problem.with_(mask=packed_documents(mask)[0])


def without_offsets(operands: Operands) -> Operands:
    return {name: tensor for name, tensor in operands.items() if name not in _OFFSETS}


def operands_as_spans(problem: Problem, operands: Operands) -> Operands:
    """The operands of `with_spans(problem)`, from those of the problem."""
    return {**without_offsets(operands), **spans_of_offsets(problem, operands)}


def with_spans(problem: Problem) -> Problem:
    """A packed problem as one whose rows see spans of keys; `spans_of_offsets` makes what the term reads."""
    mask = problem.mask
    assert isinstance(mask, Packed)
    hull = first_aligned(mask.inner) if mask.same and not mask.padded else Full()
    before = tuple(term for term in problem.scores if not term.outputs)
    return problem.with_(mask=hull, scores=(*before, Spans(), *problem.scores[len(before) :]))


def spans_of_offsets(problem: Problem, operands: Operands) -> dict[str, Tensor]:
    """The operands of `Spans` for a packed problem, made on the offsets' device; no call waits for it."""
    mask = problem.mask
    assert isinstance(mask, Packed)
    starts_q, starts_kv = operands["cu_seqlens_q"].long(), operands["cu_seqlens_kv"].long()
    rows = torch.arange(problem.seq_q, device=starts_q.device)
    found = torch.searchsorted(starts_q, rows, right=True) - 1
    own = found.clamp(min=0, max=mask.sequences - 1)
    begin, end = starts_kv[own], starts_kv[own + 1]
    if "seqused_k" in operands:
        end = end.minimum(begin + operands["seqused_k"].long()[own].clamp(min=0))
    if "leftpad_k" in operands:
        begin = end.minimum(begin + operands["leftpad_k"].long()[own].clamp(min=0))
    begin = torch.where(found > own, end, begin)  # rows behind the last offset, which see nothing
    left, right, offset = mask.inner.band(1, 1)
    position = rows - starts_q[own] + offset
    if getattr(mask.inner, "align", "top-left") == "bottom-right":
        position = position + (end - begin) - (starts_q[own + 1] - starts_q[own])
    length = end - begin
    zero = torch.zeros_like(length)
    first, last = begin + (position - left).clamp(zero, length), begin + (position + right + 1).clamp(zero, length)
    return span_operands(first[None], last[None], problem.seq_kv)
