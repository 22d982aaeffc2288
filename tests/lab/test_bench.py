"""bench: the suites are sound data, the score is what it says, and a record is complete and never overwritten."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import types
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from suites import drawn
from typer.testing import CliRunner

from support import make_problem
from tilewise import Problem, masks
from tilewise.errors import InvalidInput
from tilewise.lab import report
from tilewise.lab.candidates import names as candidates
from tilewise.lab.candidates import rivals
from tilewise.lab.candidates.inputs import make_inputs
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.commands.app import app
from tilewise.lab.measure import accuracy, ahead, clocks, worker
from tilewise.lab.measure.compare import (
    REFUSED,
    TIMES,
    VERIFIED,
    Comparison,
    Outcome,
    Row,
    Settings,
    compare,
    compare_all,
)
from tilewise.lab.measure.pool import Failure, Pool
from tilewise.lab.measure.timing import METHODS, ROTATED_BYTES, Rotation, turns_for
from tilewise.lab.render import bench_report
from tilewise.lab.studies import bench, kept, records, suites
from tilewise.terms import Sink

if TYPE_CHECKING:
    from pathlib import Path

LAST_LINE = re.compile(r"^geomean (\d+\.\d{3}), worst (\d+\.\d{3}) \((.+)\)$")


def comparison(name: str, ours: float, peer: float, verdict: str = VERIFIED) -> Comparison:
    row = Row(name, make_problem((1, 2, 8, 8)), ("tilewise", "torch-default"))
    errors = {"out": {"norm": 1e-7, "worst_row": 1e-7}}
    return Comparison(
        row,
        [
            Outcome("tilewise", verdict, errors=errors, forward=[[ours]], overhead=[1e-5], memory=1 << 20),
            Outcome("torch-default", VERIFIED, errors=errors, forward=[[peer]]),
        ],
    )


def show(done: list[Comparison]) -> None:
    record = records.Record("this run", "", bench.record("cpu", done, Settings(), ["test"]))
    report.show(bench_report.report_of(record.values, record.marks()))


@pytest.mark.parametrize("name", suites.names())
def test_suites_are_sound(name: str) -> None:
    rows = suites.rows_of(name)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.candidates[0] in ("tilewise", "tilewise:packed", "tilewise:cached", "sm80")
        assert any(Candidate(one).is_peer or one in ("torch-varlen", "tilewise:plain") for one in row.candidates)
        assert not Candidate(row.candidates[0]).why_not(row.problem)
        assert row.timing in METHODS
        assert row.timing == "wall" if row.device == "cpu" else row.timing in ("events", "graph", "host", "wall")
        assert set(row.timed) <= set(TIMES)
        assert row.problem.needs_grad or row.timed == ("forward",)
        assert row.flops > 0


def test_the_backward_suite_is_the_table_it_promises() -> None:
    rows = [row for row in suites.rows_of("backward") if row.problem.group == 1]
    found = {(row.problem.head_dim, str(row.problem.mask), row.problem.seq_q) for row in rows}
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert found == {(dim, mask, seq) for dim in (64, 128, 256) for mask in ("full", "causal") for seq in lengths}
    for row in rows:
        assert row.problem.batch * row.problem.seq_q == 16384
        assert row.problem.heads_q * row.problem.head_dim == 2048
    for row in suites.rows_of("backward"):
        assert row.timed == ("backward",)
        assert row.flops == row.problem.flops(backward=True)
    training = suites.rows_of("training")
    assert {row.timing for row in training} == {"wall", "graph"}
    assert all(row.timed == ("step",) and "tilewise:deterministic" in row.candidates for row in training)


@pytest.mark.parametrize("name", ["forward", "backward", "training"])
def test_the_tables_have_grouped_rows_too(name: str) -> None:
    grouped = [row.problem for row in suites.rows_of(name) if row.problem.group > 1]
    assert len({problem.group for problem in grouped}) >= 3
    assert {problem.head_dim for problem in grouped} >= {64, 128}


def test_the_grouped_suite_times_every_direction_of_what_models_have() -> None:
    rows = suites.rows_of("grouped")
    by_problem: dict[Problem, list[str]] = {}
    for row in rows:
        assert row.problem.dtype == torch.bfloat16
        assert row.problem.needs_grad == (row.timed != ("forward",))
        assert {"torch-cudnn", "torch-flash"} < set(row.candidates)
        by_problem.setdefault(row.problem.with_(needs_grad=False), []).extend(row.timed)
    assert all(timed == ["forward", "backward", "step"] for timed in by_problem.values())
    shapes = {
        (p.batch, p.heads_q, p.heads_kv, p.seq_q, p.head_dim): str(p.mask) for p in by_problem if str(p.mask) != "full"
    }
    promised = {
        (1, 32, 8, 4096, 128), (1, 32, 8, 8192, 128), (4, 32, 8, 2048, 128), (1, 64, 8, 4096, 128),
        (1, 64, 8, 8192, 128), (1, 28, 4, 4096, 128), (1, 32, 4, 8192, 128), (1, 64, 8, 4096, 64),
        (1, 16, 2, 8192, 128), (1, 8, 4, 8192, 256), (2, 32, 8, 4096, 64),
    }  # fmt: skip
    assert promised <= set(shapes)
    assert {str(problem.mask) for problem in by_problem} == {"full", "causal"}
    assert {problem.heads_kv for problem in by_problem} >= {1, 2, 4, 8}
    assert {problem.group for problem in by_problem} >= {2, 4, 7, 8}
    assert {problem.batch for problem in by_problem} >= {1, 2, 4, 8}
    assert {problem.seq_q for problem in by_problem} >= {2048, 4096, 8192, 16384, 32768}


@pytest.mark.parametrize("name", ["forward", "backward", "grouped", "odd", "chunked", "packed", "drawn"])
def test_the_truth_of_every_row_is_affordable_on_a_gpu(name: str) -> None:
    """By the scores that it computes in float64, of which an H200 does some 10^10 per second."""
    for problem in {row.problem for row in suites.rows_of(name)}:
        sample = accuracy.choose(problem, 0, "cuda")
        scores = len(sample.groups) * problem.group * len(sample.rows) * problem.seq_kv
        assert 0 < scores < 10**10, problem
        if isinstance(problem.mask, masks.Documents) and len(sample.rows) < problem.seq_q:
            starts = problem.mask.cu_seqlens_q
            assert {end - 1 for end in starts[1:]} <= set(sample.rows), "one row of every document"


def test_the_odd_suite_has_what_no_tile_divides_and_models_have() -> None:
    rows = suites.rows_of("odd")
    assert [row.timed for row in rows] == [("forward",), ("backward",)] * 24
    problems = [row.problem for row in rows[::2]]
    assert {197, 257, 577, 785, 1500, 20280, 32760} <= {problem.seq_q for problem in problems}
    assert {32, 72, 80, 88, 96, 112, 160, 224} <= {problem.head_dim for problem in problems}
    assert any((p.heads_kv, p.head_dim, p.head_dim_v, p.seq_q) == (128, 192, 128, 3072) for p in problems)
    assert any(p.seq_kv == 77 for p in problems)
    assert any(p.heads_kv == 1 < p.heads_q for p in problems)
    assert any(p.group == 7 for p in problems)
    assert "bfloat16 2x128x3072x192 dv128 causal DeepSeek-V3 backward" in [row.name for row in rows]


def test_the_chunked_suite_reads_caches_and_ends_with_a_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fa3_fwd_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, module_named(module))
    fake_fa4(monkeypatch)
    *chunks, mixed = suites.suite("chunked")
    assert len(chunks) == 7
    for row in (*chunks, mixed):
        assert row.candidates[:2] == ("tilewise:cached", "tilewise:pages64")
        assert row.candidates[-3:] == ("fa3", "fa4", "flashinfer")
        wanting = [name for name in row.candidates if Candidate(name).why_not(row.problem)]
        assert wanting in ([], ["torch-varlen"]), row.name  # which has grouped heads in later PyTorchs alone
    queries, keys = ([b - a for a, b in pairwise(starts)] for starts in (
        mixed.problem.mask.cu_seqlens_q, mixed.problem.mask.cu_seqlens_kv  # type: ignore[attr-defined]
    ))  # fmt: skip
    assert (queries, len(keys)) == ([1] * 64 + [2048], 65)


def test_a_seed_draws_the_same_problems_every_time() -> None:
    assert drawn.problems(3) == drawn.problems(3)
    assert drawn.problems(3) != drawn.problems(4)
    names = [row.name for row in suites.rows_of("drawn", 3)]
    assert names == [row.name for row in suites.suite("drawn", seed=3)]
    assert all("seed3#" in name for name in names)
    assert suites.rows_of("drawn") == suites.rows_of("drawn")
    assert [row.name for row in suites.rows_of("drawn")] == [row.name for row in suites.suite("drawn", seed=0)]
    assert suites.rows_of("forward", 3) == suites.rows_of("forward")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_problems_keep_to_their_distribution(seed: int) -> None:
    found = drawn.problems(seed)
    assert len(found) == len({one.problem for one in found}) == drawn.COUNT
    assert [one.number for one in found] == list(range(1, drawn.COUNT + 1))
    assert Counter(one.size for one in found) == {"large": drawn.COUNT // 2, "small": drawn.COUNT // 2}
    for number, problem, size in found:
        assert (problem.flops() >= drawn.LARGE_FLOPS) == (size == "large"), number
        assert problem.flops() <= drawn.MAX_FLOPS
        assert drawn.tensor_bytes(problem) <= drawn.MAX_BYTES
        assert (problem.head_dim, problem.head_dim_v) in drawn.HEAD_DIMS
        assert 1 <= problem.heads_kv <= 16
        assert 1 <= problem.group <= 8
        assert 1 <= problem.batch <= 16
        assert 200 <= problem.seq_q <= 8192
        assert 64 <= problem.seq_kv <= 8192
        assert problem.dtype in (torch.bfloat16, torch.float16)
        cross = problem.seq_q != problem.seq_kv
        assert str(problem.mask).partition(":")[0] in (("full",) if cross else ("full", "causal", "window"))
        assert not problem.needs_grad


def test_drawn_problems_are_of_every_kind() -> None:
    found = [one.problem for seed in range(50) for one in drawn.problems(seed)]
    assert {(problem.head_dim, problem.head_dim_v) for problem in found} == set(drawn.HEAD_DIMS)
    assert {problem.group for problem in found} == set(range(1, 9))
    assert {problem.batch for problem in found} == set(range(1, 17))
    assert {problem.heads_kv for problem in found} == set(range(1, 17))
    assert {problem.dtype for problem in found} == {torch.bfloat16, torch.float16}
    kinds = Counter(str(problem.mask).partition(":")[0] for problem in found)
    assert min(kinds["full"], kinds["causal"], kinds["window"]) > 0.05 * len(found)
    assert sum(problem.seq_q != problem.seq_kv for problem in found) > 0.1 * len(found)
    assert any(problem.seq_q % 64 for problem in found)


def test_drawn_rows_time_both_directions_in_both_ways() -> None:
    by_problem: dict[Problem, list[tuple[str, str]]] = {}
    for row in suites.rows_of("drawn"):
        (what,) = row.timed
        by_problem.setdefault(row.problem.with_(needs_grad=False), []).append((what, row.timing))
        assert row.problem.needs_grad == (what == "backward")
        assert row.kind == ("window" if "window" in row.name else "")
        assert len(row.candidates) == 3
    assert len(by_problem) == drawn.COUNT
    every = [("forward", "graph"), ("forward", "wall"), ("backward", "graph"), ("backward", "wall")]
    assert all(timed == every for timed in by_problem.values())


def ratios_of(row: Row, ours: float, peer: float, rival: float = 0.0) -> Comparison:
    """A comparison as if the row had been measured."""
    outcomes = [Outcome("tilewise", VERIFIED), Outcome("torch-cudnn", VERIFIED)]
    outcomes += [Outcome("fa4", VERIFIED)] if rival else []
    for outcome, seconds in zip(outcomes, (ours, peer, rival), strict=False):
        setattr(outcome, row.timed[0], [[seconds]] * 7)
    return Comparison(replace(row, candidates=tuple(o.candidate for o in outcomes)), outcomes)


def test_drawn_says_how_many_rows_are_behind(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in suites.rows_of("drawn") if "window" not in row.name][:80]
    windows = [row for row in suites.rows_of("drawn") if "window" in row.name][:4]
    peers = {"forward": 2.0, "backward": 1.0}
    done = [ratios_of(row, 1.0, peers[row.timed[0]]) for row in rows]
    done += [ratios_of(row, 1.0, 9.0) for row in windows]
    worst, slow = [c for c in done if c.row.timed == ("backward",) and c.row.timing == "graph"][:2]
    worst.outcomes[1].backward, slow.outcomes[1].backward = [[0.8]] * 7, [[0.9]] * 7
    show(done)
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": geomean" in line)
    assert set(lines) == {
        f"{what} {how}{kind}" for what in peers for how in ("graph", "eager") for kind in ("", ", window")
    }
    shares = "2 of 20 under 0.97 (10.0%), 1 of 20 under 0.85 (5.0%)"
    assert lines["backward graph"] == f"geomean 0.984, worst 0.800 ({worst.row.name}), {shares}"
    assert lines["backward eager"].endswith("0 of 20 under 0.97 (0.0%), 0 of 20 under 0.85 (0.0%)")
    assert lines["forward graph"].startswith("geomean 2.000, worst 2.000")
    assert lines["forward eager, window"].startswith("geomean 9.000")


def test_the_score_is_against_the_fastest_that_is_not_ours_and_pytorchs_stands_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = suites.rows_of("grouped")[:3]
    done = [ratios_of(row, 2.0, 3.0, rival) for row, rival in zip(rows, (1.0, 4.0, 4.0), strict=True)]
    done[2].outcomes[2].verdict = "wrong"  # however fast it is, it is no measure
    done[2].outcomes[2].step = [[0.1]] * 7
    show(done)
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 2 rows ahead of, 1 behind, 0 not told apart from FlashAttention-4" in lines
    score = bench.score(done)
    assert (score.worst, score.row, score.rows) == (pytest.approx(0.5), rows[0].name, 3)
    assert score.geomean == pytest.approx((0.5 * 1.5 * 1.5) ** (1 / 3))
    assert lines[-1] == str(score)
    found = bench.scores(done)
    assert [found[kind].worst for kind in ("forward", "backward", "step")] == pytest.approx([0.5, 1.5, 1.5])
    assert found["forward, against PyTorch's own paths"].worst == pytest.approx(1.5)
    assert found["against PyTorch's own paths"].geomean == pytest.approx(1.5)
    assert found["against FlashAttention-4"].worst == pytest.approx(0.5)
    told = done[0].to_dict()
    assert (told["best_peer"], told["best_rival"]) == ("torch-cudnn", "fa4")
    assert told["candidates"][0]["speed_rival"]["ratio"] == pytest.approx(0.5)
    record = bench.record("grouped", done, Settings(), [])
    assert record["score"]["worst"] == pytest.approx(0.5)
    alone = [ratios_of(row, 2.0, 3.0) for row in rows]
    assert not any("own paths" in kind for kind in bench.scores(alone)), "PyTorch's best path is the fastest then"
    assert bench.score(alone) == bench.score_of_torch(alone)


def test_the_score_against_a_library_is_that_of_what_the_row_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    """In `chunked` that is the way that reads a cache, and `tilewise` is one more candidate."""
    row = Row("row", make_problem((1, 2, 8, 8)), ("tilewise:cached", "tilewise", "fa4"), times=("forward",))
    times = zip(row.candidates, (4.0, 1.0, 2.0), strict=True)
    done = [Comparison(row, [Outcome(name, VERIFIED, forward=[[seconds]] * 7) for name, seconds in times])]
    assert bench.scores(done)["against FlashAttention-4"].geomean == pytest.approx(0.5)
    show(done)
    assert "0 of 1 rows ahead of, 1 behind, 0 not told apart from FlashAttention-4" in capsys.readouterr().out


def test_rounds_go_on_until_the_score_is_settled() -> None:
    """The row's subject is told apart from the fastest that is not ours, not from PyTorch's best path alone."""
    done = ratios_of(suites.rows_of("grouped")[0], 2.0, 30.0, 2.0)
    ours, _, rival = done.outcomes
    ours.forward, rival.forward = [[2.0], [2.2], [1.8]] * 3, [[2.2], [1.8], [2.1]] * 3
    assert {outcome.candidate for outcome in done.unsettled()} == {"tilewise", "fa4"}


def module_named(name: str) -> types.ModuleType:
    """One that counts as installed."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    return module


