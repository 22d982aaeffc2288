"""Dispatch: golden explanations (every change of a choice or a reason is a visible diff), and the planner's rules.

`make golden` rewrites the golden files; read the diff before committing it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support import make_problem
from tilewise import Causal, Dense, Documents, Full, Target, UnsupportedProblem, Window, explain
from tilewise.plan import BACKENDS, RULES, plan
from tilewise.problem import Strides
from tilewise.target import assumed

GOLDEN = Path(__file__).parent / "golden"
TARGETS = ["h200", "a100", "rtx-4090", "t4", "cpu"]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

PROBLEMS = {
    "seed": make_problem((2, 8, 512, 64), FP16),
    "train": make_problem((4, 16, 4096, 128), BF16, mask=Causal(), needs_grad=True),
    "train, head_dim 64": make_problem((4, 32, 4096, 64), BF16, needs_grad=True),
    "train, head_dim 256": make_problem((1, 8, 4096, 256), BF16, mask=Causal(), needs_grad=True),
    "train, deterministic": make_problem((1, 8, 1024, 64), BF16, needs_grad=True, deterministic=True),
    "grouped queries": make_problem((1, 32, 8192, 128), BF16, heads_kv=8, mask=Causal()),
    "grouped queries, float32": make_problem((1, 32, 1024, 128), FP32, heads_kv=8, mask=Causal()),
    "grouped queries, mask": make_problem((1, 32, 1024, 128), BF16, heads_kv=8, mask=Dense((1, 1, 1024, 1024))),
    "decode": make_problem((8, 32, 1, 128), BF16, heads_kv=8, seq_kv=8192),
    "append, bottom-right": make_problem((1, 16, 16, 128), BF16, seq_kv=8192, mask=Causal("bottom-right")),
    "append, top-left": make_problem((1, 16, 16, 128), BF16, seq_kv=8192, mask=Causal()),
    "one key": make_problem((2, 8, 4, 64), BF16, seq_kv=1),
    "image": make_problem((1, 24, 4608, 128), BF16),
    "vision": make_problem((64, 12, 197, 64), FP16),
    "window": make_problem((1, 8, 8192, 128), BF16, mask=Window(1024, 0)),
    "window, float32": make_problem((1, 8, 8192, 64), FP32, mask=Window(1024, 0), needs_grad=True),
    "window, softcap": make_problem((1, 8, 8192, 256), BF16, mask=Window(1024, 0), softcap=50.0),
    "softcap": make_problem((1, 8, 2048, 64), BF16, softcap=30.0, needs_grad=True),
    "documents": make_problem((1, 8, 96, 64), BF16, mask=Documents((0, 32, 96), inner=Causal()), needs_grad=True),
    "latent heads 192/128": make_problem((1, 128, 2048, 192), BF16, head_dim_v=128, mask=Causal()),
    "boolean mask": make_problem((2, 8, 512, 64), BF16, mask=Dense((2, 1, 512, 512))),
    "boolean mask, 64 over a tile": make_problem((2, 8, 576, 64), BF16, mask=Dense((2, 1, 576, 576)), needs_grad=True),
    "additive mask": make_problem((2, 8, 512, 64), FP32, mask=Dense((8, 512, 512), additive=True)),
    "float32": make_problem((2, 16, 4096, 64), FP32),
    "float32, tf32": make_problem((2, 16, 4096, 64), FP32, precision="tf32"),
    "float32, unaligned": make_problem((1, 8, 512, 64), FP32, strides=Strides.UNALIGNED),
    "float32, training": make_problem((2, 16, 4096, 64), FP32, mask=Causal(), needs_grad=True),
    "float64": make_problem((1, 2, 64, 32), FP64),
    "odd head_dim": make_problem((1, 8, 512, 60), BF16),
    "large head_dim": make_problem((1, 8, 512, 512), BF16),
    "dropout": make_problem((1, 8, 512, 64), FP16, dropout=0.1, needs_grad=True),
    "lse": make_problem((1, 8, 512, 64), FP16, needs_lse=True),
    "lse, training": make_problem((1, 8, 512, 64), FP16, needs_lse=True, needs_grad=True),
    "bshd": make_problem((1, 8, 512, 64), FP16, layout="bshd"),
    "scattered": make_problem((1, 8, 512, 64), FP16, strides=Strides.SCATTERED),
    "unaligned": make_problem((1, 8, 512, 64), FP16, strides=Strides.UNALIGNED),
    "transformed": make_problem((1, 8, 512, 64), FP32, transformed=True),
    "empty": make_problem((1, 8, 0, 64), FP32),
}


def explanations(target_name: str) -> str:
    """Every problem explained for one target, with PyTorch 2.13 wherever this runs."""
    target = Target.named(target_name, torch_version="2.13")
    sections = []
    for name, problem in PROBLEMS.items():
        try:
            text = str(plan(problem, target))
        except UnsupportedProblem as refusal:
            text = f"UnsupportedProblem: {refusal}"
        sections.append(f"== {name}\n{text}\n")
    return "\n".join(sections)


def test_a_device_may_be_taken_for_a_target():
    cpu, inputs = Target.of("cpu"), [torch.randn(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(3)]
    with assumed(Target.named("h200")):
        assert Target.of("cpu") == Target.named("h200")
        assert explain(*inputs).backend == "sm90"
        with assumed(Target.named("a100")):
            assert explain(*inputs).target == Target.named("a100")
        assert explain(*inputs).backend == "sm90"
    assert Target.of("cpu") == cpu
    assert explain(*inputs).target == cpu


@pytest.mark.parametrize("target", TARGETS)
def test_explanations_are_the_golden_ones(target):
    assert explanations(target) == (GOLDEN / f"{target}.txt").read_text(), (
        "dispatch changed: run `make golden`, read the diff"
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13", "2.14", "2.15"])
def test_every_verdict_is_reasoned(target, version):
    for problem in PROBLEMS.values():
        for backend in BACKENDS.values():
            for reason in backend.why_not(problem, Target.named(target, torch_version=version)):
                assert reason.what.strip()
                assert reason.remedy.strip()


@pytest.mark.parametrize("target", TARGETS)
def test_the_choice_is_willing_and_complete(target):
    for problem in PROBLEMS.values():
        chosen = plan(problem, Target.named(target))
        assert chosen.chosen.willing
        assert [verdict.backend for verdict in chosen.verdicts].count(chosen.backend) == 1
        assert {verdict.backend for verdict in chosen.verdicts} == set(BACKENDS)
        assert chosen.because
        told = chosen.to_dict()
        assert told["backend"] == chosen.backend
        assert told["config"] == (None if chosen.config is None else str(chosen.config))


def test_rules_name_backends_and_reasons():
    assert {rule.prefer for rule in RULES} <= set(BACKENDS)
    assert all(rule.because for rule in RULES)


def test_the_planner_steers_around_known_wrong_results():
    h200 = Target.named("h200", torch_version="2.11")
    risky = PROBLEMS["boolean mask, 64 over a tile"]
    assert plan(risky, h200).backend != "torch-cudnn"
    assert "pytorch#196678" in str(plan(risky, h200))
    assert plan(risky, h200, "torch-cudnn").backend == "torch-cudnn"  # asked for by name, it runs, with the notice
    assert any("pytorch#196678" in notice for notice in plan(risky, h200, "torch-cudnn").chosen.notices)


def test_plans_are_remembered():
    target = Target.named("h200")
    assert plan(PROBLEMS["train"], target) is plan(PROBLEMS["train"], target)


def test_packed_documents_run_apart_on_a_cpu():
    """PyTorch's kernel takes each under a mask it knows by name; the tiled loop skips what it has no name for."""
    starts, cpu = tuple(range(0, 513, 64)), Target.named("cpu")
    for inner, backend in ((Causal(), "torch-flash"), (Full(), "torch-flash"), (Window(8, 0), "tiled")):
        problem = make_problem((1, 8, 512, 64), FP32, mask=Documents(starts, inner=inner))
        assert plan(problem, cpu).backend == backend


if __name__ == "__main__" and "--update" in sys.argv:
    GOLDEN.mkdir(exist_ok=True)
    for name in TARGETS:
        (GOLDEN / f"{name}.txt").write_text(explanations(name))
