"""Built kernels on disk: one directory per entry, placed by an atomic rename, believed only if its digests hold.

    <root>/entries/<name>.<arch>.<key>/   kernel.cu  kernel.cubin  build.log  resources.json
    <root>/failed/<name>.<arch>.<key>/    what a failed build leaves behind, for reading
    <root>/locks/<xx>.lock                one builder at a time; held by the kernel (flock), so a dead holder frees it
    <root>/secret                         what the user's entries are sealed with

The root is `TILEWISE_CACHE_DIR`, else `tilewise` under the XDG cache folder. A cubin is code: the root, an entry and
every file of it must belong to the user (or to root) and be writable by no other user, and hold what the manifest says,
no more and no less. The manifest is sealed with a secret that is thrown away when the root is found open to others:
taking their rights away afterwards blesses nothing that they may have put there. What root has made for all users to
read has no seal of theirs.

A cache that cannot be used is never an error: kernels are then built in every process, and one log line says why.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import trust
from .memo import is_new

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

MANIFEST = "resources.json"
SECRET = "secret"
LOCK_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.02
_ENTRIES, _FAILED, _LOCKS, _STAGING = "entries", "failed", "locks", "staging"
_SECRET_BYTES = 32

digest = trust.digest

_log = logging.getLogger("tilewise")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One intact cache entry: its folder, the bytes of its files, and the facts recorded when it was built."""

    path: Path
    files: dict[str, bytes]
    facts: dict[str, Any]


def location() -> Path | None:
    """Where the cache would be; None when the user has no home folder and names no other."""
    return trust.cache_root()


def root() -> Path | None:
    """The cache folder, made if need be; None (and one log line) when there is none to trust."""
    path = location()
    if path is None:
        say_once("no kernel cache: this user has no home folder. Set TILEWISE_CACHE_DIR to keep built kernels.")
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = trust.trusted_folder(path)
        why = reason.what if reason else ""
    except OSError as error:
        why = f"{path}: {error.strerror or error}"
    if why:
        with contextlib.suppress(OSError):
            (path / SECRET).unlink()
        say_once(
            f"no kernel cache: {why}. Kernels are built again in every process; "
            "set TILEWISE_CACHE_DIR to a private folder to keep them."
        )
        return None
    return path


def read(label: str, key: str, names: Iterable[str], *, report_damage: bool) -> Entry | None:
    """The entry for `key` if it is ours, intact, and has the files in `names` and no others; else None.

    A damaged entry counts as absent, with one log line if `report_damage`.
    """
    folder = root()
    if folder is None:
        return None
    path = folder / _ENTRIES / f"{label}.{key}"
    try:
        return _read(folder, path, key, sorted(names))
    except FileNotFoundError as error:
        damage = f"{Path(error.filename).name} is missing" if os.path.lexists(path) else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        damage = str(error) or type(error).__name__
    if damage and report_damage:
        say_damaged(path, damage)
    return None


def _read(folder: Path, path: Path, key: str, names: list[str]) -> Entry:
    """Raises whatever comes in the way: OSError, ValueError, KeyError, TypeError, AttributeError or RecursionError."""
    for place in (path.parent, path):
        if problem := _why_not_our_folder(place):
            raise ValueError(problem)
    found, wanted = sorted(os.listdir(path)), sorted([*names, MANIFEST])
    if missing := set(wanted) - set(found):
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    if found != wanted:
        raise ValueError(f"{', '.join(sorted(set(found) - set(wanted)))} is none of its files")
    manifest = json.loads(_plain_file(path / MANIFEST))
    if _is_users_own(path / MANIFEST):
        secret = _known_secret(folder)
        if secret is None or not hmac.compare_digest(_seal(secret, manifest), str(manifest["seal"])):
            raise ValueError(f"{MANIFEST} does not match its seal")
    if manifest["key"] != key:
        raise ValueError(f"{MANIFEST} is of another kernel")
    files = {name: _plain_file(path / name, manifest["digests"][name]) for name in names}
    return Entry(path, files, manifest["facts"])


def _plain_file(path: Path, expected_digest: str | None = None) -> bytes:
    """A file that is trusted, and no link: there are none among our own."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link")
    return trust.read_trusted(path, expected_digest)


def _why_not_our_folder(path: Path) -> str:
    """Of a folder within the root, which are all made here: what is wrong with it; empty if nothing."""
    if not os.path.lexists(path):
        raise FileNotFoundError(2, os.strerror(2), str(path))
    if path.is_symlink():
        return f"{path} is a link"
    reason = trust.trusted_folder(path)
    return reason.what if reason else ""


def _is_users_own(path: Path) -> bool:
    return not hasattr(os, "geteuid") or os.lstat(path).st_uid == os.geteuid()


def _seal(secret: bytes, manifest: Mapping[str, Any]) -> str:
    """The seal of everything that a manifest says."""
    said = {name: value for name, value in manifest.items() if name != "seal"}
    return hmac.new(secret, json.dumps(said, sort_keys=True).encode(), "sha256").hexdigest()


def _known_secret(folder: Path) -> bytes | None:
    """What the user's entries are sealed with; None where there is nothing that can be relied on."""
    try:
        secret = _plain_file(folder / SECRET)
    except (OSError, ValueError):
        return None
    return secret if len(secret) == _SECRET_BYTES else None


