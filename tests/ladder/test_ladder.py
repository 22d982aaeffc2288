"""The ladder: every rung against float64 wherever it can run without a GPU, its kernels built, its command run.

Numba runs in its simulator, the CUDA C++ rungs on the model of tests/emulation.py; what only a GPU can show is in
tests/gpu/test_ladder_gpu.py. The rungs that are backends have tests of their own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import documents
import numpy
import pytest
import torch
from documents import ladder as page_of
from documents.records import Checkout
from typer.testing import CliRunner

import emulation
from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, Dense, Documents, Full, Window, ladder
from tilewise.errors import CompileError, DeviceError, InvalidInput, UnsupportedProblem
from tilewise.jit import build_all, sass
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.candidates.variants import name_of, resolve
from tilewise.lab.commands.app import app
from tilewise.lab.measure import stages
from tilewise.lab.measure.compare import Outcome, Settings
from tilewise.lab.model.launched import of_variant
from tilewise.lab.studies import bench, kept, ladder_report, tune
from tilewise.lab.studies import ladder as command
from tilewise.ladder import lecture, matmul, numba, three_kernel, traffic
from tilewise.plan import BACKENDS
from tilewise.target import Target, assumed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise import Problem

ROOT = Path(__file__).resolve().parents[2]
CPU, H200 = Target.of("cpu"), Target.named("h200")
OURS = [rung.name for rung in ladder.RUNGS if rung.module]
needs_compiler = pytest.mark.skipif(emulation.COMPILER is None, reason="needs g++")


def test_every_rung_can_be_named_and_none_can_be_chosen() -> None:
    names = [rung.name for rung in ladder.RUNGS]
    assert len(names) == len(set(names))
    for rung in ladder.RUNGS:
        assert Candidate(rung.candidate).name == rung.candidate
        assert rung.lesson
    assert not set(OURS) & set(BACKENDS)
    assert not any(rung.candidate in BACKENDS for rung in ladder.RUNGS if rung.module)
    with pytest.raises(InvalidInput, match="one of math"):
        ladder.module("sideways")


def test_importing_tilewise_leaves_the_ladder_out() -> None:
    code = "import sys, tilewise; print(any(name.startswith('tilewise.ladder') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", OURS)
def test_a_rung_has_the_functions_of_a_backend_and_refuses_with_reasons(name: str) -> None:
    rung = ladder.module(name)
    problem = make_problem((1, 2, 16, 8))
    refused = [
        problem.with_(dropout=0.5),
        problem.with_(needs_grad=True),
        problem.with_(transformed=True),
        problem.with_(mask=Documents((0, 8, 16))),
        problem.with_(mask=Dense((16, 16))),
    ]
    for one in refused:
        reasons = rung.why_not(one, H200)
        assert reasons
        assert all(reason.what and reason.remedy for reason in reasons)
    assert isinstance(rung.configs(problem.with_(dtype=torch.float16), H200), list)
    assert isinstance(rung.notices(problem.with_(dtype=torch.float16), H200), list)
    with pytest.raises(UnsupportedProblem, match="forward only"):
        rung.backward(None, None, None, None, None, None, None, problem)


SHAPES: dict[str, dict[str, Any]] = {
    "square": {},
    "grouped": {"heads_kv": 2},
    "odd": {"seq_q": 37, "seq_kv": 53, "head_dim": 13, "head_dim_v": 7},
    "one query": {"seq_q": 1},
    "softcap": {"softcap": 2.0},
    "bshd": {"layout": "bshd"},
    "no keys": {"seq_kv": 0},
}
MASKS = [Full(), Causal(), Causal("bottom-right"), Window(4, 1), Window(3, 0, "bottom-right")]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_matches_float64(shape: str, mask: Any) -> None:
    problem = make_problem((2, 4, 40, 16), needs_lse=True, mask=mask, **SHAPES[shape])
    q, k, v = make_inputs(problem)
    out, lse = matmul.forward(q, k, v, problem)
    want, want_lse = exact(q, k, v, problem)
    assert_close(out, want, budget(torch.float32, problem.seq_kv))
    assert lse is not None
    assert_close(lse, want_lse, budget(torch.float32, problem.seq_kv), "lse")


@pytest.mark.slow
@pytest.mark.kernel_gate
def test_in_its_simulator_numba_matches_float64() -> None:
    if ladder.missing("numba"):
        pytest.skip("numba is not installed")
    environment = os.environ | {numba.SIMULATOR: "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    # What NumPy deprecates, it says to the simulator.
    script = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
    script += [str(ROOT / "tests" / "ladder_checks.py"), "numba"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "problems right" in done.stdout


def test_numba_compiles_its_kernel_without_a_gpu() -> None:
    """To PTX, as far as its compiler goes without a driver; in a process that does not simulate."""
    if ladder.missing("numba"):
        pytest.skip("numba is not installed")
    code = """if True:
        import numba
        from tilewise.ladder import numba as rung
        with rung._at_peace_with_numpy():
            from numba import cuda
            rung.cuda = cuda
            kernel = rung._source(numba.float32, 64, 16, 64, 64)
            ptx, _ = cuda.compile(kernel, rung._signature(numba), cc=(9, 0))
        print(ptx.count("bar.sync"), ".shared" in ptx)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), numba.SIMULATOR: "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    if "nvvm" in done.stderr.lower() or "DynamicLibNotFound" in done.stderr:
        pytest.skip("NVIDIA's NVVM is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "True"


def test_what_numpy_dropped_is_lent_to_numba_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(numpy, "row_stack", raising=False)
    with numba._at_peace_with_numpy():
        assert numpy.row_stack is numpy.vstack
    assert not hasattr(numpy, "row_stack")


def test_shared_memory_is_the_ceiling_of_the_numba_rung() -> None:
    """Tiles shrink as heads grow, until none fits 48 KB."""
    areas = []
    for dim in (32, 64, 128, 256, 512):
        problem = make_problem((1, 1, 512, dim))
        fitting = numba.configs(problem, H200)
        assert all(config.shared_bytes(dim, dim) <= 48 * 1024 for config in fitting)
        areas.append(fitting[0].block_q * fitting[0].block_kv)
    assert areas == sorted(areas, reverse=True)
    assert areas[0] > 8 * areas[-1]
    wide = make_problem((1, 1, 512, 2048))
    assert any("48 KB" in reason.what for reason in numba.why_not(wide, H200))
    assert any("twice the rows" in notice for notice in numba.notices(make_problem((1, 1, 512, 128)), H200))


@pytest.fixture
def on_the_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A call of a rung from end to end, with tensors of the CPU, which is taken for a GPU."""
    monkeypatch.setattr(three_kernel, "_CTAS_WANTED", 1)  # so that one CTA walks over all keys of its rows
    three_kernel.pipeline.cache_clear()
    with assumed(H200):
        yield monkeypatch
    three_kernel.pipeline.cache_clear()


@needs_compiler
@pytest.mark.emulated
def test_the_lecture_kernel_matches_float64_on_the_model(on_the_model: pytest.MonkeyPatch) -> None:
    emulation.install(on_the_model, lecture)
    base = make_problem((1, 2, 21, 16), needs_lse=True)
    shaped = [base, *(base.with_(**fields) for fields in SHAPES.values())]
    masked = [base.with_(seq_q=37, seq_kv=21, mask=mask) for mask in MASKS]
    for problem in [*shaped, *masked]:
        q, k, v = make_inputs(problem)
        want, want_lse = exact(q, k, v, problem)
        for config in lecture.configs(problem, H200) if problem is base else [None]:
            out, lse = lecture.forward(q, k, v, problem, config)
            assert_close(out, want, budget(torch.float32, problem.seq_kv), str(problem))
            assert lse is not None
            assert_close(lse, want_lse, budget(torch.float32, problem.seq_kv), f"{problem} lse")


@needs_compiler
@pytest.mark.emulated
def test_a_hidden_infinity_never_shows_in_the_lecture_kernel(on_the_model: pytest.MonkeyPatch) -> None:
    emulation.install(on_the_model, lecture)
    problem = make_problem((1, 1, 20, 16), mask=Causal())
    q, k, v = make_inputs(problem)
    clean, _ = lecture.forward(q, k, v, problem)
    v[:, :, 12] = math.inf
    out, _ = lecture.forward(q, k, v, problem)
    assert torch.equal(out[:, :, :12], clean[:, :, :12])
    assert not out[:, :, 12:].isfinite().any()


# Tiles small enough that a few hundred rows make many of them; the second has every ring deeper than one stage.
SMALL = three_kernel.Config(64, 64, 1, 1, 64, 64, 2, 1)
DEEP = three_kernel.Config(192, 128, 2, 1, 128, 128, 3, 1, slab_mib=1)


def three_kernel_error(problem: Problem, config: three_kernel.Config) -> None:
    q, k, v = make_inputs(problem)
    out, lse = three_kernel.forward(q, k, v, problem, config)
    want, want_lse = exact(q, k, v, problem)
    assert_close(out, want, budget(problem.dtype), str(problem))
    # Scores are rounded to 16 bits on their way through memory, and so is what the lse is made of.
    assert lse is not None
    assert_close(lse, want_lse, budget(problem.dtype), f"{problem} lse")


@needs_compiler
@pytest.mark.emulated
def test_the_three_kernels_match_float64_on_the_model(on_the_model: pytest.MonkeyPatch) -> None:
    """The real sources and the real host code; copies, products and their order are the model's."""
    emulation.install(on_the_model, three_kernel)
    base = make_problem((1, 2, 100, 64), torch.bfloat16, needs_lse=True)
    narrow = {"head_dim": 40, "head_dim_v": 24}
    shapes: list[dict[str, Any]] = [{"heads_kv": 1}, {"seq_kv": 70}, narrow, {"layout": "bshd"}]
    masks = [Causal(), Causal("bottom-right"), Window(30, 5), Window(2, 0, "bottom-right")]
    for problem in [base.with_(**fields) for fields in shapes]:
        three_kernel_error(problem, SMALL)
    for mask in masks:
        three_kernel_error(base.with_(seq_q=150, seq_kv=70, mask=mask), SMALL)
    three_kernel_error(base.with_(seq_kv=0), SMALL)
    # Ten thousand keys: more than a warp holds, so rows are streamed.
    three_kernel_error(base.with_(heads_q=1, heads_kv=1, seq_q=3, seq_kv=10000, mask=Window(9000, 500)), SMALL)


@needs_compiler
@pytest.mark.emulated
@pytest.mark.parametrize(("threads", "warps"), [(16, 4), (256, 8)])
def test_rows_of_half_a_warp_and_of_a_cta_on_the_model(
    on_the_model: pytest.MonkeyPatch, threads: int, warps: int
) -> None:
    emulation.install(on_the_model, three_kernel)
    assert (threads, warps) in three_kernel.ROW_THREADS
    config = replace(SMALL, row_threads=threads, softmax_warps=warps)
    problem = make_problem((1, 1, 75, 64), torch.bfloat16, seq_kv=300, mask=Causal(), needs_lse=True)
    three_kernel_error(problem, config)
    too_long_to_hold = 8 * threads * (three_kernel._MAX_CHUNKS + 1)
    if too_long_to_hold < 10000:
        three_kernel_error(problem.with_(seq_q=3, seq_kv=too_long_to_hold, mask=Full(), softcap=3.0), config)


@needs_compiler
@pytest.mark.emulated
def test_slabs_and_deep_rings_on_the_model(on_the_model: pytest.MonkeyPatch) -> None:
    emulation.install(on_the_model, three_kernel, seed=1)
    problem = make_problem((2, 2, 800, 64), torch.float16, seq_kv=520, mask=Causal("bottom-right"), needs_lse=True)
    problem = problem.with_(batch=1, softcap=3.0)
    assert three_kernel.launches(problem, DEEP) > 3
    three_kernel_error(problem, DEEP)


@needs_compiler
@pytest.mark.emulated
def test_rings_of_a_single_stage_turn_on_the_model(on_the_model: pytest.MonkeyPatch) -> None:
    """Nothing is loaded ahead then, and a stage must be free again before the next tile can come."""
    emulation.install(on_the_model, three_kernel)
    problem = make_problem((1, 1, 64, 64), torch.bfloat16, seq_kv=300, needs_lse=True)
    three_kernel_error(problem, replace(SMALL, scores_stages=1, values_stages=1))


_WAIT = "    ptx::mbarrier_wait(&smem.full[ring.stage], ring.phase);\n    wgmma::hold(s);"
_FREE = "      ptx::mbarrier_arrive(&smem.empty[ring.stage]);\n      ptx::tma_store_wait_read<0>();"
SPOILS = {
    "products before their tiles are there": (_WAIT, "    wgmma::hold(s);"),
    "a ring that nobody frees": (_FREE, "      ptx::tma_store_wait_read<0>();"),
}


@needs_compiler
@pytest.mark.emulated
@pytest.mark.parametrize("spoil", SPOILS)
def test_the_model_finds_what_is_wrong(spoil: str, on_the_model: pytest.MonkeyPatch) -> None:
    """A kernel that forgets to wait gives garbage there, and one that never frees a stage a deadlock."""
    emulation.install(on_the_model, three_kernel, spoil=SPOILS[spoil])
    problem = make_problem((1, 1, 64, 64), torch.bfloat16, seq_kv=200, needs_lse=True)
    with pytest.raises(AssertionError, match=r"deadlock|arrivals|nan|error|infinities"):
        three_kernel_error(problem, SMALL)


@pytest.fixture(scope="module")
def built() -> dict[Any, Any]:
    return dict(build_all([*three_kernel.all_units(), *lecture.all_units()]))


@pytest.mark.kernel_gate
def test_every_kernel_builds_without_spills_or_serialised_products(built: dict[Any, Any]) -> None:
    for unit, kernel in built.items():
        if isinstance(kernel, CompileError):
            raise AssertionError(f"{unit.label}: {kernel}")
        used = kernel.resources
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0), unit.label
        assert unit.smem_bytes + used.static_smem_bytes <= 227 * 1024
    assert {unit.arch for unit in built} == {"sm_80", "sm_90", "sm_90a"}


