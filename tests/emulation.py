"""A GPU for tests: kernels, their real sources and their real host code, on the model in tests/emulator.

`install(monkeypatch)` puts the model in the place of the three things a program asks of the driver: a loaded
kernel, a tensor map and a launch. What it shows: that indices, tiles, masks, barriers and rings are right, for tensors
on a CPU. What it cannot: that the instructions do what the model thinks, registers, and time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tilewise.engine import run
from tilewise.jit import TensorMap, cache, tensormap
from tilewise.jit.compile import KERNELS
from tilewise.jit.headers import included_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tilewise.jit import Arguments, Unit

HERE = Path(__file__).resolve().parent / "emulator"
COMPILER = shutil.which("g++")
_OPTIONS = ("-std=c++20", "-w", "-Wno-psabi", "-fno-gnu-unique", "-fPIC", "-ffp-contract=off")
# Compiling takes most of the time: -Og takes less than -O1 or -O0. runtime.cpp reports an index beyond an array.
_KERNEL_OPTIONS = (*_OPTIONS, "-Og", "-fsanitize=bounds")
_RUNTIME_OPTIONS = (*_OPTIONS, "-O3")
_MODELLED = (
    "common/ptx.cuh",
    "common/terms/bits_ptx.cuh",
    "sm80/float32_ptx.cuh",
    "sm80/overlap_ptx.cuh",
    "sm80/ptx.cuh",
    "sm90/ptx.cuh",
    "sm90/wgmma.cuh",
)
_KERNEL = re.compile(
    r"\n(?:extern \"C\" __global__ void )?(?P<name>\w+)\(const __grid_constant__ (?P<type>[\w:]+) params\)"
)


def emulated(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test on the model: `make test` runs few of its parameters, `make kernel-gates` more, the night the rest."""
    marked: Callable[..., Any] = pytest.mark.skipif(COMPILER is None, reason="needs g++")(pytest.mark.emulated(test))
    return marked


class Loaded(NamedTuple):
    """In the place of a loaded function."""

    unit: Unit
    run: Any
    device: int = 0

    @property
    def handle(self) -> int:
        """Its number among all that native code may launch (`native_calls`)."""
        if self not in _handles:
            _handles.append(self)
        return 1 + _handles.index(self)

    context = 1


_handles: list[Loaded] = []
_one_at_a_time = threading.Lock()  # the model is one machine


class Map:
    """In the place of a tiled map: `at` writes what the model reads."""

    def __init__(self, dtype: torch.dtype, dims: Any, strides: Any, box: Any, **_: Any) -> None:
        assert dtype.itemsize == 2
        assert box[0] == 64
        assert all(stride % 16 == 0 for stride in strides)
        assert all(1 <= side <= 256 for side in box)
        self._dims, self._strides, self._box = dims, strides, box

    @property
    def described(self) -> tuple[Any, ...]:
        return 0, tuple(self._dims), tuple(self._strides), tuple(self._box), 0, 0

    def at(self, address: int) -> TensorMap:
        assert address % 16 == 0
        told = (ctypes.c_longlong * 8)(address, *self._dims, *self._strides)
        encoded = TensorMap()
        ctypes.memmove(ctypes.addressof(encoded), told, 64)
        ctypes.memmove(ctypes.addressof(encoded) + 64, (ctypes.c_int * 2)(*self._box[:2]), 8)
        return encoded


