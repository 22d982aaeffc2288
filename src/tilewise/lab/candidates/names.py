"""Candidates: names that stand for a way to compute attention.

tilewise                tilewise.attention, the planner choosing
tilewise:deterministic  the same under torch.use_deterministic_algorithms(True)
tilewise:plain          the same of the plain problem that a row is held against, which has no terms and no tensors
tilewise:packed         tilewise.attention_packed, of the batch or of its documents
tilewise:cached         tilewise.attention_cached, which reads lengths on the device; tilewise:pages16 and :pages64 with
                        keys in pages of so many, tilewise:invariant with batch_invariant=True
tiled, sm90, ...        a backend of the planner, through tilewise.attention(backend=...)
tilewise:torch-flash    the same of the planner's own route to one of PyTorch's kernels
torch-default           F.scaled_dot_product_attention as it is
torch-flash             F.scaled_dot_product_attention held to one of PyTorch's kernels (efficient, cudnn, math)
flags:all-off           F.scaled_dot_product_attention with PyTorch's switches set: see `flags`
compiled                plain attention, as it is written down, under torch.compile
torch-varlen            torch.nn.attention.varlen.varlen_attn, which takes packed sequences
flex, flash-attn, fa3, fa4, flashinfer, xformers   other libraries' attention: see `rivals`
sm90@..., ladder:NAME   a backend with its config spelled out, or a rung of the ladder: see `variants`
python:MODULE:NAME      a function of yours: NAME(q, k, v, problem, bias) -> out or (out, lse); MODULE: or a file.py
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...api import attention, attention_packed
from ...errors import InvalidInput, Reason, TilewiseError
from ...masks import Causal, Dense, Full, Window
from ...plan import AUTO, BACKENDS, plan
from ...scores import Softcap, Where
from ...target import Target
from ...terms import Alibi, Keep, KeyLengths, Sink
from . import cached, flags, override, variants
from .inputs import Inputs, end_to_end, make_inputs
from .lacking import inner_mask, packed, reasons, sequences, unknown_terms, unpacked
from .rivals import COMPILE, FA3, FA4, FLASHINFER, FLEX, RIVALS, VARLEN, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...problem import Problem

__all__ = ["FA3", "FA4", "FLASHINFER", "FLEX", "VARLEN", "Candidate", "Inputs", "installed", "make_inputs"]
Forward = Callable[[], Any]  # out, or (out, lse) where the problem needs an lse

OURS = "tilewise"
DETERMINISTIC = "tilewise:deterministic"
PLAIN = "tilewise:plain"
PACKED = "tilewise:packed"
TORCH_DEFAULT = "torch-default"
SDPA = {
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-math": SDPBackend.MATH,
}
ROUTES = tuple(f"{OURS}:{name}" for name in SDPA)  # of the planner, to PyTorch's kernels
PYTHON = "python:"
_OPTIONAL = ("sm80", "triton")  # backends that a suite or a user may name where this build has none
KNOWN = (OURS, DETERMINISTIC, PLAIN, PACKED, *cached.WAYS, *ROUTES, TORCH_DEFAULT, *SDPA, *flags.SWITCHES, *RIVALS)
_LARGEST_MASK_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named way to compute attention, already told apart from a name that means nothing."""

    name: str

    def __post_init__(self) -> None:
        if self.name.startswith(PYTHON):
            _split_python(self.name)
        elif variants.is_variant(self.name):
            variants.resolve(self.name)
        elif self.name not in (*KNOWN, *BACKENDS, *_OPTIONAL):
            known = ", ".join((*KNOWN, *BACKENDS))
            raise InvalidInput("candidate", repr(self.name), f"one of {known}, or python:MODULE:NAME", "choose one")

    @property
    def is_peer(self) -> bool:
        """One of PyTorch's own paths: what others are measured against."""
        return self._is_sdpa

    @property
    def is_ours(self) -> bool:
        """One of this package's: all others are what it can be held against."""
        own_backend = self.name in (*BACKENDS, *_OPTIONAL) and not self.is_peer
        ours = (OURS, DETERMINISTIC, PLAIN, PACKED, *cached.WAYS, *ROUTES)
        return self.name in ours or own_backend or variants.is_variant(self.name)

    @property
    def backend(self) -> str:
        """What the planner is asked for."""
        return AUTO if self.name in (OURS, DETERMINISTIC, PLAIN, PACKED) else self.name.removeprefix(f"{OURS}:")

    @property
    def _is_sdpa(self) -> bool:
        """F.scaled_dot_product_attention, whatever it is held to."""
        return self.name == TORCH_DEFAULT or self.name in SDPA or self.name in flags.SWITCHES

    @property
    def compiles(self) -> bool:
        """The first call may take a minute: the kernel is generated for it."""
        return self.name in (*COMPILE, FA4, FLASHINFER, "triton")

    def why_not(self, problem: Problem, device: str = "cuda") -> list[Reason]:
        """Why the candidate cannot even be asked. What a backend of the planner says is the planner's business."""
        if self.name in RIVALS:
            return RIVALS[self.name].why_not(problem, device)
        if self.name == PACKED:
            return _packed_lacks(problem)
        if self.name in cached.WAYS:
            return cached.lacks(problem)
        if self.name in _OPTIONAL and self.name not in BACKENDS:
            return [Reason(f"this tilewise has no backend {self.name}", f"choose one of {', '.join(BACKENDS)}")]
        return _sdpa_reasons(problem) if self._is_sdpa else []

    def inputs(self, problem: Problem, seed: int, device: str, tensors: str = "", contents: str = "") -> Inputs:
        """The tensors of the problem, stored as the candidate takes them."""
        made = make_inputs(problem, seed, device, tensors, contents)
        packs = RIVALS[self.name].packs if self.name in RIVALS else ()
        own = self.name == PACKED or self.name in cached.WAYS
        return end_to_end(made) if own or isinstance(problem.mask, packs) else made

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """A call without arguments that computes the problem's forward. Masks are built here, once."""
        if self._is_sdpa:
            return _sdpa_forward(problem, inputs)
        if self.name in RIVALS:
            return RIVALS[self.name].forward(problem, inputs)
        if self.name == PACKED:
            return _packed_forward(problem, inputs)
        if self.name in cached.WAYS:
            return cached.forward(self.name, problem, inputs)
        if variants.is_variant(self.name):
            return variants.forward(self.name, problem, inputs)
        if self.name.startswith(PYTHON):
            function = _load_python(self.name)
            return lambda: function(inputs.q, inputs.k, inputs.v, problem, inputs.bias)
        return _our_forward(problem, inputs, self.backend)

    def runs(self, problem: Problem, inputs: Inputs) -> str:
        """The kernels that the candidate comes to here, by the name of the backend they are of; "" where that is not
        known. Two candidates with one name run the same kernels. Must be asked inside `context`."""
        if self.name in SDPA:
            return self.name
        if self._is_sdpa:
            arguments, options = sdpa_arguments(problem, inputs)
            return override.torch_choice((*arguments, options["scale"], options["enable_gqa"]))
        if self.name == OURS or self.name in (*BACKENDS, *ROUTES):
            with contextlib.suppress(TilewiseError):
                return plan(problem, Target.of(inputs.q.device), self.backend).backend
        return ""

    @contextlib.contextmanager
    def context(self, problem: Problem) -> Iterator[None]:
        """What must be active around the calls; entered once, so that it costs the calls nothing."""
        settings: Any = torch.utils.deterministic
        before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
        torch.use_deterministic_algorithms(problem.deterministic or self.name == DETERMINISTIC)
        # Why: under that mode PyTorch also fills all fresh memory with nan, to debug by; that is not what is timed.
        settings.fill_uninitialized_memory = False
        try:
            with sdpa_kernel(SDPA[self.name]) if self.name in SDPA else flags.switched(self.name):
                yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            settings.fill_uninitialized_memory = before[1]


