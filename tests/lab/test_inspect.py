"""inspect: who runs, what is seen of the kernels, how near they come to the ceilings, and what is said of the rest."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_docs import made_up
from test_lab import CANDIDATES, FakePool
from typer.testing import CliRunner

from support import make_problem
from tilewise import masks
from tilewise.errors import DeviceError, InvalidInput
from tilewise.lab import report
from tilewise.lab.candidates import flags, inputs, override, rivals
from tilewise.lab.candidates.names import Candidate, make_inputs
from tilewise.lab.commands.app import app
from tilewise.lab.measure import ncu, profile
from tilewise.lab.measure.compare import VERIFIED, WRONG, Comparison, Outcome, Row, Settings, compare
from tilewise.lab.measure.worker import Worker
from tilewise.lab.model import kernels, roofline
from tilewise.lab.render import inspect_report, pages
from tilewise.lab.studies import cycles, elsewhere, inspect, kept, records, suites, switches
from tilewise.plan import BACKENDS, plan
from tilewise.target import TARGETS, Target

if TYPE_CHECKING:
    from pathlib import Path

H200 = Target.named("h200")


def text_of(told: dict[str, Any], **looks: bool) -> list[str]:
    return report.lines(inspect_report.report_of(told), **looks)


def run(command: str, *more: str) -> Any:
    return CliRunner().invoke(app, [*command.split(), *more])


# --- from end to end -------------------------------------------------------------------------------------------------


def test_inspect_runs_on_past_the_dead_and_the_wrong(tmp_path: Path) -> None:
    path = tmp_path / "candidates.py"
    path.write_text(CANDIDATES)
    extra = [argument for name in ("illegal", "wrong") for argument in ("--candidate", f"{path}:{name}")]
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    result = run(
        "inspect --shape 2,4,64,32 --dtype float32 --device cpu --repeat 2 --grad --json",
        *extra, "--html", str(page), "--trace", str(trace),
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    rows = {row["candidate"].rpartition(":")[2]: row for row in told["comparison"]["candidates"]}
    assert {"tilewise", "tiled", "reference", "torch-default", "torch-flash", "torch-math"} <= set(rows)
    assert rows["illegal"]["verdict"] == "died: SIGILL"
    assert "ONEDNN_MAX_CPU_ISA" in rows["illegal"]["because"][0]
    assert rows["wrong"]["verdict"] == WRONG
    assert rows["wrong"]["forward"] == []
    for name in set(rows) - {"illegal", "wrong"}:
        assert rows[name]["verdict"] == VERIFIED, rows[name]
        assert set(rows[name]["errors"]) >= {"out", "dq", "dk", "dv"}
        assert len(rows[name]["forward"]) == len(rows[name]["backward"]) == 2
        assert rows[name]["ratio"] > 0
        assert rows[name]["memory"] >= 0
    assert told["comparison"]["best_peer"] in ("torch-default", "torch-flash", "torch-math")
    assert told["provenance"]["seed"] == 0
    # every candidate that exists is a row or has reasons
    named = {row["candidate"] for row in told["comparison"]["candidates"]} | set(told["refused"])
    assert named >= {*rivals.RIVALS, "torch-flash", "torch-efficient", "torch-cudnn", "torch-math", "torch-default"}
    assert named >= {name for name in BACKENDS if not name.startswith("torch-")} - {told["plan"]["backend"]}
    assert all(told["refused"].values())
    # what ran
    assert told["torch"]["choice"] == "flash"
    assert told["torch"]["priority"] == ["torch-flash", "torch-math"]
    # what ran the same kernels is one entry
    assert rows["torch-flash"]["same_as"] == "torch-default" or rows["torch-default"]["same_as"] == "tilewise"
    assert rows["torch-flash"]["speed_default"]["verdict"] == "same kernels"
    launches = told["profiles"]["torch-default"]["forward"]["launches"]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in [launch["name"] for launch in launches]
    assert "for_cpu_backward" in str(told["profiles"]["torch-default"]["backward"]["launches"])
    assert told["torch"]["says"]["torch-flash"] == []
    assert told["torch"]["says"]["torch-cudnn"] != []
    # how near to the ceilings
    assert told["rates"]["source"].startswith("measured here")
    share = told["shares"]["tilewise"]["backward"]  # none where something else ran while the peaks were measured
    over = any("faster than the peaks measured here" in text for text in told["comparison"]["noise"])
    assert over if share is None else 0 < share["compute"] <= 1
    assert json.loads(trace.read_text())["traceEvents"]
    assert "host_name" not in json.loads(trace.read_text())
    assert trace.with_suffix(".backward.json").is_file()
    assert "died: SIGILL" in page.read_text()


def test_tensors_of_a_model_are_inspected_as_they_are(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 24, 2, 16).transpose(1, 2) for _ in range(3))
    path = tmp_path / "tensors.pt"
    torch.save({"q": q, "k": k, "v": v, "is_causal": True, "scale": 0.5}, path)
    problem = inputs.problem_of(str(path), needs_grad=True)
    assert (problem.seq_q, str(problem.mask), problem.scale, problem.needs_grad) == (24, "causal", 0.5, True)
    given = make_inputs(problem, 0, "cpu", str(path))
    assert torch.equal(given.q, q)
    assert given.q.stride() == q.stride()
    result = run("inspect --device cpu --repeat 1 --only tilewise --only tiled --json", "--tensors", str(path))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["candidate"] for row in told["comparison"]["candidates"]] == ["tilewise", "tiled"]
    assert {row["verdict"] for row in told["comparison"]["candidates"]} == {VERIFIED}
    mask = torch.randn(1, 1, 24, 24)
    torch.save({"q": q, "k": k, "v": v, "attn_mask": mask}, path)
    dense = inputs.problem_of(str(path), needs_grad=False)
    assert str(dense.mask) == "dense:additive:1x1x24x24:paired"
    bias = make_inputs(dense, 0, "cpu", str(path)).bias
    assert bias is not None
    assert torch.equal(bias, mask)


@pytest.mark.parametrize("saved", [{"q": 1}, [1, 2], "text", {"q": 1, "k": 2, "v": 3, "w": 4}])
def test_files_that_hold_no_attention_are_refused(saved: object, tmp_path: Path) -> None:
    path = tmp_path / "tensors.pt"
    torch.save(saved, path)
    for given in (str(path), str(tmp_path / "missing.pt")):
        result = run("inspect --device cpu", "--tensors", given)
        assert result.exit_code == 2
        assert "--tensors" in result.stderr


def test_an_interrupt_while_kernels_are_looked_at_keeps_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FakePool):
        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
            if do == "profile":
                raise KeyboardInterrupt
            if do == "rates":
                return {"flops": 1e9, "bytes": 1e9, "exponentials": 1e9, "source": "x"}
            return super().ask(name, do, limit, **arguments)

    monkeypatch.setattr(inspect, "Pool", lambda: Interrupted({}))
    found = inspect.inspect(make_problem((1, 2, 16, 8)), "cpu", Settings(rounds=2), only=("tilewise", "torch-default"))
    assert not found.comparison.complete
    assert len(found.comparison["tilewise"].forward) == 2


def test_inspect_shows_every_candidate_and_every_refusal() -> None:
    problem = make_problem((2, 8, 64, 64), softcap=2.0)
    chosen = plan(problem, Target.named("cpu"))
    names, left_out = inspect.candidates(chosen, "cpu")
    pool = FakePool({chosen.backend: 0.002}, {("tilewise", "time"): "no answer in 30 s"})
    shown = inspect.Inspection(chosen, compare(Row("inspect", problem, names), pool, Settings()), left_out=left_out)  # type: ignore[arg-type]
    told = shown.to_dict()
    text = "\n".join(text_of(told, verbose=True))
    assert shown.failed
    assert f"tilewise={chosen.backend}" in text
    assert "no answer in 30 s; try another" in text
    on_gpus = set(told["gpu_only"])
    assert {"sm80", "sm90", "torch-cudnn", "fa3"} <= on_gpus
    assert f"made for GPUs: {', '.join(told['gpu_only'])}" in text
    for verdict in chosen.verdicts:
        said = verdict.willing or verdict.backend in on_gpus
        assert said or all(part in text for reason in verdict.reasons for part in (reason.what, reason.remedy))
    assert "torch-default" in text.partition("Refused:")[2].partition("Choices:")[0]
    assert "\x1b" not in text


def test_the_sentence_says_what_the_default_loses() -> None:
    problem = make_problem((1, 2, 16, 8))
    chosen = plan(problem, Target.named("cpu"))
    row = Row("inspect", problem, ("tilewise", "torch-default"))
    slow = inspect.Inspection(chosen, compare(row, FakePool({"tilewise": 0.01, "torch-default": 0.03}), Settings()))  # type: ignore[arg-type]
    slow.profiles["torch-default"] = {"forward": {"launches": [], "ops": [{"op": "x", "backend": "math"}]}}
    assert "is 3.00x faster than PyTorch's default (torch-math): 11.0 ms against 33.0 ms (2.97x to 3.03x)." in (
        slow.sentence()
    )
    shown = slow.to_dict()
    assert shown["sentence"] == slow.sentence()


def sentence_of(pool: FakePool, *names: str, rounds: int = 7) -> str:
    problem = make_problem((1, 2, 16, 8))
    row = Row("inspect", problem, names)
    found = compare(row, pool, Settings(rounds=rounds))  # type: ignore[arg-type]
    return inspect.sentence(found, "tiled", "torch-flash")


def test_the_sentence_claims_nothing_that_noise_could_say() -> None:
    even = sentence_of(FakePool({"tilewise": 0.01004}), "tilewise", "torch-default")
    assert even.startswith(
        "tilewise (tiled) is indistinguishable from PyTorch's default (torch-flash): 11.0 ms against"
    )
    few = sentence_of(FakePool({"torch-default": 0.05}), "tilewise", "torch-default", rounds=3)
    assert few.endswith("3 rounds are too few to compare.")
    same = FakePool({"tilewise": 0.01, "torch-default": 0.33})  # 33 times, and the very same kernel
    same.runs = {"tilewise": "torch-flash", "torch-default": "torch-flash"}
    assert sentence_of(same, "tilewise", "torch-default") == (
        "tilewise runs tiled, as PyTorch's default does: 11.0 ms."
    )


def test_the_fastest_of_all_is_named_if_it_is_another() -> None:
    names = ("tilewise", "torch-default", "torch-math", "reference")
    faster = sentence_of(FakePool({"reference": 0.005}), *names)
    assert faster.endswith("The fastest is reference, 5.50 ms: 2.00x faster than that (1.98x to 2.02x).")
    assert "fastest" not in sentence_of(FakePool({"reference": 0.00995}), *names)
    one = FakePool({"torch-flash": 0.005})
    one.runs = {"torch-default": "torch-flash", "torch-flash": "torch-flash"}
    assert "fastest" not in sentence_of(one, "tilewise", "torch-default", "torch-flash"), "the default is that kernel"


def test_the_outcome_comes_first_and_fits_80_columns() -> None:
    problem = make_problem((2, 8, 512, 64), torch.bfloat16, needs_grad=True)
    chosen = plan(problem, Target.named("cpu"))
    names = ("tilewise", "tiled", "torch-default", "torch-efficient", "python:/a/long/way/to/kernels.py:my_attention")
    pool = FakePool({"torch-default": 0.0123})
    found = inspect.Inspection(chosen, compare(Row("inspect", problem, names), pool, Settings()))  # type: ignore[arg-type]
    found.comparison.noise = ["the machine is busy"]
    first, second, *rest = text_of(found.to_dict())
    assert first == found.sentence()
    assert second == "Noisy: the machine is busy"
    head = next(index for index, line in enumerate(rest) if line.startswith("candidate "))
    table = rest[head : head + 1 + len(names)]
    assert all(len(line) <= 80 for line in table), table
    assert any(line.endswith("1.0e-7 ok") for line in table)
    assert any(line.startswith("tiled ") and line.endswith("over") for line in table), "tiled is wrong in this pool"
    assert text_of(found.to_dict(), quiet=True) == [first, second]


def test_a_share_over_the_peak_is_not_shown() -> None:
    problem = make_problem((1, 2, 16, 8))
    chosen = plan(problem, Target.named("cpu"))
    found = inspect.Inspection(chosen, compare(Row("inspect", problem, ("tilewise",)), FakePool({}), Settings()))  # type: ignore[arg-type]
    found.rates = roofline.Rates(1.0, 1.0, 1.0, "measured here")
    assert found.passes_a_ceiling()
    assert found.shares(found.comparison.outcomes[0], "forward") is None
    found.rates = roofline.Rates(1e12, 1e12, 1e12, "measured here")
    assert not found.passes_a_ceiling()
    assert found.shares(found.comparison.outcomes[0], "forward") is not None


def test_the_effective_order_is_what_the_dispatcher_does() -> None:
    q = torch.randn(1, 2, 16, 8)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    assert override.effective_order((q, q, q, None, 0.0, False, None, False)) == ["torch-flash", "torch-math"]
    assert override.effective_order((q, q, q, None, 0.5, False, None, False)) == ["torch-math"]
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    problem = make_problem((1, 2, 16, 8))
    row = Row("inspect", problem, ("tilewise",))
    found = inspect.Inspection(plan(problem, Target.named("cpu")), compare(row, FakePool({}), Settings()))  # type: ignore[arg-type]
    told = found.to_dict()
    told["torch"] |= {"priority": ["torch-cudnn", "torch-flash"], "choice": "cudnn"}
    shown = text_of(told, verbose=True)
    assert any(re.fullmatch("PyTorch's order: +torch-cudnn > torch-flash", line) for line in shown)
    told["torch"]["priority"] = ["flash_attention", "cudnn_attention"]  # a record of the settings' order
    shown = text_of(told, verbose=True)
    assert any(line.startswith("PyTorch's default ran:") and line.endswith("torch-cudnn") for line in shown)
    assert not any(line.startswith("PyTorch's order:") for line in shown)


def test_a_record_is_shown_again(tmp_path: Path) -> None:
    record, page = tmp_path / "inspect.json", tmp_path / "page.html"
    quick = "inspect --shape 1,2,16,8 --dtype float32 --device cpu --repeat 5 --only tilewise --only torch-default"
    first = run(quick, "--json", str(record), "--save", "--results", str(tmp_path / "results"))
    assert first.exit_code == 0, first.output
    (saved,) = (tmp_path / "results").glob("*.json")
    assert saved.name.endswith("Z-inspect-1x2x16x8.json")
    whole = json.loads(record.read_text())
    assert saved.read_text() == kept.compact(whole)
    assert kept.expanded(kept.read(saved)).keys() == whole.keys()
    assert "undecided" in whole["comparison"]
    assert "undecided" not in kept.read(saved)["comparison"]
    again = run("inspect", "--record", str(record), "--html", str(page))
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
    assert "tilewise" in page.read_text()
    assert run("inspect", "--record", str(record), "--html", "-").stdout == page.read_text()
    assert run("inspect", "--record", str(saved)).stdout.splitlines()[0] == first.stdout.splitlines()[0]
    wrong = tmp_path / "bench.json"
    wrong.write_text('{"kind": "tilewise bench"}')
    assert run("inspect", "--record", str(wrong)).exit_code == 2


def test_a_cpu_ends_with_what_an_h200_would_run(tmp_path: Path) -> None:
    problem = make_problem((1, 2, 64, 64), torch.float32, mask=masks.Window(8, 0))
    chosen = plan(problem, Target.named("cpu"))
    row = Row("inspect", problem, ("tilewise", "torch-default"))
    found = inspect.Inspection(chosen, compare(row, FakePool({"torch-default": 0.03}), Settings()))  # type: ignore[arg-type]
    told = found.to_dict()
    brief = "\n".join(text_of(told))
    assert "(tiled) is 3.00x faster than PyTorch's default" in brief
    told["elsewhere"] = elsewhere.elsewhere(problem, tmp_path)
    assert "recorded" not in told["elsewhere"], "an installed package has no records"
    kept.write(made_up("drawn"), tmp_path / "drawn.json")
    told["elsewhere"] = elsewhere.elsewhere(problem, tmp_path)
    text = "\n".join(text_of(told))
    assert text.startswith(brief)
    ending = text.removeprefix(brief)
    assert "On an NVIDIA H200:\nit would run:  sm90" in ending
    assert f"configuration: {plan(problem, H200).config}" in ending
    assert "the nearest problem on record" in ending
    recorded = told["elsewhere"]["recorded"]
    assert recorded["record"] in ending
    assert recorded["what"] == "forward"
    assert recorded["problem"] in pages.page(told)


def test_a_recorded_problem_is_its_own_nearest(tmp_path: Path) -> None:
    kept.write(made_up("backward"), tmp_path / "backward.json")
    newest = records.newest(records.read_all(tmp_path), "backward", "H200")
    assert newest is not None
    held = next(one for one in newest.comparisons if one.row.timed == ("backward",) and one.best_rival())
    rival = held.best_rival()
    assert rival is not None
    recorded = elsewhere.elsewhere(held.row.problem, tmp_path)["recorded"]
    assert (recorded["same"], recorded["what"], recorded["problem"]) == (True, *held.row.timed, str(held.row.problem))
    assert rival.candidate in recorded["speeds"]
    assert set(recorded["seconds"]) == {held.outcomes[0].candidate, *recorded["speeds"]}


def test_a_model_that_disagrees_with_pytorch_is_told() -> None:
    problem = make_problem((1, 2, 16, 8))
    chosen = plan(problem, Target.named("cpu"))
    found = inspect.Inspection(chosen, compare(Row("inspect", problem, ("tilewise",)), FakePool({}), Settings()))  # type: ignore[arg-type]
    found.torch_says = {"torch-flash": ["too flat"], "torch-math": [], "torch-cudnn": []}
    assert set(found.disagreements()) == {"torch-flash", "torch-cudnn"}
    told = found.to_dict()
    shown = "\n".join(text_of(told)).partition("Our model and PyTorch disagree:")[2]
    assert re.search(r"torch-flash +takes it +too flat", shown)


# --- without a GPU ---------------------------------------------------------------------------------------------------


def test_static_needs_no_gpu() -> None:
    arguments = "inspect --shape 1,32,8192,128 --mask causal --static --target h200"
    told = json.loads(run(f"{arguments} --json").stdout)
    assert told["plan"]["backend"] == "sm90"
    (built, *_) = told["kernels"]
    assert built["spill_bytes"] == 0
    assert built["registers"] > 0
    assert built["occupancy"]["blocks_per_sm"] >= 1
    assert built["instructions"]["matrix products"] > 0
    assert built["instructions"].get("local memory (spills)", 0) == 0
    assert told["roofline"]["forward"]["compute"] == pytest.approx(550e9 / 989.5e12, rel=0.01)
    text = run(arguments).stdout
    assert "bound by compute" in text
    assert "instructions, by kind" in text
    other = run("inspect --shape 1,8,64,64 --dtype float64 --static --target t4")
    assert other.exit_code == 0
    assert "no kernel of ours" in other.stdout


@pytest.mark.parametrize(
    ("arguments", "arch"),
    [
        ("--dtype bf16 --target a100 --backend sm80", "sm_80"),
        ("--dtype float32 --target rtx-4090 --backend sm80", "sm_89"),
        ("--dtype float32 --target h200", "sm_90a"),
    ],
)
def test_static_builds_for_the_target_in_both_directions(arguments: str, arch: str) -> None:
    told = json.loads(run(f"inspect --shape 1,8,1024,64 --static --grad --json {arguments}").stdout)
    assert {built["arch"] for built in told["kernels"]} == {arch}
    assert any("backward" in built["kernel"] for built in told["kernels"])
    assert any("preprocess" in built["kernel"] for built in told["kernels"]), "a backward is more than its main kernel"
    assert all(built["spill_bytes"] == 0 and built["registers"] > 0 for built in told["kernels"])


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "threads", "registers", "smem", "blocks", "limiter"),
    [
        ("h200", 384, 168, 197_000, 1, "registers"),  # warp-specialised: registers and shared memory both allow one
        ("a100", 128, 64, 0, 8, "registers"),
        ("a100", 128, 32, 0, 16, "registers"),
        ("a100", 1024, 32, 0, 2, "registers"),
        ("a100", 32, 16, 0, 32, "blocks"),
        ("rtx-a6000", 128, 32, 49_152, 2, "shared memory"),
        ("rtx-a6000", 128, 40, 0, 12, "registers"),
        ("rtx-a6000", 256, 24, 0, 6, "warps"),
        ("h200", 128, 32, 113_000, 2, "shared memory"),
        ("b200", 256, 24, 0, 8, "warps"),
        ("b200", 128, 32, 113_000, 2, "shared memory"),
        ("rtx-5090", 256, 24, 0, 6, "warps"),
        ("rtx-5090", 32, 16, 0, 24, "blocks"),
    ],
)
def test_occupancy_is_that_of_the_calculator(
    target: str, threads: int, registers: int, smem: int, blocks: int, limiter: str
) -> None:
    found = kernels.occupancy((8000, 1, 1), (threads, 1, 1), registers, smem, Target.named(target))
    assert found is not None
    assert (found.blocks_per_sm, found.limiter) == (blocks, limiter)
    assert found.warps_per_sm == blocks * threads // 32


def test_every_gpu_that_is_known_by_name_has_an_occupancy() -> None:
    for target in TARGETS.values():
        assert target.is_cpu or kernels.occupancy((4000,), (128,), 64, 0, target) is not None, target.name


@pytest.mark.parametrize("target", ["b200", "l4"])
def test_static_tells_the_waves_of_the_real_grid(target: str) -> None:
    """1024 blocks, two on each multiprocessor: several waves."""
    result = run(f"inspect --shape 1,32,4096,128 --static --target {target} --backend sm80")
    assert result.exit_code == 0, result.output
    sms = Target.named(target).sms
    assert f"(2 blocks per SM, limited by registers), {1024 / (2 * sms):.2f} waves" in result.stdout
    assert "does not fill" not in result.stdout


def test_what_the_profiler_cannot_tell_is_not_shown() -> None:
    launch = {"name": "k", "grid": [1], "block": [1], "us": 2.0, "count": 1, "smem_bytes": 0, "registers": 32,
              "start_us": 0.0}  # fmt: skip
    for estimate, columns in ((19, [">profiler's occupancy"]), (0, [])):
        table = inspect_report._kernel_table([launch | {"estimated_occupancy": estimate}], summed=False)
        assert isinstance(table, report.Table)
        assert [name for name in table.shown().columns if "profiler" in name] == columns


def test_waves_and_their_tail() -> None:
    one = kernels.occupancy((198,), (384,), 168, 197_000, H200)
    assert one is not None
    assert (one.waves, one.tail) == (pytest.approx(1.5), pytest.approx(0.5))
    few = kernels.occupancy((66,), (384,), 168, 197_000, H200)
    assert few is not None
    assert "does not fill the GPU" in few.limiter
    assert kernels.occupancy((1,), (1024,), 255, 0, H200) is None  # too many registers for a block to start
    assert kernels.occupancy((1,), (128,), 32, 0, Target.named("cpu")) is None


def test_our_kernels_are_known_by_the_names_profilers_show() -> None:
    units = kernels.our_units()
    name = next(iter(units))
    assert kernels.find_unit(name, units) is units[name]
    assert kernels.find_unit(f"{name}(tilewise::sm90::Params)", units) is units[name]
    assert kernels.find_unit("cudnn_generated_fort_native_sdpa", units) is None


def test_the_instruction_mix_names_what_matters() -> None:
    sass = "\n".join(
        f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(
            ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]", "@!P0 MUFU.EX2 R1, R2", "FFMA R1, R2, R3, R4", "STL [R1], R2",
             "LDS.128 R4, [R8]", "IADD3 R1, R2, R3, RZ", "UTMALDG.4D [UR8], [UR4]")
        )
    )  # fmt: skip
    mix = kernels.instruction_mix(sass)
    assert mix["matrix products"] == mix["local memory (spills)"] == mix["copies by the copy engine"] == 1
    assert (
        mix["exponentials and other special functions"] == mix["shared memory"] == mix["predicates and integers"] == 1
    )


# --- ceilings --------------------------------------------------------------------------------------------------------


def test_ceilings_follow_from_the_data_sheet() -> None:
    problem = make_problem((1, 16, 4096, 64), torch.bfloat16)
    rates = roofline.rates_of(H200, torch.bfloat16)
    found = roofline.bounds(problem, rates, "forward")
    assert found is not None
    assert found.compute == pytest.approx(4 * 16 * 4096**2 * 64 / 989.5e12)
    assert found.memory == pytest.approx(4 * 16 * 4096 * 64 * 2 / 4.8e12)
    assert found.exponentials == pytest.approx(16 * 4096**2 / (132 * 16 * 1.98e9))
    assert found.by == "compute"
    assert roofline.shares(problem, rates, "forward", 2 * found.compute)["compute"] == pytest.approx(0.5)  # type: ignore[index]
    step = roofline.work(problem, "step")
    assert step.flops == 3.5 * problem.flops()
    assert step.exponentials == 2 * problem.pairs()
    assert roofline.rates_of(Target.named("cpu"), torch.float32) is None
    assert roofline.bounds(problem, None, "forward") is None


def test_a_cpus_ceilings_are_measured() -> None:
    found = roofline.measured_rates()
    assert min(found.flops, found.bytes, found.exponentials) > 1e6


# --- what ran --------------------------------------------------------------------------------------------------------


def span(name: str, cat: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
    return {"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_a_trace_of_cuda_tells_kernels_in_order() -> None:
    sizes = {"grid": [132, 1, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 231_424,
             "est. achieved occupancy %": 19}  # fmt: skip
    events = [
        {"name": "process_name", "ph": "M"},
        span("aten::_scaled_dot_product_cudnn_attention", "cpu_op", 0, 30),
        span("aten::_scaled_dot_product_cudnn_attention_backward", "cpu_op", 40, 3),
        span("combine", "kernel", 120, 5, **sizes),
        span("cudnn_sdpa_fprop", "kernel", 100, 12, **sizes),
        span("Memset (Device)", "gpu_memset", 90, 1),
        span("cudaLaunchKernel", "cuda_runtime", 80, 4),
    ]
    told = profile.read(events, on_gpu=True)
    assert set(told["gaps"]) == {"launches", "busy_us", "idle_us", "host_us"}
    assert [launch["name"] for launch in told["launches"]] == ["Memset (Device)", "cudnn_sdpa_fprop", "combine"]
    kernel = told["launches"][1]
    assert (kernel["start_us"], kernel["us"], kernel["registers"], kernel["smem_bytes"]) == (10, 12, 168, 231_424)
    assert kernel["estimated_occupancy"] == 19
    assert told["ops"] == [{"op": "aten::_scaled_dot_product_cudnn_attention", "backend": "cudnn"}]
    assert flags.ran_backend({"forward": told}) == "cudnn"
    many = [span("k", "kernel", i, 1, **sizes) for i in range(500)]
    (summed,) = profile.read(many, on_gpu=True)["launches"]
    assert (summed["count"], summed["us"]) == (500, 500)


def test_operators_are_told_by_their_own_time() -> None:
    events = [
        span("aten::outer", "cpu_op", 0, 100),
        span("aten::inner", "cpu_op", 10, 30),
        span("aten::inner", "cpu_op", 50, 20),
        span("aten::crumb", "cpu_op", 12, 0.1),
        span("aten::later", "cpu_op", 100, 10),
    ]
    told = {launch["name"]: launch for launch in profile.read(events, on_gpu=False)["launches"]}
    assert told["aten::outer"]["us"] == pytest.approx(50)
    assert (told["aten::inner"]["us"], told["aten::inner"]["count"]) == (pytest.approx(49.9), 2)
    assert told["aten::later"]["us"] == pytest.approx(10)
    assert "1 operators below 0.5% each" in told


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("aten::_scaled_dot_product_attention_math", "math"),
        ("aten::_scaled_dot_product_attention_math_for_mps", "math"),
        ("aten::_scaled_dot_product_efficient_attention", "efficient"),
        ("aten::_scaled_dot_product_cudnn_attention_backward", ""),
        ("aten::bmm", ""),
    ],
)
def test_operators_of_attention_are_recognised(op: str, backend: str) -> None:
    assert profile.backend_of(op) == backend


# --- PyTorch's switches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", flags.SWITCHES)
def test_switches_are_set_and_put_back(name: str) -> None:
    switchboard, setting = torch.backends.cuda, flags.SWITCHES[name]

    def state() -> tuple[bool, ...]:
        return (switchboard.flash_sdp_enabled(), switchboard.mem_efficient_sdp_enabled(),
                switchboard.math_sdp_enabled(), switchboard.cudnn_sdp_enabled())  # fmt: skip

    before = state()
    with Candidate(name).context(make_problem((1, 1, 8, 8))):
        assert state() == (setting.flash, setting.efficient, setting.math, setting.cudnn)
    assert state() == before


@pytest.mark.kernel_gate
def test_the_experiment_tells_where_today_differs() -> None:
    result = run("inspect --shape 1,2,32,16 --dtype float32 --device cpu --repeat 1 --experiment flags")
    assert result.exit_code == 0, result.output
    told = result.stdout.partition("PyTorch's switches:")[2]
    assert "flags:flash      on: flash, cudnn: flash runs, as in the article" in told
    assert "flags:math       on: math, cudnn: math runs, as in the article" in told
    assert "the article saw cudnn run" in told
    assert "with all four off there is no kernel left" in told
    bad = run("inspect --shape 1,2,32,16 --experiment nope")
    assert bad.exit_code == 2


def test_a_finding_explains_another_kernel() -> None:
    row = Row("inspect", make_problem((1, 2, 8, 8)), ("flags:flash", "flags:efficient"))
    comparison = compare(row, FakePool({}), Settings(rounds=1))  # type: ignore[arg-type]
    ran = {"flags:flash": "cudnn", "flags:efficient": "math"}
    profiles = {name: {"forward": {"ops": [{"op": "x", "backend": backend}]}} for name, backend in ran.items()}
    first, second = switches.findings(comparison, profiles)
    assert "cudnn runs, where the article saw flash: cuDNN stays switched on" in first
    assert "math runs, where the article saw efficient: no fused kernel" in second


def test_pytorchs_own_words_are_asked_for(request: pytest.FixtureRequest) -> None:
    mind = Worker()
    request.addfinalizer(mind.forget)
    mind.prepare("torch-default", make_problem((1, 2, 16, 8), dropout=0.5).to_dict(), 0, "cpu")
    said = mind.refusals()
    assert said["torch-math"] == []
    assert said["torch-flash"] == ["Both fused kernels do not support non-zero dropout."]
    assert said["torch-cudnn"] != []


# --- other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_rivals_say_all_that_they_lack(name: str) -> None:
    easy = make_problem((1, 2, 64, 64), torch.bfloat16)
    here = Candidate(name).why_not(easy, "cuda")
    odd = easy.with_(dtype=torch.float64, mask=masks.parse("dense:bool:64x64"), needs_lse=True, heads_kv=1, softcap=2.0)
    lacking = Candidate(name).why_not(odd, "cpu")
    assert len(lacking) >= len(here) + 2
    assert set(here) <= set(lacking) | set(here)
    if rivals.RIVALS[name].module.split(".")[0] != "torch":
        assert any("CUDA kernels alone" in reason.what for reason in lacking)


# --- Nsight Compute --------------------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 1
a line of the program's own
"ID","Process ID","Kernel Name","sm__cycles_elapsed.max","smsp__inst_executed.sum"
"","","","cycle","inst"
"0","1","spin_kernel(long)","1,000","10"
"1","1","forward_bf16(Params)","2,500,000","100"
"2","1","combine(Params)","500","1"
"3","1","spin_kernel(long)","1,000","10"
"4","1","cudnn_sdpa(Params)","3,000,000","200"
"""


