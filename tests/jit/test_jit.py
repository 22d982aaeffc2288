"""The JIT without a GPU: literals and layouts proved by the compiler, the gates, the cache under real processes."""

from __future__ import annotations

import ctypes
import enum
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise.errors import CompileError
from tilewise.jit import (
    Unit,
    build,
    build_all,
    build_key,
    cache,
    cpp_constant,
    cpp_literal,
    layout_asserts,
    nvrtc,
    params_struct,
    sass,
)
from tilewise.jit import compile as compiling
from tilewise.jit.mirror import TensorMap
from tilewise.jit.ptxas import Resources, broken_gates, parse_resources

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext as ForkServer

ARCH = "sm_90a"
COPY = 'extern "C" __global__ void copy(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }\n'
SPILL = """
extern "C" __global__ void __launch_bounds__(1024) spill(float* p, int n) {
  float a[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = p[i * n + threadIdx.x];
  for (int j = 0; j < n; ++j)
    #pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = a[(i * 7 + 1) % 96] * a[i] + p[j];
  #pragma unroll
  for (int i = 0; i < 96; ++i) p[i * n + threadIdx.x] = a[i];
}
"""
WGMMA = """
extern "C" __global__ void __launch_bounds__(128, 1) gemm(float* p, int n, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    /* here */
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  p[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
SETMAXNREG = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");'


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own, and every once-only log line is fresh."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_said", set())
    return folder


def copy_unit(comment: str = "") -> Unit:
    return Unit("copy", f"// {comment}\n{COPY}", ARCH)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Config literals


class Order(enum.IntEnum):
    FORWARD = 0
    LONGEST_FIRST = 2


@dataclass(frozen=True)
class Tile:
    cpp_type: ClassVar[str] = "Tile"
    rows: int
    share: float


@dataclass(frozen=True)
class Choice:
    cpp_type: ClassVar[str] = "ns::Choice"
    block_q: int
    causal: bool
    order: Order
    tile: Tile


def test_literal_names_every_field_in_order() -> None:
    tile = "Tile{.rows = 64, .share = 0x1.0000000000000p-1}"
    literal = cpp_literal(Choice(128, True, Order.LONGEST_FIRST, Tile(64, 0.5)))
    assert literal == f"ns::Choice{{.block_q = 128, .causal = true, .order = 2, .tile = {tile}}}"


@pytest.mark.parametrize("value", ["bf16", None, float("nan"), float("inf"), 2**64, -(2**63), [1], 1j])
def test_literal_refuses_what_cpp_cannot_say(value: object) -> None:
    config = make_dataclass("Config", [("field", object)], namespace={"cpp_type": "Config"})(value)
    with pytest.raises(TypeError, match=re.escape(f"{value}" if not isinstance(value, str) else value)):
        cpp_literal(config)


def test_literal_wants_the_cpp_type() -> None:
    with pytest.raises(TypeError, match="cpp_type"):
        cpp_literal(make_dataclass("Nameless", [("field", int)])(1))


int64 = st.integers(-(2**63) + 1, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.tuples(int64, st.integers(0, 2**64 - 1), st.booleans(), finite), min_size=1, max_size=20))
def test_literal_arrives_bit_for_bit(rows: list[tuple[int, int, bool, float]]) -> None:
    Row = make_dataclass("Row", ["a", "b", "c", "d"], namespace={"cpp_type": "Row"})
    source = "struct Row { long long a; unsigned long long b; bool c; double d; };\n"
    for i, (a, b, c, d) in enumerate(rows):
        bits = struct.unpack("<Q", struct.pack("<d", d))[0]
        source += f"constexpr Row row{i} = {cpp_literal(Row(a, b, c, d))};\n"
        source += f"static_assert(row{i}.a == {a}LL && row{i}.b == {b}ULL && row{i}.c == {str(c).lower()});\n"
        source += f"static_assert(__builtin_bit_cast(unsigned long long, row{i}.d) == {bits}ULL);\n"
    assert build(Unit("copy", source + COPY, ARCH)).cubin


def test_a_field_in_another_order_does_not_compile() -> None:
    source = "struct Tile { float share; int rows; };\n" + f"constexpr Tile tile = {cpp_literal(Tile(64, 0.5))};\n"
    with pytest.raises(CompileError, match=r"kernel\.cu\(2\): error"):
        build(Unit("copy", source + COPY, ARCH))


@pytest.mark.parametrize("fields", ["int rows; float share;", "int rows; float share; int forgotten;", "int rows;"])
def test_a_constant_wants_the_same_fields_on_both_sides(fields: str) -> None:
    unit = Unit("copy", f"struct Tile {{ {fields} }};\n{cpp_constant('tile', Tile(64, 0.5))}{COPY}", ARCH)
    if fields == "int rows; float share;":
        assert "warning" not in build(unit).log
    else:
        with pytest.raises(CompileError, match=r"kernel\.cu\([23]\): error"):
            build(unit)


# Params structs

CPP_NAMES = {
    ctypes.c_int32: "int",
    ctypes.c_int64: "long long",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    ctypes.c_void_p: "void*",
    ctypes.c_bool: "bool",
    ctypes.c_uint16: "unsigned short",
    TensorMap: "TensorMap",
}
TENSOR_MAP = "struct alignas(64) TensorMap { unsigned long long opaque[16]; };\n"


def cpp_struct(fields: dict[str, type[Any]]) -> str:
    members = " ".join(f"{CPP_NAMES[kind]} {name};" for name, kind in fields.items())
    return f"{TENSOR_MAP}struct Params {{ {members} }};\n"


@settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.sampled_from(sorted(CPP_NAMES, key=repr)), min_size=1, max_size=12))
def test_params_are_laid_out_as_cpp_does(kinds: list[type[Any]]) -> None:
    fields = {f"f{i}": kind for i, kind in enumerate(kinds)}
    asserts = layout_asserts(params_struct("Params", **fields), "Params")
    assert asserts.count("static_assert") == 1 + 2 * len(kinds)
    assert build(Unit("copy", cpp_struct(fields) + asserts + COPY, ARCH)).cubin


@pytest.mark.parametrize(
    ("cpp", "complaint"),
    [
        ({"map": TensorMap, "n": ctypes.c_int32, "out": ctypes.c_void_p, "scale": ctypes.c_float}, "n is at byte 136"),
        ({"map": TensorMap, "out": ctypes.c_void_p, "n": ctypes.c_int64, "scale": ctypes.c_float}, "n has 4 bytes"),
        ({"out": ctypes.c_void_p, "n": ctypes.c_int32, "scale": ctypes.c_float}, "Params has 192 bytes"),
    ],
)
def test_params_that_differ_in_cpp_do_not_compile(cpp: dict[str, type[Any]], complaint: str) -> None:
    python = params_struct("Params", map=TensorMap, out=ctypes.c_void_p, n=ctypes.c_int32, scale=ctypes.c_float)
    source = cpp_struct(cpp) + layout_asserts(python, "Params") + COPY
    with pytest.raises(CompileError) as caught:
        build(Unit("copy", source, ARCH))
    log = (kept_folder(caught.value) / "build.log").read_text()
    assert complaint in log


# Building


def kept_folder(error: CompileError) -> Path:
    match = re.search(r"Source and full log: (.+)", str(error))
    assert match, str(error)
    return Path(match[1])


def test_a_build_reports_its_resources_and_keeps_its_source() -> None:
    unit = Unit(
        "sum",
        'extern "C" __global__ void sum(float* p) {\n'
        "  __shared__ float part[256];\n"
        "  part[threadIdx.x] = p[threadIdx.x];\n  __syncthreads();\n  p[threadIdx.x] = part[255 - threadIdx.x];\n}\n",
        ARCH,
    )
    kernel = build(unit)
    assert (kernel.name, kernel.arch, kernel.from_cache) == ("sum", ARCH, False)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.resources.static_smem_bytes == 1024
    assert kernel.resources.barriers == 1
    assert 0 < kernel.resources.registers <= 32
    assert kernel.source_path is not None
    assert kernel.source_path.read_text() == unit.source


def test_the_second_build_comes_from_the_cache_and_is_the_same() -> None:
    first, second = build(copy_unit()), build(copy_unit())
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first == second
    assert (first.cubin, first.log, first.resources) == (second.cubin, second.log, second.resources)


def test_build_all_yields_kernels_and_errors_side_by_side() -> None:
    good, bad = copy_unit("one"), Unit("copy", "nonsense;", ARCH)
    outcome = dict(build_all([good, bad, copy_unit("two")], workers=2))
    assert len(outcome) == 3
    assert isinstance(outcome[bad], CompileError)
    assert outcome[good] == build(good)


def while_another_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Another thread is compiling from now on; returns the programs that are started, as they are."""
    started: list[str] = []
    real = subprocess.run

    def seen(command: list[str], **options: Any) -> Any:
        started.append(command[0])
        return real(command, **options)

    busy = threading.Lock()
    busy.acquire()
    monkeypatch.setattr(nvrtc, "_compiling_here", busy)
    monkeypatch.setattr(nvrtc, "_tries_processes", True)
    monkeypatch.setattr(nvrtc.subprocess, "run", seen)
    return started


