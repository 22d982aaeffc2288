from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import masks_with_lengths
from tilewise import Causal, Dense, Documents, Full, InvalidInput, Window
from tilewise.masks import Cached, Mask, Packed, Tile, parse


def picture(mask: Mask, seq_q: int, seq_kv: int) -> torch.Tensor:
    """The element rule, one call per pair: what everything else is held to."""
    rows = [[mask.visible(row, key, seq_q, seq_kv) for key in range(seq_kv)] for row in range(seq_q)]
    return torch.tensor(rows, dtype=torch.bool).reshape(seq_q, seq_kv)


@given(masks_with_lengths())
def test_bool_tensor_is_the_element_rule(case):
    mask, seq_q, seq_kv = case
    drawn = mask.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv)
    assert torch.equal(drawn, picture(mask, seq_q, seq_kv))


@given(masks_with_lengths())
def test_pairs_counts_the_visible(case):
    mask, seq_q, seq_kv = case
    assert mask.pairs(seq_q, seq_kv) == picture(mask, seq_q, seq_kv).sum().item()


@given(masks_with_lengths())
def test_spans_are_monotone(case):
    mask, seq_q, seq_kv = case
    spans = [mask.span(row, seq_q, seq_kv) for row in range(seq_q)]
    assert all(0 <= begin <= end <= seq_kv for begin, end in spans)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(spans))


@given(masks_with_lengths(), st.data())
def test_tile_class_is_sound(case, data):
    mask, seq_q, seq_kv = case
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, seq_q), st.integers(0, seq_q)))))
    keys = range(*sorted(data.draw(st.tuples(st.integers(0, seq_kv), st.integers(0, seq_kv)))))
    part = picture(mask, seq_q, seq_kv)[rows.start : rows.stop, keys.start : keys.stop]
    kind = mask.tile(rows, keys, seq_q, seq_kv)
    if kind is Tile.FULL:
        assert part.all()
    elif kind is Tile.EMPTY:
        assert not part.any()
    elif not isinstance(mask, Documents):  # bands are classified tightly too; documents may be cautious
        assert part.any()
        assert not part.all()


@given(masks_with_lengths(), st.data())
def test_keys_covers_everything_a_block_of_rows_sees(case, data):
    mask, seq_q, seq_kv = case
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, seq_q), st.integers(0, seq_q)))))
    keys = mask.keys(rows, seq_q, seq_kv)
    seen = picture(mask, seq_q, seq_kv)[rows.start : rows.stop].any(0).nonzero().flatten().tolist()
    assert set(seen) <= set(keys)
    if seen and not isinstance(mask, Documents):
        assert (keys.start, keys.stop) == (seen[0], seen[-1] + 1)


@given(masks_with_lengths())
def test_text_form_reads_back(case):
    mask, _, _ = case
    assert parse(str(mask)) == mask
    assert hash(parse(str(mask))) == hash(mask)


@given(masks_with_lengths())
def test_the_hull_shows_all_that_the_mask_shows(case):
    mask, seq_q, seq_kv = case
    assert not (picture(mask, seq_q, seq_kv) & ~picture(mask.hull(), seq_q, seq_kv)).any()


@pytest.mark.parametrize("mask", [Dense((1, 2, 8, 8), additive=True), Packed(2), Cached(2)], ids=str)
def test_masks_of_tensors_are_unknown_everywhere(mask):
    assert mask.tile(range(4), range(4), 8, 8) is Tile.PARTIAL
    assert mask.tile(range(0), range(4), 8, 8) is Tile.EMPTY
    assert mask.tile(range(4), range(0), 8, 8) is Tile.EMPTY
    assert mask.pairs(8, 8) == 64 // (mask.sequences if isinstance(mask, Packed) else 1)
    assert parse(str(mask)) == mask


def test_pairs_of_a_cache_follow_the_mask_unless_queries_are_packed():
    assert Cached(2, inner=Causal()).pairs(4, 4) == 10
    assert Cached(2, inner=Causal(), packed=True).pairs(3, 4) == 12


def test_alignment_moves_the_diagonal():
    assert picture(Causal(), 2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]
    assert picture(Causal("bottom-right"), 2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert picture(Window(1, 0, "bottom-right"), 2, 4).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]


