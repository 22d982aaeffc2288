"""The Triton backend against float64 in Triton's interpreter; run by test_backend_triton.py.

A program of its own because the interpreter is switched on by a variable that Triton reads when it is imported.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from typing import Any

import torch

import tilewise
from support import assert_close, budget, exact, in_order, make_inputs, make_problem, wanted
from test_packed import check_backward, made, make_case
from tilewise import Causal, Full, Problem, Window
from tilewise.plain import reference
from tilewise.target import Target
from tilewise.triton import backend as triton

Tensor = torch.Tensor
SMALL, SMALL_BACKWARD = triton.Config(16, 16, 4, 1), triton.BackwardConfig(16, 16, 4, 1)
MASKS = [
    Full(),
    Causal(),
    Causal("bottom-right"),
    Window(4, 1),
    Window(3, 0, "bottom-right"),
    Window(None, 2),
    Causal(offset=-9),
    Window(4, 1, offset=6),
]
PACKED = ((21, 37), (0, 5), (1, 1), (16, 16), (9, 0), (33, 20), (2, 40))  # queries and keys of each sequence
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"heads_q": 4, "heads_kv": 2},
    "one key head": {"heads_q": 3},
    "odd": {"seq_q": 21, "seq_kv": 37, "head_dim": 11, "head_dim_v": 7},
    "one query": {"seq_q": 1},
    "one key": {"seq_kv": 1},
    "softcap": {"softcap": 2.0},
    "large softcap": {"softcap": 50.0},
    "bshd": {"layout": "bshd", "heads_q": 2, "heads_kv": 2},
    "scale": {"scale": -0.5},
    "wide": {"seq_q": 9, "seq_kv": 12, "head_dim": 192, "head_dim_v": 128},
    "widest": {"seq_q": 9, "seq_kv": 12, "head_dim": 256, "head_dim_v": 256},
}


def check(problem: Problem, inputs: tuple[Tensor, ...] = (), dlse: bool = False, *, small: bool = True) -> None:
    """Forward and backward within the budget of the dtype; rows without keys give 0, -inf and no gradient."""
    assert triton.why_not(problem, Target.of("cpu")) == [], problem
    q, k, v = inputs or make_inputs(problem)
    config, backward_config = (SMALL, SMALL_BACKWARD) if small else (None, None)
    out, lse = triton.forward(q, k, v, problem, config)
    dout, given = torch.randn_like(out), torch.randn_like(lse) if dlse else None
    want_out, want_lse, *want_grads = truth(q, k, v, dout, given, problem)
    tolerance = budget(problem.dtype, problem.seq_kv)
    assert_close(out, want_out, tolerance, f"{problem}: out")
    assert_close(lse, want_lse, budget(torch.float32, problem.seq_kv), f"{problem}: lse")
    assert (out[want_lse.isinf()] == 0).all(), problem
    stored = out.transpose(1, 2) if problem.layout == "bshd" else out
    assert stored.is_contiguous()
    assert out.dtype == problem.dtype
    grads = in_order(triton.backward(dout, given, q, k, v, out, lse, problem, backward_config))
    for grad, want, name in zip(grads, want_grads, ("dq", "dk", "dv"), strict=True):
        assert_close(grad, want, 4 * tolerance, f"{problem}: {name}")


def truth(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, problem: Problem) -> tuple[Tensor, ...]:
    if dlse is None:
        return exact(q, k, v, problem, None, dout)
    wide = problem.with_(dtype=torch.float64)
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = reference.forward(*inputs, wide)
    seen = torch.where(lse.isinf(), 0.0, lse)
    grads = torch.autograd.grad((out * dout.double()).sum() + (seen * dlse.double()).sum(), inputs)
    return out.detach(), lse.detach(), *grads


def masks_and_shapes() -> int:
    base = make_problem((1, 1, 21, 16), seq_kv=37, needs_grad=True, needs_lse=True)
    problems = [base.with_(mask=mask) for mask in MASKS]
    problems += [base.with_(seq_q=37, seq_kv=21, mask=mask) for mask in MASKS[1:]]  # rows without keys among them
    problems += [base.with_(mask=Causal("bottom-right"), **fields) for fields in SHAPES.values()]
    for number, problem in enumerate(problems):
        check(problem, dlse=number % 2 == 0)
    for empty in (base.with_(seq_kv=0), base.with_(seq_q=0)):
        check(empty)
    check(base.with_(mask=Causal()), small=False)
    return len(problems) + 3


def random_problems(count: int = 8) -> int:
    rng = random.Random(0)
    for _ in range(count):
        heads_kv = rng.choice((1, 2))
        bounds = rng.choice((None, 0, 5, 20)), rng.choice((None, 0, 3))
        aligned = rng.choice(("top-left", "bottom-right"))
        mask = rng.choice((Full(), Causal(aligned), Window(*bounds, aligned)))
        shape = (rng.choice((1, 2)), heads_kv * rng.choice((1, 2)), rng.randint(1, 40), rng.randint(1, 40))
        sizes = {"heads_kv": heads_kv, "seq_kv": rng.randint(1, 40), "head_dim_v": rng.randint(1, 40)}
        check(make_problem(shape, mask=mask, softcap=rng.choice((0.0, 3.0)), needs_grad=True, **sizes), dlse=True)
    return count


def precisions() -> int:
    for dtype in (torch.float16, torch.bfloat16):
        check(make_problem((1, 2, 40, 16), dtype, heads_kv=1, mask=Causal(), needs_grad=True))
    return 2


def strides() -> int:
    """A stride in the last dimension, heads apart by nothing, and gradients that are one number expanded."""
    problem = make_problem((1, 2, 20, 16), needs_grad=True, mask=Causal())
    q, k, v = (torch.randn(1, 2, 16, 41).transpose(2, 3)[:, :, ::2][:, :, :20] for _ in range(3))
    check(problem, (q, k.narrow(1, 0, 1).expand(1, 2, 20, 16), v))
    out, lse = triton.forward(q, k, v, problem, SMALL)
    one = torch.ones(()).expand_as(out)
    for got, want in zip(
        in_order(triton.backward(one, None, q, k, v, out, lse, problem, SMALL_BACKWARD)),
        in_order(triton.backward(one.contiguous(), None, q, k, v, out, lse, problem, SMALL_BACKWARD)),
        strict=True,
    ):
        assert torch.equal(got, want)
    return 2


def only_what_is_wanted() -> int:
    problem = make_problem((1, 2, 20, 8), needs_grad=True, mask=Causal())
    q, k, v = make_inputs(problem)
    out, lse = triton.forward(q, k, v, problem, SMALL)
    kept = [t.clone() for t in (q, k, v)]
    everything = in_order(triton.backward(out, None, q, k, v, out, lse, problem, SMALL_BACKWARD))
    for index in range(3):
        wants = tuple(i == index for i in range(3))
        grads = in_order(triton.backward(out, None, q, k, v, out, lse, problem, SMALL_BACKWARD, wants=wanted(*wants)))  # type: ignore[arg-type]
        assert [grad is not None for grad in grads] == list(wants)
        assert torch.equal(grads[index], everything[index])  # type: ignore[arg-type]  # and the same bits again
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True))
    return 1


def same(got: Tensor, want: Tensor, what: str = "hidden from it") -> None:
    """But for the order of the sums: a careful walk has another."""
    assert_close(got, want, budget(torch.float32, 37), what)


def hidden_poison(value: float) -> int:
    """What a row does not see changes nothing of it, in any direction; what it sees, it shows."""
    length, bad = 37, 20
    for mask in (Causal(), Window(4, 0)):
        problem = make_problem((1, 1, length, 16), needs_grad=True, mask=mask)
        q, k, v = make_inputs(problem)
        dout = torch.randn_like(q)
        visible = mask.to_bool(range(length), range(length), length, length)
        rows, keys = visible[:, bad], visible[bad]
        clean, clean_lse = triton.forward(q, k, v, problem, SMALL)
        clean_grads = in_order(triton.backward(dout, None, q, k, v, clean, clean_lse, problem, SMALL_BACKWARD))

        spoiled = v.clone()
        spoiled[:, :, bad, 3] = value
        out, _ = triton.forward(q, k, spoiled, problem, SMALL)
        same(out[:, :, ~rows], clean[:, :, ~rows])
        assert not out[:, :, rows, 3].isfinite().any()
        assert_close(out[..., 4:], clean[..., 4:], budget(torch.float32, length), "the other columns")

        spoiled = k.clone()
        spoiled[:, :, bad] = value
        out, lse = triton.forward(q, spoiled, v, problem, SMALL)
        same(out[:, :, ~rows], clean[:, :, ~rows])
        same(lse[:, :, ~rows], clean_lse[:, :, ~rows])
        dq, _, _ = in_order(triton.backward(dout, None, q, spoiled, v, clean, clean_lse, problem, SMALL_BACKWARD))
        same(dq[:, :, ~rows], clean_grads[0][:, :, ~rows])  # type: ignore[index]
        assert not dq[:, :, rows].isfinite().all()  # type: ignore[index]

        for index, spoil in enumerate(("q", "dout")):
            given = [q.clone(), dout.clone()]
            given[index][:, :, bad] = value
            grads = in_order(triton.backward(given[1], None, given[0], k, v, clean, clean_lse, problem, SMALL_BACKWARD))
            for grad, want in zip(grads[1:], clean_grads[1:], strict=True):
                same(grad[:, :, ~keys], want[:, :, ~keys], spoil)  # type: ignore[index]
            assert not grads[1][:, :, keys].isfinite().all(), spoil  # type: ignore[index]
    return 2


def packed_sequences() -> int:
    """Of other lengths each, none and one among them; a neighbour and all that lies behind them is NaN."""
    poisoned = (3,)
    for number, inner in enumerate(MASKS):
        shape = {"heads": (4, 2), "dims": (16, 8)} if number % 2 else {"heads": (1, 1), "dims": (11, 16)}
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        case = make_case(inner, dtype, PACKED, poisoned=poisoned, needs_grad=True, softcap=3.0 * (number == 2), **shape)
        assert triton.why_not(case.problem, Target.of("cpu")) == []
        config = SMALL if number else None
        got = triton.forward(case.q, case.k, case.v, case.problem, config, case.operands)
        dout = torch.randn(case.problem.seq_q, case.problem.heads_q, case.problem.head_dim_v).to(dtype)
        dout = dout.transpose(0, 1)[None]
        out, lse, truth = made(case, dout)
        begin, end = (int(case.offsets[0][sequence]) for sequence in (poisoned[0], poisoned[0] + 1))
        for one, want, allowed in zip(got, (out, lse), (budget(dtype, 40), budget(torch.float32, 40)), strict=True):
            for part in (slice(0, begin), slice(end, None)):
                assert_close(one[:, :, part], want[:, :, part], allowed, f"{case.problem}")
        for sequence in poisoned:
            case.of(dout, sequence, 0).fill_(torch.nan)
        given = (dout, None, case.q, case.k, case.v, out, lse, case.problem, SMALL_BACKWARD, case.operands)
        check_backward(case, triton.backward(*given), truth, 4 * budget(dtype, 40), poisoned)
    return len(MASKS)


def packed_by_name() -> int:
    """Keys that are not used, and padding before them, through attention_packed and autograd."""
    lengths = torch.tensor([0, 9, 1, 20]), torch.tensor([0, 14, 5, 21])
    starts = [own.cumsum(0).int() for own in lengths]
    used, left = torch.tensor([11, 5, 30], dtype=torch.int32), torch.tensor([2, 0, 6], dtype=torch.int32)
    shapes = (33, 4, 16), (43, 2, 16), (43, 2, 8)
    tensors = [torch.randn(shape) for shape in shapes]
    for options in ({}, {"seqused_k": used}, {"seqused_k": used, "leftpad_k": left}):
        results = {}
        for backend in ("triton", "reference"):
            q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
            mask = Causal("bottom-right")
            out, lse = tilewise.attention_packed(
                q, k, v, *starts, 20, 21, mask=mask, return_lse=True, backend=backend, **options
            )
            seen = lse.masked_fill(lse.isinf(), 0.0)
            results[backend] = (out, seen, *torch.autograd.grad(out.square().sum() + seen.sum(), (q, k, v)))
        for got, want in zip(*results.values(), strict=True):
            assert_close(got, want, 4 * budget(torch.float32, 21))
    return 3


def through_the_front_door() -> int:
    """By name, with autograd; "auto" does not choose an interpreter."""
    problem = make_problem((1, 2, 20, 8), heads_kv=1, mask=Window(5, 0), softcap=4.0, needs_grad=True, needs_lse=True)
    results = {}
    inputs = make_inputs(problem)
    for backend in ("triton", "reference"):
        q, k, v = (t.clone().requires_grad_() for t in inputs)
        out, lse = tilewise.attention(q, k, v, mask=problem.mask, softcap=4.0, return_lse=True, backend=backend)
        results[backend] = (out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))
    for got, want in zip(*results.values(), strict=True):
        assert_close(got, want, budget(torch.float32, 20))
    assert tilewise.explain(*inputs, mask=problem.mask).backend != "triton"
    return 1


def main() -> None:
    torch.manual_seed(0)
    assert triton.interpreted()
    done = masks_and_shapes() + random_problems() + precisions() + strides() + only_what_is_wanted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of nan and inf
        done += sum(hidden_poison(value) for value in (math.nan, math.inf, -math.inf))
        done += packed_sequences()
    done += packed_by_name() + through_the_front_door()
    print(f"{done} problems right")


if __name__ == "__main__":
    sys.exit(main())
