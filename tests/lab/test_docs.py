"""The documents' tables and plots come from records, and these documents' tables and plots from these records."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docs as command
import documents
import host
import pytest
import torch
from documents import plots, programs, reports
from documents.records import Checkout
from typer.testing import CliRunner

from support import make_problem
from tilewise import Dense
from tilewise.errors import InvalidInput
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.commands import options
from tilewise.lab.commands.app import app
from tilewise.lab.commands.command import program
from tilewise.lab.measure.compare import VERIFIED, Comparison, Outcome, Row, Settings
from tilewise.lab.model.launched import launched
from tilewise.lab.render import lengths
from tilewise.lab.studies import bench, kept, records, suites
from tilewise.lab.studies import inspect as inspection
from tilewise.plan import plan
from tilewise.target import TARGETS, Target

if TYPE_CHECKING:
    from tilewise import Problem

ROOT = Path(__file__).parents[2]
DOCS = program(command.docs)
KERNELS = [launched(plan(make_problem((1, 8, 128, 64)), Target.named("h200")), ("step",))]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def made_up(
    name: str = "forward", date: str = "2026-01-02T03:04:05+00:00", gpu: str = "NVIDIA H200", rounds: int = 7
) -> dict[str, Any]:
    """A record of a suite as if it had run on today's kernels: ours twice as fast as all others, quadratic in length,
    and the last of a row's own candidates refusing."""
    errors = {"out": {"norm": 2e-3, "worst_row": 3e-3}}
    done = []
    h200 = Target.named("h200")
    for plain in suites.rows_of(name):
        row = replace(plain, candidates=tuple(dict.fromkeys((*plain.candidates, *suites.peers_of(name, plain)))))
        seconds = 1e-9 * row.problem.seq_q
        outcomes = [Outcome(candidate, VERIFIED, errors=errors) for candidate in row.candidates]
        outcomes[0].memory = 1 << 20
        for outcome in outcomes:
            setattr(outcome, row.timed[0], [[seconds if outcome is outcomes[0] else 2 * seconds]] * rounds)
            if Candidate(outcome.candidate).is_ours and row.device == "cuda":
                chosen = plan(row.asked(outcome.candidate), h200, Candidate(outcome.candidate).backend)
                outcome.kernels = launched(chosen, row.timed)
        last = len(plain.candidates) - 1
        outcomes[last] = Outcome(row.candidates[last], "refused", ["too tall"])
        done.append(Comparison(row, outcomes))
    record = bench.record(name, done, Settings(), ["tilewise", "bench"])
    record["provenance"] |= {"date": date, "gpus": [{"name": gpu}]}
    for row in record["rows"]:
        row["measured"] = date
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]


def checkout(folder: Path, *found: dict[str, Any], text: str = "") -> Path:
    (folder / bench.RESULTS).mkdir(parents=True)
    (folder / "docs").mkdir()
    for number, record in enumerate(found):
        kept.write(record, folder / bench.RESULTS / f"{number}.json")
    (folder / bench.RESULTS / "other.json").write_text('{"kind": "something else"}')
    (folder / bench.RESULTS / "broken.json").write_text("{")
    (folder / "README.md").write_text(text)
    return folder


def after(page: Path) -> str:
    """What the one page of a checkout should hold."""
    (found,) = documents.pages(page.parents[1])
    return found.after


def test_our_tables_and_plots_are_those_of_the_records() -> None:
    """Run `make docs` if this fails."""
    assert documents.pages(ROOT)
    assert [page.path.name for page in documents.pages(ROOT) if page.stale] == []
    assert documents.stale_plots(ROOT) == []


def test_the_newest_whole_record_of_the_suite_and_gpu_is_cited(tmp_path: Path) -> None:
    part = made_up(date="2026-09-09T00:00:00+00:00")
    part["rows"] = part["rows"][:3]
    stopped = made_up(date="2026-08-08T00:00:00+00:00")
    stopped["rows"][-1]["complete"] = False
    other = made_up(date="2026-07-07T00:00:00+00:00", gpu="NVIDIA A100")
    new, old = made_up(date="2026-02-02T00:00:00+00:00"), made_up()
    kept = records.read_all(checkout(tmp_path, part, stopped, other, new, old) / bench.RESULTS)
    assert len(kept) == 5
    assert records.newest(kept, "forward", "h200").date == new["provenance"]["date"]  # type: ignore[union-attr]
    assert records.newest(kept, "forward").device == "NVIDIA H200", "an A100 has no such kernels"  # type: ignore[union-attr]
    assert records.newest(kept, "backward") is None
    assert records.newest(kept, "forward", "T4") is None


