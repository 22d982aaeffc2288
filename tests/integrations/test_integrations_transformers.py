"""attn_implementation="tilewise" equals eager: logits, gradients and generated tokens of tiny random models."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, UnsupportedProblem, Window, api, native
from tilewise.call.request import OUT_BSHD
from tilewise.integrations import transformers as ours
from tilewise.torch_seam import switches

NEEDED = "needs transformers >= 5.15: pip install 'tilewise[transformers]'"
transformers = pytest.importorskip("transformers", reason=NEEDED, exc_type=ImportError)
masking_utils = pytest.importorskip("transformers.masking_utils", reason=NEEDED, exc_type=ImportError)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,  # scores of order 1, so that a mask or a cap that is forgotten shows
}
LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 5,
            "layer_types": LAYERS,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": None,
        },
    ),
    "qwen3": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": LAYERS},
    ),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": 5, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
LENGTH = 11


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """One thread: the models are so small that waking a second one costs more than their arithmetic."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert ours.register() == "tilewise"
    yield
    torch.set_num_threads(threads)


def make(name: str, **changes):
    """The same random model twice: eager, and through us."""
    family, options = MODELS[name]
    torch.manual_seed(1)
    pair = []
    for implementation in ("eager", "tilewise"):
        config = getattr(transformers, f"{family}Config")(**(SIZES | options | changes))
        config._attn_implementation = implementation
        pair.append(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    eager, model = pair
    model.load_state_dict(eager.state_dict())
    assert (eager.config._attn_implementation, model.config._attn_implementation) == ("eager", "tilewise")
    return eager, model


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (batch, length))


def padded() -> dict[str, torch.Tensor]:
    """Left padding, as generation has it."""
    ids = tokens(3)
    attention_mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 4, 7)):
        attention_mask[row, :pads] = 0
    return {"input_ids": ids * attention_mask, "attention_mask": attention_mask}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Two layers and a vocabulary behind the attention: their rounding counts too."""
    assert_close(got, want, 8 * budget(torch.float32, 64))


@pytest.fixture
def calls(monkeypatch):
    """The problems that reach the planner through us."""
    seen = []

    def spied(attend):
        def spy(q, k, v, **options):
            seen.append((options["mask"], q.shape[1], k.shape[1], options))
            return attend(q, k, v, **options)

        return spy

    for attend in (api.attention, api.attention_out_bshd):
        monkeypatch.setattr(ours, attend.__name__, spied(attend))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_forward_equals_eager_without_a_mask_tensor_or_repeated_heads(name, calls):
    eager, model = make(name)
    ids = tokens()
    with torch.no_grad():
        close(model(ids).logits, eager(ids).logits)
    assert len(calls) == SIZES["num_hidden_layers"]
    windowed = {"llama": 0, "mistral": 2}.get(name, 1)
    assert sorted(str(mask) for mask, *_ in calls) == ["causal"] * (2 - windowed) + ["window:4,0"] * windowed
    assert {(heads_q, heads_kv) for _, heads_q, heads_kv, _ in calls} == {(4, 2)}
    assert {options["softcap"] for *_, options in calls} == ({2.0} if name == "gemma2" else {0.0})


@pytest.mark.parametrize("name", MODELS)
def test_padding(name):
    eager, model = make(name)
    inputs = padded()
    with torch.no_grad():
        got, want = model(**inputs).logits, eager(**inputs).logits
    real = inputs["attention_mask"].bool()
    close(got[real], want[real])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_equals_eager(name, cache):
    eager, model = make(name)
    inputs = padded()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"disable_compile": True, "return_dict_in_generate": True, "output_logits": True}
    want, got = eager.generate(**inputs, **options), model.generate(**inputs, **options)
    assert torch.equal(got.sequences, want.sequences)
    close(torch.stack(got.logits), torch.stack(want.logits))


def test_a_static_cache_is_read_as_far_as_it_is_filled(calls):
    """One new token: a number of keys, and no tensor of all places."""
    _, model = make("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    ids = tokens()
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache, use_cache=True)
        mask = ours.attention_mask(ids.shape[0], 1, 32, 6, allow_is_causal_skip=False)
        calls.clear()
        model(ids[:, 6:7], past_key_values=cache, use_cache=True)
    assert isinstance(mask, ours.RuleMask)
    assert mask.lengths.tolist() == [7] * ids.shape[0]
    assert torch.equal(mask.dense(), (torch.arange(32) < 7).expand(ids.shape[0], 1, 1, 32))
    assert calls


@pytest.mark.parametrize("name", MODELS)
def test_generate_without_padding(name):
    eager, model = make(name)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    ids = tokens()
    assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_two_pieces(name, calls):
    """The second piece's queries stand at the end of the cache: causal is aligned at the bottom right there."""
    eager, model = make(name)
    ids = tokens()
    results = []
    for each in (eager, model):
        with torch.no_grad():
            first = each(ids[:, :6], use_cache=True)
            results.append(each(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True).logits)
    close(results[1], results[0])
    assert all(isinstance(mask, Causal | Window) for mask, *_ in calls)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_packed_sequences_stay_a_rule(name, calls):
    """GPT-OSS is not among them: Transformers shows its masks no position_ids, with eager as little as with us."""
    eager, model = make(name)
    ids = tokens(1)
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    with torch.no_grad():
        got, want = (
            model(ids, position_ids=positions, use_cache=False).logits,
            eager(ids, position_ids=positions, use_cache=False).logits,
        )
        alone = model(ids[:, 4:]).logits
    close(got, want)
    close(got[:, 4:], alone)
    packed = [mask for mask, *_ in calls[:2]]
    assert all(isinstance(mask, Documents) and mask.cu_seqlens_q == (0, 4, 11) for mask in packed)


