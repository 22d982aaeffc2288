"""The lab: the command line, the worker protocol under every kind of failure, accuracy, interleaving, and text."""

from __future__ import annotations

import importlib
import json
import math
import random
import signal
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from support import in_order, make_problem
from tilewise import masks
from tilewise.errors import InvalidInput
from tilewise.jit import Unit
from tilewise.lab import report
from tilewise.lab.candidates import names as candidates
from tilewise.lab.candidates.names import Candidate, make_inputs
from tilewise.lab.commands import app as cli
from tilewise.lab.commands.app import app
from tilewise.lab.measure import accuracy, environment, timing, worker
from tilewise.lab.measure.compare import (
    REFUSED,
    UNVERIFIED,
    VERIFIED,
    WRONG,
    Outcome,
    Row,
    Settings,
    compare,
    geomean,
    median,
    quantile,
    ratio,
    steps,
    summary,
)
from tilewise.lab.measure.pool import Failure, Pool
from tilewise.lab.studies import builds
from tilewise.plain import reference
from tilewise.plan import BACKENDS, plan
from tilewise.problem import mask_operands
from tilewise.target import Target
from tilewise.terms import KeyLengths

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CANDIDATES = """
import os, signal, time, torch
def right(q, k, v, problem, bias):
    print("candidates may print")
    os.write(1, b"even past Python")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
def wrong(q, k, v, problem, bias):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v) * 1.01
def raises(q, k, v, problem, bias):
    raise ArithmeticError("seven is odd")
def hangs(q, k, v, problem, bias):
    time.sleep(1000)
def illegal(q, k, v, problem, bias):
    os.kill(os.getpid(), signal.SIGILL)
def crashes(q, k, v, problem, bias):
    os.kill(os.getpid(), signal.SIGSEGV)
def leaves(q, k, v, problem, bias):
    os._exit(7)
"""


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[str], str]:
    """The name of a candidate that is a function of the source above."""
    path = tmp_path / "candidates.py"
    path.write_text(CANDIDATES)
    return lambda name: f"{path}:{name}"


def run(command: str, *more: str) -> Any:
    return CliRunner().invoke(app, [*command.split(), *more])


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_needs_no_gpu() -> None:
    result = run("explain --shape 1,32,4096,128 --dtype bf16 --mask causal --target h200")
    problem = make_problem((1, 32, 4096, 128), torch.bfloat16, mask=tilewise.Causal())
    assert result.exit_code == 0
    assert result.stdout == f"{plan(problem, Target.named('h200'))}\n"
    assert "<- runs" in result.stdout


def test_explain_tells_what_lengths_cost(tmp_path: Path) -> None:
    call = "explain --shape 1,16,2792,128 --mask causal --target h200 --lengths "
    told = run(call + "64,128,2600").stdout
    assert "documents:0,64,192,2792:causal" in told
    assert "lengths:   3 sequences of 64 to 2600 queries, median 128, mean 931;" in told
    assert "is lost to partial tiles" in told
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("64 128\n2600\n")
    assert run(call + str(lengths)).stdout == told
    for wrong in ("64,128", "64,nothing", str(tmp_path), "-3"):
        refused = run(call + wrong)
        assert refused.exit_code == 2
        assert "What to do" in refused.output


