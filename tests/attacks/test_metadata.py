"""Tests that files with floods of metadata are refused, and that honest files with a lot of metadata open."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.audio.encoded_audio import EncodedAudio
from mindie_mm.media.guard import container
from mindie_mm.media.guard.metadata import check_metadata
from mindie_mm.media.video.encoded_video import EncodedVideo
from tests.attacks import clips
from tests.attacks.clips import Make, element, matroska, matroska_track
from tests.attacks.watched import Watched
from tests.audio_samples import encode_audio, encode_with_ffmpeg, tone

MiB = 2**20
RATE = 16_000
NUM = 20_000
"""Number of different names in a flood. FFmpeg needs at least three seconds to read this many."""


def short(name: str, content: bytes = b"") -> bytes:
    return bytes.fromhex(name) + bytes([0x80 | len(content)]) + content


def film(more: bytes) -> bytes:
    return matroska(matroska_track(1, b"V_VP8"), [(1, frame) for frame in clips.vp8()], more)


def times(piece: bytes, num_bytes: int = 12 * MiB) -> bytes:
    return piece * (num_bytes // len(piece))


def frame(name: bytes, content: bytes) -> bytes:
    size = len(content)
    return name + bytes(size >> 21 - 7 * at & 0x7F for at in range(4)) + bytes(2) + content


def tagged(frames: bytes, audio: bytes | None = None) -> bytes:
    """Return an audio file that begins with an ID3 tag of `frames`. By default, the audio is an MP3."""
    audio = encode_audio(tone(0.2, RATE), RATE, "MP3", "MPEG_LAYER_III") if audio is None else audio
    return frame(b"ID3\4", frames)[:4] + bytes(2) + frame(b"", frames)[:4] + frames + audio


def comments(texts: list[bytes]) -> bytes:
    return struct.pack("<II", 0, len(texts)) + b"".join(struct.pack("<I", len(text)) + text for text in texts)


def flac(num_comments: int) -> bytes:
    data = encode_audio(tone(0.2, RATE), RATE, "FLAC")
    block = comments([b"%x=1" % at for at in range(num_comments)])
    return data[:4] + b"\0" + data[5:42] + b"\4" + len(block).to_bytes(3) + block + data[42:]


def opus(header: bytes) -> bytes:
    data = encode_with_ffmpeg(tone(0.5, 48_000), 48_000, "ogg", "libopus")
    at = data.index(b"OpusTags") + 8
    return data[:at] + header + data[at + len(header) :]


def ogg(head: bytes, second: bytes) -> bytes:
    """Return an Ogg file with two packets. The second packet is split into as many pages as necessary."""
    pages = [(head, bytes([len(head)]))]
    for start in range(0, len(second) + 1, 255 * 255):
        piece = second[start : start + 255 * 255]
        pages.append((piece, b"\xff" * (len(piece) // 255) + bytes([len(piece) % 255] * (len(piece) < 255 * 255))))
    data = b""
    for at, (content, sizes) in enumerate(pages):
        flags = 2 if at == 0 else int(at > 1)
        parts = (b"OggS\0" + struct.pack("<BqII", flags, 0, 1, at), bytes([len(sizes)]) + sizes + content)
        data += parts[0] + struct.pack("<I", clips.ogg_check(bytes(4).join(parts))) + parts[1]
    return data


def flac_in_ogg(num_comments: int) -> bytes:
    block = comments([b"%x=1" % at for at in range(num_comments)])
    stream_info = encode_audio(tone(0.2, RATE), RATE, "FLAC")[4:42]
    return ogg(b"\x7fFLAC\1\0\0\1fLaC" + stream_info, b"\x84" + len(block).to_bytes(3) + block)


def speex(num_comments: int) -> bytes:
    head = b"Speex   " + bytes(20) + struct.pack("<13i", 1, 80, RATE, 1, 4, 1, -1, 320, 0, 1, 0, 0, 0)
    return ogg(head, comments([b"%x=1" % at for at in range(num_comments)]))


def riff_info(count: int) -> bytes:
    info = b"INFO" + b"".join(b"%04x" % at + struct.pack("<I", 2) + b"a\0" for at in range(count))
    audio = encode_audio(tone(0.2, RATE), RATE)
    return audio[:36] + b"LIST" + struct.pack("<I", len(info)) + info + audio[36:]


def caf_info(count: int) -> bytes:
    """Return a CAF file with an information chunk of `count` texts in front of the audio."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return name + struct.pack(">q", len(content)) + content

    description = chunk(b"desc", struct.pack(">d4sIIIII", RATE, b"lpcm", 0, 2, 1, 1, 16))
    info = chunk(b"info", struct.pack(">I", count) + b"".join(b"%x\0a\0" % at for at in range(count)))
    return b"caff\0\1\0\0" + description + info + chunk(b"data", bytes(4 + RATE))


