"""Masks that are data in the kernels: boolean tensors and lengths of keys (terms/keep.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulation
from support import make_problem
from term_cases import BF16, F32, H200, KERNELS, Case, Tensor, both_ways, case_of, check, emulated, everywhere, forward
from tilewise import Dense, Full
from tilewise.engine import SM80, SM90, rules
from tilewise.terms import Alibi, Bias, Keep, KeyLengths, Sink
from tilewise.terms.shared import is_paired


def keeping(kind: str, problem: Any) -> Tensor:
    """Half of the pairs, one query in eight that sees nothing; as a kernel may find it in memory."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "dense": (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv),
        "strided": (problem.batch, problem.heads_q, problem.seq_kv, problem.seq_q),
        "padding": (problem.batch, 1, 1, problem.seq_kv),
        "shared": (problem.seq_q, problem.seq_kv),
        "rows": (problem.batch, 1, problem.seq_q, 1),
    }
    keep = torch.rand(shapes[kind], generator=generator) < 0.5
    if kind == "strided":
        keep = keep.transpose(-1, -2)
    if kind == "padding":
        keep[0] = False
        keep[0, ..., 30:99] = True
        return keep
    keep &= torch.rand((*keep.shape[:-1], 1), generator=generator) > 0.125
    return keep


def test_keys_are_read_in_pairs_only_where_all_rows_have_whole_pairs() -> None:
    """One more would lie behind the tensor's end."""

    def paired(keep: Tensor, keys: int) -> bool:
        return is_paired(keep, case_of(BF16, 64, Full(), (), lambda _: {}, seq_kv=keys).problem)

    room = torch.zeros(2, 4, 100, 152, dtype=torch.bool)
    assert paired(room[..., :150], 150)
    assert paired(room[:1, :1, :1, :150], 150)
    assert not paired(torch.zeros(1, 149, dtype=torch.bool), 149)
    assert not paired(room[:1, :1, :1, :149], 149)
    assert not paired(room[..., 1:151], 150)
    assert not paired(room.flatten()[: 4 * 151].view(4, 151)[:, :150], 150)
    assert not paired(room[..., :1], 150)
    assert not paired(room[..., :100, :100].transpose(-1, -2), 100)


KEEPS = ["dense", "strided", "padding", "shared", "rows", "padding", "dense"]


def keep_case(kind: str, dtype: Any, dim: int, mask: Any, **fields: Any) -> Case:
    """`shared` has an odd number of keys, so that two of them are no pair."""
    sizes = fields | ({"seq_kv": 149} if kind == "shared" else {})
    plain = case_of(dtype, dim, mask, (), lambda _: {}, **sizes).problem
    keep = keeping(kind, plain)
    return case_of(dtype, dim, mask, (Keep.of(keep, plain),), lambda _: {"keep": keep}, **sizes)


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "added"])
def test_a_mask_of_fewer_dimensions_is_broadcast_over_the_others(additive: bool) -> None:
    for shape, over in (((96, 96), ("batch", "head")), ((2, 1, 96), ("batch", "row")), ((2, 1, 96, 96), ("head",))):
        problem = make_problem((2, 2, 96, 64), BF16, mask=Dense(shape, additive=additive))
        (term,) = rules.in_terms(problem).scores
        assert isinstance(term, Bias if additive else Keep)
        assert term.over == over


def test_two_keys_are_read_at_once_where_no_row_ends_between_them() -> None:
    room = torch.ones(2, 1, 4, 40, dtype=torch.bool)
    for rows, keys, keep, paired in (
        (4, 40, room, True),
        (1, 8, room[:1, :, :1, :8], True),
        (1, 7, room[:1, :, :1, :7], False),
        (4, 38, room[..., :38], True),
        (4, 38, room[..., 1:39], False),
        (4, 20, room[..., ::2], False),
        (4, 8, torch.ones(2, 1, 4, 9, dtype=torch.bool)[..., :8], False),
        (4, 40, room[..., :1], False),
        (4, 40, torch.tensor(True), False),
    ):
        problem = make_problem((2, 1, rows, 64), BF16, seq_kv=keys)
        assert is_paired(keep, problem) == paired, (rows, keys, keep.shape)
        assert Keep.of(keep, problem).paired == paired


@emulated
@both_ways
@pytest.mark.parametrize(
    ("kind", "backend", "dtype", "dim", "mask"), [(k, *row) for k, row in zip(KEEPS, KERNELS, strict=True)], ids=str
)
def test_keep(monkeypatch: Any, kind: str, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    check(monkeypatch, backend, keep_case(kind, dtype, dim, mask, needs_grad=back), back=back)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, BF16), (SM90, F32), (SM80, F32)], ids=str)
def test_nonfinite_values_that_a_tensor_hides_stay_hidden(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    """A row that sees one has it in its result, and no other row does."""
    case = keep_case("dense", dtype, 64, Full())
    case.v[:, :, 40, 3] = torch.nan
    case.v[:, :, 70, 5] = torch.inf
    emulation.install(monkeypatch)
    got, _ = forward(backend, case)
    seen = case.operands["keep"]
    assert torch.equal(got[..., 3].isnan(), seen[..., 40])
    assert torch.equal(got[..., 5].isinf(), seen[..., 70])


@emulated
@both_ways
@pytest.mark.parametrize("padded_left", [False, True], ids=["right", "left"])
@everywhere
def test_key_lengths(
    monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, padded_left: bool, back: bool
) -> None:
    """Of three batches, one without any key."""
    lengths = torch.tensor([70, 0, 131], dtype=torch.int32)
    terms = (KeyLengths(padded_left),)
    case = case_of(dtype, dim, mask, terms, lambda _: {"key_lengths": lengths}, needs_grad=back, batch=3)
    check(monkeypatch, backend, case, back=back)


@emulated
@pytest.mark.parametrize("kind", ["padding", "lengths"])
def test_keys_in_parts(monkeypatch: Any, kind: str) -> None:
    """Few queries of many keys: their keys are divided, and some parts see none; a sink joins one part alone."""
    shape = {"batch": 2, "heads_q": 2, "heads_kv": 2, "seq_q": 70, "seq_kv": 1100}
    keep = torch.arange(1100) % 7 != 0
    given = {"keep": keep.expand(2, 1, 1, 1100), "key_lengths": torch.tensor([1100, 200], dtype=torch.int32)}
    first: Any = KeyLengths() if kind == "lengths" else Keep(("batch", "head", "row"), paired=True)
    terms = (Alibi(), first, Sink())
    given |= {"slopes": torch.tensor([0.01, 0.2]), "sink": torch.tensor([0.5, -1.0])}
    given.pop("keep" if kind == "lengths" else "key_lengths")
    case = case_of(BF16, 64, Full(), terms, lambda _: given, **shape)
    assert SM90.configs(case.problem, H200)[0].split
    check(monkeypatch, SM90, case, back=False)
