"""A Llama-shaped model, trained and generated with: PyTorch's attention beside tilewise, on the same weights and data.

    python examples/llama.py                                   # small, on a CPU in seconds
    python examples/llama.py --size 1b --device cuda --save    # 16 layers of Llama 3.2 1B's shape
    python examples/llama.py --size 1b-d128 --device cuda --how sdpa override direct --plot llama.svg

RMSNorm, rotary positions, grouped queries, SwiGLU; random weights in bfloat16, AdamW, a language that can be learnt (a
random successor for every token, some noise), greedy generation with a KV cache. The model calls
F.scaled_dot_product_attention and does not know of tilewise, which comes in one of two ways:

    override    with tilewise.sdpa(): the same code; the planner takes what it has something better for
    direct      tilewise.attention in the place of F.scaled_dot_product_attention

All have a model of their own from the same seed, see the same batches and take turns, a few steps each, so that a warm
or a throttled GPU is no one's luck. Steps before the first measured one build kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import tilewise

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """The shape of a model and of the work it is given."""

    layers: int
    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    intermediate: int
    vocabulary: int
    batch: int
    seq: int
    steps: int
    prompts: int
    prompt: int
    new_tokens: int
    learning_rate: float = 3e-4


SIZES = {
    "small": Size(2, 64, 4, 2, 16, 128, 256, 4, 64, 24, 2, 32, 16, learning_rate=1e-2),
    "1b": Size(16, 2048, 32, 8, 64, 8192, 32000, 4, 4096, 30, 8, 1024, 128),
    "1b-d128": Size(16, 2048, 16, 4, 128, 8192, 32000, 4, 4096, 30, 8, 1024, 128),
}
WARM_UP, TURN = 4, 3  # steps before anything is measured; steps at a time when models take turns
TOKENS_IN_USE = 256  # of the vocabulary: so many successors can be learnt in a few steps


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Attention(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        self.q = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k = nn.Linear(size.hidden, size.heads_kv * size.head_dim, bias=False)
        self.v = nn.Linear(size.hidden, size.heads_kv * size.head_dim, bias=False)
        self.out = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, cache: Cache | None, layer: int) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            project(x).view(batch, seq, -1, self.size.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        out = self.attend(q, k, v, seq > 1)  # one new token sees all keys, and more come without a cache before them
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


class Layer(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.attention = Attention(size, attend)
        self.gate = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down = nn.Linear(size.intermediate, size.hidden, bias=False)
        self.before_attention, self.before_mlp = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, cache: Cache | None, layer: int) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), rotation, cache, layer)
        normal = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, vocabulary). The embedding and the last projection share weights."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size, attend) for _ in range(size.layers))
        self.last = nn.RMSNorm(size.hidden)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        begin = 0 if cache is None else cache.length
        rotation = rotations(begin, begin + tokens.shape[1], self.size.head_dim, tokens.device)
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, cache, number)
        if cache is not None:
            cache.length += tokens.shape[1]
            x = x[:, -1:]
        return F.linear(self.last(x), self.embedding.weight)


def rotations(begin: int, end: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Unit complex numbers (end - begin, head_dim / 2)."""
    frequencies = 500_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(begin, end, device=device)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class Cache:
    """Keys and values of all layers, (layers, 2, batch, heads_kv, room, head_dim); `length` of them are in use."""

    def __init__(self, size: Size, batch: int, room: int, like: torch.Tensor) -> None:
        self.length = 0
        self.kept = like.new_empty(size.layers, 2, batch, size.heads_kv, room, size.head_dim)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + k.shape[2]
        kept_k, kept_v = self.kept[layer]
        kept_k[:, :, self.length : end], kept_v[:, :, self.length : end] = k, v
        return kept_k[:, :, :end], kept_v[:, :, :end]


# ---------------------------------------------------------------------------------------------------------------------
# The ways to attend


def attend_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def attend_directly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return tilewise.attention(q, k, v, mask="causal" if causal else None)


