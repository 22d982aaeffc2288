"""A tuned table is a file that anybody may have edited: whatever it says, a call gives the shipped config's answer.

Bad is whatever the backend's own rules would not have made for the problem. It costs one log line per entry, never an
exception and never another answer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import make_inputs, make_problem
from tilewise import Causal, Full, Window, attention
from tilewise.engine import SM80, SM90
from tilewise.engine.backend import Fused
from tilewise.errors import CompileError
from tilewise.jit import tuned
from tilewise.lab.studies.search_space import search_space
from tilewise.memo import invalidate
from tilewise.plain import tiled
from tilewise.plan import plan
from tilewise.target import Target
from tilewise.triton import backend as triton

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tilewise import Problem

H200 = dataclasses.replace(Target.named("h200"), name="NVIDIA H200")
A100 = dataclasses.replace(Target.named("a100"), name="NVIDIA A100")
CPU = Target.of("cpu")
LONG = make_problem((1, 16, 4096, 128), torch.bfloat16, mask=Causal())
SMALL = make_problem((1, 2, 300, 16), mask=Causal())

READERS = {
    "sm90": (SM90, LONG, H200),
    "sm80": (SM80, LONG, A100),
    "triton": (triton, LONG, A100),
    "tiled": (tiled, SMALL, CPU),
}
"""Every backend that reads tuned tables, with a problem and a target."""

# What JSON may hold in place of a number or a flag. True stands for 1 in Python, and 128.0 for 128.
BAD_VALUES = [-128, -1, 0, 3, 100, 1 << 20, 10**400, "64", "", 12.5, 128.0, -0.0, 1e300, None, [], [64], {}, "true"]


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tables").mkdir(mode=0o700)
    monkeypatch.setenv("TILEWISE_TABLES", str(tmp_path / "tables"))
    forget()
    yield
    forget()


def forget() -> None:
    tuned.forget()
    invalidate()


def entry_for(backend: str, problem: Problem, config: dict[str, Any], target: Target) -> dict[str, Any]:
    key, sizes = READERS[backend][0].tuning_key(problem)
    return {
        "key": key,
        "sizes": sizes,
        "config": config,
        "kernels": tuned.kernels_digest(backend),
        "device": target.name,
        "date": "2026-01-02T03:04:05+00:00",
        "gain": 1.25,
    }


def place(backend: str, target: Target, *entries: Any, **table: Any) -> Path:
    """Write a table past all checks, as an editor would."""
    path = tuned.path_of(backend, target.name)
    assert path is not None
    whole = {"format": 1, "backend": backend, "device": target.name, "entries": list(entries)} | table
    path.write_text(json.dumps(whole))
    path.chmod(0o600)
    forget()
    return path


def other_config(backend: str) -> dict[str, Any]:
    """Fields of a legal config that does not ship."""
    module, problem, target = READERS[backend]
    shipped = module.shipped(problem, target)
    return dataclasses.asdict(next(c for c in search_space(module, problem, target) if c not in shipped))


def is_refused_with_one_line(backend: str, caplog: pytest.LogCaptureFixture) -> str:
    """Ask thrice; return the one line that was logged."""
    module, problem, target = READERS[backend]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tilewise"):
        for _ in range(3):
            assert module.configs(problem, target) == module.shipped(problem, target)
            assert not any("tuned" in notice for notice in module.notices(problem, target))
    assert len(caplog.records) == 1, caplog.text
    return str(caplog.messages[0])


@pytest.mark.parametrize("backend", READERS)
def test_a_good_entry_is_used_without_a_word(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    module, problem, target = READERS[backend]
    fields = other_config(backend)
    place(backend, target, entry_for(backend, problem, fields, target))
    with caplog.at_level(logging.WARNING, "tilewise"):
        assert module.configs(problem, target) == [module.Config(**fields), *module.shipped(problem, target)]
        assert any("tuned" in notice for notice in module.notices(problem, target))
    assert not caplog.records


@pytest.mark.parametrize("backend", READERS)
def test_a_bad_field_is_one_line_and_the_shipped_config(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    module, problem, target = READERS[backend]
    good = other_config(backend)
    legal = {*search_space(module, problem, target), *module.shipped(problem, target)}
    searched = module.forward_direction.searched(problem) if isinstance(module, Fused) else {}
    tried = 0
    for field in dataclasses.fields(module.Config):
        for bad in [*BAD_VALUES, True, False]:
            fields = good | {field.name: bad}
            if type(bad) is type(good[field.name]) and (
                module.Config(**fields) in legal or bad in searched.get(field.name, ())
            ):
                continue
            path = place(backend, target, entry_for(backend, problem, fields, target))
            assert str(path) in is_refused_with_one_line(backend, caplog)
            tried += 1
    assert tried > len(BAD_VALUES)


@pytest.mark.parametrize("backend", READERS)
def test_other_fields_are_one_line_and_the_shipped_config(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    _, problem, target = READERS[backend]
    good = other_config(backend)
    first = next(iter(good))
    for fields in (good | {"flavour": 3}, {n: v for n, v in good.items() if n != first}, {}, {"__class__": 1}):
        place(backend, target, entry_for(backend, problem, fields, target))
        assert "entry 1" in is_refused_with_one_line(backend, caplog)


@pytest.mark.parametrize(
    "damage",
    [
        {"config": None}, {"config": [128, 128]}, {"config": "128x128"}, {"sizes": None}, {"sizes": [1]}, {"sizes": {}},
        {"sizes": {"seq_q": True}}, {"sizes": {"seq_q": 0}}, {"sizes": {"seq_q": 10**400}}, {"sizes": {"seq_q": "300"}},
        {"sizes": {"seq_q": 300.5}}, {"sizes": {"seq_q": -300}}, {"date": 20260102}, {"date": None}, {"device": 7},
        {"gain": "fast"}, {"gain": [1]}, {"gain": float("nan")}, {"gain": True}, {"key": None}, {"kernels": None},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", READERS)
def test_a_bad_entry_is_one_line_and_its_neighbours_count(
    backend: str, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    module, problem, target = READERS[backend]
    fields = other_config(backend)
    good = entry_for(backend, problem, fields, target)
    bad = good | damage
    if damage.get("sizes") and isinstance(damage["sizes"], dict):
        bad["sizes"] = good["sizes"] | damage["sizes"]
    place(backend, target, bad)
    is_refused_with_one_line(backend, caplog)
    place(backend, target, bad, good)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tilewise"):
        assert module.configs(problem, target)[0] == module.Config(**fields)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"x"', "{}", '{"format": 1}', "[" * 100_000, '{"a":' * 100_000, "\x00", "NaN",
     "9" * 10**5],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_table_that_is_none_is_one_line(text: str, caplog: pytest.LogCaptureFixture) -> None:
    place("tiled", CPU).write_text(text)
    is_refused_with_one_line("tiled", caplog)


@pytest.mark.parametrize("entries", [None, {}, {"0": {}}, "entries", 3, [None], [3], ["entry"], [[]]], ids=str)
def test_entries_that_are_none_are_one_line(entries: Any, caplog: pytest.LogCaptureFixture) -> None:
    place("tiled", CPU, entries=entries)
    if entries == {}:
        with caplog.at_level(logging.WARNING, "tilewise"):
            assert tiled.configs(SMALL, CPU) == tiled.shipped(SMALL, CPU)
    else:
        is_refused_with_one_line("tiled", caplog)


@pytest.mark.parametrize("bad", [*BAD_VALUES, True], ids=lambda bad: repr(bad)[:12])
@pytest.mark.parametrize("field", ["block_q", "block_kv"])
def test_a_call_answers_as_if_the_entry_were_not_there(field: str, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make_inputs(SMALL, grad=True)
    wanted = attention(q, k, v, mask="causal", backend="tiled")
    wanted_grads = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    problem = SMALL.with_(needs_grad=True)
    fields = {"block_q": 64, "block_kv": 64} | {field: bad}
    place("tiled", CPU, entry_for("tiled", problem, fields, CPU))
    with caplog.at_level(logging.WARNING, "tilewise"):
        out = attention(q, k, v, mask="causal", backend="tiled")
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, grads, wanted_grads))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("backend", READERS)
def test_what_a_sweep_may_write_is_legal_wherever_it_serves(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """No warning for honest tables: configs of the search space and shipped ones, at both ends of their reach."""
    module, problem, target = READERS[backend]
    near = [problem.with_(seq_q=length, seq_kv=length) for length in (problem.seq_q // 2, 2 * problem.seq_q)]
    if backend != "tiled":
        near.append(problem.with_(heads_q=2 * problem.heads_q, heads_kv=2 * problem.heads_kv))
    space = [*module.shipped(problem, target), *search_space(module, problem, target)]
    with caplog.at_level(logging.WARNING, "tilewise"):
        for config in space[:: max(1, len(space) // 24)]:
            place(backend, target, entry_for(backend, problem, dataclasses.asdict(config), target))
            for neighbour in near:
                assert module.configs(neighbour, target)[0] == config
    assert not caplog.records, caplog.text


def test_the_kernel_for_split_keys_may_be_in_a_table() -> None:
    short = make_problem((1, 8, 64, 128), torch.bfloat16, seq_kv=16384, mask=Full())
    shipped = SM90.shipped(short, H200)[0]
    assert isinstance(shipped, SM90.Config)
    assert shipped.split
    place("sm90", H200, entry_for("sm90", short, dataclasses.asdict(shipped), H200))
    for problem in (short, short.with_(seq_kv=9000), short.with_(seq_kv=32000)):
        assert SM90.configs(problem, H200)[0] == shipped


@pytest.mark.parametrize("direction", ["forward_direction", "backward_direction"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_what_a_table_claims_of_any_kernel_is_held_to_its_rules(
    backend: str, dtype: torch.dtype, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A config of another family, a tile that there is not, a field of another type: one line each, and what ships."""
    module, _, target = READERS[backend]
    problem = LONG.with_(dtype=dtype, needs_grad=True)
    side = getattr(module, direction)
    shipped = side.shipped(problem, target)
    fields = dataclasses.asdict(shipped[0])
    tile = "block_q" if "block_q" in fields else "block_kv" if "block_kv" in fields else "stages"
    stranger = module.backward_direction if direction == "forward_direction" else module.forward_direction
    key, sizes = side.tuning_key(problem)
    for wrong in (dataclasses.asdict(stranger.shipped(problem, target)[0]), fields | {tile: -1}, fields | {tile: "64"}):
        caplog.clear()
        place(backend, target, entry_for(backend, problem, wrong, target) | {"key": key, "sizes": sizes})
        forget()
        with caplog.at_level(logging.WARNING, "tilewise"):
            assert side.configs(problem, target) == side.configs(problem, target) == shipped
        assert len(caplog.records) == 1


