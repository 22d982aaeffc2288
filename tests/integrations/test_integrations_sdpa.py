"""The SDPA override: everything reaches it, what it does not take is PyTorch's own result, and it leaves no trace."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_early
from torch.utils.checkpoint import checkpoint

import call_changes
import tilewise
from support import assert_close, budget
from tilewise import InvalidInput, TilewiseError, UnsupportedProblem, torch_function
from tilewise.call import memory
from tilewise.hook import dispatcher
from tilewise.integrations.sdpa import FallbackWarning, decision, sdpa
from tilewise.target import assumed

BUDGET = budget(torch.float32, 64)


@pytest.fixture(autouse=True)
def _fresh_report(override_kernel):
    sdpa.clear()
    yield
    assert not is_in_force(), "a test left the override in force"


def is_in_force() -> bool:
    return dispatcher.holders > 0


def outcomes() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in sdpa.report():
        found[entry.outcome] += entry.calls
    sdpa.clear()
    return found


def inputs(*shape: int, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(*(shape or (2, 4, 16, 8))).requires_grad_(grad) for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------------------
# What reaches it


@pytest.mark.parametrize(
    "call",
    [
        F.scaled_dot_product_attention,
        imported_early,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        torch._C._nn.scaled_dot_product_attention,
    ],
)
def test_every_name_of_the_operator_is_caught(call):
    q, k, v = inputs()
    want = call(q, k, v, None, 0.0, True)
    with sdpa(backend="tiled"):
        got = call(q, k, v, None, 0.0, True)
    assert outcomes() == {"taken": 1}
    assert_close(got, want, BUDGET)


def test_multihead_attention_and_the_transformer_encoder():
    x = torch.randn(2, 10, 32)
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    want = attention(x, x, x, need_weights=False)[0], encoder(x)
    with sdpa(backend="tiled"):
        got = attention(x, x, x, need_weights=False)[0], encoder(x)
    assert outcomes() == {"taken": 3}
    assert_close(got[0], want[0], BUDGET)
    assert_close(got[1], want[1], BUDGET)


def test_the_encoders_inference_fast_path_is_not_an_sdpa_call_until_it_is_switched_off():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 10, 32)
    with torch.no_grad(), sdpa(backend="tiled"):
        want = encoder(x)
        assert not outcomes()
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            got = encoder(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    assert outcomes() == {"taken": 2}
    assert_close(got, want, BUDGET)


def test_gradients_of_a_taken_call():
    q, k, v = inputs(grad=True)
    mask = torch.rand(16, 16) < 0.7
    dout = torch.randn(2, 4, 16, 8)
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), (q, k, v), dout)
    with sdpa(backend="tiled"):
        got = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), (q, k, v), dout)
    assert outcomes() == {"taken": 1}
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, BUDGET)


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_graph_holds_our_operator(grad):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    q, k, v = inputs(grad=grad)
    want = attend(q, k, v)
    torch.compiler.reset()
    with sdpa(backend="tiled"):
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    assert set(outcomes()) == {"taken"}
    assert_close(got, want, BUDGET)
    if grad:
        dout = torch.randn_like(want)
        wanted = torch.autograd.grad(want, (q, k, v), dout)
        for one, other in zip(torch.autograd.grad(got, (q, k, v), dout), wanted, strict=True):
            assert_close(one, other, BUDGET)


def test_compiling_outside_a_block_and_inside_one_do_not_decide_for_each_other():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def traced(context) -> str:
        graphs = []
        torch.compiler.reset()
        with context:
            torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=lambda g, _: graphs.append(g) or g))(
                *inputs()
            )
        return graphs[0].code

    for _ in range(2):
        assert "tilewise" not in traced(nullcontext())
        assert "tilewise.attention" in traced(sdpa(backend="tiled"))


def test_compiled_with_dynamic_lengths_one_graph_plans_at_run_time():
    graphs = 0

    def count(graph, example_inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    attend = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), dynamic=True, backend=count)
    torch.compiler.reset()
    with sdpa():
        for length in (5, 9, 14):
            q = torch.randn(1, 2, length, 8)
            assert_close(attend(q), tilewise.attention(q, q, q), BUDGET)
    assert graphs == 1
    assert outcomes()["taken"]


def test_a_condition_on_lengths_specialises_a_dynamic_graph():
    attend = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    torch.compiler.reset()
    short, long = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 50, 8)
    with sdpa(when=lambda problem: problem.seq_q > 10, backend="tiled"):
        assert_close(attend(short), tilewise.attention(short, short, short), BUDGET)
        assert set(outcomes()) == {"left"}
        assert_close(attend(long), tilewise.attention(long, long, long), BUDGET)
        assert set(outcomes()) == {"taken"}


def declared(tensor: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(tensor, 2)
    return tensor


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("when", "example", "outcome"),
    [
        (lambda problem: problem.seq_q > 10, 50, "taken"),
        (lambda problem: problem.seq_q > 10, 5, "left"),
        (lambda problem: False, 50, "left"),
    ],
    ids=["long", "short", "never"],
)
def test_a_condition_decides_for_all_lengths_that_are_declared_to_vary(when, example, outcome, masked):
    """Such a graph must not be made for one length, so the condition is asked about that of the example."""

    def attend(q, mask):
        return F.scaled_dot_product_attention(q, q, q, mask if masked else None)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()
    with sdpa(when=when, backend="tiled"):
        for length in (example, 7, 90):
            q, mask = declared(torch.randn(1, 2, length, 8)), declared(torch.randn(1, 1, length, 1))
            with torch.compiler.set_stance("default" if length == example else "fail_on_recompile"):
                got = compiled(q, mask)
            if length == example:
                assert set(outcomes()) == {outcome}
            assert_close(got, tilewise.attention(q, q, q, mask=mask if masked else None), BUDGET)


def test_lengths_of_which_nothing_is_known_are_planned_when_the_graph_runs():
    attend = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="aot_eager")
    for rule in (sdpa(), sdpa(backend="tiled")):
        torch.compiler.reset()
        with rule:
            for length in (5, 50):
                q = torch.randn(1, 2, length, 8)
                torch._dynamo.decorators.mark_unbacked(q, 2)
                assert_close(attend(q), tilewise.attention(q, q, q), BUDGET)
        assert set(outcomes()) == {"taken"}


# ---------------------------------------------------------------------------------------------------------------------
# What goes to PyTorch


def test_where_pytorchs_choice_is_the_plan_its_kernel_runs_untouched():
    q, k, v = inputs(grad=True)
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        again = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert "FlashAttentionForCpu" in type(out.grad_fn).__name__
    assert torch.equal(out, again)
    (entry,) = sdpa.report()
    assert (entry.outcome, entry.calls) == ("left", 2)
    assert "torch-flash" in entry.because
    assert "2x left" in str(entry)


def test_what_pytorch_serves_badly_is_taken():
    """Three dimensions go to PyTorch's math before 2.14, a fused kernel takes them here."""
    if tilewise.Target.of("cpu").torch >= (2, 14):
        pytest.skip("this PyTorch has a fused kernel for 3-D inputs")
    q, k, v = inputs(4, 16, 8)
    want = F.scaled_dot_product_attention(q, k, v)
    with sdpa():
        got = F.scaled_dot_product_attention(q, k, v)
    (entry,) = sdpa.report()
    assert (entry.outcome, entry.because.split(":")[0]) == ("taken", "torch-flash")
    assert got.shape == want.shape
    assert_close(got, want, BUDGET)


