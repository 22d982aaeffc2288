"""The maps that threads share in jit/ and backends: right for every thread, and bounded, however they are interleaved.

A switch interval of a microsecond lets the interpreter change threads between almost any two steps. The driver is one
that only keeps a record.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_jit_launch import BLOCK, GRID, Encoder, Numbers, RecordingDriver, kernel

from support import make_problem
from tilewise import Causal
from tilewise.engine import run
from tilewise.engine.program import Program
from tilewise.jit import Unit, load, memo, mirror, params_struct, tensormap, tiled_map, tuned
from tilewise.jit import launch as launching
from tilewise.memo import Memo
from tilewise.plain import tiled
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

THREADS = 8
ROUNDS = 400
SHAPE: dict[str, Any] = {"dims": (128, 4096), "strides": (256,), "box": (64, 128), "swizzle": 128}


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recorded = RecordingDriver(current=100)
    monkeypatch.setattr(launching, "_driver", recorded)
    for name in ("_loaded", "_functions", "_unit_locks"):
        monkeypatch.setattr(launching, name, {})
    for kind in ("CUtensorMapDataType", "CUtensorMapSwizzle", "CUtensorMapL2promotion"):
        monkeypatch.setattr(recorded, kind, Numbers(), raising=False)
    return recorded


def together(work: Callable[[random.Random], None]) -> None:
    """Let all threads begin at once, each with numbers of its own; what any of them raises is raised here."""
    ready = threading.Barrier(THREADS)

    def one(seed: int) -> None:
        ready.wait()
        work(random.Random(seed))

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(one, seed) for seed in range(THREADS)]:
            done.result()


class Watched(dict[Any, Any]):
    """A map that knows how large it has ever been, and gives way to other threads before it writes."""

    largest = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        os.sched_yield()
        super().__setitem__(key, value)
        self.largest = max(self.largest, len(self))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        os.sched_yield()
        found = super().setdefault(key, default)
        self.largest = max(self.largest, len(self))
        return found


class WatchedMaps(Watched, tensormap._Encoded):
    """The maps of a shape, watched."""


def test_every_thread_gets_the_map_of_its_own_address(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "_MAX_ADDRESSES", 4)
    encode = Encoder()
    monkeypatch.setattr(tensormap, "_encode_tiled", lambda: encode)
    tiled_map.cache_clear()
    shape = tiled_map(torch.bfloat16, **SHAPE)
    shape._known = known = WatchedMaps(shape._encode)
    shape.at = known.__getitem__

    def work(numbers: random.Random) -> None:
        for _ in range(ROUNDS):
            address = 16 * numbers.randrange(1, 12)
            assert shape.at(address).opaque[0] == address

    together(work)
    tiled_map.cache_clear()
    assert 0 < known.largest <= 4


def test_every_launch_has_its_own_stream_and_arguments(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_MAX_STREAMS", 3)
    monkeypatch.setattr(mirror, "MAX_THREADS", 3)
    seen: list[tuple[int, int]] = []

    def record(config: Any, function: int, pointer: int, extra: int) -> tuple[Any]:
        params = ctypes.c_void_p.from_address(pointer).value
        assert params is not None
        seen.append((config.hStream, ctypes.c_int.from_address(params).value))
        return (0,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", record)
    repeated = launching.Launch(load(kernel(), 0), GRID, BLOCK, 0)
    repeated._configs = configs = Watched()
    arguments = mirror.ArgumentsPerThread(params_struct("Params", value=ctypes.c_int, fixed=ctypes.c_int), {"fixed": 7})
    arguments._of_thread = of_thread = Watched()

    def work(numbers: random.Random) -> None:
        for _ in range(ROUNDS):
            stream = numbers.randrange(1, 10)
            mine = arguments.mine()
            mine.params.value = stream
            os.sched_yield()
            assert mine.params.fixed == 7
            repeated(stream, mine)

    together(work)
    assert len(seen) == THREADS * ROUNDS
    assert all(stream == value for stream, value in seen)
    assert 0 < configs.largest <= 3
    assert 0 < of_thread.largest <= 3


def test_arguments_of_threads_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads come and go in a server, each with a number of its own; its arguments must not stay for ever."""
    arguments = mirror.ArgumentsPerThread(params_struct("Params", value=ctypes.c_int), {})
    for number in range(10_000):
        monkeypatch.setattr(threading, "get_ident", lambda number=number: number)
        assert arguments.mine() is arguments.mine()
    assert len(arguments._of_thread) <= mirror.MAX_THREADS


