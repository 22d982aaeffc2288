"""The translation unit of a kernel: an include, its Config as a literal, and the entry point that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..jit import Unit, cpp_literal, layout_asserts

if TYPE_CHECKING:
    import ctypes

    from .policy import Policy


def kernel_unit(
    name: str,
    header: str,
    call: str,
    params: type[ctypes.Structure],
    cpp_params: str,
    arch: str,
    *,
    config: Any = None,
    policy: Policy | None = None,
    smem: str = "",
    smem_bytes: int = 0,
    bounds: str,
    checks: tuple[str, ...] = (),
    strict: bool = True,
) -> Unit:
    """The kernel `name`, which is `call` of the header, with its parameters held to their mirror in Python.

    With a `policy`, the call takes it as `Policy`, and the parameters have what its terms read behind their own.
    `smem` is the C++ type of its shared memory, whose size must be `smem_bytes`; `checks` are further conditions that
    must hold at compile time. `call`, `smem` and `checks` are C++ in the namespace of `cpp_params`.
    """
    namespace = cpp_params.rpartition("::")[0]
    checks = (*checks, *([f"sizeof({smem}) == {smem_bytes}"] if smem else []))
    lines = [f'#include "{header}"']
    given = cpp_params
    if policy is not None:
        params, given = policy.params(params), f"tilewise::ParamsOf<{cpp_params}, Policy>"
        lines += [policy.cpp_source, f"using Policy = {policy.cpp_type};"]
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
    return Unit(name, "\n".join(lines) + "\n", arch, strict=strict, smem_bytes=smem_bytes)
