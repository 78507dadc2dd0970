"""Private folders and the run's secret. test_strangers.py tests access by a second user."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.private_folders import (
    SECRET_VARIABLE,
    NotPrivate,
    derive_key,
    is_own,
    make_private,
    new_secret,
    open_private,
    read_own,
    remove_private,
    run_secret,
)

_OTHER_UID = 5002


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077, 0o777])
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("any_umask")
def test_folder_and_its_files_are_private_under_any_umask(tmp_path: Path) -> None:
    with make_private(tmp_path / "f") as folder:
        assert mode(tmp_path / "f") == 0o700
        before = os.umask(0)
        folder.write("whole", b"1")
        folder.create("new", b"2")
        folder.overwrite("in-place", b"12345")
        folder.overwrite("in-place", b"3")
        folder.touch("empty")
        folder.make_fifo("fifo")
        os.umask(before)
        assert {name: mode(tmp_path / "f" / name) for name in folder.names()} == dict.fromkeys(
            ["empty", "fifo", "in-place", "new", "whole"], 0o600)
        assert [folder.read(name) for name in ("whole", "new", "in-place", "empty")] == [b"1", b"2", b"3", b""]
        assert folder.read("whole", 0) == b""
        with pytest.raises(FileExistsError):
            folder.create("new")
        folder.remove("new")
        folder.remove("new")
        assert not folder.has("new")
        assert folder.names("w") == ["whole"]


def test_make_private_closes_an_open_folder_and_open_private_rejects_it(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f").chmod(0o2777)
    with pytest.raises(NotPrivate, match=r"other users can access it \(mode 2777\)"):
        open_private(tmp_path / "f")
    make_private(tmp_path / "f").close()
    assert mode(tmp_path / "f") & 0o777 == 0o700
    open_private(tmp_path / "f").close()
    (tmp_path / "f").chmod(0o755)
    open_private(tmp_path / "f").close()
    assert mode(tmp_path / "f") == 0o755


@pytest.mark.parametrize("open_folder", [make_private, open_private])
def test_links_and_files_in_place_of_a_folder_are_rejected(tmp_path: Path, open_folder) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "file").touch()
    for name in ("link", "nowhere"):
        with pytest.raises(NotPrivate, match="it is a link"):
            open_folder(tmp_path / name)
    with pytest.raises(NotADirectoryError):
        open_folder(tmp_path / "file")
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_folders_and_files_of_another_user_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", _OTHER_UID, _OTHER_UID)
    for open_folder in (make_private, open_private):
        with pytest.raises(NotPrivate, match="it belongs to another user \\(uid 5002\\)"):
            open_folder(tmp_path / "theirs")
    remove_private(tmp_path / "theirs")
    assert (tmp_path / "theirs").is_dir()
    with make_private(tmp_path / "ours") as folder:
        (tmp_path / "ours/planted").write_text("stop")
        os.chown(tmp_path / "ours/planted", _OTHER_UID, _OTHER_UID)
        for access in (folder.read, folder.stat, folder.touch, lambda name: folder.overwrite(name, b"x")):
            with pytest.raises(NotPrivate, match="another user"):
                access("planted")
        assert not folder.has("planted")
        assert (tmp_path / "ours/planted").read_text() == "stop"


def test_own_files_are_not_links_and_not_world_writable(tmp_path: Path) -> None:
    """Group-writable files are accepted, since the owner chose to trust the group."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    for path in (file, folder):
        for mode_given, expected in ((0o600, True), (0o755, True), (0o775, True), (0o757, False), (0o602, False)):
            path.chmod(mode_given)
            assert is_own(path) is is_own(path, or_roots=True) is expected, (path, oct(mode_given))
        path.chmod(0o700)
    for name, target in (("link", file), ("to-folder", folder), ("nowhere", tmp_path / "gone")):
        (tmp_path / name).symlink_to(target)
        assert not is_own(tmp_path / name)
    assert not is_own(tmp_path / "gone")
    assert not is_own(file / "below a file")
    assert not is_own(tmp_path / "a\0b")
    # Links in the parent path do not matter, because the file itself belongs to this user.
    assert is_own(folder.parent / "to-folder" / ".." / "file")
    assert [read_own(tmp_path / name) for name in ("file", "link")] == [b"", b""]
    file.chmod(0o666)
    assert read_own(file) is read_own(tmp_path / "link") is None
    with pytest.raises(UserError):
        read_own(tmp_path / "gone")
    assert is_own(Path("/"), or_roots=True) is (Path("/").stat().st_uid in (0, os.geteuid()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_files_of_another_user_are_not_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not through an own link. Files of root are accepted with `or_roots`."""
    theirs, roots = tmp_path / "theirs", tmp_path / "roots"
    for path in (theirs, roots):
        path.touch(0o600)
    os.chown(theirs, _OTHER_UID, _OTHER_UID)
    (tmp_path / "our-link").symlink_to(theirs)
    (tmp_path / "their-link").symlink_to(roots)
    os.chown(tmp_path / "their-link", _OTHER_UID, _OTHER_UID, follow_symlinks=False)
    for name in ("theirs", "our-link", "their-link"):
        for or_roots in (False, True):
            assert not is_own(tmp_path / name, or_roots)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # other users cannot traverse the folders above it
    os.seteuid(_OTHER_UID)
    try:
        results = [is_own(Path(name), or_roots) for name in ("theirs", "roots") for or_roots in (False, True)]
    finally:
        os.seteuid(0)
    assert results == [True, True, False, True]
    assert read_own(theirs) is read_own(tmp_path / "our-link") is None
    assert read_own(tmp_path / "their-link") == b"", "the owner of the content matters, not the owner of the link"


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("my thesis")
    with make_private(tmp_path / "f") as folder:
        (tmp_path / "f/soft").symlink_to(precious)
        os.link(precious, tmp_path / "f/hard")
        (tmp_path / "f/folder").mkdir()
        for name in ("soft", "hard", "folder"):
            for access in (folder.read, folder.touch, lambda name: folder.overwrite(name, b"x")):
                with pytest.raises(OSError):
                    access(name)
        folder.write("soft", b"replaced")
        folder.write("hard", b"replaced")
        assert folder.read("soft") == folder.read("hard") == b"replaced"
    assert precious.read_text() == "my thesis"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../precious"])
def test_names_outside_of_the_folder_are_rejected(tmp_path: Path, name: str) -> None:
    with make_private(tmp_path / "f") as folder:
        for access in (folder.read, folder.remove, folder.make_fifo, folder.stat,
                    lambda name: folder.write(name, b"")):
            with pytest.raises(ValueError, match="not a plain file name"):
                access(name)


def test_moved_folder_is_still_used(tmp_path: Path) -> None:
    """Users who can write to the parent can replace the folder by another one."""
    with make_private(tmp_path / "f") as folder:
        (tmp_path / "f").rename(tmp_path / "moved")
        (tmp_path / "f").mkdir()
        folder.write("order", b"1")
        assert os.listdir(tmp_path / "f") == []
        assert folder.read("order") == b"1"


def test_failed_write_keeps_only_the_old_file(tmp_path: Path) -> None:
    """Simulates a full disk with a limit on the file size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with make_private(tmp_path / "f") as folder:
        folder.write("a", b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                folder.write("a", b"new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert folder.read("a") == b"old"
        assert os.listdir(tmp_path / "f") == ["a"]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for _ in range(3):
        with make_private(tmp_path / "f") as folder:
            folder.write("a", b"")
            folder.read("a")
        for name in ("link", "open"):
            with pytest.raises(NotPrivate):
                open_private(tmp_path / name)
    remove_private(tmp_path / "f")
    assert not (tmp_path / "f").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_secret_is_read_from_its_variable() -> None:
    first, second = new_secret(), new_secret()
    assert first != second
    assert run_secret({SECRET_VARIABLE: first}) == bytes.fromhex(first)
    assert run_secret({}) is None
    assert all(run_secret({SECRET_VARIABLE: value}) is None for value in ("", "no hex", first[:-2], "ü"))
    secret = bytes.fromhex(first)
    tokens = {derive_key(secret, "node", "n1"), derive_key(secret, "node", "n2"), derive_key(secret, "noden", "1"),
              derive_key(bytes.fromhex(second), "node", "n1")}
    assert len(tokens) == 4
    assert derive_key(secret, "node", "n1") in tokens
    assert not any(first[:16] in token for token in tokens)
