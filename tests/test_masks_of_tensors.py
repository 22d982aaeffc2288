"""Masks that are no bands, of numbers and of tensors on a device: documents, prefixes and lengths of keys."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import emulation
import tilewise
from support import assert_close, budget
from test_terms_call import on_a_model
from tilewise import Causal, Documents, Full, InvalidInput, KeyLengths, PrefixLM, Window, masks, problem
from tilewise.problem import Problem

Tensor = torch.Tensor
BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 90, 90, 64
STARTS = (0, 17, 17, 60, 90)
OTHERS = (0, 30, 41, 41, 90)


def shown_by_documents(starts_q: Any, starts_kv: Any, inner: Any) -> Tensor:
    shown = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_kv, starts_kv[1:], strict=False):
        shown[q0:q1, k0:k1] = inner.to_bool(range(q1 - q0), range(k1 - k0), q1 - q0, k1 - k0)
    return shown[None, None]


def shown_by_prefixes(prefixes: Any, offset: int = 0) -> Tensor:
    causal = torch.arange(KEYS) <= torch.arange(ROWS)[:, None] + offset
    return torch.stack([causal | (torch.arange(KEYS) < prefix) for prefix in prefixes])[:, None]


def shown_by_lengths(lengths: Any, left: bool, inner: Any) -> Tensor:
    keys = torch.arange(KEYS)
    seen = [keys >= KEYS - length if left else keys < length for length in lengths]
    return torch.stack(seen)[:, None, None] & inner.to_bool(range(ROWS), range(KEYS), ROWS, KEYS)


ints = torch.tensor
MASKS = {
    "documents": (lambda: Documents(STARTS), lambda: shown_by_documents(STARTS, STARTS, Full())),
    "causal documents": (
        lambda: Documents(STARTS, inner="causal"),
        lambda: shown_by_documents(STARTS, STARTS, Causal()),
    ),
    "documents in windows": (
        lambda: Documents(ints(STARTS), inner=Window(9, 3)),
        lambda: shown_by_documents(STARTS, STARTS, Window(9, 3)),
    ),
    "documents of other lengths": (
        lambda: Documents(ints(STARTS), ints(OTHERS), Causal("bottom-right")),
        lambda: shown_by_documents(STARTS, OTHERS, Causal("bottom-right")),
    ),
    "documents before padding": (
        lambda: Documents(ints(STARTS[:-1]), inner=Causal()),
        lambda: shown_by_documents(STARTS[:-1], STARTS[:-1], Causal()),
    ),
    "prefix": (lambda: PrefixLM(33), lambda: shown_by_prefixes([33])),
    "prefixes": (lambda: PrefixLM(ints([0, 200])), lambda: shown_by_prefixes([0, 200])),
    "padding": (lambda: KeyLengths(ints([70, 0])), lambda: shown_by_lengths([70, 0], False, Full())),
    "causal padding": (
        lambda: KeyLengths([90, 41], "left", "causal"),
        lambda: shown_by_lengths([90, 41], True, Causal()),
    ),
}


@pytest.fixture
def anywhere(monkeypatch: Any) -> None:
    """Tensors of offsets stay what they are, as those of a GPU do."""
    monkeypatch.setattr(masks, "_is_on_host", lambda tensor: False)


def results(mask: Any, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, ROWS), (HEADS_KV, KEYS), (HEADS_KV, KEYS), (HEADS, ROWS)]
    drawn = [torch.randn(BATCH, *shape, DIM, generator=generator).bfloat16().to(dtype) for shape in shapes]
    q, k, v = (tensor.requires_grad_() for tensor in drawn[:3])
    out, lse = tilewise.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    (out * drawn[3]).sum().backward()
    return {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def check(kind: str, dtype: torch.dtype, backend: str) -> None:
    mask, shown = MASKS[kind]
    want = results(shown(), torch.float64, "reference")
    for name, tensor in results(mask(), dtype, backend).items():
        assert_close(tensor, want[name], (1 if name in ("out", "lse") else 4) * budget(dtype, KEYS), name)


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_shows_what_it_says(anywhere: None, kind: str, backend: str) -> None:
    check(kind, torch.float32, backend)


@emulation.emulated
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("kind", MASKS)
def test_kernels_read_its_spans(anywhere: None, monkeypatch: Any, kind: str, backend: str) -> None:
    with on_a_model(monkeypatch, backend):
        check(kind, torch.bfloat16, backend)


@pytest.mark.parametrize("kind", MASKS)
def test_masks_compile(anywhere: None, kind: str) -> None:
    q = torch.randn(BATCH, HEADS, ROWS, DIM)
    make = MASKS[kind][0]
    held = make()
    torch._dynamo.reset()  # one function for all masks would be too many graphs
    compiled = torch.compile(lambda q: tilewise.attention(q, q, q, mask=held), fullgraph=True, backend="aot_eager")
    assert_close(compiled(q), tilewise.attention(q, q, q, mask=held), budget(torch.float32, KEYS))


def test_a_mask_of_tensors_is_made_inside_a_graph(anywhere: None) -> None:
    q = torch.randn(BATCH, HEADS, ROWS, DIM)

    def call(q: Tensor, starts: Tensor, prefix: Tensor) -> Tensor:
        packed = tilewise.attention(q, q, q, mask=Documents(starts, inner=Causal()))
        return packed + tilewise.attention(q, q, q, mask=PrefixLM(prefix))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for starts in (STARTS, OTHERS):
        given = (q, ints(starts), ints([3, starts[1]]))
        assert_close(compiled(*given), call(*given), budget(torch.float32, KEYS))


def test_spans_follow_a_tensor_that_changes(anywhere: None) -> None:
    q = torch.randn(1, HEADS, ROWS, DIM)
    starts = ints(STARTS)
    mask = Documents(starts)
    before = tilewise.attention(q, q, q, mask=mask)
    starts.copy_(ints((0, 50, 60, 60, 90)))
    after = tilewise.attention(q, q, q, mask=mask)
    want = tilewise.attention(q, q, q, mask=shown_by_documents((0, 50, 60, 60, 90), (0, 50, 60, 60, 90), Full()))
    assert_close(after, want, budget(torch.float32, KEYS))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("shared", ["numpy", "data", "data in place"])
def test_a_mask_reads_memory_that_others_write_to(shared: str) -> None:
    q = torch.randn(1, HEADS, ROWS, DIM)
    memory = numpy.array([5])
    prefix = torch.from_numpy(memory)
    mask = PrefixLM(prefix)
    tilewise.attention(q, q, q, mask=mask)
    if shared == "numpy":
        memory[0] = 60
    elif shared == "data":
        prefix.data[0] = 60
    else:
        prefix.data.copy_(ints([60]))
    assert prefix._version == 0
    want = tilewise.attention(q, q, q, mask=PrefixLM(60))
    for one in (mask, PrefixLM(prefix), PrefixLM(prefix.data), PrefixLM(torch.from_numpy(memory))):
        assert_close(tilewise.attention(q, q, q, mask=one), want, budget(torch.float32, KEYS))


def test_on_a_gpu_a_mask_keeps_what_is_made_of_it(monkeypatch: Any) -> None:
    """With a stand-in for q, which is asked where it is and no more."""
    stream, gpu = [0], SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)

    def made(mask: PrefixLM) -> dict[str, Tensor]:
        return problem._kept(mask, gpu, (4, 8), lambda: {"prefix": mask.prefix.clone()})  # type: ignore[arg-type, union-attr]

    prefix = ints([3])
    mask = PrefixLM(prefix)
    first = made(mask)
    assert made(mask) is first
    prefix.data[0] = 4
    assert made(mask) is first, "a change that is not counted"
    assert made(PrefixLM(prefix))["prefix"].item() == 4
    prefix.add_(1)
    assert made(mask)["prefix"].item() == 5
    for changed in (stream, capturing):
        before, changed[0] = made(mask), 1
        assert made(mask) is not before
    capturing[0] = False
    copied = copy.copy(mask)
    assert made(copied) is not made(mask)
    assert pickle.loads(pickle.dumps(mask)).prefix.item() == 5

    monkeypatch.setenv("TILEWISE_CHECK", "1")
    checked = PrefixLM(prefix)
    assert made(checked) is made(checked)
    prefix.data[0] = 7
    with pytest.raises(InvalidInput, match=r"PrefixLM.*`\.data`"):
        made(checked)
    assert made(PrefixLM(prefix))["prefix"].item() == 7


@pytest.mark.parametrize(("target", "name"), [("h200", "sm90"), ("a100", "sm80")])
def test_auto_and_explain_name_our_kernels(target: str, name: str) -> None:
    q = torch.zeros(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    documents = [Documents(range(0, 1025, length), inner=Window(20, 0)) for length in (32, 64)]
    for mask, how in ((PrefixLM(100), "spans"), (documents[0], "spans"), (documents[1], "packed")):
        chosen = tilewise.explain(q, q, q, mask=mask, target=target)
        assert chosen.backend == name
        assert how in chosen.forward.launches[0].unit.name
    cpu = q.new_zeros(2, 8, 64, 64, device="cpu")
    chosen = tilewise.explain(cpu, cpu, cpu, mask=KeyLengths([3, 64], inner="causal"), target=target)
    assert (chosen.backend, str(chosen.problem.mask)) == (name, "causal")
    assert [str(term) for term in chosen.problem.scores] == ["key_lengths:0"]


def test_numbers_of_numpy_are_those_of_python() -> None:
    for starts in (numpy.array(STARTS), [numpy.int32(start) for start in STARTS]):
        assert Documents(starts) == Documents(STARTS)
        assert all(type(start) is int for start in Documents(starts).cu_seqlens_q)
    assert str(Window(numpy.int64(3), numpy.uint8(2))) == "window:3,2"
    assert str(PrefixLM(numpy.int16(3))) == "prefix_lm:3"


@pytest.mark.parametrize("hidden", [False, True])
def test_one_boolean_for_all_pairs(hidden: bool) -> None:
    q = torch.randn(BATCH, HEADS, ROWS, DIM)
    want = tilewise.attention(q, q, q) * (not hidden)
    for more in ({}, {"mask": torch.ones(ROWS, KEYS, dtype=torch.bool)}):
        got = tilewise.attention(q, q, q, keep=torch.tensor(not hidden), **more)  # type: ignore[arg-type]
        assert_close(got, want, budget(torch.float32, KEYS))


def test_text_and_values() -> None:
    for mask in (PrefixLM(7), PrefixLM(0, "bottom-right")):
        assert masks.parse(str(mask)) == mask
    assert Documents(STARTS, inner="causal") == Documents(torch.tensor(STARTS), inner=Causal())
    offset = PrefixLM(2, "bottom-right").to_bool(range(3), range(5), 3, 5)
    assert offset.sum(-1).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KeyLengths(torch.zeros(2)), "int32"),
        (lambda: KeyLengths(torch.zeros(2, 2, dtype=torch.int32)), "batch"),
        (lambda: KeyLengths(["a"]), "integers"),
        (lambda: KeyLengths(3), "integers"),
        (lambda: KeyLengths([1.9]), "float32"),
        (lambda: KeyLengths([2j]), "complex64"),
        (lambda: KeyLengths([1], "top"), "side"),
        (lambda: KeyLengths([1], inner=Documents(STARTS)), "inner"),
        (lambda: PrefixLM(-1), "prefix"),
        (lambda: PrefixLM(torch.zeros(2)), "int32"),
        (lambda: Documents(STARTS, inner=PrefixLM(3)), "inner"),
        (lambda: Documents(3), "cu_seqlens_q"),  # type: ignore[arg-type]
        (lambda: Documents(numpy.array([0.0, 4.0])), "cu_seqlens_q"),
        (lambda: Documents(STARTS, ints(4)), "cu_seqlens_kv"),
        (lambda: Window(numpy.float32(3)), "left"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masks_say_what_they_take(make: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_beyond_32_bits_keep_their_side(side: Any) -> None:
    q = torch.randn(4, HEADS, ROWS, DIM)
    lengths = [2**31, 2**32 + 2, -(2**31) - 1, 2 - 2**32]
    for given in (lengths, ints(lengths)):
        out = tilewise.attention(q, q, q, mask=KeyLengths(given, side))
        assert_close(out, tilewise.attention(q, q, q, mask=KeyLengths([ROWS, ROWS, 0, 0], side)), 0.0)


@pytest.mark.parametrize("name", ["alibi", "sink"])
def test_complex_operands_are_refused(name: str) -> None:
    q = torch.zeros(BATCH, HEADS, ROWS, DIM)
    with pytest.raises(InvalidInput, match=f"{name}.*complex64"):
        tilewise.attention(q, q, q, **{name: torch.ones(HEADS, dtype=torch.complex64)})


def test_what_fits_no_call_is_refused(anywhere: None) -> None:
    q = torch.zeros(BATCH, HEADS, ROWS, DIM)
    with pytest.raises(InvalidInput, match=r"KeyLengths.lengths: got 3 numbers, expected 2"):
        tilewise.attention(q, q, q, mask=KeyLengths([1, 2, 3]))
    with pytest.raises(InvalidInput, match=r"PrefixLM.prefix: got 3 numbers, expected 2"):
        tilewise.attention(q, q, q, mask=PrefixLM(ints([1, 2, 3])))
    shown = torch.ones(ROWS, KEYS, dtype=torch.bool)
    with pytest.raises(InvalidInput, match="float32, expected a boolean tensor"):
        tilewise.attention(q, q, q, mask=shown, keep=shown.float())
    with pytest.raises(InvalidInput, match="tensor"):
        Problem(1, 1, 1, 90, 90, 64, 64, torch.float32, mask=Documents(ints(STARTS)))
    with pytest.raises(InvalidInput, match="tensor"):
        Documents(ints([[0, 90]]))
    with pytest.raises(InvalidInput, match="both"):
        Documents(ints(STARTS), STARTS)