DOCUMENTS = (0, 4, 11)


def flash(*offsets: int) -> dict[str, object]:
    """What DataCollatorWithFlattening hands over for flash-attn, after Trainer has moved it."""
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    cu = torch.tensor(offsets, dtype=torch.int32)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone(), "max_length_q": longest, "max_length_k": longest}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("by_positions", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_by_cumulative_lengths(name, by_positions, use_cache, calls, monkeypatch):
    """In layers with windows too, for which Transformers hands over a mask; none of them gets a tensor of all pairs."""
    eager, model = make(name)
    seen = []
    packed = ours.attention_packed
    monkeypatch.setattr(ours, "attention_packed", lambda *given, **named: seen.append(named) or packed(*given, **named))
    ids = tokens(1)
    positions = torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise(DOCUMENTS)])[None]
    given = flash(*DOCUMENTS) | ({"position_ids": positions} if by_positions else {})
    with torch.no_grad():
        got = model(ids, use_cache=use_cache, **given).logits
        want = [eager(ids[:, begin:end]).logits for begin, end in itertools.pairwise(DOCUMENTS)]
    close(got, torch.cat(want, 1))
    assert len(seen) == SIZES["num_hidden_layers"]
    assert not calls
    windowed = {"llama": 0, "mistral": 2}.get(name, 1)
    assert sum(isinstance(named["mask"], Window) for named in seen) == windowed


def test_documents_beside_another_mask_hide_what_either_hides():
    """A mask that is a tensor, padding beside a rule, filled places of a cache, and a bias of positions."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    batches = [(0, 4, 9, 9), (0, 7, 8, 9)]
    given = flash(0, 4, 9, 9, 16, 17) | {"scaling": 0.3}
    same = torch.stack([Documents(starts).to_bool(range(9), range(9), 9, 9) for starts in batches])[:, None]
    same[1, :, 8] = False  # behind the last offset
    causal = Causal().to_bool(range(9), range(9), 9, 9)
    tensor = torch.rand(2, 1, 9, 9) < 0.7
    flags = (torch.arange(9) > torch.tensor([[1], [0]]))[:, None, None, :]
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    bias = torch.randn(1, 4, 9, 9)
    everything = tilewise.Full()
    shape = (2, 1, 9, 9)
    cases = [
        ({"attention_mask": tensor}, same & tensor),
        ({"attention_mask": torch.zeros(shape).masked_fill(~tensor, -torch.inf)}, same & tensor),
        ({"attention_mask": ours.RuleMask(Causal(), shape, "cpu", flags)}, same & causal & flags),
        ({"attention_mask": ours.RuleMask(everything, shape, "cpu", None, lengths)}, same & ours._there(lengths, 9)),
        ({"attention_mask": None, "position_bias": bias}, bias.masked_fill(~(same & causal), -torch.inf)),
        ({"attention_mask": None, "is_causal": False}, same),
        ({"attention_mask": None}, same & causal),
        ({"attention_mask": ours.RuleMask(Window(2, 1), shape, "cpu")}, same & band(2, 1)),
    ]
    for named, mask in cases:
        out, _ = ours.attention_forward(torch.nn.Module(), q, k, v, **named, **given)
        want = tilewise.attention(q, k, v, mask=mask, scale=0.3).transpose(1, 2)
        assert_close(out, want.double(), 2 * budget(torch.float32, 9))


def band(left: int, right: int) -> torch.Tensor:
    return Window(left, right).to_bool(range(9), range(9), 9, 9)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_documents_with_keys_from_before_are_aligned_at_their_ends(window, biased):
    """Of two documents one has 3 keys in the cache, and the other none."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    starts = {"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 5, 7])}
    bias = torch.zeros(1, 4, 4, 7) if biased else None
    out, _ = ours.attention_forward(
        torch.nn.Module(), q, k, v, None, sliding_window=window, position_bias=bias, **starts
    )
    inner = Causal("bottom-right") if window is None else Window(window - 1, 0, "bottom-right")
    want = tilewise.attention(q, k, v, mask=Documents((0, 2, 4), (0, 5, 7), inner)).transpose(1, 2)
    assert_close(out, want.double(), budget(torch.float32, 7))


def test_documents_by_positions_and_by_offsets_are_cut_at_both():
    torch.manual_seed(0)
    q = torch.randn(1, 4, 9, 8)
    mask = ours.RuleMask(Documents((0, 3, 9), (), Causal()), (1, 1, 9, 9), "cpu")
    out, _ = ours.attention_forward(torch.nn.Module(), q, q, q, mask, **flash(0, 5, 8))
    want = tilewise.attention(q, q, q, mask=Documents((0, 3, 5, 8), (), Causal()).to_bool(range(9), range(9), 8, 8))
    assert not out[:, 8].any(), "behind the last offset"
    assert_close(out[:, :8], want.transpose(1, 2)[:, :8].double(), budget(torch.float32, 9))


