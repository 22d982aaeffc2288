"""Gradients of gradients where q, k and v are one tensor, or made of one another."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, Window
from tilewise.memo import invalidate
from tilewise.plain import tiled

TOLERANCE = budget(torch.float64, 64) * 8  # of sums of gradients of gradients, all of order 1

BACKENDS = ["auto", "reference", "tiled", "torch-math", "torch-flash"]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


WEIGHTS = [torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) for _ in range(2)]


CONSTANT = torch.randn(1, 1, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def same(call):
    return lambda x: call(x, x, x)


def views(call):
    """Three views of one base: the usual fused projection."""
    return lambda x: call(*(x * 1.0).unsqueeze(0).expand(3, *x.shape).unbind(0))


def dependent(call):
    """k is made of q, and v of k."""

    def chained(x):
        k = x @ WEIGHTS[0]
        return call(x, k, (k @ WEIGHTS[1]).tanh())

    return chained


def keys_are_values(call):
    return lambda x: call(CONSTANT.expand_as(x), x, x)


def queries_are_values(call):
    """The keys need no gradient."""
    return lambda x: call(x, CONSTANT.expand_as(x), x)


WAYS = [same, views, dependent, keys_are_values, queries_are_values]


def attention(backend, **arguments):
    return lambda q, k, v: tilewise.attention(q, k, v, backend=backend, **arguments)


def bare_operator(q, k, v):
    return torch.ops.tilewise.attention(q, k, v, [], "causal", None, "", "bhsd", "tiled", False)[0]


def overridden(q, k, v):
    with tilewise.sdpa(backend="tiled", on_fallback="error"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def namesake(q, k, v):
    return tilewise.scaled_dot_product_attention(q, k, v, is_causal=True)


CALLS = {
    **{backend: attention(backend, mask="causal") for backend in BACKENDS},
    "bshd": attention("tiled", mask="causal", layout="bshd"),
    "the bare operator": bare_operator,
    "the override": overridden,
    "the namesake": namesake,
}


def check_create_graph(function, *inputs: torch.Tensor) -> None:
    """create_graph=True changes no first gradient, and the second is that of finite differences."""
    plain = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs)
    differentiable = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs, create_graph=True)
    for got, want in zip(differentiable, plain, strict=True):
        assert_close(got, want, TOLERANCE, "gradient under create_graph")
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_double_backward_of_inputs_that_share_or_depend(call, way):
    check_create_graph(way(call), leaf(1, 2, 4, 4))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("backend", ["tiled", "reference", "auto"])
@pytest.mark.parametrize(
    "mask", [None, Causal("bottom-right"), Window(1, 1), Documents((0, 1, 4))], ids=["full", "causal", "window", "docs"]
)
def test_double_backward_with_lse_and_softcap(backend, way, mask):
    def out_and_lse(q, k, v):
        out, lse = tilewise.attention(q, k, v, mask=mask, softcap=2.0, backend=backend, return_lse=True)
        return out * lse.unsqueeze(-1)

    check_create_graph(way(out_and_lse), leaf(1, 2, 4, 4))


@pytest.mark.parametrize("backend", ["tiled", "reference", "auto"])
def test_double_backward_of_values_alone_with_lse(backend):
    """On which lse does not depend."""
    q, k, v = leaf(1, 2, 4, 4).detach(), leaf(1, 2, 4, 4).detach(), leaf(1, 2, 4, 4)
    out, lse = tilewise.attention(q, k, v, backend=backend, return_lse=True)
    weights = torch.softmax(q @ k.mT / 2.0, -1)
    (got,) = torch.autograd.grad((out.square().sum() + lse.sum()), v, create_graph=True)
    want = 2 * weights.mT @ weights @ v
    assert torch.allclose(got, want)
    twice, wanted = (torch.autograd.grad(grad.square().sum(), v)[0] for grad in (got, want))
    assert torch.allclose(twice, wanted)


@pytest.mark.parametrize("backend", ["tiled", "reference", "torch-math", "torch-flash"])
def test_double_backward_of_grouped_heads_from_one_projection(backend):
    def grouped(x):
        q, k, v = x.split([4, 2, 2], dim=1)
        return tilewise.attention(q, k, v, mask="causal", backend=backend)

    check_create_graph(grouped, leaf(1, 8, 3, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_gradients_are_asked_for(backend):
    """What is not asked for still carries the second order through."""
    x, y = leaf(1, 2, 4, 4), leaf(1, 2, 4, 4)

    def loss(x, y):
        return tilewise.attention(x, x + y, y, mask="causal", backend=backend).pow(2).sum()

    (got,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    (want,) = torch.autograd.grad(loss(x, y), x)
    assert_close(got, want, TOLERANCE, "gradient")
    got_second = torch.autograd.grad(got.pow(2).sum(), (x, y))
    (through,) = torch.autograd.grad(by_hand(x, y), x, create_graph=True)
    want_second = torch.autograd.grad(through.pow(2).sum(), (x, y))
    for one, other in zip(got_second, want_second, strict=True):
        assert_close(one, other, TOLERANCE, "second gradient")


def by_hand(x, y):
    """The same loss in plain operations, with nothing of the package in it."""
    q, k, v = x, x + y, y
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).pow(2).sum()


def test_third_order():
    x = leaf(1, 1, 3, 2)
    assert torch.autograd.gradgradcheck(
        lambda x: torch.autograd.grad(
            tilewise.attention(x, x, x, mask="causal", backend="tiled").pow(2).sum(), x, create_graph=True
        )[0],
        x,
    )


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_under_a_mask_tensor(backend, additive):
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    mask = torch.randn(4, 4, dtype=torch.float64).masked_fill(~visible, -torch.inf) if additive else visible
    check_create_graph(same(attention(backend, mask=mask)), leaf(1, 2, 4, 4))


def test_a_mask_that_is_made_to_require_grad_after_the_call_stays_a_constant():
    x, mask = leaf(1, 2, 4, 4), torch.randn(4, 4, dtype=torch.float64)
    out = tilewise.attention(x, x, x, mask=mask, backend="tiled")
    mask.requires_grad_()
    (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    second = torch.autograd.grad(grad.sum(), (x, mask), allow_unused=True)
    assert second[0] is not None
    assert second[1] is None


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference", "torch-math", "namesake"])
def test_a_learned_bias_is_differentiated_twice(backend):
    """Also where it is made of what q, k and v are."""
    x, bias = leaf(1, 2, 4, 4), leaf(4, 4)

    def call(x, bias):
        if backend == "namesake":
            return tilewise.scaled_dot_product_attention(x, x, x, bias)
        return tilewise.attention(x, x, x, mask=bias, backend=backend)

    check_create_graph(call, x, bias)
    check_create_graph(lambda x: call(x, x[0, 0] * 2), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_gradients_of_one_tensor(backend):
    """is_grads_batched runs the backward under vmap."""
    x = leaf(1, 2, 4, 4)
    douts = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64)
    out = same(attention(backend, mask="causal"))(x)
    (batched,) = torch.autograd.grad(out, x, douts, is_grads_batched=True, retain_graph=True)
    for dout, got in zip(douts, batched, strict=True):
        (want,) = torch.autograd.grad(out, x, dout, retain_graph=True)
        assert_close(got, want, TOLERANCE, "gradient")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_transforms_of_inputs_that_share_or_depend(way):
    """torch.func's hessian is vmap over jvp over vjp."""
    function = way(attention("auto", mask="causal"))
    x = leaf(1, 1, 3, 4)

    def loss(x):
        return function(x).pow(2).sum()

    (grad,) = torch.autograd.grad(loss(x), x)
    assert_close(torch.func.grad(loss)(x.detach()), grad, TOLERANCE, "func.grad")
    batch = torch.stack([x.detach(), x.detach() * 2])
    mapped = torch.func.vmap(torch.func.grad(loss))(batch)
    assert_close(mapped[0], grad, TOLERANCE, "vmap of grad")
    eager = torch.autograd.functional.hessian(loss, x.detach())
    assert_close(torch.func.hessian(loss)(x.detach()), eager, TOLERANCE, "hessian")


