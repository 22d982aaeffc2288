"""Whatever somebody does to the kernel cache or to the tables: one log line, made again, never loaded, never raised."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from support import make_problem
from tilewise import Causal
from tilewise.jit import Unit, build, cache, trust, tuned
from tilewise.jit import compile as compiling
from tilewise.lab.studies import tune
from tilewise.plain import tiled
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU = Target.of("cpu")
PROBLEM = make_problem((1, 2, 300, 16), mask=Causal())
STRANGER = 12345
EVIL = b"\x7fELF evil"

needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system knows no owners of files")


def unit(name: str = "kernel") -> Unit:
    return Unit(name, f'extern "C" __global__ void {name}(int* out) {{ *out = 1; }}', "sm_90a")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of our own, and a compiler that takes no time: what it makes says which unit it was given."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWISE_TABLES")
    monkeypatch.setattr(cache, "_said", set())
    monkeypatch.setattr(cache, "LOCK_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(compiling, "_run_nvrtc", compiled)
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


def compiled(source: str, options: list[str], include_root: Path, product: str) -> tuple[bytes, str]:
    name = source.partition("void ")[2].partition("(")[0]
    log = (
        f"ptxas info : Compiling entry function '{name}' for 'sm_90a'\nptxas info : Function properties for {name}\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info : Used 8 registers, 0 bytes smem"
    )
    return source.encode(), log


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def give_away(path: Path) -> None:
    """Let `path` belong to somebody else; the operating system, or else the mock below, says so from then on."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:
        _given_away.add(str(path))


_given_away: set[str] = set()


@pytest.fixture(autouse=True)
def _owners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where tests do not run as root: lstat and fstat tell of another owner of what was given away."""
    _given_away.clear()
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        lstat, fstat = os.lstat, os.fstat

        def owned(path: str, status: os.stat_result) -> os.stat_result:
            if path not in _given_away:
                return status
            return os.stat_result((*status[:4], STRANGER, STRANGER, *status[6:10]))

        monkeypatch.setattr(os, "lstat", lambda path, **options: owned(str(path), lstat(path, **options)))
        monkeypatch.setattr(os, "fstat", lambda handle: owned(os.readlink(f"/proc/self/fd/{handle}"), fstat(handle)))
    yield
    _given_away.clear()


def manifest_of(entry: Path) -> dict[str, Any]:
    return dict(json.loads((entry / cache.MANIFEST).read_text()))


def forge(entry: Path, **changes: Any) -> None:
    """Another cubin, and a manifest whose digests are right."""
    (entry / "kernel.cubin").write_bytes(EVIL)
    manifest = manifest_of(entry)
    manifest["digests"]["kernel.cubin"] = trust.digest([EVIL])
    (entry / cache.MANIFEST).write_text(json.dumps(manifest | changes))


def edit_source(entry: Path) -> None:
    (entry / "kernel.cu").write_text("// innocent")
    manifest = manifest_of(entry)
    manifest["digests"]["kernel.cu"] = trust.digest([b"// innocent"])
    (entry / cache.MANIFEST).write_text(json.dumps(manifest))


def edit_facts(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text(json.dumps(manifest_of(entry) | {"facts": {}}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "within").write_bytes(EVIL)


def become_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def become_a_link(path: Path) -> None:
    """To the same content, where its owner can change it later."""
    elsewhere = path.parent.parent.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def become_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def become_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def swap_with_another(entry: Path) -> None:
    """The files of another kernel, all of them genuine, in this one's place."""
    build(unit("other"))
    (other,) = [path for path in cache.entries() if path != entry]
    for file in list(entry.iterdir()):
        shutil.copy2(other / file.name, file)


def swap_the_cubin(entry: Path) -> None:
    build(unit("other"))
    (other,) = [path for path in cache.entries() if path != entry]
    shutil.copy2(other / "kernel.cubin", entry / "kernel.cubin")


def open_and_close(entry: Path) -> None:
    """Everybody may write for a while, a build says so, somebody plants a kernel, and the user takes the right away."""
    root = entry.parent.parent
    root.chmod(0o777)
    build(unit("meanwhile"))
    forge(entry)
    root.chmod(0o700)


def deep_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text('{"key":' * 100_000)


