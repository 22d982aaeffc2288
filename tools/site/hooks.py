"""MkDocs' hooks: the site's pages and files from outside docs/, links to them, and a check of every link of the result.

README.md is the home page. A file of the repository that a page links to comes along: Markdown and sources as pages,
folders as lists of their files, everything else as it is. The links of the sources stay as a checkout needs them.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).parent  # what only the site has
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".py": "python", ".cuh": "cpp", ".cpp": "cpp", ".h": "cpp", ".toml": "toml", ".txt": "text"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src"}

log = logging.getLogger("mkdocs.hooks.site")  # a warning here fails a strict build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in OWN.iterdir():
        if path.suffix in (".md", ".css", ".svg"):
            files.append(File.generated(config, path.name, abs_src_path=str(path)))
    pending = [ROOT / path for path in PAGES]
    for path in pending:
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    pending += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    known = {file.src_uri for file in files}
    while pending:
        path = pending.pop()
        for target in linked(path):
            if place(target) in known:
                continue
            known.add(place(target))
            if target.is_dir() or target.suffix in LANGUAGES:
                files.append(File.generated(config, place(target), content=shown(target)))
            else:
                files.append(File.generated(config, place(target), abs_src_path=str(target)))
            if target.is_dir() or target.suffix == ".md":
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.abs_src_path
    if source is None or Path(source).parent == OWN:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = found(Path(source).parent, link[1])
        return posixpath.relpath(place(target), here or ".") if target else link[1]

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Warns of links to nothing, which MkDocs does not see in HTML and in what it copies, and of what is loaded from
    another host."""
    site = Path(config.site_dir)
    pages = {path: Parsed(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for tag, link in page.links:
            address = urlsplit(link)
            if address.scheme in ("http", "https"):
                if tag != "a":
                    log.warning("%s loads %s", path.relative_to(site), link)
                continue
            if address.scheme:
                continue
            target = Path(os.path.normpath(path.parent / unquote(address.path))) if address.path else path
            if path.name == "404.html":  # served for any address, so its links start at the site's root
                target = site / unquote(address.path).lstrip("/")
            if not target.exists():
                log.warning("%s links to %s, which does not exist", path.relative_to(site), link)
            elif address.fragment and target in pages and unquote(address.fragment) not in pages[target].anchors:
                log.warning("%s links to %s, which has no such anchor", path.relative_to(site), link)


class Parsed(HTMLParser):
    """The anchors and the links of a page, each with its tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "__top"}
        self.links: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", (tag == "a" and given.get("name")) or ""}
        loads = tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect")
        name = "href" if tag in ("a", "link") else LOADED.get(tag, "")
        if (link := given.get(name)) is not None and (tag != "link" or loads):
            self.links.append((tag, link))


def place(path: Path) -> str:
    """Where the site has a file of the repository, among its sources."""
    inside = path.relative_to(ROOT).as_posix()
    if inside in PAGES:
        return PAGES[inside]
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    ending = "/index.md" if path.is_dir() else ".md" if path.suffix in LANGUAGES else ""
    return f"repository/{inside}{ending}"


def found(folder: Path, link: str) -> Path | None:
    """The tracked file or folder of the repository that a relative link names."""
    target = Path(os.path.normpath(folder / unquote(link)))
    return target if "://" not in link and target in tracked() else None


def linked(path: Path) -> list[Path]:
    if path.is_dir():
        return within(path)
    links = LINK.findall(path.read_text(encoding="utf-8"))
    return [target for link in links if (target := found(path.parent, link))]


def within(folder: Path) -> list[Path]:
    return sorted(path for path in tracked() if path.parent == folder)


@cache
def tracked() -> frozenset[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = {ROOT / name for name in names.split("\0") if name}
    return frozenset(files | {folder for path in files for folder in path.parents if folder.is_relative_to(ROOT)})


def shown(path: Path) -> str:
    """A page of a source file, or of a folder's files."""
    inside = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {inside}\nsearch:\n  exclude: true\nhide: [toc]\n---\n# `{inside}`\n\n"
    if path.is_dir():
        here = posixpath.dirname(place(path))
        return head + "\n".join(f"- [{file.name}]({posixpath.relpath(place(file), here)})" for file in within(path))
    return f"{head}~~~~~~ {{.{LANGUAGES[path.suffix]} linenums=1}}\n{path.read_text(encoding='utf-8')}~~~~~~\n"
