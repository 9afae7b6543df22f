"""Tests for films with tracks that cannot be decoded, cover art, transparency and HDR, and other kinds of videos."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import FORMATS, open_image
from mindie_mm.media.video.encoded_video import EncodedVideo, open_video
from mindie_mm.media.video.rgb import HLG, PQ, hdr_to_sdr
from mindie_mm.settings.config import MediaCaps
from tests.audio_samples import tone
from tests.heic_samples import coded, grid_head, heif, size_of, tiled
from tests.media_samples import decode_all, encode_video, encoded, moving_frames, photograph

CASES = Path(__file__).parents[1] / "cases/films"


FORMATS_WITH_ALPHA = (
    ("mov", "qtrle", "argb"),
    ("mov", "prores_ks", "yuva444p10le"),
    ("mov", "rawvideo", "argb"),
    ("matroska", "ffv1", "bgra"),
    ("matroska", "ffv1", "yuva420p"),
    ("webm", "libvpx", "yuva420p"),
    ("matroska", "libvpx", "yuva420p"),
    ("webm", "libvpx-vp9", "yuva420p"),
)
"""Containers, encoders and pixel formats of videos with an alpha channel."""


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
        audio, cover = output.add_stream("aac", rate=16_000, layout="mono"), output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(tone(1.0)[None], format="flt", layout="mono")
        frame.sample_rate = 16_000
        for piece in av.AudioResampler("fltp", "mono", 16_000, frame_size=1024).resample(frame):
            output.mux(audio.encode(piece))
        output.mux(audio.encode())
        output.mux(cover.encode(av.VideoFrame.from_image(photograph(size=(64, 64)))))
        output.mux(cover.encode())
    with pytest.raises(MediaError, match="the file has no video stream, only cover art"):
        open_video(file.getvalue(), None)
    assert len(open_audio(file.getvalue()).decode(16_000, 20_000)) >= 16_000


def test_transparent_pixels_of_a_film_show_the_background():
    assert np.array_equal(frames_of(case("transparent.mov")), frames_of(case("on_white.mov")))
    with under(MediaCaps(rgba_background_color=(0, 128, 0))):
        assert frames_of(case("transparent.mov"))[0, 0, 0].tolist() == [0, 128, 0]


def moving_square(opaque: int = 255) -> np.ndarray:
    """Return frames of a red square that moves over transparent black, uint8 [12, 96, 96, 4]."""
    frames = np.zeros((12, 96, 96, 4), np.uint8)
    for i, frame in enumerate(frames):
        frame[24:72, 4 * i : 4 * i + 48] = [220, 40, 40, opaque]
    return frames


def encode_rgba(frames: np.ndarray, container: str, codec: str, pixel_format: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10, options={"auto-alt-ref": "0"} if codec == "libvpx" else {})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixel_format
        for rgba in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba")))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(("container", "codec", "pixel_format"), FORMATS_WITH_ALPHA)
def test_every_format_with_alpha_shows_the_background(container, codec, pixel_format):
    data = encode_rgba(moving_square(), container, codec, pixel_format)
    video = open_video(data, None)
    assert (video.num_frames, video.fps) == (12, 10.0)
    (frame,) = video.decode([9])
    assert np.abs(frame[4:92, 2:30].astype(int) - 255).max() <= 2, "the background is white"
    assert np.abs(frame[30:66, 42:78].astype(int) - [220, 40, 40]).max() <= 12, "the square is red"
    assert np.array_equal(frame, frames_of(data)[9])


def test_the_alpha_track_counts_as_decoded_pixels():
    data = encode_rgba(moving_square(), "webm", "libvpx", "yuva420p")
    with under(MediaCaps()) as work:
        video = open_video(data, None)
        video.count([11])
    assert work.video_pixels >= 2 * 12 * 96 * 96


@pytest.mark.parametrize("codec", ["rawvideo", "huffyuv"])
def test_an_alpha_channel_that_is_empty_is_unused(codec):
    """Screen recorders write pixels of 32 bits, of which 8 are unused."""
    square = frames_of(encode_rgba(moving_square(opaque=0), "avi", codec, "bgra"))[9]
    assert (square[0, 0].tolist(), square[48, 60].tolist()) == ([0, 0, 0], [220, 40, 40])


@pytest.mark.parametrize(
    ("container", "codec", "pixel_format"),
    [("avi", "rawvideo", "bgra"), ("avi", "huffyuv", "bgra"), ("mov", "rawvideo", "argb"), ("mov", "qtrle", "argb")],
)
def test_an_alpha_channel_is_used_in_all_frames_or_in_none(container, codec, pixel_format):
    fading_in = moving_square()
    fading_in[:6] = 0
    data = encode_rgba(fading_in, container, codec, pixel_format)
    assert (frames_of(data)[:, 0, 0] == 255).all(), "the background is white from the first frame on"
    (first,) = open_video(data, None).decode([0])
    assert (first == 255).all()


def test_the_search_for_alpha_counts_as_decoded_pixels():
    data = encode_rgba(moving_square(opaque=0), "avi", "rawvideo", "bgra")
    with under(MediaCaps(max_request_video_pixels=12 * 96 * 96)):
        video = open_video(data, None)
        video.count([11])
        with pytest.raises(LimitExceeded, match="would be decoded"):
            list(video.decode([11]))


def test_hlg_has_nearly_the_colors_of_the_same_film_in_sdr():
    sdr, hdr = (frames_of(case(name)).astype(int) for name in ("sdr_orange.mp4", "hlg_orange.mp4"))
    assert np.abs(sdr - hdr).mean() < 10
    is_orange = sdr[..., 2] < 60
    assert np.abs(hdr[is_orange].mean(axis=0) - [248, 163, 20]).max() < 20
    assert hdr[~is_orange].min(axis=-1).mean() > 240, "white is white"
    with under(MediaCaps(hdr_to_sdr=False)):
        plain = frames_of(case("hlg_orange.mp4"))
    assert np.array_equal(plain, decode_all(case("hlg_orange.mp4")))
    assert plain[0, 2, 2].tolist() == [189, 189, 189]


@pytest.mark.parametrize(
    ("curve", "value", "shown"),
    [(HLG, 0, 0), (HLG, 0.75, 248), (HLG, 1, 255), (PQ, 0, 0), (PQ, 0.5081, 179), (PQ, 0.5807, 248), (PQ, 0.7518, 255)],
)
def test_hdr_values_become_sdr_values(curve, value, shown):
    """In PQ, 0.5081 is 100, 0.5807 is 203 and 0.7518 is 1000 cd/m2. In HLG, 0.75 is diffuse white."""
    pixels = np.full((2, 3, 3), round(value * 65535), np.uint16)
    assert np.abs(hdr_to_sdr(pixels, curve, 9).astype(int) - shown).max() <= 1


@pytest.mark.parametrize("curve", [HLG, PQ])
def test_hdr_grows_with_light_and_keeps_the_primaries(curve):
    ramp = np.repeat(np.linspace(0, 65535, 3000).astype(np.uint16)[None, :, None], 3, axis=2)
    assert (np.diff(hdr_to_sdr(ramp, curve, 9)[0, :, 1].astype(int)) >= 0).all()
    red = np.zeros((1, 1, 3), np.uint16)
    red[..., 0] = 40_000
    assert hdr_to_sdr(red, curve, 9)[0, 0, 1:].tolist() == [0, 0]
    assert hdr_to_sdr(red, curve, 9)[0, 0, 0] > hdr_to_sdr(red, curve, 1)[0, 0, 0], "BT.2020 is wider"


def test_a_stream_without_a_container_has_25_frames_per_second():
    video = EncodedVideo.open(case("camera.h264"))
    assert (video.num_frames, video.fps) == (50, 25.0)
    assert np.array_equal(frames_of(case("camera.h264")), decode_all(case("moving.mp4")))
    hevc = EncodedVideo.open(encode_video(moving_frames(9), container="hevc", codec="libx265"))
    assert (hevc.num_frames, hevc.fps) == (9, 25.0)


def test_a_recording_of_a_camera_may_begin_at_any_keyframe_and_end_anywhere():
    data = encode_video(moving_frames(40), container="h264", options={"g": "10"})
    second = data.index(b"\0\0\1\x67", 100)  # the parameter set before the second keyframe
    assert 28 <= EncodedVideo.open(data[second:-50]).num_frames <= 30


def test_an_animated_png_is_a_video():
    video = open_video(case("animation.png"), None)
    assert (video.num_frames, video.fps, video.height, video.width) == (50, 25.0, 96, 96)
    assert np.array_equal(frames_of(case("animation.png")), decode_all(case("moving.mp4")))
    assert np.array_equal(next(iter(video.decode([31]))), frames_of(case("animation.png"))[31])


def animate(frames: np.ndarray, file_format: str, **options: object) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    images[0].save(file, file_format, save_all=True, append_images=images[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize(("file_format", "options"), [("PNG", {}), ("WEBP", {"lossless": True, "exact": True})])
def test_animations_show_the_background_and_their_mean_rate(file_format, options):
    square = moving_square()
    data = animate(square, file_format, duration=[100] * 6 + [300] * 6, **options)
    video = open_video(data, None)
    assert (video.num_frames, video.fps) == (12, 5.0)
    expected = np.where(square[..., 3:] == 0, 255, square[..., :3])
    assert np.array_equal(np.stack(list(video.decode(range(12)))), expected)
    assert np.array_equal(next(iter(video.decode([9]))), expected[9])


def test_the_default_image_of_a_png_is_no_frame():
    square = moving_square()
    data = animate(square, "PNG", duration=100, default_image=True)
    video = open_video(data, None)
    assert (video.num_frames, video.fps) == (11, 10.0)
    assert np.array_equal(next(iter(video.decode([0]))), np.where(square[1, ..., 3:] == 0, 255, square[1, ..., :3]))


LARGE = photograph("chelsea.png", (128, 128))
TILES = [np.asarray(LARGE.crop((x, y, x + 64, y + 64))) for y in (0, 64) for x in (0, 64)]
STILL = {name: encoded(LARGE, "TIFF" if name == "HEIC" else name) for name in (*FORMATS, "MPO")} | {
    "HEIC": heif([coded(np.asarray(LARGE))]),
    "HEIC of another brand": heif([coded(np.asarray(LARGE))], brand=b"mif1"),
    "tiled HEIC": tiled(TILES, grid_head(2, 2, 128, 128), size_of(128, 128)),
    "photo.heic": (CASES.parent / "media3/photo.heic").read_bytes(),
    "transparent WEBP": encoded(LARGE.convert("RGBA"), "WEBP", lossless=True),
}
"""A still image in every supported format."""


@pytest.mark.parametrize("name", STILL)
def test_a_still_image_is_no_video(name):
    with pytest.raises(MediaError, match=r"a still image, not a video; send it as an image"):
        open_video(STILL[name], None)
    open_image(STILL[name])


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_animated_image_is_a_video(file_format):
    two = encoded(LARGE, file_format, save_all=True, append_images=[LARGE.rotate(90)], duration=100)
    assert frames_of(two).shape == (2, 128, 128, 3)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_a_truncated_or_broken_animation_is_refused(file_format):
    data = animate(moving_square(), file_format, duration=100)
    with pytest.raises(MediaError):
        frames_of(data[: len(data) // 2])
    noise = bytearray(data)
    noise[len(data) * 3 // 4 :: 7] = bytes(len(noise[len(data) * 3 // 4 :: 7]))
    with pytest.raises(MediaError):
        frames_of(bytes(noise))


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (MediaCaps(max_video_frames=11), r"12 frames; the limit is 11"),
        (MediaCaps(max_video_seconds=1), r"lasts 1\.2 s; the limit is 1 s"),
        (MediaCaps(max_video_pixels=9000), r"96x96 = 9216 pixels; the limit is 9000"),
        (MediaCaps(max_request_pixels=12 * 96 * 96), r"--max-request-pixels"),
    ],
)
@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_animations_have_the_limits_of_videos(caps, message, file_format):
    data = animate(moving_square(), file_format, duration=100)
    with under(caps), pytest.raises(LimitExceeded, match=message):
        open_video(data, None).count([11])
