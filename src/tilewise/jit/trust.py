"""What is loaded is ours: code and tables are taken only from places that the user and root alone can write to.

A folder counts if it belongs to the user or to root and no other user may write to it, or replace it through
a folder above it or a link on the way. A file counts if the same holds for it, and if its content has the digest that
was recorded when it was made. Files are judged by their open descriptor, so what was judged is what is read.

Where the operating system knows no owners, as on Windows, only digests count.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Reason

try:
    import grp
    import pwd
except ImportError:
    grp = pwd = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAX_LINKS = 40  # as the kernel follows them
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class Untrusted(PermissionError):
    """A file or folder that is there, and must not be used. Its `reason` says why, and what would help."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason

    def __str__(self) -> str:
        return str(self.reason)


def digest(parts: Iterable[bytes]) -> str:
    """sha256 over the parts and their lengths, so that no two lists of parts run together into the same digest."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Places


def cache_root() -> Path | None:
    """Where the cache folder is or would be, as an absolute path; None when there is no home folder and no setting."""
    if chosen := os.environ.get("TILEWISE_CACHE_DIR"):
        return absolute(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        root = absolute(xdg)
        return None if root is None else root / "tilewise"
    root = absolute("~/.cache")
    return None if root is None else root / "tilewise"


_settled: dict[str, Path] = {}  # relative settings, as they were understood when they were first used


def absolute(setting: str) -> Path | None:
    """A folder as a user writes it: `~` is expanded, and a relative path means the same after a change of directory.

    None when it names a home folder that is not known, or when the current directory is gone.
    """
    expanded = os.path.expanduser(setting)
    if expanded.startswith("~"):
        return None
    if os.path.isabs(expanded):
        return Path(expanded)
    try:
        return _settled.setdefault(setting, Path.cwd() / expanded)
    except OSError:
        return None


def trusted_folder(path: Path) -> Reason | None:
    """What is wrong with this folder; None if what lies in it may be looked at. It is not made here.

    It may lie behind links of the user's or of root's. Who owns the folders above it does not matter: what their
    owners could put in its place would belong to them, and be refused for that.
    """
    try:
        _judge(path, want_folder=True)
    except Untrusted as refusal:
        return refusal.reason
    except OSError as error:
        return Reason(f"{path}: {error.strerror or error}", "name a folder that can be used")
    return None


def read_trusted(path: Path, expected_digest: str | None = None) -> bytes:
    """The content of a file that only the user, or root, can have written.

    Raises Untrusted for any other file, and for one whose `digest([content])` is not the expected one; and OSError, as
    open does, for one that is not there or cannot be read.
    """
    real = _judge(path, want_folder=False)
    descriptor = os.open(real, _OPEN_FLAGS)
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor), want_folder=False)
        content = file.read()
    if expected_digest is not None and digest([content]) != expected_digest:
        raise Untrusted(Reason(f"{path} does not match its digest", "remove it; it is made again"))
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def _judge(path: Path, *, want_folder: bool) -> Path:
    """The real path of a trusted file or folder. Raises Untrusted, or OSError for what is not there."""
    here = Path(os.path.abspath(path)) if not path.is_absolute() else path
    steps = list(_steps(here))
    for step, status in steps[:-1]:
        _check_way(step, status)
    last, status = steps[-1]
    _check(last, status, want_folder=want_folder)
    return last


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All that is passed on the way to an absolute path, with the links that are followed; last, what is there."""
    here, links = Path(path.anchor), 0
    pending = list(reversed(path.parts))
    while pending:
        part = pending.pop()
        here = here.parent if part == ".." else here / part
        status = os.lstat(here)
        yield here, status
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            pending.extend(reversed(Path(os.readlink(here)).parts))
            here = here.parent


def _check_way(path: Path, status: os.stat_result) -> None:
    """A folder or a link that leads to what is judged: no other user may be able to replace it."""
    if not hasattr(os, "geteuid"):
        return
    if stat.S_ISLNK(status.st_mode):
        if not _is_ours(status):
            raise Untrusted(
                Reason(f"{path} is a link of another user (uid {status.st_uid})", "name the place it leads to")
            )
        return
    others = status.st_mode & _WRITABLE_BY_OTHERS
    if others == stat.S_IWGRP and _is_private_group(status.st_gid):
        return
    if others and not status.st_mode & stat.S_ISVTX:  # in a sticky folder, like /tmp, one replaces only one's own
        raise Untrusted(
            Reason(
                f"others may write to {path}, which leads there (mode {_mode(status)})",
                f"chmod go-w {path}, or use a folder elsewhere",
            )
        )


def _check(path: Path, status: os.stat_result, *, want_folder: bool) -> None:
    """Raise unless the file or folder itself is safe."""
    kind = stat.S_ISDIR if want_folder else stat.S_ISREG
    if not kind(status.st_mode):
        raise Untrusted(Reason(f"{path} is not a {'folder' if want_folder else 'file'}", "remove it"))
    if not hasattr(os, "geteuid"):
        return
    if not _is_ours(status):
        raise Untrusted(Reason(f"{path} belongs to another user (uid {status.st_uid})", "remove it, or use another"))
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise Untrusted(
            Reason(
                f"others may write to {path} (mode {_mode(status)})",
                "remove it, for they may have; it is made again for you alone",
            )
        )


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _is_private_group(group: int) -> bool:
    """The group that some systems make for each user alone, and let write to the user's own folders."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (AttributeError, KeyError):
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
