"""What the families decide alike: what they refuse, what they say, and how they look up a table that ships."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import Reason
from ..masks import Cached, Dense, Full, Packed
from ..operands import SCORE_DIMS
from ..problem import dtype_name, in_front_of_outputs
from ..sequences import as_sequences, kernels_take_packed, spans_say_all, with_spans
from ..terms import Bias, Keep, Spans
from ..terms.spans import KnownSpans

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..masks import Mask
    from ..problem import Problem
    from ..scores import Term
    from ..target import Target

HeadDimClasses = tuple[tuple[int, int], ...]
# (q and k, v and out): a head runs in the first class that holds it, zero-filled by the copies. A family may have more.
HEAD_DIM_CLASSES: HeadDimClasses = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
HEAD_DIM_LIMIT = 256
MAX_ROWS = 1 << 28  # of a sequence: row + band limits stay within 32 bits
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Rule = tuple[bool, str, str]
"""(when it is refused, what is wrong, what to do)."""
Row = dict[str, Any]
"""Of a table that ships."""
_Config = TypeVar("_Config")


def class_of(problem: Problem, classes: HeadDimClasses = HEAD_DIM_CLASSES) -> tuple[int, int]:
    dims = (problem.head_dim, problem.head_dim_v)
    return next(pair for pair in classes if dims[0] <= pair[0] and dims[1] <= pair[1])


def too_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT


def is_float32(problem: Problem) -> bool:
    return problem.dtype is torch.float32


def reasons(*rules: Rule) -> list[Reason]:
    return [Reason(what, remedy) for refused, what, remedy in rules if refused]


def no_jit(target: Target) -> Rule:
    what = "cuda.bindings, which builds and launches our kernels, is not installed"
    return not target.has_jit, what, "pip install 'tilewise[cuda]'"


def other_dtype(problem: Problem) -> Rule:
    what = f"dtype {dtype_name(problem.dtype)} is none of bfloat16, float16, float32"
    return problem.dtype not in DTYPES, what, "cast q, k and v"


def broken_chunks(problem: Problem, chunk: int) -> Rule:
    """Copies are of 16 bytes: `chunk` numbers."""
    dims = (problem.head_dim, problem.head_dim_v)
    what = f"head_dim {dims[0]}, v {dims[1]}: not multiples of {chunk} (16 bytes)"
    return any(dim % chunk for dim in dims), what, f"pad the heads with zeros to a multiple of {chunk}"


def wide_heads(problem: Problem) -> Rule:
    what = f"head_dim {max(problem.head_dim, problem.head_dim_v)} is over {HEAD_DIM_LIMIT}"
    return too_wide(problem), what, "use backend='auto'"


def other_scores(problem: Problem) -> tuple[Rule, ...]:
    """What the loops over tiles do not do to scores and weights."""
    return (
        (
            problem.mask.band(problem.seq_q, problem.seq_kv) is None
            and not is_packed(problem)
            and not isinstance(problem.mask, Cached),
            f"mask {problem.mask} is not a diagonal band",
            "use Full, Causal or Window, or backend='auto'",
        ),
        *(
            (
                not term.cpp_type(precise=True),
                f"scores {term}: no kernel has this term",
                "use backend='tiled' or 'reference'",
            )
            for term in problem.scores
        ),
        *(
            (
                name not in _kernel_gradients(problem),
                f"{name} requires grad, and no kernel makes its gradient",
                "detach it, or use backend='tiled' or 'reference'",
            )
            for name in problem.operand_grads
        ),
        *(
            (bool(why), f"scores {term}: {why}", "use backend='tiled' or 'reference'")
            for term in problem.scores
            if (why := term.why_not(problem))
        ),
        (
            problem.seq_kv == 0 and any(term.joins_rows for term in problem.scores),
            "there are no keys, and a logit that joins the sum of every row: kernels are launched for keys alone",
            "use backend='auto'",
        ),
        (
            problem.scale < 0 and not problem.softcap,
            f"scale {problem.scale:g} is negative: the running maximum needs it positive",
            "negate q and the scale",
        ),
    )


def is_packed(problem: Problem) -> bool:
    """Whether kernels take packed sequences as they are, by a table of their tiles; else by spans of keys."""
    if not isinstance(problem.mask, Packed) or problem.operand_grads:
        return False
    return kernels_take_packed(problem.scores, problem.dtype)


def packed_refusals(problem: Problem) -> list[Reason]:
    """Packed sequences that kernels go through by spans of keys, and terms that would take other places for theirs."""
    if not isinstance(problem.mask, Packed):
        return []
    problem = problem.dropout_in_terms()
    return reasons(
        (
            not is_packed(problem) and not spans_say_all(problem),
            "in float32, and where an operand of a term is learned, packed sequences go by spans of keys, which do not "
            "say where a key stands in its own sequence",
            "use 16-bit inputs, one tensor of offsets for queries and keys, or backend='reference'",
        )
    )


def _kernel_gradients(problem: Problem) -> frozenset[str]:
    """The operands whose gradients the terms' structs make."""
    return frozenset(name for term in problem.scores for name in term.cpp_gradients)


