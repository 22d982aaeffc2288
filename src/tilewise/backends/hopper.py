"""What both halves of the backend `sm90` go by: classes of head dims, and matrices in shared memory."""

from __future__ import annotations

# (q and k, v and out): a head runs in the first class that holds it, zero-filled by the copy engine.
HEAD_DIM_CLASSES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def head_dim_class(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    return next(pair for pair in HEAD_DIM_CLASSES if head_dim <= pair[0] and head_dim_v <= pair[1])


def matrix_bytes(rows: int, columns: int) -> int:
    """Panels of 64 columns, 128 bytes a row."""
    return -(-columns // 64) * rows * 128
