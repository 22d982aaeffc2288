"""Where the sequences of a problem lie, as kernels/common/extents.cuh describes them to every kernel.

A kernel is compiled with an Extents as it is with its score policy: the type is named in its translation unit, and what
it reads beside the parameters of all kernels stands behind those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .params import extended, tiles
from .program import Address

if TYPE_CHECKING:
    import ctypes

    from ..problem import Problem
    from .division import Division


class Extents(NamedTuple):
    """A struct of kernels/common/extents.cuh, or one that `cpp_source` defines."""

    cpp_type: str
    cpp_source: str = ""
    suffix: str = ""
    """The part of a kernel's name that stands for it."""
    operands: tuple[tuple[str, type[Any]], ...] = ()
    """The members of its C++ `Operands`, as ctypes."""
    keeps_records: bool = False
    """Plans in shared memory grow, by less than SMEM_UNIT in all."""

    def params(self, base: type[ctypes.Structure]) -> type[ctypes.Structure]:
        """The parameters of a kernel with these extents: its own, then the operands."""
        return extended(base, self.operands)


BATCHED = Extents("tilewise::Batched")
SMEM_UNIT = 1024  # what the shared memory of a kernel is a multiple of


def division_fields(problem: Problem, divided: Division, q_tiles: int, kv_tiles: int) -> dict[str, int]:
    """The fields of every backward that describe its sequences, and how the work on them is divided."""
    return {
        **shape_params(problem),
        "heads_kv": problem.heads_kv,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
    }


def row_fields(problem: Problem) -> dict[str, object]:
    """The fields of the kernel before a backward that describe the rows of out and dout."""
    return {
        "lse": Address("lse"),
        "dlse": Address("dlse", optional=True),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "head_dim_v": problem.head_dim_v,
    }


def forward_fields(problem: Problem, block_q: int, order: dict[str, int]) -> dict[str, object]:
    """The fields that every forward has, with the order of its tiles."""
    return {
        **shape_params(problem),
        "lse": Address("lse") if problem.needs_lse or problem.needs_grad else None,
        "heads": problem.heads_q,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": tiles(problem.seq_q, block_q),
        **order,
    }


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
