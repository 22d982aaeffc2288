"""The report: one file that loads nothing, sound as HTML, readable by everyone, and alive in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from browser import Browser, find
from support import make_problem
from test_lab_docs import made_up
from tilewise.lab import charts, inspect, kernels, pages, records, roofline, trace_text
from tilewise.lab import html as reports
from tilewise.lab.compare import VERIFIED, Comparison, Outcome, Row
from tilewise.plan import plan
from tilewise.target import Target

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = "<script>alert(\"x\")</script> & 'co'"


def inspection() -> dict[str, Any]:
    """What `inspect --json` would print on an H200, with everything that a report can show."""
    problem = make_problem((1, 16, 4096, 64), torch.bfloat16, needs_grad=True)
    target = Target.named("h200")
    row = Row("inspect", problem, ("tilewise", "torch-default", "sdpa:math", "python:m:f"), "cuda")
    outcomes = [
        Outcome("tilewise", VERIFIED, errors={"out": {"norm": 2e-3, "worst_row": 3e-3}}, memory=1 << 24,
                forward=[[1e-4], [1.1e-4]], backward=[[3e-4], [3e-4]]),
        Outcome("torch-default", VERIFIED, forward=[[2e-4], [2.1e-4]], backward=[[5e-4], [5e-4]]),
        Outcome("sdpa:math", "died: SIGSEGV", ["out of luck"]),
        Outcome("python:m:f", "wrong", [EVIL]),
    ]  # fmt: skip
    found = inspect.Inspection(plan(problem, target), Comparison(row, outcomes, "every element"))
    found.left_out = {"xformers": ["not installed -> pip install xformers", EVIL]}
    found.rates = roofline.rates_of(target, problem.dtype)
    found.priority = ["cudnn_attention", "flash_attention"]
    launch = {"name": f"kernel<{EVIL}>", "start_us": 0.0, "us": 90.0, "count": 1, "grid": [132, 1, 1],
              "block": [384, 1, 1], "registers": 168, "smem_bytes": 200_000}  # fmt: skip
    launch["occupancy"] = kernels.as_dict(kernels.occupancy([132], [384], 168, 200_000, target))
    launch["build"] = {"spill_bytes": 0, "instructions": {"matrix products": 7, "branches": 3}}
    part = {"launches": [launch, launch | {"name": "combine", "start_us": 91.0, "us": 4.0}], "ops": []}
    found.profiles = {"tilewise": {"forward": part, "backward": part}, "torch-default": {"error": "no answer in 30 s"}}
    found.host = {"tilewise": [1e-5]}
    found.counters = {"tilewise": [{"kernel": "k", "counters": {"achieved occupancy": (18.6, "%")}}]}
    told = found.to_dict() | {"provenance": made_up()["provenance"]}
    return json.loads(json.dumps(told))  # type: ignore[no-any-return]


def tracing() -> dict[str, Any]:
    site = {
        "stack": [f"{EVIL}.py:3 in f", "main.py:1 in <module>"], "text": "bfloat16 q(1,2,3,4) full", "problem": None,
        "backend": "torch-math", "device": "cuda", "forced": False, "reasons": ["flash: no -> yes"], "calls": 3,
        "forward": 0.5, "backward": 0.0, "best": "tilewise", "lost": 0.25, "note": "", "math_fallback": True,
    }  # fmt: skip
    return {"seconds": 2.0, "program": "python train.py", "sites": [site], "provenance": made_up()["provenance"]}


PAGES = {
    "inspect": lambda: pages.inspect_page(inspection()),
    "bench": lambda: pages.bench_page(records.Record("r.json", "", made_up("backward"))),
    "trace": lambda: trace_text.trace_page(tracing()),
    "empty": lambda: pages.bench_page(records.Record("r.json", "", made_up() | {"rows": made_up()["rows"][:1]})),
}


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


@pytest.fixture(params=PAGES)
def document(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()  # type: ignore[no-any-return]


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def test_pages_are_sound_and_load_nothing(document: str) -> None:
    reader = read(document)
    assert document.startswith("<!doctype html>")
    for tag, attributes in reader.elements:
        assert tag not in ("script", "img", "iframe", "object", "embed", "video", "audio", "form")
        for name in ("src", "href", "action", "poster", "srcset", "data"):
            if name in attributes:
                assert str(attributes[name]).startswith(("#", "data:,")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    style = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    assert len(style) == 1
    assert "url(" not in style[0]
    assert "@import" not in style[0]
    assert not re.findall(r"(?:https?:)?//[a-z]", document)


def test_what_comes_from_outside_is_escaped(document: str) -> None:
    assert "<script>" not in document
    assert "alert(&quot;x&quot;)" in document or "alert" not in document


def test_pages_can_be_read_by_everyone(document: str) -> None:
    reader = read(document)
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == 1
    assert tags.index("title") < tags.index("body")
    assert dict(reader.elements[tags.index("html")][1])["lang"] == "en"
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.elements
    anchors = {str(attributes["href"]) for tag, attributes in reader.elements if tag == "a"}
    names = {str(attributes.get("id")) for _, attributes in reader.elements}
    assert {anchor.removeprefix("#") for anchor in anchors} <= names
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in reader.elements:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert len(str(attributes["aria-label"])) > 20
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("tabindex"):
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    assert len([tag for tag in tags if tag == "figure"]) == len([tag for tag in tags if tag == "figcaption"])


def luminance(colour: str) -> float:
    colour = colour.lstrip("#")
    colour = "".join(c * 2 for c in colour) if len(colour) == 3 else colour
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_contrast_in_the_light_and_in_the_dark() -> None:
    """WCAG AA: 4.5 for text, 3 for shapes."""
    blocks = re.findall(r":root\{(.*?)\}", reports.STYLE, re.DOTALL)
    light, dark, printed = (dict(re.findall(r"--(\w+):(#\w+)", block)) for block in blocks)
    for colours in (light, dark, light | printed):
        for ground in ("paper", "soft", "mark"):
            for ink, least in (("ink", 4.5), ("quiet", 4.5), ("link", 4.5), ("bad", 4.5), *((k, 3.0) for k in "abcde")):
                high, low = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= least, (ink, ground, colours)


def test_the_report_of_inspect_has_every_part() -> None:
    reader = read(pages.inspect_page(inspection()))
    words = " ".join(reader.words)
    for part in ("Candidates", "Roofline", "Who takes it, and who does not", "Kernels that ran", "Timeline",
                 "Counters by Nsight Compute", "Environment", "died: SIGSEGV", "pip install xformers",
                 "19%, limited by", "not seen", "achieved occupancy", "PyTorch's default"):  # fmt: skip
        assert part in words, part


def test_charts_survive_odd_values() -> None:
    bars = charts.bars([charts.Bar("a", float("nan"), "?"), charts.Bar("b", 0.0, "0")], "caption")
    assert "NaN" not in bars
    assert "nan" not in bars
    assert charts.bars([], "caption").startswith("<figure>")
    assert "<svg" in charts.timeline([], "caption")
    assert "<svg" in charts.roofline([charts.Dot("a", 1.0, 0.0)], 1e12, 1e12, "caption")


# --- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUM = find()
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install one, or name it in TILEWISE_CHROMIUM"
)


@in_a_browser
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_renders_it_without_complaint(name: str, width: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "report.html"
    reports.write(path, PAGES[name]())
    with Browser(CHROMIUM, width) as browser:
        browser.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        browser.load(path.as_uri())
        assert browser.errors == []
        outside = [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))]
        assert outside == []
        assert browser.js("document.querySelector('h1').getBoundingClientRect().height") > 10
        assert browser.js(
            "document.documentElement.scrollWidth <= window.innerWidth"
        )  # wide parts scroll by themselves
        for scheme in ("light", "dark"):
            browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            ground = browser.js("getComputedStyle(document.body).backgroundColor")
            assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
        browser.ask("Emulation.setEmulatedMedia", media="print")
        assert browser.js("getComputedStyle(document.querySelector('nav')).display") == "none"


@in_a_browser
def test_the_keyboard_reaches_and_unfolds(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "report.html"
    reports.write(path, pages.inspect_page(inspection()))
    with Browser(CHROMIUM) as browser:
        browser.load(path.as_uri())
        browser.press("Tab", 9)
        assert browser.js("document.activeElement.className") == "skip"
        assert browser.js("document.activeElement.getBoundingClientRect().left >= 0")
        seen = set()
        for _ in range(60):
            browser.press("Tab", 9)
            seen.add(browser.js("document.activeElement.tagName"))
            if browser.js("document.activeElement.tagName") == "SUMMARY":
                break
        assert {"A", "DIV", "SUMMARY"} <= seen
        before = browser.js("document.activeElement.parentElement.open")
        browser.press("Enter", 13)
        assert browser.js("document.activeElement.parentElement.open") is not before
        assert browser.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("complete", [True, False])
def test_a_report_says_that_it_was_interrupted(complete):
    told, record = inspection(), made_up("backward")
    told["comparison"]["complete"] = record["complete"] = complete
    for made in (pages.inspect_page(told), pages.bench_page(records.Record("r.json", "", record))):
        assert ("Interrupted" in made) is not complete
