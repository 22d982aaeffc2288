"""Thousands of generated problems on a GPU, each held to float64, with all fresh memory poisoned.

    PYTHONPATH=src python tests/hostile/gpu_nightly.py                            # as `make gpu-nightly`
    PYTHONPATH=src python tests/hostile/gpu_nightly.py --device cpu --kinds 6     # the same on a CPU, without a record

form_generator.py draws the problems, and runs one of them again. Kernels take seconds to build and milliseconds to run,
so the first variant of every kind comes first, in as many processes as there are cores, and the others find their
kernels in the cache. The record, tests/hostile/gpu_nightly.json, says what ran last, on what, and what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import form_generator
import torch

import tilewise
from tilewise import fresh

RECORD = Path(__file__).resolve().parent / "gpu_nightly.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31), help="default: drawn anew")
    parser.add_argument("--device", choices=form_generator.BACKENDS, default="cuda")
    parser.add_argument("--kinds", type=int, default=200)
    parser.add_argument("--variants", type=int, default=25)
    parser.add_argument("--minutes", type=float, default=10.0, help="no problem is begun after so long; 10 by default")
    parser.add_argument("--processes", type=int, help="default: one per core; 0: this one")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    assert fresh.POISONED, "tilewise was imported before this module"
    print(f"seed {options.seed}", flush=True)
    begun = time.monotonic()
    processes = os.cpu_count() or 1 if options.processes is None else options.processes
    each = (options.seed, options.device, options.kinds)
    stop = begun + 60.0 * options.minutes
    outcomes = form_generator.run_all(form_generator.drawn(*each, range(1)), processes, stop)
    form_generator.report(outcomes)
    built_after = round(time.monotonic() - begun)
    print(f"the kernels of {options.kinds} kinds are there after {built_after} s", flush=True)
    outcomes += form_generator.run_all(form_generator.drawn(*each, range(1, options.variants)), processes, stop)
    counts, failures = form_generator.report(outcomes), form_generator.failed(outcomes)
    record = options.record or (RECORD if options.device == "cuda" else None)
    if record is not None:
        record.write_text(json.dumps(_record(options, counts, failures, built_after, begun), indent=2) + "\n")
    return int(bool(failures) or not outcomes)


def _record(
    options: argparse.Namespace,
    counts: dict[str, int],
    failures: list[form_generator.Outcome],
    built_after: int,
    begun: float,
) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {"tilewise": tilewise.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seed": options.seed,
        "kinds": options.kinds,
        "problems": sum(counts.values()),
        "outcomes": counts,
        "failed": [[*problem[:3], what] for problem, what, _ in failures],
        "seconds": {"first of each kind": built_after, "all": round(time.monotonic() - begun)},
    }


if __name__ == "__main__":
    sys.exit(main())
