"""The record of the last GPU run must be about the sources at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tilewise.jit.validation import PACKAGE, decisive_sources, source_hash

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "validation.json"


def test_the_kernels_at_hand_have_passed_on_a_gpu() -> None:
    assert RECORD.is_file(), (
        "no GPU run is on record: run `make gpu-check` on a GPU and commit benchmarks/validation.json"
    )
    record = json.loads(RECORD.read_text())
    assert record["source_hash"] == source_hash(), (
        f"kernels, jit or backends changed since {record['date']}, when they last passed on a {record['gpu']}: "
        "run `make gpu-check` on a machine with a GPU and commit benchmarks/validation.json"
    )
    assert record["passed"] == sum(record["passed_in"].values()) > 0


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the decisive sources, and something beside them."""
    for path in decisive_sources():
        copy = tmp_path / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (tmp_path / "api.py").write_text("")
    return tmp_path


def test_the_hash_depends_on_contents_and_not_on_place(package: Path) -> None:
    assert source_hash(package) == source_hash()


def test_the_hash_covers_every_kind_of_source(package: Path) -> None:
    kinds = {(path.relative_to(package).parts[0], path.suffix) for path in decisive_sources(package)}
    assert {("backends", ".py"), ("jit", ".py"), ("kernels", ".cuh")} <= kinds
    for path in decisive_sources(package):
        before = source_hash(package)
        path.write_bytes(path.read_bytes() + b"\n")
        assert source_hash(package) != before, path


def test_the_hash_sees_a_new_name_and_ignores_the_rest_of_the_package(package: Path) -> None:
    before = source_hash(package)
    (package / "api.py").write_text("changed")
    (package / "jit" / "__pycache__").mkdir()
    (package / "jit" / "__pycache__" / "launch.pyc").write_bytes(b"\0")
    assert source_hash(package) == before
    moved = decisive_sources(package)[-1]
    moved.rename(moved.with_name("renamed.cuh"))
    assert source_hash(package) != before
