"""Under torch.autocast `attention` casts nothing; PyTorch's namesake and the override cast as PyTorch does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tilewise
from support import assert_close, budget
from tilewise import Documents, InvalidInput, Window
from tilewise.integrations import flash_attn

DTYPES = [torch.bfloat16, torch.float16]
BACKENDS = ["auto", "reference", "tiled", "torch-math", "torch-flash"]
WITH_LSE = ["reference", "tiled", "auto"]
# float32 arithmetic gives the gradients to about this; bfloat16 inside would miss it by three orders of magnitude.
FLOAT32 = budget(torch.float32, 128)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(3)]


def truth(call, tensors, dout=None):
    """The same in float64, which autocast leaves alone."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = call(*wide)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(result.pow(2).sum() for result in results)
    return [*results, *torch.autograd.grad(loss, wide)]


def under_autocast(call, tensors, dtype, *, create_graph=False):
    with torch.autocast("cpu", dtype=dtype):
        results = call(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(result.pow(2).sum() for result in results)
        return [*results, *torch.autograd.grad(loss, tensors, create_graph=create_graph)]


def check(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "causal", Window(20, 0), Documents((0, 30, 64))], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_casts_nothing(backend, mask, dtype):
    tensors = inputs(1, 2, 64, 32)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask=mask, backend=backend)

    check(under_autocast(call, tensors, dtype), truth(call, tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_LSE)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_lse_is_not_cast_either(backend, softcap, dtype):
    tensors = inputs(1, 2, 64, 32)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend, softcap=softcap, return_lse=True)

    check(under_autocast(call, tensors, dtype), truth(call, tensors))


def test_a_cache_is_not_cast():
    q, k, v = inputs(2, 9, 2, 32, grad=False)
    new = torch.randn(2, 1, 2, 32)
    lengths, table = torch.tensor([7, 4], dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3)
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32)

    def all_forms(q, k, v):
        paged = [tensor.reshape(6, 3, 2, 32) for tensor in (k, v)]
        appended = [new.to(q.dtype), new.to(q.dtype)]
        return (
            *tilewise.attention_cached(q, k, v, lengths, sink=torch.ones(2), return_lse=True),
            *flash_attn.flash_attn_with_kvcache(
                q, k.clone(), v.clone(), *appended, cache_seqlens=lengths, return_softmax_lse=True
            ),
            flash_attn.flash_attn_varlen_func(q.flatten(0, 1), *paged, offsets, offsets, 9, 9, block_table=table),
        )

    want = all_forms(q.double(), k.double(), v.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(all_forms(q, k, v), want)


def test_the_weights_beside_dropout_are_not_cast():
    q, k, v = inputs(2, 9, 2, 32, grad=False)

    def weights(q, k, v):
        torch.manual_seed(0)
        return flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)[2]

    want = weights(q.double(), k.double(), v.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check([weights(q, k, v)], [want])


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_tensors_are_not_cast(backend, additive):
    tensors = inputs(1, 2, 64, 32)
    visible = torch.ones(64, 64, dtype=torch.bool).tril()
    bias = torch.randn(64, 64).masked_fill(~visible, -torch.inf)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask=bias.to(q.dtype) if additive else visible, backend=backend)

    check(under_autocast(call, tensors, torch.bfloat16), truth(call, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_backward_runs_under_autocast(backend):
    tensors = inputs(1, 2, 64, 32)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend)

    loss = call(*tensors).pow(2).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, tensors)
    check(got, truth(call, tensors)[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_is_not_cast(backend):
    tensors = inputs(1, 2, 16, 8)

    def penalty(call_dtype):
        q, k, v = (tensor.detach().to(call_dtype).requires_grad_() for tensor in tensors)
        loss = tilewise.attention(q, k, v, mask="causal", backend=backend).pow(2).sum()
        first = torch.autograd.grad(loss, (q, k, v), create_graph=True)
        return [*first, *torch.autograd.grad(sum(grad.pow(2).sum() for grad in first), (q, k, v))]

    want = penalty(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = penalty(torch.float32)
    check(got, want)


@pytest.mark.parametrize("backend", ["auto", "reference", "torch-math"])
def test_transforms_are_not_cast(backend):
    tensors = inputs(3, 1, 2, 16, 8, grad=False)

    def loss(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend).pow(2).sum()

    gradients = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))
    want = gradients(*(tensor.double() for tensor in tensors))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(*tensors)
        _, tangent = torch.func.jvp(torch.func.vmap(loss), tuple(tensors), tuple(tensors))
    check(got, want)
    wide = tuple(tensor.double() for tensor in tensors)
    check([tangent], [torch.func.jvp(torch.func.vmap(loss), wide, wide)[1]])


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_not_cast(compiled):
    """Every kept weight is doubled: the rows of out are sums that the values tell."""
    torch._dynamo.reset()
    q, k, v = inputs(1, 1, 32, 8)

    def step(q, k, v):
        return tilewise.attention(q, k, torch.eye(32).expand(1, 1, 32, 32) + 0 * v[..., :1], dropout=0.5)

    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k))
    weights = (q.double() @ k.double().transpose(-1, -2) / 8**0.5).softmax(-1)
    kept = out.detach() != 0  # v is the identity, so out is the matrix of weights after dropout
    assert 0.3 < kept.float().mean() < 0.7
    want = torch.where(kept, 2 * weights, 0.0)
    assert out.dtype == torch.float32
    assert_close(out, want, FLOAT32)
    for got, exact in zip(grads, torch.autograd.grad(want.sum(), (q, k)), strict=True):
        assert_close(got, exact, FLOAT32, "gradient")


