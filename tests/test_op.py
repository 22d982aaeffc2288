"""The torch seam: operator checks, gradients, torch.compile, transforms."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import library as torch_library
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, Documents, UnsupportedProblem, Window, memo
from tilewise.call import memory
from tilewise.torch_seam import switches

OURS = ["tiled", "reference"]
EVERY = [*OURS, "torch-flash", "torch-math", "auto"]


def inputs(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True):
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck(backend, grad, layout):
    q, k, v = inputs(2, 4, 9, 8, dtype=torch.float32, grad=grad)
    needs_lse = backend in OURS
    arguments = (q, k, v, [], "causal", None, "", layout, backend, needs_lse)
    results = torch_library.opcheck(torch.ops.tilewise.attention.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_the_backward():
    q, k, v = inputs(1, 2, 5, 4, grad=False)
    out, lse = tilewise.attention(q, k, v, return_lse=True, backend="tiled")
    arguments = (out, None, q, k, v, [], out, lse, [True, False, True], "full", None, "", "bhsd", "tiled", False)
    results = torch_library.opcheck(torch.ops.tilewise.attention_backward.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_precision_reaches_the_plan_by_every_way():
    q, k, v = inputs(1, 2, 5, 4, dtype=torch.float32)
    seen = []
    planned = tilewise.call.build.plan

    def spy(problem, target, backend):
        seen.append(problem.precision)
        return planned(problem, target, backend)

    memo.invalidate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilewise.call.build, "plan", spy)
        tilewise.attention(q, k, v, precision="tf32")
        options = ("full", None, "", "bhsd", "tiled", True)
        out, lse = torch.ops.tilewise.attention(q, k, v, [], *options, "tf32")
        out.sum().backward()
        grads = torch.ops.tilewise.attention_backward(out, None, q, k, v, [], out, lse, [True] * 3, *options, "tf32")
    memo.invalidate()
    assert set(seen) == {"tf32"}
    assert [grad.shape for grad in grads] == [q.shape] * 3


def test_operators_that_do_not_name_a_precision_mean_exact():
    q, k, v = inputs(1, 2, 5, 4, dtype=torch.float32, grad=False)
    options = ("causal", None, "", "bhsd", "tiled", True)
    out, lse = torch.ops.tilewise.attention(q, k, v, [], *options)
    named, _ = torch.ops.tilewise.attention(q, k, v, [], *options, "exact")
    assert torch.equal(out, named)
    old = torch.ops.tilewise.attention_backward(out, None, q, k, v, [], out, lse, [True] * 3, *options)
    new = torch.ops.tilewise.attention_backward(out, None, q, k, v, [], out, lse, [True] * 3, *options, "exact")
    assert all(torch.equal(one, other) for one, other in zip(old, new, strict=True))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("mask", [None, Causal("bottom-right"), Window(1, 1), Documents((0, 2, 4), (0, 1, 3))])
def test_gradcheck_of_out_and_lse(backend, mask):
    q, k, v = torch.randn(1, 2, 4, 3), torch.randn(1, 1, 3, 3), torch.randn(1, 1, 3, 2)
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))

    def call(q, k, v):
        out, lse = tilewise.attention(q, k, v, mask=mask, backend=backend, return_lse=True, softcap=2.0)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))


@pytest.mark.parametrize("backend", ["auto", "torch-flash", "torch-math"])
def test_double_backward_through_pytorchs_kernels(backend):
    """They have none; the gradient of the gradient goes through the reference."""
    q, k, v = inputs(1, 2, 4, 3)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend)

    assert torch.autograd.gradgradcheck(call, (q, k, v))


def test_gradients_of_rows_that_see_nothing_are_zero():
    q, k, v = inputs(1, 1, 6, 4)
    k, v = k[:, :, :2].detach().requires_grad_(), v[:, :, :2].detach().requires_grad_()
    for backend in EVERY:
        out = tilewise.attention(q, k, v, mask=Causal("bottom-right"), backend=backend)
        assert torch.equal(out[:, :, :4], torch.zeros_like(out[:, :, :4]))
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert torch.equal(grads[0][:, :, :4], torch.zeros_like(grads[0][:, :, :4]))


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compile_fullgraph_forward_and_backward(backend, layout):
    torch._dynamo.reset()
    q, k, v = inputs(1, 4, 6, 8, dtype=torch.float32)

    def step(q, k, v):
        out = tilewise.attention(q * 2, k, v, mask=Causal(), backend=backend, layout=layout)
        return (out * out).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 4 * budget(torch.float32, 6), "gradient")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles its CPU code with a C++ compiler")
def test_compile_through_inductor():
    torch._dynamo.reset()
    q, k, v = inputs(1, 2, 16, 8, dtype=torch.float32)

    def block(q, k, v):
        return torch.relu(tilewise.attention(q + 1, k, v, mask="causal", backend="tiled")).sum()

    compiled = torch.compile(block, fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.autograd.grad(block(q, k, v), (q, k, v)), strict=True
    ):
        assert_close(a, b, 4 * budget(torch.float32, 16), "gradient")


def test_compile_keeps_one_graph_for_all_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: tilewise.attention(q, k, v, mask=Window(3, 0)), fullgraph=True, dynamic=True, backend="eager"
    )
    compiled(*inputs(2, 2, 8, 4, grad=False))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (9, 17, 33):
            q, k, v = inputs(2, 2, length, 4, grad=False)
            assert torch.equal(compiled(q, k, v), tilewise.attention(q, k, v, mask=Window(3, 0)))


def test_compiled_dropout_is_pytorchs():
    torch._dynamo.reset()
    q, k, v = inputs(1, 2, 8, 4, dtype=torch.float32, grad=False)
    compiled = torch.compile(lambda q: tilewise.attention(q, k, v, dropout=0.5), fullgraph=True, backend="eager")
    assert compiled(q).shape == q.shape


@pytest.mark.parametrize("mask", [None, "causal", Window(2, 1)])
def test_jvp_is_right_or_refused(mask):
    q, k, v = inputs(1, 2, 5, 4, grad=False)
    tangent = torch.randn_like(q)

    def call(q):
        return tilewise.attention(q, k, v, mask=mask)

    _, got = torch.func.jvp(call, (q,), (tangent,))
    exactness = budget(torch.float64, 5)
    step = exactness ** (1 / 3)  # where what is left out, step^2, is as much as rounding adds, exactness / step
    assert_close(got, (call(q + step * tangent) - call(q - step * tangent)) / (2 * step), 4 * step**2, "tangent")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        assert_close(forward_ad.unpack_dual(call(dual)).tangent, got, exactness, "tangent")
        with pytest.raises(UnsupportedProblem, match="in place"):
            tilewise.attention(dual, k, v, backend="tiled")
        with pytest.raises(UnsupportedProblem, match="tangents"):
            torch.ops.tilewise.attention(dual, k, v, [], "full", None, "", "bhsd", "tiled", False)


def test_vmap_and_functional_grad():
    q, k, v = (torch.randn(3, 1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    want = torch.stack([tilewise.attention(*parts, mask="causal") for parts in zip(q, k, v, strict=True)])
    got = torch.vmap(lambda q, k, v: tilewise.attention(q, k, v, mask="causal"))(q, k, v)
    assert_close(got, want, budget(torch.float64, 5))
    leaf = q[0].clone().requires_grad_()
    (reverse,) = torch.autograd.grad(tilewise.attention(leaf, k[0], v[0]).sum(), leaf)
    functional = torch.func.grad(lambda q: tilewise.attention(q, k[0], v[0]).sum())(q[0])
    assert_close(functional, reverse, 4 * budget(torch.float64, 5))


def test_only_wanted_gradients_flow():
    q, k, v = inputs(1, 2, 5, 4)
    k = k.detach()
    tilewise.attention(q, k, v, backend="tiled").sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None


def test_planned_calls_are_remembered(monkeypatch):
    q, k, v = inputs(1, 2, 5, 4, grad=False)
    first = tilewise.attention(q, k, v, backend="tiled")
    monkeypatch.setattr(tilewise.call.memory, "build", lambda *_: pytest.fail("planned twice"))
    assert torch.equal(tilewise.attention(q, k, v, backend="tiled"), first)


@pytest.fixture
def recognised(monkeypatch):
    """The calls that PyTorch's guards have recognised."""
    found = []
    by_guard = memory._by_guard

    def spy(request):
        call = by_guard(request)
        if call is not None:
            found.append(call)
        return call

    monkeypatch.setattr(memory, "_by_guard", spy)
    memo.invalidate()
    yield found
    memo.invalidate()


