"""A covering sample of what the backends generate: the kernels that CI compiles and holds to no spills.

Of the engine those that programs launch for every class of heads, every kind of mask and of numbers, with and without
terms, on the targets that stand for all others.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ...engine.backend import Fused
from ...engine.decode import takes
from ...engine.sm90.forward import HEAD_DIM_CLASSES
from ...engine.source import COMPILED
from ...masks import Cached, Causal, Full, Packed, Window
from ...problem import Problem
from ...scores import softcapped
from ...terms import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...engine.program import Program
    from ...jit import Unit

_NUMBERS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.float32, "precision": "exact"},
    {"dtype": torch.float32, "precision": "tf32"},
)
# Queries and keys: one tile of both; more queries than a CTA has room for; so many keys that a kernel of its own rounds
# the sums of dQ.
_LENGTHS = ((64, 64), (2112, 64), (2112, 2112))


def units_of(backend: Any) -> list[Unit]:
    """The kernels of a backend's sample; none of one that compiles none, or that others compile."""
    if isinstance(backend, Fused):
        return list(_engine_units(backend))
    return list(backend.all_units()) if hasattr(backend, "all_units") else []


@functools.cache
def _engine_units(backend: Fused) -> tuple[Unit, ...]:
    return tuple({unit.label: unit for program in _programs(backend) for unit in program.units}.values())


def _programs(backend: Fused) -> Iterator[Program]:
    for target, problem in product(COMPILED, _problems()):
        if not backend.why_not(problem, target):
            configs = backend.forward_direction.for_any_length(problem, target)
            yield from (backend.program(problem, target, config) for config in configs)
        trained = problem.with_(needs_grad=True)
        if not backend.why_not(trained, target):
            configs = backend.backward_direction.shipped(trained, target)
            yield from (backend.backward_program(trained, target, config) for config in configs)
            # What makes some gradients alone depends little on numbers and terms: one kernel stands for the others.
            if not problem.scores and problem.dtype is not torch.float16 and problem.precision == "exact":
                for config, wants in product(configs[:1], (frozenset("q"), frozenset("kv"))):
                    yield backend.backward_program(trained, target, config, wants)


def _problems() -> Iterator[Problem]:
    for dim in (64, 128):  # packed sequences: the same sources with other extents
        yield Problem(
            batch=1,
            heads_q=1,
            heads_kv=1,
            seq_q=10000,
            seq_kv=10000,
            head_dim=dim,
            head_dim_v=dim,
            dtype=torch.bfloat16,
            mask=Packed(4, 8192, 8192, Causal()),
        )
    yield from _decoding()
    yield Problem(  # the float32 kernel with the fewest registers to spare
        batch=1,
        heads_q=1,
        heads_kv=1,
        seq_q=2112,
        seq_kv=2112,
        head_dim=128,
        head_dim_v=128,
        dtype=torch.float32,
        mask=Full(),
        scores=(Spans(),),
    )
    masks = (Full(), Causal(), Window(64, 0))
    for (head_dim, head_dim_v), mask, cap, numbers, (seq_q, seq_kv) in product(
        HEAD_DIM_CLASSES, masks, (0.0, 1.0), _NUMBERS, _LENGTHS
    ):
        yield Problem(
            batch=1,
            heads_q=1,
            heads_kv=1,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            mask=mask,
            scores=softcapped(cap),
            **numbers,
        )


def _decoding() -> Iterator[Problem]:
    """Few queries: every tile of rows in a cache, whose kernels need the most registers, and some of the others."""
    for (head_dim, head_dim_v), tokens in product(HEAD_DIM_CLASSES, (1, 32, 64)):
        plain = Problem(
            batch=1,
            heads_q=1,
            heads_kv=1,
            seq_q=tokens,
            seq_kv=4096,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=torch.bfloat16,
        )
        if takes(plain):
            yield plain.with_(mask=Cached(64, 64, 1, 0, Causal("bottom-right"), lengths=True))
            if head_dim == 128 and tokens == 1:
                yield plain
                yield plain.with_(scores=softcapped(1.0), dtype=torch.float16)
