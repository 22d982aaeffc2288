"""The float32 kernels of the backend sm80 without a GPU: choices, and the kernels on the model of tests/emulator.

The model rounds as the tensor core does (tests/emulator/sm80/float32_ptx.cuh), so errors here are those of the
algorithm. They are held against attention in plain float32 operations, the way PyTorch's own float32 kernels work.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_backend_sm90_float32 import (
    DIM,
    EVERY,
    FLOOR,
    RANGES,
    SEQ,
    assert_lse,
    errors,
    inputs_of,
    plain,
    spread,
)
from test_backend_sm90_float32_backward import WIDE, assert_grads_as_good_as, like_out, plain_grads

import emulation
from support import budget, exact, in_order, make_problem, wanted
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80
from tilewise.engine.sm80 import float32_backward as sm80_float32_backward
from tilewise.engine.sm80 import shared as sm80_shared
from tilewise.engine.source import COMPILED
from tilewise.lab.studies.search_space import search_space
from tilewise.target import TARGETS

GPUS = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]
A100, ADA, H200 = Target.named("a100"), Target.named("rtx-4090"), Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
DIMS = [(8, 8), (64, 64), (60, 44), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]
emulated = emulation.emulated


def step_of_tensor_core(c, a, b):
    """c + a b^T over eight k, rounded as tests/emulator/tensor_core.h tells; a, b and c are of TF32 and float32."""
    products = a.double()[:, None] * b.double()[None]
    exponents = lambda x: torch.where(x == 0, -400, torch.frexp(x)[1] - 1)
    largest = (exponents(a)[:, None] + exponents(b)[None]).amax(-1).maximum(exponents(c)).double()
    scaled = torch.cat([products, c.double()[..., None]], -1) * 2.0 ** (25 - largest)[..., None]
    exact_sum = scaled.trunc().sum(-1) * 2.0 ** (largest - 25)
    rounded = exact_sum.float()
    return torch.where(rounded.double().abs() > exact_sum.abs(), rounded.nextafter(torch.zeros(())), rounded)


def product_of_torch(a, b):
    """a b^T as CUTLASS's OpMultiplyAddFastF32 makes it: hi is cut off, lo rounded; lo hi + hi lo + hi hi of four steps
    in the tensor core, then added outside."""
    cut = lambda x: (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    near = lambda x: ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    a, b = (torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)) for x in (a, b))
    a_high, b_high = cut(a), cut(b)
    a_low, b_low = near(a - a_high), near(b - b_high)
    total = torch.zeros(len(a), len(b))
    for first in range(0, a.shape[-1], 32):
        sums = torch.zeros_like(total)
        for k in (slice(first + i, first + i + 8) for i in range(0, 32, 8)):
            for x, y in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
                sums = step_of_tensor_core(sums, x[:, k], y[:, k])
        total = total + sums
    return total


def of_torch(q, k, v, problem, dout=None):
    """What PyTorch's efficient kernel makes of one head: out, then with dout the gradients."""
    q, k, v = (x[0, 0] for x in (q, k, v))
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    scores, log2_e = product_of_torch(q, k), torch.tensor(math.log2(math.e))
    exponents = (scores * (problem.scale * log2_e)).masked_fill(~visible, -math.inf)
    most = exponents.amax(-1, keepdim=True)
    p = torch.exp2(exponents - most)
    total = p.sum(-1, keepdim=True)
    out = product_of_torch(p, v.mT.contiguous()) / total
    if dout is None:
        return (out[None, None],)
    dout = dout[0, 0]
    p = torch.exp((scores * problem.scale).masked_fill(~visible, -math.inf) - (most / log2_e + torch.log(total)))
    ds = (product_of_torch(dout, v) - (dout * out).sum(-1, keepdim=True)) * p * problem.scale
    pairs = ((ds, k.mT), (ds.mT, q.mT), (p.mT, dout.mT))
    return tuple(x[None, None] for x in (out, *(product_of_torch(a.contiguous(), b.contiguous()) for a, b in pairs)))


