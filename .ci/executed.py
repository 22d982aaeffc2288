"""Fails if a test file, or a test in it, was run by none of the jobs whose JUnit reports lie in a folder.

python .ci/executed.py REPORTS [TESTS]

A skip says that one environment lacks something; a skip in every environment says that nobody tests it. tests/gpu is
left out: `make gpu-check` runs it, on a machine with a GPU. Skips whose reason holds the text of CI_LACKS, which
`.ci/run` sets where something could not be installed, are printed and do not count.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def outcomes(reports: Path) -> tuple[set[str], dict[str, str]]:
    """The tests that ran in some job, and those that were skipped in one, with the reason."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for report in sorted(reports.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("name", "").split("[")[0]
            test = f"{case.get('classname')}.{name}".strip(".")
            skip = case.find("skipped")
            if skip is None:
                ran.add(test)
            else:
                skipped[test] = " ".join(f"{skip.get('message')}: {skip.text}".split())
    return ran, skipped


def complaints(reports: Path, tests: Path) -> list[str]:
    if not any(reports.glob("*.xml")):
        return [f"{reports}: no report of any job"]
    ran, skipped = outcomes(reports)
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        if "gpu" in path.relative_to(tests).parts:
            continue
        module = ".".join(path.relative_to(tests.parent).with_suffix("").parts)
        if not any(test.startswith(f"{module}.") for test in ran):
            found.append(f"{path}: no test of it ran in any job. {skipped.get(module, '')}".rstrip())
    modules = {test.rsplit(".", 1)[0] for test in ran}
    found += [
        f"{test}: skipped in every job that has it: {reason}"
        for test, reason in sorted(skipped.items())
        if test not in ran and test.rsplit(".", 1)[0] in modules
    ]
    return found


def counted(found: list[str], lacking: str) -> list[str]:
    """The complaints that are not about what this machine lacks."""
    return [complaint for complaint in found if not lacking or lacking not in complaint]


def main(arguments: list[str]) -> int:
    reports = Path(arguments[0])
    tests = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).resolve().parent.parent / "tests"
    found = complaints(reports, tests.resolve())
    print("\n".join(found) or "every test file ran in some job, and so did every test that a job skipped")
    return 1 if counted(found, os.environ.get("CI_LACKS", "")) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
