"""Random attention problems and ways of calling, each held to the float64 reference of this folder.

A case is decided by a seed and its index alone:

    PYTHONPATH=src python tests/hostile/generator.py --seed 7 --index 123          # one case, described and run
    PYTHONPATH=src python tests/hostile/generator.py --seed 7 --count 1000         # the first thousand

Each must match the reference within its error bound, or raise the package's own error. A call that "auto" should answer
has to be answered. What is handed to PyTorch may do what PyTorch does.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TILEWISE_TABLES", "none")
os.environ.setdefault("TILEWISE_NATIVE", "off")

import argparse
import contextlib
import random
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import reference
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tilewise
from support import budget
from tilewise.integrations import flash_attn
from tilewise.scores import softcapped, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKENDS = {
    "reference": 6, "tiled": 8, "torch-math": 6, "torch-flash": 6, "torch-efficient": 1, "torch-cudnn": 1, "triton": 1,
    "sm80": 1, "sm90": 1,
}  # fmt: skip
# name: (weight, the ways of calling it that make sense)
FORWARD_WAYS = {"eager": 14, "inference": 4, "threads": 4, "inplace": 4, "vmap": 5, "jvp": 4, "dual": 3}
GRADIENT_WAYS = {
    "grad": 16, "autocast": 10, "double": 12, "checkpoint": 5, "functional": 4, "batched": 3, "hooks": 3,
    "again": 3, "deterministic": 3, "compile": 2, "poison": 4,
}  # fmt: skip
WAYS = FORWARD_WAYS | GRADIENT_WAYS
FUNCTIONS = {"attention": 60, "sdpa": 12, "override": 12, "operator": 6, "flash": 5, "varlen": 5}
STORAGES = {
    "plain": 30, "exchanged": 10, "strided": 8, "shifted": 8, "batch expanded": 5, "heads expanded": 5,
    "seq expanded": 4, "parameter": 4, "subclass": 3, "zero tensor": 1,
}  # fmt: skip
ALIASES = {"none": 60, "all one": 10, "keys are values": 10, "dependent": 12, "packed": 8}
MASKS = {"none": 20, "causal": 15, "window": 15, "documents": 15, "boolean": 15, "additive": 15}


@dataclass(frozen=True)
class Case:
    """All that decides a call but the numbers in its tensors, which come from `numbers`."""

    function: str
    way: str
    backend: str
    dtype: str
    batch: int
    heads_kv: int
    group: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    layout: str
    storage: tuple[str, str, str]
    strided_leaves: bool
    alias: str
    wants: tuple[bool, bool, bool]
    mask: str
    as_text: bool
    align: str
    left: int | None
    right: int | None
    starts_q: tuple[int, ...]
    starts_kv: tuple[int, ...]
    mask_shape: tuple[int, ...]
    scale: float | None
    softcap: float
    return_lse: bool
    magnitude: float
    inside: bool  # the backward runs inside the context of the call (autocast, override)
    misuse: str
    numbers: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def draw(seed: int, index: int) -> Case:
    """The case with this index of this seed."""
    rng = random.Random(f"{seed}/{index}")
    function, way = _pick(rng, FUNCTIONS), _pick(rng, WAYS)
    low = ("bfloat16", "float16")
    dtype = _pick(rng, {"float32": 5, "float64": 3, **dict.fromkeys(low, 1)})
    if way in ("double", "batched") and dtype in low:
        dtype = "float32"  # second derivatives of low precision have no digits left to look at
    small = lambda: rng.choice((1, 1, 2, 3))
    length = lambda: rng.choice((rng.randint(1, 8), rng.randint(1, 40), rng.choice((0, 1, 33, 64, 65, 130))))
    dim = lambda: rng.choice((1, 2, 3, 4, 8, 8, 13, 16, 32))
    batch, heads_kv, group, seq_q, seq_kv, head_dim = small(), small(), small(), length(), length(), dim()
    head_dim_v = head_dim if rng.random() < 0.7 else dim()
    if rng.random() < 0.04:
        batch = 0
    if rng.random() < 0.03:
        heads_kv = 0
    if rng.random() < 0.6:
        seq_kv = seq_q
    mask = _pick(rng, MASKS)
    if way == "poison":
        mask, function = "documents", rng.choice(("attention", "operator", "varlen"))
    if function in ("sdpa", "override") and mask in ("window", "documents"):
        mask = "causal"
    if function == "flash":
        mask = rng.choice(("none", "causal", "window"))
    if function == "varlen":
        mask, batch = "documents", 1
    align = rng.choice(("top-left", "bottom-right"))
    if function in ("sdpa", "override"):
        align = "top-left"
    if function in ("flash", "varlen"):
        align = "bottom-right"
    reach = lambda: rng.choice((None, 0, rng.randint(0, 6), rng.randint(0, 30)))
    left, right = (reach(), reach()) if mask == "window" or rng.random() < 0.3 else (None, rng.choice((None, 0)))
    if mask == "causal":
        left, right = None, 0
    count = rng.randint(1, 4)
    layout = rng.choice(("bhsd", "bhsd", "bshd")) if function in ("attention", "operator") else "bhsd"
    alias = _pick(rng, ALIASES) if way != "poison" else "none"
    if alias != "none":
        seq_kv, head_dim_v = (seq_q, head_dim) if alias != "keys are values" else (seq_kv, head_dim)
        group = 1 if alias != "keys are values" else group
    case = Case(
        function=function,
        way=way,
        backend="auto" if rng.random() < 0.5 or function in ("sdpa", "flash", "varlen") else _pick(rng, BACKENDS),
        dtype=dtype,
        batch=batch,
        heads_kv=heads_kv,
        group=group,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        layout=layout,
        storage=tuple(_pick(rng, STORAGES) for _ in range(3)),  # type: ignore[arg-type]
        strided_leaves=rng.random() < 0.5,
        alias=alias,
        wants=rng.choice(((True, True, True),) * 4 + ((True, False, False), (False, True, False), (False, True, True))),
        mask=mask,
        as_text=rng.random() < 0.3,
        align=align,
        left=left,
        right=right,
        starts_q=_starts(rng, count, seq_q),
        starts_kv=_starts(rng, count, seq_kv),
        mask_shape=(),
        scale=rng.choice((None, None, None, 0.5, -0.3, 1e-3, 3.0)),
        softcap=1e39 if rng.random() < 0.01 else rng.choice((0.0, 0.0, 0.0, 0.5, 2.0, 30.0, 1e6)),
        return_lse=rng.random() < 0.35,
        magnitude=rng.choice((1.0, 1.0, 1.0, 5.0, 0.0, 1e-3)),
        inside=rng.random() < 0.5,
        misuse=rng.choice(list(MISUSES)) if rng.random() < 0.08 else "",
        numbers=rng.getrandbits(40),
    )
    if case.mask in ("boolean", "additive"):
        case = replace(case, mask_shape=_mask_shape(rng, case))
    if function in ("sdpa", "override"):
        case = replace(case, softcap=0.0, return_lse=False)
    if function == "operator" and way in ("vmap", "jvp", "dual", "functional"):
        case = replace(case, way="grad")
    if function == "override":  # PyTorch's own flash kernel on CPUs reads memory that a zero tensor does not have
        case = replace(case, storage=tuple("plain" if s == "zero tensor" else s for s in case.storage))  # type: ignore[arg-type]
    if way == "autocast" and alias == "packed":  # autocast has an opinion of the backward of `unbind`
        case = replace(case, inside=False)
    if way in ("jvp", "dual"):  # PyTorch makes no dual tensor of one whose elements share memory
        case = replace(case, strided_leaves=False)
    if (
        function in ("operator", "flash", "varlen") and way == "inplace"
    ):  # `call` looks at what these return through views
        case = replace(case, way="again")
    if function in ("override", "varlen") and way in ("vmap", "jvp", "dual", "functional", "compile"):
        case = replace(case, way="grad")
    return case


def _pick(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _starts(rng: random.Random, count: int, length: int) -> tuple[int, ...]:
    return (0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length)


def _mask_shape(rng: random.Random, case: Case) -> tuple[int, ...]:
    full = (case.batch, case.heads_q, case.seq_q, case.seq_kv)
    shape = tuple(size if rng.random() < 0.7 else 1 for size in full)
    if case.function in ("sdpa", "override"):
        return shape[rng.choice((0, 2)) :]
    return shape[rng.choice((0, 0, 1, 2, 3)) :]


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


class _Named(Tensor):
    """A subclass that changes nothing."""


class Inputs(NamedTuple):
    """Leaves, and the exact linear map that makes q, k and v of them, in the case's own layout."""

    leaves: tuple[Tensor, ...]
    build: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]


