"""Inputs in every range of float32, and what errors of float32 kernels are held against.

That is attention in plain float32 operations, the way PyTorch's own float32 kernels work: the scores, and for gradients
also lse and rowsum(dout * out).
"""

from __future__ import annotations

import math

import torch

from support import budget, exact

NAMES = ("dq", "dk", "dv")


def plain(q, k, v, problem):
    """Attention in float32 operations."""
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q @ k.mT * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1).nan_to_num(0.0) @ v


def errors(got, want):
    """Norm-wise over everything, and of the worst row that sees a key."""
    difference = (got.double() - want).norm(dim=-1)
    rows = want.norm(dim=-1)
    return (difference.norm() / rows.norm()).item(), (difference / rows)[rows > 0].max().item()


# Half a unit in the last place of out, and of the sum it is divided by: what no float32 kernel goes below for sure.
FLOOR = 2.0**-23


def assert_as_good_as_plain(out, lse, inputs, problem):
    """`lse` may be None."""
    want, want_lse = exact(*inputs, problem)
    assert not out.isnan().any()
    for ours, theirs in zip(errors(out, want), errors(plain(*inputs, problem), want), strict=True):
        assert ours <= 2 * max(theirs, FLOOR), f"{problem}: {ours:.2e}, plain float32 {theirs:.2e}"
    assert_lse(lse, want_lse)


def assert_lse(lse, want):
    if lse is None:
        return
    seen = want.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[~seen] == -math.inf).all()
    # A maximum, of the order of lse itself, and the logarithm of a sum relative to it.
    assert ((lse.double() - want).abs()[seen] <= budget(torch.float32) * (2 + want[seen].abs())).all()


def spread(low, high, *shape):
    """Powers of ten, their exponents even over [low, high]."""
    generator = torch.Generator().manual_seed(7)
    return 10.0 ** (low + (high - low) * torch.rand(shape, generator=generator))


def with_one(x, value):
    changed = x.clone()
    changed[..., 5, 3] = value
    return changed


SEQ, DIM = 96, 64
EVERY = (1, 1, SEQ, DIM)
RANGES = {
    "q 1e30, k 1e-30": lambda q, k, v: (q * 1e30, k * 1e-30, v),
    "q 1e-30, k 1e30": lambda q, k, v: (q * 1e-30, k * 1e30, v),
    "q and k 1e-30": lambda q, k, v: (q * 1e-30, k * 1e-30, v),
    "v 1e30": lambda q, k, v: (q, k, v * 1e30),
    "v 1e-30": lambda q, k, v: (q, k, v * 1e-30),
    "v near the largest number": lambda q, k, v: (q, k, v * 5e37),
    "denormal v": lambda q, k, v: (q, k, v * 1e-40),
    "denormal q": lambda q, k, v: (q * 1e-40, k * 1e37, v),
    "mixed within rows": lambda q, k, v: (q * spread(-6, 0, *EVERY), k * spread(-6, 0, *EVERY), v),
    "mixed within rows of v": lambda q, k, v: (q, k, v * spread(-6, 0, *EVERY)),
    "rows of v 1e-30 to 1e30": lambda q, k, v: (q, k, v * spread(-30, 30, 1, 1, SEQ, 1)),
    "columns of v 1e-12 to 1e12": lambda q, k, v: (q, k, v * spread(-12, 12, 1, 1, 1, DIM)),
    "columns of q against k": lambda q, k, v: (q * spread(-6, 6, DIM), k / spread(-6, 6, DIM), v),
    "an outlier in q": lambda q, k, v: (with_one(q, 1e6), k, v),
    "an outlier in k": lambda q, k, v: (q, with_one(k, 1e6), v),
    "a large outlier in v": lambda q, k, v: (q, k, with_one(v, 1e10)),
    "a small outlier in v": lambda q, k, v: (q, k, with_one(v, 1e4)),
    "scores of 1e3": lambda q, k, v: (q * 30, k * 30, v),
    "scores of 1e4": lambda q, k, v: (q * 100, k * 100, v),
    "scores of 1e11": lambda q, k, v: (with_one(q, 1e8), k * 1e3, v),
    "half of the values 0": lambda q, k, v: (q, k, v * (torch.arange(SEQ) % 2)[:, None]),
    "all values 0": lambda q, k, v: (q, k, v * 0),
    "constant": lambda q, k, v: tuple(torch.full_like(x, 0.1) for x in (q, k, v)),
    "positive values": lambda q, k, v: (q, k, v.abs()),
}


