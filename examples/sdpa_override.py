"""A model that calls F.scaled_dot_product_attention, unchanged, through the planner.

python examples/sdpa_override.py
"""

from __future__ import annotations

import torch
from torch import nn

from tilewise.integrations.sdpa import sdpa


class Block(nn.Module):
    """Attention over a sequence and pooling by learned queries, which have three dimensions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.queries = nn.Parameter(torch.randn(4, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1), x, x)


def main() -> None:
    torch.manual_seed(0)
    model, x = Block(64, 8), torch.randn(2, 128, 64)
    plain = model(x)

    with sdpa():  # what PyTorch would choose as well is left to it, the rest runs what the planner chose
        planned = model(x)
    print(f"largest difference: {(planned - plain).abs().max().item():.1e}")

    with sdpa(when=lambda problem: problem.seq_q >= 64, backend="tiled"):  # a rule, and a backend by name
        model(x).sum().backward()

    sdpa.enable(on_fallback="warn")  # for the whole program, until disable()
    try:
        model(x)
    finally:
        sdpa.disable()

    print("what became of the calls:")
    for entry in sdpa.report():
        print(f"  {entry}")


if __name__ == "__main__":
    main()
