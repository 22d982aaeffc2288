"""PyTorch's kernels: the rule model per release, its agreement with PyTorch here, and what the kernels return."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from support import (
    assert_close,
    budget,
    exact,
    in_order,
    make_bias,
    make_inputs,
    make_problem,
    masks_with_lengths,
    wanted,
)
from tilewise import Causal, Dense, Documents, Full, Problem, Target, Window
from tilewise.operands import ALL
from tilewise.problem import Strides, describe, mask_operands
from tilewise.scores import softcapped
from tilewise.torch_kernels import bugs, candidates, gates
from tilewise.torch_kernels.gates import CUDNN, EFFICIENT, FLASH, MATH

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = Target.of("cpu")
ON_CPU = (candidates.FLASH, candidates.MATH)
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")


def on(name: str, release: str = "2.13", cudnn: int | None = None) -> Target:
    return Target.named(name, torch_version=release, cudnn=cudnn)


def blackwell(release: str = "2.13", cudnn: int = 92000, capability: tuple[int, int] = (10, 0)) -> Target:
    return Target("b200", capability, torch=tuple(map(int, release.split("."))), cudnn=cudnn)  # type: ignore[arg-type]


def asked(**fields: object) -> Problem:
    """bfloat16 (2, 8, 256, 64) with some fields changed."""
    dtype = fields.pop("dtype", BF16)
    return make_problem((2, 8, 256, 64), dtype, **fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# The rule model

DENSE = Dense((256, 256))
TAIL = {"seq_kv": 704, "needs_grad": True}
REFUSALS = [
    # kernel, target, release, problem, words of the reason, a word of the remedy
    (FLASH, "h200", "2.13", {"head_dim": 320, "head_dim_v": 320}, ("head_dim 320", "over 256"), "torch-efficient"),
    (FLASH, "h200", "2.13", {"head_dim_v": 32}, ("head_dim 64", "head_dim_v 32"), "pad v"),
    (FLASH, "h200", "2.13", {"dtype": FP32}, ("float32", "bfloat16 and float16"), "cast"),
    (FLASH, "t4", "2.13", {"dtype": FP16}, ("sm_75", "sm_80 to sm_121"), "torch-efficient"),
    (FLASH, "h200", "2.13", {"mask": DENSE}, ("(256, 256)", "takes none"), "torch-efficient"),
    (FLASH, "h200", "2.13", {"mask": Window(8, 0)}, ("window:8,0", "takes none"), "torch-efficient"),
    (FLASH, "h200", "2.13", {"mask": Documents((0, 100, 256))}, ("documents:0,100,256",), "knows the mask"),
    (FLASH, "h200", "2.13", {"mask": Causal(), "seq_kv": 100}, ("seq_q 256", "seq_kv 100"), "bottom-right"),
    (FLASH, "h200", "2.13", {"strides": Strides.SCATTERED}, ("last dimension", "stride 1"), ".contiguous()"),
    (FLASH, "h200", "2.13", {"strides": Strides.UNALIGNED}, ("16-byte",), ".contiguous()"),
    (FLASH, "h200", "2.13", {"seq_kv": 0}, ("seq_kv 0", "at least 1"), "torch-math"),
    (FLASH, "h200", "2.13", {"batch": 0}, ("batch 0", "at least 1"), "torch-math"),
    (FLASH, "h200", "2.13", {"batch": 70000}, ("batch 70000", "65535"), "split"),
    (FLASH, "h200", "2.15", {"batch": 70000}, ("batch 70000", "65535"), "split"),
    (FLASH, "h200", "2.13", {"softcap": 30.0}, ("softcap:30", "does nothing to scores"), "tilewise backend"),
    (FLASH, "h200", "2.13", {"scale": -0.5}, ("scale -0.5", "above 0"), "negate q"),
    (FLASH, "cpu", "2.13", {"scale": -0.5}, ("scale -0.5", "above 0"), "negate q"),
    (FLASH, "h200", "2.13", {"transformed": True}, ("transform",), "torch-math"),
    (FLASH, "h200", "2.13", {"needs_lse": True, "needs_grad": True}, ("lse together with gradients",), "no_grad"),
    (FLASH, "h200", "2.13", {"needs_lse": True, "dropout": 0.5}, ("lse together with dropout 0.5",), "leave"),
    (FLASH, "rtx-4090", "2.13", {"head_dim": 200, "head_dim_v": 200, "needs_grad": True}, ("200", "192"), "256"),
    (FLASH, "cpu", "2.13", {"dropout": 0.25}, ("dropout 0.25", "has none"), "torch-math"),
    (FLASH, "cpu", "2.13", {"head_dim_v": 32}, ("head_dim_v 32", "equal"), "torch-math"),
    (EFFICIENT, "h200", "2.13", {"heads_kv": 2}, ("8 query heads over 2", "2.13", "from torch 2.14"), "upgrade"),
    (EFFICIENT, "h200", "2.13", {"head_dim": 60, "head_dim_v": 60}, ("head_dim 60", "multiple of 8"), "pad"),
    (EFFICIENT, "h200", "2.13", {"head_dim": 62, "head_dim_v": 62, "dtype": FP32}, ("62", "multiple of 4"), "pad"),
    (EFFICIENT, "h200", "2.13", {"dtype": FP64}, ("float64", "float32"), "torch-math"),
    (EFFICIENT, "t4", "2.13", {}, ("bfloat16 on sm_75", "float16 and float32"), "cast"),
    (EFFICIENT, "h200", "2.13", {"heads_q": 70000, "heads_kv": 70000}, ("heads 70000", "65535"), "split"),
    (EFFICIENT, "cpu", "2.13", {}, ("no CUDA device",), "torch-flash"),
    (CUDNN, "h200", "2.13", {"dtype": FP32}, ("float32", "bfloat16 and float16"), "torch-efficient"),
    (CUDNN, "h200", "2.13", {"deterministic": True}, ("deterministic",), "torch-flash"),
    (CUDNN, "h200", "2.13", {"head_dim": 60, "head_dim_v": 60}, ("head_dim 60", "multiple of 8"), "torch-flash"),
    (CUDNN, "h200", "2.13", {"seq_kv": 1}, ("seq_kv 1",), "torch-flash"),
    (CUDNN, "h200", "2.13", {"seq_q": 1, "dropout": 0.5}, ("seq_q 1 with dropout",), "torch-flash"),
    (CUDNN, "h200", "2.13", {"dropout": 0.1}, ("dropout 0.1", "1/16"), "0.0625"),
    (CUDNN, "h200", "2.13", {"batch": 70000}, ("batch 70000", "65535"), "split"),
    (CUDNN, "h200", "2.12", {"batch": 70000}, ("batch 70000", "65535", "2.12"), "split"),
    (CUDNN, "a100", "2.13", {"head_dim": 192, "head_dim_v": 192}, ("192", "over 128", "sm_80"), "torch-flash"),
    (CUDNN, "t4", "2.13", {"dtype": FP16}, ("sm_75", "sm_80 to sm_121"), "torch-efficient"),
    (CUDNN, "cpu", "2.13", {}, ("no CUDA device",), "torch-flash"),
    (MATH, "h200", "2.13", {"needs_lse": True}, ("lse",), "reference"),
    (MATH, "cpu", "2.13", {"softcap": 30.0}, ("softcap:30",), "tilewise backend"),
]


@pytest.mark.parametrize(("name", "target", "release", "fields", "words", "remedy"), REFUSALS)
def test_a_refusal_names_value_limit_and_remedy(
    name: str, target: str, release: str, fields: dict[str, object], words: tuple[str, ...], remedy: str
) -> None:
    reasons = gates.why_not(name, asked(**fields), on(target, release))
    matching = [reason for reason in reasons if all(word in reason.what for word in words)]
    assert len(matching) == 1, f"{words} in {reasons}"
    assert remedy in matching[0].remedy


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "target", "fields"),
    [
        (FLASH, "h200", {}),
        (FLASH, "a100", {"head_dim": 60, "head_dim_v": 60, "strides": Strides.UNALIGNED}),  # padded copies are aligned
        (FLASH, "h200", {"mask": Causal(), "heads_kv": 2, "needs_grad": True}),
        (FLASH, "h200", {"mask": Causal("bottom-right"), "seq_q": 3}),  # its own causal
        (FLASH, "h200", {"mask": Window(None, None)}),  # hides nothing
        (FLASH, "rtx-4090", {"head_dim": 256, "head_dim_v": 256, "needs_grad": True}),
        (FLASH, "rtx-4090", {"head_dim": 200, "head_dim_v": 200}),  # which it does not train
        (FLASH, "h200", {"head_dim": 200, "head_dim_v": 200, "needs_grad": True}),
        (FLASH, "cpu", {"mask": Window(3, 0), "heads_kv": 2, "dtype": FP64}),
        (EFFICIENT, "t4", {"dtype": FP32, "head_dim": 63, "head_dim_v": 63, "strides": Strides.UNALIGNED}),
        (EFFICIENT, "h200", {"dtype": FP32, "head_dim": 320, "head_dim_v": 64, "mask": DENSE}),
        (CUDNN, "h200", {"mask": DENSE, "heads_kv": 2, "needs_grad": True}),
        (CUDNN, "a100", {"head_dim": 128, "head_dim_v": 64, "dropout": 0.125}),
        (MATH, "t4", {"dtype": FP64, "head_dim_v": 7, "dropout": 0.1, "needs_grad": True}),
        (MATH, "cpu", {"seq_kv": 0, "transformed": True}),
    ],
)
def test_accepted_in_every_release(name: str, target: str, fields: dict[str, object], release: str) -> None:
    assert gates.why_not(name, asked(**fields), on(target, release)) == []


def test_every_reason_is_given_not_only_the_first() -> None:
    problem = asked(dtype=FP32, head_dim=320, head_dim_v=64, mask=DENSE, softcap=5.0, strides=Strides.SCATTERED)
    reasons = [reason.what for reason in gates.why_not(FLASH, problem, on("h200"))]
    assert len(reasons) == 6
    for word in ("float32", "mask tensor", "head_dim_v 64", "over 256", "last dimension", "softcap"):
        assert sum(word in reason for reason in reasons) >= 1, word


def test_grouped_queries_reach_efficient_with_2_14() -> None:
    refused = [release for release in RELEASES if gates.gates(EFFICIENT, asked(heads_kv=2), on("h200", release))]
    assert refused == ["2.11", "2.12", "2.13"]


def test_cudnn_dropout_has_steps_of_a_sixteenth_since_2_12() -> None:
    refused = [release for release in RELEASES if gates.gates(CUDNN, asked(dropout=0.1), on("h200", release))]
    assert refused == ["2.12", "2.13", "2.14", "2.15"]


def test_batches_over_the_grid_limit_become_gates_late_and_are_always_refused() -> None:
    huge = asked(batch=70000)
    gated = {
        name: [r for r in RELEASES if gates.gates(name, huge, on("h200", r))] for name in (FLASH, EFFICIENT, CUDNN)
    }
    assert gated == {FLASH: ["2.15"], EFFICIENT: [], CUDNN: ["2.13", "2.14", "2.15"]}
    assert all(gates.why_not(name, huge, on("h200", r)) for name in (FLASH, CUDNN) for r in RELEASES)


@pytest.mark.parametrize(
    ("target", "dims", "limit"),
    [
        (on("h200", "2.11", 91900), (256, 256), 256),
        (on("h200", "2.11", 90800), (256, 256), 128),
        (on("h200", "2.13", 92000), (256, 256), 256),
        (on("h200", "2.14", 92200), (256, 256), 128),
        (on("h200", "2.14", 92200), (192, 128), 192),
        (on("h200", "2.14", 92400), (256, 256), 256),
        (on("a100", "2.14", 92400), (256, 256), 128),
        (blackwell("2.13"), (256, 256), 128),
        (blackwell("2.13"), (192, 128), 192),
        (blackwell("2.14", 92400), (256, 256), 256),
        (blackwell("2.15", 92500, (10, 7)), (256, 256), 128),
        (blackwell("2.15", 92600, (10, 7)), (256, 256), 256),
        (on("rtx-4090", "2.15", 92600), (192, 128), 128),
    ],
)
def test_cudnn_head_dim_limit(target: Target, dims: tuple[int, int], limit: int) -> None:
    problem = asked(head_dim=dims[0], head_dim_v=dims[1])
    assert gates.cudnn_head_dim_limit(problem, target) == limit
    assert bool(gates.gates(CUDNN, problem, target)) == (max(dims) > limit)


def test_cudnn_trains_fewer_head_dims_than_it_infers_since_2_14() -> None:
    target = on("h200", "2.14", 92400)
    verdicts = {
        dims: bool(gates.gates(CUDNN, asked(head_dim=dims[0], head_dim_v=dims[1], needs_grad=True), target))
        for dims in ((128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
    }
    assert verdicts == {(128, 128): False, (160, 160): True, (192, 128): False, (192, 192): True, (256, 256): False}
    assert not gates.gates(CUDNN, asked(head_dim=160, head_dim_v=160), target)


def test_pytorch_gates_the_cudnn_bugs_late() -> None:
    decode, tail = asked(seq_q=1), asked(**TAIL)
    assert [r for r in RELEASES if gates.gates(CUDNN, decode, blackwell(r, 92000))] == ["2.14", "2.15"]
    assert [r for r in RELEASES if gates.gates(CUDNN, tail, on("h200", r, 92000))] == ["2.15"]
    assert not gates.gates(CUDNN, tail, on("h200", "2.15", 92600))


def test_cudnn_is_kept_from_the_shape_that_crashes_the_process() -> None:
    single = make_problem((1, 1, 1, 64), BF16, seq_kv=128, needs_grad=True)
    (reason,) = gates.why_not(CUDNN, single, on("h200", "2.15", 92600))
    assert "cudnn-frontend#1071" in reason.what
    assert not gates.why_not(CUDNN, single, on("h200", "2.11", 91900))


def test_no_cudnn_is_a_reason() -> None:
    (reason,) = gates.gates(CUDNN, asked(), on("h200", cudnn=0))
    assert "no cuDNN" in reason.what
    (reason,) = gates.gates(CUDNN, asked(), on("h200", cudnn=8907))
    assert "needs 9.0" in reason.what


@pytest.mark.parametrize(
    ("target", "order"),
    [
        (on("h200"), (CUDNN, FLASH, EFFICIENT, MATH)),
        (on("h200", cudnn=91500), (FLASH, EFFICIENT, MATH, CUDNN)),
        (blackwell(capability=(10, 3)), (CUDNN, FLASH, EFFICIENT, MATH)),
        (on("a100"), (FLASH, EFFICIENT, MATH, CUDNN)),
        (on("cpu"), (FLASH, MATH)),
    ],
)
def test_priority(target: Target, order: tuple[str, ...]) -> None:
    assert gates.priority(target) == order


@pytest.mark.parametrize(
    ("target", "fields", "choice"),
    [
        (on("h200"), {}, CUDNN),
        (on("h200"), {"deterministic": True}, FLASH),
        (on("h200"), {"head_dim": 60, "head_dim_v": 60}, FLASH),
        (on("h200"), {"mask": Dense((8, 256, 256))}, EFFICIENT),  # cuDNN takes 2-D and 4-D masks only
        (on("h200"), {"dtype": FP32}, EFFICIENT),
        (on("h200"), {"dtype": FP32, "heads_kv": 2}, MATH),  # the silent fallback of 2.11 to 2.13 ...
        (on("h200", "2.14"), {"dtype": FP32, "heads_kv": 2}, EFFICIENT),  # ... and its end
        (on("a100"), {"mask": DENSE}, EFFICIENT),
        (on("a100"), {"mask": DENSE, "heads_kv": 2}, MATH),
        (on("a100"), {"mask": Causal("bottom-right"), "seq_q": 3}, EFFICIENT),
        (on("t4"), {"dtype": FP16}, EFFICIENT),
        (on("cpu"), {}, FLASH),
        (on("cpu"), {"mask": Dense((8, 256, 256))}, MATH),
        (on("cpu"), {"dropout": 0.1}, MATH),
    ],
)
def test_default_choice(target: Target, fields: dict[str, object], choice: str) -> None:
    assert gates.default_choice(asked(**fields), target) == choice


HAZARDS = [
    (CUDNN, on("h200", "2.11"), TAIL | {"mask": Dense((256, 704))}, "pytorch#196678"),
    (CUDNN, on("h200", "2.11"), TAIL | {"mask": Window(8, 0)}, "pytorch#196678"),
    (CUDNN, on("h200", "2.11"), TAIL, "pytorch#196678"),
    (CUDNN, on("h200", "2.11"), TAIL | {"mask": Causal()}, ""),
    (CUDNN, on("h200", "2.11"), TAIL | {"needs_grad": False}, ""),
    (CUDNN, on("h200", "2.11"), TAIL | {"seq_kv": 768}, ""),
    (CUDNN, on("h200", "2.14", 92600), TAIL, ""),
    (CUDNN, on("a100", "2.11"), TAIL, ""),
    (CUDNN, blackwell(), {"seq_q": 1}, "pytorch#193893"),
    (CUDNN, blackwell(capability=(11, 0)), {"seq_q": 1}, "pytorch#193893"),
    (CUDNN, blackwell(capability=(12, 0)), {"seq_q": 1}, ""),
    (CUDNN, blackwell(cudnn=92401), {"seq_q": 1}, ""),
    (CUDNN, blackwell(cudnn=92600), {"seq_q": 1}, ""),
    (CUDNN, blackwell(), {}, ""),
    (CUDNN, on("h200", "2.15", 92600), {"seq_q": 1, "needs_grad": True}, "cudnn-frontend#1072"),
    (EFFICIENT, on("a100"), {"seq_q": 70000, "seq_kv": 70000, "mask": Dense((1, 70000))}, "pytorch#187227"),
    (EFFICIENT, on("a100"), {"seq_q": 70000, "seq_kv": 70000, "mask": Causal()}, ""),
    (MATH, blackwell(), {"seq_q": 1}, ""),
]


@pytest.mark.parametrize(("name", "target", "fields", "issue"), HAZARDS)
def test_known_wrong_results_are_hazards_and_notices(
    name: str, target: Target, fields: dict[str, object], issue: str
) -> None:
    problem = asked(**fields)
    found = bugs.hazardous(name, problem, target)
    assert found == candidates.hazard(name, problem, target)
    assert issue in found if issue else not found
    assert (found in bugs.notices(name, problem, target)) == bool(issue)


@pytest.mark.parametrize(
    ("name", "target", "fields", "words"),
    [
        (MATH, "h200", {}, ("score matrix", "4.0 MiB")),
        (MATH, "h200", {"heads_kv": 2}, ("expands K and V from 2 to 8 heads",)),
        (FLASH, "h200", {"head_dim": 60, "head_dim_v": 60}, ("pad head_dim 60 to 64",)),
        (EFFICIENT, "h200", {"mask": Window(8, 0)}, ("window:8,0", "0.2 MiB mask")),
        (EFFICIENT, "h200", {"mask": DENSE}, ("boolean mask into an additive one",)),
        (EFFICIENT, "h200", {}, ("copies out", "bhsd")),
        (
            CUDNN,
            "h200",
            {"mask": Causal("bottom-right"), "seq_q": 3},
            ("causal:bottom-right", "mask of (seq_q, seq_kv)"),
        ),
        (FLASH, "cpu", {"mask": Documents((0, 100, 256))}, ("runs 2 times",)),
        (FLASH, "cpu", {"mask": Documents((0, 1, 256), inner=Window(8, 0))}, ("window:8,0", "0.2 MiB mask")),
    ],
)
def test_notices_tell_the_cost(name: str, target: str, fields: dict[str, object], words: tuple[str, ...]) -> None:
    texts = bugs.notices(name, asked(**fields), on(target))
    assert any(all(word in text for word in words) for text in texts), texts


@pytest.mark.parametrize("name", [FLASH, CUDNN])
def test_a_plain_call_of_a_fused_kernel_has_nothing_to_note(name: str) -> None:
    assert bugs.notices(name, asked(), on("h200")) == []


def test_a_release_that_was_not_read_is_noted() -> None:
    assert bugs.notices(FLASH, asked(), on("h200", "2.15")) == []
    (text,) = bugs.notices(FLASH, asked(), on("h200", "2.16"))
    assert "2.11 to 2.15" in text
    assert "torch 2.16" in text


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Problems of any kind, small or absurd, for the rules alone."""
    mask, seq_q, seq_kv = draw(masks_with_lengths())
    heads_kv, group = draw(st.sampled_from([0, 1, 2, 70000])), draw(st.sampled_from([1, 4]))
    dim = draw(st.sampled_from([1, 8, 60, 64, 128, 192, 200, 256, 512]))
    kind = draw(st.sampled_from(["structural", "boolean", "additive"]))
    if kind != "structural":
        shapes = [(seq_kv,), (seq_q, seq_kv), (1, seq_q, 1), (1, 1, 1, seq_kv)]
        mask = Dense(draw(st.sampled_from(shapes)), kind == "additive")
    flag = st.booleans()
    return Problem(
        batch=draw(st.sampled_from([0, 1, 3, 70000])),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=dim,
        head_dim_v=draw(st.sampled_from([dim, 128])),
        dtype=draw(st.sampled_from([BF16, FP16, FP32, FP64])),
        mask=mask,
        scores=softcapped(draw(st.sampled_from([0.0, 3.0]))),
        dropout=draw(st.sampled_from([0.0, 0.1, 0.5])),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        strides=draw(st.sampled_from(list(Strides))),
        needs_grad=draw(flag),
        needs_lse=draw(flag),
        deterministic=draw(flag),
        transformed=draw(flag),
    )


