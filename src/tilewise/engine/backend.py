"""A backend of the planner made of four families: forward and backward, of 16 bits and of float32."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

from ..jit import tuned
from ..masks import Full
from ..operands import ALL, NO_OPERANDS
from ..target import Target
from . import rules, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import Reason
    from ..jit import Unit
    from ..operands import Grads, Operands, Wants
    from ..problem import Problem
    from .program import Program
    from .run import BoundBackward, BoundForward, Tensor


class Family(Protocol):
    """One direction and one width of numbers of an architecture: a module of engine/sm80 or engine/sm90.

    A forward's `program` takes (problem, target, config), a backward's also which gradients are wanted. A forward has
    `notices`, what a user should know of it. One that refuses more than its backend has `why_not(problem, target)`.
    """

    Config: Any
    program: Callable[..., Program]

    def configs(self, problem: Problem, target: Target, /) -> list[Any]: ...

    def units(self) -> list[Unit]: ...


class Direction:
    """The forward or the backward of a backend, of both widths of numbers: its configs, and what was measured of them.

    A family may have its own `shipped` and `tuning_key`, and then reads the user's table itself; for all others that is
    done here. What `tilewise tune` measures is its `search_space`, or what ships with other values for the fields of
    SEARCHED, or what ships.
    """

    def __init__(self, backend: Fused, number: int) -> None:
        self._backend, self._number = backend, number

    def _family(self, problem: Problem) -> Any:
        return self._backend.families(problem)[self._number]

    def _posed(self, problem: Problem) -> Problem:
        return rules.posed(problem, problem.operand_grads if self._number else ())

    @property
    def config_types(self) -> tuple[Any, ...]:
        return tuple(family.Config for family in self._backend.every_family()[self._number :: 2])

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        return self._backend.why_not(problem, target)

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """Legal configs, best first: what `tilewise tune` found on this device, then those that ship."""
        problem = self._posed(problem)
        family = self._family(problem)
        ships = list(family.configs(problem, target))
        return tuned.first(self.entry(problem, target), family.Config, ships)

    def shipped(self, problem: Problem, target: Target) -> list[Any]:
        """The configs that nothing measured on this machine has changed, best first."""
        problem = self._posed(problem)
        family = self._family(problem)
        return list(getattr(family, "shipped", family.configs)(problem, target))

    def search_space(self, problem: Problem, target: Target) -> list[Any]:
        """Every config that may run."""
        problem = self._posed(problem)
        family = self._family(problem)
        if not hasattr(family, "SEARCHED"):
            return list(getattr(family, "search_space", family.configs)(problem, target))
        found = dict.fromkeys(family.configs(problem, target))
        for config, values in product(list(found), product(*family.SEARCHED.values())):
            varied = replace(config, **dict(zip(family.SEARCHED, values, strict=True)))
            if varied.smem_bytes <= target.smem_per_block:
                found[varied] = None
        return list(found)

    def tuning_key(self, problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
        """What an entry of the user's table must agree with, and the sizes it was measured at."""
        problem = self._posed(problem)
        family = self._family(problem)
        if hasattr(family, "tuning_key"):
            return family.tuning_key(problem)  # type: ignore[no-any-return]
        key, sizes = rules.tuning_key(problem, masked=not isinstance(problem.mask, Full))
        key |= {"kernel": family.__name__.rpartition(".")[2], "precision": problem.precision}
        if self._number:
            key |= {"deterministic": problem.deterministic, "grouped": problem.group > 1}
        else:
            key |= {"grad": problem.needs_grad}
        return key, sizes

    def entry(self, problem: Problem, target: Target) -> dict[str, Any] | None:
        """The entry of the user's table, where the family does not read it itself."""
        family = self._family(problem)
        if hasattr(family, "tuning_key"):
            return None

        def is_legal(config: Any) -> bool:
            return config in self.search_space(problem, target) or config in self.shipped(problem, target)

        return tuned.find(self._backend.name, target.name, *self.tuning_key(problem), family.Config, is_legal)

    def unit(self, config: Any, arch: str = "") -> Unit:
        return self._backend.unit(config, arch)

    def details(self, problem: Problem, target: Target, config: Any) -> list[str]:
        """How the launch fills the GPU."""
        if problem.empty:
            return []
        make = self._backend.backward_program if self._number else self._backend.program
        return list(make(problem, target, config).says)


