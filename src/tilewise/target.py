"""Target: the machine a plan is made for, as a value.

A real device (`Target.of(device)`) or a named one (`Target.named("h200")`), so that a laptop can ask what an H200 would
run. It carries the PyTorch and cuDNN versions too, because PyTorch's own backends accept different problems from
release to release.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from . import memo
from .errors import DeviceError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

_Dtype = torch.dtype
_Device = torch.device
_KB = 1024
_TERA = 1e12

# The cuDNN that each PyTorch release ships with in its CUDA wheels.
_BUNDLED_CUDNN = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}


@dataclass(frozen=True, slots=True)
class Target:
    """Device facts. Rates are peaks from the vendor's data sheets: dense, with float32 accumulation."""

    name: str
    capability: tuple[int, int]  # (0, 0) = not a CUDA device
    sms: int = 0
    smem_per_sm: int = 0
    smem_per_block: int = 0
    registers_per_sm: int = 65536
    l2_bytes: int = 0
    dram_bytes: int = 0
    dram_bytes_per_s: float = 0.0
    clock_hz: float = 0.0
    flops_16bit: float = 0.0
    flops_tf32: float = 0.0
    flops_fp32: float = 0.0
    torch: tuple[int, int] = (0, 0)
    cudnn: int = 0
    has_jit: bool = True  # NVRTC's and the driver's Python bindings are installed; assumed of a named target
    has_triton: bool = True  # likewise Triton

    @property
    def is_cpu(self) -> bool:
        return self.capability == (0, 0)

    @property
    def arch(self) -> str:
        """`sm_90`, or `cpu`."""
        return "cpu" if self.is_cpu else f"sm_{self.capability[0]}{self.capability[1]}"

    def peak_flops(self, dtype: _Dtype) -> float:
        """Fastest exact-enough rate of the matrix units for this dtype; 0 where unknown.

        A float32 product is as accurate when it is made of three products of 16-bit parts.
        """
        if dtype is torch.float32:
            return max(self.flops_fp32, self.flops_16bit / 3)
        return self.flops_16bit if dtype in (torch.bfloat16, torch.float16) else self.flops_fp32

    @classmethod
    def named(cls, name: str, *, torch_version: str | None = None, cudnn: int | None = None) -> Target:
        """A target of the table, by default with the PyTorch that is installed here."""
        key = _BY_ARCH.get(name.strip().lower(), name.strip().lower())
        if key not in TARGETS:
            known = (
                f"one of {', '.join(TARGETS)}, an architecture ({', '.join(_BY_ARCH)}), or a device such as 'cuda:0'"
            )
            raise InvalidInput("target", repr(name), known, "choose one")
        version = _release(torch_version or torch.__version__)
        bundled = 0 if key == "cpu" else _BUNDLED_CUDNN.get(version, max(_BUNDLED_CUDNN.values()))
        return replace(TARGETS[key], torch=version, cudnn=bundled if cudnn is None else cudnn)

    @classmethod
    def of(cls, device: _Device | str) -> Target:
        """The target that a real device is, or that it is taken for (`assumed`)."""
        device = torch.device(device)
        if device.type in _assumed:
            return _assumed[device.type]
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise DeviceError(
                    f"device {device}: this PyTorch sees no CUDA device.\n"
                    f"  What to do: name a target ({', '.join(TARGETS)}) to plan without one."
                )
            index = torch.cuda.current_device() if device.index is None else device.index
            return _cuda_target(index)
        return _cpu_target(device.type)


_assumed: dict[str, Target] = {}


@contextlib.contextmanager
def assumed(target: Target, device_type: str = "cpu") -> Iterator[None]:
    """Inside, devices of a type are taken for this target, by all threads: calls with their tensors are planned for it.

    For programs that put a model of a GPU in the place of its driver, or that compile for a GPU that is not there.
    """
    before = _assumed.get(device_type)
    _assumed[device_type] = target
    memo.invalidate()
    try:
        yield
    finally:
        if before is None:
            del _assumed[device_type]
        else:
            _assumed[device_type] = before
        memo.invalidate()


@cache
def _cpu_target(device_type: str) -> Target:
    """CPU, and any other device type PyTorch has (mps, xpu, meta): no CUDA kernel runs there."""
    return replace(TARGETS["cpu"], name=device_type, torch=_release(torch.__version__), has_triton=_is_there("triton"))


@cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    known = _known(properties.name, (properties.major, properties.minor))
    return replace(
        known,
        name=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        smem_per_sm=getattr(properties, "shared_memory_per_multiprocessor", known.smem_per_sm),
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", known.smem_per_block),
        l2_bytes=getattr(properties, "L2_cache_size", known.l2_bytes),
        dram_bytes=properties.total_memory,
        torch=_release(torch.__version__),
        cudnn=torch.backends.cudnn.version() or 0,
        has_jit=_is_there("cuda.bindings"),
        has_triton=_is_there("triton"),
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def _known(device_name: str, capability: tuple[int, int]) -> Target:
    """Rates by marketing name, else those of the nearest relative in the table, else none."""
    words = device_name.lower().replace("-", " ").split()
    for key, target in TARGETS.items():
        if key.replace("rtx-", "").replace("-", " ") in words and target.capability == capability:
            return target
    return Target(device_name, capability)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


def _row(name: str, capability: tuple[int, int], sms: int, smem_kb: tuple[int, int], l2_mb: float, dram_gb: int,
         dram_tb_s: float, ghz: float, tflops: tuple[float, float, float]) -> Target:  # fmt: skip
    return Target(
        name=name,
        capability=capability,
        sms=sms,
        smem_per_sm=smem_kb[0] * _KB,
        smem_per_block=smem_kb[1] * _KB,
        l2_bytes=int(l2_mb * _KB * _KB),
        dram_bytes=dram_gb * 10**9,
        dram_bytes_per_s=dram_tb_s * _TERA,
        clock_hz=ghz * 1e9,
        flops_16bit=tflops[0] * _TERA,
        flops_tf32=tflops[1] * _TERA,
        flops_fp32=tflops[2] * _TERA,
    )


# Sources, all NVIDIA's: the data sheets of each product (dense rates, with float32 accumulation), the architecture
# white papers (Ampere GA102, Ada, Hopper, RTX Blackwell) for multiprocessors, clocks and L2, and the CUDA C++
# Programming Guide's table of compute capabilities for shared memory. h20, whose data sheet is not public: as its
# vendors print it. b200 and gb200: the HGX B200 and GB200 NVL72 tables, per GPU; L2 as the driver reports it.
# fmt: off
#                        name         cc       SMs  smem SM, block  L2 MB  GB   TB/s   GHz    16-bit, tf32, fp32 TFLOP/s
TARGETS: dict[str, Target] = {row.name: row for row in (
    _row("h200",      (9, 0), 132, (228, 227), 60.0, 141, 4.800, 1.980, (989.5, 494.7, 66.9)),
    _row("b200",     (10, 0), 148, (228, 227), 126.0, 180, 7.700, 1.965, (2250.0, 1125.0, 75.0)),
    _row("gb200",    (10, 0), 152, (228, 227), 126.0, 186, 8.000, 2.062, (2500.0, 1250.0, 80.0)),
    _row("rtx-5090", (12, 0), 170, (100,  99), 96.0,  32, 1.792, 2.407, (209.5, 104.8, 104.8)),
    _row("h20",       (9, 0),  78, (228, 227), 60.0,  96, 4.000, 1.980, (148.0,  74.0, 44.0)),
    _row("h100",      (9, 0), 132, (228, 227), 50.0,  80, 3.350, 1.980, (989.5, 494.7, 66.9)),
    _row("a100",      (8, 0), 108, (164, 163), 40.0,  80, 2.039, 1.410, (312.0, 156.0, 19.5)),
    _row("rtx-a6000", (8, 6),  84, (100,  99),  6.0,  48, 0.768, 1.800, (154.8,  77.4, 38.7)),
    _row("rtx-4090",  (8, 9), 128, (100,  99), 72.0,  24, 1.008, 2.520, (165.2,  82.6, 82.6)),
    _row("l40s",      (8, 9), 142, (100,  99), 96.0,  48, 0.864, 2.520, (362.1, 183.0, 91.6)),
    _row("a10",       (8, 6),  72, (100,  99),  6.0,  24, 0.600, 1.695, (125.0,  62.5, 31.2)),
    _row("l4",        (8, 9),  58, (100,  99), 48.0,  24, 0.300, 2.040, (121.0,  60.5, 30.3)),
    _row("t4",        (7, 5),  40, ( 64,  64),  4.0,  16, 0.320, 1.590, ( 65.1,   0.0,  8.1)),
    Target("cpu", (0, 0)),
)}
# fmt: on

# An architecture stands for the GPU of it that is most in use.
_BY_ARCH = {
    "sm_75": "t4", "sm_80": "a100", "sm_86": "rtx-a6000", "sm_89": "l40s", "sm_90": "h200", "sm_90a": "h200",
    "sm_100": "b200", "sm_120": "rtx-5090",
}  # fmt: skip
