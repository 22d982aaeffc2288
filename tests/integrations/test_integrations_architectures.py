"""Every architecture of the installed Transformers equals eager through us, padded on either side, or is refused."""

from __future__ import annotations

import pytest
import torch

from support import budget
from tilewise.integrations import transformers as ours

NEEDED = "needs transformers >= 5.15: pip install 'tilewise[transformers]'"
transformers = pytest.importorskip("transformers", reason=NEEDED, exc_type=ImportError)
architectures = pytest.importorskip("architectures", reason=NEEDED, exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")

# Of each way in which masks, selections, sinks and biases come to attention one that every run tries. All others are
# tried by `make libraries` and `make nightly`.
SAMPLE = {
    **dict.fromkeys(
        (
            "axk2", "bert", "deepseek_v32", "deepseek_v4", "gemma4_text", "glm5_next_text", "glm_moe_dsa", "gpt_oss",
            "hy_v4", "inkling_text", "llama4_text", "minimax_m3_vl_text", "mistral_large4_text", "modernbert",
            "phi4_multimodal_vision", "qwen2_moe", "qwen4_exp_text", "t5", "whisper",
        ),
        "equal",
    ),
    **dict.fromkeys(
        ("bigbird_pegasus", "bloom", "deberta", "falcon", "gpt_neox_japanese", "sam_vision_model"), "refused"
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _registered():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours.register()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=[] if model_type in SAMPLE else pytest.mark.nightly)
        for model_type in sorted(architectures.CONFIG_MAPPING)
    ],
)
def test_it_equals_eager_or_is_refused(model_type):
    found = architectures.outcome(model_type, 16 * budget(torch.float32, 64))
    if found.kind in ("not made", "not run") and model_type not in SAMPLE:
        pytest.skip(f"{found.kind}: {found.detail}")
    assert found.kind in ("equal", "refused", "without attention"), found
    assert found.kind == SAMPLE.get(model_type, found.kind), found
