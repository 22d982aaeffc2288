"""Libraries that take sequences laid end to end: PyTorch's varlen_attn, and FlashInfer.

A batch is that many sequences of one length; packed documents are theirs. Tensors are stored as they want them (see
`lacking.Rival`), and what is planned once for many layers is planned outside the calls.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...masks import Causal, Dense, Full, Mask, Window
from ...terms import KeyLengths
from .cached import cache, continues, decodes, has_lengths, lengths_of, page_table, paged
from .lacking import (
    Rival,
    importable,
    inner_mask,
    is_aligned,
    is_banded,
    not_16_bits,
    on_cpu,
    packed,
    reasons,
    sequences,
    unpacked,
    window_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...errors import Reason
    from ...problem import Problem
    from .inputs import Inputs
    from .lacking import Forward

Tensor = torch.Tensor

# --- torch.nn.attention.varlen

_VARLEN = "torch.nn.attention.varlen"


def _varlen_options(problem: Problem) -> dict[str, Any]:
    """Grouped heads came with a later PyTorch than the rest: it is told of them only where there are any."""
    grouped = {"enable_gqa": True} if problem.group > 1 else {}
    return {"scale": problem.scale, "window_size": window_sizes(inner_mask(problem.mask), -1), **grouped}


def _varlen_lacks(problem: Problem, device: str) -> list[Reason]:
    lacking = {"scale", "window_size", *(["enable_gqa"] if problem.group > 1 else [])} - _varlen_parameters()
    return reasons(
        (bool(lacking), f"this PyTorch's varlen_attn has no {', '.join(sorted(lacking))}", "upgrade PyTorch"),
        on_cpu(device),
        not_16_bits(problem, "varlen_attn"),
        (
            not is_banded(problem),
            f"mask {problem.mask}: varlen_attn has full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (
            problem.head_dim > 256 or problem.head_dim % 8 != 0,
            f"head_dim {problem.head_dim}: varlen_attn takes multiples of 8 to 256",
            "pad the head_dim",
        ),
        (problem.head_dim != problem.head_dim_v, "v has another head_dim than q and k", "pad one of them"),
        (problem.softcap > 0, "varlen_attn has no softcap", "drop the softcap"),
        (problem.dropout > 0, "varlen_attn has no dropout", "drop the dropout"),
        (problem.needs_lse, "an lse is asked for: not compared here with varlen_attn", "drop the lse"),
    )


def _varlen_parameters() -> set[str]:
    """Nothing is missing where there is no such function: that is a reason of its own."""
    if not importable(_VARLEN):
        return {"scale", "window_size", "enable_gqa"}
    return set(inspect.signature(importlib.import_module(_VARLEN).varlen_attn).parameters)


def _varlen_forward(problem: Problem, inputs: Inputs) -> Forward:
    attend = importlib.import_module(_VARLEN).varlen_attn
    q, k, v = map(packed, inputs[:3])
    lengths = sequences(problem, q.device)
    options = _varlen_options(problem)
    return lambda: unpacked(attend(q, k, v, *lengths, **options), problem)


TORCH_VARLEN = Rival(_VARLEN, "upgrade PyTorch", _varlen_lacks, _varlen_forward, (Mask,))

# --- FlashInfer, which has no backward

_WORKSPACE = 128 * 2**20  # bytes, as its documentation has it
_PAGE_SIZE = 16  # of decoding: the common one of servers
_CHUNK_PAGE_SIZE = 64  # of prefill in chunks: as of our own candidate there
_MAX_MASK_BITS = 2**31 - 1  # its offsets into a packed mask are 32 bits wide
_FLASHINFER_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))


def _flashinfer_lacks(problem: Problem, device: str) -> list[Reason]:
    mask, dims = problem.mask, (problem.head_dim, problem.head_dim_v)
    tensor = mask if isinstance(mask, Dense) else None
    return reasons(
        on_cpu(device),
        not_16_bits(problem, "FlashInfer"),
        (
            tensor is not None and tensor.additive,
            f"mask {mask}: FlashInfer takes boolean masks, and adds none to scores",
            "use a boolean mask",
        ),
        (
            tensor is not None and len(tensor.shape) > 2 and tensor.shape[-3] > 1,
            f"mask {mask}: FlashInfer takes one mask for all heads",
            "use a mask that is the same for all heads",
        ),
        (
            not _has_name(problem) and problem.batch * problem.seq_q * problem.seq_kv > _MAX_MASK_BITS,
            f"mask {mask}: FlashInfer would take it as a tensor of more than 2^31 pairs",
            "use full, causal or a window to the left",
        ),
        (
            dims not in _FLASHINFER_DIMS,
            f"head_dim {dims[0]} (v: {dims[1]}): compared here with 64, 128, 256, and 192 with 128 for v",
            "use one of these",
        ),
        (
            has_lengths(problem) and not _flashinfer_decodes(problem),
            "key lengths: compared here where a few queries read a cache",
            "drop them",
        ),
        (problem.needs_grad, "FlashInfer has no backward", "drop the gradients"),
        (problem.dropout > 0, "FlashInfer has no dropout", "drop the dropout"),
        (problem.needs_lse, "an lse is asked for: not compared here with FlashInfer", "drop the lse"),
    )


def _has_name(problem: Problem) -> bool:
    """The mask is one of FlashInfer's own; any other is given to it as a tensor."""
    inner = inner_mask(problem.mask)
    named = isinstance(inner, Full | Causal) or (isinstance(inner, Window) and inner.right == 0)
    return named and is_aligned(problem, "bottom-right")


