"""The ladder on a GPU: every rung against float64, in every precision, mask and layout it takes.

Run as a program it launches a few shapes of the CUDA C++ rungs and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_ladder_gpu.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_ladder_gpu.py
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window, ladder
from tilewise.errors import CompileError
from tilewise.jit import build_all
from tilewise.lab.commands.app import app
from tilewise.lab.measure import stages
from tilewise.lab.studies import ladder_report
from tilewise.ladder import lecture, three_kernel
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tilewise.jit import Unit

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")
# What a compiler of others says about itself is no failure of ours; what we say is.
OTHERS = [pytest.mark.filterwarnings(f"ignore:::{package}") for package in ("numba", "cuda", "triton")]
pytestmark = [pytest.mark.gpu, *OTHERS]

OURS = [rung.name for rung in ladder.RUNGS if rung.module]
MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 30), Window(0, 0, "bottom-right"), Window(300, None)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if hopper:
        build([*three_kernel.all_units(), *(unit for unit in lecture.all_units() if unit.arch == "sm_90")])


def build(units: Iterable[Unit]) -> None:
    """All at once, on all cores: a kernel that does not build ends the test with its compiler's words."""
    for unit, kernel in build_all(units):
        assert not isinstance(kernel, CompileError), f"{unit.label}: {kernel}"


def problem_of(
    heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], batch: int = 2, **fields: Any
) -> Problem:
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True, "dtype": BF16}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **(values | fields))


def check(rung: Any, problem: Problem, config: Any = None, inputs: Any = None) -> None:
    """One call into memory that was full of NaN before."""
    q, k, v = inputs or make_inputs(problem, "cuda")
    out, lse = rung.forward(q, k, v, problem, config)
    truth, truth_lse = exact(q, k, v, problem)
    what = f"{problem} {config or ''}"
    assert_close(out, truth, budget(problem.dtype, problem.seq_kv), f"{what} out")
    blind = truth_lse.isinf()
    assert (out[blind] == 0).all(), what
    if lse is not None:
        # A rung that rounds its scores gives an lse that is as wrong as that makes it.
        rounds_scores = rung.__name__.endswith(("matmul", "three_kernel"))
        tolerance = budget(problem.dtype if rounds_scores else FP32, problem.seq_kv)
        assert_close(lse, truth_lse, tolerance, f"{what} lse")


def willing(name: str, problem: Problem) -> Any:
    rung = ladder.module(name)
    reasons = rung.why_not(problem, Target.of("cuda"))
    if reasons:
        pytest.skip(f"{name}: {reasons[0]}")
    return rung


def takes(name: str, dtype: torch.dtype) -> bool:
    problem = problem_of((4, 2), (300, 411), (64, 64), dtype=dtype)
    return not ladder.module(name).why_not(problem, Target.named("h200"))


TAKEN = [(name, dtype) for name in OURS for dtype in (BF16, FP16, FP32) if takes(name, dtype)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
def test_every_rung_and_mask(name: str, dtype: torch.dtype, mask: Any) -> None:
    problem = problem_of((4, 2), (300, 411), (64, 64), mask=mask, dtype=dtype)
    check(willing(name, problem), problem)


@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (192, 128), (96, 96), (72, 40), (8, 8)], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_every_head_dim(name: str, dims: tuple[int, int]) -> None:
    for mask in (Full(), Causal()):
        problem = problem_of((2, 2), (200, 333), dims, mask=mask)
        check(willing(name, problem), problem)


