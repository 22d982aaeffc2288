"""Configs measured on this machine by `tilewise tune`: one file per backend and device, never one that ships.

    <folder>/<backend>.<device>.json   {"format", "backend", "device", "entries": [...]}

The folder is `TILEWISE_TABLES`, else `tables` in the cache folder; `TILEWISE_TABLES=none` reads and writes nothing, so
that only the shipped tables count. An entry is the winner of one sweep:

    key      what must be the same for the entry to count: the kernel's kind
    sizes    what it was measured at; it serves sizes within a factor of two of each, the nearest entry first
    config   the winner's fields
    kernels  digest of the CUDA sources it was measured with: after they change, the entry counts no more

and the rest says where it comes from: device, driver, versions, commit, times, spread, runners-up. A file that cannot
be read costs one log line, never a call.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import cache
from .compile import KERNELS
from .headers import included_files

if TYPE_CHECKING:
    from collections.abc import Mapping

NONE = "none"
REACH = 2.0  # an entry serves sizes up to this factor away from its own
_FORMAT = 1
_Config = TypeVar("_Config")

_log = logging.getLogger("tilewise")


def folder() -> Path | None:
    """Where the tables are; None where they are switched off or there is no cache folder to trust."""
    chosen = os.environ.get("TILEWISE_TABLES")
    if chosen:
        return None if chosen == NONE else Path(chosen)
    root = cache.root()
    return None if root is None else root / "tables"


def path_of(backend: str, device: str) -> Path | None:
    place = folder()
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return None if place is None else place / f"{backend}.{slug}.json"


def find(
    backend: str, device: str, key: Mapping[str, Any], sizes: Mapping[str, int], config: type[Any]
) -> dict[str, Any] | None:
    """The entry nearest to `sizes` among those with this key that reach it; None too if its config has other fields."""
    entries = _entries(path_of(backend, device), device)
    reaching = [
        (distance, -number, entry)
        for number, entry in enumerate(entries)
        if entry["key"] == key
        and (distance := _distance(entry["sizes"], sizes)) is not None
        and entry["kernels"] == kernels_digest(backend)
    ]
    nearest = min(reaching, key=lambda found: found[:2], default=None)
    return nearest[2] if nearest is not None and set(nearest[2]["config"]) == set(config.__slots__) else None


def first(entry: Mapping[str, Any] | None, config: type[_Config], shipped: list[_Config]) -> list[_Config]:
    """Configs, best first: the entry's, then those that ship."""
    return shipped if entry is None else list(dict.fromkeys([config(**entry["config"]), *shipped]))


def write(backend: str, device: str, entry: dict[str, Any]) -> Path | None:
    """Add an entry, in place of one for the same key and sizes. The file is replaced whole or not at all."""
    path = path_of(backend, device)
    if path is None:
        return None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    same = (entry["key"], entry["sizes"])
    with cache.lock(cache.digest([str(path).encode()])):
        kept = [old for old in _read(path, device) if (old["key"], old["sizes"]) != same]
        table = {"format": _FORMAT, "backend": backend, "device": device, "entries": [*kept, entry]}
        handle, staged = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=2)
            file.write("\n")
        Path(staged).replace(path)
    forget()
    return path


def cite(entry: Mapping[str, Any]) -> str:
    """Where a config comes from, in a line."""
    at = ", ".join(f"{name} {size}" for name, size in entry["sizes"].items())
    against = f", {entry['gain']:.2f}x the shipped choice" if entry.get("gain") else ""
    return f"config tuned on {entry['device']} by tilewise tune, {entry['date'][:10]}, at {at}{against}"


def forget() -> None:
    """Read the tables again when they are next asked for."""
    _entries.cache_clear()


@functools.cache
def kernels_digest(backend: str) -> str:
    """Of the CUDA sources that decide how fast the backend's kernels are; backends without any share one digest."""
    folders = [KERNELS / name for name in ("common", backend)] if (KERNELS / backend).is_dir() else []
    files = sorted(path for place in folders for path in place.rglob("*.cuh"))
    includes = "".join(f'#include "{path.relative_to(KERNELS).as_posix()}"\n' for path in files)
    reached = included_files(includes, [KERNELS])  # headers of other folders too
    return cache.digest([part for name, content in reached for part in (name.encode(), content)])[:16]


def _distance(tuned: Mapping[str, int], asked: Mapping[str, int]) -> float | None:
    """How far apart two sets of sizes are, in logarithms; None when one of them is out of reach."""
    if tuned.keys() != asked.keys() or not all(asked.values()):
        return None
    steps = [abs(math.log(asked[name] / size)) for name, size in tuned.items()]
    return sum(steps) if max(steps, default=0.0) <= math.log(REACH) + 1e-9 else None


@functools.cache
def _entries(path: Path | None, device: str) -> list[dict[str, Any]]:
    return [] if path is None else _read(path, device)


def _read(path: Path, device: str) -> list[dict[str, Any]]:
    """The entries of a table; none, and one log line, if it is damaged or about another device."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != _FORMAT or table["device"] != device:
            raise ValueError(f"it is about {table['device']!r}, format {table['format']}")
        entries: list[dict[str, Any]] = table["entries"]
        for entry in entries:
            missing = {"key", "sizes", "config", "kernels", "device", "date"} - entry.keys()
            if missing or not all(isinstance(size, int) and size > 0 for size in entry["sizes"].values()):
                raise ValueError(f"an entry lacks {sorted(missing) or 'sizes above 0'}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("tilewise: the tuned table %s is not used: %s", path, error)
        return []
    return entries
