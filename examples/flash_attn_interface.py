"""Code written for flash-attn, on any device: only the import changes.

python examples/flash_attn_interface.py
"""

from __future__ import annotations

import torch

from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func


def main() -> None:
    torch.manual_seed(0)
    batch, seqlen, heads, heads_k, dim = 2, 96, 8, 2, 64
    q = torch.randn(batch, seqlen, heads, dim)
    k, v = torch.randn(batch, seqlen, heads_k, dim), torch.randn(batch, seqlen, heads_k, dim)
    out = flash_attn_func(q, k, v, causal=True, window_size=(32, 0), softcap=30.0)
    print(f"padded: {tuple(out.shape)}")

    # The same two sequences, of 96 and 40 tokens, without the padding.
    cu_seqlens = torch.tensor([0, 96, 136], dtype=torch.int32)
    packed = [torch.cat([x[0], x[1, :40]]) for x in (q, k, v)]
    packed_out, lse, _ = flash_attn_varlen_func(
        *packed, cu_seqlens, cu_seqlens, 96, 96, causal=True, window_size=(32, 0), softcap=30.0, return_attn_probs=True
    )
    difference = (packed_out - torch.cat([out[0], out[1, :40]])).abs().max().item()
    print(f"packed: {tuple(packed_out.shape)}, lse {tuple(lse.shape)}; largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
