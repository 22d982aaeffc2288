"""tilewise: fused attention for PyTorch, and the microscope that goes with it.

out = tilewise.attention(q, k, v, mask="causal")
print(tilewise.explain(q, k, v, mask="causal"))
"""

from . import _path  # noqa: F401  (first of all: not even `__future__` comes from the current directory)

# isort: split
from . import _interrupt  # before anything that takes long to import

# isort: split
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from ._public import __all__ as __all__
    from .integrations.sdpa import FallbackWarning as FallbackWarning
    from .integrations.sdpa import sdpa as sdpa
    from .lab.watch.trace import no_math_fallback as no_math_fallback
    from .lab.watch.trace import trace as trace
elif not _interrupt.IS_COMMAND:
    from . import _public

    globals().update((name, value) for name, value in vars(_public).items() if name in ("__all__", *_public.__all__))


def __getattr__(name: str) -> object:
    """A name that is loaded when it is first asked for. The command loads all of them so: its help needs no PyTorch."""
    if _interrupt.IS_COMMAND and find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"the module {name} is not imported")  # as Python expects it while it imports that module
    return getattr(import_module("._public", __name__), name)
