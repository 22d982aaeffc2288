"""flash-attn's own tests of flash_attn_with_kvcache, run against this package: a draw of their parameters.

    python tests/flash_attn_own.py flash-attention/tests/test_flash_attn.py [--device cpu] [--count 600] [--jobs 8]

The file is flash-attn's, as it is; it needs einops. What it imports of flash-attn is made of this package: the
functions under test, and a rotation in PyTorch's operations. All of its parameters are hundreds of thousands of cases,
so cases are drawn, each with a seed that prints with it. Their own measure decides: an error of three times (with ALiBi
five times) that of plain PyTorch in the same dtype. Exits with 1 where a case fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.integrations import flash_attn as ours

Tensor = torch.Tensor
Case = dict[str, Any]
TEST = "test_flash_attn_kvcache"
_LARGEST_ON_CPU = 2**14  # queries times keys
_GROUPED_BY = ("d", "alibi")  # what kernels are built for: cases of one group run in one process


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Tensor | int = 0, **_: Any
) -> Tensor:
    """x (batch, seqlen, heads, head_dim), whose first columns are rotated by the angles of seqlen_offsets and on."""
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(x.shape[0])
    places = offsets.long()[:, None] + torch.arange(x.shape[1], device=x.device)
    c, s = (table.float()[places][:, :, None] for table in (cos, sin))
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width].float(), x[..., width:]
    one, other = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = one * c - other * s, one * s + other * c
    made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((made.to(x.dtype), rest), -1)


def stand_ins() -> dict[str, types.ModuleType]:
    """The modules that the file imports, by name."""

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        return made

    functions = {name: getattr(ours, name) for name in ours.__all__}
    unused = dict.fromkeys(("pad_input", "unpad_input"))
    return {
        "flash_attn": module("flash_attn", **functions),
        "flash_attn.bert_padding": module("flash_attn.bert_padding", **unused),
        "flash_attn.flash_attn_interface": module(
            "flash_attn.flash_attn_interface", _get_block_size_n=None, USE_TRITON_ROCM=False
        ),
        "flash_attn.layers": module("flash_attn.layers"),
        "flash_attn.layers.rotary": module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb),
    }


def load(path: Path, device: str) -> types.ModuleType:
    """The file as a module; on another device than a GPU, with that device's name where it has "cuda"."""
    sys.modules.update(stand_ins())
    source = path.read_text()
    if device != "cuda":
        source = source.replace('device = "cuda"', f'device = "{device}"')
        source = source.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)")
    made = types.ModuleType("flash_attn_own_tests")
    exec(compile(source, str(path), "exec"), made.__dict__)
    return made


def parameters(test: Any) -> dict[str, list[Any]]:
    """What the test is parametrized by: names, joined by commas where values come together, and their values."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return {mark.args[0]: list(mark.args[1]) for mark in reversed(marks)}


def draw(given: dict[str, list[Any]], seed: int) -> Case:
    """One case: of every parameter any value."""
    random_values = random.Random(seed)
    case: Case = {}
    for names, values in given.items():
        chosen = random_values.choice(values)
        each = names.split(",")
        case |= dict(zip((name.strip() for name in each), chosen if len(each) > 1 else (chosen,), strict=True))
    return case


def drawn(given: dict[str, list[Any]], count: int, seed: int, device: str) -> list[tuple[int, Case]]:
    """So many cases with their seeds; those that the test would skip at once are drawn again."""
    found = []
    for number in itertools.count(seed):
        case = draw(given, number)
        skipped = (
            (case["seqlen_q"] > case["seqlen_k"] and case["new_kv"])
            or (not case["new_kv"] and case["rotary_fraction"] > 0.0)
            or (case["paged_kv_block_size"] is not None and (case["has_batch_idx"] or case["has_leftpad"]))
            or (device == "cpu" and case["seqlen_q"] * case["seqlen_k"] > _LARGEST_ON_CPU)
        )
        if not skipped:
            found.append((number, case))
        if len(found) == count:
            return found
    raise AssertionError("numbers do not end")


def outcome(test: Any, case: Case) -> str:
    """Of one case: passed, skipped, or the first line of what is wrong."""
    try:
        test(**case)
    except pytest.skip.Exception:
        return "skipped"
    except Exception as error:
        lines = (str(error).strip() or repr(error)).splitlines()
        return f"{type(error).__name__}: {lines[0]}"
    return "passed"


def words(case: Case) -> str:
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case.items())


def run(options: argparse.Namespace) -> list[tuple[int, str, str]]:
    """(seed, case, outcome) of every case of this process."""
    test = getattr(load(options.file, options.device), TEST)
    cases = drawn(parameters(test), options.count, options.seed, options.device)
    groups = sorted({tuple(case[name] for name in _GROUPED_BY) for _, case in cases})
    part, parts = options.part
    mine = [one for one in cases if groups.index(tuple(one[1][name] for name in _GROUPED_BY)) % parts == part]
    printed, sys.stdout = sys.stdout, sys.stderr  # the tests print what they measure
    found = [(seed, words(case), outcome(test, case)) for seed, case in mine]
    sys.stdout = printed
    return found


def in_processes(options: argparse.Namespace) -> list[tuple[int, str, str]]:
    """The same over several processes, which build kernels side by side."""
    base = [sys.executable, __file__, str(options.file), "--device", options.device, "--count", str(options.count)]
    base += ["--seed", str(options.seed), "--json"]
    started = [
        subprocess.Popen(
            [*base, "--part", str(part), str(options.jobs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for part in range(options.jobs)
    ]
    found: list[tuple[int, str, str]] = []
    for number, process in enumerate(started):
        told, _ = process.communicate()
        if told.strip():
            found += [(seed, case, what) for seed, case, what in json.loads(told.splitlines()[-1])]
        else:
            found.append((-1, f"process {number} of {options.jobs}", f"died with status {process.returncode}"))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="flash-attn's tests/test_flash_attn.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=600, help="cases that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow it")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one line of all outcomes")
    options = parser.parse_args()
    start = time.monotonic()
    found = in_processes(options) if options.jobs > 1 else run(options)
    if options.json:
        print(json.dumps(found))
        return 0
    failed = [one for one in found if one[2] not in ("passed", "skipped")]
    for seed, case, what in failed:
        print(f"seed {seed}: {case}: {what}")
    passed = sum(what == "passed" for _, _, what in found)
    seconds = time.monotonic() - start
    print(
        f"{TEST}: {passed} passed, {len(failed)} failed, {len(found) - passed - len(failed)} skipped, {seconds:.0f} s"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
