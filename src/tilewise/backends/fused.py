"""What our fused backends share on the host: what kernels are told, and calls with all but addresses decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from ..jit import ArgumentsPerThread, Launch, function_for
from ..jit.memo import keep
from ..masks import Causal
from . import empty_out

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..jit import Arguments, Unit
    from ..problem import Problem
    from ..target import Target
    from . import Grads, Wants

LOG2_E = math.log2(math.e)

Tensor = torch.Tensor
BoundForward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Of (q, k, v, bias)."""
ForwardRun = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
"""Of (q, k, v, out, lse)."""
BoundBackward = Callable[..., "Grads"]
"""Of (dout, dlse, q, k, v, out, lse, wants)."""
_Made = TypeVar("_Made")
_MOST_BOUND = 1024
_MOST_LAUNCHES = 64  # of a backward: strides of dout and out, and what is wanted, may vary


def matrix_bytes(rows: int, columns: int) -> int:
    """Of 16-bit numbers in shared memory: panels of 64 columns, 128 bytes a row."""
    return -(-columns // 64) * rows * 128


def query_tiles(problem: Problem, block_q: int) -> int:
    """Output tiles of a forward."""
    return problem.batch * problem.heads_q * -(-problem.seq_q // block_q)


def shape_params(problem: Problem) -> dict[str, int]:
    """What every kernel is told of the problem."""
    left, right, offset = problem.mask.band(problem.seq_q, problem.seq_kv)  # type: ignore[attr-defined]
    return {
        "batch": problem.batch,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
    }


def score_params(problem: Problem) -> dict[str, float]:
    """From products to logarithms to the base of 2; a cap is a tanh between the two, made of exponentials."""
    capped = problem.softcap > 0
    return {
        "scale_log2": (problem.softcap if capped else problem.scale) * LOG2_E,
        "softcap_in": 2 * LOG2_E * problem.scale / problem.softcap if capped else 0.0,
    }


def stride_params(**tensors: Tensor) -> dict[str, int]:
    """`v_batch_stride`, `v_head_stride` and `v_seq_stride` of a tensor `v`, as kernels/sm90 names them."""
    dims = ("batch", "head", "seq")
    return {f"{name}_{dim}_stride": tensor.stride(i) for name, tensor in tensors.items() for i, dim in enumerate(dims)}


# Of a section of causal tiles, per multiprocessor: fewer than MIN_WAVES make it one of WIDE_WAVES. Measured.
MIN_WAVES, WIDE_WAVES = 2.5, 4


def head_sections(problem: Problem, target: Target, number_bytes: int, waves: float = math.inf) -> int:
    """How many groups of (batch, head) pairs are worked on one after the other.

    Equal tiles: pairs that share their keys make a section, so that neighbours read the same keys from DRAM once.
    Causal tiles: about as many pairs as the L2 cache holds, since the longest of a section come first and the shortest
    fill the gaps. Rounded down: long tiles of a small last section would have little beside them. For the same reason
    sections of few of all `waves` are made wider: tiles of a head that start together read the same keys, so that the
    cache need not hold all of them.
    """
    pairs = problem.batch * problem.heads_q
    if not isinstance(problem.mask, Causal):
        return pairs // problem.group
    kv_bytes = problem.seq_kv * (problem.head_dim + problem.head_dim_v) * number_bytes
    held = max(1, target.l2_bytes // 2 // kv_bytes) * problem.group
    sections = max(1, pairs // held)
    return sections if waves >= MIN_WAVES * sections else max(1, min(sections, round(waves / WIDE_WAVES)))


def kv_head_sections(problem: Problem, target: Target, number_bytes: int, share: float = 2 / 3) -> int:
    """Into how many runs a backward divides the KV heads, so that what a run reads fills a share of the L2 cache.

    A run's queries, the gradients of their outputs and the float32 sums of dQ; the share was measured.
    """
    columns = (number_bytes + 4) * problem.head_dim + number_bytes * problem.head_dim_v
    most = max(1, int(target.l2_bytes * share) // (problem.group * problem.seq_q * columns))
    return -(-problem.batch * problem.heads_kv // most)


def remembered(known: dict[Any, _Made], key: Hashable, make: Callable[[], _Made]) -> _Made:
    """What `make` gave for this key the first time; now and then all is forgotten, so that `known` stays small."""
    found = known.get(key)
    return keep(known, key, make(), _MOST_BOUND) if found is None else found


class Stage:
    """One kernel of a call, with its arguments, all but addresses filled in."""

    __slots__ = ("arguments", "launch")

    def __init__(
        self,
        unit: Unit,
        struct: type[Any],
        fixed: dict[str, Any],
        grid: int,
        threads: int,
        device: int,
        overlap_previous: bool = False,
    ) -> None:
        shape = ((grid, 1, 1), (threads, 1, 1), unit.smem_bytes)
        self.launch = Launch(function_for(unit, device), *shape, overlap_previous=overlap_previous)
        self.arguments: Callable[[], Arguments] = ArgumentsPerThread(struct, fixed).mine


def bound_forward(q: Tensor, problem: Problem, make: Callable[[Tensor], ForwardRun]) -> BoundForward:
    """A forward that allocates out and lse and has them filled by what `make` gives for the strides of such an out.

    Where there are no keys nothing is made.
    """
    needs_lse = problem.needs_lse or problem.needs_grad
    like, no_floats = empty_out(q, problem.head_dim_v, problem.layout), q.new_empty(0, dtype=torch.float32)
    shape, strides, lse_shape = tuple(like.shape), like.stride(), tuple(like.shape[:3])
    run = None if problem.empty else make(like)

    def bound(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty_strided(shape, strides)
        lse = no_floats.new_empty(*lse_shape) if needs_lse else None
        if run is None:
            return out.zero_(), lse if lse is None else lse.fill_(-math.inf)
        run(q, k, v, out, lse)
        return out, lse

    return bound


class Given(NamedTuple):
    """The tensors that the launches of a backward are made for: their strides and device count, not their addresses."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class BackwardLaunch(Protocol):
    """All that a call does not have to decide again: one per problem, strides, wants and device."""

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Grads: ...


def bound_backward(problem: Problem, make: Callable[[Given, Wants], BackwardLaunch]) -> BoundBackward:
    """A backward for q, k and v of one shape, strides and device. What else varies decides between a few launches.

    `make` gives one of them; dout and out may be copied before it sees them.
    """
    launches: dict[tuple[Any, ...], BoundBackward] = {}
    empty = problem.empty

    def bound(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, wants: Wants
    ) -> Grads:
        if dlse is not None:
            dlse = dlse.float().contiguous()
        if not lse.is_contiguous():
            lse = lse.contiguous()
        key = (dout.stride(), out.stride(), wants)
        run = launches.get(key)
        if run is None or (dout.data_ptr() | out.data_ptr()) & 15:
            if empty or not any(wants):
                return tuple(  # type: ignore[return-value]
                    torch.zeros_like(tensor) if want else None for tensor, want in zip((q, k, v), wants, strict=True)
                )
            dout, out = _readable(dout), _readable(out)
            key = (dout.stride(), out.stride(), wants)
            run = launches.get(key)
            if run is None:
                run = keep(launches, key, make(Given(dout, q, k, v, out), wants).run, _MOST_LAUNCHES)
        return run(dout, dlse, q, k, v, out, lse)

    return bound


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the float32 scratch of one backward lies, in floats from its beginning.

    `lse` and `row_terms` have a float per query row. Tiles of keys that add up dQ in an order have an integer or two
    per query tile in `turns`; pieces of such tiles have theirs at dK and dV in `piece_turns`.
    """

    lse: int
    row_terms: int
    turns: int
    piece_turns: int
    dq_sums: int
    dkv_sums: int
    floats: int

    @classmethod
    def of(cls, rows: int, turns: int, row_floats: int, piece_turns: int = 0, dkv_sums: int = 0) -> Workspace:
        """For so many rows, turns, and floats per row of dQ; none where nothing is summed."""
        first_piece = 2 * rows + _aligned(turns)
        dq_sums = first_piece + _aligned(piece_turns)
        first_dkv = dq_sums + rows * row_floats
        return cls(0, rows, 2 * rows, first_piece, dq_sums, first_dkv, first_dkv + dkv_sums)


def _aligned(floats: int) -> int:
    return -(-floats // 32) * 32


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself if copies of 16 bytes can read it, else a copy."""
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:3])
    return tensor if aligned and tensor.stride(3) == 1 else tensor.contiguous()
