"""Chats whose rendering by vLLM is compared with ours, as bodies of requests. Each recording creates them anew."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from tests.media_samples import encode_video

ORIENTATION, IMAGE_ID = 0x0112, 0x800D


def two_tone(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image of two colors, which takes few bytes when it is encoded."""
    image = Image.new("RGB", (width, height), (200, 40, 30))
    image.paste(
        (20, 60, 200), (width // 3, height // 3, max(width // 2, width // 3 + 1), max(height // 2, height // 3 + 1))
    )
    if mode == "RGBA":
        image.putalpha(128)
        return image
    return image.convert(mode)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def tagged(tags: dict[int, Any]) -> Image.Exif:
    exif = Image.Exif()
    exif.update(tags)
    return exif


def url(data: bytes, kind: str = "image") -> str:
    return f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"


def part(data: bytes, **extra: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}, **extra}


def chat(*media: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": [*media, {"type": "text", "text": "What is in the image?"}]}],
        **fields,
    }


SIZES = (
    *((1, 1), (28, 28), (30, 300), (56, 57), (336, 336), (640, 480), (480, 640), (1420, 720), (1275, 1650)),
    *((1000, 50), (3000, 500), (27, 449), (800, 1333), (673, 337)),
)


def image_chats() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the body of each chat about images."""
    for width, height in SIZES:
        yield f"{width}x{height}", chat(part(encoded(two_tone(width, height))))
    for turn in range(1, 9):
        exif = tagged({ORIENTATION: turn})
        yield f"orientation {turn}", chat(part(encoded(two_tone(200, 100), "JPEG", exif=exif)))
    yield "orientation in PNG", chat(part(encoded(two_tone(200, 100), exif=tagged({ORIENTATION: 6}))))
    yield "orientation 0", chat(part(encoded(two_tone(200, 100), "JPEG", exif=tagged({ORIENTATION: 0}))))
    uuid = "6f1e2a34-9a1c-4d5e-8f00-0123456789ab"
    yield "image id", chat(part(encoded(two_tone(200, 100), "JPEG", exif=tagged({IMAGE_ID: uuid}))))
    for mode in ("L", "LA", "RGBA", "P", "1", "I;16"):
        image = two_tone(120, 90, mode) if mode != "I;16" else Image.new("I;16", (120, 90), 30000)
        yield f"PNG {mode}", chat(part(encoded(image)))
    yield "PNG with a transparent color", chat(part(encoded(two_tone(120, 90), transparency=(200, 40, 30))))
    yield "PNG with a transparent entry", chat(part(encoded(two_tone(120, 90, "P"), transparency=0)))
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 2000)
    yield "PNG with a text", chat(part(encoded(two_tone(120, 90), pnginfo=text)))
    for mode in ("L", "CMYK"):
        yield f"JPEG {mode}", chat(part(encoded(two_tone(120, 90, mode), "JPEG")))
    yield "progressive JPEG", chat(part(encoded(two_tone(120, 90), "JPEG", progressive=True)))
    yield "GIF", chat(part(encoded(two_tone(120, 90, "P"), "GIF")))
    yield (
        "animated GIF",
        chat(part(encoded(two_tone(120, 90, "P"), "GIF", save_all=True, append_images=[two_tone(120, 90, "L")] * 2))),
    )
    yield "WebP", chat(part(encoded(two_tone(120, 90), "WEBP")))
    yield "WebP RGBA", chat(part(encoded(two_tone(120, 90, "RGBA"), "WEBP")))
    yield "BMP", chat(part(encoded(two_tone(30, 20), "BMP")))
    yield "TIFF", chat(part(encoded(two_tone(120, 90), "TIFF", compression="tiff_deflate")))
    yield "TIFF RGBA", chat(part(encoded(two_tone(120, 90, "RGBA"), "TIFF", compression="tiff_deflate")))
    yield "JPEG 2000", chat(part(encoded(two_tone(120, 90), "JPEG2000")))
    yield "AVIF", chat(part(encoded(two_tone(120, 90), "AVIF")))
    yield "ICO", chat(part(encoded(two_tone(48, 48, "RGBA"), "ICO")))
    yield "ICO of a bitmap", chat(part(encoded(two_tone(24, 24), "ICO", bitmap_format="bmp", sizes=[(24, 24)])))
    yield "PPM", chat(part(encoded(two_tone(50, 30), "PPM")))
    yield "PGM", chat(part(encoded(two_tone(50, 30, "L"), "PPM")))
    yield "two images", chat(part(encoded(two_tone(120, 90))), part(encoded(two_tone(300, 200, "L"))))
    yield "the same image twice", chat(part(encoded(two_tone(120, 90))), part(encoded(two_tone(120, 90))))
    small = part(encoded(two_tone(640, 480)))
    yield "uuid", chat({**small, "uuid": "front page"})
    yield "detail", chat({"type": "image_url", "image_url": {**small["image_url"], "detail": "low"}})
    yield (
        "system and turns",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Look:"}, part(encoded(two_tone(90, 120)))]},
                {"role": "assistant", "content": "A square."},
                {"role": "user", "content": [part(encoded(two_tone(56, 57))), {"type": "text", "text": "And this?"}]},
            ]
        },
    )
    yield "text", {"messages": [{"role": "user", "content": "Hello! <|im_start|> <|image_pad|>"}]}
    yield "no generation prompt", chat(small, add_generation_prompt=False)


def film(num_frames: int, fps: int | Fraction = 10, width: int = 64, height: int = 48) -> dict[str, Any]:
    """Return a part with a video of one image, which takes few bytes when it is encoded."""
    frames = np.broadcast_to(np.asarray(two_tone(width, height)), (num_frames, height, width, 3))
    return {"type": "video_url", "video_url": {"url": url(encode_video(frames, fps), "image")}}


def video_chats() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield chats about videos, for models that take videos."""
    for num_frames in (7, 30, 120, 400):
        yield f"video of {num_frames} frames", chat(film(num_frames))
    yield "video of 29.97 frames per second", chat(film(45, Fraction(30000, 1001)))
    yield "tall video", chat(film(60, 25, 32, 200))
    yield "video and image", chat(film(30), part(encoded(two_tone(120, 90))))
    yield "uuid of a video", chat({**film(30), "uuid": "front film"})


def pixel_chats() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield chats with options of images, for models whose images have any size."""
    one = part(encoded(two_tone(640, 480)))
    yield "max_pixels", chat(one, mm_processor_kwargs={"max_pixels": 50176})
    yield "min_pixels and max_pixels", chat(one, mm_processor_kwargs={"min_pixels": 401408, "max_pixels": 602112})
    yield "uuid and max_pixels", chat({**one, "uuid": "front page"}, mm_processor_kwargs={"max_pixels": 50176})
    yield "images_kwargs", chat(one, mm_processor_kwargs={"images_kwargs": {"max_pixels": 50176}})
    yield "videos_kwargs", chat(one, mm_processor_kwargs={"videos_kwargs": {"max_pixels": 50176}})
