"""A green run on a GPU is recorded in benchmarks/validation.json, file by file, with the hash of the sources it ran on.

Parts are vouched for apart (gpu_parts.py says by which files). A file is recorded when it ran whole,
green and without a skip; files that ran on the same sources stand beside each other, so the folder may be run in one go
or file by file, also at the same time.
"""

from __future__ import annotations

import collections
import datetime
import fcntl
import json
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from gpu_parts import PARTS, part_hash
from tilewise.jit import nvrtc_version

if TYPE_CHECKING:
    from tilewise.engine.backend import Fused

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent.parent / "benchmarks" / "validation.json"
pytest.register_assert_rewrite("forward_matrix", "backward_matrix", "comparison")
_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
_hash_at_start = {name: part_hash(name) for name in PARTS}


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Fused:
    """Whose kernels the cases of a matrix are about: what the file that takes them calls BACKEND."""
    return request.module.BACKEND  # type: ignore[no-any-return]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        _outcomes[item.path.name]["deselected"] += 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        # Not the file where the case is written: several may take the same.
        _outcomes[Path(report.nodeid.partition("::")[0]).name][report.outcome] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reasons = {
        name: _why_not_recorded(name, part, session, exitstatus)
        for part, (files, *_) in PARTS.items()
        for name in files
    }
    green = {name: _outcomes[name]["passed"] for name, reason in reasons.items() if not reason}
    if green:
        _add_to_record(green)
    for name, reason in reasons.items():
        if reporter is not None and _outcomes[name]:
            reporter.write_line(f"\n{RECORD.name}: {name} {'not recorded, ' + reason if reason else 'recorded'}")


def _why_not_recorded(name: str, part: str, session: pytest.Session, exitstatus: int) -> str:
    """Empty if this run vouches for the file: it ran whole, on a GPU, green, with the sources unchanged."""
    arguments = {Path(argument).resolve() for argument in session.config.args}
    outcomes = _outcomes[name]
    if not torch.cuda.is_available():
        return "there is no GPU"
    if session.shouldstop or session.shouldfail or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return "the run was stopped"
    if outcomes["deselected"] or not arguments & {HERE, HERE / name}:
        return "it was not run whole"
    if outcomes["failed"] or not outcomes["passed"]:
        return "it is not green"
    if outcomes["skipped"]:
        return f"{outcomes['skipped']} of its tests were skipped"
    if part_hash(part) != _hash_at_start[part]:
        return "the sources changed during the run"
    return ""


def _add_to_record(green: dict[str, int]) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        record = json.loads(file.read() or "{}")
        for part, (files, *_) in PARTS.items():
            passed = {name: count for name, count in green.items() if name in files}
            before = record.get(part, {})
            if passed:
                same = before.get("source_hash") == _hash_at_start[part]
                facts = {"source_hash": _hash_at_start[part]} | _machine()
                record[part] = facts | {"passed_in": (before["passed_in"] if same else {}) | passed}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(record, indent=2) + "\n")


def _machine() -> dict[str, object]:
    return {
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
