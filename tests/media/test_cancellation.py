"""Tests for canceled decoding."""

import threading

import pytest

from mindie_mm.errors import RequestAborted
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.guard import cancellation
from mindie_mm.media.video.encoded_video import open_video
from tests.audio_samples import encode_audio, tone
from tests.media_samples import encode_video, moving_frames


@pytest.mark.parametrize("form", ["encoded", "handed in"])
def test_a_cancelled_video_stops_between_two_frames(form: str) -> None:
    frames, given_up = moving_frames(30), threading.Event()
    video = open_video(encode_video(frames) if form == "encoded" else frames, None)
    with cancellation.until(given_up):
        decoded = video.decode(range(30))
        next(decoded)
        given_up.set()
        with pytest.raises(RequestAborted, match="was aborted"):
            list(decoded)
    assert len(list(video.decode(range(30)))) == 30


def test_a_cancelled_audio_clip_stops() -> None:
    clip, given_up = open_audio(encode_audio(tone(1.0), 16_000)), threading.Event()
    given_up.set()
    with cancellation.until(given_up), pytest.raises(RequestAborted, match="was aborted"):
        clip.decode(16_000, 16_000)


def test_cancellation_does_not_affect_another_thread() -> None:
    given_up = threading.Event()
    given_up.set()
    with cancellation.until(given_up):
        other = threading.Thread(target=cancellation.check)
        other.start()
        other.join()
        with pytest.raises(RequestAborted):
            cancellation.check()