@pytest.mark.parametrize(
    ("offsets", "mask", "named"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, None, "cu_seq_lens_k"),
        ({"cu_seq_lens_k": torch.tensor([0, 5])}, None, "cu_seq_lens_q"),
        (flash(0, 2, 5) | {"cu_seq_lens_k": torch.tensor([0, 3, 5])}, Documents((0, 2, 5)), "position_ids"),
        (dict.fromkeys(flash(0, 2, 5), torch.tensor([0, 2, 5])), Causal("bottom-right"), "in a cache"),
    ],
    ids=["q alone", "k alone", "positions that say otherwise", "cached keys that are not counted"],
)
def test_offsets_that_contradict_are_refused(offsets, mask, named):
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 9 if mask == Causal("bottom-right") else 5, 8)
    mask = None if mask is None else ours.RuleMask(mask, (1, 1, 5, k.shape[2]), "cpu")
    with pytest.raises(tilewise.InvalidInput, match=named):
        ours.attention_forward(torch.nn.Module(), q, k, k, mask, **offsets)


@pytest.mark.parametrize("name", MODELS)
def test_training_gradients_equal_eager(name):
    eager, model = make(name)
    ids = tokens()
    for each in (eager, model):
        each.train()
        each(ids, labels=ids).loss.backward()
    for (parameter, want), (_, got) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        assert want.grad is not None, parameter
        close(got.grad, want.grad)
    if name == "gpt_oss":
        assert model.model.layers[0].self_attn.sinks.grad.abs().min() > 0


def test_a_custom_four_dimensional_mask():
    eager, model = make("llama")
    ids = tokens()
    visible = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = eager(ids, attention_mask=additive).logits
        close(model(ids, attention_mask=visible).logits, want)
        close(model(ids, attention_mask=additive).logits, want)


def test_an_encoder_decoder_with_learned_position_bias():
    """T5: bidirectional and cross attention, and a bias on the scores that is trained."""
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=1
    )
    eager, model = transformers.T5ForConditionalGeneration(config), transformers.T5ForConditionalGeneration(config)
    model.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    try:
        model.set_attn_implementation("tilewise")
    except ValueError as error:
        pytest.skip(f"this Transformers has no attention interface in T5: {error}")
    inputs = padded()
    labels = tokens(3, 5)
    losses = [each.eval()(**inputs, labels=labels).loss for each in (eager, model)]
    for loss in losses:
        loss.backward()
    close(losses[1], losses[0])
    for (_, want), (_, got) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        close(got.grad, want.grad)


@pytest.mark.parametrize("shared", ["batch", "nothing", "rows"])
def test_a_bias_whose_keys_are_apart_is_copied(shared):
    """As T5 looks it up, (queries, keys, heads); what it is broadcast over takes no memory."""
    looked_up = torch.randn(7, 9, 4, requires_grad=True)
    apart = looked_up.permute(2, 0, 1)[None]
    if shared == "batch":
        apart = apart.expand(3, 4, 7, 9)
    elif shared == "rows":
        apart = apart[:, :, :1].expand(1, 4, 7, 9)
    adjacent = ours._with_adjacent_keys(apart)
    assert torch.equal(adjacent, apart)
    assert adjacent.stride(-1) == 1
    assert [step == 0 for step in adjacent.stride()] == [step == 0 for step in apart.stride()]
    assert ours._with_adjacent_keys(adjacent) is adjacent
    weights = torch.randn(apart.shape)
    got, want = (
        torch.autograd.grad((bias * weights).sum(), looked_up, retain_graph=True)[0] for bias in (adjacent, apart)
    )
    assert torch.equal(got, want)


def test_compiled_without_graph_breaks():
    eager, model = make("mistral")
    ids = tokens()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(ids).logits, eager(ids).logits)


@pytest.mark.parametrize(("name", "by_terms"), [("llama", True), ("mistral", False)])
def test_padded_batches_of_all_lengths_share_a_graph(name, by_terms, monkeypatch):
    """Compiled and exported."""
    monkeypatch.setattr(ours, "_takes_terms", lambda tensor: by_terms)
    eager, model = make(name)
    graphs = []
    torch.compiler.reset()
    compiled = torch.compile(
        model, dynamic=True, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    given = padded() | {"use_cache": False}
    length = torch.export.Dim("length", min=2, max=SIZES["max_position_embeddings"])
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    with torch.no_grad():
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
        for end in (LENGTH, LENGTH - 1, LENGTH - 3):
            shorter = {key: value[:, :end].clone() if key != "use_cache" else value for key, value in given.items()}
            real, want = shorter["attention_mask"].bool(), eager(**shorter).logits
            for each in (compiled, exported):
                close(each(**shorter).logits[real], want[real])
    assert len(graphs) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_padded_batch_makes_no_mask_of_all_pairs(name, monkeypatch):
    """Where padding is a term, as on a GPU."""
    monkeypatch.setattr(ours, "_takes_terms", lambda query: True)
    eager, model = make(name)
    inputs, shapes = padded(), set()

    def looked_at(graph, _):
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        shapes.update(tuple(value.shape) for value in values if getattr(value, "dtype", None) == torch.bool)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=looked_at)
    with torch.no_grad():
        got, want = compiled(**inputs, use_cache=False).logits, eager(**inputs).logits
    real = inputs["attention_mask"].bool()
    close(got[real], want[real])
    assert (3, LENGTH) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (LENGTH, LENGTH)]


