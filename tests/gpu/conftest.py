"""A full and green run of this folder on a GPU is recorded in benchmarks/validation.json, with the sources' hash."""

from __future__ import annotations

import collections
import datetime
import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from tilewise.jit import nvrtc_version
from tilewise.jit.validation import source_hash

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent.parent / "benchmarks" / "validation.json"
_outcomes: collections.Counter[str] = collections.Counter()
_passed_in: collections.Counter[str] = collections.Counter()
_hash_at_start = source_hash()


def pytest_deselected(items: list[pytest.Item]) -> None:
    _outcomes["deselected"] += len(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.outcome] += 1
        if report.outcome == "passed":
            _passed_in[Path(report.location[0]).name] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reason = _why_not_recorded(session, exitstatus)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not reason:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(_record(), indent=2) + "\n")
    if reporter is not None:
        reporter.write_line(f"\n{RECORD.name}: {'not written, ' + reason if reason else 'written'}")


def _why_not_recorded(session: pytest.Session, exitstatus: int) -> str:
    """Empty if this run vouches for the sources: all of this folder, on a GPU, green, with the sources unchanged."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if exitstatus != 0 or _outcomes["failed"] or not _outcomes["passed"]:
        return "the run is not green"
    if _outcomes["deselected"] or [Path(argument).resolve() for argument in session.config.args] != [HERE]:
        return "this was not all of tests/gpu"
    if source_hash() != _hash_at_start:
        return "the sources changed during the run"
    return ""


def _record() -> dict[str, object]:
    return {
        "source_hash": _hash_at_start,
        "passed": _outcomes["passed"],
        "skipped": _outcomes["skipped"],
        "passed_in": dict(sorted(_passed_in.items())),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": nvrtc_version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
