"""Attention to a cache: `tilewise.attention_cached` with keys in one piece per sequence or in pages, and a problem's
tensors as libraries for serving take them.

A batch whose masks end at the last key is what new tokens ask of a cache. Every sequence fills its places, or, under
the term KeyLengths, as many as that says. Documents are sequences with different numbers of new tokens, as a server has
them in one call: their queries are packed, and each has a cache with room for the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...api import attention_cached
from ...masks import Documents, Full
from ...scores import Softcap
from ...terms import KeyLengths
from .lacking import inner_mask, is_banded, packed, reasons, sequences, unpacked

if TYPE_CHECKING:
    from ...errors import Reason
    from ...problem import Problem
    from .inputs import Inputs
    from .lacking import Forward

Tensor = torch.Tensor
CACHED = "tilewise:cached"
PAGES_16, PAGES_64 = "tilewise:pages16", "tilewise:pages64"
INVARIANT = "tilewise:invariant"
_FEW_QUERIES = 16  # of a sequence: more are a prompt


class Way(NamedTuple):
    """How the keys lie, and whether a row's bits may depend on its own sequence alone."""

    page_size: int = 0  # 0: in one piece per sequence
    invariant: bool = False


WAYS = {CACHED: Way(), PAGES_16: Way(16), PAGES_64: Way(64), INVARIANT: Way(invariant=True)}


def lacks(problem: Problem) -> list[Reason]:
    """What `attention_cached` has no argument for, and what is not compared here."""
    others = [term for term in problem.scores if not isinstance(term, Softcap | KeyLengths)]
    return reasons(
        (
            not is_banded(problem),
            f"mask {problem.mask}: compared here with full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (
            has_lengths(problem) and not isinstance(problem.mask, Full),
            f"mask {problem.mask} with key lengths: it ends at the last place, and that of a cache at the last key",
            "use full",
        ),
        (bool(others), f"scores {', '.join(map(str, others))}: not compared here of caches", "drop them"),
        (problem.needs_grad, "keys in a cache have no gradient", "drop the gradients"),
        (problem.dropout > 0, "attention to a cache has no dropout", "drop the dropout"),
        (problem.needs_lse, "an lse is asked for: not compared here of caches", "drop the lse"),
    )


def forward(name: str, problem: Problem, inputs: Inputs) -> Forward:
    """A call of ours that reads the lengths on the device, as one of a server does."""
    way = WAYS[name]
    lengths = lengths_of(problem, inputs)
    k, v = (cache(problem, tensor) for tensor in (inputs.k, inputs.v))
    options: dict[str, Any] = {
        "mask": inner_mask(problem.mask),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "batch_invariant": way.invariant,
    }
    if way.page_size:
        options["page_table"] = page_table(k.shape[0], k.shape[1], way.page_size, k.device)
        k, v = (paged(tensor, way.page_size) for tensor in (k, v))
    if isinstance(problem.mask, Documents):
        q = packed(inputs.q)
        starts = sequences(problem, q.device)
        options |= {"cu_seqlens_q": starts.starts_q, "max_seqlen_q": starts.max_q}
        return lambda: unpacked(attention_cached(q, k, v, lengths, **options), problem)  # type: ignore[arg-type]
    q = inputs.q.transpose(1, 2)

    def call() -> Any:
        out: Any = attention_cached(q, k, v, lengths, **options)
        return out.transpose(1, 2)

    return call


def decodes(problem: Problem) -> bool:
    """A few new tokens per sequence against many keys: what libraries have functions of their own for."""
    few = problem.seq_q <= _FEW_QUERIES and problem.seq_q < problem.seq_kv
    return few and not isinstance(problem.mask, Documents) and _is_read_elsewhere(problem)


def continues(problem: Problem) -> bool:
    """New tokens behind others that are in the cache already, each seeing those before it: a prompt in chunks."""
    ordered = not isinstance(inner_mask(problem.mask), Full)
    return ordered and problem.seq_q < problem.seq_kv and _is_read_elsewhere(problem)


def _is_read_elsewhere(problem: Problem) -> bool:
    return not lacks(problem) and problem.head_dim == problem.head_dim_v


def has_lengths(problem: Problem) -> bool:
    return any(isinstance(term, KeyLengths) for term in problem.scores)


def lengths_of(problem: Problem, inputs: Inputs) -> Tensor:
    """Keys of every sequence, int32 (sequences,)."""
    if has_lengths(problem):
        return inputs.terms["key_lengths"]
    return sequences(problem, inputs.k.device).starts_kv.diff()


def cache(problem: Problem, tensor: Tensor) -> Tensor:
    """Keys or values (batch, heads, seq, dim) as (sequences, places, heads, dim), which is a view but for documents."""
    if not isinstance(problem.mask, Documents):
        return tensor.detach().transpose(1, 2)
    lengths = sequences(problem, torch.device("cpu")).starts_kv.diff().tolist()
    return torch.nn.utils.rnn.pad_sequence(list(packed(tensor.detach()).split(lengths)), batch_first=True)


def paged(cached: Tensor, page_size: int) -> Tensor:
    """(sequences, places, heads, dim) as pages (pages, page_size, heads, dim), where `page_table` says."""
    count, places, heads, dim = cached.shape
    each = -(-places // page_size)
    if each * page_size > places:
        cached = torch.nn.functional.pad(cached, (0, 0, 0, 0, 0, each * page_size - places))
    pages = torch.empty((count * each, page_size, heads, dim), dtype=cached.dtype, device=cached.device)
    pages[_order(count * each).to(cached.device)] = cached.reshape(pages.shape)
    return pages


def page_table(count: int, places: int, page_size: int, device: torch.device) -> Tensor:
    """int32 (sequences, pages of a sequence)."""
    each = -(-places // page_size)
    return _order(count * each).view(count, each).to(device, torch.int32)


def _order(pages: int) -> Tensor:
    """Where each page lies: anywhere, as in a server that has run for a while, and the same for K, V and everyone."""
    return torch.randperm(pages, generator=torch.Generator().manual_seed(0))
