"""The lecture's first fused kernel, in Python: Numba CUDA. Runs in Numba's simulator where there is no GPU.

    grid (row tiles, heads, batches), threads in one line; every tile lies in shared memory, out included:

    1. load K_j, V_j
    2. S = scale Q_i K_j^T, softcap, -inf where hidden         a thread for each score
    3. m' = max(m, rowmax S), alpha = e^(m - m'), P = e^(S - m'), l = alpha l + rowsum P    a thread for each row
    4. O = alpha O + P V_j                                     a thread for each element of out
    5. out = O / l, lse = m + log l

The ceiling: a kernel's static shared memory ends at 48 KB, whatever the GPU has (an H200 has 227 KB for a block that
asks for it through the driver, which Numba's `shared.array` does not). Four float32 tiles of a head of 128 and 16 rows
take 33 KB, of 32 rows 68 KB: so `configs` shrinks the tiles as the heads grow, and each halving doubles how often K and
V are read. The way out is the next rung: out belongs in registers.

Inputs are converted to float32 first: what Numba has of bfloat16 is not enough for this kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import fresh
from ..backend import ALL, NO_OPERANDS, empty_lse, empty_out
from ..errors import Reason, UnsupportedProblem
from ..target import Target
from . import missing
from .bands import FLOATS, refusals, shifts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..backend import Grads, Operands, Wants
    from ..problem import Problem

HEAD_DIM_LIMIT = 512
SHARED_LIMIT = 48 * 1024
SIMULATOR = "NUMBA_ENABLE_CUDASIM"
_THREADS, _SIMULATED_THREADS = 256, 8
_SIMULATED_WORK = 1 << 20  # multiply-adds: the simulator takes about a second for so many
_MAX_BLOCKS = 65535

# numba.cuda, once a kernel was asked for. A global, because the simulator replaces it there while a kernel runs.
cuda: Any = None


@dataclass(frozen=True, slots=True)
class Config:
    block_q: int
    block_kv: int

    @property
    def label(self) -> str:
        return f"{self.block_q}x{self.block_kv}"

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Q and O, K and V, the scores, and maximum, sum and alpha of each row: all float32."""
        tiles = (self.block_q + self.block_kv) * (head_dim + head_dim_v)
        return 4 * (tiles + self.block_q * self.block_kv + 3 * self.block_q)


