"""The report: one file that loads nothing, sound as HTML, true to its record, and alive in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import documents
import pytest
import torch
from browser import Browser, find
from documents import plots
from magnitudes import KIND as MAGNITUDES
from test_docs import made_up

from support import make_problem
from tilewise.errors import InvalidInput
from tilewise.lab import units
from tilewise.lab.measure.compare import VERIFIED, WRONG, Comparison, Outcome, Row, read_comparison
from tilewise.lab.model import kernels, roofline
from tilewise.lab.render import (
    charts,
    inspect_report,
    pages,
    roles,
    style,
    views,
)
from tilewise.lab.render import html as reports
from tilewise.lab.report import Kernel, lines
from tilewise.lab.studies import cycles, inspect, records
from tilewise.plan import plan
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OWN_RECORDS = Path(__file__).parent / "records"
VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = "<script>alert(\"x\")</script> & 'co'"


def speed(ratio: float, low: float, high: float, verdict: str, against: str = "torch-default") -> dict[str, Any]:
    """As `statistics` writes it."""
    told = {"against": against, "ratio": ratio, "low": low, "high": high, "verdict": verdict}
    return told | {"rounds": 11, "confidence": 0.99}


def inspection() -> dict[str, Any]:
    """What `inspect --json` would print on an H200, with everything that a report can show."""
    problem = make_problem((1, 16, 4096, 64), torch.bfloat16, needs_grad=True)
    target = Target.named("h200")
    names = ("tilewise", "sm80", "torch-default", "torch-flash", "reference", "flex", "python:m:f", "python:m:g")
    row = Row("inspect", problem, names, "cuda")
    times = {"tilewise": 1e-4, "sm80": 1.7e-4, "torch-default": 2e-4, "torch-flash": 2.01e-4, "reference": 9e-3,
             "flex": 2.2e-4}  # fmt: skip
    outcomes = [
        Outcome(name, VERIFIED, errors={"out": {"norm": 2e-3, "worst_row": 3e-3}, "dq": {"norm": 4e-3, "worst_row": 1}},
                memory=1 << 24, forward=[[taken]] * 5, backward=[[3 * taken]] * 5)
        for name, taken in times.items()
    ]  # fmt: skip
    outcomes += [Outcome("python:m:f", WRONG, [EVIL]), Outcome("python:m:g", "died: SIGSEGV", ["out of luck"])]
    found = inspect.Inspection(plan(problem, target), Comparison(row, outcomes, "every element"))
    found.comparison.budgets = {"out": {"norm": 8e-3, "worst_row": 2e-2}, "dq": {"norm": 2e-3, "worst_row": 2e-2}}
    found.left_out = {"xformers": ["not installed -> pip install xformers", EVIL]}
    found.rates = roofline.rates_of(target, problem.dtype)
    launch = {"name": f"forward_kernel<{EVIL}>", "start_us": 0.0, "us": 90.0, "count": 1, "grid": [132, 1, 1],
              "block": [384, 1, 1], "registers": 168, "smem_bytes": 200_000}  # fmt: skip
    launch["occupancy"] = kernels.as_dict(kernels.occupancy([132], [384], 168, 200_000, target))
    launch["build"] = {"spill_bytes": 0, "instructions": {"matrix products": 7, "branches": 3}}
    gaps = {"launches": 2, "busy_us": 99.0, "idle_us": 21.0, "host_us": 130.0}
    part = {"launches": [launch, launch | {"name": "combine", "start_us": 111.0, "us": 9.0, "step": "aten::sum"}],
            "ops": [], "gaps": gaps}  # fmt: skip
    summed = {"launches": [launch | {"count": 40, "us": 4000.0}, launch | {"name": "softmax_warp"}], "ops": []}
    found.profiles = {
        "reference": {"forward": summed, "backward": {"launches": [], "ops": []}},
        "tilewise": {"forward": part, "backward": part},
        "torch-default": {"error": "no answer in 30 s"},
    }
    found.host = {"tilewise": [1e-5]}
    found.counters = {"tilewise": [{"kernel": "k", "counters": {"achieved occupancy": (18.6, "%")}}], "flex": "denied"}
    told = found.to_dict() | {"provenance": made_up()["provenance"]}
    told = json.loads(json.dumps(told))
    verdicts = {"tilewise": speed(2.0, 1.91, 2.12, "faster"), "sm80": speed(1.18, 0.97, 1.4, "indistinguishable"),
                "torch-flash": speed(1.0, 0.99, 1.01, "same kernels"), "reference": speed(0.02, 0.019, 0.021, "slower"),
                "flex": speed(0.9, 0.88, 0.93, "slower"),
                "torch-default": speed(1.0, 1.0, 1.0, "same kernels")}  # fmt: skip
    for candidate in told["comparison"]["candidates"]:
        name = candidate["candidate"]
        candidate |= {"speed": verdicts.get(name), "speed_default": verdicts.get(name), "same_as": ""}
        if name == "torch-flash":
            candidate["same_as"] = "torch-default"
    told["comparison"] |= {"noise": ["load 3.1 on 2 cores"], "undecided": True}
    return told  # type: ignore[no-any-return]


def tracing() -> dict[str, Any]:
    site = {
        "stack": [f"{EVIL}.py:3 in f", "main.py:1 in <module>"], "text": "bfloat16 q(1,2,3,4) full", "problem": None,
        "backend": "torch-math", "device": "cuda", "forced": False, "reasons": ["flash: no -> yes"], "calls": 3,
        "forward": 0.5, "backward": 0.0, "best": "tilewise", "lost": 0.25, "note": "", "math_fallback": True,
    }  # fmt: skip
    other = site | {"backend": "tilewise", "math_fallback": False, "reasons": [], "lost": 0.0, "forward": 0.1}
    return {
        "kind": "tilewise trace", "seconds": 2.0, "program": "python train.py", "sites": [other, site],
        "provenance": made_up()["provenance"],
    }  # fmt: skip


def checking(wrong: bool = True) -> dict[str, Any]:
    place = {"batch": 0, "head": 1, "row": 2, "column": 3, "values": [1.0, "nan"], "difference": "inf"}
    good = {"candidate": "tiled", "verdict": VERIFIED, "because": [], "errors": {"out": {"norm": 2e-3}}, "stderr": "",
            "largest_errors": {"out": place}, "changed": []}  # fmt: skip
    bad = good | {"candidate": "python:m:f", "verdict": WRONG, "because": [EVIL], "errors": {"out": {"norm": 0.5}}}
    bad |= {"changed": ["out"]}
    return {
        "kind": "tilewise check", "sentence": "", "complete": True, "device": "cuda", "compared": "every element",
        "problem": make_problem((1, 2, 64, 16), torch.bfloat16).to_dict(), "untold": "",
        "budgets": {"out": {"norm": 8e-3}}, "candidates": [good, bad] if wrong else [good],
        "pairs": [{"candidates": ["tiled", "python:m:f"], "differences": {"out": {"norm": 0.5}},
                   "largest_differences": {"out": place}}],
        "refused": {"sm90": ["no GPU -> buy one"]}, "provenance": made_up()["provenance"],
    }  # fmt: skip


def judging(ours: float = 0.4, theirs: float = 41.0) -> dict[str, Any]:
    """A record of magnitudes: PyTorch's gradients are over their budget, ours are as large as asked."""

    def point(magnitude: float, share: float) -> dict[str, Any]:
        errors = {"out": 1e-7, "out_share": 0.3, "gradients": 1e-2 * share, "gradients_share": share}
        return {"magnitude": magnitude, "because": ""} | errors

    lost = {"magnitude": 1e36, "because": EVIL} | dict.fromkeys(("out", "out_share", "gradients", "gradients_share"))
    series = {"tilewise": [point(1.0, 0.1), point(1e4, ours)], "torch-efficient": [point(1.0, 0.2), point(1e4, theirs)]}
    series["python:m:f"] = [lost, lost]
    return {
        "kind": MAGNITUDES, "suite": "magnitudes", "device": "NVIDIA H200", "series": {"scores": series},
        "problem": make_problem((1, 4, 1024, 64)).to_dict(), "provenance": made_up()["provenance"],
    }  # fmt: skip


