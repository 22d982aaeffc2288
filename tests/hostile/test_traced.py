"""torch.jit.trace, results changed in place, and masks and dropout inside torch.compile."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import test_terms_call
import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, Full, Window
from tilewise.integrations import flash_attn
from tilewise.scores import Softcap
from tilewise.terms import Alibi

OURS = ["tiled", "reference"]
EVERY = [*OURS, "torch-flash", "torch-math", "auto"]
FLOAT32 = budget(torch.float32, 128)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def inputs(*shape: int, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------------------
# torch.jit.trace


def traced(function, *examples):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.trace itself
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of what PyTorch's own function compares
        return torch.jit.trace(function, examples)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", EVERY)
def test_jit_trace_records_the_operator(backend, layout):
    """For other values and lengths, and even if the very call was planned and remembered before."""

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", backend=backend, layout=layout)

    examples = inputs(1, 4, 4, 8)
    call(*examples)
    graph = traced(call, *examples)
    assert "tilewise::attention" in str(graph.graph)
    for shape in ((1, 4, 4, 8), (2, 6, 6, 8)):
        tensors = inputs(*shape)
        assert_close(graph(*tensors), call(*tensors), FLOAT32)


def test_jit_trace_with_gradients_masks_and_lse():
    visible = torch.ones(5, 5, dtype=torch.bool).tril()

    def call(q, k, v, mask):
        out, lse = tilewise.attention(q, k, v, mask=mask, return_lse=True, softcap=3.0)
        return out * lse.unsqueeze(-1)

    examples = inputs(1, 2, 5, 4, grad=True)
    graph = traced(call, *examples, visible)
    tensors, other = inputs(1, 2, 5, 4, grad=True), torch.ones(5, 5, dtype=torch.bool)
    want = call(*tensors, other)
    got = graph(*tensors, other)
    assert_close(got, want, FLOAT32)
    for one, two in zip(torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), tensors), strict=True):
        assert_close(one, two, FLOAT32, "gradient")


def test_jit_trace_of_the_namesake_and_of_dropout():
    examples = inputs(1, 2, 5, 4)
    graph = traced(lambda q, k, v: tilewise.scaled_dot_product_attention(q, k, v, is_causal=True), *examples)
    tensors = inputs(1, 2, 7, 4)
    assert_close(graph(*tensors), F.scaled_dot_product_attention(*tensors, is_causal=True), FLOAT32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        dropped = torch.jit.trace(
            lambda q, k, v: tilewise.attention(q, k, v, dropout=0.5), tuple(examples), check_trace=False
        )
    assert "scaled_dot_product_attention" in str(dropped.graph)
    assert not torch.equal(dropped(*examples), dropped(*examples))


def test_jit_trace_refuses_by_name_what_no_graph_of_it_can_hold():
    """Even if the very call was planned and remembered before."""
    q, flat, cu = torch.randn(1, 4, 2, 8), torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "return_max_logit": (lambda q: tilewise.attention(q, q, q, return_max_logit=True)[1], q),
        "attention_packed": (lambda q: tilewise.attention_packed(q, q, q, cu, cu), flat),
        "attention_cached": (lambda q: tilewise.attention_cached(q, q, q), q),
    }
    for name, (call, example) in calls.items():
        for _ in range(3):
            call(example)
        with pytest.raises(tilewise.UnsupportedProblem, match=f"{name} under torch.jit.trace"):
            traced(call, example)


# ---------------------------------------------------------------------------------------------------------------------
# In place


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("backend", "return_lse"), [*((name, False) for name in EVERY), *((name, True) for name in (*OURS, "auto"))]
)
def test_a_result_may_be_changed_in_place(backend, return_lse, layout):
    """As PyTorch's function allows: the change itself works, and a backward that needs the old values says so."""
    tensors = inputs(1, 4, 4, 8, grad=True)
    out = tilewise.attention(*tensors, backend=backend, layout=layout, return_lse=return_lse)
    out = out[0] if return_lse else out
    want = out.detach().clone() * 2
    out.mul_(2)
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", EVERY)
def test_a_clone_of_a_result_may_be_changed_and_differentiated(backend, layout):
    tensors = inputs(1, 4, 4, 8, grad=True)

    def call():
        return tilewise.attention(*tensors, backend=backend, layout=layout)

    want = torch.autograd.grad((call() * 2).square().sum(), tensors)
    changed = call().clone()
    changed[:, :2] *= 2
    changed[:, 2:] *= 2
    for one, other in zip(torch.autograd.grad(changed.square().sum(), tensors), want, strict=True):
        assert_close(one, other, FLOAT32, "gradient")


@pytest.mark.parametrize("backend", EVERY)
def test_memory_order_of_the_result(backend):
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs(2, 4, 6, 8))
    for grad in (False, True):
        out = tilewise.attention(q.detach().requires_grad_(grad), k, v, layout="bshd", backend=backend)
        assert out.is_contiguous()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", EVERY)
