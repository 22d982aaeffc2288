"""Random problems of every form in which sequences come: batched, packed, or as caches; each held to float64.

    PYTHONPATH=src python tests/hostile/form_generator.py --form packed --seed 7 --variant 3       # one problem
    PYTHONPATH=src python tests/hostile/form_generator.py --seed 1000 --kinds 100                  # of every form

A kind is a form with its mask, terms, dtype, heads and way of calling, which decide about kernels; its variants differ
in sizes and numbers. Batched problems are those of term_generator.py, of small sizes and of those that kernels run.
"""

from __future__ import annotations

import os

os.environ["TILEWISE_POISON"] = "1"
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import argparse
import math
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import term_generator
import torch
from term_generator import Asked, Case, Results, Sizes, Space

import cache_cases
import tilewise
from tilewise import Causal, UnsupportedProblem, Window
from tilewise.terms import RelativeBias

if TYPE_CHECKING:
    from collections.abc import Iterable

Tensor = torch.Tensor
# In turn; "terms" are batched, too, but small, and most of them in float64.
FORMS = {"cuda": ("batched", "packed", "batched", "cached"), "cpu": ("terms", "packed", "batched", "cached")}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, BF16, FP16, FP32)
DIMS = (64, 64, 128, 128, 96, 192, 256, 40)
LENGTHS = (0, 1, 5, 63, 64, 70, 128, 130, 200, 333)
# Named families run what a plan would give to another one.
BACKENDS = {"cuda": ("auto", "auto", "sm80"), "cpu": ("auto", "tiled")}


class Problem(NamedTuple):
    """What decides about a case."""

    form: str
    seed: int
    variant: int
    device: str


class Outcome(NamedTuple):
    problem: Problem
    what: str  # matched, refused, or what is wrong
    seconds: float = 0.0


