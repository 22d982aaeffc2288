"""The layouts of the kernels' Params structs, and the fields that many of them share."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from typing import TYPE_CHECKING, Any

from ..jit import TensorMap, params_struct
from ..jit.compile import KERNELS
from ..masks import Causal
from ..terms import Spans
from ..terms.keep import PackedKeep

if TYPE_CHECKING:
    from ..problem import Problem
    from ..target import Target

LOG2_E = math.log2(math.e)
ONCE_ROOM = 32  # bytes, sizeof(OnceRoom) of kernels/common/scores.cuh
_STRIDES = ("batch_stride", "head_stride", "seq_stride")


class Strided(ctypes.Structure):
    """A tensor as kernels/sm80 sees it: `tilewise::sm80::Tensor`, strides in 16-bit numbers. A `View` fills it."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in _STRIDES)]


_KINDS: dict[str, type[Any]] = {
    "ptx::TensorMap": TensorMap,
    "Tensor": Strided,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    **dict.fromkeys(("int", "Order", "Walk"), ctypes.c_int),
}


def mirror(header: str, name: str) -> type[ctypes.Structure]:
    """A struct of numbers, pointers and tensors, as a header of kernels/ declares it.

    Why from its text: its members are listed once. Every translation unit asserts their offsets and sizes, so what is
    read wrongly here does not compile there.
    """
    text = re.sub(r"//[^\n]*", "", (KERNELS / header).read_text())
    body = re.search(rf"\bstruct {name} {{(.*?)}};", text, re.DOTALL)
    assert body is not None, (header, name)
    constants = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    fields: dict[str, type[Any]] = {}
    for kind, members in re.findall(r"\s*(?:const )?((?:unsigned )?[\w:]+(?: long)?\**)\s+([^;]+);", body[1]):
        base = ctypes.c_void_p if kind.endswith("*") else _KINDS[kind]
        for member, count in re.findall(r"(\w+)(?:\[(\w+)\])?", members):
            fields[member] = base * int(constants[count]) if count else base
    return params_struct(name, **fields)


_END = "_pad_end"  # marks where a struct that others derive from ends


@functools.cache
def extended(base: type[ctypes.Structure], members: tuple[tuple[str, type[Any]], ...]) -> type[ctypes.Structure]:
    """A struct with the members of another one before its own."""
    if not members:
        return base
    own = {name: kind for name, kind, *_ in base._fields_ if name == _END or not name.startswith("_pad")}
    last = getattr(base, list(own)[-1])
    # A struct that another one derives from keeps its size; one that derives itself lends what is left of it.
    if _END not in own:
        own[_END] = ctypes.c_char * (ctypes.sizeof(base) - last.offset - last.size)
    return params_struct(base.__name__, **own, **dict(members))


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
        "longest_first": int(_grows(problem)),
    }


def _grows(problem: Problem) -> bool:
    """Later tiles of queries may see more keys: under a causal mask, by spans, whose ends never fall, and by a boolean
    tensor of which nothing is known but that queries differ: most of those are causal."""
    return isinstance(problem.mask, Causal) or any(
        isinstance(term, Spans) or (isinstance(term, PackedKeep) and not term.rows_alike) for term in problem.scores
    )


# Of a section of causal tiles, per multiprocessor: fewer than MIN_WAVES make it one of WIDE_WAVES. Measured.
MIN_WAVES, WIDE_WAVES = 2.5, 4
# Where the cache holds this many KV heads, a section of few waves is better left alone: there keys are short, and what
# wider sections gain at their end they lose by reading more from DRAM. Measured at 512 keys and at 4096.
MAX_HELD_TO_WIDEN = 16


def head_sections(problem: Problem, target: Target, number_bytes: int, waves: float = math.inf) -> int:
    """How many groups of (batch, head) pairs are worked on one after the other.

    Equal tiles: pairs that share their keys make a section, so that neighbours read the same keys from DRAM once.
    Tiles that grow, as causal ones: about as many pairs as the L2 cache holds, since the longest of a section come
    first and the shortest fill the gaps. Rounded down: long tiles of a small last section would have little beside
    them. For the same reason sections of few of all `waves` are made wider: tiles of a head that start together read
    the same keys, so that the cache need not hold all of them.
    """
    pairs = problem.batch * problem.heads_q
    if not _grows(problem):
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
    max_heads = max(1, int(target.l2_bytes * share) // (problem.group * problem.seq_q * columns))
    return -(-problem.batch * problem.heads_kv // max_heads)
