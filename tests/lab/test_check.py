"""check: every backend against float64 and against the others, with the place of the largest error."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_lab import CANDIDATES, FakePool
from typer.testing import CliRunner

from support import assert_close, budget, make_problem
from tilewise.lab import report
from tilewise.lab.candidates import inputs
from tilewise.lab.commands.app import app
from tilewise.lab.measure import accuracy
from tilewise.lab.measure.accuracy import Sample
from tilewise.lab.measure.compare import REFUSED, VERIFIED, WRONG, Outcome, Settings
from tilewise.lab.measure.pool import Failure, Pool
from tilewise.lab.measure.worker import Worker
from tilewise.lab.studies import check
from tilewise.lab.studies.check import Check, Place
from tilewise.plain import reference
from tilewise.plan import BACKENDS
from tilewise.problem import mask_operands

if TYPE_CHECKING:
    from pathlib import Path

ONE_ELEMENT = """
import torch
def one_element(q, k, v, problem, bias):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).clone()
    out[1, 2, 5, 3] += 0.5
    return out
def unsettled(q, k, v, problem, bias, calls=[]):
    calls.append(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) * (1 + 1e-6 * len(calls))
"""


def run(command: str, *more: str) -> Any:
    return CliRunner().invoke(app, [*command.split(), *more])


# --- from end to end -------------------------------------------------------------------------------------------------


def test_every_willing_backend_is_judged_and_compared() -> None:
    result = run("check --shape 1,4,24,8 --kv-heads 2 --dtype float32 --mask window:6,0 --grad --device cpu --json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    names = [row["candidate"] for row in told["candidates"]]
    assert {"tiled", "reference"} <= set(names)
    assert {name.removeprefix("tilewise:") for name in names} | set(told["refused"]) == set(BACKENDS)
    assert all(told["refused"].values())
    for row in told["candidates"]:
        assert row["verdict"] == VERIFIED, row
        assert set(row["errors"]) == set(row["largest_errors"]) == {"out", "dq", "dk", "dv"}
        assert row["changed"] == []
        place = row["largest_errors"]["dk"]
        assert set(place) == {"batch", "head", "key", "column", "values", "difference"}
        assert place["head"] < 2
    assert [pair["candidates"] for pair in told["pairs"]] == [
        [left, right] for i, left in enumerate(names) for right in names[i + 1 :]
    ]
    for pair in told["pairs"]:
        for name, differences in pair["differences"].items():
            assert differences["norm"] <= 2 * told["budgets"][name]["norm"]
    assert told["compared"] == "every element"
    assert told["provenance"]["seed"] == 0


@pytest.mark.kernel_gate  # ten processes that import PyTorch
def test_a_wrong_element_is_found_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "candidates.py"
    path.write_text(CANDIDATES + ONE_ELEMENT)
    given = [f"{path}:{name}" for name in ("one_element", "illegal", "raises", "unsettled")]
    extra = [argument for name in given for argument in ("--candidate", name)]
    arguments = "check --shape 2,4,16,8 --dtype float32 --mask causal --device cpu --only reference"
    result = run(f"{arguments} --json", *extra)
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    rows = {row["candidate"].rpartition(":")[2]: row for row in told["candidates"]}
    assert rows["reference"]["verdict"] == VERIFIED
    assert rows["one_element"]["verdict"] == WRONG
    place = rows["one_element"]["largest_errors"]["out"]
    assert [place[name] for name in ("batch", "head", "row", "column")] == [1, 2, 5, 3]
    got, want = place["values"]
    assert got - want == pytest.approx(0.5, abs=budget(torch.float32, 16))
    assert rows["illegal"]["verdict"] == "died: SIGILL"
    assert rows["raises"]["verdict"] == "raised ArithmeticError"
    assert rows["unsettled"]["changed"] == ["out"]
    assert "NOT RIGHT" in told["sentence"]
    text = run(arguments, *extra[:2], *extra[6:]).stdout
    assert f"reference and python:{given[0]}" in text
    assert "other bits: out" in text
    assert "\x1b" not in text


def test_a_candidate_that_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the one that hangs is given little time: a healthy one may need more on a machine with much else to do."""
    path = tmp_path / "candidates.py"
    path.write_text(CANDIDATES)
    hangs = f"{path}:hangs"
    ask = Pool.ask

    def impatient(pool: Pool, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        return ask(pool, name, do, 2.0 if name.endswith(":hangs") else limit, **arguments)

    monkeypatch.setattr(Pool, "ask", impatient)
    result = run("check --shape 1,2,8,8 --dtype float32 --device cpu --json --only tiled --only", hangs)
    assert result.exit_code == 1
    rows = {row["candidate"].rpartition(":")[2]: row for row in json.loads(result.stdout)["candidates"]}
    assert rows["hangs"]["verdict"] == "no answer in 2 s"
    assert rows["tiled"]["verdict"] == VERIFIED


def test_tensors_of_a_model(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 24, 2, 16).transpose(1, 2) for _ in range(3))
    path = tmp_path / "tensors.pt"
    torch.save({"q": q, "k": k, "v": v, "is_causal": True, "scale": 0.5}, path)
    result = run("check --device cpu --grad --only tiled --only reference --json", "--tensors", str(path))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["problem"]["mask"] == "causal"
    assert told["problem"]["needs_grad"]
    assert len(told["pairs"]) == 1


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_and_the_causal_rule_of_a_model_hold_together(additive: bool, tmp_path: Path) -> None:
    """As PyTorch's function takes them: a pair is visible if both let it be."""
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    visible = torch.rand(6, 9) < 0.6
    visible[:, 0] = True
    mask = torch.randn(6, 9).masked_fill(~visible, -torch.inf) if additive else visible
    path = tmp_path / "tensors.pt"
    torch.save({"q": q, "k": k, "v": v, "attn_mask": mask, "is_causal": True}, path)
    problem = inputs.problem_of(str(path), needs_grad=False)
    given = inputs.make_inputs(problem, 0, "cpu", str(path))
    assert given.bias is not None
    out, _ = reference.forward(given.q, given.k, given.v, problem, None, mask_operands(given.bias))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    assert_close(out, wanted, budget(torch.float32, 9))
    torch.save({"q": q, "k": k, "v": v, "attn_mask": mask, "is_causal": False}, path)
    assert inputs.make_inputs(problem, 0, "cpu", str(path)).bias.equal(mask)  # type: ignore[union-attr]


