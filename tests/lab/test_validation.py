"""The record of the last GPU run must be about the sources at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gpu_parts import (
    PACKAGE,
    PARTS,
    decisive_sources,
    hash_of,
    part_hash,
    part_sources,
    runs_unasked,
)
from tilewise.native import library

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "validation.json"


@pytest.mark.parametrize("part", [part for part in PARTS if runs_unasked(part)])
def test_the_sources_at_hand_have_passed_on_a_gpu(part: str) -> None:
    record = json.loads(RECORD.read_text()).get(part) if RECORD.is_file() else None
    files = PARTS[part].tests
    remedy = f"run {' '.join(files)} of tests/gpu on a machine with a GPU and commit benchmarks/validation.json"
    assert record, f"no GPU run of {part} is on record: {remedy}"
    assert record["source_hash"] == part_hash(part), (
        f"sources of {part} changed since {record['date']}, when they last passed on a {record['gpu']}: {remedy}"
    )
    missing = [name for name in files if not record["passed_in"].get(name)]
    assert not missing, f"{', '.join(missing)} of tests/gpu did not pass on these sources: {remedy}"


def test_what_no_gpu_run_vouches_for_runs_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {part for part in PARTS if not runs_unasked(part)} <= {"native"}
    monkeypatch.delenv(library.SETTING, raising=False)
    assert library.answers_calls() == runs_unasked("native")
    for setting in ("off", "detour", "on"):
        monkeypatch.setenv(library.SETTING, setting)
        assert library.answers_calls() == (setting == "on")


def test_every_gpu_test_vouches_for_one_part() -> None:
    """The lab and the model of the hardware are not part of any, nor what needs two GPUs."""
    named = [name for part in PARTS.values() for name in part.tests]
    there = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert sorted(named) == sorted(there - {"test_lab_gpu.py", "test_emulator_products.py", "test_two_gpus.py"})


def test_together_the_parts_cover_every_decisive_source() -> None:
    covered = {path for name in PARTS for path in part_sources(name)}
    left_over = {path.relative_to(PACKAGE).as_posix() for path in decisive_sources()} - {
        path.relative_to(PACKAGE).as_posix() for path in covered
    }
    assert left_over <= {"jit/sass.py"}, left_over


def test_a_change_asks_for_the_runs_of_what_it_reaches() -> None:
    def reached(source: str) -> set[str]:
        return {name for name in PARTS if PACKAGE / source in part_sources(name)}

    families = {name for name in PARTS if name.startswith("sm")}
    assert reached("kernels/sm90/backward_products.cuh") == {"sm90.backward"}
    assert reached("kernels/sm80/float32_ptx.cuh") == {"sm80.float32"}
    assert reached("engine/sm90/float32_backward.py") == {"sm90.float32"}
    assert reached("engine/tables/sm90.json") == {"sm90.forward"}
    assert reached("engine/run.py") >= families
    assert reached("masks.py") == reached("call/memory.py") == {"seam"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the decisive sources, and something beside them."""
    for path in {path for name in PARTS for path in part_sources(name)} | set(decisive_sources()):
        copy = tmp_path / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return tmp_path


def engine_hash(package: Path) -> str:
    return hash_of(decisive_sources(package), package)


def test_the_hash_depends_on_contents_and_not_on_place(package: Path) -> None:
    assert engine_hash(package) == engine_hash(PACKAGE)


def test_the_hash_covers_every_kind_of_source(package: Path) -> None:
    kinds = {(path.relative_to(package).parts[0], path.suffix) for path in decisive_sources(package)}
    assert {("plain", ".py"), ("backend.py", ".py"), ("jit", ".py"), ("kernels", ".cuh")} <= kinds
    for path in decisive_sources(package):
        before = engine_hash(package)
        path.write_bytes(path.read_bytes() + b"\n;")
        assert engine_hash(package) != before, path


def test_a_formatter_changes_no_hash_of_a_kernel(package: Path) -> None:
    before = engine_hash(package)
    path = package / "kernels" / "sm90" / "forward.cuh"
    path.write_text("// new\n" + path.read_text().replace("(", "( ").replace("\n", "\n\n"))
    assert engine_hash(package) == before


def test_a_lesson_changes_the_hash_of_the_ladder_alone(package: Path) -> None:
    lessons = part_sources("ladder", package)
    kinds = {(path.relative_to(package).parts[:2], path.suffix) for path in lessons}
    assert (("kernels", "ladder"), ".cuh") in kinds
    assert (("ladder", "lecture.py"), ".py") in kinds
    engine = engine_hash(package)
    for path in lessons:
        before = part_hash("ladder", package)
        path.write_bytes(path.read_bytes() + b"\n;")
        assert part_hash("ladder", package) != before, path
        assert engine_hash(package) == engine, path


def test_the_hash_sees_a_new_name_and_ignores_the_rest_of_the_package(package: Path) -> None:
    before = engine_hash(package)
    (package / "api.py").write_text("changed")
    (package / "jit" / "__pycache__").mkdir()
    (package / "jit" / "__pycache__" / "launch.pyc").write_bytes(b"\0")
    assert engine_hash(package) == before
    moved = decisive_sources(package)[-1]
    moved.rename(moved.with_name("renamed.cuh"))
    assert engine_hash(package) != before
