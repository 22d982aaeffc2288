"""The float32 forward of every NVIDIA GPU from sm_80 on: kernels/sm80/float32_forward.cuh.

Products of TF32 parts on tensor cores: three make one of float32 ("exact"), or one does ("tf32"). Loads, masks and
schedule are those of the 16-bit kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import rules
from ..params import LOG2_E, mirror
from ..policy import params_for, term_params, unit_of
from ..program import Launch
from ..source import Kernel
from . import shared
from .forward import forward_program, tensor_fields

if TYPE_CHECKING:
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
        shape = f"q{self.block_q}_kv{self.block_kv}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"fa2_forward_{kind_name(self.exact)}_{self.heads_name}_{shape}"

    def __str__(self) -> str:
        return f"{products_text(self.exact)}, {shared.TileConfig.__str__(self)}"


# What a search varies of the configs that ship.
SEARCHED = {
    "warps": (4, 8),
    "row_tiles": (1, 2),
    "block_kv": (16, 32, 48, 64),
    "stages": (1, 2),
    "ctas_per_sm": (1, 2, 3),
}


def takes(problem: Problem) -> bool:
    return rules.is_float32(problem)


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    facts = {"has_terms": bool(problem.scores), "exact": problem.precision == "exact"}
    return [config for _, config in shared.fitting(Config, "float32_forward", problem, target, **facts)]


def notices(problem: Problem) -> list[str]:
    exact = problem.precision == "exact"
    error = "as of plain float32 arithmetic" if exact else "inputs and weights keep 11 bits"
    return [f"float32 by {products_text(exact)}: relative error about {'6e-7' if exact else '4e-4'}, {error}"]


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