def simulated() -> bool:
    """Whether Numba was told to simulate the GPU; it reads the variable when it is imported."""
    return os.environ.get(SIMULATOR, "0") not in ("", "0")


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = refusals(problem, dtypes=FLOATS, head_dim=HEAD_DIM_LIMIT)
    if lacking := missing("numba"):
        reasons.append(Reason(f"{lacking[0]} is not installed", "pip install numba-cuda"))
    if target.is_cpu and not simulated():
        reasons.append(Reason("there is no GPU, and Numba's simulator is off", f"set {SIMULATOR}=1"))
    if not target.is_cpu and simulated():
        reasons.append(Reason(f"{SIMULATOR} is set: Numba would simulate the GPU", "unset it"))
    work = problem.flops() // 2
    if target.is_cpu and work > _SIMULATED_WORK:
        reasons.append(Reason(f"{work} multiply-adds: the simulator would take minutes", "try --shape 1,2,48,32"))
    if max(problem.batch, problem.heads_q) > _MAX_BLOCKS:
        reasons.append(Reason(f"batch or heads over {_MAX_BLOCKS}: more than a grid has", "split the batch"))
    if not _fitting(problem):
        reasons.append(Reason(f"no tile of a head of {problem.head_dim} fits 48 KB", "climb to the next rung"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    config = configs(problem, target)[0]
    used = config.shared_bytes(problem.head_dim, problem.head_dim_v) / 1024
    twice = Config(2 * config.block_q, config.block_kv).shared_bytes(problem.head_dim, problem.head_dim_v) / 1024
    told = [f"tiles of {config.label} take {used:.0f} of 48 KB shared; twice the rows would take {twice:.0f}"]
    return told if problem.dtype == torch.float32 else [*told, "converts q, k and v to float32 first"]


def configs(problem: Problem, target: Target) -> list[Config]:
    """Tiles that 48 KB hold and the problem fills, the largest first."""
    return sorted(_fitting(problem), key=lambda config: (-config.block_q * config.block_kv, -config.block_q))


shipped = configs
search_space = configs


def _fitting(problem: Problem) -> list[Config]:
    sides = (64, 32, 16, 8, 4)
    tall, wide = (max(4, 1 << (seq - 1).bit_length()) if seq else 4 for seq in (problem.seq_q, problem.seq_kv))
    every = [Config(q, kv) for q in sides if q <= tall for kv in sides if kv <= wide]
    return [c for c in every if c.shared_bytes(problem.head_dim, problem.head_dim_v) <= SHARED_LIMIT]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = config or configs(problem, Target.of(q.device))[0]
    out, lse = empty_out(q, problem.head_dim_v, problem.layout), empty_lse(q)
    if problem.empty:
        return out.zero_(), lse.fill_(-math.inf)
    kernel = _kernel(config.block_q, config.block_kv, problem.head_dim, problem.head_dim_v)
    whole = out.dtype == torch.float32 and out.is_contiguous()  # the simulator takes no other arrays
    work = out if whole else fresh.new_empty(out, out.shape, dtype=torch.float32)
    arrays = [_array(tensor.float().contiguous()) for tensor in (q, k, v)] + [_array(work), _array(lse)]
    grid = (-(-problem.seq_q // config.block_q), problem.heads_q, problem.batch)
    launch = (grid, *_launch(q.device))
    kernel[launch](*arrays, float(problem.scale), float(problem.softcap), *shifts_of(problem), problem.group)
    return (out if work is out else out.copy_(work)), lse


def _launch(device: torch.device) -> tuple[Any, ...]:
    if device.type != "cuda":
        return (_SIMULATED_THREADS,)
    stream = torch.cuda.current_stream(device).cuda_stream
    return _THREADS, importlib.import_module("numba.cuda").external_stream(stream) if stream else 0


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as Numba takes it; the simulator takes NumPy's arrays."""
    if tensor.device.type != "cuda":
        return tensor.detach().numpy()
    return importlib.import_module("numba.cuda").as_cuda_array(tensor.detach())


@contextlib.contextmanager
def _at_peace_with_numpy() -> Iterator[None]:
    """What numba-cuda 0.30 needs while it is imported and first compiles: `numpy.row_stack`, which NumPy 2.5 dropped.

    It registers a version of its own for every function of NumPy, this one by a name that was an alias of `vstack`; no
    kernel here calls it. So the name is lent for that long. What NumPy deprecates next, it says to Numba, not to us.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        numpy = importlib.import_module("numpy")
        lent = not hasattr(numpy, "row_stack")
        if lent:
            numpy.row_stack = numpy.vstack  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if lent:
                del numpy.row_stack


@functools.cache
def _kernel(block_q: int, block_kv: int, head_dim: int, head_dim_v: int) -> Any:
    """The kernel for these tiles, compiled: shared arrays need sizes that the compiler knows."""
    global cuda
    with _at_peace_with_numpy():
        numba, cuda = importlib.import_module("numba"), importlib.import_module("numba.cuda")
        numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        return cuda.jit(_signature(numba))(_source(numba.float32, block_q, block_kv, head_dim, head_dim_v))


def _signature(numba: Any) -> tuple[Any, ...]:
    """q, k, v and out, lse, scale and softcap, first, end and group."""
    return (*[numba.float32[:, :, :, ::1]] * 4, numba.float32[:, :, ::1], *[numba.float64] * 2, *[numba.int64] * 3)


def _source(real: Any, block_q: int, block_kv: int, head_dim: int, head_dim_v: int) -> Any:
    """The kernel as Python: what the compiler and the simulator both take. `real` is Numba's float32."""

    def attention(
        q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any, softcap: Any, first: Any, end: Any, group: Any
    ) -> None:
        q_s = cuda.shared.array((block_q, head_dim), real)
        k_s = cuda.shared.array((block_kv, head_dim), real)
        v_s = cuda.shared.array((block_kv, head_dim_v), real)
        o_s = cuda.shared.array((block_q, head_dim_v), real)
        s_s = cuda.shared.array((block_q, block_kv), real)
        top_s = cuda.shared.array((block_q,), real)
        sum_s = cuda.shared.array((block_q,), real)
        alpha_s = cuda.shared.array((block_q,), real)
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        head, batch = cuda.blockIdx.y, cuda.blockIdx.z
        kv_head = head // group
        seq_q, seq_k = q.shape[2], k.shape[2]
        row_begin = cuda.blockIdx.x * block_q
        last_row = min(row_begin + block_q, seq_q) - 1

        for i in range(thread, block_q * head_dim, threads):
            row, column = i // head_dim, i % head_dim
            q_s[row, column] = q[batch, head, row_begin + row, column] if row_begin + row < seq_q else 0.0
        for i in range(thread, block_q * head_dim_v, threads):
            o_s[i // head_dim_v, i % head_dim_v] = 0.0
        for row in range(thread, block_q, threads):
            top_s[row] = -math.inf
            sum_s[row] = 0.0

        # The keys that any row of the tile sees.
        key_begin, key_end = max(0, row_begin + first), min(seq_k, last_row + end)
        for start in range(key_begin // block_kv * block_kv, key_end, block_kv):
            cuda.syncthreads()
            for i in range(thread, block_kv * head_dim, threads):
                row, column = i // head_dim, i % head_dim
                k_s[row, column] = k[batch, kv_head, start + row, column] if start + row < seq_k else 0.0
            for i in range(thread, block_kv * head_dim_v, threads):
                row, column = i // head_dim_v, i % head_dim_v
                v_s[row, column] = v[batch, kv_head, start + row, column] if start + row < seq_k else 0.0
            cuda.syncthreads()
            for i in range(thread, block_q * block_kv, threads):
                row, key = i // block_kv, i % block_kv
                score = real(0.0)
                for d in range(head_dim):
                    score += q_s[row, d] * k_s[key, d]
                score *= real(scale)
                if softcap > 0.0:
                    score = real(softcap) * math.tanh(score / real(softcap))
                position = row_begin + row
                seen = max(0, position + first) <= start + key < min(seq_k, position + end)
                s_s[row, key] = score if seen else -math.inf
            cuda.syncthreads()
            for row in range(thread, block_q, threads):
                top = top_s[row]
                for key in range(block_kv):
                    top = max(top, s_s[row, key])
                base = real(0.0) if top == -math.inf else top
                alpha = real(math.exp(top_s[row] - base))
                total = alpha * sum_s[row]
                for key in range(block_kv):
                    weight = real(math.exp(s_s[row, key] - base))
                    s_s[row, key] = weight
                    total += weight
                top_s[row], sum_s[row], alpha_s[row] = top, total, alpha
            cuda.syncthreads()
            for i in range(thread, block_q * head_dim_v, threads):
                row, column = i // head_dim_v, i % head_dim_v
                value = alpha_s[row] * o_s[row, column]
                for key in range(block_kv):
                    if s_s[row, key] > 0.0:  # a hidden key must not show, not even as 0 * inf
                        value += s_s[row, key] * v_s[key, column]
                o_s[row, column] = value
        cuda.syncthreads()

        for i in range(thread, block_q * head_dim_v, threads):
            row, column = i // head_dim_v, i % head_dim_v
            if row_begin + row < seq_q:
                total = sum_s[row]
                out[batch, head, row_begin + row, column] = o_s[row, column] / total if total > 0.0 else 0.0
        for row in range(thread, block_q, threads):
            if row_begin + row < seq_q:
                total = sum_s[row]
                lse[batch, head, row_begin + row] = top_s[row] + math.log(total) if total > 0.0 else -math.inf

    return attention


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Any = None,
    operands: Operands = NO_OPERANDS,
    wants: Wants = ALL,
) -> Grads:
    raise UnsupportedProblem("the Numba rung is forward only", problem, remedy="use backend='auto'")