def test_a_build_beside_another_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = copy_unit("apart")
    with monkeypatch.context() as patch:
        started = while_another_compiles(patch)
        apart = build(unit)
        with pytest.raises(CompileError, match="nonsense"):
            build(Unit("copy", "nonsense;", ARCH))
    assert started == [sys.executable] * 2
    here = compiling._run_nvrtc(unit.source, compiling._options(unit), compiling.KERNELS, "CUBIN")
    assert apart.cubin == here[0]


@pytest.mark.parametrize("what", ["no interpreter", "no process", "another version", "half an answer"])
def test_without_a_process_of_its_own_a_build_waits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    while_another_compiles(monkeypatch)
    version = [1, 0] if what == "another version" else nvrtc.version(compiling._nvrtc())
    told = json.dumps({"version": version, "status": "", "product": 7, "log": 0}).encode()

    def answer(command: list[str], **options: Any) -> Any:
        if what == "no process":
            raise OSError
        return subprocess.CompletedProcess(command, 0, told + (b"\nhalf" if what == "half an answer" else b"\nnothing"))

    monkeypatch.setattr(nvrtc.subprocess, "run", answer)
    if what == "no interpreter":
        monkeypatch.setattr(sys, "executable", "/usr/bin/embeds-us")
    threading.Timer(0.05, nvrtc._compiling_here.release).start()
    assert build(copy_unit("waits")).cubin.startswith(b"\x7fELF")
    assert nvrtc._compiling_here.acquire(blocking=False)  # it was given back
    assert not nvrtc._tries_processes


