"""Terms that read tensors through `tilewise.attention`: planned, bound and called, with the gradients of autograd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import emulation
import tilewise
from support import assert_close, budget, make_problem, same_bits
from tilewise import Causal, Full, InvalidInput, Target
from tilewise.call import build, memory
from tilewise.scores import Softcap, Term, parse_all, text_of
from tilewise.target import assumed
from tilewise.terms import Alibi, Bias, Dropout, Keep, KeyLengths, MaxLogit, RelativeBias, Sink

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 70, 90, 64


class Asked(NamedTuple):
    terms: tuple[Term, ...]
    operands: dict[str, Tensor]
    learned: tuple[str, ...] = ()


def asked(name: str) -> Asked:
    """Terms and their tensors, of problems with these sizes."""
    generator = torch.Generator().manual_seed(3)
    problem = make_problem((BATCH, HEADS, ROWS, DIM), torch.bfloat16, heads_kv=HEADS_KV, seq_kv=KEYS)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keep = drawn(BATCH, 1, ROWS, KEYS) > -0.5
    keep[0, 0, 5] = False
    padding = (torch.arange(KEYS) < torch.tensor([[KEYS], [40]]))[:, None, None]
    bias, seed = drawn(1, HEADS, ROWS, KEYS), torch.tensor([1234, 1 << 33])
    lengths = torch.tensor([KEYS, 40], dtype=torch.int32)
    return {
        "alibi": Asked((Alibi(),), {"slopes": drawn(HEADS).abs() / 8}, ("slopes",)),
        "alibi per batch": Asked((Softcap(5.0), Alibi(True)), {"slopes": drawn(BATCH, HEADS) / 8}, ("slopes",)),
        "keep": Asked((Keep.of(keep, problem),), {"keep": keep}),
        "keep keys": Asked((Keep.of(padding, problem),), {"keep": padding}),
        "lengths": Asked((KeyLengths(True),), {"key_lengths": lengths}),
        "bias": Asked((Bias.of(bias, problem),), {"bias": bias}, ("bias",)),
        "bias alone": Asked((Bias("float32"),), {"bias": bias}),
        "sink": Asked((Sink(),), {"sink": drawn(HEADS)}, ("sink",)),
        "lengths and sink": Asked((KeyLengths(), Sink()), {"key_lengths": lengths, "sink": drawn(HEADS)}, ("sink",)),
        "dropout": Asked((Dropout(0.25),), {"seed": seed}),
        "table": Asked((RelativeBias(41, 20),), {"table": drawn(HEADS, 41)}, ("table",)),
    }[name]


NAMES = [
    "alibi", "alibi per batch", "keep", "keep keys", "lengths", "bias", "bias alone", "sink", "lengths and sink",
    "dropout", "table",
]  # fmt: skip


def results(case: Asked, mask: Any, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """out, lse and all gradients of a call."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, ROWS), (HEADS_KV, KEYS), (HEADS_KV, KEYS), (HEADS, ROWS)]
    drawn = [torch.randn(BATCH, *shape, DIM, generator=generator).bfloat16() for shape in shapes]
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in drawn[:3])
    operands = {
        name: tensor.clone().requires_grad_() if name in case.learned else tensor
        for name, tensor in case.operands.items()
    }
    call = {"scores": case.terms, "operands": operands, "return_lse": True, "backend": backend}
    out, lse = tilewise.attention(q, k, v, mask=mask, **call)
    (out * drawn[3].to(dtype)).sum().backward()
    learned = {name: operands[name].grad for name in case.learned}
    return {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "k": k.grad, "v": v.grad, **learned}


def check(case: Asked, mask: Any, dtype: torch.dtype, backend: str) -> None:
    want = results(case, mask, torch.float64, "reference")
    got = results(case, mask, dtype, backend)
    assert set(got) == set(want)
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape, name
        assert_close(tensor, want[name], (1 if name in ("out", "lse") else 4) * budget(dtype, KEYS), name)


