"""Native code on a GPU: the bits of the way in Python, and CUDA's streams, graphs, threads and memory."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import tilewise
from support import assert_close, budget
from tilewise import memo, native
from tilewise.call.request import BHSD, SLOTS, Options
from tilewise.integrations.sdpa import sdpa
from tilewise.jit import build_all
from tilewise.native import in_python, library
from tilewise.torch_seam import switches

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _built_ahead():
    """The kernels of all cases, and the extension, side by side: one after another they would take minutes."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv(library.SETTING, "on")
        extension = pool.submit(library.build)
        units = {}
        for make, arguments in CASES.values():
            for grad, deterministic in ((False, False), (True, False), (True, True)):
                tensors = [x.requires_grad_(grad) for x in make()]
                with switches.deterministic_algorithms() if deterministic else contextlib.nullcontext():
                    plan = tilewise.explain(*tensors, **arguments)
                units |= dict.fromkeys(plan.units)
                if plan.backward is not None and deterministic:
                    for wants in ({"q"}, {"k", "v"}, {"v"}):
                        units |= dict.fromkeys(plan.backward_for(frozenset(wants)).units)
        failed = [built for _, built in build_all(units) if isinstance(built, tilewise.CompileError)]
        assert not failed
        extension.result()


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    """Native code answers what it can; a test may ask for the way in Python by `in_python`."""
    monkeypatch.setenv(library.SETTING, "on")
    library.build()
    memo.invalidate()
    native.use(None)
    monkeypatch.setattr(native, "_next_look", 0.0)
    assert native.ready() is not None, "the extension was built, and does not load or finds no driver"
    yield native.calls
    memo.invalidate()
    native.use(None)


def counted(counts=None):
    """Forwards, backwards and backwards in Python, since `counts`."""
    now = native.calls.counts()[1:]
    return now if counts is None else tuple(one - other for one, other in zip(now, counts, strict=True))


def packed(shape, dtype):
    """q, k and v as parts of one tensor (batch, seq, 3, heads, dim)."""
    batch, heads, seq, dim = shape
    return [x.transpose(1, 2) for x in torch.randn(batch, seq, 3, heads, dim, device="cuda").to(dtype).unbind(2)]


def drawn(shape, dtype, heads_kv=None, seq_kv=None):
    batch, heads, seq, dim = shape
    sizes = [(heads, seq), (heads_kv or heads, seq_kv or seq), (heads_kv or heads, seq_kv or seq)]
    return [torch.randn(batch, *size, dim, device="cuda").to(dtype) for size in sizes]


def shifted(shape, dtype, by):
    """Tensors that begin so many numbers behind a multiple of 16 bytes."""
    return [torch.randn(x.numel() + by, device="cuda").to(dtype)[by:].view(x.shape) for x in drawn(shape, dtype)]


