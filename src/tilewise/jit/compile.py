"""From a generated translation unit to a cubin: NVRTC, the disk cache, and the gates a kernel must pass.

A unit is an `#include` of a header in `tilewise/kernels`, a `constexpr Config` literal and one `extern "C"` kernel.
Building needs no GPU, no CUDA toolkit and no C++ compiler: NVRTC comes as a Python wheel.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import logging
import os
import re
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompileError
from . import cache, nvrtc, trust
from .headers import cuda_include_dirs, included_files
from .ptxas import Resources, broken_gates, parse_resources

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
NOTICE_AFTER_SECONDS = 1.0
_ENTRY_FORMAT = b"2"
_SOURCE, _CUBIN, _LOG, _PTX = "kernel.cu", "kernel.cubin", "build.log", "kernel.ptx"
_REINSTALL = "What to do: reinstall NVRTC: pip install 'tilewise[cuda]'."

LONGEST_NAME = 128  # of a kernel, which files and folders are named after

_logger = logging.getLogger("tilewise")


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: the C++ `source` of the kernel `name`, for one `arch` such as `sm_90a`.

    `strict` units must pass the gates (no spills, no local memory, no serialised wgmma, no ignored setmaxnreg); a debug
    build that prints or counts may set it to False. `smem_bytes` is the dynamic shared memory its launches ask for; it
    does not enter the build.
    """

    name: str
    source: str
    arch: str
    options: tuple[str, ...] = ()
    strict: bool = True
    smem_bytes: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII) or len(self.name) > LONGEST_NAME:
            raise ValueError(f"Unit.name: {self.name!r} is not a C++ identifier of at most {LONGEST_NAME} characters")
        if not re.fullmatch(r"sm_\d{2,3}[af]?", self.arch):
            raise ValueError(f"Unit.arch: {self.arch!r} is not of the form sm_90a")

    @property
    def label(self) -> str:
        """How files and folders of this unit are named."""
        return f"{self.name}.{self.arch}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A built kernel. Two are equal when they were built from the same sources, options, compiler and arch (`key`)."""

    name: str
    arch: str
    key: str
    cubin: bytes = field(compare=False, repr=False)
    log: str = field(compare=False, repr=False)
    resources: Resources = field(compare=False)
    source_path: Path | None = field(compare=False)
    seconds: float = field(compare=False)
    from_cache: bool = field(compare=False)


def build(unit: Unit, *, include_root: Path = KERNELS, announce: bool = True) -> Kernel:
    """The kernel of `unit`, from the cache or freshly compiled; CompileError if it does not build or breaks a gate.

    Safe from many threads and processes at once: one of them compiles, the others wait for its entry. A build that
    takes over a second says so in one log line, unless `announce` is False.
    """
    key = build_key(unit, include_root)
    kernel = _cached(unit, key, report_damage=False)
    if kernel is None:
        with notice(f"{unit.name} for {unit.arch}") if announce else contextlib.nullcontext(), cache.lock(key):
            kernel = _cached(unit, key, report_damage=True) or _compile(unit, key, include_root)
    if unit.strict:
        _hold_to_gates(kernel)
    return kernel


def build_all(units: Iterable[Unit], *, workers: int | None = None) -> Iterator[tuple[Unit, Kernel | CompileError]]:
    """Build many units side by side; yields each with its kernel, or the error it met, as it finishes.

    All but one at a time are compiled in processes of their own (jit/nvrtc.py).
    """

    def attempt(unit: Unit) -> tuple[Unit, Kernel | CompileError]:
        try:
            return unit, build(unit, announce=False)
        except CompileError as error:
            return unit, error

    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for done in concurrent.futures.as_completed([pool.submit(attempt, unit) for unit in units]):
            yield done.result()


def build_key(unit: Unit, include_root: Path = KERNELS) -> str:
    """A digest of all that decides the cubin: source, every header it reaches, options, arch and compiler version."""
    parts = [_ENTRY_FORMAT, unit.name.encode(), unit.source.encode(), unit.arch.encode(), nvrtc_version().encode()]
    parts += [option.encode() for option in _options(unit)]
    for name, content in included_files(unit.source, [include_root, *cuda_include_dirs()]):
        parts += [name.encode(), content]
    return trust.digest(parts)


def nvrtc_version() -> str:
    """Version of the loaded NVRTC as `major.minor`."""
    bindings = _nvrtc()
    try:
        major, minor = nvrtc.version(bindings)
    except RuntimeError as error:
        raise CompileError(f"{error}.\n  {_REINSTALL}") from error
    return f"{major}.{minor}"


def _nvrtc() -> Any:
    """The NVRTC bindings, imported on first use so that `import tilewise` needs no CUDA package."""
    try:
        bindings: Any = importlib.import_module("cuda.bindings.nvrtc")
        bindings.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompileError(
            f"NVRTC, the compiler of CUDA kernels, cannot be loaded: {str(error).rstrip('.')}.\n"
            "  What to do: pip install 'tilewise[cuda]', or choose a backend that needs no compiler."
        ) from error
    return bindings


def _options(unit: Unit) -> list[str]:
    """Every compiler option but the include paths, whose contents count, not their places."""
    # Why: -lineinfo costs nothing at run time and lets profilers and assembler errors name source lines; --no-cache,
    # because NVRTC answers a repeated build from a memory of its own, without the assembler's log that the gates read.
    # It has that memory, and the option, since 12.9.
    fixed = ["--std=c++20", "-lineinfo", "--no-cache", "--ptxas-options=-v"]
    if tuple(map(int, nvrtc_version().split("."))) < (12, 9):
        fixed.remove("--no-cache")
    return [f"--gpu-architecture={unit.arch}", *fixed, *unit.options]


