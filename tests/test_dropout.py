"""`attention(..., dropout=p)`: one pattern per seed in every backend of ours, by PyTorch's generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import emulation
import tilewise
from support import assert_close, budget, make_problem
from test_terms_call import on_a_model
from tilewise import Causal, Documents, KeyLengths, Target, Window
from tilewise.plan import plan
from tilewise.terms import Dropout

Tensor = torch.Tensor
BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 70, 90, 64
OURS = ["reference", "tiled"]


def results(dtype: torch.dtype, backend: str, **asked: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of a call with dropout, from seed 7."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, ROWS), (HEADS_KV, KEYS), (HEADS_KV, KEYS), (HEADS, ROWS)]
    drawn = [torch.randn(BATCH, *shape, DIM, generator=generator).bfloat16().to(dtype) for shape in shapes]
    q, k, v = (tensor.requires_grad_() for tensor in drawn[:3])
    torch.manual_seed(7)
    out, lse = tilewise.attention(q, k, v, dropout=0.3, return_lse=True, backend=backend, **asked)
    torch.manual_seed(8)  # the backward must not depend on it
    (out * drawn[3]).sum().backward()
    return {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


ASKED: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "softcap": {"mask": Window(40, 5), "softcap": 4.0},
    "padding": {"mask": KeyLengths([90, 33], inner="causal")},
    "documents": {"mask": Documents((0, 20, 70), (0, 60, 90))},
    "keep": {"keep": (torch.arange(90) % 3 != 0)[None]},
}


@pytest.mark.parametrize("name", ASKED)
def test_backends_of_torch_operations_drop_the_same(name: str) -> None:
    want = results(torch.float64, "reference", **ASKED[name])
    for tensor, other in zip(results(torch.float32, "tiled", **ASKED[name]).values(), want.values(), strict=True):
        assert_close(tensor, other, 4 * budget(torch.float32, KEYS))


@emulation.emulated
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("name", ASKED)
def test_kernels_drop_the_same(monkeypatch: Any, name: str, backend: str) -> None:
    want = results(torch.float64, "reference", **ASKED[name])
    with on_a_model(monkeypatch, backend):
        for _ in range(2):  # planned, then remembered
            got = results(torch.bfloat16, backend, **ASKED[name])
            for key, tensor in got.items():
                assert_close(tensor, want[key], (1 if key in ("out", "lse") else 4) * budget(torch.bfloat16, KEYS), key)


def inputs() -> list[Tensor]:
    return [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("backend", OURS)
def test_every_call_draws_anew_and_a_seed_gives_it_again(backend: str) -> None:
    q, k, v = inputs()

    def call() -> Tensor:
        return tilewise.attention(q, k, v, dropout=0.5, backend=backend)

    torch.manual_seed(0)
    first, second = call(), call()
    torch.manual_seed(0)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_again(backend: str, reentrant: bool) -> None:
    q, k, v = inputs()

    def layer(q: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, dropout=0.5, backend=backend)

    torch.manual_seed(0)
    plain = layer(q)
    wanted = torch.autograd.grad(plain.square().sum(), q)[0]
    torch.manual_seed(0)
    kept = checkpoint(layer, q, use_reentrant=reentrant)
    assert torch.equal(kept, plain)
    torch.randn(3)  # between a forward and its recomputation
    kept.square().sum().backward()
    assert_close(q.grad, wanted, budget(torch.float32, 40))


@pytest.mark.parametrize("asked", [{"backend": "tiled"}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_a_graph_draws_each_time_and_its_backward_drops_the_same(asked: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = tilewise.attention(q, k, v, dropout=0.5, **asked)
        return out[0] if isinstance(out, tuple) else out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    wanted = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(0)
    first = compiled(q, k, v)
    for got, want in zip(torch.autograd.grad(first.square().sum(), (q, k, v)), wanted, strict=True):
        assert_close(got, want, budget(torch.float32, 40))
    assert not torch.equal(compiled(q, k, v), first)


def test_double_backward_drops_the_same() -> None:
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return tilewise.attention(q, k, v, dropout=0.5, softcap=3.0)

    assert torch.autograd.gradgradcheck(call, (q[..., :4, :4], k[..., :4, :4], v[..., :4, :4]))


@pytest.mark.parametrize(("target", "name"), [("h200", "sm90"), ("a100", "sm80"), ("cpu", "torch-math")])
def test_auto_prefers_our_kernels(target: str, name: str) -> None:
    problem = make_problem((2, 8, 1024, 64), torch.bfloat16, mask=Causal(), dropout=0.1, needs_grad=True)
    chosen = plan(problem, Target.named(target))
    assert chosen.backend == name
    if chosen.forward is not None:
        assert "dropout" in chosen.forward.launches[0].unit.name
        assert "dropout" in chosen.backward.launches[1].unit.name


def test_what_pytorch_does_not_drop_beside_runs_in_terms() -> None:
    q = torch.zeros(1, 2, 64, 16)
    assert tilewise.explain(q, q, q, dropout=0.1).backend == "torch-math"
    assert tilewise.explain(q, q, q, dropout=0.1, softcap=3.0).backend == "reference"
    long = torch.zeros(1, 2, 2048, 16)
    assert tilewise.explain(long, long, long, dropout=0.1, softcap=3.0).backend == "tiled"


def test_the_seed_is_an_operand_that_is_saved() -> None:
    q, k, v = inputs()
    out = tilewise.attention(q, k, v, dropout=0.5, backend="tiled")
    saved = out.grad_fn.saved_tensors
    assert [tensor.dtype for tensor in saved].count(torch.int64) == 1
    seed = saved[-1]
    again = tilewise.attention(q, k, v, scores=(Dropout(0.5),), operands={"seed": seed}, backend="reference")
    assert_close(again, out, budget(torch.float32, 40))
