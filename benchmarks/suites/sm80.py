"""Our FlashAttention-2 kernels, by name, against PyTorch's."""

from __future__ import annotations

from typing import Any

from tilewise.lab.studies.suites import BACKWARD, LONG, Suite, in_turn, table

_SM80: dict[str, Any] = {"device": "cuda", "candidates": ("sm80", "torch-flash")}
SUITE = Suite(in_turn(table(LONG, **_SM80, label="forward"), table(LONG, **_SM80, **BACKWARD)))
