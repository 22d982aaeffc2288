"""Accuracy: float64 truth, the errors of a candidate against it, and the budget those errors must keep.

Truth is the reference backend on the inputs widened to float64. Where that would cost too much, a random sample of
heads and rows is computed and compared, and the result says so; that nothing is nan or infinite is checked in full.

Two errors are kept for each tensor, because a good norm can hide one bad row:

    norm       |got - true| / |true|, over everything compared
    worst_row  the largest |got_row - true_row| / max(|true_row|, rms), rms being that of the rows' norms: where terms
               cancel, as in the gradient of a row with one key, the error is in proportion to the terms, not the sum

The gradient of an operand (a bias, a table) is compared whole, for the heads of the sample; of a bias some rows.

Under dropout there is no one right answer. Truth is that without it, the errors are those that dropping weights makes,
and the backward must have dropped what the forward did: `dropout_excess`, `dropout_mismatch`.

The budget is derived from the same inputs: twice the error of the plain computation, which rounds scores, weights,
result and every step of the backward to the problem's dtype, plus the rounding of the sums: 4 eps sqrt(terms), with the
eps of the type that sums (float32 for 16-bit inputs). A kernel with float32 scores and sums stays well inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ...masks import Dense, Documents, Full
from ...operands import SCORE_DIMS
from ...plain import reference
from ...problem import mask_operands
from ...scores import Softcap, Where, join_all, keep_all, visible_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...problem import Problem
    from ..candidates.inputs import Inputs

Tensor = torch.Tensor
Tensors = dict[str, Tensor]  # out, lse, dq, dk, dv: (groups, heads or 1, rows, dim); gradients of operands as they are
Errors = dict[str, dict[str, float]]  # tensor name -> {norm, worst_row}

_OF_GROUPS = ("out", "lse", "dq", "dk", "dv")  # what every pair of a batch and a head has of its own
_CHANCE = 0.3  # by which a relative error under dropout may differ from what is expected
_LINEAR = 0.05  # far above the rounding of 16 bits, and far below what other weights would make
_GROUPS_WANTED = 8
_ROWS_WANTED = 64
_FLOPS_AFFORDED = {"cpu": 2e10, "cuda": 1e12}
_ELEMENTS_AFFORDED = 2**21  # of a tensor that is compared: truth travels to every candidate's process
_SCORES_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a problem that is compared: pairs (batch, key/value head) with their query heads, and query rows."""

    groups: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    text: str


def choose(problem: Problem, seed: int, device: str) -> Sample:
    """Everything if affordable, else random heads: with all their rows where gradients need them, else random rows."""
    groups = [(batch, head) for batch in range(problem.batch) for head in range(problem.heads_kv)]
    rows = range(problem.seq_q)
    share = _share_afforded(problem, device)
    if _is_whole_by_head(problem):
        return _whole_heads(problem, seed, share)
    if share >= 1.0 or not groups:
        return Sample(tuple(groups), tuple(rows), "every element")
    generator = torch.Generator().manual_seed(seed)
    fitting = int(share * len(groups))
    count = min(len(groups), fitting if problem.needs_grad else max(fitting, _GROUPS_WANTED))
    order = torch.randperm(len(groups), generator=generator)[: max(1, count)].tolist()
    chosen_rows = tuple(rows)
    if not problem.needs_grad and count > fitting:
        wanted = min(len(rows), max(_ROWS_WANTED, int(share * len(groups) / count * len(rows))))
        drawn = torch.randperm(len(rows), generator=generator)[:wanted].tolist()
        chosen_rows = tuple(sorted({*drawn, *_last_rows(problem)}))
    heads = f"{len(order) * problem.group} of {problem.batch * problem.heads_q} heads"
    return Sample(
        tuple(groups[index] for index in order),
        chosen_rows,
        f"a random sample: {heads}, {len(chosen_rows)} of {problem.seq_q} rows",
    )


