"""Which kernels of ours a call launches, as records name them: by a digest of each translation unit.

    {"problem": {...}, "asked": "auto", "backend": "sm90", "program": "5f0c...", "units": {"forward_...": "93b1..."}}

`problem` is the one that was planned for the call. `asked` is the backend that the planner was asked for, or the name
of a variant, for which no plan is made: a rung of the ladder, or a backend with a config that is spelled out. `program`
is a digest of the host's part: the config, and of every launch its grid, its threads and the numbers among its
arguments; of a rung, the config and its module. All of it follows from the plan or the variant, and can be found again
on a machine without a GPU: a measurement is older than the sources where the same call launches something else today.

A source may change without its machine code: a type is renamed, a function moves to another header. Such a change makes
no measurement older. benchmarks/machine_code.json has, for translation units by their digests, a digest of the machine
code that the pinned compiler makes of them; tools/machine_code.py writes it and checks it. For kernels that are written
in Python it has a digest of what their modules do, which imports and docstrings are no part of.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.backend import Direction, Fused
from ...engine.program import slots_of
from ...jit.compile import KERNELS
from ...jit.headers import included_files
from ...jit.trust import digest
from ...plan import BACKENDS, plan, plans_made
from ...problem import Problem
from ..candidates.variants import BACKWARD, backend_of, is_variant, resolve, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.program import Launch, Program
    from ...jit import Unit
    from ...plan import Plan
    from ...target import Target

Launched = dict[str, Any]
STEP = ("step",)
MACHINE_CODE = Path(__file__).resolve().parents[4] / "benchmarks" / "machine_code.json"
_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIGITS, _DIGITS_OF_CODE = 12, 16
_OTHER_SOURCES = {"triton": ("tilewise.triton.kernels",)}  # of backends whose kernels are Python; found, not imported


def launched(chosen: Plan, timed: Sequence[str], kernels: Path = KERNELS) -> Launched:
    """What the plan launches in the directions that are timed: forward, backward or step."""
    programs = _programs(chosen, timed)
    units = {unit.label: unit_digest(unit, kernels) for unit in _units(programs)}
    host = [str(chosen.config), str(chosen.backward_config), *(part for one in programs for part in _host(one))]
    return {
        "problem": chosen.problem.to_dict(),
        "asked": chosen.asked,
        "backend": chosen.backend,
        "program": _short([part.encode() for part in host]) if programs else "",
        "units": units or _python_sources(chosen.backend),
    }


def of_variant(
    name: str, problem: Problem, target: Target, timed: Sequence[str] = STEP, kernels: Path = KERNELS
) -> Launched:
    """What a variant launches in the directions that are timed."""
    head = name.partition("@")[0]
    backend, config = resolve(name)
    if isinstance(backend, Fused | Direction):
        programs = _of_backend(head.removesuffix(BACKWARD), problem, target, config, timed)
        units = _units(programs)
        host = [str(config), *(part for one in programs for part in _host(one))]
        sources = {}
    else:
        config = config or next(iter(backend.configs(problem, target)), None)
        units = units_of(backend, problem, config, target.arch)
        sources = _python_sources(head)
        host = [str(config), *sources.values()]
    return {
        "problem": problem.to_dict(),
        "asked": name,
        "backend": head,
        "program": _short([part.encode() for part in host]),
        "units": {unit.label: unit_digest(unit, kernels) for unit in units} or sources,
    }


def _of_backend(name: str, problem: Problem, target: Target, config: Any, timed: Sequence[str]) -> list[Program]:
    """What a backend launches with a config that is its forward's or its backward's; the other is its own choice."""
    backend: Any = BACKENDS[name]
    of_backward = isinstance(config, backend.backward_direction.config_types)
    found = []
    if "forward" in timed or "step" in timed:
        own = None if of_backward else config
        found.append(backend.program(problem, target, own or backend.configs(problem, target)[0]))
    if problem.needs_grad and ("backward" in timed or "step" in timed):
        own = config if of_backward else None
        found.append(backend.backward_program(problem, target, own or backend.backward_configs(problem, target)[0]))
    return found


def by_this_process() -> list[Launched]:
    """What the calls of this process launch, forward and backward, by the plans that it made: one call for each set of
    kernels."""
    found: dict[object, Launched] = {}
    for chosen in plans_made():
        one = launched(chosen, STEP)
        found.setdefault((one["backend"], *one["units"].items()), one)
    return list(found.values())


def today(known: Launched, target: Target, timed: Sequence[str], kernels: Path = KERNELS) -> Launched:
    """What the same call launches by the sources at hand. Raises what planning raises."""
    problem, asked = Problem.from_dict(known["problem"]), known["asked"]
    if is_variant(asked):
        return of_variant(asked, problem, target, timed, kernels)
    return launched(plan(problem, target, asked), timed, kernels)


def kernels_of(known: Launched, target: Target) -> list[Unit]:
    """The translation units of the same call, forward and backward, by the sources at hand; none of a Python kernel."""
    problem, asked = Problem.from_dict(known["problem"]), known["asked"]
    if not is_variant(asked):
        return _units(_programs(plan(problem, target, asked), STEP))
    backend, config = resolve(asked)
    if isinstance(backend, Fused | Direction):
        return _units(_of_backend(asked.partition("@")[0].removesuffix(BACKWARD), problem, target, config, STEP))
    return units_of(backend, problem, config or next(iter(backend.configs(problem, target)), None), target.arch)


def difference(known: Launched, now: Launched) -> str:
    """What the sources at hand launch instead of what was measured; empty where that is the same."""
    if known["backend"] != now["backend"]:
        return f"runs {now['backend']}, no longer {known['backend']}"
    before, after = known["units"], now["units"]
    if others := [label for label in after if label not in before] or [label for label in before if label not in after]:
        return f"launches other kernels: {', '.join(others)}"
    if changed := [label for label in after if not _same_code(before[label], after[label])]:
        return f"the sources of {', '.join(changed)} have changed"
    return "" if known["program"] == now["program"] else "is launched with another config or another grid"


def _same_code(before: str, after: str) -> bool:
    """Whether two translation units, by their digests, are the same or known to become the same machine code."""
    code = machine_code()
    return before == after or (before in code and code[before] == code.get(after))


@functools.cache
def machine_code() -> dict[str, str]:
    """The digest of a translation unit -> that of its machine code, as far as the checkout knows them."""
    return dict(json.loads(MACHINE_CODE.read_text(encoding="utf-8"))["units"]) if MACHINE_CODE.is_file() else {}


@functools.lru_cache(maxsize=4096)
def unit_digest(unit: Unit, kernels: Path = KERNELS) -> str:
    """Of a translation unit: its source, the headers that it reaches, without comments and blank lines, its options and
    its architecture. The compiler and its own headers are not part of it: it is the same on every machine."""
    parts = [_without_comments(unit.source.encode()), unit.arch.encode(), *(one.encode() for one in unit.options)]
    for name, content in included_files(unit.source, [kernels]):
        parts += [name.encode(), _without_comments(content)]
    return _short(parts)


@functools.lru_cache(maxsize=512)
def _without_comments(content: bytes) -> bytes:
    lines = (b" ".join(line.split()) for line in _COMMENT.sub(b" ", content).splitlines())
    return b"\n".join(line for line in lines if line)


def _programs(chosen: Plan, timed: Sequence[str]) -> list[Program]:
    directions = {"forward": chosen.forward, "backward": chosen.backward}
    wanted = [program for what, program in directions.items() if what in timed or "step" in timed]
    return [program for program in wanted if program is not None]


def _units(programs: Sequence[Program]) -> list[Unit]:
    return [unit for program in programs for unit in program.units]


def _host(program: Program) -> list[str]:
    """The host's part of a program, and of those that prepare its operands."""
    before = [part for prepared in program.prepared for part in _host(prepared.program)]
    sizes = [f"{region.name} {region.bytes}" for region in program.scratch.regions]
    return [*before, *sizes, *sorted(program.zeroed), *map(_launch, program.launches)]