def in_terms(problem: Problem) -> Problem:
    """The problem with all but a band of its mask as the last of its terms: the loops over tiles know bands alone.

    A tensor is a Bias or a Keep, and any rule whose spans no band describes is Spans, which run.py makes. Dropout is a
    term as well. Documents that are packed sequences to the kernels stay a mask.
    """
    problem = problem.dropout_in_terms()
    mask = problem.mask
    if mask.band(problem.seq_q, problem.seq_kv) is not None or any(isinstance(one, Spans) for one in problem.scores):
        return problem
    if isinstance(mask, Cached):
        return problem
    if isinstance(mask, Packed):
        return problem if is_packed(problem) else with_spans(problem)
    sequences = as_sequences(problem)
    if sequences is not None:
        return sequences
    band: Mask = Full()
    term: Term
    if isinstance(mask, Dense):
        sizes = (1,) * (4 - len(mask.shape)) + mask.shape
        full = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
        over = tuple(dim for dim, size, whole in zip(SCORE_DIMS, sizes, full, strict=True) if size < whole)
        term = Bias(dtype_name(problem.dtype), over, mask.paired) if mask.additive else Keep(over, mask.paired)
    else:
        band, term = mask.hull(), _known_spans(mask, problem.seq_q, problem.seq_kv)
    scores = in_front_of_outputs(problem.scores, term)
    order = [operand.name for one in scores for operand in one.tensors]
    grads = tuple(sorted(problem.operand_grads, key=order.index))
    return problem.with_(mask=band, scores=scores, operand_grads=grads)


@functools.lru_cache(maxsize=256)
def _known_spans(mask: Mask, seq_q: int, seq_kv: int) -> Spans:
    if not seq_q or not seq_kv:
        return Spans()
    return KnownSpans.of(*mask.spans(torch.arange(seq_q, device="cpu"), seq_q, seq_kv))


def lowered(problem: Problem, wants: Iterable[str]) -> Problem:
    """The problem as kernels are made for it, which learn these of its operands."""
    return learning(in_terms(problem), wants)


def learning(problem: Problem, wants: Iterable[str]) -> Problem:
    """The problem whose terms learn these of their operands, and no others."""
    if not problem.scores:
        return problem
    wanted = frozenset(wants)
    terms = tuple(term.learning(wanted) for term in problem.scores)
    if problem.deterministic:
        terms = tuple(term.ordered() for term in terms)
    return problem if terms == problem.scores else problem.with_(scores=terms)


def specialise_causal_alibi(problem: Problem) -> Problem:
    """The problem for kernels that ignore the signs of ALiBi's distances, where its band leaves none below 0."""
    if isinstance(problem.mask, Packed | Cached) or not problem.scores:
        return problem
    _, right, offset = problem.band
    if offset + right > problem.seq_kv - problem.seq_q:
        return problem
    terms = tuple(term.one_sided() for term in problem.scores)
    return problem if terms == problem.scores else problem.with_(scores=terms)


def long_sequence(problem: Problem) -> Rule:
    longest = max(problem.seq_q, problem.seq_kv)
    return longest > MAX_ROWS, f"sequence of {longest} is over {MAX_ROWS}", "split the sequence"


def transformed(problem: Problem) -> Rule:
    what = "inside a functorch transform (vmap, jvp): a kernel launch cannot be transformed"
    return problem.transformed, what, "use backend='reference' there"


def nothing_fits(problem: Problem, target: Target) -> Reason:
    dims = f"{problem.head_dim}/{problem.head_dim_v}"
    room = f"{target.smem_per_block} bytes of shared memory per block on {target.name}"
    return Reason(f"no tile of heads of {dims} fits the {room}", "use backend='auto'")


def zero_filled(problem: Problem, classes: HeadDimClasses = HEAD_DIM_CLASSES) -> list[str]:
    """The notice of heads that no class is made for."""
    dims, (qk, v) = (problem.head_dim, problem.head_dim_v), class_of(problem, classes)
    return [] if (qk, v) == dims else [f"heads of {dims[0]}/{dims[1]} run in the {qk}/{v} kernel, zero-filled"]


def tuning_key(
    problem: Problem, classes: HeadDimClasses = HEAD_DIM_CLASSES, **mask: Any
) -> tuple[dict[str, Any], dict[str, int]]:
    """What a measured config depends on: the kind of kernel, and the sizes that decide how it fills the GPU."""
    kind = {"head_dims": list(class_of(problem, classes)), **mask, "has_terms": bool(problem.scores)}
    pairs = problem.batch * problem.heads_q
    sizes = {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv, "batch x heads": pairs}
    return kind | {"dtype": dtype_name(problem.dtype)}, sizes


def from_row(config: type[_Config], row: Row, **facts: Any) -> _Config:
    """The Config of a row of a table and of what the problem and the target decide; the row wins where it says it."""
    known = {"head_dim": row["head_dims"][0], "head_dim_v": row["head_dims"][1]} | facts | row
    return config(**{field.name: known[field.name] for field in dataclasses.fields(config)})  # type: ignore[arg-type]


def rows(table: str, section: str, classes: tuple[int, int], has_terms: bool) -> list[Row]:
    """The rows of a section of a table that ships, for a class of heads with or without terms, best first."""
    return _rows(table, section).get((classes, has_terms), [])


@functools.cache
def _rows(table: str, section: str) -> dict[tuple[tuple[int, int], bool], list[Row]]:
    """(head-dim class, has_terms) -> rows; a row is for both unless it says for which."""
    text = importlib.resources.files("tilewise.engine").joinpath(f"tables/{table}.json").read_text()
    found: dict[tuple[tuple[int, int], bool], list[Row]] = {}
    for row in json.loads(text)[section]:
        for has_terms in row.get("has_terms", (False, True)):
            found.setdefault((tuple(row["head_dims"]), has_terms), []).append({**row, "has_terms": has_terms})
    return found
