"""The FlashAttention-2 backward as far as it goes without a GPU: what its family has in common with others, and what
it has of its own."""

from __future__ import annotations

from itertools import product

from family import BF16, BOTTOM_RIGHT, FP16, H200, Case, Family
from family_backward import *  # noqa: F403 (every case, for this family)
from family_choices import *  # noqa: F403
from family_choices import BUDGETS, REFUSED

from support import make_problem
from tilewise import Causal, Window
from tilewise.engine import SM80
from tilewise.engine.sm80 import backward as sm80_backward
from tilewise.engine.source import COMPILED

FAMILY = Family(SM80, BF16, ("backward",))
REFUSALS = [({"needs_grad": True} | change, what) for change, what in REFUSED]
GRADIENTS = [
    Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT),
    Case((256, 256), (128, 128), mask=Causal(), gpu="a100"),
    Case((100, 140), (128, 128), mask=Window(40, 10), gpu="rtx-4090"),
    Case((100, 100), (128, 128), (4, 2), fields={"layout": "bshd"}),
    Case((60, 200), mask=Causal(), gpu="a100"),
    Case((300, 300), (88, 80), mask=Window(20, 0), gpu="a100", fields={"dtype": FP16}),
    Case((70, 140), (128, 128), fields={"softcap": 5.0}),
    Case((70, 140), (96, 96), mask=Causal(), gpu="rtx-4090"),
    Case((70, 100), (192, 128), (2, 1), gpu="a100", fields={"dtype": FP16, "softcap": 5.0}),
    Case((70, 100), (192, 192), mask=BOTTOM_RIGHT, gpu="rtx-4090"),
    Case((130, 100), (256, 256), mask=Causal()),
    Case((70, 100), (256, 256), mask=Causal(), gpu="rtx-4090"),
    Case((150, 300), (128, 128), mask=Causal(), fields={"deterministic": True}),
    Case((150, 300), heads=(2, 1), mask=Window(100, 20), gpu="a100", fields={"deterministic": True}),
]
CUT = [
    Case((200, 140), heads=(3, 1)),
    Case((260, 130), (128, 128), (3, 1), BOTTOM_RIGHT, "a100"),
    Case((270, 77), (128, 128), (2, 1), gpu="rtx-4090"),
    Case((200, 70), (256, 256), (2, 1), Causal(), fields={"dtype": FP16}),
    Case((200, 200), heads=(3, 1), mask=Window(150, 20), gpu="a100", fields={"softcap": 5.0, "layout": "bshd"}),
    Case((260, 140), (128, 128), (2, 1), fields={"deterministic": True}),
    Case((200, 130), (192, 128), (2, 1), gpu="a100", fields={"deterministic": True}),
]
PARTLY = [Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT)]
PARTLY_CUT = [Case((200, 130), heads=(3, 1), mask=BOTTOM_RIGHT, fields={"deterministic": True})]
# Two stages, and one.
GRADIENTS_IN_ANY_ORDER = [Case((150, 200), (128, 128), (2, 1), BOTTOM_RIGHT, gpu) for gpu in ("h200", "rtx-4090")]


def test_the_kernel_that_rounds_dq_is_compiled_in_ci():
    for target, dim in product(COMPILED, (64, 96, 128, 192, 256)):
        for config in sm80_backward.configs(make_problem((1, 2, 300, dim), BF16, needs_grad=True), target):
            assert sm80_backward.postprocess_unit(config, target.arch).label in BUDGETS


def test_pieces_without_dk_and_dv_are_cut_too():
    problem = PARTLY_CUT[0].problem(FAMILY, needs_grad=True)
    config = sm80_backward.configs(problem, H200)[0]
    assert sm80_backward.divide(problem, sm80_backward.dq_only(config), H200).cut


def test_pieces_are_for_every_slot_of_a_multiprocessor():
    problem = Case((2048, 2048), heads=(8, 1)).problem(FAMILY, needs_grad=True)
    config = sm80_backward.configs(problem, H200)[0]
    divided = sm80_backward.divide(problem, config, H200)
    assert config.ctas_per_sm > 1
    assert divided.cut
    assert divided.waves == divided.grid / (H200.sms * config.ctas_per_sm)


def test_sums_of_pieces_grow_with_the_keys_alone():
    sizes = []
    for seq in (512, 1024):
        problem = Case((16 * seq, seq), (128, 128), (8, 1)).problem(FAMILY, needs_grad=True)
        config = sm80_backward.configs(problem, H200)[0]
        divided = sm80_backward.divide(problem, config, H200)
        assert divided.cut
        plain = sm80_backward.program(problem, H200, config, frozenset("q")).scratch.bytes
        sizes.append(sm80_backward.program(problem, H200, config).scratch.bytes - plain)
        assert 4 * seq * 256 < sizes[-1] <= 4 * (seq * 256 + 32 * divided.grid)
    assert sizes[1] <= 2 * sizes[0]