# A rule of the override remembers what it decided, so one is entered again and again.
WAYS: dict[str, tuple[Attend, AbstractContextManager[object]]] = {
    "sdpa": (attend_by_torch, nullcontext()),
    "override": (attend_by_torch, tilewise.sdpa()),
    "direct": (attend_directly, nullcontext()),
}


@dataclass
class Run:
    """A model on its way, and what was measured of it."""

    way: str
    model: Llama
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    generate_seconds: list[dict[str, float]] = field(default_factory=list)
    held_bytes: int = 0
    step_bytes: int = 0
    tokens: torch.Tensor | None = None


def start(way: str, size: Size, device: torch.device, seed: int) -> Run:
    torch.manual_seed(seed)
    with device:
        model = Llama(size, WAYS[way][0]).to(torch.bfloat16)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), fused=fused)
    return Run(way, model, optimizer)


# ---------------------------------------------------------------------------------------------------------------------
# Training


def language(size: Size, device: torch.device, seed: int) -> Callable[[int], torch.Tensor]:
    """Batch number -> tokens (batch, seq + 1): each has one successor, which follows nine times in ten."""
    generator = torch.Generator().manual_seed(seed)
    used = min(TOKENS_IN_USE, size.vocabulary)
    successor = torch.randperm(used, generator=generator)

    def batch(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 1 + number)
        surprise = torch.randint(used, (size.seq + 1, size.batch), generator=generator)
        surprised = torch.rand(size.seq + 1, size.batch, generator=generator) < 0.1
        rows = [surprise[0]]
        for position in range(1, size.seq + 1):
            rows.append(torch.where(surprised[position], surprise[position], successor[rows[-1]]))
        return torch.stack(rows, dim=1).to(device)

    return batch


def train(runs: list[Run], size: Size, batches: list[torch.Tensor]) -> None:
    """All runs see all batches, `TURN` steps at a time."""
    turns = [range(WARM_UP), *(range(i, min(i + TURN, len(batches))) for i in range(WARM_UP, len(batches), TURN))]
    for turn in turns:
        for run in runs:
            with WAYS[run.way][1]:
                train_some(run, [batches[i] for i in turn], measured=turn.start >= WARM_UP)