def test_what_a_record_says_survives_being_read_back() -> None:
    record = made_up()
    (again, *_) = records.Record("r", "", record).comparisons
    told = again.to_dict()
    assert {key: told[key] for key in ("row", "problem", "times", "best_peer", "compared")} == {
        key: record["rows"][0][key] for key in ("row", "problem", "times", "best_peer", "compared")
    }
    assert told["candidates"][0]["ratio"] == pytest.approx(2.0)


def test_blocks_are_rewritten_and_nothing_else(tmp_path: Path) -> None:
    marked = "# head\n<!-- bench forward table gpu=H200 -->\nold\n<!-- /bench -->\nbetween\n"
    marked += "<!-- bench backward table -->\n<!-- /bench -->\n<!-- bench summary gpu=H200 -->\n<!-- /bench -->\ntail\n"
    root = checkout(tmp_path, made_up(), text=marked)
    (page,) = documents.pages(root)
    assert page.stale
    after = page.after
    assert after.startswith("# head\n<!-- bench forward table gpu=H200 -->\n| problem |")
    assert after.endswith("<!-- /bench -->\ntail\n")
    assert "old" not in after
    assert "\nbetween\n" in after
    assert "Not measured with today's kernels" in after.partition("bench backward table")[2]
    assert "| forward | forward | 2.00 | 2.00 |" in after
    assert "| backward | backward | | | | not measured | |" in after
    assert "| grouped | forward + backward + step | | | | not measured | |" in after
    assert after.count("\n| bfloat16 ") == len(suites.rows_of("forward"))
    assert "all rows, against the fastest that is not ours: geomean 2.000, worst 2.000" in after
    assert "[0.json](benchmarks/results/0.json)" in after
    page.path.write_text(after)
    (settled,) = documents.pages(root)
    assert not settled.stale


def test_a_table_names_the_answers_of_others_that_are_wrong(tmp_path: Path) -> None:
    record = made_up()
    wrong = record["rows"][0]["candidates"][1]
    wrong |= {"verdict": "wrong", "because": ["dq norm error 1.3, budget 0.001"]}
    root = checkout(tmp_path, record, text="<!-- bench forward table -->\n<!-- /bench -->\n")
    (page,) = documents.pages(root)
    assert f"- no right answer of {wrong['candidate']}, wrong: {record['rows'][0]['row']}\n" in page.after


@pytest.mark.parametrize("marker", ["nope table", "forward", "forward table plot", "forward sideways", "table"])
def test_a_marker_that_means_nothing_is_an_error(marker: str, tmp_path: Path) -> None:
    root = checkout(tmp_path, text=f"<!-- bench {marker} -->\n<!-- /bench -->\n")
    with pytest.raises(InvalidInput, match=r"README\.md"):
        documents.pages(root)
    result = CliRunner().invoke(DOCS, ["--root", str(root)])
    assert result.exit_code == 2
    assert "correct the marker" in result.stderr


def test_series_need_lengths() -> None:
    found = lengths.panels(records.Record("r", "", made_up()).comparisons)
    assert set(found) == {f"head_dim {d}, {m}" for d in (64, 128, 256) for m in ("full", "causal")}
    points = found["head_dim 128, full"]["tilewise"]
    assert tuple(point.length for point in points) == LENGTHS
    # 16384 tokens in all: the time of a sequence is that of the row, shared among its sequences
    assert lengths.exponent(LENGTHS, [point.seconds for point in points]) == pytest.approx(2.0)
    assert lengths.exponent(LENGTHS, [point.mebibytes for point in points]) == pytest.approx(1.0)
    assert "torch-flash" not in found["head_dim 128, full"]
    assert lengths.panels(records.Record("r", "", made_up("small")).comparisons) == {}


