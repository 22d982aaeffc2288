"""The translation unit of a kernel: an include, its Config as a literal, and the entry point that names it."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ..jit import Unit, cpp_literal, layout_asserts
from ..jit.compile import LONGEST_NAME
from ..target import TARGETS
from .extents import BATCHED, SMEM_UNIT, Extents
from .policy import Bounds, Policy

if TYPE_CHECKING:
    import ctypes

    from ..scores import Term

# Named targets that stand for all others, one of each size of shared memory: tests compile every kernel for them and
# hold it to no spills. On another architecture the assembler may spill a register or two, and that is better than a
# refusal.
COMPILED = tuple(TARGETS[name] for name in ("a100", "rtx-4090", "h200"))
_GATED = frozenset([*(target.arch for target in COMPILED), "sm_90a"])


class Kernel(NamedTuple):
    """The main kernel of a family: `entry` of a header, a template of its Config, its policy and its extents."""

    header: str
    entry: str
    params: type[ctypes.Structure]
    smem: str
    """The C++ type of its shared memory, a template of Config and extents, of the size that the Config says."""
    derived: tuple[str, ...] = ("threads",)
    """What Python and C++ both derive from a Config, by name, and must agree on."""
    precise: bool = False
    """In float32."""
    namespace: str = ""

    @functools.cache  # noqa: B019  (kernels are constants of their modules)
    def unit(
        self,
        config: Any,
        arch: str = "sm_90a",
        terms: tuple[Term, ...] | None = None,
        extents: Extents = BATCHED,
    ) -> Unit:
        """The kernel for these terms of the scores, by default those that the config is made for."""
        policy = Policy.of(terms, config, self.precise, getattr(config, "bounds", Bounds.BOTH))
        agreed = [f"config.{name}() == {_literal(getattr(config, name))}" for name in self.derived]
        return kernel_unit(
            config.name + policy.suffix + extents.suffix,
            self.header,
            f"{self.entry}<config, Policy, Extents>",
            self.params,
            arch,
            namespace=self.namespace,
            config=config,
            policy=policy,
            extents=extents,
            smem=f"{self.smem}<config, Extents>",
            smem_bytes=config.smem_bytes,
            threads=config.threads,
            ctas_per_sm=config.ctas_per_sm,
            checks=tuple(agreed),
        )


def _literal(number: int | float) -> str:
    return f"{number.hex()}f" if isinstance(number, float) else str(number)


def _fitting(name: str) -> str:
    """The name itself or, where many terms make it longer than a Unit's may be, its beginning and a digest of it."""
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 1 - len(digest)]}_{digest}"


def kernel_unit(
    name: str,
    header: str,
    call: str,
    params: type[ctypes.Structure],
    arch: str,
    *,
    threads: int,
    namespace: str = "",
    config: Any = None,
    policy: Policy | None = None,
    extents: Extents | None = None,
    smem: str = "",
    smem_bytes: int = 0,
    ctas_per_sm: int = 0,
    checks: tuple[str, ...] = (),
) -> Unit:
    """The kernel `name`, which is `call` of the header, with its parameters held to their mirror in Python.

    With a `policy` or `extents`, the call takes them as `Policy` and `Extents`, and the parameters have what they read
    behind their own. `smem` is the C++ type of its shared memory, whose size must be `smem_bytes`; `checks` are further
    conditions that must hold at compile time. `call`, `smem` and `checks` are C++ in the namespace, by default that of
    the header's folder; what is common to all is in none.
    """
    name = _fitting(name)
    folder = header.partition("/")[0]
    namespace = "tilewise" if folder == "common" else f"tilewise::{namespace or folder}"
    lines = [f'#include "{header}"']
    parts = [f"{namespace}::{params.__name__}"]
    for part, known_as in ((policy, "Policy"), (extents, "Extents")):
        if part is not None:
            lines += [part.cpp_source, f"using {known_as} = {part.cpp_type};"]
            params = part.params(params)
            parts.append(known_as)
    if smem:
        grows = extents is not None and extents.keeps_records
        smem_bytes += SMEM_UNIT if grows else 0
        checks = (*checks, f"sizeof({smem}) {'<=' if grows else '=='} {smem_bytes}")
    given = f"tilewise::ParamsOf<{', '.join(parts)}>" if len(parts) > 1 else parts[0]
    bounds = f"{threads}, {ctas_per_sm}" if ctas_per_sm else f"{threads}"
    lines += [
        f"using KernelParams = {given};",
        layout_asserts(params, "KernelParams"),
        *([f"constexpr {config.cpp_type} config = {cpp_literal(config)};"] if config is not None else []),
        *([f"namespace {namespace} {{", *(f"static_assert({check});" for check in checks), "}"] if checks else []),
        f'extern "C" __global__ void __launch_bounds__({bounds})',
        f"{name}(const __grid_constant__ KernelParams params) {{",
        f"  {namespace}::{call}(params);",
        "}",
    ]
    # Of terms that are combined a few registers may spill: no other kernel takes them all.
    strict = arch in _GATED and (policy is None or len(policy.terms) <= 1)
    return Unit(name, "\n".join(lines) + "\n", arch, strict=strict, smem_bytes=smem_bytes)
