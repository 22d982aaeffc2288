"""What flash-attn's own tests check of its functions, written for any device and any module that has them.

The measure is theirs: an implementation may be as far from a float32 reference as twice (gradients: three times) what
plain PyTorch in the inputs' own dtype is, its operations in another order. To that comes one rounding of the largest
value (0.05 at least), for the cases in which plain PyTorch happens to be exact: the gradient of a query that sees one
key is 0 by cancellation. The reference shares nothing with the package.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from support import assert_close, budget
from tilewise.integrations import flash_attn

Tensor = torch.Tensor
HEADS_KV = {"mha": 6, "gqa": 2, "mqa": 1}
HEADS, BATCH = 6, 3


@dataclass(frozen=True)
class Case:
    """One call. `form` is func, kvpacked or qkvpacked; `local` gives a window, `alibi` slopes per sequence and head."""

    seq_q: int
    seq_k: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    heads: str = "mha"
    form: str = "func"
    causal: bool = False
    local: bool = False
    softcap: float = 0.0
    alibi: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("causal", "local", "alibi", "deterministic") if getattr(self, name)]
        words = [f"{self.seq_q}x{self.seq_k}", f"d{self.head_dim}", str(self.dtype)[6:], self.heads, self.form, *flags]
        return " ".join([*words, *([f"softcap{self.softcap:g}"] if self.softcap else [])])

    @property
    def window(self) -> tuple[int, int]:
        """Anything within the keys, the same for equal cases."""
        draw = random.Random(str(self))
        return (draw.randrange(self.seq_k), draw.randrange(self.seq_k)) if self.local else (-1, -1)

    def slopes(self, device: str) -> Tensor | None:
        return torch.rand(BATCH, HEADS, device=device) * 0.3 if self.alibi else None

    def options(self, slopes: Tensor | None) -> dict[str, object]:
        return {
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": slopes,
            "deterministic": self.deterministic,
        }


def draw_cases(count: int, lengths: list[tuple[int, int]], dims: list[int], seed: int) -> list[Case]:
    """Cases that go round all lengths and head dimensions, with the other arguments drawn at random."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        seq_q, seq_k = lengths[number % len(lengths)]
        form = draw.choice(["func", "func", "kvpacked", "qkvpacked"])
        heads = "mha" if form == "qkvpacked" else draw.choice(list(HEADS_KV))
        seq_k = seq_q if form == "qkvpacked" else seq_k
        flags = {name: draw.random() < share for name, share in (("causal", 0.5), ("local", 0.3), ("alibi", 0.25))}
        dtype = draw.choice([torch.bfloat16, torch.float16])
        softcap = draw.choice([0.0, 0.0, 50.0])
        deterministic = draw.random() < 0.3
        dim = dims[(number // len(lengths) + number) % len(dims)]
        cases.append(Case(seq_q, seq_k, dim, dtype, heads, form, **flags, softcap=softcap, deterministic=deterministic))
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# The reference


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None, lengths: tuple[Tensor, Tensor], *, wide: bool
) -> Tensor:
    """(batch, seq_q, heads, dim) -> the same, one operation after another, in float32 or in the inputs' dtype.

    `lengths` are those of the sequences' queries and keys, (batch,) each. A query that sees no key gives 0.
    """
    dtype, device = q.dtype, q.device
    if wide:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    root = math.sqrt(math.sqrt(q.shape[-1])) if wide else math.sqrt(q.shape[-1])
    scores = torch.einsum("bihd,bjhd->bhij", q / root, k / root if wide else k)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    lengths_q, lengths_k = (length[:, None, None, None] for length in lengths)
    i = torch.arange(q.shape[1], device=device)[:, None] + lengths_k - lengths_q  # the key at which a query stands
    j = torch.arange(k.shape[1], device=device)
    if slopes is not None:
        scores = (scores - slopes[:, :, None, None] * (i - j).abs()).to(scores.dtype)
    left, right = case.window[0], 0 if case.causal else case.window[1]
    hidden = j >= lengths_k
    hidden = hidden | (j < i - left) if left >= 0 else hidden
    hidden = hidden | (j > i + right) if right >= 0 else hidden
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    beyond = torch.arange(q.shape[1], device=device)[:, None, None] >= lengths[0][:, None, None, None]
    return out.masked_fill(beyond, 0.0).to(dtype)


def assert_as_good(got: Tensor, plain: Tensor, want: Tensor, what: str, factor: float) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype
    assert torch.isfinite(got).all(), f"{what} is not finite"
    rounding = torch.finfo(got.dtype).eps * max(want.float().abs().max().item(), 0.05)
    error, allowed = (x.float().sub(want.float()).abs().max().item() for x in (got, plain))
    assert error <= factor * allowed + rounding, f"{what}: error {error:.3g}, plain PyTorch's {allowed:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# The checks


def make(case: Case, device: str, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    heads_kv = HEADS_KV[case.heads]
    shapes = ((case.seq_q, HEADS), (case.seq_k, heads_kv), (case.seq_k, heads_kv))
    tensors = [torch.randn(BATCH, seq, heads, case.head_dim, device=device) * scale for seq, heads in shapes]
    q, k, v = (tensor.to(case.dtype).requires_grad_() for tensor in tensors)
    return q, k, v


def call(case: Case, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, **more: object) -> object:
    options = case.options(slopes) | more
    if case.form == "qkvpacked":
        return flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), **options)
    if case.form == "kvpacked":
        return flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), **options)
    return flash_attn.flash_attn_func(q, k, v, **options)