targets = st.builds(
    lambda name, release: blackwell(release) if name == "b200" else on(name, release),
    st.sampled_from(["h200", "a100", "rtx-a6000", "rtx-4090", "t4", "cpu", "b200"]),
    st.sampled_from(RELEASES),
)


@given(problem=problems(), target=targets)
def test_the_rules_answer_for_every_problem(problem: Problem, target: Target) -> None:
    assert gates.default_choice(problem, target) in gates.priority(target)
    for candidate in candidates.CANDIDATES:
        reasons = candidate.why_not(problem, target)
        assert len(set(reasons)) == len(reasons)
        assert all(reason.what and reason.remedy for reason in reasons)
        assert set(gates.gates(candidate.name, problem, target)) <= set(reasons)
        assert all(candidate.notices(problem, target))
        assert candidate.configs(problem, target) == []


# ---------------------------------------------------------------------------------------------------------------------
# The rule model against PyTorch here


@st.composite
def cpu_calls(draw: st.DrawFn) -> tuple[Problem, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tensors that PyTorch may be asked about, with the Problem they pose."""
    mask, seq_q, seq_kv = draw(masks_with_lengths())
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dim = draw(st.sampled_from([1, 7, 8, 16]))
    bias = None
    kind = draw(st.sampled_from(["structural", "boolean", "additive"]))
    dtype = draw(st.sampled_from([BF16, FP16, FP32, FP64]))
    if kind != "structural":
        heads = heads_kv * group
        shapes = [(seq_q, seq_kv), (1, seq_kv), (heads, seq_q, seq_kv), (2, 1, 1, seq_kv), (2, heads, seq_q, 1)]
        bias = torch.zeros(draw(st.sampled_from(shapes)), dtype=torch.bool if kind == "boolean" else dtype)
    scattered = draw(st.booleans()) and dim > 1

    def tensor(heads: int, seq: int, size: int) -> torch.Tensor:
        if scattered:
            return torch.randn(2, heads, size, seq).to(dtype).transpose(2, 3)
        return torch.randn(2, seq, heads, size).to(dtype).transpose(1, 2)

    q, k = tensor(heads_kv * group, seq_q, dim), tensor(heads_kv, seq_kv, dim)
    v = tensor(heads_kv, seq_kv, draw(st.sampled_from([dim, 8])))
    q.requires_grad_(draw(st.booleans()))
    dropout = draw(st.sampled_from([0.0, 0.0, 0.5]))
    problem = describe(q, k, v, mask=mask if bias is None else bias, dropout=dropout)
    return problem.with_(deterministic=draw(st.booleans())), q, k, v, bias


@given(call=cpu_calls())
def test_the_rules_agree_with_pytorch_on_cpu(
    call: tuple[Problem, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> None:
    problem, q, k, v, bias = call
    assert candidates.disagreements(q, k, v, problem, CPU, bias) == []


def test_ask_torch_gives_its_reasons_and_leaves_no_trace() -> None:
    q, k, v = make_inputs(make_problem((1, 2, 4, 8)))
    answers = candidates.ask_torch(q, k, v, make_problem((1, 2, 4, 8), dropout=0.5))
    assert not answers[FLASH].usable
    assert any("dropout" in warning for warning in answers[FLASH].warnings)
    assert answers[MATH] == (True, [])
    assert not torch.is_warn_always_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_disagreement_is_told() -> None:
    problem = make_problem((1, 2, 4, 8))
    q, k, v = make_inputs(problem)
    wrong = problem.with_(head_dim_v=4)  # rules hear of a smaller v than PyTorch sees
    told = candidates.disagreements(q, k, v, wrong, CPU)
    assert any("PyTorch takes torch-flash, the rules refuse" in text for text in told)
    assert any("PyTorch would run torch-flash, the rules say torch-math" in text for text in told)


# ---------------------------------------------------------------------------------------------------------------------
# What the kernels return

CASES = {
    "plain": {},
    "grouped": {"heads_q": 6, "heads_kv": 2},
    "narrow values": {"head_dim_v": 8},
    "few queries": {"seq_q": 5},
    "few keys": {"seq_kv": 9},
    "scale": {"scale": -0.5},
    "one of each": {"seq_q": 1, "seq_kv": 1, "heads_q": 1, "heads_kv": 1},
    "odd sizes": {"seq_q": 37, "seq_kv": 53, "head_dim": 13, "head_dim_v": 13},
}
MASKS = {
    "full": lambda p: Full(),
    "causal": lambda p: Causal(),
    "causal bottom-right": lambda p: Causal("bottom-right"),
    "window": lambda p: Window(4, 1),
    "window bottom-right": lambda p: Window(3, 0, "bottom-right"),
    "documents": lambda p: Documents((0, p.seq_q // 3, p.seq_q), (0, 0, p.seq_kv), Causal()),
    "boolean": lambda p: Dense((p.batch, 1, p.seq_q, p.seq_kv)),
    "boolean per head": lambda p: Dense((p.heads_q, p.seq_q, p.seq_kv)),
    "boolean keys": lambda p: Dense((p.batch, 1, 1, p.seq_kv)),
    "additive": lambda p: Dense((p.seq_q, p.seq_kv), True),
    "additive per row": lambda p: Dense((p.batch, p.heads_q, p.seq_q, 1), True),
}


def hide_rows(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Make sure that some row sees nothing."""
    if bias is not None:
        bias.select(-2, 0).fill_(False if bias.dtype == torch.bool else -torch.inf)
    return bias


@pytest.mark.parametrize(("dtype", "layout"), [(FP32, "bhsd"), (BF16, "bshd"), (FP16, "bhsd"), (FP64, "bshd")])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_match_float64(case: str, mask: str, dtype: torch.dtype, layout: str) -> None:
    plain = make_problem((2, 4, 24, 16), dtype, layout=layout, needs_grad=True, **CASES[case])
    problem = plain.with_(mask=MASKS[mask](plain))
    q, k, v = make_inputs(problem)
    bias = hide_rows(make_bias(problem))
    dout = torch.randn(2, problem.heads_q, problem.seq_q, problem.head_dim_v).to(dtype)
    truth = dict(zip(("out", "lse", "dq", "dk", "dv"), exact(q, k, v, problem, bias, dout), strict=True))
    unseen = truth["lse"] == -math.inf
    tolerance = budget(dtype, problem.seq_kv)
    willing = [candidate for candidate in ON_CPU if not candidate.why_not(problem, CPU)]
    assert candidates.MATH in willing
    for candidate in willing:
        out, lse = candidate.forward(q, k, v, problem, None, mask_operands(bias))
        grads = in_order(candidate.backward(dout, None, q, k, v, out, lse, problem, None, mask_operands(bias)))
        found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        if candidate is candidates.FLASH:
            assert lse is not None
            assert lse.is_contiguous()
            found["lse"] = lse
        for what, tensor in found.items():
            assert tensor is not None
            assert_close(tensor, truth[what], tolerance, f"{candidate.name} {what}")
        assert not out[unseen].any()
        assert not found["dq"][unseen].any()
        stored = out.transpose(1, 2) if layout == "bshd" else out
        assert stored.is_contiguous()


def test_lse_is_returned_exactly_when_needed() -> None:
    problem = make_problem((1, 2, 8, 8))
    q, k, v = make_inputs(problem)
    for needs in ({"needs_lse": True}, {"needs_grad": True}):
        lse = candidates.FLASH.forward(q, k, v, problem.with_(**needs))[1]
        assert lse is not None
        assert_close(lse, exact(q, k, v, problem)[1], budget(FP32, 8), "lse")
        assert lse.dtype == FP32
    assert candidates.FLASH.forward(q, k, v, problem)[1] is None
    assert candidates.MATH.forward(q, k, v, problem.with_(needs_grad=True))[1] is None


@pytest.mark.parametrize("candidate", ON_CPU, ids=lambda candidate: candidate.name)
@pytest.mark.parametrize(
    "wants", [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]
)
def test_only_wanted_gradients_come_back(candidate: candidates.Candidate, wants: tuple[bool, bool, bool]) -> None:
    problem = make_problem((1, 4, 8, 8), FP64, heads_kv=2, needs_grad=True, mask=Causal())
    q, k, v = make_inputs(problem)
    dout = torch.randn_like(q)
    out, lse = candidate.forward(q, k, v, problem)
    grads = in_order(candidate.backward(dout, None, q, k, v, out, lse, problem, wants=wanted(*wants)))
    for grad, want, true in zip(grads, wants, exact(q, k, v, problem, None, dout)[2:], strict=True):
        assert (grad is not None) == want
        if grad is not None:
            assert_close(grad, true, budget(FP64), "grad")


def test_inputs_are_left_as_they_were() -> None:
    problem = make_problem((1, 2, 6, 8), mask=Dense((6, 6), True), needs_grad=True)
    q, k, v = make_inputs(problem)
    bias = hide_rows(torch.zeros(6, 6))
    assert bias is not None
    before = [tensor.clone() for tensor in (q, k, v, bias)]
    for candidate in ON_CPU:
        out, lse = candidate.forward(q, k, v, problem, None, mask_operands(bias))
        candidate.backward(torch.ones_like(out), None, q, k, v, out, lse, problem, None, mask_operands(bias))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias), strict=True))


