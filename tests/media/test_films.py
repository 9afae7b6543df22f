"""Tests of films with tracks that cannot be decoded, cover art, transparency and HDR, and of other kinds of videos."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition

from mindie_mm.errors import MediaError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.video.encoded_video import EncodedVideo, open_video
from tests.media_samples import decode_all, moving_frames, photograph
from tests.sound_samples import tone

CASES = Path(__file__).parents[1] / "cases/films"


def case(name: str) -> bytes:
    return (CASES / name).read_bytes()


def frames_of(data: bytes) -> np.ndarray:
    video = open_video(data, None)
    return np.stack(list(video.decode(range(video.num_frames))))


def test_a_track_that_nobody_can_decode_is_passed_over():
    unknown = EncodedVideo.open(case("second_track_unknown.mov"))
    assert (unknown.num_frames, unknown.fps, unknown.width) == (50, 25.0, 96)
    assert np.array_equal(frames_of(case("second_track_unknown.mov")), decode_all(case("moving.mp4")))


def test_a_larger_track_whose_codec_is_not_allowed_is_passed_over():
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as output:
        streams = [output.add_stream("libx264", rate=10) for _ in range(2)]
        for stream, scale in zip(streams, (1, 2), strict=True):
            stream.width, stream.height, stream.pix_fmt = 112 * scale, 84 * scale, "yuv420p"
        streams[0].disposition, streams[1].disposition = Disposition(0), Disposition.default
        for pixels in moving_frames(8):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            for stream in streams:
                output.mux(stream.encode(frame.reformat(stream.width, stream.height)))
        for stream in streams:
            output.mux(stream.encode())
    data = file.getvalue()
    assert frames_of(data).shape == (8, 168, 224, 3)
    at = data.rindex(b"avc1")
    assert frames_of(data[:at] + b"icod" + data[at + 4 :]).shape == (8, 84, 112, 3)  # Apple's intermediate codec


def test_cover_art_is_no_video():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        sound, cover = output.add_stream("aac", rate=16_000, layout="mono"), output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(tone(1.0)[None], format="flt", layout="mono")
        frame.sample_rate = 16_000
        for piece in av.AudioResampler("fltp", "mono", 16_000, frame_size=1024).resample(frame):
            output.mux(sound.encode(piece))
        output.mux(sound.encode())
        output.mux(cover.encode(av.VideoFrame.from_image(photograph(size=(64, 64)))))
        output.mux(cover.encode())
    with pytest.raises(MediaError, match="the file has no video stream, only cover art"):
        open_video(file.getvalue(), None)
    assert len(open_audio(file.getvalue()).decode(16_000, 20_000)) >= 16_000
