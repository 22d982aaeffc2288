"""Search spaces: which configs `tilewise tune` measures, and what it calls them.

A family of the engine says which fields of its Config a search varies, and the values it tries (SEARCHED). Of all their
combinations those are measured whose tiles fit shared memory, whose work divides evenly among warps, and whose arrays
fit the registers of a thread; whether the compiler keeps to that, its log tells. Other backends have their own
`search_space`.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import TYPE_CHECKING, Any

from ...engine.backend import Direction, Fused
from ...engine.sm80 import backward as sm80_backward
from ...engine.sm80 import float32_backward as sm80_float32_backward
from ...engine.sm80 import float32_forward as sm80_float32_forward
from ...engine.sm80 import forward as sm80_forward
from ...engine.sm90 import backward as sm90_backward
from ...engine.sm90 import float32_backward as sm90_float32_backward
from ...engine.sm90 import float32_forward as sm90_float32_forward
from ...engine.sm90 import forward as sm90_forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...problem import Problem
    from ...target import Target

_RINGS = {(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4)}  # stages of K and V of a forward of Hopper


def has_search_space(backend: Any) -> bool:
    """Whether a backend, or a direction of one, has configs to choose from."""
    return isinstance(backend, Fused | Direction) or hasattr(backend, "search_space")


def search_space(backend: Any, problem: Problem, target: Target) -> list[Any]:
    """Every config that may run, those that ship first."""
    if not isinstance(backend, Fused | Direction):
        return list(backend.search_space(problem, target))
    side = backend.forward_direction if isinstance(backend, Fused) else backend
    searched = side.searched(problem)
    ships = side.shipped(problem, target)
    found = dict.fromkeys(ships)
    # Configs that differ in searched values alone have the same variants.
    first_values = {name: values[0] for name, values in searched.items()}
    varied = [config for config in ships if not getattr(config, "split", False)]
    for base in dict.fromkeys(dataclasses.replace(config, **first_values) for config in varied):
        is_runnable = _RUNNABLE.get(type(base), lambda config: True)
        for values in product(*searched.values()):
            config = dataclasses.replace(base, **dict(zip(searched, values, strict=True)))
            if config.fits(target) and is_runnable(config):
                found[config] = None
    return list(found)


def label_of(config: Any) -> str:
    """A config in a few words that no other config of its search space has."""
    return _LABELS[type(config)](config) if type(config) in _LABELS else str(getattr(config, "label", config))


# ---------------------------------------------------------------------------------------------------------------------
# What may run, beside what fits shared memory


def _runs_sm90_forward(config: sm90_forward.Config) -> bool:
    launched = config.register_limit
    given = 32 if launched < 168 else 40
    left = min((launched * (config.consumers + 1) - given) // config.consumers // 8 * 8, 240)  # by setmaxnreg
    held = 3 * config.block_kv // 4 + config.head_dim_v // 2
    takes_turns = config.consumers > 1 or not config.pingpong
    return held < left and takes_turns and (config.k_stages, config.v_stages) in _RINGS


def _runs_sm80_forward(config: sm80_forward.Config) -> bool:
    kept = config.q_in_registers * config.head_dim // 4
    held = config.row_tiles * (config.block_kv // 2 + config.head_dim_v // 2 + kept)
    return held + 24 <= config.register_limit and config.block_kv % (4 * config.warps) == 0


def _runs_sm80_float32_forward(config: sm80_float32_forward.Config) -> bool:
    parts = 1 + config.exact
    scores = max(config.block_kv * parts // 2, config.block_kv // 2 + 16 * parts)
    held = config.row_tiles * (scores + config.head_dim_v // 2)
    return held + 32 <= config.register_limit and config.block_kv % (4 * config.warps) == 0


def _runs_sm80_backward(config: sm80_backward.Config) -> bool:
    """Every warp has the same share of each product, in blocks of 16: what kernels/sm80/backward.cuh asserts."""
    shares = (
        (config.score_rows, config.block_q, (config.block_kv,)),
        (config.key_rows, config.block_kv, (config.head_dim, config.head_dim_v)),
        (config.query_rows, config.block_q, (config.head_dim,)),
    )
    evenly = config.block_q <= 2 * config.threads and all(
        config.warps % rows == 0
        and height % (16 * rows) == 0
        and all(width % (16 * (config.warps // rows)) == 0 for width in widths)
        for rows, height, widths in shares
    )
    return evenly and _holds_backward(config)


def _holds_backward(config: Any) -> bool:
    """S, dP, and the sums of dK and dV."""
    sums = config.block_kv * (config.head_dim + config.head_dim_v)
    held = (2 * config.block_q * config.block_kv + sums) // config.threads
    return bool(held + 32 <= config.register_limit)


_RUNNABLE: dict[type[Any], Callable[[Any], bool]] = {
    sm90_forward.Config: _runs_sm90_forward,
    sm80_forward.Config: _runs_sm80_forward,
    sm80_float32_forward.Config: _runs_sm80_float32_forward,
    sm80_backward.Config: _runs_sm80_backward,
    sm80_float32_backward.Config: _holds_backward,
}


# ---------------------------------------------------------------------------------------------------------------------
# What a search varies, in a few words


def _tile(config: Any) -> str:
    return f"{config.block_q}x{config.block_kv}"


def _sm90_forward(config: sm90_forward.Config) -> str:
    extras = f"{' ping-pong' * config.pingpong}{' split' * config.split}"
    return f"{_tile(config)} K{config.k_stages}V{config.v_stages} x{config.ctas_per_sm}{extras}"


def _sm90_backward(config: sm90_backward.Config) -> str:
    return f"{_tile(config)} s{config.stages} ds{config.ds_stages}{' one tile' * config.writes_dq}"


def _sm90_float32_forward(config: sm90_float32_forward.Config) -> str:
    return f"{sm90_float32_forward.PART_NAMES[config.parts]} {_tile(config)} K{config.k_stages}V{config.v_stages}"


def _sm90_float32_backward(config: sm90_float32_backward.Config) -> str:
    return f"s{config.stages} r{config.rooms}"


def _sm80_forward(config: Any) -> str:
    kept = " Q kept" if getattr(config, "q_in_registers", False) else ""
    return f"{_tile(config)} {config.warps} warps S{config.stages} x{config.ctas_per_sm}{kept}"


def _sm80_backward(config: sm80_backward.Config) -> str:
    grids = f"w{config.warps} {config.score_rows}{config.key_rows}{config.query_rows}"
    return f"{_tile(config)} {grids} s{config.stages} x{config.ctas_per_sm}"


def _sm80_float32_backward(config: sm80_float32_backward.Config) -> str:
    return f"{_tile(config)} s{config.stages} x{config.ctas_per_sm}"


_LABELS: dict[type[Any], Callable[[Any], str]] = {
    sm90_forward.Config: _sm90_forward,
    sm90_backward.Config: _sm90_backward,
    sm90_float32_forward.Config: _sm90_float32_forward,
    sm90_float32_backward.Config: _sm90_float32_backward,
    sm80_forward.Config: _sm80_forward,
    sm80_float32_forward.Config: _sm80_forward,
    sm80_backward.Config: _sm80_backward,
    sm80_float32_backward.Config: _sm80_float32_backward,
}