def test_math_can_be_transformed() -> None:
    problem = make_problem((2, 4, 5, 8), seq_kv=6, mask=Dense((5, 6)), transformed=True)
    q, k, v = (torch.randn(3, 2, 4, seq, 8) for seq in (5, 6, 6))
    bias = torch.rand(3, 5, 6) > 0.3

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return candidates.MATH.forward(q, k, v, problem, None, mask_operands(bias))[0]

    together = torch.vmap(run)(q, k, v, bias)
    for n in range(3):
        assert_close(together[n], exact(q[n], k[n], v[n], problem, bias[n])[0], budget(FP32, 6))
    _, tangent = torch.func.jvp(lambda q: run(q, k[0], v[0], bias[0]), (q[0],), (torch.ones_like(q[0]),))
    assert tangent.any()


@pytest.mark.parametrize("fields", [{"seq_kv": 0}, {"seq_q": 0}, {"batch": 0}, {"heads_q": 0, "heads_kv": 0}])
def test_empty_problems(fields: dict[str, int]) -> None:
    problem = make_problem((2, 3, 4, 8), needs_grad=True, **fields)
    q, k, v = make_inputs(problem)
    assert not candidates.MATH.why_not(problem, CPU)
    assert candidates.FLASH.why_not(problem, CPU)
    out, lse = candidates.MATH.forward(q, k, v, problem)
    assert out.shape == q.shape
    assert not out.any()
    assert lse is not None
    assert (lse == -math.inf).all()
    grads = in_order(candidates.MATH.backward(torch.ones_like(out), None, q, k, v, out, lse, problem))
    assert [None if grad is None else grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert not any(grad is None or grad.any() for grad in grads)


@pytest.mark.parametrize("mask", ["full", "causal", "window bottom-right", "boolean", "additive"])
def test_dropout_is_pytorchs_own(mask: str) -> None:
    plain = make_problem((2, 4, 24, 16), heads_kv=2, seq_q=20, dropout=0.5, needs_grad=True)
    problem = plain.with_(mask=MASKS[mask](plain))
    q, k, v = make_inputs(problem, grad=True)
    bias = hide_rows(make_bias(problem))
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    given = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv) if bias is None else bias
    torch.manual_seed(7)
    out = candidates.MATH.dropout_forward(q, k, v, problem, mask_operands(bias))
    torch.manual_seed(7)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, k, v, given, 0.5, enable_gqa=True, scale=problem.scale)
    assert_close(out, want, budget(FP32, problem.seq_kv))
    assert out.is_contiguous()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