def w64_info(count: int) -> bytes:
    """Return a Wave64 file with `count` texts.

    The declared size of each chunk includes the 24 bytes of the chunk's name and size.
    """
    kind = bytes.fromhex("f3acd3118cd100c04f8edb8a")

    def chunk(name: bytes, content: bytes) -> bytes:
        return name + struct.pack("<Q", 24 + len(content)) + content + bytes(-len(content) % 8)

    description = chunk(b"fmt " + kind, struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16))
    texts = struct.pack("<I", count) + b"".join(b"%04x" % at + struct.pack("<I", 4) + b"a\0\0\0" for at in range(count))
    info = chunk(bytes.fromhex("bc945f925a52d21186dc00c04f8edb8a"), texts)
    content = b"wave" + kind + description + info + chunk(b"data" + kind, bytes(RATE))
    return chunk(bytes.fromhex("726966662e91cf11a5d628db04c10000"), content)


def sphere(num_lines: int) -> bytes:
    data = encode_audio(tone(0.2, RATE), RATE, "NIST")
    lines = b"".join(b"k%x -s1 v\n" % at for at in range(num_lines))
    size = 1024 + len(lines)
    return b"NIST_1A\n%7d\n" % size + lines + data[16:]


def asf_tags(count: int) -> bytes:
    """Return an ASF file whose header contains `count` tags with different names."""
    data = clips.video("asf", "mpeg4")
    names = (f"{at:x}\0".encode("utf-16-le") for at in range(count))
    tags = b"".join(struct.pack("<H", len(name)) + name + struct.pack("<HH4s", 0, 4, b"a\0\0\0") for name in names)
    head = bytes.fromhex("40a4d0d207e3d21197f000a0c95ea850") + struct.pack("<QH", 26 + len(tags), count)
    size, number = struct.unpack("<QI", data[16:28])
    size += len(head) + len(tags)
    return data[:16] + struct.pack("<QI", size, number + 1) + data[28:30] + head + tags + data[30:]


