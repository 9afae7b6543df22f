"""Tests for file systems that cannot sync folders (CIFS) or do not support locks (Lustre, NFS)."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.files import sync_folder
from mindie_mm.batch.output.disk_writer import WriteBatchMemory
from mindie_mm.batch.output.shard import ShardWriter
from mindie_mm.doctor import machine as doctor
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import SharedMemoryError, StorageError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import Arena, request_directory
from mindie_mm.worker.answer_file import Origin, continued
from service.app import require_places
from tests.batch.conftest import run, run_in_process, settings, written

NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture
def rows(media: Path) -> Path:
    row = {"inputs": [{"image": "0.jpg"}, {"text": "What?"}]}
    return written(media / "file_systems.jsonl", [row] * 3)


def refuse_to_sync(kind: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync fail with the errno `number` for files for whose mode `kind` returns True."""
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


def refuse_to_lock(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_run_succeeds_if_its_folder_cannot_be_synced(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_folder(Path("/proc"))  # fsync of a folder in /proc fails with EINVAL, which must be ignored
    refuse_to_sync(stat.S_ISDIR, errno.EINVAL, monkeypatch)
    run_in_process(settings(rows), tmp_path / "run")
    assert [sample.error for sample in Dataset(tmp_path / "run")] == [None] * 3


@pytest.mark.parametrize(("kind", "number"), [(stat.S_ISDIR, errno.EIO), (stat.S_ISREG, errno.EINVAL)])
def test_other_sync_errors_end_a_run(
    kind: Any, number: int, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_sync(kind, number, monkeypatch)
    with pytest.raises(StorageError, match=rf"run\.json cannot be written: {os.strerror(number)}"):
        run_in_process(settings(rows), tmp_path / "run")
    with (
        ShardWriter(tmp_path, "run", 0, 1, WriteBatchMemory()) as shard,
        pytest.raises(StorageError, match=rf"shard-000000000\.safetensors cannot be written: {os.strerror(number)}"),
    ):
        shard.finish()


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_run_without_locks_continues_with_a_warning(
    number: int, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_lock(number, monkeypatch)
    run_in_process(settings(rows), tmp_path / "run")
    assert [sample.error for sample in Dataset(tmp_path / "run")] == [None] * 3
    (warning,) = [record.getMessage() for record in caplog.records]
    lacks = (
        f"the file system does not support locks (flock: {os.strerror(number)}). Do not let another process write there"
    )
    assert warning == f"{tmp_path / 'run'}: {lacks}"
    caplog.clear()
    origin = Origin(run="", model="", model_digest="", sampling=SamplingParams())
    with continued(tmp_path / "answers.jsonl", origin) as (append, *_):
        append(b"{}\n")
    assert f"answers.jsonl: {lacks}" in caplog.text


def test_other_lock_errors_end_a_run(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_lock(errno.EIO, monkeypatch)
    with pytest.raises(StorageError, match="run cannot be locked: Input/output error"):
        run(settings(rows), tmp_path / "run")
    with pytest.raises(StorageError, match=r"shard-000000000\.journal cannot be locked: Input/output error"):
        ShardWriter(tmp_path, "run", 0, 1, WriteBatchMemory())


def test_a_spool_and_an_arena_need_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_lock(errno.ENOSYS, monkeypatch)
    with (
        pytest.raises(
            SharedMemoryError, match=r"spool .* the file system does not support locks \(flock: Function not impl"
        ),
        request_directory(tmp_path / "spool"),
    ):
        pass
    with pytest.raises(SharedMemoryError, match="the file system does not support locks"):
        require_places(ServiceConfig(spool=tmp_path / "spool"))
    assert [*(tmp_path / "spool").iterdir()] == []
    finding = doctor._spool(ServiceConfig(spool=tmp_path / "spool"))
    assert (finding.status, "the file system does not support locks" in finding.found) == ("error", True)
    with pytest.raises(SharedMemoryError, match="cannot lock a file in /dev/shm: Function not implemented"):
        Arena.create(4096)
