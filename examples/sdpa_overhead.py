"""What the override costs a call that it leaves to PyTorch, in microseconds over PyTorch alone.

    python examples/sdpa_overhead.py [--device cuda] [--save]

Small tensors, one thread, rounds interleaved; medians over the rounds. "alone" and "bare" come first, because our
kernel stays in the dispatcher after the first rule: "afterwards" is paid by a process that has used the override,
"elsewhere" by a thread that is in no block while another one is; "block", "enable" and "when" by calls that meet a rule
(with "when", one that has a condition), have met it before, and are left to PyTorch. These go through the compiled
kernel, which is built first where this machine can; "in Python" is "enable" with the kernel in Python behind it. "bare"
is what PyTorch itself takes for a kernel in Python, the cheapest there is: it only calls the original. --save writes a
record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import library as torch_library

from tilewise import CompileError
from tilewise.integrations.sdpa import sdpa
from tilewise.native import library as extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

OPERATOR = "aten::scaled_dot_product_attention"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=250, help="calls per round")
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        sdpa.compile()
    except CompileError as error:
        print(error)
    samples = measure(options.device, options.rounds, options.calls)
    show(samples)
    if options.save:
        print(f"record: {save(samples, options)}")


def measure(device: str, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per call, by call and setting, one sample a round. On a GPU with dropout, which is left to PyTorch."""
    dropout = 0.1 if device.startswith("cuda") else 0.0
    call = partial(F.scaled_dot_product_attention, dropout_p=dropout)
    q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    measured: dict[str, Callable[[], object]] = {
        "plain": lambda: call(q, k, v),
        "causal": lambda: call(q, k, v, is_causal=True),
        "causal, scale": lambda: call(q, k, v, is_causal=True, scale=0.2),
        "mask": lambda: call(q, k, v, mask),
    }
    condition = sdpa(when=lambda problem: False)
    before: dict[str, Callable[[], AbstractContextManager[object]]] = {"alone": nullcontext, "bare": bare}
    if torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "CPU"):
        # Where tensors are fake, PyTorch runs the function in Python that was registered last, even after its removal:
        # "bare", put over our kernel in Python, would call itself from then on.
        print('The override was used in this process before: "alone" is with it, and "bare" is left out.')
        del before["bare"]
    after: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "afterwards": nullcontext, "elsewhere": elsewhere, "block": sdpa, "enable": enabled, "when": lambda: condition,
        "in Python": in_python,
    }  # fmt: skip
    samples: dict[str, dict[str, list[float]]] = {
        name: {setting: [] for setting in before | after} for name in measured
    }
    for settings in (before, after):
        for _ in range(rounds):
            for setting, enter in settings.items():
                with enter():
                    for name, one in measured.items():
                        one()  # the first call of a rule is planned
                        samples[name][setting].append(seconds(one, calls, device))
        with sdpa():  # from here on our kernel is in the dispatcher
            pass
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
    _, *others = next(iter(samples.values()))
    print(f"{'us':15s} {'alone':>9s}" + "".join(f"{setting:>11s}" for setting in others))
    for name, by_setting in samples.items():
        alone, *rest = (1e6 * statistics.median(values) for values in by_setting.values())
        print(f"{name:15s} {alone:9.2f}" + "".join(f"{us - alone:+11.2f}" for us in rest))
    for entry in sdpa.report():
        if entry.outcome != "left":
            print(f"not left, so not the cost of a call passed on: {entry}")


def save(samples: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> Path:
    from tilewise.lab.measure import environment  # noqa: PLC0415  (needs tilewise[lab], which the table does not)
    from tilewise.lab.studies import kept  # noqa: PLC0415  (needs tilewise[lab], which the table does not)

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
    return kept.save(record, options.save)


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
def in_python() -> Iterator[None]:
    before = os.environ.get(extension.SETTING)
    os.environ[extension.SETTING] = "off"
    try:
        with enabled():
            yield
    finally:
        del os.environ[extension.SETTING]
        if before is not None:
            os.environ[extension.SETTING] = before


@contextmanager
def bare() -> Iterator[None]:
    no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    originals = {key: torch_library.get_kernel(OPERATOR, key) for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")}
    with torch_library._scoped_library("aten", "IMPL") as overrides:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch remarks on a kernel that replaces another
            for key, original in originals.items():
                overrides.impl("scaled_dot_product_attention", partial(original.call_boxed, no_keys), key)
        yield


if __name__ == "__main__":
    main()
