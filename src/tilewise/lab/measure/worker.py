"""The process of one candidate: reads commands, one JSON object per line, and answers each with one line.

    {"do": "prepare", "candidate", "problem", "seed", "device", "tensors", "contents"}
                                                                 make the inputs, resolve the candidate, run it once
    {"do": "truth", "problem", "seed", "device", "path", "tensors", "contents"}
                                                                 float64 results and budgets into a file, for `verify`
    {"do": "verify", "path"}                                     errors against that file
    {"do": "results", "path"}                                    what it computes, at the sample of `truth`, into a file
    {"do": "memory"}                                             bytes a forward, or a step where gradients are wanted,
                                                                 needs beyond its inputs, at the peak
    {"do": "runs"}                                               the kernels it comes to, by a name; empty if not known
    {"do": "launched", "timed"}                                  those of ours, as `model.launched` names them, or null
    {"do": "time", "what", "method", "seconds", "flush"}         samples of seconds per "forward", "backward" or "step"
    {"do": "profile", "trace"}                                   the kernels that ran, by torch.profiler
    {"do": "rates"}                                              peaks of this CPU, measured
    {"do": "order"}                                              PyTorch's kernels that take it, in PyTorch's order
    {"do": "refusals"}                                           PyTorch's own words on each of its kernels
    {"do": "overhead", "seconds"}                                the same of a tiny problem of the same kind: host cost

An answer is {"answer": ...} or {"error": {"type", "text", "fatal"}}; after a fatal one (a CUDA error) the process is of
no more use. Standard output is for this protocol alone: all other printing goes to standard error. A
process that dies says nothing: the other end sees the pipe close and reads the signal from the exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import math
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from ...errors import DeviceError, UnsupportedProblem
from ...masks import Dense, Documents
from ...memo import invalidate
from ...plan import plans_made
from ...problem import Problem
from ...target import Target
from ..candidates import override
from ..candidates.names import SDPA, Candidate, Forward, make_inputs, sdpa_arguments
from ..candidates.variants import is_variant
from ..model import roofline
from ..model.launched import launched, of_variant
from . import accuracy, timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..model.launched import Launched
    from .accuracy import Sample, Tensors

_NO_KERNEL = ("No available kernel", "No viable backend")
_TINY = 16  # rows and keys of the problem that shows the host's cost


class Worker:
    """What one process remembers between commands: at most one prepared problem."""

    def __init__(self) -> None:
        self._scope = contextlib.ExitStack()
        self._kept: dict[str, timing.Kept] = {}
        self._calls: dict[str, Callable[[], Any] | timing.Backward] = {}
        self._overheads: dict[tuple[str, Problem], list[float]] = {}

    def prepare(
        self, candidate: str, problem: dict[str, Any], seed: int, device: str, tensors: str = "", contents: str = ""
    ) -> None:
        self.forget()
        invalidate()  # so that the plans that are remembered are those of this problem
        self._problem = Problem.from_dict(problem)
        self._candidate, self._device, self._seed, self._contents = Candidate(candidate), device, seed, contents
        self._scope.enter_context(_own_stream(device))
        self._scope.enter_context(self._candidate.context(self._problem))
        self._scope.enter_context(torch.set_grad_enabled(self._problem.needs_grad))
        self._inputs = self._candidate.inputs(self._problem, seed, device, tensors, contents)
        self._forward = self._candidate.forward(self._problem, self._inputs)
        _first_call(self._forward)
        _synchronize(device)

    def truth(
        self, problem: dict[str, Any], seed: int, device: str, path: str, tensors: str = "", contents: str = ""
    ) -> dict[str, Any]:
        """Writes {sample, truth, budgets} and returns what a reader wants to know of it."""
        asked = Problem.from_dict(problem)
        with torch.no_grad():
            inputs = make_inputs(asked, seed, device, tensors, contents)
            sample = accuracy.choose(asked, seed, device)
            true = accuracy.truth(inputs, asked, sample)
            simple = accuracy.plain(inputs, asked, sample)
        allowed = accuracy.budgets(accuracy.errors(simple, true), asked)
        parts = {"groups": sample.groups, "rows": sample.rows, "text": sample.text}
        stored = {name: tensor.to(_truth_dtype(asked)).cpu() for name, tensor in true.items()}
        torch.save({"sample": parts, "truth": stored, "budgets": allowed}, path)
        del inputs, true, simple
        _free_cached_memory()
        return {"compared": sample.text, "budgets": allowed}

    def verify(self, path: str) -> dict[str, Any]:
        """Errors, what breaks its budget, and whether every element of every tensor is a number."""
        stored = torch.load(path, map_location=self._device)
        sample = accuracy.Sample(**stored["sample"])
        results, want = self._results(), stored["truth"]  # which is empty when there is no head to compare
        infinite_anywhere = [name for name, t in results.items() if not _all_finite(t, name == "lse")]
        got = {name: tensor for name, tensor in _sampled(results, self._problem, sample).items() if name in want}
        found = accuracy.errors(got, want)
        wrong = [f"{name} has nan or inf" for name in infinite_anywhere]
        if self._problem.dropout:
            wrong += accuracy.dropout_excess(found, self._problem)
            wrong += accuracy.dropout_mismatch(results, self._inputs.v, self._inputs.dout)
        else:
            wrong = wrong or accuracy.excess(found, stored["budgets"])
        return {"errors": found, "wrong": wrong}

    def results(self, path: str) -> dict[str, Any]:
        """Writes the sampled results; returns which tensors had other bits a second time, and where nan or inf is."""
        sample = accuracy.choose(self._problem, self._seed, self._device)
        results, again = self._results(), self._results()
        wide = _truth_dtype(self._problem)
        torch.save({name: t.to(wide).cpu() for name, t in _sampled(results, self._problem, sample).items()}, path)
        return {
            "changed": [name for name, t in results.items() if not _same_bits(t, again[name])],
            "strange": {
                name: at for name, t in results.items() if (at := _first_strange(t, name == "lse")) is not None
            },
        }

    def memory(self) -> int:
        call = self._step() if self._problem.needs_grad else self._forward
        return _peak_extra_bytes(call, self._device)

    def launched(self, timed: list[str]) -> Launched | None:
        """What of ours a call launches, by its name or by the plan of the first call; None where there is neither."""
        if is_variant(self._candidate.name):
            return of_variant(self._candidate.name, self._problem, Target.of(self._device), timed)
        made = plans_made()
        return launched(made[0], timed) if made else None

    def runs(self) -> str:
        return self._candidate.runs(self._problem, self._inputs)

    def time(self, what: str, method: str, seconds: float, flush: bool = False) -> list[float]:
        if what not in self._calls:
            self._calls[what] = self._call(what, rotated=flush and method == "graph")
        kept = self._kept.setdefault(what, {})
        return timing.measure(self._calls[what], method, seconds, flush=flush, kept=kept)

    def profile(self, trace: str = "") -> dict[str, Any]:
        """What a forward launches, and a backward where gradients are wanted; `trace` is a file for the forward's."""
        from . import profile  # noqa: PLC0415  (the profiler is slow to import, and rarely wanted)

        self._forward()
        found = {"forward": profile.run(self._forward, self._device, trace)}
        if self._problem.needs_grad:
            backward = self._backward().retained()
            backward()
            found["backward"] = profile.run(backward, self._device, _beside(trace, "backward"))
        return found

    def order(self) -> list[str]:
        """No kernel runs."""
        arguments, options = sdpa_arguments(self._problem, self._inputs)
        return override.effective_order((*arguments, options["scale"], options["enable_gqa"]))

    def refusals(self) -> dict[str, list[str]]:
        """What PyTorch itself says to each of its kernels: nothing where it takes the problem. No kernel runs."""
        arguments, options = sdpa_arguments(self._problem, self._inputs)
        found = {}
        for name in SDPA:
            with Candidate(name).context(self._problem):
                found[name] = _refusal(lambda: torch._fused_sdp_choice(*arguments, **options), int(SDPA[name].value))
        return found

    def rates(self) -> dict[str, Any]:
        """What this CPU can do at most."""
        return roofline.measured_rates()._asdict()

    def overhead(self, seconds: float) -> list[float]:
        """On one thread: waking others is not the cost that is asked for. Measured once for all rows of a kind."""
        problem = tiny(self._problem)
        key = (self._candidate.name, problem)
        if key not in self._overheads:
            forward = self._candidate.forward(problem, self._candidate.inputs(problem, self._seed, self._device))
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._overheads[key] = timing.measure(forward, "host", seconds)
            finally:
                torch.set_num_threads(threads)
        return self._overheads[key]

    def _results(self) -> Tensors:
        out, lse = _split(self._forward())
        results = {"out": out} | ({"lse": lse} if lse is not None else {})
        if self._problem.needs_grad:
            wanted = self._inputs.differentiated(self._problem)
            grads = torch.autograd.grad(out, list(wanted.values()), self._inputs.dout)
            results |= dict(zip(wanted, grads, strict=True))
        return results

    def _call(self, what: str, *, rotated: bool) -> Callable[[], Any] | timing.Backward:
        """What is timed."""
        if what == "backward":
            return self._backward()
        if what == "step":
            return self._step()
        return self._rotation() if rotated else self._forward

    def _rotation(self) -> Callable[[], Any]:
        """The forward of several sets of tensors by turns, so many that no cache holds their keys and values."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in (self._inputs.k, self._inputs.v))
        if "key_lengths" in self._inputs.terms:  # of what is there, not of what there is room for
            size = int(size * self._inputs.terms["key_lengths"].float().mean() / self._problem.seq_kv)
        calls = [self._forward]
        for number in range(1, timing.turns_for(size)):
            inputs = self._candidate.inputs(self._problem, self._seed + number, self._device, contents=self._contents)
            calls.append(self._candidate.forward(self._problem, inputs))
        for call in calls[1:]:
            call()
        _synchronize(self._device)
        return timing.Rotation(calls)

    def _backward(self) -> timing.Backward:
        """The backward alone."""
        wanted, dout = list(self._inputs.differentiated(self._problem).values()), self._inputs.dout
        forward = self._forward
        return timing.Backward(lambda: _split(forward())[0], wanted, dout)

    def _step(self) -> Callable[[], Any]:
        """Forward and backward, as a training step has them."""
        wanted, dout = list(self._inputs.differentiated(self._problem).values()), self._inputs.dout
        forward = self._forward
        return lambda: torch.autograd.grad(_split(forward())[0], wanted, dout)

    def forget(self) -> None:
        """Leave the contexts of the prepared problem and drop its tensors."""
        self._scope.close()
        self._kept.clear()
        self._calls.clear()
        for name in ("_inputs", "_forward"):
            if hasattr(self, name):
                delattr(self, name)
        _free_cached_memory()
        gc.freeze()  # the modules that a library imported for it need not be looked at again


def _beside(path: str, suffix: str) -> str:
    """trace.json -> trace.backward.json; nothing stays nothing."""
    return str(Path(path).with_suffix(f".{suffix}{Path(path).suffix}")) if path else ""


def _truth_dtype(problem: Problem) -> torch.dtype:
    """What truth is kept in: wide enough that its own rounding does not count."""
    return torch.float64 if problem.dtype.itemsize >= 4 else torch.float32


def tiny(problem: Problem) -> Problem:
    """A problem of the same kind with so little work that the time of a call is the host's."""
    mask = problem.mask
    if isinstance(mask, Documents):
        mask = Documents((0, _TINY), (), mask.inner)
    elif isinstance(mask, Dense):
        mask = Dense((_TINY, _TINY), mask.additive)
    return problem.with_(batch=1, heads_q=problem.group, heads_kv=1, seq_q=_TINY, seq_kv=_TINY, mask=mask)


