"""The FlashAttention-2 forward as far as it goes without a GPU: what its family has in common with others, and what it
has of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from family import A100, ADA, BF16, BOTTOM_RIGHT, FP16, H200, Case, Family, inputs_of
from family_16_bits import *  # noqa: F403 (every case, for this family)
from family_choices import *  # noqa: F403
from family_choices import REFUSED
from family_forward import *  # noqa: F403

from support import assert_near, make_problem
from tilewise import Causal, Target, Window
from tilewise.engine import SM80

FAMILY = Family(SM80, BF16, ("forward",))
REFUSALS = [*REFUSED, ({"batch": 1 << 30}, "the limit of a grid")]
OUTPUTS = [
    Case((150, 200), heads=(4, 2), mask=BOTTOM_RIGHT, gpu="a100"),
    Case((200, 150), mask=BOTTOM_RIGHT),
    Case((300, 300), (128, 128), (2, 1), fields={"layout": "bshd"}),
    Case((100, 400), mask=Window(30, 0, "bottom-right"), gpu="rtx-4090", fields={"dtype": FP16}),
    Case((70, 140), (72, 40), mask=Causal(), gpu="a100", fields={"softcap": 5.0}),
    Case((1, 333), (96, 96), (6, 3), gpu="rtx-4090"),
    Case((333, 1), (96, 96), mask=Causal(), gpu="a100"),
    Case((140, 200), (192, 128), mask=BOTTOM_RIGHT, gpu="a100"),
    Case((140, 200), (256, 256), mask=Causal()),
    Case((70, 200), (256, 256), mask=Window(50, 50), gpu="rtx-4090", fields={"softcap": 20.0}),
]
IN_ANY_ORDER = [Case((150, 300), (128, 128), mask=BOTTOM_RIGHT, gpu=gpu) for gpu in ("a100", "h200")]  # 1 stage, and 2
PEAKED = [Case((64, 700), gpu="a100", fields={"dtype": dtype}) for dtype in (BF16, FP16)]


def test_kernels_are_built_for_the_gpu_they_run_on():
    config = SM80.configs(make_problem((1, 1, 300, 64), BF16), A100)[0]
    assert [SM80.unit(config, target.arch).arch for target in (A100, ADA, H200)] == ["sm_80", "sm_89", "sm_90"]
    assert all(SM80.unit(config, target.arch).strict for target in (A100, ADA, H200))
    assert not SM80.unit(config, "sm_100").strict  # no test has looked: a small spill there is better than a refusal


def test_older_gpus_and_the_cpu_are_refused():
    for name in ("t4", "cpu"):
        (reason,) = SM80.why_not(make_problem((1, 1, 300, 64), BF16), Target.named(name))
        assert "sm_80" in reason.what


def test_a_gpu_without_room_is_refused_with_its_size():
    (reason,) = SM80.why_not(make_problem((1, 1, 300, 256), BF16), replace(ADA, smem_per_block=48 * 1024))
    assert "49152 bytes" in reason.what


def test_details_tell_the_launch():
    problem = make_problem((4, 16, 4096, 128), BF16, mask=Causal())
    (line,) = SM80.details(problem, A100, SM80.configs(problem, A100)[0])
    assert line == (
        "2048 CTAs of 128 threads longest first, at most 255 registers per thread; "
        "2 per multiprocessor, 8 warps; 9.5 waves"
    )


@emulated  # noqa: F405
def test_the_model_finds_a_missing_wait(monkeypatch):
    """The checks above would see it: without the wait for its copies the kernel reads what nobody wrote."""
    problem = Case((100, 200)).problem(FAMILY, needs_lse=True)
    inputs = inputs_of(problem)
    spoil = ("ptx::cp_async_wait<0>();\n      if (config.stages == 2", "if (config.stages == 2")
    with pytest.raises(AssertionError):
        assert_near(*FAMILY.forward(monkeypatch, problem, inputs, None, A100, spoil=spoil), inputs, problem)
