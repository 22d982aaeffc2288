"""Generate with a Transformers model, token by token: tokens/s and latency percentiles of sdpa and of tilewise.

    python examples/decode.py                                   # a tiny model of random weights, on a CPU
    python examples/decode.py --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --heads 32 8 --prompt 4096
    python examples/decode.py --json decode.json                # all of it, for a program

What is timed, in rounds in which both take turns:

    generate   model.generate() as it is, with the cache that it makes, which grows by a token at a time
    static     a forward per token, with a cache that has all its room from the start and is filled
    graph      the same captured into a CUDA graph, which is replayed for every token (on a GPU)
    batching   model.generate_batch(): requests of different lengths, which share a paged cache (where asked for)

One step is one forward of the model for every sequence of the batch; the first steps, which build kernels and plans,
are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY = 512
KINDS = ("generate", "static", "graph", "batching")


def make_model(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (heavy, and optional)

    torch.manual_seed(0)
    heads, heads_kv = options.heads
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        max_position_embeddings=options.prompt + options.tokens + 16,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype)).eval()


def prompts(options: argparse.Namespace) -> torch.Tensor:
    drawn = torch.randint(1, VOCABULARY, (options.batch, options.prompt), generator=torch.Generator().manual_seed(1))
    return drawn.to(options.device)


def synchronize(options: argparse.Namespace) -> None:
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize()


Run = tuple[torch.Tensor, list[float]]  # tokens (batch, new), and the seconds of every step behind the prompt


def by_generate(model: Any, options: argparse.Namespace) -> Run:
    """The clock is read where generate() asks for the next token: it waits for the device once per token itself."""
    times: list[float] = []

    def clock(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        times.append(time.perf_counter())
        return scores

    ids = prompts(options)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.tokens,
        do_sample=False,
        logits_processor=[clock],
    )
    return found[:, ids.shape[1] :], [end - start for start, end in itertools.pairwise(times)]


def static_cache(model: Any, options: argparse.Namespace) -> Any:
    from transformers import StaticCache  # noqa: PLC0415

    return StaticCache(config=model.config, max_cache_len=options.prompt + options.tokens)


def by_static(model: Any, options: argparse.Namespace) -> Run:
    cache, tokens = static_cache(model, options), prompts(options)
    found, seconds = [], []
    for _ in range(options.tokens):
        synchronize(options)
        start = time.perf_counter()
        tokens = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        synchronize(options)
        seconds.append(time.perf_counter() - start)
        found.append(tokens)
    return torch.cat(found, 1), seconds[1:]


def by_graph(model: Any, options: argparse.Namespace) -> Run:
    """A static cache keeps its length on the device, so that one captured step serves all of them."""
    cache = static_cache(model, options)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tokens = model(prompts(options), past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        found = [tokens.clone()]

        def step() -> None:
            tokens.copy_(model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1))

        for _ in range(2):  # what is built or planned is so before the capture
            step()
            found.append(tokens.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        seconds = []
        while len(found) < options.tokens:
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            found.append(tokens.clone())
        made = torch.cat(found, 1)
        torch.cuda.synchronize()
    return made, seconds


def by_batching(model: Any, options: argparse.Namespace) -> Run:
    """Requests of 1/batch, 2/batch, ... of the prompt. Seconds are those of all, by the tokens that each makes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    ids = prompts(options).tolist()
    lengths = [max(1, options.prompt * (number + 1) // options.batch) for number in range(options.batch)]
    asked = [each[:length] for each, length in zip(ids, lengths, strict=True)]
    config = GenerationConfig(max_new_tokens=options.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = ContinuousBatchingConfig(
        num_blocks=2 * options.batch * (1 + (options.prompt + options.tokens) // 32),
        max_batch_tokens=max(512, options.batch),
    )
    start = time.perf_counter()
    found = model.generate_batch(
        inputs=asked, generation_config=config, continuous_batching_config=room, progress_bar=False
    )
    synchronize(options)
    seconds = (time.perf_counter() - start) / options.tokens
    ordered = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
    return torch.tensor([one.generated_tokens for one in ordered]), [seconds]


WAYS: dict[str, Callable[[Any, argparse.Namespace], Run]] = dict(
    zip(KINDS, (by_generate, by_static, by_graph, by_batching), strict=True)
)


def implementations(kind: str, version: str) -> dict[str, str]:
    """The names that Transformers is given. Its continuous batching had names of its own, and from 5.22 on takes none
    that are not its own."""
    from tilewise.integrations.transformers import register  # noqa: PLC0415

    if kind != "batching":
        return {"sdpa": "sdpa", "tilewise": register()}
    if tuple(map(int, version.split(".")[:2])) < (5, 22):
        return {"sdpa": "paged|sdpa", "tilewise": f"paged|{register()}"}
    return {"sdpa": "sdpa", "tilewise": register("paged|eager")}


def measure(model: Any, kind: str, names: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Rounds in which each takes its turn; the first of them is not counted."""
    seconds: dict[str, list[list[float]]] = {way: [] for way in names}
    tokens = {}
    for number in range(options.rounds + 1):
        for way in sorted(names, reverse=number % 2 == 1):
            model.set_attn_implementation(names[way])
            with torch.no_grad():
                tokens[way], steps = WAYS[kind](model, options)
            if number:
                seconds[way].append(steps[min(options.skip, len(steps) - 1) :])
    one, other = tokens.values()
    ratios = [
        statistics.median(theirs) / statistics.median(ours)
        for theirs, ours in zip(seconds["sdpa"], seconds["tilewise"], strict=True)
    ]
    return {
        "kind": kind,
        "same_tokens": torch.equal(one.cpu(), other.cpu()),
        "ways": {way: summary(rounds, options) for way, rounds in seconds.items()},
        "speed": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }


def summary(rounds: list[list[float]], options: argparse.Namespace) -> dict[str, Any]:
    every = [each for one in rounds for each in one]
    cuts = statistics.quantiles(every, n=100, method="inclusive") if len(every) > 1 else every * 99
    return {
        "tokens_per_s": options.batch / statistics.median(every),
        **{f"p{percent}_ms": cuts[percent - 1] * 1e3 for percent in (50, 90, 99)},
        "steps": len(every),
    }


def show(found: dict[str, Any]) -> None:
    for way, told in found["ways"].items():
        p50, p90, p99 = (f"{told[f'p{percent}_ms']:.2f}" for percent in (50, 90, 99))
        name, rate = f"{found['kind']}, {way}", told["tokens_per_s"]
        print(f"{name:20} {rate:10.1f} tokens/s   latency p50 {p50} ms, p90 {p90} ms, p99 {p99} ms")
    same = "the same tokens" if found["same_tokens"] else "other tokens, where roundings decide"
    speed = found["speed"]
    times = f"{speed['median']:.2f} times as fast as sdpa ({speed['least']:.2f} to {speed['most']:.2f})"
    print(f"{found['kind']}: {same}, {times}")


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
    parser.add_argument("--rounds", type=int, default=3, help="in which both take turns; one more comes first")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="generate and static; on a GPU graph too")
    parser.add_argument("--json", help="a file for all that was measured")
    options = parser.parse_args(list(arguments))
    try:
        import transformers  # noqa: PLC0415
    except ImportError:
        print("skipped: Transformers is not installed")
        return
    on_gpu = torch.device(options.device).type == "cuda"
    kinds = options.kinds or ("generate", "static", *(["graph"] if on_gpu else []))
    model = make_model(options)
    found = []
    for kind in kinds:
        try:
            found.append(measure(model, kind, implementations(kind, transformers.__version__), options))
        except (RuntimeError, ValueError) as error:  # the others are timed all the same
            print(f"{kind}: failed, {str(error).strip().splitlines()[0]}")
            continue
        show(found[-1])
    if options.json:
        device = torch.cuda.get_device_name() if on_gpu else platform.processor()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": device, "versions": versions, "options": vars(options), "rows": found}, file, indent=1)
    if len(found) < len(kinds):
        raise SystemExit(1)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
