"""Compile what rows need before they are measured, many kernels at a time.

Kernels are compiled when a problem first needs them, and while one is compiled nothing else is measured: on a machine
whose caches are empty a suite waits longer than it measures. Here several processes make the first call of each kind of
problem side by side. They share nothing with the processes that measure but the caches on disk: ours, and those that
other libraries keep (see `pool.LASTING` for FlashAttention-4's). What takes longest to compile comes first: another
library's kernels by CuTe DSL or nvcc, and those of a backward.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

from ..candidates.names import Candidate
from ..candidates.rivals import COMPILE
from .compare import first_limit
from .pool import Failure, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...problem import Problem
    from .compare import Row, Settings, Tick

MAX_PROCESSES = 16
Job = tuple[str, str, "Problem", str]  # candidate, device, problem, contents of mask tensors


def jobs(rows: Sequence[Row]) -> list[list[Job]]:
    """The distinct problems of candidates that compile, in bunches that are likely to need the same kernels; the bunch
    that takes longest first."""
    found: dict[tuple[object, ...], dict[Job, None]] = {}
    slowest: dict[tuple[object, ...], tuple[bool, bool]] = {}
    for row in rows:
        for name in row.candidates:
            candidate, problem = Candidate(name), row.asked(name)
            compiles = candidate.compiles or candidate.is_ours
            if not compiles or not row.device.startswith("cuda") or candidate.why_not(problem, row.device):
                continue
            dims = (problem.head_dim, problem.head_dim_v)
            group = problem.group if candidate.compiles else 0
            shape = problem if name in COMPILE else None  # torch.compile makes a kernel of its own for every shape
            kind = (name, problem.dtype, dims, type(problem.mask), problem.needs_grad, problem.scores, group, shape)
            found.setdefault(kind, {})[name, row.device, problem, row.contents] = None
            slowest[kind] = (candidate.compiles, problem.needs_grad)
    return [list(found[kind]) for kind in sorted(found, key=slowest.__getitem__, reverse=True)]


def compile_all(rows: Sequence[Row], settings: Settings, tick: Tick = lambda text: None) -> None:
    """Make every first call once. What fails here is told when it is measured."""
    waiting = jobs(rows)
    count = min(len(waiting), MAX_PROCESSES, os.cpu_count() or 2)
    if not count:
        return
    names = [f"ahead {number}" for number in range(count)]
    free: SimpleQueue[str] = SimpleQueue()
    for name in names:
        free.put(name)
    stopped = Event()
    threads = ThreadPoolExecutor(count)

    def work(bunch: list[Job]) -> None:
        process = free.get()
        for job in bunch:
            if stopped.is_set():
                return
            tick(f"compile ahead: {job[0]}, {job[2]}")
            with contextlib.suppress(Failure):
                _first_calls(pool, process, job, settings)
        free.put(process)

    with Pool() as pool:
        pool.start(*names)
        try:
            list(threads.map(work, waiting))
        finally:  # after an interrupt the pool ends what the threads wait for
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)


def _first_calls(pool: Pool, process: str, job: Job, settings: Settings) -> None:
    """The forward, and the backward where gradients are wanted: that is what a measurement of memory runs."""
    candidate, device, problem, contents = job
    limit = first_limit(candidate, settings)
    what = {"problem": problem.to_dict(), "seed": settings.seed, "device": device, "contents": contents}
    pool.ask(process, "prepare", limit, candidate=candidate, **what)
    pool.ask(process, "memory", limit)
