"""The extension: built once for a machine and a release of PyTorch, found again, and trusted.

It is built by the machine's C++ compiler, in half a minute, by a process of its own that the first call or rule that
could use it starts; later processes find it in the cache of built kernels. `tilewise native build` builds it at once,
and a platform wheel (`make wheel-native`) brings it along. Where there is no compiler, no header of Python or no cache
folder, and with `TILEWISE_NATIVE=off`, nothing is missing but speed.

It is machine code, so it is loaded only if the cache vouches for it (jit/cache.py): it lies where no other user can
write, and its digest is the one recorded. What is loaded is a copy in memory of the bytes that were checked, so that
nothing that happens to the file afterwards can hurt. A library that does not pass is built again, with one line in the
log.

None of this can fail a call or a block: where building or loading fails, calls take the path in Python.
One compiler runs at a time for all processes that share a cache folder, and for a limited time. One that failed is not
tried again in the background until the variable CXX, or the compiler itself, is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.resources
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CompileError
from ..jit import cache, trust
from ..jit.nvrtc import interpreter as _interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

SETTING = "TILEWISE_NATIVE"
# Without the variable. "detour" would leave repeated calls to Python: what a GPU has not passed must be asked for
# (tests/gpu_parts.py).
DEFAULT = "on"
_PATIENCE_SECONDS = 300.0  # with a compiler, and with another process that runs one
_LOOK_AGAIN_SECONDS = 1.0
_POLL_SECONDS = 0.05
_COMPILERS = ("c++", "g++", "clang++")
_ARGUMENTS = 8
_LABEL, _LIBRARY, _SAID = "native", "native.so", "build.log"
PREBUILT, _FACTS = "prebuilt", "facts.json"  # in this folder, of a platform wheel
_SOURCES, _HEADERS = ("calls.cpp", "detour.cpp"), ("calls.h",)

# Fewer stubs and tables between functions: after a kernel has had the caches, each is one more line to fetch.
_SHORT_WAYS = ("-fno-plt", "-fvisibility-inlines-hidden", "-fno-semantic-interposition")

_log = logging.getLogger("tilewise")


class Library:
    """The library, loaded. Its functions want the GIL, which a PyDLL keeps."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self._install = _typed(library, "install", text, ctypes.POINTER(text), ctypes.c_int, ctypes.c_int)
        self.begin = _typed(library, "begin", None, ctypes.py_object, ctypes.py_object, ctypes.py_object)
        self._govern = _typed(library, "govern", None, pointer, ctypes.c_int, ctypes.c_int)
        self.move = _typed(library, "move", ctypes.c_int, ctypes.py_object)
        self._counter = _typed(library, "counter", pointer)
        self._remember = _typed(library, "remember", None, pointer)
        self.admit = _typed(library, "admit", None, pointer)
        self.forget = _typed(library, "forget", None, pointer)
        self._take = _typed(library, "take", ctypes.c_int, ctypes.py_object, pointer)
        make = library.tilewise_native_calls
        make.restype, make.argtypes = ctypes.py_object, ()
        self.calls: Any = make()  # the functions of calls.cpp

    def install(self, keys: Sequence[str], *, composite: bool) -> None:
        """Put the kernel in front of PyTorch's for these dispatch keys, for good.

        `composite`: what it passes calls on to is PyTorch's composite, whatever else is registered for a key by now.
        """
        error = self._install((ctypes.c_char_p * len(keys))(*(key.encode() for key in keys)), len(keys), composite)
        if error:
            raise RuntimeError(f"PyTorch's dispatcher refused the compiled kernel: {error.decode()}")

    def govern(self, outside: object | None, blocks: bool, all_to_python: bool) -> None:
        """The rule for threads in no block, whether any thread is in one, and whether Python decides every call."""
        self._govern(None if outside is None else id(outside), blocks, all_to_python)

    def counter(self) -> ctypes.c_int64:
        """A number that calls are counted with; it lives as long as the process."""
        return ctypes.c_int64.from_address(self._counter())

    def remember(self, counter: ctypes.c_int64) -> None:
        """Said while a call is decided: it is left to PyTorch, and those that look the same need not ask again."""
        self._remember(ctypes.addressof(counter))

    def take(self, call: object, counter: ctypes.c_int64) -> None:
        """Likewise: it is taken, and those that look the same are made by what `calls.new_call` gave."""
        self._take(call, ctypes.addressof(counter))


