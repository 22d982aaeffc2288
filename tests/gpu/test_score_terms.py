"""Terms of the scores on a GPU: every one in the kernels of both generations, forward and backward, against float64.

Results are held to 1.1 x, gradients to 1.25 x, the error of a model of PyTorch's kernels: weights and their gradients
rounded to 16 bits before the products, everything else in float32. Gradients of what terms learn, which are sums that
cancel, are held to what their addends allow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import matrix
import pytest
import torch
from matrix import BF16, FP16, relative_error

import tilewise
from support import budget, lse_budget, make_problem
from term_cases import Case, Truth, truth
from tilewise import Causal, Documents, Full, PrefixLM, Target, Window
from tilewise import KeyLengths as KeyLengthsMask
from tilewise.engine import SM80, SM90, run, tile_map
from tilewise.jit import build_all
from tilewise.operands import ALL
from tilewise.scores import Softcap, Term, Where, bend_all, join_all, keep_all, visible_all
from tilewise.terms import Alibi, Bias, Dropout, Keep, KeyLengths, RelativeBias, Sink

Tensor = torch.Tensor
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]
BACKENDS = {"sm90": SM90, "sm80": SM80}
BATCH, HEADS = 2, (4, 2)
F32 = torch.float32


class Made(NamedTuple):
    """Terms, and the tensors that they read."""

    terms: tuple[Term, ...]
    operands: dict[str, Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def kept(problem: Any, *shape: int) -> Tensor:
    """Half of the pairs; one query in eight sees nothing."""
    keep = torch.rand(shape, device="cuda") < 0.5
    return keep & (torch.rand(*shape[:-1], 1, device="cuda") > 0.125)


def padded(problem: Any, *, left: bool = False) -> Tensor:
    lengths = torch.tensor([problem.seq_kv * 5 // 8, problem.seq_kv], device="cuda")[:, None]
    keys = torch.arange(problem.seq_kv, device="cuda")
    return (keys >= problem.seq_kv - lengths if left else keys < lengths)[:, None, None]


def blocks(problem: Any) -> Tensor:
    """Whole tiles that are full, empty and cut, whatever the tile."""
    rows, keys = torch.arange(problem.seq_q, device="cuda")[:, None], torch.arange(problem.seq_kv, device="cuda")
    return ((rows // 150 + keys // 210) % 3 == 0) | (keys < 37)


def made(name: str, problem: Any) -> Made:
    b, h, rows, keys = problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv
    grad = problem.needs_grad

    def keep(tensor: Tensor) -> Made:
        return Made((Keep.of(tensor, problem),), {"keep": tensor})

    def bias(tensor: Tensor, *before: Term, behind: Made = Made((), {})) -> Made:  # noqa: B008  (empty)
        term = Bias.of(tensor.detach().requires_grad_(grad), problem)
        return Made((*before, term, *behind.terms), {"bias": tensor, **behind.operands})

    lengths = torch.tensor([keys * 5 // 8, keys], dtype=torch.int32, device="cuda")
    seed = torch.tensor([1234, (7 << 32) + 12], device="cuda")
    hidden = drawn(b, h, rows, keys).to(problem.dtype)
    hidden[torch.rand(hidden.shape, device="cuda") < 0.1] = -math.inf
    makers = {
        "none": lambda: Made((), {}),
        "alibi": lambda: Made((Alibi(learned=grad),), {"slopes": drawn(h).abs() / 8}),
        "alibi per batch": lambda: Made((Softcap(9.0), Alibi(True, grad)), {"slopes": drawn(b, h) / 8}),
        "keep": lambda: keep(kept(problem, b, h, rows, keys)),
        "keep shared": lambda: keep(kept(problem, rows, keys)),
        "keep strided": lambda: keep(kept(problem, b, 1, keys, rows).transpose(-1, -2)),
        "keep blocks": lambda: keep(blocks(problem)),
        "keep padding": lambda: keep(padded(problem)),
        "keep left padding": lambda: keep(padded(problem, left=True)),
        "lengths": lambda: Made((KeyLengths(),), {"key_lengths": lengths}),
        "lengths left": lambda: Made((KeyLengths(True),), {"key_lengths": lengths}),
        "bias": lambda: bias(hidden),
        "bias of heads": lambda: bias(drawn(1, h, rows, keys).to(problem.dtype)),
        "bias in float32": lambda: bias(drawn(b, 1, rows, keys)),
        "bias of keys": lambda: bias(drawn(b, 1, 1, keys).to(problem.dtype)),
        "bias behind a softcap": lambda: bias(drawn(h, rows, keys).to(problem.dtype), Softcap(9.0)),
        "bias of batches": lambda: bias(drawn(b, 1, rows, keys).to(problem.dtype)),
        "bias of all": lambda: bias(hidden[:1, :1]),
        "bias and dropout": lambda: bias(
            drawn(h, rows, keys).to(problem.dtype), behind=Made((Dropout(0.2),), {"seed": seed})
        ),
        "bias and lengths": lambda: bias(
            drawn(h, rows, keys).to(problem.dtype), behind=Made((KeyLengths(),), {"key_lengths": lengths})
        ),
        "bias and keep": lambda: bias(drawn(h, rows, keys).to(problem.dtype), behind=keep(kept(problem, rows, keys))),
        "table": lambda: Made((RelativeBias(601, 300, "float32", grad),), {"table": drawn(h, 601)}),
        "sink": lambda: Made((Sink(grad),), {"sink": 3 * drawn(h)}),
        "lengths and sink": lambda: Made((KeyLengths(), Sink(grad)), {"key_lengths": lengths, "sink": drawn(h)}),
        "dropout": lambda: Made((Dropout(0.2),), {"seed": seed}),
    }
    return makers[name]()


NAMES = [
    "alibi", "alibi per batch", "keep", "keep shared", "keep strided", "keep blocks", "keep padding",
    "keep left padding", "lengths", "lengths left", "bias", "bias of heads", "bias in float32", "bias of keys",
    "bias behind a softcap", "table", "sink", "lengths and sink", "dropout",
]  # fmt: skip
MASKS = [Full(), Causal(), Window(100, 30)]


def case_of(
    name: str, dtype: torch.dtype, dim: int, mask: Any, lengths: tuple[int, int], seed: int = 0, **fields: Any
) -> Case:
    torch.manual_seed(seed)
    sizes = {"heads_kv": HEADS[1], "seq_kv": lengths[1], "mask": mask, "needs_lse": True, "needs_grad": True}
    shape = (BATCH, HEADS[0], lengths[0], dim)
    plain = make_problem(shape, dtype, **(sizes | fields))
    terms, operands = made(name, plain)
    learned = tuple(operand.name for term in terms for operand in term.learned_tensors)
    problem = plain.with_(scores=terms, operand_grads=learned)
    q, dout = (drawn(*shape).to(dtype) for _ in range(2))
    k, v = (drawn(BATCH, HEADS[1], lengths[1], dim).to(dtype) for _ in range(2))
    return Case(problem, operands, q, k, v, dout)


def called(case: Case, backend: str) -> dict[str, Tensor]:
    """out, lse and all gradients, into memory that was full of NaN before."""
    problem = case.problem
    inputs = {name: getattr(case, name).detach().clone().requires_grad_() for name in "qkv"}
    operands = {
        name: tensor.detach().clone().requires_grad_() if name in problem.operand_grads else tensor
        for name, tensor in case.operands.items()
    }
    torch.use_deterministic_algorithms(problem.deterministic)
    out, lse = tilewise.attention(
        *inputs.values(),
        mask=problem.mask,
        scores=problem.scores,
        operands=operands,
        return_lse=True,
        backend=backend,
    )
    leaves = inputs | {name: operands[name] for name in problem.operand_grads}
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout)
    torch.use_deterministic_algorithms(False)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def model(case: Case) -> dict[str, Tensor]:
    """Attention as a fused kernel of 16-bit numbers does it."""
    problem, dtype = case.problem, case.problem.dtype
    where = Where(problem, range(problem.seq_q), range(problem.seq_kv), operands=case.operands)
    k, v = (t.float().repeat_interleave(problem.group, 1) for t in (case.k, case.v))
    q, dout = case.q.float(), case.dout.float()
    scores, slope = bend_all(q @ k.mT * problem.scale, where)
    seen = matrix.visible_pairs(problem)
    if (left := visible_all(where)) is not None:
        seen = seen & left
    scores = scores.masked_fill(~seen, -math.inf)
    logits = join_all(where, F32)
    top = torch.stack([scores.amax(-1, keepdim=True), *[x.expand(*scores.shape[:-1], 1) for x in logits]]).amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + sum(torch.exp(logit - top) for logit in logits)
    total = torch.where(total == 0, 1.0, total)
    factor = keep_all(where, F32)
    factor = torch.ones((), device="cuda") if factor is None else factor
    out = (((weights * factor).to(dtype).float() @ v) / total).to(dtype)
    shares = weights / total
    dshares = dout @ v.mT * factor
    dscores = shares * (dshares - (dout * out.float()).sum(-1, keepdim=True))
    dscores = (dscores if slope is None else dscores * slope).masked_fill(~seen, 0.0).to(dtype).float()
    grouped = (problem.batch, problem.heads_kv, problem.group, problem.seq_kv, problem.head_dim)
    return {
        "out": out,
        "q": (dscores @ k * problem.scale).to(dtype),
        "k": (dscores.mT @ q * problem.scale).view(grouped).sum(2).to(dtype),
        "v": ((shares * factor).to(dtype).float().mT @ dout).view(grouped).sum(2).to(dtype),
    }


def check(case: Case, backend: str, note: str = "") -> None:
    problem = case.problem
    what = f"{problem} {note}"
    got, want, modelled = called(case, backend), truth(case), model(case)
    exact = {"out": want.out, **want.grads}
    for name, tensor in modelled.items():
        limit = (1.1 if name == "out" else 1.25) * relative_error(tensor, exact[name])
        # Rounding noise of a small tensor: the norm of n errors is known to about 1 / sqrt(2 n).
        limit += torch.finfo(problem.dtype).eps * 2 / math.sqrt(tensor.numel())
        assert not got[name].isnan().any(), f"{what}: {name} has NaN"
        wrong = relative_error(got[name], exact[name])
        assert wrong <= limit, f"{what}: {name} is off by {wrong:.3e}, allowed {limit:.3e}"
    check_rows(case, got, want, what)
    for name, size in want.magnitudes.items():
        wrong = ((got[name].double() - exact[name]).norm() / size.norm()).item()
        allowed = budget(problem.dtype, problem.seq_kv)
        assert wrong <= allowed, f"{what}: d{name} is off by {wrong:.2e} of its addends, allowed {allowed:.2e}"


def check_rows(case: Case, got: dict[str, Tensor], want: Truth, what: str) -> None:
    seen = want.lse.isfinite()
    assert torch.equal(got["lse"].isfinite(), seen), what
    assert (got["out"][~seen] == 0).all(), what
    assert (got["q"][~seen] == 0).all(), what
    # Four times: the exponentials, the logarithm and the functions of terms are approximate. A score that counts is no
    # larger than lse.
    largest = want.lse[seen].abs().max().item() if seen.any() else 0.0
    allowed = 4 * lse_budget(case.q, case.k, case.problem, largest)
    assert ((got["lse"].double() - want.lse)[seen].abs() <= allowed).all(), what


def units_of(case: Case) -> list[Any]:
    """The kernels of a case, of both generations."""
    found, target = [], Target.of("cuda")
    problem = case.problem
    for backend in BACKENDS.values():
        if backend.why_not(problem, target):
            continue
        made = [backend.program(problem, target, backend.configs(problem, target)[0])]
        wants = ALL | frozenset(problem.operand_grads)
        made.append(backend.backward_program(problem, target, backend.backward_configs(problem, target)[0], wants))
        found += [unit for program in made for unit in program.units]
    return found


SMALL = [(dim, mask, (300, 412)) for dim in (64, 128) for mask in MASKS]
OTHERS = [(128, Causal(), (1100, 1100)), (64, Full(), (130, 701)), (96, Causal("bottom-right"), (257, 511))]


MANY_TILES = (700, 2600)  # more tiles of keys than claim a dQ: it is added up in any order


def with_large_bias(dim: int) -> Any:
    """A problem with a bias that batches share, large enough to fill every ring many times."""
    plain = make_problem((4, 16, 4096, dim), BF16, needs_lse=True, needs_grad=True)
    return plain.with_(scores=(Bias("bfloat16", ("batch",), True, True),), operand_grads=("bias",))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if not hopper:
        return
    small = [(name, *shape) for name in NAMES for shape in [*SMALL, *OTHERS]]
    long = [(name, dim) for name in ("keep", "keep padding") for dim in (64, 128)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_map, "MIN_SCORES", 0)
        cases = [case_of(name, BF16, dim, mask, lengths) for name, dim, mask, lengths in small]
        cases += [case_of(name, BF16, dim, Causal(), MANY_TILES) for name, dim in long]
        cases += [case_of(name, BF16, dim, Full(), MANY_TILES, deterministic=True) for name, dim in long]
        cases += [cases[0]._replace(problem=with_large_bias(dim)) for dim in (64, 96, 128)]
        units = {unit.label: unit for case in cases for unit in units_of(case)}
    for _ in build_all(list(units.values())):
        pass


@pytest.fixture(autouse=True)
def _mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks have tile maps, however small the problem."""
    monkeypatch.setattr(tile_map, "MIN_SCORES", 0)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(("dim", "mask", "lengths"), [*SMALL, *OTHERS], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_term(name: str, dim: int, mask: Any, lengths: tuple[int, int], backend: str) -> None:
    check(case_of(name, BF16, dim, mask, lengths), backend)


BIASES = [
    "bias", "bias of heads", "bias of batches", "bias of all", "bias and dropout", "bias and lengths", "bias and keep",
]  # fmt: skip
ALIGNED = [(64, Full(), (300, 416)), (128, Causal(), (1000, 1032)), (128, Full(), (257, 520))]


@pytest.mark.parametrize(("dim", "mask", "lengths"), ALIGNED, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_biases_that_are_loaded_ahead(name: str, dim: int, mask: Any, lengths: tuple[int, int]) -> None:
    """Rows begin at multiples of 16 bytes: TMA brings the tiles, and a shared bias has a kernel for its gradient."""
    for deterministic in (False, True):
        check(case_of(name, BF16, dim, mask, lengths, deterministic=deterministic), "sm90")


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("keep")])
def test_masks_without_a_map(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check(case_of(name, BF16, 64, Causal(), (300, 412)), backend)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", NAMES)
def test_float16(name: str, backend: str) -> None:
    check(case_of(name, FP16, 64, Causal("bottom-right"), (300, 412)), backend)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_gradients_are_the_same_bits_every_time(name: str, backend: str) -> None:
    case = case_of(name, BF16, 64, Causal(), (500, 612), deterministic=True)
    first = called(case, backend)
    for _ in range(20):
        again = called(case, backend)
        assert all(torch.equal(again[key], first[key]) for key in first)
    check(case, backend)


def test_a_changed_mask_changes_the_result() -> None:
    """A map that was made for a mask does not outlive what it says; nor does one inside a graph."""
    case = case_of("keep blocks", BF16, 64, Full(), (700, 900))
    keep = case.operands["keep"]
    check(case, "sm90")
    keep[:, 100:400] = False
    check(case, "sm90")

    def attend() -> Tensor:
        call = {"scores": case.problem.scores, "operands": {"keep": keep}, "backend": "sm90"}
        return tilewise.attention(case.q, case.k, case.v, **call)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    keep.copy_(~keep)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, truth(case).out) <= budget(BF16, 900)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["keep", "keep blocks", "keep padding", "keep left padding"])
