"""Photographs, awkward images and videos that tests make or find; nothing is fetched."""

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import skimage
from PIL import Image

PHOTOGRAPHS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg")
"""Those that lie inside scikit-image's wheel."""


def photograph(name: str = "coffee.png", size: tuple[int, int] | None = None) -> Image.Image:
    """RGB, resized to (width, height) if given."""
    image = Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")
    return image if size is None else image.resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, file_format: str = "JPEG", **options: object) -> bytes:
    """The image as a file's bytes."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def moving_frames(num_frames: int, width: int = 112, height: int = 84) -> np.ndarray:
    """uint8 [frames, height, width, 3]: a window that wanders over a photograph."""
    wide = np.asarray(photograph("astronaut.png"))
    return np.stack([wide[2 * i % 128 : 2 * i % 128 + height, 3 * i : 3 * i + width] for i in range(num_frames)])


def encode_video(frames: np.ndarray, fps: int | Fraction = 10, container: str = "mp4", codec: str = "libx264") -> bytes:
    """uint8 [frames, height, width, 3] as a video file's bytes."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def decode_all(video: bytes) -> np.ndarray:
    """Every frame, uint8 [frames, height, width, 3], decoded plainly."""
    with av.open(io.BytesIO(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def jpeg_variants() -> Sequence[tuple[str, bytes]]:
    """JPEGs of many kinds with their names: subsamplings, progressive, grayscale, odd sizes, CMYK, rotated."""
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
        ("restart markers", encoded(image, restart_marker_rows=1)),
        ("kept RGB", encoded(image, keep_rgb=True)),
        ("cmyk", encoded(image.convert("CMYK"))),
        ("rotated", encoded(image, exif=exif)),
        ("the photograph's own", (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()),
        ("retina", (Path(skimage.__file__).parent / "data" / "retina.jpg").read_bytes()),
    ]