def test_problems_that_are_timed_in_several_ways_have_a_line_each(tmp_path: Path) -> None:
    names = ("grouped", "drawn")
    marked = "".join(f"<!-- bench {name} problems gpu=H200 -->\n<!-- /bench -->\n" for name in names)
    marked += "<!-- bench summary gpu=H200 -->\n<!-- /bench -->\n"
    empty = checkout(tmp_path / "empty", text=marked)
    assert documents.pages(empty)[0].after.count("Not measured on H200 with today's kernels") == 2
    root = checkout(tmp_path / "full", *(made_up(name) for name in names), text=marked)
    (page,) = documents.pages(root)
    grouped, drawn, summary = page.after.split("<!-- /bench -->\n")[:3]
    assert "| problem | forward | backward | step |" in grouped
    assert grouped.count("\n| bfloat16 ") == len(suites.rows_of("grouped")) // 3
    assert grouped.count(" 2.00x, ") == len(suites.rows_of("grouped"))
    assert "| bfloat16 1x32x4096x128 kv8 causal Llama-3-8B |" in grouped
    assert "| problem | forward graph | forward eager | backward graph | backward eager |" in drawn
    assert drawn.count(" 2.00x, ") == len(suites.rows_of("drawn"))
    assert len(re.findall(r"seed0#\d\d \|", drawn)) == len(suites.rows_of("drawn")) // 4
    for kind in ("forward graph", "forward eager", "backward graph", "backward eager"):
        assert re.search(rf"^- {kind}: geomean 2\.000, .*0 of \d+ under 0\.97 \(0\.0%\)", drawn, re.MULTILINE)
        assert f"| drawn | {kind} | 2.00 | 2.00 | 0% |" in summary
        assert f"| drawn | {kind}, window | 2.00 | 2.00 | 0% |" in summary
    for kind in ("forward", "backward", "step"):
        assert f"| grouped | {kind} | 2.00 | 2.00 | 0% |" in summary
    assert re.search(r", (commit \w+( with changes)?|an installed package)\.$", grouped.splitlines()[-1])


def test_goals_stand_beside_what_was_reached(tmp_path: Path) -> None:
    marked = "<!-- bench variants goals gpu=H200 -->\n<!-- /bench -->\n"
    (page,) = documents.pages(checkout(tmp_path, made_up("variants"), text=marked))
    head, rule, *lines = page.after.splitlines()[1:]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns[:2] == ["row", "us"]
    assert rule.count("|") == head.count("|") == len(columns) + 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| bfloat16")]
    assert [row[0] for row in rows] == [row.name for row in suites.rows_of("variants")]
    by_name = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    biased = by_name["bfloat16 4x16x4096x128 bias forward"]
    assert (biased["ratio"], biased["floor, aim"]) == ("2.00x", "1.25, 1.40")


