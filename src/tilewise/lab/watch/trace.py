"""trace: every call site of scaled_dot_product_attention in a program, what ran there, and what it cost.

    with tilewise.trace() as t:
        train_step()
    print(t)

    with tilewise.no_math_fallback():   # for tests: a call that PyTorch would compute unfused raises, with all reasons
        model(x)

A site is a place in the program together with the problem it poses. On CUDA, times are those of the stream between two
events around the call, so that nothing waits for anything while the program runs; a backward is timed around its node
in autograd's graph, which math, being many nodes, does not have. Graphs of torch.compile call PyTorch's kernels
directly: their sites are seen once, when they are traced, and without times.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import hook
from ...api import observed_packed
from ...engine.lengths import Lengths, told
from ...errors import InvalidInput, TilewiseError, UnsupportedProblem
from ...masks import Packed, parse
from ...plan import plan
from ...problem import Problem, describe
from ...sequences import offsets_of
from ...target import Target
from ...torch_function import torch_mask
from ...torch_kernels.gates import CUDNN, EFFICIENT, FLASH, MATH
from ..candidates import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...hook import Arguments
    from ...plan import Verdict

Tensor = torch.Tensor
_FRAMES_KEPT = 4
_LAB = Path(__file__).parents[1]
# Modules whose frames are never a call site: PyTorch's, ours, and those of the kernel that lets us see a call.
_OURS = _LAB.parent
_HIDDEN = tuple(
    str(place)
    for place in (Path(torch.__file__).parent, _LAB, _OURS / "hook", _OURS / "integrations", _OURS / "api.py")
)
TAKEN = "tilewise"
COMPILED = "traced by torch.compile"
UNTIMED = "its times are not seen"


@dataclass(slots=True)
class Site:
    """A place, a problem, what ran there, and the seconds of its calls."""

    stack: tuple[str, ...]  # innermost first, `file.py:12 in attend`
    text: str  # the problem in a line
    problem: Problem | None
    backend: str
    device: str
    forced: bool = False  # the program allows math alone here
    reasons: tuple[str, ...] = ()  # of a math fallback: why no fused kernel took it
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0
    best: str = ""  # set by `compare`: the fastest candidate, and the seconds lost by not using it
    lost: float = 0.0
    note: str = ""
    lengths: str = ""  # of packed sequences

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def is_math_fallback(self) -> bool:
        """PyTorch computes it unfused, and the caller did not ask for that."""
        return self.backend == MATH and not self.forced

    @property
    def place(self) -> str:
        return self.stack[0] if self.stack else "an unknown place"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Site:
        """What `to_dict` made; records of earlier releases lack what was not known then."""
        known = {name: values[name] for name in cls.__slots__ if name in values}
        problem = Problem.from_dict(values["problem"]) if values["problem"] else None
        lines = {name: tuple(values[name]) for name in ("stack", "reasons")}
        return cls(**known | lines | {"problem": problem})

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        described = None if self.problem is None else self.problem.to_dict()
        return values | {"problem": described, "math_fallback": self.is_math_fallback}


@dataclass(slots=True)
class Trace:
    """What was seen. Print it, or look at `sites`."""

    sites: list[Site] = field(default_factory=list)
    seconds: float = 0.0  # from the first to the last line of the block
    _by_key: dict[Any, Site] = field(default_factory=dict, repr=False)
    _pending: list[tuple[Site, str, Any, Any]] = field(default_factory=list, repr=False)
    _offsets: list[_Offsets] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def math_fallbacks(self) -> list[Site]:
        return [site for site in self._sites() if site.is_math_fallback]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "tilewise trace", "seconds": self.seconds, "sites": [site.to_dict() for site in self._sites()]}

    def _sites(self) -> list[Site]:
        with self._lock:
            return list(self.sites)

    def __str__(self) -> str:
        from .. import report  # noqa: PLC0415  (what measures and draws is loaded when it is wanted)
        from .trace_report import report_of  # noqa: PLC0415

        return "\n".join(report.lines(report_of(self.to_dict())))

    def _observe(self, arguments: Arguments, run: Callable[[], Tensor]) -> Tensor:
        site = self._site(arguments)
        clock = _Clock(site.device)
        out = run()
        clock.stop()
        taken = hook.was_taken()
        if site.backend != COMPILED:
            self._add(site, "forward", clock)
            self._watch_backward(site, out)
        with self._lock:
            if taken:
                site.backend = TAKEN
            site.calls += 1
        return out

    def _observe_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, mask: Any) -> None:
        """Packed sequences: their site is seen with the lengths of its first call, and without times."""
        stack = _stack()
        facts = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in (q, k, v))
        with self._lock:
            site = self._by_key.get((stack, facts, str(mask)))
            if site is None:
                sizes = " ".join(f"{name}({','.join(map(str, x.shape))})" for name, x in (("q", q), ("k", k), ("v", v)))
                text = f"{str(q.dtype).removeprefix('torch.')} packed {sizes} {mask or 'full'}"
                site = Site(stack, text, None, TAKEN, str(q.device), note=UNTIMED)
                self._by_key[stack, facts, str(mask)] = site
                self.sites.append(site)
                # Copies, since the program may change them; they are read when it is over.
                offsets = cu_q.detach().clone(), cu_k.detach().clone()
                self._offsets.append(_Offsets(site, *offsets, _packed_problem(q, k, v, cu_q, mask)))
            site.calls += 1

    def _site(self, arguments: Arguments) -> Site:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
        stack = _stack()
        plain = override.is_plain(query, key, value)
        forced = override.only_math_is_allowed()
        backend = override.torch_choice(arguments) if plain else COMPILED
        masked = None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype)
        shapes = tuple(tuple(map(int, tensor.shape)) for tensor in (query, key, value)) if plain else ()
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        signature = (shapes, query.dtype, masked, dropout_p, is_causal, scale, enable_gqa, grad, backend, forced)
        with self._lock:
            site = self._by_key.get((stack, signature))
            if site is None:
                site = self._by_key[stack, signature] = _new_site(stack, arguments, backend, forced, plain)
                self.sites.append(site)
        return site

    def _watch_backward(self, site: Site, out: Tensor) -> None:
        """Around the one node that a fused kernel's backward is. Nothing is kept alive by it but the site."""
        node = out.grad_fn
        if node is None or site.backend == MATH:
            return
        running: list[_Clock] = []

        def before(*_: object) -> None:
            running.append(_Clock(site.device))

        def after(*_: object) -> None:
            if running:
                clock = running.pop()
                clock.stop()
                self._add(site, "backward", clock)

        node.register_prehook(before)
        node.register_hook(after)

    def _add(self, site: Site, what: str, clock: _Clock) -> None:
        with self._lock:
            if clock.events is None:
                setattr(site, what, getattr(site, what) + clock.seconds)
            else:
                self._pending.append((site, what, *clock.events))

    def _settle(self) -> None:
        """Read the events of CUDA, all of which have passed. Calls of other threads may still come to their end."""
        with self._lock:
            pending, self._pending = self._pending, []
        if pending:
            torch.cuda.synchronize()
        with self._lock:
            for site, what, start, stop in pending:
                setattr(site, what, getattr(site, what) + start.elapsed_time(stop) * 1e-3)
            self.sites.sort(key=lambda site: -site.seconds)
        for offsets in self._offsets:
            offsets.site.lengths = offsets.told()
        self._offsets.clear()


