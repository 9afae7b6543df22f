"""Tests for videos with misleading headers. The frame count, frame rate and orientation equal FFmpeg's result."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from pathlib import Path

import av
import numpy as np
import pytest
from av.filter import Graph

from mindie_mm.errors import LimitExceeded, MediaError, Miscounted
from mindie_mm.media.guard.caps import decoding_to_count, under
from mindie_mm.media.video.encoded_video import EncodedVideo
from mindie_mm.media.video.timeline import PLACEHOLDER
from mindie_mm.settings.config import MediaCaps
from tests.media_samples import PIXEL_FORMATS, decode_all, encode_video, moving_frames, remux, video_packets

CASES = Path(__file__).parents[1] / "cases" / "media"
RIGHT = {
    "17_frames.mp4": (17, 10.0),
    "230_frames_30fps.mp4": (230, 30.0),
    "all_fragments.mp4": (100, 25.0),
    "first_fragment.mp4": (100, 25.0),
    "hevc_cut.mkv": (75, 25.0),
    "last_byte_missing.mp4": (47, 25.0),
    "mirrored_h.mp4": (5, 10.0),
    "paff.ts": (20, 25.0),
    "pipe.avi": (100, 25.0),
    "stated_30_real_29_47.mkv": (1200, pytest.approx(29.47, abs=0.005)),
    "ten.gif": (10, 10.0),
    "theora.ogv": (12, 25.0),
    "upright.mp4": (5, 10.0),
}
"""Expected number of frames and frame rate of each file."""


def case(name: str) -> bytes:
    return (CASES / name).read_bytes()


def plain(data: bytes) -> np.ndarray:
    """Decode all frames up to the first error."""
    frames = []
    with av.open(io.BytesIO(data)) as container, suppress(av.InvalidDataError):
        for frame in container.decode(video=0):
            frames.append(frame.to_ndarray(format="rgb24"))  # noqa: PERF401 - frames before an error are kept
    return np.stack(frames)


def assert_counted(data: bytes, num_frames: int, fps: float) -> EncodedVideo:
    """Assert that all frames can be decoded, and that their number and rate are as given.

    The last frame must also be decoded correctly if no other frame is requested.
    """
    video = EncodedVideo.open(data)
    assert (video.num_frames, video.fps) == (num_frames, fps)
    found = np.stack(list(video.decode(range(num_frames))))
    assert np.array_equal(next(iter(video.decode([num_frames - 1]))), found[-1])
    return video


def test_every_file_has_an_expectation():
    assert {path.name for path in CASES.iterdir() if path.suffix not in {".png", ".avif"}} == {*RIGHT, "tone.ts"}


@pytest.mark.parametrize("name", RIGHT)
def test_frame_count_and_rate_are_as_expected(name):
    assert_counted(case(name), *RIGHT[name])


@pytest.mark.parametrize("name", sorted({*RIGHT} - {"mirrored_h.mp4"}))
def test_frames_equal_those_of_a_plain_decode(name):
    data = case(name)
    video = EncodedVideo.open(data)
    assert np.array_equal(np.stack(list(video.decode(range(video.num_frames)))), plain(data))


@pytest.mark.parametrize("container", ["mp4", "mov"])
@pytest.mark.parametrize("flags", ["frag_keyframe", "frag_keyframe+empty_moov", "hybrid_fragmented", "faststart"])
def test_an_index_of_only_the_first_fragment_does_not_limit_the_frame_count(flags, container):
    clip = encode_video(moving_frames(40), options={"g": "10", "bf": "2"})
    assert_counted(remux(clip, container=container, options={"movflags": flags}), 40, 10.0)


@pytest.mark.parametrize("container", ["mpegts", "mp4", "matroska", "flv", "avi"])
def test_two_fields_count_as_one_frame(container):
    data = repacked(case("paff.ts"), container)
    video = assert_counted(data, 20, 25.0)
    assert np.array_equal(np.stack(list(video.decode(range(20)))), plain(data))


def test_fields_after_whole_frames_are_found():
    """The last frames of the file, which are coded as whole frames, are moved to the start."""
    late = repacked(case("paff.ts"), "matroska", lambda packets: packets[30:] + packets[:30])
    with av.open(io.BytesIO(late)) as container:
        num_packets = sum(1 for packet in container.demux(video=0) if packet.size)
    assert EncodedVideo.open(late).num_frames == len(plain(late)) < num_packets


def repacked(data: bytes, container: str, order: Callable[[list], list] = lambda packets: packets) -> bytes:
    """Write the packets of `data` to another container, each with a duration of 20 ms."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for place, packet in enumerate(order(packets)):
            packet.pts = packet.dts = 1800 * place
            packet.duration, packet.time_base, packet.stream = 1800, Fraction(1, 90_000), stream
            output.mux(packet)
    return file.getvalue()


