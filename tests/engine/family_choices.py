"""What a family refuses and chooses: every problem that it takes has configs that fit, and CI compiles them."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from family import BF16, DIMS, F32, FP16, MASKS

from support import make_problem
from tilewise import Target
from tilewise.engine import SM90
from tilewise.engine.sm80.shared import VECTOR_SUMS_FROM
from tilewise.engine.source import COMPILED
from tilewise.lab.model.covering import units_of
from tilewise.lab.studies.search_space import search_space
from tilewise.problem import Strides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from family import Family

    from tilewise import Problem

BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
WIDEST_FLOAT32_GRADIENT = 128
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float64}, "float64"),
    ({"head_dim": 60, "head_dim_v": 60}, "multiples of 8"),
    ({"head_dim": 264}, "264 is over 256"),
    ({"scale": -1.0}, "negative"),
    ({"strides": Strides.UNALIGNED}, "unaligned"),
    ({"transformed": True}, "functorch"),
]
"""What no family of 16 bits takes."""


def dims_of(family: Family, *, grad: bool) -> list[tuple[int, int]]:
    widest = WIDEST_FLOAT32_GRADIENT if family.is_wide and grad else 256
    return [pair for pair in DIMS if max(pair) <= widest and not any(dim % family.granule for dim in pair)]


def problems(family: Family, *, grad: bool) -> Iterator[Problem]:
    kinds = [(BF16, 0.0, "exact"), (FP16, 30.0, "exact")]
    if family.is_wide:
        kinds = [(F32, *kind) for kind in product((0.0, 30.0), ("exact", "tf32"))]
    seqs = ((1, 1), (300, 100), (100, 300), (4096, 4096))
    # Elsewhere masks and lengths decide nothing together.
    crossed = family.backend is SM90 or not (grad or family.is_wide)
    shapes = list(product(MASKS, seqs) if crossed else zip(MASKS, itertools.cycle(seqs), strict=False))
    for pair, (mask, (seq_q, seq_kv)), (dtype, softcap, precision) in product(
        dims_of(family, grad=grad), shapes, kinds
    ):
        yield make_problem(
            (2, 8, seq_q, pair[0]),
            dtype,
            head_dim_v=pair[1],
            heads_kv=2,
            seq_kv=seq_kv,
            mask=mask,
            softcap=softcap,
            precision=precision,
            needs_grad=grad,
        )


def fits(config: Any, target: Target) -> bool:
    """Independent of `Config.fits`: what the hardware gives a block, and all blocks of a multiprocessor together."""
    blocks = getattr(config, "ctas_per_sm", 1)
    together = blocks * (config.smem_bytes + 1024)
    registers = blocks * config.threads * config.register_limit
    return config.smem_bytes <= target.smem_per_block and together <= target.smem_per_sm and registers <= 65536


@functools.cache
def compiled(backend: Any) -> frozenset[str]:
    return frozenset(unit.label for unit in units_of(backend))


def test_every_problem_it_takes_has_configs_that_fit_and_are_compiled_in_ci(family: Family, gpu: str) -> None:
    """For a GPU with as much shared memory, where not for this one."""
    target = Target.named(gpu)
    twin = next(one for one in COMPILED if one.smem_per_block == target.smem_per_block)
    for direction in family.searched():
        for problem in problems(family, grad=direction is family.backend.backward_direction):
            assert family.backend.why_not(problem, target) == []
            configs = direction.configs(problem, target)
            assert configs, str(problem)
            for config in configs:
                assert fits(config, target), f"{config} on {gpu}"
                assert config.head_dim >= problem.head_dim
                assert config.head_dim_v >= problem.head_dim_v
                if hasattr(config, "exact"):
                    assert config.exact == (problem.precision == "exact")
                built = config
                if hasattr(config, "vector_sums"):
                    assert config.vector_sums == (target.capability >= (9, 0))
                    # Compiled is what adds up as the twin can, which changes nothing else.
                    built = replace(config, vector_sums=twin.capability >= VECTOR_SUMS_FROM)
                assert_built(family, built, family.backend.unit(built, twin.arch).label)


def assert_built(family: Family, config: Any, label: str) -> None:
    assert label in compiled(family.backend)
    budget = BUDGETS[label]
    assert config.smem_bytes == budget["smem_bytes"]
    assert budget["registers"] <= config.register_limit
    if family.backend is SM90:  # warpgroups share out all of them
        assert budget["registers"] == config.register_limit


def test_what_a_search_may_try_fits_too(family: Family, gpu: str) -> None:
    target = Target.named(gpu)
    for direction in family.searched():
        grad = direction is family.backend.backward_direction
        # A search of backwards has ten times as many configs.
        for pair in ((64, 64), (128, 128)) if grad else dims_of(family, grad=False):
            problem = make_problem((1, 1, 300, pair[0]), family.dtype, head_dim_v=pair[1], needs_grad=grad)
            found = search_space(direction, problem, target)
            assert found
            assert all(fits(config, target) for config in found)
            assert set(direction.shipped(problem, target)) <= set(found)


def test_each_refusal_is_named(family: Family, refusal: tuple[dict[str, Any], str]) -> None:
    change, what = refusal
    problem = make_problem((1, 2, 64, 64), **({"dtype": family.dtype} | change))
    (reason,) = family.backend.why_not(problem, Target.named(family.gpus[0]))
    assert what in reason.what
    assert reason.remedy
