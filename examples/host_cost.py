"""Host time of one eager call: without a gradient, with one, and a whole step, by every way of calling.

    python examples/host_cost.py [--device cuda] [--save]

tilewise.attention in native code and in Python, and under tilewise.sdpa, beside F.scaled_dot_product_attention,
PyTorch's FlashAttention by name, flash-attn and FlashAttention-3 where they are installed, and a node of autograd's
that computes nothing. Small tensors, so that nothing but the way to the kernel is measured; one thread, rounds
interleaved, medians over them. `tilewise bench --suite host` is the same. --save writes a record.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from tilewise import CompileError
from tilewise.lab.studies import host, kept
from tilewise.native import library


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="", help="batch,heads,seq,head_dim; small by default")
    parser.add_argument("--rounds", type=int, default=host.ROUNDS)
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    options = parser.parse_args(arguments)
    shape, dtype = host.usual(options.device)
    if options.shape:
        shape = tuple(int(size) for size in options.shape.split(","))
    os.environ.setdefault(library.SETTING, "on")
    if options.device.startswith("cuda") and library.is_wanted():
        try:
            library.build()  # rather than in the background, while we measure
        except CompileError as error:
            print(f"without native code: {error}", file=sys.stderr)
    if options.device == "cpu":
        torch.set_num_threads(1)
    costs = host.measure(options.device, shape, dtype, options.rounds)
    print(*host.lines(costs), sep="\n")
    if options.save:
        command = ["python", "examples/host_cost.py", *sys.argv[1:]]
        print(f"record: {kept.save(host.record(costs, options.device, shape, command), options.save)}")


if __name__ == "__main__":
    main()
