"""A backend of the planner made of families, each of one direction and of some problems."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..jit import tuned
from ..masks import Full, Packed
from ..operands import ALL, NO_OPERANDS
from ..target import Target
from . import packed as sequences
from . import rules, run
from .tile_map import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ..errors import Reason
    from ..jit import Unit
    from ..operands import Grads, Operands, Wants
    from ..problem import Problem
    from .program import Program
    from .run import BoundBackward, BoundForward, Tensor


# The fields of a config that take shared memory, or registers, for no work of their own.
_ROOM = ("stages", "k_stages", "v_stages", "ds_stages", "rooms", "ctas_per_sm")


class Family(Protocol):
    """One direction and one width of numbers of an architecture: a module of engine/sm80 or engine/sm90.

    A forward's `program` takes (problem, target, config), a backward's also which gradients are wanted. One whose
    kernels go by a tile map has `MASK_LINES`, what a line of the bits of a mask belongs to in them; a backward that
    makes gradients of operands without any of q, k and v has `MAKES_OPERANDS_ALONE`. One for some problems only has
    `takes(problem)`. A forward may have `notices(problem)`, what a user should know of it; one that refuses more than
    its backend `why_not(problem, target)`; one whose `configs` depend on lengths `for_any_length`; and one whose
    entries in the user's table have another key than Direction gives them `tuning_key(problem)`.
    """

    Config: Any
    SEARCHED: dict[str, tuple[Any, ...]]
    """The fields of a measured config that may differ from those that ship, and their values."""
    program: Callable[..., Program]

    def configs(self, problem: Problem, target: Target, /) -> list[Any]: ...


def forward_lowered(problem: Problem, family: Any) -> Problem:
    """The problem as a forward of the family is made for it."""
    return _packed(rules.specialise_causal_alibi(rules.lowered(problem, ())), family)


def backward_lowered(problem: Problem, wants: Iterable[str], family: Any) -> Problem:
    """The problem as a backward of the family, for these gradients, is made for it."""
    return _packed(rules.specialise_causal_alibi(rules.lowered(problem, wants)), family)


def _packed(problem: Problem, family: Any) -> Problem:
    lines = getattr(family, "MASK_LINES", "")
    return packed(problem, lines) if lines else problem


def _first_taking(families: tuple[Any, ...], problem: Problem) -> Any:
    return next((family for family in families[:-1] if family.takes(problem)), families[-1])


def _taking(problem: Problem, configs: list[Any]) -> list[Any]:
    """Those of the configs whose kernels have registers for the sequences of the problem."""
    packed_rows = isinstance(problem.mask, Packed)
    return [config for config in configs if not packed_rows or getattr(config, "takes_packed", True)]


class Direction:
    """The forward or the backward of a backend, of both widths of numbers: its configs, and what was measured."""

    def __init__(self, backend: Fused, number: int) -> None:
        self._backend, self._number = backend, number

    def _family(self, problem: Problem) -> Any:
        return self._backend.families(problem)[self._number]

    def _lowered(self, problem: Problem) -> Problem:
        family = self._family(problem)
        if self._number:
            return backward_lowered(problem, problem.operand_grads, family)
        return forward_lowered(problem, family)

    @property
    def config_types(self) -> tuple[Any, ...]:
        families = self._backend.backwards if self._number else self._backend.forwards
        return tuple(family.Config for family in families)

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        return self._backend.why_not(problem, target)

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """Legal configs, best first: what `tilewise tune` found on this device, then those that ship."""
        ships = self.shipped(problem, target)
        return tuned.first(self.entry(problem, target), self._family(problem).Config, ships)

    def shipped(self, problem: Problem, target: Target) -> list[Any]:
        """The configs that nothing measured on this machine has changed, best first."""
        problem = self._lowered(problem)
        return _taking(problem, sequences.configs(self._family(problem).configs, problem, target))

    def for_any_length(self, problem: Problem, target: Target) -> list[Any]:
        """The configs that ship for such heads and masks."""
        problem = self._lowered(problem)
        family = self._family(problem)
        return _taking(problem, sequences.configs(getattr(family, "for_any_length", family.configs), problem, target))

    def spare(self, problem: Problem, target: Target) -> Iterator[Any]:
        """Configs for where no kernel of `configs` builds, in the order to try them.

        First those that ship for other lengths, then those of the next wider heads, which are filled with zeros, then
        the last one of its own heads with as few stages and as few CTAs per multiprocessor as a search tries.
        """
        own = [config for config in self.for_any_length(problem, target) if not getattr(config, "split", False)]
        yield from own
        family = self._family(problem)
        classes = getattr(family, "HEAD_DIM_CLASSES", rules.HEAD_DIM_CLASSES)
        dims = rules.class_of(problem, classes)
        wider = [pair for pair in classes if pair != dims and pair[0] >= dims[0] and pair[1] >= dims[1]]
        for head_dim, head_dim_v in wider[:1]:
            wide = problem.with_(head_dim=head_dim, head_dim_v=head_dim_v)
            if self._family(wide) is family and not self.why_not(wide, target):
                found = self.for_any_length(wide, target)
                yield from (config for config in found if not getattr(config, "split", False))
        fewest = {name: min(values) for name, values in family.SEARCHED.items() if name in _ROOM}
        for config in own[-1:]:
            yield replace(config, **fewest)

    def searched(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """The fields of a config that `tilewise tune` varies, and the values that it tries."""
        return dict(self._family(problem).SEARCHED)

    def tuning_key(self, problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
        """What an entry of the user's table must agree with, and the sizes it was measured at."""
        problem = sequences.as_batch(self._lowered(problem))
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
        """The entry of the user's table.

        Its config is one that ships for such heads, or fits the target and differs from one in values that are
        searched. Whether the kernel has enough registers, only its build tells.
        """
        family = self._family(problem)
        searched = family.SEARCHED

        def is_legal(config: Any) -> bool:
            ships = self.for_any_length(problem, target)
            tried = all(getattr(config, name) in values for name, values in searched.items())
            if not (tried and config.fits(target)):
                return config in ships
            return any(config == replace(one, **{name: getattr(config, name) for name in searched}) for one in ships)

        return tuned.find(self._backend.name, target.name, *self.tuning_key(problem), family.Config, is_legal)

    def unit(self, config: Any, arch: str = "") -> Unit:
        return self._backend.unit(config, arch)

    def details(self, problem: Problem, target: Target, config: Any) -> list[str]:
        """How the launch fills the GPU."""
        if problem.empty:
            return []
        make = self._backend.backward_program if self._number else self._backend.program
        return list(make(problem, target, config).summary)


