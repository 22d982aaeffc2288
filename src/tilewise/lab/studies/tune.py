"""tune: the fastest config of a kernel for a problem, by measuring every legal one; the planner then uses it.

    1. build every config of the backend's search space; one that spills or does not compile is a row, not measured
    2. round 0: verify each against float64, then time it briefly; one that is wrong, dies or hangs is a row
    3. keep the fastest third and time those three times as long, until a handful is left (successive halving)
    4. the finalists, the shipped choice among them, in interleaved rounds, more of them until one is told apart from
       the shipped choice or all are known to be no faster: ratios round by round, with an interval (see `statistics`)
    5. write the winner, with its provenance and the runners-up, into the user's table (jit/tuned.py). Where the
       shipped choice stays, nothing is written, unless an earlier entry of the table has to go

A forward and a backward are tuned apart: `sm90` and `sm90:backward` are two sweeps. What is timed of a backward is the
backward alone, over one recorded forward, and its gradients are verified before; the table is the same.

Hundreds of configs cost minutes: most get one short measurement. What is measured is kept in a file as it comes, line
by line, so that an interrupted sweep goes on where it stopped. Time is taken by one function, a parameter: everything
else runs the same without a GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CompileError, InvalidInput, UnsupportedProblem
from ...jit import build, cache, trust, tuned
from ...plan import plan
from ...problem import Problem
from ...target import Target
from .. import report
from ..candidates.variants import BACKWARD, backend_of, has_backward, is_variant, name_of, stages_of, units_of
from ..measure import environment, noise, statistics, words
from ..measure.compare import WRONG, median, summary
from ..measure.pool import Failure, Process
from ..model import launched
from ..model.kernels import occupancy
from . import records
from .search_space import has_search_space, label_of, search_space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...jit import Kernel, Unit
    from ..measure.statistics import Speed
    from ..model.launched import Launched

KIND = "tilewise tune"
BUILT = "built"
MEASURED = "measured"
UNFIT = "does not build"
SPILLS = "spills"
_RUNNERS_UP = 5
_WORKER_LIFE = 64  # configs a worker measures before a fresh one takes over: loaded kernels are never unloaded

_log = logging.getLogger("tilewise")

Tick = Callable[[str], None]
Measure = Callable[[Any, float, bool], list[float]]
"""(config, seconds, first) -> seconds per call, several; verifies when `first`; raises Failure for what goes wrong."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to sweep. Seconds are of measured time for one config and round; `max_configs` 0 means every config."""

    first_seconds: float = 0.02
    keep: int = 3  # one in so many goes on to the next round
    finalists: int = 8
    final_rounds: int = 9
    max_final_rounds: int = 27
    final_seconds: float = 0.05
    gain: float = 1.01  # a winner must be so many times faster than the shipped choice, and that beyond the noise
    time_limit: float = 30.0
    max_configs: int = 0
    seed: int = 0


@dataclass(slots=True)
class Trial:
    """One config: what the compiler said of it, and its samples by round; or what went wrong, and why."""

    config: Any
    label: str
    verdict: str = BUILT
    because: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    rounds: dict[int, list[float]] = field(default_factory=dict)
    turns: list[float] = field(default_factory=list)  # seconds of each turn of the final

    @property
    def running(self) -> bool:
        return self.verdict in (BUILT, MEASURED)

    @property
    def last_round(self) -> int:
        return max(self.rounds, default=-1)

    @property
    def samples(self) -> list[float]:
        """Samples of the last round it took part in: later rounds are longer."""
        return self.rounds.get(self.last_round, [])

    @property
    def seconds(self) -> float:
        return median(self.samples)


