"""attention_packed: sequences behind one another, their offsets on the device (masks.Packed, engine/packed.py)."""

from __future__ import annotations

import math
import os
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import emulation
import tilewise
from support import (
    assert_close,
    assert_near,
    budget,
    check_against_the_reference,
    exact,
    make_problem,
    rounding_budget,
    unlucky,
)
from tilewise import Causal, Documents, Full, InvalidInput, Problem, Target, UnsupportedProblem, Window
from tilewise.engine import packed
from tilewise.engine.lengths import Lengths
from tilewise.engine.program import Address
from tilewise.engine.sm80 import SM80
from tilewise.engine.sm90 import SM90
from tilewise.jit import Arguments
from tilewise.masks import Packed, parse
from tilewise.plain import reference, tiled
from tilewise.plan import plan
from tilewise.scores import Softcap
from tilewise.sequences import check_values, spans_of_offsets, spans_say_all, with_spans
from tilewise.terms import Alibi, Dropout, MaxLogit, RelativeBias, Sink

Tensor = torch.Tensor
A100, H200 = (Target.named(name) for name in ("a100", "h200"))
BF16 = torch.bfloat16
# Of queries and keys: equal, one token, no queries, several tiles, no keys.
LENGTHS = ((70, 70), (1, 33), (0, 20), (130, 90), (64, 128), (40, 0), (200, 300))
MASKS = (Full(), Causal(), Causal("bottom-right"), Window(40, 10, "bottom-right"), Causal(offset=-13))
BEHIND = (5, 3)  # rows and keys behind the last offset


