"""Timing: seconds per call of a function that takes no arguments.

    wall    time.perf_counter around calls: CPU, where a call returns when its work is done
    events  CUDA events around back-to-back calls in one stream (a sustained load), or around single calls with the L2
            cache overwritten in between when `flush` is set
    graph   CUDA graph replay of many calls: no host time between kernels, for problems smaller than a launch
    host    time.perf_counter around calls that only enqueue; the device is waited for outside the clock

Short kernels must not wait for the host inside an event pair, so the device first spins for as long as the host needs
to enqueue the batch. Each function returns several samples; what a round of it means is decided by who collects them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

METHODS = ("wall", "events", "graph", "host")
_WARM_UP_SECONDS = 0.01
_SHORTEST_SAMPLE = 0.001  # seconds: far above the clock's resolution
_HOST_BATCH = 32  # calls enqueued at once: well below the driver's queue, which would make the host wait
_GRAPH_CALLS = 16
_SPIN_HZ = 2e9  # at least the clock of any GPU we know: the spin is long enough
_LEAST_EVENT_CALLS = 10


def measure(
    call: Call, method: str, seconds: float, *, flush: bool = False, graphs: dict[str, Any] | None = None
) -> list[float]:
    """Samples of seconds per call over about `seconds` of measured time, after a warm-up. `graphs` keeps captures."""
    if method == "wall":
        return _wall(call, seconds)
    if method == "host":
        return _host(call, seconds)
    if method == "graph":
        return _graph(call, seconds, {} if graphs is None else graphs)
    assert method == "events", method
    return _events(call, seconds, flush)


def _wall(call: Call, seconds: float) -> list[float]:
    estimate = _warm_up(call)
    if estimate >= seconds:  # a call this long needs no warm-up: it is the sample
        return [estimate]
    calls = max(1, math.ceil(_SHORTEST_SAMPLE / estimate))
    return [_clocked(call, calls) for _ in range(_sample_count(seconds, estimate * calls))]


def _host(call: Call, seconds: float) -> list[float]:
    synchronize: Call = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    call()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or time.perf_counter() < stop:
        synchronize()
        samples.append(_clocked(call, _HOST_BATCH))
    synchronize()
    return samples


def _events(call: Call, seconds: float, flush: bool) -> list[float]:
    device_seconds, host_seconds = _cuda_estimates(call)
    scratch = _l2_sized() if flush else None
    calls = max(_LEAST_EVENT_CALLS, math.ceil(_SHORTEST_SAMPLE / device_seconds))
    spin = int(1.5 * host_seconds * calls * _SPIN_HZ) if device_seconds < 2 * host_seconds else 0
    samples: list[float] = []
    for _ in range(_sample_count(seconds, device_seconds * calls)):
        pairs = [_event_pair() for _ in range(calls if flush else 1)]
        if spin:
            torch.cuda._sleep(spin)
        if scratch is None:
            start, stop = pairs[0]
            start.record()
            for _ in range(calls):
                call()
            stop.record()
        else:
            for start, stop in pairs:
                scratch.zero_()
                start.record()
                call()
                stop.record()
        torch.cuda.synchronize()
        each = 1 if flush else calls
        samples += [start.elapsed_time(stop) * 1e-3 / each for start, stop in pairs]
    return samples


def _graph(call: Call, seconds: float, graphs: dict[str, Any]) -> list[float]:
    graph = graphs.get("graph")
    if graph is None:
        graph = graphs["graph"] = _captured(call)
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    estimate = max(time.perf_counter() - start, 1e-6)
    replays = max(1, math.ceil(_SHORTEST_SAMPLE / estimate))
    samples = []
    for _ in range(_sample_count(seconds, estimate * replays)):
        begin, end = _event_pair()
        graph.replay()  # keeps the device busy while the pair is enqueued
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / (replays * _GRAPH_CALLS))
    return samples


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    """Must run in a stream that is not the default one: so does a worker, from its start."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(_GRAPH_CALLS):
            call()
    return graph


def _cuda_estimates(call: Call) -> tuple[float, float]:
    """Seconds per call of the device and of the host, roughly."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 5, (enqueued - start) / 5


def _warm_up(call: Call) -> float:
    """Runs for a while, once at least; returns the seconds of the fastest call. Idle threads of others go to sleep."""
    fastest = math.inf
    stop = time.perf_counter() + _WARM_UP_SECONDS
    while True:
        fastest = min(fastest, _clocked(call, 1))
        if time.perf_counter() >= stop:
            return max(fastest, 1e-9)


def _clocked(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _sample_count(seconds: float, sample_seconds: float) -> int:
    return max(1, math.ceil(seconds / sample_seconds))


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _l2_sized() -> torch.Tensor:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    size = 2 * int(getattr(properties, "L2_cache_size", 64 * 2**20))
    return torch.empty(size, dtype=torch.uint8, device="cuda")
