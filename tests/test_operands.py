"""Operands: a score term with a differentiable tensor, defined by this file alone, through every way a call can take.

`Lean` adds slopes[head] * (key - row), then a bias of its own per key: two operands, one of which has a gradient by
autograd and one by a formula of its own. `Fixed` reads a tensor that must not require grad.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import library as torch_library
from torch.utils.flop_counter import FlopCounterMode

import emulation
import tilewise
from support import assert_close, budget
from tilewise import Causal, InvalidInput, PrefixLM, Problem, Target, UnsupportedProblem, Window, memo, scores
from tilewise.call import memory
from tilewise.engine import run
from tilewise.engine.program import Address
from tilewise.operands import Grads, Operand, Wants
from tilewise.plan import BACKENDS
from tilewise.scores import Softcap, Term, Where
from tilewise.terms import Alibi

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Lean(Term):
    """s -> s + factor * slopes[head] * (key - row) + shift[key]."""

    kind: ClassVar[str] = "lean-on"

    factor: float = 1.0

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return Operand("slopes", differentiable=True), Operand("shift", differentiable=True)

    def check_tensor(self, name: str, tensor: Tensor, problem: Problem) -> None:
        if name == "slopes" and tuple(tensor.shape) != (problem.heads_q,):
            raise InvalidInput("slopes", f"shape {tuple(tensor.shape)}", "one number per head", "give as many")

    def apply(self, given: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        distance = where.key_numbers(given.device) - where.row_numbers(given.device)
        slopes = where.operands["slopes"].to(given.dtype)[where.head_numbers(given.device)]
        return given + self.factor * slopes * distance + where.part(where.operands["shift"]).to(given.dtype), None

    def gradients(self, dscores: Tensor, given: Tensor, where: Where, wants: Wants) -> Grads:
        found = Term.gradients(self, dscores, given, where, wants - {"shift"})
        if "shift" in wants:
            whole = torch.zeros_like(where.operands["shift"], dtype=dscores.dtype)
            whole[where.keys.start : where.keys.stop] = dscores.sum((0, 1, 2))
            found["shift"] = whole
        return found


@dataclass(frozen=True, slots=True)
class Fixed(Term):
    """s -> s + table[key], whose table has no gradient."""

    kind: ClassVar[str] = "fixed"

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("table"),)

    def apply(self, given: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        return given + where.part(where.operands["table"]), None


@dataclass(frozen=True, slots=True)
class Slant(Term):
    """s -> s + slants[head] * (key - row), in a kernel too: the tensor and its gradient are slots of their names."""

    kind: ClassVar[str] = "slant"

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("slants", differentiable=True),)

    @property
    def cpp_gradients(self) -> Wants:
        return frozenset({"slants"})

    def apply(self, given: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        distance = where.key_numbers(given.device) - where.row_numbers(given.device)
        return given + where.operands["slants"].to(given.dtype)[where.head_numbers(given.device)] * distance, None

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::Slant"

    @property
    def cpp_source(self) -> str:
        return CPP

    @property
    def operands(self) -> dict[str, type]:
        return {"slants": ctypes.c_void_p, "dslants": ctypes.c_void_p, "per_unit": ctypes.c_float}

    def params(self, unit: float, *, precise: bool) -> dict[str, object]:
        return {"slants": Address("slants"), "dslants": Address("dslants", optional=True), "per_unit": 1 / unit}


CPP = """namespace tilewise {
struct Slant {
  struct Operands {
    const float* slants;
    float* dslants;
    float per_unit;
  };
  static constexpr bool uses_head = true;
  Elements elements;
  float slant, factor;
  float* sum;
  int seq_q, seq_k;

  template <typename Params, typename At>
  __device__ Slant(const Params& params, const Unit& unit, const At& at)
      : elements(at), slant(params.slants[at.head()] * params.per_unit), factor(unit.first * unit.second),
        sum(params.dslants ? params.dslants + at.head() : nullptr), seq_q(params.seq_q), seq_k(params.seq_k) {}
  __device__ float added(int i) const { return slant * (elements.key(i) - elements.query(i)); }
  __device__ float apply(float v, int i) const { return v * factor + added(i); }
  __device__ float before(float v, int i) const { return v - added(i); }
  __device__ void gradient(float ds, int i) const {
    const int query = elements.query(i), key = elements.key(i);
    if (sum && query < seq_q && key < seq_k) *sum += ds * (key - query);  // the model runs one thread at a time
  }
};
}  // namespace tilewise
"""

TERMS = (Lean(0.5),)
OURS = ["reference", "tiled"]
SHAPE = (1, 4, 6, 4)


def tensors(grad: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, slopes and shift."""
    q, k, v = (
        torch.randn(SHAPE, dtype=dtype),
        torch.randn(1, 2, 6, 4, dtype=dtype),
        torch.randn(1, 2, 6, 3, dtype=dtype),
    )
    slopes, shift = torch.randn(4, dtype=dtype), torch.randn(6, dtype=dtype)
    return [tensor.requires_grad_(grad) for tensor in (q, k, v, slopes, shift)]


