"""What the commands share: options without effect are refused, outputs are checked first, one name for one thing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import magnitudes
import pytest
import torch
import typer.main
from typer.testing import CliRunner

import tilewise
from support import make_problem
from tilewise.errors import InvalidInput
from tilewise.lab.candidates import names as candidates
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.commands import diff as cli_diff
from tilewise.lab.commands import ladder as cli_ladder
from tilewise.lab.commands import options, output
from tilewise.lab.commands import tune as cli_tune
from tilewise.lab.commands.app import app
from tilewise.lab.commands.command import USAGE, _with_json_values, program
from tilewise.lab.measure import compare
from tilewise.lab.measure.compare import VERIFIED, Comparison, Outcome, Row
from tilewise.lab.studies import bench, builds, diff, inspect, kept, records
from tilewise.plan import plan
from tilewise.target import TARGETS, Target

MAGNITUDES = program(magnitudes.magnitudes)


def run(command: str, *more: str) -> Any:
    """A command of `tilewise`, or that of tools/."""
    words = [*command.split(), *more]
    if words[:1] == ["magnitudes"]:
        return CliRunner().invoke(MAGNITUDES, words[1:])
    return CliRunner().invoke(app, words)


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes as far as measuring has come too far."""

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(inspect, "inspect", measure)
    monkeypatch.setattr(compare, "compare_all", measure)
    monkeypatch.setattr(cli_tune.tuning, "run", measure)
    monkeypatch.setattr(cli_ladder.rungs, "run", measure)


# --- what cannot be read or written -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("command", ["diff FILE FILE", "bench --record FILE", "inspect --record FILE"])
def test_a_record_that_is_nested_too_deep_is_refused(tmp_path: Path, command: str, depth: int) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"kind": "tilewise bench", "rows": ' + "[" * depth + "]" * depth + "}")
    result = run(command.replace("FILE", str(path)))
    assert result.exit_code == USAGE
    assert "record: got" in result.output


@pytest.mark.parametrize("told", [{}, {"rows": [1], "comparison": 1}, {"rows": [{"problem": {"mask": 1}}]}], ids=str)
@pytest.mark.parametrize("command", ["diff FILE FILE", "bench --record FILE", "inspect --record FILE"])
def test_a_damaged_record_is_named(tmp_path: Path, command: str, told: dict[str, Any]) -> None:
    path = tmp_path / "damaged.json"
    kind = inspect.KIND if command.startswith("inspect") else records.KIND
    path.write_text(json.dumps({"kind": kind, "provenance": {}, **told}))
    result = run(command.replace("FILE", str(path)))
    assert result.exit_code == USAGE, result.exception
    assert f"record: got {path}, which is damaged" in result.output


@pytest.mark.parametrize(
    "command", ["explain --shape 1,1,8,8", "explain --shape 1,1,8,8 --json", "--help", "--version", "diff --help"]
)
def test_output_that_has_no_room_is_an_error_and_no_traceback(command: str) -> None:
    called = [sys.executable, "-m", "tilewise", *command.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(called, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == USAGE
    assert done.stderr == "tilewise: the output cannot be written: No space left on device\n"


# --- options that would have no effect -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("inspect --shape 1,1,8,8 --device cpu --backend tiled", "--backend"),
        ("inspect --shape 1,1,8,8 --device cpu --target h200", "--target"),
        ("inspect --shape 1,1,8,8 --tensors saved.pt", "--shape"),
        ("inspect --dtype fp16 --tensors saved.pt", "--dtype"),
        ("inspect --mask causal --tensors saved.pt", "--mask"),
        ("check --shape 1,1,8,8 --tensors saved.pt", "--shape"),
        ("check --lse --tensors saved.pt", "--lse"),
        ("inspect --shape 1,1,8,8 --static --target h200 --only tiled", "--only"),
        ("inspect --shape 1,1,8,8 --static --target h200 --html page.html", "--html"),
        ("inspect --shape 1,1,8,8 --static --target h200 --repeat 3", "--repeat"),
        ("inspect --shape 1,1,8,8 --experiment flags --only tiled", "--only"),
        ("inspect --record some.json --shape 1,1,8,8", "--shape"),
        ("inspect --record some.json --ncu", "--ncu"),
        ("bench --record some.json --suite cpu", "--suite"),
        ("bench --record some.json --save", "--save"),
        ("trace --no-compare --seed 3 -- python -c pass", "--seed"),
        ("inspect --shape 1,1,8,8 --device cpu --flush", "--flush"),
        ("inspect --shape 1,1,8,8 --device cpu --ncu", "--ncu"),
        ("inspect --shape 1,1,8,8 --device cpu --sass", "--sass"),
        ("ladder --device cpu --bytes", "--bytes"),
        ("bench --suite cpu --ahead", "--ahead"),
        ("inspect --shape 1,1,8,8 -v -q", "--verbose"),
        *(
            (f"{command} --results somewhere", "--results")
            for command in (
                "inspect --shape 1,1,8,8",
                "bench",
                "ladder",
                "tune --shape 1,1,8,8",
                "magnitudes",
                "cycles",
            )
        ),
    ],
)
@pytest.mark.usefixtures("_unmeasured")
def test_an_option_without_effect_is_refused_with_the_reason(command: str, option: str) -> None:
    result = run(command)
    assert result.exit_code == 2, result.output
    assert f"tilewise: {option}: got the option, expected none: it has no effect " in result.stderr


