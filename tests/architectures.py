"""Every architecture that the installed Transformers has, tiny and random, made from its configuration alone.

    PYTHONPATH=src:tests python tests/architectures.py [model_type ...]

prints what becomes of each under attn_implementation="tilewise": whether it equals eager where tokens count, with
padding on either side, is refused by name, does not come to attention at all, or cannot be made or run this way.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import sys
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tilewise import UnsupportedProblem
from tilewise.integrations import transformers as ours

LENGTH, BATCH, VOCABULARY = 24, 3, 99
PARAMETERS = 40_000_000  # of a model that its configuration could not be made small enough for


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# By the names of fields, wherever a configuration has one of them. Windows and selections are shorter than sequences.
SMALL: dict[str, Any] = {
    **_each(
        32,
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim encoder_hidden_size decoder_hidden_size "
        "projection_dim hidden_dim text_embed_dim width d_embed out_hidden_size encoder_dim model_dim lru_width "
        "cross_attention_hidden_size encoder_hidden_dim decoder_hidden_dim attention_hidden_size transformer_width "
        "audio_hidden_size text_hidden_size lm_hidden_size output_dim condition_dim projector_hidden_size",
    ),
    **_each(
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "linear_num_key_heads linear_num_value_heads linear_num_heads num_query_heads heads num_mem_heads "
        "mamba_n_heads mamba_num_heads",
    ),
    **_each(2, "num_key_value_heads num_kv_heads n_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
    **_each(
        8,
        "head_dim d_kv qk_nope_head_dim v_head_dim qk_rope_head_dim index_head_dim attention_head_dim global_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels swa_head_dim mamba_d_state "
        "hidden_size_per_layer_input ssm_state_size patch_size vision_patch_size",
    ),
    **_each(16, "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim num_mel_bins"),
    **_each(
        48,
        "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size mlp_dim "
        "shared_expert_intermediate_size ffn_hidden_size dense_intermediate_size shared_intermediate_size "
        "intermediate_size_mlp moe_shared_expert_intermediate_size expert_ffn_hidden_size hidden_mlp_dim "
        "encoder_intermediate_size decoder_intermediate_size dense_ffn_hidden_size",
    ),
    **_each(
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers "
        "num_decoder_layers encoder_num_layers decoder_num_layers num_block_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers",
    ),
    **_each(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size text_vocab_size"),
    **_each(
        256,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len block_size",
    ),
    **_each(6, "sliding_window local_attention window_size attention_window sliding_window_size attention_chunk_size"),
    **_each(4, "index_topk num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    **_each(
        2,
        "attn_layer_period index_n_heads index_block_size index_topk_blocks index_kpool linear_conv_kernel_dim "
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts expert_top_k eos_token_id "
        "prediction_length",
    ),
    **_each(
        1,
        "n_group topk_group n_shared_experts index_local_blocks first_k_dense_replace bos_token_id max_window_layers "
        "attn_layer_offset mamba_n_groups decoder_start_token_id",
    ),
    **_each(0, "pad_token_id num_kv_shared_layers"),
    "image_size": 32,
    "initializer_range": 0.2,  # scores of order 1, so that what is visible shows
    "mrope_section": [2, 1, 1],
}
# What a default configuration does not switch on.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
}
# Tried in this order, until one gives a model that runs with eager.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16},
    _each(4, "num_key_value_heads num_kv_heads n_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
    {"head_dim": None, "num_key_value_heads": None, "patch_size": None, "image_size": None},
    {"head_dim": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "mrope_section": [8, 4, 4]},
    {
        "hidden_dim": None,
        "embed_dim": None,
        "width": None,
        "output_dim": None,
        "projection_dim": None,
        "max_position_embeddings": None,
    },
    {"pad_token_id": None, "vocab_size": None},
    {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "mrope_section": None},
    {"": True},  # fields that are None too
    _each(None, "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"),
)


class Outcome(NamedTuple):
    kind: str  # "equal", "wrong", "raised", "refused", "without attention", "not made", "not run"
    detail: str = ""


def smaller(given: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that are known by their names, made small, in nested ones too.

    Of what it lists by layer one of each kind stays.
    """
    found: dict[str, Any] = {}
    kinds = given.get("layer_types") or ()
    kept = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values()) if kinds else [0, 1]
    kept = kept if len(kept) > 1 else [0, 1]
    layers = given.get("num_hidden_layers") or len(kinds)
    for name, value in given.items():
        if name == "rope_parameters" and small.get("") and isinstance(value, dict):
            found[name] = value | {"mrope_section": [2, 1, 1]}
        elif isinstance(value, dict) and (name.endswith("config") or name in ("rope_parameters", "rope_scaling")):
            inner = smaller(value, small)
            if inner and name.endswith("config"):
                found[name] = inner | ({"model_type": value["model_type"]} if value.get("model_type") else {})
            elif inner:
                found[name] = value | inner
        elif name == "mrope_section" and small.get(name):
            found[name] = small[name]
        elif isinstance(value, list) and layers and len(value) == layers > len(kept):
            found[name] = [value[at] for at in kept]
            if small.get("num_hidden_layers"):
                found["num_hidden_layers"] = len(kept)
        elif small.get(name) is not None and ((type(value) is int and value > 0) or (value is None and small.get(""))):
            found.setdefault(name, small[name])
        elif name == "use_sliding_window":
            found[name] = True
        elif name == "initializer_range":
            found[name] = small[name]
    return found


