"""flash-attn's functions against a float64 reference written from its documentation (one_sequence.py)."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from one_sequence import attend
from support import assert_close, budget
from tilewise import InvalidInput, UnsupportedProblem
from tilewise.integrations import flash_attn
from tilewise.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def batched_reference(q, k, v, slopes=None, **options):
    per_batch = [None] * len(q) if slopes is None else slopes.expand(len(q), -1)
    results = [attend(*parts, slopes=one, **options) for *parts, one in zip(q, k, v, per_batch, strict=True)]
    return tuple(torch.stack(x) for x in zip(*results, strict=True))


def packed_reference(q, k, v, cu_q, cu_k, slopes=None, **options):
    per_batch = [None] * (len(cu_q) - 1) if slopes is None else slopes.expand(len(cu_q) - 1, -1)
    results = [
        attend(q[q0:q1], k[k0:k1], v[k0:k1], slopes=one, **options)
        for (q0, q1), (k0, k1), one in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), per_batch, strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1)


def tensors(seq_q=13, seq_k=13, heads=4, heads_k=2, dim=16, dtype=torch.float32, batch=2, grad=False):
    shapes = ((batch, seq_q, heads, dim), (batch, seq_k, heads_k, dim), (batch, seq_k, heads_k, dim))
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def alibi(heads, batch=0):
    slopes = torch.tensor([2.0 ** (-1 - head) for head in range(heads)])
    return slopes if not batch else slopes * torch.linspace(0.5, 2.0, batch)[:, None]


LENGTHS = [(13, 13), (5, 13), (13, 5), (1, 9)]
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (3, -1)},
    {"window_size": (-1, 2)},
    {"window_size": (-1, 0)},
    {"window_size": (3, 2), "causal": True},
    {"softcap": 5.0, "causal": True},
    {"softmax_scale": 0.3},
]


def for_reference(options):
    renamed = {"window_size": "window", "softmax_scale": "scale"}
    return {renamed.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_flash_attn_func(lengths, options):
    q, k, v = tensors(*lengths)
    want, want_lse = batched_reference(q, k, v, **for_reference(options))
    out, lse, dmask = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert dmask is None
    assert_close(out, want, budget(q.dtype, 16))
    assert_close(lse, want_lse, budget(q.dtype, 16), "lse")
    assert_close(flash_attn_func(q, k, v, **options), want, budget(q.dtype, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4, 0)}], ids=str)
def test_dtypes(dtype, options):
    q, k, v = tensors(dtype=dtype)
    out = flash_attn_func(q, k, v, **options)
    assert out.dtype == dtype
    assert_close(out, batched_reference(q, k, v, **for_reference(options))[0], budget(dtype, 16))


@pytest.mark.parametrize("batch", [0, 2], ids=["per head", "per batch and head"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 1)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_alibi(lengths, options, batch):
    q, k, v = tensors(*lengths)
    slopes = alibi(4, batch)
    want, want_lse = batched_reference(q, k, v, slopes, **for_reference(options))
    out, lse, _ = flash_attn_func(q, k, v, **options, alibi_slopes=slopes, return_attn_probs=True)
    assert_close(out, want, budget(q.dtype, 16))
    assert_close(lse, want_lse, budget(q.dtype, 16), "lse")


def test_alibi_in_16_bits_keeps_biases_that_16_bits_could_not_hold():
    """The first rows stand 200 keys before the first key. In bfloat16 such biases would be wrong by up to 1/2."""
    q, k, v = tensors(300, 100, dtype=torch.bfloat16)
    slopes = torch.full((4,), 0.7)
    out = flash_attn_func(q, k, v, alibi_slopes=slopes)
    assert out.dtype == torch.bfloat16
    assert_close(out, batched_reference(q, k, v, slopes)[0], budget(torch.bfloat16, 100))


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": (3, 2)}, {"softcap": 5.0}, {"alibi_slopes": alibi(4)}],
    ids=["causal", "window", "softcap", "alibi"],
)
def test_gradients(options):
    q, k, v = tensors(7, 13, grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    named = for_reference(options)
    want, want_lse = batched_reference(*wide, named.pop("alibi_slopes", None), **named)
    dout, dlse = torch.randn(want.shape), torch.randn(want_lse.shape)
    wanted = torch.autograd.grad((want, want_lse), wide, (dout.double(), dlse.double()))
    out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    for name, got, other in zip("qkv", torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)), wanted, strict=True):
        assert_close(got, other, budget(torch.float32, 64), f"d{name}")


def test_deterministic_is_no_obstacle_where_everything_is():
    q, k, v = tensors(grad=True)
    assert torch.equal(flash_attn_func(q, k, v, deterministic=True), flash_attn_func(q, k, v))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Tensors of the CPU count as those of a GPU, whose backwards may add in any order."""
    monkeypatch.setattr(flash_attn, "_may_vary", lambda *tensors: True)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_is_planned_for_and_draws_as_a_term(on_a_gpu, monkeypatch, packed, dropout, with_lse):
    """The backward of a term goes by its plan; that of PyTorch's dropout would go by the switch."""
    q, k, v = tensors(heads_k=4, grad=True)
    cu = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    planned = []

    def seen(call):
        def observed(*given, **arguments):
            drops = packed or not arguments.get("dropout")
            planned.append((torch.are_deterministic_algorithms_enabled(), drops))
            return call(*given, **arguments)

        return observed

    for name in ("attention", "attention_packed"):
        monkeypatch.setattr(flash_attn, name, seen(getattr(flash_attn, name)))
    options = {"dropout_p": dropout, "deterministic": True, "return_attn_probs": with_lse}
    if packed:
        result = flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, q.shape[1], q.shape[1], **options)
    else:
        result = flash_attn_func(q, k, v, **options)
    assert planned == [(True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    (result[0] if with_lse else result).sum().backward()
    assert q.grad is not None


def test_deterministic_in_a_compiled_graph_needs_the_switch(on_a_gpu, monkeypatch):
    q, k, v = tensors(grad=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedProblem, match="use_deterministic_algorithms"):
        flash_attn_func(q, k, v, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_attn._has_switch()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", range(3))
def test_a_backward_may_vary_where_any_tensor_needs_it_on_a_gpu(number):
    given = [SimpleNamespace(requires_grad=number == i, is_cuda=True) for i in range(3)]
    assert flash_attn._may_vary(*given)
    with torch.no_grad():
        assert not flash_attn._may_vary(*given)
    assert not flash_attn._may_vary(*[SimpleNamespace(requires_grad=True, is_cuda=False)] * 3)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("learned", "qkv")
def test_keys_in_pages_have_no_gradient_and_say_so_in_the_backward(learned, with_lse):
    given = {"q": torch.randn(3, 4, 16), "k": torch.randn(4, 8, 2, 16), "v": torch.randn(4, 8, 2, 16)}
    table, cu_q, cu_k = torch.tensor([[3, 1]]), torch.tensor([0, 3]), torch.tensor([0, 12])
    call = partial(flash_attn_varlen_func, **given, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3)
    call = partial(call, max_seqlen_k=12, return_attn_probs=with_lse)
    want = call(block_table=table)
    given[learned].requires_grad_()
    found = call(block_table=table)
    for got, wanted in zip(found[:2] if with_lse else [found], want[:2] if with_lse else [want], strict=True):
        assert torch.equal(got, wanted)
        with pytest.raises(UnsupportedProblem, match="a gradient with keys in pages"):
            got.sum().backward()
    with pytest.raises(InvalidInput, match=r"^block_table: got 4 among its numbers"):
        call(block_table=table + 1)


def test_packed_forms_are_views_of_the_same_call():
    q, k, v = tensors(heads_k=4)
    want = flash_attn_func(q, k, v, causal=True)
    packed = torch.stack((q, k, v), dim=2).requires_grad_()
    assert torch.equal(flash_attn_qkvpacked_func(packed, causal=True), want)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), causal=True), want)
    flash_attn_qkvpacked_func(packed, causal=True).sum().backward()
    assert packed.grad is not None
    assert packed.grad[:, :, 2].any()