def install(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType = run, *, seed: int = 0, spoil: tuple[str, str] = ("", "")
) -> None:
    """Let the engine, or the rung `module`, run on CPU tensors; `spoil` replaces a piece of the kernels by another."""
    driver = _Driver(seed)
    for asking in (module, run):
        for name, model in {
            "function_for": lambda unit, device: Loaded(unit, _compiled(unit, spoil)),
            "Launch": functools.partial(_Launch, driver),
            "DriverLaunch": functools.partial(_Launch, driver),
            "driver": driver,
            "work_counter": driver.work_counter,
        }.items():
            if hasattr(asking, name):
                monkeypatch.setattr(asking, name, model)
    monkeypatch.setattr(tensormap, "tiled_map", Map)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class NativeDriver:
    """The model in the place of the driver that native code launches by: functions of C, and what was asked of them."""

    NAMES = ("launch", "encode", "is_capturing", "get_context", "set_context", "push_context", "pop_context")

    class Config(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_uint) for name in ("grid", "grid_y", "grid_z", "block", "block_y", "block_z", "smem")),
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.c_void_p),
            ("attribute_count", ctypes.c_uint),
        ]

    def __init__(self, seed: int = 0) -> None:
        pointer, word, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
        self.launched: list[str] = []
        self.encoded: list[int] = []  # addresses
        self.failures: list[int] = []  # what the next launches answer
        self.runs = True  # otherwise kernels are launched, and write nothing
        self.capturing = 0
        self.current: int | None = 1  # the context of every thread
        self._model = _Driver(seed)
        self._room = torch.zeros(64, dtype=torch.int32)
        kinds: dict[str, tuple[Any, ...]] = {
            "launch": (ctypes.POINTER(self.Config), pointer, ctypes.POINTER(pointer), pointer),
            "encode": (pointer, word, number, pointer, *[pointer] * 4, *[word] * 4),
            "is_capturing": (pointer, ctypes.POINTER(word)),
            "get_context": (ctypes.POINTER(pointer),),
            "set_context": (pointer,),
            "push_context": (pointer,),
            "pop_context": (ctypes.POINTER(pointer),),
        }
        self._functions = [ctypes.CFUNCTYPE(word, *kinds[name])(getattr(self, f"_{name}")) for name in self.NAMES]

    @property
    def addresses(self) -> tuple[int, ...]:
        found = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        return tuple(address or 0 for address in found)

    def counter_room(self, device: int) -> tuple[int, int, int]:
        return self._room.data_ptr(), 62, 2

    def _launch(self, config: Any, function: int, pointers: Any, extra: Any) -> int:
        told, loaded = config.contents, _handles[function - 1]
        self.launched.append(loaded.unit.name)
        if self.failures and (status := self.failures.pop(0)):
            return status
        if not self.runs:
            return 0
        message = ctypes.create_string_buffer(256)
        shape = (ctypes.c_int * 8)(told.grid, 1, 1, told.block, 1, 1, told.smem, told.attribute_count)
        with _one_at_a_time:
            failed = loaded.run(pointers[0], shape, 0, message)
        if failed or self._room.any():
            print(f"{loaded.unit.name}: {message.value.decode() or 'leaves its counter of work'}")
            return 999
        return 0

    def _encode(
        self, room: int, dtype: int, rank: int, address: int, dims: int, strides: int, box: int, *others: int
    ) -> int:
        if address % 16:
            return 1
        self.encoded.append(address)
        ctypes.memmove(room, (ctypes.c_longlong * 1)(address), 8)
        ctypes.memmove(room + 8, dims, 8 * rank)
        ctypes.memmove(room + 8 + 8 * rank, strides, 8 * (rank - 1))
        ctypes.memmove(room + 64, box, 8)
        return 0

    def _is_capturing(self, stream: int, answer: Any) -> int:
        answer[0] = self.capturing
        return 0

    def _get_context(self, answer: Any) -> int:
        answer[0] = self.current
        return 0

    def _set_context(self, context: int) -> int:
        self.current = context
        return 0

    def _push_context(self, context: int) -> int:
        return 0

    def _pop_context(self, answer: Any) -> int:
        return 0


def launch(unit: Unit, blocks: int, threads: int, arguments: Arguments, *, seed: int = 0) -> None:
    """One kernel by itself."""
    function = Loaded(unit, _compiled(unit, ("", "")))
    _Driver(seed).launch(function, (blocks, 1, 1), (threads, 1, 1), unit.smem_bytes, 0, arguments)


class _Driver:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counters: list[ctypes.Array[ctypes.c_int]] = []

    def launch(
        self,
        function: Loaded,
        grid: Any,
        block: Any,
        smem: int,
        stream: int,
        arguments: Arguments,
        overlap_previous: bool = False,
    ) -> None:
        assert smem == function.unit.smem_bytes
        message = ctypes.create_string_buffer(256)
        params = ctypes.addressof(arguments.params)
        shape = (ctypes.c_int * 8)(*grid, *block, smem, overlap_previous)
        with _one_at_a_time:
            failed = function.run(params, shape, self._seed, message)
        assert not failed, f"{function.unit.name}: {message.value.decode()}"
        left = [value for counters in self._counters for value in counters if value]
        assert not left, f"{function.unit.name} leaves its counter of work at {left}, and the next launch needs 0"

    def work_counter(self, device: int, stream: int, count: int = 1) -> int:
        """Blocks run one after another here, so the first takes all the work there is to take."""
        self._counters.append((ctypes.c_int * count)())
        return ctypes.addressof(self._counters[-1])


class _Launch:
    def __init__(
        self, driver: _Driver, function: Loaded, grid: Any, block: Any, smem: int, overlap_previous: bool = False
    ) -> None:
        self._driver, self._shape, self._overlap = driver, (function, grid, block, smem), overlap_previous

    def __call__(self, stream: int, arguments: Arguments) -> None:
        self._driver.launch(*self._shape, stream, arguments, self._overlap)


