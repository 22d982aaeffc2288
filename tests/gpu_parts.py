"""Which sources a GPU run has vouched for, part by part: hashes of everything that decides what a part does.

`make gpu-check` runs the tests that need a GPU and records these hashes beside their outcome; a test that needs none
fails when the record of a part is not about the sources at hand. A part is a family of kernels with the Python that
launches it, or what lies between PyTorch and all of them (`seam`), or the ladder: a change to one asks for a GPU run of
that one.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import tilewise
from tilewise.jit.headers import included_paths
from tilewise.native import library

PACKAGE = Path(tilewise.__file__).resolve().parent
# Everything that decides what a kernel does, or which of them runs.
_DECISIVE = (
    "backend.py",
    "isolation.py",
    "operands.py",
    "sequences.py",
    "engine",
    "jit",
    "kernels",
    "plain",
    "torch_kernels",
    "triton",
)
_LADDER = ("ladder", "kernels/ladder")
_SUFFIXES = frozenset({".py", ".cuh", ".cpp", ".h", ".json"})


class Part(NamedTuple):
    """What is vouched for at once, and by which files of tests/gpu.

    `modules`: with what they import of engine/ and jit/, and with run.py; `headers`: with what they include; `files`
    and `folders`: as they are.
    """

    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


PARTS = {
    "sm90.forward": Part(
        ("test_sm90.py",),
        ("engine/sm90/forward.py",),
        ("sm90/forward.cuh", "sm90/combine.cuh"),
        ("engine/sm90/__init__.py", "engine/tables/sm90.json"),
    ),
    "sm90.backward": Part(
        ("test_sm90_backward.py",),
        ("engine/sm90/backward.py",),
        ("sm90/backward.cuh", "sm90/backward_edges.cuh"),
        ("engine/sm90/__init__.py", "engine/tables/sm90_backward.json"),
    ),
    "sm90.float32": Part(
        ("test_float32.py",),
        ("engine/sm90/float32_forward.py", "engine/sm90/float32_backward.py"),
        (
            "sm90/float32_split.cuh",
            "sm90/float32_forward.cuh",
            "sm90/float32_backward.cuh",
            "sm90/float32_backward_rows.cuh",
        ),
        ("engine/sm90/__init__.py", "engine/tables/sm90_float32.json"),
    ),
    "sm80.forward": Part(
        ("test_sm80.py",),
        ("engine/sm80/forward.py",),
        ("sm80/forward.cuh",),
        ("engine/sm80/__init__.py", "engine/tables/sm80.json"),
    ),
    "sm80.backward": Part(
        ("test_sm80_backward.py",),
        ("engine/sm80/backward.py",),
        ("sm80/backward.cuh", "sm80/backward_edges.cuh"),
        ("engine/sm80/__init__.py", "engine/tables/sm80.json"),
    ),
    "sm80.float32": Part(
        ("test_sm80_float32.py",),
        ("engine/sm80/float32_forward.py", "engine/sm80/float32_backward.py"),
        ("sm80/float32_forward.cuh", "sm80/float32_backward.cuh"),
        ("engine/sm80/__init__.py", "engine/tables/sm80.json"),
    ),
    "terms": Part(
        ("test_score_terms.py",),
        ("engine/edges.py", "engine/mask_spans.py", "engine/tile_map.py"),
        ("common/tile_map.cuh", "sm90/staged_bias.cuh", "sm90/bias_gradient.cuh"),
        folders=("terms", "kernels/common/terms"),
    ),
    "decode": Part(
        ("test_decode_gpu.py",),
        ("engine/append.py", "engine/decode.py"),
        ("sm80/append.cuh", "sm80/decode.cuh"),
        ("cache_append.py", "engine/tables/sm80.json", "integrations/flash_attn.py"),
    ),
    "packed": Part(("test_packed_gpu.py",), ("engine/packed.py",), ("common/packed.cuh",)),
    "seam": Part(
        ("test_seam.py", "test_launch.py", "test_torch_rules.py", "test_three_way.py", "test_integrations_gpu.py"),
        files=(
            *(f"{name}.py" for name in ("api", "backend", "masks", "isolation", "memo", "operands", "partials")),
            *(f"{name}.py" for name in ("plan", "problem", "scores", "sequences", "target", "torch_function")),
            "engine/__init__.py",
            "engine/backend.py",
            "engine/lengths.py",
            "jit/tuned.py",
        ),
        folders=("call", "torch_seam", "plain", "triton", "torch_kernels", "hook", "integrations"),
    ),
    "triton": Part(("test_triton_gpu.py",), files=("triton/backend.py", "triton/kernels.py")),
    "native": Part(("test_native_gpu.py",), ("engine/recipe.py",), files=("call/native.py",), folders=("native",)),
    "ladder": Part(("test_ladder_gpu.py",), folders=_LADDER),
}


def runs_unasked(name: str) -> bool:
    """Whether a part runs without being asked for: such parts must have passed on a GPU.

    Native code may be made to answer no call unless asked to. Its detour, which is on either way, is what the compiled
    cases of test_integrations_gpu.py run.
    """
    return name != "native" or library.DEFAULT == "on"


def part_hash(name: str, package: Path = PACKAGE) -> str:
    """Of all sources of a part, in a fixed order."""
    return hash_of(part_sources(name, package), package)


def part_sources(name: str, package: Path = PACKAGE) -> list[Path]:
    """The files that a part's hash covers, sorted by their path inside the package."""
    part = PARTS[name]
    modules = (*part.modules, "engine/run.py") if part.headers else part.modules
    files = _imported([package / module for module in modules], package)
    includes = "".join(f'#include "{header}"\n' for header in part.headers)
    files |= {path for _, path in included_paths(includes, [package / "kernels"])}
    files |= {package / file for file in part.files}
    files |= set(_sources(part.folders, package))
    return sorted(files, key=lambda path: path.relative_to(package).as_posix())


