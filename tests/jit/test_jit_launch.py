"""What launching promises before any GPU is involved, on a driver that only keeps a record of what it is asked."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tilewise.errors import DeviceError
from tilewise.jit import Arguments, Kernel, Resources, TensorMap, load, params_struct, tensormap, tiled_map
from tilewise.jit import launch as launching
from tilewise.jit.launch import Launch, launch
from tilewise.jit.tensormap import broken_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Status(int):
    name = "CUDA_SUCCESS"


def failed(name: str, number: int) -> Status:
    status = Status(number)
    status.name = name
    return status


OK = Status(0)
INVALID_CONTEXT = failed("CUDA_ERROR_INVALID_CONTEXT", 201)
GRID, BLOCK = (4, 2, 1), (128, 1, 1)


class Names:
    """Stands for any of the driver's enumerations: a name gives itself."""

    def __getattr__(self, name: str) -> str:
        return name


class RecordingDriver:
    """Answers as the driver does, for devices 0 and 1 with contexts 100 and 101; each thread has a stack of them."""

    CUstreamCaptureMode = CUdevice_attribute = CUfunction_attribute = CUlaunchAttributeID = Names()
    CUstream = int
    CUlaunchConfig = SimpleNamespace

    def __init__(self, current: int) -> None:
        self.calls: list[str] = []
        self.launched: list[tuple[int, int]] = []
        self.capture_mode = "GLOBAL"
        self.configs: list[Any] = []
        self._thread = threading.local()
        self._current = current

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = [self._current] if self._current else []
        stack: list[int] = self._thread.stack
        return stack

    def cuDeviceGet(self, device: int) -> tuple[Status, int]:
        return OK, device

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Status, int]:
        return OK, 100 + device

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Status, int]:
        return OK, 232448

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Status, str]:
        previous, self.capture_mode = self.capture_mode, mode
        return OK, previous

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Status, int]:
        assert self.capture_mode.endswith("RELAXED")
        self.calls.append(f"load {cubin.decode()} in {self.stack[-1]}")
        return OK, self.stack[-1]

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Status, int]:
        return OK, module

    def cuFuncSetAttribute(self, function: int, attribute: str, value: int) -> tuple[Status]:
        self.calls.append(f"{attribute} = {value}")
        return (OK,)

    def cuCtxGetCurrent(self) -> tuple[Status, int]:
        return OK, self.stack[-1] if self.stack else 0

    def cuCtxSetCurrent(self, context: int) -> tuple[Status]:
        self.stack[-1:] = [context]
        return (OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Status]:
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Status, int]:
        return OK, self.stack.pop()

    def cuGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return OK, b"text of the driver"

    def cuLaunchKernelEx(self, config: Any, function: int, pointer: int, extra: int) -> tuple[Status]:
        if not self.stack or self.stack[-1] != function:
            return (INVALID_CONTEXT,)
        if config.sharedMemBytes > 232448:
            return (failed("CUDA_ERROR_INVALID_VALUE", 1),)
        params = ctypes.c_void_p.from_address(pointer).value
        assert params
        self.configs.append(config)
        self.launched.append((function, ctypes.c_int.from_address(params).value))
        return (OK,)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("_loaded", "_functions"):
        monkeypatch.setattr(launching, name, {})
    return monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, current: int) -> RecordingDriver:
    driver = RecordingDriver(current)
    monkeypatch.setattr(launching, "_driver", driver)
    return driver


def kernel(name: str = "copy", static_smem: int = 0) -> Kernel:
    resources = Resources(32, 0, static_smem, 0, 0, 0)
    return Kernel(name, "sm_90a", name, name.encode(), "", resources, None, 0.0, False)


def arguments(value: int) -> Arguments:
    packed = Arguments(params_struct("Params", value=ctypes.c_int))
    packed.params.value = value
    return packed


