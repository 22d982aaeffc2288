"""The compiled kernel's library on a hostile machine: tampered files, compilers that fail, hang, lie or are not there.

None of it is accepted, none of it raises out of a block, and each costs at most one line in the log.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import CompileError
from tilewise.hook import dispatcher
from tilewise.integrations.sdpa import sdpa
from tilewise.jit import cache
from tilewise.native import library as extension

pytestmark = pytest.mark.skipif(extension._why_not() is not None, reason=str(extension._why_not()))
PATIENCE_SECONDS = 600.0


@pytest.fixture(scope="module")
def library() -> bytes:
    """The library as the machine's compiler makes it."""
    extension.build()
    entry = cache.read(extension._LABEL, extension._key(), [extension._LIBRARY], report_damage=True)
    assert entry is not None
    return entry.files[extension._LIBRARY]


class Machine:
    """A process that has not looked for the library yet, with a cache folder of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)
        monkeypatch.setenv("TILEWISE_CACHE_DIR", str(root))
        monkeypatch.delenv(extension.SETTING, raising=False)
        self.forget()

    def forget(self) -> None:
        """As in a process that starts now."""
        self._monkeypatch.setattr(extension, "_search", extension._Search())
        self._monkeypatch.setattr(extension, "_said", set())
        self._monkeypatch.setattr(cache, "_said", set())

    @property
    def entry(self) -> Path:
        return self.root / "entries" / f"{extension._LABEL}.{extension._key()}"

    def put(self, content: bytes) -> None:
        assert cache.write(extension._LABEL, extension._key(), {extension._LIBRARY: content}, {}) == self.entry

    def wait_for_child(self) -> None:
        child = extension._search.child
        assert child is not None, "nothing was started"
        child.wait(PATIENCE_SECONDS)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path / "cache", monkeypatch)


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Builds that are started, in place of starting them."""
    found: list[str] = []
    monkeypatch.setattr(extension, "_start", lambda: found.append(extension._attempt()))
    return found


def compiler(folder: Path, script: str, name: str = "fake-c++") -> str:
    """A program that is called as a compiler is: $out is where the library goes."""
    path = folder / name
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o700)
    return str(path)