class Fused:
    """The functions of a backend (see `tilewise.backend`), and the programs that the planner puts into a Plan."""

    def __init__(
        self,
        name: str,
        refuse: Callable[[Problem, Target], list[Reason]],
        forward: Any,
        backward: Any,
        float32_forward: Any,
        float32_backward: Any,
    ) -> None:
        self.name, self._refuse = name, refuse
        self._narrow: tuple[Any, Any] = (forward, backward)
        self._wide: tuple[Any, Any] = (float32_forward, float32_backward)
        self.forward_direction, self.backward_direction = Direction(self, 0), Direction(self, 1)

    def __repr__(self) -> str:
        return self.name

    def families(self, problem: Problem) -> tuple[Any, Any]:
        """The forward and the backward of a problem."""
        return self._wide if rules.is_float32(problem) else self._narrow

    def every_family(self) -> tuple[Any, ...]:
        """Forward and backward of 16 bits, then of float32."""
        return (*self._narrow, *self._wide)

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        """Reasons of the backend as a whole, then of the families; of those only what no other reason covers."""
        problem = rules.posed(problem, problem.operand_grads)
        reasons = self._refuse(problem, target)
        if rules.too_wide(problem) or problem.dtype not in rules.DTYPES:
            return reasons
        forward, backward = self.families(problem)
        for family in (forward, backward) if problem.needs_grad else (forward,):
            if hasattr(family, "why_not"):
                reasons += family.why_not(problem, target)
        if not reasons and not forward.configs(problem, target):
            reasons.append(rules.nothing_fits(problem, target))
        return reasons

    def notices(self, problem: Problem, target: Target) -> list[str]:
        if rules.too_wide(problem):
            return []
        problem = rules.in_terms(problem)
        entry = self.forward_direction.entry(problem, target)
        said = [*([] if entry is None else [tuned.cite(entry)]), *self.families(problem)[0].notices(problem, target)]
        entry = self.backward_direction.entry(problem, target) if problem.needs_grad else None
        return said if entry is None else [*said, f"backward: {tuned.cite(entry)}"]

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """Of the forward, best first."""
        return [] if rules.too_wide(problem) else self.forward_direction.configs(problem, target)

    def backward_configs(self, problem: Problem, target: Target) -> list[Any]:
        """Of the backward, best first."""
        return self.backward_direction.configs(problem, target)

    def program(self, problem: Problem, target: Target, config: Any) -> Program:
        """What a forward launches."""
        problem = rules.posed(problem, ())
        return self.families(problem)[0].program(problem, target, config)  # type: ignore[no-any-return]

    def backward_program(self, problem: Problem, target: Target, config: Any, wants: Wants | None = None) -> Program:
        """What a backward launches; without `wants`, one of all gradients that the problem needs."""
        wants = ALL.union(problem.operand_grads) if wants is None else wants
        problem = rules.posed(problem, wants)
        return self.families(problem)[1].program(problem, target, config, wants)  # type: ignore[no-any-return]

    # -----------------------------------------------------------------------------------------------------------------
    # For the lab, which looks at a forward's configs one by one

    @property
    def Config(self) -> Any:  # noqa: N802  (as a module has it)
        return self._narrow[0].Config

    @property
    def config_types(self) -> tuple[Any, ...]:
        return self.forward_direction.config_types

    def shipped(self, problem: Problem, target: Target) -> list[Any]:
        return self.forward_direction.shipped(problem, target)

    def search_space(self, problem: Problem, target: Target) -> list[Any]:
        return self.forward_direction.search_space(problem, target)

    def tuning_key(self, problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
        return self.forward_direction.tuning_key(problem)

    def unit(self, config: Any, arch: str = "") -> Unit:
        """The main kernel of a config: for the family's own architecture, else for this one, or the current GPU's."""
        family = next(one for one in self.every_family() if isinstance(config, one.Config))
        return family.unit(config, getattr(family, "ARCH", "") or arch or Target.of("cuda").arch)  # type: ignore[no-any-return]

    def details(self, problem: Problem, target: Target, config: Any) -> list[str]:
        """How the launch fills the GPU."""
        return [] if problem.empty else list(self.program(problem, target, config).says)

    def all_units(self) -> list[Unit]:
        """A covering sample of what the families generate, for the named targets: what CI compiles."""
        return [unit for family in self.every_family() for unit in family.units()]

    # -----------------------------------------------------------------------------------------------------------------
    # Calls

    def bind(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        config: Any = None,
        target: Target | None = None,
        operands: Operands = NO_OPERANDS,
    ) -> BoundForward:
        """`forward` for tensors with these shapes, strides and device: kernels are loaded, addresses are open."""
        target = target or Target.of(q.device)
        return run.bind_forward(
            lambda: self.program(problem, target, config or self.configs(problem, target)[0]),
            problem,
            q,
            k,
            v,
            operands,
        )

    def bind_backward(self, problem: Problem, config: Any = None, target: Target | None = None) -> BoundBackward:
        """`backward` for tensors of one shape, strides and device. `config` is of the backward's family."""

        def program(device: Any, wants: Wants) -> Program:
            there = target or Target.of(device)
            return self.backward_program(problem, there, config or self.backward_configs(problem, there)[0], wants)

        return run.bind_backward(program, problem)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
        results: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        strides = tuple((tensor.shape, tensor.stride()) for tensor in operands.values())
        key = (self.name, problem, config, q.stride(), k.stride(), v.stride(), q.device, strides)
        bound = run.remembered(key, lambda: self.bind(q, k, v, problem, config, None, operands))
        return bound(q, k, v, operands, results)  # type: ignore[no-any-return]

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
        wants: Wants = ALL,
    ) -> Grads:
        """The wanted gradients of bhsd views and operands, with the strides of `empty_like` of each.

        A config that is the forward's leaves the choice to the backward.
        """
        own = config if isinstance(config, self.families(problem)[1].Config) else None
        key = (self.name, "backward", problem, own, q.device, q.stride(), k.stride(), v.stride())
        bound = run.remembered(key, lambda: self.bind_backward(problem, own))
        return bound(dout, dlse, q, k, v, out, lse, operands, wants)  # type: ignore[no-any-return]
