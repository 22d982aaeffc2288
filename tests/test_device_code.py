"""The kernels' headers without PTX, built by a host compiler and driven against the Python rules."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import make_problem
from tilewise import Causal, Full, Window
from tilewise.engine import division
from tilewise.masks import Mask, Tile

KERNELS = Path(__file__).resolve().parent.parent / "src" / "tilewise" / "kernels"
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a host C++ compiler")

SOURCE = """
#include "common/mask.cuh"
#include "common/schedule.cuh"
#include "common/layout.cuh"
#include "common/pieces.cuh"
using namespace tilewise;
extern "C" {
int first_key(int first, int end, int seq_k, int row) { return Band{first, end, seq_k}.first_key(row); }
int end_key(int first, int end, int seq_k, int row) { return Band{first, end, seq_k}.end_key(row); }
void tiles(int first_shift, int end_shift, int seq_k, int row_begin, int row_end, int block_kv, int* result) {
  const Band band{first_shift, end_shift, seq_k};
  const TileRange touched = touched_tiles(band, row_begin, row_end, block_kv);
  const TileRange full = full_tiles(band, row_begin, row_end, block_kv, touched);
  result[0] = touched.begin, result[1] = touched.end, result[2] = full.begin, result[3] = full.end;
}
void work_tile(int heads, int batch_heads, int q_tiles, int sections, int longest_first, int work, int* result) {
  const WorkTile tile = Schedule{heads, batch_heads, q_tiles, sections, longest_first}.tile(work);
  result[0] = tile.batch, result[1] = tile.head, result[2] = tile.q_tile;
}
void work_of_head(int heads, int tiles, int together, int work, int* result) {
  const WorkTile tile = HeadSections{heads, tiles, together}.tile(work);
  result[0] = tile.head, result[1] = tile.q_tile;
}
void part(int begin, int end, int part, int parts, int* result) {
  const TileRange range = part_of(TileRange{begin, end}, part, parts);
  result[0] = range.begin, result[1] = range.end;
}
void query_tiles_of(int first_shift, int end_shift, int seq_q, int kv_tile, int seq_k, int block_q, int block_kv,
                    int* result) {
  const RowBand band{first_shift, end_shift, seq_q};
  const QueryTiles tiles = query_tiles(band, kv_tile, seq_k, block_q, block_kv);
  const TileRange touched = touched_query_tiles(band, kv_tile, seq_k, block_q, block_kv);
  result[0] = tiles.touched.begin, result[1] = tiles.touched.end, result[2] = tiles.full.begin;
  result[3] = tiles.full.end, result[4] = touched.begin, result[5] = touched.end;
}
int pieces_of(int steps, int limit) { return piece_count(steps, limit); }
void piece(int steps, int limit, int index, int count, int* result) {
  const TileRange range = steps_of_piece(steps, limit, Piece{0, index, count});
  result[0] = range.begin, result[1] = range.end;
}
int chunk(int row, int index) { return swizzled_chunk(row, index); }
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("device_code")
    source, library = folder / "device_code.cpp", folder / "device_code.so"
    source.write_text(SOURCE)
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-O1", "-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*command, "-shared", "-fPIC", f"-I{KERNELS}", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


sizes = st.one_of(st.none(), st.integers(0, 400))
aligns = st.sampled_from(["top-left", "bottom-right"])
banded = st.one_of(st.just(Full()), st.builds(Causal, aligns), st.builds(Window, sizes, sizes, aligns))


def shifts(mask: Mask, seq_q: int, seq_kv: int) -> tuple[int, int]:
    """As the backend hands them over."""
    left, right, offset = mask.band(seq_q, seq_kv)  # type: ignore[attr-defined]
    return offset - left, offset + right + 1


@given(mask=banded, seq_q=st.integers(1, 600), seq_kv=st.integers(1, 600), data=st.data())
def test_a_row_sees_the_keys_the_mask_says(
    device_code: Any, mask: Mask, seq_q: int, seq_kv: int, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, seq_q - 1))
    begin, end = mask.span(row, seq_q, seq_kv)
    band = (*shifts(mask, seq_q, seq_kv), seq_kv)
    got = range(device_code.first_key(*band, row), device_code.end_key(*band, row))
    assert list(got) == list(range(begin, end))


