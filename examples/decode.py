"""Generate with a Transformers model, token by token: tokens/s and latency percentiles of sdpa and of tilewise.

    python examples/decode.py                                   # a tiny model of random weights, on a CPU
    python examples/decode.py --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --heads 32 8 --prompt 4096

Both caches are timed: the dynamic one, which grows by a token at a time, and the static one, which has all its room
from the start and is filled. One step is one forward of the model for every sequence of the batch; the first steps,
which build kernels and plans, are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_model(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (heavy, and optional)

    torch.manual_seed(0)
    heads, heads_kv = options.heads
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        max_position_embeddings=options.prompt + options.tokens + 16,
    )
    return LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype)).eval()


def make_cache(kind: str, model: Any, options: argparse.Namespace) -> Any:
    from transformers import DynamicCache, StaticCache  # noqa: PLC0415

    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=options.prompt + options.tokens)


@torch.no_grad()
def generate(model: Any, kind: str, options: argparse.Namespace) -> tuple[torch.Tensor, list[float]]:
    """The tokens that greedy decoding gives, and the seconds of every step behind the prompt."""
    cache = make_cache(kind, model, options)
    drawn = torch.randint(512, (options.batch, options.prompt), generator=torch.Generator().manual_seed(1))
    tokens = drawn.to(options.device)
    found, seconds = [], []
    synchronize = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    for _ in range(options.tokens):
        synchronize()
        start = time.perf_counter()
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        tokens = logits.argmax(-1, keepdim=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
        found.append(tokens)
    return torch.cat(found, 1), seconds[1:]


def report(name: str, seconds: list[float], options: argparse.Namespace) -> None:
    steady = seconds[min(options.skip, len(seconds) - 1) :]
    cuts = statistics.quantiles(steady, n=100, method="inclusive") if len(steady) > 1 else steady * 99
    rate = options.batch / statistics.median(steady)
    p50, p90, p99 = (f"{cuts[percent - 1] * 1e3:.2f}" for percent in (50, 90, 99))
    print(f"{name:20} {rate:10.1f} tokens/s   latency p50 {p50} ms, p90 {p90} ms, p99 {p99} ms")


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs=2, default=(4, 2), help="of queries and of keys")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the first that is generated")
    parser.add_argument("--tokens", type=int, default=32, help="that are generated")
    parser.add_argument("--skip", type=int, default=4, help="steps that are not counted")
    options = parser.parse_args(list(arguments))
    try:
        import transformers  # noqa: F401, PLC0415
    except ImportError:
        print("skipped: Transformers is not installed")
        return
    from tilewise.integrations.transformers import register  # noqa: PLC0415

    model = make_model(options)
    for kind in ("dynamic", "static"):
        outcomes = {}
        for way in ("sdpa", register()):
            model.set_attn_implementation(way)
            outcomes[way], seconds = generate(model, kind, options)
            report(f"{kind}, {way}", seconds, options)
        one, other = outcomes.values()
        same = "the same tokens" if torch.equal(one, other) else "other tokens, where roundings decide"
        print(f"{kind}: {same}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