def test_a_mask_of_many_rows_that_repeat_is_cut_by_the_causal_rule(tmp_path: Path) -> None:
    """A mask of one row for all, or for each sequence of a batch, stands for as many as there are queries."""
    q = torch.randn(2, 1, 5, 8)
    for shape in ((1, 5), (2, 1, 1, 5), (5,)):
        mask = torch.ones(shape, dtype=torch.bool)
        path = tmp_path / "tensors.pt"
        torch.save({"q": q, "k": q, "v": q, "attn_mask": mask, "is_causal": True}, path)
        problem = inputs.problem_of(str(path), needs_grad=False)
        given = inputs.make_inputs(problem, 0, "cpu", str(path))
        out, _ = reference.forward(given.q, given.k, given.v, problem, None, mask_operands(given.bias))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert_close(out, wanted, budget(torch.float32, 5))


@pytest.mark.parametrize("arguments", ["", "--shape 1,2,3", "--shape 1,2,8,8 --only nobody", "--tensors missing.pt"])
def test_bad_usage_is_told(arguments: str) -> None:
    assert run(f"check {arguments}").exit_code == 2


# --- the report -----------------------------------------------------------------------------------------------------


def judged() -> Check:
    """Two candidates, one of which is wrong at an element and adds in another order the second time; one refuses."""
    problem = make_problem((1, 2, 64, 16), torch.bfloat16)
    right = Outcome("tiled", VERIFIED, errors={"out": {"norm": 2e-3}})
    wrong = Outcome("python:m:f", WRONG, ["out norm error 5.00e-01, budget 8.00e-03"], {"out": {"norm": 0.5}})
    refuses = Outcome("sm90", REFUSED, ["no GPU -> buy one"])
    place = Place("out", (0, 1, 2, 3), (1.0, math.nan), math.inf)
    found = Check(problem, "cpu", [right, wrong, refuses], {"sm80": ["no GPU -> buy one", "too tall -> sit"]})
    found.compared, found.budgets = "every element", {"out": {"norm": 8e-3}}
    found.places = {"tiled": {"out": place}, "python:m:f": {"out": place}}
    found.changed = {"tiled": [], "python:m:f": ["out"]}
    found.pairs = [check.Pair("tiled", "python:m:f", {"out": {"norm": 0.5}}, {"out": place})]
    return found


def test_the_report_of_a_check() -> None:
    """As text, in full; the page of the same blocks is in test_html."""
    found = judged()
    assert (
        report.lines(check.report_of(found, {}), verbose=True)
        == """\
NOT RIGHT: python:m:f (wrong). Within their budgets: tiled.
check: bfloat16 q(1,2,64,16) full
compared with float64: every element; other bits the second time: python:m:f; cpu
python:m:f: wrong; out norm error 5.00e-01, budget 8.00e-03
Errors against their budgets:
Relative error, norm-wise, as a share of the budget:
candidate             out
tiled         2.0e-3, 25%
python:m:f  5.0e-1, 6250%
budget             8.0e-3
Largest errors:
candidate   verdict   second run       tensor  batch  head  row  column  has  float64
tiled       verified  same bits        out         0     1    2       3    1      nan
python:m:f  wrong     other bits: out  out         0     1    2       3    1      nan
Where each is furthest from float64: a wrong tile, a wrong last row and a wrong head look alike in a norm.
Against each other:
pair                     out  tensor  batch  head  row  column  first  second
tiled and python:m:f  5.0e-1  out         0     1    2       3      1     nan
Refused:
candidate  why       what would change that
sm80       no GPU    buy one
           too tall  sit
sm90       no GPU    buy one""".splitlines()
    )
    brief = report.lines(check.report_of(found, {}))
    assert brief[-2:] == ["sm90 refuses: no GPU -> buy one", "did not take it, for reasons that -v tells: sm80"]
    found.complete = False
    quiet = report.lines(check.report_of(found, {}), quiet=True)
    assert quiet == [found.sentence(), "Interrupted: only what was found until then is here."]


