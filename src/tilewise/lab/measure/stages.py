"""The three-kernel rung taken apart, in a process of its own: each kernel alone, all three, and three that do nothing.

All by graph replay, so that no host time stands between kernels; and, apart, what the host needs to launch them, and
what a program waits for that launches them one by one. What three kernels that do nothing take with the same grids is
what launching costs: it does not depend on the tiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch

from ...ladder import three_kernel
from ...problem import Problem
from ...target import Target
from ..candidates.inputs import make_inputs
from ..processes import module_command, variables
from . import timing

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("scores", "softmax", "values")
WHOLE, NOTHING, HOST = "all three", "three that do nothing", "host, to launch three"
EAGER = "all three, launched one by one"


def measure(problem: Problem, seed: int, seconds: float, time_limit: float) -> dict[str, Any]:
    """{"seconds": {part: samples}, "config": ...}, or {"error": why there is none}."""
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


def _parts(problem: Problem, seed: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name. The scores stay where they are between calls: a kernel does not care for their values."""
    config = three_kernel.configs(problem, Target.of("cuda"))[0]
    inputs = make_inputs(problem, seed, "cuda")
    q, k, v = inputs.q, inputs.k, inputs.v
    pipeline = three_kernel.pipeline(problem, config, q.device.index or 0)
    out, scores = torch.empty_like(inputs.dout), pipeline.room(q)
    arguments = pipeline.arguments(q, k, v, out, None, scores)
    (slab,) = pipeline.slabs()

    def launch(*numbers: int, really: bool = True) -> None:
        for number in numbers:
            pipeline.launch(number, arguments, slab, really=really)

    parts: dict[str, Callable[[], None]] = {
        name: lambda number=number: launch(number)  # type: ignore[misc]
        for number, name in enumerate(NAMES)
    }
    # The arguments hold addresses only: q, k, v, out and scores must outlive them.
    parts[WHOLE] = lambda tensors=(q, k, v, out, scores): launch(0, 1, 2)  # type: ignore[misc]
    parts[NOTHING] = lambda: launch(0, 1, 2, really=False)
    return parts


def main() -> None:
    job = json.loads(sys.stdin.read())
    problem = Problem.from_dict(job["problem"])
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        parts = _parts(problem, job["seed"])
        found = {name: timing.measure(call, "graph", job["seconds"]) for name, call in parts.items()}
        found[HOST] = timing.measure(parts[WHOLE], "host", job["seconds"])
        found[EAGER] = timing.measure(parts[WHOLE], "wall", job["seconds"])
    config = three_kernel.configs(problem, Target.of("cuda"))[0]
    print(json.dumps({"seconds": found, "config": config.label, "launches": three_kernel.launches(problem, config)}))


if __name__ == "__main__":
    main()
