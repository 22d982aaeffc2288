"""The structure holds: imports go one way, the public names are what they say, README's code runs, import is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from support import make_problem
from tilewise.masks import Causal, Dense, Documents, Window
from tilewise.plan import plan
from tilewise.target import Target
from tilewise.terms import Alibi, Sink

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tilewise"

# Each layer may import those before it and itself; those at the top stand side by side.
LAYERS = [
    "_path", "_interrupt", "errors", "memo", "fresh", "element", "operands", "masks", "scores", "terms", "problem",
    "target", "partials", "jit", "native", "hook", "sequences", "isolation", "backend", "plain", "triton",
    "torch_kernels", "engine", "plan", "torch_seam.switches", "call.request", "call.resolve", "call.build",
    "call.memory", "torch_seam.autograd", "torch_seam.ops", "torch_seam.traced", "call.native", "call.execute",
    "torch_function", "api", "cache_append", "ladder",
]  # fmt: skip
TOP = {"lab", "integrations"}
# The same inside the lab: modules, then folders.
LAB = [
    "units", "processes", "report", "candidates", "model", "measure", "studies", "watch", "render",
    "commands",
]  # fmt: skip
ABOVE_ALL = {"__init__", "__main__", "_flash", "_public"}


IN_LAYERS = {"call", "torch_seam"}  # folders whose modules are layers of their own


def layer_of(path: Path) -> str:
    return layer_named([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])


def layer_named(parts: list[str]) -> str:
    return ".".join(parts[:2]) if parts[0] in IN_LAYERS and parts[1:2] != ["__init__"] else parts[0]


def imported_modules(path: Path) -> set[str]:
    """Dotted names inside tilewise that a file imports, at any depth, type-checking imports included."""
    package = ["tilewise", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "tilewise"}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "tilewise":
                found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if layer_of(path) not in ABOVE_ALL]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = layer_of(path)
    if own in IN_LAYERS:
        assert not imported_modules(path), "a folder of layers imports nothing itself"
        return
    assert own in {*LAYERS, *TOP}, f"{own} is in no layer"
    below = LAYERS if own in TOP else LAYERS[: LAYERS.index(own)]
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[1:2] in ([], ["__version__"]):
            continue
        assert layer_named(parts[1:]) in {*below, own}, f"{path.name} imports {name}, which is not below it"


@pytest.mark.parametrize(
    "path", [path for path in FILES if layer_of(path) == "lab"], ids=lambda path: str(path.relative_to(PACKAGE / "lab"))
)
def test_imports_inside_the_lab_go_one_way(path):
    own = path.relative_to(PACKAGE / "lab").parts[0].removesuffix(".py")
    if own == "__init__":
        assert not siblings(path, "lab"), "importing one module of the lab imports no other"
        return
    assert own in LAB, f"{own} is in no layer of the lab"
    for name in siblings(path, "lab"):
        assert name in LAB[: LAB.index(own) + 1], f"{path.name} imports lab.{name}, which is not below it"


def siblings(path: Path, folder: str) -> set[str]:
    """The modules of a folder of the package that a file there imports."""
    prefix = f"tilewise.{folder.replace('/', '.')}."
    return {name.removeprefix(prefix).split(".")[0] for name in imported_modules(path) if name.startswith(prefix)}


BACKENDS = {"plain", "triton", "torch_kernels", "engine"}


def test_backends_do_not_import_one_another():
    for path in FILES:
        own = layer_of(path)
        if own in BACKENDS:
            layers = {name.split(".")[1] for name in imported_modules(path)}
            assert not layers & BACKENDS - {own}, path
    for path in (PACKAGE / "plain").glob("*.py"):
        assert not siblings(path, "plain"), path


PURE = {
    "append",
    "config",
    "decode",
    "division",
    "edges",
    "extents",
    "packed",
    "params",
    "policy",
    "program",
    "registers",
    "rules",
    "source",
    "tile_map",
}


def test_families_know_neither_tensors_nor_the_driver_nor_other_architectures():
    for path in (PACKAGE / "engine").glob("sm*/*.py"):
        used = siblings(path, "engine") - {path.parent.name}
        assert used <= {*PURE, "backend"} if path.stem == "__init__" else used <= PURE, path
    for name in PURE:
        path = PACKAGE / "engine" / f"{name}.py"
        assert siblings(path, "engine") <= PURE, name
        assert not any(imported.startswith("tilewise.jit.launch") for imported in imported_modules(path)), name


def test_public_names():
    assert sorted(tilewise.__all__) == list(tilewise.__all__)
    for name in tilewise.__all__:
        assert getattr(tilewise, name).__doc__, name


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light_and_touches_no_device():
    """No compiler, no CUDA binding, no CLI library, no CUDA context; the lab stays out until it is asked for."""
    names = "triton cuda typer rich numba matplotlib transformers torch._dynamo torch._inductor"
    unwanted = {*names.split(), "tilewise.lab", "tilewise.integrations"}
    code = (
        "import sys, torch; before = set(sys.modules); import tilewise; "
        f"print(sorted((set(sys.modules) - before) & {unwanted}), torch.cuda.is_initialized())"
    )
    assert run_fresh(code) == "[] False"


def test_the_command_line_needs_no_more_than_the_lab_extra_brings():
    """A CPU build of torch brings neither Triton nor CUDA's bindings, nor NumPy."""
    others = ["triton", "cuda", "numpy", "numba", "matplotlib", "transformers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others})); import tilewise.lab.commands.app; print('imported')"
    )
    assert run_fresh(code) == "imported"


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_snippets_run(snippet):
    run_fresh(snippet)


def test_readme_links_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    ("row", "target"),
    [("H100", "h100"), ("A100", "a100"), ("A100", "rtx-4090"), ("B200", "b200"), ("B200", "rtx-5090")],
)
def test_readme_says_what_the_planner_runs(row, target):
    """A column of the matrix "What runs where", and a problem of each kind that its heading names."""
    (line,) = re.findall(rf"^\| {row}.*$", README, re.MULTILINE)
    documents = Documents((0, 60, 128), (), Causal())
    kinds = (
        ({}, {"mask": Causal()}),
        ({"mask": Window(64, 0)}, {"mask": documents}),
        ({"mask": Dense((2, 1, 1, 128))}, {"mask": Dense((1, 1, 128, 128), additive=True)}),
        ({"softcap": 30.0}, {"scores": (Alibi(),)}, {"scores": (Sink(),)}, {"dropout": 0.1}, {"dtype": torch.float32}),
    )
    for cell, problems in zip(line.split("|")[2:-1], kinds, strict=True):
        for fields in problems:
            batch = 1 if fields.get("mask") is documents else 2
            problem = make_problem((batch, 4, 128, 64), **{"dtype": torch.bfloat16} | fields)
            assert plan(problem, Target.named(target)).backend == cell.strip(" `"), problem
