"""What is remembered of calls: bounded by entries and by bytes, and safe when threads share it."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import pytest
import torch

import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, Target
from tilewise.memo import Memo, invalidate


def documents(n: int, count: int = 1000) -> Documents:
    """A mask of `count` documents that equals no other of another n."""
    return Documents((*range(count), count + 10 + n), inner=Causal())


def test_masks_of_many_documents_do_not_fill_the_memory():
    invalidate()
    problem = tilewise.Problem(1, 1, 1, 1010, 1010, 4, 4, torch.float32)
    target = Target.named("cpu")
    tracemalloc.start()
    try:
        for n in range(400):
            mask = documents(n)
            length = mask.cu_seqlens_q[-1]
            asked = problem.with_(seq_q=length, seq_kv=length, mask=mask)
            tilewise.plan.plan(asked, target, "tiled")
        planned = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert planned < 32 * 2**20, f"{planned / 2**20:.0f} MiB"
    assert len(tilewise.plan._plans) > 0
    invalidate()


def test_calls_under_masks_of_many_documents_do_not_fill_the_memory(monkeypatch):
    """The call itself is not of interest, so nothing computes."""
    invalidate()
    out = torch.zeros(1)
    monkeypatch.setattr(tilewise.call.execute, "run", lambda *_: (out, None))
    base = torch.randn(1, 1, 1500, 2)
    tracemalloc.start()
    try:
        for n in range(400):
            mask = documents(n)
            x = base[:, :, : mask.cu_seqlens_q[-1]]
            tilewise.attention(x, x, x, mask=mask, backend="tiled")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 64 * 2**20, f"{held / 2**20:.0f} MiB"
    invalidate()


def test_a_memo_keeps_within_its_bounds():
    by_entries: Memo[int] = Memo(max_entries=10)
    for n in range(25):
        by_entries.put(n, n, by_entries.generation)
        assert len(by_entries) <= 10
    assert by_entries.get(24) == 24
    by_bytes: Memo[int] = Memo(max_bytes=100_000)
    for n in range(25):
        by_bytes.put(n, n, by_bytes.generation, 30_000)
        assert len(by_bytes) <= 3
    by_bytes.put("large", 1, by_bytes.generation, 200_000)
    assert by_bytes.get("large") is None
    assert by_bytes.get(24) == 24


def test_what_was_worked_out_before_a_change_is_not_kept_after_it():
    memo: Memo[int] = Memo()
    generation = memo.generation
    memo.clear()
    memo.put("old", 1, generation)
    assert memo.get("old") is None


@pytest.mark.slow
def test_threads_share_what_is_remembered():
    """Many problems, caches that overflow, and threads that forget everything, at the shortest switch interval."""
    invalidate()
    small: Memo[tilewise.call.build.Call] = Memo(max_entries=8)
    plans: Memo[tilewise.Plan] = Memo(max_entries=6)
    inputs = {n: torch.randn(1, 2, n, 4) for n in range(2, 26)}
    truth = {n: tilewise.attention(x, x, x, mask="causal", backend="reference") for n, x in inputs.items()}
    failures: list[BaseException] = []
    start = threading.Barrier(6)

    def call(seed: int) -> None:
        try:
            start.wait()
            for turn in range(80):
                n = 2 + (seed * 7 + turn * 5) % 24
                x = inputs[n]
                out = tilewise.attention(x, x, x, mask="causal", backend=("tiled", "auto", "reference")[turn % 3])
                assert_close(out, truth[n], budget(torch.float32, 32))
        except BaseException as error:  # reported by the thread that waits
            failures.append(error)

    def disturb() -> None:
        start.wait()
        for _ in range(200):
            invalidate()

    interval = sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilewise.call.memory, "_calls", small)
        patch.setattr(tilewise.plan, "_plans", plans)
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
            threads.append(threading.Thread(target=disturb))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    assert not failures, failures[0]
