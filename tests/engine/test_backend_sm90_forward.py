"""The Hopper forward and the kernel that puts split keys together, real sources and real host code, on a model of the
hardware."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import emulation
from support import assert_near, make_inputs, make_problem, rounding_budget
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM90, decode
from tilewise.engine.backend import forward_posed
from tilewise.engine.program import Counter
from tilewise.engine.sm90 import forward

H200 = Target.named("h200")
BF16, FP16 = torch.bfloat16, torch.float16
BOTTOM_RIGHT = Causal("bottom-right")
emulated = emulation.emulated


def problem_of(seqs=(150, 200), dims=(64, 64), heads=(1, 1), dtype=BF16, batch=1, **fields):
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True}
    return make_problem((batch, heads[0], seqs[0], dims[0]), dtype, **(values | fields))


def config_of(problem, target=H200, **changes):
    """The first config of the table, or that of so many consumers, with changes; few rows have another family too."""
    posed = forward_posed(problem, forward)
    configs = forward.configs(posed, target) if decode.takes(problem) else SM90.configs(problem, target)
    same = [config for config in configs if config.consumers == changes.get("consumers", config.consumers)]
    return dataclasses.replace((same or configs)[0], **changes)


SMALL = {"consumers": 2, "block_kv": 32, "k_stages": 2, "v_stages": 2, "pingpong": True}
"""Tiles so small that a few keys go round every ring several times."""


def inputs_of(problem, seed=0):
    torch.manual_seed(seed)
    return make_inputs(problem)


def run_on_the_model(monkeypatch, problem, inputs, config=None, target=H200, seed=0, spoil=("", "")):
    emulation.install(monkeypatch, seed=seed, spoil=spoil)
    return SM90.bind(*inputs, problem, config, target)(*inputs, None)


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "fields", "changes"),
    [
        ((150, 200), (64, 64), (2, 1), BOTTOM_RIGHT, {}, {}),
        ((140, 300), (128, 128), (1, 1), Full(), {}, {"consumers": 2}),
        ((200, 150), (128, 128), (1, 1), BOTTOM_RIGHT, {}, {"consumers": 3}),
        ((100, 400), (64, 64), (1, 1), Window(30, 0, "bottom-right"), {"dtype": FP16}, {"consumers": 2}),
        ((300, 260), (64, 64), (1, 1), Causal(), {}, {"consumers": 4}),
        ((100, 260), (192, 128), (2, 1), Causal(), {"dtype": FP16}, {}),
        ((70, 140), (72, 40), (1, 1), Causal(), {"softcap": 5.0}, {}),
        ((200, 333), (96, 96), (3, 3), Full(), {"dtype": FP16}, {}),
        ((200, 333), (72, 80), (3, 1), Full(), {}, {}),
        ((150, 290), (80, 72), (1, 1), BOTTOM_RIGHT, {"dtype": FP16}, {"consumers": 2}),
        ((230, 290), (80, 72), (1, 1), BOTTOM_RIGHT, {}, {"consumers": 3}),
        ((230, 200), (72, 80), (1, 1), Window(60, 10), {"softcap": 5.0, "dtype": FP16}, {"consumers": 3}),
        ((140, 200), (256, 256), (1, 1), BOTTOM_RIGHT, {}, {"consumers": 2}),
        ((130, 200), (256, 256), (1, 1), Window(50, 50), {"softcap": 20.0, "dtype": FP16}, {}),
        ((80, 260), (64, 64), (1, 1), Window(20, 20), {}, {}),
        ((333, 1), (64, 64), (1, 1), Causal(), {}, {"consumers": 3}),
        ((1, 120), (128, 128), (4, 4), Full(), {}, {}),  # more keys are decoding
        ((260, 260), (128, 128), (1, 1), Window(100, 3), {"softcap": 5.0}, {}),
        ((100, 200), (192, 192), (1, 1), Full(), {}, {}),
        ((70, 600), (128, 128), (1, 1), Full(), {"softcap": 30.0}, {}),
        ((70, 600), (64, 64), (1, 1), Full(), {"softcap": 0.5}, {}),
    ],
    ids=str,
)
def test_outputs_on_the_model(monkeypatch, seqs, dims, heads, mask, fields, changes):
    """Kernels of the table, for each class of head dims, each kind of mask, and each number of warpgroups."""
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    inputs, config = inputs_of(problem), config_of(problem, **changes)
    assert config in SM90.configs(problem, H200)
    assert_near(*run_on_the_model(monkeypatch, problem, inputs, config), inputs, problem)


@emulated
@pytest.mark.parametrize("largest", [2.0, 8.0], ids="{} times usual scores".format)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_softcap_is_as_precise_as_weights_of_16_bits_need(monkeypatch, dims, largest):
    """All scores below half of the cap, which a polynomial takes, and some above: the log-sum-exp, which nothing rounds
    to 16 bits, shows an error of tanh of 2% of fp16's rounding of a weight."""
    problem = problem_of((70, 700), dims, dtype=FP16, softcap=30.0)
    q, k, v = inputs_of(problem)
    q = (q * largest).to(FP16)
    _, lse = run_on_the_model(monkeypatch, problem, (q, k, v))
    scores = q.double() @ k.double().mT * problem.scale
    assert (scores.abs().max() < 15.0) == (largest == 2.0)
    want = (30.0 * torch.tanh(scores / 30.0)).logsumexp(-1)
    assert (lse.double() - want).abs().max() < 0.02 * 2**-11