def check_output_and_gradients(case: Case, device: str, scale: float = 1.0, factors: tuple[float, float] = (2, 3)):
    """out, dq, dk and dv, each as good as plain PyTorch."""
    q, k, v = make(case, device, scale)
    slopes = case.slopes(device)
    out = call(case, q, k, v, slopes)
    lengths = tuple(torch.full((BATCH,), seq, device=device) for seq in (case.seq_q, case.seq_k))
    compare(out, (q, k, v), case, slopes, lengths, (q, k, v), lambda grads: grads, factors)


def compare(out, padded, case, slopes, lengths, leaves, pad_grads, factors):
    plain = plain_attention(*padded, case, slopes, lengths, wide=False)
    want = plain_attention(*padded, case, slopes, lengths, wide=True)
    assert_as_good(out, plain, want, "out", factors[0])
    dout = torch.randn_like(out)
    got = pad_grads(torch.autograd.grad(out, leaves, dout))
    wanted, plainly = (torch.autograd.grad(x, padded, dout) for x in (want, plain))
    for name, one, other, truth in zip(("dq", "dk", "dv"), got, plainly, wanted, strict=True):
        assert_as_good(one, other, truth, name, factors[1])


def check_varlen(case: Case, device: str):
    """Packed sequences of random lengths, against the padded reference; also dq, dk and dv."""
    q, k, v = make(case, device)
    slopes = case.slopes(device)
    lengths_q = torch.randint(max(1, case.seq_q - 20), case.seq_q + 1, (BATCH,))
    lengths_k = torch.randint(max(1, case.seq_k - 20), case.seq_k + 1, (BATCH,))
    lengths_k = lengths_q if case.form == "qkvpacked" else lengths_k
    rows_q, rows_k = (
        (torch.arange(seq) < lengths[:, None]).to(device)
        for seq, lengths in ((case.seq_q, lengths_q), (case.seq_k, lengths_k))
    )
    packed = [x[rows].detach().requires_grad_() for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
    cu_q, cu_k = (
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (lengths_q, lengths_k)
    )
    longest = int(lengths_q.max()), int(lengths_k.max())
    options = case.options(slopes)
    if case.form == "qkvpacked":
        stacked = torch.stack(packed, dim=1)
        out = flash_attn.flash_attn_varlen_qkvpacked_func(stacked, cu_q, longest[0], **options)
    elif case.form == "kvpacked":
        stacked = torch.stack(packed[1:], dim=1)
        out = flash_attn.flash_attn_varlen_kvpacked_func(packed[0], stacked, cu_q, cu_k, *longest, **options)
    else:
        out = flash_attn.flash_attn_varlen_func(*packed, cu_q, cu_k, *longest, **options)

    def pad(x: Tensor, rows: Tensor) -> Tensor:
        return x.new_zeros(*rows.shape, *x.shape[1:]).index_put((rows,), x)

    def pad_grads(grads):
        return [pad(x, rows) for x, rows in zip(grads, (rows_q, rows_k, rows_k), strict=True)]

    lengths = lengths_q.to(device), lengths_k.to(device)
    compare(pad(out, rows_q), (q, k, v), case, slopes, lengths, packed, pad_grads, (2, 3))


def check_lse(case: Case, device: str):
    """return_attn_probs gives the log-sum-exp of every row's scores, which exp(score - lse) turns into weights of 1."""
    q, k, v = make(case, device)
    out, lse, probabilities = call(case, q, k, v, None, return_attn_probs=True)
    assert probabilities is None
    assert (out - call(case, q, k, v, None)).abs().max() <= 4 * torch.finfo(case.dtype).eps
    assert lse.shape == (BATCH, HEADS, case.seq_q)
    ones = flash_attn.flash_attn_func(q.detach(), k.detach(), torch.ones_like(v), causal=case.causal)
    repeated = k.detach().float().repeat_interleave(HEADS // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.detach().float(), repeated) / math.sqrt(case.head_dim)
    i = torch.arange(case.seq_q, device=device)[:, None] + case.seq_k - case.seq_q
    hidden = (torch.arange(case.seq_k, device=device) > i) & case.causal
    want = torch.logsumexp(scores.masked_fill(hidden, -torch.inf), dim=-1)
    unseen = hidden.all(-1).expand_as(want)
    assert_close(lse[~unseen], want[~unseen], budget(case.dtype, case.head_dim), "lse")
    assert (lse[unseen] == -torch.inf).all()
    seen = (~unseen).transpose(1, 2)[..., None].to(ones.dtype).expand_as(ones)
    assert torch.allclose(ones, seen, atol=4 * torch.finfo(case.dtype).eps)


def check_deterministic(case: Case, device: str, repeats: int):
    """The same bits, forward and backward, again and again."""
    q, k, v = make(case, device)
    out = call(case, q, k, v, None)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(repeats):
        assert torch.equal(call(case, q, k, v, None), out)
        for one, other in zip(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), first, strict=True):
            assert torch.equal(one, other)


def check_gradient_of_a_strided_dout(case: Case, device: str):
    """dout need not be contiguous."""
    q, k, v = make(case, device)
    out = call(case, q, k, v, None)
    dout = (
        torch.randn(case.seq_q, 2 * BATCH, HEADS, case.head_dim, device=device).to(case.dtype)[:, ::2].transpose(0, 1)
    )
    strided = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    contiguous = torch.autograd.grad(out, (q, k, v), dout.contiguous())
    for one, other in zip(strided, contiguous, strict=True):
        assert torch.allclose(one, other, rtol=torch.finfo(case.dtype).eps, atol=torch.finfo(case.dtype).eps)


def check_keys_shorter_than_a_tile(device: str, dtype: torch.dtype, head_dim: int, causal: bool):
    """One key a sequence, and more queries than keys: nothing becomes nan."""
    cu_q, cu_k = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 76, 110, 256], [0, 1, 2, 3]))
    q, k, v = (3 * torch.randn(rows, 5, head_dim, device=device) for rows in (256, 3, 3))
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in (q, k, v))
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 256, 3, causal=causal)
    out.backward(torch.randn_like(out))
    assert all(torch.isfinite(x).all() for x in (out, q.grad, k.grad, v.grad))


def check_dropout(case: Case, device: str, share: float = 0.17):
    """With v = 1 on the diagonal the outputs are the weights: dropped, or as they are without dropout, scaled up."""
    assert case.head_dim == case.seq_k
    q, k, _ = make(case, device)
    v = torch.eye(case.seq_k, device=device, dtype=case.dtype)[None, :, None].expand_as(k)
    weights = call(case, q, k, v, None).float()
    dropped = call(case, q, k, v, None, dropout_p=share).float()
    visible = weights > 1e-3
    kept = visible & (dropped != 0)
    assert (dropped[weights == 0] == 0).all()
    error = (dropped * (1 - share) - weights).abs()[kept].max().item()
    assert error <= 4 * torch.finfo(case.dtype).eps
    fraction = 1 - kept.sum().item() / visible.sum().item()
    assert abs(fraction - share) <= (0.025 if case.local else 0.01), fraction
    assert not torch.equal(call(case, q, k, v, None, dropout_p=share).float(), dropped)
