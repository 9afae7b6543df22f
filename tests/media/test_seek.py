"""Tests for seeking to the sampled frames of a video."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mindie_mm.media.guard.container import open_container
from mindie_mm.media.video.encoded_video import CONTAINERS, EncodedVideo
from mindie_mm.media.video.seek import Keyframes, sought
from tests.media_samples import encode_video, moving_frames, remux, with_edit

NUM_FRAMES = 96
INDICES = [0, 3, 30, 31, 31, 47, 48, 71, 95]
CODECS = {
    "h264": ("libx264", {"g": "12", "bf": "3", "x264-params": "scenecut=0"}),
    "h264 of fields": ("libx264", {"g": "12", "x264-params": "interlaced=1:bframes=2"}),
    "hevc": ("libx265", {"x265-params": "keyint=12:bframes=4:log-level=none"}),
    "hevc of open groups": (
        "libx265",
        {"x265-params": "keyint=12:min-keyint=12:open-gop=1:bframes=4:scenecut=0:log-level=none"},
    ),
    "vp8": ("libvpx", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "10"}),
    "vp9": ("libvpx-vp9", {"g": "12", "deadline": "realtime", "cpu-used": "8"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
    "mpeg2": ("mpeg2video", {"g": "12", "bf": "2"}),
    "mjpeg": ("mjpeg", {}),
}
ONLY_THE_WHOLE = {
    "h264 of open groups": ("libx264", {"g": "12", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "h264 refreshed bit by bit": ("libx264", {"x264-params": "intra-refresh=1:keyint=20:min-keyint=20:scenecut=0"}),
    "one keyframe": ("libx264", {"g": "1000", "bf": "3", "x264-params": "scenecut=0"}),
}


def clip(kind: str, container: str = "mp4", moments: list[int] | None = None) -> bytes:
    codec, options = (CODECS | ONLY_THE_WHOLE)[kind]
    return encode_video(moving_frames(NUM_FRAMES), container=container, codec=codec, options=options, moments=moments)


def num_sought(data: bytes, indices: list[int] = INDICES) -> int:
    """Assert that seeking gives the same frames as decoding the whole video.

    Return the number of frames that were found by seeking. It is 0 if the video was decoded as a whole.
    """
    video = EncodedVideo.open(data)
    indices = [index for index in indices if index < video.num_frames]
    whole = list(replace(video, keyframes=None).decode(range(video.num_frames)))
    assert all(map(np.array_equal, video.decode(indices), (whole[index] for index in indices)))
    if video.keyframes is None or not video.keyframes.spare(indices):
        return 0
    with open_container(data, CONTAINERS, 2**20) as container:
        stream = container.streams.video[0]
        return sum(1 for _ in sought(container, stream, video.keyframes, indices, len(data)))


@pytest.mark.parametrize(("container", "num_threads"), [("mp4", 1), ("matroska", 4)])
@pytest.mark.parametrize("kind", CODECS)
def test_sought_frames_equal_those_of_a_whole_decode(kind, container, num_threads):
    if (kind, container) == ("vp8", "mp4"):
        pytest.skip("MP4 cannot contain VP8")
    usual = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert num_sought(clip(kind, container)) == len(INDICES)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("kind", ["h264", "hevc of open groups", "mpeg4"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: with_edit(data, 0.25, 0.5),
        lambda data: remux(data, container="mp4", earlier=25),
        lambda data: remux(data, container="mp4", options={"movflags": "frag_keyframe+empty_moov"}),
        lambda data: remux(data, container="matroska", options={"live": "1"}),
    ],
    ids=["edited", "before zero", "fragmented", "without an index"],
)
def test_sought_frames_of_cut_and_streamed_files_equal_a_whole_decode(kind, change):
    indices = [1, 30, 47]
    assert num_sought(change(clip(kind)), indices) == len(indices)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_sought_frames_of_variable_rate_equal_a_whole_decode(container):
    moments = np.cumsum(np.random.default_rng(0).integers(1, 30, NUM_FRAMES)).tolist()
    assert num_sought(clip("h264", container, moments)) == len(INDICES)


@pytest.mark.parametrize("kind", ONLY_THE_WHOLE)
def test_a_video_without_usable_keyframes_is_decoded_whole(kind):
    assert num_sought(clip(kind)) == num_sought(clip(kind, "matroska")) == 0


@pytest.mark.parametrize("container", ["mpegts", "flv", "avi"])
def test_a_container_without_an_index_is_decoded_whole(container):
    assert num_sought(clip("h264", container)) == 0


def test_frames_near_each_other_are_not_sought():
    keyframes = Keyframes(np.arange(96), np.arange(0, 96, 12))
    assert [keyframes.spare(indices) for indices in ([0, 7, 14, 21], [0, 11], [20], [0, 30])] == [
        False,
        False,
        True,
        True,
    ]
    assert keyframes.before([0, 11, 12, 95]).tolist() == [0, 0, 12, 84]


@pytest.mark.parametrize("times", [0, 1])
def test_a_video_with_misleading_keyframes_is_decoded_whole(times):
    """A container may list ordinary frames as keyframes, or times at which no frame is shown."""
    video = EncodedVideo.open(clip("h264"))
    assert video.keyframes is not None
    misled = replace(video, keyframes=Keyframes(video.keyframes.times + times, np.arange(NUM_FRAMES)))
    assert list(misled._sought([30])) == []
    assert all(map(np.array_equal, misled.decode(INDICES), replace(video, keyframes=None).decode(INDICES)))


def test_num_decoded_counts_from_the_nearer_start():
    """`num_decoded` counts from the keyframe or from the previous sampled frame, whichever is nearer."""
    groups = Keyframes(np.arange(NUM_FRAMES), np.arange(0, NUM_FRAMES, 12))
    assert groups.num_decoded([95]) == 12
    assert groups.num_decoded([84]) == 1
    assert groups.num_decoded([0, 3, 11, 11, 14]) == 15
    assert groups.num_decoded([3, 30, 31, 95]) == 4 + 7 + 1 + 12
    assert groups.num_decoded(range(NUM_FRAMES)) == NUM_FRAMES
    assert Keyframes(np.arange(NUM_FRAMES), np.array([0])).num_decoded([3, 95]) == NUM_FRAMES