@emulated
@pytest.mark.parametrize(
    ("mask", "consumers", "block_kv", "k_stages", "v_stages", "pingpong"),
    [
        (Causal(), 3, 32, 3, 2, True),
        (Full(), 2, 32, 1, 1, True),
        (Window(70, 5, "bottom-right"), 2, 48, 2, 1, False),
        (Causal(), 1, 16, 4, 4, False),
        (BOTTOM_RIGHT, 4, 32, 2, 3, False),
    ],
    ids=str,
)
def test_any_number_of_stages_and_warpgroups_on_the_model(
    monkeypatch, mask, consumers, block_kv, k_stages, v_stages, pingpong
):
    problem = problem_of((220, 300), mask=mask)
    shape = {"consumers": consumers, "block_kv": block_kv, "k_stages": k_stages, "v_stages": v_stages}
    config, inputs = config_of(problem, **shape, pingpong=pingpong), inputs_of(problem)
    assert_near(*run_on_the_model(monkeypatch, problem, inputs, config), inputs, problem)


@emulated
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("mask", [Window(100, 20), BOTTOM_RIGHT], ids=str)
def test_whatever_order_the_hardware_works_in(monkeypatch, seed, mask):
    problem = problem_of((190, 260), mask=mask)
    inputs = inputs_of(problem)
    config = config_of(problem, **SMALL)
    out, lse = run_on_the_model(monkeypatch, problem, inputs, config, seed=seed)
    assert_near(out, lse, inputs, problem)
    first, _ = run_on_the_model(monkeypatch, problem, inputs, config)
    assert torch.equal(out, first)


@emulated
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)  # out in one part, or in two
@pytest.mark.parametrize("mask", [BOTTOM_RIGHT, Full()], ids=str)  # work from a counter, or in a fixed order
def test_blocks_that_do_several_tiles_on_the_model(monkeypatch, dims, mask):
    """Some rows of the causal problem see no key, so that tiles without work follow tiles with some."""
    two = dataclasses.replace(H200, sms=2)
    problem = problem_of((200, 150), dims, (2, 1), batch=2, mask=mask)
    config = config_of(problem, two, **(SMALL if mask != Full() else SMALL | {"pingpong": False}))
    (launch,) = SM90.program(problem, two, config).launches
    assert launch.grid == 2
    assert launch.fields["work_counter"] == (Counter() if mask != Full() else None)
    inputs = inputs_of(problem)
    assert_near(*run_on_the_model(monkeypatch, problem, inputs, config, two), inputs, problem)


@emulated
def test_sums_that_are_not_a_number_spoil_no_later_tile(monkeypatch):
    """One CTA takes the tiles of all heads one after another."""
    problem, target = problem_of((140, 140), (64, 64), (2, 2), mask=Causal()), dataclasses.replace(H200, sms=1)
    q, k, v = inputs_of(problem)
    clean, clean_lse = run_on_the_model(monkeypatch, problem, (q, k, v), target=target)
    for head in range(2):
        spoiled = k.clone()
        spoiled[:, head] = torch.nan
        out, lse = run_on_the_model(monkeypatch, problem, (q, spoiled, v), target=target)
        assert out[:, head].isnan().all()
        assert torch.equal(out[:, 1 - head], clean[:, 1 - head])
        assert torch.equal(lse[:, 1 - head], clean_lse[:, 1 - head])


