"""Attacks with containers that have too many parts or too large parts.

FFmpeg reads even millions of parts one by one, and keeps large parts in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.audio.encoded_audio import EncodedAudio
from mindie_mm.media.guard import container
from mindie_mm.media.video.encoded_video import EncodedVideo
from tests.attacks import clips
from tests.attacks.clips import Make, box
from tests.attacks.watched import Watched
from tests.audio_samples import encode_audio, tone
from tests.processor_time import processor_time_below
from tests.transport_samples import EMPTY, begun, lists

MiB = 2**20
FREE, CHUNK = struct.pack(">I", 8) + b"free", b"junk" + bytes(4)


def in_index(parts: bytes) -> bytes:
    film = clips.video()
    start = film.index(b"moov") - 4
    stop = start + int.from_bytes(film[start : start + 4])
    return film[:start] + box(b"moov", film[start + 8 : stop] + parts) + film[stop:]


def in_wav(parts: bytes) -> bytes:
    head = clips.wav_header(16000, 1)
    place = head.index(b"data")
    return head[:place] + parts + head[place:] + bytes(1000)


FLOODS: dict[str, tuple[Callable[[bytes], object], Callable[[bytes], bytes], bytes]] = {
    "boxes of an MP4": (EncodedVideo.open, lambda parts: clips.video() + parts, box(b"free", bytes(72))),
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


@pytest.mark.parametrize(("opened", "make", "part"), FLOODS.values(), ids=FLOODS)
def test_a_flood_of_parts_is_read_for_a_limited_time(
    opened: Callable[[bytes], object],
    make: Callable[[bytes], bytes],
    part: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(container, "OPEN_S", -1)
    opened(make(1000 * part))  # this time limit does not apply to small files
    monkeypatch.setattr(container, "OPEN_S", 0.02)
    monkeypatch.setattr(container, "OPEN_BYTES", 2**20)
    with pytest.raises(LimitExceeded, match=r"opening the container takes more than the limit of 0\.02 s"):
        opened(make((2**23 // len(part)) * part))
    assert capfd.readouterr().err == "", "PyAV must not print an error"


def times(piece: bytes, num_bytes: int = 62 * MiB) -> bytes:
    return piece * (num_bytes // len(piece))


def chunk(kind: bytes, content: bytes, order: str = "<") -> bytes:
    return kind + struct.pack(f"{order}I", len(content)) + content + bytes(len(content) % 2)


def cover(num_bytes: int) -> bytes:
    """Return an MP4 with a cover image of `num_bytes`."""
    image = box(b"covr", box(b"data", struct.pack(">II3s", 13, 0, b"\xff\xd8\xff") + bytes(num_bytes)))
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    return in_index(box(b"udta", box(b"meta", bytes(4) + handler + box(b"ilst", image))))


def aiff(chunks: bytes) -> bytes:
    data = encode_audio(tone(0.1, 16_000), 16_000, "AIFF")
    at = data.index(b"COMM")
    return chunk(b"FORM", data[8:at] + chunks + data[at:], ">")


def flac_pictures(num_bytes: int, count: int) -> bytes:
    data = encode_audio(tone(0.1, 16_000), 16_000, "FLAC")
    head = struct.pack(">II9s20xI", 3, 9, b"image/png", num_bytes)
    block = b"\6" + (len(head) + num_bytes).to_bytes(3) + head + bytes(num_bytes)
    return data[:4] + b"\0" + data[5:42] + count * block + data[42:]


def avi(chunks: bytes) -> bytes:
    data = clips.video("avi", "mpeg4")
    at = data.rindex(b"LIST", 0, data.index(b"movi"))
    return chunk(b"RIFF", data[8:at] + chunks + data[at:])


def flv(script: bytes) -> bytes:
    """Return an FLV that starts with a script object."""
    data, tags = clips.video("flv", "flv"), b"\2\0\nonMetaData" + script
    return data[:13] + b"\x12" + len(tags).to_bytes(3) + bytes(7) + tags + struct.pack(">I", 11 + len(tags)) + data[13:]


def named(values: dict[bytes, bytes]) -> bytes:
    """Return an AMF0 array of values with names."""
    pairs = (struct.pack(">H", len(name)) + name + value for name, value in values.items())
    return b"\x08" + struct.pack(">I", len(values)) + b"".join(pairs) + b"\0\0\x09"


def transport(packets: bytes) -> bytes:
    return clips.video("mpegts", "mpeg2video") + packets


NUMBER = bytes(9)
NAMES = {b"%x" % at: NUMBER for at in range(100_000)}
Opened = Callable[[bytes], object]
FAST = ""
"""Empty error message, for files that a fast machine may open within the limits."""
LARGE: dict[str, tuple[Opened, Make, str]] = {
    "an MP4's cover": (EncodedVideo.open, lambda: cover(62 * MiB), "index has [0-9]+ bytes; the limit is 33554432"),
    "a cover of half that": (
        EncodedVideo.open,
        lambda: cover(30 * MiB),
        "more than the limit of 23068672 bytes read at once",
    ),
    "chapters of an MP4": (
        EncodedVideo.open,
        lambda: in_index(box(b"udta", times(box(b"chpl", bytes(8) + b"\xff" + (bytes(8) + b"\1a") * 255)))),
        "index has",
    ),
    "texts of an MP4": (
        EncodedVideo.open,
        lambda: in_index(box(b"udta", times(box(b"\xa9cmt", struct.pack(">HH", 1, 0x15C7) + b"a")))),
        "index has",
    ),
    "texts of half that": (
        EncodedVideo.open,
        lambda: in_index(box(b"udta", times(box(b"\xa9cmt", struct.pack(">HH", 1, 0x15C7) + b"a"), 31 * MiB))),
        FAST,
    ),
    "a name of an AIFF": (
        EncodedAudio.open,
        lambda: aiff(chunk(b"NAME", b"a" * (62 * MiB), ">")),
        "bytes read at once",
    ),
    "chunks of an AIFF": (EncodedAudio.open, lambda: aiff(times(chunk(b"ANNO", b"a", ">"))), FAST),
    "pictures of a FLAC": (EncodedAudio.open, lambda: flac_pictures(15 * MiB, 4), "bytes read at once"),
    "lists of an AVI": (EncodedVideo.open, lambda: avi(times(chunk(b"LIST", b"strl"))), FAST),
    "chunks of an AVI": (EncodedVideo.open, lambda: avi(times(CHUNK)), FAST),
    "boxes of an MP4": (
        EncodedVideo.open,
        lambda: clips.video() + times(FREE),
        "more top-level boxes than the limit of 131072",
    ),
    "names of an FLV": (EncodedVideo.open, lambda: flv(named(NAMES)), "4097 or more tags; the limit is 4096"),
    "names within an FLV's": (
        EncodedVideo.open,
        lambda: flv(named({b"a": b"\x0a" + struct.pack(">I", 1) + named({b"b": named(NAMES)})})),
        "4097 or more tags; the limit is 4096",
    ),
    "objects within an FLV's": (
        EncodedVideo.open,
        lambda: flv(b"\x0a\0\0\0\1" * (2 * MiB)),
        "131073 or more tag values; the limit is 131072",
    ),
    "programs of a transport stream": (
        EncodedVideo.open,
        lambda: transport(lists(480)),
        "changes its program list more often than the limit of 32 times",
    ),
}


@pytest.mark.parametrize(("opened", "make", "message"), LARGE.values(), ids=LARGE)
def test_a_large_file_is_refused_within_limits_of_time_and_memory(opened: Opened, make: Make, message: str) -> None:
    data = make()

    def refused() -> None:
        with pytest.raises(LimitExceeded, match=message) if message else suppress(LimitExceeded):
            opened(data)

    _, used_s, further = Watched(os.getpid()).during(refused)
    assert used_s < 2
    assert further < 64 * MiB


@pytest.mark.parametrize(
    "packets",
    [lambda: lists(30) + times(EMPTY), lambda: times(begun(60), 5 * MiB)],
    ids=["programs", "streams that nobody names"],
)
def test_a_transport_stream_within_its_limits_takes_little_time(packets: Make) -> None:
    data = transport(packets())
    with processor_time_below(2), suppress(LimitExceeded, MediaError):
        EncodedVideo.open(data)


def test_a_small_file_is_read_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "DECODE_S", -1)
    with pytest.raises(LimitExceeded, match="opening the container takes more than the limit of -1 s"):
        EncodedVideo.open(clips.video())


INDEX = b"\x0a" + struct.pack(">I", 3000) + 3000 * NUMBER
HONEST: dict[str, tuple[Opened, Make]] = {
    "an MP4's cover": (EncodedVideo.open, lambda: cover(16 * MiB)),
    "a FLAC's picture": (EncodedAudio.open, lambda: flac_pictures(15 * MiB, 1)),
    "an AIFF's text": (EncodedAudio.open, lambda: aiff(chunk(b"ANNO", b"a" * MiB, ">"))),
    "an AVI's XMP": (EncodedVideo.open, lambda: avi(chunk(b"_PMX", b"<" * MiB))),
    "an FLV's index": (
        EncodedVideo.open,
        lambda: flv(named({b"duration": NUMBER, b"keyframes": b"\3" + named({b"times": INDEX, b"at": INDEX})[5:]})),
    ),
    "an FLV's values": (
        EncodedVideo.open,
        lambda: flv(named({b"a": b"\2\0\1b", b"c": b"\1\1", b"d": b"\5", b"e": b"\x0b" + bytes(10)})),
    ),
}


@pytest.mark.parametrize(("opened", "make"), HONEST.values(), ids=HONEST)
def test_honest_files_with_large_metadata_open(opened: Opened, make: Make) -> None:
    data = make()
    _, _, further = Watched(os.getpid()).during(lambda: opened(data))
    assert further < 64 * MiB


def test_each_kind_of_flv_value_is_skipped_to_count_the_tags_after_it() -> None:
    """The file has one value of each kind, and then too many names, which must still be counted."""
    kinds = [b"\0" + b"\xff" * 8, b"\1\1", b"\2\0\3abc", b"\3\0\0\x09", b"\x08\0\0\0\0\0\0\x09", b"\x0a\0\0\0\1\5"]
    values = {b"k%d" % at: kind for at, kind in enumerate([*kinds, b"\6", b"\x0b" + b"\xff" * 10, b"\x0d"])}
    with pytest.raises(LimitExceeded, match="4097 or more tags; the limit is 4096"):
        EncodedVideo.open(flv(named(values | NAMES)))
