"""The override's kernel compiled, detour.cpp, for machines that have a C++ compiler.

PyTorch takes 2 to 4 us to go through a kernel in Python; through this one it takes a few tenths. It is built once for a
machine and a release of PyTorch, in some 10 s, by a process of its own that the first rule in force starts; rules that
come into force later find it in the cache folder. Where there is no compiler, no header of Python or no cache folder,
and with `TILEWISE_DETOUR=python`, nothing is missing but that speed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CompileError
from ..jit import cache

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTING = "TILEWISE_DETOUR"
_PATIENCE_SECONDS = 300.0
_COMPILERS = ("c++", "g++", "clang++")
_ARGUMENTS = 8


class Detour:
    """The library, loaded. Its functions want the GIL, which a PyDLL keeps."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self._install = _typed(library, "install", text, ctypes.POINTER(text), ctypes.c_int, ctypes.c_int)
        self.begin = _typed(library, "begin", None, ctypes.py_object, ctypes.py_object, ctypes.py_object)
        self._govern = _typed(library, "govern", None, pointer, ctypes.c_int, ctypes.c_int)
        self._counter = _typed(library, "counter", pointer)
        self._remember = _typed(library, "remember", None, pointer)
        self.admit = _typed(library, "admit", None, pointer)
        self.forget = _typed(library, "forget", None, pointer)

    def install(self, keys: Sequence[str], *, composite: bool) -> None:
        """Put the kernel in front of PyTorch's for these dispatch keys, for good.

        `composite`: what it passes calls on to is PyTorch's composite, whatever else is registered for a key by now.
        """
        error = self._install((ctypes.c_char_p * len(keys))(*(key.encode() for key in keys)), len(keys), composite)
        if error:
            raise RuntimeError(f"PyTorch's dispatcher refused the compiled detour: {error.decode()}")

    def govern(self, outside: object | None, blocks: bool, all_to_python: bool) -> None:
        """The rule for whoever is in no block, whether anybody is in one, and whether Python decides every call."""
        self._govern(None if outside is None else id(outside), blocks, all_to_python)

    def counter(self) -> ctypes.c_int64:
        """A number that calls are counted with; it lives as long as the process."""
        return ctypes.c_int64.from_address(self._counter())

    def remember(self, counter: ctypes.c_int64) -> None:
        """Said while a call is decided: it is left to PyTorch, and those that look the same need not ask again."""
        self._remember(ctypes.addressof(counter))


def _typed(library: ctypes.PyDLL, name: str, result: type | None, *arguments: type) -> Any:
    function = getattr(library, f"tilewise_detour_{name}")
    function.restype, function.argtypes = result, arguments
    return function


_loaded: Detour | None = None


def is_wanted() -> bool:
    """Whether the user leaves it to us which kernel decides."""
    return os.environ.get(SETTING) != "python"


def loaded() -> Detour | None:
    """The library if it is built; else None, and it is being built for those who ask later."""
    global _loaded
    if not is_wanted():
        return None
    if _loaded is None:
        path = _path()
        if path is not None and path.exists():
            _loaded = _load(path)
        elif path is not None and _why_not() is None:
            _start(path)
    return _loaded


def _load(path: Path) -> Detour | None:
    try:
        return Detour(path)
    except (OSError, AttributeError):  # built for something else than its name says: do without
        return None


def build() -> None:
    """Build the library now, if it is not there. Raises CompileError with what is in the way."""
    path = _path()
    reason = _why_not() or (None if path is not None else "there is no cache folder to keep it in")
    if reason or path is None:
        raise CompileError(f"The compiled detour of tilewise.sdpa was not built: {reason}. It works without, slower.")
    if path.exists():
        return
    try:
        done = subprocess.run(_command(path), timeout=_PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"The compiler of the compiled detour did not finish: {error}") from error
    if done.returncode:
        raise CompileError(f"The compiled detour of tilewise.sdpa did not build:\n{_log(path).read_text()[-4000:]}")


def _start(path: Path) -> None:
    """Build in a process that outlives this one; not where that failed before."""
    global _started
    if not (_started or _log(path).exists()):
        _started = True
        quiet = subprocess.DEVNULL
        subprocess.Popen(_command(path), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


_started = False


def _why_not() -> str | None:
    """What keeps this machine from building it."""
    if platform.system() != "Linux":
        return f"it is known to work on Linux, and this is {platform.system()}"
    if len(torch.ops.aten.scaled_dot_product_attention.default._schema.arguments) != _ARGUMENTS:
        return "PyTorch's operator has other arguments than it knows"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it relies on the GIL, and this Python has none"
    if _compiler() is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)} or the variable CXX)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h is missing; it comes with the package python3-dev"
    return None


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    if chosen:
        return chosen
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _source() -> Path:
    return Path(str(importlib.resources.files("tilewise.integrations").joinpath("detour.cpp")))


def _path() -> Path | None:
    """Where the library is, or will be; named after all that it is made of."""
    root = cache.root()
    return None if root is None else root / f"detour-{_key()[:20]}.so"


@functools.cache
def _key() -> str:
    release = (torch.__version__, str(torch.version.git_version), sys.version, platform.machine())
    return cache.digest(part.encode() for part in (_source().read_text(), *release))


def _log(path: Path) -> Path:
    """What the compiler said; there only if it failed."""
    return path.with_suffix(".log")


# Compiles beside the final place and moves the result there, so that nobody loads half of it.
_SCRIPT = """
staged=$1 library=$2 log=$3; shift 3
if "$@" -o "$staged" 2> "$staged.log"; then mv -f "$staged" "$library"; rm -f "$staged.log" "$log"
else mv -f "$staged.log" "$log"; rm -f "$staged"; exit 1; fi
"""


def _command(path: Path) -> list[str]:
    torch_root = Path(torch.__file__).parent
    compile_it = [
        *shlex.split(_compiler() or "c++"), "-O2", "-std=c++20", "-shared", "-fPIC", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{torch_root / 'include'}", f"-I{sysconfig.get_paths()['include']}", str(_source()),
        f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    return ["sh", "-c", _SCRIPT, "sh", f"{path}.{os.getpid()}", str(path), str(_log(path)), *compile_it]
