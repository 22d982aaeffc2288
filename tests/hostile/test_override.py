"""The override in hostile hands: switches thrown under a rule that is kept, options that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from support import assert_close, budget
from tilewise import InvalidInput
from tilewise.integrations.sdpa import sdpa
from tilewise.native import library as extension

MATH, FLASH, EFFICIENT = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


@pytest.fixture(autouse=True)
def _fresh_report(override_kernel):
    sdpa.clear()
    yield
    sdpa.clear()


def outcomes() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in sdpa.report():
        found[entry.outcome] += entry.calls
    sdpa.clear()
    return found


def kernel_of(out: torch.Tensor) -> str:
    """What computed a result that needs gradients: PyTorch's name of its node."""
    return type(out.grad_fn).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Switches thrown while a rule is kept

SWITCHED = {
    "only math": lambda: sdpa_kernel(MATH),
    "flash off": lambda: sdpa_kernel([MATH, EFFICIENT]),
    "math first": lambda: sdpa_kernel([MATH, FLASH, EFFICIENT, SDPBackend.CUDNN_ATTENTION], set_priority=True),
}


@pytest.mark.parametrize("how", SWITCHED)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("guards", [True, False])
def test_a_kept_rule_obeys_switches_thrown_later_and_forgets_them_afterwards(monkeypatch, how, masked, guards):
    if not guards:
        monkeypatch.setattr("tilewise.call.memory.GUARDS_HOLD", False)
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    mask = torch.zeros(16, 16) if masked else None
    ask = lambda: F.scaled_dot_product_attention(q, k, v, mask)
    with SWITCHED[how]():
        want = kernel_of(ask())
    rule = sdpa(backend="torch-flash")
    for _ in range(3):
        with rule:
            for _ in range(2):
                taken = ask()
            assert outcomes() == {"taken": 2}
            with SWITCHED[how]():
                for _ in range(2):
                    left = ask()
                    assert kernel_of(left) == want
                assert outcomes() == {"left": 2}
        assert_close(left, taken, budget(torch.float32, 16))


@pytest.mark.parametrize("how", SWITCHED)
def test_so_does_a_rule_that_first_saw_them_thrown(how):
    """What was left because of a switch is taken when it is thrown back."""
    q, k, v = (torch.randn(4, 16, 8) for _ in range(3))
    rule = sdpa(backend="torch-flash")
    for _ in range(2):
        with SWITCHED[how](), rule:
            for _ in range(2):
                F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"left": 2}
        with rule:
            F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"taken": 1}


def test_flags_of_the_backends_module_count_like_the_context_manager():
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    with sdpa(backend="torch-flash"):
        F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"taken": 1}
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            F.scaled_dot_product_attention(q, k, v)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert outcomes() == {"left": 1}
        F.scaled_dot_product_attention(q, k, v)
        assert outcomes() == {"taken": 1}


def test_the_wish_for_determinism_is_asked_about_anew():
    asked = []
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    mask = torch.zeros(16, 16)
    with sdpa(when=lambda problem: asked.append(problem.deterministic)):
        for arguments in ((q, k, v), (q, k, v, mask)):
            for wish in (False, True, False, True, True):
                torch.use_deterministic_algorithms(wish)
                try:
                    F.scaled_dot_product_attention(*arguments)
                finally:
                    torch.use_deterministic_algorithms(False)
    assert asked == [False, True] * 2


def test_each_switch_is_part_of_what_is_remembered():
    """Whatever PyTorch lets a program throw, a condition that was asked before is asked again under it."""
    from tilewise.integrations.sdpa.decision import _switches

    setters = {
        "_set_sdp_use_flash": (False, True),
        "_set_sdp_use_mem_efficient": (False, True),
        "_set_sdp_use_cudnn": (False, True),
        "_set_sdp_use_overrideable": (False, True),
        "_set_sdp_use_fa3": (True, False),
        "_set_math_sdp_allow_fp16_bf16_reduction": (True, False),
        "_set_sdp_priority_order": ([0, 1, 2, 3, 4], torch._C._get_sdp_priority_order()),
    }
    found = {_switches()}
    there = {name: values for name, values in setters.items() if hasattr(torch._C, name)}
    for name, (thrown, back) in there.items():
        getattr(torch._C, name)(thrown)
        try:
            found.add(_switches())
        finally:
            getattr(torch._C, name)(back)
    assert len(found) == 1 + len(there)


# ---------------------------------------------------------------------------------------------------------------------
# Options, and tensors that are not what their memory holds


@pytest.mark.parametrize("entry", [sdpa, sdpa.enable], ids=["block", "enable"])
@pytest.mark.parametrize(
    ("positional", "named", "told"),
    [
        ((), {"foo": 1}, "foo=1"),
        ((), {"backends": "tiled"}, "write backend="),
        ((), {"on_falback": "warn"}, "write on_fallback="),
        ((True,), {}, "True, unnamed"),
        ((torch.nn.Identity(),), {"when": None}, "Identity"),
    ],
)
def test_an_option_that_does_not_exist_is_answered_with_those_that_do(entry, positional, named, told):
    with pytest.raises(InvalidInput, match=r"when, on_fallback, backend(.|\n)*What to do") as raised:
        entry(*positional, **named)
    assert told in str(raised.value)
    assert sdpa.rule is None


