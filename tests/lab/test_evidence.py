"""What makes a record evidence: its kernels, its rows, its peers; and that the documents cite nothing else."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import documents
import evidence
import instrument
import pytest
from documents import ladder as ladder_page
from documents import reports
from test_docs import checkout, made_up

from tilewise.jit.compile import KERNELS
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.candidates.variants import THREE_KERNEL
from tilewise.lab.measure.compare import VERIFIED, Comparison, Outcome, Row, Settings
from tilewise.lab.model import launched
from tilewise.lab.studies import bench, kept, ladder, records, suites, tune
from tilewise.ladder import RUNGS, traffic
from tilewise.plan import plan
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
H200 = Target.named("h200")


def shortcomings(record: dict[str, Any]) -> dict[str, str]:
    return records.Record("made-up.json", "", json.loads(kept.compact(record))).shortcomings()


def without_a_row(record: dict[str, Any]) -> None:
    record["rows"].pop(3)


def without_a_peer(record: dict[str, Any]) -> None:
    record["rows"][3]["candidates"] = [one for one in record["rows"][3]["candidates"] if one["candidate"] != "fa4"]


def without_a_reason(record: dict[str, Any]) -> None:
    other = next(one for one in record["rows"][3]["candidates"] if one["candidate"] == "fa4")
    other |= {"verdict": "refused", "because": [], "backward": []}


def with_another_kernel(record: dict[str, Any]) -> None:
    units = record["rows"][3]["candidates"][0]["kernels"]["units"]
    units |= dict.fromkeys(list(units)[:1], "0" * 12)


def with_another_grid(record: dict[str, Any]) -> None:
    record["rows"][3]["candidates"][0]["kernels"]["program"] = "0" * 12


def with_few_rounds(record: dict[str, Any]) -> None:
    for one in record["rows"][3]["candidates"]:
        one["backward"] = one["backward"][:4]


def without_our_answer(record: dict[str, Any]) -> None:
    record["rows"][3]["candidates"][0] |= {"verdict": "not verified", "because": ["no truth"]}


def without_names(record: dict[str, Any]) -> None:
    record["rows"][3]["candidates"][0]["kernels"] = None


CHANGES = (
    (without_a_row, "not measured"),
    (without_a_peer, "fa4 was not asked"),
    (without_a_reason, "fa4: refused, without a time"),
    (with_another_kernel, "have changed"),
    (with_another_grid, "another config or another grid"),
    (with_few_rounds, "4 rounds of tilewise, fewer than 5"),
    (without_names, "does not name its kernels"),
    (without_our_answer, "tilewise: not verified"),
)


@pytest.mark.parametrize(("change", "why"), CHANGES, ids=lambda given: getattr(given, "__name__", ""))
def test_a_row_is_no_evidence_without(change: Callable[[dict[str, Any]], None], why: str) -> None:
    record = made_up("backward")
    assert shortcomings(record) == {}
    change(record)
    found = shortcomings(record)
    assert list(found) == [suites.rows_of("backward")[3].name]
    assert why in next(iter(found.values()))


def test_a_peer_that_is_not_set_up_is_missed_and_one_that_fails_a_row_is_not() -> None:
    record = made_up("backward")
    of_peer = [one for row in record["rows"] for one in row["candidates"] if one["candidate"] == "fa4"]
    of_peer[3] |= {"verdict": "raised RuntimeError: no such shape", "backward": []}
    assert shortcomings(record) == {}
    for one in of_peer:
        one |= {"verdict": "raised ImportError: no module", "backward": []}
    assert len(shortcomings(record)) == len(of_peer)


def test_the_check_of_the_documents_fails_where_a_record_lacks_something(tmp_path: Path) -> None:
    text = "<!-- bench backward table gpu=H200 -->\n<!-- /bench -->\n"
    root = checkout(tmp_path, made_up("backward"), text=text)
    (page,) = documents.pages(root)
    page.path.write_text(page.after)
    assert "[0.json]" in page.after
    assert evidence.complaints(root) == []
    name = suites.rows_of("backward")[3].name
    for change, why in CHANGES:
        record = made_up("backward")
        change(record)
        kept.write(record, root / bench.RESULTS / "0.json")
        (line,) = evidence.complaints(root)
        assert line.startswith(f"0.json: {name}: ")
        assert why in line
    assert documents.pages(root)[0].after != page.after, "it would not be cited again"


def test_a_figure_that_was_changed_by_hand_is_seen_and_a_record_that_is_gone(tmp_path: Path) -> None:
    text = "<!-- bench backward table gpu=H200 -->\n<!-- /bench -->\nAs [that](benchmarks/results/0.json) says.\n"
    root = checkout(tmp_path, made_up("backward"), text=text)
    for name in ("other.json", "broken.json"):
        (root / bench.RESULTS / name).unlink()
    (page,) = documents.pages(root)
    page.path.write_text(page.after)
    assert evidence.check(root) == []
    page.path.write_text(page.after.replace("2.00x", "3.00x", 1))
    assert evidence.check(root) == ["README.md: differs from its records: run `make docs`"]
    page.path.write_text(page.after)
    (root / bench.RESULTS / "0.json").write_text("{")
    assert "0.json: pages take figures from this record, which cannot be read: " in evidence.check(root)[0]
    (root / bench.RESULTS / "0.json").unlink()
    of_tables, of_links = evidence.check(root)
    assert of_tables.startswith("0.json: pages take figures from this record, which cannot be read: ")
    assert of_links == "0.json: pages link to this record, which is not there"
    (root / "README.md").write_text("As [that](benchmarks/results/0.json) says.\n")
    assert evidence.check(root) == [of_links]


def ladder_record() -> dict[str, Any]:
    """As if every rung had run on today's kernels."""
    problem = ladder_page.problems()[0]
    outcomes = [Outcome(rung.candidate, VERIFIED, forward=[[1e-3]] * 7) for rung in RUNGS]
    for outcome in outcomes:
        if Candidate(outcome.candidate).is_ours:
            asked = {"problem": problem.to_dict(), "asked": outcome.candidate}
            outcome.kernels = launched.today(asked, H200, ("forward",))
    comparison = Comparison(Row("ladder", problem, tuple(rung.candidate for rung in RUNGS), "cuda"), outcomes)
    parts = {"kernels": [launched.of_variant(THREE_KERNEL, problem, H200)]}
    climb = ladder.Climb(problem, "cuda", comparison, traffic.every(problem, H200), {}, parts)
    return on_an_h200(ladder.record([climb], Settings(), ["tilewise", "ladder"]))