def broadcast_heads():
    q, k, v = inputs()
    return (q, k[:, :1], v[:, :1]), {}


def mask_that_requires_grad():
    return inputs(), {"attn_mask": torch.zeros(16, 16, requires_grad=True)}


def five_dims():
    return inputs(2, 2, 4, 16, 8), {}


def mask_of_another_dtype():
    return inputs(), {"attn_mask": torch.zeros(16, 16, dtype=torch.float64)}


def integer_inputs():
    return [torch.ones(1, 1, 4, 8, dtype=torch.int32)] * 3, {}


def mismatched_heads():
    q, k, v = inputs()
    return (q, k[:, :3], v[:, :3]), {}


FALLBACKS = [broadcast_heads, mask_that_requires_grad, five_dims, mask_of_another_dtype, integer_inputs]


@pytest.mark.parametrize("make", [*FALLBACKS, mismatched_heads])
def test_a_fallback_is_pytorchs_own_answer_with_the_reason_on_record(make):
    arguments, options = make()

    def ask():
        try:
            return F.scaled_dot_product_attention(*arguments, **options)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    want = ask()
    with sdpa():
        got = ask()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    (entry,) = sdpa.report()
    assert entry.outcome == "fallback"
    assert entry.because


def test_on_fallback_warns_at_the_callers_line_or_raises():
    q, k, v = inputs(2, 2, 4, 16, 8)
    with sdpa(on_fallback="warn"), pytest.warns(FallbackWarning, match="5 dimensions") as caught:
        F.scaled_dot_product_attention(q, k, v)
    assert caught[0].filename == __file__
    with sdpa(on_fallback="error"), pytest.raises(UnsupportedProblem, match=r"5 dimensions.*\n.*What to do"):
        F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("on_fallback", ["warn", "error"])
