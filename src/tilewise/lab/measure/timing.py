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

A backward (`Backward`) frees the graph that its forward recorded, as in training: a graph that is retained has another
cost on the host. The forwards of a batch therefore run before the clock starts, `wall` waits for them, and the clock
holds as many backwards and nothing else. In a graph replay no host is in the time: what is captured there is a backward
that retains its graph, so that the tensors it reads keep their memory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
_LONG_CALL = 0.01  # seconds: one call estimates itself, and needs no other to warm up
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


class Backward:
    """The gradients of `inputs`, each time of a forward of its own."""

    def __init__(self, forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> None:
        self._forward, self._inputs, self._dout = forward, list(inputs), dout

    def fresh(self) -> Call:
        """A backward that can be called once; its forward runs now."""
        out = self._forward()
        return lambda: torch.autograd.grad(out, self._inputs, self._dout)

    def retained(self) -> Call:
        """A backward that can be called again and again; its forward runs now."""
        out = self._forward()
        return lambda: torch.autograd.grad(out, self._inputs, self._dout, retain_graph=True)


def _ready(call: Call | Backward, count: int) -> list[Call]:
    """So many calls that have nothing left to do but what is timed."""
    return [call.fresh() for _ in range(count)] if isinstance(call, Backward) else [call] * count


def _use_up(calls: list[Call]) -> None:
    """Call each once. What a call holds is freed after it, as a program frees what its backward has read."""
    while calls:
        calls.pop()()


def turns_for(size: int) -> int:
    """How many sets of tensors of so many bytes a rotation goes through."""
    return max(1, min(_MAX_TURNS, -(-ROTATED_BYTES // max(1, size))))


def measure(
    call: Call | Backward, method: str, seconds: float, *, flush: bool = False, kept: Kept | None = None
) -> list[float]:
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


def _wall(call: Call | Backward, seconds: float) -> list[float]:
    synchronize: Call = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    estimate = _warm_up(call, synchronize, min(_WARM_UP_SECONDS, seconds / 2))
    if estimate >= seconds:  # a call this long needs no warm-up: it is the sample
        return [estimate]
    calls = max(1, math.ceil(_SHORTEST_SAMPLE / estimate))
    if torch.cuda.is_initialized():
        calls = max(calls, min(_EVENT_CALLS, math.ceil(seconds / estimate)))
    return [_clocked(call, calls, synchronize) for _ in _turns(seconds, estimate * calls)]


def _host(call: Call | Backward, seconds: float) -> list[float]:
    synchronize: Call = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    _clocked(call, 1, synchronize)
    batch = max(1, min(_HOST_BATCH, int(seconds / max(_clocked(call, 1), 1e-9))))
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or time.perf_counter() < stop:
        synchronize()
        samples.append(_clocked(call, batch))
    synchronize()
    return samples


def _events(call: Call | Backward, seconds: float, flush: bool, kept: Kept) -> list[float]:
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
        batch = _ready(call, calls)
        torch.cuda._sleep(spin)
        if scratch is None:
            start, stop = pairs[0]
            start.record()
            _use_up(batch)
            stop.record()
        else:
            for start, stop in pairs:
                scratch.zero_()
                start.record()
                batch.pop()()
                stop.record()
        torch.cuda.synchronize()
        each = 1 if flush else calls
        samples += [start.elapsed_time(stop) * 1e-3 / each for start, stop in pairs]
    return samples


def _graph(call: Call | Backward, seconds: float, kept: Kept) -> list[float]:
    if "graph" not in kept:
        call = kept["captured"] = call.retained() if isinstance(call, Backward) else call
        device_seconds, _ = _cuda_estimates(call, {})
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


def _cuda_estimates(call: Call | Backward, kept: Kept) -> tuple[float, float]:
    """Seconds per call of the device and of the host, roughly; a few calls that warm up when they are known."""
    if "estimates" in kept:
        device_seconds, host_seconds = kept["estimates"]
        if device_seconds < _LONG_CALL:
            _use_up(_ready(call, min(5, math.ceil(_SHORTEST_SAMPLE / device_seconds))))
        return device_seconds, host_seconds
    _use_up(_ready(call, 1))  # whatever the first call alone has to do
    calls = 1
    while True:
        batch = _ready(call, calls)
        torch.cuda.synchronize()
        start = time.perf_counter()
        _use_up(batch)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        device_seconds, host_seconds = (time.perf_counter() - start) / calls, (enqueued - start) / calls
        if calls > 1 or device_seconds >= _LONG_CALL:
            break
        calls = 5
    kept["estimates"] = max(1e-7, device_seconds), host_seconds
    return kept["estimates"]  # type: ignore[no-any-return]


def _warm_up(call: Call | Backward, synchronize: Call, seconds: float) -> float:
    """Runs for a while, once at least; returns the seconds of the fastest call. Idle threads of others go to sleep."""
    fastest = math.inf
    stop = time.perf_counter() + seconds
    while True:
        fastest = min(fastest, _clocked(call, 1, synchronize))
        if time.perf_counter() >= stop:
            return max(fastest, 1e-9)


def _clocked(call: Call | Backward, calls: int, synchronize: Call = lambda: None) -> float:
    batch = _ready(call, calls)
    if isinstance(call, Backward):
        synchronize()
    start = time.perf_counter()
    _use_up(batch)
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
