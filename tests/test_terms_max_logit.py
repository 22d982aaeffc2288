"""The largest score of every head, as a result of the forward (terms/max_logit.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library as torch_library

import emulation
import tilewise
from support import assert_close, budget, make_problem
from term_cases import F32, H200, Tensor, case_of, emulated, everywhere, forward
from test_terms_call import on_a_model
from tilewise import Causal, KeyLengths, Target
from tilewise.engine import SM80, SM90, run
from tilewise.operands import ALL
from tilewise.scores import Where
from tilewise.terms import Alibi, Bias, Keep, MaxLogit


@emulated
@everywhere
def test_max_logit(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any) -> None:
    """Of scores after all terms, of keys that are seen, and of one head with none."""
    keep = torch.ones(2, 4, 100, 150, dtype=torch.bool)
    keep[:, 2] = False
    given = {"slopes": torch.tensor([2.0, 0.0, 0.1, 0.3]), "keep": keep}
    terms = (Alibi(), Keep(paired=True), MaxLogit())
    case = case_of(dtype, dim, mask, terms, lambda _: dict(given))
    case.q[:, 3] -= 100 * case.k[:, 1, :1]  # a head whose scores are below 0
    emulation.install(monkeypatch)
    forward(backend, case)
    wide = case.problem
    where = Where(wide, range(wide.seq_q), range(wide.seq_kv), operands=given)
    products = case.q.double() @ case.k.double().repeat_interleave(2, 1).mT * wide.scale
    scores = Alibi().apply(products, where)[0].masked_fill(~keep, -torch.inf)
    seen = wide.mask.to_bool(range(wide.seq_q), range(wide.seq_kv), wide.seq_q, wide.seq_kv)
    want = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    assert_close(MaxLogit().decoded(case.operands["max_logit"]), want, budget(F32, dim))


@emulated
def test_a_bound_forward_gives_what_a_term_writes(monkeypatch: Any) -> None:
    """In floats, under the name of the output, and zeroed before every call."""
    case = case_of(F32, 64, Causal(), (MaxLogit(),), lambda _: {})
    emulation.install(monkeypatch)
    program = SM80.program(case.problem, H200, SM80.configs(case.problem, H200)[0])
    bound = run.bind_forward(lambda: program, case.problem, case.q, case.k, case.v)
    scores = case.q.double() @ case.k.double().repeat_interleave(2, 1).mT * case.problem.scale
    seen = Causal().to_bool(range(100), range(150), 100, 150)
    for factor in (1.0, 0.5):
        results: dict[str, Tensor] = {}
        bound(factor * case.q, case.k, case.v, None, results)
        want = (factor * scores).masked_fill(~seen, -torch.inf).amax((0, 2, 3))
        assert_close(results["max_logit"], want, budget(F32, 64))


def asked(dtype: torch.dtype, backend: str, **options: Any) -> tuple[Tensor, ...]:
    """A call with gradients, and the largest scores that it should report; no query of the last head sees a key."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 4, 70, 64, generator=generator), torch.randn(2, 2, 90, 64, generator=generator)
    q, k = (tensor.bfloat16().to(dtype).requires_grad_() for tensor in (q, k))
    keep = torch.ones(4, 1, 90, dtype=torch.bool)
    keep[3] = False
    given = {"mask": KeyLengths([90, 30], inner="causal"), "softcap": 5.0, "keep": keep, "backend": backend}
    found = tilewise.attention(q, k, k, return_max_logit=True, **given, **options)
    found[0].square().sum().backward()
    scores = 5.0 * torch.tanh(q.double() @ k.double().repeat_interleave(2, 1).mT / 40.0)
    shown = Causal().to_bool(range(70), range(90), 70, 90) & (
        torch.arange(90) < torch.tensor([90, 30])[:, None, None, None]
    )
    want = scores.masked_fill(~(shown & keep), -torch.inf).amax((0, 2, 3)).detach()
    assert not found[-1].requires_grad
    return *found, want, q.grad


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
def test_attention_returns_it(backend: str, with_lse: bool) -> None:
    """Behind lse, where that is asked for; with dropout too, which scores know nothing of."""
    for dropout in (0.0, 0.5):
        *results, largest, want, _ = asked(F32, backend, return_lse=with_lse, dropout=dropout)
        assert len(results) == 1 + with_lse
        assert_close(largest, want, budget(F32, 64))


@emulated
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_kernels_return_it(monkeypatch: Any, backend: str) -> None:
    grad = asked(torch.float64, "reference")[-1]
    with on_a_model(monkeypatch, backend):
        for _ in range(2):  # planned, then remembered
            *_, largest, want, got = asked(torch.bfloat16, backend, return_lse=True)
            assert_close(largest, want, budget(torch.bfloat16, 64))
            assert_close(got, grad, 4 * budget(torch.bfloat16, 90))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_it_compiles(with_lse: bool, requires_grad: bool) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 4, 20, 16, requires_grad=requires_grad)

    def call(q: Tensor) -> tuple[Tensor, ...]:
        return tilewise.attention(q, q, q, mask="causal", return_lse=with_lse, return_max_logit=True, backend="tiled")

    want, got = call(q), torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert len(want) == len(got) == 2 + with_lse
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, budget(F32, 20))
    if requires_grad:
        grads = [torch.autograd.grad(results[0].square().sum(), q)[0] for results in (got, want)]
        assert_close(*grads, budget(F32, 20))


def test_the_operator_keeps_its_promises() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    for with_lse in (False, True):
        arguments = (q, k, v, [], [], "causal", None, "softcap:3;max_logit", "bhsd", "tiled", with_lse)
        results = torch_library.opcheck(torch.ops.tilewise.attention_with_results.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_nothing_to_score_is_below_everything() -> None:
    for seq_q, seq_kv in ((0, 4), (4, 0)):
        q, k = torch.zeros(1, 2, seq_q, 8), torch.zeros(1, 2, seq_kv, 8)
        for backend in ("reference", "tiled", "auto"):
            _, largest = tilewise.attention(q, k, k, return_max_logit=True, backend=backend)
            assert largest.tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("dim", [64, 128])
def test_beside_a_learned_bias_that_batches_share(dim: int) -> None:
    """Whose gradient has a kernel of its own, which computes the scores once more and reports nothing."""
    scores = (Bias("bfloat16", ("batch",), True, True), MaxLogit())
    shape = {"needs_grad": True, "scores": scores, "operand_grads": ("bias",)}
    problem = make_problem((4, 16, 4096, dim), torch.bfloat16, **shape)
    program = SM90.backward_program(problem, H200, SM90.backward_configs(problem, H200)[0], ALL | {"bias"})
    own = [launch for launch in program.launches if launch.unit.name.startswith("bias_gradient")]
    assert len(own) == 1
    assert "max_logit" not in own[0].fields


def test_auto_and_explain_name_our_kernels() -> None:
    q = torch.zeros(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    for target, name in (("h200", "sm90"), ("a100", "sm80")):
        chosen = tilewise.explain(q, q, q, mask="causal", return_max_logit=True, target=Target.named(target))
        assert chosen.backend == name
        assert chosen.forward.launches[0].unit.name.endswith("_max_logit")