@pytest.mark.kernel_gate
def test_the_products_run_on_tensor_cores_and_nothing_in_local_memory(built: dict[Any, Any]) -> None:
    for unit, kernel in built.items():
        kinds = ("scores_1_128", "values_1_128", "softmax_1_4")
        if not unit.name.startswith(tuple(f"three_kernel_{kind}" for kind in kinds)):
            continue
        names = {code.split(".")[0] for code in sass.opcodes(sass.disassemble(kernel))}
        assert ("HGMMA" in names) == ("softmax" not in unit.name)
        assert not {"LDL", "STL"} & names


@pytest.mark.parametrize("dim", [64, 256])
def test_the_tiles_to_sweep_build_where_registers_are_fewest(dim: int) -> None:
    """A tile that `fits` must compile: the compiler gives up on a product that leaves a thread too few registers."""
    problem = make_problem((1, 16, 1024, dim), torch.bfloat16)
    space = three_kernel.search_space(problem, H200)
    assert len(space) == len({config.label for config in space}) > 50
    assert any(config.slab_mib for config in space)
    assert any(config.overlap for config in space)
    kernels = dict.fromkeys(stage for config in space for stage in three_kernel.stages_of(problem, config))
    products = [kernel for kernel in kernels if not isinstance(kernel, three_kernel.SoftmaxConfig)]
    products.sort(key=lambda kernel: three_kernel._registers(kernel) - three_kernel._held(kernel))
    for unit, kernel in build_all(map(three_kernel.unit, products[:8])):
        assert not isinstance(kernel, CompileError), f"{unit.label}: {kernel}"


