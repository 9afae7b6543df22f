"""Attacks with MP4s that declare more samples than they have bytes, in every place where FFmpeg reads the number."""

from __future__ import annotations

import io
import os
import struct

import av
import numpy as np
import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.audio.encoded_audio import EncodedAudio
from mindie_mm.media.video.encoded_video import EncodedVideo
from tests.attacks import clips
from tests.attacks.clips import Make, box
from tests.attacks.watched import Watched

STATED = 2 * 10**7
FIRST = b"junk pnot udta pict prfl skip free wide uuid ftyp zzzz \x82\x82\x7f\x7d".split()
NESTING = b"dinf edts ilst mdia minf moof moov mvex stbl traf tref udta wave sinf schi".split()
"""Boxes in which FFmpeg 8.1 accepts a sample table or a whole index, although neither belongs there."""
OTHER = (
    b"ACLR APRG ARES avss av1C chpl co64 colr ctts DpxE dref elst enda fiel adrm ftyp glbl hdlr jp2h mdat mdhd "
    b"meta mvhd alac avcC pasp clap sbas sidx stco stps strf stsc stsd stss stsz stts stz2 sdtp tkhd tfdt tfhd "
    b"tmcd chap trex trun esds dac3 dec3 ddts wide wfex cmov chan chnl dvc1 sgpd sbgp hvcC vvcC uuid free ---- "
    b"frma senc saiz saio pssh schm tenc dfLa st3d sv3d vexu hfov dOps dmlp SmDm CoLL vpcC mdcv clli dvcC kind "
    b"SA3D SAND iloc pcmC pitm evcC idat iref ispe iprp iinf amve lhvC lvcC iacb junk skip pnot pict prfl ipco "
    b"hoov gmhd rmra rmda "
).split()
"""Other boxes that at least one version of FFmpeg supports."""


def stating() -> bytes:
    return clips.mp4_of_samples(1, STATED)


@pytest.mark.parametrize("kind", FIRST)
def test_stated_samples_are_refused_whatever_the_first_box_is(kind: bytes) -> None:
    with pytest.raises(LimitExceeded, match=f"declares {STATED} samples"):
        EncodedVideo.open(box(kind, b"") + stating())


@pytest.mark.parametrize("kind", NESTING)
def test_stated_samples_are_refused_whatever_box_holds_the_table(kind: bytes) -> None:
    with pytest.raises(LimitExceeded, match=f"declares {STATED} samples"):
        EncodedVideo.open(stating().replace(b"stbl", kind))


@pytest.mark.parametrize("kind", [*NESTING, *OTHER])
def test_stated_samples_are_refused_whatever_box_holds_the_index(kind: bytes) -> None:
    """If a video opened, FFmpeg might have found its index in a box that the check does not search."""
    data = stating()
    at = data.index(b"moov") - 4
    with pytest.raises((LimitExceeded, MediaError)):
        EncodedVideo.open(data[:at] + box(kind, data[at:]))


BYPASSES = {
    "compressed": (clips.compressed_index, "index is compressed"),
    "named by an index": (lambda: clips.fragment_in_data(STATED), f"declares {STATED + 4} samples"),
    "past the index's end": (lambda: clips.past_the_end(STATED), f"declares {STATED} samples"),
    "a group": (lambda: clips.grouped(STATED), "declares 200000"),
    "edits": (lambda: clips.edited(8000), "declares 8000 edits and 2000 samples"),
}


@pytest.mark.parametrize(("make", "message"), BYPASSES.values(), ids=BYPASSES.keys())
def test_other_tables_that_grow_are_refused(make: Make, message: str) -> None:
    with pytest.raises((LimitExceeded, MediaError), match=message):
        EncodedVideo.open(make())


def test_a_property_list_past_its_end_is_searched() -> None:
    """FFmpeg reads a property list up to its declared size, even into media data, so the check must do the same."""
    chance = box(b"mdat", b"stsz" + bytes(4) + b"\xff" * 8)
    listed = box(b"meta", struct.pack(">I", 2**20) + b"ipco")
    assert EncodedVideo.open(clips.video() + chance).num_frames == 6
    with pytest.raises(LimitExceeded, match="samples, more than its"):
        EncodedVideo.open(clips.video() + listed + chance)


def test_reading_ends_at_a_box_smaller_than_its_header() -> None:
    behind = struct.pack(">I", 4) + b"free" + box(b"moov", b"stsz" + bytes(4) + b"\xff" * 8)
    assert EncodedVideo.open(clips.video() + behind).num_frames == 6


@pytest.mark.parametrize("version", [0, 1])
def test_both_versions_of_sample_groups_are_counted(version: int) -> None:
    parameter = bytes(4 * version)
    group = box(b"sbgp", struct.pack(">B3x4s", version, b"roll") + parameter + struct.pack(">III", 1, 10**9, 1))
    with pytest.raises(LimitExceeded, match="declares 1000000000 samples"):
        EncodedVideo.open(clips.video("mp4", "mpeg4").replace(b"ctts", b"zzzz") + box(b"udta", group))


def test_an_empty_list_of_groups_is_accepted() -> None:
    assert EncodedVideo.open(clips.video() + box(b"udta", box(b"sbgp", struct.pack(">I4sI", 0, b"roll", 0)))).num_frames


