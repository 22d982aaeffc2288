"""What the terms that read tensors cost: kernels with them build without spills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import emulation
from support import budget, make_problem
from term_cases import BF16, H200, HALF, case_of, check, emulated, learned_by, truth
from tilewise import Causal, Full, Target
from tilewise.engine import SM90
from tilewise.engine.program import Address, Map, slots_of
from tilewise.jit import Unit, build
from tilewise.jit.compile import LONGEST_NAME
from tilewise.plan import plan
from tilewise.scores import Softcap
from tilewise.terms import Alibi, Bias, Dropout, Keep, KeyLengths, MaxLogit, RelativeBias, Sink, Spans

if TYPE_CHECKING:
    from tilewise.scores import Term


def built_units(terms: tuple[Term, ...], dim: int, **fields: Any) -> list[Unit]:
    """The kernels of both directions that a long bf16 problem with these terms launches."""
    fields |= {"mask": Causal(), "needs_grad": True, "scores": terms, "operand_grads": learned_by(terms)}
    problem = make_problem((2, 8, 4096, dim), BF16, **fields)
    chosen = [plan(problem, H200, "sm90"), plan(problem, Target.named("a100"), "sm80")]
    return [unit for one in chosen for unit in one.units if terms[-1].suffix in unit.name]


TERMS: list[tuple[Term, ...]] = [
    (Alibi(),),
    (Alibi(learned=True),),
    (Keep(),),
    (Keep(("batch", "head"), paired=True),),
    (Keep(("head", "row"), paired=True),),
    (KeyLengths(),),
    (KeyLengths(True),),
    (Spans(),),
    (Bias(),),
    (Bias("float32", paired=True),),
    (Bias(paired=True, learned=True),),
    (Bias("bfloat16", ("batch",), True, True),),
    (Bias("float32", ("batch",), True, True),),
    (Sink(True),),
    (Dropout(0.1),),
    (RelativeBias(8191, 4095),),
    (RelativeBias(8191, 4095, "bfloat16", True),),
    (MaxLogit(),),
    (Alibi(), KeyLengths(), Sink()),
    (Bias(paired=True), Dropout(0.1)),
]
UNITS = {unit.label: unit for terms in TERMS for dim in (64, 128) for unit in built_units(terms, dim)}
ORDERED = built_units((RelativeBias(8191, 4095, learned=True),), 128, deterministic=True)
UNITS |= {unit.label: unit for unit in ORDERED if "_ordered" in unit.name}


@pytest.mark.kernel_gate
@pytest.mark.parametrize("label", UNITS)
def test_a_kernel_with_a_term_builds_without_spills(label: str) -> None:
    """Of several terms a few registers may spill."""
    used = build(UNITS[label], announce=False).resources
    spilled = used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes
    assert max(spilled) <= (0 if UNITS[label].strict else MAX_SPILLED)


MAX_SPILLED = 512  # bytes of a thread


def test_a_softcap_and_a_learned_operand_are_refused_in_float32_on_hopper() -> None:
    """The warpgroup that pulls gradients back has no slopes there; each alone is fine."""
    problem = make_problem(
        (1, 2, 64, 64), torch.float32, needs_grad=True, scores=(Softcap(5.0), Alibi()), operand_grads=("slopes",)
    )
    assert [reason for reason in SM90.why_not(problem, H200) if "slopes" in reason.what]
    assert not SM90.why_not(problem.with_(scores=(Alibi(),)), H200)
    assert not SM90.why_not(problem.with_(operand_grads=()), H200)


ALONE = {
    "a bias, which has a kernel for that": (lambda: Bias("bfloat16", ("batch",), True, True), "bias", (1, 4, 96, 152)),
    "a bias without a tensor map": (lambda: Bias("bfloat16", ("batch",), True, True), "bias", (1, 4, 96, 150)),
    "a bias of every score": (lambda: Bias("bfloat16", (), True, True), "bias", (2, 4, 96, 152)),
    "slopes": (lambda: Alibi(learned=True), "slopes", (4,)),
    "a table": (lambda: RelativeBias(101, 50, "float32", True), "table", (4, 101)),
    "sinks": (lambda: Sink(True), "sink", (4,)),
}


@emulated
@pytest.mark.parametrize("what", ALONE)
def test_the_gradient_of_an_operand_alone(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """No kernel makes gradients that nobody wants."""
    emulation.install(monkeypatch)
    make, name, shape = ALONE[what]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    tensor = tensor.to(BF16) if name == "bias" else tensor
    keys = shape[3] if name == "bias" else 150
    case = case_of(BF16, 64, Causal(), (make(),), lambda _: {name: tensor}, seq_q=96, seq_kv=keys, needs_grad=True)
    want, wants = truth(case), frozenset({name})
    bound = SM90.bind_backward(case.problem, None, H200)
    out, lse = want.out.to(BF16), want.lse.float()
    got = bound(case.dout, None, case.q, case.k, case.v, out, lse, case.operands, wants)
    assert set(got) == wants
    wrong = (got[name].double() - want.grads[name]).norm() / want.magnitudes[name].norm()
    assert wrong <= budget(BF16, keys)
    config = SM90.backward_configs(case.problem, H200)[0]
    program = SM90.backward_program(case.problem, H200, config, wants)
    assert not any(isinstance(slot, Address | Map) and slot.operand in ("dq", "dk", "dv")
                   for launch in program.launches for _, _, slot in slots_of(launch.fields))  # fmt: skip


@emulated
def test_weights_of_capped_scores_stay_in_range_where_maxima_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than fp16 has room for; the first keys, which have the largest scores, come last."""
    case = case_of(HALF, 64, Full(), (Softcap(100.0),), lambda _: {}, seq_kv=640)
    growing = torch.linspace(12, 0.6, 640)[:, None].to(HALF)
    check(monkeypatch, SM90, case._replace(q=case.q * 6, k=case.k * growing), back=False)


@emulated
def test_slopes_of_capped_scores_where_neighbours_have_another_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is recovered from its weight by the lse of its own query."""
    case = case_of(BF16, 256, Full(), (Softcap(3.0),), lambda _: {}, needs_grad=True)
    case.q[:, :, ::2] *= 6
    check(monkeypatch, SM90, case, back=True)


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_kernels_of_many_terms_have_names_that_fit(target: str) -> None:
    """And that differ where the terms do."""
    most = (Softcap(30.0), RelativeBias(8191, 4095, learned=True), Alibi(True, True), Keep(("head",), True))
    lasts = [(KeyLengths(True), Sink(True), Dropout(0.1)), (KeyLengths(True), Sink(True), Dropout(0.1), MaxLogit())]
    named = []
    for last in lasts:
        terms = (*most, *last)
        fields = {"mask": Causal(), "needs_grad": True, "scores": terms, "operand_grads": learned_by(terms)}
        chosen = plan(make_problem((2, 8, 4096, 128), BF16, **fields), Target.named(target))
        named.append([launch.unit.name for launch in chosen.forward.launches])
        assert all(len(unit.name) <= LONGEST_NAME for unit in chosen.units)
    assert max(map(len, named[0])) > 90
    assert not set(named[0]) & set(named[1])