def test_the_sweep_of_a_rung_is_a_sweep_of_tune() -> None:
    """Real kernels, a made-up clock; nothing goes into a table."""
    problem = make_problem((1, 16, 1024, 64), torch.bfloat16)
    settings = tune.Settings(max_configs=4, finalists=2, final_rounds=1)
    found = tune.sweep("ladder:three-kernel", problem, H200, lambda config, *_: [1e-4 / config.scores_rows], settings)
    assert found.complete
    assert len(found.ranked()) == 4
    assert all(len(tune.resources(found, trial)) == 3 for trial in found.trials)
    config = found.trials[0].config
    assert resolve(name_of("ladder:three-kernel", config)) == (three_kernel, config)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_what_moves_follows_from_the_tiles(mask: Any) -> None:
    problem = make_problem((1, 4, 512, 64), torch.bfloat16, mask=mask)
    moved = traffic.every(problem, H200)
    assert set(moved) == {rung.name for rung in ladder.RUNGS}
    for name in ("lecture", "triton", "sm80", "sm90"):
        assert moved[name].dram == problem.min_bytes()
        assert moved[name].sm > moved[name].dram
    assert moved["three-kernel"].dram == problem.min_bytes() + 4 * 2 * problem.pairs()
    assert moved["math"].dram > moved["matmul"].dram >= moved["three-kernel"].dram
    assert moved["lecture"].sm > moved["triton"].sm
    if mask == Full():
        scores = 4 * 512 * 512
        inputs = 4 * 4 * 512 * 64 * 2
        assert moved["matmul"].dram == inputs + 4 * 2 * scores
        rows = 512 // lecture.BLOCK
        assert moved["lecture"].sm == 2 * 4 * 512 * 64 * 2 + rows * 4 * 512 * 128 * 2