TAMPERINGS: dict[str, Callable[[Path], object]] = {
    "cubin of mode 0666": lambda entry: (entry / "kernel.cubin").chmod(0o666),
    "cubin of mode 0620": lambda entry: (entry / "kernel.cubin").chmod(0o620),
    "manifest of mode 0602": lambda entry: (entry / cache.MANIFEST).chmod(0o602),
    "source of mode 0622": lambda entry: (entry / "kernel.cu").chmod(0o622),
    "log of mode 0662": lambda entry: (entry / "build.log").chmod(0o662),
    "entry of mode 0777": lambda entry: entry.chmod(0o777),
    "entry of mode 1777": lambda entry: entry.chmod(0o1777),
    "entry of mode 0720": lambda entry: entry.chmod(0o720),
    "entries of mode 0777": lambda entry: entry.parent.chmod(0o777),
    "entries of mode 1777": lambda entry: entry.parent.chmod(0o1777),
    "cubin of another": lambda entry: give_away(entry / "kernel.cubin"),
    "manifest of another": lambda entry: give_away(entry / cache.MANIFEST),
    "entry of another": give_away,
    "entries of another": lambda entry: give_away(entry.parent),
    "secret of another": lambda entry: give_away(entry.parent.parent / cache.SECRET),
    "secret that others write": lambda entry: (entry.parent.parent / cache.SECRET).chmod(0o666),
    "secret edited": lambda entry: (entry.parent.parent / cache.SECRET).write_bytes(b"0" * 32),
    "secret truncated": lambda entry: truncate(entry.parent.parent / cache.SECRET),
    "secret emptied": lambda entry: (entry.parent.parent / cache.SECRET).write_bytes(b""),
    "secret gone": lambda entry: (entry.parent.parent / cache.SECRET).unlink(),
    "secret is a folder": lambda entry: become_a_folder(entry.parent.parent / cache.SECRET),
    "secret is a FIFO": lambda entry: become_a_fifo(entry.parent.parent / cache.SECRET),
    "truncated cubin": lambda entry: truncate(entry / "kernel.cubin"),
    "emptied cubin": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "longer cubin": lambda entry: (entry / "kernel.cubin").write_bytes((entry / "kernel.cubin").read_bytes() + b"0"),
    "edited cubin": lambda entry: (entry / "kernel.cubin").write_bytes(EVIL),
    "edited cubin and digest": forge,
    "edited cubin, digest and key": lambda entry: forge(entry, key="0" * 64),
    "edited source": lambda entry: (entry / "kernel.cu").write_text("// innocent"),
    "edited source and digest": edit_source,
    "edited log": lambda entry: (entry / "build.log").write_text("all is well"),
    "edited facts": edit_facts,
    "manifest without digests": lambda entry: (entry / cache.MANIFEST).write_text('{"key": "k"}'),
    "manifest of another type": lambda entry: (entry / cache.MANIFEST).write_text('"manifest"'),
    "manifest without end": deep_manifest,
    "manifest of bytes": lambda entry: (entry / cache.MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "truncated manifest": lambda entry: truncate(entry / cache.MANIFEST),
    "cubin gone": lambda entry: (entry / "kernel.cubin").unlink(),
    "manifest gone": lambda entry: (entry / cache.MANIFEST).unlink(),
    "cubin of another kernel": swap_the_cubin,
    "all of another kernel": swap_with_another,
    "cubin is a link": lambda entry: become_a_link(entry / "kernel.cubin"),
    "manifest is a link": lambda entry: become_a_link(entry / cache.MANIFEST),
    "entry is a link": become_a_link,
    "cubin is a link to itself": lambda entry: become_a_loop(entry / "kernel.cubin"),
    "cubin is a device": lambda entry: become_a_device(entry / "kernel.cubin"),
    "cubin is a folder": lambda entry: become_a_folder(entry / "kernel.cubin"),
    "manifest is a folder": lambda entry: become_a_folder(entry / cache.MANIFEST),
    "cubin is a FIFO": lambda entry: become_a_fifo(entry / "kernel.cubin"),
    "manifest is a FIFO": lambda entry: become_a_fifo(entry / cache.MANIFEST),
    "a file more": lambda entry: (entry / "preload.so").write_bytes(EVIL),
    "a folder more": lambda entry: (entry / "within").mkdir(),
    "entry is a file": lambda entry: (shutil.rmtree(entry), entry.write_bytes(EVIL)),
    "entries are a file": lambda entry: (shutil.rmtree(entry.parent), entry.parent.write_bytes(EVIL)),
    "open for a while": open_and_close,
}


@needs_owners
@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_kernel_is_built_again_with_one_line(
    tamper: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    before = build(unit())
    assert build(unit()).from_cache
    (entry,) = cache.entries()
    tamper(entry)
    caplog.clear()
    after = build(unit())
    assert not after.from_cache
    assert (after.cubin, after.resources) == (before.cubin, before.resources)
    assert len(warnings_in(caplog)) == 1, caplog.text
    again = build(unit())
    assert again.from_cache, "it is in the cache again"
    assert again.cubin == before.cubin
    assert len(warnings_in(caplog)) == 1, caplog.text


def loose(root: Path) -> None:
    root.chmod(0o777)


ROOTS: dict[str, Callable[[Path], object]] = {
    "mode 0777": loose,
    "mode 1777": lambda root: root.chmod(0o1777),
    "mode 0720": lambda root: root.chmod(0o720),
    "of another": give_away,
    "a file": lambda root: (shutil.rmtree(root), root.write_bytes(EVIL)),
    "a FIFO": lambda root: (shutil.rmtree(root), os.mkfifo(root, 0o600)),
    "a link into nothing": lambda root: (shutil.rmtree(root), root.symlink_to(root.parent / "nothing" / "there")),
    "a link to itself": lambda root: (shutil.rmtree(root), root.symlink_to(root)),
    "in a folder that others write": lambda root: root.parent.chmod(0o777),
}


@needs_owners
@pytest.mark.parametrize("tamper", ROOTS.values(), ids=ROOTS.keys())
def test_a_folder_that_is_not_ours_alone_is_not_used(
    tamper: Callable[[Path], object], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = build(unit())
    tamper(root)
    for name in ("kernel", "another", "kernel"):
        assert not build(unit(name)).from_cache
    assert build(unit()).cubin == before.cubin
    (line,) = warnings_in(caplog)
    assert "TILEWISE_CACHE_DIR" in line
    root.parent.chmod(0o700)


@needs_owners
@pytest.mark.parametrize("name", ["entries", "staging", "locks"])
@pytest.mark.parametrize("harm", [become_a_fifo, become_a_loop, lambda path: path.write_bytes(EVIL)])
def test_folders_within_are_made_anew(harm: Callable[[Path], object], name: str, root: Path) -> None:
    build(unit())
    place = root / name
    shutil.rmtree(place)
    place.touch()
    harm(place)
    assert build(unit("another")).cubin
    assert build(unit("another")).from_cache
    assert (root / name).is_dir()
    assert not (root / name).is_symlink()


def test_what_lay_in_a_loose_folder_is_not_blessed_by_a_chmod(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All entries of that time are built again, planted ones and honest ones alike: nobody can tell them apart."""
    for name in ("one", "two"):
        build(unit(name))
    root.chmod(0o777)
    assert not build(unit("one")).from_cache
    for entry in sorted((root / "entries").iterdir()):
        forge(entry)
    root.chmod(0o700)
    caplog.clear()
    for name in ("one", "two"):
        again = build(unit(name))
        assert not again.from_cache
        assert again.cubin == unit(name).source.encode()
        assert build(unit(name)).from_cache
    assert len(warnings_in(caplog)) == 2


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_our_own_files_count_whatever_the_umask(mask: int, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.parent.mkdir(exist_ok=True)
    before = os.umask(mask)
    try:
        build(unit())
        assert build(unit()).from_cache
        path = tuned.write("tiled", CPU.name, entry(tiled.Config(64, 64)))
    finally:
        os.umask(before)
    assert path is not None
    assert tiled.configs(PROBLEM, CPU)[0] == tiled.Config(64, 64)
    assert not warnings_in(caplog)
    for place in (root, *root.rglob("*")):
        assert not place.stat().st_mode & 0o077, place


# Settings


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("TILEWISE_TABLES", "~/tables")
    build(unit())
    assert cache.location() == tmp_path / "kernels"
    assert (tmp_path / "kernels" / "entries").is_dir()
    assert tuned.write("tiled", CPU.name, entry(tiled.Config(64, 64))) == tmp_path / "tables" / "tiled.cpu.json"


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_settled", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "kernels")
    monkeypatch.setenv("TILEWISE_TABLES", "tables")
    build(unit())
    written = tuned.write("tiled", CPU.name, entry(tiled.Config(64, 64)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build(unit()).from_cache
    assert tuned.path_of("tiled", CPU.name) == written == tmp_path / "tables" / "tiled.cpu.json"
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Tables


def entry(config: tiled.Config) -> dict[str, Any]:
    key, sizes = tiled.tuning_key(PROBLEM)
    return {
        "key": key, "sizes": sizes, "config": dataclasses.asdict(config), "kernels": tuned.kernels_digest("tiled"),
        "device": CPU.name, "date": "2026-01-02T03:04:05+00:00", "gain": 1.25,
    }  # fmt: skip


TABLES: dict[str, Callable[[Path], object]] = {
    "mode 0666": lambda path: path.chmod(0o666),
    "mode 0620": lambda path: path.chmod(0o620),
    "folder of mode 0777": lambda path: path.parent.chmod(0o777),
    "folder of mode 1777": lambda path: path.parent.chmod(0o1777),
    "of another": give_away,
    "folder of another": lambda path: give_away(path.parent),
    "a folder": become_a_folder,
    "a FIFO": become_a_fifo,
    "a link to itself": become_a_loop,
    "a device": become_a_device,
    "truncated": truncate,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "folder is a file": lambda path: (shutil.rmtree(path.parent), path.parent.write_bytes(b"")),
}


@needs_owners
@pytest.mark.parametrize("chosen", [True, False], ids=["TILEWISE_TABLES", "cache folder"])
@pytest.mark.parametrize("tamper", TABLES.values(), ids=TABLES.keys())
def test_a_tampered_table_is_one_line_and_the_shipped_config(
    tamper: Callable[[Path], object],
    chosen: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if chosen:
        monkeypatch.setenv("TILEWISE_TABLES", str(tmp_path / "tables"))
    path = tuned.write("tiled", CPU.name, entry(tiled.Config(64, 64)))
    assert path is not None
    assert tiled.configs(PROBLEM, CPU)[0] == tiled.Config(64, 64)
    tamper(path)
    tuned.forget()
    for _ in range(3):
        assert tiled.configs(PROBLEM, CPU) == tiled.shipped(PROBLEM, CPU)
    (line,) = warnings_in(caplog)
    assert str(path) in line


@needs_owners
def test_no_table_is_written_where_others_could_edit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables").chmod(0o777)
    monkeypatch.setenv("TILEWISE_TABLES", str(tmp_path / "tables"))
    assert tuned.write("tiled", CPU.name, entry(tiled.Config(64, 64))) is None
    assert list((tmp_path / "tables").iterdir()) == []
    assert len(warnings_in(caplog)) == 1


AT_0 = '{"trial": "a", "round": 0, "turn": 0'


@pytest.mark.parametrize(
    "line",
    [
        *("{}", "null", "[1]", "x", "[" * 10_000, AT_0 + "}", AT_0 + ', "failed": 3}'),
        *(f'{AT_0}, "samples": {samples}}}' for samples in ("[]", "[-1.0]", "[NaN]", '"1"', "[null]", "null", "{}")),
        '{"trial": "a", "round": null, "turn": 0, "samples": [1.0]}',
    ],
    ids=lambda line: line[-24:],
)  # fmt: skip
def test_a_line_of_a_sweep_that_nobody_measured_is_left_out(line: str, tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    path.write_text('{"trial": "a", "round": 1, "turn": 0, "samples": [1.0]}\n' + line)
    path.chmod(0o600)
    state = tune.State(path)
    assert len(state) == 1
    assert state.find("a", 0, 0) is None


@needs_owners
@pytest.mark.parametrize(
    "tamper",
    [lambda path: path.chmod(0o666), give_away, become_a_folder, become_a_fifo, become_a_loop, become_a_device],
)
def test_a_sweep_goes_on_from_nobody_elses_state(
    tamper: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.jsonl"
    tune.State(path).add("a", 0, 0, {"samples": [1.0]})
    assert len(tune.State(path)) == 1
    tamper(path)
    state = tune.State(path)
    assert len(state) == 0
    assert len(warnings_in(caplog)) == 1
    state.add("a", 0, 0, {"samples": [1.0]})
    assert state.find("a", 0, 0) is not None


def test_tables_do_not_need_a_cache_folder_to_be_looked_for(root: Path) -> None:
    assert tiled.configs(PROBLEM, CPU) == tiled.shipped(PROBLEM, CPU)
    assert not root.exists()
