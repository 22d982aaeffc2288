"""Every example runs here, as a user would run it, and says what it promises to say."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

import pytest
import torch

from support import budget

EXAMPLES = Path(__file__).parents[2] / "examples"
# name: (arguments that make it short, one of what it must say)
EXAMPLE = {
    "sdpa_override.py": (None, ["tiled: asked for by name"]),
    "sdpa_overhead.py": (["--rounds", "1", "--calls", "5"], ["causal, scale"]),
    "flash_attn_interface.py": (None, ["packed: (136, 8, 64)"]),
    "decode.py": (["--tokens", "6", "--layers", "1", "--rounds", "1"], ["static: the same tokens", "skipped"]),
    "transformers_model.py": (None, ["the same tokens", "skipped"]),
    "packed_text.py": (
        ["--device", "cpu", "--steps", "3", "--documents", "3", "--longest", "40", "--hidden", "32", "--layers", "1"],
        ["padded, sdpa", "skipped"],
    ),
    "thunder_executor.py": (None, ["largest difference", "skipped"]),
    "llama.py": (["--steps", "8", "--layers", "1", "--how", "sdpa", "override", "direct"], ["same tokens"]),
    "train_gpt.py": (["--steps", "4"], ["tilewise, tiled"]),
}


def run(name: str, arguments: list[str] | None) -> None:
    threads = torch.get_num_threads()
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    try:
        main() if arguments is None else main(arguments)
    finally:
        torch.set_num_threads(threads)


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXAMPLE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", EXAMPLE)
def test_example(name, capsys):
    arguments, says = EXAMPLE[name]
    run(name, arguments)
    said = capsys.readouterr().out
    assert any(text in said for text in says), said


@pytest.mark.parametrize("name", ["sdpa_overhead.py", "llama.py", "train_gpt.py"])
def test_records(name, tmp_path):
    """--save writes one record, with where it comes from and the raw figures of every row."""
    run(name, [*EXAMPLE[name][0], "--save", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["provenance"]["command"][1] == f"examples/{name}"
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert all(row.get("seconds") or row.get("losses") for row in record["rows"])


def test_the_loss_falls_and_does_not_depend_on_the_way(tmp_path):
    run("llama.py", ["--how", "sdpa", "direct", "--save", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    curves = [row["losses"] for row in json.loads(path.read_text())["rows"]]
    assert all(curve[-1] < 0.5 * curve[0] for curve in curves)
    assert all(abs(one - other) < 0.05 * one for one, other in zip(*curves, strict=True))


def test_packed_text_is_trained_as_padded_text_is():
    """Four ways, and the same losses: no document sees another."""
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "packed_text.py"))
    options = argparse.Namespace(
        device="cpu", dtype=torch.float32, steps=3, documents=4, longest=50, hidden=32, layers=1
    )
    curves = [example["train"](way, options)[1] for way in example["WAYS"]]
    # Every step starts from weights that earlier ones have moved, each with the error of a float32 gradient.
    allowed = options.steps * budget(torch.float32, options.documents * options.longest)
    for curve in curves[1:]:
        assert all(abs(one - other) <= allowed * one for one, other in zip(curve, curves[0], strict=True))
