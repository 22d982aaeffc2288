"""Attention that is neither ours nor PyTorch's function: plain attention under torch.compile, FlexAttention, and, where
installed, flash-attn, FlashAttention-3 and -4 and xFormers.

Each rival says what it lacks for a problem, all of it, and makes a call without arguments from tensors. They import
their library only when they are asked to run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import Reason
from ...masks import Causal, Dense, Full, Window

if TYPE_CHECKING:
    from ...problem import Problem
    from .inputs import Inputs

Tensor = torch.Tensor
Forward = Callable[[], Any]
FA3 = "fa3"
FA4 = "fa4"
FLEX = "flex"
COMPILED = "compiled"  # plain attention under torch.compile


class Rival(NamedTuple):
    """A library's attention: what it lacks, and how it is called."""

    module: str
    install: str
    lacks: Callable[[Problem, str], list[Reason]]
    forward: Callable[[Problem, Inputs], Forward]

    def why_not(self, problem: Problem, device: str) -> list[Reason]:
        missing = (
            [] if _importable(self.module) else [Reason(f"the module {self.module} cannot be imported", self.install)]
        )
        return missing + self.lacks(problem, device)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # not even the package above it, or one that cannot be imported
        return False


def installed(rival: str) -> bool:
    """The rival's library can be imported here."""
    return _importable(RIVALS[rival].module)


def _reasons(*checks: tuple[bool, str, str]) -> list[Reason]:
    return [Reason(what, remedy) for wrong, what, remedy in checks if wrong]


def _on_cpu(device: str) -> tuple[bool, str, str]:
    return not device.startswith("cuda"), f"device {device}: the library has CUDA kernels alone", "run it on a GPU"


def _is_square_or(problem: Problem, align: str) -> bool:
    """The mask's alignment is one the library has, or makes no difference here."""
    return problem.seq_q == problem.seq_kv or getattr(problem.mask, "align", align) == align


# --- FlashAttention-3, the forward-only build on PyPI


def _fa3_lacks(problem: Problem, device: str) -> list[Reason]:
    same_length = problem.seq_q == problem.seq_kv
    fitting = isinstance(problem.mask, Full) or (isinstance(problem.mask, Causal) and same_length)
    return _reasons(
        _on_cpu(device),
        (
            problem.dtype != torch.bfloat16,
            f"{problem.dtype}: this build of FlashAttention-3 takes bfloat16 alone",
            "use bfloat16",
        ),
        (not fitting, f"mask {problem.mask}: this build takes full and causal alone", "use one of these"),
        (
            problem.needs_grad or problem.dropout > 0 or problem.needs_lse,
            "gradients, dropout or lse: this build is a bare forward",
            "drop them",
        ),
    )


def _fa3_forward(problem: Problem, inputs: Inputs) -> Forward:
    """FlashAttention-3 takes (batch, seq, heads, dim), strided as it may be."""
    flash = importlib.import_module("fa3_fwd_interface").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    scale, softcap, causal = problem.scale, problem.softcap, isinstance(problem.mask, Causal)

    def forward() -> Tensor:
        out = flash(q, k, v, softmax_scale=scale, causal=causal, softcap=softcap)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended.transpose(1, 2)

    return forward


# --- FlashAttention-4, which compiles a kernel when a kind of problem first comes


def _fa4_lacks(problem: Problem, device: str) -> list[Reason]:
    dims = (problem.head_dim, problem.head_dim_v)
    return _reasons(
        _on_cpu(device),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"{problem.dtype}: FlashAttention-4 takes float16 and bfloat16",
            "cast q, k and v",
        ),
        (
            not isinstance(problem.mask, Full | Causal | Window) or not _is_square_or(problem, "bottom-right"),
            f"mask {problem.mask}: FlashAttention-4 has full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (
            any(dim > 256 or dim % 8 for dim in dims),
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
    """FlashAttention-4 takes (batch, seq, heads, dim), strided as it may be, and returns (out, lse)."""
    flash = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    mask = problem.mask
    options = {
        "softmax_scale": problem.scale,
        "causal": isinstance(mask, Causal),
        "window_size": (mask.left, mask.right) if isinstance(mask, Window) else (None, None),
        "softcap": problem.softcap,
        "deterministic": problem.deterministic,
    }

    def forward() -> Tensor:
        out = flash(q, k, v, **options)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended.transpose(1, 2)

    return forward


# --- flash-attn


def _flash_attn_lacks(problem: Problem, device: str) -> list[Reason]:
    banded = isinstance(problem.mask, Full | Causal | Window)
    return _reasons(
        _on_cpu(device),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"{problem.dtype}: flash-attn takes float16 and bfloat16",
            "cast q, k and v",
        ),
        (
            not banded or not _is_square_or(problem, "bottom-right"),
            f"mask {problem.mask}: flash-attn has full, and causal and windows aligned at the bottom right",
            "use one of these",
        ),
        (max(problem.head_dim, problem.head_dim_v) > 256, f"head_dim {problem.head_dim} is over 256", "use another"),
        (problem.head_dim != problem.head_dim_v, "v has another head_dim than q and k", "pad one of them"),
        (problem.needs_lse, "an lse is asked for, and flash_attn_func returns none by itself", "drop the lse"),
    )


