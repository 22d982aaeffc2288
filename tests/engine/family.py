"""What the cases of every family of fused kernels share: 16 bits and float32, for sm80 and sm90.

A test file of a family names it as FAMILY and takes the tests of family_choices.py, family_forward.py,
family_backward.py, and family_16_bits.py or family_float32.py, which run for the cases that the file lists
(conftest.py says under which names). Kernels run from their real sources and host code on the model of tests/emulator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import emulation
from support import assert_near, exact, in_order, make_inputs, make_problem, rounding_budget, wanted
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80, SM90
from tilewise.engine.backend import forward_lowered
from tilewise.target import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tilewise import Problem

Tensor = torch.Tensor
Inputs = tuple[Tensor, Tensor, Tensor]
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
A100, ADA, H200 = Target.named("a100"), Target.named("rtx-4090"), Target.named("h200")
GPUS = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]
BOTTOM_RIGHT = Causal("bottom-right")
MASKS = [Full(), Causal(), BOTTOM_RIGHT, Window(100, 3), Window(None, 2, "bottom-right")]
DIMS = [
    *((8, 8), (64, 64), (60, 44), (72, 40), (80, 80), (96, 96), (128, 128), (40, 128)),
    *((192, 128), (192, 192), (200, 256), (256, 256)),
]


def assert_grads_near(grads: Any, truth: Any, allowed: float) -> None:
    for grad, want, name in zip(grads, truth, ("dq", "dk", "dv")[: len(grads)], strict=True):
        error = ((grad.double() - want).norm() / want.norm()).item()
        assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"


def assert_grads_of_16_bits(grads: Any, inputs: Inputs, dout: Tensor, problem: Problem) -> None:
    """Four roundings of 16 bits stand between the inputs and a gradient."""
    assert_grads_near(grads, exact(*inputs, problem, None, dout)[2:], rounding_budget(problem.dtype, 4))


class Family(NamedTuple):
    """A width of numbers of a backend, in the directions that a test file is about."""

    backend: Any
    dtype: torch.dtype
    directions: tuple[str, ...]
    assert_out: Callable[..., None] = assert_near
    """Takes out, lse, (q, k, v) and the problem."""
    assert_grads: Callable[..., None] = assert_grads_of_16_bits
    """Takes (dq, dk, dv), (q, k, v), dout and the problem."""
    small: dict[str, Any] = {}  # noqa: RUF012 (of a tuple)
    """Changes of a config that make tiles so small that a few keys go round every ring several times."""

    @property
    def is_wide(self) -> bool:
        return self.dtype is F32

    @property
    def gpus(self) -> list[str]:
        return GPUS if self.backend is SM80 else ["h200"]

    @property
    def granule(self) -> int:
        """What head dims are multiples of."""
        return 4 if self.is_wide and self.backend is SM80 else 8

    def searched(self) -> list[Any]:
        """Its directions, as a search takes them."""
        directions = {"forward": self.backend.forward_direction, "backward": self.backend.backward_direction}
        return [directions[name] for name in self.directions]

    def config(self, problem: Problem, changes: dict[str, Any], target: Target = H200) -> Any:
        """The first of its forward's configs, or that of so many consumers, with changes."""
        forward = self.backend.forwards[-2 if self.is_wide else -1]  # few rows have another family too
        configs = forward.configs(forward_lowered(problem, forward), target)
        asked = changes.get("consumers")
        same = [config for config in configs if asked is None or config.consumers == asked]
        return replace((same or configs)[0], **changes)

    def divided(self, problem: Problem, target: Target) -> Any:
        """How the work of its backward is divided."""
        module = self.backend.families(problem)[1]
        if (self.backend, self.is_wide) == (SM90, True):
            return module.divide(problem, target)
        return module.divide(problem, self.backend.backward_configs(problem, target)[0], target)

    def forward(
        self,
        monkeypatch: pytest.MonkeyPatch,
        problem: Problem,
        inputs: Inputs,
        config: Any = None,
        target: Target = H200,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """out and lse on the model; `options` are those of `emulation.install`."""
        emulation.install(monkeypatch, **options)
        return self.backend.bind(*inputs, problem, config, target)(*inputs, None)

    def backward(
        self,
        monkeypatch: pytest.MonkeyPatch,
        problem: Problem,
        inputs: Inputs,
        dout: Tensor,
        target: Target = H200,
        seed: int = 0,
        wants: tuple[bool, bool, bool] = (True, True, True),
        dlse: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """(dq, dk, dv) on the model. In float32 out and lse come from our forward, otherwise from float64."""
        if self.is_wide:
            out, lse = self.forward(monkeypatch, problem, inputs, None, target, seed=seed)
        else:
            out, lse = exact(*inputs, problem)
        emulation.install(monkeypatch, seed=seed)
        run = self.backend.bind_backward(problem, None, target)
        return in_order(run(dout, dlse, *inputs, out.to(problem.dtype), lse.float(), wants=wanted(*wants)))


class Case(NamedTuple):
    """A problem, the GPU whose configs it runs, and what the config of its forward has of its own."""

    seqs: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    mask: Any = Full()
    gpu: str = "h200"
    fields: dict[str, Any] = {}  # noqa: RUF012 (of a tuple)
    changes: dict[str, Any] = {}  # noqa: RUF012
    outlier: float = 0.0
    """The first number of every 64th query."""

    @property
    def target(self) -> Target:
        return Target.named(self.gpu)

    def problem(self, family: Family, **fields: Any) -> Problem:
        values = {"heads_kv": self.heads[1], "seq_kv": self.seqs[1], "head_dim_v": self.dims[1], "mask": self.mask}
        values |= {"dtype": family.dtype, "batch": 1} | self.fields | fields
        return make_problem((values.pop("batch"), self.heads[0], self.seqs[0], self.dims[0]), **values)

    def __str__(self) -> str:
        named = {name: value for name, value in (self.fields | self.changes).items() if name != "dtype"}
        sizes = "-".join("x".join(map(str, pair)) for pair in (self.seqs, self.dims, self.heads))
        dtype = str(self.fields.get("dtype", "")).removeprefix("torch.")
        words = [sizes, str(self.mask), self.gpu, dtype, *(f"{name}={value}" for name, value in named.items())]
        return " ".join(filter(None, [*words, "outliers" if self.outlier else ""]))


def inputs_of(problem: Problem, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    return make_inputs(problem)


def like_out(problem: Problem, seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    return torch.randn(shape, generator=generator).to(problem.dtype)


def visible(problem: Problem) -> Tensor:
    """Whether a row sees a key."""
    sizes = (problem.seq_q, problem.seq_kv)
    return problem.mask.to_bool(range(sizes[0]), range(sizes[1]), *sizes)
