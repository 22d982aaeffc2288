"""The three-kernel rung taken apart, in a process of its own: each kernel alone, all three, and three that do nothing.

All by graph replay, so that no host time stands between kernels; and, apart, what the host needs to launch them, and
what a program waits for that launches them one by one. What three kernels that do nothing take with the same grids is
what launching costs: it does not depend on the tiles. The softmax is taken with every number of threads per row that
a search tries, alone and between the two products.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...ladder import three_kernel
from ...problem import Problem
from ...target import Target
from ..candidates.inputs import make_inputs
from ..candidates.variants import THREE_KERNEL, name_of
from ..model.launched import of_variant
from ..processes import module_command, variables
from . import timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..candidates.names import Inputs

NAMES = ("scores", "softmax", "values")
WHOLE, NOTHING, HOST = "all three", "three that do nothing", "host, to launch three"
EAGER = "all three, launched one by one"
ROUNDS = 7
ROW_THREADS = tuple(threads for threads, _ in three_kernel.ROW_THREADS)


def softmax_name(threads: int) -> str:
    """The part that is the softmax alone, with so many threads per row."""
    return f"softmax, {threads} threads per row"


def whole_name(threads: int) -> str:
    """The part that is all three kernels, with so many threads per row of the softmax."""
    return f"all three, {threads} threads per row"


PARTS = (
    *NAMES, WHOLE, NOTHING, HOST, EAGER, *map(softmax_name, ROW_THREADS), *map(whole_name, ROW_THREADS)
)  # fmt: skip


def measure(problem: Problem, seed: int, seconds: float, time_limit: float) -> dict[str, Any]:
    """{"seconds": {part: one per round}, "config", "kernels": what is launched}, or {"error": why there is none}."""
    job = json.dumps({"problem": problem.to_dict(), "seed": seed, "seconds": seconds})
    try:
        done = subprocess.run(
            module_command("tilewise.lab.measure.stages"),
            input=job,
            capture_output=True,
            text=True,
            timeout=time_limit,
            check=False,
            env=variables(),
        )
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {time_limit:g} s"}
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return {"error": f"died with exit status {done.returncode}: {last[0]}"}


class _Timed(NamedTuple):
    call: Callable[[], None]
    method: str = "graph"


def _parts(problem: Problem, config: three_kernel.Config, seed: int) -> dict[str, _Timed]:
    """What is timed, by name. The scores stay where they are between calls: a kernel does not care for their values."""
    inputs = make_inputs(problem, seed, "cuda")
    out = torch.empty_like(inputs.dout)
    scores = three_kernel.pipeline(problem, config, inputs.q.device.index or 0).room(inputs.q)
    launch = _launcher(problem, config, inputs, out, scores)
    parts = {name: _Timed(partial(launch, number)) for number, name in enumerate(NAMES)}
    parts[WHOLE] = _Timed(partial(launch, 0, 1, 2))
    parts[NOTHING] = _Timed(partial(launch, 0, 1, 2, really=False))
    parts[HOST] = parts[WHOLE]._replace(method="host")
    parts[EAGER] = parts[WHOLE]._replace(method="wall")
    for threads, changed in _by_row(config).items():
        if changed == config:
            parts |= {softmax_name(threads): parts[NAMES[1]], whole_name(threads): parts[WHOLE]}
            continue
        variant = _launcher(problem, changed, inputs, out, scores)
        parts[softmax_name(threads)] = _Timed(partial(variant, 1))
        parts[whole_name(threads)] = _Timed(partial(variant, 0, 1, 2))
    return parts


def _by_row(config: three_kernel.Config) -> dict[int, three_kernel.Config]:
    """The config with every number of threads per row."""
    return {
        threads: replace(config, row_threads=threads, softmax_warps=warps)
        for threads, warps in three_kernel.ROW_THREADS
    }


def _launcher(
    problem: Problem, config: three_kernel.Config, inputs: Inputs, out: torch.Tensor, scores: torch.Tensor
) -> Callable[..., None]:
    """launch(*numbers, really=True): these of the three kernels, or as many that do nothing, with their grids."""
    q, k, v = inputs.q, inputs.k, inputs.v
    pipeline = three_kernel.pipeline(problem, config, q.device.index or 0)
    arguments = pipeline.arguments(q, k, v, out, None, scores)
    (slab,) = pipeline.slabs()

    def launch(*numbers: int, really: bool = True, held: object = (inputs, out, scores)) -> None:
        # Invariant: what is `held` lives as long as the arguments are used, which contain addresses only.
        for number in numbers:
            pipeline.launch(number, arguments, slab, really=really)

    return launch


def time_rounds(parts: dict[str, _Timed], seconds: float, seed: int) -> dict[str, list[float]]:
    """Seconds per call of every part, round by round: each part once per round, in random order. A part that stands
    there under two names is timed once."""
    kept: dict[_Timed, dict[str, Any]] = {part: {} for part in parts.values()}
    found: dict[_Timed, list[float]] = {part: [] for part in parts.values()}
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        for part in chance.sample(list(found), len(found)):
            samples = timing.measure(part.call, part.method, seconds / ROUNDS, kept=kept[part])
            found[part].append(median(samples))
    return {name: found[part] for name, part in parts.items()}


def main() -> None:
    job = json.loads(sys.stdin.read())
    problem = Problem.from_dict(job["problem"])
    target = Target.of("cuda")
    config = three_kernel.configs(problem, target)[0]
    names = (name_of(THREE_KERNEL, changed) for changed in _by_row(config).values())
    kernels = [of_variant(name, problem, target) for name in names]
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        found = time_rounds(_parts(problem, config, job["seed"]), job["seconds"], job["seed"])
    launches = three_kernel.launches(problem, config)
    print(json.dumps({"seconds": found, "config": config.label, "launches": launches, "kernels": kernels}))


if __name__ == "__main__":
    main()
