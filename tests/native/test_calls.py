"""Repeated calls in native code, with the emulator for its driver: what they compute, and what they leave to Python."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import call_changes
import emulation
import tilewise
from support import assert_close, budget, same_bits
from tilewise import DeviceError, Target, api, memo, native
from tilewise.call import build
from tilewise.call import native as handing_over
from tilewise.call.request import BHSD, BSHD, OUT_BSHD, PACKED, SLOTS, Options
from tilewise.engine import recipe as recipes
from tilewise.engine import run, tile_map
from tilewise.integrations.sdpa import sdpa
from tilewise.native import library
from tilewise.target import assumed
from tilewise.torch_seam import switches

pytestmark = [
    pytest.mark.skipif(library._why_not() is not None, reason=str(library._why_not())),
    pytest.mark.skipif(emulation.COMPILER is None, reason="needs g++"),
]
SHAPE = (1, 2, 70, 64)


class Machine:
    """A GPU that is a model, and native code that launches on it. Calls go from end to end, with tensors of the CPU,
    which is taken for the GPU (`assumed`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        emulation.install(monkeypatch)
        self.backend, self.driver = backend, emulation.NativeDriver()
        monkeypatch.setattr(build, "_build", lambda plan: None)
        monkeypatch.setattr(run, "counter_room", self.driver.counter_room)
        monkeypatch.setattr(handing_over, "_counting", set())
        self.calls = library.loaded().calls
        self.calls.use_driver(*self.driver.addresses)
        native.use(self.calls)

    def attention(self, *tensors: torch.Tensor, **arguments: object):
        return tilewise.attention(*tensors, backend=self.backend, **arguments)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Forwards, backwards and backwards in Python, of native code, in this process."""
        return self.calls.counts()[1:]

    def since(self, before: tuple[int, int, int]) -> list[int]:
        return [now - then for now, then in zip(self.counts, before, strict=True)]


@pytest.fixture(params=["sm80", "sm90"])
def machine(request, monkeypatch):
    monkeypatch.setenv(library.SETTING, "on")
    library.build()
    with assumed(Target.named({"sm80": "a100", "sm90": "h200"}[request.param])):
        yield Machine(monkeypatch, request.param)
    native.use(None)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv(library.SETTING, "on")
    library.build()
    with assumed(Target.named("h200")):
        yield Machine(monkeypatch, "sm90")
    native.use(None)


def inputs(shape=SHAPE, *, grad=False, heads_kv=None, seq_kv=None, dtype=torch.bfloat16, layout="bhsd", seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, seq, dim = shape
    sizes = [(heads, seq), (heads_kv or heads, seq_kv or seq), (heads_kv or heads, seq_kv or seq)]
    made = [torch.randn(batch, *size, dim, generator=generator).to(dtype) for size in sizes]
    if layout != "bhsd":
        made = [tensor.transpose(1, 2).contiguous() for tensor in made]
    if layout == "views":  # (batch, heads, seq, dim), of memory in the other order
        made = [tensor.transpose(1, 2) for tensor in made]
    return [tensor.requires_grad_(grad) for tensor in made]


def step(machine, tensors, dout, wanted=(True, True, True), **arguments):
    """out, and the wanted gradients, of fresh leaves."""
    leaves = [x.detach().clone().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
    out = machine.attention(*leaves, **arguments)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_the_third_call_is_native_and_has_the_bits_of_the_first(machine):
    tensors = inputs()
    before = machine.counts
    first, second, third = (machine.attention(*tensors, mask="causal") for _ in range(3))
    assert machine.since(before) == [1, 0, 0]
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert third.stride() == first.stride()
    want = tilewise.attention(*(x.double() for x in tensors), mask="causal", backend="reference")
    assert_close(third, want, budget(torch.bfloat16, SHAPE[2]))


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({}, {"return_lse": True}),
        ({"heads_kv": 1, "seq_kv": 130}, {"mask": "causal"}),
        ({"layout": "bshd"}, {"layout": "bshd", "return_lse": True}),
        ({"layout": "views"}, {"return_lse": True}),
        ({"dtype": torch.float16}, {"scale": 0.25, "softcap": 5.0}),
        ({"seq_kv": 150}, {"mask": tilewise.Window(30, 0, "bottom-right")}),
    ],
    ids=str,
)
def test_arguments_and_layouts(hopper, sizes, arguments):
    tensors = inputs(**sizes)
    results = [hopper.attention(*tensors, **arguments) for _ in range(2)]
    before = hopper.counts[0]
    results.append(hopper.attention(*tensors, **arguments))
    assert hopper.counts[0] == before + 1
    for found in results[1:]:
        pairs = [(results[0], found)] if isinstance(found, torch.Tensor) else zip(results[0], found, strict=True)
        for want, got in pairs:
            assert torch.equal(got, want)
            assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
            assert got.ndim == 3 or got.stride() == torch.empty_like(tensors[0]).stride()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_have_the_bits_of_those_in_python(machine, layout):
    tensors = inputs(heads_kv=1, layout=layout)
    dout = torch.randn_like(tensors[0])
    native.use(None)
    want = step(machine, tensors, dout, mask="causal", layout=layout)
    native.use(machine.calls)
    for _ in range(2):
        step(machine, tensors, dout, mask="causal", layout=layout)
    before = machine.counts
    step(machine, tensors, dout, mask="causal", layout=layout)  # the first backward of a native forward is Python's
    got = step(machine, tensors, dout, mask="causal", layout=layout)
    assert machine.since(before) in ([2, 1, 1], [2, 2, 0])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


LARGE = {"shape": (1, 1, 64, 64), "seq_kv": 4160}
"""Whose gradients take more than the megabyte that gradients share."""


@pytest.mark.parametrize("sizes", [{}, LARGE], ids=["one memory", "a memory each"])
def test_what_no_kernel_writes_is_nan(hopper, sizes):
    tensors = inputs(**sizes)
    dout = torch.randn_like(tensors[0])
    hopper.driver.runs = False  # fresh memory stays as it is
    for _ in range(4):
        before = hopper.counts
        found = step(hopper, tensors, dout)
    assert hopper.counts[1] > before[1], "the last backward was native"
    assert all(one.isnan().all() for one in found)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False, False, True)], ids=str)
def test_only_some_gradients(hopper, wanted):
    tensors = inputs()
    dout = torch.randn_like(tensors[0])
    native.use(None)
    want = step(hopper, tensors, dout, wanted)
    native.use(hopper.calls)
    for _ in range(4):
        got = step(hopper, tensors, dout, wanted)
    assert hopper.counts[1] > 0
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(("sizes", "memories"), [({}, 1), (LARGE, 3)], ids=["small", "large"])
def test_only_small_gradients_share_their_memory(hopper, sizes, memories):
    tensors = inputs(**sizes)
    dout = torch.randn_like(tensors[0])
    native.use(None)
    _, *want = step(hopper, tensors, dout)
    native.use(hopper.calls)
    for _ in range(4):
        _, *grads = step(hopper, tensors, dout)
    assert hopper.counts[1] > 0
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == memories
    for changed in range(3):  # each has its own part of that memory
        assert same_bits(grads, want)
        grads[changed].zero_()
        want[changed].zero_()
    leaf = tensors[0].clone().requires_grad_()
    for times in (1, 2):  # autograd adds them up, and then to those of the first time
        hopper.attention(leaf, leaf, leaf).backward(dout)
        _, *single = step(hopper, [tensors[0]] * 3, dout)
        total = times * sum(grad.float() for grad in single)
        assert_close(leaf.grad, total, 4 * budget(torch.bfloat16, SHAPE[2]))


def test_gradients_in_any_layout_and_of_lse(hopper):
    """An expanded dout is copied, one of lse is taken as it is, and one in another dtype goes to Python."""
    tensors = inputs()
    for _ in range(2):
        hopper.attention(*inputs(grad=True), return_lse=True)

    def gradients(dout, dlse):
        leaves = inputs(grad=True)
        out, lse = hopper.attention(*leaves, return_lse=True)
        given = [(output, grad) for output, grad in ((out, dout), (lse, dlse)) if grad is not None]
        outputs, grads = zip(*given, strict=True)
        return torch.autograd.grad(outputs, leaves, grads)

    one = torch.ones((), dtype=torch.bfloat16).expand_as(tensors[0])
    dlse = torch.randn(SHAPE[:3])
    cases = [(one, None), (one, dlse), (None, dlse), (one.contiguous().transpose(2, 3).contiguous().mT, dlse)]
    got = [gradients(*case) for _ in range(2) for case in cases][len(cases) :]
    native.use(None)
    want = [gradients(*case) for case in cases]
    for grads, others in zip(got, want, strict=True):
        assert same_bits(grads, others)


def warm(machine, grad=False, **arguments):
    for _ in range(2):
        machine.attention(*inputs(grad=grad), **arguments)


def test_autograd_features(hopper):
    """retain_graph, hooks, double backward, saved-tensor hooks, anomaly mode, and a graph that is used twice."""
    warm(hopper, grad=True)
    dout = torch.randn(SHAPE).bfloat16()
    leaves = inputs(grad=True)
    out = hopper.attention(*leaves)
    assert "TilewiseAttention" in out.grad_fn.name()
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout)
    assert same_bits(first, again)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)
    assert out.grad_fn is not None
    changed = hopper.attention(*leaves)
    with torch.no_grad():
        changed.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        torch.autograd.grad(changed, leaves, dout)

    out = hopper.attention(*leaves)
    some = [torch.autograd.grad(out, leaves[place], dout, retain_graph=True)[0] for place in (0, 2, 1, 2)]
    for place, grad in zip((0, 2, 1, 2), some, strict=True):
        assert torch.equal(grad, first[place])

    seen = []
    out = hopper.attention(*leaves)
    out.register_hook(lambda grad: seen.append("out"))
    out.grad_fn.register_prehook(lambda grads: seen.append("before"))
    out.grad_fn.register_hook(lambda grads, given: seen.append("after"))
    torch.autograd.grad(out, leaves, dout)
    assert sorted(seen) == ["after", "before", "out"]

    with pytest.warns(UserWarning, match="Anomaly"):
        anomalies = torch.autograd.detect_anomaly()
    with anomalies:
        out = hopper.attention(*leaves)
        assert same_bits(torch.autograd.grad(out, leaves, dout), first)

    other_layout = torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.transpose(1, 2).contiguous(), lambda packed: packed.transpose(1, 2)
    )
    with other_layout:
        out = hopper.attention(*leaves)
    others = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(others, first, strict=True):
        assert_close(a, b.double(), budget(torch.bfloat16, SHAPE[2]))

    with torch.autograd.graph.save_on_cpu():
        out = hopper.attention(*leaves)
    assert same_bits(torch.autograd.grad(out, leaves, dout), first)

    out = hopper.attention(*leaves)
    leaves[0].data.add_(0)  # which autograd does not see
    with torch.no_grad():
        leaves[0].add_(0)  # which it does
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        torch.autograd.grad(out, leaves, dout)


def test_changes_of_what_is_saved_are_refused_as_pytorch_does(hopper):
    """By its own words, with the versions that it counts; hooks that come later see nothing of it."""
    warm(hopper, grad=True)
    warm(hopper, grad=True, return_lse=True)
    dout = torch.randn(SHAPE).bfloat16()
    leaves = inputs(grad=True)
    for _ in range(2):
        torch.autograd.grad(hopper.attention(*leaves), leaves, dout)

    def refusal(out, pattern, **arguments):
        with pytest.raises(RuntimeError, match=pattern) as caught:
            torch.autograd.grad(out, leaves, dout, **arguments)
        return str(caught.value)

    for place in range(3):
        out = hopper.attention(*leaves)
        with torch.no_grad():
            leaves[place].add_(0).add_(0)
        now = leaves[place]._version
        said = refusal(out, f"is at version {now}; expected version {now - 2} instead")
        assert "BFloat16Type [1, 2, 70, 64]]" in said
        assert "which is output" not in said

    made = leaves[0] * 1
    out = hopper.attention(made, *leaves[1:])
    made.mul_(1)
    refusal(out, r"output 0 of Mul\w*, is at version 1; expected version 0 instead\. Hint: enable anomaly")

    seen = []
    for arguments in ({}, {"return_lse": True}):
        out = hopper.attention(*leaves, **arguments)
        out = out[0] if arguments else out
        out.detach().add_(0)
        with torch.autograd.graph.saved_tensors_hooks(seen.append, seen.append):
            refusal(out, r"output 0 of TilewiseAttention\w*, is at version 1; expected version 0 instead")
    assert not seen
    out, lse = hopper.attention(*leaves, return_lse=True)
    lse.detach().add_(0)
    refusal(out, r"output 1 of TilewiseAttention\w*, is at version 1; expected version 0 instead")

    made = leaves[0] * 1
    out = hopper.attention(made, *leaves[1:])
    made.detach_()  # the gradient has its way without it, a gradient of the gradient has not
    refusal(out, "detached in-place", create_graph=True)
    assert all(grad is not None for grad in torch.autograd.grad(out, leaves, dout))


def test_what_is_saved_goes_when_it_is_released(hopper):
    warm(hopper, grad=True)
    dout = torch.randn(SHAPE).bfloat16()
    leaves = inputs(grad=True)
    for _ in range(2):
        torch.autograd.grad(hopper.attention(*leaves), leaves, dout)
    gc.disable()
    try:
        made = leaves[0] * 1
        out = hopper.attention(made, *leaves[1:])
        q, node = weakref.ref(made), out.grad_fn
        del made
        grads = torch.autograd.grad(out, leaves, dout, create_graph=True)  # in Python, and then not
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.isfinite(a).all() and a.shape == b.shape for a, b in zip(grads, again, strict=True))
        del grads
        assert q() is not None
        torch.autograd.grad(out, leaves, dout)
        assert q() is None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, leaves, dout)
        del out
        assert node.name() == "TilewiseAttentionBackward"

        made = leaves[0] * 1
        out = hopper.attention(made, *leaves[1:])
        q, place = weakref.ref(made), weakref.ref(out)
        del made
        assert q() is not None
        del out  # no cycle keeps it
        assert q() is None
        assert place() is None
    finally:
        gc.enable()


def test_hooks_see_what_is_saved_in_the_order_of_the_way_in_python(hopper):
    warm(hopper, grad=True)
    dout = torch.randn(SHAPE).bfloat16()
    leaves = inputs(grad=True)
    want = torch.autograd.grad(hopper.attention(*leaves), leaves, dout)

    def packed():
        seen, unpacked = [], []

        def pack(tensor):
            seen.append((tuple(tensor.shape), tensor.dtype, tensor.data_ptr() in addresses))
            return tensor.clone()

        def unpack(tensor):
            unpacked.append(tuple(tensor.shape))
            return tensor

        addresses = [leaf.data_ptr() for leaf in leaves]
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = hopper.attention(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        assert same_bits(grads, want)
        assert len(unpacked) == len(seen)
        return seen

    before = hopper.counts[0]
    here = packed()
    assert hopper.counts[0] == before + 1
    with native.in_python():
        there = packed()
    assert here == there
    assert len(here) == 5


def test_double_backward_goes_through_the_reference(hopper):
    warm(hopper, grad=True)
    leaves = inputs(grad=True)
    before = hopper.counts[0]
    out = hopper.attention(*leaves)
    assert hopper.counts[0] == before + 1
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    twice = torch.autograd.grad(dq.float().square().sum(), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = tilewise.attention(*wide, backend="reference")
    (dq,) = torch.autograd.grad(exact.square().sum(), wide[0], create_graph=True)
    want = torch.autograd.grad(dq.square().sum(), wide)
    for a, b in zip(twice, want, strict=True):
        assert_close(a / b.abs().max(), b / b.abs().max(), 8 * budget(torch.bfloat16, SHAPE[2]))


def test_checkpoints_recompute_by_either_way(hopper):
    from torch.utils.checkpoint import checkpoint

    dout = torch.randn(SHAPE).bfloat16()
    found = []
    for _ in range(4):  # the forward in Python and the recomputation native, and all else
        leaves = inputs(grad=True)
        out = checkpoint(hopper.attention, *leaves, use_reentrant=False)
        found.append(torch.autograd.grad(out, leaves, dout))
    assert hopper.counts[0] > 0
    for grads in found[1:]:
        assert same_bits(grads, found[0])


def test_what_watches_sees_the_operator(hopper):
    """Modes, transforms, traces, subclasses, forward-mode AD and lazy tensors go to Python."""
    warm(hopper)
    tensors = inputs()
    before = hopper.counts[0]

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    with Mode():
        tilewise.attention(*tensors, backend="reference")
        assert answered(*tensors) is None
    torch.func.vmap(lambda q: check_unknown(q, *tensors[1:]))(torch.stack([tensors[0]] * 2))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tensors[0])
        assert answered(dual, *tensors[1:]) is None
    assert answered(tensors[0].as_subclass(Subclass), *tensors[1:]) is None
    lazy = torch.complex(tensors[0].float(), tensors[0].float()).conj().imag
    assert answered(lazy, *tensors[1:]) is None
    assert answered(tensors[0].to("meta"), *tensors[1:]) is None
    assert answered(tensors[0].to_sparse(), *tensors[1:]) is None
    assert hopper.counts[0] == before
    assert torch.equal(answered(*tensors), hopper.attention(*tensors))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which casts nothing of ours
        assert answered(*tensors) is not None


def answered(q, k, v, form=BHSD, **changes):
    """What native code answers where `attention` has these arguments; None where it does not know the call."""
    options = Options(backend="sm90")._asdict() | {one: changes.pop(one) for one in Options._fields if one in changes}
    return native.attend(form, q, k, v, *(changes.get(slot) for slot in SLOTS), *options.values())


def check_unknown(q, k, v):
    assert answered(q, k, v) is None
    return q.sum()


def test_whatever_differs_is_another_call(hopper):
    tensors = inputs()
    warm(hopper)
    q, k, v = tensors
    assert answered(q, k, v) is not None
    for name, change in call_changes.INPUTS.items():
        assert answered(*change(q, k, v)) is None, name
    for change in ({"mask": "causal"}, {"scale": 0.5}, {"softcap": 1.0}, {"return_lse": True}, {"form": BSHD}):
        assert answered(q, k, v, **change) is None, change
    with torch.no_grad():
        assert answered(q.clone().requires_grad_(), k, v) is not None
    with switches.deterministic_algorithms():
        assert answered(q, k, v) is None
    memo.invalidate()
    assert answered(q, k, v) is None
    with pytest.raises(TypeError, match="attend wants"):
        native.attend(q, k, v)


def test_inference_mode_makes_inference_tensors(hopper):
    tensors = inputs()
    with torch.inference_mode():
        for _ in range(3):
            out = hopper.attention(*tensors)
        made = [x.clone() for x in tensors]
        for _ in range(3):
            other = hopper.attention(*made)
    assert out.is_inference()
    assert other.is_inference()
    assert torch.equal(out, other)
    assert hopper.calls.counts()[0] == 2


def test_a_refused_launch_says_so_and_a_missing_context_is_mended(hopper):
    warm(hopper)
    tensors = inputs()
    want = hopper.attention(*tensors)
    hopper.driver.failures[:] = [201]
    with pytest.raises(DeviceError, match=r"launching .* failed"):
        hopper.attention(*tensors)
    hopper.driver.failures[:], hopper.driver.current = [201], None
    assert torch.equal(hopper.attention(*tensors), want)
    assert hopper.driver.current == 1
    hopper.driver.failures[:], hopper.driver.current = [201], 7  # another device's
    assert torch.equal(hopper.attention(*tensors), want)
    assert hopper.driver.current == 7
    hopper.driver.current = 1
    warm(hopper, grad=True)
    dout = torch.ones(SHAPE).bfloat16()
    for _ in range(2):
        leaves = inputs(grad=True)
        torch.autograd.grad(hopper.attention(*leaves), leaves, dout)
    out = hopper.attention(*leaves)
    hopper.driver.failures[:] = [201]
    with pytest.raises(DeviceError, match=r"launching .* failed"):
        torch.autograd.grad(out, leaves, dout)


def test_tensor_maps_are_encoded_once_per_address(hopper):
    warm(hopper)
    tensors = inputs()
    hopper.attention(*tensors)
    hopper.driver.encoded.clear()
    hopper.attention(*tensors)
    assert not {tensor.data_ptr() for tensor in tensors} & set(hopper.driver.encoded)


def test_arguments_are_kept_by_all_of_their_addresses(hopper):
    """More calls than arguments are kept of, each with memory of its own, and some that share a part of it."""
    many = [inputs(seed=seed) for seed in range(20)]
    many += [[many[0][0], many[1][1], many[2][2]], [many[1][0], many[1][1], many[2][2]]]
    with native.in_python():
        want = [hopper.attention(*tensors) for tensors in many]
    warm(hopper)
    before, kept = hopper.counts[0], []
    for _ in range(3):
        for tensors, wanted in zip(many, want, strict=True):
            kept.append(hopper.attention(*tensors))
            assert torch.equal(kept[-1], wanted)
    assert hopper.counts[0] == before + 3 * len(many)
    tensors = many[0]
    for _ in range(2):  # the same memory with other values
        tensors[1].add_(1)
        with native.in_python():
            wanted = hopper.attention(*tensors)
        assert torch.equal(hopper.attention(*tensors), wanted)


def test_a_map_that_was_refused_is_encoded_again(hopper):
    warm(hopper)
    tensors = inputs(seed=1)
    with native.in_python():
        want = hopper.attention(*tensors)
    refused = [True]
    addresses = list(hopper.driver.addresses)
    encode = hopper.driver._functions[1]
    kind = type(encode)
    answer = kind(lambda *given: 1 if refused[0] else encode(*given))
    addresses[1] = ctypes.cast(answer, ctypes.c_void_p).value
    hopper.calls.use_driver(*addresses)
    try:
        with pytest.raises(DeviceError):
            hopper.attention(*tensors)
        refused[0] = False
        assert torch.equal(hopper.attention(*tensors), want)
    finally:
        hopper.calls.use_driver(*hopper.driver.addresses)


def test_captured_launches_keep_their_counters(hopper):
    """On a model there is no graph; what differs is which counters are taken, and that they run out without harm."""
    two = dataclasses.replace(Target.named("h200"), sms=2)  # so that blocks have several tiles to take
    tensors = inputs((2, 2, 200, 64))
    with assumed(two):
        for _ in range(2):
            want = hopper.attention(*tensors, mask="causal")
        assert handing_over._counting == {0}, "a call whose launches take no counter says nothing here"
        before = hopper.counts[0]
        for capturing in (0, 0, 1, 1, 1, 1, 0):
            hopper.driver.capturing = capturing
            assert torch.equal(hopper.attention(*tensors, mask="causal"), want)
        assert hopper.counts[0] == before + 7


def test_no_call_keeps_its_tensors(machine):
    """Not even until the garbage is collected: neither the calls that Python makes, nor those that native code does."""
    gc.collect()
    gc.disable()
    try:
        dout, kept = torch.randn(SHAPE).bfloat16(), []
        for _ in range(4):
            leaves = inputs(grad=True)
            out = machine.attention(*leaves)
            out.backward(dout)
            kept += [weakref.ref(tensor) for tensor in (*leaves, out)]
            del leaves, out
        assert [tensor() for tensor in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_no_call_keeps_nodes_of_autograds(machine):
    """Not even until the garbage is collected: a later call of the same leaves may come from another stream."""
    leaves, dout = inputs(grad=True), torch.randn(SHAPE).bfloat16()

    def nodes():
        return [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]

    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            out = machine.attention(*leaves)
            for node in nodes():
                node.metadata["call"] = number
            torch.autograd.grad(out, leaves, dout)
            del out, node
            assert [dict(node.metadata) for node in nodes()] == [{}, {}, {}]
    finally:
        gc.enable()


def test_an_empty_node_hands_its_gradient_to_all_inputs(hopper):
    leaves = inputs(grad=True)
    out = hopper.calls.empty_node(*leaves)
    assert torch.equal(out, leaves[0])
    dout = torch.randn(SHAPE).bfloat16()
    assert all(torch.equal(grad, dout) for grad in torch.autograd.grad(out, leaves, dout))
    assert not hopper.calls.empty_node(*inputs()).requires_grad


def test_threads_share_what_is_known(hopper):
    warm(hopper, grad=True)
    dout = torch.randn(SHAPE).bfloat16()
    failures: list[BaseException] = []
    want = step(hopper, inputs(), dout)

    def work():
        try:
            for _ in range(4):
                got = step(hopper, inputs(), dout)
                assert same_bits(got, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        memo.invalidate()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_is_kept_for_ever(hopper):
    """What a call made and saved goes with it, and what is known of a call goes when it is forgotten."""
    warm(hopper, grad=True)
    leaves = inputs(grad=True)
    out = hopper.attention(*leaves)
    refs = [weakref.ref(x) for x in (*leaves, out)]
    del leaves, out
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert any(type(kept) is handing_over.Repeated for kept in gc.get_objects())
    memo.invalidate()
    gc.collect()
    assert not any(type(kept) is handing_over.Repeated for kept in gc.get_objects())


def test_the_override_is_answered_natively(hopper, compiled_override):
    tensors = inputs(grad=True)
    rule = sdpa(backend="sm90")
    sdpa.clear()
    dout = torch.randn(SHAPE).bfloat16()
    found = []
    with rule:
        for _ in range(5):
            before = hopper.counts
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
            found.append((out.detach(), *torch.autograd.grad(out, tensors, dout)))
        after = hopper.counts
        assert after[0] == before[0] + 1
        assert after[1] == before[1] + 1
        with torch.no_grad():
            flat = [x[0] for x in tensors]
            three = [F.scaled_dot_product_attention(*flat, is_causal=True) for _ in range(4)]
        torch.func.vmap(lambda q: q.sum())(tensors[0])
    for results in found[1:]:
        assert same_bits(results, found[0])
    assert all(torch.equal(one, found[0][0][0]) for one in three)
    assert sum(entry.calls for entry in sdpa.report() if entry.outcome == "taken") == 9
    memo.invalidate()
    with rule:
        before = hopper.counts[0]
        F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert hopper.counts[0] == before, "what was forgotten is decided anew"


def test_warm_up_lets_the_first_call_be_native(hopper):
    tensors = inputs(grad=True)
    state, before = torch.random.get_rng_state(), [x.clone() for x in tensors]
    chosen = tilewise.warm_up(*tensors, mask="causal", backend="sm90")
    assert chosen.backend == "sm90"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) and x.grad is None for x, y in zip(tensors, before, strict=True))
    counts = hopper.counts
    out = hopper.attention(*tensors, mask="causal")
    torch.autograd.grad(out, tensors, torch.randn(SHAPE).bfloat16())
    assert hopper.since(counts) == [1, 1, 0]


def test_a_forked_child_goes_to_python(hopper):
    """Handles of CUDA do not outlive a fork, and locks may be held by threads that are not there."""
    warm(hopper)
    tensors = inputs()
    assert answered(*tensors) is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if answered(*tensors) is None else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert answered(*tensors) is not None


def test_the_way_in_python_can_be_asked_for(hopper):
    warm(hopper)
    tensors = inputs()
    before = hopper.counts[0]
    with native.in_python():
        want = hopper.attention(*tensors)
    assert hopper.counts[0] == before
    assert torch.equal(hopper.attention(*tensors), want)
    assert hopper.counts[0] == before + 1


def packed_inputs(*, grad=False, heads=(2, 1), lengths=(70, 0, 33), dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    made = [torch.randn(total, n, 64, generator=generator).to(dtype) for n in (heads[0], heads[1], heads[1])]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return [tensor.requires_grad_(grad) for tensor in made], offsets


def test_packed_calls_are_native_from_the_third_on(machine, monkeypatch):
    tensors, offsets = packed_inputs()
    arguments = {"mask": "causal", "return_lse": True, "backend": machine.backend}

    def call(at=offsets):
        return tilewise.attention_packed(*tensors, at, at, 70, 70, **arguments)

    before = machine.counts[0]
    results = [call() for _ in range(3)]
    assert machine.counts[0] == before + 1
    for found in results[1:]:
        for got, want in zip(found, results[0], strict=True):
            assert torch.equal(got, want)
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    # The table of the offsets is made anew when they change: in place, and as another tensor.
    offsets[1] = 40
    native.use(None)
    want = call()
    native.use(machine.calls)
    shared = offsets.data
    call(shared)
    offsets[1] = 30  # a change that no version of `shared` counts
    call(shared)
    offsets[1] = 40
    for at in (offsets, offsets.clone(), offsets.data):
        before = machine.counts[0]
        assert same_bits(call(at), want)
        assert machine.counts[0] == before + 1
    monkeypatch.setenv("TILEWISE_CHECK", "1")  # Python looks at the offsets
    before = machine.counts[0]
    call()
    assert machine.counts[0] == before


@pytest.mark.parametrize("shape", [(1, 2, 70, 64), (2, 1, 192, 64)], ids=str)
def test_documents_have_the_bits_of_those_in_python(machine, shape):
    """Those of long sequences run as packed ones, whose offsets the mask holds."""
    tensors, dout = inputs(shape), torch.randn(shape).to(torch.bfloat16)
    mask = tilewise.Documents((0, 33, shape[2]), inner=tilewise.Causal())
    before = machine.counts
    results = [step(machine, tensors, dout, mask=mask) for _ in range(5)]
    assert machine.since(before) == [3, 2, 1]
    assert any("_packed" in name for name in machine.driver.launched) == (shape[2] == 192)
    for found in results[1:]:
        assert same_bits(found, results[0])


def test_packed_gradients_have_the_bits_of_those_in_python(machine):
    tensors, offsets = packed_inputs()
    dout = torch.randn(tensors[0].shape).to(torch.bfloat16)

    def step():
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out, lse = tilewise.attention_packed(
            *leaves, offsets, offsets, 70, 70, mask="causal", return_lse=True, backend=machine.backend
        )
        torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
        return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]

    native.use(None)
    want = step()
    native.use(machine.calls)
    before = machine.counts
    for _ in range(4):
        assert same_bits(step(), want)
    assert machine.since(before) == [3, 2, 1]


@pytest.fixture
def turned(hopper, monkeypatch):
    """`attention_out_bshd`, of the backend that is modelled."""
    monkeypatch.setattr(api, "AUTO", hopper.backend)
    return api.attention_out_bshd


@pytest.mark.parametrize("layout", ["views", "bhsd"])
@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        ({}, tilewise.Causal()),
        ({"heads_kv": 1, "seq_kv": 130}, tilewise.Full()),
        ({"shape": (2, 4, 1, 64), "heads_kv": 2, "seq_kv": 90}, tilewise.Full()),
    ],
    ids=["causal", "grouped", "one row"],
)
def test_out_may_come_with_seq_before_heads_and_so_may_its_gradient(hopper, turned, sizes, mask, layout):
    """The bits of `attention` and of its gradients, without a copy in whatever order the inputs lie; and without a view
    once native code knows the call, from the third time on."""
    tensors = inputs(**sizes, layout=layout)
    named = {"mask": mask, "scale": 0.2}
    shape = [tensors[0].shape[dim] for dim in (0, 2, 1, 3)]
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    want, *want_grads = step(hopper, tensors, dout.transpose(1, 2), **named)
    before = hopper.counts
    found = []
    for _ in range(6):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = turned(*leaves, **named)
        out.backward(dout)
        found.append((out, [leaf.grad for leaf in leaves]))
    assert hopper.since(before) == [4, 3, 1]
    for out, grads in found:
        assert out.is_contiguous()
        assert torch.equal(out.transpose(1, 2), want)
        assert same_bits(grads, want_grads)
    assert [out._is_view() for out, _ in found] == [True] * 2 + [False] * 4


def test_no_layout_of_attention_is_called_turned_or_packed(hopper):
    tensors = inputs()
    for layout in (OUT_BSHD, PACKED):
        with pytest.raises(tilewise.InvalidInput, match="layout"):
            hopper.attention(*tensors, mask="causal", layout=layout)


def test_what_is_not_native_is_turned_in_python(hopper, turned):
    """Dropout, terms, and everything while the extension is not to be asked."""
    tensors = inputs()
    named = {"mask": tilewise.Causal()}
    for _ in range(4):
        want = turned(*tensors, **named)
    before = hopper.counts
    with native.in_python():
        assert torch.equal(turned(*tensors, **named), want)
    keep = torch.ones(tensors[0].shape[0], 1, 1, tensors[1].shape[2], dtype=torch.bool)
    for more in ({"dropout": 0.5}, {"keep": keep}):
        out = turned(*tensors, **named, **more)
        assert out.is_contiguous()
        assert out.shape == want.shape
    assert hopper.counts == before


# ---------------------------------------------------------------------------------------------------------------------
# Padding: keys that a boolean tensor hides


def padding(lengths=(70, 33), keys=70):
    """(batch, 1, 1, keys)"""
    return (torch.arange(keys) < torch.tensor(lengths)[:, None])[:, None, None, :]


@pytest.fixture(params=["by a map", "without"])
def mapped(request, monkeypatch):
    """Kernels of such small problems go by a map of their tiles, or not."""
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0 if request.param == "by a map" else 1 << 62)
    memo.invalidate()
    yield request.param == "by a map"
    memo.invalidate()


def test_padded_gradients_have_the_bits_of_those_in_python(machine, mapped):
    """Every batch brings a padding of its own, as a new tensor or as new values of the last."""
    tensors = inputs((2, 2, 70, 64))
    dout = torch.randn_like(tensors[0])
    lengths = [(70, 33), (12, 70), (70, 70), (70, 0), (64, 3)]
    native.use(None)
    want = [step(machine, tensors, dout, mask="causal", keep=padding(one)) for one in lengths]
    native.use(machine.calls)
    before = machine.counts
    keep = padding(lengths[0]).clone()
    for number, one in enumerate(lengths):
        keep = keep.copy_(padding(one)) if number % 2 else padding(one).clone()
        got = step(machine, tensors, dout, mask="causal", keep=keep)
        assert same_bits(got, want[number])
    counts = machine.since(before)
    assert counts == [4, 3, 1], "all but the one that native code is told of, and the first backward of the others"


@pytest.mark.parametrize(
    "mask",
    [tilewise.Documents((0, 30, 70), inner=tilewise.Causal()), tilewise.PrefixLM(20), tilewise.Window(10, 5)],
    ids=str,
)
def test_padding_beside_any_rule(hopper, mapped, mask):
    """Rules that are themselves read from tensors, which a recipe holds, among them."""
    tensors, keep = inputs((2, 2, 70, 64)), padding()
    dout = torch.randn_like(tensors[0])
    native.use(None)
    want = step(hopper, tensors, dout, mask=mask, keep=keep)
    native.use(hopper.calls)
    before = hopper.counts
    for _ in range(3):
        got = step(hopper, tensors, dout, mask=mask, keep=keep)
        assert same_bits(got, want)
    assert hopper.since(before) == [2, 1, 1]


def test_layers_share_what_is_made_of_their_padding(hopper, mapped):
    tensors, keep = inputs((2, 2, 70, 64)), padding()
    for _ in range(3):
        hopper.attention(*tensors, keep=keep)
    launches = []
    for given in (keep, keep, padding(), padding((70, 70))):
        hopper.driver.launched.clear()
        hopper.attention(*tensors, keep=given)
        launches.append(len(hopper.driver.launched))
    assert launches == ([1, 1, 3, 3] if mapped else [1] * 4)


def test_padding_of_any_strides_and_alignment(hopper):
    """Each is a call of its own, and none is taken for another."""
    tensors = inputs((2, 2, 70, 64))
    flags = padding()
    kinds = [flags, flags.squeeze(1), flags.expand(2, 2, 1, 70), flags.expand(2, 1, 70, 70), flags[:1]]
    for begin, step_ in ((0, 1), (1, 1), (2, 1), (0, 2)):
        wide = torch.zeros(2, 1, 1, 150, dtype=torch.bool)
        one = wide[..., begin : begin + 70 * step_ : step_]
        kinds.append(one.copy_(flags))
    native.use(None)
    want = [hopper.attention(*tensors, keep=keep) for keep in kinds]
    native.use(hopper.calls)
    before = hopper.counts[0]
    for _ in range(4):
        for keep, wanted in zip(kinds, want, strict=True):
            assert torch.equal(hopper.attention(*tensors, keep=keep), wanted)
    assert hopper.counts[0] >= before + len(kinds), "most of them are native in the end"


def test_padding_is_not_taken_for_none_nor_none_for_padding(hopper):
    tensors, keep = inputs((2, 2, 70, 64)), padding()
    native.use(None)
    want = [hopper.attention(*tensors, **more) for more in ({}, {"keep": keep})]
    native.use(hopper.calls)
    for _ in range(4):
        for more, wanted in zip(({}, {"keep": keep}), want, strict=True):
            assert torch.equal(hopper.attention(*tensors, **more), wanted)


def test_a_mask_of_rows_and_keys_is_left_to_python(hopper):
    """Forward and backward share what one read of it gives there."""
    tensors = inputs((2, 2, 70, 64))
    keep = torch.rand(2, 1, 70, 70) < 0.7
    before = hopper.counts
    for _ in range(4):
        hopper.attention(*tensors, keep=keep)
    assert hopper.counts == before


def test_padding_that_changes_before_the_backward_is_refused(hopper, mapped):
    tensors, keep = inputs((2, 2, 70, 64)), padding().clone()
    dout = torch.randn_like(tensors[0])
    for _ in range(4):
        step(hopper, tensors, dout, keep=keep)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    before = hopper.counts[0]
    out = hopper.attention(*leaves, keep=keep)
    assert hopper.counts[0] == before + 1
    keep[1] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_hooks_see_the_padding_that_is_saved(hopper, mapped):
    tensors, keep = inputs((2, 2, 70, 64)), padding()
    dout = torch.randn_like(tensors[0])
    for _ in range(4):
        want = step(hopper, tensors, dout, keep=keep)
    seen = []

    def pack(tensor):
        seen.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = step(hopper, tensors, dout, keep=keep)
    assert seen == [torch.bfloat16] * 4 + [torch.float32, torch.bool]
    assert same_bits(got, want)


def test_a_wrong_padding_is_refused_as_ever(hopper):
    tensors = inputs((2, 2, 70, 64))
    for _ in range(3):
        hopper.attention(*tensors, keep=padding())
    for wrong in (padding().float(), padding(keys=69), padding()[..., None], "padding"):
        with pytest.raises(tilewise.InvalidInput):
            hopper.attention(*tensors, keep=wrong)


def test_a_padded_out_may_come_with_seq_before_heads(hopper, turned):
    tensors, keep = inputs((2, 2, 70, 64)), padding()
    shape = [tensors[0].shape[dim] for dim in (0, 2, 1, 3)]
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    want, *want_grads = step(hopper, tensors, dout.transpose(1, 2), mask="causal", keep=keep)
    before = hopper.counts
    for _ in range(5):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = turned(*leaves, mask="causal", keep=keep)
        out.backward(dout)
        assert out.is_contiguous()
        assert torch.equal(out.transpose(1, 2), want)
        assert all(torch.equal(leaf.grad, other) for leaf, other in zip(leaves, want_grads, strict=True))
    assert hopper.since(before) == [3, 2, 1]
    assert not out._is_view()


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("keep", [None, padding()], ids=["plain", "padded"])
@pytest.mark.parametrize("by", ["native code", "Python"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [(lambda x: x[:1], r"k .*\(1, 2, 70, 64\)"), (lambda x: x.view(torch.float16), "float16")],
    ids=["size", "dtype"],
)
def test_inputs_whose_data_was_exchanged_are_not_read(hopper, changed, message, by, keep, return_lse):
    """Their strides may be the same: kernels would read what lies behind them, or read other numbers."""
    tensors = inputs((2, 2, 70, 64))
    dout = torch.randn_like(tensors[0])

    def forward():
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        results = hopper.attention(*leaves, keep=keep, return_lse=return_lse)
        return leaves, results[0] if return_lse else results

    for _ in range(4):
        forward()[1].backward(dout)
    if by == "Python":
        native.use(None)
    leaves, out = forward()
    leaves[1].data = changed(leaves[1].detach())
    with pytest.raises(tilewise.InvalidInput, match=message):
        out.backward(dout)


@pytest.mark.parametrize("by", ["native code", "Python"])
@pytest.mark.parametrize("changed", [lambda x: x[:2], lambda x: x.long()], ids=["size", "dtype"])
def test_offsets_whose_data_was_exchanged_are_not_read(hopper, changed, by):
    packed = [tensor[0].transpose(0, 1).contiguous() for tensor in inputs()]
    dout = torch.randn_like(packed[0])

    def forward():
        offsets = torch.tensor([0, 30, SHAPE[2]], dtype=torch.int32)
        leaves = [tensor.clone().requires_grad_() for tensor in packed]
        return offsets, tilewise.attention_packed(*leaves, offsets, offsets, backend="sm90")

    for _ in range(5):
        forward()[1].backward(dout)
    if by == "Python":
        native.use(None)
    before = hopper.counts
    offsets, out = forward()
    assert hopper.counts[0] - before[0] == (by == "native code")
    offsets.data = changed(offsets)
    with pytest.raises(tilewise.InvalidInput, match="cu_seqlens_q"):
        out.backward(dout)


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "out", "lse"])
def test_what_hooks_give_back_in_another_dtype_is_not_read(hopper, place):
    """As of activations that are kept in fewer bits, and come back as they were kept."""
    tensors = inputs()
    dout = torch.randn_like(tensors[0])
    for _ in range(4):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        hopper.attention(*leaves, return_lse=True)[0].backward(dout)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return len(saved) - 1

    def unpack(number):
        tensor = saved[number].detach()
        other = torch.float16 if tensor.dtype == torch.bfloat16 else torch.int32
        return tensor.view(other) if number == place else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out, _ = hopper.attention(*leaves, return_lse=True)
    with pytest.raises(tilewise.InvalidInput, match="as in the forward"):
        out.backward(dout)


@pytest.mark.parametrize("keep", [None, padding()], ids=["plain", "padded"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "out and lse"])
def test_a_graph_that_is_kept_gives_its_gradients_again_until_a_hook_lets_go_of_it(hopper, return_lse, keep):
    tensors = inputs((2, 2, 70, 64))
    dout = torch.randn_like(tensors[0])
    want = None
    for _ in range(4):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = hopper.attention(*leaves, keep=keep, return_lse=return_lse)
        out = out[0] if return_lse else out
        want = want or torch.autograd.grad(out, leaves, dout, retain_graph=True)
        got = [torch.autograd.grad(out, leaves, dout, retain_graph=True)]

        def let_go(grad, out=out, leaves=leaves, got=got) -> None:
            if len(got) == 1:
                got.append(None)  # it is called again inside
                got[1] = torch.autograd.grad(out, leaves, dout)

        out.register_hook(let_go)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, leaves, dout)
        for one in got:
            assert all(map(torch.equal, one, want))
    assert hopper.counts[1] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Extra tensors of every form


def test_slots_and_options_are_those_of_the_header():
    """The enumerations of calls.h, and what Python hands over in their order."""
    header = (Path(library.__file__).parent / "calls.h").read_text()

    def names(enum: str) -> list[str]:
        body = re.search(rf"enum {enum} {{(.*?)}}", header, re.DOTALL)[1]
        return [name.strip().lower() for name in body.split(",")]

    assert names("Slot") == [*SLOTS, "slots"]
    assert names("Option") == [*Options._fields, "options"]
    assert [*SLOTS.values()] == [*recipes.EXTRAS]
    operands = names("Operand")
    assert operands[:-2] == [*recipes.OPERANDS[: len(operands) - 2]]
    assert recipes.OPERANDS[len(operands) - 2 :] == recipes.EXTRAS


CACHES = {
    "lengths": {},
    "all of it": {"lengths": None},
    "pages": {"page_table": torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)},
    "rows and starts": {
        "rows": torch.tensor([1, 0], dtype=torch.int32), "starts": torch.tensor([0, 5], dtype=torch.int32)
    },
    "slopes and lse": {"alibi": torch.tensor([0.5, 0.25]), "return_lse": True},
    "a sink": {"sink": torch.tensor([0.5, 0.25])},
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_a_cached_call_is_native_at_its_third_time(hopper, name):
    arguments = {"lengths": torch.tensor([20, 31], dtype=torch.int32), "backend": "sm90"} | CACHES[name]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 2, 64, generator=generator).bfloat16()
    shape = (4, 16, 2, 64) if "page_table" in arguments else (2, 32, 2, 64)
    k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    before = hopper.counts
    first, _, third = (tilewise.attention_cached(q, k, v, **arguments) for _ in range(3))
    assert hopper.since(before) == [1, 0, 0]
    pairs = zip(first, third, strict=True) if isinstance(first, tuple) else [(first, third)]
    for one, other in pairs:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    longer = arguments | {"lengths": torch.tensor([32, 2], dtype=torch.int32)}
    native_out = tilewise.attention_cached(q, k, v, **longer)  # another content, which the device reads
    assert hopper.since(before) == [2, 0, 0] or arguments["lengths"] is None
    with native.in_python():
        python_out = tilewise.attention_cached(q, k, v, **longer)
    pairs = zip(native_out, python_out, strict=True) if isinstance(first, tuple) else [(native_out, python_out)]
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("named", ["alibi", "sink"])
def test_terms_with_arguments_of_their_own_are_native(hopper, named):
    """Constants in float32 are; what is learned, and what every call casts, is left to Python."""
    tensors, slopes = inputs(), torch.tensor([0.5, 0.25])
    dout = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    native.use(None)
    want = step(hopper, tensors, dout, mask="causal", **{named: slopes})
    native.use(hopper.calls)
    before = hopper.counts
    for _ in range(5):
        assert same_bits(step(hopper, tensors, dout, mask="causal", **{named: slopes}), want)
    assert hopper.since(before) == [4, 3, 1]
    for other in (slopes.clone().requires_grad_(), slopes.bfloat16()):
        for _ in range(3):
            hopper.attention(*tensors, mask="causal", **{named: other})
    assert hopper.since(before) == [4, 3, 1]


def test_a_mask_class_of_a_users_is_native(hopper):
    """As CONTRIBUTING.md describes one: a frozen class in one place, and no list to enter it into."""

    @dataclasses.dataclass(frozen=True)
    class EveryOther(tilewise.masks.Mask):
        """Row i sees the keys to i, and an even number of them."""

        kind = "every_other"

        @classmethod
        def from_text(cls, text):
            return cls()

        def __str__(self):
            return self.kind

        def span(self, row, seq_q, seq_kv):
            return 0, min(seq_kv, (row + 2) // 2 * 2)

        def spans(self, rows, seq_q, seq_kv):
            return torch.zeros_like(rows), ((rows + 2) // 2 * 2).clamp(max=seq_kv)

    tensors = inputs()
    before = hopper.counts
    first, _, third = (hopper.attention(*tensors, mask=EveryOther()) for _ in range(3))
    assert hopper.since(before) == [1, 0, 0]
    assert torch.equal(first, third)
    want = tilewise.attention(*(x.double() for x in tensors), mask=EveryOther(), backend="reference")
    assert_close(third, want, budget(torch.bfloat16, SHAPE[2]))


def test_a_graph_that_is_retained_is_native_each_time(hopper):
    tensors = inputs()
    dout = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(4):
        want = step(hopper, tensors, dout)[1:]
    leaves = inputs(grad=True)
    before = hopper.counts
    out = hopper.attention(*leaves)
    for _ in range(3):
        assert same_bits(torch.autograd.grad(out, leaves, dout, retain_graph=True), want)
    assert hopper.since(before) == [1, 3, 0]


@pytest.mark.parametrize(("value", "answers"), [("0", True), ("", True), ("1", False)])
def test_checks_are_off_where_the_environment_says_0(hopper, monkeypatch, value, answers):
    for _ in range(2):
        hopper.attention(*inputs(), keep=padding()[:1])
    monkeypatch.setenv("TILEWISE_CHECK", value)
    before = hopper.counts
    hopper.attention(*inputs(), keep=padding()[:1])
    assert hopper.since(before) == [int(answers), 0, 0]
