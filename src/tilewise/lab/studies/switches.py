"""What ran with each setting of PyTorch's switches, beside what an article on them saw (see `candidates.flags`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..candidates.flags import SWITCHES, Setting, ran_backend

if TYPE_CHECKING:
    from ..measure.compare import Comparison, Outcome


def findings(comparison: Comparison, profiles: dict[str, Any]) -> list[str]:
    """What ran with each setting, and where that is not what the article saw."""
    return [
        f"{outcome.candidate.ljust(15)}  {SWITCHES[outcome.candidate]}: {_finding(outcome, profiles)}"
        for outcome in comparison.outcomes
        if outcome.candidate in SWITCHES
    ]


def _finding(outcome: Outcome, profiles: dict[str, Any]) -> str:
    setting = SWITCHES[outcome.candidate]
    ran = ran_backend(profiles.get(outcome.candidate))
    if not ran:
        reason = "; ".join(outcome.because) or outcome.verdict
        then = f"the article saw {setting.seen} run" if setting.seen else "with all four off there is no kernel left"
        return f"nothing runs ({reason}); {then}"
    if not setting.seen or ran == setting.seen:
        return f"{ran} runs" + (", as in the article" if setting.seen else "")
    return f"{ran} runs, where the article saw {setting.seen}: {_why(setting, ran)}"


def _why(setting: Setting, ran: str) -> str:
    if ran == "cudnn":
        return "cuDNN stays switched on in this setting, and comes first in the order of this GPU"
    if ran == "math":
        return "no fused kernel that is switched on takes the problem here"
    return f"{ran} comes first among those that are on"
