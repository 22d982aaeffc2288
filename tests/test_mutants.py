"""tools/mutants.py: what it draws from the sources, and its verdicts about a toy package."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "mutants.py"))
Group, Mutant = TOOL["Group"], TOOL["Mutant"]


def test_a_draw_depends_on_sources_and_seed_alone():
    sources = TOOL["read"](ROOT, TOOL["GROUPS"])
    few = TOOL["read"](ROOT, TOOL["GROUPS"], only="terms/")
    assert TOOL["draw"](few, 1, 30) == TOOL["draw"](few, 1, 30) != TOOL["draw"](few, 2, 30)
    drawn = TOOL["draw"](sources, 1, 30)
    everything = [mutant for mutants in drawn.values() for mutant in mutants]
    assert len({(mutant.file, mutant.line) for mutant in everything}) == len(everything) == 30
    assert all(drawn.values())
    texts = {name: text for files in sources.values() for name, text in files.items()}
    for mutant in everything:
        mutated = mutant.apply(texts[mutant.file])
        assert mutated != texts[mutant.file]
        if mutant.file.endswith(".py"):
            assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(texts[mutant.file]))


def test_headers_are_changed_in_code_alone():
    source = '#include "a - b.cuh"\nint a;  // 1 < 2\ntemplate <int n = 3>\nif (a < b[2]) stop(a);\n  stop(a);\n'
    mutants = TOOL["mutants_of"]("kernels/some.cuh", source)
    assert {(mutant.line, mutant.after) for mutant in mutants} == {
        (4, "if (a <= b[2]) stop(a);"),
        (4, "if (a < b[3]) stop(a);"),
        (5, "  ;"),
    }


def test_every_group_names_files_that_exist():
    for group in TOOL["GROUPS"]:
        for pattern in group.files:
            assert list((ROOT / "src" / "tilewise").glob(pattern)), f"{group.name}: {pattern}"
        for test in group.tests + group.wider:
            assert (ROOT / "tests" / test).is_file(), f"{group.name}: {test}"
    package = ROOT / "src" / "tilewise"
    for file, tests in TOOL["NEAREST"].items():
        assert (package / file).is_file(), file
        for test in tests:
            assert (ROOT / "tests" / test).is_file(), f"{file}: {test}"
    for row in json.loads(TOOL["EQUIVALENT"].read_text()):
        assert row["reason"]
        assert row["before"] in map(str.strip, (package / row["file"]).read_text().split("\n")), (
            f"no longer there: {row}"
        )


@pytest.fixture
def toy(tmp_path):
    for folder in ("src/tilewise", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  kernel_gate\n  nightly\n")
    (tmp_path / "src/tilewise/__init__.py").touch()
    (tmp_path / "src/tilewise/toy.py").write_text("def least(a, b):\n    return a if a < b else b\n")
    (tmp_path / "tests/test_toy.py").write_text(
        "from tilewise.toy import least\ndef test_it(): assert least(1, 2) == least(2, 1) == 1\n"
    )
    return tmp_path, Group("toy", ("toy.py",), ("test_toy.py",), (), 1)


def test_a_mutant_is_killed_and_one_survives(toy, capsys):
    root, group = toy
    line = "    return a if a < b else b"
    other, same, listed = (Mutant("toy.py", 2, line, line.replace("<", sign)) for sign in (">", "<=", ">="))
    drawn = {group: [other, same, listed]}
    outcomes = TOOL["judge"](root, drawn, {listed.text}, 1, TOOL["Verdicts"](None, root))[group]
    assert {outcome.mutant: (outcome.verdict, outcome.by) for outcome in outcomes} == {
        other: ("killed", "test_toy.py::test_it"),
        same: ("survived", ""),
        listed: ("equivalent", ""),
    }
    assert capsys.readouterr().out.count("toy.py:2: ") == 2


def test_a_drawing_goes_on_where_it_ended(toy, tmp_path, capsys):
    root, group = toy
    line = "    return a if a < b else b"
    killed, survivor = (Mutant("toy.py", 2, line, line.replace("<", sign)) for sign in (">", "<="))

    def verdicts():
        saved = TOOL["Verdicts"](tmp_path / "saved", root)
        outcomes = TOOL["judge"](root, {group: [killed, survivor]}, set(), 1, saved)[group]
        return [outcome.verdict for outcome in outcomes], capsys.readouterr().out.count("toy.py:2: ")

    assert verdicts() == (["killed", "survived"], 2)
    assert verdicts() == (["killed", "survived"], 0)
    with (root / "tests/test_toy.py").open("a") as file:
        file.write("def test_ties(): assert type(least(1.0, 1)) is int\n")
    assert verdicts() == (["killed", "killed"], 1), "a survivor meets changed tests"


def test_no_verdict_where_the_tests_fail_anyway(toy):
    root, group = toy
    (root / "tests/test_toy.py").write_text("def test_it(): assert False\n")
    mutant = Mutant("toy.py", 1, "def least(a, b):", "def least(b, a):")
    with pytest.raises(SystemExit, match="fails without a mutant"):
        TOOL["judge"](root, {group: [mutant]}, set(), 1, TOOL["Verdicts"](None, root))


def test_a_mutant_meets_the_tests_of_its_module_first():
    groups = {group.name: group for group in TOOL["GROUPS"]}
    (first, markers), *others = TOOL["stages"](groups["headers"], "kernels/common/terms/relative_bias.cuh")
    assert (first, markers) == (("test_terms_relative_bias.py",), TOOL["BOTH"])
    met = [test for tests, marked in others if marked == markers for test in tests]
    assert sorted((*first, *met)) == sorted({*groups["headers"].tests, *groups["headers"].wider})
