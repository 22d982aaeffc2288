"""Problems with terms that read tensors: every kernel that the model runs, against autograd through the reference in
float64, with the gradients of what the terms learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import emulation
from support import assert_close, budget, make_problem
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80, SM90, run
from tilewise.operands import SCORE_DIMS, Operand
from tilewise.plain import reference
from tilewise.scores import Term, Where
from tilewise.terms.shared import operand_of

emulated = emulation.emulated
H200 = Target.named("h200")
Tensor = torch.Tensor
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A problem with terms, and the tensors of a call."""

    problem: Any
    operands: dict[str, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def expanded(self) -> dict[str, Tensor]:
        """The operands as kernels read them."""
        specs = [operand for term in self.problem.scores for operand in term.tensors]
        return {one.name: one.expanded(self.operands[one.name], self.problem) for one in specs}


def learned_by(terms: tuple[Term, ...]) -> tuple[str, ...]:
    return tuple(operand.name for term in terms for operand in term.learned_tensors)


def case_of(dtype: torch.dtype, dim: int, mask: Any, terms: tuple[Term, ...], make: Any, **fields: Any) -> Case:
    """`make(problem)` gives the operands. Heads in groups, lengths that no tile divides."""
    rows = fields.pop("seq_q", 100)
    wanted = {"heads_kv": 2, "seq_kv": 150, "mask": mask, "needs_lse": True, "scores": terms} | fields
    problem = make_problem((2, 4, rows, dim), dtype, operand_grads=learned_by(terms), **wanted)
    generator = torch.Generator().manual_seed(1)
    shapes = [
        (problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim_v),
        (problem.heads_q, problem.seq_q, problem.head_dim_v),
    ]
    tensors = [torch.randn(problem.batch, *shape, generator=generator).to(dtype) for shape in shapes]
    return Case(problem, make(problem), *tensors)


def forward(backend: Any, case: Case) -> tuple[Tensor, Tensor]:
    problem = case.problem
    program = backend.program(problem, H200, backend.configs(problem, H200)[0])
    out = torch.full((*case.q.shape[:3], problem.head_dim_v), torch.nan, dtype=problem.dtype)
    given = {"q": case.q, "k": case.k, "v": case.v, "out": out, "lse": torch.full(case.q.shape[:3], torch.nan)}
    given |= case.expanded()
    results = [one for term in problem.scores for one in term.outputs]
    given |= {one.name: torch.zeros(one.shape(problem), dtype=one.dtype) for one in results}
    run.load(program, given, 0)(*given.values())
    case.operands.update({one.name: given[one.name] for one in results})
    return out, given["lse"]


def backward(backend: Any, case: Case, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of q, k, v and of what the terms learn, by name."""
    problem = case.problem
    program = backend.backward_program(problem, H200, backend.backward_configs(problem, H200)[0])
    if program.fallback_without_tma and not run.is_mapped(case.expanded()[program.fallback_without_tma[0]]):
        program = program.fallback_without_tma[1]
    given = {"dout": case.dout, "dlse": dlse, "q": case.q, "k": case.k, "v": case.v, "out": out, "lse": lse}
    for name, tensor in (("dq", case.q), ("dk", case.k), ("dv", case.v)):
        given[name] = torch.full_like(tensor, 0.0 if name in program.zeroed else torch.nan)
    given |= case.expanded()
    sums = {}
    for term in problem.scores:
        for operand in term.learned_tensors:
            written = dict(program.sums).get(operand.name)
            room = written or term.sums(operand, problem)
            total = torch.full(room.shape, torch.nan if written else 0.0, dtype=room.dtype)
            given["d" + operand.name] = total.expand(room.full)
            sums[operand.name] = (room, total, operand, term)
    run.load(program, given, 0)(*given.values())
    grads = {name[1:]: given[name] for name in ("dq", "dk", "dv")}
    tensors = case.operands
    rows = run.rows_of(problem, out, case.dout, lse, dlse, tensors)
    made = {
        name: room.gradient(term.settled(total, rows), operand, tensors[name])
        for name, (room, total, operand, term) in sums.items()
    }
    return grads | made


@dataclass(frozen=True, slots=True)
class Tap(Term):
    """Adds zeros whose gradient is that of the scores after all terms."""

    tensors: ClassVar = (Operand("tap", True, SCORE_DIMS, dtype=torch.float64),)

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        return scores + operand_of(where, self.tensors[0]), None


class Truth(NamedTuple):
    """In float64: results and gradients, and per operand the sum of the magnitudes that its gradient is a sum of."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]
    magnitudes: dict[str, Tensor]


def truth(case: Case) -> Truth:
    wide = case.problem.with_(dtype=torch.float64)
    specs = [one for term in wide.scores for one in term.tensors]
    own = {one.name for one in specs if one.dtype is None}
    given = {"q": case.q.double(), "k": case.k.double(), "v": case.v.double()}
    given |= {name: tensor.double() if name in own else tensor for name, tensor in case.operands.items()}
    sizes = (wide.batch, wide.heads_q, wide.seq_q, wide.seq_kv)
    given["tap"] = torch.zeros(sizes, dtype=torch.float64, device=case.q.device)
    learned = wide.operand_grads
    wanted = {name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "tap", *learned)}
    given |= wanted
    inputs = [given.pop(name) for name in "qkv"]
    out, lse = reference.forward(*inputs, wide.with_(scores=(*wide.scores, Tap())), operands=given)
    found = torch.autograd.grad(out, list(wanted.values()), case.dout.double())
    grads = dict(zip(wanted, found, strict=True))
    dscores = grads.pop("tap")
    where = Where(wide, range(wide.seq_q), range(wide.seq_kv), operands=given)
    magnitudes = {}
    for term in wide.scores:
        for one in term.tensors:
            added = term.apply(torch.zeros_like(dscores), where)[0]
            if one.name in learned and added.requires_grad:  # it is added: each element times numbers of one sign
                magnitudes[one.name] = torch.autograd.grad(added, given[one.name], dscores.abs())[0].abs()
            elif one.name in learned:  # it joins the sum of every row: its weight times D
                rows = (out * case.dout.double()).sum(-1).abs() * torch.exp(given[one.name][:, None] - lse)
                magnitudes[one.name] = rows.sum((0, 2))
    return Truth(out.detach(), lse.detach(), grads, magnitudes)


def check(monkeypatch: Any, backend: Any, case: Case, *, back: bool, **options: Any) -> None:
    """`options` are those of `emulation.install`."""
    problem = case.problem
    emulation.install(monkeypatch, **options)
    out, lse, grads, magnitudes = truth(case)
    allowed = budget(problem.dtype, problem.seq_kv)
    if not back:
        got_out, got_lse = forward(backend, case)
        assert_close(got_out, out, allowed)
        assert_close(got_lse, lse, budget(F32, problem.seq_kv) if problem.dtype is F32 else allowed, "lse")
        return
    got = backward(backend, case, out.to(problem.dtype), lse.float())
    assert set(got) == set(grads)
    for name, want in grads.items():
        found = got[name].reshape(want.shape)
        if name not in magnitudes:
            assert_close(found, want, allowed, name)
            continue
        # A sum that cancels is as accurate as its addends, and as the D that all of a row have in common.
        error = ((found.double() - want).norm() / magnitudes[name].norm()).item()
        assert error <= allowed, f"{name}: off by {error:.2e} of its addends, allowed {allowed:.2e}"
        assert found.dtype == case.operands[name].dtype


KERNELS = [
    (SM90, BF16, 64, Causal()),
    (SM80, BF16, 64, Window(60, 10)),
    (SM90, HALF, 128, Window(60, 10)),
    (SM90, F32, 64, Causal("bottom-right")),
    (SM80, HALF, 128, Full()),
    (SM80, F32, 64, Causal()),
    (SM90, BF16, 128, Full()),
]
FORWARD, BACKWARD = False, True
everywhere = pytest.mark.parametrize(("backend", "dtype", "dim", "mask"), KERNELS, ids=str)
both_ways = pytest.mark.parametrize("back", [FORWARD, BACKWARD], ids=["forward", "backward"])