def test_an_offset_moves_the_diagonal():
    assert picture(Causal(offset=1), 2, 4).tolist() == [[True, True, False, False], [True, True, True, False]]
    assert picture(Causal(offset=-1), 2, 2).tolist() == [[False, False], [True, False]]
    assert picture(Causal("bottom-right", offset=-1), 2, 4).tolist() == [
        [True, True, False, False],
        [True, True, True, False],
    ]
    assert picture(Window(1, 0, offset=2), 2, 4).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert not picture(Causal(offset=-8), 3, 3).any()
    assert picture(Causal(offset=8), 3, 3).all()


@given(masks_with_lengths(), st.integers(0, 24), st.integers(0, 24), st.data())
def test_a_part_of_a_band_is_a_band(case, first_row, first_key, data):
    mask, seq_q, seq_kv = case
    if isinstance(mask, Documents):
        return
    rows = range(min(first_row, seq_q), data.draw(st.integers(min(first_row, seq_q), seq_q)))
    keys = range(min(first_key, seq_kv), data.draw(st.integers(min(first_key, seq_kv), seq_kv)))
    part = picture(mask, seq_q, seq_kv)[rows.start : rows.stop, keys.start : keys.stop]
    left, right, offset = mask.band(seq_q, seq_kv)
    sizes = (None if size >= seq_q + seq_kv + 100 else size for size in (left, right))
    shard = Window(*sizes, offset=offset + rows.start - keys.start)
    assert torch.equal(picture(shard, len(rows), len(keys)), part)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal(offset=5), "causal:offset=5"),
        (Causal("bottom-right", -3), "causal:bottom-right:offset=-3"),
        (Window(4, None, offset=-1), "window:4,inf:offset=-1"),
        (Window(4, 0, "bottom-right", 2), "window:4,0:bottom-right:offset=2"),
        (Documents((0, 3, 8), inner=Causal(offset=1)), "documents:0,3,8:causal:offset=1"),
        (Packed(2, 8, 8, Causal("bottom-right", 1)), "packed:2,8,8,0:causal:bottom-right:offset=1"),
    ],
    ids=str,
)
def test_an_offset_has_a_text(mask, text):
    assert str(mask) == text
    assert parse(text) == mask


def test_documents_take_tensors_and_inner_masks():
    mask = Documents(torch.tensor([0, 2, 3]), inner=Causal())
    assert mask == Documents((0, 2, 3), (0, 2, 3), Causal())
    assert picture(mask, 3, 3).tolist() == [[True, False, False], [True, True, False], [False, False, True]]


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Window(-1), "Window.left"),
        (lambda: Window(3, -2), "Window.right"),
        (lambda: Window(2.5), "Window.left"),
        (lambda: Causal("middle"), "mask alignment"),
        (lambda: Causal(offset=2.5), "Causal.offset"),
        (lambda: Window(3, offset=1 << 28 | 1), "Window.offset"),
        (lambda: parse("causal:shift=3"), "mask"),
        (lambda: parse("causal:middle:offset=3"), "mask alignment"),
        (lambda: Documents((1, 2)), "Documents.cu_seqlens_q"),
        (lambda: Documents((0, 3, 2)), "Documents.cu_seqlens_q"),
        (lambda: Documents((0, 3), (0, 1, 2)), "Documents.cu_seqlens_kv"),
        (lambda: Documents((0, 3), inner=Documents((0, 3))), "Documents.inner"),
        (lambda: Documents((0, 3)).check(4, 4), "Documents.cu_seqlens_q"),
        (lambda: Dense((7, 8)).check(8, 8), "mask"),
        (lambda: parse("diagonal"), "mask"),
        (lambda: parse("window:3"), "mask"),
        (lambda: parse("window:-3,0"), "Window.left"),
    ],
)
def test_bad_masks_say_what_to_do(make, argument):
    with pytest.raises(InvalidInput, match="What to do") as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.parametrize("flag", ["packed", "lengths", "starts", "rows", "invariant"])
@pytest.mark.parametrize("inner", [Full(), Causal("bottom-right"), Window(3, None)], ids=str)
def test_a_cached_mask_is_read_back_from_its_text(flag, inner):
    for mask in (Cached(2, 16, 3, 64, inner, **{flag: True}), Cached(2, inner=inner, **{flag: True})):
        assert parse(str(mask)) == mask


@pytest.mark.parametrize("flag", ["same", "used", "padded"])
def test_a_packed_mask_is_read_back_from_its_text(flag):
    mask = Packed(2, 64, 128, Causal(), **{flag: True})
    assert parse(str(mask)) == mask


def test_full_is_full():
    assert picture(Full(), 3, 2).all()
