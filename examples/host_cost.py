"""Host time of one eager call: tilewise.attention beside F.scaled_dot_product_attention, with and without a gradient.

    python examples/host_cost.py [--device cuda] [--save]

Small tensors, so that nothing but the way to the kernel is measured; one thread, rounds interleaved, medians over them.
--save writes a record.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import tilewise

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32  # calls between two waits for the GPU: its queue never fills, and the wait is outside the clock


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="", help="batch,heads,seq,head_dim; small by default")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    shape = [int(size) for size in (options.shape or ("1,8,128,64" if on_gpu else "1,2,8,16")).split(",")]
    if not on_gpu:
        torch.set_num_threads(1)
    samples = measure(options.device, shape, torch.bfloat16 if on_gpu else torch.float32, options.rounds)
    for name, values in samples.items():
        print(f"{name:45s} {1e6 * statistics.median(values):7.2f} us")
    if options.save:
        print(f"record: {save(samples, shape, options)}")


def measure(device: str, shape: list[int], dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds per call, by call, one sample a round."""
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    needing = [tensor.clone().requires_grad_() for tensor in plain]
    calls: dict[str, Callable[[], object]] = {}
    for what, tensors in (("", plain), (", gradient", needing)):
        q, k, v = tensors
        calls[f"F.scaled_dot_product_attention{what}"] = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)
        calls[f"tilewise.attention{what}"] = lambda q=q, k=k, v=v: tilewise.attention(q, k, v)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # the first call plans, and builds a kernel
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(BATCH):
                call()
            samples[name].append((time.perf_counter() - begin) / BATCH)
    return samples


def save(samples: dict[str, list[float]], shape: list[int], options: argparse.Namespace) -> Path:
    from tilewise.lab.measure import environment  # noqa: PLC0415  (needs tilewise[lab], which the figures do not)
    from tilewise.lab.studies import bench  # noqa: PLC0415  (needs tilewise[lab], which the figures do not)

    record: dict[str, Any] = {
        "kind": "host cost",
        "suite": f"host-cost-{options.device}",
        "provenance": environment.provenance(0, ["python", "examples/host_cost.py", *sys.argv[1:]]),
        "settings": {"device": options.device, "shape": shape, "rounds": options.rounds, "calls": BATCH},
        "rows": [
            {"call": name, "median": statistics.median(values), "seconds": values} for name, values in samples.items()
        ],
    }
    return bench.save(record, options.save)


if __name__ == "__main__":
    main()