def _typed(library: ctypes.PyDLL, name: str, result: type | None, *arguments: type) -> Any:
    function = getattr(library, f"tilewise_detour_{name}")
    function.restype, function.argtypes = result, arguments
    return function


# ---------------------------------------------------------------------------------------------------------------------
# Finding it


class _Search:
    """What this process knows of the library so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.found: Library | None = None
        self.next_look = 0.0
        self.reported: set[str] = set()  # entries that were found damaged: one log line each
        self.started: set[str] = set()  # attempts to build it
        self.child: subprocess.Popen[bytes] | None = None


_search = _Search()


def is_wanted() -> bool:
    """Whether the user leaves it to us which kernel decides."""
    return os.environ.get(SETTING) != "off"


def answers_calls() -> bool:
    """Whether it is to answer repeated calls too, and not only to pass on what `tilewise.sdpa` leaves."""
    return os.environ.get(SETTING, DEFAULT) == "on"


def loaded() -> Library | None:
    """The library if it is built; else None, and it is being built for those who ask later. Never raises."""
    if not is_wanted():
        return None
    with _search.lock:
        if _search.found is None and time.monotonic() >= _search.next_look:
            _search.next_look = time.monotonic() + _LOOK_AGAIN_SECONDS
            try:
                if _find() is None:
                    _start_if_possible()
            except Exception as error:  # a user's block must not depend on the state of a compiler or of a disk
                _say_once(f"the native extension is not at hand ({_one_line(error)}); it works without")
        return _search.found


def _find() -> Library | None:
    """Load the library from the cache, if it is there and can be trusted."""
    key = _key()
    entry = cache.read(_LABEL, key, [_LIBRARY], report_damage=key not in _search.reported)
    _search.reported.add(key)
    if entry is None and _search.found is None:
        _search.found = _brought_along()
        return _search.found
    if entry is not None and _search.found is None:
        try:
            _search.found = _open(entry.files[_LIBRARY], entry.path / _LIBRARY)
        except (OSError, AttributeError) as error:  # built where other libraries are than here
            _say_once(f"the native extension in {entry.path} does not load ({_one_line(error)}); it is built again")
            return None
    return None if entry is None else _search.found


def _brought_along() -> Library | None:
    """The library that a platform wheel holds, if it is for this Python and this PyTorch, whole, and the user's own."""
    folder = _source(PREBUILT)
    try:
        facts = json.loads(trust.read_trusted(folder / _FACTS))
        if facts["key"] != _portable_key():
            return None
        return _open(trust.read_trusted(folder / _LIBRARY, facts["digest"]), folder / _LIBRARY)
    except FileNotFoundError:
        return None
    except (trust.Untrusted, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _say_once(f"the native extension in {folder} is not used ({_one_line(error)})")
        return None


def _open(content: bytes, path: Path) -> Library:
    """Load these bytes, which are those of `path`; from a copy in memory, where the system has such files."""
    try:
        handle = os.memfd_create(_LIBRARY)
    except (AttributeError, OSError):
        return Library(str(path))
    # The handle stays open, and the name has the thread in it: the loader takes equal names for the same library.
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    name = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/fd/{handle}"
    return Library(name if os.path.exists(name) else str(path))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("tilewise: %s", message)


@functools.cache
def _key() -> str:
    """All that the library is made of."""
    release = (torch.__version__, str(torch.version.git_version), sys.version, platform.machine(), *platform.libc_ver())
    sources = [_source(name).read_text() for name in (*_SOURCES, *_HEADERS)]
    return cache.digest(part.encode() for part in (*sources, *release))


def _portable_key() -> str:
    """What a library that another machine made must agree with: the sources, the ABI of Python and that of PyTorch."""
    abi = (f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine(), torch.__version__)
    sources = [_source(name).read_text() for name in (*_SOURCES, *_HEADERS)]
    return cache.digest(part.encode() for part in (*sources, *abi, str(torch.version.git_version)))


def packed() -> dict[str, bytes]:
    """Build the library if it is not there: the files that a wheel holds of it. Raises CompileError."""
    build()
    entry = cache.read(_LABEL, _key(), [_LIBRARY], report_damage=True)
    if entry is None:
        raise CompileError("The native extension is one that a wheel brought along, and not in the cache.")
    content = entry.files[_LIBRARY]
    facts = {"key": _portable_key(), "digest": trust.digest([content]), "torch": torch.__version__}
    return {_LIBRARY: content, _FACTS: json.dumps(facts, indent=1).encode()}


def status() -> tuple[bool, str]:
    """Whether the library is loaded or ready to be, and in words what it is or what would make it so."""
    if not is_wanted():
        return False, f"switched off by {SETTING}={os.environ[SETTING]}"
    try:
        if _find() is not None:
            return True, "built and ready"
        reason = _why_not()
        if reason is None and _failed_before(_attempt()):
            return False, "the compiler failed on it before: `tilewise native build` tries again and shows what it says"
    except (OSError, ValueError) as error:
        return False, _one_line(error)
    return False, f"not built: {reason}" if reason else "not built yet: `tilewise native build` builds it now"


def _source(name: str) -> Path:
    return Path(str(importlib.resources.files("tilewise.native").joinpath(name)))


# ---------------------------------------------------------------------------------------------------------------------
# Building it


def build() -> None:
    """Build the library now, if it is not there. Raises CompileError with what is in the way."""
    try:
        reason = _why_not() or (None if cache.root() else "there is no cache folder to keep it in")
        if reason:
            raise CompileError(f"The native extension was not built: {reason}. It works without, slower.")
        if _find() is not None:
            return
        with _one_builder(_PATIENCE_SECONDS) as lock:
            if _find() is None:  # who was waited for may have built it
                _build_elsewhere(lock)
                if _find() is None:
                    raise CompileError("The native extension was built, and is not in the cache.")
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"The native extension was not built: {_one_line(error)}") from error


