"""The package's exceptions. Each message says what happened, why, and what to do about it.

`InvalidInput` and `UnsupportedProblem` are the caller's to mend, `CompileError` and `DeviceError` come from the
machine below us. All four share `TilewiseError`, so one `except` clause can catch everything this package raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reason(NamedTuple):
    """Why a backend refuses a problem: the value that is in the way with its limit, and what would help."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} -> {self.remedy}"


class TilewiseError(Exception):
    """Base class of everything tilewise raises on purpose."""


class InvalidInput(TilewiseError, ValueError):
    """An argument is wrong whatever the backend: the message names it, its value, what was expected, and what to do."""

    def __init__(self, argument: str, got: object, expected: str, remedy: str) -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{argument}: got {got}, expected {expected}.\n  What to do: {remedy}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.got, self.expected, self.remedy)


class UnknownArgument(InvalidInput, TypeError):
    """A keyword that a function does not have, as Python's TypeError is, with what to write instead."""


class UnsupportedProblem(TilewiseError, NotImplementedError):
    """The problem is well formed, but no allowed backend takes it. Carries the problem and every verdict."""

    def __init__(self, summary: str, problem: object = None, verdicts: Sequence[Any] = (), remedy: str = "") -> None:
        self.summary = summary
        self.problem = problem
        self.verdicts = tuple(verdicts)
        self.remedy = remedy
        lines = [summary]
        for verdict in self.verdicts:
            lines += [f"  {verdict.backend}: {reason}" for reason in verdict.reasons]
        if remedy:
            lines.append(f"  What to do: {remedy}.")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.summary, self.problem, self.verdicts, self.remedy)


class CompileError(TilewiseError, RuntimeError):
    """A kernel did not build, or its build log breaks a gate (spills, serialised wgmma). Names the kept source."""

    unit: str = ""  # the label of the kernel, where it is one of the engine's


class DeviceError(TilewiseError, RuntimeError):
    """The driver or the device refused: no GPU, a CUDA error, or a context lost across fork."""