def assert_as_good_as_float32(got, want, q, k, v, problem):
    """At most twice the error of plain float32 operations or, where they have luck, of PyTorch's kernel."""
    assert not got.isnan().any()
    (whole, row), (their_whole, their_row) = errors(got, want), errors(plain(q, k, v, problem), want)
    # One row is one sample: two float32 computations differ by chance alone.
    if whole <= 2 * max(their_whole, FLOOR) and row <= 4 * max(their_row, FLOOR):
        return
    assert problem.batch * problem.heads_q == 1, f"{problem}: {whole:.2e}, plain float32 {their_whole:.2e}"
    torch_whole, torch_row = errors(of_torch(q, k, v, problem)[0], want)
    assert whole <= 2 * min(torch_whole, 4 * their_whole), f"{problem}: {whole:.2e}, PyTorch {torch_whole:.2e}"
    assert row <= 4 * min(torch_row, 4 * their_row), f"{problem}: worst row {row:.2e}, PyTorch {torch_row:.2e}"


# ---------------------------------------------------------------------------------------------------------------------
# choices


def twin_of(target):
    """The target with as much shared memory whose kernels tests compile."""
    return next(twin for twin in COMPILED if twin.smem_per_block == target.smem_per_block)


def built_for(twin, config):
    """The config as it is compiled for its twin: gradients are added up as that can, which changes nothing else."""
    if not hasattr(config, "vector_sums"):
        return config
    return replace(config, vector_sums=twin.capability >= sm80_shared.VECTOR_SUMS_FROM)


def fits(config, target):
    """Independent of `Config.fits`: what the hardware gives a block, and all blocks of a multiprocessor together."""
    together = config.ctas_per_sm * (config.smem_bytes + 1024)
    return config.smem_bytes <= target.smem_per_block and together <= target.smem_per_sm


@pytest.mark.parametrize("precision", ["exact", "tf32"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("name", GPUS)
def test_every_problem_it_takes_has_configs_that_fit_and_are_compiled_in_ci(name, softcap, precision):
    target = Target.named(name)
    for dims in DIMS:
        fields = {"head_dim_v": dims[1], "heads_kv": 2, "softcap": softcap, "precision": precision}
        problem = make_problem((2, 8, 300, dims[0]), **fields)
        assert SM80.why_not(problem, target) == []
        configs = SM80.configs(problem, target)
        assert configs
        if max(dims) <= sm80_float32_backward.HEAD_DIM_LIMIT:
            assert SM80.why_not(problem.with_(needs_grad=True), target) == []
            gradients = sm80_float32_backward.configs(problem, target)
            assert gradients
            configs = [*configs, *gradients]
        for config in configs:
            assert fits(config, target), f"{config} on {name}"
            assert config.exact == (precision == "exact")
            assert config.head_dim >= dims[0]
            assert config.head_dim_v >= dims[1]
            budget = BUDGETS[SM80.unit(built_for(twin_of(target), config), twin_of(target).arch).label]
            assert config.smem_bytes == budget["smem_bytes"]
            assert budget["registers"] * config.threads * config.ctas_per_sm <= 65536


@pytest.mark.parametrize("name", GPUS)
def test_what_a_search_may_try_fits_too(name):
    target = Target.named(name)
    for dims in DIMS:
        problem = make_problem((1, 1, 300, dims[0]), head_dim_v=dims[1])
        found = search_space(SM80, problem, target)
        assert all(fits(config, target) for config in found)
        assert set(SM80.shipped(problem, target)) <= set(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 62, "head_dim_v": 62}, "multiples of 4"),
        ({"head_dim": 260}, "260 is over 256"),
        ({"head_dim": 192, "needs_grad": True}, "192 is over 128"),
    ],
)
def test_each_refusal_is_named(change, says):
    (reason,) = SM80.why_not(make_problem((1, 2, 64, 64), **change), A100)
    assert says in reason.what
    assert reason.remedy


