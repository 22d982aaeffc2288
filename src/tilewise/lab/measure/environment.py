"""The machine and the software on it: what a bug report needs, and what every result file carries."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ...native import library
from ..candidates import override
from ..processes import code_command
from ..processes import variables as process_variables

_PACKAGES = (
    "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "flash-attn", "fa3-fwd",
    "flash-attn-4", "nvidia-cutlass-dsl", "numpy",
)  # fmt: skip
_PREFIXES = ("TILEWISE_", "TORCH_CUDNN_SDPA", "TORCH_LOGS", "ONEDNN_", "OMP_", "MKL_", "GOMP_", "CUDA_", "NVIDIA_TF32")
_PACKAGE = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 60.0  # for a tool, on a machine that may have much else to do
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")


def facts() -> dict[str, Any]:
    """Everything `tilewise env` shows, by topic."""
    return {
        "versions": versions(),
        "machine": machine(),
        "gpus": gpus(),
        "kernel cache": kernel_cache(),
        "repeated calls": repeated_calls(),
        "variables": variables(),
        "scaled_dot_product_attention": sdpa_state() | {"effective order": effective_order()},
    }


_IMPORT_CLOCK = (
    "import time; start = time.perf_counter(); import torch; middle = time.perf_counter(); import tilewise; "
    "print(middle - start, time.perf_counter() - middle)"
)


def import_seconds(runs: int = 3) -> dict[str, float]:
    """What `import torch` costs in a fresh process, and what `import tilewise` adds to it: the best of a few runs."""
    clocked = [
        run.split() for _ in range(runs) if (run := _output(*code_command(_IMPORT_CLOCK), env=process_variables()))
    ]
    names = ("torch", "tilewise") if clocked else ()
    return {name: min(float(run[i]) for run in clocked) for i, name in enumerate(names)}


def provenance(seed: int, command: list[str]) -> dict[str, Any]:
    """Where a measurement comes from: enough to repeat it, and to distrust it."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        "source": source(),
        "versions": versions(),
        "machine": machine(),
        "gpus": gpus(),
        "variables": variables(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "tilewise": _tilewise_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _tilewise_version() -> str:
    from ... import __version__  # noqa: PLC0415  (the package is still importing us when this module loads)

    return __version__


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "memory": _memory(),
    }


def gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    told = _nvidia_smi()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = {
            "name": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        }
        found.append(gpu | (told[index] if len(told) == torch.cuda.device_count() else {}))
    return found


def _nvidia_smi() -> list[dict[str, str]]:
    """Driver, clocks, power limit and temperature per GPU; nothing where the tool is missing."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in text.splitlines()]
    return [dict(zip(_SMI_FIELDS, row, strict=True)) for row in rows if len(row) == len(_SMI_FIELDS)]


def kernel_cache() -> dict[str, Any]:
    try:
        from ...jit import cache  # noqa: PLC0415  (a part of the package that may lack what it needs)
    except ImportError as error:
        return {"location": None, "why": str(error)}
    entries = cache.entries()
    return {"location": str(cache.location()), "entries": len(entries), "bytes": cache.size()}


def repeated_calls() -> dict[str, str]:
    """Which way calls go that came before, and how to get the other."""
    ready, words = library.status()
    if ready and not library.answers_calls():
        return {"path": "Python", "extension": words, "the other": f"{library.SETTING}=on"}
    if ready and torch.cuda.is_available():
        return {"path": "native", "extension": words, "the other": f"{library.SETTING}=off"}
    return {"path": "Python", "extension": f"{words}, but there is no NVIDIA GPU" if ready else words}


def variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def sdpa_state() -> dict[str, Any]:
    cuda = torch.backends.cuda
    order = torch._C._get_sdp_priority_order()
    names = {int(backend.value): name.lower() for name, backend in SDPBackend.__members__.items()}
    return {
        "priority": [names.get(number, str(number)) for number in order],
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "fp16/bf16 sums in math": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def effective_order() -> list[str]:
    """PyTorch's kernels in the order it prefers them here, for a small problem that all of them take."""
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    q = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
    return override.effective_order((q, q, q, None, 0.0, False, None, False))


def source() -> dict[str, Any]:
    """The commit of a checkout and whether it was changed since; None for an installed package."""
    if not _output("git", "-C", str(_PACKAGE), "ls-files", "__init__.py"):
        return {"commit": None, "dirty": None}
    commit = _output("git", "-C", str(_PACKAGE), "rev-parse", "HEAD")
    dirty = bool(_output("git", "-C", str(_PACKAGE), "status", "--porcelain"))
    return {"commit": commit or None, "dirty": dirty}


def device_line(device: str) -> str:
    """The device in words, for the head of a table."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).name
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str | None:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return None


def _output(*command: str, env: dict[str, str] | None = None) -> str:
    """What a tool prints; empty if it is missing, fails or takes long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def command_line() -> list[str]:
    """The command as it was given, without the folder the program lies in."""
    return ["tilewise", *sys.argv[1:]]