def test_the_command_on_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what can run here, and says why the rest does not."""
    for variable in (numba.SIMULATOR, "TRITON_INTERPRET"):
        monkeypatch.setenv(variable, "1")
    record = tmp_path / "ladder.json"
    arguments = ["ladder", "--shape", "1,2,20,8", "--device", "cpu", "--repeat", "1", "--seconds", "0.001"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(record)])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines() if line}
    for name in ("math", "tiled", "matmul"):
        assert "verified" in done.output.split(f"\n{name} ")[1].splitlines()[0]
    assert "sm80 refuses: not built" in done.output or "sm80" in BACKENDS
    assert "lecture refuses: the device, cpu, is no GPU" in done.output
    assert lines["sm90"].startswith("sm90 refuses: ")
    stored = json.loads(record.read_text())
    assert stored["kind"] == command.KIND
    (climb,) = stored["climbs"]
    assert set(climb["traffic"]) == {rung.name for rung in ladder.RUNGS}
    assert climb["parts"] == {}


def test_the_page_is_that_of_the_formulas_and_the_newest_records() -> None:
    """Run `make docs` if this fails."""
    own = {ROOT / path for path in (page_of.PAGE, page_of.PICTURE, page_of.SPEEDS)}
    pages = [page for page in documents.pages(ROOT) if page.path in own]
    assert len(pages) >= 2
    assert [page.path.name for page in pages if page.stale] == []


def test_figures_come_from_a_record_and_from_nowhere_else(tmp_path: Path) -> None:
    """A record of a GPU fills the tables in; without one they say that nothing was measured."""
    views = ("speeds", "figures", "parts", "row-threads", "counted", "sweep")
    text = "".join(f"<!-- ladder {view} -->\n<!-- /ladder -->\n" for view in views)
    assert rewritten(text, tmp_path).count("Not measured yet") == 6
    problem = make_problem((1, 16, 1024, 64), torch.bfloat16)
    outcomes = [
        Outcome("ladder:matmul", "verified", forward=[[4e-4]] * 5, memory=1 << 20, errors={"out": {"norm": 1e-3}}),
        Outcome("ladder:three-kernel", "verified", forward=[[2e-4]] * 5),
        Outcome("triton", "died: SIGSEGV"),
    ]
    for outcome in outcomes[:2]:
        outcome.kernels = of_variant(outcome.candidate, problem, H200)
    comparison = command.Comparison(command.Row("row", problem, (), "cuda"), outcomes)
    kernels = [of_variant("ladder:three-kernel", problem, H200)]
    parts = {"seconds": dict.fromkeys(stages.PARTS, [1e-5] * stages.ROUNDS), "kernels": kernels}
    ran = {outcome.candidate for outcome in outcomes}
    refused = {rung.name: ["no <GPU>"] for rung in ladder.RUNGS if rung.candidate not in ran}
    counted = {"matmul": {"dram": 5e6, "l2": 7e6}, "triton": {"error": "no counters"}}
    climb = command.Climb(problem, "cuda", comparison, traffic.every(problem, H200), refused, parts, counted)
    record = command.record([climb], Settings(), ["tilewise", "ladder"])
    record["provenance"]["gpus"] = [{"name": "NVIDIA H200"}]
    path = kept.save(record, tmp_path / bench.RESULTS)
    written = rewritten(text, tmp_path)
    assert written.count("Not measured yet") == 1
    assert path.name in written
    assert "| `matmul` | 0.400 |" in written
    assert "| 1.0e-03 ok |" in written, "an error says whether it is in its budget"
    assert "**died: SIGSEGV**" in written
    assert "no &lt;GPU&gt;" in written
    assert "| 2.00x |" in written
    assert "| 5 |" in written
    assert "| 1 x 16 x 1024 x 64 | 256 | 10.0 | 0.625 | ~1.00x [0.99, 1.01] | 1.71 |" in written
    assert "where the study has 1.65 on an H100" in written
    assert rewritten(written, tmp_path) == written
    # A newer record without the counters and without the parts leaves these views to the older one.
    climb.parts, climb.counted = {}, {}
    newer = command.record([climb], Settings(), ["tilewise", "ladder"])
    newer["provenance"] |= {"date": "9999-01-01T00:00:00+00:00", "gpus": record["provenance"]["gpus"]}
    later = kept.save(newer, tmp_path / bench.RESULTS)
    both = rewritten(text, tmp_path)
    assert both.count("Not measured yet") == 1
    assert (both.count(f"[{later.name}]"), both.count(f"[{path.name}]")) == (1, 3)
    later.unlink()
    assert documents.write(tmp_path) == []  # no such page there
    page = tmp_path / page_of.PAGE
    page.parent.mkdir(parents=True)
    page.write_text(text)
    assert set(documents.write(tmp_path)) == {page, *(tmp_path / one for one in (page_of.PICTURE, page_of.SPEEDS))}
    assert page.read_text() == written
    assert (tmp_path / page_of.SPEEDS).read_text().count('height="10"') == 2  # rungs that have a time
    assert documents.stale(tmp_path) == []


def rewritten(text: str, root: Path) -> str:
    """The text of docs/ladder.md with its blocks from the records of a folder."""
    return documents.rewrite(text, Checkout(root), root / page_of.PAGE)


def test_one_rungs_failure_under_ncu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one process; if that fails, one by one; and no more than once where it is ncu that fails."""
    asked: list[list[str]] = []
    broken: set[str] = {"b"}

    def run(jobs: list[Any], options: list[str], time_limit: float) -> list[Any]:
        asked.append([job["candidate"] for job in jobs])
        if broken & set(asked[-1]):
            raise DeviceError("ncu says no\n  What to do: nothing")
        return [[{"dram__bytes.sum": "1,000", "lts__t_bytes.sum": "3000"}] * 2 for _ in jobs]

    monkeypatch.setattr(command.ncu, "run", run)
    jobs = [{"candidate": name} for name in "abc"]
    counted, failed = {"dram": 2000.0, "l2": 6000.0, "kernels": 2}, {"error": "ncu says no"}
    assert command.count(jobs, 1.0) == [counted, failed, counted]
    assert asked == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    asked.clear()
    broken.add("a")
    assert command.count(jobs, 1.0) == [failed] * 3
    assert asked == [["a", "b", "c"], ["a"]]
    broken.clear()
    assert command.count(jobs, 1.0) == [counted] * 3
    monkeypatch.setattr(command.ncu, "run", lambda jobs, *_: [[] for _ in jobs])
    assert "error" in command.count(jobs[:1], 1.0)[0]


