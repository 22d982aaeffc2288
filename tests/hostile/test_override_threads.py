"""Threads that enter, leave, watch and call at the same time: none dies, none is answered wrongly, nothing raises."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise.integrations.sdpa import report, sdpa

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
# How long each kernel is soaked; the nightly run takes 600.
SECONDS = float(os.environ.get("TILEWISE_SOAK_SECONDS", "6"))
PATIENCE = 600.0  # beyond that, for a loaded machine: a watchdog, not a measurement


def run_python(arguments: list[str], seconds: float = 0.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, because what goes wrong here ends a process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCES), str(HERE.parent))), **variables}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=seconds + PATIENCE,
    )


def test_threads_enter_leave_watch_and_call(override_kernel):
    setting = "off" if override_kernel == "python" else "compiled"
    done = run_python([str(HERE / "soak.py"), str(SECONDS)], SECONDS, TILEWISE_NATIVE=setting)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failures"] == []
    assert "Warning" not in done.stderr, done.stderr[-4000:]
    assert told["compiled"] is (override_kernel == "compiled")
    assert min(told["turns"].values()) > 0, told["turns"]
    assert len(told["turns"]) == 7, told["turns"]


@pytest.fixture
def _many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0), work(1), ... at the same time; raises what the first of them raised."""
    start, raised = threading.Barrier(count), []

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.mark.usefixtures("override_kernel", "_many_switches")
def test_the_report_is_kept_and_read_by_many_threads_over_many_problems():
    """More problems than the report has lines, so that lines come and go while others look."""
    sdpa.clear()

    def decide(number: int) -> None:
        for turn in range(4000):
            report.record(f"problem {turn % 400} of {number}", "left", "of no importance")
            if turn % 100 == 0:
                assert len(sdpa.report()) <= report._RECORDS_KEPT

    in_threads(6, decide)
    assert len(report.lines()) == report._RECORDS_KEPT
    q = torch.randn(1, 1, 300, 8)
    rule = sdpa()

    def call(number: int) -> None:
        for length in range(1 + number, 300, 3):
            with rule:
                out = F.scaled_dot_product_attention(q[:, :, :length], q, q)
            assert out.shape[2] == length
            sdpa.report()

    in_threads(6, call)
    assert sum(entry.calls for entry in sdpa.report()) > 0
    sdpa.clear()


@pytest.mark.usefixtures("_many_switches")
def test_the_compilers_cache_tag_is_what_it_was_when_blocks_of_threads_overlap():
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = "the user's own"
    try:

        def enter(number: int) -> None:
            for _ in range(200):
                with sdpa(backend=("tiled", "reference")[number % 2]) as rule:
                    assert rule.tag in torch.compiler.config.cache_key_tag.split(" ")

        in_threads(6, enter)
        assert torch.compiler.config.cache_key_tag == "the user's own"
    finally:
        torch.compiler.config.cache_key_tag = tag


@pytest.mark.usefixtures("override_kernel", "_many_switches")
def test_a_trace_knows_whose_call_was_taken():
    """Each thread has a site of its own; only those in a block are answered by tilewise."""
    q = [torch.randn(1, 1, 8 + number, 8) for number in range(6)]

    def call(number: int) -> None:
        context = sdpa(backend="tiled") if number % 2 else contextlib.nullcontext()
        with context:
            for _ in range(50):
                F.scaled_dot_product_attention(q[number], q[number], q[number])

    with tilewise.trace() as seen:
        in_threads(6, call)
    assert sorted(site.calls for site in seen.sites) == [50] * 6
    for site in seen.sites:
        assert (site.backend == "tilewise") is (site.problem.seq_q % 2 == 1), site


def test_graphs_traced_after_a_block_are_what_they_were_before(override_kernel):
    setting = "off" if override_kernel == "python" else "compiled"
    done = run_python([str(HERE / "graphs.py")], TILEWISE_NATIVE=setting)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["before"] == told["after"]
    assert len(told["before"]) >= 4
