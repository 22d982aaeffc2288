"""Timing: seconds per call of a function that takes no arguments.

    wall    time.perf_counter around calls until their work is done: what a program waits for. On CUDA around a batch
            of calls, so host and device overlap as they do in a program
    events  CUDA events around back-to-back calls in one stream (a sustained load), or around single calls with the L2
            cache overwritten in between when `flush` is set
    graph   CUDA graph replay of many calls: no host time between kernels, for problems smaller than a launch; the
            worker lets them go through several sets of tensors when `flush` is set
    host    time.perf_counter around calls that only enqueue; the device is waited for outside the clock

Kernels must not wait for the host inside an event pair, so the device first spins for as long as the host needs to
enqueue the batch or, of calls that take far longer on the device, the first one. Each function returns several samples;
the caller decides what a round of them means.
What a method finds out about a call (how long it takes, a captured graph) it keeps in `kept`, so that later rounds
spend their time measuring.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Call = Callable[[], Any]

METHODS = ("wall", "events", "graph", "host")
_WARM_UP_SECONDS = 0.01
_SHORTEST_SAMPLE = 0.001  # seconds: far above the clock's resolution
_HOST_BATCH = 32  # calls enqueued at once: well below the driver's queue, which would make the host wait
_GRAPH_CALLS = 16
_GRAPH_SECONDS = 0.002  # of one replay; a graph of long calls needs few of them
_SPIN_HZ = 2e9  # at least the clock of any GPU we know: the spin is long enough
_MAX_OVERTIME = 3  # times the measured time that was asked for
_EVENT_CALLS = 10  # back to back in one sample, unless a few already fill the round

Kept = dict[str, Any]
ROTATED_BYTES = 256 * 2**20  # of keys and values that a rotation goes through: no cache of a GPU holds them
_MAX_TURNS = 128


class Rotation:
    """One call after another, over and over: the same work on other tensors, so that no cache has them by accident."""

    def __init__(self, calls: list[Call]) -> None:
        self.count = len(calls)
        self._next = itertools.cycle(calls).__next__

    def __call__(self) -> Any:
        return self._next()()


def turns_for(size: int) -> int:
    """How many sets of tensors of so many bytes a rotation goes through."""
    return max(1, min(_MAX_TURNS, -(-ROTATED_BYTES // max(1, size))))


def measure(call: Call, method: str, seconds: float, *, flush: bool = False, kept: Kept | None = None) -> list[float]:
    """Samples of seconds per call over about `seconds` of measured time, after a warm-up."""
    kept = {} if kept is None else kept
    if method == "wall":
        return _wall(call, seconds)
    if method == "host":
        return _host(call, seconds)
    if method == "graph":
        return _graph(call, seconds, kept)
    assert method == "events", method
    return _events(call, seconds, flush, kept)


def _wall(call: Call, seconds: float) -> list[float]:
    synchronize: Call = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    estimate = _warm_up(call, synchronize, min(_WARM_UP_SECONDS, seconds / 2))
    if estimate >= seconds:  # a call this long needs no warm-up: it is the sample
        return [estimate]
    calls = max(1, math.ceil(_SHORTEST_SAMPLE / estimate))
    if torch.cuda.is_initialized():
        calls = max(calls, min(_EVENT_CALLS, math.ceil(seconds / estimate)))
    return [_clocked(call, calls, synchronize) for _ in _turns(seconds, estimate * calls)]


def _host(call: Call, seconds: float) -> list[float]:
    synchronize: Call = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    call()
    synchronize()
    batch = max(1, min(_HOST_BATCH, int(seconds / max(_clocked(call, 1), 1e-9))))
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or time.perf_counter() < stop:
        synchronize()
        samples.append(_clocked(call, batch))
    synchronize()
    return samples


def _events(call: Call, seconds: float, flush: bool, kept: Kept) -> list[float]:
    device_seconds, host_seconds = _cuda_estimates(call, kept)
    scratch = _l2_sized() if flush else None
    fewest = min(_EVENT_CALLS, math.ceil(seconds / (2 * device_seconds)))
    calls = max(fewest, math.ceil(_SHORTEST_SAMPLE / device_seconds))
    # While one of several long calls runs, the host enqueues the next: the device waits for the first one alone.
    awaited = calls if flush or device_seconds < 2 * host_seconds else 1
    spin = int(1.5 * host_seconds * awaited * _SPIN_HZ)
    samples: list[float] = []
    for _ in _turns(seconds, device_seconds * calls):
        pairs = [_event_pair() for _ in range(calls if flush else 1)]
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


def _graph(call: Call, seconds: float, kept: Kept) -> list[float]:
    if "graph" not in kept:
        device_seconds, _ = _cuda_estimates(call, kept)
        turns = call.count if isinstance(call, Rotation) else 1
        calls = max(1, min(_GRAPH_CALLS, math.ceil(_GRAPH_SECONDS / device_seconds)))
        kept["calls"] = -(-calls // turns) * turns  # whole rounds
        kept["graph"] = _captured(call, kept["calls"])
    graph, calls = kept["graph"], kept["calls"]
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    estimate = max(time.perf_counter() - start, 1e-6)
    replays = max(1, math.ceil(_SHORTEST_SAMPLE / estimate))
    # The device is busy until all replays of a sample are enqueued: none waits for the host inside the pair of events.
    spin = int(2 * (enqueued - start) * replays * _SPIN_HZ)
    samples = []
    for _ in _turns(seconds, estimate * replays):
        begin, end = _event_pair()
        torch.cuda._sleep(spin)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / (replays * calls))
    return samples


def _captured(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """Must run in a stream that is not the default one: so does a worker, from its start."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    return graph


def _cuda_estimates(call: Call, kept: Kept) -> tuple[float, float]:
    """Seconds per call of the device and of the host, roughly; a few calls that warm up when they are known."""
    if "estimates" in kept:
        device_seconds, host_seconds = kept["estimates"]
        for _ in range(max(1, min(5, math.ceil(_SHORTEST_SAMPLE / device_seconds)))):
            call()
        return device_seconds, host_seconds
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    kept["estimates"] = max(1e-7, (time.perf_counter() - start) / 5), (enqueued - start) / 5
    return kept["estimates"]  # type: ignore[no-any-return]


def _warm_up(call: Call, synchronize: Call, seconds: float) -> float:
    """Runs for a while, once at least; returns the seconds of the fastest call. Idle threads of others go to sleep."""
    fastest = math.inf
    stop = time.perf_counter() + seconds
    while True:
        fastest = min(fastest, _clocked(call, 1, synchronize))
        if time.perf_counter() >= stop:
            return max(fastest, 1e-9)


def _clocked(call: Call, calls: int, synchronize: Call = lambda: None) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) / calls


def _turns(seconds: float, sample_seconds: float) -> Iterator[None]:
    """As many turns as fit into `seconds` by an estimate; fewer where the machine is busy and the estimate was rosy."""
    stop = time.perf_counter() + _MAX_OVERTIME * seconds
    for number in range(max(1, math.ceil(seconds / sample_seconds))):
        if number and time.perf_counter() > stop:
            return
        yield


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _l2_sized() -> torch.Tensor:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    size = 2 * int(getattr(properties, "L2_cache_size", 64 * 2**20))
    return torch.empty(size, dtype=torch.uint8, device="cuda")