class Case(NamedTuple):
    """Tensors as (1, heads, total, dim) views of (total, heads, dim) memory."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    operands: dict[str, Tensor]

    @property
    def offsets(self) -> tuple[Tensor, Tensor]:
        return self.operands["cu_seqlens_q"], self.operands["cu_seqlens_kv"]

    def of(self, tensor: Tensor, sequence: int, which: int) -> Tensor:
        """The part of a sequence: of rows (0) or of keys (1)."""
        starts = self.offsets[which]
        return tensor[:, :, int(starts[sequence]) : int(starts[sequence + 1])]

    def member(self, sequence: int) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
        parts = self.of(self.q, sequence, 0), self.of(self.k, sequence, 1), self.of(self.v, sequence, 1)
        mask = self.problem.mask
        assert isinstance(mask, Packed)
        lengths = {"seq_q": parts[0].shape[2], "seq_kv": parts[1].shape[2]}
        return self.problem.with_(mask=mask.inner, **lengths), parts


def make_case(
    inner: Any,
    dtype: torch.dtype = BF16,
    lengths: Any = LENGTHS,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    behind: tuple[int, int] = BEHIND,
    poisoned: tuple[int, ...] = (),
    **fields: Any,
) -> Case:
    starts = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    totals = [int(starts[i][-1]) + behind[i] for i in (0, 1)]
    shapes = (totals[0], heads[0], dims[0]), (totals[1], heads[1], dims[0]), (totals[1], heads[1], dims[1])
    tensors = [torch.randn(shape).to(dtype).transpose(0, 1)[None] for shape in shapes]
    for tensor, which in zip(tensors, (0, 1, 1), strict=True):
        tensor[:, :, int(starts[which][-1]) :] = torch.nan
        for sequence in poisoned:
            tensor[:, :, int(starts[which][sequence]) : int(starts[which][sequence + 1])] = torch.nan
    mask = Packed(len(lengths), max(q for q, _ in lengths), max(k for _, k in lengths), inner)
    values: dict[str, Any] = {"needs_lse": True, "layout": "bshd", "head_dim_v": dims[1]}
    problem = make_problem(
        (1, heads[0], totals[0], dims[0]), dtype, heads_kv=heads[1], seq_kv=totals[1], mask=mask, **(values | fields)
    )
    return Case(problem, *tensors, {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]})


def check_forward(
    case: Case, out: Tensor, lse: Tensor, poisoned: tuple[int, ...] = (), *, any_lengths: bool = False
) -> None:
    """`any_lengths`: rows may be so few that the norm of their errors is no mean."""
    end = int(case.offsets[0][-1])
    assert (out[:, :, end:] == 0).all()
    assert (lse[:, :, end:] == -torch.inf).all()
    for sequence in range(len(case.offsets[0]) - 1):
        problem, inputs = case.member(sequence)
        if sequence in poisoned or not problem.seq_q:
            continue
        got, got_lse = case.of(out, sequence, 0), case.of(lse, sequence, 0)
        if not problem.mask.rows_that_see(problem.seq_q, problem.seq_kv):
            assert (got == 0).all()
            assert (got_lse == -torch.inf).all()
            continue
        factor = unlucky(problem.seq_q * problem.heads_q) if any_lengths else 1.0
        assert_near(got, got_lse, inputs, problem, factor)


def made(case: Case, dout: Tensor) -> tuple[Tensor, Tensor, dict[int, tuple[Tensor, ...]]]:
    """What a right forward leaves, and by sequence the gradients."""
    out, lse = torch.zeros_like(dout), torch.full(case.q.shape[:3], -torch.inf, device=dout.device)
    truth = {}
    for sequence in range(len(case.offsets[0]) - 1):
        problem, inputs = case.member(sequence)
        if problem.seq_q and problem.seq_kv:
            wide, wide_lse, *grads = exact(*inputs, problem, None, case.of(dout, sequence, 0))
            case.of(out, sequence, 0).copy_(wide)
            case.of(lse, sequence, 0).copy_(wide_lse)
            truth[sequence] = tuple(grads)
    return out, lse, truth


def gradient_noise(case: Case, dout: Tensor, sequence: int) -> tuple[float, float, float]:
    """Of dq, dk and dv of a sequence without terms, what independent relative errors of 1 in P dP and P D come to.
    Where rows see few keys these two nearly cancel, and the gradient is much smaller than either."""
    problem, (q, k, v) = case.member(sequence)
    q, k, v, dout = (tensor.double() for tensor in (q, k, v, case.of(dout, sequence, 0)))
    k, v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    visible = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, q.device)
    scores = (q @ k.mT * problem.scale).masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    dweights = dout @ v.mT
    parts = weights * (dweights.abs() + (weights * dweights).sum(-1, keepdim=True).abs())
    of_queries, of_keys = parts.square() @ k.square(), parts.square().mT @ q.square()
    return problem.scale * float(of_queries.sum()) ** 0.5, problem.scale * float(of_keys.sum()) ** 0.5, 0.0


def check_backward(
    case: Case, grads: Any, truth: Any, allowed: float, poisoned: tuple[int, ...] = (), noise: Any = None
) -> None:
    """Errors are in proportion to a gradient, or to its `noise` by sequence where that is larger; where it is 0, as dq
    of rows that see one key, to the terms it is the difference of, whose numbers are about 1."""
    for which, name in enumerate("qkv"):
        behind = grads[name][:, :, int(case.offsets[min(which, 1)][-1]) :]
        assert (behind == 0).all(), name
        for sequence in range(len(case.offsets[0]) - 1):
            got = case.of(grads[name], sequence, min(which, 1))
            if sequence in poisoned:
                continue
            if sequence not in truth:
                assert (got == 0).all(), (name, sequence)
                continue
            want = truth[sequence][which]
            terms = math.sqrt(want.numel())
            size = max(float(want.norm()), noise[sequence][which] if noise else 0.0)
            error = float((got.double() - want).norm()) / (size if size > 1e-6 * terms else terms)
            factor = unlucky(want.shape[1] * min(case.member(sequence)[0].seq_q, want.shape[2])) if noise else 1.0
            limit = factor * allowed
            assert error <= limit, f"d{name} of sequence {sequence}: {error:.2e}, allowed {limit:.2e}"


def check_gradients(
    backend: Any, target: Target, case: Case, poisoned: tuple[int, ...] = (), *, noisy: bool = False
) -> None:
    """Checks the gradients after what a right forward leaves."""
    shape = case.problem.seq_q, case.problem.heads_q, case.problem.head_dim_v
    dout = torch.randn(shape).to(BF16).transpose(0, 1)[None]
    out, lse, truth = made(case, dout)
    noise = {sequence: gradient_noise(case, dout, sequence) for sequence in truth} if noisy else None
    for sequence in poisoned:
        case.of(dout, sequence, 0).fill_(torch.nan)
    backward = backend.bind_backward(case.problem, None, target)
    grads = backward(dout, None, case.q, case.k, case.v, out, lse, case.operands)
    check_backward(case, grads, truth, rounding_budget(BF16, 5), poisoned, noise)


def packed_inputs(case: Case, *, grad: bool = False) -> tuple[Tensor, ...]:
    """(total, heads, dim) tensors, and the offsets."""
    tensors = [tensor[0].transpose(0, 1).detach().nan_to_num().requires_grad_(grad) for tensor in case[1:4]]
    return (*tensors, *case.offsets)


# ---------------------------------------------------------------------------------------------------------------------
# The function


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_each_sequence_is_as_it_would_be_alone(mask, backend):
    case = make_case(mask, torch.float64, needs_grad=True)
    *tensors, cu_q, cu_k = packed_inputs(case, grad=True)
    out, lse = tilewise.attention_packed(
        *tensors, cu_q, cu_k, 200, 300, mask=mask, softcap=20.0, return_lse=True, backend=backend
    )
    assert out.shape == tensors[0].shape
    assert lse.shape == (4, tensors[0].shape[0])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    ends = int(cu_q[-1]), int(cu_k[-1])
    assert (out[ends[0] :] == 0).all()
    assert (lse[:, ends[0] :] == -torch.inf).all()
    for tensor, end in zip(tensors, (ends[0], ends[1], ends[1]), strict=True):
        assert (tensor.grad[end:] == 0).all()
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        own = [x[None, begin:end].detach().requires_grad_() for x, begin, end in (
            (tensors[0], q0, q1), (tensors[1], k0, k1), (tensors[2], k0, k1))]  # fmt: skip
        alone, alone_lse = tilewise.attention(
            *own, mask=mask, softcap=20.0, layout="bshd", return_lse=True, backend=backend
        )
        (alone * weight[None, q0:q1]).sum().backward()
        assert_close(out[q0:q1], alone[0], budget(torch.float64))
        assert torch.equal(lse[:, q0:q1].isinf(), alone_lse[0].isinf())
        assert_close(lse[:, q0:q1].nan_to_num(neginf=0.0), alone_lse[0].nan_to_num(neginf=0.0), budget(torch.float64))
        for tensor, part, (begin, end) in zip(tensors, own, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            assert_close(tensor.grad[begin:end], part.grad[0], budget(torch.float64), "gradient")


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("backend", [reference, tiled], ids=["reference", "tiled"])
def test_offsets_that_stay_on_a_device_say_the_same_as_spans(mask, backend):
    case = make_case(mask, torch.float64, needs_grad=True)
    inputs = [tensor.nan_to_num() for tensor in case[1:4]]
    operands = spans_of_offsets(case.problem, case.operands)
    out, lse = backend.forward(*inputs, case.problem, None, case.operands)
    spanned = with_spans(case.problem)
    again, again_lse = backend.forward(*inputs, spanned, None, operands)
    assert_close(again, out, budget(torch.float64))
    assert torch.equal(again_lse.isinf(), lse.isinf())
    dout = torch.randn_like(out)
    grads = backend.backward(dout, None, *inputs, out, lse, case.problem, None, case.operands)
    others = backend.backward(dout, None, *inputs, out, lse, spanned, None, operands)
    for name, grad in grads.items():
        assert_close(others[name], grad, budget(torch.float64), name)


@pytest.mark.parametrize("backend", [reference, tiled], ids=["reference", "tiled"])
def test_nan_of_a_neighbour_reaches_nothing(backend):
    case = make_case(Causal("bottom-right"), poisoned=(3,), needs_grad=True)
    out, lse = backend.forward(case.q, case.k, case.v, case.problem, None, case.operands)
    check_forward(case, out, lse, (3,))
    dout = torch.randn(case.q.shape).to(BF16)
    right, right_lse, truth = made(case, dout)
    grads = backend.backward(dout, None, case.q, case.k, case.v, right, right_lse, case.problem, None, case.operands)
    check_backward(case, grads, truth, rounding_budget(BF16, 4), (3,))


def test_a_call_under_documents_gives_the_same():
    case = make_case(Causal(), torch.float32, lengths=((30, 30), (7, 7), (64, 64)), behind=(0, 0))
    q, k, v, cu, _ = packed_inputs(case)
    out = tilewise.attention_packed(q, k, v, cu, cu, mask="causal")
    documents = Documents(cu.tolist(), inner=Causal())
    want = tilewise.attention(q[None], k[None], v[None], mask=documents, layout="bshd")
    assert_close(out, want[0], budget(torch.float32))


def test_sinks_and_slopes_are_learned():
    case = make_case(Causal(), torch.float64, lengths=((30, 30), (7, 7), (64, 64)), behind=(0, 0))
    q, k, v, cu, _ = packed_inputs(case)
    slopes, sink = torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = tilewise.attention_packed(q, k, v, cu, cu, mask="causal", alibi=slopes, sink=sink)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    again = [one.detach().requires_grad_() for one in (slopes, sink)]
    parts = [
        tilewise.attention(
            *(x[None, begin:end] for x in (q, k, v)), mask="causal", alibi=again[0], sink=again[1], layout="bshd"
        )
        for begin, end in pairwise(cu.tolist())
    ]
    want = torch.cat(parts, 1)[0]
    (want * weight).sum().backward()
    assert_close(out, want, budget(torch.float64))
    for got, one in zip((slopes, sink), again, strict=True):
        assert_close(got.grad, one.grad, budget(torch.float32, 64))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_slopes_of_each_sequence(backend):
    lengths = ((30, 40), (7, 7), (64, 20))
    case = make_case(Causal(), torch.float64, lengths=lengths, behind=(2, 3))
    q, k, v, cu_q, cu_k = packed_inputs(case)
    slopes = torch.rand(3, 4, requires_grad=True)
    mask = Causal("bottom-right")
    out = tilewise.attention_packed(q, k, v, cu_q, cu_k, mask=mask, alibi=slopes, backend=backend)
    out.sum().backward()
    for number, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)):
        own = slopes[number].detach().requires_grad_()
        parts = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
        want = tilewise.attention(*parts, mask=mask, alibi=own, layout="bshd", backend=backend)[0]
        want.sum().backward()
        assert_close(out[q0:q1], want, budget(torch.float64))
        assert_close(slopes.grad[number], own.grad, budget(torch.float32, 64))


USED = torch.tensor([70, 20, 5, 500, 0, 3, 129], dtype=torch.int32)
PADDING = torch.tensor([0, 20, 25, 10, -3, 0, 129], dtype=torch.int32)
PARTS = {"used": {"seqused_k": USED}, "padded": {"leftpad_k": PADDING}}
PARTS["padded and used"] = {"seqused_k": torch.where(USED == 129, 200, USED), "leftpad_k": PADDING}


def of_parts(problem: Problem, part: str, mask: Any) -> Problem:
    return problem.with_(mask=Packed(7, 200, 300, mask, used="used" in part, padded="padded" in part))


def places_of_keys(starts: Tensor, part: str) -> list[tuple[int, int]]:
    """From where to where every sequence has keys; those that are used count from the offset."""
    used, padding = PARTS[part].get("seqused_k"), PARTS[part].get("leftpad_k")
    places = []
    for number, (begin, end) in enumerate(pairwise(starts.tolist())):
        last = end if used is None else min(end, begin + int(used[number]))
        places.append((begin if padding is None else min(last, begin + max(0, int(padding[number]))), last))
    return places


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("mask", [Causal(), Causal("bottom-right"), Window(20, 3, "bottom-right")], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_keys_that_are_not_used_and_padding_before_them(backend, mask, part):
    """As if the tensors did not have them: masks are aligned to the others."""
    case = make_case(Causal(), torch.float64)
    *tensors, cu_q, cu_k = packed_inputs(case, grad=True)
    out = tilewise.attention_packed(*tensors, cu_q, cu_k, mask=mask, backend=backend, **PARTS[part])
    grads = torch.autograd.grad(out.sum(), tensors)
    of_keys, seen = places_of_keys(cu_k, part), torch.zeros(len(tensors[1]), dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), of_keys, strict=True):
        places = ((q0, q1), (k0, k1), (k0, k1))
        own = [x[None, a:b].detach().requires_grad_() for x, (a, b) in zip(tensors, places, strict=True)]
        want = tilewise.attention(*own, mask=mask, layout="bshd", backend=backend)
        assert_close(out[q0:q1], want[0], budget(torch.float64))
        for grad, alone, (a, b) in zip(grads, torch.autograd.grad(want.sum(), own), places, strict=True):
            assert_close(grad[a:b], alone[0], budget(torch.float64))
        seen[k0:k1] = True
    assert (grads[1][~seen] == 0).all()
    problem = of_parts(case.problem, part, mask)
    inputs = [x.detach().transpose(0, 1)[None] for x in tensors]
    spans = spans_of_offsets(problem, {**case.operands, **PARTS[part]})
    again, _ = reference.forward(*inputs, with_spans(problem), None, spans)
    assert_close(again[0].transpose(0, 1), out, budget(torch.float64))


def test_dropout_keeps_the_mean():
    case = make_case(Full(), torch.float32, lengths=((40, 60), (50, 30)), behind=(0, 0))
    q, k, v, cu_q, cu_k = packed_inputs(case)
    whole = tilewise.attention_packed(q, k, v, cu_q, cu_k)
    drawn = torch.stack([tilewise.attention_packed(q, k, v, cu_q, cu_k, dropout=0.25) for _ in range(100)])
    assert not torch.equal(drawn[0], drawn[1])
    spread = drawn.std(0).norm() / 10
    assert (drawn.mean(0) - whole).norm() < 2 * spread


def test_one_compiled_graph_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def attend(q, k, v, cu):
        return tilewise.attention_packed(q, k, v, cu, cu, mask="causal").relu()

    counts = []
    for lengths in (((30, 30), (7, 7)), ((64, 64), (3, 3), (20, 20)), ((5, 5), (9, 9), (2, 2), (50, 50))):
        case = make_case(Causal(), torch.float32, lengths=lengths, behind=(0, 0))
        *tensors, cu, _ = packed_inputs(case, grad=True)
        out = attend(*tensors, cu)
        want = tilewise.attention_packed(*tensors, cu, cu, mask="causal").relu()
        assert torch.equal(out, want)
        got = torch.autograd.grad(out.sum(), tensors)
        assert all(map(torch.equal, got, torch.autograd.grad(want.sum(), tensors)))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, "no call but the first compiles anything"


def test_second_derivatives():
    case = make_case(Causal(), torch.float64, lengths=((5, 6), (3, 2)), heads=(2, 1), dims=(8, 8), behind=(0, 0))
    *tensors, cu_q, cu_k = packed_inputs(case, grad=True)
    attend = lambda *x: tilewise.attention_packed(*x, cu_q, cu_k, mask=Causal("bottom-right"))
    assert torch.autograd.gradgradcheck(attend, tensors)


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled"])
def test_without_a_row(backend):
    """Results of no rows, which may be differentiated as often as others, and no score at all."""
    q, k = torch.randn(0, 4, 8, requires_grad=True), torch.randn(5, 2, 8, requires_grad=True)
    offsets = (torch.tensor(places, dtype=torch.int32) for places in ([0, 0, 0], [0, 2, 5]))
    asked = {"return_lse": True, "return_max_logit": True, "backend": backend}
    out, lse, largest = tilewise.attention_packed(q, k, k, *offsets, **asked)
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 4, 8), (4, 0))
    assert largest.tolist() == [-torch.inf] * 4
    dq, dk = torch.autograd.grad(out.sum() + lse.sum(), (q, k), create_graph=True)
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert not torch.autograd.grad(dk.square().sum(), k)[0].any()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def bad_calls() -> dict[str, Any]:
    case = make_case(Causal(), torch.float32, lengths=((30, 30), (7, 7)), behind=(0, 0))
    q, k, v, cu, _ = packed_inputs(case)
    keep = torch.ones(1, 1, 37, 37, dtype=torch.bool)

    def call(*given: Any, **options: Any) -> Any:
        return lambda: tilewise.attention_packed(*given, **options)

    return {
        "falling": call(q, k, v, cu.flip(0), cu),
        "from 1": call(q, k, v, cu + 1, cu),
        "past the end": call(q, k, v, cu * 2, cu),
        "past the end of keys": call(q, k, v, cu, cu * 2),
        "int64": call(q, k, v, cu.long(), cu),
        "floats": call(q, k, v, cu.float(), cu),
        "two dimensions": call(q, k, v, cu[None], cu),
        "fewer of keys": call(q, k, v, cu, cu[:2]),
        "no sequence": call(q, k, v, cu[:1], cu[:1]),
        "a list": call(q, k, v, [0, 37], cu),
        "another device": call(q, k, v, cu.to("meta"), cu),
        "four dimensions": call(q[None], k, v, cu, cu),
        "heads": call(q[:, :3], k, v, cu, cu),
        "a mask of pairs": call(q, k, v, cu, cu, mask=keep),
        "documents": call(q, k, v, cu, cu, mask=Documents((0, 37))),
        "a term of pairs": call(
            q, k, v, cu, cu, scores=(tilewise.terms.Keep(("batch", "head")),), operands={"keep": keep}
        ),
        "lengths": call(q, k, v, cu, cu, "long"),
        "used keys of another dtype": call(q, k, v, cu, cu, seqused_k=cu[1:].long()),
        "too many used keys": call(q, k, v, cu, cu, seqused_k=cu),
    }


def test_one_offset_is_said_to_be_too_few():
    q, cu = torch.randn(4, 2, 8), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=r"got a tensor of shape \(1,\) .* tensor \(2,\)"):
        tilewise.attention_packed(q, q, q, cu, cu)


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_refused(name):
    with pytest.raises(InvalidInput) as caught:
        bad_calls()[name]()
    assert str(caught.value)


def test_offsets_on_a_device_are_read_only_where_it_is_asked_for(monkeypatch):
    """Stand-ins for tensors of a GPU, of which the check asks where they are, and for their numbers."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    problem = SimpleNamespace(mask=Packed(1), seq_q=37, seq_kv=37)
    for bad in ([0, 40], [1, 37], [0, 30, 20]):
        offsets = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), tolist=lambda bad=bad: bad)
        operands = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
        for value in (None, "0", ""):
            monkeypatch.delenv("TILEWISE_CHECK", raising=False)
            if value is not None:
                monkeypatch.setenv("TILEWISE_CHECK", value)
            check_values(problem, operands)
        monkeypatch.setenv("TILEWISE_CHECK", "1")
        with pytest.raises(InvalidInput, match="never fall"):
            check_values(problem, operands)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        check_values(problem, operands)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_what_tiles_lose_on_lengths():
    """Counted pair by pair."""
    lengths = Lengths.of((0, 70, 70, 200), (0, 90, 100, 140))
    for inner in MASKS:
        visited = seen = 0
        for rows, keys in ((70, 90), (0, 10), (130, 40)):
            shown = inner.to_bool(range(rows), range(keys), rows, keys)
            seen += int(shown.sum())
            for row in range(0, rows, 64):
                columns = shown[row : row + 64].any(0).nonzero()
                tiles = set() if not len(columns) else set(range(int(columns[0]) // 32, int(columns[-1]) // 32 + 1))
                visited += len(tiles) * 64 * 32
        assert lengths.lost(inner, 64, 32) == pytest.approx(1 - seen / visited)
    assert str(lengths) == "3 sequences of 0 to 130 queries, median 70, mean 67"
    assert str(Lengths.of((0, 5, 10), (0, 5, 10))) == "2 sequences of 5 queries"


def test_pytorch_kernels_refuse():
    case = make_case(Causal(), behind=(0, 0))
    found = plan(case.problem, H200)
    refused = {verdict.backend for verdict in found.verdicts if not verdict.willing}
    assert {"torch-flash", "torch-cudnn", "torch-efficient", "torch-math"} <= refused
    q, k, v, cu_q, cu_k = packed_inputs(case)
    with pytest.raises(UnsupportedProblem):
        tilewise.attention_packed(q, k, v, cu_q, cu_k, mask="causal", backend="torch-math")


# ---------------------------------------------------------------------------------------------------------------------
# Values and plans


@pytest.mark.parametrize("inner", MASKS, ids=str)
def test_the_mask_reads_back(inner):
    mask = Packed(12, 512, 1024, inner, same=True)
    assert parse(str(mask)) == mask
    used = Packed(12, 512, 1024, inner, used=True)
    assert parse(str(used)) == used
    assert [operand.name for operand in used.operands] == ["cu_seqlens_q", "cu_seqlens_kv", "seqused_k"]
    padded = Packed(12, 512, 1024, inner, padded=True)
    assert parse(str(padded)) == padded
    assert [operand.name for operand in padded.operands] == ["cu_seqlens_q", "cu_seqlens_kv", "leftpad_k"]
    problem = make_problem((1, 4, 5000, 64), BF16, mask=mask)
    assert Problem.from_dict(problem.to_dict()) == problem


@pytest.mark.parametrize(("target", "backend"), [(H200, "sm90"), (A100, "sm80")], ids=["h200", "a100"])
@pytest.mark.parametrize("inner", MASKS, ids=str)
def test_our_kernels_take_packed_sequences(target, backend, inner):
    case = make_case(inner, needs_grad=True)
    found = plan(case.problem, target)
    assert found.backend == backend
    assert found.forward is not None
    assert found.backward is not None
    assert all("_packed" in launch.unit.name for launch in (*found.forward.launches, *found.backward.launches))
    assert "packed sequences" in str(found)
    wide = plan(case.problem.with_(dtype=torch.float32), target)
    assert wide.forward is not None
    assert "_spans" in wide.forward.launches[-1].unit.name


def test_scratch_grows_with_rows_and_not_with_the_longest_sequence():
    problem = make_problem((1, 8, 1 << 16, 128), BF16, mask=Packed(512, 1 << 16, 1 << 16, Causal()), needs_grad=True)
    for backend, target in ((SM80, A100), (SM90, H200)):
        config = backend.backward_configs(problem, target)[0]
        program = backend.backward_program(problem, target, config)
        tiles = (1 << 16) // config.block_q + 512 + 2
        sums = 4 * 8 * tiles * config.block_q * (128 + 4)
        assert program.scratch.bytes <= sums


# ---------------------------------------------------------------------------------------------------------------------
# The table


NUMBER, TOGETHER, TILE = 7, 8, 9  # of a record


def made_table(
    cu_q: Tensor, cu_k: Tensor, totals: tuple[int, int], blocks: tuple[int, int], heads: int = 1, by_keys: bool = True
) -> Any:
    """Records, and for queries and keys the owners of tiles; the model's memory is the tensors'."""
    count = len(cu_q) - 1
    problem = make_problem((1, heads, totals[0], 64), BF16, seq_kv=totals[1], mask=Packed(count, inner=Causal()))
    table = packed.table(problem, H200, *blocks, by_keys=by_keys, slots=132)
    results = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in table.prepared.results}
    names = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k, **results}
    (launch,) = table.prepared.program.launches
    arguments = Arguments(launch.params)
    for name, value in launch.fields.items():
        if value is not None:
            setattr(arguments.params, name, names[value.operand].data_ptr() if isinstance(value, Address) else value)
    emulation.launch(launch.unit, launch.grid, launch.threads, arguments)
    return table, results


