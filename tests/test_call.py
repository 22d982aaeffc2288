"""From a Request to a Call: the page that describes it, every argument in every form, and what is to come."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import memo

PACKAGE = Path(tilewise.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "calls.md"


# ---------------------------------------------------------------------------------------------------------------------
# docs/calls.md


def listed() -> dict[str, list[str]]:
    """The functions of each list of the page."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"    (\w+, \w+)", line):
            found[match[1]] = []
        elif match := re.match(r"        ([\w.]+)", line):
            found[[*found][-1]].append(match[1])
    return found


def walked(call, stations: set[str]) -> list[str]:
    """Those of the stations that a call enters, in the order in which it first does."""
    seen: dict[str, None] = {}

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            place = f"{module}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
            stations_here = {one for one in stations if one == place or _short(one) == place}
            seen.update(dict.fromkeys(stations_here))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(seen)


def _short(station: str) -> str:
    """As Python 3.10 knows a method: without its class."""
    return re.sub(r"\.[A-Z]\w*(\.\w+)$", r"\1", station)


def ways() -> dict[str, object]:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    packed, offsets = [torch.randn(8, 2, 16) for _ in range(3)], torch.tensor([0, 5, 8], dtype=torch.int32)
    new, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 2, 16, 2, 16)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    return {
        "attention": lambda: tilewise.attention(q, k, v),
        "packed": lambda: tilewise.attention_packed(*packed, offsets, offsets),
        "cached": lambda: tilewise.attention_cached(new, *cache, lengths),
        "override": lambda: F.scaled_dot_product_attention(q, k, v),
    }


@pytest.mark.parametrize("way", ways())
def test_the_page_lists_what_a_call_enters(way, monkeypatch):
    monkeypatch.setenv("TILEWISE_NATIVE", "off")
    memo.invalidate()
    lists, call = listed(), ways()[way]
    stations = {station for stations in lists.values() for station in stations}
    assert {f"{name}, {state}" for name in ways() for state in ("cold", "warm")} == set(lists)
    with tilewise.sdpa(backend="tiled"):
        assert walked(call, stations) == lists[f"{way}, cold"]
        for _ in range(2):
            assert walked(call, stations) == lists[f"{way}, warm"]