@pytest.mark.parametrize("direction", ["forward_direction", "backward_direction"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_an_entry_of_any_kernel_may_have_searched_values_that_fit(
    backend: str, dtype: torch.dtype, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Registers are the build's matter. What a problem decides, and shared memory, are held to."""
    module, _, target = READERS[backend]
    problem = LONG.with_(dtype=dtype, needs_grad=True)
    side = getattr(module, direction)
    shipped = side.shipped(problem, target)
    key, sizes = side.tuning_key(problem)
    searched = side.searched(problem)
    largest, smallest = ({name: pick(values) for name, values in searched.items()} for pick in (max, min))
    facts = {field.name for field in dataclasses.fields(shipped[0])} - {*searched}
    assert {"head_dim", "head_dim_v", "has_terms"} <= facts
    small, large = (dataclasses.replace(shipped[0], **values) for values in (smallest, largest))
    other_heads = dataclasses.replace(small, head_dim=64)
    for config in (small, large, other_heads):
        caplog.clear()
        entry = entry_for(backend, problem, dataclasses.asdict(config), target) | {"key": key, "sizes": sizes}
        place(backend, target, entry)
        is_legal = config.fits(target) and config is not other_heads
        wanted = list(dict.fromkeys([config, *shipped])) if is_legal else shipped
        with caplog.at_level(logging.WARNING, "tilewise"):
            assert side.configs(problem, target) == side.configs(problem, target) == wanted
        assert len(caplog.records) == (not is_legal)
    assert small.fits(target)


def test_one_bad_entry_among_many_problems_is_still_one_line(caplog: pytest.LogCaptureFixture) -> None:
    fields = other_config("sm90") | {"block_kv": -1}
    place("sm90", H200, entry_for("sm90", LONG, fields, H200))
    with caplog.at_level(logging.WARNING, "tilewise"):
        for length in range(2100, 8000, 100):
            problem = LONG.with_(seq_q=length, seq_kv=length)
            assert plan(problem, H200).config == SM90.shipped(problem, H200)[0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_a_legal_config_that_does_not_build_here_is_one_line(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a compiler says of a config, no rule knows: the shipped one runs, and its backend stays in the choice."""
    problem = make_problem((1, 2, 300, 16), mask=Window(20, 0), seq_kv=400)
    q, k, v = make_inputs(problem)
    wanted = attention(q, k, v, mask=Window(20, 0), backend="tiled")
    assert plan(problem, CPU).backend == "tiled"
    place("tiled", CPU, entry_for("tiled", problem, {"block_q": 32, "block_kv": 32}, CPU))
    tried = []

    def bind(q: Any, k: Any, v: Any, problem: Problem, config: Any, operands: Any) -> Any:
        tried.append(config)
        if config == tiled.Config(32, 32):
            raise CompileError("registers spill to local memory")
        return lambda q, k, v, operands: tiled.forward(q, k, v, problem, config, operands)

    monkeypatch.setattr(tiled, "bind", bind, raising=False)
    with caplog.at_level(logging.WARNING, "tilewise"):
        for _ in range(2):
            assert torch.equal(attention(q, k, v, mask=Window(20, 0), backend=backend), wanted)
            invalidate()
    assert tried == [tiled.Config(32, 32), tiled.shipped(problem, CPU)[0], tiled.shipped(problem, CPU)[0]]
    assert len(caplog.records) == 1
    assert "registers spill" in caplog.text
    assert plan(problem, CPU).backend == "tiled"


def test_a_config_that_does_not_build_gives_way_in_every_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All have planned with the entry before the first of them finds out."""
    place("tiled", CPU, entry_for("tiled", SMALL, {"block_q": 32, "block_kv": 32}, CPU))
    ready = threading.Barrier(4)

    def bind(q: Any, k: Any, v: Any, problem: Problem, config: Any, operands: Any) -> Any:
        if config == tiled.Config(32, 32):
            ready.wait(600)
            raise CompileError("registers spill to local memory")
        return lambda q, k, v, operands: tiled.forward(q, k, v, problem, config, operands)

    monkeypatch.setattr(tiled, "bind", bind, raising=False)
    lengths = range(SMALL.seq_q, SMALL.seq_q + 4)
    inputs = [make_inputs(SMALL.with_(seq_q=length, seq_kv=length)) for length in lengths]
    with caplog.at_level(logging.WARNING, "tilewise"), ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda tensors: attention(*tensors, mask="causal", backend="tiled"), inputs))
    assert len(caplog.records) == 1
    for out, tensors in zip(outs, inputs, strict=True):
        assert torch.equal(out, attention(*tensors, mask="causal", backend="tiled"))


def test_a_shipped_config_that_does_not_build_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a table names that very config: there is nothing better to run."""
    q, k, v = make_inputs(SMALL)
    shipped = tiled.shipped(SMALL, CPU)[0]
    place("tiled", CPU, entry_for("tiled", SMALL, dataclasses.asdict(shipped), CPU))

    def bind(*_: Any, **__: Any) -> Any:
        raise CompileError("no compiler")

    monkeypatch.setattr(tiled, "bind", bind, raising=False)
    with pytest.raises(CompileError, match="no compiler"):
        attention(q, k, v, mask="causal", backend="tiled")
