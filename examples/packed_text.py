"""Fine-tune a small Llama on packed text: documents of all lengths in one row, none of which sees another.

    python examples/packed_text.py                       # the GPU, if there is one
    python examples/packed_text.py --steps 3 --documents 4 --longest 40 --hidden 32 --layers 1 --device cpu

The text is made here: sentences of a small grammar, in documents whose lengths vary as those of real text do. Every way
trains the same model on the same documents, and the speed counts real tokens, not padding:

    packed, tilewise   one row of documents; their offsets go to `attention_packed` as Transformers hands them on
    packed, sdpa       the same row; Transformers finds the documents in position_ids and makes a mask tensor
    padded, tilewise   a batch, every document padded to the longest
    padded, sdpa       the same with PyTorch's attention

Needs transformers; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import accumulate, chain
from typing import Any

import torch

from tilewise.integrations.transformers import register

try:
    import transformers
except ImportError:
    transformers = None

WAYS = ("packed, tilewise", "packed, sdpa", "padded, tilewise", "padded, sdpa")
SUBJECTS = ("a kernel", "the planner", "one warp", "every tile", "the last row", "a mask")
VERBS = ("reads", "waits for", "hides", "adds up", "writes", "skips")
OBJECTS = ("its keys", "the next tile", "a number", "nothing", "the sums", "a barrier")


def document(draw: random.Random, length: int) -> list[int]:
    """So many bytes of sentences."""
    text = ""
    while len(text) < length:
        text += f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}. "
    return list(text.encode()[:length])


def documents(draw: random.Random, count: int, longest: int) -> list[list[int]]:
    """Most are short, few are long."""
    return [document(draw, max(2, int(longest * draw.random() ** 2))) for _ in range(count)]


def packed(batch: list[list[int]], device: str) -> dict[str, Any]:
    """One row. The first token of a document follows from nothing, so it is no label."""
    offsets = list(accumulate(map(len, batch), initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    labels = [[-100, *one[1:]] for one in batch]
    longest = max(map(len, batch))
    return {
        "input_ids": torch.tensor([list(chain(*batch))], device=device),
        "labels": torch.tensor([list(chain(*labels))], device=device),
        "position_ids": torch.tensor([[place for one in batch for place in range(len(one))]], device=device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def padded(batch: list[list[int]], device: str) -> dict[str, Any]:
    """A row for each document."""
    longest = max(map(len, batch))
    missing = [longest - len(one) for one in batch]
    rows = {
        "input_ids": [one + [0] * more for one, more in zip(batch, missing, strict=True)],
        "labels": [[-100, *one[1:]] + [-100] * more for one, more in zip(batch, missing, strict=True)],
        "attention_mask": [[1] * len(one) + [0] * more for one, more in zip(batch, missing, strict=True)],
    }
    return {name: torch.tensor(values, device=device) for name, values in rows.items()}


def make_model(how: str, options: argparse.Namespace) -> Any:
    attention = register() if how == "tilewise" else "sdpa"
    heads = max(2, options.hidden // 64)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=max(2048, options.longest), attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(options.device, options.dtype)


def train(way: str, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Real tokens per second, after the first step, and the losses."""
    shape, how = way.split(", ")
    model = make_model(how, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw, losses, tokens, start = random.Random(1), [], 0, 0.0
    for step in range(options.steps + 1):
        batch = documents(draw, options.documents, options.longest)
        inputs = (packed if shape == "packed" else padded)(batch, options.device)
        if way == "packed, sdpa":  # which goes by position_ids alone
            inputs = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        if step == 0:  # kernels are built, memory is found
            start = time.perf_counter()
        else:
            tokens += sum(map(len, batch))
    return tokens / (time.perf_counter() - start), losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=30, help="beside the first, which is not timed")
    parser.add_argument("--documents", type=int, default=24, help="of a step")
    parser.add_argument("--longest", type=int, default=2600 if on_gpu else 200)
    parser.add_argument("--hidden", type=int, default=1024 if on_gpu else 64)
    parser.add_argument("--layers", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--how", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args(arguments)
    options.dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    if transformers is None:
        print("skipped: Transformers is not installed")
        return
    first: float | None = None
    for way in options.how:
        speed, losses = train(way, options)
        first = first or speed
        told = f"{speed:10.0f} tokens/s, {speed / first:.2f} of the first"
        print(f"{way:17s} {told}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
