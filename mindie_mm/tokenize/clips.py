"""Clips into which speech is cut, and their files."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import OperationalError
from mindie_mm.media.audio.cuts import SAMPLES, SPEECH_RATE
from mindie_mm.shm import ArraySpec

if TYPE_CHECKING:
    from mindie_mm.nn.family import Plan

_WHOLE = "speech.pcm"
_HEAD_BYTES = 44
"""Number of bytes before the samples of a WAV file."""


class Clips(msgspec.Struct, frozen=True, array_like=True):
    """The clips of a file of speech. They are contiguous, and the first one begins at sample 0."""

    num_samples: int
    """Length of the speech in samples at `SPEECH_RATE`."""
    starts: tuple[int, ...]
    """First sample of each clip."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the clips of a plan.

        Raise OperationalError if it is no plan of speech, because the decoder may be compromised.
        """
        spec = plan.specs.get(SAMPLES)
        clips = cls(spec.shape[0] if spec is not None else 0, (0, *plan.grid))
        is_sorted = all(start < stop for start, stop in pairwise((*clips.starts, clips.num_samples)))
        if not is_sorted or plan.specs != {SAMPLES: ArraySpec((clips.num_samples,), "int16")}:
            raise OperationalError("a decoder sent a plan that is not one of speech; send the request again")
        return clips

    @property
    def times(self) -> list[tuple[float, float]]:
        """Beginning and end of each clip in seconds."""
        bounds = pairwise((*self.starts, self.num_samples))
        return [(start / SPEECH_RATE, stop / SPEECH_RATE) for start, stop in bounds]

    @property
    def num_bytes(self) -> int:
        """Total size of the clip files in bytes."""
        return 2 * self.num_samples + _HEAD_BYTES * len(self.starts)

    @staticmethod
    def file(folder: Path, index: int) -> Path:
        """Return the file of a clip."""
        return folder / f"clip-{index}.wav"

    @contextmanager
    def opened(self, folder: Path) -> Iterator[NDArray[np.int16]]:
        """Yield an array in a file that is removed at exit, int16 [samples], so that memory need not hold it."""
        path = folder / _WHOLE
        try:
            with path.open("wb") as file:  # otherwise, a full disk would end the process with SIGBUS
                os.posix_fallocate(file.fileno(), 0, 2 * self.num_samples)
            yield np.memmap(path, np.int16, "r+", shape=(self.num_samples,))
        finally:
            path.unlink(missing_ok=True)

    def write(self, samples: NDArray[np.int16], folder: Path) -> None:
        """Write each clip of `samples`, the array of `opened`, to its file.

        Clips are written from the last to the first. Each clip is cut off the file of the array before it is written to
        its own file, so that all files together never take more than `num_bytes`.
        """
        for index, (start, stop) in reversed([*enumerate(pairwise((*self.starts, self.num_samples)))]):
            data = samples[start:stop].tobytes()
            os.truncate(folder / _WHOLE, samples.itemsize * start)
            with self.file(folder, index).open("wb") as file, wave.open(file) as written:
                written.setnchannels(1)
                written.setsampwidth(2)
                written.setframerate(SPEECH_RATE)
                written.writeframes(data)


def keep_rest(clip: Path, start_s: float) -> None:
    """Replace a clip in a file by its rest from `start_s` on."""
    with clip.open("rb") as file, wave.open(file) as whole:
        whole.setpos(round(start_s * SPEECH_RATE))
        params, data = whole.getparams(), whole.readframes(whole.getnframes())
    with clip.open("wb") as written, wave.open(written) as rest:
        rest.setparams(params)
        rest.writeframes(data)