def test_this_release_of_pytorch_has_guards_that_tell_tensors_apart():
    assert memory.GUARDS_HOLD


def test_repeated_calls_are_recognised_by_guards(recognised):
    q, k, v = inputs(1, 2, 5, 4)
    results = [tilewise.attention(q, k, v, mask="causal", backend="tiled") for _ in range(4)]
    assert len(recognised) == 2
    for out in results[1:]:
        assert torch.equal(out, results[0])
        assert out.grad_fn is not None
    want = torch.autograd.grad(results[0].sum(), (q, k, v))
    assert all(map(torch.equal, torch.autograd.grad(results[3].sum(), (q, k, v)), want))
    memo.invalidate()
    tilewise.attention(q, k, v, mask="causal", backend="tiled")
    assert len(recognised) == 2


def _misaligned(tensor):
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return memory.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


OTHER_TENSORS = {
    "dtype": lambda x: x.detach().float().requires_grad_(),
    "sizes": lambda x: x.detach()[:, :1].clone().requires_grad_(),
    "strides": lambda x: x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
    "requires_grad": torch.Tensor.detach,
    "parameter": lambda x: torch.nn.Parameter(x.detach()),
    "lazily negated": lambda x: torch._neg_view(x.detach()).requires_grad_(),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype).requires_grad_(),
    "alignment": _misaligned,
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
def test_guards_recognise_no_other_tensors(recognised, kind):
    tensors = inputs(1, 2, 5, 4)
    for _ in range(3):
        tilewise.attention(*tensors, backend="tiled")
    assert len(recognised) == 1
    others = [OTHER_TENSORS[kind](tensor) for tensor in tensors]
    out = tilewise.attention(*others, backend="tiled")
    assert len(recognised) == 1
    assert out.requires_grad == others[0].requires_grad
    assert torch.equal(out, tilewise.attention(*(x.clone() for x in others), backend="tiled"))


