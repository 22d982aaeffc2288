"""What terms need of the rows after a backward: kernels of their own, from lse and D of all rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..terms import Sink
from ..terms.sink import ROWS
from .params import mirror, tiles
from .program import Address, Launch, Stride
from .source import kernel_unit

if TYPE_CHECKING:
    from ..jit import Unit
    from ..problem import Problem

_HEADER = "common/terms/sink_gradient.cuh"
_Params = mirror(_HEADER, "SinkGradientParams")


@functools.cache
def sink_gradient_unit(arch: str) -> Unit:
    return kernel_unit(
        "postprocess_sink",
        _HEADER,
        "sink_gradient",
        _Params,
        arch,
        threads=32,
        checks=(f"sink_rows == {ROWS}",),
    )


def edge_launches(problem: Problem, arch: str, row_terms: Address | None, rows: int, factor: float) -> list[Launch]:
    """The launches behind a backward that has left `factor` times -D of its rows, padded to `rows` per head."""
    if not any(isinstance(term, Sink) and term.learned for term in problem.scores):
        return []
    blocks = tiles(problem.seq_q, ROWS)
    fields = {
        "sink": Address("sink"),
        "sink_head_stride": Stride("sink", 0),
        "lse": Address("lse"),
        "row_terms": row_terms,
        "dsink": Address("dsink"),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": rows,
        "blocks": blocks,
        "factor": factor,
    }
    grid = problem.batch * problem.heads_q * blocks
    return [Launch(sink_gradient_unit(arch), _Params, fields, grid, 32)]
