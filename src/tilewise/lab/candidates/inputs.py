"""The tensors candidates are given: made from a seed, or saved from a model.

Inputs follow from (problem, seed, device) or from a file, so every process makes the same ones and nothing large
crosses a pipe.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import InvalidInput
from ...masks import Dense
from ...operands import NO_OPERANDS, Operand, Operands
from ...problem import Problem, describe, mask_operands
from ...torch_function import torch_mask
from .patterns import NORMAL, Pattern

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """q, k, v and dout as bhsd views stored in the problem's layout; bias is the tensor of a Dense mask, and `terms`
    are the tensors that the terms of the scores read, by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None
    terms: Operands = NO_OPERANDS

    @property
    def operands(self) -> dict[str, Tensor]:
        """What the mask and the terms read, by name."""
        return {**mask_operands(self.bias), **self.terms}

    def differentiated(self, problem: Problem) -> dict[str, Tensor]:
        """The tensors whose gradients the problem asks for, by the names of their gradients."""
        given = {"q": self.q, "k": self.k, "v": self.v, **self.operands}
        return {f"d{name}": given[name] for name in ("q", "k", "v", *problem.operand_grads)}


def make_inputs(problem: Problem, seed: int, device: str, tensors: str = "", contents: str = "") -> Inputs:
    """From the file `tensors` where it is given, else standard normal ones, rounded to the problem's dtype.

    A made-up Dense mask shows key 0 and half of the rest, or what `contents` says (see `patterns`).
    """
    generator = torch.Generator(device).manual_seed(seed)
    if tensors:
        saved = load(tensors)
        q, k, v = (saved[name].to(device).detach() for name in "qkv")
        bias = saved.get("attn_mask")
        bias = bias.to(device).detach() if bias is not None else None
    else:
        q = _normal(problem, problem.heads_q, problem.seq_q, problem.head_dim, generator)
        k = _normal(problem, problem.heads_kv, problem.seq_kv, problem.head_dim, generator)
        v = _normal(problem, problem.heads_kv, problem.seq_kv, problem.head_dim_v, generator)
    dout = _normal(problem, problem.heads_q, problem.seq_q, problem.head_dim_v, generator)
    if not tensors:
        bias = _dense_mask(problem, generator, contents)
    terms = {
        operand.name: _operand(operand, problem, generator, contents)
        for term in problem.scores
        for operand in term.tensors
    }
    for tensor in (q, k, v):
        tensor.requires_grad_(problem.needs_grad)
    made = Inputs(q, k, v, dout, bias, terms)
    for name in problem.operand_grads:
        made.operands[name].requires_grad_(problem.needs_grad)
    return made


def end_to_end(inputs: Inputs) -> Inputs:
    """The same values, stored (batch, seq, heads, head_dim): sequences, and the tokens of each, follow one another."""

    def stored(tensor: Tensor) -> Tensor:
        copy = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
        return copy.requires_grad_(tensor.requires_grad)

    q, k, v, dout = map(stored, inputs[:4])
    return inputs._replace(q=q, k=k, v=v, dout=dout)


def load(path: str) -> dict[str, Any]:
    """What `torch.save` wrote: (q, k, v), or a dictionary of these and perhaps attn_mask, is_causal and scale."""
    expected = "a file of torch.save((q, k, v)) or of a dictionary with q, k, v [, attn_mask, is_causal, scale]"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own, pickle's, zipfile's, the system's: whatever keeps it from being read
        raise InvalidInput(
            "--tensors", f"{path} ({type(error).__name__})", expected, "save the tensors again"
        ) from None
    if isinstance(saved, list | tuple) and len(saved) == 3:
        saved = dict(zip("qkv", saved, strict=True))
    known = {"q", "k", "v", "attn_mask", "is_causal", "scale"}
    if not isinstance(saved, dict) or not {"q", "k", "v"} <= set(saved) <= known:
        raise InvalidInput("--tensors", f"{Path(path).name} with other contents", expected, "save the tensors again")
    return _with_one_mask(saved)


def _with_one_mask(saved: dict[str, Any]) -> dict[str, Any]:
    """A mask beside is_causal, cut by the causal rule: PyTorch's function lets a pair be visible if both do."""
    mask = saved.get("attn_mask")
    if mask is None or not saved.get("is_causal"):
        return saved
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):  # what does not fit is told by describe
        pairs = saved["q"].shape[-2], saved["k"].shape[-2]
        causal = torch.ones(pairs, dtype=torch.bool).tril()
        is_boolean = mask.dtype == torch.bool
        mask = mask & causal if is_boolean else torch.where(causal, mask, torch.full_like(mask, -torch.inf))
    return saved | {"attn_mask": mask, "is_causal": False}


def problem_of(path: str, *, needs_grad: bool) -> Problem:
    """The problem that saved tensors pose, in the order (batch, heads, seq, head_dim) of PyTorch's function."""
    saved = load(path)
    mask = torch_mask(saved.get("attn_mask"), bool(saved.get("is_causal", False)))
    with contextlib.suppress(AttributeError):  # what is no tensor is told by describe
        for name in "qkv":
            saved[name] = saved[name].detach()
    return describe(saved["q"], saved["k"], saved["v"], mask=mask, scale=saved.get("scale")).with_(
        needs_grad=needs_grad
    )


def _normal(problem: Problem, heads: int, seq: int, dim: int, generator: torch.Generator) -> Tensor:
    stored = (seq, heads) if problem.layout == "bshd" else (heads, seq)
    shape = (problem.batch, *stored, dim)
    tensor = torch.randn(shape, generator=generator, device=generator.device).to(problem.dtype)
    return tensor.transpose(1, 2) if problem.layout == "bshd" else tensor


def _dense_mask(problem: Problem, generator: torch.Generator, contents: str = "") -> Tensor | None:
    mask = problem.mask
    if not isinstance(mask, Dense):
        return None
    device = generator.device
    if contents == NORMAL:
        return torch.randn(mask.shape, generator=generator, device=device).to(problem.dtype)
    if contents:
        visible = Pattern.parse(contents).visible(problem.seq_q, problem.seq_kv, device)
        visible = visible.expand((1,) * (4 - len(mask.shape)) + mask.shape).reshape(mask.shape).contiguous()
    else:
        visible = torch.rand(mask.shape, generator=generator, device=device) < 0.5
        visible[..., :1] = True
    if not mask.additive:
        return visible
    bias = torch.randn(mask.shape, generator=generator, device=device)
    return bias.masked_fill(~visible, -torch.inf).to(problem.dtype)


def _operand(operand: Operand, problem: Problem, generator: torch.Generator, contents: str) -> Tensor:
    """A tensor that a term reads: what models have, or normal numbers."""
    device, shape = generator.device, operand.shape(problem)
    if operand.name == "slopes":  # as ALiBi's authors choose them
        powers = torch.arange(1, problem.heads_q + 1, device=device, dtype=torch.float32)
        return torch.exp2(-8.0 * powers / problem.heads_q).expand(shape).contiguous()
    if operand.name == "key_lengths":
        return torch.tensor(Pattern.parse(contents).lengths, dtype=torch.int32, device=device)
    if operand.name == "keep":
        visible = Pattern.parse(contents).visible(problem.seq_q, problem.seq_kv, device)
        return visible.expand(shape).contiguous()
    if operand.dtype is not None and not operand.dtype.is_floating_point:
        return torch.zeros(shape, dtype=operand.dtype, device=device)
    return torch.randn(shape, generator=generator, device=device).to(operand.dtype or problem.dtype)
