"""Tile maps of boolean masks on the model of a GPU, against the mask itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulation
import term_cases
from emulation import emulated
from support import make_problem
from term_cases import H200
from tilewise import Causal, Full, Window
from tilewise.engine import SM80, SM90, run, tile_map
from tilewise.engine.tile_map import Planes
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
    planes = Planes(keep.shape[0], keep.shape[1])
    seen = keep.expand(planes.batch, planes.heads, problem.seq_q, problem.seq_kv)
    term = PackedKeep(lines="keys" if by_keys else "queries")
    if keep.shape[2] == 1:
        term = PackedKeep(("row",))
    shape = tile_map.lists_of(problem, planes, block_q, block_kv, by_keys=by_keys)
    counts = torch.full(shape.counts_shape, -1, dtype=torch.int32)
    tiles = torch.full(shape.tiles_shape, -1, dtype=torch.int32)
    bits = torch.zeros(planes.total, *tile_map._lines(problem, term), dtype=torch.int32)
    program = tile_map.map_program(problem, term, planes, block_q, block_kv, "sm_90a", by_keys=by_keys)
    given = {"keep": seen, "tile_counts": counts, "tile_lists": tiles, "keep_bits": bits}
    run.load(program, given, 0)(*given.values())
    lines = seen.flatten(0, 1)[:, : bits.shape[1]] if term.lines == "queries" else seen.flatten(0, 1).transpose(1, 2)
    unpacked = (bits[..., None] >> torch.arange(32) & 1).flatten(2)[..., : lines.shape[2]]
    assert torch.equal(unpacked.bool(), lines != 0)
    return [
        (row[:full].tolist(), row[full:count].tolist())
        for row, (full, count) in zip(tiles.flatten(0, 1), counts.flatten(0, 1).tolist(), strict=True)
    ]


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


MAPS = [
    ((2, 4, 300, 700), Full()),
    ((2, 1, 1, 700), Causal("bottom-right")),
    ((1, 1, 300, 700), Window(200, 40)),
    ((1, 4, 300, 700), Causal()),
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
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    sizes = {"seq_kv": 700, "needs_grad": back}
    plain = term_cases.case_of(torch.bfloat16, dim, mask, (), lambda _: {}, seq_q=300, **sizes).problem
    terms = (Keep.of(keep, plain),)
    case = term_cases.case_of(torch.bfloat16, dim, mask, terms, lambda _: {"keep": keep}, seq_q=300, **sizes)
    assert backend.program(case.problem, H200, backend.configs(case.problem, H200)[0]).prepared
    term_cases.check(monkeypatch, backend, case, back=back)


@emulated
def test_a_map_serves_until_its_mask_changes(monkeypatch: Any) -> None:
    emulation.install(monkeypatch)
    problem = make_problem((2, 4, 300, 64), torch.bfloat16, heads_kv=2, seq_kv=700)
    keep = mask_of((2, 1, 300, 700), "plain").expand(2, 4, 300, 700)
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    posed = tile_map.packed(problem.with_(scores=(Keep(("head",)),)), "queries")
    (prepared,) = tile_map.map_for(posed, 128, 128, "sm_90a", by_keys=False).prepared
    prepare = run._Preparation(prepared, {"keep": keep}, 0)
    first = prepare(0, keep)
    assert prepare(0, keep.expand(2, 4, 300, 700))[0] is first[0]
    assert prepare(1, keep)[0] is not first[0]
    keep[:, 0, :128] = False
    counts, *_ = prepare(0, keep)
    assert counts[:, 0].tolist() == [[0, 0], [0, 0]]
    assert first[0][:, 0].tolist() != [[0, 0], [0, 0]]
    with torch.inference_mode():
        unseen = keep.clone()
        assert prepare(0, unseen)[0] is not prepare(0, unseen)[0]
