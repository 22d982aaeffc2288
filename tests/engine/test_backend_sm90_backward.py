"""The Hopper backward as far as it goes without a GPU: what it chooses, that it fits, and its kernels on a model."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest
import torch

import emulation
from support import exact, in_order, make_problem, rounding_budget, wanted
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM90, rules
from tilewise.engine.sm90 import backward as sm90_backward
from tilewise.lab.model.covering import units_of
from tilewise.operands import ALL

H200 = Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
BF16, FP16 = torch.bfloat16, torch.float16

DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]
MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 3), Window(None, 2, "bottom-right")]


def problem_of(seqs=(300, 300), dims=(64, 64), heads=(2, 1), dtype=BF16, **fields):
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_grad": True}
    return make_problem((1, heads[0], seqs[0], dims[0]), dtype, **(values | fields))


def test_every_problem_it_takes_has_a_config_that_fits_and_is_compiled_in_ci():
    names = {unit.name for unit in units_of(SM90)}
    for dims in DIMS:
        for mask in MASKS:
            for softcap in (0.0, 30.0):
                for seqs in ((1, 1), (300, 100), (100, 300), (4096, 4096)):
                    problem = problem_of(seqs, dims, mask=mask, softcap=softcap)
                    assert SM90.why_not(problem, H200) == []
                    configs = sm90_backward.configs(problem, H200)
                    assert configs, str(problem)
                    for config in configs:
                        assert sm90_backward.unit(config).name in names
                        budget = BUDGETS[sm90_backward.unit(config).label]
                        assert config.smem_bytes == budget["smem_bytes"] <= H200.smem_per_block
                        assert config.register_limit == budget["registers"]
                        assert config.head_dim >= problem.head_dim
                        assert config.head_dim_v >= problem.head_dim_v


def test_registers_add_up_to_what_a_multiprocessor_has():
    for classes, has_terms in product(rules.HEAD_DIM_CLASSES, (False, True)):
        rows = rules.rows("sm90_backward", "backward", classes, has_terms)
        assert rows
        for row in rows:
            shared_out = 24 + row["query_registers"] + 2 * row["product_registers"]
            assert shared_out <= 512
            assert row["query_registers"] % 8 == row["product_registers"] % 8 == 0


def test_the_shortcut_for_one_tile_of_keys_is_taken_only_when_every_query_tile_sees_it():
    def writes(seqs, mask, softcap=0.0):
        return sm90_backward.configs(problem_of(seqs, (128, 128), mask=mask, softcap=softcap), H200)[0].writes_dq

    assert writes((128, 128), Full())
    assert writes((1000, 100), Causal())
    assert not writes((1000, 129), Full())
    assert not writes((1000, 100), Causal("bottom-right"))
    assert not writes((1000, 100), Window(50, 0))
    assert not writes((128, 128), Full(), softcap=5.0)


def test_extra_memory_grows_with_the_sequence_and_not_with_its_square():
    sizes = []
    for seq in (4096, 8192):
        problem = problem_of((seq, seq), (128, 128))
        config = sm90_backward.configs(problem, H200)[0]
        sizes.append(sm90_backward.program(problem, H200, config, frozenset("q")).scratch.bytes)
        assert sizes[-1] == 4 * 2 * seq * (128 + 2)
    assert sizes[1] == 2 * sizes[0]


# --- the kernels themselves, their real sources and host code, on a model of the hardware ---


def run_on_the_model(monkeypatch, problem, seed=0, wants=(True, True, True), target=H200, dlse=None):
    emulation.install(monkeypatch, seed=seed)
    generator = torch.Generator().manual_seed(0)
    batch, group_heads = problem.batch, (problem.heads_q, problem.heads_kv, problem.heads_kv, problem.heads_q)
    seqs = (problem.seq_q, problem.seq_kv, problem.seq_kv, problem.seq_q)
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)
    q, k, v, dout = (
        torch.randn(batch, heads, seq, dim, generator=generator).to(problem.dtype)
        for heads, seq, dim in zip(group_heads, seqs, dims, strict=True)
    )
    out, lse, *truth = exact(q, k, v, problem, None, dout)
    got = in_order(
        SM90.bind_backward(problem, None, target)(
            dout, dlse, q, k, v, out.to(problem.dtype), lse.float(), wants=wanted(*wants)
        )
    )
    return got, truth


def assert_accurate(got, truth, dtype):
    """Four roundings of 16 bits stand between the inputs and a gradient."""
    for grad, want, name in zip(got, truth, ("dq", "dk", "dv"), strict=True):
        error = ((grad.double() - want).norm() / want.norm()).item()
        assert error <= rounding_budget(dtype, 4), f"{name}: {error:.2e}"


emulated = emulation.emulated


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "fields"),
    [
        ((150, 200), (64, 64), (2, 1), Causal("bottom-right"), {}),
        ((256, 256), (128, 128), (1, 1), Causal(), {}),
        ((100, 140), (128, 128), (1, 1), Window(40, 10), {}),
        ((100, 100), (128, 128), (2, 1), Full(), {}),
        ((200, 60), (128, 128), (1, 1), Causal("bottom-right"), {}),
        ((300, 300), (88, 80), (1, 1), Window(20, 0), {"dtype": FP16}),
        ((70, 140), (128, 128), (1, 1), Full(), {"softcap": 5.0}),
        ((70, 140), (128, 128), (1, 1), Full(), {"softcap": 50.0}),
        ((130, 100), (256, 256), (1, 1), Causal(), {}),
        ((70, 100), (192, 128), (2, 1), Full(), {"dtype": FP16, "softcap": 5.0}),
        ((150, 150), (128, 128), (1, 1), Causal(), {"deterministic": True}),
    ],
    ids=str,
)
def test_gradients_on_the_model(monkeypatch, seqs, dims, heads, mask, fields):
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    got, truth = run_on_the_model(monkeypatch, problem)
    assert_accurate(got, truth, problem.dtype)


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "fields"),
    [
        ((128, 128), (64, 64), (3, 1), Causal(), {"batch": 2}),
        ((70, 100), (72, 40), (1, 1), Full(), {"dtype": FP16}),
        ((150, 77), (128, 128), (2, 2), Window(None, 30), {"deterministic": True}),
    ],
    ids=str,
)
def test_short_sequences_take_one_launch_and_give_the_same_bits(monkeypatch, seqs, dims, heads, mask, fields):
    """As with a kernel before that makes the row terms, where tiles are not cut then either."""
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    target = dataclasses.replace(H200, sms=problem.batch * problem.heads_kv)
    dlse = torch.randn(problem.batch, problem.heads_q, problem.seq_q)

    def gradients(launches):
        program = sm90_backward.program(problem, target, sm90_backward.configs(problem, target)[0])
        assert (len(program.launches), program.scratch.bytes == 0) == (launches, launches == 1)
        got, truth = run_on_the_model(monkeypatch, problem, target=target)
        assert_accurate(got, truth, problem.dtype)
        return *got, *run_on_the_model(monkeypatch, problem, target=target, dlse=dlse)[0]

    alone = gradients(1)
    monkeypatch.setattr(sm90_backward, "_makes_row_terms", lambda problem, config, target: False)
    assert all(torch.equal(a, b) for a, b in zip(alone, gradients(2), strict=True))


def test_when_a_backward_is_one_launch():
    def launches(seqs, dims=(64, 64), heads=(2, 2), target=H200, wants=ALL, **fields):
        problem = problem_of(seqs, dims, heads, **fields)
        return len(sm90_backward.program(problem, target, sm90_backward.configs(problem, target)[0], wants).launches)

    assert launches((128, 128)) == launches((384, 128)) == launches((192, 100), (128, 128)) == 1
    assert launches((385, 128)) == launches((193, 100), (128, 128)) == 2, "more query tiles than stages"
    assert launches((128, 129)) == 2, "two tiles of keys"
    assert launches((128, 128), heads=(4, 1)) == 2, "a group of four heads is four query tiles"
    assert launches((64, 64), heads=(132, 132)) == 1
    assert launches((64, 64), heads=(133, 133)) == 2, "more CTAs than run at once"
    assert launches((128, 128), wants=frozenset("kv")) == 2
    assert launches((128, 128), softcap=5.0) == 2


@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask"),
    [
        ((150, 200), (64, 64), (2, 1), Causal("bottom-right")),
        ((200, 300), (128, 128), (1, 1), Window(40, 10)),
        ((300, 200), (64, 64), (1, 1), Causal("bottom-right")),
        ((130, 200), (256, 256), (1, 1), Causal()),
    ],
    ids=str,
)
def test_sums_of_dq_as_they_come_and_in_turn_on_the_model(monkeypatch, seqs, dims, heads, mask, deterministic):
    monkeypatch.setattr(sm90_backward, "MAX_CLAIMANTS", 0)
    problem = problem_of(seqs, dims, heads, mask=mask, deterministic=deterministic)
    got, truth = run_on_the_model(monkeypatch, problem)
    assert_accurate(got, truth, problem.dtype)


PIECES = [
    ((600, 260), (64, 64), (4, 1), Full(), {}),
    ((600, 130), (128, 128), (4, 1), Causal("bottom-right"), {}),
    ((700, 100), (128, 128), (2, 1), Full(), {}),
    ((300, 300), (256, 256), (4, 2), Causal(), {"dtype": FP16}),
    ((400, 400), (128, 128), (3, 1), Window(150, 20), {"softcap": 5.0}),
    pytest.param(
        (500, 300), (128, 128), (4, 1), Causal(), {"deterministic": True}, marks=pytest.mark.kernel_gate, id="long"
    ),
    ((300, 200), (192, 128), (4, 1), Full(), {"deterministic": True}),
]


@emulated
@pytest.mark.parametrize(("seqs", "dims", "heads", "mask", "fields"), PIECES, ids=str)
def test_tiles_of_keys_in_pieces_on_the_model(monkeypatch, seqs, dims, heads, mask, fields):
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    assert sm90_backward.divide(problem, sm90_backward.configs(problem, H200)[0], H200).cut
    got, truth = run_on_the_model(monkeypatch, problem)
    assert_accurate(got, truth, problem.dtype)
    if problem.deterministic:
        again, _ = run_on_the_model(monkeypatch, problem, seed=3)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@emulated
@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_order_the_hardware_works_in(monkeypatch, seed):
    problem = problem_of((150, 200), (64, 64), mask=Causal("bottom-right"))
    got, truth = run_on_the_model(monkeypatch, problem, seed)
    assert_accurate(got, truth, problem.dtype)


@emulated
@pytest.mark.parametrize("mask", [Causal(), Window(40, 10)], ids=str)
def test_the_last_of_several_sections_goes_the_other_way_and_no_order_of_work_shows(monkeypatch, mask):
    small = dataclasses.replace(H200, l2_bytes=1, sms=1)
    problem = problem_of((300, 260), (128, 128), (2, 2), mask=mask, deterministic=True)
    assert sm90_backward.divide(problem, sm90_backward.configs(problem, small)[0], small).sections == 2
    first, truth = run_on_the_model(monkeypatch, problem, target=small)
    assert_accurate(first, truth, problem.dtype)
    again, _ = run_on_the_model(monkeypatch, problem, seed=7, target=small)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@emulated
def test_gradients_that_are_not_wanted_are_not_there(monkeypatch):
    problem = problem_of((150, 200), (64, 64), mask=Causal("bottom-right"))
    everything, _ = run_on_the_model(monkeypatch, problem)
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        got, _ = run_on_the_model(monkeypatch, problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None
