"""Small Transformers models, whose time is the host's: a training step, generate(), and decoding by a CUDA graph.

    python benchmarks/eager.py --save                 # on a GPU, in about two minutes
    python benchmarks/eager.py --tiny --device cpu    # a look at the script itself

12 layers of 768 columns, random weights in bfloat16. A training step is forward and backward, without an optimizer, of
4 sequences of 256 tokens; generate() is greedy, 64 tokens behind prompts of 64, with the cache that Transformers makes
itself; both in eager mode, and both also for sequences of different lengths that are padded on the left. Decoding by
graph is a forward of one token per sequence against a static cache of 2048 places, 1024 of them filled by the prompt,
captured once per way and replayed. The same model runs with attn_implementation="tilewise", with sdpa, and with sdpa
under `tilewise.sdpa()`, in interleaved rounds. Before anything is timed, logits and gradients are held against eager
attention in float32 as benchmarks/models.py does. A ratio is the time of sdpa over ours, with the interval of
tilewise.lab's statistic.

The first calls are not among the rounds: they build kernels, and plan each length of a growing cache. Their times are
in the record as "first".
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
OURS, PEER, OVERRIDE = "tilewise", "sdpa", "sdpa under tilewise.sdpa()"
WAYS = (OURS, PEER, OVERRIDE)
KINDS = ("step", "generate", "padded step", "padded generate", "graph")
PADDED = "padded "
SEQUENCES, TOKENS = 4, 256  # of a training step
PROMPT, NEW_TOKENS = 64, 64
FILLED, PLACES = 1024, 2048  # of a static cache
_COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT2": (
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": models.VOCABULARY, **_NO_DROPOUT},
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 97, **_NO_DROPOUT},
    ),
    "Llama": (
        {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
        | {"num_key_value_heads": 4, "vocab_size": models.VOCABULARY},
        {name: value for name, value in models.TINY.items() if name != "initializer_range"},
    ),
}
"""By family of Transformers: the measured widths, and tiny ones."""
TOO_SHORT = {("GPT2", "graph")}  # 1024 positions


class Runner:
    """A model that every way of attending takes turns with."""

    def __init__(self, family: str, *, tiny: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        import transformers  # noqa: PLC0415  (slow to import)

        import tilewise  # noqa: PLC0415
        from tilewise.integrations.transformers import register  # noqa: PLC0415

        register()
        self.device, self.dtype = device, dtype
        config = getattr(transformers, f"{family}Config")(**FAMILIES[family][tiny], **_COMMON)
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config)
        self.model = model.to(dtype).train()
        generator = torch.Generator(device).manual_seed(1)
        tokens, prompt = (12, 4) if tiny else (TOKENS, PROMPT)
        self.words = torch.randint(3, config.vocab_size, (SEQUENCES, tokens), generator=generator, device=device)
        self.prompt = self.words[:, :prompt].contiguous()
        self.there = {length: models.padding(SEQUENCES, length, "left", device) for length in (tokens, prompt)}
        self.new_tokens = 3 if tiny else NEW_TOKENS
        filled, self.places = (6, 40) if tiny else (FILLED, PLACES)
        self.read = torch.randint(3, config.vocab_size, (SEQUENCES, filled), generator=generator, device=device)
        self._override = tilewise.sdpa()

    def way(self, name: str) -> Any:
        """What is in force while this way is measured."""
        self.model.set_attn_implementation(PEER if name == OVERRIDE else name)
        return self._override if name == OVERRIDE else contextlib.nullcontext()

    def given(self, words: torch.Tensor, *, padded: bool) -> dict[str, torch.Tensor]:
        """The words as a batch: of whole sequences, or of some of the last words of each."""
        there = self.there[words.shape[1]][: len(words)] if padded else torch.ones_like(words)
        return {"input_ids": words * there, "attention_mask": there}

    def step(self, *, padded: bool = False) -> None:
        given = self.given(self.words, padded=padded) if padded else {"input_ids": self.words}
        labels = self.words if not padded else self.words.masked_fill(given["attention_mask"] == 0, -100)
        self.model(**given, labels=labels, use_cache=False).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def generate(self, *, padded: bool = False) -> torch.Tensor:
        made: torch.Tensor = self.model.generate(
            **self.given(self.prompt, padded=padded), do_sample=False,
            max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens,
        )  # fmt: skip
        return made

    def decoder(self) -> Decoder:
        return Decoder(self.model, self.read, self.places)

    def gradients(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of two whole sequences and of two padded ones: the logits of all words, and what all parameters get."""
        logits = torch.cat(
            [
                self.model(**given, use_cache=False).logits[given["attention_mask"] != 0]
                for given in (self.given(self.words[:2], padded=False), self.given(self.words[:2], padded=True))
            ]
        )
        generator = torch.Generator(logits.device).manual_seed(2)
        direction = torch.randn(logits.shape, generator=generator, device=logits.device).to(logits.dtype)
        wanted = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(logits, wanted, direction, allow_unused=True)
        return logits.detach(), [grad for grad in found if grad is not None]

    def verify(self) -> dict[str, Any]:
        """How far every way is from eager in float32, what is wrong with it, what tokens it makes, and how long the
        first generate() takes."""
        with self.way("eager"):
            weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.model.float()
            logits, grads = self.gradients()
            self.model.to(self.dtype)
            self.model.load_state_dict(weights)
        errors: dict[str, dict[str, float]] = {}
        wrong: dict[str, str] = {}
        tokens: dict[str, torch.Tensor] = {}
        first: dict[str, float] = {}
        for name in ("eager", *WAYS):
            with self.way(name):
                got, found = self.gradients()
                errors[name] = {"out": models.error([got], [logits]), "grads": models.error(found, grads)}
                start = time.perf_counter()
                tokens[name] = self.generate()
                models.synchronize(self.device)
                first[name] = time.perf_counter() - start
            for what, value in errors[name].items():
                if not value <= models.FURTHER * errors["eager"][what]:
                    wrong[name] = f"{what} error {value:.1e}, eager's {errors['eager'][what]:.1e}"
        same = {name: (tokens[name] == tokens[PEER]).float().mean().item() for name in WAYS}
        return {"errors": errors, "wrong": wrong, "same tokens": same, "first": first}

    def verified_decoders(self, told: dict[str, Any]) -> dict[str, Decoder]:
        """A captured step per way; what is wrong with its logits is told with what else was found."""
        found = {}
        with self.way("eager"):
            weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.model.float()
            want = self.decoder().expected()
            self.model.to(self.dtype)
            self.model.load_state_dict(weights)
            usual = models.error([self.decoder().expected()], [want])
        for name in WAYS:
            with self.way(name):
                found[name] = self.decoder()
                found[name].capture()
            value = models.error([found[name].first], [want])
            told["errors"][name]["graph"] = value
            if not value <= models.FURTHER * usual:
                told["wrong"][name] = f"a decoded token's logits are off by {value:.1e}, eager's by {usual:.1e}"
        return found

    def rounds(self, kind: str, count: int, steps: int, told: dict[str, Any]) -> dict[str, list[float]]:
        """Seconds per call by way, round by round, in a random order."""
        call = functools.partial(self.step if kind.endswith("step") else self.generate, padded=kind.startswith(PADDED))
        calls: dict[str, Callable[[], object]] = dict.fromkeys(WAYS, call)
        if kind == "graph":
            decoders = self.verified_decoders(told)
            steps = min(steps, (self.places - self.read.shape[1] - WARM_STEPS) // (count + 2))
            calls = {name: decoder.replay for name, decoder in decoders.items()}
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        order = random.Random(3)
        for number in range(count + 1):  # the first settles what is planned, built and learnt
            for name in order.sample(WAYS, len(WAYS)):
                with self.way(name):
                    taken = models.clocked(self.device, calls[name], 1 if kind.endswith("generate") else steps)
                if number:
                    found[name].append(taken)
        return found


class Decoder:
    """A forward of one more token per sequence, always the same one, against a static cache; captured into a CUDA graph
    where there is a GPU."""

    def __init__(self, model: Any, read: torch.Tensor, places: int) -> None:
        from transformers import StaticCache  # noqa: PLC0415

        self.model, self.read, self.token = model, read, read[:, :1].contiguous()
        self._cache = StaticCache(config=model.config, max_cache_len=places)
        self.logits = self.first = torch.empty(0)
        self.replay: Callable[[], object] = self._step

    def expected(self) -> torch.Tensor:
        """The logits of the first replay, by a forward over all that was read until then."""
        with torch.no_grad():
            whole = torch.cat([self.read, *[self.token] * (WARM_STEPS + 1)], 1)
            logits: torch.Tensor = self.model(whole, use_cache=False, logits_to_keep=1).logits
        return logits

    def capture(self) -> None:
        """Read the prompt, take the first steps, and capture one; `first` is what its first replay gives."""
        on_gpu = self.read.is_cuda
        stream = torch.cuda.Stream() if on_gpu else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            self._forward(self.read)
            for _ in range(WARM_STEPS):  # what is built or planned is so before the capture
                self._step()
            if stream is not None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    self._step()
                self.replay = graph.replay
            self.replay()
            self.first = self.logits.clone()
        models.synchronize(self.read.device.type)

    def _step(self) -> None:
        self.logits = self._forward(self.token)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = self.model(
                tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            ).logits
        return made


WARM_STEPS = 2


def row_of(family: str, kind: str, told: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
    from tilewise.lab.measure import statistics  # noqa: PLC0415

    row: dict[str, Any] = {"model": family, "what": kind, **told, "seconds": times, "speed": {}}
    for name in (OURS, OVERRIDE):
        if name not in told["wrong"] and PEER not in told["wrong"]:
            row["speed"][name] = statistics.speed(times[name], times[PEER], against=PEER, among=1).to_dict()
    return row


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for name, found in row["seconds"].items():
            speed = row["speed"].get(name)
            interval = f" [{speed['low']:.3f}, {speed['high']:.3f}]" if speed and speed["low"] is not None else ""
            ratio = f"{speed['ratio']:.3f}x{interval}" if speed else row["wrong"].get(name, "")
            median = sorted(found)[len(found) // 2]
            first = f"  (first {1e3 * row['first'][name]:.0f} ms)" if row["what"] == "generate" else ""
            print(f"{row['model']:6} {row['what']:15} {name:27} {1e3 * median:9.3f} ms  {ratio}{first}")
    ratios = [row["speed"][OURS]["ratio"] for row in rows if OURS in row["speed"]]
    if ratios:
        print(f"geomean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}, worst {min(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=FAMILIES, help="of these families; all by default")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of these; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="training steps per round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few numbers wide")
    parser.add_argument("--save", action="store_true", help="keep the record in benchmarks/results")
    options = parser.parse_args()
    import transformers  # noqa: PLC0415

    from tilewise import CompileError  # noqa: PLC0415
    from tilewise.lab.measure import environment  # noqa: PLC0415
    from tilewise.lab.model import launched  # noqa: PLC0415
    from tilewise.lab.studies import kept  # noqa: PLC0415
    from tilewise.native import library  # noqa: PLC0415

    os.environ.setdefault(library.SETTING, "on")
    if options.device.startswith("cuda") and library.is_wanted():
        try:
            library.build()  # rather than in the background, while we measure
        except CompileError as error:
            print(f"without native code: {error}", file=sys.stderr)
    provenance = environment.provenance(0, environment.command_line())
    provenance["versions"]["transformers"] = transformers.__version__
    rows = []
    for family in options.only or FAMILIES:
        runner = Runner(family, tiny=options.tiny, device=options.device)
        told = runner.verify()
        for kind in options.kind or KINDS:
            if (family, kind) in TOO_SHORT:
                continue
            of_kind = copy.deepcopy(told)  # what decoding adds is said of its own row alone
            times = runner.rounds(kind, options.rounds, options.steps, of_kind)
            rows.append(row_of(family, kind, of_kind, times))
    show(rows)
    if options.save:
        settings = {"rounds": options.rounds, "steps": options.steps, "tiny": options.tiny, "device": options.device}
        record = {"kind": "tilewise models", "suite": "eager", "provenance": provenance, "settings": settings}
        record |= {"repeated calls": environment.repeated_calls(), "rows": rows}
        record["kernels"] = launched.by_this_process()
        print(f"saved {kept.save(record, ROOT / 'benchmarks' / 'results')}", file=sys.stderr)


if __name__ == "__main__":
    main()
