"""Whole Transformers models with padded batches: attn_implementation="tilewise" against sdpa, flex_attention and eager.

    python benchmarks/models.py --save                     # all models, on a GPU, in about four minutes
    python benchmarks/models.py --only gemma2 --only t5    # some of them
    python benchmarks/models.py --tiny --device cpu        # a look at the script itself

Random weights in bfloat16, a few layers of real width, batches of real text's kind: sequences of very different
lengths, padded. What is timed is a forward without gradients and a training step (forward and backward, without an
optimizer). Every implementation runs the same model with the same weights. Before anything is timed its outputs and its
gradients at tokens that are no padding are held against eager attention in float32: who is much further away than eager
in bfloat16 computes another function, and is no measure. A ratio is the time of the fastest right one of Transformers'
own over ours, from interleaved rounds, with the interval of tilewise.lab's statistic.

Each model has a process of its own. They compile side by side, and are timed one at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
OURS = "tilewise"
PEERS = ("sdpa", "flex_attention", "eager")
KINDS = ("forward", "step")
FOUND = ("out", "grads")
SHARES = (1.0, 0.73, 0.49, 0.24)  # of the longest sequence, batch by batch
FURTHER = 4.0  # times the error of eager in bfloat16: beyond that another function is computed
READY_SECONDS, TIMED_SECONDS = 400.0, 120.0


@dataclass(frozen=True)
class Model:
    """A family of Transformers: its classes, its widths, and the batch it is given."""

    family: str
    batch: tuple[int, int]  # sequences, tokens of the longest
    real: dict[str, Any]
    tiny: dict[str, Any]
    kind: str = "decoder"  # or encoder, encoder-decoder, vision, speech
    suffix: str = "Model"
    config: str = ""
    side: str = "right"  # that is padded
    target: int = 256  # tokens of the decoder behind an encoder
    peers: tuple[str, ...] = PEERS
    options: dict[str, Any] = field(default_factory=dict)  # of both sizes


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VOCABULARY = 8192  # embeddings and logits are not what is measured
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Model] = {
    "llama": Model(
        "Llama",
        (4, 2048),
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 8192},
        TINY,
        side="left",
        options=TOKENS,
    ),
    "gemma2": Model(
        "Gemma2",
        (4, 2048),
        {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "sliding_window": 1024},
        TINY | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        side="left",
        options=TOKENS | _LAYERS,
    ),
    "gemma3": Model(
        "Gemma3",
        (4, 2048),
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "sliding_window": 1024},
        TINY | {"sliding_window": 5, "query_pre_attn_scalar": 8},
        suffix="TextModel",
        config="Gemma3TextConfig",
        side="left",
        options=TOKENS | _LAYERS,
    ),
    "gpt_oss": Model(
        "GptOss",
        (4, 2048),
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "sliding_window": 128}
        | {"num_local_experts": 2, "num_experts_per_tok": 2},  # which expert a token gets would be chance in bfloat16
        TINY | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
        side="left",
        options=TOKENS | _LAYERS,
    ),
    "bert": Model(
        "Bert",
        (32, 512),
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 4},
        {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        | {"num_attention_heads": 4, "max_position_embeddings": 64},
        kind="encoder",
        options={"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 0},
    ),
    "t5": Model(
        "T5",
        (4, 2048),
        {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 2, "num_heads": 16, "vocab_size": VOCABULARY}
        | {"feed_forward_proj": "gated-gelu"},
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97},
        kind="encoder-decoder",
        options={"dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 1},
        peers=("sdpa", "eager"),
    ),
    "vit": Model(
        "ViT",
        (64, 224),
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 4},
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
        kind="vision",
        options={"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "patch_size": 16},
        peers=("sdpa", "eager"),
    ),
    "whisper": Model(
        "Whisper",
        (8, 1500),
        {"d_model": 1280, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120}
        | {"decoder_ffn_dim": 5120, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCABULARY}
        | {"num_mel_bins": 128},
        {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
        | {"decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 97, "num_mel_bins": 8}
        | {"max_source_positions": 12, "max_target_positions": 32},
        kind="speech",
        options={"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        target=384,
        peers=("sdpa", "eager"),
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# A model and its batch


def build(name: str, *, tiny: bool, device: str, dtype: torch.dtype) -> Any:
    """The model with random weights, in training mode, in which nothing is dropped."""
    import transformers  # noqa: PLC0415  (slow to import, and not needed to look at a record)

    one = MODELS[name]
    config = getattr(transformers, one.config or f"{one.family}Config")(
        **(one.tiny if tiny else one.real), **one.options
    )
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{one.family}{one.suffix}")(config)
    return model.to(dtype).train()


def padding(sequences: int, tokens: int, side: str, device: str) -> torch.Tensor:
    """(sequences, tokens) of 1 where there is a token: lengths as in SHARES."""
    lengths = [max(1, int(tokens * SHARES[number % len(SHARES)])) for number in range(sequences)]
    at = torch.arange(tokens, device=device)
    behind = at if side == "right" else tokens - 1 - at
    return torch.stack([(behind < length).long() for length in lengths])


@dataclass
class Batch:
    """The arguments of a call, and which of its output rows are no padding."""

    arguments: dict[str, torch.Tensor]
    real: torch.Tensor

    def first(self, sequences: int) -> Batch:
        return Batch({name: t[:sequences] for name, t in self.arguments.items()}, self.real[:sequences])

    def wide(self) -> Batch:
        """In float32."""
        floats = {name: t.float() for name, t in self.arguments.items() if t.is_floating_point()}
        return Batch(self.arguments | floats, self.real)


def batch(name: str, model: Any, *, tiny: bool, device: str, side: str = "") -> Batch:
    one = MODELS[name]
    side = side or one.side
    sequences, tokens = (3, 12) if tiny else one.batch
    target = 6 if tiny else one.target
    generator = torch.Generator(device).manual_seed(1)
    vocabulary = getattr(model.config, "vocab_size", 2)
    weights = next(model.parameters())

    def words(mask: torch.Tensor) -> torch.Tensor:
        return mask * torch.randint(3, vocabulary, mask.shape, generator=generator, device=device)

    mask = padding(sequences, tokens, side, device)
    if one.kind == "vision":
        size = (sequences, 3, model.config.image_size, model.config.image_size)
        pixels = torch.randn(size, generator=generator, device=device).to(weights.dtype)
        patches = (model.config.image_size // model.config.patch_size) ** 2 + 1
        return Batch({"pixel_values": pixels}, torch.ones(sequences, patches, dtype=torch.bool, device=device))
    shorter = padding(sequences, target, side, device)
    if one.kind == "speech":
        size = (sequences, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        features = torch.randn(size, generator=generator, device=device).to(weights.dtype)
        given = {"input_features": features, "decoder_input_ids": words(shorter), "decoder_attention_mask": shorter}
        return Batch(given, shorter.bool())
    given = {"input_ids": words(mask), "attention_mask": mask}
    if one.kind == "encoder-decoder":
        given |= {"decoder_input_ids": words(shorter), "decoder_attention_mask": shorter}
        return Batch(given, shorter.bool())
    return Batch(given, mask.bool())


def outputs(model: Any, given: Batch) -> torch.Tensor:
    """Of the tokens that are no padding, (tokens, width)."""
    hidden: torch.Tensor = model(**given.arguments).last_hidden_state
    return hidden[given.real]


def gradients(model: Any, given: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs, and the gradients of all parameters for a random direction of them."""
    out = outputs(model, given)
    generator = torch.Generator(out.device).manual_seed(2)
    direction = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(out, wanted, direction, allow_unused=True)
    return out.detach(), [grad for grad in found if grad is not None]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Of all tensors together, relative and by norm."""
    if len(got) != len(want):
        return math.inf
    off = sum((one.float() - other.float()).square().sum().item() for one, other in zip(got, want, strict=True))
    size = sum(other.float().square().sum().item() for other in want)
    return math.sqrt(off / size)


# ---------------------------------------------------------------------------------------------------------------------
# The process of a model


def clocked(device: str, call: Callable[[], object], count: int) -> float:
    """Seconds per call, of so many one after another, until the device has done them."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Runner:
    """A model that every implementation takes turns with."""

    def __init__(self, name: str, *, tiny: bool, device: str, peers: tuple[str, ...]) -> None:
        from tilewise.integrations.transformers import register  # noqa: PLC0415

        register()
        self.device = device
        self.model = build(name, tiny=tiny, device=device, dtype=torch.bfloat16)
        self.given = batch(name, self.model, tiny=tiny, device=device)
        self.implementations = (OURS, *peers)
        self.errors: dict[str, dict[str, float]] = {}
        self.wrong: dict[str, str] = {}

    def verify(self) -> None:
        """Everyone's distance from eager in float32; the first calls, which compile, are made here."""
        some = self.given.first(2)
        self.model.set_attn_implementation("eager")
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.float()
        out, grads = gradients(self.model, some.wide())
        self.model.to(torch.bfloat16)
        self.model.load_state_dict(weights)
        for implementation in ("eager", *(name for name in self.implementations if name != "eager")):
            try:
                self.model.set_attn_implementation(implementation)
                got, found = gradients(self.model, some)
                self.errors[implementation] = {"out": error([got], [out]), "grads": error(found, grads)}
                for what in KINDS:
                    getattr(self, what)()
            except Exception as failure:  # noqa: PERF203  (whatever keeps one of them from running is its answer)
                self.wrong[implementation] = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
        usual = self.errors.get("eager") or {what: min(far[what] for far in self.errors.values()) for what in FOUND}
        for implementation, far in self.errors.items():
            for what, value in far.items():
                if not value <= FURTHER * usual[what]:
                    self.wrong[implementation] = f"{what} error {value:.1e}, eager's {usual[what]:.1e}"
        del out, grads, weights
        self.free()

    def free(self) -> None:
        """What is not in use: the other models' processes share the device."""
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def forward(self) -> None:
        with torch.no_grad():
            self.model(**self.given.arguments)

    def step(self) -> None:
        hidden = self.model(**self.given.arguments).last_hidden_state
        hidden[self.given.real].float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)

    def seconds(self, what: str, budget: float) -> float:
        """Per call, of as many as fit into the budget."""
        call = getattr(self, what)
        once = clocked(self.device, call, 1)
        return clocked(self.device, call, max(1, min(20, math.ceil(budget / once))))

    def rounds(self, count: int, budget: float) -> dict[str, dict[str, list[float]]]:
        """Seconds per call by what is timed and implementation, round by round, in a random order."""
        right = [name for name in self.implementations if name not in self.wrong]
        found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in right} for what in KINDS}
        order = random.Random(3)
        for _ in range(count):
            for name in order.sample(right, len(right)):
                self.model.set_attn_implementation(name)
                for what in KINDS:
                    found[what][name].append(self.seconds(what, budget))
        self.free()
        return found


