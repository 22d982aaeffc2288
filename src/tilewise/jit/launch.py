"""Loading cubins and launching them, through NVIDIA's own driver bindings.

A `Function` is bound to the primary context of one device, the context PyTorch uses, so launching it can only ever run
on that device. Nothing here synchronises, and a load in the middle of a CUDA graph capture is legal. Handles do not
outlive a fork: a child of a process that used CUDA gets a `DeviceError`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DeviceError
from .compile import build
from .memo import keep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .compile import Kernel, Unit
    from .mirror import Arguments

Dim3 = tuple[int, int, int]

_MAX_STREAMS = 64  # for which a launch keeps its configuration
_MAX_SHAPES = 1024
_FORKED = (
    "this process was forked from one that had used CUDA, and a CUDA context does not survive a fork.\n"
    "  What to do: start workers with the 'spawn' method (multiprocessing.set_start_method('spawn'), or "
    "multiprocessing_context='spawn' in a DataLoader), or use CUDA only after forking."
)

_driver: Any = None
_lock = threading.Lock()
_loaded: dict[tuple[Kernel, int], Function] = {}
_functions: dict[tuple[Unit, int], Function] = {}
_unit_locks: dict[tuple[Unit, int], threading.Lock] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A kernel loaded on one device. `max_dynamic_smem` is the most a launch may ask for, already opted in."""

    kernel: Kernel
    device: int
    handle: Any
    context: Any
    max_dynamic_smem: int


def function_for(unit: Unit, device: int) -> Function:
    """Build `unit` if need be and load it on `device`: once per process, whatever the number of threads."""
    found = _functions.get((unit, device))
    if found is None:
        with _unit_locks.setdefault((unit, device), threading.Lock()):
            found = _functions.get((unit, device)) or load(build(unit), device)
            _functions[unit, device] = found
    return found


def is_loaded(unit: Unit) -> bool:
    """Whether it was built in this process, and loaded on some device."""
    return any(known == unit for known, _ in list(_functions))


def load(kernel: Kernel, device: int) -> Function:
    """Load `kernel` in the primary context of `device` (an index as PyTorch counts them); once per process."""
    found = _loaded.get((kernel, device))
    if found is None:
        cu = driver()
        with _lock:
            found = _loaded.get((kernel, device)) or _load(cu, kernel, device)
            _loaded[kernel, device] = found
    return found


class Launch:
    """A function with the shape of its launch, to be enqueued again and again; threads may share it.

    `cluster` groups blocks; `overlap_previous` lets the kernel start before the one ahead of it in the stream has ended
    (programmatic dependent launch: the kernel must itself wait with `griddepcontrol.wait` before it reads its results).
    """

    __slots__ = ("_configs", "_handle", "_shape", "function")

    def __init__(
        self,
        function: Function,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int,
        *,
        cluster: Dim3 | None = None,
        overlap_previous: bool = False,
    ) -> None:
        self.function, self._handle = function, function.handle
        self._shape = (grid, block, smem_bytes, cluster, overlap_previous)
        self._configs: dict[int, Any] = {}

    def __call__(self, stream: int, arguments: Arguments) -> None:
        """Enqueue on `stream`, the raw handle of a stream of the function's device (0: its default stream).

        Invariant: the common path is one dictionary lookup and one driver call. It does not ask which context is
        current: the driver refuses a function of another context, and only then is the right one made current.
        """
        config = self._configs.get(stream) or self._on(stream)
        (status,) = _driver.cuLaunchKernelEx(config, self._handle, arguments.pointer, 0)
        if status:
            _mend(self.function, config, arguments, status)

    def _on(self, stream: int) -> Any:
        """A launch configuration, kept and never changed, so that threads may share it."""
        return keep(self._configs, stream, _launch_config(stream, *self._shape), _MAX_STREAMS)