def fake_fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A module in the place of FlashAttention-4 that attends by PyTorch and notes how it was called."""
    called: list[dict[str, Any]] = []

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        called.append({"shape": tuple(q.shape), **options})
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=options["causal"], scale=options["softmax_scale"], enable_gqa=True)
        return out.transpose(1, 2), None

    module = module_named("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return called


def test_flash_attention_4_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    called = fake_fa4(monkeypatch)
    problem = make_problem((2, 4, 24, 16), mask=masks.Causal(), heads_kv=2, needs_grad=True)
    inputs = make_inputs(problem, 0, "cpu")
    out = Candidate("fa4").forward(problem, inputs)()
    assert out.shape == (2, 4, 24, 16)
    expected = Candidate("torch-default").forward(problem, inputs)()
    torch.testing.assert_close(out, expected)
    torch.autograd.grad(out, inputs[:3], inputs.dout)
    window = make_problem((1, 2, 24, 16), mask=masks.Window(8, 0), softcap=3.0)
    Candidate("fa4").forward(window, make_inputs(window, 0, "cpu"))()
    sunk = make_problem((1, 2, 24, 16), mask=masks.Causal(), scores=(Sink(),), operand_grads=("sink",), needs_grad=True)
    given = make_inputs(sunk, 0, "cpu")
    Candidate("fa4").forward(sunk, given)()
    assert called.pop()["learnable_sink"] is given.terms["sink"]
    assert [call["shape"] for call in called] == [(2, 24, 4, 16), (1, 24, 2, 16)]
    assert [call["window_size"] for call in called] == [(None, None), (8, 0)]
    assert [(call["causal"], call["softcap"]) for call in called] == [(True, 0.0), (False, 3.0)]
    assert Candidate("fa4").compiles
    assert not Candidate("fa4").is_peer
    assert not Candidate("fa4").is_ours


def test_wrong_gradients_of_another_library_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_fa4(monkeypatch)
    asked = make_problem((2, 4, 24, 16), mask=masks.Causal(), heads_kv=2, needs_grad=True).to_dict()
    mind, path = worker.Worker(), str(tmp_path / "truth.pt")
    mind.truth(asked, 3, "cpu", path)
    mind.prepare("fa4", asked, 3, "cpu")
    right = mind.verify(path)
    assert (right["wrong"], set(right["errors"])) == ([], {"out", "dq", "dk", "dv"})
    mind._inputs.k.register_hook(lambda gradient: 1.01 * gradient)
    assert {text.split()[0] for text in mind.verify(path)["wrong"]} == {"dk"}
    mind.forget()


def test_flash_attention_4_is_a_column_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert not any("fa4" in row.candidates for row in suites.suite("grouped"))
    problem = suites.rows_of("grouped")[0].problem
    assert "flash-attn-4" in str(Candidate("fa4").why_not(problem, "cuda")[0])
    fake_fa4(monkeypatch)
    assert rivals.installed("fa4")
    assert all("fa4" in row.candidates for row in suites.suite("grouped"))
    assert not any("fa4" in row.candidates for row in suites.suite("float32"))
    assert all("fa4" in row.candidates for row in suites.suite("drawn"))
    asked = suites.suite("drawn", ("#01",), ("fa4",))
    assert all(row.candidates.count("fa4") == 1 for row in asked)
    for wrong, change in (
        ("device cpu", {}),
        ("float32", {"dtype": torch.float32}),
        ("head_dim 260", {"head_dim": 260, "head_dim_v": 260}),
        ("mask causal", {"seq_q": 100}),
        ("dropout", {"dropout": 0.5}),
        ("lse", {"needs_lse": True}),
        ("another head_dim", {"head_dim_v": 64, "needs_grad": True}),
    ):
        reasons = Candidate("fa4").why_not(problem.with_(**change), "cuda" if change else "cpu")
        assert [wrong in str(reason) for reason in reasons] == [True], wrong


class ScriptedPool:
    """Answers as workers would, notes who was asked for what, and fails where it is told to."""

    def __init__(self, failing: dict[tuple[str, str, str], str] | None = None) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.failing = failing or {}

    def start(self, *names: str) -> None: ...

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        problem, method = arguments.get("problem", {}), arguments.get("method", "")
        self.asked.append((name, do, method or problem.get("needs_grad")))
        if (name, do, method) in self.failing:
            raise Failure(self.failing[name, do, method])
        return {
            "truth": {"compared": "every element", "budgets": {}},
            "verify": {"errors": {"out": {"norm": 1e-9, "worst_row": 1e-9}}, "wrong": []},
            "memory": 7,
            "time": [2.0 if name == "tilewise" else 3.0],
        }.get(do)


def test_a_library_that_refuses_a_row_is_in_it_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module_named("fa3_fwd_interface"))
    (row,) = suites.suite("odd", ("Phi-3+backward",))
    (done,) = compare_all([row], ScriptedPool(), Settings(rounds=1))  # type: ignore[arg-type]
    assert done["fa3"].verdict == "refused"
    assert "no backward" in done["fa3"].because[0]


def drawn_rows() -> list[Row]:
    """The four rows of the first drawn problem."""
    return suites.suite("drawn", ("#01",))


@pytest.mark.parametrize("together", [False, True])
def test_rows_of_one_problem_are_verified_once(together: bool) -> None:
    pool, rows = ScriptedPool(), drawn_rows()
    done = list(compare_all(rows, pool, Settings(rounds=2, together=together)))  # type: ignore[arg-type]
    assert [c.row for c in done] == rows
    assert [(name, extra) for name, do, extra in pool.asked if do == "truth"] == [("float64", True)]
    for name in rows[0].candidates:
        # once for the forward without gradients and once with them, and not again for the other way of timing
        assert [extra for who, do, extra in pool.asked if (who, do) == (name, "prepare")] == [False, True]
        assert [extra for who, do, extra in pool.asked if (who, do) == (name, "verify")] == [None, None]
        timed = [extra for who, do, extra in pool.asked if (who, do) == (name, "time")]
        assert timed == ["graph"] * 2 + ["wall"] * 2 + ["graph"] * 2 + ["wall"] * 2
    for comparison_ in done:
        assert comparison_.compared == "every element"
        assert comparison_.complete
        for outcome in comparison_.outcomes:
            assert (outcome.verdict, outcome.memory) == (VERIFIED, 7)
            assert len(outcome.costs) == 2
            assert "out" in outcome.errors
    assert bench.score(done).geomean == pytest.approx(1.5)


def test_other_problems_are_not_verified_together() -> None:
    pool, rows = ScriptedPool(), suites.suite("drawn", ("#01+forward graph", "#02+forward graph"))
    list(compare_all(rows, pool, Settings(rounds=1)))  # type: ignore[arg-type]
    assert [(name, extra) for name, do, extra in pool.asked if do == "truth"] == [("float64", False)] * 2


@pytest.mark.parametrize("together", [False, True])
def test_who_fails_in_one_row_starts_afresh_for_the_next(together: bool) -> None:
    pool, rows = ScriptedPool({("torch-flash", "time", "graph"): "raised RuntimeError"}), drawn_rows()
    done = list(compare_all(rows, pool, Settings(rounds=2, together=together)))  # type: ignore[arg-type]
    assert [c["torch-flash"].verdict for c in done] == ["raised RuntimeError", VERIFIED] * 2
    assert [c["torch-cudnn"].verdict for c in done] == [VERIFIED] * 4
    prepared = [extra for who, do, extra in pool.asked if (who, do) == ("torch-flash", "prepare")]
    assert prepared == [False, False, True, True]
    assert [len(c["torch-flash"].costs) for c in done] == [0, 2, 0, 2]


def test_who_fails_beside_others_is_asked_again_alone() -> None:
    pool, rows = ScriptedPool({("torch-cudnn", "memory", ""): "died: SIGKILL"}), drawn_rows()[:1]
    (done,) = compare_all(rows, pool, Settings(rounds=1, together=True))  # type: ignore[arg-type]
    assert done["torch-cudnn"].verdict == "died: SIGKILL"
    assert sum((who, do) == ("torch-cudnn", "prepare") for who, do, _ in pool.asked) == 2
    assert sum((who, do) == ("torch-flash", "prepare") for who, do, _ in pool.asked) == 1
    assert not any((who, do) == ("torch-cudnn", "time") for who, do, _ in pool.asked)


def test_truth_is_computed_while_candidates_get_ready() -> None:
    """Side by side: no candidate waits for the truth before it is prepared."""
    rows = drawn_rows()[:1]
    started = threading.Barrier(1 + len(rows[0].candidates), timeout=600)

    class Meeting(ScriptedPool):
        def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
            if do in ("truth", "prepare"):
                started.wait()
            return super().ask(name, do, limit, **arguments)

    (done,) = compare_all(rows, Meeting(), Settings(rounds=1, together=True))  # type: ignore[arg-type]
    assert {outcome.verdict for outcome in done.outcomes} == {VERIFIED}
    assert done.compared == "every element"


def test_what_compiles_can_be_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fa4(monkeypatch)
    rows = suites.suite("grouped")
    bunches = ahead.jobs(rows)
    every = [job for bunch in bunches for job in bunch]
    assert len(every) == len(set(every))
    problems = {row.problem for row in rows}
    assert {(name, problem) for name, _, problem, _ in every} == {
        (name, problem) for name in ("tilewise", "fa4") for problem in problems
    }
    for bunch in bunches:
        assert len({(name, p.head_dim, type(p.mask), p.needs_grad) for name, _, p, _ in bunch}) == 1
    first = [(bunch[0][0], bunch[0][2].needs_grad) for bunch in bunches]
    kinds = [("fa4", True), ("fa4", False), ("tilewise", True), ("tilewise", False)]
    assert list(dict.fromkeys(first)) == kinds, "what takes longest comes first"
    asked: list[ScriptedPool] = []

    class Helpers(ScriptedPool):
        def __enter__(self) -> Helpers:
            asked.append(self)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ahead, "Pool", lambda: Helpers({("ahead 0", "memory", ""): "died: SIGSEGV"}))
    bench.compile_ahead(rows, Settings())
    (pool,) = asked
    assert sum(do == "prepare" for _, do, _ in pool.asked) == len(every)
    assert sum(do == "memory" for _, do, _ in pool.asked) == len(every)
    assert all(name.startswith("ahead ") for name, _, _ in pool.asked)
    assert ahead.jobs(suites.suite("cpu")) == []
    bench.compile_ahead(suites.suite("cpu"), Settings())
    assert len(asked) == 1


def test_without_a_truth_beside_others_it_is_asked_for_again_alone() -> None:
    pool = ScriptedPool({("float64", "truth", ""): "raised OutOfMemoryError"})
    (done,) = compare_all(drawn_rows()[:1], pool, Settings(rounds=1, together=True))  # type: ignore[arg-type]
    assert [do for name, do, _ in pool.asked if name == "float64"] == ["truth", "truth"]
    assert {outcome.verdict for outcome in done.outcomes} == {"not verified"}
    assert all("OutOfMemoryError" in outcome.because[0] for outcome in done.outcomes)


@pytest.mark.parametrize("name", suites.names())
def test_rows_of_one_problem_stand_together(name: str) -> None:
    posed = [(row.problem.with_(needs_grad=False), row.contents) for row in suites.rows_of(name)]
    bunches = 1 + sum(one != other for one, other in pairwise(posed))
    assert bunches == len(set(posed))


def test_the_seed_reaches_the_rows_and_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Settings, list[Row]]] = []

    def run(rows: list[Row], settings: Settings, pool: Pool) -> list[Comparison]:
        seen.append((settings, rows))
        return [ratios_of(row, 1.0, 2.0) for row in rows]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr("tilewise.lab.commands.bench.need_device", lambda device, remedy: None)
    path = tmp_path / "record.json"
    arguments = ["bench", "--suite", "drawn", "--seed", "11", "--rounds", "5", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    ((settings, rows),) = seen
    assert (settings.seed, settings.rounds, settings.round_seconds) == (11, 5, 0.01)
    assert (settings.overhead, settings.together) == (False, True)
    assert [row.name for row in rows] == [row.name for row in suites.rows_of("drawn", 11)]
    record = json.loads(path.read_text())
    assert records.Record("", "", record).whole
    assert record["provenance"]["seed"] == record["settings"]["seed"] == 11
    assert all("seed11#" in row["row"] for row in record["rows"])
    assert record["scores"]["backward graph"]["behind"] == 0.0
    compiled: list[int] = []
    monkeypatch.setattr(bench, "compile_ahead", lambda rows, settings: compiled.append(len(rows)))
    assert CliRunner().invoke(app, [*arguments, "--seconds", "0.02", "--ahead"]).exit_code == 0
    assert seen[-1][0].round_seconds == 0.02
    assert compiled == [len(rows)]


def test_the_cpu_suite_has_a_row_of_each_kind() -> None:
    problems = [row.problem for row in suites.rows_of("cpu")]
    float32 = [problem for problem in problems if problem.dtype == torch.float32]
    assert {(p.batch, p.heads_q, p.seq_q, p.head_dim) for p in float32} >= {(2, 8, 512, 64), (1, 8, 2048, 64)}
    assert {str(problem.mask).split(":")[0] for problem in problems} >= {"full", "causal", "window"}
    assert any(problem.group > 1 for problem in problems)
    assert any(problem.softcap for problem in problems)
    assert any(problem.needs_grad for problem in problems)
    assert any(problem.dtype == torch.bfloat16 for problem in problems)


def test_rows_are_chosen_by_a_part_of_their_name() -> None:
    rows = suites.suite("cpu", ("causal",), ("torch-flash",))
    assert 0 < len(rows) < len(suites.rows_of("cpu"))
    assert all("causal" in row.name and row.candidates[-1] == "torch-flash" for row in rows)
    both = suites.suite("cpu", ("1024+causal", "window"))
    assert [row.name for row in both] == [
        row.name
        for row in suites.rows_of("cpu")
        if ("1024" in row.name and "causal" in row.name) or "window" in row.name
    ]
    with pytest.raises(InvalidInput, match="--only"):
        suites.suite("cpu", ("sideways",))
    with pytest.raises(InvalidInput, match="--suite"):
        suites.suite("nope")


def test_the_score_is_the_geometric_mean_and_the_worst() -> None:
    score = bench.score([comparison("fast", 1.0, 4.0), comparison("even", 1.0, 1.0)])
    assert score[:4] == (pytest.approx(2.0), pytest.approx(1.0), "even", 2)
    assert str(score) == "geomean 2.000, worst 1.000 (even)"


def test_failed_and_peerless_rows_have_no_ratio() -> None:
    no_peer = comparison("no peer", 1.0, 1.0)
    no_peer.outcomes[1].verdict = "refused"
    no_peer.outcomes[1].forward = []
    assert (
        bench.score([comparison("dead", 1.0, 9.0, "died: SIGILL"), no_peer, comparison("row", 2.0, 1.0)]).row == "row"
    )
    nothing = bench.score([no_peer])
    assert math.isnan(nothing.geomean)
    assert str(nothing) == "geomean nan, worst nan (none)"


def test_scores_apart_for_each_thing_that_is_timed() -> None:
    problem = make_problem((1, 2, 8, 8), needs_grad=True)
    rows = [
        Row(what, problem, ("tilewise", "torch-default"), times=(what,)) for what in ("forward", "backward", "step")
    ]
    done = [Comparison(row, [Outcome(name, VERIFIED) for name in row.candidates]) for row in rows]
    for comparison_, ours in zip(done, (1.0, 2.0, 4.0), strict=True):
        setattr(comparison_.outcomes[0], comparison_.row.name, [[ours]])
        setattr(comparison_.outcomes[1], comparison_.row.name, [[4.0]])
    found = bench.scores(done)
    assert {kind: score.geomean for kind, score in found.items()} == pytest.approx(
        {"forward": 4.0, "backward": 2.0, "step": 1.0}
    )
    assert bench.score(done).row == "step"
    told = done[2].to_dict()
    assert told["times"] == ["step"]
    assert told["flops"]["timed"] == problem.flops() + problem.flops(backward=True)


def test_no_score_against_pytorch_where_it_has_no_path() -> None:
    problem = make_problem((1, 2, 8, 8), needs_grad=True)
    done = [
        Comparison(
            Row(what, problem, ("tilewise", "fa4"), times=(what,)),
            [Outcome("tilewise", VERIFIED, **{what: [[1.0]]}), Outcome("fa4", VERIFIED, **{what: [[2.0]]})],
        )
        for what in ("forward", "step")
    ]
    found = bench.scores(done)
    assert set(found) == {"forward", "step", "against FlashAttention-4"}
    assert all(score.geomean == pytest.approx(2.0) for score in found.values())


def test_the_deterministic_variant_is_held_to_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        "row", make_problem((1, 2, 8, 8), needs_grad=True), ("tilewise", "tilewise:deterministic"), times=("step",)
    )
    done = Comparison(
        row, [Outcome("tilewise", VERIFIED, step=[[1.0]]), Outcome("tilewise:deterministic", VERIFIED, step=[[1.25]])]
    )
    show([done])
    assert "deterministic against default: geomean 0.800, worst 0.800 (row)" in capsys.readouterr().out


def test_a_backend_that_is_not_there_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "BACKENDS", {"reference": None})
    row = Row("row", make_problem((1, 2, 8, 8)), ("sm80",))
    (outcome,) = compare(row, FakePool(), Settings()).outcomes  # type: ignore[arg-type]
    assert outcome.verdict == "refused"
    assert "no backend sm80" in outcome.because[0]
    assert not outcome.failed


class FakePool:
    """Nobody may be asked."""

    def start(self, *names: str) -> None: ...

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        assert (name, do) == ("float64", "truth")
        return {"compared": "every element", "budgets": {}}


def test_clocks_are_watched_while_a_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho '[N/A], 1, 2, 3'\necho '1980, 3201, 650.5, 61'\necho '1770, 3201, 699.5, 63'\nsleep 60\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with clocks.Watch() as watch:
        seen = None
        while seen is None or seen["celsius"]["most"] < 63:
            seen = watch.since(0.0)
        assert seen["sm_mhz"] == {"least": 1770.0, "median": 1875.0, "most": 1980.0}
        assert watch.since(math.inf) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with clocks.Watch() as blind:
        assert blind.since(0.0) is None


def test_a_step_and_a_backward_are_timed_by_themselves(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    mind = worker.Worker()
    request.addfinalizer(mind.forget)
    problem = make_problem((1, 2, 32, 16), needs_grad=True)
    mind.prepare("tilewise:deterministic", problem.to_dict(), 0, "cpu")
    assert torch.are_deterministic_algorithms_enabled()
    for what in ("backward", "step"):
        assert min(mind.time(what, "wall", 0.001)) > 0
    assert mind.overhead(0.001) is mind.overhead(0.001)
    mind.forget()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_report_of_a_suite() -> None:
    """As text, in full; the page of the same blocks is in test_html. The score is the last line, whatever is asked."""
    dead = comparison("dead", 1.0, 1.0, "died: SIGILL")
    dead.outcomes[0].because = ["try an older instruction set"]
    dead.complete = False
    refused = comparison("refused", 1.0, 2.0)
    refused.outcomes[1] = Outcome("torch-default", REFUSED, ["no softcap -> drop it"])
    refused.outcomes.append(Outcome("fa4", "raised KeyError", ["no such key"]))
    done = [comparison("row", 1.0, 1.5), dead, refused]
    for one in done:
        one.budgets = {"out": {"norm": 4e-7, "worst_row": 1e-6}}
    record = bench.record("cpu", done, Settings(), ["test"]) | {"provenance": {}}
    found = bench_report.report_of(record, ["the kernels of 1 of 3 rows have changed since"])
    assert (
        report.lines(found, verbose=True)
        == """\
