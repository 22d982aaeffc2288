"""Writes docs/images/*.png: the reports of docs/ as a browser shows them, wide and narrow, light and dark.

python tests/screenshots.py     needs a Chromium (.ci/chromium installs one)
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from browser import Browser, find
from PIL import Image

from tilewise.lab.render import html, pages
from tilewise.lab.studies import bench, records

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images"
COLOURS = 96  # of a picture's palette: text and bars need no more, and the file is a quarter as large
INSPECT = ROOT / "docs" / "inspect-2x8x512x64.html"


def shoot(browser: Browser, page: Path, name: str, width: int, height: int, scheme: str) -> None:
    browser.media(scheme)
    browser.resize(width, height, scale=1.5 if width < 500 else 1.0)
    browser.load(page.as_uri())
    shot = Image.open(io.BytesIO(browser.screenshot(height))).convert("RGB")
    small = shot.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    path = FOLDER / f"{name}-{scheme}.png"
    small.save(path, optimize=True)
    print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size // 1024} KiB")


def main() -> int:
    chromium = find()
    if chromium is None:
        print("no Chromium here: .ci/chromium installs one, or name it in TILEWISE_CHROMIUM", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    record = records.newest(records.read_all(ROOT / bench.RESULTS), "backward", "H200")
    assert record is not None
    with Browser(chromium) as browser, tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "bench.html"
        html.write(suite, pages.page(record.values))
        for scheme in ("light", "dark"):
            shoot(browser, INSPECT, "inspect", 1120, 900, scheme)
            shoot(browser, INSPECT, "inspect-phone", 390, 860, scheme)
            shoot(browser, suite, "bench", 1120, 700, scheme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
