"""Packed sequences: kernels/common/packed.cuh.

Sequences of different lengths stand behind one another in (1, heads, total, dim) views, and their offsets are on the
device. One small kernel makes of the offsets a table of the tiles of one tile shape, longest sequence first; kernels
with PACKED extents take their work, and their places in scratch, from it. What was made serves every call until the
offsets change (`program.Prepared`).

The host knows the sizes of the tensors, the number of sequences, and bounds of their lengths. Grids and scratch go by
`total / block + sequences` tiles, whatever the lengths are; which tiles to choose is decided for as many sequences
of the largest lengths (`as_batch`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ..masks import Causal, Full, Packed
from .division import Division
from .extents import Extents
from .params import mirror, tiles
from .program import Address, Launch, Prepared, Program, Stride
from .source import kernel_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..jit import Unit
    from ..problem import Problem
    from ..target import Target

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
_DIMS = ("batch", "head", "seq")


def _rows(name: str) -> tuple[tuple[str, type[object]], ...]:
    return ((name, _POINTER), *((f"{name}_{dim}_stride", _LONG) for dim in _DIMS))


def stored_rows(name: str, operand: str) -> dict[str, object]:
    """Of results whose rows are stored one by one: those of a tile that crosses the end of its sequence."""
    return {name: Address(operand), **{f"{name}_{dim}_stride": Stride(operand, i) for i, dim in enumerate(_DIMS)}}


PACKED = Extents(
    "tilewise::Packed",
    '#include "common/packed.cuh"',
    "_packed",
    (
        ("packed_records", _POINTER),
        ("packed_q_tiles", _POINTER),
        ("packed_kv_tiles", _POINTER),
        *_rows("out_rows"),
        *_rows("dk_rows"),
        *_rows("dv_rows"),
        *_rows("dq_rows"),
        ("dq_columns", _INT),
        ("dv_columns", _INT),
        ("ticket_keys", _INT),
        ("packed_rows", _INT),
        ("ends_aligned", _INT),
        ("packed_sequences", _INT),
    ),
    keeps_records=True,
)
_WARPS = 8
_RECORD_INTS = 12
_MORE = 2  # sequences: of rows, and of keys, behind the last offset
_HEADER = "common/packed.cuh"
_Params = mirror(_HEADER, "PackParams")


@functools.cache
def pack_unit(arch: str) -> Unit:
    return kernel_unit(
        "table_of_packed",
        _HEADER,
        "pack_sequences",
        _Params,
        arch,
        threads=32 * _WARPS,
        checks=(f"pack_warps == {_WARPS} && sizeof(PackedSequence) == {4 * _RECORD_INTS}",),
    )


def mask_of(problem: Problem) -> Packed:
    assert isinstance(problem.mask, Packed)
    return problem.mask


def as_batch(problem: Problem) -> Problem:
    """As many sequences as there are, of the largest lengths: what decides which tiles are best. Others are as they
    are."""
    mask = problem.mask
    if not isinstance(mask, Packed):
        return problem
    longest_q, longest_kv = (
        min(longest or total, total) for longest, total in ((mask.max_q, problem.seq_q), (mask.max_kv, problem.seq_kv))
    )
    count = problem.batch * mask.sequences
    return problem.with_(batch=count, seq_q=max(1, longest_q), seq_kv=max(1, longest_kv), mask=mask.inner)


class Table(NamedTuple):
    """The tiles of queries of `block_q` rows, and of keys of `block_kv`, of all sequences of a problem."""

    q_room: int
    kv_room: int
    fields: dict[str, object]
    prepared: Prepared

    def told(self, launch: Launch, **more: object) -> Launch:
        """A launch whose kernel has PACKED extents, with what that is told."""
        params = PACKED.params(launch.params)
        names = {name for name, *_ in params._fields_}
        fields = {name: value for name, value in (self.fields | more).items() if name in names}
        return launch._replace(params=params, fields={**launch.fields, **fields})


def table(
    problem: Problem,
    target: Target,
    block_q: int,
    block_kv: int,
    *,
    by_keys: bool,
    number_bytes: int = 2,
    slots: int = 0,
) -> Table:
    """The table of a kernel of these tiles; `by_keys`: its work is tiles of keys, of which the device has so many at
    once (`slots`)."""
    mask = mask_of(problem)
    in_batch = mask.sequences + _MORE
    q_room = problem.batch * (problem.seq_q // block_q + in_batch)
    kv_room = problem.batch * (problem.seq_kv // block_kv + in_batch) if by_keys else 0
    arguments = {
        "cu_q": Address("cu_seqlens_q"),
        "cu_k": Address("cu_seqlens_kv"),
        "used_k": Address("seqused_k") if mask.used else None,
        "left_k": Address("leftpad_k") if mask.padded else None,
        "records": Address("packed_records"),
        "q_tiles": Address("packed_q_tiles"),
        "kv_tiles": Address("packed_kv_tiles") if by_keys else None,
        "batches": problem.batch,
        "sequences": mask.sequences,
        "total_q": problem.seq_q,
        "total_k": problem.seq_kv,
        "block_q": block_q,
        "block_kv": block_kv,
        "q_room": q_room,
        "kv_room": kv_room,
        "heads": problem.heads_kv if by_keys else problem.heads_q,
        "section_keys": _section_keys(problem, target, block_kv, by_keys, number_bytes, slots),
        "section_heads": 1 if by_keys else problem.group,
    }
    count = problem.batch * in_batch
    results = (
        ("packed_records", (count, _RECORD_INTS)),
        ("packed_q_tiles", (1 + q_room, _RECORD_INTS)),
        ("packed_kv_tiles", (1 + kv_room, _RECORD_INTS)),
    )
    launch = Launch(pack_unit(target.arch), _Params, arguments, tiles(count, _WARPS), 32 * _WARPS)
    fields: dict[str, object] = {
        **{name: Address(name) for name, _ in results},
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "packed_rows": block_q,
        "packed_sequences": mask.sequences,
        **band_fields(mask),
    }
    return Table(
        q_room,
        kv_room,
        fields,
        Prepared("cu_seqlens_q", Program((launch,)), results, tuple(one.name for one in mask.operands[1:])),
    )


# CTAs per multiprocessor in a section of a backward, as in division.py.
_SECTION_WAVES = 2


def _section_keys(problem: Problem, target: Target, block_kv: int, by_keys: bool, number_bytes: int, slots: int) -> int:
    """How many keys the heads that are worked on together have, as params.head_sections and division.py say of a
    batch; 0: those of one KV head."""
    if not isinstance(mask_of(problem).inner, Causal):
        return 0
    if by_keys:
        return _SECTION_WAVES * slots * block_kv
    return target.l2_bytes // 2 // ((problem.head_dim + problem.head_dim_v) * number_bytes)


def band_fields(mask: Packed) -> dict[str, int]:
    """The band of a sequence whose first query is aligned with its first key, and whether the last ones are instead."""
    left, right, offset = mask.inner.band(1, 1)
    aligned = getattr(mask.inner, "align", "top-left") == "bottom-right"
    return {"band_first_shift": offset - left, "band_end_shift": offset + right + 1, "ends_aligned": int(aligned)}


def undivided(problem: Problem, table: Table, slots: int) -> Division:
    """How a backward goes by a table: a CTA for every tile of keys that there is room for."""
    grid = table.kv_room * problem.heads_kv
    return Division(1 << 30, table.kv_room, 1, False, grid, grid / max(1, slots), 0.0)


def configs(choose: Callable[[Problem, Target], list[Any]], problem: Problem, target: Target) -> list[Any]:
    """The configs of a family that take a problem, which may be packed: those that look at more than one tile of keys,
    and whose kernels mask."""
    if not isinstance(problem.mask, Packed):
        return list(choose(problem, target))
    found = choose(_chosen_by(problem), target)
    return [one for one in found if not getattr(one, "split", False) and not getattr(one, "writes_dq", False)]


def unwritten(problem: Problem) -> frozenset[str]:
    """The gradients of which a backward leaves rows as they are: of keys that are not used."""
    mask = mask_of(problem)
    return frozenset(("dk", "dv") if mask.used or mask.padded else ())


# Causal sequences do best with the tiles of this length, tall and of few keys, and long ones too; heads of 64 up to
# MAX_OF_NARROW keys. 24 of 64 to 2600 tokens, 16 heads of 128: 584 TFLOP/s by tiles of 192 x 64, 546 by 128 x 128;
# 16384 and 100 of 100: 713, 695; 8 of 4096: 635, 629. 64 of 512, heads of 64: 268 by 256 x 64, 239 by 192 x 128; 16 of
# 2048: 438, 441.
CHOSEN_FOR, MAX_OF_NARROW = 512, 2048


def _chosen_by(problem: Problem) -> Problem:
    """The batch by which tiles for a packed problem are chosen: of as many rows, and of a mask whose kernels mask."""
    batch = as_batch(problem)
    seq_q, seq_kv = batch.seq_q, batch.seq_kv
    if isinstance(batch.mask, Causal) and (problem.head_dim > 64 or seq_kv <= MAX_OF_NARROW):
        seq_q, seq_kv = min(seq_q, CHOSEN_FOR), min(seq_kv, CHOSEN_FOR)
    mask = Causal() if isinstance(batch.mask, Full) else batch.mask
    rows = problem.batch * problem.seq_q
    return batch.with_(batch=max(1, tiles(rows, seq_q)), seq_q=seq_q, seq_kv=seq_kv, mask=mask)


def summary(problem: Problem, table: Table) -> str:
    """For `explain`."""
    mask = mask_of(problem)
    mean = problem.seq_q / max(1, mask.sequences)
    return (
        f"{mask.sequences} packed sequences of {mean:.0f} queries on average, at most "
        f"{mask.max_q or problem.seq_q}: up to {table.q_room} tiles of queries, handed out longest first by a table "
        "that the device makes of the offsets"
    )