def test_what_is_left_by_plan_or_by_wish_is_no_fallback(on_fallback):
    q, k, v = inputs()
    with sdpa(on_fallback=on_fallback):
        F.scaled_dot_product_attention(q, k, v)
    with sdpa(on_fallback=on_fallback, when=lambda problem: False):
        F.scaled_dot_product_attention(q, k, v)
    with sdpa(on_fallback=on_fallback, backend="tiled"), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert outcomes() == {"left": 3}


def test_a_named_backend_that_refuses_is_a_fallback_with_its_reasons():
    q, k, v = inputs()
    with sdpa(backend="torch-flash", on_fallback="error"), pytest.raises(UnsupportedProblem, match="dropout") as raised:
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert raised.value.problem.dropout == 0.5


def test_when_limits_it_and_sees_the_whole_problem():
    seen = []

    def condition(problem):
        seen.append(problem)
        return problem.needs_grad

    q, k, v = inputs()
    with sdpa(when=condition, backend="tiled"):
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"left": 2}
        F.scaled_dot_product_attention(q, k.requires_grad_(), v)
        assert outcomes() == {"taken": 1}
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"left": 1}
    assert len(seen) == 3, "equal Problems are asked about once"


def test_sdpa_kernel_is_respected_also_when_one_kernel_is_merely_switched_off():
    q, k, v = inputs(4, 16, 8)
    with sdpa(), sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        F.scaled_dot_product_attention(q, k, v)
        assert set(outcomes()) == {"left"}
    with sdpa(backend="tiled"), sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"taken": 1}


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's machinery around it


def test_dropout_does_not_recurse_and_draws_as_pytorch_does():
    q, k, v = inputs()
    torch.manual_seed(3)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    for rule in (sdpa(), sdpa(backend="torch-math")):
        torch.manual_seed(3)
        with rule:
            assert_close(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), want, BUDGET)
        torch.manual_seed(3)
        with rule:
            assert_close(tilewise.attention(q, k, v, dropout=0.3), want, BUDGET)


def test_our_own_namesake_inside_a_block():
    q, k, v = inputs(2, 2, 4, 16, 8)
    want = F.scaled_dot_product_attention(q, k, v)
    with sdpa():
        assert torch.equal(tilewise.scaled_dot_product_attention(q, k, v), want)


def test_autocast_casts_before_we_see_it():
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16), sdpa(backend="tiled"):
        out = F.scaled_dot_product_attention(q, k, v)
    (entry,) = sdpa.report()
    assert out.dtype == torch.bfloat16
    assert entry.problem.startswith("bfloat16")


def test_inference_mode():
    q, k, v = inputs()
    with torch.inference_mode(), sdpa(backend="tiled"):
        out = F.scaled_dot_product_attention(q, k, v)
    assert outcomes() == {"taken": 1}
    assert_close(out, F.scaled_dot_product_attention(q, k, v), BUDGET)


def test_functorch_transforms_stay_right():
    q, k, v = inputs(3, 2, 16, 8)
    loss = lambda q: F.scaled_dot_product_attention(q, k, v).square().sum()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # PyTorch has no batching rule on a CPU
        batched = lambda: torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
        want = torch.func.grad(loss)(q), batched()
        with sdpa(backend="tiled"):
            F.scaled_dot_product_attention(q, k, v)  # "taken", and remembered as such
            got = torch.func.grad(loss)(q), batched()
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, BUDGET)