def test_the_planner_goes_elsewhere_for_gradients_of_wide_heads():
    from tilewise import explain

    wide = make_problem((1, 2, 64, 192), needs_grad=True)
    assert explain(wide, target="a100").backend == "torch-efficient"
    assert explain(wide.with_(needs_grad=False), target="a100").backend == "sm80"


def test_notices_tell_the_error_and_the_products():
    problem = make_problem((1, 2, 64, 40))
    assert "3 products" in SM80.notices(problem, A100)[0]
    assert "11 bits" in SM80.notices(problem.with_(precision="tf32"), A100)[0]
    assert "zero-filled" in SM80.notices(problem, A100)[1]


# ---------------------------------------------------------------------------------------------------------------------
# the forward on the model


@pytest.fixture
def on_the_model(monkeypatch):
    def run(q, k, v, problem, target=H200, seed=0, config=None):
        emulation.install(monkeypatch, seed=seed)
        return SM80.bind(q, k, v, problem, config, target)(q, k, v, None)

    return run


# Every kind of kernel once, for they are slow to compile here; tests/gpu runs the tiles of every GPU.
SHAPES = [
    pytest.param((1, 1, 100, 64), {}, "h200", id="d64"),
    pytest.param((1, 1, 150, 64), {"mask": Causal(), "seq_kv": 300}, "rtx-4090", id="d64 causal"),
    pytest.param((1, 1, 90, 36), {"mask": Window(20, 3), "softcap": 30.0}, "a100", id="d36 window softcap"),
    pytest.param((1, 2, 70, 96), {"heads_kv": 1, "seq_kv": 90, "layout": "bshd"}, "h200", id="d96 grouped"),
    pytest.param((2, 1, 130, 128), {"mask": Causal("bottom-right"), "seq_kv": 160}, "h200", id="d128 bottom-right"),
    pytest.param((1, 1, 150, 128), {"mask": Causal()}, "rtx-4090", id="d128 of a 4090"),
    pytest.param((1, 1, 80, 128), {"mask": Causal("bottom-right"), "seq_kv": 50}, "h200", id="rows without keys"),
    pytest.param((1, 1, 130, 256), {"mask": Causal()}, "h200", id="d256"),
    pytest.param((1, 1, 1, 64), {"seq_kv": 129}, "h200", id="one query"),
]


@emulated
@pytest.mark.parametrize(("shape", "fields", "name"), SHAPES)
def test_outputs_are_as_accurate_as_float32(on_the_model, shape, fields, name):
    problem = make_problem(shape, needs_lse=True, **fields)
    q, k, v = inputs_of(problem)
    out, lse = on_the_model(q, k, v, problem, Target.named(name), seed=shape[2])
    want, want_lse = exact(q, k, v, problem)
    assert_as_good_as_float32(out, want, q, k, v, problem)
    assert_lse(lse, want_lse)


@emulated
@pytest.mark.parametrize("seed", range(1, 4))
def test_no_order_of_copies_breaks_it(on_the_model, seed):
    for dim in (64, 128):  # two stages, and one
        problem = make_problem((1, 1, 150, dim), mask=Causal())
        q, k, v = inputs_of(problem, seed)
        out, _ = on_the_model(q, k, v, problem, seed=seed)
        assert_as_good_as_float32(out, exact(q, k, v, problem)[0], q, k, v, problem)


@emulated
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, Full()) for name in RANGES]
    + [(name, Causal()) for name in RANGES if "scores" in name or "outlier" in name],
    ids=str,
)
def test_every_range(on_the_model, name, mask):
    problem = make_problem(EVERY, mask=mask)
    q, k, v = RANGES[name](*inputs_of(problem, seed=3))
    out, _ = on_the_model(q, k, v, problem)
    if name == "all values 0":
        assert (out == 0).all()
    else:
        assert_as_good_as_float32(out, exact(q, k, v, problem)[0], q, k, v, problem)


