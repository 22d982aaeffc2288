"""The compiled kernel of the override: what it lets pass, what it does not, and machines that cannot build it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import queue
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import call_changes
from tilewise import CompileError, memo
from tilewise.hook.dispatch import _HANDED, _TORCH_HANDS_THE_CONTEXT
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
@pytest.mark.parametrize("what", [*call_changes.INPUTS, *call_changes.OPTIONS, "grad mode", "grouped"])
def test_a_call_that_differs_is_decided_by_itself(asked, what):
    tensors = inputs(1, 2, 16, 16)
    if what == "grad mode":
        call = torch.no_grad()(lambda: F.scaled_dot_product_attention(*tensors))
    else:
        given, options = (call_changes.other_calls(*tensors) | {"grouped": (tensors, {"enable_gqa": True})})[what]
        call = lambda: F.scaled_dot_product_attention(*given, **options)
    with sdpa():
        F.scaled_dot_product_attention(*tensors)
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


def counted() -> int:
    return sum(entry.calls for entry in sdpa.report())


class Worker:
    """A thread that does what it is given, one thing after another."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue = queue.SimpleQueue()
        self._made: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (work := self._given.get()) is not None:
            self._made.put(work())

    def __call__(self, work):
        self._given.put(work)
        return self._made.get(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)


def calls_counted(tensors, times: int = 3) -> int:
    """How many of several calls that look alike meet a rule."""
    before = counted()
    for _ in range(times):
        F.scaled_dot_product_attention(*tensors)
    return counted() - before


@needs_compiler
def test_what_a_thread_knows_of_rules_ends_when_they_change(asked):
    """Threads that were there before a rule, and that have made calls under another, see every change at once."""
    tensors = inputs()
    with Worker() as early:
        assert early(lambda: calls_counted(tensors)) == 0
        for _ in range(3):
            sdpa.enable()
            try:
                with Worker() as late:
                    for worker in (early, late):
                        assert worker(lambda: calls_counted(tensors)) == 3
                with sdpa(when=lambda problem: False) as inner:
                    assert calls_counted(tensors) == 3
                    assert early(lambda: calls_counted(tensors)) == 3
                    early(inner.__enter__)
                    assert early(lambda: calls_counted(tensors)) == 3
                    early(lambda: inner.__exit__(None, None, None))
            finally:
                sdpa.disable()
            assert early(lambda: calls_counted(tensors)) == 0
            assert calls_counted(tensors) == 0
        with sdpa():
            assert early(lambda: calls_counted(tensors)) == 0
            assert calls_counted(tensors) == 3


@needs_compiler
def test_a_block_ends_in_one_thread_while_others_are_in_it(asked):
    tensors, rule = inputs(), sdpa()
    with Worker() as one, Worker() as other:
        for worker in (one, other):
            worker(rule.__enter__)
            assert worker(lambda: calls_counted(tensors)) == 3
        one(lambda: rule.__exit__(None, None, None))
        assert one(lambda: calls_counted(tensors)) == 0
        assert other(lambda: calls_counted(tensors)) == 3
        other(lambda: rule.__exit__(None, None, None))
        assert other(lambda: calls_counted(tensors)) == 0


@needs_compiler
def test_nested_blocks_are_told_apart_from_call_to_call(asked):
    tensors = inputs()
    outer, inner = sdpa(), sdpa(when=lambda problem: False)
    with outer:
        for _ in range(4):
            F.scaled_dot_product_attention(*tensors)
            with inner:
                F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(*tensors)
    F.scaled_dot_product_attention(*tensors)
    assert len(asked) == 2
    assert sorted(entry.calls for entry in sdpa.report()) == [4, 5]


@needs_compiler
def test_a_context_carries_its_block(asked):
    tensors = inputs()
    outside = contextvars.copy_context()
    with sdpa():
        inside = contextvars.copy_context()
        for _ in range(2):
            assert calls_counted(tensors) == 3
            assert outside.run(calls_counted, tensors) == 0
            assert inside.run(outside.run, calls_counted, tensors) == 0
    for _ in range(2):
        assert calls_counted(tensors) == 0
    with sdpa(when=lambda problem: False):  # somebody is governed again
        assert inside.run(calls_counted, tensors) == 3
        assert outside.run(calls_counted, tensors) == 0