def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, shift: Tensor, **named):
    operands = {"slopes": slopes, "shift": shift}
    arguments = {"mask": "causal", "softcap": 3.0, "scores": TERMS, "operands": operands, "backend": "reference"}
    return tilewise.attention(q, k, v, **(arguments | named))


def written_out(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, shift: Tensor) -> Tensor:
    """The same in plain operations."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = 3.0 * torch.tanh(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 / 3.0)
    places = torch.arange(6)
    logits = logits + 0.5 * slopes[:, None, None] * (places - places[:, None]) + shift
    return torch.softmax(logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf), -1) @ v


@pytest.mark.parametrize("backend", ["auto", *OURS])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_come_back_under_the_names_of_the_operands(backend, layout):
    given = tensors()
    truth = written_out(*given)
    dout = torch.randn_like(truth)
    want = torch.autograd.grad(truth, given, dout)
    q, k, v, *others = given
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    for _ in range(2):  # the second call is a remembered one
        out = call(q, k, v, *others, backend=backend, layout=layout)
        out = out.transpose(1, 2) if layout == "bshd" else out
        assert_close(out, truth.detach(), budget(torch.float64, 6))
        for got, true in zip(torch.autograd.grad(out, given, dout), want, strict=True):
            assert_close(got, true, 4 * budget(torch.float64, 24), "gradient")


@pytest.mark.parametrize("backend", OURS)
def test_gradcheck_and_double_backward(backend):
    given = tensors()

    def both(*given):
        return call(*given, backend=backend, return_lse=True)

    assert torch.autograd.gradcheck(both, given)
    assert torch.autograd.gradgradcheck(both, given)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("index", range(5))
def test_one_gradient_alone(backend, index):
    """Of any single input, the operands among them, where nothing else requires grad."""
    given = tensors()
    dout = torch.randn(1, 4, 6, 3, dtype=torch.float64)
    want = torch.autograd.grad(written_out(*given), given, dout)[index]
    alone = [tensor if i == index else tensor.detach() for i, tensor in enumerate(given)]
    (got,) = torch.autograd.grad(call(*alone, backend=backend), alone[index], dout)
    assert_close(got, want, 4 * budget(torch.float64, 24), "gradient")


@pytest.mark.parametrize("backend", ["auto", *OURS])
def test_compiled_in_one_graph(backend):
    torch._dynamo.reset()
    given = tensors(dtype=torch.float32)

    def step(*given):
        return call(*given, backend=backend).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(step(*given), given)
    for got, true in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        assert_close(got, true, 4 * budget(torch.float32, 24), "gradient")


@pytest.mark.parametrize("backend", OURS)
def test_numbers_of_terms_that_vary_are_compiled_too(backend):
    torch._dynamo.reset()
    given = tensors(grad=False)

    def attend(cap, factor):
        return call(*given, softcap=cap, scores=(Lean(factor),), backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for cap, factor in ((3.0, 0.5), (4.0, 0.25), (5.5, 1.0 / 3.0), (6, 2)):
        assert torch.equal(compiled(cap, factor), attend(cap, factor))


def test_a_learned_mask_compiled_in_one_graph():
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 6, 6, requires_grad=True)
    given = (q, k, v, bias)

    def step(q, k, v, bias):
        return tilewise.attention(q, k, v, mask=bias * 2).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(step(*given), given)
    for got, true in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        assert_close(got, true, 4 * budget(torch.float32, 24), "gradient")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", OURS)
def test_opcheck(backend, grad):
    q, k, v, *others = tensors(grad)
    text = scores.text_of((Softcap(3.0), *TERMS))
    arguments = (q, k, v, others, "causal", None, text, "bhsd", backend, True)
    results = torch_library.opcheck(torch.ops.tilewise.attention.default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    q, k, v, *others = (tensor.detach() for tensor in (q, k, v, *others))
    out, lse = torch.ops.tilewise.attention(q, k, v, others, *arguments[4:])
    wants = [True, False, True, True, False]
    backward = (out, None, q, k, v, others, out, lse, wants, *arguments[4:])
    results = torch_library.opcheck(torch.ops.tilewise.attention_backward.default, backward)
    assert set(results.values()) == {"SUCCESS"}
    grads = torch.ops.tilewise.attention_backward(*backward)
    shapes = [tensor.shape for tensor in (q, k, v, *others)]
    assert [grad.shape for grad in grads] == [shape if w else (0,) for shape, w in zip(shapes, wants, strict=True)]


@pytest.mark.parametrize("by_operator", [False, True])
def test_transforms_and_batched_gradients(by_operator):
    given = tensors()
    out = call(*given)
    if by_operator:
        text = scores.text_of((Softcap(3.0), *TERMS))
        out, _ = torch.ops.tilewise.attention(*given[:3], given[3:], "causal", None, text, "bhsd", "tiled", False)
    douts = torch.randn(3, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    for number, dout in enumerate(douts):
        for got, want in zip(batched, torch.autograd.grad(out, given, dout, retain_graph=True), strict=True):
            assert_close(got[number], want, 4 * budget(torch.float64, 24), "gradient")
    plain = [tensor.detach() for tensor in given]
    many = torch.randn(3, 4, dtype=torch.float64)
    together = torch.vmap(lambda slopes: call(*plain[:3], slopes, plain[4], backend="auto"))(many)
    for got, slopes in zip(together, many, strict=True):
        assert_close(got, call(*plain[:3], slopes, plain[4]), budget(torch.float64, 6))
    _, tangent = torch.func.jvp(
        lambda slopes: call(*plain[:3], slopes, plain[4], backend="auto"), (plain[3],), (many[0],)
    )
    (dslopes,) = torch.autograd.grad(call(*plain[:3], given[3], plain[4]), given[3], douts[0])
    assert_close((tangent * douts[0]).sum(), (dslopes * many[0]).sum(), 4 * budget(torch.float64, 100), "tangent")
    with pytest.raises(UnsupportedProblem, match="in place"):
        torch.vmap(lambda slopes: call(*plain[:3], slopes, plain[4], backend="tiled"))(many)


def test_checkpoints_autocast_and_flop_counters_take_them_too():
    from torch.utils.checkpoint import checkpoint

    given = tensors(dtype=torch.float32)
    want = torch.autograd.grad(call(*given).sum(), given)
    again = torch.autograd.grad(checkpoint(call, *given, use_reentrant=False).sum(), given)
    assert all(torch.equal(got, true) for got, true in zip(again, want, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*given)
        cast = torch.autograd.grad(out.sum(), given, create_graph=True)
    for got, true in zip(cast, want, strict=True):
        assert_close(got.detach(), true, 4 * budget(torch.float32, 24), "gradient")
    with FlopCounterMode(display=False) as counter:
        call(*given).sum().backward()
    pairs = 4 * 21
    assert counter.get_total_flops() == 2 * pairs * (4 + 3) + 2 * pairs * (3 * 4 + 2 * 3)


def test_a_term_travels_as_its_text_and_a_problem_lists_the_operands_in_order():
    terms = (Softcap(30.0), Lean(0.25), Fixed())
    assert scores.parse_all(scores.text_of(terms)) == terms
    assert scores.text_of(()) == ""
    assert scores.parse_all("") == ()
    problem = Problem(1, 4, 4, 6, 6, 4, 4, torch.float64, mask=tilewise.Dense((6, 6), True), scores=terms)
    assert [operand.name for operand in problem.operands] == ["bias", "slopes", "shift", "table"]
    asked = problem.with_(needs_grad=True, operand_grads=("bias", "shift"))
    assert Problem.from_dict(asked.to_dict()) == asked
    assert "+grad(bias,shift)" in str(asked)
    for wrong in (("table",), ("shift", "bias"), ("slope",)):
        with pytest.raises(InvalidInput, match="operand"):
            problem.with_(operand_grads=wrong)
    with pytest.raises(InvalidInput, match="names that differ"):
        problem.with_(scores=(Lean(1.0), Lean(2.0)))


@pytest.mark.parametrize("watched", [False, True])
def test_the_order_in_which_operands_are_given_does_not_matter(watched):
    given = tensors()
    slopes, shift = given[3:]
    want = torch.autograd.grad(call(*given).sum(), given)
    turned = {"shift": shift, "slopes": slopes}
    with FlopCounterMode(display=False) if watched else torch.enable_grad():  # which the operators run under
        out = call(*given, operands=turned)
        got = torch.autograd.grad(out.sum(), given)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 4 * budget(torch.float64, 24), "gradient")
    compiled = torch.compile(lambda: call(*given, operands=turned), fullgraph=True, backend="aot_eager")
    assert_close(compiled(), out.detach(), budget(torch.float64, 6))


def test_a_mask_tensor_and_terms_share_a_call():
    q, k, v, slopes, shift = tensors()
    bias = torch.randn(4, 6, 6, dtype=torch.float64).tril().masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    bias.requires_grad_()
    given = (q, k, v, slopes, shift, bias)
    want = torch.autograd.grad(call(q, k, v, slopes, shift, mask=bias).sum(), given)
    got = torch.autograd.grad(call(q, k, v, slopes, shift, mask=bias, backend="tiled").sum(), given)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 4 * budget(torch.float64, 24), "gradient")
    # A bias that is 0 where it shows a key is the causal mask, and summed per key its gradient is that of a shift.
    hidden = torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    assert_close(call(*given[:5], mask=hidden), call(*given[:5]), budget(torch.float64, 6))
    assert_close(want[5].sum((0, 1)), want[4], 4 * budget(torch.float64, 24), "gradient")


@pytest.mark.parametrize(
    ("operands", "argument"),
    [
        ({}, "operands"),
        ({"slopes": torch.zeros(4)}, "operands"),
        ({"slopes": torch.zeros(4), "shift": torch.zeros(6), "more": torch.zeros(6)}, "operands"),
        ({"slopes": torch.zeros(4), "shift": 3.0}, "operands['shift']"),
        ({"slopes": torch.zeros(5), "shift": torch.zeros(6)}, "slopes"),
        ({"slopes": torch.zeros(4), "shift": torch.zeros(6, device="meta")}, "operands['shift']"),
    ],
)
def test_operands_that_do_not_fit_are_named(operands, argument):
    q, k, v, *_ = tensors(dtype=torch.float32)
    with pytest.raises(InvalidInput, match="What to do") as caught:
        tilewise.attention(q, k, v, scores=TERMS, operands=operands)
    assert caught.value.argument == argument


def test_an_operand_without_a_gradient_must_not_require_one():
    q, k, v, _, shift = tensors()
    for grad in (shift, shift * 2):
        with pytest.raises(InvalidInput, match="it has no gradient"):
            tilewise.attention(q, k, v, scores=(Fixed(),), operands={"table": grad})
        with pytest.raises(InvalidInput, match="it has no gradient"):
            torch.ops.tilewise.attention(q, k, v, [grad], "full", None, "fixed", "bhsd", "auto", False)
    out = tilewise.attention(q, k, v, scores=(Fixed(),), operands={"table": shift.detach()})
    assert out.requires_grad


def test_backends_without_a_gradient_say_so():
    problem = Problem(
        1,
        4,
        4,
        256,
        256,
        64,
        64,
        torch.bfloat16,
        mask=Causal(),
        scores=TERMS,
        needs_grad=True,
        operand_grads=("slopes",),
    )
    chosen = tilewise.explain(problem, target="h200")
    assert chosen.backend in ("reference", "tiled")
    for verdict in chosen.verdicts:
        if not verdict.willing and not verdict.backend.startswith("torch"):
            assert any("slopes requires grad" in reason.what for reason in verdict.reasons), verdict.backend


@emulation.emulated
def test_a_kernel_takes_an_operand_and_makes_its_gradient_by_name(monkeypatch):
    """On a model of the hardware: planned, bound and called as on a GPU."""
    target = Target.named("a100")
    q, k, v, dout = (torch.randn(1, 2, 70, 64).bfloat16() for _ in range(4))
    slants = torch.randn(2) / 16
    problem = Problem(
        1, 2, 2, 70, 70, 64, 64, torch.bfloat16, mask=Causal(), scores=(Slant(),), needs_grad=True,
        operand_grads=("slants",),
    )  # fmt: skip
    chosen = tilewise.explain(problem, target=target)
    assert chosen.backend == "sm80"
    operands, wants = {"slants": slants}, frozenset({"q", "slants"})
    reference = BACKENDS["reference"]
    wide = [tensor.double() for tensor in (q, k, v)], problem.with_(dtype=torch.float64), {"slants": slants.double()}
    want_out, want_lse = reference.forward(*wide[0], wide[1], None, wide[2])
    want = reference.backward(dout.double(), None, *wide[0], want_out, want_lse, wide[1], None, wide[2], wants)
    emulation.install(monkeypatch)
    out, lse = run.bind_forward(lambda: chosen.forward, problem, q, k, v, operands)(q, k, v, operands)
    assert_close(out, want_out, budget(torch.bfloat16, 70))
    bound = run.bind_backward(lambda device, wants: chosen.backward_for(wants), problem)
    got = bound(dout, None, q, k, v, out, lse, operands, wants)
    assert set(got) == wants
    for name, grad in got.items():
        assert_close(grad, want[name], 2 * budget(torch.bfloat16, 70), name)


def test_one_invalidate_empties_everything_and_changes_of_state_call_it():
    from tilewise.integrations.sdpa import decision
    from tilewise.jit import tuned
    from tilewise.plan import _plans, leave_out

    q = torch.randn(1, 2, 8, 4)
    rule = decision.Decider(None, "silent", "tiled")

    def remember() -> None:
        tilewise.attention(q, q, q, mask=Window(2, 0))
        assert rule.call(q, q.clone(), q.clone(), None, 0.0, False, None, False) is not None
        assert len(memory._calls) > 0
        assert len(_plans) > 0
        assert len(rule.memo) > 0
        assert rule.recent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilewise.plan, "_left_out", frozenset())
        for change in (memo.invalidate, tuned.forget, lambda: leave_out("no such kernel", "a test")):
            remember()
            change()
            assert not len(memory._calls)
            assert not len(_plans)
            assert not len(rule.memo)
            assert not rule.recent
    memo.invalidate()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_a_backward_without_rows_or_keys_reads_no_spans_of_its_mask(lengths: tuple[int, int]) -> None:
    problem = Problem(
        1, 2, 2, *lengths, 64, 64, torch.float16, PrefixLM(3), needs_grad=True, scores=(Alibi(learned=True),)
    )
    q, out, k = (torch.ones(1, 2, length, 64, dtype=torch.float16) for length in (lengths[0], lengths[0], lengths[1]))
    slopes = torch.ones(2)
    backward = run.bind_backward(lambda device, wants: pytest.fail("there is nothing to launch"), problem)
    grads = backward(out, None, q, k, k, out, out[..., 0].float(), {"alibi": slopes}, frozenset(("q", "k", "alibi")))
    assert {name: tuple(grad.shape) for name, grad in grads.items()} == {"q": q.shape, "k": k.shape, "alibi": (2,)}
    assert not any(grad.any() for grad in grads.values())
