"""The largest score of every head, as a result of the forward (terms/max_logit.py)."""

from __future__ import annotations

from typing import Any

import torch

import emulation
from support import assert_close, budget
from term_cases import F32, H200, Tensor, case_of, emulated, everywhere, forward
from tilewise import Causal
from tilewise.engine import SM80, run
from tilewise.scores import Where
from tilewise.terms import Alibi, Keep, MaxLogit


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
    scores = Alibi().bend(products, where)[0].masked_fill(~keep, -torch.inf)
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
