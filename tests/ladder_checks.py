"""Rungs that run in a simulator, against float64: `python tests/ladder_checks.py numba`, by test_ladder.py.

A program of its own because the simulator is switched on by a variable that must be set before its import.
"""

from __future__ import annotations

import sys

import torch

from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window, ladder
from tilewise.target import Target

SHAPES: dict[str, dict[str, object]] = {
    "square": {},
    "grouped": {"heads_kv": 2},
    "odd": {"seq_q": 21, "seq_kv": 13, "head_dim": 11, "head_dim_v": 7},
    "one query": {"seq_q": 1},
    "softcap": {"softcap": 2.0},
    "bshd": {"layout": "bshd"},
}
MASKS = [Full(), Causal(), Causal("bottom-right"), Window(4, 1), Window(2, 0, "bottom-right")]


def problems() -> list[Problem]:
    base = make_problem((1, 4, 18, 8), needs_lse=True)
    ends = (Full(), Causal("bottom-right"))
    shaped = [base.with_(mask=mask, **fields) for mask in ends for fields in SHAPES.values()]
    masked = [base.with_(heads_q=2, heads_kv=2, seq_kv=11, mask=mask) for mask in MASKS]
    nothing = [base.with_(seq_kv=0), base.with_(seq_q=0)]
    return [*shaped, *masked, *nothing]


def main(name: str) -> None:
    rung, target = ladder.module(name), Target.of("cpu")
    torch.manual_seed(0)
    for number, problem in enumerate(problems()):
        assert rung.why_not(problem, target) == [], problem
        q, k, v = make_inputs(problem)
        want, want_lse = exact(q, k, v, problem)
        for config in (None, rung.configs(problem, target)[-1])[: 2 if number < 4 else 1]:
            out, lse = rung.forward(q, k, v, problem, config)
            tolerance = budget(torch.float32, problem.seq_kv)
            assert_close(out, want, tolerance, f"{problem} {config}: out")
            assert_close(lse, want_lse, tolerance, f"{problem} {config}: lse")
            stored = out.transpose(1, 2) if problem.layout == "bshd" else out
            assert stored.is_contiguous()
    half = make_problem((1, 2, 20, 16), torch.float16, mask=Causal())
    q, k, v = make_inputs(half)
    out, _ = rung.forward(q, k, v, half)
    assert out.dtype == torch.float16
    assert_close(out, exact(q, k, v, half)[0], budget(torch.float16))
    print(f"{len(problems()) + 1} problems right")


if __name__ == "__main__":
    main(sys.argv[1])
