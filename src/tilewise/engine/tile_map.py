"""The tile map of a boolean mask: kernels/common/tile_map.cuh.

A mask that is data has no rule that says which tiles it empties. One kernel reads it once, packs it into bits and
marks every cell of 64 queries by 16 keys; another makes of the cells, for the tile shape of one kernel, a list of the
tiles that it visits, per tile of queries (or of keys, for a backward): first those that nothing hides, then those that
the kernel masks.
Kernels with MAPPED extents go through these lists. What was made for a mask serves every call until its tensor changes
(`program.Prepared`).
"""

from __future__ import annotations

import ctypes
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..terms.keep import Keep, PackedKeep
from .extents import BATCHED, Extents
from .params import mirror, tiles
from .program import SCRATCH, Address, Launch, Layout, Prepared, Program, Stride
from .source import kernel_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..jit import Unit
    from ..problem import Problem

CELL_ROWS, CELL_KEYS, _WARPS = 64, 16, 8
_KEYS_PER_WARP = 32 * CELL_KEYS
# Scores from which leaving out tiles pays for finding them, where that is not remembered: about ten microseconds.
MIN_SCORES = 1 << 24
_MAX_BLOCK = 256 + 32  # queries or keys of a tile, and a word more

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

    @property
    def counts_shape(self) -> tuple[int, int, int]:
        return self.planes.total, self.outer_tiles, 2

    @property
    def tiles_shape(self) -> tuple[int, int, int]:
        return self.planes.total, self.outer_tiles, self.inner_tiles


class TileMap(NamedTuple):
    """What a kernel of one tile shape is compiled with and told of a map; of MAPPED extents, or without a map."""

    extents: Extents = BATCHED
    fields: Mapping[str, object] = MappingProxyType({})
    prepared: tuple[Prepared, ...] = ()

    @property
    def is_used(self) -> bool:
        return bool(self.prepared)

    @property
    def says(self) -> tuple[str, ...]:
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


def map_for(problem: Problem, block_q: int, block_kv: int, arch: str, *, by_keys: bool) -> TileMap:
    """The map for a kernel of these tiles, where the problem's boolean tensor is packed.

    `by_keys`: a list says which tiles of queries a tile of keys visits.
    """
    term = next((term for term in problem.scores if isinstance(term, PackedKeep)), None)
    if term is None:
        return TileMap()
    planes = Planes(1 if "batch" in term.over else problem.batch, 1 if "head" in term.over else problem.heads_q)
    shape = lists_of(problem, planes, block_q, block_kv, by_keys=by_keys)
    lines, words = _lines(problem, term)
    fields = {
        "tile_counts": Address("tile_counts"),
        "tile_lists": Address("tile_lists"),
        "list_batch_stride": shape.planes.heads if shape.planes.batch > 1 else 0,
        "list_head_stride": int(shape.planes.heads > 1),
        "list_outer_tiles": shape.outer_tiles,
        "list_room": shape.inner_tiles,
        "keep_bits": Address("keep_bits"),
        "keep_bits_batch_stride": planes.heads * lines * words if planes.batch > 1 else 0,
        "keep_bits_head_stride": lines * words if planes.heads > 1 else 0,
        "keep_bits_line_stride": words,
    }
    results = (
        ("tile_counts", shape.counts_shape),
        ("tile_lists", shape.tiles_shape),
        ("keep_bits", (planes.total, lines, words)),
    )
    made = map_program(problem, term, planes, block_q, block_kv, arch, by_keys=by_keys)
    return TileMap(MAPPED, fields, (Prepared("keep", made, results),))


def _lines(problem: Problem, term: PackedKeep) -> tuple[int, int]:
    """How many lines of bits a plane has, and the words of one: the last tile may read past its end."""
    if term.lines == "keys":
        return problem.seq_kv, tiles(problem.seq_q + _MAX_BLOCK, 64) * 2
    return 1 if term.rows_alike else problem.seq_q, tiles(problem.seq_kv + _MAX_BLOCK, 64) * 2


