"""The name of a kernel's score policy: what `kernels/common/scores.cuh` composes at compile time.

A term of a problem's scores is a struct there and a row here.
"""

from __future__ import annotations

from enum import Enum


class Bounds(Enum):
    """Which ends of a query's band of keys a kernel looks at, in the tiles that the mask cuts."""

    END_OF_KEYS = "end_of_keys"
    END = "end"
    BOTH = "both"


def scores_type(*, softcap: bool, precise: bool = False, bounds: Bounds = Bounds.BOTH) -> str:
    """The C++ type of a policy. `precise`: in float32, where 16-bit kernels use approximate instructions."""
    terms = []
    if softcap:
        terms.append(f"tilewise::Softcap<tilewise::Precision::{'precise' if precise else 'fast'}>")
    terms.append(f"tilewise::BandMask<tilewise::Bounds::{bounds.value}>")
    return f"tilewise::Scores<{', '.join(terms)}>"
