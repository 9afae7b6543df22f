"""Tests for MPEG transport streams with various packet layouts, and the limit on lists of programs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.container import open_container
from mindie_mm.media.guard.transport import MAX_LISTS, whole_packets
from mindie_mm.media.video.encoded_video import CONTAINERS, EncodedVideo
from tests.media_samples import encode_video, moving_frames
from tests.transport_samples import EMPTY, PACKET_BYTES, begun, listed, lists, spaced

MESSAGE = f"^the container changes its program list more often than the limit of {MAX_LISTS} times$"


@pytest.fixture(scope="module")
def clip() -> bytes:
    return encode_video(moving_frames(6), fps=5, container="mpegts")


LAID: dict[str, Callable[[bytes], bytes]] = {
    "with times": lambda stream: spaced(stream, before=b"\0\0\0\1"),
    "with parity": lambda stream: spaced(stream, behind=bytes(16)),
    "from the middle of a packet": lambda stream: b"G" + bytes(60) + stream,
    "with junk behind half of them": lambda stream: half(stream) + b"junk!" + stream[len(half(stream)) :],
}


def half(stream: bytes) -> bytes:
    return stream[: len(stream) // PACKET_BYTES // 2 * PACKET_BYTES]


@pytest.mark.parametrize("lay", LAID.values(), ids=LAID)
def test_every_packet_layout_decodes_to_the_same_frames(clip: bytes, lay: Callable[[bytes], bytes]) -> None:
    video, laid = EncodedVideo.open(clip), EncodedVideo.open(lay(clip))
    assert (laid.num_frames, laid.fps, laid.height, laid.width) == (6, video.fps, video.height, video.width)
    assert np.array_equal(list(laid.decode(range(6))), list(video.decode(range(6))))


def test_whole_packets_strips_regular_layouts_only(clip: bytes) -> None:
    assert whole_packets(clip) is clip
    *in_order, out_of_order = (lay(clip) for lay in LAID.values())
    assert [whole_packets(laid) for laid in in_order] == [clip] * 3
    assert whole_packets(out_of_order) is out_of_order


@pytest.mark.parametrize("lay", LAID.values(), ids=LAID)
def test_too_many_program_lists_are_refused(clip: bytes, lay: Callable[[bytes], bytes]) -> None:
    own = clip[clip.index(b"G\x40\0") :][:PACKET_BYTES]
    with open_container(lay(clip + lists(MAX_LISTS - 2) + own * 1000), CONTAINERS, 10**6) as container:
        assert container.streams.video
    for flood in (lists(MAX_LISTS), lists(2) * (MAX_LISTS // 2)):
        for stream in (clip + flood, flood + clip):
            with pytest.raises(LimitExceeded, match=MESSAGE):
                EncodedVideo.open(lay(stream))


def test_program_lists_inside_other_packets_do_not_count(clip: bytes) -> None:
    filled = b"".join(EMPTY[:4] + listed(range(at, at + 40))[: PACKET_BYTES - 4] for at in range(2 * MAX_LISTS))
    assert EncodedVideo.open(clip + filled).num_frames == 6
    with pytest.raises(LimitExceeded, match=MESSAGE):
        whole_packets(spaced(filled, behind=b"junk!"))


def test_streams_that_appear_late_are_counted(clip: bytes) -> None:
    with pytest.raises(
        LimitExceeded, match=r"^the container has more streams than the limit of 64, or needs more memory"
    ):
        EncodedVideo.open(clip + 60_000 * EMPTY + begun(70))
