"""plan(problem, target) -> Plan: which backend runs, why it, and why not the others. Pure and memoised.

What may change while a process runs (kernels that turned out not to build, the user's tuned tables, the environment) is
a `State`, which a plan is made for like for a target: none made for another state is ever found by mistake. Whoever
changes it calls `memo.invalidate`, for the sake of what was made of plans.

Rules are rows, not code paths: "prefer X, when ..., because ...". The first row whose backend is willing and whose
condition holds wins. Naming a backend makes it the only row: a refusal then raises instead of falling back.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .engine import SM80, SM90
from .engine.backend import Fused
from .engine.decode import takes as is_decoding
from .engine.lengths import Lengths, told
from .errors import InvalidInput, Reason, UnsupportedProblem
from .jit import tuned
from .masks import Cached, Causal, Dense, Documents, Full, Window, size_in_bytes
from .memo import Memo, invalidate
from .plain import reference, tiled
from .problem import dtype_name
from .sequences import as_sequences
from .torch_kernels import candidates
from .triton import backend as triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backend import Backend
    from .engine.backend import Direction
    from .engine.program import Program
    from .jit import Unit
    from .operands import Wants
    from .problem import Problem
    from .target import Target

AUTO = "auto"

BACKENDS: dict[str, Backend] = {
    "sm90": SM90,
    "sm80": SM80,
    **{candidate.name: candidate for candidate in candidates.CANDIDATES},
    "triton": triton,
    "tiled": tiled,
    "reference": reference,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one backend says to a problem."""

    backend: str
    reasons: tuple[Reason, ...]  # empty = willing
    notices: tuple[str, ...] = ()
    hazard: str = ""  # a known wrong-result bug this problem meets: "auto" steers around it, a named backend runs

    @property
    def willing(self) -> bool:
        return not self.reasons


