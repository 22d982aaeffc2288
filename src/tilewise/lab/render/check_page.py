"""The page of `tilewise check`, from its record: every candidate's error as a share of its budget, and where it is."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from .. import units
from ..measure.compare import REFUSED, UNVERIFIED, VERIFIED
from . import charts
from .html import (
    Head,
    Markup,
    Section,
    bad,
    code,
    compact_table,
    device_of,
    document,
    fold,
    note,
    refusals,
    section,
    subheading,
    tagged,
    torch_of,
)
from .views import kind_of

_TENSORS = ("out", "lse", "dq", "dk", "dv")


def check_page(told: dict[str, Any]) -> str:
    asked = [one for one in told["candidates"] if one["verdict"] != REFUSED]
    refused = told["refused"] | {
        one["candidate"]: one["because"] for one in told["candidates"] if one["verdict"] == REFUSED
    }
    sections = [*_errors(told, asked), *_pairs(told), *refusals(refused)]
    return document(_head(told, asked), sections, told)


def _failed(one: dict[str, Any]) -> bool:
    return one["verdict"] not in (VERIFIED, UNVERIFIED, REFUSED)


def _head(told: dict[str, Any], asked: list[dict[str, Any]]) -> Head:
    provenance = told.get("provenance") or {}
    wrong = [one for one in asked if _failed(one)]
    right = [one for one in asked if one["verdict"] == VERIFIED]
    claim: object
    if wrong:
        claim = Markup(f'<span class="bad">{len(wrong)} of {len(asked)} not right</span>')
    elif told["untold"]:
        claim = "Not judged: float64 has no answer"
    elif right:
        claim = f"{'All ' if len(right) > 1 else ''}{len(right)} within budget"
    else:
        claim = "Nothing was checked"
    changed = [one["candidate"] for one in asked if one.get("changed")]
    facts = [
        f"compared with float64: {told['compared']}" if told["compared"] else "",
        f"other bits the second time: {', '.join(changed)}" if changed else "",
        device_of(provenance, told["device"]),
        torch_of(provenance),
    ]
    return Head(
        about=Markup(f"tilewise check · {code(Problem.from_dict(told['problem']))}"),
        claim=claim,
        facts=[fact for fact in facts if fact],
        lead=told["untold"],
        warnings=[] if told["complete"] else ["Interrupted: only what was found until then is here."],
        failures=[f"{one['candidate']}: {'; '.join([one['verdict'], *one['because']])}" for one in wrong],
    )


def _errors(told: dict[str, Any], asked: list[dict[str, Any]]) -> list[Section]:
    if not asked:
        return []
    parts: list[object] = []
    for tensor in _TENSORS:
        budget = float(told["budgets"].get(tensor, {}).get("norm", 0.0))
        known = [one for one in asked if tensor in one["errors"]]
        if not budget or not known:
            continue
        parts += [subheading(tensor), charts.shares([_bar(one, tensor, budget) for one in known], _caption(budget))]
    columns = ["candidate", "verdict", "second run", "tensor", ">batch", ">head", ">row", ">column", ">has", ">float64"]
    rows = [_place_cells(one) for one in asked]
    about = "Where each is furthest from float64: a wrong tile, a wrong last row and a wrong head look alike in a norm."
    return [
        section("Errors against their budgets", *parts),
        section("Largest errors", compact_table(columns, rows, "Largest errors"), note(about)),
    ]


def _caption(budget: float) -> str:
    return f"Relative error, norm-wise, as a share of the budget of {units.error(budget)}"


def _bar(one: dict[str, Any], tensor: str, budget: float) -> charts.Bar:
    value = float(one["errors"][tensor]["norm"])
    inside = value <= budget
    words: object = units.error(value) if inside else bad(f"{units.error(value)}, over budget")
    kind = kind_of(one["candidate"]) if inside else "lost"
    return charts.Bar(one["candidate"], value / budget, units.percent(value / budget), kind, aside=words)


def _place_cells(one: dict[str, Any]) -> list[object]:
    changed = one.get("changed")
    twice: object = "-" if changed is None else bad(f"other bits: {', '.join(changed)}") if changed else "same bits"
    head = [tagged(kind_of(one["candidate"]), one["candidate"])]
    head.append(bad(one["verdict"]) if _failed(one) else one["verdict"])
    return [*head, twice, *_worst(one["largest_errors"])]


def _worst(places: dict[str, Any]) -> list[object]:
    """The tensor and place of the largest difference, and both values."""
    tensor = max(places, key=lambda name: float(places[name]["difference"]), default=None)
    if tensor is None:
        return ["-"] * 7
    at = places[tensor]
    row = at.get("row", at.get("key", "-"))
    values = [f"{float(value):.7g}" for value in at["values"]]
    return [tensor, at["batch"], at["head"], row, at.get("column", "-"), *values]


def _pairs(told: dict[str, Any]) -> list[Section]:
    if not told["pairs"]:
        return []
    names = [tensor for tensor in _TENSORS if any(tensor in pair["differences"] for pair in told["pairs"])]
    columns = [
        "pair",
        *(f">{name}" for name in names),
        "tensor",
        ">batch",
        ">head",
        ">row",
        ">column",
        ">first",
        ">second",
    ]
    rows = []
    for pair in told["pairs"]:
        each = [pair["differences"].get(name) for name in names]
        cells = [units.error(float(one["norm"])) if one else "-" for one in each]
        rows.append([Markup(" and ".join(code(name) for name in pair["candidates"])), *cells,
                     *_worst(pair["largest_differences"])])  # fmt: skip
    return [
        section(
            "Against each other",
            fold(units.counted(len(rows), "pair"), compact_table(columns, rows, "Pairs"), is_open=len(rows) < 12),
        )
    ]
