"""The thunder executor: it is asked, it answers by the planner, and its results and gradients are right."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from support import assert_close, budget
from tilewise import InvalidInput
from tilewise.integrations.thunder import executor

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Thunder warns of the executors that are not installed
        import thunder
except ImportError as error:
    pytest.skip(f"needs lightning-thunder: {error}", allow_module_level=True)
except AttributeError as error:
    pytest.skip(f"lightning-thunder does not import with torch {torch.__version__}: {error}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Thunder's, of what it calls in PyTorch
BUDGET = budget(torch.float32, 64)


MASKS = ["none", "causal", "boolean", "additive"]


def attend(q, k, v, mask=None, is_causal=False, scale=None):
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)


def jitted(**options):
    return thunder.jit(attend, executors=[executor(**options), *thunder.get_default_executors()])


def inputs(grad=(False, False, False)):
    return [torch.randn(2, 3, 16, 8, requires_grad=wanted) for wanted in grad]


def mask_arguments(mask):
    """attn_mask and is_causal."""
    tensor = {"boolean": torch.rand(16, 16) < 0.7, "additive": torch.randn(2, 1, 16, 16)}.get(mask)
    return tensor, mask == "causal"


def sources(function) -> str:
    traces = [thunder.last_traces(function)[-1], *thunder.last_backward_traces(function)[-1:]]
    return "\n".join(map(str, traces))


@pytest.mark.parametrize("mask", MASKS)
def test_forward(mask):
    q, k, v = inputs()
    arguments = mask_arguments(mask)
    function = jitted(backend="tiled")
    got = function(q, k, v, *arguments)
    assert "tilewise_attention" in sources(function)
    assert_close(got, attend(q, k, v, *arguments), BUDGET)


@pytest.mark.parametrize("backend", ["tiled", "reference", "torch-flash"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask, backend):
    q, k, v = inputs(grad=(True, True, True))
    arguments = (*mask_arguments(mask), 0.3)
    function = jitted(backend=backend)
    out = function(q, k, v, *arguments)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(attend(q, k, v, *arguments), (q, k, v), dout)
    got = torch.autograd.grad(out, (q, k, v), dout)
    assert "tilewise_attention_with_lse" in sources(function)
    assert "tilewise_attention_backward" in sources(function)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, BUDGET)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_of_one_input(wanted):
    q, k, v = inputs(grad=tuple(index == wanted for index in range(3)))
    leaf = (q, k, v)[wanted]
    function = jitted(backend="tiled")
    (got,) = torch.autograd.grad(function(q, k, v).sum(), leaf)
    (want,) = torch.autograd.grad(attend(q, k, v).sum(), leaf)
    assert "tilewise_attention_backward" in sources(function)
    assert_close(got, want, BUDGET)


def test_a_scale_of_zero_is_left_to_pytorch():
    q, k, v = inputs()
    function = jitted(backend="tiled")
    assert_close(function(q, k, v, None, False, 0.0), attend(q, k, v, None, False, 0.0), BUDGET)
    assert "tilewise" not in sources(function)


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
