"""The tile map of a boolean mask: kernels/common/tile_map.cuh.

A mask that is data has no rule that says which tiles it empties. One kernel reads it once, packs it into bits and
marks every cell of 64 queries by 16 keys; others make of the cells, for the tile shape of one kernel, a list of the
tiles that it visits, per tile of queries (or of keys, for a backward): first those that nothing hides, then those that
the kernel masks. Bits by keys are made of those by queries.
Kernels with MAPPED extents go through these lists; with MAPPED_IN_TURNS their tiles of keys know when their turn at
a dQ is; with MAPPED_KEYS they go through the tiles of the band, and a list says whether these are visited and masked.
What was made for a mask serves every call until its tensor changes (`program.Prepared`): the cells and the bits all
kernels of its problem, the rest those of one tile shape.
"""

from __future__ import annotations

import ctypes
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..terms.keep import Keep, PackedKeep
from .extents import BATCHED, Extents
from .params import mirror, tiles
from .program import Address, Launch, Prepared, Program, Stride
from .source import kernel_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..jit import Unit
    from ..problem import Problem
    from .program import Shape

CELL_ROWS, CELL_KEYS, _WARPS = 64, 16, 4
_KEYS_PER_WARP = 32 * CELL_KEYS
_TURNED_ROWS, _TURNED_KEYS = 128, 64
# Min scores at which skipping tiles saves more than an uncached map costs: about ten microseconds.
MIN_SCORES = 1 << 24
_MAX_BLOCK = 256 + 32  # queries or keys of a tile, and a word more
LIST_COUNTS = 6  # of a list: its full tiles, all of its tiles, and where those end that each 64 queries see

MAPPED = Extents(
    "tilewise::Mapped",
    suffix="_mapped",
    operands=(
        ("tile_counts", ctypes.c_void_p),
        ("tile_lists", ctypes.c_void_p),
        ("list_batch_stride", ctypes.c_int),
        ("list_head_stride", ctypes.c_int),
        ("list_outer_tiles", ctypes.c_int),
        ("list_room", ctypes.c_int),
    ),
)
MAPPED_KEYS = Extents("tilewise::MappedKeys", suffix="_mapped_keys", operands=MAPPED.operands)
MAPPED_IN_TURNS = Extents(
    "tilewise::MappedInTurns",
    suffix="_mapped_in_turns",
    operands=(*MAPPED.operands, ("tile_turns", ctypes.c_void_p)),
)


class Planes(NamedTuple):
    """Which (batch, head) pairs a mask tells apart: 1 where it is broadcast."""

    batch: int
    heads: int

    @property
    def total(self) -> int:
        return self.batch * self.heads


class Lists(NamedTuple):
    """The shape of the lists of one kernel: one per plane and outer tile, with room for every inner tile."""

    planes: Planes
    outer_tiles: int
    inner_tiles: int
    by_keys: bool

    @property
    def counts_shape(self) -> tuple[int, int, int]:
        return self.planes.total, self.outer_tiles, LIST_COUNTS

    @property
    def tiles_shape(self) -> tuple[int, int, int]:
        return self.planes.total, self.outer_tiles, self.inner_tiles

    @property
    def turns_shape(self) -> tuple[int, int, int, int]:
        """Of lists by keys: per tile of queries and tile of keys, how many are before it and behind it."""
        return self.planes.total, self.inner_tiles, self.outer_tiles, 2


class TileMap(NamedTuple):
    """What a kernel of one tile shape is compiled with and told of a map; of MAPPED extents, or without a map."""

    extents: Extents = BATCHED
    fields: Mapping[str, object] = MappingProxyType({})
    prepared: tuple[Prepared, ...] = ()

    @property
    def is_used(self) -> bool:
        return bool(self.prepared)

    @property
    def summary(self) -> tuple[str, ...]:
        return ("a tile map of `keep` says which tiles are visited, and which are masked",) if self.is_used else ()


def packed(problem: Problem, lines: str) -> Problem:
    """The problem for kernels that go by a map, where its boolean tensor is the only one of its terms that hides.

    `lines`: of the bits that they read, as PackedKeep says.
    """
    hiding = [term for term in problem.scores if term.hides]
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    if len(hiding) != 1 or not isinstance(hiding[0], Keep) or scores < MIN_SCORES:
        return problem
    keep = hiding[0]
    packs = PackedKeep(keep.over, keep.paired, "queries" if keep.rows_alike else lines)
    return problem.with_(scores=tuple(packs if term is keep else term for term in problem.scores))


