"""A Transformers model with attn_implementation="tilewise": windows, softcap and grouped heads, nothing downloaded.

pip install 'tilewise[transformers]'
python examples/transformers_model.py
"""

from __future__ import annotations

import torch

from tilewise.integrations.transformers import register

try:
    import transformers
except ImportError:
    transformers = None


def main() -> None:
    if transformers is None:
        print("skipped: Transformers is not installed")
        return
    register()
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=20.0,
        query_pre_attn_scalar=16,
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    prompt = torch.randint(3, 200, (2, 24))
    tokens = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(prompt, max_new_tokens=12, do_sample=False)[:, 24:]
        print(f"{implementation:9s} {tokens[implementation][0].tolist()}")
    print("the same tokens" if torch.equal(*tokens.values()) else "different tokens")


if __name__ == "__main__":
    main()
