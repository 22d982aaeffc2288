"""trace: every way to reach scaled_dot_product_attention is seen, nothing is changed by it, and math is not silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from test_lab import FakePool
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_early
from typer.testing import CliRunner

import tilewise
from support import make_problem
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.lab import report
from tilewise.lab.commands import trace as cli_trace
from tilewise.lab.commands.app import app
from tilewise.lab.measure.compare import Row, Settings, compare
from tilewise.lab.watch import torchrun, trace_report
from tilewise.lab.watch.trace import Site

if TYPE_CHECKING:
    from pathlib import Path

HERE = __file__.rpartition("/")[2]


both_kernels = pytest.mark.usefixtures("override_kernel")


def inputs(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape or (1, 2, 16, 8), requires_grad=grad)


@both_kernels
def test_every_way_to_the_operator_is_seen() -> None:
    q = inputs()
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 8, 16, requires_grad=True)
    with tilewise.trace() as seen:
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        imported_early(q, q, q)
        torch.ops.aten.scaled_dot_product_attention(q, q, q)
        layer(x, x, x, need_weights=False)
    assert len(seen.sites) == 4
    assert all(site.calls == 1 and site.seconds > 0 and site.backend == "torch-flash" for site in seen.sites)
    assert all(HERE in site.stack[0] and "in test_every_way" in site.stack[0] for site in seen.sites)
    assert {site.text for site in seen.sites} >= {"float32 q(1,2,16,8) causal", "float32 q(1,2,16,8) full"}
    assert torch.equal(want, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert len(seen.sites) == 4  # it is over


def test_calls_of_one_place_and_problem_are_one_site() -> None:
    with tilewise.trace() as seen:
        for length in (8, 8, 16, 8):
            q = inputs(1, 2, length, 8)
            F.scaled_dot_product_attention(q, q, q)
    assert sorted(site.calls for site in seen.sites) == [1, 3]
    assert seen.seconds >= sum(site.seconds for site in seen.sites) > 0


def test_the_backward_is_timed_and_gradients_are_untouched() -> None:
    q, k = inputs(grad=True), inputs(grad=True)
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, k).sum(), (q, k))
    with tilewise.trace() as seen:
        got = torch.autograd.grad(F.scaled_dot_product_attention(q, k, k).sum(), (q, k))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    (site,) = seen.sites
    assert site.backward > 0
    assert site.problem is not None
    assert site.problem.needs_grad


def test_math_is_flagged_with_its_reasons_unless_it_was_asked_for() -> None:
    q = inputs()
    with tilewise.trace() as seen:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        F.scaled_dot_product_attention(q[0], q[0], q[0])
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
    by_line = sorted(seen.sites, key=lambda site: site.stack[0])
    dropped, flat, asked = by_line
    assert [site.backend for site in by_line] == ["torch-math"] * 3
    assert dropped.is_math_fallback
    assert "dropout 0.5" in dropped.reasons[0]
    assert flat.is_math_fallback == (torch.__version__ < "2.14")
    assert not asked.is_math_fallback
    assert dropped in seen.math_fallbacks()
    text = str(seen)
    assert "torch-math, silently" in text
    assert dropped.stack[0] in text.partition("Silent math fallbacks:")[2]
    assert "dropout 0.5" in text


@both_kernels
@pytest.mark.parametrize("inside", [True, False])
def test_what_tilewise_takes_is_told_apart(inside: bool) -> None:
    q = inputs()
    if inside:
        with tilewise.trace() as seen, tilewise.sdpa(backend="tiled"):
            F.scaled_dot_product_attention(q, q, q)
    else:
        with tilewise.sdpa(backend="tiled"), tilewise.trace() as seen:
            F.scaled_dot_product_attention(q, q, q)
    (site,) = seen.sites
    assert site.backend == "tilewise"
    assert torch.isfinite(F.scaled_dot_product_attention(q, q, q)).all()


@both_kernels
def test_traces_lie_on_each_other_in_any_order() -> None:
    q = inputs()
    outer, inner = tilewise.trace(), tilewise.trace()
    first = outer.__enter__()
    second = inner.__enter__()
    F.scaled_dot_product_attention(q, q, q)
    outer.__exit__(None, None, None)  # while the other still lies on it
    F.scaled_dot_product_attention(q, q, q)
    inner.__exit__(None, None, None)
    F.scaled_dot_product_attention(q, q, q)
    assert [sum(site.calls for site in seen.sites) for seen in (first, second)] == [1, 2]


def test_an_error_of_the_call_is_the_callers() -> None:
    q = inputs()
    with tilewise.trace() as seen, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q[..., :4], q)
    assert sum(site.calls for site in seen.sites) == 0


def test_calls_that_are_no_problem_of_ours_are_sites_too() -> None:
    q = inputs(2, 2, 8, 8)
    with tilewise.trace() as seen:
        F.scaled_dot_product_attention(q, q[:1], q[:1])  # a batch that broadcasts
    (site,) = seen.sites
    assert site.problem is None
    assert site.text.startswith("float32 q(2,2,8,8) k(1,2,8,8)")


@both_kernels
def test_compiled_graphs_are_seen_when_they_are_traced() -> None:
    q = inputs()
    with tilewise.trace() as seen:
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager", fullgraph=True)
        compiled(q)
        compiled(q)
    torch.compiler.reset()
    assert any(site.backend == "traced by torch.compile" for site in seen.sites)
    assert "its times are not seen" in str(seen)


def test_no_math_fallback_raises_with_every_reason() -> None:
    q = inputs()
    with tilewise.no_math_fallback():
        F.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
        with tilewise.sdpa(backend="reference"):
            F.scaled_dot_product_attention(q[0], q[0], q[0])
        with pytest.raises(UnsupportedProblem, match=r"dropout 0\.5") as raised:
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert raised.value.verdicts
    assert "What to do" in str(raised.value)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def test_a_trace_prints_without_the_packages_of_the_command_line() -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['typer'] = None\n"
        "import torch, tilewise\n"
        "q = torch.ones(1, 1, 8, 8)\n"
        "with tilewise.trace() as t: torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "print(t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 calls at 1 sites" in done.stdout


# --- the command -----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch
import torch.nn.functional as F
print("arguments", sys.argv[1:], __name__)
q = torch.randn(1, 2, 64, 16, requires_grad=True)
for _ in range(3):
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
if "fall" in sys.argv:
    F.scaled_dot_product_attention(q.detach(), q.detach(), q.detach(), dropout_p=0.1)
if "fail" in sys.argv:
    sys.exit(7)
if "stop" in sys.argv:
    raise KeyboardInterrupt
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def trace(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_program_is_traced_from_end_to_end(program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    result = trace("--json", "--html", str(page), "--", "python", "-u", str(program), "--lr", "3")
    assert result.exit_code == 0, result.output
    assert "arguments ['--lr', '3'] __main__" in capfd.readouterr().out
    told = json.loads(result.stdout)
    (site,) = told["sites"]
    assert (site["calls"], site["backend"]) == (3, "torch-flash")
    assert "train.py:7 in <module>" in site["stack"][0]
    assert site["best"] in ("tilewise", "torch-default", "torch-flash", "torch-math")
    assert site["lost"] >= 0
    assert told["seconds"] >= site["forward"] + site["backward"] > 0
    assert "train.py" in page.read_text()
    assert told["provenance"]["command"]


def test_fallbacks_and_failures_have_their_codes(program: Path) -> None:
    fallen = trace("--no-compare", "--strict", "--", sys.executable, str(program), "fall")
    assert fallen.exit_code == 1
    assert "Silent math fallbacks:" in fallen.stdout
    failed = trace("--no-compare", "--", "python", str(program), "fail")
    assert failed.exit_code == 7
    stopped = trace("--no-compare", "--", "python", str(program), "stop")
    assert stopped.exit_code == 130
    assert "train.py:7" in stopped.stdout
    assert "3 calls" not in failed.stderr
    assert "train.py:7" in failed.stdout


def test_modules_and_code_are_programs_too(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    assert "train.py:7" in trace("--no-compare", "--", "python", "-m", "train").stdout
    code = "import torch; q = torch.ones(1, 1, 8, 8); torch.nn.functional.scaled_dot_product_attention(q, q, q)"
    assert "<string>:1 in <module>" in trace("--no-compare", "--", "python", "-c", code).stdout
    none = trace("--no-compare", "--", "python", "-c", "print(1)")
    assert none.exit_code == 0
    assert "no call of scaled_dot_product_attention was seen" in none.stdout


@pytest.mark.parametrize(
    ("words", "flags", "program"),
    [
        ("-um train", "-u", "-m train"),
        ("-umtrain --lr 3", "-u", "-m train --lr 3"),
        ("-mtrain", "", "-m train"),
        ("-Bum train", "-Bu", "-m train"),
        ("-m train -u", "", "-m train -u"),
        ("-uc pass", "-u", "-c pass"),
        ("-W error train.py", "-W error", "train.py"),
        ("-Werror train.py", "-Werror", "train.py"),
        ("-uWerror -X dev -m train", "-u -Werror -X dev", "-m train"),
        ("-uW error -m train", "-u -W error", "-m train"),
        ("-Xm train.py", "-Xm", "train.py"),
        ("--check-hash-based-pycs always train.py", "--check-hash-based-pycs always", "train.py"),
        ("train.py -um x", "", "train.py -um x"),
    ],
)
def test_options_are_read_as_the_interpreter_reads_them(words: str, flags: str, program: str) -> None:
    assert cli_trace.split(["python", *words.split()]) == (sys.executable, flags.split(), program.split())


def test_a_module_after_grouped_options_is_traced(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    result = trace("--no-compare", "--", "python", "-um", "train")
    assert result.exit_code == 0, result.output
    assert "train.py:7" in result.stdout


@pytest.mark.parametrize(
    ("ending", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134), ("os._exit(0)", 1)]
)
def test_a_program_that_leaves_nothing_still_has_its_own_code(ending: str, code: int) -> None:
    result = trace("--no-compare", "--", "python", "-c", f"import os; {ending}")
    assert result.exit_code == code
    assert "left nothing" in result.stderr


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    result = trace("--no-compare", "--", "/no/such/python3", "-c", "pass")
    assert result.exit_code == 2
    assert "/no/such/python3" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["python"],
        ["python", "-u"],
        ["python", "-m"],
        ["python", "-X", "dev"],
        ["python", "-um"],
        ["python", "-"],
    ],
)
def test_what_is_no_python_program_is_refused(command: list[str]) -> None:
    with pytest.raises(InvalidInput, match="the program"):
        cli_trace.split(command)


def test_differences_within_noise_are_no_loss() -> None:
    assert charged({"torch-default": 0.0101}) == ("torch-default", 0.0)
    assert charged({"torch-default": 0.015}) == ("tilewise", pytest.approx(10 * 1.1 * 0.005))


def test_a_site_is_not_charged_for_the_kernel_it_ran() -> None:
    """The default is the fastest by far, and is the kernel that the site ran: that it seems faster is noise."""
    runs = {"torch-default": "torch-flash", "torch-flash": "torch-flash"}
    times = {"torch-flash": 0.03, "torch-default": 0.001, "tilewise": 0.05}
    assert charged(times, runs) == ("torch-flash", 0.0)


def test_a_cold_first_call_is_not_charged() -> None:
    best, lost = charged({"torch-default": 0.02}, seconds=9.0, calls=1)
    assert best == "tilewise"
    assert lost == pytest.approx(1.1 * 0.01), "the call took nine seconds, of which warm calls take 22 ms"


def charged(
    seconds_of: dict[str, float], runs: dict[str, str] | None = None, seconds: float = 9.0, calls: int = 10
) -> tuple[str, float]:
    pool = FakePool(seconds_of)
    pool.runs = runs or {}
    names = ("tilewise", "torch-default", "torch-flash") if runs else ("tilewise", "torch-default")
    comparison = compare(Row("site", make_problem((1, 2, 8, 8)), names), pool, Settings())  # type: ignore[arg-type]
    site: dict[str, Any] = {"backend": "torch-flash", "calls": calls, "forward": seconds, "backward": 0.0, "best": ""}
    trace_report._fill(site, comparison)
    return site["best"], site["lost"]


# --- torchrun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "program"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 3", "--nproc-per-node 2", "train.py --lr 3"),
        ("torchrun --standalone --nnodes=1 -m train --lr 3", "--standalone --nnodes=1", "-m train --lr 3"),
        ("/usr/bin/torchrun train.py", "", "train.py"),
        ("python -m torch.distributed.run --nnodes 1 train.py -m x", "--nnodes 1", "train.py -m x"),
    ],
)
def test_torchrun_is_read_by_its_own_parser(words: str, options: str, program: str) -> None:
    assert torchrun.read(words.split()) == (options.split(), program.split())


def test_what_is_no_torchrun_is_left_alone() -> None:
    assert torchrun.read(["python", "train.py"]) is None
    assert torchrun.read(["python", "-m", "train"]) is None
    for words in ("torchrun", "torchrun --no-python train.sh"):
        with pytest.raises(InvalidInput, match="the program"):
            torchrun.read(words.split())


def test_every_rank_is_traced_and_their_reports_are_one(program: Path, tmp_path: Path) -> None:
    report = tmp_path / "trace.json"
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2", str(program)]
    result = trace("--no-compare", "--json", str(report), "--", *launcher)
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert (told["ranks"], [part["rank"] for part in told["by_rank"]]) == (2, [0, 1])
    (site,) = told["sites"]
    assert (site["calls"], site["ranks"]) == (6, [0, 1])
    assert site["forward"] == pytest.approx(sum(part["sites"][0]["forward"] for part in told["by_rank"]))
    assert told["seconds"] == pytest.approx(sum(part["seconds"] for part in told["by_rank"]))
    assert result.stdout.startswith("6 calls at 1 sites")
    assert "of 2 ranks" in result.stdout


# --- interrupts ------------------------------------------------------------------------------------------------------


def interrupted(*arguments: str, when: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process group of its own that gets an interrupt, as from a terminal, once it says "importing".

    `when`: a folder in front of the path.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewise", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([when, *sys.path])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


SLOW_TORCH = """
import os, sys, time
if {when}:
    os.write(1, b"importing\\n")
    time.sleep(100)
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
del sys.modules["torch"]
import torch
sys.modules["torch"] = torch
"""


def slow_torch(folder: Path, when: str) -> str:
    """A folder whose `torch` takes its time in the processes of which `when` is true; elsewhere it is the real one."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_TORCH.format(when=when))
    return str(folder)