def tune_record() -> dict[str, Any]:
    """As if the first configs of a search had run on today's kernels."""
    problem, settings = ladder_page.problems()[0], tune.Settings(max_configs=5)
    shipped, space = tune.search(THREE_KERNEL, problem, H200, settings)
    trials = [tune.Trial(one, tune.label_of(one), tune.MEASURED, rounds={0: [1e-3]}, turns=[1e-3] * 9) for one in space]
    found = tune.Sweep(THREE_KERNEL, problem, H200, trials, tune.label_of(shipped), complete=True)
    return on_an_h200(tune.record([found], settings, ["tilewise", "tune"]))


def on_an_h200(record: dict[str, Any]) -> dict[str, Any]:
    record["provenance"]["gpus"] = [{"name": "NVIDIA H200"}]
    return json.loads(kept.compact(record))  # type: ignore[no-any-return]


def rungs_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["candidate"]: one for one in record["climbs"][0]["comparison"]["candidates"]}


def without_a_rung(record: dict[str, Any]) -> None:
    record["climbs"][0]["comparison"]["candidates"].remove(rungs_of(record)["ladder:numba"])


def with_another_rung(record: dict[str, Any]) -> None:
    rungs_of(record)["ladder:lecture"]["kernels"]["units"] = {"lecture": "0" * 12}


def with_a_rung_without_names(record: dict[str, Any]) -> None:
    del rungs_of(record)["ladder:matmul"]["kernels"]


def with_another_planned_rung(record: dict[str, Any]) -> None:
    units = rungs_of(record)["sm90"]["kernels"]["units"]
    units |= dict.fromkeys(units, "0" * 12)


def without_a_unit(record: dict[str, Any]) -> None:
    record["kernels"][-1]["units"].popitem()


def with_a_config_that_is_no_more(record: dict[str, Any]) -> None:
    record["kernels"][0]["asked"] = f"{THREE_KERNEL}@tile=7"


def without_names_of_kernels(record: dict[str, Any]) -> None:
    del record["kernels"]


def without_kernels(record: dict[str, Any]) -> None:
    record["kernels"] = []


def without_a_config(record: dict[str, Any]) -> None:
    record["sweeps"][0]["trials"].pop()


