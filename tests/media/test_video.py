import numpy as np
import pytest

from mindie_mm.config import MediaCaps
from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.caps import under
from mindie_mm.media.video import EncodedVideo, open_video
from tests.media_samples import decode_all, encode_video, moving_frames

CONTAINERS = [
    ("mp4", "libx264"),
    ("mp4", "mpeg4"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_sampled_frames_are_those_of_a_plain_decode(container, codec):
    data = encode_video(moving_frames(24), fps=8, container=container, codec=codec)
    video = EncodedVideo.open(data)
    assert (video.height, video.width, video.num_frames, video.fps) == (84, 112, 24, 8.0)
    indices = [0, 5, 6, 17, 23]
    assert np.array_equal(np.stack(list(video.decode(indices))), decode_all(data)[indices])


def test_frames_are_passed_on():
    frames = moving_frames(5)
    video = open_video(frames)
    assert (video.height, video.width, video.num_frames, video.fps) == (84, 112, 5, None)
    assert np.array_equal(np.stack(list(video.decode([1, 4]))), frames[[1, 4]])


def test_caps_hold_before_decoding():
    data = encode_video(moving_frames(30), fps=10)
    for caps, message in (
        (MediaCaps(max_video_pixels=9407), "112x84 = 9408 pixels; the limit is 9407"),
        (MediaCaps(max_video_frames=29), "30 frames; the limit is 29"),
        (MediaCaps(max_video_seconds=2.5), r"3\.0 s; the limit is 2\.5 s"),
    ):
        with under(caps), pytest.raises(LimitExceeded, match=message):
            EncodedVideo.open(data)


def test_decoding_is_under_the_caps_of_opening():
    data = encode_video(moving_frames(4), fps=10)
    with under(MediaCaps(max_video_pixels=9408)):  # 112x96 are coded
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
def test_what_is_no_video_is_refused(data):
    with pytest.raises(MediaError, match="no readable video"):
        EncodedVideo.open(data)


def test_an_unknown_codec_is_refused():
    with pytest.raises(MediaError, match="codec that is not known"):
        open_video(encode_video(moving_frames(4)).replace(b"avc1", b"zzz1"))


def test_a_truncated_video_is_refused():
    data = encode_video(moving_frames(30), container="avi", codec="mpeg4")
    with pytest.raises(MediaError, match=r"truncated|broken|no readable"):
        list(EncodedVideo.open(data[: len(data) // 2]).decode([0, 29]))


def test_damaged_frames_are_refused():
    data = bytearray(encode_video(moving_frames(30)))
    start = data.index(b"mdat") + 4
    data[start : start + len(data) // 2] = bytes(len(data) // 2)
    with pytest.raises(MediaError, match=r"broken|no readable"):
        list(EncodedVideo.open(bytes(data)).decode([0, 29]))
