"""Sizes of 0, tensors without data, default devices, and shapes that do not go together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, InvalidInput, UnsupportedProblem, Window

OURS = ["tiled", "reference"]
EVERY = [*OURS, "torch-flash", "torch-math", "auto"]

EMPTY = {  # q, then k and v
    "batch": ((0, 4, 5, 8), (0, 4, 5, 8)),
    "batch, grouped": ((0, 4, 5, 8), (0, 2, 5, 8)),
    "heads": ((2, 0, 5, 8), (2, 0, 5, 8)),
    "query heads": ((2, 0, 5, 8), (2, 2, 5, 8)),
    "queries": ((2, 4, 0, 8), (2, 2, 5, 8)),
    "keys": ((2, 4, 5, 8), (2, 2, 0, 8)),
    "queries and keys": ((2, 4, 0, 8), (2, 2, 0, 8)),
    "everything": ((0, 0, 0, 8), (0, 0, 0, 8)),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", [None, "causal", Causal("bottom-right"), Window(1, 1)], ids=str)
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("backend", [*OURS, "torch-math", "auto"])
def test_sizes_of_zero(backend, shapes, mask, layout):
    """The empty result."""
    q, k = (torch.randn(shape) for shape in shapes)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k, v = q.requires_grad_(), k.requires_grad_(), k.detach().clone().requires_grad_()
    out = tilewise.attention(q, k, v, mask=mask, layout=layout, backend=backend)
    assert out.shape == q.shape
    assert torch.equal(out, torch.zeros_like(out))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert not any(grad.any() for grad in grads)


def test_sizes_of_zero_are_refused_by_a_kernel_that_takes_none():
    for q, k in EMPTY.values():
        with pytest.raises(UnsupportedProblem):
            tilewise.attention(torch.randn(q), torch.randn(k), torch.randn(k), backend="torch-flash")


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("backend", ["auto", *OURS])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_lse_of_sizes_of_zero(backend, shapes, softcap):
    q, k = (torch.randn(shape, requires_grad=True) for shape in shapes)
    out, lse = tilewise.attention(q, k, k, softcap=softcap, backend=backend, return_lse=True)
    assert lse.shape == q.shape[:3]
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    (out.sum() + lse.sum() * 0).backward()
    assert k.grad is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("backend", ["auto", *OURS, "torch-math"])
def test_masks_of_sizes_of_zero(backend, shapes, dtype):
    q, k = (torch.randn(shape) for shape in shapes)
    mask = torch.ones(q.shape[2], k.shape[2]).to(dtype)
    out = tilewise.attention(q, k, k, mask=mask, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("head_dims", [(0, 0), (0, 4), (4, 0)])
def test_a_head_dim_of_zero(head_dims):
    """`attention` says no; the namesake does what PyTorch does."""
    q, v = torch.randn(2, 3, 5, head_dims[0]), torch.randn(2, 3, 5, head_dims[1])
    with pytest.raises(InvalidInput, match="head_dim"):
        tilewise.attention(q, q, v)
    want = F.scaled_dot_product_attention(q, q, v)
    assert_close(tilewise.scaled_dot_product_attention(q, q, v), want, budget(torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Without data

OPTIONS = {
    "nothing": {},
    "softcap": {"softcap": 1.0},
    "causal": {"mask": "causal"},
    "window": {"mask": Window(1, 0)},
    "documents": {"mask": Documents((0, 2, 5), inner=Causal())},
    "boolean mask": {"mask": torch.bool},
    "additive mask": {"mask": torch.float32},
    "lse": {"return_lse": True},
    "dropout": {"dropout": 0.5},
    "bshd": {"layout": "bshd"},
    "scale": {"scale": 0.3},
    "tf32": {"precision": "tf32"},
    "softcap, documents and lse": {"softcap": 1.0, "mask": Documents((0, 2, 5)), "return_lse": True},
}


def with_mask(options, length, device):
    mask = options.get("mask")
    if not isinstance(mask, torch.dtype):
        return options
    return {**options, "mask": torch.ones(length, length, device=device).to(mask)}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("backend", EVERY)
def test_meta_tensors_give_what_real_ones_give(backend, options, grad):
    def shapes(device):
        q = torch.randn(1, 5, 5, 8, device=device, requires_grad=grad)
        k = torch.randn(1, 5, 5, 8, device=device, requires_grad=grad)
        result = tilewise.attention(q, k, k, backend=backend, **with_mask(options, 5, device))
        results = list(result) if isinstance(result, tuple) else [result]
        if grad:
            results += torch.autograd.grad(results[0].sum(), (q, k))
        assert {tensor.device.type for tensor in results} == {device}
        return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in results]

    try:
        want = shapes("cpu")
    except UnsupportedProblem:
        with pytest.raises(UnsupportedProblem):
            shapes("meta")
        return
    assert shapes("meta") == want


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"attn_mask": torch.bool}], ids=str)
@pytest.mark.parametrize("dims", [3, 4])
def test_the_namesake_takes_meta_tensors(arguments, dims):
    q = torch.randn((2, 3, 5, 8)[4 - dims :], device="meta", dtype=torch.float16)
    if arguments.get("attn_mask"):
        arguments = {"attn_mask": torch.ones(5, 5, dtype=torch.bool, device="meta")}
    want = F.scaled_dot_product_attention(q, q, q, **arguments)
    got = tilewise.scaled_dot_product_attention(q, q, q, **arguments)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@pytest.mark.parametrize("mask", [torch.bool, torch.float32, "causal", Window(1, 0), Documents((0, 2, 5))], ids=str)
@pytest.mark.parametrize("backend", EVERY)
def test_the_default_device_does_not_matter(backend, mask):
    tensors = [torch.randn(1, 4, 5, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(5, 5).tril().to(mask) if isinstance(mask, torch.dtype) else mask

    def run():
        out = tilewise.attention(*tensors, mask=mask, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    want = run()
    for _ in range(2):  # planned, and remembered
        tilewise.memo.invalidate()
        with torch.device("meta"):
            got = run()
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_the_default_device_does_not_matter_to_the_rest():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    want = tilewise.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    lse = tilewise.attention(q, k, v, mask=mask, return_lse=True)[1]
    with torch.device("meta"):
        assert torch.equal(tilewise.scaled_dot_product_attention(q, k, v, attn_mask=mask), want)
        assert torch.equal(tilewise.attention(q, k, v, mask=mask, return_lse=True)[1], lse)
        assert tilewise.attention(q, k, v, mask=Window(1, 0), dropout=0.5).device == q.device


# ---------------------------------------------------------------------------------------------------------------------
# Shapes that do not go together

WRONG = {
    "head_dim": (((1, 2, 5, 4), (1, 2, 5, 3), (1, 2, 5, 4)), {}),
    "batch": (((1, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {}),
    "batch of v": (((1, 2, 5, 4), (1, 2, 5, 4), (2, 2, 5, 4)), {}),
    "heads": (((1, 3, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)), {}),
    "heads of v": (((1, 4, 5, 4), (1, 2, 5, 4), (1, 4, 5, 4)), {}),
    "length of v": (((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 7, 4)), {}),
    "dimensions": (((2, 5, 4), (2, 5, 4), (2, 5, 4)), {}),
    "empty heads": (((1, 2, 5, 0), (1, 2, 5, 0), (1, 2, 5, 4)), {}),
    "mask": (((1, 2, 5, 4),) * 3, {"mask": (4, 5)}),
    "mask heads": (((1, 2, 5, 4),) * 3, {"mask": (3, 5, 5)}),
    "documents": (((1, 2, 5, 4),) * 3, {"mask": Documents((0, 3))}),
    "softcap": (((1, 2, 5, 4),) * 3, {"softcap": -1.0}),
    "scale": (((1, 2, 5, 4),) * 3, {"scale": 0.0}),
    "backend": (((1, 2, 5, 4),) * 3, {"backend": "fast"}),
    "layout": (((1, 2, 5, 4),) * 3, {"layout": "sbhd"}),
    "precision": (((1, 2, 5, 4),) * 3, {"precision": "low"}),
}


@pytest.mark.parametrize("kind", ["real", "meta", "fake", "requires grad", "fake, requires grad", "bshd", "fake bshd"])
@pytest.mark.parametrize(("shapes", "options"), WRONG.values(), ids=WRONG.keys())
def test_wrong_shapes_are_refused_alike(shapes, options, kind):
    def call():
        device = "meta" if kind == "meta" else "cpu"
        tensors = [torch.randn(shape, device=device, requires_grad="grad" in kind) for shape in shapes]
        arguments = dict(options)
        if isinstance(arguments.get("mask"), tuple):
            arguments["mask"] = torch.ones(arguments["mask"], dtype=torch.bool, device=device)
        if "bshd" in kind and tensors[0].ndim == 4:
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
            arguments.setdefault("layout", "bshd")
        return tilewise.attention(*tensors, **arguments)

    if "fake" in kind:
        with FakeTensorMode(), pytest.raises(InvalidInput):
            call()
    else:
        with pytest.raises(InvalidInput):
            call()


def test_shapes_known_to_a_trace_only_as_symbols_are_checked_when_it_runs():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k: tilewise.attention(q, k, k, mask="causal"), fullgraph=True, dynamic=True, backend="eager"
    )
    assert compiled(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8)).shape == (2, 4, 6, 8)
    with pytest.raises(Exception, match="head_dim"):
        compiled(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 9))