class State(NamedTuple):
    """What a plan depends on beside the problem and the target."""

    left_out: frozenset[tuple[str, str]] = frozenset()  # kernels that do not work here: (label of the unit, why)
    tables: int = 0  # counts the changes of the user's tuned tables
    environment: tuple[str | None, ...] = ()  # the variables that backends ask for


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice, its reason, and a verdict for every backend, in the order of preference.

    `forward` and `backward` are what our own backends launch; None where PyTorch or Triton do that themselves.
    """

    problem: Problem
    target: Target
    backend: str
    config: Any
    because: str
    asked: str  # "auto", or the backend that was named
    state: State
    forward: Program | None = None
    backward: Program | None = None
    backward_config: Any = None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of every backend, or of the one that was named. Made when asked for: a call needs the choice alone, and a
        model whose cache grows makes a plan per length."""
        return _verdicts(self.problem, self.target, self.asked, self.state)

    @property
    def chosen(self) -> Verdict:
        return _verdict(self.backend, self.problem, self.target, self.state)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The kernels of ours that its calls launch."""
        programs = [program for program in (self.forward, self.backward) if program is not None]
        return tuple(dict.fromkeys(unit for program in programs for unit in program.units))

    @property
    def is_ours(self) -> bool:
        """A kernel of the engine runs it."""
        return isinstance(BACKENDS[self.backend], Fused)

    def backward_for(self, wants: Wants) -> Program:
        """The program that makes these gradients alone, for plans with a `backward`."""
        fused = BACKENDS[self.backend]
        assert isinstance(fused, Fused)
        return fused.backward_program(self.problem, self.target, self.backward_config, wants)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "problem": self.problem.to_dict(),
            "target": {"name": self.target.name, "arch": self.target.arch, "torch": _dotted(self.target.torch)},
            "backend": self.backend,
            "config": str(self.config) if self.config is not None else None,
            "because": self.because,
            "launch": _details(self),
            "lengths": _lengths(self),
            "backward": list(self.backward.summary) if self.backward is not None else [],
            "bound": _bound(self.problem, self.target),
            "verdicts": [
                {
                    "backend": verdict.backend,
                    "willing": verdict.willing,
                    "reasons": [reason._asdict() for reason in verdict.reasons],
                    "notices": list(verdict.notices),
                    "hazard": verdict.hazard,
                }
                for verdict in self.verdicts
            ],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class Rule(NamedTuple):
    """A row: prefer this backend, because of this, when the condition holds."""

    prefer: str
    because: str
    when: Callable[[Problem, Target], bool] = lambda problem, target: True


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("reference", "nothing to compute: every output is 0 or absent",
         lambda problem, target: problem.empty),
    Rule("reference", "float64 has no fused kernel on a GPU: the specification computes it",
         lambda problem, target: problem.dtype is torch.float64 and not target.is_cpu and _fits_the_reference(problem)),
    Rule("sm90", "our decoding kernel: streams the keys past all rows that share them, divided evenly over the GPU",
         lambda problem, target: is_decoding(problem)),
    Rule("sm80", "our decoding kernel: PyTorch's has no keys in caches",
         lambda problem, target: isinstance(problem.mask, Cached)),
    Rule("sm90", "our Hopper kernel: skips what the mask hides, masks only the tiles it cuts, needs no mask tensor",
         lambda problem, target: not isinstance(problem.mask, Dense)),
    Rule("sm90", "our Hopper kernel: maps a mask tensor once, skips the tiles that it hides, and adds a bias as it is",
         lambda problem, target: isinstance(problem.mask, Dense)),
    Rule("sm80", "our FlashAttention-2 kernel: draws the same dropout as every backend of ours, beside any other term",
         lambda problem, target: problem.dropout > 0 and not isinstance(problem.mask, Dense)),
    Rule("torch-cudnn", "the fastest of PyTorch's kernels on Hopper and later",
         lambda problem, target: target.capability >= (9, 0)),
    Rule("tiled", "skips the tiles this mask leaves empty; PyTorch's CPU kernel would read it as a tensor",
         lambda problem, target: target.is_cpu and not problem.dropout and _is_sparse_by_structure(problem)),
    Rule("torch-flash", "PyTorch's fused CPU kernel: no score ever reaches memory",
         lambda problem, target: target.is_cpu),
    Rule("torch-flash", "PyTorch's FlashAttention-2 kernel: fused, O(N) memory"),
    Rule("sm80", "our FlashAttention-2 kernel in float32: TF32 products on tensor cores, skips what the mask hides",
         lambda problem, target: problem.dtype is torch.float32 and not isinstance(problem.mask, Dense)),
    Rule("sm80", "our FlashAttention-2 kernel: takes the windows, alignments and softcaps that PyTorch's does not",
         lambda problem, target: not isinstance(problem.mask, Dense)),
    Rule("triton", "knows the window by name and skips what it hides; PyTorch's kernels would read it as a tensor",
         lambda problem, target: not target.is_cpu and _is_narrow(problem) and isinstance(problem.mask, Window)),
    Rule("torch-cudnn", "fused, and takes masks that flash does not"),
    Rule("torch-efficient", "fused, and takes float32, dense masks and any head_dim"),
    Rule("sm80", "our FlashAttention-2 kernel: takes mask tensors beside other terms, and makes the gradient of a bias",
         lambda problem, target: isinstance(problem.mask, Dense)),
    Rule("triton", "no other fused kernel takes this problem; ours in Triton does, in O(N) memory",
         lambda problem, target: not target.is_cpu and (_is_narrow(problem) or _scores_bytes(problem) > _HELD_SCORES)),
    Rule("tiled", "no fused kernel takes this problem; tiles in torch operations keep memory O(N)",
         lambda problem, target: not problem.dropout and _is_long(problem, target)),
    Rule("torch-math", "no fused kernel takes this problem; PyTorch's composite does"),
    Rule("tiled", "nothing of PyTorch's drops weights beside what else is asked; tiles keep memory O(N)",
         lambda problem, target: problem.dropout > 0 and _is_long(problem, target)),
    Rule("triton", "nothing of PyTorch's takes this problem; ours in Triton does, in O(N) memory",
         lambda problem, target: not target.is_cpu),
    Rule("reference", "the specification takes whatever is left, and holds every score at once"),
)
# fmt: on

# Bytes of scores above which tiles are the better composite: on a CPU because they stay in its cache, on a GPU, where
# small tiles cost launches, because the whole would not.
_CACHED_SCORES = 2 * 2**20
_HELD_SCORES = 256 * 2**20

# Share of visible pairs below which skipping tiles pays for the tiled loop on a CPU (benchmarks/results, suite cpu).
_WORTH_SKIPPING = 0.75


def _is_sparse_by_structure(problem: Problem) -> bool:
    """A float32 or float64 problem under a mask that hides much and that PyTorch has no name for."""
    mask = problem.mask
    named = isinstance(mask, Full | Dense) or (isinstance(mask, Causal) and problem.band.offset == 0)
    # Documents run apart there, each under its inner mask.
    named = named or (isinstance(mask, Documents) and isinstance(mask.inner, Full | Causal))
    visible = mask.pairs(problem.seq_q, problem.seq_kv)
    sparse = visible < _WORTH_SKIPPING * problem.seq_q * problem.seq_kv
    return sparse and not named and problem.dtype.itemsize >= 4


def _is_long(problem: Problem, target: Target) -> bool:
    return _scores_bytes(problem) > (_CACHED_SCORES if target.is_cpu else _HELD_SCORES)


def _fits_the_reference(problem: Problem) -> bool:
    return 2 * _scores_bytes(problem) <= _HELD_SCORES


def _is_narrow(problem: Problem) -> bool:
    """16 bits wide. Triton multiplies float32 without tensor cores: what fits into memory is left to PyTorch."""
    return problem.dtype.itemsize == 2


def plan(problem: Problem, target: Target, backend: str = AUTO, state: State | None = None) -> Plan:
    """The plan for a problem on a target. Raises UnsupportedProblem, with every reason, if nothing allowed takes it.

    Without a state: as things stand in this process.
    """
    check_backend(backend)
    state = current_state() if state is None else state
    key = problem, target, backend, state
    known = _plans.get(key)
    if known is None:
        generation = _plans.generation
        known = (_automatic if backend == AUTO else _explicit)(problem, target, backend, state)
        _plans.put(key, known, generation, 2 * size_in_bytes(problem.mask))
    return known


_plans: Memo[Plan] = Memo()


def plans_made() -> list[Plan]:
    """Those that are remembered, in the order in which they were made."""
    return _plans.values()


def check_backend(backend: str) -> None:
    if not isinstance(backend, str) or (backend != AUTO and backend not in BACKENDS):
        raise InvalidInput("backend", repr(backend), f"'auto' or one of {', '.join(BACKENDS)}", "choose one of these")


def _automatic(problem: Problem, target: Target, backend: str, state: State) -> Plan:
    refused = set()
    for rule in RULES:
        if rule.prefer in refused or not rule.when(problem, target):
            continue
        verdict = _verdict(rule.prefer, problem, target, state)
        if verdict.willing and not verdict.hazard:
            return _plan(problem, target, rule.prefer, rule.because, backend, state)
        refused.add(rule.prefer)
    raise UnsupportedProblem(
        f"no backend takes {problem} on {target.name}.",
        problem,
        _verdicts(problem, target, backend, state),
        "change what the reasons above name; each ends with its remedy",
    )


def _explicit(problem: Problem, target: Target, backend: str, state: State) -> Plan:
    verdict = _verdict(backend, problem, target, state)
    if not verdict.willing:
        raise UnsupportedProblem(
            f"backend {backend!r} does not take {problem} on {target.name}.",
            problem,
            (verdict,),
            "change what the reasons name, or pass backend='auto'",
        )
    return _plan(problem, target, backend, "asked for by name", backend, state)


def _verdicts(problem: Problem, target: Target, asked: str, state: State) -> tuple[Verdict, ...]:
    names = _order(problem, target) if asked == AUTO else (asked,)
    return tuple(_verdict(name, problem, target, state) for name in names)


_left_out: frozenset[tuple[str, str]] = frozenset()
_leaving_out = threading.Lock()
_VARIABLES = (triton.INTERPRETER, "TILEWISE_TABLES")


def current_state() -> State:
    """The state of this process that plans are made for."""
    return State(_left_out, tuned.changes(), tuple(map(os.environ.get, _VARIABLES)))


def leave_out(label: str, why: str) -> None:
    """Take a kernel (the label of its unit), or a backend as a whole, out of every further choice, for this reason."""
    global _left_out
    with _leaving_out:
        _left_out |= {(label, why)}
    invalidate()


def _plan(problem: Problem, target: Target, backend: str, because: str, asked: str, state: State) -> Plan:
    module = BACKENDS[backend]
    if not isinstance(module, Fused):
        configs = module.configs(problem, target)
        return Plan(problem, target, backend, configs[0] if configs else None, because, asked, state)
    if problem.empty:
        return Plan(problem, target, backend, module.configs(problem, target)[0], because, asked, state)
    (config, forward, _), *others = _first_that_work(module, problem, target, state)
    backward_config, backward, _ = others[0] if others else (None, None, ())
    return Plan(problem, target, backend, config, because, asked, state, forward, backward, backward_config)


class _Works(NamedTuple):
    """What a direction of a backend runs: the first config, in the order of its table, whose kernels build here."""

    config: Any
    program: Program
    passed_over: tuple[str, ...]  # labels of the kernels left out that better configs would launch


def _first_that_work(fused: Fused, problem: Problem, target: Target, state: State) -> list[_Works]:
    """Of the forward, and of the backward where there is one."""
    makers = [(fused.forward_direction, fused.program), (fused.backward_direction, fused.backward_program)]
    return [_first_that_works(*maker, problem, target, state) for maker in makers[: 1 + problem.needs_grad]]


def _first_that_works(
    direction: Direction,
    make: Callable[[Problem, Target, Any], Program],
    problem: Problem,
    target: Target,
    state: State,
) -> _Works:
    """Where every config has a kernel that is left out: the best of all, with nothing passed over."""
    left_out = {label for label, _ in state.left_out}
    best: _Works | None = None
    passed_over: dict[str, None] = {}
    for config in chain(direction.configs(problem, target), direction.spare(problem, target)):
        program = make(problem, target, config)
        broken = [unit.label for unit in program.units if unit.label in left_out]
        if not broken:
            return _Works(config, program, tuple(passed_over))
        best = best or _Works(config, program, ())
        passed_over |= dict.fromkeys(broken)
    assert best is not None, "a backend that is willing has a config"
    return best


def _left_out_here(name: str, problem: Problem, target: Target, state: State) -> tuple[list[Reason], list[str]]:
    """Why a backend that would take a problem cannot: the kernels left out of a direction that has no other. Else what
    it passes over."""
    left_out = dict(state.left_out)
    remedy = "fix what the message names, and restart"
    if name in left_out:
        return [Reason(f"it failed here: {left_out[name]}", remedy)], []
    module = BACKENDS[name]
    if not left_out or problem.empty or not isinstance(module, Fused):
        return [], []
    directions = _first_that_work(module, problem, target, state)
    broken = dict.fromkeys(unit.label for one in directions for unit in one.program.units if unit.label in left_out)
    passed_over = dict.fromkeys(label for one in directions for label in one.passed_over)
    return (
        [Reason(f"its kernel {label} failed here: {left_out[label]}", remedy) for label in broken],
        [f"the next config of its table runs: {label} failed here: {left_out[label]}" for label in passed_over],
    )


def _order(problem: Problem, target: Target) -> dict[str, None]:
    """Backends in the order their rules come up for this problem; those whose rule does not apply follow."""
    applying = [rule.prefer for rule in RULES if rule.when(problem, target)]
    return dict.fromkeys([*applying, *BACKENDS])


def _verdict(name: str, problem: Problem, target: Target, state: State) -> Verdict:
    backend = BACKENDS[name]
    if reasons := backend.why_not(problem, target):
        return Verdict(name, tuple(reasons))
    reasons, passed_over = _left_out_here(name, problem, target, state)
    if reasons:
        return Verdict(name, tuple(reasons))
    hazardous = getattr(backend, "hazardous", None)
    hazard = hazardous(problem, target) if hazardous else ""
    return Verdict(name, (), (*backend.notices(problem, target), *passed_over), hazard)


def _scores_bytes(problem: Problem) -> int:
    return problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv * 4


def _bound(problem: Problem, target: Target) -> dict[str, float | str] | None:
    """Roofline of the forward: no kernel on this target can be faster. None where the target's rates are unknown."""
    # "tf32" may take one product of 16-bit parts where "exact" takes three.
    rate = target.flops_16bit if problem.precision == "tf32" else target.peak_flops(problem.dtype)
    if not rate or not target.dram_bytes_per_s:
        return None
    compute, memory = problem.flops() / rate, problem.min_bytes() / target.dram_bytes_per_s
    return {
        "seconds": max(compute, memory),
        "by": "arithmetic" if compute >= memory else "memory",
        "compute_seconds": compute,
        "memory_seconds": memory,
    }


