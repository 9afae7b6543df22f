"""Tests for parcels, in which media sources are passed to decoders as open files."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindie_mm.decode.digest import content_digest, parcel_digest
from mindie_mm.decode.parcel import pack_copy, pack_file, unpacked
from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.source import read_source
from tests.audio_samples import tone
from tests.decode.conftest import packed
from tests.media_samples import encoded, moving_frames, photograph

CAT = photograph("chelsea.png", (150, 120))
DATA = encoded(CAT)
SOURCES: dict[str, tuple[str, Any]] = {
    "path": ("image", "file"),
    "bytes": ("image", DATA),
    "data URL": ("image", f"data:image/jpeg;base64,{base64.b64encode(DATA).decode()}"),
    "PIL": ("image", CAT),
    "array": ("image", np.asarray(CAT)),
    "view of an array": ("image", np.asarray(CAT)[::-1, :, ::-1]),
    "video": ("video", moving_frames(3)),
    "frames": ("video", ("file", DATA, np.asarray(CAT), CAT)),
    "one frame": ("video", (DATA,)),
    "samples": ("audio", tone(0.2)),
}


@pytest.fixture(params=SOURCES)
def media(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Media:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(DATA)
    return Media(*SOURCES[request.param])


@pytest.mark.parametrize("salt", ["", "a tenant"])
def test_a_parcel_has_the_content_and_digest_of_its_source(media: Media, salt: str) -> None:
    data = read_source(media)
    with packed(media) as parcel:
        found = unpacked(parcel, parcel.descriptor)
        assert type(found) is type(data)
        pieces = zip(found, data, strict=True) if isinstance(data, tuple) else [(found, data)]
        assert all(np.array_equal(one, other) for one, other in pieces)
        digest = content_digest("settings", data, salt)
        assert parcel_digest("settings", parcel, salt) == digest
        assert parcel_digest("other settings", parcel, salt) != digest
        assert parcel_digest("settings", parcel, f"{salt}x") != digest


def write_to(descriptor: int) -> None:
    os.pwrite(descriptor, b"other", 0)


def map_to_write(descriptor: int) -> None:
    mmap.mmap(descriptor, 0).close()


def shorten(descriptor: int) -> None:
    os.ftruncate(descriptor, 1)


@pytest.mark.parametrize("change", [write_to, map_to_write, shorten])
def test_a_decoder_cannot_change_a_parcel(media: Media, change: Callable[[int], None]) -> None:
    with packed(media) as parcel, pytest.raises(OSError, match=r"not permitted|denied|Bad file|Invalid argument"):
        change(parcel.descriptor)


def test_frames_with_equal_concatenated_bytes_have_different_digests() -> None:
    digests = []
    for frames in ((DATA, DATA), (DATA + DATA,), (DATA[:100], DATA[100:] + DATA)):
        with packed(Media("video", frames)) as parcel:
            digests.append(parcel_digest("", parcel))
    assert len(set(digests)) == 3


def test_a_file_is_passed_open_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with packed(Media("image", str(path))) as parcel:
        assert os.fstat(parcel.descriptor).st_ino == path.stat().st_ino
        path.unlink()
        assert unpacked(parcel, parcel.descriptor) == DATA


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing", "empty", "too large", "bytes"])
def test_other_sources_are_read_by_the_tokenizer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("empty", "too large"):
        path.write_bytes(b"" if kind == "empty" else DATA)
    monkeypatch.setattr("mindie_mm.decode.parcel.MAX_SOURCE_BYTES", 100)
    source = {"device": "/dev/zero", "bytes": DATA}.get(kind, str(path))
    assert pack_file(Media("image", source), {"image": 1}) is None


def test_a_source_that_cannot_be_read_leaves_no_file_open(tmp_path: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for source, error in (
        (str(tmp_path / "missing"), MediaError),
        (np.zeros(12, np.uint8), InputError),
        ("/dev/zero", LimitExceeded),
    ):
        with pytest.raises(error):
            pack_copy(Media("image", source), {"image": 1})
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("length", [0, 1, len(DATA) - 1])
def test_a_file_truncated_after_packing_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with packed(Media("image", str(path))) as parcel:
        os.truncate(path, length)
        with pytest.raises(ValueError, match=f"ends at byte {length}"):
            unpacked(parcel, parcel.descriptor)
        with pytest.raises(MediaError, match="truncated"):
            parcel_digest("", parcel)
