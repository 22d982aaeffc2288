"""The family for few queries as far as it goes without a GPU: what it takes, how it divides the keys, and its kernel,
real source and real host code, on a model of the hardware."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import emulation
from cache_cases import Case, assert_as_expected, make
from support import assert_close, assert_near, budget, make_inputs, make_problem, same_bits
from tilewise import Causal, Full, Target, Window, api, cache_append, explain
from tilewise.call.request import CACHED as BATCHED_CACHE
from tilewise.call.request import CACHED_PACKED
from tilewise.call.resolve import resolve
from tilewise.engine import SM80, SM90, decode
from tilewise.engine.program import Counter
from tilewise.masks import Cached, Packed
from tilewise.plain import reference
from tilewise.terms import KeyLengths

H200, A100, ADA = Target.named("h200"), Target.named("a100"), Target.named("rtx-4090")
BF16, FP16 = torch.bfloat16, torch.float16
DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (256, 256)]
# So few multiprocessors that units are divided, and so many CTAs that a unit has several parts.
SMALL = replace(H200, sms=3)


def problem_of(tokens=1, keys=4096, heads=(8, 2), dims=(128, 128), batch=2, dtype=BF16, **fields):
    values = {"heads_kv": heads[1], "seq_kv": keys, "head_dim_v": dims[1], "needs_lse": True} | fields
    return make_problem((batch, heads[0], tokens, dims[0]), dtype, **values)


# --- what it takes, and what it says ---


@pytest.mark.parametrize("backend", [SM80, SM90], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_few_rows_against_many_keys_are_its_own(backend, dims):
    target = H200 if backend is SM90 else A100
    problem = problem_of(dims=dims)
    assert backend.why_not(problem, target) == []
    assert backend.families(problem)[0] is decode
    for name in (H200, A100, ADA):
        for tokens in (1, 4):
            configs = decode.configs(problem_of(tokens, dims=dims), name)
            assert configs
            assert all(config.fits(name) and config.rows >= 4 * tokens for config in configs)


@pytest.mark.parametrize(
    "change",
    [
        {"needs_grad": True},
        {"dtype": torch.float32},
        {"keys": 64},
        {"tokens": 9},
        {"dropout": 0.5},
        {"mask": Packed(2, 1, 4096)},
    ],
    ids=str,
)
def test_what_it_leaves_to_a_forward(change):
    assert not decode.takes(problem_of(**change))


def test_a_config_by_name_runs_in_its_own_family():
    problem = problem_of()
    forward = SM90.families(problem.with_(needs_grad=True))[0]
    config = forward.configs(problem, H200)[0]
    (launch, *_) = SM90.program(problem, H200, config).launches
    assert launch.unit.name.startswith("forward")


def test_explain_tells_the_division_and_the_bound():
    said = str(explain(problem_of(batch=1, keys=131072, heads=(32, 8), needs_lse=False), target="h200"))
    assert "8192 steps of 128 keys of 8 units" in said
    assert "16.0 splits of a unit, put together by the last to finish" in said
    assert "128 CTAs of 256 threads, 1 per multiprocessor" in said
    assert "537 MB take 111.9 us at 4.8 TB/s" in said


def test_lengths_change_neither_the_launch_nor_its_scratch():
    """So one captured graph serves all of them."""
    made = make(Case((100, 300), page=16, heads=(8, 2)))
    told = dict(made.told)
    programs = []
    for lengths in ((100, 300), (0, 1)):
        told["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        problem = posed(made.q, made.k, made.v, told)[0]
        programs.append(SM90.program(problem, H200, SM90.configs(problem, H200)[0]))
    assert programs[0] == programs[1]
    (launch,) = programs[0].launches
    assert launch.fields["tickets"] == Counter(launch.grid)
    assert not programs[0].prepared


def test_masks_of_caches_have_a_text():
    mask = Cached(7, 16, 3, 64, Window(5, 0, "bottom-right"), True, True, False, True, True)
    assert Cached.from_text(str(mask).partition(":")[2]) == mask
    assert [one.name for one in mask.operands] == ["cu_seqlens_q", "cache_lengths", "cache_rows", "page_table"]


# --- the kernel on a model of the hardware ---

emulated = emulation.emulated


def narrow(problem, target):
    """A config of steps so short that few keys make many parts."""
    return replace(SM90.configs(problem, target)[0], warps=4, stages=3)


def run_plain(monkeypatch, problem, tensors, target=SMALL, backend=SM90, seed=0, operands=None, config=None):
    emulation.install(monkeypatch, seed=seed)
    operands = operands or {}
    return backend.bind(*tensors, problem, config, target, operands)(*tensors, operands)


@emulated
@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dims", "mask", "name", "fields"),
    [
        (1, 1000, (4, 1), (64, 64), Full(), "h200", {}),
        (3, 333, (4, 2), (64, 64), Causal("bottom-right"), "h200", {"dtype": FP16}),
        (1, 300, (8, 2), (128, 128), Window(100, 0, "bottom-right"), "a100", {}),
        (8, 257, (4, 1), (128, 128), Causal("bottom-right"), "h200", {"softcap": 5.0}),
        (1, 200, (3, 3), (96, 96), Full(), "rtx-4090", {}),
        (5, 150, (2, 1), (72, 40), Causal("bottom-right"), "a100", {}),
        (2, 130, (4, 1), (192, 128), Causal("bottom-right"), "h200", {}),
        (1, 260, (16, 1), (256, 256), Full(), "h200", {"batch": 1}),
        (1, 200, (2, 1), (256, 256), Full(), "rtx-4090", {"layout": "bshd"}),
        (16, 400, (4, 1), (64, 64), Causal("bottom-right"), "h200", {}),
        (3, 400, (1, 1), (64, 64), Causal(), "h200", {}),
        (4, 300, (2, 1), (64, 64), Causal(offset=120), "h200", {}),
    ],
    ids=str,
)
def test_outputs_on_the_model(monkeypatch, tokens, keys, heads, dims, mask, name, fields):
    target = replace(Target.named(name), sms=3)
    problem = problem_of(tokens, keys, heads, dims, mask=mask, **fields)
    torch.manual_seed(0)
    tensors = make_inputs(problem)
    backend = SM90 if name == "h200" else SM80
    assert_near(*run_plain(monkeypatch, problem, tensors, target, backend), tensors, problem)


@emulated
@pytest.mark.parametrize(
    ("keys", "heads", "batch", "sms", "runs"),
    [
        (3000, (2, 1), 1, 12, (23, 1)),  # one unit in so many parts that they are added up in groups
        (700, (4, 2), 2, 4, (2, 1)),
        (200, (3, 3), 4, 3, (1, 2)),  # whole units, two per CTA
        (2000, (3, 3), 1, 2, (0, 1)),  # three units for four CTAs: not dealt out
    ],
    ids=str,
)
def test_units_that_are_alike_are_dealt_out(monkeypatch, keys, heads, batch, sms, runs):
    problem = problem_of(1, keys, heads, (64, 64), batch=batch)
    target = replace(H200, sms=sms)
    config = narrow(problem, target)
    (launch,) = SM90.program(problem, target, config).launches
    assert (launch.fields["splits"], launch.fields["units_per_run"]) == runs
    torch.manual_seed(0)
    tensors = make_inputs(problem)
    first = run_plain(monkeypatch, problem, tensors, target, config=config)
    assert_near(*first, tensors, problem)
    assert same_bits(first, run_plain(monkeypatch, problem, tensors, target, seed=1, config=config))


@emulated
@pytest.mark.parametrize("invariant", [False, True])
def test_many_parts_are_added_up_in_groups(monkeypatch, invariant):
    """Of sequences of which one begins where the other ends, in a CTA that has a part of both."""
    case = Case((2950, 1700, 4500), tokens=2, page=64, heads=(2, 1))
    made = make(case)
    target = replace(H200, sms=30)
    found = run_cached(monkeypatch, case, made, target, batch_invariant=invariant)
    assert_as_expected(case, made, *found)
    assert same_bits(found, run_cached(monkeypatch, case, made, target, 1, batch_invariant=invariant))


@emulated
@pytest.mark.parametrize("parts", [16, 18], ids=["at once, in three rounds", "in groups of five"])
def test_parts_of_wide_rows(monkeypatch, parts):
    """16 rows of 256 numbers: of 16 parts more than a CTA has room for at once, even behind its last segment."""
    problem = problem_of(1, 128 * parts, (16, 1), (256, 256), batch=1)
    target = replace(H200, sms=parts)
    torch.manual_seed(0)
    tensors = make_inputs(problem)
    assert_near(*run_plain(monkeypatch, problem, tensors, target), tensors, problem)


def posed(q, k, v, told):
    """The problem of a call of attention_cached with these keywords, its views and operands."""
    resolved = resolve(api.cached_request(q, k, v, **({"mask": "full", "return_lse": True} | told)))
    return resolved.problem(), resolved.q, resolved.k, resolved.v, resolved.operands


def as_cached(out, lse, *, packed=False):
    """Out and lse of views in the shapes of attention_cached."""
    form = CACHED_PACKED if packed else BATCHED_CACHE
    return form.out.raw(out), form.lse.raw(lse)


def run_cached(monkeypatch, case, made, target=SMALL, seed=0, counters=True, **more):
    emulation.install(monkeypatch, seed=seed)
    if not counters:
        monkeypatch.setattr("tilewise.engine.run.work_counter", lambda device, stream, count: 0)
    problem, *views, operands = posed(made.q, made.k, made.v, made.told | more)
    assert SM90.why_not(problem, target) == []
    out, lse = SM90.bind(*views, problem, narrow(problem, target), target, operands)(*views, operands)
    return as_cached(out, lse, packed="cu_seqlens_q" in made.told)


CACHED = [
    Case((300, 1, 0, 77)),
    Case((300, 1, 0, 77), page=16),
    Case((300, 5), tokens=3, heads=(4, 2), page=16, capacity=500),
    Case((130, 257), tokens=2, dims=(128, 128), heads=(8, 2), page=64, dtype=FP16),
    Case((200, 90), page=48, starts=(13, 90)),
    Case((200, 90), tokens=2, starts=(17, 3), rows=(4, 1)),
    Case((333, 64), tokens=4, page=32, window=50),
    Case((150, 40), tokens=2, page=16, terms=("softcap", "sink")),
    Case((150, 40), tokens=2, page=16, heads=(4, 2), terms=("alibi",)),
    Case((150, 40), page=16, terms=("alibi_batched",)),
    Case((150, 40), tokens=3, page=16, terms=("keep",)),
    Case((150, 260, 31), tokens=(40, 1, 5), heads=(4, 2), page=16),
    Case((0, 100), tokens=(3, 0), page=16, terms=("sink",)),
    Case((100, 70), tokens=(20, 70), causal=False, dims=(64, 40)),
]


@emulated
@pytest.mark.parametrize("left", [False, True])
def test_key_lengths_on_the_model(monkeypatch, left):
    """Lengths of a mask: what lies beyond them is not read."""
    lengths = torch.tensor([0, 1, 130, 300], dtype=torch.int32)
    problem = problem_of(2, 300, (4, 2), (64, 64), batch=4, scores=(KeyLengths(left),))
    torch.manual_seed(0)
    q, k, v = make_inputs(problem)
    apart = k.clone(), v.clone()
    for number, length in enumerate(lengths.tolist()):
        hidden = slice(0, 300 - length) if left else slice(length, 300)
        k[number, :, hidden], v[number, :, hidden] = math.nan, math.nan
        for tensor in apart:
            tensor[number, :, hidden] = 0.0
    operands = {"key_lengths": lengths}
    out, lse = run_plain(monkeypatch, problem, (q, k, v), operands=operands)
    want, want_lse = reference.forward(q, *apart, problem, None, operands)
    assert not out.isnan().any()
    assert_close(out, want, budget(BF16, 300))
    assert_close(lse, want_lse, budget(torch.float32, 300), "lse")


@emulated
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_caches_on_the_model(monkeypatch, case):
    made = make(case)
    assert_as_expected(case, made, *run_cached(monkeypatch, case, made))


@emulated
@pytest.mark.parametrize(
    "case",
    [
        Case((700, 300, 5), tokens=2, page=16, heads=(4, 2)),
        Case((150, 260, 31), tokens=(40, 1, 5), heads=(4, 2), page=16),  # several tiles of a sequence
        Case((300, *(20,) * 33), heads=(2, 1)),  # more sequences than a warp has lanes
    ],
    ids=str,
)
@pytest.mark.parametrize("invariant", [False, True])
def test_lengths_that_the_grid_before_writes_last_of_all(monkeypatch, case, invariant):
    """The keys are divided before that grid has ended, and again if it has changed the lengths."""
    made = make(case)
    lengths = made.told["lengths"]
    true = lengths.clone()
    for before in (torch.full_like(true, 333), torch.zeros_like(true), true.flip(0), torch.full_like(true, 2**31 - 1)):
        lengths.copy_(before)
        emulation.write_late(lengths, true)
        assert_as_expected(case, made, *run_cached(monkeypatch, case, made, batch_invariant=invariant))
        assert torch.equal(lengths, true)


@emulated
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("heads", "sms", "sets"), [((8, 4), 10, 2), ((6, 6), 12, 6), ((5, 5), 4, 1), ((7, 7), 30, 1)])
def test_heads_are_read_side_by_side(monkeypatch, heads, sms, sets, invariant):
    case = Case((1300, 50, 700), heads=heads, page=16)
    made = make(case)
    target = replace(H200, sms=sms)
    problem = posed(made.q, made.k, made.v, made.told)[0]
    (launch,) = SM90.program(problem, target, narrow(problem, target)).launches
    assert launch.fields["head_sets"] == sets
    assert launch.grid % sets == 0
    found = run_cached(monkeypatch, case, made, target, batch_invariant=invariant)
    assert_as_expected(case, made, *found)
    assert same_bits(found, run_cached(monkeypatch, case, made, target, 1, batch_invariant=invariant))


@emulated
@pytest.mark.parametrize("case", [CACHED[2], CACHED[6]], ids=str)
def test_without_tickets_a_unit_has_no_parts(monkeypatch, case):
    """As while a graph is captured and none are left."""
    made = make(case)
    assert_as_expected(case, made, *run_cached(monkeypatch, case, made, counters=False))


@emulated
def test_the_order_of_blocks_changes_no_bit(monkeypatch):
    case = Case((700, 300, 5), tokens=2, page=16)
    made = make(case)
    first = run_cached(monkeypatch, case, made)
    for seed in (1, 2):
        assert same_bits(first, run_cached(monkeypatch, case, made, seed=seed))


@emulated
@pytest.mark.parametrize("counters", [True, False])
def test_batch_invariant_rows_know_nothing_of_the_batch(monkeypatch, counters):
    """The same bits alone and among others, on a GPU of any size, with tickets and without."""
    case = Case((700, 1300, 5), tokens=2, page=16, heads=(4, 2))
    made = make(case)
    out, lse = run_cached(monkeypatch, case, made, batch_invariant=True)
    assert_as_expected(case, made, out, lse)
    for number in range(3):
        own = slice(number, number + 1)
        told = made.told | {"lengths": made.told["lengths"][own], "page_table": made.told["page_table"][own]}
        alone = replace(made, q=made.q[own], told=told)
        found = run_cached(
            monkeypatch, case, alone, replace(H200, sms=1 + number), counters=counters, batch_invariant=True
        )
        assert torch.equal(found[0][0], out[number])
        assert torch.equal(found[1][0], lse[number])


@emulated
@pytest.mark.parametrize(
    ("page", "rows", "rotary", "interleaved", "apart", "dtype"),
    [
        (16, None, 0, True, True, BF16),
        (16, None, 64, True, True, BF16),
        (0, (3, 0, 2), 24, False, True, FP16),
        (0, None, 40, False, False, BF16),
    ],
)
def test_new_keys_on_the_model(monkeypatch, page, rows, rotary, interleaved, apart, dtype):
    """One launch does what PyTorch's operations do, also where the cache has no room and pages do not exist."""
    emulation.install(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, heads, 64).to(dtype) for n, heads in ((2, 4), (3, 2), (3, 2)))
    shape = (6, 16) if page else (4, 32)
    caches = [torch.randn(*shape, 2, 64).to(dtype) for _ in range(2)]
    table = torch.tensor([[4, 1], [0, 99], [-1, 3]], dtype=torch.int32) if page else None
    lengths = torch.tensor([5, 14, 31], dtype=torch.int32)
    angles = torch.rand(40, rotary // 2) * 7
    cos, sin = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary else (None, None)
    named = {"rows": None if rows is None else torch.tensor(rows, dtype=torch.int32), "page_table": table}
    want = [cache.clone() for cache in caches]
    want_q, want_lengths = cache_append.append(
        *want, k, v, lengths, **named, q=q, cos=cos, sin=sin, interleaved=interleaved, apart=apart
    )
    given = (q, k, v, *caches, cos, sin, lengths, named["rows"], table)
    got_q, got_lengths = cache_append.bound_append(given, H200, 32, interleaved, apart)(*given)
    assert torch.equal(got_lengths, want_lengths)
    assert got_lengths.tolist() == [8, 17, 32]
    for got, wanted in ((got_q, want_q), (caches[0], want[0]), (caches[1], want[1])):
        assert_close(got, wanted, torch.finfo(dtype).eps, "appended")


def test_new_keys_that_the_kernel_does_not_take_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(cache_append, "load", lambda *program: lambda *tensors: None)
    names = ("q", "k", "v", "k_cache", "v_cache", "cos", "sin")
    shapes = ((2, 1, 4, 64), *[(2, 1, 2, 64)] * 2, *[(2, 32, 2, 64)] * 2, *[(32, 8)] * 2)
    fits = {name: torch.zeros(shape, dtype=BF16) for name, shape in zip(names, shapes, strict=True)}
    numbers = (torch.zeros(2, dtype=torch.int32), None, None)

    def bound(target=H200, **changed):
        return cache_append.bound_append((*(fits | changed).values(), *numbers), target, 32, True, True)

    assert bound() is not None
    for name, tensor in fits.items():
        assert name == "q" or bound(**{name: tensor.to(FP16)}) is None, f"{name} in another dtype"
        assert bound(**{name: torch.zeros(*tensor.shape, 2, dtype=BF16)[..., 0]}) is None, f"{name} with a stride"
    for name in ("cos", "sin"):
        assert bound(**{name: torch.zeros(32, 16, dtype=BF16)[:, :8]}) is None, f"{name} with gaps"
    assert bound(k=fits["k"][:, :0], v=fits["v"][:, :0]) is None
    assert bound(k_cache=fits["k_cache"][:, :0], v_cache=fits["v_cache"][:, :0]) is None
    assert bound(Target.named("t4")) is None


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_values_stay_hidden_and_seen_ones_show(monkeypatch, bad):
    """In a block that some rows see in part, and in one that all see."""
    problem = problem_of(4, 200, (1, 1), (64, 64), batch=1, mask=Causal("bottom-right"))
    torch.manual_seed(0)
    q, k, v = make_inputs(problem)
    clean, _ = run_plain(monkeypatch, problem, (q, k, v))
    for key, blind in ((198, 2), (20, 0)):
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        for keys in (k, spoilt_k):
            out, lse = run_plain(monkeypatch, problem, (q, keys, spoilt_v))
            assert torch.equal(out[:, :, :blind], clean[:, :, :blind])
            assert not lse[:, :, :blind].isnan().any()
            assert not out[:, :, blind:].isfinite().any()


@emulated
@pytest.mark.parametrize(
    "spoil",
    [
        ("wait_for_oldest(in_flight - 1);", ""),
        ("if (is_last) ptx::add_relaxed(word, -(sharing.count << ticket.shift));", ""),
        ("2 * word + 1", "2 * word"),
        ("ptx::cp_async_wait<1>();", ""),
        ("first == 0 ? 16 : 8, 255", "8, 255"),
    ],
    ids=[
        "a missing wait",
        "a ticket that is not put back",
        "two parts in one place",
        "a missing wait for a part",
        "two groups in one ticket",
    ],
)
def test_the_model_notices(monkeypatch, spoil):
    """Two units of 21 parts each, of which one CTA has the last of the first and the first of the second."""
    case = Case((2600, 2620, 100), tokens=2, page=16, heads=(2, 1))
    made = make(case)
    problem, *views, operands = posed(made.q, made.k, made.v, made.told)

    def run_in_several_orders():
        for seed in range(8):
            emulation.install(monkeypatch, spoil=spoil, seed=seed)
            target = replace(H200, sms=42)
            bound = SM90.bind(*views, problem, narrow(problem, target), target, operands)
            assert_as_expected(case, made, *as_cached(*bound(*views, operands)))

    with pytest.raises(AssertionError):
        run_in_several_orders()
