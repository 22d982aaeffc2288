"""attention_cached on the CPU: what it means, what it refuses, and that one compiled graph holds it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import tilewise
from cache_cases import Case, assert_as_expected, make
from tilewise import InvalidInput, Target, UnsupportedProblem, cached
from tilewise.plain import reference

F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case((70, 1, 0, 33), dtype=F32),
    Case((70, 1, 0, 33), tokens=3, heads=(4, 2), page=16),
    Case((70, 20), tokens=2, page=7, starts=(13, 20), dtype=F32),
    Case((70, 20), tokens=2, starts=(3, 0), rows=(4, 1), capacity=90),
    Case((90, 20), tokens=4, window=10, page=16, dtype=F32),
    Case((90, 20), tokens=4, window=10, causal=False),
    Case((50, 20), tokens=2, page=16, terms=("softcap", "sink"), dtype=F32),
    Case((50, 20), tokens=2, page=16, terms=("alibi",)),
    Case((50, 20), page=16, terms=("alibi_batched",), dtype=F32),
    Case((50, 20), tokens=3, page=16, terms=("keep",)),
    Case((50, 60, 31), tokens=(20, 1, 5), heads=(4, 2), page=16, dtype=F32),
    Case((0, 30), tokens=(3, 0), page=16, terms=("sink",), dtype=F32),
    Case((30,), tokens=2, dims=(40, 24), dtype=F32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meaning(case):
    made = make(case)
    out, lse = tilewise.attention_cached(made.q, made.k, made.v, **made.told, return_lse=True)
    assert out.dtype == case.dtype
    assert_as_expected(case, made, out, lse)


def test_keys_and_values_may_be_parts_of_one_tensor():
    case = Case((70, 33), tokens=2, page=16, dtype=F32)
    made = make(case)
    both = torch.stack((made.k, made.v), 2)  # (pages, page_size, 2, heads, dim)
    out, lse = tilewise.attention_cached(made.q, both[:, :, 0], both[:, :, 1], **made.told, return_lse=True)
    assert_as_expected(case, made, out, lse)


def test_rows_behind_the_last_offset_see_nothing():
    made = make(Case((30, 20), tokens=(2, 3), page=16, dtype=F32))
    q = torch.cat((made.q, torch.randn(4, *made.q.shape[1:])))
    out, lse = tilewise.attention_cached(q, made.k, made.v, **made.told, return_lse=True)
    assert (out[5:] == 0).all()
    assert (lse[:, 5:] == -torch.inf).all()


def test_nothing_has_a_gradient():
    made = make(Case((30, 20), dtype=F32))
    out = tilewise.attention_cached(made.q.requires_grad_(), made.k, made.v, **made.told)
    assert not out.requires_grad


@pytest.mark.parametrize("terms", [(), ("sink",)], ids=["plain", "sink"])
def test_tensors_whose_memory_holds_the_opposite_are_copied_first(monkeypatch, terms):
    """As PyTorch negates lazily; a kernel reads the memory."""
    made = make(Case((30, 20), page=16, dtype=F32, terms=terms))
    q, k, v = (torch._neg_view(-tensor) for tensor in (made.q, made.k, made.v))
    told = made.told | {name: torch._neg_view(-made.told[name]) for name in terms}
    read = []
    forward = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *given: read.append(given) or forward(*given))
    want = tilewise.attention_cached(made.q, made.k, made.v, **made.told)
    for _ in range(2):  # the second call is a remembered one
        assert torch.equal(tilewise.attention_cached(q, k, v, **told), want)
    for *views, _, _, operands in read:
        assert not any(tensor.is_neg() for tensor in (*views, *operands.values()))
    assert read


def test_lazy_clones_stay_lazy():
    made = make(Case((30, 20), page=16, dtype=F32))
    clones = [torch._lazy_clone(tensor) for tensor in (made.q, made.k, made.v)]
    for _ in range(2):
        tilewise.attention_cached(*clones, **made.told)
    assert all(map(torch._C._is_cow_tensor, clones))


def test_transforms_are_refused():
    """They would see a kernel that has no batching rule, and lose the tangents."""
    made = make(Case((30, 20), page=16, dtype=F32))

    def call(q):
        return tilewise.attention_cached(q, made.k, made.v, **made.told)

    def dual(q):
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(q, q))

    for run in (
        dual,
        lambda q: torch.func.vmap(call)(q[None]),
        lambda q: torch.func.jvp(call, (q,), (q,)),
        torch.func.grad(lambda q: call(q).sum()),
    ):
        with pytest.raises(UnsupportedProblem, match="attention_cached in a transform"):
            run(made.q)


def test_one_compiled_graph_holds_it():
    case = Case((70, 33), tokens=2, page=16, dtype=F32)
    made = make(case)

    def call(q, lengths):
        told = made.told | {"lengths": lengths}
        return tilewise.attention_cached(q, made.k, made.v, **told, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_as_expected(case, made, *compiled(made.q, made.told["lengths"]))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "case", [Case((70, 33), dtype=torch.float64), Case((50, 60), tokens=(4, 1), dtype=BF16)], ids=str
)
def test_the_operator_promises_what_it_returns(case, return_lse):
    made = make(case)
    given = ("lengths", "page_table", "starts", "rows", "cu_seqlens_q", "alibi", "keep", "sink")
    tensors = (made.q, made.k, made.v, *(made.told.get(name) for name in given))
    told = (made.told.get("max_seqlen_q", 0), "causal:bottom-right", None, 0.0, return_lse, False, "auto")
    torch.library.opcheck(torch.ops.tilewise.attention_cached.default, (*tensors, *told), test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"lengths": torch.tensor([99, 3], dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.tensor([30, 3])}, "lengths"),
        ({"lengths": torch.tensor([30], dtype=torch.int32)}, "lengths"),
        ({"page_table": torch.full((2, 2), 99, dtype=torch.int32)}, "page_table"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "page_table"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows"),
        ({"starts": torch.tensor([-1, 0], dtype=torch.int32)}, "starts"),
        ({"mask": tilewise.PrefixLM(3)}, "mask"),
        ({"backend": "nobody"}, "backend"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, names):
    made = make(Case((30, 20), page=16, dtype=F32))
    with pytest.raises(InvalidInput, match=names):
        tilewise.attention_cached(made.q, made.k, made.v, **(made.told | change))


def test_numbers_on_a_device_are_read_where_it_is_asked_for_and_nothing_is_captured(monkeypatch):
    """A stand-in for a tensor of a GPU, which is asked where it is."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensor = SimpleNamespace(device=torch.device("cuda"), is_cuda=True)
    assert cached._are_read(torch.zeros(1))
    for value, read in ((None, False), ("0", False), ("", False), ("1", True)):
        monkeypatch.delenv("TILEWISE_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("TILEWISE_CHECK", value)
        assert cached._are_read(tensor) is read
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not cached._are_read(tensor)


def test_explain_says_what_would_run():
    made = make(Case((30, 20), page=16))
    plan = tilewise.explain_cached(made.q, made.k, made.v, **made.told, target=Target.named("a100"))
    assert plan.backend == "sm80"
    assert "put together by the last to finish" in str(plan)
    assert tilewise.explain_cached(made.q, made.k, made.v, **made.told).backend == "reference"
