"""flash-attn's own tests, run against this package: a draw of the parameters of every test in their file.

    python tests/flash_attn_own.py flash-attention/tests/test_flash_attn.py [--count 40 | --all] [--device cpu]
        [--jobs 16] [--minutes 9] [--json-out FILE]
    python tests/flash_attn_own.py ... --only test_flash_attn_output --case 4711    # one case, with what it prints

The file is flash-attn's, as it is. What it imports is made of this package (`stand_ins`): the functions under test,
and in PyTorch's operations a rotation, padding, and einops' `rearrange` and `repeat`. The measure is the file's own: an
error of at most two to eight times that of plain PyTorch in the same dtype. All parameters together are hundreds of
thousands of cases, so `--count` cases of every test are drawn. On a CPU only small cases are drawn, and what the file
repeats to provoke a race is repeated twice.

Prints a table of all tests, and what fails by reason. Exits with 1 where a case fails that `ALLOWED` does not name,
or none is run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import linecache
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tilewise.integrations import flash_attn as ours

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
Case = dict[str, Any]

ALLOWED = {
    "test_flash_attn_varlen_paged_kv_num_splits": ("ImportError", "calls the private _flash_attn_varlen_forward"),
    "test_flash_attn_generator_arg_must_be_none": ("ImportError", "calls flash_attn_gpu, their compiled module"),
}
"""Tests of private names, which may fail: how their failure begins, and why. Tests of layouts pass: see `load`."""

_CHECKED = {"test_flash_attn_kvcache_paged_block_table_bounds"}
"""Tests that expect an error for numbers on the device, which are read there only under TILEWISE_CHECK."""

_LARGEST_ON_CPU = 2**15  # queries times keys
_GROUPED_BY = ("d", "alibi", "dropout_p", "softcap", "dtype")  # a group, which shares kernels, runs in one process
_WAITS = (2.0, 5.0, 10.0)  # seconds until a case that had too little memory beside other processes is tried again
_LAST = 120.0  # seconds that a process has for the case that it is at when the time is up


class Outcome(NamedTuple):
    test: str
    number: int
    case: str
    what: str
    """passed, skipped, not run, or what is wrong."""


# ---------------------------------------------------------------------------------------------------------------------
# What the file imports


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


def unpad_input(padded: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of `padded` (batch, seqlen, ...) under the mask, their indices, offsets, the longest and all lengths."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return padded.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def pad_input(rows: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of `unpad_input`, with zeros between."""
    padded = rows.new_zeros(batch * seqlen, *rows.shape[1:]).index_copy(0, indices, rows)
    return padded.unflatten(0, (batch, seqlen))


def rearrange(x: Tensor, pattern: str, **lengths: int) -> Tensor:
    """einops' function of that name, and its `repeat`: axes that are new on the right have a length by name."""
    sides = [[(many or one).split() for many, one in re.findall(r"\(([^)]*)\)|(\S+)", s)] for s in pattern.split("->")]
    others = [f".{number}" for number in range(x.ndim - len(sides[0]) + 1)]
    left, right = ([group for given in side for group in _expanded(given, others)] for side in sides)
    for group, length in zip(left, x.shape, strict=True):
        unknown = [name for name in group if name not in lengths]
        lengths |= dict.fromkeys(unknown, length // math.prod(lengths.get(name, 1) for name in group))
    axes = [name for group in left for name in group]
    new = [name for group in right for name in group if name not in axes]
    whole = x.reshape([lengths[name] for name in axes] + [1] * len(new))
    whole = whole.expand([lengths[name] for name in axes + new])
    whole = whole.permute([(axes + new).index(name) for group in right for name in group])
    return whole.reshape([math.prod(lengths[name] for name in group) for group in right])


def _expanded(group: list[str], others: list[str]) -> list[list[str]]:
    """The axes that one part of a pattern stands for, each as the names that lie in it."""
    return [[name] for name in others] if group == ["..."] else [[name for name in group if name != "1"]]


def stand_ins() -> dict[str, types.ModuleType]:
    """The modules that the file imports, by name."""

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        return made

    functions = {name: getattr(ours, name) for name in ours.__all__}
    return {
        "einops": module("einops", rearrange=rearrange, repeat=rearrange),
        "flash_attn": module("flash_attn", **functions),
        "flash_attn.bert_padding": module("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input),
        "flash_attn.flash_attn_interface": module(
            "flash_attn.flash_attn_interface", _get_block_size_n=None, USE_TRITON_ROCM=False
        ),
        "flash_attn.layers": module("flash_attn.layers"),
        "flash_attn.layers.rotary": module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb),
    }


def load(path: Path, device: str) -> types.ModuleType:
    """The file as a module; on another device than a GPU, with that device's name where it has "cuda".

    flash-attn's S_dmask holds weights that lack the sums of their rows, block by block of its kernel, so the file has a
    function that divides by them. The S_dmask of this package holds the weights themselves: it is compared as it is.
    """
    sys.modules.update(stand_ins())
    source = path.read_text()
    if device != "cuda":
        source = source.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)").replace('"cuda"', f'"{device}"')
        source = re.sub(r"range\((50|250)\)", "range(2)", source)
    made = types.ModuleType("flash_attn_own_tests")
    exec(compile(source, str(path), "exec"), made.__dict__)
    made.__dict__["normalize_flash_attn_S"] = lambda weights, *_, **__: weights
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Cases