@functools.cache
def _headers(spoil: tuple[str, str]) -> Path:
    """The kernels' folder with the model in the place of what is hardware."""
    folder = _temporary_folder()
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
    for name in _MODELLED:
        shutil.copyfile(HERE / name, folder / name)
    if spoil[0]:
        sources = {path: path.read_text() for path in folder.rglob("*.cuh")}
        if sum(text.count(spoil[0]) for text in sources.values()) != 1:
            raise ValueError(f"not once in the kernels: {spoil[0]}")  # no AssertionError: tests expect those
        for path, text in sources.items():
            path.write_text(text.replace(*spoil))
    return folder


@functools.cache
def _compiled(unit: Unit, spoil: tuple[str, str]) -> Any:
    """The unit as a function of the host: (params, grid, block, shared bytes, overlap; seed, message) -> failed."""
    match = _KERNEL.search(unit.source)
    assert match is not None, unit.source
    # Offsets are asserted with a builtin of NVIDIA's compiler; here they are what ctypes and this compiler agree on.
    source = "\n".join(line for line in unit.source.splitlines() if "__INTADDR__" not in line)
    program = f"""#include "runtime.h"
{source}
extern "C" int run(const void* params, const int* shape, unsigned seed, char* message) try {{
  {match["type"]} given;
  std::memcpy(&given, params, sizeof(given));
  const model::Launch launch{{
      {{shape[0], shape[1], shape[2]}}, {{shape[3], shape[4], shape[5]}}, shape[6], shape[7] != 0}};
  model::body = [&] {{ {match["name"]}(given); }};
  model::products_of = tensor_core::generation({int(re.sub("[^0-9]", "", unit.arch))});
  model::run_grid(launch, seed, model::forgetters);
  return 0;
}} catch (const std::exception& error) {{
  std::snprintf(message, 256, "%s", error.what());
  return 1;
}}
"""
    run = ctypes.CDLL(str(_library(program, _headers(spoil), _runtime()))).run
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p]
    return run


def write_late(place: torch.Tensor, values: torch.Tensor) -> None:
    """Give `place` these values when the next grid first waits for the one before it, as if that had written them."""
    assert place.is_contiguous() and (place.shape, place.dtype) == (values.shape, values.dtype)  # noqa: PT018
    source = values.contiguous()
    write = ctypes.CDLL(str(_runtime())).write_late
    write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong]
    write(place.data_ptr(), source.data_ptr(), source.nbytes)


@functools.cache
def _runtime() -> Path:
    """What all kernels share of the model."""
    return _library((HERE / "runtime.cpp").read_text(), HERE)


@functools.cache
def _precompiled() -> Path:
    """A folder with runtime.h as every kernel includes it, parsed once."""
    folder = _temporary_folder()
    for name in ("runtime.h", "tensor_core.h"):
        shutil.copyfile(HERE / name, folder / name)
    _compile(*_KERNEL_OPTIONS, "-x", "c++-header", str(folder / "runtime.h"))
    return folder


def _library(program: str, folder: Path, runtime: Path | None = None) -> Path:
    """A program and what it includes as a library, which is built once for all processes and all runs of tests."""
    options = _RUNTIME_OPTIONS if runtime is None else _KERNEL_OPTIONS
    digest = hashlib.sha256("\0".join((_compiler_version(), *options, str(runtime), program)).encode())
    for name, content in included_files(program, [folder, HERE]):
        digest.update(f"\0{name}\0".encode() + content)
    library = _kept() / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        os.utime(library)  # in use
        return library
    with tempfile.TemporaryDirectory(dir=_kept()) as made:
        source = Path(made) / "program.cpp"
        source.write_text(program)
        headers, needs = (HERE, []) if runtime is None else (_precompiled(), [str(runtime)])
        _compile(*options, "-c", f"-I{headers}", f"-I{folder}", "-o", f"{source}.o", str(source))
        # By itself: with the options of a sanitizer the compiler would link its library, and the runtime stands for it.
        _compile("-shared", "-o", f"{source}.so", f"{source}.o", *needs)
        Path(f"{source}.so").replace(library)
    return library


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tilewise-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, *arguments], check=True)


@functools.cache
def _compiler_version() -> str:
    assert COMPILER is not None
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


@functools.cache
def _kept() -> Path:
    """Where built libraries lie: beside the cache of kernels. What no run has used for a week goes."""
    root = cache.root()
    if root is None or not os.access(root, os.W_OK):
        return _temporary_folder()
    folder = root / "emulator"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process saw it too
            if path.stat().st_mtime < time.time() - 7 * 24 * 3600:
                path.unlink()
    return folder
