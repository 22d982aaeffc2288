"""Every example runs here, as a user would run it, and says what it promises to say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "sdpa_override.py": "tiled: asked for by name",
    "sdpa_overhead.py": "causal, scale",
    "flash_attn_interface.py": "packed: (136, 8, 64)",
    "transformers_model.py": ("the same tokens", "skipped"),
    "thunder_executor.py": ("largest difference", "skipped"),
}


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", SAYS)
def test_example(name, capsys, monkeypatch):
    threads = torch.get_num_threads()
    script = runpy.run_path(str(EXAMPLES / name))
    if name == "sdpa_overhead.py":  # the figures are for reading; here it only has to run
        monkeypatch.setitem(script["main"].__globals__, "ROUNDS", 1)
        monkeypatch.setitem(script["main"].__globals__, "CALLS", 5)
    try:
        script["main"]()
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    expected = SAYS[name]
    assert any(text in said for text in ([expected] if isinstance(expected, str) else expected)), said
