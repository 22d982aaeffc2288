"""What is loaded is ours: whose files count, which folders lead to them, and how a user's settings are read."""

from __future__ import annotations

import os

import pytest

from tilewise.jit import trust

needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system knows no owners of files")


def give_away(path, monkeypatch) -> None:
    """Let `path` belong to another user: really, where we may, else by being somebody else ourselves."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    file = folder / "file"
    file.write_bytes(b"content")
    file.chmod(0o600)
    return folder, file


def test_what_the_user_alone_can_write_is_read_and_its_digest_checked(place):
    folder, file = place
    assert trust.trusted_folder(folder) is None
    assert trust.read_trusted(file) == b"content"
    assert trust.read_trusted(file, trust.digest([b"content"])) == b"content"
    with pytest.raises(trust.Untrusted, match="does not match its digest"):
        trust.read_trusted(file, trust.digest([b"contents"]))


@needs_owners
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o1602])
def test_a_file_that_others_may_write_is_refused(place, mode):
    place[1].chmod(mode)
    with pytest.raises(trust.Untrusted, match="others may write"):
        trust.read_trusted(place[1])


@needs_owners
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_so_is_a_folder_and_stickiness_does_not_help(place, mode):
    place[0].chmod(mode)
    reason = trust.trusted_folder(place[0])
    assert reason is not None
    assert "others may write" in reason.what


@needs_owners
def test_a_folder_above_that_others_may_write_is_refused_unless_it_is_sticky(place, tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_is_private_group", lambda group: False)
    folder, file = place
    for mode in (0o777, 0o775):
        tmp_path.chmod(mode)
        reason = trust.trusted_folder(folder)
        assert reason is not None
        assert str(tmp_path) in reason.what
        with pytest.raises(trust.Untrusted):
            trust.read_trusted(file)
    tmp_path.chmod(0o1777)
    assert trust.trusted_folder(folder) is None


@needs_owners
def test_the_users_private_group_is_nobody_else(place, tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    monkeypatch.setattr(trust, "_is_private_group", lambda group: group == tmp_path.stat().st_gid)
    assert trust.trusted_folder(place[0]) is None
    tmp_path.chmod(0o772)
    assert trust.trusted_folder(place[0]) is not None


@needs_owners
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(place, monkeypatch, which):
    folder, file = place
    give_away(folder if which == "folder" else file, monkeypatch)
    if which == "folder":
        reason = trust.trusted_folder(folder)
        assert reason is not None
        assert "belongs to another user" in reason.what
    else:
        with pytest.raises(trust.Untrusted, match="belongs to another user"):
            trust.read_trusted(file)


@needs_owners
@pytest.mark.usefixtures("place")
def test_links_of_the_user_are_followed_and_those_of_others_are_not(tmp_path, monkeypatch):
    middle, outer = tmp_path / "middle", tmp_path / "outer"
    middle.symlink_to("folder/../folder")
    outer.symlink_to(middle)
    assert trust.trusted_folder(outer) is None
    assert trust.read_trusted(outer / "file") == b"content"
    give_away(middle, monkeypatch)
    with pytest.raises(trust.Untrusted, match="link of another user"):
        trust.read_trusted(outer / "file")


@needs_owners
def test_a_link_into_a_place_that_others_may_write_does_not_bless_it(place, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(place[0])
    place[0].chmod(0o777)
    assert trust.trusted_folder(link) is not None


def test_neither_a_pipe_nor_a_folder_nor_a_circle_is_a_file(place, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "folder"):
        with pytest.raises(trust.Untrusted, match="is not a file"):
            trust.read_trusted(tmp_path / name)
    assert "is not a folder" in str(trust.trusted_folder(place[1]))
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        trust.read_trusted(tmp_path / "circle")
    assert trust.trusted_folder(tmp_path / "circle") is not None


def test_what_is_missing_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        trust.read_trusted(tmp_path / "nothing")
    assert trust.trusted_folder(tmp_path / "nothing") is not None


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "~/kept")
    assert trust.cache_root() == tmp_path / "kept"
    monkeypatch.delenv("TILEWISE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/other")
    assert trust.cache_root() == tmp_path / "other" / "tilewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert trust.cache_root() == tmp_path / ".cache" / "tilewise"


def test_a_home_that_nobody_has_is_no_folder_of_that_name(monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "~no-such-user-anywhere/kept")
    assert trust.cache_root() is None


def test_a_relative_path_is_made_absolute_once(monkeypatch, tmp_path):
    monkeypatch.setattr(trust, "_settled", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "kept")
    assert trust.cache_root() == tmp_path / "kept"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert trust.cache_root() == tmp_path / "kept"