def test_explain_takes_every_option() -> None:
    result = run(
        "explain --shape 2,8,64,32 --kv-heads 2 --seq-kv 96 --head-dim-v 16 --dtype fp16 --mask window:8,0 --scale 0.5 "
        "--softcap 20 --layout bshd --grad --lse --deterministic --target a100 --torch 2.12 --json"
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    expected = make_problem(
        (2, 8, 64, 32), torch.float16, heads_kv=2, seq_kv=96, head_dim_v=16, mask=tilewise.Window(8, 0),
        scale=0.5, softcap=20.0, layout="bshd", needs_grad=True, needs_lse=True, deterministic=True,
    )  # fmt: skip
    assert tilewise.Problem.from_dict(told["problem"]) == expected
    assert told["target"]["torch"] == "2.12"
    assert {verdict["backend"] for verdict in told["verdicts"]} == set(BACKENDS)


def test_explain_tells_the_error_of_a_precision() -> None:
    exact, rough = (
        run(f"explain --shape 1,8,512,64 --dtype float32 --precision {precision} --target h200").stdout
        for precision in ("exact", "tf32")
    )
    assert "relative error about 4e-7" in exact
    assert "relative error about 4e-4" in rough


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--shape 1,2,3", 2, "--shape"),
        ("--shape 1,2,x,4", 2, "four integers"),
        ("--shape 1,8,64,64 --kv-heads 3", 2, "heads"),
        ("--shape 1,8,64,64 --dtype int8", 2, "dtype"),
        ("--shape 1,8,64,64 --mask sideways", 2, "mask"),
        ("--shape 1,8,64,64 --mask window:-1,0", 2, "Window.left"),
        ("--shape 1,8,64,64 --scale 0", 2, "--scale"),
        ("--shape 1,8,64,64 --layout hsbd", 2, "layout"),
        ("--shape 1,8,64,64 --target abacus", 2, "target"),
        ("--shape 1,8,64,64 --target h200 --torch new", 2, "--torch"),
        ("--shape 1,8,64,64 --target h200 --torch 2", 2, "--torch"),
        ("--shape 1,8,64,64 --backend nope", 2, "backend"),
        ("--shape 1,8,64,64 --target meta", 2, "target"),
        ("--shape 1,8,64,64 --target cpu --backend torch-cudnn", 3, "torch-cudnn"),
        ("--shape 1,8,64,64 --dropout 0.1 --target a100 --backend triton", 3, "dropout"),
    ],
)
def test_bad_input_is_a_message_and_a_code(arguments: str, code: int, says: str) -> None:
    result = run(f"explain {arguments}")
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert "What to do" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_has_its_own_code() -> None:
    for arguments in ("explain --shape 1,8,64,64 --target cuda:0", "inspect --shape 1,8,64,64 --device cuda"):
        result = run(arguments)
        assert result.exit_code == 4
        assert "no CUDA device" in result.stderr


@pytest.mark.parametrize("option", ["--device tpu", "--device mps", "--timing graph", "--candidate nope", "--repeat 0"])
def test_inspect_refuses_bad_options(option: str) -> None:
    result = run(f"inspect --shape 1,2,16,8 --device cpu {option}")
    assert result.exit_code == 2
    assert option.split()[0].strip("-") in result.stderr
    assert "Traceback" not in result.output


def test_help_tells_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "Exit codes: 0" in result.stdout
    assert "\x1b" not in result.stdout
    assert "╭" not in result.stdout


def test_without_typer_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "tilewise.lab.commands.app")
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("tilewise.__main__").main()
    assert exit_.value.code == 2
    assert "pip install 'tilewise[lab]'" in capsys.readouterr().err


# --- env -------------------------------------------------------------------------------------------------------------


