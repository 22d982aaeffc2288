"""A compiler that refuses kernels: another config of the same family takes the place of one that does not build."""

from __future__ import annotations

import re
import types
from itertools import product

import pytest
import torch

import emulation
import tilewise.plan
from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, CompileError, Target, UnsupportedProblem
from tilewise.call import build
from tilewise.engine import SM80, SM90
from tilewise.engine.source import COMPILED
from tilewise.lab.model import covering
from tilewise.masks import Packed
from tilewise.plan import State, plan

A100, H200 = Target.named("a100"), Target.named("h200")
BF16 = torch.bfloat16
PACKED = make_problem((1, 4, 10000, 64), BF16, mask=Packed(8, 2048, 2048, Causal()), needs_grad=True)

# Of the widest heads that a direction takes, where shared memory leaves one tile: no other config can take its place.
ALONE = {
    "backward_float32_bf16x6_d128x128_q64_kv64_s1r1.sm_90a",
    "backward_16_d256x256_q64_kv64.sm_90a",
    "float32_fp16x3_d256x256_q128_kv32_k1v1.sm_90a",
    "fa2_backward_16_d256x256_q32_kv32_w4_222_s1_x1.sm_89",
    "fa2_backward_tf32x1_d128x128_q16_kv64_s1_x1.sm_89",
    "fa2_backward_tf32x3_d128x128_q16_kv64_s1_x1.sm_89",
    "fa2_forward_16_d256x256_q64_kv64_w4_s1_x1.sm_89",
    "fa2_forward_tf32x1_d256x256_q64_kv16_w4_s1_x1.sm_89",
    "fa2_forward_tf32x3_d256x256_q64_kv16_w4_s1_x1.sm_89",
}


def problems():
    """Those whose kernels CI compiles, and all heads of packed sequences."""
    for problem in covering._problems():
        yield problem
        if problem.seq_q == problem.seq_kv == 2112 and problem.dtype is not torch.float32:
            yield problem.with_(seq_q=10000, seq_kv=10000, mask=Packed(4, 8192, 8192, problem.mask))


def kind_of(unit):
    """Its label with the terms, extents and the format of 16 bits taken out."""
    name = re.sub("_softcap|_spans|_packed", "", unit.name).replace("bf16_", "16_").replace("fp16_", "16_")
    return f"{name}.{unit.arch}"


@pytest.mark.parametrize("target", COMPILED, ids=lambda target: target.name)
@pytest.mark.parametrize("backend", [SM80, SM90], ids=str)
def test_every_kernel_has_another_to_take_its_place(backend, target):
    alone, refused = set(), 0
    for drawn, grad in product(problems(), (False, True)):
        problem = drawn.with_(needs_grad=grad)
        if backend.why_not(problem, target):
            continue
        works = tilewise.plan._first_that_work(backend, problem, target, State())[-1]
        (main,) = (unit for unit in works.program.units if works.config.name in unit.name)
        state = State(frozenset({(main.label, "it spills")}))
        again = tilewise.plan._first_that_work(backend, problem, target, state)[-1]
        refused += 1
        if again.passed_over:
            assert again.passed_over == (main.label,)
            assert type(again.config) is type(works.config)
            assert main not in again.program.units
        else:
            alone.add(kind_of(main))
    assert refused or (backend, target.capability) != (SM90, (9, 0))
    assert alone <= ALONE


@pytest.fixture
def compiler(monkeypatch):
    """Refuses the kernels whose names hold one of `refuses`; calls are planned for an H200, and not bound."""
    made = types.SimpleNamespace(refuses=(), built=[])

    def build_all(units):
        for unit in units:
            if any(name in unit.name for name in made.refuses):
                yield unit, CompileError(f"{unit.name} spills\n  and more")
            made.built.append(unit.label)

    monkeypatch.setattr(tilewise.plan, "_left_out", frozenset())
    monkeypatch.setattr(build, "build_all", build_all)
    monkeypatch.setattr(build, "is_loaded", lambda unit: False)
    monkeypatch.setattr(build, "Target", types.SimpleNamespace(of=lambda device: H200))
    monkeypatch.setattr(build, "_bound_call", lambda planned, *others: planned)
    return made