def _called(tensors):
    return tilewise.attention(*tensors, backend="reference")


def _with_a_tangent(tensors):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        assert forward_ad.unpack_dual(_called((dual, *tensors[1:]))).tangent is not None
        return _called(tensors)


def _jit_traced(tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda q, k, v: _called((q, k, v)), tensors, check_trace=False)
    assert "tilewise::attention" in str(traced.graph)
    return traced(*tensors)


def _counted(tensors):
    with FlopCounterMode(display=False) as counter:
        out = _called(tensors)
    assert counter.get_total_flops() > 0
    return out


def _inside(context):
    def call(tensors):
        with context():
            return _called(tensors)

    return call


WATCHED = {
    "autocast": _inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "no grad": _inside(torch.no_grad),
    "inference": _inside(torch.inference_mode),
    "deterministic": _inside(switches.deterministic_algorithms),
    "flop counter": _counted,
    "forward AD": _with_a_tangent,
    "jit trace": _jit_traced,
    "functional grad": lambda tensors: torch.func.vjp(lambda x: x * _called(tensors), torch.ones(1).double())[0],
    "vmap": lambda tensors: torch.vmap(lambda x: x * _called(tensors))(torch.ones(1).double())[0],
}


@pytest.mark.parametrize("state", WATCHED)
def test_guards_recognise_nothing_where_pytorch_asks_for_more(recognised, state):
    tensors = tuple(inputs(1, 2, 5, 4))
    for _ in range(3):
        want = _called(tensors)
    assert len(recognised) == 1
    assert torch.allclose(WATCHED[state](tensors), want)
    assert len(recognised) == 1


def test_one_tensor_three_times_and_more_kinds_than_guards_are_kept_for(recognised):
    for seq in (5, 5, 5):
        (q,) = inputs(1, 2, seq, 4)[:1]
        assert torch.equal(_called((q, q, q)), _called((q, q.clone(), q.clone())))
    before = len(recognised)
    _, k, v = inputs(1, 2, 5, 4)
    for rows in (1, 2, 3, 4, 6, 7) * 3:
        (q,) = inputs(1, 2, rows, 4)[:1]
        assert _called((q, k, v)).shape == q.shape
    assert len(recognised) > before
    assert all(len(alike) <= memory._MAX_ALIKE for alike in memory._guarded._known.values())


def test_guards_keep_no_tensor(recognised):
    tensors = inputs(1, 2, 5, 4)
    for _ in range(3):
        _called(tensors)
    assert recognised
    seen = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [one() for one in seen] == [None] * 3


def test_auto_leaves_out_a_kernel_that_does_not_build(monkeypatch, caplog):
    """Aloud: a warning, and a verdict with the reason from then on. By name the error comes through."""
    from tilewise import CompileError, plan

    def bind(*_, **__):
        raise CompileError("ptxas said no\n  and more")

    monkeypatch.setattr(plan, "_left_out", frozenset())
    monkeypatch.setattr(tilewise.plain.tiled, "bind", bind, raising=False)
    q, k, v = inputs(1, 2, 5, 7, grad=False)
    with pytest.raises(CompileError, match="ptxas said no"):
        tilewise.attention(q, k, v, softcap=3.0, backend="tiled")
    monkeypatch.setattr(plan, "RULES", (plan.Rule("tiled", "first"), *plan.RULES))
    out = tilewise.attention(q, k, v, softcap=3.0)
    assert_close(out, tilewise.attention(q, k, v, softcap=3.0, backend="reference"), budget(torch.float64, 5))
    assert "tiled is left out" in caplog.text
    assert "it failed here: ptxas said no" in str(tilewise.explain(q, k, v, softcap=3.0))


def test_activation_checkpointing_recomputes():
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs(1, 2, 5, 4)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend="tiled").sum()

    got = torch.autograd.grad(checkpoint(call, q, k, v, use_reentrant=False), (q, k, v))
    want = torch.autograd.grad(call(q, k, v), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_inference_mode_and_no_grad():
    problem = make_problem((1, 2, 5, 4), torch.float64)
    q, k, v = make_inputs(problem, grad=True)
    want, _ = exact(q, k, v, problem)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = tilewise.attention(q, k, v)
        assert not out.requires_grad
        assert_close(out, want, budget(torch.float64, 5))