def test_memory_order_of_the_result_of_views(backend, compiled):
    """Most models attend to transposed views, and want the result in the memory order of what these are views of."""

    def call(q, k, v, dropout):
        views = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return tilewise.attention(*views, backend=backend, dropout=dropout)

    whole = inputs(2, 6, 4, 8)
    # Dropout that is traced by PyTorch's function has the order that it gives.
    for dropout in (0.0, 0.5) if backend == "auto" and not compiled else (0.0,):
        for grad in (False, True):
            tensors = [tensor.detach().requires_grad_(grad) for tensor in whole]
            out = (torch.compile(call, backend="aot_eager") if compiled else call)(*tensors, dropout)
            assert out.transpose(1, 2).is_contiguous()
            if grad:
                out.sum().backward()
    assert tilewise.attention(*(tensor.transpose(1, 2).contiguous() for tensor in whole)).is_contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


INNER = [Full(), Causal(), Causal("bottom-right"), Window(2, 0), Window(None, 1, "bottom-right")]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_documents_with_an_inner_mask_compile(inner):
    """Made outside, inside, or handed over."""
    tensors = inputs(1, 2, 9, 8, grad=True)
    mask = Documents((0, 4, 9), inner=inner)
    want = tilewise.attention(*tensors, mask=mask)
    ways = (
        compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=mask)),
        compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=Documents((0, 4, 9), inner=inner))),
        compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=str(mask))),
    )
    for way in ways:
        assert_close(way(*tensors), want, FLOAT32)
    handed_over = compiled(lambda q, k, v, mask: tilewise.attention(q, k, v, mask=mask))
    assert_close(handed_over(*tensors, mask), want, FLOAT32)


def test_documents_without_an_inner_mask_compile():
    tensors = inputs(1, 2, 9, 8)
    step = compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=Documents((0, 4, 9))))
    assert_close(step(*tensors), tilewise.attention(*tensors, mask=Documents((0, 4, 9))), FLOAT32)


def test_a_window_that_varies_compiles():
    q, k, v = inputs(1, 2, 9, 8)
    sizes = compiled(lambda q, k, v, n: tilewise.attention(q, k, v, mask=Window(n, 0)))
    handed_over = compiled(lambda q, k, v, mask: tilewise.attention(q, k, v, mask=mask))
    for n in (1, 2, 3, 5):
        want = tilewise.attention(q, k, v, mask=Window(n, 0))
        assert_close(sizes(q, k, v, n), want, FLOAT32)
        assert_close(handed_over(q, k, v, Window(n, 0)), want, FLOAT32)


