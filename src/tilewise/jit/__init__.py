"""Kernels at run time: compile (NVRTC), keep (disk cache), load and launch (driver). Nothing here knows attention.

A backend writes a `Unit` (C++ made with `cpp_constant(...)` and `layout_asserts(Params, ...)`), gets its `Function`
from `function_for(unit, device)`, keeps one `Arguments(Params)` per thread, and calls its `Launch` with them.
"""

from .compile import Kernel, Unit, build, build_all, build_key, nvrtc_version
from .launch import Function, Launch, function_for, load
from .mirror import Arguments, TensorMap, cpp_constant, cpp_literal, layout_asserts, params_struct
from .ptxas import Resources
from .tensormap import TiledMap, tiled_map

__all__ = [
    "Arguments",
    "Function",
    "Kernel",
    "Launch",
    "Resources",
    "TensorMap",
    "TiledMap",
    "Unit",
    "build",
    "build_all",
    "build_key",
    "cpp_constant",
    "cpp_literal",
    "function_for",
    "layout_asserts",
    "load",
    "nvrtc_version",
    "params_struct",
    "tiled_map",
]