def test_sinks_are_one_more_logit():
    """Against the definition: a softmax over the scores and the sink, of which the sink's share is thrown away."""
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    sinks = torch.randn(4, requires_grad=True)
    keys, values = (x.repeat_interleave(2, dim=1).double() for x in (k, v))
    scores = (q.double() @ keys.transpose(2, 3)) * 8**-0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    wide = sinks.detach().double().requires_grad_()
    joined = torch.cat([scores, wide[None, :, None, None].expand(2, 4, 7, 1)], -1)
    want = (torch.softmax(joined, -1)[..., :-1] @ values).transpose(1, 2)
    got, _ = ours.attention_forward(torch.nn.Module(), q, k, v, None, s_aux=sinks)
    assert_close(got, want, budget(torch.float32, 8))
    dout = torch.randn(got.shape)
    (grad,) = torch.autograd.grad(got, sinks, dout)
    (wanted,) = torch.autograd.grad(want, wide, dout.double())
    assert_close(grad, wanted, budget(torch.float32, 64), "dsink")


# ---------------------------------------------------------------------------------------------------------------------
# The mask function


def window_of(size):
    return masking_utils.sliding_window_causal_mask_function(size)


PADDINGS = {  # (batch, positions), of which there may be fewer than keys, or more
    "left": [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "inside": [[1, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1, 1]],
    "short": [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "none": [[1] * 9, [1] * 9],
}


@pytest.mark.parametrize("padding", [None, *PADDINGS])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 6, 8, 9, 20])
@pytest.mark.parametrize(
    "lengths", [(6, 6, 0, 0), (3, 9, 6, 0), (1, 9, 8, 0), (6, 16, 0, 0), (1, 16, 7, 0), (2, 5, 10, 7)], ids=str
)
def test_a_rule_and_padding_say_what_transformers_mask_says(lengths, window, padding):
    q_length, kv_length, q_offset, kv_offset = lengths
    function = masking_utils.causal_mask_function if window is None else window_of(window)
    here = None if padding is None else torch.tensor(PADDINGS[padding], dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    sizes |= {"kv_offset": kv_offset, "mask_function": function, "attention_mask": here}
    want = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    got = ours.attention_mask(**sizes)
    if got is None:
        rule = ours._mask(True, window, torch.empty(2, 1, q_length, 8), torch.empty(2, 1, kv_length, 8))
        got = ours.RuleMask(rule, want.shape, "cpu")
    if q_offset + q_length == kv_offset + kv_length:
        assert isinstance(got, ours.RuleMask), "no tensor of all pairs is made"
        assert got.keep is None or got.keep.shape == (2, 1, 1, kv_length)
    assert torch.equal(got & True, want)


@pytest.mark.parametrize("padding", [*PADDINGS, None])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9)], ids=str)
def test_an_encoder_and_what_looks_at_it_have_a_rule_too(lengths, window, padding):
    q_length, kv_length = lengths
    function = masking_utils.bidirectional_mask_function
    if window is not None:
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
    here = None if padding is None else torch.tensor(PADDINGS[padding], dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "mask_function": function}
    sizes |= {"attention_mask": here, "allow_is_causal_skip": False}
    want = masking_utils.sdpa_mask(**sizes, allow_is_bidirectional_skip=False)
    got = ours.attention_mask(**sizes, allow_is_bidirectional_skip=True)
    if got is None:
        assert want.all()
        return
    assert isinstance(got, ours.RuleMask) == (window is None or q_length == kv_length)
    assert torch.equal(got & True, want)


@pytest.mark.parametrize("both", [False, True])
def test_a_rule_of_another_kind_is_not_guessed_at(both):
    """A window that looks back beside a rule that looks both ways, and the other way round."""
    one, other = masking_utils.sliding_window_overlay(3), masking_utils.sliding_window_bidirectional_overlay(3)
    mixed = (one, masking_utils.bidirectional_mask_function) if both else (other, masking_utils.causal_mask_function)
    function = masking_utils.and_masks(*mixed)
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    got = ours.attention_mask(**sizes, allow_is_bidirectional_skip=True)
    assert type(got) is torch.Tensor
    assert torch.equal(got, masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False))


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)),
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k == 3),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 3),
    ],
    ids=["chunked", "or", "and"],
)
def test_a_pattern_we_do_not_know_is_transformers_own_tensor(function):
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    got = ours.attention_mask(**sizes)
    assert type(got) is torch.Tensor
    assert torch.equal(got, masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False))


