"""What torch.compile makes of attention: plain attention as it is written down, and FlexAttention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ...masks import Causal, Dense, Full, Window
from ...scores import Softcap
from ...terms import Alibi, Keep, KeyLengths, RelativeBias, Sink
from .lacking import Rival, importable, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...errors import Reason
    from ...problem import Problem
    from ...scores import Term
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
    # A backward that is captured runs on a graph that is retained, which has to keep its buffers.
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
    # A backward that is captured runs on a graph that is retained, which has to keep its buffers.
    compiler: Any = importlib.import_module("torch._functorch.config")
    compiler.donated_buffer = False
    # One kernel is compiled in one direction: a pool of processes for it would take longer to start.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1
    # Every problem has rules of its own: after a few of them torch.compile would give up on this function.
    torch.compiler.reset()
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    if (score := score_rule(problem, inputs)) is not None:
        options["score_mod"] = score
    if "table" in problem.operand_grads:
        # With the stages it chooses itself, its backward does not fit into shared memory.
        options["kernel_options"] = {"bwd_num_stages": 1}
    if (visible := mask_rule(problem, inputs)) is not None:
        made = flex.create_block_mask(
            visible, *_own_masks(problem), problem.seq_q, problem.seq_kv, device=str(inputs.q.device)
        )
        # What a bias hides is hidden by the sum already: as a mask it only helps where whole blocks can be skipped.
        if inputs.bias is None or not problem.mask.additive or made.sparsity() > 0:  # type: ignore[attr-defined]
            options["block_mask"] = made
    q, k, v = inputs.q, inputs.k, inputs.v
    if any(isinstance(term, Sink) for term in problem.scores):
        compiled = torch.compile(_with_sink, dynamic=False)
        sink, aux = inputs.terms["sink"], flex.AuxRequest(lse=True)
        return lambda: compiled(flex.flex_attention, sink, q, k, v, return_aux=aux, **options)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, **options)  # type: ignore[no-untyped-call]


def _with_sink(attend: Callable[..., Any], sink: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A logit that joins the sum of every row takes a share of all weights, which the lse tells."""
    out, aux = attend(q, k, v, **options)
    share = torch.sigmoid(aux.lse - sink[:, None])
    joined: Tensor = (out * share.unsqueeze(-1)).to(out.dtype)
    return joined


def _own_masks(problem: Problem) -> tuple[int | None, int | None]:
    """(batch, heads) of the masks that differ; None where all have the same."""
    mask = problem.mask
    batch, heads = ((1, 1, 1, 1, *mask.shape)[-4:-2]) if isinstance(mask, Dense) else (1, 1)
    for term in problem.scores:
        if isinstance(term, KeyLengths):
            batch = problem.batch
        elif isinstance(term, Keep):
            own = term.tensors[0].shape(problem)
            batch, heads = max(batch, own[0]), max(heads, own[1])
    return (batch if batch > 1 else None), (heads if heads > 1 else None)


Rule = Any  # of FlexAttention: a function of positions, and of a score


def score_rule(problem: Problem, inputs: Inputs) -> Rule | None:
    """score_mod: the terms in their order, and a bias as a captured tensor; None where scores stay as they are."""
    rules = [rule for term in problem.scores if (rule := _term_rule(term, problem, inputs)) is not None]
    if inputs.bias is not None and inputs.bias.dtype != torch.bool:
        bias = _reader(inputs.bias)
        rules.append(lambda score, b, h, q, k: score + bias(b, h, q, k))
    if len(rules) < 2:
        return rules[0] if rules else None

    def all_rules(score: Tensor, b: Position, h: Position, q: Position, k: Position) -> Tensor:
        for rule in rules:
            score = rule(score, b, h, q, k)
        return score

    return all_rules


def _term_rule(term: Term, problem: Problem, inputs: Inputs) -> Rule | None:
    """What a term does to a score; None for one that changes none."""
    if isinstance(term, Softcap):
        cap = term.cap
        return lambda score, b, h, q, k: cap * torch.tanh(score / cap)
    if isinstance(term, Alibi):
        slopes, offset = inputs.terms["slopes"].expand(problem.batch, problem.heads_q), problem.seq_kv - problem.seq_q
        return lambda score, b, h, q, k: score - slopes[b, h] * torch.abs(q + offset - k)
    if isinstance(term, RelativeBias):
        table, zero, last = inputs.terms["table"], term.zero, term.span - 1
        if zero >= problem.seq_q - 1 and zero + problem.seq_kv - 1 <= last:  # no distance is beyond its ends
            return lambda score, b, h, q, k: score + table[h, k - q + zero]
        return lambda score, b, h, q, k: score + table[h, torch.clamp(k - q + zero, 0, last)]
    return None


def mask_rule(problem: Problem, inputs: Inputs) -> Rule | None:
    """mask_mod: captured tensors for masks that are data, arithmetic for bands, which compiles to nothing but compares,
    and a table of spans for every other mask; None where nothing is hidden."""
    rules = [rule for term in problem.scores if (rule := _hiding_rule(term, inputs)) is not None]
    if (own := _own_rule(problem, inputs)) is not None:
        rules.insert(0, own)
    if len(rules) < 2:
        return rules[0] if rules else None
    first, second = rules
    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)


def _hiding_rule(term: Term, inputs: Inputs) -> Rule | None:
    if isinstance(term, Keep):
        return _reader(inputs.terms["keep"])
    if isinstance(term, KeyLengths):
        lengths = inputs.terms["key_lengths"]
        if not term.padded_left:
            return lambda b, h, q, k: k < lengths[b]
        first = inputs.k.shape[2] - lengths
        return lambda b, h, q, k: k >= first[b]
    return None


def _own_rule(problem: Problem, inputs: Inputs) -> Rule | None:
    """Of the problem's mask."""
    mask = problem.mask
    if isinstance(mask, Full):
        return None
    if inputs.bias is not None:
        value = _reader(inputs.bias)
        return value if inputs.bias.dtype == torch.bool else lambda b, h, q, k: value(b, h, q, k) > -torch.inf
    if isinstance(mask, Causal | Window):
        left, right, offset = mask.band(problem.seq_q, problem.seq_kv)
        return lambda b, h, q, k: (k - q <= offset + right) & (k - q >= offset - left)
    rows = torch.arange(problem.seq_q, device=inputs.q.device)
    begin, end = mask.spans(rows, problem.seq_q, problem.seq_kv)
    return lambda b, h, q, k: (k >= begin[q]) & (k < end[q])


def _reader(tensor: Tensor) -> Callable[[Position, Position, Position, Position], Tensor]:
    """The element of a tensor that broadcasts to (batch, heads, seq_q, seq_kv). What is the same for all has no
    dimension here: nothing is copied, and its gradient is no larger than it is."""
    sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    own = tensor.reshape([size for size in sizes if size > 1] or [1])
    named = [number for number, size in enumerate(sizes) if size > 1]

    def read(b: Position, h: Position, q: Position, k: Position) -> Tensor:
        position = (b, h, q, k)
        return own[tuple([position[number] for number in named])] if named else own[0 * b]

    return read


FLEX = Rival(
    "torch.nn.attention.flex_attention",
    "upgrade PyTorch",
    _flex_lacks,
    _flex_forward,
    terms=(Alibi, Keep, KeyLengths, RelativeBias, Sink),
)