def space(device: str) -> Space:
    return Space(DTYPES, LENGTHS, LENGTHS, DIMS, BACKENDS[device], 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences


def draw_packed(seed: int, variant: int, device: str) -> Case:
    """As `term_generator.draw`: sequences without keys or queries, rows behind the last offset, and keys not used."""
    r, own = random.Random(f"packed {seed}"), random.Random(f"packed {seed} {variant}")
    dtype, heads_kv, group, dim = r.choice(DTYPES), r.choice((1, 2)), r.choice((1, 1, 2, 3)), r.choice(DIMS)
    mask: Any = r.choice((None, Causal(), Causal("bottom-right"), Window(r.choice((9, 70)), 5, "bottom-right")))
    same, fewer = r.random() < 0.3, r.random() < 0.3
    terms = [name for name in ("softcap", "alibi", "sink", "table") if r.random() < 0.35]
    per_sequence, learned = r.random() < 0.5, r.random() < 0.3
    backend, scale = r.choice(BACKENDS[device]), r.choice((None, 0.3))
    draws = torch.Generator().manual_seed(seed * 1000 + variant)

    lengths_q = [own.choice(LENGTHS) for _ in range(own.randint(1, 5))]
    lengths_k = lengths_q if same else [own.choice(LENGTHS) for _ in lengths_q]
    behind = own.choice((0, 3, 70))
    starts_q, starts_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    rows, keys = (int(starts[-1]) + behind for starts in (starts_q, starts_k))
    left, used = torch.zeros(len(lengths_k), dtype=torch.int64), starts_k.diff()
    if fewer:
        left = torch.tensor([own.randint(0, length // 3) for length in lengths_k])
        used = torch.tensor([own.randint(0, length) for length in lengths_k])
    visible, distance = torch.zeros(rows, keys, dtype=torch.bool), torch.zeros(rows, keys)
    offset = torch.zeros(rows, keys, dtype=torch.int64)
    sequence = torch.zeros(rows, dtype=torch.int64)
    for number, (q, k) in enumerate(zip(starts_q[:-1].tolist(), starts_k[:-1].tolist(), strict=True)):
        first = k + min(int(left[number]), int(used[number]))
        seq_q, seq_k = lengths_q[number], k + int(used[number]) - first
        place = slice(q, q + seq_q), slice(first, first + seq_k)
        at, key = torch.arange(seq_q)[:, None], torch.arange(seq_k)
        rule = mask or tilewise.Full()
        visible[place] = rule.to_bool(range(seq_q), range(seq_k), seq_q, seq_k, "cpu")
        distance[place], offset[place] = (at + seq_k - seq_q - key).float(), key - at
        sequence[q : q + seq_q] = number

    sizes = Sizes(1, heads_kv * group, rows, keys, dtype)
    case = Case(
        seed=seed, sizes=sizes, group=group, asked=Asked(backend), mask=str(mask), again=False,
        arguments={"mask": mask, "scale": scale}, leaves={}, visible=visible.expand(1, sizes.heads_q, rows, keys),
        draws=draws, variant=variant, distance=distance, sequence=sequence, caller=_call_packed,
        way=term_generator.way(f"packed {seed}"),
    )  # fmt: skip
    for name, shape in {"q": (sizes.heads_q, rows), "k": (heads_kv, keys), "v": (heads_kv, keys)}.items():
        case.leaves[name] = case.normal(1, *shape, dim).to(dtype)
    offsets_q, offsets_k = starts_q.int(), starts_k.int()
    case.arguments["offsets"] = {"q": offsets_q, "k": offsets_q if same else offsets_k}
    if fewer:
        case.arguments |= {"seqused_k": used.int(), "leftpad_k": left.int()}
    if "softcap" in terms:
        case.arguments["softcap"] = 2.0
    if "alibi" in terms:
        shape = (len(lengths_q), sizes.heads_q) if per_sequence else (sizes.heads_q,)
        case.leaves["alibi"] = case.arguments["alibi"] = case.normal(*shape).abs().float() / 8
    if "sink" in terms:
        case.leaves["sink"] = case.arguments["sink"] = case.normal(sizes.heads_q).float()
    if "table" in terms:
        case.leaves["table"] = case.normal(sizes.heads_q, 80).float()
        case.index = (offset + 40).clamp(0, 79)
        case.arguments |= {"scores": (RelativeBias(80, 40),), "operands": {"table": case.leaves["table"]}}
    for name, tensor in case.leaves.items():
        tensor.requires_grad_(learned or name in "qkv")
    # Where a GPU's kernels go by spans of keys, they know no distances within sequences of other offsets.
    by_spans = dtype == FP32 or (learned and len(case.leaves) > len("qkv"))
    distances = {"alibi", "table"} & set(terms)
    case.may_be_refused = bool(by_spans and distances and (not same or fewer or (per_sequence and "alibi" in terms)))
    return case


def _call_packed(leaves: dict[str, Tensor], arguments: dict[str, Any], asked: Asked) -> Results:
    given = dict(arguments)
    offsets = given.pop("offsets")
    inputs = (leaves[name][0].transpose(0, 1) for name in "qkv")
    found = tilewise.attention_packed(
        *inputs, offsets["q"], offsets["k"], return_lse=True, backend=asked.backend, **given
    )
    assert isinstance(found, tuple)
    return found[0].transpose(0, 1)[None], found[1][None], None


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def draw_cached(seed: int, variant: int) -> cache_cases.Case:
    r, own = random.Random(f"cached {seed}"), random.Random(f"cached {seed} {variant}")
    heads_kv, batch = r.choice((1, 2)), own.choice((1, 2, 5))
    lengths = tuple(own.choice((0, 1, 17, 64, 100, 260, 1000)) for _ in range(batch))
    dim, page, packed = r.choice(DIMS), r.choice((0, 0, 16, 64)), r.random() < 0.3
    tokens: Any = tuple(own.choice((0, 1, 3)) for _ in range(batch)) if packed else r.choice((1, 1, 2, 5))
    some_starts, some_rows = r.random() < 0.3, r.random() < 0.3
    terms = tuple(name for name in ("softcap", "alibi", "sink", "keep") if r.random() < 0.3)
    return cache_cases.Case(
        lengths,
        tokens,
        (heads_kv * r.choice((1, 4, 8)), heads_kv),
        (dim, dim),
        page,
        starts=tuple(own.randint(0, length) for length in lengths) if some_starts else (),
        rows=tuple(own.sample(range(batch + 2), batch)) if some_rows and not page else (),
        dtype=r.choice(DTYPES),
        causal=r.random() < 0.7,
        window=r.choice((None, None, 40)),
        terms=tuple(name for name in terms if name != "keep" or not (packed or page or some_starts)),
        seed=seed * 1000 + variant,
    )


def _call_cached(q: Tensor, k: Tensor, v: Tensor, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = tilewise.attention_cached(q, k, v, **told, return_lse=True)
    assert isinstance(found, tuple)
    return found


def _run_cached(problem: Problem) -> str:
    """Caches have no gradients, and so no graphs to retain."""
    call, sizes = _call_cached, 1
    if term_generator.way(f"cached {problem.seed}") == "compiled":
        torch._dynamo.reset()
        call, sizes = torch.compile(call, fullgraph=True, backend="aot_eager"), term_generator.COMPILED_SIZES
    for number in range(sizes):
        case = draw_cached(problem.seed, problem.variant + number)
        made = cache_cases.make(case, problem.device)
        cache_cases.assert_as_expected(case, made, *call(made.q, made.k, made.v, made.told))
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# All


def draw(problem: Problem) -> Case:
    if problem.form == "packed":
        return draw_packed(problem.seed, problem.variant, problem.device)
    sizes = term_generator.EVERYWHERE if problem.form == "terms" else space(problem.device)
    return term_generator.draw(problem.seed, sizes, problem.variant)


def run(problem: Problem) -> Outcome:
    begun = time.monotonic()
    what = _outcome(problem)
    return Outcome(problem, what, time.monotonic() - begun)


def _outcome(problem: Problem) -> str:
    """matched, refused, or what is wrong."""
    try:
        if problem.form == "cached":
            wrong = _run_cached(problem)
        else:
            case = draw(problem)

            def another(number: int) -> Case:
                return draw(problem._replace(variant=problem.variant + number)).to(problem.device)

            try:
                wrong = "; ".join(term_generator.run_as_drawn(case.to(problem.device), another))
            except UnsupportedProblem:
                if case.asked.backend == "auto" and not (case.visible.is_cuda and case.may_be_refused):
                    raise
                return "refused"
            wrong = f"{case}: {wrong}" if wrong else ""
    except Exception as error:
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return wrong or "matched"


def _run_before(stop: float, problems: list[Problem]) -> list[Outcome]:
    """Those that begin before `stop`. All processes share the clock."""
    return [run(problem) for problem in problems if time.monotonic() < stop]


_CHUNK = 5  # neighbours, which share kernels, run in one process
_PATIENCE = 60.0  # seconds that problems which have begun may still take when the time is up


def run_all(problems: Iterable[Problem], processes: int | None, stop: float = math.inf) -> list[Outcome]:
    """The outcomes of the problems that begin before `stop`. What then does not end, or ends its process, is a failure
    of its own, and the outcomes of all others are kept."""
    if not processes:
        return _run_before(stop, list(problems))
    found = []
    start = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(processes, get_context("spawn"), **start) as pool:  # type: ignore[arg-type]
        waiting = list(problems)
        chunks = [waiting[first : first + _CHUNK] for first in range(0, len(waiting), _CHUNK)]
        begun = {pool.submit(_run_before, stop, chunk): chunk for chunk in chunks}
        _, late = wait(begun, None if stop == math.inf else max(0.0, stop - time.monotonic()) + _PATIENCE)
        for child in active_children() if late else ():
            child.kill()
        for future, chunk in begun.items():
            if future in late:
                found.append(Outcome(chunk[0], f"this or one of the next {len(chunk) - 1} did not end"))
            elif error := future.exception():
                found.append(Outcome(chunk[0], f"this or one of the next {len(chunk) - 1}: {error}"))
            else:
                found += future.result()
    return found


def drawn(seed: int, device: str, kinds: int, variants: range) -> list[Problem]:
    """Of so many kinds, half of them batched; those of one kind side by side."""
    forms = FORMS[device]
    return [Problem(forms[n % len(forms)], seed + n, variant, device) for n in range(kinds) for variant in variants]


def failed(outcomes: list[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.what not in ("matched", "refused")]


def report(outcomes: list[Outcome]) -> dict[str, int]:
    """How many of each form ended how. Prints the failures, with what runs each of them again."""
    failures = failed(outcomes)
    for problem, what, _ in failures:
        again = f"--form {problem.form} --seed {problem.seed} --variant {problem.variant} --device {problem.device}"
        print(f"{again}: {what}", flush=True)
    for problem, _, seconds in sorted(outcomes, key=lambda one: -one.seconds)[:5]:
        print(f"slow: --form {problem.form} --seed {problem.seed} --variant {problem.variant}: {seconds:.0f} s")
    counts = Counter(f"{one.problem.form}, {one.what if one not in failures else 'failed'}" for one in outcomes)
    print(dict(sorted(counts.items())), flush=True)
    return dict(sorted(counts.items()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--form", choices=("terms", "batched", "packed", "cached"), help="run one problem of this form")
    parser.add_argument("--variant", type=int, default=0, help="of the one problem")
    parser.add_argument("--kinds", type=int, default=100, help="or run so many kinds")
    parser.add_argument("--variants", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.form:
        problem = Problem(options.form, options.seed, options.variant, options.device)
        print(draw_cached(*problem[1:3]) if options.form == "cached" else draw(problem))
        outcomes = [run(problem)]
    else:
        outcomes = run_all(drawn(options.seed, options.device, options.kinds, range(options.variants)), os.cpu_count())
    report(outcomes)
    return int(bool(failed(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
