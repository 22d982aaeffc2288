"""Packed sequences on a GPU: lengths drawn anew in every case, neighbours that are NaN, graphs and compiled graphs.

Run as a program it launches a few sets of lengths and no reference, for the memory and race checkers:

    PYTHONPATH=src:tests compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_packed_gpu.py
"""

from __future__ import annotations

import os
import random
import time
import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tilewise
from support import assert_close, budget, rounding_budget
from test_packed import Case, check_backward, check_forward, drawn, gradient_noise, made, make_case
from tilewise import Causal, Documents, Full, InvalidInput, Target, Window
from tilewise.engine import SM80, SM90
from tilewise.jit import build_all
from tilewise.triton import backend as triton

if TYPE_CHECKING:
    from tilewise.engine.backend import Fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BF16, FP16 = torch.bfloat16, torch.float16
MASKS = (Full(), Causal(), Causal("bottom-right"), Window(100, 0, "bottom-right"))
SHAPES: tuple[dict[str, Any], ...] = (
    {"dims": (64, 64), "heads": (4, 4)},
    {"dims": (128, 128), "heads": (4, 2)},
    {"dims": (96, 96), "heads": (3, 1)},
    {"dims": (192, 128), "heads": (2, 2)},
    {"dims": (256, 256), "heads": (2, 1)},
    {"dims": (40, 24), "heads": (4, 2)},
)
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = [
    pytest.param(SM80, id="sm80"),
    pytest.param(SM90, id="sm90", marks=pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")),
]
SETS = 24  # of lengths, for each mask, backend and kind of call: hundreds in all
# Lengths are drawn anew in every run; a failure shows the seed, and that draws them again.
SEED = int(os.environ.get("TILEWISE_TEST_SEED") or time.time_ns() % 10**9)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if not torch.cuda.is_available():
        return
    target, units = Target.of("cuda"), {}
    for backend, mask, shape, dtype in product((SM80, SM90) if hopper else (SM80,), MASKS, SHAPES, (BF16, FP16)):
        problem = make_case(mask, dtype, needs_grad=True, **shape).problem
        forward = backend.program(problem, target, backend.configs(problem, target)[0])
        backward = backend.backward_program(problem, target, backend.backward_configs(problem, target)[0])
        units |= {unit.label: unit for unit in (*forward.units, *backward.units)}
    for _ in build_all(units.values()):
        pass


def case_of(number: int, mask: Any, kind: str = "", **fields: Any) -> tuple[Case, tuple[int, ...]]:
    """A case on the GPU, with one sequence that is NaN; `kind` tells draws of one number apart."""
    draw = random.Random(f"{SEED} {kind} {mask} {sorted(fields.items())} {number}")
    lengths = drawn(draw, 12, 500)
    print(f"TILEWISE_TEST_SEED={SEED}, {number}: {lengths}")
    poisoned = (draw.randrange(len(lengths)),)
    dtype = BF16 if number % 3 else FP16
    behind = (draw.randint(0, 9), draw.randint(0, 9))
    case = make_case(mask, dtype, lengths, poisoned=poisoned, behind=behind, **SHAPES[number % len(SHAPES)], **fields)
    on_gpu = [tensor.cuda() for tensor in case[1:4]]
    return Case(case.problem, *on_gpu, {name: x.cuda() for name, x in case.operands.items()}), poisoned


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lengths_drawn_anew(backend: Fused, mask: Any) -> None:
    for number in range(SETS):
        case, poisoned = case_of(number, mask, backend.name)
        out, lse = backend.forward(case.q, case.k, case.v, case.problem, None, case.operands)
        assert lse is not None
        check_forward(case, out, lse, poisoned, any_lengths=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_gradients_of_lengths_drawn_anew(backend: Fused, mask: Any, deterministic: bool) -> None:
    for number in range(SETS):
        case, poisoned = case_of(number, mask, backend.name, needs_grad=True, deterministic=deterministic)
        problem = case.problem
        dout = torch.randn(problem.seq_q, problem.heads_q, problem.head_dim_v, device="cuda").to(problem.dtype)
        dout = dout.transpose(0, 1)[None]
        out, lse, truth = made(case, dout)
        noise = {sequence: gradient_noise(case, dout, sequence) for sequence in truth}
        for sequence in poisoned:
            case.of(dout, sequence, 0).fill_(torch.nan)
        given = (dout, None, case.q, case.k, case.v, out, lse, problem, None, case.operands)
        grads = backend.backward(*given)
        check_backward(case, grads, truth, rounding_budget(problem.dtype, 6), poisoned, noise)
        if deterministic:
            again = backend.backward(*given)
            for name, grad in grads.items():
                assert torch.equal(grad.nan_to_num(), again[name].nan_to_num())


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks), "triton"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.filterwarnings("ignore:::triton")
def test_nan_around_the_tensors_reaches_nothing(backend: str, mask: Any) -> None:
    """Tensors that are the middle of larger ones, whose rows before and behind are NaN."""
    cu = torch.tensor([0, 70, 70, 71, 300, 333], device="cuda", dtype=torch.int32)
    around, total = 200, 333
    results = []
    clean = [torch.randn(total, heads, 64, device="cuda").to(BF16) for heads in (4, 2, 2)]
    dout = torch.randn_like(clean[0])
    for guarded in (False, True):
        tensors = []
        for tensor in clean:
            larger = torch.full((total + 2 * around, *tensor.shape[1:]), torch.nan, device="cuda", dtype=BF16)
            middle = larger[around : around + total].copy_(tensor)
            tensors.append((middle if guarded else tensor.clone()).requires_grad_())
        out = tilewise.attention_packed(*tensors, cu, cu, 229, 229, mask=mask, backend=backend)
        results.append((out, *torch.autograd.grad(out, tensors, dout)))
    for got, want in zip(*reversed(results), strict=True):
        assert got.isfinite().all()
        assert_close(got, want.double(), rounding_budget(BF16, 4))


@pytest.mark.skipif(torch.cuda.is_available() and not Target.of("cuda").has_triton, reason="triton is not installed")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.filterwarnings("ignore:::triton")
def test_triton_on_lengths_drawn_anew(mask: Any) -> None:
    """Few heads: each kind of them is a kernel to compile."""
    for number in range(0, SETS, 2 * len(SHAPES)):
        case, poisoned = case_of(number, mask, "triton", needs_grad=True)
        problem = case.problem
        out, lse = triton.forward(case.q, case.k, case.v, problem, None, case.operands)
        check_forward(case, out, lse, poisoned, any_lengths=True)
        dout = torch.randn(problem.seq_q, problem.heads_q, problem.head_dim_v, device="cuda").to(problem.dtype)
        dout = dout.transpose(0, 1)[None]
        out, lse, truth = made(case, dout)
        noise = {sequence: gradient_noise(case, dout, sequence) for sequence in truth}
        for sequence in poisoned:
            case.of(dout, sequence, 0).fill_(torch.nan)
        grads = triton.backward(dout, None, case.q, case.k, case.v, out, lse, problem, None, case.operands)
        check_backward(case, grads, truth, rounding_budget(problem.dtype, 6), poisoned, noise)


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks)])
def test_long_sequences_beside_short_ones_are_as_in_a_batch(backend: str) -> None:
    lengths = torch.tensor([0, 70000, 1, 300, 3000], device="cuda")
    cu = lengths.cumsum(0).int()
    total = int(cu[-1])
    q, k, v = (torch.randn(total, 1, 128, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    out = tilewise.attention_packed(q, k, v, cu, cu, 70000, 70000, mask="causal", backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        own = [x[None, begin:end].detach().requires_grad_() for x in (q, k, v)]
        alone = tilewise.attention(*own, mask="causal", layout="bshd", backend=backend)
        wanted = torch.autograd.grad(alone, own, dout[None, begin:end])
        for got, want in zip((out, *grads), (alone, *wanted), strict=True):
            error = (got[begin:end].float() - want[0].float()).norm() / want.float().norm()
            assert error <= rounding_budget(BF16, 4)


def test_a_graph_runs_with_other_lengths() -> None:
    q, k, v = (torch.randn(2048, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    cu = torch.tensor([0, 512, 1024, 1536, 2048], device="cuda", dtype=torch.int32)
    tilewise.attention_packed(q, k, v, cu, cu, 2048, 2048, mask="causal")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention_packed(q, k, v, cu, cu, 2048, 2048, mask="causal")
    for offsets in ((0, 100, 1000, 1048, 2048), (0, 0, 2047, 2048, 2048), (0, 5, 6, 7, 8)):
        cu.copy_(torch.tensor(offsets))
        graph.replay()
        want = tilewise.attention_packed(q, k, v, cu.clone(), cu.clone(), mask="causal")
        assert torch.equal(out, want)


def test_no_call_waits_for_the_device() -> None:
    q, k, v = (torch.randn(640, 4, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 640], device="cuda", dtype=torch.int32)
    other = torch.tensor([0, 300, 640], device="cuda", dtype=torch.int32)

    def step(keys: torch.Tensor, dtype: torch.dtype) -> None:
        tensors = [x.to(dtype) for x in (q, k, v)]
        out = tilewise.attention_packed(*tensors, cu, keys, 640, 640, mask="causal")
        out.sum().backward()

    for dtype in (BF16, torch.float32):
        step(cu, dtype)
        step(other, dtype)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it does not see all that waits
            torch.cuda.set_sync_debug_mode("error")
        for dtype in (BF16, torch.float32):
            step(cu.clone(), dtype)
            step(other.clone(), dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_offsets_are_told_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(640, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    bad = torch.tensor([0, 700, 20, -5, 640], device="cuda", dtype=torch.int32)
    tilewise.attention_packed(q, k, v, bad, bad, mask="causal")  # within the tensors, whatever it gives
    torch.cuda.synchronize()
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(InvalidInput, match="never fall"):
        tilewise.attention_packed(q, k, v, bad, bad, mask="causal")


def test_float32_and_learned_operands_go_by_spans() -> None:
    case = make_case(Causal("bottom-right"), torch.float32, behind=(0, 0))
    inputs = [tensor[0].transpose(0, 1).cuda() for tensor in case[1:4]]
    offsets = [x.cuda() for x in case.offsets]
    out = tilewise.attention_packed(*inputs, *offsets, mask=Causal("bottom-right"))
    want = tilewise.attention_packed(*(x.double() for x in inputs), *offsets, mask=Causal("bottom-right"))
    assert_close(out, want, budget(torch.float32, 64))


# ---------------------------------------------------------------------------------------------------------------------
# Documents

STARTS, OTHERS = (0, 300, 300, 301, 429, 700, 1000), (0, 200, 230, 260, 300, 700, 900)
DOCUMENTS: dict[str, Any] = {
    "causal": {"mask": Documents(STARTS, inner=Causal())},
    "full": {"mask": Documents(STARTS)},
    "cross": {"mask": Documents(STARTS, OTHERS, Causal("bottom-right"))},
    "window": {"mask": Documents(STARTS, inner=Window(100, 20))},
    "softcap": {"mask": Documents(STARTS, inner=Causal()), "softcap": 5.0},
    "alibi": {"mask": Documents(STARTS, inner=Causal()), "alibi": True},
    "sink": {"mask": Documents(STARTS, inner=Causal()), "sink": True},
}


def documents_inputs(mask: Documents, layout: str, dim: int) -> list[torch.Tensor]:
    """Three batches, two query heads for each of keys."""
    ends = mask.cu_seqlens_q[-1], mask.cu_seqlens_kv[-1]
    sizes = ((4, ends[0]), (2, ends[1]), (2, ends[1]))
    shapes = [(3, heads, seq, dim) if layout == "bhsd" else (3, seq, heads, dim) for heads, seq in sizes]
    return [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks)])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("on_device", [False, True], ids=["", "on device"])
def test_documents_run_as_packed_sequences(backend: str, name: str, on_device: bool) -> None:
    options = dict(DOCUMENTS[name])
    mask = options.pop("mask")
    if options.get("alibi"):
        options["alibi"] = torch.rand(4, device="cuda")
    if options.get("sink"):
        options["sink"] = torch.randn(4, device="cuda")
    given = mask
    if on_device:
        starts = [torch.tensor(x, device="cuda") for x in (mask.cu_seqlens_q, mask.cu_seqlens_kv)]
        same = mask.cu_seqlens_q == mask.cu_seqlens_kv
        given = Documents(starts[0], starts[0] if same else starts[1], mask.inner)
    for layout, dim, deterministic in (("bhsd", 128, False), ("bshd", 64, False), ("bhsd", 64, True)):
        q, k, v = documents_inputs(mask, layout, dim)
        torch.use_deterministic_algorithms(deterministic)
        try:
            found = tilewise.explain(q, k, v, mask=given, layout=layout, backend=backend, **options)
            assert found.forward is not None
            assert all("_packed" in launch.unit.name for launch in found.forward.launches)
            out, lse = tilewise.attention(
                q, k, v, mask=given, layout=layout, backend=backend, return_lse=True, **options
            )
            weights = torch.randn_like(out), torch.randn_like(lse)
            grads = torch.autograd.grad((out, lse.nan_to_num(neginf=0.0)), (q, k, v), weights)
        finally:
            torch.use_deterministic_algorithms(False)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want, want_lse = tilewise.attention(
            *wide, mask=mask, layout=layout, backend="reference", return_lse=True, **options
        )
        assert torch.equal(lse.isinf(), want_lse.isinf())
        assert_close(out, want, rounding_budget(BF16, 3))
        pairs = [tensor.double() for tensor in weights]
        truth = torch.autograd.grad((want, want_lse.nan_to_num(neginf=0.0)), wide, pairs)
        for got, exactly in zip(grads, truth, strict=True):
            assert_close(got, exactly, rounding_budget(BF16, 6))


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks)])
def test_nan_of_another_document_reaches_nothing(backend: str) -> None:
    mask = Documents(STARTS, inner=Causal())
    q, k, v = (x.detach() for x in documents_inputs(mask, "bhsd", 128))
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    for tensor in (q, k, v):
        tensor[1, :, 301:429] = torch.nan
    spoiled = [x.requires_grad_() for x in (q, k, v)]
    kept = torch.ones(3, 1000, dtype=torch.bool, device="cuda")
    kept[1, 301:429] = False
    results = []
    for tensors in (clean, spoiled):
        out = tilewise.attention(*tensors, mask=mask, backend=backend)
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
        results.append([x[kept[:, None].expand(x.shape[:3])] for x in (out, *grads)])
    for one, other in zip(*results, strict=True):
        assert not other.isnan().any()
        assert_close(other, one, rounding_budget(BF16, 3))


def test_documents_on_a_device_in_a_graph_and_compiled() -> None:
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda", dtype=BF16) for _ in range(3))
    starts = torch.tensor([0, 300, 700, 1024], device="cuda", dtype=torch.int32)
    attend = lambda: tilewise.attention(q, k, v, mask=Documents(starts, inner=Causal()))
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    starts.copy_(torch.tensor([0, 1, 512, 1000]))  # rows behind the last offset see nothing
    graph.replay()
    assert torch.equal(out, tilewise.attention(q, k, v, mask=Documents(starts.clone(), inner=Causal())))
    assert (out[:, :, 1000:] == 0).all()
    documents = lambda q, k, v, starts: tilewise.attention(q, k, v, mask=Documents(starts, inner=Causal()))
    compiled = torch.compile(documents, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, starts), out)


# ---------------------------------------------------------------------------------------------------------------------
# Other callers


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_nested_tensors_under_the_override(is_causal: bool) -> None:
    offsets = torch.tensor([0, 70, 71, 300, 812], device="cuda")
    values = [torch.randn(812, 4, 64, device="cuda", dtype=BF16) for _ in range(3)]
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).requires_grad_() for x in values]
    with tilewise.sdpa(on_fallback="error"):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in nested), is_causal=is_causal
        )
    assert "taken" in {entry.outcome for entry in tilewise.sdpa.report() if "packed" in entry.problem}
    rows = out.transpose(1, 2).values()
    weight = torch.randn_like(rows)
    grads = torch.autograd.grad((rows * weight).sum(), nested)
    wide = [x.double().requires_grad_() for x in values]
    mask = "causal" if is_causal else None
    want = tilewise.attention_packed(*wide, offsets.int(), offsets.int(), mask=mask, backend="reference")
    truth = torch.autograd.grad((want * weight.double()).sum(), wide)
    assert_close(rows, want, rounding_budget(BF16, 3))
    for got, exactly in zip(grads, truth, strict=True):
        assert_close(got.values(), exactly, rounding_budget(BF16, 6))


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks)])
def test_padding_before_the_keys_and_totals_behind_them(backend: str) -> None:
    """As flash-attn's leftpad_k; rows and keys behind the last offset are padding too."""
    cu_q = torch.tensor([0, 100, 101, 400], device="cuda", dtype=torch.int32)
    cu_k = torch.tensor([0, 200, 300, 700], device="cuda", dtype=torch.int32)
    padding = torch.tensor([50, 99, 0], device="cuda", dtype=torch.int32)
    used = torch.tensor([150, 100, 333], device="cuda", dtype=torch.int32)
    q = torch.randn(410, 4, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(720, 2, 128, device="cuda", dtype=BF16) for _ in range(2))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    seen = torch.zeros(720, dtype=torch.bool, device="cuda")
    for start, before, count in zip((0, 200, 300), padding.tolist(), used.tolist(), strict=True):
        seen[start + before : start + count] = True
    for tensor in (k, v):
        tensor[~seen] = torch.nan
    narrow = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"mask": Causal("bottom-right"), "leftpad_k": padding, "seqused_k": used}
    out = tilewise.attention_packed(*narrow, cu_q, cu_k, 299, 400, backend=backend, **options)
    want = tilewise.attention_packed(*wide, cu_q, cu_k, backend="reference", **options)
    weight = torch.randn_like(want)
    assert_close(out, want, rounding_budget(BF16, 3))
    assert (out[400:] == 0).all()
    grads = torch.autograd.grad(out, narrow, weight.to(BF16))
    truth = torch.autograd.grad(want, wide, weight.to(BF16).double())
    for got, exactly in zip(grads, truth, strict=True):
        assert_close(got, exactly, rounding_budget(BF16, 6))


