"""What the matrices of the fused kernels are made of: masks, widths and lengths to cross, hard inputs, odd strides."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import make_problem
from tilewise import Causal, Full, Problem, Window

if TYPE_CHECKING:
    import random

    from tilewise.masks import Mask

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
PYTORCH = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)

MASKS: list[Mask] = [
    Full(),
    Causal("top-left"),
    Causal("bottom-right"),
    Window(100, 30),
    Window(0, 0, "bottom-right"),
    Window(None, 40, "bottom-right"),
    Window(300, None),
]
DIMS = [
    (64, 64),
    (128, 128),
    (256, 256),
    (192, 128),
    (96, 96),
    (80, 80),
    (192, 192),
    (72, 40),
    (8, 8),
    (40, 128),
    (200, 256),
]
LENGTHS = [
    (1, 1),
    (1, 500),
    (500, 1),
    (63, 65),
    (128, 128),
    (129, 127),
    (192, 384),
    (700, 130),
    (130, 700),
    (1025, 1025),
]
# Of every kind one, for the memory and race checkers: dims, mask, softcap.
FEW_SHAPES: list[tuple[tuple[int, int], Mask, float]] = [
    ((128, 128), Full(), 0.0),
    ((128, 128), Causal(), 0.0),
    ((64, 64), Window(100, 30), 0.0),
    ((256, 256), Causal("bottom-right"), 20.0),
    ((192, 128), Full(), 0.0),
    ((72, 40), Causal(), 0.0),
]


def problem_of(
    batch: int, heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], **fields: object
) -> Problem:
    values: dict[str, object] = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "dtype": BF16}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **(values | fields))  # type: ignore[arg-type]


def visible_pairs(problem: Problem) -> Tensor:
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    return problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, "cuda")


def relative_error(got: Tensor, want: Tensor) -> float:
    """0 where the truth is 0, as the gradients of rows that see one key are."""
    return ((got.double() - want).norm() / want.norm()).item() if want.norm() > 0 else 0.0


def scaled(factor: float):  # type: ignore[no-untyped-def]
    def change(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
        q.mul_(factor)

    change.__name__ = f"q_x{factor:g}"
    return change


def constant_rows(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
    k.copy_(k[:, :, :1].expand_as(k))


def one_outlier(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
    k[:, :, k.shape[2] // 3] *= 40


def strided(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A (batch, heads, seq, dim) view with odd strides, its surroundings full of NaN."""
    order = rng.sample(range(3), 3)
    sizes = [shape[axis] + rng.randint(0, 2) for axis in order] + [shape[3] + 8 * rng.randint(0, 2)]
    room = torch.full(sizes, math.nan, dtype=dtype, device="cuda")
    view = room.permute(*[order.index(axis) for axis in range(3)], 3)[
        : shape[0], : shape[1], : shape[2], sizes[3] - shape[3] :
    ]
    return view.copy_(torch.randn(shape, device="cuda"))


def random_problem(rng: random.Random, **fields: object) -> Problem:
    heads_kv = rng.randint(1, 3)
    dims = (8 * rng.randint(1, 32), 8 * rng.randint(1, 32))
    heads = (heads_kv * rng.randint(1, 3), heads_kv)
    seqs = (rng.randint(1, 700), rng.randint(1, 700))
    align = rng.choice(["top-left", "bottom-right"])
    values = {
        "mask": rng.choice([Full(), Causal(align), Window(rng.randint(0, 300), rng.randint(0, 300), align)]),
        "dtype": rng.choice([BF16, FP16]),
        "softcap": rng.choice([0.0, 0.0, 20.0]),
    }
    return problem_of(rng.randint(1, 3), heads, seqs, dims, **(values | fields))


def strided_inputs(problem: Problem, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim_v),
    ]
    q, k, v = (strided(shape, problem.dtype, rng) for shape in shapes)
    return q, k, v


def far_apart(heads: int, seq: int, dim: int) -> Tensor:
    """Two batches whose first elements lie 2^31 elements apart."""
    room = torch.empty(2**31 + heads * seq * dim, dtype=BF16, device="cuda")
    view = room.as_strided((2, heads, seq, dim), (2**31, seq * dim, dim, 1))
    return view.copy_(torch.randn(view.shape, device="cuda"))


def all_equal(got: list[Tensor] | tuple[Tensor, ...], want: list[Tensor] | tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
