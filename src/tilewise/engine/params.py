"""What kernels are told: the layouts of their Params structs, and the fields that many of them share."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

from ..jit import TensorMap, params_struct
from ..masks import Causal

if TYPE_CHECKING:
    from ..problem import Problem
    from ..target import Target

LOG2_E = math.log2(math.e)
MAP, POINTER, INT, LONG, FLOAT = TensorMap, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float


class Strided(ctypes.Structure):
    """A tensor as kernels/sm80 sees it: `tilewise::sm80::Tensor`, strides in 16-bit numbers. A `View` fills it."""

    _fields_ = [("data", POINTER), ("batch_stride", LONG), ("head_stride", LONG), ("seq_stride", LONG)]


def struct(name: str, *members: tuple[type[Any], str]) -> type[ctypes.Structure]:
    """The mirror of a C++ struct: (type, names of the members of that type, one after another), in its order."""
    return params_struct(name, **{member: kind for kind, names in members for member in names.split()})


@functools.cache
def extended(base: type[ctypes.Structure], members: tuple[tuple[str, type[Any]], ...]) -> type[ctypes.Structure]:
    """A struct with the members of another one before its own."""
    if not members:
        return base
    own = {name: kind for name, kind, *_ in base._fields_ if not name.startswith("_pad")}
    last = getattr(base, list(own)[-1])
    if gap := ctypes.sizeof(base) - last.offset - last.size:  # a struct that another one derives from keeps its size
        own["_pad_end"] = ctypes.c_char * gap
    return params_struct(base.__name__, **own, **dict(members))


def stride_names(*operands: str) -> str:
    return " ".join(f"{operand}_{dim}_stride" for operand in operands for dim in ("batch", "head", "seq"))


def shape_params(problem: Problem) -> dict[str, int]:
    """What every kernel is told of the problem."""
    left, right, offset = problem.band
    return {
        "batch": problem.batch,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
    }


def matrix_bytes(rows: int, columns: int) -> int:
    """Of 16-bit numbers in shared memory: panels of 64 columns, 128 bytes per row."""
    return -(-columns // 64) * rows * 128


def tiles(length: int, block: int) -> int:
    """How many blocks cover a length."""
    return -(-length // block)


def query_tiles(problem: Problem, block_q: int) -> int:
    """Output tiles of a forward."""
    return problem.batch * problem.heads_q * tiles(problem.seq_q, block_q)


def forward_order(problem: Problem, target: Target, number_bytes: int, waves: float = math.inf) -> dict[str, int]:
    """In which order a forward works through its tiles."""
    return {
        "sections": head_sections(problem, target, number_bytes, waves),
        "longest_first": int(isinstance(problem.mask, Causal)),
    }


# Of a section of causal tiles, per multiprocessor: fewer than MIN_WAVES make it one of WIDE_WAVES. Measured.
MIN_WAVES, WIDE_WAVES = 2.5, 4
# Where the cache holds this many KV heads, a section of few waves is better left alone: there keys are short, and what
# wider sections gain at their end they lose by reading more from DRAM. Measured at 512 keys and at 4096.
MAX_HELD_TO_WIDEN = 16


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
    held = max(1, target.l2_bytes // 2 // kv_bytes)
    sections = max(1, pairs // (held * problem.group))
    if waves >= MIN_WAVES * sections or held > MAX_HELD_TO_WIDEN:
        return sections
    return max(1, min(sections, round(waves / WIDE_WAVES)))


def kv_head_sections(problem: Problem, target: Target, number_bytes: int, share: float = 2 / 3) -> int:
    """Into how many runs a backward divides the KV heads, so that what a run reads fills a share of the L2 cache.

    A run's queries, the gradients of their outputs and the float32 sums of dQ; the share was measured.
    """
    columns = (number_bytes + 4) * problem.head_dim + number_bytes * problem.head_dim_v
    most = max(1, int(target.l2_bytes * share) // (problem.group * problem.seq_q * columns))
    return -(-problem.batch * problem.heads_kv // most)
