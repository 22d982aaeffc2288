"""What the override costs a call that it leaves to PyTorch, in microseconds over PyTorch alone.

    python examples/sdpa_overhead.py [--device cuda] [--save]

Small tensors, one thread, rounds interleaved; medians over the rounds. "detour" is PyTorch's own share: a kernel in
Python that only calls the original. "elsewhere" is what a thread pays that is in no block while another one is; "block"
and "enable" what a call pays that meets a rule, is looked up, and is left to PyTorch. --save writes a record.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import library as torch_library

from tilewise.integrations.sdpa import sdpa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPERATOR = "aten::scaled_dot_product_attention"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=1000, help="calls per round")
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    samples = measure(options.device, options.rounds, options.calls)
    show(samples)
    if options.save:
        print(f"record: {save(samples, options)}")


def measure(device: str, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per call, by call and setting, one sample a round. float32, so that on a GPU too the call is left."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(3))
    measured: dict[str, Callable[[], object]] = {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v),
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "causal, scale": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2),
    }
    settings = {"alone": alone, "detour": detour, "elsewhere": elsewhere, "block": sdpa, "enable": enabled}
    samples: dict[str, dict[str, list[float]]] = {name: {setting: [] for setting in settings} for name in measured}
    for _ in range(rounds):
        for setting, enter in settings.items():
            with enter():
                for name, call in measured.items():
                    samples[name][setting].append(seconds(call, calls, device))
    return samples


def seconds(call: Callable[[], object], calls: int, device: str) -> float:
    """Host time of one call; a GPU is waited for outside the clock, often enough that its queue never fills."""
    total, batch = 0.0, 32 if device.startswith("cuda") else calls
    done = 0
    while done < calls:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        count = min(batch, calls - done)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        total += time.perf_counter() - begin
        done += count
    return total / calls


def show(samples: dict[str, dict[str, list[float]]]) -> None:
    settings = list(next(iter(samples.values())))
    print(f"{'us':15s} {'alone':>8s}" + "".join(f"{setting:>12s}" for setting in settings[1:]))
    for name, by_setting in samples.items():
        medians = {setting: 1e6 * statistics.median(values) for setting, values in by_setting.items()}
        over = "".join(f"{medians[setting] - medians['alone']:+12.2f}" for setting in settings[1:])
        print(f"{name:15s} {medians['alone']:8.2f}{over}")


def save(samples: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> Path:
    from tilewise.lab import bench, environment  # noqa: PLC0415  (needs tilewise[lab], which the table does not)

    command = ["python", "examples/sdpa_overhead.py", *sys.argv[1:]]
    record: dict[str, Any] = {
        "kind": "host cost",
        "suite": f"sdpa-overhead-{options.device}",
        "provenance": environment.provenance(0, command),
        "settings": {"device": options.device, "rounds": options.rounds, "calls": options.calls},
        "rows": [
            {"call": name, "setting": setting, "median": statistics.median(values), "seconds": values}
            for name, by_setting in samples.items()
            for setting, values in by_setting.items()
        ],
    }
    return bench.save(record, options.save)


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
    originals = {key: torch_library.get_kernel(OPERATOR, key) for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")}
    with torch_library._scoped_library("aten", "IMPL") as overrides:
        for key, original in originals.items():
            overrides.impl("scaled_dot_product_attention", original.call_boxed, key, with_keyset=True)
        yield


if __name__ == "__main__":
    main()