CU = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
CU_LONGER = torch.tensor([0, 7, 9, 21, 24], dtype=torch.int32)


@pytest.mark.parametrize("cu_k", [CU, CU_LONGER], ids=["same lengths", "other lengths"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen(options, cu_k):
    q = torch.randn(20, 4, 16)
    k, v = torch.randn(int(cu_k[-1]), 2, 16), torch.randn(int(cu_k[-1]), 2, 16)
    want, want_lse = packed_reference(q, k, v, CU, cu_k, **for_reference(options))
    out, lse, dmask = flash_attn_varlen_func(q, k, v, CU, cu_k, 8, 12, **options, return_attn_probs=True)
    assert dmask is None
    assert lse.shape == (4, 20)
    assert_close(out, want, budget(q.dtype, 16))
    assert_close(lse, want_lse, budget(q.dtype, 16), "lse")


@pytest.mark.parametrize("batch", [0, 4], ids=["per head", "per sequence and head"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
def test_varlen_alibi(options, batch):
    q, k, v = torch.randn(20, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
    slopes = alibi(4, batch)
    want, want_lse = packed_reference(q, k, v, CU, CU_LONGER, slopes, **for_reference(options))
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, CU, CU_LONGER, 8, 12, **options, alibi_slopes=slopes, return_attn_probs=True
    )
    assert_close(out, want, budget(q.dtype, 16))
    assert_close(lse, want_lse, budget(q.dtype, 16), "lse")


def test_varlen_packed_forms_and_gradients():
    q, k, v = (torch.randn(20, 4, 16, requires_grad=True) for _ in range(3))
    out = flash_attn_varlen_func(q, k, v, CU, CU, 8, 8, causal=True)
    qkv, kv = torch.stack((q, k, v), dim=1), torch.stack((k, v), dim=1)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, CU, 8, causal=True), out)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, CU, CU, 8, 8, causal=True), out)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, _ = packed_reference(*wide, CU, CU, causal=True)
    dout = torch.randn(out.shape)
    wanted = torch.autograd.grad(want, wide, dout.double())
    for name, got, other in zip("qkv", torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        assert_close(got, other, budget(torch.float32, 64), f"d{name}")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (200, 200)}], ids=str)