the kernels of 1 of 3 rows have changed since
Interrupted: only what was measured is here.
1 of 3 rows have fewer than 5 rounds, too few for an interval.
1 of 3 rows ended before their intervals were narrow.
bench: suite cpu · tilewise
geometric mean of 1 row; no difference seen on 0; worst 1.50x; cpu; 1 not right
dead: tilewise died: SIGILL; try an older instruction set
row      candidate      verdict            time      p20 to p80  against PyTorch  TFLOP/s     host  extra memory   \
error  of budget
row      tilewise       verified         1.00 s  1.00 to 1.00 s          1.50x ?  4.1e-09  10.0 us      1.00 MiB  \
1.0e-7        25%
row      torch-default  verified         1.50 s  1.50 to 1.50 s               1x  2.7e-09        -             -  \
1.0e-7        25%
dead     torch-default  verified         1.00 s  1.00 to 1.00 s               1x  4.1e-09        -             -  \
1.0e-7        25%
dead     tilewise       died: SIGILL     1.00 s  1.00 to 1.00 s          1.00x ?  4.1e-09  10.0 us      1.00 MiB  \
1.0e-7        25%
refused  tilewise       verified         1.00 s  1.00 to 1.00 s                -  4.1e-09  10.0 us      1.00 MiB  \
1.0e-7        25%
refused  fa4            raised KeyError       -               -                -        -        -             -     \
  -          -
