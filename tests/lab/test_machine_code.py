"""Figures outlive a change of sources only where the compiler makes the same machine code of them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.jit import Unit, build, nvrtc_version
from tilewise.lab.model import launched

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("machine_code", ROOT / "tools" / "machine_code.py")
assert spec is not None
assert spec.loader is not None
machine_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(machine_code)

TEXT = """template <int kind> __device__ __noinline__ float {helper}(float x) {{ return x * {factor} + kind; }}
extern "C" __global__ void scale(float* to) {{ {remark}to[threadIdx.x] = {helper}<3>(to[threadIdx.x]); }}
"""


def digest_of(helper: str = "f", factor: str = "2.0f", remark: str = "") -> str:
    source = TEXT.format(helper=helper, factor=factor, remark=remark)
    return str(machine_code.code_digest(build(Unit("scale", source, "sm_80", strict=False), announce=False)))


def test_machine_code_has_no_names_and_no_lines():
    assert digest_of() == digest_of(helper="another_name") == digest_of(remark="\n\n")
    assert digest_of() != digest_of(factor="3.0f")


def run_of(units: dict[str, str]) -> launched.Launched:
    return {"backend": "sm90", "units": units, "program": "p"}


@pytest.mark.parametrize(
    ("code", "remains"),
    [
        ({}, False),
        ({"before": "c"}, False),
        ({"after": "c"}, False),
        ({"before": "c", "after": "d"}, False),
        ({"before": "c", "after": "c"}, True),
    ],
    ids=str,
)
def test_a_measurement_remains_where_both_texts_become_the_same_code(monkeypatch, code, remains):
    monkeypatch.setattr(launched, "machine_code", lambda: code)
    why = launched.difference(run_of({"kernel.sm_90a": "before"}), run_of({"kernel.sm_90a": "after"}))
    assert why == ("" if remains else "the sources of kernel.sm_90a have changed")
    assert launched.difference(run_of({"kernel.sm_90a": "before"}), run_of({"kernel.sm_90a": "before"})) == ""


def test_the_table_has_every_kernel_that_records_name():
    """Run `python tools/machine_code.py` if this fails."""
    table = json.loads(launched.MACHINE_CODE.read_text(encoding="utf-8"))
    units, measured = machine_code.recorded(ROOT)
    assert units
    assert not units.keys() - table["units"].keys()
    modules = machine_code.recorded_modules(ROOT)
    assert modules
    assert modules.items() <= table["units"].items()
    assert not table["units"].keys() - units.keys() - modules.keys() - measured
    assert all(re.fullmatch("[0-9a-f]{12} [0-9a-f]{16}", " ".join(entry)) for entry in table["units"].items())


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('"""Another text."""\nfrom c import b\n\n\ndef f(x):  # why\n    return b(x) + 1\n', True),
        ("from a import b\ndef f(x):\n    'What it does.'\n    return b(x) + 1\n", True),
        ("from a import b\ndef f(x):\n    return b(x) + 2\n", False),
    ],
)
def test_what_a_module_does_is_neither_its_imports_nor_its_text(other: str, same: bool) -> None:
    source = "from a import b\ndef f(x):\n    return b(x) + 1\n"
    assert (launched.python_code(source) == launched.python_code(other)) is same


@pytest.mark.kernel_gate
def test_the_table_has_what_the_compiler_makes_of_them():
    table = json.loads(launched.MACHINE_CODE.read_text(encoding="utf-8"))
    if nvrtc_version() != table["nvrtc"]:
        pytest.skip(f"the table is of NVRTC {table['nvrtc']}, and this is {nvrtc_version()}")
    assert machine_code.wrong_entries(ROOT) == []


@pytest.mark.kernel_gate
def test_sources_have_the_machine_code_of_their_own_revision():
    """Through git: the tool builds another revision in a tree of its own."""
    done = subprocess.run(
        ["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode or done.stdout:
        pytest.skip("the sources are not those of a revision")
    command = [sys.executable, ROOT / "tools" / "machine_code.py", "--against", "HEAD", "--every", "200"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