def test_cycles_belong_to_the_candidate_between_two_milestones() -> None:
    legs = list(ncu.split_at_milestones(ncu.read_csv(NCU)))
    ours, theirs = (cycles._sum("row", name, leg) for name, leg in zip(("tilewise", "cudnn"), legs, strict=True))
    assert (ours.cycles, ours.instructions, ours.kernels) == (2_500_500, 101, ["forward_bf16", "combine"])
    assert (theirs.cycles, theirs.kernels) == (3_000_000, ["cudnn_sdpa"])


def test_counters_are_picked_out_of_whatever_ncu_prints() -> None:
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    kernel = {
        "Kernel Name": "k",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "18.6",
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "41",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "12.5",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": "71.2",
        "launch__registers_per_thread": "168",
        stall.format("long_scoreboard"): "1.5",
        stall.format("barrier"): "4.25",
        stall.format("wait"): "2",
        stall.format("gmma"): "9",
        stall.format("sleeping"): "0",
        "something__else": "n/a",
    }
    found = ncu.counters(kernel)
    assert found["achieved occupancy"] == (18.6, "%")
    assert found["DRAM throughput"] == (12.5, "%")
    assert found["tensor pipe"] == (71.2, "%")
    stalls = [name.removeprefix("stalled on ") for name in found if name.startswith("stalled")]
    assert stalls == ["gmma", "barrier", "wait"]
    assert math.isnan(ncu.number(kernel, "something__else"))


