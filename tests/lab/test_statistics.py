"""The statistic of every comparison: simulated experiments whose truth is known, and its parts by hand."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import instrument
import pytest
import torch
from test_lab import FakePool

from support import make_problem
from tilewise.lab import units
from tilewise.lab.candidates.names import Candidate, make_inputs
from tilewise.lab.measure import noise, statistics, words
from tilewise.lab.measure.compare import Comparison, Row, Settings, compare, read_comparison
from tilewise.lab.measure.statistics import FASTER, INDISTINGUISHABLE, SAME, SLOWER, TOO_FEW, Speed, speed
from tilewise.plan import plan
from tilewise.target import Target

if TYPE_CHECKING:
    from pathlib import Path

FIRST, MOST = 7, 47  # rounds: before the first look, and at most


def autoregressive(experiments: int, rounds: int, correlation: float, generator: torch.Generator) -> torch.Tensor:
    fresh = torch.randn(experiments, rounds, generator=generator, dtype=torch.float64)
    for number in range(1, rounds):
        fresh[:, number] *= math.sqrt(1 - correlation**2)
        fresh[:, number] += correlation * fresh[:, number - 1]
    return fresh


def simulated(experiments: int, slowdown: float, correlation: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seconds of a candidate and of another that is `slowdown` times as fast, (experiments, rounds) each.

    The machine drifts by a slope and a random walk over the whole experiment. A round times one candidate, then the
    other, in random order. One in twelve measurements is an outlier, half of the experiments have a burst of them over
    three rounds, and each candidate's own noise is correlated from round to round.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = experiments, MOST

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    times = torch.arange(2 * MOST, dtype=torch.float64) / (2 * MOST)
    machine = 0.2 * normal(experiments, 1) * times + 0.02 * normal(experiments, 2 * MOST).cumsum(1)
    first = uniform(*shape) < 0.5
    begin = (uniform(experiments, 1) * MOST).floor()
    rounds = torch.arange(MOST, dtype=torch.float64)
    burst = (uniform(experiments, 1) < 0.5) & (rounds >= begin) & (rounds < begin + 3)
    found = []
    for is_first in (first, ~first):
        spoilt = (uniform(*shape) < 1 / 12) | (burst & (uniform(*shape) < 0.5))
        noise = 0.03 * autoregressive(*shape, correlation, generator) - 0.5 * spoilt * uniform(*shape).log()
        found.append(torch.where(is_first, machine[:, 0::2], machine[:, 1::2]) + noise)
    return (found[0] + math.log(slowdown)).exp(), found[1].exp()


def measured(mine: list[float], theirs: list[float]) -> Speed:
    """As the commands measure: more rounds until it is settled, or there are no more."""
    for look, rounds in enumerate(statistics.looks(FIRST, MOST), start=1):
        found = speed(mine[:rounds], theirs[:rounds], looks=look)
        assert found is not None
        if found.settled:
            break
    return found


def claims(experiments: int, slowdown: float, correlation: float, seed: int) -> dict[str, float]:
    """The share of each verdict."""
    mine, theirs = simulated(experiments, slowdown, correlation, seed)
    found = [measured(*pair).verdict for pair in zip(mine.tolist(), theirs.tolist(), strict=True)]
    return {verdict: found.count(verdict) / experiments for verdict in (FASTER, SLOWER, INDISTINGUISHABLE)}


@pytest.mark.parametrize(("correlation", "experiments"), [(0.0, 2000), (0.3, 3000), (0.6, 5000)])
def test_equals_are_told_apart_in_under_two_percent(correlation: float, experiments: int) -> None:
    """Ten thousand experiments in all. The worst of the three is held to the limit, not their mean."""
    found = claims(experiments, 1.0, correlation, seed=1)
    assert found[FASTER] + found[SLOWER] < 0.02


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_a_slowdown_of_ten_percent_is_found(correlation: float) -> None:
    found = claims(1500, 1.1, correlation, seed=2)
    assert found[SLOWER] >= 0.95
    assert found[FASTER] == 0


def test_looking_once_more_each_round_would_make_false_claims() -> None:
    """What the correction for repeated looks is there for: the simulation is one in which it matters."""
    mine, theirs = simulated(1000, 1.0, 0.6, seed=3)
    wrong = 0
    for ours, others in zip(mine.tolist(), theirs.tolist(), strict=True):
        found = (speed(ours[:rounds], others[:rounds]) for rounds in range(FIRST, MOST))
        wrong += any(one is not None and one.differs for one in found)
    assert wrong / 1000 > 0.02


def test_the_median_of_the_ratios_without_an_interval_claims_noise() -> None:
    """A rule of thumb, 2% between medians of seven rounds, claims a difference between equals most of the time."""
    mine, theirs = simulated(1000, 1.0, 0.3, seed=4)
    ratios = (theirs[:, :FIRST] / mine[:, :FIRST]).median(1).values
    assert float(((ratios > 1.02) | (ratios < 1 / 1.02)).double().mean()) > 0.3


def test_a_drift_that_both_share_cancels() -> None:
    drift = [math.exp(0.1 * number) for number in range(9)]
    found = speed([2.0 * value for value in drift], [3.0 * value for value in drift])
    assert found is not None
    assert found.ratio == pytest.approx(1.5)
    assert found.verdict == FASTER


def test_one_absurd_round_does_not_move_the_ratio() -> None:
    mine = [1.0, 1.01, 0.99, 1.0, 222.0, 1.01, 0.99]
    theirs = [1.2, 1.21, 1.19, 1.2, 1.2, 1.21, 1.19]
    found = speed(mine, theirs)
    assert found is not None
    assert 1.15 < found.ratio < 1.25
    assert found.verdict == FASTER


def test_few_rounds_have_a_ratio_and_no_verdict() -> None:
    found = speed([1.0] * 4, [2.0] * 4, against="torch-flash")
    assert found is not None
    assert (found.ratio, found.low, found.high, found.verdict) == (2.0, None, None, TOO_FEW)
    assert not found.settled
    assert found.to_dict()["against"] == "torch-flash"
    assert speed([], [1.0]) is None


def test_the_interval_is_never_narrower_than_what_two_processes_differ_by() -> None:
    found = speed([1.0] * 20, [1.009] * 20)
    assert found is not None
    assert found.verdict == INDISTINGUISHABLE
    assert found.settled


def test_the_same_kernels_are_never_compared() -> None:
    found = statistics.same([1.0] * 9, [3.0] * 9, "torch-default")
    assert found is not None
    assert found.verdict == SAME
    assert not found.differs


def test_more_looks_and_more_candidates_widen_the_interval() -> None:
    mine, theirs = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02], [1.2, 1.1, 1.3, 1.15, 1.25, 1.2, 1.22]
    widths = []
    for looks, among in ((1, 1), (2, 1), (3, 1), (3, 8)):
        found = speed(mine, theirs, looks=looks, among=among)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        widths.append(found.high / found.low)
    assert widths == sorted(set(widths))


def test_swapping_the_candidates_inverts_the_ratio() -> None:
    mine, theirs = [1.0, 1.1, 0.9, 1.05, 0.95], [1.2, 1.1, 1.3, 1.15, 1.25]
    one, other = speed(mine, theirs), speed(theirs, mine)
    assert one is not None
    assert other is not None
    assert one.ratio * other.ratio == pytest.approx(1.0)
    assert one.low is not None
    assert other.high is not None
    assert one.low * other.high == pytest.approx(1.0)


def test_looks_grow_and_end_at_the_most() -> None:
    assert list(statistics.looks(7, 47)) == [7, 11, 17, 26, 39, 47]
    assert list(statistics.looks(7, 7)) == [7]
    assert list(statistics.looks(7, 3)) == [3]


# Two-sided quantiles of Student's t, from printed tables.
@pytest.mark.parametrize(
    ("alpha", "freedom", "value"),
    [(0.05, 1, 12.706), (0.01, 2, 9.925), (0.001, 3, 12.924), (0.01, 4, 4.604), (0.05, 10, 2.228), (0.01, 30, 2.750)],
)
def test_quantiles_of_students_t(alpha: float, freedom: int, value: float) -> None:
    assert statistics.student(alpha, freedom) == pytest.approx(value, abs=0.001)


# --- in a comparison -------------------------------------------------------------------------------------------------


class Noisy(FakePool):
    """Times that scatter by a factor, the same for everybody unless told otherwise."""

    def __init__(self, seconds: dict[str, float], scatter: float) -> None:
        super().__init__(seconds)
        self._random, self._scatter = random.Random(5), scatter

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        answer = super().ask(name, do, limit, **arguments)
        factor = math.exp(self._random.gauss(0.0, self._scatter)) if do == "time" else 1.0
        return [value * factor for value in answer] if do == "time" else answer


def comparison_of(pool: FakePool, names: tuple[str, ...], **settings: Any) -> Comparison:
    return compare(Row("a row", make_problem((1, 2, 8, 8)), names), pool, Settings(**settings))  # type: ignore[arg-type]


def test_rounds_go_on_until_the_intervals_are_narrow() -> None:
    names = ("tilewise", "torch-default", "reference")
    quiet = comparison_of(Noisy({"reference": 0.1}, 0.001), names, rounds=7, max_rounds=47)
    assert (len(quiet.orders), quiet.looks) == (7, 1)
    noisy = comparison_of(Noisy({"reference": 0.1}, 0.08), names, rounds=7, max_rounds=47)
    assert len(noisy.orders) > 7
    assert noisy.looks > 1
    # One that is told apart needs no more rounds; those that are not stay, and their rounds are paired.
    assert len(noisy["reference"].costs) < len(noisy["tilewise"].costs) == len(noisy["torch-default"].costs)
    told = noisy.to_dict()
    assert {row["candidate"]: row["speed"]["verdict"] for row in told["candidates"]}["reference"] == SLOWER
    assert read_comparison(told).looks == noisy.looks


def test_no_more_rounds_when_the_time_is_up() -> None:
    names = ("tilewise", "torch-default")
    ended = comparison_of(Noisy({}, 0.1), names, rounds=7, max_rounds=47, more_seconds=0.0)
    assert len(ended.orders) == 7
    assert ended.to_dict()["undecided"] is True


def test_candidates_of_the_same_kernels_are_one_entry() -> None:
    pool = Noisy({"torch-default": 0.03, "torch-flash": 0.01}, 0.001)  # as far apart as noise ever was
    pool.runs = {"tilewise": "torch-flash", "torch-default": "torch-flash", "torch-flash": "torch-flash"}
    found = comparison_of(pool, ("reference", "tilewise", "torch-default", "torch-flash"), rounds=7)
    assert [outcome.candidate for outcome in found.entries()] == ["reference", "tilewise"]
    rows = {row["candidate"]: row for row in found.to_dict()["candidates"]}
    assert {name: row["same_as"] for name, row in rows.items()} == {
        "reference": "", "tilewise": "", "torch-default": "tilewise", "torch-flash": "tilewise",
    }  # fmt: skip
    assert rows["tilewise"]["speed_default"]["verdict"] == SAME
    assert rows["torch-flash"]["speed_default"]["verdict"] == SAME
    assert rows["reference"]["speed_default"]["verdict"] == FASTER


def test_workers_name_the_kernels_they_come_to() -> None:
    problem = make_problem((1, 2, 16, 8))
    inputs = make_inputs(problem, 0, "cpu")
    found = {}
    for name in ("tilewise", "torch-default", "torch-flash", "torch-math", "tiled", "flags:math", "flex"):
        with Candidate(name).context(problem):
            found[name] = Candidate(name).runs(problem, inputs)
    assert found["tilewise"] == plan(problem, Target.of("cpu")).backend
    assert found["torch-default"] == found["torch-flash"] == "torch-flash"
    assert found["torch-math"] == found["flags:math"] == "torch-math"
    assert (found["tiled"], found["flex"]) == ("tiled", "")


def test_cells_say_what_may_be_said() -> None:
    assert words.cell(Speed(1.34, 1.29, 1.4, 9)) == "1.34x [1.29, 1.40]"
    assert words.cell(Speed(1.01, 0.97, 1.05, 9)) == "~1.01x [0.97, 1.05]"
    assert words.cell(Speed(0.07, 0.0001, 2333.0, 9)) == "~0.07x [all noise]"
    assert words.cell(Speed(33.0, 30.0, 36.0, 9, same=True)) == "="
    assert words.cell(Speed(2.0, None, None, 3)) == "2.00x ?"
    assert words.cell(None) == "-"
    slower = Speed(0.5, 0.4, 0.8, 9)
    assert f"{words.claim(slower)} it{words.interval(slower)}" == "2.00x slower than it (1.25x to 2.50x)"
    assert [units.duration(seconds) for seconds in (7.14e-6, 2.0, 0.0015, 3e-8)] == [
        "7.14 us", "2.00 s", "1.50 ms", "30.0 ns",
    ]  # fmt: skip


def test_a_loaded_machine_is_told() -> None:
    assert noise.busy(1.9, 2) == ""
    assert "a load of 2.6 on 2 cores" in noise.busy(2.6, 2)
    assert noise.busy(2.6, 2, ours=3) == "", "our own threads are not others'"
    assert noise.shared("0") == noise.shared("[N/A]") == noise.shared("") == ""
    assert "87% busy" in noise.shared("87")
    assert noise.held_back("0x0000000000000001") == noise.held_back("0x4") == noise.held_back("") == ""
    assert "heat (hardware)" in noise.held_back("0x0000000000000044")


def test_a_loaded_machine_claims_only_what_scheduling_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share cores get shares that differ for longer than a comparison takes: its rounds do not show it."""
    assert statistics.resolution_at(0.5) == statistics.resolution_at(1.0) == statistics.RESOLUTION
    assert statistics.resolution_at(4.0) == pytest.approx(math.log(4.0))
    monkeypatch.setattr(noise, "load", lambda: 8.0)
    monkeypatch.setattr(noise, "cores", lambda: 2)
    pool = FakePool({"torch-default": 0.03, "reference": 0.09})
    found = comparison_of(pool, ("tilewise", "torch-default", "reference"), rounds=7)
    verdicts = {row["candidate"]: row["speed"]["verdict"] for row in found.to_dict()["candidates"]}
    assert verdicts["tilewise"] == INDISTINGUISHABLE, "three times as fast, with four threads for each core"
    ours, reference = found["tilewise"], found["reference"]
    assert found.versus(ours, reference).verdict == FASTER  # type: ignore[union-attr]
    assert read_comparison(found.to_dict()).load == 4.0
    found.row = replace(found.row, device="cuda", method="events")  # a GPU's own clock does not share cores
    assert found.versus(ours, found["torch-default"]).verdict == FASTER  # type: ignore[union-attr]