FLOODS: dict[str, tuple[Make, str]] = {
    "tags": (lambda: film(element("1254c367", times(short("7373")))), "tags; the limit is 4096"),
    "simple tags": (lambda: film(element("1254c367", element("7373", times(short("67c8"))))), "tags; the limit is"),
    "lists of tags": (lambda: film(times(short("1254c367"))), "lists of the same kind; the limit is 4096"),
    "different tags": (
        lambda: film(
            element("1254c367", element("7373", *[short("67c8", short("45a3", b"%x" % at)) for at in range(NUM)]))
        ),
        "20000 tags; the limit is 4096",
    ),
    "chapters": (lambda: film(element("1043a770", element("45b9", times(short("b6"))))), "chapters; the limit is"),
    "different chapters": (
        lambda: film(
            element("1043a770", element("45b9", *[short("b6", short("73c4", at.to_bytes(3))) for at in range(NUM)]))
        ),
        "chapters; the limit is 4096",
    ),
    "cues": (lambda: film(element("1c53bb6b", times(short("bb", short("b7"))))), "cues; the limit is"),
    "attached files": (lambda: film(element("1941a469", times(short("61a7")))), "attached files; the limit is 4096"),
    "cues of unknown size": (
        lambda: film(bytes.fromhex("1c53bb6b") + b"\1" + b"\xff" * 7 + times(short("bb"))),
        "cues; the limit is",
    ),
    "private frames": (lambda: tagged(times(frame(b"PRIV", b"a\0b"))), "ID3 tags; the limit is 4096"),
    "different texts": (
        lambda: tagged(b"".join(frame(b"TXXX", b"\3%x\0b" % at) for at in range(NUM))),
        "ID3 tags; the limit is 4096",
    ),
    "tags one behind another": (lambda: times(tagged(b"", b"")) + tagged(b""), "ID3 tags; the limit is 4096"),
    "a tag in a chunk": (
        lambda: clips.wav_header(RATE, 1)[:36] + b"id3 " + bytes(4) + tagged(times(frame(b"PRIV", b"a\0b"))),
        "ID3 tags; the limit is 4096",
    ),
    "tags of MP4": (
        lambda: clips.video() + clips.box(b"udta", clips.box(b"----", clips.box(b"name", b"")) * NUM),
        "20000 tags; the limit is 4096",
    ),
    "keys of MP4": (lambda: clips.video() + clips.box(b"mdta", b"a") * NUM, "20000 tags; the limit is 4096"),
    "comments of FLAC": (lambda: flac(NUM), "20000 comments; the limit is 4096"),
    "comments of Ogg": (lambda: opus(struct.pack("<II", 0, 4097)), "4097 comments; the limit is 4096"),
    "comments of FLAC in Ogg": (lambda: flac_in_ogg(NUM), "20000 comments; the limit is 4096"),
    "pages of Ogg": (lambda: times(b"OggS" + bytes(23), 16 * MiB), "524289 or more pages; the limit is 524288"),
    "pieces of FLAC in Ogg": (
        lambda: flac_in_ogg(1) + times(b"OggS" + bytes(22) + b"\xff" + bytes(255), 16 * MiB),
        "page segments; the limit is 524288",
    ),
    "comments of Speex": (lambda: speex(NUM), "a stream with a codec that is not supported"),
    "comments of Ogg behind a page": (
        lambda: opus(struct.pack("<I", 300)),
        "300 bytes in its vendor string; the limit is 128",
    ),
}


@pytest.mark.parametrize(("make", "message"), FLOODS.values(), ids=FLOODS.keys())
def test_floods_of_metadata_are_refused_within_limits_of_time_and_memory(make: Make, message: str) -> None:
    data = make()

    def opened() -> None:
        with pytest.raises((LimitExceeded, MediaError), match=message):
            EncodedAudio.open(data)
        with pytest.raises((LimitExceeded, MediaError), match=message):
            EncodedVideo.open(data)

    _, used_s, further = Watched(os.getpid()).during(opened)
    assert used_s < 5  # usually less than 2; a busy machine needs more processor time
    assert further < 32 * MiB


PIECE_BY_PIECE: dict[str, tuple[Callable[[bytes], object], Make]] = {
    "lines of a SPHERE file": (EncodedAudio.open, lambda: sphere(NUM)),
    "texts of RIFF": (EncodedAudio.open, lambda: riff_info(NUM)),
    "texts of CAF": (EncodedAudio.open, lambda: caf_info(NUM)),
    "texts of Wave64": (EncodedAudio.open, lambda: w64_info(NUM)),
    "tags of ASF": (EncodedVideo.open, lambda: asf_tags(NUM)),
}


@pytest.mark.parametrize(("opened", "make"), PIECE_BY_PIECE.values(), ids=PIECE_BY_PIECE)
def test_names_that_are_read_one_by_one_end_at_the_limit_of_time(
    opened: Callable[[bytes], object], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "DECODE_S", 0.2)
    with pytest.raises(LimitExceeded, match=r"opening the container takes more than the limit of 0\.2 s"):
        opened(make())