def look(caplog) -> tuple[extension.Library | None, list[str]]:
    """What a rule that comes into force finds, and the lines in the log, when it looks several times."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="tilewise"):
        for _ in range(3):
            extension._search.next_look = 0.0
            found = extension.loaded()
    return found, [record.getMessage() for record in caplog.records]


# ---------------------------------------------------------------------------------------------------------------------
# Tampering


def shorten(by: float):
    def tamper(machine: Machine) -> None:
        path = machine.entry / extension._LIBRARY
        os.truncate(path, int(path.stat().st_size * by))

    return tamper


def change(where: float):
    def tamper(machine: Machine) -> None:
        path = machine.entry / extension._LIBRARY
        content = bytearray(path.read_bytes())
        content[int((len(content) - 1) * where)] ^= 0xFF
        path.write_bytes(bytes(content))

    return tamper


def overwrite(name: str, content: bytes):
    def tamper(machine: Machine) -> None:
        (machine.entry / name).write_bytes(content)

    return tamper


def rewrite_manifest(edit):
    def tamper(machine: Machine) -> None:
        path = machine.entry / cache.MANIFEST
        manifest = json.loads(path.read_bytes())
        path.write_text(json.dumps(edit(manifest)))

    return tamper


def replace(name: str, make):
    def tamper(machine: Machine) -> None:
        path = machine.entry / name
        path.rename(machine.root / "aside")
        make(path, machine.root / "aside")

    return tamper


def mode(which: str, bits: int):
    def tamper(machine: Machine) -> None:
        place = {
            "library": machine.entry / extension._LIBRARY,
            "manifest": machine.entry / cache.MANIFEST,
            "entry": machine.entry,
            "entries": machine.entry.parent,
        }[which]
        place.chmod(bits)

    return tamper


TAMPERINGS = {
    "empty": shorten(0.0),
    "half of it": shorten(0.5),
    "the end missing": shorten(0.999),
    "first byte": change(0.0),
    "a byte within": change(0.4),
    "last byte": change(1.0),
    "garbage": overwrite(extension._LIBRARY, b"\x7fELF" + bytes(range(256)) * 64),
    "text": overwrite(extension._LIBRARY, b"not a library"),
    "manifest garbage": overwrite(cache.MANIFEST, b"\xff\xfe{"),
    "manifest empty": overwrite(cache.MANIFEST, b""),
    "manifest a list": overwrite(cache.MANIFEST, b"[]"),
    "manifest without digests": rewrite_manifest(lambda manifest: {**manifest, "digests": {}}),
    "manifest of another": rewrite_manifest(lambda manifest: {**manifest, "key": "0" * 64}),
    "library missing": lambda machine: (machine.entry / extension._LIBRARY).unlink(),
    "manifest missing": lambda machine: (machine.entry / cache.MANIFEST).unlink(),
    "library a folder": replace(extension._LIBRARY, lambda path, aside: path.mkdir()),
    "library a pipe": replace(extension._LIBRARY, lambda path, aside: os.mkfifo(path)),
    "library for all to write": mode("library", 0o666),
    "manifest for all to write": mode("manifest", 0o622),
    "entry for all to write": mode("entry", 0o777),
    "entries for the group to write": mode("entries", 0o770),
}


@pytest.mark.parametrize("how", TAMPERINGS)
def test_a_tampered_library_is_built_again_with_one_log_line(machine, library, started, caplog, how):
    machine.put(library)
    TAMPERINGS[how](machine)
    found, lines = look(caplog)
    assert found is None
    assert started
    assert len(lines) == 1, lines
    machine.put(library)  # as the build that was started does
    found, lines = look(caplog)
    assert found is not None, lines


def test_a_library_and_a_manifest_that_agree_with_each_other_are_not_enough(machine, library, started, caplog):
    """Somebody who could write there for a while made both; closing the folder does not bless them."""
    machine.put(library)
    machine.root.chmod(0o777)
    assert cache.root() is None
    forged = library + b"\x00"
    (machine.entry / extension._LIBRARY).write_bytes(forged)
    rewrite_manifest(lambda manifest: {**manifest, "digests": {extension._LIBRARY: cache.digest([forged])}})(machine)
    machine.root.chmod(0o700)
    found, lines = look(caplog)
    assert found is None
    assert started
    assert len(lines) == 1, lines


def test_a_library_of_another_user_is_not_loaded(machine, library, started, monkeypatch, caplog):
    machine.put(library)
    if os.geteuid() == 0:
        os.chown(machine.entry / extension._LIBRARY, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found, lines = look(caplog)
    assert found is None
    assert len(lines) == 1, lines


def test_a_folder_that_others_may_write_is_not_used_at_all(machine, library, started, caplog):
    machine.put(library)
    machine.root.chmod(0o777)
    found, lines = look(caplog)
    assert found is None
    assert len(lines) == 1, lines
    with pytest.raises(CompileError, match="no cache folder"):
        sdpa.compile()


def test_what_happens_to_the_file_after_it_was_loaded_hurts_nobody(library, tmp_path):
    """A library that is mapped from a file dies with it; ours is not."""
    code = f"""
import os, torch, torch.nn.functional as F
from tilewise.hook import dispatcher
from tilewise.native import library as extension
from tilewise.integrations import sdpa as override
from tilewise.jit import cache
content = open({str(tmp_path / "library")!r}, "rb").read()
place = cache.write(extension._LABEL, extension._key(), {{extension._LIBRARY: content}}, {{}})
q = torch.randn(1, 1, 8, 8)
with override.sdpa():
    F.scaled_dot_product_attention(q, q, q)
    assert dispatcher.compiled is not None
    os.truncate(place / extension._LIBRARY, 0)
    for _ in range(10):
        F.scaled_dot_product_attention(q, q, q)
print(override.sdpa.report()[0].calls)
"""
    (tmp_path / "library").write_bytes(library)
    (tmp_path / "cache").mkdir(mode=0o700)
    done = run(code, TILEWISE_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout.strip()) == (0, "11"), done.stderr[-4000:]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    sources = str(Path(tilewise.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": sources, **variables}
    environment.pop(extension.SETTING, None)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_SECONDS,
    )  # fmt: skip


LATER = """
import os, threading, torch, torch.nn.functional as F
os.environ["TILEWISE_NATIVE"] = "off"
from tilewise.hook import dispatcher
from tilewise.integrations.sdpa import sdpa
q = torch.randn(1, 1, 8, 8)
want = F.scaled_dot_product_attention(q, q, q)
def enter():
    with sdpa():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
    return dispatcher.compiled is not None
