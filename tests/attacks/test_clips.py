"""Attacks with videos and audio clips that unpack to gigabytes, are broken, or refer to other files."""

from __future__ import annotations

import pytest

from mindie_mm.media.video.encoded_video import CONTAINERS
from tests.attacks import clips
from tests.attacks.clips import Make
from tests.attacks.conftest import CHAT, Attacked, asking, with_bytes

NO_VIDEO = f"bytes cannot be read as a video (supported formats: {', '.join(CONTAINERS)}, animated PNG and WebP)"


def named(cases: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", cases.values(), ids=cases.keys())


@named(clips.NAMING)
def test_files_that_name_other_files_are_refused(attacked: Attacked, make: Make) -> None:
    message = attacked.refused(with_bytes("video", make()))
    assert NO_VIDEO in message or "has no video stream" in message
    message = attacked.refused(with_bytes("audio", make()))
    assert "bytes cannot be read as audio" in message or "has no audio stream" in message


@named(clips.VIDEO_BOMBS)
def test_video_bombs_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("video", make()), "media item 0 (video): the ")


@named(clips.BROKEN_VIDEOS)
def test_broken_videos_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("video", make()), "media item 0 (video): the ")


@named(clips.AUDIO_BOMBS)
def test_audio_bombs_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("audio", make()), "media item 0 (audio): the ")


@named(clips.BROKEN_AUDIO)
def test_broken_audio_clips_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("audio", make()), "media item 0 (audio): the ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 2**20}, "num_frames is 1048576; the checkpoint's limit is 768"),
        ({"num_frames": 2**40}, "num_frames=1099511627776 must be from 1 to 1048576"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": -1}, "num_frames=-1"),
        ({"num_frames": True}, "num_frames=True must be an integer"),
        ({"fps": 1e9}, "fps=1000000000.0 must be above 1e-06 and at most 1000"),
        ({"fps": 0}, "fps=0"),
        ({"fps": 1, "num_frames": 2}, "give only one"),
        ({"max_pixels": 2**40}, "max_pixels=1099511627776"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels 5 is above max_pixels 4"),
        ({"speed": 9}, "unknown key 'speed'"),
    ],
)
def test_invalid_options_of_a_video_are_refused(attacked: Attacked, options: dict[str, object], message: str) -> None:
    url = with_bytes("video", clips.video())["messages"][0]["content"][0]["video_url"]["url"]
    attacked.refused(asking("video", {"url": url, **options}), message)


def test_a_long_audio_clip_is_refused_before_it_is_decoded(attacked: Attacked) -> None:
    """The file is small but has 110 MB of samples, which is more than the model hears."""
    body = with_bytes("audio", clips.long_audio())
    answer, _, further = attacked.watched.during(lambda: attacked.http.post(CHAT, json=body))
    assert answer.status_code == 400, answer.text
    assert "lasts 600.0 s; the limit of this model is 30 s" in answer.text
    assert further < 64 * 2**20
    attacked.is_right()
