"""The generated parts of README.md and docs/, and the pages and pictures that they link to, all from records.

    <!-- bench forward table gpu=H200 -->   what follows, up to the end marker, is replaced
    <!-- /bench -->

The first words of a marker name a generator (`GENERATORS`), the others say what is asked of it. Nothing else in a file
is touched, and a run that changes nothing leaves the files as they are. Every record that is cited is complete, has
rounds enough, and names the kernels of today's sources.

    pages(root) -> list[Page]     every file with markers and every page and picture of them, as they should be
    stale(root) -> list[Path]     those that differ
    write(root) -> list[Path]     writes those
    cited(root) -> names          the records that they take their figures from
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # whose records the tables read

from tilewise.errors import InvalidInput
from tilewise.lab.render.pages import rebuilt, record_of
from tilewise.lab.studies import bench

from . import ladder, plots, programs, reports, tables
from .records import Checkout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tilewise.lab.studies.records import Record

GENERATORS: dict[str, Callable[[str, Checkout, Path], list[str]]] = {
    "bench": tables.block,
    "ladder": ladder.block,
    "models": programs.models,
    "host": programs.host_times,
    "tile map": programs.tile_maps,
    "reports": reports.listed,
    "tune": reports.swept,
}
"""By name: what is asked, the checkout and the page -> the lines of a block."""
_BLOCK = re.compile(
    rf"(?P<begin><!-- (?P<name>{'|'.join(GENERATORS)})(?P<asked>(?: [^>]*?)?) -->\n)"
    r"(?P<body>.*?)(?P<end><!-- /(?P=name) -->)",
    re.DOTALL,
)
_GENERATED = re.compile(r"<!-- [a-z][^>]*? -->\n(?P<body>.*?)<!-- /", re.DOTALL)
LINK = re.compile(rf"\]\([./]*{bench.RESULTS.as_posix()}/([^)]+\.json)\)")


class Page(NamedTuple):
    """A file and what it should hold."""

    path: Path
    before: str
    after: str

    @property
    def stale(self) -> bool:
        return self.before != self.after


def pages(root: Path) -> list[Page]:
    """Every file with markers, and every page and picture that they link to, as they should be. Not those of plots."""
    checkout = Checkout(root)
    found = [Page(path, text, rewrite(text, checkout, path)) for path, text in _marked(root)]
    marked = {page.path for page in found}
    made = {} if root / reports.PAGE not in marked else reports.pages(checkout)
    made |= {} if root / reports.SWEEPS not in marked else reports.sweeps(checkout)
    made |= {} if root / ladder.PAGE not in marked else ladder.pictures(checkout)
    found += [Page(path, path.read_text("utf-8") if path.is_file() else "", text) for path, text in made.items()]
    for path in sorted((root / "docs").rglob("*.html")):
        if path not in made:
            text = path.read_text(encoding="utf-8")
            now = rebuilt(text, root / bench.RESULTS)
            found += [] if now is None else [Page(path, text, now)]
    return found


def rewrite(text: str, checkout: Checkout, path: Path) -> str:
    """The text of a page with every block between markers rewritten."""

    def block(match: re.Match[str]) -> str:
        lines = GENERATORS[match["name"]](match["asked"].strip(), checkout, path)
        return "".join([match["begin"], *(f"{line}\n" for line in lines), match["end"]])

    return _BLOCK.sub(block, text)


def stale(root: Path) -> list[Path]:
    """All files that differ from what the records make of them."""
    return [*(page.path for page in pages(root) if page.stale), *stale_plots(root)]


def stale_plots(root: Path) -> list[Path]:
    """Plots that are missing or were drawn from another record."""
    return [path for record in _plotted(root) for path in plots.paths(root / plots.FOLDER, record)
            if not plots.is_of(path, record)]  # fmt: skip


def write(root: Path) -> list[Path]:
    """Write and draw what is stale; returns what was written."""
    written = []
    for page in pages(root):
        if page.stale:
            page.path.parent.mkdir(parents=True, exist_ok=True)
            page.path.write_text(page.after, encoding="utf-8")
            written.append(page.path)
    for record in _plotted(root):
        if any(not plots.is_of(path, record) for path in plots.paths(root / plots.FOLDER, record)):
            written += plots.draw(record, root / plots.FOLDER)
    return written


def cited(root: Path) -> dict[str, None]:
    """The records that generated parts of pages, and HTML pages, take their figures from, by name."""
    bodies = [match["body"] for _, text in _markdown(root) for match in _GENERATED.finditer(text)]
    html = (path.read_text(encoding="utf-8") for path in sorted((root / "docs").rglob("*.html")))
    made_from = (record_of(text, root / bench.RESULTS) for text in html)
    named = [name for body in bodies for name in LINK.findall(body)]
    return dict.fromkeys([*named, *(path.name for path in made_from if path is not None)])


def check_root(root: Path) -> None:
    """InvalidInput for a folder that has nothing to keep up to date, in which nothing can be stale."""
    if not pages(root):
        raise InvalidInput(
            "--root", str(root), "a checkout: README.md or docs/*.md with markers", "name the folder of the checkout"
        )


def _markdown(root: Path) -> Iterator[tuple[Path, str]]:
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if path.is_file():
            yield path, path.read_text(encoding="utf-8")


def _marked(root: Path) -> list[tuple[Path, str]]:
    return [(path, text) for path, text in _markdown(root) if _BLOCK.search(text)]


def _plotted(root: Path) -> list[Record]:
    """The records of which pages show plots."""
    checkout = Checkout(root)
    blocks = (match for path, text in _marked(root) for match in _BLOCK.finditer(text) if match["name"] == "bench")
    asked = [tables.parse_marker(match["asked"].strip(), root / "README.md") for match in blocks]
    found = [checkout.suite(one.suite, one.gpu) for one in asked if one.view in ("plot", "speeds")]
    return list({record.name: record for record in found if record is not None}.values())