def _our_forward(problem: Problem, inputs: Inputs, backend: str) -> Forward:
    q, k, v = inputs.q, inputs.k, inputs.v
    if problem.layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = problem.mask if inputs.bias is None else inputs.bias
    scale, softcap, dropout, layout = problem.scale, problem.softcap, problem.dropout, problem.layout
    return_lse, precision = problem.needs_lse, problem.precision
    terms = _term_arguments(problem, inputs)

    def forward() -> Any:
        out: Any = attention(
            q, k, v, mask=mask, scale=scale, softcap=softcap, dropout=dropout, layout=layout,
            return_lse=return_lse, backend=backend, precision=precision, **terms,
        )  # fmt: skip
        if layout == "bhsd":
            return out
        return (out[0].transpose(1, 2), out[1]) if return_lse else out.transpose(1, 2)

    return forward


def _packed_lacks(problem: Problem) -> list[Reason]:
    """What `attention_packed` has no argument for."""
    others = [term for term in problem.scores if not isinstance(term, Softcap)]
    return reasons(
        (
            not isinstance(inner_mask(problem.mask), Full | Causal | Window),
            f"mask {problem.mask}: sequences are full, causal or windowed",
            "use one of these",
        ),
        (bool(others), f"scores {', '.join(map(str, others))}: not compared here of packed sequences", "drop them"),
        (problem.needs_lse, "an lse is asked for: not compared here of packed sequences", "drop the lse"),
    )