@pytest.mark.parametrize(
    "index",
    [
        box(b"udta", box(b"sidx", bytes(24))),
        box(b"sidx", struct.pack(">IIIIIHH", 0, 1, 10, 0, 0, 0, 9)),
        box(b"sidx", struct.pack(">IIIQQHH", 2**24, 1, 10, 0, 9, 0, 1) + bytes(12)),
    ],
    ids=["in a box", "cut", "version 1"],
)
def test_media_data_are_searched_if_a_segment_index_may_point_into_them(index: bytes) -> None:
    chance = box(b"mdat", b"stsz" + bytes(4) + b"\xff" * 8 + bytes(20))
    with pytest.raises(LimitExceeded, match="samples, more than its"):
        EncodedVideo.open(clips.video() + index + chance)


def test_chunks_without_sizes_are_limited_by_the_file() -> None:
    assert EncodedAudio.open(clips.pcm_of_chunks(800)).rate == 8000
    with pytest.raises(LimitExceeded, match="samples, more than its 2286 bytes can hold"):
        EncodedAudio.open(clips.pcm_of_chunks(2**31 - 1))


def test_small_sample_groups_are_accepted() -> None:
    assert EncodedVideo.open(clips.grouped(6)).num_frames == 6


def test_boxes_of_64_bit_size_or_to_the_end_of_the_file_are_searched() -> None:
    data = stating()
    at = data.index(b"moov") - 4
    for head in (b"\0\0\0\0moov", b"\0\0\0\1moov" + (len(data) - at + 8).to_bytes(8), b"\xff\xff\xff\xffmoov"):
        with pytest.raises(LimitExceeded, match=f"declares {STATED} samples"):
            EncodedVideo.open(data[:at] + head + data[at + 8 :])


@pytest.mark.parametrize("name", ["trun", "stsz", "cmov"])
def test_box_names_within_media_data_are_ignored(name: str) -> None:
    """Media data may contain the names of boxes by chance."""
    chance = box(b"mdat", bytes(9) + name.encode() + b"\xff" * 20)
    assert EncodedVideo.open(clips.video() + chance).num_frames == 6
    assert EncodedVideo.open(clips.video("matroska") + chance).num_frames == 6
    hidden = clips.fragment_in_data(STATED, aligned=True)
    with pytest.raises(MediaError, match="the video is broken: none of its 4 packets can be decoded"):
        EncodedVideo.open(hidden)


@pytest.mark.parametrize(
    ("container", "options"),
    [
        ("mp4", {"movflags": "frag_keyframe+empty_moov"}),
        ("mp4", {"movflags": "frag_keyframe+empty_moov+dash"}),
        ("mp4", {"movflags": "frag_every_frame+empty_moov+default_base_moof"}),
        ("mp4", {"movflags": "frag_keyframe+empty_moov+global_sidx+dash"}),
        ("mp4", {"movflags": "faststart"}),
        ("mp4", {"movflags": "faststart", "moov_size": "9000"}),
        ("mov", {}),
        ("3gp", {}),
        ("ismv", {}),
        ("ipod", {}),
    ],
)
def test_honest_files_open(container: str, options: dict[str, str]) -> None:
    assert EncodedVideo.open(clips.muxed(container, options)).num_frames == 4


@pytest.mark.slow
def test_many_edits_within_the_limit_are_accepted() -> None:
    assert EncodedVideo.open(clips.edited(100)).num_frames


@pytest.mark.parametrize(
    "make",
    [
        lambda: box(b"ftyp", b"isom") + box(b"free", b"") * (8 * 2**20),
        lambda: box(b"ftyp", b"isom") + box(b"trun", bytes(8)) * (4 * 2**20),
        lambda: (
            box(b"ftyp", b"isom")
            + box(b"moov", b"stts" + bytes(3) + b"\1\0\0\0\1" + b"\0\0\0\1" * 10 + b"stsc" * 2**20)
        ),
        lambda: box(b"ftyp", b"isom") + box(b"moov", b"trun" * 2**24),
        lambda: box(b"ftyp", b"isom") + box(b"moov", b"sidx" * 2**24),
        lambda: box(b"ftyp", b"isom") + box(b"sidx", bytes(23) + b"\xff" * 13) * 2**20,
        lambda: box(b"ftyp", b"isom") + box(b"moov", b"stsd" * 2**24),
        lambda: clips.nested(8000) * 1000,
    ],
    ids=["boxes", "truns", "chunk tables", "names", "indices' names", "indices", "entries", "nests"],
)
def test_the_check_is_bounded_in_time_and_memory(make: Make) -> None:
    data = make()

    def opened() -> None:
        with pytest.raises((LimitExceeded, MediaError)):
            EncodedVideo.open(data)

    _, used_s, further = Watched(os.getpid()).during(opened)
    assert used_s < 3  # includes the time that FFmpeg takes
    assert further < 64 * 2**20


@pytest.mark.parametrize("video_frames", [0, 40])
@pytest.mark.parametrize(("codec", "rate"), [("pcm_s16le", 16_000), ("pcm_mulaw", 8000), ("pcm_s24le", 48_000)])
def test_pcm_audio_whose_samples_fill_the_file_is_accepted(codec: str, rate: int, video_frames: int) -> None:
    """The file contains half a minute of PCM audio, alone or together with a tiny video."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        audio = container.add_stream(codec, rate=rate, layout="mono")
        if video_frames:
            video = container.add_stream("mjpeg", rate=2, width=64, height=64, pix_fmt="yuvj420p")
            for _ in range(video_frames):
                image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
                container.mux(video.encode(image))
            container.mux(video.encode(None))
        for start in range(0, 30 * rate, 1024):
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.int16), "s16", "mono")
            samples.rate, samples.pts = rate, start
            container.mux(audio.encode(samples))
        container.mux(audio.encode(None))
    assert EncodedAudio.open(file.getvalue()).rate == rate
