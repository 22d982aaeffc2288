"""The microscope on a real GPU: kernels are named, choices are PyTorch's, and every suite verifies and times."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner

import tilewise
from support import make_problem
from tilewise.lab.commands.app import app
from tilewise.lab.measure import clocks
from tilewise.lab.measure.compare import REFUSED, VERIFIED, Row, Settings, compare, compare_all
from tilewise.lab.measure.pool import Pool
from tilewise.lab.measure.worker import Worker
from tilewise.lab.model import kernels
from tilewise.lab.studies import inspect, suites
from tilewise.target import Target

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

QUICK = Settings(rounds=2, round_seconds=0.005, time_limit=60.0)


def run(command: str, *more: str) -> Any:
    return CliRunner().invoke(app, [*command.split(), *more])


def test_inspect_names_the_kernels_and_their_sizes(tmp_path: Path) -> None:
    result = run(
        "inspect --shape 2,8,512,64 --dtype fp16 --grad --repeat 2 --json --time-limit 60 "
        "--only tilewise --only torch-default --only torch-flash --only torch-math",
        "--trace", str(tmp_path / "trace.json"), "--html", str(tmp_path / "report.html"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    for row in told["comparison"]["candidates"]:
        assert row["verdict"] == VERIFIED, row
        for what in ("forward", "backward"):
            launches = told["profiles"][row["candidate"]][what]["launches"]
            assert launches, row["candidate"]
            sized = [launch for launch in launches if launch["grid"]]
            assert sized
            assert all(launch["registers"] > 0 and launch["us"] > 0 for launch in sized)
            assert any(launch.get("occupancy") for launch in sized)
        assert told["host_seconds"][row["candidate"]]["median"] > 0
        assert 0 < told["shares"][row["candidate"]]["forward"]["compute"] < 1.05
    assert told["torch"]["choice"] in ("flash", "cudnn", "efficient", "math")
    assert told["profiles"]["torch-flash"]["forward"]["ops"][0]["backend"] == "flash"
    assert any("flash" in launch["name"] for launch in told["profiles"]["torch-flash"]["forward"]["launches"])
    assert len(told["profiles"]["torch-math"]["forward"]["launches"]) > 2
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_our_kernels_bring_their_build_log() -> None:
    problem = make_problem((1, 8, 1024, 128), torch.bfloat16, mask=tilewise.Causal())
    found = inspect.inspect(problem, "cuda", QUICK, only=("tilewise",), sass=True)
    units = kernels.our_units()
    launches = found.profiles["tilewise"]["forward"]["launches"]
    ours = [launch for launch in launches if kernels.find_unit(launch["name"], units)]
    if found.plan.backend not in ("sm80", "sm90"):
        pytest.skip(f"{found.plan.backend} runs here, which has no kernel of ours")
    assert ours
    assert all(launch["build"]["spill_bytes"] == 0 for launch in ours)
    assert all(launch["build"]["instructions"]["matrix products"] > 0 for launch in ours)


def test_the_model_and_pytorch_agree_about_the_articles_problem() -> None:
    problem = make_problem((2, 8, 512, 64), torch.float16)
    found = inspect.inspect(problem, "cuda", QUICK, only=("tilewise", "torch-default"))
    assert set(found.torch_says) == {"torch-flash", "torch-efficient", "torch-cudnn", "torch-math"}
    assert found.disagreements() == {}


def test_the_article_is_reproduced() -> None:
    result = run("inspect --shape 2,8,512,64 --dtype fp16 --experiment flags --repeat 1 --time-limit 60")
    assert result.exit_code == 0, result.output
    told = result.stdout.partition("PyTorch's switches:")[2]
    assert "flags:all-off    on: cudnn: cudnn runs, as in the article" in told
    assert "flags:math       on: math, cudnn: " in told
    assert "with all four off there is no kernel left" in told


@pytest.mark.parametrize("what", ["backward", "step"])
@pytest.mark.parametrize("method", ["events", "graph", "wall"])
def test_backward_and_step_are_timed_every_way(what: str, method: str, request: pytest.FixtureRequest) -> None:
    mind = Worker()
    request.addfinalizer(mind.forget)
    problem = make_problem((1, 4, 256, 64), torch.bfloat16, needs_grad=True)
    for name in ("tilewise", "tilewise:deterministic", "torch-flash"):
        mind.prepare(name, problem.to_dict(), 0, "cuda")
        for _ in range(2):
            assert min(mind.time(what, method, 0.01)) > 0


def test_a_row_of_every_suite_is_verified_and_timed() -> None:
    """One pool for all of them: its processes start once."""
    with Pool() as pool:
        for name in ("forward", "backward", "training", "grouped", "drawn", "float32", "decode", "models"):
            row = min((row for row in suites.suite(name) if not row.kind), key=lambda row: row.flops)
            comparison = compare(row, pool, QUICK)
            ours = comparison.outcomes[0]
            assert ours.verdict == VERIFIED, (row.name, ours.verdict, ours.because, ours.stderr)
            assert comparison.speed(ours) is not None, row.name


def test_rows_of_one_problem_are_verified_side_by_side_and_timed_every_way() -> None:
    smallest = min((row for row in suites.suite("drawn") if not row.kind), key=lambda row: row.flops).problem
    rows = [row for row in suites.suite("drawn") if row.problem.with_(needs_grad=False) == smallest]
    with Pool() as pool:
        done = list(compare_all(rows, pool, replace(QUICK, together=True)))
    assert [(c.row.timed, c.row.timing) for c in done] == [
        ((what,), method) for what in ("forward", "backward") for method in ("graph", "wall")
    ]
    for comparison in done:
        for outcome in comparison.outcomes:
            assert outcome.verdict in (VERIFIED, REFUSED), (comparison.row.name, outcome.candidate, outcome.stderr)
        assert comparison.outcomes[0].verdict == VERIFIED
        assert comparison.speed(comparison.outcomes[0]) is not None


@pytest.mark.skipif(torch.cuda.is_available() and not Target.of("cuda").has_triton, reason="triton is not installed")
def test_check_finds_kernels_written_apart_right() -> None:
    result = run("check --shape 1,4,300,64 --kv-heads 2 --mask causal --grad")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert any(row[:2] == ["triton", "verified"] for row in rows), result.output


def test_clocks_are_seen() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("there is no nvidia-smi here")
    with clocks.Watch() as watch:
        row = Row("row", make_problem((1, 8, 1024, 64), torch.bfloat16), ("torch-default",), "cuda")
        with Pool() as pool:
            compare(row, pool, Settings(rounds=20, round_seconds=0.05))
        seen = watch.since(0.0)
    assert seen is not None
    assert seen["sm_mhz"]["median"] > 100


def test_trace_times_the_stream_and_flags_math() -> None:
    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with tilewise.trace() as seen:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        wide = torch.randn(1, 2, 64, 520, device="cuda", dtype=torch.float64)
        F.scaled_dot_product_attention(wide, wide, wide)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q.detach(), q.detach(), q.detach())
    fused, fallen, asked = sorted(seen.sites, key=lambda site: site.stack[0])
    assert (fused.calls, fused.backend in ("torch-flash", "torch-cudnn")) == (3, True)
    assert fused.forward > 0
    assert fused.backward > 0
    assert fallen.is_math_fallback
    assert fallen.reasons
    assert not asked.is_math_fallback
    with tilewise.no_math_fallback(), pytest.raises(tilewise.UnsupportedProblem):
        F.scaled_dot_product_attention(wide, wide, wide)


@pytest.mark.skipif(shutil.which("ncu") is None, reason="there is no Nsight Compute here")
def test_counters_are_read_or_their_refusal_is_told() -> None:
    result = run("inspect --shape 1,8,512,64 --repeat 1 --json --ncu --only tilewise --only torch-default")
    assert result.exit_code == 0, result.output
    counted = json.loads(result.stdout)["counters"]
    if "ncu" in counted:
        assert "What to do" in counted["ncu"]
    else:
        assert all("achieved occupancy" in kernel["counters"] for kernel in counted["torch-default"])
