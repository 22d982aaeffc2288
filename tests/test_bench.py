"""bench: the suites are sound data, the score is what it says, and a record is complete and never overwritten."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from support import make_problem
from tilewise import Problem
from tilewise.errors import InvalidInput
from tilewise.lab import bench, candidates, clocks, suites, worker
from tilewise.lab.candidates import Candidate
from tilewise.lab.cli import app
from tilewise.lab.compare import TIMES, VERIFIED, Comparison, Outcome, Row, Settings, compare
from tilewise.lab.pool import Pool
from tilewise.lab.timing import METHODS

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


@pytest.mark.parametrize("name", suites.SUITES)
def test_suites_are_sound(name: str) -> None:
    rows = suites.SUITES[name]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.candidates[0] in ("tilewise", "sm80")
        assert any(Candidate(candidate).is_peer for candidate in row.candidates)
        assert row.timing in METHODS
        assert row.timing == "wall" if row.device == "cpu" else row.timing in ("events", "graph", "host", "wall")
        assert set(row.timed) <= set(TIMES)
        assert row.problem.needs_grad or row.timed == ("forward",)
        assert row.flops > 0


def test_the_backward_suite_is_the_table_it_promises() -> None:
    rows = suites.SUITES["backward"]
    found = {(row.problem.head_dim, str(row.problem.mask), row.problem.seq_q) for row in rows}
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert found == {(dim, mask, seq) for dim in (64, 128, 256) for mask in ("full", "causal") for seq in lengths}
    for row in rows:
        assert row.timed == ("backward",)
        assert row.flops == row.problem.flops(backward=True)
        assert row.problem.batch * row.problem.seq_q == 16384
        assert row.problem.heads_q * row.problem.head_dim == 2048
    training = suites.SUITES["training"]
    assert {row.timing for row in training} == {"wall", "graph"}
    assert all(row.timed == ("step",) and "tilewise:deterministic" in row.candidates for row in training)


def test_the_cpu_suite_has_a_row_of_each_kind() -> None:
    problems = [row.problem for row in suites.SUITES["cpu"]]
    float32 = [problem for problem in problems if problem.dtype == torch.float32]
    assert {(p.batch, p.heads_q, p.seq_q, p.head_dim) for p in float32} >= {(2, 8, 512, 64), (1, 8, 2048, 64)}
    assert {str(problem.mask).split(":")[0] for problem in problems} >= {"full", "causal", "window"}
    assert any(problem.group > 1 for problem in problems)
    assert any(problem.softcap for problem in problems)
    assert any(problem.needs_grad for problem in problems)
    assert any(problem.dtype == torch.bfloat16 for problem in problems)


def test_rows_are_chosen_by_a_part_of_their_name() -> None:
    rows = suites.suite("cpu", ("causal",), ("sdpa:flash",))
    assert 0 < len(rows) < len(suites.SUITES["cpu"])
    assert all("causal" in row.name and row.candidates[-1] == "sdpa:flash" for row in rows)
    both = suites.suite("cpu", ("1024+causal", "window"))
    assert [row.name for row in both] == [
        row.name
        for row in suites.SUITES["cpu"]
        if ("1024" in row.name and "causal" in row.name) or "window" in row.name
    ]
    with pytest.raises(InvalidInput, match="--only"):
        suites.suite("cpu", ("sideways",))
    with pytest.raises(InvalidInput, match="--suite"):
        suites.suite("nope")


def test_the_score_is_the_geometric_mean_and_the_worst() -> None:
    score = bench.score([comparison("fast", 1.0, 4.0), comparison("even", 1.0, 1.0)])
    assert score == (pytest.approx(2.0), pytest.approx(1.0), "even")
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


def test_the_deterministic_variant_is_held_to_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        "row", make_problem((1, 2, 8, 8), needs_grad=True), ("tilewise", "tilewise:deterministic"), times=("step",)
    )
    done = Comparison(
        row, [Outcome("tilewise", VERIFIED, step=[[1.0]]), Outcome("tilewise:deterministic", VERIFIED, step=[[1.25]])]
    )
    bench.show([done], "cpu")
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


def test_the_score_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    dead = comparison("dead", 1.0, 1.0, "died: SIGILL")
    dead.outcomes[0].because = ["try an older instruction set"]
    dead.complete = False
    bench.show([comparison("row", 1.0, 1.5), dead], "a machine")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "geomean 1.500, worst 1.500 (row)"
    assert "interrupted" in lines[-2]
    assert "dead: tilewise: died: SIGILL; try an older instruction set" in lines
    assert len([line for line in lines if line.startswith("row ")]) == 3


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(suites.SUITES["cpu"][:3])

    def interrupted(row: Row, *_: Any) -> Comparison:
        result = comparison(row.name, 1.0, 1.0)
        result.complete = row is not rows[1]
        return result

    monkeypatch.setattr(bench, "compare", interrupted)
    with Pool() as pool:
        done = bench.run(rows, Settings(), pool)
    assert [c.row.name for c in done] == [row.name for row in rows[:2]]
    assert not bench.record("cpu", done, Settings(), [])["complete"]
    monkeypatch.setattr(bench, "run", lambda *_: done)
    assert CliRunner().invoke(app, ["bench"]).exit_code == 130


def test_records_are_never_overwritten(tmp_path: Path) -> None:
    record = bench.record("cpu", [comparison("row", 1.0, 2.0)], Settings(seed=3), ["tilewise", "bench"])
    first, second = (bench.save(record, tmp_path / "results") for _ in range(2))
    assert first != second
    assert first.read_text() == second.read_text()
    told = json.loads(first.read_text())
    assert told["score"] == {"geomean": 2.0, "worst": 2.0, "row": "row"}
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
    assert json.loads(saved.read_text()) == record
    (row,) = record["rows"]
    assert Problem.from_dict(row["problem"]) == suites.SUITES["cpu"][0].problem
    assert row["compared"] == "every element"
    assert row["best_peer"] in ("torch-default", "sdpa:math")
    assert [len(order) for order in row["orders"]] == [3, 3]
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