@pytest.mark.parametrize("backend", ["tiled", "reference", "torch-math"])
def test_the_bare_operators_cast_nothing(backend):
    q, k, v = inputs(1, 2, 64, 32)
    options = ("causal", None, "", "bhsd", backend, False)

    def call(q, k, v):
        return torch.ops.tilewise.attention(q, k, v, [], *options)[0]

    check(under_autocast(call, [q, k, v], torch.bfloat16), truth(call, [q, k, v]))


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_compiled_graphs_cast_nothing(backend):
    torch._dynamo.reset()
    tensors = inputs(1, 2, 64, 32)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    check(under_autocast(compiled, tensors, torch.bfloat16), truth(call, tensors))


# ---------------------------------------------------------------------------------------------------------------------
# The namesake and the override


def sdpa_case(dtypes, mask_dtype=None):
    shapes = ((2, 3, 9, 8),) * 3
    tensors = [
        (torch.randn(shape) * 2).to(dtype) if dtype is not torch.bool else torch.randn(shape) > 0
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    mask = None if mask_dtype is None else (torch.randn(9, 9) + 1).to(mask_dtype)
    return tensors, mask


CASTS = {
    "float32": ((torch.float32,) * 3, None),
    "bfloat16": ((torch.bfloat16,) * 3, None),
    "float64": ((torch.float64,) * 3, None),
    "mixed": ((torch.float32, torch.float16, torch.bfloat16), None),
    "float32 mask": ((torch.float32,) * 3, torch.float32),
    "float32 mask of bfloat16": ((torch.bfloat16,) * 3, torch.float32),
    "boolean mask": ((torch.float32,) * 3, torch.bool),
    "int64": ((torch.int64,) * 3, None),
    "one int64": ((torch.float32, torch.int64, torch.float32), None),
    "boolean": ((torch.bool,) * 3, None),
    "complex": ((torch.complex64,) * 3, None),
    "float64 keys": ((torch.float32, torch.float64, torch.float32), None),
    "float64 mask": ((torch.float32,) * 3, torch.float64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASTS.values(), ids=CASTS.keys())
def test_the_namesake_casts_as_pytorch_does(case, dtype):
    tensors, mask = sdpa_case(*case)
    with torch.autocast("cpu", dtype=dtype):
        try:
            want = F.scaled_dot_product_attention(*tensors, mask)
        except (RuntimeError, NotImplementedError):
            with pytest.raises((InvalidInput, RuntimeError, NotImplementedError)):
                tilewise.scaled_dot_product_attention(*tensors, mask)
            return
        got = tilewise.scaled_dot_product_attention(*tensors, mask)
    assert got.dtype == want.dtype
    assert_close(got, want, 4 * budget(got.dtype))


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_the_override_casts_as_pytorch_does(backend):
    tensors = inputs(1, 2, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.scaled_dot_product_attention(*tensors, is_causal=True)
        with tilewise.sdpa(backend=backend):
            got = F.scaled_dot_product_attention(*tensors, is_causal=True)
            grads = torch.autograd.grad(got.float().pow(2).sum(), tensors)
    assert got.dtype == want.dtype == torch.bfloat16
    assert_close(got, want, 4 * budget(torch.bfloat16))
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
