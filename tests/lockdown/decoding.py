"""Decode samples in a sandboxed process: `python -m tests.lockdown.decoding < SAMPLES > RESULTS`.

Both files are pickles. The process imports everything and forks a sandboxed child, which decodes the samples.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import warnings
from typing import Any

import numpy as np

from mindie_mm.errors import MindieMMError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import RESAMPLES, open_image, resize
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.warm import warm_up
from mindie_mm.settings.config import MediaCaps
from tests.lockdown.children import in_locked_child
from tools.arguments import parser

MEL = MelSettings(rate=16_000, num_bins=80, window=400, hop=160, max_samples=480_000)


def digest_of(kind: str, data: bytes) -> str:
    """Return a digest of all arrays of a media file, or the repr of the error if the file is refused."""
    try:
        with under(MediaCaps()):
            arrays = {"image": _of_image, "video": _of_video, "audio": _of_audio}[kind](data)
    except MindieMMError as error:
        return repr(error)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _of_image(data: bytes) -> list[np.ndarray[Any, Any]]:
    pixels = open_image(data).decode()
    return [pixels, *(resize(pixels, 28, 56, resample) for resample in RESAMPLES.values())]


def _of_video(data: bytes) -> list[np.ndarray[Any, Any]]:
    video = open_video(data, None)
    frames = np.stack([*video.decode(range(min(video.num_frames, 20)))])
    return [frames, resize(frames, 28, 56)]


def _of_audio(data: bytes) -> list[np.ndarray[Any, Any]]:
    samples = open_audio(data).decode(MEL.rate, MEL.max_samples)
    spectrogram = np.empty((MEL.num_bins, MEL.num_frames(len(samples))), np.float32)
    write_log_mel(samples, MEL, spectrogram)
    return [samples, spectrogram]


def main() -> None:
    warnings.filterwarnings("ignore", module="PIL")
    samples = pickle.load(sys.stdin.buffer)
    warm_up()
    result = in_locked_child(lambda: [digest_of(kind, data) for kind, _, data in samples])
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