found = [enter()]
os.environ["TILEWISE_NATIVE"] = "compiled"
done = threading.Event()
beside = threading.Thread(target=done.wait)
beside.start()
found.append(enter())
done.set()
beside.join()
found.append(enter())
print(found)
"""


@pytest.mark.usefixtures("library")
def test_a_library_that_comes_later_is_used_once_there_is_no_other_thread():
    """The kernel in Python may be running in another thread, and replacing it is not atomic."""
    done = run(LATER)
    assert (done.returncode, done.stdout.strip()) == (0, "[False, False, True]"), done.stderr[-4000:]
    assert done.stderr == ""


def test_compile_builds_a_damaged_library_again_and_it_is_whole(machine, library, tmp_path, monkeypatch):
    good = tmp_path / "good.so"
    good.write_bytes(library)
    monkeypatch.setenv("CXX", compiler(tmp_path, f'cp {good} "$out"'))
    machine.put(library)
    for tamper in (shorten(0.5), overwrite(extension._LIBRARY, b"garbage")):
        tamper(machine)
        machine.forget()
        sdpa.compile()
        assert (machine.entry / extension._LIBRARY).read_bytes() == library
        assert extension.loaded() is not None


# ---------------------------------------------------------------------------------------------------------------------
# Compilers


@pytest.mark.parametrize("quoting", ["g++ '", '"g++', "g++ \\"])
def test_a_badly_quoted_compiler_is_said_and_nothing_more(machine, monkeypatch, caplog, quoting):
    monkeypatch.setenv("CXX", quoting)
    found, lines = look(caplog)
    assert found is None
    assert len(lines) == 1, lines
    assert "CXX" in lines[0]
    with pytest.raises(CompileError, match="CXX"):
        sdpa.compile()


def test_a_compiler_that_is_not_there_is_said_and_nothing_more(machine, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/no/such/c++ -O3")
    found, lines = look(caplog)
    assert found is None
    assert len(lines) == 1, lines
    with pytest.raises(CompileError, match="no such program"):
        sdpa.compile()


def test_no_compiler_at_all_is_nothing_to_speak_of(machine, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert look(caplog) == (None, [])
    with pytest.raises(CompileError, match="no C\\+\\+ compiler"):
        sdpa.compile()


ERRORS = [BlockingIOError(11, "Resource temporarily unavailable"), FileNotFoundError(2, "No such file"), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_process_that_cannot_be_started_is_said_and_nothing_more(machine, monkeypatch, caplog, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(extension.subprocess, "Popen", refuse)
    found, lines = look(caplog)
    assert found is None
    assert len(lines) == 1, lines


def test_neither_does_a_full_disk_raise(machine, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(extension.os, "open", refuse)
    found, _ = look(caplog)
    assert found is None


def test_a_block_works_whatever_is_wrong(machine, monkeypatch):
    """The same through the front door: what a block asks of the detour never reaches the user."""
    monkeypatch.setattr(dispatcher, "_standing", None)
    monkeypatch.setattr(dispatcher, "_may_replace", lambda: True)
    looked = []
    real = extension._find
    monkeypatch.setattr(extension, "_find", lambda: looked.append(1) or real())
    q = torch.randn(1, 1, 8, 8)
    want = F.scaled_dot_product_attention(q, q, q)
    for variables in ({"CXX": "g++ '"}, {"CXX": "/no/such"}, {"PATH": "/nowhere"}):
        machine.forget()
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with sdpa():
                assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
    assert len(looked) == 3


def test_a_failure_is_kept_and_tried_again_only_with_another_compiler(machine, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'echo "no such header" >&2; echo ran >> {ran}; exit 3'))
    for _ in range(2):
        machine.forget()
        assert extension.loaded() is None
        if extension._search.child is not None:
            machine.wait_for_child()
    assert ran.read_text().splitlines() == ["ran"], "a compiler that failed was run again"
    (kept,) = (machine.root / "failed").iterdir()
    assert "no such header" in (kept / extension._SAID).read_text()
    with pytest.raises(CompileError, match=r"exit code 3(.|\n)*no such header"):
        sdpa.compile()
    assert len(ran.read_text().splitlines()) == 2, "who asks for it has it tried again"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo another >> {ran}; exit 1", "another-c++"))
    machine.forget()
    assert extension.loaded() is None
    machine.wait_for_child()
    assert ran.read_text().splitlines()[-1] == "another"


def test_the_same_compiler_mended_is_another_compiler(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    before = extension._attempt()
    compiler(tmp_path, "exit 1  # mended")
    assert extension._attempt() != before


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "made nothing"),
        ('echo garbage > "$out"', "does not load"),
        ('printf "\\177ELF" > "$out"', "does not load"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_compiler_that_lies_is_found_out(machine, tmp_path, monkeypatch, script, said):
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(CompileError, match=said):
        extension._build_here()
    assert not machine.entry.exists()


def test_a_library_that_ends_the_process_that_tries_it_out_is_not_kept(machine, library, tmp_path, monkeypatch):
    half = tmp_path / "half.so"
    half.write_bytes(library[: len(library) // 2])
    monkeypatch.setenv("CXX", compiler(tmp_path, f'cp {half} "$out"'))
    with pytest.raises(CompileError):
        sdpa.compile()
    assert not machine.entry.exists()


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(machine, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"sleep 3600 & echo $! >> {pids}; echo $$ >> {pids}; wait"))
    monkeypatch.setattr(extension, "_PATIENCE_SECONDS", 1.0)
    with pytest.raises(CompileError, match="did not finish"):
        extension._build_here()
    for pid in pids.read_text().split():
        assert is_gone(int(pid)), f"process {pid} is still there"
    assert extension._failed_before(extension._attempt())


def is_gone(pid: int) -> bool:
    """Ended, or ended and not yet waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


