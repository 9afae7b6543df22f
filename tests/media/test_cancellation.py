"""Decoding that nobody waits for any more."""

from collections.abc import Iterator

import pytest

from mindie_mm.errors import RequestAborted
from mindie_mm.media import cancellation
from mindie_mm.media.audio import open_audio
from mindie_mm.media.video import open_video
from tests.media_samples import encode_video, moving_frames
from tests.sound_samples import encode_sound, tone


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    yield
    cancellation.begin()


@pytest.mark.parametrize("form", ["encoded", "handed in"])
def test_of_a_video_between_two_frames(form: str) -> None:
    frames = moving_frames(30)
    video = open_video(encode_video(frames) if form == "encoded" else frames, None)
    decoded = video.decode(range(30))
    next(decoded)
    cancellation.cancel()
    with pytest.raises(RequestAborted, match="given up"):
        list(decoded)
    cancellation.begin()
    assert len(list(video.decode(range(30)))) == 30


def test_of_a_sound() -> None:
    clip = open_audio(encode_sound(tone(1.0), 16_000))
    cancellation.cancel()
    with pytest.raises(RequestAborted, match="given up"):
        clip.decode(16_000, 16_000)
