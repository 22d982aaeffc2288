"""Attention that is neither ours nor PyTorch's function: plain attention under torch.compile, FlexAttention, PyTorch's
varlen_attn, and, where installed, flash-attn, FlashAttention-3 and -4, FlashInfer and xFormers.

Each rival says what it lacks for a problem, all of it, and makes a call without arguments from tensors. They import
their library only when they are asked to run.
"""

from __future__ import annotations

from . import compiled, flash, varlen
from .lacking import Rival, importable

FA3 = "fa3"
FA4 = "fa4"
FLASHINFER = "flashinfer"
VARLEN = "torch-varlen"
FLEX = "flex"
COMPILED = "compiled"  # plain attention under torch.compile

COMPILE = (COMPILED, FLEX)  # take a minute on a CPU: run there only where they are asked for
RIVALS: dict[str, Rival] = {
    COMPILED: compiled.COMPILED,
    FLEX: compiled.FLEX,
    VARLEN: varlen.TORCH_VARLEN,
    "flash-attn": flash.FLASH_ATTENTION_2,
    FA3: flash.FLASH_ATTENTION_3,
    FA4: flash.FLASH_ATTENTION_4,
    FLASHINFER: varlen.FLASHINFER,
    "xformers": flash.XFORMERS,
}


def installed(rival: str) -> bool:
    """The rival's library can be imported here."""
    return importable(RIVALS[rival].module)