@pytest.mark.parametrize(
    ("name", "arch"), [("a-b", ARCH), ("", ARCH), ("é", ARCH), ("copy", "90a"), ("copy", "sm_90a; rm")]
)
def test_a_unit_checks_its_name_and_arch(name: str, arch: str) -> None:
    with pytest.raises(ValueError, match=r"Unit\.(name|arch)"):
        Unit(name, COPY, arch)


def test_a_syntax_error_shows_its_line_and_where_the_source_is() -> None:
    source = COPY.replace("out[threadIdx.x] =", "out[threadIdx.x] = missing +")
    with pytest.raises(CompileError) as caught:
        build(Unit("copy", "// first line\n" + source, ARCH))
    message = str(caught.value)
    assert 'kernel.cu(2): error: identifier "missing" is undefined' in message
    shown = message.splitlines()
    line = next(i for i, text in enumerate(shown) if "missing +" in text and "error" not in text)
    assert shown[line + 1].index("^") == shown[line].index("missing")
    assert (kept_folder(caught.value) / "kernel.cu").read_text() == "// first line\n" + source


def test_an_error_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "broken.cuh").write_text("// one\nint answer = ;\n")
    with pytest.raises(CompileError, match=r"broken\.cuh\(2\): error"):
        build(Unit("copy", f'#include "broken.cuh"\n{COPY}', ARCH), include_root=tmp_path)


