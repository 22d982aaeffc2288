"""What a kernel does, by its name: the colours of a timeline, and a name short enough to read."""

from __future__ import annotations

import re

ATTENTION, PRODUCT, SOFTMAX, REDUCTION, MOVE = "attention", "product", "softmax", "reduction", "move"
OTHER = "anything"
TITLES = {
    ATTENTION: "fused attention",
    PRODUCT: "matrix product",
    SOFTMAX: "softmax",
    REDUCTION: "sums and combining",
    MOVE: "copies, casts, elementwise",
    OTHER: "anything else",
}
# The first that is found in a name, without case, decides: names of fused kernels hold the words of their parts.
_WORDS = (
    (REDUCTION, r"combine|preprocess|postprocess|row_terms|dot_do_o|convert_dq|reduce|welford|delta|\bsum\b"),
    (ATTENTION, r"flash|fmha|sdpa|attention|attn|mha_|(?:^|_)forward_|(?:^|_)backward_|^forward$|^backward$|grad_quer"
                r"|grad_keys|splitkv"),
    (SOFTMAX, r"softmax"),
    (PRODUCT, r"gemm|gemv|matmul|cublas|cutlass|\bbmm\b|\bmm\b|addmm|baddbmm|scores|values_kernel|_mma"),
    (MOVE, r"elementwise|copy|memcpy|memset|fill|cast|convert|triu_tril|_to_copy|cat_|index|poi_fused|transpose|clone"
           r"|\bmul\b|\badd\b|\bexp\b|where|contiguous|empty|zeros|ones"),
)  # fmt: skip

_FUNCTOR = re.compile(r"(\w+?)(?:_kernel_impl|_kernel_cuda|Functor)\b")
_WRAPPERS = ("gpu", "AUnary", "BUnary", "Binary")


def role_of(name: str) -> str:
    return next((role for role, words in _WORDS if re.search(words, name, re.IGNORECASE)), OTHER)


def short_name(name: str, longest: int = 56) -> str:
    """The function without namespaces, template arguments and parameters; what it was made for, of PyTorch's loops."""
    if name.startswith(("Memset", "Memcpy")):
        return name
    bare = re.sub(r"^void\s+", "", name).replace("(anonymous namespace)::", "")
    first, _, rest = bare.partition("<")
    plain = re.split(r"[<(]", bare, maxsplit=1)[0].strip().rsplit("::", 1)[-1] or bare
    if first.startswith("cutlass::Kernel"):
        plain = re.split(r"[>,(]", rest, maxsplit=1)[0]
    made_for = [word for word in _FUNCTOR.findall(name) if word not in _WRAPPERS]
    if made_for and "elementwise" in plain:
        plain = f"elementwise: {made_for[0]}"
    return plain if len(plain) <= longest else f"{plain[: longest - 1]}…"
