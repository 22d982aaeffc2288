"""Random combinations of masks and score terms in one call, each held to attention as it is written down, in float64.

A case is decided by a seed alone:

    PYTHONPATH=src python tests/hostile/term_generator.py --seed 123              # one case, described and run
    PYTHONPATH=src python tests/hostile/term_generator.py --seed 1000 --count 500

generator.py draws ways of calling; here what is asked of the scores is drawn: every kind of mask, learned or not, with
`keep`, slopes, sinks, tables and biases beside it, of all sizes down to none. Every call must be answered, the second
time that the graph of a result is used as the first, and in a compiled graph for every size that it meets.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TILEWISE_TABLES", "none")
os.environ.setdefault("TILEWISE_NATIVE", "off")

import argparse
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tilewise
from tilewise import Causal, Documents, Full, KeyLengths, PrefixLM, Window
from tilewise.terms import Bias, RelativeBias

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
MASKS = (
    "none", "causal", "bottom-right", "window", "documents", "prefix", "prefix tensor", "lengths", "lengths left",
    "boolean", "added", "learned",
)  # fmt: skip
TERMS = ("softcap", "keep", "alibi", "sink", "table", "bias")
BACKENDS = ("auto", "auto", "reference", "tiled")
# Largest error of a result whose numbers are near 1: of sums in float32 where an operand is, of rounded inputs else.
ALLOWED = {torch.float64: 3e-9, torch.float32: 6e-4, torch.float16: 0.05, torch.bfloat16: 0.2}
ALLOWED_OF_FLOAT32_OPERANDS = 3e-5
# How a case is called: "retained" differentiates one graph twice, "compiled" compiles one call for several sizes.
WAYS = {"once": 40, "retained": 8, "compiled": 1}
COMPILED_SIZES = 3
CANCELLING = 10  # times that, for gradients of operands in 16 bits: sums of thousands that may be 0


class Space(NamedTuple):
    """What sizes, numbers and backends are drawn from."""

    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float64, torch.float32, torch.bfloat16)
    rows: tuple[int, ...] = (0, 1, 2, 5, 17, 33)
    keys: tuple[int, ...] = (0, 1, 3, 17, 40, 65)
    dims: tuple[int, ...] = (1, 3, 8, 16)
    backends: tuple[str, ...] = BACKENDS
    again: float = 0.3  # share of the cases in float64 that are differentiated twice

    @classmethod
    def of_kernels(cls, backend: str) -> Space:
        """For kernels on a model: one size of heads, and tiles that are cut."""
        dtypes = (torch.bfloat16, torch.bfloat16, torch.float16)
        return cls(dtypes, (1, 70, 130), (1, 40, 150), (64,), (backend,), 0.0)


EVERYWHERE = Space()


class Sizes(NamedTuple):
    """What terms ask of a problem."""

    batch: int
    heads_q: int
    seq_q: int
    seq_kv: int
    dtype: torch.dtype

    def some(self, draw: random.Random) -> tuple[int, ...]:
        """A shape that broadcasts to that of the scores."""
        return tuple(draw.choice((1, size)) for size in self[:4])


class Asked(NamedTuple):
    """What a call is asked for beside what it reads."""

    backend: str
    layout: str = "bhsd"
    returns_lse: bool = False
    returns_max_logit: bool = False


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse and the largest scores


def call(leaves: dict[str, Tensor], arguments: dict[str, Any], asked: Asked) -> Results:
    """out as (batch, heads, seq, head_dim), lse and the largest scores, where they are asked for."""
    turned = (lambda x: x.transpose(1, 2)) if asked.layout == "bshd" else (lambda x: x)
    found: Any = tilewise.attention(
        *(turned(leaves[name]) for name in "qkv"),
        backend=asked.backend,
        layout=asked.layout,
        return_lse=asked.returns_lse,
        return_max_logit=asked.returns_max_logit,
        **arguments,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    largest = results.pop() if asked.returns_max_logit else None
    return turned(results[0]), results[1] if asked.returns_lse else None, largest


@dataclass
class Case:
    """A call, and the same for the formulas of `truth`: what is visible, and what is added to the scores."""

    seed: int
    sizes: Sizes
    group: int
    asked: Asked
    mask: str
    again: bool  # whether gradients are differentiated once more
    arguments: dict[str, Any]
    leaves: dict[str, Tensor]  # what may be differentiated, by name
    visible: Tensor
    added: Tensor | None = None  # an additive mask that is not learned
    index: Tensor | None = None  # of the table, for every pair
    draws: torch.Generator = field(default_factory=torch.Generator)
    variant: int | None = None
    # Of packed sequences: how far a query stands behind a key, the sequence of every row, and what calls.
    distance: Tensor | None = None
    sequence: Tensor | None = None
    caller: Callable[[dict[str, Tensor], dict[str, Any], Asked], Results] = call
    way: str = "once"

    def __str__(self) -> str:
        named = [name for name in self.arguments if name not in ("mask", "operands")]
        learned = [name for name, tensor in self.leaves.items() if tensor.requires_grad]
        return (
            f"seed {self.seed}, variant {self.variant}: {tuple(self.sizes)}, groups of {self.group}, "
            f"{tuple(self.asked)}, mask {self.mask}, {', '.join(named)}; learned {', '.join(learned)}; "
            f"{self.way}, again {self.again}"
        )

    def to(self, device: str) -> Case:
        """The same with tensors of another device; those that are named twice stay one."""
        moved: dict[int, Tensor] = {}

        def there(found: Any) -> Any:
            if isinstance(found, Tensor):
                tensor = moved.get(id(found))
                if tensor is None:
                    tensor = moved[id(found)] = found.detach().to(device).requires_grad_(found.requires_grad)
                return tensor
            if isinstance(found, dict):
                return {name: there(one) for name, one in found.items()}
            return found

        names = ("leaves", "arguments", "visible", "added", "index", "distance", "sequence")
        return replace(self, **{name: there(getattr(self, name)) for name in names})

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draws, dtype=torch.float64)


def draw(seed: int, space: Space = EVERYWHERE, variant: int | None = None) -> Case:
    """Variants of a seed ask for the same of other sizes and numbers: mostly of the same kernels."""
    r = random.Random(seed)
    own = r if variant is None else random.Random(f"{seed} {variant}")
    dtype, heads_kv, group = r.choice(space.dtypes), r.choice((1, 2)), r.choice((1, 1, 2, 3))
    sizes = Sizes(own.choice((1, 1, 2, 3)), heads_kv * group, own.choice(space.rows), own.choice(space.keys), dtype)
    dim = r.choice(space.dims)
    backend, layout, mask = r.choice(space.backends), r.choice(("bhsd", "bshd")), r.choice(MASKS)
    case = Case(
        seed=seed,
        sizes=sizes,
        group=group,
        asked=Asked(backend, layout, r.random() < 0.4, r.random() < 0.3),
        mask=mask,
        again=dtype == torch.float64 and r.random() < space.again,
        arguments={"scale": r.choice((None, 0.3))},
        leaves={},
        visible=torch.ones(sizes[:4], dtype=torch.bool),
        draws=torch.Generator().manual_seed(seed if variant is None else seed * 1000 + variant),
        variant=variant,
        way=way(seed),
    )
    dims = {"q": (sizes.heads_q, sizes.seq_q, dim), "k": (heads_kv, sizes.seq_kv, dim)}
    dims["v"] = (heads_kv, sizes.seq_kv, r.choice((dim, 5)) if space is EVERYWHERE else dim)
    for name, shape in dims.items():
        case.leaves[name] = case.normal(sizes.batch, *shape).to(dtype)
    _add_mask(case, r)
    for term in TERMS:
        if r.random() < 0.3:
            _add_term(case, term, r)
    for tensor in case.leaves.values():
        tensor.requires_grad_(r.random() < 0.8)
    return case


def _add_mask(case: Case, r: random.Random) -> None:
    sizes = case.sizes
    rows, keys = torch.arange(sizes.seq_q)[:, None], torch.arange(sizes.seq_kv)
    shift = sizes.seq_kv - sizes.seq_q
    per_batch = torch.randint(0, sizes.seq_kv + 1, (sizes.batch,), generator=case.draws)
    wide = per_batch[:, None, None, None]
    mask: Any = None
    shown: Tensor = torch.ones((), dtype=torch.bool)
    if case.mask == "documents" and sizes.seq_q != sizes.seq_kv:
        case.mask = "none"
    if case.mask == "causal":
        mask, shown = "causal", keys <= rows
    elif case.mask == "bottom-right":
        mask, shown = Causal("bottom-right"), keys <= rows + shift
    elif case.mask == "window":
        left, right = r.choice((0, 2, 9)), r.choice((0, 1, 5))
        mask, shown = Window(left, right), (keys <= rows + right) & (keys >= rows - left)
    elif case.mask == "documents":
        ends = sorted({sizes.seq_q, *(r.randint(0, sizes.seq_q) for _ in range(2))} - {0}) or [0]
        number = torch.bucketize(torch.arange(sizes.seq_q), torch.tensor(ends), right=True)
        mask, shown = Documents((0, *ends), (), Causal()), (number[:, None] == number) & (keys <= rows)
    elif case.mask == "prefix":
        prefix = r.choice((0, 3, 100))
        mask, shown = PrefixLM(prefix), (keys <= rows) | (keys < prefix)
    elif case.mask == "prefix tensor":
        mask, shown = PrefixLM(per_batch), (keys <= rows) | (keys < wide)
    elif case.mask.startswith("lengths"):
        inner: Any = r.choice((Full(), Causal(), Causal("bottom-right")))
        left_padded = case.mask == "lengths left"
        mask = KeyLengths(per_batch, "left" if left_padded else "right", inner)
        shown = keys >= sizes.seq_kv - wide if left_padded else keys < wide
        if isinstance(inner, Causal):
            shown = shown & (keys <= rows + (shift if inner.align == "bottom-right" else 0))
    elif case.mask == "boolean":
        shown = case.normal(*sizes.some(r)) > -0.3
        mask = _with_fewer_dims(shown, r)
    elif case.mask == "added":
        added = case.normal(*sizes.some(r)).to(sizes.dtype)
        added = added.masked_fill(torch.rand(added.shape, generator=case.draws) < 0.2, -torch.inf)
        case.added, mask = added, _with_fewer_dims(added, r)
    elif case.mask == "learned":
        case.leaves["mask"] = mask = case.normal(*sizes.some(r)).to(sizes.dtype)
    case.visible = case.visible & shown
    case.arguments["mask"] = mask


def _with_fewer_dims(tensor: Tensor, r: random.Random) -> Tensor:
    """Without some of the dimensions of size 1 that it begins with."""
    for _ in range(r.randint(0, 3)):
        tensor = tensor[0] if tensor.shape[0] == 1 else tensor
    return tensor


def _add_term(case: Case, term: str, r: random.Random) -> None:
    sizes, arguments = case.sizes, case.arguments
    if term == "softcap":
        arguments["softcap"] = 2.0
    elif term == "keep":
        keep = torch.rand(sizes.some(r), generator=case.draws) < 0.7
        arguments["keep"], case.visible = keep, case.visible & keep
    elif term == "alibi":
        shape = r.choice(((sizes.heads_q,), (sizes.batch, sizes.heads_q)))
        case.leaves["alibi"] = arguments["alibi"] = case.normal(*shape).abs().float()
    elif term == "sink":
        case.leaves["sink"] = arguments["sink"] = case.normal(sizes.heads_q).float()
    elif term == "table":
        span, zero = r.choice((1, 7, 80)), r.choice((0, 3, -5, 50))
        case.leaves["table"] = case.normal(sizes.heads_q, span).float()
        distance = torch.arange(sizes.seq_kv) - torch.arange(sizes.seq_q)[:, None]
        case.index = (distance + zero).clamp(0, span - 1)
        _add_operand(case, "table", RelativeBias(span, zero))
    elif case.mask not in ("added", "learned"):  # whose tensor has the same name
        case.leaves["bias"] = case.normal(*sizes.some(r)).to(sizes.dtype)
        _add_operand(case, "bias", Bias.of(case.leaves["bias"], sizes))


def _add_operand(case: Case, name: str, term: Any) -> None:
    case.arguments["scores"] = (*case.arguments.get("scores", ()), term)
    case.arguments["operands"] = {**case.arguments.get("operands", {}), name: case.leaves[name]}


# ---------------------------------------------------------------------------------------------------------------------
# The truth


def truth(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest score of every head."""
    q, k, v = given["q"], *(given[name].repeat_interleave(case.group, 1) for name in "kv")
    arguments, (batch, heads, rows, keys, _) = case.arguments, case.sizes
    scores = (arguments["scale"] or q.shape[-1] ** -0.5) * (q @ k.mT)
    if cap := arguments.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if "table" in given:
        scores = scores + given["table"][:, case.index]
    if "bias" in given:
        scores = scores + given["bias"]
    if "alibi" in given:
        slopes = given["alibi"]
        if case.sequence is not None and slopes.ndim == 2:
            slopes = slopes[case.sequence].T[None, ..., None]
        else:
            slopes = slopes.expand(batch, heads)[..., None, None]
        distance = case.distance
        if distance is None:
            distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
        scores = scores - slopes * distance.abs()
    if "mask" in given:
        scores = scores + given["mask"]
    if case.added is not None:
        scores = scores + case.added.double()
    scores = scores.masked_fill(~case.visible, -torch.inf)
    logits = [scores]
    if "sink" in given:
        logits.append(given["sink"][None, :, None, None].expand(batch, heads, rows, 1))
    joined = torch.cat(logits, -1)
    joined = torch.cat([joined, joined.new_full((*joined.shape[:3], 1), -torch.inf)], -1)  # there may be none
    top = joined.detach().amax(-1, keepdim=True)
    weights = torch.exp(joined - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    sees_none = total == 0.0
    safe = total.masked_fill(sees_none, 1.0)
    lse = (safe.log() + top.masked_fill(sees_none, 0.0)).masked_fill(sees_none, -torch.inf).squeeze(-1)
    per_head = joined[..., :keys].detach().transpose(0, 1).flatten(1)
    largest = torch.cat([per_head, per_head.new_full((heads, 1), -torch.inf)], 1).amax(1)
    return weights[..., :keys] / safe @ v, lse, largest


def way(seed: int | str) -> str:
    """How cases of this seed are called."""
    return random.Random(f"way {seed}").choices(list(WAYS), list(WAYS.values()))[0]


def run_as_drawn(case: Case, another: Callable[[int], Case]) -> list[str]:
    """What is wrong, in words; `another` draws cases of other sizes for a graph that is compiled once."""
    if case.way != "compiled":
        return run(case)
    torch._dynamo.reset()
    compiled = torch.compile(case.caller, fullgraph=True, backend="aot_eager")
    cases = [case, *(another(number) for number in range(1, COMPILED_SIZES))]
    return [f"size {number}: {text}" for number, one in enumerate(cases) for text in run(one, compiled)]


def run(case: Case, caller: Any = None) -> list[str]:
    """What is wrong, in words."""
    exact = {name: tensor.detach().double() for name, tensor in case.leaves.items()}
    wanted = [name for name, tensor in case.leaves.items() if tensor.requires_grad]
    for name in wanted:
        exact[name].requires_grad_()
    with torch.device(case.visible.device):
        want = truth(case, exact)
    got = (caller or case.caller)(case.leaves, case.arguments, case.asked)
    allowed = ALLOWED[case.sizes.dtype]
    if {"alibi", "sink", "table"} & set(case.leaves):
        allowed = max(allowed, ALLOWED_OF_FLOAT32_OPERANDS)
    names = ("out", "lse", "largest score")
    pairs = [(name, one, other) for name, one, other in zip(names, got, want, strict=True) if one is not None]
    wrong = [text for name, one, other in pairs if (text := _difference(name, one, other, allowed))]
    if not wanted or wrong:
        return wrong
    outputs = [(one, other) for name, one, other in pairs if name != "largest score"]
    weights = [
        torch.randn(other.shape, generator=case.draws, dtype=torch.float64).to(other.device) for _, other in outputs
    ]
    losses = (
        sum(
            (torch.nan_to_num(one.double(), neginf=0.0) * weight).sum()
            for one, weight in zip(ones, weights, strict=True)
        )
        for ones in zip(*outputs, strict=True)
    )
    of_call, of_truth = (
        list(tensors.values()) for tensors in ({n: case.leaves[n] for n in wanted}, {n: exact[n] for n in wanted})
    )
    loss, exact_loss = losses
    again = case.again and caller is None  # PyTorch differentiates compiled graphs once
    retained = case.way == "retained"
    grads = _gradients(loss, of_call, again=again, retained=retained)
    exact_grads = _gradients(exact_loss, of_truth, again=again)
    labels = [f"d{name}" for name in wanted]
    if retained:
        labels += [f"d{name} of the retained graph" for name in wanted]
        grads, exact_grads = grads + _gradients(loss, of_call, again=again), exact_grads * 2
    if again:
        grads += _gradients(_size(grads), of_call)
        exact_grads += _gradients(_size(exact_grads), of_truth)
        labels += [f"second d{name}" for name in wanted]
    checks = zip(labels, grads, exact_grads, strict=True)
    return [text for name, *pair in checks if (text := _difference(name, *pair, 2 * allowed * _cancelling(case, name)))]


def _cancelling(case: Case, name: str) -> float:
    """A gradient of an operand may be a sum that is 0 but for the error of delta, itself a sum over head_dim."""
    if name.split()[0] in ("dq", "dk", "dv"):
        return 1
    by_kernels = case.asked.backend.startswith("sm") or case.visible.is_cuda
    return CANCELLING if by_kernels else max(1.0, (case.leaves["v"].shape[-1] / max(EVERYWHERE.dims)) ** 0.5)


def _gradients(loss: Any, tensors: list[Tensor], *, again: bool = False, retained: bool = False) -> list[Tensor]:
    """Zeros where nothing depends on a tensor."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    options = {"create_graph": again, "retain_graph": again or retained}
    return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True, **options))


def _size(grads: list[Tensor]) -> Any:
    return sum(grad.double().square().sum() for grad in grads)


def _difference(name: str, got: Tensor, want: Tensor, allowed: float) -> str:
    got, want = got.detach().double(), want.detach()
    if got.shape != want.shape:
        return f"{name} has the shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    infinite = want.isinf()
    if not torch.equal(got.isinf(), infinite):
        return f"{name} is infinite elsewhere"
    got, want = got.masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
    if not got.numel():
        return ""
    size, off = max(1.0, want.abs().max().item()), (got - want).abs().max().item()
    return "" if off <= allowed * size else f"{name} is off by {off:.1e}, of {size:.1e}"


def run_many(seeds: range, space: Space = EVERYWHERE) -> list[str]:
    """What fails, in words."""
    failures = []
    for seed in seeds:
        case = draw(seed, space)
        try:
            wrong = run_as_drawn(case, lambda number, seed=seed: draw(seed, space, number))  # type: ignore[misc]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
        failures += [f"{case}: {'; '.join(wrong)}"] if wrong else []
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.count)
    if options.count == 1:
        print(draw(options.seed))
    failures = run_many(seeds)
    print("\n".join(failures) or f"{options.count} matched")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
