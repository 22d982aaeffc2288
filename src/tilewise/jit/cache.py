"""Built kernels on disk: one directory per entry, placed by an atomic rename, believed only if its digests hold.

    <root>/entries/<name>.<arch>.<key>/   kernel.cu  kernel.cubin  build.log  resources.json
    <root>/failed/<name>.<arch>.<key>/    what a failed build leaves behind, for reading
    <root>/locks/<xx>.lock                one builder at a time; held by the kernel (flock), so a dead holder frees it

The root is `TILEWISE_CACHE_DIR`, else `tilewise` under the XDG cache folder. It must belong to the user (or to root)
and be writable by nobody else: a cubin is code. A cache that cannot be used is never an error: kernels are then built
in every process, and one log line says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

MANIFEST = "resources.json"
LOCK_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.02
_ENTRIES, _FAILED, _LOCKS, _STAGING = "entries", "failed", "locks", "staging"

_log = logging.getLogger("tilewise")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One intact cache entry: its folder, the bytes of its files, and the facts recorded when it was built."""

    path: Path
    files: dict[str, bytes]
    facts: dict[str, Any]


def digest(parts: Iterable[bytes]) -> str:
    """sha256 over the parts and their lengths, so that no two lists of parts run together into the same key."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()


def location() -> Path | None:
    """Where the cache would be; None when the user has no home folder and names no other."""
    if chosen := os.environ.get("TILEWISE_CACHE_DIR"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "tilewise"
    try:
        return Path.home() / ".cache" / "tilewise"
    except RuntimeError:
        return None


def root() -> Path | None:
    """The cache folder, made if need be; None (and one log line) when there is none to trust."""
    path = location()
    if path is None:
        _say_once("no kernel cache: this user has no home folder. Set TILEWISE_CACHE_DIR to keep built kernels.")
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _why_untrusted(path.stat())
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        _say_once(
            f"no kernel cache: {path}: {reason}. Kernels are built again in every process; "
            "set TILEWISE_CACHE_DIR to a private folder to keep them."
        )
        return None
    return path


def _why_untrusted(status: os.stat_result) -> str:
    """Only the user and root may be able to put code into the cache."""
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}; chmod 700 mends it)"
    return ""


def read(label: str, key: str, names: Iterable[str], *, report_damage: bool) -> Entry | None:
    """The entry for `key` if all files in `names` are there and intact, else None.

    A damaged entry counts as absent, with one log line if `report_damage`.
    """
    folder = root()
    if folder is None:
        return None
    path = folder / _ENTRIES / f"{label}.{key}"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = {name: (path / name).read_bytes() for name in names}
        damaged = [name for name in files if digest([files[name]]) != manifest["digests"][name]]
        if damaged or manifest["key"] != key:
            raise ValueError(f"{', '.join(damaged) or MANIFEST} does not match its digest")
        return Entry(path, files, manifest["facts"])
    except FileNotFoundError as error:
        damage = f"{Path(error.filename).name} is missing" if path.exists() else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        damage = str(error)
    if damage and report_damage:
        _log.warning("tilewise: the cached kernel in %s is damaged (%s); it is built again", path, damage)
    return None


def write(label: str, key: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> Path | None:
    """Place an entry, whole or not at all, over whatever was there. None (and one log line) if the disk refuses."""
    manifest = {"key": key, "digests": {name: digest([data]) for name, data in files.items()}, "facts": dict(facts)}
    everything = {**files, MANIFEST: json.dumps(manifest, indent=2).encode() + b"\n"}
    return _place(_ENTRIES, f"{label}.{key}", everything)


def keep_failed(label: str, key: str, files: Mapping[str, bytes]) -> Path | None:
    """Keep what a failed build leaves, for the user to read: in the cache, else in a temporary folder, else nowhere."""
    if place := _place(_FAILED, f"{label}.{key}", files):
        return place
    try:
        place = Path(tempfile.mkdtemp(prefix="tilewise-failed-"))
        _fill(place, files)
    except OSError:
        return None
    return place


def _place(kind: str, name: str, files: Mapping[str, bytes]) -> Path | None:
    folder = root()
    if folder is None:
        return None
    staged: Path | None = None
    try:
        for sub in (kind, _STAGING):
            (folder / sub).mkdir(mode=0o700, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder / _STAGING))
        _fill(staged, files)
        _swap_in(staged, folder / kind / name)
        return folder / kind / name
    except OSError as error:
        _say_once(f"the kernel cache {folder} cannot be written ({error.strerror}); kernels are built in every process")
        return None
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _swap_in(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`. A folder in the way is moved out first; one that another process slips in stays."""
    outgoing = staged.with_name(f"{staged.name}.old")
    with contextlib.suppress(FileNotFoundError):
        target.rename(outgoing)
    try:
        staged.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(outgoing, ignore_errors=True)


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """Let one process at a time build `key`. Without a writable cache or without flock it does nothing.

    The lock is only there to save work: correctness rests on the atomic rename. So a holder that neither finishes nor
    dies is waited for no longer than `LOCK_PATIENCE_SECONDS`.
    """
    folder = root()
    handle = _open_lock(folder, key) if folder is not None and fcntl is not None else None
    if handle is None:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            _wait_for(handle)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _open_lock(folder: Path, key: str) -> int | None:
    try:
        (folder / _LOCKS).mkdir(mode=0o700, exist_ok=True)
        return os.open(folder / _LOCKS / f"{key[:2]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _wait_for(handle: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while not _try_lock(handle) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _try_lock(handle: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def entries() -> list[Path]:
    """The folders of all entries, by name."""
    folder = root()
    if folder is None or not (folder / _ENTRIES).is_dir():
        return []
    return sorted(path for path in (folder / _ENTRIES).iterdir() if path.is_dir())


def size() -> int:
    """Bytes in all entries."""
    return sum(file.stat().st_size for entry in entries() for file in entry.iterdir() if file.is_file())


def clear() -> int:
    """Remove every entry and every failed build; returns how many entries went. Touches nothing else in the root."""
    folder = root()
    count = len(entries())
    for kind in (_ENTRIES, _FAILED, _STAGING):
        if folder is not None:
            shutil.rmtree(folder / kind, ignore_errors=True)
    return count


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("tilewise: %s", message)