def test_forward_mode_ad_is_what_it_is_without_us():
    q, k, v = inputs()
    with sdpa(backend="tiled"), sdpa_kernel(SDPBackend.MATH), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        tangent = torch.autograd.forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, k, v)).tangent
    _, want = torch.func.jvp(lambda q: tilewise.attention(q, k, v), (q,), (torch.ones_like(q),))
    assert_close(tangent, want, BUDGET)
    with sdpa(backend="tiled"), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward AD"):  # PyTorch's own refusal, and no lost tangent
            F.scaled_dot_product_attention(dual, k, v)


LENGTHS = (5, 9, 0, 1, 17)


def jagged(heads: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """(sequences, lengths, heads, head_dim), with the lengths of another."""
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0) if like is None else like.offsets()
    values = torch.randn(sum(LENGTHS), heads, 16, dtype=torch.float64)
    return torch.nested.nested_tensor_from_jagged(values, offsets).requires_grad_()


def of_jagged(q, k, v, **arguments):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_nested_tensors_are_packed_sequences(is_causal):
    q = jagged(4)
    k, v = jagged(2, q), jagged(2, q)
    with sdpa(backend="reference", on_fallback="error"):
        out = of_jagged(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.3)
    assert outcomes() == {"taken": 1}
    assert out.shape == q.transpose(1, 2).shape
    rows = out.transpose(1, 2).values()
    weight = torch.randn_like(rows)
    grads = torch.autograd.grad((rows * weight).sum(), (q, k, v))
    tensors = [x.values().detach().requires_grad_() for x in (q, k, v)]
    cu = q.offsets().int()
    want = tilewise.attention_packed(*tensors, cu, cu, mask="causal" if is_causal else None, scale=0.3)
    assert_close(rows, want, budget(torch.float64))
    wanted = torch.autograd.grad((want * weight).sum(), tensors)
    for got, grad in zip(grads, wanted, strict=True):
        assert_close(got.values(), grad, budget(torch.float64))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_nested_tensors_have_the_offsets_of_now():
    offsets, values = torch.tensor([0, 5, 9]), torch.randn(9, 2, 16)
    for first in (5, 2):
        offsets.data[1] = first  # PyTorch counts no change
        q = torch.nested.nested_tensor_from_jagged(values, offsets)
        with sdpa(backend="reference", on_fallback="error"):
            out = of_jagged(q, q, q).transpose(1, 2).values()
        cu = torch.tensor([0, first, 9], dtype=torch.int32)
        assert_close(out, tilewise.attention_packed(values, values, values, cu, cu), budget(torch.float32))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_nested_tensors_that_are_not_taken_are_pytorchs():
    q = k = v = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(5, 2, 16)], layout=torch.jagged)
    want = of_jagged(q, k, v)
    with sdpa():
        assert torch.equal(of_jagged(q, k, v).values(), want.values())
    assert outcomes() == {"left": 1}  # no kernel of ours runs on a CPU
    with sdpa(backend="reference", when=lambda problem: problem.seq_q > 100):
        assert torch.equal(of_jagged(q, k, v).values(), want.values())
    assert outcomes() == {"left": 1}
    with sdpa(backend="reference"), sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(of_jagged(q, k, v).values(), want.values())
    assert outcomes() == {"left": 1}
    other = torch.nested.nested_tensor_from_jagged(torch.randn(8, 2, 16), torch.tensor([0, 1, 8]))
    with (
        sdpa(backend="reference", on_fallback="error"),
        pytest.raises(TilewiseError, match="offsets of their own"),
    ):
        of_jagged(q, other, other, is_causal=True)
    assert outcomes() == {"fallback": 1}


