"""Candidates: names that stand for a way to compute attention, and the inputs they are given.

    tilewise             tilewise.attention, the planner choosing
    tiled, torch-flash   any backend of the planner, through tilewise.attention(backend=...)
    torch-default        F.scaled_dot_product_attention as it is
    sdpa:flash           F.scaled_dot_product_attention held to one of PyTorch's kernels (efficient, cudnn, math)
    fa3                  FlashAttention-3's forward, where the package fa3-fwd can be imported
    python:MODULE:NAME   a function of yours: NAME(q, k, v, problem, bias) -> out or (out, lse); MODULE may be a file.py

Inputs follow from (problem, seed, device) alone, so every process makes the same ones and nothing large crosses a pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..api import attention
from ..errors import InvalidInput, Reason
from ..masks import Causal, Dense, Full
from ..plan import AUTO, BACKENDS

if TYPE_CHECKING:
    from ..problem import Problem

Tensor = torch.Tensor
Forward = Callable[[], Any]  # out, or (out, lse) where the problem needs an lse

OURS = "tilewise"
TORCH_DEFAULT = "torch-default"
SDPA = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
FA3 = "fa3"
_FA3_MODULE = "fa3_fwd_interface"
PYTHON = "python:"
_LARGEST_MASK_BYTES = 4 * 2**30


class Inputs(NamedTuple):
    """q, k, v and dout as bhsd views stored in the problem's layout; bias is the tensor of a Dense mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named way to compute attention, already told apart from a name that means nothing."""

    name: str

    def __post_init__(self) -> None:
        if self.name.startswith(PYTHON):
            _split_python(self.name)
        elif self.name not in (OURS, TORCH_DEFAULT, *SDPA, FA3, *BACKENDS):
            known = ", ".join((OURS, TORCH_DEFAULT, *SDPA, FA3, *BACKENDS))
            raise InvalidInput("candidate", repr(self.name), f"one of {known}, or python:MODULE:NAME", "choose one")

    @property
    def is_peer(self) -> bool:
        """One of PyTorch's own paths: what others are measured against."""
        return self.name == TORCH_DEFAULT or self.name in SDPA or self.name.startswith("torch-")

    def why_not(self, problem: Problem) -> list[Reason]:
        """Why the candidate cannot even be asked. What a backend of the planner says is the planner's business."""
        if self.name == FA3:
            return _fa3_reasons(problem)
        return _sdpa_reasons(problem) if self.name == TORCH_DEFAULT or self.name in SDPA else []

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """A call without arguments that computes the problem's forward. Masks are built here, once."""
        if self.name == TORCH_DEFAULT or self.name in SDPA:
            return _sdpa_forward(problem, inputs)
        if self.name == FA3:
            return _fa3_forward(problem, inputs)
        if self.name.startswith(PYTHON):
            function = _load_python(self.name)
            return lambda: function(inputs.q, inputs.k, inputs.v, problem, inputs.bias)
        return _our_forward(problem, inputs, AUTO if self.name == OURS else self.name)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What must be active around the calls; entered once, so that it costs the calls nothing."""
        return sdpa_kernel(SDPA[self.name]) if self.name in SDPA else contextlib.nullcontext()


def make_inputs(problem: Problem, seed: int, device: str) -> Inputs:
    """Standard normal tensors, rounded to the problem's dtype. A Dense mask shows key 0 and half of the rest."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, dout = (
        _normal(problem, heads, seq, dim, generator)
        for heads, seq, dim in (
            (problem.heads_q, problem.seq_q, problem.head_dim),
            (problem.heads_kv, problem.seq_kv, problem.head_dim),
            (problem.heads_kv, problem.seq_kv, problem.head_dim_v),
            (problem.heads_q, problem.seq_q, problem.head_dim_v),
        )
    )
    for tensor in (q, k, v):
        tensor.requires_grad_(problem.needs_grad)
    return Inputs(q, k, v, dout, _dense_mask(problem, generator))


def _normal(problem: Problem, heads: int, seq: int, dim: int, generator: torch.Generator) -> Tensor:
    stored = (seq, heads) if problem.layout == "bshd" else (heads, seq)
    shape = (problem.batch, *stored, dim)
    tensor = torch.randn(shape, generator=generator, device=generator.device).to(problem.dtype)
    return tensor.transpose(1, 2) if problem.layout == "bshd" else tensor


def _dense_mask(problem: Problem, generator: torch.Generator) -> Tensor | None:
    if not isinstance(problem.mask, Dense):
        return None
    visible = torch.rand(problem.mask.shape, generator=generator, device=generator.device) < 0.5
    visible[..., :1] = True
    if not problem.mask.additive:
        return visible
    bias = torch.randn(problem.mask.shape, generator=generator, device=generator.device)
    return bias.masked_fill(~visible, -torch.inf).to(problem.dtype)


