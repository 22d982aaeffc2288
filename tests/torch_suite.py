"""What PyTorch's machinery must find when it meets our attention, on any device: directly, and under the SDPA override.

A way is a function of q, k and v, and the block it is called in. All are causal, so that their results agree.
"""

from __future__ import annotations

import io
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from support import assert_close, budget
from tilewise.integrations.sdpa import sdpa

Tensor = torch.Tensor


class Way(NamedTuple):
    attend: object
    block: object = nullcontext


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, mask="causal")


def _torch_signature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


WAYS = {
    "attention": Way(_attention),
    "namesake": Way(_torch_signature),
    "override": Way(_sdpa, sdpa),
    "override, tiled": Way(_sdpa, lambda: sdpa(backend="tiled", on_fallback="error")),
}


class Block(nn.Module):
    """Grouped-query self-attention with its projections, (batch, seq, 32) -> the same."""

    def __init__(self, attend=_sdpa, heads: int = 4, heads_kv: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.attend, self.heads, self.heads_kv, self.dim = attend, heads, heads_kv, dim
        self.qkv = nn.Linear(32, (heads + 2 * heads_kv) * dim)
        self.out = nn.Linear(heads * dim, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.heads_kv, self.heads_kv), dim=1)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


def block(way: Way, device: str, dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(1)
    return Block(way.attend).to(device, dtype)


def inputs(device: str, length: int = 24, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, length, 32, device=device, dtype=dtype)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_all_close(got, want, dtype=torch.float32) -> None:
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 8 * budget(dtype, 64), "gradient")


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def check_fullgraph(way: Way, device: str, **options) -> None:
    """One graph, the same results, the same gradients."""
    torch.compiler.reset()
    model, x = block(way, device), inputs(device)
    want = model(x)
    wanted = gradients(model, want.square().sum())
    with way.block():
        got = torch.compile(model, fullgraph=True, **options)(x)
        assert_close(got, want, 8 * budget(torch.float32, 64))
        assert_all_close(gradients(model, got.square().sum()), wanted)


def check_lengths_may_change(way: Way, device: str, *, grad: bool, backend: str = "aot_eager") -> None:
    """Marked as dynamic, one graph serves all lengths, forward and backward."""
    torch.compiler.reset()
    model = block(way, device).requires_grad_(grad)
    with way.block():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for number, length in enumerate((24, 17, 40, 33)):
            x = inputs(device, length)
            torch._dynamo.mark_dynamic(x, 1)
            with torch.compiler.set_stance("fail_on_recompile") if number else nullcontext():
                got = compiled(x)
            want = model(x)
            assert_close(got, want, 8 * budget(torch.float32, 64))
            if grad:
                assert_all_close(gradients(model, got.square().sum()), gradients(model, want.square().sum()))


def check_reduce_overhead(way: Way, device: str) -> None:
    """CUDA graphs: the first call warms up, the second is recorded, attention with it, and the others replay it.

    Fresh inputs reach every one of them.
    """
    torch.compiler.reset()
    model = block(way, device, torch.bfloat16).requires_grad_(False)
    with way.block(), torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        attends = []
        for _ in range(5):
            x = inputs(device, 128, dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autograd.profiler.profile() if attends else nullcontext() as seen:
                got = compiled(x).clone()
            attends.append(seen is not None and _attends(seen))
            assert_close(got, model(x), 8 * budget(torch.bfloat16, 128))
    assert attends == [False, True, False, False, False]  # a replay calls no operator


def _attends(seen: torch.autograd.profiler.profile) -> bool:
    """An attention operator, ours or PyTorch's, was called on the host."""
    operators = ("tilewise::attention", "aten::_scaled_dot_product")
    return any(event.name.startswith(operators) for event in seen.function_events)


# ---------------------------------------------------------------------------------------------------------------------
# torch.export and AOTInductor


def exported(way: Way, device: str) -> tuple[torch.export.ExportedProgram, Block]:
    model = block(way, device).requires_grad_(False)
    length = torch.export.Dim("length", min=2, max=512)
    with way.block():
        return torch.export.export(model, (inputs(device),), dynamic_shapes={"x": {1: length}}), model


def check_export(way: Way, device: str) -> None:
    """Out to bytes and back, for another length."""
    program, model = exported(way, device)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    x = inputs(device, 31)
    with way.block():
        assert_close(loaded(x), model(x), 8 * budget(torch.float32, 64))


def check_aot_inductor(way: Way, device: str) -> None:
    """A package of machine code that calls our operator, for another length than it was exported with."""
    torch.compiler.reset()
    program, model = exported(way, device)
    with tempfile.TemporaryDirectory() as folder, way.block():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "block.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        x = inputs(device, 31)
        assert_close(loaded(x), model(x), 8 * budget(torch.float32, 64))


# ---------------------------------------------------------------------------------------------------------------------
# Training


def check_checkpointing(way: Way, device: str, *, reentrant: bool) -> None:
    model, x = block(way, device), inputs(device).requires_grad_()
    wanted = gradients(model, model(x).square().sum())
    with way.block():
        loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
        if reentrant:  # takes backward() only
            loss.backward()
            got = [parameter.grad for parameter in model.parameters()]
        else:
            got = gradients(model, loss)
    assert_all_close(got, wanted)


def check_accumulation(way: Way, device: str) -> None:
    """Gradients of two halves add up to those of the whole."""
    model, x = block(way, device), inputs(device, batch=4)
    wanted = gradients(model, model(x).square().sum())
    with way.block():
        for half in x.chunk(2):
            model(half).square().sum().backward()
    assert_all_close([parameter.grad for parameter in model.parameters()], wanted)


def check_autocast(way: Way, device: str) -> None:
    """Inputs of attention are bfloat16 then, weights and their gradients stay float32."""
    model, x = block(way, device), inputs(device)
    seen = []

    def attend(q, k, v):
        out = way.attend(q, k, v)
        seen.append((q.dtype, out.dtype))
        return out

    want = model(x)
    model.attend = attend
    with way.block(), torch.autocast(device, torch.bfloat16):
        got = model(x)
        loss = got.float().square().sum()
    assert_close(got, want, 8 * budget(torch.bfloat16, 64))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {grad.dtype for grad in gradients(model, loss)} == {torch.float32}


def train_in_parallel(rank: int, world: int, folder: str, name: str, device: str) -> None:
    """A process of `check_data_parallel`."""
    torch.set_num_threads(1)
    where = Path(folder)
    torch.distributed.init_process_group("gloo", init_method=f"file://{where / 'meet'}", rank=rank, world_size=world)
    try:
        way = WAYS[name]
        model = nn.parallel.DistributedDataParallel(block(way, device))
        torch.manual_seed(2)
        x = inputs(device, batch=2 * world)
        with way.block():
            model(x.chunk(world)[rank]).square().sum().backward()
        torch.save([parameter.grad.cpu() for parameter in model.parameters()], where / f"{rank}.pt")
        del model
        torch.distributed.barrier()  # gloo's threads must have let go of Python before it ends
    finally:
        torch.distributed.destroy_process_group()


def check_data_parallel(name: str, device: str, world: int = 2) -> None:
    """DistributedDataParallel's averages, on all ranks, are the whole batch's gradients over the number of ranks."""
    model = block(WAYS[name], device)
    torch.manual_seed(2)
    x = inputs(device, batch=2 * world)
    wanted = [grad.cpu() / world for grad in gradients(model, model(x).square().sum())]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_in_parallel, (world, folder, name, device), nprocs=world)
        for rank in range(world):
            assert_all_close(torch.load(Path(folder) / f"{rank}.pt"), wanted)
