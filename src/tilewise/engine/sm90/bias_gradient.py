"""The gradient of a bias that batches or heads share, in 16 bits on Hopper: kernels/sm90/bias_gradient.cuh.

A launch of a backward, behind the one that makes its row terms. Scores are computed again, for all pairs that share
a tile of the bias one after another, so that their sum needs no memory and has the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...element import Element
from ...operands import SCORE_DIMS, Sums
from ...terms.keep import Keep, PackedKeep
from ..extents import BATCHED, shape_params
from ..params import matrix_bytes, mirror, tiles
from ..policy import params_for, term_params
from ..program import Address, Launch, Map, Stride
from ..rules import class_of, learning
from ..source import Kernel
from .shared import WarpgroupConfig
from .staged_bias import StagedBias

if TYPE_CHECKING:
    from ...problem import Problem
    from ...target import Target

ARCH = "sm_90a"
MAX_HEAD_DIM = 128
_SLOTS = {64: 6, 96: 3, 128: 3}
_TILE = 128  # queries, and keys


@dataclass(frozen=True, slots=True)
class Config(WarpgroupConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/bias_gradient.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::BiasGradientConfig"
    threads: ClassVar[int] = 384
    ctas_per_sm: ClassVar[int] = 1
    has_terms: ClassVar[bool] = True
    block_q: ClassVar[int] = _TILE
    block_kv: ClassVar[int] = _TILE

    element: Element
    head_dim: int
    head_dim_v: int
    slots: int

    @property
    def smem_bytes(self) -> int:
        """`sizeof(BiasGradientSmem<config>)`; the generated source asserts it."""
        operands = self.slots * 2 * matrix_bytes(_TILE, max(self.head_dim, self.head_dim_v))
        return operands + 2 * matrix_bytes(64, _TILE) + -(-8 * (2 * self.slots + 2) // 1024) * 1024

    @property
    def name(self) -> str:
        return f"bias_gradient_{self.heads_name}"


_Params = mirror("sm90/bias_gradient.cuh", "BiasGradientParams")
unit = Kernel("sm90/bias_gradient.cuh", "bias_gradient", _Params, "BiasGradientSmem", ("threads", "block_q")).unit


def sums_of(problem: Problem) -> Sums:
    """What the kernel leaves: the gradient itself, whole."""
    (operand,) = _bias(problem).tensors
    assert operand.dtype is not None
    return Sums(SCORE_DIMS, operand.shape(problem), operand.full_shape(problem), operand.dtype)


def makes_it(problem: Problem) -> bool:
    """Whether the kernel serves a problem with a staged bias: pairs share it, and three slots fit."""
    return bool(_bias(problem).over) and max(class_of(problem)) <= MAX_HEAD_DIM


def _bias(problem: Problem) -> StagedBias:
    return next(term for term in problem.scores if isinstance(term, StagedBias))


def _without_a_map(problem: Problem) -> Problem:
    """The problem with its boolean tensor as it was given."""
    plain = [Keep(term.over, term.paired) if isinstance(term, PackedKeep) else term for term in problem.scores]
    return problem.with_(scores=tuple(plain))


def launch(problem: Problem, target: Target, rows: dict[str, Any], row_count: int, factors: dict[str, float]) -> Launch:
    """`rows` are the row terms `start_s` and `start_dp`, `row_count` per head; `factors` are numbers that it reads."""
    problem = _without_a_map(learning(problem, ()))
    over, dims = _bias(problem).over, class_of(problem)
    config = Config(Element.of(problem.dtype), *dims, _SLOTS[max(dims)])
    shared = (problem.batch if "batch" in over else 1, problem.heads_q if "head" in over else 1)
    q_tiles, kv_tiles = tiles(problem.seq_q, _TILE), tiles(problem.seq_kv, _TILE)
    fields = {
        "q_map": Map("q", _TILE),
        "k_map": Map("k", _TILE),
        "v_map": Map("v", _TILE),
        "dout_map": Map("dout", _TILE),
        **rows,
        **shape_params(problem),
        "heads": problem.heads_q,
        "shared_batches": shared[0],
        "shared_heads": shared[1],
        "rows": row_count,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        **term_params(problem, precise=False, backward=True),
        "bias_map": Map("bias", 64, shared=True),
        "dbias": Address("dbias"),
        **{f"dbias_{dim}_stride": Stride("dbias", i) for i, dim in enumerate(SCORE_DIMS)},
        **factors,
    }
    work = problem.batch // shared[0] * (problem.heads_q // shared[1]) * q_tiles * kv_tiles
    kernel = unit(config, ARCH, problem.scores, BATCHED)
    params = BATCHED.params(params_for(problem, _Params))
    return Launch(kernel, params, fields, min(work, target.sms), config.threads)