@needs_compiler
def test_tasks_take_turns_in_one_thread(asked):
    tensors = inputs()

    async def governed(rule):
        met = 0
        with rule:
            for _ in range(4):
                met += calls_counted(tensors, 1)
                await asyncio.sleep(0)
        return met

    async def free():
        met = 0
        for _ in range(4):
            met += calls_counted(tensors, 1)
            await asyncio.sleep(0)
        return met

    async def together():
        return await asyncio.gather(governed(sdpa()), free(), governed(sdpa(when=lambda problem: False)), free())

    assert asyncio.run(together()) == [4, 0, 4, 0]
    assert sorted(entry.calls for entry in sdpa.report()) == [4, 4]


@needs_compiler
def test_a_thread_that_autograd_hands_a_block_is_in_it_as_long_as_it_has_it(asked):
    tensors = inputs()
    erase = getattr(torch._C, "_remove_obj_from_tls", lambda key: torch._C._stash_obj_in_tls(key, None))
    with Worker() as device_thread, sdpa():
        handed = contextvars.copy_context() if _TORCH_HANDS_THE_CONTEXT else torch._C._get_obj_in_tls(_HANDED)
        for _ in range(2):
            assert device_thread(lambda: calls_counted(tensors)) == 0
            device_thread(lambda: torch._C._stash_obj_in_tls(_HANDED, handed))
            assert device_thread(lambda: calls_counted(tensors)) == 3
            device_thread(lambda: erase(_HANDED))


@needs_compiler
def test_forgotten_decisions_and_rules_that_are_gone_are_known_to_no_thread(asked):
    tensors = inputs()
    with Worker() as worker:
        for _ in range(3):  # a new rule may lie where the last one did
            for rule in (sdpa(), sdpa(backend="tiled")):
                worker(rule.__enter__)
                for _ in range(3):
                    worker(lambda: F.scaled_dot_product_attention(*tensors))
                worker(lambda rule=rule: rule.__exit__(None, None, None))
                del rule
                gc.collect()
    assert {entry.outcome: entry.calls for entry in sdpa.report()} == {"left": 9, "taken": 9}
    with Worker() as worker, sdpa() as rule:
        worker(rule.__enter__)
        for _ in range(2):
            before = len(asked)
            for call in (calls_counted, lambda tensors: worker(lambda: calls_counted(tensors))):
                assert call(tensors) == 3
            assert len(asked) == before + 1
            memo.invalidate()
        worker(lambda: rule.__exit__(None, None, None))


@needs_compiler
def test_no_call_is_lost_from_the_count(asked):
    tensors, threads, times = inputs(), 4, 500
    start = threading.Barrier(threads)

    def work():
        start.wait()
        for _ in range(times):
            F.scaled_dot_product_attention(*tensors)

    sdpa.enable()
    try:
        F.scaled_dot_product_attention(*tensors)
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sdpa.disable()
    assert len(asked) == 1
    assert [entry.calls for entry in sdpa.report()] == [1 + threads * times]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_that_is_recognised_waits_for_nobody(asked):
    """Calls of a script, which runs without the GIL, come to their end while this thread never lets go of it."""

    def several(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, times: int) -> torch.Tensor:
        out = q
        for _ in range(times):  # some of which the script's compiler finds to be equal, and makes once
            out = F.scaled_dot_product_attention(q, k, v)
        return out

    script, tensors = torch.jit.script(several), inputs()
    interval = sys.getswitchinterval()
    sdpa.enable()
    try:
        script(*tensors, 3)
        worker = threading.Thread(target=lambda: script(*tensors, 400_000))
        begun = counted() + 10
        worker.start()
        while counted() < begun:
            time.sleep(0.001)
        sys.setswitchinterval(1000.0)  # no thread is asked to let go of the GIL before this has passed
        first = last = counted()
        give_up = time.monotonic() + 20
        while last < first + 100 and time.monotonic() < give_up:
            last = counted()
    finally:
        sys.setswitchinterval(interval)
        worker.join()
        sdpa.disable()
    assert last >= first + 100
    assert len(asked) == 1


@needs_compiler
def test_tensors_of_many_dimensions_are_decided_by_python_each_time(asked):
    tensors = [x[None, None, None] for x in inputs()]
    with sdpa():
        for _ in range(3):
            F.scaled_dot_product_attention(*tensors)
    assert len(asked) == 3


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
