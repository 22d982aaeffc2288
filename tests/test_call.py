"""From a Request to a Call: the page that describes it, every argument in every form, and what is to come."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import memo, partials
from tilewise.call import execute, memory
from tilewise.call.request import BHSD, CACHED, HEADS_ROWS, PACKED, Form, Options, Order, Request, Results
from tilewise.integrations import flash_attn, transformers
from tilewise.operands import Operand
from tilewise.scores import Term

PACKAGE = Path(tilewise.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "calls.md"


# ---------------------------------------------------------------------------------------------------------------------
# docs/calls.md


def listed() -> dict[str, list[str]]:
    """The functions of each list of the page."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"    (\w+, \w+)", line):
            found[match[1]] = []
        elif match := re.match(r"        ([\w.]+)", line):
            found[[*found][-1]].append(match[1])
    return found


def walked(call, stations: set[str]) -> list[str]:
    """Those of the stations that a call enters, in the order in which it first does."""
    seen: dict[str, None] = {}

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            place = f"{module}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
            stations_here = {one for one in stations if one == place or _short(one) == place}
            seen.update(dict.fromkeys(stations_here))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(seen)


def _short(station: str) -> str:
    """As Python 3.10 knows a method: without its class."""
    return re.sub(r"\.[A-Z]\w*(\.\w+)$", r"\1", station)


def ways() -> dict[str, object]:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    packed, offsets = [torch.randn(8, 2, 16) for _ in range(3)], torch.tensor([0, 5, 8], dtype=torch.int32)
    new, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 2, 16, 2, 16)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    return {
        "attention": lambda: tilewise.attention(q, k, v),
        "packed": lambda: tilewise.attention_packed(*packed, offsets, offsets),
        "cached": lambda: tilewise.attention_cached(new, *cache, lengths),
        "override": lambda: F.scaled_dot_product_attention(q, k, v),
    }


@pytest.mark.parametrize("way", ways())
def test_the_page_lists_what_a_call_enters(way, monkeypatch):
    monkeypatch.setenv("TILEWISE_NATIVE", "off")
    memo.invalidate()
    lists, call = listed(), ways()[way]
    stations = {station for stations in lists.values() for station in stations}
    assert {f"{name}, {state}" for name in ways() for state in ("cold", "warm")} == set(lists)
    with tilewise.sdpa(backend="tiled"):
        assert walked(call, stations) == lists[f"{way}, cold"]
        for _ in range(2):
            assert walked(call, stations) == lists[f"{way}, warm"]


# ---------------------------------------------------------------------------------------------------------------------
# Every argument in every form

BATCH, HEADS, ROWS, KEYS, DIM = 2, 2, 5, 7, 8
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(BATCH, HEADS, rows, DIM, generator=GENERATOR) for rows in (ROWS, KEYS, KEYS))
ALIBI, SINK = torch.tensor([0.5, 0.125]), torch.tensor([0.3, -0.2])
VISIBLE = torch.rand(BATCH, 1, ROWS, KEYS, generator=GENERATOR) < 0.8
VISIBLE[..., 0] = True
KEEP = torch.tensor([[True] * KEYS, [True] * 4 + [False] * 3]).view(BATCH, 1, 1, KEYS)
ADDED = torch.randn(HEADS, ROWS, KEYS, generator=GENERATOR)
TABLE = torch.randn(HEADS, ROWS + KEYS - 1, generator=GENERATOR)
LAST = KEYS - ROWS  # of its keys, that the first row sees under a causal mask
# The arguments of `attention` one by one, and of some of them several values. Those with one name exclude each other.
VALUES = {
    "mask=causal": {"mask": "causal:bottom-right"},
    "mask=window": {"mask": tilewise.Window(3, 1, "bottom-right")},
    "mask=boolean": {"mask": VISIBLE},
    "mask=added": {"mask": ADDED},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": ALIBI},
    "keep": {"keep": KEEP},
    "sink": {"sink": SINK},
    "scores": {"scores": (tilewise.scores.Softcap(1.5),)},
    "operands": {
        "scores": (tilewise.terms.RelativeBias(ROWS + KEYS - 1, ROWS - 1),), "operands": {"table": TABLE}
    },
    "dropout": {"dropout": 1e-12},  # which drops nothing, and is computed as any other
    "return_lse": {"return_lse": True},
    "return_max_logit": {"return_max_logit": True},
    "backend": {"backend": "reference"},
    "precision": {"precision": "tf32"},
}  # fmt: skip


