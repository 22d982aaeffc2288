"""What the terms that read tensors cost: kernels with them build without spills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from support import make_problem
from term_cases import BF16, H200, learned_by
from tilewise import Causal, Target
from tilewise.engine import SM90
from tilewise.jit import Unit, build
from tilewise.plan import plan
from tilewise.scores import Softcap
from tilewise.terms import Alibi, Bias, Dropout, Keep, KeyLengths, MaxLogit, RelativeBias, Sink, Spans

if TYPE_CHECKING:
    from tilewise.scores import Term


def built_units(terms: tuple[Term, ...], dim: int) -> list[Unit]:
    """The kernels of both directions that a long bf16 problem with these terms launches."""
    learned = learned_by(terms)
    problem = make_problem((2, 8, 4096, dim), BF16, mask=Causal(), needs_grad=True, scores=terms, operand_grads=learned)
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
