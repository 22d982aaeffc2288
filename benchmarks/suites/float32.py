"""Forward and backward in float32."""

from __future__ import annotations

from tilewise.lab.candidates.names import OURS, TORCH_DEFAULT
from tilewise.lab.studies.suites import BACKWARD, F32, FULL_AND_CAUSAL, Suite, row

CANDIDATES = (OURS, TORCH_DEFAULT, "torch-efficient")
SUITE = Suite(
    tuple(
        row(shape, F32, mask, device="cuda", candidates=CANDIDATES, **direction)
        for shape in ((2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 16384, 128), (8, 16, 1024, 64))
        for mask in FULL_AND_CAUSAL
        for direction in ({"label": "forward"}, BACKWARD)
    )
)