def test_env_tells_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_EXAMPLE", "yes")
    told = json.loads(run("env --json").stdout)
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["tilewise"] == tilewise.__version__
    assert told["variables"]["TILEWISE_EXAMPLE"] == "yes"
    assert "flash_attention" in told["scaled_dot_product_attention"]["priority"]
    assert told["scaled_dot_product_attention"]["effective order"][-1] == "torch-math"
    assert len(told["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert set(told["kernel cache"]) >= {"location"}
    text = run("env").stdout
    assert all(f"{topic}:" in text for topic in told)


# --- the worker protocol ---------------------------------------------------------------------------------------------


def test_workers_fail_in_words_and_are_replaced(candidate: Callable[[str], str]) -> None:
    problem = make_problem((1, 2, 16, 8))
    what = {"problem": problem.to_dict(), "seed": 0, "device": "cpu"}

    def prepare(pool: Pool, name: str, limit: float = 60.0) -> None:
        pool.ask("one", "prepare", limit, candidate=f"python:{candidate(name)}", **what)

    with Pool() as pool:
        with pytest.raises(Failure) as failure:
            prepare(pool, "raises")
        assert failure.value.text == "raised ArithmeticError"
        assert failure.value.hint == "seven is odd"
        assert "Traceback" in failure.value.stderr
        prepare(pool, "right")  # an exception leaves the worker alive, and its prints stay out of the protocol
        assert len(pool.ask("one", "time", 60.0, what="forward", method="wall", seconds=0.001)) >= 1
        with pytest.raises(Failure) as failure:
            prepare(pool, "crashes")
        assert failure.value.text == "died: SIGSEGV"
        assert "Segmentation fault" in failure.value.stderr
        assert "in crashes" in failure.value.stderr
        with pytest.raises(Failure, match="died: exit status 7"):
            prepare(pool, "leaves")
        pool.start("one")
        with pytest.raises(Failure) as failure:
            prepare(pool, "hangs", 1.0)
        assert failure.value.text == "no answer in 1 s"
        process = pool._processes["one"]
    assert not process.alive


def test_a_worker_in_this_process_verifies_and_measures(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The commands themselves, without a pipe: lse, layout, grouped heads and a built mask together."""
    problem = make_problem((1, 4, 40, 16), heads_kv=2, mask=tilewise.Window(8, 0), layout="bshd", needs_lse=True)
    what: dict[str, Any] = {"problem": problem.to_dict(), "seed": 3, "device": "cpu"}
    mind = worker.Worker()
    request.addfinalizer(mind.forget)
    assert mind.truth(**what, path=str(tmp_path / "truth.pt"))["compared"] == "every element"
    mind.prepare("reference", **what)
    told = mind.verify(str(tmp_path / "truth.pt"))
    assert told["wrong"] == []
    assert set(told["errors"]) == {"out", "lse"}
    mind.prepare("torch-default", **what | {"problem": problem.with_(needs_lse=False).to_dict()})
    assert mind.verify(str(tmp_path / "truth.pt"))["wrong"] == []
    assert mind.memory() >= 0
    assert min(mind.time("forward", "wall", 0.001)) > 0
    assert min(mind.overhead(0.001)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["events", "graph", "host"])
def test_a_worker_measures_on_a_gpu(method: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    problem = make_problem((1, 4, 256, 64), torch.bfloat16, mask=tilewise.Causal(), needs_grad=True)
    what: dict[str, Any] = {"problem": problem.to_dict(), "seed": 3, "device": "cuda"}
    mind = worker.Worker()
    request.addfinalizer(mind.forget)
    mind.truth(**what, path=str(tmp_path / "truth.pt"))
    for name in ("tilewise", "torch-default", "torch-flash", "tiled"):
        mind.prepare(name, **what)
        assert mind.verify(str(tmp_path / "truth.pt"))["wrong"] == []
        assert mind.memory() >= problem.seq_q * problem.heads_q * problem.head_dim_v * 2
        for direction in ("forward", "backward"):
            for _ in range(2):
                assert min(mind.time(direction, method, 0.01, flush=True)) > 0
        assert min(mind.overhead(0.001)) > 0


def test_pytorchs_refusal_is_a_refusal(request: pytest.FixtureRequest) -> None:
    mind = worker.Worker()
    request.addfinalizer(mind.forget)
    problem = make_problem((1, 2, 16, 8), dropout=0.5)  # PyTorch's flash has no dropout on a CPU
    asked = {"do": "prepare", "candidate": "torch-flash", "problem": problem.to_dict(), "seed": 0, "device": "cpu"}
    assert worker._reply(mind, dict(asked))["error"] == {
        "type": "UnsupportedProblem",
        "text": "Both fused kernels do not support non-zero dropout.",
        "fatal": False,
    }
    assert worker._reply(mind, asked | {"candidate": "torch-cudnn"})["error"]["type"] == "UnsupportedProblem"
    outcome = Outcome("torch-flash")
    outcome.fail(Failure("raised UnsupportedProblem", hint="dropout", refused=True))
    assert (outcome.verdict, outcome.because, outcome.failed) == (REFUSED, ["dropout"], False)


@pytest.mark.parametrize("shape", [(0, 2, 9, 8), (1, 0, 9, 8), (1, 2, 0, 8)])
def test_empty_problems_are_verified_too(
    shape: tuple[int, int, int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    what: dict[str, Any] = {"problem": make_problem(shape).to_dict(), "seed": 0, "device": "cpu"}
    mind = worker.Worker()
    request.addfinalizer(mind.forget)
    mind.truth(**what, path=str(tmp_path / "truth.pt"))
    mind.prepare("reference", **what)
    assert mind.verify(str(tmp_path / "truth.pt"))["wrong"] == []


def test_a_command_line_loop_answers_line_by_line(tmp_path: Path) -> None:
    commands, answers = tmp_path / "commands", tmp_path / "answers"
    problem = make_problem((1, 1, 8, 8), dropout=0.5).to_dict()
    asked = {"do": "prepare", "candidate": "sm90", "problem": problem, "seed": 0, "device": "cpu"}
    commands.write_text(json.dumps(asked) + "\n" + json.dumps(asked | {"candidate": "tilewise"}) + "\n")
    with commands.open() as stdin, answers.open("w") as stdout:
        worker.serve(stdin, stdout)
    refused, done = map(json.loads, answers.read_text().splitlines())
    assert refused["error"]["type"] == "UnsupportedProblem"
    assert not refused["error"]["fatal"]
    assert done == {"answer": None}


@pytest.mark.parametrize(
    "mask", ["full", "causal:bottom-right", "window:3,0", "documents:0,30,64:causal", "dense:bool:64x64"]
)
def test_the_tiny_problem_keeps_the_kind(mask: str) -> None:
    problem = make_problem((2, 8, 64, 32), torch.bfloat16, heads_kv=2, mask=masks.parse(mask), softcap=5.0)
    small = worker.tiny(problem)
    assert type(small.mask) is type(problem.mask)
    assert (small.group, small.dtype, small.softcap, small.head_dim) == (4, torch.bfloat16, 5.0, 32)
    assert small.pairs() <= 4 * 16 * 16


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "nope", "sdpa:best", "python:module", "python::f", "python:module:not a name"])
def test_a_candidate_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="candidate"):
        Candidate(name)


def test_peers_are_pytorchs_own_paths() -> None:
    names = ("tilewise", "torch-default", "torch-math", "tiled", "reference", "tilewise:torch-flash", "python:m:f")
    assert [name for name in names if Candidate(name).is_peer] == ["torch-default", "torch-math"]
    assert [name for name in names if Candidate(name).is_ours] == [
        "tilewise", "tiled", "reference", "tilewise:torch-flash",
    ]  # fmt: skip


def test_one_name_means_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-flash is PyTorch's function held to flash; the planner's route to it has our name in front."""
    problem = make_problem((1, 2, 16, 8))
    inputs = make_inputs(problem, 0, "cpu")
    asked: list[str] = []
    monkeypatch.setattr(candidates, "attention", lambda *_, backend, **__: asked.append(backend))
    monkeypatch.setattr(
        candidates.F, "scaled_dot_product_attention", lambda *_, **__: asked.append("F.scaled_dot_product_attention")
    )
    for name in ("torch-flash", "tilewise:torch-flash", "tilewise"):
        Candidate(name).forward(problem, inputs)()
    function = "F.scaled_dot_product_attention"
    assert asked == [function, "torch-flash", "auto"]


def test_pytorchs_function_refuses_what_it_cannot_say() -> None:
    problem = make_problem((1, 2, 8, 8), softcap=3.0, needs_lse=True)
    reasons = Candidate("torch-default").why_not(problem)
    assert [reason.what.split()[0] for reason in reasons] == ["softcap", "an"]
    assert Candidate("tilewise").why_not(problem) == []
    long = make_problem((1, 1, 2**18, 8), mask=tilewise.Window(5, 0))
    assert "64.0 GiB" in Candidate("torch-flash").why_not(long)[0].what


@pytest.mark.parametrize(
    "mask", ["full", "causal", "causal:bottom-right", "window:5,2", "documents:0,7,24", "dense:additive:1x4x24x32"]
)
def test_candidates_of_every_mask_agree_with_the_reference(mask: str) -> None:
    if mask.startswith("documents"):
        mask += "/0,12,32"
    problem = make_problem((2, 4, 24, 16), seq_kv=32, heads_kv=2, mask=masks.parse(mask), layout="bshd")
    inputs = make_inputs(problem, 1, "cpu")
    want, _ = reference.forward(inputs.q, inputs.k, inputs.v, problem, None, mask_operands(inputs.bias))
    for name in ("tilewise", "torch-default", "tiled"):
        got = Candidate(name).forward(problem, inputs)()
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


def test_inputs_follow_from_the_seed_alone() -> None:
    problem = make_problem((1, 2, 8, 4), mask=masks.parse("dense:bool:8x8"), layout="bshd", needs_grad=True)
    first, again, other = (make_inputs(problem, seed, "cpu") for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first[:5], again[:5], strict=True))  # type: ignore[arg-type]
    assert not torch.equal(first.q, other.q)
    assert first.q.shape == (1, 2, 8, 4)
    assert first.q.transpose(1, 2).is_contiguous()
    assert first.q.requires_grad
    assert first.bias is not None
    assert first.bias[..., 0].all()


# --- accuracy --------------------------------------------------------------------------------------------------------

ACCURATE = [
    make_problem((1, 2, 48, 16), torch.bfloat16, needs_grad=True),
    make_problem((2, 4, 40, 16), torch.float16, heads_kv=2, mask=tilewise.Causal(), needs_grad=True),
    make_problem((1, 2, 48, 16), torch.float32, mask=masks.parse("dense:additive:2x48x48"), needs_grad=True),
    make_problem((1, 2, 48, 16), torch.float64, mask=tilewise.Window(6, 3), softcap=2.0, needs_grad=True),
    make_problem((1, 2, 30, 16), torch.bfloat16, mask=masks.parse("documents:0,10,30:causal"), needs_lse=True),
    make_problem((1, 1, 9, 8), seq_kv=4, mask=tilewise.Causal("bottom-right"), needs_grad=True),  # rows that see no key
    make_problem(
        (1, 2, 9, 64), torch.float64, seq_kv=4, mask=tilewise.Causal(), needs_grad=True
    ),  # a row that sees one
]


def everything(problem: tilewise.Problem) -> accuracy.Sample:
    groups = tuple((batch, head) for batch in range(problem.batch) for head in range(problem.heads_kv))
    return accuracy.Sample(groups, tuple(range(problem.seq_q)), "every element")


@pytest.mark.parametrize("problem", ACCURATE, ids=str)
def test_a_good_backend_keeps_the_budget_and_a_bad_row_breaks_it(problem: tilewise.Problem) -> None:
    inputs = make_inputs(problem, 2, "cpu")
    sample = everything(problem)
    true = accuracy.truth(inputs, problem, sample)
    allowed = accuracy.budgets(accuracy.errors(accuracy.plain(inputs, problem, sample), true), problem)
    out, lse = tilewise.attention(
        *inputs[:3], mask=problem.mask if inputs.bias is None else inputs.bias, softcap=problem.softcap,
        scale=problem.scale, return_lse=True, backend="tiled",
    )  # fmt: skip
    results = {"out": out, "lse": lse}
    if problem.needs_grad:
        grads = torch.autograd.grad(out, inputs[:3], inputs.dout)
        results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    got = accuracy.select(results, problem, sample)
    assert {name: tensor.shape for name, tensor in got.items()} == {name: true[name].shape for name in got}
    assert accuracy.excess(accuracy.errors(got, true), allowed) == []
    for name, tensor in got.items():
        damaged = tensor.clone()
        damaged[-1, -1, -1] += 1.0
        assert accuracy.excess(accuracy.errors({name: damaged}, true), allowed), name
        damaged[-1, -1, -1] = torch.nan
        assert accuracy.excess(accuracy.errors({name: damaged}, true), allowed), name


def test_a_term_that_changes_nothing_changes_no_budget() -> None:
    """Heads with terms are computed by other code than heads without: both subtract what the rounded result makes."""
    plain = make_problem((2, 4, 40, 16), torch.bfloat16, heads_kv=2, mask=tilewise.Causal(), needs_grad=True)
    ended = plain.with_(scores=(KeyLengths(),))
    inputs = make_inputs(plain, 2, "cpu")
    whole = {"key_lengths": torch.full((plain.batch,), plain.seq_kv)}
    by_head = accuracy.Sample(((0, 0), (1, 0), (0, 1), (1, 1)), tuple(range(plain.seq_q)), "every element")
    without = accuracy.plain(inputs, plain, by_head)
    found = accuracy.plain(inputs._replace(terms=whole), ended, by_head)
    assert found.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(found[name], tensor.reshape(found[name].shape)), name


def test_one_bad_row_among_many_is_seen() -> None:
    """What the norm over everything forgives: a single row that is off by a tenth of itself."""
    want = {"out": torch.ones(1, 1, 100_000, 4, dtype=torch.float64)}
    got = {"out": want["out"].clone()}
    got["out"][0, 0, 17] *= 1.1
    found = accuracy.errors(got, want)["out"]
    assert found["norm"] == pytest.approx(0.1 / 100_000**0.5)
    assert found["worst_row"] == pytest.approx(0.1)


def test_infinities_must_agree() -> None:
    want = {"lse": torch.tensor([[[[1.0], [-math.inf]]]])}
    assert accuracy.errors(want, want)["lse"] == {"norm": 0.0, "worst_row": 0.0}
    for value in (-1e30, math.inf, math.nan):
        got = {"lse": torch.tensor([[[[1.0], [value]]]])}
        assert math.isnan(accuracy.errors(got, want)["lse"]["norm"])


def test_large_problems_are_sampled_at_random_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    long = make_problem((1, 32, 16384, 128), heads_kv=8, mask=tilewise.Causal())
    first, again, other = (accuracy.choose(long, seed, "cpu") for seed in (0, 0, 1))
    assert first == again != other
    assert first.text.startswith("a random sample: 32 of 32 heads, ")
    assert 64 <= len(first.rows) < 16384
    assert len(set(first.rows)) == len(first.rows)
    training = accuracy.choose(long.with_(needs_grad=True), 0, "cpu")
    assert training.rows == tuple(range(16384))
    assert len(training.groups) == 1
    assert accuracy.choose(make_problem((2, 8, 512, 64)), 0, "cpu").text == "every element"


@pytest.mark.parametrize("mask", ["full", "causal", "window:5,1", "documents:0,20,48:causal", "dense:bool:2x1x48x48"])
def test_a_sample_is_a_part_of_the_whole(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked, sampled truth equals the reference on the whole problem, cut down."""
    problem = make_problem((2, 4, 48, 16), heads_kv=2, mask=masks.parse(mask), needs_grad=True)
    inputs = make_inputs(problem, 4, "cpu")
    monkeypatch.setitem(accuracy._SCORES_AT_ONCE, "cpu", 7 * 2 * 48)
    wide = [tensor.detach().double() for tensor in inputs[:3]]
    whole = problem.with_(dtype=torch.float64)
    out, lse = reference.forward(*wide, whole, None, mask_operands(inputs.bias))  # type: ignore[arg-type]
    grads = in_order(
        reference.backward(inputs.dout.double(), None, *wide, out, lse, whole, None, mask_operands(inputs.bias))
    )  # type: ignore[arg-type]
    results = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    sample = accuracy.Sample(((1, 0), (0, 1)), tuple(range(48)), "")
    want = accuracy.select(results, problem, sample)
    got = accuracy.truth(inputs, problem, sample)
    assert set(got) == set(want)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name])
    few = accuracy.Sample(((1, 1),), (3, 17, 46), "")
    forward = problem.with_(needs_grad=False)
    torch.testing.assert_close(
        accuracy.truth(inputs, forward, few)["out"], accuracy.select(results, problem, few)["out"]
    )


# --- comparing -------------------------------------------------------------------------------------------------------


class FakePool:
    """A pool without processes: candidates take the seconds they are told to, or fail at the step they are told to."""

    def __init__(self, seconds: dict[str, float], failing: dict[tuple[str, str], str] | None = None) -> None:
        self.seconds, self.failing = seconds, failing or {}
        self.runs: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []

    def start(self, *names: str) -> None: ...

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        self.asked.append((name, do))
        if (name, do) in self.failing:
            raise Failure(self.failing[name, do], hint="try another")
        second = self.seconds.get(name, 0.01)
        errors = {"out": {"norm": 1e-7, "worst_row": 2e-7}}
        return {
            "prepare": None,
            "truth": {"compared": "every element", "budgets": {"out": {"norm": 1e-6, "worst_row": 1e-6}}},
            "verify": {"errors": errors, "wrong": ["out is off"] if name == "tiled" else []},
            "memory": 1 << 20,
            "runs": self.runs.get(name, ""),
            "launched": None,
            "time": [second, second * 1.1, second * 1.2],
            "overhead": [1e-6],
        }[do]


NAMES = ("tilewise", "torch-default", "torch-math", "torch-flash", "reference")


def fake_comparison(pool: FakePool, names: tuple[str, ...] = NAMES, rounds: int = 6, **fields: Any) -> Any:
    row = Row("a row", make_problem((1, 2, 8, 8), **fields), names)
    return compare(row, pool, Settings(rounds=rounds, overhead=True))  # type: ignore[arg-type]


def test_rounds_are_interleaved_in_random_order() -> None:
    pool = FakePool({})
    comparison = fake_comparison(pool)
    assert len(comparison.orders) == 6
    assert all(sorted(order) == sorted(NAMES) for order in comparison.orders)
    assert len({tuple(order) for order in comparison.orders}) > 1
    timed = [name for name, do in pool.asked if do == "time"]
    assert timed == [name for order in comparison.orders for name in order]
    assert fake_comparison(FakePool({})).orders == comparison.orders
    verified = [index for index, (_, do) in enumerate(pool.asked) if do == "verify"]
    assert max(verified) < min(index for index, (_, do) in enumerate(pool.asked) if do == "time")


def test_the_best_peer_is_the_fastest_right_path_of_pytorch() -> None:
    pool = FakePool({"tilewise": 1.0, "torch-default": 3.0, "torch-math": 2.0, "torch-flash": 0.5, "reference": 0.1})
    pool.failing = {("torch-flash", "verify"): "died: SIGILL"}
    comparison = fake_comparison(pool)
    assert comparison.best_peer().candidate == "torch-math"
    assert comparison.speed(comparison["tilewise"]) == pytest.approx(2.0)
    assert comparison["torch-flash"].failed
    assert comparison["torch-flash"].forward == []


def test_wrong_refused_and_dying_candidates_do_not_stop_the_rest() -> None:
    pool = FakePool({}, {("reference", "time"): "died: SIGSEGV"})
    comparison = fake_comparison(pool, ("tilewise", "tiled", "torch-default", "reference"), softcap=2.0)
    verdicts = {outcome.candidate: outcome.verdict for outcome in comparison.outcomes}
    assert verdicts == {"tilewise": VERIFIED, "tiled": WRONG, "torch-default": REFUSED, "reference": "died: SIGSEGV"}
    assert len(comparison["tilewise"].forward) == 6
    assert ("tiled", "time") not in pool.asked
    assert ("torch-default", "prepare") not in pool.asked
    assert pool.asked.count(("reference", "time")) == 1
    assert [outcome.failed for outcome in comparison.outcomes] == [False, True, False, True]


def test_what_cannot_be_verified_is_timed_and_said() -> None:
    lost = fake_comparison(FakePool({}, {("float64", "truth"): "no answer in 300 s"}), ("tilewise",))
    assert "no answer in 300 s" in lost["tilewise"].because[0]
    assert lost["tilewise"].verdict == UNVERIFIED
    assert len(lost["tilewise"].forward) == 6
    assert not lost["tilewise"].failed


def test_slow_candidates_get_fewer_rounds() -> None:
    comparison = fake_comparison(FakePool({"reference": 100.0}))
    assert len(comparison["reference"].forward) == 5
    assert len(comparison["tilewise"].forward) == 6


def test_an_interrupt_keeps_what_was_measured() -> None:
    class Interrupted(FakePool):
        def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
            if self.asked.count((NAMES[0], "time")) == 3:
                raise KeyboardInterrupt
            return super().ask(name, do, limit, **arguments)

    comparison = fake_comparison(Interrupted({}))
    assert not comparison.complete
    assert len(comparison[NAMES[0]].forward) == 3
    assert comparison.to_dict()["complete"] is False


def test_ticks_fit_the_bar() -> None:
    ticks: list[str] = []
    row = Row("a row", make_problem((1, 2, 8, 8)), NAMES)
    settings = Settings(rounds=4)
    compare(row, FakePool({}), settings, ticks.append)  # type: ignore[arg-type]
    assert len(ticks) == steps(row, settings)


def test_statistics() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == pytest.approx(2.0)
    assert quantile([[4.0], [4.0, 4.0]], 0.8) == 4.0
    assert math.isnan(median([]))
    assert summary([]) is None
    values = [random.Random(0).random() for _ in range(101)]
    assert summary([values]) == {"median": sorted(values)[50], "p20": sorted(values)[20], "p80": sorted(values)[80]}
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geomean([]))


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that slows down threefold half way changes no ratio."""
    ours, peer = [1.0, 1.0, 3.0], [2.0, 2.0, 6.0, 6.0]
    assert ratio(ours, peer) == 2.0
    assert ratio([], peer) is None
    training = Outcome("tilewise", forward=[[1.0], [2.0]], backward=[[3.0, 5.0]])
    assert training.costs == [5.0]


@pytest.mark.parametrize("method", ["wall", "host"])
def test_timing_counts_what_it_runs(method: str) -> None:
    calls = []
    samples = timing.measure(lambda: calls.append(1), method, 0.005)
    assert len(calls) > len(samples) >= 1
    assert all(sample > 0 for sample in samples)


def noted_backward(noted: list[str]) -> timing.Backward:
    """Of the square of a number: notes its forwards and its backwards."""
    x = torch.ones(3, requires_grad=True)

    def forward() -> torch.Tensor:
        noted.append("forward")
        out = x.square()
        out.register_hook(lambda grad: noted.append("backward"))
        return out

    return timing.Backward(forward, [x], torch.ones(3))


def test_every_backward_has_a_forward_of_its_own() -> None:
    noted: list[str] = []
    backward = noted_backward(noted)
    backward.fresh()()  # the first backward of a process takes milliseconds
    assert min(timing.measure(backward, "wall", 0.05)) > 0
    assert noted.count("forward") == noted.count("backward") > 1
    call = backward.fresh()
    call()
    with pytest.raises(RuntimeError, match="second time"):
        call()
    retained = backward.retained()
    assert torch.equal(retained()[0], retained()[0])


def test_events_hold_backwards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forwards are done before the first event, and the device spins while the host enqueues them."""
    noted: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            noted.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: noted.append("spin"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept: timing.Kept = {"estimates": (4e-4, 1e-4)}
    samples = timing.measure(noted_backward(noted), "events", 1e-3, kept=kept)
    warm_up, measured = ["forward"] * 3 + ["backward"] * 3, ["forward"] * 3 + ["spin", "event"] + ["backward"] * 3
    assert noted == [*warm_up, *measured, "event"]
    assert samples == [pytest.approx(1e-3 / 3)]


# --- text ------------------------------------------------------------------------------------------------------------


def test_piped_tables_are_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    columns, rows = ("name", ">ms"), (("a", "1.5"), ("longer", "10"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    report.print_table(columns, rows)
    assert capsys.readouterr().out == "name     ms\na       1.5\nlonger   10\n"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    report.print_table(columns, (*rows, ("x", "died: SIGILL")))
    fancy = capsys.readouterr().out
    assert "───" in fancy
    assert "\x1b[" in fancy
    monkeypatch.setenv("COLUMNS", "10")  # too narrow: nothing is cut, and no line is drawn
    report.print_table(columns, rows)
    assert capsys.readouterr().out == "name     ms\na       1.5\nlonger   10\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.5, "1234"), (12.345, "12.3"), (0.012345, "0.0123"), (1.5e-9, "1.5e-09")]
)
def test_three_digits_are_enough(value: float, text: str) -> None:
    assert report.significant(value) == text


def test_json_has_no_nan() -> None:
    assert json.loads(report.to_json({"a": [math.nan, 1.0, (math.inf,)]})) == {"a": ["nan", 1.0, ["inf"]]}


def test_provenance_can_repeat_a_run() -> None:
    told = environment.provenance(7, ["tilewise", "bench"])
    assert told["seed"] == 7
    assert told["command"] == ["tilewise", "bench"]
    assert told["date"].endswith("+00:00")
    assert set(told["source"]) == {"commit", "dirty"}
    assert {"tilewise", "python", "torch", "cuda", "cudnn"} <= set(told["versions"])
    assert told["machine"]["cpu"]
    assert isinstance(told["gpus"], list)


def test_env_can_measure_imports() -> None:
    result = CliRunner().invoke(app, ["env", "--imports", "--json"])
    assert result.exit_code == 0
    seconds = json.loads(result.stdout)["import seconds"]
    assert set(seconds) == {"torch", "tilewise"}
    assert all(value > 0 for value in seconds.values())


def test_fa3_says_what_it_lacks() -> None:
    full = make_problem((1, 2, 64, 64), torch.bfloat16)
    lacking = [
        full.with_(dtype=torch.float16),
        full.with_(mask=masks.Window(3)),
        full.with_(seq_kv=32, mask=masks.Causal()),
        full.with_(needs_grad=True),
    ]
    here = Candidate("fa3").why_not(full)
    assert all("pip install fa3-fwd" in str(reason) for reason in here)
    assert all(len(Candidate("fa3").why_not(problem)) == len(here) + 1 for problem in lacking)


def test_compile_lists_what_it_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    good = Unit("good", 'extern "C" __global__ void good(int* x) { *x = 1; }', "sm_90a", smem_bytes=2048)
    bad = Unit("bad", 'extern "C" __global__ void bad() { nonsense; }', "sm_90a")
    module = types.SimpleNamespace(all_units=lambda: [good, bad])
    monkeypatch.setattr(builds, "BACKENDS", {"kernels": module})
    result = CliRunner().invoke(app, ["compile", "--target", "sm_90a"])
    assert result.exit_code == 4
    assert "2.0" in next(line for line in result.stdout.splitlines() if line.startswith("good"))
    assert "nonsense" in result.stdout
    assert "2 kernels: 1 built, 1 failed" in result.stdout
    monkeypatch.setattr(builds, "BACKENDS", {"kernels": types.SimpleNamespace(all_units=lambda: [good])})
    again = CliRunner().invoke(app, ["compile", "--target", "h200", "--json"])
    assert again.exit_code == 0
    assert json.loads(again.stdout)[0]["from_cache"] is True
    nothing = CliRunner().invoke(app, ["compile", "--target", "sm_75"])
    assert nothing.exit_code == 2


def test_a_request_to_end_counts_as_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
