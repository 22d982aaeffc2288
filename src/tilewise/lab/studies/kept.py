"""Records on disk: what a command measured, as compact JSON in five digits.

A comparison is kept as it was measured (`Comparison.to_record`); what follows from it, ratios and summaries, is worked
out when somebody asks (`expanded`). All records are read and written here.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput, TilewiseError
from ..measure.compare import read_comparison
from ..report import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_DIGITS = 5
_AS_POSED = ("problem", "differs")
_DEEPEST = 100  # lists and objects inside one another; records nest ten, and functions that walk them recurse


def read(path: Path) -> dict[str, Any]:
    """A record as it was kept. InvalidInput for a file that is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("record", f"{path} ({error})", "a JSON file that tilewise wrote", "check the path") from None
    if not isinstance(values, dict) or not str(values.get("kind", "")).startswith("tilewise "):
        raise InvalidInput("record", f"{path}", "a JSON file that tilewise wrote", "name such a file")
    if _is_deeper(values, _DEEPEST):
        got = f"{path}, nested more than {_DEEPEST} deep"
        raise InvalidInput("record", got, "a JSON file that tilewise wrote", "name such a file")
    return values


@contextlib.contextmanager
def shown(*paths: Path) -> Iterator[None]:
    """Where records of these files are read and shown: what they lack, or hold in another form, is InvalidInput."""
    try:
        yield
    except TilewiseError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        names = " or ".join(dict.fromkeys(map(str, paths)))
        got = f"{names}, which is damaged or of another release ({type(error).__name__}: {str(error)[:80]})"
        raise InvalidInput("record", got, "a record as this release writes it", "measure again") from error


def _is_deeper(value: Any, levels: int) -> bool:
    """Without recursion: the depth that Python allows depends on its version and on who calls."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def of_kind(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The records of a kind that the folder holds, by name; other files are passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            record = read(path)
        except InvalidInput:
            continue
        if record["kind"] == kind:
            yield path, record


def date(path: Path) -> str:
    """When a file of the folder was made, of whatever kind it is; empty where it does not say, or is no JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return ""
    provenance = found.get("provenance") if isinstance(found, dict) else None
    return str(provenance.get("date", "")) if isinstance(provenance, dict) else ""


def expanded(record: dict[str, Any]) -> dict[str, Any]:
    """The record with what follows from its comparisons, as commands print it with `--json`."""

    def derived(comparison: dict[str, Any]) -> dict[str, Any]:
        return comparison if "undecided" in comparison else read_comparison(comparison).to_dict()

    return _with_comparisons(record, derived)  # type: ignore[no-any-return]


def compact(record: dict[str, Any]) -> str:
    """The record as a file holds it."""
    stored = _with_comparisons(record, lambda values: read_comparison(values).to_record())
    return json.dumps(_rounded(finite(stored)), separators=(",", ":"), allow_nan=False) + "\n"


def write(record: dict[str, Any], path: Path) -> None:
    path.write_text(compact(record), encoding="utf-8")


def save(record: dict[str, Any], folder: Path) -> Path:
    """Write the record under a name that no file has yet: its date, and its suite."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = record["provenance"]["date"].replace(":", "").replace("+0000", "Z")
    stem = f"{stamp}-{record['suite']}"
    text = compact(record)
    for number in range(1000):
        path = folder / (f"{stem}.json" if number == 0 else f"{stem}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise AssertionError("a thousand results in one second")


def _with_comparisons(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The value with every comparison in it changed."""
    if isinstance(value, list | tuple):
        return [_with_comparisons(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() >= {"row", "timing", "candidates"}:
        return change(value)
    return {key: _with_comparisons(item, change) for key, item in value.items()}


def _rounded(value: Any) -> Any:
    """What was measured has five digits; a problem is kept as it was posed."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS - 1}e}")
    if isinstance(value, dict):
        return {key: item if key in _AS_POSED else _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