@dataclass(slots=True)
class Sweep:
    """A problem and all that was measured for it."""

    backend: str
    problem: Problem
    target: Target
    trials: list[Trial]
    shipped: str  # label of the choice without tuning
    complete: bool = False
    written: Path | None = None
    looks: int = 1  # at the final's times
    load: float = 1.0  # threads per core that wanted to run meanwhile, where times are those of threads
    noise: list[str] = field(default_factory=list)  # what the machine did meanwhile that spoils times

    def __getitem__(self, label: str) -> Trial:
        return next(trial for trial in self.trials if trial.label == label)

    def ranked(self) -> list[Trial]:
        """Measured trials, the furthest and fastest first."""
        done = [trial for trial in self.trials if trial.verdict == MEASURED]
        return sorted(done, key=lambda trial: (-trial.last_round, trial.seconds))

    def finalists(self) -> list[Trial]:
        return [trial for trial in self.ranked() if trial.turns]

    def speed(self, trial: Trial) -> Speed | None:
        """Against the shipped choice, turn by turn of the final; None for what was not in it."""
        shipped = next((one for one in self.finalists() if one.label == self.shipped), None)
        if shipped is None:
            return None
        if trial is shipped:
            return statistics.same(trial.turns, trial.turns, shipped.label)
        among = max(1, len(self.finalists()) - 1)
        return statistics.speed(
            trial.turns,
            shipped.turns,
            looks=self.looks,
            among=among,
            against=shipped.label,
            resolution=statistics.resolution_at(self.load),
        )

    def unsettled(self) -> list[Trial]:
        """Finalists that more turns would tell apart from the shipped choice, and that choice."""
        found = [trial for trial in self.finalists() if (speed := self.speed(trial)) and not speed.settled]
        found = [trial for trial in found if trial.label != self.shipped]
        return [*found, *(trial for trial in self.finalists() if found and trial.label == self.shipped)]

    def winner(self, gain: float) -> Trial | None:
        """The finalist that is fastest of those that beat the shipped choice: by `gain`, and beyond the noise. The
        shipped choice, if none does; without a time of it, the one that came furthest and is fastest."""
        ranked = self.ranked()
        if not ranked:
            return None
        shipped = next((trial for trial in ranked if trial.label == self.shipped), None)
        if shipped is None:
            return ranked[0]
        speeds = [(speed.ratio, trial) for trial in self.finalists() if (speed := self.speed(trial)) and _beats(speed)]
        ratio, best = max(speeds, key=lambda pair: pair[0], default=(1.0, shipped))
        return best if ratio >= gain else shipped

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "problem": self.problem.to_dict(),
            "device": self.target.name,
            "shipped": self.shipped,
            "complete": self.complete,
            "noise": self.noise,
            "written": str(self.written) if self.written else None,
            "trials": [_trial_dict(trial) | self._standing(trial) for trial in self.trials],
        }

    def _standing(self, trial: Trial) -> dict[str, Any]:
        speed = self.speed(trial)
        return {"launches": resources(self, trial), "speed": speed.to_dict() if speed else None}


def _beats(speed: Speed) -> bool:
    return speed.verdict == statistics.FASTER


def run(
    problems: list[Problem],
    backend: str,
    device: str,
    settings: Settings,
    method: str = "",
    fresh: bool = False,
    *,
    write: bool = True,
) -> list[Sweep]:
    """Sweep problem by problem on a real device, with a progress bar; winners go into the table as they are found."""
    target = Target.of(device)
    chosen = [_planned(problem, target, backend) for problem in problems]
    total = sum(steps(name, problem, target, settings) for name, problem in zip(chosen, problems, strict=True))
    done: list[Sweep] = []
    with report.Bar(total) as bar:
        for name, problem in zip(chosen, problems, strict=True):
            state = State(state_path(name, problem, target, settings))
            if fresh:
                state.discard()
            machine = noise.Machine(device)
            with Stopwatch(name, problem, device, settings, method) as stopwatch:
                found = sweep(name, problem, target, stopwatch, settings, bar.tick, state)
            found.noise = machine.told()
            done.append(found)
            if not found.complete:
                break
            if write and not is_variant(name):
                keep(found, settings, environment.command_line())
            state.discard()
    return done


def _planned(problem: Problem, target: Target, backend: str) -> str:
    """The backend to tune, or its backward where gradients are wanted; UnsupportedProblem if it does not take the
    problem. A rung is tuned where it is named."""
    if is_variant(backend):
        reasons = backend_of(backend).why_not(problem, target)
        if reasons:
            raise UnsupportedProblem(f"{backend} does not take {problem}: {'; '.join(map(str, reasons))}", problem)
        return backend
    chosen = plan(problem, target, backend).backend
    if not problem.needs_grad:
        return chosen
    if not has_backward(chosen):
        raise InvalidInput(
            "--grad", f"the backend {chosen}", "one whose backward has configs of its own: sm80, sm90", "leave it out"
        )
    return chosen + BACKWARD


