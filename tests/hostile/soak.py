"""Threads that enter, leave, watch and call, for some seconds: python soak.py SECONDS. Prints what each of them did.

Some threads know nothing of tilewise and only call F.scaled_dot_product_attention; others enter and leave blocks, turn
the override on and off for the process, trace, and read the report. Every answer is compared with one from before.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import tilewise
from support import assert_close, budget
from tilewise.hook import dispatcher
from tilewise.integrations.sdpa import sdpa

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = range(1, 301)  # more problems than the report has lines
DIM = 8
BUDGET = budget(torch.float32, len(LENGTHS))


class Problems:
    """Inputs of every length, with the answers that PyTorch gave before anything was installed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = {n: [torch.randn(1, 1, n, DIM) for _ in range(3)] for n in LENGTHS}
        self.answers = {n: F.scaled_dot_product_attention(*qkv) for n, qkv in self.inputs.items()}
        q, k, v = (x.clone().requires_grad_() for x in self.inputs[16])
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        self.gradient = v.grad

    def check(self, n: int) -> None:
        out = F.scaled_dot_product_attention(*self.inputs[n])
        assert_close(out, self.answers[n], BUDGET, f"length {n}")

    def check_gradient(self) -> None:
        q, k, v = (x.clone().requires_grad_() for x in self.inputs[16])
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        assert v.grad is not None, "the gradient is gone"
        assert_close(v.grad, self.gradient, BUDGET, "gradient")


problems = Problems()


def stranger(turn: int) -> None:
    problems.check(LENGTHS[turn % len(LENGTHS)])


def stranger_who_trains(turn: int) -> None:
    problems.check_gradient()


def block(turn: int) -> None:
    with sdpa(backend="tiled") as rule:
        assert sdpa.rule is rule, "the block is not in force"
        problems.check(LENGTHS[turn % len(LENGTHS)])
        with sdpa() as inner:
            assert sdpa.rule is inner, "the inner block is not in force"
            problems.check(LENGTHS[turn * 7 % len(LENGTHS)])


kept = sdpa()


def kept_block(turn: int) -> None:
    with kept:
        problems.check(LENGTHS[turn * 3 % len(LENGTHS)])


def switch(turn: int) -> None:
    sdpa.enable(backend=("auto", "tiled")[turn % 2])
    problems.check(16)
    sdpa.disable()


def watch(turn: int) -> None:
    with tilewise.trace() as seen:
        for n in range(1, 9):
            problems.check(n)
    assert sum(site.calls for site in seen.sites) >= 8, "a trace missed a call"
    assert str(seen), "a trace has nothing to say"


def read(turn: int) -> None:
    assert len(sdpa.report()) <= 256, "the report grows"
    if turn % 50 == 0:
        sdpa.clear()


# Who is there together. With few of them the override comes and goes for the whole process; with all of them it stays.
SCENES = (
    (block, stranger, stranger, stranger_who_trains),
    (watch, stranger, stranger, stranger_who_trains),
    (switch, stranger, stranger, stranger_who_trains),
    (block, block, kept_block, kept_block, switch, watch, watch, read, stranger, stranger_who_trains),
)


def play(scene: tuple[Callable[[int], None], ...], seconds: float, turns: Counter[str], failures: list[str]) -> None:
    end = time.monotonic() + seconds

    def repeat(role: Callable[[int], None]) -> None:
        turn = 0
        try:
            while not failures and (turn == 0 or time.monotonic() < end):
                role(turn)
                turn += 1
        except BaseException:
            failures.append(traceback.format_exc())
        with counting:
            turns[role.__name__] += turn

    threads = [threading.Thread(target=repeat, args=(role,), daemon=True) for role in scene]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


counting = threading.Lock()


def main(seconds: float) -> None:
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    turns: Counter[str] = Counter()
    failures: list[str] = []
    end = time.monotonic() + seconds
    at_once = max(min(seconds / len(SCENES), 10.0), 0.1)
    for scene in itertools.cycle(SCENES):
        play(scene, at_once, turns, failures)
        if failures or (time.monotonic() > end and len(turns) == len({role for roles in SCENES for role in roles})):
            break
    standing = dispatcher._standing is not None
    print(json.dumps({"turns": turns, "failures": failures, "compiled": standing}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
