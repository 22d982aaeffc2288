"""A minute's worth of generated problems; `make nightly` runs five times as many, of a seed of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import generator
import pytest
import reference
import torch

SEED, CHUNKS, CHUNK = 0, 20, 100


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # warnings of PyTorch, which differ from way to way, are not what is asked here
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_generated_problems_match_float64_or_are_refused(chunk):
    indices = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    outcomes, failures = generator.run_many(SEED, indices)
    assert not failures, "\n".join(generator.describe(failure, SEED) for failure in failures)
    assert outcomes["matched"] > CHUNK // 3, outcomes


def test_every_kind_of_call_is_among_them():
    cases = [generator.draw(SEED, index) for index in range(CHUNKS * CHUNK)]
    for field, known in (
        ("way", generator.WAYS),
        ("function", generator.FUNCTIONS),
        ("backend", ("auto", *generator.BACKENDS)),
        ("mask", generator.MASKS),
        ("alias", generator.ALIASES),
        ("dtype", generator.DTYPES),
    ):
        assert set(known) == set(Counter(getattr(case, field) for case in cases)), field
    assert {storage for case in cases for storage in case.storage} == set(generator.STORAGES)


@pytest.mark.parametrize("misuse", generator.MISUSES)
def test_misuse_is_refused_by_the_package(misuse):
    case = next(case for index in range(100) if (case := generator.draw(SEED, index)).mask == "none")
    assert generator.run(replace(case, misuse=misuse)) == "refused misuse"


def test_a_case_is_decided_by_its_seed_and_index():
    assert generator.draw(5, 17) == generator.draw(5, 17)
    assert generator.draw(5, 17) != generator.draw(6, 17)
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            generator.make_inputs(generator.draw(5, 17)).leaves,
            generator.make_inputs(generator.draw(5, 17)).leaves,
            strict=True,
        )
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_reference_is_its_own_derivative(softcap):
    """The explicit gradients of the reference are those of its forward, by finite differences and by autograd."""
    visible = reference.band(4, 5, 1, None, "bottom-right")
    exact = reference.Attention(visible, None, 0.7, softcap)
    q, k, v = (torch.randn(2, heads, seq, 3, dtype=torch.float64) for heads, seq in ((4, 4), (2, 5), (2, 5)))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(exact.forward, leaves)
    out, lse = exact.forward(*leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wants = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        _, _, grads = exact.bounded(q, k, v, dout, dlse, torch.finfo(torch.float64).eps)
    for grad, want in zip(grads, wants, strict=True):
        generator.check(want, generator.reference.Bounded(grad.value, 8 * grad.error), "gradient")


def test_a_wrong_result_is_seen():
    """One element that is off by twice its bound is enough."""
    case = next(
        case
        for case in (generator.draw(SEED, index) for index in range(1000))
        if case.way == "eager" and case.dtype == "float32" and case.function == "attention" and case.magnitude == 1.0
        and case.batch and case.heads_kv and case.seq_q > 8 and case.softcap < 1e9 and not case.return_lse
    )  # fmt: skip
    trial = generator.Trial(case)
    out = trial.expected.out.value.to(torch.float32)
    trial.check_outs((out,))
    worst = trial.expected.out.error.argmax()
    out.view(-1)[worst] += 2 * trial.expected.out.error.view(-1)[worst]
    with pytest.raises(generator.Wrong, match="times the error allowed, in 1 of"):
        trial.check_outs((out,))