def _table_of(backend: str) -> str:
    """Whose table an entry goes into: both directions share one."""
    return backend.removesuffix(BACKWARD)


def sweep(
    backend: str,
    problem: Problem,
    target: Target,
    measure: Measure,
    settings: Settings,
    tick: Tick = lambda text: None,
    state: State | None = None,
) -> Sweep:
    """Build, halve and rank. Never raises for what a config does; an interrupt leaves `complete` False."""
    state = State(None) if state is None else state
    shipped, space = search(backend, problem, target, settings)
    trials = [Trial(config, label_of(config)) for config in space]
    found = Sweep(backend, problem, target, trials, label_of(shipped))
    try:
        _build_all(found, tick)
        _halve(found, measure, settings, tick, state)
        found.complete = True
    except KeyboardInterrupt:
        pass
    return found


def search(backend: str, problem: Problem, target: Target, settings: Settings) -> tuple[Any, list[Any]]:
    """The shipped choice, and every config to measure: it first, then the rest in a random order that the seed fixes.

    Why random: a drift during the sweep (clocks, temperature) then favours no kind of config.
    """
    module = backend_of(backend)
    if not has_search_space(module):
        raise InvalidInput("--backend", repr(backend), "a backend with configs to choose from", "tune sm90 or tiled")
    shipped = module.shipped(problem, target)[0]
    rest = [config for config in search_space(module, problem, target) if config != shipped]
    random.Random(settings.seed).shuffle(rest)
    if settings.max_configs:
        rest = rest[: settings.max_configs - 1]
    return shipped, [shipped, *rest]


def _build_all(found: Sweep, tick: Tick) -> None:
    """Compile side by side, where the backend has kernels to compile. An interrupt lets running builds end, no more."""
    module = backend_of(found.backend)
    if not hasattr(module, "unit"):
        return
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {pool.submit(_build, _units(found, trial)): trial for trial in found.trials}
        try:
            for number, job in enumerate(concurrent.futures.as_completed(jobs)):
                trial = jobs[job]
                trial.kernels, trial.verdict, trial.because = job.result()
                tick(f"built {number + 1} of {len(jobs)}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _units(found: Sweep, trial: Trial) -> list[Unit]:
    return units_of(backend_of(found.backend), found.problem, trial.config, found.target.arch)


def _build(units: list[Unit]) -> tuple[list[Kernel], str, str]:
    """The kernels and what is wrong with them, if anything. Spilling ones are built too, to show by how much."""
    try:
        return [build(unit, announce=False) for unit in units], BUILT, ""
    except CompileError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines[1:] if line and not line.startswith(("Full log", "What to do"))), lines[0])
    try:
        kernels = [build(dataclasses.replace(unit, strict=False), announce=False) for unit in units]
    except CompileError:
        return [], UNFIT, why
    spilt = any(kernel.resources.spill_store_bytes or kernel.resources.spill_load_bytes for kernel in kernels)
    return kernels, SPILLS if spilt else UNFIT, why


def _halve(found: Sweep, measure: Measure, settings: Settings, tick: Tick, state: State) -> None:
    """Rounds of ever fewer and longer measurements, then the finalists in turns. The shipped choice is always kept."""
    racing = [trial for trial in found.trials if trial.running]
    number, seconds = 0, settings.first_seconds
    for number, seconds in _rounds(len(racing), settings):
        for trial in racing:
            tick(f"round {number + 1}: {len(racing)} configs, {trial.label}")
            _take(trial, number, seconds, measure, state)
        racing = _fastest([trial for trial in racing if trial.running], found.shipped, number, settings)
    final = number + 1 if racing and racing[0].rounds else 0
    order = random.Random(settings.seed)
    done = 0
    for look, until in enumerate(statistics.looks(settings.final_rounds, settings.max_final_rounds), start=1):
        found.looks = look
        found.load = max(found.load, noise.overload() if found.target.is_cpu else 1.0)
        for turn in range(done, until):
            for trial in order.sample(racing, len(racing)):
                if trial.running:
                    tick(f"final {turn + 1}: {trial.label}")
                    _take(trial, final, settings.final_seconds, measure, state, turn, is_final=True)
        done = until
        # Invariant: the turns of a finalist are the first of all: one that is left out does not come back.
        racing = [trial for trial in found.unsettled() if len(trial.turns) == until]
        if len(racing) < 2:
            return


