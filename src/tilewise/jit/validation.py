"""Which sources a GPU run has vouched for: the hash of everything that decides what a kernel does.

`make gpu-check` runs the tests that need a GPU and records this hash beside their outcome; a test that needs none fails
when the record is not about the sources at hand.

The ladder has a hash of its own: its kernels run only for those who ask for them, so a lesson that changes does not put
in doubt what the planner runs. It is checked on a GPU all the same, by the same command, and its record fails alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# Everything that decides what a kernel does, or which of them runs.
_DECISIVE = ("backends", "engine", "jit", "kernels")
_LADDER = ("ladder", "kernels/ladder")
# The files of tests/gpu that vouch for each.
ENGINE = (
    "test_float32.py",
    "test_launch.py",
    "test_seam.py",
    "test_sm80.py",
    "test_sm80_backward.py",
    "test_sm80_float32.py",
    "test_sm90.py",
    "test_sm90_backward.py",
    "test_three_way.py",
    "test_torch_rules.py",
)
LADDER = ("test_ladder_gpu.py",)
_SUFFIXES = frozenset({".py", ".cuh", ".json"})


def source_hash(package: Path = PACKAGE) -> str:
    """sha256 over the paths and contents of all decisive sources, in a fixed order."""
    return _hash(decisive_sources(package), package)


def ladder_hash(package: Path = PACKAGE) -> str:
    """The same of the ladder's sources."""
    return _hash(ladder_sources(package), package)


def _hash(files: list[Path], package: Path) -> str:
    sha = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        sha.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()


def decisive_sources(package: Path = PACKAGE) -> list[Path]:
    """The files that `source_hash` covers, sorted by their path inside the package."""
    lessons = set(ladder_sources(package))
    return [path for path in _sources(_DECISIVE, package) if path not in lessons]


def ladder_sources(package: Path = PACKAGE) -> list[Path]:
    """The files that `ladder_hash` covers; `source_hash` covers the headers of other folders that they include."""
    return _sources(_LADDER, package)


def _sources(folders: tuple[str, ...], package: Path) -> list[Path]:
    files = {path for folder in folders for path in (package / folder).rglob("*") if path.suffix in _SUFFIXES}
    return sorted(files, key=lambda path: path.relative_to(package).as_posix())