def _lines(plan: Plan) -> list[str]:
    problem, target = plan.problem, plan.target
    lines = [
        f"attention: {problem}",
        f"target:    {_target_text(target)}",
        f"runs:      {plan.backend}{_config_text(plan)}",
        *(f"launch:    {detail}" for detail in _details(plan)),
        *(f"backward:  {said}" for said in (plan.backward.summary if plan.backward is not None else ())),
        *(f"lengths:   {told}" for told in _lengths(plan)),
        f"because:   {plan.because}",
        f"work:      {_work_text(problem, target)}",
        *(f"note:      {notice}" for notice in plan.chosen.notices),
        "verdicts, in order of preference:",
    ]
    width = max(len(verdict.backend) for verdict in plan.verdicts)
    for verdict in plan.verdicts:
        name = verdict.backend.ljust(width)
        if verdict.willing:
            state = (
                "   <- runs"
                if verdict.backend == plan.backend
                else f"  avoided: {verdict.hazard}"
                if verdict.hazard
                else ""
            )
            lines.append(f"  {name}  yes{state}")
            if verdict.backend != plan.backend:
                lines += [f"  {' ' * width}       note: {notice}" for notice in verdict.notices]
            continue
        first, *rest = verdict.reasons
        lines.append(f"  {name}  no   {first}")
        lines += [f"  {' ' * width}       {reason}" for reason in rest]
    return lines


