"""Graphs that torch.compile and torch.export make of attention, before a block of tilewise.sdpa and after one."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from tilewise.integrations.sdpa import sdpa


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2


def inputs(grad: bool) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 4, 16, 8, requires_grad=grad) for _ in range(3))


def graphs() -> list[str]:
    found: list[str] = []

    def keep(graph, example_inputs):
        found.append(graph.code)
        return graph

    for grad in (False, True):
        for dynamic in (False, True):
            torch.compiler.reset()
            attend = torch.compile(Attend(), fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=keep))
            out = attend(*inputs(grad))
            if grad:
                out.sum().backward()
    torch.compiler.reset()
    with torch.inference_mode():
        torch.compile(Attend(), fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*inputs(False))
    found.append(torch.export.export(Attend(), inputs(False)).graph_module.code)
    return found


before = graphs()
with sdpa(backend="tiled"):
    F.scaled_dot_product_attention(*inputs(False))
print(json.dumps({"before": before, "after": graphs()}))