def test_a_kernel_is_loaded_once_per_device_and_opts_in_to_all_shared_memory(fresh: pytest.MonkeyPatch) -> None:
    driver = use(fresh, current=100)
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda device: load(kernel(static_smem=1024), device), [0, 1] * 20))
    assert len({id(function) for function in loaded}) == 2
    limit = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 231424"
    assert sorted(driver.calls) == sorted(["load copy in 100", limit, "load copy in 101", limit])
    assert {function.max_dynamic_smem for function in loaded} == {231424}
    assert driver.stack == [100]
    assert driver.capture_mode == "GLOBAL"


def test_a_launch_hands_over_its_shape_stream_and_params(fresh: pytest.MonkeyPatch) -> None:
    driver = use(fresh, current=100)
    function = load(kernel(), 0)
    packed = arguments(7)
    launch(function, GRID, BLOCK, 4096, 55, packed)
    packed.params.value = 8
    launch(function, GRID, BLOCK, 4096, 55, packed)
    assert driver.launched == [(100, 7), (100, 8)]
    config, again = driver.configs
    assert config is again
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == GRID
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == BLOCK
    assert (config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs) == (4096, 55, [], 0)


def test_clusters_and_overlap_become_launch_attributes(fresh: pytest.MonkeyPatch) -> None:
    driver = use(fresh, current=100)
    launch(load(kernel(), 0), GRID, BLOCK, 0, 0, arguments(1), cluster=(2, 1, 1), overlap_previous=True)
    (config,) = driver.configs
    cluster, overlap = config.attrs
    size = cluster.value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1)
    assert overlap.value.programmaticStreamSerializationAllowed == 1
    assert config.numAttrs == 2


def test_streams_are_remembered_up_to_a_bound(fresh: pytest.MonkeyPatch) -> None:
    driver = use(fresh, current=100)
    fresh.setattr(launching, "_MAX_STREAMS", 4)
    repeated = Launch(load(kernel(), 0), GRID, BLOCK, 0)
    for stream in [*range(1, 20), 19]:
        repeated(stream, arguments(1))
        assert len(repeated._configs) <= 4
    assert [config.hStream for config in driver.configs] == [*range(1, 20), 19]
    assert driver.configs[-1] is driver.configs[-2]


@pytest.mark.parametrize(("current", "afterwards"), [(101, [101]), (0, [100])], ids=["another device", "no context"])
def test_a_launch_finds_its_device_whatever_is_current(
    fresh: pytest.MonkeyPatch, current: int, afterwards: list[int]
) -> None:
    driver = use(fresh, current)
    launch(load(kernel(), 0), GRID, BLOCK, 0, 0, arguments(3))
    assert driver.launched == [(100, 3)]
    assert driver.stack == afterwards


def test_a_refused_launch_says_what_was_asked_for(fresh: pytest.MonkeyPatch) -> None:
    use(fresh, current=100)
    function = load(kernel(), 0)
    with pytest.raises(DeviceError) as caught:
        launch(function, GRID, BLOCK, 300_000, 0, arguments(1))
    message = str(caught.value)
    assert "launching copy on cuda:0 failed: CUDA_ERROR_INVALID_VALUE, text of the driver" in message
    assert "300000 of 232448 bytes of dynamic shared memory" in message
    assert "What to do" in message


def test_a_bare_machine_gives_a_device_error(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(launching, "_driver", None)
    fresh.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceError, match=r"pip install 'tilewise\[cuda\]'"):
        load(kernel(), 0)


def is_told_about_the_fork(attempt: Callable[[], object]) -> bool:
    with pytest.raises(DeviceError, match="does not survive a fork") as caught:
        attempt()
    return "'spawn'" in str(caught.value)