def test_an_assembler_error_shows_the_instruction_and_its_source_line() -> None:
    source = WGMMA.replace("wgmma.commit_group.", "wgmma.comit_group.")
    with pytest.raises(CompileError) as caught:
        build(Unit("gemm", source, ARCH))
    line = 1 + source[: source.index("comit_group")].count("\n")
    assert "wgmma.comit_group.sync.aligned;" in str(caught.value)
    assert f"from kernel.cu({line})" in str(caught.value)
    assert "comit_group" in (kept_folder(caught.value) / "kernel.ptx").read_text()


def test_a_kernel_of_another_name_is_an_error() -> None:
    with pytest.raises(CompileError, match="no resources for 'other'"):
        build(Unit("other", COPY, ARCH))


def test_headers_are_not_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        build(Unit("copy", f'#include "stray.cuh"\n{COPY}', ARCH))


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(CompileError, match=r"pip install 'tilewise\[cuda\]'"):
        build(copy_unit())


def test_a_long_build_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spoken = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            spoken.set()

    real = compiling._run_nvrtc

    def slow(*arguments: Any) -> tuple[bytes, str]:
        assert spoken.wait(600)
        return real(*arguments)

    listener = Listener(logging.WARNING)
    logging.getLogger("tilewise").addHandler(listener)
    monkeypatch.setattr(compiling, "NOTICE_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(compiling, "_run_nvrtc", slow)
    try:
        build(copy_unit())
    finally:
        logging.getLogger("tilewise").removeHandler(listener)
    assert warnings_in(caplog) == ["tilewise: building copy for sm_90a (first use; cached afterwards)"]


def test_a_short_build_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiling, "NOTICE_AFTER_SECONDS", 600.0)
    build(copy_unit())
    assert warnings_in(caplog) == []


# Gates


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("spill", SPILL, "registers spill to local memory: .* bytes spill stores"),
        (
            "local",
            'extern "C" __global__ void local(int* p, int n) {\n  volatile int a[64];\n'
            "  for (int i = 0; i < n; ++i) a[p[i] & 63] = i;\n  p[0] = a[p[n] & 63];\n}\n",
            "a local array is not held in registers: .* bytes stack frame",
        ),
        ("gemm", WGMMA.replace("/* here */", "p[3] = d[1];"), r"the wgmma pipeline is serialised: .*\(C751\d\)"),
        (
            "gemm",
            WGMMA.replace("(128, 1)", "(128)").replace("float d[4]", f"{SETMAXNREG} float d[4]"),
            r"setmaxnreg is ignored: .*\(C7508\)",
        ),
    ],
    ids=["spill", "local array", "serialised wgmma", "ignored setmaxnreg"],
)
def test_a_slow_kernel_fails_its_build_unless_it_is_a_debug_build(name: str, source: str, complaint: str) -> None:
    with pytest.raises(CompileError, match=complaint):
        build(Unit(name, source, ARCH))
    with pytest.raises(CompileError, match=complaint):
        build(Unit(name, source, ARCH))
    assert build(Unit(name, source, ARCH, strict=False)).from_cache


def test_a_clean_wgmma_kernel_passes_the_gates() -> None:
    assert broken_gates(build(Unit("gemm", WGMMA, ARCH)).log) == []


def test_harmless_remarks_pass_the_gates() -> None:
    assert broken_gates("ptxas info    : (C7519) some remark\nptxas info    : 0 bytes gmem\n") == []


def test_resources_cover_the_functions_a_kernel_calls() -> None:
    log = (
        "ptxas info    : Compiling entry function 'main_kernel' for 'sm_90a'\n"
        "ptxas info    : Function properties for main_kernel\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 9 barriers, 16+0 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Function properties for _Z6helperi\n"
        "ptxas         .     24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
    )
    assert parse_resources(log, "main_kernel") == Resources(168, 9, 16, 24, 8, 12)
    with pytest.raises(ValueError, match="main_kernel"):
        parse_resources(log, "other")


# What the key covers


def test_the_key_covers_source_options_arch_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [
        copy_unit(),
        copy_unit("changed"),
        Unit("copy", copy_unit().source, "sm_80"),
        Unit("copy", copy_unit().source, ARCH, ("--use_fast_math",)),
    ]
    keys = {build_key(unit) for unit in units}
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: "99.9")
    assert len(keys | {build_key(copy_unit())}) == 5