def test_counters_are_of_candidates_with_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((1, 2, 16, 8), needs_grad=True)
    names = ("tilewise", "tiled", "torch-default")
    outcomes = [Outcome(name, VERIFIED, forward=[[1.0]] * 5, backward=[[1.0]] * 5) for name in names]
    found = inspect.Inspection(plan(problem, Target.named("cpu")), Comparison(Row("inspect", problem, names), outcomes))
    few, many = {"launches": [{"count": 3}]}, {"launches": [{"count": 15}]}
    found.profiles = {
        "tilewise": {"forward": few, "backward": many},
        "tiled": {"forward": many, "backward": many},
        "torch-default": {"error": "no answer"},
    }
    monkeypatch.setattr(ncu, "inspect", lambda names, *_: {name: [] for name in names})
    inspect.count(found, 0, "", 1.0)
    told = "not counted: 30 launches, more than 20"
    assert found.counters == {"tilewise": [], "torch-default": [], "tiled": told}


def test_an_interrupt_of_the_profiler_keeps_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((1, 2, 16, 8))
    row = Row("inspect", problem, ("tilewise", "torch-math"))
    outcomes = [Outcome("tilewise", VERIFIED, forward=[[1.0]] * 5), Outcome("torch-math", WRONG, forward=[[1.0]] * 5)]
    found = inspect.Inspection(plan(problem, Target.named("cpu")), Comparison(row, outcomes))
    asked: list[list[str]] = []

    def interrupted(names: list[str], *_: object) -> None:
        asked.append(names)
        raise KeyboardInterrupt

    monkeypatch.setattr(ncu, "inspect", interrupted)
    inspect.count(found, 0, "", 1.0)
    assert asked == [["tilewise"]], "who is wrong is not counted"
    told = found.to_dict()
    assert told["counters"] == {"ncu": "interrupted"}
    assert not told["comparison"]["complete"]
    assert told["comparison"]["candidates"][0]["forward"] == [[1.0]] * 5


