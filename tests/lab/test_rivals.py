"""Other libraries' attention: how each is called, what it lacks, and the tensors it gets.

Modules that stand in for what needs a GPU attend by definition, sequence by sequence, and note how they were called.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from support import assert_close, budget, exact, make_problem
from tilewise import masks
from tilewise.lab.candidates import compiled, rivals
from tilewise.lab.candidates.names import PLAIN, Candidate
from tilewise.lab.candidates.rivals import FA3, FA4, FLASHINFER, VARLEN
from tilewise.lab.measure.worker import Worker
from tilewise.lab.studies import suites
from tilewise.masks import Causal, Dense, Documents, Full, Mask, Window
from tilewise.plain import reference
from tilewise.scores import Term

if TYPE_CHECKING:
    from tilewise.problem import Problem

Tensor = torch.Tensor
BF16 = torch.bfloat16


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, cap: float = 0.0, shown: Tensor | None = None
) -> Tensor:
    """One sequence, (tokens, heads, dim). `left` and `right` of a window at the bottom right; -1: no limit."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    rows, keys = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
    ahead = keys - (rows + k.shape[0] - q.shape[0])
    visible = (ahead <= (right if right >= 0 else k.shape[0])) & (-ahead <= (left if left >= 0 else k.shape[0]))
    scores = scores.masked_fill(~(visible if shown is None else shown), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v.double()).to(v.dtype)


def by_sequence(starts_q: Tensor, starts_kv: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Every sequence of tensors in which they lie end to end."""
    ends = zip(pairwise(starts_q.tolist()), pairwise(starts_kv.tolist()), strict=True)
    return torch.cat([attend(q[q0:q1], k[k0:k1], v[k0:k1], **options) for (q0, q1), (k0, k1) in ends])


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    *above, _ = name.split(".")
    for count in range(len(above)):
        parent = ".".join(above[: count + 1])
        if parent != "torch" and not parent.startswith("torch."):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def fake_varlen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    called: list[dict[str, Any]] = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        called.append({"max": (max_q, max_k), "window": window_size, "gqa": enable_gqa, "q": query})
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        left, right = window_size
        return by_sequence(cu_seq_q, cu_seq_k, query, key, value, scale=scale, left=left, right=right)

    stand_in(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)
    return called


@dataclass
class FakeWrapper:
    """FlashInfer's wrapper: planned once, run often."""

    workspace: Tensor
    layout: str
    called: ClassVar[list[dict[str, Any]]] = []

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, qo_heads: int, kv_heads: int, dim: int, **options: Any
    ) -> None:
        FakeWrapper.called.append({"heads": (qo_heads, kv_heads), "dim": dim, **options})
        self.starts, self.options = (qo_indptr, kv_indptr), options

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (self.layout, q.is_contiguous(), k.is_contiguous()) == ("NHD", True, True)
        o = self.options
        common: dict[str, Any] = {"scale": o["sm_scale"], "cap": o["logits_soft_cap"]}
        if o["custom_mask"] is None:
            common |= {"left": o["window_left"], "right": 0 if o["causal"] else -1}
            return by_sequence(*self.starts, q, k, v, **common)
        (q0, q1, *_), (k0, k1, *_) = (starts.tolist() for starts in self.starts)
        shown = o["custom_mask"].view(-1, q1 - q0, k1 - k0)
        return torch.cat(
            [
                attend(*parts, left=-1, right=-1, shown=one, **common)
                for one, *parts in zip(shown, q.split(q1), k.split(k1), v.split(k1), strict=True)
            ]
        )


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(FakeWrapper, "called", [])
    stand_in(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=FakeWrapper)
    return FakeWrapper.called


