"""The ways into existing programs, on a GPU: SDPA override, flash-attn's functions, PyTorch's machinery, examples."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_suite
import tilewise
import torch_suite
from flash_attn_suite import Case
from support import assert_close, budget, make_problem
from tilewise import Causal
from tilewise.integrations.sdpa import sdpa

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS_SCRIPT = runpy.run_path(str(EXAMPLES.parent / "benchmarks" / "models.py"), run_name="benchmarks_models")
MODELS = MODELS_SCRIPT["MODELS"]


@pytest.fixture(autouse=True)
def _fresh_report(override_kernel):
    sdpa.clear()


def outcomes() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in sdpa.report():
        found[entry.outcome] += entry.calls
    sdpa.clear()
    return found


def tensors(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------------------
# The SDPA override


def test_it_takes_leaves_and_differentiates():
    q, k, v = tensors(2, 4, 128, 64, dtype=FP16, grad=True)
    dout = torch.randn_like(q)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = torch.autograd.grad(want, (q, k, v), dout)
    for rule in (sdpa(), sdpa(when=lambda problem: False), sdpa(backend="tiled")):
        with rule:
            got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grads = torch.autograd.grad(got, (q, k, v), dout)
        assert_close(got, want, 2 * budget(FP16, 128))
        for one, other in zip(grads, wanted, strict=True):
            assert_close(one, other, 2 * budget(FP16, 128))
    assert outcomes()["taken"] >= 1


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_taken_is_what_the_plan_names(causal):
    q, k, v = tensors(2, 8, 256, 64)
    plan = tilewise.explain(q, k, v, mask="causal" if causal else None)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa():
        got = [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for _ in range(3)]
    (entry,) = sdpa.report()
    assert entry.calls == 3
    assert plan.backend in entry.because
    if plan.backend == "sm90":
        assert entry.outcome == "taken"
    for out in got:
        assert_close(out, want, budget(BF16, 256))


MASKS = [(2, 1, 1, 200), (2, 1, 160, 200), (1, 4, 160, 200), (160, 200), (200,), (4, 160, 1)]


@pytest.mark.parametrize("kind", ["boolean", "additive", "learned", "expanded"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_every_shape_and_their_gradients(shape, kind):
    """Against PyTorch's composite in float64; by our kernel where there is one for the GPU."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 160, 64, device="cuda", dtype=BF16, requires_grad=True)
    k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(2))
    dout = torch.randn_like(q)
    visible = torch.rand(shape, device="cuda") < 0.7
    visible[..., :1] = True
    mask = visible if kind in ("boolean", "expanded") else torch.randn(shape, device="cuda", dtype=BF16)
    if kind == "expanded":
        mask = mask.expand(2, 4, 160, 200)
    mask.requires_grad_(kind == "learned")
    learned = [mask] if kind == "learned" else []
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, v, mask)
        got = [out, *torch.autograd.grad(out, [q, k, v, *learned], dout)]
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, *learned)]
    exact = [wide[3] if learned else mask if mask.dtype == torch.bool else mask.double()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        true = F.scaled_dot_product_attention(*wide[:3], *exact)
    for found, want in zip(got, [true, *torch.autograd.grad(true, wide, dout.double())], strict=True):
        assert_close(found, want, 4 * budget(BF16, 200))
    if torch.cuda.get_device_capability()[0] == 9:
        (entry,) = sdpa.report()
        assert (entry.outcome, entry.because.split(":")[0]) == ("taken", "sm90")


def test_a_checkpoint_recomputes_in_autograds_thread_under_the_same_rule():
    q, k, v = tensors(1, 2, 64, 64, dtype=torch.float32, grad=True)
    with sdpa(backend="tiled"):
        checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False).sum().backward()
    assert outcomes() == {"taken": 2}
    assert q.grad is not None


def test_a_growing_cache_is_planned_length_by_length():
    """Decoding: one query, a key more every time, all views of one cache."""
    cache = torch.randn(2, 2, 4, 160, 64, device="cuda", dtype=BF16)
    q = torch.randn(2, 8, 1, 64, device="cuda", dtype=BF16)
    rule = sdpa()
    for length in range(100, 160, 7):
        k, v = cache[:, :, :, :length]
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        with rule:
            assert_close(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), want, budget(BF16, length))


# ---------------------------------------------------------------------------------------------------------------------
# flash-attn's functions, at the sizes of its own tests

LENGTHS = [(113, 203), (128, 217), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (1, 239), (799, 3)]
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("case", flash_attn_suite.draw_cases(36, LENGTHS, DIMS, seed=0), ids=str)
def test_output_and_gradients(case):
    flash_attn_suite.check_output_and_gradients(case, "cuda")


@pytest.mark.parametrize("case", flash_attn_suite.draw_cases(16, LENGTHS, DIMS[:8], seed=1), ids=str)
def test_varlen_output_and_gradients(case):
    flash_attn_suite.check_varlen(case, "cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(113, 203), (512, 256), (1024, 1024)], ids=str)
def test_lse(lengths, causal):
    flash_attn_suite.check_lse(Case(*lengths, 64, BF16, "gqa", causal=causal), "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_inputs_do_not_overflow(head_dim):
    case = Case(200, 200, head_dim, FP16, causal=True)
    flash_attn_suite.check_output_and_gradients(case, "cuda", scale=4.0, factors=(2, 5))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("lengths", [(3, 799), (256, 512), (1023, 1024)], ids=str)
def test_deterministic(lengths, local):
    case = Case(*lengths, 64, FP16, "gqa", causal=True, local=local, deterministic=True)
    flash_attn_suite.check_deterministic(case, "cuda", repeats=20)


@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_has_no_race(causal):
    case = Case(257, 384, 128, BF16, causal=causal)
    q, k, v = (tensor.detach() for tensor in flash_attn_suite.make(case, "cuda"))
    first = flash_attn_suite.call(case, q, k, v, None)
    assert all(torch.equal(flash_attn_suite.call(case, q, k, v, None), first) for _ in range(100))


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_a_strided_dout(causal):
    flash_attn_suite.check_gradient_of_a_strided_dout(Case(200, 200, 64, FP16, causal=causal), "cuda")


@pytest.mark.parametrize("causal", [False, True])
def test_keys_shorter_than_a_tile(causal):
    flash_attn_suite.check_keys_shorter_than_a_tile("cuda", FP16, 64, causal)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"local": True}], ids=str)