def _rounds(count: int, settings: Settings) -> Iterator[tuple[int, float]]:
    """(number, seconds) of the rounds before the final, as many as bring `count` down to the finalists."""
    number = 0
    while count > settings.finalists:
        yield number, settings.first_seconds * settings.keep**number
        count = max(settings.finalists, math.ceil(count / settings.keep))
        number += 1


def _fastest(racing: list[Trial], shipped: str, number: int, settings: Settings) -> list[Trial]:
    wanted = max(settings.finalists, math.ceil(len(racing) / settings.keep))
    ranked = sorted(racing, key=lambda trial: median(trial.rounds[number]))
    kept = ranked[:wanted]
    return kept + [trial for trial in ranked[wanted:] if trial.label == shipped]


def _take(
    trial: Trial, number: int, seconds: float, measure: Measure, state: State, turn: int = 0, *, is_final: bool = False
) -> None:
    """One measurement, from the state file if it is there already; a failure becomes the trial's verdict."""
    known = state.find(trial.label, number, turn)
    if known is None:
        try:
            known = {"samples": measure(trial.config, seconds, not trial.rounds)}
        except Failure as failure:
            known = {"failed": failure.text, "because": failure.hint}
        state.add(trial.label, number, turn, known)
    if "failed" in known:
        trial.verdict, trial.because = known["failed"], known["because"]
        return
    trial.verdict = MEASURED
    trial.rounds.setdefault(number, []).extend(known["samples"])
    if is_final:
        trial.turns.append(median(known["samples"]))


def _is_measured(entry: dict[str, Any]) -> bool:
    samples = entry.get("samples")
    return isinstance(samples, list) and bool(samples) and all(0 < float(sample) < math.inf for sample in samples)


def _has_failed(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("failed"), str) and isinstance(entry.get("because"), str)


def _for_the_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class State:
    """What was measured so far, one JSON object per line, written as it comes. A torn last line counts for nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[tuple[str, int, int], dict[str, Any]] = {}
        if path is not None and os.path.lexists(path):
            self._resume(path)

    def _resume(self, path: Path) -> None:
        """Read what is there. What is not the user's own, or no file, is reported and removed."""
        try:
            text = trust.read_trusted(path).decode(errors="replace")
            if not text.endswith("\n"):
                path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _log.warning("tilewise: the state of an earlier sweep is not used: %s", error)
            try:
                path.unlink()
            except OSError:
                self.path = None
            return
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                entry = json.loads(line)
                if _is_measured(entry) or _has_failed(entry):
                    self._known[str(entry["trial"]), int(entry["round"]), int(entry["turn"])] = entry

    def __len__(self) -> int:
        return len(self._known)

    def find(self, label: str, number: int, turn: int) -> dict[str, Any] | None:
        return self._known.get((label, number, turn))

    def add(self, label: str, number: int, turn: int, values: dict[str, Any]) -> None:
        entry = {"trial": label, "round": number, "turn": turn} | values
        self._known[label, number, turn] = entry
        if self.path is not None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8", opener=_for_the_user_alone) as file:
                file.write(json.dumps(entry) + "\n")

    def discard(self) -> None:
        self._known.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def state_path(backend: str, problem: Problem, target: Target, settings: Settings) -> Path | None:
    """Where a sweep of exactly this problem, device, kernels and settings keeps its state; None without a cache."""
    root = cache.root()
    if root is None:
        return None
    what = [backend, repr(problem), target.name, tuned.kernels_digest(backend.partition(":")[0]), repr(settings)]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return root / "tune" / f"{re.sub('[^a-z0-9]+', '-', backend)}-{digest}.jsonl"