def _cached(unit: Unit, key: str, *, report_damage: bool) -> Kernel | None:
    entry = cache.read(unit.label, key, (_SOURCE, _CUBIN, _LOG), report_damage=report_damage)
    if entry is None:
        return None
    try:
        log = entry.files[_LOG].decode()
        return Kernel(
            name=unit.name,
            arch=unit.arch,
            key=key,
            cubin=entry.files[_CUBIN],
            log=log,
            resources=parse_resources(log, unit.name),
            source_path=entry.path / _SOURCE,
            seconds=float(entry.facts["seconds"]),
            from_cache=True,
        )
    except (ValueError, KeyError, TypeError) as error:  # of an entry without our seal
        if report_damage:
            cache.say_damaged(entry.path, str(error))
        return None


def _compile(unit: Unit, key: str, include_root: Path) -> Kernel:
    start = time.perf_counter()
    cubin, log = _run_nvrtc(unit.source, _options(unit), include_root, "CUBIN")
    seconds = time.perf_counter() - start
    if not cubin:
        raise _compile_error(unit, key, include_root, log)
    try:
        resources = parse_resources(log, unit.name)
    except ValueError as error:
        raise CompileError(f'{unit.name} for {unit.arch}: {error}. Is the kernel `extern "C"`?') from error
    files = {_SOURCE: unit.source.encode(), _CUBIN: cubin, _LOG: log.encode()}
    facts = {
        "name": unit.name,
        "arch": unit.arch,
        "options": _options(unit),
        "nvrtc": nvrtc_version(),
        "seconds": round(seconds, 3),
        "resources": asdict(resources),
    }
    place = cache.write(unit.label, key, files, facts)
    return Kernel(
        name=unit.name,
        arch=unit.arch,
        key=key,
        cubin=cubin,
        log=log,
        resources=resources,
        source_path=place / _SOURCE if place else None,
        seconds=seconds,
        from_cache=False,
    )


def _run_nvrtc(source: str, options: list[str], include_root: Path, product: str) -> tuple[bytes, str]:
    """Compile and return the product ("CUBIN" or "PTX"; empty on failure) and the log. Releases the GIL.

    The source goes by a name inside `include_root`, else the compiler would look for headers in the working directory.
    """
    bindings = _nvrtc()
    path = f"{include_root}{os.sep}{_SOURCE}"
    options = [*options, *(f"--include-path={folder}" for folder in (include_root, *cuda_include_dirs()))]
    try:
        answer = nvrtc.run(bindings, nvrtc.Program(source, path, options, product))
    except RuntimeError as error:
        raise CompileError(f"{error}.\n  {_REINSTALL}") from error
    log = answer.log.rstrip(b"\0 \n").decode().replace(path, _SOURCE)
    if answer.status:
        return b"", log or f"error: NVRTC answered {answer.status} to {' '.join(options)}"
    return answer.product, log


def _compile_error(unit: Unit, key: str, include_root: Path, log: str) -> CompileError:
    """The first error with its source line, and where source and log are kept."""
    kept = {_SOURCE: unit.source.encode(), _LOG: log.encode()}
    message = _first_error(log)
    if line := re.search(r"ptx input, line (\d+)", message):
        virtual = unit.arch.replace("sm_", "compute_")
        options = [option.replace(f"={unit.arch}", f"={virtual}") for option in _options(unit)]
        options = [option for option in options if not option.startswith("--ptxas-options")]
        ptx, _ = _run_nvrtc(unit.source, options, include_root, "PTX")
        kept[_PTX] = ptx.rstrip(b"\0")
        message += _ptx_line(ptx.decode(), int(line[1]))
    place = cache.keep_failed(unit.label, key, kept)
    return CompileError(
        f"{unit.name} for {unit.arch} does not compile with NVRTC {nvrtc_version()}:\n{message}\n"
        f"  Source and full log: {place or 'could not be kept (no writable folder)'}\n"
        "  What to do: if this kernel came with tilewise, report it with those files; meanwhile choose another backend."
    )


def _first_error(log: str) -> str:
    """The first error of a compiler log, with the source line and the caret below it."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"\b(error|fatal)\b", line)), 0)
    block = lines[first : first + 1]
    for line in lines[first + 1 :]:
        if not line.startswith(" "):
            break
        block.append(line)
    return "\n".join(f"  {line}" for line in block)


def _ptx_line(ptx: str, number: int) -> str:
    """Line `number` of the PTX, and the C++ line it came from as the nearest `.loc` above it tells."""
    lines = ptx.splitlines()
    if not 0 < number <= len(lines):
        return ""
    text = f"\n      {lines[number - 1].strip()}"
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.MULTILINE))
    for line in reversed(lines[:number]):
        if loc := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            path = Path(files.get(loc[1], _SOURCE))
            return f"{text}\n      from {_SOURCE if path.name == _SOURCE else path}({loc[2]})"
    return text


def _hold_to_gates(kernel: Kernel) -> None:
    if broken := broken_gates(kernel.log):
        reasons = "\n".join(f"  {gate}" for gate in broken)
        log_path = kernel.source_path.with_name(_LOG) if kernel.source_path else "not kept"
        raise CompileError(
            f"{kernel.name} for {kernel.arch} builds, but would run slowly:\n{reasons}\n  Full log: {log_path}\n"
            "  What to do: choose another backend; if you work on the kernel, a smaller tile, or strict=False to debug."
        )


@contextlib.contextmanager
def notice(what: str) -> Iterator[None]:
    """Say what goes on if the body takes over a second; as a warning, since those show without any logging set up."""
    message = "tilewise: building %s (first use; cached afterwards)"
    timer = threading.Timer(NOTICE_AFTER_SECONDS, _logger.warning, (message, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
