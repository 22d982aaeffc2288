"""Configs measured on this machine by `tilewise tune`: one file per backend and device, never one that ships.

    <folder>/<backend>.<device>.json   {"format", "backend", "device", "entries": [...]}

The folder is `TILEWISE_TABLES`, else `tables` in the cache folder; `TILEWISE_TABLES=none` reads and writes nothing, so
that only the shipped tables count. An entry is the winner of one sweep:

    key      what must be the same for the entry to count: the kernel's kind
    sizes    what it was measured at; it serves sizes within a factor of two of each, the nearest entry first
    config   the winner's fields
    kernels  digest of the CUDA sources it was measured with: after they change, the entry counts no more

and the rest says where it comes from: device, driver, versions, commit, times, spread, runners-up.

A table is only a file: an entry counts if its config is one that the backend's own rules allow for the problem. One
that is not, or that does not build here, and a file that cannot be read cost one log line each, never a call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..element import Element, from_number
from ..memo import invalidate
from . import cache, trust
from .compile import KERNELS
from .headers import included_files
from .memo import is_new

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NONE = "none"
REACH = 2.0  # an entry serves sizes up to this factor away from its own
_FORMAT = 1
_MAX_SIZE = 1 << 62  # of what an entry was measured at
_FIELD_TYPES = {"int": int, "bool": bool, "Element": int}
_Config = TypeVar("_Config")
_Place = tuple["Path | None", int]  # of an entry: its file, and its number there

_log = logging.getLogger("tilewise")
_WHOLE = -1  # the number of no entry: all of a table
_refused: set[_Place] = set()  # entries that have had their log line
_changes = 0  # how often the answer to `find` may have become another one
_served: dict[Any, _Place] = {}  # configs that calls were given, and the entries they came from


def folder() -> Path | None:
    """Where the tables are, or would be; None where they are switched off or there is no place for them.

    Whether the folder can be trusted is asked when a table is read or written: this is on the way of every plan.
    """
    chosen = os.environ.get("TILEWISE_TABLES")
    if chosen:
        return None if chosen == NONE else trust.absolute(chosen)
    root = cache.location()
    return None if root is None else root / "tables"


def path_of(backend: str, device: str) -> Path | None:
    place = folder()
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return None if place is None else place / f"{backend}.{slug}.json"


def find(
    backend: str,
    device: str,
    key: Mapping[str, Any],
    sizes: Mapping[str, int],
    config: type[_Config],
    is_legal: Callable[[_Config], bool],
) -> dict[str, Any] | None:
    """The entry nearest to `sizes` among those with this key that reach it and whose config `is_legal` accepts."""
    path = path_of(backend, device)
    reaching = [
        (distance, -number, entry)
        for number, entry in _entries(path, device)
        if entry["key"] == key
        and (distance := _distance(entry["sizes"], sizes)) is not None
        and entry["kernels"] == kernels_digest(backend)
        and (path, number) not in _refused
    ]
    for _, number, entry in sorted(reaching, key=lambda found: found[:2]):
        place = (path, -number)
        wrong = _wrong_fields(entry["config"], config)
        if not wrong:
            made = _made(config, entry["config"])
            if is_legal(made):
                _served[made] = place
                return entry
            wrong = f"{backend} has no config {entry['config']} for this problem"
        _refuse(place, wrong)
    return None


def first(entry: Mapping[str, Any] | None, config: type[_Config], shipped: list[_Config]) -> list[_Config]:
    """Configs, best first: the entry's, then those that ship."""
    return shipped if entry is None else list(dict.fromkeys([_made(config, entry["config"]), *shipped]))


def does_not_build(config: Any, why: str) -> bool:
    """Whether `config` came from a table: then its entry, with one log line, counts no more."""
    place = _served.get(config)
    if place is not None:
        _refuse(place, f"its config does not build here: {why}")
    return place is not None


def _refuse(place: _Place, why: str) -> None:
    """One log line, however many threads come upon it."""
    path, number = place
    what = "the tuned table" if number == _WHOLE else f"entry {number + 1} of the tuned table"
    if is_new(_refused, place):
        _count_change()
        _log.warning("tilewise: %s %s is not used: %s", what, path, why)


def _wrong_fields(values: Mapping[str, Any], config: type[Any]) -> str:
    """What makes these values no fields of `config`: True is no number here, and 64.0 no 64; empty if all is well."""
    types = {field.name: _FIELD_TYPES[str(field.type)] for field in dataclasses.fields(config)}
    if values.keys() != types.keys():
        return f"its config has the fields {sorted(values)}, not {sorted(types)}"
    wrong = [f"{name} = {values[name]!r:.40}" for name, kind in types.items() if type(values[name]) is not kind]
    elements = [field.name for field in dataclasses.fields(config) if str(field.type) == "Element"]
    wrong += [f"{name} = {values[name]!r:.40}" for name in elements if values[name] not in [*Element]]
    return f"its config has {', '.join(wrong)}" if wrong else ""


