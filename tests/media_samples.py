"""Photographs, unusual images and videos for tests, all available without downloads."""

import io
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import skimage
from PIL import Image

PHOTOGRAPHS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg")
"""Photographs in the wheel of scikit-image."""
PIXEL_FORMATS = {"mjpeg": "yuvj420p", "gif": "rgb8", "qtrle": "rgb24", "cinepak": "rgb24"}
"""Pixel formats of encoders that do not accept yuv420p."""


def photograph(name: str = "coffee.png", size: tuple[int, int] | None = None) -> Image.Image:
    """Return an RGB photograph. If `size` (width, height) is given, resize the photograph."""
    image = Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")
    return image if size is None else image.resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, file_format: str = "JPEG", **options: object) -> bytes:
    """Return the image as the bytes of a file in `file_format`."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def load_image(data: bytes) -> np.ndarray:
    """Return the pixels of the image that `transformers.image_utils.load_image` returns."""
    from transformers.image_utils import load_image

    with io.BytesIO(data) as file:
        return np.asarray(load_image(Image.open(file)))


def moving_frames(num_frames: int, width: int = 112, height: int = 84) -> np.ndarray:
    """Return the frames of a window that moves across a photograph, uint8 [frames, height, width, 3]."""
    wide = np.asarray(photograph("astronaut.png"))
    return np.stack([wide[2 * i % 128 : 2 * i % 128 + height, 3 * i : 3 * i + width] for i in range(num_frames)])


def encode_video(
    frames: np.ndarray,
    fps: int | Fraction = 10,
    container: str = "mp4",
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    moments: Sequence[int] | None = None,
) -> bytes:
    """Encode uint8 [frames, height, width, 3] as a video file.

    `options` are options of the encoder. `moments` are the times of the frames in units of 1 / fps s.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = PIXEL_FORMATS.get(codec, "yuv420p")
        for place, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if moments is not None:
                frame.pts, frame.time_base = moments[place], 1 / Fraction(fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    if codec == "libsvtav1" and not os.geteuid():
        # The encoder of root gives this thread a real-time priority. Other processes would starve while a test waits.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return file.getvalue()


def video_packets(video: bytes) -> list[bytes]:
    """Return the encoded packets in the order of the file."""
    with av.open(io.BytesIO(video)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def remux(
    *videos: bytes, container: str, start: int = 0, earlier: int = 0, options: dict[str, str] | None = None
) -> bytes:
    """Concatenate `videos`, which have the same codec and rate, and leave out the first `start` packets of each.

    Move all timestamps back by `earlier` frames, even below 0, as `ffmpeg -ss TIME -i FILE -c copy` does.
    """
    with tempfile.NamedTemporaryFile() as file, ExitStack() as opened:
        inputs = [opened.enter_context(av.open(io.BytesIO(video))) for video in videos]
        output = opened.enter_context(av.open(file.name, "w", format=container, options=options or {}))
        stream = output.add_stream_from_template(inputs[0].streams.video[0])
        num_packets = 0
        for source in inputs:
            frame = int(1 / (source.streams.video[0].average_rate * source.streams.video[0].time_base))
            moved = (num_packets - earlier) * frame
            for place, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
                num_packets += 1
                if place >= start:
                    packet.pts, packet.dts, packet.stream = packet.pts + moved, packet.dts + moved, stream
                    output.mux(packet)
        output.close()
        return Path(file.name).read_bytes()


def with_edit(mp4: bytes, skipped: float, shown: float) -> bytes:
    """Change the single edit of an MP4: skip the fraction `skipped` of the video, then show the fraction `shown`."""
    at = mp4.index(b"elst") + 12
    duration, begin = struct.unpack_from(">Ii", mp4, at)
    with av.open(io.BytesIO(mp4)) as container:
        length = container.streams.video[0].duration
    return mp4[:at] + struct.pack(">Ii", int(duration * shown), begin + int(length * skipped)) + mp4[at + 8 :]


def decode_all(video: bytes) -> np.ndarray:
    """Return every frame that FFmpeg decodes, uint8 [frames, height, width, 3]."""
    with av.open(io.BytesIO(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def jpeg_variants() -> Sequence[tuple[str, bytes]]:
    """Return JPEGs with different subsamplings, color modes, sizes, orientations and encodings, each with a name."""
    image = photograph("coffee.png", (301, 203))
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        *((f"subsampling {s}", encoded(image, quality=85, subsampling=s)) for s in (0, 1, 2)),
        ("progressive", encoded(image, quality=80, progressive=True)),
        ("grayscale", encoded(image.convert("L"))),
        ("progressive grayscale", encoded(image.convert("L"), progressive=True)),
        ("quality 1", encoded(image, quality=1)),
        ("quality 100", encoded(image, quality=100)),
        ("one pixel", encoded(image.resize((1, 1)))),
        ("one row", encoded(image.resize((77, 1)))),
        ("17x33", encoded(image.resize((17, 33)), quality=90)),
        ("subsampling 4:1:1", _resampled(image, 4, 1)),
        ("subsampling 4:4:1", _resampled(image, 1, 4)),
        ("restart markers", encoded(image, restart_marker_rows=1)),
        ("kept RGB", encoded(image, keep_rgb=True)),
        ("cmyk", encoded(image.convert("CMYK"))),
        ("rotated", encoded(image, exif=exif)),
        ("the photograph's own", (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()),
        ("retina", (Path(skimage.__file__).parent / "data" / "retina.jpg").read_bytes()),
    ]


def _resampled(image: Image.Image, across: int, down: int) -> bytes:
    """Return a JPEG with `across` by `down` luma blocks per chroma block, made by patching the header of a 2x2 JPEG."""
    data = encoded(image.resize((16, 16)), quality=85, subsampling=2)
    # The frame header contains height, width, number of components, and each component's id, sampling and table.
    at = data.index(b"\xff\xc0") + 5
    size = struct.pack(">HH", 8 * down, 8 * across)
    return data[:at] + size + data[at + 4 : at + 6] + bytes([across << 4 | down]) + data[at + 7 :]


def raw_pdf(page: str, contents: str = "", more: str = "") -> bytes:
    """Return a PDF of one page.

    `page` contains further entries of the page's dictionary. `more` contains further objects, whose numbers start at 5.
    """
    return (
        "%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj\n"
        f"3 0 obj <</Type/Page/Parent 2 0 R/Contents 4 0 R{page}>> endobj\n"
        f"4 0 obj <</Length {len(contents)}>> stream\n{contents}\nendstream endobj\n{more}trailer <</Root 1 0 R>>"
    ).encode()