def test_dropout_keeps_the_mean_and_drops_the_share(options):
    """With v = 1 an output is the sum of the weights kept, each scaled up: its mean is 1."""
    q, k, _ = tensors(400, 400, dim=8)
    v = torch.ones(2, 400, 2, 8)
    out = flash_attn_func(q, k, v, dropout_p=0.25, **options)
    assert not torch.allclose(out, torch.ones_like(out))
    rows = out[..., 0].double()  # a row's columns share its weights
    assert abs(rows.mean() - 1) <= 5 * rows.std() / rows.numel() ** 0.5  # five standard errors


def test_dropout_with_alibi_and_packed_sequences():
    q, k, v = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.ones(20, 2, 16)
    out = flash_attn_varlen_func(q, k, v, CU, CU, 8, 8, dropout_p=0.5, alibi_slopes=alibi(4), causal=True)
    first_rows = out[CU[:-1].unique().long()]  # a sequence's first query sees one key: kept and doubled, or dropped
    assert set(first_rows.unique().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"alibi_slopes": "alibi"}], ids=str)
def test_the_weights_tell_what_was_dropped(options):
    """S_dmask: softmax of the scores, below 0 where dropped; what is left, scaled up, makes the output."""
    q, k, v = tensors()
    options = {name: alibi(q.shape[2]) if value == "alibi" else value for name, value in options.items()}
    torch.manual_seed(3)
    out, lse, weights = flash_attn_func(q, k, v, 0.25, return_attn_probs=True, **options)
    _, whole, none = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert none is None
    assert_close(lse, whole, budget(torch.float32, 64))  # dropout leaves the sums alone
    assert_close(weights.abs().sum(-1), torch.ones_like(lse), budget(torch.float32, 64))
    heads = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    assert_close(out, (weights.clamp(min=0) @ heads / 0.75).transpose(1, 2), budget(torch.float32, 64))
    assert 0 < (weights < 0).sum() < weights.numel() / 2
    torch.manual_seed(3)
    again = flash_attn_func(q, k, v, 0.25, return_attn_probs=True, **options)
    assert torch.equal(again[0], out)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi_slopes": "alibi"}, {"keys": "some"}], ids=str)
