"""FlashAttention-2 (flash-attn), -3 (the forward-only build on PyPI) and -4 (flash_attn.cute), and xFormers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ...masks import Causal, Documents, Full, Window
from ...terms import KeyLengths, Sink
from .cached import continues, decodes, has_lengths, lengths_of
from .lacking import (
    Rival,
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
    from ...errors import Reason
    from ...problem import Problem
    from .inputs import Inputs
    from .lacking import Forward

Tensor = torch.Tensor

# --- flash-attn


def _flash_attn_lacks(problem: Problem, device: str) -> list[Reason]:
    return reasons(
        on_cpu(device),
        not_16_bits(problem, "flash-attn"),
        (
            not is_banded(problem),
            f"mask {problem.mask}: flash-attn has full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (max(problem.head_dim, problem.head_dim_v) > 256, f"head_dim {problem.head_dim} is over 256", "use another"),
        (problem.head_dim != problem.head_dim_v, "v has another head_dim than q and k", "pad one of them"),
        (problem.needs_lse, "an lse is asked for, and flash_attn_func returns none by itself", "drop the lse"),
    )


def _flash_attn_forward(problem: Problem, inputs: Inputs) -> Forward:
    library = importlib.import_module("flash_attn")
    q, k, v = inputs[:3]
    mask = inner_mask(problem.mask)
    options = {
        "dropout_p": problem.dropout,
        "softmax_scale": problem.scale,
        "causal": isinstance(mask, Causal),
        "window_size": window_sizes(mask, -1) if isinstance(mask, Window) else (-1, -1),
        "softcap": problem.softcap,
        "deterministic": problem.deterministic,
    }
    if not isinstance(problem.mask, Documents):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return lambda: library.flash_attn_func(q, k, v, **options).transpose(1, 2)
    q, k, v = map(packed, (q, k, v))
    lengths = sequences(problem, q.device)
    return lambda: unpacked(library.flash_attn_varlen_func(q, k, v, *lengths, **options), problem)


FLASH_ATTENTION_2 = Rival(
    "flash_attn.flash_attn_interface", "pip install flash-attn", _flash_attn_lacks, _flash_attn_forward, (Documents,)
)

# --- FlashAttention-3, the forward-only build on PyPI


def _fa3_lacks(problem: Problem, device: str) -> list[Reason]:
    fitting = isinstance(inner_mask(problem.mask), Full | Causal) and is_aligned(problem, "bottom-right")
    return reasons(
        on_cpu(device),
        (
            problem.dtype != torch.bfloat16,
            f"{problem.dtype}: this build of FlashAttention-3 takes bfloat16 alone",
            "use bfloat16",
        ),
        (
            not fitting,
            f"mask {problem.mask}: this build takes full, and causal aligned at the bottom right, in documents too",
            "use one of these",
        ),
        (
            _over_256(problem),
            f"head_dim {problem.head_dim} (v: {problem.head_dim_v}): it takes multiples of 8 to 256",
            "pad the head_dim",
        ),
        (
            problem.head_dim != problem.head_dim_v and (problem.head_dim, problem.head_dim_v) != (192, 128),
            f"head_dim {problem.head_dim} with {problem.head_dim_v} for v: compared here with 192 and 128",
            "pad one of them",
        ),
        (problem.needs_grad, "this build of FlashAttention-3 has no backward", "drop the gradients"),
        (
            problem.dropout > 0 or problem.needs_lse,
            "dropout or lse: this build is a bare forward",
            "drop them",
        ),
        (
            has_lengths(problem) and not decodes(problem),
            "key lengths: compared here where a few queries read a cache",
            "drop them",
        ),
    )


def _over_256(problem: Problem) -> bool:
    return any(dim > 256 or dim % 8 for dim in (problem.head_dim, problem.head_dim_v))


def _fa3_forward(problem: Problem, inputs: Inputs) -> Forward:
    """FlashAttention-3 takes (batch, seq, heads, dim), strided as it may be, or packed documents."""
    library = importlib.import_module("fa3_fwd_interface")
    q, k, v = inputs[:3]
    options: dict[str, Any] = {
        "softmax_scale": problem.scale,
        "causal": isinstance(inner_mask(problem.mask), Causal),
        "softcap": problem.softcap,
    }
    if isinstance(problem.mask, Documents):
        lengths = sequences(problem, q.device)
        q, k, v = map(packed, (q, k, v))
        return lambda: unpacked(_first(library.flash_attn_varlen_func(q, k, v, *lengths, **options)), problem)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if not decodes(problem) and not continues(problem):
        return lambda: _first(library.flash_attn_func(q, k, v, **options)).transpose(1, 2)
    # Its function for caches divides the keys by a heuristic of its own; the plain one does not.
    if has_lengths(problem):
        options |= _fa3_schedule(library, problem, inputs)
    return lambda: _first(library.flash_attn_with_kvcache(q, k, v, **options)).transpose(1, 2)


def _fa3_schedule(library: Any, problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """The lengths, and what is found out of them once for all layers."""
    lengths = lengths_of(problem, inputs)
    metadata = library.get_scheduler_metadata(
        problem.batch,
        problem.seq_q,
        problem.seq_kv,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        lengths,
        qkv_dtype=problem.dtype,
        causal=isinstance(problem.mask, Causal),
        has_softcap=problem.softcap > 0,
    )
    return {"cache_seqlens": lengths, "scheduler_metadata": metadata}


FLASH_ATTENTION_3 = Rival(
    "fa3_fwd_interface", "pip install fa3-fwd", _fa3_lacks, _fa3_forward, (Documents,), (KeyLengths,)
)

# --- FlashAttention-4, which compiles a kernel when a kind of problem first comes


def _fa4_lacks(problem: Problem, device: str) -> list[Reason]:
    dims = (problem.head_dim, problem.head_dim_v)
    return reasons(
        on_cpu(device),
        not_16_bits(problem, "FlashAttention-4"),
        (
            not is_banded(problem),
            f"mask {problem.mask}: FlashAttention-4 has full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (
            _over_256(problem),
            f"head_dim {problem.head_dim} (v: {problem.head_dim_v}): it takes multiples of 8 to 256",
            "pad the head_dim",
        ),
        (
            problem.needs_grad and problem.group > 1 and dims[0] != dims[1],
            "v has another head_dim than q and k: its backward takes that with as many key/value heads as heads alone",
            "pad one of them, or drop the gradients",
        ),
        (problem.dropout > 0, "FlashAttention-4 has no dropout", "drop the dropout"),
        (problem.needs_lse, "an lse is asked for: not compared here with FlashAttention-4", "drop the lse"),
    )


def _fa4_forward(problem: Problem, inputs: Inputs) -> Forward:
    """It takes (batch, seq, heads, dim), strided as it may be, or packed documents, and returns (out, lse)."""
    library = importlib.import_module("flash_attn.cute")
    q, k, v = inputs[:3]
    mask = inner_mask(problem.mask)
    options = {
        "softmax_scale": problem.scale,
        "causal": isinstance(mask, Causal),
        "window_size": window_sizes(mask, None) if isinstance(mask, Window) else (None, None),
        "softcap": problem.softcap,
        "deterministic": problem.deterministic,
    }
    if "sink" in inputs.terms:
        options["learnable_sink"] = inputs.terms["sink"]
    if not isinstance(problem.mask, Documents):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return lambda: _first(library.flash_attn_func(q, k, v, **options)).transpose(1, 2)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options |= dict(zip(names, sequences(problem, q.device), strict=True))
    q, k, v = map(packed, (q, k, v))
    return lambda: unpacked(_first(library.flash_attn_varlen_func(q, k, v, **options)), problem)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


FLASH_ATTENTION_4 = Rival(
    "flash_attn.cute", "pip install flash-attn-4", _fa4_lacks, _fa4_forward, (Documents,), (Sink,)
)

# --- xFormers


def _xformers_lacks(problem: Problem, device: str) -> list[Reason]:
    causal = isinstance(problem.mask, Causal) and is_aligned(problem, "top-left")
    return reasons(
        on_cpu(device),
        (
            not isinstance(problem.mask, Full) and not causal,
            f"mask {problem.mask}: compared here with full and causal from the top left alone",
            "use one of these",
        ),
        (problem.group > 1, f"{problem.heads_kv} key/value heads: not compared here with grouped heads", "repeat them"),
        (problem.softcap > 0, "xFormers has no softcap", "drop the softcap"),
        (problem.needs_lse, "an lse is asked for, and memory_efficient_attention returns none", "drop the lse"),
    )  # fmt: skip


def _xformers_forward(problem: Problem, inputs: Inputs) -> Forward:
    ops = importlib.import_module("xformers.ops")
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    bias = ops.LowerTriangularMask() if isinstance(problem.mask, Causal) else None
    dropout, scale = problem.dropout, problem.scale
    return lambda: ops.memory_efficient_attention(q, k, v, bias, dropout, scale).transpose(1, 2)


XFORMERS = Rival("xformers.ops", "pip install xformers", _xformers_lacks, _xformers_forward)
