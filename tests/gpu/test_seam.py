"""The whole path on a GPU: plan, operator, autograd, torch.compile, CUDA graphs, streams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tilewise
from support import assert_close, budget, exact, make_bias, make_inputs, make_problem
from tilewise import Causal, Dense, Documents, Problem, Target, Window

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PROBLEMS = {
    "full": make_problem((2, 4, 200, 64), BF16),
    "causal": make_problem((2, 4, 256, 128), FP16, mask=Causal()),
    "grouped": make_problem((2, 8, 130, 64), BF16, heads_kv=2, mask=Causal("bottom-right"), seq_kv=190),
    "window": make_problem((1, 4, 300, 64), BF16, mask=Window(50, 3)),
    "documents": make_problem((1, 4, 128, 64), BF16, mask=Documents((0, 40, 128), inner=Causal())),
    "boolean": make_problem((2, 4, 128, 64), BF16, mask=Dense((2, 1, 128, 128))),
    "softcap": make_problem((1, 4, 200, 64), BF16, softcap=5.0, mask=Causal()),
    "float32": make_problem((1, 4, 128, 64), FP32, mask=Causal()),
    "narrow values": make_problem((1, 4, 128, 192), BF16, head_dim_v=128, mask=Causal()),
    "bshd": make_problem((2, 4, 128, 64), BF16, layout="bshd"),
    "decode": make_problem((4, 8, 1, 128), BF16, heads_kv=2, seq_kv=500),
}


def call(problem: Problem, q, k, v, bias, **extra):
    mask = problem.mask if bias is None else bias
    if problem.layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = tilewise.attention(q, k, v, mask=mask, softcap=problem.softcap, layout=problem.layout, **extra)
    return out.transpose(1, 2) if problem.layout == "bshd" else out


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_attention_matches_float64(name, grad):
    problem = PROBLEMS[name]
    q, k, v = make_inputs(problem, "cuda", grad=grad)
    bias = make_bias(problem, "cuda")
    out = call(problem, q, k, v, bias)
    if not grad:
        want, _ = exact(q, k, v, problem, bias)
        assert_close(out, want, budget(problem.dtype, problem.seq_kv))
        return
    dout = torch.randn_like(out)
    want, _, *want_grads = exact(q, k, v, problem, bias, dout)
    assert_close(out, want, budget(problem.dtype, problem.seq_kv))
    for got, wanted, what in zip(
        torch.autograd.grad(out, (q, k, v), dout), want_grads, ("dq", "dk", "dv"), strict=True
    ):
        assert_close(got, wanted, 4 * budget(problem.dtype, problem.seq_kv), what)


def test_lse_with_and_without_grad():
    problem = PROBLEMS["causal"]
    for grad in (False, True):
        q, k, v = make_inputs(problem, "cuda", grad=grad)
        out, lse = tilewise.attention(q, k, v, mask=problem.mask, return_lse=True)
        want_out, want_lse = exact(q, k, v, problem)
        assert_close(out, want_out, budget(FP16))
        assert_close(lse, want_lse, budget(FP16), "lse")
        if grad:
            (lse.sum() + out.float().sum()).backward()
            assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def test_dropout_runs():
    q, k, v = make_inputs(PROBLEMS["full"], "cuda", grad=True)
    out = tilewise.attention(q, k, v, dropout=0.2)
    out.float().sum().backward()
    assert not torch.equal(out, tilewise.attention(q, k, v, dropout=0.2))


@pytest.mark.parametrize("name", ["full", "grouped", "softcap"])
def test_compile_fullgraph(name):
    torch._dynamo.reset()
    problem = PROBLEMS[name]
    q, k, v = make_inputs(problem, "cuda", grad=True)

    def step(q, k, v):
        return call(problem, q * 1, k, v, None).float().square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 4 * budget(problem.dtype), "gradient")


@pytest.mark.parametrize("name", ["full", "causal", "decode"])
def test_cuda_graph_capture_and_replay(name):
    problem = PROBLEMS[name]
    q, k, v = make_inputs(problem, "cuda")
    eager = call(problem, q, k, v, None)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(problem, q, k, v, None)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, eager)
    fresh = torch.randn_like(q)
    q.copy_(fresh)
    graph.replay()
    assert torch.equal(out, call(problem, fresh, k, v, None))


def test_the_current_stream_is_used():
    problem = PROBLEMS["causal"]
    q, k, v = make_inputs(problem, "cuda")
    want = call(problem, q, k, v, None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = q * 1
        got = call(problem, late, k, v, None)
    side.synchronize()
    assert torch.equal(got, want)


def test_torch_signature_on_a_gpu():
    q, k, v = make_inputs(PROBLEMS["full"], "cuda")
    for causal in (False, True):
        got = tilewise.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=causal), budget(BF16))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wide = [tensor.float() for tensor in (q, k, v)]
        assert tilewise.scaled_dot_product_attention(*wide).dtype == BF16


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_what_explain_says_is_what_runs():
    """The kernels in a profile are those of the backend the plan names."""
    marks = {"torch-cudnn": "cudnn", "torch-flash": "flash", "torch-efficient": "fmha"}
    for name in ("full", "float32", "boolean"):
        problem = PROBLEMS[name]
        q, k, v = make_inputs(problem, "cuda")
        bias = make_bias(problem, "cuda")
        plan = tilewise.explain(q, k, v, mask=problem.mask if bias is None else bias)
        assert plan.target == Target.of("cuda")
        call(problem, q, k, v, bias)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(problem, q, k, v, bias)
            torch.cuda.synchronize()
        kernels = [event.name.lower() for event in profile.events()]
        ours = "float32_" if problem.dtype is torch.float32 else "forward_"
        if plan.backend in (*marks, "sm90"):
            assert any(marks.get(plan.backend, ours) in kernel for kernel in kernels), (plan.backend, kernels)