class Labelled(torch.Tensor):
    """A subclass that watches operators at the dispatcher, as DTensor does."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.name())
        unwrap = lambda x: x.inner if isinstance(x, cls) else x
        return func(*map(unwrap, args), **(kwargs or {}))


def test_a_tensor_subclass_keeps_its_own_idea_of_attention():
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        F.scaled_dot_product_attention(Labelled(q), Labelled(k), Labelled(v))
    fallbacks = [entry for entry in sdpa.report() if entry.outcome == "fallback"]
    assert "Labelled" in fallbacks[0].because
    assert any("scaled_dot_product" in name for name in Labelled.seen)


def test_out_lies_in_memory_as_pytorchs_does():
    contiguous = inputs(2, 4, 16, 8)
    transposed = [call_changes.seq_before_heads(tensor) for tensor in contiguous]
    rule = sdpa(backend="tiled")
    for tensors in (contiguous, transposed):
        want = F.scaled_dot_product_attention(*tensors)
        with rule:
            assert F.scaled_dot_product_attention(*tensors).stride() == want.stride()


# ---------------------------------------------------------------------------------------------------------------------
# What is remembered of one call must be right for the next


def test_a_mask_that_starts_to_need_a_gradient_gets_it():
    q, k, v = inputs(4, 16, 8)
    mask = torch.zeros(16, 16, requires_grad=True)
    for rule in (sdpa(), sdpa(backend="tiled")):
        with rule:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, mask)
                assert outcomes()
            (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask).square().sum(), mask)
        assert grad.any()


MASK_SHAPES = [(2, 1, 1, 16), (2, 1, 16, 16), (1, 4, 16, 16), (16, 16), (16,), (4, 1, 16), (2, 4, 16, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_shape_are_taken_and_differentiated(shape, backend):
    """As PyTorch's own composite in float64, whose gradients are right."""
    torch.manual_seed(0)
    q, k, v = inputs(grad=True)
    dout = torch.randn(2, 4, 16, 8)
    visible = torch.rand(shape) < 0.7
    visible[..., :1] = True
    for mask in (visible, torch.randn(shape), torch.randn(shape).requires_grad_()):
        wanted = [q, k, v, *([mask] if mask.requires_grad else [])]
        with sdpa(backend=backend, on_fallback="error"):
            out = F.scaled_dot_product_attention(q, k, v, mask)
        got = [out, *torch.autograd.grad(out, wanted, dout)]
        leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        wide = mask if mask.dtype == torch.bool else mask.detach().double().requires_grad_(mask.requires_grad)
        with sdpa_kernel(SDPBackend.MATH):
            true = F.scaled_dot_product_attention(*leaves, wide)
        leaves += [wide] if mask.requires_grad else []
        truth = [true, *torch.autograd.grad(true, leaves, dout.double())]
        for found, want in zip(got, truth, strict=True):
            assert_close(found, want, 8 * budget(torch.float32, 64))
    assert outcomes() == {"taken": 3}


@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_on_hopper_our_kernel_takes_masks_of_every_shape(monkeypatch, shape, learned):
    monkeypatch.setattr(decision.memory, "made", lambda *_: None)
    q, k, v = (torch.randn(2, 4, 16, 8, dtype=torch.bfloat16) for _ in range(3))
    visible = torch.ones(shape, dtype=torch.bool)
    for mask in (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=learned), *([] if learned else [visible])):
        with assumed(tilewise.Target.named("h200")):
            made = decision._decide(decision.Decider(None, "silent", "auto"), (q, k, v, mask, 0.0, False, None, False))
        assert (made.record.outcome, made.record.because.split(":")[0]) == ("taken", "sm90")
        assert made.problem.operand_grads == (("bias",) if learned else ())
        assert tilewise.explain(q, k, v, mask=mask, target="h200").backend == "sm90"
        if learned:
            assert tilewise.explain(q, k, v, mask=mask, target="a100").backend == "sm80"


def test_a_mask_that_is_expanded_is_read_as_small_as_it_is():
    padding = torch.tensor([[True] * 16, [True] * 9 + [False] * 7])[:, None, None, :]
    wide = padding.expand(2, 4, 16, 16)
    assert torch_function.without_repeats(wide).shape == (2, 1, 1, 16)
    assert torch_function.without_repeats(wide).data_ptr() == padding.data_ptr()
    learned = torch.zeros(1, 1, 1, 16, requires_grad=True).expand(2, 4, 16, 16)
    assert torch_function.without_repeats(learned) is learned
    assert torch_function.without_repeats(padding) is padding
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        got = F.scaled_dot_product_attention(q, k, v, wide)
    (entry,) = sdpa.report()
    assert "dense:bool:2x1x1x16" in entry.problem
    assert_close(got, F.scaled_dot_product_attention(q, k, v, wide), budget(torch.float32, 16))


