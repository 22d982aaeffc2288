"""Accuracy: float64 truth, the errors of a candidate against it, and the budget those errors must keep.

Truth is the reference backend on the inputs widened to float64. Where that would cost too much, a random sample of
heads and rows is computed and compared, and the result says so; that nothing is nan or infinite is checked in full.

Two errors are kept for each tensor, because a good norm can hide one bad row:

    norm       |got - true| / |true|, over everything compared
    worst_row  the largest |got_row - true_row| / max(|true_row|, rms), rms being that of the rows' norms: where terms
               cancel, as in the gradient of a row with one key, the error is in proportion to the terms, not the sum

The budget is derived from the same inputs: twice the error of the plain computation, which rounds scores, weights,
result and every step of the backward to the problem's dtype, plus the rounding of the sums: 4 eps sqrt(terms), with the
eps of the type that sums (float32 for 16-bit inputs). A kernel with float32 scores and sums stays well inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...masks import Dense, Full
from ...plain import reference
from ...problem import mask_operands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...problem import Problem
    from ..candidates.inputs import Inputs

Tensor = torch.Tensor
Tensors = dict[str, Tensor]  # out, lse, dq, dk, dv: (groups, heads or 1, rows, dim)
Errors = dict[str, dict[str, float]]  # tensor name -> {norm, worst_row}

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
    if share >= 1.0 or not groups:
        return Sample(tuple(groups), tuple(rows), "every element")
    generator = torch.Generator().manual_seed(seed)
    fitting = int(share * len(groups))
    count = min(len(groups), fitting if problem.needs_grad else max(fitting, _GROUPS_WANTED))
    order = torch.randperm(len(groups), generator=generator)[: max(1, count)].tolist()
    chosen_rows = tuple(rows)
    if not problem.needs_grad and count > fitting:
        wanted = min(len(rows), max(_ROWS_WANTED, int(share * len(groups) / count * len(rows))))
        chosen_rows = tuple(sorted(torch.randperm(len(rows), generator=generator)[:wanted].tolist()))
    heads = f"{len(order) * problem.group} of {problem.batch * problem.heads_q} heads"
    return Sample(
        tuple(groups[index] for index in order),
        chosen_rows,
        f"a random sample: {heads}, {len(chosen_rows)} of {problem.seq_q} rows",
    )


def _share_afforded(problem: Problem, device: str) -> float:
    """Of the whole problem: by the arithmetic of its truth, and by the size of what is compared."""
    afforded = _FLOPS_AFFORDED["cuda" if device.startswith("cuda") else "cpu"]
    cost = problem.flops() + (problem.flops(backward=True) if problem.needs_grad else 0)
    elements = problem.batch * problem.heads_q * problem.seq_q * max(problem.head_dim, problem.head_dim_v)
    return min(afforded / max(cost, 1), _ELEMENTS_AFFORDED / max(elements, 1))


def truth(inputs: Inputs, problem: Problem, sample: Sample) -> Tensors:
    """Float64 results at the sample, by the reference backend, in chunks of rows."""
    return _over_sample(inputs, problem, sample, torch.float64, _exact_part)


def plain(inputs: Inputs, problem: Problem, sample: Sample) -> Tensors:
    """The same by the plain computation in the problem's own precision."""
    work = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return _over_sample(inputs, problem, sample, work, _plain_part)


def select(results: Tensors, problem: Problem, sample: Sample) -> Tensors:
    """A candidate's full results, cut down to the sample and shaped like `truth`."""
    group, rows = problem.group, torch.tensor(sample.rows, dtype=torch.int64)
    picked: Tensors = {}
    for name, result in results.items():
        tensor = result.detach().unsqueeze(-1) if name == "lse" else result.detach()
        if name in ("dk", "dv"):
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
    return {name: {kind: 2 * value + sums for kind, value in by_kind.items()} for name, by_kind in plain_errors.items()}


def excess(found: Errors, allowed: Errors) -> list[str]:
    """What breaks its budget, in words; empty = right. A nan breaks every budget."""
    return [
        f"{name} {kind} error {value:.2e}, budget {allowed[name][kind]:.2e}"
        for name, by_kind in found.items()
        for kind, value in by_kind.items()
        if not value <= allowed[name][kind]
    ]


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
    by_bunch = [list(_parts(inputs, problem, sample, groups, at_once, work, part)) for groups in bunches]
    results: Tensors = {}
    for name in by_bunch[0][0] if by_bunch and by_bunch[0] else ():
        of_bunches = [[chunk[name] for chunk in chunks] for chunks in by_bunch]
        summed = name in ("dk", "dv")
        joined = [torch.stack(parts).sum(0) if summed else torch.cat(parts, 2) for parts in of_bunches]
        results[name] = torch.cat(joined)
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
