"""The FlashAttention-2 backend as far as it goes without a GPU: what it refuses, what it chooses, that it fits every
GPU it knows, and its kernel, real source and real host code, on a model of the hardware."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import emulation
from support import assert_near, make_inputs, make_problem, rounding_budget
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80
from tilewise.engine.source import COMPILED
from tilewise.lab.studies.search_space import search_space
from tilewise.problem import Strides
from tilewise.target import TARGETS

GPUS = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]
A100, ADA, H200 = Target.named("a100"), Target.named("rtx-4090"), Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
BF16, FP16 = torch.bfloat16, torch.float16

DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]
MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 3), Window(None, 2, "bottom-right")]


def problem_of(seqs=(300, 300), dims=(64, 64), heads=(1, 1), dtype=BF16, **fields):
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True}
    return make_problem((1, heads[0], seqs[0], dims[0]), dtype, **(values | fields))


def fits(config, target):
    """Independent of `Config.fits`: what the hardware gives a block, and all blocks of a multiprocessor together."""
    together = config.ctas_per_sm * (config.smem_bytes + 1024)
    registers = config.ctas_per_sm * config.threads * config.register_limit
    return config.smem_bytes <= target.smem_per_block and together <= target.smem_per_sm and registers <= 65536


@pytest.mark.parametrize("name", GPUS)
def test_every_problem_it_takes_has_a_config_that_fits(name):
    target = Target.named(name)
    for dims in DIMS:
        for mask in MASKS:
            for softcap in (0.0, 30.0):
                for seq in (1, 300, 4096):
                    problem = problem_of((seq, seq), dims, (8, 2), mask=mask, softcap=softcap)
                    assert SM80.why_not(problem, target) == []
                    configs = SM80.configs(problem, target)
                    assert configs, str(problem)
                    for config in configs:
                        assert fits(config, target), f"{config} on {name}"
                        assert config.head_dim >= dims[0]
                        assert config.head_dim_v >= dims[1]


@pytest.mark.parametrize("name", GPUS)
def test_what_a_search_may_try_fits_too(name):
    target = Target.named(name)
    for dims in DIMS:
        found = search_space(SM80, problem_of(dims=dims), target)
        assert found
        assert all(fits(config, target) for config in found)
        assert set(SM80.shipped(problem_of(dims=dims), target)) <= set(found)


def test_every_config_of_every_gpu_is_compiled_in_ci_for_one_with_as_much_shared_memory():
    compiled = {target.smem_per_block: target for target in COMPILED}
    for name in GPUS:
        target = Target.named(name)
        twin = compiled[target.smem_per_block]
        for dims in DIMS:
            for softcap, dtype in ((0.0, BF16), (30.0, FP16)):
                for config in SM80.configs(problem_of(dims=dims, softcap=softcap, dtype=dtype), target):
                    budget = BUDGETS[SM80.unit(config, twin.arch).label]
                    assert config.smem_bytes == budget["smem_bytes"]
                    assert budget["registers"] <= config.register_limit


def test_kernels_are_built_for_the_gpu_they_run_on():
    config = SM80.configs(problem_of(), A100)[0]
    assert [SM80.unit(config, target.arch).arch for target in (A100, ADA, H200)] == ["sm_80", "sm_89", "sm_90"]
    assert all(SM80.unit(config, target.arch).strict for target in (A100, ADA, H200))
    assert not SM80.unit(config, "sm_100").strict  # no test has looked: a small spill there is better than a refusal


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 60, "head_dim_v": 60}, "multiples of 8"),
        ({"head_dim": 264}, "264 is over 256"),
        ({"scale": -1.0}, "negative"),
        ({"strides": Strides.UNALIGNED}, "unaligned"),
        ({"batch": 1 << 30}, "the limit of a grid"),
        ({"transformed": True}, "functorch"),
    ],
)
def test_each_refusal_is_named(change, says):
    problem = make_problem((1, 2, 64, 64), **({"dtype": BF16} | change))
    (reason,) = SM80.why_not(problem, A100)
    assert says in reason.what
    assert reason.remedy


def test_older_gpus_and_the_cpu_are_refused():
    for name in ("t4", "cpu"):
        (reason,) = SM80.why_not(problem_of(), Target.named(name))
        assert "sm_80" in reason.what


def test_a_gpu_without_room_is_refused_with_its_size():
    (reason,) = SM80.why_not(problem_of(dims=(256, 256)), replace(ADA, smem_per_block=48 * 1024))
    assert "49152 bytes" in reason.what


def test_details_tell_the_launch():
    problem = make_problem((4, 16, 4096, 128), BF16, mask=Causal())
    (line,) = SM80.details(problem, A100, SM80.configs(problem, A100)[0])
    assert line == (
        "2048 CTAs of 128 threads longest first, at most 255 registers per thread; "
        "2 per multiprocessor, 8 warps; 9.5 waves"
    )


# --- the kernel itself on a model of the hardware ---

emulated = emulation.emulated


def run_on_the_model(monkeypatch, problem, tensors, target=A100, seed=0, config=None):
    emulation.install(monkeypatch, seed=seed)
    return SM80.bind(*tensors, problem, config, target)(*tensors, None)


def inputs_of(problem, seed=0):
    torch.manual_seed(seed)
    return make_inputs(problem)


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "name", "fields"),
    [
        ((150, 200), (64, 64), (4, 2), Causal("bottom-right"), "a100", {}),
        ((200, 150), (64, 64), (1, 1), Causal("bottom-right"), "h200", {}),
        ((300, 300), (128, 128), (2, 1), Full(), "h200", {"layout": "bshd"}),
        ((100, 400), (64, 64), (1, 1), Window(30, 0, "bottom-right"), "rtx-4090", {"dtype": FP16}),
        ((70, 140), (72, 40), (1, 1), Causal(), "a100", {"softcap": 5.0}),
        ((1, 333), (96, 96), (6, 3), Full(), "rtx-4090", {}),
        ((333, 1), (96, 96), (1, 1), Causal(), "a100", {}),
        ((140, 200), (192, 128), (1, 1), Causal("bottom-right"), "a100", {}),
        ((140, 200), (256, 256), (1, 1), Causal(), "h200", {}),
        ((70, 200), (256, 256), (1, 1), Window(50, 50), "rtx-4090", {"softcap": 20.0}),
    ],
    ids=str,
)
def test_outputs_on_the_model(monkeypatch, seqs, dims, heads, mask, name, fields):
    problem, target = problem_of(seqs, dims, heads, mask=mask, **fields), Target.named(name)
    tensors = inputs_of(problem)
    for config in SM80.configs(problem, target):
        assert_near(*run_on_the_model(monkeypatch, problem, tensors, target, config=config), tensors, problem)


@emulated
@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_order_copies_arrive_in(monkeypatch, seed):
    problem = problem_of((150, 300), (128, 128), mask=Causal("bottom-right"))
    tensors = inputs_of(problem, seed)
    for target in (A100, H200):  # one stage, and two
        assert_near(*run_on_the_model(monkeypatch, problem, tensors, target, seed), tensors, problem)


@emulated
@pytest.mark.parametrize("factor", [0.01, 6.0, 60.0, 400.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_peaked_scores_on_the_model(monkeypatch, factor, dtype):
    """Where later tiles outdo the first, the standing maximum is raised, or scores are computed again."""
    problem = problem_of((64, 700), (64, 64), dtype=dtype)
    q, k, v = inputs_of(problem)
    rising = torch.linspace(2, 0, 700)[:, None]  # tiles are visited from the last
    for tensors in ((q * factor, k, v), (q * factor, (k * rising).to(dtype), v)):
        assert_near(*run_on_the_model(monkeypatch, problem, tensors), tensors, problem)


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Causal(), Window(40, 0)], ids=str)
def test_hidden_values_never_show_on_the_model(monkeypatch, bad, mask):
    problem = problem_of((200, 200), (64, 64), mask=mask)
    q, k, v = inputs_of(problem)
    visible = mask.to_bool(range(200), range(200), 200, 200)
    clean, _ = run_on_the_model(monkeypatch, problem, (q, k, v))
    for key in (30, 150):
        blind = ~visible[:, key]
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        for keys, values in ((spoilt_k, v), (k, spoilt_v), (spoilt_k, spoilt_v)):
            out, lse = run_on_the_model(monkeypatch, problem, (q, keys, values))
            # Not bit for bit: a neighbour row's NaN may send the warp down its careful path.
            error = (out - clean)[:, :, blind].float().norm() / clean[:, :, blind].float().norm()
            assert error <= rounding_budget(BF16, 2 * 2)  # both were rounded twice
            assert not lse[:, :, blind].isnan().any()
        out, _ = run_on_the_model(monkeypatch, problem, (q, k, spoilt_v))
        assert not out[:, :, ~blind].isfinite().any()


@emulated
def test_strided_inputs_on_the_model(monkeypatch):
    problem = problem_of((100, 130), (64, 64), (2, 2), mask=Causal())
    room = torch.full((1, 130, 2, 3, 80), math.nan, dtype=BF16)
    q, k, v = (room[:, :seq, :, i, 8:72].transpose(1, 2) for i, seq in enumerate((100, 130, 130)))
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape))
    assert_near(*run_on_the_model(monkeypatch, problem, (q, k, v)), (q, k, v), problem)


@emulated
def test_the_model_finds_a_missing_wait(monkeypatch):
    """The checks above would see it: without the wait for its copies the kernel reads what nobody wrote."""
    problem = problem_of((200, 200), (64, 64))
    tensors = inputs_of(problem)
    spoil = ("ptx::cp_async_wait<0>();\n      if (config.stages == 2", "if (config.stages == 2")
    emulation.install(monkeypatch, spoil=spoil)
    bound = SM80.bind(*tensors, problem, None, A100)
    with pytest.raises(AssertionError):
        assert_near(*bound(*tensors, None), tensors, problem)
