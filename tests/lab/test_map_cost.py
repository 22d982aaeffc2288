"""benchmarks/tile_map.py and its table: which calls have a map, that every call makes it anew, and what it may take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import documents
import pytest
import tile_map as cost
import torch

import emulation
from tilewise import Target
from tilewise.engine import run, tile_map
from tilewise.lab.candidates.inputs import make_inputs
from tilewise.lab.model.launched import launched
from tilewise.lab.studies import bench

ROOT = Path(__file__).resolve().parents[2]
H200 = Target.named("h200")


def test_problems_are_those_of_the_suite_that_have_a_map() -> None:
    asked = cost.asked(H200)
    names = [row.name for row, _ in asked]
    for told in (
        "x128 padding",
        "x128 causal keep",
        "prefix 1000 tensor",
        "random mask",
        "x64 causal padding",
        "kv8 padding",
    ):
        assert any(told in name for name in names), told
    assert not any(told in name for name in names for told in ("documents", "key lengths", "bias", "step"))
    assert [row.name for row, _ in cost.asked(H200, ("random",))] == [name for name in names if "random" in name]
    for _, chosen in asked:
        forward, step = cost.map_of(chosen), cost.map_of(chosen, step=True)
        assert not forward.launches
        assert step.prepared[: len(forward.prepared)] == forward.prepared
        assert len(step.prepared) > len(forward.prepared), "a backward has lists of its own"


@emulation.emulated
@pytest.mark.parametrize("name", ["x128 padding", "x64 causal padding"])
def test_every_call_makes_the_map_of_its_mask_as_it_is_now(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulation.install(monkeypatch)
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    (row, chosen), *_ = cost.asked(H200, (name,), seq=256)
    inputs = make_inputs(row.problem, 0, "cpu", contents=row.contents)
    mask = cost.mask_of(inputs)
    made: list[list[torch.Tensor]] = []
    make = run._Preparation._make

    def kept(preparation: Any, operands: Any) -> list[torch.Tensor]:
        made.append(make(preparation, operands))
        return made[-1]

    monkeypatch.setattr(run._Preparation, "_make", kept)
    call = cost.map_maker(cost.map_of(chosen), row.problem, mask)
    call()
    call()
    first_cells, first_counts, cells, counts = (results[0] for results in made)
    assert torch.equal(first_cells, cells)
    assert torch.equal(first_counts, counts)
    assert counts.any()
    mask.fill_(False)
    call()
    assert not made[-1][0].any(), "no tile is visited"


@emulation.emulated
def test_a_row_of_the_record_has_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.install(monkeypatch)
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)
    (row, chosen), *_ = cost.asked(H200, ("x64 causal padding",), seq=64)
    found = cost.row_of(row, chosen, "cpu", 2, 1e-4)
    assert found["wrong"] == []
    assert found["bytes"] == 4 * 64 * 64
    assert [len(times) for times in found["seconds"].values()] == [2] * 4
    record = {"rows": [found], "settings": {"bytes_per_second": 4.8e12}}
    (cells,) = cost.cells(record)
    assert len(cells) == len(cost.COLUMNS)
    assert cells[0] == "bfloat16 4x16x64x64 causal padding"


def test_a_map_may_take_a_share_of_its_forward_or_one_read() -> None:
    rate = 4e12
    assert cost.allowed(0, rate, 1e-3) == pytest.approx(0.05e-3)
    assert cost.allowed(3 * 10**7, rate, 1e-4) == pytest.approx(1e-5 + 4e-6)


def row_of(made: float, forward: float, **fields: Any) -> dict[str, Any]:
    times = {"forward": forward, "forward's map": made, "step": 4 * forward, "step's map": 2 * made}
    seconds = {name: [value] * 9 for name, value in times.items()}
    return {"row": "a mask", "bytes": 2**24, "wrong": [], "seconds": seconds} | fields


def test_the_table_says_what_was_reached(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "kernels" / "terms.md"
    page.parent.mkdir(parents=True)
    page.write_text("before\n<!-- tile map -->\nold\n<!-- /tile map -->\nafter\n")
    assert "*Not measured yet: " in documents.pages(tmp_path)[0].after
    rows = [row_of(9e-6, 2e-4), row_of(11e-6, 2e-4), row_of(1e-6, 1e-4, wrong=["out norm error"], seconds={})]
    versions, source = {"torch": "2.11"}, {"commit": "c", "dirty": False}
    provenance = {
        "date": "2026-11-18T00:00:00+00:00",
        "versions": versions,
        "source": source,
        "gpus": [{"name": "NVIDIA H200"}],
    }
    kernels = [launched(chosen, ("step",)) for _, chosen in cost.asked(H200, ("random",))]
    record = {
        "kernels": kernels,
        "kind": cost.KIND,
        "suite": cost.SUITE,
        "provenance": provenance,
        "rows": rows,
    }
    record["settings"] = {"rounds": 9, "bytes_per_second": 4.8e12, "only": [], "seq": 4096}
    (tmp_path / bench.RESULTS).mkdir(parents=True)
    (tmp_path / bench.RESULTS / f"2026-11-18T000000Z-{cost.SUITE}.json").write_text(json.dumps(record))
    lines = documents.pages(tmp_path)[0].after.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| a mask | 16 | 9.0 | 4.5% | 10.0 | 18.0 | 2.2% | yes |" in lines
    assert "| a mask | 16 | 11.0 | 5.5% | 10.0 | 22.0 | 2.7% | MISSED |" in lines
    assert "| a mask | 16 | - | - | - | - | - | wrong: out norm error |" in lines
    assert any("](../../benchmarks/results/2026-11-18T000000Z-tile-map.json)" in line for line in lines)
    unnamed = {name: value for name, value in record.items() if name != "kernels"}
    (tmp_path / bench.RESULTS / f"2026-11-20T000000Z-{cost.SUITE}.json").write_text(json.dumps(unnamed))
    (found,) = documents.pages(tmp_path)
    assert found.after.splitlines() == lines, "a record that does not name its kernels is not cited"
    for changed in ({"only": ["random"]}, {"seq": 4100}):
        newer = {**record, "settings": {**record["settings"], **changed}, "rows": rows[:1]}
        (tmp_path / bench.RESULTS / f"2026-11-19T000000Z-{cost.SUITE}.json").write_text(json.dumps(newer))
        (found,) = documents.pages(tmp_path)
        assert found.after.splitlines() == lines, "some rows alone, or of other lengths, are no table"


def test_the_page_has_a_place_for_the_table() -> None:
    assert "<!-- tile map -->" in (ROOT / "docs" / "kernels" / "terms.md").read_text()