@pytest.mark.parametrize("mask", [Full(), Causal("bottom-right")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_and_the_tiles_agree(name: str, mask: Any) -> None:
    for backend in ("reference", "tiled"):
        check(asked(name), mask, torch.float32, backend)


@contextlib.contextmanager
def on_a_model(monkeypatch: Any, backend: str) -> Iterator[None]:
    """A model of a GPU that has these kernels in the place of the CPU, for calls from end to end."""
    emulation.install(monkeypatch)
    monkeypatch.setattr(build, "_build", lambda plan: None)
    with assumed(Target.named({"sm80": "a100", "sm90": "h200"}[backend])):
        yield


@emulation.emulated
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_runs_the_kernels_of_the_plan(monkeypatch: Any, name: str, backend: str) -> None:
    """On a model of the hardware, by the way of every call: only what a GPU is, and what it builds, is told to it."""
    case = asked(name)
    want = results(case, Causal(), torch.float64, "reference")
    with on_a_model(monkeypatch, backend):
        got = results(case, Causal(), torch.bfloat16, "auto")
        chosen = {call.backend.name for call in memory._calls._known.values() if hasattr(call.backend, "name")}
    assert chosen == {backend}
    for key, tensor in got.items():
        assert tensor.shape == want[key].shape, key
        assert_close(tensor, want[key], (1 if key in ("out", "lse") else 4) * budget(torch.bfloat16, KEYS), key)


@pytest.mark.parametrize("name", NAMES)
def test_terms_travel_as_text(name: str) -> None:
    terms = asked(name).terms
    assert parse_all(text_of(terms)) == terms


@pytest.mark.parametrize(
    ("terms", "operands", "said"),
    [
        ((Alibi(),), {"slopes": torch.zeros(3)}, "slopes"),
        ((Alibi(),), {"slopes": torch.zeros(HEADS, dtype=torch.float64)}, "dtype"),
        ((Alibi(),), {"slopes": torch.zeros(BATCH, HEADS)}, "over"),
        ((Keep(("row",)),), {"keep": torch.ones(ROWS, KEYS, dtype=torch.bool)}, "over"),
        ((Keep((), True),), {"keep": torch.ones(1, 1, ROWS, 2 * KEYS, dtype=torch.bool)[..., ::2]}, "paired"),
        ((KeyLengths(),), {"key_lengths": torch.ones(BATCH, dtype=torch.int64)}, "dtype"),
        ((MaxLogit(),), {}, "max_logit"),
    ],
    ids=str,
)
def test_tensors_that_a_term_cannot_read_are_refused(terms: Any, operands: Any, said: str) -> None:
    q = torch.zeros(BATCH, HEADS, ROWS, DIM)
    k = torch.zeros(BATCH, HEADS, KEYS, DIM)
    with pytest.raises(InvalidInput, match=said):
        tilewise.attention(q, k, k, scores=terms, operands=operands)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_alibi_keep_and_sink_have_names(layout: str) -> None:
    """Beside a mask, and beside terms and operands: the same as these terms."""
    torch.manual_seed(0)
    q, k = torch.randn(BATCH, HEADS, ROWS, DIM), torch.randn(BATCH, HEADS_KV, KEYS, DIM)
    padding = (torch.arange(KEYS) < torch.tensor([[KEYS], [40]]))[:, None, None]
    slopes, sink = torch.rand(HEADS).requires_grad_(), torch.randn(HEADS).bfloat16().requires_grad_()
    table = torch.randn(HEADS, 9)
    named = {"scores": (RelativeBias(9, 4),), "operands": {"table": table}, "mask": "causal"}
    terms = (RelativeBias(9, 4), Alibi(), Keep(("head", "row")), Sink())
    operands = {"table": table, "slopes": slopes, "keep": padding, "sink": sink.float()}
    want = tilewise.attention(q, k, k, mask="causal", scores=terms, operands=operands)
    views = (q, k, k) if layout == "bhsd" else (q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))
    got = tilewise.attention(*views, alibi=slopes, keep=padding, sink=sink, layout=layout, **named)
    assert torch.equal(got if layout == "bhsd" else got.transpose(1, 2), want)
    wanted = torch.autograd.grad(want.sum(), (slopes, sink))
    assert same_bits(torch.autograd.grad(got.sum(), (slopes, sink)), wanted)
    plan = tilewise.explain(*views, alibi=slopes, keep=padding, sink=sink, layout=layout, **named)
    assert [term.kind for term in plan.problem.scores] == ["relative_bias", "alibi", "keep", "sink"]
    assert plan.problem.operand_grads == ("slopes", "sink")


def test_names_of_terms_say_what_they_take() -> None:
    q = torch.zeros(BATCH, HEADS, ROWS, DIM)
    with pytest.raises(InvalidInput, match="boolean"):
        tilewise.attention(q, q, q, keep=torch.zeros(ROWS))
    with pytest.raises(InvalidInput, match="alibi"):
        tilewise.attention(q, q, q, alibi=[0.5] * HEADS)
    ones = torch.ones(ROWS, ROWS)
    for name, tensor in {"keep": ones.bool(), "mask": ones, "sink": ones[0, :HEADS]}.items():
        with pytest.raises(InvalidInput, match=f"{name}: got a torch.sparse_coo tensor"):
            tilewise.attention(q, q, q, **{name: tensor.to_sparse()})
    with pytest.raises(InvalidInput, match="sink"):
        tilewise.attention(q, q, q, sink=torch.zeros(HEADS + 1))
    hides = torch.ones(ROWS, ROWS).bool()
    for keep in (torch.ones(3, ROWS).bool(), torch.ones(ROWS, ROWS, device="meta").bool()):
        with pytest.raises(InvalidInput, match=r"keep: .* fits the mask's \(70, 70\) on cpu"):
            tilewise.attention(q, q, q, mask=hides, keep=keep)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_boolean_mask_and_keep_hide_what_either_hides(layout: str) -> None:
    q = torch.randn(BATCH, ROWS, ROWS, DIM) if layout == "bhsd" else torch.randn(BATCH, ROWS, HEADS, DIM)
    mask, keep = torch.rand(ROWS, ROWS) > 0.3, torch.rand(BATCH, 1, 1, ROWS) > 0.3
    want = tilewise.attention(q, q, q, mask=mask & keep, layout=layout)
    got = tilewise.attention(q, q, q, mask=mask, keep=keep, layout=layout)
    assert_close(got, want, budget(torch.float32, ROWS))
    problem = tilewise.explain(q, q, q, mask=mask, keep=keep, layout=layout).problem
    assert problem.scores == (Keep.of(mask & keep, problem),)


def test_named_terms_compile() -> None:
    q = torch.randn(BATCH, HEADS, ROWS, DIM)
    keep, slopes = torch.rand(BATCH, 1, 1, ROWS) > 0.3, torch.rand(HEADS)

    def call(q: Tensor, keep: Tensor, slopes: Tensor) -> Tensor:
        return tilewise.attention(q, q, q, mask="causal", keep=keep, alibi=slopes)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, keep, slopes), call(q, keep, slopes))