class Stopwatch:
    """The `Measure` of real runs: a worker process that verifies and times one config at a time.

    A config that kills or hangs the worker costs one row and a restart. A context manager: no worker outlives it.
    """

    def __init__(self, backend: str, problem: Problem, device: str, settings: Settings, method: str = "") -> None:
        self._backend, self._settings = backend, settings
        self._method = method or ("events" if device.startswith("cuda") else "wall")
        self._timed = "backward" if backend.endswith(BACKWARD) else "forward"
        self._what = {"problem": problem.to_dict(), "seed": settings.seed, "device": device}
        self._folder = tempfile.TemporaryDirectory(prefix="tilewise-")
        self._truth = Path(self._folder.name) / "truth.pt"
        self._worker: Process | None = None
        self._served = 0

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()
        self._folder.cleanup()

    def __call__(self, config: Any, seconds: float, first: bool) -> list[float]:
        name = name_of(self._backend, config)
        if not self._truth.is_file():
            self._ask("truth", 10 * self._settings.time_limit, path=str(self._truth), **self._what)
        self._ask("prepare", self._settings.time_limit, candidate=name, **self._what)
        if first:
            told = self._ask("verify", self._settings.time_limit, path=str(self._truth))
            if told["wrong"]:
                raise Failure(WRONG, hint="; ".join(told["wrong"]))
        limit = self._settings.time_limit + 10 * seconds
        samples: list[float] = self._ask("time", limit, what=self._timed, method=self._method, seconds=seconds)
        self._served += 1
        return samples

    def _ask(self, do: str, limit: float, **arguments: Any) -> Any:
        if self._worker is not None and (not self._worker.alive or self._served >= _WORKER_LIFE):
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker, self._served = Process(), 0
        return self._worker.ask(do, limit, **arguments)


def entry_of(found: Sweep, settings: Settings, command: list[str]) -> dict[str, Any] | None:
    """What the table will say: the winner, how it was found, and the runners-up. None if nothing was measured."""
    winner = found.winner(settings.gain)
    if winner is None:
        return None
    speed = found.speed(winner)
    key, sizes = backend_of(found.backend).tuning_key(found.problem)
    provenance = environment.provenance(settings.seed, command)
    shipped = found[found.shipped]
    others = [trial for trial in found.ranked() if trial is not winner]
    return {
        "key": key,
        "sizes": sizes,
        "config": dataclasses.asdict(winner.config),
        "kernels": tuned.kernels_digest(_table_of(found.backend)),
        "device": found.target.name,
        "date": provenance["date"],
        "problem": str(found.problem),
        "seconds": summary(winner.samples),
        "gain": None if speed is None else speed.ratio,
        "speed": None if speed is None else speed.to_dict(),
        "shipped": {"config": dataclasses.asdict(shipped.config), "seconds": summary(shipped.samples)},
        "runners_up": [
            {
                "config": dataclasses.asdict(trial.config),
                "seconds": summary(trial.samples),
                "ratio": trial.seconds / winner.seconds,
            }
            for trial in others[:_RUNNERS_UP]
        ],
        "tried": len(found.trials),
        "measured": len(others) + 1,
        "driver": next((gpu.get("driver_version") for gpu in provenance["gpus"]), None),
        "versions": provenance["versions"],
        "source": provenance["source"],
        "command": command,
    }


def keep(found: Sweep, settings: Settings, command: list[str]) -> Path | None:
    """Write the winner of a complete sweep into the user's table; the planner uses it from then on."""
    entry = entry_of(found, settings, command) if found.complete else None
    if entry is None or _is_chosen_already(found, settings):
        return None
    found.written = tuned.write(_table_of(found.backend), found.target.name, entry)
    return found.written


def _is_chosen_already(found: Sweep, settings: Settings) -> bool:
    """The shipped choice stays, and no entry of the table says otherwise: there is nothing to write."""
    winner = found.winner(settings.gain)
    if winner is None or winner.label != found.shipped:
        return False
    now = backend_of(found.backend).configs(found.problem, found.target)
    return bool(now) and label_of(now[0]) == found.shipped