refused  torch-default  refused               -               -                -        -        -             -     \
  -          -
refused: fa4: raised KeyError; no such key
Ratios:
The best time of all that is not ours over ours, on a logarithmic scale: right of 1 is faster, left of it slower.
head_dim 8 · full: 1 row, geomean 1.50x, worst 1.50x
Rows without a ratio:
row      what became of ours
dead     died: SIGILL; try an older instruction set
refused  verified
Every measurement:
row      candidate      why it was refused
refused  torch-default  no softcap -> drop it
against PyTorch: against its best path, with the 99% interval; ~: no difference beyond the noise; =: the same \
kernels; ?: too few rounds to tell
geomean 1.500, worst 1.500 (row)""".splitlines()
    )
    assert report.lines(found)[-1] == report.lines(found, quiet=True)[-1] == "geomean 1.500, worst 1.500 (row)"
    assert "rows without a ratio, for want of a right answer of ours or of another's: 2" in report.lines(found)


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(suites.rows_of("cpu")[:3])

    class Interrupted(ScriptedPool):
        def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
            if (do, sum(do == "truth" for _, do, _ in self.asked)) == ("time", 2):
                raise KeyboardInterrupt
            return super().ask(name, do, limit, **arguments)

    done = bench.run(rows, Settings(), Interrupted())  # type: ignore[arg-type]
    assert [c.row.name for c in done] == [row.name for row in rows[:2]]
    assert not bench.record("cpu", done, Settings(), [])["complete"]
    monkeypatch.setattr(bench, "run", lambda *_: done)
    assert CliRunner().invoke(app, ["bench"]).exit_code == 130


def test_records_are_never_overwritten(tmp_path: Path) -> None:
    record = bench.record("cpu", [comparison("row", 1.0, 2.0)], Settings(seed=3), ["tilewise", "bench"])
    first, second = (kept.save(record, tmp_path / "results") for _ in range(2))
    assert first != second
    assert first.read_text() == second.read_text()
    told = json.loads(first.read_text())
    shares = {"rows": 1, "behind": 0.0, "far_behind": 0.0}
    assert told["score"] == {"geomean": 2.0, "worst": 2.0, "row": "row"} | shares
    assert told["provenance"]["seed"] == told["settings"]["seed"] == 3


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["bench", "--suite", "cpu", "--only", "float32 2x8x512x64 full", "--repeat", "2", "--save"]
    outputs = ["--json", str(tmp_path / "record.json"), "--results", str(tmp_path / "results")]
    result = CliRunner().invoke(app, arguments + outputs)
    assert result.exit_code == 0, result.output
    found = LAST_LINE.match(result.stdout.splitlines()[-1])
    assert found is not None, result.stdout
    assert found[1] == found[2]
    assert found[3] == "float32 2x8x512x64 full"
    record = json.loads((tmp_path / "record.json").read_text())
    (saved,) = (tmp_path / "results").iterdir()
    assert kept.expanded(kept.read(saved))["rows"][0].keys() == record["rows"][0].keys() - {"reached"}
    (row,) = record["rows"]
    assert Problem.from_dict(row["problem"]) == suites.rows_of("cpu")[0].problem
    assert row["compared"] == "every element"
    assert row["best_peer"] in ("torch-default", "torch-math")
    assert [len(one["forward"]) for one in row["candidates"]] == [2, 2, 2]
    for candidate in row["candidates"]:
        assert candidate["verdict"] == VERIFIED
        assert candidate["errors"]["out"]["norm"] <= row["budgets"]["out"]["norm"]
        assert len(candidate["forward"]) == 2
        assert candidate["overhead_seconds"]["median"] > 0
    assert f"{record['score']['geomean']:.3f}" == found[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_suite_for_a_gpu_says_that_there_is_none() -> None:
    result = CliRunner().invoke(app, ["bench", "--suite", "forward"])
    assert result.exit_code == 4
    assert "no CUDA device" in result.stderr


def test_bad_usage_is_a_message(tmp_path: Path) -> None:
    for arguments in (["--suite", "nope"], ["--only", "nope"], ["--candidate", "nope"], ["--repeat", "0"]):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2
        assert "nope" in result.stderr or "--repeat" in result.stderr
        assert "Traceback" not in result.output


def test_decoding_rows_rotate_and_stand_beside_the_bound_of_memory() -> None:
    rows = suites.rows_of("decode")
    assert all(row.flush and row.timing == "graph" for row in rows)
    first = rows[0]
    (line,) = bench.memory_lines([ratios_of(first, 2e-6, 4e-6)], "NVIDIA H200")
    # 1024 keys of 8 heads, K and V; q and out of 32 heads; 128 numbers of 2 bytes: 4.2 MB at 4.8 TB/s.
    assert line == [first.name, "2.0", "0.9", "44%"]
    assert bench.memory_lines([ratios_of(first, 2e-6, 4e-6)], "a GPU that nobody knows") == []
    assert bench.memory_lines([ratios_of(suites.rows_of("forward")[0], 2e-6, 4e-6)], "NVIDIA H200") == []


def test_a_rotation_goes_through_all_calls_by_turns() -> None:
    seen: list[int] = []
    rotation = Rotation([lambda number=number: seen.append(number) for number in range(3)])  # type: ignore[misc]
    for _ in range(7):
        rotation()
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert rotation.count == 3
    assert turns_for(ROTATED_BYTES) == 1
    assert turns_for(ROTATED_BYTES // 8) == 8
    assert turns_for(0) == turns_for(1) == 128