def test_a_rule_mask_is_a_tensor_to_everybody_else():
    mask = ours.RuleMask(Window(2, 0), (2, 1, 5, 5), "cpu")
    dense = Window(2, 0).to_bool(range(5), range(5), 5, 5).expand(2, 1, 5, 5)
    assert (mask.shape, mask.dtype, mask.ndim, mask.device.type) == (dense.shape, torch.bool, 4, "cpu")
    assert torch.equal(mask[:, :, -1:, :3], dense[:, :, -1:, :3])
    assert torch.equal(torch.logical_not(mask), ~dense)
    assert "window:2,0" in repr(mask)
    with pytest.raises(UnsupportedProblem, match="in place"):
        mask.fill_(True)


@pytest.fixture
def in_place_of_eager():
    """Continuous batching of this Transformers takes its own names alone."""
    name = "paged|eager"
    before = transformers.AttentionInterface()[name]
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    mask = masks.get(name)
    yield ours.register(name)
    transformers.AttentionInterface.register(name, before)
    if mask is not None:
        transformers.AttentionMaskInterface.register(name, mask)
    else:
        del masks._global_mapping[name]


@pytest.mark.parametrize("name", MODELS)
def test_continuous_batching_reads_its_paged_cache(name, in_place_of_eager, monkeypatch):
    """Prompts of different lengths, prefilled and continued side by side, give the tokens that each gives alone."""
    eager, model = make(name)
    model.set_attn_implementation(in_place_of_eager)
    seen = []
    packed = ours.attention_packed
    monkeypatch.setattr(ours, "attention_packed", lambda *given, **named: seen.append(given) or packed(*given, **named))
    prompts = [tokens()[0, :length].tolist() for length in (7, 2, LENGTH)]
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    want = [eager.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist() for ids in prompts]
    config = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=32, max_batch_tokens=16)
    found = model.generate_batch(
        inputs=prompts, generation_config=options, continuous_batching_config=config, progress_bar=False
    )
    by_number = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
    assert [one.generated_tokens for one in by_number] == want
    assert seen
    assert all(q.shape[0] <= 16 for q, *_ in seen)


class Pages:
    """A paged cache of one layer, as Transformers 5.22 has them: pages of 4 places, and a table of them."""

    def __init__(self, table):
        self.k, self.v = (torch.randn(8, 4, 2, 8) for _ in range(2))
        self.table = table

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        kwargs |= {"block_table": self.table, "k_cache": self.k, "v_cache": self.v}
        return key_states, value_states


def test_a_block_table_is_read_in_place():
    """One new token each for two sequences, of which one has padding behind it: a sequence without a page."""
    torch.manual_seed(0)
    cache = Pages(torch.tensor([[5, 2, -1], [7, -1, -1], [-1, -1, -1]], dtype=torch.int32))
    before = cache.k.clone(), cache.v.clone()
    q, (k, v) = torch.randn(1, 4, 3, 8), (torch.randn(1, 2, 3, 8) for _ in range(2))
    module = torch.nn.Module()
    module.layer_idx = 0
    offsets = torch.tensor([0, 7, 10, 10], dtype=torch.int32)
    out, _ = ours.attention_forward(
        module, q, k, v, None, cache=cache, block_table=cache.table, cu_seq_lens_k={"full_attention": offsets}
    )
    assert out.shape == (1, 3, 4, 8)
    assert not out[0, 2].any(), "no keys"
    changed = [(before[i] != pages).any(-1).any(-1).nonzero().tolist() for i, pages in enumerate((cache.k, cache.v))]
    assert changed == [[[2, 2], [7, 2]]] * 2, "the seventh place of one, the third of the other"
    for n, (pages, length) in enumerate((([5, 2], 7), ([7], 3))):
        keys, values = (whole[pages].flatten(0, 1)[:length] for whole in (cache.k, cache.v))
        assert torch.equal(keys[-1], k[0, :, n])
        want = tilewise.attention(q[:, :, n : n + 1], keys[None].transpose(1, 2), values[None].transpose(1, 2))
        assert_close(out[:, n : n + 1].transpose(1, 2), want.double(), budget(torch.float32, 8))


class Indexed:
    """A paged cache as Transformers had them before 5.22: `update` takes indices, and returns (places, heads, dim)."""

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        assert (layer_idx, read_index, write_index) == (0, ["read"], ["write"])
        return tuple(tensor[0].transpose(0, 1) for tensor in (key_states, value_states))


def test_a_cache_of_an_older_transformers_has_indices():
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 4, 5, 8), (torch.randn(1, 2, 5, 8) for _ in range(2))
    module = torch.nn.Module()
    module.layer_idx, module.sliding_window = 0, 2
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    out, _ = ours.attention_forward(
        module, q, k, v, None, cache=Indexed(), read_index=["read"], write_index=["write"], cu_seq_lens_q=offsets,
        cu_seq_lens_k={"sliding_attention": offsets}, max_seqlen_q=3, max_seqlen_k={"sliding_attention": 3},
        block_table=None,
    )  # fmt: skip
    want = tilewise.attention(q, k, v, mask=Documents((0, 3, 5), (), Window(1, 0)))
    assert_close(out.transpose(1, 2), want.double(), budget(torch.float32, 8))