def _secret(folder: Path) -> bytes:
    """The same, made if need be: of processes that make one at the same time, all get that of the first."""
    if (known := _known_secret(folder)) is not None:
        return known
    if os.path.lexists(folder / SECRET):
        _remove(folder / SECRET, folder / _STAGING)
    handle, staged = tempfile.mkstemp(prefix=f"{SECRET}.", dir=folder / _STAGING)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        try:
            os.link(staged, folder / SECRET)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            Path(staged).replace(folder / SECRET)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(staged)
    if (made := _known_secret(folder)) is None:
        raise OSError(f"{folder / SECRET} cannot be read back")
    return made


def say_damaged(path: Path, damage: str) -> None:
    _log.warning("tilewise: the cached kernel in %s is damaged (%s); it is built again", path, damage)


def write(label: str, key: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> Path | None:
    """Place an entry, whole or not at all, over whatever was there. None (and one log line) if the disk refuses."""
    manifest = {"key": key, "digests": {name: digest([data]) for name, data in files.items()}, "facts": dict(facts)}

    def sealed(folder: Path) -> dict[str, bytes]:
        whole = manifest | {"seal": _seal(_secret(folder), manifest)}
        return {**files, MANIFEST: json.dumps(whole, indent=2).encode() + b"\n"}

    return _place(_ENTRIES, f"{label}.{key}", sealed)


def keep_failed(label: str, key: str, files: Mapping[str, bytes]) -> Path | None:
    """Keep what a failed build leaves, for the user to read: in the cache, else in a temporary folder, else nowhere."""
    if place := _place(_FAILED, f"{label}.{key}", lambda _: files):
        return place
    try:
        place = Path(tempfile.mkdtemp(prefix="tilewise-failed-"))
        _fill(place, files)
    except OSError:
        return None
    return place


def _place(kind: str, name: str, files_in: Callable[[Path], Mapping[str, bytes]]) -> Path | None:
    folder = root()
    if folder is None:
        return None
    staged: Path | None = None
    try:
        for sub in (_STAGING, kind):
            _make_ours(folder / sub)
        staged = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder / _STAGING))
        _fill(staged, files_in(folder))
        _swap_in(staged, folder / kind / name)
        return folder / kind / name
    except OSError as error:
        why = error.strerror or error
        say_once(f"the kernel cache {folder} cannot be written ({why}); kernels are built in every process")
        return None
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def _make_ours(folder: Path) -> None:
    """A folder of the root, anew if what is there may be somebody else's work."""
    if os.path.lexists(folder) and _why_not_our_folder(folder):
        _remove(folder, folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _remove(path: Path, aside: Path) -> None:
    """Whatever it is. It goes aside first, into another folder of the root: others see it whole or not at all."""
    outgoing = aside / f"{path.name}.{secrets.token_hex(8)}.old"
    with contextlib.suppress(FileNotFoundError):
        path.rename(outgoing)
    if outgoing.is_dir() and not outgoing.is_symlink():
        shutil.rmtree(outgoing, ignore_errors=True)
    else:
        outgoing.unlink(missing_ok=True)


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """For the user alone, whatever the umask."""
    for name, data in files.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)


def _swap_in(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`. What is in the way is moved out first; a folder that another slips in stays."""
    if os.path.lexists(target):
        _remove(target, staged.parent)
    try:
        staged.rename(target)
    except OSError:
        if not target.is_dir():
            raise


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
        _make_ours(folder / _LOCKS)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(folder / _LOCKS / f"{key[:2]}.lock", flags, 0o600)
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
    try:
        return [] if folder is None else sorted(path for path in (folder / _ENTRIES).iterdir() if path.is_dir())
    except OSError:
        return []


def size() -> int:
    """Bytes in all entries."""
    total = 0
    for entry in entries():
        with contextlib.suppress(OSError):
            total += sum(file.stat().st_size for file in entry.iterdir() if file.is_file())
    return total


def clear() -> int:
    """Remove every entry and every failed build; returns how many entries went. Touches nothing else in the root."""
    folder = root()
    count = len(entries())
    for kind in (_ENTRIES, _FAILED, _STAGING):
        if folder is not None:
            with contextlib.suppress(OSError):
                _remove(folder / kind, folder)
    return count


def say_once(message: str) -> None:
    """However many threads say it."""
    if is_new(_said, message):
        _log.warning("tilewise: %s", message)