def map_for(
    problem: Problem,
    block_q: int,
    block_kv: int,
    arch: str,
    *,
    by_keys: bool,
    in_turns: bool = False,
    may_be_banded: bool = False,
) -> TileMap:
    """The map for a kernel of these tiles, where the problem's boolean tensor is packed.

    `by_keys`: a list says which tiles of queries a tile of keys visits; `in_turns`: tiles of keys know their turns;
    `may_be_banded`: the kernel is compiled with MAPPED_KEYS where all queries see the same keys.
    """
    term = packed_term(problem)
    if term is None:
        return TileMap()
    marks = _Marks.of(problem, term)
    lists = lists_of(problem, marks.planes, block_q, block_kv, by_keys=by_keys)
    prepared = [marks.prepared(arch), _lists_prepared(problem, marks, lists, block_q, block_kv, arch, in_turns)]
    bits, lines, words = "keep_bits", marks.lines, marks.line_words
    if term.lines == "keys":
        bits, lines, words = "key_bits", marks.seq_kv, marks.turned_words
        prepared.append(marks.turned(arch))
    fields: dict[str, object] = {
        "tile_counts": Address("tile_counts"),
        "tile_lists": Address("tile_lists"),
        "list_batch_stride": lists.planes.heads if lists.planes.batch > 1 else 0,
        "list_head_stride": int(lists.planes.heads > 1),
        "list_outer_tiles": lists.outer_tiles,
        "list_room": lists.inner_tiles,
        "keep_bits": Address(bits),
        "keep_bits_batch_stride": marks.planes.heads * lines * words if marks.planes.batch > 1 else 0,
        "keep_bits_head_stride": lines * words if marks.planes.heads > 1 else 0,
        "keep_bits_line_stride": words,
    }
    if in_turns:
        fields["tile_turns"] = Address("tile_turns")
    extents = MAPPED_IN_TURNS if in_turns else MAPPED_KEYS if may_be_banded and term.rows_alike else MAPPED
    return TileMap(extents, fields, tuple(prepared))


def packed_term(problem: Problem) -> PackedKeep | None:
    return next((term for term in problem.scores if isinstance(term, PackedKeep)), None)


def _words(length: int) -> int:
    """Of a line of bits: the last tile may read past its end, and lines begin at multiples of the 32 bytes that the L2
    cache writes as a whole."""
    return tiles(length + _MAX_BLOCK, 256) * 8


_HEADER = "common/tile_map.cuh"
_MarkParams = mirror(_HEADER, "MarkParams")
_TurnParams = mirror(_HEADER, "TurnParams")
_ListParams = mirror(_HEADER, "ListParams")


class _Marks(NamedTuple):
    """What one read of a mask makes, the same for all kernels that follow."""

    planes: Planes
    seq_q: int
    seq_kv: int
    rows_alike: bool

    @classmethod
    def of(cls, problem: Problem, term: PackedKeep) -> _Marks:
        planes = Planes(1 if "batch" in term.over else problem.batch, 1 if "head" in term.over else problem.heads_q)
        return cls(planes, problem.seq_q, problem.seq_kv, term.rows_alike)

    @property
    def lines(self) -> int:
        return 1 if self.rows_alike else self.seq_q

    @property
    def line_words(self) -> int:
        return _words(self.seq_kv)

    @property
    def turned_words(self) -> int:
        return _words(self.seq_q)

    @property
    def cells(self) -> dict[str, int]:
        """The fields of kernels that describe them."""
        return {
            "seq_q": self.seq_q,
            "seq_k": self.seq_kv,
            "row_blocks": tiles(self.seq_q, CELL_ROWS),
            "row_cells": tiles(self.seq_kv, CELL_KEYS),
        }

    def prepared(self, arch: str) -> Prepared:
        """`keep_cells` and `keep_bits` of `keep`, which is (batch, heads, seq_q, seq_kv) with strides of 0 where it is
        broadcast."""
        cells = self.cells
        fields = {
            "keep": Address("keep"),
            **{f"{name}_stride": Stride("keep", dim) for dim, name in enumerate(("batch", "head", "row", "key"))},
            "cells": Address("keep_cells"),
            "bits": Address("keep_bits"),
            "lines": self.lines,
            "line_words": self.line_words,
            "heads": self.planes.heads,
            "planes": self.planes.total,
            **cells,
        }
        words = tiles(self.seq_kv, _KEYS_PER_WARP)
        marking = self.planes.total * cells["row_blocks"] * words
        results = (
            ("keep_cells", (self.planes.total, cells["row_blocks"], words, 2)),
            ("keep_bits", (self.planes.total, self.lines, self.line_words)),
        )
        launch = _launch(map_unit(arch, "mark_cells"), _MarkParams, fields, marking)
        return Prepared("keep", Program((launch,)), results, shared=("marks", arch, self))

    def turned(self, arch: str) -> Prepared:
        """`key_bits` of `keep_bits`."""
        fields = {
            "bits": Address("keep_bits"),
            "turned": Address("key_bits"),
            "line_words": self.line_words,
            "turned_words": self.turned_words,
            "planes": self.planes.total,
            "seq_q": self.seq_q,
            "seq_k": self.seq_kv,
        }
        turning = self.planes.total * tiles(self.seq_q, _TURNED_ROWS) * tiles(self.seq_kv, _TURNED_KEYS)
        results = (("key_bits", (self.planes.total, self.seq_kv, self.turned_words)),)
        launch = _launch(map_unit(arch, "turn_bits"), _TurnParams, fields, turning)
        return Prepared("keep_bits", Program((launch,)), results, shared=("turned", arch, self))


