"""The packages: the source archive holds the repository, and the wheel made from it runs with torch alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tilewise
from support import reached

pytest.importorskip("hatchling", reason="needs hatchling")

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (made,) = folder.iterdir()
    with tarfile.open(made) as packed:
        packed.extractall(folder, filter="data")
    return folder / made.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """The wheel, made as an installer makes it: from the archive alone."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=archive)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel, and torch with what torch needs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    for name in reached("torch"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=folder)
    return python


def test_the_archive_holds_the_repository(archive):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    packed = {path.relative_to(archive).as_posix() for path in archive.rglob("*") if path.is_file()}
    assert packed == {name for name in listed if (ROOT / name).is_file()} | {"PKG-INFO"}


def test_the_wheel_holds_the_package(wheel):
    package = ROOT / "src" / "tilewise"
    wanted = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert held == {name for name in wanted if "__pycache__" not in name}


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readmes_code_runs_with_the_wheel_and_torch_alone(environment, code, tmp_path):
    *_, file = run(environment, "-I", "-c", f"{code}\nprint(tilewise.__file__)", cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(environment.parents[1])


def test_the_command_names_the_extra_that_it_lacks(environment, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [environment.parent / "tilewise", "env"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "tilewise[lab]" in done.stderr


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {tilewise.__version__}\n" in citation
