"""The name of a kernel's score policy: what `kernels/common/scores.cuh` composes at compile time.

A term of a problem's scores is a struct there and a row here.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Bounds(Enum):
    """Which ends of a query's band of keys a kernel looks at, in the tiles that the mask cuts."""

    END_OF_KEYS = "end_of_keys"
    END = "end"
    BOTH = "both"


def scores_type(
    *, softcap: bool, precise: bool = False, bounds: Bounds = Bounds.BOTH, terms: Sequence[str] = ()
) -> str:
    """The C++ type of a policy.

    `precise`: in float32, where 16-bit kernels use approximate instructions. `terms`: the C++ names of further terms,
    in the order in which they are applied, after the softcap and before the band.
    """
    cap = [f"tilewise::Softcap<tilewise::Precision::{'precise' if precise else 'fast'}>"] if softcap else []
    band = f"tilewise::BandMask<tilewise::Bounds::{bounds.value}>"
    return f"tilewise::Scores<{', '.join([*cap, *terms, band])}>"