def configuration(model_type: str, variant: dict[str, Any]) -> Any:
    made = CONFIG_MAPPING[model_type]
    return made(**smaller(made().to_dict(), SMALL | variant) | MORE.get(model_type, {}))


def model_class(config: Any) -> type[Any]:
    try:
        found = MODEL_MAPPING[type(config)]
        return found[0] if isinstance(found, (tuple, list)) else found
    except KeyError:
        pass
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    fitting = [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, transformers.PreTrainedModel)
        and each.config_class is type(config)
        and not each.__name__.endswith("PreTrainedModel")
    ]
    if not fitting:
        raise LookupError("no model of its own has this configuration")
    return fitting[0]


PADS = (0, 3, 7)


def inputs(model: Any, side: str, pictured: bool) -> dict[str, torch.Tensor]:
    """What `forward` takes: tokens with padding on one side, or pictures, or sounds."""
    torch.manual_seed(2)
    takes = inspect.signature(model.forward).parameters
    config = model.config
    given: dict[str, Any] = {}
    if "input_ids" in takes or "inputs_embeds" in takes:
        here = torch.ones(BATCH, LENGTH, dtype=torch.long)
        for row, pads in enumerate(PADS):
            here[row, : pads if side == "left" else 0] = 0
            here[row, LENGTH - (pads if side == "right" else 0) :] = 0
        if "input_ids" in takes:
            ends = here.cumsum(1).argmax(1)  # the last token, which poolers look for
            ids = torch.randint(3, 90, (BATCH, LENGTH)).scatter(1, ends[:, None], 2)
            given["input_ids"] = ids * here
        else:
            given["inputs_embeds"] = torch.randn(BATCH, LENGTH, config.hidden_size)
        if "attention_mask" in takes:
            given["attention_mask"] = here
        if "decoder_input_ids" in takes:
            given["decoder_input_ids"] = torch.randint(3, 90, (BATCH, 7))
        if "bbox" in takes:
            given["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
        if pictured and "pixel_values" in takes:
            given["pixel_values"] = pictures(config)
    elif "grid_thw" in takes:
        grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
        width = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
        width *= getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        name = next(name for name in ("hidden_states", "pixel_values") if name in takes)
        given = {name: torch.randn(24, width), "grid_thw": grid}
    elif "pixel_values" in takes:
        given["pixel_values"] = pictures(config)
    elif "input_features" in takes:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_dim", 16)
        frames = 2 * getattr(config, "max_source_positions", 32)
        shape = (BATCH, frames, bins) if pictured else (BATCH, bins, frames)
        given["input_features"] = torch.randn(shape)
        if "attention_mask" in takes or "input_features_mask" in takes:
            name = "attention_mask" if "attention_mask" in takes else "input_features_mask"
            given[name] = torch.ones(BATCH, frames, dtype=torch.long)
            given[name][1, -frames // 4 :] = 0
        if "decoder_input_ids" in takes:
            given["decoder_input_ids"] = torch.randint(3, 90, (BATCH, 7))
    elif "input_values" in takes:
        shape = (BATCH, 1, 3200) if pictured else (BATCH, 3200)
        given["input_values"] = torch.randn(shape)
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(BATCH, 3200, dtype=torch.long)
            given["attention_mask"][1, -900:] = 0
        if "decoder_input_ids" in takes:
            given["decoder_input_ids"] = torch.randint(3, 90, (BATCH, 7))
    elif "hidden_states" in takes:
        given["hidden_states"] = torch.randn(BATCH, LENGTH, getattr(config, "input_dim", config.hidden_size))
    missing = [
        name
        for name, one in takes.items()
        if one.default is inspect.Parameter.empty
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and name not in given
    ]
    if missing or not given:
        raise LookupError(f"inputs that are not known here: {', '.join(missing)}")
    return given


def pictures(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 32
    height, width = size if isinstance(size, (tuple, list)) else (size,) * 2
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    return torch.randn(BATCH, channels, height, width)


def run(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Results of floating point, where tokens count: all of the first sequence, which has no padding, and the others'
    where a result has a row for each token."""
    torch.manual_seed(3)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given = given | {"use_cache": False}
    with torch.no_grad():
        results = model(**given)
    here = given.get("attention_mask")
    found = []
    for name, value in results.items() if hasattr(results, "items") else enumerate(results):
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()) or name == "loss" or not value.ndim:
            continue
        if here is None:
            found.append(value)
        elif value.shape[:2] == here.shape and "input_values" not in given:
            found.append(value[here.bool()])
        else:
            found.append(value[:1])
    if not found or not any(value.isfinite().all() for value in found):
        raise ArithmeticError("no finite tensor in the results")
    return found


def pair(model_type: str, variant: dict[str, Any]) -> tuple[Any, Any]:
    """The same random model twice: eager, and through us. Raises UnsupportedProblem where we refuse it."""
    made = []
    for implementation in ("tilewise", "eager"):
        torch.manual_seed(1)
        config = configuration(model_type, variant)
        config._attn_implementation = implementation
        each = model_class(config)
        if implementation == "tilewise":
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in each(config).parameters())
            if size > PARAMETERS:
                raise LookupError(f"{size} parameters")
            config = configuration(model_type, variant)
            config._attn_implementation = implementation
        made.append(each(config).eval())
    model, eager = made
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in eager.parameters():  # sinks, biases and gates begin as zeros
            if not parameter.any():
                parameter.normal_(std=0.2)
    model.load_state_dict(eager.state_dict())
    return eager, model


@contextlib.contextmanager
def counted():
    """The calls that come to our attention function."""
    calls: list[Any] = []
    interface = transformers.AttentionInterface._global_mapping
    before = interface[ours.NAME]

    def spy(module, *given, **named):
        calls.append((type(module).__name__, tuple(named)))
        return before(module, *given, **named)

    interface[ours.NAME] = spy
    try:
        yield calls
    finally:
        interface[ours.NAME] = before


def outcome(model_type: str, allowed: float) -> Outcome:
    """What becomes of the first variant that runs with eager."""
    failed = Outcome("not made", "")
    for variant in VARIANTS:
        try:
            eager, model = pair(model_type, variant)
        except UnsupportedProblem as refusal:
            return Outcome("refused", refusal.summary)
        except Exception as error:  # whatever a configuration made small may run into
            failed = failed if failed.detail else Outcome("not made", shortly(error))
            if isinstance(error, (LookupError, ImportError)) and not isinstance(error, (KeyError, IndexError)):
                break
            continue
        for pictured in (False, True):
            try:
                wanted = {side: run(eager, inputs(eager, side, pictured)) for side in ("left", "right")}
            except Exception as error:
                if failed.kind != "not run":
                    failed = Outcome("not run", shortly(error))
                continue
            return compared(model, wanted, pictured, allowed)
    return failed


def compared(model: Any, wanted: dict[str, list[torch.Tensor]], pictured: bool, allowed: float) -> Outcome:
    worst = 0.0
    with counted() as calls:
        for side, want in wanted.items():
            try:
                got = run(model, inputs(model, side, pictured))
            except UnsupportedProblem as refusal:
                return Outcome("refused", refusal.summary)
            except Exception as error:
                return Outcome("raised", shortly(error))
            for one, other in zip(got, want, strict=True):
                error = ((one - other).norm() / (other.norm() + 1e-30)).item()
                worst = max(worst, error) if math.isfinite(error) or not other.isfinite().all() else math.inf
    if not calls:
        return Outcome("without attention" if worst == 0 else "wrong", f"{worst:.1e}")
    return Outcome("equal" if worst <= allowed else "wrong", f"{worst:.1e}, {len(calls)} calls")


def shortly(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ours.register()
    for model_type in sys.argv[1:] or sorted(CONFIG_MAPPING):
        print(model_type, *outcome(model_type, 1e-4), sep="\t", flush=True)


if __name__ == "__main__":
    main()