def _flash_attn_forward(problem: Problem, inputs: Inputs) -> Forward:
    flash = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    mask = problem.mask
    window = (
        tuple(-1 if size is None else size for size in (mask.left, mask.right))
        if isinstance(mask, Window)
        else (-1, -1)
    )
    options = {
        "dropout_p": problem.dropout,
        "softmax_scale": problem.scale,
        "causal": isinstance(mask, Causal),
        "window_size": window,
        "softcap": problem.softcap,
        "deterministic": problem.deterministic,
    }
    return lambda: flash(q, k, v, **options).transpose(1, 2)


# --- xFormers


def _xformers_lacks(problem: Problem, device: str) -> list[Reason]:
    causal = isinstance(problem.mask, Causal) and _is_square_or(problem, "top-left")
    return _reasons(
        _on_cpu(device),
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


# --- plain attention, as it is written down, under torch.compile


def _compiled_lacks(problem: Problem, device: str) -> list[Reason]:
    on_gpu = device.startswith("cuda")
    return _reasons(
        (on_gpu and not _importable("triton"), "triton, which compiles it, is not installed", "pip install triton"),
        (problem.dtype == torch.float64, "its scores are float32: not compared here in float64", "use float32"),
        (problem.dropout > 0, "not compared here with dropout", "drop the dropout"),
        (problem.needs_lse, "not compared here with an lse", "drop the lse"),
    )


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, hidden: Tensor | None) -> Tensor:
    """softmax(q k^T scale) v, with float32 scores. A row that sees no key is 0. `hidden` is added to the scores."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores + hidden
    weights = torch.softmax(scores, -1)
    if hidden is not None:
        weights = weights.nan_to_num(0.0)
    return weights.to(v.dtype) @ v


def _compiled_forward(problem: Problem, inputs: Inputs) -> Forward:
    # A backward is timed again and again on one graph, which has to keep its buffers.
    compiler: Any = importlib.import_module("torch._functorch.config")
    compiler.donated_buffer = False
    compiled = torch.compile(plain_attention, dynamic=False)
    hidden = inputs.bias
    if hidden is None and not isinstance(problem.mask, Full):
        rows, keys = range(problem.seq_q), range(problem.seq_kv)
        hidden = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, inputs.q.device)
    if hidden is not None and hidden.dtype == torch.bool:
        hidden = torch.zeros(hidden.shape, device=hidden.device).masked_fill(~hidden, -torch.inf)
    q, k, v, scale, softcap = inputs.q, inputs.k, inputs.v, problem.scale, problem.softcap
    return lambda: compiled(q, k, v, scale, softcap, hidden)


# --- FlexAttention


def _flex_lacks(problem: Problem, device: str) -> list[Reason]:
    on_gpu = device.startswith("cuda")
    return _reasons(
        (on_gpu and not _importable("triton"), "triton, which compiles it, is not installed", "pip install triton"),
        (isinstance(problem.mask, Dense), f"mask {problem.mask}: it wants a rule, not a tensor", "name the rule"),
        (problem.dropout > 0, "FlexAttention has no dropout", "drop the dropout"),
        (problem.needs_lse, "an lse is asked for: not compared here with FlexAttention", "drop the lse"),
        (problem.needs_grad and not on_gpu, "FlexAttention has no backward on a CPU", "run it on a GPU"),
        (problem.dtype == torch.float64, "FlexAttention compiles no float64", "use float32"),
    )  # fmt: skip


def _flex_forward(problem: Problem, inputs: Inputs) -> Forward:
    """Compiled, as its authors mean it to be used; the block mask is made once, outside the calls."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    # A backward is timed again and again on one graph, which has to keep its buffers.
    compiler: Any = importlib.import_module("torch._functorch.config")
    compiler.donated_buffer = False
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    softcap = problem.softcap
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    if softcap:
        options["score_mod"] = lambda score, *_: softcap * torch.tanh(score / softcap)
    if not isinstance(problem.mask, Full):
        sees = _position_rule(problem, inputs.q.device)
        sizes = (problem.seq_q, problem.seq_kv)
        options["block_mask"] = flex.create_block_mask(sees, None, None, *sizes, device=str(inputs.q.device))
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: compiled(q, k, v, **options)  # type: ignore[no-untyped-call]


def _position_rule(problem: Problem, device: torch.device) -> Callable[..., Tensor]:
    """mask_mod: arithmetic for bands, which compiles to nothing but compares; a table of spans for documents."""
    mask = problem.mask
    if isinstance(mask, Causal | Window):
        left, right, offset = mask.band(problem.seq_q, problem.seq_kv)
        return lambda b, h, q, k: (k - q <= offset + right) & (k - q >= offset - left)
    rows = torch.arange(problem.seq_q, device=device)
    begin, end = mask.spans(rows, problem.seq_q, problem.seq_kv)
    return lambda b, h, q, k: (k >= begin[q]) & (k < end[q])


COMPILE = (COMPILED, FLEX)  # take a minute on a CPU: run there only where they are asked for
RIVALS: dict[str, Rival] = {
    COMPILED: Rival("torch", "upgrade PyTorch", _compiled_lacks, _compiled_forward),
    FLEX: Rival("torch.nn.attention.flex_attention", "upgrade PyTorch", _flex_lacks, _flex_forward),
    "flash-attn": Rival(
        "flash_attn.flash_attn_interface", "pip install flash-attn", _flash_attn_lacks, _flash_attn_forward
    ),
    FA3: Rival("fa3_fwd_interface", "pip install fa3-fwd", _fa3_lacks, _fa3_forward),
    FA4: Rival("flash_attn.cute", "pip install flash-attn-4", _fa4_lacks, _fa4_forward),
    "xformers": Rival("xformers.ops", "pip install xformers", _xformers_lacks, _xformers_forward),
}
