"""What torch.compile makes of attention: plain attention as it is written down, and FlexAttention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ...masks import Causal, Dense, Full, Window
from .lacking import Rival, importable, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...errors import Reason
    from ...problem import Problem
    from .inputs import Inputs
    from .lacking import Forward

Tensor = torch.Tensor
Position = Any  # a number of a batch, head, row or key, as FlexAttention hands it to a rule

# --- plain attention, as it is written down, under torch.compile


def _compiled_lacks(problem: Problem, device: str) -> list[Reason]:
    on_gpu = device.startswith("cuda")
    return reasons(
        (on_gpu and not importable("triton"), "triton, which compiles it, is not installed", "pip install triton"),
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


COMPILED = Rival("torch", "upgrade PyTorch", _compiled_lacks, _compiled_forward)

# --- FlexAttention


def _flex_lacks(problem: Problem, device: str) -> list[Reason]:
    on_gpu = device.startswith("cuda")
    return reasons(
        (on_gpu and not importable("triton"), "triton, which compiles it, is not installed", "pip install triton"),
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
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    if (score := score_rule(problem, inputs)) is not None:
        options["score_mod"] = score
    if (visible := mask_rule(problem, inputs)) is not None:
        made = flex.create_block_mask(
            visible, *_own_masks(problem), problem.seq_q, problem.seq_kv, device=str(inputs.q.device)
        )
        # What a bias hides is hidden by the sum already: as a mask it only helps where whole blocks can be skipped.
        if inputs.bias is None or not problem.mask.additive or made.sparsity() > 0:  # type: ignore[attr-defined]
            options["block_mask"] = made
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: compiled(q, k, v, **options)  # type: ignore[no-untyped-call]


def _own_masks(problem: Problem) -> tuple[int | None, int | None]:
    """(batch, heads) of the masks that differ; None where all have the same."""
    mask = problem.mask
    batch, heads = ((1, 1, 1, 1, *mask.shape)[-4:-2]) if isinstance(mask, Dense) else (1, 1)
    return (batch if batch > 1 else None), (heads if heads > 1 else None)


def score_rule(problem: Problem, inputs: Inputs) -> Callable[..., Tensor] | None:
    """score_mod: a softcap, and a bias as a captured tensor; None where scores stay as they are."""
    softcap = problem.softcap
    bias = _reader(inputs.bias, problem) if inputs.bias is not None and inputs.bias.dtype != torch.bool else None
    if bias is None:
        return (lambda score, *_: softcap * torch.tanh(score / softcap)) if softcap else None
    if not softcap:
        return lambda score, b, h, q, k: score + bias(b, h, q, k)
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap) + bias(b, h, q, k)


def mask_rule(problem: Problem, inputs: Inputs) -> Callable[..., Tensor] | None:
    """mask_mod: a captured tensor for a dense mask, arithmetic for bands, which compiles to nothing but compares, and
    a table of spans for every other mask; None where nothing is hidden."""
    mask = problem.mask
    if isinstance(mask, Full):
        return None
    if inputs.bias is not None:
        value = _reader(inputs.bias, problem)
        return value if inputs.bias.dtype == torch.bool else lambda b, h, q, k: value(b, h, q, k) > -torch.inf
    if isinstance(mask, Causal | Window):
        left, right, offset = mask.band(problem.seq_q, problem.seq_kv)
        return lambda b, h, q, k: (k - q <= offset + right) & (k - q >= offset - left)
    rows = torch.arange(problem.seq_q, device=inputs.q.device)
    begin, end = mask.spans(rows, problem.seq_q, problem.seq_kv)
    return lambda b, h, q, k: (k >= begin[q]) & (k < end[q])


def _reader(tensor: Tensor, problem: Problem) -> Callable[[Position, Position, Position, Position], Tensor]:
    """The element of a tensor that broadcasts to (batch, heads, seq_q, seq_kv); what is the same for all is not
    copied."""
    sizes = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    wide = tensor.expand(sizes)
    return lambda b, h, q, k: wide[b, h, q, k]


FLEX = Rival("torch.nn.attention.flex_attention", "upgrade PyTorch", _flex_lacks, _flex_forward)