def test_whole_models_are_a_table_of_their_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "integrations.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- models -->\n<!-- /models -->\nafter\n")
    assert "*Not measured yet: `python benchmarks/models.py --save`" in after(page)
    times = {"tilewise": [2e-3] * 15, "sdpa": [3e-3] * 15}
    speed = {"ratio": 1.5, "low": 1.4, "high": 1.6}
    row = {"model": "llama", "what": "step", "batch": 4, "tokens": 2048, "seconds": times, "speed": speed}
    failed = {"model": "t5", "what": "step", "batch": 1, "tokens": 9, "seconds": {"tilewise": []}, "speed": None}
    provenance = made_up()["provenance"]
    provenance["versions"] = {"torch": "2.11", "transformers": "5.17"}
    record = {"kind": programs.KIND, "suite": "transformers", "provenance": provenance, "rows": [row, failed]}
    record |= {"settings": {"tiny": False}, "kernels": KERNELS}
    (tmp_path / bench.RESULTS).mkdir(parents=True)
    (tmp_path / bench.RESULTS / "2026-11-16T130446Z-transformers.json").write_text(json.dumps(record))
    for tiny in ({"kind": "another"}, {"settings": {"tiny": True}}):
        (tmp_path / bench.RESULTS / "2026-11-17T000000Z-transformers.json").write_text(json.dumps(record | tiny))
        lines = after(page).splitlines()
        assert "| llama | 4 x 2048 | step | 1.50x [1.40, 1.60] | 2.00 ms | 3.00 ms |" in lines
        assert "| t5 | 1 x 9 | step | - | - | - |" in lines
        assert any("15 rounds" in line for line in lines)
        assert (lines[0], lines[-1]) == ("before", "after")
    newer = [row | {"seconds": {name: found[:9] for name, found in times.items()}, "speed": speed | {"ratio": 1.7}}]
    path = tmp_path / bench.RESULTS / "2026-11-18T000000Z-transformers.json"
    path.write_text(json.dumps(record | {"rows": [{**newer[0], "model": "t5"}]}))
    lines = after(page).splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == ["| model", "| llama", "| t5"]
    assert "| t5 | 4 x 2048 | step | 1.70x [1.40, 1.60] | 2.00 ms | 3.00 ms |" in lines, "of the newest that has it"
    told = [line for line in lines if "rounds" in line]
    assert [line.split(" [")[0] for line in told] == ["t5: from", "llama: from"]
    assert ["9 rounds" in line for line in told] == [True, False]


def test_host_time_and_small_models_are_tables_of_their_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "native.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- host calls -->\n<!-- /host -->\n<!-- host models -->\n<!-- /host -->\nafter\n")
    assert after(page).count("*Not measured yet: ") == 2
    provenance = made_up()["provenance"]
    provenance["versions"] = {"torch": "2.11"}
    costs = [("no grad", host.DEFAULT, 2e-5), ("no grad", "ours", 5e-6), ("grad", host.DEFAULT, 3e-5)]
    rows = [{"kind": kind, "call": call, "median": seconds, "seconds": [seconds]} for kind, call, seconds in costs]
    calls = {"kind": host.KIND, "settings": {"shape": [1, 8, 128, 64], "rounds": 9}, "rows": rows, "way": host.way()}
    times = {"tilewise": [2e-3] * 9, "sdpa": [3e-3] * 9}
    speed = {"tilewise": {"ratio": 1.5, "low": 1.4, "high": 1.6}}
    kinds = ("generate", "padded generate")
    found = [{"model": "Llama", "what": kind, "seconds": times, "speed": speed, "wrong": {}} for kind in kinds]
    models = {"kind": programs.KIND, "settings": {"tiny": False}, "rows": found}
    (tmp_path / bench.RESULTS).mkdir(parents=True)
    for suite, record in (("host-cuda", calls), ("eager", models)):
        name = f"2026-11-16T130446Z-{suite}.json"
        (tmp_path / bench.RESULTS / name).write_text(
            json.dumps(record | {"suite": suite, "provenance": provenance, "kernels": KERNELS})
        )
    lines = after(page).splitlines()
    assert "| ours | 5.0 us, 0.25 | - | - |" in lines
    assert f"| {host.DEFAULT} | 20.0 us, 1.00 | 30.0 us, 1.00 | - |" in lines
    assert "| Llama | `generate()` | 1.50x [1.40, 1.60] | 3.00 ms |" in lines
    assert "| Llama | `generate()`, padded prompts | 1.50x [1.40, 1.60] | 3.00 ms |" in lines
    assert (lines[0], lines[-1]) == ("before", "after")
    other_sources = calls | {"suite": "host-cuda", "provenance": provenance, "kernels": KERNELS, "way": "another"}
    (tmp_path / bench.RESULTS / "2026-11-16T130446Z-host-cuda.json").write_text(json.dumps(other_sources))
    assert after(page).count("*Not measured yet: ") == 1


