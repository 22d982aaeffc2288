"""tune: the halving finds the fastest and loses nothing to failures or interrupts; its table reaches the planner.

Only time is made up, and only where a test says so: configs, compiler, state file, table and planner are the real ones.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from support import assert_close, budget, exact, make_problem
from tilewise import Causal, Full, Window
from tilewise.call import build
from tilewise.element import Element
from tilewise.engine import SM90
from tilewise.errors import CompileError, InvalidInput
from tilewise.jit import tuned
from tilewise.lab import report
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.candidates.variants import backend_of, is_variant, name_of, resolve
from tilewise.lab.commands.app import app
from tilewise.lab.measure.pool import Failure
from tilewise.lab.render import pages
from tilewise.lab.studies import tune, tune_report
from tilewise.lab.studies.search_space import search_space
from tilewise.plain import tiled
from tilewise.plan import plan
from tilewise.target import Target, assumed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tilewise import Problem

H200 = dataclasses.replace(Target.named("h200"), name="NVIDIA H200")
CPU = Target.of("cpu")
LONG = make_problem((1, 16, 8192, 128), torch.bfloat16, mask=Causal())
SMALL = make_problem((1, 2, 2048, 16), mask=Window(16, 0))


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWISE_TABLES", str(tmp_path / "tables"))
    tuned.forget()
    yield
    tuned.forget()


class Clock:
    """Made-up times: how far a config is from the best one, with a jitter that longer measurements average out."""

    def __init__(self, seconds_of: Callable[[Any], float]) -> None:
        self.seconds_of = seconds_of
        self.calls: list[tuple[Any, float, bool]] = []

    def __call__(self, config: Any, seconds: float, first: bool) -> list[float]:
        self.calls.append((config, seconds, first))
        jitter = 1 + 0.02 * ((len(self.calls) * 7919) % 11 - 5) / 5
        return [self.seconds_of(config) * jitter]


def distance_from(block_q: int, block_kv: int) -> Callable[[Any], float]:
    def seconds(config: Any) -> float:
        return 1e-3 * (1 + abs(config.block_q - block_q) / 64 + abs(config.block_kv - block_kv) / 64)

    return seconds


def show(found: tune.Sweep, settings: tune.Settings) -> None:
    """As the command prints it."""
    values = found.to_dict() | tune._concluded(found, settings)
    told = json.loads(json.dumps({"sweeps": [values], "complete": found.complete}))
    report.show(tune_report.report_of(told, target=found.target))


def test_halving_finds_the_fastest_and_measures_few_for_long() -> None:
    clock = Clock(distance_from(512, 64))
    settings = tune.Settings()
    found = tune.sweep("tiled", SMALL, CPU, clock, settings)
    space = tiled.search_space(SMALL, CPU)
    assert found.complete
    assert len(found.trials) == len(space) == 49
    winner = found.winner(settings.gain)
    assert winner is not None
    assert winner.config == tiled.Config(512, 64)
    by_length = {seconds: sum(call[1] == seconds for call in clock.calls) for _, seconds, _ in clock.calls}
    first, *later = sorted(by_length)
    assert by_length[first] == len(space)
    assert all(len({call[0] for call in clock.calls if call[1] == seconds}) < len(space) for seconds in later)
    assert sum(verify for *_, verify in clock.calls) == len(space), "each config is verified once"
    finalists = [trial for trial in found.trials if trial.last_round == winner.last_round]
    assert found.shipped in {trial.label for trial in finalists}
    assert all(settings.final_rounds <= len(trial.turns) <= settings.max_final_rounds for trial in finalists)
    assert found.speed(winner).ratio > 1.5  # type: ignore[union-attr]


def test_a_winner_must_beat_the_shipped_choice_by_a_margin() -> None:
    shipped = tiled.shipped(SMALL, CPU)[0]
    found = tune.sweep("tiled", SMALL, CPU, lambda config, *_: [1.0 if config == shipped else 0.995], tune.Settings())
    winner = found.winner(tune.Settings().gain)
    assert winner is not None
    assert winner.config == shipped
    assert "the shipped choice stays" in tune.conclusion(found, tune.Settings())


def test_noise_does_not_make_a_winner() -> None:
    """Equal configs with a spread of 40%: whichever median is in front, the shipped one stays."""
    settings, in_front = tune.Settings(), set()
    for seed in range(6):
        chance = random.Random(seed)
        found = tune.sweep("tiled", SMALL, CPU, lambda *_: [math.exp(chance.gauss(0.0, 0.4))], settings)  # noqa: B023
        in_front.add(found.ranked()[0].label)
        winner = found.winner(settings.gain)
        assert winner is not None
        assert winner.label == found.shipped
        assert "none is more than 1% faster beyond the noise; nothing is" in tune.conclusion(found, settings)
        assert len(winner.turns) == settings.max_final_rounds, "it was measured for as long as it may be"
    assert in_front - {found.shipped}, "some median of noise is in front"


def test_what_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(config: Any, seconds: float, first: bool) -> list[float]:
        if config.block_q == 64:
            raise Failure("no answer in 30 s", hint="raise --time-limit")
        if config.block_q == 2048:
            raise Failure("died: SIGSEGV")
        return [1e-3 * config.block_kv]

    found = tune.sweep("tiled", SMALL, CPU, measure, tune.Settings())
    assert found.complete
    verdicts = {trial.config.block_q: trial.verdict for trial in found.trials}
    assert verdicts[64] == "no answer in 30 s"
    assert verdicts[2048] == "died: SIGSEGV"
    assert len(found.ranked()) == 35
    show(found, tune.Settings())
    text = capsys.readouterr().out
    assert text.count("no answer in 30 s: raise --time-limit") == text.count("died: SIGSEGV") == 1, "each reason once"
    assert text.count("\n7 configs: ") == 2
    assert "49 configs: 35 measured, 14 not" in text


def test_nothing_measured_is_no_entry() -> None:
    def measure(config: Any, seconds: float, first: bool) -> list[float]:
        raise Failure("died: SIGILL")

    found = tune.sweep("tiled", SMALL, CPU, measure, tune.Settings())
    assert found.complete
    assert tune.keep(found, tune.Settings(), ["test"]) is None
    assert "none could be measured" in tune.conclusion(found, tune.Settings())


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.jsonl"
    seconds_of = distance_from(128, 256)
    whole = Clock(seconds_of)
    tune.sweep("tiled", SMALL, CPU, whole, tune.Settings())

    class Interrupted(Clock):
        def __call__(self, config: Any, seconds: float, first: bool) -> list[float]:
            if len(self.calls) == 60:
                raise KeyboardInterrupt
            return super().__call__(config, seconds, first)

    class Early(Clock):
        def __call__(self, config: Any, seconds: float, first: bool) -> list[float]:
            if len(self.calls) == 5:
                raise KeyboardInterrupt
            return super().__call__(config, seconds, first)

    stopped = tune.sweep("tiled", SMALL, CPU, Interrupted(seconds_of), tune.Settings(), state=tune.State(path))
    assert not stopped.complete
    assert len(stopped.ranked()) == 49
    assert tune.keep(stopped, tune.Settings(), ["test"]) is None
    show(stopped, tune.Settings())
    assert "run the same command again" in capsys.readouterr().out
    early = tune.sweep("tiled", SMALL, CPU, Early(seconds_of), tune.Settings())
    show(early, tune.Settings())
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("49 configs: 5 measured, 44 not; interrupted")
    assert len([line for line in shown if " x " in line.partition("  ")[0]]) == 5, "what it has, and no empty rows"

    with path.open("a") as file:
        file.write('{"trial": "torn')
    again = tune.State(path)
    assert len(again) == 60
    rest = Clock(seconds_of)
    finished = tune.sweep("tiled", SMALL, CPU, rest, tune.Settings(), state=again)
    assert finished.complete
    assert len(rest.calls) == len(whole.calls) - 60
    assert len(tune.State(path)) == len(whole.calls)
    assert not any(first for *_, first in rest.calls), "what was verified is not verified again"
    winner = finished.winner(1.01)
    assert winner is not None
    assert winner.config == tiled.Config(128, 256)


def test_states_of_different_sweeps_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    settings = tune.Settings()
    paths = {
        tune.state_path("sm90", LONG, H200, settings),
        tune.state_path("sm90", LONG.with_(seq_q=4096), H200, settings),
        tune.state_path("sm90", LONG, dataclasses.replace(H200, name="NVIDIA H100"), settings),
        tune.state_path("sm90", LONG, H200, dataclasses.replace(settings, max_configs=9)),
        tune.state_path("tiled", LONG, H200, settings),
    }
    assert len(paths) == 5


def test_the_search_space_is_legal_and_holds_what_ships() -> None:
    for dim, mask in ((64, Causal()), (128, Window(512, 0)), (256, Causal())):
        problem = make_problem((2, 8, 4096, dim), torch.float16, mask=mask)
        space = search_space(SM90, problem, H200)
        assert len(space) == len(set(space)) == len({tune.label_of(config) for config in space})
        assert set(SM90.shipped(problem, H200)) <= set(space)
        assert all(config.smem_bytes <= H200.smem_per_block for config in space)
        assert all(config.ctas_per_sm * (config.smem_bytes + 1024) <= H200.smem_per_sm for config in space)
        assert all((config.head_dim, config.element) == (dim, Element.fp16) for config in space)
    assert len(search_space(SM90, LONG, H200)) > 100


def test_a_kernel_that_divides_the_keys_is_told_from_one_that_does_not() -> None:
    few = make_problem((1, 8, 48, 128), torch.bfloat16, seq_kv=16384, mask=Full())
    shipped, space = tune.search("sm90", few, H200, tune.Settings())
    assert shipped.split
    same_tile = dataclasses.replace(shipped, split=False, mask=0)
    assert {shipped, same_tile} <= set(space)
    assert len(space) == len({tune.label_of(config) for config in space})


def test_a_real_build_of_some_configs_and_the_table_the_planner_reads() -> None:
    """Compiles for sm_90a here, times by a made-up clock, and asks the planner about an H200."""
    settings = tune.Settings(max_configs=10, finalists=4)

    def measure(config: Any, seconds: float, first: bool) -> list[float]:
        return [1e-3 / (config.block_kv + config.consumers)]

    found = tune.sweep("sm90", LONG, H200, measure, settings)
    assert len(found.trials) == 10
    built = [trial for trial in found.trials if trial.verdict == tune.MEASURED]
    assert len(built) >= 3
    for trial in built:
        (facts,) = tune.resources(found, trial)
        assert facts["spilt"] == 0
        assert facts["ctas_per_sm"] >= trial.config.ctas_per_sm
    for trial in found.trials:
        if trial.verdict != tune.MEASURED:
            assert trial.verdict in (tune.SPILLS, tune.UNFIT)
            assert trial.because
    winner = found.winner(settings.gain)
    assert winner is not None
    path = tune.keep(found, settings, ["tilewise", "tune"])
    assert path is not None
    assert path.name == "sm90.nvidia-h200.json"

    chosen = plan(LONG, H200)
    assert (chosen.backend, chosen.config) == ("sm90", winner.config)
    assert "tuned on NVIDIA H200 by tilewise tune" in str(chosen)
    assert SM90.configs(LONG, H200)[1:] == [c for c in SM90.shipped(LONG, H200) if c != winner.config]
    entry = json.loads(path.read_text())["entries"][0]
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["gain"] == pytest.approx(found[found.shipped].seconds / winner.seconds)
    assert entry["speed"]["verdict"] == "faster"
    assert len(entry["runners_up"]) == min(5, len(built) - 1)
    assert all(other["ratio"] >= 1 or other["config"] == entry["shipped"]["config"] for other in entry["runners_up"])
    assert {"median", "p20", "p80"} == set(entry["seconds"])
    assert "commit" in entry["source"]


def entry_for(problem: Problem, config: Any, **changes: Any) -> dict[str, Any]:
    key, sizes = SM90.tuning_key(problem)
    entry = {
        "key": key,
        "sizes": sizes,
        "config": dataclasses.asdict(config),
        "kernels": tuned.kernels_digest("sm90"),
        "device": H200.name,
        "date": "2026-01-02T03:04:05+00:00",
        "gain": 1.25,
    }
    return entry | changes


def other_config(problem: Problem) -> Any:
    return next(c for c in search_space(SM90, problem, H200) if c not in SM90.shipped(problem, H200))


def test_an_entry_serves_its_neighbours_and_nobody_else() -> None:
    config = other_config(LONG)
    tuned.write("sm90", H200.name, entry_for(LONG, config))
    near = [LONG, LONG.with_(seq_q=4096, seq_kv=4096), LONG.with_(batch=2), LONG.with_(heads_kv=4)]
    far = [LONG.with_(seq_kv=4095), LONG.with_(batch=3), LONG.with_(softcap=2.0), LONG.with_(dtype=torch.float16)]
    far += [LONG.with_(mask=Window(64, 0)), LONG.with_(head_dim=64, head_dim_v=64)]
    assert all(SM90.configs(problem, H200)[0] == config for problem in near)
    assert not any(config in SM90.configs(problem, H200) for problem in far)
    assert config not in SM90.configs(LONG, dataclasses.replace(H200, name="NVIDIA H100"))
    assert config not in SM90.configs(LONG, Target.named("h200")), "a named target is nobody's machine"


def test_the_nearest_entry_wins_and_the_same_problem_is_replaced() -> None:
    first, second, third = [c for c in search_space(SM90, LONG, H200) if c not in SM90.shipped(LONG, H200)][:3]
    half = LONG.with_(seq_q=4096, seq_kv=4096)
    tuned.write("sm90", H200.name, entry_for(LONG, first))
    tuned.write("sm90", H200.name, entry_for(half, second))
    assert SM90.configs(LONG, H200)[0] == first
    assert SM90.configs(LONG.with_(seq_q=5000, seq_kv=5000), H200)[0] == second
    path = tuned.write("sm90", H200.name, entry_for(LONG, third))
    assert SM90.configs(LONG, H200)[0] == third
    assert path is not None
    assert len(json.loads(path.read_text())["entries"]) == 2


def test_what_is_stale_or_switched_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = other_config(LONG)
    tuned.write("sm90", H200.name, entry_for(LONG, config, kernels="of other sources"))
    assert config not in SM90.configs(LONG, H200)
    unknown = entry_for(LONG, config)
    unknown["config"] |= {"flavour": 3}
    tuned.write("sm90", H200.name, unknown)
    assert config not in SM90.configs(LONG, H200)
    tuned.write("sm90", H200.name, entry_for(LONG, config))
    assert SM90.configs(LONG, H200)[0] == config
    monkeypatch.setenv("TILEWISE_TABLES", "none")
    assert config not in SM90.configs(LONG, H200)
    assert tuned.write("sm90", H200.name, entry_for(LONG, config)) is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 9, "device": "NVIDIA H200", "entries": []}', "null"])
def test_a_damaged_table_costs_one_line(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned.path_of("sm90", H200.name)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING, "tilewise"):
        assert SM90.configs(LONG, H200) == SM90.shipped(LONG, H200)
        assert SM90.configs(LONG, H200) == SM90.shipped(LONG, H200)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_the_real_stopwatch_verifies_times_and_survives_what_a_config_does() -> None:
    problem = make_problem((1, 1, 40, 8))
    settings = tune.Settings(first_seconds=0.001, final_seconds=0.001, time_limit=60.0)
    with tune.Stopwatch("tiled", problem, "cpu", settings) as stopwatch:
        assert all(seconds > 0 for seconds in stopwatch(tiled.Config(16, 16), 0.001, True))
        with pytest.raises(Failure, match="raised ValueError"):
            stopwatch(tiled.Config(0, 16), 0.001, True)
        assert stopwatch(tiled.Config(16, 32), 0.001, False)


def test_a_config_travels_by_name() -> None:
    config = other_config(LONG)
    name = name_of("sm90", config)
    assert is_variant(name)
    assert resolve(name) == (SM90, config)
    assert not is_variant("sm90")
    with pytest.raises(InvalidInput, match="name every field once"):
        resolve("tiled@block_q=64")


@pytest.mark.kernel_gate
def test_the_command_ends_with_a_table_that_explain_cites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything real, on a CPU: workers, verification, clock, state, table, planner."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    record = tmp_path / "tune.json"
    where = ["--shape", "1,1,64,8", "--mask", "causal", "--dtype", "float32", "--backend", "tiled"]
    outputs = ["--json", str(record), "--html", str(tmp_path / "tune.html")]
    done = CliRunner().invoke(app, ["tune", *where, "--device", "cpu", "--max-configs", "3", *outputs])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "tune.html").read_text()
    assert "3 configs: 3 measured, 0 not" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "3 configs: 3 measured, 0 not" in done.output
    (stored,) = json.loads(record.read_text())["sweeps"]
    assert stored["complete"]
    wins = stored["winner"] != stored["shipped"]
    assert stored["written"] == (str(tmp_path / "tables" / "tiled.cpu.json") if wins else None)
    assert ("the planner uses it from now on" in done.output) == wins
    assert not list((tmp_path / "cache" / "tune").glob("*")), "a finished sweep leaves no state"
    monkeypatch.setattr(tune.Stopwatch, "__call__", lambda self, config, *_: [1e-3 * config.block_kv])
    done = CliRunner().invoke(app, ["tune", *where, "--device", "cpu"])
    assert "the planner uses it from now on" in done.output
    explained = CliRunner().invoke(app, ["explain", *where, "--target", "cpu"])
    assert "config tuned on cpu by tilewise tune" in explained.output


def test_nothing_is_written_where_the_shipped_choice_stays_unless_an_entry_has_to_go() -> None:
    shipped = tiled.shipped(SMALL, CPU)[0]
    settings = tune.Settings()
    found = tune.sweep("tiled", SMALL, CPU, lambda config, *_: [1.0 if config == shipped else 2.0], settings)
    assert tune.keep(found, settings, ["test"]) is None
    assert "nothing is written" in tune.conclusion(found, settings)
    other = next(config for config in tiled.search_space(SMALL, CPU) if config != shipped)
    better = tune.sweep("tiled", SMALL, CPU, lambda config, *_: [1.0 if config == other else 2.0], settings)
    assert tune.keep(better, settings, ["test"]) is not None
    assert plan(SMALL, CPU, "tiled").config == other
    assert tune.keep(found, settings, ["test"]) is not None
    assert plan(SMALL, CPU, "tiled").config == shipped


def test_a_backend_without_configs_is_refused() -> None:
    done = CliRunner().invoke(app, ["tune", "--shape", "1,1,64,8", "--backend", "torch-math", "--device", "cpu"])
    assert done.exit_code == 2


# --- backwards, and float32 ------------------------------------------------------------------------------------------

TRAIN = LONG.with_(needs_grad=True)
A100 = dataclasses.replace(Target.named("a100"), name="NVIDIA A100")
FLOAT32 = make_problem((1, 16, 4096, 64), torch.float32, mask=Causal())
SWEEPS = [
    ("sm90:backward", TRAIN, H200),
    ("sm90", FLOAT32, H200),
    ("sm90", FLOAT32.with_(needs_grad=True), H200),
    ("sm90:backward", FLOAT32.with_(needs_grad=True), H200),
    ("sm80:backward", TRAIN, A100),
    ("sm80", FLOAT32, A100),
    ("sm80", FLOAT32.with_(precision="tf32"), A100),
    ("sm80:backward", FLOAT32.with_(needs_grad=True), A100),
]
SWEEP_IDS = [f"{backend} {problem.dtype} {problem.precision} {problem.needs_grad}" for backend, problem, _ in SWEEPS]


def chosen_config(backend: str, problem: Problem, target: Target) -> Any:
    found = plan(problem, target, backend.partition(":")[0])
    return found.backward_config if backend.endswith(":backward") else found.config


@pytest.mark.parametrize(("backend", "problem", "target"), SWEEPS, ids=SWEEP_IDS)
def test_every_family_is_tuned_into_the_plan(
    backend: str, problem: Problem, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are made up, and kernels are not built: the search, the table and the planner are the real ones."""
    monkeypatch.setattr(tune, "_build", lambda units: ([], tune.BUILT, ""))
    before = plan(problem, target, backend.partition(":")[0])
    space = search_space(backend_of(backend), problem, target)
    shipped = chosen_config(backend, problem, target)
    assert shipped in space
    assert len({tune.label_of(config) for config in space}) == len(space) > 1
    wanted = next(config for config in reversed(space) if config not in backend_of(backend).shipped(problem, target))
    settings = tune.Settings()
    found = tune.sweep(backend, problem, target, lambda config, *_: [1.0 if config == wanted else 2.0], settings)
    assert tune.conclusion(found, settings).count("2.00x faster than the shipped choice") == 1
    path = tune.keep(found, settings, ["test"])
    assert path is not None
    assert path.name.startswith(f"{backend.partition(':')[0]}.nvidia"), "one table for both directions"
    show(found, settings)
    assert f"backend {backend}" in capsys.readouterr().out

    after = plan(problem, target, backend.partition(":")[0])
    assert chosen_config(backend, problem, target) == wanted
    of_backward = backend.endswith(":backward")
    assert (after.config if of_backward else after.backward_config) == (
        before.config if of_backward else before.backward_config
    )
    program = after.backward if of_backward else after.forward
    assert program is not None
    assert program != (before.backward if of_backward else before.forward)
    cited = [line for line in str(after).splitlines() if "tuned on" in line]
    assert len(cited) == 1
    assert ("backward: config tuned" in cited[0]) == of_backward
    for other in (problem.with_(seq_q=problem.seq_q // 4), problem.with_(mask=Full()), problem.with_(softcap=2.0)):
        assert wanted not in backend_of(backend).configs(other, target)
    if of_backward:
        for change in ({"deterministic": True}, {"heads_kv": 4}):
            assert wanted not in backend_of(backend).configs(problem.with_(**change), target)
    record = tune.record([found], settings, ["test"])
    assert record["sweeps"][0]["backend"] == backend
    assert "tilewise tune" in pages.page(record)


@pytest.mark.parametrize(("backend", "problem", "target"), SWEEPS, ids=SWEEP_IDS)
def test_every_config_travels_by_name(backend: str, problem: Problem, target: Target) -> None:
    for config in search_space(backend_of(backend), problem, target):
        name = name_of(backend, config)
        assert is_variant(name)
        assert Candidate(name).is_ours
        assert resolve(name) == (backend_of(backend), config)


def test_kernels_of_a_backward_are_built_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled for sm_80 here, with a made-up clock."""
    problem, settings = FLOAT32.with_(needs_grad=True), tune.Settings(max_configs=3)
    found = tune.sweep("sm80:backward", problem, A100, lambda config, *_: [1e-3 * config.block_q], settings)
    assert found.complete
    assert len(found.trials) == 3
    shipped = found[found.shipped]
    (facts,) = tune.resources(found, shipped)
    assert (facts["spilt"], shipped.verdict) == (0, tune.MEASURED)
    show(found, settings)
    assert shipped.label in capsys.readouterr().out


def test_the_command_tunes_the_backward_with_grad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the options to what explain says; the device and the clock are made up, and kernels are not built."""
    asked: list[tuple[str, Problem]] = []

    class Watch:
        def __init__(self, backend: str, problem: Problem, *_: object) -> None:
            asked.append((backend, problem))

        def __enter__(self) -> Callable[..., list[float]]:
            return lambda config, *_: [1.0 / (config.block_q + config.stages)]

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "_build", lambda units: ([], tune.BUILT, ""))
    monkeypatch.setattr(tune, "Stopwatch", Watch)
    monkeypatch.setattr("tilewise.lab.commands.options.make_device", lambda text: "cuda")
    where = ["--shape", "1,16,8192,128", "--mask", "causal", "--grad", "--deterministic"]
    with assumed(H200, "cuda"):
        done = CliRunner().invoke(app, ["tune", *where])
    assert done.exit_code == 0, done.output
    ((backend, problem),) = asked
    assert (backend, problem.needs_grad, problem.deterministic) == ("sm90:backward", True, True)
    assert "the planner uses it from now on" in done.output
    assert "backend sm90:backward" in done.output
    assert "backward: config tuned on NVIDIA H200" in str(plan(problem, H200))
    with assumed(H200, "cuda"):
        done = CliRunner().invoke(app, ["tune", *where[:-1], "--backend", "torch-cudnn"])
    assert done.exit_code == 2
    assert "configs of its own: sm80, sm90" in done.output


def test_the_stopwatch_times_a_backward_and_verifies_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, dict[str, Any]]] = []

    class Worker:
        alive = True

        def ask(self, do: str, limit: float, **arguments: Any) -> Any:
            done.append((do, arguments))
            held = next((told["candidate"] for what, told in reversed(done) if what == "prepare"), "")
            wrong = ["dk is off"] if "block_q=128" in held else []
            return {"wrong": wrong} if do == "verify" else [1.0]

        def close(self) -> None: ...

    monkeypatch.setattr(tune, "Process", Worker)
    some, other = (dataclasses.replace(chosen_config(*SWEEPS[0]), block_q=block_q) for block_q in (64, 128))
    with tune.Stopwatch("sm90:backward", TRAIN, "cuda", tune.Settings()) as stopwatch:
        assert stopwatch(some, 0.1, True) == [1.0]
        with pytest.raises(Failure) as failure:
            stopwatch(other, 0.1, True)
    assert failure.value.hint == "dk is off"
    prepared = next(arguments for do, arguments in done if do == "prepare")
    assert prepared["candidate"] == name_of("sm90:backward", some)
    assert prepared["problem"]["needs_grad"]
    assert [arguments["what"] for do, arguments in done if do == "time"] == ["backward"]