WHOLE: dict[str, tuple[Callable[[bytes], object], Make]] = {
    "an attached file": (
        EncodedVideo.open,
        lambda: film(element("1941a469", element("61a7", short("466e", b"a"), element("465c", bytes(24 * MiB))))),
    ),
    "attached files": (
        EncodedVideo.open,
        lambda: film(element("1941a469", *[element("61a7", short("466e", b"a"), element("465c", bytes(3 * MiB)))] * 8)),
    ),
    "a cover": (EncodedAudio.open, lambda: tagged(frame(b"APIC", b"\3image/png\0\3\0" + bytes(24 * MiB)))),
    "covers": (EncodedAudio.open, lambda: tagged(frame(b"APIC", b"\3image/png\0\3\0" + bytes(3 * MiB)) * 16)),
}


@pytest.mark.parametrize(("opened", "make"), WHOLE.values(), ids=WHOLE)
def test_large_attachments_are_refused_within_little_memory(opened: Callable[[bytes], object], make: Make) -> None:
    data = make()

    def refused() -> None:
        with pytest.raises(LimitExceeded, match="opening the container takes more than"):
            opened(data)

    _, _, further = Watched(os.getpid()).during(refused)
    assert further < 64 * MiB


def test_a_video_with_fonts_chapters_tags_and_cues_opens() -> None:
    """The video has two fonts, 100 chapters, 32 tags, and a cue for each frame of half an hour."""
    font = element("61a7", short("466e", b"a.ttf"), short("4660", b"font/ttf"), element("465c", bytes(5 * MiB)))
    chapter = [short("b6", short("73c4", bytes([1, at])) + short("91", bytes([at]))) for at in range(100)]
    tags = [element("7373", short("67c8", short("45a3", b"BPS") + short("4487", b"1"))) for _ in range(32)]
    cue = short("bb", short("b3", b"\1") + short("b7", short("f7", b"\1") + short("f1", b"\1")))
    more = element("1941a469", font, font) + element("1043a770", element("45b9", *chapter))
    data = film(more + element("1254c367", *tags) + element("1c53bb6b", cue * 54_000))
    assert EncodedVideo.open(data).num_frames == 3


def test_a_live_video_of_unknown_sizes_opens() -> None:
    """MediaRecorder in browsers writes a segment and clusters of unknown size."""
    data = film(b"")
    for name in ("18538067", "1f43b675"):
        at = data.index(bytes.fromhex(name)) + 4
        data = data[:at] + b"\1" + b"\xff" * 7 + data[at + 8 :]
    assert EncodedVideo.open(data).num_frames == 3


def test_an_audio_clip_with_a_large_cover_opens() -> None:
    cover = frame(b"APIC", b"\3image/png\0\3\0" + os.urandom(12 * MiB))
    assert EncodedAudio.open(tagged(frame(b"TIT2", b"\3a") + cover)).rate == RATE


def test_usual_numbers_of_comments_are_accepted() -> None:
    assert EncodedAudio.open(flac(300)).rate == RATE
    check_metadata(flac_in_ogg(300))
    assert EncodedAudio.open(encode_with_ffmpeg(tone(0.2, 48_000), 48_000, "ogg", "libopus")).rate == 48_000


def test_random_media_data_are_not_counted_as_metadata() -> None:
    """The random bytes follow the id of a metadata element, so an incorrect check would count elements in them."""
    for holder in ("1254c367", "1043a770", "1941a469", "1c53bb6b"):
        check_metadata(film(b"")[:200] + element(holder, os.urandom(40 * MiB)))


def test_truncated_files_are_checked_without_an_error() -> None:
    for data in (film(b""), tagged(b""), flac(3), opus(b"")):
        for stop in range(0, len(data), 97):
            check_metadata(data[:stop])