def test_a_gpu_is_asked_through_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$2" in *utilization*) echo 87;; *) echo 0x0000000000000040;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    noise.shared_at_start.cache_clear()
    try:
        shared, throttled = noise.Machine("cuda:1").told()
        assert "87% busy before this began" in shared
        assert "heat (hardware)" in throttled
        tool.write_text("#!/bin/sh\necho 0\n")
        assert "87% busy" in noise.Machine("cuda:1").told()[0], "what uses it now may be our own"
        assert noise.Machine("cpu").told() == []
        tool.write_text("#!/bin/sh\nexit 6\n")  # a driver that does not know the field
        noise.shared_at_start.cache_clear()
        assert noise.Machine("cuda").told() == []
    finally:
        noise.shared_at_start.cache_clear()


def test_a_comparison_carries_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "load", lambda: 9.0)
    monkeypatch.setattr(noise, "cores", lambda: 2)
    found = comparison_of(FakePool({}), ("tilewise",), rounds=1)
    assert found.noise == ["the machine is busy: a load of 9.0 on 2 cores; end what else runs, and measure again"]
    assert read_comparison(found.to_dict()).noise == found.noise


def test_the_check_of_the_instrument_counts_false_claims(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def runs(claimed: int) -> list[Comparison]:
        times = [{"torch-default": 0.02}] * claimed + [{}] * (100 - claimed)
        return [comparison_of(FakePool(seconds), ("tilewise", "torch-default"), rounds=7) for seconds in times]

    monkeypatch.setattr(instrument, "loaded", lambda processes: contextlib.nullcontext())
    for claimed, code in ((0, 0), (2, 0), (3, 1)):
        monkeypatch.setattr(instrument, "run", lambda *_, claimed=claimed: iter(runs(claimed)))
        folder = tmp_path / str(claimed)
        assert instrument.main(["--runs", "100", "--device", "cpu", "--save", "--results", str(folder)]) == code
        assert f"{claimed} false claims in 100 runs" in capsys.readouterr().out
        (path,) = folder.glob("*-instrument.json")
        told = json.loads(path.read_text())
        assert (told["claims"], told["allowed"], len(told["runs"])) == (claimed, 2, 100)
        assert told["provenance"]["versions"]["torch"]


def test_the_twins_of_the_check_are_two_candidates() -> None:
    """From end to end, once: two processes, one function, never one entry."""
    problem = make_problem((1, 1, 16, 8))
    (found,) = instrument.run(1, "cpu", Settings(rounds=5, round_seconds=0.001, time_limit=60.0), problem)
    assert [len(outcome.costs) for outcome in found.outcomes] == [5, 5]
    speed_of_one = found.versus(found.outcomes[0], found.outcomes[1])
    assert speed_of_one is not None
    assert not speed_of_one.same