@pytest.mark.parametrize(("version", "has_memory"), [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True)])
def test_only_compilers_that_remember_builds_are_asked_not_to(
    version: str, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: version)
    assert ("--no-cache" in compiling._options(copy_unit())) == has_memory


def test_the_key_covers_every_header_that_is_reached(tmp_path: Path) -> None:
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n#include <shared.cuh>\n')
    for header in ("sm90/inner.cuh", "shared.cuh", "unrelated.cuh"):
        (tmp_path / header).write_text("#pragma once\n")
    unit = Unit("copy", f'#include "sm90/outer.cuh"\n{COPY}', ARCH)
    before = build_key(unit, tmp_path)
    (tmp_path / "unrelated.cuh").write_text("#define SOMETHING_ELSE 1\n")
    assert build_key(unit, tmp_path) == before
    for header in ("sm90/inner.cuh", "shared.cuh", "sm90/outer.cuh"):
        old = (tmp_path / header).read_text()
        (tmp_path / header).write_text(old + "// edited\n")
        assert build_key(unit, tmp_path) != before, header
        (tmp_path / header).write_text(old)
    assert build_key(unit, tmp_path) == before
    assert not build(unit, include_root=tmp_path).from_cache
    assert build(unit, include_root=tmp_path).from_cache


# The cache on disk


def test_an_entry_holds_source_cubin_log_and_resources_with_digests(cache_dir: Path) -> None:
    kernel = build(copy_unit())
    (entry,) = cache.entries()
    assert {file.name for file in entry.iterdir()} == {"kernel.cu", "kernel.cubin", "build.log", "resources.json"}
    manifest = json.loads((entry / "resources.json").read_text())
    assert manifest["key"] == kernel.key
    assert manifest["facts"]["resources"]["registers"] == kernel.resources.registers
    assert manifest["digests"]["kernel.cubin"] == cache.digest([kernel.cubin])
    assert cache.size() == sum(file.stat().st_size for file in entry.iterdir())
    assert list((cache_dir / "staging").iterdir()) == []


