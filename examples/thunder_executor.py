"""lightning-thunder with our executor in front: it takes attention where the planner has something better.

pip install lightning-thunder==0.2.6          # with torch 2.11 or 2.12
python examples/thunder_executor.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewise.integrations.thunder import executor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    try:
        ours = executor(backend="tiled")  # by name, so that there is something to see on a CPU too
    except ImportError as error:
        print(f"skipped: {error}")
        return
    import thunder  # noqa: PLC0415  (executor() has said whether it can be imported)

    jitted = thunder.jit(attend, executors=[ours, *thunder.get_default_executors()])
    q, k, v = (torch.randn(1, 4, 64, 32, requires_grad=True) for _ in range(3))
    out = jitted(q, k, v)
    out.sum().backward()
    print(thunder.last_traces(jitted)[-1])
    print(f"largest difference: {(out - attend(q, k, v)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