def _split(result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)


def _sampled(results: Tensors, problem: Problem, sample: Sample) -> Tensors:
    with torch.no_grad():
        return accuracy.select(results, problem, sample)


def _all_finite(tensor: torch.Tensor, may_be_minus_infinite: bool) -> bool:
    finite = tensor.detach().isfinite()
    return bool((finite | (tensor == -math.inf) if may_be_minus_infinite else finite).all())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """nan is the same as nan."""
    return torch.equal(one.detach().nan_to_num(math.pi), other.detach().nan_to_num(math.pi))


def _first_strange(tensor: torch.Tensor, may_be_minus_infinite: bool) -> list[int] | None:
    """Where the first element is that is no number; None if all are."""
    if _all_finite(tensor, may_be_minus_infinite):
        return None
    strange = ~tensor.detach().isfinite()
    if may_be_minus_infinite:
        strange &= tensor.detach() != -math.inf
    return [int(index) for index in strange.nonzero()[0]]


def _own_stream(device: str) -> contextlib.AbstractContextManager[Any]:
    """Graph capture needs a stream other than the default one, for the backward's sake from the forward on."""
    if not device.startswith("cuda"):
        return contextlib.nullcontext()
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream())
    return stream


def _first_call(forward: Forward) -> Any:
    """PyTorch's "no kernel" is a refusal, and its reasons are warnings: they become one exception."""
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return forward()
        except RuntimeError as error:
            if not str(error).startswith(_NO_KERNEL):
                raise
            told = [str(warning.message).partition(" (Triggered internally")[0] for warning in said]
            reasons = [text for text in told if not text.endswith(":")]
            raise UnsupportedProblem("; ".join(reasons) or str(error)) from error
        finally:
            torch.set_warn_always(False)


