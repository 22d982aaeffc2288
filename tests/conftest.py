"""Settings every test shares: no AMX (it dies on some virtual machines), one thread, fixed seeds, a calm Hypothesis."""

from __future__ import annotations

import collections
import os
import signal
import sys
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The tensors are small: threads that wait for one another would only take the cores from the tests beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TILEWISE_TABLES"] = "none"  # what ships is tested, not what somebody tuned on this machine
os.environ["TILEWISE_POISON"] = "1"  # what a kernel leaves unwritten is nan
os.environ["TILEWISE_NATIVE"] = "off"  # no test starts a compiler behind its back; those of the compiled one say so

# A shell has its background jobs ignore interrupts, and so would every command do that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("tilewise", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tilewise")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


_SLOW_MACHINE_SECONDS = 600.0
_MEANT_SECONDS = 5.0  # a test that lets a worker hang waits for it no longer than this


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much else to do is slow, not broken: workers may take minutes where users give them seconds."""
    from tilewise.lab.measure.pool import Process

    receive = Process._receive

    def patiently(process: Process, seconds: float) -> Any:
        return receive(process, seconds if seconds <= _MEANT_SECONDS else max(seconds, _SLOW_MACHINE_SECONDS))

    monkeypatch.setattr(Process, "_receive", patiently)


@pytest.fixture(scope="module", autouse=True)
def _own_report() -> None:
    """The report of tilewise.sdpa drops its oldest lines when it is full. Those that other files left would fill it."""
    from tilewise.integrations.sdpa import report

    report._records.clear()


@pytest.fixture
def compiled_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel of tilewise.sdpa is in front, whatever ran in this process before.

    Users' processes replace the kernel in Python only while they have one thread, because others may be dispatching.
    A thread that an earlier test left behind does not call attention.
    """
    from tilewise.hook import dispatcher
    from tilewise.native import library as extension

    if reason := extension._why_not():
        pytest.skip(reason)
    monkeypatch.setenv(extension.SETTING, "on")
    extension.build()
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "_may_replace", lambda: dispatcher._all_composite)
        dispatcher._install()
    assert dispatcher.compiled is not None, "the compiled kernel could not take the place of the one in Python"


@pytest.fixture(params=["python", "compiled"])
def override_kernel(request: pytest.FixtureRequest) -> str:
    """Both kernels of tilewise.sdpa: all that holds for one holds for the other."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_override")
    return str(request.param)


# Of all tests on the emulator, one in so many runs with the tests; of the parameters of each, one in so many runs with
# the gates; the others run at night. Odd, so that both of a pair of parameters come up.
EMULATED_EVERY, GATED_EVERY = 41, 7


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped, with the reason, where there is no GPU; few tests on the emulator run every time."""
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
        if item.get_closest_marker("emulated"):
            test = item.nodeid.split("[")[0]
            if seen[""] % EMULATED_EVERY:
                item.add_marker("nightly" if seen[test] % GATED_EVERY else "kernel_gate")
            seen.update(("", test))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests recorded as properties, of which the tests of the kernels' budgets are the only ones today."""
    reports = terminalreporter.getreports("passed")
    found: dict[str, set[str]] = {}
    for name, value in (row for report in reports for row in report.user_properties):
        found.setdefault(name, set()).add(str(value))
    for name, values in found.items():
        terminalreporter.section(f"{name} ({len(values)})")
        terminalreporter.write_line("\n".join(sorted(values)))


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine does beside the tests decides no test: comparisons are made as if nothing else ran."""
    if noise := sys.modules.get("tilewise.lab.measure.noise"):
        monkeypatch.setattr(noise, "load", lambda: 0.0)
