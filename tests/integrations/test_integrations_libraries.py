"""Libraries that know nothing of us, through the SDPA override: small random models of diffusers and timm."""

from __future__ import annotations

import pytest
import torch

from support import assert_close, budget
from tilewise.integrations.sdpa import sdpa

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def assert_taken_and_equal(run, calls):
    """Every attention of the model is ours inside a block, and the result is the same."""
    sdpa.clear()
    with torch.no_grad():
        want = run()
        with sdpa(backend="tiled", on_fallback="error"):
            got = run()
    assert [(entry.outcome, entry.calls) for entry in sdpa.report()] == [("taken", calls)]
    assert_close(got, want, 8 * budget(torch.float32, 64))


def test_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    ).eval()
    x, step, label = torch.randn(1, 4, 8, 8), torch.tensor([1]), torch.tensor([1])
    assert_taken_and_equal(lambda: model(x, timestep=step, class_labels=label).sample, calls=2)


def test_timm():
    timm = pytest.importorskip("timm", reason="needs timm, and the torchvision it imports", exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=2).eval()
    x = torch.randn(1, 3, 32, 32)
    assert_taken_and_equal(lambda: model(x), calls=2)
