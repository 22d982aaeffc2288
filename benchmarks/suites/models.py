"""One layer of each of several models."""

from __future__ import annotations

from typing import Any

from tilewise.lab.candidates.names import FA3, FA4, OURS, TORCH_DEFAULT
from tilewise.lab.studies.suites import BF16, Suite, row

_CUDA: dict[str, Any] = {"device": "cuda", "candidates": (OURS, TORCH_DEFAULT, "torch-cudnn", "torch-flash")}
SUITE = Suite(
    (
        row((1, 32, 8192, 128), BF16, "causal", heads_kv=8, **_CUDA),
        row((1, 24, 4608, 128), BF16, **_CUDA),
        row((64, 12, 197, 64), BF16, **_CUDA),
        row((1, 16, 8192, 256), BF16, "window:1024,0", heads_kv=8, softcap=50.0, **_CUDA),
        row((1, 128, 4096, 192), BF16, "causal", head_dim_v=128, **_CUDA),
        row((1, 32, 16, 128), BF16, heads_kv=8, seq_kv=8192, **_CUDA),
    ),
    {"overhead": False},
    (FA3, FA4),
)