def _launch(launch: Launch) -> str:
    slots = {name for name, _, _ in slots_of(launch.fields)}
    numbers = [f"{name}={value}" for name, value in sorted(launch.fields.items()) if name not in slots]
    return f"{launch.unit.label} {launch.grid} {launch.threads} {launch.overlap} {' '.join(numbers)}"


@functools.cache
def _python_sources(backend: str) -> dict[str, str]:
    """Of a backend of ours, or a rung, that is written in Python; nothing for PyTorch's kernels."""
    module = backend_of(backend)
    if not inspect.ismodule(module):
        return {}
    names = (module.__name__, *_OTHER_SOURCES.get(backend, ()))
    return {name.partition(".")[2]: python_digest(source_of(name)) for name in names}


def python_code(source: str) -> str:
    """A digest of what a module does: of its statements without imports, docstrings, comments and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _says_nothing(one)]  # type: ignore[attr-defined]
    return digest([ast.dump(tree).encode()])[:_DIGITS_OF_CODE]


def _says_nothing(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom)


def is_module(label: str) -> bool:
    """Whether a unit of a record is a module of this package, and no translation unit."""
    try:
        return importlib.util.find_spec(f"{__package__.partition('.')[0]}.{label}") is not None
    except ModuleNotFoundError:  # not even the package above it
        return False


def python_digest(source: str) -> str:
    """Of a module's lines, without comments and blank lines."""
    return _short([*map(str.encode, filter(_is_code, source.splitlines()))])


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _short(parts: list[bytes]) -> str:
    return digest(parts)[:_DIGITS]
