from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import make_problem, masks_with_lengths
from tilewise import Causal, Dense, InvalidInput, Problem, Target, Window
from tilewise.problem import Strides, describe, parse_dtype


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    mask, seq_q, seq_kv = draw(masks_with_lengths())
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Problem(
        batch=draw(st.integers(0, 3)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=draw(st.integers(1, 9)),
        head_dim_v=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64])),
        mask=mask,
        needs_lse=draw(st.booleans()),
    )


@given(problems())
def test_flops_and_bytes_count_visible_work_only(problem):
    seen = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    pairs = problem.batch * problem.heads_q * seen.sum().item()
    assert problem.flops() == 2 * pairs * (problem.head_dim + problem.head_dim_v)
    assert problem.flops(backward=True) == 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
    rows = problem.batch * problem.heads_q * seen.any(1).sum().item()
    keys = problem.batch * problem.heads_kv * seen.any(0).sum().item()
    written = problem.batch * problem.heads_q * problem.seq_q
    least = rows * problem.head_dim + keys * (problem.head_dim + problem.head_dim_v) + written * problem.head_dim_v
    least = least * problem.dtype.itemsize + (4 * written if problem.needs_lse else 0)
    if problem.mask.pairs(problem.seq_q, problem.seq_kv) and "documents" not in str(problem.mask):
        assert problem.min_bytes() == least
    else:  # a document without queries may hide keys inside the range that is counted as read
        assert problem.min_bytes() >= least


@given(problems())
def test_a_problem_is_a_value(problem):
    again = Problem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert hash(again) == hash(problem)
    assert str(again) == str(problem)


def test_defaults_and_changes():
    problem = make_problem((1, 8, 128, 64), heads_kv=2)
    assert problem.scale == pytest.approx(1 / 8)
    assert problem.group == 4
    assert problem.with_(mask=Causal()).mask == Causal()
    assert str(problem) == "float32 q(1,8,128,64) k(1,2,128,64) full"


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"seq_q": -1}, "seq_q"),
        ({"heads_kv": 3}, "heads"),
        ({"heads_kv": 0}, "heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"dtype": torch.int32}, "dtype"),
        ({"scale": math.inf}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout": 1.0}, "dropout"),
        ({"layout": "sbhd"}, "layout"),
        ({"mask": Dense((8, 7))}, "mask"),
        ({"mask": Dense((3, 1, 8, 8))}, "mask"),
    ],
)
def test_bad_fields_are_named(fields, argument):
    with pytest.raises(InvalidInput, match="expected") as caught:
        make_problem((1, 4, 8, 8), **fields)
    assert caught.value.argument == argument
    assert caught.value.remedy


def tensors(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def test_describe_reads_both_layouts():
    q, k, v = tensors((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))
    bhsd = describe(q, k, v, mask=Window(2))
    bshd = describe(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), mask="window:2,0", layout="bshd")
    assert bshd == bhsd.with_(layout="bshd")
    assert (bhsd.heads_q, bhsd.heads_kv, bhsd.seq_q, bhsd.seq_kv, bhsd.head_dim_v) == (6, 3, 5, 7, 4)


def test_describe_classifies_strides():
    base = torch.zeros(1, 2, 8, 72, dtype=torch.float16)
    assert describe(base[..., :64], base[..., :64], base[..., :64]).strides is Strides.ALIGNED
    assert describe(base[..., 1:65], base[..., :64], base[..., :64]).strides is Strides.UNALIGNED
    assert describe(base[..., ::2], base[..., :36], base[..., :36]).strides is Strides.SCATTERED


def test_describe_notices_grad():
    q, k, v = tensors(*[(1, 1, 2, 4)] * 3)
    assert not describe(q, k, v).needs_grad
    v.requires_grad_()
    assert describe(q, k, v).needs_grad
    with torch.no_grad():
        assert not describe(q, k, v).needs_grad


def test_target_table():
    h200 = Target.named("H200", torch_version="2.11.0+cu130")
    assert (h200.arch, h200.sms, h200.torch, h200.cudnn) == ("sm_90", 132, (2, 11), 91900)
    assert h200.peak_flops(torch.bfloat16) > 9e14
    assert Target.of("cpu").is_cpu
    with pytest.raises(InvalidInput, match="rtx-4090"):
        Target.named("rtx-9999")


def test_dtype_names():
    assert parse_dtype("bf16") is torch.bfloat16
    with pytest.raises(InvalidInput, match="float64"):
        parse_dtype("int8")
