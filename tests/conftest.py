"""Settings every test shares: no AMX (it dies on some virtual machines), deterministic seeds, a calm Hypothesis."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["TILEWISE_TABLES"] = "none"  # what ships is tested, not what somebody tuned on this machine

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("tilewise", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tilewise")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