@pytest.mark.parametrize(
    ("make", "change", "why"),
    [
        (ladder_record, without_a_rung, "numba was not asked"),
        (ladder_record, with_another_rung, "ladder:lecture: launches other kernels"),
        (ladder_record, with_a_rung_without_names, "ladder:matmul: the record does not name its kernels"),
        (ladder_record, with_another_planned_rung, "sm90: the sources of"),
        (ladder_record, without_a_unit, "launches other kernels: three_kernel_values"),
        (tune_record, without_a_unit, "launches other kernels: three_kernel_values"),
        (tune_record, with_a_config_that_is_no_more, "tile=7"),
        (tune_record, without_names_of_kernels, "the record does not name them"),
        (tune_record, without_kernels, "the record does not name them"),
        (tune_record, without_a_config, "tries other configs"),
    ],
)
def test_the_ladder_and_sweeps_are_cited_while_their_kernels_are_those_of_today(
    tmp_path: Path, make: Callable[[], dict[str, Any]], change: Callable[[dict[str, Any]], None], why: str
) -> None:
    root = checkout(tmp_path, make())
    blocks = "<!-- ladder figures -->\n<!-- /ladder -->\n<!-- ladder sweep -->\n<!-- /ladder -->\n"
    (root / ladder_page.PAGE).write_text(blocks)
    (root / reports.SWEEPS).write_text("<!-- tune -->\n<!-- /tune -->\n")
    for path in documents.write(root):
        assert path.is_file()
    assert "(../benchmarks/results/0.json)" in (root / ladder_page.PAGE).read_text()
    assert (root / "docs" / "tune-three-kernel.html").is_file() == (make is tune_record)
    assert evidence.complaints(root) == []
    record = make()
    change(record)
    kept.write(record, root / bench.RESULTS / "0.json")
    (line,) = evidence.complaints(root)
    assert line.startswith("0.json: ")
    assert why in line
    documents.write(root)
    assert "0.json" not in (root / ladder_page.PAGE).read_text(), "it would not be cited again"


def test_a_record_that_cannot_name_its_kernels_is_cited_by_no_generated_part(tmp_path: Path) -> None:
    record = tune_record() | {"kind": "tilewise cycles"}
    text = "<!-- cycles -->\n[record](benchmarks/results/0.json)\n<!-- /cycles -->\n"
    root = checkout(tmp_path, text=text)
    (root / bench.RESULTS / "0.json").write_text(json.dumps(record))
    (line,) = evidence.complaints(root)
    assert "tilewise cycles" in line
    (root / bench.RESULTS / "0.json").write_text(json.dumps(record | {"kind": instrument.KIND}))
    assert evidence.complaints(root) == []


def test_what_is_asked_for_is_measured_in_that_order() -> None:
    names, programs = evidence.chosen(["odd", "tune-d128", "forward", "ladder"], on_gpu=True)
    assert names == ["odd", "forward"]
    assert [program.name for program in programs] == ["tune-d128", "ladder"]
    assert evidence.chosen([], on_gpu=False) == (["cpu"], [])
    with pytest.raises(SystemExit, match="no oddities"):
        evidence.chosen(["oddities"], on_gpu=True)


def test_our_documents_are_backed_by_records_of_the_kernels_as_they_are() -> None:
    """Run `make evidence` on a machine with the GPU that pages cite, then `make docs`, if this fails."""
    assert evidence.check(ROOT) == []


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(KERNELS, tmp_path_factory.mktemp("sources") / "kernels"))


