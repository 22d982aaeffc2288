"""A chunk of each prompt against a cache: more new tokens per sequence than decoding has."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from tilewise import masks
from tilewise.lab.candidates.cached import CACHED, PAGES_64
from tilewise.lab.candidates.names import FA3, FA4, FLASHINFER, OURS, PACKED, VARLEN
from tilewise.lab.measure.compare import Row
from tilewise.lab.studies.suites import BF16, FOR_KERNELS, Suite, row, spread
from tilewise.problem import Problem


class Chunk(NamedTuple):
    """A chunk of each prompt of a batch, 32 query heads over 8 of keys: prompts, new tokens and keys of each."""

    batch: int
    tokens: int
    keys: int


_CHUNKS = (
    Chunk(16, 16, 4096),
    Chunk(16, 32, 4096),
    Chunk(16, 64, 4096),
    Chunk(16, 128, 4096),
    Chunk(4, 512, 8192),
    Chunk(1, 2048, 16384),
    Chunk(1, 8192, 32768),
)
_DECODES_BESIDE, _CHUNK_BESIDE = spread(64, 256, 6144), (2048, 8192)  # keys; tokens and keys


def rows() -> tuple[Row, ...]:
    """Keys of a cache in one piece per sequence and in pages, and the same data as tensors of their own. A boolean mask
    is all that PyTorch's function knows of a causal rule at the last key."""
    last = "causal:bottom-right"
    ways = (CACHED, PAGES_64, OURS, "torch-cudnn")
    alone = tuple(
        row((batch, 32, tokens, 128), BF16, last, heads_kv=8, seq_kv=keys, candidates=ways, device="cuda")
        for batch, tokens, keys in _CHUNKS
    )
    tokens, keys = _CHUNK_BESIDE
    starts_q = (*range(len(_DECODES_BESIDE) + 1), len(_DECODES_BESIDE) + tokens)
    starts_kv = (0, *accumulate((*_DECODES_BESIDE, keys)))
    mixed = Problem(
        batch=1,
        heads_q=32,
        heads_kv=8,
        seq_q=starts_q[-1],
        seq_kv=starts_kv[-1],
        head_dim=128,
        head_dim_v=128,
        dtype=BF16,
        mask=masks.Documents(starts_q, starts_kv, masks.parse(last)),  # type: ignore[arg-type]
    )
    name = f"{len(_DECODES_BESIDE)} decodes and a chunk of {tokens} of {keys} heads 32x8 d128"
    return (*alone, Row(name, mixed, (CACHED, PAGES_64, PACKED, VARLEN), "cuda"))


SUITE = Suite(rows(), FOR_KERNELS, (FA3, FA4, FLASHINFER))