LENGTHS = [(1, 1), (1, 500), (500, 1), (63, 65), (129, 127), (700, 130), (1025, 1025)]
KINDS = [(Full(), "bshd", 0.0), (Causal("bottom-right"), "bhsd", 5.0), (Window(60, 5), "bshd", 0.0)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_every_length_layout_and_softcap(name: str, lengths: tuple[int, int]) -> None:
    for mask, layout, softcap in KINDS:
        problem = problem_of((4, 1), lengths, (64, 64), mask=mask, layout=layout, softcap=softcap)
        check(willing(name, problem), problem)


@pytest.mark.parametrize("name", OURS)
def test_an_empty_problem(name: str) -> None:
    problem = problem_of((2, 2), (5, 0), (64, 64))
    out, lse = willing(name, problem).forward(*make_inputs(problem, "cuda"), problem)
    assert (out == 0).all()
    assert lse is None or (lse == -math.inf).all()


@needs_hopper
@pytest.mark.parametrize("seq_kv", [100, 400, 900, 1500, 3000, 7000, 9000, 20000])
def test_softmax_rows_of_every_length(seq_kv: int) -> None:
    """Every number of chunks that a warp holds, and rows that it must stream."""
    for mask in (Full(), Window(seq_kv // 2, 0, "bottom-right")):
        problem = problem_of((2, 2), (70, seq_kv), (64, 64), 1, mask=mask)
        check(three_kernel, problem)


@needs_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_tiles_of_the_sweep_are_right(dim: int) -> None:
    problem = problem_of((3, 1), (900, 1100), (dim, dim), mask=Causal("bottom-right"))
    inputs = make_inputs(problem, "cuda")
    space = three_kernel.search_space(problem, Target.of("cuda"))
    launched = [config for config in space if config.overlap and config.slab_mib]
    shallow = [config for config in space if 1 in (config.scores_stages, config.values_stages)]
    by_row = [config for config in space if config.row_threads != 32]
    assert by_row
    some = dict.fromkeys([*launched, *shallow[::6], *space[::6], *by_row])
    build({three_kernel.unit(stage) for config in some for stage in three_kernel.stages_of(problem, config)})
    for config in some:
        check(three_kernel, problem, config, inputs)


@needs_hopper
def test_slabs_of_heads_and_of_rows() -> None:
    for shape in ((16, 512, 512), (2, 3000, 4096)):
        problem = problem_of((shape[0], shape[0]), shape[1:], (64, 64), 1, mask=Causal("bottom-right"))
        config = three_kernel.Config(slab_mib=4, overlap=True)
        assert three_kernel.launches(problem, config) > 3
        check(three_kernel, problem, config)


@needs_hopper
def test_the_same_bits_every_time_and_in_a_graph() -> None:
    problem = problem_of((8, 8), (1000, 1000), (128, 128), mask=Causal())
    q, k, v = make_inputs(problem, "cuda")
    for config in (None, three_kernel.Config(overlap=True)):
        first, _ = three_kernel.forward(q, k, v, problem, config)
        for _ in range(5):
            assert torch.equal(three_kernel.forward(q, k, v, problem, config)[0], first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = three_kernel.forward(q, k, v, problem, config)
        captured.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, first)


def test_the_lecture_kernel_with_its_own_banks() -> None:
    problem = problem_of((2, 2), (100, 130), (128, 128), mask=Causal("bottom-right"))
    rung = willing("lecture", problem)
    for config in lecture.configs(problem, Target.of("cuda")):
        check(rung, problem, config)


@pytest.mark.parametrize("name", ["numba", "lecture"])
def test_hidden_values_never_show(name: str) -> None:
    problem = problem_of((2, 2), (100, 100), (64, 64), mask=Causal())
    rung = willing(name, problem)
    q, k, v = make_inputs(problem, "cuda")
    clean, _ = rung.forward(q, k, v, problem)
    v[:, :, 50] = math.inf
    out, _ = rung.forward(q, k, v, problem)
    assert torch.equal(out[:, :, :50], clean[:, :, :50])


@needs_hopper
def test_the_three_kernels_taken_apart() -> None:
    problem = problem_of((16, 16), (1024, 1024), (64, 64), 1, needs_lse=False)
    told = stages.measure(problem, 0, 0.01, 300.0)
    assert set(told["seconds"]) == set(stages.PARTS), told
    assert all(len(times) == stages.ROUNDS and min(times) > 0 for times in told["seconds"].values())
    assert [one.threads for one in ladder_report.by_row_threads(problem, told["seconds"])] == [16, 32, 256]


def test_the_command(tmp_path: Path) -> None:
    record = tmp_path / "ladder.json"
    arguments = ["ladder", "--shape", "1,4,256,64", "--repeat", "1", "--seconds", "0.005", "--json", str(record)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (climb,) = json.loads(record.read_text())["climbs"]
    verdicts = {one["candidate"]: one["verdict"] for one in climb["comparison"]["candidates"]}
    assert set(verdicts.values()) == {"verified"}, done.output


def main() -> None:
    for mask in (Full(), Causal(), Window(100, 30)):
        problem = problem_of((2, 1), (150, 200), (64, 64), 1, mask=mask)
        for rung in (lecture, three_kernel):
            rung.forward(*make_inputs(problem, "cuda"), problem)
    problem = problem_of((2, 2), (900, 300), (64, 64), 1, mask=Causal())
    three_kernel.forward(*make_inputs(problem, "cuda"), problem, three_kernel.Config(slab_mib=1, overlap=True))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