def train_some(run: Run, batches: list[torch.Tensor], *, measured: bool) -> None:
    on_gpu = batches[0].is_cuda
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    synchronize()
    begin = time.perf_counter()
    for tokens in batches:
        logits = run.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.detach())
    synchronize()
    if measured:
        run.step_seconds += [(time.perf_counter() - begin) / len(batches)] * len(batches)
        run.step_bytes = max(run.step_bytes, torch.cuda.max_memory_allocated() - held if on_gpu else 0)
    run.held_bytes = sum(p.nbytes for p in run.model.parameters()) + sum(
        value.nbytes for state in run.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Generation


@torch.inference_mode()
def generate(run: Run, prompt: torch.Tensor, new_tokens: int) -> None:
    """Greedy. The first time is warm-up, and what it generated is kept."""
    synchronize = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    with WAYS[run.way][1]:
        cache = Cache(run.model.size, len(prompt), prompt.shape[1] + new_tokens, run.model.embedding.weight)
        synchronize()
        begin = time.perf_counter()
        found = [run.model(prompt, cache).argmax(-1)]
        synchronize()
        filled = time.perf_counter()
        for _ in range(new_tokens - 1):
            found.append(run.model(found[-1], cache).argmax(-1))
        synchronize()
        end = time.perf_counter()
    if run.tokens is None:
        run.tokens = torch.cat(found, dim=1)
    else:
        run.generate_seconds.append({"prefill": filled - begin, "decode": end - filled})


# ---------------------------------------------------------------------------------------------------------------------
# The figures


def row(run: Run, size: Size) -> dict[str, Any]:
    step = statistics.median(run.step_seconds)
    prefill, decode = (
        statistics.median(times[part] for times in run.generate_seconds) for part in ("prefill", "decode")
    )
    return {
        "way": run.way,
        "train_tokens_per_s": size.batch * size.seq / step,
        "step_seconds": run.step_seconds,
        "losses": [loss.item() for loss in run.losses],
        "held_bytes": run.held_bytes,
        "step_bytes": run.step_bytes,
        "prefill_tokens_per_s": size.prompts * size.prompt / prefill,
        "decode_tokens_per_s": size.prompts * (size.new_tokens - 1) / decode,
        "generate_seconds": run.generate_seconds,
    }


def show(rows: list[dict[str, Any]], agreement: dict[str, float]) -> None:
    columns = ("train tok/s", "prefill tok/s", "decode tok/s", "first loss", "last loss", "step MiB", "same tokens")
    print(f"{'':10s}" + "".join(f"{column:>15s}" for column in columns))
    for figures in rows:
        cells = [f"{figures[f'{part}_tokens_per_s']:.0f}" for part in ("train", "prefill", "decode")]
        cells += [f"{figures['losses'][0]:.3f}", f"{figures['losses'][-1]:.3f}", f"{figures['step_bytes'] / 2**20:.0f}"]
        cells += [f"{agreement[figures['way']]:.0%}"]
        print(f"{figures['way']:10s}" + "".join(f"{cell:>15s}" for cell in cells))
    print("what became of the calls under the override:")
    for text, calls in outcomes().items():
        print(f"  {calls:6d}x {text}")


def outcomes() -> dict[str, int]:
    """Calls by what became of them and why, whatever their lengths."""
    found: Counter[str] = Counter()
    for entry in tilewise.sdpa.report():
        found[f"{entry.outcome}: {entry.because}"] += entry.calls
    return dict(found)


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for figures, style in zip(rows, ("-", "--", ":"), strict=False):
        axes.plot(figures["losses"], style, label=figures["way"])
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, help="instead of the size's own")
    parser.add_argument("--steps", type=int, help="training steps, instead of the size's own")
    parser.add_argument("--how", nargs="+", choices=WAYS, default=["sdpa", "override"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    parser.add_argument("--plot", type=Path, help="where to draw the loss curves; needs matplotlib")
    options = parser.parse_args(arguments)
    size, device = SIZES[options.size], torch.device(options.device)
    size = replace(size, layers=options.layers or size.layers, steps=max(options.steps or size.steps, WARM_UP + 1))

    tilewise.sdpa.clear()
    batch = language(size, device, options.seed)
    batches = [batch(number) for number in range(size.steps)]
    runs = [start(way, size, device, options.seed) for way in options.how]
    parameters = sum(weight.numel() for weight in runs[0].model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {size.layers} layers, {size.batch} x {size.seq} tokens a step")
    train(runs, size, batches)
    prompt = batch(size.steps)[:, : size.prompt].repeat(-(-size.prompts // size.batch), 1)[: size.prompts]
    for _ in range(4):
        for run in runs:
            generate(run, prompt, size.new_tokens)

    rows = [row(run, size) for run in runs]
    agreement = {run.way: (run.tokens == runs[0].tokens).float().mean().item() for run in runs}
    show(rows, agreement)
    if options.save:
        print(f"record: {save(rows, agreement, size, options)}")
    if options.plot:
        plot(rows, f"Llama-shaped, {parameters / 1e6:.0f} M parameters", options.plot)


def save(rows: list[dict[str, Any]], agreement: dict[str, float], size: Size, options: argparse.Namespace) -> Path:
    from tilewise.lab.measure import environment  # noqa: PLC0415  (needs tilewise[lab], which the model does not)
    from tilewise.lab.studies import kept  # noqa: PLC0415  (needs tilewise[lab], which the model does not)

    record: dict[str, Any] = {
        "kind": "model",
        "suite": f"llama-{options.size}",
        "provenance": environment.provenance(options.seed, ["python", "examples/llama.py", *sys.argv[1:]]),
        "settings": asdict(size) | {"device": options.device, "warm_up_steps": WARM_UP, "dtype": "bfloat16"},
        "rows": rows,
        "same_tokens_as_first": agreement,
        "calls": outcomes(),
    }
    return kept.save(record, options.save)


if __name__ == "__main__":
    main()