def parameters(test: Any) -> dict[str, list[Any]]:
    """What the test is parametrized by: names, joined by commas where values come together, and their values."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return {mark.args[0]: list(mark.args[1]) for mark in reversed(marks)}


def case_of(given: dict[str, list[Any]], number: int) -> Case:
    """The case of that number, of as many as there are combinations of values."""
    case: Case = {}
    for names, values in given.items():
        number, place = divmod(number, len(values))
        each = names.split(",")
        chosen = values[place] if len(each) > 1 else (values[place],)
        case |= dict(zip((name.strip() for name in each), chosen, strict=True))
    return case


def is_drawn(case: Case, device: str) -> bool:
    """Whether a case says something: the test does not skip it at once, and it ends on this device."""
    queries = case.get("seqlen_q", case.get("seqlen", 0))
    keys = case.get("seqlen_k", queries)
    paged = case.get("paged_kv_block_size") is not None
    return not (
        (case.get("new_kv", False) and queries > keys)
        or (not case.get("new_kv", True) and case["rotary_fraction"] > 0.0)
        or (paged and (case.get("has_batch_idx", False) or case.get("has_leftpad", False)))
        or (case.get("softcap", 0.0) > 0.0 and case.get("dropout_p", 0.0) > 0.0)
        or (device == "cpu" and queries * keys > _LARGEST_ON_CPU)
    )


def drawn(name: str, given: dict[str, list[Any]], options: argparse.Namespace) -> list[tuple[int, Case]]:
    """Cases of a test with their numbers: `--count` of them in random order, without repetition, or all."""
    total = math.prod(map(len, given.values()))
    if options.case is not None:
        return [(options.case, case_of(given, options.case))]
    found = []
    for number in random.Random(f"{options.seed} {name}").sample(range(total), total):
        case = case_of(given, number)
        if is_drawn(case, options.device):
            found.append((number, case))
        if len(found) == options.count:
            break
    return found


class Planned(NamedTuple):
    test: str
    number: int
    case: Case

    def become(self, what: str) -> Outcome:
        words = " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in self.case.items())
        return Outcome(self.test, self.number, words, what)


def plan(module: types.ModuleType, options: argparse.Namespace) -> list[list[Planned]]:
    """The cases of each process: groups that share kernels, and the tests in turn."""
    tests = [name for name in module.__dict__ if name.startswith("test_") and options.only in ("", name)]
    by_test = [
        [Planned(name, *one) for one in drawn(name, parameters(getattr(module, name)), options)] for name in tests
    ]
    in_turn = [
        cases[turn] for turn in range(max(map(len, by_test), default=0)) for cases in by_test if turn < len(cases)
    ]
    groups = Counter(map(_group, in_turn))
    owners: dict[str, int] = {}
    loads = [0] * options.jobs
    for group, size in groups.most_common():
        owners[group] = loads.index(min(loads))
        loads[owners[group]] += size
    return [[planned for planned in in_turn if owners[_group(planned)] == process] for process in range(options.jobs)]


def _group(planned: Planned) -> str:
    return str([planned.case.get(name) for name in _GROUPED_BY])


# ---------------------------------------------------------------------------------------------------------------------
# Running them


def outcome(test: Any, case: Case, path: Path) -> str:
    """Of one case: passed, skipped, or the first line of what is wrong."""
    try:
        test(**case)
    except pytest.skip.Exception:
        return "skipped"
    except Exception as error:
        if isinstance(error, AssertionError) and not error.args:
            frames = traceback.extract_tb(error.__traceback__)
            line = next(frame.lineno for frame in reversed(frames) if frame.filename == str(path))
            return f"AssertionError: line {line}: {linecache.getline(str(path), line).strip()}"
        lines = (str(error).strip() or repr(error)).splitlines()
        return f"{type(error).__name__}: {lines[0]}"
    return "passed"


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    """What becomes of every case of this process, one after another until the time is up."""
    module = load(options.file, options.device)
    for planned in plan(module, options)[options.part]:
        if time.time() > options.until:
            yield planned.become("not run")
            continue
        with checked_numbers(planned.test in _CHECKED):
            for seconds in (*_WAITS, None):
                what = outcome(getattr(module, planned.test), planned.case, options.file)
                if "CUDA error" not in what and options.device == "cuda":
                    torch.cuda.empty_cache()  # processes share the memory
                if seconds is None or not what.startswith("OutOfMemoryError"):
                    break
                time.sleep(seconds)
        yield planned.become(what)
        if "CUDA error" in what:
            return  # every later call of this process would fail as well


@contextlib.contextmanager
def checked_numbers(on: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if on:
            patched.setenv("TILEWISE_CHECK", "1")
        yield


def in_processes(options: argparse.Namespace) -> list[Outcome]:
    """The same over several processes, which build kernels side by side. A process that dies loses one case."""
    passed_on = ["--device", options.device, "--seed", str(options.seed), "--jobs", str(options.jobs)]
    passed_on += ["--only", options.only, "--until", str(options.until)]
    passed_on += ["--all"] if options.count is None else ["--count", str(options.count)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.jsonl" for part in range(options.jobs)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, str(options.file), *passed_on, "--part", str(part), "--lines", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for part, file in enumerate(files)
        ]
        found = []
        for process, file, planned in zip(
            started, files, plan(load(options.file, options.device), options), strict=True
        ):
            status = wait(process, options.until)
            done = [Outcome(*json.loads(line)) for line in (file.read_text().splitlines() if file.exists() else ())]
            missing = planned[len(done) :]
            if missing and status:
                done.append(missing.pop(0).become(f"its process ended with status {status}"))
            found += [*done, *(one.become("not run") for one in missing)]
    return found


def wait(process: subprocess.Popen[bytes], until: float) -> int:
    """The status of a process, which is ended where it does not end soon after the time is up."""
    try:
        return process.wait(None if until == math.inf else max(0.0, until - time.time()) + _LAST)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# What it prints

KINDS = ("passed", "failed", "allowed", "skipped", "not run")


def kind(one: Outcome) -> str:
    """Which of KINDS an outcome is; "allowed" is what fails as ALLOWED says."""
    if one.what in KINDS:
        return one.what
    return "allowed" if one.what.startswith(ALLOWED.get(one.test, ("\n",))[0]) else "failed"


def counts(found: list[Outcome]) -> dict[str, dict[str, int]]:
    """By test, and for all of them, how many cases are of each kind."""
    by_test: dict[str, dict[str, int]] = {}
    for one in sorted(found):
        for name in (one.test, "all"):
            by_test.setdefault(name, dict.fromkeys(KINDS, 0))[kind(one)] += 1
    by_test["all"] = by_test.pop("all", dict.fromkeys(KINDS, 0))
    return by_test


def summary(found: list[Outcome]) -> str:
    """The table of all tests, and what fails by reason with the first case of each."""
    by_test = counts(found)
    width = max(map(len, by_test))
    lines = [" " * width + "".join(f"{name:>9}" for name in KINDS)]
    lines += [f"{test:<{width}}" + "".join(f"{number:>9}" for number in row.values()) for test, row in by_test.items()]
    reasons: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in sorted(found):
        if kind(one) in ("failed", "allowed"):
            reasons.setdefault((kind(one), one.test, re.sub(r"\d+(\.\d+)?", "#", one.what)), []).append(one)
    for (of_kind, test, _), those in sorted(reasons.items(), reverse=True):
        why = f" ({ALLOWED[test][1]})" if of_kind == "allowed" else ""
        lines += [f"{of_kind}: {test}, {len(those)} times: {those[0].what}{why}"]
        lines += [f"    case {those[0].number}: {those[0].case}"] * (of_kind == "failed")
    return "\n".join(lines)


def record(options: argparse.Namespace, found: list[Outcome]) -> dict[str, Any]:
    """What was run on what, the counts, and every case that does not pass."""
    return {
        "file": hashlib.sha256(options.file.read_bytes()).hexdigest(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "seed": options.seed,
        "counts": counts(found),
        "others": [one._asdict() for one in sorted(found) if kind(one) in ("failed", "allowed", "skipped")],
    }


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="flash-attn's tests/test_flash_attn.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=40, help="cases that are drawn of every test")
    parser.add_argument("--all", dest="count", action="store_const", const=None, help="all cases of every test")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", metavar="TEST", help="this test alone")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="this case of --only alone, with what it prints")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after this time")
    parser.add_argument("--json-out", type=Path, metavar="FILE", help="the counts, and all cases that do not pass")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # --minutes as a time
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)  # which of --jobs this process is
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)  # the file that takes its outcomes
    options = parser.parse_args(arguments)
    if options.case is not None and not options.only:
        parser.error("--case needs --only")
    if options.until is None:
        options.until = time.time() + 60 * options.minutes
    return options


def main() -> int:
    options = options_of()
    if options.lines:
        with options.lines.open("w", buffering=1) as lines:
            for one in run(options):
                print(json.dumps(one), file=lines)
        return 0
    start = time.monotonic()
    if options.jobs > 1:
        found = in_processes(options)
    else:
        shown = sys.stdout if options.case is not None else io.StringIO()  # the tests print what they measure
        with contextlib.redirect_stdout(shown):
            found = list(run(options))
    if options.json_out:
        options.json_out.write_text(json.dumps(record(options, found), indent=1) + "\n")
    print(f"{summary(found)}\n{time.monotonic() - start:.0f} s")
    kinds = set(map(kind, found))
    return int("failed" in kinds or kinds <= {"not run"})


if __name__ == "__main__":
    sys.exit(main())