def _start_if_possible() -> None:
    reason = _why_not()
    if reason is None:
        _start()
    elif os.environ.get("CXX"):  # who names a compiler wants to know
        _say_once(f"the native extension is not built: {reason}; it works without, slower")


def _start() -> None:
    """Build in a process that outlives this one; not where that failed before, or where another does it."""
    attempt = _attempt()
    interpreter = _interpreter()
    if attempt in _search.started or interpreter is None or _failed_before(attempt):
        return
    with _one_builder(0.0) as lock:
        if lock is None:
            return
        _search.started.add(attempt)
        quiet = subprocess.DEVNULL
        _search.child = subprocess.Popen(
            _child(interpreter, lock), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, cwd="/",
            env=_child_environment(), pass_fds=(lock,),
        )  # fmt: skip


def _build_elsewhere(lock: int | None) -> None:
    """Build in a process of its own and wait for it, because what a compiler made is tried out there first."""
    interpreter = _interpreter()
    if interpreter is None:
        _build_here(lock)
        return
    done = subprocess.run(
        _child(interpreter, lock), capture_output=True, text=True, check=False, cwd="/", env=_child_environment(),
        timeout=2 * _PATIENCE_SECONDS, stdin=subprocess.DEVNULL, pass_fds=() if lock is None else (lock,),
    )  # fmt: skip
    if done.returncode:
        raise CompileError(done.stderr.strip()[-4000:] or f"The builder ended with exit code {done.returncode}.")


def _child(interpreter: str, lock: int | None) -> list[str]:
    """`_main` in a process that finds the same modules as this one, and none in the current directory."""
    paths = [path for path in sys.path if os.path.isabs(path)]
    source = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path[:] = {[source, *paths]!r}; from tilewise.native import library; "
        f"raise SystemExit(library._main({lock}))"
    )
    return [interpreter, "-c", code]


def _child_environment() -> dict[str, str]:
    return {**os.environ, "TILEWISE_CACHE_DIR": str(cache.root()), "PYTHONSAFEPATH": "1"}