def test_parts_that_cannot_be_measured_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((1, 2, 64, 64), torch.bfloat16)
    told = stages.measure(problem, 0, 0.001, 120.0)
    assert "error" in told or torch.cuda.is_available()
    comparison = command.Comparison(command.Row("row", problem, ()), [])
    every = {rung.name: ["no"] for rung in ladder.RUNGS}
    climb = command.Climb(problem, "cpu", comparison, traffic.every(problem, H200), every, {"error": "died"})
    assert ladder_report.part_lines(climb, H200) == ["three-kernel, in parts: died"]


def test_an_interrupt_after_the_climbs_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((1, 2, 64, 64), torch.bfloat16)
    monkeypatch.setattr(
        command, "compare", lambda row, *_: command.Comparison(row, [Outcome(name) for name in row.candidates])
    )

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.stages, "measure", interrupted)
    with assumed(H200, "cuda"):  # the whole command, as on a machine with that GPU
        (climb,) = command.run([problem], "cuda", Settings())
    assert not climb.comparison.complete
    assert climb.comparison.outcomes
    assert not command.record([climb], Settings(), [])["complete"]


def test_parts_are_timed_in_paired_rounds_and_once_under_two_names() -> None:
    calls: list[str] = []
    one, other = (stages._Timed(partial(calls.append, name), "host") for name in ("one", "other"))
    found = stages.time_rounds({"a": one, "b": other, "a again": one}, 1e-4, 0)
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(("a", "b", "a again"), stages.ROUNDS)
    assert found["a"] == found["a again"]
    turns = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert len(turns) > stages.ROUNDS, "one after the other in every round, not all of one first"


