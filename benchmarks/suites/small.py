"""Problems that a GPU finishes in microseconds: what a launch costs is part of the time."""

from __future__ import annotations

from tilewise.lab.candidates.names import FA3, FA4, OURS, TORCH_DEFAULT
from tilewise.lab.studies.suites import F16, FULL_AND_CAUSAL, Suite, row

CANDIDATES = (OURS, TORCH_DEFAULT, "torch-cudnn", "torch-flash")
SUITE = Suite(
    tuple(
        row(shape, F16, mask, method="graph", device="cuda", candidates=CANDIDATES)
        for shape in ((2, 8, 512, 64), (1, 16, 1024, 64), (1, 32, 512, 128), (1, 8, 256, 64))
        for mask in FULL_AND_CAUSAL
    ),
    {"round_seconds": 0.02, "overhead": False, "more_seconds": 2.0},
    (FA3, FA4),
)