def _main(lock: int | None) -> int:
    try:
        _build_here(lock)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _build_here(lock: int | None = None) -> None:
    """Compile, try the result out, and put it into the cache. Raises CompileError. The compiler holds the lock too."""
    try:
        with tempfile.TemporaryDirectory(prefix="tilewise-native-") as folder:
            library = Path(folder) / _LIBRARY
            failure, said = _compile(library, lock)
            content = library.read_bytes() if not failure else b""
            if not failure and _interpreter() is not None:
                failure = _try_out(library)
    except OSError as error:
        raise CompileError(f"The native extension did not build: {_one_line(error)}") from error
    if failure:
        log = f"{failure}\n{shlex.join(_command())}\n{said}"
        cache.keep_failed(_LABEL, _attempt(), {_SAID: log.encode()})
        raise CompileError(f"The native extension did not build: {log[-4000:]}")
    if cache.write(_LABEL, _key(), {_LIBRARY: content}, {"compiler": shlex.join(_command())}) is None:
        raise CompileError("The native extension was built, but the cache folder does not take it.")


def _compile(library: Path, lock: int | None) -> tuple[str, str]:
    """What went wrong, or nothing, and what the compiler said."""
    with open(library.with_suffix(".log"), "w+b") as said:
        process = subprocess.Popen(
            [*_command(), "-o", str(library)], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True, cwd=library.parent, pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        try:
            code = process.wait(_PATIENCE_SECONDS)
            failure = f"the compiler ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"the compiler did not finish within {_PATIENCE_SECONDS:g} s"
        finally:
            with contextlib.suppress(OSError):  # what a compiler starts outlives it unless it is ended too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    if not failure and not library.is_file():
        failure = "the compiler made nothing"
    return failure, text


def _try_out(library: Path) -> str:
    """What is wrong with a library that was just made, if anything. A process that this ends has built nothing."""
    try:
        Library(str(library))
    except (OSError, AttributeError) as error:
        return f"what the compiler made does not load: {error}"
    return ""


@contextlib.contextmanager
def _one_builder(patience: float) -> Iterator[int | None]:
    """The lock that the process with the compiler holds, as a descriptor to hand on to it; None where it is held.

    It is the system's (flock), so that it lasts as long as the last process that holds the descriptor, and no longer.
    """
    root = cache.root()
    if root is None or fcntl is None:
        yield None
        return
    (root / "locks").mkdir(mode=0o700, exist_ok=True)
    handle = os.open(root / "locks" / f"{_LABEL}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + patience
        while not (held := _try_lock(handle)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        yield handle if held else None
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _attempt() -> str:
    """A name for building this library with this compiler: what failed once fails again under the same name."""
    program = Path(_command()[0])
    status = program.stat()
    version = f"{program.resolve()} {status.st_size} {status.st_mtime_ns}"
    return cache.digest(part.encode() for part in (_key(), version, *_command()))


def _failed_before(attempt: str) -> bool:
    root = cache.root()
    return root is not None and (root / "failed" / f"{_LABEL}.{attempt}" / _SAID).exists()


def _why_not() -> str | None:
    """What keeps this machine from building it."""
    if platform.system() != "Linux":
        return f"it is known to work on Linux, and this is {platform.system()}"
    if len(torch.ops.aten.scaled_dot_product_attention.default._schema.arguments) != _ARGUMENTS:
        return "PyTorch's operator has other arguments than it knows"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it relies on the GIL, and this Python has none"
    try:
        if not _compiler():
            if os.environ.get("CXX"):
                return f"the variable CXX is {os.environ['CXX']!r}, and there is no such program"
            return f"there is no C++ compiler ({', '.join(_COMPILERS)} or the variable CXX)"
    except ValueError as error:
        return f"the variable CXX is {os.environ.get('CXX')!r}, which a shell would not understand ({error})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h is missing; it comes with the package python3-dev"
    return None


def _compiler() -> list[str]:
    """The compiler as CXX has it, with its options, else the first of those that systems have; empty for none.

    Raises ValueError for a CXX that is badly quoted.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for words in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if program := shutil.which(words[0]):
            return [os.path.abspath(program), *words[1:]]
    return []


def _command() -> list[str]:
    """All but where the library goes."""
    torch_root = Path(torch.__file__).parent
    return [
        *_compiler(), "-O2", "-std=c++20", "-shared", "-fPIC", "-w", *_SHORT_WAYS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{torch_root / 'include'}", f"-I{sysconfig.get_paths()['include']}",
        *(str(_source(name)) for name in _SOURCES),
        f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch_python",
    ]  # fmt: skip
