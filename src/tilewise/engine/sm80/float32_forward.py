"""The float32 forward of every NVIDIA GPU from sm_80 on: kernels/sm80/float32_forward.cuh.

Products of TF32 parts on tensor cores: three make one of float32 ("exact"), or one does ("tf32"). Loads, masks and
schedule are those of the 16-bit kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from .. import rules
from ..params import LOG2_E, mirror
from ..policy import params_for, term_params, unit_of
from ..program import Launch
from ..rules import class_of
from ..source import Kernel
from . import shared
from .forward import forward_program, tensor_fields

if TYPE_CHECKING:
    from ...jit import Unit
    from ...problem import Problem
    from ...target import Target
    from ..program import Program


@dataclass(frozen=True, slots=True)
class Config(shared.TileConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/float32_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Float32Config"

    exact: bool
    head_dim: int
    head_dim_v: int
    warps: int
    row_tiles: int
    block_kv: int
    stages: int
    has_terms: bool
    ctas_per_sm: int

    @property
    def block_q(self) -> int:
        return 16 * self.row_tiles * self.warps

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Float32Smem<config>)`; the generated source asserts it."""
        tile = 4 * self.block_kv * (self.head_dim + self.head_dim_v)
        whole = 4 * self.block_q * self.head_dim + self.stages * tile + self.warps * shared.PLAN_BYTES + 3 * 32 + 20
        return -(-whole // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{kind_name(self.exact)}_d{self.head_dim}x{self.head_dim_v}"
        shape = f"q{self.block_q}_kv{self.block_kv}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"fa2_forward_{kind}_{shape}"

    @property
    def label(self) -> str:
        """What a search varies, in a few words."""
        return f"{self.block_q}x{self.block_kv} {self.warps} warps S{self.stages} x{self.ctas_per_sm}"

    def __str__(self) -> str:
        return f"{products_text(self.exact)}, {shared.TileConfig.__str__(self)}"


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    exact, has_terms = problem.precision == "exact", bool(problem.scores)
    found = (_config(row, exact, has_terms) for row in _table()[class_of(problem)])
    return [config for config in found if config.fits(target)]


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    classes = class_of(problem)
    exact, has_terms = problem.precision == "exact", bool(problem.scores)
    found = []
    for warps, row_tiles, block_kv, stages, ctas in product((4, 8), (1, 2), (16, 32, 48, 64), (1, 2), (1, 2, 3)):
        row = {"head_dims": classes, "warps": warps, "row_tiles": row_tiles, "block_kv": block_kv}
        config = _config(row | {"stages": stages, "ctas_per_sm": ctas}, exact, has_terms)
        scores = block_kv * (1 + exact) // 2
        held = row_tiles * (max(scores, block_kv // 2 + 16 * (1 + exact)) + classes[1] // 2)
        whole = block_kv % (4 * warps) == 0
        if whole and config.fits(target) and held + 32 <= config.register_limit:
            found.append(config)
    return found


def notices(problem: Problem, target: Target) -> list[str]:
    exact = problem.precision == "exact"
    error = "as of plain float32 arithmetic" if exact else "inputs and weights keep 11 bits"
    said = [f"float32 by {products_text(exact)}: relative error about {'6e-7' if exact else '4e-4'}, {error}"]
    return [*said, *rules.zero_filled(problem)]


def units() -> list[Unit]:
    """Every kernel of this family for the named targets, one GPU of each size of shared memory."""
    rows = [row for rows in _table().values() for row in rows]
    made = [_config(row, *facts) for row in rows for facts in product((True, False), repeat=2)]
    return shared.units(lambda target: [unit(config, target.arch) for config in made if config.fits(target)])


_Params = mirror("sm80/float32_config.cuh", "Float32Params")

unit = Kernel(
    "sm80/float32_forward.cuh", "float32_forward", _Params, "Float32Smem", ("threads", "block_q"), precise=True
).unit


def program(problem: Problem, target: Target, config: Config) -> Program:
    scale = unit_of(problem)
    fields = {
        **tensor_fields(problem, target, config.block_q, 4),
        # Copies count 16-bit numbers: a float32 is two.
        "head_dim": 2 * problem.head_dim,
        "head_dim_v": 2 * problem.head_dim_v,
        "scale": scale,
        "scale_log2": scale * LOG2_E,
        **term_params(problem, precise=True),
    }
    kernel = unit(config, target.arch, problem.scores)
    return forward_program(problem, target, config, Launch(kernel, params_for(problem, _Params), fields, 0, 0))


def kind_name(exact: bool) -> str:
    return "tf32x3" if exact else "tf32x1"


def products_text(exact: bool) -> str:
    return "3 products of TF32 parts" if exact else "1 product of TF32 parts"


def _config(row: rules.Row, exact: bool, has_terms: bool) -> Config:
    return rules.from_row(Config, {**row, "has_terms": has_terms}, exact=exact)


@functools.cache
def _table() -> dict[tuple[int, int], list[rules.Row]]:
    """Head-dim class -> rows, best first."""
    return rules.rows_by("sm80", "float32_forward", lambda row: [tuple(row["head_dims"])])