# ---------------------------------------------------------------------------------------------------------------------
# What is prepared for CUDA kernels, as far as a machine without one can tell


@pytest.mark.parametrize("shape", [(20, 37), (3, 1, 1, 37), (3, 4, 20, 37), (1, 20, 1), (20, 48)])
def test_the_mask_for_efficient_is_aligned_and_unchanged(shape: tuple[int, ...]) -> None:
    seq_kv = max(shape[-1], 37)
    problem = make_problem((3, 4, 20, 8), seq_kv=seq_kv, mask=Dense(shape, True))
    given = torch.randn(shape)
    mask = candidates._aligned_mask(candidates._four_dims(given), problem)
    assert mask is not None
    assert torch.equal(mask, given.expand(3, 4, 20, seq_kv))
    assert mask.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in mask.stride()[:-1])
    assert mask.storage_offset() % 16 == 0
    kept = mask.untyped_storage().nbytes() // 4
    assert kept <= math.prod(shape[:-1]) * 48, "only the given rows are stored, broadcast sizes are not"


def test_cudnn_hides_keys_with_the_lowest_half() -> None:
    problem = make_problem((1, 1, 2, 8), FP16, mask=Dense((2, 2)))
    q = torch.zeros(1, 1, 2, 8, dtype=FP16)
    mask = torch.tensor([[True, False], [True, True]])
    for name, hidden in ((CUDNN, -65504.0), (EFFICIENT, -math.inf)):
        additive = candidates._mask_tensor(name, problem, q, mask)
        assert additive is not None
        assert additive.tolist() == [[[[0.0, hidden], [0.0, 0.0]]]]


