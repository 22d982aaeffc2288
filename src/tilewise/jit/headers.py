"""Which files a unit's source reaches through `#include`, so that the cache key covers them all."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


def included_files(source: str, roots: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every file that `source` reaches, each once, in order of first mention.

    Includes under a false `#if` are counted too: a key that covers too much only costs a rebuild. Names found in no
    root (the compiler's own headers) are left out; the compiler's version stands for them.
    """
    for name, path in included_paths(source, roots):
        yield name, path.read_bytes()


def included_paths(source: str, roots: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Name and path of every file that `source` reaches, as `included_files` finds them."""
    seen: set[Path] = set()

    def visit(content: bytes, local: list[Path]) -> Iterator[tuple[str, Path]]:
        for quoted, angled in _INCLUDE.findall(content):
            name = (quoted or angled).decode()
            path = _find(name, [*(local if quoted else []), *roots])
            if path is not None and path not in seen:
                seen.add(path)
                yield name, path
                yield from visit(path.read_bytes(), [path.parent])

    yield from visit(source.encode(), [])


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    candidates = ((folder / name).resolve() for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


@functools.cache
def cuda_include_dirs() -> tuple[Path, ...]:
    """Folders with `cuda_fp16.h` and its kin: from NVIDIA's wheels or a CUDA toolkit; empty where there is none."""
    wheels = importlib.util.find_spec("nvidia")
    sites = [Path(place) for place in (wheels.submodule_search_locations or ())] if wheels else []
    candidates = [site / part / "include" for site in sites for part in ("cu13", "cuda_runtime")]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates.append(Path("/usr/local/cuda/include"))
    found = next((folder for folder in candidates if (folder / "cuda_fp16.h").is_file()), None)
    return (found,) if found else ()
