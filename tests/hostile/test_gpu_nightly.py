"""`make gpu-nightly` on a CPU: few problems of every form, its record, and that a wrong result fails them."""

from __future__ import annotations

import json
from typing import Any

import form_generator
import gpu_nightly
import pytest
import torch

SMALL = ["--device", "cpu", "--kinds", "8", "--variants", "2", "--processes", "0", "--seed", "40"]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_problems_of_every_form_match_float64_and_are_recorded(tmp_path: Any) -> None:
    record = tmp_path / "record.json"
    assert gpu_nightly.main([*SMALL, "--record", str(record)]) == 0
    told = json.loads(record.read_text())
    assert (told["seed"], told["kinds"], told["problems"], told["failed"]) == (40, 8, 16, [])
    assert told["outcomes"] == {f"{form}, matched": 4 for form in ("batched", "cached", "packed", "terms")}


def test_a_run_without_time_says_that_nothing_ran(tmp_path: Any) -> None:
    record = tmp_path / "record.json"
    assert gpu_nightly.main([*SMALL, "--minutes", "0", "--record", str(record)]) == 1
    assert json.loads(record.read_text())["problems"] == 0


@pytest.mark.parametrize(
    ("forms", "name"),
    [({"terms", "batched"}, "attention"), ({"packed"}, "attention_packed"), ({"cached"}, "attention_cached")],
)
def test_a_wrong_result_fails_and_says_how_to_run_it_again(
    monkeypatch: Any, capsys: Any, tmp_path: Any, forms: set[str], name: str
) -> None:
    call = getattr(form_generator.tilewise, name)

    def off(*given: Any, **options: Any) -> Any:
        found = call(*given, **options)
        return (found[0] * 1.5, *found[1:]) if isinstance(found, tuple) else found * 1.5

    monkeypatch.setattr(form_generator.tilewise, name, off)
    monkeypatch.setattr(form_generator.term_generator.tilewise, name, off)
    record = tmp_path / "record.json"
    assert gpu_nightly.main([*SMALL, "--record", str(record)]) == 1
    failed = json.loads(record.read_text())["failed"]
    assert {one[0] for one in failed} == forms
    form, seed, variant, what = failed[0]
    assert "is off by" in what
    again = ["--form", form, "--seed", str(seed), "--variant", str(variant), "--device", "cpu"]
    assert " ".join(again) in capsys.readouterr().out
    assert form_generator.main(again) == 1
