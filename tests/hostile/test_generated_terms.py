"""Generated combinations of masks and terms on a CPU and, nightly, on models of our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import term_generator
import torch

import emulation
from test_terms_call import on_a_model

CHUNKS, CHUNK = 5, 100
ON_MODELS, PER_MODEL = 8, 25


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_generated_terms_match_float64(chunk: int) -> None:
    failures = term_generator.run_many(range(chunk * CHUNK, (chunk + 1) * CHUNK))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("seed", [756256, 782411, 792053, 807564])
def test_slopes_in_16_bits_whose_gradients_nearly_cancel(seed: int) -> None:
    """An error of delta is multiplied by the distances, and exceeds such a sum."""
    failures = term_generator.run_many(range(seed, seed + 1))
    assert not failures, "\n".join(failures)


@emulation.emulated
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("chunk", range(ON_MODELS))
def test_generated_terms_on_models_of_kernels(monkeypatch: Any, chunk: int, backend: str) -> None:
    space = term_generator.Space.of_kernels(backend)
    with on_a_model(monkeypatch, backend):
        failures = term_generator.run_many(range(chunk * PER_MODEL, (chunk + 1) * PER_MODEL), space)
    assert not failures, "\n".join(failures)


def test_every_mask_and_term_is_among_them() -> None:
    cases = [term_generator.draw(seed) for seed in range(CHUNKS * CHUNK)]
    assert {case.mask for case in cases} == set(term_generator.MASKS)
    named = {name for case in cases for name in (*case.arguments, *case.leaves)}
    assert set(term_generator.TERMS) <= named
    assert any(case.again for case in cases)


def test_a_wrong_result_is_seen(monkeypatch: Any) -> None:
    attention = term_generator.tilewise.attention

    def off(*given: Any, **options: Any) -> Any:
        found = attention(*given, **options)
        return (found[0] * 1.01, *found[1:]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(term_generator.tilewise, "attention", off)
    failures = term_generator.run_many(range(20))
    assert len(failures) > 5
    assert "out is off by" in failures[0]
