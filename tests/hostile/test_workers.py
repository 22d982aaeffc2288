"""Nothing is imported from the current directory: not by the command, its workers, nor what surrounds a traced program.

The current directory is full of modules that stand for those a process imports, and each leaves a mark when it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import make_problem
from tilewise.errors import DeviceError
from tilewise.lab.commands.trace import run as run_traced
from tilewise.lab.measure import environment, ncu, stages
from tilewise.lab.measure.pool import Failure, Process

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
WATCHDOG = 600  # seconds: a machine may be slow
TRAPS = [
    "__future__", "abc", "argparse", "ast", "bisect", "collections", "concurrent", "contextlib", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "glob",
    "hashlib", "heapq", "hmac", "html", "importlib", "inspect", "io", "itertools", "json", "keyword", "linecache",
    "locale", "logging", "math", "multiprocessing", "numbers", "numpy", "operator", "os", "pathlib", "pickle",
    "pkgutil", "platform", "pprint", "queue", "random", "re", "rich", "runpy", "secrets", "selectors", "shlex",
    "shutil", "signal", "socket", "statistics", "string", "struct", "subprocess", "sympy", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "torch", "traceback", "triton", "typer", "types",
    "typing", "typing_extensions", "unittest", "urllib", "uuid", "warnings", "weakref", "zipfile",
]  # fmt: skip


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a trap of every name; `sprung` tells which were imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    mark = tmp_path / "sprung"
    for name in [*TRAPS, "tilewise"]:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\nraise ImportError('a trap')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    for variable in ("PYTHONSAFEPATH", "PYTHONSTARTUP"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def sprung(folder: Path) -> str:
    mark = folder.parent / "sprung"
    return mark.read_text() if mark.exists() else ""


def test_the_traps_work(trapped: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import queue"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert sprung(trapped) == "queue "


@pytest.mark.parametrize("stray", ["", os.pathsep], ids=["path", "path with a stray separator"])
def test_a_worker_imports_nothing_from_here(stray: str, trapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty element of PYTHONPATH, the remnant of `PYTHONPATH=$PYTHONPATH:more`, stands for the directory, too."""
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{stray}")
    worker = Process()
    try:
        with pytest.raises(Failure, match="raised") as caught:
            worker.ask("nothing that it knows", WATCHDOG)
        assert "trap" not in caught.value.stderr
    finally:
        worker.close()
    assert sprung(trapped) == ""


def test_a_worker_calls_a_function_that_is_named_and_lies_here(trapped: Path) -> None:
    """Whoever names a module of theirs means it; it comes after everything else, and stands in for nothing."""
    (trapped / "mine.py").write_text(
        "import queue, torch\nimport beside\n\n"
        "def attention(q, k, v, problem, bias):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
    )
    (trapped / "beside.py").write_text("")
    problem = make_problem((1, 1, 8, 8)).to_dict()
    for name in ("python:mine:attention", f"python:{trapped / 'mine.py'}:attention"):
        worker = Process()
        try:
            worker.ask("prepare", WATCHDOG, candidate=name, problem=problem, seed=0, device="cpu")
        finally:
            worker.close()
    assert sprung(trapped) == ""


def test_processes_that_measure_import_nothing_from_here(trapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = stages.measure(make_problem((1, 1, 8, 8)), 0, 0.01, WATCHDOG)
    assert "trap" not in str(told)
    assert sprung(trapped) == ""
    assert set(environment.import_seconds(1)) == {"torch", "tilewise"}
    assert sprung(trapped) == ""
    tools = trapped.parent / "tools"
    tools.mkdir()
    (tools / "ncu").write_text(f'#!/bin/sh\nwhile [ "$1" != "{sys.executable}" ]; do shift; done\nexec "$@"\n')
    (tools / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    with contextlib.suppress(DeviceError):  # without a GPU it comes as far as asking for one
        ncu.run([], [], WATCHDOG)
    assert sprung(trapped) == ""


ENTRY = "import sys\nfrom tilewise.__main__ import main\nsys.exit(main())\n"


@pytest.mark.kernel_gate  # eight processes that import PyTorch
@pytest.mark.parametrize("how", ["script", "module", "module with options", "attached"])
def test_the_command_imports_nothing_from_here(how: str, trapped: Path) -> None:
    script = trapped.parent / "bin" / "tilewise"
    script.parent.mkdir()
    script.write_text(ENTRY)
    (trapped / "tilewise.py").unlink()  # that of `python -m tilewise` is Python's own to find
    heads = {
        "script": [str(script)],
        "module": ["-m", "tilewise"],
        "module with options": ["-um", "tilewise"],
        "attached": ["-mtilewise"],
    }
    inspect = ["inspect", "--shape", "1,1,16,8", "--dtype", "float32", "--candidate", "tiled", "--json"]
    done = subprocess.run([sys.executable, *heads[how], *inspect], capture_output=True, text=True, check=False)
    assert sprung(trapped) == ""
    assert done.returncode == 0, done.stderr
    assert "tiled" in done.stdout


def test_a_library_user_keeps_the_path(trapped: Path) -> None:
    """Only the command changes it: a program of somebody else that imports tilewise has its own, `-m` or not."""
    for name in [*TRAPS, "tilewise"]:
        (trapped / f"{name}.py").unlink()
    (trapped / "theirs").mkdir()
    (trapped / "theirs" / "__init__.py").write_text("import tilewise")
    (trapped / "theirs" / "__main__.py").write_text("import sys; print(sys.path[0])")
    command = [sys.executable, "-m", "theirs"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(trapped)


PROGRAM = "import sys, json, queue\nimport sibling\nprint(json.dumps(sys.path[:1] + sys.argv))\n"


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["plain", "with options"])
def test_a_traced_script_has_its_own_folder_and_not_this_one(
    options: list[str], trapped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trapped.parent / "project"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / "sibling.py").write_text("")
    code, _ = run_traced(["python", *options, str(folder / "train.py"), "--lr", "1"])
    assert code == 0
    assert sprung(trapped) == ""
    path, *argv = json.loads(capfd.readouterr().out)
    assert (path, argv) == (str(folder), [str(folder / "train.py"), "--lr", "1"])


def test_a_traced_module_is_found_here_as_python_finds_it(trapped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (trapped / "train.py").write_text(PROGRAM)
    (trapped / "sibling.py").write_text("")
    code, _ = run_traced(["python", "-m", "train", "--lr", "1"])
    assert code == 0
    assert sprung(trapped) == "", "all that the tracer needs was imported before"
    path, *argv = json.loads(capfd.readouterr().out)
    assert path == str(trapped)
    assert argv[1:] == ["--lr", "1"]
    code, _ = run_traced(["python", "-c", "import sys; print(repr(sys.path[0]), sys.argv)", "x"])
    assert code == 0
    assert capfd.readouterr().out.strip() == "'' ['-c', 'x']"


def test_a_traced_program_that_asked_for_a_safe_path_has_one(trapped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("safe paths begin with Python 3.11")
    code, _ = run_traced(["python", "-P", "-c", "import sys; print(repr(sys.path[0]))"])
    assert code == 0
    assert capfd.readouterr().out.strip() == repr(SOURCE)
    assert sprung(trapped) == ""