def decisive_sources(package: Path = PACKAGE) -> list[Path]:
    """The files that decide what the engine does. The ladder's are not among them: its kernels run only on request."""
    others = set(_sources(_LADDER, package))
    return [path for path in _sources(_DECISIVE, package) if path not in others]


def hash_of(files: list[Path], package: Path = PACKAGE) -> str:
    """sha256 over the paths and contents of these files."""
    sha = hashlib.sha256()
    for path in files:
        content = _decisive(path)
        sha.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()


def _decisive(path: Path) -> bytes:
    """What a file holds; of C++ without comments and spaces, which a formatter may change."""
    content = path.read_bytes()
    return b"".join(re.sub(rb"//[^\n]*", b" ", content).split()) if path.suffix == ".cuh" else content


def _sources(places: tuple[str, ...], package: Path) -> list[Path]:
    """The files among these, and all sources of the folders among them."""
    found = (path for place in places for path in (package / place, *(package / place).rglob("*")))
    files = {path for path in found if path.suffix in _SUFFIXES}
    return sorted(files, key=lambda path: path.relative_to(package).as_posix())


def _imported(modules: list[Path], package: Path) -> set[Path]:
    """The modules, and what they import of engine/ and jit/, directly or not."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [
                other for other in _imports(path, package) if other.relative_to(package).parts[0] in ("engine", "jit")
            ]
    return found


def _imports(path: Path, package: Path) -> list[Path]:
    """The files of the package that a module imports when it runs."""
    found = []
    for node in _run_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            names = [base, *(base / alias.name for alias in node.names)]
            found += [place for name in names for place in (name.with_suffix(".py"), name / "__init__.py")]
    # A package that the module is in itself says nothing of what it needs.
    return [
        place
        for place in found
        if place.is_file() and (place.name != "__init__.py" or place.parent not in path.parents)
    ]


def _run_nodes(tree: ast.Module) -> list[ast.stmt]:
    """Statements at the top of a module, without what is only for type checkers."""
    return [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
