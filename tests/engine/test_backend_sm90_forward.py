"""The Hopper forward and the kernel that puts split keys together, on a model of the hardware: what its family has in
common with others, and what it has of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from family import BF16, BOTTOM_RIGHT, FP16, H200, Case, Family, inputs_of
from family_16_bits import *  # noqa: F403 (every case, for this family)
from family_forward import *  # noqa: F403

import emulation
from support import assert_near
from tilewise import Causal, Full, Window
from tilewise.engine import SM90
from tilewise.engine.program import Counter

emulated = emulation.emulated
SMALL = {"consumers": 2, "block_kv": 32, "k_stages": 2, "v_stages": 2, "pingpong": True}
FAMILY = Family(SM90, BF16, ("forward",), small=SMALL)
OUTPUTS = [
    Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT),
    Case((140, 300), (128, 128), changes={"consumers": 2}),
    Case((200, 150), (128, 128), mask=BOTTOM_RIGHT, changes={"consumers": 3}),
    Case((100, 400), mask=Window(30, 0, "bottom-right"), fields={"dtype": FP16}, changes={"consumers": 2}),
    Case((300, 260), mask=Causal(), changes={"consumers": 4}),
    Case((100, 260), (192, 128), (2, 1), Causal(), fields={"dtype": FP16}),
    Case((70, 140), (72, 40), mask=Causal(), fields={"softcap": 5.0}),
    Case((200, 333), (96, 96), (3, 3), fields={"dtype": FP16}),
    Case((200, 333), (72, 80), (3, 1)),
    Case((150, 290), (80, 72), mask=BOTTOM_RIGHT, fields={"dtype": FP16}, changes={"consumers": 2}),
    Case((230, 290), (80, 72), mask=BOTTOM_RIGHT, changes={"consumers": 3}),
    Case((230, 200), (72, 80), mask=Window(60, 10), fields={"softcap": 5.0, "dtype": FP16}, changes={"consumers": 3}),
    Case((140, 200), (256, 256), mask=BOTTOM_RIGHT, changes={"consumers": 2}),
    Case((130, 200), (256, 256), mask=Window(50, 50), fields={"softcap": 20.0, "dtype": FP16}),
    Case((80, 260), mask=Window(20, 20)),
    Case((333, 1), mask=Causal(), changes={"consumers": 3}),
    Case((1, 120), (128, 128), (4, 4)),  # more keys are decoding
    Case((260, 260), (128, 128), mask=Window(100, 3), fields={"softcap": 5.0}),
    Case((100, 200), (192, 192)),
    Case((70, 600), (128, 128), fields={"softcap": 30.0}),
    Case((70, 600), fields={"softcap": 0.5}),
]
IN_ANY_ORDER = [Case((190, 260), mask=mask, changes=SMALL) for mask in (Window(100, 20), BOTTOM_RIGHT)]
NARROW = {"consumers": 1, "block_kv": 32}
PEAKED = [Case((70, 300), fields={"dtype": dtype}, changes=NARROW) for dtype in (BF16, FP16)]
RINGS = [
    Case(
        (220, 300),
        mask=mask,
        changes={
            "consumers": consumers,
            "block_kv": block_kv,
            "k_stages": k_stages,
            "v_stages": v_stages,
            "pingpong": pingpong,
        },
    )
    for mask, consumers, block_kv, k_stages, v_stages, pingpong in (
        (Causal(), 3, 32, 3, 2, True),
        (Full(), 2, 32, 1, 1, True),
        (Window(70, 5, "bottom-right"), 2, 48, 2, 1, False),
        (Causal(), 1, 16, 4, 4, False),
        (BOTTOM_RIGHT, 4, 32, 2, 3, False),
    )
]


def check(monkeypatch, problem, config, target=H200):
    inputs = inputs_of(problem)
    out, lse = FAMILY.forward(monkeypatch, problem, inputs, config, target)
    assert_near(out, lse, inputs, problem)
    return out, inputs


@emulated
@pytest.mark.parametrize("case", RINGS, ids=str)
def test_any_number_of_stages_and_warpgroups_on_the_model(monkeypatch, case):
    problem = case.problem(FAMILY, needs_lse=True)
    check(monkeypatch, problem, FAMILY.config(problem, case.changes))


@emulated
@pytest.mark.parametrize("largest", [2.0, 8.0], ids="{} times usual scores".format)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_softcap_is_as_precise_as_weights_of_16_bits_need(monkeypatch, dims, largest):
    """All scores below half of the cap, which a polynomial takes, and some above: the log-sum-exp, which nothing rounds
    to 16 bits, shows an error of tanh of 2% of fp16's rounding of a weight."""
    problem = Case((70, 700), dims).problem(FAMILY, dtype=FP16, softcap=30.0, needs_lse=True)
    q, k, v = inputs_of(problem)
    q = (q * largest).to(FP16)
    _, lse = FAMILY.forward(monkeypatch, problem, (q, k, v))
    scores = q.double() @ k.double().mT * problem.scale
    assert (scores.abs().max() < 15.0) == (largest == 2.0)
    want = (30.0 * torch.tanh(scores / 30.0)).logsumexp(-1)
    assert (lse.double() - want).abs().max() < 0.02 * 2**-11


