"""Tests for video decoding."""

import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import av
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.media.guard.caps import Work, under
from mindie_mm.media.video.encoded_video import EncodedVideo, open_video
from mindie_mm.settings.config import MediaCaps
from tests.media_samples import (
    decode_all,
    encode_video,
    encoded,
    moving_frames,
    photograph,
    remux,
    video_packets,
    with_edit,
)

CONTAINERS = [
    ("mp4", "libx264"),
    ("mp4", "mpeg4"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_sampled_frames_equal_those_of_a_plain_decode(container, codec):
    data = encode_video(moving_frames(24), fps=8, container=container, codec=codec)
    video = EncodedVideo.open(data)
    assert (video.height, video.width, video.num_frames, video.fps) == (84, 112, 24, 8.0)
    indices = [0, 5, 6, 17, 23]
    assert np.array_equal(np.stack(list(video.decode(indices))), decode_all(data)[indices])


SHORT_GROUPS = {"g": "10", "bf": "3", "x264-params": "scenecut=0"}
"""Options for a keyframe every 10 frames. FFmpeg's index then omits groups of frames that an edit list hides."""


@contextmanager
def _on_threads(num_threads: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _decoded(data, num_threads=1):
    """Assert that all frames of `data` equal those of PyAV. Return their number and the frame rate."""
    with _on_threads(num_threads):
        video = EncodedVideo.open(data)
        frames = np.stack(list(video.decode(range(video.num_frames))))
    assert np.array_equal(frames, decode_all(data))
    return video.num_frames, video.fps


def _clip(container="mp4", codec="libx264", options=None, **more):
    options = options or (SHORT_GROUPS if codec == "libx264" else {})
    return encode_video(moving_frames(40), container=container, codec=codec, options=options, **more)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    ("change", "num_frames"),
    [
        (lambda data: remux(data, container="mp4", earlier=5), 35),
        (lambda data: remux(data, container="mp4", earlier=25), 15),
        (lambda data: with_edit(data, 0, 0.5), 20),
        (lambda data: with_edit(data, 0.4, 1), 24),
        (lambda data: with_edit(data, 0.25, 0.5), 20),
    ],
    ids=["copied from 0.5 s", "copied from 2.5 s", "without its end", "without its beginning", "its middle"],
)
def test_frames_hidden_by_an_edit_list_do_not_count(change, num_frames, num_threads):
    assert _decoded(change(_clip()), num_threads) == (num_frames, 10.0)


def test_an_edited_video_that_is_truncated_is_refused():
    data = remux(_clip(), container="mp4", earlier=25, options={"movflags": "faststart"})
    assert _decoded(data) == (15, 10.0)
    for share in (0.5, 0.7):
        with pytest.raises(MediaError, match=r"declares 40 frames, but it has \d+"):
            EncodedVideo.open(data[: int(len(data) * share)])


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
def test_empty_chunks_of_an_avi_do_not_count_as_frames(codec):
    moments = [0, 1, 2, 10, 11, 12, 20, 21, 22, 23]
    data = encode_video(moving_frames(10), container="avi", codec=codec, moments=moments)
    assert _decoded(data) == (10, 10 / 2.4)
    assert _decoded(encode_video(moving_frames(10), container="mov", codec=codec, moments=moments)) == (10, 10 / 2.4)
    for share in (0.9, 0.97):
        with pytest.raises(MediaError, match=r"declares 24 frames, but it has \d+"):
            EncodedVideo.open(data[: int(len(data) * share)])


def test_an_empty_sample_does_not_count_as_a_frame():
    data = encode_video(moving_frames(6), codec="mpeg4")
    sizes = data.index(b"stsz") + 12
    fifth, last = struct.unpack_from(">II", data, sizes + 16)
    data = data[: sizes + 16] + struct.pack(">II", fifth + last, 0) + data[sizes + 24 :]
    assert EncodedVideo.open(data).num_frames == 5


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_stream_cut_between_keyframes_starts_at_the_next_keyframe(share, num_threads):
    data = _clip("mpegts")
    cut = data[: 2 * 188] + data[188 * int(len(data) // 188 * share) :]
    num_frames, fps = _decoded(cut, num_threads)
    assert (num_frames % 10, fps) == (0, 10.0)
    assert num_frames < len(video_packets(cut))


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx265", {"x265-params": "keyint=10:bframes=3:b-adapt=0:scenecut=0:log-level=none"}),
        ("libx264", {"g": "10", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
        ("mpeg2video", {"g": "10", "bf": "2"}),
    ],
)
def test_frames_whose_references_were_cut_off_do_not_count(codec, options, num_threads):
    """The file starts at a keyframe. The next frames are shown before this keyframe and refer to earlier frames."""
    data = _clip(codec=codec, options=options)
    with av.open(io.BytesIO(data)) as container:
        keys = [place for place, packet in enumerate(container.demux(video=0)) if packet.is_keyframe]
    cut = remux(data, container="matroska", start=keys[2])
    num_frames, fps = _decoded(cut, num_threads)
    assert (0 < len(video_packets(cut)) - num_frames < 4, fps) == (True, 10.0)


@pytest.mark.parametrize("container", ["mp4", "matroska", "flv"])
def test_frames_before_the_first_keyframe_do_not_count(container):
    cut = remux(_clip(), container=container, start=5)
    assert _decoded(cut) == (30, 10.0)


MOTION_THEN_STILL = [*range(20), *range(20, 220, 10)]
"""Times of the 40 frames of a video of 21.1 s, as in a screen recording. The last frame is shown for 0.1 s."""


@pytest.mark.parametrize(
    ("container", "codec"),
    [*CONTAINERS[:4], ("mpegts", "libx264"), ("flv", "libx264"), ("asf", "wmv2")],
)
def test_a_variable_rate_follows_from_the_frame_times(container, codec):
    data = encode_video(moving_frames(40), container=container, codec=codec, moments=MOTION_THEN_STILL)
    assert _decoded(data) == (40, pytest.approx(40 / 21.1, rel=0.05))  # in MP4, the last frame is longer
    with under(MediaCaps(max_video_seconds=20)), pytest.raises(LimitExceeded, match=r"2[12]\.\d s; the limit is 20 s"):
        EncodedVideo.open(data)


def test_a_missing_rate_follows_from_the_frame_times():
    """In a browser's recording, only the times of the frames determine the frame rate."""
    data = encode_video(moving_frames(40), container="webm", codec="libvpx", moments=[3 * i + i % 3 for i in range(40)])
    begin = data.index(b"\x23\xe3\x83\x84")  # the default duration of a frame
    data = data[:begin] + b"\xec\x86" + bytes(6) + data[begin + 8 :]
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].average_rate is None
    assert EncodedVideo.open(data).fps == pytest.approx(40 / 11.7, rel=0.01)


def test_the_stated_rate_is_used_if_frame_times_jump():
    data = _clip("mpegts")
    assert _decoded(data + data) == (80, 10.0)
    jump = encode_video(moving_frames(40), container="mpegts", moments=[*range(20), *range(1000, 1020)])
    assert EncodedVideo.open(jump).fps == pytest.approx(10)
    program = encode_video(
        moving_frames(40), fps=25, container="mpeg", codec="mpeg2video", moments=[*range(20), *range(1000, 1020)]
    )
    assert EncodedVideo.open(program).fps == pytest.approx(25)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_frames_are_upright(degrees, container):
    file, plain = io.BytesIO(), _clip()
    with av.open(io.BytesIO(plain)) as source, av.open(file, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    video = EncodedVideo.open(file.getvalue())
    upright = np.rot90(decode_all(plain)[[0, 20]], degrees // 90, axes=(1, 2))
    assert (video.height, video.width) == upright.shape[1:3]
    assert np.array_equal(np.stack(list(video.decode([0, 20]))), upright)


@pytest.mark.parametrize("num_streams", [64, 65])
def test_more_than_64_streams_are_refused(num_streams):
    file = io.BytesIO()
    with av.open(io.BytesIO(_clip())) as source, av.open(file, "w", format="mp4") as target:
        streams = [target.add_stream_from_template(source.streams.video[0]) for _ in range(num_streams)]
        for packet in source.demux(video=0):
            for stream in streams if packet.dts is not None else ():
                packet.stream = stream
                target.mux(packet)
    if num_streams == 64:
        assert EncodedVideo.open(file.getvalue()).num_frames
    else:
        with pytest.raises(LimitExceeded, match=r"^the container has more streams than the limit of 64, or needs more"):
            EncodedVideo.open(file.getvalue())


def test_a_preview_stream_is_ignored():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        preview, film = output.add_stream("mjpeg", rate=1), output.add_stream("libx264", rate=10)
        preview.width, preview.height, preview.pix_fmt = 32, 32, "yuvj420p"
        film.width, film.height, film.pix_fmt = 112, 84, "yuv420p"
        output.mux(preview.encode(av.VideoFrame.from_ndarray(moving_frames(1, 32, 32)[0], format="rgb24")))
        output.mux(preview.encode())
        for pixels in moving_frames(20):
            output.mux(film.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(film.encode())
    video = EncodedVideo.open(file.getvalue())
    assert (video.height, video.width, video.num_frames) == (84, 112, 20)
    assert [frame.shape for frame in video.decode([0, 19])] == [(84, 112, 3)] * 2


@pytest.mark.parametrize("codec", ["mpeg1video", "mpeg2video"])
@pytest.mark.parametrize("container", ["mpeg", "vob"])
def test_program_streams_are_decoded(container, codec):
    assert _decoded(_clip(container, codec, fps=25)) == (40, 25.0)


def test_hidden_frames_do_not_count():
    data = encode_video(moving_frames(8), container="webm", codec="libvpx")
    assert _decoded(data) == (8, 10.0)
    third = video_packets(data)[3]
    # This frame is not shown, and only other frames refer to it.
    hidden = data.replace(third, bytes([third[0] & ~0x10]) + third[1:])
    assert _decoded(hidden) == (7, 7 / 0.8)


def test_a_damaged_hevc_does_not_deadlock_the_decoder_threads():
    data = encode_video(moving_frames(6, 64, 48), codec="libx265", options={"x265-params": "log-level=none"})
    parameters = bytes.fromhex("4401c173d089")
    assert parameters in data, "the encoder did not write the picture parameter set that the test changes"
    damaged = data.replace(parameters, bytes.fromhex("4401c1739089"))
    refusals = []

    def decode():
        with pytest.raises(MediaError, match=r"the video is broken: only \d of 6 sampled frames") as refusal:
            list(EncodedVideo.open(damaged).decode(range(6)))
        refusals.append(refusal)

    with _on_threads(2):
        thread = threading.Thread(target=decode, daemon=True)
        thread.start()
        thread.join(120)
    assert refusals


@pytest.mark.parametrize("num_threads", [1, 4])
def test_frames_of_another_size_are_scaled(num_threads, monkeypatch):
    small, large = (
        encode_video(moving_frames(6, *size), container="webm", codec="libvpx") for size in ((112, 84), (224, 168))
    )
    data = remux(small, large, container="webm")
    with _on_threads(num_threads):
        video = EncodedVideo.open(data)
        frames = np.stack(list(video.decode(range(12))))
    assert (video.height, video.width, frames.shape) == (84, 112, (12, 84, 112, 3))
    assert np.array_equal(frames[:6], decode_all(small))
    halves = decode_all(large).reshape(6, 84, 2, 112, 2, 3).mean(axis=(2, 4))
    assert np.abs(frames[6:] - halves).mean() < 4


@pytest.mark.parametrize(("times", "message"), [(1, "116x84 = 9744 pixels; the limit is 9408"), (5, "broken")])
def test_frames_above_the_limit_are_not_scaled(times, message):
    frames = moving_frames(3), moving_frames(3, 116).repeat(times, 1).repeat(times, 2)
    videos = (encode_video(pixels, container="webm", codec="libvpx") for pixels in frames)
    with under(MediaCaps(max_video_pixels=9408)):
        video = EncodedVideo.open(remux(*videos, container="webm"))
    if times == 1:
        assert len(list(video.decode([0, 2]))) == 2
    # FFmpeg refuses frames that far exceed the limit; the end of the video is decoded, too.
    for indices in ([0, 5], [0, 2])[:times]:
        with pytest.raises((LimitExceeded, MediaError), match=message):
            list(video.decode(indices))


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts", "asf"])
def test_the_audio_of_a_video_is_ignored(container):
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        video, audio = output.add_stream("mpeg4", rate=10), output.add_stream("mp2", rate=44_100, layout="mono")
        video.width, video.height, video.pix_fmt = 112, 84, "yuv420p"
        for place, pixels in enumerate(moving_frames(20)):
            output.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 4410), np.int16), format="s16", layout="mono")
            samples.sample_rate, samples.pts = 44_100, 4410 * place
            output.mux(audio.encode(samples))
        output.mux(video.encode())
        output.mux(audio.encode())
    assert _decoded(file.getvalue())[0] == 20


def test_given_frames_are_returned_unchanged():
    frames = moving_frames(5)
    video = open_video(frames, None)
    assert (video.height, video.width, video.num_frames, video.fps) == (84, 112, 5, None)
    assert np.array_equal(np.stack(list(video.decode([1, 4]))), frames[[1, 4]])


def test_frames_may_be_encoded_images():
    frames = moving_frames(3)
    images = (frames[0], *(encoded(Image.fromarray(frame), "PNG") for frame in frames[1:]))
    video = open_video(images, 1.5)
    assert (video.height, video.width, video.num_frames, video.fps) == (84, 112, 3, 1.5)
    assert np.array_equal(np.stack(list(video.decode([0, 1, 2]))), frames)


def test_decoded_frames_are_not_kept():
    """Each decoded image is released, because Pillow would keep its pixels."""
    data = encoded(photograph(size=(1000, 1000)), "PNG")
    video = open_video((data,) * 20, None)
    before = psutil.Process().memory_info().rss
    kept = [frame.sum() for frame in video.decode(range(20))]
    assert len(kept) == 20
    assert psutil.Process().memory_info().rss - before < 30 << 20


@pytest.mark.parametrize(
    ("frames", "error", "message"),
    [
        ([(40, 30), (40, 30), (30, 40)], InputError, "frame 2 has 30x40 pixels, but frame 0 has 40x30; .* same size"),
        ([(40, 30), (60, 50)], LimitExceeded, "frame 1: the video has 60x50 = 3000 pixels; the limit is 2000"),
        ([(40, 30), (400, 300)], LimitExceeded, "frame 1: the image has 400x300 = 120000 pixels; the limit is 100000"),
        ([(40, 30)] * 5, LimitExceeded, "the video has 5 frames; the limit is 4"),
        ([(40, 30), b"no image"], MediaError, "frame 1: the 8 bytes cannot be read as an image"),
    ],
)
def test_caps_on_given_frames_are_checked_before_decoding(frames, error, message):
    images = [one if isinstance(one, bytes) else encoded(photograph(size=one), "PNG") for one in frames]
    with (
        under(MediaCaps(max_video_pixels=2000, max_image_pixels=100_000, max_video_frames=4)),
        pytest.raises(error, match=message),
    ):
        open_video(tuple(images), None)


def test_the_duration_of_given_frames_follows_from_their_rate():
    with under(MediaCaps(max_video_seconds=10)):
        assert open_video(moving_frames(5), 0.5).num_frames == 5
        with pytest.raises(LimitExceeded, match=r"lasts 12\.5 s; the limit is 10 s"):
            open_video(moving_frames(5), 0.4)
        with pytest.raises(LimitExceeded, match=r"lasts 10\.002 s; the limit is 10 s"):
            open_video(moving_frames(5), 0.4999)


def test_the_error_says_which_frame_is_broken():
    data = encoded(photograph(size=(40, 30)), "PNG")
    video = open_video((data, data[:-100]), None)
    with pytest.raises(MediaError, match="frame 1: the PNG image of 40x30 pixels is broken"):
        list(video.decode([0, 1]))


def test_a_rate_given_for_an_encoded_video_is_refused():
    with pytest.raises(InputError, match="sample_fps is 2, but an encoded video has its own rate"):
        open_video(encode_video(moving_frames(4)), 2.0)


def test_caps_are_checked_before_decoding():
    data = encode_video(moving_frames(30), fps=10)
    for caps, message in (
        (MediaCaps(max_video_pixels=9407), "112x84 = 9408 pixels; the limit is 9407"),
        (MediaCaps(max_video_frames=29), "30 frames; the limit is 29"),
        (MediaCaps(max_video_seconds=2.5), r"3\.0 s; the limit is 2\.5 s"),
    ):
        with under(caps), pytest.raises(LimitExceeded, match=message):
            EncodedVideo.open(data)


def test_the_decoded_pixels_of_videos_are_counted_before_decoding():
    """All videos of a request count, including skipped frames. A new request starts at zero."""
    data = encode_video(moving_frames(30), fps=10)
    caps = MediaCaps(max_request_video_pixels=9408 * 40)
    with under(caps):
        EncodedVideo.open(data).count([0, 9, 29])
        second = EncodedVideo.open(data)
        second.count([9])
        with pytest.raises(LimitExceeded, match=r"at least 385728 pixels .*; the limit is 376320"):
            second.count([0])
    with under(caps):
        EncodedVideo.open(data).count([0, 9, 29])


def test_given_frames_are_counted_as_images():
    frames = tuple(encoded(photograph(size=(40, 30)), "PNG") for _ in range(5))
    with under(MediaCaps(max_request_pixels=4800)), pytest.raises(LimitExceeded, match=r"frame 4: .* 6000 pixels"):
        open_video(frames, None)


def test_the_default_caps_allow_an_hour_of_video():
    """An hour of 1080p video at 30 frames per second is accepted, even if every frame is decoded."""
    Work(MediaCaps()).add_video(3600 * 30 * 1920 * 1080)


def test_a_video_is_decoded_under_the_caps_it_was_opened_with():
    data = encode_video(moving_frames(4), fps=10)
    with under(MediaCaps(max_video_pixels=9408)):  # the coded size is 112x96 pixels
        video = EncodedVideo.open(data)
    with under(MediaCaps(max_video_pixels=9407)):
        assert len(list(video.decode([0, 3]))) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a video",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n",
        b"ffconcat version 1.0\nfile '/etc/hostname'\n",
        b"\x00\x00\x00\x18ftypmp42" + bytes(100),
    ],
)
def test_data_without_a_video_is_refused(data):
    with pytest.raises(MediaError, match="cannot be read as a video"):
        EncodedVideo.open(data)


def test_an_unknown_codec_is_refused():
    with pytest.raises(MediaError, match="unknown codec"):
        open_video(encode_video(moving_frames(4)).replace(b"avc1", b"zzz1"), None)


def test_a_truncated_video_is_refused():
    data = encode_video(moving_frames(30), container="avi", codec="mpeg4")
    with pytest.raises(MediaError, match=r"truncated|broken|cannot be read"):
        list(EncodedVideo.open(data[: len(data) // 2]).decode([0, 29]))


def test_damaged_frames_are_refused():
    data = bytearray(encode_video(moving_frames(30)))
    start = data.index(b"mdat") + 4
    data[start : start + len(data) // 2] = bytes(len(data) // 2)
    with pytest.raises(MediaError, match=r"broken|no readable"):
        list(EncodedVideo.open(bytes(data)).decode([0, 29]))
