"""torch.compile, export, AOTInductor and what training is made of (torch_suite), on the CPU; and flop counting."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import tilewise
import torch_own
import torch_suite as suite
from support import assert_close, budget
from tilewise import Causal, Problem, Window
from tilewise.call import memory
from tilewise.call.request import BHSD, Lowered, Options, Request
from tilewise.integrations.sdpa import sdpa
from tilewise.memo import invalidate
from tilewise.torch_kernels import candidates
from tilewise.torch_seam import autograd, switches

ways = pytest.mark.parametrize("way", suite.WAYS.values(), ids=list(suite.WAYS))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")


@ways
def test_fullgraph(way):
    suite.check_fullgraph(way, "cpu", backend="aot_eager")


@pytest.mark.parametrize("grad", [False, True])
@ways
def test_lengths_may_change(way, grad):
    suite.check_lengths_may_change(way, "cpu", grad=grad)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load, over its own bytes
@ways
def test_export(way):
    suite.check_export(way, "cpu")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["attention", "override"])
def test_through_inductor(name):
    suite.check_fullgraph(suite.WAYS[name], "cpu", backend="inductor")


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["attention", "override"])
def test_aot_inductor(name):
    suite.check_aot_inductor(suite.WAYS[name], "cpu")


@pytest.mark.parametrize("reentrant", [False, True])
@ways
def test_checkpointing(way, reentrant):
    suite.check_checkpointing(way, "cpu", reentrant=reentrant)


@ways
def test_gradient_accumulation(way):
    suite.check_accumulation(way, "cpu")


@ways
def test_autocast(way):
    if way is suite.WAYS["attention"]:
        pytest.skip("tilewise.attention casts nothing: it takes what it is given")
    suite.check_autocast(way, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "override, tiled"])
def test_data_parallel(name):
    suite.check_data_parallel(name, "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# What a repeated call is spared must not be missed


def tensors(*shape: int, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape or (1, 2, 8, 16)).requires_grad_(grad) for _ in range(3)]


def test_a_repeated_call_is_recalled(monkeypatch):
    q, k, v = tensors()
    want = tilewise.attention(q, k, v, mask=Causal())
    monkeypatch.setattr(memory, "build", lambda *_: pytest.fail("built twice"))
    assert torch.equal(tilewise.attention(q.clone(), k.clone(), v.clone(), mask=Causal()), want)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_recalled_call_gives_what_the_first_gave(layout, return_lse, grad):
    q, k, v = tensors(grad=grad)
    options = {"mask": Window(3, 0), "layout": layout, "return_lse": return_lse, "backend": "tiled"}
    first, again = (tilewise.attention(q, k, v, **options) for _ in range(2))
    pairs = list(zip(first, again, strict=True)) if return_lse else [(first, again)]
    for one, other in pairs:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad == grad
    if grad:
        wanted, got = (torch.autograd.grad(one.square().sum(), (q, k, v)) for one in pairs[0])
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_recall_tells_calls_apart():
    """After a call is remembered, each of these is another one."""
    q, k, v = tensors()
    invalidate()

    def recalled(q, k, v, **options):
        return memory.find(Request(BHSD, q, k, v, {}, {}, Options(**options)))

    tilewise.attention(q, k, v)
    assert recalled(q, k, v) is not None
    storage = torch.randn(1 * 2 * 8 * 16 + 1)
    others = [
        (q.double(), k, v),
        (q, k[:, :, :4], v[:, :, :4]),
        (q.transpose(2, 3).contiguous().transpose(2, 3), k, v),
        (storage[1:].view(1, 2, 8, 16), k, v),  # the same strides at an address that is no multiple of 16
        (q.clone().requires_grad_(), k, v),
        (q.to("meta"), k, v),
        (torch.nn.Parameter(q), k, v),
    ]
    assert all(recalled(*tensors) is None for tensors in others)
    assert recalled(q, k, v, mask="causal") is None
    assert recalled(q, k, v, precision="tf32") is None
    assert recalled(q, k, v, mask=[]) is None
    assert recalled(None, k, v) is None
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert recalled(q, k, v) is None
    with torch.autograd.forward_ad.dual_level():
        assert recalled(q, k, v) is None
    seen = []
    torch.func.vmap(lambda x: (seen.append(recalled(q, k, v)), x)[1])(torch.zeros(2))
    assert seen == [None]


def test_memory_of_others_may_begin_anywhere():
    """At no multiple of 16 bytes, and no offset in the storage tells: kernels that need one must not be chosen."""
    memory = bytearray(2048)
    found = set()
    for offset in range(0, 16, 4):
        tensor = torch.frombuffer(memory, dtype=torch.float32, offset=offset, count=256).view(1, 2, 8, 16)
        assert tensor.storage_offset() == 0
        strides = tilewise.explain(tensor, tensor, tensor).problem.strides.value
        assert strides == ("unaligned" if tensor.data_ptr() % 16 else "aligned")
        assert autograd.prepare(tensor, tensor, tensor, {}, Lowered(), None).problem.strides.value == strides
        found.add(strides)
    assert found == {"aligned", "unaligned"}


def test_batched_gradients():
    """is_grads_batched runs our backward under vmap, which no kernel may see."""
    q, k, v = tensors(grad=True)
    dout = torch.randn(3, 1, 2, 8, 16)
    for backend in ("tiled", "torch-flash"):
        out = tilewise.attention(q, k, v, mask="causal", backend=backend)
        got = torch.autograd.grad(out, (q, k, v), dout, is_grads_batched=True, retain_graph=True)
        singly = [torch.autograd.grad(out, (q, k, v), one, retain_graph=True) for one in dout]
        for one, others in zip(got, zip(*singly, strict=True), strict=True):
            assert_close(one, torch.stack(others), budget(torch.float32, 64), "gradient")


def switch() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("warn_only_by_the_user", [False, True])
def test_what_was_planned_deterministic_stays_so_in_the_backward(monkeypatch, warn_only_by_the_user):
    """PyTorch's fused kernels are deterministic under the strict switch alone: with warn_only they only say so."""
    q, k, v = tensors(grad=True)
    seen = []
    backward = candidates.Candidate.backward

    def watched(*arguments):
        seen.append(switch())
        return backward(*arguments)

    monkeypatch.setattr(candidates.Candidate, "backward", watched)
    torch.use_deterministic_algorithms(warn_only_by_the_user, warn_only=warn_only_by_the_user)
    try:
        with switches.deterministic_algorithms():
            assert switch() == (True, True)
            out = tilewise.attention(q, k, v, backend="torch-flash")
        out.sum().backward()
        assert switch() == (warn_only_by_the_user,) * 2
    finally:
        torch.use_deterministic_algorithms(False)
    tilewise.attention(q, k, v, backend="torch-flash").sum().backward()
    assert seen == [(True, False), (False, False)]


