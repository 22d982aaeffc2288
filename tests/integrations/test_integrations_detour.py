"""The compiled kernel of the override: what it lets pass, what it does not, and machines that cannot build it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import CompileError
from tilewise.integrations.sdpa import FallbackWarning, report, sdpa
from tilewise.native import library as extension

needs_compiler = pytest.mark.skipif(extension._why_not() is not None, reason=str(extension._why_not()))


class Asked:
    """How many calls came to the kernel in Python, while the compiled one stands before it: `len(asked)`."""

    def __len__(self) -> int:
        return sum(record.calls for record in report.lines())


@pytest.fixture
def asked(compiled_override):
    sdpa.clear()
    return Asked()


def inputs(*shape: int, dtype=torch.float32):
    return [torch.randn(*(shape or (1, 2, 8, 16)), dtype=dtype) for _ in range(3)]


def changed():
    """Calls that differ from F.scaled_dot_product_attention(q, k, v) in one thing each."""
    q, k, v = inputs()
    mask = torch.ones(8, 8, dtype=torch.bool)
    longer = [torch.cat([x, x], 2) for x in (k, v)]
    shifted = torch.randn(q.numel() + 1)[1:].view(q.shape)
    return {
        "length": lambda: F.scaled_dot_product_attention(q, *longer),
        "dtype": lambda: F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
        "strides": lambda: F.scaled_dot_product_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        "alignment": lambda: F.scaled_dot_product_attention(shifted, k, v),
        "gradient": lambda: F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v),
        "grad mode": torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v)),
        "mask": lambda: F.scaled_dot_product_attention(q, k, v, mask),
        "dropout": lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "scale": lambda: F.scaled_dot_product_attention(q, k, v, scale=0.5),
        "grouped": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }


@needs_compiler
def test_a_call_left_before_never_sees_python_again_and_is_counted(asked):
    q, k, v = inputs()
    with sdpa():
        first = F.scaled_dot_product_attention(q, k, v)
        for _ in range(9):
            assert F.scaled_dot_product_attention(*inputs()).shape == first.shape
        again = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(first, again)
    assert len(asked) == 1
    assert [(entry.outcome, entry.calls) for entry in sdpa.report()] == [("left", 11)]
    sdpa.clear()
    assert sdpa.report() == []


@needs_compiler
@pytest.mark.parametrize("what", changed())
def test_a_call_that_differs_is_decided_by_itself(asked, what):
    call = changed()[what]
    with sdpa():
        F.scaled_dot_product_attention(*inputs())
        call()
        assert len(asked) == 2
        outcome = call()
        assert len(asked) == 2
    assert outcome.isfinite().all()


@needs_compiler
def test_the_wish_for_determinism_is_part_of_what_is_remembered(asked):
    q, k, v = inputs()
    with sdpa(when=lambda problem: False):
        for _ in range(2):
            for wish in (False, True):
                torch.use_deterministic_algorithms(wish)
                try:
                    F.scaled_dot_product_attention(q, k, v)
                finally:
                    torch.use_deterministic_algorithms(False)
    assert len(asked) == 2


@needs_compiler
def test_so_are_the_switches_of_pytorchs_kernels(asked):
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        for _ in range(3):
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(q, k, v)
        assert len(asked) == 1
        F.scaled_dot_product_attention(q, k, v)
        assert len(asked) == 2
    assert {entry.outcome: entry.calls for entry in sdpa.report()} == {"left": 3, "taken": 1}


class Marked(torch.Tensor):
    """A subclass that PyTorch's dispatcher does not tell from a tensor."""


@needs_compiler
def test_subclasses_leave_nothing_behind_for_plain_tensors(asked):
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        for _ in range(2):
            with torch._C.DisableTorchFunctionSubclass():
                F.scaled_dot_product_attention(q.as_subclass(Marked), k, v)
            F.scaled_dot_product_attention(q, k, v)
    assert {entry.outcome: entry.calls for entry in sdpa.report()} == {"fallback": 2, "taken": 2}


@needs_compiler
def test_rules_remember_for_themselves(asked):
    q, k, v = inputs()
    leaves, takes = sdpa(), sdpa(backend="tiled")
    with leaves:
        F.scaled_dot_product_attention(q, k, v)
        for _ in range(3):
            with takes:
                F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v)
    assert len(asked) == 4
    assert {entry.outcome: entry.calls for entry in sdpa.report()} == {"left": 4, "taken": 3}


@needs_compiler
def test_a_rule_entered_again_still_knows(asked):
    rule = sdpa()
    for _ in range(3):
        with rule:
            F.scaled_dot_product_attention(*inputs())
    assert len(asked) == 1
    for _ in range(3):
        with sdpa():
            F.scaled_dot_product_attention(*inputs())
    assert len(asked) == 4


@needs_compiler
def test_what_is_taken_or_announced_always_comes_to_python(asked):
    q, k, v = inputs()
    with sdpa(backend="tiled"):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
    assert len(asked) == 3
    with sdpa(on_fallback="warn"):
        for _ in range(3):
            with pytest.warns(FallbackWarning):
                F.scaled_dot_product_attention(*(x[None] for x in (q, k, v)))
    assert len(asked) == 6


@needs_compiler
def test_more_calls_than_are_kept_are_asked_again_and_right(asked):
    with sdpa():
        for _ in range(2):
            for length in range(1, 41):
                q, k, v = inputs(1, 1, length, 4)
                got = F.scaled_dot_product_attention(q, k, v)
                torch.testing.assert_close(got, torch.softmax(q @ k.mT / 2, -1) @ v)
    assert 40 < len(asked) <= 80
    assert sum(entry.calls for entry in sdpa.report()) == 80


@needs_compiler
def test_threads_that_nothing_governs_pass(asked):
    def elsewhere():
        F.scaled_dot_product_attention(*inputs())

    with sdpa():
        pass  # a thread that was in a block, and is in none
    entered, done = threading.Event(), threading.Event()

    def hold():
        with sdpa():
            entered.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait()
    elsewhere()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    done.set()
    holder.join()
    assert len(asked) == 0
    assert sdpa.report() == []


@needs_compiler
def test_errors_are_pytorchs_own_and_nothing_is_remembered_of_them(asked):
    q, _, v = inputs()
    wrong = torch.randn(1, 2, 8, 17)
    with sdpa():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(q, wrong, v)
    assert len(asked) == 2


@pytest.mark.parametrize("missing", ["compiler", "cache"])
def test_without_a_compiler_or_a_cache_the_reason_is_said(monkeypatch, tmp_path, missing):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "_search", extension._Search())
    monkeypatch.delenv(extension.SETTING)
    if missing == "compiler":
        monkeypatch.setattr(extension, "_compiler", list)
        monkeypatch.delenv("CXX", raising=False)
        expected = "no C\\+\\+ compiler"
    else:
        monkeypatch.setattr(extension.cache, "root", lambda: None)
        expected = "no cache folder"
    if missing == "cache" and extension._why_not():
        pytest.skip(str(extension._why_not()))
    with pytest.raises(CompileError, match=expected):
        sdpa.compile()
    assert extension.loaded() is None
