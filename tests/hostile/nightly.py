"""What does not fit into every run of the tests: twenty thousand generated problems, the soak of the override, and
kernels built for architectures other than the one that `make kernel-gates` builds them for.

    PYTHONPATH=src python tests/hostile/nightly.py             # as `make nightly`; writes tests/hostile/nightly.json

One half of the problems are ways of calling (generator.py). The other half are terms, and sequences that are batched,
packed and cached (form_generator.py).

The record says what ran last, on which versions, and what came of it; it is written when something failed too.
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="default: drawn anew")
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--soak-seconds", type=int, default=600)
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    begun = time.monotonic()
    calls, forms = options.problems // 2, options.problems - options.problems // 2
    outcomes, failures = generator.run_in_processes(options.seed, range(calls))
    print(dict(outcomes), flush=True)
    of_forms = form_generator.run_all(form_generator.drawn(options.seed, "cpu", forms, range(1)), os.cpu_count())
    generated = {
        "seed": options.seed,
        "problems": options.problems,
        "calls": {"outcomes": dict(sorted(outcomes.items())), "failed": [failure.index for failure in failures]},
        "forms": {
            "outcomes": form_generator.report(of_forms),
            "failed": [one.problem[:2] for one in form_generator.failed(of_forms)],
        },
        "seconds": round(time.monotonic() - begun),
    }
    soak = run_tests(str(SOAK), TILEWISE_SOAK_SECONDS=str(options.soak_seconds))
    kernels = run_tests("tests", "-m", "nightly")
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": {
            "tilewise": tilewise.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "generated": generated,
        "soak": {"seconds": options.soak_seconds} | soak,
        "kernels": kernels,
    }
    options.record.write_text(json.dumps(record, indent=2) + "\n")
    wrong = failures or form_generator.failed(of_forms)
    return 1 if wrong or soak["failed"] or kernels["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