def test_the_report_of_a_record_is_that_of_the_check() -> None:
    record = json.loads(report.to_json(judged().to_dict()))
    assert check.report_of(Check.from_dict(record), {}) == check.report_of(judged(), {})


# --- places ----------------------------------------------------------------------------------------------------------


def test_places_are_those_of_the_whole_tensor() -> None:
    problem = make_problem((3, 4, 64, 8), heads_kv=2, needs_grad=True)
    sample = Sample(((2, 1), (0, 0)), (3, 50, 7), "some")
    want = {"out": torch.zeros(2, 2, 3, 8), "lse": torch.zeros(2, 2, 3, 1), "dk": torch.zeros(2, 1, 64, 8)}
    got = {name: tensor.clone() for name, tensor in want.items()}
    got["out"][0, 1, 1, 5] = -2.0
    got["lse"][1, 0, 2, 0] = 1.0
    got["dk"][0, 0, 60, 7] = math.nan
    got["dk"][1, 0, 1, 1] = 1e9
    found = check.places(got, want, problem, sample)
    assert found["out"].at == (2, 3, 50, 5)
    assert found["out"].values == (-2.0, 0.0)
    assert found["lse"].at == (0, 0, 7)
    assert found["dk"].at == (2, 1, 60, 7)
    assert found["dk"].difference == math.inf
    assert found["dk"].to_dict()["key"] == 60


def test_infinities_that_agree_are_no_difference() -> None:
    problem = make_problem((1, 1, 2, 4))
    lse = torch.tensor([-math.inf, 1.0]).reshape(1, 1, 2, 1)
    found = check.places({"lse": lse + 0.0}, {"lse": lse}, problem, Sample(((0, 0),), (0, 1), "all"))
    assert found["lse"].difference == 0.0


# --- what the worker tells, and what is left when something fails ----------------------------------------------------


def test_a_nan_outside_the_sample_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((2, 2, 16, 4))
    monkeypatch.setattr(accuracy, "choose", lambda *_: Sample(((0, 0),), (0, 1), "two rows"))
    worker = Worker()
    worker.prepare("reference", problem.to_dict(), 0, "cpu")
    forward = worker._forward

    def spoiled() -> torch.Tensor:
        out = forward()
        out[1, 1, 9, 2] = math.nan
        return out  # type: ignore[no-any-return]

    worker._forward = spoiled
    try:
        told = worker.results(str(tmp_path / "results.pt"))
    finally:
        worker.forget()  # leaves its contexts, one of which switches gradients off
    assert told == {"changed": [], "strange": {"out": [1, 1, 9, 2]}}
    kept = torch.load(tmp_path / "results.pt")
    assert kept["out"].shape == (1, 1, 2, 4)
    outcome = check.Outcome("reference")
    check._judge(outcome, kept, {}, {}, told["strange"])
    assert outcome.verdict == WRONG
    assert "first at (1, 1, 9, 2)" in outcome.because[0]


class NoTruth(FakePool):
    """float64 runs out of memory; everybody else answers zeros."""

    def __enter__(self) -> NoTruth:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        if name == check.FLOAT64:
            raise Failure("died: SIGKILL", hint="lack of memory")
        if do == "results":
            torch.save({"out": torch.zeros(2, 1, 8, 4)}, arguments["path"])
            return {"changed": [], "strange": {}}
        return None


def test_without_a_truth_nobody_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "Pool", lambda: NoTruth({}))
    found = check.run(make_problem((1, 2, 8, 4)), "cpu", Settings(), only=("tiled", "reference"))
    assert found.failed
    assert "lack of memory" in found.sentence()
    assert [outcome.verdict for outcome in found.outcomes] == ["not verified"] * 2
    assert len(found.pairs) == 1
    assert "Against each other:" in report.lines(check.report_of(found, {}))


def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(NoTruth):
        def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
            if name == "reference":
                raise KeyboardInterrupt
            return super().ask(name, do, limit, **arguments)

    monkeypatch.setattr(check, "Pool", lambda: Interrupted({}))
    found = check.run(make_problem((1, 2, 8, 4)), "cpu", Settings(), only=("tiled", "reference"))
    assert not found.complete
    assert found.changed == {"tiled": []}