@pytest.mark.parametrize("arguments", [["inspect", "--shape", "1,1,16,8"], ["trace", "--", "python", "-c", "pass"]])
def test_an_interrupt_while_it_imports_ends_with_130_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = interrupted(*arguments, when=slow_torch(tmp_path, "True"))
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_an_interrupt_before_the_program_begins_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    """The child is still importing: the interrupt reaches both."""
    child = slow_torch(tmp_path, "'tilewise.lab.watch.traced' in sys.orig_argv")
    done = interrupted("trace", "--no-compare", "--", "python", "-c", "pass", when=child)
    assert done.returncode == 130
    assert done.stderr.strip() == "tilewise: interrupted"


def test_packed_sequences_are_seen_with_their_lengths() -> None:
    q, k, v = (torch.randn(40, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 30, 31, 40], dtype=torch.int32)
    with tilewise.trace() as seen:
        for _ in range(3):
            tilewise.attention_packed(q, k, v, cu, cu, mask="causal")
        cu.zero_()  # what is told is what the first call saw
    (site,) = seen.sites
    assert site.calls == 3
    assert "test_trace.py" in site.stack[0]
    assert site.lengths == "3 sequences of 1 to 30 queries, median 9, mean 13"
    assert f"lengths at {site.stack[0]}: {site.lengths}" in str(seen)
    tilewise.attention_packed(q, k, v, cu, cu)
    assert site.calls == 3


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_of_a_trace() -> None:
    """As text, in full; the page of the same blocks is in test_html."""
    math = Site(("a.py:3 in f", "main.py:1 in <module>"), "bfloat16 q(1,2,3,4) full", None, "torch-math", "cuda",
                reasons=("flash: no -> yes", "cudnn: off"), calls=3, forward=0.5, best="sm90", lost=0.25)  # fmt: skip
    packed = Site((), "packed", None, "tilewise", "cuda", calls=1, forward=0.1, backward=0.2, lengths="1 to 9")
    unseen = Site(("c.py:1 in g",), "nested", None, "", "cuda", calls=2, note="its times are not seen")
    told = {"seconds": 2.0, "program": "python train.py", "noise": ["a load of 3.1"], "ranks": 2, "complete": False,
            "sites": [site.to_dict() for site in (packed, unseen, math)]}  # fmt: skip
    found = trace_report.report_of(json.loads(json.dumps(told)))
    assert (
        report.lines(found, verbose=True)
        == """\
6 calls at 3 sites, 800 ms, 40% of the time of 2 ranks; silent fallbacks to math: 1 of the sites; 250 ms lost against \
the best candidates.
Interrupted: only what was seen is here.
Noisy: a load of 3.1
trace: python train.py
800 ms of 2.00 s, 40%; 2 ranks; 6 calls at 3 sites; cuda; 1 silent math fallback
Call sites:
site              problem                   ran                   calls  forward  backward  share    lost  best
a.py:3 in f       bfloat16 q(1,2,3,4) full  torch-math, silently      3   500 ms         -    25%  250 ms  sm90
an unknown place  packed                    tilewise                  1   100 ms    200 ms    15%       -  -
c.py:1 in g       nested                    nothing                   2        -         -      -       -  \
its times are not seen
lengths at an unknown place: 1 to 9
Silent math fallbacks:
PyTorch ran its unfused math at these sites, and said nothing.
site         problem                   why no fused kernel took it  what would change that
a.py:3 in f  bfloat16 q(1,2,3,4) full  flash: no                    yes
                                       cudnn: off
Where they are called from:
a.py:3 in f: bfloat16 q(1,2,3,4) full
a.py:3 in f
main.py:1 in <module>""".splitlines()
    )
    brief = report.lines(found)[-1]
    assert brief == "the lines that call them are in the record, and on its page"
    assert report.lines(found, quiet=True) == report.lines(found)[:3]
    assert report.lines(trace_report.report_of({"seconds": 0.0, "sites": []}), quiet=True) == [
        "no call of scaled_dot_product_attention was seen"
    ]