SPLIT = {"split": True, "mask": 1, "consumers": 1, "block_kv": 16, "pingpong": False}


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "fields", "changes"),
    [
        ((40, 260), (72, 40), (4, 2), Full(), {"dtype": FP16, "layout": "bshd"}, SPLIT),
        ((20, 300), (64, 64), (4, 1), Full(), {}, SPLIT),  # heads share tiles
        ((70, 270), (128, 128), (2, 1), BOTTOM_RIGHT, {"dtype": FP16}, SPLIT),
        ((130, 200), (64, 64), (1, 1), Causal(), {}, SPLIT),  # a part may see no key of some rows
        ((65, 260), (256, 256), (2, 2), Full(), {}, SPLIT),
        ((17, 1100), (64, 64), (4, 1), Full(), {}, {}),  # as the table has it
        ((200, 130), (64, 64), (1, 1), BOTTOM_RIGHT, {}, SPLIT),  # some rows see no key at all
        ((70, 290), (192, 128), (1, 1), Full(), {"batch": 2}, SPLIT),
    ],
    ids=str,
)
def test_split_keys_put_together_on_the_model(monkeypatch, seqs, dims, heads, mask, fields, changes):
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    config = config_of(problem, **changes)
    forward, combine = SM90.program(problem, H200, config).launches
    assert forward.fields["splits"] == combine.fields["splits"] > 1
    inputs = inputs_of(problem)
    out, lse = run_on_the_model(monkeypatch, problem, inputs, config)
    assert_near(out, lse, inputs, problem)
    without, none = run_on_the_model(monkeypatch, problem.with_(needs_lse=False), inputs, config)
    assert none is None
    assert torch.equal(without, out)


@emulated
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_share_tiles_where_their_strides_let_them(monkeypatch, layout):
    problem = problem_of((20, 150), heads=(8, 2), batch=2, layout=layout)
    config = config_of(problem, consumers=1, block_kv=32)
    assert dict(SM90.program(problem, H200, config).views)["q"] == (2, 2, 80, 64)
    inputs = inputs_of(problem)
    assert_near(*run_on_the_model(monkeypatch, problem, inputs, config), inputs, problem)


@emulated
@pytest.mark.parametrize(
    ("factor", "dtype"), [(60.0, BF16), (6.0, BF16), (400.0, FP16), (60.0, FP16), (400.0, BF16)], ids=str
)
def test_peaked_scores_on_the_model(monkeypatch, factor, dtype):
    """Where later tiles outdo the first, the standing maximum is raised, or scores are computed again."""
    problem = problem_of((70, 300), dtype=dtype)
    q, k, v = inputs_of(problem)
    rising = torch.linspace(2, 0, 300)[:, None]  # tiles are visited from the last
    config = config_of(problem, consumers=1, block_kv=32)
    for inputs in ((q * factor, k, v), (q * factor, (k * rising).to(dtype), v)):
        assert_near(*run_on_the_model(monkeypatch, problem, inputs, config), inputs, problem)


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Causal(), Window(40, 0)], ids=str)
def test_hidden_values_never_show_on_the_model(monkeypatch, bad, mask):
    problem = problem_of((200, 200), mask=mask)
    config = config_of(problem, **SMALL)
    q, k, v = inputs_of(problem)
    visible = mask.to_bool(range(200), range(200), 200, 200)
    clean, _ = run_on_the_model(monkeypatch, problem, (q, k, v), config)
    for key in (30, 150):
        blind = ~visible[:, key]
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        for keys, values in ((spoilt_k, v), (k, spoilt_v), (spoilt_k, spoilt_v)):
            out, lse = run_on_the_model(monkeypatch, problem, (q, keys, values), config)
            # Not bit for bit: a neighbour row's NaN may send the warp down its careful path.
            error = (out - clean)[:, :, blind].float().norm() / clean[:, :, blind].float().norm()
            assert error <= rounding_budget(BF16, 2 * 2)  # both were rounded twice
            assert not lse[:, :, blind].isnan().any()
        out, _ = run_on_the_model(monkeypatch, problem, (q, k, spoilt_v), config)
        assert not out[:, :, ~blind].isfinite().any()


