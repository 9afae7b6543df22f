"""Tests for the file of the Unix socket."""

from __future__ import annotations

import os
import socket
import stat
from hashlib import sha256
from pathlib import Path

import pytest

from mindie_mm.errors import OperationalError
from service.http.unix_socket import bound_unix_socket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def test_the_file_has_mode_0600_with_any_umask_and_is_removed_at_exit(path: Path) -> None:
    for umask in (0, 0o177):
        former = os.umask(umask)
        try:
            with bound_unix_socket(path) as listener:
                assert stat.S_IMODE(path.lstat().st_mode) == 0o600
                assert listener.getsockname() == str(path)
        finally:
            os.umask(former)
        assert not path.exists()


def test_a_stale_file_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with bound_unix_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(str(path))


@pytest.mark.parametrize("backlog", [8, 0])
def test_a_file_on_which_another_process_listens_is_refused(path: Path, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(path))
        other.listen(backlog)
        waiting.connect(str(path))
        with pytest.raises(OperationalError, match=f"cannot listen on {path}: another process listens"):
            bound_unix_socket(path).__enter__()
        assert path.exists()


def test_a_service_that_is_still_loading_keeps_its_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path.parent)
    with bound_unix_socket(path):
        for same in (path, link / "socket"):
            with pytest.raises(
                OperationalError, match=f"another process has locked {same}.lock; stop this process, or"
            ):
                bound_unix_socket(same).__enter__()
        assert path.exists()
    with bound_unix_socket(path):
        pass
    assert [*path.parent.iterdir()] == [link]


def test_a_lock_file_of_a_killed_service_is_no_obstacle(path: Path) -> None:
    path.with_name("socket.lock").touch()
    with bound_unix_socket(path):
        pass


def test_an_abstract_socket_of_another_process_is_no_obstacle(path: Path) -> None:
    """Any user can bind any abstract name."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0mindie_mm {sha256(os.fsencode(path)).hexdigest()}")
        with bound_unix_socket(path):
            pass


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_a_file_of_another_kind_is_refused_and_kept(path: Path, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "target")
        if kind == "link":
            (tmp_path / "target").touch()
    with pytest.raises(OperationalError, match="exists and is not a socket; choose another path"):
        bound_unix_socket(path).__enter__()
    assert os.path.lexists(path)


def test_a_path_that_is_too_long_or_has_no_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / ("a" * 200), tmp_path / "none" / "socket"):
        with pytest.raises(OperationalError, match=f"cannot listen on {path}"):
            bound_unix_socket(path).__enter__()


def test_a_file_that_another_process_has_put_in_its_place_is_kept(path: Path) -> None:
    with bound_unix_socket(path):
        path.unlink()
        path.touch()
    assert path.exists()