class _Clock:
    """Between its making and `stop`: seconds on a CPU, a pair of events on CUDA."""

    __slots__ = ("events", "seconds")

    def __init__(self, device: str) -> None:
        self.events: tuple[Any, Any] | None = None
        if device.startswith("cuda"):
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.events[0].record()
        self.seconds = -time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter()
        if self.events is not None:
            self.events[1].record()


class _Offsets(NamedTuple):
    """Those of the first call at a site, and its problem where it poses one."""

    site: Site
    of_queries: Tensor
    of_keys: Tensor
    problem: Problem | None

    def told(self) -> str:
        """The lengths in words, with what is lost where the tiles are known."""
        problem = self.problem
        if problem is None or not isinstance(problem.mask, Packed):
            return ""
        try:
            operands = {"cu_seqlens_q": self.of_queries, "cu_seqlens_kv": self.of_keys}
            lengths = Lengths.of(*offsets_of(operands, problem.seq_q, problem.seq_kv))
            chosen = plan(problem, Target.of(self.site.device))
        except TilewiseError as error:
            return str(error).splitlines()[0]
        if not chosen.is_ours or problem.dtype.itemsize > 2:
            return str(lengths)
        return told(lengths, problem.mask.inner, chosen.config.block_q, chosen.config.block_kv)


