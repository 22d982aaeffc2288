"""What does not fit into every run of the tests: twenty thousand generated problems, the soak of the override, and
kernels built for architectures other than the one that `make kernel-gates` builds them for.

    PYTHONPATH=src python tests/hostile/nightly.py             # as `make nightly`; writes tests/hostile/nightly.json

One half of the problems are ways of calling (generator.py). The other half are terms, and sequences that are batched,
packed and cached (form_generator.py).

    PYTHONPATH=src python tests/hostile/nightly.py --parts generated       # the problems alone

The record says of each part when it ran last, on which versions, and what came of it; it is written when something
failed too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import form_generator
import generator
import torch

import tilewise

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = HERE / "nightly.json"
SOAK = HERE / "test_override_threads.py"


def run_tests(*arguments: str, **variables: str) -> dict[str, int]:
    """How many tests there were and how many failed; a process that died is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        finished = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
        if not report.is_file():
            return {"tests": 0, "failed": 1}
        suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"tests": int(suite.get("tests", 0)), "failed": failed or int(finished.returncode != 0)}


def run_generated(options: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    calls, forms = options.problems // 2, options.problems - options.problems // 2
    outcomes, failures = generator.run_in_processes(options.seed, range(calls))
    print(dict(outcomes), flush=True)
    of_forms = form_generator.run_all(form_generator.drawn(options.seed, "cpu", forms, range(1)), os.cpu_count())
    failed_forms = form_generator.failed(of_forms)
    return {
        "seed": options.seed,
        "problems": options.problems,
        "calls": {"outcomes": dict(sorted(outcomes.items())), "failed": [failure.index for failure in failures]},
        "forms": {"outcomes": form_generator.report(of_forms), "failed": [one.problem[:2] for one in failed_forms]},
        "failed": len(failures) + len(failed_forms),
        "seconds": round(time.monotonic() - begun),
    }


def run_soak(options: argparse.Namespace) -> dict[str, Any]:
    return {"seconds": options.soak_seconds, **run_tests(str(SOAK), TILEWISE_SOAK_SECONDS=str(options.soak_seconds))}


def run_kernels(options: argparse.Namespace) -> dict[str, Any]:
    return run_tests("tests", "-m", "nightly")


PARTS = {"generated": run_generated, "soak": run_soak, "kernels": run_kernels}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="default: drawn anew")
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--soak-seconds", type=int, default=600)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    versions = {
        "tilewise": tilewise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    record = json.loads(options.record.read_text()) if options.record.is_file() else {}
    for part in options.parts:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        record[part] = {"date": date, "versions": versions, **PARTS[part](options)}
        options.record.write_text(json.dumps({name: record[name] for name in PARTS if name in record}, indent=2) + "\n")
    return int(any(record[part]["failed"] for part in options.parts))


if __name__ == "__main__":
    sys.exit(main())
