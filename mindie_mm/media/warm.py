"""A warm-up that runs every part of decoding once. After that, decoding opens no files and starts no threads."""

from __future__ import annotations

import encodings.cp437  # noqa: F401 - otherwise, zipfile imports this for names that are not marked as UTF-8
import io
import traceback
import wave
from collections.abc import Iterator

import av.subtitles.codeccontext  # noqa: F401 - otherwise, PyAV imports this for the first video with subtitles
import numpy as np
import numpy.ma  # otherwise, np.median imports this when it is called
import torch
from PIL import AvifImagePlugin, Image
from safetensors.torch import save as save_safetensors

from mindie_mm.errors import MediaError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.media.embeddings import read_embeddings
from mindie_mm.media.image.encoded_image import FORMATS, RESAMPLES, open_image, resize
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.rgb import BT2020, HLG, PQ, hdr_to_sdr

_MODES = ("RGB", "RGBA", "P", "1", "CMYK", "LAB", "I;16", "F")
"""Image modes that Pillow converts to RGB in different ways."""
_DEEP = ("I;16", "F")
_RATE = 16_000
_PDF = b"""%PDF-1.4
1 0 obj <</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[]>>>> endobj
2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj
3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>> endobj
4 0 obj <</Type/Font/Subtype/Type1/BaseFont/Helvetica>> endobj
5 0 obj <</Length 34>> stream
BT /F 24 Tf 9 9 Td (a text) Tj ET
endstream endobj
trailer <</Root 1 0 R>>"""


def warm_up() -> None:
    """Decode and resize media, and compute a spectrogram, on one thread. This imports all modules for these tasks.

    A locked-in process (`mindie_mm.lockdown`) cannot import modules, open files or start threads. Call this function
    before the process is locked in, or in the process that it is forked from. The function changes the process
    permanently: torch and Pillow's AVIF decoder use one thread, and torch does not use oneDNN.
    """
    torch.set_num_threads(1)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the default is a thread for each CPU
    # On aarch64, torch multiplies matrices with oneDNN, which generates machine code at run time. A locked-in process
    # is not allowed to run such code.
    torch.backends.mkldnn.set_flags(False)
    Image.init()
    for data in _images():
        pixels = open_image(data).decode()
        for resample in RESAMPLES.values():
            resize(pixels, 9, 13, resample)
    _warm_up_video()
    _warm_up_audio()
    PdfPage.open(_PDF, 0).decode()
    _warm_up_embeddings()
    try:
        open_image(b"no image")
    except MediaError as error:
        traceback.format_exception(error)


def _images() -> Iterator[bytes]:
    """Yield a small image in each format, and a TIFF in each mode."""
    image = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    for name in FORMATS:
        if name in Image.SAVE:  # Pillow may be built without AVIF
            yield _encoded(image, name)
    for mode in _MODES:
        yield _encoded(image.convert("L" if mode in _DEEP else "RGB").convert(mode), "TIFF")


def _encoded(image: Image.Image, file_format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format)
    return file.getvalue()


def _warm_up_video() -> None:
    """Decode a GIF with FFmpeg, which also decodes all other videos, and animations with Pillow. Convert HDR."""
    images = [Image.new("RGBA", (40, 30), (grey, grey, grey, grey)) for grey in (0, 99)]
    for name in ("GIF", "PNG", "WEBP"):
        file = io.BytesIO()
        images[0].save(file, name, save_all=True, append_images=images[1:], duration=100)
        video = open_video(file.getvalue(), None)
        for frame in video.decode(range(video.num_frames)):
            resize(frame, 9, 13)
    for curve in (HLG, PQ):
        hdr_to_sdr(np.zeros((64, 64, 3), np.uint16), curve, BT2020)


def _warm_up_embeddings() -> None:
    tensor, file = torch.zeros(1, 4, dtype=torch.bfloat16), io.BytesIO()
    torch.save(tensor, file)
    for data in (file.getvalue(), save_safetensors({"": tensor})):
        read_embeddings(data)


def _warm_up_audio() -> None:
    """Decode and resample half a second of silence, and compute its spectrogram."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((1, 2, 44_100, 0, "NONE", ""))
        clip.writeframes(bytes(44_100))
    samples = open_audio(file.getvalue()).decode(_RATE, _RATE)
    settings = MelSettings(_RATE, 80, 400, 160, _RATE)
    write_log_mel(samples, settings, np.empty((80, settings.num_frames(len(samples))), np.float32))