ODD = {
    "negated": lambda tensor: torch._neg_view(-tensor),
    "zeros": lambda tensor: torch._efficientzerotensor(tensor.shape),
}


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("place", range(3))
def test_a_tensor_whose_memory_does_not_hold_its_values(monkeypatch, backend, guards, how, place):
    """PyTorch negates lazily, and makes zeros without memory: such tensors get some, also after a plain call."""
    if not guards:
        monkeypatch.setattr("tilewise.call.memory.GUARDS_HOLD", False)
    plain = [torch.randn(4, 16, 8) for _ in range(3)]
    odd = [ODD[how](tensor) if i == place else tensor for i, tensor in enumerate(plain)]
    want = F.scaled_dot_product_attention(*(tensor.clone() for tensor in odd))
    with sdpa(backend=backend):
        for _ in range(2):
            F.scaled_dot_product_attention(*plain)
        for _ in range(2):
            assert_close(F.scaled_dot_product_attention(*odd), want, budget(torch.float32, 16))
    assert outcomes()["fallback"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Kernels of other libraries, in processes of their own: what is registered stays


BEFORE_OURS = """
import sys, warnings, torch, torch.nn.functional as F
from torch import library
import tilewise
warnings.simplefilter("ignore")
no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
asked = []
def other(original):
    def kernel(*arguments, **options):
        asked.append(original)
        return original.call_boxed(no_keys, *arguments, **options)
    return kernel
kernels = {key: library.get_kernel("aten::scaled_dot_product_attention", key) for key in ("CPU", "AutogradCPU")}
registered = library.Library("aten", "IMPL")
for key, original in kernels.items():
    registered.impl("scaled_dot_product_attention", other(original), key)
tensors = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
want = F.scaled_dot_product_attention(*tensors, is_causal=True)
with tilewise.sdpa(when=lambda problem: False):
    asked.clear()
    assert torch.equal(F.scaled_dot_product_attention(*tensors, is_causal=True), want) and len(asked) == 1
    compiled = torch.compile(lambda *given: F.scaled_dot_product_attention(*given, is_causal=True), backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), want)
assert torch.equal(F.scaled_dot_product_attention(*tensors, is_causal=True), want)
print("same")
"""


@pytest.mark.parametrize("native", ["off", "on"])
def test_a_kernel_in_python_that_was_there_before_ours_is_passed_and_does_not_lead_back(native):
    sources = str(Path(tilewise.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": sources, extension.SETTING: native}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_OURS], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr[-4000:]


# ---------------------------------------------------------------------------------------------------------------------
# Tensors of other kinds behind a call that is remembered

ODD_KINDS = {
    "a key in another dtype": (1, torch.Tensor.double),
    "a value in another dtype": (2, torch.Tensor.half),
    "a sparse query": (0, torch.Tensor.to_sparse),
    "a sparse key": (1, torch.Tensor.to_sparse),
    "a mask in another dtype": (3, torch.Tensor.double),
    "a sparse mask": (3, torch.Tensor.to_sparse),
}


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize(
    "rule", [{}, {"backend": "tiled"}, {"when": lambda problem: True}], ids=["auto", "backend", "when"]
)
@pytest.mark.parametrize("odd", ODD_KINDS)
def test_what_pytorch_refuses_it_still_refuses_and_the_next_call_is_what_it_was(monkeypatch, guards, rule, odd):
    if not guards:
        monkeypatch.setattr("tilewise.call.memory.GUARDS_HOLD", False)
    place, change = ODD_KINDS[odd]
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)] + [torch.randn(8, 8)] * (place == 3)

    def answer(tensors: list[torch.Tensor]) -> tuple[type, str] | torch.Size:
        try:
            return F.scaled_dot_product_attention(*tensors).shape
        except Exception as error:
            return type(error), str(error)

    changed = [change(tensor) if number == place else tensor for number, tensor in enumerate(tensors)]
    wanted = answer(changed)
    for first, second in ((tensors, changed), (changed, tensors)):
        with sdpa(**rule):
            for given in (first, first, first, second, second):
                assert answer(given) == (wanted if given is changed else tensors[0].shape)
        said = outcomes()
        usual, odd = (3, 2) if first is tensors else (2, 3)
        assert said.pop("fallback") == odd
        assert list(said.values()) == [usual]


def test_lazy_clones_stay_lazy():
    """PyTorch copies such a tensor when somebody asks for memory to write to, even if only for its address."""
    want = F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 16)] * 3)
    for rule in (sdpa(), sdpa(backend="torch-flash"), sdpa(backend="tiled", when=lambda problem: True)):
        for attend in (F.scaled_dot_product_attention, tilewise.scaled_dot_product_attention, tilewise.attention):
            for _ in range(3):
                clones = [torch._lazy_clone(torch.ones(1, 2, 8, 16)) for _ in range(3)]
                with rule:
                    assert_close(attend(*clones), want, budget(torch.float32, 8))
                assert all(map(torch._C._is_cow_tensor, clones))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["auto", "tiled", "torch-flash"])
def test_fake_tensors_like_a_call_that_is_remembered_have_no_address_to_be_read(backend):
    real = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in real]
    with sdpa(backend=backend):
        for _ in range(3):
            F.scaled_dot_product_attention(*real)
        assert F.scaled_dot_product_attention(*fake).shape == real[0].shape