def test_defaults_are_not_taken_for_options_that_were_given() -> None:
    result = run("inspect --shape 1,8,512,64 --static --target sm_90 --json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"]["target"]["name"] == "h200"


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("command", ["inspect --shape 1,1,8,8", "tune --shape 1,1,8,8", "ladder", "bench", "trace"])
@pytest.mark.usefixtures("_unmeasured")
def test_a_path_that_cannot_be_written_is_told_before_anything_is_measured(
    command: str, option: str, tmp_path: Path
) -> None:
    program = ["--", "python", "-c", "raise SystemExit(9)"] if command == "trace" else []
    for path in (tmp_path / "no" / "such" / "folder", tmp_path):
        result = run(command, option, str(path), *program)
        assert result.exit_code == 2, result.output
        assert f"tilewise: {option}: got {path}" in result.stderr


@pytest.mark.parametrize(
    "command", ["bench --save", "tune --shape 1,1,8,8 --save", "ladder --save", "magnitudes --save"]
)
@pytest.mark.usefixtures("_unmeasured")
def test_so_is_a_folder(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("a file, not a folder")
    result = run(command, *(["--results", "x"] if "--save" in command else []))
    assert result.exit_code == 2, result.output
    assert "a folder that can be written" in result.stderr


def test_a_file_that_is_there_is_kept_until_there_is_something_to_write(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    outputs = output.OutputOptions(json=path)
    assert path.read_text() == "before"
    outputs.deliver({"kind": "tilewise test"}, lambda: None)
    assert json.loads(path.read_text()) == {"kind": "tilewise test"}


def test_what_was_measured_is_not_lost_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outputs = output.OutputOptions(json=tmp_path / "out.json")
    monkeypatch.setattr(output, "_replace", full)
    with pytest.raises(InvalidInput, match="No space left on device") as raised:
        outputs.deliver({"kind": "tilewise test", "figure": 3}, lambda: None)
    rescued = Path(raised.value.remedy.rpartition(" ")[2])
    assert json.loads(rescued.read_text())["figure"] == 3
    rescued.unlink()


def test_json_goes_to_standard_output_or_to_a_file(tmp_path: Path) -> None:
    explain = "explain --shape 1,8,64,64 --target h200"
    told = json.loads(run(f"{explain} --json").stdout)
    assert json.loads(run(f"{explain} --json -").stdout) == told
    assert json.loads(run("explain --json --shape 1,8,64,64 --target h200").stdout) == told
    path = tmp_path / "plan.json"
    text = run(explain, "--json", str(path))
    assert text.stdout == run(explain).stdout
    assert json.loads(path.read_text()) == told
    both = run("inspect --shape 1,1,8,8 --json - --html -")
    assert both.exit_code == 2


def test_a_traced_programs_own_json_option_is_its_own() -> None:
    assert _with_json_values(["--json", "--", "python", "x.py", "--json"]) == [
        "--json", "-", "--", "python", "x.py", "--json",
    ]  # fmt: skip
    assert _with_json_values(["--json", "a.json", "--json"]) == ["--json", "a.json", "--json", "-"]


# --- one name for one thing ------------------------------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert (
        result.stdout
        == f"tilewise {tilewise.__version__}, torch {torch.__version__}, Python " + (result.stdout.rpartition(" ")[2])
    )
    assert "Exit codes: 0" in run("").stdout


_LIST_THE_COMMANDS = """
import sys
sys.argv = ["tilewise"]  # as the installed command
from tilewise.lab.commands.app import app
app(["--help"], standalone_mode=False)
print("torch" in sys.modules)
"""


def test_the_list_of_commands_needs_no_pytorch() -> None:
    """The summaries are read from the modules of the commands, none of which is imported."""
    words = [sys.executable, "-c", _LIST_THE_COMMANDS]
    *shown, imported = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert imported == "False"
    commands: Any = typer.main.get_command(app)
    for name, later in commands.commands.items():
        assert later.get_short_help_str() == later.load().get_short_help_str(), name
        assert any(line.startswith(f"  {name} ") and later.get_short_help_str()[:15] in line for line in shown), name


def test_pages_are_loaded_where_one_is_written() -> None:
    commands: Any = typer.main.get_command(app)
    modules = [f"tilewise.lab.commands.{name}" for name in commands.commands]
    code = f"import sys\nfrom importlib import import_module\nfor name in {modules}: import_module(name)\n"
    code += "print([name for name in sys.modules if name.startswith('tilewise.lab.render')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    drawing = {f"'tilewise.lab.render.{name}'" for name in ("blocks", "charts", "html", "pages", "style")}
    assert not any(name in done.stdout for name in drawing), done.stdout


def test_programs_that_the_command_runs_find_every_public_name() -> None:
    code = "import sys; sys.argv = ['tilewise']; import tilewise; print('torch' in sys.modules); "
    code += (
        "from tilewise import *; print(all(getattr(tilewise, name) for name in tilewise.__all__), attention.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "attention"]


def test_gradients_have_one_name() -> None:
    for command in ("inspect", "check", "explain"):
        shown = run(f"{command} --help").stdout
        assert "--grad" in shown
        assert "--backward" not in shown
    static = "inspect --shape 1,8,512,64 --static --target h200 --json"
    assert json.loads(run(f"{static} --grad").stdout)["plan"]["problem"]["needs_grad"] is True
    assert run(f"{static} --backward").exit_code == 2


@pytest.mark.parametrize(
    ("name", "target"), [("sm_90", "h200"), ("SM_80", "a100"), ("sm_120", "rtx-5090"), ("l4", "l4")]
)
def test_architectures_are_targets(name: str, target: str) -> None:
    assert Target.named(name).name == target
    told = json.loads(run(f"explain --shape 1,8,64,64 --target {name} --json").stdout)
    assert told["target"]["name"] == target
    assert options.make_arch(name).removesuffix("a") == Target.named(name).arch


@pytest.mark.parametrize("name", ["b200", "gb200", "rtx-5090", "h20", "a10", "l4"])
def test_new_targets_have_a_plan_and_sound_facts(name: str) -> None:
    target = Target.named(name)
    assert target.smem_per_block < target.smem_per_sm
    assert target.flops_16bit > target.flops_tf32 >= target.flops_fp32 / 2 > 0
    # What the units of every multiprocessor can do in a cycle is a whole number of products, by the clock or one near.
    per_cycle = target.flops_fp32 / target.sms / target.clock_hz
    assert 240 < per_cycle < 300, "128 float32 units a multiprocessor, two operations each"
    chosen = plan(make_problem((1, 32, 4096, 128), torch.bfloat16, mask=tilewise.Causal()), target)
    assert all(verdict.willing or verdict.reasons for verdict in chosen.verdicts)
    asked = plan(chosen.problem, target, "sm80")
    assert asked.config.smem_bytes <= target.smem_per_block


def test_every_target_has_its_rates() -> None:
    for target in TARGETS.values():
        assert target.is_cpu or min(target.sms, target.l2_bytes, target.dram_bytes_per_s, target.flops_16bit) > 0


def test_relatives_build_the_kernels_that_fit_them() -> None:
    for arch, target in (("sm_86", "a10"), ("sm_100", "b200"), ("sm_120", "rtx-5090")):
        units = builds.units_for(arch)
        assert {unit.arch for unit in units} == {arch}
        assert max(unit.smem_bytes for unit in units) <= Target.named(target).smem_per_block


@pytest.mark.kernel_gate
@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
def test_the_sm80_family_compiles_for_blackwell(arch: str) -> None:
    """Every seventh kernel: no error, and no more than a few registers spill."""
    units = builds.units_for(arch)[::7]
    for unit, kernel in builds.build_all(units):
        assert not isinstance(kernel, Exception), f"{unit.name}: {kernel}"
        assert kernel.resources.spill_store_bytes <= FEW_REGISTERS, unit.name


FEW_REGISTERS = 16  # bytes


def test_a_compiler_that_fails_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    units = builds.units_for("sm_80")[:202]
    missing = "NVRTC, the compiler of CUDA kernels, cannot be loaded: no such library."
    builds.show([builds.Build(unit, None, missing) for unit in units])
    assert capsys.readouterr().out == f"none of {len(units)} kernels was built: {missing}\n"
    one = f"{units[0].name} for sm_80 does not compile"
    builds.show([builds.Build(units[0], None, one), *(builds.Build(unit, None, missing) for unit in units[1:])])
    shown = capsys.readouterr().out
    assert shown.count(missing) == 1
    assert f"{len(units) - 1} kernels, {units[1].name} among them: {missing}" in shown
    assert f"{units[0].name}: it does not compile" in shown


def test_candidates_are_verified_side_by_side_on_a_gpu_and_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Getting ready takes most of a run: compilers and float64, which leave the GPU idle."""
    seen: list[compare.Settings] = []

    def measure(problem: object, device: object, settings: compare.Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise InvalidInput("it", "is", "not", "measured")

    monkeypatch.setattr(inspect, "inspect", measure)
    monkeypatch.setattr(cli_ladder.rungs, "run", measure)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(options, "make_device", lambda name, device=device: device)
        for words in ("inspect --shape 1,1,16,8", "ladder"):
            assert run(words).exit_code == 2
    assert [settings.together for settings in seen] == [False, False, True, True]


# --- functions of the user's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("missing.py:fn", "No such file"),
        ("broken.py:fn", "which is no Python"),
        ("there.py:other", "there.py defines made, mine, torch"),
        ("no_such_package.module:fn", "there is no such module"),
        ("package.missing:fn", "there is no such module"),
    ],
)
@pytest.mark.usefixtures("_unmeasured")
def test_a_function_that_is_not_there_is_told_before_anything_is_measured(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def fn(:\n")
    Path("there.py").write_text("import torch\ndef mine(q, k, v, problem, bias): ...\nmade = mine\n")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('imported')\n")
    for command in ("inspect --shape 1,1,8,8 --device cpu", "check --shape 1,1,8,8", "bench"):
        result = run(command, "--candidate", text)
        assert result.exit_code == 2, result.output
        assert says in result.stderr


def test_functions_that_are_there_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("if True:\n    def mine(q, k, v, problem, bias): ...\nmade = None\n")
    Path("open.py").write_text("from there import *\n")
    for text in ("there.py:mine", "there.py:made", "there:mine", "open.py:whatever", "torch.nn.functional:softmax"):
        assert options.make_candidates([text]) == (f"python:{text}",)
    with pytest.raises(InvalidInput, match="one of"):
        options.make_candidates(["tilewise:nothing"])
    assert Candidate("tilewise:torch-math").is_ours
    assert candidates.ROUTES[0] == "tilewise:torch-flash"


# --- diff ------------------------------------------------------------------------------------------------------------


def compared(ours: float, peer: float, rounds: int = 9) -> Comparison:
    row = Row("a row", make_problem((1, 2, 8, 8)), ("tilewise", "torch-default"))
    wave = [1.0 + 0.002 * (number % 3) for number in range(rounds)]
    outcomes = [
        Outcome(name, VERIFIED, forward=[[seconds * factor] for factor in wave])
        for name, seconds in (("tilewise", ours), ("torch-default", peer))
    ]
    return Comparison(row, outcomes)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [((1.0, 2.0), "no change"), ((0.5, 2.0), "higher"), ((1.0, 1.5), "lower"), ((7.0, 14.0), "no change")],
)
def test_ratios_are_compared_and_not_times(after: tuple[float, float], verdict: str) -> None:
    found = diff.changes({"a row": compared(1.0, 2.0)}, {"a row": compared(*after)})
    change = next(one for one in found if one.candidate == "tilewise")
    assert change.verdict == verdict
    assert change.against == "torch-default"


def test_few_rounds_change_nothing() -> None:
    found = diff.changes({"a row": compared(1.0, 2.0, rounds=3)}, {"a row": compared(1.0, 9.0, rounds=3)})
    assert {change.verdict for change in found} == {"too few rounds"}
    assert diff.sentence(found, 2, 0).endswith("2 of too few rounds to tell; 2 rows only in the first.")


def test_two_records_side_by_side(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"{name}.json" for name in ("old", "new", "other"))
    for path, peer in ((old, 2.0), (new, 1.5)):
        record = bench.record("made up", [compared(1.0, peer)], compare.Settings(), ["tilewise", "bench"])
        record["provenance"]["gpus"] = [{"name": "NVIDIA H200"}]
        kept.write(record, path)
    result = run("diff", str(old), str(new), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["kind"] == cli_diff.differences.KIND
    verdicts = {change["candidate"]: change["verdict"] for change in told["changes"]}
    assert verdicts["tilewise"] == "lower"
    shown = run("diff", str(old), str(new)).stdout.splitlines()
    assert shown[0].startswith(f"{old.name}: NVIDIA H200")
    assert shown[1].startswith(f"{new.name}: NVIDIA H200")
    assert shown[2] == told["sentence"]
    same = json.loads(run("diff", str(new), str(new), "--json").stdout)
    assert {change["verdict"] for change in same["changes"]} == {"no change"}
    other.write_text('{"kind": "tilewise magnitudes"}')
    for wrong in (other, tmp_path / "missing.json", tmp_path):
        assert run("diff", str(new), str(wrong)).exit_code == USAGE
    assert run("diff", str(other), str(other)).exit_code == USAGE


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "parse_dtype", stopped)
    result = run("inspect --shape 1,1,8,8")
    assert result.exit_code == 130
    assert result.stderr == "tilewise: interrupted\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "helps"),
    [
        ("inspect --shape 1,1,8,8 --device cuda", "--device cpu"),
        ("ladder --device cuda:0", "--device cpu"),
        ("tune --shape 1,16,1024,64 --device cuda", "--device cpu"),
        ("magnitudes --device cuda", "--device cpu"),
        ("bench --suite forward", "--suite cpu"),
        ("cycles", "a machine with an NVIDIA GPU"),
        ("explain --shape 1,1,8,8 --target cuda:0", "name a target"),
    ],
)
def test_what_to_do_without_a_gpu_is_something_the_command_can_do(command: str, helps: str) -> None:
    result = run(command)
    assert result.exit_code == 4, result.output
    assert helps in result.stderr.partition("What to do:")[2]
    assert ("name a target" in result.stderr) == ("--target" in command)


@pytest.mark.parametrize("name", ["bench", "check", "cycles", "inspect", "ladder", "magnitudes", "trace", "tune"])
def test_every_measuring_command_writes_json_and_html(name: str) -> None:
    commands: Any = typer.main.get_command(app)
    found = typer.main.get_command(MAGNITUDES) if name == "magnitudes" else commands.commands[name].load()
    taken = {option for parameter in found.params for option in parameter.opts}
    assert {"--json", "--html"} <= taken