def test_the_folders_are_private(cache_dir: Path) -> None:
    build(copy_unit())
    for folder in (cache_dir, cache_dir / "entries", cache_dir / "locks", *cache.entries()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_clear_removes_entries_and_leaves_strangers_alone(cache_dir: Path) -> None:
    build(copy_unit("one"))
    build(copy_unit("two"))
    with pytest.raises(CompileError) as caught:
        build(Unit("copy", "nonsense;", ARCH))
    assert kept_folder(caught.value).parent == cache_dir / "failed"
    (cache_dir / "notes.txt").write_text("mine")
    assert cache.clear() == 2
    assert (cache.entries(), cache.size()) == ([], 0)
    assert not (cache_dir / "failed").exists()
    assert (cache_dir / "notes.txt").read_text() == "mine"
    assert not build(copy_unit("one")).from_cache


def test_a_folder_that_another_process_slips_in_stays(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.keep_failed("copy", "key", {"build.log": b"of another"})
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr("os.path.lexists", lambda path: False)  # it comes after the look
        assert cache.keep_failed("copy", "key", {"build.log": b"ours"}) == first
    assert (first / "build.log").read_bytes() == b"of another"


def test_a_folder_that_cannot_be_put_in_place_is_not_named(
    cache_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(elsewhere))
        patch.setattr(Path, "rename", lambda self, target: os.stat(self / "none"))
        place = cache.keep_failed("copy", "key", {"build.log": b"ours"})
    assert place is not None
    assert (place / "build.log").read_bytes() == b"ours"
    assert place.parent == elsewhere


def truncate(entry: Path) -> None:
    data = (entry / "kernel.cubin").read_bytes()
    (entry / "kernel.cubin").write_bytes(data[: len(data) // 2])


def flip_a_bit(entry: Path) -> None:
    data = bytearray((entry / "kernel.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "kernel.cubin").write_bytes(data)


def edit_manifest(entry: Path) -> None:
    manifest = json.loads((entry / "resources.json").read_text())
    (entry / "resources.json").write_text(json.dumps({**manifest, "key": "0" * 64}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated cubin": truncate,
    "flipped bit": flip_a_bit,
    "edited log": lambda entry: (entry / "build.log").write_text("all is well"),
    "cubin gone": lambda entry: (entry / "kernel.cubin").unlink(),
    "manifest gone": lambda entry: (entry / "resources.json").unlink(),
    "manifest truncated": lambda entry: (entry / "resources.json").write_text('{"key": '),
    "manifest of another shape": lambda entry: (entry / "resources.json").write_text("[1, 2]"),
    "manifest of another key": edit_manifest,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_built_again_with_one_log_line(
    damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    before = build(copy_unit())
    (entry,) = cache.entries()
    damage(entry)
    after = build(copy_unit())
    assert not after.from_cache
    assert after.cubin == before.cubin
    (line,) = warnings_in(caplog)
    assert "damaged" in line
    assert str(entry) in line
    assert build(copy_unit()).from_cache
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(
    mode: int, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    for comment in ("one", "two", "one"):
        assert not build(copy_unit(comment)).from_cache
    assert list(cache_dir.iterdir()) == []
    (line,) = warnings_in(caplog)
    assert f"{mode:04o}" in line


def test_a_folder_of_another_user_is_not_used(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(copy_unit())
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.chown(cache_dir, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    kernel = build(copy_unit())
    assert not kernel.from_cache
    assert kernel.source_path is None
    (line,) = warnings_in(caplog)
    assert f"another user (uid {owner})" in line


def test_a_path_that_cannot_be_a_folder_is_done_without(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert build(copy_unit()).cubin == build(copy_unit()).cubin
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(CompileError) as caught:
        build(Unit("copy", "nonsense;", ARCH))
    assert (kept_folder(caught.value) / "kernel.cu").read_text() == "nonsense;"


def test_the_xdg_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    build(copy_unit())
    assert [entry.parent.parent for entry in cache.entries()] == [tmp_path / "xdg" / "tilewise"]


# Many processes. A fork server has the package imported once; each child of it is a real process.


@pytest.fixture(scope="module")
def processes() -> ForkServer:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilewise.jit", "test_jit"])
    return context


def in_child(context: ForkServer, task: Callable[..., Any], *arguments: Any) -> Any:
    """The value of `task(*arguments)` in a process of its own; its log lines come along."""
    inbox = context.SimpleQueue()
    child = context.Process(target=run_task, args=(inbox, task, *arguments))
    child.start()
    child.join(600)
    assert child.exitcode == 0
    return inbox.get()


def run_task(outbox: Any, task: Callable[..., Any], *arguments: Any) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilewise").addHandler(handler)
    outbox.put((task(*arguments), lines))


def build_when_all_are_ready(folder: str, unit: Unit, ready: Any, outbox: Any) -> None:
    os.environ["TILEWISE_CACHE_DIR"] = folder
    ready.wait(600)
    kernel = build(unit, announce=False)
    outbox.put((kernel.from_cache, cache.digest([kernel.cubin])))


def test_of_sixteen_processes_one_compiles(cache_dir: Path, processes: ForkServer) -> None:
    unit = Unit("spill", SPILL.replace("* 7 + 1", "* n + 1"), ARCH, strict=False)
    ready, outbox = processes.Barrier(16), processes.SimpleQueue()
    children = [
        processes.Process(target=build_when_all_are_ready, args=(str(cache_dir), unit, ready, outbox))
        for _ in range(16)
    ]
    for child in children:
        child.start()
    answers = [outbox.get() for _ in children]
    for child in children:
        child.join(600)
        assert child.exitcode == 0
    assert [from_cache for from_cache, _ in answers].count(False) == 1
    assert len({cubin for _, cubin in answers}) == 1
    assert len(cache.entries()) == 1
    assert list((cache_dir / "staging").iterdir()) == []


def die_with_the_lock(folder: str, key: str) -> None:
    os.environ["TILEWISE_CACHE_DIR"] = folder
    with cache.lock(key):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_builder_leaves_no_lock_behind(
    cache_dir: Path, processes: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = processes.Process(target=die_with_the_lock, args=(str(cache_dir), build_key(copy_unit())))
    child.start()
    child.join(600)
    assert child.exitcode == -signal.SIGKILL
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: pytest.fail("waited for a dead process"))
    assert not build(copy_unit()).from_cache


def test_a_builder_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_PATIENCE_SECONDS", 0.1)
    with cache.lock(build_key(copy_unit())):
        assert not build(copy_unit()).from_cache


def test_of_eight_threads_one_compiles() -> None:
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(build, [copy_unit()] * 8))
    assert [kernel.from_cache for kernel in kernels].count(False) == 1
    assert len({kernel.cubin for kernel in kernels}) == 1


def build_on_a_full_disk(folder: str) -> bool:
    """Writes past a few bytes fail as they do on a full disk."""
    os.environ["TILEWISE_CACHE_DIR"] = folder
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    return all(bool(build(copy_unit(comment)).cubin) for comment in ("one", "two"))


def test_a_full_disk_is_done_without(cache_dir: Path, processes: ForkServer) -> None:
    built, lines = in_child(processes, build_on_a_full_disk, str(cache_dir))
    assert built
    assert len(lines) == 1
    assert "cannot be written" in lines[0]
    assert cache.entries() == []
    assert list((cache_dir / "staging").iterdir()) == []


def build_as_a_reader(folder: str) -> list[bool]:
    os.environ["TILEWISE_CACHE_DIR"] = folder
    if os.geteuid() == 0:
        os.seteuid(65534)
    return [build(copy_unit(comment)).from_cache for comment in ("kept", "new", "new")]


def test_a_read_only_cache_is_read(monkeypatch: pytest.MonkeyPatch, processes: ForkServer) -> None:
    """Not below pytest's own folder, which every other run of pytest closes to the reader when it starts."""
    with tempfile.TemporaryDirectory() as room:
        cache_dir = Path(room)
        monkeypatch.setenv("TILEWISE_CACHE_DIR", room)
        cache_dir.chmod(0o755)
        build(copy_unit("kept"))
        for folder in (*cache_dir.rglob("*"), cache_dir):
            folder.chmod(0o555)
        (from_cache, lines) = in_child(processes, build_as_a_reader, room)
        for folder in (cache_dir, *cache_dir.rglob("*")):
            folder.chmod(0o755)
    assert from_cache == [True, False, False]
    assert len(lines) == 1
    assert "cannot be written" in lines[0]


def test_without_the_cuda_packages_the_import_works_and_a_build_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from tilewise.jit import Unit, build\n"
        "build(Unit('copy', '', 'sm_90a'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "CompileError: NVRTC" in done.stderr
    assert "pip install 'tilewise[cuda]'" in done.stderr


def test_the_machine_code_shows_products_and_spills() -> None:
    products = sass.opcodes(sass.disassemble(build(Unit("gemm", WGMMA, ARCH))))
    assert products["HGMMA.64x8x16.F32.BF16"] > 0
    spills = sass.opcodes(sass.disassemble(build(Unit("spill", SPILL, ARCH, strict=False))))
    assert spills["STL"] + spills["STL.64"] + spills["STL.128"] > 0
    assert not any(code.startswith("HGMMA") for code in spills)
    assert min(products["EXIT"], spills["EXIT"]) > 0


def test_the_machine_code_shows_clamps_that_compare_too() -> None:
    clamps = "        /*0070*/   VIMNMX.RELU R6, P1, P1, R2.reuse, 0x10, PT ;\n"
    others = (
        "        /*0080*/   VIMNMX R0, R2, 0x10, PT ;\n"
        "        /*0090*/   ISETP.GT.AND P0, PT, R6, 0xf, PT ;\n"
        "        /*00a0*/   @P0 VIADDMNMX R13, R17, R14, 0x40, PT ;\n"
        "        /*00b0*/   FMNMX R3, R4, R5, !P1 ;\n"
    )
    assert sass.tested_extrema(others + clamps) == ["VIMNMX.RELU R6, P1, P1, R2.reuse, 0x10, PT "]
    assert sass.tested_extrema(others) == []
