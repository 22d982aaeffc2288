"""The suite `variants`: every row is a sound problem whose visible pairs are counted right, all that answer it are held
to one truth, and what a row reaches is said as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from suites import variants

from support import make_problem
from tilewise import Causal, Full, Problem
from tilewise.errors import InvalidInput
from tilewise.lab import report
from tilewise.lab.candidates.names import FLEX, OURS, PLAIN, Candidate, make_inputs, sdpa_arguments
from tilewise.lab.candidates.patterns import NORMAL, Pattern
from tilewise.lab.measure import accuracy, ahead
from tilewise.lab.measure.compare import (
    REFUSED,
    UNVERIFIED,
    VERIFIED,
    Comparison,
    Goal,
    Outcome,
    Plain,
    Row,
    Settings,
    read_comparison,
)
from tilewise.lab.measure.worker import Worker
from tilewise.lab.render import bench_report
from tilewise.lab.studies import bench, suites
from tilewise.scores import Where, visible_all

if TYPE_CHECKING:
    from pathlib import Path

SMALL = 64  # so that lengths, documents, the prefix and the window are in proportion
HEADS = {variants.WIDE: variants.Heads(2, 2, 16), variants.NARROW: variants.Heads(2, 2, 8)}
HEADS[variants.GROUPED] = variants.Heads(4, 2, 16)
ASKED = [(HEADS[heads], variant) for heads, variant in variants.asked(SMALL)]
IDS = [f"{heads.queries}-{heads.keys}-{heads.dim}-{variant.name}" for heads, variant in ASKED]
CASES = [pytest.param(*asked, id=name) for asked, name in zip(ASKED, IDS, strict=True)]
every_variant = pytest.mark.parametrize(("heads", "variant"), CASES)
# What is dropped is random: no candidate can be held to what another drops.
every_exact_variant = pytest.mark.parametrize(
    ("heads", "variant"), [case for case, (_, variant) in zip(CASES, ASKED, strict=True) if not variant.dropout]
)


def small_row(heads: variants.Heads, variant: variants.Variant) -> Row:
    return variant.rows(heads, SMALL, "cpu")[1]


def shown(row: Row) -> torch.Tensor:
    """The visible pairs of a row, (batch, heads, rows, keys), counted one by one."""
    problem = row.problem
    inputs = make_inputs(problem, 0, "cpu", contents=row.contents)
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    seen = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv)
    if inputs.bias is not None:
        seen = seen & (inputs.bias if inputs.bias.dtype == torch.bool else inputs.bias > -torch.inf)
    by_terms = visible_all(Where(problem, rows, keys, operands=inputs.terms))
    seen = seen if by_terms is None else seen & by_terms
    return seen.expand(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)


@every_variant
def test_the_plain_problem_counts_for_as_many_pairs_as_are_visible(
    heads: variants.Heads, variant: variants.Variant
) -> None:
    row = small_row(heads, variant)
    assert row.plain is not None
    plain = row.plain.problem
    assert (plain.scores, plain.operand_grads, plain.dropout) == ((), (), 0.0)
    assert plain.mask.band(SMALL, SMALL) is not None
    if variant.name == "random mask":  # no tile of it is empty: a kernel computes all pairs
        assert row.plain.share == 1.0
        assert 0 < int(shown(row).sum()) < plain.pairs()
        return
    assert row.plain.share * plain.pairs() == pytest.approx(int(shown(row).sum()))
    assert row.flops == pytest.approx(row.plain.share * row.flops_of(plain), abs=1)


def test_flex_attention_is_no_candidate_for_dropout() -> None:
    dropped = [small_row(heads, variant) for heads, variant in ASKED if variant.dropout]
    assert dropped
    assert all(FLEX not in row.candidates for row in dropped)


@every_exact_variant
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_candidates_give_what_float64_gives(
    heads: variants.Heads, variant: variants.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of operands included; FlexAttention uncompiled, for its rules."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    row = small_row(heads, variant)
    problem = row.problem.with_(dtype=torch.float32)
    sample = accuracy.choose(problem, 0, "cpu")
    assert sample.text == "every element"
    inputs = make_inputs(problem, 0, "cpu", contents=row.contents)
    with torch.no_grad():  # as in a worker
        truth = accuracy.truth(inputs, problem, sample)
        simple = accuracy.plain(inputs, problem, sample)
    allowed = accuracy.budgets(accuracy.errors(simple, truth), problem)
    assert set(truth) == {"out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in problem.operand_grads)}
    answered = []
    for name in (OURS, "torch-math", FLEX):
        asked = problem.with_(needs_grad=False) if name == FLEX else problem  # it has no backward on a CPU
        if Candidate(name).why_not(asked, "cpu"):
            continue
        given = Candidate(name).inputs(asked, 0, "cpu", contents=row.contents)
        got = {"out": Candidate(name).forward(asked, given)()}
        if asked.needs_grad:
            wanted = given.differentiated(asked)
            grads = torch.autograd.grad(got["out"], [*wanted.values()], given.dout)
            got |= dict(zip(wanted, grads, strict=True))
        found = accuracy.errors(accuracy.select(got, problem, sample), truth)
        assert not accuracy.excess(found, allowed), name
        answered.append(name)
    assert {OURS, FLEX} <= set(answered)


def test_a_sample_of_heads_holds_whole_gradients_of_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, variant = ASKED[IDS.index("2-2-16-bias grad")]
    row = small_row(heads, variant)
    monkeypatch.setattr(accuracy, "_ELEMENTS_AFFORDED", 1)
    monkeypatch.setattr(accuracy, "_ROWS_WANTED", 16)
    sample = accuracy.choose(row.problem, 0, "cpu")
    assert sample.text == "a random sample: 1 of 2 heads, whole"
    assert {batch for batch, _ in sample.groups} == set(range(row.problem.batch))
    inputs = make_inputs(row.problem, 0, "cpu", contents=row.contents)
    truth = accuracy.truth(inputs, row.problem, sample)
    assert truth["dbias"].shape == (1, 1, 1, 16, SMALL)
    (head,) = {head for _, head in sample.groups}
    whole = torch.zeros(1, 2, SMALL, SMALL)
    whole[0, head] = torch.arange(SMALL * SMALL).view(SMALL, SMALL)
    picked = accuracy.select({"dbias": whole}, row.problem, sample)["dbias"]
    assert torch.equal(picked[0, 0, 0], whole[0, head, ::4])


def test_a_gradient_that_is_summed_over_heads_is_compared_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, variant = ASKED[IDS.index("2-2-16-bias grad")]
    row = small_row(heads, variant)
    monkeypatch.setattr(accuracy, "_ELEMENTS_AFFORDED", 1)
    shared = row.problem.with_(mask=replace(row.problem.mask, shape=(1, 1, SMALL, SMALL)))  # type: ignore[type-var]
    assert accuracy.choose(shared, 0, "cpu").text == "every element"


def test_a_wrong_gradient_of_an_operand_is_seen(tmp_path: Path) -> None:
    heads, variant = ASKED[IDS.index("2-2-16-bias table grad")]
    row = small_row(heads, variant)
    problem = row.problem.with_(dtype=torch.float32)
    sample = accuracy.choose(problem, 0, "cpu")
    inputs = make_inputs(problem, 0, "cpu")
    truth = accuracy.truth(inputs, problem, sample)
    allowed = accuracy.budgets(accuracy.errors(accuracy.plain(inputs, problem, sample), truth), problem)
    spoiled = truth | {"dtable": truth["dtable"].roll(1, -1)}
    assert [text.split()[0] for text in accuracy.excess(accuracy.errors(spoiled, truth), allowed)] == ["dtable"] * 2


def test_the_worker_verifies_the_row_and_the_plain_problem_each_against_its_own_truth(tmp_path: Path) -> None:
    heads, variant = ASKED[IDS.index("2-2-16-causal keep")]
    row = small_row(heads, variant)
    one = Worker()
    for candidate in (OURS, PLAIN):
        path = str(tmp_path / f"{len(candidate)}.pt")
        asked: dict[str, Any] = {"problem": row.asked(candidate).with_(dtype=torch.float32).to_dict(), "seed": 0}
        asked |= {"device": "cpu", "contents": row.contents}
        one.truth(path=path, **asked)
        one.prepare(candidate=candidate, **asked)
        told = one.verify(path)
        assert told["wrong"] == []
        assert set(told["errors"]) == {"out", "dq", "dk", "dv"}
    one.forget()
    assert row.asked(OURS).scores
    assert row.asked(PLAIN).scores == ()
    assert Candidate(PLAIN).is_ours


def dropped(seed: int, probability: float = 0.1) -> tuple[Problem, Any, Any, Any]:
    """A problem with dropout, its inputs, and the truth without it."""
    problem = make_problem((2, 4, 256, 16), mask=Causal(), dropout=probability, needs_grad=True)
    inputs = make_inputs(problem, seed, "cpu")
    sample = accuracy.choose(problem, 0, "cpu")
    return problem, inputs, sample, accuracy.truth(inputs, problem.with_(dropout=0.0), sample)


@pytest.mark.parametrize("seed", range(3))
def test_dropout_is_verified_by_what_it_does_to_the_results(seed: int) -> None:
    torch.manual_seed(seed)
    problem, inputs, sample, truth = dropped(seed)
    arguments, options = sdpa_arguments(problem, inputs)

    def results(probability: float) -> dict[str, torch.Tensor]:
        out = F.scaled_dot_product_attention(*arguments[:4], probability, *arguments[5:], **options)
        return {
            "out": out,
            **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs[:3], inputs.dout), strict=True)),
        }

    def told(got: dict[str, torch.Tensor]) -> list[str]:
        found = accuracy.errors(accuracy.select(got, problem, sample), truth)
        return accuracy.dropout_excess(found, problem) + accuracy.dropout_mismatch(got, inputs.v, inputs.dout)

    right = results(0.1)
    assert told(right) == []
    assert told(results(0.3))
    assert told(results(0.0))
    assert told(right | {"out": right["out"] * 0.5})
    other = results(0.1)
    assert told({"out": right["out"], **{name: other[name] for name in ("dq", "dk", "dv")}}) != []


def test_padding_reaches_pytorch_as_one_number_per_key() -> None:
    for name, shape in (("padding", (4, 1, 1, SMALL)), ("key lengths", (4, 1, 1, SMALL))):
        row = small_row(*ASKED[IDS.index(f"2-2-16-{name}")])
        inputs = make_inputs(row.problem, 0, "cpu", contents=row.contents)
        (_, _, _, mask, _, is_causal), _ = sdpa_arguments(row.problem, inputs)
        assert mask.shape == shape
        assert not is_causal
        assert torch.equal(mask.sum(-1).flatten(), torch.tensor(Pattern.parse(row.contents).lengths))


def test_a_pattern_is_what_its_text_says() -> None:
    assert Pattern.parse("padding:8,3") == Pattern(lengths=(8, 3))
    assert Pattern.parse("causal+padding:8,3").visible(8, 8, torch.device("cpu")).sum((1, 2, 3)).tolist() == [36, 21]
    assert Pattern.parse("prefix:3").visible(4, 4, torch.device("cpu")).sum().item() == 13
    for text in (NORMAL, "padding:", "padding:a", "prefix:", "random"):
        with pytest.raises(InvalidInput):
            Pattern.parse(text)


def test_the_suite_is_what_it_promises() -> None:
    rows = suites.rows_of("variants")
    assert [row.timed for row in rows] == [("forward",), ("step",)] * (len(rows) // 2)
    shapes = {(row.problem.batch, row.problem.heads_q, row.problem.heads_kv, row.problem.head_dim) for row in rows}
    assert shapes == {(4, 16, 16, 128), (4, 16, 16, 64), (4, 32, 8, 128)}
    for forward, step in zip(rows[::2], rows[1::2], strict=True):
        assert forward.problem == step.problem  # verified together
        assert forward.goal is not None
        assert step.goal is not None
        assert forward.goal.aim >= forward.goal.floor
        assert forward.goal.floor >= step.goal.floor
    dropping = [row for row in rows if row.problem.dropout]
    assert dropping
    beside_batch = [row for row in rows if "beside a batch" in row.name]
    peers = [row for row in rows if row not in beside_batch]
    assert all((FLEX in row.candidates) != bool(row.problem.dropout) for row in peers)
    assert len(beside_batch) == len([row for row in peers if "documents" in row.name])
    for row in beside_batch:
        assert row.candidates == (OURS, PLAIN)
        assert row.goal is not None
        assert row.goal.plain_limit > 0
        assert row.plain is not None
        tokens = [one.batch * one.seq_q for one in (row.plain.problem, row.problem)]
        longest = row.plain.problem.seq_q  # half of one such sequence is all that whole sequences can miss
        assert abs(tokens[0] - tokens[1]) <= longest / 2
        assert abs(1 - row.plain.share) * row.plain.problem.batch <= 1


def test_what_differs_in_its_terms_or_its_mask_is_compiled_side_by_side() -> None:
    rows = [replace(row, candidates=(OURS,)) for row in suites.rows_of("variants")]
    bunches = ahead.jobs(rows)
    assert len(bunches) > 10
    assert {job[3] for bunch in bunches for job in bunch} == {row.contents for row in rows}


def test_what_torch_compiles_for_every_shape_is_compiled_side_by_side() -> None:
    problems = {row.problem for row in suites.rows_of("models")}
    bunches = ahead.jobs([replace(row, candidates=(FLEX,)) for row in suites.rows_of("models")])
    assert [len(bunch) for bunch in bunches] == [1] * len(problems)


def comparison(ours: float, peer: float, plain: float, goal: Goal, share: float = 1.0, **changes: Any) -> Comparison:
    """Times in milliseconds."""
    problem = variants.asked(SMALL)[0][1].problem(variants.WIDE, SMALL)
    asked = Plain(problem.with_(mask=Full()), share)
    row = Row("row", problem, (OURS, PLAIN, FLEX), "cuda", times=("forward",), plain=asked, goal=goal)
    times = {OURS: ours, PLAIN: plain, FLEX: peer}
    made = [Outcome(name, VERIFIED, forward=[[time * 1e-3]] * 5) for name, time in times.items()]
    for name, value in changes.items():
        setattr(made[0], name, value)
    return Comparison(row, made)


CLOSE = Goal(1.5, 1.875, 1.10, 1.05)


@pytest.mark.parametrize(
    ("ours", "peer", "plain", "share", "word"),
    [
        (1.0, 2.0, 2.0, 0.5, "aim"),
        (1.0, 1.6, 2.0, 0.5, "floor"),
        (1.08, 3.0, 2.0, 0.5, "floor"),
        (1.0, 1.4, 2.0, 0.5, "MISSED"),
        (1.0, 2.0, 1.0, 0.5, "MISSED"),
    ],
)
def test_a_row_reaches_its_floor_its_aim_or_neither(
    ours: float, peer: float, plain: float, share: float, word: str
) -> None:
    done = comparison(ours, peer, plain, CLOSE, share)
    assert bench.reached(done) == word
    assert done.against_plain() == pytest.approx(ours / (plain * share))
    record = bench.record("variants", [done], Settings(), [])
    assert record["rows"][0]["reached"] == word
    assert record["rows"][0]["against_plain"] == pytest.approx(ours / (plain * share))
    again = read_comparison(record["rows"][0])
    assert (again.row.goal, again.row.plain) == (done.row.goal, done.row.plain)
    assert bench.reached(again) == word
    assert word in next(line for line in report.lines(bench_report.report_of(record)) if "1.50, 1.88" in line)


def test_a_rate_is_a_goal_too_and_no_goal_is_none() -> None:
    fast = comparison(1.0, 2.0, 1.0, Goal(tflops=1e-6, tflops_aim=1e-5))
    assert bench.reached(fast) == "aim"
    assert bench.reached(comparison(1.0, 2.0, 1.0, Goal(tflops=1e6))) == "MISSED"
    assert bench.reached(comparison(1.0, 2.0, 1.0, Goal())) == ""


def test_what_is_refused_or_not_verified_says_so_in_the_row() -> None:
    done = comparison(1.0, 2.0, 1.0, CLOSE, verdict=REFUSED, because=["no kernel has it"], forward=[])
    assert bench.reached(done) == "refused; no kernel has it"
    assert done.against_plain() is None
    untold = comparison(1.0, 2.0, 1.0, CLOSE, verdict=UNVERIFIED, because=["float64 has no answer"])
    assert bench.reached(untold) == "not verified; float64 has no answer"
    alone = comparison(1.0, 2.0, 1.0, CLOSE)
    alone.outcomes[2].verdict = "wrong"
    assert bench.reached(alone) == "not compared"