def test_wrong_offsets_of_every_kind_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(640, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    good = torch.tensor([0, 300, 640], device="cuda", dtype=torch.int32)
    for bad, match in ((good.long(), "int32"), (good.cpu(), "device"), (good.float(), "int32")):
        with pytest.raises(InvalidInput, match=match):
            tilewise.attention_packed(q, k, v, bad, good)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    compiled = torch.compile(lambda q, k, v, cu: tilewise.attention_packed(q, k, v, cu, cu), backend="aot_eager")
    for offsets in ((0, 700, 640), (1, 300, 640), (0, 300, 641)):
        bad = torch.tensor(offsets, device="cuda", dtype=torch.int32)
        with pytest.raises(InvalidInput, match="never fall"):
            tilewise.attention_packed(q, k, v, bad, bad)
        with pytest.raises(InvalidInput, match="never fall"):
            compiled(q, k, v, bad)
        of_batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
        with pytest.raises(InvalidInput, match="never fall"):
            tilewise.attention(*of_batch, mask=Documents(bad, inner=Causal()))
    tilewise.attention_packed(q, k, v, good, good)


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=BACKENDS[1].marks)])
def test_dropout_drops_what_the_reference_drops(backend: str) -> None:
    cu = torch.tensor([0, 100, 101, 400], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(400, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    results = []
    for dtype, name in ((BF16, backend), (torch.float64, "reference")):
        torch.manual_seed(3)
        tensors = (x.to(dtype) for x in (q, k, v))
        results.append(tilewise.attention_packed(*tensors, cu, cu, mask="causal", dropout=0.3, backend=name))
    assert_close(results[0], results[1], rounding_budget(BF16, 3))


def launch_a_few() -> None:
    for backend in (SM80, SM90) if hopper else (SM80,):
        for number in range(4):
            case, _ = case_of(number, MASKS[number % 4], needs_grad=True)
            out, lse = backend.forward(case.q, case.k, case.v, case.problem, None, case.operands)
            dout = torch.zeros_like(out)
            backend.backward(dout, None, case.q, case.k, case.v, out, lse, case.problem, None, case.operands)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch_a_few()