@emulation.emulated
@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=70), st.integers(0, 99))
def test_the_table_has_every_tile_once_and_the_longest_first(lengths, behind):
    starts = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    totals = int(starts[0][-1]) + behind, int(starts[1][-1]) + behind
    table, results = made_table(*starts, totals, (64, 128))
    records, count = results["packed_records"], len(lengths)
    assert records[:count, 1].tolist() == [q for q, _ in lengths]
    assert records[:count, 3].tolist() == [k for _, k in lengths]
    assert records[count, :4].tolist() == [int(starts[0][-1]), behind, 0, 0]
    assert records[count + 1, 1:4].tolist() == [0, int(starts[1][-1]), behind]
    for tiles, own, block in (("packed_q_tiles", 1, 64), ("packed_kv_tiles", 3, 128)):
        found = results[tiles]
        expected = sum(-(-length // block) for length in records[:, own].tolist())
        assert int(found[0, NUMBER]) == expected <= (table.q_room if own == 1 else table.kv_room)
        assert (found[1 + expected :, NUMBER] == -1).all()
        owners = found[1 : 1 + expected]
        numbers = owners[:, NUMBER].tolist()
        assert torch.equal(owners[:, :TILE], records[numbers, :TILE])
        for number in set(numbers):
            tile_count = -(-int(records[number, own]) // block)
            assert owners[owners[:, NUMBER] == number, TILE].tolist() == list(range(tile_count))
        if own == 1:  # they follow one another: scratch is laid out so
            assert all(number == numbers[int(records[number, 4])] for number in numbers)
        costs = (-(-owners[:, 1] // 64)).tolist()
        assert costs == sorted(costs, reverse=True)


@emulation.emulated
def test_tiles_of_a_head_keep_apart():
    """Those of sequences with as many tiles take turns, as far as two waves of CTAs reach."""
    lengths = [512, 500, 130, 385, 512, 512, 512]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    _, results = made_table(starts, starts, (int(starts[-1]),) * 2, (64, 128), heads=22)
    # Three sequences of four tiles of 128 keys and 22 heads make two waves. Those of 8 query tiles come before 7.
    groups = [(0, 1, 4), (5, 6), (3,), (2,)]
    assert tiles_of(results["packed_kv_tiles"]) == in_turns(groups, lengths, 128)


@emulation.emulated
def test_tiles_of_a_forward_take_turns_too():
    lengths = [512, 500, 130, 385, 512, 512, 512]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    keys = H200.l2_bytes // 2 // (2 * 64 * 2)
    _, results = made_table(starts, starts, (int(starts[-1]),) * 2, (64, 128), heads=keys // 1600, by_keys=False)
    # Three of them have keys that fill the share of the L2 cache.
    assert tiles_of(results["packed_q_tiles"]) == in_turns([(0, 1, 4), (5, 6), (3,), (2,)], lengths, 64)


def tiles_of(owners: Tensor) -> list[tuple[int, int]]:
    return [tuple(entry) for entry in owners[1 : 1 + int(owners[0, NUMBER]), [NUMBER, TILE]].tolist()]


def in_turns(groups: list[tuple[int, ...]], lengths: list[int], block: int) -> list[tuple[int, int]]:
    return [(number, tile) for group in groups for tile in range(-(-lengths[group[0]] // block)) for number in group]


@emulation.emulated
def test_heads_of_short_sequences_are_worked_on_together():
    keys = 2 * 132 * 128  # two tiles per multiprocessor, all heads together
    lengths = [keys, keys // 2, keys // 4, keys // 16, 0]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    _, results = made_table(starts, starts, (int(starts[-1]),) * 2, (64, 128), heads=6)
    assert results["packed_records"][: len(lengths), TOGETHER].tolist() == [1, 2, 6, 6, 6]


@emulation.emulated
@settings(max_examples=12)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=40), st.randoms())
def test_wrong_offsets_stay_within_the_tensors(offsets, random):
    other = list(offsets)
    random.shuffle(other)
    totals = 1000, 700
    table, results = made_table(torch.tensor(offsets).int(), torch.tensor(other).int(), totals, (64, 128))
    records = results["packed_records"].long()
    for start, length, total in ((0, 1, totals[0]), (2, 3, totals[1])):
        assert (records[:, start] >= 0).all()
        assert (records[:, length] >= 0).all()
        assert (records[:, start] + records[:, length] <= total).all()
    for tiles, own, block, room in (
        ("packed_q_tiles", 1, 64, table.q_room),
        ("packed_kv_tiles", 3, 128, table.kv_room),
    ):
        found = results[tiles][:, NUMBER].tolist()
        assert 0 <= found[0] <= room
        assert all(0 <= owner < len(records) for owner in found[1 : 1 + found[0]])
        assert found[1 + found[0] :] == [-1] * (room - found[0])
        tiles_kept = -(-records[:, own] // block)
        entries = results[tiles][1 : 1 + found[0]]
        for number in range(len(records)):
            of_number = entries[entries[:, NUMBER] == number, TILE].tolist()
            assert of_number == list(range(len(of_number)))
            assert len(of_number) >= int(tiles_kept[number])


# ---------------------------------------------------------------------------------------------------------------------
# The kernels

KERNELS = [pytest.param(SM80, A100, id="sm80"), pytest.param(SM90, H200, id="sm90")]
SHAPES = {
    "d64": {},
    "d128-one-head-each": {"dims": (128, 128), "heads": (2, 2)},
    "d192-128": {"dims": (192, 128)},
    "d40": {"dims": (40, 24)},
}


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("poisoned", [(), (3,)], ids=["", "nan"])
def test_forward(monkeypatch, backend, target, mask, shape, poisoned):
    emulation.install(monkeypatch)
    case = make_case(mask, poisoned=poisoned, **SHAPES[shape])
    forward = backend.bind(case.q, case.k, case.v, case.problem, None, target, case.operands)
    out, lse = forward(case.q, case.k, case.v, case.operands)
    check_forward(case, out, lse, poisoned)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("poisoned", [(), (3,)], ids=["", "nan"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_backward(monkeypatch, backend, target, mask, shape, poisoned, deterministic):
    emulation.install(monkeypatch)
    case = make_case(mask, poisoned=poisoned, needs_grad=True, deterministic=deterministic, **SHAPES[shape])
    check_gradients(backend, target, case, poisoned)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("mask", [Full(), Causal("bottom-right")], ids=str)
def test_wrong_offsets_run_to_the_end(monkeypatch, backend, target, mask):
    """Sequences that have no room are left out: the tiles that they would have had compute nothing, and the counters
    that later calls use are as they were."""
    emulation.install(monkeypatch)
    case = make_case(mask, lengths=((160, 160),) * 4, behind=(0, 0), needs_grad=True)
    wrong = torch.tensor([0, 700, 20, -5, 640]).int()  # the first and the last have all rows, and no room for both
    dout = torch.randn_like(case.q)
    forward = backend.bind(case.q, case.k, case.v, case.problem, None, target, case.operands)
    backward = backend.bind_backward(case.problem, None, target)
    for operands in ({"cu_seqlens_q": wrong, "cu_seqlens_kv": wrong}, case.operands):
        out, lse = forward(case.q, case.k, case.v, operands)
        grads = backward(dout, None, case.q, case.k, case.v, out, lse, operands)
    check_forward(case, out, lse)
    check_backward(case, grads, made(case, dout)[2], rounding_budget(BF16, 5))


def drawn(draw: random.Random, sequences: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Lengths of queries and keys of at most so many sequences: none, one, whole tiles and any other."""

    def length() -> int:
        return draw.choice((0, 1, 64, 128, draw.randint(0, 70), draw.randint(0, longest), draw.randint(0, longest)))

    return tuple((length(), length()) for _ in range(draw.randint(1, sequences)))


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("number", range(8))
def test_drawn_lengths(monkeypatch, backend, target, mask, number):
    """Forward and backward of four sets of lengths, one sequence of each NaN. TILEWISE_TEST_SEED draws others."""
    emulation.install(monkeypatch)
    seed = os.environ.get("TILEWISE_TEST_SEED", "0")
    draw = random.Random(f"{seed} {backend.name} {mask} {number}")
    for _ in range(4):
        lengths = drawn(draw, 5, 150)
        print(f"TILEWISE_TEST_SEED={seed}: {lengths}")
        poisoned = (draw.randrange(len(lengths)),)
        behind = (draw.randint(0, 9), draw.randint(0, 9))
        case = make_case(mask, lengths=lengths, poisoned=poisoned, behind=behind, needs_grad=True)
        problem = case.problem
        if problem.empty:
            continue
        forward = backend.bind(case.q, case.k, case.v, problem, None, target, case.operands)
        out, lse = forward(case.q, case.k, case.v, case.operands)
        check_forward(case, out, lse, poisoned, any_lengths=True)
        check_gradients(backend, target, case, poisoned, noisy=True)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("longest", [128, 1 << 16], ids=["claimed", "any-order"])
def test_backward_in_either_order(monkeypatch, backend, target, longest):
    """Of dQ: by tickets where all sequences are short, and where one may be long, as they come."""
    emulation.install(monkeypatch)
    case = make_case(Causal("bottom-right"), needs_grad=True)
    mask = case.problem.mask
    case = case._replace(problem=case.problem.with_(mask=Packed(mask.sequences, longest, longest, mask.inner)))
    check_gradients(backend, target, case)


TERMS: dict[str, Any] = {
    "softcap": ((Softcap(5.0),), {}),
    "alibi": ((Alibi(True),), {"slopes": torch.rand(len(LENGTHS), 4)}),
    "table": ((RelativeBias(601, 300, "float32"),), {"table": torch.randn(4, 601)}),
    "sink": ((Sink(),), {"sink": torch.randn(4)}),
}


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_scores(monkeypatch, backend, target, name):
    emulation.install(monkeypatch)
    terms, tensors = TERMS[name]
    case = make_case(Causal("bottom-right"), scores=terms, needs_grad=True)
    inputs = [tensor.nan_to_num() for tensor in case[1:4]]
    check_against_the_reference(backend, target, case.problem, {**case.operands, **tensors}, inputs)


WITHOUT_KEYS = ((129, 333), (100, 0), (64, 30))  # also rows that see none of their sequence's


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_rows_without_keys_under_a_sink(monkeypatch, backend, target, mask, dims, deterministic):
    """A sink has all the weight of such a row, so its lse is finite; its gradient dq is 0 all the same."""
    emulation.install(monkeypatch)
    fields = {"scores": (Sink(),), "needs_grad": True, "deterministic": deterministic}
    case = make_case(mask, lengths=WITHOUT_KEYS, heads=(2, 2), dims=dims, **fields)
    inputs, operands = [tensor.nan_to_num() for tensor in case[1:4]], {**case.operands, "sink": torch.randn(2)}
    assert_close(
        *check_against_the_reference(backend, target, case.problem, operands, inputs), budget(torch.float32, 64), "lse"
    )


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_the_largest_score_is_of_no_neighbour(monkeypatch, backend, target):
    emulation.install(monkeypatch)
    case = make_case(Causal(), scores=(MaxLogit(),), lengths=((70, 70), (30, 30)), behind=(0, 0))
    case.q[:, :, :70] *= 8  # rows that come with the last tile of the sequence in front of them stand behind it
    problem = case.problem.with_(mask=Packed(1, 0, 0, Causal()))
    operands = {
        "cu_seqlens_q": case.offsets[0][[0, 1]].contiguous(),
        "cu_seqlens_kv": case.offsets[1][[0, 1]].contiguous(),
    }
    case.q[:, :, 70:] = 1e4  # behind the last offset
    results: dict[str, Tensor] = {}
    backend.bind(case.q, case.k, case.v, problem, None, target, operands)(case.q, case.k, case.v, operands, results)
    own, inputs = case.member(0)
    wanted: dict[str, Tensor] = {}
    reference.forward(*(x.double() for x in inputs), own.with_(dtype=torch.float64), None, {}, wanted)
    assert_close(results["max_logit"], wanted["max_logit"], budget(torch.float32, 64))


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_dropout_draws_by_sequence(monkeypatch, backend, target):
    """A sequence drops what a batch of its number would: the kernels and the plain backends the same for a seed."""
    emulation.install(monkeypatch)
    lengths = ((70, 70), (0, 5), (33, 33), (130, 130))
    case = make_case(Full(), scores=(Dropout(0.5),), lengths=lengths, heads=(2, 2), behind=(0, 0))
    seed = torch.tensor([3, 5])
    operands = {**case.operands, "seed": seed}
    out, _ = backend.bind(case.q, case.k, case.v, case.problem, None, target, operands)(
        case.q, case.k, case.v, operands
    )
    doubles, doubled = [tensor.double() for tensor in case[1:4]], case.problem.with_(dtype=torch.float64)
    of_reference, lse = reference.forward(*doubles, doubled, None, operands)
    of_tiles, _ = tiled.forward(*doubles, doubled, None, operands)
    assert_close(of_tiles, of_reference, budget(torch.float64))
    assert_close(out, of_reference, rounding_budget(BF16, 3))
    dout = torch.randn_like(of_reference)
    grads = [
        one.backward(dout, None, *doubles, of_reference, lse, doubled, None, operands) for one in (reference, tiled)
    ]
    for name, grad in grads[0].items():
        assert_close(grads[1][name], grad, budget(torch.float64), name)
    for sequence in (0, 2, 3):
        problem, inputs = case.member(sequence)
        batch = [tensor.double().expand(sequence + 1, -1, -1, -1) for tensor in inputs]
        wide = problem.with_(batch=sequence + 1, dtype=torch.float64)
        want, _ = reference.forward(*batch, wide, None, {"seed": seed})
        assert_close(case.of(out, sequence, 0), want[sequence:], rounding_budget(BF16, 3))


def test_dropout_is_never_drawn_by_spans():
    """There scores stand at other places; kernels that know nothing else refuse."""
    mask = Packed(3, inner=Causal(), same=True)
    for dtype in (torch.float32, BF16):
        problem = make_problem((1, 4, 300, 64), dtype, mask=mask, scores=(Dropout(0.5),))
        assert not spans_say_all(problem)
        for backend, target in ((SM80, A100), (SM90, H200)):
            refused = [reason.what for reason in backend.why_not(problem, target) if "spans of keys" in reason.what]
            assert bool(refused) is (dtype is torch.float32)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_keys_that_kernels_do_not_look_at(monkeypatch, backend, target):
    emulation.install(monkeypatch)
    mask = Causal("bottom-right")
    case = make_case(mask, needs_grad=True)
    known = [tensor.nan_to_num() for tensor in case[1:4]]
    for part in ("used", "padded"):
        q, *keys_and_values = [tensor.clone() for tensor in known]
        unseen = torch.arange(case.k.shape[2]) < int(case.offsets[1][-1])
        for begin, end in places_of_keys(case.offsets[1], part):
            unseen[begin:end] = False
        for tensor in keys_and_values:
            tensor[:, :, unseen] = torch.nan
        operands = {**case.operands, **PARTS[part]}
        problem = of_parts(case.problem, part, mask)
        check_against_the_reference(backend, target, problem, operands, (q, *keys_and_values), known)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_a_table_serves_until_the_offsets_change(monkeypatch, backend, target):
    emulation.install(monkeypatch)
    case = make_case(Causal())
    forward = backend.bind(case.q, case.k, case.v, case.problem, None, target, case.operands)
    forward(case.q, case.k, case.v, case.operands)
    cu_q, cu_k = case.offsets
    cu_q[1:4] = cu_q[1]  # two sequences give their rows to the one behind them
    cu_k[1:4] = cu_k[1]
    out, lse = forward(case.q, case.k, case.v, case.operands)
    check_forward(case, out, lse)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_float32_goes_by_spans(monkeypatch, backend, target):
    emulation.install(monkeypatch)
    case = make_case(Causal("bottom-right"), torch.float32, lengths=((40, 50), (3, 70), (20, 0)))
    inputs = [tensor.nan_to_num() for tensor in case[1:4]]
    forward = backend.bind(*inputs, case.problem, None, target, case.operands)
    out, _ = forward(*inputs, case.operands)
    want, _ = reference.forward(*inputs, case.problem, None, case.operands)
    assert_close(out, want, budget(torch.float32, 64))


# ---------------------------------------------------------------------------------------------------------------------
# Documents


DOCUMENTS = (0, 70, 70, 71, 200, 330)
OF_KEYS = (0, 90, 120, 120, 300, 310)
DOCUMENT_TERMS: dict[str, Any] = {
    "none": ((), {}),
    "softcap": ((Softcap(5.0),), {}),
    "alibi": ((Alibi(),), {"slopes": torch.rand(4)}),
    "sink": ((Sink(),), {"sink": torch.randn(4)}),
}


def documents_case(mask: Documents, dtype: torch.dtype = BF16, layout: str = "bhsd", **fields: Any) -> Any:
    shape = (2, 4, mask.cu_seqlens_q[-1], 64)
    values = {"heads_kv": 2, "seq_kv": mask.cu_seqlens_kv[-1], "needs_lse": True, "layout": layout, "mask": mask}
    problem = make_problem(shape, dtype, **(values | fields))
    sizes = [(2, heads, seq, 64) for heads, seq in ((4, problem.seq_q), (2, problem.seq_kv), (2, problem.seq_kv))]
    if layout == "bshd":
        return problem, [torch.randn(b, s, h, d).to(dtype).transpose(1, 2) for b, h, s, d in sizes]
    return problem, [torch.randn(size).to(dtype) for size in sizes]


def packed_units(program: Any) -> bool:
    return all("_packed" in launch.unit.name for launch in program.launches)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("inner", MASKS, ids=str)
@pytest.mark.parametrize("of_keys", [DOCUMENTS, OF_KEYS], ids=["self", "cross"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_documents_run_as_packed_sequences(monkeypatch, backend, target, layout, inner, of_keys, deterministic):
    """Of every batch, in tensors of any layout; rows that see nothing are among them."""
    emulation.install(monkeypatch)
    mask = Documents(DOCUMENTS, of_keys, inner)
    problem, inputs = documents_case(mask, layout=layout, needs_grad=True, deterministic=deterministic)
    assert packed_units(backend.program(problem, target, backend.configs(problem, target)[0]))
    out, lse = backend.bind(*inputs, problem, None, target)(*inputs)
    assert out.stride() == torch.empty_like(inputs[0]).stride()
    assert_near(out, lse, tuple(inputs), problem)
    dout = torch.randn_like(inputs[0])
    want, want_lse, *truth = exact(*inputs, problem, None, dout)
    grads = backend.bind_backward(problem, None, target)(dout, None, *inputs, want.to(BF16), want_lse.float())
    for name, grad in zip("qkv", truth, strict=True):
        assert_close(grads[name], grad, rounding_budget(BF16, 6), name)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("name", DOCUMENT_TERMS)
def test_terms_of_documents(monkeypatch, backend, target, name):
    emulation.install(monkeypatch)
    terms, operands = DOCUMENT_TERMS[name]
    problem, inputs = documents_case(Documents(DOCUMENTS, (), Causal()), scores=terms, needs_grad=True)
    assert packed_units(backend.program(problem, target, backend.configs(problem, target)[0]))
    check_against_the_reference(backend, target, problem, operands, inputs)


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_nan_of_another_document_reaches_nothing(monkeypatch, backend, target):
    """No output and no gradient, in any batch."""
    emulation.install(monkeypatch)
    problem, inputs = documents_case(Documents(DOCUMENTS, (), Causal()), needs_grad=True)
    dout = torch.randn_like(inputs[0])
    want, want_lse, *truth = exact(*inputs, problem, None, dout)
    for tensor in (*inputs, dout):
        tensor[0, :, 71:200] = torch.nan
    out, _ = backend.bind(*inputs, problem, None, target)(*inputs)
    grads = backend.bind_backward(problem, None, target)(dout, None, *inputs, want.to(BF16), want_lse.float())
    clean = torch.ones(2, 330, dtype=torch.bool)
    clean[0, 71:200] = False
    for got, exactly in ((out, want), *zip((grads[name] for name in "qkv"), truth, strict=True)):
        of = clean[:, None].expand(got.shape[:3])
        assert_close(got[of], exactly[of], rounding_budget(BF16, 6))


@emulation.emulated
@pytest.mark.parametrize(("backend", "target"), KERNELS)
def test_batches_whose_documents_end_before_their_rows(monkeypatch, backend, target):
    """As offsets on a device may: rows and keys behind the last of them are in every batch."""
    emulation.install(monkeypatch)
    problem, inputs = documents_case(Documents((0, 70, 330), (), Causal()), needs_grad=True)
    problem = problem.with_(mask=Packed(2, 0, 0, Causal(), same=True))
    cu = torch.tensor([0, 70, 230], dtype=torch.int32)
    operands = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    for tensor in inputs:
        tensor[:, :, 230:] = torch.nan
    out, lse = backend.bind(*inputs, problem, None, target, operands)(*inputs, operands)
    dout = torch.randn_like(out)
    grads = backend.bind_backward(problem, None, target)(dout, None, *inputs, out, lse, operands)
    assert (lse[:, :, 230:] == -torch.inf).all()
    assert all((tensor[:, :, 230:] == 0).all() for tensor in (out, *grads.values()))
    own, parts = (
        problem.with_(mask=Documents((0, 70, 230), (), Causal()), seq_q=230, seq_kv=230),
        [tensor[:, :, :230] for tensor in inputs],
    )
    assert_near(out[:, :, :230], lse[:, :, :230], tuple(parts), own)
    truth = exact(*parts, own, None, dout[:, :, :230])[2:]
    for name, grad in zip("qkv", truth, strict=True):
        assert_close(grads[name][:, :, :230], grad, rounding_budget(BF16, 6), name)


def test_documents_that_go_by_spans():
    """Dropout draws by places in the tensors; a bias is of these places; places differ where offsets do; tiles of short
    documents are mostly empty."""
    long = Documents(DOCUMENTS, (), Causal())
    others: dict[str, Any] = {
        "dropout": {"scores": (Dropout(0.5),)},
        "slopes of batches": {"scores": (Alibi(True),)},
        "float32": {"dtype": torch.float32},
        "short": {"mask": Documents(tuple(range(331)), (), Causal())},
        "distances of two kinds": {
            "mask": Documents(DOCUMENTS, OF_KEYS, Causal()), "seq_kv": OF_KEYS[-1], "scores": (Alibi(),)
        },
    }  # fmt: skip
    problem, _ = documents_case(long)
    for backend, target in ((SM80, A100), (SM90, H200)):
        for name, changed in others.items():
            other = problem.with_(**changed)
            program = backend.program(other, target, backend.configs(other, target)[0])
            assert any("_spans" in launch.unit.name for launch in program.launches), name


def test_documents_on_a_device_stay_there(monkeypatch):
    """Fake tensors of a GPU: nothing reads the offsets, and the plan is that of packed sequences."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 640, 64, dtype=BF16, device="cuda") for _ in range(3))
        starts = torch.empty(4, dtype=torch.int64, device="cuda")
        slopes = torch.empty(2, 4, device="cuda")
        found = tilewise.explain(q, k, v, mask=Documents(starts, inner=Causal()), target="h200")
        assert found.problem.mask == Packed(3, 0, 0, Causal(), same=True)
        assert packed_units(found.forward)
        for others in ({"alibi": slopes}, {"dropout": 0.5}, {"keep": torch.empty(2, 1, 1, 640, dtype=torch.bool)}):
            with pytest.raises(RuntimeError, match="not linked"):  # spans are made by operations that fakes do not have
                tilewise.explain(q, k, v, mask=Documents(starts, inner=Causal()), target="h200", **others)


def test_terms_that_ask_for_places_go_by_spans_only_where_those_are_the_same() -> None:
    """By spans a score stands where it does among all packed rows and keys."""
    slopes = Alibi(learned=True)
    for same, term, allowed in ((True, slopes, True), (False, slopes, False), (True, Alibi(True, True), False)):
        mask = Packed(3, inner=Causal(), same=same)
        problem = make_problem((1, 4, 300, 64), BF16, mask=mask, scores=(term,), needs_grad=True)
        problem = problem.with_(operand_grads=("slopes",))
        assert spans_say_all(problem) is allowed
        refused = [reason.what for reason in SM90.why_not(problem, H200) if "spans of keys" in reason.what]
        assert bool(refused) is not allowed
    capped = make_problem((1, 4, 300, 64), torch.float32, mask=Packed(3, inner=Causal()), softcap=5.0)
    assert spans_say_all(capped)
