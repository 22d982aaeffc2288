"""What kernels read of a mask that is a rule but no band, on their device: the spans of its rows, or the offsets of
documents that are packed sequences to them.

The host knows the mask, so this is made once per mask, lengths and device, and remembered: a call copies nothing and
waits for nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..jit import launch as driver
from ..masks import Cached, Dense, Documents, Packed
from ..memo import Memo
from ..operands import NO_OPERANDS
from ..sequences import as_sequences, packed_documents
from ..terms.spans import operands_of

if TYPE_CHECKING:
    from ..masks import Mask
    from ..operands import Operands
    from ..problem import Problem

_MAX_BYTES = 256 * 2**20
_made: Memo[Operands] = Memo(max_entries=256, max_bytes=_MAX_BYTES)


def mask_operands(problem: Problem, device: torch.device) -> Operands:
    """The operands of `rules.in_terms(problem)` that no caller gives; none for bands, tensors and spans of a term."""
    mask, seq_q, seq_kv = problem.mask, problem.seq_q, problem.seq_kv
    if isinstance(mask, Cached | Dense | Packed) or mask.band(seq_q, seq_kv) is not None or problem.empty:
        return NO_OPERANDS
    packed = as_sequences(problem.dropout_in_terms()) is not None
    key = mask, seq_q, seq_kv, device, packed
    found = _made.get(key)
    if found is None:
        generation = _made.generation
        found = _copied(_offsets(mask) if packed else _spans(mask, seq_q, seq_kv), device)
        _made.put(key, found, generation, 4 * sum(tensor.numel() for tensor in found.values()))
    return found


def _spans(mask: Mask, seq_q: int, seq_kv: int) -> dict[str, torch.Tensor]:
    first, end = mask.spans(torch.arange(seq_q, device="cpu"), seq_q, seq_kv)
    return operands_of(first[None], end[None], seq_kv)


def _offsets(mask: Mask) -> dict[str, torch.Tensor]:
    assert isinstance(mask, Documents)
    _, (of_queries, of_keys) = packed_documents(mask)
    return {"cu_seqlens_q": of_queries, "cu_seqlens_kv": of_keys}


def _copied(tensors: dict[str, Any], device: torch.device) -> Operands:
    """On the device, where any stream may read them when this returns.

    Why a stream of its own under capture: what is copied here outlives the graph, and is no part of it.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    capturing = torch.cuda.is_current_stream_capturing()
    with driver.capture_relaxed(driver.driver()) if capturing else nullcontext():
        stream = torch.cuda.Stream(device) if capturing else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            copied = {name: tensor.to(device) for name, tensor in tensors.items()}
        stream.synchronize()
    return copied