def _our_forward(problem: Problem, inputs: Inputs, backend: str) -> Forward:
    q, k, v = inputs.q, inputs.k, inputs.v
    if problem.layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = problem.mask if inputs.bias is None else inputs.bias
    scale, softcap, dropout, layout = problem.scale, problem.softcap, problem.dropout, problem.layout
    return_lse = problem.needs_lse

    def forward() -> Any:
        out = attention(
            q, k, v, mask=mask, scale=scale, softcap=softcap, dropout=dropout, layout=layout,
            return_lse=return_lse, backend=backend,
        )  # type: ignore[call-overload]  # fmt: skip
        if layout == "bhsd":
            return out
        return (out[0].transpose(1, 2), out[1]) if return_lse else out.transpose(1, 2)

    return forward


def _is_top_left_causal(problem: Problem) -> bool:
    return isinstance(problem.mask, Causal) and (problem.mask.align == "top-left" or problem.seq_q == problem.seq_kv)


def _sdpa_reasons(problem: Problem) -> list[Reason]:
    """What F.scaled_dot_product_attention has no argument for."""
    reasons = []
    if problem.softcap:
        reasons.append(Reason(f"softcap {problem.softcap:g}: PyTorch's function has no softcap", "drop the softcap"))
    if problem.needs_lse:
        reasons.append(Reason("an lse is asked for, and PyTorch's function returns none", "drop the lse"))
    built = not isinstance(problem.mask, Full | Dense) and not _is_top_left_causal(problem)
    if built and problem.seq_q * problem.seq_kv > _LARGEST_MASK_BYTES:
        size = f"{problem.seq_q * problem.seq_kv / 2**30:.1f} GiB as a boolean tensor"
        reasons.append(Reason(f"mask {problem.mask}: {size}", f"stay below {_LARGEST_MASK_BYTES / 2**30:.0f} GiB"))
    return reasons


def _sdpa_forward(problem: Problem, inputs: Inputs) -> Forward:
    q, k, v = inputs.q, inputs.k, inputs.v
    is_causal, attn_mask = _is_top_left_causal(problem), inputs.bias
    if attn_mask is None and not is_causal and not isinstance(problem.mask, Full):
        rows, keys = range(problem.seq_q), range(problem.seq_kv)
        attn_mask = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, q.device)
    dropout, scale, enable_gqa = problem.dropout, problem.scale, problem.group > 1
    return lambda: F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def has_fa3() -> bool:
    """The package fa3-fwd can be imported here."""
    return importlib.util.find_spec(_FA3_MODULE) is not None


def _fa3_reasons(problem: Problem) -> list[Reason]:
    """What the forward-only build on PyPI leaves out."""
    reasons = []
    if not has_fa3():
        reasons.append(Reason("the module fa3_fwd_interface cannot be imported", "pip install fa3-fwd"))
    if problem.dtype != torch.bfloat16:
        reasons.append(Reason(f"{problem.dtype}: this build of FlashAttention-3 takes bfloat16 alone", "use bfloat16"))
    same_length = problem.seq_q == problem.seq_kv
    if not isinstance(problem.mask, Full) and not (isinstance(problem.mask, Causal) and same_length):
        reasons.append(Reason(f"mask {problem.mask}: this build takes full and causal alone", "use one of these"))
    if problem.needs_grad or problem.dropout or problem.needs_lse:
        reasons.append(Reason("gradients, dropout or lse: this build is a bare forward", "drop them"))
    return reasons


def _fa3_forward(problem: Problem, inputs: Inputs) -> Forward:
    """FlashAttention-3 takes (batch, seq, heads, dim), strided as it may be."""
    flash = importlib.import_module(_FA3_MODULE).flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    scale, softcap, causal = problem.scale, problem.softcap, isinstance(problem.mask, Causal)

    def forward() -> Tensor:
        out = flash(q, k, v, softmax_scale=scale, causal=causal, softcap=softcap)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended.transpose(1, 2)

    return forward


def _split_python(name: str) -> tuple[str, str]:
    module, _, function = name.removeprefix(PYTHON).rpartition(":")
    if not module or not function.isidentifier():
        raise InvalidInput(
            "candidate", repr(name), "python:MODULE:NAME or python:FILE.py:NAME", "name a module and a function in it"
        )
    return module, function


def _load_python(name: str) -> Callable[..., Any]:
    module_name, function = _split_python(name)
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), function)  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]