def test_a_kernel_is_built_and_loaded_once(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(unit: Unit) -> Any:
        built.append(unit.name)
        return kernel(unit.name)

    monkeypatch.setattr(launching, "build", build)
    units = [Unit(f"kernel_{number}", "", "sm_90a") for number in range(20)]
    handed: dict[str, set[int]] = {unit.name: set() for unit in units}

    def work(numbers: random.Random) -> None:
        for unit in numbers.sample(units, len(units)) * 5:
            handed[unit.name].add(id(launching.function_for(unit, 0)))

    together(work)
    assert sorted(built) == sorted(unit.name for unit in units)
    assert all(len(functions) == 1 for functions in handed.values())


def test_what_is_remembered_is_right_for_all_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Memo[Any] = Memo(max_entries=5)
    monkeypatch.setattr(run, "_bound", known)
    sizes: list[int] = []

    def work(numbers: random.Random) -> None:
        for _ in range(ROUNDS):
            key = numbers.randrange(12)
            assert run.remembered(key, lambda key=key: [key]) == [key]
            sizes.append(len(known))

    together(work)
    assert 0 < max(sizes) <= 5


def test_a_backward_keeps_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((1, 1, 8, 8), torch.bfloat16, needs_grad=True)
    made: list[Any] = []

    def loaded(programs: Any, problem: Any, wants: Any, given: Any, operands_alone: bool) -> Any:
        made.append(given["out"].stride())
        return lambda *tensors: tensors[5].stride()

    monkeypatch.setattr(run, "_loaded_backward", loaded)
    bound = run.bind_backward(lambda device, wants: Program(()), problem)
    q = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)
    lse = torch.zeros(1, 1, 8)

    def work(numbers: random.Random) -> None:
        for _ in range(100):
            out = torch.zeros(1, 1, 8, 8 * numbers.randrange(1, 200), dtype=torch.bfloat16)[..., :8]
            assert bound(q, None, q, q, q, out, lse) == out.stride()

    together(work)
    launches = next(
        cell.cell_contents
        for cell in bound.__closure__ or ()
        if isinstance(cell.cell_contents, dict) and cell.cell_contents  # type: ignore[attr-defined]
    )
    assert 0 < len(launches) <= run.MAX_LAUNCHES
    assert set(made) >= {key[1] for key in launches}


def test_counters_of_a_device_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lose the race would be freed while a kernel still counts with them."""
    made: list[int] = []

    class Counters(run._WorkCounters):
        def __init__(self, device: int, turns: int, captured: int) -> None:
            made.append(device)
            os.sched_yield()
            self._base, self._next, self._lock = 10**9 * (device + 1), 0, threading.Lock()
            self._reused_end = turns

    monkeypatch.setattr(run, "_WorkCounters", Counters)
    monkeypatch.setattr(run, "_counters", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    taken: list[int] = []

    def work(numbers: random.Random) -> None:
        taken.extend([run.work_counter(numbers.randrange(4), numbers.randrange(20)) for _ in range(ROUNDS)])

    together(work)
    assert sorted(made) == [0, 1, 2, 3]
    assert len(taken) == len(set(taken)), "two launches that may run at the same time share a counter"


def test_a_captured_launch_keeps_its_counter_and_there_is_an_end_of_them() -> None:
    counters = object.__new__(run._WorkCounters)
    counters._base, counters._next, counters._lock = 4096, 0, threading.Lock()
    counters._reused_end, counters._captured, counters._end = 2000, 2000, 2004
    captured = [counters.take(True) for _ in range(6)]
    assert len(set(captured[:4])) == 4
    assert captured[4:] == [0, 0], "without a counter a kernel takes its tiles in a fixed order"
    others = {counters.take(False) for _ in range(1000)}
    assert len(others) == 1000
    assert not others & set(captured)


def test_counters_of_a_launch_lie_side_by_side_and_begin_anew_behind_the_last() -> None:
    counters = object.__new__(run._WorkCounters)
    counters._base, counters._next, counters._lock = 4096, 0, threading.Lock()
    counters._reused_end, counters._captured, counters._end = 100, 100, 150
    assert [counters.take(False, 40) for _ in range(3)] == [4096, 4096 + 4 * 40, 4096]
    assert [counters.take(True, 40) for _ in range(2)] == [4096 + 4 * 100, 0]
    assert counters.take(False, 101) == 0, "more than there are"


def test_one_line_however_many_threads_meet_a_bad_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TILEWISE_TABLES", str(tmp_path))
    tuned.forget()
    problem, target = make_problem((1, 2, 300, 16), mask=Causal()), Target.of("cpu")
    key, sizes = tiled.tuning_key(problem)
    entry = {"key": key, "sizes": sizes, "config": {"block_q": -128, "block_kv": 64},
             "kernels": tuned.kernels_digest("tiled"), "device": "cpu", "date": "2026-01-02"}  # fmt: skip
    for table in ({"format": 1, "device": "cpu", "entries": [entry, {}]}, {"format": 9, "device": "cpu"}):
        (tmp_path / "tiled.cpu.json").write_text(json.dumps(table))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tilewise"):

            def work(numbers: random.Random) -> None:
                for _ in range(20):
                    assert tiled.configs(problem, target) == tiled.shipped(problem, target)

            together(work)
        assert len(caplog.records) == len(table.get("entries", [0]))  # type: ignore[arg-type]
        tuned.forget()


def test_a_forked_child_finds_no_lock_held() -> None:
    """A thread of the parent may be writing to a map at the moment of the fork."""
    held = memo._writing
    with held:
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: memo.keep({}, 1, 1, 1))
            thread.start()
            thread.join(600)
            os._exit(1 if thread.is_alive() else 0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