def test_another_library_that_is_faster_than_pytorch_is_named(tmp_path: Path) -> None:
    record = made_up("grouped")
    for row in record["rows"]:
        fast = next(one for one in row["candidates"] if one["candidate"] == "fa4")
        fast |= {what: [[seconds[0][0] / 4]] * 7 for what in row["times"] for seconds in [fast[what]]}
    text = "<!-- bench grouped problems -->\n<!-- /bench -->\n"
    (page,) = documents.pages(checkout(tmp_path, record, text=text))
    assert page.after.count("| 0.50x fa4 (PyTorch: 2.00x), ") == len(suites.rows_of("grouped"))
    assert "- backward: geomean 0.500" in page.after
    assert "- backward, against PyTorch's own paths: geomean 2.000" in page.after
    text = "<!-- bench summary -->\n<!-- /bench -->\n"
    (page,) = documents.pages(checkout(tmp_path / "summary", record, text=text))
    assert re.search(
        r"^\| grouped \| backward \| 0\.50 \| 0\.50 \| 100% \| [^|]* \| 2\.00 \|", page.after, re.MULTILINE
    )


def test_another_library_in_a_record_has_a_column(tmp_path: Path) -> None:
    record = made_up("forward")
    for row in record["rows"][5:]:
        refusing = next(one for one in row["candidates"] if one["candidate"] == "fa3")
        refusing |= {"verdict": "refused", "because": ["too tall"], "forward": []}
    text = "<!-- bench forward table -->\n<!-- /bench -->\n"
    (page,) = documents.pages(checkout(tmp_path / "with", record, text=text))
    head, _, *lines = page.after.splitlines()[1:]
    assert "| against FlashAttention-3 |" in head
    cells = [line.count("2.00x [1.98, 2.02]") for line in lines if line.startswith("| bfloat16")]
    assert cells == [3] * 5 + [2] * (len(record["rows"]) - 5), "PyTorch's best, FlashAttention-4, and -3 in five rows"
    (page,) = documents.pages(checkout(tmp_path / "without", made_up("cpu"), text=text.replace("forward", "cpu")))
    assert "FlashAttention" not in page.after


def test_the_headline_says_how_many_rows_a_library_takes_and_which_row_is_worst(tmp_path: Path) -> None:
    record = made_up("backward")
    for number, row in enumerate(record["rows"]):
        fa4 = next(one for one in row["candidates"] if one["candidate"] == "fa4")
        if number < 3:
            fa4 |= {"verdict": "wrong", "because": ["dq"], "backward": []}
        if number == 5:
            fa4["backward"] = [[seconds / 4 for seconds in found] for found in fa4["backward"]]
    (page,) = documents.pages(checkout(tmp_path, record, text="<!-- bench headline gpu=H200 -->\n<!-- /bench -->\n"))
    (line,) = [line for line in page.after.splitlines() if line.startswith("| Backward |")]
    rows = len(record["rows"])
    assert f"FlashAttention-4 {2.0 * 0.25 ** (1 / (rows - 3)):.2f} ({rows - 3} rows), cuDNN 2.00" in line
    assert line.endswith(f"| 0.50, FlashAttention-4: {record['rows'][5]['row']} |")
    assert "so that no figure is shown: forward; " in page.after


def test_few_rounds_and_changed_kernels_are_marked_and_not_cited(tmp_path: Path) -> None:
    few, old = made_up("forward", rounds=3), made_up("backward")
    for row in old["rows"][:2]:
        row["candidates"][0]["kernels"]["program"] = "another"
    text = "<!-- bench forward table -->\n<!-- /bench -->\n<!-- bench backward plot -->\n<!-- /bench -->\n"
    (page,) = documents.pages(checkout(tmp_path, few, old, made_up("small"), text=text))
    assert page.after.count("*Not measured with today's kernels") == 2
    changed = f"the kernels of 2 of {len(old['rows'])} rows have changed since"
    shown = CliRunner().invoke(app, ["bench", "--record", str(tmp_path / bench.RESULTS / "0.json")])
    assert shown.stdout.startswith("note: 3 rounds, too few to judge a difference\n")
    shown = CliRunner().invoke(app, ["bench", "-q", "--record", str(tmp_path / bench.RESULTS / "1.json")])
    assert shown.stdout.splitlines()[0] == f"note: {changed}"


def test_a_folder_with_nothing_to_check_is_not_well(tmp_path: Path) -> None:
    for arguments in (["--check"], []):
        result = CliRunner().invoke(DOCS, [*arguments, "--root", str(tmp_path / "nothing")])
        assert result.exit_code == 2
        assert "--root" in result.stderr