class _Pipe:
    """A file object that cannot seek."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data) -> int:
        self.data += bytes(data)
        return len(data)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("avi", "mpeg4", {}),
        ("avi", "mpeg4", {"bf": "2"}),
        ("avi", "mjpeg", {}),
        ("avi", "libx264", {"bf": "2"}),
        ("matroska", "libx264", {}),
        ("webm", "libvpx", {}),
        ("flv", "flv", {}),
        ("asf", "wmv2", {}),
    ],
)
def test_placeholders_in_headers_written_to_a_pipe_are_ignored(container, codec, options):
    pipe = _Pipe()
    with av.open(pipe, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 112, 84, PIXEL_FORMATS.get(codec, "yuv420p")
        for pixels in moving_frames(20):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    video = EncodedVideo.open(pipe.data)
    assert (video.num_frames, round(video.fps, 3)) == (20, 25.0)
    assert len(list(video.decode([0, 19]))) == 2


MPEG = [*product(["mpeg1video", "mpeg2video", "mpeg4"], ["mp4", "avi", "matroska", "mpegts", "mpeg", "asf"])]
OF_ONE_PICTURE = [
    *((*one, options) for one in MPEG for options in ({}, {"bf": "2"}, {"bf": "1", "g": "8"})),
    *((*one, {"flags": "+ilme+ildct"}) for one in MPEG if one[0] != "mpeg1video"),
    *((codec, "asf", {}) for codec in ("wmv1", "wmv2", "msmpeg4")),
    *((codec, "avi", {}) for codec in ("wmv1", "wmv2", "msmpeg4", "msmpeg4v2", "h263p", "flv")),
    ("msmpeg4", "matroska", {}),
    ("flv", "flv", {}),
]


@pytest.mark.parametrize(("codec", "container", "options"), OF_ONE_PICTURE)
def test_packets_of_mpeg_codecs_count_the_frames(codec, container, options):
    pixels = moving_frames(9)
    for frames in (pixels, np.repeat(pixels[:1], 9, axis=0)):
        data = encode_video(frames, 25, container, codec, options)
        found = EncodedVideo.open(data)
        with decoding_to_count():
            expected = EncodedVideo.open(data)
        assert (found.num_frames, found.fps) == (expected.num_frames, expected.fps)
        assert container in ("mpeg", "asf") or found.is_counted


def test_the_frames_of_packed_divx_are_decoded_to_count_them():
    """A packet has a P-picture and the B-picture before it. The next packet has a picture that is not coded."""
    data = encode_video(moving_frames(9), 25, "avi", "mpeg4", {"bf": "1"})
    first, *others = video_packets(data)
    not_coded = b"\0\0\1\xb6\x50\x40\x7f"
    packed = [first]
    for reference, between in zip(others[::2], others[1::2], strict=True):
        packed += [reference + between, not_coded]
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="avi") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for place, content in enumerate(packed):
            packet = av.Packet(content)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, place, place, Fraction(1, 25)
            output.mux(packet)
    video = EncodedVideo.open(file.getvalue())
    assert not video.is_counted
    assert video.num_frames == len(decode_all(file.getvalue()))


@pytest.mark.parametrize("stated", [0, PLACEHOLDER, 2**31 - 1])
@pytest.mark.parametrize("riff", [0, 2**32 - 1])
def test_the_frames_of_an_unfinished_avi_are_counted(stated, riff):
    data = bytearray(encode_video(moving_frames(20), container="avi", codec="mpeg4"))
    struct.pack_into("<I", data, 4, riff)
    struct.pack_into("<I", data, data.index(b"avih") + 8 + 16, stated)
    struct.pack_into("<I", data, data.index(b"strh") + 8 + 32, stated)
    del data[data.index(b"idx1") :]
    assert_counted(bytes(data), 20, 10.0)


@pytest.mark.parametrize("stated", [25, 30, 50])
@pytest.mark.parametrize("real", [Fraction(25), Fraction(2947, 100), Fraction(30_000, 1001), Fraction(30)])
def test_the_rate_of_matroska_follows_the_times_and_not_the_default_duration(real, stated):
    """Times in the file are whole milliseconds. If they match the default duration, its rate is returned exactly."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=stated)
        stream.width, stream.height = 112, 84
        stream.codec_context.time_base = Fraction(1, 1000)
        for place, pixels in enumerate(moving_frames(60)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(1000 * place / real), Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    data = file.getvalue()
    assert struct.pack(">I", 10**9 // stated) in data
    fps = EncodedVideo.open(data).fps
    assert fps == (pytest.approx(stated, abs=1e-6) if real == stated else pytest.approx(float(real), rel=0.02))
    if real == Fraction(2947, 100):
        assert fps == pytest.approx(29.47, abs=0.25), "only the duration of the last frame may differ"


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize("rate", [Fraction(24_000, 1001), Fraction(30_000, 1001), Fraction(25), Fraction(60)])
def test_a_constant_rate_is_exact(rate, container):
    fps = EncodedVideo.open(encode_video(moving_frames(30), fps=rate, container=container)).fps
    assert fps == pytest.approx(float(rate), rel=1e-4)


QUIET = {"x265-params": "log-level=0"}
CUT = {
    "h264": ("libx264", {"x264-params": "open-gop=1:keyint=10:bframes=3:b-adapt=0:scenecut=0"}),
    "hevc": (
        "libx265",
        {"x265-params": "open-gop=1:keyint=10:min-keyint=10:bframes=4:b-adapt=0:scenecut=0:log-level=0"},
    ),
    "mpeg2": ("mpeg2video", {"g": "10", "bf": "2"}),
    "vp8": ("libvpx", {"g": "10", "deadline": "realtime", "cpu-used": "8"}),
    "vp9": ("libvpx-vp9", {"g": "10", "deadline": "realtime", "cpu-used": "8"}),
}


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
@pytest.mark.parametrize("codec", CUT)
def test_images_whose_references_were_cut_off_are_not_counted(codec, container):
    if codec in ("vp8", "vp9") and container != "matroska":
        pytest.skip("the container does not support the codec")
    name, options = CUT[codec]
    whole = encode_video(moving_frames(40), container="matroska", codec=name, options=options)
    for start in (3, 10, 11, 20):
        cut = remux(whole, container=container, start=start)
        if not (expected := beyond_errors(cut)):  # the cut has removed the parameter sets
            with pytest.raises((MediaError, LimitExceeded), match=r"frames is unknown|broken"):
                EncodedVideo.open(cut)
            continue
        video = EncodedVideo.open(cut)
        assert video.num_frames == len(expected)
        assert all(map(np.array_equal, video.decode(range(len(expected))), expected))


def beyond_errors(data: bytes) -> list[np.ndarray]:
    """Decode all frames as the ffmpeg program does, which skips packets with errors."""
    frames: list[av.VideoFrame] = []
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(video=0):
            try:
                frames += packet.decode()
            except av.InvalidDataError:
                continue
    return [frame.to_ndarray(format="rgb24") for frame in frames]


DAMAGES = {
    "cut": lambda data, size: data[:-size],
    "zeros": lambda data, size: data[:-size] + bytes(size),
    "others": lambda data, size: data[:-size] + bytes(byte ^ 0x55 for byte in data[-size:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", {"movflags": "faststart"}),
        ("mp4", "libx264", {"movflags": "frag_keyframe"}),
        ("mp4", "libx265", {"movflags": "faststart"}),
        ("matroska", "libx264", {}),
        ("webm", "libvpx-vp9", {}),
        ("mpegts", "libx264", {}),
        ("flv", "libx264", {}),
        ("asf", "wmv2", {}),
        ("mpeg", "mpeg2video", {}),
        ("mov", "mjpeg", {"movflags": "faststart"}),
    ],
)
def test_a_damaged_tail_gives_one_result_for_all_samplings(container, codec, options, damage):
    """Every sampling gives the same number of frames and can decode its frames, or every sampling is refused."""
    data = encode_video(moving_frames(20), 25, container, codec, QUIET if codec == "libx265" else {})
    data = remux(data, container=container, options=options) if options else data
    for size in (1, 7, 40, 300):
        found = set()
        for indices in ([0, 10], [0, 15], [0, -1], range(20)):
            try:
                found.add(taken(DAMAGES[damage](data, size), indices))
            except MediaError:
                found.add(0)
        assert len(found) == 1, found
        assert found.pop() in (0, *range(14, 21))


def test_a_short_tail_may_be_missing():
    data = case("last_byte_missing.mp4")
    for num_bytes, num_frames in ((10, 47), (50, 45), (100, 43)):
        assert_counted(data[:-num_bytes], num_frames, 25.0)
    with pytest.raises(MediaError, match="declares 50 frames, but it has 42"):
        EncodedVideo.open(data[:-200])


def taken(data: bytes, indices: Sequence[int]) -> int:
    """Decode frames `indices` as a tokenizer does, and return the frame count of the video. -1 is the last frame."""

    def found() -> int:
        video = EncodedVideo.open(data)
        wanted = [index % video.num_frames for index in indices if index < video.num_frames]
        assert len(list(video.decode(wanted))) == len(wanted)
        return video.num_frames

    try:
        return found()
    except Miscounted:
        with decoding_to_count():
            return found()


def test_damage_in_the_middle_is_refused():
    """Only damage at the end of a video is accepted. Here, frames follow the damage."""
    data = encode_video(moving_frames(120), options={"g": "10", "movflags": "faststart"})
    with av.open(io.BytesIO(data)) as container:
        entry = [*container.streams.video[0].index_entries][30]
    broken = data[: entry.pos] + bytes(entry.size) + data[entry.pos + entry.size :]
    with pytest.raises(MediaError, match=r"broken: only \d+ frames could be decoded from its 120 packets"):
        EncodedVideo.open(broken)


def test_decoding_to_count_is_within_the_limit_of_the_request():
    with under(MediaCaps(max_request_video_pixels=1000)), pytest.raises(LimitExceeded, match="would be decoded"):
        EncodedVideo.open(case("paff.ts"))


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("gif", "gif"),
        ("ivf", "libvpx"),
        ("ivf", "libvpx-vp9"),
        ("mov", "qtrle"),
        ("mov", "cinepak"),
        ("avi", "cinepak"),
        ("dv", "dvvideo"),
        ("avi", "dvvideo"),
        ("mov", "dvvideo"),
    ],
)
def test_other_containers_and_codecs_are_decoded(container, codec):
    frames = moving_frames(6) if codec != "dvvideo" else np.tile(moving_frames(6, 120, 96), (1, 6, 6, 1))
    data = encode_video(frames, 25, container, codec)
    video = assert_counted(data, 6, 25.0)
    assert np.array_equal(np.stack(list(video.decode(range(6)))), plain(data))


def test_an_unsupported_codec_in_ogg_is_refused():
    with pytest.raises(MediaError, match="a codec that is not supported"):
        EncodedVideo.open(encode_video(moving_frames(6), 25, "ogg", "libvpx"))


LAYS = {
    (1, 0, 0, 1): (),
    (-1, 0, 0, 1): ("hflip",),
    (1, 0, 0, -1): ("vflip",),
    (-1, 0, 0, -1): ("hflip", "vflip"),
    (0, 1, -1, 0): ("transpose=clock",),
    (0, -1, 1, 0): ("transpose=cclock",),
    (0, 1, 1, 0): ("transpose=cclock_flip",),
    (0, -1, -1, 0): ("transpose=clock_flip",),
}
"""Matrices (a, b, c, d) of ISO/IEC 14496-12, and the ffmpeg program's equivalent filters."""


def with_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Return the MP4 file `data` with `matrix` in the header of its track."""
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(b"tkhd") + 4 + 40
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


@pytest.mark.parametrize("matrix", LAYS)
def test_frames_are_rotated_and_mirrored_as_in_ffmpeg(matrix):
    data = encode_video(moving_frames(3))
    shown = []
    with av.open(io.BytesIO(data)) as container:
        graph = Graph()
        nodes = [graph.add_buffer(template=container.streams.video[0]), graph.add("format", "rgb24")]
        nodes += [graph.add(*filters.split("=")) for filters in LAYS[matrix]]
        graph.link_nodes(*nodes, graph.add("buffersink")).configure()
        for frame in container.decode(video=0):
            graph.push(frame)
            shown.append(graph.pull().to_ndarray(format="rgb24"))
    video = EncodedVideo.open(with_matrix(data, matrix))
    found = np.stack(list(video.decode(range(3))))
    assert found.shape[1:3] == (video.height, video.width)
    assert np.array_equal(found, np.stack(shown))


def test_a_yaw_of_180_degrees_in_matroska_mirrors_frames():
    file, clip = io.BytesIO(), encode_video(moving_frames(3))
    with av.open(io.BytesIO(clip)) as source, av.open(file, "w", format="matroska") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(180)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    rolled = file.getvalue()
    at = rolled.index(b"\x76\x75\x88")
    mirrored = rolled[:at] + b"\x76\x73\x88" + struct.pack(">d", 180) + rolled[at + 11 :]
    assert np.array_equal(np.stack(list(EncodedVideo.open(mirrored).decode(range(3)))), decode_all(clip)[:, :, ::-1])


def test_a_matrix_of_zeros_has_no_effect():
    data = encode_video(moving_frames(3))
    video = EncodedVideo.open(with_matrix(data, (0, 0, 0, 0)))
    assert np.array_equal(np.stack(list(video.decode(range(3)))), decode_all(data))


def test_a_mirrored_video_equals_the_upright_one_with_left_and_right_swapped():
    mirrored, upright = (EncodedVideo.open(case(name)) for name in ("mirrored_h.mp4", "upright.mp4"))
    for one, other in zip(mirrored.decode(range(5)), upright.decode(range(5)), strict=True):
        assert np.array_equal(one, other[:, ::-1])