def test_the_switch_is_put_back_by_the_last_who_holds_it():
    """Backward passes on several GPUs overlap in any order, each in a thread of its own."""
    mine, its_turn = switches.determinism.held(strict=False), threading.Event()
    seen = []

    def other():
        with switches.determinism.held(strict=True):
            entered.set()
            its_turn.wait(600)
            seen.append(switch())

    entered, thread = threading.Event(), threading.Thread(target=other)
    with mine:
        thread.start()
        entered.wait(600)
        seen.append(switch())
    its_turn.set()
    thread.join()
    assert seen == [(True, False), (True, False)]
    assert switch() == (False, False)


# ---------------------------------------------------------------------------------------------------------------------
# FlopCounterMode


def flops(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("mask", [None, Causal(), Window(3, 0)])
def test_flops_are_those_of_the_visible_pairs(mask):
    q, k, v = tensors(grad=True)
    problem = Problem(1, 2, 2, 8, 8, 16, 16, torch.float32, mask or tilewise.Full())
    assert flops(lambda: tilewise.attention(q, k, v, mask=mask)) == problem.flops()
    with torch.inference_mode():
        assert flops(lambda: tilewise.attention(q, k, v, mask=mask)) == problem.flops()
    step = lambda: tilewise.attention(q, k, v, mask=mask).sum().backward()
    assert flops(step) == problem.flops() + problem.flops(backward=True)


def test_flops_without_a_mask_are_pytorchs():
    q, k, v = tensors()
    math = lambda: F.scaled_dot_product_attention(q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = flops(math)
    with sdpa(backend="tiled"):
        assert flops(math) == want
    assert flops(lambda: tilewise.attention(q, k, v)) == want
    visible = torch.rand(8, 8) < 0.5
    assert flops(lambda: tilewise.attention(q, k, v, mask=visible)) == want


@ways
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which Dynamo asks of what it is given
def test_a_frame_that_is_not_compiled_as_a_whole_does_not_have_us_compiled(way):
    """Dynamo runs such a frame, and compiles what is called in there: not the Python that PyTorch's C++ calls."""
    weight = torch.randn(16, 16, requires_grad=True)

    def model(x):
        for _ in range(3):
            x = way.attend(x @ weight, x, x)
            torch._dynamo.graph_break()
        return x

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(1, 2, 8, 16)
    with way.block():
        invalidate()
        got = torch.compile(model, backend="eager")(x)
        got.sum().backward()
    assert torch._dynamo.utils.counters["frames"]["total"] <= 4  # the model, what follows a break, and way.attend
    assert_close(got, model(x), 8 * budget(torch.float32, 64))


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_encoder_that_breaks_its_graph_does_not_have_us_compiled(backend):
    """Its layers run outside of a graph, since it asks what its mask holds: whether that is the causal one."""
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    x, masks = torch.randn(3, 24, 32), {"mask": torch.ones(24, 24, dtype=torch.bool).triu(1)}
    masks["src_key_padding_mask"] = torch.arange(24) >= torch.tensor([24, 13, 5])[:, None]
    want = encoder(x, **masks)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with sdpa(backend=backend):
        invalidate()
        got = torch.compile(encoder, backend="eager")(x, **masks)
        got.sum().backward()
    assert torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["frames"]["total"] == 1
    assert_close(got, want, 8 * budget(torch.float32, 64))


OWN = """
import unittest
import torch
import torch.nn.functional as F
from tilewise import sdpa

class Tests(unittest.TestCase):
    def test_values(self):
        q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        want = torch.softmax(q @ k.mT / 4, -1) @ v
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want)

    def test_of_the_plain_way(self):
        assert sdpa.enabled is None and F.scaled_dot_product_attention.__module__ != "tilewise.torch_function"

    def test_of_tiles(self):
        assert sdpa.enabled is not None and sdpa.enabled.backend == "tiled"

    def test_of_the_function(self):
        assert F.scaled_dot_product_attention.__module__ == "tilewise.torch_function"

    @unittest.skip("by itself")
    def test_skipped(self):
        pass
"""


@pytest.mark.slow
def test_pytorchs_own_files_run_in_every_way(tmp_path):
    """Of a file like theirs, whose tests pass in one way each."""
    path = tmp_path / "test_own.py"
    path.write_text(OWN)
    found = {way: torch_own.run(way, path, "") for way in (torch_own.PLAIN, "tiled", "direct")}
    passing = {way: {name.split("::")[-1] for name in tests if tests[name] == "passed"} for way, tests in found.items()}
    assert passing == {
        "plain": {"test_values", "test_of_the_plain_way"},
        "tiled": {"test_values", "test_of_tiles"},
        "direct": {"test_values", "test_of_the_function"},
    }
    assert torch_own.counts(found["tiled"]) == "2 passed, 2 failed, 1 skipped"
    assert [name.split("::")[-1] for name in torch_own.lost(found["plain"], found["direct"])] == [
        "test_of_the_plain_way"
    ]
