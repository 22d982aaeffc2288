"""Mutants of the parts that decide correctness, and which of them the tests let pass.

    make mutants SEED=1 COUNT=150                   # draws, runs, and fails if more than 5% survive
    python tools/mutants.py --seed 1 --list         # what would be drawn
    python tools/mutants.py --only masks.py         # of the files whose path holds the text
    python tools/mutants.py --seed 1 --save FILE    # in pieces: goes on from the verdicts in the file

Every mutant changes one line. It runs in a copy of the checkout against the tests of its module, the other tests of its
group, more files, and their kernel gates, until one of them fails. That test must pass without the mutant.
tests/mutants.json lists the mutants that change no result or only the speed, each with the reason, by file and text, so
that lines may move. Those that do not compile count neither as killed nor as survivors.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "mutants.json"
MOST_SURVIVORS = 0.05  # of those that are not listed as equivalent
PLAIN, GATES = "not gpu and not kernel_gate and not nightly", "kernel_gate and not gpu and not nightly"
BOTH, NIGHTLY = "not gpu and not nightly", "nightly and not gpu"
NO_TESTS, NOT_FOUND = 5, 4  # pytest's exit status: the markers leave none; a mutant gave the test another name
PATIENCE = 400.0  # seconds without a test that ends, after which a mutant counts as one that hangs


class Group(NamedTuple):
    name: str
    files: tuple[str, ...]  # patterns below src/tilewise
    tests: tuple[str, ...]  # below tests
    wider: tuple[str, ...]  # what a survivor meets besides
    share: int  # of 100 mutants


def _tests(names: str) -> tuple[str, ...]:
    return tuple(f"{folder}test_{name}.py" for folder, name in re.findall(r"(\S*/)?(\S+)", names))


_TERMS = _tests("terms_alibi terms_bias terms_dropout terms_keep terms_max_logit terms_sink terms_spans terms_call")
_MAP = _tests("tile_map extents masks_of_tensors")
_SM80 = _tests("engine/backend_sm80 engine/backend_sm80_backward engine/decode")
_SM90 = _tests("engine/backend_sm90_backward engine/backend_sm90_forward")
_HOSTILE = _tests("hostile/arguments hostile/shapes hostile/autograd hostile/nonfinite hostile/generated_forms "
                  "hostile/generated")  # fmt: skip
_INTEGRATIONS = "integrations/integrations_"
GROUPS = (
    Group("values", ("masks.py", "problem.py", "plan.py", "isolation.py", "sequences.py", "call/resolve.py",
                     "cache_append.py", "scores.py"),
          _tests("masks problem plan scores cached packed"),
          (*_tests("terms op api backends integrations/integrations_kvcache"), *_MAP, *_HOSTILE), 30),
    Group("terms", ("terms/*.py",), (*_tests("hostile/generated_terms terms terms_relative_bias"), *_TERMS),
          (*_tests("operands packed"), *_HOSTILE), 10),
    Group("plain", ("plain/tiled.py", "torch_kernels/gates.py"), _tests("torch_kernels plan backends"),
          (*_tests("op packed"), *_TERMS, *_HOSTILE), 10),
    Group("integrations", ("integrations/transformers.py", "integrations/flash_attn.py"),
          _tests(" ".join(_INTEGRATIONS + name for name in ("flash_attn", "transformers", "kvcache"))),
          (*_tests(" ".join(_INTEGRATIONS + name for name in ("flash_attn_suite", "models"))), *_HOSTILE), 10),
    Group("engine", ("engine/tile_map.py", "engine/rules.py", "jit/cache.py"),
          _tests("tile_map hostile/cache jit/jit backends packed"),
          (*_MAP, *_SM80, *_SM90, *_tests("terms_alibi terms_spans")), 13),
    Group("headers", ("kernels/common/*.cuh", "kernels/common/terms/*.cuh"),
          (*_TERMS, *_MAP, *_tests("terms_relative_bias dropout packed")), (*_SM80, *_SM90), 18),
    Group("hopper", ("kernels/sm90/consumer.cuh", "kernels/sm90/backward_products.cuh"),
          _SM90, (*_tests("engine/backend_sm90 terms_relative_bias"), *_TERMS, *_MAP), 9),
)  # fmt: skip
# Where the name of a test does not hold that of the module.
NEAREST = {
    "isolation.py": _tests("hostile/nonfinite"),
    "sequences.py": _tests("hostile/nonfinite packed"),
    "call/resolve.py": _tests("cached packed api"),
    "cache_append.py": _tests("cached integrations/integrations_kvcache"),
    "plain/tiled.py": _tests("backends"),
    "torch_kernels/gates.py": _tests("torch_kernels"),
    "engine/rules.py": _tests("plan terms_bias terms_keep"),
    "jit/cache.py": _tests("hostile/cache jit/jit"),
    "kernels/common/scores.cuh": _tests("terms_call engine/backend_sm90_forward"),
    "kernels/common/softmax.cuh": _tests("engine/backend_sm80 engine/backend_sm90_forward"),
    "kernels/common/terms/kept_bits.cuh": _tests("masks_of_tensors terms_keep tile_map"),
    "kernels/sm90/consumer.cuh": _tests("engine/backend_sm90_forward"),
    "kernels/sm90/backward_products.cuh": _tests("engine/backend_sm90_backward"),
}


def stages(group: Group, file: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Tests and markers, which a mutant of this file meets one after another until it dies."""
    known = dict.fromkeys(group.tests + group.wider)
    nearest = NEAREST.get(file) or tuple(test for test in known if Path(file).stem in test)
    rest, wider = (tuple(test for test in tests if test not in nearest) for tests in (group.tests, group.wider))
    in_cpp = file.endswith(".cuh")
    if nearest:
        yield nearest, BOTH
    if nearest and in_cpp:
        yield nearest, NIGHTLY
    # Gates run kernels on a model, which takes long and says little about Python.
    for markers in (BOTH,) if in_cpp else (PLAIN, GATES):
        yield from ((tests, markers) for tests in (rest, wider) if tests)
    if nearest and not in_cpp:
        yield nearest, NIGHTLY