def test_a_key_that_starts_to_need_a_gradient_gets_it():
    q, k, v = inputs(4, 16, 8)
    with sdpa():
        F.scaled_dot_product_attention(q, k, v)
        (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k.requires_grad_(), v).square().sum(), k)
    assert grad.any()


def test_strides_that_a_named_backend_refuses_after_strides_that_it_takes():
    q, k, v = inputs()
    with sdpa(backend="torch-flash"):
        want = F.scaled_dot_product_attention(q, k, v)
        got = F.scaled_dot_product_attention(q, call_changes.scattered(k), v)
    assert outcomes() == {"taken": 1, "fallback": 1}
    assert_close(got, want, BUDGET)


@pytest.fixture(params=["guards", "signatures"])
def _how_calls_are_recognised(request, monkeypatch):
    """By PyTorch's guards, and as on a release that has none."""
    if request.param == "signatures":
        monkeypatch.setattr(memory, "GUARDS_HOLD", False)
    else:
        assert memory.GUARDS_HOLD, "this release has guards, and they are worth a microsecond"


@pytest.mark.usefixtures("_how_calls_are_recognised")
def test_a_condition_is_asked_about_every_change_and_never_twice():
    seen = []
    q, k, v = inputs()
    calls = call_changes.other_calls(q, k, v)
    changed = [calls[name] for name in (*call_changes.PROBLEMS, *call_changes.OPTIONS)]
    with sdpa(when=seen.append):
        for arguments, options in changed * 2:
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(*arguments, **options)
            F.scaled_dot_product_attention(*arguments, **options)
    assert len(seen) == len(set(seen)) == 1 + len(changed)
    assert outcomes() == {"left": 6 * len(changed)}


@pytest.mark.usefixtures("_how_calls_are_recognised")
@pytest.mark.parametrize("mask", [None, torch.ones(16, 16, dtype=torch.bool)], ids=["plain", "masked"])
def test_a_condition_is_asked_anew_under_deterministic_algorithms(mask):
    seen = []
    q, k, v = inputs()
    with sdpa(when=lambda problem: seen.append(problem.deterministic)):
        for deterministic in (False, True, False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                F.scaled_dot_product_attention(q, k, v, mask)
            finally:
                torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.usefixtures("_how_calls_are_recognised")
def test_calls_that_take_turns_are_each_counted_on_their_own_line():
    q, k, v = inputs()
    short, mask = k[:, :, :5], torch.ones(16, 16, dtype=torch.bool)
    with sdpa():
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, short, short)
            F.scaled_dot_product_attention(q, k, v, mask)
            F.scaled_dot_product_attention(q, k, v[..., :4])
    assert [(entry.outcome, entry.calls) for entry in sdpa.report()] == [("left", 3)] * 4


@pytest.mark.usefixtures("_how_calls_are_recognised")
def test_one_tensor_in_several_roles_is_a_call_like_others():
    q, k, v = inputs()
    with sdpa(when=lambda problem: False):
        for arguments in ((q, q, q), (q, k, v), (q, k, k), (q, q, q)):
            want = torch._C._nn.scaled_dot_product_attention(*arguments)
            assert torch.equal(F.scaled_dot_product_attention(*arguments), want)
    assert [(entry.outcome, entry.calls) for entry in sdpa.report()] == [("left", 8)]


@pytest.mark.usefixtures("_how_calls_are_recognised")
def test_what_is_taken_again_and_again_still_heeds_pytorchs_state():
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        for context in (nullcontext(), nullcontext(), sdpa_kernel(SDPBackend.MATH), nullcontext()):
            with context:
                F.scaled_dot_product_attention(q, k, v)
        with torch.inference_mode():
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotImplementedError, match="forward AD"):
                F.scaled_dot_product_attention(dual, k, v)
    assert outcomes() == {"taken": 5, "left": 1, "fallback": 1}


