"""One layer of each kind of model, forward and backward, with every library that there is, so that those that other
suites leave out are seen here once."""

from __future__ import annotations

from typing import Any

from tilewise.lab.candidates.names import FA3, FA4, FLASHINFER, FLEX, OURS, TORCH_DEFAULT
from tilewise.lab.studies.suites import BACKWARD, BF16, Suite, row

_EVERY: dict[str, Any] = {
    "device": "cuda",
    "candidates": (OURS, TORCH_DEFAULT, "torch-cudnn", "torch-flash", "torch-efficient", FLEX),
}
SUITE = Suite(
    (
        # Grouped and causal, full, short, a window under a softcap, and two head dims.
        *(
            row(shape, BF16, mask, **fields, **_EVERY, **way)
            for shape, mask, fields in (
                ((1, 32, 8192, 128), "causal", {"heads_kv": 8}),
                ((1, 24, 4608, 128), "full", {}),
                ((64, 12, 197, 64), "full", {}),
                ((1, 16, 8192, 256), "window:1024,0", {"heads_kv": 8, "softcap": 50.0}),
                ((1, 128, 4096, 192), "causal", {"head_dim_v": 128}),
            )
            for way in ({}, BACKWARD)
        ),
        row((1, 32, 16, 128), BF16, heads_kv=8, seq_kv=8192, **_EVERY),
    ),
    {"round_seconds": 0.02, "overhead": False, "more_seconds": 2.0},
    (FA3, FA4, FLASHINFER),
)