def test_forward_over_reverse():
    """A tangent through a gradient: the Hessian's product with it."""
    x, direction = leaf(1, 1, 3, 4), torch.randn(1, 1, 3, 4, dtype=torch.float64)

    def gradient(x):
        loss = tilewise.attention(x, x, x, mask="causal").pow(2).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    with forward_ad.dual_level():
        product = forward_ad.unpack_dual(gradient(forward_ad.make_dual(x, direction))).tangent
    (want,) = torch.autograd.grad(gradient(x), x, direction)
    assert_close(product, want, TOLERANCE, "Hessian-vector product")


def test_checkpointed_and_accumulated():
    from torch.utils.checkpoint import checkpoint

    x = leaf(1, 2, 4, 4)
    function = same(attention("tiled", mask="causal"))
    (want,) = torch.autograd.grad(function(x).pow(2).sum(), x)
    for _ in range(2):
        checkpoint(function, x, use_reentrant=False).pow(2).sum().backward(create_graph=False)
    assert_close(x.grad, 2 * want, TOLERANCE, "accumulated gradient")


def laid_out_anew() -> torch.autograd.graph.saved_tensors_hooks:
    """What is saved for the backward comes back contiguous, as from another device."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.contiguous().clone(), lambda saved: saved)


@pytest.mark.parametrize("how", ["operator", "attention"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_saved_tensors_that_come_back_with_other_strides(how, mask):
    """The backward may then mean another backend by "auto" than the forward did, and has to find all it needs."""
    q = torch.randn(2, 3, 8, 3, requires_grad=True)
    k = torch.randn(2, 3, 8, 3)
    v = torch.randn(2, 3, 8, 6)[..., ::2]

    def attend() -> torch.Tensor:
        if how == "operator":
            return torch.ops.tilewise.attention(q, k, v, [], mask, None, "", "bhsd", "auto", False)[0]
        return tilewise.attention(q, k, v, mask=mask)

    (want,) = torch.autograd.grad(attend().sum(), q)
    with laid_out_anew():
        out = attend()
    (got,) = torch.autograd.grad(out.sum(), q)
    assert_close(got, want, budget(torch.float32, 8))


def test_a_bound_gradient_is_bound_anew_for_tensors_laid_out_anew(monkeypatch):
    """As our CUDA backends bind one: the strides it was made for are those it is given."""
    bound = []

    def bind_backward(problem, config=None):
        def gradient(dout, dlse, q, k, v, out, lse, operands, wants):
            bound.append(problem.strides)
            return tiled.backward(dout, dlse, q, k, v, out, lse, problem, config, operands, wants)

        return gradient

    monkeypatch.setattr(tiled, "bind_backward", bind_backward, raising=False)
    invalidate()
    q, k, v = (torch.randn(2, 8, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    k, v = (tensor.detach()[..., ::2].requires_grad_() for tensor in (k, v))
    q = q.detach()[..., ::2].requires_grad_()
    try:
        want = torch.autograd.grad(tilewise.attention(q, k, v, backend="tiled").sum(), (q, k, v))
        with laid_out_anew():
            out = tilewise.attention(q, k, v, backend="tiled")
        got = torch.autograd.grad(out.sum(), (q, k, v))
    finally:
        invalidate()
    assert bound[0] != bound[1]
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, budget(torch.float32, 8))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("how", ["operator", "reference", "tiled", "torch-math", "torch-flash"])
@pytest.mark.parametrize(
    "changed",
    [lambda tensor: tensor[:1], lambda tensor: tensor.half(), lambda tensor: torch.cat((tensor, tensor))],
    ids=["shrunk", "dtype", "grown"],
)
def test_inputs_whose_data_was_exchanged_are_refused(how, changed, create_graph):
    """A backward of other tensors than the forward's is that of nothing."""
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    if how == "operator":
        out = torch.ops.tilewise.attention(q, k, v, [], "full", None, "", "bhsd", "auto", False)[0]
    else:
        out = tilewise.attention(q, k, v, backend=how)
    for tensor in (q, k, v):
        tensor.data = changed(tensor.detach())
    with pytest.raises(tilewise.InvalidInput):
        out.sum().backward(create_graph=create_graph)