def test_paged_names_are_registered_beside_plain_ones():
    for name in ("tilewise", "paged|tilewise"):
        assert transformers.AttentionInterface()[name] is ours.attention_forward
        assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name] is ours.attention_mask


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"deterministic": True}, "deterministic"),
        ({"cache": object(), "position_bias": torch.zeros(1)}, "bias of positions"),
        ({"cache": object(), "dropout": 0.1}, "dropout"),
        ({"cache": object(), "indices": torch.zeros(1, 4, 2)}, "indices= from a paged cache|indices=, which"),
        ({"block_table": torch.zeros(1, 1)}, "block_table="),
        ({"block_indices": torch.zeros(1, 2, 4, 1)}, "no block_size"),
        ({"tree_mask": torch.zeros(4, 4)}, r"Module calls attention with tree_mask="),
        ({"only_first": False}, "only_first="),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
@pytest.mark.parametrize("long_way", [False, True])
def test_what_is_refused(kwargs, named, long_way, monkeypatch):
    monkeypatch.setattr(ours, "autocast_is_on", lambda: long_way)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedProblem, match=rf"(?s){named}.*What to do"):
        ours.attention_forward(torch.nn.Module(), q, q, q, None, **kwargs)


def test_export_to_onnx_is_refused(monkeypatch):
    """Which traces a model by torch.export."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    _, model = make("llama")
    with pytest.raises(UnsupportedProblem, match="ONNX"):
        torch.export.export(model, (tokens(),), strict=False)


def test_keywords_that_ask_for_nothing_change_nothing(calls):
    q = torch.randn(1, 2, 4, 8)
    want, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None)
    nothing = {"tree_mask": None, "indices": None, "output_attentions": False, "deterministic": False}
    got, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None, position_ids=torch.arange(4), **nothing)
    assert torch.equal(got, want)
    with switches.deterministic_algorithms():
        got, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None, deterministic=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("terms", [False, True])
def test_selections_of_keys_and_of_blocks_hide_all_others(terms, monkeypatch):
    """As sdpa has them in its mask: beside a rule, padding and documents."""
    torch.manual_seed(0)
    monkeypatch.setattr(ours, "_takes_terms", lambda query: terms)
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    chosen = torch.rand(2, 7, 7).argsort(-1)[..., :3]
    chosen[0, :, 0] = -1  # one fewer
    blocks = torch.tensor([[0, 2], [1, -1]]).view(1, 2, 1, 2).expand(2, 2, 7, 2)  # of two keys, by groups of heads
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 2
    pairs = torch.zeros(2, 1, 7, 7, dtype=torch.bool)
    for batch, row in itertools.product(range(2), range(7)):
        pairs[batch, 0, row, [key for key in chosen[batch, row].tolist() if key >= 0]] = True
    of_groups = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]], dtype=torch.bool)
    of_heads = of_groups.repeat_interleave(2, 0)[None, :, None, :]
    causal = Causal().to_bool(range(7), range(7), 7, 7)
    flags = (torch.arange(7) > torch.tensor([[1], [0]]))[:, None, None, :]
    padded = ours.RuleMask(Causal(), (2, 1, 7, 7), "cpu", flags)
    same = Documents((0, 4, 7)).to_bool(range(7), range(7), 7, 7)
    by_offsets = flash(0, 4, 7, 11, 14)
    for given, mask in (
        ({"indices": chosen, "attention_mask": None}, pairs & causal),
        ({"indices": chosen, "attention_mask": padded}, pairs & causal & flags),
        ({"block_indices": blocks, "attention_mask": None, "is_causal": False}, of_heads.expand(2, 4, 7, 7)),
        ({"indices": chosen, "block_indices": blocks, "attention_mask": None}, pairs & of_heads & causal),
        ({"indices": chosen, "attention_mask": None} | by_offsets, pairs & same & causal),
    ):
        out, _ = ours.attention_forward(module, q, k, v, **given)
        want = tilewise.attention(q, k, v, mask=mask).transpose(1, 2)
        assert_close(out, want.double(), 2 * budget(torch.float32, 7))


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sink_per_row_is_one_more_key_without_a_value(biased, terms, monkeypatch):
    """Gradients too, of a bias and of the sinks; with a sink per head beside it, and for rows without keys."""
    torch.manual_seed(0)
    monkeypatch.setattr(ours, "_takes_terms", lambda query: terms)
    q, k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(2, 4, 6, 1, dtype=torch.float64, requires_grad=True)
    of_heads = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    seen = Causal().to_bool(range(6), range(6), 6, 6) & (torch.arange(6) > 1)
    learned = (q, k, v, sinks, of_heads, bias)
    named = {"sinks": sinks, "s_aux": of_heads, "position_bias": bias if biased else None}
    got, _ = ours.attention_forward(torch.nn.Module(), q, k, v, seen[None, None], **named)
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    scores = q @ keys.mT / 8**0.5 + (bias if biased else 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = torch.cat((scores, sinks, of_heads[:, None, None].expand(2, 4, 6, 1)), -1)
    want = (scores.softmax(-1)[..., :-2] @ values).transpose(1, 2)
    assert_close(got, want, 4 * budget(torch.float64, 8))
    weights = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad((got * weights).sum(), learned[: 6 if biased else 5]),
        torch.autograd.grad((want * weights).sum(), learned[: 6 if biased else 5]),
        strict=True,
    ):
        assert_close(one, other, 16 * budget(torch.float64, 8))
    with pytest.raises(tilewise.InvalidInput, match="sinks"):
        ours.attention_forward(torch.nn.Module(), q, k, v, None, sinks=torch.randn(2, 4, 1, 6))


OF_THEIR_OWN = {
    "Bloom": {"hidden_size": 16, "n_head": 2, "n_layer": 1, "vocab_size": 40},
    "Deberta": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 40},
    "Falcon": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 40},
    "GPTJ": {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 40, "rotary_dim": 4},
}


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_models_with_attention_of_their_own_are_refused_when_they_are_made(family):
    def made(implementation):
        config = getattr(transformers, f"{family}Config")(**OF_THEIR_OWN[family], attn_implementation=implementation)
        return getattr(transformers, f"{family}Model")(config)

    with pytest.raises(UnsupportedProblem, match=rf"(?s){family}Model .*What to do: use attn_implementation='eager'"):
        made("tilewise")
    model = made("eager")
    model.set_attn_implementation("tilewise")  # which Transformers declines, in its log
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", sorted(OF_THEIR_OWN.keys() - {"Deberta"}))  # which asks for no masks
def test_models_with_attention_of_their_own_are_refused_where_the_name_is_written_into_their_configuration(family):
    config = getattr(transformers, f"{family}Config")(**OF_THEIR_OWN[family], attn_implementation="eager")
    model = getattr(transformers, f"{family}Model")(config)
    model.config._attn_implementation = "tilewise"
    with pytest.raises(UnsupportedProblem, match=rf"(?s){family}Model .*What to do: use attn_implementation='eager'"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_layer_that_looks_its_attention_up_is_refused_by_name():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.SamVisionConfig(**sizes, global_attn_indexes=[0], attn_implementation="tilewise")
    with pytest.raises(UnsupportedProblem, match="SamVisionAttention is attention of its own"):
        transformers.SamVisionModel(config)


def test_a_window_of_nothing_is_none(calls):
    """As Qwen2-MoE's configuration has it where its layers have no windows."""
    q = torch.randn(1, 2, 4, 8)
    for given in ({}, flash(0, 2, 4), {"position_bias": torch.zeros(1, 2, 4, 4)}):
        got, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=0, **given)
        want, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=None, **given)
        assert torch.equal(got, want)
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": window_of(0)}
    assert torch.equal(
        ours.attention_mask(**sizes) & True, masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    )
    config = transformers.Qwen2MoeConfig(
        **(SIZES | {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1})
    )
    assert config.sliding_window == 0
    config._attn_implementation = "tilewise"
    with torch.no_grad():
        assert transformers.Qwen2MoeForCausalLM(config).eval()(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("seq_q", [1, 3])
@pytest.mark.parametrize("terms", [False, True])
def test_what_comes_back_is_contiguous_in_transformers_order(seq_q, terms, monkeypatch):
    """With one query or several, whose tensors lie in memory as projections leave them."""
    torch.manual_seed(0)
    monkeypatch.setattr(ours, "_takes_terms", lambda query: terms)
    q, k, v = (torch.randn(2, seq, heads, 8).transpose(1, 2) for seq, heads in ((seq_q, 4), (9, 2), (9, 2)))
    mask = ours.RuleMask(Causal("bottom-right"), (2, 1, seq_q, 9), "cpu")
    out, _ = ours.attention_forward(torch.nn.Module(), q, k, v, mask)
    assert out.shape == (2, seq_q, 4, 8)
    assert out.is_contiguous()
    want = tilewise.attention(q, k, v, mask="causal:bottom-right").transpose(1, 2)
    assert_close(out, want.double(), budget(torch.float32, 9))


USUAL = {
    "causal": (5, 5, {}),
    "a new token": (1, 9, {}),
    "empty places": (3, 9, {}),
    "bidirectional": (5, 9, {"is_causal": False}),
    "window": (5, 5, {"sliding_window": 3}),
    "a new token's window": (1, 9, {"sliding_window": 3}),
    "a window that reaches all": (1, 9, {"sliding_window": 9}),
    "scale, softcap and no attentions": (5, 5, {"scaling": 0.3, "softcap": 2.0, "output_attentions": False}),
    "a rule": (3, 9, {"attention_mask": Causal("bottom-right")}),
    "a rule of its own": (3, 9, {"attention_mask": Window(1, 0, "bottom-right"), "sliding_window": 5}),
}


@pytest.mark.parametrize("usual", USUAL)
def test_the_short_way_of_usual_calls_asks_what_the_long_one_asks(usual, calls, monkeypatch):
    """The long way is taken where autocast is on; here it has nothing to cast. Masks are the same objects, by which
    native code finds a call without comparing them."""
    torch.manual_seed(0)
    seq_q, seq_kv, named = USUAL[usual]
    q, k, v = (torch.randn(2, seq, heads, 8).transpose(1, 2) for seq, heads in ((seq_q, 4), (seq_kv, 2), (seq_kv, 2)))
    rule = named.get("attention_mask")
    named = {"scaling": None, **named, "attention_mask": None}
    if rule is not None:
        named["attention_mask"] = ours.RuleMask(rule, (2, 1, seq_q, seq_kv), "cpu")
    long_ways = []
    refuse = ours._refuse
    monkeypatch.setattr(ours, "_refuse", lambda *given: long_ways.append(given) or refuse(*given))
    short, weights = ours.attention_forward(torch.nn.Module(), q, k, v, **named)
    assert not long_ways
    monkeypatch.setattr(ours, "autocast_is_on", lambda: True)
    long, _ = ours.attention_forward(torch.nn.Module(), q, k, v, **named)
    assert len(long_ways) == 1
    assert weights is None
    assert short.is_contiguous()
    assert torch.equal(short, long)
    (mask, _, _, one), (other_mask, _, _, other) = calls
    assert one == other
    assert mask is other_mask


def test_under_autocast_inputs_are_cast(calls):
    q = torch.randn(2, 4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ours.attention_forward(torch.nn.Module(), q, q, q, None)
    assert out.dtype == torch.bfloat16


def test_what_a_call_brings_beside_a_rule_is_not_lost():
    """Padding and lengths beside a rule, and a mask that is a tensor: the long way."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    there = (torch.arange(9) < torch.tensor([[9], [4]]))[:, None, None, :]
    want = tilewise.attention(q, k, v, mask=there).transpose(1, 2)
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    shape = (2, 1, 1, 9)
    for mask in (
        there,
        ours.RuleMask(tilewise.Full(), shape, "cpu", there),
        ours.RuleMask(tilewise.Full(), shape, "cpu", None, lengths),
    ):
        out, _ = ours.attention_forward(torch.nn.Module(), q, k, v, mask)
        assert_close(out, want.double(), budget(torch.float32, 9))


def test_a_window_that_is_none_is_refused_after_its_equal_was_made():
    assert ours._band(True, 5) is ours._band(True, 5)
    assert ours._band(True, 5) == Window(4, 0)
    with pytest.raises(tilewise.InvalidInput, match=r"Window\.left"):
        ours._band(True, 5.0)


def test_what_native_code_knows_comes_back_as_it_is(monkeypatch):
    """In Transformers' order, without a view; what it does not know is worked out, in that order too."""
    q, k, v = (torch.randn(2, seq, heads, 8).transpose(1, 2) for seq, heads in ((3, 4), (9, 2), (9, 2)))
    want = tilewise.attention(q, k, v, mask="causal", scale=0.3)
    seen, answers = [], [torch.zeros(2, 3, 4, 8), None, None]
    monkeypatch.setattr(native, "attend", lambda *given: seen.append(given) or answers.pop(0))
    module = torch.nn.Module()
    known = answers[0]
    out, _ = ours.attention_forward(module, q, k, v, None, scaling=0.3)
    assert out is known
    for order in (q, q.contiguous()):
        out, _ = ours.attention_forward(module, order, k, v, None, scaling=0.3)
        assert out.is_contiguous()
        assert_close(out.transpose(1, 2), want.double(), budget(torch.float32, 9))
    assert [given[1:4] for given in seen[:2]] == [(q, k, v)] * 2
    assert all(given[0] is OUT_BSHD for given in seen)


class Flags:
    """Of padding on a GPU, as far as whoever asks it can see."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, all_there):
        self.all_there = all_there


@pytest.fixture
def waited_for(monkeypatch):
    """The answers that the host has waited for, in order."""
    waited = []

    class Answer:
        def __init__(self, flags):
            self.flags = flags

        def wait(self):
            waited.append(self.flags)
            return self.flags.all_there

    monkeypatch.setattr(ours, "_Answer", Answer)
    monkeypatch.setattr(ours, "_answers", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return waited


def test_padding_is_waited_for_only_behind_one_that_hid_nothing(waited_for):
    """Each waits for the one before it, which is long there, and for itself only if that one hid nothing."""
    hides, whole = [Flags(False) for _ in range(4)], [Flags(True) for _ in range(2)]
    batches = [hides[0], hides[1], whole[0], whole[1], hides[2], hides[3]]
    found, waits = [], []
    for flags in batches:
        waited_for.clear()
        found.append(ours._all_there(flags, ("causal", True)))
        waits.append(flags in waited_for)
    assert found == [False, False, False, True, False, False], "the third hides nothing, and nobody waited to learn it"
    assert waits == [True, False, False, True, True, False]


def test_masks_of_other_kinds_are_asked_on_their_own(waited_for):
    hidden, there = Flags(False), Flags(True)
    assert not ours._all_there(hidden, ("causal", True))
    assert ours._all_there(there, ("causal", "window", True))
    assert ours._all_there(there, ("causal", False))
    assert waited_for == [hidden, there, there]


def test_deterministic_algorithms_wait_for_every_padding(waited_for):
    batches = [Flags(there) for there in (False, True)]
    with switches.deterministic_algorithms():
        assert [ours._all_there(flags, ("causal", True)) for flags in batches] == [False, True]
    assert waited_for == batches


def test_nothing_is_waited_for_under_capture(waited_for, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not ours._all_there(Flags(True), ("causal", True))
    assert not waited_for
