"""What the override costs a call that it leaves to PyTorch, in microseconds over PyTorch alone.

    python examples/sdpa_overhead.py

Small tensors, one thread, rounds interleaved, the fastest round of each counts. "elsewhere" is what a thread pays that
is in no block while another one is; "detour" is PyTorch's own share, a Python kernel that only calls the original.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tilewise.integrations.sdpa import sdpa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS, CALLS = 15, 2000
OPERATOR = "aten::scaled_dot_product_attention"


def main() -> None:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v),
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "causal, scale": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2),
    }
    settings = {"alone": alone, "detour": detour, "elsewhere": elsewhere, "block": sdpa, "enable": enabled}
    best: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS):
        for setting, enter in settings.items():
            with enter():
                for name, call in calls.items():
                    best[setting, name] = min(best.get((setting, name), float("inf")), seconds(call))
    print(f"{'call':15s} {'alone':>8s}" + "".join(f"{setting:>12s}" for setting in list(settings)[1:]))
    for name in calls:
        base = best["alone", name]
        over = "".join(f"{(best[setting, name] - base) * 1e6:+12.2f}" for setting in list(settings)[1:])
        print(f"{name:15s} {base * 1e6:8.2f}{over}")


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


@contextmanager
def alone() -> Iterator[None]:
    yield


@contextmanager
def enabled() -> Iterator[None]:
    sdpa.enable()
    try:
        yield
    finally:
        sdpa.disable()


@contextmanager
def elsewhere() -> Iterator[None]:
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with sdpa():
            entered.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def detour() -> Iterator[None]:
    originals = {key: torch.library.get_kernel(OPERATOR, key) for key in ("CPU", "AutogradCPU")}
    library = torch.library.Library("aten", "IMPL")
    for key, original in originals.items():
        library.impl("scaled_dot_product_attention", original.call_boxed, key, with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


if __name__ == "__main__":
    main()
