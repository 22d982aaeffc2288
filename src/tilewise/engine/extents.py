"""Where the sequences of a problem lie, as kernels/common/extents.cuh describes them to every kernel.

A kernel is compiled with an Extents as it is with its score policy: the type is named in its translation unit, and what
it reads beside the parameters of all kernels stands behind those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .params import extended

if TYPE_CHECKING:
    import ctypes

    from ..problem import Problem


class Extents(NamedTuple):
    """A struct of kernels/common/extents.cuh, or one that `cpp_source` defines."""

    cpp_type: str
    cpp_source: str = ""
    suffix: str = ""
    """Of a kernel's name."""
    operands: tuple[tuple[str, type[Any]], ...] = ()
    """The members of its C++ `Operands`, as ctypes."""
    keeps_records: bool = False
    """Plans in shared memory grow, by less than SMEM_UNIT in all."""

    def params(self, base: type[ctypes.Structure]) -> type[ctypes.Structure]:
        """The parameters of a kernel with these extents: its own, then the operands."""
        return extended(base, self.operands)


BATCHED = Extents("tilewise::Batched")
SMEM_UNIT = 1024  # what the shared memory of a kernel is a multiple of


def shape_params(problem: Problem) -> dict[str, int]:
    """What the parameters of a kernel say of sequences that are all alike."""
    left, right, offset = problem.band
    return {
        "batch": problem.batch,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
    }
