"""The tile map of a boolean mask: kernels/common/tile_map.cuh.

A mask that is data has no rule that says which tiles it empties. `marks` reads it once and writes two bits per cell of
64 queries by 16 keys; `lists` makes of them, for the tile shape of one kernel, a list of the tiles that it visits per
tile of queries (or of keys, for a backward): first those that nothing hides, then those that the kernel masks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from .params import mirror, tiles
from .program import Address, Launch, Program, Stride
from .source import kernel_unit

if TYPE_CHECKING:
    import ctypes

    from ..jit import Unit
    from ..problem import Problem

CELL_ROWS, CELL_KEYS, _WARPS = 64, 16, 8
_KEYS_PER_WARP = 32 * CELL_KEYS


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


def cells_shape(planes: Planes, problem: Problem) -> tuple[int, int, int]:
    return planes.total, tiles(problem.seq_q, CELL_ROWS), tiles(problem.seq_kv, CELL_KEYS)


_HEADER = "common/tile_map.cuh"
_MarkParams = mirror(_HEADER, "MarkParams")
_ListParams = mirror(_HEADER, "ListParams")


@functools.cache
def mark_unit(arch: str, vectors: bool) -> Unit:
    return _unit(
        f"mark_cells_{'of_16' if vectors else 'one_by_one'}", f"mark_cells<{str(vectors).lower()}>", _MarkParams, arch
    )


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


def marks(problem: Problem, planes: Planes, arch: str, *, vectors: bool) -> Program:
    """Of the operands `keep`, as (batch, heads, seq_q, seq_kv) with strides of 0 where it is broadcast, and `cells`.

    `vectors`: its keys are neighbours, and its address and other strides are multiples of 16.
    """
    _, row_blocks, row_cells = cells_shape(planes, problem)
    fields = {
        "keep": Address("keep"),
        **{f"{name}_stride": Stride("keep", dim) for dim, name in enumerate(("batch", "head", "row", "key"))},
        "cells": Address("cells"),
        "heads": planes.heads,
        "planes": planes.total,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "row_blocks": row_blocks,
        "row_cells": row_cells,
    }
    warps = planes.total * row_blocks * tiles(problem.seq_kv, _KEYS_PER_WARP)
    return Program((Launch(mark_unit(arch, vectors), _MarkParams, fields, tiles(warps, _WARPS), 32 * _WARPS),))


def lists_of(problem: Problem, planes: Planes, block_q: int, block_kv: int, *, by_keys: bool) -> Lists:
    """The lists of a kernel of these tiles. One by keys works on all query heads of a KV head, which share a list."""
    q_tiles, kv_tiles = tiles(problem.seq_q, block_q), tiles(problem.seq_kv, block_kv)
    if not by_keys:
        return Lists(planes, q_tiles, kv_tiles)
    heads = problem.heads_kv if planes.heads > 1 else 1
    return Lists(Planes(planes.batch, heads), kv_tiles, q_tiles)


def lists(problem: Problem, planes: Planes, block_q: int, block_kv: int, arch: str, *, by_keys: bool) -> Program:
    """Of the operands `cells`, `counts` and `tiles`."""
    left, right, offset = problem.band
    made = lists_of(problem, planes, block_q, block_kv, by_keys=by_keys)
    _, row_blocks, row_cells = cells_shape(planes, problem)
    fields = {
        "cells": Address("cells"),
        "counts": Address("counts"),
        "tiles": Address("tiles"),
        "lists": made.planes.total,
        "planes_per_list": planes.total // made.planes.total,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "row_blocks": row_blocks,
        "row_cells": row_cells,
        "block_q": block_q,
        "block_kv": block_kv,
        "outer_tiles": made.outer_tiles,
        "inner_tiles": made.inner_tiles,
    }
    warps = made.planes.total * made.outer_tiles
    return Program((Launch(list_unit(arch, by_keys), _ListParams, fields, tiles(warps, _WARPS), 32 * _WARPS),))
