"""Attacks with Matroska files whose tracks are compressed, and tests for `without_compression`."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard.matroska import without_compression
from mindie_mm.media.video.encoded_video import EncodedVideo
from tests.attacks import clips
from tests.attacks.clips import compressed, element, matroska, matroska_track
from tests.media_samples import decode_all

VIDEO = matroska_track(1, b"V_VP8")
SUBTITLES = matroska_track(2, b"S_TEXT/UTF8", compressed(), kind=17)
BLOCK = clips.unpacking(valid=False)
UNKNOWN = 2**56 - 1


def sizes(data: bytes, number: int) -> set[int]:
    """Return the sizes of the blocks that FFmpeg reads from the track `number`."""
    with av.open(io.BytesIO(data)) as container:
        return {packet.size for packet in container.demux() if packet.size and packet.stream.id == number}


def plain(tracks: bytes = VIDEO) -> bytes:
    return matroska(tracks, [(1, frame) for frame in clips.vp8()])


@pytest.mark.parametrize("kind", [2, 17])
@pytest.mark.parametrize(
    "encodings",
    [
        compressed(),
        compressed(1),
        compressed(2),
        compressed(3, bytes(65)),
        element("6d80", element("6240")),
        element("6d80", element("6240", element("5034"))),
        element("6d80", element("6240", element("5034", element("4254", b"\3"), element("4254", b"\0")))),
        compressed(3) + compressed(),
        element("ec", bytes(9)) + compressed(),
        element("ec", compressed(), size=UNKNOWN),
    ],
)
def test_other_tracks_are_not_unpacked(encodings: bytes, kind: int) -> None:
    block = clips.unpacking()
    other = matroska_track(2, b"S_TEXT/UTF8", encodings, kind=kind)
    data = matroska(VIDEO + other, [(2, block), *((1, frame) for frame in clips.vp8())])
    assert sizes(without_compression(data), 2) <= {len(block)}
    video = EncodedVideo.open(data)
    assert np.array_equal(np.stack(list(video.decode(range(3)))), decode_all(plain()))


def test_a_compressed_video_track_is_refused() -> None:
    for encodings in (compressed(), compressed(1), compressed(3, bytes(65))):
        with pytest.raises(MediaError, match="compresses its video tracks with a general-purpose algorithm"):
            EncodedVideo.open(plain(matroska_track(1, b"V_VP8", encodings)))


@pytest.mark.parametrize("in_front", [b"", b"ID3\4\0\0\0\0\0\0"])
def test_tracks_are_found_wherever_they_are(in_front: bytes) -> None:
    data = in_front + matroska(VIDEO + SUBTITLES, [(2, BLOCK)])
    inside = data.replace(bytes.fromhex("6d80"), bytes.fromhex("6d81"))
    assert without_compression(data) == inside
    hidden = element("ec", element("1654ae6b", SUBTITLES)) + plain()
    assert without_compression(hidden) == hidden.replace(bytes.fromhex("6d80"), bytes.fromhex("6d81"))


@pytest.mark.parametrize("unknown", [b"\xff", b"\x1f" + b"\xff" * 3, b"\1" + b"\xff" * 7])
def test_elements_of_unknown_size_are_searched(unknown: bytes) -> None:
    """FFmpeg also searches such elements, and would spend seconds on unpacking the blocks of the tracks inside."""
    tracks = bytes.fromhex("1654ae6b") + unknown + b"\xae" + unknown + VIDEO[9:] + SUBTITLES
    data = plain()
    start = data.index(bytes.fromhex("1654ae6b"))
    stop = start + len(element("1654ae6b", VIDEO))
    segment = data.index(bytes.fromhex("18538067"))
    sized = data[: segment + 4] + b"\1" + b"\xff" * 7 + data[segment + 12 : start] + tracks + data[stop:]
    assert without_compression(sized).count(bytes.fromhex("6d81")) == 1
    assert EncodedVideo.open(sized).num_frames == 3


def test_stripped_headers_are_restored() -> None:
    frame = clips.vp8(1)[0]
    data = matroska(matroska_track(1, b"V_VP8", compressed(3, frame[:4])), [(1, frame[4:])])
    assert without_compression(data) is data
    assert np.array_equal(next(EncodedVideo.open(data).decode([0])), decode_all(data)[0])


def test_files_without_compression_are_not_copied() -> None:
    for data in (plain(), clips.video(), b"", b"\x16\x54\xae\x6b", b"\x16\x54\xae\x6b\xff" + b"\xae\xff" * 100):
        assert without_compression(data) is data


def test_too_many_elements_are_refused() -> None:
    for data in (b"\x16\x54\xae\x6b" * 10**6, b"\x16\x54\xae\x6b\xff" + b"\xae\x80" * 10**6):
        with pytest.raises(LimitExceeded, match="more elements than the limit of 16384"):
            without_compression(data)
