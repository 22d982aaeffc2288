"""A backend of the planner made of four families: forward and backward, of 16 bits and of float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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

    def __repr__(self) -> str:
        return self.name

    def families(self, problem: Problem) -> tuple[Any, Any]:
        """The forward and the backward of a problem."""
        return self._wide if rules.is_float32(problem) else self._narrow

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        """Reasons of the backend as a whole, then of the families; of those only what no other reason covers."""
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
        return [] if rules.too_wide(problem) else list(self.families(problem)[0].notices(problem, target))

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """Of the forward, best first."""
        return [] if rules.too_wide(problem) else list(self.families(problem)[0].configs(problem, target))

    def backward_configs(self, problem: Problem, target: Target) -> list[Any]:
        return list(self.families(problem)[1].configs(problem, target))

    def program(self, problem: Problem, target: Target, config: Any) -> Program:
        """What a forward launches."""
        return self.families(problem)[0].program(problem, target, config)  # type: ignore[no-any-return]

    def backward_program(self, problem: Problem, target: Target, config: Any, wants: Wants = ALL) -> Program:
        """What a backward launches."""
        return self.families(problem)[1].program(problem, target, config, wants)  # type: ignore[no-any-return]

    # -----------------------------------------------------------------------------------------------------------------
    # For the lab, which looks at a forward's configs one by one

    @property
    def Config(self) -> Any:  # noqa: N802  (as a module has it)
        return self._narrow[0].Config

    def shipped(self, problem: Problem, target: Target) -> list[Any]:
        """The configs that nothing measured on this machine has changed, best first."""
        family = self.families(problem)[0]
        return list(getattr(family, "shipped", family.configs)(problem, target))

    def search_space(self, problem: Problem, target: Target) -> list[Any]:
        """Every config that may run."""
        family = self.families(problem)[0]
        return list(getattr(family, "search_space", family.configs)(problem, target))

    def tuning_key(self, problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
        return self._narrow[0].tuning_key(problem)  # type: ignore[no-any-return]

    def unit(self, config: Any, arch: str = "") -> Unit:
        """The main kernel of a config, for an architecture: by default the family's own, or that of the current GPU."""
        family = next(one for one in (*self._narrow, *self._wide) if isinstance(config, one.Config))
        return family.unit(config, arch or getattr(family, "ARCH", "") or Target.of("cuda").arch)  # type: ignore[no-any-return]

    def details(self, problem: Problem, target: Target, config: Any) -> list[str]:
        """How the launch fills the GPU."""
        return [] if problem.empty else list(self.program(problem, target, config).says)

    def all_units(self) -> list[Unit]:
        """A covering sample of what the families generate, for the named targets: what CI compiles."""
        return [unit for family in (*self._narrow, *self._wide) for unit in family.units()]

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
    ) -> tuple[Tensor, Tensor | None]:
        strides = tuple(tensor.stride() for tensor in operands.values())
        key = (self.name, problem, config, q.stride(), k.stride(), v.stride(), q.device, strides)
        bound = run.remembered(key, lambda: self.bind(q, k, v, problem, config, None, operands))
        return bound(q, k, v, operands)  # type: ignore[no-any-return]

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
