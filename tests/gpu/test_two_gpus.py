"""What needs two GPUs. It vouches for no part: most machines have one."""

from __future__ import annotations

import pytest
import torch
from test_launch import BLOCK, COUNT, GRID, current_stream, packed, scale_function

from tilewise.jit.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_each_device_gets_its_own_launches() -> None:
    for device in (1, 0, 1):
        source = torch.randn(COUNT, device=f"cuda:{device}")
        out = torch.zeros_like(source)
        with torch.cuda.device(1 - device):
            launch(scale_function(device), GRID, BLOCK, 0, current_stream(device), packed(out, source, 2.0))
            assert torch.cuda.current_device() == 1 - device
        assert torch.equal(out, 2.0 * source)