class Mutant(NamedTuple):
    file: str  # below src/tilewise
    line: int  # from 1
    before: str  # the whole line
    after: str

    @property
    def text(self) -> tuple[str, str, str]:
        """What names the mutant wherever its line moves to."""
        return self.file, self.before.strip(), self.after.strip()

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        assert lines[self.line - 1] == self.before, f"{self.file}:{self.line} is not {self.before!r}"
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before.strip()}  ->  {self.after.strip() or '(deleted)'}"


class Outcome(NamedTuple):
    mutant: Mutant
    verdict: str  # "killed", "timed out", "does not compile", "equivalent" or "survived"
    by: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.mutant}{self.by and f'  [{self.by}]'}"


# Pieces of a line that are replaced: (line, first column, last column, the other text).
Piece = tuple[int, int, int, str]
_OTHERS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "and": "or",
    "or": "and", "is": "is not", "is not": "is", "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+",
    "/": "*", "//": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "+=": "-=",
}  # fmt: skip
_OPERATOR = re.compile("|".join(rf"(?<!\S){re.escape(o)}(?!\S)" for o in sorted(_OTHERS, key=len, reverse=True)))
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}


def python_pieces(source: str) -> Iterator[Piece]:
    """Not in annotations, decorators, strings and messages of errors, where a change says little about the tests."""
    lines = source.encode().split(b"\n")

    def text(line: int, start: int, end: int) -> str:
        return lines[line - 1][start:end].decode()

    def is_text(node: ast.expr) -> bool:
        return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))

    def between(left: ast.expr, right: ast.expr) -> Iterator[Piece]:
        start, end = left.end_col_offset or 0, right.col_offset
        if left.end_lineno == right.lineno and (found := _OPERATOR.search(text(right.lineno, start, end))):
            yield right.lineno, start + found.start(), start + found.end(), _OTHERS[found[0]]

    def visit(node: ast.AST, conditional: bool) -> Iterator[Piece]:
        test = getattr(node, "test", None)
        if isinstance(node, ast.JoinedStr) or (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            return
        place = getattr(node, "lineno", 0), getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
        single = place[0] == getattr(node, "end_lineno", None)
        operands: list[ast.expr] = []
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
            case ast.BoolOp():
                operands = node.values
            case ast.BinOp() if not any(map(is_text, (node.left, node.right))):
                operands = [node.left, node.right]
            case ast.Constant(value=bool()):
                yield (*place, str(not node.value))
            case ast.Constant(value=int()):
                yield from ((*place, str(node.value + step)) for step in (1, -1) if node.value + step >= 0)
            case ast.UnaryOp(op=ast.Not()) if single:
                yield (*place, text(*place)[len("not") :].lstrip())
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                yield node.lineno, node.col_offset, node.col_offset + len(name), _NAMES[name]
            case ast.Call(args=[first, second, *_]) if single and not isinstance(first, ast.Starred | ast.GeneratorExp):
                a, b = (text(node.lineno, arg.col_offset, arg.end_col_offset or 0) for arg in (first, second))
                if a != b and not isinstance(second, ast.Starred):
                    comma = text(node.lineno, first.end_col_offset or 0, second.col_offset)
                    yield node.lineno, first.col_offset, second.end_col_offset or 0, b + comma + a
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() if single:
                yield (*place, "pass")
            case ast.Return() if single and conditional:
                yield (*place, "pass")
        for left, right in itertools.pairwise(operands):
            yield from between(left, right)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and test.lineno == test.end_lineno:
            where = test.lineno, test.col_offset, test.end_col_offset
            yield (*where, f"(not ({text(*where)}))")
        if isinstance(node, ast.Raise):
            return
        for name, field in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, isinstance(node, ast.If | ast.For | ast.While))

    for line, start, end, other in visit(ast.parse(source), False):
        # ast counts bytes.
        yield line, len(text(line, 0, start)), len(text(line, 0, end)), other


