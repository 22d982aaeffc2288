"""The emulator's tensor cores are those of the hardware, bit for bit: one product of each kind that the kernels issue.

Two generations are stated in tests/emulator/tensor_core.h; the GPU at hand shows one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import emulation
import products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(emulation.COMPILER is None, reason="needs g++ for the emulator")]

BLOCKS = {True: 8, False: 256}  # wgmma makes 8192 sums per block, mma 128


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize(
    ("instruction", "dtype"), products.CASES, ids=lambda value: getattr(value, "name", None) or str(value)
)
def test_a_product_has_the_bits_of_the_model(instruction, dtype, kind):
    if instruction.is_wgmma and arch() != "sm_90a":
        pytest.skip("wgmma is of sm_90a alone")
    a, b, c = products.operands(kind, instruction, dtype, BLOCKS[instruction.is_wgmma])
    got = products.on_gpu(instruction, arch(), a, b, c)
    want = products.on_model(instruction, arch(), a, b, c)
    wrong = products.differing(got, want).nonzero().tolist()
    if wrong:
        block, row, column = wrong[0]
        terms = [x.float().tolist() for x in (a[block, row], b[block, column])]
        raise AssertionError(
            f"{len(wrong)} of {got.numel()} sums differ; the first, {c[block, row, column].item().hex()} + "
            f"{terms[0]} * {terms[1]}, is {got[block, row, column].item().hex()} on {arch()} and "
            f"{want[block, row, column].item().hex()} on the model"
        )