def _flashinfer_forward(problem: Problem, inputs: Inputs) -> Forward:
    if _flashinfer_decodes(problem):
        return _flashinfer_paged(problem, inputs, _PAGE_SIZE, _flashinfer_decoding)
    if continues(problem) and _has_name(problem):
        return _flashinfer_paged(problem, inputs, _CHUNK_PAGE_SIZE, _flashinfer_chunks)
    library = importlib.import_module("flashinfer")
    q, k, v = map(packed, inputs[:3])
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    named = _has_name(problem)
    inner = inner_mask(problem.mask)
    # A mask that is given as a tensor hides one document from another itself.
    lengths = sequences(problem if named else problem.with_(mask=Full()), q.device)
    options: dict[str, Any] = {
        "head_dim_vo": problem.head_dim_v,
        "causal": named and not isinstance(inner, Full),
        "window_left": inner.left if named and isinstance(inner, Window) and inner.left is not None else -1,
        "custom_mask": None if named else _one_mask_each(problem, inputs).flatten(),
        "sm_scale": problem.scale,
        "logits_soft_cap": problem.softcap,
        "q_data_type": problem.dtype,
        "kv_data_type": problem.dtype,
    }
    heads = (problem.heads_q, problem.heads_kv, problem.head_dim)
    wrapper.plan(lengths.starts_q, lengths.starts_kv, *heads, **options)
    return lambda: unpacked(wrapper.run(q, k, v), problem)


def _flashinfer_decodes(problem: Problem) -> bool:
    """Several new tokens of a sequence are causal among themselves there."""
    ordered = problem.seq_q == 1 or not isinstance(problem.mask, Full)
    return decodes(problem) and _has_name(problem) and ordered


class _Pages(NamedTuple):
    """Which pages of a cache are whose, as FlashInfer takes it; hashable, for plans to be kept by it."""

    size: int
    counts: tuple[int, ...]  # of each sequence
    used: tuple[int, ...]  # the pages of all sequences, one sequence after another
    last: tuple[int, ...]  # keys in the last page of each sequence

    def arguments(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        starts = (0, *accumulate(self.counts))
        first, second, third = (
            torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, self.used, self.last)
        )
        return first, second, third


def _pages(lengths: list[int], places: int, size: int) -> _Pages:
    counts = [-(-length // size) for length in lengths]
    table = page_table(len(lengths), places, size, torch.device("cpu"))
    used = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    last = [length - (count - 1) * size for length, count in zip(lengths, counts, strict=True)]
    return _Pages(size, tuple(counts), tuple(used.tolist()), tuple(last))


def _flashinfer_paged(
    problem: Problem, inputs: Inputs, size: int, planned: Callable[[Problem, _Pages, torch.device], Any]
) -> Forward:
    """Its functions for caches take keys in pages."""
    q = packed(inputs.q)
    k, v = (cache(problem, tensor) for tensor in (inputs.k, inputs.v))
    pages = _pages(lengths_of(problem, inputs).tolist(), k.shape[1], size)
    wrapper = planned(problem, pages, q.device)
    stored = (paged(k, size), paged(v, size))
    return lambda: unpacked(wrapper.run(q, stored), problem)


@functools.lru_cache(maxsize=1)
def _flashinfer_decoding(problem: Problem, pages: _Pages, device: torch.device) -> Any:
    """Planned once for all layers of a step, whose caches have one page table."""
    library = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    options = _paged_options(problem)
    if problem.seq_q > 1:  # causal among themselves
        options["q_len_per_req"] = problem.seq_q
    heads = (problem.heads_q, problem.heads_kv, problem.head_dim)
    wrapper.plan(*pages.arguments(device), *heads, pages.size, **options)
    return wrapper


@functools.lru_cache(maxsize=1)
def _flashinfer_chunks(problem: Problem, pages: _Pages, device: torch.device) -> Any:
    """The same of chunks, whose queries are packed."""
    library = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    starts = sequences(problem, device).starts_q
    heads = (problem.heads_q, problem.heads_kv, problem.head_dim)
    wrapper.plan(starts, *pages.arguments(device), *heads, pages.size, causal=True, **_paged_options(problem))
    return wrapper


def _paged_options(problem: Problem) -> dict[str, Any]:
    mask = inner_mask(problem.mask)
    return {
        "window_left": mask.left if isinstance(mask, Window) and mask.left is not None else -1,
        "sm_scale": problem.scale,
        "logits_soft_cap": problem.softcap,
        "q_data_type": problem.dtype,
        "kv_data_type": problem.dtype,
    }


def _one_mask_each(problem: Problem, inputs: Inputs) -> Tensor:
    """(batch, seq_q, seq_kv), True where a pair is visible."""
    sizes = (problem.seq_q, problem.seq_kv)
    visible = inputs.bias
    if visible is None:
        visible = problem.mask.to_bool(range(sizes[0]), range(sizes[1]), *sizes, inputs.q.device)
    return visible.expand(problem.batch, 1, *sizes)[:, 0]


FLASHINFER = Rival(
    "flashinfer",
    "pip install flashinfer-python",
    _flashinfer_lacks,
    _flashinfer_forward,
    (Mask,),
    (KeyLengths,),
)
