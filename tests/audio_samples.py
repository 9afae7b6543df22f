"""Speech and tones for tests, all available without downloads."""

import io
from functools import cache

import av
import numpy as np
import soundfile
import soxr

from training.speech import DIGITS, HELD_OUT_VOICES, recorded

SPEECH_RATE = 22_050
"""Sampling rate of `speech`, which differs from the rate that models expect."""


@cache
def speech(num_digits: int = 10) -> bytes:
    """Return a WAV file (16 bits, one channel) in which one voice speaks the first of the ten digits."""
    words = [soundfile.read(recorded(word, HELD_OUT_VOICES[0]), dtype="float32") for word in DIGITS[:num_digits]]
    spoken = np.concatenate([soxr.resample(samples, rate, SPEECH_RATE) for samples, rate in words])
    return encode_audio(spoken, SPEECH_RATE)


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """Return a tone that becomes louder, with a little noise, float32 [samples] or [samples, channels].

    Each channel has a different pitch.
    """
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng([len(time), round(hertz)]).normal(0, 0.01, (len(time), channels))
    pitches = hertz * (1 + np.arange(channels))
    wave = 0.4 * np.sin(2 * np.pi * pitches * time[:, None]) * (1 - np.exp(-time[:, None])) + noise
    return np.float32(wave if channels > 1 else wave[:, 0])


def encode_audio(samples: np.ndarray, rate: int, file_format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """Encode float32 [samples] or [samples, channels] as a file with libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype=subtype)
    return file.getvalue()


def encode_with_ffmpeg(samples: np.ndarray, rate: int, container: str, codec: str, layout: str = "mono") -> bytes:
    """Encode float32 [samples] or [samples, channels] with FFmpeg, for formats that libsndfile cannot write."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        stream.format = stream.codec.audio_formats[0]
        stream.bit_rate = 96_000
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate = rate
        for piece in av.AudioResampler(stream.format, layout, rate, frame_size=stream.frame_size).resample(frame):
            output.mux(stream.encode(piece))
        output.mux(stream.encode())
    return file.getvalue()
