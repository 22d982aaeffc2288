"""tools/magnitudes.py: errors by the size of the inputs, kept as a record and drawn."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import magnitudes
import pytest
import torch
from typer.testing import CliRunner

from support import assert_close, budget, make_problem
from tilewise import Causal
from tilewise.lab import report
from tilewise.lab.candidates.names import make_inputs
from tilewise.lab.commands.command import program

if TYPE_CHECKING:
    from pathlib import Path


COMMAND = program(magnitudes.magnitudes)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: (range(-4, 5, 4), scale) for name, (_, scale) in magnitudes.SCALINGS.items()}
    short["scores"] = (range(-1, 2), magnitudes.SCALINGS["scores"][1])
    monkeypatch.setattr(magnitudes, "SCALINGS", short)


@pytest.mark.usefixtures("few")
def test_errors_in_float32_do_not_depend_on_a_power_of_ten() -> None:
    found = magnitudes.measure(make_problem((1, 1, 64, 16)), "cpu", 0)
    assert list(found) == list(magnitudes.SCALINGS)
    for series in found.values():
        assert list(series) == ["tilewise", "torch-math"]
        for points in series.values():
            assert len(points) == 3
            assert all(0 < point.out_share <= 1 and 0 < point.gradients_share <= 1 for point in points)


def test_scalings_change_what_they_say() -> None:
    inputs = make_inputs(make_problem((1, 1, 8, 8), needs_grad=True), 0, "cpu")
    for name, (_, scale) in magnitudes.SCALINGS.items():
        scaled = scale(inputs, 100.0)
        scores = (scaled.q @ scaled.k.mT) / (inputs.q @ inputs.k.mT)
        assert_close(scores, torch.full_like(scores, 100.0 if name == "scores" else 1.0), budget(torch.float32, 8))
        assert torch.equal(scaled.v, inputs.v * 100.0) == (name == "values")
        assert torch.equal(scaled.dout, inputs.dout * 100.0) == (name == "gradients")
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in (scaled.q, scaled.k, scaled.v))


@pytest.mark.parametrize("seed", range(2))
def test_gradients_that_are_all_rounding_are_over_no_budget(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of rows with one weight near 1: two right computations differ by as much as there is."""
    problem = make_problem((1, 1, 32, 64), torch.float64, mask=Causal(), needs_grad=True)
    plain = make_inputs(problem, seed, "cpu")
    sample = magnitudes.accuracy.choose(problem, seed, "cpu")
    scale = magnitudes.SCALINGS["scores"][1]
    for magnitude, all_rounding in ((1.0, False), (10.0, False), (1e3, True)):
        inputs = scale(plain, magnitude)
        truth = magnitudes.accuracy.truth(inputs, problem, sample)
        found = {name: magnitudes._is_rounding(name, truth, problem, inputs) for name in ("dq", "dk", "dv")}
        assert found == {"dq": all_rounding, "dk": all_rounding, "dv": False}
    monkeypatch.setattr(magnitudes, "SCALINGS", {"scores": (range(3, 4), scale)})
    told = magnitudes.to_dict(problem, "cpu", magnitudes.measure(problem, "cpu", seed), {})
    assert magnitudes.over_budget(told) == []


def test_what_overflows_has_no_error() -> None:
    problem = make_problem((1, 1, 8, 8), needs_grad=True)
    inputs = magnitudes.SCALINGS["gradients"][1](make_inputs(problem, 0, "cpu"), 1e38)
    sample = magnitudes.accuracy.choose(problem, 0, "cpu")
    truth = magnitudes.accuracy.truth(inputs, problem, sample)
    plain = magnitudes.accuracy.errors(magnitudes.accuracy.plain(inputs, problem, sample), truth)
    allowed = magnitudes.accuracy.budgets(plain, problem)
    point = magnitudes._point("tilewise", problem, inputs, sample, truth, allowed, 1e38)
    assert 0 < point.out_share < 1
    assert math.isnan(point.gradients)
    assert math.isnan(point.gradients_share)