def launch_after_fork() -> None:
    """Exits with 0 when the forked child is told why it can neither launch nor load."""
    launching._driver = RecordingDriver(current=100)
    function = load(kernel(), 0)
    launch(function, GRID, BLOCK, 0, 0, arguments(1))
    child = os.fork()
    if child == 0:
        told = is_told_about_the_fork(lambda: launch(function, GRID, BLOCK, 0, 0, arguments(1)))
        told = told and is_told_about_the_fork(lambda: load(kernel("other"), 0))
        os._exit(0 if told else 1)
    launch(function, GRID, BLOCK, 0, 0, arguments(2))
    assert launching._driver.launched == [(100, 1), (100, 2)]
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def test_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilewise.jit", "test_jit_launch"])
    process = context.Process(target=launch_after_fork)
    process.start()
    process.join(600)
    assert process.exitcode == 0


# Tensor maps

SHAPE: dict[str, Any] = {"dims": (128, 4096), "strides": (256,), "box": (64, 128), "swizzle": 128}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dims": (128,) * 6, "strides": (256,) * 5, "box": (64,) * 6}, "rank 6"),
        ({"strides": (256, 512)}, "2 strides for rank 2"),
        ({"box": (64,)}, "box of rank 1"),
        ({"address": 0x1008}, "address 0x1008"),
        ({"dims": (128, 0)}, r"dims \(128, 0\)"),
        ({"strides": (250,)}, "multiples of 16 bytes"),
        ({"strides": (2**40,)}, r"2\^40"),
        ({"box": (64, 512)}, "outside 1..256"),
        ({"box": (4, 128)}, "8 bytes, not a multiple of 16"),
        ({"box": (128, 128)}, "256 bytes, over the swizzle span"),
    ],
)
def test_every_broken_rule_is_named(change: dict[str, Any], rule: str) -> None:
    good = {"dtype": torch.bfloat16, "address": 0x1000, **SHAPE}
    assert broken_rules(**good) == []
    with pytest.raises(AssertionError, match=rule):
        assert broken_rules(**{**good, **change}) == []


class Encoder:
    """Writes the address where the driver would write the map; refuses addresses that are not multiples of 16."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def __call__(self, place: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        assert place % 64 == 0
        self.addresses.append(address)
        TensorMap.from_address(place).opaque[0] = address
        return 1 if address % 16 else 0


@pytest.fixture
def encoder(fresh: pytest.MonkeyPatch) -> Iterator[Encoder]:
    driver = use(fresh, current=100)
    for kind in ("CUtensorMapDataType", "CUtensorMapSwizzle", "CUtensorMapL2promotion"):
        fresh.setattr(driver, kind, Numbers(), raising=False)
    encode = Encoder()
    fresh.setattr(tensormap, "_encode_tiled", lambda: encode)
    tiled_map.cache_clear()
    yield encode
    tiled_map.cache_clear()


class Numbers:
    def __getattr__(self, name: str) -> int:
        return len(name)


def test_a_map_is_encoded_once_per_shape_and_address(encoder: Encoder) -> None:
    for _ in range(3):
        for address in (0x1000, 0x2000):
            assert tiled_map(torch.bfloat16, **SHAPE).at(address).opaque[0] == address
    assert encoder.addresses == [0x1000, 0x2000]
    tiled_map(torch.float16, **SHAPE).at(0x1000)
    assert encoder.addresses == [0x1000, 0x2000, 0x1000]


def test_remembered_addresses_are_bounded(encoder: Encoder) -> None:
    shape = tiled_map(torch.bfloat16, **SHAPE)
    for i in range(1000):
        shape.at(16 * i)
        assert len(shape._known) <= 256
    assert shape.at(16 * 999).opaque[0] == 16 * 999
    assert len(encoder.addresses) == 1000


def test_a_refused_map_says_which_rule_it_breaks(encoder: Encoder) -> None:
    with pytest.raises(DeviceError, match="address 0x1008 is not a multiple of 16"):
        tiled_map(torch.bfloat16, **SHAPE).at(0x1008)
    with pytest.raises(DeviceError):
        tiled_map(torch.bfloat16, **SHAPE).at(0x1008)