class Fused:
    """The functions of a backend (see `tilewise.backend`), and the programs that the planner puts into a Plan.

    A problem runs in the first family of each direction that takes it; the last one takes all that the others leave.
    """

    def __init__(
        self,
        name: str,
        refuse: Callable[[Problem, Target], list[Reason]],
        forwards: tuple[Any, ...],
        backwards: tuple[Any, ...],
    ) -> None:
        self.name, self._refuse = name, refuse
        self.forwards, self.backwards = forwards, backwards
        self.forward_direction, self.backward_direction = Direction(self, 0), Direction(self, 1)

    def __repr__(self) -> str:
        return self.name

    def families(self, problem: Problem) -> tuple[Any, Any]:
        """The forward and the backward of a problem."""
        return _first_taking(self.forwards, problem), _first_taking(self.backwards, problem)

    def _forward_of(self, problem: Problem, config: Any) -> Any:
        """The family whose config this is: one that is asked for by name may be another than the problem's."""
        own = self.families(problem)[0]
        if isinstance(config, own.Config):
            return own
        return next((one for one in self.forwards if isinstance(config, one.Config)), own)

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        """Reasons of the backend as a whole, then of the families; of those only what no other reason covers."""
        unplaced = rules.packed_refusals(problem)
        problem = rules.lowered(problem, problem.operand_grads)
        reasons = [*unplaced, *self._refuse(problem, target)]
        if rules.too_wide(problem) or problem.dtype not in rules.DTYPES:
            return reasons
        forward, backward = self.families(problem)
        for family in (forward, backward) if problem.needs_grad else (forward,):
            if hasattr(family, "why_not"):
                reasons += family.why_not(problem, target)
        if not reasons and not sequences.configs(forward.configs, problem, target):
            reasons.append(rules.nothing_fits(problem, target))
        return reasons

    def notices(self, problem: Problem, target: Target) -> list[str]:
        if rules.too_wide(problem):
            return []
        problem = rules.in_terms(problem)
        entry = self.forward_direction.entry(problem, target)
        said = [] if entry is None else [tuned.cite(entry)]
        forward = self.families(problem)[0]
        said += forward.notices(problem) if hasattr(forward, "notices") else []
        said += rules.zero_filled(problem, getattr(forward, "HEAD_DIM_CLASSES", rules.HEAD_DIM_CLASSES))
        entry = self.backward_direction.entry(problem, target) if problem.needs_grad else None
        return said if entry is None else [*said, f"backward: {tuned.cite(entry)}"]

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """Configs of the forward, best first."""
        return [] if rules.too_wide(problem) else self.forward_direction.configs(problem, target)

    def backward_configs(self, problem: Problem, target: Target) -> list[Any]:
        """Configs of the backward, best first."""
        return self.backward_direction.configs(problem, target)

    def program(self, problem: Problem, target: Target, config: Any) -> Program:
        """What a forward launches."""
        family = self._forward_of(problem, config)
        return family.program(forward_lowered(problem, family), target, config)  # type: ignore[no-any-return]

    def backward_program(self, problem: Problem, target: Target, config: Any, wants: Wants | None = None) -> Program:
        """What a backward launches; without `wants`, one of all gradients that the problem needs."""
        wants = ALL.union(problem.operand_grads) if wants is None else wants
        family = self.families(problem)[1]
        return family.program(backward_lowered(problem, wants, family), target, config, wants)  # type: ignore[no-any-return]

    def makes_operands_alone(self, problem: Problem) -> bool:
        """Whether a backward may make gradients of operands without any of q, k and v."""
        return bool(getattr(self.families(problem)[1], "MAKES_OPERANDS_ALONE", False))

    # -----------------------------------------------------------------------------------------------------------------
    # For the lab, which looks at a forward's configs one by one

    @property
    def Config(self) -> Any:  # noqa: N802  (as a module has it)
        return self.forwards[-1].Config

    @property
    def config_types(self) -> tuple[Any, ...]:
        return self.forward_direction.config_types

    def shipped(self, problem: Problem, target: Target) -> list[Any]:
        return self.forward_direction.shipped(problem, target)

    def tuning_key(self, problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
        return self.forward_direction.tuning_key(problem)

    def unit(self, config: Any, arch: str = "") -> Unit:
        """The main kernel of a config: for the family's own architecture, else for this one, or the current GPU's."""
        family = next(one for one in (*self.forwards, *self.backwards) if isinstance(config, one.Config))
        return family.unit(config, getattr(family, "ARCH", "") or arch or Target.of("cuda").arch)  # type: ignore[no-any-return]

    def details(self, problem: Problem, target: Target, config: Any) -> list[str]:
        """How the launch fills the GPU."""
        return self.forward_direction.details(problem, target, config)

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

        return run.bind_backward(program, problem, operands_alone=self.makes_operands_alone(problem))

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
