"""What really ran: one call under torch.profiler, read back from its Chrome trace.

The trace is the one interface that says the same in every PyTorch release: kernels by name with grid, block, registers
and shared memory on CUDA, operators with their own time on a CPU.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable

# PyTorch's attention operators, by how their names begin after `aten::`, and the backend each stands for.
_OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "_flash_attention_forward": "flash",
    "_efficient_attention_forward": "efficient",
    "_cudnn_attention_forward": "cudnn",
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_MAX_LAUNCHES = 100  # told one by one
_WORTH_NAMING = 0.005  # of the time of a call: operators below it are summed up

Event = dict[str, Any]


def run(call: Callable[[], Any], device: str, trace: str = "") -> dict[str, Any]:
    """`launches` on the device, or operators on a CPU, in order; and the attention `ops` that PyTorch dispatched."""
    activities = [ProfilerActivity.CPU]
    on_gpu = device.startswith("cuda")
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=activities) as seen:
            call()
            if on_gpu:
                torch.cuda.synchronize()
        seen.export_chrome_trace(str(path))
        told = json.loads(path.read_text(encoding="utf-8"))
    told.pop("host_name", None)
    if trace:
        Path(trace).write_text(json.dumps(told), encoding="utf-8")
    return read(told["traceEvents"], on_gpu)


def read(events: list[Event], on_gpu: bool) -> dict[str, Any]:
    """What a trace says of one call."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    launches = device_launches(spans) if on_gpu else cpu_operators(spans)
    found = {"launches": launches, "ops": attention_ops(spans)}
    return found | {"gaps": gaps(spans)} if on_gpu else found


def device_launches(spans: list[Event]) -> list[Event]:
    """Kernels and copies in the order they began, each with the operator that asked for it."""
    found = sorted((span for span in spans if span.get("cat") in _ON_DEVICE), key=lambda span: span["ts"])
    operators = {_external_id(span): span["name"] for span in spans if span.get("cat") == "cpu_op"}
    operators.pop(None, None)
    launches = [_launch(span, found[0]["ts"]) | {"step": operators.get(_external_id(span), "")} for span in found]
    return launches if len(launches) <= _MAX_LAUNCHES else _counted(launches)


def _external_id(span: Event) -> Any:
    """By which the profiler ties what ran on the device to the operator that launched it; None if it does not say."""
    return span.get("args", {}).get("External id")


def gaps(spans: list[Event]) -> dict[str, float]:
    """How long the device was busy and idle between the first kernel and the last, and how long the host launched."""
    found = sorted((span for span in spans if span.get("cat") in _ON_DEVICE), key=lambda span: span["ts"])
    busy, end = 0.0, found[0]["ts"] if found else 0.0
    for span in found:
        stop = span["ts"] + span["dur"]
        busy += max(0.0, stop - max(end, span["ts"]))
        end = max(end, stop)
    calls = [span for span in spans if span.get("cat") in _RUNTIME and "Launch" in span["name"]]
    first, last = (min(s["ts"] for s in calls), max(s["ts"] + s["dur"] for s in calls)) if calls else (0.0, 0.0)
    whole = end - found[0]["ts"] if found else 0.0
    return {"launches": len(found), "busy_us": busy, "idle_us": whole - busy, "host_us": last - first}


def _counted(launches: list[Event]) -> list[Event]:
    """So many that only their sums are of use: by name and grid, in the order they first appear."""
    found: dict[tuple[Any, ...], Event] = {}
    for launch in launches:
        entry = found.setdefault((launch["name"], str(launch["grid"])), launch | {"us": 0.0, "count": 0})
        entry["us"] += launch["us"]
        entry["count"] += 1
    return list(found.values())


def _launch(span: Event, start: float) -> Event:
    told = span.get("args", {})
    return {
        "name": span["name"],
        "start_us": span["ts"] - start,
        "us": span["dur"],
        "count": 1,
        "grid": told.get("grid"),
        "block": told.get("block"),
        "registers": told.get("registers per thread"),
        "smem_bytes": told.get("shared memory"),
        "estimated_occupancy": told.get("est. achieved occupancy %"),
    }


def cpu_operators(spans: list[Event]) -> list[Event]:
    """Operators by their own time, without that of what they call, in the order they first appear."""
    ops = sorted((span for span in spans if span.get("cat") == "cpu_op"), key=lambda s: (s["ts"], -s["dur"]))
    own = [float(span["dur"]) for span in ops]
    open_ones: dict[Any, list[int]] = {}
    for index, span in enumerate(ops):
        stack = open_ones.setdefault(span.get("tid"), [])
        while stack and ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] <= span["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= span["dur"]
        stack.append(index)
    return _summed(ops, own)


def _summed(ops: list[Event], own: list[float]) -> list[Event]:
    total = sum(own) or 1.0
    found: dict[str, Event] = {}
    for span, microseconds in zip(ops, own, strict=True):
        entry = found.setdefault(span["name"], {"name": span["name"], "start_us": span["ts"] - ops[0]["ts"], "us": 0.0,
                                                "count": 0, "grid": None, "block": None, "registers": None,
                                                "smem_bytes": None})  # fmt: skip
        entry["us"] += microseconds
        entry["count"] += 1
    named = [entry for entry in found.values() if entry["us"] / total >= _WORTH_NAMING]
    rest = [entry for entry in found.values() if entry["us"] / total < _WORTH_NAMING]
    if rest:
        name = f"{len(rest)} operators below {_WORTH_NAMING:.1%} each"
        named.append(rest[0] | {"name": name, "us": sum(e["us"] for e in rest), "count": sum(e["count"] for e in rest)})
    return named


def attention_ops(spans: list[Event]) -> list[Event]:
    """Calls of PyTorch's attention operators, each with the backend it stands for: forward ones only."""
    found = []
    for span in sorted(spans, key=lambda span: span["ts"]):
        backend = backend_of(span["name"]) if span.get("cat") == "cpu_op" else ""
        if backend:
            found.append({"op": span["name"], "backend": backend})
    return found


def backend_of(op: str) -> str:
    """`flash` for `aten::_scaled_dot_product_flash_attention_for_cpu`; empty for what is not attention's forward."""
    name = op.removeprefix("aten::")
    if "backward" in name:
        return ""
    return next((backend for prefix, backend in _OPERATORS.items() if name.startswith(prefix)), "")
