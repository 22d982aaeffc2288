"""The pins of what CI installs, and the check that no test is skipped by every job, over reports of small folders."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from support import reached

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "test_plain.py": "def test_it(): pass\n",
    "test_needs.py": "import pytest\npytest.importorskip({library!r})\ndef test_it(): pass\n",
    "deep/test_partly.py": (
        "import pytest\ndef test_it(): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_other(x): pytest.importorskip({library!r})\n"
    ),
    "gpu/test_gpu.py": "import pytest\npytest.skip('no GPU', allow_module_level=True)\n",
}


@pytest.fixture
def folder(tmp_path):
    for directory in ("reports", "tests/deep", "tests/gpu"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def job(folder: Path, name: str, *, library: str) -> None:
    """A job in an environment where the tests find `library`, or do not."""
    for path, source in TESTS.items():
        (folder / "tests" / path).write_text(source.format(library=library))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml=reports/{name}.xml",
        "tests",
    ]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


def complaints(folder: Path) -> list[str]:
    script = runpy.run_path(str(ROOT / ".ci" / "executed.py"))
    return script["complaints"](folder / "reports", folder / "tests")


def test_what_every_job_skips_is_named(folder):
    job(folder, "one", library="no_such_library")
    job(folder, "two", library="no_such_library_either")
    file, test = complaints(folder)
    assert "test_needs.py: no test of it ran in any job" in file
    assert "no_such_library" in file
    assert test.startswith("tests.deep.test_partly.test_other: skipped in every job")


def test_what_one_job_runs_is_fine(folder):
    job(folder, "one", library="no_such_library")
    job(folder, "two", library="json")
    assert complaints(folder) == []


def test_a_job_that_reports_nothing_is_no_proof(folder):
    assert complaints(folder) == [f"{folder / 'reports'}: no report of any job"]


def test_every_job_of_the_makefile_reports():
    """`.ci/run` gives each job a folder for its report, and asks about the whole."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "executed.py" in script
    for name in ("check", "site", "release", "test", "kernel-gates", "thunder", "libraries"):
        assert name in script


def test_the_browser_is_installed_before_the_tests():
    """A page that no browser has opened is not tested: none is excused but where no browser could be installed."""
    script = (ROOT / ".ci" / "run").read_text()
    assert script.index(".ci/chromium") < script.index("make test")
    assert "chromium-headless-shell" in (ROOT / ".ci" / "chromium").read_text()
    counted = runpy.run_path(str(ROOT / ".ci" / "executed.py"))["counted"]
    found = ["tests.lab.test_html.test_a_page: skipped in every job that has it: no Chromium here", "another"]
    assert counted(found, "") == found
    assert counted(found, "no Chromium here") == ["another"]
    assert 'CI_LACKS="no Chromium here"' in script
    assert "no Chromium here" in (ROOT / "tests" / "lab" / "test_html.py").read_text()


def pinned(*files: str) -> set[str]:
    """The packages that these files name a version of."""
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines() if "==" in line]
    return {canonicalize_name(line.split("==")[0].rstrip("=")) for line in lines if not line.startswith("#")}


def test_every_package_of_the_development_environment_is_pinned():
    if any(line.startswith("triton") for line in metadata.requires("torch") or ()):
        pytest.skip("torch is a CUDA build, which pins much itself")
    files = ("constraints.txt", "constraints-cpu.txt", ".ci/torch.txt")
    assert reached("tilewise", "dev") - pinned(*files) == {"tilewise"}


@pytest.mark.parametrize("file", ["torch", "thunder", "libraries", "site", "release"])
def test_every_package_that_ci_asks_for_is_pinned(file):
    lines = (ROOT / ".ci" / f"{file}.txt").read_text().splitlines()
    names = {canonicalize_name(line.split("==")[0].rstrip("=")) for line in lines if line[0] not in "#-"}
    constrained = pinned("constraints.txt") if "--constraint ../constraints.txt" in lines else set()
    assert names - constrained - pinned(f".ci/{file}.txt") == set()


@pytest.mark.parametrize(
    ("torch_needs", "constraints"),
    [
        ("filelock", "constraints.txt constraints-cpu.txt"),
        ('triton==3.7.1; platform_system == "Linux"', "constraints.txt"),
    ],
)
def test_make_pins_the_cuda_packages_unless_torch_does(torch_needs, constraints, tmp_path):
    """By the Makefile's own commands, in an environment whose pip only notes what constrains it."""
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    described = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\nRequires-Dist: {torch_needs}\n"
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text(described)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-m pip" ] && {{ echo $PIP_CONSTRAINT >> "{tmp_path}/pip"; exit; }}\n'
        f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    subprocess.run(["make", f"VENV={tmp_path}", f"{tmp_path}/.installed"], cwd=ROOT, capture_output=True, check=True)
    assert (tmp_path / "pip").read_text().splitlines()[-1] == constraints
