"""The thunder executor: it is asked, it answers by the planner, and its results and gradients are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from support import assert_close, budget
from tilewise import InvalidInput
from tilewise.integrations.thunder import executor

try:
    import thunder
except ImportError as error:
    pytest.skip(f"needs lightning-thunder: {error}", allow_module_level=True)
except AttributeError as error:
    pytest.skip(f"lightning-thunder does not import with torch {torch.__version__}: {error}", allow_module_level=True)

BUDGET = budget(torch.float32, 64)


def attend(q, k, v, mask=None, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal)


def jitted(**options):
    return thunder.jit(attend, executors=[executor(**options), *thunder.get_default_executors()])


def inputs(grad=False):
    return [torch.randn(2, 3, 16, 8).requires_grad_(grad) for _ in range(3)]


def sources(function) -> str:
    traces = [thunder.last_traces(function)[-1], *thunder.last_backward_traces(function)[-1:]]
    return "\n".join(map(str, traces))


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
def test_forward(mask):
    q, k, v = inputs()
    tensor = {"boolean": torch.rand(16, 16) < 0.7, "additive": torch.randn(2, 1, 16, 16)}.get(mask)
    function = jitted(backend="tiled")
    got = function(q, k, v, tensor, mask == "causal")
    assert "tilewise_attention" in sources(function)
    assert_close(got, attend(q, k, v, tensor, mask == "causal"), BUDGET)


def test_gradients():
    q, k, v = inputs(grad=True)
    function = jitted(backend="tiled")
    out = function(q, k, v, None, True)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(attend(q, k, v, None, True), (q, k, v), dout)
    got = torch.autograd.grad(out, (q, k, v), dout)
    assert "tilewise_attention_with_lse" in sources(function)
    assert "tilewise_attention_backward" in sources(function)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, BUDGET)


def test_what_pytorch_serves_as_well_or_the_condition_excludes_is_left():
    q, k, v = inputs()
    for options in ({}, {"backend": "tiled", "when": lambda problem: problem.seq_q > 100}):
        function = jitted(**options)
        assert_close(function(q, k, v), attend(q, k, v), BUDGET)
        assert "tilewise" not in sources(function)


def test_bad_use():
    with pytest.raises(InvalidInput, match="What to do"):
        executor(when=True)
    with pytest.raises(InvalidInput, match="What to do"):
        executor(backend="fastest")
