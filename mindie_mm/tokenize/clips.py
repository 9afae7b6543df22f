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


class Clips(msgspec.Struct, frozen=True, array_like=True):
    """The clips of a file of speech. They are contiguous, and the first one begins at sample 0."""

    num_samples: int
    """Length of the speech in samples at `SPEECH_RATE`."""
    starts: tuple[int, ...]
    """First sample of each clip."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the clips of a plan. Raise OperationalError if the decoder, which may be compromised, sent another."""
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
        """Number of bytes of the samples of all clips."""
        return 2 * self.num_samples

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
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
            yield np.memmap(path, np.int16, "r+", shape=(self.num_samples,))
        finally:
            path.unlink(missing_ok=True)

    def write(self, samples: NDArray[np.int16], folder: Path) -> None:
        """Write each clip of `samples`, int16 [samples], to its file."""
        for index, (start, stop) in enumerate(pairwise((*self.starts, self.num_samples))):
            with self.file(folder, index).open("wb") as file, wave.open(file) as written:
                written.setnchannels(1)
                written.setsampwidth(2)
                written.setframerate(SPEECH_RATE)
                written.writeframes(np.ascontiguousarray(samples[start:stop]).data)


def rest_of(clip: Path, start_s: float) -> Path:
    """Write the rest of a clip from `start_s` on to a file beside it, and return the file."""
    rest = clip.with_name(f"{clip.stem}-from-{round(start_s * SPEECH_RATE)}.wav")
    with clip.open("rb") as source, wave.open(source) as whole, rest.open("wb") as file, wave.open(file) as written:
        whole.setpos(round(start_s * SPEECH_RATE))
        written.setparams(whole.getparams())
        written.writeframes(whole.readframes(whole.getnframes()))
    return rest
