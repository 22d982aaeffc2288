"""Where sequences lie is one description (kernels/common/extents.cuh): here a packed one, by this file alone.

Sequences of any lengths stand behind one another in (total, heads, dim) tensors, their starts in device memory. The
kernels are the real ones, the program is that of as many sequences of the largest length.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

import emulation
from support import assert_near, exact, make_problem, rounding_budget
from tilewise import Causal, Full, Target
from tilewise.engine import run
from tilewise.engine.extents import Extents
from tilewise.engine.program import Address, Stride
from tilewise.engine.sm80 import backward as sm80_backward
from tilewise.engine.sm80 import forward as sm80_forward
from tilewise.engine.sm90 import forward as sm90_forward
from tilewise.jit.compile import KERNELS

A100, H200 = (Target.named(name) for name in ("a100", "h200"))

CPP = """namespace tilewise {
struct Packed {
  static constexpr bool has_operands = true, ragged = true;
  struct Operands {
    const int *q_starts, *k_starts;
    void* out_rows;
    long long out_rows_batch_stride, out_rows_head_stride, out_rows_seq_stride;
    int ends_aligned;
  };
  using Record = SequenceRecord;
  template <typename Params>
  using Sequence = KeptSequence<Params>;

  template <typename Params>
  static __device__ __forceinline__ Record find_queries(const Params& params, int b) {
    return {params.q_starts[b], 0, params.q_starts[b + 1] - params.q_starts[b], 0, 0, 0};
  }
  template <typename Params>
  static __device__ __forceinline__ Record find(const Params& params, int b) {
    Record record = find_queries(params, b);
    record.k_start = params.k_starts[b];
    record.seq_k = params.k_starts[b + 1] - params.k_starts[b];
    const int offset = params.ends_aligned ? record.seq_k - record.seq_q : 0;
    record.first_shift = params.band_first_shift + offset;
    record.end_shift = params.band_end_shift + offset;
    return record;
  }
};
}  // namespace tilewise
"""
POINTER, LONG = ctypes.c_void_p, ctypes.c_longlong
PACKED = Extents(
    "tilewise::Packed",
    CPP,
    "_packed",
    (
        ("q_starts", POINTER),
        ("k_starts", POINTER),
        ("out_rows", POINTER),
        ("out_rows_batch_stride", LONG),
        ("out_rows_head_stride", LONG),
        ("out_rows_seq_stride", LONG),
        ("ends_aligned", ctypes.c_int),
    ),
    keeps_records=True,
)
DEVICE_OPERANDS = {"q_starts": Address("q_starts"), "k_starts": Address("k_starts")}
OUT_OPERANDS = {
    "out_rows": Address("out"),
    "out_rows_batch_stride": Stride("out", 0),
    "out_rows_head_stride": Stride("out", 1),
    "out_rows_seq_stride": Stride("out", 2),
}
# What no kernel reads for itself: combine.cuh works on rows whatever their sequence; the facts of the float32 forward
# and the gradient of a bias that sequences share are of whole tensors.
ASKED_OF_THE_PLAN = ("params.seq_q", "params.seq_k", "params.band_")
ABOUT_TENSORS = {"combine.cuh", "float32_forward.cuh", "bias_gradient.cuh"}
LENGTHS = [(70, 70), (1, 33), (0, 20), (130, 90), (64, 128), (40, 0)]  # of queries and keys
HEADS, DIM, BF16 = (2, 1), 64, torch.bfloat16


def longest(mask, lengths=LENGTHS, **fields):
    """A batch of sequences as long as the longest: what decides tiles, grids and scratch."""
    shape = (len(lengths), HEADS[0], max(q for q, _ in lengths), DIM)
    values = {"heads_kv": HEADS[1], "seq_kv": max(k for _, k in lengths), "mask": mask, "needs_lse": True}
    return make_problem(shape, BF16, **(values | fields))


def one(mask, length, **fields):
    return make_problem((1, HEADS[0], length[0], DIM), BF16, heads_kv=HEADS[1], seq_kv=length[1], mask=mask, **fields)


def packed(program, units, mask, total, operands=DEVICE_OPERANDS, **changes):
    """The program with packed kernels in the place of the batched ones."""
    left, right, _ = Causal().band(1, 1) if mask != Full() else Full().band(1, 1)
    band = {"band_first_shift": -left, "band_end_shift": right + 1}
    aligned = {"ends_aligned": int(mask == Causal("bottom-right"))}
    launches = []
    for launch, unit in zip(program.launches, units, strict=True):
        known = {name for name, *_ in launch.params._fields_}
        told = {name: value for name, value in (band | {"seq_q": total} | changes).items() if name in known}
        fields = {**launch.fields, **told, **operands, **aligned}
        launches.append(launch._replace(unit=unit, params=PACKED.params(launch.params), fields=fields))
    return program._replace(launches=tuple(launches))


def make_packed(lengths, poisoned=()):
    """(1, heads, total, dim) views of (total, heads, dim) tensors, and the starts of their sequences."""
    torch.manual_seed(0)
    starts = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    totals = [int(start[-1]) for start in starts]
    shapes = (totals[0], HEADS[0], DIM), (totals[1], HEADS[1], DIM), (totals[1], HEADS[1], DIM)
    tensors = [torch.randn(shape).to(BF16) for shape in shapes]
    for sequence in poisoned:
        for tensor, which in zip(tensors, (0, 1, 1), strict=True):
            tensor[starts[which][sequence] : starts[which][sequence + 1]] = torch.nan
    return [tensor.transpose(0, 1)[None] for tensor in tensors], starts


def of_sequence(tensor, starts, i):
    return tensor[:, :, int(starts[i]) : int(starts[i + 1])]


def check_forward(out, lse, tensors, starts, mask, lengths, poisoned):
    for i, length in enumerate(lengths):
        if i in poisoned or not length[0]:
            continue
        got, got_lse = of_sequence(out, starts[0], i), of_sequence(lse, starts[0], i)
        if not length[1]:
            assert (got == 0).all()
            assert (got_lse == -torch.inf).all()
            continue
        inputs = tuple(of_sequence(tensor, starts[which], i) for tensor, which in zip(tensors, (0, 1, 1), strict=True))
        assert_near(got, got_lse, inputs, one(mask, length, needs_lse=True))


def run_packed(monkeypatch, program, tensors, starts, seed=0, **results):
    emulation.install(monkeypatch, seed=seed)
    names = dict(zip(("q", "k", "v"), tensors, strict=True)) | {"q_starts": starts[0], "k_starts": starts[1]} | results
    run.load(program, names, 0)(*names.values())


@pytest.mark.parametrize("folder", ["sm80", "sm90"])
def test_every_role_asks_the_plan_of_its_tile(folder):
    paths = sorted((KERNELS / folder).glob("*.cuh"))
    assert len(paths) > 10
    for path in paths:
        if path.name not in ABOUT_TENSORS:
            assert not [name for name in ASKED_OF_THE_PLAN if name in path.read_text()], path


@emulation.emulated
@pytest.mark.parametrize("mask", [Causal(), Causal("bottom-right"), Full()], ids=str)
@pytest.mark.parametrize("poisoned", [(), (3,)], ids=["", "nan"])
def test_packed_sequences_forward_sm80(monkeypatch, mask, poisoned):
    problem = longest(mask)
    tensors, starts = make_packed(LENGTHS, poisoned)
    config = sm80_forward.configs(problem, A100)[0]
    unit = sm80_forward.unit(config, A100.arch, (), PACKED)
    program = packed(sm80_forward.program(problem, A100, config), [unit], mask, int(starts[0][-1]))
    out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
    run_packed(monkeypatch, program, tensors, starts, out=out, lse=lse)
    check_forward(out, lse, tensors, starts, mask, LENGTHS, poisoned)


@emulation.emulated
@pytest.mark.parametrize("mask", [Causal(), Causal("bottom-right"), Full()], ids=str)
@pytest.mark.parametrize("poisoned", [(), (3,)], ids=["", "nan"])
def test_packed_sequences_forward_sm90(monkeypatch, mask, poisoned):
    problem = longest(mask)
    tensors, starts = make_packed(LENGTHS, poisoned)
    # Rows of the next sequence come with the last tile of keys: a kernel with a scanner, and a band that may hide none.
    config = replace(sm90_forward.configs(problem, H200)[0], mask=1, split=False)
    unit = sm90_forward.unit(config, "sm_90a", (), PACKED)
    plain = sm90_forward._program(problem, H200, config)
    program = packed(plain, [unit], mask, int(starts[0][-1]), DEVICE_OPERANDS | OUT_OPERANDS, work_counter=None)
    program = program._replace(launches=(program.launches[0]._replace(grid=5),))
    out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
    run_packed(monkeypatch, program, tensors, starts, out=out, lse=lse)
    check_forward(out, lse, tensors, starts, mask, LENGTHS, poisoned)


@emulation.emulated
@pytest.mark.parametrize("mask", [Causal("bottom-right"), Full()], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_packed_sequences_backward_sm80(monkeypatch, mask, deterministic):
    problem = longest(mask, needs_grad=True, deterministic=deterministic)
    one_slot = replace(A100, sms=1)  # tiles are not cut into pieces, whose number would have to be known
    tensors, starts = make_packed(LENGTHS)
    total = int(starts[0][-1])
    config = sm80_backward.configs(problem, A100)[0]
    plain = sm80_backward.program(problem, one_slot, config)
    assert plain.launches[1].fields["pieces"] == plain.launches[1].fields["kv_tiles"]
    units = [
        sm80_backward.preprocess_unit(config.element, 8, A100.arch, PACKED),
        sm80_backward.unit(config, A100.arch, (), PACKED),
        sm80_backward.postprocess_unit(config, A100.arch, PACKED),
    ]
    program = packed(plain, units, mask, total)
    dout = torch.randn(total, HEADS[0], DIM).to(BF16).transpose(0, 1)[None]
    out, lse = torch.zeros_like(tensors[0]), torch.full(tensors[0].shape[:3], -torch.inf)
    truth = {}
    for i, length in enumerate(LENGTHS):
        if all(length):
            parts = [of_sequence(x, starts[w], i) for x, w in zip((*tensors, dout), (0, 1, 1, 0), strict=True)]
            wide, wide_lse, *truth[i] = exact(*parts[:3], one(mask, length, needs_grad=True), None, parts[3])
            of_sequence(out, starts[0], i).copy_(wide)
            of_sequence(lse, starts[0], i).copy_(wide_lse)
    grads = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    results = {"out": out, "lse": lse, "dout": dout, "dlse": None, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    run_packed(monkeypatch, program, tensors, starts, **results)
    for i, length in enumerate(LENGTHS):
        for j, grad in enumerate(grads):
            got = of_sequence(grad, starts[min(j, 1)], i)
            if not all(length):
                assert (got == 0).all()
                continue
            error = (got.double() - truth[i][j]).norm() / truth[i][j].norm()
            assert error <= rounding_budget(BF16, 4), f"sequence {i}, gradient {j}: {error:.2e}"
