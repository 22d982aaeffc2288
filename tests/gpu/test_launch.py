"""Loading and launching on a real GPU: streams, threads, graphs, forks, clusters and tensor maps."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tilewise.errors import DeviceError
from tilewise.jit import (
    Arguments,
    TensorMap,
    TiledMap,
    Unit,
    build,
    cache,
    function_for,
    layout_asserts,
    load,
    params_struct,
    tiled_map,
)
from tilewise.jit.launch import launch

if TYPE_CHECKING:
    from pathlib import Path

    from tilewise.jit import Function

pytestmark = pytest.mark.gpu

COUNT, THREADS = 1 << 16, 256
GRID, BLOCK = (COUNT // THREADS, 1, 1), (THREADS, 1, 1)

Params = params_struct("Params", out=ctypes.c_void_p, source=ctypes.c_void_p, scale=ctypes.c_float)
PARAMS = "struct Params { float* out; const float* source; float scale; };\n" + layout_asserts(Params, "Params")
SCALE = """
extern "C" __global__ void scale(const __grid_constant__ Params params) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  params.out[i] = params.scale * params.source[i];
}
"""


def arch(device: int = 0) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def unit(name: str, body: str, params: str = PARAMS) -> Unit:
    return Unit(name, params + body, arch())


def scale_function(device: int = 0) -> Function:
    return function_for(unit("scale", SCALE), device)


def packed(out: torch.Tensor, source: torch.Tensor, scale: float) -> Arguments:
    arguments = Arguments(Params)
    arguments.params.out, arguments.params.source, arguments.params.scale = out.data_ptr(), source.data_ptr(), scale
    return arguments


def current_stream(device: int = 0) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)


def test_a_launch_computes() -> None:
    source = torch.randn(COUNT, device="cuda")
    out = torch.full_like(source, float("nan"))
    launch(scale_function(), GRID, BLOCK, 0, current_stream(), packed(out, source, 2.5))
    assert torch.equal(out, 2.5 * source)


def test_arguments_may_be_refilled_as_soon_as_launch_returns() -> None:
    source = torch.randn(COUNT, device="cuda")
    outs = [torch.full_like(source, float("nan")) for _ in range(200)]
    arguments = packed(outs[0], source, 0.0)
    for i, out in enumerate(outs):
        arguments.params.out, arguments.params.scale = out.data_ptr(), float(i)
        launch(scale_function(), GRID, BLOCK, 0, current_stream(), arguments)
    for i, out in enumerate(outs):
        assert torch.equal(out, i * source)


def test_dynamic_shared_memory_beyond_48_kilobytes_is_opted_in() -> None:
    body = """
    extern "C" __global__ void reverse(const __grid_constant__ Params params) {
      extern __shared__ float room[];
      const int count = int(params.scale);
      for (int i = threadIdx.x; i < count; i += blockDim.x) room[i] = params.source[i];
      __syncthreads();
      for (int i = threadIdx.x; i < count; i += blockDim.x) params.out[i] = room[count - 1 - i];
    }
    """
    function = function_for(unit("reverse", body), 0)
    count = function.max_dynamic_smem // 4
    assert function.max_dynamic_smem > 48 * 1024
    source = torch.randn(count, device="cuda")
    out = torch.full_like(source, float("nan"))
    launch(function, (1, 1, 1), BLOCK, 4 * count, current_stream(), packed(out, source, float(count)))
    assert torch.equal(out, source.flip(0))


def test_too_much_shared_memory_is_refused_and_the_device_goes_on() -> None:
    function = scale_function()
    source = torch.randn(COUNT, device="cuda")
    out = torch.zeros_like(source)
    with pytest.raises(DeviceError, match=f"{function.max_dynamic_smem + 1} of {function.max_dynamic_smem} bytes"):
        launch(function, GRID, BLOCK, function.max_dynamic_smem + 1, current_stream(), packed(out, source, 1.0))
    launch(function, GRID, BLOCK, 0, current_stream(), packed(out, source, 1.0))
    assert torch.equal(out, source)


def test_a_cubin_for_another_gpu_is_refused() -> None:
    other = "sm_80" if torch.cuda.get_device_capability() >= (9, 0) else "sm_90"
    kernel = build(Unit("scale", PARAMS + SCALE, other))
    with pytest.raises(DeviceError, match=f"loading scale \\({other}\\) on cuda:0 failed"):
        load(kernel, 0)


def test_a_launch_goes_to_the_stream_it_is_given() -> None:
    source = torch.randn(COUNT, device="cuda")
    slow, fast = torch.zeros_like(source), torch.zeros_like(source)
    function = scale_function()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
    launch(function, GRID, BLOCK, 0, int(busy.cuda_stream), packed(slow, source, 3.0))
    launch(function, GRID, BLOCK, 0, int(free.cuda_stream), packed(fast, source, 4.0))
    free.synchronize()
    assert not busy.query()
    with torch.cuda.stream(free):
        assert torch.equal(fast, 4.0 * source)
    busy.synchronize()
    assert torch.equal(slow, 3.0 * source)


def test_threads_that_never_touched_cuda_can_launch() -> None:
    source = torch.randn(COUNT, device="cuda")
    outs = [torch.full_like(source, float("nan")) for _ in range(32)]
    function, stream = scale_function(), current_stream()
    torch.cuda.synchronize()
    addresses = [(out.data_ptr(), source.data_ptr()) for out in outs]
    ready = threading.Barrier(8)

    def work(first: int) -> None:
        arguments = Arguments(Params)
        ready.wait()
        for i in range(first, 32, 8):
            arguments.params.out, arguments.params.source = addresses[i]
            arguments.params.scale = float(i)
            launch(function, GRID, BLOCK, 0, stream, arguments)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert torch.equal(out, i * source)


def test_threads_that_ask_for_one_function_get_the_same() -> None:
    fresh = unit("scale", f"// threads {os.getpid()}\n{SCALE}")
    with ThreadPoolExecutor(8) as pool:
        functions = list(pool.map(lambda _: function_for(fresh, 0), range(8)))
    assert len({id(function) for function in functions}) == 1


def test_a_graph_captures_a_launch_and_even_the_first_load() -> None:
    source = torch.randn(COUNT, device="cuda")
    out = torch.zeros_like(source)
    kernel = build(unit("scale", f"// graph {os.getpid()}\n{SCALE}"))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(load(kernel, 0), GRID, BLOCK, 0, current_stream(), packed(out, source, 5.0))
    assert not out.any()
    for _ in range(2):
        source.copy_(torch.randn(COUNT))
        graph.replay()
        assert torch.equal(out, 5.0 * source)


def test_a_cold_cache_in_a_graph_capture_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    source = torch.randn(COUNT, device="cuda")
    out = torch.zeros_like(source)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        function = function_for(unit("scale", f"// cold graph {os.getpid()}\n{SCALE}"), 0)
        launch(function, GRID, BLOCK, 0, current_stream(), packed(out, source, 6.0))
    assert len(cache.entries()) == 1
    graph.replay()
    assert torch.equal(out, 6.0 * source)


def test_a_launch_after_a_fork_is_refused_with_the_reason() -> None:
    process = multiprocessing.get_context("spawn").Process(target=fork_and_launch)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def fork_and_launch() -> None:
    """Exits with 0 when a child forked after CUDA was used is told so, and its parent goes on computing."""
    source = torch.ones(COUNT, device="cuda")
    out = torch.zeros_like(source)
    function, stream, arguments = scale_function(), current_stream(), packed(out, source, 2.0)
    child = os.fork()
    if child == 0:
        try:
            launch(function, GRID, BLOCK, 0, stream, arguments)
        except DeviceError as error:
            os._exit(0 if "does not survive a fork" in str(error) else 2)
        os._exit(3)
    launch(function, GRID, BLOCK, 0, stream, arguments)
    computed = torch.equal(out, 2.0 * source)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status) if computed else 4)


@needs_hopper
def test_a_cluster_is_as_large_as_asked() -> None:
    body = """
    extern "C" __global__ void cluster(const __grid_constant__ Params params) {
      unsigned size, rank;
      asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
      asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      if (threadIdx.x == 0) params.out[blockIdx.x] = 100.0f * size + rank;
    }
    """
    out = torch.zeros(8, device="cuda")
    function = function_for(unit("cluster", body), 0)
    launch(function, (8, 1, 1), BLOCK, 0, current_stream(), packed(out, out, 0.0), cluster=(2, 1, 1))
    assert out.tolist() == [200.0, 201.0] * 4


@needs_hopper
def test_an_overlapping_launch_sees_what_came_before() -> None:
    body = """
    extern "C" __global__ void chain(const __grid_constant__ Params params) {
      asm volatile("griddepcontrol.launch_dependents;");
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      params.out[i] = params.source[i] + params.scale;
    }
    """
    function = function_for(unit("chain", body), 0)
    values = torch.zeros(COUNT, device="cuda")
    for _ in range(100):
        launch(function, GRID, BLOCK, 0, current_stream(), packed(values, values, 1.0), overlap_previous=True)
    assert torch.equal(values, torch.full_like(values, 100.0))


MapParams = params_struct("MapParams", map=TensorMap, out=ctypes.c_void_p, column=ctypes.c_int, row=ctypes.c_int)
LOAD_TILE = """
extern "C" __global__ void load_tile(const __grid_constant__ MapParams params) {
  __shared__ alignas(128) unsigned short tile[32 * 64];
  __shared__ unsigned long long barrier;
  const unsigned tile_smem = (unsigned)__cvta_generic_to_shared(tile);
  const unsigned barrier_smem = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier_smem));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier_smem), "r"(32 * 64 * 2));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(tile_smem), "l"(&params.map), "r"(params.column), "r"(params.row), "r"(barrier_smem) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier_smem) : "memory");
  for (int i = threadIdx.x; i < 32 * 64; i += blockDim.x) params.out[i] = tile[i];
}
"""


@needs_hopper
@pytest.mark.parametrize("column", [0, 8, 96])
def test_a_tensor_map_loads_the_tile_it_names_and_zeros_beyond_the_edge(column: int) -> None:
    params = "struct alignas(64) TensorMap { unsigned long long opaque[16]; };\n"
    params += "struct MapParams { TensorMap map; unsigned short* out; int column; int row; };\n"
    params += layout_asserts(MapParams, "MapParams")
    matrix = torch.randn(100, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.full((32, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    arguments: Any = Arguments(MapParams)
    shape = tiled_map(torch.bfloat16, (128, 100), (256,), (64, 32), swizzle=0)
    arguments.params.map, arguments.params.out = shape.at(matrix.data_ptr()), out.data_ptr()
    arguments.params.column, arguments.params.row = column, 80
    launch(function_for(unit("load_tile", LOAD_TILE, params), 0), (1, 1, 1), BLOCK, 0, current_stream(), arguments)
    expected = torch.zeros_like(out)
    inside = matrix[80:112, column : column + 64]
    expected[: inside.shape[0], : inside.shape[1]] = inside
    assert torch.equal(out, expected)


@needs_hopper
def test_a_map_the_hardware_cannot_have_is_refused_by_rule() -> None:
    matrix = torch.randn(100, 129, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(DeviceError, match=r"strides .* are not all multiples of 16 bytes"):
        tiled_map(torch.bfloat16, (129, 100), (258,), (64, 32)).at(matrix.data_ptr())


@needs_hopper
def test_a_thread_that_never_touched_cuda_can_make_a_map() -> None:
    """Autograd's threads may come to our backward before anything else has used CUDA on them."""
    matrix = torch.randn(100, 128, device="cuda", dtype=torch.bfloat16)
    here = tiled_map(torch.bfloat16, (128, 100), (256,), (32, 32), swizzle=64).at(matrix.data_ptr())
    fresh = TiledMap(torch.bfloat16, (128, 100), (256,), (32, 32), 64, 256)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(fresh.at, matrix.data_ptr()).result()
    assert bytes(there) == bytes(here)
