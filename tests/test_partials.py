from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise.partials import Partial, identity, merge, merge_all

TOLERANCE = budget(torch.float64, 20)  # so many keys at most
shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum)


def pieces(lengths, seed):
    """Attention of the same queries over consecutive pieces of the keys, some of them empty; float64."""
    torch.manual_seed(seed)
    problem = make_problem((2, 2, 3, 4), torch.float64, seq_kv=sum(lengths))
    q, k, v = make_inputs(problem)
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        parts.append(Partial(*exact(q, k[:, :, start:stop], v[:, :, start:stop], problem.with_(seq_kv=length))))
        start = stop
    return Partial(*exact(q, k, v, problem)), parts


@given(shares, st.integers(0, 2**20))
def test_merging_pieces_gives_the_whole(lengths, seed):
    whole, parts = pieces(lengths, seed)
    merged = merge_all(parts)
    assert_close(merged.out, whole.out, TOLERANCE)
    assert_close(merged.lse, whole.lse, TOLERANCE, "lse")


@given(shares, st.integers(0, 2**20))
def test_merge_is_associative_and_commutative(lengths, seed):
    _, parts = pieces((lengths * 3)[:3], seed)
    a, b, c = parts
    for one, other in ((merge(merge(a, b), c), merge(a, merge(b, c))), (merge(a, b), merge(b, a))):
        assert_close(one.out, other.out, TOLERANCE)
        assert_close(one.lse, other.lse, TOLERANCE, "lse")


def test_identity():
    whole, _ = pieces([4], 0)
    none = identity(whole.out, torch.float64)
    for merged in (merge(whole, none), merge(none, whole)):
        assert torch.equal(merged.out, whole.out)
        assert torch.equal(merged.lse, whole.lse)
    nothing = merge(none, none)
    assert torch.equal(nothing.out, none.out)
    assert torch.equal(nothing.lse, none.lse)


def test_partials_keep_the_dtype_of_out():
    whole, parts = pieces([3, 3], 1)
    low = [Partial(part.out.bfloat16(), part.lse.float()) for part in parts]
    merged = merge_all(low)
    assert merged.out.dtype == torch.bfloat16
    assert_close(merged.out, whole.out, 4 * torch.finfo(torch.bfloat16).eps)
