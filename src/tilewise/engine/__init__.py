"""The engine: our own CUDA kernels, from a problem to launches.

    rules.py      what is refused before there is a config     division.py   how a backward fills the GPU
    policy.py     what is done to scores                        extents.py    where sequences lie
    params.py     the kernels' parameter structs                source.py     a kernel's translation unit
    program.py    Program: the launches of a call, as a value   run.py        the only reader with tensors and streams
    config.py     what all Configs have in common               backend.py    families as one backend
    decode.py     few queries: a family of both backends        append.py     new keys into a cache

A family is a module of sm80/ or sm90/: `Config`, `configs` and `program` (`backend.Family`). It is pure: it
knows neither tensors nor the driver, so that everything up to a launch can be seen and tested without a GPU.
"""

from .sm80 import SM80
from .sm90 import SM90

__all__ = ["SM80", "SM90"]