def test_the_report_of_magnitudes() -> None:
    """As text, in full; the page of the same blocks is in test_html."""
    good, bad = magnitudes.Point(1.0, 1e-7, 2e-7, "", 0.3, 0.4), magnitudes.Point(1e3, 1e-7, 0.49, "", 0.3, 41.0)
    none = magnitudes.Point(1e4, math.nan, math.nan, "overflows")
    found = {"scores": {"tilewise": [good], "torch-math": [good, bad, none]}}
    told = magnitudes.to_dict(make_problem((1, 1, 8, 8)), "h200", found, {})
    over = "torch-math: gradients of scores 1e3: error 4.9e-1, 41.0 times its budget"
    assert magnitudes.over_budget(told) == [("torch-math", over)]
    assert (
        report.lines(magnitudes.report_of(told))
        == f"""\
tilewise is within its budgets, torch-math not
{over}
Interrupted: only what was measured is here.
magnitudes: float32 q(1,1,8,8) full
h200; 6 errors
Errors against float64 as the inputs grow or shrink, each held to a budget from a plain computation.
scores:
Inputs that are standard normal at 1, with q and k times the root of a power of ten.
out: the largest error as a share of its budget:
candidate                  of its budget  error
tilewise, 1 of 1 points              30%  1.0e-7 at 1e0
torch-math, 2 of 3 points            30%  1.0e-7 at 1e0
gradients: the largest error as a share of its budget:
candidate                  of its budget  error
tilewise, 1 of 1 points              40%  2.0e-7 at 1e0
torch-math, 2 of 3 points          4100%  4.9e-1 at 1e3, over budget; 1 of 2 points are""".splitlines()
    )


@pytest.mark.usefixtures("few")
def test_the_command_saves_a_record_and_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plots" / "errors.svg"
    options = ["--shape", "1,1,32,16", "--device", "cpu", "--save", "--results", str(tmp_path), "--plot", str(picture)]
    options += ["--html", str(tmp_path / "page.html")]
    result = CliRunner().invoke(COMMAND, options)
    assert result.exit_code == 0, result.output
    assert "3 of 3" in result.output
    assert "Every error is within its budget" in result.output
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["kind"] == magnitudes.KIND
    assert [point["magnitude"] for point in record["series"]["scores"]["tilewise"]] == [0.1, 1.0, 10.0]
    assert "gradients: balance" in picture.read_text()
    assert "Every error is within its budget" in (tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("few")
def test_an_interrupt_keeps_the_points_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = magnitudes._point
    asked: list[float] = []

    def point(name: str, problem: Any, inputs: Any, sample: Any, truth: Any, allowed: Any, magnitude: float) -> Any:
        asked.append(magnitude)
        if len(asked) == 8:  # the second candidate of the fourth magnitude
            raise KeyboardInterrupt
        return found(name, problem, inputs, sample, truth, allowed, magnitude)

    monkeypatch.setattr(magnitudes, "_point", point)
    path, page = tmp_path / "magnitudes.json", tmp_path / "page.html"
    options = ["--shape", "1,1,32,16", "--device", "cpu", "--json", str(path), "--html", str(page)]
    result = CliRunner().invoke(COMMAND, options)
    assert result.exit_code == 130, result.output
    assert "Interrupted: only what was measured is here." in result.output
    record = json.loads(path.read_text())
    assert not record["complete"]
    assert [len(points) for series in record["series"].values() for points in series.values()] == [3, 3]
    assert "Interrupted" in page.read_text()


@pytest.mark.usefixtures("few")
def test_quietly_the_outcome_alone() -> None:
    result = CliRunner().invoke(COMMAND, ["--shape", "1,1,32,16", "--device", "cpu", "-q"])
    assert (result.exit_code, result.stdout) == (0, "Every error is within its budget\n")