def _packed_problem(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, mask: Any) -> Problem | None:
    try:
        inner = parse(mask) if isinstance(mask, str) else mask
        packed = Packed(cu_q.shape[0] - 1, inner=inner)  # type: ignore[arg-type]
        views = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_q}
        return describe(*views, mask=packed, operands=offsets).with_(layout="bshd")
    except (InvalidInput, IndexError, RuntimeError):  # the call itself says what is wrong
        return None


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Watch every scaled_dot_product_attention of the block, and every attention_packed, in all threads; `Trace` fills
    as they come."""
    seen = Trace()
    start = time.perf_counter()
    try:
        with hook.observed(seen._observe), observed_packed(seen._observe_packed):
            yield seen
    finally:
        seen._settle()
        seen.seconds = time.perf_counter() - start


@contextlib.contextmanager
def no_math_fallback() -> Iterator[None]:
    """Inside, a call that PyTorch would compute unfused raises UnsupportedProblem, with the reasons of every kernel.

    A program that allows math alone (`sdpa_kernel(SDPBackend.MATH)`) has chosen it, and is let through.
    """

    def check(arguments: Arguments, run: Callable[[], Tensor]) -> Tensor:
        if override.is_plain(*arguments[:3]) and not override.only_math_is_allowed():
            falls = override.torch_choice(arguments) == MATH
            out = run()
            if falls and not hook.was_taken():
                raise _fallback(arguments)
            return out
        return run()

    with hook.observed(check):
        yield


def _fallback(arguments: Arguments) -> UnsupportedProblem:
    text, problem = _describe(arguments)
    verdicts = _fused_verdicts(problem, str(arguments[0].device))
    return UnsupportedProblem(
        f"scaled_dot_product_attention of {text} runs PyTorch's math: no fused kernel takes it.",
        problem,
        verdicts,
        "change what the reasons name, use tilewise.attention or tilewise.sdpa(), or allow math by "
        "sdpa_kernel(SDPBackend.MATH)",
    )


def _new_site(stack: tuple[str, ...], arguments: Arguments, backend: str, forced: bool, plain: bool) -> Site:
    device = str(arguments[0].device)
    if not plain:
        return Site(stack, _shapes(arguments), None, backend, device, note=UNTIMED)
    text, problem = _describe(arguments)
    site = Site(stack, text, problem, backend, device, forced)
    if site.is_math_fallback:
        verdicts = _fused_verdicts(problem, device)
        site.reasons = tuple(f"{verdict.backend}: {reason}" for verdict in verdicts for reason in verdict.reasons)
        if arguments[0].ndim != 4:
            more = f"{arguments[0].ndim} dimensions: fused kernels of many releases take 4 -> q.unsqueeze(0)"
            site.reasons = (more, *site.reasons)
    return site


def _describe(arguments: Arguments) -> tuple[str, Problem | None]:
    """The problem of a call, where it poses one."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = arguments
    if query.ndim == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    try:
        mask = torch_mask(attn_mask, is_causal)
        problem = describe(query, key, value, mask=mask, scale=scale, dropout=dropout_p)
    except InvalidInput:
        return _shapes(arguments), None
    return str(problem), problem


def _shapes(arguments: Arguments) -> str:
    named = zip("qkv", arguments[:3], strict=True)
    sizes = " ".join(f"{name}({','.join(map(str, tensor.shape))})" for name, tensor in named)
    return f"{str(arguments[0].dtype).removeprefix('torch.')} {sizes}{' causal' if arguments[5] else ''}"


def _fused_verdicts(problem: Problem | None, device: str) -> tuple[Verdict, ...]:
    """What PyTorch's fused kernels say, all reasons of each, by the model of their rules."""
    if problem is None:
        return ()
    try:
        chosen = plan(problem, Target.of(device))
    except TilewiseError:
        return ()
    fused = (FLASH,) if chosen.target.is_cpu else (FLASH, EFFICIENT, CUDNN)
    return tuple(verdict for verdict in chosen.verdicts if verdict.backend in fused and not verdict.willing)


def _stack() -> tuple[str, ...]:
    """The innermost frames of the program itself, PyTorch's and ours left out."""
    found: list[str] = []
    frame = sys._getframe(1)
    here = str(Path.cwd())
    while frame is not None and len(found) < _FRAMES_KEPT:
        name = frame.f_code.co_filename
        if not name.startswith((*_HIDDEN, "<frozen")):
            found.append(f"{name.removeprefix(here).lstrip('/')}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