@emulated
def test_each_column_of_v_is_accurate_by_itself(on_the_model):
    problem = make_problem(EVERY)
    q, k, v = inputs_of(problem)
    v = v * spread(-12, 12, 1, 1, 1, DIM)
    out, _ = on_the_model(q, k, v, problem)
    assert errors(out.mT, exact(q, k, v, problem)[0].mT)[1] <= budget(torch.float32, SEQ)


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(10, 0)], ids=str)
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(on_the_model, mask, bad):
    problem = make_problem((1, 1, 100, 64), mask=mask)
    q, k, v = inputs_of(problem)
    want, _ = exact(q, k, v, problem)
    seen = mask.to_bool(range(100), range(100), 100, 100)[:, 70]
    spoilt = v.clone()
    spoilt[0, 0, 70, 5] = bad
    out, _ = on_the_model(q, k, spoilt, problem)
    column = out[0, 0, seen, 5]
    assert (column.isnan() if math.isnan(bad) else column == bad).all()
    others = torch.arange(64) != 5
    assert errors(out[..., others], want[..., others])[1] <= budget(torch.float32, 100)
    keys = k.clone()
    keys[0, 0, 70] = bad
    out, _ = on_the_model(q, keys, v, problem)
    if not seen.all():
        assert errors(out[:, :, ~seen], want[:, :, ~seen])[1] <= budget(torch.float32, 100)
    if math.isnan(bad):
        assert out[:, :, seen].isnan().all()


@emulated
def test_tf32_keeps_eleven_bits(on_the_model):
    problem = make_problem((1, 1, 150, 64), mask=Causal(), precision="tf32")
    q, k, v = inputs_of(problem)
    out, _ = on_the_model(q, k, v, problem)
    whole, _ = errors(out, exact(q, k, v, problem)[0])
    assert 2.0**-14 < whole < 2.0**-10.5


@emulated
def test_strided_inputs(on_the_model):
    problem = make_problem((1, 2, 70, 64), seq_kv=100, mask=Causal(), layout="bshd")
    room = torch.full((1, 100, 2, 3, 72), math.nan)
    q, k, v = (room[:, :seq, :, i, 4:68].transpose(1, 2) for i, seq in enumerate((70, 100, 100)))
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape))
    out, _ = on_the_model(q, k, v, problem)
    assert_as_good_as_float32(out, exact(q, k, v, problem)[0], q, k, v, problem)


@emulated
def test_the_model_finds_a_missing_wait(monkeypatch):
    """The checks above would see it: without the wait for its copies the kernel reads what nobody wrote."""
    problem = make_problem((1, 1, 64, 64), seq_kv=200)
    q, k, v = inputs_of(problem)
    spoil = ("ptx::cp_async_wait<0>();\n      if (n == touched.end - 1)", "if (n == touched.end - 1)")
    emulation.install(monkeypatch, spoil=spoil)
    bound = SM80.bind(q, k, v, problem, None, H200)
    with pytest.raises(AssertionError):
        assert_as_good_as_float32(bound(q, k, v, None)[0], exact(q, k, v, problem)[0], q, k, v, problem)


# ---------------------------------------------------------------------------------------------------------------------
# the backward on the model


@pytest.fixture
def gradients_on_the_model(on_the_model, monkeypatch):
    """(dq, dk, dv) by our kernels; out and lse come from our forward."""

    def run(q, k, v, dout, problem, target=H200, seed=0, wants=(True, True, True), dlse=None):
        out, lse = on_the_model(q, k, v, problem, target, seed)
        emulation.install(monkeypatch, seed=seed)
        return in_order(SM80.bind_backward(problem, None, target)(dout, dlse, q, k, v, out, lse, wants=wanted(*wants)))

    return run


def assert_gradients_as_good_as_float32(got, q, k, v, dout, problem):
    """As assert_as_good_as_float32."""
    _, _, *truth = exact(q, k, v, problem, None, dout)
    magnitudes = plain_grads(q, k, v, dout, problem, magnitudes=True)
    plains = plain_grads(q, k, v, dout, problem)
    try:
        assert_grads_as_good_as(plains, got, truth, magnitudes, str(problem))
    except AssertionError:
        if problem.batch * problem.heads_q > 1 or problem.softcap:
            raise
        assert_grads_as_good_as(of_torch(q, k, v, problem, dout)[1:], got, truth, magnitudes, str(problem))
        assert_grads_as_good_as(plains, got, truth, magnitudes, str(problem), times=8.0)


