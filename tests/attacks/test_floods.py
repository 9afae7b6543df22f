"""Containers of millions of empty parts, which FFmpeg goes through one by one before it says what they hold."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from mindie_mm.errors import LimitExceeded
from mindie_mm.media import container
from mindie_mm.media.audio import EncodedAudio
from mindie_mm.media.video import EncodedVideo
from tests.attacks import clips

FREE, CHUNK = struct.pack(">I", 8) + b"free", b"junk" + bytes(4)


def in_index(parts: bytes) -> bytes:
    film = clips.video()
    start = film.index(b"moov") - 4
    stop = start + int.from_bytes(film[start : start + 4])
    return film[:start] + clips.box(b"moov", film[start + 8 : stop] + parts) + film[stop:]


def in_wav(parts: bytes) -> bytes:
    head = clips.wav_header(16000, 1)
    place = head.index(b"data")
    return head[:place] + parts + head[place:] + bytes(1000)


FLOODS: dict[str, tuple[Callable[[bytes], object], Callable[[bytes], bytes], bytes]] = {
    "boxes of an MP4": (EncodedVideo.open, lambda parts: clips.video() + parts, FREE),
    "boxes of its index": (EncodedVideo.open, in_index, FREE),
    "nothing in the tags of a Matroska": (
        EncodedVideo.open,
        lambda parts: clips.matroska(
            clips.matroska_track(1, b"V_VP8"), [(1, frame) for frame in clips.vp8()], clips.element("1254c367", parts)
        ),
        b"\xec\x80",
    ),
    "chunks of a WAV": (EncodedAudio.open, in_wav, CHUNK),
}


@pytest.mark.parametrize(("opened", "made", "part"), FLOODS.values(), ids=FLOODS)
def test_a_flood_of_parts_is_read_for_a_limited_time(
    opened: Callable[[bytes], object],
    made: Callable[[bytes], bytes],
    part: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(container, "OPEN_S", -1)
    opened(made(1000 * part))  # what is not large is never late
    monkeypatch.setattr(container, "OPEN_S", 0.02)
    monkeypatch.setattr(container, "OPEN_BYTES", 2**20)
    with pytest.raises(LimitExceeded, match=r"to find out what the container holds takes more than 0\.02 s, the limit"):
        opened(made((2**23 // len(part)) * part))
    assert capfd.readouterr().err == "", "PyAV prints what it drops"