def _packed_forward(problem: Problem, inputs: Inputs) -> Forward:
    q, k, v = map(packed, (inputs.q, inputs.k, inputs.v))
    lengths = sequences(problem, q.device)
    same = torch.equal(lengths.starts_q, lengths.starts_kv)
    offsets = lengths._replace(starts_kv=lengths.starts_q) if same else lengths
    options: dict[str, Any] = {
        "mask": inner_mask(problem.mask),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "dropout": problem.dropout,
        "precision": problem.precision,
    }

    def forward() -> Any:
        out: Any = attention_packed(q, k, v, *offsets, **options)
        return unpacked(out, problem)

    return forward


def _term_arguments(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """The terms of a problem as arguments of `attention`: by their own names where it has some for them."""
    arguments: dict[str, Any] = {}
    others = []
    for term in problem.scores:
        if isinstance(term, Alibi | Keep | Sink):
            arguments[term.kind] = inputs.terms[term.tensors[0].name]
        elif not isinstance(term, Softcap):
            others.append(term)
    if others:
        names = [operand.name for term in others for operand in term.tensors]
        arguments |= {"scores": tuple(others), "operands": {name: inputs.terms[name] for name in names}}
    return arguments


def _is_top_left_causal(problem: Problem) -> bool:
    return isinstance(problem.mask, Causal) and problem.band.offset == 0


def builds_mask(problem: Problem) -> bool:
    """PyTorch's function has no name for the mask: it is given to it as a tensor."""
    if any(term.hides for term in problem.scores):
        return not isinstance(problem.mask, Full)
    return not isinstance(problem.mask, Full | Dense) and not _is_top_left_causal(problem)


def _sdpa_reasons(problem: Problem) -> list[Reason]:
    """What F.scaled_dot_product_attention has no argument for."""
    found = unknown_terms(problem, (Keep, KeyLengths))
    if problem.softcap:
        found.append(Reason(f"softcap {problem.softcap:g}: PyTorch's function has no softcap", "drop the softcap"))
    if problem.needs_lse:
        found.append(Reason("an lse is asked for, and PyTorch's function returns none", "drop the lse"))
    if builds_mask(problem) and problem.seq_q * problem.seq_kv > _LARGEST_MASK_BYTES:
        size = f"{problem.seq_q * problem.seq_kv / 2**30:.1f} GiB as a boolean tensor"
        found.append(Reason(f"mask {problem.mask}: {size}", f"stay below {_LARGEST_MASK_BYTES / 2**30:.0f} GiB"))
    return found


def _sdpa_forward(problem: Problem, inputs: Inputs) -> Forward:
    arguments, options = sdpa_arguments(problem, inputs)
    return lambda: F.scaled_dot_product_attention(*arguments, **options)


def sdpa_arguments(problem: Problem, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of F.scaled_dot_product_attention: a mask that it has no name for is built as a tensor."""
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    shown = _shown_by_terms(problem, inputs)
    is_causal, attn_mask = _is_top_left_causal(problem) and shown is None, inputs.bias
    if attn_mask is None and not is_causal and not isinstance(problem.mask, Full):
        attn_mask = problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, inputs.q.device)
    if shown is not None:
        attn_mask = shown if attn_mask is None else shown & attn_mask
    options = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    return (inputs.q, inputs.k, inputs.v, attn_mask, problem.dropout, is_causal), options


def _shown_by_terms(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """What the terms that hide leave visible, with no more dimensions of full size than their tensors have."""
    where = Where(problem, range(problem.seq_q), range(problem.seq_kv), operands=inputs.terms)
    found = [inputs.terms["keep"] if isinstance(term, Keep) else term.visible(where) for term in problem.scores]
    shown = [tensor for tensor in found if tensor is not None]
    return functools.reduce(torch.logical_and, shown) if shown else None


def _split_python(name: str) -> tuple[str, str]:
    module, _, function = name.removeprefix(PYTHON).rpartition(":")
    if not module or not function.isidentifier():
        raise InvalidInput(
            "candidate", repr(name), "python:MODULE:NAME or python:FILE.py:NAME", "name a module and a function in it"
        )
    return module, function


def check_python(name: str) -> None:
    """InvalidInput unless the module can be found and holds the function, as far as that is known without running it.

    A candidate's code runs in its worker alone, where a crash is a row of the table: here its source is read.
    """
    module, function = _split_python(name)
    expected = "MODULE:FUNCTION or FILE.py:FUNCTION that can be found"
    path = Path(module) if module.endswith(".py") else _file_of(module)
    if path is None:
        raise InvalidInput("--candidate", f"{module}, and there is no such module", expected, "check the name")
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise InvalidInput("--candidate", f"{path} ({error.strerror})", expected, "check the path") from None
    except (SyntaxError, ValueError) as error:
        raise InvalidInput("--candidate", f"{path}, which is no Python: {error}", expected, "mend the file") from None
    names, open_ended = _defined(tree)
    if function not in names and not open_ended:
        there = ", ".join(sorted(names)) or "nothing"
        raise InvalidInput("--candidate", f"{function}, and {path.name} defines {there}", expected, "name one of these")


def _file_of(module: str) -> Path | None:
    """The file of a module, on the path or in the current directory. Nothing is imported: not even its packages."""
    first, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        found = None
    if found is not None and not rest:
        return Path(found.origin or first)
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    places = [folder.joinpath(*rest) for folder in folders] or [Path(*module.split("."))]
    for place in places:
        for path in (place.with_suffix(".py"), place / "__init__.py", *place.parent.glob(f"{place.name}.*.so")):
            if path.is_file():
                return path
    return None


def _defined(tree: ast.Module) -> tuple[set[str], bool]:
    """Names that a module binds at its top level, in branches too; and whether others may come in unseen."""
    names: set[str] = set()
    open_ended = False
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            open_ended |= any(alias.name == "*" for alias in node.names)
    return names, open_ended or "__getattr__" in names


def _load_python(name: str) -> Callable[..., Any]:
    module_name, function = _split_python(name)
    # Workers have no current directory on their path. Who names a module means it, and what lies beside a file of
    # theirs; last in the path it stands in for nothing else.
    place = os.path.dirname(os.path.abspath(module_name)) if module_name.endswith(".py") else os.getcwd()
    if place not in sys.path:
        sys.path.append(place)
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), function)  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]
