"""The extension as a file: brought along by a wheel, switched off, told of by the command line; its name in PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention

import tilewise
from tilewise import InvalidInput
from tilewise.native import library, wheel

needs_compiler = pytest.mark.skipif(library._why_not() is not None, reason=str(library._why_not()))


@pytest.fixture
def pure(tmp_path):
    """A wheel for any platform, of one file."""
    path = tmp_path / "tilewise-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("tilewise/__init__.py", "")
        made.writestr("tilewise-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("tilewise-9.9.dist-info/RECORD", "tilewise/__init__.py,,\n")
    return path


@needs_compiler
def test_a_platform_wheel_holds_the_extension_and_is_found_there(pure, tmp_path, monkeypatch):
    monkeypatch.delenv(library.SETTING, raising=False)
    made = wheel.platform_wheel(pure, tmp_path / "dist")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert made.name.startswith(f"tilewise-9.9-{python}-{python}-linux")
    with zipfile.ZipFile(made) as opened:
        names = opened.namelist()
        about = opened.read("tilewise-9.9.dist-info/WHEEL").decode()
        record = opened.read("tilewise-9.9.dist-info/RECORD").decode()
        opened.extractall(tmp_path / "installed")
    assert "Root-Is-Purelib: false" in about
    assert "py3-none-any" not in about
    assert sorted(line.split(",")[0] for line in record.splitlines()) == sorted(names)

    folder = tmp_path / "installed" / "tilewise" / "native" / library.PREBUILT
    real = library._source
    monkeypatch.setattr(library, "_source", lambda name: folder if name == library.PREBUILT else real(name))
    monkeypatch.setattr(library.cache, "read", lambda *_, **__: None)
    monkeypatch.setattr(library, "_search", library._Search())
    assert library._find() is not None

    facts = json.loads((folder / "facts.json").read_text())
    for spoiled in (
        lambda: (folder / "native.so").write_bytes(b"not what was built"),
        lambda: (folder / "facts.json").write_text(json.dumps(facts | {"key": "another PyTorch"})),
        lambda: (folder / "facts.json").write_text("{"),
        lambda: os.chmod(folder / "facts.json", 0o666),
    ):
        spoiled()
        monkeypatch.setattr(library, "_search", library._Search())
        assert library._find() is None


def test_only_a_wheel_for_any_platform_is_taken(tmp_path):
    with pytest.raises(InvalidInput, match="any platform"):
        wheel.platform_wheel(tmp_path / "tilewise-9.9-cp311-cp311-linux_x86_64.whl", tmp_path)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != library.SETTING} | variables
    command = [sys.executable, "-m", "tilewise", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_command_line_says_what_is_used():
    off = run("native", "status", TILEWISE_NATIVE="off")
    assert off.returncode != 0
    assert "TILEWISE_NATIVE=off" in off.stdout
    told = json.loads(run("env", "--json", "-", TILEWISE_NATIVE="off").stdout)["repeated calls"]
    assert told["path"] == "Python"
    assert "TILEWISE_NATIVE=off" in told["extension"]


@needs_compiler
def test_the_command_line_builds_it():
    built = run("native", "build")
    assert built.returncode == 0, built.stderr
    assert "ready" in built.stdout
    assert run("native", "status").returncode == 0


def test_a_compiler_that_is_not_there_is_said(monkeypatch, tmp_path):
    failed = run("native", "build", CXX="/no/such/compiler", TILEWISE_CACHE_DIR=str(tmp_path))
    assert failed.returncode != 0
    assert "CXX" in failed.stderr


def test_pytorch_activates_the_override_by_its_name():
    assert "tilewise" in torch_attention.list_flash_attention_impls()
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v)
    torch_attention.activate_flash_attention_impl("tilewise")
    try:
        assert tilewise.sdpa.rule is tilewise.sdpa.enabled is not None
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), want)
        assert F.scaled_dot_product_attention(q[:, :, :0], k, v).shape == (1, 2, 0, 16), "what is not ours falls back"
        torch_attention.activate_flash_attention_impl("tilewise")  # again, as PyTorch's own may be
        assert tilewise.sdpa.enabled is not None
    finally:
        torch_attention.restore_flash_attention_impl()
    assert tilewise.sdpa.enabled is None
    torch_attention.activate_flash_attention_impl("tilewise")
    tilewise.sdpa.disable()
    torch_attention.restore_flash_attention_impl()
    assert tilewise.sdpa.enabled is None