def _lists_prepared(
    problem: Problem, marks: _Marks, lists: Lists, block_q: int, block_kv: int, arch: str, in_turns: bool
) -> Prepared:
    """`tile_counts`, `tile_lists` and, `in_turns`, `tile_turns` of `keep_cells`."""
    left, right, offset = problem.band
    fields = {
        "cells": Address("keep_cells"),
        "counts": Address("tile_counts"),
        "tiles": Address("tile_lists"),
        "turns": Address("tile_turns") if in_turns else None,
        "lists": lists.planes.total,
        "planes_per_list": marks.planes.total // lists.planes.total,
        **marks.cells,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "block_q": block_q,
        "block_kv": block_kv,
        "outer_tiles": lists.outer_tiles,
        "inner_tiles": lists.inner_tiles,
    }
    kind = "in_turns" if in_turns else "by_keys" if lists.by_keys else "by_queries"
    unit = map_unit(arch, f"list_tiles_{kind}")
    launches = [_launch(unit, _ListParams, fields, lists.planes.total * lists.outer_tiles)]
    results: list[tuple[str, Shape]] = [("tile_counts", lists.counts_shape), ("tile_lists", lists.tiles_shape)]
    if in_turns:
        counting = lists.planes.total * lists.inner_tiles
        launches.append(_launch(map_unit(arch, "count_turns"), _ListParams, fields, counting))
        results.append(("tile_turns", lists.turns_shape))
    return Prepared("keep_cells", Program(tuple(launches)), tuple(results))


_CALLS = {
    "mark_cells": ("mark_cells", _MarkParams),
    "turn_bits": ("turn_bits", _TurnParams),
    "list_tiles_by_queries": ("list_tiles<false>", _ListParams),
    "list_tiles_by_keys": ("list_tiles<true>", _ListParams),
    "list_tiles_in_turns": ("list_tiles<true, true>", _ListParams),
    "count_turns": ("count_turns", _ListParams),
}


@functools.cache
def map_unit(arch: str, name: str) -> Unit:
    call, params = _CALLS[name]
    agreed = (
        f"cell_rows == {CELL_ROWS} && cell_keys == {CELL_KEYS} && map_warps == {_WARPS}",
        f"turned_rows == {_TURNED_ROWS} && turned_keys == {_TURNED_KEYS} && list_counts == {LIST_COUNTS}",
    )
    return kernel_unit(f"{name}_of_keep", _HEADER, call, params, arch, threads=32 * _WARPS, checks=agreed)


def _launch(unit: Unit, params: type[ctypes.Structure], fields: Mapping[str, object], warps: int) -> Launch:
    overlaps = int(unit.arch[3:].rstrip("af")) >= 90  # before Hopper the driver refuses it
    return Launch(unit, params, fields, tiles(warps, _WARPS), 32 * _WARPS, overlap=overlaps)


def lists_of(problem: Problem, planes: Planes, block_q: int, block_kv: int, *, by_keys: bool) -> Lists:
    """The lists of a kernel of these tiles. One by keys works on all query heads of a KV head, which share a list."""
    q_tiles, kv_tiles = tiles(problem.seq_q, block_q), tiles(problem.seq_kv, block_kv)
    if not by_keys:
        return Lists(planes, q_tiles, kv_tiles, by_keys=False)
    heads = problem.heads_kv if planes.heads > 1 else 1
    return Lists(Planes(planes.batch, heads), kv_tiles, q_tiles, by_keys=True)