def plain_grads(q, k, v, dout, problem, dlse=None, *, magnitudes=False):
    """Gradients in float32 operations; or in float64 what they would be if nothing ever cancelled."""
    if magnitudes:
        q, k, v, dout = (t.double() for t in (q, k, v, dout))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    scores, slope = q @ k.mT * problem.scale, 1.0
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * bent, 1 - bent * bent
    scores = scores.masked_fill(~visible.to(q.device), -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf))
    if magnitudes:
        q, k, v, dout = (t.abs() for t in (q, k, v, dout))
    terms = (dout * (p @ v)).sum(-1, keepdim=True)
    if dlse is not None:
        terms = terms - dlse.unsqueeze(-1)
    products = dout @ v.mT
    ds = p * (products + terms if magnitudes else products - terms) * slope
    summed = lambda t: t.unflatten(1, (problem.heads_kv, problem.group)).sum(2)
    return ds @ k * abs(problem.scale), summed(ds.mT @ q) * abs(problem.scale), summed(p.mT @ dout)


def grad_errors(grad, want, terms):
    """Over all, and of the worst row. What cancels has few accurate digits left, and is measured against its terms."""
    difference = (grad.double() - want).norm(dim=-1)
    rows = torch.maximum(want.norm(dim=-1), terms.norm(dim=-1) / 16)
    # Weights below 2^-110 have fewer bits in parts of bf16, and below 2^-126 a GPU's exponential has none: keys that no
    # query gives more are measured against that.
    rows = rows.clamp(min=max(2.0**-126, 2.0**-110 * rows.max().item()))
    whole = max(want.norm().item(), terms.norm().item() / 64, 2.0**-126)
    return difference.norm().item() / whole, (difference / rows).max().item()


def assert_grads_as_good_as(theirs, got, truth, magnitudes, what, times=2.0):
    """At most `times` their error, over all; in the worst row, which is one sample of many, twice that."""
    for name, grad, other, want, terms in zip(NAMES, got, theirs, truth, magnitudes, strict=True):
        assert grad.isfinite().all(), f"{what}: {name}"
        ours, plain = grad_errors(grad, want, terms), grad_errors(other, want, terms)
        assert ours[0] <= times * max(plain[0], FLOOR), f"{what}: {name} {ours[0]:.2e}, theirs {plain[0]:.2e}"
        assert ours[1] <= 2 * times * max(plain[1], FLOOR), f"{what}: row of {name} {ours[1]:.2e}, {plain[1]:.2e}"


def assert_grads_as_good_as_plain(grads, inputs, dout, problem):
    _, _, *truth = exact(*inputs, problem, None, dout)
    magnitudes = plain_grads(*inputs, dout, problem, magnitudes=True)
    assert_grads_as_good_as(plain_grads(*inputs, dout, problem), grads, truth, magnitudes, str(problem))


STEP = torch.where(torch.arange(SEQ) < 64, 1e-30, 1e25)
WIDE = {name: lambda q, k, v, dout, change=change: (*change(q, k, v), dout) for name, change in RANGES.items()}
# Where the gradients themselves overflow, or are 0 but for noise.
del WIDE["v near the largest number"], WIDE["constant"], WIDE["scores of 1e11"]
WIDE |= {
    "dout 1e-30": lambda q, k, v, dout: (q, k, v, dout * 1e-30),
    "dout 1e30": lambda q, k, v, dout: (q, k, v, dout * 1e30),
    "dout 1e-30, v 1e30": lambda q, k, v, dout: (q, k, v * 1e30, dout * 1e-30),
    "dout 1e30, v 1e-30": lambda q, k, v, dout: (q, k, v * 1e-30, dout * 1e30),
    "dout and v 1e-17": lambda q, k, v, dout: (q, k, v * 1e-17, dout * 1e-17),
    "dout and v 1e18": lambda q, k, v, dout: (q, k, v * 1e18, dout * 1e18),
    "denormal dout": lambda q, k, v, dout: (q, k, v * 1e20, dout * 1e-40),
    "rows of dout 1e-30 to 1e5": lambda q, k, v, dout: (q, k, v, dout * spread(-30, 5, 1, 1, SEQ, 1)),
    "rows of dout 0": lambda q, k, v, dout: (q, k, v, dout * (torch.arange(SEQ) % 2)[:, None]),
    "an outlier in dout": lambda q, k, v, dout: (q, k, v, with_one(dout, 1e10)),
    "columns of dout against v": lambda q, k, v, dout: (q, k, v / spread(-6, 6, DIM), dout * spread(-6, 6, DIM)),
    "rows of q 1e-12 to 1": lambda q, k, v, dout: (q * spread(-12, 0, 1, 1, SEQ, 1), k, v, dout),
    "rows of k 1e-12 to 1": lambda q, k, v, dout: (q, k * spread(-12, 0, 1, 1, SEQ, 1), v, dout),
    "v 1e-30, then 1e25": lambda q, k, v, dout: (q, k, v * STEP[:, None], dout),
}  # fmt: skip
