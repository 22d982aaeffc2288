"""What no tile divides: tokens of pictures, speech and video, other head dims, and few heads of keys."""

from __future__ import annotations

from tilewise.lab.candidates.names import FA3, FA4
from tilewise.lab.studies.suites import F16, FOR_KERNELS, Model, Suite, of_models

MODELS = (
    Model("DeepSeek-V3", (2, 128, 3072, 192), 128, dim_v=128),
    Model("ViT-B/16", (64, 12, 197, 64), 12, "full"),
    Model("ViT-g/14", (48, 16, 257, 88), 16, "full"),
    Model("CLIP-L/14", (16, 16, 577, 64), 16, "full"),
    Model("ViT-B/8", (24, 12, 785, 64), 12, "full"),
    Model("Whisper-large", (8, 20, 1500, 64), 20, "full", F16),
    Model("Qwen2.5-VL", (6, 16, 1500, 80), 16, "full", F16),
    Model("SDXL cross-attention", (2, 10, 4224, 64), 10, "full", F16, keys=77),
    Model("CogVideoX-5B TP-2", (1, 24, 17776, 64), 24, "full"),
    Model("Wan2.1-14B", (1, 40, 20280, 128), 40, "full"),
    Model("Wan2.1-1.3B", (1, 12, 32760, 128), 12, "full"),
    Model("Qwen3-14B", (2, 40, 5120, 128), 8),
    Model("Mistral-Large", (1, 96, 6000, 128), 8),
    Model("Qwen2.5-0.5B", (4, 14, 3584, 64), 2),
    Model("Qwen2.5-7B", (1, 28, 10000, 128), 4),
    Model("Gemma-2B", (1, 8, 12000, 256), 1),
    Model("LLaMA-65B", (3, 64, 2048, 128), 64, dtype=F16),
    Model("Phi-3-mini", (2, 32, 2500, 96), 32),
    Model("MiniLM-L6", (256, 12, 128, 32), 12, "full"),
    Model("", (1, 32, 1000, 128), 8, "full", keys=24000),
    Model("", (8, 12, 1025, 72), 12, "full"),
    Model("", (1, 16, 9000, 112), 4),
    Model("", (2, 12, 8192, 160), 12),
    Model("", (1, 16, 4096, 224), 16),
)

SUITE = Suite(of_models(MODELS, "forward", "backward"), FOR_KERNELS, (FA3, FA4))
