"""What an H200 would run for a problem that is looked at on a CPU, and the nearest figures recorded on one.

The plan needs no GPU. The figures come from the newest record of every suite whose rows are all evidence; an
installed package has none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedProblem
from ...plan import plan
from ...target import Target
from ..candidates.names import Candidate
from ..measure import words
from ..measure.compare import median
from . import records, suites

if TYPE_CHECKING:
    from pathlib import Path

    from ...problem import Problem
    from ..measure.compare import Comparison

TARGET, GPU = "h200", "NVIDIA H200"


def elsewhere(problem: Problem, results: Path) -> dict[str, Any]:
    """Plain values for a record; empty where no backend takes the problem there."""
    try:
        chosen = plan(problem, Target.named(TARGET))
    except UnsupportedProblem:
        return {}
    config = None if chosen.config is None else str(chosen.config)
    found = {"gpu": GPU, "backend": chosen.backend, "config": config, "because": chosen.because}
    kept = records.read_all(results)
    newest = [record for suite in suites.names() if (record := records.newest(kept, suite, GPU)) is not None]
    rows = [(one, record) for record in newest for one in record.comparisons if _alike(one, problem)]
    if not rows:
        return found
    comparison, record = min(rows, key=lambda row: _distance(row[0].row.problem, problem))
    return found | {"recorded": _figures(comparison, problem) | {"record": record.name}}


def _alike(comparison: Comparison, problem: Problem) -> bool:
    """The row times the same direction under a mask and score terms of the same kinds, and has a rival."""
    recorded, what = comparison.row.problem, "backward" if problem.needs_grad else "forward"
    kinds = [(type(one.mask), *map(type, one.scores), one.dropout > 0) for one in (recorded, problem)]
    timed = comparison.row.timed == (what,) and comparison.outcomes[0] in comparison.timed()
    return timed and kinds[0] == kinds[1] and comparison.best_rival() is not None


def _distance(recorded: Problem, problem: Problem) -> tuple[bool, float]:
    """Another dtype is farther than any size; sizes differ by the octaves between them."""
    sizes = [(one.batch * one.heads_q, one.seq_q, one.seq_kv, one.head_dim) for one in (recorded, problem)]
    octaves = sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in zip(*sizes, strict=True))
    return recorded.dtype is not problem.dtype, octaves + (recorded.heads_kv != problem.heads_kv)


def _figures(comparison: Comparison, problem: Problem) -> dict[str, Any]:
    """Our time, and every rival's with our speed against it."""
    ours, recorded = comparison.outcomes[0], comparison.row.problem
    rivals = [one for one in comparison.entries() if not Candidate(one.candidate).is_ours]
    return {
        "problem": str(recorded),
        "same": recorded.with_(needs_grad=problem.needs_grad) == problem,
        "what": comparison.row.timed[0],
        "seconds": {one.candidate: median(one.samples) for one in (ours, *rivals)},
        "speeds": {one.candidate: words.cell(comparison.versus(ours, one)) for one in rivals},
    }
