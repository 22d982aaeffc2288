"""The float32 forward of Hopper without a GPU: its choices, and its kernels on the model of tests/emulator.

The model rounds as the tensor core does (tests/emulator/tensor_core.h), so errors here are those of the algorithm.
They are held against attention in plain float32 operations, the way PyTorch's own float32 kernels work.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import emulation
from support import budget, exact, make_problem
from tilewise import Causal, Full, InvalidInput, Target, Window
from tilewise.engine import SM90
from tilewise.engine.sm90 import float32_forward as sm90_float32
from tilewise.problem import Strides

H200 = Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]
emulated = emulation.emulated


# ---------------------------------------------------------------------------------------------------------------------
# choices


@pytest.mark.parametrize("precision", ["exact", "tf32"])
@pytest.mark.parametrize("dims", DIMS)
def test_every_problem_has_two_kernels_that_fit(dims, precision):
    problem = make_problem((2, 8, 300, dims[0]), head_dim_v=dims[1], heads_kv=2, precision=precision)
    assert SM90.why_not(problem, H200) == []
    (config,) = SM90.configs(problem, H200)
    assert config.parts == {"exact": 2, "tf32": 1}[precision]
    for chosen in (config, sm90_float32.wide_range(config)):
        budget = BUDGETS[sm90_float32.unit(chosen).label]
        assert chosen.smem_bytes == budget["smem_bytes"] <= H200.smem_per_block
        assert chosen.register_limit == budget["registers"]
        assert chosen.head_dim >= dims[0]
        assert chosen.head_dim_v >= dims[1]


def test_rows_need_not_be_aligned_but_contiguous():
    problem = make_problem((1, 2, 64, 64))
    assert SM90.why_not(problem.with_(strides=Strides.UNALIGNED), H200) == []
    (reason,) = SM90.why_not(problem.with_(strides=Strides.SCATTERED), H200)
    assert "scattered" in reason.what


def test_the_bound_on_exponents_follows_the_scale():
    problem = make_problem((1, 1, 8, 64))
    assert sm90_float32.max_exponents(problem) == 18
    assert sm90_float32.max_exponents(problem.with_(scale=1.0)) == 15
    assert sm90_float32.max_exponents(problem.with_(scale=2.0**-10)) == 25


def test_precision_is_checked():
    with pytest.raises(InvalidInput, match="precision"):
        make_problem((1, 1, 8, 64), torch.bfloat16, precision="tf32")
    with pytest.raises(InvalidInput, match="precision"):
        make_problem((1, 1, 8, 64), precision="fast")


# ---------------------------------------------------------------------------------------------------------------------
# on the model


@pytest.fixture
def on_the_model(monkeypatch):
    def run(q, k, v, problem, seed=0):
        emulation.install(monkeypatch, seed=seed)
        return SM90.bind(q, k, v, problem, None, H200)(q, k, v, None)

    return run


def inputs_of(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim_v),
    )
    return [torch.randn(problem.batch, *shape, generator=generator) for shape in shapes]


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


def assert_as_good_as_plain(got, want, q, k, v, problem):
    assert not got.isnan().any()
    for ours, theirs in zip(errors(got, want), errors(plain(q, k, v, problem), want), strict=True):
        assert ours <= 2 * max(theirs, FLOOR), f"{problem}: {ours:.2e}, plain float32 {theirs:.2e}"


def assert_lse(lse, want):
    seen = want.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[~seen] == -math.inf).all()
    # A maximum, of the order of lse itself, and the logarithm of a sum relative to it.
    assert ((lse.double() - want).abs()[seen] <= budget(torch.float32) * (2 + want[seen].abs())).all()


SHAPES = [
    pytest.param((1, 1, 100, 64), {}, id="d64"),
    pytest.param((1, 1, 150, 64), {"mask": Causal(), "seq_kv": 300}, id="d64 causal"),
    pytest.param((1, 1, 90, 40), {"mask": Window(20, 3), "softcap": 30.0}, id="d40 window softcap"),
    pytest.param((1, 2, 70, 96), {"heads_kv": 1, "seq_kv": 90}, id="d96 grouped"),
    pytest.param((2, 1, 130, 128), {"mask": Causal("bottom-right"), "seq_kv": 160}, id="d128 bottom-right"),
    pytest.param((1, 1, 80, 128), {"mask": Causal("bottom-right"), "seq_kv": 50}, id="rows without keys"),
    pytest.param((1, 1, 70, 192), {"head_dim_v": 128, "mask": Causal()}, id="d192/128"),
    pytest.param((1, 1, 70, 192), {"mask": Window(40, 0)}, id="d192"),
    pytest.param((1, 1, 130, 256), {"mask": Causal()}, id="d256"),
    pytest.param((1, 1, 1, 64), {"seq_kv": 129}, id="one query"),
]


@emulated
@pytest.mark.parametrize("wide", [False, True], ids=["fp16x3", "bf16x6"])
@pytest.mark.parametrize(("shape", "fields"), SHAPES)
def test_both_kernels_are_as_accurate_as_float32(on_the_model, shape, fields, wide):
    problem = make_problem(shape, needs_lse=True, **fields)
    q, k, v = inputs_of(problem)
    if wide:
        q[:, :, ::64, 0] = 1e7  # in every tile, so that fp16 refuses them all
    out, lse = on_the_model(q, k, v, problem, seed=shape[2])
    want, want_lse = exact(q, k, v, problem)
    assert_as_good_as_plain(out, want, q, k, v, problem)
    if not wide:
        assert_lse(lse, want_lse)


@emulated
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim", [64, 192])
def test_no_order_of_events_breaks_it(on_the_model, dim, seed):
    problem = make_problem((1, 1, 192, dim), mask=Causal())
    q, k, v = inputs_of(problem, seed)
    out, _ = on_the_model(q, k, v, problem, seed)
    assert_as_good_as_plain(out, exact(q, k, v, problem)[0], q, k, v, problem)


@emulated
def test_tf32_keeps_eleven_bits(on_the_model):
    problem = make_problem((1, 1, 150, 64), mask=Causal(), precision="tf32")
    q, k, v = inputs_of(problem)
    out, _ = on_the_model(q, k, v, problem)
    whole, _ = errors(out, exact(q, k, v, problem)[0])
    assert 2.0**-14 < whole < 2.0**-10.5


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


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_every_range_is_as_accurate_as_float32(on_the_model, name, mask):
    problem = make_problem(EVERY, mask=mask, needs_lse=True)
    q, k, v = RANGES[name](*inputs_of(problem, seed=3))
    out, _ = on_the_model(q, k, v, problem)
    want, _ = exact(q, k, v, problem)
    if name == "all values 0":
        assert (out == 0).all()
    else:
        assert_as_good_as_plain(out, want, q, k, v, problem)


@emulated
def test_each_column_of_v_is_accurate_by_itself(on_the_model):
    problem = make_problem(EVERY)
    q, k, v = inputs_of(problem)
    v = v * spread(-12, 12, 1, 1, 1, DIM)
    out, _ = on_the_model(q, k, v, problem)
    want, _ = exact(q, k, v, problem)
    assert errors(out.mT, want.mT)[1] <= budget(torch.float32, SEQ)


@emulated
@pytest.mark.parametrize("mask", [Causal(), Window(10, 0)], ids=str)
def test_nan_and_inf_behind_a_mask_do_not_show(on_the_model, mask):
    problem = make_problem((1, 1, 100, 64), mask=mask)
    q, k, v = inputs_of(problem)
    want, _ = exact(q, k, v, problem)
    k[0, 0, 70] = math.nan
    v[0, 0, 70] = math.nan
    v[0, 0, 80, 5] = math.inf
    out, _ = on_the_model(q, k, v, problem)
    hidden = slice(0, 70)
    assert errors(out[:, :, hidden], want[:, :, hidden])[1] <= budget(torch.float32, 100)
    seen = slice(70, 81)
    assert out[:, :, seen].isnan().all()


@emulated
def test_inf_in_v_is_given_back_to_the_rows_that_see_it(on_the_model):
    problem = make_problem((1, 1, 100, 64), mask=Causal())
    q, k, v = inputs_of(problem)
    want, _ = exact(q, k, v, problem)
    v[0, 0, 80, 5] = -math.inf
    out, _ = on_the_model(q, k, v, problem)
    assert (out[0, 0, 80:, 5] == -math.inf).all()
    others = torch.arange(64) != 5
    assert errors(out[..., others], want[..., others])[1] <= budget(torch.float32, 100)
    assert out[0, 0, :80].isfinite().all()


@emulated
def test_rows_may_begin_anywhere(on_the_model):
    problem = make_problem((1, 2, 70, 64), mask=Causal(), layout="bshd", strides=Strides.UNALIGNED)
    stored = [torch.randn(1, 70, 2, 67)[..., 3:].transpose(1, 2) for _ in range(3)]
    out, _ = on_the_model(*stored, problem)
    assert out.transpose(1, 2).is_contiguous()
    assert_as_good_as_plain(out, exact(*stored, problem)[0], *stored, problem)
