"""The Triton backend without a GPU: interpreted against float64, compiled for GPUs that are not there, its refusals.

Both need a process of their own: whether Triton interprets, and for whom it compiles, is settled when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from support import make_inputs, make_problem
from tilewise import Causal, Dense, Documents, Full, Target, Window, plan
from tilewise.errors import CompileError
from tilewise.masks import Packed
from tilewise.problem import Strides
from tilewise.triton import backend as triton
from tilewise.triton import packed

if TYPE_CHECKING:
    from tilewise import Problem

ROOT = Path(__file__).resolve().parent.parent
A100, H200, T4 = (Target.named(name) for name in ("a100", "h200", "t4"))
HALF = make_problem((1, 4, 64, 32), torch.float16)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton.INTERPRETER, raising=False)


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this folder. What NumPy deprecates, it says to Triton's interpreter."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    quiet = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    return subprocess.run(
        [sys.executable, *quiet, str(ROOT / "tests" / script), *arguments],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths} | variables,
    )  # fmt: skip


@needs_triton
@pytest.mark.slow
@pytest.mark.kernel_gate
def test_interpreted_it_matches_float64() -> None:
    done = run("triton_checks.py", TRITON_INTERPRET="1")
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton does not run with this NumPy")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "problems right" in done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("a100", marks=pytest.mark.kernel_gate), "h200"])
def test_it_compiles_without_spills_and_fits(target: str, tmp_path: Path) -> None:
    done = run("triton_compile.py", target, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("right:") == 8


REFUSED = {
    "dtype": HALF.with_(dtype=torch.float64),
    "head_dim": HALF.with_(head_dim=257),
    "diagonal band": HALF.with_(mask=Documents((0, 32, 64))),
    "not a diagonal": HALF.with_(mask=Dense((64, 64))),
    "dropout": HALF.with_(dropout=0.5),
    "transform": HALF.with_(transformed=True),
    "sequence": HALF.with_(seq_kv=1 << 29),
    "in each of 2 batches": HALF.with_(batch=2, mask=Packed(3, 64, 64, Causal())),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_it_refuses(says: str) -> None:
    (reason,) = triton.why_not(REFUSED[says], A100)
    assert says in reason.what
    assert reason.remedy


TAKEN = [
    HALF.with_(dtype=dtype, mask=mask, strides=strides, softcap=softcap, needs_grad=True, needs_lse=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for mask in (Full(), Causal(), Causal("bottom-right"), Window(8, 3))
    for strides in Strides
    for softcap in (0.0, 20.0)
]


def test_what_it_takes() -> None:
    sequences = [
        HALF.with_(mask=Packed(3, 64, 64, inner, used=used)) for inner in (Full(), Causal()) for used in (0, 1)
    ]
    wide = [HALF.with_(head_dim=192, head_dim_v=128), HALF.with_(head_dim=256, head_dim_v=1)]
    for problem in (*TAKEN, *wide, *sequences):
        for target in (A100, H200):
            assert triton.why_not(problem, target) == []
            assert triton.configs(problem, target)


def test_a_machine_without_triton_or_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (missing,) = triton.why_not(HALF, replace(A100, has_triton=False))
    assert "not installed" in missing.what
    (old,) = triton.why_not(HALF, T4)
    assert "sm_75" in old.what
    cpu = Target.named("cpu")
    (off,) = triton.why_not(HALF, cpu)
    assert "interpreter is off" in off.what
    monkeypatch.setenv(triton.INTERPRETER, "1")
    assert triton.why_not(HALF, cpu) == []
    (slow,) = triton.why_not(make_problem((1, 32, 4096, 128), torch.float16), cpu)
    assert "minutes" in slow.what
    (hosted,) = triton.why_not(HALF, A100)
    assert "on the host" in hosted.what


PREFERRED = {
    "odd float32 heads with a softcap": make_problem((1, 8, 2048, 62), softcap=30.0, needs_grad=True),
    "wide float32 heads with an lse to differentiate": make_problem((1, 8, 512, 256), needs_lse=True, needs_grad=True),
    "a stride in the last dimension": HALF.with_(strides=Strides.SCATTERED),
    "packed sequences with a stride in the last dimension": HALF.with_(
        mask=Packed(3, 64, 64, Causal()), strides=Strides.SCATTERED, needs_grad=True
    ),
    "a window over unaligned heads": HALF.with_(mask=Window(16, 0), strides=Strides.SCATTERED, needs_grad=True),
}


@pytest.mark.parametrize("what", PREFERRED)
@pytest.mark.parametrize("target", [A100, H200, Target.named("rtx-4090")], ids=lambda target: target.name)
def test_where_no_other_fused_kernel_goes_it_is_chosen(what: str, target: Target) -> None:
    assert plan.plan(PREFERRED[what], target).backend == "triton"
    assert plan.plan(PREFERRED[what], replace(target, has_triton=False)).backend not in ("triton", "sm80", "sm90")


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_the_table_of_packed_sequences_has_every_tile_once(of_keys: bool) -> None:
    problem = make_problem((1, 2, 50, 16), seq_kv=70, mask=Packed(4, 30, 40, Causal("bottom-right")))
    starts = [torch.tensor(own, dtype=torch.int32) for own in ((0, 7, 7, 30, 41), (0, 16, 20, 20, 60))]
    rows = packed.table(problem, dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True)), 16, of_keys=of_keys)
    assert rows.dtype == torch.int32
    assert rows.shape == (packed.room(problem, 16, of_keys=of_keys), packed.RECORD)
    owned = []
    for q_start, seq_q, k_start, seq_kv, begin, shift in rows.tolist():
        assert shift == seq_kv - seq_q
        start, length = (k_start, seq_kv) if of_keys else (q_start, seq_q)
        owned += range(start + begin, start + min(begin + 16, length))
    assert sorted(owned) == list(range(problem.seq_kv if of_keys else problem.seq_q)), (
        "those behind the last offset too"
    )


@pytest.mark.parametrize("offsets", [(5, 90, -3, 20), (0, 400, 10, 50), (-9, -8, -7, -6), (60, 40, 20, 0)], ids=str)
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_wrong_offsets_stay_within_the_tensors(offsets: tuple[int, ...], of_keys: bool) -> None:
    problem = make_problem((1, 2, 50, 16), mask=Packed(3, 50, 50, Causal(), used=True))
    starts, used = (torch.tensor(one, dtype=torch.int32) for one in (offsets, (9, -1, 99)))
    operands = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "seqused_k": used}
    rows = packed.table(problem, operands, 16, of_keys=of_keys)
    for start, length in ((rows[:, 0], rows[:, 1]), (rows[:, 2], rows[:, 3])):
        assert (start >= 0).all()
        assert (length >= 0).all()
        assert (start + length <= 50).all()
    assert (rows[:, 4] >= 0).all()


def test_an_interpreter_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(triton.INTERPRETER, "1")
    for problem in PREFERRED.values():
        assert plan.plan(problem, Target.named("cpu")).backend != "triton"


def test_what_does_not_build_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def warmup(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(triton, "_kernel", lambda name: Broken())
    monkeypatch.setattr(triton, "_operand", lambda dtype: None)
    problem: Problem = HALF.with_(needs_grad=True)
    with pytest.raises(CompileError, match=r"forward: Failed to find C compiler\.$"):
        triton.bind(*make_inputs(problem), problem, None)