def counting() -> dict[str, Any]:
    entry = {"row": f"bfloat16 4x16x4096x128 {EVIL}", "cycles": 1.5e6, "tensor_percent": 70.0, "instructions": 2e7,
             "kernels": [f"forward<{EVIL}>"]}  # fmt: skip
    rows = [entry | {"candidate": "torch-cudnn", "cycles": 1.8e6}, entry | {"candidate": "tilewise"},
            entry | {"candidate": "flex", "kernels": []} | dict.fromkeys(("cycles", "tensor_percent"))]  # fmt: skip
    return {"kind": "tilewise cycles", "suite": "forward-cycles", "rows": rows, "provenance": made_up()["provenance"]}


def recorded(name: str) -> dict[str, Any]:
    """A record that documents cite, or one of the tests' own."""
    path = RESULTS / name
    return json.loads((path if path.is_file() else OWN_RECORDS / name).read_text())  # type: ignore[no-any-return]


def with_losses() -> dict[str, Any]:
    """A record of a suite in which some rows are slower, some not decided, and one is wrong."""
    record = made_up("backward")
    for number, row in enumerate(record["rows"]):
        ratio, low, high, verdict = [(2.0, 1.9, 2.1, "faster"), (0.6, 0.55, 0.7, "slower"),
                                     (1.02, 0.96, 1.07, "indistinguishable")][number % 3]  # fmt: skip
        row["candidates"][0] |= dict.fromkeys(("speed", "speed_rival"), speed(ratio, low, high, verdict))
    record["rows"][0]["candidates"][0] |= {"verdict": "wrong", "because": [EVIL], "speed": None, "speed_rival": None}
    record["rows"][1]["noise"] = ["load 3.1 on 2 cores"]
    return record


RECORDS = {
    "inspect": inspection,
    "bench": with_losses,
    "H200 bench": lambda: recorded("2026-11-16T020557Z-backward.json"),
    "empty bench": lambda: made_up() | {"rows": made_up()["rows"][:1]},
    "trace": tracing,
    "empty trace": lambda: tracing() | {"sites": []},
    "check": checking,
    "tune": lambda: recorded("tune.json"),
    "ladder": lambda: recorded("ladder.json"),
    "magnitudes": judging,
    "H200 magnitudes": lambda: recorded("2026-11-16T164632Z-magnitudes.json"),
    "cycles": counting,
    "H200 cycles": lambda: recorded("2026-11-15T165557Z-backward-cycles.json"),
}


