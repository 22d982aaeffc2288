"""What `make gpu-nightly` draws, on a CPU: few problems of every form, and that a wrong result fails them."""

from __future__ import annotations

import json
from typing import Any

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
    assert told["outcomes"] == {"batched, matched": 8, "cached, matched": 4, "packed, matched": 4}


def test_a_run_without_time_says_that_nothing_ran(tmp_path: Any) -> None:
    record = tmp_path / "record.json"
    assert gpu_nightly.main([*SMALL, "--minutes", "0", "--record", str(record)]) == 1
    assert json.loads(record.read_text())["problems"] == 0


@pytest.mark.parametrize(("form", "name"), [("packed", "attention_packed"), ("cached", "attention_cached")])
def test_a_wrong_result_fails_and_says_how_to_run_it_again(
    monkeypatch: Any, capsys: Any, tmp_path: Any, form: str, name: str
) -> None:
    call = getattr(gpu_nightly.tilewise, name)

    def off(*given: Any, **options: Any) -> Any:
        out, lse = call(*given, **options)
        return out * 1.5, lse

    monkeypatch.setattr(gpu_nightly.tilewise, name, off)
    record = tmp_path / "record.json"
    assert gpu_nightly.main([*SMALL, "--record", str(record)]) == 1
    failed = json.loads(record.read_text())["failed"]
    assert failed
    assert all(one[0] == form for one in failed)
    _, seed, variant, what = failed[0]
    assert "is off by" in what
    again = ["--form", form, "--seed", str(seed), "--variant", str(variant)]
    assert " ".join(again) in capsys.readouterr().out
    assert gpu_nightly.main([*again, "--device", "cpu"]) == 1


def test_all_that_kernels_differ_in_is_drawn() -> None:
    packed = [gpu_nightly.draw_packed(seed, 0, "cuda") for seed in range(60)]
    named = {name for case in packed for name in (*case.arguments, *case.leaves)}
    assert {"softcap", "alibi", "sink", "table", "seqused_k", "leftpad_k"} <= named
    assert {case.mask.partition(":")[0] for case in packed} == {"None", "causal", "window"}
    assert any((~case.visible.any(-1)).any() for case in packed if case.sizes.seq_q)
    cached = [gpu_nightly.draw_cached(seed, 0) for seed in range(60)]
    assert {name for case in cached for name in case.terms} == {"softcap", "alibi", "sink", "keep"}
    assert any(0 in case.lengths for case in cached)
