"""A two-layer GPT, trained twice from the same seed: with PyTorch's attention, and with tilewise's.

    python examples/train_gpt.py                                                # on a CPU in seconds
    python examples/train_gpt.py --device cuda --steps 200 --save --plot docs/gpt_loss.svg

The two loss curves are the result: how far they lie apart at most, beside how far two trainings with PyTorch's own
kernels do (its flash kernel and its math), which is what rounding alone makes of a training. The task needs attention
to look back: every sequence is a random phrase of eight tokens, again and again, so all but the first can be copied.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

VOCABULARY, HEADS, PHRASE = 64, 4, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        out = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, VOCABULARY)."""

    def __init__(self, seq: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "PyTorch": nullcontext,
    "PyTorch, math only": lambda: sdpa_kernel(SDPBackend.MATH),
    "tilewise": tilewise.sdpa,
    "tilewise, tiled": lambda: tilewise.sdpa(backend="tiled"),
}


def repeated_phrases(number: int, batch: int, seq: int, device: torch.device) -> torch.Tensor:
    """Tokens (batch, seq + 1)."""
    generator = torch.Generator().manual_seed(number)
    phrase = torch.randint(VOCABULARY, (batch, PHRASE), generator=generator)
    return phrase.repeat(1, seq // PHRASE + 1)[:, : seq + 1].to(device)


def train(way: str, steps: int, batch: int, seq: int, width: int, device: torch.device) -> tuple[list[float], float]:
    """The loss of every step, and seconds."""
    torch.manual_seed(0)
    model = GPT(seq, width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    begin = time.perf_counter()
    with WAYS[way]():
        for step in range(steps):
            tokens = repeated_phrases(step, batch, seq, device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [loss.item() for loss in losses], time.perf_counter() - begin


def furthest(curve: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(curve, other, strict=True))


def plot(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (way, losses), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
        axes.plot(losses, style, label=way)
    axes.set(xlabel="step", ylabel="loss", title="A two-layer GPT from one seed, bfloat16")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save", type=Path, nargs="?", const=Path("benchmarks/results"), help="folder for the record")
    parser.add_argument("--plot", type=Path, help="where to draw the curves; needs matplotlib")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    steps = options.steps or (200 if on_gpu else 60)
    batch, seq, width = (32, 512, 256) if on_gpu else (8, 64, 64)

    tilewise.sdpa.clear()
    # On a GPU "tilewise" is a kernel of our own; on a CPU it may be PyTorch's, and the tiled one shows ours.
    ways = [way for way in WAYS if not (on_gpu and way == "tilewise, tiled")]
    measured = {way: train(way, steps, batch, seq, width, device) for way in ways}
    curves = {way: losses for way, (losses, _) in measured.items()}
    apart = {way: furthest(losses, curves["PyTorch"]) for way, losses in curves.items()}
    for way, (losses, seconds) in measured.items():
        print(f"{way:20s} loss {losses[0]:.4f} -> {losses[-1]:.4f}, at most {apart[way]:.4f} apart, {seconds:.1f} s")
    for entry in tilewise.sdpa.report():
        print(f"  {entry}")
    if options.save:
        settings = {"device": options.device, "steps": steps, "batch": batch, "seq": seq, "width": width}
        print(f"record: {save(curves, apart, settings, options.save)}")
    if options.plot:
        plot(curves, options.plot)


def save(curves: dict[str, list[float]], apart: dict[str, float], settings: dict[str, Any], folder: Path) -> Path:
    from tilewise.lab.measure import environment  # noqa: PLC0415  (needs tilewise[lab], which the model does not)
    from tilewise.lab.studies import kept  # noqa: PLC0415  (needs tilewise[lab], which the model does not)

    record: dict[str, Any] = {
        "kind": "model",
        "suite": "gpt-loss",
        "provenance": environment.provenance(0, ["python", "examples/train_gpt.py", *sys.argv[1:]]),
        "settings": settings,
        "rows": [{"way": way, "losses": losses, "furthest_from_first": apart[way]} for way, losses in curves.items()],
        "calls": [str(entry) for entry in tilewise.sdpa.report()],
    }
    return kept.save(record, folder)


if __name__ == "__main__":
    main()