@pytest.mark.parametrize("name", [EFFICIENT, CUDNN])
def test_heads_that_are_no_multiple_of_eight_are_refused(name: str) -> None:
    assert gates.why_not(name, make_problem((2, 8, 50, 60), BF16), on("h200"))


@pytest.mark.parametrize(("name", "head_dim"), [(FLASH, 64), (FLASH, 60), (EFFICIENT, 64), (CUDNN, 64)])
def test_cuda_operators_are_called_by_their_schemas(name: str, head_dim: int) -> None:
    """On the meta device the operators check arguments and infer shapes, and compute nothing."""
    mask = Full() if name == FLASH else Dense((50, 70), True)
    problem = make_problem((2, 8, 50, head_dim), BF16, seq_kv=70, mask=mask, needs_grad=True)
    q, k, v = make_inputs(problem, "meta")
    bias = torch.empty(1, 1, 50, 70, dtype=BF16, device="meta") if name != FLASH else None
    kernel = candidates._KERNELS[name]
    out, lse = kernel.forward(q, k, v, problem, bias)
    assert lse is not None
    assert (out.shape, lse.shape) == (q.shape, (2, 8, 50))
    grads = kernel.backward(out, q, k, v, out, lse, problem, bias, ALL)
    assert [grad.shape for grad in grads if grad is not None] == [q.shape, k.shape, v.shape]
