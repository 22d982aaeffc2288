"""benchmarks/host.py: what is called, with which tensors. Nothing here is timed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import host
import torch

from support import assert_close, budget
from tilewise import attention

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SHAPE = (3, 2, 8, 16)


def test_every_way_and_kind_of_call_has_a_sample_of_every_round() -> None:
    costs = host.measure("cpu", SHAPE, torch.float32, rounds=2)
    assert {(cost.kind, cost.way) for cost in costs} == {
        (kind, way.name) for way in host.ways("cpu") for kind in way.kinds
    }
    assert {len(cost.seconds) for cost in costs} == {2}
    assert {len(cost.more) for cost in costs} == {2}
    assert {more for cost in costs if cost.way == host.DEFAULT for more in cost.more} == {0.0}
    assert [way.name for way in host.ways("cpu")][:2] == [host.DEFAULT, host.PASSED_ON]


def test_packed_sequences_are_called_where_they_have_a_kernel() -> None:
    assert [way.name for way in host.ways("cuda") if way.packed] == ["tilewise.attention_packed"]
    assert not any(way.packed for way in host.ways("cpu"))


def test_the_packed_call_attends_as_the_batched_one() -> None:
    (way,) = (way for way in host.ways("cuda") if way.packed)
    batch, heads, seq, dim = SHAPE
    q, k, v = torch.randn(3, *SHAPE)
    rows = [tensor.transpose(1, 2).reshape(batch * seq, heads, dim) for tensor in (q, k, v)]
    out = way.call(*rows, batch, seq).view(batch, seq, heads, dim).transpose(1, 2)
    assert_close(out, attention(q, k, v).double(), budget(torch.float32, seq))


def test_an_empty_node_stands_beside_where_native_code_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(way.name == host.EMPTY_NODE for way in host.ways("cpu")), "tests are without native code"
    calls = SimpleNamespace(empty_node=lambda q, k, v: q + k + v)
    monkeypatch.setattr(host.library, "loaded", lambda: SimpleNamespace(calls=calls))
    (node,) = (way for way in host.ways("cpu") if way.name == host.EMPTY_NODE)
    assert node.kinds == ("grad", "step")  # without a gradient there is no node


def test_other_libraries_are_called_in_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn_func takes (batch, seq, heads, dim), and may return lse behind out."""
    seen = []

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(tuple(q.shape))
        return q + k + v, None

    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: object() if name == "flash_attn" else None)
    monkeypatch.setattr(host.importlib, "import_module", lambda name: module)
    (way,) = host._installed()
    assert (way.name, way.layout, way.kinds) == ("flash-attn", "bshd", host.KINDS)
    monkeypatch.setattr(host, "ways", lambda device: [way])
    host.measure("cpu", SHAPE, torch.float32, rounds=1)
    assert set(seen) == {(3, 8, 2, 16)}


def test_the_table_has_shares_of_pytorchs_default() -> None:
    costs = [host.Cost("step", host.DEFAULT, (2.0, 2.0)), host.Cost("step", "ours", (1.0, 1.0))]
    assert [line.split()[-1] for line in host.lines(costs)] == ["1.00", "0.50"]


def test_ways_are_compared_within_a_round() -> None:
    """The host is three times slower in two rounds of three for one way, in one of three for the other."""
    default, ours = host.Cost("step", host.DEFAULT, (2.0, 6.0, 6.0)), host.Cost("step", "ours", (1.0, 1.0, 3.0))
    assert ours.beside(default) == (0.5, -3.0)
    ours = ours._replace(more=(-1.0, -2.0, -1.0))  # batch by batch, where that was measured
    assert ours.beside(default) == (0.5, -1.0)
    record = host.record([default, ours], "cpu", SHAPE, [])
    assert host.costs_of(record) == [default, ours]


def test_the_program_prints_and_keeps_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With where it comes from and the raw figures of every row."""
    threads = torch.get_num_threads()
    try:
        host.main(["--rounds", "1", "--device", "cpu", "--save", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert "tilewise.attention, in Python" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert (record["kind"], record["suite"]) == (host.KIND, "host-cpu")
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert all(row["seconds"] for row in record["rows"])