def changed(kernels: Path) -> dict[str, set[str]]:
    """Rows of some suites that launch something else by these headers, by suite and direction."""
    found: dict[str, set[str]] = {}
    for name in ("forward", "backward", "float32", "sm80", "packed", "decode"):
        for row in suites.rows_of(name):
            chosen = plan(row.problem, H200, Candidate(row.candidates[0]).backend if name == "sm80" else "auto")
            before, now = (launched.launched(chosen, row.timed, where) for where in (KERNELS, kernels))
            if launched.difference(before, now):
                found.setdefault(name, set()).add(row.timed[0])
    return found


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("sm90/backward_products.cuh", {"backward": {"backward"}, "packed": {"step"}}),
        ("sm90/consumer.cuh", {"forward": {"forward"}, "packed": {"forward", "step"}}),
        ("sm80/decode.cuh", {"decode": {"forward"}}),
        ("sm80/backward.cuh", {"sm80": {"backward"}}),
        ("sm90/float32_consumer.cuh", {"float32": {"forward"}}),
    ],
)
def test_a_header_makes_older_exactly_the_rows_that_run_it(
    kernels: Path, header: str, expected: dict[str, set[str]]
) -> None:
    text = (kernels / header).read_text()
    with written(kernels / header, "// a remark\n" + text.replace("\n\n", "\n\n\n")):
        assert changed(kernels) == {}
    with written(kernels / header, text + "\nstruct NeverSeenBefore {};\n"):
        assert changed(kernels) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("ladder/three_kernel.cuh", {"three-kernel"}),
        ("ladder/lecture.cuh", {"lecture"}),
        ("sm80/forward.cuh", {"sm80"}),
        ("sm90/consumer.cuh", {"sm90"}),
    ],
)
def test_a_header_makes_older_exactly_the_rungs_that_run_it(kernels: Path, header: str, expected: set[str]) -> None:
    named = {name: one["kernels"] for name, one in rungs_of(ladder_record()).items() if "kernels" in one}
    asked = {"problem": ladder_page.problems()[0].to_dict()}
    with written(kernels / header, (kernels / header).read_text() + "\nstruct NeverSeenBefore {};\n"):
        today = {name: launched.today(asked | {"asked": name}, H200, ("forward",), kernels) for name in named}
    older = {name for name, known in named.items() if launched.difference(known, today[name])}
    assert {rung.name for rung in RUNGS if rung.candidate in older} == expected


@contextlib.contextmanager
def written(path: Path, text: str) -> Iterator[None]:
    """A header with another text."""
    before = path.read_text()
    path.write_text(text)
    launched.unit_digest.cache_clear()
    try:
        yield
    finally:
        path.write_text(before)
        launched.unit_digest.cache_clear()


def test_rows_that_were_measured_again_take_the_place_of_the_earlier_ones(tmp_path: Path) -> None:
    first = made_up("backward")
    later = made_up("backward")
    later["provenance"] |= {"date": "2026-02-03T00:00:00+00:00"}
    later["rows"] = later["rows"][5:7]
    for row in later["rows"]:
        row["measured"] = later["provenance"]["date"]
    path = tmp_path / "h200-backward.json"
    kept.write(first, path)
    kept.write(records.merged(records.read(path), later), path)
    found = records.read(path)
    assert found.whole
    assert [one.measured[:10] for one in found.comparisons[4:8]] == [
        "2026-01-02",
        "2026-02-03",
        "2026-02-03",
        "2026-01-02",
    ]
    assert [run["date"] for run in found.values["earlier"]] == [first["provenance"]["date"]]
    assert "2026-01-02 to 2026-02-03" in found.about()
    assert found.values["score"]["rows"] == len(found.comparisons)


def test_rows_of_one_problem_are_measured_together() -> None:
    rows = list(suites.rows_of("grouped"))
    found = list(evidence.bunches(rows))
    assert [row for bunch in found for row in bunch] == rows
    assert len(found) > 3
    for one, other in pairwise(found):
        assert one[-1].problem.with_(needs_grad=False) != other[0].problem.with_(needs_grad=False)


def test_what_is_lacking_is_asked_for_again(tmp_path: Path) -> None:
    assert len(evidence.lacking("backward", "NVIDIA H200", tmp_path).rows) == len(suites.rows_of("backward"))
    record = made_up("backward")
    with_another_grid(record)
    without_a_row(record)
    kept.write(record, tmp_path / "h200-backward.json")
    found = evidence.lacking("backward", "NVIDIA H200", tmp_path)
    assert [row.name for row in found.rows] == [suites.rows_of("backward")[3].name]
    assert found.path.name == "h200-backward.json"
    assert found.seconds > 0


def test_a_record_reads_back_as_it_was_measured(tmp_path: Path) -> None:
    record = made_up("backward")
    path = tmp_path / "record.json"
    kept.write(record, path)
    once, again = records.read(path), kept.expanded(kept.read(path))
    assert [one.row.problem for one in once.comparisons] == [row.problem for row in suites.rows_of("backward")]
    assert [row["candidates"][0]["ratio"] for row in again["rows"]] == [
        pytest.approx(row["candidates"][0]["ratio"]) for row in record["rows"]
    ]
    assert path.stat().st_size < 0.4 * len(json.dumps(record))
    assert replace(once.comparisons[0]).outcomes[0].kernels == record["rows"][0]["candidates"][0]["kernels"]
    assert bench.score(once.comparisons).rows == len(record["rows"])