def test_maps_of_many_tiles_of_keys(name: str, dim: int, backend: str) -> None:
    """Tiles of keys take turns by the map where gradients are deterministic, and add as they come where not."""
    check(case_of(name, BF16, dim, Causal(), MANY_TILES), backend)
    case = case_of(name, BF16, dim, Full(), MANY_TILES, deterministic=True)
    check(case, backend)
    first = called(case, backend)
    for _ in range(5):
        again = called(case, backend)
        assert all(torch.equal(again[key], first[key]) for key in first)


@pytest.mark.parametrize("lengths", [(1000, 1040), (777, 1040), (1000, 1037)], ids=str)
@pytest.mark.parametrize("name", ["keep", "keep blocks"])
def test_masks_read_by_lines_and_from_any_address(name: str, lengths: tuple[int, int]) -> None:
    """Sixteen bytes at once, where rows begin at their multiples; bits are stored by lines for eight rows at once."""
    check(case_of(name, BF16, 128, Causal(), lengths), "sm90")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_all_kinds_of_learned_operands_in_one_call(backend: str) -> None:
    """A bias that batches share has a kernel of its own for its gradient, and the largest scores are none of its."""
    own = {name: drawn(2, 4, 512, 64).to(BF16) for name in "qkv"} | {"mask": drawn(4, 512, 512).to(BF16)}
    others = {"alibi": drawn(4).abs() / 8, "sink": drawn(4), "table": drawn(4, 99)}
    dout = drawn(2, 4, 512, 64).to(BF16)

    def results(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: tensor.to(dtype) for name, tensor in own.items()} | others
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
        asked = {name: leaves[name] for name in ("mask", "alibi", "sink")}
        asked |= {"scores": (RelativeBias(99, 49),), "operands": {"table": leaves["table"]}, "backend": backend}
        out, largest = tilewise.attention(*(leaves[name] for name in "qkv"), return_max_logit=True, **asked)
        grads = torch.autograd.grad(out, list(leaves.values()), dout.to(dtype))
        return {"out": out.detach(), "largest": largest, **dict(zip(leaves, grads, strict=True))}

    want = results("reference", torch.float64)
    for name, got in results(backend, BF16).items():
        allowed = 30 if name in others else 4  # sums that cancel, of rounded numbers
        assert relative_error(got, want[name].double()) <= allowed * budget(BF16, 512), name


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_padded_batch_of_short_sequences(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a map of its own size. Of one sequence nothing is left; lengths end inside of tiles and on borders."""
    monkeypatch.undo()
    torch.manual_seed(0)
    shape = (32, 4, 512, 64)
    plain = make_problem(shape, BF16, heads_kv=2, needs_lse=True, needs_grad=True)
    lengths = torch.randint(1, 513, (32,), device="cuda")
    lengths[:4] = torch.tensor([0, 512, 128, 129])
    keep = (torch.arange(512, device="cuda") < lengths[:, None])[:, None, None]
    q, dout = (drawn(*shape).to(BF16) for _ in range(2))
    k, v = (drawn(32, 2, 512, 64).to(BF16) for _ in range(2))
    case = Case(plain.with_(scores=(Keep.of(keep, plain),)), {"keep": keep}, q, k, v, dout)
    target = Target.of("cuda")
    assert BACKENDS[backend].program(case.problem, target, BACKENDS[backend].configs(case.problem, target)[0]).prepared
    check(case, backend)


def test_layers_share_what_is_made_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of it for forward and backward of all layers, and one more once it has changed."""
    made: list[Any] = []
    make = run._Preparation._make

    def counted(self: Any, operands: Any) -> Any:
        made.append(self)
        return make(self, operands)

    monkeypatch.setattr(run._Preparation, "_make", counted)
    case = case_of("keep blocks", BF16, 64, Causal(), (700, 900), seed=3)
    called(case, "sm90")
    first = len(made)
    assert len(set(map(id, made))) == first  # each thing that is made of it, once
    called(case, "sm90")
    assert len(made) == first
    case.operands["keep"][50:300] = False
    check(case, "sm90")
    assert len(made) == 2 * first


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_every_row_of_a_large_problem_with_a_dense_bias(dim: int) -> None:
    """A slot of the ring that is given back too early is overwritten under its readers, in a few of many rows."""
    torch.manual_seed(dim)
    problem = with_large_bias(dim)
    batch, heads, rows = problem.batch, problem.heads_q, problem.seq_q
    bias = drawn(1, heads, rows, rows).to(BF16)
    assert Bias.of(bias.detach().requires_grad_(), problem) == problem.scores[0]
    q, k, v, dout = (drawn(batch, heads, rows, dim).to(BF16) for _ in range(4))
    case = Case(problem, {"bias": bias}, q, k, v, dout)
    got, again = called(case, "sm90"), called(case, "sm90")
    for name in ("out", "lse", "bias"):  # dq, dk and dv may be added up in any order
        assert torch.equal(got[name], again[name]), name
    del again
    allowed = budget(BF16, rows)
    # What it is compared with is computed in float32 too, so both may be off.
    lse_allowed = 2 * 4 * lse_budget(q, k, problem, bias.abs().max().item())
    for head in range(heads):
        dbias = torch.zeros(rows, rows, device="cuda")
        magnitude = torch.zeros((), device="cuda")
        for b in range(batch):
            a, c, e, upstream = (x[b, head].float() for x in (q, k, v, dout))
            scores = a @ c.mT * problem.scale + bias[0, head].float()
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[:, None])
            out = weights @ e
            dscores = weights * (upstream @ e.mT - (upstream * out).sum(-1, keepdim=True))
            dbias += dscores
            magnitude += dscores.square().sum()
            where = f"batch {b}, head {head}"
            wrong = (got["out"][b, head].float() - out).norm(dim=-1) / out.norm(dim=-1)
            assert wrong.max() <= allowed, f"{where}: {int((wrong > allowed).sum())} rows, worst {wrong.max():.2e}"
            assert (got["lse"][b, head] - lse).abs().max() <= lse_allowed, where
            want = {"q": dscores @ c * problem.scale, "k": dscores.mT @ a * problem.scale, "v": weights.mT @ upstream}
            for name, tensor in want.items():
                assert relative_error(got[name][b, head], tensor.double()) <= allowed, f"{where}: d{name}"
        wrong = (got["bias"][0, head].float() - dbias).norm() / magnitude.sqrt()
        assert wrong <= allowed, f"head {head}: dbias is off by {wrong:.2e} of its addends"