def launch(
    function: Function,
    grid: Dim3,
    block: Dim3,
    smem_bytes: int,
    stream: int,
    arguments: Arguments,
    *,
    cluster: Dim3 | None = None,
    overlap_previous: bool = False,
) -> None:
    """Enqueue one launch of any shape. Whoever repeats one on a hot path keeps its `Launch`."""
    _launch_of(function, grid, block, smem_bytes, cluster, overlap_previous)(stream, arguments)


@functools.lru_cache(maxsize=_MAX_SHAPES)
def _launch_of(
    function: Function, grid: Dim3, block: Dim3, smem_bytes: int, cluster: Dim3 | None, overlap_previous: bool
) -> Launch:
    return Launch(function, grid, block, smem_bytes, cluster=cluster, overlap_previous=overlap_previous)


def driver() -> Any:
    """The driver bindings, imported and initialised on first use; DeviceError where there is no driver to talk to."""
    global _driver
    if _driver is None:
        _driver = _start_driver()
    return _driver


def check(answer: tuple[Any, ...], what: str) -> Any:
    """The value in a driver call's answer `(status, value)`, or a DeviceError that says `what` failed."""
    status, *values = answer
    if status:
        raise DeviceError(f"{what} failed: {_describe(status)}.\n  What to do: {_remedy(status)}.")
    return values[0] if values else None


@contextlib.contextmanager
def capture_relaxed(cu: Any) -> Iterator[None]:
    """Let this thread allocate and load although a CUDA graph may be under capture; what it does is not captured."""
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = check(cu.cuThreadExchangeStreamCaptureMode(relaxed), "relaxing the stream capture mode")
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(previous), "restoring the stream capture mode")


def _start_driver() -> Any:
    if torch.cuda._is_in_bad_fork():
        raise DeviceError(f"CUDA kernels cannot run here: {_FORKED}")
    try:
        bindings: Any = importlib.import_module("cuda.bindings.driver")
        answer = bindings.cuInit(0)
    except ImportError as error:
        raise DeviceError(
            f"cuda.bindings, which launches CUDA kernels, cannot be imported: {error}.\n"
            "  What to do: pip install 'tilewise[cuda]', or choose a backend that needs no CUDA."
        ) from error
    except (RuntimeError, OSError) as error:
        raise DeviceError(
            f"the NVIDIA driver cannot be loaded: {str(error).rstrip('.')}.\n"
            "  What to do: run on a machine with an NVIDIA GPU and its driver, or choose a CPU backend."
        ) from error
    check(answer, "starting the NVIDIA driver")
    return bindings


def _load(cu: Any, kernel: Kernel, device: int) -> Function:
    what = f"loading {kernel.name} ({kernel.arch}) on cuda:{device}"
    handle = check(cu.cuDeviceGet(device), what)
    context = check(cu.cuDevicePrimaryCtxRetain(handle), what)
    with _current(cu, context), capture_relaxed(cu):
        module = check(cu.cuModuleLoadData(kernel.cubin), what)
        entry = check(cu.cuModuleGetFunction(module, kernel.name.encode()), what)
        opt_in = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        smem = check(cu.cuDeviceGetAttribute(opt_in, handle), what) - kernel.resources.static_smem_bytes
        max_smem = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(entry, max_smem, smem), what)
    return Function(kernel, device, entry, context, smem)


def adopt_context() -> bool:
    """Give this thread the context of the current device if it has none; whether that was so.

    CUDA's own runtime does it on a thread's first call. An autograd thread may come to us before that.
    """
    cu, what = driver(), "making the device's context current"
    if int(check(cu.cuCtxGetCurrent(), what)):
        return False
    device = check(cu.cuDeviceGet(torch.cuda.current_device()), what)
    check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(device), what)), what)
    return True


@contextlib.contextmanager
def _current(cu: Any, context: Any) -> Iterator[None]:
    check(cu.cuCtxPushCurrent(context), "making the device's context current")
    try:
        yield
    finally:
        check(cu.cuCtxPopCurrent(), "restoring the context")