def _target_text(target: Target) -> str:
    if target.is_cpu:
        return f"{target.name}, torch {_dotted(target.torch)}"
    cudnn = f"{target.cudnn // 10000}.{target.cudnn // 100 % 100}" if target.cudnn else "none"
    return f"{target.name} ({target.arch}, {target.sms} SMs), torch {_dotted(target.torch)}, cuDNN {cudnn}"


def _config_text(plan: Plan) -> str:
    return "" if plan.config is None else f" with {plan.config}"


def _details(plan: Plan) -> list[str]:
    """What the backend can tell of the launch itself: grid, waves, registers."""
    if plan.forward is not None:
        return list(plan.forward.summary)
    details = getattr(BACKENDS[plan.backend], "details", None)
    return details(plan.problem, plan.target, plan.config) if details else []


def _lengths(plan: Plan) -> list[str]:
    """Of documents whose lengths the host knows, and of their tiles where each document has its own."""
    mask = plan.problem.mask
    if not isinstance(mask, Documents):
        return []
    lengths = Lengths.of(mask.cu_seqlens_q, mask.cu_seqlens_kv)
    if plan.is_ours and as_sequences(plan.problem.dropout_in_terms()) is not None:
        return [told(lengths, mask.inner, plan.config.block_q, plan.config.block_kv)]
    return [str(lengths)]


def _work_text(problem: Problem, target: Target) -> str:
    text = f"{_si(problem.flops())}FLOP visible, {_si(problem.min_bytes())}B at least"
    bound = _bound(problem, target)
    if bound is None:
        return text
    microseconds = float(bound["seconds"]) * 1e6
    peak = dtype_name(problem.dtype) if problem.precision == "exact" else problem.precision
    return f"{text}; bound by {bound['by']}: {microseconds:.1f} us at the {peak} peak"


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000 or unit == "T":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