def _refusal(choose: Forward, wanted: int) -> list[str]:
    """Why PyTorch's dispatcher does not choose the kernel `wanted` even if it is the only one allowed."""
    try:
        chosen = _first_call(choose)
    except UnsupportedProblem as error:
        return [error.summary]
    return [] if chosen == wanted else ["PyTorch gives no reason"]


def _free_cached_memory() -> None:
    """Give back what is not in use: the other candidates' processes share the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _peak_extra_bytes(forward: Forward, device: str) -> int:
    """CUDA: exact, by the allocator. CPU: growth of the resident set, which counts only what is touched, after freed
    memory was given back; good to about a megabyte, since the counters of threads lag."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over from what is resident now
    before = _high_water()
    forward()
    return max(0, _high_water() - before)


def _high_water() -> int:
    """Peak resident bytes: since the last reset on Linux, of the whole life of the process elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # noqa: PLC0415  (absent on Windows)
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Answer until the commands end."""
    worker = Worker()
    for line in commands:
        answers.write(json.dumps(_reply(worker, json.loads(line))) + "\n")
        answers.flush()
    worker.forget()


def _reply(worker: Worker, command: dict[str, Any]) -> dict[str, Any]:
    do = command.pop("do")
    try:
        return {"answer": getattr(worker, do)(**command)}
    except UnsupportedProblem as error:
        return {"error": {"type": "UnsupportedProblem", "text": error.summary, "fatal": False}}
    except Exception as error:
        traceback.print_exc()
        text = (str(error).strip() or repr(error)).splitlines()[0]
        fatal = isinstance(error, DeviceError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
        return {"error": {"type": type(error).__name__, "text": text, "fatal": fatal}}


def _private_streams() -> tuple[IO[str], IO[str]]:
    """The pipe's two ends under descriptors of their own; 0 and 1 are left to code that reads and prints."""
    commands, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return commands, answers


def _die_with_parent() -> None:
    """Linux: a candidate that hangs must not outlive a parent that was killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    _die_with_parent()
    faulthandler.enable()
    gc.freeze()  # what the imports made is here to stay: a collection after each problem need not look at it
    commands, answers = _private_streams()
    answers.write(json.dumps({"answer": "ready"}) + "\n")
    answers.flush()
    serve(commands, answers)


if __name__ == "__main__":
    main()
