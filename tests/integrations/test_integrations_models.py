"""Every model of benchmarks/models.py, tiny and padded on either side, equals eager at the tokens that count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch

import tilewise
from support import assert_close, budget
from tilewise import Full, api
from tilewise.integrations import transformers as ours
from tilewise.lab.measure import statistics

NEEDED = "needs transformers >= 5.15: pip install 'tilewise[transformers]'"
transformers = pytest.importorskip("transformers", reason=NEEDED, exc_type=ImportError)
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours.register()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """What reaches `attention`: the shapes of the tensors beside q, k and v, and the rest."""
    seen = []

    def spied(attend):
        def spy(q, k, v, **options):
            seen.append(SimpleNamespace(q=q, k=k, **({"keep": None, "sink": None, "operands": {}} | options)))
            return attend(q, k, v, **options)

        return spy

    for attend in (api.attention, api.attention_out_bshd):
        monkeypatch.setattr(ours, attend.__name__, spied(attend))
    return seen


def built(name):
    return models.build(name, tiny=True, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("by_terms", [True, False], ids=["terms", "tensor"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", models.MODELS)
def test_outputs_and_gradients_equal_eager(name, side, by_terms, calls, monkeypatch):
    """As a GPU runs them, and as a CPU does; all parameters, sinks and learned biases among them."""
    monkeypatch.setattr(ours, "_takes_terms", lambda query: by_terms)
    model = built(name)
    given = models.batch(name, model, tiny=True, device="cpu", side=side)
    found = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        found[implementation] = models.gradients(model, given)
    (want, want_grads), (got, got_grads) = found["eager"], found["tilewise"]
    assert calls
    allowed = 16 * budget(torch.float32, 64)  # two layers, and everything behind the attention
    assert_close(got, want, allowed)
    assert len(got_grads) == len(want_grads)
    whole = torch.cat([grad.flatten() for grad in want_grads]).norm()
    for one, other in zip(got_grads, want_grads, strict=True):
        assert (one - other).norm() <= allowed * whole
    assert models.error(got_grads, want_grads) <= allowed


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", models.MODELS)
def test_padding_is_one_flag_per_key_and_what_is_learned_stays_as_it_is(name, side, calls, monkeypatch):
    """No mask of all pairs is made for a padded batch: rules stay rules, and a bias keeps its broadcast batch."""
    monkeypatch.setattr(ours, "_takes_terms", lambda query: True)
    model = built(name)
    model.set_attn_implementation("tilewise")
    given = models.batch(name, model, tiny=True, device="cpu", side=side)
    with torch.no_grad():
        models.outputs(model, given)
    for call in calls:
        sequences, seq_kv = call.k.shape[0], call.k.shape[2]
        assert isinstance(call.mask, tilewise.Mask)
        if call.keep is not None:
            assert call.keep.shape == (sequences, 1, 1, seq_kv)
        for tensor in call.operands.values():
            assert tensor.shape[0] == 1, "T5's bias is that of all sequences"
    padded = [call for call in calls if call.keep is not None]
    assert bool(padded) == (name != "vit")
    if name in ("bert", "vit"):
        assert {call.mask for call in calls} == {Full()}
    if name in ("gemma2", "gemma3", "gpt_oss"):
        assert {str(call.mask) for call in calls} == {"window:4,0", "causal"}
    assert all((call.sink is not None) == (name == "gpt_oss") for call in calls)
    assert all(bool(call.operands) == (name == "t5") for call in calls)
    assert {call.softcap for call in calls} == ({2.0} if name == "gemma2" else {0.0})


def test_the_mask_is_one_tensor_for_all_layers_of_a_kind(calls, monkeypatch):
    """So that what is made of it, its tile map, is made once."""
    monkeypatch.setattr(ours, "_takes_terms", lambda query: True)
    model = built("bert")
    model.set_attn_implementation("tilewise")
    with torch.no_grad():
        models.outputs(model, models.batch("bert", model, tiny=True, device="cpu"))
    assert len(calls) == 2
    assert calls[0].keep is calls[1].keep


@pytest.mark.parametrize("by_terms", [True, False], ids=["terms", "tensor"])
@pytest.mark.parametrize("name", ["bert", "t5", "gpt_oss"])
def test_compiled_in_one_graph_a_padded_batch_is_still_right(name, by_terms, monkeypatch):
    monkeypatch.setattr(ours, "_takes_terms", lambda query: by_terms)
    model = built(name)
    given = models.batch(name, model, tiny=True, device="cpu")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = models.outputs(model, given)
        model.set_attn_implementation("tilewise")
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=name != "gpt_oss")
        assert_close(models.outputs(compiled, given), want, 16 * budget(torch.float32, 64))


def test_under_a_trace_padding_of_an_encoder_has_no_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(ours, "_traced_types", lambda: (torch.Tensor,))
    keep = torch.ones(2, 9, dtype=torch.bool)
    function = ours._masking.bidirectional_mask_function
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 9, "mask_function": function}
    mask = ours.attention_mask(**sizes, attention_mask=keep, allow_is_bidirectional_skip=True)
    assert mask.shape == (2, 1, 5, 9)
    assert mask.stride(2) == 0
    assert mask.data_ptr() == keep.data_ptr()


def test_a_cpu_is_given_one_tensor():
    """PyTorch's kernels take one mask."""
    assert not ours._takes_terms(torch.empty(1))
    assert ours._takes_terms(SimpleNamespace(is_cuda=True))
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    mask = ours.RuleMask(tilewise.Causal(), (2, 1, 9, 9), "cpu", keep[:, None, None, :])
    out, _ = ours.attention_forward(torch.nn.Module(), q, k, v, mask, dropout=0.5)
    assert out.shape == (2, 9, 4, 8)
    assert out.isfinite().all()


def test_a_row_is_against_the_fastest_that_is_right():
    times = {"tilewise": [1.0] * 7, "eager": [4.0] * 7, "sdpa": [2.0] * 7}
    told = {"errors": {}, "wrong": {"flex_attention": "out error 1"}}
    row = models.row_of("llama", "forward", told, times, statistics)
    assert (row["fastest"], row["ratio"]) == ("sdpa", pytest.approx(2.0))
    alone = models.row_of("llama", "forward", told, {"tilewise": [1.0]}, statistics)
    assert alone["ratio"] is None


def test_an_implementation_that_computes_something_else_is_seen(monkeypatch):
    """Verification holds everyone against eager in float32, at the tokens that are no padding."""
    runner = models.Runner("llama", tiny=True, device="cpu", peers=("eager",))
    runner.verify()
    assert runner.wrong == {}
    assert set(runner.errors) == {"eager", "tilewise"}
    monkeypatch.setattr(ours, "_asked", lambda *_: ours._Asked(Full()))
    runner.verify()
    assert set(runner.wrong) == {"tilewise"}
    runner.wrong.clear()
    found = runner.rounds(2, 1e-3)
    assert {what: set(by) for what, by in found.items()} == {what: {"eager", "tilewise"} for what in models.KINDS}
    assert all(len(times) == 2 for by in found.values() for times in by.values())