def assert_right(name: str, problem: Problem) -> None:
    """The candidate gives what float64 gives, and the gradients where they are wanted."""
    candidate = Candidate(name)
    inputs = candidate.inputs(problem, 0, "cpu")
    out = candidate.forward(problem, inputs)()
    dout = inputs.dout if problem.needs_grad else None
    want = exact(*inputs[:3], problem, inputs.bias, dout)
    allowed = budget(problem.dtype, problem.seq_kv)
    assert_close(out, want[0], allowed)
    if dout is not None:
        grads = torch.autograd.grad(out, inputs[:3], dout)
        for what, got, true in zip(("dq", "dk", "dv"), grads, want[2:], strict=True):
            assert_close(got, true, allowed, what)


BANDS = [
    Full(),
    Causal("bottom-right"),
    Window(5, 0, "bottom-right"),
    Documents((0, 7, 7, 24), (0, 9, 12, 32), Causal("bottom-right")),
    Documents((0, 7, 24), (0, 9, 32), Window(3, 0, "bottom-right")),
]


@pytest.mark.parametrize("mask", [*BANDS, Window(5, 2, "bottom-right"), Window(None, 2, "bottom-right")], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_varlen_packs_batches_and_documents(mask: Mask, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = fake_varlen(monkeypatch)
    problem = make_problem(
        (2, 4, 24, 16), seq_kv=32, heads_kv=2, mask=mask, layout=layout, needs_grad=True, dtype=torch.float32
    )
    assert_right(VARLEN, problem)
    (call,) = called
    assert call["gqa"]
    assert call["q"].shape == (48, 4, 16)
    assert call["q"].is_contiguous(), "no copy of ours is in the call"
    starts = (mask.cu_seqlens_q, mask.cu_seqlens_kv) if isinstance(mask, Documents) else ((0, 24), (0, 32))
    assert call["max"] == tuple(max(end - start for start, end in pairwise(one)) for one in starts)


SQUARES = [  # of which FlashInfer has names
    Causal("bottom-right"),
    Window(5, 0, "bottom-right"),
    Documents((0, 7, 7, 24), (), Causal("bottom-right")),
    Documents((0, 7, 24), (), Window(3, 0, "bottom-right")),
]


@pytest.mark.parametrize(
    ("mask", "seq_kv"),
    [
        *((mask, 24) for mask in SQUARES),
        *((mask, 32) for mask in (Full(), Documents((0, 7, 7, 24), (0, 9, 12, 32)), Causal(), Window(5, 2))),
        *((Dense(shape), 32) for shape in ((24, 32), (2, 1, 24, 32), (1, 32))),
    ],
    ids=str,
)
def test_flashinfer_is_planned_once_and_gets_other_masks_as_a_tensor(
    mask: Mask, seq_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = fake_flashinfer(monkeypatch)
    problem = make_problem((2, 4, 24, 64), seq_kv=seq_kv, heads_kv=2, head_dim_v=64, mask=mask, softcap=3.0)
    assert_right(FLASHINFER, problem)
    (plan,) = called
    assert (plan["heads"], plan["dim"], plan["head_dim_vo"]) == ((4, 2), 64, 64)
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.float32
    assert (plan["custom_mask"] is None) == (mask in (*SQUARES, Full()) or isinstance(mask, Documents))


@pytest.mark.parametrize("name", ["flash-attn", "fa4"])
@pytest.mark.parametrize("inner", [Full(), Causal(), Window(3, 1)], ids=str)
def test_flash_attention_gets_documents_packed(name: str, inner: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[Any, Any], softcap: float,
        deterministic: bool, dropout_p: float = 0.0,
    ) -> Any:  # fmt: skip
        called.append({"max": (max_seqlen_q, max_seqlen_k), "causal": causal, "window": window_size})
        left, right = (-1 if size is None else size for size in window_size)
        right = 0 if causal else right
        out = by_sequence(cu_seqlens_q, cu_seqlens_k, q, k, v, scale=softmax_scale, left=left, right=right, cap=softcap)
        return (out, None) if name == "fa4" else out

    module = "flash_attn.cute" if name == "fa4" else "flash_attn"
    stand_in(monkeypatch, module, flash_attn_varlen_func=varlen)
    mask = Documents((0, 7, 24), (), inner)  # type: ignore[arg-type]
    assert_right(name, make_problem((2, 4, 24, 16), heads_kv=2, mask=mask, needs_grad=True, softcap=2.0))
    unlimited = None if name == "fa4" else -1
    window = (3, 1) if isinstance(inner, Window) else (unlimited, unlimited)
    assert called == [{"max": (17, 17), "causal": isinstance(inner, Causal), "window": window}]


@pytest.mark.parametrize("inner", [Full(), Causal()], ids=str)
def test_flash_attention_3_gets_documents_packed(inner: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position and by names that its interface has; it has no backward, and other names than those are none."""
    called: list[tuple[int, int]] = []

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, seqused_q: None = None, seqused_k: None = None, softmax_scale: float | None = None,
        causal: bool = False, *, softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert q.is_contiguous(), "no copy of ours is in the call"
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert softmax_scale is not None
        called.append((max_seqlen_q, max_seqlen_k))
        right = 0 if causal else -1
        return by_sequence(cu_seqlens_q, cu_seqlens_k, q, k, v, scale=softmax_scale, left=-1, right=right, cap=softcap)

    stand_in(monkeypatch, "fa3_fwd_interface", flash_attn_varlen_func=varlen)
    mask = Documents((0, 7, 24), (), inner)  # type: ignore[arg-type]
    assert_right(FA3, make_problem((2, 4, 24, 16), heads_kv=2, mask=mask, softcap=2.0))
    assert called == [(17, 17)]


@pytest.mark.parametrize(
    ("mask", "takes"),
    [
        (Documents((0, 7, 24), (), Causal()), True),
        (Documents((0, 7, 24), (0, 9, 32), Causal("bottom-right")), True),
        (Documents((0, 7, 24), (0, 9, 32), Causal()), False),
        (Documents((0, 7, 24), (), Window(3, 0)), False),
    ],
    ids=str,
)
def test_flash_attention_3_takes_documents_without_windows(
    mask: Documents, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "fa3_fwd_interface")
    problem = make_problem((1, 4, 24, 64), BF16, seq_kv=mask.cu_seqlens_kv[-1], mask=mask)
    assert (Candidate(FA3).why_not(problem, "cuda") == []) == takes


@pytest.mark.parametrize(
    ("name", "wrong", "change"),
    [
        (VARLEN, "float32", {"dtype": torch.float32}),
        (VARLEN, "mask causal", {"mask": Causal(), "seq_q": 32}),
        (VARLEN, "mask documents", {"mask": Documents((0, 8, 64), (0, 9, 64), Causal())}),
        (VARLEN, "head_dim 260", {"head_dim": 260, "head_dim_v": 260}),
        (VARLEN, "another head_dim", {"head_dim_v": 128}),
        (VARLEN, "softcap", {"softcap": 3.0}),
        (VARLEN, "dropout", {"dropout": 0.5}),
        (VARLEN, "lse", {"needs_lse": True}),
        (FLASHINFER, "float32", {"dtype": torch.float32}),
        (FLASHINFER, "adds none", {"mask": Dense((64, 64), additive=True)}),
        (FLASHINFER, "one mask for all heads", {"mask": Dense((4, 64, 64))}),
        (FLASHINFER, "2^31", {"mask": Window(9, 9), "seq_q": 2**16, "seq_kv": 2**16}),
        (FLASHINFER, "head_dim 96", {"head_dim": 96, "head_dim_v": 96}),
        (FLASHINFER, "no backward", {"needs_grad": True}),
        (FLASHINFER, "dropout", {"dropout": 0.5}),
        (FLASHINFER, "lse", {"needs_lse": True}),
    ],
)
def test_each_says_what_it_lacks(
    name: str, wrong: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_varlen(monkeypatch)
    fake_flashinfer(monkeypatch)
    problem = make_problem((2, 4, 64, 64), BF16)
    assert Candidate(name).why_not(problem, "cuda") == []
    assert ["CUDA kernels alone" in reason.what for reason in Candidate(name).why_not(problem, "cpu")] == [True]
    assert [wrong in reason.what for reason in Candidate(name).why_not(problem.with_(**change), "cuda")] == [True]


def test_a_varlen_attn_of_an_older_pytorch_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "torch.nn.attention.varlen", varlen_attn=lambda query, key, value, is_causal=False: query)
    problem = make_problem((2, 4, 64, 64), BF16)
    (reason,) = Candidate(VARLEN).why_not(problem, "cuda")
    assert "has no scale, window_size" in reason.what
    (reason,) = Candidate(VARLEN).why_not(problem.with_(heads_kv=2), "cuda")
    assert "has no enable_gqa, scale, window_size" in reason.what


def test_this_pytorch_has_the_varlen_attn_that_is_called() -> None:
    (reason,) = Candidate(VARLEN).why_not(make_problem((2, 4, 64, 64), BF16), "cpu")
    assert "CUDA" in reason.what


def test_they_are_columns_where_they_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert not any(FLASHINFER in row.candidates for row in suites.suite("decode"))
    assert "flashinfer-python" in str(Candidate(FLASHINFER).why_not(suites.rows_of("decode")[0].problem)[0])
    fake_flashinfer(monkeypatch)
    assert all(FLASHINFER in row.candidates for row in (*suites.suite("decode"), *suites.suite("chunked")))
    assert not any(FLASHINFER in row.candidates for row in suites.suite("drawn"))
    for name in (FLASHINFER, VARLEN):
        assert not Candidate(name).is_peer
        assert not Candidate(name).is_ours


def test_a_worker_verifies_what_gets_its_tensors_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The truth is that of the tensors as all others get them."""
    fake_varlen(monkeypatch)
    asked = make_problem((2, 4, 24, 16), heads_kv=2, mask=Causal(), needs_grad=True).to_dict()
    worker, path = Worker(), str(tmp_path / "truth.pt")
    worker.truth(asked, 3, "cpu", path)
    worker.prepare(VARLEN, asked, 3, "cpu")
    told = worker.verify(path)
    worker.forget()
    assert told["wrong"] == []
    assert set(told["errors"]) >= {"out", "dq", "dk", "dv"}


class Doubled(Term):
    """A term that no other library can know of."""

    __slots__ = ()

    def __str__(self) -> str:
        return "doubled"


@pytest.mark.parametrize("name", [*rivals.RIVALS, "torch-default", "torch-flash"])
def test_terms_of_ours_are_refused_by_everybody_else(name: str) -> None:
    problem = make_problem((2, 4, 64, 64), BF16)
    object.__setattr__(problem, "scores", (Doubled(),))
    assert any("the term doubled" in reason.what for reason in Candidate(name).why_not(problem, "cuda"))


# --- FlexAttention


@dataclass(frozen=True, slots=True)
class Prefix(Mask):
    """Causal, but for the first `size` keys, which every row sees: a span that is no band."""

    size: int

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        return 0, min(seq_kv, max(self.size, row + 1))

    def spans(self, rows: Tensor, seq_q: int, seq_kv: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(rows), (rows + 1).clamp(self.size, seq_kv)

    def __str__(self) -> str:
        return f"prefix:{self.size}"


SHAPES = [(24, 32), (1, 32), (24, 1), (4, 24, 32), (2, 1, 24, 32), (2, 4, 24, 32), (2, 1, 1, 32)]
FLEX_MASKS = [
    Full(),
    Causal("bottom-right"),
    Window(3, 1),
    Documents((0, 10, 24), (0, 12, 32), Causal()),
    Prefix(6),
    *(Dense(shape, additive) for shape in SHAPES for additive in (False, True)),
]


@pytest.mark.parametrize("mask", FLEX_MASKS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_takes_every_mask_and_bias(mask: Mask, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled: the rules are what is tested, and torch.compile takes minutes on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = make_problem((2, 4, 24, 16), seq_kv=32, heads_kv=2, mask=mask, softcap=softcap)
    assert Candidate("flex").why_not(problem, "cpu") == []
    assert_right("flex", problem)


def test_flex_skips_blocks_that_a_bias_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias with -inf is a mask too where whole blocks of it are; elsewhere the sum hides by itself."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *given, **options: seen.append(options))
    problem = make_problem((1, 1, 512, 16), mask=Dense((512, 512), additive=True))
    inputs = Candidate("flex").inputs(problem, 0, "cpu")
    assert inputs.bias is not None
    halved = inputs._replace(bias=inputs.bias.masked_fill(torch.arange(512) >= 256, -torch.inf))
    for given in (inputs, halved):
        Candidate("flex").forward(problem, given)()
    scattered, banded = seen
    assert "block_mask" not in scattered
    assert banded["block_mask"].sparsity() == pytest.approx(50.0)
    assert compiled.score_rule(problem, inputs) is not None


def test_the_rule_for_a_band_captures_no_tensor() -> None:
    problem = make_problem((1, 1, 24, 16), mask=masks.parse("window:3,1"))
    rule = compiled.mask_rule(problem, Candidate("flex").inputs(problem, 0, "cpu"))
    assert rule is not None
    assert not any(isinstance(cell.cell_contents, Tensor) for cell in rule.__closure__ or ())


@pytest.mark.parametrize("mask", ["documents:0,5,6,20:causal", "causal:bottom-right", "full"])
def test_our_packed_function_is_a_candidate(mask):
    problem = make_problem((2, 4, 20, 16), heads_kv=2, mask=masks.parse(mask), needs_grad=True)
    candidate = Candidate("tilewise:packed")
    assert candidate.is_ours
    assert not candidate.why_not(problem, "cpu")
    inputs = candidate.inputs(problem, 0, "cpu")
    want, _ = reference.forward(inputs.q, inputs.k, inputs.v, problem)
    assert_close(candidate.forward(problem, inputs)(), want, budget(problem.dtype, 16))


def test_our_packed_function_lacks_masks_that_are_no_band():
    problem = make_problem((2, 4, 20, 16), mask=masks.parse("prefix_lm:3"))
    assert Candidate("tilewise:packed").why_not(problem, "cpu")


def test_the_suite_of_packed_sequences():
    rows = suites.rows_of("packed")
    assert len({row.name for row in rows}) == len(rows) >= 24
    for row in rows:
        assert row.candidates[0] == "tilewise:packed"
        assert not Candidate("tilewise:packed").why_not(row.problem)
        assert row.problem.seq_q == row.problem.mask.cu_seqlens_q[-1]
        assert row.goal.floor


def test_equal_lengths_are_held_against_a_batch_of_them():
    rows = suites.rows_of("packed")
    equal = [row for row in rows if len({end - begin for begin, end in pairwise(row.problem.mask.cu_seqlens_q)}) == 1]
    assert {row.times for row in equal} == {("forward",), ("step",)}
    for row in rows:
        assert (row.plain is not None) == (PLAIN in row.candidates) == bool(row.goal.plain_limit) == (row in equal)
    for row in equal:
        batch = row.asked(PLAIN)
        assert (batch.pairs(), batch.needs_grad) == (row.problem.pairs(), row.problem.needs_grad)
        assert batch.batch * batch.seq_q == row.problem.seq_q


def test_the_suite_of_packed_sequences_has_every_library_beside_it(monkeypatch):
    """As PyTorch 2.11 has varlen_attn, which knows no grouped heads."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    stand_in(monkeypatch, "torch.nn.attention.varlen", varlen_attn=lambda query, *, scale, window_size: query)
    stand_in(monkeypatch, "fa3_fwd_interface")
    stand_in(monkeypatch, "flash_attn.cute")
    for row in suites.suite("packed"):
        there = {
            name for name in row.candidates if not Candidate(name).is_ours and not Candidate(name).why_not(row.problem)
        }
        forward, window = row.times == ("forward",), "window" in row.name
        taken = {VARLEN: row.problem.group == 1, FA3: forward and not window, FA4: True}
        assert there == {name for name, takes in taken.items() if takes}, row.name