_WORD = re.compile(r"(?<![\w.])(?:\d+|min_int|max_int|true|false)(?![\w.])|!(?=[\w(])")
_WORDS = {"min_int": "max_int", "max_int": "min_int", "true": "false", "false": "true", "!": ""}
_STATEMENT = re.compile(r"\s+((?:[a-z_]\w*(?:::|\.|->))*(?!return)[a-z_]\w*\(.*\);|return;|continue;|break;)")
_NO_CODE = re.compile(r"\s*#|\s*template\b|.*static_assert|.*\basm\b|.*\"|\s*\*|.*/\*")


def header_pieces(source: str) -> Iterator[Piece]:
    for number, line in enumerate(source.split("\n"), 1):
        code = line.split("//")[0].rstrip()
        if _NO_CODE.match(line):
            continue
        yield from ((number, *found.span(), _OTHERS[found[0]]) for found in _OPERATOR.finditer(code))
        for found in _WORD.finditer(code):
            yield number, *found.span(), _WORDS[found[0]] if found[0] in _WORDS else str(int(found[0]) + 1)
        if (found := _STATEMENT.fullmatch(code)) and code.count("(") == code.count(")"):
            yield number, *found.span(1), ";"


def mutants_of(file: str, source: str) -> list[Mutant]:
    lines = source.split("\n")
    pieces = python_pieces(source) if file.endswith(".py") else header_pieces(source)
    return sorted(
        Mutant(file, n, lines[n - 1], lines[n - 1][:start] + other + lines[n - 1][end:])
        for n, start, end, other in pieces
    )