def truth(arguments: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out, lse and the largest logits, pair by pair, in float64."""
    scores = arguments.get("scale", DIM**-0.5) * (Q.double() @ K.double().mT)
    if cap := arguments.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(ROWS)[:, None] + LAST
    distance = torch.arange(KEYS)[None, :] - place
    for term in arguments.get("scores", ()):
        if isinstance(term, tilewise.scores.Softcap):
            scores = term.cap * torch.tanh(scores / term.cap)
        else:
            number = torch.arange(KEYS)[None, :] - torch.arange(ROWS)[:, None] + term.zero
            scores = scores + TABLE.double()[:, number]
    if (slopes := arguments.get("alibi")) is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    mask, visible = arguments.get("mask"), torch.ones(ROWS, KEYS, dtype=torch.bool)
    if isinstance(mask, torch.Tensor):
        scores, visible = (scores, mask) if mask.dtype == torch.bool else (scores + mask.double(), visible)
    elif mask is not None:
        left, right = (KEYS, 0) if isinstance(mask, str) else (mask.left, mask.right)
        visible = (distance >= -left) & (distance <= right)
    if (keep := arguments.get("keep")) is not None:
        visible = visible & keep
    scores = scores.masked_fill(~visible, -torch.inf)
    logits = scores
    if (sink := arguments.get("sink")) is not None:
        logits = torch.cat((scores, sink.double().view(1, HEADS, 1, 1).expand(BATCH, HEADS, ROWS, 1)), -1)
    weights = torch.softmax(logits, -1)[..., :KEYS]
    return weights @ V.double(), torch.logsumexp(logits, -1), scores.amax((0, 2, 3))


def in_packed(tensor):
    return tensor.transpose(1, 2).reshape(-1, HEADS, DIM)


def in_rows(tensor):
    return tensor.transpose(1, 2).contiguous()


def offsets(length):
    return torch.arange(BATCH + 1, dtype=torch.int32) * length


def results(found, out, lse):
    """The results of a call, with out and lse in the shapes of `truth`."""
    found = [*found] if isinstance(found, tuple) else [found]
    found[0] = out(found[0])
    if len(found) > 1 and found[1].ndim > 1:
        found[1] = lse(found[1])
    return found


def by_packed(tensor):
    return tensor.view(BATCH, ROWS, HEADS, -1).transpose(1, 2)


def packed_lse(lse):
    return lse.view(HEADS, BATCH, ROWS).transpose(0, 1)


def same(tensor):
    return tensor


def swapped(tensor):
    return tensor.transpose(1, 2)


def bshd(**arguments):
    return results(tilewise.attention(*map(in_rows, (Q, K, V)), layout="bshd", **arguments), swapped, same)


def packed(**arguments):
    arguments = {"mask": None} | arguments
    found = tilewise.attention_packed(*map(in_packed, (Q, K, V)), offsets(ROWS), offsets(KEYS), **arguments)
    return results(found, by_packed, packed_lse)


def cached(**arguments):
    lengths = torch.full((BATCH,), KEYS, dtype=torch.int32)
    found = tilewise.attention_cached(*map(in_rows, (Q, K, V)), lengths, **({"mask": None} | arguments))
    return results(found, swapped, same)


def cached_packed(**arguments):
    tensors = in_packed(Q), in_rows(K), in_rows(V)
    found = tilewise.attention_cached(*tensors, cu_seqlens_q=offsets(ROWS), **({"mask": None} | arguments))
    return results(found, by_packed, packed_lse)


FORMS = {
    "bhsd": lambda **arguments: results(tilewise.attention(Q, K, V, **arguments), same, same),
    "bshd": bshd,
    "packed": packed,
    "cached": cached,
    "cached_packed": cached_packed,
}
# Refusals by the mask, the term or the form, as the message says; all else is computed.
REFUSED = {
    "bhsd": set(),
    "bshd": set(),
    "packed": {"mask=boolean", "mask=added", "keep"},
    "cached": {"mask=boolean", "mask=added", "dropout", "return_max_logit"},
    "cached_packed": {"mask=boolean", "mask=added", "dropout", "keep", "return_max_logit"},
}


def pairs():
    names = [*VALUES]
    for place, one in enumerate(names):
        yield (one,)
        for other in names[place + 1 :]:
            if not {*VALUES[one]} & {*VALUES[other]}:
                yield one, other


def check(found, arguments):
    out, lse, top = truth(arguments)
    expected = [out] + [lse] * bool(arguments.get("return_lse")) + [top] * bool(arguments.get("return_max_logit"))
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_argument_in_every_form(form):
    """One by one and in pairs: the float64 answer, or a refusal that names the argument."""
    for names in pairs():
        arguments = {name: value for one in names for name, value in VALUES[one].items()}
        if refused := REFUSED[form] & {*names}:
            with pytest.raises(tilewise.TilewiseError) as caught:
                FORMS[form](**arguments)
            assert any(name.partition("=")[0] in str(caught.value) for name in refused), caught.value
        else:
            check(FORMS[form](**arguments), arguments)


def test_every_form_has_every_parameter():
    """All but the layout, of which a form has its own; what a form refuses it refuses by a message."""
    every = {*inspect.signature(tilewise.attention).parameters} - {"layout", "unknown"}
    for function in (tilewise.attention_packed, tilewise.attention_cached):
        assert every <= {*inspect.signature(function).parameters}


# For signatures that others have fixed: what of `attention` their arguments say. All else is missing there.
THEIRS = {
    "override": {"mask=boolean": {"attn_mask": VISIBLE}, "mask=added": {"attn_mask": ADDED}, "scale": {"scale": 0.3}},
    "flash-attn": {
        "mask=causal": {"causal": True}, "mask=window": {"window_size": (3, 1)}, "scale": {"softmax_scale": 0.3},
        "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": ALIBI},
    },
    "flash-attn with a cache": {
        "mask=causal": {"causal": True}, "mask=window": {"window_size": (3, 1)}, "scale": {"softmax_scale": 0.3},
        "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": ALIBI},
    },
    "transformers": {
        "mask=boolean": {"attention_mask": VISIBLE}, "mask=added": {"attention_mask": ADDED.expand(BATCH, -1, -1, -1)},
        "scale": {"scaling": 0.3}, "softcap": {"softcap": 2.0}, "sink": {"s_aux": SINK},
    },
}  # fmt: skip


def of_transformers(**arguments):
    module = torch.nn.Module()
    given = {"attention_mask": None, "is_causal": False} | arguments
    return swapped(transformers.attention_forward(module, Q, K, V, **given)[0])


def under_the_override(**arguments):
    with tilewise.sdpa(backend="reference", on_fallback="error"):
        return F.scaled_dot_product_attention(Q, K, V, **arguments)


WAYS_IN = {
    "override": under_the_override,
    "flash-attn": lambda **arguments: swapped(flash_attn.flash_attn_func(*map(in_rows, (Q, K, V)), **arguments)),
    "flash-attn with a cache": lambda **arguments: swapped(
        flash_attn.flash_attn_with_kvcache(*map(in_rows, (Q, K, V)), **arguments)
    ),
    "transformers": of_transformers,
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_argument_of_signatures_that_others_fixed(way):
    for names in pairs():
        if not {*names} <= {*THEIRS[way]}:
            continue
        theirs = {name: value for one in names for name, value in THEIRS[way][one].items()}
        if "causal" in theirs and "window_size" in theirs:
            continue  # of which flash-attn makes one mask
        arguments = {name: value for one in names for name, value in VALUES[one].items()}
        check([WAYS_IN[way](**theirs)], arguments)


# ---------------------------------------------------------------------------------------------------------------------
# What is to come goes the same way: stubs of three calls, from a Request to their results


def carried(request: Request) -> tuple[Results, memory.Call]:
    """A request through resolve, memory and execute: the same Call serves it again."""
    memo.invalidate()
    assert memory.find(request) is None
    first = execute.attend(request)
    call = memory.find(request)
    again = execute.attend(request)
    assert call is not None
    assert torch.equal(first.out, again.out)
    return first, call


@dataclasses.dataclass(frozen=True)
class Descaled(Term):
    """Numbers of 8 bits stand for themselves times a factor per head: the products of q and k do for both factors."""

    kind: ClassVar[str] = "test_descaled"

    @property
    def tensors(self):
        return (Operand("descale", dims=("head",), dtype=torch.float32),)

    def apply(self, scores, where):
        factor = where.part(where.operands["descale"].view(1, -1, 1, 1)).to(scores.dtype)
        return scores * factor, factor


WIDENED = Order(torch.Tensor.float, torch.Tensor.float)  # a CPU computes with them so
NARROW = Form("bhsd in e4m3", WIDENED, WIDENED, HEADS_ROWS)


def test_a_call_in_8_bits_with_descales():
    """A caller has q, k and v in e4m3, and factors, which a term reads."""
    q, k, v = ((tensor * 4).to(torch.float8_e4m3fn) for tensor in (Q, K, V))
    factors = torch.tensor([1 / 16, 1 / 32])
    request = Request(NARROW, q, k, v, {}, {"descale": factors}, Options(scores=(Descaled(),)))
    found, call = carried(request)
    assert call.names == ("descale",)
    scores = DIM**-0.5 * (q.double() @ k.double().mT) * factors.double().view(1, HEADS, 1, 1)
    assert torch.allclose(found.out.double(), torch.softmax(scores, -1) @ v.double(), atol=1e-5)
    changed = request._replace(operands={"descale": factors * 2})
    assert memory.find(changed) is call
    assert not torch.equal(execute.attend(changed).out, found.out)


@dataclasses.dataclass(frozen=True)
class Squared(Term):
    """s -> s + rate * s^2: a function of a score, and a number of it."""

    kind: ClassVar[str] = "test_squared"
    elementwise: ClassVar[bool] = True

    rate: float

    def apply(self, scores, where):
        return scores + self.rate * scores**2, 1 + 2 * self.rate * scores


@pytest.mark.parametrize("form", [BHSD, PACKED, CACHED])
def test_a_score_function_with_a_number(form):
    """In every form; another number is another call."""
    extras, tensors = {}, (Q, K, V)
    if form is PACKED:
        extras = {"cu_seqlens_q": offsets(ROWS), "cu_seqlens_k": offsets(KEYS)}
        tensors = tuple(map(in_packed, tensors))
    elif form is CACHED:
        tensors = tuple(map(in_rows, tensors))
    request = Request(form, *tensors, extras, {}, Options(scores=(Squared(0.25),)))
    found, _ = carried(request)
    scores = DIM**-0.5 * (Q.double() @ K.double().mT)
    want = torch.softmax(scores + 0.25 * scores**2, -1) @ V.double()
    out = by_packed(found.out) if form is PACKED else swapped(found.out) if form is CACHED else found.out
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert memory.find(request._replace(options=Options(scores=(Squared(0.5),)))) is None


def test_a_call_on_a_mesh():
    """Each rank has a shard of the keys, and asks for its part with lse; the parts merge to the whole."""
    parts = []
    for shard in (slice(0, 4), slice(4, KEYS)):
        request = Request(BHSD, Q, K[:, :, shard], V[:, :, shard], {}, {}, Options(return_lse=True))
        found, call = carried(request)
        assert call.problem.needs_lse
        parts.append(partials.Partial(found.out, found.lse))
    out, lse = partials.merge(*parts)
    want_out, want_lse, _ = truth({})
    assert torch.allclose(out.double(), want_out, atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