def cells_shape(planes: Planes, problem: Problem) -> tuple[int, int, int]:
    return planes.total, tiles(problem.seq_q, CELL_ROWS), tiles(problem.seq_kv, CELL_KEYS)


_HEADER = "common/tile_map.cuh"
_MarkParams = mirror(_HEADER, "MarkParams")
_ListParams = mirror(_HEADER, "ListParams")


@functools.cache
def mark_unit(arch: str, lines: str) -> Unit:
    return _unit(f"mark_cells_of_{lines}", f"mark_cells<tilewise::Lines::{lines}>", _MarkParams, arch)


@functools.cache
def list_unit(arch: str, by_keys: bool) -> Unit:
    return _unit(
        f"list_tiles_of_{'keys' if by_keys else 'queries'}", f"list_tiles<{str(by_keys).lower()}>", _ListParams, arch
    )


def _unit(name: str, call: str, params: type[ctypes.Structure], arch: str) -> Unit:
    return kernel_unit(
        name,
        _HEADER,
        call,
        params,
        arch,
        threads=32 * _WARPS,
        checks=(f"cell_rows == {CELL_ROWS} && cell_keys == {CELL_KEYS} && map_warps == {_WARPS}",),
    )


def lists_of(problem: Problem, planes: Planes, block_q: int, block_kv: int, *, by_keys: bool) -> Lists:
    """The lists of a kernel of these tiles. One by keys works on all query heads of a KV head, which share a list."""
    q_tiles, kv_tiles = tiles(problem.seq_q, block_q), tiles(problem.seq_kv, block_kv)
    if not by_keys:
        return Lists(planes, q_tiles, kv_tiles)
    heads = problem.heads_kv if planes.heads > 1 else 1
    return Lists(Planes(planes.batch, heads), kv_tiles, q_tiles)


def map_program(
    problem: Problem, term: PackedKeep, planes: Planes, block_q: int, block_kv: int, arch: str, *, by_keys: bool
) -> Program:
    """Makes `tile_counts`, `tile_lists` and `keep_bits` of `keep`, which is (batch, heads, seq_q, seq_kv) with strides
    of 0 where it is broadcast."""
    left, right, offset = problem.band
    made = lists_of(problem, planes, block_q, block_kv, by_keys=by_keys)
    cells, row_blocks, row_cells = cells_shape(planes, problem)
    line_count, line_words = _lines(problem, term)
    scratch = Layout.of(cells=cells * row_blocks * row_cells)
    sizes = {"seq_q": problem.seq_q, "seq_k": problem.seq_kv, "row_blocks": row_blocks, "row_cells": row_cells}
    marks = {
        "keep": Address("keep"),
        **{f"{name}_stride": Stride("keep", dim) for dim, name in enumerate(("batch", "head", "row", "key"))},
        "cells": Address(f"{SCRATCH}cells"),
        "bits": Address("keep_bits"),
        "lines": line_count,
        "line_words": line_words,
        "heads": planes.heads,
        "planes": planes.total,
        **sizes,
    }
    lists = {
        "cells": Address(f"{SCRATCH}cells"),
        "counts": Address("tile_counts"),
        "tiles": Address("tile_lists"),
        "lists": made.planes.total,
        "planes_per_list": planes.total // made.planes.total,
        **sizes,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "block_q": block_q,
        "block_kv": block_kv,
        "outer_tiles": made.outer_tiles,
        "inner_tiles": made.inner_tiles,
    }
    marking = planes.total * row_blocks * tiles(problem.seq_kv, _KEYS_PER_WARP)
    listing = made.planes.total * made.outer_tiles
    threads = 32 * _WARPS
    launches = (
        Launch(mark_unit(arch, term.lines), _MarkParams, marks, tiles(marking, _WARPS), threads),
        Launch(list_unit(arch, by_keys), _ListParams, lists, tiles(listing, _WARPS), threads),
    )
    return Program(launches, scratch)