def test_a_window_made_of_a_length_compiles():
    half = compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=Window(q.shape[2] // 2, 0)))
    for length in (5, 6, 8, 11):
        tensors = inputs(1, 2, length, 8)
        want = tilewise.attention(*tensors, mask=Window(length // 2, 0))
        assert_close(half(*tensors), want, FLOAT32)


@pytest.mark.parametrize("dynamic", [None, True])
def test_dropout_compiles_with_heads_that_vary(dynamic):
    def call(q, k, v):
        return tilewise.attention(q, k, v, mask="causal", dropout=0.5)

    step = compiled(call, dynamic=dynamic)
    for heads_q, heads_kv in ((2, 2), (4, 4), (4, 2), (6, 2)):
        q, k = torch.randn(1, heads_q, 6, 8), torch.randn(1, heads_kv, 6, 8)
        weights = dropped_weights(step, q, k)
        expanded = k.repeat_interleave(heads_q // heads_kv, 1)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        check_dropped(weights, (q @ expanded.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1))


@pytest.mark.parametrize(
    "mask", [Window(1, 0), Window(2, None), Documents((0, 2, 6)), Causal("bottom-right"), "window:1,1"], ids=str
)
def test_dropout_compiles_with_every_mask(mask):
    step = compiled(lambda q, k, v: tilewise.attention(q, k, v, mask=mask, dropout=0.5))
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    rule = tilewise.masks.parse(str(mask))
    visible = rule.to_bool(range(6), range(6), 6, 6)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~visible, -torch.inf)
    check_dropped(dropped_weights(step, q, k), scores.softmax(-1))


def dropped_weights(step, q, k):
    """With the identity for values, the result is the matrix of weights."""
    return step(q, k, torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1))


def check_dropped(weights, want) -> None:
    """Each weight is 0 or twice what it would be."""
    kept = weights != 0
    assert kept.any()
    assert_close(weights, torch.where(kept, 2 * want, 0.0), FLOAT32, "weights")


# ---------------------------------------------------------------------------------------------------------------------
# Terms whose tensors have sizes that vary

BATCHED = {
    "slopes": (lambda q, k, v, slopes: tilewise.attention(q, k, v, alibi=slopes), 4),
    "keep beside scores": (
        lambda q, k, v, slopes: tilewise.attention(
            q,
            k,
            v,
            keep=slopes[:, :1, None, None] >= torch.arange(8) / 8,
            scores=(Softcap(5.0), Alibi()),
            operands={"slopes": slopes[0]},
        ),
        4,
    ),
    "slopes of packed sequences": (lambda q, k, v, slopes: packed(tilewise.attention_packed, q, k, v, slopes), 3),
    "slopes by flash-attn's name": (
        lambda q, k, v, slopes: flash_attn.flash_attn_func(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), alibi_slopes=slopes
        ),
        4,
    ),
    "slopes by flash-attn's name, packed": (
        lambda q, k, v, slopes: packed(flash_attn.flash_attn_varlen_func, q, k, v, slopes, 8, 8),
        3,
    ),
}


def packed(attend, q, k, v, slopes, *longest):
    """As many sequences as there are slopes, all but the last of one row."""
    ends = torch.arange(slopes.shape[0] + 1, dtype=torch.int32)
    offsets = torch.where(ends == slopes.shape[0], q.shape[0], ends).int()
    name = "alibi" if attend is tilewise.attention_packed else "alibi_slopes"
    return attend(q, k, v, offsets, offsets, *longest, **{name: slopes})


@pytest.mark.parametrize("name", BATCHED)
def test_terms_of_a_batch_that_varies_compile(name):
    function, ndim = BATCHED[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, batch in enumerate((3, 2, 5)):
        tensors = [torch.randn((batch, 2, 8, 16) if ndim == 4 else (batch + 5, 2, 16)) for _ in range(3)]
        tensors.append(torch.rand(batch, 2))
        with torch.compiler.set_stance("fail_on_recompile") if number else nullcontext():
            got = compiled(*tensors)
        assert_close(got, function(*tensors), FLOAT32)


# ---------------------------------------------------------------------------------------------------------------------
# Calls that tilewise.scaled_dot_product_attention hands to PyTorch

HANDED_OVER = {
    "2 dimensions": (((8, 16),) * 3, {}),
    "5 dimensions": (((2, 2, 2, 8, 16),) * 3, {}),
    "a batch that broadcasts": (((2, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), {}),
    "heads that broadcast": (((2, 2, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)), {}),
    "a mask that requires grad": (((2, 2, 8, 16),) * 3, {"attn_mask": torch.ones(8, 8, requires_grad=True)}),
    "scale 0": (((2, 2, 8, 16),) * 3, {"scale": 0.0}),
    "dropout 1": (((2, 2, 8, 16),) * 3, {"dropout_p": 1.0}),
}


@pytest.mark.parametrize("how", ["compiled", "compiled, dynamic", "patched"])
@pytest.mark.parametrize("name", HANDED_OVER)
def test_what_is_handed_to_pytorch(monkeypatch, name, how):
    """In one graph, and without coming back where a program has put our function in the place of PyTorch's."""
    shapes, options = HANDED_OVER[name]
    tensors = [torch.randn(shape) for shape in shapes]
    want = F.scaled_dot_product_attention(*tensors, **options)
    attend = tilewise.scaled_dot_product_attention
    if how == "patched":
        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    else:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=how.endswith("dynamic"))
    assert_close(attend(*tensors, **options), want, FLOAT32)


# ---------------------------------------------------------------------------------------------------------------------
# Graphs that are kept for another backward


class Module(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


GRAPHS = {
    "eager": lambda function, *examples: function,
    "traced": traced,
    "exported": lambda function, *examples: torch.export.export(Module(function), examples).module(),
}


@pytest.mark.parametrize("how", GRAPHS)
@pytest.mark.parametrize("name", test_terms_call.NAMES)
def test_a_graph_that_is_kept_gives_its_gradients_again(name, how):
    """And none at all where a hook has let go of what it needs since."""
    case = test_terms_call.asked(name)
    operands = {key: x.clone().requires_grad_(key in case.learned) for key, x in case.operands.items()}

    def attend(q, k, v, *tensors):
        given = dict(zip(operands, tensors, strict=True))
        rest = {"mask": Causal("bottom-right"), "backend": "tiled", "return_lse": True}
        return tilewise.attention(q, k, v, scores=case.terms, operands=given, **rest)

    batch, heads, rows, keys = (getattr(test_terms_call, size) for size in ("BATCH", "HEADS", "ROWS", "KEYS"))
    sizes = [(heads, rows), (test_terms_call.HEADS_KV, keys), (test_terms_call.HEADS_KV, keys)]
    arguments = [*(torch.randn(batch, *size, 16, requires_grad=True) for size in sizes), *operands.values()]
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    dout = torch.randn(batch, heads, rows, 16)
    want = torch.autograd.grad(attend(*arguments)[0], leaves, dout)
    graph = GRAPHS[how](attend, *arguments)

    def check(got) -> None:
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 8 * FLOAT32, "gradient")

    out, lse = graph(*arguments)
    check(torch.autograd.grad(out, leaves, dout, retain_graph=True))
    check(torch.autograd.grad((out, lse), leaves, (dout, torch.zeros_like(lse)), retain_graph=True))
    seen = []

    def let_go(grad) -> None:
        if not seen:
            seen.append(None)  # it is called again inside
            seen.append(torch.autograd.grad(out, leaves, dout))

    out.register_hook(let_go)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, dout)
    check(seen[1])