SPANNED = [
    Documents((0, 100, 100, 430, 1000), inner=Causal()),
    Documents((0, 333, 1000), inner=Window(50, 20)),
    PrefixLM(150),
]


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", SPANNED, ids=str)
@pytest.mark.parametrize("name", ["none", "sink"])
def test_masks_that_are_spans(name: str, mask: Any, dim: int, backend: str) -> None:
    for deterministic in (False, True):
        check(case_of(name, BF16, dim, mask, (1000, 1000), deterministic=deterministic), backend)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_masks_of_tensors(backend: str) -> None:
    """Offsets of documents, prefixes and lengths that only the device knows."""
    q, k, v = (drawn(2, 4, 700, 64).to(BF16) for _ in range(3))
    lengths = torch.tensor([700, 300], device="cuda")
    offsets = (0, 100, 450, 700)
    masks = [
        (Documents(torch.tensor(offsets, device="cuda"), inner=Causal()), Documents(offsets, inner=Causal())),
        (PrefixLM(torch.tensor([200, 200], device="cuda")), PrefixLM(200)),
    ]
    for given, known in masks:
        got = tilewise.attention(q, k, v, mask=given, backend=backend)
        want = tilewise.attention(q, k, v, mask=known, backend=backend)
        assert relative_error(got, want.double()) <= budget(BF16, 700)
    got = tilewise.attention(q, k, v, mask=KeyLengthsMask(lengths, inner=Causal()), backend=backend)
    whole = tilewise.attention(q, k, v, mask=Causal(), backend=backend)
    assert relative_error(got[0], whole[0].double()) <= budget(BF16, 700)
    want = tilewise.attention(q[1:], k[1:, :, :300], v[1:, :, :300], mask=Causal(), backend=backend)
    assert relative_error(got[1:], want.double()) <= budget(BF16, 700)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_the_largest_logit_of_every_head(backend: str) -> None:
    q, k, v = (drawn(2, 4, 500, 64).to(BF16) for _ in range(3))
    out, largest = tilewise.attention(q, k, v, mask=Causal(), return_max_logit=True, backend=backend)
    plain = tilewise.attention(q, k, v, mask=Causal(), backend=backend)
    assert relative_error(out, plain.double()) <= budget(BF16, 500)
    scores = (q.double() @ k.double().mT / 8).masked_fill(~torch.ones(500, 500, device="cuda").tril().bool(), -math.inf)
    assert relative_error(largest, scores.amax((0, 2, 3))) <= budget(F32, 64)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_dropout_follows_the_generator(backend: str) -> None:
    """The same seed gives the same result, in a checkpoint too; every call and every replay of a graph another one."""
    q, k, v = (drawn(2, 4, 500, 64).to(BF16).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)

    def attend(*inputs: Tensor) -> Tensor:
        return tilewise.attention(*inputs, mask=Causal(), dropout=0.3, backend=backend)

    def seeded(call: Any) -> list[Tensor]:
        torch.manual_seed(7)
        out = call(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    first = seeded(attend)
    assert not torch.equal(first[0], attend(q, k, v))
    saved = seeded(lambda *inputs: torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False))
    for a, b in zip(first, saved, strict=True):
        assert relative_error(a, b.double()) <= budget(BF16, 500)
    with torch.no_grad():
        attend(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(q, k, v)
        torch.manual_seed(7)
        replays = []
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            replays.append(captured.clone())
        assert not torch.equal(*replays)
        torch.manual_seed(7)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, replays[0])
