"""Programs that torchrun starts, once for each rank: their command line, and their traces as one.

`torchrun [options] train.py ARGS` becomes `torchrun [options] -m tilewise.lab.watch.traced FOLDER train.py ARGS`. The
options are read by torchrun's own parser, so that whatever it takes is taken here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidInput

_MODULES = ("torch.distributed.run", "torch.distributed.launch")


class Launch(NamedTuple):
    """What torchrun was asked: its own options, and the program with its arguments."""

    options: list[str]
    program: list[str]


def read(command: list[str]) -> Launch | None:
    """The launch that a command line asks for; None if it is no torchrun's."""
    words = _words(command)
    if words is None:
        return None
    parser: Any = importlib.import_module("torch.distributed.run").get_args_parser()
    try:
        told = parser.parse_args(words)
    except SystemExit as ended:  # it has said what is wrong
        expected = "torchrun [options] FILE.py ... or torchrun [options] -m MODULE ..."
        raise InvalidInput("the program", repr(" ".join(command)), expected, "mend its options") from ended
    if told.no_python:
        raise InvalidInput("the program", "--no-python", "a Python program", "let torchrun start Python")
    rest = [told.training_script, *told.training_script_args]
    options = [word for word in words[: len(words) - len(rest)] if word not in ("-m", "--module")]
    return Launch(options, ["-m", *rest] if told.module else rest)


def _words(command: list[str]) -> list[str] | None:
    """What follows `torchrun`, or `python -m torch.distributed.run`."""
    first, *rest = command
    name = Path(first).name
    if name == "torchrun":
        return rest
    if name.lower().startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
        return rest[2:]
    return None


def command(launch: Launch, folder: str) -> list[str]:
    """torchrun with the same options, every rank of which is traced into the folder."""
    traced = ["-m", "tilewise.lab.watch.traced", folder, *launch.program]
    return [sys.executable, "-m", _MODULES[0], *launch.options, *traced]


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One trace of all: sites that ranks share are one, with calls and times added up, as the ranks' seconds are."""
    sites: dict[tuple[Any, ...], dict[str, Any]] = {}
    for told in ranks:
        for site in told["sites"]:
            key = (*site["stack"], site["text"], site["backend"], site["forced"])
            known = sites.setdefault(key, site | {"calls": 0, "forward": 0.0, "backward": 0.0, "ranks": []})
            for what in ("calls", "forward", "backward"):
                known[what] += site[what]
            known["ranks"].append(told["rank"])
    every = sorted(sites.values(), key=lambda site: -(site["forward"] + site["backward"]))
    seconds = sum(told["seconds"] for told in ranks)
    by_rank = [{name: told[name] for name in ("rank", "seconds", "sites")} for told in ranks]
    return {"kind": ranks[0]["kind"], "seconds": seconds, "sites": every, "ranks": len(ranks), "by_rank": by_rank}