def draw(sources: dict[Group, dict[str, str]], seed: int, count: int) -> dict[Group, list[Mutant]]:
    """At most one mutant of a line, and of each group its share."""
    chance = random.Random(seed)
    groups = [group for group in sources if sources[group]]
    shares = collections.Counter(chance.choices(groups, [group.share for group in groups], k=count) if groups else [])
    drawn = {}
    for group in groups:
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for mutant in itertools.chain.from_iterable(mutants_of(*item) for item in sorted(sources[group].items())):
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
        lines = chance.sample(sorted(by_line), min(shares[group], len(by_line)))
        drawn[group] = [chance.choice(by_line[line]) for line in sorted(lines)]
    return drawn


def read(root: Path, groups: tuple[Group, ...], only: str = "") -> dict[Group, dict[str, str]]:
    package = root / "src" / "tilewise"
    found = {g: sorted(path for pattern in g.files for path in package.glob(pattern)) for g in groups}
    return {
        group: {name: path.read_text() for path in paths if only in (name := path.relative_to(package).as_posix())}
        for group, paths in found.items()
    }


class Run(NamedTuple):
    """Of pytest."""

    status: int | None  # None: it hung
    printed: str

    @property
    def passed(self) -> bool:
        return self.status in (0, NO_TESTS)