def steps(backend: str, problem: Problem, target: Target, settings: Settings) -> int:
    """How often a sweep calls tick, at most."""
    module = backend_of(backend)
    count = len(search(backend, problem, target, settings)[1])
    total = count if hasattr(module, "unit") else 0
    for _ in _rounds(count, settings):
        total += count
        count = max(settings.finalists, math.ceil(count / settings.keep)) + 1
    return total + count * settings.max_final_rounds


def conclusion(found: Sweep, settings: Settings) -> str:
    winner = found.winner(settings.gain)
    measured = len(found.ranked())
    counts = f"{len(found.trials)} configs: {measured} measured, {len(found.trials) - measured} not"
    if not found.complete:
        return f"{counts}; interrupted: run the same command again to go on from here"
    if winner is None:
        return f"{counts}; none could be measured"
    kept = f"; written to {found.written}: the planner uses it from now on" if found.written else "; nothing is written"
    shipped = found[found.shipped]
    if winner is shipped:
        margin = f"more than {100 * (settings.gain - 1):.0f}% faster beyond the noise"
        return f"{counts}; the shipped choice stays: none is {margin}{kept}"
    speed = found.speed(winner)
    if speed is None:
        return f"{counts}; {winner.label} wins; the shipped choice: {shipped.verdict}{kept}"
    margin = f"{words.claim(speed)} the shipped choice {shipped.label}{words.interval(speed)}"
    return f"{counts}; {winner.label} wins, {margin}{kept}"


def resources(found: Sweep, trial: Trial) -> list[dict[str, Any]]:
    """For each kernel: registers, spilt bytes, shared memory, CTAs a multiprocessor holds, and what limits them."""
    facts = []
    stages = stages_of(backend_of(found.backend), found.problem, trial.config)
    for kernel, stage in zip(trial.kernels, stages if trial.kernels else (), strict=True):
        used = kernel.resources
        smem = stage.smem_bytes + used.static_smem_bytes
        fits = occupancy((1,), (stage.threads,), used.registers, smem, found.target)
        facts.append(
            {
                "registers": used.registers,
                "spilt": used.spill_store_bytes + used.spill_load_bytes,
                "smem_kib": round(smem / 1024),
                "ctas_per_sm": fits.blocks_per_sm if fits else 0,
                "limiter": fits.limiter.partition(";")[0] if fits else "",
            }
        )
    return facts


def _trial_dict(trial: Trial) -> dict[str, Any]:
    return {
        "label": trial.label,
        "config": dataclasses.asdict(trial.config),
        "verdict": trial.verdict,
        "because": trial.because,
        "resources": [dataclasses.asdict(kernel.resources) for kernel in trial.kernels],
        "seconds": summary(trial.samples),
        "rounds": {str(number): samples for number, samples in trial.rounds.items()},
    }


def _concluded(found: Sweep, settings: Settings) -> dict[str, Any]:
    winner = found.winner(settings.gain)
    return {"winner": winner.label if winner else None, "conclusion": conclusion(found, settings)}


def marks(record: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the figures of a record; empty for one that stands as it is."""
    found = records.marks_of(record)
    if found:
        return found
    target = records.target_of(record["provenance"], on_gpu=bool(record["provenance"]["gpus"]))
    assert target is not None, "whose kernels are those of today"
    settings = Settings(**record["settings"])
    for values in record["sweeps"]:
        space = search(values["backend"], Problem.from_dict(values["problem"]), target, settings)[1]
        if [label_of(config) for config in space] != [trial["label"] for trial in values["trials"]]:
            found.append(f"a search of {values['backend']} tries other configs today")
    return found


def _kernels(found: Sweep) -> list[Launched]:
    """What each config of a sweep launches."""
    names = (name_of(found.backend, trial.config) for trial in found.trials)
    return [launched.of_variant(name, found.problem, found.target) for name in names]


def record(sweeps: list[Sweep], settings: Settings, command: list[str]) -> dict[str, Any]:
    """All that was measured, with where it comes from."""
    return {
        "kind": KIND,
        "suite": "tune",
        "complete": all(found.complete for found in sweeps),
        "provenance": environment.provenance(settings.seed, command),
        "settings": dataclasses.asdict(settings),
        "kernels": [one for found in sweeps for one in _kernels(found)],
        "sweeps": [found.to_dict() | _concluded(found, settings) for found in sweeps],
    }
