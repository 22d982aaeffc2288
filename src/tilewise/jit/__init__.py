"""Kernels at run time: compile (NVRTC), keep (disk cache), load and launch (driver). Nothing here knows attention.

A backend writes a `Unit` (C++ made with `cpp_constant(...)` and `layout_asserts(Params, ...)`), gets its `Function`
from `function_for(unit, device)`, keeps its `Arguments` (`ArgumentsPerThread`), and calls its `Launch` with them.
"""

from .compile import Kernel, Unit, build, build_all, build_key, nvrtc_version
from .launch import Function, Launch, function_for, is_loaded, load
from .mirror import Arguments, ArgumentsPerThread, TensorMap, cpp_constant, cpp_literal, layout_asserts, params_struct
from .ptxas import Resources
from .tensormap import TiledMap, rows_map, tiled_map

__all__ = [
    "Arguments",
    "ArgumentsPerThread",
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
    "is_loaded",
    "layout_asserts",
    "load",
    "nvrtc_version",
    "params_struct",
    "rows_map",
    "tiled_map",
]
