"""Tile maps of boolean masks on the model of a GPU, against the mask itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import emulation
import term_cases
from emulation import emulated
from support import make_problem
from term_cases import H200
from tilewise import Causal, Full, InvalidInput, Window
from tilewise.engine import SM80, SM90, run, tile_map
from tilewise.engine.sm90 import backward as sm90_backward
from tilewise.terms import Keep
from tilewise.terms.keep import PackedKeep

SHAPES = [(2, 4, 300, 700), (2, 1, 1, 700), (1, 4, 300, 1), (1, 1, 300, 700)]  # of a mask, by what it broadcasts


def mask_of(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Blocks that are kept, hidden or mixed; `strided`: not next to one another, and bytes other than 1."""
    torch.manual_seed(3)
    batch, heads, rows, keys = shape
    coarse = torch.randint(0, 3, (batch, heads, -(-rows // 96), -(-keys // 80)))
    state = coarse.repeat_interleave(96, 2)[:, :, :rows].repeat_interleave(80, 3)[..., :keys]
    keep = torch.where(state == 2, torch.rand(shape) < 0.5, state == 1)
    if kind == "plain":
        return keep
    room = torch.zeros(batch, heads, rows, 3 * keys + 1, dtype=torch.uint8)
    view = room[..., 1::3][..., :keys]
    view.copy_(keep.to(torch.uint8) * 6)
    return view.view(torch.bool)


def listed(keep: torch.Tensor, problem: Any, block_q: int, block_kv: int, by_keys: bool) -> list[Any]:
    """(full tiles, other tiles) of every list, by the kernels."""
    made = prepared(keep, problem, block_q, block_kv, by_keys=by_keys)
    seen = keep.expand(-1, -1, problem.seq_q, problem.seq_kv).flatten(0, 1)
    bits = made["keep_bits"]
    check_bits(bits, seen[:, : bits.shape[1]])
    cells = made["keep_cells"][..., :1] >> torch.arange(32) & 1
    assert not cells.flatten(2)[..., -(-problem.seq_kv // tile_map.CELL_KEYS) :].any(), "some key past the end is kept"
    if by_keys and keep.shape[2] > 1:
        check_bits(made["key_bits"], seen.transpose(1, 2))
    return [
        (row[:full].tolist(), row[full:count].tolist())
        for row, (full, count, *_) in zip(
            made["tile_lists"].flatten(0, 1), made["tile_counts"].flatten(0, 1).tolist(), strict=True
        )
    ]


def prepared(keep: torch.Tensor, problem: Any, block_q: int, block_kv: int, **kind: bool) -> dict[str, torch.Tensor]:
    """All that is made of a mask for a kernel, as its program has it made."""
    term = Keep.of(keep, problem)
    packs = PackedKeep(term.over, term.paired, "keys" if kind["by_keys"] and not term.rows_alike else "queries")
    posed = problem.with_(scores=(packs,))
    known: dict[str, torch.Tensor] = {"keep": packs.tensors[0].expanded(keep, problem)}
    for one in tile_map.map_for(posed, block_q, block_kv, "sm_90a", **kind).prepared:
        given = {name: known[name] for name in one.operands}
        made = run._Preparation(one, given, 0)(0, *given.values())
        known |= {name: result for (name, _), result in zip(one.results, made, strict=True)}
    return known


def check_bits(bits: torch.Tensor, lines: torch.Tensor) -> None:
    unpacked = (bits[..., None] >> torch.arange(32) & 1).flatten(2)[..., : lines.shape[2]]
    assert torch.equal(unpacked.bool(), lines != 0)


def wanted(keep: torch.Tensor, problem: Any, block_q: int, block_kv: int, by_keys: bool) -> list[Any]:
    """The same by looking at every element: full tiles see all of their keys, others some; none sees no key."""
    band = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    seen = keep.expand(-1, -1, problem.seq_q, problem.seq_kv)
    if by_keys and keep.shape[1] > 1:
        grouped = seen.unflatten(1, (problem.heads_kv, problem.group))
        planes = [grouped[b, h] for b in range(grouped.shape[0]) for h in range(problem.heads_kv)]
    else:
        planes = [plane[None] for plane in seen.flatten(0, 1)]
    found = []
    for plane in planes:
        visible = plane & band
        outer, inner = (block_kv, block_q) if by_keys else (block_q, block_kv)
        by_tile = visible.transpose(1, 2) if by_keys else visible
        for rows in by_tile.split(outer, 1):
            tiles = rows.split(inner, 2)
            # Keys past the end are masked too, so the last tile of them is full only if it is whole.
            short = problem.seq_kv % block_kv != 0
            full = [
                i
                for i, tile in enumerate(tiles)
                if tile.all() and not (short and (rows.shape[1] < outer if by_keys else i == len(tiles) - 1))
            ]
            found.append((full, [i for i, tile in enumerate(tiles) if tile.any() and i not in full]))
    return found


@emulated
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("kind", ["plain", "strided"])
@pytest.mark.parametrize("blocks", [(128, 112), (64, 128), (192, 64)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal("bottom-right"), Window(200, 40)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_of_tiles(
    monkeypatch: Any, shape: tuple[int, ...], mask: Any, blocks: tuple[int, int], kind: str, by_keys: bool
) -> None:
    emulation.install(monkeypatch)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700, mask=mask)
    keep = mask_of(shape, kind)
    got, want = (make(keep, problem, *blocks, by_keys) for make in (listed, wanted))
    assert len(got) == len(want)
    for (got_full, got_other), (full, other) in zip(got, want, strict=True):
        assert got_full == full
        # The band and the mask may empty a tile together that neither empties alone.
        assert set(other) <= set(got_other)
        assert not set(got_other) & set(full)
        assert got_other == sorted(set(got_other))


READS = {  # rows and keys, the elements before the first one, and the room of a row
    "sixteen bytes, bits by lines": ((136, 1040), 0, 1040),
    "sixteen bytes, rows that are no multiple of eight": ((133, 1040), 0, 1056),
    "words, rows that begin anywhere": ((72, 1037), 3, 1041),
    "one line": ((1, 1040), 0, 1040),
}


@emulated
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("how", READS)
def test_every_way_to_read_a_mask(monkeypatch: Any, how: str, by_keys: bool) -> None:
    """Beside tiles of so few keys that a warp makes a list in several steps."""
    emulation.install(monkeypatch)
    (rows, keys), first, room = READS[how]
    memory = torch.ones(first + 2 * rows * room, dtype=torch.bool)
    keep = memory[first:].view(2, 1, rows, room)[..., :keys]
    keep.copy_(mask_of((2, 1, rows, keys), "plain"))
    keep[:, :, :, 200:400] = True
    problem = make_problem((2, 2, max(rows, 70), 64), torch.bfloat16, seq_kv=keys)
    got, want = (make(keep, problem, 64, 16, by_keys) for make in (listed, wanted))
    assert got == want


def keep_case(monkeypatch: Any, keep: torch.Tensor, dim: int, mask: Any, **fields: Any) -> term_cases.Case:
    """Of 700 keys, and with a map however small it is."""
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    fields = {"seq_q": 300, "seq_kv": 700} | fields
    plain = term_cases.case_of(torch.bfloat16, dim, mask, (), lambda _: {}, **fields).problem
    return term_cases.case_of(torch.bfloat16, dim, mask, (Keep.of(keep, plain),), lambda _: {"keep": keep}, **fields)


MAPS = [
    ((2, 4, 300, 700), Full()),
    ((2, 1, 1, 700), Causal("bottom-right")),
    ((1, 1, 300, 700), Window(200, 40)),
    ((1, 4, 300, 700), Causal()),
    ((2, 4, 1, 700), Full()),  # alike for all queries, and different per head
]


@emulated
@term_cases.both_ways
@pytest.mark.parametrize(("shape", "mask"), MAPS, ids=str)
@pytest.mark.parametrize(("backend", "dim"), [(SM90, 64), (SM90, 128), (SM80, 64)], ids=str)
def test_kernels_go_through_their_lists(
    monkeypatch: Any, backend: Any, dim: int, shape: tuple[int, ...], mask: Any, back: bool
) -> None:
    """Lists in any order of planes and heads, some of them empty, and pieces of tiles without a step."""
    keep = mask_of(shape, "plain")
    keep[0, 0, :, :400] = True
    keep[-1, -1, : 130 if shape[2] > 1 else 1, 200:] = False
    case = keep_case(monkeypatch, keep, dim, mask, needs_grad=back)
    assert backend.program(case.problem, H200, backend.configs(case.problem, H200)[0]).prepared
    term_cases.check(monkeypatch, backend, case, back=back)


@emulated
@pytest.mark.parametrize("shape", [(2, 4, 300, 700), (2, 1, 1, 700)], ids=str)
@pytest.mark.parametrize(("dim", "block_kv"), [(96, 112), (256, 48)], ids=str)
def test_tiles_that_begin_inside_of_a_word(monkeypatch: Any, dim: int, block_kv: int, shape: tuple[int, ...]) -> None:
    case = keep_case(monkeypatch, mask_of(shape, "plain"), dim, Window(200, 40))
    large = case.problem.with_(batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096)
    config = next(one for one in SM90.configs(large, H200) if one.block_kv == block_kv)
    monkeypatch.setattr(type(SM90), "configs", lambda *_: [config])
    term_cases.check(monkeypatch, SM90, case, back=False)


ORDERS = [
    (SM90, 64, "any", MAPS[0]),
    (SM90, 128, "any", MAPS[1]),
    (SM90, 64, "by keys", MAPS[0]),
    (SM90, 64, "by keys", MAPS[3]),
    (SM90, 128, "by keys", MAPS[2]),
    (SM90, 256, "by keys", MAPS[1]),
    (SM80, 64, "by keys", MAPS[0]),
    (SM80, 128, "by keys", MAPS[3]),
]


@emulated
@pytest.mark.parametrize(("backend", "dim", "order", "mask"), ORDERS, ids=str)
def test_tiles_of_keys_add_to_a_query_tile_in_every_order(
    monkeypatch: Any, backend: Any, dim: int, order: str, mask: Any
) -> None:
    """Where tiles wait for one another, those that the mask leaves out must not be waited for."""
    shape, band = mask
    keep = mask_of(shape, "plain")
    keep[-1, -1, : 130 if shape[2] > 1 else 1, 200:] = False
    if order == "any":
        monkeypatch.setattr(sm90_backward, "MAX_CLAIMANTS", 0)
    case = keep_case(monkeypatch, keep, dim, band, needs_grad=True, deterministic=order == "by keys")
    program = backend.backward_program(case.problem, H200, backend.backward_configs(case.problem, H200)[0])
    made = {name for one in program.prepared for name, _ in one.results}
    assert ("tile_turns" in made) == (order == "by keys")
    term_cases.check(monkeypatch, backend, case, back=True)


@emulated
@pytest.mark.parametrize("order", ["any", "claim", "by keys"])
def test_queries_without_keys_have_no_gradient(monkeypatch: Any, order: str) -> None:
    """Blocks of 64 of them, in tiles with others and in tiles of their own; sums that nobody zeroed are not read."""
    torch.manual_seed(5)
    keep = torch.rand(2, 1, 400, 700) < 0.5
    keep[0, :, :200] = False
    keep[1, :, 300:] = False
    if order == "any":
        monkeypatch.setattr(sm90_backward, "MAX_CLAIMANTS", 0)
    case = keep_case(monkeypatch, keep, 64, Full(), seq_q=400, needs_grad=True, deterministic=order == "by keys")
    term_cases.check(monkeypatch, SM90, case, back=True)


@emulated
def test_a_map_serves_until_its_mask_changes(monkeypatch: Any) -> None:
    emulation.install(monkeypatch)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700)
    keep = mask_of((2, 1, 300, 700), "plain").expand(2, 4, 300, 700)
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    posed = tile_map.packed(problem.with_(scores=(Keep(("head",)),)), "queries")
    marks, lists = tile_map.map_for(posed, 128, 128, "sm_90a", by_keys=False).prepared
    mark = run._preparation(marks, {"keep": keep}, 0)
    first = mark(0, keep)
    listing = run._preparation(lists, {"keep_cells": first[0]}, 0)
    before, _ = listing(0, first[0])
    assert mark(0, keep.expand(2, 4, 300, 700))[0] is first[0]
    assert listing(0, first[0])[0] is before
    assert mark(1, keep)[0] is not first[0]
    keep[:, 0, :128] = False
    changed = mark(0, keep)
    counts, _ = listing(0, changed[0])
    assert not counts[:, 0].any()
    assert before[:, 0].tolist() != [[0, 0], [0, 0]]
    # Memory that another tensor writes to: neither is counted for the other.
    shared = keep.data
    hidden = mark(0, shared)
    shared[:, 0] = True  # the heads share it
    assert mark(0, keep)[0] is changed[0]
    assert mark(0, keep.data)[0] is not hidden[0]
    assert mark(0, keep.data)[0].tolist() != hidden[0].tolist()
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    checked = keep.clone()
    assert mark(0, checked)[0] is mark(0, checked)[0]
    checked.data[0, 0, 0, 0] = False
    with pytest.raises(InvalidInput, match=r"keep.*`\.data`"):
        mark(0, checked)
    monkeypatch.delenv("TILEWISE_CHECK")
    with torch.inference_mode():
        # What is made of a mask that can be asked for its state can be asked itself.
        cells, _ = mark(2, keep)
        assert listing(2, cells)[0] is listing(2, mark(2, keep)[0])[0]
        unseen = keep.clone()
        assert mark(0, unseen)[0] is not mark(0, unseen)[0]


@emulated
def test_forward_and_backward_read_a_mask_once(monkeypatch: Any) -> None:
    """Kernels of any tile shape, in whatever program, and by queries or keys."""
    emulation.install(monkeypatch)
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700)
    keep = mask_of((2, 1, 300, 700), "plain").expand(2, 4, 300, 700)
    posed = {kind: tile_map.packed(problem.with_(scores=(Keep(("head",)),)), kind) for kind in ("queries", "keys")}
    maps = [
        tile_map.map_for(posed["queries"], 128, 128, "sm_90a", by_keys=False),
        tile_map.map_for(posed["queries"], 128, 112, "sm_90a", by_keys=False),
        tile_map.map_for(posed["keys"], 64, 128, "sm_90a", by_keys=True),
        tile_map.map_for(posed["keys"], 64, 128, "sm_90a", by_keys=True, in_turns=True),
    ]
    marks = [run._preparation(one.prepared[0], {"keep": keep}, 0) for one in maps]
    assert len(set(map(id, marks))) == 1
    _, bits = marks[0](0, keep)
    turns = [run._preparation(one.prepared[-1], {"keep_bits": bits}, 0) for one in maps[2:]]
    assert len(set(map(id, turns))) == 1


@emulated
@pytest.mark.parametrize("blocks", [(192, 64), (256, 112)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal("bottom-right"), Window(200, 40)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_say_where_the_tiles_of_64_queries_end(
    monkeypatch: Any, shape: tuple[int, ...], mask: Any, blocks: tuple[int, int]
) -> None:
    emulation.install(monkeypatch)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700, mask=mask)
    keep = mask_of(shape, "plain")
    block_q, block_kv = blocks
    made = prepared(keep, problem, block_q, block_kv, by_keys=False)
    band = mask.to_bool(range(300), range(700), 300, 700)
    planes = (keep.expand(-1, -1, 300, 700) & band).flatten(0, 1)
    lists, counts = made["tile_lists"], made["tile_counts"]
    skips = 0
    for plane, q_tile in itertools.product(range(lists.shape[0]), range(lists.shape[1])):
        full, count, *ends = counts[plane, q_tile].tolist()
        listed = lists[plane, q_tile, :count].tolist()
        for part in range(block_q // 64):
            row = q_tile * block_q + part * 64
            rows = planes[plane, row : row + 64]
            seen = [at for at, tile in enumerate(listed) if rows[:, tile * block_kv :][:, :block_kv].any()]
            if row < 300:
                # Cells of 16 keys and the band hide apart from one another, so a tile may be visited in vain.
                assert max(full, seen[-1] + 1 if seen else 0) <= ends[part] <= count
                skips += count - ends[part]
            else:
                assert ends[part] == full
    assert skips > 0 or (mask == Full() and shape[2] == 1)  # all queries of a tile see the same


@emulated
@pytest.mark.parametrize("blocks", [(64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal("bottom-right"), Window(200, 40)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turns_are_those_of_the_tiles_that_visit(
    monkeypatch: Any, shape: tuple[int, ...], mask: Any, blocks: tuple[int, int]
) -> None:
    emulation.install(monkeypatch)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700, mask=mask)
    keep = mask_of(shape, "plain")
    unordered = listed(keep, problem, *blocks, True)
    made = prepared(keep, problem, *blocks, by_keys=True, in_turns=True)
    turns, lists, counts = (made[name] for name in ("tile_turns", "tile_lists", "tile_counts"))
    kv_tiles = lists.shape[1]
    for number, (full, other) in enumerate(unordered):
        plane, kv_tile = divmod(number, kv_tiles)
        entries = lists[plane, kv_tile, : counts[plane, kv_tile, 1]].tolist()
        assert [entry & 0x7FFFFFFF for entry in entries] == sorted(full + other)
        assert [entry & 0x7FFFFFFF for entry in entries if entry < 0] == other
    visits = [set(full + other) for full, other in unordered]
    for plane in range(lists.shape[0]):
        for q_tile in range(turns.shape[1]):
            visiting = [kv for kv in range(kv_tiles) if q_tile in visits[plane * kv_tiles + kv]]
            for place, kv_tile in enumerate(visiting):
                assert turns[plane, q_tile, kv_tile].tolist() == [place, len(visiting) - 1 - place]