GRADIENTS = [
    pytest.param((1, 1, 100, 64), {}, "h200", id="d64"),
    pytest.param((1, 2, 150, 64), {"heads_kv": 1, "mask": Causal(), "seq_kv": 200}, "a100", id="d64 causal grouped"),
    pytest.param((1, 1, 100, 64), {"mask": Window(30, 4)}, "rtx-4090", id="d64 window of a 4090"),
    pytest.param((1, 1, 90, 36), {"head_dim_v": 60, "softcap": 5.0}, "h200", id="d36/60 softcap"),
    pytest.param((1, 1, 70, 96), {"seq_kv": 140, "mask": Causal("bottom-right")}, "h200", id="d96 bottom-right"),
    pytest.param((2, 1, 100, 128), {"mask": Causal(), "layout": "bshd"}, "h200", id="d128"),
    pytest.param((1, 1, 70, 128), {"softcap": 20.0, "mask": Window(20, 20)}, "rtx-4090", id="d128 of a 4090"),
    pytest.param((1, 1, 100, 64), {"seq_kv": 60, "mask": Causal("bottom-right")}, "h200", id="rows without keys"),
]


@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("shape", "fields", "name"), GRADIENTS)
def test_gradients_are_as_accurate_as_float32(gradients_on_the_model, shape, fields, name, deterministic):
    problem = make_problem(shape, needs_grad=True, deterministic=deterministic, **fields)
    q, k, v = inputs_of(problem)
    dout = like_out(problem)
    got = gradients_on_the_model(q, k, v, dout, problem, Target.named(name), seed=shape[2])
    assert_gradients_as_good_as_float32(got, q, k, v, dout, problem)


PIECES = [
    pytest.param((1, 3, 130, 64), {"heads_kv": 1, "seq_kv": 70}, "h200", id="d64 full"),
    pytest.param((1, 4, 100, 64), {"heads_kv": 1, "mask": Causal()}, "a100", id="d64 causal"),
    pytest.param((1, 2, 150, 128), {"heads_kv": 1, "seq_kv": 77, "mask": Window(60, 9)}, "h200", id="d128 window"),
    pytest.param((1, 2, 100, 36), {"heads_kv": 1, "head_dim_v": 60, "softcap": 5.0}, "rtx-4090", id="d36/60 softcap"),
]


@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("shape", "fields", "name"), PIECES)
def test_gradients_of_keys_in_pieces(gradients_on_the_model, shape, fields, name, deterministic):
    problem = make_problem(shape, needs_grad=True, deterministic=deterministic, **fields)
    target = Target.named(name)
    assert sm80_float32_backward.divide(problem, sm80_float32_backward.configs(problem, target)[0], target).cut
    q, k, v = inputs_of(problem)
    dout = like_out(problem)
    got = gradients_on_the_model(q, k, v, dout, problem, target)
    assert_gradients_as_good_as_float32(got, q, k, v, dout, problem)
    if deterministic:
        again = gradients_on_the_model(q, k, v, dout, problem, target, seed=3)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@emulated
@pytest.mark.parametrize("target", ["h200", "a100"])  # sums four at a time, and one
def test_sums_of_pieces_keep_subnormal_numbers(gradients_on_the_model, target):
    problem = make_problem((1, 5, 100, 64), heads_kv=1, seq_kv=64, needs_grad=True)
    where = Target.named(target)
    assert sm80_float32_backward.divide(problem, sm80_float32_backward.configs(problem, where)[0], where).cut
    q, k, v = inputs_of(problem)
    dout = like_out(problem) * 1e-38
    _, _, dv = gradients_on_the_model(q, k, v, dout, problem, where)
    truth = exact(q, k, v, problem, None, dout)[4]
    assert truth.abs().max().item() < 4 * torch.finfo(torch.float32).tiny
    unit = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps
    assert (dv.double() - truth).abs().max().item() <= problem.group * problem.seq_q * unit