def work(options: argparse.Namespace) -> None:
    """Ready first, with what became of everyone; then, when told to, the times."""
    answers, sys.stdout = sys.stdout, sys.stderr
    peers = tuple(peer for peer in MODELS[options.worker].peers if peer in options.peer)
    runner = Runner(options.worker, tiny=options.tiny, device=options.device, peers=peers)
    runner.verify()
    from tilewise.lab.model import launched  # noqa: PLC0415

    for told in ({"errors": runner.errors, "wrong": runner.wrong, "kernels": launched.by_this_process()}, None):
        print(json.dumps(told or runner.rounds(options.rounds, options.seconds)), file=answers, flush=True)
        if told is not None and not sys.stdin.readline():
            return


# ---------------------------------------------------------------------------------------------------------------------
# All of them


def line_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any] | None:
    """The next answer; None where the process is gone or says nothing in time."""
    import selectors  # noqa: PLC0415

    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            process.kill()
            return None
    text = process.stdout.readline()
    return json.loads(text) if text else None


def compare(names: list[str], options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Any]]:
    """The rows, and what of ours their calls launch."""
    from tilewise.lab.measure import statistics  # noqa: PLC0415

    flags = ["--device", options.device, "--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    flags += ["--tiny"] if options.tiny else []
    flags += [word for peer in options.peer for word in ("--peer", peer)]
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--worker", name, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    rows, kernels = [], []
    try:
        ready = {name: line_of(process, READY_SECONDS) for name, process in processes.items()}
        for name, process in processes.items():
            told = ready[name]
            times = None
            if told is not None:
                kernels += told.pop("kernels")
                assert process.stdin is not None
                process.stdin.write("time\n")
                process.stdin.flush()
                times = line_of(process, TIMED_SECONDS)
            rows += [row_of(name, what, told or {}, (times or {}).get(what, {}), statistics) for what in KINDS]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return rows, kernels


def row_of(
    name: str, what: str, told: dict[str, Any], times: dict[str, list[float]], statistics: Any
) -> dict[str, Any]:
    """A model's row: the fastest of Transformers' own that is right, and how we stand to it."""
    sequences, tokens = MODELS[name].batch
    row = {"model": name, "what": what, "batch": sequences, "tokens": tokens, "side": MODELS[name].side, **told}
    row |= {"seconds": times, "fastest": None, "ratio": None}
    others = {peer: sorted(found)[len(found) // 2] for peer, found in times.items() if peer != OURS and found}
    if not others or not times.get(OURS):
        return row
    fastest = min(others, key=others.__getitem__)
    speed = statistics.speed(times[OURS], times[fastest], against=fastest, among=len(others))
    return row | {"fastest": fastest, "ratio": speed.ratio, "speed": speed.to_dict()}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        times = ", ".join(
            f"{name} {1e3 * sorted(found)[len(found) // 2]:.2f} ms" for name, found in row["seconds"].items() if found
        )
        low = row["speed"]["low"] if row["ratio"] else None
        interval = f" [{low:.2f}, {row['speed']['high']:.2f}]" if low is not None else ""
        ratio = f"{row['ratio']:.2f}x{interval} of {row['fastest']}" if row["ratio"] else "no ratio"
        print(f"{row['model']:8} {row['what']:8} {ratio:44} {times}")
        if row["what"] == KINDS[0]:
            for name, why in row.get("wrong", {}).items():
                print(f"{'':17} {name}: {why}")
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"geomean {mean:.3f}, worst {min(ratios):.3f}, {sum(one < 1 for one in ratios)} of {len(rows)} under 1.00"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=MODELS, help="of these models; all by default")
    parser.add_argument("--peer", action="append", choices=PEERS, help="against these alone; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="measured per implementation, round and kind")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few numbers wide")
    parser.add_argument("--save", action="store_true", help="keep the record in benchmarks/results")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.peer = options.peer or list(PEERS)
    if options.worker:
        work(options)
        return
    from tilewise.lab.measure import environment  # noqa: PLC0415
    from tilewise.lab.studies import kept  # noqa: PLC0415

    provenance = environment.provenance(0, environment.command_line())
    import transformers  # noqa: PLC0415

    provenance["versions"]["transformers"] = transformers.__version__
    settings = {"rounds": options.rounds, "seconds": options.seconds, "tiny": options.tiny}
    record = {"kind": "tilewise models", "suite": "transformers", "provenance": provenance, "settings": settings}
    rows, kernels = compare(options.only or list(MODELS), options)
    show(rows)
    if options.save:
        print(
            f"saved {kept.save(record | {'rows': rows, 'kernels': kernels}, ROOT / 'benchmarks' / 'results')}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