def test_dropout(options):
    flash_attn_suite.check_dropout(Case(200, 128, 128, FP16, **options), "cuda")


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's machinery

ways = pytest.mark.parametrize("name", ["attention", "override"])


@ways
def test_fullgraph(name):
    torch_suite.check_fullgraph(torch_suite.WAYS[name], "cuda", backend="aot_eager")


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice to models whose float32 is none
def test_through_inductor():
    torch_suite.check_fullgraph(torch_suite.WAYS["override"], "cuda", backend="inductor")


@pytest.mark.parametrize("grad", [False, True])
@ways
def test_lengths_may_change(name, grad):
    torch_suite.check_lengths_may_change(torch_suite.WAYS[name], "cuda", grad=grad)


# Inductor first captures a graph with nothing in it, which keeps its memory pool alive, and expects this warning.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@ways
def test_cuda_graphs_by_reduce_overhead(name):
    torch_suite.check_reduce_overhead(torch_suite.WAYS[name], "cuda")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load, over its own bytes
@ways
def test_export(name):
    torch_suite.check_export(torch_suite.WAYS[name], "cuda")


@pytest.mark.parametrize("reentrant", [False, True])
@ways
def test_checkpointing(name, reentrant):
    torch_suite.check_checkpointing(torch_suite.WAYS[name], "cuda", reentrant=reentrant)


@ways
def test_gradient_accumulation(name):
    torch_suite.check_accumulation(torch_suite.WAYS[name], "cuda")


@pytest.mark.parametrize("name", ["namesake", "override", "override, tiled"])
def test_autocast(name):
    torch_suite.check_autocast(torch_suite.WAYS[name], "cuda")


def test_data_parallel():
    torch_suite.check_data_parallel("override", "cuda")


def test_flops_are_those_of_the_visible_pairs():
    q, k, v = tensors(2, 4, 128, 64, grad=True)
    problem = make_problem((2, 4, 128, 64), BF16, mask=Causal())
    with FlopCounterMode(display=False) as counter:
        tilewise.attention(q, k, v, mask="causal").sum().backward()
    assert counter.get_total_flops() == problem.flops() + problem.flops(backward=True)


def test_batched_gradients():
    """is_grads_batched runs our backward under vmap, which no kernel may see."""
    q, k, v = tensors(1, 2, 64, 64, grad=True)
    out = tilewise.attention(q, k, v, mask="causal")
    dout = torch.randn(3, *out.shape, device="cuda", dtype=BF16)
    got = torch.autograd.grad(out, (q, k, v), dout, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(out, (q, k, v), one, retain_graph=True) for one in dout]
    for one, others in zip(got, zip(*singly, strict=True), strict=True):
        assert_close(one, torch.stack(others), budget(BF16, 64), "gradient")


# ---------------------------------------------------------------------------------------------------------------------
# The examples


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("llama.py", ["--steps", "6", "--how", "sdpa", "override", "direct"], "same tokens"),
        ("train_gpt.py", ["--steps", "6"], "sm90"),
        ("sdpa_overhead.py", ["--rounds", "1", "--calls", "40"], "causal, scale"),
        ("../benchmarks/host.py", ["--rounds", "2"], "tilewise.attention, in Python"),
    ],
)
def test_example(name, arguments, says, capsys):
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXAMPLES / name))["main"](["--device", "cuda", *arguments])
    finally:
        torch.set_num_threads(threads)
    assert says in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Transformers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MODELS))
def test_a_padded_model_is_no_further_from_float32_than_eager(name):
    pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    runner = MODELS_SCRIPT["Runner"](name, tiny=True, device="cuda", peers=("eager",))
    runner.verify()
    assert set(runner.errors) == {"eager", "tilewise"}, runner.wrong
    assert runner.wrong == {}


def test_the_host_does_not_wait_for_padding_behind_padding():
    pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    from tilewise.integrations import transformers as ours

    ours.register()
    ours._answers.clear()
    whole = torch.ones(2, 9, dtype=torch.bool, device="cuda")
    padded = whole.clone()
    padded[1, :4] = False

    def mask(padding):
        return ours.attention_mask(2, 9, 9, attention_mask=padding, device="cuda")

    assert mask(padded).keep is not None, "waited for: nothing is known yet"
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # cycles: half a second
    found = [mask(padded)]
    assert not torch.cuda.current_stream().query(), "the host has waited"
    torch.cuda.synchronize()
    found.append(mask(whole))
    want = torch.ones(9, 9, dtype=torch.bool, device="cuda").tril()
    for one, padding in zip(found, (padded, whole), strict=True):
        assert torch.equal(one.dense(), (want & padding[:, None, None, :]))
    assert mask(whole) is None, "what hides nothing is left out again"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mask(padded).dense()
    graph.replay()
    assert torch.equal(captured, found[0].dense())