@emulated
def test_strided_inputs_on_the_model(monkeypatch):
    problem = problem_of((100, 130), heads=(2, 2), mask=Causal(), layout="bshd")
    room = torch.full((1, 130, 2, 3, 80), math.nan, dtype=BF16)
    q, k, v = (room[:, :seq, :, i, 8:72].transpose(1, 2) for i, seq in enumerate((100, 130, 130)))
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape))
    out, lse = run_on_the_model(monkeypatch, problem, (q, k, v), config_of(problem, **SMALL))
    assert out.transpose(1, 2).is_contiguous()
    assert_near(out, lse, (q, k, v), problem)


# --- that the model would notice ---

_STORED = "        ptx::tma_store_commit();\n        ptx::tma_store_wait_read<0>();\n      }\n      if constexpr"
_STAGED = "    ptx::fence_proxy_async();\n    __syncwarp();\n    arrive(&smem.out_full[warpgroup]);"
_VALUES = "swizzle_atom_bytes), 1);\n    wgmma::commit();\n  }\n\n  __device__ __forceinline__ void hold_probabilities"
_FIRST = (
    "    ptx::mbarrier_wait(&smem.q_full[warpgroup], q_phase);\n"
    "    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);\n"
    "    await_pingpong();\n    wgmma::hold(s);\n    wgmma::fence();\n    issue_scores();\n"
)
_BARRIERS = "work_empty[i], 1 + storers + consumer_warps + scanners);\n  }\n  ptx::fence_mbarrier_init();"
_HIDE = "    v[i] = column >= first && column < end ? v[i] : -infinity;"
SPOILS = {
    "values before they are there": ("    ptx::mbarrier_wait(barrier + v_position.stage, v_position.phase);", ""),
    "a mask that is off by one": (_HIDE, _HIDE.replace("< end", "<= end")),
    "rows staged without a fence": (_STAGED, _STAGED.replace("    ptx::fence_proxy_async();\n", "")),
    "products that are not committed": (_VALUES, _VALUES.replace("    wgmma::commit();\n", "")),
    "products without a fence": (_FIRST, _FIRST.replace("    wgmma::fence();\n", "")),
    "stores that nobody waits for": (_STORED, _STORED.replace("        ptx::tma_store_wait_read<0>();\n", "")),
    "stores that are not committed": (_STORED, _STORED.replace("        ptx::tma_store_commit();\n", "")),
    "keys that are never given back": (
        "    arrive(&smem.k_empty[k_position.stage]);\n    if (early_release",
        "    if (early_release",
    ),
    "a counter that is not put back": ("  if (taken == work_count - 1) atomicExch(params.work_counter, 0);", ""),
    "a turn that is not passed": ("    issue_values();\n    pass_pingpong();", "    issue_values();"),
    "barriers that copies cannot see": (_BARRIERS, _BARRIERS.replace("  ptx::fence_mbarrier_init();", "")),
}


@emulated
@pytest.mark.parametrize("spoil", ["", *SPOILS])
def test_the_model_finds_what_is_wrong(monkeypatch, spoil):
    """Each check above would see it: one of a few seeds gives a wrong result, or the model says what is not allowed."""
    two = dataclasses.replace(H200, sms=2)
    problem = problem_of((190, 260), heads=(2, 1), batch=2, mask=Causal())
    inputs, config = inputs_of(problem), config_of(problem, **SMALL)

    def right(seed):
        try:
            found = run_on_the_model(monkeypatch, problem, inputs, config, two, seed, SPOILS.get(spoil, ("", "")))
            assert_near(*found, inputs, problem)
        except AssertionError:
            return False
        return True

    assert all(map(right, range(4))) == (not spoil)


@pytest.mark.kernel_gate
@emulated
def test_the_model_finds_parts_put_together_too_early(monkeypatch):
    problem = problem_of((20, 300), heads=(4, 1))
    inputs, config = inputs_of(problem), config_of(problem, **SPLIT)
    spoil = ("  ptx::allow_next_grid();\n  ptx::wait_for_previous_grid();\n  if (row >=", "  if (row >=")
    with pytest.raises(AssertionError, match="never waits"):
        run_on_the_model(monkeypatch, problem, inputs, config, spoil=spoil)