CASES = {
    "full": (lambda: drawn((2, 4, 200, 64), BF16), {}),
    "causal half": (lambda: drawn((1, 4, 256, 128), FP16), {"mask": "causal"}),
    "grouped": (lambda: drawn((2, 8, 130, 64), BF16, 2, 190), {"mask": tilewise.Causal("bottom-right")}),
    "bshd": (lambda: [x.transpose(1, 2) for x in drawn((2, 128, 4, 64), BF16)], {"return_lse": True}),
    "layout": (lambda: drawn((2, 128, 4, 64), BF16), {"layout": "bshd", "return_lse": True}),
    "packed": (lambda: packed((2, 4, 192, 64), BF16), {"mask": "causal"}),
    "window": (lambda: drawn((1, 4, 300, 64), BF16), {"mask": tilewise.Window(50, 3)}),
    "documents": (
        lambda: drawn((2, 4, 700, 64), BF16, 2),
        {"mask": tilewise.Documents((0, 200, 700), inner=tilewise.Causal())},
    ),
    "softcap": (lambda: drawn((1, 4, 200, 64), BF16), {"softcap": 5.0, "scale": 0.3}),
    "unaligned": (lambda: shifted((1, 4, 128, 64), BF16, 1), {}),
    "half aligned": (lambda: shifted((1, 4, 128, 64), BF16, 4), {"mask": "causal"}),
    "float32": (lambda: drawn((1, 4, 128, 64), FP32), {"mask": "causal"}),
    "narrow": (lambda: [x[..., :d] for x, d in zip(drawn((1, 4, 128, 192), BF16), (192, 192, 128), strict=True)], {}),
    "wide heads": (lambda: drawn((1, 2, 150, 256), BF16), {"mask": "causal"}),
    "decode": (lambda: drawn((4, 8, 1, 128), BF16, 2, 1500), {}),
    "sm80": (lambda: drawn((2, 4, 200, 64), BF16, 2), {"mask": "causal", "backend": "sm80"}),
}
NOT_OURS = {"unaligned", "half aligned"}  # where the planner may choose a kernel of PyTorch's


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("name", CASES)
def test_forward_has_the_bits_of_the_way_in_python(name):
    make, arguments = CASES[name]
    tensors = make()
    with in_python():
        want = as_tuple(tilewise.attention(*tensors, **arguments))
    for _ in range(2):
        tilewise.attention(*tensors, **arguments)
    before = counted()
    for _ in range(2):
        got = as_tuple(tilewise.attention(*tensors, **arguments))
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
            assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
    assert counted(before)[0] == 2 or name in NOT_OURS


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *((name, (True, True, True)) for name in CASES if name not in NOT_OURS),
        *((name, some) for name in ("full", "sm80") for some in ((True, False, False), (False, True, True))),
        ("float32", (False, False, True)),
    ],
    ids=str,
)
def test_gradients_have_the_bits_of_the_way_in_python(name, wanted):
    make, arguments = CASES[name]
    tensors = make()

    def step(dout=None):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
        out, *others = as_tuple(tilewise.attention(*leaves, **arguments))
        given = [torch.ones_like(out) if dout is None else dout, *(torch.ones_like(other) for other in others)]
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        return (out, *torch.autograd.grad((out, *others), learning, given))

    with switches.deterministic_algorithms():
        with in_python():
            first = step()
            dout = torch.randn_like(first[0])
            strided = torch.randn(*dout.shape[:-1], 2 * dout.shape[-1], device="cuda").to(dout.dtype)
            douts = [None, dout, strided[..., 1 : 1 + dout.shape[-1]]]
            want = [step(one) for one in douts]
        for _ in range(3):
            for one in douts:
                step(one)
        before = counted()
        got = [step(one) for one in douts]
        forwards, backwards, in_python_ones = counted(before)
    assert (forwards, backwards, in_python_ones) == (3, 3, 0)
    for results, others in zip(got, want, strict=True):
        for one, other in zip(results, others, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_gradients_that_add_in_any_order_are_near():
    tensors = [x.requires_grad_() for x in drawn((2, 8, 600, 64), BF16, 2)]
    dout = torch.randn(2, 8, 600, 64, device="cuda").to(BF16)
    for _ in range(4):
        before = counted()
        got = torch.autograd.grad(tilewise.attention(*tensors, mask="causal"), tensors, dout)
    assert counted(before) == (1, 1, 0)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = tilewise.attention(*wide, mask="causal", backend="reference")
    for one, other in zip(got, torch.autograd.grad(exact, wide, dout.double()), strict=True):
        assert_close(one, other, 4 * budget(BF16, 600))


def warmed(tensors, **arguments):
    for _ in range(3):
        out = tilewise.attention(*tensors, **arguments)
    return out


def test_a_graph_captures_without_python_and_replays():
    tensors = drawn((4, 16, 1024, 64), BF16)  # more tiles than blocks, which take them by a counter
    warmed(tensors, mask="causal")
    torch.cuda.synchronize()
    before, graph = counted(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(*tensors, mask="causal")
        again = tilewise.attention(out, *tensors[1:], mask="causal")
    assert counted(before)[0] == 2
    for _ in range(2):
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        want = tilewise.attention(*tensors, mask="causal")
        assert torch.equal(out, want)
        assert torch.equal(again, tilewise.attention(want, *tensors[1:], mask="causal"))


def test_a_graph_captures_a_training_step():
    tensors = [x.requires_grad_() for x in drawn((2, 4, 256, 64), BF16)]
    dout = torch.randn(2, 4, 256, 64, device="cuda").to(BF16)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(4):
            torch.autograd.grad(tilewise.attention(*tensors, mask="causal"), tensors, dout)
    torch.cuda.current_stream().wait_stream(aside)
    before, graph = counted(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(*tensors, mask="causal")
        grads = torch.autograd.grad(out, tensors, dout)
    assert counted(before) == (1, 1, 0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    # Leaves of their own: `out` keeps the AccumulateGrad nodes of `tensors`, and those belong to the capture's stream.
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    eager = tilewise.attention(*leaves, mask="causal")
    assert torch.equal(out, eager)
    for one, other in zip(grads, torch.autograd.grad(eager, leaves, dout), strict=True):
        assert_close(one, other.double(), 4 * budget(BF16, 256))


def test_calls_go_to_the_current_stream():
    """Inputs that a slow stream is about to write are read after it has written them, forward and backward."""
    tensors = [x.requires_grad_() for x in drawn((1, 4, 256, 64), BF16)]
    fresh = [torch.randn_like(x) for x in tensors]
    dout = torch.randn_like(tensors[0])
    for _ in range(4):
        torch.autograd.grad(tilewise.attention(*tensors), tensors, dout)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    before = counted()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for tensor, other in zip(tensors, fresh, strict=True):
                tensor.copy_(other)
        out = tilewise.attention(*tensors)
        grads = torch.autograd.grad(out, tensors, dout)
    assert counted(before) == (1, 1, 0)
    torch.cuda.synchronize()
    # Other leaves: those of `out` have nodes of the other stream, which PyTorch warns of.
    leaves = [x.detach().requires_grad_() for x in tensors]
    with in_python():
        want = tilewise.attention(*leaves)
        others = torch.autograd.grad(want, leaves, dout)
    assert torch.equal(out, want)
    for one, other in zip(grads, others, strict=True):
        assert_close(one, other.double(), 4 * budget(BF16, 256))


def test_threads_with_streams_of_their_own():
    shapes = [(1, 4, 128 + 64 * n, 64) for n in range(4)]
    given = [drawn(shape, BF16) for shape in shapes]
    want = [warmed(tensors, mask="causal") for tensors in given]
    torch.cuda.synchronize()
    failures = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    out = tilewise.attention(*given[number], mask="causal")
                torch.cuda.current_stream().synchronize()
                assert torch.equal(out, want[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_is_given_back():
    tensors = [x.requires_grad_() for x in drawn((2, 4, 512, 64), BF16)]
    dout = torch.randn(2, 4, 512, 64, device="cuda").to(BF16)

    def step():
        torch.autograd.grad(tilewise.attention(*tensors, mask="causal"), tensors, dout)

    for _ in range(5):
        step()
    gc.collect()
    torch.cuda.synchronize()
    before, held = counted(), torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    torch.cuda.synchronize()
    # Autograd's thread may let go of the last gradients a moment after it has returned them.
    until = time.monotonic() + 5
    while torch.cuda.memory_allocated() != held and time.monotonic() < until:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == held
    assert counted(before) == (50, 50, 0)


def test_autograd_features():
    leaves = [x.requires_grad_() for x in drawn((1, 2, 128, 64), BF16)]
    dout = torch.randn(1, 2, 128, 64, device="cuda").to(BF16)
    for _ in range(4):
        first = torch.autograd.grad(tilewise.attention(*leaves), leaves, dout)
    out = tilewise.attention(*leaves)
    kept = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout)
    with torch.autograd.graph.save_on_cpu():
        out = tilewise.attention(*leaves)
    moved = torch.autograd.grad(out, leaves, dout)
    for grads in (kept, again, moved):
        for one, other in zip(grads, first, strict=True):
            assert_close(one, other.double(), 4 * budget(BF16, 128))
    out = tilewise.attention(*leaves)
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    twice = torch.autograd.grad(dq.float().square().sum(), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (dq,) = torch.autograd.grad(
        tilewise.attention(*wide, backend="reference").square().sum(), wide[0], create_graph=True
    )
    for one, other in zip(twice, torch.autograd.grad(dq.square().sum(), wide), strict=True):
        assert_close(one / other.abs().max(), other / other.abs().max(), 8 * budget(BF16, 128))


def test_inference_mode_and_autocast():
    tensors = drawn((1, 4, 128, 64), BF16)
    want = warmed(tensors)
    with torch.inference_mode():
        assert torch.equal(warmed(tensors), want)
        made = [x.clone() for x in tensors]
        assert torch.equal(warmed(made), want)
    before = counted()
    with torch.autocast("cuda", dtype=FP16):
        out = tilewise.attention(*tensors)
    assert out.dtype == BF16
    assert torch.equal(out, want)
    assert counted(before)[0] == 1


def test_compiled_graphs_take_the_operator():
    tensors = drawn((1, 4, 128, 64), BF16)
    want = warmed(tensors, mask="causal")
    compiled = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, mask="causal") + 0, backend="aot_eager")
    assert torch.equal(compiled(*tensors), want)


@pytest.mark.parametrize("grad", [False, True])
def test_the_override_is_answered_natively(compiled_override, grad):
    tensors = [x.requires_grad_(grad) for x in drawn((2, 4, 200, 64), BF16)]
    dout = torch.randn(2, 4, 200, 64, device="cuda").to(BF16)
    rule = sdpa(backend="sm90")
    found = []
    with rule:
        for _ in range(6):
            before = counted()
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
            grads = torch.autograd.grad(out, tensors, dout) if grad else ()
            found.append((out, *grads))
    assert counted(before) == (1, int(grad), 0)
    assert all(torch.equal(results[0], found[0][0]) for results in found)
    for results in found:
        for one, other in zip(results, found[0], strict=True):
            assert_close(one, other.double(), 4 * budget(BF16, 200))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own, about how it batches its kernels
def test_the_override_leaves_transforms_to_pytorch(compiled_override):
    tensors = drawn((2, 4, 200, 64), BF16)
    with sdpa(backend="sm90"):
        for _ in range(4):
            before = counted()
            taken = F.scaled_dot_product_attention(*tensors)
        assert counted(before)[0] == 1
        batched = torch.func.vmap(F.scaled_dot_product_attention)(*(x.unsqueeze(0) for x in tensors))
        assert counted(before)[0] == 1
    assert_close(batched[0], taken.double(), 4 * budget(BF16, 200))


_given: list[torch.Tensor] = []  # for a forked child, which has it as it was


def _in_child(queue):
    try:
        known = native.attend(BHSD, *_given, *(None for _ in SLOTS), *Options())
        queue.put("in Python" if known is None else "natively")
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_answered_by_python():
    _given[:] = drawn((1, 4, 128, 64), BF16)
    warmed(_given)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == "in Python"
    child.join()
    _given.clear()


def test_what_does_not_fit_in_memory_is_pytorchs_error_and_the_next_call_works():
    tensors = drawn((1, 4, 128, 64), BF16)
    want = warmed(tensors)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)

    def exhaust():
        return [tilewise.attention(*tensors) for _ in range(10_000)]

    try:
        with pytest.raises(torch.OutOfMemoryError):
            exhaust()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(tilewise.attention(*tensors), want)


def sequences(lengths, heads=(8, 2), dim=128, grad=False):
    total = sum(lengths)
    tensors = [torch.randn(total, n, dim, device="cuda").bfloat16() for n in (heads[0], heads[1], heads[1])]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return [tensor.requires_grad_(grad) for tensor in tensors], offsets


@pytest.mark.parametrize("grad", [False, True])
def test_packed_calls_have_the_bits_of_the_way_in_python(grad):
    tensors, offsets = sequences((700, 0, 33, 1025), grad=grad)
    dout = torch.randn_like(tensors[0])

    def call():
        with switches.deterministic_algorithms():
            out, lse = tilewise.attention_packed(*tensors, offsets, offsets, 1025, 1025, mask="causal", return_lse=True)
            return [out, lse, *(torch.autograd.grad(out, tensors, dout) if grad else ())]

    with in_python():
        want = call()
    for _ in range(3):
        call()
    before = counted()
    for got, wanted in zip(call(), want, strict=True):
        assert torch.equal(got, wanted)
    assert counted(before) == (1, int(grad), 0)


def test_a_graph_of_a_packed_call_follows_its_offsets():
    """The table is made inside the graph; outside it is made anew for offsets that have changed."""
    tensors, offsets = sequences((400, 624))

    def call():
        return tilewise.attention_packed(*tensors, offsets, offsets, 1024, 1024, mask="causal")

    for _ in range(4):
        call()
    graph = torch.cuda.CUDAGraph()
    before = counted()
    with torch.cuda.graph(graph):
        out = call()
    assert counted(before)[0] == 1
    for middle in (512, 3):
        offsets[1] = middle
        with in_python():
            want = call()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert torch.equal(call(), want)


PADDED = {  # the first with a map of tiles, the second without, the third one new token per sequence
    "a map": lambda: drawn((4, 8, 1024, 128), BF16, 2),
    "flags": lambda: drawn((4, 4, 200, 64), BF16),
    "a token": lambda: drawn((4, 8, 1, 128), BF16, 2, 1500),
}


def padding(tensors, shares=(1.0, 0.7, 0.4, 0.01)):
    """(batch, 1, 1, keys): of each batch such a share of the keys, the last ones."""
    keys = tensors[1].shape[2]
    hidden = torch.tensor([keys - int(keys * share) for share in shares], device="cuda")
    return (torch.arange(keys, device="cuda") >= hidden[:, None])[:, None, None, :]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PADDED)
def test_padded_calls_have_the_bits_of_the_way_in_python(name, grad):
    tensors = [x.requires_grad_(grad) for x in PADDED[name]()]
    dout = torch.randn_like(tensors[0])
    rule = tilewise.Causal("bottom-right")

    def call(keep):
        with switches.deterministic_algorithms():
            out, lse = tilewise.attention(*tensors, mask=rule, keep=keep, return_lse=True)
            return [out, lse, *(torch.autograd.grad(out, tensors, dout) if grad else ())]

    batches = [padding(tensors), padding(tensors, (0.2, 0.0, 1.0, 0.5)), padding(tensors, (1.0,) * 4)]
    with in_python():
        want = [call(keep) for keep in batches]
    for _ in range(3):
        call(batches[0])
    before = counted()
    for keep, wanted in zip(batches, want, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(call(keep), wanted, strict=True))
    assert counted(before) == (3, 3 * grad, 0)


def test_a_graph_of_a_padded_step_follows_its_padding():
    """The map is made inside the graph; outside it is made anew for flags that have changed."""
    tensors = [x.requires_grad_() for x in PADDED["a map"]()]
    dout, keep = torch.randn_like(tensors[0]), padding(tensors)

    def call():
        with switches.deterministic_algorithms():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            out = tilewise.attention(*leaves, mask="causal", keep=keep)
            return [out, *torch.autograd.grad(out, leaves, dout)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(5):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph, before = torch.cuda.CUDAGraph(), counted()
    with torch.cuda.graph(graph):
        found = call()
    assert counted(before) == (1, 1, 0)
    for shares in ((0.5, 0.5, 1.0, 0.2), (1.0, 1.0, 1.0, 1.0)):
        keep.copy_(padding(tensors, shares))
        with in_python():
            want = call()
        graph.replay()
        torch.cuda.synchronize()
        for got in (found, call()):
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