def make_inputs(case: Case) -> Inputs:
    numbers = torch.Generator().manual_seed(case.numbers)

    def drawn(*shape: int) -> Tensor:
        return (case.magnitude * torch.randn(shape, generator=numbers, dtype=torch.float64)).to(case.torch_dtype)

    def stored(heads: int, seq: int, dim: int) -> tuple[int, ...]:
        return (case.batch, seq, heads, dim) if case.layout == "bshd" else (case.batch, heads, seq, dim)

    shape_q = stored(case.heads_q, case.seq_q, case.head_dim)
    shape_k = stored(case.heads_kv, case.seq_kv, case.head_dim)
    shape_v = stored(case.heads_kv, case.seq_kv, case.head_dim_v)
    if case.alias == "all one":
        return Inputs((drawn(*shape_q),), lambda leaves: (leaves[0],) * 3)
    if case.alias == "keys are values":
        return Inputs((drawn(*shape_q), drawn(*shape_k)), lambda leaves: (leaves[0], leaves[1], leaves[1]))
    if case.alias == "dependent":
        orders = [torch.randperm(case.head_dim, generator=numbers) for _ in range(2)]

        def depend(leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            (x,) = leaves
            return x, -x[..., orders[0]], 2 * x[..., orders[1]]  # rounds nothing

        return Inputs((drawn(*shape_q),), depend)
    if case.alias == "packed":
        return Inputs((drawn(3, *shape_q),), lambda leaves: leaves[0].unbind(0))  # type: ignore[arg-type]
    bases, views = [], []
    for shape, storage in zip((shape_q, shape_k, shape_v), case.storage, strict=True):
        base, view = _viewed(shape, storage, drawn)
        bases.append(base)
        views.append(view)

    def look(leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(view(leaf) for view, leaf in zip(views, leaves, strict=True))  # type: ignore[return-value]

    if not case.strided_leaves:
        return Inputs(tuple(bases), look)
    kept = tuple(
        _kept_kind(tensor.detach(), storage) for tensor, storage in zip(look(tuple(bases)), case.storage, strict=True)
    )
    return Inputs(kept, lambda leaves: leaves)  # type: ignore[arg-type, return-value]


def _viewed(
    shape: tuple[int, ...], storage: str, drawn: Callable[..., Tensor]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A base and the view of it that has `shape`."""
    if storage == "exchanged":
        return drawn(shape[0], shape[2], shape[1], shape[3]), lambda base: base.transpose(1, 2)
    if storage == "strided":
        return drawn(*shape[:3], 2 * shape[3]), lambda base: base[..., ::2]
    if storage == "shifted":
        return drawn(*shape[:3], shape[3] + 1), lambda base: base[..., 1:]
    if storage.endswith("expanded"):
        dim = {"batch": 0, "heads": 1, "seq": 2}[storage.split()[0]]
        base_shape = tuple(1 if d == dim else size for d, size in enumerate(shape))
        return drawn(*base_shape), lambda base: base.expand(shape)
    return drawn(*shape), lambda base: base


def _kept_kind(tensor: Tensor, storage: str) -> Tensor:
    if storage == "parameter":
        return torch.nn.Parameter(tensor)
    if storage == "subclass":
        return tensor.as_subclass(_Named)
    if storage == "zero tensor":
        return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def mask_tensor(case: Case) -> Tensor | None:
    if case.mask not in ("boolean", "additive"):
        return None
    numbers = torch.Generator().manual_seed(case.numbers + 1)
    visible = torch.rand(case.mask_shape, generator=numbers) < 0.7
    visible &= torch.rand((*case.mask_shape[:-1], 1), generator=numbers) > 0.1
    if case.mask == "boolean":
        return visible
    bias = torch.randn(case.mask_shape, generator=numbers).to(case.torch_dtype)
    return bias.masked_fill(~visible, -torch.inf)


def mask_argument(case: Case) -> Any:
    """What `attention` is given."""
    inner: Any
    if case.mask == "none":
        return None
    if case.mask in ("boolean", "additive"):
        return mask_tensor(case)
    if case.mask == "causal":
        made = tilewise.Causal(case.align)
    elif case.mask == "window":
        made = tilewise.Window(case.left, case.right, case.align)
    else:
        bounded = case.left is not None or case.right is not None
        inner = tilewise.Window(case.left, case.right, case.align) if bounded else tilewise.Full()
        made = tilewise.Documents(case.starts_q, case.starts_kv, inner)
    return str(made) if case.as_text else made


def visible_pairs(case: Case) -> Tensor:
    rows, keys = case.seq_q, case.seq_kv
    if case.mask in ("causal", "window"):
        return reference.band(rows, keys, case.left, case.right, case.align)
    if case.mask == "documents":
        return reference.documents(case.starts_q, case.starts_kv, case.left, case.right, case.align)
    visible = torch.ones(case.batch, case.heads_q, rows, keys, dtype=torch.bool)
    return visible & mask_tensor(case) if case.mask == "boolean" else visible


# ---------------------------------------------------------------------------------------------------------------------
# The call


def call(case: Case, q: Any, k: Any, v: Any, **overrides: Any) -> tuple[Tensor, ...]:
    """(out,) or (out, lse), by the case's function, in the case's layout."""
    mask = overrides.pop("mask") if "mask" in overrides else mask_argument(case)
    scale = overrides.pop("scale", case.scale)
    if case.function in ("sdpa", "override", "torch"):
        tensor = mask if isinstance(mask, Tensor) else None
        ours = tilewise.scaled_dot_product_attention
        function = ours if case.function == "sdpa" else F.scaled_dot_product_attention
        with override(case):
            return (function(q, k, v, tensor, 0.0, case.mask == "causal", scale=scale, enable_gqa=case.group > 1),)
    if case.function in ("flash", "varlen"):
        return _call_flash(case, q, k, v, scale)
    if case.function == "operator":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v)) if case.layout == "bshd" else (q, k, v)
        tensors = [mask] if isinstance(mask, Tensor) else []
        text = "" if tensors else "full" if mask is None else str(mask)
        terms = text_of(softcapped(case.softcap))
        out, lse = torch.ops.tilewise.attention(
            q, k, v, tensors, text, scale, terms, case.layout, case.backend, case.return_lse
        )
        out = out.transpose(1, 2) if case.layout == "bshd" else out
        return (out, lse) if case.return_lse else (out,)
    named = {
        "mask": mask, "scale": scale, "softcap": case.softcap, "dropout": 0.0, "layout": case.layout,
        "return_lse": case.return_lse, "backend": case.backend,
    }  # fmt: skip
    result = tilewise.attention(q, k, v, **(named | overrides))
    return result if isinstance(result, tuple) else (result,)


def _call_flash(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    left, right = (-1 if size is None else size for size in (case.left, case.right))
    options = {
        "softmax_scale": scale, "causal": case.mask == "causal", "softcap": case.softcap,
        "window_size": (left, right) if case.mask in ("window", "documents") else (-1, -1),
        "return_attn_probs": case.return_lse,
    }  # fmt: skip
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if case.function == "flash":
        result = flash_attn.flash_attn_func(q, k, v, **options)
        out, lse = result[:2] if isinstance(result, tuple) else (result, None)
    else:
        starts = [torch.tensor(start, dtype=torch.int32) for start in (case.starts_q, case.starts_kv)]
        longest = [int(start.diff().max()) for start in starts]
        result = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *starts, *longest, **options)
        out, lse = result[:2] if isinstance(result, tuple) else (result, None)
        out, lse = out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    out = out.transpose(1, 2)
    return (out,) if lse is None else (out, lse)


@contextlib.contextmanager
def override(case: Case) -> Iterator[None]:
    if case.function != "override":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tilewise.sdpa(backend=case.backend):
            yield


# ---------------------------------------------------------------------------------------------------------------------
# What must come out


class Wrong(AssertionError):
    """A result that is not the reference's."""


class Expected(NamedTuple):
    out: reference.Bounded
    lse: reference.Bounded
    grads: tuple[reference.Bounded, ...]  # of the leaves
    dout: Tensor
    dlse: Tensor | None
    leaves: tuple[Tensor, ...]  # in float64
    forward: Callable[..., tuple[Tensor, ...]]  # of float64 leaves, differentiable
    size: float  # of what is summed on the way, for results without a bound of their own


def casts(case: Case) -> bool:
    """PyTorch's function, and so its namesake and the override, casts its inputs under autocast."""
    return case.way == "autocast" and case.function in ("sdpa", "override", "torch") and case.dtype != "float64"


def expectation(case: Case, inputs: Inputs) -> Expected:
    dtype = torch.bfloat16 if casts(case) else case.torch_dtype
    terms = max(case.seq_kv, case.seq_q * case.group, case.head_dim, case.head_dim_v)
    tolerance = budget(dtype, terms)
    bias = mask_tensor(case) if case.mask == "additive" else None
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    exact = reference.Attention(
        visible_pairs(case), None if bias is None else bias.to(dtype).double(), scale, case.softcap
    )
    leaves = tuple(plain(leaf).detach().double().requires_grad_() for leaf in inputs.leaves)

    def arranged(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v = inputs.build(leaves)
        return tuple(t.transpose(1, 2) for t in (q, k, v)) if case.layout == "bshd" else (q, k, v)

    def rounded(tensor: Tensor) -> Tensor:
        return tensor + (tensor.detach().to(dtype).double() - tensor.detach()) if casts(case) else tensor

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, lse = exact.forward(*(rounded(tensor) for tensor in arranged(leaves)))
        out = out.transpose(1, 2) if case.layout == "bshd" else out
        return (out, lse) if case.return_lse else (out,)

    q, k, v = arranged(leaves)
    numbers = torch.Generator().manual_seed(case.numbers + 2)
    dout = torch.randn((*q.shape[:3], v.shape[-1]), generator=numbers, dtype=torch.float64).to(dtype).double()
    dlse = (
        torch.randn(q.shape[:3], generator=numbers, dtype=torch.float64).float().double() if case.return_lse else None
    )
    with torch.no_grad():
        out, lse, grads = exact.bounded(*(rounded(t) for t in (q, k, v)), dout, dlse, tolerance)
    largest = max([1.0, *(float(t.detach().abs().max()) for t in (q, k, v) if t.numel())])
    floor = torch.finfo(dtype).tiny * max(terms, 1) * largest**2 * max(1.0, abs(scale))
    values = torch.autograd.grad((q, k, v), leaves, [grad.value for grad in grads], retain_graph=True)
    errors = _pulled_back((q, k, v), leaves, [grad.error + floor for grad in grads])
    exchange = (lambda t: t.transpose(1, 2)) if case.layout == "bshd" else (lambda t: t)
    return Expected(
        reference.Bounded(exchange(out.value), exchange(out.error) + floor),
        reference.Bounded(lse.value, lse.error + floor),
        tuple(reference.Bounded(*pair) for pair in zip(values, errors, strict=True)),
        exchange(dout),
        dlse,
        leaves,
        forward,
        float((out.error.max() if out.error.numel() else 0.0) / tolerance) + largest**2 * max(1.0, abs(scale)),
    )


def _pulled_back(made: tuple[Tensor, ...], leaves: tuple[Tensor, ...], errors: list[Tensor]) -> list[Tensor]:
    """Errors of q, k and v as errors of the leaves. Each of the maps adds, moves, doubles or negates elements."""
    totals = [torch.zeros_like(leaf) for leaf in leaves]
    for tensor, error in zip(made, errors, strict=True):
        parts = torch.autograd.grad(tensor, leaves, error, retain_graph=True, allow_unused=True)
        totals = [total if part is None else total + part.abs() for total, part in zip(totals, parts, strict=True)]
    return totals


def plain(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor._is_zerotensor() else tensor.as_subclass(Tensor)


def check(got: Tensor, want: reference.Bounded, what: str) -> None:
    if not isinstance(got, Tensor):
        raise Wrong(f"{what}: {got!r} instead of a tensor")
    got = plain(got.detach()).double()
    value, error = want
    if got.shape != value.shape:
        raise Wrong(f"{what}: shape {tuple(got.shape)}, expected {tuple(value.shape)}")
    infinite = value.isinf()
    if not torch.equal(got[infinite], value[infinite]):
        raise Wrong(f"{what}: infinities differ")
    difference, error = (got - value).abs()[~infinite], error[~infinite]
    off = ~(difference <= error)
    if off.any():
        worst = float((difference / error)[off].max())
        raise Wrong(f"{what}: {worst:.3g} times the error allowed, in {int(off.sum())} of {off.numel()} elements")


def check_loosely(got: Tensor, want: Tensor, case: Case, size: float, what: str) -> None:
    """Half of the digits, against the size of what was summed: for results whose bound nobody derived."""
    if got.shape != want.shape:
        raise Wrong(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = plain(got.detach()).double(), want.detach()
    finite = want.isfinite()
    error = (got - want)[finite].norm().item()
    allowed = torch.finfo(case.torch_dtype).eps ** 0.5 * max(want[finite].norm().item(), size * want.numel() ** 0.5)
    if not error <= allowed:
        raise Wrong(f"{what}: error {error:.3g}, allowed {allowed:.3g}, of a norm of {want[finite].norm().item():.3g}")


# ---------------------------------------------------------------------------------------------------------------------
# The ways of calling


class Trial:
    """A case with its tensors and what must come out; every way of calling is a method."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs = make_inputs(case)
        self.mask = mask_argument(case)
        self.expected = expectation(case, self.inputs)
        aliased = case.alias != "none"
        self.wants = [aliased or want for want, _ in zip(case.wants, self.inputs.leaves, strict=False)]

    def run(self) -> None:
        getattr(self, f"_{self.case.way}")()

    def leaves(self) -> tuple[Tensor, ...]:
        """Fresh ones; those that are wanted require grad."""
        made = []
        for leaf, want in zip(self.inputs.leaves, self.wants, strict=True):
            made.append(leaf.detach().requires_grad_(want) if type(leaf) is Tensor else leaf.requires_grad_(want))
        return tuple(made)

    def forward(self, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.call(*self.inputs.build(leaves))

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return call(self.case, q, k, v, mask=self.mask)

    def cotangents(self, outs: tuple[Tensor, ...]) -> list[Tensor]:
        given = (self.expected.dout, self.expected.dlse)
        return [g.to(out.dtype) for out, g in zip(outs, given, strict=False) if g is not None]

    def check_outs(self, outs: tuple[Tensor, ...], factor: float = 1.0) -> None:
        dtype = torch.bfloat16 if casts(self.case) else self.case.torch_dtype
        if outs[0].dtype != dtype:
            raise Wrong(f"out is {outs[0].dtype}, expected {dtype}")
        wants = (self.expected.out, self.expected.lse)
        for out, want, what in zip(outs, wants, ("out", "lse"), strict=False):
            scaled = reference.Bounded(want.value * factor, want.error * factor) if what == "out" else want
            check(out, scaled, what)

    def check_grads(self, grads: tuple[Tensor | None, ...], factor: float = 1.0) -> None:
        wanted = [g for g, want in zip(self.expected.grads, self.wants, strict=True) if want]
        for index, (grad, want) in enumerate(zip(grads, wanted, strict=True)):
            scaled = reference.Bounded(want.value * factor, want.error * factor)
            check(grad, scaled, f"gradient of leaf {index}")

    def differentiate(self, outs: tuple[Tensor, ...], leaves: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(outs, wanted, self.cotangents(outs), **options)

    # Forward ways

    def _eager(self) -> None:
        tensors = tuple(leaf.detach() for leaf in self.inputs.leaves)
        self.check_outs(self.forward(tensors))
        self.check_outs(self.forward(tensors))  # as a call that is remembered

    def _inference(self) -> None:
        with torch.inference_mode() if self.case.inside else torch.no_grad():
            leaves = self.leaves()
            outs = self.forward(leaves)
        if outs[0].requires_grad:
            raise Wrong("out requires grad")
        self.check_outs(outs)

    def _threads(self) -> None:
        def one(_: int) -> None:
            leaves = self.leaves()
            outs = self.forward(leaves)
            self.check_outs(outs)
            self.check_grads(self.differentiate(outs, leaves))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(one, range(3)))

    def _inplace(self) -> None:
        """What is returned is the caller's to change; PyTorch says so where a gradient would need what it was."""
        leaves = self.leaves()
        outs = self.forward(leaves)
        outs[0].mul_(2)
        self.check_outs(outs, 2.0)
        try:
            grads = torch.autograd.grad(
                outs[0], [leaf for leaf in leaves if leaf.requires_grad], self.cotangents(outs)[0]
            )
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
        else:
            if len(outs) == 1:
                self.check_grads(grads, 2.0)

    def _vmap(self) -> None:
        q, k, v = (plain(tensor.detach()) for tensor in self.inputs.build(self.inputs.leaves))
        batched = [bool(self.case.numbers >> bit & 1) for bit in range(3)]
        batched[self.case.numbers % 3] = True
        stacked = [torch.stack((t, t)) if many else t for t, many in zip((q, k), batched, strict=False)]
        stacked.append(torch.stack((v, 2 * v)) if batched[2] else v)
        outs = torch.vmap(self.call, in_dims=tuple(0 if many else None for many in batched))(*stacked)
        self.check_outs(tuple(out[0] for out in outs))
        self.check_outs(tuple(out[1] for out in outs), 2.0 if batched[2] else 1.0)

    def _tangents(self) -> tuple[Tensor, ...]:
        numbers = torch.Generator().manual_seed(self.case.numbers + 3)
        return tuple(
            torch.randn(leaf.shape, generator=numbers, dtype=torch.float64).to(leaf.dtype)
            for leaf in self.inputs.leaves
        )

    def _check_tangents(self, got: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> None:
        leaves = tuple(leaf.detach() for leaf in self.expected.leaves)
        _, want = torch.func.jvp(self.expected.forward, leaves, tuple(t.double() for t in tangents))
        for one, other in zip(got, want, strict=True):
            check_loosely(one, other, self.case, self.expected.size, "tangent")

    def _jvp(self) -> None:
        tangents = self._tangents()
        outs, got = torch.func.jvp(
            lambda *leaves: self.forward(leaves), tuple(plain(leaf).detach() for leaf in self.inputs.leaves), tangents
        )
        self.check_outs(outs)
        self._check_tangents(got, tangents)

    def _dual(self) -> None:
        tangents = self._tangents()
        with forward_ad.dual_level():
            pairs = zip(self.inputs.leaves, tangents, strict=True)
            outs = self.forward(tuple(forward_ad.make_dual(plain(leaf).detach(), t) for leaf, t in pairs))
            values, got = zip(*(forward_ad.unpack_dual(out) for out in outs), strict=True)
        got = tuple(torch.zeros_like(out) if t is None else t for t, out in zip(got, values, strict=True))
        self.check_outs(values)
        self._check_tangents(got, tangents)

    # Ways with gradients

    def _grad(self) -> None:
        for _ in range(2):
            leaves = self.leaves()
            outs = self.forward(leaves)
            self.check_outs(outs)
            self.check_grads(self.differentiate(outs, leaves))

    def _again(self) -> None:
        leaves = self.leaves()
        outs = self.forward(leaves)
        for _ in range(2):
            self.check_grads(self.differentiate(outs, leaves, retain_graph=True))

    def _autocast(self) -> None:
        leaves = self.leaves()
        made = self.inputs.build(leaves)
        with torch.autocast("cpu", torch.bfloat16):
            outs = self.call(*made)
            if self.case.inside:
                grads = self.differentiate(outs, leaves)
        if not self.case.inside:
            grads = self.differentiate(outs, leaves)
        self.check_outs(outs)
        self.check_grads(grads)

    def _double(self) -> None:
        leaves = self.leaves()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outs = self.forward(leaves)
        grads = self.differentiate(outs, leaves, create_graph=True)
        self.check_outs(outs)
        self.check_grads(grads)
        turned = [torch.linspace(-1, 1, grad.numel(), dtype=grad.dtype).view(grad.shape) for grad in grads]
        got = torch.autograd.grad(grads, wanted, turned, allow_unused=True)
        exact = self.expected.leaves
        exact_wanted = [leaf for leaf, want in zip(exact, self.wants, strict=True) if want]
        exact_outs = self.expected.forward(*exact)
        given = [self.expected.dout, self.expected.dlse][: len(exact_outs)]
        first = torch.autograd.grad(exact_outs, exact_wanted, given, create_graph=True)
        want = torch.autograd.grad(first, exact_wanted, [t.double() for t in turned], allow_unused=True)
        size = self.expected.size**2 * max(1, self.case.seq_q * self.case.group) ** 0.5
        for one, other, leaf in zip(got, want, exact_wanted, strict=True):
            zero = torch.zeros_like(leaf)
            check_loosely(
                zero if one is None else one, zero if other is None else other, self.case, size, "second derivative"
            )

    def _checkpoint(self) -> None:
        leaves = self.leaves()
        outs = checkpoint(lambda *leaves: self.forward(leaves), *leaves, use_reentrant=False)
        self.check_outs(outs)
        self.check_grads(self.differentiate(outs, leaves))

    def _functional(self) -> None:
        leaves = tuple(plain(leaf).detach() for leaf in self.inputs.leaves)

        def loss(*leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            outs = self.forward(leaves)
            parts = [
                (out * given).nan_to_num(neginf=0.0, posinf=0.0).sum()
                for out, given in zip(outs, self.cotangents(outs), strict=True)
            ]
            return sum(parts), outs

        argnums = tuple(index for index, want in enumerate(self.wants) if want)
        grads, outs = torch.func.grad(loss, argnums, has_aux=True)(*leaves)
        self.check_outs(outs)
        self.check_grads(grads)

    def _batched(self) -> None:
        leaves = self.leaves()
        outs = self.forward(leaves)
        given = [torch.stack((g, 2 * g)) for g in self.cotangents(outs)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of operations without a batching rule
            grads = torch.autograd.grad(outs, wanted, given, is_grads_batched=True)
        for index, factor in enumerate((1.0, 2.0)):
            self.check_grads(tuple(grad[index] for grad in grads), factor)

    def _hooks(self) -> None:
        leaves = self.leaves()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            outs = self.forward(leaves)
        self.check_outs(outs)
        self.check_grads(self.differentiate(outs, leaves))

    def _deterministic(self) -> None:
        leaves = self.leaves()
        torch.use_deterministic_algorithms(True)
        try:
            outs = self.forward(leaves)
        finally:
            torch.use_deterministic_algorithms(False)
        self.check_outs(outs)
        self.check_grads(self.differentiate(outs, leaves))
        if torch.are_deterministic_algorithms_enabled():
            raise Wrong("the switch for deterministic algorithms was left on")

    def _poison(self) -> None:
        """A document that is not a number: the others, their rows and their keys, may not tell."""
        case, sequence = self.case, 1 if self.case.layout == "bshd" else 2
        document = case.numbers % (len(case.starts_q) - 1)
        rows, keys = (range(starts[document], starts[document + 1]) for starts in (case.starts_q, case.starts_kv))
        value = (torch.nan, torch.inf, -torch.inf)[case.numbers // 8 % 3]
        tensors = [plain(tensor.detach()).clone() for tensor in self.inputs.build(self.inputs.leaves)]
        expected = expectation(case, Inputs(tuple(tensors), lambda leaves: leaves))  # type: ignore[arg-type, return-value]
        for bit, (tensor, spoiled) in enumerate(zip(tensors, (rows, keys, keys), strict=True)):
            if case.numbers >> bit & 1 or bit == case.numbers // 32 % 3:
                tensor.index_fill_(sequence, torch.tensor(spoiled, dtype=torch.long), value)
        leaves = tuple(tensor.requires_grad_() for tensor in tensors)
        outs = self.call(*leaves)
        grads = torch.autograd.grad(outs, leaves, self.cotangents(outs))
        exact = [expected.out, expected.lse][: len(outs)]
        apart = [torch.tensor([i for i in range(size) if i not in spoiled], dtype=torch.long)
                 for size, spoiled in ((case.seq_q, rows), (case.seq_kv, keys))]  # fmt: skip
        whole = zip((*outs, *grads), (*exact, *expected.grads), strict=True)
        for position, (got, want) in enumerate(whole):
            which = apart[position >= len(outs) + 1]
            dim = 2 if position < len(outs) and position == 1 else sequence
            parts = reference.Bounded(*(tensor.index_select(dim, which) for tensor in want))
            check(got.index_select(dim, which), parts, f"result {position} outside document {document}")

    def _compile(self) -> None:
        torch._dynamo.reset()
        leaves = tuple(
            plain(leaf).detach().requires_grad_(want) for leaf, want in zip(self.inputs.leaves, self.wants, strict=True)
        )
        made = self.inputs.build(leaves)
        compiled = torch.compile(
            self.call, fullgraph=True, backend="aot_eager",
            dynamic=True if self.case.inside else None,
        )  # fmt: skip
        outs = compiled(*made)
        self.check_outs(outs)
        self.check_grads(self.differentiate(outs, leaves))


# ---------------------------------------------------------------------------------------------------------------------
# Misuse: each of these must be refused by the package itself

MISUSES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "q is None": lambda q, k, v: ((None, k, v), {}),
    "v is an array": lambda q, k, v: ((q, k, v.detach().double().numpy()), {}),
    "integers": lambda q, k, v: ((q.long(), k.long(), v.long()), {}),
    "complex numbers": lambda q, k, v: ((q + 0j, k + 0j, v + 0j) if q.dtype.itemsize >= 4 else (q.bool(), k, v), {}),
    "mixed dtypes": lambda q, k, v: ((q, k.to(torch.float16 if k.dtype != torch.float16 else torch.float32), v), {}),
    "three dimensions": lambda q, k, v: ((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), {}),
    "head_dim differs": lambda q, k, v: ((q, torch.cat((k, k), -1), v), {}),
    "batch differs": lambda q, k, v: ((q, torch.cat((k, k, k[:1] if len(k) else k.new_zeros(1, *k.shape[1:]))), v), {}),
    "keys without values": lambda q, k, v: ((q, torch.cat((k, k.new_zeros(*k.shape[:2], 1, k.shape[3])), 2), v), {}),
    "mask of a wrong shape": lambda q, k, v: ((q, k, v), {"mask": torch.ones(211, 223, dtype=torch.bool)}),
    "mask of integers": lambda q, k, v: ((q, k, v), {"mask": torch.ones(1, 1, dtype=torch.int32)}),
    "operand that no term reads": lambda q, k, v: ((q, k, v), {"operands": {"slopes": q}}),
    "mask is a number": lambda q, k, v: ((q, k, v), {"mask": 3}),
    "mask is an unknown text": lambda q, k, v: ((q, k, v), {"mask": "diagonal"}),
    "scale is nan": lambda q, k, v: ((q, k, v), {"scale": float("nan")}),
    "scale is zero": lambda q, k, v: ((q, k, v), {"scale": 0.0}),
    "scale is a text": lambda q, k, v: ((q, k, v), {"scale": "1"}),
    "softcap is negative": lambda q, k, v: ((q, k, v), {"softcap": -1.0}),
    "softcap is infinite": lambda q, k, v: ((q, k, v), {"softcap": float("inf")}),
    "softcap is a list": lambda q, k, v: ((q, k, v), {"softcap": [1.0]}),
    "dropout above one": lambda q, k, v: ((q, k, v), {"dropout": 1.5}),
    "unknown layout": lambda q, k, v: ((q, k, v), {"layout": "sbhd"}),
    "layout is a list": lambda q, k, v: ((q, k, v), {"layout": ["bhsd"]}),
    "unknown backend": lambda q, k, v: ((q, k, v), {"backend": "fastest"}),
    "backend is None": lambda q, k, v: ((q, k, v), {"backend": None}),
    "unknown precision": lambda q, k, v: ((q, k, v), {"precision": "int8"}),
}  # fmt: skip


def run_misuse(case: Case) -> str:
    inputs = make_inputs(case)
    q, k, v = inputs.build(tuple(plain(leaf).detach() for leaf in inputs.leaves))
    arguments, options = MISUSES[case.misuse](q, k, v)
    try:
        call(case, *arguments, **options)
    except tilewise.TilewiseError:
        return "refused misuse"
    raise Wrong(f"{case.misuse}: accepted")


# ---------------------------------------------------------------------------------------------------------------------
# Running


def may_refuse(case: Case) -> bool:
    """A backend asked for by name may say no. "auto" may not, where PyTorch's own function would answer."""
    return case.backend != "auto" or case.softcap > torch.finfo(torch.float32).max


def run(case: Case) -> str:
    """How the case ended: "matched", "refused", "as PyTorch" or "refused misuse". Anything else raises."""
    if case.misuse:
        return run_misuse(replace(case, function="attention"))
    try:
        Trial(case).run()
    except tilewise.TilewiseError:
        if not may_refuse(case):
            raise
        return "refused"
    except Exception as error:
        if case.function in ("sdpa", "override") and _pytorch_does_the_same(case, error):
            return "as PyTorch"
        raise
    return "matched"


def _pytorch_does_the_same(case: Case, error: Exception) -> bool:
    """What is handed to PyTorch ends there as it does here."""
    try:
        Trial(replace(case, function="torch")).run()
    except Exception as theirs:
        return type(theirs) is type(error)
    return False


class Failure(NamedTuple):
    index: int
    case: Case
    error: str


def run_many(seed: int, indices: range) -> tuple[Counter[str], list[Failure]]:
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    failures = []
    for index in indices:
        case = draw(seed, index)
        try:
            outcomes[run(case)] += 1
        except Exception as error:
            outcomes["failed"] += 1
            failures.append(Failure(index, case, _summary(error)))
    return outcomes, failures


def _summary(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({Path(where.filename).name}:{where.lineno})"


def describe(failure: Failure, seed: int) -> str:
    defaults = {name: value for name, value in asdict(failure.case).items() if value not in (None, "", (), False)}
    return (
        f"{failure.error}\n  PYTHONPATH=src python tests/hostile/generator.py --seed {seed} --index {failure.index}\n"
        f"  {defaults}"
    )


def run_in_processes(seed: int, indices: range) -> tuple[Counter[str], list[Failure]]:
    """`run_many` on every core. A failure is printed as it is found."""
    chunks = [indices[start : start + 50] for start in range(0, len(indices), 50)]
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for counted, failed in pool.map(partial(run_many, seed), chunks):
            outcomes += counted
            failures += failed
            for failure in failed:
                print(describe(failure, seed), flush=True)
    return outcomes, failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--index", type=int, help="run this one case")
    parser.add_argument("--count", type=int, default=1000, help="or so many, from the first on")
    options = parser.parse_args(arguments)
    if options.index is not None:
        case = draw(options.seed, options.index)
        print(case)
        print(run(case))
        return 0
    outcomes, failures = run_in_processes(options.seed, range(options.count))
    print(dict(outcomes))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