def page(name: str) -> str:
    return pages.page(RECORDS[name]())  # type: ignore[no-untyped-call]


class Reader(html.parser.HTMLParser):
    """Checks that elements close as they opened, and keeps what a test wants to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["title"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(params=RECORDS)
def document(request: pytest.FixtureRequest) -> str:
    return page(request.param)


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def heading(document: str) -> str:
    """What stands first, as text."""
    head = document.partition("<nav")[0].partition("<header>")[2]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", head)).split())


# --- the file --------------------------------------------------------------------------------------------------------


def test_pages_are_sound_and_load_nothing(document: str) -> None:
    reader = read(document)
    assert document.startswith("<!doctype html>")
    for tag, attributes in reader.elements:
        assert tag not in ("script", "img", "iframe", "object", "embed", "video", "audio", "form")
        for name in ("src", "href", "action", "poster", "srcset", "data"):
            if name in attributes:
                assert str(attributes[name]).startswith(("#", "data:,")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in str(attributes.get("style"))
    sheets = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    assert sheets == [style.STYLE]
    assert "url(" not in style.STYLE
    assert "@import" not in style.STYLE
    assert not re.findall(r"(?:https?:)?//[a-z]", document)


def test_what_comes_from_outside_is_escaped(document: str) -> None:
    assert "<script>" not in document
    assert "alert(&quot;x&quot;)" in document or "alert" not in document


def test_pages_can_be_read_by_everyone(document: str) -> None:
    reader = read(document)
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == 1
    assert tags.index("title") < tags.index("body")
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels)), "a level is left out"
    assert dict(reader.elements[tags.index("html")][1])["lang"] == "en"
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.elements
    anchors = {str(attributes["href"]) for tag, attributes in reader.elements if tag == "a"}
    names = {str(attributes.get("id")) for _, attributes in reader.elements}
    assert {anchor.removeprefix("#") for anchor in anchors} <= names
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in reader.elements:
        if attributes.get("role") == "img":
            assert len(str(attributes["aria-label"])) > 10
        if tag == "svg":
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("tabindex"):
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    assert tags.count("figure") == tags.count("figcaption")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK, style.PRINT], ids=["light", "dark", "print"])
def test_colours_contrast(colours: dict[str, str]) -> None:
    """WCAG AA: 4.5 for text, 3 for shapes."""
    assert set(colours) == set(style.LIGHT) == set(style.DARK)
    for ground in ("paper", "soft", "mark"):
        for ink in ("ink", "quiet", "link", "bad"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for ink, ground in (("bad", "bad-soft"), ("warn", "warn-soft"), ("good", "paper"), ("ours", "paper")):
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    shapes = (*views.KINDS, *roles.TITLES)
    for ink in shapes:
        for ground in ("paper", "track"):
            assert contrast(colours[ink], colours[ground]) >= 3.0, (ink, ground)
    assert len({colours[ink] for ink in shapes}) == len(shapes), "two things have one colour"


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_answer_stands_first() -> None:
    words = heading(page("inspect"))
    assert "2.00x faster than PyTorch's default 400 us against 800 us NVIDIA H200 torch" in words
    assert "verified" in words
    assert words.index("2.00x faster") < words.index("400 us") < words.index("verified") < words.index("Noisy")
    assert "load 3.1 on 2 cores" in words
    assert "Time was up before the intervals were narrow" in words
    assert "died: SIGSEGV" in words
    assert "wrong" in words


def test_the_report_of_an_inspection_as_text() -> None:
    """In full, and what of it is shown unasked; the page of the same blocks is what the tests here are about."""
    record = inspection() | {"provenance": {}, "gpu_only": ["fa4"], "our_order": ["sm90", "sm80"]}
    record["refused"] |= {"fa4": ["no GPU"]}
    record["plan"] |= {"config": "tile 128 x 64", "launch": ["132 blocks"]}
    record["torch"] |= {"choice": "torch-cudnn", "priority": ["torch-cudnn", "torch-flash"]}
    record["disagreements"] = {"torch-flash": [[], ["too tall"]]}
    seconds, speeds = {"tilewise": 1e-4, "torch-cudnn": 1.5e-4}, {"torch-cudnn": "1.50x [1.48, 1.52]"}
    recorded = {"problem": "a problem", "same": False, "what": "forward", "seconds": seconds, "speeds": speeds}
    record["elsewhere"] = {"gpu": "NVIDIA H200", "backend": "sm90", "config": "tile 192 x 128", "because": "it is best",
                           "recorded": recorded | {"record": "r.json"}}  # fmt: skip
    found = inspect_report.report_of(record)
    text = "\n".join(["--- in full", *lines(found, verbose=True), "--- unasked", *lines(found), ""])
    assert text == (Path(__file__).parent / "golden_inspect.txt").read_text()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (speed(0.8, 0.75, 0.9, "slower"), "1.25x slower than PyTorch's default"),
        (
            speed(1.04, 0.99, 1.1, "indistinguishable"),
            "Indistinguishable from PyTorch's default 400 us against 800 us, a ratio of 0.99 to 1.10",
        ),
        (speed(1.0, 1.0, 1.0, "same kernels"), "The same kernels as PyTorch's default"),
        (speed(1.3, None, None, "too few rounds"), "Too few rounds to tell"),  # type: ignore[arg-type]
        (None, "400 us per call"),
    ],
)
def test_nothing_is_claimed_beyond_the_statistic(told: dict[str, Any] | None, said: str) -> None:
    record = inspection()
    record["comparison"]["candidates"][0]["speed_default"] = told
    words = heading(pages.page(record))
    assert said in words
    assert "faster than" not in words


def test_candidates_that_ran_the_same_kernels_are_one_entry() -> None:
    record = inspection()
    seen = views.view(record["comparison"])
    assert "torch-flash" not in [entry.name for entry in seen.ranked()]
    assert [other.name for other in seen["torch-default"].also] == ["torch-flash"]  # type: ignore[union-attr]
    assert "also torch-flash" in read(page("inspect")).text
    for candidate in record["comparison"]["candidates"]:
        candidate["same_as"] = "tilewise" if candidate["candidate"].startswith("torch-") else ""
    seen = views.view(record["comparison"])
    assert [entry.name for entry in seen.ranked()][:3] == ["tilewise", "sm80", "torch-default"], "each stays its own"
    assert [other.name for other in seen["torch-default"].also] == ["torch-flash"]  # type: ignore[union-attr]


def test_candidates_are_sorted_and_slow_ones_folded() -> None:
    record = inspection()
    seen = views.view(record["comparison"])
    shown, folded = seen.unfolded()
    assert [entry.name for entry in shown] == ["tilewise", "sm80", "torch-default", "flex"]
    assert [entry.name for entry in folded] == ["reference"]
    for candidate in record["comparison"]["candidates"]:
        if candidate["candidate"] in ("tilewise", "torch-default"):
            candidate |= {"forward": [[0.5]] * 5, "backward": [[0.5]] * 5}
    shown, folded = views.view(record["comparison"]).unfolded()
    assert {"tilewise", "torch-default"} <= {entry.name for entry in shown}, "the two the page is about stay"
    assert "1 more, over 5x slower than the fastest: reference 36.0 ms" in read(page("inspect")).text


def test_steps_of_a_call_have_the_gaps_before_them() -> None:
    launch = {"grid": None, "block": None, "count": 1, "us": 5.0}
    names = ("copy", "gemm", "gemm", "softmax")
    launches = [launch | {"name": name, "start_us": 10.0 * number} for number, name in enumerate(names)]
    steps = views.in_steps(launches)
    assert [(step["name"], step["count"], step["us"], step["gap"]) for step in steps] == [
        ("copy", 1, 5.0, 0.0), ("gemm", 2, 10.0, 10.0), ("softmax", 1, 5.0, 5.0),
    ]  # fmt: skip
    assert ">gap before<" in page("inspect")
    assert "<td>sum</td>" in page("inspect")
    assert "busy for 99.0 us and idle for 21.0 us in between; the host launched for 130 us" in page("inspect")
    assert "21.0 us</td>" in page("inspect")


def test_choices_are_told_as_they_are() -> None:
    record = inspection()
    record["torch"] |= {"choice": "torch-cudnn", "priority": ["torch-cudnn", "torch-flash"]}
    record |= {"our_order": ["sm90", "sm80"], "disagreements": {"torch-flash": [[], ["too tall"]]}}
    record |= {"gpu_only": ["xformers"]}
    words = read(pages.page(record)).text
    for part in ("PyTorch's default ran torch-cudnn.", "torch-cudnn > torch-flash", "sm90 > sm80", "too tall",
                 "made for GPUs"):  # fmt: skip
        assert part in words, part
    record["torch"]["priority"] = ["flash_attention", "cudnn_attention"]  # of the settings: not what was followed
    assert "torch-flash > torch-cudnn" not in read(pages.page(record)).text


def test_a_share_over_the_ceiling_is_explained() -> None:
    told = "More than 100% says that a peak is known too low"
    record = inspection()
    assert told not in read(pages.page(record)).text
    record["roofline"]["forward"]["seconds"]["compute"] = 1.0
    assert told in read(pages.page(record)).text


def test_errors_over_their_budget_are_marked() -> None:
    text = page("inspect")
    assert '<span class="bad">200%</span>' in text  # dq: 4e-3 of 2e-3
    assert ">25%</td>" in text


def test_parts_are_there_only_where_there_is_something_to_show() -> None:
    words = read(page("inspect")).text
    for part in ("Candidates", "Share of the ceiling", "Roofline", "Kernels", "Refused", "pip install xformers",
                 "Counters by Nsight Compute", "achieved occupancy", "denied", "not seen: no answer in 30 s",
                 "summed by kernel", "99.0 us of 120 us", "Environment", "matrix products 70%"):  # fmt: skip
        assert part in words, part
    record = inspection()
    record |= {"refused": {}, "counters": {}, "profiles": {}, "rates": None, "gpu_only": []}
    words = read(pages.page(record)).text
    for part in ("Refused", "Counters by Nsight", "Kernels", "Roofline"):
        assert part not in words, part
    assert "The peaks of this device are not known" in words


def test_a_bench_page_is_about_the_fastest_that_is_not_ours() -> None:
    record = made_up("forward")
    for row in record["rows"]:
        rival = next(one for one in row["candidates"] if one["candidate"] == "fa4")
        rival |= {"forward": [[seconds / 4 for seconds in one] for one in rival["forward"]]}
        row.update(read_comparison(row).to_dict())
    words = heading(pages.page(record))
    assert "2.00x slower than the fastest other attention" in words
    assert "against PyTorch's own paths 2.00x" in words
    assert "2.00x faster than PyTorch's best path" in heading(pages.page(made_up("float32")))


def test_a_bench_page_counts_and_marks() -> None:
    words = heading(page("bench"))
    assert "1 not right" in words
    assert "faster on 17, slower on 18" in words
    assert "worst 0.60x" in words
    assert "Noisy in 1 of 54 rows: load 3.1 on 2 cores" in words
    document = page("bench")
    for group in ("head_dim 64 · full", "head_dim 64 · causal", "head_dim 256 · causal"):
        assert group in document
    slower = re.search(r'<li class="torch">.*?<i class="bar left" style="left:(.*?)%;width:(.*?)%">', document)
    assert slower is not None
    one = re.search(r'<i class="one" style="left:(.*?)%">', document)
    assert one is not None
    assert float(slower[1]) + float(slower[2]) == pytest.approx(float(one[1]), abs=0.02), "bars do not end at 1"
    few = made_up("backward")
    for candidate in (candidate for row in few["rows"] for candidate in row["candidates"]):
        candidate["backward"] = candidate.get("backward", [])[:1]
    few["rows"] = [read_comparison(row).to_dict() for row in few["rows"]]
    assert "54 of 54 rows have fewer than 5 rounds" in heading(pages.page(few))


def test_a_check_page_says_who_is_wrong() -> None:
    words = heading(page("check"))
    assert "1 of 2 not right" in words
    assert "other bits the second time: python:m:f" in words
    assert "over budget" in read(page("check")).text
    assert "1 within budget" in heading(pages.page(checking(wrong=False)))


def test_a_trace_page_says_what_is_lost_and_where_math_ran() -> None:
    words = heading(page("trace"))
    assert "250 ms lost against the best candidates" in words
    assert "1 silent math fallback" in words
    assert "Attention takes" in heading(pages.page(tracing() | {"sites": tracing()["sites"][:1]}))
    assert "No call of scaled_dot_product_attention" in heading(page("empty trace"))


def test_a_tune_page_follows_the_record() -> None:
    record = recorded("tune.json")
    assert "The shipped choice stays" in heading(pages.page(record))
    sweep = record["sweeps"][0]
    best = min((t for t in sweep["trials"] if t["seconds"]), key=lambda t: t["seconds"]["median"])
    sweep |= {"winner": best["label"], "conclusion": "this one wins"}
    ratio = next(t for t in sweep["trials"] if t["label"] == sweep["shipped"])["seconds"]["median"]
    ratio /= best["seconds"]["median"]
    assert f"{ratio:.2f}x faster than the shipped choice" in heading(pages.page(record))
    assert "this one wins." in read(pages.page(record)).text


def test_a_ladder_page_claims_speed_only_where_it_was_measured() -> None:
    record = recorded("ladder.json")
    assert "369x from numba to sm90" in heading(pages.page(record))
    assert "The three-kernel rung in its parts" in pages.page(record)
    assert ">521</td>" in pages.page(record), "MB that math moves through DRAM, counted"
    for climb in record["climbs"]:
        climb["comparison"]["device"] = "cpu"
        climb["refused"] = {"sm90": ["no GPU -> buy one"]}
    record["climbs"][0]["comparison"]["candidates"][0] |= {"verdict": WRONG, "because": ["too tall"]}
    words = heading(pages.page(record))
    assert "17 of 18 rungs verified" in words
    assert "their times say nothing" in words
    assert "369x" not in words
    assert "wrong; too tall" in words
    ids = [attributes["id"] for _, attributes in read(pages.page(record)).elements if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_a_magnitudes_page_says_whose_errors_are_over_their_budget() -> None:
    assert heading(pages.page(judging(theirs=0.9))).count("Every error is within its budget") == 1
    theirs = heading(pages.page(judging()))
    assert "tilewise is within its budgets, torch-efficient not" in theirs
    assert "torch-efficient: gradients of scores 1e4: error 4.1e-1, 41.0 times its budget" in theirs
    assert "tilewise is over 1 budget" in heading(pages.page(judging(ours=1.2)))
    words = read(pages.page(judging())).text
    assert "4100%" in words
    assert "4.1e-1 at 1e4, over budget" in words


def test_the_report_of_cycles_as_text() -> None:
    told = counting() | {"provenance": {}}
    told["rows"] = [one | {"row": "a row", "kernels": ["forward", "combine"][: len(one["kernels"]) * 2]}
                    for one in told["rows"]]  # fmt: skip
    sentence, *table = lines(cycles.report_of(told))[3:]
    assert sentence.startswith("Cycles of one call by Nsight Compute")
    assert table == [
        "a row:",
        "candidate       cycles  tensor pipe  M instructions  kernels",
        "tilewise     1,500,000        70.0%            20.0  forward, combine",
        "torch-cudnn  1,800,000        70.0%            20.0  forward, combine",
        "flex                 -            -            20.0  -",
    ]


def test_a_cycles_page_counts_and_claims_nothing() -> None:
    text = page("cycles")
    words = heading(text)
    assert "Cycles of 3 calls 1 row NVIDIA H200" in words
    assert "flex: no kernel was seen" in words
    assert "faster" not in words
    bars = text.partition('<ul class="bars">')[2].partition("</ul>")[0]
    assert bars.index("1,500,000") < bars.index("1,800,000"), "the fewest first"
    assert "flex" not in bars


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", ["inspect", "bench", "tune", "check"])
def test_a_report_says_that_it_was_interrupted(name: str, complete: bool) -> None:
    record = RECORDS[name]()  # type: ignore[no-untyped-call]
    holder = record["comparison"] if name == "inspect" else record
    holder["complete"] = complete
    assert ("Interrupted" in heading(pages.page(record))) is not complete


def test_a_record_of_another_kind_has_no_page() -> None:
    with pytest.raises(InvalidInput, match="tilewise compile"):
        pages.page({"kind": "tilewise compile"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.14e-6, "7.14 us"), (0.00333, "3.33 ms"), (9.996e-6, "10.0 us"), (9.9996e-4, "1.00 ms"), (4.2e-10, "0.420 ns"),
     (12.0, "12.0 s"), (None, "-")],
)  # fmt: skip
def test_times_have_the_unit_that_fits(value: float | None, text: str) -> None:
    assert units.duration(value) == text


def test_a_column_shares_a_unit_as_far_as_that_is_readable() -> None:
    clock = units.Clock.of([7.14e-6, 1.52e-4])
    assert [clock.text(value) for value in (7.14e-6, 1.52e-4, 0.26)] == ["7.14 us", "152 us", "260 ms"]
    assert units.Clock.of([]).text(1.0) == "1.00 s"
    assert [units.percent(share) for share in (0.0, 0.00001, 0.004, 0.153)] == ["0%", "<0.1%", "0.4%", "15%"]
    assert units.size(115712) == "113 KiB"
    assert units.error(2.9e-4) == "2.9e-4"


@pytest.mark.parametrize(
    ("name", "role", "short"),
    [
        ("forward_bf16_d128x128_causal_q128_kv128", "attention", "forward_bf16_d128x128_causal_q128_kv128"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_traits<64>, true>(Params)", "attention", "flash_fwd_kernel"),
        ("void pytorch_flash::flash_fwd_splitkv_combine_kernel<64>(Params)", "reduction",
         "flash_fwd_splitkv_combine_kernel"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "product", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm>(Params)", "product", "cutlass_80_simt_sgemm"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax", "softmax_warp_forward"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", "move",
         "elementwise: Fill"),
        ("Memcpy DtoD (Device -> Device)", "move", "Memcpy DtoD (Device -> Device)"),
        ("strange", "anything", "strange"),
    ],
)  # fmt: skip
def test_kernels_have_a_role_and_a_short_name(name: str, role: str, short: str) -> None:
    assert roles.role_of(name) == role
    assert roles.short_name(name) == short
    assert unescape(reports.plain(Kernel(name))) == short


def test_charts_survive_odd_values() -> None:
    nan, inf = float("nan"), float("inf")
    made = [
        charts.bars([charts.Bar("a", nan, "?"), charts.Bar("b", 0.0, "0"), charts.Bar("c", inf, "inf")], "caption"),
        charts.bars([], "caption"),
        charts.shares([charts.Bar("a", 2.5, "250%"), charts.Bar("b", nan, "?")], "caption"),
        charts.ratios([charts.Bar("a", 1000.0, "1000x"), charts.Bar("b", 0.0, "0x")], charts.scale_of([1000.0, nan])),
        charts.lanes([charts.Lane("a", "ours", [], reports.Markup(""))], "caption"),
        charts.roofline([charts.Dot("a", 1.0, 0.0)], 1e12, 1e12, "caption"),
    ]
    for chart in made:
        assert not re.search(r'style="[^"]*(?:nan|inf)', chart)
        assert all(float(value) <= 100.0 for value in re.findall(r"(?:left|width|top):([-0-9.]+)%", chart))


def test_names_of_a_roofline_do_not_lie_over_each_other() -> None:
    dots = [charts.Dot(f"candidate {n}", 100.0, 5e13 * (1 + n / 1000)) for n in range(12)]
    chart = charts.roofline(dots, 1e15, 4e12, "caption")
    tops = sorted(float(top) for top in re.findall(r'class="label[^"]*" style="left:[^;]*;top:([-0-9.]+)%', chart))
    assert len(tops) == 12
    assert min(b - a for a, b in pairwise(tops)) * charts._PLOT_HEIGHT / 100 >= 14.9


# --- plots -----------------------------------------------------------------------------------------------------------


def test_plots_are_legible_on_both_grounds_and_ours_has_one_colour() -> None:
    for colours, ground in ((plots._COLOURS, style.LIGHT["paper"]), (plots._DARK_COLOURS, style.DARK["paper"])):
        assert len(set(colours)) == len(colours)
        for colour in colours:
            assert contrast(colour, ground) >= 3.0, colour
    assert plots._COLOURS[0] == style.LIGHT["ours"]
    assert plots._DARK_COLOURS[0] == style.DARK["ours"]
    looks = plots.style_of(["torch-default", "fa3", "tilewise"])
    assert looks["tilewise"]["color"] == style.LIGHT["ours"]
    assert len({look["color"] for look in looks.values()}) == 3


# --- pages that stand for a record ------------------------------------------------------------------------------------


def test_a_page_names_its_record_and_can_be_made_anew(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    date = inspection()["provenance"]["date"]
    (results / "broken.json").write_text(f'{{"{date}')
    (results / "list.json").write_text(json.dumps([date]))
    (results / "other.json").write_text(json.dumps(tracing()))  # of the same date
    (results / "x.json").write_text(json.dumps(inspection()))
    made = pages.page(inspection())
    assert pages.rebuilt(made, results) == made
    assert pages.rebuilt(made.replace("2.00x", "9.99x"), results) == made
    assert pages.rebuilt(made.replace(date, "2001-01-01T00:00:00+00:00"), results) is None
    assert pages.rebuilt("<html></html>", results) is None


def test_our_reports_are_those_of_their_records() -> None:
    """Run `make docs` if this fails."""
    found = [page for page in documents.pages(ROOT) if page.path.suffix == ".html"]
    assert {page.path for page in found} == set((ROOT / "docs").rglob("*.html")), "a page without its record"
    assert [page.path.name for page in found if page.stale] == []


# --- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUM = find()
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: .ci/chromium installs one, or name it in TILEWISE_CHROMIUM"
)

# Boxes of text that lie over each other, or over the edge of the window, in the charts of the page as it is.
FIND_TROUBLE = """(() => {
  const found = [], shown = e => e.checkVisibility();
  const edge = document.documentElement.clientWidth;  // not innerWidth: a phone's grows with what does not fit
  const words = '.name, .value, .aside, .tick, .label, .x, .y, .axis';
  for (const chart of document.querySelectorAll('figure, .bars')) {
    const boxes = [...chart.querySelectorAll(words)].filter(e => shown(e) && e.textContent.trim())
      .filter(e => !e.closest('.scroll'));
    const at = boxes.map(e => e.getBoundingClientRect());
    for (let i = 0; i < boxes.length; i++) {
      if (at[i].left < -0.5 || at[i].right > edge + 0.5) found.push('outside: ' + boxes[i].textContent);
      const room = boxes[i].clientWidth;
      if (room && boxes[i].scrollWidth > room + 1) found.push('cut: ' + boxes[i].textContent);
      for (let j = 0; j < i; j++) {
        if (boxes[i].contains(boxes[j]) || boxes[j].contains(boxes[i])) continue;
        const wide = Math.min(at[i].right, at[j].right) - Math.max(at[i].left, at[j].left);
        const high = Math.min(at[i].bottom, at[j].bottom) - Math.max(at[i].top, at[j].top);
        if (wide > 1 && high > 1) found.push('over each other: ' + [i, j].map(k => boxes[k].textContent).join(' | '));
      }
    }
  }
  for (const line of document.querySelectorAll('.bars > li:not(.ticks)')) {
    if (!shown(line)) continue;
    const value = line.querySelector('.value');
    if (!shown(value) || !value.textContent.trim()) found.push('no figure: ' + line.textContent);
    const size = parseFloat(getComputedStyle(value).fontSize);
    if (size < 12) found.push('small figure: ' + value.textContent);
    const track = line.querySelector('.track').getBoundingClientRect();
    for (const part of line.querySelectorAll('.track > *')) {
      const box = part.getBoundingClientRect();
      const outside = box.left < track.left - 2.5 || box.right > track.right + 2.5;
      if (outside) found.push('off its track: ' + line.textContent);
    }
  }
  if (document.documentElement.scrollWidth > edge) found.push('the page is wider than the window');
  for (const part of document.querySelectorAll('.scroll')) {
    if (!shown(part)) continue;
    part.scrollLeft = 10000;
    for (const cell of part.querySelectorAll('tr > :first-child')) {
      if (Math.abs(cell.getBoundingClientRect().left - part.getBoundingClientRect().left) > 2) {
        found.push('the first column left: ' + cell.textContent);
        break;
      }
    }
    part.scrollLeft = 0;
  }
  return found;
})()"""
WAIT_UNTIL_SCROLLED = """new Promise(done => {
  const part = document.activeElement, latest = Date.now() + 20000;
  const look = () => part.scrollLeft > 0 || Date.now() > latest ? done() : setTimeout(look, 10);
  look();
})"""
UNFOLD = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as started:
        yield started


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def show(browser: Browser, document: str, folder: Path, width: int = 1280) -> None:
    path = folder / "report.html"
    reports.write(path, document)
    browser.media()
    browser.resize(width)
    browser.forget()
    browser.load(path.as_uri())


@in_a_browser
@pytest.mark.parametrize("name", RECORDS)
def test_every_page_fits_every_window(browser: Browser, name: str, tmp_path: Path) -> None:
    """Wide and narrow, folded and unfolded, light and dark: nothing over anything else or cut, every figure there."""
    document = page(name)
    for width in (1280, 390):
        show(browser, document, tmp_path, width)
        for scheme, colours in (("light", style.LIGHT), ("dark", style.DARK)):
            browser.media(scheme)
            assert browser.js(GROUND) == rgb(colours["paper"])
            assert browser.js(FIND_TROUBLE) == [], (width, scheme)
        assert browser.js("document.querySelector('h1').getBoundingClientRect().top") < 120
        browser.js(UNFOLD)
        assert browser.js(FIND_TROUBLE) == [], (width, "unfolded")
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))] == []


@in_a_browser
def test_the_search_for_trouble_finds_it(browser: Browser, tmp_path: Path) -> None:
    """What the test above relies on: each kind of trouble, made on purpose, is named."""
    for rule, named in (
        (".bars .value{position:absolute;left:0}", "over each other"),
        (".bars .value{margin-right:-40rem;margin-left:40rem}", "outside"),
        (".bars .value{display:none}", "no figure"),
        (".bars .value{font-size:9px!important}", "small figure"),
        ("main{width:200vw}", "the page is wider than the window"),
        ("th:first-child{position:static!important}", "the first column left"),
        (".track .bar{margin-left:-20rem}", "off its track"),
    ):
        show(browser, page("inspect").replace("</style>", f"{rule}</style>"), tmp_path, 390)
        found = browser.js(FIND_TROUBLE)
        assert any(line.startswith(named) for line in found), (rule, found[:5])


@in_a_browser
def test_print_is_on_white_whatever_the_screen_is(browser: Browser, tmp_path: Path) -> None:
    show(browser, page("inspect"), tmp_path, 720)  # A4 less its margins
    browser.media("dark", "print")
    cut = "e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1"
    found = browser.js(f"[...document.querySelectorAll('.scroll')].filter({cut}).map(e => e.ariaLabel)")
    assert found == [], "tables that paper cuts"
    assert browser.js(GROUND) == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.js("getComputedStyle(document.querySelector('.bar')).printColorAdjust") == "exact"
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert browser.js("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


@in_a_browser
def test_plots_follow_the_scheme(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = made_up("small")
    record["rows"][1]["candidates"][0]["forward"] = [[1.0]]  # slower than PyTorch's
    (path,) = plots.draw(records.Record("r.json", "", record), tmp_path)
    fill = "getComputedStyle(document.querySelector('{}')).fill"
    for scheme, colours in (("light", style.LIGHT), ("dark", style.DARK)):
        browser.media(scheme)
        browser.load(path.as_uri())
        assert browser.js(fill.format("#patch_1 path")) == rgb(colours["paper"])
        assert browser.js(fill.format("text")) == ("rgb(0, 0, 0)" if scheme == "light" else rgb(colours["ink"]))
        shown = browser.js("[...document.querySelectorAll('path')].map(path => getComputedStyle(path).fill)")
        assert {rgb(colours["ours"]), rgb(colours["torch"])} <= set(shown)


@in_a_browser
def test_one_colour_is_ours_and_the_default_has_its_line(browser: Browser, tmp_path: Path) -> None:
    show(browser, page("inspect"), tmp_path)
    colour = "getComputedStyle(document.querySelector('{}')).{}"
    for place in (".bars .ours .bar", ".legend .ours", "tbody .ours"):
        assert browser.js(colour.format(place, "backgroundColor")) == rgb(style.LIGHT["ours"]), place
    assert browser.js(colour.format("h1 .ours", "color")) == rgb(style.LIGHT["ours"])
    ends = browser.js(
        "(() => { const line = document.querySelector('.bars .torch'), box = c => line.querySelector(c)"
        ".getBoundingClientRect(); return [box('.bar').right, box('.at').left, box('.at').right]; })()"
    )
    assert ends[1] - 1 <= ends[0] <= ends[2] + 1, "the dashed line is not at the default's time"
    assert browser.js("document.querySelectorAll('.bars .spread').length") >= 4


@in_a_browser
def test_the_keyboard_reaches_unfolds_and_scrolls(browser: Browser, tmp_path: Path) -> None:
    show(browser, page("inspect"), tmp_path, 390)
    browser.press("Tab", 9)
    assert browser.js("document.activeElement.className") == "skip"
    assert browser.js("document.activeElement.getBoundingClientRect().left >= 0")
    stops = browser.js("document.querySelectorAll('a, summary, [tabindex]').length")
    seen: list[str] = []
    for _ in range(stops + 5):
        browser.press("Tab", 9)
        tag = browser.js("document.activeElement.tagName")
        seen.append(tag)
        if tag in ("SUMMARY", "DIV"):
            assert browser.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        if tag == "SUMMARY" and seen.count("SUMMARY") == 1:
            before = browser.js("document.activeElement.parentElement.open")
            browser.press("Enter", 13)
            assert browser.js("document.activeElement.parentElement.open") is not before
        if tag == "DIV" and seen.count("DIV") == 1:
            browser.js("document.documentElement.style.scrollBehavior = 'auto'")
            browser.press("ArrowRight", 39)
            browser.js(WAIT_UNTIL_SCROLLED)
            assert browser.js("document.activeElement.scrollLeft") > 0
    visible = browser.js("[...document.querySelectorAll('summary')].filter(e => e.checkVisibility()).length")
    assert seen.count("SUMMARY") >= visible > 3, "a part that can be unfolded is out of the keyboard's reach"