def _launch_config(
    stream: int, grid: Dim3, block: Dim3, smem_bytes: int, cluster: Dim3 | None, overlap_previous: bool
) -> Any:
    config = _driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    config.hStream = _driver.CUstream(stream)
    attributes = []
    if cluster is not None:
        attributes.append(_attribute("CLUSTER_DIMENSION"))
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = cluster
    if overlap_previous:
        attributes.append(_attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _attribute(name: str) -> Any:
    attribute = _driver.CUlaunchAttribute()
    attribute.id = getattr(_driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute


def _mend(function: Function, config: Any, arguments: Arguments, status: Any) -> None:
    """Launch again with the function's context current if it was not; else say why the launch failed.

    A thread without any context (CUDA's own runtime makes one current on a thread's first call) keeps the new one.
    """
    current = int(check(_driver.cuCtxGetCurrent(), "asking for the current context"))
    if current == 0:
        check(_driver.cuCtxSetCurrent(function.context), "making the device's context current")
        (status,) = _driver.cuLaunchKernelEx(config, function.handle, arguments.pointer, 0)
    elif current != int(function.context):
        with _current(_driver, function.context):
            (status,) = _driver.cuLaunchKernelEx(config, function.handle, arguments.pointer, 0)
    if not status:
        return
    grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
    block = (config.blockDimX, config.blockDimY, config.blockDimZ)
    smem = f"{config.sharedMemBytes} of {function.max_dynamic_smem} bytes of dynamic shared memory"
    raise DeviceError(
        f"launching {function.kernel.name} on cuda:{function.device} failed: {_describe(status)}.\n"
        f"  Launched with grid {grid}, block {block}, {smem}.\n  What to do: {_remedy(status)}."
    )


def refused(what: str, status: int, name: str, grid: int, threads: int, smem: int) -> DeviceError:
    """The error for what native code asked of the driver for a kernel: a "launch", or a "map" of a tensor."""
    try:
        known = driver().CUresult(status)
        said, remedy = _describe(known), _remedy(known)
    except (DeviceError, ValueError):
        said, remedy = f"error {status}", "report it with this message; meanwhile set TILEWISE_NATIVE=off"
    action = "launching" if what == "launch" else "encoding a tensor map for"
    return DeviceError(
        f"{action} {name} failed: {said}.\n"
        f"  Launched with grid {grid}, block {threads}, {smem} bytes of dynamic shared memory.\n"
        f"  What to do: {remedy}."
    )


def _describe(status: Any) -> str:
    _, text = _driver.cuGetErrorString(status) if _driver is not None else (None, None)
    return f"{status.name}, {text.decode()}" if text else str(status.name)


def _remedy(status: Any) -> str:
    match status.name:
        case "CUDA_ERROR_NO_DEVICE" | "CUDA_ERROR_INVALID_DEVICE":
            return "run on a machine with an NVIDIA GPU (or check CUDA_VISIBLE_DEVICES), or choose a CPU backend"
        case "CUDA_ERROR_NO_BINARY_FOR_GPU" | "CUDA_ERROR_INVALID_SOURCE" | "CUDA_ERROR_INVALID_IMAGE":
            return "the kernel was built for another GPU or a newer driver: choose another backend or update the driver"
        case "CUDA_ERROR_OUT_OF_MEMORY":
            return "free GPU memory: torch.cuda.empty_cache(), or other processes on this GPU"
        case "CUDA_ERROR_ILLEGAL_ADDRESS" | "CUDA_ERROR_LAUNCH_FAILED" | "CUDA_ERROR_MISALIGNED_ADDRESS":
            return "an earlier kernel failed and the context is lost: find it with CUDA_LAUNCH_BLOCKING=1, and restart"
        case _:
            return "report it with this message; meanwhile choose another backend"


class _AfterFork:
    """Stands in for the driver in a forked child: whatever is asked of it is refused with the reason."""

    def __getattr__(self, name: str) -> Any:
        raise DeviceError(f"{name}: {_FORKED}")


def _in_forked_child() -> None:
    global _driver, _lock
    _lock = threading.Lock()
    _unit_locks.clear()
    if _driver is not None:
        _driver = _AfterFork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