def test_row_threads_stand_beside_the_study_where_the_problem_is_its_own() -> None:
    """Slower beyond the noise is told, and the study's figure only for the problem that it measured."""
    problem = make_problem((1, 16, 1024, 64), torch.bfloat16)
    seconds = dict.fromkeys(stages.PARTS, [32e-6] * stages.ROUNDS)
    seconds |= {stages.whole_name(16): [48e-6] * stages.ROUNDS, stages.NOTHING: [4e-6] * stages.ROUNDS}
    lean, usual, wide = ladder_report.by_row_threads(problem, seconds)
    assert [one.threads for one in (lean, usual, wide)] == list(ladder_report.STUDY)
    assert (lean.head_us, lean.speed and lean.speed.verdict, lean.study_us) == (3.0, "slower", 1.84)
    assert (usual.speed, usual.study_us) == (None, 1.65)
    assert wide.speed is not None
    assert wide.speed.verdict == "indistinguishable"
    told = ladder_report.headline(problem, seconds, H200)
    assert told is not None
    assert "2.00 as a CUDA graph" in told
    assert "1.65 on an H100" in told
    assert "launching alone is 0.250" in told
    assert "1.86 at the DRAM's peak" in told
    longer = make_problem((1, 16, 2048, 64), torch.bfloat16)
    assert ladder_report.headline(longer, seconds, H200) is None
    assert {one.study_us for one in ladder_report.by_row_threads(longer, seconds)} == {None}
    assert ladder_report.by_row_threads(problem, {stages.WHOLE: [1e-5]}) == []  # an older record
    comparison = command.Comparison(command.Row("row", problem, ()), [])
    every = {rung.name: ["no"] for rung in ladder.RUNGS}
    parts = {"seconds": seconds, "config": "tiles"}
    climb = command.Climb(problem, "cuda", comparison, traffic.every(problem, H200), every, parts)
    lines = ladder_report.part_lines(climb, H200)
    assert told in lines
    assert (
        "softmax with 16 threads per row: 32.0 us alone; all three 3.00 us per head, 0.67x [0.66, 0.67] against 32"
        in (lines[3])
    )
    assert lines[3].endswith("the study has 1.84")


def test_quietly_a_sentence_per_problem() -> None:
    problem = make_problem((1, 2, 64, 64), torch.bfloat16)
    outcomes = [
        Outcome("torch-math", "verified", forward=[[4e-4]] * 7),
        Outcome("ladder:matmul", "verified", forward=[[1e-4]] * 7),
        Outcome("triton", "wrong"),
    ]
    refused = {rung.name: ["no"] for rung in ladder.RUNGS if rung.name not in ("math", "matmul", "triton")}
    row = command.Row("row", problem, tuple(outcome.candidate for outcome in outcomes), "cuda")
    climb = command.Climb(problem, "cuda", command.Comparison(row, outcomes), traffic.every(problem, H200), refused)
    told = ladder_report.sentence(climb)
    assert "2 of 3 rungs verified; matmul is 4.00x faster than math: 100 us against 400 us (3.96x to 4.04x)." in told
    climb.device = "cpu"
    assert ladder_report.sentence(climb).endswith("2 of 3 rungs verified."), "times of simulators are not compared"
