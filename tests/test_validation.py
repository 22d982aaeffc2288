"""The record of the last GPU run must be about the sources at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tilewise.jit.validation import ENGINE, LADDER, PACKAGE, decisive_sources, ladder_hash, ladder_sources, source_hash

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "validation.json"


PARTS = [("engine", ENGINE, source_hash), ("ladder", LADDER, ladder_hash)]


@pytest.mark.parametrize(("part", "files", "hash_of"), PARTS, ids=["engine", "ladder"])
def test_the_kernels_at_hand_have_passed_on_a_gpu(
    part: str, files: tuple[str, ...], hash_of: Callable[[], str]
) -> None:
    record = json.loads(RECORD.read_text()).get(part) if RECORD.is_file() else None
    remedy = "run `make gpu-check` on a machine with a GPU and commit benchmarks/validation.json"
    assert record, f"no GPU run of the {part} is on record: {remedy}"
    assert record["source_hash"] == hash_of(), (
        f"sources of the {part} changed since {record['date']}, when they last passed on a {record['gpu']}: {remedy}"
    )
    missing = [name for name in files if not record["passed_in"].get(name)]
    assert not missing, f"{', '.join(missing)} of tests/gpu did not pass on these sources: {remedy}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the decisive sources, and something beside them."""
    for path in (*decisive_sources(), *ladder_sources()):
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


def test_a_lesson_changes_the_hash_of_the_ladder_alone(package: Path) -> None:
    kinds = {(path.relative_to(package).parts[:2], path.suffix) for path in ladder_sources(package)}
    assert (("kernels", "ladder"), ".cuh") in kinds
    assert (("ladder", "lecture.py"), ".py") in kinds
    engine = source_hash(package)
    for path in ladder_sources(package):
        before = ladder_hash(package)
        path.write_bytes(path.read_bytes() + b"\n")
        assert ladder_hash(package) != before, path
        assert source_hash(package) == engine, path


def test_the_hash_sees_a_new_name_and_ignores_the_rest_of_the_package(package: Path) -> None:
    before = source_hash(package)
    (package / "api.py").write_text("changed")
    (package / "jit" / "__pycache__").mkdir()
    (package / "jit" / "__pycache__" / "launch.pyc").write_bytes(b"\0")
    assert source_hash(package) == before
    moved = decisive_sources(package)[-1]
    moved.rename(moved.with_name("renamed.cuh"))
    assert source_hash(package) != before