@emulated
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)  # out in one part, or in two
@pytest.mark.parametrize("mask", [BOTTOM_RIGHT, Full()], ids=str)  # work from a counter, or in a fixed order
def test_blocks_that_do_several_tiles_on_the_model(monkeypatch, dims, mask):
    """Some rows of the causal problem see no key, so that tiles without work follow tiles with some."""
    two = dataclasses.replace(H200, sms=2)
    problem = Case((200, 150), dims, (2, 1), mask).problem(FAMILY, batch=2, needs_lse=True)
    config = FAMILY.config(problem, SMALL if mask != Full() else SMALL | {"pingpong": False}, two)
    (launch,) = SM90.program(problem, two, config).launches
    assert launch.grid == 2
    assert launch.fields["work_counter"] == (Counter() if mask != Full() else None)
    check(monkeypatch, problem, config, two)


@emulated
def test_sums_that_are_not_a_number_spoil_no_later_tile(monkeypatch):
    """One CTA takes the tiles of all heads one after another."""
    problem = Case((140, 140), heads=(2, 2), mask=Causal()).problem(FAMILY, needs_lse=True)
    target = dataclasses.replace(H200, sms=1)
    q, k, v = inputs_of(problem)
    clean, clean_lse = FAMILY.forward(monkeypatch, problem, (q, k, v), target=target)
    for head in range(2):
        spoiled = k.clone()
        spoiled[:, head] = torch.nan
        out, lse = FAMILY.forward(monkeypatch, problem, (q, spoiled, v), target=target)
        assert out[:, head].isnan().all()
        assert torch.equal(out[:, 1 - head], clean[:, 1 - head])
        assert torch.equal(lse[:, 1 - head], clean_lse[:, 1 - head])


SPLIT = {"split": True, "mask": 1, "consumers": 1, "block_kv": 16, "pingpong": False}
SPLITS = [
    Case((40, 260), (72, 40), (4, 2), fields={"dtype": FP16, "layout": "bshd"}, changes=SPLIT),
    Case((20, 300), heads=(4, 1), changes=SPLIT),  # heads share tiles
    Case((70, 270), (128, 128), (2, 1), BOTTOM_RIGHT, fields={"dtype": FP16}, changes=SPLIT),
    Case((130, 200), mask=Causal(), changes=SPLIT),  # a part may see no key of some rows
    Case((65, 260), (256, 256), (2, 2), changes=SPLIT),
    Case((17, 1100), heads=(4, 1)),  # as the table has it
    Case((200, 130), mask=BOTTOM_RIGHT, changes=SPLIT),  # some rows see no key at all
    Case((70, 290), (192, 128), fields={"batch": 2}, changes=SPLIT),
]


@emulated
@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_split_keys_put_together_on_the_model(monkeypatch, case):
    problem = case.problem(FAMILY, needs_lse=True)
    config = FAMILY.config(problem, case.changes)
    forward, combine = SM90.program(problem, H200, config).launches
    assert forward.fields["splits"] == combine.fields["splits"] > 1
    out, inputs = check(monkeypatch, problem, config)
    without, none = FAMILY.forward(monkeypatch, problem.with_(needs_lse=False), inputs, config)
    assert none is None
    assert torch.equal(without, out)


@emulated
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_share_tiles_where_their_strides_let_them(monkeypatch, layout):
    problem = Case((20, 150), heads=(8, 2)).problem(FAMILY, batch=2, layout=layout, needs_lse=True)
    config = FAMILY.config(problem, NARROW)
    assert dict(SM90.program(problem, H200, config).views)["q"] == (2, 2, 80, 64)
    check(monkeypatch, problem, config)


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
    problem = Case((190, 260), heads=(2, 1), mask=Causal()).problem(FAMILY, batch=2, needs_lse=True)
    inputs, config = inputs_of(problem), FAMILY.config(problem, SMALL)

    def right(seed):
        try:
            options = {"seed": seed, "spoil": SPOILS.get(spoil, ("", ""))}
            found = FAMILY.forward(monkeypatch, problem, inputs, config, two, **options)
            assert_near(*found, inputs, problem)
        except AssertionError:
            return False
        return True

    assert all(map(right, range(4))) == (not spoil)


@pytest.mark.kernel_gate
@emulated
def test_the_model_finds_parts_put_together_too_early(monkeypatch):
    problem = Case((20, 300), heads=(4, 1)).problem(FAMILY, needs_lse=True)
    inputs, config = inputs_of(problem), FAMILY.config(problem, SPLIT)
    spoil = ("  ptx::allow_next_grid();\n  ptx::wait_for_previous_grid();\n  if (row >=", "  if (row >=")
    with pytest.raises(AssertionError, match="never waits"):
        FAMILY.forward(monkeypatch, problem, inputs, config, spoil=spoil)