@pytest.mark.usefixtures("_how_calls_are_recognised")
@pytest.mark.parametrize("masked", [False, True])
def test_a_subclass_is_not_mistaken_for_the_tensor_seen_before(masked):
    q, k, v = inputs()
    mask = torch.zeros(16, 16) if masked else None
    Labelled.seen.clear()
    for rule in (sdpa(), sdpa(when=lambda problem: False)):
        with rule:
            for key in (k, Labelled(k), k, Labelled(k)):
                F.scaled_dot_product_attention(q, key, v, mask)
        assert outcomes()["fallback"] == 2
    assert Labelled.seen


def test_parameters_are_remembered_like_other_tensors():
    seen = []
    q, k, v = map(torch.nn.Parameter, inputs())
    with sdpa(when=seen.append):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
    assert len(seen) == 1
    assert outcomes() == {"left": 3}


# ---------------------------------------------------------------------------------------------------------------------
# Scope


def test_it_is_gone_afterwards_also_after_an_error():
    q, k, v = inputs()
    tag = torch.compiler.config.cache_key_tag
    with sdpa():
        assert is_in_force()
        assert torch.compiler.config.cache_key_tag != tag, "compiled graphs must not be cached under the same name"
    with pytest.raises(ZeroDivisionError), sdpa():
        raise ZeroDivisionError
    assert not is_in_force()
    assert torch.compiler.config.cache_key_tag == tag
    F.scaled_dot_product_attention(q, k, v)
    assert not outcomes()


def test_the_innermost_block_wins_and_the_outer_one_returns():
    q, k, v = inputs()
    outer, inner = sdpa(backend="tiled"), sdpa(when=lambda problem: False)
    with outer:
        with inner:
            assert sdpa.rule is inner
            F.scaled_dot_product_attention(q, k, v)
            with outer:
                F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v)
        assert sdpa.rule is outer
        F.scaled_dot_product_attention(q, k, v)
    assert sdpa.rule is None
    assert outcomes() == {"taken": 2, "left": 2}


def test_enable_is_for_the_process_and_a_block_is_an_exception_to_it():
    q, k, v = inputs()
    sdpa.enable(backend="tiled")
    try:
        in_thread(lambda: F.scaled_dot_product_attention(q, k, v))
        assert outcomes() == {"taken": 1}
        with sdpa(when=lambda problem: False):
            F.scaled_dot_product_attention(q, k, v)
            assert outcomes() == {"left": 1}
    finally:
        sdpa.disable()
    F.scaled_dot_product_attention(q, k, v)
    assert not outcomes()


def in_thread(work):
    """Run work in another thread, and raise here what it raised there."""
    caught = []

    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def test_another_thread_does_not_see_a_block():
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        in_thread(lambda: F.scaled_dot_product_attention(q, k, v))
        assert not outcomes()
        F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"taken": 1}


def test_threads_come_and_go_independently():
    """The dispatcher is shared: the last block to end puts the override out of force, and none before."""
    q, k, v = inputs()
    start = threading.Barrier(8)
    wrong = []

    def work(backend):
        start.wait()
        for _ in range(20):
            with sdpa(backend=backend) as rule:
                if sdpa.rule is not rule or not is_in_force():
                    wrong.append(backend)
                F.scaled_dot_product_attention(q, k, v)

    threads = [threading.Thread(target=work, args=(backend,)) for backend in ("tiled", "reference") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(outcomes()) == {"taken"}


def test_asyncio_tasks_do_not_see_each_others_blocks():
    async def with_block(entered, checked):
        with sdpa(backend="tiled"):
            entered.set()
            await checked.wait()
            return sdpa.rule is not None

    async def without(entered, checked):
        await entered.wait()
        try:
            return sdpa.rule is None
        finally:
            checked.set()

    async def both():
        entered, checked = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(with_block(entered, checked), without(entered, checked))

    assert asyncio.run(both()) == [True, True]


def test_a_checkpoint_recomputes_under_the_rule_of_its_backward():
    q, k, v = inputs(grad=True)
    with sdpa(backend="tiled"):
        checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False).sum().backward()
    assert outcomes() == {"taken": 2}
    assert q.grad is not None