def test_many_rows_become_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures are drawn by matplotlib")
    record = records.Record("0.json", "digest", made_up("drawn"))
    (path,) = plots.draw(record, tmp_path)
    assert path.name == "drawn-sorted.svg"
    assert plots.is_of(path, record)
    for kind in ("forward graph", "forward eager", "backward graph", "backward eager"):
        assert f"{kind}: geomean 2.00" in path.read_text()
    assert "window" not in path.read_text()
    assert [path.name for path in plots.paths(tmp_path, records.Record("r", "", made_up("grouped")))] == [
        "grouped-ratio.svg"
    ]


def test_plots_name_their_record_and_stale_ones_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures are drawn by matplotlib")
    root = checkout(tmp_path, made_up(), text="<!-- bench forward plot gpu=H200 -->\n<!-- /bench -->\n")
    assert {path.name for path in documents.stale_plots(root)} == {
        f"forward-{kind}.svg" for kind in ("speed", "ratio", "scaling")
    }
    runner = CliRunner()
    assert runner.invoke(DOCS, ["--check", "--root", str(root)]).exit_code == 1
    assert runner.invoke(DOCS, ["--root", str(root)]).exit_code == 0
    assert documents.stale_plots(root) == []
    told = runner.invoke(DOCS, ["--check", "--root", str(root)])
    assert (told.exit_code, told.stdout.startswith("all tables")) == (0, True)
    for path in (root / "docs" / "plots").iterdir():
        assert f"(docs/plots/{path.name})" in (root / "README.md").read_text()
        assert "H200" in path.read_text()
    scaling = (root / "docs/plots/forward-scaling.svg").read_text()
    assert "length^2.00" in scaling
    (root / bench.RESULTS / "1.json").write_text(json.dumps(made_up(date="2026-05-05T00:00:00+00:00")))
    assert len(documents.stale_plots(root)) == 3


def test_without_matplotlib_plots_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    root = checkout(tmp_path, made_up(), text="<!-- bench forward plot gpu=H200 -->\n<!-- /bench -->\n")
    result = CliRunner().invoke(DOCS, ["--root", str(root)])
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert "forward-speed.svg" in (root / "README.md").read_text()


def test_a_record_can_be_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(made_up("training")))
    page = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["bench", "--record", str(path), "--html", str(page)])
    assert result.exit_code == 0
    assert "; NVIDIA H200; torch " in result.stdout
    assert "step" in result.stdout
    assert "2.00x faster</span> than the fastest other attention" in page.read_text()
    assert f'content="tilewise bench {made_up()["provenance"]["date"]}"' in page.read_text()
    for bad in ("{", '{"kind": "other"}'):
        path.write_text(bad)
        assert CliRunner().invoke(app, ["bench", "--record", str(path)]).exit_code == 2


def test_the_page_of_targets_has_the_facts_of_the_table() -> None:
    """Every GPU that is known by name, with the figures that plans and rooflines use; and a source for each."""
    text = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    facts, sources = text.split("## Where the facts come from")
    rows = [line.strip("| ").split(" | ") for line in facts.splitlines() if line.startswith("| `")]
    gpus = [target for target in TARGETS.values() if not target.is_cpu]
    assert rows == [
        [
            f"`{gpu.name}`", f"{gpu.capability[0]}.{gpu.capability[1]}", str(gpu.sms),
            f"{gpu.smem_per_sm / 1024:g} / {gpu.smem_per_block / 1024:g}", f"{gpu.l2_bytes / 2**20:g}",
            f"{gpu.dram_bytes / 1e9:g}", f"{gpu.dram_bytes_per_s / 1e12:g}", f"{gpu.clock_hz / 1e9:g}",
            *(f"{rate / 1e12:g}" for rate in (gpu.flops_16bit, gpu.flops_tf32, gpu.flops_fp32)),
        ]
        for gpu in gpus
    ]  # fmt: skip
    assert all(f"`{gpu.name}`" in sources for gpu in gpus)