class Tree(NamedTuple):
    """A copy of the checkout."""

    folder: Path
    cache: Path  # of all trees: what is in it is found by a digest of all that it was made from
    running: list[subprocess.Popen[bytes]]  # at most one

    def stop(self) -> None:
        """Ends the tests and all that they started: they have a session of their own, which no interrupt reaches."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, tests: tuple[str, ...], *options: str, cache: Path | None = None) -> Run:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            environment = {
                **os.environ,
                "PYTHONPATH": str(self.folder / "checkout" / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",  # compiled files know a source by its second and its size
                "PYTHONUNBUFFERED": "1",
                "TILEWISE_CACHE_DIR": str(cache or self.cache),
                "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
            }
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider"]
            command += ["--hypothesis-seed=0", *options, *(f"tests/{test}" for test in tests)]
            printed = Path(scratch) / "printed"
            with printed.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=self.folder / "checkout", env=environment, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            self.running.append(process)
            status = self._wait(process, printed)
            self.running.clear()
            return Run(status, printed.read_text(errors="replace"))

    def _wait(self, process: subprocess.Popen[bytes], printed: Path) -> int | None:
        size, since = 0, time.monotonic()
        while time.monotonic() < since + PATIENCE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(1.0)
            if printed.stat().st_size > size:
                size, since = printed.stat().st_size, time.monotonic()
        self.stop()
        process.wait()
        return None

    def judge(self, mutant: Mutant, tests: tuple[str, ...], markers: str) -> Outcome:
        path = self.folder / "checkout" / "src" / "tilewise" / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            with tempfile.TemporaryDirectory(dir=self.folder) as own:  # what changes the cache may spoil it
                cache = Path(own) if mutant.file.startswith("jit/") else None
                status, printed = found = self.run(tests, "-m", markers, cache=cache)
        finally:
            path.write_text(source)
        if found.passed:
            return Outcome(mutant, "survived")
        if status == -signal.SIGKILL:  # by `stop`, or for want of memory
            raise SystemExit(f"The tests of {mutant} were killed; no verdict.")
        if status is None:
            return Outcome(mutant, "timed out", f"{PATIENCE:.0f} s without the end of a test")
        if mutant.file.endswith(".cuh") and re.search(r"CompileError|CalledProcessError: Command .*g\+\+", printed):
            return Outcome(mutant, "does not compile")
        failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", printed, re.MULTILINE)
        return Outcome(mutant, "killed", failed[1] if failed else f"pytest's exit status {status}")

    def check(self, outcome: Outcome) -> None:
        """The test that a mutant failed passes without it, if there is one; or its file can be collected."""
        if "test_" not in outcome.by:
            return
        status, printed = found = self.run((outcome.by,), *([] if "::" in outcome.by else ["--collect-only"]))
        if not found.passed and status != NOT_FOUND:
            raise SystemExit(f"It fails without a mutant; no verdict would mean anything.\n{printed[-4000:]}")


class Verdicts:
    """Of earlier runs, by the line of the mutant. A survivor is judged again after a change of the tests."""

    def __init__(self, path: Path | None, root: Path) -> None:
        self.path, self.root = path, root
        self.tests = self._digest()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.known = {
            Mutant(*row["mutant"]): Outcome(Mutant(*row["mutant"]), row["verdict"], row["by"])
            for row in map(json.loads, lines)
            if row["verdict"] != "survived" or row["tests"] == self.tests
        }

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted((self.root / "tests").rglob("*.[pch]*")):
            if path.suffix in (".py", ".h", ".cpp", ".cuh"):
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def add(self, outcome: Outcome) -> None:
        self.known[outcome.mutant] = outcome
        if self.path is not None:
            row = {"mutant": outcome.mutant, "verdict": outcome.verdict, "by": outcome.by, "tests": self.tests}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def judge(
    root: Path, drawn: dict[Group, list[Mutant]], listed: set[tuple[str, ...]], workers: int, verdicts: Verdicts
) -> dict[Group, list[Outcome]]:
    """Prints what became of each mutant as soon as it is known."""
    left = [
        (mutant, group)
        for group, mutants in drawn.items()
        for mutant in mutants
        if mutant.text not in listed and mutant not in verdicts.known
    ]
    passing: set[str] = set()  # tests that failed of a mutant, and pass without one
    with tempfile.TemporaryDirectory(prefix="tilewise-mutants-") as scratch, ThreadPoolExecutor(workers) as pool:
        cache = Path(scratch) / "cache"
        cache.mkdir()
        trees = [Tree(Path(scratch) / str(worker), cache, []) for worker in range(min(workers, len(left)))]
        free: Queue[Tree] = Queue()
        for tree in trees:
            ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
            shutil.copytree(root, tree.folder / "checkout", ignore=ignored)
            free.put(tree)

        def run(mutant: Mutant, group: Group) -> None:
            tree = free.get()
            try:
                outcome = Outcome(mutant, "survived")
                for tests, markers in stages(group, mutant.file):
                    outcome = tree.judge(mutant, tests, markers)
                    if outcome.verdict != "survived":
                        break
                if outcome.by not in passing:
                    tree.check(outcome)
                    passing.add(outcome.by)
            finally:
                free.put(tree)
            verdicts.add(outcome)
            print(outcome, flush=True)

        running = [pool.submit(run, *item) for item in left]
        try:
            for one in as_completed(running):
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.stop()
            raise
    return {
        group: [
            Outcome(mutant, "equivalent") if mutant.text in listed else verdicts.known[mutant] for mutant in mutants
        ]
        for group, mutants in drawn.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--only", default="", metavar="TEXT", help="draw from files whose path holds the text")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run side by side")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep verdicts, and judge only what has none there")
    parser.add_argument("--list", action="store_true", help="print what would be drawn")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the tests end, too
    drawn = draw(read(ROOT, GROUPS, given.only), given.seed, given.count)
    if given.list:
        print("\n".join(f"{group.name}: {mutant}" for group, mutants in drawn.items() for mutant in mutants))
        return 0
    listed = {(row["file"], row["before"], row["after"]) for row in json.loads(EQUIVALENT.read_text())}
    verdicts = Verdicts(given.save, ROOT)
    total: collections.Counter[str] = collections.Counter()
    summary = []
    for group, outcomes in judge(ROOT, drawn, listed, given.workers, verdicts).items():
        counts = collections.Counter(outcome.verdict for outcome in outcomes)
        total.update(counts)
        summary.append(f"{group.name}: {', '.join(f'{n} {verdict}' for verdict, n in sorted(counts.items()))}")
    matter = total.total() - total["equivalent"] - total["does not compile"]
    print("\n".join(summary))
    print(f"{total['survived']} of {matter} survived; at most {MOST_SURVIVORS:.0%} may.")
    return int(not matter or total["survived"] > MOST_SURVIVORS * matter)


if __name__ == "__main__":
    sys.exit(main())