def _last_rows(problem: Problem) -> list[int]:
    """One of every document: a random sample may have none of a short one."""
    mask = problem.mask
    if not isinstance(mask, Documents):
        return []
    return [end - 1 for start, end in pairwise(mask.cu_seqlens_q) if end > start]


def _is_whole_by_head(problem: Problem) -> bool:
    """Terms look at where a score stands, and gradients of operands are sums over rows and batches: both are right for
    a head with all of its rows and batches alone."""
    return bool(problem.operand_grads) or any(not isinstance(term, Softcap) for term in problem.scores)


def _whole_heads(problem: Problem, seed: int, share: float) -> Sample:
    """All batches and rows of some heads; of all heads where a gradient is a sum over them."""
    order = torch.randperm(problem.heads_kv, generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(1, min(len(order), int(share * len(order))))
    if any("head" not in dims or "head" in over for dims, over in _dims_of_learned(problem)):
        count = len(order)
    groups = tuple((batch, head) for head in sorted(order[:count]) for batch in range(problem.batch))
    whole = count == len(order)
    text = "every element" if whole else f"a random sample: {count * problem.group} of {problem.heads_q} heads, whole"
    return Sample(groups, tuple(range(problem.seq_q)), text)


def _dims_of_learned(problem: Problem) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(dimensions, those broadcast over) of the operands whose gradients are wanted; of a mask, all of the scores'."""
    found = []
    for operand in problem.operands:
        if operand.name not in problem.operand_grads:
            continue
        over = operand.over
        if isinstance(problem.mask, Dense) and not operand.dims:
            sizes = (1,) * (4 - len(problem.mask.shape)) + problem.mask.shape
            full = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
            over = tuple(dim for dim, size, most in zip(SCORE_DIMS, sizes, full, strict=True) if size < most)
        found.append((operand.dims or SCORE_DIMS, over))
    return found


def _share_afforded(problem: Problem, device: str) -> float:
    """Of the whole problem: by the arithmetic of its truth, which computes hidden pairs too, and by the size of what is
    compared."""
    afforded = _FLOPS_AFFORDED["cuda" if device.startswith("cuda") else "cpu"]
    rows = problem.batch * problem.heads_q * problem.seq_q
    visible = problem.flops() + (problem.flops(backward=True) if problem.needs_grad else 0)
    cost = visible * rows * problem.seq_kv // max(problem.pairs(), 1)
    elements = rows * max(problem.head_dim, problem.head_dim_v)
    return min(afforded / max(cost, 1), _ELEMENTS_AFFORDED / max(elements, 1))


def truth(inputs: Inputs, problem: Problem, sample: Sample) -> Tensors:
    """Float64 results at the sample, by the reference backend, in chunks of rows."""
    if _is_whole_by_head(problem):
        return _over_heads(inputs, problem, sample, torch.float64, _exact_head)
    return _over_sample(inputs, problem, sample, torch.float64, _exact_part)


def plain(inputs: Inputs, problem: Problem, sample: Sample) -> Tensors:
    """The results of the plain computation in the problem's own precision."""
    work = torch.float64 if problem.dtype == torch.float64 else torch.float32
    if _is_whole_by_head(problem):
        return _over_heads(inputs, problem, sample, work, _plain_head)
    return _over_sample(inputs, problem, sample, work, _plain_part)


def select(results: Tensors, problem: Problem, sample: Sample) -> Tensors:
    """A candidate's full results, cut down to the sample and shaped like `truth`."""
    group, rows = problem.group, torch.tensor(sample.rows, dtype=torch.int64)
    picked: Tensors = {}
    for name, result in results.items():
        tensor = result.detach().unsqueeze(-1) if name == "lse" else result.detach()
        if name not in _OF_GROUPS:
            heads = sorted({head for _, head in sample.groups})
            parts = [_thinned(part_of_head(tensor, name[1:], problem, head), name[1:], problem) for head in heads]
        elif name in ("dk", "dv"):
            parts = [tensor[batch, head : head + 1] for batch, head in sample.groups]
        else:
            at = rows.to(tensor.device)
            parts = [tensor[batch, head * group : (head + 1) * group][:, at] for batch, head in sample.groups]
        picked[name] = torch.stack(parts) if parts else tensor[:0]
    return picked


def errors(got: Tensors, want: Tensors) -> Errors:
    """The two errors of every tensor. nan where something is nan, or where infinities differ."""
    return {name: _errors(got[name].double(), want[name].double(), name == "lse") for name in got}


def budgets(plain_errors: Errors, problem: Problem) -> Errors:
    """The largest errors that count as right: 2 x the plain computation's + 4 eps sqrt(terms) of the sums."""
    eps = torch.finfo(torch.float64 if problem.dtype == torch.float64 else torch.float32).eps
    sums = 4 * eps * math.sqrt(max(problem.seq_kv, problem.seq_q * problem.group, 1))
    # Few numbers, sums of many that cancel: the plain computation may be right by chance.
    learned = 4 * torch.finfo(problem.dtype).eps
    allowed = {name: sums if name in _OF_GROUPS else sums + learned for name in plain_errors}
    return {
        name: {kind: 2 * value + allowed[name] for kind, value in by_kind.items()}
        for name, by_kind in plain_errors.items()
    }


def excess(found: Errors, allowed: Errors) -> list[str]:
    """What breaks its budget, in words; empty = right. A nan breaks every budget."""
    return [
        f"{name} {kind} error {value:.2e}, budget {allowed[name][kind]:.2e}"
        for name, by_kind in found.items()
        for kind, value in by_kind.items()
        if not value <= allowed[name][kind]
    ]


def dropout_excess(found: Errors, problem: Problem) -> list[str]:
    """What of a call with dropout does not look as it should against the results without it; in words.

    Weights are kept or not, each by itself, and values are normal numbers: of out and of every gradient the error, by
    norm, is sqrt(p / (1 - p)) of it, as far as chance goes.
    """
    usual = math.sqrt(problem.dropout / (1.0 - problem.dropout))
    return [
        f"{name} differs by {by_kind['norm']:.2f} from that without dropout, expected about {usual:.2f}"
        for name, by_kind in found.items()
        if not abs(by_kind["norm"] / usual - 1.0) <= _CHANCE
    ]


def dropout_mismatch(results: Tensors, v: Tensor, dout: Tensor) -> list[str]:
    """The backward drops what the forward dropped if and only if <dv, v> = <dout, out>: out is linear in v."""
    if "dv" not in results:
        return []
    there = (results["out"].detach().double() * dout.double()).sum((1, 2, 3))
    back = (results["dv"].detach().double() * v.detach().double()).sum((1, 2, 3))
    off = ((there - back).norm() / there.norm()).item()
    return [] if off <= _LINEAR else [f"the backward drops other weights than the forward: off by {off:.2f}"]


def _errors(got: Tensor, want: Tensor, is_lse: bool) -> dict[str, float]:
    if got.shape != want.shape:
        return {"norm": math.inf, "worst_row": math.inf}
    infinite = want.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        return {"norm": math.nan, "worst_row": math.nan}
    got, want = got.masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
    if want.numel() == 0:
        return {"norm": 0.0, "worst_row": 0.0}
    row_error, row_size = (got - want).norm(dim=-1), want.norm(dim=-1)
    rms = row_size.square().mean().sqrt().item()
    if rms == 0.0:
        same = 0.0 if bool((row_error == 0).all()) else math.nan if bool(row_error.isnan().any()) else math.inf
        return {"norm": same, "worst_row": same}
    floor = 1.0 if is_lse else rms  # an lse is a logarithm: its absolute error is what reaches the weights
    norm = row_error.square().mean().sqrt().item() / rms
    return {"norm": norm, "worst_row": (row_error / row_size.clamp_min(floor)).max().item()}


def _over_sample(inputs: Inputs, problem: Problem, sample: Sample, work: torch.dtype, part: Any) -> Tensors:
    """`part` over bunches of groups and chunks of rows, put together: rows joined, gradients of k and v summed."""
    at_once = _SCORES_AT_ONCE[inputs.q.device.type] // max(1, problem.group * problem.seq_kv)  # rows of all groups
    bunch = max(1, at_once // max(1, len(sample.rows)))
    bunches = [sample.groups[start : start + bunch] for start in range(0, len(sample.groups), bunch)]
    found: dict[str, list[Tensor]] = {}  # a bunch each
    for bunch_of_groups in bunches:
        rows: dict[str, list[Tensor]] = {}
        for chunk in _parts(inputs, problem, sample, bunch_of_groups, at_once, work, part):
            for name, tensor in chunk.items():
                if name in ("dk", "dv") and name in rows:
                    rows[name][0] += tensor  # as large as k and v, however many chunks there are
                else:
                    rows.setdefault(name, []).append(tensor)
        for name, tensors in rows.items():
            found.setdefault(name, []).append(torch.cat(tensors, 2))
    results = {name: torch.cat(tensors) for name, tensors in found.items()}
    if "lse" in results:
        results["lse"] = results["lse"].unsqueeze(-1)
    if part is _plain_part:
        results = {name: t if name == "lse" else t.to(problem.dtype) for name, t in results.items()}
    return results


def _parts(
    inputs: Inputs,
    problem: Problem,
    sample: Sample,
    groups: tuple[tuple[int, int], ...],
    at_once: int,
    work: torch.dtype,
    part: Any,
) -> Iterator[Tensors]:
    """The groups side by side as the batches of one problem, in chunks of rows."""
    batches, heads = (torch.tensor(index, device=inputs.q.device) for index in zip(*groups, strict=True))
    queries = heads[:, None] * problem.group + torch.arange(problem.group, device=heads.device)
    k, v = (tensor.detach()[batches, heads].unsqueeze(1).to(work) for tensor in (inputs.k, inputs.v))
    rows = torch.tensor(sample.rows, dtype=torch.int64, device=k.device)
    for chunk in rows.split(max(1, at_once // len(groups))):
        q, dout = (t.detach()[batches[:, None], queries][:, :, chunk].to(work) for t in (inputs.q, inputs.dout))
        bias = _bias(inputs, problem, batches, queries, chunk)
        mask = Full() if bias is None else Dense(tuple(bias.shape), bias.dtype != torch.bool)
        small = problem.with_(
            batch=len(groups),
            heads_q=problem.group,
            heads_kv=1,
            seq_q=len(chunk),
            dtype=work,
            mask=mask,
            layout="bhsd",
        )
        yield part(q, k, v, dout, small, bias, problem)


def _bias(inputs: Inputs, problem: Problem, batches: Tensor, queries: Tensor, rows: Tensor) -> Tensor | None:
    """The mask of these rows as a tensor (groups or 1, query heads or 1, rows, seq_kv)."""
    if isinstance(problem.mask, Full):
        return None
    if inputs.bias is not None:
        full = inputs.bias.expand(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
        return full[batches[:, None], queries][:, :, rows]
    begin, end = problem.mask.spans(rows, problem.seq_q, problem.seq_kv)
    keys = torch.arange(problem.seq_kv, device=rows.device)
    return ((keys >= begin[:, None]) & (keys < end[:, None]))[None, None]


def _exact_part(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, small: Problem, bias: Tensor | None, problem: Problem
) -> Tensors:
    out, lse = reference.forward(q, k, v, small, None, mask_operands(bias))
    results = {"out": out, "lse": lse}
    if problem.needs_grad:
        grads = reference.backward(dout, None, q, k, v, out, lse, small, None, mask_operands(bias))
        dq, dk, dv = grads["q"], grads["k"], grads["v"]
        results |= {"dq": dq, "dk": dk, "dv": dv}
    return results


def _plain_part(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, small: Problem, bias: Tensor | None, problem: Problem
) -> Tensors:
    """Attention as one would type it in the problem's dtype: every intermediate is rounded to it, sums are not.

    The rounding is emulated on wider tensors, so that no low-precision matrix product runs here.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(problem.dtype).to(q.dtype)

    scores = rounded(q @ k.transpose(-1, -2) * problem.scale)
    slope = 1.0
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = rounded(problem.softcap * bent), 1.0 - bent * bent  # type: ignore[assignment]
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else rounded(scores + bias)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = rounded(torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)))
    out = rounded(weights @ v)
    results = {"out": out, "lse": lse}
    if problem.needs_grad:
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = rounded(weights * (rounded(dout @ v.transpose(-1, -2)) - delta) * slope)
        dq = dscores @ k * problem.scale
        dk = (dscores.transpose(-1, -2) @ q).sum(1, keepdim=True) * problem.scale
        dv = (weights.transpose(-1, -2) @ dout).sum(1, keepdim=True)
        results |= {"dq": dq, "dk": dk, "dv": dv}
    return results


# --- heads with all of their batches and rows, for terms


def part_of_head(tensor: Tensor, operand: str, problem: Problem, head: int, batch: int | None = None) -> Tensor:
    """What belongs to the query heads of a key/value head, and to a batch, of a tensor that the scores read."""
    dims = next(one.dims or SCORE_DIMS for one in problem.operands if one.name == operand)
    missing = len(dims) - tensor.ndim
    wanted = {"head": (head * problem.group, problem.group)} | ({} if batch is None else {"batch": (batch, 1)})
    for dim, (first, count) in wanted.items():
        at = dims.index(dim) - missing if dim in dims else -1
        if at >= 0 and tensor.shape[at] > 1:
            tensor = tensor.narrow(at, first, count)
    return tensor


def _thinned(gradient: Tensor, operand: str, problem: Problem) -> Tensor:
    """Some rows of what has as many as the scores: truth travels to every candidate's process."""
    dims = next(one.dims or SCORE_DIMS for one in problem.operands if one.name == operand)
    at = dims.index("row") - (len(dims) - gradient.ndim) if "row" in dims else -1
    if at < 0 or gradient.shape[at] <= _ROWS_WANTED:
        return gradient
    return gradient[(slice(None),) * at + (slice(None, None, gradient.shape[at] // _ROWS_WANTED),)]


def _over_heads(inputs: Inputs, problem: Problem, sample: Sample, work: torch.dtype, forward: Any) -> Tensors:
    """`forward` and what autograd makes of it, batch by batch; gradients of operands are summed over batches."""
    by_name: dict[str, list[Tensor]] = {}
    for head in sorted({head for _, head in sample.groups}):
        learned = {
            name: part_of_head(inputs.operands[name].detach(), name, problem, head).to(work).requires_grad_()
            for name in problem.operand_grads
        }
        sums = {name: torch.zeros_like(tensor) for name, tensor in learned.items()}
        for batch in range(problem.batch):
            found, grads = _batch_of_head(inputs, problem, head, batch, learned, work, forward)
            for name, tensor in found.items():
                by_name.setdefault(name, []).append(tensor)
            for name, tensor in grads.items():
                sums[name] += tensor
        for name, tensor in sums.items():
            by_name.setdefault(f"d{name}", []).append(_thinned(tensor, name, problem))
    results = {name: torch.stack(parts) for name, parts in by_name.items()}
    if work == torch.float64 and problem.dtype != torch.float64:
        return results
    own = {f"d{name}": inputs.operands[name].dtype for name in problem.operand_grads}
    return {name: t if name == "lse" else t.to(own.get(name, problem.dtype)) for name, t in results.items()}


def _batch_of_head(
    inputs: Inputs,
    problem: Problem,
    head: int,
    batch: int,
    learned: Tensors,
    work: torch.dtype,
    forward: Any,
) -> tuple[Tensors, Tensors]:
    """Results, shaped as `select` does, and the gradients of what is learned."""
    first, count = head * problem.group, problem.group
    k, v = (tensor.detach()[batch, head][None, None].to(work).requires_grad_() for tensor in (inputs.k, inputs.v))
    q = inputs.q.detach()[batch, first : first + count][None].to(work).requires_grad_()
    dout = inputs.dout[batch, first : first + count][None].to(work)
    given = {}
    with torch.enable_grad():  # a part of what is learned is differentiated too
        for name, tensor in inputs.operands.items():
            own = learned[name] if name in learned else tensor.detach()
            # The heads are cut already of what is learned: its only group is the first.
            part = part_of_head(own, name, problem, 0 if name in learned else head, batch)
            given[name] = part.to(work) if part.is_floating_point() else part
        mask = problem.mask
        if isinstance(mask, Dense):
            assert inputs.bias is not None
            mask = Dense(tuple(given["bias" if mask.additive else "keep"].shape), mask.additive)
        small = problem.with_(batch=1, heads_q=count, heads_kv=1, dtype=work, mask=mask, layout="bhsd")
        out, lse = forward(q, k, v, small, given, problem.dtype)
    results = {"out": out.detach()[0], "lse": lse.detach()[0].unsqueeze(-1)}
    if not problem.needs_grad:
        return results, {}
    wanted = {"dq": q, "dk": k, "dv": v, **learned}
    grads = dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout), strict=True))
    results |= {name: grads.pop(name)[0] for name in ("dq", "dk", "dv")}
    return results, grads


def _exact_head(
    q: Tensor, k: Tensor, v: Tensor, small: Problem, operands: Tensors, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return reference.forward(q, k, v, small, None, operands)


def _plain_head(
    q: Tensor, k: Tensor, v: Tensor, small: Problem, operands: Tensors, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `_plain_part`, with terms; autograd rounds the gradients of what is rounded, and derives the terms."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).to(q.dtype)

    where = Where(small, range(small.seq_q), range(small.seq_kv), operands=operands)
    scores = rounded(q @ k.transpose(-1, -2) * small.scale)
    for term in small.scores:
        if term.transforms:
            scores = rounded(term.apply(scores, where)[0])
    shown = visible_all(where)
    if isinstance(small.mask, Dense) and small.mask.additive:
        scores = rounded(scores + operands["bias"])
    else:
        visible = operands["keep"] if isinstance(small.mask, Dense) else _visible(small, q.device)
        shown = visible if shown is None else shown & visible
    if shown is not None:
        scores = scores.masked_fill(~shown, -torch.inf)
    logits = [logit.expand(*scores.shape[:-1], 1) for logit in join_all(where, scores.dtype)]
    joined = torch.cat([scores, *logits], -1)
    kept = keep_all(where, scores.dtype)
    return _Weigh.apply(joined, v, kept, dtype), torch.logsumexp(joined.detach(), -1)  # type: ignore[no-untyped-call]


class _Weigh(torch.autograd.Function):
    """softmax(scores) @ v with every step rounded; scores past the values' rows only take part in the softmax.

    Its backward subtracts the product of `dout` with the rounded `out`, as fused kernels do: where few keys are visible
    that rounding is most of the error, and a softmax that is derived from its weights has none of it.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
        lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)).to(dtype).to(v.dtype)
        used = weights[..., : v.shape[-2]]
        out = ((used if kept is None else used * kept) @ v).to(dtype).to(v.dtype)
        ctx.save_for_backward(weights, v, kept, out)
        ctx.dtype = dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weights, v, kept, out = ctx.saved_tensors
        keys = v.shape[-2]
        dweights = (dout @ v.transpose(-1, -2)).to(ctx.dtype).to(v.dtype)
        used = weights[..., :keys]
        if kept is not None:
            dweights, used = dweights * kept, used * kept
        dweights = torch.nn.functional.pad(dweights, (0, weights.shape[-1] - keys))
        dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True))
        dv = (used.transpose(-1, -2) @ dout).sum(1, keepdim=True)
        return dscores.to(ctx.dtype).to(v.dtype), dv, None, None


def _visible(problem: Problem, device: torch.device) -> Tensor:
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    return problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, device)