@emulated
def test_pieces_without_some_gradients(gradients_on_the_model):
    problem = make_problem((1, 5, 70, 64), heads_kv=1, seq_kv=60, needs_grad=True, deterministic=True)
    config = sm80_float32_backward.configs(problem, H200)[0]
    assert sm80_float32_backward.divide(problem, config, H200).cut
    q, k, v = inputs_of(problem)
    everything = gradients_on_the_model(q, k, v, like_out(problem), problem)
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        got = gradients_on_the_model(q, k, v, like_out(problem), problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None


@emulated
@pytest.mark.parametrize("seed", range(1, 4))
def test_no_order_of_copies_breaks_the_gradients(gradients_on_the_model, seed):
    problem = make_problem((1, 1, 150, 64), mask=Causal(), needs_grad=True)
    q, k, v = inputs_of(problem, seed)
    dout = like_out(problem, seed)
    got = gradients_on_the_model(q, k, v, dout, problem, seed=seed)
    assert_gradients_as_good_as_float32(got, q, k, v, dout, problem)


@emulated
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, Full()) for name in WIDE] + [(name, Causal()) for name in WIDE if "scores" in name or "outlier" in name],
    ids=str,
)
def test_gradients_of_every_range(gradients_on_the_model, name, mask):
    problem = make_problem(EVERY, mask=mask, needs_grad=True)
    q, k, v, dout = WIDE[name](*inputs_of(problem, seed=3), like_out(problem))
    got = gradients_on_the_model(q, k, v, dout, problem)
    assert_gradients_as_good_as_float32(got, q, k, v, dout, problem)


@emulated
@pytest.mark.parametrize(("dim", "name"), [(64, "h200"), (128, "rtx-4090")])
def test_weights_of_rows_that_one_key_dominates_are_exact(gradients_on_the_model, dim, name):
    """Scores in the thousands, whose last bit is worth 1e-4: dv is dout, as far as two parts of it go."""
    for factor in (60.0, 1000.0):  # three products, and six
        problem = make_problem((1, 1, dim, dim), needs_grad=True)
        generator = torch.Generator().manual_seed(dim)
        noise, v, dout = (torch.randn(1, 1, dim, dim, generator=generator) for _ in range(3))
        q = k = factor * torch.eye(dim) + noise
        _, _, dv = gradients_on_the_model(q, k, v, dout, problem, Target.named(name))
        assert errors(dv, dout.double())[1] <= 3 * FLOOR  # two parts hold 22 bits, and their sum is rounded


@emulated
def test_a_gradient_of_the_log_sum_exp_counts(gradients_on_the_model):
    problem = make_problem((1, 1, 70, 64), seq_kv=90, mask=Causal(), needs_grad=True)
    q, k, v = inputs_of(problem)
    dout, dlse = like_out(problem), torch.randn(1, 1, 70, generator=torch.Generator().manual_seed(9))
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    hidden = ~problem.mask.to_bool(range(70), range(90), 70, 90)
    scores = (wide[0] @ wide[1].mT * problem.scale).masked_fill(hidden, -torch.inf)
    outputs = (torch.softmax(scores, -1) @ wide[2], scores.logsumexp(-1))
    truth = torch.autograd.grad(outputs, wide, (dout.double(), dlse.double()))
    got = gradients_on_the_model(q, k, v, dout, problem, dlse=dlse)
    for grad, want in zip(got, truth, strict=True):
        assert errors(grad, want)[0] <= budget(torch.float32, 90)


@emulated
def test_gradients_that_are_not_wanted_are_not_there(gradients_on_the_model):
    problem = make_problem((1, 1, 100, 64), mask=Causal(), needs_grad=True)
    q, k, v = inputs_of(problem)
    everything = gradients_on_the_model(q, k, v, like_out(problem), problem)
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        got = gradients_on_the_model(q, k, v, like_out(problem), problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None