def test_without_a_profiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match="not on the PATH"):
        cycles.measure([], 0, 1.0)
    (said,) = ncu.inspect(["tilewise"], make_problem((1, 1, 8, 8)), 0, "", 1.0).values()
    assert "not on the PATH" in said


def test_a_profiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: str(fake))
    row = suites.suite("forward")[0]
    with pytest.raises(DeviceError, match="ERR_NVGPUCTRPERM"):
        cycles.measure([row], 0, 30.0)
    timed = [cycles._what(suites.suite(name)[0]) for name in ("forward", "backward", "training")]
    assert timed == ["forward", "backward", "step"]


def test_a_marker_of_bad_options_is_a_message() -> None:
    with pytest.raises(InvalidInput, match="candidate"):
        Candidate("flags:sideways")


def test_the_math_path_is_seen_by_step_with_its_gaps() -> None:
    def span(cat: str, name: str, at: float, long: float, **told: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": long, "args": told}

    sizes = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}
    events = [
        span("cpu_op", "aten::bmm", 0.0, 9.0, **{"External id": 1}),
        span("cpu_op", "aten::_softmax", 10.0, 9.0, **{"External id": 2}),
        span("cuda_runtime", "cudaLaunchKernel", 2.0, 3.0),
        span("cuda_runtime", "cudaLaunchKernel", 12.0, 3.0),
        span("kernel", "gemm", 20.0, 10.0, **sizes, **{"External id": 1}),
        span("kernel", "softmax_warp", 34.0, 6.0, **sizes, **{"External id": 2}),
    ]
    told = profile.read(events, on_gpu=True)
    assert [launch["step"] for launch in told["launches"]] == ["aten::bmm", "aten::_softmax"]
    assert told["gaps"] == {"launches": 2, "busy_us": 16.0, "idle_us": 4.0, "host_us": 13.0}
    lane = inspect_report._lane("torch-math", "forward", told, several=False, on_gpu=True)
    note, table = lane.blocks
    assert isinstance(note, report.Words)
    summed = "The device was busy for 16.0 us and idle for 4.00 us in between; the host launched for 13.0 us."
    assert note.content == summed
    assert isinstance(table, report.Table)
    assert [row[:5] for row in table.rows] == [
        ["gemm", "bmm", "1", "-", "10.0 us"], ["softmax_warp", "_softmax", "1", "4.00 us", "6.00 us"],
    ]  # fmt: skip
    assert profile.gaps([]) == {"launches": 0, "busy_us": 0.0, "idle_us": 0.0, "host_us": 0.0}


@pytest.mark.parametrize("mask", ["full", "causal", "window:4,0", "causal:bottom-right", "dense:additive:1x1x24x32"])
def test_plain_attention_is_what_it_says(mask: str) -> None:
    problem = make_problem((2, 4, 24, 16), seq_kv=32, heads_kv=2, mask=masks.parse(mask), softcap=3.0)
    given = make_inputs(problem, 1, "cpu")
    want = Candidate("tiled").forward(problem, given)()
    compiled = torch.compile
    try:
        torch.compile = lambda function, **_: function  # the arithmetic alone: compiling takes a minute on a CPU
        got = Candidate("compiled").forward(problem, given)()
    finally:
        torch.compile = compiled
    torch.testing.assert_close(got, want)
    assert Candidate("compiled").compiles
    assert not Candidate("compiled").is_peer
    assert not Candidate("compiled").is_ours