@given(
    mask=banded,
    seq_q=st.integers(1, 600),
    seq_kv=st.integers(1, 600),
    block_kv=st.sampled_from([48, 64, 112, 128, 176]),
    block_q=st.sampled_from([64, 128, 192]),
    data=st.data(),
)
def test_tiles_are_skipped_and_masked_as_the_mask_says(
    device_code: Any, mask: Mask, seq_q: int, seq_kv: int, block_kv: int, block_q: int, data: st.DataObject
) -> None:
    row_begin = data.draw(st.integers(0, (seq_q - 1) // block_q)) * block_q
    rows = range(row_begin, min(row_begin + block_q, seq_q))
    result = (ctypes.c_int * 4)()
    device_code.tiles(*shifts(mask, seq_q, seq_kv), seq_kv, rows.start, rows.stop, block_kv, result)
    touched, full = range(result[0], result[1]), range(result[2], result[3])
    assert set(full) <= set(touched)
    for tile in range(-(-seq_kv // block_kv)):
        keys = range(tile * block_kv, (tile + 1) * block_kv)
        inside = range(keys.start, min(keys.stop, seq_kv))
        kind = mask.tile(rows, inside, seq_q, seq_kv)
        if tile not in touched:
            visible = mask.to_bool(rows, inside, seq_q, seq_kv)
            assert not visible.any()
        if tile in full:
            assert kind is Tile.FULL
            assert keys.stop <= seq_kv
        elif tile in touched and keys.stop <= seq_kv:
            assert kind is not Tile.FULL


@given(begin=st.integers(0, 50), count=st.integers(0, 300), parts=st.integers(1, 132))
def test_parts_of_the_keys_are_nearly_equal_and_leave_none_out(
    device_code: Any, begin: int, count: int, parts: int
) -> None:
    result = (ctypes.c_int * 2)()
    tiles: list[int] = []
    sizes = set()
    for part in range(parts):
        device_code.part(begin, begin + count, part, parts, result)
        sizes.add(result[1] - result[0])
        tiles += range(result[0], result[1])
    assert tiles == list(range(begin, begin + count))
    assert max(sizes) - min(sizes) <= 1


@given(
    mask=banded,
    seq_q=st.integers(1, 300),
    seq_kv=st.integers(1, 300),
    block_q=st.sampled_from([16, 64, 128]),
    block_kv=st.sampled_from([16, 64, 128]),
)
def test_query_tiles_are_skipped_and_masked_as_the_mask_says(
    device_code: Any, mask: Mask, seq_q: int, seq_kv: int, block_q: int, block_kv: int
) -> None:
    problem = make_problem((1, 6, seq_q, 64), heads_kv=2, seq_kv=seq_kv, mask=mask)
    steps = division.tile_steps(problem, block_q, block_kv)
    result = (ctypes.c_int * 6)()
    for kv_tile, expected in enumerate(steps):
        keys = range(kv_tile * block_kv, min((kv_tile + 1) * block_kv, seq_kv))
        device_code.query_tiles_of(*shifts(mask, seq_q, seq_kv), seq_q, kv_tile, seq_kv, block_q, block_kv, result)
        touched, full = range(result[0], result[1]), range(result[2], result[3])
        assert tuple(result[4:6]) == tuple(result[0:2])
        assert problem.group * len(touched) == expected
        assert result[2] <= result[3]
        assert set(full) <= set(touched)
        for tile in range(-(-seq_q // block_q)):
            rows = range(tile * block_q, min((tile + 1) * block_q, seq_q))
            kind = mask.tile(rows, keys, seq_q, seq_kv)
            if tile not in touched:
                assert not mask.to_bool(rows, keys, seq_q, seq_kv).any()
            elif tile in full:
                assert kind is Tile.FULL
                assert len(keys) == block_kv
            else:
                assert kind is not Tile.FULL or len(keys) < block_kv


@given(steps=st.integers(0, 3000), limit=st.integers(1, 500))
def test_pieces_have_every_step_once_and_no_more_than_the_limit(device_code: Any, steps: int, limit: int) -> None:
    count = device_code.pieces_of(steps, limit)
    assert count == division.piece_count(steps, limit)
    result = (ctypes.c_int * 2)()
    covered: list[int] = []
    for piece in reversed(range(count)):
        device_code.piece(steps, limit, piece, count, result)
        assert result[1] - result[0] <= limit
        assert result[1] > result[0] or steps == 0
        covered += range(result[0], result[1])
    assert covered == list(range(steps))


@given(
    batch=st.integers(1, 4),
    heads=st.integers(1, 9),
    q_tiles=st.integers(1, 9),
    sections=st.integers(1, 40),
    longest_first=st.booleans(),
)
def test_the_schedule_visits_every_tile_once(
    device_code: Any, batch: int, heads: int, q_tiles: int, sections: int, longest_first: bool
) -> None:
    pairs = batch * heads
    seen = []
    result = (ctypes.c_int * 3)()
    for work in range(pairs * q_tiles):
        device_code.work_tile(heads, pairs, q_tiles, min(sections, pairs), int(longest_first), work, result)
        seen.append(tuple(result))
    everything = {(b, h, t) for b in range(batch) for h in range(heads) for t in range(q_tiles)}
    assert len(seen) == len(everything)
    assert set(seen) == everything
    if longest_first and sections == 1:
        assert [tile for _, _, tile in seen] == sorted((tile for _, _, tile in seen), reverse=True)
    starts = [work for work, (_, _, tile) in enumerate(seen) if tile == (q_tiles - 1 if longest_first else 0)]
    begun = [work for work in starts if work == 0 or q_tiles == 1 or work - 1 not in starts]
    sizes = [(b - a) // q_tiles for a, b in zip(begun, [*begun[1:], len(seen)], strict=True)]
    if q_tiles > 1:
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == min(sections, pairs)
        assert sizes[0] - sizes[-1] <= 1


@given(heads=st.integers(1, 40), tiles=st.integers(1, 9), together=st.integers(1, 40))
def test_sections_of_heads_visit_every_tile_once(device_code: Any, heads: int, tiles: int, together: int) -> None:
    together = min(together, heads)
    seen = []
    result = (ctypes.c_int * 2)()
    for work in range(heads * tiles):
        device_code.work_of_head(heads, tiles, together, work, result)
        seen.append(tuple(result))
    sections = [range(first, min(first + together, heads)) for first in range(0, heads, together)]
    assert seen == [(head, tile) for section in sections for tile in range(tiles) for head in section]


def test_the_swizzle_is_a_bijection_on_an_atom(device_code: Any) -> None:
    offsets = {device_code.chunk(row, index) for row in range(8) for index in range(8)}
    assert offsets == set(range(0, 1024, 16))