COLD_PROCESSES = """
import os, time
from tilewise.native import library as extension

def cold():
    assert extension.loaded() is None, "nothing is built yet"
    os._exit(0 if extension._search.child is None else 1)

children = []
for _ in range(6):
    child = os.fork()
    if child == 0:
        cold()
    children.append(child)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_of_many_cold_processes_one_runs_a_compiler(machine, library, tmp_path, monkeypatch):
    """The others go on without, and find the library when it is there."""
    good, ran, go = tmp_path / "good.so", tmp_path / "ran", tmp_path / "go"
    good.write_bytes(library)
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'echo ran >> {ran}; {wait}; cp {good} "$out"'))
    try:
        done = run(COLD_PROCESSES)
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr[-4000:]
        assert extension.loaded() is None
        assert extension._search.child is None, "a builder was started beside another"
    finally:
        go.touch()
    with extension._one_builder(PATIENCE_SECONDS) as lock:  # when that one has ended
        assert lock is not None
    assert ran.read_text().splitlines() == ["ran"]
    machine.forget()
    assert extension.loaded() is not None


def test_who_waits_for_another_builder_does_not_build_again(machine, library, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo ran >> {ran}; exit 1"))
    waiting = threading.Thread(target=sdpa.compile)
    with extension._one_builder(0.0) as lock:
        assert lock is not None
        waiting.start()
        machine.put(library)
    waiting.join()
    assert not ran.exists()


def test_builders_that_share_a_folder_and_a_process_number_do_not_meet(machine, library, tmp_path, monkeypatch):
    """As in two containers with one home; without a lock even, as on a file system that has none."""
    good = tmp_path / "good.so"
    good.write_bytes(library)
    monkeypatch.setenv("CXX", compiler(tmp_path, f'cp {good} "$out"; sleep 0.2'))
    raised = []

    def build() -> None:
        try:
            extension._build_here()
        except CompileError as error:
            raised.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    assert (machine.entry / extension._LIBRARY).read_bytes() == library


def test_a_python_that_is_part_of_another_program_starts_nothing(machine, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    assert look(caplog) == (None, [])
    assert extension._search.child is None


def test_the_builder_imports_nothing_from_the_current_directory(machine, library, tmp_path, monkeypatch):
    good, bad = tmp_path / "good.so", tmp_path / "executed"
    good.write_bytes(library)
    for name in ("json", "queue", "tilewise", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(bad)!r}, 'w')\nraise SystemExit('a module of the directory')\n"
        )
    monkeypatch.setenv("CXX", compiler(tmp_path, f'cp {good} "$out"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert extension.loaded() is None
    machine.wait_for_child()
    assert not bad.exists()
    assert machine.entry.exists()


def test_relative_and_tilde_settings_mean_one_place(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path / "cache", monkeypatch)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "cache")
    machine.put(library)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert extension.loaded() is not None
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "~/cache")
    machine.forget()
    assert extension.loaded() is not None
    shutil.rmtree(tmp_path / "cache")
