"""Grouped queries, which every current model has: few heads of keys, so few independent pieces for the backward."""

from __future__ import annotations

from tilewise.lab.candidates.names import FA3, FA4
from tilewise.lab.studies.suites import FOR_KERNELS, GPT_OSS, LLAMA_8B, QWEN_7B, Model, Suite, of_models

# TP-n: what one of n GPUs holds under tensor parallelism.
MODELS = (
    LLAMA_8B,
    Model("Llama-3-8B", (1, 32, 8192, 128), 8),
    Model("Llama-3-8B", (4, 32, 2048, 128), 8),
    Model("Llama-3-8B", (8, 32, 2048, 128), 8),
    Model("Llama-3-8B", (1, 32, 4096, 128), 8, "full"),
    Model("Llama-3-70B", (1, 64, 4096, 128), 8),
    Model("Llama-3-70B", (1, 64, 8192, 128), 8),
    Model("Llama-3-70B TP-4", (1, 16, 8192, 128), 2),
    Model("Llama-3-70B TP-4", (1, 16, 32768, 128), 2),
    Model("Llama-3-70B TP-8", (1, 8, 8192, 128), 1),
    Model("Llama-3-70B TP-8", (4, 8, 2048, 128), 1),
    Model("Llama-3-70B TP-8", (2, 8, 4096, 128), 1, "full"),
    Model("Llama-3.2-1B", (2, 32, 4096, 64), 8),
    QWEN_7B,
    Model("Qwen2.5-7B", (4, 28, 2048, 128), 4),
    Model("Qwen2.5-0.5B", (4, 14, 4096, 64), 2),
    Model("Qwen3-30B", (1, 32, 8192, 128), 4),
    Model("Qwen3-30B", (1, 32, 16384, 128), 4),
    GPT_OSS,
    Model("GPT-OSS-120B", (2, 64, 4096, 64), 8, "full"),
    Model("Gemma-2-2B", (1, 8, 8192, 256), 4),
    Model("StarCoder", (1, 48, 8192, 128), 1),
    Model("Falcon-7B", (2, 71, 2048, 64), 1),
)

SUITE = Suite(of_models(MODELS, "forward", "backward", "step"), FOR_KERNELS, (FA3, FA4))
