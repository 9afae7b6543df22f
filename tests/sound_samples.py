"""Speech and tones that tests make; nothing is fetched."""

import io
import shutil
import subprocess
from functools import cache

import av
import numpy as np
import pytest
import soundfile

SPEECH_RATE = 22_050
"""Of espeak-ng's files."""


@cache
def speech(text: str = "Seven beeps and a high tone, said the quick brown fox.", voice: str = "en") -> bytes:
    """A WAV file of spoken words, 16 bits, one channel. Skips the test where Debian's espeak-ng is absent."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng, which makes speech, is not installed")
    return subprocess.run(["espeak-ng", "-v", voice, "--stdout", text], capture_output=True, check=True).stdout


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """float32 [samples], or [samples, channels] of channels that differ: a tone that swells, over a little noise."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng([len(time), round(hertz)]).normal(0, 0.01, (len(time), channels))
    pitches = hertz * (1 + np.arange(channels))
    wave = 0.4 * np.sin(2 * np.pi * pitches * time[:, None]) * (1 - np.exp(-time[:, None])) + noise
    return np.float32(wave if channels > 1 else wave[:, 0])


def encode_sound(samples: np.ndarray, rate: int, file_format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """float32 [samples] or [samples, channels] as a file's bytes, by libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype=subtype)
    return file.getvalue()


def encode_with_ffmpeg(samples: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    """float32 [samples] as a file's bytes, by FFmpeg: what libsndfile does not write."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        stream.format = stream.codec.audio_formats[0]
        stream.bit_rate = 96_000
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        for piece in av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size).resample(frame):
            output.mux(stream.encode(piece))
        output.mux(stream.encode())
    return file.getvalue()