def inspected(date: str, name: str, *, grad: bool = False, complete: bool = True) -> dict[str, Any]:
    """A record of inspect on an H200, as `--save` writes it."""
    problem = make_problem((2, 8, 512, 64), torch.float16, needs_grad=grad)
    target = Target.named("h200")
    chosen = plan(problem, target)
    ours, theirs = (
        Outcome("tilewise", VERIFIED, forward=[[1e-5]] * 7),
        Outcome("torch-cudnn", VERIFIED, forward=[[2e-5]] * 7),
    )
    ours.kernels = launched(chosen, ("forward",))
    row = Row("inspect", problem, ("tilewise", "torch-cudnn"), "cuda", "graph", times=("forward",))
    found = inspection.Inspection(chosen, Comparison(row, [ours, theirs], complete=complete))
    found.counters = {"tilewise": [{"kernel": "k", "counters": {}}]}
    provenance = made_up("small", date)["provenance"]
    return json.loads(json.dumps(found.to_dict() | {"provenance": provenance, "suite": name}))  # type: ignore[no-any-return]


def test_reports_are_those_of_the_newest_whole_records(tmp_path: Path) -> None:
    report = reports.REPORTS[0]
    (tmp_path / bench.RESULTS).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    listed = tmp_path / reports.PAGE
    listed.write_text("before\n<!-- reports -->\n<!-- /reports -->\nafter\n")

    def keep(date: str, name: str = report.name, **more: Any) -> Path:
        return kept.save(inspected(date, name, **more), tmp_path / bench.RESULTS)

    assert reports.find(report, Checkout(tmp_path)) is None
    keep("2026-03-01T00:00:00+00:00", complete=False)
    assert reports.find(report, Checkout(tmp_path)) is None, "one that was interrupted is not cited"
    whole = keep("2026-02-01T00:00:00+00:00")
    keep("2026-04-01T00:00:00+00:00", grad=True)  # another problem
    keep("2026-05-01T00:00:00+00:00", f"{report.name}-flags")
    older = inspected("2026-05-02T00:00:00+00:00", report.name)
    older["comparison"]["candidates"][0]["kernels"]["program"] = "another"
    kept.save(older, tmp_path / bench.RESULTS)
    found = reports.find(report, Checkout(tmp_path))
    assert found is not None
    assert found.path == whole
    assert CliRunner().invoke(DOCS, ["--check", "--root", str(tmp_path)]).exit_code == 1
    assert CliRunner().invoke(DOCS, ["--root", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "docs" / f"{report.name}.html").read_text()
    assert "2026-02-01" in page
    text = listed.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert f"]({report.name}.html) | [NVIDIA H200, 2026-02-01](../benchmarks/results/{whole.name}); by graph" in text
    assert "with Nsight Compute's counters" in text
    assert text.count("not measured yet") == len(reports.REPORTS) - 2
    assert CliRunner().invoke(DOCS, ["--check", "--root", str(tmp_path)]).exit_code == 0
    keep("2026-06-01T00:00:00+00:00")
    assert CliRunner().invoke(DOCS, ["--check", "--root", str(tmp_path)]).exit_code == 1


def test_the_commands_of_the_reports_make_records_of_their_names() -> None:
    """What a list of reports says to run is what fills it in. Saved tensors name their problem themselves."""
    kept: dict[str, Any] = {}

    def inspect(problem: Problem, *_: Any, **__: Any) -> None:
        kept["problem"] = problem
        raise InvalidInput("it", "is", "not", "measured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "inspect", inspect)
        for report in reports.REPORTS:
            words = report.command.split()
            if "--tensors" in words:
                continue
            kept.clear()
            patch.setattr(options, "make_device", lambda name: "cuda")
            CliRunner().invoke(app, words[1:])
            experiment = words[words.index("--experiment") + 1] if "--experiment" in words else ""
            assert inspection.record_name(kept["problem"], experiment) == report.name
            assert kept["problem"].needs_grad == report.with_gradients
    padded = make_problem((4, 16, 2048, 128), mask=Dense((4, 1, 1, 2048)))
    assert inspection.record_name(padded) == "inspect-4x16x2048x128-dense"