def planned(problem, backend="auto"):
    q, k, v = (torch.empty(1, device="meta") for _ in range(3))
    return build.build(problem, q, k, v, {}, backend, lambda: 0)[0]


def test_packed_training_stays_in_its_family(compiler, caplog):
    first = planned(PACKED)
    compiler.refuses = ("causal_q256_kv64_k4v4_pingpong_packed", "causal_q192_kv128_k3v3_pingpong_packed")
    again = planned(PACKED)
    assert (first.backend, again.backend) == ("sm90", "sm90")
    assert again.config in SM90.forward_direction.for_any_length(PACKED, H200)
    assert again.backward_config == first.backward_config
    assert "is left out from now on" in caplog.text
    notes = [line for line in str(again).splitlines() if "the next config of its table runs" in line]
    assert len(notes) == 2
    assert all("failed here" in note and "spills" in note for note in notes)
    assert "the next config" not in str(first)
    assert any("the next config" in note for note in again.to_dict()["verdicts"][0]["notices"])


def test_float32_goes_to_wider_heads(compiler):
    problem = make_problem((1, 2, 4096, 96))
    compiler.refuses = ("d96x96",)
    again = planned(problem)
    assert (again.backend, again.config.head_dim) == ("sm90", 128)


def test_a_compiler_that_refuses_everything_leaves_another_backend(compiler):
    compiler.refuses = ("forward",)
    assert planned(PACKED).backend not in ("sm80", "sm90")
    reasons = plan(PACKED, H200).verdicts[0].reasons
    assert "failed here" in reasons[0].what
    with pytest.raises(UnsupportedProblem):
        plan(PACKED, H200, "sm90")


def test_what_is_refused_by_name_says_why(compiler):
    compiler.refuses = ("forward",)
    with pytest.raises(CompileError, match="spills"):
        planned(PACKED, "sm90")


@pytest.mark.nightly
@emulation.emulated
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    ("backend", "target", "dtype", "dims"),
    [
        (SM90, H200, BF16, (64, 64)),
        (SM90, H200, BF16, (96, 96)),
        (SM90, H200, BF16, (128, 128)),
        (SM90, H200, BF16, (192, 128)),
        (SM90, H200, BF16, (256, 256)),
        (SM90, H200, torch.float32, (64, 64)),
        (SM90, H200, torch.float32, (96, 96)),
        (SM80, A100, BF16, (64, 64)),
        (SM80, A100, BF16, (128, 128)),
        (SM80, A100, torch.float32, (64, 64)),
        (SM80, A100, torch.float32, (96, 96)),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_what_takes_its_place_computes_the_same(monkeypatch, backend, target, dtype, dims, needs_grad):
    """One config of each width of heads, and the last."""
    problem = make_problem((1, 2, 150, dims[0]), dtype, head_dim_v=dims[1], heads_kv=1, mask=Causal(), needs_lse=True)
    problem = problem.with_(needs_grad=needs_grad)
    emulation.install(monkeypatch)
    torch.manual_seed(0)
    q, k, v = inputs = make_inputs(problem)
    dout = torch.randn(1, 2, 150, dims[1]).to(dtype)
    out, lse, *truth = exact(*inputs, problem, None, dout)
    direction = backend.backward_direction if needs_grad else backend.forward_direction
    spare = list(direction.spare(problem, target))
    for config in {(config.head_dim, config.head_dim_v): config for config in spare}.values():
        if needs_grad:
            run = backend.bind_backward(problem, config, target)
            grads = run(dout, None, q, k, v, out.to(dtype), lse.float())
            for name, want in zip("qkv", truth, strict=True):
                assert_close(grads[name], want, budget(dtype, 150), f"d{name} by {config}")
        else:
            got, got_lse = backend.bind(*inputs, problem, config, target)(*inputs, None)
            assert_close(got, out, budget(dtype, 150), f"out by {config}")
            assert_close(got_lse, lse, budget(dtype, 150), f"lse by {config}")