def test_autograds_device_threads_inherit_the_block_in_which_backward_was_called():
    """PyTorch hands its device threads the caller's state; here a thread is given it in the same way."""
    from tilewise.hook.dispatch import _HANDED, _TORCH_HANDS_THE_CONTEXT

    found = []
    erase = getattr(torch._C, "_remove_obj_from_tls", lambda key: torch._C._stash_obj_in_tls(key, None))

    def device_thread(handed):
        torch._C._stash_obj_in_tls(_HANDED, handed)
        found.append(sdpa.rule)
        erase(_HANDED)

    def state():
        return contextvars.copy_context() if _TORCH_HANDS_THE_CONTEXT else torch._C._get_obj_in_tls(_HANDED)

    with sdpa() as rule:
        with sdpa(backend="tiled") as inner:
            handed = [state()]
        handed.append(state())
    for one in handed:
        in_thread(lambda one=one: device_thread(one))
    assert found == [inner, rule]


# ---------------------------------------------------------------------------------------------------------------------
# Bad use, and the record


@pytest.mark.parametrize(
    "arguments", [{"when": True}, {"on_fallback": "shout"}, {"on_fallback": None}, {"backend": "fastest"}]
)
@pytest.mark.parametrize("entry", [sdpa, sdpa.enable], ids=["block", "enable"])
def test_wrong_arguments(entry, arguments):
    with pytest.raises(InvalidInput, match="What to do"):
        entry(**arguments)


def test_enable_twice_and_disable_without_enable():
    with pytest.raises(InvalidInput, match="without enable"):
        sdpa.disable()
    sdpa.enable()
    try:
        with pytest.raises(InvalidInput, match="second call"):
            sdpa.enable()
    finally:
        sdpa.disable()
    with pytest.raises(InvalidInput, match="without enable"):
        sdpa.disable()


def test_a_block_must_end_where_it_began():
    outer, inner = sdpa(), sdpa()
    with outer, inner:
        with pytest.raises(InvalidInput, match="reverse order"):
            outer.__exit__(None, None, None)
        with pytest.raises(InvalidInput, match="reverse order"):
            in_thread(lambda: inner.__exit__(None, None, None))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))])
def test_a_copy_of_a_rule_has_its_setting(copied):
    """As one that a module holds is copied with it, also while it is in force."""
    module = torch.nn.Linear(2, 2)
    module.rule = sdpa(when=repr, on_fallback="warn", backend="tiled")
    with module.rule:
        rule = copied(module.rule)
        assert copy.deepcopy(module).rule.backend == "tiled"
    assert (rule.when, rule.on_fallback, rule.backend) == (repr, "warn", "tiled")
    q, k, v = inputs()
    with rule:
        F.scaled_dot_product_attention(q, k, v)
    assert outcomes() == {"taken": 1}
    assert copied(sdpa) is sdpa


def test_a_rule_decorates_a_function():
    """Around each of its calls, nested ones too, and whatever they raise."""

    @sdpa(backend="tiled")
    def attend(*given, again=0):
        """What it does."""
        return attend(*given, again=again - 1) if again else F.scaled_dot_product_attention(*given)

    assert (attend.__name__, attend.__doc__) == ("attend", "What it does.")
    q, k, v = inputs()
    want = F.scaled_dot_product_attention(q, k, v)
    assert_close(attend(q, k, v, again=2), want, BUDGET)
    assert outcomes() == {"taken": 1}
    with pytest.raises(RuntimeError):
        attend(q, k[..., :3], v)
    assert not is_in_force()


def test_a_rule_decorates_nothing_whose_body_runs_later():
    async def coroutine():
        pass

    def generator():
        yield

    async def both():
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(InvalidInput, match=rf"(?s){function.__name__}.*inside it"):
            sdpa()(function)
    with pytest.raises(InvalidInput, match="a function to decorate"):
        sdpa()(3)


def test_the_record_is_bounded():
    q = torch.randn(1, 1, 300, 8)
    with sdpa():
        for length in range(1, 300):
            F.scaled_dot_product_attention(q[:, :, :length], q, q)
    assert 200 < len(sdpa.report()) <= 256
