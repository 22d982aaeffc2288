"""Which sources a GPU run has vouched for: the hash of everything that decides what a kernel does.

`make gpu-check` runs the tests that need a GPU and records this hash beside their outcome; a test that needs none fails
when the record is not about the sources at hand.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# Everything that decides what a kernel does, or which of them runs.
_DECISIVE = ("backends", "jit", "kernels", "tables")
_SUFFIXES = frozenset({".py", ".cuh", ".json"})


def source_hash(package: Path = PACKAGE) -> str:
    """sha256 over the paths and contents of all decisive sources, in a fixed order."""
    sha = hashlib.sha256()
    for path in decisive_sources(package):
        content = path.read_bytes()
        sha.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()


def decisive_sources(package: Path = PACKAGE) -> list[Path]:
    """The files that `source_hash` covers, sorted by their path inside the package."""
    files = (path for folder in _DECISIVE for path in (package / folder).rglob("*") if path.suffix in _SUFFIXES)
    return sorted(files, key=lambda path: path.relative_to(package).as_posix())