def test_a_config_spelled_out_has_gradients() -> None:
    problem = make_problem((1, 4, 40, 16), heads_kv=2, mask=Causal(), needs_grad=True)
    candidate = Candidate("tiled@block_q=16,block_kv=32")
    inputs = candidate.inputs(problem, 0, "cpu")
    out = candidate.forward(problem, inputs)()
    want = exact(*inputs[:3], problem, None, inputs.dout)
    grads = torch.autograd.grad(out, inputs[:3], inputs.dout)
    for what, got, true in zip(("out", "dq", "dk", "dv"), (out, *grads), (want[0], *want[2:]), strict=True):
        assert_close(got, true, budget(problem.dtype, problem.seq_kv), what)


def test_a_tuned_backward_that_does_not_build_gives_way_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its entry counts no more; the forward's entry, and the kernel that ships, stay."""
    direction = SM90.backward_direction
    shipped = plan(TRAIN, H200)
    forward = other_config(TRAIN)
    backward = next(c for c in search_space(direction, TRAIN, H200) if c not in direction.shipped(TRAIN, H200))
    key, sizes = direction.tuning_key(TRAIN)
    tuned.write("sm90", H200.name, entry_for(TRAIN, forward))
    tuned.write("sm90", H200.name, entry_for(TRAIN, backward, key=key, sizes=sizes))
    chosen = plan(TRAIN, H200)
    assert (chosen.config, chosen.backward_config) == (forward, backward)
    assert chosen.backward is not None
    error = CompileError("it spills")
    error.unit = next(unit.label for unit in chosen.backward.units if "backward" in unit.label)
    with caplog.at_level(logging.WARNING, "tilewise"):
        build._leave_out(chosen, error, "auto")
    again = plan(TRAIN, H200)
    assert (again.config, again.backward_config) == (forward, shipped.backward_config)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not build here" in caplog.text