def masked(mask: Tensor, dtype: torch.dtype, backend: str, softcap: float) -> dict[str, Tensor]:
    """out and all gradients of a call with a mask that is a tensor, that of an additive one among them."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(BATCH, HEADS, ROWS, DIM, generator=generator).bfloat16().to(dtype).requires_grad_()
    k = torch.randn(BATCH, HEADS_KV, KEYS, DIM, generator=generator).bfloat16().to(dtype).requires_grad_()
    mask = mask if mask.dtype == torch.bool else mask.to(dtype).requires_grad_()
    out = tilewise.attention(q, k, k, mask=mask, softcap=softcap, backend=backend)
    out.square().sum().backward()
    grads = {"q": q.grad, "k": k.grad}
    return {"out": out.detach(), **grads, **({} if mask.grad is None else {"mask": mask.grad})}


def all_learned(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """out and the gradients of a mask, a table, slopes and sinks that are learned in one call."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (BATCH, HEADS, ROWS, DIM), "k": (BATCH, HEADS_KV, KEYS, DIM), "mask": (HEADS, ROWS, KEYS)}
    drawn = {name: torch.randn(shape, generator=generator).bfloat16().to(dtype) for name, shape in shapes.items()}
    shapes = {"table": (HEADS, 41), "alibi": (HEADS,), "sink": (HEADS,)}
    leaves = drawn | {name: torch.randn(shape, generator=generator).abs() / 4 for name, shape in shapes.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    q, k, mask, table, alibi, sink = leaves.values()
    terms = {"scores": (RelativeBias(41, 20),), "operands": {"table": table}, "alibi": alibi, "sink": sink}
    out = tilewise.attention(q, k, k, mask=mask, backend=backend, **terms)
    out.square().sum().backward()
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@emulation.emulated
@pytest.mark.parametrize("backend", ["tiled", "sm80", "sm90"])
def test_a_learned_mask_beside_other_learned_operands(monkeypatch: Any, backend: str) -> None:
    want = all_learned(torch.float64, "reference")
    place = contextlib.nullcontext() if backend == "tiled" else on_a_model(monkeypatch, backend)
    with place:
        got = all_learned(torch.bfloat16, backend)
    for name, tensor in got.items():
        allowed = {"out": 1, "alibi": 30}.get(name, 6)  # slopes have distances as factors, and their sums cancel
        assert_close(tensor, want[name], allowed * budget(torch.bfloat16, KEYS), name)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_boolean_mask_beside_a_learned_bias(backend: str) -> None:
    """The gradient of the bias is counted once."""
    q, mask = torch.randn(BATCH, HEADS, ROWS, DIM), torch.rand(ROWS, ROWS) > 0.4
    bias = torch.randn(HEADS, ROWS, ROWS).requires_grad_()
    hidden = bias.masked_fill(~mask, -torch.inf)
    want = torch.softmax(q @ q.mT / DIM**0.5 + hidden, -1) @ q
    term = Bias.of(bias[None], make_problem(q.shape, torch.float32))
    got = tilewise.attention(q, q, q, mask=mask, backend=backend, scores=(term,), operands={"bias": bias})
    wanted, found = (torch.autograd.grad(out.square().sum(), bias)[0] for out in (want, got))
    assert_close(found, wanted, budget(torch.float32, ROWS))


MASKS = {
    "padding": lambda: (torch.arange(KEYS) < torch.tensor([[KEYS], [40]]))[:, None, None],
    "boolean": lambda: torch.rand(HEADS, ROWS, KEYS) > 0.4,
    "strided": lambda: (torch.rand(KEYS, ROWS) > 0.4).T,
    "added": lambda: torch.randn(ROWS, KEYS).bfloat16().masked_fill(torch.rand(ROWS, KEYS) > 0.8, -torch.inf),
    "added to all": lambda: torch.randn(BATCH, HEADS, ROWS, KEYS).bfloat16(),
}


@emulation.emulated
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("kind", MASKS)
def test_kernels_read_masks_that_are_tensors(monkeypatch: Any, kind: str, backend: str) -> None:
    torch.manual_seed(5)
    mask = MASKS[kind]()
    softcap = 0.0 if kind == "padding" else 8.0
    want = masked(mask, torch.float64, "reference", softcap)
    with on_a_model(monkeypatch, backend):
        got = masked(mask, torch.bfloat16, backend, softcap)
    assert set(got) == set(want)
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape, name
        assert_close(tensor, want[name], (1 if name == "out" else 4) * budget(torch.bfloat16, KEYS), name)