def _made(config: type[_Config], values: Mapping[str, Any]) -> _Config:
    """The config of an entry whose fields are not wrong."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    return config(**{field.name: from_number(str(field.type), values[field.name]) for field in fields})


def write(backend: str, device: str, entry: dict[str, Any]) -> Path | None:
    """Add an entry, in place of one for the same key and sizes. The file is replaced whole or not at all.

    None, and one log line, where the table would not be the user's alone or cannot be written.
    """
    path = path_of(backend, device)
    if path is None:
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := trust.trusted_folder(path.parent):
            raise trust.Untrusted(reason)
        _add(path, backend, device, entry)
    except OSError as error:
        _log.warning("tilewise: the tuned table %s is not written: %s", path, error)
        return None
    forget()
    return path


def _add(path: Path, backend: str, device: str, entry: dict[str, Any]) -> None:
    same = (entry["key"], entry["sizes"])
    with cache.lock(trust.digest([str(path).encode()])):
        kept = [old for _, old in _read(path, device) if (old["key"], old["sizes"]) != same]
        table = {"format": _FORMAT, "backend": backend, "device": device, "entries": [*kept, entry]}
        handle, staged = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=2)
            file.write("\n")
        Path(staged).replace(path)


def cite(entry: Mapping[str, Any]) -> str:
    """Where a config comes from, in a line."""
    at = ", ".join(f"{name} {size}" for name, size in entry["sizes"].items())
    against = f", {entry['gain']:.2f}x the shipped choice" if entry.get("gain") else ""
    return f"config tuned on {entry['device']} by tilewise tune, {entry['date'][:10]}, at {at}{against}"


def forget() -> None:
    """Read the tables again when they are next asked for."""
    _entries.cache_clear()
    _refused.clear()
    _served.clear()
    _count_change()


def changes() -> int:
    """A number that is another one after every change of what `find` may answer; what was made of it is out of date."""
    return _changes


def _count_change() -> None:
    global _changes
    _changes += 1
    invalidate()


@functools.cache
def kernels_digest(backend: str) -> str:
    """Of the CUDA sources that decide how fast the backend's kernels are; backends without any share one digest."""
    folders = [KERNELS / name for name in ("common", backend)] if (KERNELS / backend).is_dir() else []
    files = sorted(path for place in folders for path in place.rglob("*.cuh"))
    includes = "".join(f'#include "{path.relative_to(KERNELS).as_posix()}"\n' for path in files)
    reached = included_files(includes, [KERNELS])  # headers of other folders too
    return trust.digest([part for name, content in reached for part in (name.encode(), content)])[:16]


def _distance(tuned: Mapping[str, int], asked: Mapping[str, int]) -> float | None:
    """How far apart two sets of sizes are, in logarithms; None when one of them is out of reach."""
    if tuned.keys() != asked.keys() or not all(asked.values()):
        return None
    steps = [abs(math.log(asked[name] / size)) for name, size in tuned.items()]
    return sum(steps) if max(steps, default=0.0) <= math.log(REACH) + 1e-9 else None


_Numbered = list[tuple[int, dict[str, Any]]]


@functools.lru_cache(maxsize=64)
def _entries(path: Path | None, device: str) -> _Numbered:
    return [] if path is None else _read(path, device)


def _read(path: Path, device: str) -> _Numbered:
    """The entries of a table that are whole, with their numbers; a log line for each that is not.

    None, and one log line, if the table is damaged or about another device.
    """
    try:
        if not os.path.lexists(path.parent):
            return []
        if reason := trust.trusted_folder(path.parent):
            raise trust.Untrusted(reason)
        table = json.loads(trust.read_trusted(path))
        if table["format"] != _FORMAT or table["device"] != device:
            raise ValueError(f"it is about {table['device']!r:.80}, format {table['format']!r:.80}")
        entries = table["entries"]
        if not isinstance(entries, list):
            raise TypeError("its entries are no list")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _refuse((path, _WHOLE), str(error) or type(error).__name__)
        return []
    whole = []
    for number, entry in enumerate(entries):
        if wrong := _wrong_entry(entry):
            _refuse((path, number), wrong)
        else:
            whole.append((number, entry))
    return whole


_KINDS: dict[str, type] = {"key": dict, "sizes": dict, "config": dict, "kernels": str, "device": str, "date": str}


def _wrong_entry(entry: Any) -> str:
    """What an entry lacks that every entry has; empty if nothing. Its config is another matter."""
    if not isinstance(entry, dict):
        return "it is no object"
    if missing := [name for name, kind in _KINDS.items() if not isinstance(entry.get(name), kind)]:
        return f"it lacks {', '.join(missing)}, or has them of another type"
    sizes, gain = entry["sizes"], entry.get("gain")
    if not sizes or not all(type(size) is int and 0 < size <= _MAX_SIZE for size in sizes.values()):
        return f"its sizes are {sizes!r:.80}"
    if gain is not None and not (type(gain) in (int, float) and 0 < gain < math.inf):
        return f"its gain is {gain!r:.40}"
    return ""
