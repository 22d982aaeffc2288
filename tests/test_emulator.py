"""The emulator's own arithmetic: its products are what tests/emulator/tensor_core.h says they are.

That the hardware agrees is shown on a GPU, by tests/gpu/test_emulator_products.py; both read tests/products.py.
"""

from __future__ import annotations

import pytest
import torch

import emulation
import products
from term_cases import BACKWARD, check
from test_terms_keep import keep_case
from tilewise import Full
from tilewise.engine import SM90
from tilewise.jit import build

GENERATIONS = {"sm_80": (24, 2), "sm_90a": (25, 1)}  # places that survive, sums per instruction


@emulation.emulated
@pytest.mark.parametrize(
    ("arch", "instruction", "dtype"),
    [
        (arch, instruction, dtype)
        for instruction, dtype in products.CASES
        for arch in GENERATIONS
        if arch == "sm_90a" or not instruction.is_wgmma
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_products_are_cut_off_as_stated(arch, instruction, dtype):
    """Elements of each kind of operands, against the rule in fractions: where they lie, and every bit."""
    for kind in products.KINDS:
        a, b, c = products.operands(kind, instruction, dtype, blocks=1)
        got = products.on_model(instruction, arch, a, b, c)
        assert got.shape == c.shape
        if kind == "nonfinite":
            want = torch.einsum("brd,bcd->brc", a.double(), b.double()) + c.double()
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
            continue
        places = (torch.rand(24, 2) * torch.tensor([instruction.rows, instruction.columns])).long()
        for row, column in places.tolist():
            want = products.rule(a[0, row], b[0, column], c[0, row, column].item(), *GENERATIONS[arch])
            assert got[0, row, column].item() == want, (kind, row, column)


def test_what_runs_on_a_gpu_builds_with_its_sums_in_registers():
    for instruction, dtype in products.CASES:
        kernel = build(instruction.unit(dtype, "sm_90a"))
        assert (kernel.resources.stack_bytes, kernel.resources.spill_store_bytes) == (0, 0)


@emulation.emulated
def test_an_index_beyond_an_array_is_reported(monkeypatch):
    """The element behind the last one is no register of the thread's own."""
    case = keep_case("padding", torch.bfloat16, 64, Full(), needs_grad=True)
    beyond = ("other < (i + reach < count", "other <= (i + reach < count")
    with pytest.raises(AssertionError, match=r"keep\.cuh:\d+: index \d+ is beyond its array"):
        check(monkeypatch, SM90, case, back=BACKWARD, spoil=beyond)