def test_the_weights_of_packed_sequences_tell_what_was_dropped(options):
    """Each sequence in a corner of its own; 0 where it has no rows, or no keys that are used."""
    q, k, v = torch.randn(20, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
    options = {name: alibi(4, 4) if value == "alibi" else value for name, value in options.items()}
    first, last = [0, 0, 0, 0], CU_LONGER.diff().tolist()
    if options.pop("keys", ""):
        first, last = [1, 0, 2, 0], [7, 1, 9, 2]
        options |= {"leftpad_k": torch.tensor(first).int(), "seqused_k": torch.tensor(last).int()}
    torch.manual_seed(3)
    offsets = CU, CU_LONGER, 8, 12
    out, lse, weights = flash_attn_varlen_func(q, k, v, *offsets, 0.25, **options, return_attn_probs=True)
    assert weights.shape == (4, 4, 8, 12)
    assert 0 < (weights < 0).sum() < (weights > 0).sum()
    _, whole, _ = flash_attn_varlen_func(q, k, v, *offsets, **options, return_attn_probs=True)
    assert_close(lse, whole, budget(torch.float32, 64))
    for number, ((q0, q1), k0) in enumerate(zip(pairwise(CU.tolist()), CU_LONGER.tolist(), strict=False)):
        begin, end = first[number], last[number]
        own = weights[number, :, : q1 - q0, begin:end]
        assert (own != 0).sum() == (weights[number] != 0).sum()
        assert_close(own.abs().sum(-1), (lse[:, q0:q1] > -torch.inf).float(), budget(torch.float32, 64))
        values = v[k0 + begin : k0 + end].transpose(0, 1).repeat_interleave(2, 0)
        assert_close(out[q0:q1].transpose(0, 1), own.clamp(min=0) @ values / 0.75, budget(torch.float32, 64))


SIGNATURES = {
    "flash_attn_func": "q k v",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
}
DEFAULTS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_of_flash_attn_2_8(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    assert required == SIGNATURES[name].split()
    assert list(defaults.items())[:8] == list(DEFAULTS.items())
    ours = ["leftpad_k", "seqused_k"]  # of the function below flash-attn's, by name
    assert list(defaults)[8:] == (["block_table", *ours] if name == "flash_attn_varlen_func" else [])
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [name for name in ours if name in defaults]


def test_keys_of_a_sequence_that_begin_later_and_end_earlier():
    """As flash-attn's leftpad_k and seqused_k: what is left of the keys is what causal is aligned to."""
    q, k, v = (torch.randn(total, 2, 8, dtype=torch.float64) for total in (12, 30, 30))  # of 10 rows and 26 keys
    cu_q, cu_k = torch.tensor([0, 4, 10]), torch.tensor([0, 13, 26])
    counts = {"leftpad_k": torch.tensor([3, 0]).int(), "seqused_k": torch.tensor([13, 7]).int()}
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 13, causal=True, **counts)
    for (q0, q1), (k0, k1) in (((0, 4), (3, 13)), ((4, 10), (13, 20))):
        alone = flash_attn_func(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], causal=True)
        assert_close(out[q0:q1], alone[0], budget(torch.float64))
    assert (out[10:] == 0).all()


def refused():
    q, k, v = tensors()
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 13, 26])
    return {
        "dropout with pages": (
            lambda: flash_attn_varlen_func(flat[0], k, v, cu, cu, 13, 13, 0.1, block_table=cu),
            UnsupportedProblem,
        ),
        "packed keys with a block_table": (
            lambda: flash_attn_varlen_func(*flat, cu, cu, 13, 13, block_table=cu),
            InvalidInput,
        ),
        "three dimensions": (lambda: flash_attn_func(*flat), InvalidInput),
        "four dimensions": (lambda: flash_attn_varlen_func(q, k, v, cu, cu, 13, 13), InvalidInput),
        "heads": (lambda: flash_attn_func(q[:, :, :3], k, v), InvalidInput),
        "window": (lambda: flash_attn_func(q, k, v, window_size=4), InvalidInput),
        "slopes": (lambda: flash_attn_func(q, k, v, alibi_slopes=alibi(3)), InvalidInput),
        "slopes in a list": (lambda: flash_attn_func(q, k, v, alibi_slopes=[0.5] * 4), InvalidInput),
        "kv": (lambda: flash_attn_kvpacked_func(q, q), InvalidInput),
        "qkv": (lambda: flash_attn_qkvpacked_func(torch.stack((q, q), 2)), InvalidInput),
        "offsets": (lambda: flash_attn_varlen_func(*flat, cu[:1], cu, 13, 13), InvalidInput),
        "offsets that end early": (lambda: flash_attn_varlen_func(*flat, cu - 1, cu, 13, 13), InvalidInput),
        "longest": (lambda: flash_attn_varlen_func(*flat, cu, cu, 12, 13), InvalidInput),
    }


@pytest.mark.parametrize("case", refused())
def test_what_is_refused_says_what_to_do(case):
    call, error = refused()[case]
    with pytest.raises(error, match="What to do"):
        call()
